"""Names, types and help texts of the exporter's own metrics, and functions that derive metric names from collectors' readings.

docs/metrics.md is generated from this module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.readings import PROMETHEUS_SUFFIX, metric_name

PREFIX = "rackproof_"

GAUGE, COUNTER, HISTOGRAM, INFO = "gauge", "counter", "histogram", "info"
GPU = ("gpu", "uuid")


@dataclass(frozen=True, kw_only=True)
class MetricSpec:
    """A metric family of the exporter that does not come from a collector."""

    name: str
    """Name in Prometheus. The name of a histogram is given without the endings `_bucket`, `_sum` and `_count`."""
    help: str
    labels: tuple[str, ...] = ()
    """Names of the labels. A name in parentheses: some series of the family do not have this label."""
    kind: str = GAUGE


def prometheus_name(name: str, unit: str) -> str:
    """Return the Prometheus name of a collector's family, without the `_total` of a counter."""
    return metric_name(name) + PROMETHEUS_SUFFIX.get(unit, f"_{info_label(unit.lower())}")


def info_label(name: str) -> str:
    """Return the label that a text reading of this name has in the `_info` series."""
    return re.sub(
        r"[^a-z0-9_]", "_", name.split(".", 1)[1] if name.startswith(("gpu.", "host.")) else name.replace(".", "_")
    )


def label_name(label: str) -> str:
    """Return a label of `MetricSpec.labels` without its parentheses."""
    return label.strip("()")


COLLECTORS = (
    MetricSpec(name="rackproof_collector_success", labels=("collector",), help="1 if the collector succeeded"),
    MetricSpec(name="rackproof_collector_duration_seconds", labels=("collector",),
        help="Duration of the collector's reading; no series if it failed"),
    MetricSpec(name="rackproof_collector_last_success_timestamp_seconds", labels=("collector",),
        help="Time of the collector's last success; no series before the first"),
    MetricSpec(name="rackproof_collector_stuck_seconds", labels=("collector",),
        help="Time since the collector exceeded its deadline in a call that has not returned; 0: no such call"),
    MetricSpec(name="rackproof_readings_absent", labels=("gpu", "status"),
        help="Readings that are missing, by GPU (empty: all other parts) and status: error or unsupported"),
)  # fmt: skip

RUN = (
    MetricSpec(name="rackproof_run_info", kind=INFO,
        labels=("run_id", "rack", "profile", "gang", "device", "rehearsal", "rackproof"),
        help="The latest run on this host; device: gpu, or cpu in a rehearsal; rackproof: the agent's version"),
    MetricSpec(name="rackproof_run_started_timestamp_seconds", help="When the run started on this host"),
    MetricSpec(name="rackproof_run_updated_timestamp_seconds",
        help="When the run's state was last written; every 2 s while a stage runs"),
    MetricSpec(name="rackproof_stage_state", labels=("stage", "state"),
        help="1 for the current state of the stage, 0 for the others: planned, running, finished, failed, deadline, or silent "
        "(running, but not updated for 30 s)"),
    MetricSpec(name="rackproof_stage_progress_ratio", labels=("stage",),
        help="In a soak, the share of the planned time that has passed. In any other running stage, the share of the expected "
        "duration that has passed. In an ended stage, the share of the expected observations that were made. In a first "
        "rehearsal, a running stage also has the share of observations, because no durations on CPUs are known"),
    MetricSpec(name="rackproof_stage_started_timestamp_seconds", labels=("stage",), help="When the stage last started"),
    MetricSpec(name="rackproof_stage_deadline_timestamp_seconds", labels=("stage",),
        help="Deadline of the stage, if it has started"),
    MetricSpec(name="rackproof_stage_expected_end_timestamp_seconds", labels=("stage",),
        help="When the running stage is expected to end, estimated from an earlier run, or else from Rackproof's table of "
        "durations"),
    MetricSpec(name="rackproof_stage_ended_timestamp_seconds", labels=("stage",), help="When the stage ended"),
    MetricSpec(name="rackproof_stage_finished", labels=("stage", "outcome"),
        help="Number of recorded launches of the stage in this run, by outcome: finished, failed or deadline"),
    MetricSpec(name="rackproof_stage_ranks", labels=("stage", "benchmark"),
        help="Ranks of this host in this benchmark or phase (start, join, readiness check, leave, end, failed)"),
    MetricSpec(name="rackproof_rank_silent_seconds", labels=("rank", "(gpu)", "(cpu)"),
        help="Time since the last heartbeat of a running rank; ranks send two a second"),
    MetricSpec(name="rackproof_rank_waiting_seconds", labels=("rank", "(gpu)", "(cpu)"),
        help="Time for which a rank has been waiting in a collective operation; 0: it is not waiting"),
)  # fmt: skip

