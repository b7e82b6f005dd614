"""Test the localisation of faults in a gang (the hosts of one multi-node launch).

Slow parts are suspected from measurements between pairs of hosts. If a launch fails and the culprit is unknown, probes (launches
of some of the hosts) find the host or link at fault. The judge turns both results into verdicts.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent.gang.culprit import WATCHERS, find_culprit
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.localization import (
    Bisection,
    GroupOutcome,
    Pair,
    PairKind,
    ProbeConclusion,
    Suspect,
    Tolerance,
    find_suspects,
    judge_gangs,
)
from fleet.judge.localization.launches import (
    Attempt,
    gang_attempts,
    hosts_to_exclude,
    is_stuck,
    measurements_of,
    probe_result,
)
from fleet.judge.localization.matrix import BANDWIDTH, rule_of_succession, spread, upper_median
from schemas.catalogue import DURATION
from schemas.plans import Plan
from schemas.records import ERROR, UNSUPPORTED, Culprit, Launch, Observation, Rank, Record
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from tests import builders
from tests.gangs import LOST_STATUS_AGE_S, gang_snapshot
from tests.unit.fleet.judge.small_fleet import pack

RATE, TIME = 100.0, 1.0


def matrix(
    size: int,
    rails: int = 2,
    shares: Mapping[Any, float] | None = None,
    *,
    latencies: Mapping[Any, float] | None = None,
    failed: Mapping[Any, str] | None = None,
    unmeasured: Collection[Any] = (),
    gbps: Mapping[str, float] | None = None,
) -> list[Pair]:
    """Return each pair of the hosts a, b, c … once for each rail. A pair is as fast as its slowest part.

    On rail 1, GPU 1 of a host, with its NIC, exchanges data with GPU 1 of the other host. A part is a host ("a"), a GPU with its
    NIC (("a", 1)), a rail (1), the link between two hosts ("ab"), or that link on one rail (("ab", 1)).

    Args:
        size: number of hosts.
        rails: number of rails.
        shares: slow part -> its bandwidth as a share of the normal one.
        latencies: slow part -> its latency as a multiple of the normal one.
        failed: part -> why the measurement of every pair with this part failed.
        unmeasured: parts. No pair with such a part was measured.
        gbps: host -> line rate of its ports in Gbit/s; the default is 400.
    """
    names = string.ascii_lowercase[:size]
    result = []
    for a, b in itertools.combinations(names, 2):
        for rail in range(rails):
            parts = (a, b, (a, rail), (b, rail), rail, a + b, (a + b, rail))
            if not any(part in unmeasured for part in parts):
                share = min((shares or {}).get(part, 1.0) for part in parts)
                time = max((latencies or {}).get(part, 1.0) for part in parts)
                why = next((failed[part] for part in parts if part in failed), "") if failed else ""
                kind = PairKind(gbps=min((gbps or {}).get(a, 400.0), (gbps or {}).get(b, 400.0)))
                result.append(
                    Pair(
                        a=a,
                        b=b,
                        rail=rail,
                        bandwidth=None if why else RATE * share,
                        latency=None if why else TIME * time,
                        failed=why,
                        kind=kind,
                    )
                )
    return result


def slow_links(host: str, others: str, share: float = 0.5) -> dict[Any, float]:
    """Return link -> share of the normal bandwidth, for the links between `host` and each of `others`."""
    return {"".join(sorted(host + other)): share for other in others}


def slow_except(fast: str, share: float) -> dict[Any, float]:
    """Return link -> share of the normal bandwidth: `share` for each link that `fast` does not list.

    "ab cd" lists the links a - b and c - d. The other links between a, b, c and d get `share`.
    """
    names = sorted(fast.replace(" ", ""))
    return {a + b: share for a, b in itertools.combinations(names, 2) if a + b not in fast.split()}


def slow_rail_1(share: float) -> dict[Any, float]:
    """Return link on rail 1 -> share of the normal bandwidth, for ten hosts: `share` for links of host b, otherwise 0.5."""
    return {(a + b, 1): share if "b" in a + b else 0.5 for a, b in itertools.combinations("abcdefghij", 2)}


def scattered(size: int) -> dict[Any, float]:
    """Return link -> one of three shares of the normal bandwidth, so that each host is fast with some partners only."""
    names = string.ascii_lowercase[:size]
    return {a + b: (1.0, 0.95, 0.9)[(names.index(a) + names.index(b)) % 3] for a, b in itertools.combinations(names, 2)}


def all_fields(suspects: Sequence[Suspect]) -> list[tuple[Any, ...]]:
    """Return the fields of each suspect as a tuple. Numbers are rounded, and the names of its hosts are joined to one text."""
    return [
        (
            item.kind, item.where, round(item.confidence, 3), item.evidence, "".join(item.hosts), item.rails, item.quantity,
            *(None if value is None else round(value, 3) for value in (item.measured, item.typical, item.limit)),
        )
        for item in suspects
    ]  # fmt: skip


# On each rail, a host is judged by its best pair. With eight partners or more, it is judged by its second best pair.
# In the names of the cases, the word "counts" marks this pair. If this pair is slow, the evidence is "at most x %".
# If this pair is fast, the host may still be slow with some of its healthy partners. A host that is slow with three or more of
# them, and with at least half of them, is a suspect with the evidence "about x %".
CASES: dict[str, tuple[list[Pair], dict[str, Any]]] = {
    "all parts are normal": (matrix(4), {}),
    "a host is slow": (matrix(5, shares={"b": 0.5}), {}),
    "a host is slow on its only rail": (matrix(4, 1, {"b": 0.5}), {}),
    "the GPU of the only rail is bad": (matrix(4, 1, {"b": 0.5}), {"failed_alone": {("b", 0): "gpu"}}),
    "a NIC is slow": (matrix(4, shares={("b", 1): 0.5}), {}),
    "a GPU is bad": (matrix(4, shares={("b", 1): 0.5}), {"failed_alone": {("b", 1): "gpu", ("c", 0): "gpu"}}),
    "the port of the only rail is slow in loopback": (matrix(4, 1, {"b": 0.5}), {"failed_alone": {("b", 0): "nic"}}),
    "the port of the only rail is normal in loopback": (matrix(4, 1, {"b": 0.5}), {"normal_alone": [("b", 0), ("c", 0)]}),
    "most rails of a host are slow": (matrix(4, 4, {("b", 0): 0.5, ("b", 1): 0.6, ("b", 3): 0.4}), {}),
    "half of the rails of a host are slow": (matrix(4, 4, {("b", 0): 0.5, ("b", 1): 0.6}), {}),
    "a rail is slow": (matrix(4, 3, {1: 0.5}), {}),
    "a rail is slow, and a NIC on it is slower": (matrix(5, 3, {1: 0.5, ("b", 1): 0.2}), {}),
    "a link is slow": (matrix(5, shares={"bd": 0.5}), {}),
    "a link is slow on one rail": (matrix(5, shares={("bd", 1): 0.5}), {}),
    "a pair failed": (matrix(5, failed={"bd": "gone"}), {}),
    "a pair failed on one rail": (matrix(5, failed={("bd", 0): "gone"}), {}),
    "all pairs of a host failed": (matrix(4, failed={"b": "gone"}), {}),
    "a host has a high latency": (matrix(5, latencies={"b": 4.0}), {}),
    "a NIC has a high latency": (matrix(5, latencies={("b", 0): 4.0}), {}),
    "a host is slow and has a high latency": (matrix(5, shares={"b": 0.5}, latencies={"b": 4.0}), {}),
    "a NIC is slow and its host has a high latency": (matrix(5, shares={("b", 0): 0.5}, latencies={"b": 4.0}), {}),
    "a NIC is slow with most partners": (matrix(7, 1, {"bc": 0.5, "bd": 0.5, "be": 0.5, "bf": 0.5}), {}),
    "a NIC is slow with few partners": (matrix(7, 1, {"bc": 0.5, "bd": 0.5}), {}),
    "six of 28 links are slow": (matrix(8, 1, dict.fromkeys(("ab", "cd", "ef", "gh", "ac", "eg"), 0.5)), {}),
    "five of 28 links are slow": (matrix(8, 1, dict.fromkeys(("ab", "cd", "ef", "gh", "ac"), 0.5)), {}),
    "only the collective is slow": (matrix(4), {"collective_slow": True}),
    "only the collective is slow, a pair is missing": (matrix(4, unmeasured=["ab"]), {"collective_slow": True}),
    "nothing was measured": ([], {"collective_slow": True}),
    "pairs with slower ports are slower":
        (matrix(8, 1, {"e": 0.5, "f": 0.5, "g": 0.5, "h": 0.5}, gbps=dict.fromkeys("efgh", 200.0)), {}),
    "a host is slower than the others, but above the limit": (matrix(5, shares={"b": 0.89}), {}),
    "a host is below the limit": (matrix(5, shares={"b": 0.87}), {}),
    "a host is below the limit of a smaller tolerance": (matrix(5, shares={"b": 0.89}), {"tolerance": Tolerance(bandwidth=0.1)}),
    "the only pair of a host is slow": (matrix(4, 1, {"ab": 0.5}, unmeasured=["ac", "ad"]), {}),
    "two hosts are slow": (matrix(6, 1, {"b": 0.5, "e": 0.3}), {}),
    "the second best of nine pairs of a host counts":
        (matrix(10, 1, {**{"b" + other: 0.5 for other in "cdefghij"}, "ab": 1.0}), {}),
    "two hosts, all rails are normal": (matrix(2), {}),
    "two hosts, only the collective is slow": (matrix(2), {"collective_slow": True}),
    "two hosts, a rail is slow": (matrix(2, 3, {1: 0.5}), {}),
    "two hosts, a rail is slow, and so is its port on one host in loopback":
        (matrix(2, 5, {1: 0.5, 2: 0.6}), {"failed_alone": {("b", 1): "nic", ("a", 0): "gpu", ("a", 1): "gpu"}}),
    "two hosts, the port of the only rail is slow in loopback":
        (matrix(2, 1), {"failed_alone": {("b", 0): "nic"}, "collective_slow": True}),
    "two hosts, a rail has a high latency": (matrix(2, 3, latencies={2: 4.0}), {}),
    "two hosts, a rail failed": (matrix(2, 3, failed={1: "gone"}), {}),
    "two hosts, all rails failed": (matrix(2, failed={"ab": "gone"}), {"collective_slow": True}),
    "a host is exactly at the limit": (matrix(5, shares={"b": 0.88}), {}),
    "a rail is exactly at the limit": (matrix(4, 3, {1: 0.88}), {}),
    "a link is exactly at the limit": (matrix(5, shares={"bd": 0.88}), {}),
    "three hosts, a rail is slow": (matrix(3, 3, {1: 0.5}), {}),
    "one of two rails is slow": (matrix(4, 2, {1: 0.5}), {}),
    "two of three rails of a host are slow": (matrix(4, 3, {("b", 0): 0.5, ("b", 1): 0.6}), {}),
    "the only pair with faster ports is slow": (matrix(5, shares={("de", 1): 0.5}, gbps={"d": 800.0, "e": 800.0}), {}),
    "the only pair with faster ports is faster": (
        [
            replace(pair, bandwidth=2 * RATE) if pair.a + pair.b == "de" else pair
            for pair in matrix(5, gbps={"d": 800.0, "e": 800.0})
        ],
        {},
    ),
    "all pairs failed": (matrix(4, failed={0: "gone", 1: "gone"}), {}),
    "the best of seven pairs of a host counts": (matrix(8, 1, slow_links("b", "cdefgh")), {}),
    "the best of eight pairs of a host is ignored": (matrix(9, 1, slow_links("b", "cdefghi")), {}),
    "the second best of eight pairs of a host counts": (matrix(9, 1, slow_links("b", "defghi")), {}),
    "rails differ in speed, and one NIC is slow": (matrix(5, 4, {0: 0.9, 1: 0.95, 2: 0.97, ("b", 3): 0.8}), {}),
    "a rail is slow, and each host is fastest with one partner":
        (matrix(10, 2, {**slow_except("ab cd ef gh ij", 0.95), 1: 0.5}), {}),
    "a NIC is slow with most partners, and each host is fastest with one partner":
        (matrix(8, 1, {**slow_except("ab cd ef gh", 0.95), **slow_links("b", "cdef")}), {}),
    "a NIC is slow with fewer than half of its partners": (matrix(9, 1, slow_links("b", "cde")), {}),
    "a NIC is slow with half of its healthy partners, and another host is slow":
        (matrix(8, 1, {**slow_links("b", "cde"), "h": 0.5}), {}),
    # Of two hosts that are slow with equally many partners, the one whose name sorts last is the suspect: here e. This explains
    # the slow pair b - e. Only b - f and b - g are left. Two slow links do not make b a suspect, so the links are the suspects.
    "two hosts are slow with three partners each, including each other":
        (matrix(7, 1, {**slow_links("b", "efg"), **slow_links("e", "cd")}), {}),
    # The evidence states on how many hosts the rail is slow. Here a host counts if one of its pairs on the rail is below 68.5 %.
    "a rail is slow, but the pairs of one host reach 68.8 % on it": (matrix(10, 2, slow_rail_1(0.688)), {}),
    "a rail is slow, and the pairs of the fastest host reach 65 % on it": (matrix(10, 2, slow_rail_1(0.65)), {}),
    "a host is slow on one rail, and with most partners on another":
        (matrix(7, 2, {("b", 0): 0.5, **dict.fromkeys([("bc", 1), ("bd", 1), ("be", 1), ("bf", 1)], 0.5)}), {}),
    "pairs scatter, and a host is slow with all partners": (matrix(8, 1, {**scattered(8), "h": 0.8}), {}),
    "six of 300 links are slow": (matrix(25, 1, dict.fromkeys(("ab", "cd", "ef", "gh", "ij", "kl"), 0.5)), {}),
    "a link is slow on one rail and failed on the other":
        (matrix(5, shares={("bd", 0): 0.5}, failed={("bd", 1): "gone"}), {}),
}  # fmt: skip
EXPECTED: dict[str, list[tuple[Any, ...]]] = {
    "the only pair with faster ports is slow": [
        (
            "link", "d - e rail 1", 0.8,
            "bandwidth between d and e is 50 % of the typical value on rail 1; each host reaches normal speed "
            "with at least 3 others",
            "de", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a host is slow": [
        (
            "host", "b", 0.833,
            "bandwidth of b with 4 of 4 healthy hosts is at most 50 % of the typical value on 2 of 2 rails",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a host is slow on its only rail": [
        (
            "host", "b", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "the GPU of the only rail is bad": [
        (
            "gpu", "b rail 0", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on rail 0; the GPU "
            "also failed in tests without other hosts",
            "b", (0,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "the port of the only rail is slow in loopback": [
        (
            "nic", "b rail 0", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on rail 0; the RDMA "
            "port also failed in tests without other hosts",
            "b", (0,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "the port of the only rail is normal in loopback": [
        (
            "nic", "b rail 0", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on rail 0",
            "b", (0,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a NIC is slow": [
        (
            "nic", "b rail 1", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on rail 1; 1 of its "
            "other rails is normal",
            "b", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a GPU is bad": [
        (
            "gpu", "b rail 1", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on rail 1; the GPU "
            "also failed in tests without other hosts",
            "b", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "most rails of a host are slow": [
        (
            "host", "b", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on 3 of 4 rails",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "half of the rails of a host are slow": [
        (
            "nic", "b rail 0", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 50 % of the typical value on rail 0; 2 of its "
            "other rails are normal",
            "b", (0,), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "nic", "b rail 1", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 60 % of the typical value on rail 1; 2 of its "
            "other rails are normal",
            "b", (1,), "bandwidth", 60.0, 100.0, 88.0,
        ),
    ],
    "a rail is slow": [
        (
            "rail", "rail 1", 0.833,
            "bandwidth on rail 1 is 50 % of that of the other rails, on 4 of 4 hosts",
            "", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a rail is slow, and a NIC on it is slower": [
        (
            "rail", "rail 1", 0.857,
            "bandwidth on rail 1 is 50 % of that of the other rails, on 5 of 5 hosts",
            "", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "nic", "b rail 1", 0.833,
            "bandwidth of b with 4 of 4 healthy hosts is at most 40 % of the typical value on rail 1; 2 of its "
            "other rails are normal",
            "b", (1,), "bandwidth", 20.0, 50.0, 44.0,
        ),
    ],
    "a link is slow": [
        (
            "link", "b - d", 0.8,
            "bandwidth between b and d is 50 % of the typical value; each host reaches normal speed with at least 3 others",
            "bd", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a link is slow on one rail": [
        (
            "link", "b - d rail 1", 0.8,
            "bandwidth between b and d is 50 % of the typical value on rail 1; each host reaches normal speed "
            "with at least 3 others",
            "bd", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a pair failed": [
        (
            "link", "b - d", 0.8,
            "exchange between b and d failed (gone); each host reaches normal speed with at least 3 others",
            "bd", (), "bandwidth", None, 100.0, 88.0,
        ),
    ],
    "a pair failed on one rail": [
        (
            "link", "b - d rail 0", 0.8,
            "exchange between b and d failed (gone) on rail 0; each host reaches normal speed with at least 3 others",
            "bd", (0,), "bandwidth", None, 100.0, 88.0,
        ),
    ],
    "all pairs of a host failed": [
        (
            "host", "b", 0.8,
            "b could not exchange data with 3 of 3 healthy hosts on 2 of 2 rails",
            "b", (), "bandwidth", None, 100.0, 88.0,
        ),
    ],
    "a host has a high latency": [
        (
            "host", "b", 0.833,
            "latency of b with 4 of 4 healthy hosts is at least 4 times the typical value on 2 of 2 rails",
            "b", (), "latency", 4.0, 1.0, 2.0,
        ),
    ],
    "a NIC has a high latency": [
        (
            "nic", "b rail 0", 0.833,
            "latency of b with 4 of 4 healthy hosts is at least 4 times the typical value on rail 0; 1 of its "
            "other rails is normal",
            "b", (0,), "latency", 4.0, 1.0, 2.0,
        ),
    ],
    "a host is slow and has a high latency": [
        (
            "host", "b", 0.833,
            "bandwidth of b with 4 of 4 healthy hosts is at most 50 % of the typical value on 2 of 2 rails; "
            "latency of b with 4 of 4 healthy hosts is at least 4 times the typical value on 2 of 2 rails",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a NIC is slow and its host has a high latency": [
        (
            "host", "b", 0.833,
            "latency of b with 4 of 4 healthy hosts is at least 4 times the typical value on 2 of 2 rails",
            "b", (), "latency", 4.0, 1.0, 2.0,
        ),
    ],
    "a NIC is slow with most partners": [
        (
            "host", "b", 0.625,
            "bandwidth of b with 4 of 6 healthy hosts is about 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a NIC is slow with few partners": [
        (
            "link", "b - c", 0.833,
            "bandwidth between b and c is 50 % of the typical value; each host reaches normal speed with at least 4 others",
            "bc", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "b - d", 0.833,
            "bandwidth between b and d is 50 % of the typical value; each host reaches normal speed with at least 4 others",
            "bd", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "six of 28 links are slow": [
        (
            "fabric", "", 0.9,
            "6 of 28 pairs of hosts are slow, without a common host, NIC or rail",
            "", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "five of 28 links are slow": [
        (
            "link", "e - f", 0.875,
            "bandwidth between e and f is 50 % of the typical value; each host reaches normal speed with at least 6 others",
            "ef", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "g - h", 0.875,
            "bandwidth between g and h is 50 % of the typical value; each host reaches normal speed with at least 6 others",
            "gh", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "a - b", 0.857,
            "bandwidth between a and b is 50 % of the typical value; each host reaches normal speed with at least 5 others",
            "ab", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "a - c", 0.857,
            "bandwidth between a and c is 50 % of the typical value; each host reaches normal speed with at least 5 others",
            "ac", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "c - d", 0.857,
            "bandwidth between c and d is 50 % of the typical value; each host reaches normal speed with at least 5 others",
            "cd", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "only the collective is slow": [
        (
            "fabric", "", 0.833,
            "all 4 hosts reach normal speed in pairs (6 pairs compared, 100 % of all), but the collective over "
            "all of them is slow",
            "", (), "bandwidth", None, None, None,
        ),
    ],
    "only the collective is slow, a pair is missing": [
        (
            "fabric", "", 0.833,
            "all 4 hosts reach normal speed in pairs (5 pairs compared, 83 % of all), but the collective over all "
            "of them is slow",
            "", (), "bandwidth", None, None, None,
        ),
    ],
    "a host is below the limit": [
        (
            "host", "b", 0.833,
            "bandwidth of b with 4 of 4 healthy hosts is at most 87 % of the typical value on 2 of 2 rails",
            "b", (), "bandwidth", 87.0, 100.0, 88.0,
        ),
    ],
    "a host is below the limit of a smaller tolerance": [
        (
            "host", "b", 0.833,
            "bandwidth of b with 4 of 4 healthy hosts is at most 89 % of the typical value on 2 of 2 rails",
            "b", (), "bandwidth", 89.0, 100.0, 90.0,
        ),
    ],
    "the only pair of a host is slow": [
        (
            "link", "a - b", 0.5,
            "bandwidth between a and b is 50 % of the typical value; "
            "one of the hosts reaches normal speed with no other healthy host",
            "ab", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "two hosts are slow": [
        (
            "host", "b", 0.833,
            "bandwidth of b with 4 of 4 healthy hosts is at most 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "host", "e", 0.833,
            "bandwidth of e with 4 of 4 healthy hosts is at most 30 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "e", (), "bandwidth", 30.0, 100.0, 88.0,
        ),
    ],
    "the second best of nine pairs of a host counts": [
        (
            "host", "b", 0.818,
            "bandwidth of b with 8 of 9 healthy hosts is at most 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "two hosts, only the collective is slow": [
        (
            "link", "a - b", 0.5,
            "the collective is slow: with two hosts, the cause may be a, b or the link between them",
            "ab", (), "bandwidth", None, None, None,
        ),
    ],
    "two hosts, a rail is slow": [
        (
            "link", "a - b rail 1", 0.5,
            "bandwidth is 50 % of that of the other rails: with two hosts, the cause may be a, b or the link between them",
            "ab", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "two hosts, a rail is slow, and so is its port on one host in loopback": [
        (
            "nic", "b rail 1", 0.667,
            "on rail 1: bandwidth is 50 % of that of the other rails; the RDMA port also failed in tests without other hosts",
            "b", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "a - b rail 2", 0.5,
            "bandwidth is 60 % of that of the other rails: with two hosts, the cause may be a, b or the link between them",
            "ab", (2,), "bandwidth", 60.0, 100.0, 88.0,
        ),
    ],
    "two hosts, the port of the only rail is slow in loopback": [
        (
            "nic", "b rail 0", 0.667,
            "on rail 0: the collective is slow; the RDMA port also failed in tests without other hosts",
            "b", (0,), "bandwidth", None, None, None,
        ),
    ],
    "two hosts, a rail has a high latency": [
        (
            "link", "a - b rail 2", 0.5,
            "latency is 4 times that of the other rails: with two hosts, the cause may be a, b or the link between them",
            "ab", (2,), "latency", 4.0, 1.0, 2.0,
        ),
    ],
    "two hosts, a rail failed": [
        (
            "link", "a - b rail 1", 0.5,
            "failed (gone): with two hosts, the cause may be a, b or the link between them",
            "ab", (1,), "bandwidth", None, None, None,
        ),
    ],
    "two hosts, all rails failed": [
        (
            "link", "a - b", 0.5,
            "failed (gone): with two hosts, the cause may be a, b or the link between them",
            "ab", (), "bandwidth", None, None, None,
        ),
    ],
    "three hosts, a rail is slow": [
        (
            "rail", "rail 1", 0.8,
            "bandwidth on rail 1 is 50 % of that of the other rails, on 3 of 3 hosts",
            "", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "one of two rails is slow": [
        (
            "rail", "rail 1", 0.833,
            "bandwidth on rail 1 is 50 % of that of the other rails, on 4 of 4 hosts",
            "", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "two of three rails of a host are slow": [
        (
            "host", "b", 0.8,
            "bandwidth of b with 3 of 3 healthy hosts is at most 60 % of the typical value on 2 of 3 rails",
            "b", (), "bandwidth", 55.0, 100.0, 88.0,
        ),
    ],
    "the best of seven pairs of a host counts": [
        (
            "host", "b", 0.778,
            "bandwidth of b with 6 of 7 healthy hosts is about 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "the best of eight pairs of a host is ignored": [
        (
            "host", "b", 0.8,
            "bandwidth of b with 7 of 8 healthy hosts is at most 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "the second best of eight pairs of a host counts": [
        (
            "host", "b", 0.7,
            "bandwidth of b with 6 of 8 healthy hosts is about 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "rails differ in speed, and one NIC is slow": [
        (
            "nic", "b rail 3", 0.833,
            "bandwidth of b with 4 of 4 healthy hosts is at most 82 % of the typical value on rail 3; 3 of its "
            "other rails are normal",
            "b", (3,), "bandwidth", 80.0, 97.0, 85.36,
        ),
    ],
    "a rail is slow, and each host is fastest with one partner": [
        (
            "rail", "rail 1", 0.917,
            "bandwidth on rail 1 is 53 % of that of the other rails, on 10 of 10 hosts",
            "", (1,), "bandwidth", 50.0, 95.0, 83.6,
        ),
    ],
    "a NIC is slow with most partners, and each host is fastest with one partner": [
        (
            "host", "b", 0.556,
            "bandwidth of b with 4 of 7 healthy hosts is about 53 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 95.0, 83.6,
        ),
    ],
    "a NIC is slow with fewer than half of its partners": [
        (
            "link", "b - c", 0.857,
            "bandwidth between b and c is 50 % of the typical value; each host reaches normal speed with at least 5 others",
            "bc", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "b - d", 0.857,
            "bandwidth between b and d is 50 % of the typical value; each host reaches normal speed with at least 5 others",
            "bd", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "b - e", 0.857,
            "bandwidth between b and e is 50 % of the typical value; each host reaches normal speed with at least 5 others",
            "be", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a NIC is slow with half of its healthy partners, and another host is slow": [
        (
            "host", "h", 0.875,
            "bandwidth of h with 6 of 6 healthy hosts is at most 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "h", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "host", "b", 0.5,
            "bandwidth of b with 3 of 6 healthy hosts is about 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "two hosts are slow with three partners each, including each other": [
        (
            "link", "b - f", 0.8,
            "bandwidth between b and f is 50 % of the typical value; each host reaches normal speed with at least 3 others",
            "bf", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "b - g", 0.8,
            "bandwidth between b and g is 50 % of the typical value; each host reaches normal speed with at least 3 others",
            "bg", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "host", "e", 0.5,
            "bandwidth of e with 3 of 6 healthy hosts is about 50 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "e", (), "bandwidth", 75.0, 100.0, 88.0,
        ),
    ],
    "a rail is slow, but the pairs of one host reach 68.8 % on it": [
        (
            "rail", "rail 1", 0.833,
            "bandwidth on rail 1 is 50 % of that of the other rails, on 9 of 10 hosts",
            "", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a rail is slow, and the pairs of the fastest host reach 65 % on it": [
        (
            "rail", "rail 1", 0.917,
            "bandwidth on rail 1 is 50 % of that of the other rails, on 10 of 10 hosts",
            "", (1,), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a host is slow on one rail, and with most partners on another": [
        (
            "host", "b", 0.875,
            "bandwidth of b with 6 of 6 healthy hosts is about 50 % of the typical value on 2 of 2 rails",
            "b", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "pairs scatter, and a host is slow with all partners": [
        (
            "host", "h", 0.889,
            "bandwidth of h with 7 of 7 healthy hosts is at most 80 % of the typical value on its only rail: the "
            "cause may be its GPU or NIC",
            "h", (), "bandwidth", 80.0, 100.0, 88.0,
        ),
    ],
    "six of 300 links are slow": [
        (
            "link", "a - b", 0.96,
            "bandwidth between a and b is 50 % of the typical value; each host reaches normal speed with at least 23 others",
            "ab", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "c - d", 0.96,
            "bandwidth between c and d is 50 % of the typical value; each host reaches normal speed with at least 23 others",
            "cd", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "e - f", 0.96,
            "bandwidth between e and f is 50 % of the typical value; each host reaches normal speed with at least 23 others",
            "ef", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "g - h", 0.96,
            "bandwidth between g and h is 50 % of the typical value; each host reaches normal speed with at least 23 others",
            "gh", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "i - j", 0.96,
            "bandwidth between i and j is 50 % of the typical value; each host reaches normal speed with at least 23 others",
            "ij", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
        (
            "link", "k - l", 0.96,
            "bandwidth between k and l is 50 % of the typical value; each host reaches normal speed with at least 23 others",
            "kl", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
    "a link is slow on one rail and failed on the other": [
        (
            "link", "b - d", 0.8,
            "exchange between b and d failed (gone); each host reaches normal speed with at least 3 others",
            "bd", (), "bandwidth", 50.0, 100.0, 88.0,
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_slow_parts_are_suspected_with_their_evidence(case: str) -> None:
    pairs, options = CASES[case]
    assert all_fields(find_suspects(pairs, **options)) == EXPECTED.get(case, [])
    if len({pair.a for pair in pairs}) > 1:
        reordered = all_fields(find_suspects(pairs[::-1], **options))
        assert sorted(map(str, reordered)) == sorted(map(str, EXPECTED.get(case, [])))
    slower = [
        replace(
            pair, bandwidth=pair.bandwidth and pair.bandwidth / 2**20, latency=pair.latency and pair.latency * 2**20
        )
        for pair in pairs
    ]
    assert [item[:7] for item in all_fields(find_suspects(slower, **options))] == [
        item[:7] for item in EXPECTED.get(case, [])
    ]


@pytest.mark.parametrize("case", CASES)
def test_measured_value_of_a_suspect_is_beyond_its_limit(case: str) -> None:
    pairs, options = CASES[case]
    for suspect in find_suspects(pairs, **options):
        if suspect.measured is not None and suspect.limit is not None and suspect.typical is not None:
            sign = -1 if suspect.quantity == BANDWIDTH else 1
            assert sign * suspect.measured > sign * suspect.limit > sign * suspect.typical


def test_gpu_of_two_hosts_is_no_suspect_if_its_exchange_is_as_fast_as_that_of_the_others() -> None:
    """Only the collective is slow. With a single rail, it is not known whether the exchange of the GPU is normal."""
    failed: dict[Any, str] = {("b", 0): "gpu"}
    for rails, expected in ((1, "gpu"), (2, "link")):
        (suspect,) = find_suspects(matrix(2, rails), failed_alone=failed, collective_slow=True)
        assert suspect.kind == expected
    (suspect,) = find_suspects(matrix(2, 2), failed_alone={("b", 0): "nic"}, collective_slow=True)
    assert suspect.kind == "nic"


def test_figures_of_a_link_of_two_hosts_are_those_of_its_slowest_rail() -> None:
    (link,) = find_suspects(matrix(2, 5, latencies={1: 4.0, 2: 8.0}))
    assert (link.measured, link.quantity) == (8.0, "latency")
    (link,) = find_suspects(matrix(2, 5, {1: 0.1}, latencies={2: 4.0}))
    assert (link.measured, link.quantity) == (10.0, "bandwidth")


def test_link_of_two_hosts_is_suspected_if_all_rails_are_slower_than_healthy_ports() -> None:
    """No rail is slower than the others, so only the known rate of the ports shows that the link is slow."""
    kind = PairKind(gbps=400.0)
    assert find_suspects(matrix(2, 2), least={kind: RATE}) == []
    (link,) = find_suspects(matrix(2, 2), least={kind: 2 * RATE})
    assert (link.kind, link.where, link.measured, link.typical, link.limit) == ("link", "a - b", RATE, None, 2 * RATE)
    assert link.evidence.startswith("bandwidth is 50 % of the lowest rate of healthy ports: ")


def test_link_failed_on_several_rails_shows_the_first_reason() -> None:
    pairs = matrix(5, 3, failed={("ad", 1): "gone", ("ad", 2): "lost"})
    (link,), (reordered,) = find_suspects(pairs), find_suspects(pairs[::-1])
    assert (reordered.where, reordered.rails) == (link.where, link.rails)
    assert (link.where, link.rails) == ("a - d rails 1, 2", (1, 2))
    assert link.evidence.startswith(
        "exchange between a and d failed (gone) on rails 1, 2; each host reaches normal speed with at least 3"
    )


def test_upper_median_spread_and_rule_of_succession_are_computed() -> None:
    assert [upper_median(values) for values in ([1.0], [1.0, 2.0], [3.0, 1.0, 2.0], [4.0, 1.0, 2.0, 3.0])] == [
        1,
        2,
        2,
        3,
    ]
    assert spread([], 0.0) == 0.0
    assert spread([1.0, 2.0, 9.0], 1.0) == pytest.approx(1.4826)
    assert spread([1.0, 2.0, 9.0, 9.0], 0.0) == pytest.approx(1.4826 * 2)
    assert [rule_of_succession(*counts) for counts in ((0, 0), (8, 8), (1, 4))] == [0.5, 0.9, pytest.approx(1 / 3)]


# Bisection: which groups of hosts to launch next


PAIRS = ["".join(pair) for pair in itertools.combinations("abcdef", 2)]


def run_bisection(
    size: int,
    bad: Collection[str] = (),
    links: Collection[str] = (),
    max_hosts: int = 0,
    failing_group: int | None = None,
) -> tuple[ProbeConclusion, int]:
    """Launch the groups that `Bisection` requests until it has a conclusion. Return the conclusion and the number of launches.

    A launch starts several groups of hosts at the same time. A group fails if it has a host in `bad`, both hosts of a link in
    `links` ("ab"), or more than `max_hosts` hosts (0: no maximum).

    The group with the number `failing_group` also fails, by chance. Groups are numbered from 0 across all launches. A group that
    is launched again gets a new number, so it does not fail by chance again.
    """
    names = list("abcdefghijklmnop"[:size])

    def works(group: Sequence[str]) -> bool:
        pairs = {a + b for a, b in itertools.combinations(sorted(group), 2)}
        return not set(group) & set(bad) and not pairs & set(links) and (not max_hosts or len(group) <= max_hosts)

    history: list[list[GroupOutcome]] = []
    planner, launched = Bisection(names), itertools.count()
    for _ in range(60):
        result = planner.next_launches(history)
        if isinstance(result, ProbeConclusion):
            assert result.launches == len(history)
            return result, len(history)
        assert len({host for group in result for host in group}) == sum(map(len, result))
        history.append(
            [
                GroupOutcome(hosts=tuple(group), worked=next(launched) != failing_group and works(group))
                for group in result
            ]
        )
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8])
def test_bisection_finds_the_bad_host_at_every_position(size: int) -> None:
    for count in range(1, min(3, size - 1)):
        for bad in itertools.combinations("abcdefgh"[:size], count):
            result, launches = run_bisection(size, bad)
            assert launches <= 4 + 2 * count
            assert sorted(item.where for item in result.suspects) == list(bad)
            assert set(result.good) == set("abcdefgh"[:size]) - set(bad)
            for item in result.suspects:
                assert (item.kind, item.confidence, item.hosts) == ("host", 0.75, (item.where,))
                assert item.evidence == f"{item.where} fails with each of 2 hosts that work without it"


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 11, 16])
def test_bisection_finds_the_bad_link_at_every_position(size: int) -> None:
    for a, b in itertools.combinations("abcdefghijklmnop"[:size], 2):
        result, launches = run_bisection(size, links=[a + b])
        assert launches <= 2 * math.ceil(math.log2(size)) + 6
        (link,) = result.suspects
        assert (link.kind, set(link.hosts)) == ("link", {a, b})
        assert link.where in (f"{a} - {b}", f"{b} - {a}")
        assert link.confidence == 0.75
        assert link.evidence.endswith("fail together twice; each works with another host")
        assert set(result.good) == set("abcdefghijklmnop"[:size])


def test_groups_with_a_known_or_inferred_outcome_are_not_launched() -> None:
    """Two outcomes are inferred: a subset of a working group works, and a superset of a failing group fails."""
    names = list("abcdef")
    groups = Bisection(names).next_launches([])
    assert isinstance(groups, list)
    (first, second, third) = groups
    worked = [GroupOutcome(hosts=(*first, *second), worked=True)]
    assert Bisection(names).next_launches([worked]) == [third]
    # A failure does not end the search. Each pair of a failed group of three may work, so the next launch includes all hosts.
    for size, expected_hosts in ((2, None), (3, "abcdef")):
        failed = [GroupOutcome(hosts=tuple("abc"[:size]), worked=False)]
        groups = Bisection(names).next_launches([failed])
        assert isinstance(groups, list)
        assert expected_hosts is None or {host for group in groups for host in group} == set(expected_hosts)
    working_pair = [GroupOutcome(hosts=("a", "f"), worked=True)]
    groups = Bisection(names).next_launches([working_pair])
    assert isinstance(groups, list)
    assert ["a", "f"] not in [sorted(group) for group in groups]
    # Outcomes of hosts outside the gang are ignored.
    planner = Bisection(["a", "b", "c"])
    conclusion, _ = run_bisection(3, "c")
    assert conclusion.suspects
    assert planner.next_launches([working_pair]) == planner.next_launches([])


def test_bisection_finds_two_bad_links() -> None:
    for size, links in [(8, ("ab", "ac")), (8, ("ag", "bf")), *((6, two) for two in itertools.combinations(PAIRS, 2))]:
        result, _ = run_bisection(size, links=links)
        assert {"".join(sorted(item.hosts)) for item in result.suspects} == {*links}
        assert {item.kind for item in result.suspects} == {"link"}


def test_link_that_worked_and_then_failed_is_launched_again() -> None:
    history = [[GroupOutcome(hosts=("a", "b"), worked=worked)] for worked in (True, False)]
    history.append([GroupOutcome(hosts=pair, worked=True) for pair in (("c", "d"), ("a", "c"), ("b", "d"))])
    planner = Bisection("abcd")
    while isinstance(groups := planner.next_launches(history), list) and groups != [["a", "b"]]:
        history.append([GroupOutcome(hosts=tuple(group), worked=not {"a", "b"} <= set(group)) for group in groups])
    assert groups == [["a", "b"]]


def test_inconclusive_bisection_suspects_link_or_fabric() -> None:
    two, launches = run_bisection(2, links=["ab"])
    assert launches == 0
    assert [(item.kind, item.where, item.confidence) for item in two.suspects] == [("link", "a - b", 0.5)]
    assert (
        two.suspects[0].evidence == "a and b fail together; the fault may be in either host or in the link between them"
    )
    assert run_bisection(1)[0] == ProbeConclusion(suspects=(), good=(), launches=0)
    no_host, _ = run_bisection(4, bad="abcd")
    assert [(item.kind, item.evidence) for item in no_host.suspects] == [
        ("fabric", "no two of the 4 hosts work together")
    ]
    assert (no_host.suspects[0].confidence, no_host.suspects[0].where) == (0.5, "")
    pairs_only, _ = run_bisection(6, max_hosts=2)
    assert [item.kind for item in pairs_only.suspects] == ["fabric"]
    assert pairs_only.suspects[0].evidence.endswith(
        "works with another host, but a group that includes all of them fails"
    )


def test_bisection_finds_a_bad_host_and_a_bad_link_of_one_gang() -> None:
    both, _ = run_bisection(7, bad=["c"], links=["af"])
    assert {(item.kind, *sorted(item.hosts)) for item in both.suspects} == {("host", "c"), ("link", "a", "f")}


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("bad", ["", "b"])
def test_group_that_fails_by_chance_makes_no_healthy_host_suspect(size: int, bad: str) -> None:
    """One group fails by chance. If it has no bad host, it works when it is launched again."""
    for failing_group in range(12):
        result, _ = run_bisection(size, bad, failing_group=failing_group)
        named = [item.where for item in result.suspects if item.kind != "fabric"]
        assert named == list(bad) or (size == 3 and not named), "with three hosts, the search may name no host"


# The outcome of each launch of a gang, combined from the records of its hosts

NAMES = ("h1", "h2", "h3", "h4")


def gang_plan(*names: str) -> Plan:
    """Return a plan of one gang. The only measurement that it expects is `pairs.bandwidth` of each pair of hosts."""
    plan = builders.plan(*(names or NAMES), profile="smoke", gpu_count=1)
    kept = [item for item in plan.expected if item.stage == "gang" and item.name == "pairs.bandwidth"]
    return replace(plan, expected=tuple(kept))


PLAN = gang_plan()
RANKS = (Rank(rank=0, local_rank=0, phase="end", exit_code=0, log_tail=""),)
GANG = "r1"


def launch(number: int = 0, members: Sequence[str] = NAMES, outcome: str = "finished", **over: Any) -> Launch:
    base = builders.launch(
        over.pop("stage", "gang"), tuple(members), outcome, "" if outcome == "finished" else "it ended"
    )
    return replace(base, **{"number": number, "ranks": RANKS, **over})


def culprit(kind: str, *hosts: str, scope: str = "") -> Culprit:
    return Culprit(kind=kind, hosts=hosts, text=f"{' and '.join(hosts)} failed", scope=scope)


def record(host: str, *launches: Launch, observations: Sequence[Observation] = ()) -> Record:
    """Return the gang record of a host."""
    return replace(builders.records(PLAN, host)[1], launches=launches, observations=tuple(observations))


def speeds(host: str, share: float = 1.0, slow: Collection[str] = ()) -> list[Observation]:
    """Return the bandwidth of each pair that `host` is in: 1 GB/s, or `share` of that if one host of the pair is in `slow`."""
    return [
        builders.observation("pairs.bandwidth", 1e9 * (share if other in slow or host in slow else 1.0), stage="gang",
                             scope=f"gpu=0,partner={other}", unit="B/s")
        for other in NAMES if other != host
    ]  # fmt: skip


def evidence(records: Mapping[str, Record]) -> Any:
    """Return the evidence of all hosts: their host records, and these gang records."""
    return {
        name: replace(item, records=(item.records[0], *([records[name]] if name in records else [])))
        for name, item in builders.evidence(PLAN).items()
    }


def attempts_of(records: Mapping[str, Record]) -> list[Attempt]:
    return gang_attempts(PLAN, evidence(records), GANG)


def attempt_of(*launches: Launch, observations: Sequence[Observation] = ()) -> Attempt:
    """Return the last attempt: a launch or probe, combined from the records of its hosts.

    h1 recorded the first of `launches`, h2 the second, and so on. Each host also recorded `observations`.
    """
    return attempts_of(
        {name: record(name, each, observations=observations) for name, each in zip(NAMES, launches, strict=False)}
    )[-1]


DONE = [
    builders.observation(DURATION.name, 1.0, unit="s", stage="gang", benchmark=name)
    for name in ("collective", "pairs", "training", "straggler")
]
"""Observations of a host that completed all joint benchmarks."""


def test_attempt_combines_the_records_of_its_hosts() -> None:
    first, again = launch(0, outcome="failed"), launch(1, NAMES[:3])
    result = attempts_of(
        {name: record(name, first, again, observations=speeds(name)) for name in NAMES[:3]}
        | {"h4": record("h4", first)}
    )
    assert [(each.number, each.members, sorted(each.launches)) for each in result] == [
        (0, NAMES, [*NAMES]), (1, NAMES[:3], [*NAMES[:3]])
    ]  # fmt: skip
    assert {name: len(observed) for name, observed in result[1].observations.items()} == {"h1": 3, "h2": 3, "h3": 3}
    assert all(not observed for observed in result[0].observations.values())
    assert [
        each.stage for each in attempts_of({"h1": record("h1", launch(stage="benchmark"), launch(2, stage="probe"))})
    ] == ["probe"]
    assert attempts_of({}) == []


@pytest.mark.parametrize(
    ("launches", "observed", "finished_complete_worked"),
    [
        ((launch(), launch()), DONE, (True, True, False)), ((launch(), launch()), [], (True, False, False)),
        ((launch(), launch()), speeds("h1"), (True, False, True)), ((launch(), launch()), DONE[:1], (True, False, False)),
        ((launch(), launch(outcome="failed")), DONE, (False, False, False)),
        ((launch(), launch()), [replace(each, status=ERROR, value=None, reason="x") for each in speeds("h1")],
         (True, False, False)),
        ((launch(), launch()), [builders.observation("straggler.compute", 1.0, stage="gang")], (True, False, True)),
    ],
)  # fmt: skip
def test_launch_works_if_it_finished_with_measurements(
    launches: Any, observed: Any, finished_complete_worked: tuple[bool, bool, bool]
) -> None:
    """The durations in DONE complete a launch, but they are not measurements of its benchmarks."""
    attempt = attempt_of(*launches, observations=observed)
    assert (attempt.finished, attempt.complete, attempt.worked) == finished_complete_worked
    assert is_stuck(attempt) is not attempt.worked


def test_probe_works_if_it_completed_its_benchmark() -> None:
    done = builders.observation(DURATION.name, 1.0, unit="s", stage="probe", benchmark="collective")
    for observed in ([], [done]):
        result = attempt_of(
            launch(1, NAMES[:2], stage="probe"), launch(1, NAMES[:2], stage="probe"), observations=observed
        )
        assert result.stage == "probe"
        assert result.worked is (result.complete and bool(observed))
        assert not is_stuck(result)


@pytest.mark.parametrize(
    ("reports", "culprits", "certain"),
    [
        ((None, None), {}, []), ((culprit("rank_lost", "h2"),) * 2, ["h2"], ["h2"]),
        ((culprit("host_lost", "h2"),) * 2, ["h2"], ["h2"]),
        ((culprit("host_lost", "h1", "h2"),) * 2, ["h1", "h2"], []),
        ((culprit("rank_lost", "h1", "h2"),) * 2, ["h1", "h2"], ["h1", "h2"]),
        ((culprit("rank_lost", *NAMES),) * 2, [], [*NAMES]),
        ((culprit("rank_lost", "h2"), culprit("rank_lost", "h3"), culprit("rank_lost", "h3")), ["h3"], ["h3"]),
        ((culprit("host_absent", "h4"),) * 2, ["h4"], []), ((culprit("host_absent", "h2"),) * 2, ["h2"], ["h2"]),
    ],
)  # fmt: skip
def test_reports_of_the_hosts_determine_culprits_and_certainty(
    reports: Sequence[Culprit | None], culprits: Any, certain: Any
) -> None:
    result = attempt_of(*(launch(outcome="failed", culprit=each) for each in reports))
    assert [*result.culprits()] == [*culprits]
    hosts = [host for each in [result.culprit] if each for host in each.hosts]
    assert [host for host in hosts if result.is_certain(host)] == certain
    assert not result.is_certain("h9") or result.culprit
    assert is_stuck(result) is not bool(culprits)


@pytest.mark.parametrize("kind", ["rank_ended", "rank_behind", "host_silent", "host_absent", "cut_off"])
def test_host_that_completed_the_launch_is_no_culprit_even_if_another_host_names_it(kind: str) -> None:
    report = culprit(kind, "h2")
    forged = attempt_of(launch(outcome="failed", culprit=report), launch(), launch(), observations=DONE)
    assert forged.culprits() == {}
    failed_too = attempt_of(launch(outcome="failed", culprit=report), launch(outcome="failed"), observations=DONE)
    assert [*failed_too.culprits()] == ["h2"]
    if kind != "cut_off":  # a cut_off report does not count against a host that finished
        incomplete = attempt_of(launch(outcome="failed", culprit=report), launch(), observations=DONE[:1])
        assert [*incomplete.culprits()] == ["h2"], "h2 did not complete every benchmark, so the report counts"


def lost_contact_attempt(size: int, states: Mapping[str, str]) -> Attempt:
    """Return a launch in which hosts lose contact.

    `states`: host -> "dead" (it leaves no record), "cut" (its link is down, but it leaves a record) or "" (healthy).

    All hosts send their status to the watchers (the first two hosts). Each host asks the first watcher that it can reach, and
    records the culprit that this watcher determined. A host that reaches no watcher determines the culprit itself.
    """
    members = tuple(f"h{number}" for number in range(1, size + 1))
    verdicts: dict[str, Culprit | None] = {}
    for name in members:
        reachable = {other for other in members if not states[name] and not states[other]} | {name}
        ages = {other: LOST_STATUS_AGE_S for other in members if other not in reachable}
        decider = next((watcher for watcher in members[:WATCHERS] if watcher in reachable), name)
        verdicts[name] = (
            verdicts[decider] if decider in verdicts else find_culprit(gang_snapshot(me=name, hosts=size, ages=ages))
        )
    launches = {
        host: launch(0, members, "failed" if any(states.values()) else "finished", culprit=verdicts[host])
        for host in members
        if states[host] != "dead"
    }
    return Attempt(gang="r1", number=0, stage="gang", members=members, launches=launches, observations={},
                   joint_benchmarks=frozenset())  # fmt: skip


@pytest.mark.parametrize("size", [3, 4, 6])
def test_lost_contact_makes_no_healthy_host_a_certain_culprit(size: int) -> None:
    """Every combination of healthy, dead and cut-off hosts is tried, also those in which both watchers or all hosts are lost."""
    for combination in itertools.product(("", "cut", "dead"), repeat=size):
        states = {f"h{number}": state for number, state in enumerate(combination, 1)}
        attempt = lost_contact_attempt(size, states)
        lost = {host for host, state in states.items() if state}
        certain = {host for host in attempt.culprits() if attempt.is_certain(host)}
        assert certain <= lost, states
        if len(lost) == 1:
            assert certain == lost, states
        if 2 * (size - len(lost)) > size:
            assert set(attempt.culprits()) <= lost, states


@pytest.mark.parametrize(("size", "certain"), [(3, []), (4, []), (5, ["h1", "h2"]), (8, ["h1", "h2"])])
def test_remaining_hosts_name_both_watchers_if_both_are_lost(size: int, certain: list[str]) -> None:
    states = {f"h{number}": "dead" if number <= 2 else "" for number in range(1, size + 1)}
    attempt = lost_contact_attempt(size, states)
    assert [*attempt.culprits()] == ["h1", "h2"]
    assert [host for host in attempt.culprits() if attempt.is_certain(host)] == certain
    assert len({launch.culprit for launch in attempt.launches.values()}) == 1, (
        "every remaining host must record the same culprit"
    )


def test_probes_search_for_the_fault_if_no_host_can_reach_another() -> None:
    assert is_stuck(lost_contact_attempt(6, {f"h{number}": "cut" for number in range(1, 7)}))


def test_watchers_that_finished_are_no_culprits_even_if_a_host_that_lost_contact_names_them() -> None:
    reports = [launch(), launch(), launch(outcome="failed", culprit=culprit("cut_off", "h1", "h2")), launch()]
    assert is_stuck(attempt_of(*reports))


def test_hosts_that_each_name_only_themselves_as_cut_off_are_no_culprits() -> None:
    """In records of version 1.0, a host that lost contact with both watchers names itself."""
    reports = {name: record(name, launch(outcome="failed", culprit=culprit("cut_off", name))) for name in NAMES[2:]}
    (attempt,) = attempts_of(reports)
    assert attempt.culprits() == {}


def test_host_that_started_no_rank_is_the_only_culprit() -> None:
    none = launch(outcome="failed", ranks=(), reason="no GPU")
    result = attempt_of(launch(outcome="failed", culprit=culprit("host_absent", "h2")), none)
    assert result.start_failures == {"h2": "no GPU"}
    assert result.culprits() == {"h2": "no GPU"}
    assert not result.is_certain("h2")
    assert not result.was_partly_started(NAMES)
    assert attempt_of(launch(ranks=())).start_failures == {}


def test_host_with_a_rank_that_cannot_take_part_is_a_culprit() -> None:
    """h2 has such a rank, and the other hosts finish without measurements. It is not certain that the fault is on h2."""
    finished, failed = launch(), launch(outcome="failed", culprit=culprit("rank_unable", "h2"))
    result = attempt_of(finished, failed, finished)
    assert [*result.culprits()] == ["h2"]
    assert result.culprit is None
    assert not result.is_certain("h2")
    assert not result.worked
    assert not is_stuck(result)
    both = attempt_of(finished, failed, launch(outcome="failed", culprit=culprit("rank_unable", "h3")))
    assert [*both.culprits()] == ["h2", "h3"], "each host reports itself"
    silent_rank = attempt_of(launch(outcome="failed", culprit=culprit("rank_silent", "h1")), failed)
    assert sorted(silent_rank.culprits()) == ["h1", "h2"], (
        "the report of h2 on itself does not explain why the rank of h1 is silent"
    )
    assert (silent_rank.is_certain("h1"), silent_rank.is_certain("h2")) == (True, False)
    absent = attempt_of(launch(outcome="failed", culprit=culprit("host_absent", "h4")), failed)
    assert [*absent.culprits()] == ["h2"], "h4 may merely start late"


@pytest.mark.parametrize(
    ("culprit", "present", "is_partly_started"),
    [
        (culprit("host_absent", "h4"), NAMES, True), (culprit("host_absent", "h4"), NAMES[:3], False),
        (culprit("host_absent", "h3", "h4"), NAMES, True), (culprit("host_absent", "h2", "h4"), NAMES, False),
        (culprit("host_lost", "h4"), NAMES, False), (None, NAMES, False),
    ],
)  # fmt: skip
def test_launch_that_was_not_started_everywhere_is_recognized(
    culprit: Culprit | None, present: Sequence[str], is_partly_started: bool
) -> None:
    """`present`: the hosts that can be reached. Only h1 and h2 have a record of the launch."""
    attempt = attempt_of(*(launch(outcome="failed", culprit=culprit) for _ in range(2)))
    assert attempt.was_partly_started(present) is is_partly_started


def test_measurements_are_attributed_to_their_launch() -> None:
    kept = tuple(speeds("h1"))
    first, second = launch(0, observations=kept), launch(1)
    host_record = record("h1", first, second, observations=DONE)
    assert measurements_of(host_record, first) == kept
    assert measurements_of(host_record, second) == tuple(DONE)
    # The last launch started no rank. The observations of the record are attributed to this launch and to the one before it.
    none = launch(2, ranks=(), outcome="failed")
    host_record = record("h1", first, second, none, observations=DONE)
    assert (measurements_of(host_record, second), measurements_of(host_record, none)) == (tuple(DONE), tuple(DONE))
    assert measurements_of(record("h1", second, observations=[replace(DONE[0], stage="benchmark")]), second) == ()


def probe(number: int, *groups: tuple[str, bool]) -> list[Launch]:
    """Return the probes of one round.

    `groups`: for each probe, the digits of its hosts ("12": h1 and h2), and whether the probe works.
    """
    return [
        launch(number, [f"h{at}" for at in group], "finished" if worked else "failed", stage="probe")
        for group, worked in groups
    ]


def attempts_with_probes(*rounds: list[Launch], after: Sequence[Launch] = ()) -> list[Attempt]:
    """Return the attempts of a gang: a launch that is stuck, these rounds of probes, and the launches in `after`."""
    done = builders.observation(DURATION.name, 1.0, unit="s", stage="probe", benchmark="collective")
    stuck = launch(0, outcome="failed")
    probes = [replace(item, observations=(done,)) for launches in rounds for item in launches]
    return attempts_of(
        {name: record(name, stuck, *(item for item in (*probes, *after) if name in item.members)) for name in NAMES}
    )


def run_probes(bad: Collection[str], link: str = "") -> tuple[list[list[Launch]], ProbeConclusion]:
    """Run the requested probes until there is a conclusion. Return the launches of each round, and the conclusion.

    `bad`: digits of the bad hosts; `link`: digits of the two hosts that fail only together.
    """
    rounds: list[list[Launch]] = []
    while True:
        gang_attempts = attempts_with_probes(*rounds)
        answer = probe_result(gang_attempts, gang_attempts[0])
        if isinstance(answer, ProbeConclusion):
            return rounds, answer
        groups = ["".join(host.removeprefix("h") for host in group) for group in answer]
        worked = [not set(bad) & set(group) and not (link and set(link) <= set(group)) for group in groups]
        rounds.append(probe(len(rounds) + 1, *zip(groups, worked, strict=True)))


def test_probes_after_a_stuck_launch_find_the_bad_host() -> None:
    rounds, ended = run_probes("4")
    assert len(rounds) <= 4
    assert [(item.kind, item.where) for item in ended.suspects] == [("host", "h4")]
    assert hosts_to_exclude(ended) == {"h4": "h4 fails with each of 2 hosts that work without it"}
    # Probes that follow a second stuck launch explain that launch, not the first one.
    later = [[replace(item, number=item.number + 10) for item in launches] for launches in rounds]
    result = attempts_with_probes(*later, after=[launch(5, outcome="failed")])
    (first, second) = [each for each in result if each.stage == "gang"]
    assert probe_result(result, second) == ended
    assert isinstance(probe_result(result, first), list)


def test_bad_hosts_and_the_second_host_of_a_bad_link_are_excluded() -> None:
    """A link excludes no host if its confidence is only 0.5, or if one of its hosts is excluded already."""
    link = Suspect(kind="link", where="a - b", confidence=0.66, evidence="e", hosts=("a", "b"))
    host = Suspect(kind="host", where="c", confidence=0.75, evidence="f", hosts=("c",))
    for suspects, excluded in (
        ((link,), {"b": "e"}), ((link, host), {"c": "f", "b": "e"}), ((replace(link, confidence=0.5),), {}),
        ((link, replace(host, where="a")), {"a": "f"}), ((replace(host, kind="fabric"),), {}),
    ):  # fmt: skip
        assert hosts_to_exclude(ProbeConclusion(suspects=suspects, good=(), launches=1)) == excluded


# Verdicts


def localise_verdicts(records: Mapping[str, Record], plan: Plan = PLAN) -> list[Verdict]:
    return [item for item in judge(plan, evidence(records), [pack()]) if item.criterion == "localise"]


def summaries(verdicts: Sequence[Verdict]) -> list[tuple[str, str, str, str]]:
    """Return host, scope, name and verdict of each verdict."""
    return [(item.host, item.scope, item.name, item.verdict) for item in verdicts]


def test_hosts_of_a_healthy_gang_pass() -> None:
    verdicts = localise_verdicts({name: record(name, launch(), observations=speeds(name)) for name in NAMES})
    assert summaries(verdicts) == [(name, "gang=r1", "pairs.bandwidth", PASS) for name in NAMES]
    first = verdicts[0]
    assert (first.value, first.limit, first.operator, first.unit) == (1e9, pytest.approx(0.88e9), "ge", "B/s")
    assert (
        first.reason
        == "the median of its 3 pairs is 1 GB/s, and that of all pairs of the gang is 1 GB/s: no part of the host is slow"
    )
    latencies = [replace(each, name="pairs.latency", unit="s", value=2e-6) for each in speeds("h1")]
    verdict = localise_verdicts(
        {name: record(name, launch(), observations=latencies if name == "h1" else ()) for name in NAMES}
    )[0]
    assert (verdict.name, verdict.value, verdict.limit, verdict.operator) == (
        "pairs.latency",
        2e-6,
        pytest.approx(4e-6),
        "le",
    )


def test_host_that_is_slow_with_every_partner_is_the_only_one_that_fails() -> None:
    verdicts = localise_verdicts(
        {name: record(name, launch(), observations=speeds(name, 0.5, ["h2"])) for name in NAMES}
    )
    (bad, *others) = sorted(verdicts, key=lambda item: item.verdict != FAIL)
    assert summaries([bad]) == [("h2", "host", "pairs.bandwidth", FAIL)]
    assert (bad.action, bad.value, bad.operator) == ("inspect_hardware", 5e8, "ge")
    assert bad.reason.startswith("suspect host h2 (confidence 0.80): bandwidth of h2 with 3 of 3 healthy hosts")
    assert bad.detail == bad.reason.removeprefix("suspect host h2 (confidence 0.80): ")
    assert {item.verdict for item in others} == {PASS}


def test_hosts_of_a_slow_link_are_inconclusive_and_those_of_a_failed_link_fail() -> None:
    def link(host: str, lost: bool) -> list[Observation]:
        pair = {"h2": "h3", "h3": "h2"}.get(host, "")
        return [
            (replace(each, status=ERROR, value=None, reason="gone") if lost else replace(each, value=5e8))
            if each.scope.endswith(f"={pair}") else each
            for each in speeds(host)
        ]  # fmt: skip

    for lost, verdict in ((False, INCONCLUSIVE), (True, FAIL)):
        verdicts = localise_verdicts({name: record(name, launch(), observations=link(name, lost)) for name in NAMES})
        bad = [item for item in verdicts if item.verdict != PASS]
        assert summaries(bad) == [(name, "gang=r1", "pairs.bandwidth", verdict) for name in ("h2", "h3")]
        assert all(("measure again" in item.reason) is not lost for item in bad)
        assert all(item.action == ("inspect_hardware" if lost else "none") for item in bad)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (culprit("rank_lost", "h2", scope="gpu=0"), [("h2", "gpu=0", "gang.fault", FAIL)]),
        (culprit("host_lost", "h2"), [("h2", "host", "gang.fault", FAIL)]),
        (culprit("host_lost", "h2", "h3"), [(name, "host", "gang.fault", INCONCLUSIVE) for name in ("h2", "h3")]),
    ],
)  # fmt: skip
def test_host_that_stopped_a_launch_is_named(named: Culprit, expected: Any) -> None:
    stopped = launch(outcome="failed", culprit=named)
    verdicts = localise_verdicts({name: record(name, stopped) for name in NAMES})
    assert summaries(verdicts) == expected
    assert all(item.reason == named.text and item.stage == "gang" for item in verdicts)
    # A host that worked in a later launch does not get the verdict `gang.fault`.
    later = {name: record(name, stopped, launch(1), observations=speeds(name)) for name in NAMES}
    assert [item for item in localise_verdicts(later) if item.name == "gang.fault"] == []
    without = tuple(name for name in NAMES if name not in named.hosts)
    rest = {
        name: record(
            name,
            stopped,
            *([launch(1, without)] if name in without else ()),
            observations=speeds(name) if name in without else (),
        )
        for name in NAMES
    }
    assert summaries([item for item in localise_verdicts(rest) if item.name == "gang.fault"]) == expected


@pytest.mark.parametrize(
    ("kind", "change", "scope"),
    [
        ("rank_unable", {}, "gpu=0"),
        ("rank_unable", {"serial": "other"}, "host"),
        ("rank_unable", {"uuid": "other"}, "host"),
        ("rank_unable", {"serial": "", "uuid": ""}, "gpu=0"),
        ("rank_lost", {"serial": "other"}, "gpu=0"),
    ],
    ids=["same GPU", "other serial", "other UUID", "unknown serial and UUID", "lost rank, other serial"],
)
def test_unable_rank_is_attributed_to_its_host_if_the_two_records_list_different_gpus(
    kind: str, change: dict[str, str], scope: str
) -> None:
    """`change`: fields of GPU 0 in which the gang record of h2 differs from its host record.

    A lost rank stays attributed to its GPU, whatever the difference.
    """
    failed = launch(outcome="failed", culprit=culprit(kind, "h2", scope="gpu=0"))
    # If a rank cannot take part, only its host reports this, and the other hosts finish. All hosts report a lost rank.
    records = {name: record(name, failed if name == "h2" or kind == "rank_lost" else launch()) for name in NAMES}
    gpus = tuple(replace(gpu, **change) if gpu.index == 0 else gpu for gpu in records["h2"].gpus)
    verdicts = localise_verdicts({**records, "h2": replace(records["h2"], gpus=gpus)})
    assert {(item.host, item.scope) for item in verdicts if item.name == "gang.fault"} == {("h2", scope)}


def test_host_found_by_probes_fails_and_unfinished_search_has_no_verdict() -> None:
    done = builders.observation(DURATION.name, 1.0, unit="s", stage="probe", benchmark="collective")
    stuck = launch(0, outcome="failed")

    def after(bad: str, link: str = "", *more: Launch) -> list[Verdict]:
        rounds, _ = run_probes(bad, link)
        launches = [replace(item, observations=(done,)) for probes in rounds for item in probes] + [*more]
        own = {name: speeds(name) if more and name in more[0].members else () for name in NAMES}
        result = localise_verdicts(
            {
                name: record(name, stuck, *(item for item in launches if name in item.members), observations=own[name])
                for name in NAMES
            }
        )
        return [item for item in result if item.name == "gang.fault"]

    result = after("4")
    assert summaries(result) == [("h4", "host", "gang.fault", FAIL)]
    assert result[0].reason == "suspect host h4 (confidence 0.75): h4 fails with each of 2 hosts that work without it"
    assert result[0].action == "inspect_hardware"
    result = after("1234")
    assert {(item.scope, item.verdict, item.action) for item in result} == {("gang=r1", INCONCLUSIVE, "none")}
    assert sorted(item.host for item in result) == [*NAMES]
    assert localise_verdicts({name: record(name, stuck) for name in NAMES}) == []
    # Both hosts of a bad link get the verdict `gang.fault`, even if one of them works in a later launch without the other.
    for result in (after("", "13"), after("", "13", launch(20, ["h1", "h2", "h4"]))):
        assert summaries(result) == [(name, "gang=r1", "gang.fault", FAIL) for name in ("h1", "h3")]
        assert result[0].reason.startswith("suspect link h")
        assert result[0].basis == "policy"
    # A bad host that works in a later launch does not get this verdict.
    assert after("4", "", launch(20, NAMES)) == []
    assert summaries(after("4", "", launch(20, NAMES[:3]))) == [("h4", "host", "gang.fault", FAIL)]


def test_measurements_with_an_excluded_host_are_not_missing_on_the_other_hosts() -> None:
    three = NAMES[:3]
    own = {name: [item for item in speeds(name) if not item.scope.endswith("=h4")] for name in three}
    of_host = {name: launch(0, three, ranks=builders.ranks(1, position)) for position, name in enumerate(three)}
    records = {name: record(name, of_host[name], observations=own[name]) for name in three}
    verdicts = [item for item in judge(PLAN, evidence(records), [pack()]) if item.verdict == INCONCLUSIVE]
    assert {item.host for item in verdicts} == {"h4"}
    # If h4 was a member of the launch, the measurements with it are missing.
    whole = {name: record(name, launch(0), observations=own[name]) for name in three}
    missing = [item for item in judge(PLAN, evidence(whole), [pack()]) if item.host == "h1"]
    assert ("gpu=0,partner=h4", INCONCLUSIVE) in [(item.scope, item.verdict) for item in missing]


def test_host_is_judged_by_its_last_launch_not_by_probes() -> None:
    def both(name: str, *more: Launch) -> Record:
        first = launch(0, observations=tuple(speeds(name, 0.5, ["h2"])))
        return record(name, first, launch(1), *more, observations=speeds(name))

    passes = [(name, "gang=r1", "pairs.bandwidth", PASS) for name in NAMES]
    assert summaries(localise_verdicts({name: both(name) for name in NAMES})) == passes
    failed = launch(2, stage="probe", outcome="failed", culprit=culprit("rank_lost", "h2"))
    assert summaries(localise_verdicts({name: both(name, failed) for name in NAMES})) == passes


def test_two_hosts_that_cannot_launch_are_inconclusive() -> None:
    plan = gang_plan("h1", "h2")
    by_host = builders.evidence(plan)
    stuck = launch(0, ("h1", "h2"), "failed")
    values = {
        name: replace(item, records=(item.records[0], replace(item.records[1], launches=(stuck,), observations=())))
        for name, item in by_host.items()
    }
    verdicts = [item for item in judge(plan, values, [pack()]) if item.criterion == "localise"]
    assert summaries(verdicts) == [(name, "gang=r1", "gang.fault", INCONCLUSIVE) for name in ("h1", "h2")]
    assert {item.action for item in verdicts} == {"none"}


# Pair matrices that both ends of each pair report


def plan_of_racks(names: str = "abcd", rails: int = 2, **over: Any) -> Plan:
    """Return the plan of one gang. "abC" are the hosts a and b in rack r1, and host c in rack r2.

    `rails`: number of GPUs of each host. `over` replaces fields of every host.
    """
    plan = builders.plan(*names.lower(), profile="smoke", gpu_count=rails)
    hosts = [
        replace(host, rack="r2" if host.name.upper() in names else "r1", gang=GANG, **over)
        for host in plan.hosts
    ]  # fmt: skip
    return replace(plan, hosts=tuple(hosts))


def as_rehearsal(plan: Plan) -> Plan:
    """Return the plan of a rehearsal: a run on CPUs, in which all hosts may be the same machine."""
    return replace(plan, rehearsal=True, hosts=tuple(replace(host, device="cpu") for host in plan.hosts))


def pair_observations(host: str, pairs: Sequence[Pair], device: str = "gpu") -> list[Observation]:
    """Return what `host` observed in its pairs: bandwidth and latency, or errors for a failed pair."""
    result = []
    for pair in pairs:
        for other in {pair.a, pair.b} - {host} if host in (pair.a, pair.b) else ():
            scope = f"{device}={pair.rail},partner={other}"
            for name, value, unit in (("bandwidth", pair.bandwidth, "B/s"), ("latency", pair.latency, "s")):
                observation = builders.observation(f"pairs.{name}", value or 1, stage="gang", scope=scope, unit=unit)
                error = replace(observation, status=ERROR, value=None, reason=pair.failed or "?")
                result += [error] if pair.failed else [observation] if value is not None else []
    return result


def pair_verdicts(
    plan: Plan,
    observations: Mapping[str, Sequence[Observation]] | Sequence[Pair],
    *earlier: Verdict,
    launches: Mapping[str, Sequence[Launch]] | None = None,
) -> list[Verdict]:
    """Return the verdicts from the pair matrix of a gang.

    Args:
        plan: the plan of the gang.
        observations: host -> its observations; or pairs, with the same values at both ends.
        earlier: other verdicts, such as those on GPUs and collectives.
        launches: host -> its launches. The default is one launch of all hosts.
    """
    observed = observations if isinstance(observations, Mapping) else {
        host.name: pair_observations(host.name, observations, host.device) for host in plan.hosts
    }  # fmt: skip
    names = [host.name for host in plan.hosts]
    views = []
    for host in plan.hosts:
        own_launches = (launches or {}).get(host.name, [launch(0, names)])
        gpus = tuple(builders.gpu(host.name, index) for index in range(len(host.devices)))
        host_record = replace(record("h1", *own_launches, observations=observed[host.name]), host=host.name, gpus=gpus)
        views.append(HostView(plan, host, Evidence(records=(host_record,)), [pack()]))
    return judge_gangs(views, earlier)


def not_passed(verdicts: Sequence[Verdict]) -> list[tuple[str, str, str, str]]:
    """Return host, scope, quantity and verdict of the verdicts other than passes."""
    return [
        (item.host, item.scope, item.name.removeprefix("pairs."), item.verdict)
        for item in verdicts
        if item.verdict != PASS
    ]


def earlier_verdict(
    host: str,
    name: str,
    scope: str = "gang=r1",
    stage: str = "gang",
    verdict: str = FAIL,
    action: str = "inspect_hardware",
) -> Verdict:
    return Verdict(
        host=host,
        scope=scope,
        name=name,
        stage=stage,
        verdict=verdict,
        criterion="c",
        reason="",
        action=action,
        source="",
        basis="policy",
    )


SLOW = earlier_verdict("a", "collective.all_reduce.busbw")


def test_healthy_hosts_pass_in_bandwidth_and_latency() -> None:
    verdicts = pair_verdicts(plan_of_racks(), matrix(4, shares={"b": 0.9}, latencies={"c": 1.5}))
    assert [(item.host, item.name, item.value) for item in verdicts] == [
        ("a", "pairs.bandwidth", 100), ("a", "pairs.latency", 1), ("b", "pairs.bandwidth", 90), ("b", "pairs.latency", 1),
        ("c", "pairs.bandwidth", 100), ("c", "pairs.latency", 1.5), ("d", "pairs.bandwidth", 100), ("d", "pairs.latency", 1),
    ]  # fmt: skip
    assert {(item.scope, item.verdict, item.basis, item.action) for item in verdicts} == {
        ("gang=r1", PASS, "policy", "none")
    }
    assert (
        verdicts[3].reason
        == "the median of its 6 pairs is 1 s, and that of all pairs of the gang is 1.25 s: no part of the host is slow"
    )


def test_host_that_passes_beyond_the_limit_is_not_called_normal() -> None:
    """A rail at 76 % of the normal speed may be slow by design, so it is not reported. Host a was measured on this rail only."""
    pairs = matrix(4, 3, shares={1: 0.76}, unmeasured=[("a", 0), ("a", 2)])
    first, *_ = pair_verdicts(plan_of_racks("abcd", 3), pairs)
    assert (first.host, first.verdict, first.value, first.limit) == ("a", PASS, 76, None)
    assert first.reason == (
        "the median of its 3 pairs is 76 B/s, and that of all pairs of the gang is 88 B/s: "
        "slow, but no part of this host is a suspect"
    )


def test_order_of_hosts_does_not_change_verdicts() -> None:
    pairs = matrix(4, shares={("b", 1): 0.5})
    assert pair_verdicts(plan_of_racks("dbca"), pairs) == pair_verdicts(plan_of_racks("abcd"), pairs)


@pytest.mark.parametrize(("size", "passing"), [(2, ""), (3, "abc")])
def test_pairs_give_passes_only_in_a_gang_of_at_least_three_hosts(size: int, passing: str) -> None:
    verdicts = pair_verdicts(plan_of_racks("abc"[:size]), matrix(size))
    assert [item.host for item in verdicts if item.name == "pairs.bandwidth"] == [*passing]


def test_host_exactly_at_the_limit_passes_and_shows_the_limit() -> None:
    verdicts = pair_verdicts(plan_of_racks("abcde", 1), matrix(5, 1, {"b": 0.88}, latencies={"c": 2.0}))
    own = {(item.host, item.name): (item.value, item.limit, item.operator) for item in verdicts if item.verdict == PASS}
    assert len(own) == len(verdicts) == 10
    assert own[("b", "pairs.bandwidth")] == (88.0, 88.0, "ge")
    assert own[("c", "pairs.latency")] == (2.0, 2.0, "le")


def test_slow_nic_fails_in_bandwidth_or_latency() -> None:
    for pairs, value, limit, operator, unit in (
        (matrix(4, shares={("b", 1): 0.5}), 50.0, 88.0, "ge", "B/s"), (matrix(4, latencies={("b", 1): 4.0}), 4.0, 2.0, "le", "s"),
    ):  # fmt: skip
        (nic,) = [item for item in pair_verdicts(plan_of_racks(), pairs) if item.verdict != PASS]
        assert (nic.host, nic.scope, nic.part_scope, nic.serial, nic.verdict) == ("b", "gpu=1", "nic=rail1", "", FAIL)
        assert (nic.value, nic.limit, nic.operator, nic.unit) == (value, pytest.approx(limit), operator, unit)
        assert nic.reason.startswith("suspect NIC b rail 1 (confidence 0.80): ")
        assert nic.reason.endswith("; it is the NIC that GPU 1 (serial b-1, PCI 0000:01:00.0) uses")
        assert nic.basis == "policy"


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        (earlier_verdict("b", "host_copy.bandwidth", "gpu=1", "benchmark"), "gpu"),
        (earlier_verdict("b", "gpu.throttle.active", "gpu=1,reason=y", "preflight"), "gpu"),
        (  # a new driver, for example, made the copies of most GPUs of the fleet slower
            replace(earlier_verdict("b", "pcie.x", "gpu=1", "benchmark", FAIL, "configure"), kind=VerdictKind.SOFTWARE),
            "nic",
        ),
        (earlier_verdict("b", "gpu.vbios_version", "gpu=1", "preflight"), "nic"),  # does not slow the exchange
        (earlier_verdict("b", "gpu.ecc.uncorrectable_volatile", "gpu=1", "gang"), "nic"),
        (earlier_verdict("b", "host_copy.bandwidth", "gpu=0", "benchmark"), "nic"),
        (earlier_verdict("b", "pairs.bandwidth", "gpu=1", "gang"), "nic"),  # measured between hosts
        (earlier_verdict("b", "gpu.pcie.width", "gpu=1", "gang"), "gpu"),  # read on one host
        (earlier_verdict("b", "gpu.pcie.width", "gpu=1", "preflight", FAIL, "none"), "nic"),  # requires no action
        (earlier_verdict("b", "gpu.pcie.width", "gpu=1", "benchmark", PASS), "nic"),
        (earlier_verdict("c", "gpu.pcie.width", "gpu=1", "benchmark"), "nic"),
        (earlier_verdict("b", "gpu.pcie.width", "host", "benchmark"), "nic"),
        (earlier_verdict("z", "gpu.pcie.width", "gpu=1", "benchmark"), "nic"),
    ],
)
def test_gpu_is_suspected_if_it_failed_without_other_hosts(before: Verdict, kind: str) -> None:
    (verdict,) = [
        item
        for item in pair_verdicts(plan_of_racks(), matrix(4, shares={("b", 1): 0.5}), before)
        if item.verdict != PASS
    ]
    assert verdict.reason.startswith(f"suspect {kind.upper()} b rail 1 ")


@pytest.mark.parametrize(
    ("before", "slow"),
    [
        (SLOW, True),
        (earlier_verdict("a", "collective.all_reduce.algbw"), True),
        (earlier_verdict("a", "collective.barrier.latency"), True),
        (earlier_verdict("a", "collective.all_reduce.wrong_elements"), False),
        (earlier_verdict("a", "training.busbw"), False),
        (earlier_verdict("a", SLOW.name, "gpu=0"), False),
        (earlier_verdict("a", SLOW.name, "gang=r2"), False),
        (earlier_verdict("z", SLOW.name), False),
        (earlier_verdict("a", SLOW.name, verdict=PASS), False),
        (earlier_verdict("a", SLOW.name, verdict=INCONCLUSIVE), False),
    ],
)
def test_fabric_fails_if_only_the_collective_is_slow(before: Verdict, slow: bool) -> None:
    verdicts = pair_verdicts(plan_of_racks(), matrix(4), before)
    assert not_passed(verdicts) == ([(name, "gang=r1", "bandwidth", FAIL) for name in "abcd"] if slow else [])
    if slow:
        assert {(item.value, item.limit, item.operator) for item in verdicts} == {(None, None, "")}


@pytest.mark.parametrize(
    ("pairs", "verdict_if_collective_is_normal", "verdict_if_collective_is_slow"),
    [
        (matrix(4, 3, {1: 0.8}), "", FAIL), (matrix(4, 3, {1: 0.75}), "", FAIL),  # 25 % slower may be by design
        (matrix(4, 3, {1: 0.74}), INCONCLUSIVE, FAIL), (matrix(4, 3, latencies={1: 4.0}), INCONCLUSIVE, FAIL),
        (matrix(4, 3, failed={1: "gone"}), INCONCLUSIVE, FAIL),
    ],
)  # fmt: skip
def test_slow_rail_fails_all_hosts_if_the_collective_is_slow(
    pairs: Sequence[Pair], verdict_if_collective_is_normal: str, verdict_if_collective_is_slow: str
) -> None:
    for before, verdict in (((), verdict_if_collective_is_normal), ((SLOW,), verdict_if_collective_is_slow)):
        verdicts = pair_verdicts(plan_of_racks(rails=3), pairs, *before)
        assert [(host, what) for host, _, _, what in not_passed(verdicts)] == (
            [(name, verdict) for name in "abcd"] if verdict else []
        )
        assert {item.scope for item in verdicts} == {"gang=r1"}
        assert all(item.reason.startswith("suspect rail 1 ") for item in verdicts if item.verdict != PASS)


def test_failed_pair_of_two_hosts_is_inconclusive() -> None:
    verdicts = pair_verdicts(plan_of_racks("ab"), matrix(2, failed={"ab": "gone"}))
    assert not_passed(verdicts)[-2:] == [(name, "gang=r1", "bandwidth", INCONCLUSIVE) for name in "ab"]


def test_pairs_across_racks_are_compared_with_each_other() -> None:
    across = {a + b: 0.5 for a in "abcde" for b in "fg"}
    assert not_passed(pair_verdicts(plan_of_racks("abcdeFG"), matrix(7, shares=across))) == []
    assert {
        (item[0], item[3]) for item in not_passed(pair_verdicts(plan_of_racks("abcdefg"), matrix(7, shares=across)))
    } == {
        ("f", FAIL),
        ("g", FAIL),
    }
    # Host e is alone in its rack. Only its pairs are across racks, and they are equally fast, so e passes. But its pairs miss the
    # limit, which follows from the median of all pairs of the gang. So the verdict of e shows no limit.
    verdicts = pair_verdicts(plan_of_racks("abcdE"), matrix(5, shares={"e": 0.5}))
    assert not_passed(verdicts) == []
    assert next((item.value, item.limit, item.operator) for item in verdicts if item.host == "e") == (50, None, "")


def test_pairs_with_a_slower_port_are_compared_with_each_other() -> None:
    plan = plan_of_racks("abcdef", fabric_gbps=400.0)
    hosts = tuple(replace(host, fabric_gbps=200.0) if host.name in "ef" else host for host in plan.hosts)
    pairs = matrix(6, shares={"e": 0.5, "f": 0.5})
    assert not_passed(pair_verdicts(replace(plan, hosts=hosts), pairs)) == []
    assert not_passed(pair_verdicts(plan, pairs)) != []


def twice_as_fast(two: str, pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs. The pair of the hosts `two` ("ab") has twice the normal bandwidth."""
    return [replace(pair, bandwidth=2 * RATE) if pair.a + pair.b == two else pair for pair in pairs]


