"""Show the lowest versions without a published vulnerability as a table for a terminal, or as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from fleet.judge.advisories import PRODUCTS, STALE_AFTER_DAYS, Advisories, Advisory, AffectedRange, version_key
from fleet.quantities import counted
from fleet.report.terminal import plain_table


@dataclass(frozen=True, kw_only=True)
class Floor:
    """A version in one branch of a product (`floors`). The operator compares the version on the hosts with it."""

    product: str
    reading: str
    """Reading to compare with the floor, such as `driver.version`; empty if Rackproof does not read the product's version."""
    line: str
    """The branch, as the vendor names it."""
    version: str
    advisory: Advisory
    """The newest advisory whose vulnerabilities this version fixes."""


def floors(advisories: Advisories) -> Iterator[Floor]:
    """Yield the floors of every product.

    If Rackproof reads the version of the product, these are the released versions that contain a fix and that no advisory lists
    as affected. For other products, these are all versions that contain a fix.
    """
    for key, product in PRODUCTS.items():
        items = advisories.products.get(key, ())
        found: dict[tuple[str, str], tuple[AffectedRange, Advisory]] = {}
        for advisory in items:  # newest first
            for fix in advisory.ranges:
                is_release = re.fullmatch(r"[\d.]+", fix.fixed)
                if not product.reading or (is_release and not any(other.range_of(fix.fixed) for other in items)):
                    found.setdefault((fix.line, fix.fixed), (fix, advisory))
        for fix, advisory in sorted(found.values(), key=lambda pair: (version_key(pair[0].fixed), pair[0].line)):
            yield Floor(
                product=product.title,
                reading=product.reading,
                line=fix.line,
                version=fix.fixed,
                advisory=advisory,
            )


def floors_blocks(advisories: Advisories, now: str) -> list[Table | Text]:
    """Return a table of the floors, the sources of the advisories, and their age at the time `now` (ISO 8601)."""
    table = plain_table("PRODUCT", "BRANCH", "FLOOR", "SEVERITY", "PUBLISHED", "ADVISORY", "FIXES")
    for item in floors(advisories):
        severity = item.advisory.severity or "not stated"
        rating = f"{severity} {item.advisory.score:g}" if item.advisory.score else severity
        product = item.product if item.reading else f"{item.product} (compare by hand)"
        cves = f"{item.advisory.cves[0]}{f' +{len(item.advisory.cves) - 1}' * (len(item.advisory.cves) > 1)}"
        table.add_row(product, item.line, item.version, rating, item.advisory.date, item.advisory.id, cves)
    return [table, *(Text(line) for line in _age_lines(advisories, now))]


def floors_json(advisories: Advisories, now: str) -> dict[str, Any]:
    """Return the floors as JSON, for programs."""
    return {
        "date": advisories.date,
        "age_days": advisories.age_days(now),
        "stale": advisories.age_days(now) > STALE_AFTER_DAYS,
        "sources": list(advisories.sources),
        "floors": [
            {
                "product": item.product,
                "reading": item.reading,
                "branch": item.line,
                "version": item.version,
                "severity": item.advisory.severity,
                "score": item.advisory.score,
                "cves": list(item.advisory.cves),
                "advisory": item.advisory.id,
                "url": item.advisory.url,
                "date": item.advisory.date,
            }
            for item in floors(advisories)
        ],
    }


def _age_lines(advisories: Advisories, now: str) -> Iterator[str]:
    for source in advisories.sources:
        yield f"source: {source['url']} at {source['commit'][:12]} of {source['date']}"
    age = advisories.age_days(now)
    yield f"The list of advisories dates from {advisories.date} and is {counted(age, 'day')} old."
    if age > STALE_AFTER_DAYS:
        yield (
            f"It is older than {STALE_AFTER_DAYS} days, so it may lack advisories. To renew it, run rackproof criteria "
            "versions --rebuild (docs/versions.md)."
        )
