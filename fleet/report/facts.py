"""Collect the facts about each host that the summary of the report needs.

They are collected for all hosts, including those whose verdicts and measurements the report of a large fleet leaves out. This
module reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleet.judge.digests import uncompared_digests
from fleet.judge.drift import rates_without_drift
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.host_view import HostView
from fleet.judge.passes import Remaining, measured_figures
from fleet.judge.paths import judges_bandwidth
from fleet.judge.processors import limited_processors
from schemas.records import Launch
from schemas.reports import RECORD, Verdict, VerdictKind
from schemas.stages import GANG

Figure = tuple[str, str]
"""Stage and name of a figure (a result of a benchmark)."""

BUSY, STOLEN = "host.cpu.busy", "host.cpu.stolen"
MAX_STOLEN = 0.10
"""Highest share of stolen processor time without a caveat. Stolen is the time for which the hypervisor ran something else. It is
compared with the time for which the processors had work, because most processors of a GPU host are idle. The limit is that of
the rule HostCpuStealNoisyNeighbor of awesome-prometheus-alerts."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """The facts about one host that the summary needs."""

    measured: tuple[tuple[str, str, str], ...] = ()
    """Stage, name and unit of every figure of the host's benchmarks."""
    judged_bandwidths: frozenset[Figure] = frozenset()
    """Stage and name of each bandwidth of collective operations that a criterion compared with a limit (`judges_bandwidth`)."""
    uncompared_digests: tuple[tuple[str, str], ...] = ()
    """Stage, and scope of a GPU whose digests (`judge/digests.py`) were not compared: no other GPU has comparable ones."""
    gang_launches: tuple[Launch, ...] = ()
    """Launches of the host in its gang (the hosts of one multi-node launch).

    Only number, outcome, members and culprit are valid: launches with the same four values share one object.
    """
    rates_without_drift: tuple[str, ...] = ()
    """Names of the rates that the host's soak measured too few times to compute their drift (change from the initial level)."""
    gpus_on_bus: int = 0
    """Number of GPUs on the PCI bus in the last snapshot that has it; 0 if it was not read."""
    gpus_under_test: frozenset[str] = frozenset()
    """UUIDs, serials or names of the host's GPUs under test; empty if the PCI bus has no other GPUs."""
    stolen: tuple[str, float] | None = None
    """The stage with the highest share of stolen processor time, and this share; None if none is above MAX_STOLEN."""
    processors: tuple[int, int] | None = None
    """How many processors the agent could use, and how many the host has; None if it could use all, or if this is unknown."""
    other_processes: tuple[str, str, str] | None = None
    """Stage, GPU and process of the first process that used a GPU during a launch and was not part of it; None if none did."""


class FactCollector:
    """Collects the facts of hosts. Equal facts of several hosts share one object, because there may be 100 000 hosts."""

    def __init__(self, stats: FleetStats) -> None:
        self._stats = stats
        self._shared: dict[Any, Any] = {}

    def collect(self, view: HostView, verdicts: Iterable[Verdict], remaining: Remaining | None) -> HostFacts:
        """Return the facts of one host.

        Args:
            view: the host.
            verdicts: its verdicts. Passes that `PassCounter` counted without building a verdict are missing.
            remaining: the result of `PassCounter.count`; None if each pass is in `verdicts`.
        """
        layout, on_bus = remaining.layout if remaining else None, _gpus_on_bus(view)
        if remaining and remaining.layout and remaining.values:
            measured = remaining.layout.measured + measured_figures(remaining.values.pair_observations)
        else:
            measured = measured_figures(view.evidence.benchmarks())
        judged = frozenset(
            (item.stage, item.name)
            for item in verdicts
            if item.limit is not None and judges_bandwidth(item.criterion, item.name)
        )
        return HostFacts(
            measured=self._share(measured),
            judged_bandwidths=self._share(judged | layout.judged_bandwidths if layout else judged),
            uncompared_digests=tuple(uncompared_digests(view, self._stats.planned, self._stats.digests)),
            gang_launches=tuple(self._launch(launch) for launch in view.evidence.launches() if launch.stage == GANG),
            rates_without_drift=tuple(
                name for record in view.evidence.records if record.soak for name in rates_without_drift(record.soak)
            ),
            gpus_on_bus=on_bus,
            stolen=_stolen(view),
            processors=limited_processors(view),
            other_processes=_other_processes(view),
            gpus_under_test=_gpus_under_test(view) if on_bus > len(view.host.devices) else frozenset(),
        )

    def _launch(self, launch: Launch) -> Launch:
        """Return a launch with the same number, outcome, members and culprit, without logs, ranks and measurements."""
        key = (launch.number, launch.outcome, launch.members, launch.culprit)
        if key not in self._shared:
            self._shared[key] = replace(
                launch,
                reason="",
                ranks=(),
                log_tail="",
                observations=(),
                timeline=None,
                other_processes={},
                began="",
                duration_s=0.0,
            )
        shared: Launch = self._shared[key]
        return shared

    def _share(self, value: Any) -> Any:
        return self._shared.setdefault(value, value)


def _gpus_on_bus(view: HostView) -> int:
    values = [metric.values.get("host") for _, metric in view.observations.metrics.get("gpu.pci_count", ())]
    return next((int(value) for value in reversed(values) if isinstance(value, int | float)), 0)


def _stolen(view: HostView) -> tuple[str, float] | None:
    """Return `HostFacts.stolen`. The share is that of the time between the first and the last snapshot of a stage."""
    shares = {}
    busy, stolen = (_increases(view, name) for name in (BUSY, STOLEN))
    for stage in busy.keys() & stolen.keys():
        wanted = busy[stage] + stolen[stage]
        shares[stage] = stolen[stage] / wanted if wanted > 0 and min(busy[stage], stolen[stage]) >= 0 else 0.0
    stage = max(sorted(shares), key=lambda name: shares[name], default="")
    return (stage, round(shares[stage], 3)) if stage and shares[stage] > MAX_STOLEN else None


def _increases(view: HostView, name: str) -> dict[str, float]:
    """Return stage -> increase of a time since boot during the stage. It is negative after a reboot."""
    values: dict[str, list[float]] = {}
    for snapshot, metric in view.observations.metrics.get(name, ()):
        value = metric.values.get("host")
        if isinstance(value, int | float):
            values.setdefault(snapshot.stage, []).append(float(value))
    return {stage: read[-1] - read[0] for stage, read in values.items()}


def _other_processes(view: HostView) -> tuple[str, str, str] | None:
    """Return `HostFacts.other_processes`."""
    launches = view.evidence.launches()
    return next(((item.stage, *use) for item in launches for use in item.other_processes.items()), None)


def _gpus_under_test(view: HostView) -> frozenset[str]:
    known = {gpu.index: gpu.uuid or gpu.serial for gpu in view.evidence.gpus()}
    return frozenset(known.get(index) or f"{view.host.name} gpu={index}" for index in view.host.devices)


def fleet_figures(facts: Mapping[str, HostFacts]) -> Iterator[tuple[str, str, str]]:
    """Yield stage, name and unit of every figure that any host measured."""
    distinct = {id(item.measured): item.measured for item in facts.values()}
    return iter(dict.fromkeys(figure for measured in distinct.values() for figure in measured))


def is_of_missing_record(verdict: Verdict) -> bool:
    """Return whether the verdict states that the host has no record to judge.

    A verdict named RECORD can also state that the record contradicts itself; such a record is judged.
    """
    return verdict.name == RECORD and verdict.kind != VerdictKind.CONTRADICTORY
