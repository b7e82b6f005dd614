"""The GPU sampler: its statistics over a time window, its histograms and counters, and GPUs that hang or are lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.exporter.sampler import BUCKETS, GpuHistory
from collectors.base import Absent
from collectors.nvml import GpuLimits, GpuSample
from tests.fakes import nvml

H200 = GpuLimits(uuid="GPU-1", power_limit=700.0, clock_max=1980e6)
BUSY = GpuSample(power=665.0, clock=1980e6, temperature=60.0, reasons=0, memory_clock=3201e6)
DIP = BUSY._replace(power=280.0, clock=990e6, reasons=0x4)
LOST = Absent(status="error", reason="NVML: GPU is lost")

Exported = dict[str, float]


def exported(history: GpuHistory) -> Exported:
    """Return `NAME LABEL=VALUE …` -> value, for each exported series.

    NAME is without `rackproof_gpu_`. The labels `gpu` and `uuid` are left out.
    """
    metrics: Exported = {}

    def add(name: str, value: float, suffix: str = "", **labels: str) -> None:
        more = [f"{key}={text}" for key, text in labels.items() if key not in ("gpu", "uuid")]
        metrics[" ".join([(name + suffix).removeprefix("rackproof_gpu_"), *more])] = value

    history.export(add)
    return metrics


def sampled(*values: GpuSample | Absent, limits: GpuLimits | Absent = H200, window_s: float = 100.0) -> GpuHistory:
    """Return the history of a GPU with these samples, 0.1 s apart. The time of the last sample is now."""
    history, now = GpuHistory(0, window_s), time.monotonic()
    history.set_limits(now, limits)
    for number, value in enumerate(values, 1 - len(values)):
        history.add(now + number / 10, value)
    return history


def test_window_contains_a_dip_of_one_sample() -> None:
    metrics = exported(sampled(*[BUSY] * 9, DIP))
    assert metrics["power_window_min_watts"] == 280.0
    assert metrics["power_window_mean_watts"] == pytest.approx(626.5)
    assert metrics["power_window_max_watts"] == 665.0
    assert metrics["clock_sm_window_min_hertz"] == 990e6
    assert metrics["clock_memory_window_min_hertz"] == metrics["clock_memory_window_max_hertz"] == 3201e6
    assert metrics["temperature_window_max_celsius"] == 60.0
    assert metrics["window_samples"] == metrics["samples_total"] == 10


def test_histograms_and_counters_keep_samples_older_than_the_window() -> None:
    metrics = exported(sampled(DIP, DIP, *[BUSY] * 20, window_s=1.55))
    assert (metrics["power_window_min_watts"], metrics["window_samples"]) == (665.0, 16)
    assert metrics["samples_total"] == metrics["power_of_limit_ratio_count"] == 22
    # No sample precedes the first one, so it adds no throttled time. The second sample adds 0.1 s.
    assert metrics["throttle_sampled_seconds_total reason=power_cap"] == pytest.approx(0.1)
    assert metrics["throttle_sampled_seconds_total reason=hw_thermal"] == 0.0


def test_histograms_are_cumulative() -> None:
    metrics = exported(sampled(BUSY, DIP, BUSY._replace(power=700.0), BUSY._replace(power=730.0)))
    counts = [metrics[f"power_of_limit_ratio_bucket le={bound}"] for bound in (*BUCKETS, "+Inf")]
    assert counts == sorted(counts)
    assert [metrics[f"power_of_limit_ratio_bucket le={bound}"] for bound in ("0.3", "0.4", "0.95", "1.0", "+Inf")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert metrics["power_of_limit_ratio_sum"] == pytest.approx((665 + 280 + 700 + 730) / 700)
    assert metrics["clock_sm_of_max_ratio_bucket le=0.5"] == 1
    assert metrics["clock_sm_of_max_ratio_bucket le=1.0"] == metrics["clock_sm_of_max_ratio_count"] == 4


def test_gap_of_60_s_between_throttled_samples_counts_as_1_s_of_throttling() -> None:
    """A sample adds at most `telemetry.MAX_GAP_S` of throttling."""
    history = sampled(DIP)
    history.add(time.monotonic() + 60, DIP)
    assert exported(history)["throttle_sampled_seconds_total reason=power_cap"] == 1.0


def test_lost_gpu_exports_only_the_numbers_of_samples_and_of_failures() -> None:
    metrics = exported(sampled(LOST, LOST))
    assert metrics == {"samples_total": 0, "sample_failures_total": 2, "window_samples": 0}


def test_gpu_without_a_power_limit_has_an_empty_histogram_of_power() -> None:
    metrics = exported(sampled(BUSY, limits=GpuLimits("GPU-1", 0.0, 1980e6)))
    assert (metrics["power_of_limit_ratio_count"], metrics["clock_sm_of_max_ratio_count"]) == (0, 1)


def test_another_gpu_at_the_same_index_starts_a_new_history() -> None:
    history = sampled(*[DIP] * 5)
    history.set_limits(time.monotonic(), H200._replace(uuid="GPU-2"))
    metrics = exported(history)
    assert metrics["window_samples"] == metrics["power_of_limit_ratio_count"] == 0


# ---- with the fake NVML library ----

PROGRAM = """
import json, sys, time
from agent.exporter import sampler
sampler.STUCK_S, sampler.CHECK_S, sampler.RETRY_S = 0.5, 0.1, 1.0
sampling = sampler.GpuSampler(hz=50, window_s=30)
def exported():
    try:
        metrics = sampling.collect()
    except OSError as error:
        return str(error)
    return {
        " ".join([sample.name.removeprefix("rackproof_"), *(sample.labels.get(key, "") for key in ("gpu", "reason"))]).strip():
        sample.value for family in metrics for sample in family.samples if not sample.name.endswith("_bucket")
    }
