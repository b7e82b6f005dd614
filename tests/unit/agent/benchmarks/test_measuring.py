"""Test what all benchmarks use to measure: statistics, barriers, checks of results, NVML samples, and parsers of NCCL's log."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from agent.benchmarks.__main__ import take_device
from agent.benchmarks.collectives import collective
from agent.benchmarks.compute import digest, gemm, stress
from agent.benchmarks.links import group_copy, peer_copy
from agent.benchmarks.runner import _check_readiness, run_all
from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.nccl import error_text
from agent.run import preflight
from agent.run.work_directory import read_excluded_ranks, read_software_unfit_ranks
from agent.sampling.statistics import interval, summarize
from agent.sampling.telemetry import Telemetry
from collectors.base import Absent
from collectors.nvml import GpuSample
from schemas import documents
from schemas.benchmarks.hardware import HARDWARE
from schemas.records import MEASURED, Observation, to_json


def context(tmp_path: Path, store: dist.Store | None = None, rank: int = 0, ranks: int = 1, **fields: Any) -> Context:
    """Return the context of one rank of a launch on the CPUs of one host. `fields` are further fields of `Context`."""
    return Context(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        device=torch.device("cpu"),
        stage="benchmark",
        kind="cpu",
        devices=tuple(range(ranks)),
        world_scope="host",
        work=tmp_path,
        **{"store": store or dist.HashStore(), "timeout_s": 2.0, **fields},
    )


def values(context: Context, name: str) -> list[Any]:
    return [item.value for item in context.observations if item.name == name]


def test_interval_is_derived_from_order_statistics() -> None:
    """`interval` returns half the width of the 95 % confidence interval of the median, divided by the median."""
    assert interval([1.0] * 5) is None
    # The confidence interval of six values extends from the smallest to the largest; their median is 3.5.
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx((6 - 1) / 2 / 3.5)
    hundred = [float(value) for value in range(1, 101)]
    # The confidence interval of 100 values extends from the 40th to the 61st (Conover, table A3).
    assert interval(hundred) == pytest.approx((61 - 40) / 2 / 50.5)


def test_confidence_interval_contains_the_true_median_in_95_percent_of_samples() -> None:
    """The confidence interval of 30 values extends from the 10th to the 21st."""
    torch.manual_seed(1)
    covered = 0
    for sample in torch.randn(2000, 30).exp():  # skewed, as durations are; the true median is 1
        summary = summarize(sample.tolist())
        ordered = sorted(sample.tolist())
        covered += ordered[9] <= 1.0 <= ordered[20]
        assert summary.precision == pytest.approx((ordered[20] - ordered[9]) / 2 / summary.p50)
    assert 0.93 <= covered / 2000 <= 0.98


def test_sampling_stops_at_the_precision_or_at_the_time_limit(tmp_path: Path) -> None:
    # Fewer than six values have no confidence interval. The precision 10 is so coarse that the first interval reaches it.
    steady = context(tmp_path).sample(lambda: time.sleep(0.002), precision=10, seconds=10)
    assert (steady.stopped, len(steady.seconds)) == ("precision", 6)
    waits = iter([0.001, 0.004] * 1000)
    wild = context(tmp_path).sample(lambda: time.sleep(next(waits)), precision=0.0001, seconds=0.1)
    assert wild.stopped == "time"
    assert sum(wild.seconds) >= 0.1


def test_barrier_waits_for_a_missing_rank_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    present, missing = (context(tmp_path, store, rank, 2, timeout_s=1.0) for rank in range(2))
    for rank in (present, missing):
        rank.begin("stress")
    other_rank = threading.Thread(target=missing.host_barrier)
    other_rank.start()
    present.host_barrier()
    other_rank.join()
    assert not present.lost
    present.host_barrier()  # rank 1 does not reach this barrier
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the third barrier waits for the lost rank"))
    present.host_barrier()
    assert present.lost == {1: "did not reach the barrier 'stress' within 1 s"}


def test_barrier_skips_a_rank_that_left_the_benchmark(tmp_path: Path) -> None:
    store = dist.HashStore()
    healthy, broken = (context(tmp_path, store, rank, 2, timeout_s=60) for rank in range(2))
    for rank in (healthy, broken):
        rank.begin("memory")
    assert healthy.why_absent(1) == ""
    broken.leave()
    assert healthy.why_absent(1) == "local rank 1 ended the benchmark early"
    healthy.host_barrier("turn")
    for rank in (healthy, broken):
        rank.begin("stress")
    other_rank = threading.Thread(target=broken.host_barrier)
    other_rank.start()
    healthy.host_barrier()
    other_rank.join()
    assert not healthy.lost


def test_stress_counts_devices_that_finish_earlier(tmp_path: Path) -> None:
    """Two devices of the host begin together. The parameter `devices` stays 2, although one device finishes earlier."""
    store = dist.HashStore()
    short, long = (context(tmp_path, store, rank, 2) for rank in range(2))
    chosen = {"dtypes": ["fp32"], "size": 64, "settle_seconds": 0.0}

    def finish_earlier() -> None:
        stress.run(short, {**chosen, "seconds": 0.1})
        short.leave()

    for rank in (short, long):
        rank.begin("stress")
    other_rank = threading.Thread(target=finish_earlier)
    other_rank.start()
    stress.run(long, {**chosen, "seconds": 0.5})
    other_rank.join()
    assert [item.params["devices"] for item in long.observations if item.name == "stress.throughput"] == [2]


def test_stress_measures_at_least_one_block(tmp_path: Path) -> None:
    """A block is a series of products that are timed together. Here one block takes longer than the setting `seconds`."""
    alone = context(tmp_path, dist.HashStore(), 0, 1)
    alone.begin("stress")
    stress.run(alone, {"dtypes": ["fp32"], "size": 64, "settle_seconds": 0.0, "seconds": 1e-6})
    (throughput,) = (item for item in alone.observations if item.name == "stress.throughput")
    assert throughput.status == "measured"


def test_readiness_check_names_missing_ranks(tmp_path: Path) -> None:
    store = dist.HashStore()
    # Rank 1 answers that it cannot take part. Rank 2 does not answer.
    store.set("roll/1", "the device was lost: AcceleratorError: uncorrectable ECC error")
    rank = context(tmp_path, store, 0, 3, timeout_s=0.2)
    reason = _check_readiness(rank, "")
    assert "rank 1 cannot take part: the device was lost: AcceleratorError: uncorrectable ECC error" in reason
    assert "rank 2 cannot take part: no answer within 0.2 s" in reason
    assert "rank 0" not in reason
    late = context(tmp_path, store, 1, 3, timeout_s=0.2)
    assert _check_readiness(late, "") == reason, "rank 1, now ready, must still return what rank 0 decided"


def test_missing_rank_0_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(*_: Any) -> None:
        raise RuntimeError("wait timeout")

    rank = context(tmp_path, rank=1, ranks=2)
    monkeypatch.setattr(dist.HashStore, "wait", time_out)
    assert _check_readiness(rank, "") == "rank 0 did not finish the readiness check: rank 0 or its host is lost"


def test_rank_that_was_lost_is_no_longer_lost_after_it_begins_the_next_benchmark(tmp_path: Path) -> None:
    store = dist.HashStore()
    fast, slow = (context(tmp_path, store, rank, 2, timeout_s=0.1) for rank in range(2))
    fast.begin("memory")
    fast.host_barrier()
    assert 1 in fast.lost
    slow.begin("stress")
    fast.begin("stress")
    assert not fast.lost


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_figure_is_an_error(tmp_path: Path, value: float) -> None:
    rank = context(tmp_path)
    rank.report("training.loss", value, unit="1", scope="host", network="convnet")
    rank.save()
    (loss,) = rank.observations
    assert (loss.status, loss.value, loss.params) == ("error", None, {"network": "convnet"})
    assert str(value) in loss.reason


def test_error_after_the_last_figure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_late(rank: Context, chosen: dict[str, Any]) -> None:
        rank.report("memory.bandwidth", 1.0, unit="B/s", scope="cpu=0", op="copy")
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("agent.benchmarks.memory.memory.run", fail_late)
    rank = context(tmp_path)
    run_all(rank, {"memory": {"ops": ["copy"]}})
    results = {item.name: (item.status, item.reason) for item in rank.observations}
    assert results["memory.bandwidth"] == ("measured", "")
    assert results["benchmark.duration"] == ("error", "RuntimeError: CUDA out of memory")


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_product_is_checked_in_every_row(dtype: str) -> None:
    multiply, count_wrong = gemm.build_product(dtype, 128, torch.device("cpu"), seed=1)
    result = multiply()
    assert count_wrong() == 0
    result[77] = 0
    assert count_wrong() == 1
    result[78] = float("nan")
    assert count_wrong() == 2


def test_missing_or_wrong_device_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = context(tmp_path)
    rank.kind, rank.device = "gpu", torch.device("cuda", 5)
    for cuda, cause in (
        ("13.0", ""),
        (None, f"; torch {torch.__version__} was built without CUDA: install a build for CUDA"),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        assert take_device(rank, {}) == f"CUDA shows 0 devices: none is left for gpu=0{cause}"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    other = "87654321-0000-0000-0000-000000000009"
    properties = type("Properties", (), {"uuid": other})
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    reason = take_device(rank, {"uuids": {"0": "GPU-87654321-0000-0000-0000-000000000000"}})
    planned = "gpu-87654321-0000-0000-0000-000000000000"
    assert reason == f"cuda:5 has the UUID gpu-{other}, but NVML's GPU 0 has the UUID {planned}"
    monkeypatch.setattr("agent.benchmarks.runtime.context.Context.device_error", lambda _: "")
    assert take_device(rank, {"uuids": {"0": f"GPU-{other}"}}) == ""
    properties.uuid = "<no UUID>"
    assert take_device(rank, {"uuids": {"0": "GPU-87654321-0000-0000-0000-000000000000"}}) == ""
    monkeypatch.undo()
    message = (
        "CUDA error: no kernel image is available for execution on the device\nSearch for `cudaErrorNoKernelImage…"
    )
    monkeypatch.setattr(torch, "zeros", Mock(side_effect=RuntimeError(message)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    rank.set_phase("start")
    assert read_software_unfit_ranks(tmp_path, [rank.rank]) == set()
    assert rank.device_error() == (
        f"torch {torch.__version__} has no kernels for this GPU of compute capability 10.3, only for sm_80, sm_90: "
        "install a build of torch for this GPU"
    )
    rank.set_phase("end", 0)
    assert read_software_unfit_ranks(tmp_path, [rank.rank]) == {rank.rank}


def test_lost_device_makes_its_figures_errors_and_skips_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_device(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr("agent.benchmarks.compute.gemm.build_product", lose_device)
    monkeypatch.setattr("agent.benchmarks.runtime.context.Context.device_error", lambda _: "the device was lost: ECC")
    rank = context(tmp_path)
    sizes = {"integrity": {"most_bytes": 4096}, "collective": {"ops": ["all_reduce"], "sizes_bytes": [8]}}
    run_all(rank, {"gemm": {"dtypes": ["fp32"]}, "memory": {"ops": ["copy"]}, **sizes})
    reasons = {(item.name, item.status): item.reason for item in rank.observations if item.status != MEASURED}
    assert "uncorrectable ECC" in reasons[("gemm.throughput", "error")]
    assert reasons[("memory.bandwidth", "error")] == "the device was lost: ECC"
    assert reasons[("integrity.wrong_words", "error")] == "the device was lost: ECC"
    assert "rank 0 cannot take part: the device was lost: ECC" in reasons[("collective.all_reduce.busbw", "skipped")]
    rank.set_phase("end", 0)
    assert read_excluded_ranks(tmp_path, [0, 1]) == {0: "the device was lost: ECC"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    result = torch.randn(8, 8).to(dtype)
    factors = digest.digest_factors(result)
    right, digests = int(digest.compute_digest(result, factors)), set()
    words = result.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()]).view(-1)
    for index in range(words.numel()):
        # The sign bit is left out: `1 << bit` would not fit into the signed word.
        for bit in range(words.element_size() * 8 - 1):
            words[index] ^= 1 << bit
            digests.add(int(digest.compute_digest(result, factors)))
            words[index] ^= 1 << bit
    assert right not in digests


def test_single_wrong_result_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10_000))

    def fail_once(size: int, device: torch.device) -> Any:
        right = torch.ones(size, size)
        wrong = right.clone()
        wrong[3, 4] = 1.0000001
        return digest.Computation(lambda: wrong if next(calls) == 4 else right)

    monkeypatch.setitem(digest.WORKLOADS, "gemm", fail_once)
    rank = context(tmp_path)
    digest.run(rank, {"size": 16, "seconds": 0.01, "workloads": ["gemm"], "peer_copies": []})
    assert values(rank, "digest.mismatches") == [1]


class ConstantReader:
    """A reader of NVML that reports GPUs at their power limit: GPU `index` draws (690 + `index`) W."""

    def __init__(self, devices: Any) -> None:
        self._devices = devices

    def read(self) -> dict[int, Any]:
        return {index: GpuSample(690.0 + index, 1.5e9, 60.0, 0x4, 2.6e9) for index in self._devices}


def test_telemetry_reports_the_figures_sampled_in_the_requested_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.sampling.telemetry.FastReader", ConstantReader)
    with Telemetry([2, 3]) as telemetry:
        begin = time.monotonic()
        time.sleep(0.5)
    rate = Observation(
        name="stress.throughput",
        scope="gpu=3",
        stage="benchmark",
        unit="FLOP/s",
        status=MEASURED,
        value=6.93e14,
        params={"dtype": "bf16", "size": 8192},
    )
    window = {
        "benchmark": "stress",
        "scope": "gpu=3",
        "begin": begin,
        "end": begin + 0.5,
        "params": {"dtype": "bf16"},
    }
    result = telemetry.observations([window], [rate], "benchmark")
    by_name = {(observed.name, observed.params.get("reason")): observed for observed in result}
    assert by_name[("stress.power", None)].value == 693.0
    assert by_name[("stress.efficiency", None)].value == pytest.approx(1e12)
    assert by_name[("stress.flop_per_cycle", None)].value == pytest.approx(6.93e14 / 1.5e9)
    assert by_name[("stress.throttled_share", "power_cap")].value == 1.0
    assert by_name[("stress.throttled_share", "hw_thermal")].value == 0.0
    assert float(str(by_name[("stress.clock", None)].params["samples_per_second"])) >= 10
    assert {observed.scope for observed in result} == {"gpu=3"}


def test_telemetry_without_samples_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise OSError("NVML: GPU is lost")

    monkeypatch.setattr("agent.sampling.telemetry.FastReader", refuse)
    with Telemetry([0]) as telemetry:
        telemetry.join()
    window = {"benchmark": "stress", "scope": "gpu=0", "begin": 0.0, "end": 9e9, "params": {"dtype": "bf16"}}
    result = telemetry.observations([window], [], "benchmark")
    assert result
    assert {(observed.status, observed.reason) for observed in result} == {("error", "OSError: NVML: GPU is lost")}


@pytest.mark.parametrize(
    ("pause", "loses_gpu", "why"),
    [
        (0.3, False, "at least 10 per second are needed"),
        (0.05, True, "samples failed: NVML: GPU is lost"),
    ],
)
def test_telemetry_with_too_few_or_failed_samples_is_an_error(
    pause: float, loses_gpu: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingReader(ConstantReader):
        reads = 0

        def read(self) -> dict[int, Any]:
            self.reads += 1
            time.sleep(pause)
            return (
                {0: Absent(status="error", reason="NVML: GPU is lost")}
                if loses_gpu and self.reads == 3
                else super().read()
            )

    monkeypatch.setattr("agent.sampling.telemetry.FastReader", FailingReader)
    begin = time.monotonic()
    with Telemetry([0]) as telemetry:
        time.sleep(0.6)
    window = {"benchmark": "stress", "scope": "gpu=0", "begin": begin, "end": begin + 0.5, "params": {"dtype": "bf16"}}
    result = telemetry.observations([window], [], "benchmark")
    assert {observed.status for observed in result} == {"error"}
    assert all(why in observed.reason for observed in result)


NCCL_2_28 = """\
vm:1659:1659 [0] NCCL INFO NET/IB : No device found.
vm:1659:1678 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
vm:1659:1678 [0] NCCL INFO 24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels, 32 p2p channels per peer
vm:1659:1659 [0] NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
"""
NCCL_2_20 = """\
h1:9:12 [0] NCCL INFO Channel 07/0 : 3[3] -> 8[0] [send] via NET/IB/3(8)/GDRDMA
h1:9:12 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[2] via P2P/IPC/read
h1:9:12 [0] NCCL INFO 16 coll channels, 0 collnet channels, 16 nvls channels, 16 p2p channels, 16 p2p channels per peer
h1:9:9 [0] NCCL INFO AllReduce: 8589934592 Bytes -> Algo 4 proto 2 time 36000.1
"""
"""Lines as NCCL 2.28 and 2.20 log them. Before 2.23, algorithm and protocol are numbers."""
NCCL_MNNVL = """\
t1:9:12 [0] NCCL INFO MNNVL 1 cliqueId 7ffe cliqueSize 72 cliqueRank 0
t1:9:12 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] via P2P/MNNVL
t1:9:12 [0] NCCL INFO Channel 01/0 : 3[3] -> 4[0] via P2P/MNNVL/read/CE
"""
"""Lines that NCCL 2.21 and later logs for ranks in one NVLink domain (src/init.cc or src/mnnvl.cc, and src/transport/p2p.cc)."""


def test_nccl_log_is_parsed() -> None:
    assert nccl_log.parse_transport(NCCL_MNNVL) == "P2P/MNNVL+P2P/MNNVL/read/CE"
    assert nccl_log.parse_transport(NCCL_2_28) == "P2P/CUMEM"
    assert nccl_log.parse_channels(NCCL_2_28) == (24, 0)
    assert nccl_log.parse_choice(NCCL_2_28) == {"algorithm": "RING", "protocol": "LL"}
    assert nccl_log.parse_transport(NCCL_2_20) == "NET/IB/GDRDMA+P2P/IPC/read"
    assert nccl_log.parse_channels(NCCL_2_20) == (16, 16)
    assert nccl_log.parse_choice(NCCL_2_20) == {"algorithm": "NVLS", "protocol": "SIMPLE"}


@pytest.mark.parametrize(
    ("logged", "transport"),
    [
        ("NET/AWS Libfabric/1/GDRDMA", "NET/AWS_Libfabric/GDRDMA"),  # NVIDIA/nccl issue 1597
        ("NET/Libfabric/0/GDRDMA", "NET/Libfabric/GDRDMA"),
        ("NET/IBext_v8/1", "NET/IBext_v8"),  # NVIDIA/nccl-tests issue 373
        ("NET/IBext_v10/0(3)/GDRDMA(PCI)", "NET/IBext_v10/GDRDMA(PCI)"),
        ("NET/IB/0/GDRDMA comm 0x564531f27c80 nRanks 02", "NET/IB/GDRDMA"),
        ("NET/Socket/0/Shared", "NET/Socket/Shared"),
        ("COLLNET/SHARP/0/GDRDMA", "COLLNET/SHARP/GDRDMA"),
    ],
)
def test_transport_is_read_without_device_numbers_and_spaces(logged: str, transport: str) -> None:
    line = f"h1:9:12 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [send] via {logged}\n"
    assert nccl_log.parse_transport(line + line) == transport


def test_settings_are_read_from_the_nccl_log() -> None:
    log = """\
