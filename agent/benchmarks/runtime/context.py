"""What every benchmark is given: its place among the ranks, its device with a clock, and where to report."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.timing import Timing
from agent.sampling.statistics import Series, summarize
from schemas import documents
from schemas.records import ERROR, MEASURED, Observation, Samples, to_json

SAVE_S = 2.0
"""Nothing that was measured longer ago is lost where the gang is ended."""


@dataclass(kw_only=True)
class Context(Timing):
    """One rank of one launch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    stage: str
    kind: str
    """`gpu`, or `cpu` in a rehearsal."""
    devices: tuple[int, ...]
    """NVML indices of this host's GPUs by local rank, or the numbers of a rehearsal's processes."""
    world_scope: str
    """Scope of what all ranks do together: `host` or `gang=…`."""
    work: Path
    store: Store = field(default_factory=HashStore)
    """Where the ranks leave each other word, outside the process group, which one lost rank takes down."""
    node: int = 0
    """Number of this host among the hosts of the launch."""
    launched: float = field(default_factory=time.monotonic)
    """`time.monotonic()` when this host's ranks were launched; by hand, when this one had imported torch."""
    benchmark: str = ""
    """The one that is running."""
    begun: dict[str, float] = field(default_factory=dict)
    """When each began, and whatever else this rank has been at, by `time.monotonic()`."""
    unable: str = ""
    """Why this rank cannot take part in the process group."""
    lost: dict[int, str] = field(default_factory=dict)
    """Local ranks of this host that are not waited for, and why."""
    observations: list[Observation] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    _meetings: dict[str, int] = field(default_factory=dict)
    _saved: float = field(default_factory=time.monotonic)
    _told: float = field(default_factory=time.monotonic)

    @property
    def device_scope(self) -> str:
        """`gpu=3` (NVML index), or `cpu=0` in a rehearsal."""
        return f"{self.kind}={self.devices[self.local_rank]}"

    def pair_scope(self, peer: int) -> str:
        """This device and that of local rank `peer`: `gpu=3,peer=0`."""
        return f"{self.device_scope},peer={self.devices[peer]}"

    @property
    def speaks_for_world(self) -> bool:
        """One rank a host reports what all ranks did together, so that every host's record has it."""
        return self.local_rank == 0

    def phase(self, what: str, exit_code: int | None = None) -> None:
        """Tells the supervisor what this rank is at, and at the end how it ended."""
        self.heart.phase = what
        self.heart.step()
        state = {"phase": what, "exit_code": exit_code, "begun": self.begun, "unable": self.unable}
        _write(self.work / f"rank{self.rank}.state.json", state)
        if self.observations and time.monotonic() - self._saved > SAVE_S:
            self.save()

    @property
    def is_asked(self) -> bool:
        """Whether it is time to tell how a training goes on."""
        return self.speaks_for_world and time.monotonic() - self._told > SAVE_S

    def under_way(self, figures: Mapping[str, tuple[float, str]], **params: Any) -> None:
        """Tells whoever watches the run how a training goes on: name -> value and unit. Nothing of it gets into the record."""
        self._told = time.monotonic()
        common = {"scope": self.world_scope, "status": MEASURED, "params": params}
        seen = [
            {"name": name, "value": value, "unit": unit, **common}
            for name, (value, unit) in figures.items()
            if math.isfinite(value)
        ]
        _write(self.work / f"rank{self.rank}.now.json", {"observations": seen})

    def save(self) -> None:
        """Leaves everything measured so far where the supervisor finds it, whatever happens next."""
        self._saved = time.monotonic()
        _write(
            self.work / f"rank{self.rank}.json",
            {
                "rank": self.rank,
                "observations": [to_json(item) for item in self.observations],
                "software": software() if self.speaks_for_world else {},
                "windows": self.windows,
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
        """Reports a value; one that is no number (NaN, an infinity) is an error and not a value."""
        numbers = [value, *((samples.min, samples.p50, samples.max, samples.cv) if samples else ())]
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            reason = f"the figure is not a number: {value}"
            self.absent(name, unit=unit, scope=scope, status=ERROR, reason=reason, **params)
            return
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

    def rate(self, name: str, amount: float, series: Series, *, unit: str, scope: str, **params: Any) -> None:
        """Reports the median rate at which `amount` was done in each of the series' times."""
        rates = summarize([amount / seconds for seconds in series.seconds], stopped=series.stopped)
        self.measured(name, rates.p50, unit=unit, scope=scope, samples=rates, **params)

    def begin(self, benchmark: str) -> None:
        """From here on meetings, windows and phases are this benchmark's."""
        self.benchmark = benchmark
        self.begun[benchmark] = time.monotonic()
        self._meetings = {}
        self.store.set(f"begun/{self.node}/{benchmark}/{self.local_rank}", "here")
        for rank in list(self.lost):  # one that was only slow, and has caught up, is waited for again
            if self.store.check([f"begun/{self.node}/{benchmark}/{rank}"]):
                del self.lost[rank]
        self.phase(benchmark)

    def meet(self, what: str = "") -> None:
        """Waits for the other ranks of this host, so that they begin together; one that does not come is lost, not waited for.

        It goes through the store and not through the process group: a rank whose GPU is gone costs the others nothing more.
        """
        self._meetings[what] = number = self._meetings.get(what, 0) + 1
        self.heart.step()
        place = f"meet/{self.node}/{self.benchmark}/{what}/{number}"
        self.store.set(f"{place}/{self.local_rank}", "here")
        ends, left = time.monotonic() + self.timeout_s, f"left/{self.node}/{self.benchmark}"
        waited = [rank for rank in range(self.local_world_size) if rank not in self.lost]
        while waited and not self.store.check([f"{place}/{rank}" for rank in waited]):
            waited = [rank for rank in waited if not self.store.check([f"{left}/{rank}"])]
            if time.monotonic() > ends:
                late = [rank for rank in waited if not self.store.check([f"{place}/{rank}"])]
                self.lost |= dict.fromkeys(late, f"did not come to {self.benchmark} {what} in {self.timeout_s:g} s")
                return
            time.sleep(0.0005)

    def present(self) -> list[int]:
        """Local ranks that have neither been lost nor left the benchmark."""
        left = f"left/{self.node}/{self.benchmark}"
        others = [rank for rank in range(self.local_world_size) if rank not in self.lost]
        return [rank for rank in others if not self.store.check([f"{left}/{rank}"])]

    def leave(self) -> None:
        """Tells the other ranks of this host that this one is not coming to any further meeting of the benchmark."""
        self.store.set(f"left/{self.node}/{self.benchmark}/{self.local_rank}", "left")

    def window(self, begin: float, end: float, **params: Any) -> None:
        """Asks the supervisor what NVML showed of this device between two times of `time.monotonic()`."""
        self.windows.append(
            {"benchmark": self.benchmark, "scope": self.device_scope, "begin": begin, "end": end, "params": params}
        )

    def total(self, value: float) -> float:
        """The sum over all ranks."""
        number = torch.tensor([value], dtype=torch.float64, device=self.device)
        with self.heart.together():
            dist.all_reduce(number)
            return float(number)

    def agree(self, code: int) -> tuple[int, int]:
        """Smallest and largest `code` over all ranks: equal where every rank said the same."""
        ends = torch.tensor([code, -code], dtype=torch.int64, device=self.device)
        with self.heart.together():
            dist.all_reduce(ends, dist.ReduceOp.MIN)
            return int(ends[0]), -int(ends[1])


def cuda_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside the current one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


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


def join(context: Context) -> None:
    """Forms the process group: NCCL on GPUs, gloo on CPUs."""
    arguments: dict[str, Any] = {
        "store": PrefixStore("group", context.store),
        "rank": context.rank,
        "world_size": context.world_size,
        "timeout": timedelta(seconds=context.timeout_s),
    }
    if context.device.type == "cuda":
        # No rank runs a graph beside other operations of NCCL, and readiness for it costs 12 µs an operation in a graph,
        # as the host then has to be told of each (measured, 4 H200: 20 µs instead of 8).
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
        nccl_log.listen(context.work / f"nccl.rank{context.rank}.log")
        dist.init_process_group("nccl", device_id=context.device, **arguments)
    else:
        dist.init_process_group("gloo", **arguments)
    context.total(1.0)


def failed(error: Exception) -> tuple[str, str]:
    """An exception as status and reason, on one line."""
    text = " ".join(str(error).split())
    return ERROR, f"{type(error).__name__}: {text[:1000]}"


def _write(path: Path, value: Mapping[str, Any]) -> None:
    documents.write_text(path, json.dumps(value, allow_nan=False), durable=False)
