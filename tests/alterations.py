"""Alter accepted runs, one element at a time, and check that the judge accepts only allowed changes and never crashes.

    make alter                          # 1 000 000 alterations of the runs in SIMULATED and MEASURED_RUNS
    make alter ALTERATIONS=20000 SEED=2 RUNS=runs/rehearsal                               # also alters runs/rehearsal
    .venv/bin/python -m tests.alterations --count 20000 --seed 2 runs/rehearsal           # the same without make

The elements are found by walking a record along its JSON schema, so a new field of the schema is altered too. An alteration
makes one change: it removes an element, swaps it with another element of its kind (possibly of another host), duplicates an item
of a list or mapping, negates or scales a number, replaces the name of a unit, or changes the day of a time. `ALLOWED` lists the
alterations after which a run may still be accepted, each with its reason.

To save time, only the host of an altered record and the hosts that launch with it are judged first. The statistics of all hosts
except the host of the altered record are computed once and reused. In two cases, the whole run is then judged from files, as
`rackproof report` does:

- The judged hosts are accepted, the change is not allowed, and it alters the content (`_content`). The second decision counts.
- The judged hosts are not accepted, and the run is one of the few selected for this check (one in CHECKED_FROM_FILES). It is a
  failure if the whole run is accepted, unless the change is allowed or does not alter the content.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from fleet.judge.consistency import contradictions
from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.gather import gather
from fleet.judge.informational import reason_of
from fleet.judge.judge import by_criterion, host_views, judge_hosts
from fleet.judge.passes import PassCounter
from fleet.judge.tally import Tally
from fleet.records.load import Run, load
from fleet.report.hosts import decide, units
from fleet.report.merge import merge
from schemas.catalogue import BENCHMARKS
from schemas.decode import observation_from_json, record_from_parts
from schemas.documents import compiled, part
from schemas.plans import Plan
from schemas.readings import READINGS
from schemas.records import MEASURED, Metric, Observation, Record
from schemas.reports import ACCEPTED, INCOMPLETE
from schemas.run_directory import bmc_record_names, record_names
from schemas.scopes import Scope
from schemas.semantic_validation import COLLECTOR, metric_problem, record_problem
from schemas.times import epoch_seconds
from tests import ROOT, accepted

Json = Any
Place = tuple[str | int, ...]
"""Keys and positions that lead from a record to one of its elements."""

REMOVE, DUPLICATE, SWAP, NEGATE, SCALE, UNIT, SHIFT = "remove", "duplicate", "swap", "negate", "scale", "unit", "shift"
FACTOR = 1000
"""`scale` multiplies or divides by this factor, as if GB had been taken for MB."""
DAY = timedelta(days=1)
CHECKED_FROM_FILES = 500
"""Of the altered runs that `AcceptedRun.quick_decision` does not accept, one in this many is judged from files too."""
JUDGED_WHOLE = 40
"""In one of this many altered runs, all criteria are applied even if elements of the evidence contradict each other, to check
that no criterion crashes. In the others, a contradiction makes the decision INCOMPLETE before any criterion is applied."""
PART = 5_000
"""Alterations per task of the process pool."""
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the runs are written: a file system in memory, or None (the default directory for temporary files)."""
MIN_HOSTS_TO_COMPARE = 3
"""Smallest number of hosts in which a majority can agree."""
UNITS = sorted(
    {reading.unit for reading in READINGS.values()}
    | {output.unit for benchmark in BENCHMARKS.values() for output in benchmark.outputs}
)
NAMED_BY = {
    "metrics": ("name",),
    "observations": ("name",),
    "snapshots": ("stage", "phase"),
    "launches": ("stage",),
    "series": ("name",),
}
"""Name of a list in a record -> the fields that give the kind of an item: snapshots of equal stage and phase are of one kind."""
SIMULATED = {
    "one GPU": ("--hosts", 1, "--gpus", 1, "--gang", "none", "--profile", "smoke"),
    "two hosts": ("--hosts", 2, "--gpus", 2, "--profile", "smoke"),
    "BMCs": ("--hosts", 3, "--gpus", 1, "--gang", "none", "--profile", "smoke", "--bmcs"),
    "three hosts": ("--hosts", 3, "--gpus", 4, "--profile", "smoke"),
    "RDMA ports": ("--hosts", 3, "--gpus", 2, "--profile", ROOT / "docs/measurements/ports.yml"),
}
MEASURED_RUNS = (
    "h200x1",
    "h200x2",
    "h200x2-two-hosts",
    "h100x1",
    "h100x2",
    "h200x1-burnin",
    "h200x1-burnin-long",
    "h200x2-burnin",
)
"""Runs on real GPUs in docs/measurements."""
WEIGHTS = {"one GPU": 20, "two hosts": 4, "three hosts": 1, "h200x1": 5, "h200x2": 1}
"""Run -> its weight in the distribution of the alterations; a run that is not listed has weight 1. Small runs have larger
weights: they are judged faster, and their records have the same kinds of elements as those of large runs."""

