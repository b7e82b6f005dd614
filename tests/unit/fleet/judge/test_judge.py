"""Test the judge with the shipped packs: healthy fleets pass, one fault gives one finding, missing data never passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from fleet.judge.criteria import Criterion, Pack, read_packs
from fleet.judge.host_view import HostView
from fleet.judge.judge import LOG_LIFETIME, Evidence, judge
from schemas.catalogue import BENCHMARKS
from schemas.records import Metric, Observation, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack

PACKS = read_packs([])


def findings(plan: Any, evidence: dict[str, Evidence]) -> list[Verdict]:
    return [verdict for verdict in judge(plan, evidence, PACKS) if verdict.verdict != PASS]


def test_healthy_fleet_has_no_finding() -> None:
    plan = builders.plan(with_all_ops=True)
    verdicts = judge(plan, builders.evidence(plan), PACKS)
    assert {verdict.verdict for verdict in verdicts} == {PASS}
    assert {verdict.criterion for verdict in verdicts} >= {
        "gpu-count",
        "nvlink-active",
        "gemm-bf16",
        "training-loss-falls",
    }


@pytest.mark.parametrize(
    ("over", "criterion", "action"),
    [
        ({"gpu__ecc__enabled": {"gpu=0": True, "gpu=1": False}}, "ecc-enabled", "configure"),
        ({"gpu__ecc__uncorrectable_volatile": {"gpu=0": 0, "gpu=1": 1}}, "ecc-uncorrectable-volatile", "reset_gpu"),
        (
            {"gpu__ecc__uncorrectable_sram_aggregate": {"gpu=0": 4, "gpu=1": 5}},
            "ecc-sram-uncorrectable-aggregate",
            "rma",
        ),
        ({"gpu__remapped_rows__pending": {"gpu=0": False, "gpu=1": True}}, "row-remap-pending", "reset_gpu"),
        ({"gpu__remapped_rows__failed": {"gpu=0": False, "gpu=1": True}}, "row-remap-failed", "rma"),
        ({"gpu__remapped_rows__uncorrectable": {"gpu=0": 8, "gpu=1": 9}}, "new-remapped-uncorrectable", "rma"),
        ({"gpu__nvlink__active_links": {"gpu=0": 18, "gpu=1": 17}}, "nvlink-active", "inspect_hardware"),
        ({"gpu__pcie__replays": {"gpu=0": 31, "gpu=1": 32}}, "pcie-replay", "reseat"),
    ],
)
def test_one_fault_is_one_finding_on_one_part(over: dict[str, Any], criterion: str, action: str) -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    evidence["h2"] = builders.with_snapshot(
        evidence["h2"], builders.snapshot(range(2), stage="gang", phase="after", **over)
    )
    verdicts = findings(plan, evidence)
    assert [(item.host, item.scope, item.serial, item.criterion, item.verdict, item.action) for item in verdicts] == [
        ("h2", "gpu=1", "h2-1", criterion, FAIL, action)
    ]
    assert verdicts[0].source
    assert verdicts[0].limit is not None


@pytest.mark.parametrize(("name", "criterion"), [("gpu__pcie__generation", "pcie-generation")])
def test_link_is_judged_by_its_best_snapshot(name: str, criterion: str) -> None:
    """A PCIe link that slows down when idle passes if one snapshot shows full speed."""
    plan = builders.plan()
    slow: dict[str, Any] = {name: 4}
    idle = builders.evidence(plan)
    idle["h1"] = builders.with_snapshot(idle["h1"], builders.snapshot(range(2), stage="gang", phase="after", **slow))
    assert findings(plan, idle) == []
    always_slow = builders.evidence(plan)
    always = [
        replace(
            record,
            snapshots=tuple(
                builders.snapshot(range(2), stage=observed.stage, phase=observed.phase, **slow)
                for observed in record.snapshots
            ),
        )
        for record in always_slow["h1"].records
    ]
    always_slow["h1"] = replace(always_slow["h1"], records=tuple(always))
    assert [(item.scope, item.criterion) for item in findings(plan, always_slow)] == [
        ("gpu=0", criterion),
        ("gpu=1", criterion),
    ]


@pytest.mark.parametrize(
    ("name", "where", "value", "criterion"),
    [
        ("collective.gather.busbw", {"size_bytes": 8 << 30}, 3.1e11, "busbw-4-gpus"),
        ("gemm.throughput", {"dtype": "bf16"}, 6.9e14, "gemm-bf16"),
        ("host_copy.bandwidth", {"direction": "host_to_device", "sharing": "alone"}, 2.6e10, "host-to-device"),
        ("collective.all_reduce.busbw", {"size_bytes": 8 << 30}, 3.4e11, "all-reduce-4-gpus"),
        ("collective.broadcast.wrong_elements", {"size_bytes": 8}, 1, "collective-values"),
        ("training.loss_ratio", {"network": "resnet18"}, 1.0, "training-loss-falls"),
        ("training.loss_finite", {"network": "convnet"}, False, "training-loss-finite"),
    ],
)
def test_slow_or_wrong_benchmark_fails(name: str, where: dict[str, Any], value: Any, criterion: str) -> None:
    plan = builders.plan(gpu_count=4)
    evidence = builders.evidence(plan)

    def change(observation: Observation) -> Observation:
        hit = (
            observation.name == name
            and where.items() <= observation.params.items()
            and observation.scope in ("gpu=2", "host")
        )
        return replace(observation, value=value) if hit else observation

    evidence["h1"] = builders.with_observations(evidence["h1"], change)
    verdicts = {(item.host, item.scope, item.criterion, item.verdict) for item in findings(plan, evidence)}
    scope = "gpu=2" if name.startswith(("gemm", "host_copy")) else "host"
    assert verdicts == {("h1", scope, criterion, FAIL)}


def test_only_the_host_without_a_record_is_inconclusive() -> None:
    plan = builders.plan("h1", "h2", "h3")
    evidence = builders.evidence(plan)
    evidence["h2"] = Evidence(problem="no record: hosts/h2.json is missing")
    verdicts = findings(plan, evidence)
    assert [(item.host, item.name, item.verdict, item.reason) for item in verdicts] == [
        ("h2", "record", INCONCLUSIVE, "no record: hosts/h2.json is missing")
    ]


def test_host_missing_in_the_evidence_is_inconclusive() -> None:
    plan = builders.plan(gpu_count=3)
    evidence = builders.evidence(plan)
    del evidence["h1"]
    assert [(item.host, item.verdict) for item in findings(plan, evidence)] == [("h1", INCONCLUSIVE)]


@pytest.mark.parametrize("status", ["error", "skipped", "unsupported"])
def test_unmeasured_figure_is_inconclusive_with_its_reason(status: str) -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)

    def change(observation: Observation) -> Observation:
        hit = (
            observation.name == "gemm.throughput"
            and observation.params["dtype"] == "fp16"
            and observation.scope == "gpu=1"
        )
        return replace(observation, status=status, value=None, reason="reason") if hit else observation

    evidence["h2"] = builders.with_observations(evidence["h2"], change)
    verdicts = findings(plan, evidence)
    assert [(item.host, item.scope, item.name, item.verdict, item.reason) for item in verdicts] == [
        ("h2", "gpu=1", "gemm.throughput", INCONCLUSIVE, f"{status}: reason")
    ]


def test_missing_benchmark_result_is_reported() -> None:
    """Each round removes some results from one record of h1. The judge must report exactly these results."""
    plan = builders.plan("h1", "h2", profile="smoke")
    complete = builders.evidence(plan)
    for gang in (False, True):
        record = next(item for item in complete["h1"].records if bool(item.gang) == gang)
        results = [*{item.name: item for item in record.observations}.values()]
        for first in range(4):
            removed = results[first::4]
            evidence = complete | {
                "h1": builders.with_observations(
                    complete["h1"],
                    lambda observation, removed=removed: None if observation in removed else observation,
                    gang,
                )
            }
            verdicts = findings(plan, evidence)
            assert sorted((item.host, item.name, item.verdict) for item in verdicts) == sorted(
                ("h1", item.name, INCONCLUSIVE) for item in removed
            )


def test_missing_reading_that_a_criterion_needs_is_reported() -> None:
    plan = builders.plan("h1", "h2", profile="smoke", gpu_count=2)
    complete = builders.evidence(plan)
    needed = [*builders.HEALTHY, "gpu.count", "gpu.pci_count", "xid.last_seen", "gpu.throttle.active"]
    for name in needed:
        without = [
            replace(
                record,
                snapshots=tuple(
                    replace(taken, metrics=tuple(metric for metric in taken.metrics if metric.name != name))
                    for taken in record.snapshots
                ),
            )
            for record in complete["h1"].records
        ]
        evidence = complete | {"h1": Evidence(records=tuple(without))}
        verdicts = findings(plan, evidence)
        assert {item.verdict for item in verdicts} == {INCONCLUSIVE}, name
        assert {item.host for item in verdicts} == {"h1"}


def test_stage_without_results_has_one_verdict_with_the_reason() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    host_record, gang_record = evidence["h1"].records
    launches = (builders.launch("gang", ("h1", "h2"), "deadline", "rank 0 in join"),)
    hung = replace(gang_record, observations=(), snapshots=(), launches=launches)
    evidence["h1"] = Evidence(records=(host_record, hung))
    assert [(item.name, item.reason) for item in findings(plan, evidence)] == [
        ("stage.gang", "nothing was observed; rank 0 in join")
    ]


def snapshot_without_gpus() -> Snapshot:
    why = "unsupported: NVML: Driver Not Loaded"
    return Snapshot(
        stage="preflight",
        phase="before",
        at=builders.WHEN,
        duration_s=0.1,
        metrics=(
            Metric(name="gpu.count", unit="1", values={"host": 0}),
            Metric(name="gpu.pci_count", unit="1", values={"host": 0}),
            Metric(name="driver.version", unit="1", absent={"host": why}),
            Metric(name="xid.last_seen", unit="s", values={"host": 0.0}),
        ),
    )


def test_zero_of_eight_expected_gpus_fails_with_both_counts() -> None:
    plan = builders.plan(gpu_count=8, rackproof_gpu_model="h200-sxm")
    evidence = builders.evidence(plan)
    first = evidence["h2"].records[0]
    evidence["h2"] = Evidence(
        records=(replace(first, gpus=(), snapshots=(snapshot_without_gpus(),), observations=(), launches=()),)
    )
    failed = [item for item in findings(plan, evidence) if item.verdict == FAIL]
    assert [(item.host, item.criterion, item.value, item.limit) for item in failed] == [
        ("h2", "gpu-count", 0, 8),
        ("h2", "gpu-pci-count", 0, 8),
    ]
    assert failed[0].reason == "found 0, wanted = 8"
    unseen = [item for item in findings(plan, evidence) if item.name == "gpu"]
    assert len(unseen) == 8


def test_lost_gpu_fails_by_count() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    reason = {"gpu=1": "error: NVML: GPU is lost"}
    lost = builders.snapshot(range(2), stage="gang", phase="after")
    metrics = tuple(
        Metric(name="gpu.count", unit="1", values={"host": 1})
        if metric.name == "gpu.count"
        else replace(
            metric,
            values={key: value for key, value in metric.values.items() if not key.startswith("gpu=1")},
            absent=reason,
        )
        for metric in lost.metrics
    )
    evidence["h1"] = builders.with_snapshot(evidence["h1"], replace(lost, metrics=metrics))
    failed = [(item.host, item.scope, item.criterion) for item in findings(plan, evidence) if item.verdict == FAIL]
    assert ("h1", "host", "gpu-count") in failed


def test_unknown_gpu_model_is_inconclusive_and_named() -> None:
    plan = builders.plan(gpu_count=3)
    evidence = builders.evidence(plan)
    first, *rest = evidence["h1"].records
    other = replace(first, gpus=tuple(replace(gpu, name="NVIDIA Z900") for gpu in first.gpus))
    evidence["h1"] = Evidence(records=(other, *(replace(record, gpus=other.gpus) for record in rest)))
    verdicts = findings(plan, evidence)
    assert [(item.host, item.name, item.verdict) for item in verdicts] == [("h1", "gpu.name", INCONCLUSIVE)]
    assert "no criteria pack for NVIDIA Z900" in verdicts[0].reason


def test_model_that_differs_from_the_inventory_fails() -> None:
    plan = builders.plan(rackproof_gpu_model="h100-sxm")
    failed = [item for item in findings(plan, builders.evidence(plan)) if item.criterion == "gpu-model"]
    assert {item.verdict for item in failed} == {FAIL}
    assert len(failed) == 4
    assert {item.reason for item in failed} == {"found NVIDIA H200, but the inventory has h100-sxm"}
    plan = builders.plan(rackproof_gpu_model="h200-sxm")
    passed = [item for item in judge(plan, builders.evidence(plan), PACKS) if item.criterion == "gpu-model"]
    assert {(item.verdict, item.reason) for item in passed} == {(PASS, "found NVIDIA H200")}


def test_duplicate_serial_fails_both_hosts() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    first_gpu = builders.gpu("h1", 0)
    evidence["h2"] = Evidence(
        records=tuple(
            replace(record, gpus=(replace(first_gpu, index=0), record.gpus[1])) for record in evidence["h2"].records
        )
    )
    verdicts = [item for item in findings(plan, evidence) if item.name == "gpu.serial"]
    assert [(item.host, item.scope, item.verdict) for item in verdicts] == [
        ("h1", "gpu=0", FAIL),
        ("h2", "gpu=0", FAIL),
    ]
    assert verdicts[0].reason == "also reported by GPU 0 of h2"


def test_gpus_of_one_board_may_share_its_serial() -> None:
    """An A16 has four GPUs and one serial. The UUIDs of the GPUs must differ."""
    plan = builders.plan()
    evidence = builders.evidence(plan)

    def with_serial(host: str, serial: str, **changes: str) -> None:
        evidence[host] = Evidence(
            records=tuple(
                replace(record, gpus=tuple(replace(gpu, serial=serial, **changes) for gpu in record.gpus))
                for record in evidence[host].records
            )
        )

    def duplicates() -> list[tuple[str, str]]:
        verdicts = findings(plan, evidence)
        return [(item.host, item.scope) for item in verdicts if item.criterion == "identity-unique"]

    with_serial("h1", "board-1")
    assert duplicates() == []
    with_serial("h2", "board-1")
    assert duplicates() == [("h1", "gpu=0"), ("h2", "gpu=0")]
    with_serial("h2", "board-2", uuid="")
    assert duplicates() == [("h2", "gpu=0"), ("h2", "gpu=1")]


def test_thermal_slowdown_in_any_snapshot_fails_and_power_cap_does_not() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    hot = builders.snapshot(range(2), stage="gang", phase="during")
    metrics = tuple(
        replace(metric, values=dict(metric.values) | {"gpu=0,reason=hw_thermal": True, "gpu=1,reason=power_cap": True})
        if metric.name == "gpu.throttle.active"
        else metric
        for metric in hot.metrics
    )
    evidence["h1"] = builders.with_snapshot(evidence["h1"], replace(hot, metrics=metrics))
    verdicts = findings(plan, evidence)
    assert [(item.scope, item.serial, item.criterion) for item in verdicts] == [
        ("gpu=0,reason=hw_thermal", "h1-0", "thermal-slowdown")
    ]


def test_only_an_xid_during_the_run_fails() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)

    def with_xids(*times: float) -> Evidence:
        first, *rest = evidence["h1"].records
        taken = tuple(
            replace(
                snapshot,
                metrics=tuple(
                    replace(metric, values={"host": when}) if metric.name == "xid.last_seen" else metric
                    for metric in snapshot.metrics
                ),
            )
            for snapshot, when in zip(first.snapshots, (times[0], *times), strict=True)
        )
        return Evidence(records=(replace(first, snapshots=taken), *rest))

    assert findings(plan, evidence | {"h1": with_xids(30.0, 30.0)}) == []
    assert findings(plan, evidence | {"h1": with_xids(30.0, 0.0)}) == []  # the log dropped the old XID
    verdicts = findings(plan, evidence | {"h1": with_xids(30.0, 31.5)})
    assert [(item.criterion, item.value, item.stage) for item in verdicts] == [("xid-during-run", 1.5, "benchmark")]


def test_counter_read_once_cannot_be_judged_by_its_change() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    first, gang = evidence["h1"].records
    evidence["h1"] = Evidence(records=(replace(first, snapshots=first.snapshots[:1]), replace(gang, snapshots=())))
    assert {item.verdict for item in findings(plan, evidence)} == {INCONCLUSIVE}
    reported = {"pcie-replay", "xid-during-run", "disk-lost"}
    assert {item.criterion for item in findings(plan, evidence)} == {*reported, "plan"}


def test_run_without_a_final_snapshot_does_not_pass() -> None:
    """Without a final snapshot, a part that failed in the last stage would go unnoticed."""
    plan = builders.plan()
    evidence = builders.evidence(plan)
    first, gang = evidence["h1"].records
    evidence["h1"] = Evidence(records=(first, replace(gang, snapshots=())))
    assert {(item.host, item.name, item.verdict) for item in findings(plan, evidence)} == {
        ("h1", "stage.gang", INCONCLUSIVE)
    }


def test_reading_that_disappears_does_not_pass() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    taken = builders.snapshot(range(2), stage="gang", phase="after")
    lost = [
        replace(metric, values={"gpu=0": metric.values["gpu=0"]}, absent={"gpu=1": "unsupported: Not Supported"})
        if metric.name == "gpu.ecc.uncorrectable_volatile"
        else metric
        for metric in taken.metrics
    ]
    evidence["h1"] = builders.with_snapshot(evidence["h1"], replace(taken, metrics=tuple(lost)))

    def findings_with(packs: Sequence[Pack]) -> list[Any]:
        verdicts = [item for item in judge(plan, evidence, packs) if item.verdict != PASS]
        return [(item.host, item.scope, item.criterion, item.verdict) for item in verdicts]

    assert findings_with(PACKS) == [("h1", "gpu=1", "ecc-uncorrectable-volatile", INCONCLUSIVE)]
    optional = [replace(pack, criteria=tuple(replace(item, optional=True) for item in pack.criteria)) for pack in PACKS]
    assert findings_with(optional) == [("h1", "gpu=1", "plan", INCONCLUSIVE)], (
        "even an optional reading must not disappear"
    )


RUN = (
    ("preflight", "before"),
    ("benchmark", "before"),
    ("benchmark", "during"),
    ("benchmark", "after"),
    ("gang", "before"),
    ("gang", "after"),
)
"""(stage, phase) of the snapshots of a run, by time."""


def counter_verdict(
    *values: Any, name: str = "gpu.pcie.replays", limit: float = 0, at: Sequence[int] = range(10)
) -> Verdict:
    """Return the verdict on a counter with these values in the snapshots of `RUN`, taken at the seconds `at`."""
    plan = builders.plan("h1", profile="smoke", gpu_count=1, rackproof_gang="none")
    observations = [
        Snapshot(
            stage=stage,
            phase=phase,
            at=f"2026-11-21T04:00:0{second}Z",
            duration_s=0.1,
            metrics=(Metric(name=name, unit="1", values={} if value is None else {"gpu=0": value}),),
        )
        for (stage, phase), value, second in zip(RUN, values, at, strict=False)
    ]
    host_record, *_ = builders.records(plan, "h1")
    taken = {gang: tuple(item for item in observations if (item.stage == "gang") == bool(gang)) for gang in ("", "r1")}
    records = tuple(
        replace(host_record, gang=gang, snapshots=taken[gang], observations=() if gang else host_record.observations)
        for gang in taken
    )
    criterion = Criterion(
        id="count", name=name, operator="le", value=limit, delta=True, unit="1", action="reseat", source="a test"
    )
    pack = Pack(name="h200-sxm", gpu_names=("NVIDIA H200",), criteria=(criterion,))
    (verdict,) = [item for item in judge(plan, {"h1": Evidence(records=records)}, (pack,)) if item.criterion == "count"]
    return verdict


@pytest.mark.parametrize(
    ("values", "stage", "reason"),
    [
        ((5, 5, 5, 5, 5, 8), "gang", "changed by 3, wanted ≤ 0 (3 in stage gang, 0 in stage benchmark)"),
        (
            (0, 0, 4, 5, 5, 6),
            "benchmark",
            "changed by 6, wanted ≤ 0 (5 in stage benchmark between its snapshots before and during, 1 in stage gang)",
        ),
        (
            (0, 0, 0, 2, 2, 2),
            "benchmark",
            "changed by 2, wanted ≤ 0 (2 in stage benchmark between its snapshots during and after, 0 in stage gang)",
        ),
        (
            (0, 0, 0, 0, 7, 7),
            "",  # the counter rose before a stage began
            "changed by 7, wanted ≤ 0 (7 before stage gang, 0 in stage benchmark, 0 in stage gang)",
        ),
    ],
)
def test_change_is_attributed_to_the_stage_in_which_it_happened(values: Sequence[int], stage: str, reason: str) -> None:
    verdict = counter_verdict(*values)
    assert (verdict.verdict, verdict.stage, verdict.reason) == (FAIL, stage, reason)


def test_change_is_summed_over_the_stages() -> None:
    verdict = counter_verdict(0, 0, 2, 2, 2, 3, limit=2)
    assert (verdict.verdict, verdict.value, verdict.stage) == (FAIL, 3, "benchmark")
    assert counter_verdict(0, 0, 2, 2, 2, 3, limit=3).verdict == PASS


@pytest.mark.parametrize("values", [(5, 5, 5, 0, 0, 4), (5, 5, 5, 5, 0, 4), (9, 9, 2, 9, 9, 9), (5, 5, 5, 5, 5, 3)])
def test_increase_is_found_although_the_counter_was_reset(values: Sequence[int]) -> None:
    """The last value is not above the first. A counter that fell was reset, so its whole new value is an increase."""
    verdict = counter_verdict(*values)
    assert verdict.verdict == FAIL
    assert verdict.value == values[-1]
    assert "; fell from " in verdict.reason


def test_counter_that_stays_at_zero_after_a_reset_is_inconclusive() -> None:
    verdict = counter_verdict(5, 5, 5, 0, 0, 0)
    assert (verdict.verdict, verdict.reason) == (
        INCONCLUSIVE,
        "fell from 5 to 0 in stage benchmark: the counter was reset, and increments just before the reset are lost",
    )
    assert counter_verdict(5, 5, 5, 5, 5, 5).verdict == PASS


def test_time_of_the_newest_event_may_fall_because_the_log_drops_events() -> None:
    assert counter_verdict(30, 30, 30, 0, 0, 0, name="gpu.event.last_seen").verdict == PASS
    newer = counter_verdict(30, 30, 30, 0, 0, 86_460, name="gpu.event.last_seen")
    assert (newer.verdict, newer.stage, newer.detail) == (
        FAIL,
        "gang",
        "the newest at an uptime of 86\u202f460, in stage gang",
    )
    two = counter_verdict(0, 0, 1000, 1000, 1000, 1100, name="gpu.event.last_seen")
    assert (two.stage, two.detail) == ("gang", "the newest at an uptime of 1100, in stage gang")


def test_counter_without_a_first_reading_cannot_be_judged_by_its_change() -> None:
    verdict = counter_verdict(None, 100, 100, 100, 100, 100)
    assert (verdict.verdict, verdict.reason) == (
        INCONCLUSIVE,
        "not read both before and after the run: the change is unknown",
    )


def test_snapshots_of_all_records_are_sorted_by_time() -> None:
    """The stage benchmark was repeated after the stage gang. In the evidence, the host record still comes first."""
    verdict = counter_verdict(0, 3, 3, 3, 0, 0, at=(0, 3, 4, 5, 1, 2))
    assert (verdict.verdict, verdict.value, verdict.stage) == (FAIL, 3, "")
    assert (
        verdict.reason == "changed by 3, wanted ≤ 0 (3 before stage benchmark, 0 in stage gang, 0 in stage benchmark)"
    )


def test_fabric_is_judged_only_if_the_inventory_states_its_rate() -> None:
    without_rate = builders.plan(gpu_count=2)
    assert "fabric-all-reduce" not in {
        item.criterion for item in judge(without_rate, builders.evidence(without_rate), PACKS)
    }
    with_rate = builders.plan(gpu_count=2, rackproof_fabric_gbps=400)
    verdicts = [
        item for item in judge(with_rate, builders.evidence(with_rate), PACKS) if item.criterion == "fabric-all-reduce"
    ]
    assert {(item.host, item.verdict, item.limit) for item in verdicts} == {("h1", PASS, 6e10), ("h2", PASS, 6e10)}


def test_fabric_limit_of_a_gang_follows_its_slowest_member() -> None:
    plan = builders.plan("h1", "h2", "h3", gpu_count=2, rackproof_fabric_gbps=400)
    hosts = tuple(replace(host, fabric_gbps={"h1": 200.0, "h2": 0.0}.get(host.name, 400.0)) for host in plan.hosts)
    mixed = replace(plan, hosts=hosts)

    def limits(evidence: dict[str, Evidence]) -> dict[str, Any]:
        verdicts = judge(mixed, evidence, PACKS)
        return {item.host: item.limit for item in verdicts if item.criterion == "fabric-all-reduce"}

    complete = builders.evidence(mixed)
    assert limits(complete) == {"h1": 3e10, "h3": 3e10}, "the inventory has no rate of h2"
    without_h1 = dict(complete)
    host_record, gang_record = complete["h3"].records
    without_h1["h3"] = Evidence(
        records=(host_record, replace(gang_record, launches=(builders.launch("gang", ("h2", "h3")),)))
    )
    assert limits(without_h1)["h3"] == 6e10


def test_criterion_of_a_chosen_pack_replaces_the_shipped_criterion_that_it_names() -> None:
    plan = builders.plan()
    stricter = replace(
        next(item for pack in PACKS if pack.name == "h200-sxm" for item in pack.criteria if item.id == "gemm-bf16"),
        expected=1e15,
        replaces="gemm-bf16",
    )
    pack = Pack(name="mine", gpu_names=(), criteria=(stricter,), chosen=True)
    verdicts = [item for item in judge(plan, builders.evidence(plan), [*PACKS, pack]) if item.verdict == FAIL]
    assert {item.criterion for item in verdicts} == {"gemm-bf16"}
    assert len(verdicts) == 4


def test_rehearsal_without_records_is_inconclusive() -> None:
    plan = builders.plan(profile="rehearsal")
    verdicts = judge(plan, {}, PACKS)
    assert {item.verdict for item in verdicts} == {INCONCLUSIVE}


def last_snapshot(**over: Any) -> Snapshot:
    """Return the last snapshot of a host with two GPUs."""
    return builders.snapshot(range(2), stage="gang", phase="after", **over)


def snapshot_with_lost_reading(name: str) -> Snapshot:
    """Return the last snapshot of a host; the reading `name` of GPU 1 has an error."""
    taken = last_snapshot()
    why = {"gpu=1": "error: NVML: GPU is lost"}
    metrics = (
        replace(metric, values={"gpu=0": metric.values["gpu=0"]}, absent=why) if metric.name == name else metric
        for metric in taken.metrics
    )
    return replace(taken, metrics=tuple(metrics))


@pytest.mark.parametrize("name", ["gpu.ecc.uncorrectable_volatile", "gpu.nvlink.active_links", "gpu.pcie.replays"])
def test_reading_lost_after_the_run_is_inconclusive_despite_earlier_values(name: str) -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    evidence["h1"] = builders.with_snapshot(evidence["h1"], snapshot_with_lost_reading(name))
    assert [(item.host, item.scope, item.name, item.verdict) for item in findings(plan, evidence)] == [
        ("h1", "gpu=1", name, INCONCLUSIVE)
    ]


def test_collector_that_failed_once_is_reported() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    failed = Metric(name="collector.nvml", unit="s", absent={"host": "error: no answer within 20 s"})
    taken = replace(last_snapshot(), metrics=(*last_snapshot().metrics, failed))
    evidence["h2"] = builders.with_snapshot(evidence["h2"], taken)
    verdicts = findings(plan, evidence)
    assert [(item.host, item.name) for item in verdicts] == [("h2", "collector.nvml")]
    assert "no answer within 20 s" in verdicts[0].reason


def test_unfinished_launch_is_inconclusive_despite_its_values() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    first, gang_record = evidence["h1"].records
    crashed = replace(
        first, launches=(builders.launch("benchmark", ("h1",), "failed", "rank 3 in leave (exit code -11)"),)
    )
    evidence["h1"] = Evidence(records=(crashed, gang_record))
    assert [(item.name, item.reason) for item in findings(plan, evidence)] == [
        ("stage.benchmark", "failed: rank 3 in leave (exit code -11)")
    ]


def of_ranks(number: int, observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return the observations, each with its parameter `world_size` set to `number`."""
    return tuple(replace(item, params={**item.params, "world_size": number}) for item in observations)


