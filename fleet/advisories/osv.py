"""Read vulnerabilities of Go modules: OSV documents, as in github.com/golang/vulndb or github.com/github/advisory-database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.advisories.checkout import git
from fleet.judge.advisories import Advisory, AffectedRange

MODULES: Mapping[str, tuple[str, str]] = {
    "github.com/opencontainers/runc": ("runc", "0"),
    "github.com/containerd/containerd": ("containerd", "0"),
    "github.com/containerd/containerd/v2": ("containerd", "2"),
}
"""Go module -> product, and the lowest version of the product that is published as this module."""
_INCOMPATIBLE = "+incompatible"
_UNKNOWN_DATE = "0001"
_SEVERITIES = {"moderate": "medium"}
SCORES: Mapping[str, tuple[float, str]] = {
    "CVE-2026-50195": (8.8, "high"),
    "CVE-2026-53488": (8.3, "high"),
    "CVE-2026-53492": (6.8, "medium"),
    "CVE-2026-53489": (6.5, "medium"),
    "CVE-2026-47262": (6.5, "medium"),
}
"""CVE -> score and severity, which the Go vulnerability database does not have.

From the AWS security bulletin 2026-046-AWS of 2026-06-18.
"""


def osv_advisories(directory: Path, since: str) -> Iterator[tuple[str, Advisory]]:
    """Yield product and advisory, for every advisory about a module of MODULES in the documents below the directory.

    Vulnerabilities are left out if the years in all of their CVE numbers are before the year `since`. Their dates of publication
    do not show their age, because databases add some vulnerabilities years later.

    Raises:
        OSError: a file cannot be read.
        ValueError, LookupError, TypeError, AttributeError: a document is not as expected.
        UsageError: git cannot report when a document without a date was added.
    """
    for path in sorted(directory.rglob("*.json")):
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if any(f'"{module}"' in text for module in MODULES) else None
        if isinstance(document, dict) and "affected" in document:
            names = [document["id"], *document.get("aliases", ())]
            if any(name.startswith("CVE-") for name in names) and not any(
                f"CVE-{since}" <= name < "CVE-3" for name in names
            ):
                continue
            yield from document_advisories(document, path)


def document_advisories(document: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Advisory]]:
    """Yield each product for which a document names a fix, with the advisory; nothing if the document is withdrawn."""
    ranges: dict[str, list[AffectedRange]] = {}
    for affected in () if "withdrawn" in document else document.get("affected", ()):
        product, lowest = MODULES.get(affected["package"]["name"], ("", ""))
        if product and (fixed := list(_ranges(affected, lowest))):
            ranges.setdefault(product, []).extend(fixed)
    if not ranges:
        return
    names = [document["id"], *document.get("aliases", ())]
    cves = tuple(name for name in names if name.startswith("CVE-"))
    score, severity = max((SCORES[cve] for cve in cves if cve in SCORES), default=(None, _severity(document)))
    advisory = Advisory(
        id=next((name for name in names if name.startswith("GHSA-")), names[0]),
        url=next((item["url"] for item in document.get("references", ()) if item["type"] == "ADVISORY"), ""),
        date=_date(document, path),
        severity=severity,
        score=score,
        cves=cves or (names[0],),
        ranges=(),
    )
    for product, of_product in ranges.items():
        yield product, replace(advisory, ranges=tuple(dict.fromkeys(of_product)))


def _ranges(affected: Mapping[str, Any], lowest: str) -> Iterator[AffectedRange]:
    """Yield the ranges that end with a fix. Other ranges are left out, because there is no version to update to."""
    for events in (item["events"] for item in affected.get("ranges", ()) if item["type"] in ("SEMVER", "ECOSYSTEM")):
        first = ""
        for event in events:
            first = event.get("introduced", first).removesuffix(_INCOMPATIBLE)
            first = lowest if first == "0" else first
            if fixed := event.get("fixed", "").removesuffix(_INCOMPATIBLE):
                yield AffectedRange(first=first, fixed=fixed)


def _severity(document: Mapping[str, Any]) -> str:
    """Return the severity that the document states; an empty text if none, as in the Go vulnerability database."""
    stated = str(document.get("database_specific", {}).get("severity", "")).lower()
    return _SEVERITIES.get(stated, stated)


def _date(document: Mapping[str, Any], path: Path) -> str:
    """Return the date of publication. If the document has none, return the date of the commit that added the file."""
    published = str(document.get("published", _UNKNOWN_DATE))
    if not published.startswith(_UNKNOWN_DATE):
        return published[:10]
    return git(path.parent, "log", "-1", "--diff-filter=A", "--format=%cs", "--", path.name)