_EXTRA = "adds a scope or a name that is not required; all required scopes and names remain"
_DRAWN = "the report draws it and does not judge it"
_SPREAD = "describes how the samples of a figure varied; the figure itself is judged"
_LIKE = (
    "both values are within the limits, and the two parts are of the same kind: a healthy part may have either value"
)
_DESCRIBES = (
    "describes how the figure was measured; the judge needs only parameters that distinguish figures of one name"
)
_NCCL = "is known only if NCCL could write its log"
ALLOWED: Mapping[str, str] = {
    r"duplicate snapshots/.*/metrics/(container\.runtime\.present|storage\.mount\.size)/.*": _EXTRA,
    r"duplicate snapshots/.*/metrics/(gpu\.nvlink|gpu\.throttle|kernel\.event|pcie\.acs)\..*": _EXTRA,
    r"duplicate snapshots/.*/metrics/infiniband\..*": _EXTRA,
    r"duplicate software/.*": _EXTRA,
    r"duplicate observations/.*/params/.*": _EXTRA,
    r"remove software/cublas": "is missing if no rank loaded cuBLAS, and in records from before 28 November 2026",
    r".* launches/[^/]+/timeline.*": _DRAWN,
    r".* soak/timeline/(events.*|series/gpu\.[^/]+(/(at|n|low|mean|high|params|scope).*)?)": _DRAWN,
    r".* soak/timeline/left_out": "only excuses missing series in a soak of less than an hour; here, no series is missing",
    r"(remove|scale|swap) observations/.*/samples.*": _SPREAD,
    r"swap observations(/.*)?": _LIKE,
    r"swap soak/timeline/series/[^/]+(/.*)?": _LIKE,
    r"remove soak/timeline/series/transformer\.flops": "the drift of `transformer.throughput` is judged, which is proportional",
    r"swap snapshots/.*/metrics/gpu\.(memory\.)?temperature.*": _LIKE,
    r"swap snapshots/.*/metrics/host\.uptime(/values.*)?": "hosts of one rack may have booted at the same time",
    r"swap snapshots/.*/metrics/gpu\.(throttle\..*|pcie\.replays|clock\.sm|energy|memory\.utilization|power)(/values.*)?": _LIKE,
    r"scale snapshots/preflight before/metrics/host\.uptime/values/host": (
        "after a division, a small uptime is wrong by less than `reading_consistency.CLOCK_TOLERANCE_S`"
    ),
    r"negate snapshots/.*/metrics/host\.persistence_daemon/values/host": "the daemon may run on one host and not on others",
    r"(negate|scale) snapshots/.*/metrics/host\.ulimit\..*": "only a limit lower than that of the other hosts is a fault",
    r"swap snapshots/.*/metrics/collector\..*": "how long a collector took is not judged",
    r"swap (began|ended|(snapshots|launches)/[^/]+/(at|began|duration_s))": "the hosts are measured at the same time",
    r"remove snapshots/[^/]+ during": "need not exist for a launch that is short or has no timeline (`sequence.py`)",
    r"remove observations/collective\..*/params/(algorithm|protocol|transport)": _NCCL,
    r"remove observations/collective\..*/params/moved_bytes": "without it, the judge computes with `size_bytes`",
    r"remove observations/[^/]+/params": _DESCRIBES,
    r"scale observations/.*\.loss_ratio/value": "a lower ratio means that the network learned more, which is no fault",
    r"scale observations/checkpoint\..*_time/value": "a shorter time means faster storage, which is no fault",
    r"remove observations/.*/params/(size|size_bytes|backend|batch_size|data|dtype|network|optimizer)": _DESCRIBES,
    r"remove observations/.*/params/(epochs|heads|layers|left_out|peak|replicas|sequence|steps|width)": _DESCRIBES,
    r"(remove|negate|scale) observations/integrity\..*/params/(elapsed_s|passes|wrong_addresses|wrong_bits)": _DESCRIBES,
    r"(remove|negate|scale) observations/.*/params/(bytes|cache_bytes|cpus_per_rank|devices|free_bytes|graphed)": _DESCRIBES,
    r"(remove|negate|scale) observations/.*/params/(checked|learning_rate|memory_node|places|repetitions|threads)": _DESCRIBES,
    r"(remove|negate|scale) observations/host_memory\..*/params/size_bytes": "depends on the size of the processors' caches",
    r"scale observations/(transformer|mixture_of_experts)\..*/params/layers": (
        "the benchmark adapts the number of layers to the memory of the GPU"
    ),
    r"(remove|scale) observations/pairs\..*/params/.*": _DESCRIBES,
    r"(remove|scale) launches/[^/]+/number": "only distinguishes launches of one stage; these runs have one launch per stage",
    r"scale launches/[^/]+/deadline_s": (
        "a shorter deadline could only have ended the launch earlier; one that is longer than in the plan is not accepted"
    ),
    r"scale launches/soak/duration_s": "how long a round of a soak took is not judged",
    r"scale snapshots/[^/]+/duration_s": "how long the readings took is not judged",
}
"""Regular expression for `{operation} {kind of element}` -> why a run may still be accepted after such an alteration.

A changed value of a reading or figure that no criterion judges needs no entry here: `fleet/judge/informational.py` has the
reasons."""

