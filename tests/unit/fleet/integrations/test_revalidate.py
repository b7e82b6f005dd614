"""Test revalidation: an accepted fleet is measured again, except hosts that are in use, for example by a Slurm job.

The tests cover draining and resuming nodes in the scheduler, the records of hosts in use, the notification about the run, and
the command `rackproof revalidate`.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet.cli.notice import call
from fleet.integrations.notification import mail, payload, state
from fleet.integrations.scheduler import DRAINED, drain_or_ask, resume_all
from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.records.load import load
from fleet.report.merge import merge
from rackproof.main import main
from schemas import documents
from schemas.decode import record_from_json
from schemas.errors import RunError, UsageError
from schemas.locks import claim, claim_to_json
from schemas.plans import Plan
from schemas.records import SKIPPED, Record, to_json
from schemas.reports import INCONCLUSIVE, VerdictKind
from schemas.skips import skipped_for
from schemas.times import utc_now
from tests import ROOT, builders
from tests.fakes import nvml
from tests.unit.fleet.judge.test_consistency import shifted_by

RACKPROOF = (sys.executable, ROOT / "rackproof")
SLURM = """#!/bin/sh
cd "$(dirname "$0")"; echo "$*" >>log
case "$*" in
squeue*) test -f down && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
  cat "jobs-$4" 2>/dev/null ;;
"scontrol show"*) echo "NodeName=$4 CPUAlloc=$(cat "cpus-$4" 2>/dev/null || echo 0) CPUEfctv=96 State=$(cat "state-$4")" \
  "Reason=$(cat "reason-$4") [root@2026-11-21T04:00:00] Extra=x" ;;
*state=drain*) test -f denied && { echo "slurm_update error: Access/permission denied" >&2; exit 1; }
  node=${3#nodename=}; echo IDLE+DRAIN >"state-$node"; echo "${5#reason=}" >"reason-$node" ;;
*state=resume) test -f denied && { echo "slurm_update error: Access/permission denied" >&2; exit 1; }
  node=${3#nodename=}; echo IDLE >"state-$node"; echo >"reason-$node" ;;
esac
exit 0
"""
KUBERNETES = """#!/bin/sh
cd "$(dirname "$0")"; echo "$*" >>log
case "$*" in
"kubectl get pods"*) cat pods ;;
"kubectl get resourceclaims --namespace train -o json "*) shift 7; for claim in "$@"; do
    test -f "claim-$claim" || { echo "resourceclaims \\"$claim\\" not found" >&2; exit 1; }
    answer="$answer${answer:+, }$(cat "claim-$claim")"
  done
  case $# in 1) echo "$answer" ;; *) echo "{\\"items\\": [$answer]}" ;; esac ;;
