"""Match waivers with verdicts. A waived failure stays a failure; the waiver adds who accepted it and until when.

A waiver applies to one criterion on one host or one part. For a whole fleet, change the criterion in a pack instead.

The serial of a board that several GPUs share does not say which GPU is meant. A waiver for such a GPU names its UUID, or the
serial and a scope.

A waiver with `absent: true` applies to an inconclusive verdict on a missing observation, and must name the observation. It
cannot apply if too little is known without the observation (NOT_WAIVABLE, STAGE_PREFIX).

A waiver has expired if the plan was made after its last day. So judging a run again later gives the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge.baseline import CRITERION as BASELINE
from fleet.judge.gpu_identity import identities, shared_serials
from fleet.quantities import counted
from schemas.documents import nearest
from schemas.records import Gpu
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

    def __init__(self, waivers: Sequence[Waiver], day: str, gpus: Mapping[str, Sequence[Gpu]]) -> None:
        """Index the waivers.

        Args:
            waivers: the waivers.
            day: the day, or the time, at which the plan was made: `2026-11-21`.
            gpus: host -> its GPUs.
        """
        self._day = day[:10]
        self._gpus = gpus
        self._shared = {host: shared for host, of_host in gpus.items() if (shared := shared_serials(of_host))}
        self._of_host: dict[str, list[Waiver]] = {}
        self._of_serial: dict[str, list[Waiver]] = {}
        for waiver in waivers:
            waivers_by_target = self._of_host if waiver.host else self._of_serial
            waivers_by_target.setdefault(waiver.host or waiver.serial, []).append(waiver)

    def apply(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the waiver that applies to it.

        If that waiver has expired, or names only a serial that several GPUs share, add a note instead.
        """
        if verdict.verdict not in (FAIL, INCONCLUSIVE) or verdict.waiver is not None:
            return verdict
        part = self._part(verdict)
        candidates = list(self._candidates(verdict, part))
        matching = [waiver for waiver in candidates if covers(waiver, verdict, part)]
        valid = next((waiver for waiver in matching if waiver.until >= self._day), None)
        if valid:
            return replace(verdict, waiver=valid)
        if matching:
            expired = matching[0]
            return _with_note(verdict, f"its waiver by {expired.who} expired on {expired.until} ({expired.why})")
        ambiguous = next((waiver for waiver in candidates if covers(waiver, verdict, verdict.serial)), None)
        if ambiguous:
            uuid = f", or {part} as `serial`" if part else ""
            why = f"several GPUs of the host have the serial {verdict.serial}: add `scope`{uuid}"
            return _with_note(verdict, f"the waiver by {ambiguous.who} does not apply, because {why}")
        return verdict

    def _part(self, verdict: Verdict) -> str:
        """Return the serial of the verdict. If several GPUs share it, return the UUID of the GPU, or nothing without a GPU."""
        shared = self._shared.get(verdict.host, ())
        if verdict.serial not in shared:
            return verdict.serial
        return identities(self._gpus[verdict.host]).get(Scope.parse(verdict.part_scope).device, "")

    def _candidates(self, verdict: Verdict, part: str) -> Iterator[Waiver]:
        yield from self._of_host.get(verdict.host, ())
        for serial in filter(None, dict.fromkeys((verdict.serial, part))):
            yield from self._of_serial.get(serial, ())


def _with_note(verdict: Verdict, text: str) -> Verdict:
    """Return the verdict with a note on a waiver that does not apply to it."""
    detail = "; ".join(filter(None, (verdict.detail, text)))
    return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail)


def covers(waiver: Waiver, verdict: Verdict, part: str) -> bool:
    """Return whether a waiver applies to a verdict, expired or not.

    `part`: what identifies the part alone: its serial, or the UUID of a GPU whose serial other GPUs share.
    """
    if waiver.criterion != verdict.criterion or waiver.absent != (verdict.verdict == INCONCLUSIVE):
        return False
    if waiver.host and waiver.host != verdict.host:
        return False
    names_part = waiver.serial in ("", part) or (waiver.serial == verdict.serial and bool(waiver.scope))
    if not names_part:
        return False
    if waiver.name and waiver.name != verdict.name:
        return False
    if waiver.scope and not any(map(Scope.parse(waiver.scope).contains, (verdict.scope, verdict.part))):
        return False
    return not (waiver.absent and (verdict.name in NOT_WAIVABLE or verdict.name.startswith(STAGE_PREFIX)))


def summary(
    waivers: Sequence[Waiver], verdicts: Sequence[Verdict], day: str, hosts: Sequence[str]
) -> Iterator[SummaryLine]:
    """Yield a line for each waiver: to how many verdicts it applies, or that it expired or was not used.

    `hosts`: the hosts of the run. For a waiver of another host, the line names the host with the most similar name.
    """
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
            if waiver.host and waiver.host not in hosts:
                text += f": no host {waiver.host} in this run{nearest(waiver.host, hosts)}"
        yield SummaryLine(kind=LineKind.WAIVER, title=title, text=text, values={"verdicts": count})
