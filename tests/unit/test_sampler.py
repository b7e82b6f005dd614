"""Ten samples a second: what of them is told, to everybody who scrapes, and what a GPU that hangs or is lost costs."""

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
AT_WORK = GpuSample(power=665.0, clock=1980e6, temperature=60.0, reasons=0, memory_clock=3201e6)
DIP = AT_WORK._replace(power=280.0, clock=990e6, reasons=0x4)
LOST = Absent(status="error", reason="NVML: GPU is lost")

Told = dict[str, float]


def told(samples: GpuHistory) -> Told:
    """Sample name, and its label beside the GPU's own -> value."""
    found: Told = {}

    def add(name: str, value: float, suffix: str = "", **labels: str) -> None:
        more = [f"{key}={text}" for key, text in labels.items() if key not in ("gpu", "uuid")]
        found[" ".join([(name + suffix).removeprefix("rackproof_gpu_"), *more])] = value

    samples.export(add)
    return found


def sampled(*beats: GpuSample | Absent, bounds: GpuLimits | Absent = H200, window_s: float = 100.0) -> GpuHistory:
    """A GPU that showed these, a tenth of a second apart, until now."""
    samples, now = GpuHistory(0, window_s), time.monotonic()
    samples.set_limits(now, bounds)
    for number, beat in enumerate(beats, 1 - len(beats)):
        samples.add(now + number / 10, beat)
    return samples


def test_a_dip_of_one_sample_is_in_the_window() -> None:
    found = told(sampled(*[AT_WORK] * 9, DIP))
    assert found["power_window_min_watts"] == 280.0
    assert found["power_window_mean_watts"] == pytest.approx(626.5)
    assert found["power_window_max_watts"] == 665.0
    assert found["clock_sm_window_min_hertz"] == 990e6
    assert found["clock_memory_window_min_hertz"] == found["clock_memory_window_max_hertz"] == 3201e6
    assert found["temperature_window_max_celsius"] == 60.0
    assert found["window_samples"] == found["samples_total"] == 10


def test_what_is_older_than_the_window_stays_in_histograms_and_counters() -> None:
    found = told(sampled(DIP, DIP, *[AT_WORK] * 20, window_s=1.55))
    assert (found["power_window_min_watts"], found["window_samples"]) == (665.0, 16)
    assert found["samples_total"] == found["power_of_limit_ratio_count"] == 22
    assert found["throttle_sampled_seconds_total reason=power_cap"] == pytest.approx(0.1)
    assert found["throttle_sampled_seconds_total reason=hw_thermal"] == 0.0


def test_histograms_count_as_prometheus_wants_it() -> None:
    found = told(sampled(AT_WORK, DIP, AT_WORK._replace(power=700.0), AT_WORK._replace(power=730.0)))
    counts = [found[f"power_of_limit_ratio_bucket le={bound}"] for bound in (*BUCKETS, "+Inf")]
    assert counts == sorted(counts)
    assert [found[f"power_of_limit_ratio_bucket le={bound}"] for bound in ("0.3", "0.4", "0.95", "1.0", "+Inf")] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert found["power_of_limit_ratio_sum"] == pytest.approx((665 + 280 + 700 + 730) / 700)
    assert found["clock_sm_of_max_ratio_bucket le=0.5"] == 1
    assert found["clock_sm_of_max_ratio_bucket le=1.0"] == found["clock_sm_of_max_ratio_count"] == 4


def test_time_without_samples_is_not_counted_as_throttled() -> None:
    samples = sampled(DIP)
    samples.add(time.monotonic() + 60, DIP)
    assert told(samples)["throttle_sampled_seconds_total reason=power_cap"] == 1.0


def test_a_lost_gpu_keeps_its_counts_and_tells_no_figures() -> None:
    found = told(sampled(LOST, LOST))
    assert found == {"samples_total": 0, "sample_failures_total": 2, "window_samples": 0}


def test_a_gpu_without_a_limit_has_no_share_of_it() -> None:
    found = told(sampled(AT_WORK, bounds=GpuLimits("GPU-1", 0.0, 1980e6)))
    assert (found["power_of_limit_ratio_count"], found["clock_sm_of_max_ratio_count"]) == (0, 1)


def test_another_gpu_in_the_same_place_begins_anew() -> None:
    samples = sampled(*[DIP] * 5)
    samples.set_limits(time.monotonic(), H200._replace(uuid="GPU-2"))
    found = told(samples)
    assert found["window_samples"] == found["power_of_limit_ratio_count"] == 0


# ---- against the library ----

PROGRAM = """
import json, sys, time
from agent.exporter import sampler
sampler.STUCK_S, sampler.CHECK_S, sampler.RETRY_S = 0.5, 0.1, 1.0
sampling = sampler.GpuSampler(hz=50, window_s=30)
def told():
    try:
        found = sampling.collect()
    except OSError as error:
        return str(error)
    return {
        " ".join([sample.name.removeprefix("rackproof_"), *(sample.labels.get(key, "") for key in ("gpu", "reason"))]).strip():
        sample.value for family in found for sample in family.samples if not sample.name.endswith("_bucket")
    }
told()
for seconds, later in zip(sys.argv[2::2], sys.argv[3::2]):
    time.sleep(float(seconds))
    print(json.dumps(told()), flush=True)
    with open(sys.argv[1], "a") as scenario:
        scenario.write(later)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def sample(library: Path, tmp_path: Path) -> Callable[..., list[Told]]:
    """Runs a sampler; what it tells after so many seconds each, and what happens then."""

    def run(base: str, *steps: str) -> list[Told]:
        scenario = nvml.write(tmp_path / "now", base)
        said = nvml.python(["-c", PROGRAM, scenario, *steps], library, scenario)
        return [json.loads(line) for line in said.splitlines()]

    return run


def test_every_gpu_is_sampled_and_a_fault_that_comes_later_is_seen(sample: Callable[..., list[Told]]) -> None:
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


def test_a_gpu_that_hangs_grows_old_and_the_others_beat_on(sample: Callable[..., list[Told]]) -> None:
    before, hung, later = sample("healthy-h200x4", "1.0", "gpu.1.ClockInfo.1=~60s\n", "1.6", "", "1.0", "")
    assert hung["gpu_sampled_timestamp_seconds 1"] == later["gpu_sampled_timestamp_seconds 1"]
    assert hung["gpu_samples_total 1"] == later["gpu_samples_total 1"]
    for gpu in (0, 2, 3):
        assert later["gpu_samples_total 0"] - hung["gpu_samples_total 0"] > 20
        assert later[f"gpu_sampled_timestamp_seconds {gpu}"] - before[f"gpu_sampled_timestamp_seconds {gpu}"] > 2


def test_a_lost_gpu_is_counted_and_comes_back(sample: Callable[..., list[Told]]) -> None:
    mended = f"include={nvml.scenario('healthy-h200x4')}\n"
    before, lost, back = sample("healthy-h200x4", "1.0", "gpu.3.*=!15\n", "1.5", mended, "2.5", "")
    assert before["gpu_sample_failures_total 3"] == 0
    assert lost["gpu_sample_failures_total 3"] >= 40
    assert lost["gpu_samples_total 0"] > before["gpu_samples_total 0"]
    assert back["gpu_samples_total 3"] > lost["gpu_samples_total 3"]


def test_without_a_driver_there_is_nothing_to_sample_and_one_that_fails_is_told(
    sample: Callable[..., list[Told]],
) -> None:
    assert sample("driver-not-loaded", "0.5", "") == [{}]
    assert sample("version-mismatch", "0.5", "") == ["NVML: RM has detected an NVML/RM version mismatch."]
