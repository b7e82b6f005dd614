"""Score the versions of the products of a host, such as the driver, by their published vulnerabilities.

The scores exist only if the operator's criteria limit them. Without such a criterion, the report lists the vulnerabilities, but
they change no decision.
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
"""Prefix of the names of the scores. The key of the product in PRODUCTS follows: `vulnerability.driver`."""


def with_scores(evidence: Evidence, packs: Iterable[Pack]) -> Evidence:
    """Return the evidence. If an operator's pack has a criterion on any score, add a score for each version in each snapshot.

    The score is the highest CVSS base score of the vulnerabilities of the version. A vulnerability whose advisory states no
    score counts as 10. The score of a version without vulnerabilities is 0.
    """
    if not any(item.name.startswith(SCORES) for pack in packs if pack.chosen for item in pack.criteria):
        return evidence
    records = tuple(
        replace(record, snapshots=tuple(map(_with_scores, record.snapshots))) for record in evidence.records
    )
    return replace(evidence, records=records)


def with_advisory(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If it is a failure of a score, add the missing fixes and their advisories."""
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
    """Yield a metric with the scores of each product whose version is in the snapshot (`metrics`: name -> metric)."""
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
    """Return why the version cannot be compared with the versions that have fixes; empty if it can be.

    `package`: name and version of the package from which the product was installed; empty if unknown.
    """
    if not is_vendor_version(product, package):
        if not package:
            return "the package is unknown, and distributions add fixes to old versions"
        return f"the distribution adds fixes to old versions ({package})"
    return "" if is_comparable(product, version) else f"not a version of {product.title}"


def _fixes(key: str, product: Product, version: Value) -> MissingFixes | None:
    return missing_fixes(product, shipped_advisories().products.get(key, ()), str(version))


def _score(fixes: MissingFixes | None) -> float:
    return fixes.score if fixes else 0.0
