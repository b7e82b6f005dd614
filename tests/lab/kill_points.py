"""Kill the playbook at many points of real acceptance runs and resume the runs: `python -m tests.lab.kill_points 200`.

Each run is killed and resumed once, or as many times as `--in-one-run` sets. In the end its report must equal that of an
undisturbed run, apart from numbers and the keys in `_VARYING_KEYS`. Every host must have launched every stage once, and no
temporary file or lock may be left over. A kill sends SIGKILL to ansible-playbook and then to its children on the control node;
some SSH control masters survive (`Attempt.kill`). Processes on the hosts continue. The kill points are spread evenly over the
tasks of the undisturbed run, each 0 to 1.6 s after the start of a task.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
STATE = "/var/lib/rackproof"
DIRECTORY = "/srv"
"""Directory of a host in which the storage benchmark measures."""
RUN_S = 300.0
"""Longest time that a test waits for a run, in seconds."""
MARK = "RACKPROOF_TEST_ATTEMPT"
"""Environment variable that marks the processes of an attempt on the control node; its value identifies the attempt."""
ANSIBLE_OUTPUT = {"PYTHONUNBUFFERED": "1", "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "true"}
"""Environment variables with which Ansible prints the name of a task when the task begins, not with its first result."""
_VARYING_KEYS = frozenset({"run_id", "log_tail", "samples", "stopped"})


def smallest_profile(seconds: float) -> dict[str, Any]:
    """Return the smallest profile with the stages benchmark and gang. Its ranks do not import torch.

    Importing torch would take 2 s of CPU time. The benchmark stage takes about `seconds` seconds. The inventory must set
    `rackproof_local_storage`.
    """
    storage = {"local_storage": {"ops": ["read"], "seconds": seconds, "size_bytes": 1 << 20, "jobs": 1}}
    return _profile({"benchmark": storage, "gang": {"verbs": {}}})


def smallest_benchmark_profile() -> dict[str, Any]:
    """Return a profile with only the stage `benchmark`. Its ranks do not import torch.

    On a host without RDMA ports, the only measured value is `benchmark.duration`.
    """
    return _profile({"benchmark": {"verbs": {}}})


def smallest_torch_profile(seconds: float) -> dict[str, Any]:
    """Return the smallest profile whose ranks use torch. It has the stages benchmark and gang.

    The benchmark stage takes about `seconds` seconds.
    """
    stress = {"dtypes": ["fp32"], "size": 64, "seconds": seconds, "settle_seconds": min(0.2, seconds / 2)}
    collective = {"ops": ["all_reduce"], "sizes_bytes": [8, 65536], "seconds": 0.1}
    return _profile({"benchmark": {"stress": stress}, "gang": {"collective": collective}})


def _profile(stages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a profile with these stages; `stages`: stage -> benchmark -> settings."""
    limits = {"deadline_s": 90, "collective_timeout_s": 30}
    return {
        "schema": "rackproof.profile/1",
        "summary": "the smallest profile of a test",
        "device": "cpu",
        "processes_per_host": 1,
        "stages": {stage: {**limits, "benchmarks": benchmarks} for stage, benchmarks in stages.items()},
    }


@dataclass
class Attempt:
    """One start of the playbook."""

    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)
    begun: list[tuple[str, float]] = field(default_factory=list)
    """Name of each task that has begun, and the time when it began (`time.monotonic`)."""

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("TASK ["):
                self.begun.append((line.partition("]")[0][6:], time.monotonic()))

    @property
    def tasks(self) -> list[str]:
        """Return the names of the tasks that have begun."""
        return [name for name, _ in self.begun]

    def reached(self, task: int | str, then_s: float = 0.0) -> bool:
        """Wait until `then_s` seconds after a task (name, or number from 0) begins. Return False if the playbook ends first."""
        deadline = time.monotonic() + RUN_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            times = [at for number, (name, at) in enumerate([*self.begun]) if task in (number, name)]
            if times and time.monotonic() >= times[0] + then_s:
                return True
            time.sleep(0.01)
        raise AssertionError(f"task {task} not reached within {RUN_S} s:\n" + "\n".join(self.lines[-30:]))

    def kill(self) -> None:
        """Kill the processes with the attempt's mark on the control node, ansible-playbook first.

        Some SSH control masters survive: they set a process title, which overwrites the environment variable MARK.
        """
        self.process.kill()
        while family := list(marked(self.mark)):
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()
        self._reader.join(timeout=5)

    def end(self) -> str:
        """Wait for the end and return the output."""
        self.process.wait(RUN_S)
        self._reader.join(timeout=5)
        return "\n".join(self.lines)


