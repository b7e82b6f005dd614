"""Fuzz the readers of run directories with corrupt or forged files: no crash, no wrong acceptance, no write in other directories.

    make fuzz                                             # 1 000 000 mutations
    .venv/bin/python -m tests.fuzz --mutations 100000 --jobs 2

Most mutations change bytes or JSON values of one file of a small healthy run: a host record or gang record, sometimes plan.json
or events.jsonl. The run is then read as `rackproof report` reads it. If the changed file is still valid, the run is judged. If
the run is accepted, `rejection_reason` checks that this is right: it reads the files itself and uses no code of the judge except
the parsed criteria. After some of these mutations, the complete command `rackproof report` runs, which writes files.

The other mutations corrupt a file listed in `CASES` and run a `rackproof` verb that reads this file. `CASES` has waivers, a
baseline, a run's copy of a baseline, reports, signed files, journal.jsonl and lock.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from fleet.judge.baseline import OUTCOME_PARAMS
from fleet.judge.criteria import Criterion, Pack, read_packs
from fleet.records import baseline_store, run_lock
from fleet.records.load import RecordReader, load
from fleet.report.merge import merge
from schemas import documents, quick
from schemas.errors import USAGE, RunError
from schemas.plans import Plan
from schemas.records import Record, to_json
from schemas.reports import FleetReport
from tests import accepted, builders

PACKS = read_packs([])
H200_PACK = next(pack for pack in PACKS if pack.name == "h200-sxm")
MEMORY_DIRECTORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
WITH_MESSAGES = 50
"""In one of this many mutations of a short run (see FULL_RUN), jsonschema writes the error message for an invalid file. In the
others only the fast validator runs, which has no messages."""
FULL_RUN = 200
"""One in this many mutations changes a full run, which has every reading and criterion. A short run has only a few of them."""
COMPLETE_COMMAND = 20
"""After one in this many mutations of a full run, the complete command `rackproof report` runs, which writes files."""
GANG_RUN = 5
"""One in this many mutations of a short run changes a run with a gang (the hosts of one multi-node launch)."""
INCOMPLETE_GANG = 10
"""A mutation may make a record of a run with a gang invalid. One in this many of these runs is judged, without the invalid
record. The others are not judged."""
OTHER_VERB = 250
"""One in this many mutations corrupts a file in CASES and runs the verb of this case."""
PART = 5_000
"""Mutations per task of the process pool."""
GANG_FIGURES = ("collective.all_reduce.busbw", "collective.all_reduce.wrong_elements", "pairs.bandwidth")
READINGS = (  # prefixes of the readings of a short run
    "gpu.ecc.enabled",
    "gpu.ecc.uncorrectable_volatile",
    "gpu.pcie.width",
    "gpu.count",
    "gpu.remapped_rows.failed",
    "gpu.pcie.replays",
)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.0, -0.0, 1e-300, 1e300, 1.7e308, -1.7e308, 5e-324, 1e60, -1e60, 1e-60,
    2**53 + 1, 2**63, 2**64, -(2**70), float("nan"), float("inf"),
    "", "0", "NaN", "measured", "error", "skipped", "unsupported", "error: ", "gpu=0", "gpu=1", "gpu=0,gpu=1",
    "collector.nvml", "host", "finished", "failed",
    "../../x", "/etc/passwd", "a\x00b", "a\nb", "<script>alert(1)</script>", "=1+1", "\x1b[31m", "\u202e", "\ud800", "x" * 5000,
    [], {}, [[]], {"a": {}}, [{}], "h2", "r0", "f" * 32, "preflight", "benchmark", "after", "before", "simulated", "9" * 40,
)  # fmt: skip
"""A mutation may replace a value of a JSON document by one of these."""
EXTREMES = (1.7e308, -1.7e308, 5e-324, 1e60, -1e60, 1e-60, 2**63, 0, "x")
"""A mutation may replace all numbers in a part of a JSON document by one of these."""
TOKENS = (
    b'"', b":", b",", b"{", b"}", b"[", b"]", b"\\", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800",
    b"NaN", b"1e999", b"-Infinity", b"[" * 3000, b'{"a":' * 40, b"0", b"-", b"e9", b"null", b"true", b'"host": "h2",',
    b'"status": "measured",', b'"value": 0,', b'"simulated": true,', b'"gang": "x",', b"\r\n", b"\xc2\x85", b"\xe2\x80\xa8",
)  # fmt: skip
"""A mutation may insert one of these into a file."""


def shortened(record: Record) -> Record:
    """Return the record with only those readings that have a value and whose name begins with one of READINGS."""
    taken = tuple(
        replace(
            snapshot,
            metrics=tuple(metric for metric in snapshot.metrics if metric.name.startswith(READINGS) and metric.values),
        )
        for snapshot in record.snapshots
    )
    return replace(record, snapshots=taken)


def short_pack() -> Pack:
    """Return the H200 pack with only the criteria for readings and figures of a short run."""
    names = {metric for metric in builders.HEALTHY if metric.startswith(READINGS)} | {
        "gpu.count",
        "memory.bandwidth",
        "digest.mismatches",
    }
    chosen = [item for item in H200_PACK.criteria if item.name in names or any(map(item.matches_name, GANG_FIGURES))]
    return replace(H200_PACK, criteria=tuple(chosen))


def small_run(directory: Path, full: bool = False, gang: bool = False, hosts: Sequence[str] = ("h1", "h2")) -> Plan:
    """Write a run of hosts with one GPU each; return its plan. Unless `full`, it is a short run with few readings."""
    plan = builders.plan(*hosts, profile="smoke", gpu_count=1, rackproof_gang="rack" if gang else "none")
    sizes = plan.stage("gang").benchmarks["collective"]["sizes_bytes"] if gang else []
    gang_benchmarks = {"collective": {"ops": ["all_reduce"], "sizes_bytes": sizes[-1:], "graph_ops": []}, "pairs": {}}
    host_benchmarks: dict[str, dict[str, Any]] = (
        {"memory": {}, "digest": {}} if full else {"memory": {"ops": ["copy", "read"]}}
    )
    plan = builders.with_benchmarks(plan, benchmark=host_benchmarks, gang=gang_benchmarks)
    documents.write(directory / "plan.json", to_json(plan))
    for host in plan.hosts:
        for record in builders.records(plan, host.name):
            folder = f"gangs/{record.gang}" if record.gang else "hosts"
            builders.write_record(directory / folder / f"{host.name}.json", record if full else shortened(record))
    event = {"at": builders.WHEN, "play": "Gang", "what": "passed", "hosts": [*hosts]}
    (directory / "events.jsonl").write_text(json.dumps(event) + "\n")
    return plan


# The mutations


def mutated(rng: random.Random, whole: bytes) -> bytes:
    """Return the document after a random change of its bytes, or of one to three of its JSON values. A few documents get both."""
    if rng.random() < 0.8:
        return _mutate_bytes(rng, whole)
    document = json.loads(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _mutate_value(rng, document)
    text = json.dumps(document, indent=rng.choice((None,) * 7 + (1,)))
    return text.encode() if rng.random() < 0.95 else _mutate_bytes(rng, text.encode())


def _mutate_bytes(rng: random.Random, text: bytes) -> bytes:
    at, length = rng.randrange(len(text)), rng.choice((1, 1, 2, 8, 64, 2000))
    kind = rng.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return text[:at] + text[at + length :]
    if kind == 3:
        return text[:at] + rng.choice(TOKENS) + text[at:]
    if kind == 4:
        return text[:at] + text[at : at + length] + text[at:]
    lines = text.split(b"\n")
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return b"\n".join(lines)


def _mutate_value(rng: random.Random, document: Any) -> None:
    """Change one JSON value: remove, duplicate, alter or replace it, or set every number in it to the same value.

    Copies are deep. Otherwise a list could end up inside itself, and `json.dumps` would fail.
    """
    container = _random_container(rng, document)
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    if not keys:
        return
    key, kind = rng.choice(keys), rng.randrange(7)
    if kind == 0:
        del container[key]
    elif kind == 1:
        other = _random_container(rng, document)
        others = list(other.values()) if isinstance(other, dict) else other
        container[key] = deepcopy(rng.choice(others)) if others else None
    elif kind == 2 and isinstance(container, list):
        container.insert(rng.randrange(len(container) + 1), deepcopy(container[key]))
    elif kind == 2:
        container[rng.choice(("value", "reason", "status", "simulated", "gang", "x", "", "gpu=9", "\ud800"))] = (
            deepcopy(container[key])
        )
    elif kind == 3 and isinstance(container[key], int | float):
        container[key] = rng.choice(
            (0, -container[key], container[key] * 0.5, container[key] * 1e6, container[key] + 1, not container[key])
        )
    elif kind == 3 and isinstance(container[key], str) and container[key]:
        container[key] = container[key][:-1] + rng.choice("0aZ/. \n")
    elif kind == 6:
        container[key] = _with_every_number(container[key], rng.choice(EXTREMES))
    else:
        container[key] = deepcopy(rng.choice(VALUES))


def _with_every_number(value: Any, number: float | str) -> Any:
    """Return the value with every number in it replaced by `number`."""
    if isinstance(value, dict):
        return {key: _with_every_number(child, number) for key, child in value.items()}
    if isinstance(value, list):
        return [_with_every_number(child, number) for child in value]
    return number if isinstance(value, int | float) and not isinstance(value, bool) else value


def _random_container(rng: random.Random, document: Any) -> Any:
    """Return a random object or list of the document."""
    container = document
    while True:
        inner = [
            value
            for value in (container.values() if isinstance(container, dict) else container)
            if isinstance(value, dict | list)
        ]
        if not inner or rng.random() < 0.15:
            return container
        container = rng.choice(inner)


# The oracle: decides from the bytes of the files and the criteria whether a run may be accepted


def rejection_reason(plan: dict[str, Any], records: dict[str, bytes], criteria: Sequence[Criterion]) -> str:
    """Return why a run must not be accepted, or an empty string. Uses no code of the judge.

    A run may be accepted only if all of this is true:

    - Each record is strict JSON, matches the schema, and names the right run, nonce, host and gang.
    - Every planned observation was measured. If a record repeats one, its last entry was measured.
    - The last launch of each stage finished. One launch had all hosts of the gang.
    - All GPUs have the right model. No two GPU slots have the same serial or UUID. No slot has two serials or two UUIDs.
    - Every absolute limit of a criterion is met, and no counter rose by more than its limit.
    - Each GPU has every reading that a criterion needs, and no collector reported an error for such a reading.

    Args:
        records: path in the run directory -> bytes of the file.
    """
    parts: dict[tuple[str, int, str], set[str]] = {}
    slots: dict[str, set[tuple[str, int]]] = {}
    for host in plan["hosts"]:
        try:
            document = _combine([_valid_record(plan, host["name"], gang, records) for gang in _gangs_of(host)])
        except (ValueError, RecursionError) as error:
            return f"{host['name']}: no valid record: {str(error)[:80]}"
        for gpu in document["gpus"]:
            slot = host["name"], gpu["index"]
            for key in ("serial", "uuid"):  # each is empty if the record does not state it
                parts.setdefault((*slot, key), set()).update({gpu[key]} - {""})
                slots.setdefault(gpu[key] or str(slot), set()).add(slot)
        if why := _host_rejection_reason(plan, host, document, criteria):
            return f"{host['name']}: {why}"
    if any(len(positions) > 1 for positions in (*parts.values(), *slots.values())):
        return "one GPU in two slots, or two GPUs in one slot"
    return ""


def _gangs_of(host: dict[str, Any]) -> list[str]:
    """Return the field `gang` of each record that a host must have. The field is empty in the host record."""
    return ["", host["gang"]] if host.get("gang") else [""]


def _valid_record(plan: dict[str, Any], host: str, gang: str, records: dict[str, bytes]) -> dict[str, Any]:
    """Parse and return a record. Raise ValueError if it is invalid, or belongs to another run, host or gang."""
    text = records[f"gangs/{gang}/{host}.json" if gang else f"hosts/{host}.json"]
    document: dict[str, Any] = json.loads(
        text.decode(), object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant
    )
    documents.validate(document, "record", source="record")
    identity: list[Any] = [
        document.get(key, default)
        for key, default in (("run_id", 0), ("nonce", 0), ("host", 0), ("gang", ""), ("simulated", False))
    ]
    if identity != [plan["run_id"], plan["nonce"], host, gang, plan.get("simulated", False)]:
        raise ValueError(f"the record belongs to {identity}")
    return document


def _combine(documents_: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return list name -> the items of this list from all records of a host."""
    lists = ("gpus", "observations", "snapshots", "launches")
    return {key: [item for each in documents_ for item in each.get(key, ())] for key in lists}


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


