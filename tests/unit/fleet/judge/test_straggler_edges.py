"""Test the cause of a straggler (a slow rank) on both sides of each threshold.

`test_stragglers.py` tests stragglers with criteria, and with real ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.stragglers import RankFigures, ranks_of, with_straggler_causes
from schemas.records import ERROR, Launch, Observation, Rank
from schemas.reports import FAIL, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan, pack

PLAN = one_figure_plan("h1", "h2", "h3", "h4")
USUAL = {
    "compute": 0.020, "wait": 0.004, "last_share": 0.1, "clock": 1.8e9, "power": 600.0, "temperature": 60.0, "launch": 0.010,
    "cpus": 16.0, "cpu_wait": 0.0, "cpu_pressure": 0.0, "cpu_time": 0.010, "cpu_throttled_share": 0.0,
    "throttled_share power_cap": 0.0, "throttled_share hw_thermal": 0.0, "throttled_share sw_thermal": 0.1,
}  # fmt: skip
"""Name of a figure of a healthy rank, without `straggler.` -> its value, in s, Hz, W, °C or processors, or as a share."""
NO_CAUSE = "no reading of its GPU or its host's CPU during the training steps explains this"


def measure(figure: str, value: Any, scope: str = "gpu=0", stage: str = "benchmark") -> Observation:
    """Return a figure of a rank. `figure`: its name without `straggler.`; after a space, the reason of a throttled share."""
    name, _, reason = figure.partition(" ")
    params = {"reason": reason} if reason else {}
    return builders.observation(f"straggler.{name}", value, scope=scope, stage=stage, **params)


def host_view(host: str, plan: Any = PLAN, *more: Observation, stage: str = "benchmark", **over: Any) -> HostView:
    """Return a host whose rank on gpu=0 has the figures of USUAL. `over` replaces some; None omits one."""
    figures = [measure(name, value, stage=stage) for name, value in {**USUAL, **over}.items() if value is not None]
    return HostView(plan, plan.host(host), host_evidence(plan, host, observations=(*figures, *more)), [pack()])


def slow_verdict(**over: Any) -> Verdict:
    """Return the failed verdict on the compute time of gpu=0 of h1."""
    fields = {
        "host": "h1", "scope": "gpu=0", "name": "straggler.compute", "stage": "benchmark", "verdict": FAIL, "criterion": "c",
        "reason": "found 30", "value": 0.030, "action": "inspect_hardware",
    }  # fmt: skip
    return Verdict(**{**fields, **over})


def annotate(verdict: Verdict | None = None, *, peers: dict[str, Any] | None = None, **own: Any) -> Verdict:
    """Return the verdict on a slow rank with its cause.

    Args:
        verdict: the verdict without the cause; None: `slow_verdict()`.
        peers: figures of the other three ranks, in place of those in USUAL.
        own: figures of the slow rank, in place of those in USUAL; None omits one.
    """
    views = [
        host_view("h1", **{"compute": 0.030, "wait": 0.0, **own}),
        *(host_view(name, **(peers or {})) for name in ("h2", "h3", "h4")),
    ]
    (annotated,) = with_straggler_causes(views, [verdict or slow_verdict()])
    return annotated


def test_verdict_names_the_straggler_before_the_cause() -> None:
    verdict = annotate()
    assert verdict.detail == f"rank 0 (h1 gpu=0) computes 50 % longer than its peers: {NO_CAUSE}"
    assert verdict.reason == f"{verdict.detail}; found 30"
    assert verdict.action == "inspect_hardware"
    assert "computes 50 % longer than its peers:" in annotate(last_share=None).detail
    assert annotate(slow_verdict(detail="5 %")).detail == f"{verdict.detail}; 5 %"
    assert "computes longer than its peers: " in annotate(peers={"compute": None}).detail


@pytest.mark.parametrize(
    ("own", "expected_text"),
    [
        ({"clock": 1.70e9}, "its SM clock was 1700 MHz (peers: 1800 MHz)"), ({"clock": 1.72e9}, NO_CAUSE),
        ({"clock": 0.0}, NO_CAUSE), ({"clock": 2.0e9}, NO_CAUSE), ({"clock": None}, NO_CAUSE),
        ({"clock": 1.5e9, "throttled_share power_cap": 0.06, "power": 690.0},
         "its SM clock was 1500 MHz (peers: 1800 MHz) because of its power limit (it drew 690 W, its peers 600 W)"),
        ({"clock": 1.5e9, "throttled_share power_cap": 0.05}, "its SM clock was 1500 MHz (peers: 1800 MHz)"),
        ({"clock": 1.5e9, "throttled_share power_cap": 0.9, "power": None}, "its SM clock was 1500 MHz (peers: 1800 MHz)"),
        ({"throttled_share hw_thermal": 0.06}, "thermal slowdown (hardware) active for 6 % of the time"),
        ({"throttled_share hw_thermal": 0.05}, NO_CAUSE), ({"throttled_share sw_thermal": 0.15}, NO_CAUSE),
        ({"throttled_share hw_power_brake": 1.0}, "power brake active for 100 % of the time"),
        ({"throttled_share hw_slowdown": 0.5, "throttled_share sw_thermal": 0.4},
         "thermal slowdown (software) active for 40 % of the time, hardware slowdown active for 50 % of the time"),
        ({"temperature": 70.5}, "its GPU was at 70 °C (peers: 60 °C)"), ({"temperature": 70.0}, NO_CAUSE),
        ({"launch": 0.0181}, "its GPU waits for the CPU: launching kernels takes 18.1 ms a step (peers: 10 ms)"),
        ({"launch": 0.018}, NO_CAUSE),
        ({"cpu_wait": 0.0016}, "its threads wait 1.6 ms a step for a processor (peers: 0 ms)"), ({"cpu_wait": 0.0015}, NO_CAUSE),
        ({"cpu_pressure": 0.21}, "its host was short of processors for 21 % of the time (peers: 0 %)"),
        ({"cpu_pressure": 0.2}, NO_CAUSE),
        ({"cpu_time": 0.0121, "launch": None}, "the rank needs 12.1 ms of CPU time a step (peers: 10 ms)"),
        ({"cpu_time": 0.012, "launch": None}, NO_CAUSE), ({"cpu_time": 0.09, "launch": 0.018}, NO_CAUSE),
        ({"cpu_time": 0.0121, "launch": 0.0271},
         "its GPU waits for the CPU: launching kernels takes 27.1 ms a step (peers: 10 ms); "
         "the rank needs 12.1 ms of CPU time a step (peers: 10 ms)"),
        *(({name: None}, NO_CAUSE) for name in USUAL if name != "compute"),
        *(({"cpus": number, "cpu_wait": None}, NO_CAUSE) for number in (0.0, 16.0, 17.0)),
    ],
)  # fmt: skip
def test_condition_is_the_cause_only_if_it_deviates_enough_from_the_peers(
    own: dict[str, Any], expected_text: str
) -> None:
    verdict = annotate(**own)
    assert verdict.detail.partition(": ")[2] == expected_text
    assert verdict.action == "inspect_hardware"


@pytest.mark.parametrize(
    ("peers", "own"),
    [
        ({"temperature": None}, {"temperature": 90.0}), ({"launch": None}, {"launch": 0.029}),
        ({"cpus": None}, {"cpus": 1.0, "cpu_wait": None}),
        ({"cpu_time": None}, {"cpu_time": 9.0, "launch": None}), ({"clock": None}, {"clock": 1.0}),
        ({"launch": 0.028}, {"launch": 0.029}), ({"cpu_wait": 0.01}, {"cpu_wait": 0.02}),
        ({"cpu_pressure": 0.2}, {"cpu_pressure": 0.4}),
        ({"temperature": 60.0}, {"temperature": None}),
    ],
)  # fmt: skip
def test_condition_that_peers_share_or_do_not_report_is_not_the_cause(
    peers: dict[str, Any], own: dict[str, Any]
) -> None:
    assert annotate(peers=peers, **own).detail.endswith(NO_CAUSE)


def test_cpu_wait_and_launch_time_are_causes_only_above_their_limits() -> None:
    """The CPU wait must exceed twice the peers' median. The launch time must exceed 105 % of the peers' median.

    Both must also exceed a share of the rank's compute time. The first table of this file tests these shares.
    """
    for wait, named in ((0.021, True), (0.020, False)):
        assert ("its threads wait" in annotate(peers={"cpu_wait": 0.010}, cpu_wait=wait).detail) is named
    for launch_s, named in ((0.0295, True), (0.0294, False)):
        assert ("its GPU waits" in annotate(peers={"launch": 0.028}, launch=launch_s).detail) is named


def test_causes_on_the_gpu_are_listed_first() -> None:
    verdict = annotate(cpu_pressure=0.5, cpus=4.0, temperature=80.0, cpu_wait=None)
    assert verdict.detail.partition(": ")[2] == (
        "its GPU was at 80 °C (peers: 60 °C); the rank may use 4 of its host's processors, its peers 16; "
        "its host was short of processors for 50 % of the time (peers: 0 %)"
    )


@pytest.mark.parametrize(
    ("own", "action"),
    [
        ({"cpus": 4.0, "cpu_wait": 0.002}, "configure"), ({"cpus": 4.0, "cpu_wait": None}, "configure"),
        ({"cpus": 4.0, "cpu_wait": 0.001}, "inspect_hardware"), ({"cpu_throttled_share": 0.06}, "configure"),
        ({"cpu_throttled_share": 0.05}, "inspect_hardware"),
        ({"cpus": 4.0, "cpu_wait": None, "temperature": 90.0}, "inspect_hardware"), ({"cpu_pressure": 0.9}, "inspect_hardware"),
    ],
)  # fmt: skip
def test_action_is_configure_if_only_a_configured_cpu_limit_is_the_cause(own: dict[str, Any], action: str) -> None:
    assert annotate(**own).action == action
    assert "stopped it in 6 % of the quota periods" in annotate(cpu_throttled_share=0.06).detail


def test_cpu_quota_that_stops_the_peers_as_often_is_not_the_cause() -> None:
    verdict = annotate(peers={"cpu_throttled_share": 0.30}, cpu_throttled_share=0.31)
    assert verdict.detail.endswith(NO_CAUSE)
    assert verdict.action == "inspect_hardware"


def gang_view(host: str, gangs: dict[str, str], **over: Any) -> HostView:
    """Return a host with figures of the gang stage. `gangs`: host -> its gang in the plan."""
    plan = replace(PLAN, hosts=tuple(replace(one, gang=gangs[one.name]) for one in PLAN.hosts))
    return host_view(host, plan, stage="gang", **over)


@pytest.mark.parametrize(
    ("own", "others", "expected_text"),
    [
        (0.0, 0.004, " (the other ranks wait 4 ms a step; this rank is last in 90 % of the steps)"),
        (0.002, 0.004, " (the other ranks wait 4 ms a step; this rank is last in 90 % of the steps)"), (0.0021, 0.004, ""),
        (0.0, 0.0015, " (the other ranks wait 1.5 ms a step; this rank is last in 90 % of the steps)"), (0.0, 0.0014, ""),
    ],
)  # fmt: skip
def test_wait_of_the_other_ranks_is_reported_only_if_long_enough(own: float, others: float, expected_text: str) -> None:
    """It must be at least twice the wait of the slow rank, and at least 5 % of the slow rank's compute time."""
    gangs = {"h1": "g", "h2": "g", "h3": "g", "h4": "other"}
    views = [gang_view("h1", gangs, compute=0.030, wait=own, last_share=0.9)]
    views += [gang_view(name, gangs, wait=others) for name in ("h2", "h3")] + [gang_view("h4", gangs, wait=9.0)]
    (verdict,) = with_straggler_causes(views, [slow_verdict(stage="gang")])
    assert verdict.detail.startswith(f"h1 gpu=0 computes 50 % longer than its peers{expected_text}: ")


