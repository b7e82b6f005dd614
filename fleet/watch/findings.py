"""Judge the records fetched so far; an unchanged record is read once."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence, judge
from fleet.report.summary import pci_slots, reason_lines
from schemas import documents
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import Record
from schemas.reports import FAIL, Verdict
from schemas.run_directory import RunDirectory, record_names
from schemas.stages import SOAK

EVERY_S = 3.0
REST = 9
"""Pause after judging, as a multiple of its duration: a large fleet takes long, and the control node has other work."""
REPORT_BYTES = 64_000_000
"""Larger reports, of hundreds of hosts, are not read: the journal has their decision."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdicts on the records so far."""

    at: float = 0.0
    """When they were judged; 0: not yet."""
    records: int = 0
    expected: int = 0
    failed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> failed criteria, one line each."""
    outcomes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Host -> stage -> how its last launch ended."""
    problems: tuple[str, ...] = ()
    """Records that could not be read or judged, and why."""


class Judge:
    """Reads and judges records, in the background after `start`."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self._run_dir, self._plan = run_dir, plan
        self._read: dict[str, tuple[object, Record | str]] = {}
        self._begun = False
        self._one_at_a_time = threading.Lock()
        self.now = Judged(expected=len(self._paths()))

    def start(self) -> None:
        """Start judging in the background."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._go_on, name="judge", daemon=True).start()

    def _go_on(self) -> None:
        while True:
            began = time.monotonic()
            self.update()
            time.sleep(max(EVERY_S, REST * (time.monotonic() - began)))

    def update(self) -> Judged:
        """Judge again if a record is new or changed."""
        with self._one_at_a_time:
            self._update()
        return self.now

    def _update(self) -> None:
        if self._reread() or not self.now.at:
            try:
                self.now = self._judged()
            except Exception as error:  # noqa: BLE001 - the report will fail with its exit code; watching continues
                why = f"the records cannot be judged: {type(error).__name__}: {error}"
                self.now = Judged(expected=len(self._paths()), problems=(why,))

    def _paths(self) -> dict[str, tuple[str, str]]:
        """Return path -> host and gang of each expected record."""
        return record_names(self._plan)

    def _reread(self) -> bool:
        changed = False
        for path, (host, gang) in self._paths().items():
            try:
                status = (self._run_dir / path).lstat()
            except OSError:
                continue
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._read.get(path, (None,))[0] != mark:
                self._read[path] = (mark, self._record(path, host, gang))
                changed = True
        return changed

    def _record(self, path: str, host: str, gang: str) -> Record | str:
        """Return the record, or why it is rejected."""
        try:
            record = record_from_json(documents.read(self._run_dir / path, "record"), source=path)
        except documents.DocumentError as error:
            return str(error).replace(f"{self._run_dir}/", "")
        mine = (self._plan.run_id, self._plan.nonce, host, gang)
        same = (record.run_id, record.nonce, record.host, record.gang) == mine
        return record if same else f"{path}: not of this host and run"

    def _judged(self) -> Judged:
        records: dict[str, list[Record]] = defaultdict(list)
        for _, record in self._read.values():
            if isinstance(record, Record):
                records[record.host].append(record)
        evidence = {host: Evidence(records=tuple(parsed)) for host, parsed in records.items()}
        failed: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in judge(self._plan, evidence, read_packs(self._plan.criteria)) if evidence else ():
            if verdict.verdict == FAIL:
                failed[verdict.host].append(verdict)
        slots_by_part = pci_slots(
            (host, gpu) for host, parsed in records.items() for record in parsed for gpu in record.gpus
        )
        return Judged(
            at=time.time(),
            records=sum(map(len, records.values())),
            expected=len(self._paths()),
            failed={host: tuple(map(str, reason_lines(verdicts, slots_by_part))) for host, verdicts in failed.items()},
            outcomes={host: _outcomes(parsed) for host, parsed in records.items()},
            problems=tuple(record for _, record in self._read.values() if isinstance(record, str)),
        )


def _outcomes(records: list[Record]) -> dict[str, str]:
    parsed = {launch.stage: launch.outcome for record in records for launch in record.launches}
    for soak in (record.soak for record in records if record.soak):
        parsed.pop(SOAK, None)  # a round that finished is no soak that did
        if soak.ended:
            parsed[SOAK] = "failed" if soak.reason else "finished"
    return parsed


@dataclass(frozen=True, kw_only=True)
class Reported:
    """The parts of report.json that are shown."""

    decision: str
    status: str
    summary: tuple[str, ...]
    hosts: Mapping[str, str]
    """Host -> its decision."""
    outcomes: Mapping[str, Mapping[str, str]]
    """As of `Judged`."""


def read_report(run_dir: Path) -> Reported | None:
    """Return the report, if there is one that is small enough to read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = documents.read_bytes(RunDirectory(run_dir).report, max_bytes=REPORT_BYTES)
        if len(text) <= REPORT_BYTES:
            parsed = json.loads(text)
            return Reported(
                decision=str(parsed["decision"]),
                status=str(parsed["acceptance"]["status"]),
                summary=tuple(map(str, parsed["acceptance"]["summary"])),
                hosts={str(host["name"]): str(host["decision"]) for host in parsed["hosts"]},
                outcomes={
                    str(host["name"]): {str(each["stage"]): str(each["outcome"]) for each in host.get("launches", ())}
                    for host in parsed["hosts"]
                },
            )
    return None
