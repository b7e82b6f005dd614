"""The criteria, as lines to draw: their numbers come from the packs, and of which figures they speak from the table of alerts."""

from __future__ import annotations

import re
from functools import cache

from fleet.integrations.alerts.rules import PACKS, criteria_of, read_table, shares
from fleet.judge.criteria import Criterion, read_pack

_PART = re.compile(r"(rackproof:throughput:of_\w+)(\{.*?\}) < (<share [\w-]+>)")


@cache
def _criteria() -> dict[str, Criterion]:
    return criteria_of(read_pack(name) for name in PACKS)


def limit(criterion: str) -> float:
    """The plain number that the criterion wants."""
    value = _criteria()[criterion].value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"criterion {criterion}: {value!r} is no number to draw")
    return float(value)


def of_criterion(alert: str, matchers: str) -> str:
    """What the alert compares, over the share that each criterion wants: 1 is the limit for all of them."""
    return " or ".join(f"{name}{_with(selector, matchers)} / {share}" for name, selector, share in _parts(alert))


def floor(figure: str, matchers: str) -> str:
    """The lowest that the criteria allow of a figure: the fleet's median times the share that each wants."""
    return " or ".join(
        f"{share} * rackproof:throughput:median{_with(selector, matchers)}"
        for _, selector, share in _parts("RackproofFleetOutlier")
        if f'figure="{figure}"' in selector
    )


def _parts(alert: str) -> list[tuple[str, str, str]]:
    """Series, selector and number of each comparison of the alert."""
    (rule,) = (one for group in read_table() for one in group.alerts if one.alert == alert)
    return [(name, selector, shares(share, _criteria())) for name, selector, share in _PART.findall(rule.expr)]


def _with(selector: str, matchers: str) -> str:
    return selector.replace("{", f"{{{matchers}, ", 1)
