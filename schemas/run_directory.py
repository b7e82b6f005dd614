"""The layout of a run directory. Only this module, the playbooks and their plugins build its paths.

`fleet.report.formats` names the other files of the report.

`runs/RUN_ID` on the control node has this layout, and so does the directory given to `rackproof run-host --results`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas import documents
from schemas.plans import Plan, plan_from_json

PLAN, REPORT, PAGE = "plan.json", "report.json", "report.html"
EVENTS, PROGRESS, JOURNAL, LOCK = "events.jsonl", "progress.jsonl", "journal.jsonl", "lock.json"
HOSTS, GANGS, BMCS, PAGES = "hosts", "gangs", "bmcs", "pages"
RECORDS = (f"{HOSTS}/*", f"{GANGS}/*/*", f"{BMCS}/*")
"""Patterns of the records of hosts alone, of hosts in gangs (the hosts of one multi-node launch), and of BMCs."""
PLAN_BYTES = 64_000_000
"""Maximum size of a plan."""


def record_name(host: str, gang: str = "") -> str:
    """Return the path of a host's record within a run directory; with `gang`, of its record of that gang's launches."""
    return f"{GANGS}/{gang}/{host}.json" if gang else f"{HOSTS}/{host}.json"


def record_names(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return path -> (host, gang or an empty string) of each record that the plan expects."""
    alone = {record_name(host.name): (host.name, "") for host in plan.hosts}
    gangs = {record_name(host.name, host.gang): (host.name, host.gang) for host in plan.hosts if host.gang}
    return alone | gangs


def bmc_record_names(plan: Plan) -> dict[str, str]:
    """Return path -> host, for the record of each BMC that the plan expects. The control node writes these records."""
    return {f"{BMCS}/{host.name}.json": host.name for host in plan.hosts if host.bmc}


def own_record(directory: Path, gang: str = "") -> Path:
    """Return the path of a host's record in the run directory on the host itself, which has only the records of this host."""
    return directory / GANGS / f"{gang}.json" if gang else directory / "record.json"


def is_run(directory: Path) -> bool:
    """Return whether the directory has a plan."""
    return RunDirectory(directory).plan.exists()


def runs_in(directory: Path) -> list[Path]:
    """Return the run directories in `directory`."""
    return [path.parent for path in directory.glob(f"*/{PLAN}")]


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / PLAN

    def read_plan(self) -> Plan:
        """Return the plan. Raises documents.DocumentError."""
        return plan_from_json(documents.read(self.plan, "plan", max_bytes=PLAN_BYTES))

    @property
    def report(self) -> Path:
        return self.root / REPORT

    @property
    def page(self) -> Path:
        """The report in HTML."""
        return self.root / PAGE

    @property
    def events(self) -> Path:
        """Failed and unreachable hosts, and those that completed a play, as reported by the playbooks."""
        return self.root / EVENTS

    @property
    def progress(self) -> Path:
        """Progress of the playbooks, for `rackproof watch`."""
        return self.root / PROGRESS

    @property
    def journal(self) -> Path:
        """When the run was begun, resumed and reported, and by whom."""
        return self.root / JOURNAL

    @property
    def lock(self) -> Path:
        """The process that has locked the run."""
        return self.root / LOCK

    def record(self, host: str, gang: str = "") -> Path:
        """Return the path of a host's record; with `gang`, of its record of that gang's launches."""
        return self.root / record_name(host, gang)

    def bmc_record(self, host: str) -> Path:
        """Return the path of the record of a host's BMC."""
        return self.root / BMCS / f"{host}.json"

    def page_of(self, host: str, suffix: str = "html") -> Path:
        """Return the path of the page of one host."""
        return self.root / PAGES / f"{host}.{suffix}"

    def make(self, plan: Plan) -> None:
        """Create the directories of the records that the plan expects."""
        for name in record_names(plan):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)

    def records(self) -> Iterator[Path]:
        """Yield every path in the directories of records, including those that the plan does not expect."""
        for pattern in RECORDS:
            yield from self.root.glob(pattern)

    def relative(self, path: Path) -> str:
        """Return the path within the directory."""
        return str(path.relative_to(self.root))