def _reject_constant(word: str) -> float:
    raise ValueError(word)


def _host_rejection_reason(
    plan: dict[str, Any], host: dict[str, Any], document: dict[str, Any], criteria: Sequence[Criterion]
) -> str:
    if why := _unmeasured(plan, host, document["observations"]):
        return why
    for stage in dict.fromkeys(item["stage"] for item in plan["expected"]):
        last = [launch["outcome"] for launch in document["launches"] if launch["stage"] == stage][-1:]
        if last != ["finished"]:
            return f"the last launch of stage {stage}: {last}"
    gang = {other["name"] for other in plan["hosts"] if other.get("gang", "") == host.get("gang", "")}
    gang_launches = [launch for launch in document["launches"] if launch["stage"] == "gang"]
    if host.get("gang") and not any(set(launch["members"]) >= gang for launch in gang_launches):
        return "no launch with all hosts of its gang"
    names: dict[int, set[str]] = {}
    for gpu in document["gpus"]:  # the name is empty if the record does not state it
        names.setdefault(gpu["index"], set()).add(gpu["name"])
    if any(models - {""} != {"NVIDIA H200"} for models in names.values()):
        return "a GPU of another model"
    return next((why for criterion in criteria if (why := _violation(criterion, host, document))), "")


def _unmeasured(plan: dict[str, Any], host: dict[str, Any], observations: Sequence[dict[str, Any]]) -> str:
    """Return which planned observation was not measured, or an empty string."""
    for item in plan["expected"]:
        for scope in _scopes(plan, host, item):
            measured = [
                each for each in observations
                if (each["name"], each["stage"], each["scope"]) == (item["name"], item["stage"], scope)
                and item["params"].items() <= each.get("params", {}).items()
            ]  # fmt: skip
            if not measured or measured[-1]["status"] != "measured":
                return f"{item['name']} {scope} {item['params']} was not measured"
    return ""