def test_outside_a_gang_only_ranks_of_the_same_host_wait() -> None:
    assert "the other ranks wait" not in annotate(wait=0.0).detail
    plan = one_figure_plan("h1", "h2", "h3", gpu_count=2)
    other = measure("wait", 0.004, "gpu=1")
    views = [
        host_view(name, plan, other, compute=0.030 if name == "h1" else 0.020, wait=0.0) for name in ("h1", "h2", "h3")
    ]
    assert "the other ranks wait 4 ms a step" in with_straggler_causes(views, [slow_verdict()])[0].detail


def launch(stage: str, *ranks: tuple[int, int]) -> Launch:
    """Return a launch of h1. `ranks`: (rank, local rank)."""
    group = tuple(Rank(rank=rank, local_rank=local, phase="end", exit_code=0, log_tail="") for rank, local in ranks)
    return replace(builders.launch(stage, ("h1",)), ranks=group)


@pytest.mark.parametrize(
    ("launches", "rank_name"),
    [
        ((launch("benchmark", (7, 0), (8, 1)),), "rank 7 (h1 gpu=0)"), ((launch("benchmark", (8, 1)),), "h1 gpu=0"),
        ((launch("gang", (7, 0)),), "h1 gpu=0"), ((), "h1 gpu=0"),
        ((launch("benchmark", (7, 0)), launch("benchmark", (9, 0))), "rank 9 (h1 gpu=0)"),
    ],
)  # fmt: skip
def test_rank_number_comes_from_the_last_launch_of_the_stage(launches: tuple[Launch, ...], rank_name: str) -> None:
    here = host_view("h1", compute=0.030)
    record = replace(here.evidence.records[0], launches=launches)
    here = HostView(PLAN, PLAN.hosts[0], Evidence(records=(record,)), [pack()])
    (verdict,) = with_straggler_causes([here, host_view("h2"), host_view("h3")], [slow_verdict()])
    assert verdict.detail.startswith(f"{rank_name} computes")
    (elsewhere,) = with_straggler_causes([here, host_view("h2")], [slow_verdict(scope="gpu=7")])
    assert elsewhere.detail.startswith("h1 gpu=7 computes")