def test_only_pair_within_a_rack_or_with_faster_ports_must_not_be_slower_than_the_other_pairs() -> None:
    """One rack has only the hosts a and b, or only these two hosts have faster ports.

    If their pair is slower than the other pairs, the link a - b is the suspect. Then both hosts are inconclusive.
    """
    slow = matrix(4, shares={"ab": 0.3})
    faster = plan_of_racks(fabric_gbps=400.0)
    hosts = tuple(replace(host, fabric_gbps=800.0) if host.name in "ab" else host for host in faster.hosts)
    for plan in (plan_of_racks("abCD"), replace(faster, hosts=hosts)):
        assert [(host, verdict) for host, _, _, verdict in not_passed(pair_verdicts(plan, slow))] == [
            ("a", INCONCLUSIVE),
            ("b", INCONCLUSIVE),
        ]
    only_two_in_a_rack = plan_of_racks("abCD")
    hosts_of_racks = tuple(replace(host, rack="r3") if host.name == "d" else host for host in only_two_in_a_rack.hosts)
    assert [
        (host, verdict)
        for host, _, _, verdict in not_passed(pair_verdicts(replace(only_two_in_a_rack, hosts=hosts_of_racks), slow))
    ] == [("a", INCONCLUSIVE), ("b", INCONCLUSIVE)]
    for plan, size in ((plan_of_racks("abC"), 3), (replace(faster, hosts=hosts), 4)):
        assert not_passed(pair_verdicts(plan, twice_as_fast("ab", matrix(size)))) == [], (
            "a faster pair must not make the other pairs suspect"
        )


