"""Who stops a gang is named while torch still waits: real supervisors, torchrun and gloo on three lab hosts."""

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
from tests.lab import links
from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
HOSTS = ("node1", "node2", "node3")
RANKS = {"node1": (0,), "node2": (1, 2), "node3": (3,)}
"""Of each host."""
TIMEOUT_S = 60.0
"""Of the process group: far longer than it may take to name somebody."""
STAGE = {
    "gemm": {"dtypes": ["fp32"], "size": 64, "seconds": 0.02},
    "collective": {
        "ops": ["all_reduce"],
        "placements": ["in_place"],
        "sizes_bytes": [8, 1 << 16, 1 << 20],
        "seconds": 100.0,  # the test ends it long before
    },
}
DURING = "collective all_reduce in_place 8 B"
STATE = "/var/lib/rackproof/runs"
BUSY_S = 30.0
"""For what takes up to 15 s where nothing else keeps the processors busy; how long it took is printed."""
GONE_S = 8.0


class Gang:
    """One launch over the three hosts, or some of them."""

    ranks: Mapping[str, tuple[int, ...]] = RANKS
    options = ""
    """Of the launch."""

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

    def _ours(self, host: str, *arguments: str, stdin: str | None = None) -> str:
        command = [sys.executable, "-m", "rackproof", *arguments, "--run-dir", self.directory, "--host", host]
        return self.lab.on(host, *command, stdin=stdin, cwd=ROOT).stdout

    def start(self, hosts: tuple[str, ...] = (), **variables: str) -> None:
        """Over SSH, in the background, as the role does. `variables`: of a host's environment, `NAME=value`."""
        hosts = hosts or self.members
        for host in hosts:
            self._ours(host, "inspect", "--plan", "-", stdin=self._plan)
        members = ",".join(self.members)
        for host in hosts:
            launch = (
                f"launch --run-dir {self.directory} --host {host} --members {members} --interface eth0 {self.options}"
            )
            with_ = variables.get(host, "")
            self.lab.ssh(host, "sh", "-c", f"cd {ROOT} && {with_} {sys.executable} -m rackproof {launch} --detach")

    def read(self, host: str, path: str) -> Any:
        """A JSON file of the run on a host; None where there is none yet."""
        try:
            return json.loads(self.lab.host_path(host, f"{self.directory}/{path}").read_text())
        except FileNotFoundError:
            return None

    def measuring(self) -> None:
        """Returns once every rank is in the midst of an operation."""
        for host in self.members:
            for rank in self.ranks[host]:
                wait(lambda: (self.read(host, f"work/gang/rank{rank}.state.json") or {}).get("phase") == DURING, 60)  # noqa: B023
        time.sleep(1.0)

    def ended(self, host: str) -> dict[str, Any] | None:
        """The launch in the host's record, once it is there."""
        launches = (self.read(host, "gangs/rack1.json") or {}).get("launches", [])
        return launches[-1] if launches else None

    def kept(self, host: str) -> set[str]:
        """What the host's record has of the time before."""
        return {
            observation["scope"]
            for observation in self.read(host, "gangs/rack1.json")["observations"]
            if "value" in observation
        }

    def verdicts(self, hosts: tuple[str, ...], since: float, patience_s: float) -> dict[str, dict[str, Any]]:
        """The launch of each host, and prints how long after `since` its record had it."""
        by_host: dict[str, dict[str, Any]] = {}
        while len(by_host) < len(hosts) and time.monotonic() - since < patience_s:
            for host in hosts:
                if host not in by_host and (launch := self.ended(host)):
                    by_host[host] = launch
                    print(f"{self.run_id}: {host} after {time.monotonic() - since:.1f} s: {launch['reason']}")
            time.sleep(0.1)
        for host in hosts:
            log = self.lab.on(host, "cat", f"{self.directory}/gang.log", check=False).stdout
            assert host in by_host, f"{host} has no verdict after {patience_s} s; its log: {log}"
        return by_host

    def pid(self, host: str, pattern: str) -> str:
        """The oldest process of that command line."""
        return self.lab.on(host, "pgrep", "-of", pattern).stdout.strip()

    def processes(self, host: str) -> str:
        """Command lines of ours that run on a host."""
        return self.lab.on(host, "pgrep", "-af", "rackproof|torch.distributed|agent.benchmarks", check=False).stdout

    def gone(self, hosts: tuple[str, ...]) -> None:
        """Nothing of ours runs there any more; a supervisor that has written its record takes a moment to end."""
        ends = time.monotonic() + GONE_S
        while (
            left := {host: running for host in hosts if (running := self.processes(host))}
        ) and time.monotonic() < ends:
            time.sleep(0.2)
        assert not left


@contextmanager
def slowed(lab: Lab) -> Iterator[None]:
    """Ranks that are all the time in an operation wait for their links then, and leave the processors to others."""
    with ExitStack() as stack:
        for host in HOSTS:
            stack.enter_context(links.limited(lab, host, "500kbit"))
        yield


