"""Test the benchmark `pulse` on CPUs: products per period, timing of the periods, wrong products, and the common start of hosts.

`pulse` multiplies matrices in the first half of each period and is idle in the second half. The figure `pulse.work` is the mean
number of products per period.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from agent.benchmarks.compute import pulse
from agent.benchmarks.runtime.common_start import answer_hosts, measure_offset
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.key_store import KeyServer
from agent.sampling.power_wave import FAST_TELEMETRY
from schemas.catalogue import BENCHMARKS, settings
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation
from tests.clock_host import NAME, host_context, shifted

QUICK = {**(BENCHMARKS["pulse"].cpu_settings or {}), "periods_ms": [50], "alone_periods_ms": [50], "seconds": 0.3}
CHOSEN = settings("pulse", QUICK)
"""Six periods of 50 ms with all ranks under load, then periods of 50 ms in which each rank is under load alone."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch compute with one thread, as in the ranks that torchrun starts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def context(work: Path, store: dist.Store, local_rank: int = 0, ranks: int = 2, **over: Any) -> Context:
    """Return the context of a rank that runs pulse on a CPU."""
    work.mkdir(exist_ok=True)
    return Context(
        rank=local_rank,
        world_size=ranks,
        local_rank=local_rank,
        local_world_size=ranks,
        device=torch.device("cpu"),
        kind="cpu",
        devices=tuple(range(ranks)),
        world_scope="host",
        work=work,
        benchmark="pulse",
        **{"store": store, "timeout_s": 5.0, "stage": "benchmark", **over},
    )


def run_together(contexts: list[Context], chosen: dict[str, Any] = CHOSEN) -> None:
    def run(rank: Context) -> None:
        try:
            pulse.run(rank, chosen)
        finally:
            rank.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def figures(context: Context) -> dict[str, Observation]:
    return {item.name: item for item in context.observations}


def test_two_ranks_are_loaded_in_phase_and_then_one_at_a_time(tmp_path: Path) -> None:
    store = dist.HashStore()
    contexts = [context(tmp_path, store, rank) for rank in range(2)]
    run_together(contexts)
    for rank in contexts:
        values = figures(rank)
        assert values["pulse.wrong_products"].value == 0
        work, samples = values["pulse.work"], values["pulse.work"].samples
        assert samples is not None
        assert samples.n == 6
        assert float(work.value or 0) > 0
        assert work.params["period_ms"] == 50
        assert values["pulse.period"].samples is not None
        assert {"pulse.duty", "pulse.phase_error"} <= set(values)
        assert float(values["pulse.alone_work"].value or 0) > 0
        assert {item["params"]["sharing"] for item in rank.windows} == {"all_gpus", "alone"}
    works, shares = (
        [float(figures(rank)[f"pulse.{name}"].value or 0) for rank in contexts] for name in ("work", "work_share")
    )
    assert shares == pytest.approx([work / statistics.median(works) for work in works])
    windows = [{item["params"]["sharing"]: item for item in rank.windows} for rank in contexts]
    assert windows[0]["all_gpus"]["begin"] == windows[1]["all_gpus"]["begin"]
    first, second = sorted((of_rank["alone"]["begin"], of_rank["alone"]["end"]) for of_rank in windows)
    assert second[0] >= first[1], "the load of the second rank must begin after the load of the first rank has ended"
    assert list(tmp_path.glob(f"{FAST_TELEMETRY}.*")) == []


def test_delays_and_periods_of_a_wave_are_computed_from_its_times() -> None:
    """The third of four periods begins 0.06 s late and has no product, so three of four periods count as kept."""
    wave = pulse.Wave(
        start=100.0, period_s=0.1, work=[5, 5, 0, 4], begun=[100.0, 100.1, 100.26, 100.305], loaded_s=[0.05] * 4
    )
    assert wave.end == pytest.approx(100.4)
    assert wave.delays_s == pytest.approx([0.0, 0.0, 0.06, 0.005])
    assert wave.periods_s == pytest.approx([0.1, 0.16, 0.045])
    assert wave.mean_work == 3.5
    assert wave.kept_share == 0.75


