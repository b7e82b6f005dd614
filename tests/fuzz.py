"""Run directories that somebody broke or forged, a million at a time: no crash, no wrong acceptance, no write outside.

    make fuzz                                             # 1 000 000 mutations
    .venv/bin/python -m tests.fuzz --mutations 100000 --jobs 2

Each mutation changes bytes or the JSON of a record, a host's or a gang's (sometimes of the plan or of the journal of events),
of a small run that is in order, and the run is read as `rackproof report` reads it. Where a changed record is still believed,
the run is judged; where it is accepted, `wrong` says by itself, from the bytes alone, whether it might be. Now and then
everything is written, too; and now and then a verb reads what is broken: a file of waivers, a baseline or a run's copy of one,
a report, what was signed, a journal or a lock (`CASES`).
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
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

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
WHOLE = next(pack for pack in PACKS if pack.name == "h200-sxm")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
WORDS = 50
"""Of so many of a short run one is refused in words, by jsonschema; the others by the fast validator of the same schemas."""
FULL = 200
"""Of so many mutations one is of a run with all that a host tells and every criterion; the others are of a short one."""
COMMAND = 20
"""Of so many of those one is put through the whole command, which writes its files."""
GANGS = 5
"""Of so many others one is of hosts that form a gang."""
INCOMPLETE = 10
"""Of so many gangs of which a record is not believed one is judged all the same, as if it were not there."""
VERBS = 250
"""Of so many mutations one is of what another verb than `report` reads."""
PART = 5_000
KEPT = ("memory", "digest")
GANG_FIGURES = ("collective.all_reduce.busbw", "collective.all_reduce.wrong_elements", "pairs.bandwidth")
GANG_BYTES = (67_108_864, None)
TOLD = (
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
EXTREMES = (1.7e308, -1.7e308, 5e-324, 1e60, -1e60, 1e-60, 2**63, 0, "x")
TOKENS = (
    b'"', b":", b",", b"{", b"}", b"[", b"]", b"\\", b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800",
    b"NaN", b"1e999", b"-Infinity", b"[" * 3000, b'{"a":' * 40, b"0", b"-", b"e9", b"null", b"true", b'"host": "h2",',
    b'"status": "measured",', b'"value": 0,', b'"simulated": true,', b'"gang": "x",', b"\r\n", b"\xc2\x85", b"\xe2\x80\xa8",
)  # fmt: skip


def short(record: Record) -> Record:
    """A record with few readings."""
    taken = tuple(
        replace(
            snapshot,
            metrics=tuple(metric for metric in snapshot.metrics if metric.name.startswith(TOLD) and metric.values),
        )
        for snapshot in record.snapshots
    )
    return replace(record, snapshots=taken)


def short_pack() -> Pack:
    """The criteria that speak of what a short record holds."""
    names = {metric for metric in builders.HEALTHY if metric.startswith(TOLD)} | {
        "gpu.count",
        "memory.bandwidth",
        "digest.mismatches",
    }
    chosen = [item for item in WHOLE.criteria if item.name in names or any(map(item.matches_name, GANG_FIGURES))]
    return replace(WHOLE, criteria=tuple(chosen))


def small_run(directory: Path, full: bool = False, gang: bool = False) -> Plan:
    """Two hosts with a GPU each, and few figures."""
    plan = builders.plan("h1", "h2", profile="smoke", gpu_count=1, rackproof_gang="rack" if gang else "none")
    kept = [item for item in plan.expected if item.stage == "benchmark" and item.name.split(".")[0] in KEPT]
    kept = kept if full else [item for item in kept if item.params.get("op") != "triad"][:4]
    together = [item for item in plan.expected if item.stage == "gang" and item.name in GANG_FIGURES]
    kept += [item for item in together if gang and item.params.get("size_bytes") in GANG_BYTES]
    plan = replace(plan, expected=tuple(kept))
    documents.write(directory / "plan.json", to_json(plan))
    for host in plan.hosts:
        for record in builders.records(plan, host.name):
            folder = f"gangs/{record.gang}" if record.gang else "hosts"
            documents.write(directory / folder / f"{host.name}.json", to_json(record if full else short(record)))
    event = {"at": builders.WHEN, "play": "Gang", "what": "passed", "hosts": ["h1", "h2"]}
    (directory / "events.jsonl").write_text(json.dumps(event) + "\n")
    return plan


# The mutations


def mutated(draw: random.Random, whole: bytes) -> bytes:
    """The document, changed in one to three places: by its bytes, or as JSON."""
    if draw.random() < 0.8:
        return _bytes(draw, whole)
    document = json.loads(whole)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        _change(draw, document)
    text = json.dumps(document, indent=draw.choice((None,) * 7 + (1,)))
    return text.encode() if draw.random() < 0.95 else _bytes(draw, text.encode())


def _bytes(draw: random.Random, text: bytes) -> bytes:
    at, length = draw.randrange(len(text)), draw.choice((1, 1, 2, 8, 64, 2000))
    kind = draw.randrange(6)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + bytes([draw.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return text[:at] + text[at + length :]
    if kind == 3:
        return text[:at] + draw.choice(TOKENS) + text[at:]
    if kind == 4:
        return text[:at] + text[at : at + length] + text[at:]
    lines = text.split(b"\n")
    lines.insert(draw.randrange(len(lines)), draw.choice(lines))
    return b"\n".join(lines)


def _change(draw: random.Random, document: Any) -> None:
    """One thing of the JSON: another value, one less, one more, twice, two exchanged; or every number of it the same."""
    container = _random_container(draw, document)
    keys = list(container) if isinstance(container, dict) else list(range(len(container)))
    if not keys:
        return
    key, kind = draw.choice(keys), draw.randrange(7)
    if kind == 0:
        del container[key]
    elif kind == 1:
        other = _random_container(draw, document)
        others = list(other.values()) if isinstance(other, dict) else other
        container[key] = json.loads(json.dumps(draw.choice(others))) if others else None
    elif kind == 2 and isinstance(container, list):
        container.insert(draw.randrange(len(container) + 1), container[key])
    elif kind == 2:
        container[draw.choice(("value", "reason", "status", "simulated", "gang", "x", "", "gpu=9", "\ud800"))] = (
            container[key]
        )
    elif kind == 3 and isinstance(container[key], int | float):
        container[key] = draw.choice(
            (0, -container[key], container[key] * 0.5, container[key] * 1e6, container[key] + 1, not container[key])
        )
    elif kind == 3 and isinstance(container[key], str) and container[key]:
        container[key] = container[key][:-1] + draw.choice("0aZ/. \n")
    elif kind == 6:
        container[key] = _flooded(container[key], draw.choice(EXTREMES))
    else:
        container[key] = draw.choice(VALUES)


def _flooded(value: Any, number: float | str) -> Any:
    """The same with one number in the place of all."""
    if isinstance(value, dict):
        return {key: _flooded(child, number) for key, child in value.items()}
    if isinstance(value, list):
        return [_flooded(child, number) for child in value]
    return number if isinstance(value, int | float) and not isinstance(value, bool) else value


def _random_container(draw: random.Random, document: Any) -> Any:
    """An object or a list somewhere in it."""
    container = document
    while True:
        inner = [
            value
            for value in (container.values() if isinstance(container, dict) else container)
            if isinstance(value, dict | list)
        ]
        if not inner or draw.random() < 0.15:
            return container
        container = draw.choice(inner)


# Whether it might be accepted, from the bytes alone


def wrong(plan: dict[str, Any], records: dict[str, bytes], criteria: Sequence[Criterion]) -> str:
    """Why a run must not be accepted; empty where nothing speaks against it. Knows nothing of the judge's code.

    Held against: strict JSON, the schema, run, nonce, host, gang; every planned observation measured, the last of it; the last
    launch finished; GPUs that tell another model or another's serial; every absolute criterion, on everything that it is for;
    every counter that rose over the run; no collector's error where a criterion asks.
    """
    parts: dict[tuple[str, int, str], set[str]] = {}
    slots: dict[str, set[tuple[str, int]]] = {}
    for host in plan["hosts"]:
        try:
            document = _together([_believed(plan, host["name"], gang, records) for gang in _gangs_of(host)])
        except (ValueError, RecursionError) as error:
            return f"{host['name']}: no valid record: {str(error)[:80]}"
        for gpu in document["gpus"]:
            slot = host["name"], gpu["index"]
            for key in ("serial", "uuid"):  # what one record does not tell, another may
                parts.setdefault((*slot, key), set()).update({gpu[key]} - {""})
                slots.setdefault(gpu[key] or str(slot), set()).add(slot)
        if why := _unsound(plan, host, document, criteria):
            return f"{host['name']}: {why}"
    if any(len(positions) > 1 for positions in (*parts.values(), *slots.values())):
        return "a GPU in two places, or two in one"
    return ""


def _gangs_of(host: dict[str, Any]) -> list[str]:
    """Of its own record, and of that in its gang."""
    return ["", host["gang"]] if host.get("gang") else [""]


def _believed(plan: dict[str, Any], host: str, gang: str, records: dict[str, bytes]) -> dict[str, Any]:
    """A record of that host and run. Raises ValueError where it is none."""
    text = records[f"gangs/{gang}/{host}.json" if gang else f"hosts/{host}.json"]
    document: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_never)
    documents.validate(document, "record", source="record")
    own: list[Any] = [
        document.get(key, default)
        for key, default in (("run_id", 0), ("nonce", 0), ("host", 0), ("gang", ""), ("simulated", False))
    ]
    if own != [plan["run_id"], plan["nonce"], host, gang, plan.get("simulated", False)]:
        raise ValueError(f"a record of {own}")
    return document


def _together(documents_: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all records of a host tell."""
    lists = ("gpus", "observations", "snapshots", "launches")
    return {key: [item for each in documents_ for item in each.get(key, ())] for key in lists}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _never(word: str) -> float:
    raise ValueError(word)


