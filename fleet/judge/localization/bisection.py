"""Plan the probe launches that find the faulty hosts or links of a multi-node launch that hangs or does not start.

A launch is a list of groups of hosts. No host is in two groups, all groups start at the same time, and each works or fails.
`Bisection` keeps no state. It gets the outcomes so far and repeats its search from the start. It returns the first groups that
the search needs and that have no outcome yet.

1. Launch the hosts in pairs. If a pair works, both of its hosts are good. If no pair works, form other pairs.
2. Launch each remaining host with a good host and, if that fails, with a second good host. If it fails with both, the remaining
   host is bad. If it works with the second, it is good and its link to the first is bad.
3. Launch all good hosts together. If that fails, a link between two of them is bad. Bisection finds the shortest failing
   prefix of the list of good hosts. The last host of this prefix is one end of the link. A second bisection finds the other end.

A launch can also fail by chance. So before a link counts as bad, its two hosts are launched together a second time.

Finding a bad host takes four launches, whatever the number of hosts N. Finding a bad link takes about 2 log2(N) + 5 launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.judge.localization.matrix import FABRIC, HOST, LINK, Suspect, rule_of_succession
from schemas.tournament import pairs_of, select_rounds

WITNESSES = 2
"""A link counts as bad after this many failures. A host counts as bad after it failed with this many good hosts.

A single failure may be due to chance. A single failure of a host may also be due to a bad link.
"""


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """The result of one group of a launch."""

    hosts: tuple[str, ...]
    worked: bool


History = Sequence[Sequence[GroupOutcome]]
"""Outcomes of each launch, oldest launch first."""


@dataclass(frozen=True, kw_only=True)
class ProbeConclusion:
    """The result of a finished search."""

    suspects: tuple[Suspect, ...]
    """Bad hosts and links; the fabric if only groups of three or more hosts fail, or if no two hosts work
    together; empty if nothing fails."""
    good: tuple[str, ...]
    """Hosts that worked with at least one other host."""
    launches: int


class _MissingOutcomesError(Exception):
    """The search needs the outcomes of these groups to continue."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self.groups = [list(group) for group in groups]