ALLOWED_IN_REHEARSALS: Mapping[str, str] = {
    r"swap (snapshots|launches)(/.*)?": "all hosts of a rehearsal may be the same machine",
    r"scale observations/fashion_mnist\..*/params/epochs": "the training ends after a few steps, within the first epoch",
    r"(negate|scale) (snapshots/.*/values/.*|observations/.*/value)": "a rehearsal judges the pipeline and not the machine",
}
"""Further entries, which apply only to rehearsals (runs on CPUs), whose acceptance says nothing about hardware."""

INVALID, ALLOWED_CHANGE, WITHOUT_EFFECT = "invalid", "allowed", "without effect"
FAILURES = ("accepted", "crashed")


@dataclass(frozen=True, kw_only=True)
class Element:
    """One element of a record."""

    place: Place
    kind: str
    """The path of the element, with names in place of positions, and `gpu` in place of `gpu=0`, for example
    `snapshots/preflight before/metrics/gpu.power/values/gpu`."""
    value: Json
    is_entry: bool
    """Whether the element is an item of a list, or an entry of a mapping whose keys are not fields of the schema."""
    is_time: bool


def elements(document: Json, schema: Json, place: Place = (), kind: str = "") -> Iterator[Element]:
    """Yield every element of a document, walking it along its schema."""
    if isinstance(document, dict):
        fields = schema.get("properties", {})
        for key, value in document.items():
            inner = fields.get(key) or schema.get("additionalProperties") or {}
            name = key if key in fields else _kind_of_key(key)
            yield from _element(value, inner, (*place, key), f"{kind}/{name}" if kind else name, key not in fields)
    elif isinstance(document, list):
        named_by = NAMED_BY.get(str(place[-1]), ())
        for position, value in enumerate(document):
            name = " ".join(str(value[field]) for field in named_by) if named_by else "each"
            yield from _element(value, schema.get("items", {}), (*place, position), f"{kind}/{name}", True)


def _element(value: Json, schema: Json, place: Place, kind: str, is_entry: bool) -> Iterator[Element]:
    is_time = isinstance(value, str) and place[-1] in ("began", "ended", "at")
    yield Element(place=place, kind=kind, value=value, is_entry=is_entry, is_time=is_time)
    yield from elements(value, schema, place, kind)


def _kind_of_key(key: str) -> str:
    """Return the kind of a scope (`gpu` for `gpu=0`), `each` for a number, and any other key unchanged."""
    return "each" if key.isdecimal() else Scope.parse(key).kind if "=" in key else key


