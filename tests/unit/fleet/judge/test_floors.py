"""Test the floors (lower limits) of every GPU model: healthy figures pass on 1 to 16 GPUs, and half of a healthy figure fails.

Half of a figure may pass if its floor is low (WITH_LOW_FLOORS, `_fails_at_half`). The healthy figures were measured for Rackproof
or published; each row has its source. The tests of all models and GPU counts derive healthy figures from the datasheet:
`host_rates` multiplies the rates there by the lowest shares that any healthy model reaches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from fleet.judge.criteria import Pack, read_pack, read_packs, shipped_packs
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import Evidence, Planned, from_benchmark
from fleet.judge.host_view import HostView
from fleet.judge.outliers import FleetFigures
from fleet.report.merge import merge
from schemas.benchmarks import OPS
from schemas.plans import Plan
from schemas.records import MEASURED, UNSUPPORTED, Gpu, Metric, Observation, Record, Snapshot, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS
from tests import builders

PACKS = read_packs([])
MODELS = tuple(name for name in shipped_packs() if read_pack(name).gpu_names)
SXM = ("a100-sxm-40", "a100-sxm-80", "h100-sxm", "h200-sxm", "b200", "b300", "gb200", "gb300")
GIB = 1 << 30
UNITS = {"gemm.throughput": "FLOP/s", "stress.throughput": "FLOP/s", "stress.power": "W", "stress.throttled_share": "1"}


def figure(name: str, value: float, *, scope: str = "gpu=0", stage: str = "benchmark", **params: Value) -> Observation:
    unit = UNITS.get(name, "B/s")
    return Observation(name=name, scope=scope, stage=stage, unit=unit, status=MEASURED, value=value, params=params)


def peer_links(count: int, path: str) -> Metric:
    pairs = itertools.permutations(range(count), 2)
    return Metric(name="gpu.peer.link", unit="1", values={f"gpu={a},peer={b}": path for a, b in pairs})


@cache
def _plan(count: int, model: str, hosts: int = 1, gbps: float = 0.0) -> Any:
    names = [f"h{number}" for number in range(1, hosts + 1)]
    variables: dict[str, Any] = {"rackproof_gpu_model": model}
    variables |= {"rackproof_fabric_gbps": gbps} if gbps else {}
    variables |= {"rackproof_gang": "all" if hosts > 1 else "none"}
    return builders.plan(*names, profile="smoke", gpu_count=count, **variables)


def outcomes(
    model: str,
    figures: Sequence[Observation],
    *,
    count: int = 1,
    path: str = "",
    hosts: int = 1,
    gbps: float = 0.0,
    packs: Sequence[Pack] = PACKS,
) -> list[str]:
    """Return the worst verdict on each figure (fail, inconclusive or pass), or an empty string if no criterion judges it.

    Args:
        model: name of the pack of the GPU model.
        figures: what the benchmarks measured.
        count: number of GPUs of the host.
        path: `gpu.peer.link` of every pair; empty: all NVLinks of the model, or PCIe if it has none.
        hosts: number of hosts of the gang.
        gbps: rate of the fabric port of each GPU in Gb/s.
        packs: all packs.
    """
    plan = _plan(count, model, hosts, gbps)
    name = read_pack(model).gpu_names[0]
    links = read_pack(model).datasheet.get("nvlink", {}).get("links", 0)
    metric = peer_links(count, path or (f"NV{links}" if links else "NODE"))
    record = Record(
        run_id=plan.run_id,
        nonce=plan.nonce,
        host="h1",
        began=builders.WHEN,
        ended=builders.WHEN,
        rackproof="0",
        gpus=tuple(Gpu(index=i, serial=f"s{i}", uuid=f"u{i}", name=name, pci_bus_id="") for i in range(count)),
        snapshots=(Snapshot(stage="benchmark", phase="before", at=builders.WHEN, duration_s=0.1, metrics=(metric,)),),
        observations=tuple(figures),
        software={},
        launches=(),
    )
    view = HostView(plan, plan.host("h1"), Evidence(records=(record,)), packs)
    stats = FleetFigures(Planned(plan), [view])
    worst: dict[tuple[Any, ...], str] = {}
    rank = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2}
    for criterion in view.criteria().values():
        if from_benchmark(criterion.name) and not criterion.vs_fleet:
            for verdict in evaluate(view, criterion, stats):
                key = (verdict.name, verdict.scope, verdict.stage, *sorted(verdict.params.items()))
                worst[key] = min(worst.get(key, PASS), verdict.verdict, key=rank.__getitem__)
    return [worst.get((item.name, item.scope, item.stage, *sorted(item.params.items())), "") for item in figures]


class Published(NamedTuple):
    """Figures of healthy parts, in FLOP/s or B/s."""

    models: Sequence[str]
    name: str
    params: Mapping[str, Value]
    values: Sequence[float]
    source: str


def _gemm(models: str, dtype: str, values: Sequence[float], source: str, name: str = "gemm") -> Published:
    """Return a row of `gemm.throughput`, or `stress.throughput`; `values` are in TFLOP/s."""
    figures = [value * 1e12 for value in values]
    return Published(models.split(), f"{name}.throughput", {"dtype": dtype}, figures, source)


A100_SXM, A100_PCIE = "a100-sxm-40 a100-sxm-80", "a100-pcie-40 a100-pcie-80"
ZZC = "zzc0721/torch-performance-test-data"
STAS = "stas00/ml-engineering"
MAG = "mag-/gpu_benchmark"
OWN = "measured by this project"
FRYER = "huggingface/gpu-fryer"
GPU_FIGURES = (
    _gemm(A100_SXM, "bf16", (271.2, 267.9, 264.5, 246.3, 291.8), f"{STAS}; {MAG}; {ZZC}; FlagPerf"),
    _gemm(A100_SXM, "fp16", (298.3,), "FlagPerf"),
    _gemm(A100_SXM, "tf32", (145.4,), "FlagPerf"),
    _gemm(A100_SXM, "fp32", (18.1, 19.2), "FlagPerf"),
    _gemm(A100_SXM, "fp64", (19.4,), "FlagPerf"),
    _gemm(A100_PCIE, "bf16", (252.9, 256.4, 234.1), f"{STAS}; {MAG}; {ZZC}"),
    _gemm(A100_PCIE, "tf32", (108.3,), ZZC),
    _gemm(A100_PCIE, "fp32", (17.6,), ZZC),
    _gemm("h100-sxm", "bf16", (794.5, 821.2, 784, 797, 789, 793), f"{STAS}; {MAG}; {ZZC}; {OWN}"),
    _gemm("h100-sxm", "fp16", (758, 760, 759, 762), f"{ZZC}; {OWN}"),
    _gemm("h100-sxm", "tf32", (402, 411, 413), f"{ZZC}; {OWN}"),
    _gemm("h100-sxm", "fp8", (1402.6, 1427, 1437), f"{STAS}; {OWN}"),
    _gemm("h100-sxm", "fp32", (51.9, 52.1, 51.7), f"{ZZC}; {OWN}"),
    _gemm("h100-sxm", "fp64", (63.7,), OWN),
    _gemm("h200-sxm", "bf16", (753, 790), f"{OWN}; {ZZC}"),
    _gemm("h200-sxm", "fp16", (697, 751, 759), f"{OWN}; {ZZC}"),
    _gemm("h200-sxm", "tf32", (342, 416), OWN),
    _gemm("h200-sxm", "fp8", (1389, 1443, 1453.4), f"{OWN}; {STAS}"),
    _gemm("h200-sxm", "fp64", (61.8, 62.9), OWN),
    _gemm("h200-sxm", "fp32", (51.3,), ZZC),
    _gemm("gh200", "bf16", (852.5,), MAG),
    _gemm("gh200-144", "bf16", (828.6, 853.8), STAS),
    _gemm("gh200 gh200-144", "fp8", (1535,), STAS),
    _gemm("h100-pcie", "bf16", (499.5, 495.9, 504), f"{MAG}; {ZZC}"),
    _gemm("h100-pcie", "fp16", (458, 478), ZZC),
    _gemm("h100-pcie", "tf32", (240.4, 242.8), ZZC),
    _gemm("h100-pcie", "fp32", (36.95, 37.8), ZZC),
    _gemm("h100-nvl", "bf16", (488.5,), MAG),
    _gemm("b200", "bf16", (1745, 1696), f"{STAS}; {ZZC}"),
    _gemm("b200", "fp16", (1628,), ZZC),
    _gemm("b200", "fp8", (3432.5,), STAS),
    _gemm("b200", "fp32", (66.2,), ZZC),
    _gemm("b300", "bf16", (1769,), STAS),
    _gemm("b300", "fp8", (3353.3,), STAS),
    _gemm("gb200", "bf16", (1822,), STAS),
    _gemm("gb200", "fp8", (3615.6,), STAS),
    _gemm("l40s", "bf16", (252.0, 269), f"{MAG}; {ZZC}"),
    _gemm("l40s", "fp16", (264,), ZZC),
    _gemm("l40s", "fp32", (46.9,), ZZC),
    _gemm("rtx-pro-6000-server", "bf16", (409.4, 417.3), ZZC),
    _gemm("rtx-pro-6000-server", "fp16", (313, 407), ZZC),
    _gemm("rtx-pro-6000-server", "tf32", (205.2,), ZZC),
    _gemm("rtx-pro-6000-server", "fp32", (77, 79), ZZC),
    _gemm("t4", "fp16", (41.9, 42.7), ZZC),
    _gemm("t4", "fp32", (4.17, 4.43), ZZC),
    _gemm("h200-sxm", "bf16", (622, 678), OWN, "stress"),
    _gemm("h100-sxm", "bf16", (680, 730), f"{OWN}; {FRYER}", "stress"),
    _gemm("h100-sxm", "fp8", (1530, 1290, 1382), f"{FRYER}; Azure/AI-benchmarking-guide", "stress"),
    _gemm("h200-sxm", "fp8", (1301, 1366), "Azure/AI-benchmarking-guide", "stress"),
    _gemm("h100-sxm", "tf32", (373,), FRYER, "stress"),
    _gemm("h100-sxm", "fp32", (51.5,), FRYER, "stress"),
    _gemm(A100_SXM, "bf16", (270,), FRYER, "stress"),
    _gemm(A100_SXM, "tf32", (130,), FRYER, "stress"),
    _gemm(A100_SXM, "fp16", (253.7, 256.5), "Azure/AI-benchmarking-guide", "stress"),
    _gemm("a100-pcie-40", "bf16", (224,), FRYER, "stress"),
    _gemm("a100-pcie-40", "tf32", (106,), FRYER, "stress"),
    _gemm("gh200", "bf16", (705,), FRYER, "stress"),
    _gemm("gh200", "fp8", (1660,), FRYER, "stress"),
    _gemm("gh200", "tf32", (363,), FRYER, "stress"),
    _gemm("gb200", "bf16", (1550,), FRYER, "stress"),
    _gemm("gb200", "fp8", (4300, 2877, 2907), f"{FRYER}; Azure/AI-benchmarking-guide", "stress"),
    _gemm("gb200", "tf32", (790,), FRYER, "stress"),
)


def _memory(models: str, source: str, **rates: float) -> Iterator[Published]:
    """Yield a row for each operation; `rates` are in GB/s."""
    for op, rate in rates.items():
        yield Published(models.split(), "memory.bandwidth", {"op": op}, (rate * 1e9,), source)


MEMORY_FIGURES = (
    *_memory("h200-sxm", OWN, copy=4299),
    *_memory("h200-sxm", "Azure/AI-benchmarking-guide, BabelStream", triad=4150),
    *_memory("h100-sxm", OWN, copy=3030, read=3100, write=3290, triad=3050),
    *_memory("h100-sxm", "Azure/AI-benchmarking-guide; Voltage Park", copy=2900, triad=2970),
    *_memory("a100-sxm-80", "Azure/AI-benchmarking-guide", copy=1610, triad=1700),
    *_memory(
        "a100-sxm-80", "p2pBandwidthLatencyTest; te42kyfo/gpu-benches", copy=1581, read=1769, write=1880, triad=1759
    ),
    *_memory("a100-sxm-40", "FlagPerf; te42kyfo/gpu-benches", copy=1330, read=1490, write=1503, triad=1360),
    *_memory("h100-pcie", "te42kyfo/gpu-benches", read=1942, write=2016, triad=1832, copy=1704),
    *_memory("b200", "microsoft/superbenchmark; OpenCL-Benchmark", copy=6712, triad=7414, read=6669, write=6503),
    *_memory("gh200", "Kokkos STREAM; OpenCL-Benchmark", copy=3082, triad=3510, read=3615, write=3705),
    *_memory("l40s", "te42kyfo/gpu-benches, L40 with the same memory", read=844, write=846, copy=770, triad=768),
    *_memory("t4", "router-gao/cuda-demo", copy=239.6),
)


def _host_copy(models: str, source: str, to_device: Sequence[float], to_host: Sequence[float]) -> Iterator[Published]:
    """Yield a row for each direction; the rates are in GB/s."""
    for direction, rates in (("host_to_device", to_device), ("device_to_host", to_host)):
        params = {"direction": direction, "sharing": "alone", "numa": "local"}
        yield Published(models.split(), "host_copy.bandwidth", params, [rate * 1e9 for rate in rates], source)


HOST_COPY_FIGURES = (
    *_host_copy("h200-sxm", OWN, (52.7, 55.6), (54.1, 55.4)),
    *_host_copy("h100-sxm", OWN, (53.7, 55.1), (54.2, 55.1)),
    *_host_copy("h100-sxm h200-sxm", "Azure/AI-benchmarking-guide", (51, 52), (52,)),
    *_host_copy("h100-sxm", "Voltage Park", (54.8,), (46.8,)),
    *_host_copy(A100_SXM, "microsoft/superbenchmark; FlagPerf", (26.28, 26.09), (25.9, 26.1)),
    *_host_copy("rtx-pro-6000-server", "local-inference-lab/rtx6kpro", (54.9, 55.1), (56.4,)),
    *_host_copy("a10 l40s", "NVIDIA/nvbandwidth issue 15, RTX 4090 with the same link", (23.9, 26.4), (26.2, 27.1)),
    *_host_copy("t4", "router-gao/cuda-demo", (9.7,), (11.1,)),
    *_host_copy("gh200", "microsoft/superbenchmark; NVIDIA/nvbandwidth issue 23", (369, 346, 380), (295,)),
    *_host_copy("gb200", "Azure/AI-benchmarking-guide", (201,), (193,)),
    Published(["h200-sxm"], "host_copy.bandwidth", {"direction": "both_ways", "sharing": "alone", "numa": "local"},
              (88.5e9, 101.7e9), OWN),
    Published(["a100-sxm-40", "a100-sxm-80"], "host_copy.bandwidth",
              {"direction": "both_ways", "sharing": "alone", "numa": "local"}, (49.4e9,), "microsoft/superbenchmark"),
)  # fmt: skip
ALL_FIGURES = (*GPU_FIGURES, *MEMORY_FIGURES, *HOST_COPY_FIGURES)


def _label(row: Any) -> str:
    models = row.models[0] if isinstance(row, Published) else row.model
    return f"{models} {row.name} {' '.join(str(value) for value in row.params.values())} {row.values[0]:.4g}"


@pytest.mark.parametrize("row", ALL_FIGURES, ids=_label)
def test_healthy_figure_of_a_gpu_passes_and_its_half_fails(row: Published) -> None:
    for model in row.models:
        healthy = [figure(row.name, value, scope=f"gpu={at}", **row.params) for at, value in enumerate(row.values)]
        halves = [figure(row.name, value / 2, scope=f"gpu={at}", **row.params) for at, value in enumerate(row.values)]
        assert outcomes(model, healthy) == [PASS] * len(healthy), (model, row.source)
        assert outcomes(model, halves) == [FAIL] * len(halves), (model, row.source)


class BetweenGpus(NamedTuple):
    """Rates in GB/s between the GPUs of healthy hosts."""

    model: str
    name: str
    count: int
    path: str
    params: Mapping[str, Value]
    values: Sequence[float]
    source: str


def _copies(
    model: str, path: str, one_way: Sequence[float], both_ways: Sequence[float], source: str
) -> Iterator[BetweenGpus]:
    for direction, rates in (("one_way", one_way), ("both_ways", both_ways)):
        if rates:
            yield BetweenGpus(model, "peer_copy.bandwidth", 2, path, {"direction": direction}, rates, source)


def _busbw(
    model: str, count: int, size: int, source: str, path: str = "", **rates: float | Sequence[float]
) -> Iterator[BetweenGpus]:
    for op, rate in rates.items():
        values = [rate] if isinstance(rate, float | int) else rate
        params = {"size_bytes": size, "placement": "out_of_place", "world_size": count}
        yield BetweenGpus(model, f"collective.{op}.busbw", count, path, params, values, source)


SUPERBENCH = "microsoft/superbenchmark"
AZURE = "Azure/AI-benchmarking-guide"
BETWEEN_GPUS = (
    *_copies("a100-sxm-80", "NV12", (271, 277, 276, 279, 258, 262), (526, 531, 564), f"{STAS}; {SUPERBENCH}; FlagPerf"),
    *_copies("h100-sxm", "NV18", (363, 394, 380), (749,), f"{STAS}; NVIDIA/nccl issue 1264"),
    *_copies("h200-sxm", "NV18", (392.2, 395.9, 396.4), (774.7, 783.7), f"{OWN}; {STAS}"),
    *_copies("h100-nvl", "NV12", (256.6,), (), "Azure/azurehpc-health-checks issue 162"),
    *_copies("gb200", "NV18", (744, 750, 770), (1530,), f"{STAS}; {AZURE} issue 7"),
    *_copies("b200", "NV18", (765,), (1530,), f"{STAS}"),
    *_busbw("a100-sxm-40", 8, GIB, SUPERBENCH, all_reduce=230, all_gather=213, reduce_scatter=224, all_to_all=217,
            broadcast=225, reduce=227),
    *_busbw("a100-sxm-40", 8, 8 * GIB, SUPERBENCH, all_reduce=(235, 231.6), all_gather=223, reduce_scatter=232,
            all_to_all=(224, 210),
            broadcast=233, reduce=228),
    *_busbw("a100-sxm-80", 8, 16 * GIB, f"{STAS}; {AZURE}; oci-hpc; NVIDIA/nccl-tests issue 175", all_reduce=(234.9, 230.2,
            232.5)),
    *_busbw("a100-sxm-80", 8, GIB, "li-plus/playground", send_recv=195),
    *_busbw("a100-sxm-40", 4, GIB, "NVIDIA/nccl-tests issue 331", path="NV4", send_recv=(71, 73)),
    *_busbw("a100-pcie-80", 2, 8 * GIB, "NVIDIA/nccl-tests issue 178", all_reduce=208),
    *_busbw("h100-sxm", 2, GIB, OWN, all_reduce=329, all_gather=268, reduce_scatter=274, all_to_all=313, send_recv=361,
            broadcast=368),
    *_busbw("h100-sxm", 2, 8 * GIB, OWN, all_reduce=342, all_gather=(296, 333), reduce_scatter=286, all_to_all=318,
            send_recv=367,
            broadcast=368),
    *_busbw("h200-sxm", 2, GIB, OWN, all_reduce=322.8, all_gather=268.4, reduce_scatter=271.2, all_to_all=330.8,
            send_recv=360.7),
    *_busbw("h200-sxm", 2, 8 * GIB, OWN, all_reduce=343.4, all_gather=292.7, reduce_scatter=292.1, all_to_all=338.1,
            send_recv=366.4),
    *_busbw("h200-sxm", 4, GIB, OWN, all_reduce=352.6, all_gather=322.7, reduce_scatter=325.8, all_to_all=332.4, send_recv=358.1,
            broadcast=359.3, reduce=362.8, gather=370.1, scatter=366.3),
    *_busbw("h200-sxm", 4, 8 * GIB, OWN, all_reduce=364.3, all_gather=345.7, reduce_scatter=348.1, all_to_all=351.7,
            send_recv=364.1,
            broadcast=361.6, reduce=366.5, gather=374.4, scatter=371.2, hypercube=344.1),
    *(row for count, ring in ((5, 364.4), (6, 365.1), (7, 365.7)) for row in _busbw("h200-sxm", count, 8 * GIB, STAS,
            all_reduce=ring)),
    *(row for count, nvls in ((5, 414.2), (6, 435.6), (7, 460.0)) for row in _busbw("h200-sxm", count, 8 * GIB, STAS,
            all_reduce=nvls)),
    *_busbw("h200-sxm", 8, 16 * GIB, STAS, all_gather=361, reduce_scatter=363),
    *_busbw("h100-sxm", 8, GIB, AZURE, all_reduce=(466, 442, 463.6)),
    *_busbw("h100-sxm", 8, 16 * GIB, "NVIDIA/nccl-tests issues 212 and 326; GTC 2024 S62129", all_reduce=(370, 360),
            all_to_all=320),
    *(row for count, ring in ((4, 673.8), (5, 677.8), (6, 677.8), (7, 680.5), (8, 682.2))
      for row in _busbw("b200", count, 8 * GIB, STAS, all_reduce=ring)),
    *_busbw("b200", 8, GIB, f"{STAS}; GKE", all_reduce=(723, 729)),
    *_busbw("b200", 8, 8 * GIB, "GTC 2025 S72583", all_to_all=640),
    *_busbw("gb200", 4, GIB, AZURE, all_reduce=647),
    *_busbw("gb200", 4, 8 * GIB, AZURE, all_reduce=680),
)  # fmt: skip
WITH_LOW_FLOORS = (
    *_busbw("h200-sxm", 4, GIB, OWN, hypercube=312.9),
    *_busbw(
        "a100-sxm-40",
        8,
        1 << 26,
        SUPERBENCH,
        all_reduce=201,
        all_gather=155,
        reduce_scatter=165,
        all_to_all=148,
        broadcast=179,
    ),
    *_busbw(
        "h100-sxm",
        2,
        1 << 27,
        OWN,
        all_reduce=285,
        all_gather=229,
        reduce_scatter=224,
        all_to_all=256,
        send_recv=286,
        broadcast=342,
    ),
    *_busbw("h200-sxm", 4, 1 << 27, OWN, send_recv=156.9, hypercube=161.6, all_to_all=278),
    *_busbw("b200", 8, 1 << 26, f"{STAS}; GKE", all_reduce=(401, 419)),
    *_busbw("rtx-pro-6000-server", 8, GIB, "local-inference-lab/rtx6kpro", all_reduce=(46.4, 37, 41, 22)),
    *_busbw("rtx-pro-6000-server", 6, GIB, "local-inference-lab/rtx6kpro", all_gather=(7.0, 8.9)),
    *_busbw("a100-pcie-80", 3, GIB, "NVIDIA/nccl-tests issue 178", path="NODE", all_reduce=20),
    *_busbw("a100-pcie-80", 4, GIB, "one log, container", path="SYS", all_reduce=5.2),
    *_copies("rtx-pro-6000-server", "PIX", (52, 56.6, 36, 40), (101, 111, 52), "local-inference-lab/rtx6kpro"),
    *_copies("a10", "NODE", (26.3, 21.8), (), "NVIDIA/nvbandwidth issue 50, A6000 with the same link"),
)
"""Healthy figures whose floors are low and detect only a wrong transport or a gross fault. Half of such a figure may pass."""


def linked_figures(row: BetweenGpus, factor: float) -> list[Observation]:
    """Return a figure for each value of a row, multiplied by `factor`.

    One parameter differs between the figures, because figures with equal parameters would get only one verdict.
    """
    if row.name == "peer_copy.bandwidth":
        return [
            figure(row.name, value * 1e9 * factor, scope="gpu=0,peer=1", access=True, size_bytes=at + 1, **row.params)
            for at, value in enumerate(row.values)
        ]
    return [
        figure(row.name, value * 1e9 * factor, scope="host", places=at + 1, **row.params)
        for at, value in enumerate(row.values)
    ]


@pytest.mark.parametrize("row", BETWEEN_GPUS, ids=_label)
def test_healthy_figure_between_gpus_passes_and_its_half_fails(row: BetweenGpus) -> None:
    for factor, expected in ((1.0, PASS), (0.5, FAIL)):
        figures = linked_figures(row, factor)
        assert outcomes(row.model, figures, count=row.count, path=row.path) == [expected] * len(figures), row.source


@pytest.mark.parametrize("row", WITH_LOW_FLOORS, ids=_label)
def test_healthy_figure_with_a_low_floor_passes_and_a_far_lower_one_fails(row: BetweenGpus) -> None:
    for factor, expected in ((1.0, PASS), (0.005, FAIL)):
        figures = linked_figures(row, factor)
        assert outcomes(row.model, figures, count=row.count, path=row.path) == [expected] * len(figures), row.source


DTYPE_SHARES = {"fp64": 0.9, "fp32": 0.52, "tf32": 0.62, "fp16": 0.62, "bf16": 0.585, "fp8": 0.58}
"""Data type -> lowest share of the rate in the datasheet that short matrix products (`gemm`) reach on any healthy model."""
A100 = ("a100-sxm-40", "a100-sxm-80", "a100-pcie-40", "a100-pcie-80")
DIRECTIONS = ("host_to_device", "device_to_host")


def _expectation_of_the_model(model: str, name: str, params: Mapping[str, Value]) -> float:
    """Return the highest value that a criterion of the model's own pack expects of a figure; 0 if none matches it."""
    matching = (
        item.expected or item.value or 0.0
        for item in read_pack(model).criteria
        if item.origin == model and item.matches_name(name) and not item.datasheet and not item.vs_fleet
        and all(params.get(key) == value for key, value in item.where.items())
    )  # fmt: skip
    return max(map(float, matching), default=0.0)  # type: ignore[arg-type]