"kubectl get node"*) echo "{\\"spec\\": {$(cat "cordon-$4")}, \\"metadata\\": {\\"annotations\\": {$(cat "mark-$4")}}}" ;;
*annotate*) test -f no-annotate && exit 1 ;;
*uncordon*) test -f no-uncordon && exit 1 ;;
*cordon*) test -f no-cordon && exit 1 ;;
esac
case "$*" in
*annotate*"-") : >"mark-$4" ;;
*annotate*) value=${6#*=}; echo "\\"rackproof/drained-by\\": \\"$value\\"" >"mark-$5" ;;
*uncordon*) : >"cordon-$3" ;;
*cordon*) echo '"unschedulable": true' >"cordon-$3" ;;
esac
"""


class FakeScheduler:
    """A run directory and a fake scheduler with the nodes n1 and n2. The scheduler reads its answers from files."""

    def __init__(self, path: Path, kind: str, program: str) -> None:
        self.run = path / "runs" / "r1"
        self.run.mkdir(parents=True)
        self.kind, self.path = kind, path
        (path / "program").write_text(program)
        (path / "program").chmod(0o755)
        self.put(**{"state-n1": "IDLE", "state-n2": "IDLE", "reason-n1": "", "reason-n2": "", "pods": '{"items": []}'})
        self.put(**{"cordon-n1": "", "cordon-n2": "", "mark-n1": "", "mark-n2": ""})

    def put(self, **files: str) -> None:
        """Write files, name -> text, from which the fake scheduler reads its answers."""
        for name, text in files.items():
            (self.path / name).write_text(f"{text}\n")

    def drain_or_ask(self, *, drain: bool = True, wait_s: float = 0.0) -> dict[str, str]:
        return drain_or_ask(
            self.run, self.kind, [str(self.path / "program")], {"h1": "n1", "h2": "n2"}, drain=drain, wait_s=wait_s
        )

    def end(self) -> None:
        """Remove drained.json: this ends the background process of Rackproof, which would otherwise wait until pytest exits."""
        (self.run / DRAINED).unlink(missing_ok=True)

    def changes(self) -> list[str]:
        """Return the logged commands that change a node, without their first word (`scontrol` or `kubectl`)."""
        text = (self.path / "log").read_text() if (self.path / "log").exists() else ""
        return [
            line.partition(" ")[2]
            for line in text.splitlines()
            if " get " not in line and "squeue" not in line and " show " not in line
        ]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(tmp_path, "slurm", SLURM)
    yield scheduler
    scheduler.end()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(tmp_path, "kubernetes", KUBERNETES)
    yield scheduler
    scheduler.end()


def drain(node: str) -> str:
    return f"update nodename={node} state=drain reason=rackproof:r1"


def resume(node: str) -> str:
    return f"update nodename={node} state=resume"


def test_host_with_a_job_is_in_use(slurm: FakeScheduler) -> None:
    slurm.put(**{"jobs-n2": "12_3:alice:RUNNING\n13:bob:PENDING\n14:bob:COMPLETING"})
    assert slurm.drain_or_ask(drain=False) == {
        "h2": "Slurm job 12_3 of alice (RUNNING); Slurm job 14 of bob (COMPLETING)"
    }
    assert slurm.changes() == []


@pytest.mark.parametrize(
    ("state", "cpus"),
    [
        ("MIXED", 8),
        ("ALLOCATED", 96),
        ("MIXED*", 8),
        ("ALLOCATED+DRAIN", 96),
        ("IDLE+COMPLETING", 0),
        ("COMPLETING*", 0),
        ("IDLE", 1),
        ("DOWN+DRAIN", 4),
    ],
)
def test_node_with_jobs_that_squeue_does_not_list_is_in_use(slurm: FakeScheduler, state: str, cpus: int) -> None:
    slurm.put(**{"state-n2": state, "cpus-n2": str(cpus), "jobs-n2": "13:bob:PENDING"})
    assert slurm.drain_or_ask(drain=False) == {
        "h2": f"Slurm jobs that this account may not see (state {state}, {cpus} CPUs allocated)"
    }


@pytest.mark.parametrize(
    "state", ["IDLE", "IDLE*", "IDLE+DRAIN", "IDLE+PLANNED", "IDLE+CLOUD", "IDLE+RESERVED", "DOWN+DRAIN"]
)
def test_node_without_jobs_or_allocated_cpus_is_not_in_use(slurm: FakeScheduler, state: str) -> None:
    slurm.put(**{"state-n2": state})
    assert slurm.drain_or_ask(drain=False) == {}


def test_squeue_lists_all_partitions_and_ignores_filters_in_the_environment(
    slurm: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = ("SQUEUE_USERS", "SQUEUE_STATES", "SQUEUE_PARTITION", "SQUEUE_ACCOUNT", "SQUEUE_NAMES", "SQUEUE_QOS")
    for name in filters:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/site/slurm.conf")
    program = slurm.path / "program"
    program.write_text(program.read_text().replace("#!/bin/sh\n", '#!/bin/sh\nenv >"$(dirname "$0")/environment"\n', 1))
    slurm.drain_or_ask(drain=False)
    environment = (slurm.path / "environment").read_text()
    assert "SQUEUE_" not in environment
    assert "SLURM_CONF=/etc/site/slurm.conf" in environment
    assert "squeue -h -w n1 --all -o" in (slurm.path / "log").read_text()


def test_hosts_count_as_in_use_if_the_scheduler_does_not_answer(slurm: FakeScheduler) -> None:
    slurm.put(down="")
    result = slurm.drain_or_ask(drain=False)
    assert set(result) == {"h1", "h2"}
    assert result["h1"].startswith(
        "the scheduler cannot be asked: squeue exited with 1: slurm_load_jobs error: Unable to contact"
    )


def test_node_in_use_is_resumed_at_once_and_other_nodes_at_the_end(slurm: FakeScheduler) -> None:
    slurm.put(**{"jobs-n2": "4711:alice:RUNNING"})
    assert set(slurm.drain_or_ask()) == {"h2"}
    assert slurm.changes() == [drain("n1"), drain("n2"), resume("n2")]
    assert set(json.loads((slurm.run / DRAINED).read_text())["nodes"]) == {"h1"}
    assert resume_all(slurm.run) == []
    assert slurm.changes()[3:] == [resume("n1")]
    assert not (slurm.run / DRAINED).exists()
    assert resume_all(slurm.run) == []


def test_node_drained_by_an_administrator_is_not_in_use_and_stays_drained(slurm: FakeScheduler) -> None:
    slurm.put(**{"state-n1": "DOWN+DRAIN", "reason-n1": "replaced PSU"})
    assert slurm.drain_or_ask() == {}
    resume_all(slurm.run)
    assert slurm.changes() == [drain("n2"), resume("n2")]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("DOWN", "PSU failed"),
        ("DOWN*", ""),
        ("IDLE+FAIL", "bad DIMM"),
        ("ALLOCATED+FAIL", ""),
        ("ERROR", ""),
        ("IDLE", "check fans"),
    ],
)
def test_node_that_is_out_of_service_without_a_drain_is_neither_drained_nor_resumed(
    slurm: FakeScheduler, state: str, reason: str
) -> None:
    slurm.put(**{"state-n1": state, "reason-n1": reason})
    assert slurm.drain_or_ask() == {
        "h1": f"node n1 was taken out of service by others ({state}: {reason or 'no reason given'})"
    }
    assert set(json.loads((slurm.run / DRAINED).read_text())["nodes"]) == {"h2"}
    resume_all(slurm.run)
    assert slurm.changes() == [drain("n2"), resume("n2")]


@pytest.mark.parametrize("state", ["IDLE", "MIXED*", "ALLOCATED+COMPLETING", "IDLE+CLOUD", "IDLE+PLANNED", "MIXED-"])
def test_node_in_service_is_drained(slurm: FakeScheduler, state: str) -> None:
    slurm.put(**{"state-n1": state})
    assert slurm.drain_or_ask() == {}  # the fake node is idle after the drain: its jobs have ended
    assert slurm.changes() == [drain("n1"), drain("n2")]


def test_node_that_went_down_while_drained_stays_drained_and_is_reported(slurm: FakeScheduler) -> None:
    slurm.drain_or_ask()
    slurm.put(**{"state-n1": "DOWN+DRAIN"})  # the reason is still the one that Rackproof set
    assert resume_all(slurm.run) == [
        "h1: Rackproof drained node n1, which is now out of service (DOWN+DRAIN: rackproof:r1): it stays drained"
    ]
    assert slurm.changes()[2:] == [resume("n2")]
    assert set(json.loads((slurm.run / DRAINED).read_text())["nodes"]) == {"h1"}


def test_nodes_that_a_killed_run_left_drained_are_reported(slurm: FakeScheduler) -> None:
    slurm.put(**{"state-n1": "IDLE+DRAIN", "reason-n1": "rackproof:r0"})
    command = [
        *RACKPROOF,
        "scheduler",
        "drain",
        "--kind=slurm",
        f"--run-dir={slurm.run}",
        f"--word={slurm.path}/program",
    ]
    done = subprocess.run(command, input='{"h1": "n1"}', capture_output=True, text=True, check=True)
    assert done.stdout == "no host is in use\n"
    assert done.stderr.startswith("h1: run r0 drained this host and ended without resuming it")
    plan = builders.plan("h1", "h2")
    report = {"decision": "accepted", "verdicts": [], "acceptance": {"summary": []}}
    assert "h1: run r0 drained this host" in payload(report, plan, link="", directory=slurm.run)["text"]
    slurm.put(**{"reason-n1": "replaced PSU"})
    slurm.drain_or_ask()
    assert "r0" not in payload(report, plan, link="", directory=slurm.run)["text"]


def test_node_drained_by_a_running_run_is_in_use(slurm: FakeScheduler) -> None:
    slurm.put(**{"state-n1": "IDLE+DRAIN", "reason-n1": "rackproof:r0"})
    (slurm.run.parent / "r0").mkdir()
    holder = claim("r0", slurm.run.parent, os.getpid(), "2026-11-21T04:00:00.000000Z")
    (slurm.run.parent / "r0" / "lock.json").write_text(json.dumps({**vars(holder), "running": []}) + "\n")
    assert slurm.drain_or_ask()["h1"].startswith("run r0 drained this host and is locked by ")
    assert slurm.changes() == [drain("n2")]


def test_node_that_an_administrator_drained_during_the_run_stays_drained(slurm: FakeScheduler) -> None:
    slurm.drain_or_ask()
    slurm.put(**{"reason-n1": "kernel panic"})
    resume_all(slurm.run)
    assert slurm.changes()[2:] == [resume("n2")]
    assert not (slurm.run / DRAINED).exists()


def test_reason_why_a_node_cannot_be_drained_is_returned(slurm: FakeScheduler) -> None:
    slurm.put(denied="")
    assert (
        slurm.drain_or_ask()["h1"]
        == "node n1 could not be drained: scontrol exited with 1: slurm_update error: Access/permission denied"
    )


def test_drain_waits_for_running_jobs(slurm: FakeScheduler) -> None:
    slurm.put(**{"jobs-n2": "4711:alice:RUNNING"})
    with subprocess.Popen(["sh", "-c", f"sleep 0.7; rm {slurm.path}/jobs-n2"]):
        assert slurm.drain_or_ask(wait_s=3.0) == {}


def test_failed_resume_of_nodes_is_reported_and_can_be_repeated(slurm: FakeScheduler) -> None:
    slurm.drain_or_ask()
    (slurm.path / "program").rename(slurm.path / "moved")
    assert len(resume_all(slurm.run)) == 2
    (slurm.path / "moved").rename(slurm.path / "program")
    assert resume_all(slurm.run) == []
    assert slurm.changes()[2:] == [resume("n1"), resume("n2")]


def wait(done: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until `done` returns true; after `seconds`, fail the test."""
    ends = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_nodes_are_resumed_after_the_playbook_was_killed(slurm: FakeScheduler) -> None:
    """A background process of Rackproof waits for the end of the playbook and then resumes the nodes."""
    program = (
        'import subprocess, sys, time; subprocess.run(sys.argv[1:], input=\'{"h1": "n1"}\', text=True); time.sleep(60)'
    )
    command = [
        *RACKPROOF,
        "scheduler",
        "drain",
        "--kind=slurm",
        f"--run-dir={slurm.run}",
        f"--word={slurm.path}/program",
    ]
    playbook = subprocess.Popen([sys.executable, "-c", program, *command])
    wait(lambda: slurm.changes() == [drain("n1")])
    time.sleep(0.3)
    assert (slurm.run / DRAINED).exists()
    playbook.kill()
    playbook.wait()
    wait(lambda: slurm.changes() == [drain("n1"), resume("n1")])


