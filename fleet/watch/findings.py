"""Judge the records fetched so far, and read the summary of report.json. A record is read again only if its file changed."""

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
PAUSE_FACTOR = 9
"""Pause between two updates, as a multiple of the duration of an update, so that the control node can do other work."""
MAX_REPORT_BYTES = 64_000_000
"""Larger reports, of hundreds of hosts, are not read: the decision is then taken from the journal."""


@dataclass(frozen=True, kw_only=True)
class LiveFindings:
    """The findings in the records fetched so far."""

    at: float = 0.0
    """When the records were judged, in seconds since 1970; 0: not yet."""
    records: int = 0
    expected: int = 0
    failed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Host -> the causes of its failures, one line each."""
    outcomes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Host -> stage -> outcome of its last launch."""
    problems: tuple[str, ...] = ()
    """Why records could not be read or judged, one line each."""


class LiveJudge:
    """The findings so far, updated in the background after `start`."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        """Judge nothing until `start` or `update` is called."""
        self._run_dir, self._plan = run_dir, plan
        self._records: dict[str, tuple[object, Record | str]] = {}
        """Path -> identity of the file as it was read, and the record or why it is rejected."""
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
        """Judge again if a record is new or changed; return the findings."""
        with self._update_lock:
            self._update()
        return self.findings

    def _update(self) -> None:
        if self._read_changed() or not self.findings.at:
            try:
                self.findings = self._judge_all()
            except Exception as error:  # noqa: BLE001 - `rackproof report` exits with the error; watching continues
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
        return record if is_expected else f"{path}: not of this host and run"

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
    """Return the outcome of the last launch of each stage."""
    outcomes = {launch.stage: launch.outcome for record in records for launch in record.launches}
    for soak in (record.soak for record in records if record.soak):
        outcomes.pop(SOAK, None)  # a finished round does not mean that the soak has finished
        if soak.ended:
            outcomes[SOAK] = "failed" if soak.reason else "finished"
    return outcomes


@dataclass(frozen=True, kw_only=True)
class ReportSummary:
    """The fields of report.json that are shown."""

    decision: str
    status: str
    summary: tuple[str, ...]
    hosts: Mapping[str, str]
    """Host -> its decision."""
    outcomes: Mapping[str, Mapping[str, str]]
    """Host -> stage -> outcome of its last launch."""


def read_report(run_dir: Path) -> ReportSummary | None:
    """Return the summary of report.json; None if there is no valid report, or it exceeds MAX_REPORT_BYTES."""
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
