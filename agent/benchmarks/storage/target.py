"""Code shared by the storage benchmarks: prepare the measured directories, run fio in them, and report their figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent.benchmarks.storage import directory, fio
from agent.benchmarks.storage.child import Ended, run_children
from schemas.catalogue import BENCHMARKS, expand
from schemas.records import ERROR
from schemas.scopes import directory_scope

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

ACCESS_S = 20.0
"""Seconds within which a file system must answer a few small accesses."""
LEAST_BYTES = 64 << 20
"""A directory with less free space than this is not measured."""
MAX_TEXT = 120
_TEXTS = ("work", "filesystem", "device", "model")


@dataclass(kw_only=True)
class Target:
    """A directory of this host that a benchmark measures."""

    path: str
    problem: str = ""
    """Why the directory cannot be measured, or why its measurement stopped; empty if there is no problem."""
    work: str = ""
    """Path of the subdirectory for test files; empty if there is none."""
    free: int = 0
    """Free space in bytes."""
    direct: bool = False
    """Whether files in it can be read and written past the page cache (O_DIRECT)."""
    disks: frozenset[str] = frozenset()
    """Names of the disks that hold the file system; empty if unknown."""
    pool: str = ""
    """Name of the block device, or, if the file system has none, its type. Directories of one pool may share their free space."""
    about: dict[str, Any] = field(default_factory=dict)
    """Parameters that are reported with each figure, such as file system, device and models of the disks."""

    @property
    def scope(self) -> str:
        """Return the scope of the figures of this directory."""
        return directory_scope(self.path)


def prepare_targets(context: RankContext, paths: Sequence[str]) -> list[Target]:
    """Return a target for each path. Each has `work` or a `problem`; if its free space is too small, both."""
    targets = [Target(path=path) for path in paths]
    answers = run_directory_program(context, {target.path: ["prepare", target.path] for target in targets})
    for target in targets:
        answer = answers[target.path]
        if isinstance(answer, str):
            target.problem = answer
            continue
        texts = {key: clean(answer.get(key, "")) for key in _TEXTS[1:]}
        target.work, target.free, target.direct = str(answer["work"]), int(answer["free"]), bool(answer["direct"])
        target.disks = frozenset(map(str, answer["disks"]))
        target.pool = str(answer["pool"])
        target.about = {**texts, "direct": target.direct}
        if target.free < LEAST_BYTES:
            target.problem = (
                f"{target.free / 1e6:.0f} MB are free, {LEAST_BYTES / 1e6:.0f} MB are needed: free up space"
            )
    for target in targets:
        if len(targets) > 1 and target.disks:
            target.about["directories"] = sum(bool(other.disks & target.disks) for other in targets)
    return targets


def small_region(size_bytes: int, jobs: int, free: int, users: int) -> str:
    """Return why the region of a job is smaller than one block.

    Either the profile sets too small a size, or too little space is free for the `users` (directories or hosts) that share it.
    """
    if size_bytes < jobs * fio.SEQUENTIAL_BYTES:
        return f"size_bytes is {size_bytes}, less than 1 MiB for each of {jobs} jobs: increase it in the profile"
    every = users * jobs
    return f"{free / 1e6:.0f} MB are free, too little for {every} job{'' if every == 1 else 's'}: free up space"


def remove_targets(context: RankContext, targets: Iterable[Target]) -> None:
    """Remove the test files. If the file system hangs, they remain. A later measurement removes files older than a day."""
    run_directory_program(
        context, {target.path: ["remove", target.path, target.work] for target in targets if target.work}
    )


def run_directory_program(
    context: RankContext, arguments: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any] | str]:
    """Run the program `directory.py` once per path. `arguments` is path -> arguments; return path -> answer, or problem text."""
    program = (sys.executable, "-I", "-S", directory.__file__)
    commands = {path: [*program, *words] for path, words in arguments.items()}
    return {
        path: program_answer(ended, ACCESS_S)
        for path, ended in run_children(commands, ACCESS_S, context.heartbeat.record_progress).items()
    }


def program_answer(ended: Ended | OSError, limit_s: float) -> dict[str, Any] | str:
    """Return the JSON object that a program of Rackproof printed.

    If the object names a problem, or if there is no object, return the problem as text.
    """
    if isinstance(ended, OSError):
        return f"cannot start a process: {ended.strerror or ended}"
    if ended.code is None:
        return hang_problem(limit_s)
    try:
        answer = json.loads(ended.stdout)
        problem = answer.get("problem", "")
    except (ValueError, AttributeError):
        return f"no answer: {clean(ended.stderr[-MAX_TEXT:]) or f'exit code {ended.code}'}"
    return clean(problem) if problem else dict(answer)


def hang_problem(limit_s: float) -> str:
    """Return the problem text for a file system that did not answer within the limit."""
    return (
        f"no answer within {limit_s:g} s: the file system hangs or is very slow; check kernel log, server and network"
    )


def clean(text: object) -> str:
    """Return the text in one line without control characters, shortened."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())[:MAX_TEXT]


