"""Types of the pair matrix (the measurements between every two hosts): pairs and suspects. Also statistics to find suspects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GPU, NIC, RAIL, SWITCH, HOST, LINK, FABRIC = "gpu", "nic", "rail", "switch", "host", "link", "fabric"
BANDWIDTH, LATENCY = "bandwidth", "latency"

End = tuple[str, int]
"""One end of a pair: host and rail. Between GPUs, rail 0 is the first GPU under test of the host, with its NIC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairKind:
    """The properties that two pairs must share for their speeds to be comparable."""

    across: bool = False
    """Whether the two hosts are in different racks."""
    gbps: float = 0.0
    """Line rate of a fabric port in Gbit/s, according to the inventory: that of the host with the slower ports."""

    def must_match_speed_of(self, other: PairKind) -> bool:
        """Return whether a pair of this kind must be at least as fast as a pair of the other kind."""
        return self.across <= other.across and self.gbps >= other.gbps


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The measurements between the GPUs, or the RDMA ports, of one rail on two hosts."""

    a: str
    b: str
    rail: int
    bandwidth: float | None = None
    """B/s in one direction. Between GPUs, data flows in both directions at once; between RDMA ports, only in one at a time."""
    latency: float | None = None
    """Seconds of one exchange of a small message; 8 B between GPUs."""
    failed: str = ""
    """Why the measurement failed, or empty. There is no `Pair` for hosts that were not measured with each other."""
    kind: PairKind = PairKind()


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A part that explains slow or failed pairs, or failed launches."""

    kind: str
    """`gpu`, `nic`, `rail`, `switch`, `host`, `link` or `fabric`."""
    where: str
    """`h3`, `h3 rail 2`, `rail 2`, the ID of a switch, `h3 - h4`, `h3 - h4 rail 2`; empty for the fabric."""
    confidence: float
    """(s + 1) / (n + 2), if s of n independent comparisons support the suspicion (rule of succession).

    It is 0.5 if nothing can be compared: then another explanation is equally likely. 8 of 8 comparisons give 0.9.
    """
    evidence: str
    """What was compared, with which result, as text."""
    hosts: tuple[str, ...] = ()
    """The host of the part, both hosts of a link, or the hosts at a switch; empty for a rail or the fabric."""
    rails: tuple[int, ...] = ()
    """The rails of the part; empty for a host or the fabric, and for a link that is slow on all rails."""
    quantity: str = BANDWIDTH
    """The quantity in which the part is slow."""
    measured: float | None = None
    """Median of the part's pairs that did not fail, B/s or s; None if there are none.

    It is also None in a gang of two hosts, and if the suspicion comes from slow collectives or failed launches.
    """
    typical: float | None = None
    """The normal value, B/s or s: that of the best pair of a typical end, because an end is judged by its best pair.

    For a link, the fabric, or an end that is slow with only some partners, it is the value of a typical pair.
    """
    limit: float | None = None
    """A bandwidth (B/s) below this limit, or a latency (s) above it, is slow. It is for the same kind of pair as `typical`."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The limits beyond which a part is slow. The larger of a fixed share and a multiple of the noise applies."""

    bandwidth: float = 0.12
    """Share of the bandwidth that may be missing."""
    latency: float = 0.5
    """Share of 1 / latency that may be missing: 0.5 allows twice the latency."""
    sigmas: float = 6
    """Number of standard deviations of the noise. With 6, one of 4000 runs with 250 000 pairs each has a false alarm."""


def rule_of_succession(agreeing: int, compared: int) -> float:
    return (agreeing + 1) / (compared + 2)


def upper_median(values: Iterable[float]) -> float:
    """Return the median; of an even number of values, the larger one of the middle two. Raise IndexError without values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def spread(values: Sequence[float], center: float) -> float:
    """Return a robust standard deviation (1.4826 × median absolute deviation from `center`), 0 without values.

    If the number of deviations is even, the smaller one of the middle two is used, so that half of the values may be outliers.
    """
    deviations = sorted(abs(value - center) for value in values)
    return 1.4826 * deviations[(len(deviations) - 1) // 2] if deviations else 0.0
