"""The pairs that were measured, who is suspected for them, and the few sums that both need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GPU, NIC, RAIL, HOST, LINK, FABRIC = "gpu", "nic", "rail", "host", "link", "fabric"
KINDS = (GPU, NIC, RAIL, HOST, LINK, FABRIC)
BANDWIDTH, LATENCY = "bandwidth", "latency"

End = tuple[str, int]
"""A host's end of a rail: its GPU of that number, and the NIC that this GPU uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What two pairs must share to be as fast as each other."""

    across: bool = False
    """Whether their hosts are in two racks."""
    gbps: float = 0.0
    """Line rate of the slower port, by the inventory."""

    def no_slower_than(self, other: Kind) -> bool:
        """Whether a pair of this kind is to be at least as fast as one of the other."""
        return self.across <= other.across and self.gbps >= other.gbps


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """What two hosts measured between their GPUs of one number."""

    a: str
    b: str
    rail: int
    bandwidth: float | None = None
    """B/s each way, both ways at once."""
    latency: float | None = None
    """Seconds of one small exchange."""
    failed: str = ""
    """Why the attempt to measure the pair failed. A pair that was not attempted is left out."""
    kind: Kind = Kind()
    """Pairs are compared with others of their kind, and where too few hosts have such with kinds that are to be no faster."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A part that explains what is slow or failed."""

    kind: str
    """`gpu`, `nic`, `rail`, `host`, `link` or `fabric`."""
    where: str
    """`h3`, `h3 rail 2`, `rail 2`, `h3 - h4`, `h3 - h4 rail 2`; empty for the fabric."""
    confidence: float
    """(s + 1) / (n + 2), where n independent comparisons could have spoken against it and s of them speak for it.

    That is the rule of succession: 0.5 where there is nothing to compare with, so that another explanation is as good; 0.9
    takes 8 of 8.
    """
    evidence: str
    """A sentence: what was compared with what."""
    hosts: tuple[str, ...] = ()
    """Those that the part belongs to, or lies between; none for a rail or the fabric."""
    rails: tuple[int, ...] = ()
    """Empty: all of them."""
    quantity: str = BANDWIDTH
    """By which it was found."""
    found: float | None = None
    """Median of its pairs, B/s or s; None where they failed."""
    usual: float | None = None
    """Median of the pairs that nothing is wrong with."""
    limit: float | None = None
    """Beyond this a pair counts as slow."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The share of speed that may be missing before a part counts as slow, where noise alone does not explain more."""

    bandwidth: float = 0.12
    latency: float = 0.5
    """Of 1 / latency: 0.5 is twice the time."""
    sigmas: float = 6
    """Of noise that a part must be out of line by: a quarter of a million pairs bring one false alarm in four thousand runs."""


def rule_of_succession(agreeing: int, compared: int) -> float:
    """(s + 1) / (n + 2)."""
    return (agreeing + 1) / (compared + 2)


def upper_median(values: Iterable[float]) -> float:
    """Return the median, the upper one of an even number of values. Raise IndexError if there are none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def spread(values: Sequence[float], centre: float) -> float:
    """Return a standard deviation from the median distance to the centre, which tolerates wrong values in up to half.

    Of an even number of distances the lower of the two in the middle: half of the values may be out of line.
    """
    distances = sorted(abs(value - centre) for value in values)
    return 1.4826 * distances[(len(distances) - 1) // 2] if distances else 0.0