@pytest.mark.parametrize(
    "before", [(), ("h1", "h2", "h3", "h4")], ids=["first launch", "after a launch without results"]
)
def test_gang_launched_in_two_groups_is_inconclusive(before: tuple[str, ...]) -> None:
    plan = builders.plan("h1", "h2", "h3", "h4")
    evidence = builders.evidence(plan)
    for host in evidence:
        host_record, gang_record = evidence[host].records
        members = ("h1", "h2") if host in ("h1", "h2") else ("h3", "h4")
        launches = [
            builders.launch("gang", those, devices=2, first=2 * those.index(host))
            for those in (before, members)
            if those
        ]
        # The results in a record belong to the last launch. So the launch of `before` has no results, and does not count.
        gang_record = replace(gang_record, launches=tuple(launches), observations=of_ranks(4, gang_record.observations))
        evidence[host] = Evidence(records=(host_record, gang_record))
    verdicts = findings(plan, evidence)
    assert {(item.host, item.name, item.verdict) for item in verdicts} == {
        (host, "stage.gang", INCONCLUSIVE) for host in ("h1", "h2", "h3", "h4")
    }
    assert verdicts[0].reason == "launched with h1, h2, but never with h3, h4"


def test_planned_gpu_that_the_record_lacks_is_inconclusive() -> None:
    plan = builders.plan(rackproof_gpu_model="h200-sxm")
    evidence = builders.evidence(plan)
    evidence["h2"] = Evidence(records=tuple(replace(record, gpus=record.gpus[:1]) for record in evidence["h2"].records))
    assert [(item.host, item.scope, item.name) for item in findings(plan, evidence)] == [("h2", "gpu=1", "gpu.name")]