h1:9:9 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
h1:9:12 [0] NCCL INFO NCCL_MAX_NCHANNELS set by environment to 2.
h1:9:12 [0] NCCL INFO TUNER/Plugin: Could not find: libnccl-tuner.so
h1:9:12 [0] NCCL INFO NCCL_ALGO set by environment to ring,tree
h1:9:12 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to LOC
"""
    assert nccl_log.parse_settings(log) == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_MAX_NCHANNELS": "2",
        "NCCL_ALGO": "ring,tree",
        "NCCL_P2P_LEVEL": "LOC",
    }
    assert nccl_log.parse_settings(NCCL_2_28) == {}


def test_settings_that_slow_nccl_on_any_rank_become_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has a setting of its own. Settings that do not slow NCCL are left out."""
    for name in (*preflight.DISTORTING, *preflight.LEAST):
        monkeypatch.delenv(name, raising=False)
    store = {"nccl_settings/1": b"NCCL_BUFFSIZE=65536; NCCL_PROTO=LL"}
    context = SimpleNamespace(
        rank=0,
        world_size=2,
        store=SimpleNamespace(set=lambda key, text: store.update({key: text.encode()}), get=store.__getitem__),
        min_max_over_ranks=lambda number: (number, number),
    )
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "2")
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "2")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    store["nccl_other_settings/1"] = b"NCCL_IB_QPS_PER_CONNECTION=4"
    selecting = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX")
    names = ("NCCL_PROTO", "NCCL_CGA_CLUSTER_SIZE", *selecting)
    log = "".join(f"NCCL INFO {name} set by environment to LL\n" for name in names)
    assert collective._nccl_settings(context, log) == {  # type: ignore[arg-type]
        "nccl_settings": "NCCL_BUFFSIZE=65536; NCCL_MAX_NCHANNELS=2; NCCL_PROTO=LL",
        "nccl_other_settings": "NCCL_CGA_CLUSTER_SIZE=LL; NCCL_IB_QPS_PER_CONNECTION=4",
    }
    monkeypatch.delenv("NCCL_MAX_NCHANNELS")
    store |= {"nccl_settings/1": b"", "nccl_other_settings/1": b""}
    own = "NCCL INFO NCCL_GRAPH_MIXING_SUPPORT set by environment to 0.\n"  # by join_process_group
    assert collective._nccl_settings(context, own) == {}  # type: ignore[arg-type]
    changed = own.replace("0.", "1.")
    assert collective._nccl_settings(context, changed) == {  # type: ignore[arg-type]
        "nccl_other_settings": "NCCL_GRAPH_MIXING_SUPPORT=1"
    }


