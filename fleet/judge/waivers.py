"""Waivers: what failed stays failed, with the person who answers for it. Pure: days are compared with the day of the plan.

A waiver is for one criterion on one host or one part. It is never for a whole fleet: that would be another criterion, and those
are written in packs. What is absent (inconclusive) is waived only by host and name of the observation, and never if nothing
is known: a host without a record, a GPU or a stage without observations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from schemas.reports import FAIL, INCONCLUSIVE, LineKind, SummaryLine, Verdict
from schemas.scopes import Scope
from schemas.waivers import Waiver

NOT_WAIVABLE = frozenset({"record", "gpu", "host.events"})
"""Observations whose absence cannot be waived: nothing is known of the host or the GPU."""
STAGE_PREFIX = "stage."
"""Prefix of the name of a missing stage."""


class WaiverMatcher:
    """Marks the waived verdicts of a run, and records the result of each waiver."""

    def __init__(self, waivers: Sequence[Waiver], day: str) -> None:
        """Prepare the waivers. `day` is the day of the plan, `2026-11-21`."""
        self._day = day[:10]
        self._of_host: dict[str, list[Waiver]] = {}
        self._of_serial: dict[str, list[Waiver]] = {}
        for waiver in waivers:
            rises = self._of_host if waiver.host else self._of_serial
            rises.setdefault(waiver.host or waiver.serial, []).append(waiver)

    def apply(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the waiver that applies to it, or with a note that it has expired."""
        if verdict.verdict not in (FAIL, INCONCLUSIVE) or verdict.waiver is not None:
            return verdict
        result = [waiver for waiver in self._near(verdict) if covers(waiver, verdict)]
        valid = next((waiver for waiver in result if waiver.until >= self._day), None)
        if valid:
            return replace(verdict, waiver=valid)
        if result:
            values = f"its waiver by {result[0].who} expired on {result[0].until} ({result[0].why})"
            detail = "; ".join(text for text in (verdict.detail, values) if text)
            return replace(verdict, reason=f"{verdict.reason}; {values}", detail=detail)
        return verdict

    def _near(self, verdict: Verdict) -> Iterator[Waiver]:
        yield from self._of_host.get(verdict.host, ())
        if verdict.serial:
            yield from self._of_serial.get(verdict.serial, ())


def covers(waiver: Waiver, verdict: Verdict) -> bool:
    """Whether a waiver is for a verdict, its day aside."""
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
    """Yield a line for each waiver: how often it was used, by whom and until when it is given, or why it was not used."""
    counts: dict[Waiver, int] = {}
    for verdict in verdicts:
        if verdict.waiver:
            counts[verdict.waiver] = counts.get(verdict.waiver, 0) + 1
    for waiver in waivers:
        if count := counts.get(waiver, 0):
            kind = "inconclusive" if waiver.absent else "failed"
            title, text = (
                "WAIVED",
                f"{waiver.target}: {count} {kind}; by {waiver.who} until {waiver.until}: {waiver.why}",
            )
        elif waiver.until < day[:10]:
            title, text = f"Waiver EXPIRED on {waiver.until}", f"{waiver.target} (by {waiver.who})"
        else:
            title, text = "Waiver not used", f"{waiver.target} (by {waiver.who} until {waiver.until})"
        yield SummaryLine(kind=LineKind.WAIVER, title=title, text=text, values={"verdicts": count})
