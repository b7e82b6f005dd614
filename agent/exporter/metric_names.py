"""The names under which Prometheus knows what is exported beside the collectors' own families, and how those are named.

What is exported takes its name, its type and its help text from here; docs/metrics.md is made out of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.readings import PROMETHEUS_SUFFIX

PREFIX = "rackproof_"

GAUGE, COUNTER, HISTOGRAM, INFO = "gauge", "counter", "histogram", "info"
GPU = ("gpu", "uuid")


@dataclass(frozen=True, kw_only=True)
class Own:
    """A family of the exporter's own."""

    name: str
    """As Prometheus stores it; of a histogram without `_bucket`, `_sum` and `_count`."""
    help: str
    labels: tuple[str, ...] = ()
    """In brackets one that some series of the family lack."""
    kind: str = GAUGE


def exported(name: str, unit: str) -> str:
    """The name of one of our families, without the `_total` of a counter."""
    return PREFIX + name.replace(".", "_") + PROMETHEUS_SUFFIX.get(unit, f"_{label(unit.lower())}")


def label(name: str) -> str:
    """The label that a text of that name becomes in the `_info` series of its scope."""
    return re.sub(
        r"[^a-z0-9_]", "_", name.split(".", 1)[1] if name.startswith(("gpu.", "host.")) else name.replace(".", "_")
    )


def bare(name: str) -> str:
    """A label of `Own.labels` without its brackets."""
    return name.strip("()")


COLLECTORS = (
    Own(name="rackproof_collector_success", labels=("collector",), help="1 where the collector answered"),
    Own(name="rackproof_collector_duration_seconds", labels=("collector",),
        help="How long the collector took, where it answered"),
    Own(name="rackproof_collector_last_success_timestamp_seconds", labels=("collector",),
        help="When the collector last answered; missing where it never did"),
    Own(name="rackproof_collector_stuck_seconds", labels=("collector",),
        help="For how long a question to the collector has been out that it was not waited for any longer; 0: none is"),
    Own(name="rackproof_readings_absent", labels=("gpu", "status"),
        help="Readings that could not be had, by GPU (empty: the host) and by status: error or unsupported"),
)  # fmt: skip

RUN = (
    Own(name="rackproof_run_info", kind=INFO,
        labels=("run_id", "rack", "profile", "gang", "device", "rehearsal", "rackproof"),
        help="The newest run on this host; device: gpu, or cpu in a rehearsal; rackproof: the agent's version"),
    Own(name="rackproof_run_started_timestamp_seconds", help="When the run began on this host"),
    Own(name="rackproof_run_updated_timestamp_seconds",
        help="When the run's state was last written; every 2 s while a stage runs"),
    Own(name="rackproof_stage_state", labels=("stage", "state"),
        help="1 for the state that the stage is in, 0 for the others: planned, running, finished, failed, deadline, or silent: "
        "it should run, and nobody has said so for 30 s"),
    Own(name="rackproof_stage_progress_ratio", labels=("stage",),
        help="Share of the observations that the host owes in this stage and that the ranks have made"),
    Own(name="rackproof_stage_started_timestamp_seconds", labels=("stage",), help="When the stage last began"),
    Own(name="rackproof_stage_deadline_timestamp_seconds", labels=("stage",),
        help="When the stage is ended if it has not ended by then; of a stage that began"),
    Own(name="rackproof_stage_ended_timestamp_seconds", labels=("stage",), help="When the stage ended"),
    Own(name="rackproof_stage_finished", labels=("stage", "outcome"),
        help="Attempts at the stage that ended so, in this run: finished, failed or deadline"),
    Own(name="rackproof_stage_ranks", labels=("stage", "benchmark"),
        help="Ranks of this host that are at this benchmark, or at start, join, roll call, leave, end or failed"),
    Own(name="rackproof_rank_silent_seconds", labels=("rank", "(gpu)", "(cpu)"),
        help="For how long nothing was heard of a rank that runs; it beats twice a second"),
    Own(name="rackproof_rank_waiting_seconds", labels=("rank", "(gpu)", "(cpu)"),
        help="For how long a rank has waited in one operation of all ranks; 0: it does not"),
)  # fmt: skip
STATES = ("planned", "running", "finished", "failed", "deadline", "silent")