class TargetReport:
    """Reports the figures of directories, and the reason for each missing figure."""

    def __init__(self, context: RankContext, benchmark: str, settings: Mapping[str, Any]) -> None:
        self._context = context
        self._units = {output.name: output.unit for output in BENCHMARKS[benchmark].outputs}
        self._expected = [
            item for item in expand(context.stage, benchmark, settings, context.kind) if item.scope == "directory"
        ]
        self._reported: set[tuple[str, str, frozenset[tuple[str, Any]]]] = set()

    def figure(
        self, target: Target, name: str, value: float, about: Mapping[str, Any] | None = None, **params: Any
    ) -> None:
        """Report a figure. `params` are the parameters by which the plan identifies it; `about` describes the measurement."""
        self._reported.add((target.scope, name, frozenset(params.items())))
        self._context.report(
            name, value, unit=self._units[name], scope=target.scope, **params, **target.about, **(about or {})
        )

    def absent(self, target: Target, reason: str = "", name: str = "", **params: Any) -> None:
        """Report as missing every expected figure with these parameters that has not been reported yet.

        If there is neither a `reason` nor a problem of the directory, report nothing.

        Args:
            target: the directory.
            reason: why the figures are missing; default: the problem of the directory.
            name: name of the figures; default: all.
            params: parameters of the figures.
        """
        reason = reason or target.problem
        for item in self._expected:
            key = (target.scope, item.name, frozenset(item.params.items()))
            is_selected = name in ("", item.name) and params.items() <= item.params.items()
            if reason and is_selected and key not in self._reported:
                self._reported.add(key)
                self._context.report_absent(
                    item.name, unit=self._units[item.name], scope=target.scope, status=ERROR,
                    reason=f"{target.path}: {reason}", **item.params, **target.about,
                )  # fmt: skip


@dataclass(kw_only=True)
class FioRunner:
    """Runs passes of fio on several directories at once."""

    context: RankContext
    jobs: int
    """Number of jobs of fio that use a directory at the same time."""

    def __post_init__(self) -> None:
        """Find the path of fio, and its I/O engine; both are empty if fio is not installed."""
        self.path = fio.program()
        self.engine = fio.engine(self.path) if self.path else ""

    def run(
        self, item: fio.FioPass, targets: Sequence[Target], regions: Mapping[str, tuple[str, int, int]], limit_s: float
    ) -> dict[str, fio.FioResult]:
        """Run the pass in every directory whose `problem` is empty; return path -> figures.

        If the pass fails in a directory, set the `problem` of this directory.

        Args:
            item: the pass.
            targets: the directories.
            regions: path -> test file, bytes of each job's region, and bytes from the start of one region to that of the next.
            limit_s: seconds after which fio is killed.
        """
        commands = {}
        for target in targets:
            if not target.problem:
                file, size, step = regions[target.path]
                commands[target.path] = [self.path, *item.arguments(
                    file, engine=self.engine, direct=target.direct, jobs=self.jobs, size_bytes=size, step_bytes=step
                )]  # fmt: skip
        results = {}
        self.endings = run_children(commands, limit_s, self.context.heartbeat.record_progress)
        for target in targets:
            if target.path not in commands:
                continue
            try:
                results[target.path] = _result(item, self.endings[target.path], limit_s)
            except fio.FioError as error:
                target.problem = f"{item.name}: {error}"
        return results


def _result(item: fio.FioPass, ended: Ended | OSError, limit_s: float) -> fio.FioResult:
    if isinstance(ended, OSError):
        raise fio.FioError(f"fio cannot be started: {ended.strerror or ended}")
    if ended.code is None:
        raise fio.FioError(hang_problem(limit_s))
    return fio.parse(item.op, ended.code, ended.stdout, ended.stderr)
