"""From the record's SI values and a host's own words to what people read: human units, plain names, harmless text."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from datetime import datetime

from schemas.records import Value
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, PASS, REJECTED, FleetReport, Verdict

TEXT_LIMIT = 400
LOG_LIMIT = 6000
NONE = "–"

SIGNS = {"eq": "=", "ge": "≥", "le": "≤", "gt": ">", "lt": "<"}
VERDICTS = (PASS, FAIL, INCONCLUSIVE)
DECISIONS = {ACCEPTED: "accepted", REJECTED: "rejected", INCOMPLETE: "incomplete"}
REHEARSED = {ACCEPTED: "rehearsal passed", REJECTED: "rehearsal failed", INCOMPLETE: "rehearsal incomplete"}
SIMULATED = {ACCEPTED: "simulation passed", REJECTED: "simulation failed", INCOMPLETE: "simulation incomplete"}
ACTIONS = {
    "rma": "Return the part (RMA)",
    "inspect_hardware": "Inspect the hardware",
    "reseat": "Reseat the part",
    "reset_gpu": "Reset the GPU",
    "reboot": "Reboot the host",
    "monitor": "Monitor",
    "none": "",
}
"""Gravest first."""

_SCALES: Mapping[str, tuple[tuple[float, str], ...]] = {
    "B/s": ((1e8, "GB/s"), (1e5, "MB/s"), (1e2, "kB/s"), (0, "B/s")),
    "FLOP/s": ((1e11, "TFLOP/s"), (1e8, "GFLOP/s"), (1e5, "MFLOP/s"), (0, "FLOP/s")),
    "s": ((1, "s"), (1e-3, "ms"), (0, "µs")),
    "Hz": ((1e6, "MHz"), (0, "Hz")),
    "FLOP/J": ((1e11, "TFLOP/s/W"), (1e8, "GFLOP/s/W"), (0, "FLOP/s/W")),
    "FLOP/cycle": ((1e3, "kFLOP/cycle"), (0, "FLOP/cycle")),
}
_FACTORS = {
    "GB/s": 1e9,
    "MB/s": 1e6,
    "kB/s": 1e3,
    "TFLOP/s": 1e12,
    "GFLOP/s": 1e9,
    "MFLOP/s": 1e6,
    "ms": 1e-3,
    "µs": 1e-6,
    "MHz": 1e6,
    "TFLOP/s/W": 1e12,
    "GFLOP/s/W": 1e9,
    "kFLOP/cycle": 1e3,
}
_PLAIN_UNITS = {"1": "", "Cel": "°C", "ratio": ""}

_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|.)", re.DOTALL
)
_SPACES = re.compile(r"[ \u2000-\u200a\u202f\u205f\u3000]{2,}")


def clean(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` on one line without anything that steers a terminal or the direction of writing, cut at `limit`."""
    return _cut(_SPACES.sub(" ", _harmless(text, keep="")), limit)


def clean_log(text: str, limit: int = LOG_LIMIT) -> str:
    """The end of a log, as `clean` but with its lines kept."""
    harmless = _harmless(text.replace("\r\n", "\n").expandtabs(), keep="\n").strip("\n")
    return (
        harmless if len(harmless) <= limit else f"[{len(harmless) - limit} characters left out] … {harmless[-limit:]}"
    )


def _harmless(text: str, keep: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character in keep else _replaced(character) for character in _ESCAPE_SEQUENCE.sub("", text)
    )


def _replaced(character: str) -> str:
    kind = unicodedata.category(character)
    if kind in ("Cc", "Zl", "Zp"):
        return " "
    return "\N{REPLACEMENT CHARACTER}" if kind in ("Cf", "Cs") else character


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def number(value: float, digits: int = 4) -> str:
    """`value` to so many significant digits, without an exponent where it reads well, thousands apart."""
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        text = f"{round(value):,}" if abs(value) >= 10_000 else f"{round(value)}"
        decimals = digits - len(str(abs(round(value))))
        text = f"{value:,.{decimals}f}" if isinstance(value, float) and decimals > 0 else text
    else:
        text = f"{value:.{digits}g}"
    return text.replace(",", "\N{NARROW NO-BREAK SPACE}").replace("-", "−")