def wait(true: Callable[[], bool], patience_s: float) -> None:
    ends = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < ends, f"not within {patience_s} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("silence") / "lab") as new_lab, slowed(new_lab):
        yield new_lab


def same_text(launches: dict[str, dict[str, Any]]) -> str:
    """The reason, which is one and the same on every host."""
    assert {launch["outcome"] for launch in launches.values()} == {"failed"}
    (text,) = {launch["reason"] for launch in launches.values()}
    return str(text)


def rank_of(lab: Lab, host: str, rank: int) -> str:
    """Process id of a rank itself, which goes by its number."""
    return lab.on(host, "pgrep", "-x", f"rank {rank}").stdout.strip()


def test_stopped_rank(lab: Lab) -> None:
    gang = Gang(lab, "stopped", members=("node1", "node2"))
    gang.start()
    gang.measuring()
    stopped = rank_of(lab, "node2", 2)
    since = time.monotonic()
    lab.on("node2", "kill", "-STOP", stopped)
    text = same_text(gang.verdicts(gang.members, since, BUSY_S))
    assert text == f'host node2 cpu=1 rank 2 in phase "{DURING}": silent for 8 s: its process is stopped'
    gang.gone(gang.members)


def test_killed_rank(lab: Lab) -> None:
    gang = Gang(lab, "killed", members=("node1", "node2"))
    gang.start()
    gang.measuring()
    killed = rank_of(lab, "node2", 2)
    since = time.monotonic()
    lab.on("node2", "kill", "-KILL", killed)
    text = same_text(gang.verdicts(gang.members, since, 5))
    assert text == f'host node2 cpu=1 rank 2 in phase "{DURING}": killed by SIGKILL'
    assert -9 in [rank["exit_code"] for rank in gang.ended("node2")["ranks"]]  # type: ignore[index]
    gang.gone(gang.members)


def test_killed_launcher(lab: Lab) -> None:
    """It kept what the ranks of the other hosts speak through: theirs fail at once, by themselves, and are not to blame."""
    gang = Gang(lab, "launcher", members=("node1", "node2"))
    gang.start()
    gang.measuring()
    guard = lab.on("node1", "pgrep", "-x", "rank 0's guard").stdout.strip()
    launcher = lab.on("node1", "ps", "-o", "ppid=", "-p", guard).stdout.strip()
    since = time.monotonic()
    lab.on("node1", "kill", "-KILL", launcher)
    text = same_text(gang.verdicts(gang.members, since, BUSY_S))
    assert text == f'host node1 rank 0 in phase "{DURING}": its launcher was killed by SIGKILL'
    assert [gang.kept(host) for host in gang.members] == [{"cpu=0", "host"}, {"cpu=0", "cpu=1", "host"}]
    gang.gone(gang.members)


def test_torch_that_cannot_be_imported(lab: Lab) -> None:
    """No rank of that host ever begins: the others would wait for it until the stage's deadline."""
    why = "libcudart.so.13: cannot open shared object file: No such file or directory"
    lab.put("node3", "/opt/broken/torch/__init__.py", f"raise ImportError({why!r})")
    gang = Gang(lab, "broken", members=("node1", "node3"))
    since = time.monotonic()
    gang.start(node3="PYTHONPATH=/opt/broken")
    text = same_text(gang.verdicts(gang.members, since, BUSY_S))
    ended = "its launcher ended with exit code 1 before any rank started"
    assert text == f'host node3 rank 1 in phase "start": {ended}: ImportError: {why}'
    assert gang.ended("node3")["ranks"] == []  # type: ignore[index]
    gang.gone(gang.members)


def test_launcher_that_is_killed_before_its_ranks_begin(lab: Lab) -> None:
    """It kept the store: the other hosts' launchers end by themselves for it, and are not to blame."""
    gang = Gang(lab, "early")
    present = ("node1", "node3")
    gang.start(present)
    connected = ("ss", "-Htn", "state", "established", "sport = :29500", "dst", lab.host("node3").address)
    wait(lambda: lab.on("node1", *connected).stdout != "", 30)
    since = time.monotonic()
    lab.on("node1", "pkill", "-KILL", "-f", "^[^ ]*python[^ ]* -m agent.benchmarks.rendezvous")
    text = same_text(gang.verdicts(present, since, BUSY_S))
    assert text == 'host node1 rank 0 in phase "start": its launcher was killed by SIGKILL before any rank started'
    gang.gone(present)


def test_host_that_never_comes(lab: Lab) -> None:
    gang = Gang(lab, "absent", timeout_s=10.0)
    present = ("node1", "node3")
    since = time.monotonic()
    gang.start(present)
    text = same_text(gang.verdicts(present, since, 30))
    assert text == "host node2: did not join the gang within 20 s; hosts node1, node3 did"
    gang.gone(present)
