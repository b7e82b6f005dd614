"""Read criteria packs: YAML files with limits for readings and benchmark results. A pack contains no code."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from fleet.yaml_files import read_yaml
from schemas import documents
from schemas.errors import UsageError
from schemas.records import Observation, Value
from schemas.reports import SEVERITY

PACKS = Path(__file__).parent / "packs"
_FILE_TYPES = (".yml", ".yaml")
RESERVED_IDS = frozenset(
    {
        "plan", "gpu-model", "identity-constant", "identity-unique", "digest-majority", "nvlink-domain", "baseline",
        "localise", "bmc-serial", "manifest", "manifest-extra", "manifest-link", "rail-switch",
    }
)  # fmt: skip
"""Values of `Verdict.criterion` for checks that are part of the judge and in no pack. No criterion may have one of these ids."""


Range = dict[str, float]
"""Inclusive bounds of a number: `ge`, `le` or both."""
Where = Mapping[str, Value | Range]
MODEL = "model"
"""Value of `Criterion.basis` for a limit that is calculated from figures of other hardware (GPU models, networks)."""


@dataclass(frozen=True, kw_only=True)
class VsBaseline:
    """How far a figure may be from the figure of the same part in the accepted record (the baseline)."""

    fraction: float = 1.0
    """The limit is this fraction of the accepted value. With 1, only `sigmas` determines how far the limit is from that value."""
    sigmas: float = 4.0
    """The distance of the limit from the accepted value is at least this many standard deviations of the figure's noise, if the
    noise is known."""
    change: float | None = None
    """For counts, instead of the fraction: the permitted change, in the unit of the count."""


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """The limit of an observation, the action if the observation misses it, and the source of the limit.

    Exactly one kind of limit is set; `fleet_fraction` and `fleet_deviations` may be combined:
        value: the limit itself.
        expected, fraction: the limit is this fraction of the expected performance of the part.
        datasheet, fraction: the limit is this fraction of a figure in the datasheet of the host's GPU model (`with_datasheet`).
        variable, fraction: the limit is this fraction of an inventory variable.
        fleet_fraction: the limit is this fraction of the median of the same observation (name, stage, settings, kind of scope)
            over the fleet's GPUs, or hosts, of the same GPU model.
        fleet_deviations: the limit is this many robust standard deviations away from the same median. If
            `fleet_fraction` is set too, the limit that is farther from the median applies.
        baseline: the limit comes from the accepted record of the same part. The criterion does not apply to a run without a
            baseline.
        same_as_fleet: True: the value must be the most common one among the GPUs or hosts that it is compared with (`among`).
            With the operator `ge` a greater value passes too, with `le` a smaller one. False: any value passes; with
            `replaces` this disables a shipped criterion.
    """

    id: str
    name: str
    operator: str
    unit: str
    action: str
    source: str
    stage: str = ""
    scope: str = ""
    where: Where = field(default_factory=dict)
    """Parameter, or label of the scope -> its required value, or the bounds of a number."""
    value: Value = None
    expected: float | None = None
    datasheet: str = ""
    """Key of the datasheet (`vs_datasheet.figure`) that gives `expected`. A part without this figure is not judged."""
    links: int = 0
    """Number of NVLinks for which `expected` holds. The limit is scaled to the number of NVLinks that join the
    GPUs; 0: no scaling."""
    fraction: float = 1.0
    variable: str = ""
    fleet_fraction: float | None = None
    fleet_deviations: float | None = None
    by_position: bool = False
    """Compare with parts in the same position of other hosts (gpu=3 with gpu=3), if there are enough of them."""
    baseline: VsBaseline | None = None
    same_as_fleet: bool | None = None
    within: float = 0.0
    """With `same_as_fleet`: numbers that differ by at most this fraction count as the same."""
    prefer: Value = None
    """With `same_as_fleet`: a value with which parts always pass. It also wins if it and another value are equally common: then
    parts with the other value fail."""
    among: str = ""
    """With `same_as_fleet`: compare within the `device`, within the `host`, with all hosts of the same `rack`, or with all hosts
    of the same NVLink `domain` (hosts in no domain are not compared). Default: with the hosts of the same gang."""
    group_by: tuple[str, ...] = ()
    """With `same_as_fleet`: names of readings. If the parts of one host are compared (because of `among`, or because the host has
    no peers), only parts with equal values of these readings are compared with each other."""
    complete: bool = False
    """With `same_as_fleet`: a part that most hosts have must be on every host."""
    new_part: bool = False
    """The criterion applies only to runs that accept new parts (`is_acceptance`)."""
    delta: bool = False
    """Compare the increase of a counter over the run, not its value."""
    per_hour: bool = False
    """Compare the rate of a counter per hour (`counter_rate`): with `delta` the rate during the run, without it the rate from the
    time when the counter was cleared until the run."""
    optional: bool = False
    """There is no verdict if the part does not support the reading, if the fleet is too small to compare with, if the accepted
    record does not have the figure, or (with `same_as_fleet`) if the host does not report the value."""
    unless: Value = None
    """A part that has this value during the whole run does not have what the criterion judges, and gets no verdict."""
    best_of_run: bool = False
    """One good value in the run is enough to pass. Without this flag, one bad value fails."""
    basis: str = "policy"
    """What the limit is based on: `policy`, MODEL or another value in criteria.schema.json."""
    note: str = ""
    actions: Mapping[str, str] = field(default_factory=dict)
    """Failing value as text, or `KEY=VALUE` of a parameter -> the action for it, if that differs from `action`."""
    severity: str = ""
    """`critical`: unfit for use. `warning`: inspect the part. The default follows from the action."""
    replaces: str = ""
    """Id of a criterion in an earlier pack. This criterion replaces it. Without `replaces`, a pack cannot reuse an id
    (`read_packs`)."""
    origin: str = ""
    """Name of the pack whose file defines the criterion. A pack that includes this file has the criterion too."""

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", SEVERITY[self.action])

    @property
    def vs_fleet(self) -> bool:
        """Return whether the criterion compares numbers with those of the fleet."""
        return self.fleet_fraction is not None or self.fleet_deviations is not None

    def action_for(self, observation: Observation, value: Value) -> str:
        """Return what to do if this value of the observation fails."""
        keys = (str(value), *(f"{key}={setting}" for key, setting in observation.params.items()))
        return next((self.actions[key] for key in keys if key in self.actions), self.action)

    def matches_name(self, name: str) -> bool:
        """Return whether the criterion is for observations of that name. In `self.name`, `*` stands for one component."""
        return name == self.name if "*" not in self.name else name_matches(self.name, name)

    def matched(self, names: Collection[str]) -> Sequence[str]:
        """Return those of `names` that the criterion is for. For speed, `names` should be a set or a mapping."""
        if "*" in self.name:
            return _matching_names(self.name, tuple(names))
        return (self.name,) if self.name in names else ()


@lru_cache(maxsize=65536)
def name_matches(pattern: str, name: str) -> bool:
    """Return whether a dotted name matches a pattern, in which `*` stands for one component."""
    patterns, components = pattern.split("."), name.split(".")
    return len(patterns) == len(components) and all(map(fnmatch.fnmatchcase, components, patterns))


@lru_cache(maxsize=2048)
def _matching_names(pattern: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names that match the pattern. The result is cached, because most hosts of a fleet report the same names."""
    return tuple(name for name in names if name_matches(pattern, name))


