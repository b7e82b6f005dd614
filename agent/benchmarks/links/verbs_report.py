"""Select the tests that the benchmark `verbs` runs on each RDMA port, and report their figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.benchmarks.links.pcie_links import Links, allowed_rate, links_to_gpu
from agent.benchmarks.links.perftest import Bandwidth, Latency, PerftestError, parse_bandwidth, parse_latency
from agent.benchmarks.links.perftest_run import Installation, VerbsTest
from agent.benchmarks.links.rdma_ports import RdmaPort, nearest_gpu
from schemas.records import SKIPPED, UNSUPPORTED

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

UNITS = {"verbs.bandwidth": "B/s", "verbs.latency": "s", "verbs.message_rate": "1/s"}
PCI_DEVICES = Path("/sys/bus/pci/devices")
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
        self._links: dict[RdmaPort, Links] = {}
        """Port -> the PCIe links between it and the memory of its GPU."""
        self._ratios: dict[RdmaPort, dict[str, tuple[float, dict[str, Any]]]] = {}
        """Port -> partner -> highest `verbs.rate_ratio` of one-way writes from host memory, and its `pcie_rate`, if any."""

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
            address = self._gpu(port)
            gpu = self.installation.gpu_options(address) if address else missing
            if isinstance(gpu, str):
                raise PerftestError(gpu)
        return [self.installation.path(test.program) or test.program, *test.arguments(port, tcp_port, gpu, server)]

    def _gpu(self, port: RdmaPort) -> str:
        """Return the PCI address of the GPU whose memory the port uses; empty if there is none."""
        return nearest_gpu(port, self._context.devices) if self._context.kind == "gpu" else ""

    def _links_to(self, memory: str, port: RdmaPort) -> Links:
        """Return the PCIe links between the port and the memory (`host` or `gpu`) from which it transfers."""
        if memory == "host" or not port.links:
            return port.links
        if port not in self._links:
            self._links[port] = links_to_gpu(port.links, PCI_DEVICES / self._gpu(port))
        return self._links[port]

    def figure(self, test: VerbsTest, port: RdmaPort, stdout: str, at_once: Sequence[RdmaPort], **where: str) -> str:
        """Report the figures in the output of a test; return why there are none, or an empty string.

        Args:
            test: the test.
            port: the port.
            stdout: the output of the test.
            at_once: the ports of this host that transferred at the same time, this one included.
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
        pcie_rate = self._pcie_rate(test, port, at_once, result)
        for name, unit, value in _values(test, result, min(port.rate, pcie_rate)):
            if not value > 0:
                return f"{name} is {value:g}: nothing was transferred"
            limit: dict[str, Any] = (
                {"pcie_rate": pcie_rate} if name == "verbs.rate_ratio" and pcie_rate < port.rate else {}
            )
            self._context.report(name, value, unit=unit, **common, **limit)
            is_write = (test.op, test.direction, test.memory) == ("write", "one_way", "host")
            if name == "verbs.rate_ratio" and is_write and "partner" in where:
                # The write may be measured twice, alone and while all ports transfer (`sharings`): the higher ratio counts.
                ratios = self._ratios.setdefault(port, {})
                known, _ = ratios.get(where["partner"], (0.0, {}))
                if value > known:
                    ratios[where["partner"]] = value, limit
        return ""

    def _pcie_rate(
        self, test: VerbsTest, port: RdmaPort, at_once: Sequence[RdmaPort], result: Bandwidth | Latency
    ) -> float:
        """Return the rate in B/s, one way, that the PCIe links of a port allow in a test; infinite if they do not limit it."""
        measured = result.bytes_per_second / _ways(test) if isinstance(result, Bandwidth) else 0.0
        of_all = [self._links_to(test.memory, other) for other in at_once]
        return allowed_rate(self._links_to(test.memory, port), of_all, measured)

    def best_partners(self) -> None:
        """Report for each port `verbs.best_ratio`: its highest `verbs.rate_ratio` in one-way writes to any partner.

        This ratio is low only if the rate to every partner is low.
        """
        for port, ratios in self._ratios.items():
            ratio, limit = max(ratios.values(), key=lambda each: each[0])
            self._context.report(
                "verbs.best_ratio",
                ratio,
                unit="1",
                scope=port.scope,
                rail=port.rail,
                partners=len(ratios),
                **limit,
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


def _ways(test: VerbsTest) -> int:
    return 2 if test.direction == "both_ways" else 1


def _values(test: VerbsTest, result: Bandwidth | Latency, possible: float) -> Iterator[tuple[str, str, float]]:
    """Yield name, unit and value of the figures of one test. `possible`: the rate in B/s that port and PCIe links allow."""
    if isinstance(result, Latency):
        yield "verbs.latency", "s", result.typical
    elif test.figure == "message_rate":
        yield "verbs.message_rate", "1/s", result.messages_per_second
    else:
        yield "verbs.bandwidth", "B/s", result.bytes_per_second
        yield "verbs.rate_ratio", "1", result.bytes_per_second / (_ways(test) * possible)
        yield "verbs.mtu", "B", float(result.conditions.mtu)