def test_host_with_gpus_of_two_models_is_inconclusive() -> None:
    plan = builders.plan(gpu_count=3)
    evidence = builders.evidence(plan)
    first, *_ = evidence["h1"].records
    mixed = replace(first, gpus=(*first.gpus[:2], replace(first.gpus[2], name="NVIDIA H200 NVL")))
    evidence["h1"] = Evidence(records=(mixed, replace(evidence["h1"].records[1], gpus=mixed.gpus)))
    assert [(item.name, item.verdict) for item in findings(plan, evidence)] == [("gpu.name", INCONCLUSIVE)]


def fleet_pack(fraction: float = 0.95, name: str = "gemm.throughput", scope: str = "gpu") -> Pack:
    """Return a pack of the operator with one criterion: a figure must be at least `fraction` of the fleet median."""
    criterion = Criterion(
        id="relative",
        name=name,
        operator="ge",
        unit="FLOP/s",
        action="inspect_hardware",
        source="a test's own",
        scope=scope,
        where={"dtype": "bf16"} if name.startswith("gemm") else {},
        fleet_fraction=fraction,
    )
    return Pack(name="mine", gpu_names=(), criteria=(criterion,), chosen=True)


def evidence_with_gemm(plan: Any, rates: dict[tuple[str, str], float]) -> dict[str, Evidence]:
    """Return evidence of a healthy fleet, with these bf16 GEMM rates replaced: (host, scope) -> FLOP/s."""
    evidence = builders.evidence(plan)
    for host in evidence:

        def change(observation: Observation, host: str = host) -> Observation:
            hit = (
                observation.name == "gemm.throughput"
                and observation.params["dtype"] == "bf16"
                and (host, observation.scope) in rates
            )
            return replace(observation, value=rates[(host, observation.scope)]) if hit else observation

        evidence[host] = builders.with_observations(evidence[host], change)
    return evidence


