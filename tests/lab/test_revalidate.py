"""Test acceptance and re-validation of a rack over real SSH. The last tests run the command that a systemd timer would start.

The simulated maintenance slows the link of one host and replaces one GPU. A fake NVML in /usr/lib gives each host GPUs with
serials; the benchmarks run on the CPU.
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents
from tests.fakes import nvml
from tests.lab import links
from tests.lab.agent_install import install_agent
from tests.lab.lab import CONTROL_NODE, MODULE_PYTHON, SSH_OPTIONS, Lab

ROOT = Path(__file__).parents[2]
HOSTS = ("node1", "node2", "node3")
SLOW, SWAPPED = "node2", "node3"
RATE, SLOW_RATE = "100mbit", "8mbit"
"""Each host sends at most at RATE. After the maintenance, SLOW sends at most at SLOW_RATE. The limits are so low that busy CPUs
hardly change the measured rates."""
NEW_SERIAL = "1659999999999"
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"
RACKPROOF = (sys.executable, ROOT / "rackproof")
DEADLINE_S = 600
SCENARIO = "/etc/nvml.conf"
PROFILE = "/etc/rack1-profile.yml"


def small_profile(stage: str, benchmark: str, **settings: Any) -> dict[str, Any]:
    """Return a profile with one benchmark; `settings` are those of the benchmark."""
    settings_of_stage = {"deadline_s": 90, "collective_timeout_s": 30, "benchmarks": {benchmark: settings}}
    head = {"schema": "rackproof.profile/1", "summary": "one benchmark"}
    return {**head, "device": "cpu", "processes_per_host": 1, "stages": {stage: settings_of_stage}}


GANG_PROFILE = small_profile("gang", "pairs", size_bytes=131072, seconds=2.0)
HOST_PROFILE = small_profile("benchmark", "verbs")
"""The ranks do not import torch. On hosts without RDMA ports, `benchmark.duration` is the only measured value."""
MEASURING = "--tags=run,report"
"""Option with which a playbook only tests the hosts and writes the report. It does not install the agent or start exporters."""


def group(runs: Path | str, profile: Path | str, **variables: Any) -> dict[str, Any]:
    """Return the inventory variables of the rack."""
    return {
        "rackproof_profile": str(profile),
        "rackproof_revalidate_profile": str(profile),
        "nvidia_driver_state": "ignored",
        "rackproof_rack": "rack1",
        "rackproof_fabric_interface": "eth0",
        "rackproof_python": sys.executable,
        "rackproof_system_torch": True,
        "rackproof_minimum_free_bytes": 100_000_000,
        "rackproof_runs_directory": str(runs),
        **variables,
    }


@dataclass(frozen=True)
class Site:
    """A control node and a rack of three hosts, whose GPUs have serials."""

    lab: Lab
    directory: Path

    @property
    def runs(self) -> Path:
        return self.directory / "runs"

    def play(self, playbook: str, run_id: str, *options: str, **variables: Any) -> subprocess.CompletedProcess[str]:
        inventory = self.lab.inventory(
            groupvars=group(self.runs, self.directory / "profile.yml", **variables), name=run_id
        )
        command = [ANSIBLE, "-i", inventory, ROOT / "playbooks" / f"{playbook}.yml", "-e", f"rackproof_run_id={run_id}"]
        process = self.lab.run([*command, *options], cwd=ROOT, check=False, timeout=DEADLINE_S)
        print(process.stdout[-7000:], process.stderr[-2000:])
        return process

    def rackproof(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.lab.run([*RACKPROOF, *arguments], cwd=ROOT, check=False)

    def report(self, run_id: str) -> dict[str, Any]:
        document: dict[str, Any] = documents.read(self.runs / run_id / "report.json", "report", max_bytes=50_000_000)
        return document

    def gpus(self, host: str, *lines: str) -> None:
        """Write the scenario of a host's fake NVML: healthy GPUs with serials of this host, and these lines as overrides."""
        number = HOSTS.index(host)
        identities = [f"gpu.{index}.Serial=165{number}00000000{index}" for index in range(4)]
        identities += [f"gpu.{index}.UUID=GPU-{number}{index}b7e0c5-2d93-4f68-ba10-5c8e96f3d702" for index in range(4)]
        text = "\n".join([f"include={nvml.scenario('healthy-h200x4')}", *identities, *lines])
        self.lab.put(host, SCENARIO, f"{text}\n")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, agent_archive: Path) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("revalidate")
    (directory / "runs").mkdir()
    (directory / "profile.yml").write_text(yaml.safe_dump(GANG_PROFILE))
    library = nvml.build(directory / "nvml") / nvml.LIBRARY
    with Lab(directory / "lab") as lab:
        install_agent(lab, agent_archive)
        site = Site(lab, directory)
        for host in HOSTS:
            site.gpus(host)
            hook = (
                f"echo 'SetEnv RACKPROOF_NVML_SCENARIO={SCENARIO}' >>/etc/ssh/sshd_config; kill -HUP $(pgrep -o sshd)"
            )
            copy = f"base64 -d >/usr/lib/{nvml.LIBRARY}; {hook}"
            lab.on(host, "sh", "-c", copy, stdin=base64.b64encode(library.read_bytes()).decode())
        yield site