def test_node_with_pods_that_request_gpus_is_in_use(kubernetes: FakeScheduler) -> None:
    pod = {
        "metadata": {"namespace": "train", "name": "llm-0"},
        "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]},
    }
    other = {
        "metadata": {"namespace": "web", "name": "nginx"},
        "spec": {"containers": [{"resources": {"limits": {"cpu": "2"}}}, {}]},
    }
    kubernetes.put(pods=json.dumps({"items": [other]}))
    assert kubernetes.drain_or_ask(drain=False) == {}
    kubernetes.put(pods=json.dumps({"items": [other, pod]}))
    assert kubernetes.drain_or_ask(drain=False)["h1"] == "pod train/llm-0 requests 8 nvidia.com/gpu"
    kubernetes.put(pods="Error from server")
    assert (
        kubernetes.drain_or_ask(drain=False)["h1"] == "the scheduler cannot be asked: kubectl: the answer is not JSON"
    )


CLAIMING_POD = {
    "metadata": {"namespace": "train", "name": "llm-0"},
    "spec": {
        "containers": [{"resources": {"claims": [{"name": "gpus"}]}}],
        "resourceClaims": [
            {"name": "gpus", "resourceClaimTemplateName": "eight-gpus"},
            {"name": "shared", "resourceClaimName": "one"},
        ],
    },
    "status": {"resourceClaimStatuses": [{"name": "gpus", "resourceClaimName": "llm-0-gpus-x7"}]},
}
"""A pod with a claim that Kubernetes made from a template, and a claim that it shares with other pods."""
OTHER_POD = {"metadata": {"namespace": "kube-system", "name": "dns"}, "spec": {"containers": [{}]}}


def resource_claim(name: str, *drivers: str, **device: Any) -> dict[str, Any]:
    """Return a claim in the form of the API resource.k8s.io/v1, to which a device of each driver is allocated."""
    results = [
        {"request": "gpu", "driver": driver, "pool": "n1", "device": f"gpu-{number}", **device}
        for number, driver in enumerate(drivers)
    ]
    return {
        "metadata": {"namespace": "train", "name": name},
        "status": {"allocation": {"devices": {"results": results}}},
    }


@pytest.mark.parametrize(
    ("claims", "reasons"),
    [
        (
            [resource_claim("llm-0-gpus-x7", "gpu.nvidia.com", "gpu.nvidia.com"), resource_claim("one")],
            ["pod train/llm-0 claims GPUs (2, resource claim llm-0-gpus-x7)"],
        ),
        (
            [
                resource_claim("llm-0-gpus-x7", "compute-domain.nvidia.com", "dra.net"),
                resource_claim("one", "gpu.nvidia.com"),
            ],
            ["pod train/llm-0 claims GPUs (1, resource claim one)"],
        ),
        ([resource_claim("llm-0-gpus-x7", "gpu.nvidia.com", adminAccess=True), resource_claim("one", "dra.net")], []),
    ],
    ids=["claim of a template", "shared claim", "no claim of a GPU"],
)
def test_node_with_pods_that_claim_gpus_is_in_use(
    kubernetes: FakeScheduler, claims: list[dict[str, Any]], reasons: list[str]
) -> None:
    kubernetes.put(pods=json.dumps({"items": [CLAIMING_POD, OTHER_POD]}))
    kubernetes.put(**{f"claim-{claim['metadata']['name']}": json.dumps(claim) for claim in claims})
    assert kubernetes.drain_or_ask(drain=False) == {host: reason for host in ("h1", "h2") for reason in reasons}


def test_pod_with_one_resource_claim_uses_its_node(kubernetes: FakeScheduler) -> None:
    """For one name, kubectl prints no list."""
    pod = {"metadata": CLAIMING_POD["metadata"], "spec": {"resourceClaims": [{"resourceClaimName": "one"}]}}
    kubernetes.put(pods=json.dumps({"items": [pod]}))
    kubernetes.put(**{"claim-one": json.dumps(resource_claim("one", "gpu.nvidia.com"))})
    assert kubernetes.drain_or_ask(drain=False)["h1"] == "pod train/llm-0 claims GPUs (1, resource claim one)"


def test_node_whose_resource_claims_cannot_be_read_is_not_free(kubernetes: FakeScheduler) -> None:
    kubernetes.put(pods=json.dumps({"items": [CLAIMING_POD]}))
    assert kubernetes.drain_or_ask(drain=False)["h1"].endswith('resourceclaims "one" not found')
    kubernetes.put(pods=json.dumps({"items": [OTHER_POD]}))
    assert kubernetes.drain_or_ask(drain=False) == {}


def test_nodes_are_cordoned_with_an_annotation_and_only_annotated_nodes_are_uncordoned(
    kubernetes: FakeScheduler,
) -> None:
    kubernetes.put(**{"cordon-n2": '"unschedulable": true'})
    assert kubernetes.drain_or_ask() == {}
    assert kubernetes.changes() == ["cordon n1", MARK]
    assert resume_all(kubernetes.run) == []
    assert kubernetes.changes()[2:] == [UNMARK, "uncordon n1"]


