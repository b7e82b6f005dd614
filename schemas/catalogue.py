"""What each benchmark can be told and what it must observe: the one table that plan and benchmarks share.

A plan is this table × a profile × an inventory. A benchmark reads its settings, and the plan its outputs, from here, so
that neither can quietly measure less than the other expects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Output:
    """One kind of observation that a benchmark makes."""

    name: str
    """Dotted name; `{op}` stands for the setting that `over` names."""
    unit: str
    """SI base unit; `1` for a ratio or a count."""
    scope: str
    """`device`: one a GPU (or a process, on a CPU); `world`: one for all the ranks together."""
    over: Mapping[str, str]
    """Parameter of the observation -> the list among the benchmark's settings that it runs through."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark's settings with their defaults, and its outputs."""

    summary: str
    settings: Settings
    outputs: tuple[Output, ...]
    needs_peers: bool = False
    """It measures between ranks: with one rank there is nothing to measure, and nothing is planned."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One observation that must exist on every host that runs the stage."""

    stage: str
    name: str
    scope: str
    params: Mapping[str, Any]
    peers: bool = False
    """It is measured between ranks, so a host with one device cannot make it alone."""


_OP_SIZE = {"op": "ops", "size_bytes": "sizes_bytes"}
_NETWORK = {"network": "networks"}

BENCHMARKS: Mapping[str, Benchmark] = {
    "gemm": Benchmark(
        summary="matrix product rate of each device, in each precision",
        settings={"dtypes": ["bf16", "fp16", "tf32", "fp32"], "size": 8192, "repetitions": 20},
        outputs=(Output(name="gemm.throughput", unit="FLOP/s", scope="device", over={"dtype": "dtypes"}),),
    ),
    "memory_copy": Benchmark(
        summary="copy bandwidth within each device and between it and its host",
        settings={
            "directions": ["device_to_device", "host_to_device", "device_to_host"],
            "size_bytes": 1 << 30,
            "repetitions": 20,
        },
        outputs=(Output(name="memory_copy.bandwidth", unit="B/s", scope="device", over={"direction": "directions"}),),
    ),
    "collective": Benchmark(
        summary="bandwidth, latency and values of the collective operations between all ranks",
        settings={
            "ops": ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"],
            "sizes_bytes": [8 << (3 * step) for step in range(11)],  # 8 B to 8 GiB
            "repetitions": 5,
            "iterations": 20,
            "seconds": 4.0,  # for one operation at one size; fewer iterations where it would take longer
        },
        needs_peers=True,
        outputs=(
            Output(name="collective.{op}.algbw", unit="B/s", scope="world", over=_OP_SIZE),
            Output(name="collective.{op}.busbw", unit="B/s", scope="world", over=_OP_SIZE),
            Output(name="collective.{op}.latency", unit="s", scope="world", over=_OP_SIZE),
            Output(name="collective.{op}.wrong_elements", unit="1", scope="world", over=_OP_SIZE),
        ),
    ),
    "training": Benchmark(
        summary="data-parallel training: does the loss fall, how accurate, how fast",
        settings={
            "networks": ["convnet", "resnet18"],
            "epochs": 2,
            "batch_size": 128,
            "learning_rate": 0.01,
            "max_steps": 0,
            "data_directories": ["/usr/share/datasets"],
        },
        outputs=(
            Output(name="training.throughput", unit="images/s", scope="world", over=_NETWORK),
            Output(name="training.step_time", unit="s", scope="world", over=_NETWORK),
            Output(name="training.loss", unit="1", scope="world", over=_NETWORK),
            Output(name="training.loss_ratio", unit="1", scope="world", over=_NETWORK),
            Output(name="training.loss_finite", unit="1", scope="world", over=_NETWORK),
            Output(name="training.accuracy", unit="1", scope="world", over=_NETWORK),
        ),
    ),
}


def settings(benchmark: str, chosen: Settings) -> dict[str, Any]:
    """The benchmark's settings with what a profile chose laid over the defaults."""
    return {**BENCHMARKS[benchmark].settings, **chosen}


def expand(stage: str, benchmark: str, chosen: Settings) -> Iterator[Expectation]:
    """Every observation that `benchmark` must make with these settings."""
    values = settings(benchmark, chosen)
    for output in BENCHMARKS[benchmark].outputs:
        for combination in itertools.product(*(values[key] for key in output.over.values())):
            params = dict(zip(output.over, combination, strict=True))
            named = {key for key in params if f"{{{key}}}" in output.name}
            yield Expectation(
                stage=stage,
                name=output.name.format(**params),
                scope=output.scope,
                params={key: value for key, value in params.items() if key not in named},
                peers=BENCHMARKS[benchmark].needs_peers,
            )
