"""A benchmark that finds wrong data reports how much is wrong, as a measured value, so that criteria can judge it.

If the device fails later, the benchmark still reports this value.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from agent.benchmarks.collectives import collective
from agent.benchmarks.compute import digest, gemm, stress
from agent.benchmarks.links import host_copy, pairs, peer_copy
from agent.benchmarks.memory import host_memory, integrity, memory
from agent.benchmarks.memory.wrong_words import WrongWords
from agent.benchmarks.runtime import timing
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training import inference
from schemas.benchmarks.hardware import HARDWARE
from schemas.benchmarks.training import TRAINING
from schemas.catalogue import settings
from schemas.records import ERROR, MEASURED
from tests import ROOT
from tests.unit.agent.benchmarks.test_measuring import context

GEMM = {"dtypes": ["fp32"], "size": 64, "precision": 1.0, "seconds": 0.01}
STRESS = {"dtypes": ["fp32"], "size": 64, "seconds": 0.05, "settle_seconds": 0.0}
MEMORY = {"size_bytes": 1 << 14, "precision": 1.0, "seconds": 0.001}
HOST_COPY = {"size_bytes": 1 << 12, "precision": 1.0, "seconds": 0.001}
LOST = "CUDA error: uncorrectable ECC error encountered"


def results(rank: Context) -> dict[str, Any]:
    """Return name -> value of each observation, or its status if it has no value. Check that no name occurs twice."""
    assert len({item.name for item in rank.observations}) == len(rank.observations)
    return {item.name: item.value if item.status == MEASURED else item.status for item in rank.observations}


def make_products_wrong(
    monkeypatch: pytest.MonkeyPatch, benchmark: ModuleType, is_wrong: Callable[[int], bool], fails_at: int = -1
) -> None:
    """Change one element of product n (counted from 0) if `is_wrong(n)` is true.

    Product number `fails_at` raises an error instead (-1: no product does).
    """
    build = benchmark.build_product

    def build_wrong(*arguments: Any, **options: Any) -> Any:
        multiply, count_wrong = build(*arguments, **options)
        calls = iter(range(1 << 30))

        def multiply_wrongly() -> torch.Tensor:
            call = next(calls)
            if call == fails_at:
                raise RuntimeError(LOST)
            product = multiply()
            product[7, 3] += 100 if is_wrong(call) else 0
            return product

        return multiply_wrongly, count_wrong

    monkeypatch.setattr(benchmark, "build_product", build_wrong)


@pytest.mark.parametrize(
    ("is_wrong", "fails_at", "expected"),
    [
        # `float` stands for any value. Only the first and the last product are checked, so at most 2 are counted as wrong.
        (lambda call: False, -1, {"gemm.throughput": float}),
        (lambda call: True, -1, {"gemm.wrong_products": 2, "gemm.throughput": ERROR}),
        (lambda call: call == 0, -1, {"gemm.wrong_products": 1, "gemm.throughput": ERROR}),
        (lambda call: call == 0, 2, {"gemm.wrong_products": 1, "gemm.throughput": ERROR}),
        (lambda call: False, 2, {"gemm.throughput": ERROR}),
    ],
)
def test_wrong_product_of_gemm_is_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_wrong: Callable[[int], bool],
    fails_at: int,
    expected: dict[str, Any],
) -> None:
    make_products_wrong(monkeypatch, gemm, is_wrong, fails_at)
    rank = context(tmp_path)
    gemm.run(rank, GEMM)
    result = results(rank)
    assert {name: type(value) if type(value) is float else value for name, value in result.items()} == expected


@pytest.mark.parametrize("wrong_at", [0, 1 << 20])
def test_wrong_product_of_stress_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_at: int) -> None:
    """The last product of each block is compared with product 0, so every block counts as wrong if product 0 is wrong.

    Product number 1 << 20 is never computed, so with this `wrong_at` no product is wrong.
    """
    make_products_wrong(monkeypatch, stress, lambda call: call == wrong_at)
    rank = context(tmp_path)
    stress.run(rank, STRESS)
    result = results(rank)
    assert result["stress.throughput"] > 0
    assert (result["stress.wrong_products"] > 0) == (wrong_at == 0)


@pytest.mark.parametrize("wrong_from", [5, 1 << 20])
def test_wrong_products_of_stress_are_reported_if_the_device_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_from: int
) -> None:
    """Products from number `wrong_from` on are wrong, and product 400 raises an error. With 1 << 20, no product is wrong."""
    make_products_wrong(monkeypatch, stress, lambda call: call >= wrong_from, fails_at=400)
    monkeypatch.setattr(stress, "BLOCK_S", 0.0)
    rank = context(tmp_path)
    stress.run(rank, {**STRESS, "seconds": 60.0, "size": 16})
    result = results(rank)
    assert result["stress.throughput"] == ERROR
    if wrong_from == 5:
        assert result["stress.wrong_products"] >= 1
    else:
        assert result["stress.wrong_products"] == ERROR


@pytest.mark.parametrize("op", [*memory.OPERATIONS])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_element_of_the_memory_benchmark_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, is_wrong: bool
) -> None:
    operation = memory.OPERATIONS[op]

    def build(count: int, device: torch.device) -> memory.Operation:
        work, count_wrong, moved = operation(count, device)
        variables = inspect.getclosurevars(work).nonlocals
        target = variables.get("target", variables.get("largest"))

        def work_wrongly() -> None:
            work()
            target.view(-1)[-1] += 1  # the last element only, which a check of every n-th element could miss

        return (work_wrongly if is_wrong else work), count_wrong, moved

    monkeypatch.setitem(memory.OPERATIONS, op, build)
    monkeypatch.setattr(memory, "CHECKED", 1000)
    rank = context(tmp_path)
    memory.run(rank, {**MEMORY, "ops": [op]})
    result = results(rank)
    if is_wrong:
        assert result == {"memory.wrong_elements": 1, "memory.bandwidth": ERROR}
    else:
        assert [*result] == ["memory.bandwidth"]
        assert result["memory.bandwidth"] > 0


@pytest.mark.parametrize("count", [1 << 18, (1 << 18) + 1])
def test_triad_of_whole_numbers_is_exact(count: int) -> None:
    """All results of `left + 3 * right` are below 4 * LARGEST. fp32 represents whole numbers up to 2^24 without rounding."""
    assert 4 * memory.LARGEST < 1 << 24
    work, count_wrong, _ = memory.OPERATIONS["triad"](count, torch.device("cpu"))
    work()
    assert count_wrong() == 0


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host", "both_ways"])
@pytest.mark.parametrize("wrong", [0, 2])
def test_wrong_byte_of_a_host_copy_is_counted(tmp_path: Path, direction: str, wrong: int) -> None:
    buffers = object.__new__(host_copy.CopyBuffers)  # without __init__, which pins memory and therefore needs a GPU
    buffers.size = HOST_COPY["size_bytes"]
    buffers._host = [torch.ones(buffers.size, dtype=torch.uint8) for _ in range(2)]
    buffers._device = [torch.ones(buffers.size, dtype=torch.uint8) for _ in range(2)]
    for way in (0, 1):
        buffers._device[way][:wrong] = 7
    buffers.copy = lambda direction: lambda: None  # type: ignore[method-assign]
    rank = context(tmp_path)
    host_copy._measure(rank, HOST_COPY, buffers, direction, "alone", "local")
    result = results(rank)
    if wrong:
        expected = 2 * wrong if direction == "both_ways" else wrong
        assert result == {"host_copy.wrong_bytes": expected, "host_copy.bandwidth": ERROR}
        assert rank.observations[0].params["direction"] == direction
    else:
        assert [*result] == ["host_copy.bandwidth"]
        assert result["host_copy.bandwidth"] > 0


class WrongPair:
    """A pair of devices whose copies have wrong bytes."""

    wrong = 3

    def __init__(self, rank: Context, other: torch.device, size: int) -> None:
        pass

    def sample(self, direction: str, precision: float, seconds: float) -> Any:
        """Return the seconds of six copies."""
        return peer_copy.SampleSeries(seconds=[1.0] * 6, stopped="time")

    def count_wrong(self) -> int:
        """Return how many bytes are wrong."""
        return self.wrong


@pytest.mark.parametrize("fails", [False, True])
def test_wrong_byte_of_a_peer_copy_is_counted_for_the_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def time_small_copies(rank: Context, other: torch.device) -> tuple[list[float], int]:
        if fails:
            raise TimeoutError(LOST)
        return [1e-6] * 6, 0

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *devices: True)
    monkeypatch.setattr(peer_copy, "DevicePair", WrongPair)
    monkeypatch.setattr(peer_copy, "_time_small_copies", time_small_copies)
    rank = context(tmp_path, ranks=2)
    settings = {"directions": ["one_way"], "size_bytes": 64, "precision": 1.0, "seconds": 0.1}
    if fails:
        with pytest.raises(TimeoutError):
            peer_copy._measure_pair(rank, settings, 1)
    else:
        peer_copy._measure_pair(rank, settings, 1)
    result = results(rank)
    assert (result["peer_copy.wrong_bytes"], result["peer_copy.bandwidth"]) == (3, ERROR)
    assert {item.scope for item in rank.observations} == {"cpu=0,peer=1"}
    WrongPair.wrong = 0
    healthy = context(tmp_path, ranks=2)
    monkeypatch.setattr(peer_copy, "_time_small_copies", lambda rank, other: ([1e-6] * 6, 0))
    peer_copy._measure_pair(healthy, settings, 1)
    WrongPair.wrong = 3
    assert [*results(healthy)] == ["peer_copy.access", "peer_copy.bandwidth", "peer_copy.latency"]


class WrongCollective(collective.CollectiveBuffers):
    """Buffers whose first check finds `wrong` wrong elements. The second check fails with `error`."""

    wrong, error = 3, TimeoutError(LOST)

    def __init__(self, *arguments: Any) -> None:
        self.moved, self._checks = 64, iter(range(1 << 30))
        self.run = lambda: None

    def run_and_check(self) -> torch.Tensor:
        """Return the number of wrong elements."""
        if next(self._checks):
            raise self.error
        return torch.tensor(self.wrong)


@pytest.mark.parametrize("wrong", [0, 3])
def test_wrong_elements_before_a_hang_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    monkeypatch.setattr(WrongCollective, "wrong", wrong)
    monkeypatch.setattr(collective, "CollectiveBuffers", WrongCollective)
    monkeypatch.setattr(collective.dist, "get_backend", lambda: "gloo")
    rank = context(tmp_path)
    sums = iter([2.0 * wrong])  # each of 2 ranks has `wrong` wrong elements; a second sum, after the hang, would fail
    monkeypatch.setattr(rank, "sum_over_ranks", lambda value: next(sums))
    monkeypatch.setattr(rank, "min_max_over_ranks", lambda code: (code, code))
    monkeypatch.setattr(rank, "max_over_ranks", list)
    case = collective.Case("all_reduce", "in_place", 64)
    with pytest.raises(TimeoutError):
        collective._measure(rank, case, {"precision": 1.0, "seconds": 0.001}, None, {})
    assert results(rank) == ({"collective.all_reduce.wrong_elements": 6} if wrong else {})
    assert all((item.scope, item.params["placement"]) == ("host", "in_place") for item in rank.observations)


class EndlessEvent:
    """An event that the device never reaches, because the device hangs."""

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return False: the device has not reached the event."""
        return False