MARK = "annotate --overwrite node n1 rackproof/drained-by=rackproof:r1"
UNMARK = "annotate node n1 rackproof/drained-by-"


def test_annotation_is_removed_if_the_node_cannot_be_cordoned(kubernetes: FakeScheduler) -> None:
    """An annotation that is already on the node is removed too.

    If it remained, a later cordon by an administrator would be mistaken for one by Rackproof.
    """
    kubernetes.put(**{"no-cordon": "", "mark-n1": '"rackproof/drained-by": "rackproof:r1"'})
    assert kubernetes.drain_or_ask()["h1"].startswith("node n1 could not be drained: kubectl exited with 1")
    assert (kubernetes.path / "mark-n1").read_text().strip() == ""
    kubernetes.put(**{"cordon-n1": '"unschedulable": true'})
    assert len(resume_all(kubernetes.run)) == 1
    assert "uncordon n1" not in kubernetes.changes()


def test_node_that_cannot_be_annotated_is_uncordoned(kubernetes: FakeScheduler) -> None:
    kubernetes.put(**{"no-annotate": ""})
    assert kubernetes.drain_or_ask()["h1"].startswith("node n1 could not be drained: kubectl exited with 1")
    assert kubernetes.changes()[:3] == ["cordon n1", MARK, "uncordon n1"]


def test_failed_uncordon_can_be_repeated(kubernetes: FakeScheduler) -> None:
    kubernetes.drain_or_ask()
    kubernetes.put(**{"no-uncordon": ""})
    assert len(resume_all(kubernetes.run)) == 2
    (kubernetes.path / "no-uncordon").unlink()
    assert resume_all(kubernetes.run) == []
    assert (kubernetes.path / "cordon-n1").read_text() == (kubernetes.path / "mark-n1").read_text() == ""


def test_cordon_without_the_annotation_of_rackproof_is_reported_and_stays(kubernetes: FakeScheduler) -> None:
    """Either Rackproof was killed between cordon and annotation, or an administrator removed the annotation."""
    kubernetes.drain_or_ask()
    kubernetes.put(**{"mark-n1": ""})
    assert resume_all(kubernetes.run) == [
        "h1: node n1 is cordoned, but not annotated by Rackproof: uncordon it by hand unless an administrator cordoned it"
    ]
    assert "uncordon n1" not in kubernetes.changes()


@pytest.mark.parametrize("name", ["n1 state=down", "--all", "", "n1;reboot"])
def test_invalid_node_names_are_rejected(slurm: FakeScheduler, name: str) -> None:
    command = [
        *RACKPROOF,
        "scheduler",
        "drain",
        "--kind=slurm",
        f"--run-dir={slurm.run}",
        f"--word={slurm.path}/program",
    ]
    done = subprocess.run(command, input=json.dumps({"h1": name}), capture_output=True, text=True, check=False)
    assert (done.returncode, slurm.changes()) == (64, [])


# --- the record of a host in use


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


