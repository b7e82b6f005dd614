"""Score the product versions of a host by their published vulnerabilities, for a site whose criteria limit these scores.

Without a criterion on a score, the report lists the vulnerabilities, and they change no decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fleet.judge.advisories import (
    PRODUCTS,
    MissingFixes,
    Product,
    is_comparable,
    is_vendor_version,
    missing_fixes,
    shipped_advisories,
)
from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from schemas.records import UNSUPPORTED, Metric, Snapshot, Value
from schemas.reports import FAIL, Verdict

SCORES = "vulnerability."
"""Prefix of the names of the scores: `vulnerability.driver`. The rest is the key of the product."""


def with_scores(evidence: Evidence, packs: Iterable[Pack]) -> Evidence:
    """Return the evidence. If the operator has a criterion on any score, add the score of each version to each snapshot.

    The score is the highest CVSS base score of the vulnerabilities that the version has. A vulnerability whose advisory states no
    score counts as 10. The score of a version without vulnerabilities is 0.
    """
    if not any(item.name.startswith(SCORES) for pack in packs if pack.chosen for item in pack.criteria):
        return evidence
    records = tuple(
        replace(record, snapshots=tuple(map(_with_scores, record.snapshots))) for record in evidence.records
    )
    return replace(evidence, records=records)


def with_advisory(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If it fails a score, add the missing fix and the advisory."""
    key = verdict.name.removeprefix(SCORES)
    product = PRODUCTS.get(key)
    if verdict.verdict != FAIL or not verdict.name.startswith(SCORES) or product is None:
        return verdict
    versions = [metric.values.get(verdict.scope) for _, metric in view.observations.metrics.get(product.reading, ())]
    found = (_fixes(key, product, version) for version in dict.fromkeys(versions))
    detail = "; ".join(str(fixes) for fixes in found if fixes)
    return replace(verdict, reason=f"{verdict.reason}; {detail}", detail=detail)


def _with_scores(snapshot: Snapshot) -> Snapshot:
    metrics = {metric.name: metric for metric in snapshot.metrics}
    return replace(snapshot, metrics=(*snapshot.metrics, *_scores(metrics)))


def _scores(metrics: Mapping[str, Metric]) -> Iterator[Metric]:
    """Yield a metric of scores for each product whose version the snapshot has."""
    for key, product in PRODUCTS.items():
        if reading := metrics.get(product.reading):
            packages = metrics[product.package].values if product.package in metrics else {}
            reasons = {
                scope: _why_not_compared(product, str(version), str(packages.get(scope, "")))
                for scope, version in reading.values.items()
            }
            absent = {scope: f"{UNSUPPORTED}: {reason}" for scope, reason in reasons.items() if reason}
            scores = {
                scope: _score(_fixes(key, product, version))
                for scope, version in reading.values.items()
                if scope not in absent
            }
            yield Metric(name=f"{SCORES}{key}", unit="1", values=scores, absent={**reading.absent, **absent})


def _why_not_compared(product: Product, version: str, package: str) -> str:
    """Return why a version is not compared; empty if it is."""
    if not is_vendor_version(product, package):
        return f"the distribution adds fixes to old versions ({package or 'unknown package'})"
    return "" if is_comparable(product, version) else f"not a version of {product.title}"


def _fixes(key: str, product: Product, version: Value) -> MissingFixes | None:
    return missing_fixes(product, shipped_advisories().products.get(key, ()), str(version))


def _score(fixes: MissingFixes | None) -> float:
    return fixes.score if fixes else 0.0
