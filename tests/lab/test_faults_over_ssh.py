"""Test one run over real SSH with two healthy hosts and eleven faulty ones, each with a different fault (docs/faults.md).

Each fault must be reported with its host, affect only that host, and leave no partial record and no process. The tests print the
time from each fault to its report.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents
from schemas.records import to_json
from tests import builders
from tests.lab.fault_injection import IDLE_WITHOUT_TORCH, inject_fault
from tests.lab.kill_points import ANSIBLE_OUTPUT, Attempt
from tests.lab.lab import Lab
from tests.lab.test_silence import pid_of_rank, wait

ROOT = Path(__file__).parents[2]
STATE = "/var/lib/rackproof"
LOST, *HEALTHY = ("node1", "node2", "node3")
HUNG, FULL, READ_ONLY, AGENT_OOM, RANK_OOM, PORT, CLOCK, OPEN, LINKED, EARLIER = (
    f"node{number}" for number in range(4, 14)
)
"""Hosts, named by their fault. HUNG: sshd is suspended. FULL, READ_ONLY: the file system is full or read-only.
AGENT_OOM, RANK_OOM: the kernel kills the agent or a rank, because a control group has no memory left. PORT: the rendezvous port
of the gang (the hosts of one multi-host launch) is in use. CLOCK: the clock is an hour ahead. OPEN, LINKED, EARLIER: the run
directory is writable by other users, is a link, or belongs to another run with the same run id. LOST: the link of the host is cut
during the gang's second launch. LOST is the first host of the gang, and the other hosts depend on its messages."""
PROFILE = {
    "schema": "rackproof.profile/1",
    "summary": "long enough to inject faults",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "benchmark": {
            "deadline_s": 90,
            "collective_timeout_s": 60,
            "benchmarks": {"verbs": {"seconds": 6}},
        },
        "gang": {
            "deadline_s": 90,
            "collective_timeout_s": 60,
            "benchmarks": {
                "collective": {
                    "ops": ["all_reduce"],
                    "placements": ["in_place"],
                    "sizes_bytes": [8],
                    "seconds": 0.1,
                    "precision": 1e-9,
                },
                "pairs": {"size_bytes": 1 << 20, "seconds": 0.2},
            },
        },
    },
}


# --- control groups


V1 = Path("/sys/fs/cgroup/memory")
TOP = V1 if V1.is_dir() else Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limit:
    """A control group (v1 or v2) with a memory limit."""

    path: Path

    def set(self, limit: int) -> None:
        (self.path / ("memory.limit_in_bytes" if TOP == V1 else "memory.max")).write_text(str(limit))

    def used(self) -> int:
        return int((self.path / ("memory.usage_in_bytes" if TOP == V1 else "memory.current")).read_text())

    def take(self, lab: Lab, host: str, *pids: str) -> None:
        """Move processes of the host into the group, by their PIDs in the host."""
        for pid in pids:
            lab.on(host, "sh", "-c", f"echo {pid} >{self.path}/cgroup.procs")

    def exhaust(self, lab: Lab, host: str, victim: str) -> None:
        """Start a process that exhausts the memory of the group. The kernel kills `victim` first, and then the started process.

        The kernel kills the process with the highest score: oom_score_adj plus the share of the group's memory in thousandths.
        The oom_score_adj of the victim is 1000, that of the started process 700. A launcher in the group must survive. Its
        oom_score_adj is 0, and it uses less than 70 % of the group's memory. So its score is below 700.
        """
        self.set(self.used() + 64_000_000)
        hog = f"echo 1000 >/proc/{victim}/oom_score_adj; echo 700 >/proc/self/oom_score_adj; echo $$ >{self.path}/cgroup.procs"
        lab.on(host, "sh", "-c", f"{hog}; exec {sys.executable} -c 'bytearray(10**9)'", check=False)


@contextlib.contextmanager
def limited(lab: Lab, name: str) -> Iterator[Limit]:
    """Create a control group of this lab, and remove it at the end. If it cannot be created, skip the tests of this module."""
    group = Limit(TOP / f"{lab.control.removesuffix('-control')}-{name}")
    try:
        group.path.mkdir()
        group.used()
    except OSError as error:
        pytest.skip(f"cannot create the control group {group.path}: {error}")
    try:
        yield group
    finally:
        wait(lambda: remove_group(group.path), 10)