def part_of_record(kind: str) -> str:
    """Return the part of the evidence that an element belongs to: a row of the table that `main` prints."""
    first, *rest = kind.split("/")
    inner = next((name for name in ("values", "absent", "unit", "params", "samples", "timeline") if name in rest), "")
    match first:
        case "gpus":
            return "identity of a GPU"
        case "software":
            return "version"
        case "snapshots" if "metrics" in rest:
            return {"values": "value of a reading", "absent": "reason for a missing reading", "unit": "unit"}.get(
                inner, "reading"
            )
        case "observations":
            return {"unit": "unit", "params": "setting of a figure", "samples": "samples of a figure"}.get(
                inner, "figure"
            )
        case "launches" if inner == "timeline":
            return "timeline"
        case "launches" if "ranks" in rest:
            return "rank"
        case "launches" if "members" in rest:
            return "participant"
    if rest[-1:] in (["began"], ["at"]) or first in ("began", "ended"):
        return "time"
    return {"snapshots": "snapshot", "launches": "launch", "soak": "soak"}.get(first, "identity of the record")


@dataclass(frozen=True, kw_only=True)
class Alteration:
    """One change of one record of a run."""

    record: str
    """Path of the record, relative to the run directory."""
    operation: str
    kind: str
    place: Place
    other: tuple[str, Place] | None = None
    """The element to swap with: the path of its record, and its place there."""
    seed: int = 0

    def __str__(self) -> str:
        other = f" with {self.other[0]} {_text(self.other[1])}" if self.other else ""
        return f"{self.operation} {self.record} {_text(self.place)}{other} ({self.kind}, seed {self.seed})"

    def apply(self, documents: Mapping[str, Json]) -> dict[str, Json]:
        """Return the changed records. Their unchanged parts are the same objects as before."""
        document, rng = documents[self.record], random.Random(self.seed)  # noqa: S311 - alterations are repeatable
        value = _at(document, self.place)
        if self.other:
            record, place = self.other
            changed = {self.record: _set(document, self.place, _at(documents[record], place))}
            changed[record] = _set(changed.get(record, documents[record]), place, value)
            return changed
        if self.operation == REMOVE:
            return {self.record: _set(document, self.place, _REMOVED)}
        if self.operation == DUPLICATE:
            return {self.record: _duplicated(document, self.place)}
        return {self.record: _set(document, self.place, _OPERATIONS[self.operation](value, rng))}

    def reason_allowed(self, documents: Mapping[str, Json], expected: AbstractSet[str], *, is_rehearsal: bool) -> str:
        """Return why the altered run may be accepted; empty if it must not be.

        `expected`: names of the figures that the plan requires of the host.
        """
        if reason := _allowed(f"{self.operation} {self.kind}", is_rehearsal):
            return reason
        if self.kind.startswith("observations/"):
            figure = _at(documents[self.record], self.place[:2])
            if figure["status"] != MEASURED or figure["name"] not in expected:
                return "the plan does not require this figure of the host"
            name, settings = figure["name"], figure.get("params", {})
            is_value = self.place[2:] == ("value",)
        else:
            name, settings = re.sub(".*/metrics/([^/]+).*", r"\1", self.kind), {}
            is_value = "/values/" in self.kind or (self.operation == SWAP and "/metrics/" in self.kind)
            if "/values/" in self.kind:
                settings = Scope.parse(str(self.place[-1])).labels
        if not is_value or self.operation not in (NEGATE, SCALE, SWAP):
            return ""
        if name.startswith(COLLECTOR):
            return "how long a collector took is not judged"
        if len({Path(record).name for record in documents}) < MIN_HOSTS_TO_COMPARE and _is_only_compared(name):
            return "is only compared with other hosts, and this run has too few"
        return reason_of(name, settings)


@cache
def _is_only_compared(name: str) -> bool:
    """Return whether every criterion of a reading or figure compares it with other hosts or an earlier run.

    True also for the identity of the switch of a port, which the judge compares without a criterion. False for any other reading
    or figure without a criterion.
    """
    if name.endswith(".switch_id"):
        return True
    criteria = [item for pack in read_packs([]) if pack.gpu_names for item in pack.criteria if item.matches_name(name)]
    return bool(criteria) and all(item.same_as_fleet or item.vs_fleet or item.baseline for item in criteria)


@cache
def _allowed(what: str, is_rehearsal: bool) -> str:
    allowed = {**ALLOWED, **ALLOWED_IN_REHEARSALS} if is_rehearsal else ALLOWED
    return next((reason for pattern, reason in allowed.items() if re.fullmatch(pattern, what)), "")


