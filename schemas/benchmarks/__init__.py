"""The entries of the benchmarks: settings with their defaults, outputs, cost. One table for each kind of benchmark."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
Parameter = type | Sequence[str]
"""What a parameter of an observation can be: a type, or one of these texts."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """One kind of observation that a benchmark makes."""

    name: str
    """Dotted name; `{op}` stands for the parameter of that name in `over`."""
    unit: str
    """SI base unit; `1` for a ratio or a count."""
    scope: str
    """`device`: one for each GPU (or process, on a CPU); `pair`: one for each ordered pair of the host's devices; `host`: one for
    each host; `world`: one for all ranks together; `peers`: one for each device and partner host in the tournament of the gang's
    hosts (`schemas/tournament.py`), with the partner's device of the same number: `gpu=3,partner=r12-h02`."""
    over: Mapping[str, str] = field(default_factory=dict)
    """Parameter of the observation -> setting of the benchmark that lists its values."""
    params: Mapping[str, Parameter] = field(default_factory=dict)
    """More parameters of this output's observations."""
    gpu_only: bool = False
    """A CPU has no such figure, so a rehearsal does not plan it."""
    sampled: bool = False
    """Made by the supervisor from NVML samples while the ranks run, not by a rank."""
    demanded: bool = True
    """The plan requires it. False for figures that some kernels do not have; each rank then reports why."""

    def makes(self, name: str) -> bool:
        """Return whether `name` is this output's name with its placeholders filled in."""
        return fnmatch.fnmatchcase(name, re.sub(r"\{\w+\}", "*", self.name))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark: its settings with their defaults, its outputs, and what the control node needs to know about it."""

    group: str
    """Package of its module: `agent.benchmarks.GROUP.NAME`."""
    title: str
    """Name in reports."""
    summary: str
    settings: Settings
    outputs: Sequence[Output]
    cost_s: float
    """Seconds in profile `standard` on four H200; used until it was measured on the fleet itself."""
    parts: Sequence[str]
    """Kinds of parts that it exercises. Between hosts, the fabric takes the place of NVLink."""
    params: Mapping[str, Parameter] = field(default_factory=dict)
    """Parameters of its observations, besides those in `Output.over`."""
    cpu_settings: Settings | None = field(default_factory=dict)
    """Settings that are small enough to try it on a CPU; None if it needs a GPU."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """All allowed elements of a list setting, if its default does not have all of them."""
    needs_peers: bool = False
    """It measures between ranks: nothing is planned for a single rank."""
    needs_group: bool = False
    """It uses the process group, even with one rank: a rank that cannot join the group cannot run it."""
    trains: bool = False
    """It trains a network: `--validation-only` leaves it out."""


OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "send_recv",
    "gather",
    "scatter",
    "hypercube",
)
DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
THROTTLE_REASONS = ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
DATA_SETS = ("fashion-mnist", "cifar-10", "synthetic")
BACKENDS = ("nccl", "gloo")
PRECISION = {"precision": 0.002, "seconds": 0.5}
"""Sampling stops when half the 95 % interval of the median is this share of the median, or after these seconds."""


def make_outputs(benchmark: str, units: Mapping[str, str], scope: str, **options: Any) -> tuple[Output, ...]:
    """Return the outputs `benchmark.KIND` for a mapping from kind to unit."""
    return tuple(Output(name=f"{benchmark}.{kind}", unit=unit, scope=scope, **options) for kind, unit in units.items())