@dataclass(frozen=True, kw_only=True)
class Pack:
    """A named set of criteria, and the GPU models that it is for."""

    name: str
    gpu_names: tuple[str, ...]
    criteria: tuple[Criterion, ...]
    chosen: bool = False
    """Whether the operator named the pack. It then applies to every host, in addition to the pack of the GPU model."""
    datasheet: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The vendor's figures in SI units by name, each with a source.

    Limits with `vs_datasheet` are fractions of them, and the lint compares the other limits with them."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Observation name -> why the pack has no limit for it."""
    lacks: Mapping[str, Mapping[str, tuple[Value, ...]]] = field(default_factory=dict)
    """Observation name -> parameter -> values that the part or its software need not support: with such a value, the status
    `unsupported` of the observation is accepted.

    In a pack that the operator named, these entries have no effect (`HostView.lacks`)."""
    rack_is_nvlink_domain: bool = False
    """Whether the GPUs of a rack are in one NVLink domain, unless the inventory names domains."""

    @cached_property
    def origins(self) -> frozenset[str]:
        """Return the names of the packs whose files define its criteria."""
        return frozenset(item.origin for item in self.criteria)


def with_datasheet(criterion: Criterion, datasheet: Mapping[str, Mapping[str, Any]]) -> Criterion:
    """Return the criterion. If its limit is a fraction of a datasheet figure, set `expected` to the value of that figure.

    Limits have the units of the datasheet. The rate of a link is that of one direction. Datasheets state PCIe rates for one
    direction. They state NVLink rates for both directions together, so these are halved.

    `nvlink` and `all_nvlinks` are the rate of all NVLinks of the GPU together; a limit with `nvlink` is scaled to the number of
    NVLinks that join the GPUs. `host_link` is PCIe if the datasheet names no other link to the CPU. `expected` stays None if the
    datasheet does not have the figure.
    """
    part, figure = datasheet.get(criterion.datasheet, {}), None
    if criterion.datasheet == "flops":
        figure = part.get(str(criterion.where.get("dtype")))
    elif criterion.datasheet == "host_link":
        figure = (part or datasheet.get("pcie", {})).get("bandwidth")
    elif criterion.datasheet == "pcie":
        figure = part.get("bandwidth")
    elif criterion.datasheet in ("nvlink", "all_nvlinks"):
        nvlink = datasheet.get("nvlink", {})
        figure = nvlink["bandwidth"] / 2 if nvlink else None
        links = nvlink.get("links", 0) if criterion.datasheet == "nvlink" else 0
        return replace(criterion, expected=figure, links=links)
    elif criterion.datasheet:
        figure = part.get("value")
    return replace(criterion, expected=figure) if criterion.datasheet else criterion


