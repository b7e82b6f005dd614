"""List the published vulnerabilities of the software versions that hosts reported.

In the summary they are caveats. They change no decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.judge.advisories import (
    PRODUCTS,
    SEVERITIES,
    STALE_AFTER_DAYS,
    Advisories,
    MissingFixes,
    Product,
    is_vendor_version,
    missing_fixes,
)
from fleet.quantities import counted
from fleet.report.formatting import clean
from schemas.plans import Plan
from schemas.reports import HostReport, LineKind, SummaryLine, Vulnerability

MAX_LINES, MAX_NAMES = 5, 5
OF_DISTRIBUTION = "the distribution adds fixes to old versions; see its own advisories"
UNKNOWN_PACKAGE = (
    "it is unknown who built it, and a distribution adds fixes to old versions; see the advisories of its supplier"
)


@dataclass(kw_only=True)
class Versions:
    """The versions of a fleet that were compared with published advisories, and those that could not be compared."""

    compared: bool = False
    """Whether any version was compared."""
    vulnerable: dict[tuple[str, str], tuple[MissingFixes, list[str]]] = field(default_factory=dict)
    """(Key in PRODUCTS, version) -> (fixes that the version lacks, hosts that have the version)."""
    not_compared: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    """(Title of a product, its package or version, reason why the version was not compared) -> hosts."""


def compare_versions(plan: Plan, hosts: Iterable[HostReport], advisories: Advisories) -> Versions:
    """Compare the versions of the hosts with the advisories.

    Nothing is compared if there are no advisories, or in a rehearsal or simulation, which tests no GPU host.
    """
    result = Versions()
    if plan.rehearsal or plan.simulated or not advisories.products:
        return result
    groups: dict[int, tuple[Mapping[str, str], list[str]]] = {}
    for host in hosts:  # hosts with equal versions share one object `software`, so these versions are compared once
        groups.setdefault(id(host.software), (host.software, []))[1].append(host.name)
    for software, names in groups.values():
        for key, product in PRODUCTS.items():
            package = software.get(product.package, "")
            for text in dict.fromkeys(_versions(software, product)):
                if not is_vendor_version(product, package):
                    reason = OF_DISTRIBUTION if package else UNKNOWN_PACKAGE
                    not_compared = (product.title, clean(package or text), reason)
                    result.not_compared.setdefault(not_compared, []).extend(names)
                    continue
                result.compared = True
                if fixes := missing_fixes(product, advisories.products.get(key, ()), text):
                    result.vulnerable.setdefault((key, text), (fixes, []))[1].extend(names)
    return result


def vulnerabilities(versions: Versions) -> tuple[Vulnerability, ...]:
    """Return the vulnerable versions, the most severe first."""
    found = [
        Vulnerability(
            product=fixes.product.title,
            reading=fixes.product.reading,
            version=fixes.version,
            fixed=fixes.fixed,
            severity=fixes.advisories[0].severity,
            score=fixes.advisories[0].score,
            cves=fixes.cves,
            advisories=tuple(dict.fromkeys(item.url for item in fixes.advisories)),
            text=str(fixes),
            hosts=tuple(hosts),
        )
        for fixes, hosts in versions.vulnerable.values()
    ]
    return tuple(sorted(found, key=lambda item: (SEVERITIES.index(item.severity), -(item.score or 0.0), item.text)))


def vulnerability_lines(
    plan: Plan, versions: Versions, found: Sequence[Vulnerability], advisories: Advisories
) -> Iterator[SummaryLine]:
    """Yield caveats for the summary: vulnerable versions, versions that were not compared, and an old list of advisories.

    The first two kinds have at most MAX_LINES lines each, then one line that counts the others.
    """
    for item in found[:MAX_LINES]:
        yield _caveat("Vulnerable version", f"{item.text} [{_names(item.hosts)}]", len(item.hosts))
    if rest := found[MAX_LINES:]:
        affected = {host for item in rest for host in item.hosts}
        yield _caveat("Vulnerable versions", f"{len(rest)} more, listed in report.json", len(affected))
    not_compared = sorted(versions.not_compared.items())
    for (title, version, reason), hosts in not_compared[:MAX_LINES]:
        yield _caveat("Version not compared", f"{title} ({version}): {reason} [{_names(hosts)}]", len(hosts))
    if uncounted := not_compared[MAX_LINES:]:
        affected = {host for _, hosts in uncounted for host in hosts}
        yield _caveat("Versions not compared", counted(len(uncounted), "more version"), len(affected))
    age = advisories.age_days(plan.created) if versions.compared else 0
    if age > STALE_AFTER_DAYS:
        text = f"the list of published vulnerabilities dates from {advisories.date}, {age} days before this run"
        later = "vulnerabilities published later are not in it; docs/versions.md shows how to update the list"
        yield _caveat("Old advisories", f"{text}: {later}", 0)


def _versions(software: Mapping[str, str], product: Product) -> Iterator[str]:
    """Yield each version of a product on a host.

    `software` maps a component to its version. If parts of the host have different versions, each part has a key `NAME[SCOPE]`.
    """
    for name, text in software.items() if product.reading else ():
        if name == product.reading or name.startswith(f"{product.reading}["):
            yield text


def _caveat(title: str, text: str, hosts: int) -> SummaryLine:
    return SummaryLine(kind=LineKind.CAVEAT, title=title, text=text, values={"hosts": hosts} if hosts else {})


def _names(hosts: Sequence[str]) -> str:
    more = f" and {counted(len(hosts) - MAX_NAMES, 'more host')}" if len(hosts) > MAX_NAMES else ""
    return f"{', '.join(map(clean, hosts[:MAX_NAMES]))}{more}"
