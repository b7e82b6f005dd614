"""The work directory of a launch on one host.

It has the request to the ranks, and for each rank its result, state, log and the dumps of PyTorch's flight recorder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.gang.culprit import TERMINATION_SIGNALS
from agent.gang.flight_recorder import FILE_PREFIX
from agent.gang.rank_state import RankState
from schemas import documents
from schemas.catalogue import BENCHMARKS
from schemas.decode import observation_from_json
from schemas.records import Observation, Rank

LAUNCHER_LOG = "launcher.log"
TAIL_BYTES, MAX_LAST_LINE = 4000, 300
MAX_LOG_BYTES = 16 << 20
"""Size to which a log or a dump is truncated."""
MAX_ARCHIVED_ATTEMPTS = 8


@dataclass(frozen=True, kw_only=True)
class RankResults:
    """The results of the ranks of this host."""

    observations: tuple[Observation, ...]
    windows: tuple[Mapping[str, Any], ...]
    """Time windows for which the ranks request NVML samples."""
    software: Mapping[str, str]
    problems: tuple[str, ...]
    """One message for each result file that is missing or invalid."""


def write_request(work: Path, request: Mapping[str, object]) -> Path:
    """Write the request that the ranks read, and return its path."""
    path = work / "request.json"
    documents.write_text(path, json.dumps(request))
    return path


def benchmark_start_times(work: Path, ranks: Iterable[int]) -> dict[str, float]:
    """Return benchmark -> when the first of these ranks began it, by the host's monotonic clock, ordered by that time."""
    start_times: dict[str, float] = {}
    for rank in ranks:
        with contextlib.suppress(OSError, documents.DocumentError, KeyError, AttributeError, TypeError):
            for name, at in _read_state(work, rank)["begun"].items():
                if name in BENCHMARKS and type(at) is float:
                    start_times[name] = min(at, start_times.get(name, at))
    return dict(sorted(start_times.items(), key=lambda item: item[1]))


def benchmarks_since(work: Path, ranks: Iterable[int], since: float) -> set[str]:
    """Return the benchmarks and other steps, such as `join`, that ranks of this host were running at or after a moment.

    The last step that a rank began counts as still running.

    Args:
        work: work directory of the launch.
        ranks: the ranks of this host.
        since: the moment, by the host's monotonic clock.
    """
    running: set[str] = set()
    for rank in ranks:
        with contextlib.suppress(OSError, documents.DocumentError, KeyError, AttributeError, TypeError):
            begun = sorted(_read_state(work, rank)["begun"].items(), key=lambda item: item[1])
            ends = [at for _, at in begun[1:]] + [float("inf")]
            running |= {name for (name, _), end in zip(begun, ends, strict=False) if end >= since}
    return running


def read_rank_end(work: Path, rank: int, local_rank: int, last_state: RankState) -> Rank:
    """Return how a rank ended, from its state file.

    If the file cannot be read, phase and exit code come from `last_state`, the last state that the supervisor observed. If the
    file lacks only the exit code, `last_state` gives it. An exit code from `last_state` becomes None if the launcher or a
    termination signal ended the rank.
    """
    try:
        state = _read_state(work, rank)
        phase, exit_code = str(state["phase"]), state["exit_code"]
    except (OSError, documents.DocumentError, KeyError, TypeError):
        phase, exit_code = last_state.phase, None
    if not isinstance(exit_code, int):
        was_terminated = last_state.exit_code is not None and -last_state.exit_code in TERMINATION_SIGNALS
        exit_code = None if last_state.terminated_by_launcher or was_terminated else last_state.exit_code
    return Rank(
        rank=rank,
        local_rank=local_rank,
        phase=phase[:512],
        exit_code=exit_code,
        log_tail=read_tail(work / f"rank{rank}.log"),
    )


def read_excluded_ranks(work: Path, ranks: Iterable[int]) -> dict[int, str]:
    """Return rank -> why it could not join the process group, for those of `ranks` that could not."""
    excluded: dict[int, str] = {}
    for rank in sorted(ranks):
        with contextlib.suppress(OSError, documents.DocumentError, KeyError, TypeError):
            if (reason := _read_state(work, rank)["unable"]) and isinstance(reason, str):
                excluded[rank] = reason
    return excluded


def read_software_unfit_ranks(work: Path, ranks: Iterable[int]) -> set[int]:
    """Return those of the ranks that reported that the software of the host is why their device cannot be used."""
    unfit: set[int] = set()
    for rank in ranks:
        with contextlib.suppress(OSError, documents.DocumentError, KeyError, TypeError):
            if _read_state(work, rank)["is_software_unfit"] is True:
                unfit.add(rank)
    return unfit


def read_results(work: Path, ranks: Iterable[int]) -> RankResults:
    """Return the results of these ranks, in the order of the ranks."""
    observations: list[Observation] = []
    windows: list[Mapping[str, Any]] = []
    software: dict[str, str] = {}
    problems: list[str] = []
    for rank in sorted(ranks):
        try:
            document = documents.read(work / f"rank{rank}.json", "rank_result")
        except documents.DocumentError as error:
            problems.append(f"no result of rank {rank}: {error}")
            continue
        observations += [observation_from_json(observation) for observation in document["observations"]]
        windows += document.get("windows", [])
        software |= document["software"]
    return RankResults(
        observations=tuple(observations), windows=tuple(windows), software=software, problems=tuple(problems)
    )


def read_tail(path: Path, size: int = TAIL_BYTES) -> str:
    """Return the last `size` bytes of a log as text; empty if the log cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_error_line(path: Path) -> str:
    """Return the last line of a log that begins with the name of an exception, such as `RuntimeError`.

    Only the tail of the log is searched. If no line there begins with such a name, return the last line that is not empty. If
    the log has no text, return an empty text.
    """
    lines = ["".join(filter(str.isprintable, line)).strip() for line in reversed(read_tail(path).splitlines())]
    named = (line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line))
    return next(named, next(filter(None, lines), ""))[:MAX_LAST_LINE]


def truncate_logs(work: Path) -> None:
    """Truncate logs and dumps to MAX_LOG_BYTES, and remove the pipes of the flight recorder."""
    for path in _logs(work):
        with contextlib.suppress(OSError):
            if path.is_fifo():
                path.unlink()
            elif not path.is_symlink() and path.stat().st_size > MAX_LOG_BYTES:
                os.truncate(path, MAX_LOG_BYTES)


def archive_logs(work: Path, archive: Path) -> None:
    """Move the logs and dumps of the previous attempt at this launch into a new directory in `archive`.

    Keep only the newest MAX_ARCHIVED_ATTEMPTS of these directories. If the previous attempt left no log, do nothing.
    """
    if not any(work.glob("*.log")):
        return
    attempts = [path for path in archive.glob(f"{work.name}.*") if path.is_dir()]
    attempts.sort(key=lambda path: path.stat().st_mtime)
    for oldest in attempts[: -(MAX_ARCHIVED_ATTEMPTS - 1)]:
        shutil.rmtree(oldest, ignore_errors=True)
    directory = archive / f"{work.name}.{time.time_ns()}"
    directory.mkdir(parents=True)
    for path in _logs(work):
        path.rename(directory / path.name)


def _logs(work: Path) -> Iterator[Path]:
    yield from [*work.glob("*.log"), *work.glob(f"{FILE_PREFIX}*")]


def _read_state(work: Path, rank: int) -> documents.Json:
    """Return the last state that a rank wrote. Raises OSError or documents.DocumentError."""
    return documents.parse((work / f"rank{rank}.state.json").read_bytes(), source="state")