def _text(place: Place) -> str:
    return "/".join(map(str, place))


def _at(document: Json, place: Place) -> Json:
    for key in place:
        document = document[key]
    return document


_REMOVED = object()


def _set(document: Json, place: Place, value: Json) -> Json:
    """Return the document with `value` at `place`; only the containers on the path to `place` are copied."""
    key, *rest = place
    copied = document.copy()
    if rest:
        copied[key] = _set(document[key], tuple(rest), value)
    elif value is _REMOVED:
        del copied[key]
    else:
        copied[key] = value
    return copied


def _duplicated(document: Json, place: Place) -> Json:
    *above, key = place
    container = _at(document, tuple(above)).copy()
    if isinstance(container, list):
        container.insert(int(key), container[int(key)])
    else:
        container[_other_key(str(key), container)] = container[key]
    return _set(document, tuple(above), container)


def _other_key(key: str, keys: Mapping[str, Json]) -> str:
    """Return a key like `key` that is not in `keys`, such as `gpu=2` if `keys` has `gpu=0` and `gpu=1`."""
    head = key.rpartition("=")[0]
    if head:
        number = next(number for number in itertools.count() if f"{head}={number}" not in keys)
        return f"{head}={number}"
    return "gpu=0" if key == "host" else str(len(keys)) if key.isdecimal() else f"{key}_2"


def _negated(value: Json, rng: random.Random) -> Json:
    return not value if isinstance(value, bool) else -value if value else -1


def _scaled(value: Json, rng: random.Random) -> Json:
    return value * FACTOR if rng.random() < 0.5 else value / FACTOR


def _other_unit(value: Json, rng: random.Random) -> Json:
    return rng.choice([unit for unit in UNITS if unit != value])


def _shifted(value: Json, rng: random.Random) -> Json:
    moment = datetime.fromtimestamp(epoch_seconds(value), UTC) + rng.choice((DAY, -DAY))
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


_OPERATIONS: Mapping[str, Callable[[Json, random.Random], Json]] = {
    NEGATE: _negated,
    SCALE: _scaled,
    UNIT: _other_unit,
    SHIFT: _shifted,
}


def operations(element: Element) -> Iterator[str]:
    """Yield the operations that are possible on an element."""
    yield from (REMOVE, SWAP)
    if element.is_entry:
        yield DUPLICATE
    if isinstance(element.value, int | float):
        yield NEGATE
        if element.value and not isinstance(element.value, bool):
            yield SCALE
    if element.place[-1] == "unit":
        yield UNIT
    if element.is_time:
        yield SHIFT


