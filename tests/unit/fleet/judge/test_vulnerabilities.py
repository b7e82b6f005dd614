"""Test that published vulnerabilities reject a host only if a pack chosen by the operator has a criterion on their scores."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.diagnosis.diagnose import diagnose
from fleet.judge import vulnerabilities
from fleet.judge.advisories import PRODUCTS, Advisories, Advisory, AffectedRange
from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.report.merge import merge
from schemas.records import Metric
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, PASS, REJECTED, FleetReport, Verdict, VerdictKind
from tests import ROOT, builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, host_view, one_figure_plan, pack


def published(severity: str, score: float, *ranges: tuple[str, str]) -> Advisory:
    """Return an advisory. `ranges`: (first affected version, first version with the fix)."""
    return Advisory(
        id="NVIDIA 5821",
        url="https://example.com",
        date="2026-05-21",
        severity=severity,
        score=score,
        cves=("CVE-2026-24187",),
        ranges=tuple(AffectedRange(first=first, fixed=fixed) for first, fixed in ranges),
    )


KNOWN = Advisories(
    date="2026-08-18",
    products={
        "driver": (published("high", 8.8, ("0", "535.309.01"), ("536", "580.159.03")),),
        "container_toolkit": (published("medium", 4.1, ("0", "1.17.8")),),
        "runc": (published("critical", 9.0, ("0", "1.2.8")),),
        "nic_firmware": (published("critical", 9.0, ("40", "43.8002")),),
    },
)


@pytest.fixture(autouse=True)
def advisories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vulnerabilities, "shipped_advisories", lambda: KNOWN)


@pytest.fixture(scope="module")
def site() -> tuple[Pack, ...]:
    """Return the packs of a site that rejects versions with serious vulnerabilities."""
    return checked_packs(["no-vulnerabilities"])


def report(packs: tuple[Pack, ...], *metrics: Metric) -> FleetReport:
    """Return the report on one healthy host. `metrics` replace the readings of the same names in every snapshot of the host."""
    plan = builders.plan("h1", rackproof_gang="none")
    (evidence,) = builders.evidence(plan).values()
    records = [
        replace(
            record,
            snapshots=tuple(
                replace(
                    item,
                    metrics=(
                        *(metric for metric in item.metrics if metric.name not in {m.name for m in metrics}),
                        *metrics,
                    ),
                )
                for item in record.snapshots
            ),
        )
        for record in evidence.records
    ]
    return merge(plan, {"h1": Evidence(records=tuple(records))}, packs)


def reading(name: str, value: str, scope: str = "host") -> Metric:
    return Metric(name=name, unit="1", values={scope: value})


DRIVER = "driver.version"
TOOLKIT = "container.toolkit.version"
WITH_TOOLKIT = Metric(
    name="container.cdi.gpus", unit="1", values={}, absent={"host": "unsupported: no CDI specification"}
)
"""A reading that the agent always reports together with the version of the container toolkit."""
OLD_DRIVER = reading(DRIVER, "580.95.05")


def test_vulnerable_versions_are_accepted_if_no_chosen_pack_has_a_criterion_on_scores() -> None:
    accepted = report(read_packs([]), OLD_DRIVER, reading(TOOLKIT, "1.0.0"), WITH_TOOLKIT)
    assert accepted.decision == ACCEPTED
    assert not [item for item in accepted.verdicts if item.name.startswith("vulnerability.")]


def test_rejection_for_a_vulnerable_driver_names_the_fix_and_the_advisory(site: tuple[Pack, ...]) -> None:
    rejected = report(site, OLD_DRIVER)
    assert rejected.decision == REJECTED
    (failed,) = (item for item in rejected.verdicts if item.verdict != PASS)
    assert (failed.name, failed.scope, failed.action, failed.value) == (
        "vulnerability.driver",
        "host",
        "configure",
        8.8,
    )
    assert failed.detail == (
        "update NVIDIA driver 580.95.05 to 580.159.03 or later: CVE-2026-24187 (high, CVSS 8.8); NVIDIA 5821 of 2026-05-21"
    )
    (cause,) = rejected.causes
    assert cause.title == "h1 has NVIDIA driver with a published vulnerability of CVSS 8.8"
    assert failed.detail in cause.why


@pytest.mark.parametrize("key", [key for key, product in PRODUCTS.items() if product.reading])
def test_vulnerable_version_that_also_differs_is_one_cause(key: str) -> None:
    """If another product has a differing version, this is a second cause."""

    def failed(name: str, kind: str = "") -> Verdict:
        return Verdict(
            host="h1", scope="host", name=name, verdict=FAIL, criterion="site", kind=kind, value=9.0, limit=7.0,
            operator="lt", unit="1", action="configure", source="site", reason="r", stage="preflight",
        )  # fmt: skip

    other = next(each.reading for name, each in PRODUCTS.items() if name != key and each.reading)
    differing = [failed(reading, VerdictKind.PEERS) for reading in (PRODUCTS[key].reading, other)]
    causes = diagnose([failed(f"vulnerability.{key}"), *differing], {})
    assert sorted(cause.problem for cause in causes) == ["differs", f"vulnerability.{key}"]


@pytest.mark.parametrize(
    "metrics",
    [
        [reading(DRIVER, "580.159.03")],
        [reading(DRIVER, "535.309.01")],
        [reading(DRIVER, "610.43.02")],
        [reading(TOOLKIT, "1.17.4"), WITH_TOOLKIT],  # the vulnerability of this version has only CVSS 4.1
    ],
)
def test_versions_with_the_fixes_or_only_minor_vulnerabilities_are_accepted(
    site: tuple[Pack, ...], metrics: list[Metric]
) -> None:
    assert report(site, *metrics).decision == ACCEPTED


def test_an_adapter_of_another_vendor_is_not_judged(site: tuple[Pack, ...]) -> None:
    verdicts = report(site, reading("infiniband.hca.firmware_version", "229.2.48.0", "hca=bnxt_re0")).verdicts
    assert not [item for item in verdicts if item.name == "vulnerability.nic_firmware"]


def test_a_host_without_one_of_the_products_is_accepted(site: tuple[Pack, ...]) -> None:
    absent = Metric(name="container.runc.version", unit="1", absent={"host": "unsupported: no runc"})
    assert report(site, reading(DRIVER, "580.159.03"), absent).decision == ACCEPTED


def test_a_version_that_could_not_be_read_is_inconclusive(site: tuple[Pack, ...]) -> None:
    absent = Metric(name="container.runc.version", unit="1", absent={"host": "error: no answer within 5 s"})
    incomplete = report(site, reading(DRIVER, "580.159.03"), absent)
    assert incomplete.decision == INCOMPLETE
    (item,) = (item for item in incomplete.verdicts if item.verdict != PASS)
    assert (item.name, item.reason) == ("vulnerability.runc", "error: no answer within 5 s")


@pytest.mark.parametrize(
    ("package", "decision"),
    [("no package", REJECTED), ("containerd.io 1.7.27-1", REJECTED), ("runc 1.1.12-0ubuntu3.1", ACCEPTED)],
)
def test_runc_of_the_distribution_is_not_compared_with_advisories(
    site: tuple[Pack, ...], package: str, decision: str
) -> None:
    runc = reading("container.runc.version", "1.1.12"), reading("container.runc.package_version", package)
    assert report(site, reading(DRIVER, "580.159.03"), *runc).decision == decision


def test_the_adapter_with_old_firmware_is_named(site: tuple[Pack, ...]) -> None:
    firmware = {"hca=mlx5_0": "28.43.8002", "hca=mlx5_1": "28.43.1014"}
    metric = Metric(name="infiniband.hca.firmware_version", unit="1", values=firmware)
    (failed,) = (item for item in report(site, metric).verdicts if item.verdict == FAIL)
    assert (failed.name, failed.scope) == ("vulnerability.nic_firmware", "hca=mlx5_1")
    assert "28.43.1014 to 28.43.8002 or later" in failed.reason


@pytest.mark.parametrize(("limit", "decision"), [("9.0", ACCEPTED), ("8.8", REJECTED)])
def test_the_pack_in_the_documentation_judges_only_the_driver(tmp_path: Path, limit: str, decision: str) -> None:
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    (text,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "schema:" in block)
    path = tmp_path / "site.yml"
    path.write_text(text.replace("value: 9.0", f"value: {limit}"), encoding="utf-8")
    runc = reading("container.runc.version", "1.1.12"), reading("container.runc.package_version", "no package")
    assert report(checked_packs([str(path)]), OLD_DRIVER, *runc).decision == decision


def test_verdict_on_an_unknown_product_is_not_changed() -> None:
    """A criterion and a record can name a product that is not in PRODUCTS."""
    plan = builders.plan("h1", profile="smoke", rackproof_gang="none")
    view = HostView(plan, plan.hosts[0], builders.evidence(plan)["h1"], [])
    failed = Verdict(
        host="h1", scope="host", name="vulnerability.toaster", verdict=FAIL, criterion="mine", reason="found 9"
    )
    assert vulnerabilities.with_advisory(view, failed) is failed


DRIVERS = Metric(name=DRIVER, unit="1", values={"host": "580.95.05"}, absent={"gpu=1": "error: lost"})
SCORED = criterion("vulnerability.driver", operator="lt", value=7.0)


def test_scores_are_added_only_if_a_pack_chosen_by_the_operator_has_a_criterion_on_scores() -> None:
    evidence = host_evidence(one_figure_plan("h1"), "h1", DRIVERS)
    shipped, other = pack(SCORED), pack(criterion("gpu.thing"), name="mine", chosen=True)
    assert vulnerabilities.with_scores(evidence, [shipped, other]) is evidence
    mine = pack(criterion("gpu.thing"), SCORED, name="mine", chosen=True)
    added = vulnerabilities.with_scores(evidence, [shipped, mine])
    for before, after in zip(evidence.snapshots(), added.snapshots(), strict=True):
        (score,) = after.metrics[len(before.metrics) :]
        assert (score.name, score.unit, score.values) == ("vulnerability.driver", "1", {"host": 8.8})
        assert score.absent == {"gpu=1": "error: lost"}


@pytest.mark.parametrize(
    ("name", "version", "package", "score", "absent"),
    [
        ("driver.version", "580.159.03", None, 0.0, ""),
        ("driver.version", "unknown", None, None, "unsupported: not a version of NVIDIA driver"),
        ("container.runc.version", "1.1.12", "no package", 9.0, ""),
        ("container.runc.version", "1.1.12", "runc 1.1.12-0ubuntu3.1", None,
         "unsupported: the distribution adds fixes to old versions (runc 1.1.12-0ubuntu3.1)"),
        ("container.runc.version", "1.1.12", None, None,
         "unsupported: the package is unknown, and distributions add fixes to old versions"),
    ],
)  # fmt: skip
def test_each_version_has_a_score_or_a_reason(
    name: str, version: str, package: str | None, score: float | None, absent: str
) -> None:
    metrics = [reading(name, version), *([reading("container.runc.package_version", package)] if package else [])]
    mine = pack(SCORED, name="mine", chosen=True)
    added = vulnerabilities.with_scores(host_evidence(one_figure_plan("h1"), "h1", *metrics), [mine])
    (last,) = [item for item in added.snapshots()[0].metrics if item.name.startswith("vulnerability.")]
    assert (last.values.get("host"), last.absent.get("host", "")) == (score, absent)


def failed_score(**fields: str) -> Verdict:
    default = {"host": "h1", "scope": "host", "name": "vulnerability.driver", "verdict": FAIL, "criterion": "mine"}
    return Verdict(**{**default, "reason": "found 8.8", **fields})


def test_failed_score_names_the_fix_even_if_another_snapshot_has_a_fixed_version() -> None:
    other = reading(DRIVER, "580.159.03")
    evidence = host_evidence(one_figure_plan("h1"), "h1", reading(DRIVER, "580.95.05"))
    (record,) = evidence.records
    first, *rest = record.snapshots
    changed = replace(record, snapshots=(replace(first, metrics=(other,)), *rest))
    view = HostView(one_figure_plan("h1"), one_figure_plan("h1").hosts[0], Evidence(records=(changed,)), [])
    result = vulnerabilities.with_advisory(view, failed_score())
    assert result.detail.startswith("update NVIDIA driver 580.95.05 to 580.159.03 or later: ")
    assert result.reason == f"found 8.8; {result.detail}"


@pytest.mark.parametrize("fields", [{"verdict": PASS}, {"name": "driver"}, {"name": "driver.version"}])
def test_verdict_that_is_not_a_failed_score_names_no_fix(fields: dict[str, str]) -> None:
    view = host_view(one_figure_plan("h1"), "h1", reading(DRIVER, "580.95.05"))
    verdict = failed_score(**fields)
    assert vulnerabilities.with_advisory(view, verdict) is verdict