def remove_group(path: Path) -> bool:
    """Move the processes of a control group to the group TOP, and remove the control group. Return whether it is removed."""
    for pid in (path / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (TOP / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        path.rmdir()
    return not path.exists()


# --- the run


@dataclass
class Fleet:
    """The finished run with its faults."""

    lab: Lab
    directory: Path
    fault_times: dict[str, float] = field(default_factory=dict)
    """Host -> wall-clock time of its fault."""

    @property
    def run(self) -> Path:
        return self.directory / "runs" / "fire"

    def report(self) -> dict[str, Any]:
        document: dict[str, Any] = documents.read(self.run / "report.json", "report", max_bytes=50_000_000)
        return document

    def events(self, host: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]
        return [event for event in lines if event.get("host") == host]


PLAYBOOK = [
    {"name": "Preflight", "hosts": "gpu_hosts", "gather_facts": False, "roles": ["preflight"]},
    *({"import_playbook": str(ROOT / "playbooks" / f"{stage}.yml")} for stage in ("inspect", "benchmark", "gang")),
]
"""An acceptance that installs nothing: it uses the agent in the Python environment of the tests."""


def play(fleet: Fleet) -> Attempt:
    """Start PLAYBOOK on all hosts."""
    lab, directory = fleet.lab, fleet.directory
    (directory / "runs").mkdir()
    (directory / "playbooks").mkdir()
    (directory / "rackproof").symlink_to(ROOT / "rackproof")
    (directory / "playbooks" / "fire.yml").write_text(yaml.safe_dump(PLAYBOOK))
    (directory / "profile.yml").write_text(yaml.safe_dump(PROFILE))
    group = {
        "rackproof_profile": str(directory / "profile.yml"),
        "rackproof_rack": "rack1",
        "rackproof_fabric_interface": "eth0",
        "rackproof_python": sys.executable,
        "rackproof_minimum_free_bytes": 1_000_000,
        "rackproof_runs_directory": str(directory / "runs"),
        "nvidia_driver_state": "ignored",
        "container_toolkit_state": "ignored",
    }
    inventory = lab.inventory({CLOCK: {"rackproof_python": "/root/python"}}, group)
    command: list[str | Path] = [
        Path(sys.executable).parent / "ansible-playbook",
        "-i",
        inventory,
        "-e",
        "rackproof_run_id=fire",
    ]
    command += [directory / "playbooks" / "fire.yml"]
    process = lab.popen(
        command,
        cwd=ROOT,
        env={**ANSIBLE_OUTPUT, "ANSIBLE_ROLES_PATH": str(ROOT / "roles")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Attempt(process, "fire")


ENDLESS_COLLECTIVE = """
import sys
import threading

if sys.orig_argv[2] == "agent.benchmarks.rendezvous":
    import agent.benchmarks.collectives.collective as collective

    collective._sample = lambda *arguments: threading.Event().wait()
"""
"""Code that makes the collectives of a host endless. So the gang is still in the phase `collective` when the host's fault is
injected."""
CLOCK_AHEAD = "import time\nnow = time.time\ntime.time = lambda: now() + 3600\n"


def prepare(lab: Lab) -> None:
    """Prepare the hosts, and inject the faults that exist before the run."""
    for host in lab.hosts:
        lab.on(host.name, "sh", "-c", f"mkdir {sys.prefix}/wheels && ln -s {sys.prefix} /opt/rackproof")
        inject_fault(lab, host.name, IDLE_WITHOUT_TORCH + ENDLESS_COLLECTIVE * (host.name in (RANK_OOM, LOST)))
    for name in (FULL, READ_ONLY):
        lab.on(name, "sh", "-c", f"mkdir -p {STATE} && mount -t tmpfs -o size=2m tmpfs {STATE}")
    lab.on(FULL, "/opt/rackproof/bin/rackproof", "export", "--port", "9836", "--detach", f"{STATE}/exporter")
    lab.start(PORT, "python3", "-m", "http.server", "29500")
    lab.put(CLOCK, "/root/ahead/sitecustomize.py", CLOCK_AHEAD)
    lab.put(CLOCK, "/root/python", f'#!/bin/sh\nPYTHONPATH=/root/ahead exec {sys.executable} "$@"\n', mode=0o755)
    run_directory = f"{STATE}/runs/fire"
    lab.on(OPEN, "sh", "-c", f"mkdir -p {run_directory} && chmod 777 {run_directory}")
    lab.on(LINKED, "sh", "-c", f"mkdir -p {STATE}/runs /srv/fire && ln -s /srv/fire {run_directory}")
    lab.put(
        EARLIER,
        f"{run_directory}/plan.json",
        json.dumps(to_json(replace(builders.plan(EARLIER, rackproof_gang="none"), run_id="fire"))),
    )
    lab.on(EARLIER, "chmod", "700", run_directory)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("faults") / "lab", hosts=13) as new_lab:
        yield new_lab


def is_measuring(lab: Lab, host: str, stage: str, phase: str) -> Callable[[], bool]:
    """Return a function that returns whether a rank of the host is in a phase whose name begins with `phase`."""
    work = lab.host_path(host, f"{STATE}/runs/fire/work/{stage}")

    def is_in_phase() -> bool:
        for state in work.glob("rank*.state.json"):
            with contextlib.suppress(FileNotFoundError):  # the next launch removes the files
                if f'"phase": "{phase}' in state.read_text():
                    return True
        return False

    return is_in_phase


@pytest.fixture(scope="module")
def fleet(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Play the run with all faults, write its report, and print how long the run took."""
    fleet = Fleet(lab, tmp_path_factory.mktemp("fire"))
    prepare(lab)
    with limited(lab, "rank") as rank, limited(lab, "agent") as agent:
        for group, host in ((rank, RANK_OOM), (agent, AGENT_OOM)):
            group.take(lab, host, lab.on(host, "pgrep", "-o", "sshd").stdout.strip())
        fleet.fault_times = dict.fromkeys((PORT, CLOCK, OPEN, LINKED, EARLIER), time.time())
        attempt = play(fleet)
        try:
            inject_during_run(fleet, attempt, agent, rank)
            cut_link_during_second_launch(fleet, attempt)
            attempt.end()
            lab.run([sys.executable, ROOT / "rackproof", "report", fleet.run], check=False)
        finally:
            lab.on(HUNG, "pkill", "-CONT", "-f", "^sshd: root", check=False)
            lab.reconnect(LOST)
            print("\n".join(attempt.lines)[-8000:])
        print(f"the whole run: {time.time() - fleet.fault_times[PORT]:.1f} s")
        yield fleet


def inject_during_run(fleet: Fleet, attempt: Attempt, agent: Limit, rank: Limit) -> None:
    """Inject the faults that happen during the run."""
    lab = fleet.lab

    def inject(host: str, fault: Callable[[], object]) -> None:
        fleet.fault_times[host] = time.time()
        fault()

    def supervisor() -> str:
        return lab.on(AGENT_OOM, "pgrep", "-of", "rackproof bench --run-dir.*--host=[^ ]+$").stdout.strip()

    assert attempt.reached("inspect : Fetch the record")
    inject(READ_ONLY, lambda: lab.on(READ_ONLY, "mount", "-o", "remount,ro", STATE))
    assert attempt.reached("benchmark : Run the benchmarks")
    faults: dict[str, Callable[[], object]] = {
        AGENT_OOM: lambda: agent.exhaust(lab, AGENT_OOM, supervisor()),
        HUNG: lambda: lab.on(HUNG, "pkill", "-STOP", "-f", "^sshd: root"),
        FULL: lambda: lab.on(FULL, "dd", "if=/dev/zero", f"of={STATE}/fill", "bs=4096", check=False),
    }

    def inject_while_measuring(host: str) -> None:
        wait(is_measuring(lab, host, "benchmark", "verbs"), 60)
        inject(host, faults[host])

    # In parallel, since the stage is too short for one fault after another.
    with ThreadPoolExecutor(len(faults)) as pool:
        list(pool.map(inject_while_measuring, faults))
    wait(is_measuring(lab, RANK_OOM, "gang", "collective"), 120)
    time.sleep(1.0)  # by then the heartbeats have reported the collectives as the current phase
    inject(RANK_OOM, lambda: rank.exhaust(lab, RANK_OOM, pid_of_rank(lab, RANK_OOM, 3)))


def cut_link_during_second_launch(fleet: Fleet, attempt: Attempt) -> None:
    """Cut the link of host LOST during the collectives of the second launch, from which host RANK_OOM is excluded."""
    measuring = is_measuring(fleet.lab, LOST, "gang", "collective")
    wait(lambda: len(recorded_on(fleet, LOST)) == 1, 60)
    wait(lambda: not measuring(), 60)  # the second launch first removes the state files of the first one
    wait(measuring, 120)
    time.sleep(1.0)  # by then the heartbeats have reported the collectives as the current phase
    fleet.fault_times[LOST] = time.time()
    fleet.lab.cut(LOST)


def recorded_on(fleet: Fleet, host: str) -> list[dict[str, Any]]:
    """Return the gang launches in the record that is on the host."""
    record = fleet.lab.host_path(host, f"{STATE}/runs/fire/gangs/rack1.json")
    recorded: list[dict[str, Any]] = json.loads(record.read_text()).get("launches", []) if record.exists() else []
    return recorded


MAX_REPORT_DELAY_S = 60.0
"""Seconds within which each fault must be reported. This is less than the deadline of a stage, 90 s."""
OOM_KILL_MESSAGE = r"killed by the kernel's out-of-memory killer \(oom_kill \d, limit \d+ MB\)"


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (PORT, r"port 29500 is in use by process \d+ \(python3 -m http.server 29500\): .* for all hosts of the gang"),
        (CLOCK, r"the clock is 36\d\d\.\d s ahead of the control node's"),
        (OPEN, f"rackproof: {STATE}/runs/fire is writable by others: chmod go-w"),
        (LINKED, f"rackproof: {STATE}/runs/fire is not a directory"),
        (EARLIER, f"rackproof: {STATE}/runs/fire belongs to run fire, created .*: give this run another run_id"),
        (READ_ONLY, r"Run the benchmarks: rackproof: .*: Read-only file system"),
        (HUNG, r"unreachable at Benchmark: Run the benchmarks"),
        (FULL, r"Check that the stage finished: .*No space left on device"),
        (AGENT_OOM, rf"a process of this command was {OOM_KILL_MESSAGE}"),
    ],
    ids=["port", "clock", "open", "linked", "earlier", "read-only", "hung", "full", "agent-out-of-memory"],
)
def test_faulty_host_is_reported_with_the_cause(fleet: Fleet, host: str, reason: str) -> None:
    report = fleet.report()
    (summary,) = (item for item in report["hosts"] if item["name"] == host)
    assert summary["decision"] == "incomplete"
    (event,) = fleet.events(host)
    delay_s = timestamp(event["at"]) - fleet.fault_times[host]
    print(f"{host}: reported after {delay_s:.1f} s: {event['message']}")
    assert re.search(reason, summary["events"][0]), summary["events"]
    assert any(is_inconclusive_for(item, host, reason) for item in report["verdicts"])
    assert delay_s <= MAX_REPORT_DELAY_S


def is_inconclusive_for(verdict: dict[str, Any], host: str, reason: str) -> bool:
    return (verdict["host"], verdict["verdict"]) == (host, "inconclusive") and bool(
        re.search(reason, verdict["reason"])
    )


def test_rank_killed_by_the_oom_killer_is_reported_by_every_host_and_the_other_hosts_continue(fleet: Fleet) -> None:
    assert [name for name, _ in failures(fleet, RANK_OOM)] == ["gang.fault"]
    launches_of = {host: launches(fleet, host) for host in (*HEALTHY, RANK_OOM)}
    reasons = {recorded[0]["reason"] for recorded in launches_of.values()}
    assert len(reasons) == 1, reasons
    assert re.fullmatch(
        rf'host {RANK_OOM} cpu=0 rank 3 in phase "collective all_reduce.*": {OOM_KILL_MESSAGE}', *reasons
    )
    assert {host: [len(item["members"]) for item in recorded] for host, recorded in launches_of.items()} == {
        **{host: [4, 3, 2] for host in HEALTHY},
        RANK_OOM: [4],
    }
    assert [rank["exit_code"] for rank in launches_of[RANK_OOM][0]["ranks"]] == [-9]
    first = launches_of[HEALTHY[0]][0]
    delay_s = timestamp(first["began"]) + first["duration_s"] - fleet.fault_times[RANK_OOM]
    print(f"{RANK_OOM}: reported after {delay_s:.1f} s: {first['reason']}")
    assert delay_s < 60  # the collective timeout in PROFILE, in seconds


def failures(fleet: Fleet, host: str) -> list[tuple[str, str]]:
    """Return (name of the observation, reason) for each verdict `fail` on the host."""
    verdicts = fleet.report()["verdicts"]
    return [(item["name"], item["reason"]) for item in verdicts if (item["host"], item["verdict"]) == (host, "fail")]


def test_host_whose_link_is_cut_during_a_launch_is_excluded_and_other_hosts_are_measured(fleet: Fleet) -> None:
    report = fleet.report()
    ((name, reason),) = failures(fleet, LOST)
    assert name == "gang.fault"
    assert reason.startswith(f"host {LOST}: no messages for 10 s; check its link, host and supervisor")
    (lost,) = (item for item in report["hosts"] if item["name"] == LOST)
    assert any(event.startswith("unreachable at Gang: Run the launch") for event in lost["events"])
    for host in HEALTHY:
        assert [item["outcome"] for item in launches(fleet, host)] == ["failed", "failed", "finished"]
        second = launches(fleet, host)[1]
        delay_s = timestamp(second["began"]) + second["duration_s"] - fleet.fault_times[LOST]
        print(f"{LOST}: reported by {host} after {delay_s:.1f} s: {second['reason']}")
        assert delay_s < 60  # the collective timeout in PROFILE, in seconds
    assert f"2 of 13 hosts were measured together ({', '.join(HEALTHY)})" in str(report)
    coverage = {item["name"]: item["coverage"] for item in report["hosts"]}
    missing = {host: coverage[host]["expected"] - coverage[host]["measured"] for host in HEALTHY}
    assert missing == dict.fromkeys(HEALTHY, 2 * 11), (
        "bandwidth and latency with each of the 11 hosts that failed must be missing"
    )
    launches_on_lost_host = recorded_on(fleet, LOST)
    assert launches_on_lost_host[1]["reason"].startswith(
        f"host {LOST}: no messages from any other host for 10 s; check its link first"
    )


def test_resumed_run_has_nothing_left_to_launch(fleet: Fleet) -> None:
    hosts = ",".join((LOST, *HEALTHY, RANK_OOM))
    planned = fleet.lab.run(
        [sys.executable, ROOT / "rackproof", "gangs", "--run-dir", fleet.run, "--hosts", hosts]
    ).stdout
    assert planned.startswith("nothing left to launch")


def timestamp(at: str) -> float:
    return datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp()


def launches(fleet: Fleet, host: str) -> list[dict[str, Any]]:
    record = documents.read(fleet.run / "gangs" / "rack1" / f"{host}.json", "record")
    recorded: list[dict[str, Any]] = record["launches"]
    return recorded


def test_hosts_without_a_fault_are_accepted(fleet: Fleet) -> None:
    decisions = {host["name"]: host["decision"] for host in fleet.report()["hosts"]}
    assert [host for host, decision in decisions.items() if decision == "accepted"] == HEALTHY
    assert [host for host, decision in decisions.items() if decision == "rejected"] == [LOST, RANK_OOM]


def test_records_keep_the_stages_and_observations_from_before_the_fault(fleet: Fleet) -> None:
    stages = {
        path.stem: {snapshot["stage"] for snapshot in documents.read(path, "record")["snapshots"]}
        for path in (fleet.run / "hosts").iterdir()
    }
    expected = {host: {"preflight", "benchmark"} for host in (LOST, *HEALTHY, FULL, AGENT_OOM, RANK_OOM)}
    assert stages == {**expected, HUNG: {"preflight"}, READ_ONLY: {"preflight"}}
    measured = documents.read(fleet.run / "hosts" / f"{RANK_OOM}.json", "record")["observations"]
    assert {observation["status"] for observation in measured} == {"measured"}


def test_no_record_is_half_written(fleet: Fleet) -> None:
    """Check the control node and the hosts, including those with a full or read-only file system."""
    assert fleet.report().get("quarantined", []) == []
    for path in fleet.run.rglob("*"):
        assert not path.name.startswith("."), path
    for host in (LOST, *HEALTHY, HUNG, FULL, READ_ONLY, AGENT_OOM, RANK_OOM):
        assert fleet.lab.on(host, "find", STATE, "-name", ".*").stdout == "", host
        text = fleet.lab.on(host, "cat", f"{STATE}/runs/fire/record.json").stdout
        documents.validate(documents.parse(text, source=host), "record", source=host)


def test_exporter_of_the_host_with_a_full_disk_still_answers(fleet: Fleet) -> None:
    page = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9836/metrics', timeout=5).read().decode())"
    assert "rackproof_host_memory_total_bytes" in fleet.lab.on(FULL, sys.executable, "-c", page).stdout


def test_no_process_remains(fleet: Fleet) -> None:
    def remaining_processes() -> dict[str, str]:
        pattern = "rackproof (bench|launch|wait)|torch.distributed|agent.benchmarks|agent.launch.guard"
        processes_by_host = {
            host.name: fleet.lab.on(host.name, "pgrep", "-af", pattern, check=False).stdout for host in fleet.lab.hosts
        }
        return {host: text for host, text in processes_by_host.items() if text}

    # On host HUNG, `rackproof wait` exits only when it notices that its SSH connection is closed.
    wait(lambda: not remaining_processes(), 10)