class Bisection:
    """Plan the probes for hosts that failed when all of them were launched together."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(dict.fromkeys(hosts))

    def next_launches(self, history: History) -> list[list[str]] | ProbeConclusion:
        """Return the groups of the next launch (no host is in two groups), or the conclusion.

        Args:
            history: outcomes of every probe launch so far, without the first launch of all hosts. If a group was launched twice,
                the later outcome counts.
        """
        try:
            return _Search(self._hosts, history).run()
        except _MissingOutcomesError as error:
            return error.groups


class _Search:
    """One pass of the search over the known outcomes. It raises _MissingOutcomesError at the first unknown outcome."""

    def __init__(self, hosts: Sequence[str], history: History) -> None:
        self._hosts = list(hosts)
        self._launches = len(history)
        outcomes = [outcome for launch in history for outcome in launch]
        every_host = dict.fromkeys([*hosts, *(host for outcome in outcomes for host in outcome.hosts)])
        self._bit_of_host = {host: index for index, host in enumerate(every_host)}
        # A group of hosts is an integer (mask) with one bit for each of its hosts.
        self._worked_by_mask = {self._host_mask(outcome.hosts): outcome.worked for outcome in outcomes}
        self._failure_counts = Counter(self._host_mask(outcome.hosts) for outcome in outcomes if not outcome.worked)
        self._working_masks = [
            mask for mask, worked in self._worked_by_mask.items() if worked and mask.bit_count() > WITNESSES
        ]
        self._failing_masks = [mask for mask, worked in self._worked_by_mask.items() if not worked]
        self.good: dict[str, None] = {}
        self.bad: dict[str, int] = {}
        """Bad host -> number of good hosts with which it failed."""
        self.links: list[tuple[str, str]] = []
        self.fabric_evidence = ""
        """Why the fabric is the suspect; empty if it is not."""

    def run(self) -> ProbeConclusion:
        """Return the bad hosts and links. Raise _MissingOutcomesError if an outcome is missing."""
        if len(self._hosts) < WITNESSES:
            return self.conclusion()
        if len(self._hosts) == WITNESSES:
            self.links.append((self._hosts[0], self._hosts[1]))
            return self.conclusion()
        failed_pairs = self._probe_pairs()
        if not self.good:
            self.fabric_evidence = f"no two of the {len(self._hosts)} hosts work together"
            return self.conclusion()
        self._classify([host for host in self._hosts if host not in self.good])
        self.links += [pair for pair in failed_pairs if all(host in self.good for host in pair)]
        self._confirm_links()
        self._find_links_between_good_hosts()
        return self.conclusion()

    def _probe_pairs(self) -> list[tuple[str, str]]:
        """Launch the hosts in pairs, each time in other pairs, until a pair works. Return the pairs that failed."""
        failed: list[tuple[str, str]] = []
        for number in select_rounds(len(self._hosts)):
            pairs = pairs_of(self._hosts, number)
            outcomes = self._outcomes(pairs)
            failed += [pair for pair, worked in zip(pairs, outcomes, strict=True) if not worked]
            self.good |= dict.fromkeys(
                host for pair, worked in zip(pairs, outcomes, strict=True) if worked for host in pair
            )
            if self.good:
                break
        return failed

    def _classify(self, suspects: Iterable[str]) -> None:
        """Launch each suspect with good hosts until it works with one or fails with two."""
        unclassified = dict.fromkeys(suspects)
        witnesses = list(self.good)
        failed_with: dict[str, list[str]] = {host: [] for host in unclassified}
        while unclassified:
            pairs = _match_with_witnesses(unclassified, witnesses, failed_with)
            for (suspect, witness), worked in zip(pairs, self._outcomes(pairs), strict=True):
                if worked:
                    self.good[suspect] = None
                    self.links += [(suspect, other) for other in failed_with[suspect]]
                    del unclassified[suspect]
                    continue
                failed_with[suspect].append(witness)
                if len(failed_with[suspect]) == WITNESSES:
                    self.bad[suspect] = WITNESSES
                    del unclassified[suspect]

    def _find_links_between_good_hosts(self) -> None:
        """Find bad links between good hosts.

        A known bad link is avoided by leaving out one of its hosts: the search runs once without the first host of each bad
        link, and once without the second.
        """
        good_hosts = [host for host in self._hosts if host in self.good]
        for end in (0, 1):
            while True:
                excluded = {link[end] for link in self.links}
                rest = [host for host in good_hosts if host not in excluded]
                if len(rest) < WITNESSES or self._group_works(rest):
                    break
                group = self._failing_group(rest)
                if len(group) != WITNESSES:
                    names = ", ".join(group)
                    self.fabric_evidence = (
                        f"each of {names} works with another host, but a group that includes all of them fails"
                    )
                    return
                self.links.append((group[0], group[1]))
                self._confirm_links()

    def _confirm_links(self) -> None:
        """Request a second launch of links that failed only once, because a launch may also fail by chance."""
        unconfirmed: list[tuple[str, str]] = []
        for link in self.links:
            busy = {host for pair in unconfirmed for host in pair}
            if self._failure_counts[self._host_mask(link)] < WITNESSES and busy.isdisjoint(link):
                unconfirmed.append(link)
        if unconfirmed:
            raise _MissingOutcomesError(unconfirmed)

    def _failing_group(self, hosts: Sequence[str]) -> list[str]:
        """Return two hosts that fail together, or three hosts of a failing group if the search finds no such two."""
        group: list[str] = []
        rest = list(hosts)
        for _ in range(WITNESSES):
            length = self._failing_prefix_length(rest, group)
            group.insert(0, rest[length - 1])
            rest = rest[: length - 1]
        return group if not self._group_works(group) else [*rest[-1:], *group]

    def _failing_prefix_length(self, hosts: Sequence[str], partners: Sequence[str]) -> int:
        """Return the length of the shortest prefix of `hosts` that fails when launched with `partners`."""
        working, failing = max(0, 1 - len(partners)), len(hosts)
        while failing - working > 1:
            middle = (working + failing) // 2
            if self._group_works([*hosts[:middle], *partners]):
                working = middle
            else:
                failing = middle
        return failing

    def _group_works(self, group: Sequence[str]) -> bool:
        return self._outcomes([group])[0]

    def _outcomes(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """Return whether each group works. Raise _MissingOutcomesError if an outcome is not known and cannot be inferred."""
        outcomes = [self._known_outcome(self._host_mask(group)) for group in groups]
        missing = [group for group, worked in zip(groups, outcomes, strict=True) if worked is None]
        if missing:
            raise _MissingOutcomesError(missing)
        return [bool(worked) for worked in outcomes]

    def _known_outcome(self, mask: int) -> bool | None:
        """Return the outcome of a group, or infer it: subsets of a working group work, supersets of a failing one fail.

        The launch of all hosts is known to fail.
        """
        if mask in self._worked_by_mask:
            return self._worked_by_mask[mask]
        if mask.bit_count() > WITNESSES and any(mask & failed == failed for failed in self._failing_masks):
            return False
        if any(mask & worked == mask for worked in self._working_masks):
            return True
        return False if mask.bit_count() == len(self._hosts) else None

    def _host_mask(self, hosts: Iterable[str]) -> int:
        mask = 0
        for host in hosts:
            mask |= 1 << self._bit_of_host[host]
        return mask

    def conclusion(self) -> ProbeConclusion:
        """Return the suspects and the good hosts found so far."""
        suspects = [self._bad_host(host, witnesses) for host, witnesses in self.bad.items()]
        suspects += [self._bad_link(*link) for link in self.links]
        if self.fabric_evidence:
            suspects.append(Suspect(kind=FABRIC, where="", confidence=0.5, evidence=self.fabric_evidence))
        return ProbeConclusion(suspects=tuple(suspects), good=tuple(self.good), launches=self._launches)

    def _bad_host(self, host: str, witnesses: int) -> Suspect:
        return Suspect(
            kind=HOST,
            where=host,
            confidence=rule_of_succession(witnesses, witnesses),
            evidence=f"{host} fails with each of {witnesses} hosts that work without it",
            hosts=(host,),
        )

    def _bad_link(self, a: str, b: str) -> Suspect:
        is_confirmed = a in self.good  # then b is good too
        failures = WITNESSES if is_confirmed else 0
        explanation = (
            " twice; each works with another host"
            if is_confirmed
            else "; the fault may be in either host or in the link between them"
        )
        return Suspect(
            kind=LINK,
            where=f"{a} - {b}",
            confidence=rule_of_succession(failures, failures),
            evidence=f"{a} and {b} fail together{explanation}",
            hosts=(a, b),
        )


def _match_with_witnesses(
    suspects: Iterable[str], witnesses: Sequence[str], failed_with: dict[str, list[str]]
) -> list[tuple[str, str]]:
    """Pair suspects with good hosts with which they have not failed yet. Each good host is used at most once."""
    free_witnesses, pairs = list(witnesses), []
    for suspect in suspects:
        witness = next((host for host in free_witnesses if host not in failed_with[suspect]), None)
        if witness is not None:
            free_witnesses.remove(witness)
            pairs.append((suspect, witness))
    return pairs
