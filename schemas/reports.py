"""The judgement of the control node: verdicts on observations, and the report on the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from schemas.baselines import Change
from schemas.records import ERROR, SKIPPED, UNSUPPORTED, Gpu, Launch, Observation, Value
from schemas.run_directory import record_name
from schemas.scopes import Scope
from schemas.timeline import Soak
from schemas.waivers import Waiver

REPORT_SCHEMA = "rackproof.report/2"

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
ACCEPTED, REJECTED, INCOMPLETE = "accepted", "rejected", "incomplete"
ALL, EXCEPTIONS = "all", "exceptions"
"""Which verdicts and measurements a report contains: all, or mainly those that prevent acceptance (`FleetReport.detail`)."""
ACTIONS = (
    "rma",
    "inspect_hardware",
    "reseat",
    "recable",
    "reset_gpu",
    "reboot",
    "recover_imex_domain",
    "drain_p2p",
    "configure",
    "monitor",
    "none",
)
"""What to do about a failed criterion, most severe first."""
RECORD = "record"
"""Name of a verdict on a record as a whole: the host has no record, or identities in records contradict each other. A host
without a record is judged only by criteria on its BMC."""
CRITICAL, WARNING = "critical", "warning"
SEVERITY = {action: WARNING if action in ("configure", "monitor", "none") else CRITICAL for action in ACTIONS}
"""Action -> severity of a failure, if the criterion states no severity. The alerts use the same words."""


class VerdictKind:
    """Kinds of verdicts."""

    LIMIT = "limit"
    """A value was compared with a limit."""
    CHANGE = "change"
    """The increase of a counter over the run was compared with a limit."""
    PEERS = "peers"
    """A value was compared with the most frequent value of its peers, or the host lacks a part that most of its peers have."""
    IDENTITY = "identity"
    """The identity or location of a part was compared with the inventory, the manifest or another reading."""
    MODEL = "model"
    """A GPU is of another model than the inventory names. Failures by a limit of the named model also have this kind, unless the
    found model has the same limit."""
    INVENTORY = "inventory"
    """A value was compared with the inventory. No host has what the inventory states, and most have the same other value."""
    SOFTWARE = "software"
    """A figure is below the limit from the baseline, and so are those of most parts on which the same versions changed."""
    SWAPPED = "swapped"
    """The cables of some ports are swapped. The verdicts on these ports have the same `detail`.

    They are inconclusive if it is not known which of several hosts have the wrong cables.
    """
    SUSPECT = "suspect"
    """A part is suspected to be the cause of a failure of several hosts or GPUs together."""
    MISSING = "missing"
    """Not observed."""
    ERROR, SKIPPED, UNSUPPORTED = ERROR, SKIPPED, UNSUPPORTED
    """The observation has this status instead of a value, with a reason."""
    IN_USE = "in_use"
    """Not measured, because the host is in use."""
    SHARED_MACHINE = "shared_machine"
    """A speed was compared with a limit, but several hosts of the run are the same machine and were measured at the same time."""
    UNFINISHED = "unfinished"
    """A launch, a stage or a soak did not finish."""
    TOO_FEW_PEERS = "too_few_peers"
    """Measured, but too few other parts have the figure for a comparison."""
    NO_MAJORITY = "no_majority"
    """Measured, but the values of the parts differ, and no majority shows which of them is right."""
    NO_BASELINE = "no_baseline"
    """The baseline does not have the part, or the part was measured but the baseline does not have the figure."""
    NOISY_BASELINE = "noisy_baseline"
    """Measured, but the noise of the accepted figure is unknown or too large."""
    CONTRADICTORY = "contradictory"
    """Readings contradict each other, such as a counter or an uptime that fell."""


OF_INVENTORY = (VerdictKind.MODEL, VerdictKind.INVENTORY)
"""Kinds of failures that may be due to a wrong inventory. They say little about the parts, because the limit may be wrong."""
KINDS = tuple(value for name, value in vars(VerdictKind).items() if not name.startswith("_"))


class LineKind:
    """Kinds of lines in the summary."""

    COUNT = "count"
    """Number of hosts by decision."""
    CHECK = "check"
    """The state of one kind of test."""
    CAVEAT = "caveat"
    """A restriction of the decision."""
    MANIFEST = "manifest"
    WIRING = "wiring"
    """How the cables between hosts and switches were compared."""
    SOAK = "soak"
    NOT_JUDGED = "not_judged"
    WAIVER = "waiver"
    BASELINE = "baseline"
    REASON = "reason"
    """Why a host is not accepted."""
    MORE = "more"
    """Number of items that other lines leave out."""
    CRITERIA = "criteria"


LINES = tuple(value for name, value in vars(LineKind).items() if not name.startswith("_"))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The judgement of one observation by one criterion, or of an expected observation that cannot be judged."""

    host: str
    scope: str
    name: str
    verdict: str
    criterion: str
    """Id of the criterion; `plan` if only the plan requires the observation."""
    kind: str = VerdictKind.LIMIT
    """One of KINDS. Renderers use this and the values, and never parse the reason."""
    reason: str
    """One sentence for people: the value and the limit."""
    detail: str = ""
    """The rest of the reason after value and limit: the source of a fleet limit, or an explanation of the value."""
    part: str = ""
    """Scope of the part at fault, if that is not the part in `scope`: for example a GPU all of whose pairs are slow."""
    serial: str = ""
    """Serial of the part."""
    stage: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    value: Value = None
    limit: Value = None
    operator: str = ""
    unit: str = ""
    action: str = "none"
    source: str = ""
    basis: str = ""
    severity: str = ""
    """Severity of a failure: `critical` (not fit for use) or `warning` (inspect it). Empty if nothing failed."""
    user: str = ""
    """The other run, job or process that uses the host, if the kind is `in_use`; all hosts on the machine, if it is
    `shared_machine`."""
    waiver: Waiver | None = None
    """The waiver that applies. The verdict stays the same, but no longer prevents acceptance."""

    def __post_init__(self) -> None:
        if self.verdict == FAIL and not self.severity:
            object.__setattr__(self, "severity", SEVERITY.get(self.action, CRITICAL))

    @property
    def part_scope(self) -> str:
        """Scope of the part at fault: `gpu=3` if `scope` is `gpu=3,link=2`; `gang=r1` for the hosts of a gang together."""
        return self.part or Scope.parse(self.scope).part

    @property
    def blocks_acceptance(self) -> bool:
        """Whether the verdict prevents acceptance, because it is not `pass` and has no waiver."""
        return self.verdict != PASS and self.waiver is None