def fleet_verdicts(plan: Any, evidence: dict[str, Evidence], pack: Pack | None = None) -> list[Verdict]:
    return [item for item in judge(plan, evidence, [*PACKS, pack or fleet_pack()]) if item.criterion == "relative"]


def test_gpu_below_the_fleet_median_fails_with_the_median_in_its_reason() -> None:
    plan = builders.plan("h1", "h2")
    evidence = evidence_with_gemm(plan, {("h1", "gpu=0"): 7.9e14, ("h2", "gpu=1"): 7.5e14})
    verdicts = {(item.host, item.scope): item for item in fleet_verdicts(plan, evidence)}
    assert {position: item.verdict for position, item in verdicts.items()} == {
        ("h1", "gpu=0"): PASS,
        ("h1", "gpu=1"): PASS,
        ("h2", "gpu=0"): PASS,
        ("h2", "gpu=1"): FAIL,
    }
    slow = verdicts[("h2", "gpu=1")]
    assert (slow.limit, slow.action, slow.serial) == (0.95 * 7.95e14, "inspect_hardware", "h2-1")
    assert slow.detail == "the limit is 95 % of the fleet's median 795 TFLOP/s over 4 GPUs"
    assert slow.reason == f"found 750 TFLOP/s, wanted ≥ 755.2 TFLOP/s ({slow.detail})"


