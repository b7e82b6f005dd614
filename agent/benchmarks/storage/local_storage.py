"""Rates, latencies and correctness of the host's disks, measured by fio in the directories that the inventory names.

One rank of the host measures; the others wait. Each directory gets one test file, and each job of fio uses its own region of the
file. First the regions are written and read sequentially, without the page cache if the file system supports direct I/O. Then
blocks are read and written in random order. At the end every block is read again and compared with the checksum that it contains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent.benchmarks.runtime.host_rank import read_request, wait_for_reporting_rank
from agent.benchmarks.storage import fio
from agent.benchmarks.storage.child import Ended
from agent.benchmarks.storage.target import (
    FioRunner,
    Target,
    TargetReport,
    prepare_targets,
    remove_targets,
    small_region,
)

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

FILE = "data"
MARGIN_S = 20.0
"""A pass is abandoned if fio still runs this many seconds after the time limit of the pass."""
SLOWEST_READ = 0.1
"""The final comparison of all blocks with their checksums may run at this fraction of the speed of the sequential write.

The comparison is abandoned after `seconds / SLOWEST_READ + MARGIN_S` seconds. The setting `seconds` is the time limit of the
sequential write."""
IN_MEMORY = ("tmpfs", "ramfs")
"""Types of file systems that keep files in memory."""
NO_FIO = (
    "fio is not installed: set rackproof_install_fio to true, or install the package fio (RHEL: also fio-engine-libaio)"
)


def run(context: RankContext, settings: Mapping[str, Any]) -> None:
    """Report `local_storage.*` of every directory in `rackproof_local_storage` of the inventory; nothing if there is none."""
    if not context.is_reporting_rank:
        wait_for_reporting_rank(context)
        return
    paths = [str(path) for path in read_request(context).get("local_storage", [])]
    if not paths:
        return
    report = TargetReport(context, "local_storage", settings)
    runner = FioRunner(context=context, jobs=settings["jobs"])
    for sharing in settings["sharings"]:
        for batch in [paths] if sharing == "together" else [[path] for path in paths]:
            context.set_phase(f"local_storage: {', '.join(batch)[:200]} {sharing}")
            _measure(batch, sharing, settings, runner, report)


def _measure(
    paths: Sequence[str], sharing: str, settings: Mapping[str, Any], runner: FioRunner, report: TargetReport
) -> None:
    """Measure all these directories at the same time."""
    context = runner.context
    targets = prepare_targets(context, paths)
    for target in targets if context.kind == "gpu" else ():
        if (kind := target.about.get("filesystem")) in IN_MEMORY:
            target.problem = f"it is on {kind}, in memory and not on a disk: mount the file system of the disk there"
    for target in targets if not runner.path else ():
        target.problem = target.problem or NO_FIO
    try:
        for target in targets:
            target.about |= {"engine": runner.engine, "jobs": runner.jobs}
        _Passes(runner, report, targets, sharing, settings).run()
    finally:
        for target in targets:
            report.absent(target, sharing=sharing)
        remove_targets(context, targets)


class _Passes:
    """The passes over the directories of one batch."""

    def __init__(
        self,
        runner: FioRunner,
        report: TargetReport,
        targets: Sequence[Target],
        sharing: str,
        settings: Mapping[str, Any],
    ) -> None:
        self._runner, self._report, self._targets = runner, report, targets
        self._sharing, self._settings = sharing, settings
        self._seconds = float(settings["seconds"])
        in_pool = Counter(target.pool for target in targets)
        self._regions: dict[str, tuple[str, int, int]] = {}
        for target in targets:
            most = min(settings["size_bytes"], target.free // 2 // in_pool[target.pool])
            step = most // runner.jobs // fio.SEQUENTIAL_BYTES * fio.SEQUENTIAL_BYTES
            self._regions[target.path] = (f"{target.work}/{FILE}", step, step)
            if not step:
                target.problem = target.problem or small_region(
                    settings["size_bytes"], runner.jobs, target.free, in_pool[target.pool]
                )

    def run(self) -> None:
        """Run all passes. If a pass fails in a directory, later passes leave that directory out."""
        written = self._sequential("write", verify=True)
        for target in self._targets:
            if result := written.get(target.path):
                # The jobs end at different offsets. Later passes use only as many bytes of each region as the slowest job wrote.
                size = min(result.job_bytes) // fio.SEQUENTIAL_BYTES * fio.SEQUENTIAL_BYTES
                file, _, step = self._regions[target.path]
                self._regions[target.path] = (file, size, step)
                if len(result.job_bytes) < self._runner.jobs or not size:
                    target.problem = f"a job of fio wrote less than 1 MiB in {self._seconds:g} s"
        self._sequential("read")
        for op in self._settings["ops"]:
            self._random(op)
        self._compare()

    def _sequential(self, op: str, verify: bool = False) -> dict[str, fio.FioResult]:
        item = fio.FioPass(name=f"sequential {op}", op=op, pattern="sequential", seconds=self._seconds, verify=verify)
        results = self._pass(item)
        for target in self._targets if op in self._settings["ops"] else ():
            if result := results.get(target.path):
                about = {"moved_bytes": sum(result.job_bytes)}
                self._figure(target, "local_storage.bandwidth", result.bytes_per_second, about, op=op)
        return results

    def _random(self, op: str) -> None:
        item = fio.FioPass(name=f"random {op}", op=op, pattern="random", seconds=self._seconds, verify=op == "write")
        results = self._pass(item)
        for target in self._targets:
            if result := results.get(target.path):
                about = {"moved_bytes": sum(result.job_bytes)}
                self._figure(target, "local_storage.iops", result.operations_per_second, about, op=op)
                for name in self._settings["percentiles"]:
                    seconds = result.latency_s[name]
                    self._figure(target, "local_storage.latency", seconds, about, op=op, percentile=name)

    def _compare(self) -> None:
        """Read every block that was written, and report how many wrong blocks fio found."""
        item = fio.FioPass(name="comparison", op="read", pattern="sequential", verify=True)
        compared = [target for target in self._targets if not target.problem]
        results = self._pass(item, self._seconds / SLOWEST_READ)
        for target in compared:
            ended = self._runner.endings.get(target.path)
            wrong, where = (
                fio.wrong_blocks(ended.code, ended.stdout, ended.stderr) if isinstance(ended, Ended) else (0, "")
            )
            about: dict[str, Any] = {"first_wrong": where} if wrong else {}
            if result := results.get(target.path):
                about["moved_bytes"] = sum(result.job_bytes)
            if wrong or not target.problem:
                self._figure(target, "local_storage.wrong_blocks", wrong, about)

    def _pass(self, item: fio.FioPass, seconds: float = 0.0) -> dict[str, fio.FioResult]:
        return self._runner.run(item, self._targets, self._regions, (seconds or self._seconds) + MARGIN_S)

    def _figure(self, target: Target, name: str, value: float, about: Mapping[str, Any], **params: str) -> None:
        self._report.figure(target, name, value, about, **params, sharing=self._sharing)
