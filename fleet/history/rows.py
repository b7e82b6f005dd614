"""Convert a judged run to rows of the history: its figures, its parts, its causes and its tests.

Text from hosts is cleaned here, once, so that no query and no page has to clean it again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fleet.judge.gpu_identity import identities, shared_serials
from fleet.planning.history import stage_key, tests_with
from fleet.planning.test_selection import Key
from fleet.records.baseline_store import kind_of
from fleet.records.host_state import HostState, host_state
from fleet.records.load import Run
from schemas.catalogue import DURATION
from schemas.plans import Plan
from schemas.records import MEASURED, Gpu, Record
from schemas.reports import ACCEPTED, FAIL, INCONCLUSIVE, CausePart, FleetReport, HostReport
from schemas.scopes import Scope, pci_address
from schemas.stages import SOAK

TEXT_LIMIT = 300
DIGEST_LENGTH = 12
"""A text that was cut ends with this number of characters of the SHA-256 of the whole text."""
DRIVER = "driver.version"
CLOCK_TOLERANCE_S = 86400.0
"""Times from different clocks that differ by at most this many seconds count as equal."""
Row = dict[str, Any]


@lru_cache(maxsize=1 << 16)
def clean_text(text: str) -> str:
    """Return `text` on one line, without characters that cannot be printed, at most TEXT_LIMIT characters.

    Longer text is cut and ends with a part of its SHA-256, so that two texts that differ only after the cut stay different.
    """
    if len(text) > TEXT_LIMIT:
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:DIGEST_LENGTH]
        text = f"{text[: TEXT_LIMIT - DIGEST_LENGTH - 1]}…{digest}"
    return "".join(character if character.isprintable() else " " for character in text).strip()


@dataclass(frozen=True, kw_only=True)
class HostRows:
    """The rows of one host of a run."""

    parts: tuple[Row, ...]
    figures: tuple[Row, ...]
    tests: tuple[Row, ...] = ()
    ended: str = ""
    """When the last record of the host ended, by the clock of the host, as `timestamp` returns it; empty without a record."""


@dataclass(frozen=True, kw_only=True)
class RunRows:
    """The rows of a run, as input of `store.add_run`."""

    kind: str
    """`gpu` (real), `rehearsal` or `simulated`: each kind has a history of its own."""
    nonce: str
    """Identity of the run: a run that is judged again, copied or signed keeps it."""
    entry: Mapping[str, Any]
    """Entry of the run in the index of the history."""
    causes: tuple[Row, ...]
    hosts: Iterable[HostRows] = field(repr=False)
    """Can be iterated once. The rows of a host are made when the iteration reaches the host, because the rows of a large fleet do
    not fit into memory."""


def run_rows(run: Run, report: FleetReport) -> RunRows:
    """Return the rows of a judged run. The records of the run are read only when `RunRows.hosts` is iterated."""
    plan = run.plan
    hosts = {host.name: host for host in report.hosts}
    entry = {
        "run": clean_text(plan.run_id),
        "began": timestamp(plan.created),
        "ended": timestamp(report.ended),
        "profile": clean_text(plan.profile),
        "decision": report.decision,
        "rackproof": clean_text(report.rackproof),
        "hosts": len(hosts),
        "gpus": sum(len(host.gpus) for host in report.hosts),
        "notes": [],
    }
    return RunRows(
        kind=kind_of(plan),
        nonce=plan.nonce,
        entry=entry,
        causes=tuple(_causes(report, hosts)),
        hosts=_host_rows(run, report, hosts),
    )


def _host_rows(run: Run, report: FleetReport, hosts: Mapping[str, HostReport]) -> Iterator[HostRows]:
    failed, inconclusive = (tests_with(report.verdicts, verdict) for verdict in (FAIL, INCONCLUSIVE))
    for name, host in hosts.items():
        evidence = run.evidence[name]
        state = host_state(evidence)
        tests = _tests(run.plan, host, evidence.records, failed.get(name, set()), inconclusive.get(name, set()))
        yield HostRows(
            parts=tuple(_parts(host, state)),
            figures=tuple(_figures(host, state)),
            tests=tuple(tests),
            ended=timestamp(max((record.ended for record in evidence.records), default="")),
        )


def _tests(
    plan: Plan, host: HostReport, records: Iterable[Record], failed: set[Key], inconclusive: set[Key]
) -> Iterator[Row]:
    """Yield the tests that were measured on a host or failed on it, or whose duration is known."""
    planned = {(stage_key(stage.name), name) for stage in plan.stages for name in stage.benchmarks}
    measured = {key for key in planned if key in failed or (host.coverage.measured and key not in inconclusive)}
    seconds = _durations_s(records)
    for key in sorted(measured | failed | set(seconds)):
        stage, benchmark = key
        yield {
            "host": clean_text(host.name),
            "stage": clean_text(stage),
            "benchmark": clean_text(benchmark),
            "measured": key in measured,
            "failed": key in failed,
            "seconds": seconds.get(key),
        }


def _durations_s(records: Iterable[Record]) -> dict[Key, float]:
    """Return the longest duration of each test on a host, without the tests of a soak."""
    seconds: dict[Key, float] = {}
    for record in records:
        for item in record.observations:
            is_duration = item.name == DURATION.name and item.status == MEASURED and item.stage != SOAK
            if is_duration and isinstance(item.value, int | float):
                key = (item.stage, str(item.params["benchmark"]))
                seconds[key] = max(seconds.get(key, 0.0), float(item.value))
    return seconds


def timestamp(text: str) -> str:
    """Return an ISO 8601 time in UTC in the form of DuckDB's TIMESTAMP: `2026-05-01 04:00:00`."""
    return text.replace("T", " ").removesuffix("Z").removesuffix("+00:00")