def test_one_outlier_does_not_move_the_fleet_median() -> None:
    plan = builders.plan("h1", "h2")
    evidence = evidence_with_gemm(plan, {("h2", "gpu=1"): 1.0})
    assert [(item.host, item.scope) for item in fleet_verdicts(plan, evidence) if item.verdict == FAIL] == [
        ("h2", "gpu=1")
    ]


@pytest.mark.parametrize(("hosts", "verdict"), [(("h1", "h2"), INCONCLUSIVE), (("h1", "h2", "h3"), PASS)])
def test_fleet_median_needs_three_gpus_of_a_model(hosts: tuple[str, ...], verdict: str) -> None:
    plan = builders.plan(*hosts, gpu_count=1)
    verdicts = fleet_verdicts(plan, builders.evidence(plan))
    assert [item.verdict for item in verdicts] == [verdict] * len(hosts)
    assert ("2 GPUs of NVIDIA H200" in verdicts[0].reason) == (verdict == INCONCLUSIVE)


def test_gpus_are_compared_within_their_model() -> None:
    plan = builders.plan("h1", "h2", gpu_count=3)
    evidence = evidence_with_gemm(plan, {("h2", f"gpu={index}"): 4e14 for index in range(3)})
    other = tuple(
        replace(record, gpus=tuple(replace(gpu, name="NVIDIA H100 80GB HBM3") for gpu in record.gpus))
        for record in evidence["h2"].records
    )
    evidence["h2"] = Evidence(records=other)
    assert {item.verdict for item in fleet_verdicts(plan, evidence)} == {PASS}


def test_gang_figure_is_one_sample_of_the_fleet() -> None:
    plan = builders.plan("h1", "h2", "h3")
    pack = fleet_pack(name="training.throughput", scope="gang")
    verdicts = fleet_verdicts(plan, builders.evidence(plan), pack)
    assert {item.verdict for item in verdicts} == {INCONCLUSIVE}
    assert "the run has 1 gang " in verdicts[0].reason


def test_wildcard_criterion_matches_each_operation() -> None:
    plan = builders.plan("h1", rackproof_gang="none")
    pack = fleet_pack(name="collective.*.algbw", scope="host")
    pack = replace(pack, criteria=(replace(pack.criteria[0], fleet_fraction=None, value=1.0, unit="B/s"),))
    verdicts = fleet_verdicts(plan, builders.evidence(plan), pack)
    assert {"collective.all_reduce.algbw", "collective.hypercube.algbw"} <= {item.name for item in verdicts}
    assert not any(item.name.endswith("busbw") for item in verdicts)


def slow_collectives(transport: str, nvls: bool, stage: str = "benchmark") -> list[Verdict]:
    """Return the failures of a slow all-reduce on h1. `transport`, `nvls`: what NCCL reports on h1."""
    plan = builders.plan("h1", "h2", gpu_count=4, rackproof_fabric_gbps=400)
    evidence = builders.evidence(plan)

    def change(observation: Observation) -> Observation:
        if observation.name == "collective.all_reduce.busbw" and observation.params["size_bytes"] >= 1 << 30:
            return replace(observation, value=2e9)
        values: dict[str, Any] = {"collective.transport": transport, "collective.nvls": nvls}
        return replace(observation, value=values[observation.name]) if observation.name in values else observation

    evidence["h1"] = builders.with_observations(evidence["h1"], change, gang=stage == "gang")
    failed = [item for item in judge(plan, evidence, PACKS) if item.verdict == FAIL]
    return [item for item in failed if item.name == "collective.all_reduce.busbw"]


@pytest.mark.parametrize(
    ("stage", "transport", "nvls", "clause"),
    [
        ("benchmark", "SHM/direct/direct", True, "NCCL uses SHM/direct/direct instead of P2P"),
        ("benchmark", "NET/Socket", True, "NCCL uses NET/Socket instead of P2P"),
        ("benchmark", "P2P/CUMEM+SHM", True, "NCCL uses SHM instead of P2P"),
        ("gang", "NET/Socket+P2P/CUMEM", True, "NCCL uses NET/Socket instead of InfiniBand"),
        ("gang", "NET/IB", True, "NCCL uses NET/IB without GPUDirect RDMA"),
    ],
)
def test_slow_transport_is_reported_as_the_cause_instead_of_hardware(
    stage: str, transport: str, nvls: bool, clause: str
) -> None:
    verdicts = slow_collectives(transport, nvls, stage)
    assert verdicts
    for item in verdicts:
        assert item.reason.startswith(clause)
        assert "check NCCL_" in item.detail
        assert item.reason.endswith(f"wanted ≥ {float(item.limit) / 1e9:.4g} GB/s")
        assert (item.verdict, item.action) == (FAIL, "configure")


