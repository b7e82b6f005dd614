"""Bandwidth, latency and message rate of every RDMA port, measured by perftest, without NCCL.

On one host (stage `benchmark`) each port sends to itself. In a gang (the hosts of one multi-node launch), hosts are paired by a
round-robin tournament (schemas/tournament.py), and each port exchanges data with the partner's port of the same rail. This is the
port in the same PCI slot. If the hosts have no slot in common, it is the port at the same position in the list of ports.

One rank of each host runs the tests; the other ranks wait. Hosts coordinate through the key-value store of the launch, not
through the process group, so a fabric on which NCCL cannot work is measured too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agent.benchmarks.links.nccl_rdma import nccl_rdma
from agent.benchmarks.links.perftest import PerftestError
from agent.benchmarks.links.perftest_run import (
    PerftestRun,
    VerbsTest,
    finish,
    free_tcp_port,
    wait_until_listening,
)
from agent.benchmarks.links.rdma_ports import RdmaPort, fabric_ports
from agent.benchmarks.links.verbs_pairs import measure_pairs
from agent.benchmarks.links.verbs_report import PortReport, planned_tests
from agent.benchmarks.runtime.host_rank import read_request, wait_for_reporting_rank
from schemas.records import ERROR, SKIPPED, UNSUPPORTED
from schemas.stages import GANG

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

LOOPBACK = "127.0.0.1"


def run(context: RankContext, settings: Mapping[str, Any]) -> None:
    """Report `verbs.*` of every RDMA port of this host, or why there are no figures; nothing on a host without RDMA ports."""
    if not context.is_reporting_rank:
        wait_for_reporting_rank(context)
        return
    request = read_request(context)
    report = PortReport(context, settings)
    usable = report.usable_ports(
        fabric_ports(bool(request.get("fabric")), is_virtual=bool(request.get("virtual")), nccl=nccl_rdma(os.environ))
    )
    if context.stage == GANG:
        measure_pairs(context, settings, report, usable, request)
    else:
        _measure_loopback(context, settings, report, usable)


def _measure_loopback(
    context: RankContext, settings: Mapping[str, Any], report: PortReport, ports: list[RdmaPort]
) -> None:
    """Let each port exchange data with itself.

    The ports are measured one after the other, because simultaneous tests would share the host's memory bandwidth.
    """
    tests = planned_tests(settings)
    for port in ports:
        failed = ""
        for test in tests:
            context.set_phase(f"verbs: {port.hca} port {port.number} {test.figure} {test.op}")
            if failed:
                report.absent(test, port, SKIPPED, f"an earlier test of the port failed: {failed}", sharing="alone")
            # After a failed test with GPU memory the other tests still run: perhaps the port only lacks support for GPU memory.
            elif (problem := _loopback(context, report, test, port)) and test.memory == "host":
                failed = problem


def _loopback(context: RankContext, report: PortReport, test: VerbsTest, port: RdmaPort) -> str:
    """Run one test of a port with itself, and report its figures or why there are none.

    Return why the test failed. Return an empty string if it succeeded, or if this host does not support it.
    """
    progress = context.heartbeat.record_progress
    runs: dict[str, PerftestRun] = {}
    tcp_port = free_tcp_port()
    try:
        commands = {
            side: report.command(test, port, tcp_port, server)
            for side, server in (("server", ""), ("client", LOOPBACK))
        }
    except PerftestError as error:
        report.absent(test, port, UNSUPPORTED, str(error), sharing="alone")
        return ""
    try:
        runs["server"] = PerftestRun(commands["server"], port)
        problem = wait_until_listening({"server": (runs["server"], tcp_port)}, progress).get("server", "")
        if not problem:
            runs["client"] = PerftestRun(commands["client"], port)
            problems = finish(runs, test.limit_s, progress)
            # An error of the server is often a consequence of the client's error.
            problem = problems["client"] or problems["server"]
        problem = problem or report.figure(test, port, runs["client"].stdout(), [port], sharing="alone")
    except OSError as error:
        problem = f"{test.program} cannot be started: {error.strerror or error}"
    finally:
        for started in runs.values():
            started.end()
    if problem:
        report.absent(test, port, ERROR, problem, sharing="alone")
    return problem
