"""Test `rackproof criteria versions --rebuild`, which builds the list of published vulnerabilities (advisories).

Its sources are two git checkouts: NVIDIA's security bulletins (CSAF documents), and the vulnerabilities of Go modules (OSV
documents).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fleet.advisories.checkout import git as rebuild_git
from fleet.advisories.csaf import bulletin_advisories
from fleet.advisories.osv import document_advisories
from fleet.advisories.rebuild import rebuild
from fleet.judge.advisories import PRODUCTS, Advisory, advisories_from
from rackproof.main import main
from schemas.errors import UsageError

Fixes = dict[str, dict[str, str]]
"""CVE -> platform -> first version with the fix."""


def bulletin(product: str, fixes: Fixes, *, score: float = 7.8, date: str = "2026-05-21") -> dict[str, Any]:
    """Return a CSAF bulletin on one product, released on `date`. Each of its vulnerabilities has the CVSS score `score`."""
    versions = {(platform, fixed) for by_platform in fixes.values() for platform, fixed in by_platform.items()}
    branches = [
        {
            "category": "architecture",
            "name": platform,
            "branches": [
                {
                    "category": "product_version",
                    "name": product,
                    "product": {"name": fixed, "product_id": f"{platform} {fixed}"},
                },
                {
                    "category": "product_version",
                    "name": product,
                    "product": {"name": f"All versions prior to {fixed}", "product_id": f"{platform} old"},
                },
            ],
        }
        for platform, fixed in versions
    ]
    family = {"category": "product_family", "name": "Family", "branches": []}
    return {
        "document": {"tracking": {"current_release_date": f"{date}T00:00:00.000Z"}},
        "product_tree": {"branches": [{"category": "vendor", "name": "NVIDIA", "branches": [family, *branches]}]},
        "vulnerabilities": [
            {
                "cve": cve,
                "product_status": {"fixed": [f"{platform} {fixed}" for platform, fixed in by_platform.items()]},
                "scores": [{"cvss_v3": {"baseScore": score, "baseSeverity": "HIGH"}}],
            }
            for cve, by_platform in fixes.items()
        ],
    }


def ranges(advisories: list[tuple[str, Advisory]]) -> list[tuple[str, tuple[str, ...], list[tuple[str, str, str]]]]:
    """Return the product, the CVEs and the ranges of affected versions of each advisory.

    A range is (branch, first affected version, first version with the fix).
    """
    return [(key, item.cves, [(each.line, each.first, each.fixed) for each in item.ranges]) for key, item in advisories]


R535, R580, R595 = "Linux(R535)", "Linux(R580)", "Linux(R595)"


def test_a_driver_bulletin_has_a_range_for_each_branch() -> None:
    """The range of a branch begins after the next lower branch of the bulletin.

    For example, the range of R580 begins at 536, because the next lower branch is R535.
    """
    fixes = {R580: "580.159.03", R535: "535.309.01", R595: "595.71.05", "Windows(R580)": "582.53"}
    document = bulletin("Tesla", {"CVE-2026-1": fixes, "CVE-2026-2": fixes})
    result = list(bulletin_advisories(document, Path("2026/5821/5821.json")))
    branches = [("R535", "0", "535.309.01"), ("R580", "536", "580.159.03"), ("R595", "581", "595.71.05")]
    assert ranges(result) == [("driver", ("CVE-2026-1", "CVE-2026-2"), branches)]
    ((_, item),) = result
    assert (item.id, item.date, item.severity, item.score) == ("NVIDIA 5821", "2026-05-21", "high", 7.8)
    assert item.url == "https://github.com/NVIDIA/product-security/tree/main/2026/5821"


def test_cve_without_a_fix_for_a_branch_does_not_affect_the_branch() -> None:
    """The range of R580 begins at 536 for both CVEs, because the bulletin lists R535 for CVE-2026-1."""
    fixes = {
        "CVE-2026-1": {R535: "535.309.01", R580: "580.159.03", R595: "595.71.05"},
        "CVE-2026-2": {R580: "580.159.03", R595: "595.71.05"},
    }
    result = ranges(list(bulletin_advisories(bulletin("Tesla", fixes), Path("2026/5821/5821.json"))))
    assert result[1][2] == [("R580", "536", "580.159.03"), ("R595", "581", "595.71.05")]


@pytest.mark.parametrize(
    ("product", "platform", "fixed", "expected"),
    [
        ("ConnectX LTS24", "ConnectX-6*, ConnectX-7", "43.8002 or newer", ("nic_firmware", "LTS24", "43.8002")),
        ("ConnectX GA", "ConnectX 6, ConnectX 7", "xx.41.1000 or later", ("nic_firmware", "GA", "41.1000")),
        ("NVIDIA Container Toolkit", "Linux", "v1.16.2", ("container_toolkit", "", "1.16.2")),
        ("Hopper HGX 8-GPU", "HMC", "1.6.0 and later", ("hgx_firmware", "Hopper HGX 8-GPU, HMC", "1.6.0")),
    ],
)
def test_bulletin_on_firmware_or_the_container_toolkit_is_read(
    product: str, platform: str, fixed: str, expected: tuple[str, str, str]
) -> None:
    """`expected`: the key of the product in `PRODUCTS`, the branch, and the first version with the fix."""
    document = bulletin(product, {"CVE-2026-1": {platform: fixed}})
    (result,) = ranges(list(bulletin_advisories(document, Path("2026/1/1.json"))))
    assert (result[0], *result[2][0][::2]) == expected


@pytest.mark.parametrize(
    "product", ["GeForce", "Guest driver", "NVIDIA GPU Operator", "ConnectX-4", "BlueField GA", "TensorRT"]
)
def test_bulletins_on_unknown_products_are_ignored(product: str) -> None:
    document = bulletin(product, {"CVE-2026-1": {"Linux": "1.2.3"}})
    assert list(bulletin_advisories(document, Path("2026/1/1.json"))) == []


def vulnerability(module: str, *events: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Return an OSV document on one Go module; `events` are the beginnings and ends of the affected version ranges."""
    return {
        "id": "GO-2026-1",
        "aliases": ["CVE-2026-1", "GHSA-aaaa-bbbb-cccc"],
        "published": "2026-06-25T00:00:00Z",
        "affected": [{"package": {"name": module}, "ranges": [{"type": "SEMVER", "events": list(events)}]}],
        "references": [{"type": "ADVISORY", "url": "https://example.com/GHSA-aaaa-bbbb-cccc"}],
        **fields,
    }


