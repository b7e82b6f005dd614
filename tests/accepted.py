"""Runs that were accepted, for tests of what is compared with them: two hosts with two GPUs each, and a small plan."""

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
    """A run whose records are in order, but for what `change` does to each of them."""
    named = {"run_id": directory.name, "nonce": nonce(directory.name)}
    plan = replace(small(*hosts), **{**named, **over})
    documents.write(directory / "plan.json", to_json(plan))
    for host in plan.hosts:
        for record in builders.records(plan, host.name):
            documents.write(directory / "hosts" / f"{host.name}.json", to_json(change(record)))
    return directory


def small(*hosts: str) -> Plan:
    """A plan of little: HBM, copies and stress."""
    plan = builders.plan(*hosts, profile="smoke", gpu_count=2, rackproof_gang="none")
    return replace(plan, expected=tuple(item for item in plan.expected if item.name.split(".")[0] in KEPT))


KEPT = ("memory", "host_copy", "stress")


def nonce(run_id: str) -> str:
    """Another for each run."""
    return run_id.encode().hex().ljust(32, "0")[:32]


def slowed(name: str, share: float, *, host: str = "h1", scope: str = "gpu=0", **params: Any) -> Change:
    """That figure of one part at so much of itself."""

    def one(observation: Observation) -> Observation:
        hit = observation.name == name and observation.scope == scope and params.items() <= observation.params.items()
        return replace(observation, value=float(observation.value or 0) * share) if hit else observation

    def change(record: Record) -> Record:
        if record.host != host:
            return record
        return replace(record, observations=tuple(map(one, record.observations)))

    return change


def swapped(host: str, index: int, serial: str) -> Change:
    """Another GPU in that slot."""

    def change(record: Record) -> Record:
        if record.host != host:
            return record
        gpus = tuple(
            replace(gpu, serial=serial, uuid=f"GPU-{serial}") if gpu.index == index else gpu for gpu in record.gpus
        )
        return replace(record, gpus=gpus)

    return change


def call(*arguments: object) -> int:
    """The command, in this process."""
    try:
        return command.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(str(end.code or 0))


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def rackproof(*arguments: object, stdin: str = "") -> Done:
    """The same, with what it says: a new process takes a second to import."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = call(*arguments)
    finally:
        sys.stdin = before
    return Done(code, out.getvalue(), err.getvalue())


def report_of(directory: Path) -> dict[str, Any]:
    """What its report.json says."""
    document: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return document
