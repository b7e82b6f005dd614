"""Run perftest between the two hosts of each pair in the round-robin tournament (schemas/tournament.py).

A rail is a pair of ports with the same slot (or position) on the two hosts. The setting `sharings` selects whether each rail is
tested alone, all rails together, or both. Both hosts of a pair compute the same list of runs. In each run one host starts the
servers and posts their TCP ports in the key-value store of the launch, and the other host connects. After a run both hosts post
which rails failed, and leave these rails out of the rest of the round. If the failed test used GPU memory, the rail is kept,
because perhaps only the support of GPU memory is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.benchmarks.links.perftest import PerftestError
from agent.benchmarks.links.perftest_run import (
    LISTEN_S,
    POLL_S,
    PerftestRun,
    VerbsTest,
    finish,
    free_tcp_port,
    wait_until_listening,
)
from agent.benchmarks.links.rdma_ports import RdmaPort, partner_port
from agent.benchmarks.links.verbs_report import PortReport, planned_tests
from schemas.records import ERROR, SKIPPED, UNSUPPORTED
from schemas.tournament import partner, select_rounds

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

MAX_REASON = 300
Rails = Sequence[tuple[RdmaPort, str]]
"""For each rail: the port of this host, and the slot of the partner's port."""


@dataclass(frozen=True, kw_only=True)
class PairRun:
    """One run of a test between two hosts, on one rail or on several at once."""

    test: VerbsTest
    client: str
    """The host that connects; the other host runs the servers."""
    sharing: str
    """`alone`: one rail at a time; `together`: all rails at once."""
    number: int
    """Number of the run in its round, from 1."""
    rails: Rails


def measure_pairs(
    context: RankContext,
    settings: Mapping[str, Any],
    report: PortReport,
    ports: Sequence[RdmaPort],
    request: Mapping[str, Any],
) -> None:
    """Report the `verbs.*` figures of each port of this host, measured with the port of the same rail on every partner host.

    Args:
        context, settings: the rank and the benchmark's settings.
        report: reports the figures.
        ports: the ports of this host that are measured; may be empty.
        request: the supervisor's request, with the members of the launch and their addresses.
    """
    members = [str(name) for name in request.get("members", [])]
    gang = [str(name) for name in request.get("gang") or members]
    if len(members) < 2:
        return
    me = members[context.node]
    store = HostStore(context, me)
    store.post("ports", [port.slot for port in ports])
    if not ports:
        return
    deadline = time.monotonic() + context.timeout_s
    slots = {name: store.wait("ports", name, deadline - time.monotonic()) for name in members if name != me}
    rounds = select_rounds(len(gang), settings["rounds"])
    for count, number in enumerate(rounds, 1):
        index = partner(len(gang), number, gang.index(me))
        other = gang[index] if index is not None else ""
        context.set_phase(f"verbs round {count} of {len(rounds)}: {f'with {other}' if other else 'without a partner'}")
        if other in members:
            pair = PairOfHosts(context, store, report, me, other, str(request.get("addresses", {}).get(other, other)))
            theirs = slots[other]
            pair.measure(
                settings, ports, [str(slot) for slot in theirs] if isinstance(theirs, list) else None, gang, count
            )
    report.best_partners()


class HostStore:
    """Values that the hosts of a launch publish for each other, in the key-value store of the launch."""

    def __init__(self, context: RankContext, host: str) -> None:
        self._context, self._host = context, host

    def post(self, key: str, value: Any) -> None:
        """Publish a value of this host under `key`."""
        self._context.store.set(f"verbs/{key}/{self._host}", json.dumps(value))

    def wait_for_both(self, key: str, host: str, limit_s: float) -> bool:
        """Wait for `host` at the point `key`; return whether it arrives within `limit_s`.

        A host that waits in vain publishes this, so that the other host does not wait when it arrives later.
        """
        self.post(key, "here")
        name, deadline = f"verbs/{key}/{host}", time.monotonic() + limit_s
        while time.monotonic() < deadline and not self._context.store.check([f"{name}/gone"]):
            if self._context.store.check([name]):
                return True
            self._pause()
        self._context.store.set(f"verbs/{key}/{self._host}/gone", "gone")
        return False

    def _pause(self) -> None:
        self._context.heartbeat.record_progress()
        time.sleep(POLL_S)

    def wait(self, key: str, host: str, limit_s: float) -> Any:
        """Return the value that `host` published under `key`; None if there is none within `limit_s`, or if it is not JSON."""
        name, deadline = f"verbs/{key}/{host}", time.monotonic() + limit_s
        while not self._context.store.check([name]):
            if time.monotonic() > deadline:
                return None
            self._pause()
        try:
            return json.loads(self._context.store.get(name).decode())
        except ValueError:
            return None


