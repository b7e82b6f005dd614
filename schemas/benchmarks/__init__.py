"""Types for the table of benchmarks, which has the default settings, the outputs and the cost of each benchmark.

The other modules of this package have the entries of the table, one module for each kind of benchmark.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
Parameter = type | Sequence[str]
"""The values that a parameter of an observation may have: any value of this type, or one of these texts."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """One kind of observation that a benchmark makes."""

    name: str
    """Dotted name; `{op}` stands for the value of the parameter `op`, which is in `over`."""
    unit: str
    """Unit without an SI prefix, such as `s`, `B/s` or `FLOP/s`; `1` for a ratio or a count."""
    scope: str
    """There is one observation for each:

    - `device`: GPU (on CPUs: process).
    - `pair`: ordered pair of a host's devices.
    - `host`: host.
    - `world`: launch, for all of its ranks together.
    - `peers`: device and partner host of the gang (`schemas/tournament.py`), measured with the partner's device of the same
      number: `gpu=3,partner=r12-h02`.
    - `port`: RDMA port of the host, or port and partner: `hca=mlx5_3,port=1,partner=r12-h02`. Never demanded, because a host may
      have no such port.
    - `directory`: directory that the inventory names for the benchmark (`Benchmark.directories`): `directory=data:scratch` is
      /data/scratch.
    - `numa`: NUMA node with processors and memory: `numa=1`. Never demanded, because the plan does not state how many such nodes
      a host has.
    """
    over: Mapping[str, str] = field(default_factory=dict)
    """Parameter of the observation -> name of the setting that lists the parameter's values."""
    params: Mapping[str, Parameter] = field(default_factory=dict)
    """More parameters of this output's observations."""
    constants: Mapping[str, int] = field(default_factory=dict)
    """Parameter -> its value in every observation, whatever the settings of the benchmark are."""
    gpu_only: bool = False
    """Whether only GPUs have this figure, so that a rehearsal does not plan it."""
    sampled: bool = False
    """Whether the supervisor makes the observation, from NVML samples while the ranks run. The ranks make all other outputs."""
    demanded: bool = True
    """Whether the plan requires it. False for figures that some healthy hosts do not have."""

    def makes(self, name: str) -> bool:
        """Return whether `name` is this output's name with its placeholders filled in."""
        return fnmatch.fnmatchcase(name, re.sub(r"\{\w+\}", "*", self.name))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A part of a benchmark's duration that depends on its settings, or on how many GPUs and hosts there are.

    Its seconds are: (`seconds` + the sum of the settings in `timed`) × the product of the settings in `over` × the number that
    `per` names.
    """

    seconds: float = 0.0
    timed: Sequence[str] = ()
    """Settings that are durations in seconds, which the benchmark always uses in full."""
    over: Sequence[str] = ()
    """Settings whose product multiplies the seconds. A list counts as its length, a number as its value."""
    per: str = ""
    """What the seconds are multiplied by: one of `PER`; empty: 1."""


PER = ("gpu", "gpu_of_host", "further_gpu", "pair", "peers", "doubling", "round", "port", "port_round")
"""`gpu`: GPUs of the host. `gpu_of_host`: the same, but 0 in a launch of several hosts. `further_gpu`: GPUs of the host minus 1.
`pair`: ordered pairs of the host's GPUs. `peers`: 1 if there are two ranks or more, else 0. `doubling`: log2 of the number of
ranks. `round`: rounds between hosts (`schemas/tournament.py`). `port`: RDMA ports of the host, but 0 in a launch of several
hosts. `port_round`: as `round`, but 0 if the host has no RDMA ports."""


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
    """Constant part of the expected duration, in seconds. `schemas/durations.py` adds `costs`, and uses the sum unless an earlier
    run has measured the duration."""
    parts: Sequence[str]
    """Kinds of parts that it tests. In the gang stage, `NVLink` stands for the fabric between the hosts."""
    costs: Sequence[Cost] = ()
    """The other parts of the expected duration: fitted to the runs of docs/measurements, with one, two and four GPUs."""
    params: Mapping[str, Parameter] = field(default_factory=dict)
    """Parameters of its observations, in addition to those in `Output.over`."""
    adapted: Sequence[str] = ()
    """Settings that it adapts to the host or the ranks. Its figures state what it used, which may differ from the plan."""
    cpu_settings: Settings | None = field(default_factory=dict)
    """Smaller settings for CPUs; None if the benchmark needs a GPU."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Setting -> its allowed values; for a list, the allowed elements. A setting without an entry allows only the texts in
    its default."""
    gpu_bound: bool = False
    """Whether its rates depend on the GPU alone. The rates of other benchmarks also depend on processors, host memory, PCIe,
    disks and network, which all GPUs of a machine share."""
    needs_peers: bool = False
    """Whether it measures between ranks, so that it is not planned for a single rank."""
    needs_group: bool = False
    """Whether it uses the process group, so that a rank that cannot join the group cannot run it."""
    directories: str = ""
    """Name of the list in `PlannedHost` that has the directories to measure, such as `local_storage`. If this list is empty for
    all hosts, the benchmark is not planned."""
    needs_nvlink_domain: bool = False
    """Whether it is planned only if the inventory has hosts in an NVLink domain."""
    needs_torch: bool = True
    """Whether its ranks import torch. If no benchmark of a stage needs torch, the ranks of the stage start without torch."""
    trains: bool = False
    """Whether it trains a network, so that `--validation-only` leaves it out."""


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
DIGEST_WORKLOADS = (
    "gemm",
    "reduction",
    "training_step",
    "gemm_fp64",
    "gemm_tf32",
    "gemm_fp16",
    "gemm_fp8_e4m3",
    "gemm_fp8_e5m2",
    "gemm_int8",
    "gemm_fp4",
    "attention",
    "convolution",
    "softmax",
    "sort",
    "rng",
    "copy",
)
"""Workloads of the benchmark `digest`. `gemm` is a matrix product in bf16."""
CPU_DIGEST_WORKLOADS = tuple(
    name for name in DIGEST_WORKLOADS if "tf32" not in name and "fp8" not in name and "fp4" not in name
)
"""Workloads of `digest` that a CPU can run."""
THROTTLE_REASONS = ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
DATA_SETS = ("fashion-mnist", "cifar-10", "synthetic")
BACKENDS = ("nccl", "gloo")
PRECISION = {"precision": 0.002, "seconds": 0.5}
"""Sampling stops when half the 95 % confidence interval of the median is at most `precision` × the median, or after `seconds`."""


def make_outputs(benchmark: str, units: Mapping[str, str], scope: str, **options: Any) -> tuple[Output, ...]:
    """Return an output `BENCHMARK.KIND` for each kind in `units`, which maps a kind to its unit."""
    return tuple(Output(name=f"{benchmark}.{kind}", unit=unit, scope=scope, **options) for kind, unit in units.items())