def _unsound(
    plan: dict[str, Any], host: dict[str, Any], document: dict[str, Any], criteria: Sequence[Criterion]
) -> str:
    if why := _unmeasured(plan, host, document["observations"]):
        return why
    for stage in dict.fromkeys(item["stage"] for item in plan["expected"]):
        last = [launch["outcome"] for launch in document["launches"] if launch["stage"] == stage][-1:]
        if last != ["finished"]:
            return f"the last launch of stage {stage}: {last}"
    gang = {other["name"] for other in plan["hosts"] if other.get("gang", "") == host.get("gang", "")}
    met = [launch for launch in document["launches"] if launch["stage"] == "gang"]
    if host.get("gang") and not any(set(launch["members"]) >= gang for launch in met):
        return "no launch of all its gang"
    names: dict[int, set[str]] = {}
    for gpu in document["gpus"]:  # what one record does not tell, another may
        names.setdefault(gpu["index"], set()).add(gpu["name"])
    if any(models - {""} != {"NVIDIA H200"} for models in names.values()):
        return "a GPU of another model"
    return next((why for criterion in criteria if (why := _broken(criterion, host, document))), "")


def _unmeasured(plan: dict[str, Any], host: dict[str, Any], observations: Sequence[dict[str, Any]]) -> str:
    """What the plan expects and nobody measured."""
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


