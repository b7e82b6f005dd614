"""Benchmarks of the parts of a host: GPUs, their memory and links, processors and host memory."""

from __future__ import annotations

from collections.abc import Mapping

from schemas.benchmarks import (
    CPU_DIGEST_WORKLOADS,
    DIGEST_WORKLOADS,
    DTYPES,
    PRECISION,
    THROTTLE_REASONS,
    Benchmark,
    Cost,
    Output,
    make_outputs,
)

GRAPH_NODES = 1000
"""Number of kernels in the CUDA graph of the benchmark `kernel_launch`."""
PATTERNS = (
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
)
"""Patterns that `integrity` writes and reads once."""
TESTS_OVER_TIME = ("moving_inversions", "modulo_20", "neighbours", "fade", "hot_fade")
"""Tests of `integrity` that share its `seconds`."""

_SHAPES = ("32x8192x8192", "32x28672x8192", "512x8192x8192", "4096x14336x4096", "8192x28672x8192")
"""Rows x columns x inner dimension of the products. With 32 or 512 rows: inference that generates one token for each of 32 or
512 requests. With 4096 or 8192 rows: training of layers of width 4096 or 8192."""
_SMALL_SHAPES = ("32x128x64", "64x64x64")
"""Shapes for the CPUs of a rehearsal."""
_HOST_COPIES = {"direction": "directions", "sharing": "sharings"}
HARDWARE: Mapping[str, Benchmark] = {
    "gemm": Benchmark(
        group="compute",
        title="GEMM",
        summary="matrix product rate of each device, in each precision, in a short run",
        settings={"dtypes": [*DTYPES], "size": 8192, **PRECISION},
        outputs=[
            *make_outputs("gemm", {"throughput": "FLOP/s"}, "device", over={"dtype": "dtypes"}),
            *make_outputs("gemm", {"wrong_products": "1"}, "device", over={"dtype": "dtypes"}, demanded=False),
        ],
        params={"size": int},
        cpu_settings={"dtypes": ["fp32", "bf16"], "size": 512},
        cost_s=0.5,
        costs=[Cost(seconds=0.15, timed=["seconds"], over=["dtypes"])],
        gpu_bound=True,
        parts=["compute"],
    ),
    "gemm_shapes": Benchmark(
        group="compute",
        title="GEMM shapes",
        summary="matrix product rate of each device in language-model shapes, also in int8; ten products are checked for each "
        "precision and shape",
        settings={
            "dtypes": ["bf16", "fp8", "int8"],
            "shapes": [*_SHAPES],
            "precision": 0.005,
            "seconds": 0.2,
        },
        outputs=make_outputs(
            "gemm_shapes",
            {"throughput": "FLOP/s", "wrong_products": "1"},
            "device",
            over={"dtype": "dtypes", "shape": "shapes"},
        ),
        params={"checked": int},
        choices={"dtypes": (*DTYPES, "int8"), "shapes": (*_SHAPES, *_SMALL_SHAPES)},
        cpu_settings={"dtypes": ["fp32"], "shapes": [*_SMALL_SHAPES]},
        cost_s=0.1,
        costs=[Cost(seconds=0.06, over=["dtypes", "shapes"])],  # the median is precise long before `seconds` are spent
        gpu_bound=True,
        parts=["compute"],
    ),
    "kernel_launch": Benchmark(
        group="compute",
        title="Kernel launches",
        summary="time to launch a small kernel: without a wait, with a wait after each launch, and inside a CUDA graph",
        settings={"ways": ["queued", "synchronous"], "percentiles": ["p50", "p99"], "launches": 20000},
        outputs=[
            Output(
                name="kernel_launch.latency",
                unit="s",
                scope="device",
                over={"way": "ways", "percentile": "percentiles"},
            ),
            Output(
                name="kernel_launch.graph_latency",
                unit="s",
                scope="device",
                params={"nodes": int},
                constants={"nodes": GRAPH_NODES},
                gpu_only=True,
            ),
        ],
        params={"launches": int},
        cpu_settings={"launches": 2000},
        cost_s=0.5,
        parts=["CPU"],
    ),
    "memory": Benchmark(
        group="memory",
        title="Memory bandwidth",
        summary="bandwidth of each device's memory: copy, read, write and triad",
        settings={"ops": ["copy", "read", "write", "triad"], "size_bytes": 4 << 30, **PRECISION},
        outputs=[
            *make_outputs("memory", {"bandwidth": "B/s"}, "device", over={"op": "ops"}),
            *make_outputs("memory", {"wrong_elements": "1"}, "device", over={"op": "ops"}, demanded=False),
        ],
        params={"size_bytes": int},
        cpu_settings={"size_bytes": 1 << 24},
        cost_s=0.2,
        costs=[Cost(seconds=0.12, over=["ops"])],
        gpu_bound=True,
        parts=["GPU memory"],
    ),
    "host_copy": Benchmark(
        group="links",
        title="Host copies",
        summary="copies between each device and its host's pinned memory: one GPU at a time, and all at once",
        settings={
            "directions": ["host_to_device", "device_to_host", "both_ways"],
            "sharings": ["alone", "all_gpus"],
            "size_bytes": 1 << 30,
            **PRECISION,
        },
        outputs=[
            Output(name="host_copy.bandwidth", unit="B/s", scope="device", over=_HOST_COPIES, gpu_only=True),
            Output(
                name="host_copy.wrong_bytes", unit="1", scope="device", over=_HOST_COPIES, gpu_only=True, demanded=False
            ),
        ],
        params={"devices": int, "numa": ("local", "remote", "unknown"), "size_bytes": int},
        cpu_settings=None,
        cost_s=0.5,
        costs=[
            Cost(seconds=0.9, over=["directions"]),
            Cost(seconds=0.55, over=["directions"], per="gpu"),
        ],
        parts=["PCIe", "CPU"],
    ),
    "pageable_copy": Benchmark(
        group="links",
        title="Pageable copies",
        summary="copies between each device and ordinary (not pinned) memory of its host, one GPU at a time, every byte compared",
        settings={
            "directions": ["host_to_device", "device_to_host"],
            "size_bytes": 1 << 28,
            "precision": 0.01,
            "seconds": 0.5,
        },
        outputs=make_outputs(
            "pageable_copy",
            {"bandwidth": "B/s", "wrong_bytes": "1"},
            "device",
            over={"direction": "directions"},
            gpu_only=True,
        ),
        params={"size_bytes": int},
        cpu_settings=None,
        cost_s=0.2,
        costs=[Cost(seconds=1.4, timed=["seconds"], over=["directions"], per="gpu")],
        parts=["PCIe", "CPU"],
    ),
    "group_copy": Benchmark(
        group="links",
        title="Group copies",
        summary="copies from each GPU to all others of the host at once, from all others to it, and by a kernel to the next GPU",
        settings={"patterns": ["one_to_all", "all_to_one", "by_kernel"], "size_bytes": 1 << 28},
        outputs=[
            Output(
                name="group_copy.bandwidth", unit="B/s", scope="device", over={"pattern": "patterns"}, gpu_only=True
            ),
            Output(name="group_copy.wrong_bytes", unit="1", scope="pair", gpu_only=True),
        ],
        params={"access": bool, "size_bytes": int},
        cpu_settings=None,
        needs_peers=True,
        cost_s=0.0,
        costs=[Cost(seconds=0.12, over=["patterns"], per="gpu")],
        parts=["NVLink"],
    ),
    "peer_copy": Benchmark(
        group="links",
        title="Peer copies",
        summary="copies from each GPU of the host to every other: access, bandwidth one way and both ways, latency",
        settings={"directions": ["one_way", "both_ways"], "size_bytes": 1 << 30, "precision": 0.002, "seconds": 0.15},
        outputs=[
            Output(name="peer_copy.access", unit="1", scope="pair", gpu_only=True),
            Output(
                name="peer_copy.bandwidth", unit="B/s", scope="pair", over={"direction": "directions"}, gpu_only=True
            ),
            Output(name="peer_copy.latency", unit="s", scope="pair", gpu_only=True),
            Output(name="peer_copy.wrong_bytes", unit="1", scope="pair", gpu_only=True, demanded=False),
        ],
        params={"access": bool, "size_bytes": int},
        cpu_settings=None,
        cost_s=0.0,
        costs=[Cost(seconds=0.12, timed=["seconds"], over=["directions"], per="pair")],
        parts=["NVLink"],
    ),
    "integrity": Benchmark(
        group="memory",
        title="Memory integrity",
        summary="several patterns are written to each device's free memory and read back",
        settings={
            "patterns": [*PATTERNS],
            "share": 0.98,
            "most_bytes": 0,  # upper limit of the tested memory; 0: no limit
            "seconds": 0.0,  # for all TESTS_OVER_TIME together; each makes at least one pass
        },
        choices={"patterns": (*PATTERNS, *TESTS_OVER_TIME)},
        outputs=[
            Output(
                name="integrity.wrong_words",
                unit="1",
                scope="device",
                over={"pattern": "patterns"},
                params={"passes": int, "elapsed_s": float, "wrong_addresses": int, "wrong_bits": str},
            ),
            Output(
                name="integrity.error",
                unit="1",
                scope="device",
                over={"pattern": "patterns"},
                params={"number": int, "address": str, "expected": str, "bits": str},
                demanded=False,
            ),
            Output(name="integrity.tested_share", unit="1", scope="device"),
        ],
        params={"bytes": int, "free_bytes": int},
        cpu_settings={"most_bytes": 1 << 26},
        cost_s=1.2,
        costs=[Cost(seconds=0.23, over=["patterns"]), Cost(timed=["seconds"])],
        gpu_bound=True,
        parts=["GPU memory"],
    ),
    "stress": Benchmark(
        group="compute",
        title="Stress",
        summary="matrix products on all devices of the host at once, long enough for power and temperature to settle",
        settings={
            "dtypes": ["bf16"],
            "size": 8192,
            "seconds": 20.0,
            "settle_seconds": 10.0,
            "reasons": [*THROTTLE_REASONS],
        },
        choices={"dtypes": DTYPES},
        outputs=[
            *make_outputs(
                "stress", {"throughput": "FLOP/s", "wrong_products": "1"}, "device", over={"dtype": "dtypes"}
            ),
            *make_outputs(
                "stress",
                {
                    "power": "W",
                    "efficiency": "FLOP/J",
                    "flop_per_cycle": "FLOP/cycle",
                    "clock": "Hz",
                    "temperature": "Cel",
                },
                "device",
                over={"dtype": "dtypes"},
                gpu_only=True,
                sampled=True,
            ),
            Output(
                name="stress.throttled_share",
                unit="1",
                scope="device",
                over={"dtype": "dtypes", "reason": "reasons"},
                gpu_only=True,
                sampled=True,
            ),
        ],
        params={"devices": int, "samples_per_second": float, "size": int},
        cpu_settings={"dtypes": ["fp32"], "size": 256, "seconds": 1.0, "settle_seconds": 0.2},
        cost_s=0.8,
        costs=[Cost(timed=["seconds", "settle_seconds"], over=["dtypes"])],
        gpu_bound=True,
        parts=["compute", "power", "cooling"],
    ),
    "pulse": Benchmark(
        group="compute",
        title="Pulsed load",
        summary="matrix products for half of each period and idle for the other half: all GPUs in phase, and one GPU at a time",
        settings={
            "dtype": "bf16",
            "size": 4096,
            "periods_ms": [5, 20, 100, 500, 2000, 10000],
            "alone_periods_ms": [500],
            "seconds": 2.0,  # for each period length; at least two periods
        },
        choices={"dtype": DTYPES},
        outputs=[
            Output(name="pulse.wrong_products", unit="1", scope="device"),
            *make_outputs(
                "pulse",
                {
                    "work": "1",
                    "kept_share": "1",
                    "period": "s",
                    "duty": "1",
                    "phase_error": "s",
                    "clock_uncertainty": "s",
                },
                "device",
                over={"period_ms": "periods_ms"},
            ),
            Output(
                name="pulse.work_share",
                unit="1",
                scope="device",
                over={"period_ms": "periods_ms"},
                params={"devices": int},
                demanded=False,
            ),
            Output(
                name="pulse.alone_work",
                unit="1",
                scope="device",
                over={"period_ms": "alone_periods_ms"},
                demanded=False,  # only on a host that is measured alone
            ),
            *make_outputs(
                "pulse",
                {"amplitude": "W", "slew": "W/s", "clock": "Hz", "wave": "1"},
                "device",
                over={"period_ms": "periods_ms"},
                gpu_only=True,
                sampled=True,
                demanded=False,
            ),
            Output(
                name="pulse.alone_amplitude",
                unit="W",
                scope="device",
                over={"period_ms": "alone_periods_ms"},
                gpu_only=True,
                sampled=True,
                demanded=False,
            ),
        ],
        params={"dtype": DTYPES, "size": int, "samples_per_second": float, "update_s": float},
        cpu_settings={
            "dtype": "fp32",
            "size": 64,
            "periods_ms": [20, 50],
            "alone_periods_ms": [20],
            "seconds": 0.2,
        },
        cost_s=20.0,  # two periods of 10 s are measured, although `seconds` is less
        costs=[
            Cost(seconds=0.4, timed=["seconds"], over=["periods_ms"]),
            Cost(seconds=0.4, timed=["seconds"], over=["alone_periods_ms"], per="gpu_of_host"),
        ],
        parts=["power", "compute"],
    ),
    "host_memory": Benchmark(
        group="memory",
        title="Host memory",
        summary="bandwidth and latency of the host's memory, by NUMA node, local and remote, and of all nodes at once",
        settings={
            "ops": ["copy", "triad"],
            "placements": ["local", "remote"],
            "size_bytes": 32 << 20,  # of each array of each thread; larger if the caches are large
            # Time for each operation on all nodes at once. The same time again for each operation and placement, divided
            # equally among the nodes.
            "seconds": 0.4,
        },
        outputs=[
            Output(
                name="host_memory.total_bandwidth",
                unit="B/s",
                scope="host",
                over={"op": "ops"},
                params={"size_bytes": int, "cache_bytes": int, "threads": int},
            ),
            Output(
                name="host_memory.bandwidth",
                unit="B/s",
                scope="numa",
                over={"op": "ops", "placement": "placements"},
                params={"memory_node": int, "size_bytes": int, "cache_bytes": int, "threads": int},
                demanded=False,
            ),
            Output(
                name="host_memory.latency",
                unit="s",
                scope="numa",
                over={"placement": "placements"},
                params={"memory_node": int},
                demanded=False,
            ),
            Output(name="host_memory.wrong_elements", unit="1", scope="numa", demanded=False),
            Output(name="host_memory.nodes", unit="1", scope="host"),
        ],
        adapted=["size_bytes"],
        cpu_settings={"size_bytes": 1 << 18, "seconds": 0.05},
        cost_s=1.4,
        costs=[Cost(timed=["seconds"], over=["ops"]), Cost(timed=["seconds"], over=["ops", "placements"])],
        parts=["host memory"],
    ),
    "host_compute": Benchmark(
        group="compute",
        title="Host processors",
        summary="matrix products on all cores of the host at once, each checked, and the clock of the processors meanwhile",
        settings={"size": 512, "seconds": 1.5},
        outputs=[
            *make_outputs("host_compute", {"throughput": "FLOP/s", "wrong_elements": "1"}, "host"),
            Output(name="host_compute.clock", unit="Hz", scope="host", demanded=False),
        ],
        params={"size": int, "threads": int},
        cpu_settings={"size": 128, "seconds": 0.1},
        cost_s=0.1,
        costs=[Cost(timed=["seconds"])],
        parts=["CPU"],
    ),
    "digest": Benchmark(
        group="compute",
        title="Silent corruption",
        summary="seeded computations and copies whose results must be bit-identical each time and on all GPUs of the same model",
        settings={
            "workloads": ["gemm", "reduction", "training_step"],
            "peer_copies": [],  # possible: `round_trip`, to each other GPU of the host and back
            "size": 4096,
            "seconds": 2.0,
        },
        choices={"workloads": DIGEST_WORKLOADS, "peer_copies": ("round_trip",)},
        outputs=[
            *make_outputs("digest", {"value": "1", "mismatches": "1"}, "device", over={"workload": "workloads"}),
            Output(
                name="digest.wrong_peer_copies", unit="1", scope="pair", over={"copy": "peer_copies"}, gpu_only=True
            ),
        ],
        params={"repetitions": int, "size": int},
        cpu_settings={"workloads": [*CPU_DIGEST_WORKLOADS], "size": 256, "seconds": 0.5},
        cost_s=0.0,
        costs=[
            Cost(timed=["seconds"]),
            Cost(seconds=0.3, over=["workloads"]),
            Cost(seconds=0.3, over=["peer_copies"], per="further_gpu"),
        ],
        parts=["compute"],
    ),
}