def test_work_share_of_a_slow_rank_is_below_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow rank has 8 products per period, the others have 10, so the median of the host is 10."""

    def run_slowly(_: pulse.Load, end: float) -> int:
        time.sleep(max(0.0, end - time.monotonic()))
        return 8 if threading.current_thread().name == "slow" else 10

    monkeypatch.setattr(pulse.Load, "run_until", run_slowly)
    store = dist.HashStore()
    contexts = [context(tmp_path, store, rank, ranks=3) for rank in range(3)]
    threads = [
        threading.Thread(target=pulse.run, args=(rank, CHOSEN), name="slow" if number == 1 else f"rank {number}")
        for number, rank in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [figures(rank)["pulse.work_share"].value for rank in contexts] == [1.0, 0.8, 1.0]


def test_work_of_the_only_gpu_of_a_host_is_not_compared(tmp_path: Path) -> None:
    rank = context(tmp_path, dist.HashStore(), ranks=1)
    run_together([rank])
    share = figures(rank)["pulse.work_share"]
    assert (share.status, share.reason) == (UNSUPPORTED, "no other GPU of this host to compare with")


@pytest.mark.parametrize("wrong_at", [0, 9])
def test_wrong_product_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_at: int) -> None:
    build = pulse.build_product

    def build_wrong(*arguments: Any, **options: Any) -> Any:
        multiply, check = build(*arguments, **options)
        calls = iter(range(1 << 30))

        def multiply_wrongly() -> torch.Tensor:
            product = multiply()
            # `pulse` checks only product 0 and the last product of each period. Therefore all products after product 20 are
            # wrong, too (any small number would do). If product 0 is wrong, these products are equal to product 0. Then only the
            # check against the factors finds them.
            if (call := next(calls)) == wrong_at or call > 20:
                product[0, 0] += 1
            return product

        return multiply_wrongly, check

    monkeypatch.setattr(pulse, "build_product", build_wrong)
    rank = context(tmp_path, dist.HashStore(), ranks=1)
    run_together([rank])
    assert float(figures(rank)["pulse.wrong_products"].value or 0) >= 1


def test_wrong_products_are_reported_even_if_the_gpu_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(pulse, "_measure_alone", fail)
    monkeypatch.setattr(pulse.Load, "compare", lambda load: setattr(load, "wrong", load.wrong + 1))
    rank = context(tmp_path, dist.HashStore(), ranks=1)
    with pytest.raises(RuntimeError, match="unspecified"):
        pulse.run(rank, CHOSEN)
    assert figures(rank)["pulse.wrong_products"].value == 6, "one wrong product in each of six periods"
    assert list(tmp_path.glob(f"{FAST_TELEMETRY}.*")) == []


class HungEvent:
    """An event that the GPU never reaches, because the GPU hangs."""

    def record(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return whether the GPU has reached the event."""
        return False

    def synchronize(self) -> None:
        """Wait for longer than the test may take, as CUDA does if the GPU hangs."""
        time.sleep(60)