def finite(value: Value) -> float | None:
    """The value as a float, or None where it is no number, or one that a float cannot hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def scale(value: float, unit: str) -> tuple[float, str]:
    """By what to divide values of that magnitude, and the unit they then have."""
    if unit == "B":
        return _binary(value)
    for least, name in _SCALES.get(unit, ()) if value else ():
        if abs(value) >= least:
            return _FACTORS.get(name, 1.0), name
    return 1.0, _PLAIN_UNITS.get(unit, unit)


def _binary(value: float) -> tuple[float, str]:
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(value) >= 1024**power:
            return 1024.0**power, name
    return 1.0, "B"


def quantity(value: Value, unit: str, digits: int = 4) -> str:
    """A value and its unit as people say it: `364.8 GB/s`, `22.5 µs`, `1 GiB`, `yes`."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if finite(value) is None:
        return "not a finite number"
    factor, name = scale(value, unit)
    scaled = value if factor == 1 else value / factor
    if name == "B":
        return f"{number(scaled, 12)} B"
    return f"{number(scaled, digits)} {name}".rstrip()


def size(value: Value) -> str:
    """A message or buffer size: `8 B`, `64 KiB`, `8 GiB`."""
    return quantity(value, "B", 3) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def found_and_wanted(verdict: Verdict) -> tuple[str, str]:
    """What a verdict found and what it wanted; digits are added until the two differ where the values do."""
    if verdict.value is None:
        return NONE, wanted(verdict)
    for digits in (4, 6, 9, 12):
        found, limit = quantity(verdict.value, verdict.unit, digits), wanted(verdict, digits)
        if verdict.value == verdict.limit or found != limit.partition(" ")[2]:
            break
    return (f"changed by {found}" if is_change(verdict) else found), limit


def wanted(verdict: Verdict, digits: int = 4) -> str:
    """The limit with its sign: `≥ 697 TFLOP/s`."""
    if verdict.limit is None:
        return NONE
    return f"{SIGNS.get(verdict.operator, '')} {quantity(verdict.limit, verdict.unit, digits)}".strip()


def is_change(verdict: Verdict) -> bool:
    """The value is a change over the run, not a reading."""
    return verdict.reason.startswith("changed by ")


def margin(verdict: Verdict) -> float | None:
    """How far within (positive) or outside its limit a value lies, as a share of the limit."""
    value, limit = finite(verdict.value), finite(verdict.limit)
    if value is None or not limit or verdict.operator not in ("ge", "gt", "le", "lt"):
        return None
    within = value - limit if verdict.operator in ("ge", "gt") else limit - value
    return within / abs(limit)


def percent(share: float | None) -> str:
    """`+9.3 %`, `−12 %`."""
    if share is None or not math.isfinite(share):
        return NONE
    points = share * 100
    if points == 0:
        return "0 %"
    return f"{points:+.{1 if abs(points) < 100 else 0}f} %".replace("-", "−")


def percent_of(share: float) -> str:
    """A share as a percentage: `38 %`, `0.4 %`."""
    return f"{number(share * 100, 2)} %"


def params_text(params: Mapping[str, Value], without: Iterable[str] = ("phase",)) -> str:
    """Parameters of an observation in one phrase: `bf16, size 8192`."""
    left_out = set(without)
    return ", ".join(_param(key, value) for key, value in params.items() if key not in left_out)


_SPEAKING = frozenset(
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
"""Parameters whose value needs no name beside it."""


def _param(key: str, value: Value) -> str:
    if key in _SPEAKING:
        return str(value).replace("_", " ")
    if key == "size_bytes":
        return size(value)
    if key == "world_size":
        return f"{value} ranks"
    return f"{key.replace('_', ' ')} {quantity(value, '1')}"


def action_name(action: str) -> str:
    """What to do, as an instruction; empty where there is nothing to do."""
    return ACTIONS.get(action, action.replace("_", " "))


def decision_name(report: FleetReport, decision: str) -> str:
    """A decision in words; in a rehearsal or simulation never a word by which hardware could be taken for accepted."""
    return {"SIMULATED": SIMULATED, "REHEARSAL": REHEARSED}.get(report.mark, DECISIONS).get(decision, decision)


def status(report: FleetReport) -> str:
    """The acceptance status; SIMULATED or REHEARSAL stands in it whenever no GPU was looked at, whoever built the report."""
    found = report.acceptance.status
    return found if not report.mark or found.startswith(f"{report.mark} ") else f"{report.mark} {found}"


def when(time: str) -> str:
    """An ISO time as `14 Nov 2026, 09:31:07 UTC`; what is no time stays as it is."""
    found = _time(time)
    return f"{found.day} {_MONTHS[found.month - 1]} {found:%Y, %H:%M:%S} UTC" if found else time


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def took(began: str, ended: str) -> str:
    """The time between two ISO times, or empty."""
    first, last = _time(began), _time(ended)
    return duration((last - first).total_seconds()) if first and last and last > first else ""


def duration(seconds: float) -> str:
    """`42.1 s`, `7 min 5 s`, `3 h 20 min`."""
    if seconds < 120:
        return f"{number(round(seconds, 1), 3)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.removesuffix("Z"))
    except ValueError:
        return None