@pytest.mark.parametrize(
    ("stage", "transport"), [("benchmark", "P2P/CUMEM"), ("benchmark", "P2P/IPC"), ("gang", "NET/IB/GDRDMA+P2P/CUMEM")]
)
@pytest.mark.parametrize("nvls", [True, False])
def test_slow_collective_over_a_fast_transport_is_attributed_to_hardware(
    stage: str, transport: str, nvls: bool
) -> None:
    verdicts = slow_collectives(transport, nvls, stage)
    assert verdicts
    assert {item.action for item in verdicts} == {"inspect_hardware"}
    assert all(item.reason.startswith("found 2 GB/s") and not item.detail for item in verdicts)


def test_figure_of_an_older_catalogue_is_ignored() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    first, *rest = evidence["h1"].records
    old = builders.observation("memory_copy.bandwidth", 1.0, scope="gpu=0", unit="B/s", direction="device_to_host")
    evidence["h1"] = Evidence(records=(replace(first, observations=(*first.observations, old)), *rest))
    assert findings(plan, evidence) == []


def test_failed_local_copy_is_reported_despite_a_remote_copy() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    first, *rest = evidence["h1"].records
    local = next(observation for observation in first.observations if observation.name == "host_copy.bandwidth")
    remote = replace(local, params={**local.params, "numa": "remote"}, value=2e10)
    wrong = replace(local, status="error", value=None, reason="a copy differs from its source")
    for one, expected in ((local, []), (wrong, [(local.scope, INCONCLUSIVE, "error: a copy differs from its source")])):
        observation = tuple(one if item is local else item for item in first.observations)
        evidence["h1"] = Evidence(records=(replace(first, observations=(*observation, remote)), *rest))
        assert [(item.scope, item.verdict, item.reason) for item in findings(plan, evidence)] == expected


def with_status(evidence: Evidence, name: str, status: str, **params: Any) -> Evidence:
    """Return the evidence with this status for the observations that have this name and these parameters."""

    def change(observation: Observation) -> Observation:
        hit = observation.name == name and params.items() <= observation.params.items()
        return replace(observation, status=status, value=None, reason="reason", samples=None) if hit else observation

    return builders.with_observations(evidence, change)


@pytest.mark.parametrize(("status", "gaps"), [("unsupported", 0), ("error", 2), ("skipped", 2)])
def test_status_unsupported_is_accepted_only_for_a_figure_that_the_gpu_model_lacks(status: str, gaps: int) -> None:
    """The statuses `error` and `skipped` are always reported."""
    plan = builders.plan()
    evidence = builders.evidence(plan)
    evidence["h2"] = with_status(evidence["h2"], "gemm.throughput", status, dtype="fp8")
    packs = [replace(pack, lacks={"gemm.throughput": {"dtype": ("fp8",)}}) for pack in PACKS]
    lacking = [verdict for verdict in judge(plan, evidence, packs) if verdict.verdict != PASS]
    assert len(lacking) == gaps
    having = findings(plan, evidence)
    assert [(verdict.name, verdict.verdict) for verdict in having] == [("gemm.throughput", INCONCLUSIVE)] * 2


def test_packs_list_dtypes_that_ampere_and_turing_lack() -> None:
    lacks = {pack.name: pack.lacks["gemm.throughput"]["dtype"] for pack in PACKS if "gemm.throughput" in pack.lacks}
    assert {"a10", "a100-pcie-40", "a100-pcie-80", "a100-sxm-40", "a100-sxm-80"} == {
        name for name, dtypes in lacks.items() if list(dtypes) == ["fp8"]
    }
    assert set(lacks["t4"]) == {"tf32", "bf16", "fp8"}


@pytest.mark.parametrize(("gpus", "planned"), [(2, True), (3, False), (4, True), (6, False), (8, True)])
def test_hypercube_is_planned_for_powers_of_two(gpus: int, planned: bool) -> None:
    plan = builders.plan("h1", gpu_count=gpus, rackproof_gang="none")
    names = {item.name for item in plan.expected_of(plan.hosts[0])}
    assert ("collective.hypercube.busbw" in names) == planned
    assert "collective.all_reduce.busbw" in names


def findings_of_eight_gpus(change: Callable[[Observation], Observation]) -> list[Verdict]:
    """Return the findings on a host with eight H200 GPUs and NVLS, after `change` was applied to each observation."""
    plan = builders.plan("h1", gpu_count=8, rackproof_gang="none", with_all_ops=True)

    def with_eight_ranks(observation: Observation) -> Observation:
        if observation.name.startswith("collective."):
            observation = replace(observation, params={**observation.params, "world_size": 8, "nvls": True})
        with_nvls = observation.name == "collective.all_reduce.busbw"
        return change(replace(observation, value=4.73e11) if with_nvls else observation)

    evidence = builders.with_observations(builders.evidence(plan)["h1"], with_eight_ranks)
    return findings(plan, {"h1": evidence})


def test_eight_healthy_gpus_have_no_finding() -> None:
    assert findings_of_eight_gpus(lambda observation: observation) == []


def test_eight_gpus_without_nvls_fail_with_the_remedy() -> None:
    def without_nvls(observation: Observation) -> Observation:
        params = {**observation.params, "nvls": False} if "nvls" in observation.params else observation.params
        values = {"collective.nvls": False, "collective.all_reduce.busbw": 3.5e11}
        return replace(observation, params=params, value=values.get(observation.name, observation.value))

    (verdict,) = findings_of_eight_gpus(without_nvls)
    assert (verdict.verdict, verdict.criterion, verdict.action, verdict.value) == (
        FAIL,
        "nvls-8-gpus",
        "configure",
        False,
    )
    assert verdict.reason.startswith("found no, wanted = yes; check NCCL_NVLS_ENABLE")
    assert "fabric manager" in verdict.reason


@pytest.mark.parametrize("first", [0, 1])
def test_each_slow_operation_fails_on_eight_gpus(first: int) -> None:
    """Every second operation is slow, from the operation at position `first`."""
    slow = BENCHMARKS["collective"].settings["ops"][first::2]

    def slowed(item: Observation) -> Observation:
        return reduce(lambda figure, op: builders.slowed_collective(figure, op=op), slow, item)

    verdicts = findings_of_eight_gpus(slowed)
    assert {item.verdict for item in verdicts} == {FAIL}
    names = {f"collective.{op}.busbw" for op in slow}
    assert {item.name for item in verdicts} == names
    assert {item.name for item in verdicts if item.criterion == "busbw-8-gpus"} == names


@pytest.mark.parametrize(("hosts", "fails"), [(2, False), (3, True)])
def test_slow_host_fails_in_a_fleet_of_three(hosts: int, fails: bool) -> None:
    slow = {
        "collective.broadcast.busbw": (3.2e11, "busbw-vs-fleet"),
        "training.throughput": (1.9e4, "training-vs-fleet"),
        "variants.throughput": (1.4e4, "variants-vs-fleet"),
        "transformer.throughput": (3.9e4, "transformer-vs-fleet"),
    }
    plan = builders.plan(*(f"h{number}" for number in range(hosts)), with_all_sizes=True, rackproof_gang="none")
    evidence = builders.evidence(plan)
    evidence["h1"] = builders.with_observations(
        evidence["h1"],
        lambda observation: (
            replace(observation, value=slow[observation.name][0])
            if observation.name in slow and observation.params.get("size_bytes") != 8 << 30
            else observation
        ),
    )
    result = {(item.host, item.name, item.criterion, item.verdict) for item in findings(plan, evidence)}
    expected = {("h1", name, criterion, FAIL) for name, (_, criterion) in slow.items()}
    assert result == (expected if fails else set())