class AcceptedRun:
    """An accepted run whose records are altered."""

    def __init__(self, directory: Path) -> None:
        """Read the run.

        Raises:
            ValueError: the run is not accepted.
        """
        self._directory = directory
        self._run = load(directory)
        self._plan, self._packs = self._run.plan, read_packs([])
        self._bmcs = bmc_record_names(self._plan)
        names = {name: host for name, (host, _) in record_names(self._plan).items()} | self._bmcs
        self._hosts = {name: host for name, host in names.items() if (directory / name).exists()}
        self._bytes = {name: (directory / name).read_bytes() for name in self._hosts}
        self.documents = {name: json.loads(text) for name, text in self._bytes.items()}
        self._reader = PartReader(self.documents.values())
        self._units = {name: unit for unit in units(self._plan) for name in unit}
        self._judges: dict[str, _HostJudge] = {}
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        decision = self._decision(self._run)
        if decision != ACCEPTED:
            raise ValueError(f"{directory}: the run is {decision}; only accepted runs can be altered")

    def alterations(self, count: int, seed: int, kind_prefix: str = "") -> Iterator[Alteration]:
        """Yield `count` alterations of randomly chosen elements.

        First, every possible operation is applied once at each place in the schema (`_place_in_schema`). Then every possible
        operation is applied to each kind of element, again and again, until there are `count` alterations.

        `kind_prefix`: only elements whose kind begins with this are altered.
        """
        rng = random.Random(seed)  # noqa: S311 - alterations are repeatable
        kinds: dict[str, list[tuple[str, Element]]] = defaultdict(list)
        for record, document in self.documents.items():
            for element in elements(document, part("record")):
                if element.kind.startswith(kind_prefix):
                    kinds[element.kind].append((record, element))
        choices = [(operation, kind) for kind, found in kinds.items() for operation in operations(found[0][1])]
        rng.shuffle(choices)
        first = {(operation, _place_in_schema(kind)): (operation, kind) for operation, kind in choices}
        count_done = 0
        for operation, kind in itertools.chain(first.values(), itertools.cycle(choices)):
            if count_done == count:
                return
            record, element = rng.choice(kinds[kind])
            other = None
            if operation == SWAP:
                another = [each for each in rng.choices(kinds[kind], k=20) if each[1].value != element.value]
                if not another:
                    continue
                other = another[0][0], another[0][1].place
            count_done += 1
            yield Alteration(
                record=record,
                operation=operation,
                kind=kind,
                place=element.place,
                other=other,
                seed=rng.getrandbits(32),
            )

    def outcome(self, alteration: Alteration) -> str:
        """Return the outcome of an alteration: `invalid`, `rejected`, `incomplete`, `accepted`, `allowed` or `without effect`.

        An accepted run has the outcome `allowed` if the change is allowed, `without effect` if it does not alter the content, and
        otherwise `accepted`.
        """
        changed = alteration.apply(self.documents)
        decision = self.quick_decision(changed, whole=alteration.seed % JUDGED_WHOLE == 0)
        if decision != ACCEPTED and alteration.seed % CHECKED_FROM_FILES == 0:
            decision = ACCEPTED if self.decision_from_files(changed) == ACCEPTED else decision
        if decision == ACCEPTED:
            host = self._plan.host(self._hosts[alteration.record])
            expected = {item.name for item in self._plan.expected_of(host)} | _port_figures(self._plan)
            if alteration.reason_allowed(self.documents, expected, is_rehearsal=self._plan.rehearsal):
                return ALLOWED_CHANGE
            if all(_content(changed[name]) == _content(self.documents[name]) for name in changed):
                return WITHOUT_EFFECT
            decision = self.decision_from_files(changed)
        return decision.lower()

    def decision_from_files(self, changed: Mapping[str, Json]) -> str:
        """Return the decision of `rackproof report` on the run in which the changed records replace the original ones."""
        if self._copy is None:
            self._copy = tempfile.TemporaryDirectory(dir=MEMORY)
            shutil.copytree(self._directory, self._copy.name, dirs_exist_ok=True)
        copy = Path(self._copy.name)
        for name, document in changed.items():
            (copy / name).write_bytes(msgspec.json.encode(document))
        try:
            return self._decision(load(copy))
        finally:
            for name in changed:
                (copy / name).write_bytes(self._bytes[name])

    def _decision(self, run: Run) -> str:
        return merge(run.plan, run.evidence, self._packs, events=run.events, quarantined=run.quarantined).decision

    def quick_decision(self, changed: Mapping[str, Json], *, whole: bool = True) -> str:
        """Return the decision on the host of the last changed record and the hosts that launch with it.

        The result is `invalid` if a changed record breaks a rule for records, or belongs to another run, host or gang (hosts of
        one multi-node launch). If `whole` is false and the evidence of the host contradicts itself, the result is `incomplete`.
        """
        evidence = dict(self._run.evidence)
        host = ""
        for name, document in changed.items():
            record, host = self._reader.record(document), self._hosts[name]
            run = (self._plan.run_id, self._plan.nonce)
            if record is None or record.host != host or (record.run_id, record.nonce) != run:
                return INVALID
            before = evidence[host]
            if name in self._bmcs:
                evidence[host] = replace(before, bmc=record)
                continue
            if record.gang not in {each.gang for each in before.records}:
                return INVALID
            records = tuple(record if each.gang == record.gang else each for each in before.records)
            evidence[host] = replace(before, records=records)
        if host not in self._judges:
            self._judges[host] = _HostJudge(self._run, self._packs, self._units[host], host)
        return self._judges[host].decision(evidence, whole=whole)


def _port_figures(plan: Plan) -> set[str]:
    """Return the names of the figures that each RDMA port must have. The plan lists neither the ports nor these figures."""
    benchmarks = {name for stage in plan.stages for name in stage.benchmarks}
    return {output.name for name in benchmarks for output in BENCHMARKS[name].outputs if output.scope == "port"}


def _place_in_schema(kind: str) -> str:
    """Return a kind of element, with `*` in place of the names of readings, figures and other keys."""
    return re.sub(r"(metrics|observations|values|absent|params|software)/[^/]+", r"\1/*", kind)