def host_rates(model: str, count: int, links: int) -> list[Observation]:
    """Return all rates of a healthy host; `links` NVLinks join each pair of GPUs.

    A rate is a share of the datasheet, or what the model's own pack expects, whichever is higher.
    """
    sheet = read_pack(model).datasheet
    host_link = sheet.get("host_link", sheet.get("pcie", {}))["bandwidth"]
    share_of_links = links / sheet["nvlink"]["links"] if links else 0.0
    nvlink = sheet["nvlink"]["bandwidth"] / 2 * share_of_links if links else 0.0

    def rate(name: str, value: float, *, scope: str = "gpu=0", **params: Value) -> Observation:
        return figure(name, max(value, _expectation_of_the_model(model, name, params)), scope=scope, **params)

    figures = []
    for dtype in DTYPE_SHARES.keys() & sheet["flops"].keys():
        is_a100_fp32 = model in A100 and dtype == "fp32"
        short = sheet["flops"][dtype] * (0.92 if is_a100_fp32 else DTYPE_SHARES[dtype])
        sustained = sheet["flops"][dtype] * (0.62 if model in (*SXM, *A100) else 0.45)
        figures += [rate("gemm.throughput", short, dtype=dtype), rate("stress.throughput", sustained, dtype=dtype)]
    for op in ("copy", "read", "write", "triad"):
        figures.append(rate("memory.bandwidth", sheet["memory_bandwidth"]["value"] * 0.77, op=op))
    for direction in (*DIRECTIONS, "both_ways"):
        share = 1.4 if direction == "both_ways" else 0.62 if model in ("t4", "gb200", "gh200", "gh200-144") else 0.78
        for numa in ("local", "unknown"):
            params: dict[str, Value] = {"direction": direction, "numa": numa}
            figures.append(rate("host_copy.bandwidth", host_link * share, sharing="alone", devices=1, **params))
            together = host_link * 1.13 / max(count, 2)
            figures.append(rate("host_copy.bandwidth", together, sharing="all_gpus", devices=count, **params))
    for first, second in itertools.permutations(range(min(count, 3)), 2):
        for direction, share in (("one_way", 0.81), ("both_ways", 1.62)):
            value = nvlink * share if links else host_link * share * 0.7
            scope = f"gpu={first},peer={second}"
            own = _expectation_of_the_model(model, "peer_copy.bandwidth", {"direction": direction}) * share_of_links
            figures.append(figure("peer_copy.bandwidth", max(value, own), scope=scope, direction=direction))
    ops = [op for op in OPS if op != "hypercube" or count & (count - 1) == 0] if count > 1 else []
    for op, size in itertools.product(ops, (1 << 27, GIB, 8 * GIB)):
        share = (0.59 if count == 2 else 0.65) if op != "all_reduce" else 0.69 if count == 2 else 0.72
        share = 0.35 if size < GIB else share
        params = {"world_size": count, "size_bytes": size, "placement": "in_place"}
        own = _expectation_of_the_model(model, f"collective.{op}.busbw", params | {"nvls": True}) * share_of_links
        value = max(nvlink * share, own) if links else host_link * 0.11
        figures.append(figure(f"collective.{op}.busbw", value, scope="host", **params))
    return figures


