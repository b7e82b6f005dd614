"""Describe criteria in words."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.judge.criteria import Criterion, Range
from fleet.quantities import SIGNS, number, quantity, scale
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
    "all_nvlinks": "NVLink bandwidth, one way, of all links of the GPU",
}
"""`Criterion.datasheet` -> name of the figure, to follow `90 % of the datasheet's`."""
_CHANGE_TEXTS = {
    **dict.fromkeys(("≤ 0", "≤ 0 s"), "no increase during the run"),
    "≥ 0": "no decrease during the run",
}
"""Sign and limit of a criterion on the change of a value during the run -> the same limit in words."""


def describe(criterion: Criterion) -> str:
    """Return on one line what the criterion matches (name, scope, parameters), its limit, severity and action."""
    matched = [criterion.scope, *(f"{key} {parameter_text(value)}" for key, value in criterion.where.items())]
    matched += [f"stage {criterion.stage}"] if criterion.stage else []
    where = ", ".join(filter(None, matched))
    failure = f"{criterion.severity}, {criterion.action.replace('_', ' ')}"
    return f"{criterion.name}{f' ({where})' if where else ''} {wanted_text(criterion)} [{failure}]"


def wanted_text(criterion: Criterion) -> str:
    """Return the limit of the criterion in words: `≥ 4.15 TB/s`, `same as most of the fleet if present`."""
    sign = SIGNS[criterion.operator]
    text = f"{sign} {_limit(criterion)}"
    if criterion.same_as_fleet is not None:
        text = _of_peers(criterion) if criterion.same_as_fleet else "not compared"
    text += " (new parts only)" if criterion.new_part else ""
    if criterion.per_hour:
        text += f" per hour {'during' if criterion.delta else 'before'} the run"
    elif criterion.delta:
        text = _CHANGE_TEXTS.get(text, f"change {text} during the run")
    text += f", or {criterion.unless} during the whole run" if criterion.unless is not None else ""
    text += ", best value of the run" if criterion.best_of_run else ""
    return text + (" if present" if criterion.optional else "")


def _of_peers(criterion: Criterion) -> str:
    peers = {
        "": "of the fleet",
        "rack": "of the rack",
        "domain": "of the NVLink domain",
        "host": "others on the same host",
        "device": "others on the same GPU",
    }[criterion.among]
    same = {"eq": "same as", "ge": "at least that of", "le": "at most that of"}[criterion.operator]
    tolerance = f" within {criterion.within * 100:g} %" if criterion.within else ""
    if criterion.prefer is None:
        return f"{same} most {peers}{tolerance}"
    preferred = {True: "yes", False: "no"}.get(criterion.prefer, criterion.prefer)  # type: ignore[call-overload]
    return f"{preferred}, or {same} most {peers}{tolerance}"


def _limit(criterion: Criterion) -> str:
    if criterion.vs_fleet:
        return _of_fleet(criterion)
    if criterion.baseline is not None:
        change, accepted = criterion.baseline.change, "the part's value at acceptance"
        if change is None:
            accepted = f"{criterion.baseline.fraction * 100:g} % of {accepted}"
        elif change:
            accepted += f" {'+' if change > 0 else '−'} {quantity(abs(change), criterion.unit)}"
        return f"{accepted} if the run has a baseline"
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


def parameter_text(value: Value | Range) -> str:
    """Return a value of `Criterion.where` in words: `copy`, `no`, `≥ 65536 and ≤ 1048576`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, Mapping):
        return str(value)
    return " and ".join(
        f"{SIGNS[name]} {bound:g}" if bound < 1e6 else f"{SIGNS[name]} {int(bound)}" for name, bound in value.items()
    )


def _of_fleet(criterion: Criterion) -> str:
    fraction, deviations = criterion.fleet_fraction, criterion.fleet_deviations
    is_floor = criterion.operator in ("ge", "gt")
    median = "the fleet's median"
    if criterion.by_position:
        median = "the median of the fleet's parts in the same position on their hosts"
    limits = [f"{fraction * 100:g} % of {median}"] if fraction is not None else []
    if deviations is not None:
        side = "below" if is_floor else "above"
        limits.append(f"{deviations:g} robust deviations {side} {'it' if limits else median}")
    choice = f", whichever is {'lower' if is_floor else 'higher'}" if len(limits) > 1 else ""
    return f"{', or '.join(limits)}{choice}"
