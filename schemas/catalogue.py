"""What each benchmark can be told and what it must observe: the one table that plan and benchmarks share.

A plan is this table × a profile × an inventory. A benchmark reads its settings, and the plan its outputs, from here, so
that neither can quietly measure less than the other expects.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    """`device`: one a GPU (or a process, on a CPU); `pair`: one an ordered pair of the host's devices; `host`: one a host;
    `world`: one for all the ranks together; `peers`: one a device and host that it meets in the tournament of its gang's hosts
    (`schemas/tournament.py`), with the device of the same number there: `gpu=3,partner=r12-h02`."""
    over: Mapping[str, str] = field(default_factory=dict)
    """Parameter of the observation -> the list among the benchmark's settings that it runs through."""
    gpu_only: bool = False
    """A CPU has nothing of the kind, so a rehearsal does not plan it."""
    sampled: bool = False
    """Made by the supervisor from what NVML showed while the ranks were at it, not by a rank."""
    demanded: bool = True
    """The plan asks for it. What not every kernel tells is left out, and each rank says why it is not there."""

    def makes(self, name: str) -> bool:
        """Whether `name` is this output's, with its placeholders filled in."""
        return fnmatch.fnmatchcase(name, re.sub(r"\{\w+\}", "*", self.name))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark's settings with their defaults, and its outputs."""

    group: str
    """Package that has its module: `agent.benchmarks.GROUP.NAME`."""
    summary: str
    settings: Settings
    outputs: tuple[Output, ...]
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What a list may hold, where its default does not hold all."""
    needs_peers: bool = False
    """It measures between ranks: with one rank there is nothing to measure, and nothing is planned."""
    needs_group: bool = False
    """It uses the process group, even with one rank: a rank that cannot join it cannot run it."""
    trains: bool = False
    """It trains a network: left out of a run for validation only."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One observation that must exist on every host that runs the stage."""

    stage: str
    name: str
    scope: str
    params: Mapping[str, Any]
    peers: bool = False
    """It is measured between ranks, so a host with one device cannot make it alone."""


