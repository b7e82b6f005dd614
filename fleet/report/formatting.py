"""Format the SI values and texts of records for people: readable units, plain names, safe text."""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from fleet.quantities import NONE, SIGNS, finite, format_pair, number, quantity, size
from schemas.records import Value
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, PASS, REJECTED, FleetReport, Verdict, VerdictKind

TEXT_LIMIT = 400
"""Maximum number of characters of a text of a record in a report."""
LOG_LIMIT = 6000
"""Maximum number of characters of a log in a report. If a log is longer, the report has only its end."""

VERDICTS = (PASS, FAIL, INCONCLUSIVE)
DECISIONS = {ACCEPTED: "accepted", REJECTED: "rejected", INCOMPLETE: "incomplete"}
REHEARSED = {ACCEPTED: "rehearsal passed", REJECTED: "rehearsal failed", INCOMPLETE: "rehearsal incomplete"}
SIMULATED = {ACCEPTED: "simulation passed", REJECTED: "simulation failed", INCOMPLETE: "simulation incomplete"}
ACTIONS = {
    "rma": "Return the part (RMA)",
    "inspect_hardware": "Inspect the hardware",
    "reseat": "Reseat the part",
    "recable": "Correct the cabling",
    "reset_gpu": "Reset the GPU",
    "reboot": "Reboot the host",
    "recover_imex_domain": "Recover the IMEX domain",
    "drain_p2p": "Stop the peer-to-peer traffic",
    "configure": "Correct the configuration",
    "monitor": "Monitor",
    "none": "",
}
"""Action -> the instruction; the most severe first."""

_FAR = 2.0
"""Size of a margin, as a share of the limit, above which a multiple of the limit is easier to read than a percentage."""

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|.)", re.DOTALL
)
_SPACES = re.compile(r"[ \u2000-\u200a\u202f\u205f\u3000]{2,}")


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return `text` on one line, without control characters or text-direction marks.

    A text of more than `limit` characters is cut there, and its length is appended.
    """
    return _cut(_SPACES.sub(" ", _strip_controls(text, keep="")), limit)


def shell_word(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return `text`, cleaned and quoted, as one word of a shell command.

    It is cleaned before it is quoted, because cleaning removes the characters after an escape character, which may be the quotes.
    """
    return shlex.quote(clean(text, limit))


def clean_log(text: str, limit: int = LOG_LIMIT) -> str:
    """Return a log without control characters or text-direction marks, but with its line breaks.

    If the log has more than `limit` characters, only its end is returned, after a note that states how many characters are left
    out.
    """
    cleaned = _strip_controls(text.replace("\r\n", "\n").expandtabs(), keep="\n").strip("\n")
    return cleaned if len(cleaned) <= limit else f"[{len(cleaned) - limit} characters left out] … {cleaned[-limit:]}"


def _strip_controls(text: str, keep: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in keep else _replacement(character) for character in _ESCAPE_SEQUENCE.sub("", text)
    )