def test_verdict_that_is_not_a_failed_compute_time_of_a_known_rank_is_unchanged() -> None:
    views = [host_view("h1", compute=0.030), host_view("h2"), host_view("h3")]
    others = [
        slow_verdict(verdict=PASS),
        slow_verdict(name="straggler.wait"),
        slow_verdict(value="slow"),
        slow_verdict(host="h9"),
    ]
    assert with_straggler_causes(views, others) == others
    assert with_straggler_causes(views, ()) == []
    assert with_straggler_causes(views, [slow_verdict(), *others])[1:] == others
    assert with_straggler_causes(views, [*others, slow_verdict()])[-1] != slow_verdict()


def test_only_measured_numbers_are_figures_of_a_rank() -> None:
    plan = one_figure_plan("h1", gpu_count=2)
    more = (
        measure("compute", 9.0), measure("compute", 8.0, stage="gang"), measure("compute", 7.0, "gpu=1"),
        measure("compute", "text", "gpu=1"),
        replace(measure("wait", 1.0, "gpu=1"), status=ERROR, value=None, reason="x"), measure("compute", 1.0, "gang=g"),
        builders.observation("gemm.throughput", 1.0, scope="gpu=1"),
    )  # fmt: skip
    here = host_view("h1", plan, *more, **{**dict.fromkeys(USUAL), "throttled_share hw_thermal": 0.5})
    result = [(kind, figure, item.scope, item.value) for kind, figure, item in ranks_of(here)]
    assert result == [
        (("NVIDIA H200", "benchmark"), "throttled_share hw_thermal", "gpu=0", 0.5),
        (("NVIDIA H200", "benchmark"), "compute", "gpu=0", 9.0),
        (("NVIDIA H200", "gang"), "compute", "gpu=0", 8.0),
        (("NVIDIA H200", "benchmark"), "compute", "gpu=1", 7.0),
    ]


def test_figures_of_ranks_have_the_same_medians_if_they_are_merged_from_parts() -> None:
    views = [host_view(name, compute=value) for name, value in (("h1", 1.0), ("h2", 2.0), ("h3", 4.0))]
    kind = ("NVIDIA H200", "benchmark")
    whole, parts, filled_by_value = RankFigures(views), [RankFigures([one]) for one in views], RankFigures()
    parts[0].update(parts[1])
    parts[0].update(parts[2])
    for value in (1.0, 2.0, 4.0):
        filled_by_value.add_figures(kind, "compute", [value])
    for known in (whole, parts[0], filled_by_value):
        assert known.peer_medians(kind, {"compute": 1.0})["compute"] == 3.0
        assert known.peer_medians(kind, {})["compute"] == 2.0
    assert whole.peer_medians(("NVIDIA X", "benchmark"), {}) == {}
    assert "compute" not in RankFigures(views[:1]).peer_medians(kind, {"compute": 1.0})
    (verdict,) = with_straggler_causes(
        views[:1], [slow_verdict(value=1.0)], RankFigures([host_view("h1", compute=1.0), host_view("h2", compute=0.5)])
    )
    assert "computes 100 % longer than its peers" in verdict.detail