def _broken(criterion: Criterion, host: dict[str, Any], document: dict[str, Any]) -> str:
    """Why what the host tells is against a criterion with a limit of its own."""
    if criterion.vs_fleet or criterion.baseline or criterion.same_as_fleet is not None or criterion.variable:
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
                return f"{criterion.id}: gpu={index} tells nothing"
    if lost and not criterion.best_of_run:
        return f"{criterion.id}: {lost}"
    return ""


def _values_of(criterion: Criterion, document: dict[str, Any]) -> tuple[dict[str, list[Any]], str]:
    """Scope -> what is told of it, in the order of time; and an error, where one stands in its place."""
    values: dict[str, list[Any]] = {}
    lost = ""
    for taken in sorted(document.get("snapshots", ()), key=lambda taken: str(taken["at"])):
        for metric in taken["metrics"] if criterion.stage in ("", taken["stage"]) else ():
            if _is_called(metric["name"], criterion.name):
                for scope, value in metric.get("values", {}).items():
                    if _is_for(criterion, scope, {"phase": taken["phase"]}):
                        values.setdefault(f"{metric['name']} {scope}" if "*" in criterion.name else scope, []).append(
                            value
                        )
                for scope, why in metric.get("absent", {}).items():
                    if _is_for(criterion, scope, {"phase": taken["phase"]}) and why.startswith("error:"):
                        lost = f"{scope} {why}"
    for each in document.get("observations", ()):
        hit = (
            _is_called(each["name"], criterion.name)
            and criterion.stage in ("", each["stage"])
            and each["status"] == "measured"
        )
        if hit and _is_for(criterion, each["scope"], each.get("params", {})):
            values.setdefault(f"{each['name']} {each['scope']} {each.get('params')}", []).append(each["value"])
    return values, lost