def _scopes(plan: dict[str, Any], host: dict[str, Any], item: dict[str, Any]) -> list[str]:
    devices = [f"gpu={index}" for index in host["devices"]]
    if item["scope"] == "device":
        return devices
    if item["scope"] == "peers":
        mates = [other["name"] for other in plan["hosts"] if other.get("gang", "") == host.get("gang", "")]
        return [f"{device},partner={mate}" for device in devices for mate in mates if mate != host["name"]]
    return [f"gang={host.get('gang', '')}" if item["scope"] == "world" and item["stage"] == "gang" else "host"]


def _violation(criterion: Criterion, host: dict[str, Any], document: dict[str, Any]) -> str:
    """Return how a host violates a criterion with an absolute limit, or an empty string."""
    relative = criterion.vs_fleet or criterion.baseline or criterion.variable or criterion.datasheet
    if relative or criterion.same_as_fleet is not None:
        return ""
    limit = criterion.value if criterion.expected is None else criterion.expected * criterion.fraction
    values, lost = _values_of(criterion, document)
    for scope, series in values.items():
        if criterion.delta and criterion.operator in ("le", "lt", "eq"):
            kinds = {type(value) in (int, float) for value in series}
            if len(series) > 1 and kinds == {True} and series[-1] - series[0] > float(limit):  # type: ignore[arg-type]
                return f"{criterion.id}: {scope} rose from {series[0]} to {series[-1]}"
        elif not criterion.delta:
            good = [_meets(criterion.operator, value, limit) for value in series]
            if not (any(good) if criterion.best_of_run else all(good)):
                return f"{criterion.id}: {scope} has {series}, wanted {criterion.operator} {limit}"
    if (
        criterion.scope == "gpu"
        and not criterion.optional
        and "." in criterion.name
        and criterion.name.startswith("gpu.")
    ):
        for index in host["devices"]:
            if f"gpu={index}" not in values:
                return f"{criterion.id}: gpu={index} has no reading"
    if lost and not criterion.best_of_run:
        return f"{criterion.id}: {lost}"
    return ""


