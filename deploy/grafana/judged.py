"""Return the limits of criteria, as numbers or as PromQL, for panels. A criterion has a limit; a pack is a file of criteria.

The PromQL is made from the expressions of the alert rules (`fleet/integrations/alerts/table.yml`).
"""

from __future__ import annotations

import re
from functools import cache

from fleet.integrations.alerts.rules import PACKS, criteria_of, read_table, shares
from fleet.judge.criteria import Criterion, read_pack
from schemas.records import is_number

_COMPARISON = re.compile(r"(rackproof:throughput:of_\w+)(\{.*?\}) < (<share [\w-]+>)")


@cache
def _criteria() -> dict[str, Criterion]:
    return criteria_of(read_pack(name) for name in PACKS)


def limit(criterion: str) -> float:
    """Return the limit of a criterion. Raise TypeError if the limit is not a number."""
    value = _criteria()[criterion].value
    if not is_number(value):
        raise TypeError(f"criterion {criterion}: {value!r} is not a number")
    return float(value)


def ratios_to_limit(alert: str, matchers: str) -> str:
    """Return a query for the ratios that an alert compares with limits, each ratio divided by its limit.

    The alert fires for each result below 1.
    """
    return " or ".join(
        f"{name}{_add_matchers(selector, matchers)} / {share}" for name, selector, share in _comparisons(alert)
    )


def floor(figure: str, matchers: str) -> str:
    """Return a query for the lowest value that the criteria allow for a figure: the fleet median times the required fraction."""
    return " or ".join(
        f"{share} * rackproof:throughput:median{_add_matchers(selector, matchers)}"
        for _, selector, share in _comparisons("RackproofFleetOutlier")
        if f'figure="{figure}"' in selector
    )


def _comparisons(alert: str) -> list[tuple[str, str, str]]:
    """Return series, selector and limit of each comparison of an alert."""
    (entry,) = (item for group in read_table() for item in group.alerts if item.alert == alert)
    return [(name, selector, shares(share, _criteria())) for name, selector, share in _COMPARISON.findall(entry.expr)]


def _add_matchers(selector: str, matchers: str) -> str:
    return selector.replace("{", f"{{{matchers}, ", 1)