_AT = ("stage", "benchmark")
BENCHMARK = (
    Own(name="rackproof_benchmark_bus_bandwidth_bytes_per_second", labels=(*_AT, "op", "placement", "size_bytes"),
        help="Bus bandwidth of a collective operation as nccl-tests defines it, at the largest size measured so far"),
    Own(name="rackproof_benchmark_bandwidth_bytes_per_second",
        labels=(*_AT, "(gpu)", "(cpu)", "(op)", "(direction)", "(sharing)"),
        help="Bandwidth of each device's memory, and of copies between device and host"),
    Own(name="rackproof_benchmark_flop_per_second", labels=(*_AT, "(gpu)", "(cpu)", "(dtype)"),
        help="Floating-point operations in a second"),
    Own(name="rackproof_benchmark_step_time_seconds", labels=(*_AT, "(network)"),
        help="Time of a training step; the newest while it trains, then the median"),
    Own(name="rackproof_benchmark_loss", labels=(*_AT, "(network)"), help="Loss of a training, the newest"),
    Own(name="rackproof_benchmark_accuracy_ratio", labels=(*_AT, "(network)"),
        help="Share of the test images that the trained network tells right"),
    Own(name="rackproof_benchmark_mfu_ratio", labels=_AT, help="Model FLOP utilization of a training"),
    Own(name="rackproof_benchmark_items_per_second",
        labels=(*_AT, "item", "(gpu)", "(cpu)", "(network)", "(variant)", "(batch_size)", "(workers)"),
        help="What a training or a data loader gets through: images or tokens"),
    Own(name="rackproof_benchmark_duration_seconds", labels=_AT, help="How long the benchmark took"),
    Own(name="rackproof_benchmark_wrong_results", labels=(*_AT, "(gpu)", "(cpu)"),
        help="Words, products, elements and digests found wrong in this stage"),
    Own(name="rackproof_benchmark_unmeasured", labels=(*_AT, "status"),
        help="Observations that could not be made: error, skipped or unsupported"),
    Own(name="rackproof_benchmark_series_left_out", labels=("stage",),
        help="Figures of the stage beyond the 512 that are exported; 0: none"),
)  # fmt: skip

_QUANTITIES = (
    ("gpu_power", "watts", "power drawn"),
    ("gpu_clock_sm", "hertz", "SM clock"),
    ("gpu_clock_memory", "hertz", "memory clock"),
    ("gpu_temperature", "celsius", "GPU temperature"),
)
SAMPLED = (
    *(
        Own(name=f"rackproof_{what}_window_{kind}_{unit}", labels=GPU, help=f"{how} {meaning} in the last window")
        for what, unit, meaning in _QUANTITIES
        for kind, how in (("min", "Lowest"), ("mean", "Mean"), ("max", "Highest"))
    ),
    Own(name="rackproof_gpu_power_of_limit_ratio", labels=GPU, kind=HISTOGRAM,
        help="Samples by power drawn over the power limit in force"),
    Own(name="rackproof_gpu_clock_sm_of_max_ratio", labels=GPU, kind=HISTOGRAM,
        help="Samples by SM clock over the part's highest SM clock"),
    Own(name="rackproof_gpu_throttle_sampled_seconds_total", labels=(*GPU, "reason"), kind=COUNTER,
        help="For how long samples showed the clocks held down for this reason"),
    Own(name="rackproof_gpu_samples_total", labels=GPU, kind=COUNTER, help="Samples taken"),
    Own(name="rackproof_gpu_sample_failures_total", labels=GPU, kind=COUNTER, help="Samples that could not be had"),
    Own(name="rackproof_gpu_sampled_timestamp_seconds", labels=GPU,
        help="When the last sample was taken; a call that hangs, and a lost GPU, are seen by its age"),
    Own(name="rackproof_gpu_window_samples", labels=GPU, help="Samples in the last window"),
    Own(name="rackproof_sampler_window_seconds", help="Length of the window that the _window_ figures are of"),
    Own(name="rackproof_sampler_cpu_seconds_total", kind=COUNTER, help="Processor time that the sampling took"),
)  # fmt: skip

EVERY: Mapping[str, Own] = {own.name: own for own in (*COLLECTORS, *RUN, *BENCHMARK, *SAMPLED)}
