"""Format each cause (`schemas.reports.Cause`) as a reason for the decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet.diagnosis import words
from fleet.diagnosis.handling import Handling, handling
from fleet.quantities import NONE, finite
from fleet.report.formatting import (
    COMPARE,
    TEXT_LIMIT,
    cause_action,
    clean,
    margin,
    margin_text,
    params_text,
    shell_word,
    value_and_limit,
)
from fleet.report.measure_again import LOCAL_COMMAND
from fleet.report.tables.verdict_rows import VerdictRow, merge_verdicts
from fleet.scope_text import describe_scope
from schemas.readings import BMC, READINGS
from schemas.reports import FAIL, INCONCLUSIVE, Cause, Verdict
from schemas.stages import GANG_STAGES

_MAX_HOSTS = 20
"""Maximum number of hosts that a command names."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A cause, formatted, with its leading verdict: the first of `Cause.verdicts`."""

    title: str
    verdict: str
    hosts: tuple[str, ...]
    scope: str
    serial: str
    stage: str
    name: str
    label: str
    """`name` in words."""
    params: str
    value: str
    """Value of the leading verdict; empty if this verdict lacks a value, a limit or an operator."""
    wanted: str
    """Limit of the leading verdict, with the sign of the operator; empty if `value` is empty."""
    margin: str
    why: str
    """`Cause.why`: the explanation from the leading verdict; empty if there is none."""
    action: str
    """What to do, as an instruction; empty if there is nothing to do."""
    handling: Handling
    """How to do `action`, and what to do if the next run shows the cause again."""
    is_returned: bool
    """Whether `action` is to return the part to its vendor (RMA)."""
    source: str
    criterion: str
    more: tuple[VerdictRow, ...]
    """Rows with all verdicts of the cause; empty if the cause has one verdict."""
    count: int
    """Number of verdicts of the cause."""
    share: float | None = None
    """Value of the leading verdict divided by its limit.

    None if either is not a number, the limit is 0, or the operator is `eq`.
    """
    severity: str = ""
    waiver: str = ""
    """The waiver in words: person, reason and last day; empty without a waiver. A waiver does not change `verdict`."""
    lead: Verdict
    """The leading verdict."""
    seen: str = ""
    """How often former runs had the cause: `3 times, last on 2026-02-01 in r2`; empty if none had it."""
    candidates: tuple[Verdict, ...] = ()
    """The leading verdict, then the result of `_worst_figure`. The page plots the first of them that it can plot."""


def reasons(verdicts: Sequence[Verdict], causes: Iterable[Cause], seen: Mapping[int, str]) -> list[Reason]:
    """Return one reason per cause, in the order of `causes`.

    Args:
        verdicts: the verdicts of the report.
        causes: some or all causes of the report.
        seen: position in `verdicts` of the leading verdict of a cause -> how often former runs had this cause (`seen_before`).
    """
    return [
        _reason(cause, [verdicts[position] for position in cause.verdicts], seen.get(cause.verdicts[0], ""))
        for cause in causes
    ]


def _reason(cause: Cause, group: Sequence[Verdict], seen: str) -> Reason:
    first = group[0]
    compared = first.value is not None and first.limit is not None and first.operator != ""
    value, limit = value_and_limit(first) if compared else ("", "")
    return Reason(
        title=cause.title,
        verdict=cause.verdict,
        hosts=cause.hosts,
        scope=describe_scope(cause.part),
        serial=cause.serial if len(cause.hosts) == 1 else "",
        stage=first.stage,
        name=first.name,
        label=words.label(first.name),
        params=params_text(first.params),
        value=value,
        wanted=limit,
        margin=margin_text(margin(first)) if compared else NONE,
        why=cause.why,
        action=cause_action(cause.verdict, cause.action, cause.problem),
        handling=handling(cause),
        is_returned=cause.verdict == FAIL and cause.action == "rma",
        source=first.source,
        criterion=first.criterion,
        more=tuple(merge_verdicts(group)) if len(group) > 1 else (),
        count=len(group),
        share=_share(first),
        severity=cause.severity,
        waiver=str(cause.waiver or ""),
        lead=first,
        seen=seen,
        candidates=(first, *_worst_figure(group)),
    )


def reset_command(reason: Reason, address: str) -> str:
    """Return the command that resets the GPU at the PCI address `address`.

    Empty if the verdict of the cause is not `fail`, the action of its leading verdict is not `reset_gpu`, or `address` is empty.
    """
    is_reset = reason.verdict == FAIL and reason.lead.action == "reset_gpu" and address
    host = shell_word(reason.lead.host)
    return f"ssh {host} sudo nvidia-smi --gpu-reset -i {shell_word(address)}" if is_reset else ""


def next_command(reason: Reason, run_id: str, measure_again: str) -> tuple[str, str]:
    """Return what the next command does, in words, and the command.

    If the part is returned to its vendor, the command writes the RMA package. If the leading verdict is on a reading of a host,
    the command runs `rackproof doctor` on this host. Otherwise, it measures again: all hosts if the leading verdict is on a
    launch or figure of a gang, because one host alone has no partners; else the first _MAX_HOSTS hosts of the cause.

    Both texts are empty if the parts were measured but compared with nothing: no command would change that.

    Args:
        reason: the cause.
        run_id: the run.
        measure_again: `FleetReport.measure_again`.
    """
    if reason.verdict == INCONCLUSIVE and reason.action in COMPARE.values():
        return "", ""
    host = shell_word(reason.lead.host)
    if reason.is_returned:
        part = f"--serial {shell_word(reason.serial)}" if reason.serial else f"--host {host}"
        return "Package it for return", f"rackproof rma runs/{clean(run_id)} {part} --zip"
    is_local = measure_again.startswith(LOCAL_COMMAND)
    is_of_bmc = reason.name.startswith(BMC)  # a run reads the BMC of each of its hosts, `rackproof doctor` reads none
    if reason.name in READINGS and not is_of_bmc:
        doctor = "rackproof doctor" if is_local else f"ssh {host} sudo /opt/rackproof/bin/rackproof doctor"
        return "Then check it on the host", doctor
    if is_local:
        return "Then measure again", measure_again
    if reason.stage in GANG_STAGES and not is_of_bmc:
        return "Then measure again with all hosts", measure_again
    hosts = shell_word(",".join(reason.hosts[:_MAX_HOSTS]), limit=_MAX_HOSTS * TEXT_LIMIT)
    which = f" (the first {_MAX_HOSTS} of {len(reason.hosts)} hosts)" if len(reason.hosts) > _MAX_HOSTS else ""
    return f"Then measure again{which}", f"{measure_again} --limit {hosts}"


def _worst_figure(group: Sequence[Verdict]) -> tuple[Verdict, ...]:
    """Return the failed verdict on a benchmark figure that is farthest beyond its limit; empty if no benchmark figure failed."""
    figures = [verdict for verdict in group if verdict.verdict == FAIL and verdict.name not in READINGS]
    return (max(figures, key=words.distance),) if figures else ()


def _share(verdict: Verdict) -> float | None:
    value, limit = finite(verdict.value), finite(verdict.limit)
    return round(value / limit, 4) if value is not None and limit and verdict.operator != "eq" else None