def _replacement(character: str) -> str:
    kind = unicodedata.category(character)
    if kind in ("Cc", "Zl", "Zp"):
        return " "
    return "\N{REPLACEMENT CHARACTER}" if kind in ("Cf", "Cs") else character


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def join_names(names: Sequence[str], limit: int = 4) -> str:
    """Return the first names, and the number of the others: `h1, h2 and 3 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def value_and_limit(verdict: Verdict) -> tuple[str, str]:
    """Return the value and the limit of a verdict as text."""
    value, limit = format_pair(verdict.value, verdict.limit, verdict.unit)
    changed = "changed by " if is_change(verdict) and verdict.value is not None else ""
    return f"{changed}{value}", _limit_with_sign(verdict, limit)


def limit_text(verdict: Verdict) -> str:
    """Return the limit with its sign: `≥ 697 TFLOP/s`."""
    return _limit_with_sign(verdict, quantity(verdict.limit, verdict.unit))


def _limit_with_sign(verdict: Verdict, limit: str) -> str:
    return NONE if verdict.limit is None else f"{SIGNS.get(verdict.operator, '')} {limit}".strip()


def is_change(verdict: Verdict) -> bool:
    """Return whether the value is a change over the run, not a reading."""
    return verdict.kind == VerdictKind.CHANGE


def margin(verdict: Verdict) -> float | None:
    """Return the margin of a verdict (`margin_of`); None if value or limit is not a number, or if there is no margin."""
    value, limit = finite(verdict.value), finite(verdict.limit)
    return None if value is None or limit is None else margin_of(value, verdict.operator, limit)


def margin_of(value: float, operator: str, limit: float) -> float | None:
    """Return the distance of a value from its limit, as a share of the limit: negative if the value does not meet the limit.

    Return None for a limit of 0, if only one of the two is negative, or for an operator that is not an inequality.
    """
    if not limit or value * limit < 0 or operator not in ("ge", "gt", "le", "lt"):
        return None
    return (value - limit if operator in ("ge", "gt") else limit - value) / abs(limit)


def signed_percent(share: float | None) -> str:
    """Return a share as a signed percentage: `+9.3 %`, `−12.0 %`, `+250 %`; `–` if it is None or not finite."""
    if share is None or not math.isfinite(share):
        return NONE
    points = share * 100
    if points == 0:
        return "0 %"
    return f"{points:+.{1 if abs(points) < 100 else 0}f} %".replace("-", "−")


def margin_text(share: float | None) -> str:
    """Return a margin (`margin_of`) as a percentage, `+9.3 %` or `−12.0 %`; beyond ±_FAR as `38 times the limit`."""
    # Value and limit have the same sign. If |share| is above 1, the value is farther from 0 than the limit. So the value is the
    # limit plus |share| times the limit.
    if share is not None and abs(share) > _FAR and math.isfinite(share):
        return f"{number(1 + abs(share), 2)} times the limit"
    return signed_percent(share)


def percent(share: float) -> str:
    """Return a share as a percentage: `38 %`, `0.4 %`."""
    return f"{number(share * 100, 2)} %"


def params_text(params: Mapping[str, Value], without: Iterable[str] = ("phase",)) -> str:
    """Return the parameters of an observation, except the keys in `without`, as one phrase: `bf16, size 8192`."""
    left_out = set(without)
    return ", ".join(_param(key, value) for key, value in params.items() if key not in left_out)


_SELF_EXPLANATORY = frozenset(
    {
        "dtype",
        "direction",
        "sharing",
        "network",
        "data",
        "placement",
        "backend",
        "op",
        "workload",
        "pattern",
        "variant",
        "reason",
    }
    | {"algorithm", "protocol", "transport", "benchmark", "numa"}
)
"""Parameters that are written as their value alone, because the value is clear without the name."""


def _param(key: str, value: Value) -> str:
    if key in _SELF_EXPLANATORY:
        return str(value).replace("_", " ")
    if key == "size_bytes":
        return size(value)
    if key == "world_size":
        return f"{value} ranks"
    return f"{key.replace('_', ' ')} {quantity(value, '1')}"


def action_name(action: str) -> str:
    """Return the action as an instruction; empty if there is nothing to do."""
    return ACTIONS.get(action, action.replace("_", " "))


MEASURE_AGAIN = "Measure again"
"""Instruction for an inconclusive cause: evidence is missing, and nothing failed."""
COMPARE = {
    "too-few-peers": "Measure more parts",
    "no-majority": "Measure more parts",
    "no-baseline": "Extend the baseline",
    "noisy-baseline": "Extend the baseline",
}
"""Problem -> instruction for an inconclusive cause whose parts were measured, but could not be compared with anything."""


def cause_action(verdict: str, action: str, problem: str) -> str:
    """Return what to do about a cause with this verdict, action and problem, as an instruction."""
    return action_name(action) if verdict == FAIL else COMPARE.get(problem, MEASURE_AGAIN)


def decision_name(report: FleetReport, decision: str) -> str:
    """Return the decision in words. In a rehearsal or simulation, it is never called accepted: `rehearsal passed`."""
    return {"SIMULATED": SIMULATED, "REHEARSAL": REHEARSED}.get(report.mark, DECISIONS).get(decision, decision)


def status(report: FleetReport) -> str:
    """Return the acceptance status, such as `PASS`; it begins with SIMULATED or REHEARSAL if no GPU was tested."""
    text = report.acceptance.status
    return text if not report.mark or text.startswith(f"{report.mark} ") else f"{report.mark} {text}"


def format_time(time: str) -> str:
    """Return an ISO time as `14 Nov 2026, 09:31:07 UTC`; text that is not a time is returned unchanged."""
    moment = _parse_time(time)
    return f"{moment.day} {_MONTHS[moment.month - 1]} {moment:%Y, %H:%M:%S} UTC" if moment else time


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def elapsed(began: str, ended: str) -> str:
    """Return the duration between two ISO times in words; empty if either is not a time, or the second is not later."""
    first, last = _parse_time(began), _parse_time(ended)
    return duration((last - first).total_seconds()) if first and last and last > first else ""


def duration(seconds: float) -> str:
    """Return a duration in words: `42.1 s`, `7 min 5 s` or `3 h 20 min`."""
    if seconds < 120:
        return f"{number(round(seconds, 1), 3)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _parse_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.removesuffix("Z"))
    except ValueError:
        return None
