"""Read criteria packs from YAML. A criterion is data: it contains no expressions."""

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
    """How far a figure may be from the accepted figure of the same part."""

    fraction: float = 1.0
    """Fraction of the accepted value."""
    sigmas: float = 4.0
    """The limit is at least this many standard deviations of the figure's noise away, if the noise is known."""
    change: float | None = None
    """For counts, instead of the fraction: the permitted change, in the unit of the count."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """The limit of an observation, the action if it is missed, and the source of the limit.

    Exactly one kind of limit is set; `fleet_fraction` and `fleet_deviations` may be combined:
        value: the limit itself.
        expected, fraction: the limit is this fraction of the expected performance of the part.
        variable, fraction: the limit is this fraction of an inventory variable.
        fleet_fraction: the limit is this fraction of the median of the same observation (name, params, kind of scope)
            over the fleet's GPUs, or hosts, of the same GPU model.
        fleet_deviations: the limit is this many robust standard deviations (from the median absolute deviation) from that
            median. With a fraction too, the limit that is farther from the median counts.
        baseline: the limit comes from the accepted record of the same part. A run without a baseline is not judged by it.
        same_as_fleet: True: the value must be the most common one among the group's GPUs or hosts (`uniform`).
            False: any value is good; this disables a shipped criterion of the same id.
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
    """Compare with parts in the same position of other hosts (gpu=3 with gpu=3), if there are enough of them."""
    baseline: VsBaseline | None = None
    same_as_fleet: bool | None = None
    delta: bool = False
    optional: bool = False
    best_of_run: bool = False
    basis: str = "policy"
    note: str = ""
    actions: Mapping[str, str] = field(default_factory=dict)
    """Text that fails -> its action, where it is not `action`."""
    severity: str = ""
    """`critical`: unfit for use. `warning`: inspect it. The default follows from the action."""
    origin: str = ""
    """Name of the pack whose file defines it. Packs that include this file have it too."""

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", SEVERITY[self.action])

    @property
    def vs_fleet(self) -> bool:
        """Return whether the criterion compares numbers with those of the fleet."""
        return self.fleet_fraction is not None or self.fleet_deviations is not None

    def matches_name(self, name: str) -> bool:
        """Return whether the criterion is for observations of that name. A `*` in its own name matches one component."""
        return name == self.name if "*" not in self.name else _name_matches(self.name, name)


@lru_cache(maxsize=65536)
def _name_matches(pattern: str, name: str) -> bool:
    patterns, components = pattern.split("."), name.split(".")
    return len(patterns) == len(components) and all(map(fnmatch.fnmatchcase, components, patterns))


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A named set of criteria, and the GPU models that it is for."""

    name: str
    gpu_names: tuple[str, ...]
    criteria: tuple[Criterion, ...]
    chosen: bool = False
    """Whether the operator named it. It then applies to every host, and its criteria replace shipped ones of the same id."""
    datasheet: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The vendor's figures in SI units: flops, memory_bandwidth, memory_size, pcie, nvlink, power; each with a source.

    The lint compares the criteria with them; they judge nothing."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Observation name -> why the pack has no figure for it."""
    lacks: Mapping[str, Mapping[str, tuple[Value, ...]]] = field(default_factory=dict)
    """Observation -> parameter -> values that the part does not support: the status `unsupported` is then acceptable."""


def shipped_packs() -> list[str]:
    """Return the names of the packs that come with Rackproof."""
    return sorted(path.stem for path in PACKS.glob("*.yml"))


def read_pack(name: str) -> Pack:
    """Return a shipped pack by its name, or a pack from a YAML file by its path, with the packs that it includes.

    Raises:
        UsageError: there is no such pack, or the file does not follow criteria.schema.json.
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
    """Return a shipped pack. It is cached, because many packs include it."""
    return _read(PACKS / f"{name}.yml")


def _read(path: Path) -> Pack:
    document = read_yaml(path, "criteria")
    # If two included packs define the same id, the later one wins.
    included = [criterion for name in document.get("include", ()) for criterion in read_pack(name).criteria]
    criteria = list({criterion.id: criterion for criterion in included}.values())
    criteria += [_criterion(item, path.stem) for item in document["criteria"]]
    ids = [criterion.id for criterion in criteria]
    for criterion_id in ids:
        if ids.count(criterion_id) > 1:
            raise UsageError(f"{path}: duplicate criterion {criterion_id}")
    return Pack(
        name=path.stem,
        gpu_names=tuple(document.get("gpu_names", ())),
        criteria=tuple(criteria),
        datasheet=document.get("datasheet", {}),
        unknown=document.get("unknown", {}),
        lacks=document.get("lacks", {}),
    )


def read_packs(names: Iterable[str]) -> tuple[Pack, ...]:
    """Return every shipped pack, and the ones that the operator named. Raises UsageError as `read_pack` does."""
    return (*map(read_pack, shipped_packs()), *(replace(read_pack(name), chosen=True) for name in names))


def _criterion(item: Mapping[str, Any], origin: str) -> Criterion:
    fields = {key: value for key, value in item.items() if not key.startswith("vs_")} | {"origin": origin}
    if sku := item.get("vs_sku"):
        fields |= {"expected": sku["expected"], "fraction": sku["fraction"]}
    if inventory := item.get("vs_inventory"):
        fields |= {"variable": inventory["variable"], "fraction": inventory.get("fraction", 1.0)}
    if fleet := item.get("vs_fleet"):
        fields |= {"fleet_fraction": fleet.get("fraction"), "fleet_deviations": fleet.get("deviations")}
        fields |= {"by_position": fleet.get("by") == "position"}
    if baseline := item.get("vs_baseline"):
        fields |= {"baseline": VsBaseline(**baseline)}
    return Criterion(**fields)