def marked(mark: str) -> Iterator[int]:
    """Yield the PIDs of running processes that have this mark in their environment. SSH does not pass the mark to hosts."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                zombie = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("Z", "X")
                if not zombie and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


@dataclass
class Site:
    """A control node and its hosts."""

    lab: Lab
    runs: Path
    attempts: int = 0
    profile: Callable[[float], dict[str, Any]] = smallest_profile
    """Returns the profile of a run. Its argument sets the duration of the benchmark stage, in seconds."""

    def start(
        self,
        run_id: str,
        playbook: str = "acceptance",
        *,
        seconds: float = 1.0,
        only: Collection[str] = (),
        tags: str = "",
        of_hosts: Mapping[str, Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Attempt:
        """Start playbooks/`playbook`.yml on the control node; `seconds` is the argument of `self.profile`.

        The inventory has the hosts in `only`, or all hosts if `only` is empty. `variables` are set for all hosts; a variable with
        the value None is not set. `of_hosts`: host -> variables of only this host. `tags`: value of the option --tags.
        """
        profile = self.lab.directory / f"tiny{seconds:g}.yml"
        profile.write_text(yaml.safe_dump(self.profile(seconds)))
        group = {
            "rackproof_profile": str(profile),
            "rackproof_local_storage": [DIRECTORY],
            "nvidia_driver_state": "ignored",
            "rackproof_rack": "rack1",
            "rackproof_fabric_interface": "eth0",
            "rackproof_python": sys.executable,
            "rackproof_system_torch": True,
            "rackproof_minimum_free_bytes": 100_000_000,
            "rackproof_runs_directory": str(self.runs),
            **variables,
        }
        self.attempts += 1
        mark = f"{self.lab.control}-{self.attempts}"
        set_variables = {name: value for name, value in group.items() if value is not None}
        inventory = self.lab.inventory(of_hosts, set_variables, name=f"{run_id}-{self.attempts}", only=only)
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory)]
        command += [str(ROOT / "playbooks" / f"{playbook}.yml"), "-e", f"rackproof_run_id={run_id}"]
        command += [f"--tags={tags}"] if tags else []
        process = self.lab.popen(
            command, cwd=ROOT, env={MARK: mark, **ANSIBLE_OUTPUT}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return Attempt(process, mark)

    def run(self, run_id: str, playbook: str = "acceptance", **variables: Any) -> tuple[int, str]:
        """Run a playbook to its end; return exit code and output."""
        attempt = self.start(run_id, playbook, **variables)
        output = attempt.end()
        return attempt.process.returncode, output

    def report(self, run_id: str) -> dict[str, Any]:
        """Return the content of report.json of a run."""
        document: dict[str, Any] = json.loads((self.runs / run_id / "report.json").read_text())
        return document

    def launches(self, host: str, run_id: str) -> list[tuple[str, str]]:
        """Return (stage, outcome) of every launch in the records on the host."""
        endings = []
        for path in ("record.json", "gangs/rack1.json"):
            record = json.loads(self.lab.on(host, "cat", f"{STATE}/runs/{run_id}/{path}").stdout)
            endings += (
                [(launch["stage"], launch["outcome"]) for launch in record["launches"]] if "launches" in record else []
            )
        return endings

    def replaced_launches(self, host: str, run_id: str) -> list[str]:
        """Return the directories of archived logs on the host. Logs are archived when a stage is launched again."""
        return self.lab.on(
            host, "sh", "-c", f"ls -d {STATE}/runs/{run_id}/logs/* 2>/dev/null", check=False
        ).stdout.split()

    def snapshots(self, host: str, run_id: str) -> list[tuple[str, str]]:
        """Return (stage, phase) of each snapshot in the records on the host, except those taken during a stage."""
        phases = []
        for path in ("record.json", "gangs/rack1.json"):
            record = json.loads(self.lab.on(host, "cat", f"{STATE}/runs/{run_id}/{path}").stdout)
            phases += [(item["stage"], item["phase"]) for item in record["snapshots"] if item["phase"] != "during"]
        return phases

    def left_over(self, run_id: str) -> list[str]:
        """Return temporary files and locks in the run directory, and temporary files and leases (locks of hosts) on hosts."""
        paths = [str(path.relative_to(self.runs)) for path in (self.runs / run_id).rglob("*") if path.is_file()]
        leftovers = [path for path in paths if Path(path).name.startswith(".") or path.endswith(("lock.json", ".tmp"))]
        for host in self.lab.hosts:
            hidden = self.lab.on(host.name, "find", STATE, "-name", ".*", "-o", "-name", "lease.json").stdout.split()
            leftovers += [f"{host.name}:{path}" for path in hidden]
        return sorted(leftovers)


def shape(value: Any) -> Any:
    """Return a copy of a report, or of a part of it, without `_VARYING_KEYS` and with `#` in place of every number."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in _VARYING_KEYS}
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, str):
        figures = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", value.replace("\u202f", ""))
        # The prefix of a unit varies too: 990 GFLOP/s, 1.01 TFLOP/s.
        return re.sub(r"# [kMGTmµ](?=FLOP|B/s|Hz|s\b)", "# ", figures)
    return "#" if isinstance(value, int | float) and not isinstance(value, bool) else value