def test_only_pair_of_its_kind_must_reach_the_highest_typical_speed_of_slower_kinds() -> None:
    """Only a and b have ports of 800 Gbit/s. Pairs within racks reach 100, pairs across racks 50. So a - b must reach 100."""
    within, across = PairKind(gbps=400.0), PairKind(across=True, gbps=400.0)
    assert within.must_match_speed_of(across)
    assert not across.must_match_speed_of(within)
    assert PairKind(gbps=800.0).must_match_speed_of(within)
    assert not PairKind(gbps=200.0).must_match_speed_of(across)
    hosts = {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 2, "g": 2}
    pairs = [
        replace(pair, kind=PairKind(across=across, gbps=800.0 if pair.a + pair.b == "ab" else 400.0), bandwidth=speed)
        for pair in matrix(7, 1)
        for across in [hosts[pair.a] != hosts[pair.b]]
        for speed in [50.0 if across else 60.0 if pair.a + pair.b == "ab" else 100.0]
    ]
    assert [item.where for item in find_suspects(pairs)] == ["a - b"]


def test_pairs_without_comparable_pairs_get_no_verdict() -> None:
    plan = plan_of_racks("aBc", rails=1, fabric_gbps=400.0)
    hosts = tuple(replace(host, fabric_gbps=200.0) if host.name == "c" else host for host in plan.hosts)
    # a - b: across racks, 400 Gbit/s; a - c: within a rack, 200 Gbit/s; b - c: across racks, 200 Gbit/s
    mixed = replace(plan, hosts=hosts)
    assert pair_verdicts(mixed, matrix(3, 1, {"ab": 0.3})) == []
    (fabric, *_) = pair_verdicts(mixed, matrix(3, 1), SLOW)
    assert "no pair of hosts could be compared" in fabric.reason


