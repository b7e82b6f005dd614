"""Match waivers with verdicts. A waived failure stays a failure; the waiver adds who accepted it and until when.

A waiver applies to one criterion on one host or one part. For a whole fleet, change the criterion in a pack instead.

A waiver with `absent: true` applies to an inconclusive verdict on a missing observation, and must name the observation. It
cannot apply if too little is known without the observation (NOT_WAIVABLE, STAGE_PREFIX).

A waiver has expired if the plan was made after its last day. So judging a run again later gives the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleet.judge.baseline import CRITERION as BASELINE
from fleet.quantities import counted
from schemas.reports import FAIL, INCONCLUSIVE, RECORD, LineKind, SummaryLine, Verdict
from schemas.scopes import Scope
from schemas.waivers import Waiver

NOT_WAIVABLE = frozenset({RECORD, "record.clock", "gpu", "host.events", BASELINE})
"""Names of observations whose absence cannot be waived. For example, nothing is known of a host without a record, and a
host without a baseline (accepted record) has nothing to be compared with."""
STAGE_PREFIX = "stage."
"""Prefix of the names of verdicts on a whole stage, for example one that did not finish. A waiver with `absent` cannot apply
to them."""


class WaiverMatcher:
    """The waivers of a run, indexed by host and serial."""

    def __init__(self, waivers: Sequence[Waiver], day: str) -> None:
        """Index the waivers. `day` is the day, or the time, at which the plan was made: `2026-11-21`."""
        self._day = day[:10]
        self._of_host: dict[str, list[Waiver]] = {}
        self._of_serial: dict[str, list[Waiver]] = {}
        for waiver in waivers:
            waivers_by_target = self._of_host if waiver.host else self._of_serial
            waivers_by_target.setdefault(waiver.host or waiver.serial, []).append(waiver)

    def apply(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the waiver that applies to it, or with a note if that waiver has expired."""
        if verdict.verdict not in (FAIL, INCONCLUSIVE) or verdict.waiver is not None:
            return verdict
        matching = [waiver for waiver in self._candidates(verdict) if covers(waiver, verdict)]
        valid = next((waiver for waiver in matching if waiver.until >= self._day), None)
        if valid:
            return replace(verdict, waiver=valid)
        if matching:
            expired = matching[0]
            text = f"its waiver by {expired.who} expired on {expired.until} ({expired.why})"
            detail = "; ".join(filter(None, (verdict.detail, text)))
            return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail)
        return verdict

    def _candidates(self, verdict: Verdict) -> Iterator[Waiver]:
        yield from self._of_host.get(verdict.host, ())
        if verdict.serial:
            yield from self._of_serial.get(verdict.serial, ())


def covers(waiver: Waiver, verdict: Verdict) -> bool:
    """Return whether a waiver applies to a verdict, expired or not."""
    if waiver.criterion != verdict.criterion or waiver.absent != (verdict.verdict == INCONCLUSIVE):
        return False
    if (waiver.host and waiver.host != verdict.host) or (waiver.serial and waiver.serial != verdict.serial):
        return False
    if waiver.name and waiver.name != verdict.name:
        return False
    if waiver.scope and not any(map(Scope.parse(waiver.scope).contains, (verdict.scope, verdict.part))):
        return False
    return not (waiver.absent and (verdict.name in NOT_WAIVABLE or verdict.name.startswith(STAGE_PREFIX)))


def summary(waivers: Sequence[Waiver], verdicts: Sequence[Verdict], day: str) -> Iterator[SummaryLine]:
    """Yield a line for each waiver: to how many verdicts it applies, or that it expired or was not used."""
    counts: dict[Waiver, int] = {}
    for verdict in verdicts:
        if verdict.waiver:
            counts[verdict.waiver] = counts.get(verdict.waiver, 0) + 1
    for waiver in waivers:
        if count := counts.get(waiver, 0):
            verdicts_text = counted(count, "inconclusive verdict" if waiver.absent else "failed verdict")
            title, text = (
                "WAIVED",
                f"{waiver.target}: {verdicts_text}, accepted by {waiver.who} until {waiver.until}: {waiver.why}",
            )
        elif waiver.until < day[:10]:
            title, text = f"Waiver EXPIRED on {waiver.until}", f"{waiver.target} (by {waiver.who})"
        else:
            title, text = "Waiver not used", f"{waiver.target} (by {waiver.who} until {waiver.until})"
        yield SummaryLine(kind=LineKind.WAIVER, title=title, text=text, values={"verdicts": count})