def scaled(figures: Iterable[Observation], factor: float) -> list[Observation]:
    return [figure(item.name, float(item.value or 0) * factor, scope=item.scope, **item.params) for item in figures]


def _paths(model: str, count: int) -> list[tuple[str, int]]:
    """Return each path that may join all pairs of GPUs of a host with `count` GPUs of this model: (path, number of NVLinks)."""
    links = read_pack(model).datasheet.get("nvlink", {}).get("links", 0)
    paths = [(f"NV{links}", links)] if links and (model in SXM or count == 2 or model.startswith("gh200")) else []
    if links and count == 4 and model != "gb200":
        paths.append((f"NV{links // 3}", links // 3))
    if model not in SXM:
        paths.append(("NODE", 0))
    return paths


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_every_rate_of_every_model_and_count_has_a_floor(model: str, count: int) -> None:
    for path, links in _paths(model, count):
        healthy = host_rates(model, count, links)
        for factor, expected in ((1.0, PASS), (0.1, FAIL)):
            figures = scaled(healthy, factor)
            wrong = {
                (item.name, *item.params.values(), item.value): outcome
                for item, outcome in zip(figures, outcomes(model, figures, count=count, path=path), strict=True)
                if outcome != expected
            }
            assert not wrong, (path, factor)


def _fails_at_half(item: Observation, links: int) -> bool:
    """Return whether a floor of a figure lies above half of its healthy value."""
    if item.name == "stress.throughput":
        return False
    if item.name == "host_copy.bandwidth":
        return (
            item.params["sharing"] == "alone"
            and item.params["numa"] == "local"
            and item.params["direction"] in DIRECTIONS
        )
    if item.name == "peer_copy.bandwidth":
        return links > 0
    if item.name == "collective.hypercube.busbw" and item.params["world_size"] != 2:
        return links > 0 and int(item.params["size_bytes"] or 0) > GIB
    return not item.name.startswith("collective.") or (links > 0 and int(item.params["size_bytes"] or 0) >= GIB)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_half_of_every_rate_fails_unless_its_floor_is_low(model: str, count: int) -> None:
    for path, links in _paths(model, count):
        figures = [item for item in scaled(host_rates(model, count, links), 0.5) if _fails_at_half(item, links)]
        result = outcomes(model, figures, count=count, path=path)
        passed = [
            (item.name, dict(item.params)) for item, outcome in zip(figures, result, strict=True) if outcome != FAIL
        ]
        assert not passed, path


def test_links_that_the_host_did_not_report_make_figures_inconclusive() -> None:
    copy = figure("peer_copy.bandwidth", 3.9e11, scope="gpu=0,peer=1", direction="one_way")
    total = figure("collective.broadcast.busbw", 3.6e11, scope="host", world_size=3, size_bytes=GIB)
    assert outcomes("h100-sxm", [copy, total], count=3, path="?") == [INCONCLUSIVE] * 2


@pytest.mark.parametrize("path", ["X", "PIX", "PXB", "PHB", "NODE", "SYS", "unknown"])
def test_nvlink_floors_do_not_apply_over_pcie(path: str) -> None:
    copy = figure("peer_copy.bandwidth", 2.4e10, scope="gpu=0,peer=1", direction="one_way")
    assert outcomes("a100-pcie-80", [copy], count=2, path=path) == [PASS]


@pytest.mark.parametrize("model", SXM)
def test_sxm_modules_fail_without_nvlink_even_if_the_host_reports_pcie_paths(model: str) -> None:
    figures = [
        figure("peer_copy.bandwidth", 5.5e10, scope="gpu=0,peer=1", direction="one_way"),
        figure("collective.all_gather.busbw", 4.6e10, scope="host", world_size=3, size_bytes=GIB),
    ]
    assert outcomes(model, figures, count=3, path="NODE") == [FAIL, FAIL]
    assert outcomes("rtx-pro-6000-server", figures, count=3, path="NODE") == [PASS, PASS]


class Fabric(NamedTuple):
    """Rates in GB/s between healthy hosts."""

    model: str
    hosts: int
    gpus: int
    gbps: float
    op: str
    values: Sequence[float]
    source: str


FABRICS = (
    Fabric("a100-sxm-40", 2, 8, 100, "all_reduce", (91, 86), "NVIDIA/nccl-tests issues 100 and 175"),
    Fabric("a100-sxm-80", 3, 8, 100, "all_reduce", (96,), "NVIDIA/nccl-tests issue 119"),
    Fabric("a100-sxm-80", 4, 8, 100, "all_reduce", (80,), "NVIDIA/nccl-tests issue 160"),
    Fabric(
        "a100-sxm-80",
        2,
        8,
        200,
        "all_reduce",
        (188.5, 182.8, 165.8),
        "NVIDIA/deepops; facebookresearch/gcm; NVSentinel",
    ),
    Fabric(
        "h100-sxm",
        2,
        8,
        400,
        "all_reduce",
        (479, 438, 485.6, 470, 440.6),
        "awsome-distributed-training; NVIDIA/nccl-tests issue 309",
    ),
    Fabric("h100-sxm", 4, 8, 400, "all_reduce", (330.9, 365.8), "Voltage Park; NVIDIA/nccl-tests issue 309"),
    Fabric("h100-sxm", 4, 8, 400, "all_gather", (323.5,), "Voltage Park"),
    Fabric("h100-sxm", 4, 8, 400, "broadcast", (286,), "Voltage Park"),
    Fabric("h100-sxm", 2, 8, 200, "all_reduce", (338.8,), "GKE"),
    Fabric("h100-sxm", 2, 8, 200, "all_gather", (188,), "GKE"),
    Fabric("b200", 2, 8, 400, "all_reduce", (675.5, 690), "GKE; coreweave"),
    Fabric("b200", 2, 8, 400, "all_gather", (260,), "GKE"),
    Fabric("b300", 2, 8, 800, "all_reduce", (654, 751), "awsome-distributed-training"),
    Fabric("h200-sxm", 2, 1, 400, "all_gather", (31.7, 31.9), "single logs"),
    Fabric("h100-sxm", 4, 8, 400, "all_to_all", (53.9,), "awsome-distributed-training"),
)


def fabric_figures(row: Fabric, factor: float, size: int = 8 * GIB) -> list[Observation]:
    params: dict[str, Value] = {"world_size": row.hosts * row.gpus, "size_bytes": size}
    name = f"collective.{row.op}.busbw"
    return [
        figure(name, value * 1e9 * factor, scope="gang=g", stage="gang", places=at + 1, **params)
        for at, value in enumerate(row.values)
    ]


@pytest.mark.parametrize("row", FABRICS, ids=lambda row: f"{row.model} {row.hosts}x{row.gpus} {row.op}")
def test_healthy_fabric_passes_and_a_much_slower_fabric_fails(row: Fabric) -> None:
    is_ring = row.op in ("all_gather", "reduce_scatter", "broadcast", "reduce")
    for factor, expected in ((1.0, PASS), (0.5 if is_ring else 0.1, FAIL)):
        figures = fabric_figures(row, factor)
        result = outcomes(row.model, figures, count=row.gpus, hosts=row.hosts, gbps=row.gbps)
        assert result == [expected] * len(figures), row.source


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["h100-sxm", "a10"])
def test_every_rate_between_hosts_has_a_floor(model: str, gpus: int, hosts: int) -> None:
    def figures(rate: float) -> list[Observation]:
        params: dict[str, Value] = {"world_size": hosts * gpus, "placement": "in_place"}
        rings = RINGS if model == "h100-sxm" else ()  # over PCIe, several ports are not faster than one
        single = [
            figure(
                f"collective.{op}.busbw",
                rate * (gpus if op in rings else 1),
                scope="gang=g",
                stage="gang",
                size_bytes=size,
                **params,
            )
            for op, size in itertools.product(OPS, (1 << 26, GIB, 4 * GIB))
        ]
        pairs = [figure("pairs.bandwidth", rate, scope=f"gpu={at},partner=h2", stage="gang") for at in range(gpus)]
        return [*single, *pairs]

    healthy = {"h100-sxm": 36e9, "a10": 25e9}[model]  # 0.72 of the port, or 0.78 of PCIe
    for rate, expected in ((healthy, PASS), (1e6, FAIL)):
        result = outcomes(model, figures(rate), count=gpus, hosts=hosts, gbps=400)
        assert set(result) == {expected}


class OverPcie(NamedTuple):
    """Rates in GB/s of healthy hosts whose GPUs no NVLink joins: the same operation within a host and between the hosts."""

    model: str
    hosts: int
    gpus: int
    gbps: float
    op: str
    within: float
    between: float
    source: str


OVER_PCIE = (
    OverPcie("l40s", 2, 2, 100, "all_reduce", 0.0, 9.6, "one log, RoCE; not measured within the host"),
    OverPcie("l40s", 2, 4, 200, "all_reduce", 20.0, 20.0, "PCIe Gen4: GTC24 S62129 states 24"),
    OverPcie("l40s", 4, 4, 200, "broadcast", 20.0, 20.0, "as above"),
    OverPcie("l40s", 4, 8, 400, "reduce", 20.0, 20.0, "as above"),
    OverPcie("a100-pcie-80", 4, 4, 200, "all_reduce", 5.2, 5.2, "one log, container"),
    OverPcie("h100-pcie", 2, 1, 100, "all_gather", 0.0, 9.45, "one log, PCIe RoCE"),
    OverPcie("a10", 2, 1, 400, "all_gather", 0.0, 21.8, "NVIDIA/nvbandwidth issue 50, A6000 with the same link"),
    OverPcie("rtx-pro-6000-server", 2, 8, 400, "all_reduce", 46.4, 37.0, "local-inference-lab/rtx6kpro"),
    OverPcie("rtx-pro-6000-server", 3, 8, 400, "all_reduce", 22.0, 22.0, "local-inference-lab/rtx6kpro"),
    OverPcie("rtx-pro-6000-server", 3, 6, 400, "all_gather", 7.0, 7.0, "local-inference-lab/rtx6kpro"),
    OverPcie("rtx-pro-6000-server", 2, 8, 400, "all_to_all", 12.0, 12.0, "PCIe Gen5: GTC24 S62129"),
    OverPcie("a10", 2, 8, 200, "all_to_all", 6.0, 6.0, "half of the rate over PCIe Gen5"),
)


@pytest.mark.parametrize("row", OVER_PCIE, ids=lambda row: f"{row.model} {row.hosts}x{row.gpus} {row.gbps:g} {row.op}")
def test_fabric_of_hosts_without_nvlink_is_judged_by_the_path_within_the_hosts(row: OverPcie) -> None:
    name, world = f"collective.{row.op}.busbw", row.hosts * row.gpus
    within = [figure(name, row.within * 1e9, scope="host", size_bytes=GIB, world_size=row.gpus)] if row.within else []
    for factor, expected in ((1.0, PASS), (0.25, FAIL)):
        between = [
            figure(name, row.between * factor * 1e9, scope="gang=g", stage="gang", size_bytes=size, world_size=world)
            for size in (GIB, 4 * GIB)
        ]
        result = outcomes(row.model, [*within, *between], count=row.gpus, hosts=row.hosts, gbps=row.gbps, path="NODE")
        assert set(result[len(within) :]) == {expected}, row.source


def test_slow_ring_within_a_host_with_nvlinks_does_not_lower_the_limits_of_the_fabric() -> None:
    name = "collective.all_gather.busbw"
    within = figure(name, 7e9, scope="host", size_bytes=GIB, world_size=8)
    between = figure(name, 188e9 / 2, scope="gang=g", stage="gang", size_bytes=4 * GIB, world_size=16)
    assert outcomes("h100-sxm", [within, between], count=8, hosts=2, gbps=200)[1] == FAIL


@pytest.mark.parametrize(("rate", "expected"), [(1.4e7, PASS), (1e6, FAIL)])
def test_network_of_unknown_rate_has_a_floor(rate: float, expected: str) -> None:
    params: dict[str, Value] = {"world_size": 16, "size_bytes": GIB}
    figures = [figure(f"collective.{op}.busbw", rate, scope="gang=g", stage="gang", **params) for op in OPS]
    figures.append(figure("pairs.bandwidth", rate, scope="gpu=0,partner=h2", stage="gang"))
    assert set(outcomes("h100-sxm", figures, count=8, hosts=2)) == {expected}


RINGS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


@pytest.mark.parametrize(("watts", "expected"), [(253.0, PASS), (180.0, FAIL)])
def test_power_of_a_healthy_a100_passes_and_a_much_lower_power_fails(watts: float, expected: str) -> None:
    for model in ("a100-sxm-40", "a100-sxm-80"):
        assert outcomes(model, [figure("stress.power", watts, dtype="bf16")]) == [expected]


@pytest.mark.parametrize(("share", "expected"), [(0.0, PASS), (0.05, PASS), (0.06, FAIL), (1.0, FAIL)])
@pytest.mark.parametrize("model", MODELS)
def test_gpu_that_its_hardware_slows_down_for_more_than_a_moment_fails(model: str, share: float, expected: str) -> None:
    slowdown = figure("stress.throttled_share", share, dtype="bf16", reason="hw_slowdown")
    assert outcomes(model, [slowdown]) == [expected]


def model_evidence(plan: Plan, model: str, count: int) -> dict[str, Evidence]:
    """Return evidence of all hosts of a plan, with GPUs of this model and every planned figure.

    A figure that `host_rates` has too gets the value from there.
    """
    sheet = read_pack(model).datasheet
    rates = host_rates(model, count, sheet.get("nvlink", {}).get("links", 0))
    by_name: dict[str, list[Observation]] = {}
    for item in rates:
        by_name.setdefault(item.name, []).append(item)

    def of_model(item: Observation) -> Observation:
        dtype = item.params.get("dtype")
        if item.name == "gemm.throughput" and dtype not in sheet["flops"]:
            return replace(item, status=UNSUPPORTED, value=None, reason="the part has no such products")
        if item.name == "stress.power":
            return replace(item, value=sheet.get("power", {"value": 900.0})["value"] * 0.97)
        collective, _, kind = item.name.rpartition(".")
        if kind in ("algbw", "latency") and collective.startswith("collective."):
            # derived from the bus bandwidth, because the figures of one collective must agree
            busbw = of_model(replace(item, name=f"{collective}.busbw", value=0.0)).value
            size = item.params["size_bytes"]
            assert isinstance(size, int)
            if not busbw or not isinstance(busbw, int | float):
                return item
            return replace(item, value=busbw if kind == "algbw" else size / busbw)
        if item.name == "collective.nvls" or "busbw" not in item.name:
            alike = [
                rate for rate in by_name.get(item.name, ())
                if all(rate.params.get(key, value) == value for key, value in item.params.items())
            ]  # fmt: skip
        else:
            keys = ("size_bytes", "world_size")
            alike = [
                rate for rate in by_name.get(item.name, ()) if all(rate.params[key] == item.params[key] for key in keys)
            ]
            # `host_rates` has only some message sizes. Figures of other sizes get the lowest rate of their collective.
            alike = alike or sorted(by_name.get(item.name, ()), key=lambda rate: float(rate.value or 0))[:1]
        return replace(item, value=alike[0].value) if alike else item

    name, path = read_pack(model).gpu_names[0], f"NV{sheet['nvlink']['links']}" if "nvlink" in sheet else "NODE"
    evidence_of_host = {}
    for host, evidence in builders.evidence(plan).items():
        evidence = builders.with_observations(evidence, of_model)
        records = []
        for record in evidence.records:
            snapshots = []
            for snapshot in record.snapshots:
                kept = [item for item in snapshot.metrics if item.name != "gpu.peer.link"]
                snapshots.append(replace(snapshot, metrics=(*kept, peer_links(count, path))))
            gpus = tuple(replace(gpu, name=name) for gpu in record.gpus)
            records.append(replace(record, gpus=gpus, snapshots=tuple(snapshots)))
        evidence_of_host[host] = replace(evidence, records=tuple(records))
    return evidence_of_host


@pytest.mark.parametrize(
    ("model", "count"),
    [*itertools.product((model for model in MODELS if model != "t4"), (1, 2, 8)), ("h200-sxm", 3), ("l40s", 3)],
)
def test_host_of_any_model_has_every_rate_judged_without_a_fleet(model: str, count: int) -> None:
    """On one host with these benchmarks of the profile `standard`, every rate is judged and passes.

    The T4 is left out. `standard` runs `stress` only in bf16, for which the T4 has no floor.
    """
    plan = builders.plan("h1", gpu_count=count, rackproof_gang="none", rackproof_gpu_model=model, with_all_ops=True)
    planned = plan.stage("benchmark").benchmarks
    names = ("gemm", "stress", "memory", "host_copy", "peer_copy", "collective", "overlap", "straggler")
    plan = builders.with_benchmarks(plan, benchmark={name: planned[name] for name in names})
    evidence = model_evidence(plan, model, count)
    report = merge(plan, evidence, PACKS)
    rates = ("gemm.", "stress.", "memory.", "host_copy.", "peer_copy.", "collective.")
    exceptions = [item for item in report.verdicts if item.verdict != PASS and item.name.startswith(rates)]
    assert [(item.criterion, item.verdict, dict(item.params), item.reason) for item in exceptions] == []
    lines = report.acceptance.summary
    for title in (
        "GEMM",
        "Stress",
        "Memory bandwidth",
        "Host copies",
        *(("Peer copies", "Collectives") if count > 1 else ()),
    ):
        assert f"{title}: PASS" in lines
    if count == 2:
        assert (
            "Stragglers: NOT COMPARED (the median of the fleet needs three GPUs, or three hosts, of the same model)"
            in lines
        )
        assert "Overlap: PASS" in lines
    assert not any(
        "a median needs" in line or (line.startswith("Bandwidth") and "NOT JUDGED" in line) for line in lines
    )


DOMAIN_RATES = (
    ("gb200", GIB, (681.17, 724.06), "coreweave/nccl-tests pull request 43: 72 GPUs"),
    ("gb200", 8 * GIB, (834.57, 846.82), "coreweave/nccl-tests pull request 43: 72 GPUs"),
    ("gb300", 8 * GIB, (842,), "NVIDIA/aicr: 72 GPUs"),
)
"""All-reduce in one NVLink domain of 72 GPUs: model, message size in bytes, bus bandwidths in GB/s, source."""


@pytest.mark.parametrize(("model", "size", "rates", "source"), DOMAIN_RATES)
def test_floor_of_all_reduce_in_an_nvlink_domain_follows_from_nvlink(
    model: str, size: int, rates: Sequence[float], source: str
) -> None:
    def verdicts(factor: float, transport: str) -> set[str]:
        figures = [
            figure(
                "collective.all_reduce.busbw", rate * 1e9 * factor, scope="gang=all", stage="gang",
                size_bytes=size, world_size=72, transport=transport,
            )
            for rate in rates
        ]  # fmt: skip
        return {verdict for item in figures for verdict in outcomes(model, [item], count=4, hosts=2, gbps=400)}

    assert verdicts(1.0, "P2P/MNNVL") == {PASS}, source
    assert verdicts(0.5, "P2P/MNNVL") == {FAIL}, source
    assert verdicts(0.5, "NET/IB/GDRDMA+P2P/MNNVL") == {PASS}, "a launch over two domains is limited by the network"


@pytest.mark.parametrize(
    ("name", "params", "value", "expected"),
    [
        ("busbw", {"op": "all_reduce", "mnnvl": True, "transport": "P2P/MNNVL"}, 700e9, PASS),
        ("busbw", {"op": "all_reduce", "mnnvl": True, "transport": "P2P/MNNVL"}, 400e9, FAIL),
        ("busbw", {"op": "all_reduce", "mnnvl": False, "transport": "NET/IB/GDRDMA"}, 196.7e9, PASS),
        ("busbw", {"op": "all_reduce", "mnnvl": False, "transport": "NET/IB/GDRDMA"}, 98e9, FAIL),
        ("busbw", {"op": "all_gather", "mnnvl": False, "transport": "NET/IB/GDRDMA"}, 15e9, FAIL),
        ("speedup", {"op": "all_gather"}, 3.0, PASS),
        ("speedup", {"op": "all_gather"}, 0.9, FAIL),
    ],
)
def test_collectives_with_and_without_nvlink_between_hosts_are_judged(
    name: str, params: dict[str, Value], value: float, expected: str
) -> None:
    item = figure(f"mnnvl.{name}", value, scope="gang=g", stage="gang", size_bytes=GIB, world_size=12, **params)
    item = replace(item, unit="1") if name == "speedup" else item
    assert outcomes("gb200", [item], count=4, hosts=3, gbps=400) == [expected]