def test_wait_for_a_hanging_device_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "cuda_event", EndlessEvent)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    rank = context(tmp_path, timeout_s=0.05)
    rank.synchronize_devices([torch.device("cpu")])
    with pytest.raises(TimeoutError, match=r"the device did not finish within 0\.05 s"):
        rank.synchronize_devices([torch.device("cpu"), torch.device("cuda", 1)])


def test_no_rank_waits_for_a_device_without_a_time_limit() -> None:
    """`mnnvl_rank` may wait without a limit, because its process is killed after a time limit."""
    waits = re.compile(r"torch\.cuda\.synchronize\(|\b(event|last|done|end|stream)\.synchronize\(")
    sources = [path for path in (ROOT / "agent" / "benchmarks").rglob("*.py") if path.name != "mnnvl_rank.py"]
    assert [path.name for path in sources if waits.search(path.read_text())] == []


class SwappingTransport:
    """A fake transport. It delivers what the peer would send, with two elements swapped if `swaps` is true."""

    def __init__(self, swaps: bool) -> None:
        self._swaps = swaps

    def exchange(self, send: torch.Tensor, receive: torch.Tensor, peer: int) -> Callable[[], None]:
        """Return a function that writes the data of rank `peer` to `receive`."""

        def call() -> None:
            receive.copy_(send + peer)  # element by element, rank n sends what this rank (rank 0) sends, plus n
            if self._swaps and receive.numel() > 3:
                receive[[2, 3]] = receive[[3, 2]]

        return call


