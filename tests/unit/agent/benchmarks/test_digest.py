"""Test the digest benchmark: its workloads, wrong results, wrong copies, and data types that a device or torch does not have."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agent.benchmarks.compute import digest, digest_workloads
from agent.benchmarks.runtime import context as runtime_context
from agent.benchmarks.runtime.context import Context
from schemas.benchmarks import CPU_DIGEST_WORKLOADS, DIGEST_WORKLOADS
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, SKIPPED, UNSUPPORTED
from tests.unit.agent.benchmarks.test_measuring import context, values

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"size": 64, "seconds": 0.0, "workloads": [], "peer_copies": []}


def flip(result: torch.Tensor, index: int, bit: int) -> None:
    """Flip a bit of the word at `index` of the result, in place. Words have 16 bits if the elements have 16 bits, else 32."""
    words = result.view(-1).view(torch.int16 if result.element_size() == 2 else torch.int32)
    words[index] ^= -(1 << 31) if bit == 31 else -(1 << 15) if (bit, result.element_size()) == (15, 2) else 1 << bit


def test_catalogue_lists_every_workload() -> None:
    assert set(DIGEST_WORKLOADS) == set(digest_workloads.WORKLOADS)
    runnable = {name for name in DIGEST_WORKLOADS if not digest_workloads.unsupported_workload(name, CPU)}
    assert runnable == set(CPU_DIGEST_WORKLOADS)
    assert BENCHMARKS["digest"].choices["workloads"] == DIGEST_WORKLOADS


@pytest.mark.parametrize("workload", CPU_DIGEST_WORKLOADS)
@pytest.mark.parametrize("size", [64, 200])
def test_workload_has_the_same_finite_result_each_time(workload: str, size: int) -> None:
    first, second = (digest_workloads.WORKLOADS[workload](size, CPU) for _ in range(2))
    results = [first.compute().clone(), first.compute().clone(), second.compute().clone()]
    factors = digest.digest_factors(results[0])
    assert len({int(digest.compute_digest(result, factors)) for result in results}) == 1
    assert torch.isfinite(results[0].double()).all()
    assert results[0].float().std() > 0


@pytest.mark.parametrize(
    ("workload", "reference"),
    [
        ("gemm_fp64", lambda left, right: left @ right),
        ("gemm_int8", lambda left, right: left @ right.t()),
    ],
)
def test_fp64_and_int8_products_are_right(workload: str, reference: Any) -> None:
    result = digest_workloads.WORKLOADS[workload](64, CPU).compute()
    factors = [digest_workloads._random(64, CPU, number) for number in range(2)]
    if workload == "gemm_int8":
        factors = [(factor * 32).round().clamp(-127, 127) for factor in factors]
    assert torch.allclose(result.double(), reference(*(factor.double() for factor in factors)))


def test_sort_returns_numbers_in_order_and_their_positions() -> None:
    values, positions = digest_workloads.WORKLOADS["sort"](32, CPU).compute().view(2, -1)
    numbers = digest_workloads._random(32, CPU, 13).view(-1)
    assert torch.equal(values.view(torch.float32), numbers.sort().values)
    assert torch.equal(numbers[positions], values.view(torch.float32))


@pytest.mark.parametrize("workload", CPU_DIGEST_WORKLOADS)
def test_any_flipped_bit_of_a_result_changes_its_digest(workload: str) -> None:
    result = digest_workloads.WORKLOADS[workload](16, CPU).compute()
    factors = digest.digest_factors(result)
    right = int(digest.compute_digest(result, factors))
    bits = 16 if result.element_size() == 2 else 32
    for index in range(0, factors.numel(), 7):
        for bit in range(bits):
            flip(result, index, bit)
            assert int(digest.compute_digest(result, factors)) != right, (index, bit)
            flip(result, index, bit)


def test_two_flipped_signs_of_fp64_numbers_change_the_digest() -> None:
    result = torch.randn(8, 8, dtype=torch.float64)
    factors = digest.digest_factors(result)
    right = int(digest.compute_digest(result, factors))
    for first, second in ((0, 1), (0, 2), (3, 40)):
        wrong = result.clone().view(-1)
        wrong[[first, second]] *= -1
        assert int(digest.compute_digest(wrong, factors)) != right


def test_copy_that_is_always_wrong_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stuck data line causes the same error each time, so a comparison of the copies with each other would not find it."""

    def stuck(size: int, device: torch.device) -> digest.Computation:
        right = digest_workloads._copy(size, device)

        def compute() -> torch.Tensor:
            return right.compute() | 1 << 5

        return digest.Computation(compute, right.expected)

    monkeypatch.setitem(digest.WORKLOADS, "copy", stuck)
    rank = context(tmp_path)
    digest.run(rank, {**SETTINGS, "workloads": ["copy"]})
    (mismatches,) = (item for item in rank.observations if item.name == "digest.mismatches")
    assert mismatches.value == mismatches.params["repetitions"] == 5


def test_successive_copies_differ_in_every_bit() -> None:
    """Otherwise a copy that the device skips could remain undetected."""
    computation = digest_workloads._copy(16, CPU)
    assert computation.expected is not None
    assert torch.equal(computation.compute(), computation.expected)
    first, second = computation.expected
    assert torch.equal(first, ~second)