@contextmanager
def limited_links(lab: Lab, slow: str = "") -> Iterator[None]:
    """Limit the link of each host to RATE, but that of the host `slow` to SLOW_RATE."""
    with ExitStack() as stack:
        for host in HOSTS:
            stack.enter_context(links.limited(lab, host, SLOW_RATE if host == slow else RATE))
        yield


@pytest.fixture(scope="module")
def accepted(site: Site) -> dict[str, Any]:
    began = time.monotonic()
    with limited_links(site.lab):
        assert site.play("acceptance", "accepted", MEASURING).returncode == 0
    print(f"acceptance: {time.monotonic() - began:.1f} s")
    accepting = site.rackproof("baseline", "accept", site.runs / "accepted", "--baseline", site.directory / "baselines")
    assert accepting.returncode == 0, accepting.stderr
    return site.report("accepted")


@pytest.fixture(scope="module")
def revalidated(site: Site, accepted: dict[str, Any]) -> dict[str, Any]:
    """Re-validate the rack after its maintenance, and return the report."""
    began = time.monotonic()
    site.gpus(SWAPPED, f"gpu.3.Serial={NEW_SERIAL}", "gpu.3.UUID=GPU-99999999-2d93-4f68-ba10-5c8e96f3d702")
    with limited_links(site.lab, SLOW):
        reason = ("-e", "rackproof_reason='replaced GPU 3 of node3'")
        site.play("revalidate", "after", MEASURING, *reason, rackproof_baseline=str(site.directory / "baselines"))
    print(f"re-validation: {time.monotonic() - began:.1f} s")
    return site.report("after")


def test_rack_is_accepted_with_its_serials(accepted: dict[str, Any]) -> None:
    assert accepted["decision"] == "accepted"
    serials = {host["name"]: [gpu["serial"] for gpu in host["gpus"]] for host in accepted["hosts"]}
    assert serials["node3"] == [f"165200000000{index}" for index in range(4)]


def test_revalidation_states_its_reason(site: Site, revalidated: dict[str, Any]) -> None:
    plan = documents.read(site.runs / "after" / "plan.json", "plan", max_bytes=50_000_000)
    assert plan["reason"] == "replaced GPU 3 of node3"
    assert "Reason: replaced GPU 3 of node3" in (site.runs / "after" / "report.md").read_text()


def test_only_the_slow_link_and_the_replaced_gpu_are_reported(site: Site, revalidated: dict[str, Any]) -> None:
    """`rackproof diff` compares the two runs; the report compares the second run with the baseline. Both find these changes."""
    done = site.rackproof("diff", site.runs / "accepted", site.runs / "after", "--json")
    assert done.returncode == 1
    for changes in (json.loads(done.stdout)["changes"], revalidated["changes"]):
        (swapped,) = (item for item in changes if item["kind"] == "replaced")
        assert (swapped["host"], swapped["old"], swapped["new"]) == (SWAPPED, "1652000000003", NEW_SERIAL)
        slow = [item for item in changes if item["kind"] == "regressed"]
        assert {item["what"] for item in slow} == {"pairs.bandwidth"}
        assert all(SLOW in (item["host"], item["scope"].partition("partner=")[2]) for item in slow)
        assert not [item for item in changes if item["kind"] in ("moved", "gone", "new")]
    assert revalidated["decision"] == "rejected"


# --- re-validation by a timer: node1 is the control node of node2 and node3. A fake Slurm reports a job on node3.


SLURM = """#!/bin/sh
echo "$*" >>/root/slurm.log
case "$*" in
"squeue -h -w node3 "*) echo 4711:alice:RUNNING ;;
"scontrol show node "*)
  echo "NodeName=$4 State=IDLE$(test -f /root/$4 && echo +DRAIN) Reason=$(cat /root/$4) [root@2026-11-21T04:00:00]" ;;
"scontrol update "*state=drain*) echo "${5#reason=}" >"/root/${3#nodename=}" ;;
"scontrol update "*state=resume) rm "/root/${3#nodename=}" ;;
esac
"""
"""Fake squeue and scontrol: node3 has a job, and both nodes can be drained."""
HOOK = """
import http.server

class Hook(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        with open("/root/hook.log", "ab") as log:
            log.write(self.rfile.read(int(self.headers["Content-Length"])) + b"\\n")
        self.send_response(200 if self.headers["Authorization"] == "Bearer canary-2" else 403)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", 8800), Hook).serve_forever()
"""
UNITS = "/etc/systemd/system/rackproof-revalidate-rack1"