def differences(actual: Any, wanted: Any, where: str = "report") -> list[str]:
    """Return the places in which two results of `shape` differ, with both values."""
    if isinstance(actual, dict) and isinstance(wanted, dict):
        keys = sorted({*actual, *wanted})
        return [text for key in keys for text in differences(actual.get(key), wanted.get(key), f"{where}.{key}")]
    if isinstance(actual, list) and isinstance(wanted, list) and len(actual) == len(wanted):
        pairs = enumerate(zip(actual, wanted, strict=True))
        return [text for step, (one, other) in pairs for text in differences(one, other, f"{where}[{step}]")]
    return [] if actual == wanted else [f"{where}: {str(actual)[:300]} instead of {str(wanted)[:300]}"]


EXPECTED_LAUNCHES = [("benchmark", "finished"), ("gang", "finished")]
EXPECTED_SNAPSHOTS = [
    ("preflight", "before"),
    ("benchmark", "before"),
    ("benchmark", "after"),
    ("gang", "before"),
    ("gang", "after"),
]


def differences_from_undisturbed(site: Site, run_id: str, undisturbed: dict[str, Any]) -> list[str]:
    """Return how a run that was killed and resumed differs from an undisturbed one."""
    problems = differences(shape(site.report(run_id)), shape(undisturbed))
    for host in (host.name for host in site.lab.hosts):
        if (launches := site.launches(host, run_id)) != EXPECTED_LAUNCHES:
            problems.append(f"{host} launched {launches}")
        if (taken := site.snapshots(host, run_id)) != EXPECTED_SNAPSHOTS:
            problems.append(f"{host} took the snapshots {taken}")
        if logs := site.replaced_launches(host, run_id):
            problems.append(f"{host} launched more than once: {logs}")
    return problems + [f"left over: {path}" for path in site.left_over(run_id)]


def chain(
    site: Site, run_id: str, points: Sequence[tuple[int | str, float]], log: Any = print, **variables: Any
) -> int:
    """Kill the run at each point and resume it after each kill; let it finish; return the number of kills.

    A point is a task and a number of seconds after the start of this task.
    """
    killed = sum(kill(site, run_id, task, then_s, log, **variables) for task, then_s in points)
    code, output = site.run(run_id, **variables)
    if code:
        log(f"{run_id}: the last attempt ended with exit code {code}\n{output[-4000:]}")
    return killed


def kill(site: Site, run_id: str, task: int | str, then_s: float, log: Any = print, **variables: Any) -> bool:
    """Start or resume the run and kill it `then_s` seconds after the start of a task. Return False if it ends first."""
    attempt = site.start(run_id, **variables)
    if attempt.reached(task, then_s):
        attempt.kill()
        log(
            f"{run_id}: killed {then_s:.2f} s after the start of task {task}; the last task that began: {attempt.tasks[-1]}"
        )
        return True
    output = attempt.end()
    log(f"{run_id}: ended with exit code {attempt.process.returncode} before the kill point in task {task}")
    if attempt.process.returncode:
        log(output[-3000:])
    return False


def spread(count: int, tasks: int, seed: int) -> list[tuple[int | str, float]]:
    """Return `count` kill points spread evenly over `tasks` tasks: the number of a task, and 0 to 1.6 s after its start."""
    chosen = random.Random(seed)  # noqa: S311 - repeatable, not secret
    return [(number * tasks // count, chosen.choice((0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6))) for number in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill and resume runs, and print the results.

    Return 1 if a run differs from the undisturbed one, 2 if a run without kills fails.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.lab.kill_points", description=__doc__)
    parser.add_argument("kills", nargs="?", type=int, default=200)
    parser.add_argument(
        "--in-one-run", type=int, default=1, help="number of kills before a run may finish (default: %(default)s)"
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="run playbooks/teardown.yml before every second run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began, kills, bad, runs = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="rackproof-kill-") as directory, Lab(Path(directory), options.hosts) as lab:
        site = Site(lab=lab, runs=Path(directory) / "runs", profile=smallest_torch_profile)
        site.runs.mkdir()
        # The first run installs the agent. Tasks are counted in the second run, which does not install it again.
        code, output = site.run("first")
        attempt = site.start("undisturbed")
        undisturbed_output = attempt.end()
        if code or attempt.process.returncode:
            print(output[-3000:], undisturbed_output[-3000:])
            return 2
        undisturbed, tasks = site.report("undisturbed"), len(attempt.tasks)
        print(f"undisturbed: {undisturbed['decision']}, {tasks} tasks, {time.monotonic() - began:.0f} s", flush=True)
        points = spread(options.kills, tasks, options.seed)
        run_count = -(-options.kills // options.in_one_run)
        for runs in range(1, run_count + 1):
            if options.fresh and runs % 2:
                site.run(f"teardown{runs}", "teardown")
            kills += chain(site, f"run{runs}", points[runs - 1 :: run_count], lambda line: print(line, flush=True))
            problems = differences_from_undisturbed(site, f"run{runs}", undisturbed)
            bad += bool(problems)
            print(
                f"run{runs}: {kills} kills so far: {'; '.join(problems) if problems else 'equal to the undisturbed run'}",
                flush=True,
            )
    same = runs - bad
    print(
        f"{kills} kills in {runs} runs: {same} runs equal the undisturbed run and launched each stage once, "
        f"{bad} runs differ"
    )
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
