"""Baselines: the figures of a part from its accepted runs, and the changes since then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.records import Gpu, Value

BASELINE_SCHEMA = "rackproof.baseline/1"
REAL, REHEARSAL, SIMULATED = "gpu", "rehearsal", "simulated"
"""Kinds of baseline. A run is compared only with a baseline of its own kind."""
HOST, GPU = "host", "gpu"

Key = tuple[str, str, str, tuple[tuple[str, Value], ...]]
"""The key of a figure of a part: name, stage, scope within the part, and settings."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """The median of one figure of a part over the accepted runs of the part, without outliers."""

    name: str
    unit: str
    value: float
    stage: str = ""
    within: str = ""
    """The scope within the part; empty for the part itself. A peer GPU is named by its serial or UUID: `peer=1652826070730`."""
    params: Mapping[str, Value] = field(default_factory=dict)
    """The settings with which the figure was measured."""
    sigma: float | None = None
    """Standard deviation between runs, divided by the value; None if fewer than three runs remain without outliers, or if the
    value is 0."""
    precision: float | None = None
    """Relative standard error of a run's median over its repetitions. Of several runs, the largest value. None if no run repeats
    the measurement."""
    left_out: int = 0
    """Number of runs excluded as outliers."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Value of each run, by run id."""

    @property
    def key(self) -> Key:
        """The key by which the figure is compared."""
        return self.name, self.stage, self.within, tuple(sorted(self.params.items()))


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A run that was added to a baseline, and by whom."""

    run_id: str
    nonce: str
    report: str
    """SHA-256 of the report.json that was accepted."""
    status: str
    """PASS or PASS WITH WAIVERS, preceded by REHEARSAL or SIMULATED if no GPU was tested."""
    at: str
    by: str
    why: str = ""
    waivers: tuple[str, ...] = ()
    """Waivers used on this part: criterion, person and date."""
    began: str = ""
    """When the run began; empty if an earlier version of Rackproof added the run."""


@dataclass(frozen=True, kw_only=True)
class InstalledPart:
    """A part that has a serial and is not a GPU: an InfiniBand adapter, a NIC, an optical module, a disk, or the host itself."""

    kind: str
    slot: str
    serial: str


@dataclass(frozen=True, kw_only=True)
class PartBaseline:
    """The baseline of one part, in one file: a GPU, identified by its serial or UUID (`gpu_identity`), or a host."""

    kind: str
    """Kind of run that accepted the part: `gpu` (GPUs were tested), `rehearsal` or `simulated`."""
    part: str
    """`gpu` or `host`."""
    id: str
    host: str
    """The host in which the part was last accepted."""
    runs: tuple[Accepted, ...]
    """In the order in which the runs began. Host, slot, GPUs, parts and versions are those of the last one."""
    figures: tuple[Level, ...]
    slot: str = ""
    gpus: tuple[Gpu, ...] = ()
    """GPUs of the host; in the baseline of a GPU, only this GPU."""
    parts: tuple[InstalledPart, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: str = BASELINE_SCHEMA


@dataclass(frozen=True, kw_only=True)
class HostBaseline:
    """The baseline of one host of a run, and those of its GPUs."""

    host: PartBaseline | None = None
    gpus: Mapping[str, PartBaseline] = field(default_factory=dict)
    """Serial or UUID of a GPU (`fleet.judge.gpu_identity`) -> its baseline."""
    problem: str = ""
    """Why the baseline is rejected; empty if it is not."""


@dataclass(frozen=True, kw_only=True)
class PlannedBaseline:
    """The baseline that a run is compared with. The run uses the copy of the baseline in the run directory."""

    directory: str
    """Directory from which the baseline was copied."""
    digest: str
    """SHA-256 of the copy's index. The index contains the checksum of each file."""


REGRESSED, IMPROVED, CHANGED, UNCLEAR = "regressed", "improved", "changed", "unclear"
REPLACED, MOVED, NEW, GONE = "replaced", "moved", "new", "gone"
VERSION = "version"
PARTS = (REPLACED, MOVED, NEW, GONE)
"""Kinds of changes of parts. Figures that are new or missing have kinds of their own: `figures_new`, `figures_gone`."""
FIGURES_NEW, FIGURES_GONE = "figures_new", "figures_gone"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change since the baseline."""

    kind: str
    """Of a figure: regressed, improved, changed (it is not known which direction is better), unclear. Of parts: replaced, moved,
    new, gone, unclear (no part of the kind reports its serial any more). Others: version, figures_new, figures_gone."""
    host: str
    scope: str
    """`gpu=3`, `host`, `hca=mlx5_1`."""
    what: str
    """Name of the figure, kind of the part, or name of the component whose version changed."""
    text: str
    """One sentence for people."""
    serial: str = ""
    """Serial of the part in the new run; if the part is gone, of the part in the baseline."""
    stage: str = ""
    params: Mapping[str, Value] = field(default_factory=dict)
    unit: str = ""
    old: Value = None
    new: Value = None
    share: float | None = None
    """(new - old) / |old|; None if `old` is 0, or if the change is not that of a figure."""
    noise: float | None = None
    """Noise of the figure, divided by |old|. A difference up to the noise is not a change."""
    basis: str = ""
    """Where the noise comes from, for example a criterion."""

    @property
    def counts(self) -> bool:
        """Whether the change is a regression or a changed part."""
        return self.kind in (REGRESSED, *PARTS)

    @property
    def is_unreported(self) -> bool:
        """Whether a change can be neither shown nor excluded: a figure is too noisy, or the new run lacks figures or serials."""
        return self.kind in (UNCLEAR, FIGURES_GONE)


def part_baseline_from_json(document: Mapping[str, Any]) -> PartBaseline:
    """Return the baseline in a document that matches baseline.schema.json."""
    parts: dict[str, Any] = {
        "runs": tuple(Accepted(**{**run, "waivers": tuple(run.get("waivers", ()))}) for run in document["runs"]),
        "figures": tuple(Level(**item) for item in document["figures"]),
        "gpus": tuple(Gpu(**gpu) for gpu in document.get("gpus", ())),
        "parts": tuple(InstalledPart(**entry) for entry in document.get("parts", ())),
    }
    return PartBaseline(**{**document, **parts})