def _parts(host: HostReport, state: HostState) -> Iterator[Row]:
    """Yield a row for the host, for each GPU, and for each other part with a serial."""
    model = host_model(host.gpus)
    common: Row = {
        "host": clean_text(host.name),
        "rack": clean_text(host.rack),
        "driver": clean_text(host.software.get(DRIVER, "")),
        "decision": host.decision,
        "address": "",
        "uuid": "",
    }
    serials = {part.slot: part.serial for part in state.parts if part.kind == "host"}
    yield {**common, "part": "host", "slot": "", "serial": clean_text(serials.get("host", "")), "model": model}
    names = identities(host.gpus)
    for gpu in host.gpus:
        slot = f"gpu={gpu.index}"
        # The index changes if another GPU falls off the bus, the PCI address does not.
        place = {"slot": slot, "address": clean_text(pci_address(gpu.pci_bus_id)) if gpu.pci_bus_id else ""}
        known = {"serial": clean_text(names[slot]), "uuid": clean_text(gpu.uuid), "model": clean_text(gpu.name)}
        yield {**common, **place, **known, "part": "gpu"}
    for part in state.parts:
        if part.kind != "host":
            slot, serial = clean_text(part.slot), clean_text(part.serial)
            yield {**common, "part": clean_text(part.kind), "slot": slot, "serial": serial, "model": ""}


def host_model(gpus: Iterable[Gpu]) -> str:
    """Return the models of the GPUs of a host, separated by commas."""
    return ", ".join(sorted({clean_text(gpu.name) for gpu in gpus}))


def duplicates(parts: Iterable[Row]) -> dict[str, list[str]]:
    """Return GPU serial -> its places (`HOST gpu=0`), for each serial that is in more than one place of the run."""
    places: dict[str, list[str]] = {}
    for row in parts:
        if row["part"] == "gpu" and row["serial"]:
            places.setdefault(row["serial"], []).append(f"{row['host']} {row['slot']}")
    return {serial: slots for serial, slots in places.items() if len(slots) > 1}


def _causes(report: FleetReport, hosts: Mapping[str, HostReport]) -> Iterator[Row]:
    """Yield a row for each part of each cause of a failure. Inconclusive causes are left out: nothing failed, only
    evidence is missing."""
    for cause in report.causes:
        if cause.verdict != FAIL:
            continue
        for part in cause.parts:
            host = hosts.get(part.host)
            yield {
                "host": clean_text(part.host),
                "rack": clean_text(host.rack if host else ""),
                "slot": "" if part.scope == "host" else clean_text(part.scope),
                "serial": clean_text(part_serial(part, host)),
                "problem": clean_text(cause.problem),
                "title": clean_text(cause.title),
                "action": cause.action,
                "severity": cause.severity,
                "confidence": cause.confidence,
                "waived": cause.waiver is not None,
            }


def part_serial(part: CausePart, host: HostReport | None) -> str:
    """Return the serial of a part of a cause, as `parts` of the history has it: for a GPU its identity, which may be its UUID.

    Return an empty text if the cause has no serial for the part, and its scope (such as `gpu=3,link=2`) names no GPU of the host.
    """
    gpus = host.gpus if host else ()
    if part.serial and part.serial not in shared_serials(gpus):
        return part.serial
    return identities(gpus).get(Scope.parse(part.scope).device, part.serial)


def _figures(host: HostReport, state: HostState) -> Iterator[Row]:
    """Yield a row for each figure of a host that a baseline of the host would include (`is_baseline_figure`)."""
    gpus = state.gpus_by_identity()
    for serial, figures in state.figures.items():
        gpu = gpus.get(serial)
        common: Row = {
            "host": clean_text(host.name),
            "rack": clean_text(host.rack),
            "slot": f"gpu={gpu.index}" if gpu else "",
            "serial": clean_text(serial),
            "model": clean_text(gpu.name) if gpu else host_model(host.gpus),
            "driver": clean_text(host.software.get(DRIVER, "")),
            "accepted": host.decision == ACCEPTED,
        }
        for (name, stage, within, settings), item in figures.items():
            yield {
                **common,
                "name": name,
                "stage": stage,
                "within": clean_text(within),
                "settings": settings_text(dict(settings)),
                "unit": item.level.unit,
                "value": item.level.value,
            }


def settings_text(settings: Mapping[str, object]) -> str:
    """Return the settings of a figure as text: `dtype=bf16 size=8192`, in the order of their names."""
    return clean_text(" ".join(f"{key}={_plain(value)}" for key, value in sorted(settings.items())))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