@lru_cache(100_000)
def _is_called(name: str, asked: str) -> bool:
    """A star stands for one component."""
    own, parts = asked.split("."), name.split(".")
    return len(own) == len(parts) and all(mine in ("*", part) for mine, part in zip(own, parts, strict=True))


def _is_for(criterion: Criterion, scope: str, params: dict[str, Any]) -> bool:
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
    """One small run directory, broken again and again, and what came of it."""

    def __init__(self, parent: Path, seed: int, full: bool = False, gang: bool = False) -> None:
        self.directory, self.draw = parent / "r1", random.Random(seed)  # noqa: S311
        self.plan, self.full = small_run(self.directory, full, gang), full
        self.packs = PACKS if full else (short_pack(),)
        self.records = RecordReader(self.directory, self.plan, {})
        own = [f"hosts/{host.name}.json" for host in self.plan.hosts]
        shared = [f"gangs/{host.gang}/{host.name}.json" for host in self.plan.hosts if host.gang]
        names = ["plan.json", "events.jsonl", *own, *shared]
        self.sound = {name: (self.directory / name).read_bytes() for name in names}
        self.evidence = {host.name: self.records.read(host.name)[0] for host in self.plan.hosts}
        self.weights = [1] * 2 + [60 // len(self.plan.hosts)] * len(own) + [120 // len(self.plan.hosts)] * len(shared)
        self.broken = ""
        self.found = Findings()

    def one(self, number: int) -> None:
        """One mutation."""
        name = self.draw.choices(list(self.sound), self.weights)[0]
        text = mutated(self.draw, self.sound[name])
        if self.broken not in ("", name):
            (self.directory / self.broken).write_bytes(self.sound[self.broken])
        self.broken = name
        (self.directory / name).write_bytes(text)
        self.found.counts["mutations"] += 1
        self.found.counts["gang records"] += name.startswith("gangs/")
        try:
            with contextlib.nullcontext() if self.full or number % WORDS == 0 else _wordless():
                self._read(name, text, number)
            if self.full and number % COMMAND == 0:
                self._command()
        except Exception:  # noqa: BLE001 whatever it is, it is what is looked for
            self.found.say("crashes", f"{name}: {traceback.format_exc(limit=-3)}", text)

    def _read(self, name: str, text: bytes, number: int) -> None:
        if name.endswith(".json") and name != "plan.json":
            host = self.plan.host(Path(name).stem)
            left = self.records.read(host.name)[0]
            whole = len(left.records) == len(_gangs_of(vars(host)))
            if not whole and (not host.gang or number % INCOMPLETE):
                self.found.counts["refused"] += 1
                return
            if not self.full:  # the other hosts' files are as they were
                self._judged(name, text, merge(self.plan, self.evidence | {host.name: left}, self.packs))
                return
        try:
            run = load(self.directory)
        except RunError:
            self.found.counts["refused"] += 1
            return
        made = merge(run.plan, run.evidence, self.packs, events=run.events, quarantined=run.quarantined)
        self._judged(name, text, made)

    def _judged(self, name: str, text: bytes, report: FleetReport) -> None:
        self.found.counts[report.decision] += 1
        for each in report.verdicts:
            if isinstance(each.value, float) and not math.isfinite(each.value):
                self.found.say("crashes", f"{name}: {each.name} {each.scope}: {each.value}, which is no JSON", text)
        if report.decision == "accepted" and (why := self._wrong(name, text)):
            self.found.say("wrong accepts", f"{name}: {why}", text)

    def _wrong(self, name: str, text: bytes) -> str:
        if name == "events.jsonl":
            return _unreported(text)
        whole = self.sound | {name: text}
        plan = json.loads(whole["plan.json"].decode(), object_pairs_hook=_once, parse_constant=_never)
        if name == "plan.json":
            documents.validate(plan, "plan", source="plan")
        return wrong(plan, whole, (WHOLE if self.full else self.packs[0]).criteria)

    def _command(self) -> None:
        """The whole of `rackproof report`, which writes; whatever it writes elsewhere is counted."""
        self.found.command(self.directory.parent, ("report", self.directory), (self.directory,))


class Findings:
    """What came of the mutations so far."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []

    def say(self, what: str, text: str, document: bytes) -> None:
        """Counts a thing that must not be, and keeps what it came of."""
        self.counts[what] += 1
        if len(self.told) < 5:
            kept = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}-{self.counts['mutations']}.json"
            kept.write_bytes(document)
            self.told.append(f"{what}: {text} ({kept})")

    def command(self, directory: Path, words: Sequence[object], writes: Sequence[Path], document: bytes = b"") -> int:
        """A verb and its exit code; counts where that is none of ours, and what it writes elsewhere, or new in `place`."""
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
            self.say("crashes", f"{words[0]}: exit {code}: {output.getvalue()[-600:]}", document)
        for path in outside:
            self.say("writes outside", path, document)
        return code


# What other verbs read


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file that is broken, and a verb that reads it."""

    file: str
    words: tuple[str, ...]
    writes: tuple[str, ...] = ()
    """Where it may write."""
    zero: Callable[[bytes, bytes], str] = lambda sound, text: ""
    """Why its exit code must not be 0; of the file as it was and as it is."""


def _same(sound: bytes, text: bytes) -> str:
    return "" if text == sound else "it holds, though the file is another"


def _same_signature(sound: bytes, text: bytes) -> str:
    """ssh-keygen reads armour: how its lines are broken says nothing."""
    own, other = (b"".join(each.split(b"-----")[2:3]).split() for each in (sound, text))
    return "" if b"".join(own) == b"".join(other) else "another signature holds"


def _same_verdicts(sound: bytes, text: bytes) -> str:
    documents_ = [json.loads(each.decode(), object_pairs_hook=_once, parse_constant=_never) for each in (sound, text)]
    for key in ("decision", "verdicts"):
        if documents_[0][key] != documents_[1][key] and _state_of(documents_[0][key]) != _state_of(documents_[1][key]):
            return f"a report with another {key} is believed"
    return ""


def _state_of(document: Any) -> Any:
    """Of each verdict what was decided, on what, by which limit."""
    keys = ("host", "scope", "name", "stage", "criterion", "verdict", "waiver", "limit", "operator", "reason", "value")
    return [{key: each.get(key) for key in keys} for each in document] if isinstance(document, list) else document


def _waived(sound: bytes, text: bytes) -> str:
    """Every line of the whole file must still be there, for no less: each was needed."""
    needed, given = (yaml.safe_load(each)["waivers"] for each in (sound, text))
    for line in needed:
        if not any(_answers(other, line) for other in given if isinstance(other, dict)):
            return f"nobody answers for {line['criterion']} on {line['host']} {line['scope']}"
    return ""


def _answers(line: dict[str, Any], needed: dict[str, Any]) -> bool:
    asked = {
        key: " ".join(str(line.get(key, "")).split()) for key in ("who", "why", "until", "scope", "criterion", "host")
    }
    matches_host = asked["host"] == needed["host"] or (not asked["host"] and bool(line.get("serial")))
    within = not asked["scope"] or f"{needed['scope']},".startswith(f"{asked['scope']},")
    signed = len(asked["who"]) > 1 and len(asked["why"]) > 1 and asked["until"] >= builders.WHEN[:10]
    return (
        bool(matches_host)
        and within
        and signed
        and asked["criterion"] == needed["criterion"]
        and not line.get("absent")
    )


def _all_measured(sound: bytes, text: bytes) -> str:
    """What the whole record tells, the other tells too."""
    before, after = (
        json.loads(each.decode(), object_pairs_hook=_once, parse_constant=_never) for each in (sound, text)
    )
    documents.validate(after, "record", source="record")
    scopes = [
        {(each["name"], each["scope"], json.dumps(each.get("params", {}), sort_keys=True))
         for each in document.get("observations", ()) if each["status"] == "measured" and each["name"] in DIFFERED}
        for document in (before, after)
    ]  # fmt: skip
    return "" if scopes[0] <= scopes[1] else "figures are gone, and it says that nothing differs"


DIFFERED = ("memory.bandwidth", "host_copy.bandwidth", "stress.throughput")
"""What `diff` compares by criteria of the shipped packs."""
GOOD, AFTER, POOR, COMPARED = "runs/good", "runs/after", "runs/poor", "runs/compared"
STORE, WAIVERS, SIGNERS = "baselines", "waivers.yml", "keys/signers"
VERIFY = ("verify", GOOD, "--allowed-signers", SIGNERS)
ACCEPT = ("baseline", "accept", GOOD, "--baseline", STORE, "--by", "somebody")
CASES = (
    Case(file=WAIVERS, words=("report", POOR, "--waivers", WAIVERS), writes=(POOR,), zero=_waived),
    Case(file=WAIVERS, words=("judge", POOR, "--waivers", WAIVERS, "--json"), zero=_waived),
    *(
        Case(file=f"{COMPARED}/baseline/{file}", words=("report", COMPARED), writes=(COMPARED,), zero=_same)
        for file in ("index.json", "hosts/h1.json", "gpus/h2-0.json")
    ),
    Case(file=f"{STORE}/hosts/h1.json", words=("diff", STORE, AFTER)),
    Case(file=f"{STORE}/gpus/h1-1.json", words=("diff", STORE, AFTER, "--json", "--all")),
    Case(file=f"{STORE}/gpus/h1-1.json", words=("baseline", "list", "--baseline", STORE)),
    Case(file=f"{STORE}/hosts/h2.json", words=("baseline", "show", "h2", "--baseline", STORE)),
    Case(file=f"{STORE}/hosts/h2.json", words=ACCEPT, writes=(STORE,)),
    Case(file=f"{GOOD}/report.json", words=ACCEPT, writes=(STORE,), zero=_same_verdicts),
    Case(file=f"{GOOD}/report.json", words=VERIFY, zero=_same),
    Case(file=f"{GOOD}/report.json", words=("diff", GOOD, AFTER)),
    Case(file=f"{GOOD}/report.json", words=("judge", GOOD)),
    Case(file=f"{GOOD}/report.json", words=("watch", GOOD, "--json", "--once", "--no-ask")),
    Case(file=f"{POOR}/report.json", words=("rma", POOR), writes=(POOR,)),
    Case(file=f"{AFTER}/hosts/h1.json", words=("diff", GOOD, AFTER), zero=_all_measured),
    *(
        Case(file=f"{GOOD}/{file}", words=VERIFY, zero=_same)
        for file in ("SHA256SUMS", "signed.json", "hosts/h1.json", "plan.json", "junit.xml")
    ),
    Case(file=f"{GOOD}/SHA256SUMS.sig", words=VERIFY, zero=_same_signature),
    Case(file=f"{GOOD}/SHA256SUMS", words=("report", GOOD), writes=(GOOD,)),
    Case(file=f"{AFTER}/journal.jsonl", words=("report", AFTER), writes=(AFTER,)),
    Case(file=f"{AFTER}/journal.jsonl", words=("watch", AFTER, "--json", "--once", "--no-ask")),
    Case(file=f"{AFTER}/lock.json", words=("report", AFTER), writes=(AFTER,)),
    Case(file=f"{AFTER}/lock.json", words=("watch", AFTER, "--json", "--once", "--no-ask")),
)  # fmt: skip


def furnish(directory: Path) -> None:
    """Runs that were accepted, one of them signed; one that was rejected, with the waivers that it needs; and a baseline."""

    def done(*words: object, code: int = 0) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(output):
            exit_code = accepted.call(*words)
        if exit_code != code:
            raise AssertionError(f"{words}: exit {exit_code}: {output.getvalue()}")

    with contextlib.chdir(directory):
        for name in (GOOD, AFTER, POOR):
            slow = accepted.slowed("memory.bandwidth", 0.5) if name == POOR else lambda record: record
            accepted.run_directory(Path(name), change=slow)
            done("report", name, code=int(name == POOR))
        done(*ACCEPT)
        copied = baseline_store.snapshot_baseline(Path(STORE), "gpu", ("h1", "h2"), Path(COMPARED))
        accepted.run_directory(Path(COMPARED), baseline=copied)
        done("report", COMPARED)
        Path("keys").mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", "keys/own"], check=True)
        Path(SIGNERS).write_text(f'somebody namespaces="rackproof" {Path("keys/own.pub").read_text()}')
        done("sign", GOOD, "--key", "keys/own")
        failed = [item for item in accepted.report_of(Path(POOR))["verdicts"] if item["verdict"] == "fail"]
        lines = [
            {key: item[key] for key in ("criterion", "host", "scope")}
            | {"who": "somebody", "why": "it is to be replaced", "until": "2027-01-31"}
            for item in failed
        ]
        Path(WAIVERS).write_text(yaml.safe_dump({"schema": "rackproof.waivers/1", "waivers": lines}, sort_keys=False))
        done("report", POOR, "--waivers", WAIVERS)
        done("report", POOR, code=1)


class Verbs:
    """A place with everything that verbs read, of which one file is broken at a time."""

    def __init__(self, furnished: Path, directory: Path, seed: int) -> None:
        shutil.copytree(furnished, directory)
        self.place, self.draw, self.found = directory, random.Random(seed), Findings()  # noqa: S311
        run_lock.acquire(directory / AFTER)
        self.sound = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}

    def one(self, number: int) -> None:
        """One mutation."""
        case = CASES[number % len(CASES)]
        path = self.place / case.file
        text = broken(self.draw, self.sound[path])
        path.write_bytes(text)
        self.found.counts["mutations"] += 1
        self.found.counts["verbs"] += 1
        try:
            with contextlib.chdir(self.place):
                code = self.found.command(self.place, case.words, [self.place / name for name in case.writes], text)
            if code == 0 and (why := case.zero(self.sound[path], text)):
                self.found.say("wrong accepts", f"{' '.join(case.words)}: {case.file}: {why}", text)
        except Exception:  # noqa: BLE001 whatever it is, it is what is looked for
            self.found.say("crashes", f"{case.file}: {traceback.format_exc(limit=-3)}", text)
        self._restore(path, case)

    def _restore(self, path: Path, case: Case) -> None:
        path.write_bytes(self.sound[path])
        for name in case.writes:
            for entry in list((self.place / name).rglob("*")):
                if entry.is_file() and entry not in self.sound:
                    entry.unlink()
        for other, text in self.sound.items():
            if case.writes and (not other.exists() or other.read_bytes() != text):
                other.write_bytes(text)


