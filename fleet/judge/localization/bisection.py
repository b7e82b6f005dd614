"""Plan the probes of a job that cannot form or hangs, until the hosts or links at fault are known.

A launch is a list of groups without a common host. The groups start at once, and each works or fails. The planner reads the
outcomes so far and returns the next launch; it keeps no state. It repeats its search each time, and the first group that the
search needs and that was not launched yet is the answer.

1. Launch every host with one other: pairs that work are good, provided that only hosts or links can be bad.
2. Launch every other host with a good one, then with a second. A host that fails with both is bad. A host that works with one is
   good, and its link to the other is bad.
3. Launch all good hosts together. If that fails, a link between two of them is bad. Bisection finds it: the shortest prefix of
   the list that fails ends at one end of the link, and a second bisection finds the other end.
4. Launch two good hosts that failed together once more, since a launch can also fail by chance.

One bad host takes four launches, of however many hosts; a bad link some 2 log2(N) + 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.judge.localization.matrix import FABRIC, HOST, LINK, Suspect, rule_of_succession
from schemas.tournament import chosen, pairs_of

WITNESSES = 2
"""Good hosts with which a bad one must fail: with one alone it may be the link. And launches in which a bad link must."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one group of a launch."""

    hosts: tuple[str, ...]
    worked: bool


History = Sequence[Sequence[Outcome]]
"""One entry a launch, the earliest first."""


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The result of a finished search."""

    suspects: tuple[Suspect, ...]
    """Bad hosts and links; the fabric where only many together fail; none where all of them work."""
    good: tuple[str, ...]
    """Hosts that worked with another."""
    launches: int


class _NeededError(Exception):
    """The search needs the results of these groups to continue."""

    def __init__(self, groups: Sequence[Sequence[str]]) -> None:
        self.groups = [list(group) for group in groups]


class Bisection:
    """The planner for these hosts, of whom it is known that a job of all of them did not work."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(dict.fromkeys(hosts))

    def next_launches(self, history: History) -> list[list[str]] | Conclusion:
        """The groups of the next launch, disjoint, to be started at once; or the conclusion.

        Args:
            history: every launch so far with what came of it, without the one of all hosts. A group that was launched twice
                counts as it ended last.
        """
        try:
            return _Search(self._hosts, history).conclusion()
        except _NeededError as needed:
            return needed.groups


