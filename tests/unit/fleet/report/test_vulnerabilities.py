"""The report lists versions with published vulnerabilities as caveats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.advisories import Advisories
from fleet.report.hosts import HostReport
from fleet.report.vulnerabilities import compare_versions, vulnerabilities, vulnerability_lines
from schemas.plans import Plan
from schemas.reports import ACCEPTED, Coverage, LineKind, Vulnerability
from tests import builders
from tests.unit.fleet.judge.test_vulnerabilities import KNOWN

COVERAGE = Coverage(expected=0, measured=0, missing=0, error=0, skipped=0, unsupported=0)
PLAN = replace(builders.plan("h1", rackproof_gang="none"), created="2026-09-01T00:00:00Z")
LATER = replace(PLAN, created="2026-11-27T00:00:00Z")
TEXT = (
    "update NVIDIA driver 580.95.05 to 580.159.03 or later: CVE-2026-24187 (high, CVSS 8.8); NVIDIA 5821 of 2026-05-21"
)
OLD = (
    "the list of published vulnerabilities dates from 2026-08-18, 101 days before this run: "
    "vulnerabilities published later are not in it; "
)


def host(name: str, **software: str) -> HostReport:
    """Return the report on a host with these versions; `__` in a keyword stands for `.` (`driver__version`: `driver.version`)."""
    versions = {key.replace("__", "."): text for key, text in software.items()}
    return HostReport(name=name, rack="", decision=ACCEPTED, record="", coverage=COVERAGE, software=versions)


def check_versions(
    *hosts: HostReport, plan: Plan = PLAN, known: Advisories = KNOWN
) -> tuple[tuple[Vulnerability, ...], list[str]]:
    """Return the vulnerable versions, and the summary lines about versions."""
    versions = compare_versions(plan, hosts, known)
    vulnerable = vulnerabilities(versions)
    lines = list(vulnerability_lines(plan, versions, vulnerable, known))
    assert all(line.kind == LineKind.CAVEAT and not line.verdict for line in lines)
    return vulnerable, [str(line) for line in lines]


def test_hosts_with_the_same_version_share_a_line() -> None:
    vulnerable, lines = check_versions(
        host("h1", driver__version="580.95.05"),
        host("h2", driver__version="580.95.05"),
        host("h3", driver__version="580.159.03"),
        host("h4", driver__version="535.309.01"),
    )
    (item,) = vulnerable
    assert (item.version, item.fixed, item.severity, item.hosts) == ("580.95.05", "580.159.03", "high", ("h1", "h2"))
    assert lines == [f"Vulnerable version: {TEXT} [h1, h2]"]


def test_most_severe_vulnerability_is_first() -> None:
    """Of the two adapters, only the first has a vulnerable version."""
    parts = {
        "infiniband.hca.firmware_version[hca=mlx5_0]": "28.43.1014",
        "infiniband.hca.firmware_version[hca=mlx5_1]": "28.43.8002",
    }
    vulnerable, _ = check_versions(host("h1", driver__version="580.95.05", **parts))
    assert [(item.severity, item.version) for item in vulnerable] == [("critical", "28.43.1014"), ("high", "580.95.05")]


def test_package_of_a_distribution_is_listed_as_not_compared() -> None:
    runc = {"container.runc.version": "1.1.12", "container.runc.package_version": "runc 1.1.12-0ubuntu3.1"}
    vulnerable, lines = check_versions(host("h1", **runc))
    assert vulnerable == ()
    assert lines == [
        "Version not compared: runc (runc 1.1.12-0ubuntu3.1): the distribution adds fixes to old versions; "
        "see its own advisories [h1]"
    ]


def test_version_of_an_unknown_package_is_not_called_one_of_the_distribution() -> None:
    _, lines = check_versions(host("h1", container__runc__version="1.1.12"))
    assert lines == [
        "Version not compared: runc (1.1.12): it is unknown who built it, and a distribution adds fixes to old versions; "
        "see the advisories of its supplier [h1]"
    ]


def test_old_list_of_advisories_is_a_caveat_if_a_version_was_compared() -> None:
    _, lines = check_versions(host("h1", driver__version="580.159.03"), plan=LATER)
    assert lines == [f"Old advisories: {OLD}docs/versions.md shows how to update the list"]
    assert check_versions(host("h1", driver__version="580.159.03")) == ((), [])
    assert check_versions(host("h1", torch="2.11.0"), plan=LATER) == ((), [])


@pytest.mark.parametrize("plan", [replace(LATER, rehearsal=True), replace(LATER, simulated=True)])
def test_rehearsal_and_simulation_have_no_caveat_about_versions(plan: Plan) -> None:
    assert check_versions(host("h1", driver__version="580.95.05"), plan=plan) == ((), [])


def test_versions_and_hosts_beyond_the_first_five_are_only_counted() -> None:
    vulnerable, lines = check_versions(*(host(f"h{number}", driver__version=f"580.{number}.1") for number in range(9)))
    assert len(vulnerable) == 9
    assert len(lines) == 6
    assert lines[-1] == "Vulnerable versions: 4 more, listed in report.json"
    _, lines = check_versions(*(host(f"k{number}", driver__version="580.95.05") for number in range(9)))
    assert lines == [f"Vulnerable version: {TEXT} [k0, k1, k2, k3, k4 and 4 more hosts]"]


def test_versions_that_are_not_compared_are_only_counted_beyond_the_first_five() -> None:
    hosts = [
        host(f"h{n}", **{"container.runc.version": "1.1", "container.runc.package_version": f"runc 1.1-{n}"})
        for n in range(9)
    ]
    _, lines = check_versions(*hosts)
    assert len(lines) == 6
    assert lines[-1] == "Versions not compared: 4 more versions"


@pytest.mark.parametrize("text", ["580.95.05\x1b[2J", "../../etc/passwd", "5" * 100_000])
def test_hostile_versions_are_not_shown(text: str) -> None:
    assert check_versions(host("h1", driver__version=text)) == ((), [])