def broken(draw: random.Random, whole: bytes) -> bytes:
    """As `mutated`, half of it cut at some byte; of what is no JSON the bytes alone."""
    if draw.random() < 0.5:
        return whole[: draw.randrange(len(whole))]
    try:
        json.loads(whole)
    except ValueError:
        return _bytes(draw, whole)
    return mutated(draw, whole)


def _unreported(text: bytes) -> str:
    for line in text.removesuffix(b"\n").split(b"\n") if text else ():
        try:
            event = json.loads(line.decode(), object_pairs_hook=_once, parse_constant=_never)
            documents.validator("event").validate(event)
        except (ValueError, RecursionError, jsonschema.ValidationError):
            return "a line of the journal that is none"
        if event["what"] != "passed" and event["host"] in ("h1", "h2"):
            return "the journal tells of a failure"
    return ""


@contextlib.contextmanager
def _wordless() -> Iterator[None]:
    """Most of the time of a refusal goes into its words; a test holds the two validators against each other."""
    authority = documents.validate

    def validate(value: Any, schema: str, *, source: str) -> None:
        if not documents.compiled(schema).is_valid(value):
            raise documents.DocumentError(f"{source}: refused")

    if quick.available():
        documents.validate = validate
    try:
        yield
    finally:
        documents.validate = authority