def _content(document: Json) -> Json:
    """Return a document reduced to what has an effect: empty mappings are removed, and lists of objects are sorted.

    The ends of logs are removed too. They explain a failure, and no launch of an accepted run failed.
    """
    if isinstance(document, dict):
        content = {key: _content(value) for key, value in document.items() if value != {} and key != "log_tail"}
        return {key: content[key] for key in sorted(content)}
    if isinstance(document, list):
        items = [_content(item) for item in document]
        return sorted(items, key=repr) if items and isinstance(items[0], dict) else items
    return document


class _HostJudge:
    """Judges the host of an altered record and the hosts that launch with it.

    The statistics of all hosts but the host of the altered record are computed only once.
    """

    def __init__(self, run: Run, packs: Sequence[Pack], unit: tuple[str, ...], host: str) -> None:
        self._plan, self._packs, self._host = run.plan.only(unit), packs, host
        others = [view for view in host_views(run.plan, run.evidence, packs) if view.host.name != host]
        self._stats = stats = gather(Planned(run.plan), others)
        positions = {each.name: position for position, each in enumerate(run.plan.hosts)}
        tally = Tally(Planned(run.plan), positions)
        self._passes = PassCounter(
            stats, tally, positions, lambda view, criterion: by_criterion(view, criterion, stats)
        )

    def decision(self, evidence: Mapping[str, Evidence], *, whole: bool) -> str:
        """Return the decision.

        If `whole` is false and the evidence of the host contradicts itself, the decision is INCOMPLETE; no criterion is applied.
        """
        views = host_views(self._plan, evidence, self._packs)
        if not whole and any(True for view in views if view.host.name == self._host for _ in contradictions(view)):
            return INCOMPLETE
        remaining = {view.host.name: self._passes.count(view) for view in views}
        verdicts = judge_hosts(self._plan, views, self._stats, remaining)
        return decide(verdicts) if any(verdict.blocks_acceptance for verdict in verdicts) else ACCEPTED


class PartReader:
    """Reads altered records of an accepted run. Unaltered parts are decoded only once, not once for each altered record.

    Equal metrics are one object, as in the records that `rackproof report` reads.
    """

    def __init__(self, documents: Iterable[Json]) -> None:
        self._metrics: dict[int, Metric] = {}
        self._observations: dict[int, Observation] = {}
        self._lists: dict[int, tuple[Metric, ...]] = {}
        """`id` of a snapshot's list of metrics in JSON -> the decoded metrics; only lists whose metrics are all valid."""
        equal: dict[str, Metric | None] = {}
        for document in documents:
            for snapshot in document.get("snapshots", ()):
                for metric in snapshot["metrics"]:
                    text = json.dumps(metric)
                    if text not in equal:
                        equal[text] = _metric(metric)
                    if read := equal[text]:
                        self._metrics[id(metric)] = read
                if all(id(metric) in self._metrics for metric in snapshot["metrics"]):
                    self._lists[id(snapshot["metrics"])] = tuple(
                        self._metrics[id(metric)] for metric in snapshot["metrics"]
                    )
            for item in document.get("observations", ()):
                self._observations[id(item)] = observation_from_json(item)

    def record(self, document: Json) -> Record | None:
        """Return the record, or None if it is invalid."""
        outer, observations = dict(document), []
        if "observations" in document:
            outer["observations"] = []
            for item in document["observations"]:
                observation = self._observations.get(id(item)) or _observation(item)
                if observation is None:
                    return None
                observations.append(observation)
        taken = document.get("snapshots", ())
        if taken:
            outer["snapshots"] = [{**each, "metrics": []} if "metrics" in each else each for each in taken]
        if not compiled("record").is_valid(outer):
            return None
        snapshots = []
        for each, without in zip(taken, outer.get("snapshots", ()), strict=True):
            metrics = self._lists.get(id(each["metrics"]))
            if metrics is None:
                read = [self._metrics.get(id(metric)) or _metric(metric) for metric in each["metrics"]]
                metrics = tuple(metric for metric in read if metric)
                if len(metrics) < len(read):
                    return None
            snapshots.append((without, metrics))
        record = replace(record_from_parts(outer, snapshots, ()), observations=tuple(observations))  # type: ignore[arg-type]
        return None if record_problem(record) else record