NO_IN_PLACE = frozenset({"all_to_all", "send_recv", "hypercube"})
"""Collectives whose receive buffer is never the send buffer."""
TORCH_ONLY_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives that torch.distributed, which a rehearsal uses, offers in place alone."""

_OP_SIZE = {"op": "ops", "size_bytes": "sizes_bytes", "placement": "placements"}
_VARIANT = {"variant": "variants", "batch_size": "batch_sizes"}
_COMPILED = {"variant": "compiled_variants", "batch_size": "compiled_batch_sizes"}
_REASONS = ["power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"]
_DTYPES = ["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"]
_OPS = [
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
]
_FIGURE = {"precision": 0.002, "seconds": 0.5}
"""How sure a figure must be: half the 95 % interval of its median over the median; and the time after which it is told
anyway."""

BENCHMARKS: Mapping[str, Benchmark] = {
    "gemm": Benchmark(
        group="compute",
        summary="matrix product rate of each device, in each precision, in a short run",
        settings={"dtypes": _DTYPES, "size": 8192, **_FIGURE},
        outputs=(Output(name="gemm.throughput", unit="FLOP/s", scope="device", over={"dtype": "dtypes"}),),
    ),
    "memory": Benchmark(
        group="memory",
        summary="bandwidth of each device's memory: copy, read, write and triad",
        settings={"ops": ["copy", "read", "write", "triad"], "size_bytes": 4 << 30, **_FIGURE},
        outputs=(Output(name="memory.bandwidth", unit="B/s", scope="device", over={"op": "ops"}),),
    ),
    "host_copy": Benchmark(
        group="links",
        summary="copies between each device and its host's pinned memory: one GPU at a time, and all at once",
        settings={
            "directions": ["host_to_device", "device_to_host", "both_ways"],
            "sharings": ["alone", "all_gpus"],
            "size_bytes": 1 << 30,
            **_FIGURE,
        },
        outputs=(
            Output(
                name="host_copy.bandwidth",
                unit="B/s",
                scope="device",
                over={"direction": "directions", "sharing": "sharings"},
                gpu_only=True,
            ),
        ),
    ),
    "peer_copy": Benchmark(
        group="links",
        summary="copies between every ordered pair of the host's GPUs: access, bandwidth one way and both ways, latency",
        settings={"directions": ["one_way", "both_ways"], "size_bytes": 1 << 30, "precision": 0.002, "seconds": 0.15},
        outputs=(
            Output(name="peer_copy.access", unit="1", scope="pair", gpu_only=True),
            Output(
                name="peer_copy.bandwidth", unit="B/s", scope="pair", over={"direction": "directions"}, gpu_only=True
            ),
            Output(name="peer_copy.latency", unit="s", scope="pair", gpu_only=True),
        ),
    ),
    "integrity": Benchmark(
        group="memory",
        summary="every word of each device's free memory, written and read back in several patterns",
        settings={
            "patterns": [
                "zeros",
                "ones",
                "checkerboard",
                "inverse_checkerboard",
                "walking_ones",
                "walking_zeros",
                "address",
                "inverse_address",
                "random",
                "inverse_random",
            ],
            "share": 0.98,
            "most_bytes": 0,  # no more than this; 0: as much as there is
        },
        outputs=(
            Output(name="integrity.wrong_words", unit="1", scope="device", over={"pattern": "patterns"}),
            Output(name="integrity.tested_share", unit="1", scope="device"),
        ),
    ),
    "stress": Benchmark(
        group="compute",
        summary="matrix products on all devices of the host at once, long enough for power and temperature to settle",
        settings={"dtypes": ["bf16"], "size": 8192, "seconds": 20.0, "settle_seconds": 10.0, "reasons": _REASONS},
        choices={"dtypes": _DTYPES},
        outputs=(
            Output(name="stress.throughput", unit="FLOP/s", scope="device", over={"dtype": "dtypes"}),
            Output(name="stress.wrong_products", unit="1", scope="device", over={"dtype": "dtypes"}),
            *(
                Output(
                    name=f"stress.{kind}",
                    unit=unit,
                    scope="device",
                    over={"dtype": "dtypes"},
                    gpu_only=True,
                    sampled=True,
                )
                for kind, unit in (
                    ("power", "W"),
                    ("efficiency", "FLOP/J"),
                    ("flop_per_cycle", "FLOP/cycle"),
                    ("clock", "Hz"),
                    ("temperature", "Cel"),
                )
            ),
            Output(
                name="stress.throttled_share",
                unit="1",
                scope="device",
                over={"dtype": "dtypes", "reason": "reasons"},
                gpu_only=True,
                sampled=True,
            ),
        ),
    ),
    "digest": Benchmark(
        group="compute",
        summary="seeded computations whose results must be equal to the bit: each time, on each GPU, on each host",
        settings={"workloads": ["gemm", "reduction", "training_step"], "size": 4096, "seconds": 2.0},
        outputs=(
            Output(name="digest.value", unit="1", scope="device", over={"workload": "workloads"}),
            Output(name="digest.mismatches", unit="1", scope="device", over={"workload": "workloads"}),
        ),
    ),
    "collective": Benchmark(
        group="collectives",
        summary="bandwidth, latency and values of the collective operations between all ranks, and the path NCCL chose",
        settings={
            "ops": _OPS,
            "placements": ["out_of_place", "in_place"],
            "sizes_bytes": [8 << (3 * step) for step in range(11)],  # 8 B to 8 GiB
            "graph_ops": ["all_reduce", "all_gather", "reduce_scatter", "broadcast"],
            "graph_sizes_bytes": [8, 4096, 32768],
            "precision": 0.005,
            "seconds": 0.2,  # for one operation at one size
        },
        choices={"graph_ops": _OPS},
        needs_peers=True,
        needs_group=True,
        outputs=(
            Output(name="collective.{op}.algbw", unit="B/s", scope="world", over=_OP_SIZE),
            Output(name="collective.{op}.busbw", unit="B/s", scope="world", over=_OP_SIZE),
            Output(name="collective.{op}.latency", unit="s", scope="world", over=_OP_SIZE),
            Output(name="collective.{op}.wrong_elements", unit="1", scope="world", over=_OP_SIZE),
            Output(
                name="collective.{op}.graph_latency",
                unit="s",
                scope="world",
                over={"op": "graph_ops", "size_bytes": "graph_sizes_bytes"},
                gpu_only=True,
            ),
            Output(name="collective.transport", unit="1", scope="world", gpu_only=True),
            Output(name="collective.nvls", unit="1", scope="world", gpu_only=True),
            Output(name="collective.channels", unit="1", scope="world", gpu_only=True),
        ),
    ),
    "pairs": Benchmark(
        group="links",
        summary="bandwidth and latency of every two hosts of a gang, GPU to GPU of one number, in rounds of disjoint pairs",
        settings={
            "rounds": 0,  # no more than these, in each of which every host meets another one; 0: all, one fewer than hosts
            "size_bytes": 1 << 26,  # less where a pair is too slow for it
            "seconds": 0.4,  # for one round
        },
        needs_peers=True,
        needs_group=True,
        outputs=(
            Output(name="pairs.bandwidth", unit="B/s", scope="peers"),
            Output(name="pairs.latency", unit="s", scope="peers"),
        ),
    ),
    "training": Benchmark(
        group="training",
        summary="data-parallel training: does the loss fall, how accurate, how fast",
        settings={
            "networks": ["convnet", "resnet18"],
            "epochs": 2,
            "batch_size": 128,
            "learning_rate": 0.01,
            "max_steps": 0,
            "data_directories": ["/usr/share/datasets"],
        },
        needs_group=True,
        trains=True,
        outputs=tuple(
            Output(name=f"training.{kind}", unit=unit, scope="world", over={"network": "networks"})
            for kind, unit in (
                ("throughput", "images/s"),
                ("step_time", "s"),
                ("loss", "1"),
                ("loss_ratio", "1"),
                ("loss_finite", "1"),
                ("accuracy", "1"),
            )
        ),
    ),
    "fashion_mnist": Benchmark(
        group="training",
        summary="the GKE experiment's training to its accuracy, as fast as the GPUs can: data on the device, CUDA graphs",
        settings={
            "epochs": 20,
            "batch_size": 128,
            "learning_rate": 0.01,  # of one rank; scaled to the world size
            "max_steps": 0,  # no more than these; 0: all
            "data_directories": ["/usr/share/datasets"],
        },
        needs_group=True,
        trains=True,
        outputs=(
            Output(name="fashion_mnist.accuracy", unit="1", scope="world"),
            Output(name="fashion_mnist.duration", unit="s", scope="world"),
            Output(name="fashion_mnist.throughput", unit="images/s", scope="world"),
        ),
    ),
    "scaling": Benchmark(
        group="training",
        summary="a scaling study's training: the GKE experiment's, under DDP, its images prepared by the CPUs",
        settings={
            "epochs": 1,
            "batch_size": 64,
            "precision": "fp32",
            "workers": 0,  # processes a rank that prepare its images; 0: the rank itself does
            "learning_rate": 0.01,
            "max_steps": 0,  # no more than these; 0: all
            "data_directories": ["/usr/share/datasets"],
        },
        choices={"precision": ["fp32", "bf16"]},
        needs_group=True,
        trains=True,
        outputs=(
            Output(name="scaling.hookup", unit="s", scope="world"),
            Output(name="scaling.duration", unit="s", scope="world"),
            Output(name="scaling.throughput", unit="images/s", scope="world"),
            Output(name="scaling.accuracy", unit="1", scope="world"),
            Output(name="scaling.loss", unit="1", scope="world"),
        ),
    ),
    "variants": Benchmark(
        group="training",
        summary="ResNet-18 training steps in several precisions, memory layouts and batch sizes, eager and compiled",
        settings={
            "variants": ["fp32", "bf16", "fp16", "bf16_channels_last"],
            "batch_sizes": [128, 1024],
            "compiled_variants": ["bf16_channels_last_compiled"],
            "compiled_batch_sizes": [128],  # each takes the compiler half a minute
            "steps": 30,
        },
        needs_group=True,
        trains=True,
        outputs=(
            *(
                Output(name=f"variants.{kind}", unit=unit, scope="world", over=over)
                for over in (_VARIANT, _COMPILED)
                for kind, unit in (("throughput", "images/s"), ("loss_finite", "1"))
            ),
        ),
    ),
    "checkpoint": Benchmark(
        group="training",
        summary="model, optimizer and metadata saved and restored by all ranks, compared to the bit, and training resumed",
        settings={"steps": 5, "batch_size": 32},
        needs_group=True,
        trains=True,
        outputs=(
            Output(name="checkpoint.identical", unit="1", scope="world"),
            Output(name="checkpoint.save_time", unit="s", scope="world"),
            Output(name="checkpoint.restore_time", unit="s", scope="world"),
        ),
    ),
    "model_parallel": Benchmark(
        group="training",
        summary="a network split over two devices a replica, the replicas trained data-parallel",
        settings={"steps": 20, "batch_size": 256, "width": 8192},
        needs_peers=True,
        needs_group=True,
        trains=True,
        outputs=(
            Output(name="model_parallel.step_time", unit="s", scope="world"),
            Output(name="model_parallel.loss_ratio", unit="1", scope="world"),
        ),
    ),
    "transformer": Benchmark(
        group="training",
        summary="transformer blocks sharded by FSDP2 and sized to the GPU: step time, tokens, model FLOP utilization, memory",
        settings={"layers": 8, "width": 4096, "heads": 32, "sequence": 2048, "batch_size": 4, "steps": 8},
        needs_group=True,
        trains=True,
        outputs=(
            Output(name="transformer.step_time", unit="s", scope="world"),
            Output(name="transformer.throughput", unit="tokens/s", scope="world"),
            Output(name="transformer.flops", unit="FLOP/s", scope="world"),
            Output(name="transformer.mfu", unit="1", scope="world", gpu_only=True),
            Output(name="transformer.loss_ratio", unit="1", scope="world"),
            Output(name="transformer.memory_peak", unit="B", scope="device", gpu_only=True),
        ),
    ),
    "straggler": Benchmark(
        group="training",
        summary="data-parallel training taken apart: how long each rank computes and waits, and its clocks and its CPU then",
        settings={
            "layers": 4,
            "width": 1024,
            "heads": 16,
            "sequence": 1024,
            "batch_size": 16,
            "seconds": 3.0,
            "reasons": _REASONS,
        },
        needs_peers=True,
        needs_group=True,
        trains=True,
        outputs=(
            *(Output(name=f"straggler.{kind}", unit="s", scope="device") for kind in ("compute", "wait", "cpu_time")),
            Output(name="straggler.launch", unit="s", scope="device", gpu_only=True),
            Output(name="straggler.last_share", unit="1", scope="device"),
            Output(name="straggler.preemptions", unit="1", scope="device"),
            Output(name="straggler.step_time", unit="s", scope="world"),
            Output(name="straggler.communication", unit="s", scope="world"),
            *(
                Output(name=f"straggler.{kind}", unit=unit, scope="device", demanded=False)
                for kind, unit in (
                    ("cpus", "1"),
                    ("cpu_wait", "s"),
                    ("cpu_pressure", "1"),
                    ("cpu_throttled_share", "1"),
                )
            ),
            *(
                Output(name=f"straggler.{kind}", unit=unit, scope="device", gpu_only=True, sampled=True)
                for kind, unit in (("power", "W"), ("clock", "Hz"), ("temperature", "Cel"))
            ),
            Output(
                name="straggler.throttled_share",
                unit="1",
                scope="device",
                over={"reason": "reasons"},
                gpu_only=True,
                sampled=True,
            ),
        ),
    ),
    "overlap": Benchmark(
        group="collectives",
        summary="how much of an all_reduce hides behind matrix products",
        settings={"size": 8192, "size_bytes": 1 << 30, "repetitions": 10},
        needs_peers=True,
        needs_group=True,
        outputs=(
            Output(name="overlap.hidden_share", unit="1", scope="world"),
            Output(name="overlap.slowdown", unit="1", scope="world"),
        ),
    ),
    "dataloader": Benchmark(
        group="training",
        summary="images that the host's CPUs prepare for each rank, against images that the device could take",
        settings={"workers": [1, 2, 4, 8], "batch_size": 256, "seconds": 1.0},
        outputs=(
            Output(name="dataloader.throughput", unit="images/s", scope="device", over={"workers": "workers"}),
            Output(name="dataloader.sufficiency", unit="1", scope="device"),
        ),
    ),
}


def settings(benchmark: str, chosen: Settings) -> dict[str, Any]:
    """The benchmark's settings with what a profile chose laid over the defaults."""
    return {**BENCHMARKS[benchmark].settings, **chosen}


