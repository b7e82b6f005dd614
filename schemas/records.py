"""Records of hosts as frozen dataclasses. A record has facts and measurements, but no judgement.

Scopes are strings (`schemas.scopes`). Units are SI units; counts have unit `1`, ratios `1` or `ratio`. `schemas.decode` reads
records.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, ClassVar, TypeGuard, TypeVar

from schemas.scopes import Scope
from schemas.timeline import Soak
from schemas.trace import Trace

RECORD_SCHEMA = "rackproof.record/2"

MEASURED, ERROR, SKIPPED, UNSUPPORTED = "measured", "error", "skipped", "unsupported"

GPU_LABELS = ("gpu", "peer")
"""Labels of a scope. The value of each of them is the index of a GPU."""

UNABLE, RAISED, CUT_OFF = "rank_unable", "rank_raised", "cut_off"
"""Kinds of culprits that do not prove that the host is faulty."""

Value = float | int | str | bool | None


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number. A boolean is not a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The repetitions behind a value: count, extremes, median and coefficient of variation."""

    n: int
    min: float
    p50: float
    max: float
    cv: float
    precision: float | None = None
    """Half the 95 % confidence interval of the median, divided by the median. None for fewer than six repetitions, or if a
    value is not positive."""
    stopped: str = ""
    """Why the repetitions stopped: `precision` reached, or `time` spent; empty if their number was fixed."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured value, or the reason why it could not be measured."""

    name: str
    scope: str
    stage: str
    unit: str
    status: str
    value: Value = None
    reason: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    samples: Samples | None = None
    token: ClassVar[int] = 0
    """Number that a `quick.Reader` assigns. Observations with equal numbers have equal name, stage, unit, status and parameters.
    0: not assigned."""

    def __post_init__(self) -> None:
        if (self.status == MEASURED) != (self.value is not None):
            raise ValueError(f"{self.name}: status {self.status} with value {self.value!r}")
        if self.status != MEASURED and not self.reason:
            raise ValueError(f"{self.name}: status {self.status} without a reason")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The readings of one name in one snapshot. Each scope has a value or the reason why there is none."""

    name: str
    unit: str
    values: Mapping[str, Value] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    """Scope -> `status: reason`."""
    token: ClassVar[int] = 0
    """Number that a `quick.Reader` assigns. Metrics with equal numbers are equal. 0: not assigned."""
    is_sound: ClassVar[bool] = False
    """Whether the judge has checked this metric alone, without others, and found no problem. Equal metrics of many hosts are one
    object, so the judge checks them once."""

    @cached_property
    def form(self) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Return the scopes that have a value, and those that have none, with the reasons."""
        return tuple(self.values), tuple(self.absent.items())

    @cached_property
    def least(self) -> float:
        """Return the lowest number of the metric; infinity if no value is a number."""
        return min(self._numbers, default=math.inf)

    @cached_property
    def greatest(self) -> float:
        """Return the highest number of the metric; minus infinity if no value is a number."""
        return max(self._numbers, default=-math.inf)

    @cached_property
    def shapes(self) -> frozenset[tuple[str, ...]]:
        """Return the labels of the scopes of its values: `("gpu", "link")` for `gpu=0,link=3`, and `()` for `host`."""
        return frozenset(tuple(Scope.parse(scope).labels) for scope in self.values)

    @cached_property
    def is_whole(self) -> bool:
        """Whether all numbers of the metric are whole."""
        return all(type(value) is int or value.is_integer() for value in self._numbers)

    @cached_property
    def values_per_device(self) -> Mapping[str, int]:
        """Return the number of values of each device: `gpu=0` -> 18 for `gpu=0,link=0` to `gpu=0,link=17`."""
        return Counter(Scope.parse(scope).device for scope in self.values)

    @cached_property
    def absent_shapes(self) -> frozenset[tuple[str, ...]]:
        """Return the labels of the scopes that have no value, in the form of `shapes`."""
        return frozenset(tuple(Scope.parse(scope).labels) for scope in self.absent)

    @cached_property
    def gpus(self) -> frozenset[str]:
        """Return the indices of the GPUs in the scopes of the metric, with or without a value."""
        scopes = map(Scope.parse, (*self.values, *self.absent))
        labels = [scope.labels for scope in scopes if scope.device_kind == "gpu"]
        return frozenset(each[label] for each in labels for label in GPU_LABELS if label in each)

    @property
    def _numbers(self) -> list[float]:
        return [value for value in self.values.values() if type(value) in (int, float)]  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The readings of the collectors at one moment. `phase` is `before`, `during` or `after` the stage."""

    stage: str
    phase: str
    at: str
    duration_s: float
    metrics: tuple[Metric, ...]

    def observations(self) -> list[Observation]:
        """Return the snapshot as observations, with the phase among their parameters."""
        return [item for metric in self.metrics for item in self.observations_of(metric)]

    def observations_of(self, metric: Metric) -> list[Observation]:
        """Return one metric of the snapshot as observations."""
        common: dict[str, Any] = {
            "name": metric.name,
            "unit": metric.unit,
            "stage": self.stage,
            "params": {"phase": self.phase},
            "samples": None,
        }
        result = [
            instance_of(Observation, {**common, "scope": scope, "status": MEASURED, "value": value, "reason": ""})
            for scope, value in metric.values.items()
        ]
        for scope, why in metric.absent.items():
            status, _, reason = why.partition(": ")
            result.append(Observation(scope=scope, status=status, reason=reason, **common))
        return result


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Identity of a GPU. The serial identifies the part; the index is only its position in NVML's list."""

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
    """The last phase that the rank reported."""
    exit_code: int | None
    """Exit code, negative for a signal; None if unknown, or if the launcher ended the process."""
    log_tail: str


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """Why a launch of a gang was ended, and which hosts caused it. `text` is the same in the record of each host."""

    kind: str
    """What happened:

    - `rank_silent`, `rank_ended`, `rank_absent`: a rank became silent, ended, or did not start.
    - `rank_behind`: a rank failed first, or the other ranks wait for it.
    - `host_silent`, `host_absent`: a host became silent, or did not join the launch.
    - `cut_off`: a host reports that it no longer receives any statuses. All hosts send their statuses to the watchers (the first
      two hosts of the gang), and the watchers answer. A watcher names itself in `hosts`, because its own link is the likely
      cause. Any other host names the watchers.
    - `rank_unable`: a host reports that one of its ranks has no working device.
    - `rank_raised`: ranks ended with an exception that a device cannot cause, for example because a network interface does not
      exist. Or they could create no thread, or ended by SIGABRT before the ranks had exchanged data.
    """
    hosts: tuple[str, ...]
    """Several hosts if they have the same problem, if two hosts lost contact with each other, or if a host names the watchers."""
    text: str
    scope: str = ""
    """The device of the rank: `gpu=3`. Empty if the launcher of the rank exited, because a device cannot cause that."""
    rank: int | None = None
    phase: str = ""
    """The phase in which the rank was."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of ranks on this host, under a supervisor."""

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
    """The host or rank that stopped the others, if the supervisors identified one."""
    number: int = 0
    """Number of the gang launch, the soak round, or the cell (one measurement) of a scaling study; 0: none."""
    observations: tuple[Observation, ...] = ()
    """Observations of a probe, of a cell, or of a launch that a later launch of the stage replaced. Those of any other launch are
    in `Record.observations`."""
    timeline: Trace | None = None
    """Telemetry of the GPUs. None on CPUs, for a probe or a cell, and for a round of a soak: the soak has its own timeline."""
    other_processes: Mapping[str, str] = field(default_factory=dict)
    """Scope of a GPU -> a process, not part of the launch, that used the GPU meanwhile, such as `process 4711 (python3)`."""

    @property
    def succeeded(self) -> bool:
        """Whether the launch finished and its results are valid."""
        return self.outcome == "finished" and not self.reason