def test_benchmark_of_a_hung_gpu_times_out_and_reports_its_wrong_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each period with all GPUs under load has a wrong product. The GPU hangs later, in the periods with one GPU under load."""
    measure_alone = pulse._measure_alone

    def hang(rank: Context, load: pulse.Load, *arguments: Any) -> None:
        monkeypatch.setattr(pulse, "cuda_event", HungEvent)
        load._on_gpu = True
        measure_alone(rank, load, *arguments)

    monkeypatch.setattr(pulse, "_measure_alone", hang)
    monkeypatch.setattr(pulse.Load, "compare", lambda load: setattr(load, "wrong", load.wrong + 1))
    rank = context(tmp_path, dist.HashStore(), ranks=1, timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"the device did not finish within 0\.3 s"):
        pulse.run(rank, CHOSEN)
    assert time.monotonic() - began < 10
    assert figures(rank)["pulse.wrong_products"].value == 6, "one wrong product in each of six periods"


@pytest.mark.parametrize("pause_s", [0.0, 0.001])
def test_wait_for_an_event_ends_when_the_device_reaches_it(tmp_path: Path, pause_s: float) -> None:
    answers = iter([False, False, True])

    class Reached(HungEvent):
        def query(self) -> bool:
            return next(answers)

    context(tmp_path, dist.HashStore()).wait_for(cast(torch.cuda.Event, Reached()), pause_s)
    assert next(answers, None) is None


def test_data_type_that_the_device_lacks_is_unsupported(tmp_path: Path) -> None:
    rank = context(tmp_path, dist.HashStore(), ranks=1)
    pulse.run(rank, {**CHOSEN, "dtype": "fp8"})
    assert {(item.status, item.reason) for item in rank.observations} == {(UNSUPPORTED, "no fp8 on a CPU")}
    assert {item.name for item in rank.observations} >= {"pulse.work", "pulse.wrong_products", "pulse.kept_share"}


def test_rank_measures_its_own_work_if_the_other_rank_of_the_host_has_left(tmp_path: Path) -> None:
    store = dist.HashStore()
    broken = context(tmp_path, store, 0)
    broken.leave()
    rank = context(tmp_path, store, 1)
    run_together([rank])
    assert figures(rank)["pulse.work"].status == MEASURED
    assert figures(rank)["pulse.work_share"].status == UNSUPPORTED


def test_hosts_of_a_gang_are_in_phase(tmp_path: Path) -> None:
    """A gang is the hosts of one multi-node launch; here two hosts with two ranks each."""
    store, members = dist.HashStore(), ["h1", "h2"]
    contexts = [
        context(tmp_path / host, store, rank, node=node, stage="gang")
        for node, host in enumerate(members)
        for rank in range(2)
    ]
    for host in members:
        (tmp_path / host / "request.json").write_text(json.dumps({"members": members}))
    run_together(contexts)
    begins = [item["begin"] for rank in contexts for item in rank.windows]
    uncertainty = float(figures(contexts[0])["pulse.clock_uncertainty"].value or 0)
    assert len(begins) == 4
    assert max(begins) - min(begins) <= 2 * uncertainty + 1e-5  # threads of one machine have the same clock
    assert uncertainty > 0


SHIFT_S = -86_400.5
"""Seconds that are added to the clock of the second host, so that it is more than a day behind the clock of the first host."""


@pytest.fixture
def port() -> Iterator[int]:
    """Run a key-value store on the loopback interface; yield its TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving: list[Any] = []
        started = threading.Event()

        async def serve() -> None:
            serving.extend([asyncio.get_running_loop(), asyncio.create_task(KeyServer(NAME).serve(listener))])
            started.set()
            await asyncio.gather(*serving[1:], return_exceptions=True)

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert started.wait(10)
        yield listener.getsockname()[1]
        loop, task = serving
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def test_start_is_common_to_processes_whose_clocks_differ(port: int, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.clock_host", str(port), str(tmp_path), str(node), str(shift)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for node, shift in enumerate((0.0, SHIFT_S))
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    # Each process prints the common start, converted to the clock that both processes share, and its uncertainty.
    (first, uncertainty), (second, other_uncertainty) = ([float(part) for part in output.split()] for output in outputs)
    assert uncertainty == other_uncertainty
    assert 0 < uncertainty < 1
    assert abs(first - second) <= uncertainty


def test_offset_of_another_clock_is_measured_within_its_uncertainty(port: int, tmp_path: Path) -> None:
    with host_context(port, tmp_path, 0) as first, host_context(port, tmp_path, 1) as second:
        server = threading.Thread(target=answer_hosts, args=(first, "clock", [1], time.monotonic))
        server.start()
        offset = measure_offset(second, "clock", 0, "h1", partial(shifted, SHIFT_S))
        server.join()
    assert offset.seconds == pytest.approx(-SHIFT_S, abs=offset.uncertainty_s)
    assert 0 < offset.uncertainty_s < 1


def test_error_is_the_reason_of_every_missing_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent.benchmarks.local_runner import run_benchmark

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pulse, "build_product", fail)
    rank = context(tmp_path, dist.HashStore(), ranks=1)
    run_benchmark(rank, "pulse", QUICK)
    assert {item.status for item in rank.observations} == {ERROR}
    assert {item.reason for item in rank.observations} == {"RuntimeError: out of memory"}
    assert {item.name for item in rank.observations} >= {"pulse.work", "pulse.wrong_products", "pulse.kept_share"}
