"""A version of a driver, program or firmware is compared with the published fixes of its branch."""

from __future__ import annotations

import re

import pytest

from collectors import container_versions
from fleet.judge import advisories
from fleet.judge.advisories import (
    PRODUCTS,
    SEVERITIES,
    Advisory,
    AffectedRange,
    is_comparable,
    is_vendor_version,
    missing_fixes,
    shipped_advisories,
    version_key,
)
from schemas.readings import READINGS


def advisory(number: int, *ranges: tuple[str, str], severity: str = "high", score: float | None = 8.8) -> Advisory:
    """Return an advisory. `ranges`: pairs of the first affected version and the version with the fix."""
    return Advisory(
        id=f"NVIDIA {number}",
        url=f"https://example.com/{number}",
        date=f"2026-0{number}-01",
        severity=severity,
        score=score,
        cves=(f"CVE-2026-{number}000",),
        ranges=tuple(AffectedRange(first=first, fixed=fixed) for first, fixed in ranges),
    )


DRIVER = (
    advisory(5, ("0", "535.309.01"), ("536", "580.159.03"), ("581", "595.71.05")),
    advisory(1, ("0", "535.288.01"), ("536", "570.211.01"), ("571", "580.126.09"), severity="medium", score=5.5),
)
RUNC = (
    advisory(7, ("0", "1.3.6"), ("1.4.0", "1.4.3"), severity="", score=None),
    advisory(2, ("0", "1.2.8"), ("1.3.0-rc.1", "1.3.3"), ("1.4.0-rc.1", "1.4.0-rc.3"), severity="critical", score=9.0),
)
FIRMWARE = (advisory(6, ("0", "35.8002"), ("36", "39.8002"), ("40", "43.8002"), ("44", "46.3008")),)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("580.95.05", "580.126.09"),
        ("535.309.01", "580"),
        ("580", "580.65"),
        ("1.9.0", "1.10.0"),
        ("1.3.0-rc.1", "1.3.0"),
        ("1.3.0-rc.2", "1.3.0-rc.10"),
        ("1.3.0-beta.1", "1.3.0-rc.1"),
        # "2" is the lower bound of all versions that begin with "2.", so it comes even before their pre-releases.
        ("2", "2.0.0-beta.0"),
        ("39.8002", "40"),
    ],
)
def test_versions_are_ordered_by_their_numbers_and_pre_releases_come_before_releases(older: str, newer: str) -> None:
    assert version_key(older) < version_key(newer)


@pytest.mark.parametrize(
    ("product", "known", "version", "fixed"),
    [
        ("driver", DRIVER, "580.95.05", "580.159.03"),
        ("driver", DRIVER, "580.159.03", None),
        ("driver", DRIVER, "580.159.04", None),
        # An older branch may have a fix of its own. A version of a branch without a fix needs the fix of the next branch that has
        # one. Branches that are newer than all listed ranges have all fixes.
        ("driver", DRIVER, "535.309.01", None),
        ("driver", DRIVER, "535.288.01", "535.309.01"),
        ("driver", DRIVER, "570.211.01", "580.159.03"),
        ("driver", DRIVER, "610.43", None),
        ("runc", RUNC, "1.1.12", "1.3.6"),
        ("runc", RUNC, "1.3.2", "1.3.6"),
        ("runc", RUNC, "1.4.0-rc.1", "1.4.0-rc.3"),
        ("runc", RUNC, "1.4.1", "1.4.3"),
        ("runc", RUNC, "1.4.3", None),
        # The first number of a firmware version identifies the adapter model. FIRMWARE has only the numbers after it.
        ("nic_firmware", FIRMWARE, "28.43.1014", "28.43.8002"),
        ("nic_firmware", FIRMWARE, "28.41.1000", "28.43.8002"),
        ("nic_firmware", FIRMWARE, "22.35.8002", None),
        ("nic_firmware", FIRMWARE, "40.47.1026", None),
    ],
)
def test_a_version_needs_the_fixes_of_its_branch(
    product: str, known: tuple[Advisory, ...], version: str, fixed: str | None
) -> None:
    fixes = missing_fixes(PRODUCTS[product], known, version)
    assert (fixes and fixes.fixed) == fixed
    assert is_comparable(PRODUCTS[product], version)


@pytest.mark.parametrize(
    ("product", "version"),
    [
        ("nic_firmware", "229.2.48.0"),  # firmware of a Broadcom adapter
        ("nic_firmware", "14.32.1010"),  # ConnectX-4 Lx: `PRODUCTS` has only newer adapter models
        ("driver", "580.95.05-grid"),
        ("driver", ""),
        ("runc", "unknown"),
        ("runc", "1.1.12\x1b[2J"),
        ("runc", "1." + "9" * 5000),
        ("runc", "1" + ".1" * 5000),
        ("driver", "580." + "1" * 5000),
        ("nic_firmware", "28.\u0664\u0663.1014"),
    ],
)
def test_text_that_is_not_a_version_of_the_product_is_not_compared(product: str, version: str) -> None:
    assert not is_comparable(PRODUCTS[product], version)
    of_all_versions = advisory(1, ("0", "9999"))
    assert missing_fixes(PRODUCTS[product], [of_all_versions], version) is None


