"""Samples of the GPUs over a time of any length, in bounded memory.

The log consists of groups of successive samples, and keeps one sample of each group. At first, each group has one sample. When
the log is full, neighbouring groups are merged in pairs, and new samples are collected into groups of that larger size. The kept
sample of a group is selected at random, because samples at a fixed distance could all fall into the same phase of a pulsed load.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from collectors.base import Absent
from collectors.nvml import GpuSample

MAX_SAMPLES = 20_000
"""Maximum number of kept samples, each of all GPUs. At 20 samples per second, the log is full after about 17 minutes. For eight
GPUs it then takes 40 MB."""

GpuSamples = Mapping[int, GpuSample | Absent]
"""NVML index -> sample of the GPU at one moment."""


class Group(NamedTuple):
    """Successive samples, each of all GPUs, of which one is kept."""

    at: float
    """When the kept sample was read."""
    first: float
    """When the first sample was read."""
    last: float
    """When the last sample was read."""
    gap_s: float
    """Longest time between two successive samples of the group; 0 for a single sample."""
    reads: int
    """Number of samples."""
    samples: GpuSamples
    """The kept sample, but with each GPU's highest temperature in the group. If a GPU could not be read at one of the group's
    times, the reason (`Absent`) replaces its kept sample."""

    def reads_between(self, begin: float, end: float) -> float:
        """Estimate how many samples of the group were read from `begin` to `end`, as if they were evenly spaced in time.

        The group must overlap that time window.
        """
        overlap_s = min(self.last, end) - max(self.first, begin)
        return self.reads * overlap_s / (self.last - self.first) if self.last > self.first else self.reads


class Selection(NamedTuple):
    """The samples of one GPU in a time window."""

    samples: Sequence[tuple[float, GpuSample | Absent]]
    """The kept samples, with their times."""
    reads: int
    """How many samples were read in the window, including those that were not kept."""
    gap_s: float
    """Longest time in the window without a sample, also before the first and after the last sample. If a group is only partly in
    the window, its longest gap counts even if that gap is outside the window."""


class SampleLog:
    """A log that keeps at most MAX_SAMPLES of the samples that are added."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._group_size = 1
        self._random = random.Random(0)  # noqa: S311 - selects samples

    @property
    def last(self) -> float:
        """Return when the last sample was read; minus infinity if there is none."""
        return self._groups[-1].last if self._groups else float("-inf")

    def add(self, at: float, samples: GpuSamples) -> None:
        """Add the samples of one moment. It must be later than the moments of all samples in the log."""
        group = Group(at, at, at, 0.0, 1, samples)
        if self._groups and self._groups[-1].reads < self._group_size:
            self._groups[-1] = self._merge(self._groups[-1], group)
            return
        if len(self._groups) >= MAX_SAMPLES:
            pairs = itertools.zip_longest(self._groups[::2], self._groups[1::2])
            self._groups = [self._merge(first, second) if second else first for first, second in pairs]
            self._group_size *= 2
        self._groups.append(group)

    def select(self, index: int, begin: float, end: float) -> Selection:
        """Return the samples of a GPU between two moments."""
        groups = [group for group in self._groups if group.first <= end and group.last >= begin]
        times = [begin, *itertools.chain.from_iterable((group.first, group.last) for group in groups), end]
        between = (later - earlier for earlier, later in zip(times[::2], times[1::2], strict=True))
        return Selection(
            samples=[(group.at, group.samples[index]) for group in groups if begin <= group.at <= end],
            reads=round(sum(group.reads_between(begin, end) for group in groups)),
            gap_s=max([*between, *(group.gap_s for group in groups)]),
        )

    def _merge(self, first: Group, second: Group) -> Group:
        reads = first.reads + second.reads
        kept, other = (first, second) if self._random.random() * reads < first.reads else (second, first)
        return Group(
            at=kept.at,
            first=first.first,
            last=second.last,
            gap_s=max(first.gap_s, second.gap_s, second.first - first.last),
            reads=reads,
            samples={index: _merge(sample, other.samples[index]) for index, sample in kept.samples.items()},
        )


def _merge(kept: GpuSample | Absent, other: GpuSample | Absent) -> GpuSample | Absent:
    if isinstance(kept, Absent):
        return kept
    if isinstance(other, Absent):
        return other
    return kept._replace(temperature=other.temperature) if other.temperature > kept.temperature else kept
