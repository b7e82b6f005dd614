"""Judge the records fetched so far, and read from report.json what `rackproof watch` shows.

A record is read again only if its file has changed.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence, judge
from fleet.report.summary import cause_lines, pci_slots
from schemas import documents
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import Record
from schemas.reports import FAIL, Verdict
from schemas.run_directory import RunDirectory, record_names
from schemas.stages import SOAK

INTERVAL_S = 3.0
"""Minimum pause between two updates."""
PAUSE_FACTOR = 9
"""The pause after an update is at least this many times as long as the update. So judging takes at most 10 % of one core."""
MAX_REPORT_BYTES = 64_000_000
"""A larger report, which has hundreds of hosts, is not read: the decision is then taken from `journal.jsonl`."""


@dataclass(frozen=True, kw_only=True)
class LiveFindings:
    """The findings in the records fetched so far."""

    at: float = 0.0
    """When the records were judged, in seconds since 1970; 0: not yet."""
    records: int = 0
    """Number of valid records."""
    expected: int = 0
    """Number of records that the plan expects."""
    failed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> the causes of its failures, one line each."""
    outcomes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Host -> stage -> outcome of its last launch."""
    problems: tuple[str, ...] = ()
    """Why single records are rejected, or why the records could not be judged; one line for each problem."""


class LiveJudge:
    """Judges the records fetched so far, repeatedly in the background after `start`."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        """Nothing is judged until `start` or `update` is called."""
        self._run_dir, self._plan = run_dir, plan
        self._records: dict[str, tuple[object, Record | str]] = {}
        """Path -> time of change, size and inode of the file when it was read, and its record or why it is rejected."""
        self._started = False
        self._update_lock = threading.Lock()
        self.findings = LiveFindings(expected=len(self._paths()))

    def start(self) -> None:
        """Start judging in the background."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._update_forever, name="judge", daemon=True).start()

    def _update_forever(self) -> None:
        while True:
            began = time.monotonic()
            self.update()
            time.sleep(max(INTERVAL_S, PAUSE_FACTOR * (time.monotonic() - began)))

    def update(self) -> LiveFindings:
        """Judge all records again if a record is new or changed; return the findings."""
        with self._update_lock:
            self._update()
        return self.findings

    def _update(self) -> None:
        if self._read_changed() or not self.findings.at:
            try:
                self.findings = self._judge_all()
            except Exception as error:  # noqa: BLE001 - `rackproof watch` continues; `rackproof report` reports the error
                problem = f"the records cannot be judged: {type(error).__name__}: {error}"
                self.findings = LiveFindings(expected=len(self._paths()), problems=(problem,))

    def _paths(self) -> dict[str, tuple[str, str]]:
        """Return path -> host and gang of each expected record."""
        return record_names(self._plan)

    def _read_changed(self) -> bool:
        """Read records that are new or changed; return whether there were any."""
        changed = False
        for path, (host, gang) in self._paths().items():
            try:
                status = (self._run_dir / path).lstat()
            except OSError:
                continue
            identity = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._records.get(path, (None,))[0] != identity:
                self._records[path] = (identity, self._record(path, host, gang))
                changed = True
        return changed

    def _record(self, path: str, host: str, gang: str) -> Record | str:
        """Return the record, or why it is rejected."""
        try:
            record = record_from_json(documents.read(self._run_dir / path, "record"), source=path)
        except documents.DocumentError as error:
            return str(error).replace(f"{self._run_dir}/", "")
        expected = (self._plan.run_id, self._plan.nonce, host, gang)
        is_expected = (record.run_id, record.nonce, record.host, record.gang) == expected
        return record if is_expected else f"{path}: its run, nonce, host or gang is not the one in the plan"

    def _judge_all(self) -> LiveFindings:
        records: dict[str, list[Record]] = defaultdict(list)
        for _, record in self._records.values():
            if isinstance(record, Record):
                records[record.host].append(record)
        evidence = {host: Evidence(records=tuple(host_records)) for host, host_records in records.items()}
        failed: dict[str, list[Verdict]] = defaultdict(list)
        for verdict in judge(self._plan, evidence, read_packs(self._plan.criteria)) if evidence else ():
            if verdict.verdict == FAIL:
                failed[verdict.host].append(verdict)
        slots_by_part = pci_slots(
            (host, gpu) for host, host_records in records.items() for record in host_records for gpu in record.gpus
        )
        return LiveFindings(
            at=time.time(),
            records=sum(map(len, records.values())),
            expected=len(self._paths()),
            failed={
                host: tuple(map(str, cause_lines(diagnose(verdicts, {}), verdicts, slots_by_part)))
                for host, verdicts in failed.items()
            },
            outcomes={host: _stage_outcomes(host_records) for host, host_records in records.items()},
            problems=tuple(record for _, record in self._records.values() if isinstance(record, str)),
        )


def _stage_outcomes(records: list[Record]) -> dict[str, str]:
    """Return stage -> outcome of its last launch. The stage `soak` has the outcome of the whole soak, and only after its end."""
    outcomes = {launch.stage: launch.outcome for record in records for launch in record.launches}
    for soak in (record.soak for record in records if record.soak):
        outcomes.pop(SOAK, None)  # the outcome of a single round of the soak
        if soak.ended:
            outcomes[SOAK] = "failed" if soak.reason else "finished"
    return outcomes


@dataclass(frozen=True, kw_only=True)
class ReportSummary:
    """The fields of report.json that `rackproof watch` shows."""

    decision: str
    """Decision about the run: accepted, rejected or incomplete."""
    status: str
    """The decision with its caveats, as at the top of the report, such as PASS WITH WAIVERS."""
    summary: tuple[str, ...]
    """Lines of the summary at the top of the report."""
    hosts: Mapping[str, str]
    """Host -> decision about the host."""
    outcomes: Mapping[str, Mapping[str, str]]
    """Host -> stage -> outcome of its last launch."""


def read_report(run_dir: Path) -> ReportSummary | None:
    """Return the summary of report.json; None if the report is missing, invalid or larger than MAX_REPORT_BYTES."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        text = documents.read_bytes(RunDirectory(run_dir).report, max_bytes=MAX_REPORT_BYTES)
        if len(text) <= MAX_REPORT_BYTES:
            report = json.loads(text)
            return ReportSummary(
                decision=str(report["decision"]),
                status=str(report["acceptance"]["status"]),
                summary=tuple(map(str, report["acceptance"]["summary"])),
                hosts={str(host["name"]): str(host["decision"]) for host in report["hosts"]},
                outcomes={
                    str(host["name"]): {str(each["stage"]): str(each["outcome"]) for each in host.get("launches", ())}
                    for host in report["hosts"]
                },
            )
    return None