def test_text_has_version_and_fix_and_worst_vulnerability_and_newest_advisory() -> None:
    fixes = missing_fixes(PRODUCTS["driver"], DRIVER, "580.95.05")
    assert fixes
    assert fixes.score == 8.8
    assert str(fixes) == (
        "update NVIDIA driver 580.95.05 to 580.159.03 or later: CVE-2026-5000 and 1 more (high, CVSS 8.8); "
        "NVIDIA 5 of 2026-05-01"
    )


def test_text_on_a_single_vulnerability_mentions_no_others() -> None:
    assert str(missing_fixes(PRODUCTS["runc"], RUNC[:1], "1.1.12")) == (
        "update runc 1.1.12 to 1.3.6 or later: CVE-2026-7000 (severity not stated); NVIDIA 7 of 2026-07-01"
    )


def test_score_of_missing_fixes_is_10_if_an_advisory_states_no_score() -> None:
    fixes = missing_fixes(PRODUCTS["runc"], RUNC, "1.1.12")
    assert fixes
    assert fixes.score == 10.0
    assert [item.severity for item in fixes.advisories] == ["critical", ""]


def test_advisories_of_one_severity_are_sorted_by_falling_score_and_end_with_missing_scores() -> None:
    scores = (None, 0.5, 3.1, None)
    known = [advisory(at, ("0", "600"), severity="low", score=score) for at, score in enumerate(scores, 1)]
    fixes = missing_fixes(PRODUCTS["driver"], known, "580.95.05")
    assert fixes
    assert [item.id for item in fixes.advisories] == ["NVIDIA 3", "NVIDIA 2", "NVIDIA 1", "NVIDIA 4"]
    assert "(low, CVSS 3.1); NVIDIA 4 of 2026-04-01" in str(fixes)


@pytest.mark.parametrize(
    ("package", "expected"),
    [
        ("no package", True),
        ("containerd.io 1.7.27-1", True),
        ("runc 1.1.12-0ubuntu3.1", False),
        ("docker.io 28.2.2", False),
        ("", False),
    ],
)
def test_version_of_runc_is_compared_unless_its_package_is_of_a_distribution_or_unknown(
    package: str, expected: bool
) -> None:
    """The package of a distribution may have fixes that the version number does not show.

    `containerd.io` is a package of the vendor.

    `package`: the package that owns runc; "no package" if none owns it; empty if the package was not read.
    """
    assert is_vendor_version(PRODUCTS["runc"], package) == expected
    assert is_vendor_version(PRODUCTS["driver"], package)


def test_version_and_package_of_each_product_are_readings() -> None:
    names = {name for item in PRODUCTS.values() for name in (item.reading, item.package) if name}
    assert names <= READINGS.keys()
    assert advisories.UNOWNED == container_versions.UNOWNED


def test_shipped_advisories_are_complete_and_do_not_affect_the_newest_fixes() -> None:
    shipped = shipped_advisories()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", shipped.date)
    assert shipped.date == min(source["date"] for source in shipped.sources)
    assert shipped.products.keys() == PRODUCTS.keys()
    for key, items in shipped.products.items():
        assert items, key
        for item in items:
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", item.date), item
            assert item.date <= max(source["date"] for source in shipped.sources)
            assert item.severity in SEVERITIES
            assert item.cves, item
            assert item.url.startswith("https://"), item
            assert item.ranges, item
            assert all(version_key(each.first) < version_key(each.fixed) for each in item.ranges), item
        # No advisory may affect the versions that the newest bulletin names as fixed.
        if PRODUCTS[key].reading and key in ("driver", "container_toolkit", "nic_firmware"):
            for newest in items[0].ranges:
                assert not any(item.range_of(newest.fixed) for item in items), (key, newest)


@pytest.mark.parametrize(
    ("now", "age"),
    [
        ("2026-08-18T00:00:00Z", 0), ("2026-08-18T23:59:59Z", 0), ("2026-08-19T00:00:00Z", 1),
        ("2026-11-26T00:00:00Z", 100), ("2026-11-27T17:00:00Z", 101),
    ],
)  # fmt: skip
def test_age_of_the_advisories_is_counted_in_whole_days(now: str, age: int) -> None:
    assert advisories.Advisories(date="2026-08-18", products={}).age_days(now) == age
