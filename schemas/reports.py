"""What the control node says: verdicts on observations, and the report on the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.baselines import Change
from schemas.records import ERROR, SKIPPED, UNSUPPORTED, Gpu, Launch, Observation, Value
from schemas.scopes import Scope
from schemas.timeline import Soak
from schemas.waivers import Waiver

REPORT_SCHEMA = "rackproof.report/1"

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
ACCEPTED, REJECTED, INCOMPLETE = "accepted", "rejected", "incomplete"
ALL, EXCEPTIONS = "all", "exceptions"
"""How much of the hosts a report holds."""
ACTIONS = ("rma", "inspect_hardware", "reseat", "reset_gpu", "reboot", "monitor", "none")
"""What a failed criterion asks for, the gravest first."""
CRITICAL, WARNING = "critical", "warning"
SEVERITY = {action: WARNING if action in ("monitor", "none") else CRITICAL for action in ACTIONS}
"""How grave a failure is where no pack says: by what it asks for. The alerts use the same words."""


class VerdictKind:
    """What a verdict is about."""

    LIMIT = "limit"
    """A value was compared with a limit."""
    CHANGE = "change"
    """What a counter rose by over the run was compared with a limit."""
    PEERS = "peers"
    """A value was compared with the value that most of its peers have."""
    IDENTITY = "identity"
    """Whether a part is what and where the inventory, the manifest or another reading of it says."""
    SUSPECT = "suspect"
    """Which part is suspected when several hosts or GPUs work together."""
    MISSING = "missing"
    """Not observed."""
    ERROR, SKIPPED, UNSUPPORTED = ERROR, SKIPPED, UNSUPPORTED
    """Observed with this status, which gives the reason."""
    IN_USE = "in_use"
    """Not measured because others use the host."""
    UNFINISHED = "unfinished"
    """A launch, a stage or a soak did not finish."""
    TOO_FEW_PEERS = "too_few_peers"
    """Measured, and too few others have the figure."""
    NO_BASELINE = "no_baseline"
    """Measured, and the accepted record has no figure to compare with, or a noisy one."""
    CONTRADICTORY = "contradictory"
    """Readings that exclude each other: a counter or an uptime that fell."""


KINDS = tuple(value for name, value in vars(VerdictKind).items() if not name.startswith("_"))


class LineKind:
    """What a line of the summary is about."""

    COUNT = "count"
    """How many hosts have which decision."""
    CHECK = "check"
    """The state of one kind of test."""
    CAVEAT = "caveat"
    """What qualifies the decision."""
    MANIFEST = "manifest"
    SOAK = "soak"
    NOT_JUDGED = "not_judged"
    WAIVER = "waiver"
    BASELINE = "baseline"
    REASON = "reason"
    """Why a host is not accepted."""
    MORE = "more"
    """What other lines leave out."""
    CRITERIA = "criteria"


LINES = tuple(value for name, value in vars(LineKind).items() if not name.startswith("_"))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One observation held against one criterion; or an observation that should be there and cannot be judged."""

    host: str
    scope: str
    name: str
    verdict: str
    criterion: str
    """Id of the criterion; `plan` where the plan alone demands the observation."""
    kind: str = VerdictKind.LIMIT
    """What it is about: one of KINDS. Renderers go by this and by the values, never by the reason."""
    reason: str
    """One sentence for people: what was found, and what was wanted."""
    detail: str = ""
    """What of the reason the found and the wanted value do not say: where a fleet's limit comes from, what explains the value."""
    part: str = ""
    """Scope of the part that it is laid to, where that is not the one its own begins with: the GPU whose every pair is slow."""
    serial: str = ""
    """Of the part."""
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
    """Of a failure: `critical`, not fit for work; or `warning`, somebody should look. Empty where nothing failed."""
    user: str = ""
    """Who uses the host: the other run, job or process, if the kind is `in_use`."""
    waiver: Waiver | None = None
    """By whom and until when it is waived: the verdict stays what it is, and does not stand against acceptance."""

    def __post_init__(self) -> None:
        if self.verdict == FAIL and not self.severity:
            object.__setattr__(self, "severity", SEVERITY.get(self.action, CRITICAL))

    @property
    def place(self) -> str:
        """Scope of the part that it is laid to: `gpu=3` of `gpu=3,link=2`, `gang=r1` where it is of no part."""
        return self.part or Scope.parse(self.scope).part

    @property
    def stands(self) -> bool:
        """It speaks against acceptance: a failure, or something unknown, for which nobody answers."""
        return self.verdict != PASS and self.waiver is None


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How much of plan × inventory was seen: counts of observations."""

    expected: int
    measured: int
    missing: int
    """Not there at all; `error`, `skipped` and `unsupported` are there and say why."""
    error: int
    skipped: int
    unsupported: int


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """A host of the inventory, whatever became of it."""

    name: str
    rack: str
    decision: str
    record: str
    """Path of the host's record within the run directory."""
    coverage: Coverage
    gpus: tuple[Gpu, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    packs: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    """What the control node saw happen to the host: unreachable at which stage, which task failed."""
    launches: tuple[Launch, ...] = ()
    measurements: tuple[Observation, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    """Scope of a pair of GPUs (`gpu=0,peer=1`) -> what links the two, as the last snapshot saw it."""
    soak: Soak | None = None
    """Its soak, with fewer buckets than the record has."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How the numbers of one row lie: exact while few differ, else to one part in ten thousand; `min` and `max` are exact."""

    n: int
    min: float
    p05: float
    p50: float
    p95: float
    max: float
    bins: tuple[int, ...] = ()
    """How many lie in each of equal steps from `min` to `max`; empty where all are the same."""


@dataclass(frozen=True, kw_only=True)
class Far:
    """A part that is farthest on the wrong side of a limit, or nearest to it."""

    host: str
    scope: str
    value: Value
    serial: str = ""
    verdict: str = PASS


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What one criterion found over the whole fleet: a row for each observation and settings that it judged."""

    criterion: str
    """Id of the criterion; `plan` where the plan alone demands the observation."""
    name: str
    stage: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    """The settings that the figures have in common."""
    unit: str = ""
    operator: str = ""
    limit: Value = None
    """None where it differs from host to host, or there is none."""
    source: str = ""
    basis: str = ""
    action: str = "none"
    """What a failure asks for: the gravest that one of them did ask for; else what it would."""
    passed: int = 0
    failed: int = 0
    inconclusive: int = 0
    spread: Spread | None = None
    """Of the values, where they are numbers."""
    values: Mapping[str, int] = field(default_factory=dict)
    """Of values that are none, texts and flags: the commonest, and how many show each."""
    farthest: tuple[Far, ...] = ()
    """At most ten: those that fail, the worst first, then those that come nearest to it. None where all values are the same."""


@dataclass(frozen=True, kw_only=True)
class Quarantined:
    """A file in the run directory that was not believed."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class SummaryLine:
    """One line of the summary on top of a report."""

    kind: str
    """One of LINES."""
    text: str
    """For people, after the title."""
    title: str = ""
    verdict: str = ""
    """Of a check or a reason: pass, fail or inconclusive; empty where nothing was judged."""
    host: str = ""
    part: str = ""
    """Scope of the part that a reason is about."""
    values: Mapping[str, int] = field(default_factory=dict)
    """The numbers in the text, by what they count."""

    def __str__(self) -> str:
        return f"{self.title}: {self.text}" if self.title else self.text


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The summary on top: `status` is PASS, FAIL or INCOMPLETE; before it the `mark`."""

    status: str
    lines: tuple[SummaryLine, ...]
    summary: tuple[str, ...] = field(init=False)
    """The lines as text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", tuple(map(str, self.lines)))


@dataclass(frozen=True, kw_only=True)
class NotJudged:
    """A figure that was measured and that no criterion judged."""

    name: str
    stage: str
    host: str = ""
    """Where it has no verdict on one part alone: of which host,"""
    scope: str = ""
    """and of which part."""

    def __str__(self) -> str:
        where = f" of {self.host} {self.scope}" if self.host else ""
        return f"{self.name}{where} in stage {self.stage}"


@dataclass(frozen=True, kw_only=True)
class FleetReport:
    """The one document of a run."""

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
    quarantined: tuple[Quarantined, ...] = ()
    not_judged: tuple[NotJudged, ...] = ()
    """What was measured and no criterion judged."""
    unjudged: tuple[str, ...] = field(init=False, default=())
    """The same as text."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Name of what was measured -> why the packs of these GPUs hold no figure for it."""
    judged: tuple[Judged, ...] = ()
    """Every verdict of the fleet, summed up: complete at any size."""
    detail: str = ALL
    """`all`; or `exceptions` in a fleet of more than 16 hosts: verdicts that pass are left out, of more than 64 hosts also
    what accepted hosts measured. `rackproof report RUN_DIR --host NAME` shows them."""
    left_out: int = 0
    """Verdicts that are summed up in `judged` and are not in `verdicts`."""
    simulated: bool = False
    """`rackproof simulate` made up the plan and every record."""
    waivers: tuple[Waiver, ...] = ()
    """All that the run was given, whether or not they were used."""
    baseline: str = ""
    """Digest of the baseline that the run is compared with; empty where it is compared with none."""
    changes: tuple[Change, ...] = ()
    """What is not as it was when the hosts were accepted: regressions and parts that differ first."""
    schema: str = REPORT_SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "unjudged", tuple(map(str, self.not_judged)))

    @property
    def mark(self) -> str:
        """`SIMULATED` or `REHEARSAL`: every view says so, and calls nothing accepted; empty where hardware was looked at."""
        return mark(simulated=self.simulated, rehearsal=self.rehearsal)


def mark(*, simulated: bool, rehearsal: bool) -> str:
    """The word that stands before whatever is decided; empty where hardware was looked at."""
    return "SIMULATED" if simulated else "REHEARSAL" if rehearsal else ""
