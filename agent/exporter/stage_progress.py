"""Compute how much of a running stage is done and when it is expected to end, from the expected durations of its benchmarks.

The share of the expected observations that have been made is a poor measure of progress, because most observations come from a
few short benchmarks. So a running stage uses this share only if no durations are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.run.record import HostRun
from agent.run.work_directory import benchmark_start_times
from schemas.catalogue import BENCHMARKS
from schemas.durations import expected_durations, remaining_s, stage_s


class StageProgress:
    """The progress of one launch on this host."""

    def __init__(self, run: HostRun, stage: str, work: Path, ranks: Iterable[int], start: float) -> None:
        """Prepare for a launch.

        Args:
            run, stage: the host's run, and the stage of the launch.
            work, ranks: directory of the ranks' results, and the numbers of the ranks of this host.
            start: when the launch began, by the monotonic clock.
        """
        self._work, self._ranks, self.start = work, tuple(ranks), start
        planned = next((item for item in run.plan.stages if item.name == stage), None)
        self.durations = expected_durations(run.plan, run.host, planned) if planned else {}
        self._expected = expected_counts(run, stage)

    @property
    def expected_s(self) -> float:
        """The expected seconds of the whole launch. It is meaningless if `durations` is empty."""
        return stage_s(self.durations)

    def share(self, observations: Iterable[Mapping[str, object]]) -> float | None:
        """Return the share of the expected observations that have been made; None if no observations are expected."""
        expected = sum(self._expected.values())
        return min(1.0, count(observations) / expected) if expected else None

    def remaining_s(self, now: float, observations: Iterable[Mapping[str, object]]) -> float | None:
        """Return the seconds from `now` (monotonic clock) to the expected end of the launch; None if no durations are known."""
        if not self.durations:
            return None
        start_times = benchmark_start_times(self._work, self._ranks).items()
        began = {name: at - self.start for name, at in start_times if name in self.durations}
        current = max(began, key=lambda name: began[name], default="")
        made = count(item for item in observations if str(item["name"]).partition(".")[0] == current)
        expected = self._expected.get(current, 0)
        share = min(1.0, made / expected) if expected else 0.0
        return remaining_s(self.durations, began, now - self.start, share)


def expected_counts(run: HostRun, stage: str) -> dict[str, int]:
    """Return benchmark -> number of observations that the ranks of this host are expected to make.

    Observations that the supervisor makes from its NVML samples are not included.
    """
    counts: dict[str, int] = {}
    for item in run.plan.expected_of(run.host):
        if item.stage == stage and not _is_sampled(item.name):
            benchmark = item.name.split(".")[0]
            counts[benchmark] = counts.get(benchmark, 0) + len(run.plan.scopes_of(run.host, item))
    return counts


def _is_sampled(name: str) -> bool:
    """Return whether the supervisor, not a rank, makes the observation of this name from its NVML samples."""
    benchmark = BENCHMARKS.get(name.split(".")[0])
    return benchmark is not None and any(output.sampled and output.makes(name) for output in benchmark.outputs)


def count(items: Iterable[Mapping[str, object]]) -> int:
    """Return the number of different observations (name, scope, parameters), without those from NVML samples."""
    return len(
        {(item["name"], item["scope"], str(item.get("params"))) for item in items if not _is_sampled(str(item["name"]))}
    )
