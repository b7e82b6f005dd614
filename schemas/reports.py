"""What the control node says: verdicts on observations, and the report on the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.records import Gpu, Launch, Observation, Value
from schemas.timeline import Soak

REPORT_SCHEMA = "rackproof.report/1"

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
ACCEPTED, REJECTED, INCOMPLETE = "accepted", "rejected", "incomplete"
ACTIONS = ("rma", "inspect_hardware", "reseat", "reset_gpu", "reboot", "monitor", "none")
"""What a failed criterion asks for, the gravest first."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One observation held against one criterion; or an observation that should be there and cannot be judged."""

    host: str
    scope: str
    name: str
    verdict: str
    criterion: str
    """Id of the criterion; `plan` where the plan alone demands the observation."""
    reason: str
    """One sentence for people: what was found, and what was wanted."""
    detail: str = ""
    """What of the reason the found and the wanted value do not say: where a fleet's limit comes from, what explains the value."""
    serial: str = ""
    stage: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    value: Value = None
    limit: Value = None
    operator: str = ""
    unit: str = ""
    action: str = "none"
    source: str = ""
    basis: str = ""


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
class Quarantined:
    """A file in the run directory that was not believed."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The summary on top: `status` is PASS, FAIL or INCOMPLETE, after `REHEARSAL ` where no GPU was looked at."""

    status: str
    summary: tuple[str, ...]


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
    unjudged: tuple[str, ...] = ()
    """What was measured and no criterion speaks of: `NAME in stage STAGE`."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Name of what was measured -> why the packs of these GPUs hold no figure for it."""
    schema: str = REPORT_SCHEMA