def _has_digit(name: str) -> bool:
    """Return whether a pack name has a digit. Names of GPU models have one, names of groups of checks do not."""
    return any(character.isdigit() for character in name)


@cache
def shipped_packs() -> tuple[str, ...]:
    """Return the names of the packs that come with Rackproof, in alphabetical order."""
    return tuple(sorted(path.stem for path in PACKS.glob("*.yml")))


def model_packs() -> tuple[str, ...]:
    """Return the names of the shipped packs of GPU models."""
    return tuple(name for name in shipped_packs() if read_pack(name).gpu_names)


def read_pack(name: str, *, included_by: tuple[Path, ...] = ()) -> Pack:
    """Return a shipped pack by its name, or a pack from a YAML file by its path, with the packs that it includes.

    `included_by`: the files that include this one, from the outermost to the innermost.

    Raises:
        UsageError: there is no such pack, the file does not follow criteria.schema.json, it has the name of a shipped pack, it
            has an id twice, or it includes itself; or one of these is true of a pack that it includes.
    """
    if name.endswith(_FILE_TYPES):
        return _read(Path(name), included_by)
    if name not in shipped_packs():
        near = documents.nearest(name, shipped_packs(), same_letters=_has_digit(name))
        raise UsageError(
            f"unknown criteria pack {name}{near}: choose one of "
            f"{', '.join(shipped_packs())}, or give the path of a .yml file"
        )
    return _shipped(name)


@cache
def _shipped(name: str) -> Pack:
    """Return a shipped pack. The result is cached, because many packs include the same pack."""
    return _read(PACKS / f"{name}.yml")


def _read(path: Path, included_by: tuple[Path, ...] = ()) -> Pack:
    if path.stem in shipped_packs() and path.resolve().parent != PACKS.resolve():
        raise UsageError(f"{path}: {path.stem} is the name of a shipped criteria pack; rename the file")
    chain = (*included_by, path.resolve())
    if chain[-1] in included_by:
        raise UsageError(f"{path}: the pack includes itself ({' includes '.join(file.name for file in chain)})")
    document = read_yaml(path, "criteria")
    # If two included packs define the same id, the later one wins.
    packs = [read_pack(name, included_by=chain) for name in document.get("include", ())]
    included = [criterion for pack in packs for criterion in pack.criteria]
    criteria = list({criterion.id: criterion for criterion in included}.values())
    criteria += [_criterion(item, path.stem) for item in document["criteria"]]
    for criterion_id, count in Counter(criterion.id for criterion in criteria).items():
        if count > 1:
            raise UsageError(f"{path}: duplicate criterion {criterion_id}")
    return Pack(
        name=path.stem,
        gpu_names=tuple(document.get("gpu_names", ())),
        criteria=tuple(criteria),
        datasheet=document.get("datasheet", {}),
        unknown=document.get("unknown", {}),
        lacks=document.get("lacks", {}),
        rack_is_nvlink_domain=document.get("rack_is_nvlink_domain", False),
    )


