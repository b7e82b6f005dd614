"""Published vulnerabilities of the software and firmware of GPU hosts, and the versions that fix them.

`rackproof criteria versions --rebuild` builds `advisories.json` from what the vendors publish (`fleet/advisories`). The file
states the date of its sources; later advisories may be missing. A version is compared with the fix of its own branch: an R535
driver with the R535 fix is not affected, although a newer R580 driver without the R580 fix is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from schemas.times import epoch_seconds

PATH = Path(__file__).with_name("advisories.json")
SEVERITIES = ("critical", "high", "medium", "low", "")
"""CVSS ratings, most severe first. Empty: the source states none."""
MOST_SEVERE = 10.0
"""Highest CVSS base score."""
STALE_AFTER_DAYS = 90
UNOWNED = "no package"
"""Value of a reading that `Product.package` names. It means that no package owns the product's program."""
VersionKey = tuple[tuple[int | str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Product:
    """A program or firmware for which advisories are published."""

    title: str
    reading: str = ""
    """Name of the reading (a value that a collector reads on the host) with the version. Empty: no collector reads the version,
    so it is not compared, and the fixes are only listed."""
    pattern: str = r"v?(\d{1,6}(?:\.\d{1,6}){1,4}(?:-[a-z]{1,9}\.\d{1,6})?)"
    """Regular expression of a version. Its first group is compared. A text that does not match is not compared."""
    package: str = ""
    """Name of the reading that states the package of the program: package name and version. The package of a distribution may
    have fixes that the version number of the program does not show."""
    vendor_packages: tuple[str, ...] = ()
    """Names of packages that contain the vendor's program unchanged. The version number of such a program shows its fixes."""


PRODUCTS: Mapping[str, Product] = {
    "driver": Product(title="NVIDIA driver", reading="driver.version", pattern=r"(\d{3}\.\d{1,6}(?:\.\d{1,6})?)"),
    "container_toolkit": Product(title="NVIDIA Container Toolkit", reading="container.toolkit.version"),
    "containerd": Product(
        title="containerd",
        reading="container.containerd.version",
        package="container.containerd.package_version",
        vendor_packages=("containerd.io",),
    ),
    "runc": Product(
        title="runc",
        reading="container.runc.version",
        package="container.runc.package_version",
        vendor_packages=("containerd.io",),
    ),
    # The first number of the version identifies the adapter model:
    # ConnectX-5 16, -6 20, -6 Dx 22, -6 Lx 26, -7 28, -8 40, BlueField-2 24, -3 32.
    "nic_firmware": Product(
        title="ConnectX and BlueField firmware",
        reading="infiniband.hca.firmware_version",
        pattern=r"(?:16|20|22|24|26|28|32|40)\.(\d\d\.\d{4})",
    ),
    "hgx_firmware": Product(title="HGX and DGX firmware"),
}


@dataclass(frozen=True, kw_only=True)
class AffectedRange:
    """The affected versions: from `first` up to, but not including, `fixed`, the version with the fix."""

    first: str
    fixed: str
    line: str = ""
    """Branch, release line or board of the fix, as the vendor names it."""


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """Vulnerabilities of one product, all fixed in the same versions.

    They are from one NVIDIA bulletin, or from one entry of a vulnerability database (`fleet/advisories`).
    """

    id: str
    url: str
    date: str
    severity: str
    """Rating of the most severe vulnerability: one of SEVERITIES."""
    score: float | None
    """CVSS base score of the most severe vulnerability; None if the source states none."""
    cves: tuple[str, ...]
    """CVE ids. Those of an NVIDIA bulletin are ordered by severity, the most severe first."""
    ranges: tuple[AffectedRange, ...]

    def range_of(self, version: str) -> AffectedRange | None:
        """Return the range that contains the version; None if the version is not affected."""
        key = version_key(version)
        return next((item for item in self.ranges if version_key(item.first) <= key < version_key(item.fixed)), None)


@dataclass(frozen=True, kw_only=True)
class Advisories:
    """All advisories, and where they come from."""

    date: str = ""
    """Date of the oldest of the sources: later advisories may be missing."""
    sources: tuple[Mapping[str, str], ...] = ()
    """URL, commit and date of each source."""
    products: Mapping[str, tuple[Advisory, ...]]
    """Key of PRODUCTS -> its advisories, the newest first."""

    def age_days(self, now: str) -> int:
        """Return the number of whole days from `date` to `now` (ISO 8601)."""
        return int((epoch_seconds(now) - epoch_seconds(f"{self.date}T00:00:00Z")) // 86400)


NO_ADVISORIES = Advisories(products={})


@dataclass(frozen=True, kw_only=True)
class MissingFixes:
    """The fixes that a version does not have."""

    product: Product
    version: str
    fixed: str
    """Version to update to, which no known advisory affects: in the same branch if the vendor fixed that branch, else in a later
    one."""
    advisories: tuple[Advisory, ...]
    """The most severe first."""

    @property
    def cves(self) -> tuple[str, ...]:
        """All vulnerabilities, those of the most severe advisory first."""
        return tuple(dict.fromkeys(cve for item in self.advisories for cve in item.cves))

    @property
    def score(self) -> float:
        """The highest CVSS base score; MOST_SEVERE if the source of an advisory states none."""
        return max(MOST_SEVERE if item.score is None else item.score for item in self.advisories)

    def __str__(self) -> str:
        worst, newest = self.advisories[0], max(self.advisories, key=lambda item: item.date)
        more = f" and {len(self.cves) - 1} more" if len(self.cves) > 1 else ""
        rating = f"{worst.severity or 'severity not stated'}{f', CVSS {worst.score:g}' if worst.score else ''}"
        return (
            f"update {self.product.title} {self.version} to {self.fixed} or later: {self.cves[0]}{more} ({rating}); "
            f"{newest.id} of {newest.date}"
        )


def missing_fixes(product: Product, advisories: Iterable[Advisory], text: str) -> MissingFixes | None:
    """Return the fixes that a version does not have; None if it has all, or cannot be compared."""
    match = re.fullmatch(product.pattern, text, re.ASCII)
    if not match:
        return None
    known = list(advisories)
    affecting = [item for item in known if item.range_of(match.group(1))]
    if not affecting:
        return None
    fixed = match.group(1)
    while affected := next(filter(None, (item.range_of(fixed) for item in known)), None):
        fixed = affected.fixed  # the first version with one fix may still lack another
    affecting.sort(key=lambda item: (SEVERITIES.index(item.severity), -(item.score or 0.0)))
    return MissingFixes(
        product=product, version=text, fixed=text[: match.start(1)] + fixed, advisories=tuple(affecting)
    )


def is_comparable(product: Product, text: str) -> bool:
    """Return whether a text has the form of a version of the product. Firmware versions of other vendors have other forms."""
    return re.fullmatch(product.pattern, text, re.ASCII) is not None


def is_vendor_version(product: Product, package: str) -> bool:
    """Return whether the version number of a program shows which fixes of the vendor it has.

    The package of a distribution may have them without a new version number.

    Args:
        product: the program.
        package: value of the reading `product.package`; empty if it was not read.
    """
    return not product.package or package == UNOWNED or package.split(" ")[0] in product.vendor_packages


@cache
def version_key(text: str) -> VersionKey:
    """Return a key by which versions are ordered: `1.3` < `1.3.0-rc.1` < `1.3.0` < `1.10`."""
    parts = re.findall(r"\d+|[a-z]+", text.lower())
    # (0,) marks the end. It sorts after letters (-1, …) and before numbers (1, …): 1.3.0-rc < 1.3.0 < 1.3.0.1.
    return (*((1, int(part)) if part.isdigit() else (-1, part) for part in parts), (0,))


@cache
def shipped_advisories() -> Advisories:
    """Return the advisories that come with this version of Rackproof."""
    return advisories_from(json.loads(PATH.read_text(encoding="utf-8")))


def advisories_from(document: Mapping[str, Any]) -> Advisories:
    """Return the advisories of a document in the form of advisories.json."""
    return Advisories(
        date=document["date"],
        sources=tuple(document["sources"]),
        products={key: tuple(map(_advisory, items)) for key, items in document["products"].items()},
    )


def _advisory(item: Mapping[str, Any]) -> Advisory:
    ranges = tuple(AffectedRange(**each) for each in item["ranges"])
    return Advisory(**{**item, "cves": tuple(item["cves"]), "ranges": ranges})