@pytest.mark.parametrize("workload", ["gemm_tf32", "gemm_fp8_e4m3", "gemm_fp8_e5m2", "gemm_fp4"])
def test_data_type_that_a_device_lacks_is_unsupported(tmp_path: Path, workload: str) -> None:
    rank = context(tmp_path)
    digest.run(rank, {**SETTINGS, "workloads": [workload]})
    assert [(item.name, item.status) for item in rank.observations] == [
        ("digest.value", UNSUPPORTED),
        ("digest.mismatches", UNSUPPORTED),
    ]
    assert rank.observations[0].reason == f"no {workload.split('_')[1]} on a CPU"


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((8, 0), "no fp4 before compute capability 10.0"),
        ((9, 0), "no fp4 before compute capability 10.0"),
        ((10, 0), ""),
    ],
)
def test_fp4_needs_blackwell_and_a_torch_with_fp4(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch, "float4_e2m1fn_x2", torch.uint8, raising=False)
    gpu = torch.device("cuda", 0)
    assert digest_workloads.unsupported_workload("gemm_fp4", gpu) == reason
    assert digest_workloads.unsupported_workload("attention", gpu) == ""
    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    assert digest_workloads.unsupported_workload("gemm_fp4", gpu) == (reason or f"torch {torch.__version__} has no fp4")


def run_ranks(tmp_path: Path, ranks: int, **over: Any) -> list[Context]:
    """Run the digest benchmark with copies to peers on `ranks` ranks of one host at the same time; return their contexts."""
    store = dist.HashStore()
    contexts = [context(tmp_path, store, rank, ranks, timeout_s=20.0) for rank in range(ranks)]
    for rank in contexts:
        rank.kind = "gpu"
        rank.begin("digest")
    threads = [
        threading.Thread(target=digest.run, args=(rank, {**SETTINGS, "peer_copies": ["round_trip"], **over}))
        for rank in contexts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return contexts


def test_wrong_copy_names_both_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit 9 is always 0 in the copies that rank 2 makes to rank 0. All devices are the CPU, and each rank is a thread.

    The name of a thread is the number of its rank, so that `copies` can find out which rank calls it.
    """
    copied: list[tuple[int, int]] = []

    def copies(size: int, device: torch.device, peer: torch.device) -> digest.Computation:
        rank = int(threading.current_thread().name)
        copied.append((rank, peer.index))
        right = digest_workloads.peer_copy(size, device, CPU)
        if (rank, peer.index) != (2, 0):
            return right
        return digest.Computation(lambda: right.compute() & ~(1 << 9), right.expected)

    monkeypatch.setattr(digest, "peer_copy", copies)
    original = digest.run

    def run_in_named_thread(rank: Context, settings: dict[str, Any]) -> None:
        threading.current_thread().name = str(rank.local_rank)
        original(rank, settings)

    monkeypatch.setattr(digest, "run", run_in_named_thread)
    ranks = run_ranks(tmp_path, 3)
    by_scope = {item.scope: item for rank in ranks for item in rank.observations}
    assert sorted(copied) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert set(by_scope) == {f"gpu={first},peer={second}" for first, second in copied}
    assert {(item.name, item.status) for item in by_scope.values()} == {("digest.wrong_peer_copies", MEASURED)}
    assert {scope for scope, item in by_scope.items() if item.value} == {"gpu=2,peer=0"}
    assert by_scope["gpu=2,peer=0"].value == by_scope["gpu=2,peer=0"].params["repetitions"]


def test_peer_copies_need_a_second_gpu_that_is_not_lost(tmp_path: Path) -> None:
    rank = context(tmp_path, ranks=2)
    rank.kind, rank.lost = "gpu", {1: "gone"}
    digest.run(rank, {**SETTINGS, "peer_copies": ["round_trip"]})
    (item,) = rank.observations
    assert (item.scope, item.status, item.reason) == ("gpu=0,peer=1", SKIPPED, "local rank 1 gone")
    for kind, ranks in (("gpu", 1), ("cpu", 2)):
        alone = context(tmp_path, ranks=ranks)
        alone.kind, alone.lost = kind, {1: "gone"}
        digest.run(alone, {**SETTINGS, "workloads": ["rng"], "peer_copies": ["round_trip"]})
        assert values(alone, "digest.mismatches") == [0]
        assert values(alone, "digest.wrong_peer_copies") == []


def test_version_of_cublas_is_that_of_the_loaded_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0000 08:01 1 /usr/lib/libc.so.6\n")
    assert runtime_context._cublas_version(maps) == ""
    maps = tmp_path / "with_cublas"
    maps.write_text("7f00-7f01 r-xp 0000 08:01 1    /opt/nvidia cublas/lib/libcublas.so.12\n")

    class Library:
        def __init__(self, path: str) -> None:
            assert path == "/opt/nvidia cublas/lib/libcublas.so.12"

        def cublasGetProperty(self, part: int, number: Any) -> int:  # noqa: N802 - name of cuBLAS
            number._obj.value = (12, 8, 4)[part]
            return 0

    monkeypatch.setattr(runtime_context.ctypes, "CDLL", Library)
    assert runtime_context._cublas_version(maps) == "12.8.4"
