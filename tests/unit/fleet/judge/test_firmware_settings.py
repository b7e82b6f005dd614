"""A host with another setting of SMT or of NUMA nodes has the same hardware as the others, so no part of it is blamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.judge import judge
from schemas.readings import READINGS
from schemas.records import Metric
from schemas.reports import FAIL, Cause, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan
from tests.unit.fleet.judge.test_stated import pack_of

CRITERIA = (
    "uniform-cpu-count", "uniform-cpu-threads", "uniform-cpu-cores", "uniform-cpu-sockets", "uniform-cpu-smt",
    "uniform-numa-count", "uniform-numa-memory", "uniform-host-memory", "uniform-pcie-numa", "uniform-adapter-numa",
    "host-memory-vs-fleet", "host-memory-node-vs-fleet", "host-memory-nodes", "host-memory-latency",
)  # fmt: skip
GIB = 1 << 30
BANDWIDTH = 3.6e11
"""Memory bandwidth of a host in B/s."""


def host(
    *, smt: bool = True, cores: int = 96, sockets: int = 2, nodes: int = 2, memory: int = 2048 * GIB, **readings: Any
) -> dict[str, Any]:
    """Return the readings of a host. `readings`: name (with `__` for `.`) -> other value of this reading."""
    threads = cores * (1 + smt)
    return {
        "host.cpu.smt": smt,
        "host.cpu.cores": cores,
        "host.cpu.sockets": sockets,
        "host.cpu.threads": threads,
        "host.cpu.count": threads,
        "host.memory.total": memory,
        "host.numa.count": nodes,
        "host.numa.memory_total": {f"numa={node}": memory // nodes for node in range(nodes)},
        "pcie.numa_node": {"pci=0000:c0:00.0": nodes - 1},
        "infiniband.hca.numa_node": {"hca=mlx5_7": nodes - 1},
        **{name.replace("__", "."): value for name, value in readings.items()},
    }


def failures(
    fleet: Sequence[Mapping[str, Any]], figures: Mapping[str, float] = {}
) -> tuple[list[Verdict], list[Cause]]:
    """Return the failed verdicts, and their causes. `figures`: other figures of the first host."""
    plan = one_figure_plan(*(f"h{number}" for number in range(len(fleet))))
    evidence = {}
    for name, readings in zip((planned.name for planned in plan.hosts), fleet, strict=True):
        metrics = [
            Metric(name=key, unit=READINGS[key].unit, values=value if isinstance(value, dict) else {"host": value})
            for key, value in readings.items()
            if value is not None
        ]
        nodes = readings["host.numa.count"] or 1
        values = {
            "host_memory.nodes": nodes,
            "host_memory.total_bandwidth": BANDWIDTH,
            "host_memory.bandwidth": BANDWIDTH / nodes,
            "host_memory.latency": 1.2e-7,
            **(figures if name == "h0" else {}),
        }
        observations = builders.results(plan, name, "benchmark")
        for figure, value in values.items():
            of_host = figure in ("host_memory.nodes", "host_memory.total_bandwidth")
            for scope in ["host"] if of_host else [f"numa={node}" for node in range(nodes)]:
                observations.append(builders.observation(figure, value, scope=scope))
        evidence[name] = host_evidence(plan, name, *metrics, observations=tuple(observations))
    failed = [
        verdict for verdict in judge(plan, evidence, (pack_of("h200-sxm", *CRITERIA),)) if verdict.verdict == FAIL
    ]
    return failed, list(diagnose(failed, {}))


SETTINGS = {
    "SMT off": (host(smt=False), host(), "smt"),
    "SMT on": (host(), host(smt=False), "smt"),
    "four nodes per socket": (host(nodes=8), host(), "numa-nodes"),
    "one node per socket": (host(), host(nodes=8), "numa-nodes"),
    "interleaved nodes": (host(nodes=1), host(), "numa-nodes"),
    "kernel that reserves a little more memory": (host(nodes=4, memory=2020 * GIB), host(), "numa-nodes"),
}
"""Difference -> readings of the host that differs, readings of the other hosts, problem."""


@pytest.mark.parametrize("others", [2, 3, 7])
@pytest.mark.parametrize("difference", SETTINGS)
def test_another_setting_of_the_firmware_is_one_cause_that_blames_no_part(difference: str, others: int) -> None:
    different, usual, problem = SETTINGS[difference]
    failed, (cause,) = failures([different, *[usual] * others])
    assert {verdict.action for verdict in failed} == {"configure"}
    assert (cause.problem, cause.host, cause.part, cause.action) == (problem, "h0", "host", "configure")


def test_slow_nodes_of_a_host_with_more_nodes_than_the_others_follow_from_the_setting() -> None:
    failed, (cause,) = failures([host(nodes=8), *[host()] * 7])
    assert {"host_memory.bandwidth", "host_memory.nodes", "host.numa.memory_total"} <= {item.name for item in failed}
    assert cause.action == "configure"


@pytest.mark.parametrize("difference", ["SMT off", "four nodes per socket"])
def test_two_hosts_with_different_settings_blame_no_part(difference: str) -> None:
    different, usual, problem = SETTINGS[difference]
    failed, causes = failures([different, usual])
    assert {verdict.action for verdict in failed} == {"configure"}
    assert {cause.problem for cause in causes} == {problem}


FAULTS = {
    "cores are missing": (host(cores=64), "host.cpu.cores"),
    "SMT is off, and cores are missing": (host(smt=False, cores=64), "host.cpu.cores"),
    "threads are offline with the same SMT": (host(host__cpu__threads=150, host__cpu__count=150), "host.cpu.threads"),
    "a socket with its node is missing": (host(sockets=1, cores=48, nodes=1, memory=1024 * GIB), "host.numa.count"),
    "more nodes, and memory is missing": (host(nodes=8, memory=1920 * GIB), "host.memory.total"),
    "more nodes and more memory, as with CXL memory": (host(nodes=3, memory=2560 * GIB), "host.numa.count"),
    "a node has less memory with the same number of nodes": (
        host(memory=1924 * GIB, host__numa__memory_total={"numa=0": 1024 * GIB, "numa=1": 900 * GIB}),
        "host.numa.memory_total",
    ),
}
"""Fault -> readings of the host, and a reading whose failure asks for an inspection."""


@pytest.mark.parametrize("fault", FAULTS)
def test_setting_does_not_explain_failures_if_the_hardware_differs(fault: str) -> None:
    readings, name = FAULTS[fault]
    failed, causes = failures([readings, *[host()] * 3])
    assert "inspect_hardware" in {verdict.action for verdict in failed if verdict.name == name}
    assert "inspect_hardware" in {cause.action for cause in causes}


@pytest.mark.parametrize(
    ("readings", "name"),
    [
        (host(smt=False, host__cpu__cores=None), "host.cpu.threads"),
        (host(nodes=8, host__memory__total=None), "host.numa.count"),
        (host(nodes=8, host__cpu__sockets=None), "host.numa.count"),
    ],
    ids=["cores", "memory", "sockets"],
)
def test_setting_does_not_explain_failures_if_the_hardware_is_unknown(readings: dict[str, Any], name: str) -> None:
    failed, _ = failures([readings, *[host()] * 3])
    assert {verdict.action for verdict in failed if verdict.name == name} == {"inspect_hardware"}


@pytest.mark.parametrize("figures", [{"host_memory.total_bandwidth": 1e11}, {"host_memory.latency": 2e-6}], ids=str)
def test_number_of_nodes_does_not_explain_slow_memory_of_the_whole_host(figures: Mapping[str, float]) -> None:
    failed, causes = failures([host(nodes=8), *[host()] * 3], figures)
    assert {item.action for item in failed if item.name in figures} == {"inspect_hardware"}
    assert {cause.action for cause in causes} == {"configure", "inspect_hardware"}
