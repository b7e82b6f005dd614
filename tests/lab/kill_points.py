"""Kills the control node at many points of real acceptance runs and resumes them: `python -m tests.lab.kill_points 200`.

A run is killed, and resumed (with `--in-one-run` killed further on, resumed, and so on); in the end it must have the report of
a run that nobody disturbed, and every host must have launched every stage once. What is killed is everything on the control
node at once, by SIGKILL; what runs on the hosts goes on, as it would. The kill points follow the playbook's own output: spread
over its tasks, each some tenths of a second into one.
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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
STATE = "/var/lib/rackproof"
RUN_S = 300.0
MARK = "RACKPROOF_TEST_ATTEMPT"
SHOWN = {"PYTHONUNBUFFERED": "1", "ANSIBLE_DISPLAY_SKIPPED_HOSTS": "true"}
"""Else a task is shown with its first result, and not when it begins."""
_VARIES = frozenset({"run_id", "log_tail", "samples", "stopped"})


def tiny(seconds: float) -> dict[str, Any]:
    """A profile of as little as takes both stages."""
    return {
        "schema": "rackproof.profile/1",
        "summary": "as little as takes both stages",
        "device": "cpu",
        "processes_per_host": 1,
        "stages": {
            "benchmark": {
                "deadline_s": 90,
                "collective_timeout_s": 30,
                "benchmarks": {
                    "stress": {
                        "dtypes": ["fp32"],
                        "size": 64,
                        "seconds": seconds,
                        "settle_seconds": min(0.2, seconds / 2),
                    }
                },
            },
            "gang": {
                "deadline_s": 90,
                "collective_timeout_s": 30,
                "benchmarks": {"collective": {"ops": ["all_reduce"], "sizes_bytes": [8, 65536], "seconds": 0.1}},
            },
        },
    }


@dataclass
class Attempt:
    """One start of the playbook."""

    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)
    observed_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("TASK ["):
                self.observed_at.append(time.monotonic())

    @property
    def tasks(self) -> list[str]:
        """The tasks so far."""
        return [line.partition("]")[0][6:] for line in self.lines if line.startswith("TASK [")]

    def reached(self, task: int | str, then_s: float = 0.0) -> bool:
        """Waits until `then_s` after a task began, by number or name; False where the playbook ended before."""
        ends = time.monotonic() + RUN_S
        while time.monotonic() < ends:
            if self.process.poll() is not None:
                return False
            begun = list(zip(self.tasks, self.observed_at, strict=False))
            at = [when for number, (name, when) in enumerate(begun) if task in (number, name)]
            if at and time.monotonic() >= at[0] + then_s:
                return True
            time.sleep(0.01)
        raise AssertionError(f"task {task} not reached within {RUN_S} s:\n" + "\n".join(self.lines[-30:]))

    def kill(self) -> None:
        """Kills everything that the attempt has on the control node, ansible-playbook first.

        Of SSH's masters, who rename themselves, some stay.
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
        """Waits for the end; the output."""
        self.process.wait(RUN_S)
        self._reader.join(timeout=5)
        return "\n".join(self.lines)


