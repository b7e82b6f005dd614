"""Render criteria packs as a Markdown page: what each check reads, its limit, the action if it fails, and its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fleet.judge.criteria import Criterion, Pack, Range
from fleet.judge.informational import INFORMATIONAL
from fleet.quantities import NONE, SIGNS, number, scale
from fleet.report.formatting import ACTIONS
from schemas.catalogue import BENCHMARKS
from schemas.readings import READINGS
from schemas.records import Value

_DATASHEET_TEXTS = {
    "flops": "rate in this precision",
    "memory_bandwidth": "memory bandwidth",
    "memory_size": "memory",
    "memory_bus": "memory bus",
    "memory_clock": "memory clock",
    "cores": "CUDA cores",
    "sm_clock": "maximum SM clock",
    "power": "power",
    "pcie": "PCIe bandwidth, one way",
    "host_link": "bandwidth of the link to the CPU, one way",
    "nvlink": "NVLink bandwidth, one way, for the links that join the GPUs",
    "all_nvlinks": "NVLink bandwidth, one way",
}

HEAD = """# Checks

This page lists every criterion of these packs, as `rackproof criteria list PACK` prints it. The pack of each GPU model includes
`common`, which includes the health packs and `uniformity`; `rackproof criteria list h200-sxm` shows all criteria for one model.
[criteria.md](criteria.md) describes how criteria work and how to write your own. A reading that is not available never passes.
A check marked *if present* applies only to hardware that has the part.
"""

INFORMATIONAL_HEAD = """The report and the exporter include these, and no check judges them. Every other reading and figure
has a check that finds a bad value on one part and on one host. If the wanted value is that of most of the fleet,
a value that is bad on every host passes."""


def checks(packs: Sequence[Pack]) -> str:
    """Return the page: each criterion once, under the pack that defines it."""
    sections: dict[str, dict[str, Criterion]] = {}
    for pack in packs:
        for criterion in pack.criteria:
            sections.setdefault(criterion.origin, {})[criterion.id] = criterion
    lines = [line for name, criteria in sections.items() for line in _section(name, criteria.values())]
    return "\n".join([HEAD, *lines, *_informational()]).rstrip() + "\n"


def _informational() -> Iterator[str]:
    yield "## Informational\n"
    yield f"{INFORMATIONAL_HEAD}\n"
    yield "| reading | why no check judges it |\n|---|---|"
    yield from (f"| `{name}` | {_plain(reason)} |" for name, reason in sorted(INFORMATIONAL.items()))


def _section(name: str, criteria: Iterable[Criterion]) -> Iterator[str]:
    yield f"## {name}\n"
    yield "| check | reading | wanted | action on failure | source |\n|---|---|---|---|---|"
    yield from (f"| {' | '.join(_cells(criterion))} |" for criterion in criteria)
    yield ""


def _cells(criterion: Criterion) -> Iterable[str]:
    yield f"`{criterion.id}`"
    where = ", ".join(f"{key} {_parameter(value)}" for key, value in criterion.where.items())
    description = "; ".join(
        part for part in (_meaning(criterion), where, criterion.stage and f"stage {criterion.stage}") if part
    )
    yield f"`{criterion.name}`{f': {description}' if description else ''}"
    yield _wanted(criterion)
    others = (f"{ACTIONS[action].lower()} if {text}" for text, action in criterion.actions.items())
    yield "; ".join((ACTIONS[criterion.action].lower() or NONE, *others))
    yield _plain(f"{criterion.source} ({criterion.basis})")


def _meaning(criterion: Criterion) -> str:
    helps = [reading.help for name, reading in READINGS.items() if criterion.matches_name(name)]
    benchmark = BENCHMARKS.get(criterion.name.split(".")[0])
    return _plain(helps[0] if helps else benchmark.summary if benchmark else "")


def _wanted(criterion: Criterion) -> str:
    sign = SIGNS[criterion.operator]
    text = f"{sign} {_limit(criterion)}"
    if criterion.same_as_fleet is not None:
        text = _of_peers(criterion) if criterion.same_as_fleet else "not compared"
    text += " of new parts" if criterion.new_part else ""
    text += " change over the run" if criterion.delta else ""
    text += ", best value of the run" if criterion.best_of_run else ""
    return text + (" *if present*" if criterion.optional else "")


def _of_peers(criterion: Criterion) -> str:
    peers = {"": "the fleet", "rack": "the rack", "host": "the host", "device": "the same part"}[criterion.among]
    same = {"eq": "same as", "ge": "at least that of", "le": "at most that of"}[criterion.operator]
    tolerance = f" within {criterion.within * 100:g} %" if criterion.within else ""
    if criterion.prefer is None:
        return f"{same} most of {peers}{tolerance}"
    preferred = {True: "yes", False: "no"}.get(criterion.prefer, criterion.prefer)  # type: ignore[call-overload]
    return f"{preferred}, or {same} most of {peers}{tolerance}"


def _limit(criterion: Criterion) -> str:
    if criterion.vs_fleet:
        return _of_fleet(criterion)
    if criterion.baseline is not None:
        change = criterion.baseline.change
        share = f"{criterion.baseline.fraction * 100:g} % of" if change is None else f"{change:+g} from"
        return f"{share} the part's value at acceptance *if the run has a baseline*"
    if criterion.variable:
        share = "" if criterion.fraction == 1 else f"{criterion.fraction * 100:g} % of "
        return f"{share}the value in the inventory ({criterion.variable.replace('_', ' ')})"
    if criterion.datasheet:
        return f"{criterion.fraction * 100:g} % of the datasheet's {_DATASHEET_TEXTS[criterion.datasheet]}"
    limit = criterion.value if criterion.expected is None else criterion.expected * criterion.fraction
    if isinstance(limit, bool):
        return "yes" if limit else "no"
    if not isinstance(limit, int | float):
        return str(limit)
    factor, unit = scale(float(limit), criterion.unit)
    text = f"{number(limit / factor if factor != 1 else limit)} {unit}".strip()
    return f"{text} with {criterion.links} NVLinks" if criterion.links else text


def _parameter(value: Value | Range) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return " and ".join(
        f"{SIGNS[name]} {bound:g}" if bound < 1e6 else f"{SIGNS[name]} {int(bound)}" for name, bound in value.items()
    )


def _of_fleet(criterion: Criterion) -> str:
    share, away = criterion.fleet_fraction, criterion.fleet_deviations
    parts = [f"{share * 100:g} % of the fleet's median"] if share is not None else []
    parts += [f"{away:g} robust deviations from the fleet's median"] if away is not None else []
    position = ", for parts in the same position" if criterion.by_position else ""
    return f"{' and '.join(parts)}{position}"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
