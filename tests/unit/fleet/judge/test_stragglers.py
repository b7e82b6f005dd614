"""Test straggler detection: the criteria, the host CPU counters, and a launch with one slowed rank.

`test_straggler_edges.py` tests the threshold of each cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from agent.benchmarks.runtime import host_cpu
from agent.benchmarks.training.straggler import trimmed_mean
from fleet.judge.criteria import Criterion, Pack, read_packs
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import Planned
from fleet.judge.host_view import HostView
from fleet.judge.judge import Evidence, judge
from fleet.judge.outliers import FleetFigures
from fleet.judge.stragglers import with_straggler_causes
from fleet.planning.plan import make_plan
from schemas.plans import Plan
from schemas.records import ERROR, UNSUPPORTED, Observation, Rank, Record
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import ROOT, builders, ranks
from tests.unit.agent.benchmarks.test_benchmarks import observations, request

PACKS = read_packs([])
FIGURES: dict[str, tuple[str, float]] = {
    "compute": ("s", 0.0158), "wait": ("s", 3e-4), "launch": ("s", 6.7e-3), "cpu_time": ("s", 7.2e-3), "last_share": ("1", 0.25),
    "preemptions": ("1", 0.01), "clock": ("Hz", 1.9e9), "power": ("W", 675.0), "temperature": ("Cel", 58), "cpus": ("1", 64),
    "cpu_wait": ("s", 1e-6), "cpu_pressure": ("1", 0.003), "cpu_throttled_share": ("1", 0.0),
}  # fmt: skip
"""Name of a figure without the prefix `straggler.` -> (unit, value), measured on four healthy H200."""
SCATTER = {"gpu=0": 1.012, "gpu=1": 0.988}
"""Scope of a GPU -> factor by which its `compute` differs from FIGURES, the same on every host."""


def straggler_plan(*hosts: str, gpu_count: int = 2, device: str = "gpu") -> Plan:
    """Return a plan with the straggler benchmark in the stages `benchmark` and `gang`."""
    stage = {"deadline_s": 60, "collective_timeout_s": 30, "benchmarks": {"straggler": {}}}
    profile = {
        "name": "steps",
        "device": device,
        "processes_per_host": gpu_count,
        "stages": {"benchmark": stage, "gang": stage},
    }
    inventory = builders.inventory(*(hosts or ("h1", "h2")), rackproof_gpu_count=gpu_count)
    return make_plan(profile, inventory, run_id="r1", nonce=builders.NONCE, created=builders.WHEN)


def straggler_evidence(
    plan: Plan, over: Mapping[tuple[str, str, str], Mapping[str, float]] | None = None
) -> dict[str, Evidence]:
    """Return evidence of a fleet whose GPUs have the values of FIGURES.

    Args:
        plan: the plan of the run.
        over: (stage, host, scope) -> name -> value in place of the usual one. The name is a key of FIGURES or a clock event
            reason such as `power_cap`. The value of a reason is the share of time in which it is active.
    """
    result = builders.evidence(plan)
    for number, (name, host_evidence) in enumerate(result.items()):
        records = [with_figures(plan, record, name, number, over or {}) for record in host_evidence.records]
        result[name] = replace(host_evidence, records=tuple(records))
    return result


def with_figures(
    plan: Plan, record: Record, host: str, number: int, over: Mapping[tuple[str, str, str], Mapping[str, float]]
) -> Record:
    stage = "gang" if record.gang else "benchmark"
    kept = [observation for observation in record.observations if observation.scope not in plan.host(host).scopes]
    for scope in plan.host(host).scopes:
        changed = over.get((stage, host, scope), {})
        for name, (unit, value) in FIGURES.items():
            usual = value * SCATTER.get(scope, 1.0) if name == "compute" else value
            kept.append(_observation(f"straggler.{name}", changed.get(name, usual), scope, unit, stage))
        for reason in ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"):
            share = changed.get(reason, 0.9 if reason == "power_cap" else 0.0)
            kept.append(_observation("straggler.throttled_share", share, scope, "1", stage, reason=reason))
    count = len(plan.host(host).scopes)
    first = number * count if record.gang else 0
    ranks = tuple(
        Rank(rank=first + local, local_rank=local, phase="end", exit_code=0, log_tail="") for local in range(count)
    )
    launches = tuple(replace(launch, ranks=ranks) for launch in record.launches)
    return replace(record, observations=tuple(kept), launches=launches)


def _observation(name: str, value: float, scope: str, unit: str, stage: str, **params: Any) -> Observation:
    return builders.observation(name, value, scope=scope, unit=unit, stage=stage, width=1024, **params)


def straggler_verdicts(plan: Plan, evidence: Mapping[str, Evidence], packs: tuple[Pack, ...] = PACKS) -> list[Verdict]:
    """Return the verdicts of the straggler criteria, annotated with causes."""
    views = [HostView(plan, host, evidence[host.name], packs) for host in plan.hosts]
    fleet = FleetFigures(Planned(plan), views)
    criteria = [
        (view, item) for view in views for item in view.criteria().values() if item.name.startswith("straggler.")
    ]
    return with_straggler_causes(
        views, [verdict for view, criterion in criteria for verdict in evaluate(view, criterion, fleet)]
    )


def failed_ranks(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    return [(item.stage, item.host, item.scope) for item in verdicts if item.verdict == FAIL]


def test_ranks_with_usual_scatter_have_no_straggler() -> None:
    plan = straggler_plan()
    verdicts = straggler_verdicts(plan, straggler_evidence(plan))
    assert {verdict.verdict for verdict in verdicts} == {PASS}
    assert {(verdict.criterion, verdict.stage) for verdict in verdicts} == {
        ("straggler-compute", "benchmark"),
        ("straggler-compute", "gang"),
    }


# Slow ranks: the figures that replace those of FIGURES.
HOT = {
    "compute": 0.0207, "wait": 0.0, "last_share": 1.0, "clock": 1.2e9, "power": 390.0, "temperature": 88, "hw_thermal": 0.8,
    "power_cap": 0.0,
}  # fmt: skip
QUOTA = {
    "compute": 0.0225,
    "wait": 2e-4,
    "last_share": 0.28,
    "launch": 0.0148,
    "cpu_wait": 0.0109,
    "cpu_throttled_share": 1.0,
}
PINNED = {"compute": 0.0185, "wait": 0.0, "last_share": 1.0, "launch": 0.0181, "cpu_wait": 0.011, "cpus": 1}
BUSY = {"compute": 0.0185, "wait": 0.0, "last_share": 1.0, "launch": 0.0181, "cpu_wait": 0.009, "cpu_pressure": 0.9}
CAPPED = {"compute": 0.0207, "wait": 0.0, "last_share": 1.0, "clock": 1.4e9, "power": 400.0, "power_cap": 1.0}


@pytest.mark.parametrize(
    ("figures", "reported", "action", "part"),
    [
        pytest.param(
            HOT,
            "its SM clock was 1200 MHz (peers: 1900 MHz); thermal slowdown (hardware) active for 80 % of the time; "
            "its GPU was at 88 °C (peers: 58 °C)",
            "inspect_hardware",
            "gpu=1",
            id="hot",
        ),
        pytest.param(
            CAPPED,
            "its SM clock was 1400 MHz (peers: 1900 MHz) because of its power limit (it drew 400 W, its peers 675 W)",
            "inspect_hardware",
            "gpu=1",
            id="capped",
        ),
        pytest.param(
            QUOTA,
            "the CPU quota of its cgroup stopped it in 100 % of the quota periods; its GPU waits for the CPU: launching kernels "
            "takes 14.8 ms a step (peers: 6.7 ms); its threads wait 10.9 ms a step for a processor (peers: 0.001 ms)",
            "configure",
            "host",
            id="quota",
        ),
        pytest.param(
            PINNED,
            "the rank may use 1 of its host's processors, its peers 64; its GPU waits for the CPU: launching kernels takes "
            "18.1 ms a step (peers: 6.7 ms); its threads wait 11 ms a step for a processor (peers: 0.001 ms)",
            "configure",
            "host",
            id="pinned",
        ),
        pytest.param(
            BUSY,
            "its GPU waits for the CPU: launching kernels takes 18.1 ms a step (peers: 6.7 ms); its threads wait 9 ms "
            "a step for a processor (peers: 0.001 ms); its host was short of processors for 90 % of the time (peers: 0 %)",
            "inspect_hardware",
            "host",
            id="busy",
        ),
        pytest.param(
            {"compute": 0.0207, "wait": 0.0, "last_share": 1.0},
            "no reading of its GPU or its host's CPU during the training steps explains this",
            "inspect_hardware",
            "gpu=1",
            id="unexplained",
        ),
    ],
)
def test_straggler_is_reported_with_its_cause(figures: Any, reported: str, action: str, part: str) -> None:
    plan = straggler_plan()
    slow = figures["compute"] - 0.0158
    waiting = {("gang", host, scope): {"wait": slow} for host in ("h1", "h2") for scope in ("gpu=0", "gpu=1")}
    verdicts = straggler_verdicts(plan, straggler_evidence(plan, {**waiting, ("gang", "h2", "gpu=1"): figures}))
    assert failed_ranks(verdicts) == [("gang", "h2", "gpu=1")]
    (straggler,) = (verdict for verdict in verdicts if verdict.verdict == FAIL)
    assert straggler.reason.startswith("rank 3 (h2 gpu=1) computes ")
    assert (
        f"the other ranks wait {slow * 1e3:.3g} ms a step; this rank is last in {figures['last_share'] * 100:.0f} %"
        in straggler.reason
    )
    assert straggler.reason.partition("): ")[2].partition("; found ")[0] == reported
    assert (straggler.action, straggler.part_scope) == (action, part)
    assert straggler.serial == ("h2-1" if part == "gpu=1" else ""), "the serial is that of the part at fault"
    assert (
        straggler.detail
        == f"{straggler.reason.partition('; found ')[0]}; the limit is 110 % of the fleet's median 15.99 ms over 4 GPUs"
    )


def test_slow_gpu_in_the_benchmark_stage_is_named() -> None:
    plan = straggler_plan()
    (actual,) = (
        verdict
        for verdict in straggler_verdicts(plan, straggler_evidence(plan, {("benchmark", "h2", "gpu=1"): HOT}))
        if verdict.verdict == FAIL
    )
    assert (actual.stage, actual.host, actual.scope) == ("benchmark", "h2", "gpu=1")
    assert actual.reason.startswith("rank 1 (h2 gpu=1) computes 29 % longer than its peers: its SM clock")


def test_each_slow_rank_is_reported() -> None:
    plan = straggler_plan("h1", "h2", "h3")
    slow = {("gang", "h2", "gpu=1"): HOT, ("gang", "h3", "gpu=0"): QUOTA}
    assert failed_ranks(straggler_verdicts(plan, straggler_evidence(plan, slow))) == [
        ("gang", "h2", "gpu=1"),
        ("gang", "h3", "gpu=0"),
    ]


REAL = [path for path in sorted((ROOT / "docs/measurements").glob("*/hosts/*.json")) if "slowed" not in str(path)]
"""Records of healthy hosts. Their CPUs launch kernels for 66 to 92 % of the compute time."""


@cache
def real_ranks(model: str) -> list[list[dict[str, float]]]:
    """Return for each healthy host with GPUs of this model the figures of its ranks: name without `straggler.` -> value."""
    hosts = []
    for path in REAL:
        ranks_of_host: dict[str, dict[str, float]] = defaultdict(dict)
        for item in json.loads(path.read_text())["observations"] if path.parts[-3].startswith(model) else ():
            name = item["name"].removeprefix("straggler.")
            if name in FIGURES and item["name"] != name and item["status"] == "measured":
                ranks_of_host[item["scope"]][name] = item["value"]
        hosts += [[*ranks_of_host.values()]] if ranks_of_host else []
    return hosts


def real_fleet(
    seed: int, model: str, hosts: int, gpu_count: int, stage: str = "benchmark"
) -> tuple[Plan, dict[tuple[str, str, str], dict[str, float]]]:
    """Return a plan and the figures of its ranks, for `straggler_evidence`.

    Each host is a copy of a random real one. Its ranks differ from those of the real host by up to 1.5 %.
    """
    chance = random.Random(seed)  # noqa: S311 - reproducible
    plan = straggler_plan(*(f"h{at}" for at in range(hosts)), gpu_count=gpu_count)
    over = {}
    for host in plan.hosts:
        of_host = chance.choice(real_ranks(model))
        for at, scope in enumerate(host.scopes):
            factor = chance.uniform(0.985, 1.015)
            figures = of_host[at % len(of_host)]
            over[stage, host.name, scope] = {
                name: value * factor if name in ("compute", "launch") else value for name, value in figures.items()
            }
    return plan, over


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("stage", ["benchmark", "gang"])
@pytest.mark.parametrize("model", ["h100", "h200"])
@pytest.mark.parametrize(("hosts", "gpu_count"), [(3, 1), (3, 4), (8, 1), (8, 8), (24, 2)])
def test_healthy_hosts_whose_processors_differ_in_speed_pass(
    hosts: int, gpu_count: int, model: str, stage: str, seed: int
) -> None:
    plan, over = real_fleet(seed, model, hosts, gpu_count, stage)
    assert failed_ranks(straggler_verdicts(plan, straggler_evidence(plan, over))) == []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ["h100", "h200"])
@pytest.mark.parametrize(("hosts", "gpu_count"), [(6, 1), (3, 4), (8, 8), (24, 2)])
def test_slow_gpu_is_found_among_hosts_whose_processors_differ_in_speed(
    hosts: int, gpu_count: int, model: str, seed: int
) -> None:
    """The GPU takes as much longer as one that needs 1.3 times the median for its kernels. Launching takes as long as before."""
    plan, over = real_fleet(seed, model, hosts, gpu_count)
    median = statistics.median(figures["compute"] for figures in over.values())
    slow = over["benchmark", "h1", "gpu=0"]
    slow["compute"] = 1.3 * max(median, slow["compute"])
    (straggler,) = (item for item in straggler_verdicts(plan, straggler_evidence(plan, over)) if item.verdict == FAIL)
    assert (straggler.host, straggler.part_scope, straggler.action) == ("h1", "gpu=0", "inspect_hardware")


LAUNCHING = {"compute": 0.0195, "launch": 0.0165}
"""A healthy rank that computes 1.22 times as long as the others, because launching takes 2.5 times as long."""


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (LAUNCHING, (PASS, "gpu=1", "none")),
        ({**LAUNCHING, "temperature": 75}, (PASS, "gpu=1", "none")),
        ({**LAUNCHING, "cpus": 16}, (PASS, "gpu=1", "none")),
        ({"compute": 0.0209, "launch": 0.019}, (PASS, "gpu=1", "none")),
        ({"compute": 0.0215, "launch": 0.019}, (FAIL, "host", "inspect_hardware")),
        ({"compute": 0.08, "launch": 0.078}, (FAIL, "host", "inspect_hardware")),
        ({**LAUNCHING, "cpu_wait": 0.002}, (FAIL, "host", "inspect_hardware")),
        ({**LAUNCHING, "cpu_pressure": 0.5}, (FAIL, "host", "inspect_hardware")),
        ({**LAUNCHING, "cpu_throttled_share": 0.5}, (FAIL, "host", "configure")),
        ({**LAUNCHING, "clock": 1.5e9}, (FAIL, "gpu=1", "inspect_hardware")),
        ({**LAUNCHING, "hw_thermal": 0.5}, (FAIL, "gpu=1", "inspect_hardware")),
        ({"compute": 0.0195, "launch": 0.0067}, (FAIL, "gpu=1", "inspect_hardware")),
        ({"compute": 0.0195, "launch": 0.0116}, (FAIL, "gpu=1", "inspect_hardware")),
        ({"compute": 0.0260, "launch": 0.0157}, (FAIL, "host", "inspect_hardware")),
        ({"compute": 0.0275, "launch": 0.0166}, (FAIL, "gpu=1", "inspect_hardware")),
    ],
)
def test_rank_passes_a_higher_limit_only_if_launching_alone_explains_its_compute_time(
    figures: dict[str, float], expected: tuple[str, str, str]
) -> None:
    plan = straggler_plan()
    verdicts = straggler_verdicts(plan, straggler_evidence(plan, {("gang", "h2", "gpu=1"): figures}))
    (of_rank,) = (item for item in verdicts if (item.stage, item.host, item.scope) == ("gang", "h2", "gpu=1"))
    assert (of_rank.verdict, of_rank.part_scope, of_rank.action) == expected
    if of_rank.verdict == PASS:
        assert of_rank.severity == ""
        assert isinstance(of_rank.limit, float)
        assert of_rank.limit == pytest.approx(1.33 * 0.0158, rel=0.02)
        assert "its GPU waits for the CPU: launching kernels takes" in of_rank.detail
        assert "such a rank may take 133 % of the median of its peers" in of_rank.reason


@pytest.mark.parametrize(("ranks_of_host", "is_found"), [(2, False), (3, True), (8, True)])
def test_slow_gpu_of_a_host_that_launches_slowly_is_found_beside_the_other_gpus_of_the_host(
    ranks_of_host: int, is_found: bool
) -> None:
    plan = straggler_plan("h1", "h2", "h3", gpu_count=ranks_of_host)
    scopes = [("benchmark", "h2", f"gpu={at}") for at in range(ranks_of_host)]
    over = {scope: {"compute": 0.0182, "launch": 0.0150} for scope in scopes}
    for compute, fails in ((0.0195, False), (0.0206, is_found)):  # 7 and 13 % longer than the other GPUs of the host
        over[scopes[0]] = {"compute": compute, "launch": 0.0150}
        verdicts = straggler_verdicts(plan, straggler_evidence(plan, over))
        assert failed_ranks(verdicts) == ([scopes[0]] if fails else [])
        assert not [item for item in verdicts if item.verdict == FAIL and item.part]


@pytest.mark.parametrize("name", ["launch", "cpu_wait"])
def test_rank_without_the_figure_that_shows_the_cause_has_the_usual_limit(name: str) -> None:
    plan = straggler_plan()
    evidence = straggler_evidence(plan, {("gang", "h2", "gpu=1"): {**LAUNCHING, "cpus": 1}})
    assert failed_ranks(straggler_verdicts(plan, evidence)) == []
    evidence["h2"] = builders.with_observations(
        evidence["h2"], make_unmeasured(f"straggler.{name}", UNSUPPORTED), gang=True
    )
    assert failed_ranks(straggler_verdicts(plan, evidence)) == [("gang", "h2", "gpu=1")]


def test_two_gpus_are_not_compared() -> None:
    """If one of two GPUs is slower, no majority shows which of them is normal."""
    plan = straggler_plan(gpu_count=1)
    assert straggler_verdicts(plan, straggler_evidence(plan, {("gang", "h2", "gpu=0"): HOT})) == []


def test_slow_process_of_a_rehearsal_passes() -> None:
    """In a rehearsal, the ranks are processes that share CPUs, so a slow rank is not a failure."""
    plan = straggler_plan(device="cpu")
    assert plan.rehearsal
    verdicts = straggler_verdicts(
        plan, straggler_evidence(plan, {("gang", "h2", "cpu=1"): {"compute": 0.9, "cpu_pressure": 1.0}})
    )
    assert len(verdicts) == 8  # two hosts, two processes, two stages
    assert {verdict.verdict for verdict in verdicts} == {PASS}


@pytest.mark.parametrize("name", ["compute", "wait", "clock", "last_share", "cpu_time"])
def test_missing_straggler_figure_is_inconclusive(name: str) -> None:
    plan = straggler_plan()
    host_evidence = straggler_evidence(plan)
    change = make_unmeasured(f"straggler.{name}", ERROR)
    host_evidence["h2"] = builders.with_observations(host_evidence["h2"], change, gang=True)
    verdicts = [
        item
        for item in judge(plan, host_evidence, PACKS)
        if item.name.startswith("straggler.") and item.verdict != PASS
    ]
    assert [(item.host, item.scope, item.verdict) for item in verdicts] == [("h2", "gpu=1", INCONCLUSIVE)]


def test_unsupported_kernel_counter_is_not_reported_as_missing() -> None:
    plan = straggler_plan()
    host_evidence = straggler_evidence(plan)
    for name in ("cpu_pressure", "cpu_throttled_share", "cpu_wait", "cpus"):
        host_evidence["h2"] = builders.with_observations(
            host_evidence["h2"], make_unmeasured(f"straggler.{name}", UNSUPPORTED), gang=True
        )
    assert [
        item
        for item in judge(plan, host_evidence, PACKS)
        if item.name.startswith("straggler.") and item.verdict != PASS
    ] == []


def make_unmeasured(name: str, status: str) -> Callable[[Observation], Observation]:
    """Return a function that removes the value of the figure `name` of GPU 1, and sets the status of this figure."""

    def change(observation: Observation) -> Observation:
        is_target = observation.name == name and observation.scope == "gpu=1"
        return replace(observation, status=status, value=None, reason="read failed") if is_target else observation

    return change


def test_trimmed_mean_ignores_one_slow_step_but_not_ten_percent_of_steps() -> None:
    assert trimmed_mean([0.01] * 39 + [5.0]) == pytest.approx(0.01)
    assert trimmed_mean([0.01] * 36 + [0.05] * 4) > 0.011


# CPU counters of the kernel.


def write_kernel_files(
    root: Path, *, delays: int, pressure: int | None, cgroup: str, **groups: tuple[int, int]
) -> Path:
    """Write the kernel's files with CPU counters below `root`, and return `root`.

    Args:
        root: the directory in place of `/`.
        delays: how long each of two threads waited for a CPU so far, in nanoseconds.
        pressure: how long any process waited for a CPU so far, in microseconds; None if the kernel has no PSI.
        cgroup: content of /proc/self/cgroup.
        groups: cgroup -> (number of periods of its CPU quota, number of periods in which it was throttled).
    """
    files = {f"proc/self/task/{thread}/schedstat": f"5 {delays} 1\n" for thread in (7, 8)}
    files |= {"proc/self/cgroup": cgroup}
    if pressure is not None:
        files["proc/pressure/cpu"] = (
            f"some avg10=0.00 avg60=0.00 avg300=0.00 total={pressure}\nfull avg10=0.00 total=0\n"
        )
    for group, (periods, throttled) in groups.items():
        files[f"sys/fs/cgroup/{group}/cpu.stat"] = f"usage_usec 1\nnr_periods {periods}\nnr_throttled {throttled}\n"
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


@pytest.mark.parametrize(
    ("cgroup", "group"),
    [
        ("0::/pod/box\n", "pod/box"),
        ("0::/pod/box\n", "pod"),
        ("4:memory:/x\n3:cpu,cpuacct:/pod/box\n", "cpu,cpuacct/pod"),
        ("3:cpu:/pod/box\n0::/\n", "cpu/pod/box"),
    ],
)
def test_quota_is_read_from_the_cgroup_or_its_parents(tmp_path: Path, cgroup: str, group: str) -> None:
    root = write_kernel_files(tmp_path, delays=0, pressure=0, cgroup=cgroup, **{group: (100, 10)})
    first = replace(host_cpu.read_counters(root), time=10.0)
    write_kernel_files(tmp_path, delays=3_000_000, pressure=500_000, cgroup=cgroup, **{group: (120, 18)})
    spent = host_cpu.usage_between(first, replace(host_cpu.read_counters(root), time=12.0))
    assert spent == host_cpu.CpuUsage(waited=0.006, pressure=0.25, throttled=0.4)


def test_missing_kernel_counters_give_the_reason_in_place_of_a_number(tmp_path: Path) -> None:
    spent = host_cpu.usage_between(host_cpu.read_counters(tmp_path), host_cpu.read_counters(tmp_path))
    assert spent == host_cpu.CpuUsage(
        waited=host_cpu.NO_DELAYS, pressure=host_cpu.NO_PRESSURE, throttled=host_cpu.NO_QUOTA
    )


# Real ranks.

RANKS, SLOW = 3, 1
STEPS = {"layers": 2, "width": 64, "heads": 4, "sequence": 32, "batch_size": 8, "seconds": 1.0}
LIMIT = Criterion(
    id="slow",
    name="straggler.compute",
    scope="cpu",
    operator="le",
    fleet_fraction=1.25,
    unit="s",
    action="none",
    source="test",
)
"""The limit is 1.25 times the median. With one slowed rank of three, the slower healthy rank is the median, so both healthy
ranks pass."""


@contextlib.contextmanager
def pause_repeatedly() -> Iterator[Callable[[int], None]]:
    """Yield a function `begin(pid)`. It starts a thread that keeps the process stopped for 90 % of the time.

    On a busy machine the thread wakes up late, and the process runs for longer than planned. So each pause lasts at least nine
    times as long as the process ran before it.
    """
    ended, threads = threading.Event(), list[threading.Thread]()

    def pause(pid: int) -> None:
        ran_s = 0.0
        while not ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
            time.sleep(max(0.11, 9 * ran_s))
            continued = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.012)
            ran_s = time.monotonic() - continued

    def begin(pid: int) -> None:
        threads.append(threading.Thread(target=pause, args=(pid,)))
        threads[0].start()

    yield begin
    ended.set()
    for thread in threads:
        thread.join()


@contextlib.contextmanager
def share_one_cpu() -> Iterator[Callable[[int], None]]:
    """Yield a function `begin(pid)` that pins the process to one CPU, on which seven busy processes run.

    Each busy process has its own session, because the kernel's autogroup scheduling divides CPU time between sessions.
    """
    one = min(os.sched_getaffinity(0))
    busy_loop = f"import os\nos.sched_setaffinity(0, {{{one}}})\nwhile os.getppid() == {os.getpid()}: pass"
    burners = [subprocess.Popen([sys.executable, "-c", busy_loop], start_new_session=True) for _ in range(7)]

    def begin(pid: int) -> None:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), {one})

    yield begin
    for burner in burners:
        burner.kill()
        burner.wait()


@pytest.mark.parametrize(
    ("slow_down", "cause"),
    [
        pytest.param(pause_repeatedly, "", id="stopped"),
        pytest.param(
            share_one_cpu,
            "the rank may use 1 of its host's processors",
            id="starved",
            marks=pytest.mark.skipif(len(os.sched_getaffinity(0)) <= RANKS, reason="needs more CPUs than ranks"),
        ),
    ],
)
def test_slowed_real_rank_is_reported(
    tmp_path: Path, slow_down: Callable[[], contextlib.AbstractContextManager[Callable[[int], None]]], cause: str
) -> None:
    """Slow one of three gloo ranks from its first timed step on."""
    wanted = {**request(straggler=STEPS), "devices": list(range(RANKS)), "stage": "benchmark"}
    (tmp_path / "request.json").write_text(json.dumps(wanted))
    with slow_down() as begin:
        started = ranks.start("agent.benchmarks", "--request", "request.json", work=tmp_path, ranks=RANKS)
        begin(wait_for_timed_steps(tmp_path, started.processes[SLOW]))
        assert started.wait() == [0] * RANKS, (tmp_path / f"rank{SLOW}.log").read_text()
    plan = straggler_plan("h1", "h2", gpu_count=RANKS, device="cpu")
    records = builders.records(plan, "h1")
    ended = tuple(Rank(rank=rank, local_rank=rank, phase="end", exit_code=0, log_tail="") for rank in range(RANKS))
    record = replace(
        records[0],
        observations=tuple(observations(tmp_path)),
        launches=(replace(builders.launch("benchmark", ("h1",)), ranks=ended),),
    )
    pack = Pack(name="test", gpu_names=(), criteria=(LIMIT,), chosen=True)
    verdicts = straggler_verdicts(plan, {"h1": Evidence(records=(record,)), "h2": Evidence()}, (pack,))
    assert len(verdicts) == RANKS
    assert failed_ranks(verdicts) == [("benchmark", "h1", f"cpu={SLOW}")]
    (straggler,) = (verdict for verdict in verdicts if verdict.verdict == FAIL)
    assert straggler.reason.startswith(f"rank {SLOW} (h1 cpu={SLOW}) computes ")
    assert "the other ranks wait" in straggler.reason
    assert cause in straggler.reason


def wait_for_timed_steps(work: Path, rank: BaseProcess) -> int:
    """Wait until the rank SLOW runs timed steps. Return its process ID."""
    state = work / f"rank{SLOW}.state.json"
    while rank.is_alive():
        with contextlib.suppress(OSError, ValueError):
            if rank.pid and json.loads(state.read_text())["phase"].startswith("straggler, "):
                return rank.pid
        time.sleep(0.01)
    raise AssertionError(f"rank {SLOW} ended before its timed steps: {(work / f'rank{SLOW}.log').read_text()}")