class Host:
    """The host h1 of a run. It has four fake GPUs, of which the plan has GPUs 0 and 1."""

    def __init__(self, path: Path, library: Path, **variables: Any) -> None:
        self.plan = builders.plan("h1", "h2", profile="revalidate", **variables)
        self.path, self._library = path, library
        self.run = path / "state" / "runs" / "r1"
        (path / "plan.json").write_text(json.dumps(to_json(self.plan)))

    def busy(self, *lines: str, because: str = "", claim: str = "") -> subprocess.CompletedProcess[str]:
        """Run `rackproof busy` on h1.

        Args:
            lines: changes to the state of the fake GPUs, in the format of `tests/fakes/nvml/scenarios`
            because: why the scheduler reports the host as in use; empty: the scheduler does not report it as in use
            claim: text of the run's lock.json, which identifies the operator; empty: the operator is the user of this process
        """
        scenario = nvml.write(self.path / "nvml.conf", "healthy-h200x4", *lines)
        command = [*RACKPROOF, "busy", f"--plan={self.path / 'plan.json'}", f"--run-dir={self.run}", "--host=h1"]
        environment = {**os.environ, **nvml.environment(self._library, scenario)}
        return subprocess.run(
            [*command, f"--because={because}", f"--claim={claim}"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def record(self) -> dict[str, Any]:
        return dict(documents.read(self.run / "record.json", "record"))


def test_host_with_a_gpu_process_is_inspected_but_not_measured(tmp_path: Path, library: Path) -> None:
    host = Host(tmp_path, library)
    done = host.busy("gpu.1.ComputeRunningProcesses=4711")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("gpu=1 is in use by process 4711")
    record = host.record()
    assert {gpu["serial"] for gpu in record["gpus"]} == {"1650000000000", "1650000000001"}
    assert [(taken["stage"], taken["phase"]) for taken in record["snapshots"]] == [("preflight", "before")]
    planned = host.plan.host("h1")
    expected = [scope for item in host.plan.expected_of(planned) for scope in host.plan.scopes_of(planned, item)]
    assert len(record["observations"]) == len(expected)
    assert {(observation["status"], observation["reason"]) for observation in record["observations"]} == {
        (SKIPPED, skipped_for(done.stdout.strip()))
    }
    units = {observation["name"]: observation["unit"] for observation in record["observations"]}
    assert (units["gemm.throughput"], units["benchmark.duration"], units["collective.all_reduce.busbw"]) == (
        "FLOP/s",
        "s",
        "B/s",
    )
    assert not (host.run.parent.parent / "lease.json").exists()  # nothing is measured, so the host is not locked
    assert host.busy("gpu.1.ComputeRunningProcesses=4711").returncode == 1
    assert host.record()["observations"] == record["observations"]


def hours_ago(host: Host, record: Record, *, hours: int = 4) -> bytes:
    """Shift the times of the record so that it ended `hours` ago. Write it as the record of the host, and return its text."""
    since_end = datetime.now(UTC) - datetime.fromisoformat(record.ended)
    path = host.run / "record.json"
    documents.write(path, to_json(shifted_by(record, since_end - timedelta(hours=hours))))
    return path.read_bytes()


@pytest.mark.parametrize("stages", ["none", "all", "first"])
def test_record_of_host_that_is_in_use_again_hours_later_does_not_contradict_itself(
    tmp_path: Path, library: Path, stages: str
) -> None:
    """`stages`: the stages that were measured before the host was in use for the second time."""
    host = Host(tmp_path, library, rackproof_gang="rack" if stages == "first" else "none")
    process = "gpu.1.ComputeRunningProcesses=4711"
    assert host.busy(process).returncode == 1
    record = record_from_json(host.record(), source="record")
    if stages != "none":
        (record,) = [item for item in builders.records(host.plan, "h1") if not item.gang]
    before = hours_ago(host, record)
    assert host.busy(process).returncode == 1
    if stages != "first":
        assert (host.run / "record.json").read_bytes() == before
    after = record_from_json(host.record(), source="record")
    skipped = {item.stage for item in after.observations if item.status == SKIPPED}
    assert skipped == {"none": {"benchmark"}, "all": set(), "first": {"gang"}}[stages]
    assert after.ended == json.loads(before)["ended"]
    report = merge(replace(host.plan, created=after.began), {"h1": Evidence(records=(after,))}, read_packs(()))
    verdicts = [item for item in report.verdicts if item.host == "h1" and item.verdict == INCONCLUSIVE]
    assert [item.reason for item in verdicts if item.name == "record"] == []
    if stages == "none":
        # The machine that runs this test lacks readings that a GPU host has. So some verdicts are MISSING.
        assert {item.kind for item in verdicts} - {VerdictKind.MISSING} == {VerdictKind.IN_USE}


def test_idle_host_is_free_and_leaves_no_record(tmp_path: Path, library: Path) -> None:
    host = Host(tmp_path, library)
    done = host.busy("gpu.3.ComputeRunningProcesses=4711")  # only GPUs 0 and 1 are planned
    assert (done.returncode, done.stdout) == (0, "free\n")
    assert not (host.run / "record.json").exists()


def test_output_and_record_state_how_many_reasons_they_omit(tmp_path: Path, library: Path) -> None:
    """Of the 20 reasons, the output lists 16 and the record 3."""
    host = Host(tmp_path, library)
    processes = " ".join(map(str, range(4711, 4721)))
    done = host.busy(*(f"gpu.{index}.ComputeRunningProcesses={processes}" for index in (0, 1)))
    assert (done.returncode, done.stdout.strip().endswith("; 4 more")) == (1, True), done.stdout
    (reason,) = {observation["reason"] for observation in host.record()["observations"]}
    assert (reason.count("gpu=0 is in use"), reason.endswith("; 17 more")) == (3, True), reason


@pytest.mark.parametrize(
    ("lines", "variables", "because", "code"),
    [
        (("ComputeRunningProcesses=!999",), {}, "", 1),
        (("gpu.0.MigMode=1 1",), {}, "", 0),
        (("gpu.0.ComputeRunningProcesses=4711",), {"rackproof_share_gpus": True}, "", 0),
        ((), {}, "Slurm job 1 of alice", 1),
    ],
    ids=[
        "GPU processes cannot be listed",
        "MIG mode is on",
        "inventory allows other processes on the GPUs",
        "scheduler job",
    ],
)
def test_exit_code_states_whether_the_host_is_in_use(
    tmp_path: Path, library: Path, lines: tuple[str, ...], variables: dict[str, Any], because: str, code: int
) -> None:
    done = Host(tmp_path, library, **variables).busy(*lines, because=because)
    assert done.returncode == code, done.stdout + done.stderr


def test_host_held_by_another_run_is_in_use(tmp_path: Path, library: Path) -> None:
    host = Host(tmp_path, library)
    other = replace(host.plan, run_id="r0", nonce="f" * 32)
    (tmp_path / "other.json").write_text(json.dumps(to_json(other)))
    scenario = nvml.write(tmp_path / "nvml.conf", "healthy-h200x4")
    begin = [
        *RACKPROOF,
        "inspect",
        f"--plan={tmp_path / 'other.json'}",
        f"--run-dir={host.run.parent / 'r0'}",
        "--host=h1",
    ]
    subprocess.run(begin, env={**os.environ, **nvml.environment(library, scenario)}, check=True, capture_output=True)
    claim_of_this_run = claim("r1", Path("/elsewhere"), os.getpid(), "2026-11-21T04:00:00.000000Z")
    done = host.busy(claim=json.dumps({**vars(claim_of_this_run), "running": []}))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("held by run r0 of ")


# --- the notification


def judged(tmp_path: Path, change: Callable[[Plan, Path], None], **variables: Any) -> tuple[dict[str, Any], Plan]:
    """Return report and plan of a run with three healthy hosts, after `change` was applied to the run's directory."""
    plan = builders.plan("h1", "h2", "h3", profile="smoke", **variables)
    documents.write(tmp_path / "plan.json", json.loads(json.dumps(to_json(plan))))
    for host in ("h1", "h2", "h3"):
        for record in builders.records(plan, host):
            path = f"gangs/{record.gang}/{host}.json" if record.gang else f"hosts/{host}.json"
            builders.write_record(tmp_path / path, record)
    change(plan, tmp_path)
    run = load(tmp_path)
    report = merge(run.plan, run.evidence, read_packs(()), events=run.events, quarantined=run.quarantined)
    return json.loads(json.dumps(to_json(report))), plan


def skip_h2(plan: Plan, directory: Path) -> None:
    """Mark every observation of h2 as skipped because h2 was in use. Remove its records of multi-node launches (gangs)."""
    planned = plan.host("h2")
    observations = [
        {
            "name": item.name,
            "scope": scope,
            "stage": item.stage,
            "unit": "1",
            "status": SKIPPED,
            "reason": skipped_for("job 4711"),
            "params": item.params,
        }
        for item in plan.expected_of(planned)
        for scope in plan.scopes_of(planned, item)
    ]
    record = json.loads((directory / "hosts" / "h2.json").read_text())
    del record["launches"]
    documents.write(directory / "hosts" / "h2.json", {**record, "observations": observations})
    for path in directory.glob("gangs/*/h2.json"):
        path.unlink()


def test_run_with_a_host_in_use_is_incomplete_and_its_notification_has_the_state_busy(tmp_path: Path) -> None:
    report, plan = judged(tmp_path, skip_h2, rackproof_gang="none", rackproof_reason="replaced GPU 3")
    coverage = {host["name"]: host["coverage"] for host in report["hosts"]}
    assert coverage["h2"]["skipped"] == coverage["h2"]["expected"] > 0
    assert coverage["h1"]["measured"] == coverage["h1"]["expected"]
    assert report["decision"] == "incomplete"
    assert state(report, plan) == ("busy", {"h2": "job 4711"})
    reported = payload(report, plan, link="https://runs.example.org/", directory=tmp_path)
    assert reported["text"].startswith(
        "incomplete: run r1, profile smoke, 3 hosts (replaced GPU 3); in use and not measured: h2\n"
    )
    assert reported["report"] == "https://runs.example.org/r1/report.html"
    assert (reported["rehearsal"], reported["simulated"]) == (False, False)
    simulated = payload(report, replace(plan, simulated=True), link="", directory=tmp_path)
    assert simulated["simulated"]
    assert simulated["text"].startswith("SIMULATED incomplete: run r1")


def test_state_is_busy_even_if_no_host_of_the_gang_has_a_gang_record(tmp_path: Path) -> None:
    """A gang is the hosts of one multi-node launch. One of them, h2, is in use."""

    def without_gang_records(plan: Plan, directory: Path) -> None:
        skip_h2(plan, directory)
        for path in directory.glob("gangs/*/*.json"):
            path.unlink()

    report, plan = judged(tmp_path, without_gang_records)
    assert {host["decision"] for host in report["hosts"]} == {"incomplete"}
    assert state(report, plan)[0] == "busy"


def test_run_with_a_missing_record_is_incomplete_not_busy(tmp_path: Path) -> None:
    def without_record_of_h3(plan: Plan, directory: Path) -> None:
        skip_h2(plan, directory)
        (directory / "hosts" / "h3.json").unlink()

    report, plan = judged(tmp_path, without_record_of_h3, rackproof_gang="none")
    assert state(report, plan) == ("incomplete", {"h2": "job 4711"})


def test_run_is_incomplete_not_busy_if_the_host_in_use_also_has_an_error(tmp_path: Path) -> None:
    def with_one_error(plan: Plan, directory: Path) -> None:
        skip_h2(plan, directory)
        path = directory / "hosts" / "h2.json"
        record = json.loads(path.read_text())
        record["observations"][0].update(status="error", reason="the library is gone")
        documents.write(path, record)

    report, plan = judged(tmp_path, with_one_error, rackproof_gang="none")
    assert state(report, plan) == ("incomplete", {})


def test_host_locked_by_another_run_is_in_use(tmp_path: Path) -> None:
    def lock_h3(plan: Plan, directory: Path) -> None:
        (directory / "hosts" / "h3.json").unlink()
        event = {
            "at": builders.WHEN,
            "what": "failed",
            "play": "Install the agent",
            "host": "h3",
            "task": "agent : Install",
            "in_use": True,
        }
        message = "rackproof: this host is held by run r0 of alice on control1"
        (directory / "events.jsonl").write_text(json.dumps({**event, "message": message}) + "\n")

    report, plan = judged(tmp_path, lock_h3, rackproof_gang="none")
    assert state(report, plan) == ("busy", {"h3": "rackproof: this host is held by run r0 of alice on control1"})


def test_notification_is_printed_only_for_requested_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, _ = judged(tmp_path, lambda plan, directory: None)
    documents.write(tmp_path / "report.json", report)

    def notice(on: str, run: Path = tmp_path) -> str:
        assert call(argparse.Namespace(run_dir=run, on=on, link="", mail_to=[], mail_from="", failed="")) == 0
        return capsys.readouterr().out

    assert notice("rejected,incomplete,busy") == ""
    assert json.loads(notice("accepted"))["state"] == "accepted"
    with pytest.raises(UsageError, match="did you mean rejected"):
        notice("rejceted")
    with pytest.raises(RunError, match="give the directory of a run"):
        notice("accepted", tmp_path / "nothing")


def test_notification_lists_causes_and_limits_the_number_of_lines(tmp_path: Path) -> None:
    """The order is: at most 5 lines with counts or caveats, the causes, the number of omitted lines, the line `Failed as well`.

    If a report has no causes, its summary is listed without the lines about checks. At most 12 lines are listed. If lines
    are omitted, one more line states how many.
    """
    report, plan = judged(tmp_path, lambda plan, directory: None)
    lines = {
        "count": "Hosts: 0 of 3 accepted",
        "check": "GEMM: FAIL",
        "reason": "FAIL: GPU 1 of h1 is slow [gemm]",
        "more": "Failed as well: h2, h3",
    }
    report["acceptance"] |= {
        "summary": [*lines.values()],
        "lines": [{"kind": kind, "text": text, "values": {"hosts": 2}} for kind, text in lines.items()],
    }

    def shown(*causes: dict[str, Any]) -> list[str]:
        text = str(payload({**report, "causes": causes}, plan, link="", directory=tmp_path)["text"])
        return [line.removeprefix("- ") for line in text.splitlines()[1:-1]]

    assert shown() == [lines["count"], lines["reason"], lines["more"]]
    cause = {"title": "GPU 1 of h1 is slow", "verdict": "fail", "action": "rma"}
    assert shown(cause) == [lines["count"], "FAIL: GPU 1 of h1 is slow; Return the part (RMA)", lines["more"]]
    assert shown(*[cause] * 30)[-2:] == ["… and 20 more lines in the report", lines["more"]]
    caveats = [f"caveat {number}" for number in range(7)]
    report["acceptance"] = {**report["acceptance"], "summary": caveats}
    report["acceptance"]["lines"] = [{"kind": "caveat", "text": text} for text in caveats]
    assert shown(cause)[4:] == [
        "caveat 4",
        "FAIL: GPU 1 of h1 is slow; Return the part (RMA)",
        "… and 2 more lines in the report",
    ]
    assert shown(*[cause] * 30)[-1] == "… and 25 more lines in the report"


def test_text_from_hosts_cannot_inject_mail_headers(tmp_path: Path) -> None:
    report, plan = judged(tmp_path, lambda plan, directory: None, rackproof_reason="x")
    report["acceptance"]["summary"] = ["text\r\nBcc: all@example.org\x1b[2J\x00"] * 40
    reported = payload(report, plan, link="", directory=tmp_path)
    text = mail(reported, ["ops@example.org", "dc@example.org"], "rackproof@example.org")
    message = email.message_from_string(text)
    assert (message["To"], message["Bcc"]) == ("ops@example.org, dc@example.org", None)
    assert message["Subject"].startswith("accepted: run r1")
    assert "\x1b" not in text
    assert "… and 28 more lines" in message.get_payload(decode=True).decode()  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="invalid mail address or subject"):
        mail(reported, ["a@b\nBcc: c@d"], "")


def test_foreign_drained_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / DRAINED).write_text('{"kind": "sh", "words": ["reboot"], "nodes": {"h1": "n1"}}')
    with pytest.raises(RunError, match="was not written by Rackproof"):
        resume_all(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"[]",
        b'{"kind": "slurm"}',
        b'{"kind": "slurm", "words": "sudo", "by": {"pid": 1, "start_time": "1"}, "nodes": {}}',
        b'{"kind": "slurm", "words": [], "by": {"pid": "1", "start_time": "1"}, "nodes": {}}',
        b'{"kind": "slurm", "words": [], "by": {"pid": 1, "start_time": "1"}, "nodes": {"h1": "--all"}}',
    ],
)
def test_broken_drained_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes) -> None:
    (tmp_path / DRAINED).write_bytes(text)
    assert main(["scheduler", "resume", f"--run-dir={tmp_path}"]) == 2
    output = capsys.readouterr().err
    assert f"rackproof: {tmp_path}/drained.json" in output
    assert "resume the nodes by hand" in output