_TOKENS = itertools.count(1 << 40)
"""Tokens for the metrics that PartReader reads (`Metric.token`). The judge recognizes equal metrics by their tokens, and is slow
without them. The numbers begin high, so they differ from the tokens that `quick.Reader` assigns in the unaltered run."""


def _metric(document: Json) -> Metric | None:
    if not compiled("record#/$defs/snapshot/properties/metrics/items").is_valid(document):
        return None
    metric = Metric(**document)
    vars(metric)["token"] = next(_TOKENS)
    return None if metric_problem(metric) else metric


def _observation(document: Json) -> Observation | None:
    return observation_from_json(document) if compiled("observation").is_valid(document) else None


def simulated_run(name: str, directory: Path) -> Path:
    """Write the run `name` of SIMULATED to a new folder in `directory`, and return this folder."""
    run = directory / name.replace(" ", "-")
    with contextlib.redirect_stdout(io.StringIO()):
        code = accepted.call("simulate", *SIMULATED[name], run)
    if code:
        raise RuntimeError(f"rackproof simulate failed with exit code {code}")
    return run


@cache
def _accepted_run(directory: Path) -> AcceptedRun:
    return AcceptedRun(directory)


Counts = Counter[tuple[str, str, str]]
"""(Part of the evidence, operation, outcome) -> number of alterations."""


def alter(directory: Path, count: int, seed: int, kind_prefix: str = "") -> tuple[Counts, list[str]]:
    """Make `count` alterations of a run. Return the counts, and a text for each failure.

    A failure is an altered run that is accepted although the change is not allowed, or on which the judge crashes.
    """
    run, counts, failures = _accepted_run(directory), Counts(), []
    for alteration in run.alterations(count, seed, kind_prefix):
        try:
            outcome = run.outcome(alteration)
        except Exception:  # noqa: BLE001 - any exception is a failure of the reader or the judge
            outcome = "crashed"
            failures.append(f"{directory.name}: crashed: {alteration}\n{traceback.format_exc()}")
        if outcome == "accepted":
            failures.append(f"{directory.name}: accepted: {alteration}")
        counts[part_of_record(alteration.kind), alteration.operation, outcome] += 1
    return counts, failures


def shares(names: Sequence[str], count: int) -> dict[str, int]:
    """Return run -> number of its alterations: `count` is divided among the runs by their weights."""
    weights = {name: WEIGHTS.get(name, 1) for name in names}
    return {name: round(count * weight / sum(weights.values())) for name, weight in weights.items()}


def table(counts: Counts) -> str:
    """Return a table: for each part of the evidence, the number of alterations by operation and by outcome."""
    parts = sorted({which for which, _, _ in counts})
    operations = (REMOVE, DUPLICATE, SWAP, NEGATE, SCALE, UNIT, SHIFT)
    outcomes = sorted({outcome for *_, outcome in counts} | set(FAILURES))
    rows = [["", *operations, *outcomes]]
    for which in [*parts, "all"]:
        own = [(operation, outcome, n) for (part, operation, outcome), n in counts.items() if which in (part, "all")]
        sums = [sum(n for operation, _, n in own if operation == name) for name in operations]
        rows.append([which, *map(str, sums), *(str(sum(n for _, o, n in own if o == name)) for name in outcomes)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main() -> int:
    """Print the counts. Return 1 if an altered run was accepted although the change is not allowed, or if the judge crashed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, help="directories of further accepted runs to alter")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counts, failures = Counts(), []
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory, ProcessPoolExecutor(options.jobs) as pool:
        directories = {name: simulated_run(name, Path(directory)) for name in SIMULATED}
        directories |= {name: ROOT / "docs" / "measurements" / name for name in MEASURED_RUNS}
        directories |= {str(run): run for run in options.runs}
        tasks = [
            pool.submit(alter, directories[name], min(PART, share - at), options.seed + at)
            for name, share in shares([*directories], options.count).items()
            for at in range(0, share, PART)
        ]
        for done, task in enumerate(as_completed(tasks), 1):
            more, result = task.result()
            counts += more
            failures += result
            print(*result, sep="\n", end="\n" if result else "", flush=True)
            if done % max(1, len(tasks) // 20) == 0:
                print(f"… {counts.total()} alterations, {len(failures)} failures", flush=True)
    print(table(counts))
    print(f"{counts.total()} alterations, seed {options.seed}: {len(failures)} wrongly accepted or crashed")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