@pytest.mark.parametrize("swaps", [False, True])
def test_element_at_the_wrong_place_is_counted_for_the_pair(tmp_path: Path, swaps: bool) -> None:
    rank = context(tmp_path)
    exchange = pairs.PairExchange(rank, cast(pairs.PairTransport, SwappingTransport(swaps)), 1 << 12, 0.01)
    pairs._measure_pair(rank, exchange, "h2", 5, 1)
    result = results(rank)
    if swaps:
        assert result == {"pairs.wrong_elements": 2, "pairs.bandwidth": ERROR, "pairs.latency": ERROR}
    else:
        assert {*result} == {"pairs.bandwidth", "pairs.latency"}
    assert {(item.scope, item.params["rail"]) for item in rank.observations} == {("cpu=0,partner=h2", 0)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_differing_bytes_are_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    rank = context(tmp_path)
    source = torch.arange(100, dtype=torch.uint8).to(dtype)
    target = source.clone()
    assert peer_copy._count_differing(rank, source, target) == 0
    target.view(torch.uint8)[[1, 50]] ^= 4
    assert peer_copy._count_differing(rank, source, target) == 2


def fail_at(function: Callable[..., Any], call: int, error: Exception) -> Callable[..., Any]:
    """Return a wrapper of `function` that raises `error` in its call number `call`, counted from 0."""
    calls = iter(range(1 << 30))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise error
        return function(*arguments, **options)

    return failing


ERRORS = [
    RuntimeError(LOST),
    TimeoutError("the device did not finish within 60 s"),
    torch.OutOfMemoryError("no memory"),
]


def run_with_error(error: Exception, run: Callable[[], None], *caught: type[Exception]) -> None:
    """Run a benchmark in which `error` occurs. `caught`: exceptions that the benchmark handles; it must raise any other."""
    if isinstance(error, caught):
        run()
        return
    with pytest.raises(type(error)):
        run()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_words_are_reported_if_the_device_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_wrong: bool
) -> None:
    compare = WrongWords.compare

    def compare_wrongly(self: WrongWords, words: torch.Tensor, *arguments: Any) -> None:
        if is_wrong:
            words[5] ^= 8
        compare(self, words, *arguments)

    monkeypatch.setattr(WrongWords, "compare", fail_at(compare_wrongly, 3, error))
    monkeypatch.setattr(integrity, "free_bytes", lambda device: 1 << 22)
    rank = context(tmp_path)
    chosen = {"patterns": ["zeros"], "share": 0.9, "most_bytes": 1 << 20, "seconds": 0.0}
    run_with_error(error, lambda: integrity.run(rank, chosen), torch.OutOfMemoryError)
    counts = [(item.status, item.value) for item in rank.observations if item.name == "integrity.wrong_words"]
    if is_wrong:
        assert counts == [(MEASURED, 3)]
        assert [item.params["expected"] for item in rank.observations if item.name == "integrity.error"] == [
            f"{0:#018x}"
        ] * 3
    else:
        assert counts == ([(ERROR, None)] if isinstance(error, torch.OutOfMemoryError) else [])


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_digests_are_reported_if_the_device_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_wrong: bool
) -> None:
    def prepare(size: int, device: torch.device) -> digest.Computation:
        right, wrong, calls = torch.ones(size, size), torch.zeros(size, size), iter(range(1 << 30))
        compute = fail_at(lambda: wrong if is_wrong and next(calls) == 3 else right, 13, error)
        return digest.Computation(compute)

    monkeypatch.setitem(digest.WORKLOADS, "gemm", prepare)
    rank = context(tmp_path)
    chosen = {"size": 16, "seconds": 60.0, "workloads": ["gemm"], "peer_copies": []}
    run_with_error(error, lambda: digest.run(rank, chosen), RuntimeError)
    result = results(rank)
    is_caught = isinstance(error, RuntimeError)
    expected: dict[str, Any] = {"digest.value": ERROR, "digest.mismatches": ERROR} if is_caught else {}
    assert result == expected | ({"digest.mismatches": 1} if is_wrong else {})


