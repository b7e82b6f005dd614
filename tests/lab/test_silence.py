"""Test a gang (the hosts of one multi-node launch) that fails or hangs: the cause is reported before torch times out.

Real supervisors (each watches the ranks of its host), torchrun and gloo run on three lab hosts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.records import to_json
from tests import builders
from tests.lab import links, processes
from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
HOSTS = ("node1", "node2", "node3")
RANKS = {"node1": (0,), "node2": (1, 2), "node3": (3,)}
"""Host -> its ranks."""
TIMEOUT_S = 60.0
"""Timeout of the process group in seconds: much longer than the time within which the cause must be reported."""
STAGE = {
    "gemm": {"dtypes": ["fp32"], "size": 64, "seconds": 0.02},
    "collective": {
        "ops": ["all_reduce"],
        "placements": ["in_place"],
        "sizes_bytes": [8, 1 << 16, 1 << 20],
        "seconds": 100.0,  # the test ends it much earlier
    },
}
DURING = "collective all_reduce in_place 8 B"
"""Phase of every rank when a test injects a fault into running measurements."""
STATE = "/var/lib/rackproof/runs"
BUSY_S = 30.0
"""Seconds within which the cause must be reported, even if the CPUs are busy.

The tests print the actual time. On idle CPUs it is at most 15 s."""
GONE_S = 8.0
"""Seconds within which the last process of Rackproof must end, after the launch is recorded."""


class Gang:
    """One launch of a gang. Its `members` are some or all of the three lab hosts."""

    ranks: Mapping[str, tuple[int, ...]] = RANKS
    during = DURING
    options = ""
    """Further options of `rackproof launch`."""

    def __init__(self, lab: Lab, run_id: str, timeout_s: float = TIMEOUT_S, members: tuple[str, ...] = HOSTS) -> None:
        self.lab, self.run_id, self.directory, self.members = lab, run_id, f"{STATE}/{run_id}", members
        plan = builders.plan(*members, profile="rehearsal")
        stage = replace(plan.stage("gang"), benchmarks=STAGE, deadline_s=120.0, collective_timeout_s=timeout_s)
        hosts = tuple(
            replace(
                host,
                address=lab.host(host.name).address,
                gang="rack1",
                devices=tuple(range(len(self.ranks[host.name]))),
            )
            for host in plan.hosts
        )
        self._plan = json.dumps(to_json(replace(plan, run_id=run_id, stages=(stage,), hosts=hosts)))

    def _rackproof(self, host: str, *arguments: str, stdin: str | None = None) -> str:
        command = [sys.executable, "-m", "rackproof", *arguments, "--run-dir", self.directory, "--host", host]
        return self.lab.on(host, *command, stdin=stdin, cwd=ROOT).stdout

    def start(self, hosts: tuple[str, ...] = (), **variables: str) -> None:
        """Inspect `hosts` (default: all members), then start the launch on them over SSH in the background, as
        the role `gang` does.

        `variables` maps a host to `NAME=value`, a variable that is set only for the launch on that host.
        """
        hosts = hosts or self.members
        for host in hosts:
            self._rackproof(host, "inspect", "--plan", "-", stdin=self._plan)
        members = ",".join(self.members)
        for host in hosts:
            launch = (
                f"launch --run-dir {self.directory} --host {host} --members {members} --interface eth0 {self.options}"
            )
            assignment = variables.get(host, "")
            self.lab.ssh(host, "sh", "-c", f"cd {ROOT} && {assignment} {sys.executable} -m rackproof {launch} --detach")

    def read(self, host: str, path: str) -> Any:
        """Return a JSON file of the run on a host, or None if it does not exist yet."""
        try:
            return json.loads(self.lab.host_path(host, f"{self.directory}/{path}").read_text())
        except FileNotFoundError:
            return None

    def wait_until_measuring(self) -> None:
        """Wait until every rank has been in the phase `during` for about a second."""
        paths = {(host, f"work/gang/rank{rank}.state.json") for host in self.members for rank in self.ranks[host]}
        wait(lambda: {(self.read(*path) or {}).get("phase") for path in paths} == {self.during}, 60)
        time.sleep(1.0)

    def launch_of(self, host: str) -> dict[str, Any] | None:
        """Return the last launch in the record of the host, or None if there is none yet."""
        launches = (self.read(host, "gangs/rack1.json") or {}).get("launches", [])
        return launches[-1] if launches else None

    def measured_scopes(self, host: str) -> set[str]:
        """Return the scopes with measured values in the record of the host."""
        return {
            observation["scope"]
            for observation in self.read(host, "gangs/rack1.json")["observations"]
            if "value" in observation
        }

    def wait_for_launches(self, hosts: tuple[str, ...], since: float, timeout_s: float) -> dict[str, dict[str, Any]]:
        """Wait until the record of each of `hosts` has a launch; return host -> launch.

        Print for each host how many seconds after `since` its launch was recorded.
        """
        by_host: dict[str, dict[str, Any]] = {}
        while len(by_host) < len(hosts) and time.monotonic() - since < timeout_s:
            for host in hosts:
                if host not in by_host and (launch := self.launch_of(host)):
                    by_host[host] = launch
                    print(f"{self.run_id}: {host} after {time.monotonic() - since:.1f} s: {launch['reason']}")
            time.sleep(0.1)
        for host in hosts:
            log = self.lab.on(host, "cat", f"{self.directory}/gang.log", check=False).stdout
            assert host in by_host, f"{host} has no launch after {timeout_s} s; its log: {log}"
        return by_host

    def pid(self, host: str, pattern: str) -> str:
        """Return the PID of the oldest process on a host whose command line matches `pattern`."""
        return self.lab.on(host, "pgrep", "-of", pattern).stdout.strip()

    def processes(self, host: str) -> str:
        """Return PID and command line of each process of Rackproof on a host, one per line."""
        return self.lab.on(host, "pgrep", "-af", processes.AGENT, check=False).stdout

    def check_no_processes(self, hosts: tuple[str, ...]) -> None:
        """Wait until no process of Rackproof runs on `hosts`; fail after GONE_S seconds.

        The wait is needed because a supervisor writes its record before it exits.
        """
        deadline = time.monotonic() + GONE_S
        while (
            remaining := {host: running for host in hosts if (running := self.processes(host))}
        ) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not remaining


@contextmanager
def limit_links(lab: Lab) -> Iterator[None]:
    """Limit the bandwidth of all links, so that ranks wait for data and leave the processors to other tests."""
    with ExitStack() as stack:
        for host in HOSTS:
            stack.enter_context(links.limited(lab, host, "500kbit"))
        yield


def wait(condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait until the condition is true; fail after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {timeout_s} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("silence") / "lab") as new_lab, limit_links(new_lab):
        yield new_lab


def common_reason(launches: dict[str, dict[str, Any]]) -> str:
    """Check that the launch failed on every host, with one common reason; return the reason."""
    assert {launch["outcome"] for launch in launches.values()} == {"failed"}
    (text,) = {launch["reason"] for launch in launches.values()}
    return str(text)


def pid_of_rank(lab: Lab, host: str, rank: int) -> str:
    """Return the PID of a rank. The name of its process is `rank NUMBER`."""
    return lab.on(host, "pgrep", "-x", f"rank {rank}").stdout.strip()


def test_rank_stopped_by_sigstop_is_reported(lab: Lab) -> None:
    gang = Gang(lab, "stopped", members=("node1", "node2"))
    gang.start()
    gang.wait_until_measuring()
    stopped = pid_of_rank(lab, "node2", 2)
    since = time.monotonic()
    lab.on("node2", "kill", "-STOP", stopped)
    text = common_reason(gang.wait_for_launches(gang.members, since, BUSY_S))
    assert text == f'host node2 cpu=1 rank 2 in phase "{DURING}": silent for 8 s: its process is stopped'
    gang.check_no_processes(gang.members)


def resolve_own_name_to_loopback(lab: Lab) -> None:
    for host in HOSTS:
        lab.put(host, "/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 {host}\n")


def test_killed_rank_is_reported(lab: Lab) -> None:
    """The rank is reported even if no interface is given and the hosts resolve their own names to 127.0.1.1."""
    resolve_own_name_to_loopback(lab)
    gang = Gang(lab, "killed", members=("node1", "node2"))
    gang.options = "--interface="
    gang.start()
    gang.wait_until_measuring()
    killed = pid_of_rank(lab, "node2", 2)
    since = time.monotonic()
    lab.on("node2", "kill", "-KILL", killed)
    text = common_reason(gang.wait_for_launches(gang.members, since, 5))
    assert text == f'host node2 cpu=1 rank 2 in phase "{DURING}": killed by SIGKILL'
    assert -9 in [rank["exit_code"] for rank in gang.launch_of("node2")["ranks"]]  # type: ignore[index]
    gang.check_no_processes(gang.members)


def test_killed_launcher_is_reported(lab: Lab) -> None:
    """The launcher of node1 serves the TCPStore of the process group, so the ranks of node2 fail at once too.

    The reported cause is the launcher, not those ranks.
    """
    gang = Gang(lab, "launcher", members=("node1", "node2"))
    gang.start()
    gang.wait_until_measuring()
    guard = lab.on("node1", "pgrep", "-x", "rank 0's guard").stdout.strip()
    launcher = lab.on("node1", "ps", "-o", "ppid=", "-p", guard).stdout.strip()
    since = time.monotonic()
    lab.on("node1", "kill", "-KILL", launcher)
    text = common_reason(gang.wait_for_launches(gang.members, since, BUSY_S))
    assert text == f'host node1 rank 0 in phase "{DURING}": its launcher was killed by SIGKILL'
    assert [gang.measured_scopes(host) for host in gang.members] == [{"cpu=0", "host"}, {"cpu=0", "cpu=1", "host"}]
    gang.check_no_processes(gang.members)


def test_torch_that_cannot_be_imported_is_reported(lab: Lab) -> None:
    """No rank of node3 starts. If node3 did not report why, the rank of node1 would wait until the deadline of the stage."""
    why = "libcudart.so.13: cannot open shared object file: No such file or directory"
    lab.put("node3", "/opt/broken/torch/__init__.py", f"raise ImportError({why!r})")
    gang = Gang(lab, "broken", members=("node1", "node3"))
    since = time.monotonic()
    gang.start(node3="PYTHONPATH=/opt/broken")
    text = common_reason(gang.wait_for_launches(gang.members, since, BUSY_S))
    ended = "its launcher ended with exit code 1 before any rank started"
    assert text == f'host node3 rank 1 in phase "start": {ended}: ImportError: {why}'
    assert gang.launch_of("node3")["ranks"] == []  # type: ignore[index]
    gang.check_no_processes(gang.members)


def test_missing_interface_is_attributed_to_the_hosts_without_it_and_not_to_devices(lab: Lab) -> None:
    """On node2 and node3, GLOO_SOCKET_IFNAME names an interface that does not exist. On node1 it is not set.

    The option `--interface` is empty, and all hosts resolve their own names to 127.0.1.1.
    """
    resolve_own_name_to_loopback(lab)
    misconfigured = ("node2", "node3")
    gang = Gang(lab, "interface")
    gang.options = "--interface="
    since = time.monotonic()
    gang.start(**dict.fromkeys(misconfigured, "GLOO_SOCKET_IFNAME=bond9"))
    launches = gang.wait_for_launches(gang.members, since, BUSY_S)
    text = common_reason(launches)
    assert "Unable to find address for: bond9" in text
    (culprit,) = {json.dumps(launch["culprit"]) for launch in launches.values()}
    assert json.loads(culprit)["kind"] == "rank_raised"
    assert sorted(json.loads(culprit)["hosts"]) == sorted(misconfigured)
    assert json.loads(culprit).get("scope", "") == ""
    gang.check_no_processes(gang.members)


def test_launcher_killed_before_its_ranks_start_is_reported(lab: Lab) -> None:
    """No rank starts, because node2 does not join.

    The test kills the launcher of node1, which serves the TCPStore. Therefore the launcher of node3 exits too. The reported cause
    is the launcher of node1.
    """
    gang = Gang(lab, "early")
    present = ("node1", "node3")
    gang.start(present)
    connected = ("ss", "-Htn", "state", "established", "sport = :29500", "dst", lab.host("node3").address)
    wait(lambda: lab.on("node1", *connected).stdout != "", 30)
    since = time.monotonic()
    lab.on("node1", "pkill", "-KILL", "-f", "^[^ ]*python[^ ]* -m agent.benchmarks.rendezvous")
    text = common_reason(gang.wait_for_launches(present, since, BUSY_S))
    assert text == 'host node1 rank 0 in phase "start": its launcher was killed by SIGKILL before any rank started'
    gang.check_no_processes(present)


def test_host_that_does_not_join_is_reported(lab: Lab) -> None:
    gang = Gang(lab, "absent", timeout_s=10.0)
    present = ("node1", "node3")
    since = time.monotonic()
    gang.start(present)
    text = common_reason(gang.wait_for_launches(present, since, 30))
    assert text == "host node2: did not join the gang within 20 s; hosts node1, node3 did"
    gang.check_no_processes(present)
