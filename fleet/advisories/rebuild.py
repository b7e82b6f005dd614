"""Build advisories.json from checkouts of the repositories in which advisories are published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fleet.advisories.checkout import git
from fleet.advisories.csaf import nvidia_advisories
from fleet.advisories.osv import osv_advisories
from fleet.judge.advisories import PRODUCTS, Advisory
from schemas.errors import UsageError

SINCE = "2023"
"""Advisories that were published in earlier years are left out: a version with the fixes of later advisories has the earlier
fixes too."""


def rebuild(bulletins: Path, vulnerabilities: Path) -> str:
    """Return the content of a new advisories.json.

    Args:
        bulletins: a checkout of NVIDIA/product-security.
        vulnerabilities: a checkout, or a folder of one, with OSV documents: golang/vulndb, or github/advisory-database.

    Raises:
        UsageError: a directory is not a git checkout or has no advisory, or a document is not as expected.
    """
    products: dict[str, list[Advisory]] = {key: [] for key in PRODUCTS}
    read_osv = partial(osv_advisories, since=SINCE)
    for directory, read in ((bulletins, nvidia_advisories), (vulnerabilities, read_osv)):
        known = sum(map(len, products.values()))
        try:
            for product, advisory in read(directory):
                if advisory.date >= SINCE:
                    products[product].append(advisory)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"{directory}: not readable as advisories: {error!r}; see docs/versions.md") from error
        if known == sum(map(len, products.values())):
            raise UsageError(f"{directory}: no advisory found; give a checkout as in docs/versions.md")
    sources = [_source(bulletins), _source(vulnerabilities)]
    document = {
        "date": min(source["date"] for source in sources),
        "sources": sources,
        "products": {key: list(_newest_first(items)) for key, items in products.items()},
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _newest_first(advisories: list[Advisory]) -> Iterator[dict[str, Any]]:
    for item in sorted(advisories, key=lambda item: (item.date, item.id), reverse=True):
        yield asdict(item)


def _source(directory: Path) -> dict[str, str]:
    """Return the URL of the repository of a checkout, and hash and date of its newest commit."""
    url = git(directory, "remote", "get-url", "origin").removesuffix(".git")
    commit, date = git(directory, "log", "-1", "--format=%H %cs").split(" ")
    return {"url": url, "commit": commit, "date": date}