exported()
for seconds, later in zip(sys.argv[2::2], sys.argv[3::2]):
    time.sleep(float(seconds))
    print(json.dumps(exported()), flush=True)
    with open(sys.argv[1], "a") as scenario:
        scenario.write(later)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def sample(library: Path, tmp_path: Path) -> Callable[..., list[Exported]]:
    """Return a function that runs a sampler in steps, and returns what the sampler exports in each step.

    The first argument of that function is the name of a scenario (answers of the fake NVML). Two arguments follow for each
    step: the seconds to wait before the export, and the lines to append to the scenario after the export.
    """

    def run(base: str, *steps: str) -> list[Exported]:
        scenario = nvml.write(tmp_path / "now", base)
        output = nvml.python(["-c", PROGRAM, scenario, *steps], library, scenario)
        return [json.loads(line) for line in output.splitlines()]

    return run


def test_fault_during_sampling_appears_in_the_samples_of_its_gpu(sample: Callable[..., list[Exported]]) -> None:
    hot = "gpu.2.CurrentClocksEventReasons=0x40\ngpu.2.ClockInfo.1=210\ngpu.2.Temperature.0=91\n"
    before, after = sample("healthy-h200x4", "1.5", hot, "1.0", "")
    assert [before[f"gpu_power_window_max_watts {gpu}"] for gpu in range(4)] == [79.064, 76.44, 77.018, 76.291]
    assert all(before[f"gpu_window_samples {gpu}"] > 25 for gpu in range(4))
    assert after["gpu_clock_sm_window_min_hertz 2"] == 210e6
    assert after["gpu_clock_sm_window_max_hertz 2"] == 345e6
    assert after["gpu_temperature_window_max_celsius 2"] == 91
    assert after["gpu_throttle_sampled_seconds_total 2 hw_thermal"] == pytest.approx(0.9, abs=0.4)
    assert after["gpu_throttle_sampled_seconds_total 1 hw_thermal"] == 0
    assert 0 < after["sampler_cpu_seconds_total"] < 2


def test_hanging_gpu_does_not_stop_the_sampling_of_other_gpus(sample: Callable[..., list[Exported]]) -> None:
    before, hung, later = sample("healthy-h200x4", "1.0", "gpu.1.ClockInfo.1=~60s\n", "1.6", "", "1.0", "")
    assert hung["gpu_sampled_timestamp_seconds 1"] == later["gpu_sampled_timestamp_seconds 1"]
    assert hung["gpu_samples_total 1"] == later["gpu_samples_total 1"]
    for gpu in (0, 2, 3):
        assert later[f"gpu_samples_total {gpu}"] - hung[f"gpu_samples_total {gpu}"] > 20
        assert later[f"gpu_sampled_timestamp_seconds {gpu}"] - before[f"gpu_sampled_timestamp_seconds {gpu}"] > 2


def test_failures_of_a_lost_gpu_are_counted_and_it_is_sampled_again_when_it_returns(
    sample: Callable[..., list[Exported]],
) -> None:
    repaired = f"include={nvml.scenario('healthy-h200x4')}\n"
    before, lost, back = sample("healthy-h200x4", "1.0", "gpu.3.*=!15\n", "1.5", repaired, "2.5", "")
    assert before["gpu_sample_failures_total 3"] == 0
    assert lost["gpu_sample_failures_total 3"] >= 40
    assert lost["gpu_samples_total 0"] > before["gpu_samples_total 0"]
    assert back["gpu_samples_total 3"] > lost["gpu_samples_total 3"]


def test_sampler_exports_nothing_without_a_driver_and_fails_with_a_mismatched_driver(
    sample: Callable[..., list[Exported]],
) -> None:
    assert sample("driver-not-loaded", "0.5", "") == [{}]
    assert sample("version-mismatch", "0.5", "") == ["NVML: RM has detected an NVML/RM version mismatch."]
