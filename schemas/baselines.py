"""Baselines: what a part showed in the runs in which it was accepted. And the changes between then and now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.records import Gpu, Value

BASELINE_SCHEMA = "rackproof.baseline/1"
REAL, REHEARSAL, SIMULATED = "gpu", "rehearsal", "simulated"
"""Kinds of baseline: a run is compared with one of its own kind alone."""
HOST, GPU = "host", "gpu"

Key = tuple[str, str, str, tuple[tuple[str, Value], ...]]
"""Name, stage, place within the part, settings: what two figures of one part must share to be the same figure."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """What one figure of a part was, settled over the accepted runs."""

    name: str
    unit: str
    value: float
    stage: str = ""
    within: str = ""
    """Rest of the scope after the part; another GPU by its serial: `peer=1652826070730`."""
    params: Mapping[str, Value] = field(default_factory=dict)
    """The settings it was measured with."""
    sigma: float | None = None
    """Standard deviation from run to run over the value; None of fewer than three runs, which tell none."""
    precision: float | None = None
    """Standard error of the median within a run over the value; None where it was measured once."""
    left_out: int = 0
    """Runs that lie too far from the others to be of the same part in the same state."""
    values: Mapping[str, float] = field(default_factory=dict)
    """By the id of the run."""

    @property
    def key(self) -> Key:
        """What it is compared by."""
        return self.name, self.stage, self.within, tuple(sorted(self.params.items()))


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A run that was taken into a baseline, and who did it."""

    run_id: str
    nonce: str
    report: str
    """SHA-256 of the report.json that was accepted."""
    status: str
    """PASS, or PASS WITH WAIVERS."""
    at: str
    by: str
    why: str = ""
    waivers: tuple[str, ...] = ()
    """What was waived on this part: criterion, who, until when."""


@dataclass(frozen=True, kw_only=True)
class InstalledPart:
    """A part that tells its serial, other than a GPU: NIC, disk, the host itself."""

    kind: str
    slot: str
    serial: str


@dataclass(frozen=True, kw_only=True)
class PartBaseline:
    """The baseline of one part: a GPU by its serial, or a host by its name. One file."""

    kind: str
    part: str
    """`gpu` or `host`."""
    id: str
    host: str
    """Where it was last accepted."""
    runs: tuple[Accepted, ...]
    figures: tuple[Level, ...]
    slot: str = ""
    gpus: tuple[Gpu, ...] = ()
    """Of a host: those in it."""
    parts: tuple[InstalledPart, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: str = BASELINE_SCHEMA


@dataclass(frozen=True, kw_only=True)
class HostBaseline:
    """The accepted record of a host of a run and of the GPUs found in it."""

    host: PartBaseline | None = None
    gpus: Mapping[str, PartBaseline] = field(default_factory=dict)
    """By serial."""
    problem: str = ""
    """Why it cannot be believed."""


@dataclass(frozen=True, kw_only=True)
class PlannedBaseline:
    """The baseline that a run is compared with: its copy in the run directory is the one that counts."""

    directory: str
    """Where it was taken from."""
    digest: str
    """SHA-256 of the index of the copy, which has that of each file."""


REGRESSED, IMPROVED, CHANGED, UNCLEAR = "regressed", "improved", "changed", "unclear"
REPLACED, MOVED, NEW, GONE = "replaced", "moved", "new", "gone"
VERSION = "version"
PARTS = (REPLACED, MOVED, NEW, GONE)
"""Kinds of changes of parts; the figures that came and went are `figures_new` and `figures_gone`."""
FIGURES_NEW, FIGURES_GONE = "figures_new", "figures_gone"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that is not as it was."""

    kind: str
    """regressed, improved, changed (a figure without better and worse), unclear; replaced, moved, new, gone (parts); version;
    figures_new, figures_gone."""
    host: str
    scope: str
    """`gpu=3`, `host`, `hca=mlx5_1`."""
    what: str
    """Name of the figure, the kind of part, or the component of a version."""
    text: str
    """One sentence for people."""
    serial: str = ""
    """Of the part as it is now; as it was, where it is gone."""
    stage: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    unit: str = ""
    old: Value = None
    new: Value = None
    share: float | None = None
    """(new - old) / old."""
    noise: float | None = None
    """Share that is taken for noise; beyond it a figure is called changed."""
    basis: str = ""
    """Where the noise is known from."""

    @property
    def counts(self) -> bool:
        """A regression, or a part that differs: what a comparison is made for."""
        return self.kind in (REGRESSED, *PARTS)

    @property
    def is_unreported(self) -> bool:
        """Return whether the new side does not report something that was known before, so it may have changed."""
        return self.kind in (UNCLEAR, FIGURES_GONE)


def part_baseline_from_json(document: Mapping[str, Any]) -> PartBaseline:
    """The baseline in a document that baseline.schema.json has passed."""
    parts: dict[str, Any] = {
        "runs": tuple(Accepted(**{**run, "waivers": tuple(run.get("waivers", ()))}) for run in document["runs"]),
        "figures": tuple(Level(**item) for item in document["figures"]),
        "gpus": tuple(Gpu(**gpu) for gpu in document.get("gpus", ())),
        "parts": tuple(InstalledPart(**place) for place in document.get("parts", ())),
    }
    return PartBaseline(**{**document, **parts})