@pytest.mark.parametrize("text", ["{}", "[]", '{"decision": "accepted"}', '{"decision": "accepted", "verdicts": [{}]}'])
def test_invalid_report_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    documents.write(tmp_path / "plan.json", json.loads(json.dumps(to_json(builders.plan("h1", "h2")))))
    (tmp_path / "report.json").write_text(text)
    assert main(["notice", str(tmp_path)]) == 2
    assert "has no valid report" in capsys.readouterr().err


@pytest.mark.parametrize("date", ["%Y/%m", "x" * 200])
def test_date_that_gives_an_invalid_run_id_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], date: str
) -> None:
    assert main(["revalidate", "-i", "x", f"--runs={tmp_path}", "--date", date]) == 64
    assert "--date" in capsys.readouterr().err


# --- rackproof revalidate


ANSIBLE = """
import json, os, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
values = dict(word.split("=", 1) for word in sys.argv if "=" in word)
with (here / "played").open("a") as log:
    log.write(pathlib.Path(sys.argv[-1]).stem + " " + values["rackproof_run_id"] + "\\n")
with (here / "inventories").open("a") as log:
    print(sys.argv[sys.argv.index("-i") + 1], file=log)
run = pathlib.Path(values["rackproof_runs_directory"]) / values["rackproof_run_id"]
(here / "variables").write_text(next((word for word in sys.argv if word.startswith("{")), ""))
if (here / "fails").exists():
    sys.exit(4)
if sys.argv[-1].endswith("revalidate.yml"):
    shutil.copytree(here / "playbook_files", run, dirs_exist_ok=True)
    os.utime(run / "report.json")
(run / "notified.json").write_text('{"sent": true, "drained": []}')
"""
"""Fake ansible-playbook. It logs playbook, run id and inventory, and keeps the extra variables of the latest call.

If there is a file `fails` beside this program, it then exits with 4. Otherwise it writes `notified.json` to the run directory.
For the playbook revalidate.yml, it also copies the files in `playbook_files`, a directory beside this program, to the run
directory.
"""