def bandwidth_failures(
    transport: str, change: Callable[[str, Observation], Observation], model: str, *site: Pack
) -> list[Verdict]:
    """Return the failures of `busbw` figures on three hosts that use this transport.

    `change` is called with each host and each observation of the host, and returns the observation that replaces it.
    """
    plan = builders.plan("h1", "h2", "h3", gpu_count=4, rackproof_gang="none", rackproof_gpu_model=model)
    evidence = builders.evidence(plan)
    for host in evidence:

        def with_transport(observation: Observation, host: str = host) -> Observation:
            return change(
                host,
                replace(observation, value=transport) if observation.name == "collective.transport" else observation,
            )

        evidence[host] = builders.with_observations(evidence[host], with_transport)
    verdicts = judge(plan, evidence, [*PACKS, *site])
    return [item for item in verdicts if item.verdict == FAIL and item.name.endswith("busbw")]


def slow_h2(host: str, observation: Observation) -> Observation:
    return (
        replace(observation, value=1e10)
        if host == "h2" and observation.name == "collective.all_reduce.busbw"
        else observation
    )


def test_transport_that_is_fast_on_other_hosts_is_no_cause() -> None:
    verdicts = bandwidth_failures("SHM/direct/direct", slow_h2, "h200-sxm")
    assert {(item.host, item.action) for item in verdicts} == {("h2", "inspect_hardware")}
    assert all(item.reason.startswith("found") for item in verdicts)


@pytest.mark.parametrize(("model", "action"), [("l40s", "inspect_hardware"), ("h200-sxm", "configure")])
def test_transport_through_host_memory_is_no_cause_on_a_model_without_peer_access(model: str, action: str) -> None:
    def slow_down(_: str, observation: Observation) -> Observation:
        return replace(observation, value=1e10) if observation.name == "collective.all_reduce.busbw" else observation

    floor = Criterion(
        id="floor",
        name="collective.all_reduce.busbw",
        operator="ge",
        unit="B/s",
        action="inspect_hardware",
        source="a test's own",
        value=2e10,
    )
    site = Pack(name="site", gpu_names=(), criteria=(floor,), chosen=True)
    verdicts = [
        item for item in bandwidth_failures("SHM/direct/direct", slow_down, model, site) if item.criterion == "floor"
    ]
    assert {item.action for item in verdicts} == {action}
    assert all(item.reason.startswith("found") == (model == "l40s") for item in verdicts)


@pytest.mark.parametrize(("access", "action"), [(True, "configure"), (False, "inspect_hardware")])
def test_link_is_the_cause_if_nccl_uses_host_memory_and_peer_access_is_missing(access: bool, action: str) -> None:
    """If all GPUs have peer access, the configuration of NCCL is the cause. Otherwise, the cause is the link of
    the pair without access.
    """

    def slow_down(host: str, observation: Observation) -> Observation:
        if observation.name == "collective.all_reduce.busbw":
            return replace(observation, value=1e10)
        lost = observation.name == "peer_copy.access" and observation.scope == "gpu=0,peer=1"
        return replace(observation, value=access) if lost else observation

    verdicts = bandwidth_failures("SHM/direct/direct", slow_down, "h200-sxm")
    assert {item.action for item in verdicts} == {action}
    assert all(item.reason.startswith("NCCL uses SHM/direct/direct") for item in verdicts)


def unmeasured(name: str, scope: str, status: str = "error", **params: Any) -> Observation:
    """Return an observation without a value."""
    return Observation(
        name=name, scope=scope, stage="benchmark", unit="1", status=status, reason="reason", params=params
    )


def findings_with_more(plan: Any, *more: Observation) -> list[tuple[str, str, str, str]]:
    evidence = builders.evidence(plan)
    first, *rest = evidence["h1"].records
    evidence["h1"] = Evidence(records=(replace(first, observations=(*first.observations, *more)), *rest))
    return [(item.host, item.name, item.scope, item.reason) for item in findings(plan, evidence)]


@pytest.mark.parametrize(
    "lost",
    [
        unmeasured("benchmark.duration", "gpu=2", benchmark="gemm"),
        unmeasured("host_copy.bandwidth", "gpu=0", numa="remote"),
        unmeasured("gemm.throughput", "gpu=0", dtype="fp4"),
        unmeasured("gemm.throughput", "host", dtype="bf16"),
        unmeasured("teapot.temperature", "host"),
    ],
)
def test_unplanned_error_is_reported(lost: Observation) -> None:
    assert findings_with_more(builders.plan(), lost) == [("h1", lost.name, lost.scope, "error: reason")]


@pytest.mark.parametrize("status", ["skipped", "unsupported"])
def test_unplanned_observation_that_was_skipped_or_is_unsupported_is_not_reported(status: str) -> None:
    assert findings_with_more(builders.plan(), unmeasured("gemm.throughput", "gpu=0", status, dtype="fp4")) == []


def test_error_is_reported_unless_the_figure_was_measured_later() -> None:
    plan = builders.plan()
    planned = unmeasured("gemm.throughput", "gpu=0", dtype="bf16")
    assert findings_with_more(plan, planned) == [("h1", "gemm.throughput", "gpu=0", "error: reason")]
    lost = unmeasured("gemm.throughput", "gpu=0", dtype="fp4")
    good = builders.observation("gemm.throughput", 1e15, scope="gpu=0", unit="FLOP/s", dtype="fp4", world_size=2)
    assert findings_with_more(plan, lost, good) == []
    assert findings_with_more(plan, good, lost) == [("h1", "gemm.throughput", "gpu=0", "error: reason")]


def test_failed_hypercube_of_three_ranks_is_not_reported() -> None:
    plan = builders.plan(gpu_count=3, rackproof_gang="none")
    why = unmeasured("collective.hypercube.busbw", "host", size_bytes=8, placement="out_of_place")
    assert findings_with_more(plan, why) == []


@pytest.mark.parametrize(("network", "judged"), [("resnet18", True), ("convnet", False)])
def test_dataloader_criterion_applies_to_its_network_only(network: str, judged: bool) -> None:
    plan = builders.plan("h1", gpu_count=4, rackproof_gang="none")

    def change(observation: Observation) -> Observation:
        hit = observation.name == "dataloader.sufficiency"
        return (
            replace(observation, value=0.1, params={**observation.params, "network": network}) if hit else observation
        )

    evidence = {"h1": builders.with_observations(builders.evidence(plan)["h1"], change)}
    assert {item.criterion for item in findings(plan, evidence)} == ({"dataloader-sufficiency"} if judged else set())


def test_pairs_with_an_absent_host_are_not_reported_as_missing() -> None:
    plan = builders.plan("h1", "h2", "h3")
    evidence = builders.evidence(plan) | {"h3": Evidence()}
    for host in ("h1", "h2"):
        host_record, gang_record = evidence[host].records
        launches = (replace(gang_record.launches[0], members=("h1", "h2")),)
        observed = tuple(item for item in gang_record.observations if not item.scope.endswith("partner=h3"))
        assert len(observed) < len(gang_record.observations)
        gang_record = replace(gang_record, launches=launches, observations=of_ranks(4, observed))
        evidence[host] = Evidence(records=(host_record, gang_record))
    assert {(item.host, item.name) for item in findings(plan, evidence)} == {("h3", "record")}
    # Missing pairs with a host that took part are reported on the host that should have measured them.
    host_record, gang_record = builders.evidence(plan)["h1"].records
    observed = tuple(item for item in gang_record.observations if not item.scope.endswith("partner=h3"))
    evidence = builders.evidence(plan) | {
        "h1": Evidence(records=(host_record, replace(gang_record, observations=observed)))
    }
    missing = {(item.host, item.name) for item in findings(plan, evidence)}
    assert missing == {("h1", "pairs.bandwidth"), ("h1", "pairs.latency")}


