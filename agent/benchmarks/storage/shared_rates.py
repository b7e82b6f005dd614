"""Rates of a shared directory: bandwidth with a growing number of clients (hosts), and files created, looked up and removed."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from agent.benchmarks.storage import fio, shard
from agent.benchmarks.storage.local_storage import MARGIN_S
from agent.benchmarks.storage.shared_clients import Clients
from agent.benchmarks.storage.target import ACCESS_S, FioRunner, TargetReport, small_region
from schemas.scopes import HOST

FILE = "data"
"""Beginning of the name of each test file."""
DEPTH = 4
"""Transfers in flight per job. The number is small, so that a slow client can finish them soon after the end of the pass."""
MOST_FILES = 20_000
"""Maximum number of files that a host creates."""
SATURATED = 0.9
"""Share of the highest total bandwidth. `saturation_clients` is the smallest number of clients whose total reaches this share."""


def numbers_of_clients(first: int, hosts: int) -> list[int]:
    """Return the numbers of clients to measure: `first`, then each time twice as many, and at last `hosts`.

    If `first` is 0 or not less than `hosts`, `hosts` is the only number.
    """
    counts = []
    while 0 < first < hosts:
        counts.append(first)
        first *= 2
    return [*counts, hosts]


class SharedRates:
    """The bandwidth of each client, and of all clients together."""

    def __init__(self, clients: Clients, runner: FioRunner, report: TargetReport, settings: Mapping[str, Any]) -> None:
        self._clients, self._runner, self._report, self._settings = clients, runner, report, settings
        self._seconds = float(settings["seconds"])
        self._limit_s = self._seconds + MARGIN_S
        self._file = FILE
        self._ramp: dict[str, dict[tuple[int, bool], float]] = defaultdict(dict)
        """Operation -> (number of clients, whether this was the last measurement) -> total bandwidth in B/s."""
        self._written: list[fio.FioResult] = []
        self._rounds: list[dict[str, Any]] = []
        """For each round in which all clients read: reader -> `rate` in B/s, and `owner` of the file that it read."""
        self._is_readable = False
        """Whether every job of this host wrote a whole block in the last round of writing."""
        # A quarter of the free space is for the files of all hosts, and another quarter for the shards of their checkpoint.
        free = clients.target.free // 4 // max(1, len(clients.hosts))
        self._counts = numbers_of_clients(settings["first_clients"], len(clients.hosts))
        size = min(settings["size_bytes"], free // len(self._counts)) // runner.jobs
        if size < fio.SEQUENTIAL_BYTES:
            clients.target.problem = small_region(
                settings["size_bytes"], runner.jobs, clients.target.free, len(clients.hosts)
            )
        self._step_bytes = max(1, size // fio.SEQUENTIAL_BYTES) * fio.SEQUENTIAL_BYTES

    def run(self) -> None:
        """Measure with each number of clients. The figures of each client come from the last measurement, with all clients."""
        for number, count in enumerate(self._counts):
            is_last = number == len(self._counts) - 1
            # The last measurement has all hosts that still take part. Some may have been excluded since `_counts` was computed.
            part = self._clients.hosts if is_last else self._clients.hosts[:count]
            # Each measurement has its own files, because some file system clients cache the size of a file.
            self._file = f"{FILE}{number}"
            regions: dict[str, int] = {}
            for round_number in range(1, (self._settings["rounds"] if is_last else 1) + 1):
                regions = self._write(f"write/{number}/{round_number}", part, is_last)
                self._is_readable = self._clients.host in regions
            for round_number in range(1, (self._settings["rounds"] if is_last else 1) + 1):
                self._read(f"read/{number}/{round_number}", part, regions, round_number, is_last)
        self._report_writes()
        self._report_reads()
        self._report_ramp()

    def _write(self, step: str, part: Sequence[str], is_last: bool) -> dict[str, int]:
        """Write on the hosts of `part` at the same time; return host -> bytes that its slowest job wrote.

        The bytes are rounded down to whole blocks. A host is left out if one of its jobs wrote no whole block.
        """
        item = fio.FioPass(name="write", op="write", pattern="sequential", seconds=self._seconds, depth=DEPTH)
        result = self._pass(item, part, self._clients.host, self._step_bytes)
        # `job_bytes` lacks the jobs that wrote nothing.
        all_wrote = result and len(result.job_bytes) >= self._runner.jobs
        answer = {"rate": result.bytes_per_second, "bytes": min(result.job_bytes) if all_wrote else 0} if result else {}
        answers = {
            host: value for host, value in self._clients.step(step, answer, self._limit_s).items() if host in part
        }
        self._aggregate("write", [float(value["rate"]) for value in answers.values()], is_last)
        if is_last and result:
            self._written.append(result)
        blocks = {host: int(value["bytes"]) // fio.SEQUENTIAL_BYTES for host, value in answers.items()}
        return {host: number * fio.SEQUENTIAL_BYTES for host, number in blocks.items() if number > 0}

    def _read(
        self, step: str, part: Sequence[str], regions: Mapping[str, int], round_number: int, is_last: bool
    ) -> None:
        """Let all hosts of `part` read at the same time, each the file of another host."""
        item = fio.FioPass(
            name="read", op="read", pattern="sequential", seconds=self._seconds, depth=DEPTH, repeats=True
        )
        owner = self._owner(part, regions, round_number)
        result = self._pass(item, part, owner, regions.get(owner, 0)) if owner else None
        answer = {"rate": result.bytes_per_second, "owner": owner} if result else {}
        answers = self._clients.step(step, answer, self._limit_s)
        rates = {host: value for host, value in answers.items() if host in part and value}
        self._aggregate("read", [float(value["rate"]) for value in rates.values()], is_last)
        if is_last:
            self._rounds.append(rates)

    def _owner(self, part: Sequence[str], regions: Mapping[str, int], round_number: int) -> str:
        """Return the host whose file this host reads in the round `round_number`; empty if this host reads no file.

        This host reads its own file only if no other file is readable.
        """
        if self._clients.host not in part:
            return ""
        order = [*part[(at := part.index(self._clients.host)) + 1 :], *part[: at + 1]]
        # A host that was excluded after writing its file has removed this file.
        readable = [host for host in order if host in regions and host in self._clients.hosts]
        others = [host for host in readable if host != self._clients.host] or readable
        return others[(round_number - 1) % len(others)] if others else ""

    def _pass(self, item: fio.FioPass, part: Sequence[str], owner: str, size: int) -> fio.FioResult | None:
        clients = self._clients
        if clients.host not in part:
            return None
        region = (clients.file_of(owner, self._file), size, self._step_bytes)
        results = self._runner.run(item, [clients.target], {clients.target.path: region}, self._limit_s)
        return results.get(clients.target.path)

    def _aggregate(self, op: str, rates: Sequence[float], is_last: bool) -> None:
        """Record the total of these rates; of several rounds with the same number of clients, only the highest total."""
        if rates:
            count, rate = len(rates), sum(rates)
            self._ramp[op][count, is_last] = max(rate, self._ramp[op].get((count, is_last), 0.0))

    def _report_ramp(self) -> None:
        """Report the total bandwidth for each number of clients, and the smallest number that saturates the file system."""
        for op, steps in self._ramp.items():
            for (count, is_last), rate in steps.items():
                name = "shared_storage.aggregate_bandwidth" if is_last else "shared_storage.ramp_bandwidth"
                self._report_together(name, "B/s", rate, op=op, clients=count)
            if len(self._counts) > 1:
                enough = SATURATED * max(steps.values())
                fewest = min(count for (count, _), rate in steps.items() if rate >= enough)
                most = max(count for count, _ in steps)
                self._report_together("shared_storage.saturation_clients", "1", fewest, op=op, clients=most)

    def _report_together(self, name: str, unit: str, value: float, **params: Any) -> None:
        context, target = self._clients.context, self._clients.target
        # If a host measures alone, the world scope is `host`. A scope such as `host,directory=data` is not valid.
        scope = target.scope if context.world_scope == HOST else f"{context.world_scope},{target.scope}"
        context.report(name, value, unit=unit, scope=scope, **params)

    def _report_writes(self) -> None:
        """Report this host's best write rate of all rounds, because in one round a file system may serve clients unequally."""
        if self._written:
            best = max(self._written, key=lambda result: result.bytes_per_second)
            about = {"clients": len(self._clients.hosts), "moved_bytes": sum(best.job_bytes)}
            self._report.figure(
                self._clients.target, "shared_storage.bandwidth", best.bytes_per_second, about, op="write"
            )

    def _report_reads(self) -> None:
        """Report the best rate at which this host read a file, and the best rate at which any host read this host's file.

        The best rates show where a fault is: a slow client is slow with every file, and a file in a slow part of the file system
        is slow for every client.
        """
        mine: list[float] = []
        of_files: dict[str, float] = defaultdict(float)
        for rates in self._rounds:
            for reader, value in rates.items():
                owner, rate = str(value["owner"]), float(value["rate"])
                if reader == self._clients.host:
                    mine.append(rate)
                of_files[owner] = max(of_files[owner], rate)
        about, target = {"clients": len(self._clients.hosts)}, self._clients.target
        too_short = f"a job of this host wrote less than 1 MiB in {self._seconds:g} s"
        if mine:
            self._report.figure(target, "shared_storage.bandwidth", max(mine), about, op="read")
        else:
            reason = f"{too_short}, and no other host wrote a file that this host could read"
            self._report.absent(target, reason, "shared_storage.bandwidth", op="read")
        if rate := of_files.get(self._clients.host, 0.0):
            self._report.figure(target, "shared_storage.file_bandwidth", rate, about)
        else:
            unread = "every host that should have read this host's file was excluded before it finished reading"
            reason = unread if self._is_readable else too_short
            self._report.absent(target, reason, "shared_storage.file_bandwidth")