class ScheduledRevalidation:
    """Runs `rackproof revalidate` with a fake ansible-playbook, which copies `playbook_files` to the run directory."""

    def __init__(self, path: Path) -> None:
        self.runs, self._played = path / "runs", path / "bin" / "played"
        self.playbook_files = path / "bin" / "playbook_files"
        self.playbook_files.mkdir(parents=True)
        (path / "bin" / "ansible-playbook").write_text(f"#!{sys.executable}{ANSIBLE}")
        (path / "bin" / "ansible-playbook").chmod(0o755)

    def start(self, inventory: str = "x,") -> int:
        return main(["revalidate", "-i", inventory, f"--runs={self.runs}", "--name=r", "--date=1"])

    def inventories(self) -> list[str]:
        return (self._played.parent / "inventories").read_text().splitlines()

    def played(self) -> list[str]:
        return self._played.read_text().splitlines() if self._played.exists() else []


@pytest.fixture
def scheduled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScheduledRevalidation:
    scheduled = ScheduledRevalidation(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr("fleet.integrations.scheduler.BACKOFF_S", (0.1, 2.0), raising=False)
    report, _ = judged(scheduled.playbook_files, lambda plan, directory: None)
    documents.write(scheduled.playbook_files / "report.json", report)
    return scheduled


def test_second_run_of_a_day_has_its_own_run_id(
    scheduled: ScheduledRevalidation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scheduled.start() == 0
    assert scheduled.start() == 0
    first, second = (line.removeprefix("revalidate ") for line in scheduled.played())
    assert first == "r-1"
    assert re.fullmatch(r"r-1-\d{4}", second)
    assert f"run r-1 was already accepted or rejected: starting run {second}" in capsys.readouterr().err


def set_clock(monkeypatch: pytest.MonkeyPatch, moment: datetime) -> None:
    clock = SimpleNamespace(now=lambda zone: moment.astimezone(zone))
    monkeypatch.setattr("fleet.integrations.revalidate.datetime", clock)


ZONES = ("UTC0", "EET-2EEST,M3.5.0/3,M10.5.0/4", "JST-9", "PST8PDT,M3.2.0,M11.1.0")


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("hour", [1, 10, 20])
def test_run_of_another_local_day_is_not_resumed(
    scheduled: ScheduledRevalidation, monkeypatch: pytest.MonkeyPatch, zone: str, hour: int
) -> None:
    """A timer starts each day at the same local time. Yesterday's run may have begun late, and may be incomplete."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        documents.write(
            scheduled.playbook_files / "report.json",
            {**json.loads((scheduled.playbook_files / "report.json").read_text()), "decision": "incomplete"},
        )
        arguments = ["revalidate", "-i", "x,", f"--runs={scheduled.runs}", "--name=r"]
        for local in (datetime(2026, 3, 29, hour, 30), datetime(2026, 3, 29, 23, 30), datetime(2026, 3, 30, 2, 30)):
            set_clock(monkeypatch, local.astimezone())
            assert main(arguments) == 2
        assert scheduled.played() == ["revalidate r-20260329"] * 2 + ["revalidate r-20260330"]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_third_run_of_a_day_is_refused_in_the_same_minute_as_the_second(
    scheduled: ScheduledRevalidation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_clock(monkeypatch, datetime(2026, 11, 21, 14, 5).astimezone())
    assert (scheduled.start(), scheduled.start()) == (0, 0)
    capsys.readouterr()
    assert scheduled.start() == 75
    assert scheduled.played() == ["revalidate r-1", "revalidate r-1-1405"]
    output = capsys.readouterr().err
    assert (
        "nothing was done: run r-1-1405, which was started in this minute, was already accepted or rejected: "
        "start again in the next minute" in output
    )
    assert "starting run" not in output


def test_inventory_path_is_relative_to_the_current_directory(
    scheduled: ScheduledRevalidation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert scheduled.start("rack12") == 64
    assert f"-i rack12: no such file or directory: give a path relative to {tmp_path}" in capsys.readouterr().err
    assert scheduled.played() == []
    (tmp_path / "rack12").mkdir()
    assert scheduled.start("rack12") == 0
    assert scheduled.inventories() == [str(tmp_path / "rack12")]


def test_incomplete_second_run_of_a_day_is_resumed(scheduled: ScheduledRevalidation) -> None:
    assert scheduled.start() == 0
    report = json.loads((scheduled.playbook_files / "report.json").read_text())
    documents.write(scheduled.runs / "r-1-0000" / "report.json", {**report, "decision": "incomplete"})
    documents.write(
        scheduled.runs / "r-1-0000" / "plan.json", json.loads((scheduled.playbook_files / "plan.json").read_text())
    )
    assert scheduled.start() == 0
    assert scheduled.played() == ["revalidate r-1", "revalidate r-1-0000"]
    scheduled.start()
    # The run r-1-0000 is accepted now, so the third start began a run with another id.
    assert scheduled.played().count("revalidate r-1-0000") == 1


@pytest.mark.parametrize(("length", "code"), [(57, 0), (58, 64)])
def test_name_leaves_room_for_the_time_of_day(
    scheduled: ScheduledRevalidation, length: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run id has at most 64 characters: `--name`, the date (here `-1`) and five for the time of day, such as `-1405`."""
    name = "r" * length
    assert main(["revalidate", "-i", "x,", f"--runs={scheduled.runs}", f"--name={name}", "--date=1"]) == code
    if code:
        assert f"run id '{name}-1' has 60 characters, at most 59" in (output := capsys.readouterr().err)
        assert "give a shorter --name or --date" in output
        assert scheduled.played() == []


def test_incomplete_run_is_resumed(scheduled: ScheduledRevalidation) -> None:
    report = json.loads((scheduled.playbook_files / "report.json").read_text())
    documents.write(scheduled.playbook_files / "report.json", {**report, "decision": "incomplete"})
    assert (scheduled.start(), scheduled.start()) == (2, 2)
    assert scheduled.played() == ["revalidate r-1"] * 2


def test_checkout_may_be_updated_only_if_no_run_is_active(
    scheduled: ScheduledRevalidation, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["revalidate", "-i", "x,", f"--runs={scheduled.runs}", "--name=r", "--active"]
    assert main(command) == 1
    lock = scheduled.runs / "burnin" / "lock.json"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        lock.write_text(f"{json.dumps(claim_to_json(claim('burnin', scheduled.runs, process.pid, utc_now())))}\n")
        code, output = main(command), capsys.readouterr().err
        process.kill()
    assert code == 0
    assert "the checkout is not updated, because run burnin is locked by " in output
    assert main(command) == 1  # the process has ended
    assert scheduled.played() == []


@pytest.mark.parametrize(
    ("option", "played", "reason"),
    [
        ([], ["revalidate r-1", "notify r-1"], "the playbook exited with 4"),
        (["--not-updated"], ["notify r-1"], "ansible-pull could not update the checkout, so nothing was measured"),
    ],
    ids=["playbook fails", "update of the checkout fails"],
)
def test_start_without_a_report_sends_a_notification_and_exits_2(
    scheduled: ScheduledRevalidation, tmp_path: Path, option: list[str], played: list[str], reason: str
) -> None:
    (tmp_path / "bin" / "fails").touch()
    assert main(["revalidate", *option, "-i", "x,", f"--runs={scheduled.runs}", "--name=r", "--date=1"]) == 2
    assert scheduled.played() == played
    variables = json.loads((tmp_path / "bin" / "variables").read_text())
    assert variables["_rackproof_notify_run"] == str(scheduled.runs / "r-1")
    assert variables["_rackproof_notify_failure"].startswith(reason)


def test_notification_of_a_start_without_a_report_has_the_reason(tmp_path: Path) -> None:
    """The real playbook notify.yml sends the mail. There is no run directory."""
    (tmp_path / "sendmail").write_text(f"#!/bin/sh\ncat >{tmp_path}/mail\n")
    (tmp_path / "sendmail").chmod(0o755)
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    variables |= {"rackproof_notify_mail_to": ["ops@example.org"], "rackproof_notify_sendmail": f"{tmp_path}/sendmail"}
    inventory = {"all": {"children": {"gpu_hosts": {"hosts": {"h1": {}}, "vars": variables}}}}
    (tmp_path / "rack1.json").write_text(json.dumps(inventory))
    command = [
        *RACKPROOF,
        "revalidate",
        "--not-updated",
        f"--inventory={tmp_path}/rack1.json",
        f"--runs={tmp_path}/runs",
    ]
    done = subprocess.run([*command, "--name=rack1", "--date=1"], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "NOTIFICATION FAILED" not in done.stdout
    message = email.message_from_string((tmp_path / "mail").read_text())
    assert message["To"] == "ops@example.org"
    text = message.get_payload(decode=True).decode()  # type: ignore[union-attr]
    assert text.startswith("incomplete: run rack1-1 has no report: ansible-pull could not update the checkout")


def test_nodes_that_cannot_be_resumed_give_exit_code_2_and_a_notification(
    scheduled: ScheduledRevalidation, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(scheduled.runs / "nothing")]
    drained_file = {
        "kind": "slurm",
        "words": words,
        "by": {"pid": os.getpid(), "start_time": "0"},
        "nodes": {"h1": "n1"},
    }
    documents.write(scheduled.playbook_files / DRAINED, drained_file)
    assert scheduled.start() == 2
    assert scheduled.played() == ["revalidate r-1", "notify r-1"]
    output = capsys.readouterr().err
    assert "h1: Rackproof drained node n1 and could not resume it" in output
    assert f"rackproof scheduler resume --run-dir {scheduled.runs / 'r-1'}" in output
    assert (
        call(
            argparse.Namespace(
                run_dir=scheduled.runs / "r-1", on="rejected", link="", mail_to=[], mail_from="", failed=""
            )
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["drained"]) == ("accepted", ["h1"])
    assert "STILL DRAINED in the scheduler: h1: rackproof scheduler resume --run-dir /" in document["text"]


def test_nodes_that_are_resumed_on_retry_are_not_reported(
    scheduled: ScheduledRevalidation, slurm: FakeScheduler
) -> None:
    words, nodes = [str(slurm.path / "program")], {"h1": "n1", "h2": "n2"}
    drained_file = {"kind": "slurm", "words": words, "by": {"pid": os.getpid(), "start_time": "0"}, "nodes": nodes}
    documents.write(scheduled.playbook_files / DRAINED, drained_file)
    for node in ("n1", "n2"):
        slurm.put(**{f"state-{node}": "IDLE+DRAIN", f"reason-{node}": "rackproof:r-1"})
    slurm.put(denied="")
    with subprocess.Popen(["sh", "-c", f"sleep 1; rm {slurm.path}/denied"]):
        assert scheduled.start() == 0
    assert scheduled.played() == ["revalidate r-1"]
    assert (slurm.path / "state-n1").read_text() == "IDLE\n"


def test_failed_resume_does_not_prevent_the_report(tmp_path: Path) -> None:
    (tmp_path / DRAINED).write_text("broken")
    tasks = [
        {"ansible.builtin.import_role": {"name": "revalidate", "tasks_from": "give_back"}},
        {"ansible.builtin.debug": {"msg": "the report comes after"}},
    ]
    variables = {
        "_rackproof_run_dir": str(tmp_path),
        "rackproof_scheduler": "slurm",
        "ansible_connection": "local",
    }
    play = {"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    command = [Path(sys.executable).parent / "ansible-playbook", "-i", "h1,", tmp_path / "play.yml"]
    environment = {**os.environ, "ANSIBLE_ROLES_PATH": str(ROOT / "roles"), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the report comes after" in done.stdout
    assert "STILL DRAINED" in done.stdout
    assert "cannot be read" in done.stdout