class PairOfHosts:
    """This host and its partner in one round of the tournament."""

    def __init__(
        self, context: RankContext, store: HostStore, report: PortReport, me: str, other: str, address: str
    ) -> None:
        self._context, self._store, self._report = context, store, report
        self._me, self._other, self._address = me, other, address
        self._failed: dict[str, str] = {}
        """Slot of this host -> why the rail of this slot failed in this round."""
        self._lacking: set[str] = set()
        """Slots of this host's ports on which a test with GPU memory could not be started."""

    def measure(
        self,
        settings: Mapping[str, Any],
        ports: Sequence[RdmaPort],
        partner_slots: Sequence[str] | None,
        gang: Sequence[str],
        count: int,
    ) -> None:
        """Run every test of the round.

        Report the figures of each test in which this host is the client, or whose direction is `both_ways`.

        Args:
            settings: the benchmark's settings.
            ports: the ports of this host that are measured.
            partner_slots: the slots of the partner's ports; None if the partner did not report them.
            gang: the planned hosts. Of the two hosts, the one that comes first in this list is the first client of each test.
            count: number of the round, from 1.
        """
        rails = self._rails(ports, partner_slots or []) if partner_slots is not None else []
        # Skip the round if the partner does not answer: it may still be in an earlier round, in which a test hangs.
        if partner_slots is None or (
            rails and not self._store.wait_for_both(f"{count}/round", self._other, self._context.timeout_s)
        ):
            reason = f"{self._other} did not take part in round {count}"
            scope = f"{ports[0].scope},partner={self._other}"
            self._context.report_absent("verbs.bandwidth", unit="B/s", scope=scope, status=ERROR, reason=reason)
            return
        for run in self._runs(settings, rails, gang):
            rails = [rail for rail in run.rails if rail[0].slot not in self._failed]
            for port, _ in run.rails if run.client == self._me else ():
                if reason := self._failed.get(port.slot, ""):
                    self._absent(run, port, SKIPPED, f"an earlier test of the rail failed: {reason}")
            if rails:
                self._run(run, rails, f"{count}/{run.number}")

    def _runs(self, settings: Mapping[str, Any], rails: Rails, gang: Sequence[str]) -> Iterator[PairRun]:
        """Yield the runs of the round, in the same order on both hosts."""
        tests = planned_tests(settings)
        first, second = sorted((self._me, self._other), key=list(gang).index)
        number = 0
        for sharing in settings["sharings"] if rails else ():
            for batch in [rails] if sharing == "together" else [[rail] for rail in rails]:
                for test in tests:
                    for client in (first, second) if test.has_two_directions else (first,):
                        number += 1
                        yield PairRun(test=test, client=client, sharing=sharing, number=number, rails=batch)

    def _rails(self, ports: Sequence[RdmaPort], partner_slots: Sequence[str]) -> Rails:
        """Return the rails on which both hosts measure a port; report the other ports of this host as skipped."""
        rails = []
        for port in ports:
            slot = partner_port(port, [item.slot for item in ports], partner_slots)
            if slot is None:
                reason = (
                    f"{self._other} measures no port on this rail"
                    if partner_slots
                    else f"{self._other} measures no port"
                )
                scope = f"{port.scope},partner={self._other}"
                self._context.report_absent("verbs.bandwidth", unit="B/s", scope=scope, status=SKIPPED, reason=reason)
            else:
                rails.append((port, slot))
        return rails

    def _run(self, run: PairRun, rails: Rails, key: str) -> None:
        """Run this host's side of a test on all these rails at once, and report its figures or the error."""
        sides: dict[str, PerftestRun] = {}
        problems: dict[str, str] = {}
        is_client = run.client == self._me
        try:
            if is_client:
                self._connect(run, rails, key, sides, problems)
            else:
                self._serve(run, rails, key, sides, problems)
            problems |= {slot: why for slot, why in finish(sides, run.test.limit_s, self._progress).items() if why}
            at_once = [port for port, _ in rails]
            for port in at_once:
                if (
                    port.slot in sides
                    and port.slot not in problems
                    and (is_client or run.test.direction == "both_ways")
                ):
                    stdout = sides[port.slot].stdout()
                    where = {"sharing": run.sharing, "partner": self._other}
                    if why := self._report.figure(run.test, port, stdout, at_once, **where):
                        problems[port.slot] = why
        finally:
            for side in sides.values():
                side.end()
        self._agree(run, rails, key, problems, is_client)

    def _serve(
        self, run: PairRun, rails: Rails, key: str, sides: dict[str, PerftestRun], problems: dict[str, str]
    ) -> None:
        """Start a server on each rail, and post for each rail the TCP port of its server, or why the server does not listen."""
        tcp_ports: dict[str, int] = {}
        for port, _ in rails:
            tcp_ports[port.slot] = free_tcp_port()
            if why := self._start(run, port, tcp_ports[port.slot], "", sides):
                problems[port.slot] = why
        problems |= wait_until_listening(
            {slot: (side, tcp_ports[slot]) for slot, side in sides.items()}, self._progress
        )
        for slot in problems.keys() & sides.keys():
            sides.pop(slot).end()
        self._store.post(f"{key}/serve", {slot: problems.get(slot, tcp_ports[slot]) for slot in tcp_ports})

    def _connect(
        self, run: PairRun, rails: Rails, key: str, sides: dict[str, PerftestRun], problems: dict[str, str]
    ) -> None:
        """Start a client on each rail whose server listens."""
        answers = self._store.wait(f"{key}/serve", self._other, run.test.limit_s + LISTEN_S)
        answers = answers if isinstance(answers, dict) else {}
        for port, slot in rails:
            answer = answers.get(slot, "did not start a server")
            if isinstance(answer, bool) or not isinstance(answer, int) or not 0 < answer < 1 << 16:
                problems[port.slot] = f"{self._other}: {_one_line(answer)}"
            elif why := self._start(run, port, answer, self._address, sides):
                problems[port.slot] = why

    def _start(self, run: PairRun, port: RdmaPort, tcp_port: int, server: str, sides: dict[str, PerftestRun]) -> str:
        """Start this host's side of a test on one port; return why it cannot be started, or an empty string."""
        try:
            sides[port.slot] = PerftestRun(self._report.command(run.test, port, tcp_port, server), port)
        except PerftestError as error:
            self._lacking.add(port.slot)
            return str(error)
        except OSError as error:
            return f"{run.test.program} cannot be started: {error.strerror or error}"
        return ""

    def _agree(self, run: PairRun, rails: Rails, key: str, problems: dict[str, str], is_client: bool) -> None:
        """Exchange with the partner which rails failed, so that both hosts leave out the same rails.

        If this host is the client and its side failed, also report why the figure is missing.
        """
        self._store.post(f"{key}/end", {port.slot: problems[port.slot] for port, _ in rails if port.slot in problems})
        answers = self._store.wait(f"{key}/end", self._other, run.test.limit_s + LISTEN_S)
        for port, slot in rails:
            if isinstance(answers, dict):
                theirs = f"{self._other}: {_one_line(answers[slot])}" if slot in answers else ""
            else:
                theirs = f"{self._other} did not answer"
            # The server's error is often a consequence of the client's error, so the client's error is preferred.
            own = problems.get(port.slot, "")
            reason = own or theirs if is_client else theirs or own
            if not reason:
                continue
            if run.test.memory != "gpu":
                self._failed[port.slot] = reason
            if is_client and own:
                lacks = run.test.memory == "gpu" and port.slot in self._lacking
                self._absent(run, port, UNSUPPORTED if lacks else ERROR, reason)
            elif own and not theirs and run.test.direction == "both_ways":
                self._absent(run, port, ERROR, own)  # only this host, the server, lacks its figure

    def _absent(self, run: PairRun, port: RdmaPort, status: str, reason: str) -> None:
        self._report.absent(run.test, port, status, reason, sharing=run.sharing, partner=self._other)

    def _progress(self) -> None:
        self._context.heartbeat.record_progress()


def _one_line(answer: object) -> str:
    """Return the text that another host posted, in one line without control characters, cut to MAX_REASON characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(answer)).split())[:MAX_REASON]