def test_speed_of_a_pair_combines_both_ends() -> None:
    """On GPU hosts, the speed is the mean of the values from both ends. In a rehearsal, it is the slower of the two values.

    The faster value may only show how fast a host filled its socket buffer.
    """

    def figures_of_a(plan: Plan, device: str) -> list[Any]:
        values = {name: pair_observations(name, matrix(3, 1), device) for name in "abc"}
        values["a"] = [
            replace(observed, value=observed.value * 0.96 if observed.unit == "B/s" else observed.value * 1.5)
            for observed in values["a"]
        ]
        return [item.value for item in pair_verdicts(plan, values) if item.host == "a"]

    assert figures_of_a(plan_of_racks("abc", 1), "gpu") == [pytest.approx(98), pytest.approx(1.25)]
    assert figures_of_a(as_rehearsal(plan_of_racks("abc", 1)), "cpu") == [96, 1.5]


def test_rehearsal_uses_only_the_best_rail_of_each_pair_of_hosts() -> None:
    pairs = [replace(pair, bandwidth=90.0 if pair.rail else 1.0) for pair in matrix(4, 2)]
    verdicts = pair_verdicts(as_rehearsal(plan_of_racks()), pairs)
    assert [(item.host, item.value) for item in verdicts if item.unit == "B/s"] == [(name, 90) for name in "abcd"]
    assert verdicts[0].reason.startswith("the median of its 3 pairs")