def test_pcie_link_that_loses_lanes_fails() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    hot = builders.snapshot(range(2), stage="gang", phase="after", gpu__pcie__width=8)
    evidence["h1"] = builders.with_snapshot(evidence["h1"], hot)
    verdicts = {(item.host, item.scope, item.criterion, item.verdict) for item in findings(plan, evidence)}
    assert verdicts == {("h1", scope, "pcie-width", "fail") for scope in ("gpu=0", "gpu=1")}


def test_old_xid_that_reappears_in_the_log_is_not_new() -> None:
    plan = builders.plan()
    evidence = builders.evidence(plan)
    first, *rest = evidence["h1"].records
    taken = [
        builders.snapshot(range(2), stage=stage, phase=phase)
        for stage, phase in (("preflight", "before"), ("benchmark", "during"), ("benchmark", "after"))
    ]
    reported = Metric(name="xid.last_seen", unit="s", values={"host": 0.0})
    snapshots = [
        replace(
            one,
            metrics=(
                *(metric for metric in one.metrics if metric.name != "xid.last_seen"),
                replace(reported, values={"host": value}),
            ),
        )
        for one, value in zip(taken, (100.0, 0.0, 100.0), strict=True)
    ]
    evidence["h1"] = Evidence(records=(replace(first, snapshots=tuple(snapshots)), *rest))
    assert [item for item in findings(plan, evidence) if item.criterion == "xid-during-run"] == []


def test_estimated_floor_is_not_reported_beside_a_stricter_floor() -> None:
    """The slow all-reduce also misses the floor (minimum) `all-reduce-model`. This floor is an estimate: its basis is `model`."""
    plan = builders.plan("h1", gpu_count=4, rackproof_gang="none")
    evidence = builders.evidence(plan)

    def slow_down(observation: Observation) -> Observation:
        is_largest = observation.params.get("size_bytes") == 8 << 30
        return builders.slowed_collective(observation, op="all_reduce") if is_largest else observation

    evidence["h1"] = builders.with_observations(evidence["h1"], slow_down)
    failures = findings(plan, evidence)
    assert {(item.criterion, item.verdict) for item in failures} == {
        ("all-reduce-4-gpus", FAIL),
        ("busbw-4-gpus", FAIL),
    }


def test_only_failures_state_how_long_the_kernel_log_keeps_its_messages() -> None:
    plan = one_figure_plan("h1", "h2", gpu_count=2)
    counts = {host: {"gpu=0": int(host == "h1"), "gpu=1": 0} for host in ("h1", "h2")}
    name = "kernel.event.thing"
    evidence = {
        host: host_evidence(plan, host, Metric(name=name, unit="1", values=values)) for host, values in counts.items()
    }
    verdicts = [item for item in judge(plan, evidence, [pack(criterion(name, value=0))]) if item.name == name]
    assert {(item.host, item.scope, item.verdict) for item in verdicts} == {
        ("h1", "gpu=0", FAIL), ("h1", "gpu=1", PASS), ("h2", "gpu=0", PASS), ("h2", "gpu=1", PASS),
    }  # fmt: skip
    assert {item.verdict for item in verdicts if LOG_LIFETIME in item.reason} == {FAIL}


STEPS_WITHOUT_CRITERIA = (
    "expectations.gpu_models", "expectations.identity_changes", "expectations.collector_failures",
    "expectations.missing_observations", "expectations.unplanned_errors", "expectations.unmeasured_gpus", "unmeasured_ports",
    "silent_ports", "silent_nodes", "silent_totals", "refused_readings", "judge_bmc", "judge_soak", "judge_presence",
    "contradictions",
)  # fmt: skip
"""Functions that judge one host without criteria. `fleet.judge.judge` uses these names."""
STEPS_OF_SEVERAL_HOSTS = (
    "judge_gangs", "judge_digests", "judge_domains", "silent_pairs", "duplicate_identities", "expectations.partitioned_gangs",
    "expectations.contradictory_members", "separate_launches",
)  # fmt: skip
"""Functions that judge several hosts together. `fleet.judge.judge` uses these names."""
ONE_FIGURE = one_figure_plan("h1")


@pytest.mark.parametrize("step", [*STEPS_WITHOUT_CRITERIA, *STEPS_OF_SEVERAL_HOSTS, "judge_manifest"])
def test_verdicts_of_each_step_are_returned(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = {"h1": host_evidence(ONE_FIGURE)}
    verdict = Verdict(host="h1", scope="host", name="a.b", verdict=PASS, criterion="c", reason=step)
    monkeypatch.setattr(f"fleet.judge.judge.{step}", lambda *_: [verdict])
    assert judge(ONE_FIGURE, evidence, [pack()]).count(verdict) == 1


def test_verdict_on_a_host_without_a_record_states_whether_the_host_is_in_use() -> None:
    for user, kind in (("job 7", "in_use"), ("", "missing")):
        (verdict,) = judge(ONE_FIGURE, {"h1": Evidence(problem="busy", user=user)}, [pack()])
        assert (verdict.name, verdict.verdict, verdict.reason, verdict.criterion) == (
            "record",
            INCONCLUSIVE,
            "busy",
            "plan",
        )
        assert (verdict.kind, verdict.user) == (kind, user)


def test_number_of_links_between_two_gpus_is_the_larger_of_their_two_reports() -> None:
    plan = builders.plan("h1", gpu_count=3, rackproof_gang="none")
    links = {
        "gpu=0,peer=1": "NV6",
        "gpu=1,peer=0": "NV5",
        "gpu=0,peer=2": "NV4",
        "gpu=2,peer=0": "NV4",
        "gpu=1,peer=2": "SYS",
    }
    (record,) = builders.records(plan, "h1")

    def view_with(paths: dict[str, str]) -> HostView:
        metric = Metric(name="gpu.peer.link", unit="1", values=paths)
        snapshot = Snapshot(stage="benchmark", phase="before", at=builders.WHEN, duration_s=0.1, metrics=(metric,))
        return HostView(plan, plan.host("h1"), Evidence(records=(replace(record, snapshots=(snapshot,)),)), PACKS)

    view = view_with(links)
    pairs = {
        pair: view.nvlinks_between(pair) for pair in ("gpu=1,peer=0", "gpu=2,peer=1", "gpu=0,peer=2", "gpu=0,peer=3")
    }
    assert pairs == {"gpu=1,peer=0": 6, "gpu=2,peer=1": 0, "gpu=0,peer=2": 4, "gpu=0,peer=3": None}
    # For the scope of a host: the smallest number of all its pairs, or None if the number of a pair is unknown.
    assert view.nvlinks_between("host") == 0
    del links["gpu=1,peer=2"]
    assert view_with(links).nvlinks_between("host") is None
    assert view_with({**links, "gpu=1,peer=2": "NV12"}).nvlinks_between("host") == 4


def test_slowest_port_of_a_gang_is_that_of_its_slowest_member() -> None:
    plan = builders.plan("h1", "h2", gpu_count=2, rackproof_fabric_gbps=400)
    mixed = replace(
        plan, hosts=tuple(replace(host, fabric_gbps=200.0 if host.name == "h2" else 400.0) for host in plan.hosts)
    )
    assert plan.slowest_port(plan.host("h1"), ("h1", "h2")) == 5e10
    assert mixed.slowest_port(mixed.host("h1"), ("h1", "h2")) == 2.5e10
    assert mixed.slowest_port(mixed.host("h1"), ("h1",)) == 5e10
