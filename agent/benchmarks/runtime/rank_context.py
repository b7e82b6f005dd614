"""The context in which a benchmark runs on one rank, without torch: its rank, barriers, and methods that report figures."""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agent.gang.heartbeat import RankHeartbeat
from agent.sampling.statistics import SampleSeries, summarize
from schemas import documents
from schemas.records import ERROR, MEASURED, Observation, Samples, to_json

SAVE_S = 2.0
"""Minimum seconds between two calls of `report_progress`, and between two writes of the observations by `set_phase`. If a launch
is stopped, the observations since the last write are lost."""

Value = float | str | bool | Samples
"""A figure, or samples whose median is the figure."""


class Store(Protocol):
    """Carries messages between ranks: a store of torch, or a KeyStore."""

    def set(self, key: str, value: str, /) -> None:
        """Store the value."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that was set."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys were set."""


@dataclass(kw_only=True)
class RankContext:
    """One rank of one launch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    stage: str
    kind: str
    """Kind of the devices: `gpu`, or `cpu` in a rehearsal (a run without GPUs)."""
    devices: tuple[int, ...]
    """NVML index of the GPU of each local rank of this host; in a rehearsal, 0, 1, … for the processes that replace GPUs."""
    world_scope: str
    """Scope of the figures that all ranks measure together: `host`, or `gang=…` (the hosts of one multi-node launch)."""
    work: Path
    """Directory for the files that the ranks of this host and their supervisor exchange."""
    store: Store
    """Carries messages between ranks. It keeps working if a rank is lost; the process group does not."""
    timeout_s: float = 60.0
    """Seconds to wait for another rank."""
    heartbeat: RankHeartbeat = field(default_factory=RankHeartbeat)
    """Reports this rank's progress to the supervisor, which is the process that launched the ranks of this host."""
    node: int = 0
    """Number of this host among the hosts of the launch, from 0."""
    launched: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when this host's ranks were launched, or, without a supervisor, when this rank had imported torch."""
    benchmark: str = ""
    """The benchmark that is running."""
    begun: dict[str, float] = field(default_factory=dict)
    """When this rank began each benchmark, and each step between benchmarks (such as `join`): name -> `time.monotonic()`."""
    unable: str = ""
    """Why this rank cannot join the process group; empty if it can."""
    is_software_unfit: bool = False
    """Whether the software of the host is why the device cannot be used, so that no device is at fault."""
    lost: dict[int, str] = field(default_factory=dict)
    """Local rank that this rank no longer waits for -> the reason."""
    observations: list[Observation] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    """Time windows for which `request_telemetry` has asked the supervisor for NVML samples."""
    _barriers: dict[str, int] = field(default_factory=dict)
    _saved: float = field(default_factory=time.monotonic)
    _reported: float = field(default_factory=time.monotonic)

    @property
    def device_scope(self) -> str:
        """The scope of this rank's device: `gpu=3` (NVML index), or `cpu=0` in a rehearsal."""
        return f"{self.kind}={self.devices[self.local_rank]}"

    def pair_scope(self, peer: int) -> str:
        """Return the scope of this device and that of local rank `peer`: `gpu=3,peer=0`."""
        return f"{self.device_scope},peer={self.devices[peer]}"

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this rank reports the figures that all ranks measure together.

        One rank of each host reports them, so that the record of each host has them.
        """
        return self.local_rank == 0

    def set_phase(self, phase: str, exit_code: int | None = None) -> None:
        """Report to the supervisor what this rank is doing now, and when the rank ends also its exit code."""
        self.heartbeat.phase = phase
        self.heartbeat.record_progress()
        state = {"phase": phase, "exit_code": exit_code, "begun": self.begun, "unable": self.unable}
        state["is_software_unfit"] = self.is_software_unfit
        _write(self.work / f"rank{self.rank}.state.json", state)
        if self.observations and time.monotonic() - self._saved > SAVE_S:
            self.save()

    @property
    def progress_due(self) -> bool:
        """Whether this is the reporting rank, and its last call of `report_progress` was more than SAVE_S seconds ago."""
        return self.is_reporting_rank and time.monotonic() - self._reported > SAVE_S

    def report_progress(self, figures: Mapping[str, tuple[float, str]], **params: Any) -> None:
        """Publish the current figures (name -> value and unit) of a running training. They do not become part of the record."""
        self._reported = time.monotonic()
        common = {"scope": self.world_scope, "status": MEASURED, "params": params}
        observations = [
            {"name": name, "value": value, "unit": unit, **common}
            for name, (value, unit) in figures.items()
            if math.isfinite(value)
        ]
        _write(self.work / f"rank{self.rank}.now.json", {"observations": observations})

    def save(self) -> None:
        """Write all observations so far to this rank's file, so that they are not lost if the rank fails later."""
        self._saved = time.monotonic()
        _write(
            self.work / f"rank{self.rank}.json",
            {
                "rank": self.rank,
                "observations": [to_json(item) for item in self.observations],
                "software": self.software_versions() if self.is_reporting_rank else {},
                "windows": self.windows,
            },
        )

    def report(
        self, name: str, value: Value, *, unit: str, scope: str, samples: Samples | None = None, **params: Any
    ) -> None:
        """Report a figure. If it or a statistic of its samples is NaN or infinite, report an error instead.

        Args:
            name: name of the figure.
            value: the figure, or samples whose median is the figure.
            unit: unit of the figure.
            scope: the part of the host or gang that the figure describes.
            samples: the samples from which the number `value` was computed, if it is not their median.
            params: parameters of the figure.
        """
        samples = value if isinstance(value, Samples) else samples
        figure = value.p50 if isinstance(value, Samples) else value
        numbers = [figure, *((samples.min, samples.p50, samples.max, samples.cv) if samples else ())]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            reason = f"the figure or a statistic of its samples is not a finite number; the figure is {figure}"
            self.report_absent(name, unit=unit, scope=scope, status=ERROR, reason=reason, **params)
            return
        self.observations.append(
            Observation(
                name=name,
                scope=scope,
                stage=self.stage,
                unit=unit,
                status=MEASURED,
                value=figure,
                params=params,
                samples=samples,
            )
        )

    def report_world(self, figures: Mapping[str, tuple[Value, str]], **params: Any) -> None:
        """Report figures (name -> value and unit) of all ranks together, if this is the reporting rank of its host."""
        for name, (value, unit) in figures.items() if self.is_reporting_rank else ():
            self.report(name, value, unit=unit, scope=self.world_scope, **params)

    def report_absent(self, name: str, *, unit: str, scope: str, status: str, reason: str, **params: Any) -> None:
        """Report that a figure has no value, with the status and the reason."""
        self.observations.append(
            Observation(
                name=name, scope=scope, stage=self.stage, unit=unit, status=status, reason=reason[:2000], params=params
            )
        )

    def report_wrong_data(
        self, name: str, count: int, *, invalid: Mapping[str, str], scope: str, **params: Any
    ) -> None:
        """Report the number of wrong results, and an error for each figure that is invalid because of them.

        Args:
            name: name of the figure that counts the wrong results.
            count: number of wrong results.
            invalid: name of each invalid figure -> its unit.
            scope: scope of all these figures.
            params: parameters of all these figures.
        """
        self.report(name, count, unit="1", scope=scope, **params)
        for figure, unit in invalid.items():
            reason = f"wrong data: {name} is {count}"
            self.report_absent(figure, unit=unit, scope=scope, status=ERROR, reason=reason, **params)

    def has_reported(self, name: str, scope: str, params: Mapping[str, Any]) -> bool:
        """Return whether this rank has reported the figure, or the reason for its absence, with at least these parameters."""
        return any(
            item.name == name and item.scope == scope and params.items() <= item.params.items()
            for item in self.observations
        )

    def report_rate(
        self, name: str, amount: float, series: SampleSeries, *, unit: str, scope: str, **params: Any
    ) -> None:
        """Report the median rate: `amount` (bytes or operations) divided by each time in the series."""
        rates = summarize([amount / seconds for seconds in series.seconds], stopped=series.stopped)
        self.report(name, rates, unit=unit, scope=scope, **params)

    def begin(self, benchmark: str) -> None:
        """Begin a benchmark, or a step between benchmarks. Later barriers and telemetry windows belong to it."""
        self.benchmark = benchmark
        self.begun[benchmark] = time.monotonic()
        self._barriers = {}
        self.store.set(f"begun/{self.node}/{benchmark}/{self.local_rank}", "here")
        for rank in list(self.lost):  # wait again for a rank that was only slow and has caught up
            if self.store.check([f"begun/{self.node}/{benchmark}/{rank}"]):
                del self.lost[rank]
        self.set_phase(benchmark)

    def host_barrier(self, name: str = "") -> None:
        """Wait for the other ranks of this host. Mark a rank that does not arrive in time as lost.

        Later barriers do not wait for a lost rank. If the lost rank catches up, `begin` makes barriers wait for it again.

        The barrier uses the store and not the process group, so that a rank whose GPU is lost does not block the others.
        """
        self._barriers[name] = number = self._barriers.get(name, 0) + 1
        self.heartbeat.record_progress()
        key = f"barrier/{self.node}/{self.benchmark}/{name}/{number}"
        self.store.set(f"{key}/{self.local_rank}", "here")
        deadline = time.monotonic() + self.timeout_s
        waiting = [rank for rank in range(self.local_world_size) if rank not in self.lost]
        while waiting and not self.store.check([f"{key}/{rank}" for rank in waiting]):
            waiting = [rank for rank in waiting if not self._has_left(rank)]
            if time.monotonic() > deadline:
                late = [rank for rank in waiting if not self.store.check([f"{key}/{rank}"])]
                barrier = f"{self.benchmark} {name}".strip()
                reason = f"did not reach the barrier {barrier!r} within {self.timeout_s:g} s"
                self.lost |= dict.fromkeys(late, reason)
                return
            time.sleep(0.0005)

    def present_ranks(self) -> list[int]:
        """Return the local ranks that are not lost and have not left the benchmark."""
        return [rank for rank in range(self.local_world_size) if self.is_present(rank)]

    def is_present(self, rank: int) -> bool:
        """Return whether a local rank is not lost and has not left the benchmark."""
        return rank not in self.lost and not self._has_left(rank)

    def why_absent(self, rank: int) -> str:
        """Return why a local rank no longer takes part in the benchmark; empty if it still does."""
        if rank in self.lost:
            return f"local rank {rank} {self.lost[rank]}"
        return f"local rank {rank} ended the benchmark early" if self._has_left(rank) else ""

    def leave(self) -> None:
        """Announce to all ranks that this rank has left the benchmark, so that they do not wait for it."""
        self.store.set(f"left/{self.node}/{self.benchmark}/{self.local_rank}", "left")

    def _has_left(self, rank: int) -> bool:
        return bool(self.store.check([f"left/{self.node}/{self.benchmark}/{rank}"]))

    def request_telemetry(self, begin: float, end: float, **params: Any) -> None:
        """Ask the supervisor for this device's NVML samples from `begin` to `end`, both by `time.monotonic()`."""
        self.windows.append(
            {"benchmark": self.benchmark, "scope": self.device_scope, "begin": begin, "end": end, "params": params}
        )

    def software_versions(self) -> dict[str, str]:
        """Return the versions of the libraries that the ranks use."""
        return {}

    def device_error(self) -> str:
        """Return why the device can no longer be used, or an empty string."""
        return ""

    def release_memory(self) -> None:
        """Release the memory of the benchmark that has ended."""
        gc.collect()


def _write(path: Path, value: Mapping[str, Any]) -> None:
    documents.write_text(path, json.dumps(value, allow_nan=False), durable=False)