def _values_of(criterion: Criterion, document: dict[str, Any]) -> tuple[dict[str, list[Any]], str]:
    """Return the values that a criterion judges, and why a collector could not read one of them (empty if it read all).

    The values of a reading are grouped by scope, those of an observation by name, scope and parameters. Within a
    group, readings are sorted by time, and observations are in the order of the record.
    """
    values: dict[str, list[Any]] = {}
    lost = ""
    for taken in sorted(document.get("snapshots", ()), key=lambda taken: str(taken["at"])):
        for metric in taken["metrics"] if criterion.stage in ("", taken["stage"]) else ():
            if _matches_name(metric["name"], criterion.name):
                for scope, value in metric.get("values", {}).items():
                    if _applies_to(criterion, scope, {"phase": taken["phase"]}):
                        values.setdefault(f"{metric['name']} {scope}" if "*" in criterion.name else scope, []).append(
                            value
                        )
                for scope, why in metric.get("absent", {}).items():
                    if _applies_to(criterion, scope, {"phase": taken["phase"]}) and why.startswith("error:"):
                        lost = f"{scope} {why}"
    for each in document.get("observations", ()):
        matches = (
            _matches_name(each["name"], criterion.name)
            and criterion.stage in ("", each["stage"])
            and each["status"] == "measured"
        )
        if matches and _applies_to(criterion, each["scope"], each.get("params", {})):
            values.setdefault(f"{each['name']} {each['scope']} {each.get('params')}", []).append(each["value"])
    return values, lost


