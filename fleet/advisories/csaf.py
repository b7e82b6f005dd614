"""Read NVIDIA's security bulletins: CSAF 2.0 documents, as in github.com/NVIDIA/product-security."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.judge.advisories import Advisory, AffectedRange, version_key

URL = "https://github.com/NVIDIA/product-security"
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_MELLANOX_PREFIX = "xx."
"""Bulletins of 2024 write this in place of the first number of a firmware version, because that number differs among adapters."""

_Version = tuple[Mapping[str, Any], str]
"""The entry of a product version in the product tree of a bulletin, and the name of its platform."""


@dataclass(frozen=True, kw_only=True)
class _Listed:
    """Two regular expressions, which match the names of a product and of its platform in bulletins.

    The branch (the release line, such as `R535`) is the first group that is not empty: the groups of `product` are tried first,
    then those of `platform`. If all groups are empty, the branch is an empty text. The expressions of `hgx_firmware` have no
    group: its branch is the text `PRODUCT, PLATFORM`.
    """

    product: str
    platform: str


_LISTED: Mapping[str, _Listed] = {
    # NVIDIA lists drivers for data centers under "Tesla".
    "driver": _Listed(product=r"Tesla", platform=r"Linux\((R\d+)\)"),
    "container_toolkit": _Listed(product=r"NVIDIA Container Toolkit", platform=r"Linux()|All()"),
    "nic_firmware": _Listed(product=r"ConnectX (GA|LTS\d+)", platform=r"ConnectX.*"),
    "hgx_firmware": _Listed(product=r".*HGX.*", platform=r".*"),
}
"""Key of PRODUCTS in `fleet.judge.advisories` -> its names in bulletins."""
BY_BRANCH = ("driver", "nic_firmware")
"""Products with branches. If a bulletin does not list the branch of a version, the version needs the fix of the next later branch
in the bulletin: the bulletins say that earlier branches may be affected too, and advise to upgrade them."""


def nvidia_advisories(directory: Path) -> Iterator[tuple[str, Advisory]]:
    """Yield product and advisory, for every advisory in the bulletins (YEAR/NUMBER/NUMBER.json) in the directory.

    Raises:
        OSError: a file cannot be read.
        ValueError, LookupError, TypeError, AttributeError: a document is not as expected.
    """
    for path in sorted(directory.glob("[0-9]*/[0-9]*/[0-9]*.json")):
        if path.stem == path.parent.name:
            yield from bulletin_advisories(json.loads(path.read_text(encoding="utf-8")), path)


def bulletin_advisories(document: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Advisory]]:
    """Yield product and advisory, for every advisory of a bulletin.

    The vulnerabilities that affect the same version ranges of a product are one advisory.
    """
    number, date = path.stem, document["document"]["tracking"]["current_release_date"][:10]
    products = {item["product"]["product_id"]: (item, platform) for item, platform in _versions(document)}
    for key, listed in _LISTED.items():
        fixes = [
            (vulnerability, dict(_fixes(key, listed, _fixed_versions(vulnerability, products))))
            for vulnerability in document["vulnerabilities"]
        ]
        every_branch = {branch: fixed for _, fixed_by_branch in fixes for branch, fixed in fixed_by_branch.items()}
        groups: dict[tuple[AffectedRange, ...], list[tuple[float, str, str]]] = {}
        for vulnerability, fixed_by_branch in fixes:
            if ranges := tuple(_ranges(key, every_branch, fixed_by_branch)):
                groups.setdefault(ranges, []).append((*_rating(vulnerability), vulnerability["cve"]))
        for ranges, rated in groups.items():
            score, severity, _ = max(rated)
            yield (
                key,
                Advisory(
                    id=f"NVIDIA {number}",
                    url=f"{URL}/tree/main/{path.parent.parent.name}/{number}",
                    date=date,
                    severity=severity,
                    score=score or None,
                    cves=tuple(cve for _, _, cve in sorted(rated, key=lambda item: (-item[0], item[2]))),
                    ranges=ranges,
                ),
            )


def _fixed_versions(vulnerability: Mapping[str, Any], products: Mapping[str, _Version]) -> list[_Version]:
    return [products[each] for each in vulnerability["product_status"].get("fixed", ()) if each in products]


def _versions(document: Mapping[str, Any]) -> Iterator[_Version]:
    """Yield the entry of each product version in the product tree of a bulletin, with the name of its platform."""
    for vendor in document["product_tree"]["branches"]:
        for platform in vendor.get("branches", ()):
            if platform["category"] != "product_family":
                yield from ((item, platform["name"]) for item in platform.get("branches", ()) if "product" in item)


def _fixes(key: str, listed: _Listed, fixed: list[_Version]) -> Iterator[tuple[str, str]]:
    """Yield branch and version of each version in `fixed` that is a version of the product `key`."""
    for item, platform in fixed:
        by_product, by_platform = re.fullmatch(listed.product, item["name"]), re.fullmatch(listed.platform, platform)
        version = _VERSION.search(item["product"]["name"].removeprefix(_MELLANOX_PREFIX))
        if by_product and by_platform and version:
            groups = [
                *by_product.groups(),
                *by_platform.groups(),
                f"{item['name']}, {platform}" if key == "hgx_firmware" else "",
            ]
            yield next(filter(None, groups), ""), version.group()


def _ranges(key: str, every_branch: Mapping[str, str], fixes: Mapping[str, str]) -> Iterator[AffectedRange]:
    """Yield the version ranges of a product that a vulnerability affects.

    Args:
        key: product.
        every_branch: each branch that the bulletin lists for the product -> a version of the branch, to sort the branches.
        fixes: branch -> first version with the fix of this vulnerability. A branch without an entry is not affected.
    """
    first = "0"
    for branch, version in sorted(every_branch.items(), key=lambda item: version_key(item[1])):
        if branch in fixes:
            yield AffectedRange(first=first, fixed=fixes[branch], line=branch)
        first = str(int(version.split(".")[0]) + 1) if key in BY_BRANCH else "0"


def _rating(vulnerability: Mapping[str, Any]) -> tuple[float, str]:
    """Return the highest CVSS 3 base score of a vulnerability and its severity; 0 and an empty text if none is stated."""
    scores = [item["cvss_v3"] for item in vulnerability.get("scores", ()) if "cvss_v3" in item]
    rated = [(float(item["baseScore"]), str(item["baseSeverity"]).lower()) for item in scores]
    return max(rated, default=(0.0, ""))