@pytest.mark.parametrize(
    ("pairs", "failing"),
    [
        (matrix(4, 1, {"b": 0.2}), "b"), (matrix(4, 1, latencies={"b": 20.0}), "b"), (matrix(4, 1, {"b": 0.3}), ""),
        (matrix(4, 1, latencies={"b": 8.0}), ""), (matrix(3, 1, {"b": 0.2}), ""), (matrix(5, 1, {"bd": 0.2}), ""),
        (matrix(5, 1, failed={"bd": "gone"}), "bd"), (matrix(4, 1, failed={"b": "gone"}), "b"),
    ],
)  # fmt: skip
def test_rehearsal_reports_failures_and_much_slower_hosts(pairs: Sequence[Pair], failing: str) -> None:
    """A host is reported as slow only if it has at least three partners. A slow link is not reported."""
    size = len({host for pair in pairs for host in (pair.a, pair.b)})
    alone = earlier_verdict("b", "gemm.throughput", "cpu=0", "benchmark")
    for before in ((), (alone,)):  # a failed verdict on a CPU changes nothing
        verdicts = not_passed(pair_verdicts(as_rehearsal(plan_of_racks("abcde"[:size], 1)), pairs, *before))
        assert [(host, verdict) for host, _, _, verdict in verdicts] == [(name, FAIL) for name in failing]


