"""Write run directories with a small plan and two GPUs per host, and call `rackproof` in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rackproof import main as command
from schemas import documents
from schemas.plans import Plan
from schemas.records import Observation, Record, to_json
from tests import builders

Change = Callable[[Record], Record]


def run_directory(
    directory: Path, *, change: Change = lambda record: record, hosts: Sequence[str] = ("h1", "h2"), **over: Any
) -> Path:
    """Write a run of healthy hosts, with `change` applied to each record; return `directory`.

    `over`: field of the plan -> value that replaces the one that `small_plan` sets.
    """
    named = {"run_id": directory.name, "nonce": nonce(directory.name)}
    plan = replace(small_plan(*hosts), **{**named, **over})
    documents.write(directory / "plan.json", to_json(plan))
    for host in plan.hosts:
        for record in builders.records(plan, host.name):
            builders.write_record(directory / "hosts" / f"{host.name}.json", change(record))
    return directory


def small_plan(*hosts: str) -> Plan:
    """Return a plan with the benchmarks SMALL_BENCHMARKS, and without gangs (a gang: the hosts of one multi-node launch)."""
    plan = builders.plan(*hosts, profile="smoke", gpu_count=2, rackproof_gang="none")
    planned = plan.stage("benchmark").benchmarks
    return builders.with_benchmarks(plan, benchmark={name: planned[name] for name in SMALL_BENCHMARKS})


SMALL_BENCHMARKS = ("memory", "host_copy", "stress")


def nonce(run_id: str) -> str:
    """Return a nonce made from the run id: the first 16 bytes of the id in hexadecimal, padded with zeros to 32 digits."""
    return run_id.encode().hex().ljust(32, "0")[:32]


def slowed(name: str, share: float, *, host: str = "h1", scope: str = "gpu=0", **params: Any) -> Change:
    """Return a change that multiplies the values of some observations of `host` by `share`.

    These observations have this name and scope, and their parameters include `params`.
    """

    def slow(observation: Observation) -> Observation:
        matches = (
            observation.name == name and observation.scope == scope and params.items() <= observation.params.items()
        )
        return replace(observation, value=float(observation.value or 0) * share) if matches else observation

    def change(record: Record) -> Record:
        if record.host != host:
            return record
        return replace(record, observations=tuple(map(slow, record.observations)))

    return change


def swapped(host: str, index: int, serial: str) -> Change:
    """Return a change that gives GPU `index` of `host` this serial, and a UUID made of it, as if the GPU had been replaced."""

    def change(record: Record) -> Record:
        if record.host != host:
            return record
        gpus = tuple(
            replace(gpu, serial=serial, uuid=f"GPU-{serial}") if gpu.index == index else gpu for gpu in record.gpus
        )
        return replace(record, gpus=gpus)

    return change


def call(*arguments: object) -> int:
    """Run `rackproof` with these arguments in this process and return the exit code."""
    try:
        return command.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(str(end.code or 0))


@dataclass(frozen=True)
class Done:
    """Exit code and output of one call of `rackproof`, like subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


def rackproof(*arguments: object, stdin: str = "") -> Done:
    """Run `rackproof` with these arguments in this process and return its exit code and output.

    It starts no process, because a new process would first import all modules, which takes a second.
    """
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = call(*arguments)
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


def report_of(directory: Path) -> dict[str, Any]:
    """Return the report.json of a run."""
    document: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return document