@dataclass(frozen=True, kw_only=True)
class Record:
    """All data of one host from one run or, if `gang` is set, from the launches of the host in that gang."""

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
    """Progress of the host's soak. With a soak, `observations` aggregate all rounds, and only a few launches are kept."""
    simulated: bool = False
    """Whether `rackproof simulate` generated the record, which is then valid only in a simulated run."""
    schema: str = RECORD_SCHEMA

    @cached_property
    def distinct_metrics(self) -> list[Metric]:
        """Return the metrics of all snapshots, each object once. A `quick.Reader` returns equal metrics as one object."""
        return list({id(metric): metric for snapshot in self.snapshots for metric in snapshot.metrics}.values())

    @cached_property
    def by_stage(self) -> Mapping[str, list[Observation]]:
        """Return stage -> the observations of its benchmarks."""
        stages: dict[str, list[Observation]] = {}
        for item in self.observations:
            stages.setdefault(item.stage, []).append(item)
        return stages

    def all_observations(self) -> list[Observation]:
        """Return the observations of snapshots and benchmarks as one list."""
        return [item for snapshot in self.snapshots for item in snapshot.observations()] + list(self.observations)


def to_json(record: Any) -> dict[str, Any]:
    """Return a dataclass of this package as JSON. Fields that have their default are omitted, except `schema`."""
    result = {}
    for name, default in _fields(type(record)):  # type: ignore[arg-type]
        value = getattr(record, name)
        if name == "schema" or value != default:
            result[name] = value if type(value) in _PLAIN else _json(value)
    return result


_PLAIN = frozenset({str, int, float, bool, type(None)})


@cache
def _fields(kind: type[Any]) -> list[tuple[str, Any]]:
    """Return the fields and their defaults."""
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


def instance_of(kind: type[_Made], fields: dict[str, Any]) -> _Made:
    """Return a frozen dataclass with these fields. `fields` must have all of them, and becomes the dictionary of the instance.

    This is ten times as fast as the constructor; a fleet may need 100 million instances.
    """
    instance = _new(kind)
    _set(instance, "__dict__", fields)
    return instance


_new, _set = object.__new__, object.__setattr__
