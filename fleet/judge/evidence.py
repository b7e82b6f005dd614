"""The records of the hosts of a run, and the plan's settings, in the form that the judge uses."""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from schemas.baselines import HostBaseline
from schemas.catalogue import BENCHMARKS, DURATION, output_of
from schemas.plans import Plan
from schemas.records import MEASURED, Gpu, Launch, Observation, Record, Snapshot, Value
from schemas.reports import Verdict
from schemas.scopes import Scope, pci_address

_PREFIXES = frozenset(
    {output.name.split(".")[0] for entry in BENCHMARKS.values() for output in entry.outputs}
    | {DURATION.name.split(".")[0], "drift"}
)
RACKPROOF = "rackproof"
"""Name of the version of Rackproof among the versions of a host."""
LAUNCH = "launch"
"""First component of the names of the observations with the software versions that the ranks report, such as `launch.torch`."""
DISTINGUISHING_PARAMS = ("numa", "world_size", "number")
"""Parameters that are not settings of a benchmark, but distinguish figures: memory locality, number of ranks, and the running
number of an `integrity.error`."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The records of one host of the plan, and what the control node observed."""

    records: tuple[Record, ...] = ()
    """The host record and the gang record of the host, if they are valid. A gang is the hosts of one multi-node launch."""
    foreign: tuple[Record, ...] = ()
    """Gang records that were written by another machine than the host record (`duplicates`). They are not judged."""
    received: Mapping[str, float] = field(default_factory=dict)
    """Gang of a record (empty for the host record) -> when the control node received it, in seconds since 1970. A record has no
    entry if this is not known, as in a copy of a run, or if the record is simulated."""
    problem: str = ""
    """Why there is no host record, or what failed on this host according to the control node; empty if there is a host record
    and nothing failed."""
    user: str = ""
    """The user or job that occupied the GPUs of the host, if a play failed on the host for this reason; otherwise empty."""
    bmc: Record | None = None
    """The record of the host's BMC, which the control node read; None if there is no valid record."""
    bmc_problem: str = ""
    """Why there is no record of the BMC."""
    baseline: HostBaseline | None = None
    """The accepted figures of the host; None if the plan compares with no baseline."""

    def observations(self) -> list[Observation]:
        """Return all observations: first the readings of the host by time, then those of its BMC by time, then benchmark results.

        If the scope of an observation is the PCI address of a GPU (`pci=0000:1b:00.0`), it is replaced by the index (`gpu=0`).
        """
        gpu_scopes = self.gpu_scopes()
        snapshots = (*self.snapshots(), *self.bmc_snapshots())
        readings = [item for snapshot in snapshots for item in snapshot.observations()]
        return [with_gpu_scope(item, gpu_scopes) for item in (*readings, *self.benchmarks())]

    def gpu_scopes(self) -> dict[str, str]:
        """Return, for each GPU, the scope with its PCI address (`pci=0000:1b:00.0`) -> the scope with its index (`gpu=0`)."""
        return {f"pci={pci_address(gpu.pci_bus_id)}": f"gpu={gpu.index}" for gpu in self.gpus() if gpu.pci_bus_id}

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of all records in the order of time, which is not the order of stages if a stage was run again."""
        return list(heapq.merge(*(record.snapshots for record in self.records), key=lambda snapshot: snapshot.at))

    def bmc_snapshots(self) -> tuple[Snapshot, ...]:
        """Return the readings of the BMC by time."""
        return self.bmc.snapshots if self.bmc else ()

    def benchmarks(self) -> list[Observation]:
        """Return the observations of the benchmarks, which are not in snapshots."""
        return [observation for record in self.records for observation in record.observations]

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that the host reported, by index."""
        gpus = {gpu.index: gpu for record in self.records for gpu in record.gpus}
        return tuple(gpus[index] for index in sorted(gpus))

    def launches(self) -> tuple[Launch, ...]:
        """Return every launch, whatever its outcome."""
        return tuple(launch for record in self.records for launch in record.launches)

    def software(self) -> dict[str, str]:
        """Return the versions of the software that the ranks used."""
        return {key: value for record in self.records for key, value in record.software.items()}

    def measuring_software(self) -> dict[str, str]:
        """Return the versions of `software`, and that of Rackproof. A new version may measure a figure in another way."""
        return self.software() | ({RACKPROOF: self.records[-1].rackproof} if self.records else {})

    def versions(self) -> list[Observation]:
        """Return the versions of `software` as observations: `launch.torch`, `launch.nccl`."""
        return [
            Observation(
                name=f"{LAUNCH}.{re.sub('[^a-z0-9_]', '_', key.lower())}",
                scope="host",
                stage="",
                unit="1",
                status=MEASURED,
                value=version,
            )
            for key, version in self.software().items()
        ]


@lru_cache(maxsize=4096)
def _settings_of_output(name: str) -> frozenset[str] | None:
    """Return which parameters are settings, for a figure that is not in the plan; None: all of them count as settings."""
    output = output_of(name)
    return frozenset(output.over) if output and not output.demanded else None


def with_gpu_scope(observation: Observation, gpu_scopes: Mapping[str, str]) -> Observation:
    """Return the observation with the index of its GPU in place of the PCI address, if the address is a GPU's."""
    scope = Scope.parse(observation.scope)
    return replace(observation, scope=scope.on(gpu_scopes[scope.device])) if scope.device in gpu_scopes else observation


@lru_cache(maxsize=4096)
def from_benchmark(name: str) -> bool:
    """Return whether observations of that name are figures or the duration of a benchmark, or the drift of a figure."""
    return name.split(".")[0] in _PREFIXES


class Planned:
    """Which parameters of each figure are settings in the plan. The other parameters describe how the figure was measured."""

    def __init__(self, plan: Plan) -> None:
        self._settings: dict[tuple[str, str], set[str]] = {}
        for item in plan.expected:
            self._settings.setdefault((item.stage, item.name), set()).update(item.params)
        self.has_manifest = bool(plan.manifest)
        """Whether the plan has a manifest (the list of the parts that the buyer ordered). The result of `Plan.only` has none."""

    def params(self, item: Observation | Verdict) -> dict[str, Value]:
        """Return the parameters that identify a figure. Observations that differ only in other parameters are of one figure."""
        settings: Collection[str] | None = self._settings.get((item.stage, item.name))
        if settings is None:  # not planned; an empty set is a planned figure without settings
            settings = _settings_of_output(item.name)
        return {
            key: value
            for key, value in sorted(item.params.items())
            if settings is None or key in settings or key in DISTINGUISHING_PARAMS
        }


def identifying_params(observation: Observation) -> dict[str, Value]:
    """Return the parameters by which the same figure of a benchmark is recognized in every round of a soak."""
    output = output_of(observation.name)
    if output is None or output is DURATION:
        return dict(observation.params)
    return {
        key: value for key, value in observation.params.items() if key in output.over or key in DISTINGUISHING_PARAMS
    }