_LOOKING: list[tuple[list[str], Callable[[str], None]]] = []
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
    if not _LOOKING or (event != "open" and event not in _WRITES):
        return
    allowed, say = _LOOKING[-1]
    if event == "open" and not (
        isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        return
    for path in arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]:
        if isinstance(path, str | bytes | os.PathLike):
            real = os.path.realpath(os.fsdecode(path))
            inside = any(f"{real}/".startswith(f"{each}/") for each in allowed)
            if not inside and "__pycache__" not in real and real != os.devnull:
                say(f"{event} {real}")


@contextlib.contextmanager
def _watched(directory: Path, writes: Sequence[Path], say: Callable[[str], None]) -> Iterator[None]:
    """Tells of everything that is written, made, renamed or removed outside of some directories of a place."""
    if not getattr(sys, "_fuzz_audited", False):
        sys.addaudithook(_audit)
        sys._fuzz_audited = True  # type: ignore[attr-defined]
    before = sorted(directory.iterdir())
    _LOOKING.append(([os.path.realpath(each) for each in writes], say))
    try:
        yield
    finally:
        _LOOKING.pop()
    if sorted(directory.iterdir()) != before:
        say("something beside the run directory")


def part(seed: int, count: int, furnished: Path) -> tuple[Counter[str], list[str]]:
    """So many mutations in one process."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as temporary:
        directory = Path(temporary).resolve()
        full, verbs = count // FULL, count // VERBS
        gangs = (count - full - verbs) // GANGS
        trials: list[tuple[Trial | Verbs, int]] = [
            (Trial(directory / "full", seed, full=True), full),
            (Verbs(furnished, directory / "verbs", seed), verbs),
            (Trial(directory / "gang", seed, gang=True), gangs),
            (Trial(directory / "short", seed), count - full - verbs - gangs),
        ]
        counts: Counter[str] = Counter()
        reports: list[str] = []
        for trial, many in trials:
            # Of the verbs another one comes first in each part.
            first = seed if isinstance(trial, Verbs) else 0
            for number in range(first + 1, first + many + 1):
                trial.one(number)
            counts += trial.found.counts
            reports += trial.found.told
        return counts, reports


BAD = ("crashes", "wrong accepts", "writes outside")


def run(mutations: int, jobs: int, seed: int, say: Callable[[str], None] = print) -> tuple[Counter[str], list[str]]:
    """All of them; `say` is told how it goes on."""
    counts: Counter[str] = Counter()
    reports: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as furnished, ProcessPoolExecutor(jobs) as pool:
        furnish(Path(furnished))
        parts = range(0, mutations, PART)
        tasks = [pool.submit(part, seed + at, min(PART, mutations - at), Path(furnished)) for at in parts]
        for done, task in enumerate(as_completed(tasks), 1):
            more, words = task.result()
            counts += more
            reports += words
            if done % max(1, len(tasks) // 20) == 0:
                say(f"… {counts['mutations']} mutations, {time.monotonic() - began:.0f} s")
    return counts, reports


def main() -> int:
    """Prints the counts; 1 where anything was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, reports = run(options.mutations, options.jobs, options.seed, lambda text: print(text, flush=True))
    print("\n".join(reports[:20]))
    print(
        f"{counts['mutations']} mutations, seed {options.seed}: " + ", ".join(f"{counts[name]} {name}" for name in BAD)
    )
    judged = counts["accepted"] + counts["rejected"] + counts["incomplete"]
    print(
        f"{counts['refused']} refused, {judged} judged ({counts['accepted']} accepted), "
        f"{counts['gang records']} of gang records, {counts['verbs']} of what other verbs read, "
        f"{counts['commands']} commands run in full"
    )
    return int(any(counts[name] for name in BAD))


if __name__ == "__main__":
    sys.exit(main())