@dataclass(frozen=True, kw_only=True)
class CausePart:
    """A part that has the problem of a cause."""

    host: str
    scope: str
    """Scope of the part: `gpu=3`, `host`; `gang=r1` for hosts together."""
    serial: str = ""
    cable: str = ""
    """The other end of the cable, if the problem is that of a network port: `leaf0 swp3`. Empty if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a part or a host is not accepted: one problem, with all verdicts that show it or follow from it."""

    problem: str
    """Id of the problem (`fleet/diagnosis/problems.py`); the name of the failed reading if the problem has no id; or
    `not-verified`."""
    title: str
    """One sentence for people: the part and its problem."""
    why: str
    """The explanation from the first verdict in `verdicts`; empty if it adds nothing to the title."""
    verdict: str
    """`fail`; or `inconclusive` if nothing failed and evidence is missing."""
    host: str
    hosts: tuple[str, ...]
    """All hosts that have the problem. `verdicts` may also be on hosts that only suffer from it."""
    part: str
    """Scope of the part on the first host."""
    parts: tuple[CausePart, ...]
    """All parts that have the problem, those of the first host first. The report and RMA packages name them."""
    confidence: str
    """`certain` if a reading shows the problem, `likely` if benchmark figures do, `unknown` if evidence is missing."""
    verdicts: tuple[int, ...]
    """Positions in the verdicts of the report. The first is the leading evidence. Each verdict that does not pass belongs to
    exactly one cause."""
    serial: str = ""
    action: str = "none"
    severity: str = ""
    waiver: Waiver | None = None


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Number of observations that the plan expects, and how many of them were made."""

    expected: int
    measured: int
    missing: int
    """Number of observations that are in no record, not even as `error`, `skipped` or `unsupported`."""
    error: int
    skipped: int
    unsupported: int


@dataclass(frozen=True, kw_only=True)
class AdapterReading:
    """The last value of one reading of an adapter, or of one of its ports or lanes."""

    name: str
    scope: str
    unit: str
    value: Value = None
    """None if it could not be read."""
    reason: str = ""
    """Why it could not be read, with the status."""
    increase: float | None = None
    """Increase during the run, for a counter that is not 0."""
    per_hour: float | None = None
    """Rate before the run, for a counter that is not 0: value divided by the time since it was cleared or the host started."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A network adapter of a host, and what is known about it and its ports."""

    name: str
    """Name of the RDMA device, such as `mlx5_0`; name of the Ethernet interface if it belongs to no RDMA device."""
    scopes: tuple[str, ...]
    """Scopes under which it is observed: adapter, Ethernet interfaces of its ports, PCI device."""
    slot: str = ""
    """Its PCI address."""
    gpus: tuple[str, ...] = ()
    """Scopes of the GPUs to which no other adapter is nearer than this one."""
    path: str = ""
    """The PCIe path to these GPUs: `PIX`, `PXB`, `NODE` or `SYS`."""
    readings: tuple[AdapterReading, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """A host of the inventory, with or without a record."""

    name: str
    rack: str
    decision: str
    record: str
    """Path of the host's record within the run directory. It does not have the launches of a gang."""
    coverage: Coverage
    gpus: tuple[Gpu, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    packs: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    """What the playbooks reported about the host: that it was unreachable, or that a task failed."""
    launches: tuple[Launch, ...] = ()
    measurements: tuple[Observation, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    """Scope of a pair of GPUs (`gpu=0,peer=1`) -> the link between them in the last snapshot."""
    adapters: tuple[Adapter, ...] = ()
    """Its network adapters; empty if the report has no measurements of the host."""
    soak: Soak | None = None
    """Its soak, with fewer buckets than in the record."""
    gang: str = ""
    """Its gang in the plan; empty if it is in none."""

    @property
    def gang_record(self) -> str:
        """Path of its record of the launches of its gang; empty if it is in no gang."""
        return record_name(self.name, self.gang) if self.gang else ""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Distribution of numeric values. If there are many, the quantiles are rounded by up to 0.01 %; `min` and `max` are exact."""

    n: int
    min: float
    p05: float
    p50: float
    p95: float
    max: float
    bins: tuple[int, ...] = ()
    """Histogram in equal steps from `min` to `max`; empty if all values are equal."""


@dataclass(frozen=True, kw_only=True)
class FarthestPart:
    """One of the worst parts: a failure far beyond the limit, an inconclusive value, or a pass close to the limit."""

    host: str
    scope: str
    value: Value
    serial: str = ""
    verdict: str = PASS


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The verdicts of one criterion over the whole fleet, for one observation and one set of settings."""

    criterion: str
    """Id of the criterion; `plan` if only the plan requires the observation."""
    name: str
    stage: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    """The settings with which all these figures were measured."""
    unit: str = ""
    operator: str = ""
    limit: Value = None
    """None if there is no limit, or if it differs between hosts."""
    source: str = ""
    basis: str = ""
    action: str = "none"
    """The most severe action of the failures; `none` without failures."""
    passed: int = 0
    failed: int = 0
    inconclusive: int = 0
    spread: Spread | None = None
    """Statistics of the values that are numbers."""
    values: Mapping[str, int] = field(default_factory=dict)
    """For texts and flags: the most frequent values and their counts."""
    farthest: tuple[FarthestPart, ...] = ()
    """At most ten parts with a value: failures (worst first), inconclusive ones, then passes (nearest to the limit first).
    Empty if nothing failed and all values are equal."""


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A rejected input file of the run directory."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SummaryLine:
    """One line of the summary on top of a report."""

    kind: str
    """One of LINES."""
    text: str
    """Text for people, shown after the title."""
    title: str = ""
    verdict: str = ""
    """Verdict of a check or a reason: pass, fail or inconclusive; empty if nothing was judged."""
    host: str = ""
    part: str = ""
    """Scope of the part that a reason is about."""
    values: Mapping[str, int] = field(default_factory=dict)
    """The numbers in the text, by what they count."""

    def __str__(self) -> str:
        return f"{self.title}: {self.text}" if self.title else self.text


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The summary on top of the report."""

    status: str
    """PASS, PASS WITH WAIVERS, FAIL or INCOMPLETE, preceded by REHEARSAL or SIMULATED if no GPU was tested."""
    lines: tuple[SummaryLine, ...]
    summary: tuple[str, ...] = field(init=False)
    """The lines as text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", tuple(map(str, self.lines)))


@dataclass(frozen=True, kw_only=True)
class NotJudged:
    """A figure that was measured but not judged by any criterion."""

    name: str
    stage: str
    host: str = ""
    """`host` and `scope` name the part on which the figure was not judged. Both are empty if it was judged on no part."""
    scope: str = ""

    def __str__(self) -> str:
        where = f" of {self.host} {self.scope}" if self.host else ""
        return f"{self.name}{where} in stage {self.stage}"


@dataclass(frozen=True, kw_only=True)
class Vulnerability:
    """A version with published vulnerabilities, and the hosts that have it. By itself it changes no decision."""

    product: str
    reading: str
    """Name of the reading that has the version."""
    version: str
    fixed: str
    """First version that has all the fixes."""
    severity: str
    """Severity of the most severe vulnerability: critical, high, medium or low; empty if its source states no severity."""
    score: float | None
    """CVSS base score of the most severe vulnerability; None if its source states no score."""
    cves: tuple[str, ...]
    """The most severe first."""
    advisories: tuple[str, ...]
    """Addresses of the advisories."""
    text: str
    """One sentence for people."""
    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A shipped criterion that a criterion of the operator replaced."""

    criterion: str
    """Id of the shipped criterion."""
    pack: str
    """The shipped pack that defines it."""
    old: str
    """Observation, limit, severity and action of the shipped criterion, in words."""
    by: str
    """Id of the criterion that replaces it."""
    by_pack: str
    new: str
    """Observation, limit, severity and action of the new criterion, in words."""
    changed: tuple[str, ...] = ()
    """Settings in which the two criteria differ."""
    source: str = ""
    """The reason that the operator's pack gives."""
    hosts: int = 0
    """Number of hosts that the shipped criterion would have judged."""


@dataclass(frozen=True, kw_only=True)
class PartHistory:
    """A figure of one part, compared with former runs."""

    host: str
    part: str
    """Scope of the part: `gpu=3`, `host`."""
    percentile: float | None = None
    """Percentage of the accepted parts that have a lower value; a part with an equal value counts as half a part. None if too few
    parts are accepted."""
    values: tuple[float, ...] = ()
    """Its values in the last former runs, the oldest first, and then that of this run; empty if no former run has it."""


@dataclass(frozen=True, kw_only=True)
class FigureHistory:
    """A figure of the parts of one model and driver, compared with the accepted parts of former runs."""

    name: str
    stage: str
    params: Mapping[str, Value] = field(default_factory=dict)
    unit: str = ""
    model: str = ""
    driver: str = ""
    accepted: int = 0
    """Number of accepted parts in former runs; each counts once, with its newest value."""
    median: float | None = None
    """Median of the newest values of the accepted parts; None if there are too few."""
    parts: tuple[PartHistory, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SeenBefore:
    """A cause that the same parts had in former runs."""

    cause: int
    """Position of the cause in the report."""
    parts: int
    """Number of parts of this cause that had the same cause in former runs."""
    runs: int
    """Number of former runs in which at least one of these parts had the cause."""
    last: str
    """Day on which the last of these runs began: `2026-02-01`."""
    run: str
    """Name of that run."""


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """Comparison of the run with former runs, from the history of the fleet. It changes no decision, verdict or cause."""

    runs: int
    """Number of former runs in the history."""
    figures: tuple[FigureHistory, ...] = ()
    """Figures of the hosts whose measurements the report has."""
    causes: tuple[SeenBefore, ...] = ()
    """The causes that were seen before."""


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """The report of a run, from which all its views are rendered."""

    run_id: str
    profile: str
    rehearsal: bool
    decision: str
    acceptance: Acceptance
    began: str
    ended: str
    rackproof: str
    coverage: Coverage
    hosts: tuple[HostReport, ...]
    verdicts: tuple[Verdict, ...]
    causes: tuple[Cause, ...] = ()
    """The causes of the listed verdicts that do not pass, including waived ones; the most urgent first."""
    quarantined: tuple[Quarantined, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    """Figures that were measured but not judged by any criterion."""
    unjudged: tuple[str, ...] = field(init=False, default=())
    """`not_judged` as text."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Name of a measured figure -> why a criteria pack that applies to one of the hosts has no reference value for it."""
    replaced: tuple[Replaced, ...] = ()
    """Shipped criteria that packs of the operator replaced."""
    judged: tuple[Judged, ...] = ()
    """All verdicts of the fleet, aggregated. Complete for fleets of any size."""
    detail: str = ALL
    """`all`, or `exceptions`, the default for more than 16 hosts. With `exceptions`, the report has no passing verdicts, and at
    most 20 000 others. If the run has more than 64 hosts, the report has the measurements of at most 64 hosts, none of which is
    accepted. `rackproof report RUN_DIR --host NAME` shows what is left out."""
    left_out: int = 0
    """Number of verdicts that `judged` counts and `verdicts` does not list."""
    site: str = ""
    """Site, purchase order and operator as in the inventory; empty if it does not have them."""
    purchase_order: str = ""
    operator: str = ""
    simulated: bool = False
    """Whether `rackproof simulate` generated the plan and all records."""
    measure_again: str = ""
    """The command that measures all hosts again. INVENTORY, and PATH of a profile of the operator, stand for their paths."""
    waivers: tuple[Waiver, ...] = ()
    """All waivers of the run, used or not."""
    baseline: str = ""
    """Digest of the baseline that the run is compared with; empty without a baseline."""
    changes: tuple[Change, ...] = ()
    """Changes since the hosts were accepted, regressions and changed parts first."""
    vulnerabilities: tuple[Vulnerability, ...] = ()
    """Versions with published vulnerabilities, the most severe first."""
    history: RunHistory | None = None
    """Comparison with former runs; None without `rackproof report --history`, or if the history cannot be read."""
    schema: str = REPORT_SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "unjudged", tuple(map(str, self.not_judged)))

    @cached_property
    def host_of(self) -> Mapping[str, HostReport]:
        """Name -> host."""
        return {host.name: host for host in self.hosts}

    @property
    def mark(self) -> str:
        """`SIMULATED` or `REHEARSAL`, which every view shows before the decision; empty if hardware was tested."""
        return mark(simulated=self.simulated, rehearsal=self.rehearsal)


def mark(*, simulated: bool, rehearsal: bool) -> str:
    """Return the mark that precedes every decision; an empty string if hardware was tested."""
    return "SIMULATED" if simulated else "REHEARSAL" if rehearsal else ""


def action_rank(action: str) -> int:
    """Return a number for sorting: the most severe action has the lowest."""
    return ACTIONS.index(action) if action in ACTIONS else len(ACTIONS)