RUNC = "github.com/opencontainers/runc"
FIXED = ({"introduced": "0"}, {"fixed": "1.2.8"}, {"introduced": "1.3.0-rc.1"}, {"fixed": "1.3.3"})
CONTAINERD = "github.com/containerd/containerd"


def both(*documents: dict[str, Any]) -> dict[str, Any]:
    """Return one document on the modules of all these documents."""
    return {**documents[0], "affected": [item for document in documents for item in document["affected"]]}


FIXED_IN_V2 = ({"introduced": "0"}, {"fixed": "2.0.7"})


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (vulnerability(RUNC, *FIXED), [("runc", [("0", "1.2.8"), ("1.3.0-rc.1", "1.3.3")])]),
        (vulnerability("github.com/containerd/containerd/v2", *FIXED_IN_V2), [("containerd", [("2", "2.0.7")])]),
        (vulnerability(RUNC, {"introduced": "0"}), []),
        (
            both(vulnerability(CONTAINERD, *FIXED), vulnerability(RUNC, {"introduced": "0"})),
            [("containerd", [("0", "1.2.8"), ("1.3.0-rc.1", "1.3.3")])],
        ),
        (
            both(vulnerability(RUNC, {"introduced": "0"}), vulnerability(f"{CONTAINERD}/v2", *FIXED_IN_V2)),
            [("containerd", [("2", "2.0.7")])],
        ),
        (
            both(vulnerability(CONTAINERD, {"introduced": "0"}), vulnerability(f"{CONTAINERD}/v2", *FIXED_IN_V2)),
            [("containerd", [("2", "2.0.7")])],
        ),
        (vulnerability(RUNC, *FIXED, withdrawn="2026-07-01T00:00:00Z"), []),
        (vulnerability("github.com/docker/docker", *FIXED), []),
    ],
    ids=[
        "runc", "module of major version 2", "no fix", "fix only for the first product", "fix only for the second product",
        "fix only for one major version", "withdrawn", "module of no known product",
    ],
)  # fmt: skip
def test_ranges_with_a_fix_are_read_from_an_osv_document(document: dict[str, Any], expected: list[Any]) -> None:
    """`expected`: each product with its ranges, as (first affected version, first version with the fix)."""
    result = document_advisories(document, Path("GO-2026-1.json"))
    assert [(key, [(each.first, each.fixed) for each in item.ranges]) for key, item in result] == expected


