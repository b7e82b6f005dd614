"""Turn the parts that are slow in one quantity (bandwidth or latency) into suspects: name, confidence and evidence.

The parts are ends (a host on one rail), rails, switches, and links between two hosts. An end is good if it is not slow.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fleet.judge.localization.matrix import (
    BANDWIDTH,
    FABRIC,
    GPU,
    HOST,
    LINK,
    NIC,
    RAIL,
    SWITCH,
    End,
    Suspect,
    rule_of_succession,
    upper_median,
)
from fleet.judge.localization.slow import FAILED_LOG_SHARE, MIN_HOSTS, Edge, SlowParts, are_of_fabric
from fleet.quantities import counted


class SuspectBuilder:
    """Build the suspects of one quantity."""

    def __init__(
        self,
        quantity: str,
        edges: Sequence[Edge],
        slow_parts: SlowParts,
        failed_alone: Mapping[End, str],
        normal_alone: Collection[End],
    ) -> None:
        self._quantity, self._edges, self._slow = quantity, edges, slow_parts
        self._failed_alone, self._normal_alone = failed_alone, normal_alone
        self._rails_of_host: dict[str, set[int]] = defaultdict(set)
        """Host -> its rails, except those in `SlowParts.rails`."""
        for host, rail in slow_parts.edges_of_end:
            if rail not in slow_parts.rails:
                self._rails_of_host[host].add(rail)
        self._slow_rails_of_host: dict[str, set[int]] = defaultdict(set)
        """Host -> the rails on which its end is slow, except rails whose end is at a slow switch (`SlowParts.switches`)."""
        self._ends_at_switch = {end: switch for switch, ends in slow_parts.switches.items() for end in ends}
        for host, rail in slow_parts.ends:
            if (host, rail) not in self._ends_at_switch:
                self._slow_rails_of_host[host].add(rail)
        self._slow_links = set(slow_parts.links)

    def suspects(self) -> Iterator[Suspect]:
        """Yield the suspects in no particular order."""
        yield from (self._slow_rail(rail) for rail in self._slow.rails)
        yield from (self._slow_switch(switch, ends) for switch, ends in self._slow.switches.items())
        for host, slow_rails in self._slow_rails_of_host.items():
            rails = self._rails_of_host[host]
            if slow_rails >= rails or (len(rails) >= MIN_HOSTS and 2 * len(slow_rails) > len(rails)):
                yield self._slow_host(host, slow_rails)
            else:
                yield from (self._slow_end(host, rail) for rail in slow_rails)
        yield from self._slow_links_or_fabric()

    def _slow_rail(self, rail: int) -> Suspect:
        ends = [end for end in self._slow.edges_of_end if end[1] == rail]
        indexes = [index for index, edge in enumerate(self._edges) if edge.rail == rail and index in self._slow.shares]
        share = self._slow.rails[rail]
        level = share - self._slow.limit / 2
        slow = sum(any(self._slow.shares[index] < level / 2 for index in self._slow.edges_of_end[end]) for end in ends)
        return self._suspect(
            RAIL,
            f"rail {rail}",
            indexes,
            rule_of_succession(slow, len(ends)),
            f"{self._quantity} on rail {rail} is {ratio_text(self._quantity, share)} that of the other rails, "
            f"on {slow} of {len(ends)} hosts",
            self._slow.of_rails(),
            rails=(rail,),
        )

    def _slow_switch(self, switch: str, ends: Collection[End]) -> Suspect:
        hosts = tuple(sorted({host for host, _ in ends}))
        rails = tuple(sorted({rail for _, rail in ends}))
        share = upper_median(self._slow.ends[end] for end in ends)
        return self._suspect(
            SWITCH,
            switch,
            sorted({index for end in ends for index in self._slow.edges_of_end[end]}),
            rule_of_succession(len(ends), len(ends)),
            f"{self._quantity} of all {len(ends)} ports at this switch ({rails_name(rails)} of {len(hosts)} hosts) is "
            f"{ratio_text(self._quantity, share)} the typical value; fewer than half of these hosts are slow at other switches",
            self._slow.of_ends(ends),
            hosts=hosts,
            rails=rails,
        )

    def _slow_host(self, host: str, slow_rails: set[int]) -> Suspect:
        indexes = [index for rail in slow_rails for index in self._slow.edges_of_end[(host, rail)]]
        slow, compared = self._count_slow_partners(host, slow_rails)
        share = upper_median(self._slow.ends[(host, rail)] for rail in slow_rails)
        rail_count = len(self._rails_of_host[host] | slow_rails)
        if rail_count == 1:
            (rail,) = slow_rails
            if (host, rail) in self._failed_alone or (host, rail) in self._normal_alone:
                return self._slow_end(host, rail)
        rails_text = (
            f"on {len(slow_rails)} of {rail_count} rails"
            if rail_count > 1
            else "on its only rail: the cause may be its GPU or NIC"
        )
        return self._suspect(
            HOST,
            host,
            indexes,
            rule_of_succession(slow, compared),
            f"{self._comparison(host, slow_rails, slow, compared, share)} {rails_text}",
            self._slow.of_ends([(host, rail) for rail in slow_rails]),
            hosts=(host,),
        )

    def _slow_end(self, host: str, rail: int) -> Suspect:
        slow, compared = self._count_slow_partners(host, {rail})
        kind = self._failed_alone.get((host, rail), NIC)
        good_rails = len(self._rails_of_host[host] - self._slow_rails_of_host[host])
        comparison = self._comparison(host, {rail}, slow, compared, self._slow.ends[(host, rail)])
        if (host, rail) in self._failed_alone:
            explanation = f"; {failed_alone_text(kind)}"
        elif good_rails:
            explanation = f"; {good_rails} of its other rails {'is' if good_rails == 1 else 'are'} normal"
        else:
            explanation = ""
        return self._suspect(
            kind,
            f"{host} rail {rail}",
            self._slow.edges_of_end[(host, rail)],
            rule_of_succession(slow, compared),
            f"{comparison} on rail {rail}{explanation}",
            self._slow.of_ends([(host, rail)]),
            hosts=(host,),
            rails=(rail,),
        )

    def _comparison(self, host: str, rails: set[int], slow: int, compared: int, share: float) -> str:
        """Return text such as `bandwidth of h3 with 7 of 7 healthy hosts is at most 48 % of the typical value`."""
        if share <= FAILED_LOG_SHARE:
            return f"{host} could not exchange data with {slow} of {compared} healthy hosts"
        bound = "at most" if self._quantity == BANDWIDTH else "at least"
        if any((host, rail) in self._slow.partly_slow_ends for rail in rails):
            bound = "about"
        ratio = ratio_text(self._quantity, share)
        return (
            f"{self._quantity} of {host} with {slow} of {compared} healthy hosts is {bound} {ratio} the typical value"
        )

    def _count_slow_partners(self, host: str, rails: set[int]) -> tuple[int, int]:
        """Return the number of hosts with which `host` is slow on any of these rails, and the number of hosts compared.

        On each rail, `host` is compared only with the hosts whose end on that rail is good.
        """
        is_slow_with: dict[str, bool] = {}
        for rail in rails:
            end = (host, rail)
            limit = self._slow.limit if end in self._slow.partly_slow_ends else self._slow.end_limit
            base = self._slow.rails.get(rail, 0.0) - limit
            for index in self._slow.edges_of_end[end]:
                partner = next(other for other in self._edges[index].ends() if other != end)
                if partner not in self._slow.ends:
                    name = partner[0]
                    is_slow_with[name] = is_slow_with.get(name, False) or self._slow.shares[index] < base
        return sum(is_slow_with.values()), len(is_slow_with)

    def _slow_links_or_fabric(self) -> Iterator[Suspect]:
        """Yield the slow links; if there are too many slow links (`are_of_fabric`), yield the fabric instead."""
        slow_edges: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index in self._slow.links:
            slow_edges[(self._edges[index].a, self._edges[index].b)].append(index)
        edge_counts: dict[tuple[str, str], int] = defaultdict(int)
        for edge in self._edges:
            edge_counts[(edge.a, edge.b)] += 1
        if are_of_fabric(self._slow.links, self._edges):
            indexes = [index for pair_indexes in slow_edges.values() for index in pair_indexes]
            yield self._suspect(
                FABRIC,
                "",
                indexes,
                rule_of_succession(len({host for pair in slow_edges for host in pair}), len(self._rails_of_host)),
                f"{len(slow_edges)} of {len(edge_counts)} pairs of hosts are slow, without a common host, NIC or rail",
                self._slow.of_edges({self._edges[index].rail for index in indexes}),
            )
            return
        for (a, b), indexes in slow_edges.items():
            yield self._slow_link(a, b, indexes, edge_counts[(a, b)])

    def _slow_link(self, a: str, b: str, indexes: Sequence[int], edge_count: int) -> Suspect:
        rails = tuple(sorted(self._edges[index].rail for index in indexes))
        partners = min(self._count_fast_partners(host, rails) for host in (a, b))
        failed = next((self._edges[index].failed for index in indexes if self._edges[index].failed), "")
        share = upper_median(self._slow.shares[index] for index in indexes)
        all_rails = len(indexes) == edge_count
        subject = "exchange" if failed else self._quantity
        finding = f"failed ({failed})" if failed else f"is {ratio_text(self._quantity, share)} the typical value"
        on_rails = "" if all_rails else f" on {rails_name(rails)}"
        others = (
            f"each host reaches normal speed with at least {counted(partners, 'other')}"
            if partners
            else "one of the hosts reaches normal speed with no other healthy host"
        )
        return self._suspect(
            LINK,
            f"{a} - {b}" if all_rails else f"{a} - {b} {rails_name(rails)}",
            indexes,
            rule_of_succession(partners, partners),
            f"{subject} between {a} and {b} {finding}{on_rails}; {others}",
            self._slow.of_edges(rails),
            hosts=(a, b),
            rails=() if all_rails else rails,
        )

    def _count_fast_partners(self, host: str, rails: Iterable[int]) -> int:
        """Return the number of hosts with which `host` has normal speed on at least one of these rails.

        A host counts only if its end on that rail is good.
        """
        return len(
            {
                other
                for rail in rails
                for index in self._slow.edges_of_end[(host, rail)]
                if index not in self._slow_links
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
        compared_with: tuple[float, float],
        hosts: tuple[str, ...] = (),
        rails: tuple[int, ...] = (),
    ) -> Suspect:
        """Return a suspect with these edges. `compared_with`: the typical share, and the share below which a part is slow."""
        return Suspect(
            kind=kind,
            where=where,
            confidence=confidence,
            evidence=evidence,
            hosts=hosts,
            rails=rails,
            quantity=self._quantity,
            **self._figures(indexes, *compared_with),
        )

    def _figures(self, indexes: Iterable[int], typical: float, limit: float) -> dict[str, float]:
        """Return the median value of these edges (`measured`), and `typical` and `limit` as values.

        A share is the logarithm of speed / reference speed. So speed and share of an edge give its reference speed.
        The median of the reference speeds (`full`) converts `typical` and `limit`, which are shares, to B/s or s.

        Failed edges do not count. If all of these edges failed, there is no `measured`.
        """

        def in_unit(speed: float) -> float:
            return speed if self._quantity == BANDWIDTH else 1 / speed

        speeds = self._speeds(indexes)
        full = statistics.median(speed / math.exp(share) for speed, share in speeds or self._speeds(self._slow.shares))
        figures = {"typical": in_unit(full * math.exp(typical)), "limit": in_unit(full * math.exp(limit))}
        return {**figures, "measured": in_unit(statistics.median(speed for speed, _ in speeds))} if speeds else figures

    def _speeds(self, indexes: Iterable[int]) -> list[tuple[float, float]]:
        """Return the speed and the share of each of these edges that did not fail."""
        return [
            (self._edges[index].speed, self._slow.shares[index]) for index in indexes if self._edges[index].speed > 0
        ]


def ratio_text(quantity: str, share: float) -> str:
    """Return a share of speed (given as a logarithm) as text: `40 % of` for a bandwidth, `2.5 times` for a latency."""
    return f"{100 * math.exp(share):.0f} % of" if quantity == BANDWIDTH else f"{math.exp(-share):.3g} times"


def failed_alone_text(kind: str) -> str:
    """Return the evidence against a part (GPU or NIC) that fails a check without other hosts."""
    return f"the {'GPU' if kind == GPU else 'RDMA port'} also failed in tests without other hosts"


def rails_name(rails: Sequence[int]) -> str:
    """Return `rail 1` or `rails 1, 2`."""
    return f"rail{'s' if len(rails) != 1 else ''} {', '.join(map(str, rails))}"