def located_packs(planned: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Return the packs of a run: the name of each, and the name or path from which it is read.

    If a file that the plan names cannot be read, because the run was copied to another machine or the file was moved, the given
    file with the same file name takes its place.

    Args:
        planned: packs that the plan names.
        given: packs that the operator names in addition.

    Raises:
        UsageError: a file that the plan names cannot be read, and none is given in its place.
    """
    packs, others = {}, list(given)
    for name in planned:
        packs[name] = name
        if name.endswith(_FILE_TYPES) and not _is_readable(Path(name)):
            file_name = Path(name).name
            packs[name] = next((other for other in others if Path(other).name == file_name), "")
            if not packs[name]:
                raise UsageError(f"{name}: the plan names this criteria pack, but there is no such file that you can read: "
                                 f"give its new path: --criteria DIRECTORY/{file_name}")  # fmt: skip
            others.remove(packs[name])
    return packs | {name: name for name in others}


def _is_readable(path: Path) -> bool:
    """Return whether the file can be read. `Path.exists` would fail in a directory of another user, such as /root/inventory."""
    try:
        with path.open("rb"):
            return True
    except (OSError, ValueError):  # ValueError: the plan has a NUL character in the path
        return False


def read_packs(names: Iterable[str]) -> tuple[Pack, ...]:
    """Return every shipped pack, and the packs that the operator named.

    Raises:
        UsageError: as `read_pack`; or a criterion of a named pack has a reserved id, reuses an id without `replaces`, or
            replaces an unknown id.
    """
    packs = (*map(read_pack, shipped_packs()), *(replace(read_pack(name), chosen=True) for name in names))
    if problems := [*_invalid_ids(packs)]:
        raise UsageError("criteria with a wrong id or `replaces`:\n" + "\n".join(problems))
    return packs


def _invalid_ids(packs: Iterable[Pack]) -> Iterator[str]:
    """Yield why criteria of the operator are refused: a reserved id, an id reused without `replaces`, or an unknown `replaces`.

    If the operator's pack includes a shipped pack, the criteria of the latter are not checked.
    """
    shipped, known = set(shipped_packs()), dict[str, list[Criterion]]()
    for pack in packs:
        for item in pack.criteria if pack.chosen else ():
            others = known.get(item.id, [])
            if item.origin in shipped or item in others:
                continue
            where = f"{item.origin}: {item.id}"
            if item.id in RESERVED_IDS:
                yield f"{where}: the id is reserved for verdicts without a criterion; choose another id"
            elif item.replaces and item.replaces not in known:
                yield f"{where}: replaces {item.replaces}, which no pack has{documents.nearest(item.replaces, known)}"
            elif others and item.replaces != item.id:
                origins = [*dict.fromkeys(other.origin for other in others)]
                more = f" and {len(origins) - 1} more pack{'s' if len(origins) > 2 else ''}" if len(origins) > 1 else ""
                yield (
                    f"{where}: a criterion of {origins[0]}{more} already has this id; choose another id to keep both criteria, "
                    f"or add `replaces: {item.id}`: the report then lists the other criterion as replaced"
                )
        for item in pack.criteria:
            known.setdefault(item.id, []).append(item)


def _criterion(item: Mapping[str, Any], origin: str) -> Criterion:
    fields = {key: value for key, value in item.items() if not key.startswith("vs_")} | {"origin": origin}
    fields["group_by"] = tuple(item.get("group_by", ()))
    if sku := item.get("vs_sku"):
        fields |= {"expected": sku["expected"], "fraction": sku["fraction"], "links": sku.get("links", 0)}
    if datasheet := item.get("vs_datasheet"):
        fields |= {"datasheet": datasheet["figure"], "fraction": datasheet["fraction"]}
    if inventory := item.get("vs_inventory"):
        fields |= {"variable": inventory["variable"], "fraction": inventory.get("fraction", 1.0)}
    if fleet := item.get("vs_fleet"):
        fields |= {"fleet_fraction": fleet.get("fraction"), "fleet_deviations": fleet.get("deviations")}
        fields |= {"by_position": fleet.get("by") == "position"}
    if baseline := item.get("vs_baseline"):
        fields |= {"baseline": VsBaseline(**baseline)}
    return Criterion(**fields)
