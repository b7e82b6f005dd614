"""Criteria packs: YAML -> Criterion. A criterion is data; nothing in it is evaluated."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from fleet.yaml_files import read_yaml
from schemas import documents
from schemas.errors import UsageError
from schemas.records import Value
from schemas.reports import SEVERITY

PACKS = Path(__file__).parent / "packs"


@dataclass(frozen=True, kw_only=True)
class VsBaseline:
    """How far a figure may lie from what the same part showed when it was accepted."""

    fraction: float = 1.0
    """Fraction of the accepted value."""
    sigmas: float = 4.0
    """The limit is never within so many standard deviations of the figure's own noise, where that is known."""
    change: float | None = None
    """In place of the fraction, for counts: by how much it may differ, in its unit."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """What an observation must show, what to do when it does not, and where the number comes from.

    Exactly one of `value`, `expected`, `variable`, `baseline`, `same_as_fleet`, and either or both of `fleet_fraction` and
    `fleet_deviations`, is set:
        value: the limit itself.
        expected, fraction: the limit is that fraction of what the part is expected to do.
        variable, fraction: the limit is (that fraction of) what the inventory states.
        fleet_fraction: the limit is that fraction of the median of the same observation (name, params, kind of scope)
            over the fleet's GPUs, or hosts, of the same GPU model.
        fleet_deviations: the limit lies so many robust standard deviations (from the median absolute deviation) from that
            median; with a fraction too, the limit is the farther of the two.
        baseline: the limit comes from the accepted record of the same part; it judges nothing if the run has no baseline.
        same_as_fleet: True: the value must be the one that most of the group's GPUs, or hosts, show (`uniform`); False: it
            may be any, which switches off a shipped criterion of the same id.
    """

    id: str
    name: str
    operator: str
    unit: str
    action: str
    source: str
    stage: str = ""
    scope: str = ""
    where: Mapping[str, Value] = field(default_factory=dict)
    value: Value = None
    expected: float | None = None
    fraction: float = 1.0
    variable: str = ""
    fleet_fraction: float | None = None
    fleet_deviations: float | None = None
    by_position: bool = False
    """Compare with the fleet's parts in the same place of their host (gpu=3 with gpu=3), where there are enough of them."""
    baseline: VsBaseline | None = None
    same_as_fleet: bool | None = None
    delta: bool = False
    optional: bool = False
    best_of_run: bool = False
    basis: str = "policy"
    note: str = ""
    severity: str = ""
    """`critical`: unfit for use. `warning`: to be inspected. Default: by the action."""
    origin: str = ""
    """The pack whose file defines it; a pack that includes that file has it too."""

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", SEVERITY[self.action])

    @property
    def vs_fleet(self) -> bool:
        """Whether it compares numbers with those of the fleet."""
        return self.fleet_fraction is not None or self.fleet_deviations is not None

    def matches_name(self, name: str) -> bool:
        """Whether it judges observations of that name: a `*` in its own name stands for any one component."""
        return name == self.name if "*" not in self.name else _matches(self.name, name)


@lru_cache(maxsize=65536)
def _matches(pattern: str, name: str) -> bool:
    own, other = pattern.split("."), name.split(".")
    return len(own) == len(other) and all(map(fnmatch.fnmatchcase, other, own))


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A named set of criteria, and the GPUs it is for."""

    name: str
    gpu_names: tuple[str, ...]
    criteria: tuple[Criterion, ...]
    chosen: bool = False
    """The operator named it, so it applies to every host; a criterion of it replaces a shipped one of the same id."""
    datasheet: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the part's maker promises, in SI units: flops, memory_bandwidth, memory_size, pcie, nvlink, power; each with a source.
    The lint holds the criteria against it; nothing is judged by it."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Observation name -> why the pack has no figure for it."""
    lacks: Mapping[str, Mapping[str, tuple[Value, ...]]] = field(default_factory=dict)
    """Observation -> parameter -> values that the part does not have: `unsupported` is then no gap."""


def shipped_packs() -> list[str]:
    """Names of the packs that come with Rackproof."""
    return sorted(path.stem for path in PACKS.glob("*.yml"))


def read_pack(name: str) -> Pack:
    """A shipped pack by its name, or the pack in the YAML file of that path, with what it includes.

    Raises:
        UsageError: no such pack (the nearest is named), or a pack that is not what criteria.schema.json says.
    """
    if name.endswith((".yml", ".yaml")):
        return _read(Path(name))
    if name not in shipped_packs():
        raise UsageError(
            f"unknown criteria pack {name}{documents.nearest(name, shipped_packs())}: choose one of "
            f"{', '.join(shipped_packs())}, or give the path of a .yml file"
        )
    return _shipped(name)


@cache
def _shipped(name: str) -> Pack:
    """Read once: every model's pack includes the same others."""
    return _read(PACKS / f"{name}.yml")


def _read(path: Path) -> Pack:
    document = read_yaml(path, "criteria")
    # Of two included packs the later one has the last word on an id that both use.
    included = [criterion for name in document.get("include", ()) for criterion in read_pack(name).criteria]
    criteria = list({criterion.id: criterion for criterion in included}.values())
    criteria += [_criterion(item, path.stem) for item in document["criteria"]]
    ids = [criterion.id for criterion in criteria]
    for criterion_id in ids:
        if ids.count(criterion_id) > 1:
            raise UsageError(f"{path}: the criterion {criterion_id} stands twice")
    return Pack(
        name=path.stem,
        gpu_names=tuple(document.get("gpu_names", ())),
        criteria=tuple(criteria),
        datasheet=document.get("datasheet", {}),
        unknown=document.get("unknown", {}),
        lacks=document.get("lacks", {}),
    )


def read_packs(names: Iterable[str]) -> tuple[Pack, ...]:
    """Every shipped pack, and the ones that the operator named. Raises UsageError as `read_pack`."""
    return (*map(read_pack, shipped_packs()), *(replace(read_pack(name), chosen=True) for name in names))


def _criterion(item: Mapping[str, Any], origin: str) -> Criterion:
    result = {key: value for key, value in item.items() if not key.startswith("vs_")} | {"origin": origin}
    if sku := item.get("vs_sku"):
        result |= {"expected": sku["expected"], "fraction": sku["fraction"]}
    if inventory := item.get("vs_inventory"):
        result |= {"variable": inventory["variable"], "fraction": inventory.get("fraction", 1.0)}
    if fleet := item.get("vs_fleet"):
        result |= {"fleet_fraction": fleet.get("fraction"), "fleet_deviations": fleet.get("deviations")}
        result |= {"by_position": fleet.get("by") == "position"}
    if baseline := item.get("vs_baseline"):
        result |= {"baseline": VsBaseline(**baseline)}
    return Criterion(**result)