def marked(mark: str) -> Iterator[int]:
    """The living processes with this in their environment: SSH does not take it to the hosts."""
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

    def start(
        self,
        run_id: str,
        playbook: str = "acceptance",
        *,
        seconds: float = 1.0,
        only: Collection[str] = (),
        **variables: Any,
    ) -> Attempt:
        """Starts playbooks/`playbook`.yml on the control node; each host alone is measured for about these seconds.

        The inventory has `only` those hosts where any are named. A variable that is None is left to its default.
        """
        profile = self.lab.directory / f"tiny{seconds:g}.yml"
        profile.write_text(yaml.safe_dump(tiny(seconds)))
        group = {
            "rackproof_profile": str(profile),
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
        set_ones = {name: value for name, value in group.items() if value is not None}
        inventory = self.lab.inventory(groupvars=set_ones, name=f"{run_id}-{self.attempts}", only=only)
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory)]
        command += [str(ROOT / "playbooks" / f"{playbook}.yml"), "-e", f"rackproof_run_id={run_id}"]
        process = self.lab.popen(
            command, cwd=ROOT, env={MARK: mark, **SHOWN}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return Attempt(process, mark)

    def run(self, run_id: str, playbook: str = "acceptance", **variables: Any) -> tuple[int, str]:
        """Runs it to its end: exit code and output."""
        attempt = self.start(run_id, playbook, **variables)
        output = attempt.end()
        return attempt.process.returncode, output

    def report(self, run_id: str) -> dict[str, Any]:
        """report.json."""
        document: dict[str, Any] = json.loads((self.runs / run_id / "report.json").read_text())
        return document

    def launches(self, host: str, run_id: str) -> list[tuple[str, str]]:
        """(stage, outcome) of every launch that the host's own records have."""
        endings = []
        for path in ("record.json", "gangs/rack1.json"):
            record = json.loads(self.lab.on(host, "cat", f"{STATE}/runs/{run_id}/{path}").stdout)
            endings += (
                [(launch["stage"], launch["outcome"]) for launch in record["launches"]] if "launches" in record else []
            )
        return endings

    def set_aside(self, host: str, run_id: str) -> list[str]:
        """The logs of launches that another took the place of."""
        return self.lab.on(
            host, "sh", "-c", f"ls -d {STATE}/runs/{run_id}/logs/* 2>/dev/null", check=False
        ).stdout.split()

    def snapshots(self, host: str, run_id: str) -> list[tuple[str, str]]:
        """(stage, phase) of the snapshots before and after, in the host's own records."""
        phases = []
        for path in ("record.json", "gangs/rack1.json"):
            record = json.loads(self.lab.on(host, "cat", f"{STATE}/runs/{run_id}/{path}").stdout)
            phases += [(seen["stage"], seen["phase"]) for seen in record["snapshots"] if seen["phase"] != "during"]
        return phases

    def left_over(self, run_id: str) -> list[str]:
        """What nobody asked for, in the run's directories on the control node and on the hosts."""
        paths = [str(path.relative_to(self.runs)) for path in (self.runs / run_id).rglob("*") if path.is_file()]
        leftovers = [path for path in paths if Path(path).name.startswith(".") or path.endswith(("lock.json", ".tmp"))]
        for host in self.lab.hosts:
            hidden = self.lab.on(host.name, "find", STATE, "-name", ".*", "-o", "-name", "lease.json").stdout.split()
            leftovers += [f"{host.name}:{path}" for path in hidden]
        return sorted(leftovers)


def shape(value: Any) -> Any:
    """A report without times and measured figures; what is said in words, and how much of it there is, stays."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in _VARIES}
    if isinstance(value, list):
        return [shape(item) for item in value]
    if isinstance(value, str):
        figures = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", value.replace("\u202f", ""))
        return re.sub(
            r"# [kMGTmµ](?=FLOP|B/s|Hz|s\b)", "# ", figures
        )  # 990 GFLOP/s the one time, 1.01 TFLOP/s the other
    return "#" if isinstance(value, int | float) and not isinstance(value, bool) else value


def differences(actual: Any, wanted: Any, where: str = "report") -> list[str]:
    """Where two shapes differ."""
    if isinstance(actual, dict) and isinstance(wanted, dict):
        keys = sorted({*actual, *wanted})
        return [text for key in keys for text in differences(actual.get(key), wanted.get(key), f"{where}.{key}")]
    if isinstance(actual, list) and isinstance(wanted, list) and len(actual) == len(wanted):
        pairs = enumerate(zip(actual, wanted, strict=True))
        return [text for step, (one, other) in pairs for text in differences(one, other, f"{where}[{step}]")]
    return [] if actual == wanted else [f"{where}: {str(actual)[:300]} instead of {str(wanted)[:300]}"]


ONCE = [("benchmark", "finished"), ("gang", "finished")]
SNAPSHOTS = [
    ("preflight", "before"),
    ("benchmark", "before"),
    ("benchmark", "after"),
    ("gang", "before"),
    ("gang", "after"),
]


def wrong(site: Site, run_id: str, undisturbed: dict[str, Any]) -> list[str]:
    """What sets a run that was killed and resumed apart from one that nobody disturbed."""
    problems = differences(shape(site.report(run_id)), shape(undisturbed))
    for host in (host.name for host in site.lab.hosts):
        if (launches := site.launches(host, run_id)) != ONCE:
            problems.append(f"{host} launched {launches}")
        if (taken := site.snapshots(host, run_id)) != SNAPSHOTS:
            problems.append(f"{host} took the snapshots {taken}")
        if again := site.set_aside(host, run_id):
            problems.append(f"{host} launched more than once: {again}")
    return problems + [f"left over: {path}" for path in site.left_over(run_id)]


def chain(
    site: Site, run_id: str, points: Sequence[tuple[int | str, float]], log: Any = print, **variables: Any
) -> int:
    """Kills the run at each point (task, seconds after), resuming it in between, and lets it finish; the kills that were made."""
    killed = sum(kill(site, run_id, task, then_s, log, **variables) for task, then_s in points)
    code, output = site.run(run_id, **variables)
    if code:
        log(f"{run_id}: the last attempt ended with {code}\n{output[-4000:]}")
    return killed


def kill(site: Site, run_id: str, task: int | str, then_s: float, log: Any = print, **variables: Any) -> bool:
    """Begins or resumes the run and kills it there; False where it ended before by itself."""
    attempt = site.start(run_id, **variables)
    if attempt.reached(task, then_s):
        attempt.kill()
        log(f"{run_id}: killed {then_s:.2f} s into task {task}, now at {attempt.tasks[-1]}")
        return True
    output = attempt.end()
    log(f"{run_id}: ended by itself with {attempt.process.returncode} before task {task}")
    if attempt.process.returncode:
        log(output[-3000:])
    return False


def spread(count: int, tasks: int, seed: int) -> list[tuple[int | str, float]]:
    """Points over all tasks, the same number in each as far as it goes, some tenths of a second into it."""
    chosen = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    return [(number * tasks // count, chosen.choice((0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6))) for number in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the kills and prints what came of them; 1 where a run was another than the undisturbed one."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.kill_points", description=__doc__)
    parser.add_argument("kills", nargs="?", type=int, default=200)
    parser.add_argument(
        "--in-one-run", type=int, default=1, help="kills of one run before it may finish (default: %(default)s)"
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--fresh", action="store_true", help="take the agent off the hosts before every second run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began, made, bad, runs = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="rackproof-kill-") as directory, Lab(Path(directory), options.hosts) as lab:
        site = Site(lab=lab, runs=Path(directory) / "runs")
        site.runs.mkdir()
        code, output = site.run("first")
        settled = site.start("undisturbed")
        if code or (settled.end() and settled.process.returncode):
            print(output[-3000:], "\n".join(settled.lines[-40:]))
            return 2
        undisturbed, tasks = site.report("undisturbed"), len(settled.tasks)
        print(f"undisturbed: {undisturbed['decision']}, {tasks} tasks, {time.monotonic() - began:.0f} s", flush=True)
        every = spread(options.kills, tasks, options.seed)
        of_run = -(-options.kills // options.in_one_run)
        for runs in range(1, of_run + 1):
            if options.fresh and runs % 2:
                site.run(f"teardown{runs}", "teardown")
            made += chain(site, f"run{runs}", every[runs - 1 :: of_run], lambda line: print(line, flush=True))
            problems = wrong(site, f"run{runs}", undisturbed)
            bad += bool(problems)
            print(
                f"run{runs}: {made} kills so far: {'; '.join(problems) if problems else 'as undisturbed'}", flush=True
            )
    same = runs - bad
    print(
        f"{made} kill points in {runs} runs: {same} with the undisturbed report, each stage launched once; {bad} other"
    )
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