def test_pair_with_an_invalid_speed_fails_and_speeds_of_unplanned_scopes_are_ignored() -> None:
    def verdicts_on_speed(value: Any, **over: Any) -> list[Verdict]:
        values = {name: pair_observations(name, matrix(4, 1)) for name in "abcd"}
        for host, other in ("ab", "ba"):
            values[host] = [
                replace(observed, value=value, **over)
                if observed.scope.endswith(f"={other}") and observed.unit == "B/s"
                else observed
                for observed in values[host]
            ]
        return pair_verdicts(plan_of_racks(rails=1), values)

    assert [item.reason[:29] for item in verdicts_on_speed(100.0) if item.unit == "B/s"] == [
        "the median of its 3 pairs is "
    ] * 4
    for value in (0, -1.0, math.inf, math.nan, "fast"):  # not a speed
        verdicts = not_passed(verdicts_on_speed(value))
        assert [(host, verdict) for host, _, _, verdict in verdicts] == [("a", FAIL), ("b", FAIL)]
    for over in (
        {"scope": scope} for scope in ("", "host", "gpu=0", "gpu=7,partner=b", "gpu=0,partner=z", "cpu=0,partner=b")
    ):
        assert not_passed(verdicts_on_speed(1.0, **over)) == []
    assert not_passed(verdicts_on_speed(1.0, stage="benchmark")) == []
    # A speed with the host itself as the partner is ignored, too.
    values = {name: pair_observations(name, matrix(4, 1)) for name in "abcd"}
    values["a"].append(replace(values["a"][0], scope="gpu=0,partner=a", value=1.0))
    assert not_passed(pair_verdicts(plan_of_racks(rails=1), values)) == []