def test_severity_of_the_github_advisory_database_is_used() -> None:
    document = vulnerability(RUNC, *FIXED, database_specific={"severity": "MODERATE"})
    ((_, item),) = document_advisories(document, Path("GO-2026-1.json"))
    assert (item.id, item.severity, item.score, item.date) == ("GHSA-aaaa-bbbb-cccc", "medium", None, "2026-06-25")


COMMITTED = "2026-08-18"


def git(directory: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    environment = {**os.environ, "GIT_COMMITTER_DATE": f"{COMMITTED}T00:00:00Z"}
    subprocess.run(["git", "-C", directory, *identity, *arguments], check=True, capture_output=True, env=environment)


def checkout(directory: Path, url: str, files: dict[str, Any]) -> Path:
    """Create a git checkout with these files and the remote `url`. `files`: path -> text, or a document to write as JSON."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    git(directory, "init", "-q")
    git(directory, "remote", "add", "origin", url)
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "a")
    return directory


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkout of bulletins and one of OSV documents.

    In each, only one file belongs in the list. The others are no advisories or too old: from before 2023 (`SINCE`). For a
    bulletin the date counts, for an OSV document the year in the number of its CVE.
    """
    driver = bulletin("Tesla", {"CVE-2026-9": {R580: "580.159.03"}})
    old = bulletin("Tesla", {"CVE-2022-9": {R535: "535.1.1"}}, date="2022-01-01")
    bulletins = {"2026/5821/5821.json": driver, "2026/5821/CVE-2026-9.json": "{", "2022/5312/5312.json": old}
    documents = {
        "data/osv/GO-2026-1.json": vulnerability(RUNC, *FIXED, published="0001-01-01T00:00:00Z"),
        "data/osv/GO-2024-1.json": vulnerability(RUNC, *FIXED, aliases=["CVE-2016-9962"]),
        "data/index.json": f'["{RUNC}"]',
    }
    root = tmp_path_factory.mktemp("checkouts")
    return (
        checkout(root / "bulletins", "https://github.com/NVIDIA/product-security.git", bulletins),
        checkout(root / "osv", "https://github.com/golang/vulndb", documents),
    )


def test_the_list_is_built_from_two_checkouts(checkouts: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["criteria", "versions", "--rebuild", *map(str, checkouts)]) == 0
    document = json.loads(capsys.readouterr().out)
    built = advisories_from(document)
    assert built.products.keys() == PRODUCTS.keys()
    assert [item.cves for item in built.products["driver"]] == [("CVE-2026-9",)]
    (runc,) = built.products["runc"]
    assert runc.cves == ("CVE-2026-1",)
    assert [source["url"] for source in built.sources] == [
        "https://github.com/NVIDIA/product-security",
        "https://github.com/golang/vulndb",
    ]
    # The OSV document has the date 0001-01-01, which means no date. So the date of its commit is used.
    assert [built.date, runc.date, *(source["date"] for source in built.sources)] == [COMMITTED] * 4


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"README.md": "nothing"}, "no advisory found"),
        ({"2026/1/1.json": "{"}, "not readable as advisories"),
        ({"2026/1/1.json": "[]"}, "not readable as advisories"),
        ({"2026/1/1.json": {"document": {}}}, "not readable as advisories"),
    ],
    ids=["no JSON file", "damaged JSON", "JSON list", "bulletin without a product tree"],
)
def test_checkout_without_advisories_or_with_an_invalid_advisory_is_refused(
    checkouts: tuple[Path, Path], tmp_path: Path, files: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        rebuild(checkout(tmp_path, "https://example.com", files), checkouts[1])


def test_vulnerability_without_any_date_is_an_error(tmp_path: Path) -> None:
    document = vulnerability(RUNC, *FIXED, published="0001-01-01T00:00:00Z")
    with pytest.raises(UsageError, match="not a git checkout, or an incomplete one"):
        list(document_advisories(document, tmp_path / "GO-2026-1.json"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "a")
    with pytest.raises(UsageError, match="git log prints nothing"):
        list(document_advisories(document, tmp_path / "GO-2026-1.json"))


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 60)])
def test_git_that_does_not_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=error))
    with pytest.raises(UsageError, match="git does not run"):
        rebuild_git(tmp_path, "log")


def test_a_directory_that_is_no_checkout_is_refused(checkouts: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "2026/1/1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(bulletin("Tesla", {"CVE-2026-9": {R580: "580.159.03"}})), encoding="utf-8")
    with pytest.raises(UsageError, match="not a git checkout"):
        rebuild(tmp_path, checkouts[1])
