"""Select the tests that the benchmark `verbs` runs on each RDMA port, and report their figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from agent.benchmarks.links.perftest import Bandwidth, Latency, PerftestError, parse_bandwidth, parse_latency
from agent.benchmarks.links.perftest_run import Installation, VerbsTest
from agent.benchmarks.links.rdma_ports import RdmaPort, nearest_gpu
from schemas.records import SKIPPED, UNSUPPORTED

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

UNITS = {"verbs.bandwidth": "B/s", "verbs.latency": "s", "verbs.message_rate": "1/s"}
REMEDY = "install perftest (package perftest, from the distribution or from DOCA-OFED) to measure RDMA without NCCL"


def planned_tests(settings: Mapping[str, Any]) -> list[VerbsTest]:
    """Return the tests of one port or pair of ports. Tests with GPU memory come last, because the host may not support them."""
    figures, seconds = settings["figures"], settings["seconds"]
    tests = [
        VerbsTest(
            figure="bandwidth",
            op=op,
            direction=direction,
            memory=memory,
            size_bytes=settings["size_bytes"],
            seconds=seconds,
        )
        for memory, op, direction in itertools.product(settings["memories"], settings["ops"], settings["directions"])
        if "bandwidth" in figures
    ]
    tests += [VerbsTest(figure=figure, seconds=seconds) for figure in ("latency", "message_rate") if figure in figures]
    return sorted(tests, key=lambda test: test.memory == "gpu")


class PortReport:
    """Reports the figures of ports, and the reason for each missing figure."""

    def __init__(self, context: RankContext, settings: Mapping[str, Any]) -> None:
        self._context, self._settings = context, settings
        self.installation = Installation()
        self._ratios: dict[RdmaPort, dict[str, float]] = {}
        """Port -> partner -> highest bandwidth of one-way writes from host memory to the partner, divided by the port's rate."""

    def usable_ports(self, ports: list[RdmaPort]) -> list[RdmaPort]:
        """Return the ports to measure. Report why the other ports are not measured.

        If a program of perftest that the tests need is missing, report this for the host and return no port.
        """
        for port in ports:
            if port.unusable:
                self._context.report_absent(
                    "verbs.bandwidth", unit="B/s", scope=port.scope, status=UNSUPPORTED, reason=port.unusable
                )
        usable = [port for port in ports if not port.unusable]
        missing = sorted({test.program for test in planned_tests(self._settings)} - self._installed())
        if usable and missing:
            reason = f"{', '.join(missing)} not found: {REMEDY}"
            self._context.report_absent("verbs.bandwidth", unit="B/s", scope="host", status=SKIPPED, reason=reason)
            return []
        return usable

    def _installed(self) -> set[str]:
        return {name for name, path in self.installation.paths.items() if path}

    def command(self, test: VerbsTest, port: RdmaPort, tcp_port: int, server: str = "") -> list[str]:
        """Return the command of one side of a test. Raises PerftestError if the test needs GPU memory and cannot use it."""
        gpu: list[str] | str = []
        if test.memory == "gpu":
            is_gpu = self._context.kind == "gpu"
            missing = "/proc/driver/nvidia/gpus lists no GPU under test" if is_gpu else "the host has no GPU under test"
            address = nearest_gpu(port, self._context.devices) if is_gpu else ""
            gpu = self.installation.gpu_options(address) if address else missing
            if isinstance(gpu, str):
                raise PerftestError(gpu)
        return [self.installation.path(test.program) or test.program, *test.arguments(port, tcp_port, gpu, server)]

    def figure(self, test: VerbsTest, port: RdmaPort, stdout: str, **where: str) -> str:
        """Report the figures in the output of a test; return why there are none, or an empty string.

        Args:
            where: `sharing`, and between hosts also `partner`.
        """
        try:
            result = parse_latency(stdout) if test.figure == "latency" else parse_bandwidth(stdout)
        except PerftestError as error:
            return str(error)
        common = self._common(test, port, where) | {
            "mtu": result.conditions.mtu,
            "gid_type": port.gid_type,
            "gid_index": result.conditions.gid_index,
            "numa_node": port.numa_node,
            "pci_path": port.pci_path,
        }
        for name, unit, value in _values(test, port, result):
            if not value > 0:
                return f"{name} is {value:g}: nothing was transferred"
            self._context.report(name, value, unit=unit, **common)
            is_write = (test.op, test.direction, test.memory) == ("write", "one_way", "host")
            if name == "verbs.rate_ratio" and is_write and "partner" in where:
                # The write may be measured twice, alone and while all ports transfer (`sharings`): the higher ratio counts.
                ratios = self._ratios.setdefault(port, {})
                ratios[where["partner"]] = max(value, ratios.get(where["partner"], 0.0))
        return ""

    def best_partners(self) -> None:
        """Report for each port `verbs.best_ratio`: its highest `verbs.rate_ratio` in one-way writes to any partner.

        This ratio is low only if the rate to every partner is low.
        """
        for port, ratios in self._ratios.items():
            self._context.report(
                "verbs.best_ratio",
                max(ratios.values()),
                unit="1",
                scope=port.scope,
                rail=port.rail,
                partners=len(ratios),
            )

    def absent(self, test: VerbsTest, port: RdmaPort, status: str, reason: str, **where: str) -> None:
        """Report why a test has no figure."""
        name = f"verbs.{test.figure}"
        self._context.report_absent(
            name, unit=UNITS[name], status=status, reason=reason, **self._common(test, port, where)
        )

    def _common(self, test: VerbsTest, port: RdmaPort, where: Mapping[str, str]) -> dict[str, Any]:
        partner = f",partner={where['partner']}" if "partner" in where else ""
        common: dict[str, Any] = {
            "scope": f"{port.scope}{partner}",
            "sharing": where["sharing"],
            "rail": port.rail,
            "size_bytes": test.size_bytes,
        }
        if test.figure == "bandwidth":
            common |= {"op": test.op, "direction": test.direction, "memory": test.memory}
        return common


def _values(test: VerbsTest, port: RdmaPort, result: Bandwidth | Latency) -> Iterator[tuple[str, str, float]]:
    """Yield name, unit and value of the figures of one test."""
    if isinstance(result, Latency):
        yield "verbs.latency", "s", result.typical
    elif test.figure == "message_rate":
        yield "verbs.message_rate", "1/s", result.messages_per_second
    else:
        ways = 2 if test.direction == "both_ways" else 1
        yield "verbs.bandwidth", "B/s", result.bytes_per_second
        yield "verbs.rate_ratio", "1", result.bytes_per_second / (ways * port.rate)
        yield "verbs.mtu", "B", float(result.conditions.mtu)
