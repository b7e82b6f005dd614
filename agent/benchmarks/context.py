"""What every benchmark is given: its place among the ranks, its device, a clock that fits the device, and where to report."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schemas import documents
from schemas.records import ERROR, MEASURED, Observation, Samples, to_json


@dataclass(kw_only=True)
class Context:
    """One rank of one launch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    stage: str
    device_scope: str
    """`gpu=3` (NVML index), or `cpu=0` in a rehearsal."""
    world_scope: str
    """Scope of what all ranks do together: `host` or `gang=…`."""
    work: Path
    observations: list[Observation] = field(default_factory=list)

    @property
    def speaks_for_world(self) -> bool:
        """One rank a host reports what all ranks did together, so that every host's record has it."""
        return self.local_rank == 0

    def phase(self, what: str, exit_code: int | None = None) -> None:
        """Tells the supervisor what this rank is at, and at the end how it ended."""
        _write(self.work / f"rank{self.rank}.state.json", {"phase": what, "exit_code": exit_code})

    def save(self) -> None:
        """Leaves everything measured so far where the supervisor finds it, whatever happens next."""
        _write(
            self.work / f"rank{self.rank}.json",
            {
                "rank": self.rank,
                "observations": [to_json(item) for item in self.observations],
                "software": software() if self.speaks_for_world else {},
            },
        )

    def measured(
        self,
        name: str,
        value: float | str | bool,
        *,
        unit: str,
        scope: str,
        samples: Samples | None = None,
        **params: Any,
    ) -> None:
        """Reports a value."""
        self.observations.append(
            Observation(
                name=name,
                scope=scope,
                stage=self.stage,
                unit=unit,
                status=MEASURED,
                value=value,
                params=params,
                samples=samples,
            )
        )

    def absent(self, name: str, *, unit: str, scope: str, status: str, reason: str, **params: Any) -> None:
        """Reports why there is no value."""
        self.observations.append(
            Observation(
                name=name, scope=scope, stage=self.stage, unit=unit, status=status, reason=reason[:2000], params=params
            )
        )

    def synchronize(self) -> None:
        """Waits until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, work: Callable[[], object], repetitions: int, iterations: int = 1, warm_up: int = 2) -> list[float]:
        """Seconds for one call of `work`, `repetitions` times over, each the mean of `iterations` calls.

        On a GPU the device's own events are read, so that the cost of launching is not in the figure.
        """
        for _ in range(warm_up):
            work()
        self.synchronize()
        if self.device.type == "cuda":
            return self._events(work, repetitions, iterations)
        seconds = []
        for _ in range(repetitions):
            began = time.perf_counter()
            for _ in range(iterations):
                work()
            seconds.append((time.perf_counter() - began) / iterations)
        return seconds

    def _events(self, work: Callable[[], object], repetitions: int, iterations: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(iterations):
                work()
            mark.record()
        self.synchronize()
        return [earlier.elapsed_time(later) / 1000 / iterations for earlier, later in itertools.pairwise(marks)]

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of each repetition the time of the slowest rank."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return [float(value) for value in times]

    def total(self, value: float) -> float:
        """The sum over all ranks."""
        number = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(number)
        return float(number)

    def agree(self, code: int) -> tuple[int, int]:
        """Smallest and largest `code` over all ranks: equal where every rank said the same."""
        ends = torch.tensor([code, -code], dtype=torch.int64, device=self.device)
        dist.all_reduce(ends, dist.ReduceOp.MIN)
        return int(ends[0]), -int(ends[1])


def summarize(values: Sequence[float]) -> Samples:
    """Count, extremes, median and coefficient of variation."""
    mean = statistics.fmean(values)
    return Samples(
        n=len(values),
        min=min(values),
        p50=statistics.median(values),
        max=max(values),
        cv=statistics.pstdev(values) / mean if mean else 0.0,
    )


def software() -> dict[str, str]:
    """Versions of what the ranks run on."""
    found = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(map(str, version))
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found


def join(context: Context, timeout_s: float) -> None:
    """Forms the process group: NCCL on GPUs, gloo on CPUs."""
    timeout = timedelta(seconds=timeout_s)
    if context.device.type == "cuda":
        torch.cuda.set_device(context.device)
        dist.init_process_group("nccl", timeout=timeout, device_id=context.device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    context.total(1.0)


def failed(error: Exception) -> tuple[str, str]:
    """An exception as status and reason, on one line."""
    text = " ".join(str(error).split())
    return ERROR, f"{type(error).__name__}: {text[:1000]}"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    documents.write_text(path, json.dumps(value, allow_nan=False), durable=False)