@dataclass(frozen=True)
class Control:
    """The lab host node1, which is the control node of the other hosts."""

    site: Site

    def on(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        done = self.site.lab.on("node1", *command, cwd=ROOT, check=False, timeout=DEADLINE_S, **options)
        print(done.stdout[-7000:], done.stderr[-2000:])
        return done

    def schedule(self, *options: str) -> subprocess.CompletedProcess[str]:
        environment = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        return self.on(ANSIBLE, "-i", "/root/rack1.yml", ROOT / "playbooks" / "schedule.yml", *options, env=environment)

    def text(self, path: str) -> str:
        return self.site.lab.on("node1", "cat", path, check=False).stdout


@pytest.fixture(scope="module")
def control(site: Site) -> Control:
    lab = site.lab
    variables = group(
        "/root/runs",
        PROFILE,
        rackproof_scheduler="slurm",
        rackproof_scheduler_command=["/root/slurm"],
        rackproof_drain=True,
        rackproof_notify_webhook="http://127.0.0.1:8800/canary-1",
        rackproof_notify_headers={"Authorization": "Bearer canary-2"},
        ansible_user="root",
        ansible_ssh_private_key_file="/root/key",
        ansible_ssh_common_args=SSH_OPTIONS,
        ansible_python_interpreter=str(MODULE_PYTHON),
    )
    hosts = {host: {"ansible_host": lab.host(host).address} for host in HOSTS[1:]}
    inventory = {"all": {"children": {"gpu_hosts": {"hosts": hosts, "vars": variables}}}}
    lab.put("node1", "/root/key", lab.key.read_text(), mode=0o600)
    lab.put("node1", "/root/rack1.yml", yaml.safe_dump(inventory))
    lab.put("node1", "/root/host_vars/localhost.yml", CONTROL_NODE)
    lab.put("node1", PROFILE, yaml.safe_dump(HOST_PROFILE))
    lab.put("node1", "/root/slurm", SLURM, mode=0o755)
    lab.put("node1", "/root/hook.py", HOOK)
    lab.start("node1", sys.executable, "/root/hook.py")
    lab.on("node1", "mkdir", "-p", "/etc/systemd/system", "/etc/cron.d", "/root/runs")
    return Control(site)


def test_timer_service_reports_the_busy_host_as_skipped(control: Control, accepted: dict[str, Any]) -> None:
    control.schedule()
    unit = dict(line.split("=", 1) for line in control.text(f"{UNITS}.service").splitlines() if "=" in line)
    fired = control.on(*shlex.split(unit["ExecStart"].replace("%%", "%")))
    assert fired.returncode == 2
    assert "canary" not in fired.stdout + fired.stderr
    (run,) = control.on("sh", "-c", "ls -d /root/runs/rack1-*").stdout.split()
    report = json.loads(control.text(f"{run}/report.json"))
    hosts = {host["name"]: host for host in report["hosts"]}
    assert report["decision"] == "incomplete"
    assert hosts["node3"]["coverage"]["skipped"] == hosts["node3"]["coverage"]["expected"] > 0
    reasons = {item["reason"] for item in report["verdicts"] if item["host"] == "node3" and item["verdict"] != "pass"}
    assert reasons == {"skipped: busy: Slurm job 4711 of alice (RUNNING)"}
    assert [gpu["serial"] for gpu in hosts["node3"]["gpus"]]  # its snapshot was taken
    assert hosts["node2"]["coverage"]["measured"] > 0
    (notification,) = map(json.loads, control.text("/root/hook.log").splitlines())
    assert (notification["state"], notification["decision"], list(notification["busy"])) == (
        "busy",
        "incomplete",
        ["node3"],
    )
    assert "in use and not measured: node3" in notification["text"]
    updates = [line for line in control.text("/root/slurm.log").splitlines() if "update" in line]
    mark = f"reason=rackproof:{Path(run).name}"
    drained = [f"scontrol update nodename={host} state=drain {mark}" for host in ("node2", "node3")]
    assert updates == [
        *drained,
        "scontrol update nodename=node3 state=resume",
        "scontrol update nodename=node2 state=resume",
    ]
    assert control.on("sh", "-c", f"ls {run}").stdout.split().count("drained.json") == 0


def test_timer_service_exits_with_75_for_a_locked_run_and_systemd_counts_that_as_success(control: Control) -> None:
    (run,) = control.on("sh", "-c", "ls -d /root/runs/rack1-*").stdout.split()
    claim = "import pathlib, sys, time; from fleet.records import run_lock; run_lock.acquire(pathlib.Path(sys.argv[1]))"
    claim += "; print(1, flush=True); time.sleep(60)"
    holder = control.site.lab.start("node1", sys.executable, "-c", claim, run, cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()
    service = control.text(f"{UNITS}.service")
    unit = dict(line.split("=", 1) for line in service.splitlines() if "=" in line)
    fired = control.on(*shlex.split(unit["ExecStart"]))
    holder.kill()
    assert fired.returncode == 75 == int(unit["SuccessExitStatus"])
    assert "is locked by" in fired.stderr