@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_peer_copies_are_reported_if_the_device_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    def repeat(context: Context, computation: object, seconds: float, digests: digest.Digests) -> None:
        digests.mismatches, digests.count = int(is_wrong), 9
        raise RuntimeError(LOST)

    monkeypatch.setattr(digest, "_repeat", repeat)
    monkeypatch.setattr(digest, "peer_copy", lambda *arguments: None)
    rank = context(tmp_path, ranks=2)
    rank.is_present = lambda rank: True  # type: ignore[method-assign]
    rank.host_barrier = lambda name="": None  # type: ignore[method-assign]
    digest._copy_to_peers(rank, "round_trip", 16, 1.0)
    assert results(rank) == {"digest.wrong_peer_copies": 1 if is_wrong else ERROR}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_tokens_are_reported_if_the_device_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, is_wrong: bool
) -> None:
    right, calls = inference.Decoder.decode, iter(range(1 << 30))

    def decode(self: inference.Decoder, *arguments: Any) -> torch.Tensor:
        scores = right(self, *arguments)
        return -scores if is_wrong and next(calls) == 20 else scores

    monkeypatch.setattr(inference.Decoder, "decode", fail_at(decode, 25, error))
    rank = context(tmp_path)
    chosen = {**(TRAINING["inference"].cpu_settings or {}), "steps": 10, "seconds": 60.0}
    with pytest.raises(type(error)):
        inference.run(rank, settings("inference", chosen))
    result = results(rank)
    if is_wrong:
        assert result["inference.wrong_tokens"] >= 1
    else:
        assert result == {}


@pytest.mark.parametrize("wrong", [0, 4])
def test_wrong_elements_of_host_memory_are_reported_if_a_thread_does_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    def stream(self: host_memory.HostMemory, *arguments: Any) -> float:
        self.wrong[min(self.wrong)] += wrong
        return 1e9

    monkeypatch.setattr(host_memory.HostMemory, "stream", fail_at(stream, 1, TimeoutError("1 thread did not finish")))
    rank = context(tmp_path)
    chosen = {**HARDWARE["host_memory"].settings, **(HARDWARE["host_memory"].cpu_settings or {})}
    with pytest.raises(TimeoutError):
        host_memory.run(rank, chosen)
    counts = [item.value for item in rank.observations if item.name == "host_memory.wrong_elements"]
    assert counts == ([4] if wrong else [])