_AT = ("stage", "benchmark")
BENCHMARK = (
    MetricSpec(name="rackproof_benchmark_bus_bandwidth_bytes_per_second",
        labels=(*_AT, "op", "size_bytes", "(placement)", "(mnnvl)"),
        help="Bus bandwidth of a collective operation as nccl-tests defines it, at the largest size measured so far"),
    MetricSpec(name="rackproof_benchmark_bandwidth_bytes_per_second",
        labels=(*_AT, "(gpu)", "(cpu)", "(directory)", "(numa_node)", "(op)", "(direction)", "(sharing)", "(pattern)",
                "(placement)", "(memory_node)"),
        help="Bandwidth of memory (device or host), of copies (between a device and the host, or between a device and all other "
        "devices), or of a file system"),
    MetricSpec(name="rackproof_benchmark_flop_per_second", labels=(*_AT, "(gpu)", "(cpu)", "(dtype)", "(shape)"),
        help="Floating-point operations per second"),
    MetricSpec(name="rackproof_benchmark_step_time_seconds", labels=(*_AT, "(network)"),
        help="Duration of a training step: while the training runs, of the latest step; after the training, the median of its "
        "steps"),
    MetricSpec(name="rackproof_benchmark_loss", labels=(*_AT, "(network)"), help="Latest loss of a training"),
    MetricSpec(name="rackproof_benchmark_accuracy_ratio", labels=(*_AT, "(network)"),
        help="Share of the test images that the trained network classifies correctly"),
    MetricSpec(name="rackproof_benchmark_mfu_ratio", labels=_AT, help="Model FLOP utilization of a training"),
    MetricSpec(name="rackproof_benchmark_items_per_second",
        labels=(*_AT, "item", "(gpu)", "(cpu)", "(network)", "(variant)", "(batch_size)", "(workers)", "(phase)"),
        help="Throughput of a training, of a data loader or of inference (label phase: prefill or decode); label item: images or "
        "tokens"),
    MetricSpec(name="rackproof_benchmark_duration_seconds", labels=_AT, help="Duration of the benchmark"),
    MetricSpec(name="rackproof_benchmark_wrong_results", labels=(*_AT, "(gpu)", "(cpu)", "(directory)", "(numa_node)"),
        help="Number of wrong results in this stage: wrong memory words, matrix products, elements of collective operations, "
        "digests, or data on disks"),
    MetricSpec(name="rackproof_benchmark_unmeasured", labels=(*_AT, "status"),
        help="Number of observations without a value in this stage, by status: error, skipped or unsupported"),
    MetricSpec(name="rackproof_benchmark_series_left_out", labels=("stage",),
        help="Number of series of the stage that are not exported, because a stage exports at most 512"),
)  # fmt: skip

_QUANTITIES = (
    ("gpu_power", "watts", "power draw"),
    ("gpu_clock_sm", "hertz", "SM clock"),
    ("gpu_clock_memory", "hertz", "memory clock"),
    ("gpu_temperature", "celsius", "GPU temperature"),
)
SAMPLED = (
    *(
        MetricSpec(name=f"rackproof_{quantity}_window_{kind}_{unit}", labels=GPU,
                   help=f"{adjective} {meaning} in the last window")
        for quantity, unit, meaning in _QUANTITIES
        for kind, adjective in (("min", "Lowest"), ("mean", "Mean"), ("max", "Highest"))
    ),
    MetricSpec(name="rackproof_gpu_power_of_limit_ratio", labels=GPU, kind=HISTOGRAM,
        help="Distribution of the ratio of power draw to enforced power limit over the samples"),
    MetricSpec(name="rackproof_gpu_clock_sm_of_max_ratio", labels=GPU, kind=HISTOGRAM,
        help="Distribution of the ratio of SM clock to maximum SM clock over the samples"),
    MetricSpec(name="rackproof_gpu_throttle_sampled_seconds_total", labels=(*GPU, "reason"), kind=COUNTER,
        help="Time during which samples showed this reason for reduced clocks"),
    MetricSpec(name="rackproof_gpu_samples_total", labels=GPU, kind=COUNTER, help="Number of successful samples"),
    MetricSpec(name="rackproof_gpu_sample_failures_total", labels=GPU, kind=COUNTER, help="Number of failed samples"),
    MetricSpec(name="rackproof_gpu_sampled_timestamp_seconds", labels=GPU,
        help="Time of the last successful sample; it does not advance while a call hangs or after the GPU is lost"),
    MetricSpec(name="rackproof_gpu_window_samples", labels=GPU, help="Number of successful samples in the last window"),
    MetricSpec(name="rackproof_sampler_window_seconds",
        help="Length of the time window of the metrics with `_window_` in their names"),
    MetricSpec(name="rackproof_sampler_cpu_seconds_total", kind=COUNTER, help="CPU time that sampling has used"),
)  # fmt: skip

EVERY: Mapping[str, MetricSpec] = {spec.name: spec for spec in (*COLLECTORS, *RUN, *BENCHMARK, *SAMPLED)}