def test_gang_without_measurements_has_no_pair_verdicts() -> None:
    none = {
        name: [
            replace(observed, status=UNSUPPORTED, value=None, reason="no")
            for observed in pair_observations(name, matrix(4))
        ]
        for name in "abcd"
    }
    assert pair_verdicts(plan_of_racks(), none, SLOW) == []
    # A quantity without measurements has no verdicts.
    verdicts = pair_verdicts(plan_of_racks(), [replace(pair, latency=None) for pair in matrix(4)])
    assert [item.name for item in verdicts] == ["pairs.bandwidth"] * 4


def test_failed_pairs_with_the_culprit_do_not_make_its_partners_suspect() -> None:
    stopped = [launch(0, "abcd", "failed", culprit=culprit("rank_lost", "b"))]
    for lost, link_fails in (("ab", False), ("ac", True)):
        pairs = matrix(4, 1, {"bd": 0.95}, failed={lost: "gone"})
        verdicts = pair_verdicts(plan_of_racks(rails=1), pairs, launches=dict.fromkeys("abcd", stopped))
        link = [(name, "gang=r1", "bandwidth", FAIL) for name in lost] if link_fails else []
        assert not_passed(verdicts) == [("b", "host", "gang.fault", FAIL), *link]
        # The measurements that the culprit made before its loss are used.
        (verdict,) = [item for item in verdicts if item.host == "b" and item.name == "pairs.bandwidth"]
        assert verdict.value == pytest.approx(97.5 if lost == "ab" else 100)


def test_excluded_host_keeps_the_verdicts_of_its_last_launch() -> None:
    first, again = matrix(4, 1, {"d": 0.5}), matrix(3, 1, {"a": 0.95})
    launches = {
        name: [
            launch(0, "abcd", observations=tuple(pair_observations(name, first))),
            *([launch(1, "abc")] if name != "d" else []),
        ]
        for name in "abcd"
    }
    verdicts = pair_verdicts(
        plan_of_racks(rails=1), {name: pair_observations(name, again) for name in "abcd"}, launches=launches
    )
    own = [(item.host, item.verdict, item.value) for item in verdicts if item.unit == "B/s"]
    assert sorted(own) == [("a", PASS, 95), ("b", PASS, 97.5), ("c", PASS, 97.5), ("d", FAIL, 50)]
