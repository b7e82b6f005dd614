"""List the versions that a host reported: the software of its ranks, and the components that its collectors report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import LAUNCH, Evidence
from fleet.judge.matching import matches
from fleet.judge.observation_index import ObservationIndex
from schemas.records import MEASURED, Observation

_VERSIONS = tuple(
    f"{separator}{word}" for separator in "._" for word in ("version", "firmware", "model", "release", "part_number")
)
"""Suffixes of names. A reading whose name ends in one of them, and whose value is a text, is listed even if no criterion
compares it over the fleet."""


def versions(
    evidence: Evidence, criteria: Iterable[Criterion], observations: ObservationIndex | None = None
) -> dict[str, str]:
    """Return component -> version. If the version differs within the host, the key has the scope: `gpu.vbios_version[gpu=3]`.

    Args:
        evidence: the evidence of the host.
        criteria: the criteria that judge the host. Observations that match one of `compared_criteria` are listed too.
        observations: index of the evidence, if the caller has one.
    """
    compared = compared_criteria(criteria)
    index = ObservationIndex(evidence) if observations is None else observations
    by_name: dict[str, dict[str, str]] = {}
    for name in version_names(index, compared):
        of_name = [criterion for criterion in compared if criterion.matches_name(name)]
        for observation in index[name]:
            if observation.status == MEASURED and _is_version(observation, of_name):
                by_name.setdefault(name, {})[observation.scope] = _text(observation)
    by_component = evidence.software()
    for name, values in by_name.items():
        is_uniform = len(set(values.values())) == 1
        by_component |= (
            {name: next(iter(values.values()))}
            if is_uniform
            else {f"{name}[{scope}]": version for scope, version in values.items()}
        )
    return by_component


def compared_criteria(criteria: Iterable[Criterion]) -> list[Criterion]:
    """Return the criteria that compare a version or setting of hosts or GPUs with most of the fleet (`same_as_fleet`).

    Criteria with `prefer` or `among` are left out. `same_as_fleet: false` switches the comparison off. Criteria with this setting
    are included too, because `versions` lists a version even if it is not compared.
    """
    return [
        item
        for item in criteria
        if item.same_as_fleet is not None
        and item.operator == "eq"
        and item.scope in ("", "host", "gpu")
        and item.prefer is None
        and not item.among
    ]


def version_names(names: Iterable[str], compared: Sequence[Criterion]) -> list[str]:
    """Return the names whose observations may be versions."""
    ordered = tuple(names)
    possible = {name for criterion in compared for name in criterion.matched(ordered)}
    # The observations `launch.*` repeat the versions in `Evidence.software`, which `versions` lists already.
    return [
        name for name in ordered if (name in possible or name.endswith(_VERSIONS)) and not name.startswith(f"{LAUNCH}.")
    ]


def _is_version(item: Observation, compared: Iterable[Criterion]) -> bool:
    """Return whether the observation is a version; `compared` are the compared criteria for its name."""
    if isinstance(item.value, str) and item.name.endswith(_VERSIONS):
        return True
    return any(matches(criterion, item) for criterion in compared)


def _text(item: Observation) -> str:
    if isinstance(item.value, bool):
        return "yes" if item.value else "no"
    return f"{item.value:g} {item.unit}".removesuffix(" 1") if isinstance(item.value, int | float) else str(item.value)
