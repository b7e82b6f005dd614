"""Slow ends, rails and links as parts that have a name, a confidence and a sentence of evidence."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from fleet.judge.localization.matrix import (
    BANDWIDTH,
    FABRIC,
    GPU,
    HOST,
    LINK,
    NIC,
    RAIL,
    End,
    Suspect,
    rule_of_succession,
    upper_median,
)
from fleet.judge.localization.slow import LEAST_HOSTS, LOST, Edge, Slow

MOST_LINKS = 5
MOST_LINKS_SHARE = 0.02
"""More slow links than these, by number and by share of all pairs of hosts, and they are not links: it is the fabric."""


_NOTHING = math.log(LOST) / 2
"""A share that only a pair that failed has."""


class SuspectBuilder:
    """The slow ends, rails and links of one quantity, as parts that have a name."""

    def __init__(self, quantity: str, edges: Sequence[Edge], slow: Slow, failed_alone: Collection[End]) -> None:
        self._quantity, self._edges, self._slow = quantity, edges, slow
        self._failed_alone = failed_alone
        self._rails_of: dict[str, set[int]] = defaultdict(set)
        for host, rail in slow.of_end:
            if rail not in slow.rails:
                self._rails_of[host].add(rail)
        self._slow_of: dict[str, set[int]] = defaultdict(set)
        for host, rail in slow.ends:
            self._slow_of[host].add(rail)
        self._links = set(slow.links)

    def suspects(self) -> Iterator[Suspect]:
        """All of them, in no order."""
        yield from (self._rail(rail) for rail in self._slow.rails)
        for host, rails in self._slow_of.items():
            every = self._rails_of[host]
            if rails >= every or (len(every) >= LEAST_HOSTS and 2 * len(rails) > len(every)):
                yield self._host(host, rails)
            else:
                yield from (self._end(host, rail) for rail in rails)
        yield from self._between()

    def _rail(self, rail: int) -> Suspect:
        ends = [end for end in self._slow.of_end if end[1] == rail]
        indexes = [index for index, edge in enumerate(self._edges) if edge.rail == rail and index in self._slow.shares]
        share = self._slow.rails[rail]
        level = share - self._slow.limit / 2
        slow = sum(any(self._slow.shares[index] < level / 2 for index in self._slow.of_end[end]) for end in ends)
        return self._suspect(
            RAIL,
            f"rail {rail}",
            indexes,
            rule_of_succession(slow, len(ends)),
            f"{self._quantity} on rail {rail} is {times(self._quantity, share)} the other rails' "
            f"with {slow} of {len(ends)} hosts",
            rails=(rail,),
        )

    def _host(self, host: str, rails: set[int]) -> Suspect:
        indexes = [index for rail in rails for index in self._slow.of_end[(host, rail)]]
        slow, compared = self._partners(host, rails)
        share = upper_median(self._slow.ends[(host, rail)] for rail in rails)
        every = len(self._rails_of[host] | rails)
        if every == 1:
            (rail,) = rails
            if (host, rail) in self._failed_alone:
                return self._end(host, rail)
        evidence_text = (
            f"on {len(rails)} of {every} rails" if every > 1 else "on its one rail: its GPU or NIC may be what is slow"
        )
        return self._suspect(
            HOST,
            host,
            indexes,
            rule_of_succession(slow, compared),
            f"{self._how(host, rails, slow, compared, share)} {evidence_text}",
            hosts=(host,),
        )

    def _end(self, host: str, rail: int) -> Suspect:
        slow, compared = self._partners(host, {rail})
        alone = (host, rail) in self._failed_alone
        well = len(self._rails_of[host] - self._slow_of[host])
        why = "; the GPU failed by itself too" if alone else f"; {well} of its other rails are well"
        return self._suspect(
            GPU if alone else NIC,
            f"{host} rail {rail}",
            self._slow.of_end[(host, rail)],
            rule_of_succession(slow, compared),
            f"{self._how(host, {rail}, slow, compared, self._slow.ends[(host, rail)])} on rail {rail}{why}",
            hosts=(host,),
            rails=(rail,),
        )

    def _how(self, host: str, rails: set[int], slow: int, compared: int, share: float) -> str:
        """`bandwidth of h3 with 7 of 7 hosts that are well is at most 48 % of what is usual`."""
        if share <= _NOTHING:
            return f"{host} could exchange nothing with {slow} of {compared} hosts that are well"
        best = "at most" if self._quantity == BANDWIDTH else "at least"
        most = "about" if any((host, rail) in self._slow.partial for rail in rails) else best
        whom = f"with {slow} of {compared} hosts that are well"
        return f"{self._quantity} of {host} {whom} is {most} {times(self._quantity, share)} what is usual"

    def _partners(self, host: str, rails: set[int]) -> tuple[int, int]:
        """With how many hosts that are well it is slow on some of these rails, and how many of them it met."""
        slow: dict[str, bool] = {}
        for rail in rails:
            end = (host, rail)
            limit = self._slow.limit if end in self._slow.partial else self._slow.end_limit
            base = self._slow.rails.get(rail, 0.0) - limit
            for index in self._slow.of_end[end]:
                other = next(far for far in self._edges[index].ends() if far != end)
                if other not in self._slow.ends:
                    slow[other[0]] = slow.get(other[0], False) or self._slow.shares[index] < base
        return sum(slow.values()), len(slow)

    def _between(self) -> Iterator[Suspect]:
        """The links; or the fabric, where they are too many to be each by itself."""
        slow: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index in self._slow.links:
            slow[(self._edges[index].a, self._edges[index].b)].append(index)
        met: dict[tuple[str, str], int] = defaultdict(int)
        for edge in self._edges:
            met[(edge.a, edge.b)] += 1
        if len(slow) > max(MOST_LINKS, MOST_LINKS_SHARE * len(met)):
            indexes = [index for of_pair in slow.values() for index in of_pair]
            yield self._suspect(
                FABRIC,
                "",
                indexes,
                rule_of_succession(len({host for pair in slow for host in pair}), len(self._rails_of)),
                f"{len(slow)} of {len(met)} pairs of hosts are slow, and no host, NIC or rail is common to them",
            )
            return
        for (a, b), indexes in slow.items():
            yield self._link(a, b, indexes, met[(a, b)])

    def _link(self, a: str, b: str, indexes: Sequence[int], tried: int) -> Suspect:
        rails = tuple(sorted(self._edges[index].rail for index in indexes))
        well = min(self._fast_with(host, rails) for host in (a, b))
        failed = next((self._edges[index].failed for index in indexes if self._edges[index].failed), "")
        share = upper_median(self._slow.shares[index] for index in indexes)
        whole = len(indexes) == tried
        what = "exchange" if failed else self._quantity
        how = f"failed ({failed})" if failed else f"is {times(self._quantity, share)} what is usual"
        rest = (
            f"each of the two is well with {well} others or more"
            if well
            else "one of the two was measured with nobody else"
        )
        return self._suspect(
            LINK,
            f"{a} - {b}" if whole else f"{a} - {b} {rails_name(rails)}",
            indexes,
            rule_of_succession(well, well),
            f"{what} between {a} and {b} {how}{'' if whole else f' on {rails_name(rails)}'}; {rest}",
            hosts=(a, b),
            rails=() if whole else rails,
        )

    def _fast_with(self, host: str, rails: Iterable[int]) -> int:
        """The others with which it is not slow on these rails."""
        return len(
            {
                other
                for rail in rails
                for index in self._slow.of_end[(host, rail)]
                if index not in self._links
                for other, _ in self._edges[index].ends()
                if other != host and (other, rail) not in self._slow.ends
            }
        )

    def _suspect(
        self,
        kind: str,
        where: str,
        indexes: Iterable[int],
        confidence: float,
        evidence: str,
        hosts: tuple[str, ...] = (),
        rails: tuple[int, ...] = (),
    ) -> Suspect:
        return Suspect(
            kind=kind,
            where=where,
            confidence=confidence,
            evidence=evidence,
            hosts=hosts,
            rails=rails,
            quantity=self._quantity,
            **_figures(self._quantity, self._edges, indexes, self._slow.limit),
        )


def _figures(quantity: str, edges: Sequence[Edge], indexes: Iterable[int], limit: float) -> dict[str, float]:
    """Medians of these pairs and of all, and what is still well, in the quantity's own unit."""

    def told(speed: float) -> float:
        return speed if quantity == BANDWIDTH else 1 / speed

    theirs = [edges[index].speed for index in indexes if edges[index].speed > 0]
    every = [edge.speed for edge in edges if edge.speed > 0]
    usual = statistics.median(every)
    slow_parts = {"usual": told(usual), "limit": told(usual * math.exp(-limit))}
    return {**slow_parts, "found": told(statistics.median(theirs))} if theirs else slow_parts


def times(quantity: str, share: float) -> str:
    """What is left of the speed, its logarithm given: `40% of`, or of a time `2.5 times`."""
    return f"{math.exp(share):.0%} of" if quantity == BANDWIDTH else f"{math.exp(-share):.3g} times"


def rails_name(rails: Sequence[int]) -> str:
    return f"rail{'s' if len(rails) != 1 else ''} {', '.join(map(str, rails))}"