def offers(op: str, placement: str, device: str) -> bool:
    """Whether a collective can be run in or out of place on a `gpu` or a `cpu`."""
    if placement == "in_place":
        return op not in NO_IN_PLACE
    return device == "gpu" or op not in TORCH_ONLY_IN_PLACE


def possible(name: str, ranks: int) -> bool:
    """Whether so many ranks can make the observation: a hypercube has a power of two of corners."""
    return not name.startswith("collective.hypercube.") or ranks & (ranks - 1) == 0


def expand(stage: str, benchmark: str, chosen: Settings, device: str = "gpu") -> Iterator[Expectation]:
    """Every observation that `benchmark` must make with these settings, on a `gpu` or a `cpu`."""
    values = settings(benchmark, chosen)
    for output in outputs(benchmark, device):
        if not output.demanded:
            continue
        for combination in itertools.product(*(values[key] for key in output.over.values())):
            params = dict(zip(output.over, combination, strict=True))
            if "placement" in params and not offers(params["op"], params["placement"], device):
                continue
            named = {key for key in params if f"{{{key}}}" in output.name}
            yield Expectation(
                stage=stage,
                name=output.name.format(**params),
                scope=output.scope,
                params={key: value for key, value in params.items() if key not in named},
                peers=BENCHMARKS[benchmark].needs_peers or output.scope == "pair",
            )
    yield Expectation(stage=stage, name=DURATION.name, scope=DURATION.scope, params={"benchmark": benchmark})


DURATION = Output(name="benchmark.duration", unit="s", scope="host")
"""How long a benchmark took, which every one of them tells: where the time of a run goes."""


def outputs(benchmark: str, device: str) -> Iterator[Output]:
    """The benchmark's outputs on a `gpu` or a `cpu`."""
    return (output for output in BENCHMARKS[benchmark].outputs if device == "gpu" or not output.gpu_only)