@pytest.mark.parametrize("count", [1, 5, 20, 200])
def test_parameter_with_many_settings_has_a_valid_length(count: int) -> None:
    settings = [f"NCCL_SETTING_{number}={'x' * 30}" for number in range(count)]
    text = collective._joined(settings)
    listed, _, more = text.partition("; and ")
    assert settings[: len(listed.split("; "))] == listed.split("; ")
    assert len(listed.split("; ")) + int(more.removesuffix(" more") or 0) == count
    item = Observation(
        name="collective.all_reduce.busbw", stage="benchmark", unit="B/s", scope="host", status=MEASURED, value=1.0,
        params={"nccl_other_settings": text},
    )  # fmt: skip
    assert documents.faults(to_json(item), "observation") == []


def test_unknown_parts_of_an_nccl_log_are_ignored() -> None:
    assert nccl_log.parse_transport("NCCL INFO something new") == ""
    assert nccl_log.parse_channels("NCCL INFO something new") is None
    assert nccl_log.parse_choice("NCCL INFO something new") == {}
    assert nccl_log.parse_choice("AllReduce: 8 Bytes -> Algo 99 proto 2 time 1") == {"protocol": "SIMPLE"}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (b"MNNVL (cliqueSize 72) is available\nbut not working", "MNNVL (cliqueSize 72) is available but not working"),
        (b"\x1b[2J\xff", "[2J\ufffd"),
        (b"x" * 5000, "x" * 400),
    ],
)
def test_nccl_error_has_the_last_message(last: bytes, expected: str) -> None:
    library: Any = SimpleNamespace(ncclGetErrorString=lambda code: b"system error", ncclGetLastError=lambda comm: last)
    assert error_text(library, 2) == f"system error: {expected}"


@pytest.mark.parametrize("more", [{}, {"ncclGetLastError": lambda comm: None}, {"ncclGetLastError": lambda comm: b""}])
def test_nccl_error_without_a_last_message_has_only_the_text_of_its_code(more: dict[str, Any]) -> None:
    library: Any = SimpleNamespace(ncclGetErrorString=lambda code: b"system error", **more)
    assert error_text(library, 2) == "system error"


def test_store_wait_times_out(tmp_path: Path) -> None:
    """The readiness check catches the same two types of errors (`STORE_ERRORS`)."""
    with pytest.raises((RuntimeError, ValueError)):
        dist.HashStore().wait(["missing"], timedelta(seconds=0.1))


@pytest.mark.parametrize("benchmark", [group_copy, peer_copy])
def test_copies_between_gpus_measure_nothing_on_a_host_with_one_gpu(tmp_path: Path, benchmark: ModuleType) -> None:
    rank = context(tmp_path)
    benchmark.run(rank, HARDWARE[benchmark.__name__.rpartition(".")[2]].settings)
    assert rank.observations == []