@lru_cache(100_000)
def _matches_name(name: str, pattern: str) -> bool:
    """Return whether a dotted name matches a pattern. A `*` in the pattern matches exactly one part between dots."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(word in ("*", part) for word, part in zip(wanted, parts, strict=True))


def _applies_to(criterion: Criterion, scope: str, params: dict[str, Any]) -> bool:
    labels = dict(part.split("=", 1) for part in scope.split(",") if "=" in part)
    kind = scope.split(",")[-1].split("=")[0]
    return criterion.scope in ("", kind) and all(
        params.get(key, labels.get(key)) == value for key, value in criterion.where.items()
    )


def _meets(operator: str, value: Any, limit: Any) -> bool:
    if isinstance(value, bool) != isinstance(limit, bool) or isinstance(value, str) != isinstance(limit, str):
        return False
    if operator == "eq":
        return bool(value == limit)
    if not isinstance(value, int | float):
        return False
    return {"ge": value >= limit, "gt": value > limit, "le": value <= limit, "lt": value < limit}[operator]


# The trial


class Trial:
    """A small run directory in which one file at a time is corrupted, and the failures that this caused."""

    def __init__(self, parent: Path, seed: int, full: bool = False, gang: bool = False) -> None:
        self.directory, self.rng = parent / "r1", random.Random(seed)  # noqa: S311
        self.plan, self.full = small_run(self.directory, full, gang), full
        self.packs = PACKS if full else (short_pack(),)
        self.records = RecordReader(self.directory, self.plan, {})
        host_records = [f"hosts/{host.name}.json" for host in self.plan.hosts]
        gang_records = [f"gangs/{host.gang}/{host.name}.json" for host in self.plan.hosts if host.gang]
        names = ["plan.json", "events.jsonl", *host_records, *gang_records]
        self.originals = {name: (self.directory / name).read_bytes() for name in names}
        self.evidence = {host.name: self.records.read(host.name)[0] for host in self.plan.hosts}
        self.weights = (
            [1] * 2
            + [60 // len(self.plan.hosts)] * len(host_records)
            + [120 // len(self.plan.hosts)] * len(gang_records)
        )
        self.corrupt_file = ""
        self.findings = Findings()

    def mutate(self, number: int) -> None:
        """Restore the previously changed file, change a random file, and read the run."""
        name = self.rng.choices(list(self.originals), self.weights)[0]
        text = mutated(self.rng, self.originals[name])
        if self.corrupt_file not in ("", name):
            (self.directory / self.corrupt_file).write_bytes(self.originals[self.corrupt_file])
        self.corrupt_file = name
        (self.directory / name).write_bytes(text)
        self.findings.counts["mutations"] += 1
        self.findings.counts["gang records"] += name.startswith("gangs/")
        try:
            with contextlib.nullcontext() if self.full or number % WITH_MESSAGES == 0 else _without_messages():
                self._read(name, text, number)
            if self.full and number % COMPLETE_COMMAND == 0:
                self._run_report()
        except Exception:  # noqa: BLE001 any exception is a finding
            self.findings.add("crashes", f"{name}: {traceback.format_exc(limit=-3)}", text)

    def _read(self, name: str, text: bytes, number: int) -> None:
        if name.endswith(".json") and name != "plan.json":
            host = self.plan.host(Path(name).stem)
            evidence = self.records.read(host.name)[0]
            is_complete = len(evidence.records) == len(_gangs_of(vars(host)))
            if not is_complete and (not host.gang or number % INCOMPLETE_GANG):
                self.findings.counts["refused"] += 1
                return
            if not self.full:  # only a file of this host changed, so the evidence of other hosts is reused
                self._check_report(name, text, merge(self.plan, self.evidence | {host.name: evidence}, self.packs))
                return
        try:
            run = load(self.directory)
        except RunError:
            self.findings.counts["refused"] += 1
            return
        report = merge(run.plan, run.evidence, self.packs, events=run.events, quarantined=run.quarantined)
        self._check_report(name, text, report)

    def _check_report(self, name: str, text: bytes, report: FleetReport) -> None:
        self.findings.counts[report.decision] += 1
        for each in report.verdicts:
            if isinstance(each.value, float) and not math.isfinite(each.value):
                self.findings.add("crashes", f"{name}: {each.name} {each.scope}: {each.value} is not JSON", text)
        if report.decision == "accepted" and (why := self._rejection_reason(name, text)):
            self.findings.add("wrong accepts", f"{name}: {why}", text)

    def _rejection_reason(self, name: str, text: bytes) -> str:
        if name == "events.jsonl":
            return _events_rejection_reason(text)
        whole = self.originals | {name: text}
        plan = json.loads(
            whole["plan.json"].decode(), object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant
        )
        if name == "plan.json":
            documents.validate(plan, "plan", source="plan")
        return rejection_reason(plan, whole, (H200_PACK if self.full else self.packs[0]).criteria)

    def _run_report(self) -> None:
        """Run the complete `rackproof report`. A write outside of the run directory is a failure."""
        self.findings.run_command(self.directory.parent, ("report", self.directory), (self.directory,))


class Findings:
    """Numbers of mutations, results and failures, and examples of failures."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []

    def add(self, what: str, text: str, document: bytes) -> None:
        """Count a failure of the kind `what`. Write the documents of the first five failures to the temporary directory."""
        self.counts[what] += 1
        if len(self.examples) < 5:
            kept = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}-{self.counts['mutations']}.json"
            kept.write_bytes(document)
            self.examples.append(f"{what}: {text} ({kept})")

    def run_command(
        self, directory: Path, words: Sequence[object], writes: Sequence[Path], document: bytes = b""
    ) -> int:
        """Run a verb and return its exit code.

        An exit code other than 0, 1, 2 and 64 (usage error) is a failure, and so is a write outside of the directories `writes`.
        """
        outside: list[str] = []
        output = io.StringIO()
        with (
            _watched(directory, writes, outside.append),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            code = accepted.call(*words)
        self.counts["commands"] += 1
        if code not in (0, 1, 2, USAGE):
            self.add("crashes", f"{words[0]}: exit {code}: {output.getvalue()[-600:]}", document)
        for path in outside:
            self.add("writes outside", path, document)
        return code


# Other files, and the verbs that read them


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file to corrupt, and a verb that reads it."""

    file: str
    words: tuple[str, ...]
    writes: tuple[str, ...] = ()
    """Directories in which the verb may write."""
    why_not_0: Callable[[bytes, bytes], str] = lambda original, text: ""
    """Given the original and the corrupt file, returns why exit code 0 of the verb is wrong, or an empty string."""


def _reason_if_changed(original: bytes, text: bytes) -> str:
    return "" if text == original else "the file is accepted although it changed"


def _reason_if_signature_changed(original: bytes, text: bytes) -> str:
    """Return an error if the Base64 data of the signature changed. Its line breaks are not compared: ssh-keygen ignores them."""
    original_lines, lines = (b"".join(each.split(b"-----")[2:3]).split() for each in (original, text))
    return "" if b"".join(original_lines) == b"".join(lines) else "a changed signature is accepted"


def _reason_if_verdicts_changed(original: bytes, text: bytes) -> str:
    documents_ = [
        json.loads(each.decode(), object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
        for each in (original, text)
    ]
    for key in ("decision", "verdicts"):
        if documents_[0][key] != documents_[1][key] and _state_of(documents_[0][key]) != _state_of(documents_[1][key]):
            return f"a report with another {key} is accepted"
    return ""


def _state_of(document: Any) -> Any:
    """Return each verdict with only the fields that matter for the decision. If `document` is no list, return it unchanged."""
    keys = ("host", "scope", "name", "stage", "criterion", "verdict", "waiver", "limit", "operator", "reason", "value")
    return [{key: each.get(key) for key in keys} for each in document] if isinstance(document, list) else document


def _missing_waiver(original: bytes, text: bytes) -> str:
    """Return for which failure the changed file has no waiver, or an empty string.

    The original file has one waiver for each failure of the run. If one is missing, the run must not be accepted.
    """
    needed, given = (yaml.safe_load(each)["waivers"] for each in (original, text))
    for line in needed:
        if not any(_covers(other, line) for other in given if isinstance(other, dict)):
            return f"no waiver for {line['criterion']} on {line['host']} {line['scope']}"
    return ""


def _covers(line: dict[str, Any], needed: dict[str, Any]) -> bool:
    """Return whether the waiver `line` is valid and waives at least what the waiver `needed` waives."""
    waived = {
        key: " ".join(str(line.get(key, "")).split()) for key in ("who", "why", "until", "scope", "criterion", "host")
    }
    matches_host = waived["host"] == needed["host"] or (not waived["host"] and bool(line.get("serial")))
    within = not waived["scope"] or f"{needed['scope']},".startswith(f"{waived['scope']},")
    signed = len(waived["who"]) > 1 and len(waived["why"]) > 1 and waived["until"] >= builders.WHEN[:10]
    return (
        bool(matches_host)
        and within
        and signed
        and waived["criterion"] == needed["criterion"]
        and not line.get("absent")
    )


def _settings(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters without OUTCOME_PARAMS. `diff` compares two figures if these remaining parameters are equal."""
    return {key: value for key, value in params.items() if key not in OUTCOME_PARAMS}


def _missing_figures(original: bytes, text: bytes) -> str:
    """Return an error if the changed record lacks a measured figure of the original record. Otherwise return an empty string.

    Only the figures in COMPARED_FIGURES matter.
    """
    before, after = (
        json.loads(each.decode(), object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
        for each in (original, text)
    )
    documents.validate(after, "record", source="record")
    scopes = [
        {(each["name"], each["scope"], json.dumps(_settings(each.get("params", {})), sort_keys=True))
         for each in document.get("observations", ()) if each["status"] == "measured" and each["name"] in COMPARED_FIGURES}
        for document in (before, after)
    ]  # fmt: skip
    return "" if scopes[0] <= scopes[1] else "figures are missing, but no difference is reported"


COMPARED_FIGURES = ("memory.bandwidth", "host_copy.bandwidth", "stress.throughput")
"""Figures that `diff` compares, because the shipped packs have criteria for them."""
ACCEPTED_RUN, LATER_RUN, REJECTED_RUN, RUN_WITH_BASELINE = "runs/good", "runs/after", "runs/poor", "runs/compared"
STORE, WAIVERS, SIGNERS = "baselines", "waivers.yml", "keys/signers"
VERIFY = ("verify", ACCEPTED_RUN, "--allowed-signers", SIGNERS)
ACCEPT = ("baseline", "accept", ACCEPTED_RUN, "--baseline", STORE, "--by", "somebody")
CASES = (
    Case(file=WAIVERS, words=("report", REJECTED_RUN, "--waivers", WAIVERS), writes=(REJECTED_RUN,), why_not_0=_missing_waiver),
    Case(file=WAIVERS, words=("judge", REJECTED_RUN, "--waivers", WAIVERS, "--json"), why_not_0=_missing_waiver),
    *(
        Case(file=f"{RUN_WITH_BASELINE}/baseline/{file}", words=("report", RUN_WITH_BASELINE), writes=(RUN_WITH_BASELINE,),
             why_not_0=_reason_if_changed)
        for file in ("index.json", "hosts/h1.json", "gpus/h2-0.json")
    ),
    Case(file=f"{STORE}/hosts/h1.json", words=("diff", STORE, LATER_RUN)),
    Case(file=f"{STORE}/gpus/h1-1.json", words=("diff", STORE, LATER_RUN, "--json", "--all")),
    Case(file=f"{STORE}/gpus/h1-1.json", words=("baseline", "list", "--baseline", STORE)),
    Case(file=f"{STORE}/hosts/h2.json", words=("baseline", "show", "h2", "--baseline", STORE)),
    Case(file=f"{STORE}/hosts/h2.json", words=ACCEPT, writes=(STORE,)),
    Case(file=f"{ACCEPTED_RUN}/report.json", words=ACCEPT, writes=(STORE,), why_not_0=_reason_if_verdicts_changed),
    Case(file=f"{ACCEPTED_RUN}/report.json", words=VERIFY, why_not_0=_reason_if_changed),
    Case(file=f"{ACCEPTED_RUN}/report.json", words=("diff", ACCEPTED_RUN, LATER_RUN)),
    Case(file=f"{ACCEPTED_RUN}/report.json", words=("judge", ACCEPTED_RUN)),
    Case(file=f"{ACCEPTED_RUN}/report.json", words=("watch", ACCEPTED_RUN, "--json", "--once", "--no-ask")),
    Case(file=f"{REJECTED_RUN}/report.json", words=("rma", REJECTED_RUN), writes=(REJECTED_RUN,)),
    Case(file=f"{LATER_RUN}/hosts/h1.json", words=("diff", ACCEPTED_RUN, LATER_RUN), why_not_0=_missing_figures),
    *(
        Case(file=f"{ACCEPTED_RUN}/{file}", words=VERIFY, why_not_0=_reason_if_changed)
        for file in ("SHA256SUMS", "signed.json", "hosts/h1.json", "plan.json", "junit.xml")
    ),
    Case(file=f"{ACCEPTED_RUN}/SHA256SUMS.sig", words=VERIFY, why_not_0=_reason_if_signature_changed),
    Case(file=f"{ACCEPTED_RUN}/SHA256SUMS", words=("report", ACCEPTED_RUN), writes=(ACCEPTED_RUN,)),
    Case(file=f"{LATER_RUN}/journal.jsonl", words=("report", LATER_RUN), writes=(LATER_RUN,)),
    Case(file=f"{LATER_RUN}/journal.jsonl", words=("watch", LATER_RUN, "--json", "--once", "--no-ask")),
    Case(file=f"{LATER_RUN}/lock.json", words=("report", LATER_RUN), writes=(LATER_RUN,)),
    Case(file=f"{LATER_RUN}/lock.json", words=("watch", LATER_RUN, "--json", "--once", "--no-ask")),
)  # fmt: skip


def write_input_files(directory: Path) -> None:
    """Write three accepted runs, a rejected run, the waivers that it needs, and a baseline. One accepted run is signed."""

    def run_verb(*words: object, code: int = 0) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            exit_code = accepted.call(*words)
        if exit_code != code:
            raise AssertionError(f"{words}: exit {exit_code}: {output.getvalue()}")

    with contextlib.chdir(directory):
        for name in (ACCEPTED_RUN, LATER_RUN, REJECTED_RUN):
            slow = accepted.slowed("memory.bandwidth", 0.5) if name == REJECTED_RUN else lambda record: record
            accepted.run_directory(Path(name), change=slow)
            run_verb("report", name, code=int(name == REJECTED_RUN))
        run_verb(*ACCEPT)
        copied = baseline_store.snapshot_baseline(Path(STORE), "gpu", ("h1", "h2"), Path(RUN_WITH_BASELINE))
        accepted.run_directory(Path(RUN_WITH_BASELINE), baseline=copied)
        run_verb("report", RUN_WITH_BASELINE)
        Path("keys").mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", "keys/own"], check=True)
        Path(SIGNERS).write_text(f'somebody namespaces="rackproof" {Path("keys/own.pub").read_text()}')
        run_verb("sign", ACCEPTED_RUN, "--key", "keys/own")
        failed = [item for item in accepted.report_of(Path(REJECTED_RUN))["verdicts"] if item["verdict"] == "fail"]
        lines = [
            {key: item[key] for key in ("criterion", "host", "scope")}
            | {"who": "somebody", "why": "it will be replaced", "until": "2027-01-31"}
            for item in failed
        ]
        Path(WAIVERS).write_text(yaml.safe_dump({"schema": "rackproof.waivers/1", "waivers": lines}, sort_keys=False))
        run_verb("report", REJECTED_RUN, "--waivers", WAIVERS)
        run_verb("report", REJECTED_RUN, code=1)


class VerbTrial:
    """A directory with the files that verbs read. One file at a time is corrupted."""

    def __init__(self, prepared: Path, directory: Path, seed: int) -> None:
        shutil.copytree(prepared, directory)
        self.directory, self.rng, self.findings = directory, random.Random(seed), Findings()  # noqa: S311
        run_lock.acquire(directory / LATER_RUN)
        self.originals = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    def mutate(self, number: int) -> None:
        """Make one mutation, and run the verb of its case."""
        case = CASES[number % len(CASES)]
        path = self.directory / case.file
        text = corrupt(self.rng, self.originals[path])
        path.write_bytes(text)
        self.findings.counts["mutations"] += 1
        self.findings.counts["verbs"] += 1
        try:
            with contextlib.chdir(self.directory):
                code = self.findings.run_command(
                    self.directory, case.words, [self.directory / name for name in case.writes], text
                )
            if code == 0 and (why := case.why_not_0(self.originals[path], text)):
                self.findings.add("wrong accepts", f"{' '.join(case.words)}: {case.file}: {why}", text)
        except Exception:  # noqa: BLE001 any exception is a finding
            self.findings.add("crashes", f"{case.file}: {traceback.format_exc(limit=-3)}", text)
        self._restore(path, case)

    def _restore(self, path: Path, case: Case) -> None:
        path.write_bytes(self.originals[path])
        for name in case.writes:
            for entry in list((self.directory / name).rglob("*")):
                if entry.is_file() and entry not in self.originals:
                    entry.unlink()
        for other, text in self.originals.items():
            if case.writes and (not other.exists() or other.read_bytes() != text):
                other.write_bytes(text)


def corrupt(rng: random.Random, whole: bytes) -> bytes:
    """Return a corrupt copy: in half of the cases truncated, otherwise mutated (only its bytes if it is not JSON)."""
    if rng.random() < 0.5:
        return whole[: rng.randrange(len(whole))]
    try:
        json.loads(whole)
    except ValueError:
        return _mutate_bytes(rng, whole)
    return mutated(rng, whole)


def _events_rejection_reason(text: bytes) -> str:
    for line in text.removesuffix(b"\n").split(b"\n") if text else ():
        try:
            event = json.loads(line.decode(), object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
            documents.validator("event").validate(event)
        except (ValueError, RecursionError, jsonschema.ValidationError):
            return "an invalid line in events.jsonl"
        if event["what"] != "passed" and event["host"] in ("h1", "h2"):
            return "events.jsonl has a failure of a host"
    return ""


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Validate without error messages, which take most of the time. This needs the fast validator (`quick.available`)."""
    original = documents.validate

    def validate(value: Any, schema: str, *, source: str) -> None:
        if not documents.compiled(schema).is_valid(value):
            raise documents.DocumentError(f"{source}: refused")

    if quick.available():
        documents.validate = validate
    try:
        yield
    finally:
        documents.validate = original


_WATCHES: list[tuple[list[str], Callable[[str], None]]] = []
_WRITES = (
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.chown",
)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCHES or (event != "open" and event not in _WRITES):
        return
    allowed, report = _WATCHES[-1]
    if event == "open" and not (
        isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        return
    for path in arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(os.fsdecode(path))
            inside = any(f"{real}/".startswith(f"{each}/") for each in allowed)
            if not inside and "__pycache__" not in real and real != os.devnull:
                report(f"{event} {real}")


@contextlib.contextmanager
def _watched(directory: Path, writes: Sequence[Path], report: Callable[[str], None]) -> Iterator[None]:
    """Report what is written, created, renamed or removed outside of the directories `writes`.

    Also report new or missing entries of `directory`.
    """
    if not getattr(sys, "_fuzz_audited", False):
        sys.addaudithook(_audit)
        sys._fuzz_audited = True  # type: ignore[attr-defined]
    before = sorted(directory.iterdir())
    _WATCHES.append(([os.path.realpath(each) for each in writes], report))
    try:
        yield
    finally:
        _WATCHES.pop()
    if sorted(directory.iterdir()) != before:
        report("a new or missing entry of the watched directory")


def run_part(seed: int, count: int, prepared: Path) -> tuple[Counter[str], list[str]]:
    """Make `count` mutations in this process; return the counts of everything, and examples of failures."""
    with tempfile.TemporaryDirectory(dir=MEMORY_DIRECTORY) as temporary:
        directory = Path(temporary).resolve()
        full, verbs = count // FULL_RUN, count // OTHER_VERB
        gangs = (count - full - verbs) // GANG_RUN
        trials: list[tuple[Trial | VerbTrial, int]] = [
            (Trial(directory / "full", seed, full=True), full),
            (VerbTrial(prepared, directory / "verbs", seed), verbs),
            (Trial(directory / "gang", seed, gang=True), gangs),
            (Trial(directory / "short", seed), count - full - verbs - gangs),
        ]
        counts: Counter[str] = Counter()
        reports: list[str] = []
        for trial, mutation_count in trials:
            # `seed` differs between parts, so they start with different cases.
            first = seed if isinstance(trial, VerbTrial) else 0
            for number in range(first + 1, first + mutation_count + 1):
                trial.mutate(number)
            counts += trial.findings.counts
            reports += trial.findings.examples
        return counts, reports


FAILURES = ("crashes", "wrong accepts", "writes outside")


def run(mutations: int, jobs: int, seed: int, report: Callable[[str], None] = print) -> tuple[Counter[str], list[str]]:
    """Make all mutations in `jobs` processes; return the counts of everything, and examples of failures.

    `report` is called with lines about the progress.
    """
    counts: Counter[str] = Counter()
    reports: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as prepared, ProcessPoolExecutor(jobs) as pool:
        write_input_files(Path(prepared))
        parts = range(0, mutations, PART)
        tasks = [pool.submit(run_part, seed + at, min(PART, mutations - at), Path(prepared)) for at in parts]
        for done, task in enumerate(as_completed(tasks), 1):
            more, examples = task.result()
            counts += more
            reports += examples
            if done % max(1, len(tasks) // 20) == 0:
                report(f"… {counts['mutations']} mutations, {time.monotonic() - began:.0f} s")
    return counts, reports


def main() -> int:
    """Make the mutations and print the counts. Return 1 if there was a failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, reports = run(options.mutations, options.jobs, options.seed, lambda text: print(text, flush=True))
    print("\n".join(reports[:20]))
    print(
        f"{counts['mutations']} mutations, seed {options.seed}: "
        + ", ".join(f"{counts[name]} {name}" for name in FAILURES)
    )
    judged = counts["accepted"] + counts["rejected"] + counts["incomplete"]
    print(
        f"{counts['refused']} refused, {judged} judged ({counts['accepted']} accepted), "
        f"{counts['gang records']} mutations of gang records, {counts['verbs']} mutations of files in CASES, "
        f"{counts['commands']} commands run"
    )
    return int(any(counts[name] for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