def measure_metadata(clients: Clients, report: TargetReport, settings: Mapping[str, Any]) -> None:
    """Report how many files per second this host creates and removes in its own directory, and looks up in another host's."""
    seconds, limit_s = float(settings["metadata_seconds"]), float(settings["metadata_seconds"]) + ACCESS_S
    count, counts = 0, dict[str, int]()
    for action in ("create", "stat", "remove"):
        # `create` and `stat` end after `seconds`. `remove` ends with the last file, so it has a longer limit for slow servers.
        action_limit_s = limit_s + (10 * seconds if action == "remove" else 0)
        owner = clients.host if action != "stat" else clients.next_host()
        most = MOST_FILES if action == "create" else counts.get(owner, 0) if action == "stat" else count
        folder = clients.file_of(owner, "files")
        command = [sys.executable, "-I", "-S", shard.__file__, action, folder, str(seconds), str(most)]
        answers = clients.run({action: command}, action_limit_s)
        answer = answers.get(action, {"count": 0, "typical": 0.0})
        of_hosts = clients.step(f"metadata/{action}", answer, action_limit_s)
        counts = {host: int(value["count"]) for host, value in of_hosts.items()}
        if action == "create":
            count = int(answer["count"])
        if answer["count"] and answer["typical"] > 0:
            # `typical` is the median time per file, so a short pause of the server or of this host does not lower the rate.
            rate = 1 / float(answer["typical"])
            report.figure(clients.target, "shared_storage.metadata_rate", rate, {"clients": len(counts)}, op=action)
        else:
            reason = f"host {owner} created no file within {seconds:g} s"
            report.absent(clients.target, reason, "shared_storage.metadata_rate", op=action)