class _Search:
    """The search, as if every launch had been made; asks for those that were not by _NeededError."""

    def __init__(self, hosts: Sequence[str], history: History) -> None:
        self._hosts = list(hosts)
        self._launches = len(history)
        launched = (host for launch in history for outcome in launch for host in outcome.hosts)
        self._place = {host: index for index, host in enumerate(dict.fromkeys([*hosts, *launched]))}
        ended = {self._mask(outcome.hosts): outcome.worked for launch in history for outcome in launch}
        self._ended = ended
        self._failures = Counter(self._mask(each.hosts) for launch in history for each in launch if not each.worked)
        self._worked = [mask for mask, worked in ended.items() if worked and mask.bit_count() > WITNESSES]
        self._failed = [mask for mask, worked in ended.items() if not worked]
        self.good: dict[str, None] = {}
        self.bad: dict[str, int] = {}
        """Host -> number of good ones with which it failed."""
        self.links: list[tuple[str, str]] = []
        self.together = ""
        """Why only many together fail."""

    def conclusion(self) -> Conclusion:
        """Return the bad hosts and links, or raise _NeededError."""
        if len(self._hosts) < WITNESSES:
            return self.conclude()
        if len(self._hosts) == WITNESSES:
            self.links.append((self._hosts[0], self._hosts[1]))
            return self.conclude()
        failed = self._first_pairs()
        if not self.good:
            self.together = f"no two of the {len(self._hosts)} hosts work with each other"
            return self.conclude()
        self._settle([host for host in self._hosts if host not in self.good])
        self.links += [pair for pair in failed if all(host in self.good for host in pair)]
        self._confirm()
        self._links_among_good()
        return self.conclude()

    def _first_pairs(self) -> list[tuple[str, str]]:
        """Launch the hosts in pairs, again with other pairs while none works; return the pairs that failed."""
        failed: list[tuple[str, str]] = []
        for number in chosen(len(self._hosts)):
            pairs = pairs_of(self._hosts, number)
            ended = self._ask(pairs)
            failed += [pair for pair, worked in zip(pairs, ended, strict=True) if not worked]
            self.good |= dict.fromkeys(
                host for pair, worked in zip(pairs, ended, strict=True) if worked for host in pair
            )
            if self.good:
                break
        return failed

    def _settle(self, suspects: Iterable[str]) -> None:
        """Pair each suspect with good hosts until it works with one or fails with two."""
        open_ones = dict.fromkeys(suspects)
        witnesses = list(self.good)
        failed_with: dict[str, list[str]] = {host: [] for host in open_ones}
        while open_ones:
            pairs = _matched(open_ones, witnesses, failed_with)
            for (suspect, witness), worked in zip(pairs, self._ask(pairs), strict=True):
                if worked:
                    self.good[suspect] = None
                    self.links += [(suspect, other) for other in failed_with[suspect]]
                    del open_ones[suspect]
                    continue
                failed_with[suspect].append(witness)
                if len(failed_with[suspect]) == WITNESSES:
                    self.bad[suspect] = WITNESSES
                    del open_ones[suspect]

    def _links_among_good(self) -> None:
        """The links that are bad between hosts that are good, once for each way to leave the known ones out."""
        everyone = [host for host in self._hosts if host in self.good]
        for end in (0, 1):
            while True:
                left_out = {link[end] for link in self.links}
                rest = [host for host in everyone if host not in left_out]
                if len(rest) < WITNESSES or self._works(rest):
                    break
                result = self._culprits(rest)
                if len(result) != WITNESSES:
                    self.together = f"{', '.join(result)} work in pairs and fail together with more"
                    return
                self.links.append((result[0], result[1]))
                self._confirm()

    def _confirm(self) -> None:
        """Relaunch links that failed only once, because a launch may also fail by chance."""
        again: list[tuple[str, str]] = []
        for link in self.links:
            busy = {host for pair in again for host in pair}
            if self._failures[self._mask(link)] < WITNESSES and busy.isdisjoint(link):
                again.append(link)
        if again:
            raise _NeededError(again)

    def _culprits(self, hosts: Sequence[str]) -> list[str]:
        """Two of them that fail together; more, and not all of those it takes, where two do not."""
        result: list[str] = []
        rest = list(hosts)
        for _ in range(WITNESSES):
            number = self._shortest(rest, result)
            result.insert(0, rest[number - 1])
            rest = rest[: number - 1]
        return result if not self._works(result) else [*rest[-1:], *result]

    def _shortest(self, hosts: Sequence[str], partners: Sequence[str]) -> int:
        """How many of the hosts from the first on it takes to fail beside those others."""
        works, fails = max(0, 1 - len(partners)), len(hosts)
        while fails - works > 1:
            middle = (works + fails) // 2
            if self._works([*hosts[:middle], *partners]):
                works = middle
            else:
                fails = middle
        return fails

    def _works(self, group: Sequence[str]) -> bool:
        return self._ask([group])[0]

    def _ask(self, groups: Sequence[Sequence[str]]) -> list[bool]:
        """What came, or must have come, of each group; raises _NeededError where that is not known."""
        known = [self._known(self._mask(group)) for group in groups]
        missing = [group for group, worked in zip(groups, known, strict=True) if worked is None]
        if missing:
            raise _NeededError(missing)
        return [bool(worked) for worked in known]

    def _known(self, mask: int) -> bool | None:
        """As it ended; else a part of what worked works, and what holds a part that failed fails."""
        if mask in self._ended:
            return self._ended[mask]
        if mask.bit_count() > WITNESSES and any(mask & failed == failed for failed in self._failed):
            return False
        if any(mask & worked == mask for worked in self._worked):
            return True
        return False if mask.bit_count() == len(self._hosts) else None

    def _mask(self, hosts: Iterable[str]) -> int:
        mask = 0
        for host in hosts:
            mask |= 1 << self._place[host]
        return mask

    def conclude(self) -> Conclusion:
        """Return the suspects and good hosts so far."""
        suspects = [self._bad_host(host, witnesses) for host, witnesses in self.bad.items()]
        suspects += [self._bad_link(*link) for link in self.links]
        if self.together:
            suspects.append(Suspect(kind=FABRIC, where="", confidence=0.5, evidence=self.together))
        return Conclusion(suspects=tuple(suspects), good=tuple(self.good), launches=self._launches)

    def _bad_host(self, host: str, witnesses: int) -> Suspect:
        return Suspect(
            kind=HOST,
            where=host,
            confidence=rule_of_succession(witnesses, witnesses),
            evidence=f"{host} fails with each of {witnesses} hosts that work without it",
            hosts=(host,),
        )

    def _bad_link(self, a: str, b: str) -> Suspect:
        good = a in self.good  # then both are
        spoke = WITNESSES if good else 0
        accounts = (
            " twice; each of the two works with another host"
            if good
            else "; either host, or what is between: two cannot tell"
        )
        return Suspect(
            kind=LINK,
            where=f"{a} - {b}",
            confidence=rule_of_succession(spoke, spoke),
            evidence=f"{a} and {b} fail together{accounts}",
            hosts=(a, b),
        )


def _matched(
    suspects: Iterable[str], witnesses: Sequence[str], failed_with: dict[str, list[str]]
) -> list[tuple[str, str]]:
    """Pair suspects with good hosts that they have not failed with; each good host is used once."""
    free, pairs = list(witnesses), []
    for suspect in suspects:
        witness = next((host for host in free if host not in failed_with[suspect]), None)
        if witness is not None:
            free.remove(witness)
            pairs.append((suspect, witness))
    return pairs
