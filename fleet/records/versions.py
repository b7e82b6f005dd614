"""The versions that a host told: of what its ranks ran on, and of everything in it that its collectors can name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import concerns
from fleet.judge.evidence import LAUNCH, Evidence, Named
from schemas.records import MEASURED, Observation

_VERSIONS = re.compile(r"[._](version|firmware|model|release|part_number)$")
"""Ends of the names that are worth a line whether or not a criterion compares them over the fleet."""


def versions(left: Evidence, criteria: Iterable[Criterion], names: Collection[str] | None = None) -> dict[str, str]:
    """Component -> version; `NAME[SCOPE]` where it differs within the host: `gpu.vbios_version[gpu=3]`.

    Args:
        left: what the host left behind.
        criteria: those that judge it; what one of them compares over the fleet is among the components.
        names: of the metrics that `may_be_version`, where the caller knows them.
    """
    compared = [item for item in criteria if item.same_as_fleet is not None]
    found: dict[str, dict[str, str]] = {}
    told_by = Named(left)
    wanted = [name for name in told_by if may_be_version(name, compared)] if names is None else names
    for seen in (seen for name in wanted for seen in told_by[name]):
        if seen.status == MEASURED and _is_version(seen, compared):
            found.setdefault(seen.name, {})[seen.scope] = _text(seen)
    told = left.software()
    for name, values in found.items():
        alike = len(set(values.values())) == 1
        told |= {name: next(iter(values.values()))} if alike else {f"{name}[{at}]": text for at, text in values.items()}
    return told


def may_be_version(name: str, compared: Iterable[Criterion]) -> bool:
    """Whether observations of that name are worth a line, if they are texts or a criterion is for them."""
    if name.startswith(f"{LAUNCH}."):
        return False  # `software` has them
    return bool(_VERSIONS.search(name)) or any(item.speaks_of(name) for item in compared)


def _is_version(seen: Observation, compared: Iterable[Criterion]) -> bool:
    if isinstance(seen.value, str) and _VERSIONS.search(seen.name):
        return True
    return any(item.speaks_of(seen.name) and concerns(item, seen) for item in compared)


def _text(seen: Observation) -> str:
    if isinstance(seen.value, bool):
        return "yes" if seen.value else "no"
    return f"{seen.value:g} {seen.unit}".removesuffix(" 1") if isinstance(seen.value, int | float) else str(seen.value)
