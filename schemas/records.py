"""What a host says: frozen dataclasses <-> JSON. A record holds facts and measurements, and no judgement.

Scopes are strings: `host`; `gpu=0` and `gpu=0,link=3` (NVML index; `Record.gpus` maps it to serial and UUID); `cpu=0`
(a rehearsal's process); `gang=rack12`. Units are SI base units; a ratio or a count has unit `1`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from schemas.timeline import Soak
from schemas.trace import Trace

RECORD_SCHEMA = "rackproof.record/1"

MEASURED, ERROR, SKIPPED, UNSUPPORTED = "measured", "error", "skipped", "unsupported"

Value = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Samples:
    """How a value came about: count, extremes, median and coefficient of variation of its repetitions."""

    n: int
    min: float
    p50: float
    max: float
    cv: float
    precision: float | None = None
    """Half the 95 % interval of the median over the median; None for fewer than six repetitions, which give none."""
    stopped: str = ""
    """Why no more were taken: `precision` reached, or the `time` for it spent; empty where their number was given."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One thing seen, or one thing that could not be seen and why."""

    name: str
    scope: str
    stage: str
    unit: str
    status: str
    value: Value = None
    reason: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    samples: Samples | None = None

    def __post_init__(self) -> None:
        if (self.status == MEASURED) != (self.value is not None):
            raise ValueError(f"{self.name}: status {self.status} with value {self.value!r}")
        if self.status != MEASURED and not self.reason:
            raise ValueError(f"{self.name}: status {self.status} without a reason")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One collector family in one snapshot: a value a scope, or why there is none."""

    name: str
    unit: str
    values: Mapping[str, Value] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    """Scope -> `status: reason`."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything the collectors read at one moment: `phase` is before, during or after its stage."""

    stage: str
    phase: str
    at: str
    duration_s: float
    metrics: tuple[Metric, ...]

    def observations(self) -> list[Observation]:
        """The snapshot as observations, with the phase among their parameters."""
        return [seen for metric in self.metrics for seen in self.told(metric)]

    def told(self, metric: Metric) -> list[Observation]:
        """One of its metrics as observations."""
        common: dict[str, Any] = {
            "name": metric.name,
            "unit": metric.unit,
            "stage": self.stage,
            "params": {"phase": self.phase},
            "samples": None,
        }
        found = [
            instance_of(Observation, common, {"scope": scope, "status": MEASURED, "value": value, "reason": ""})
            for scope, value in metric.values.items()
        ]
        for scope, why in metric.absent.items():
            status, _, reason = why.partition(": ")
            found.append(Observation(scope=scope, status=status, reason=reason, **common))
        return found


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's identity. The serial names the part; the index only its place in NVML's list."""

    index: int
    serial: str
    uuid: str
    name: str
    pci_bus_id: str


@dataclass(frozen=True, kw_only=True)
class Rank:
    """How one process of a launch ended."""

    rank: int
    local_rank: int
    phase: str
    """The last thing it said it was doing."""
    exit_code: int | None
    """As the shell gives it, negative for a signal; None where the process was gone before it could be asked."""
    log_tail: str


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Whom a gang was ended for. `text` is the same on every host that was told."""

    kind: str
    """`rank_silent`, `rank_ended`, `rank_behind`, `rank_absent`, `host_silent`, `host_absent`, `cut_off`: a host that lost
    all the others, and says so of itself; or `rank_unable`: a rank has no device that works, as its own host alone says."""
    hosts: tuple[str, ...]
    """More than one where several fell silent at once, or where two lost each other and nobody can tell which is at fault."""
    text: str
    scope: str = ""
    """The device of the rank: `gpu=3`; empty where its launcher had ended, for which no device is to blame."""
    rank: int | None = None
    phase: str = ""
    """What the rank was at."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One supervised start of ranks on this host."""

    stage: str
    outcome: str
    """`finished`, `failed` or `deadline`."""
    reason: str
    members: tuple[str, ...]
    """The hosts that started together, in rank order."""
    began: str
    duration_s: float
    deadline_s: float
    ranks: tuple[Rank, ...]
    log_tail: str
    culprit: Culprit | None = None
    """Named by the heartbeats while the ranks still waited."""
    number: int = 0
    """Which of its gang's launches this was, as the control node counts them; 0 where nobody counted."""
    observations: tuple[Observation, ...] = ()
    """What it measured, where a later launch of its stage took its place, or where it was a probe; else the record has it."""
    timeline: Trace | None = None
    """What its GPUs showed meanwhile; None on CPUs, of a round of a soak, which has one of its own, and of a probe."""

    @property
    def good(self) -> bool:
        """It came to its end, and what its ranks left can be believed."""
        return self.outcome == "finished" and not self.reason


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that one host has to say of one run, or, with `gang` set, of its part in one gang."""

    run_id: str
    nonce: str
    host: str
    began: str
    ended: str
    rackproof: str
    gang: str = ""
    gpus: tuple[Gpu, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    snapshots: tuple[Snapshot, ...] = ()
    observations: tuple[Observation, ...] = ()
    launches: tuple[Launch, ...] = ()
    soak: Soak | None = None
    """How far its soak is; of a soak's many rounds `observations` are of all, and of the launches a few are kept."""
    simulated: bool = False
    """No host said this: `rackproof simulate` did. Believed in a simulated run alone."""
    schema: str = RECORD_SCHEMA

    def everything(self) -> list[Observation]:
        """Snapshots and benchmark results as one list."""
        return [seen for snapshot in self.snapshots for seen in snapshot.observations()] + list(self.observations)


def to_json(record: Any) -> dict[str, Any]:
    """A dataclass of the contract as JSON; fields that hold their default are left out, but for `schema`."""
    found = {}
    for name, default in _fields(type(record)):  # type: ignore[arg-type]
        value = getattr(record, name)
        if name == "schema" or value != default:
            found[name] = value if type(value) in _PLAIN else _json(value)
    return found


_PLAIN = frozenset({str, int, float, bool, type(None)})


@cache
def _fields(kind: type[Any]) -> list[tuple[str, Any]]:
    """Its fields and their defaults."""
    return [
        (item.name, item.default if item.default_factory is dataclasses.MISSING else item.default_factory())
        for item in dataclasses.fields(kind)
    ]


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    if isinstance(value, tuple | list):
        return [_json(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


_Made = TypeVar("_Made")


def instance_of(kind: type[_Made], defaults: Mapping[str, Any], document: Mapping[str, Any]) -> _Made:
    """Return a frozen dataclass with these fields. Ten times as fast as its constructor: a fleet has a hundred million."""
    instance = object.__new__(kind)
    object.__setattr__(instance, "__dict__", {**defaults, **document})
    return instance
