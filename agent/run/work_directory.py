"""The directory of a launch: what its ranks are asked, and what they leave there: results, states, logs and dumps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from agent.gang.culprit import TERMINATION_SIGNALS
from agent.gang.flight_recorder import FILE_PREFIX
from agent.gang.rank_state import RankState
from schemas import documents
from schemas.catalogue import BENCHMARKS
from schemas.decode import observation_from_json
from schemas.records import Observation, Rank

TAIL_BYTES = 4000
MOST_LOG_BYTES = 16 << 20
"""Of one log or dump that is kept."""
MOST_ATTEMPTS = 8
"""Whose logs are kept."""


def write_request(work: Path, request: Mapping[str, object]) -> Path:
    """What the ranks are to do, as a file that they read."""
    path = work / "request.json"
    documents.write_text(path, json.dumps(request))
    return path


def _state(work: Path, rank: int) -> documents.Json:
    """What a rank last said of itself. Raises OSError or documents.DocumentError where it said nothing that can be read."""
    return documents.parse((work / f"rank{rank}.state.json").read_bytes(), source="state")


def begun(work: Path, ranks: Iterable[int]) -> dict[str, float]:
    """Benchmark -> when the first of these ranks came to it, by the host's monotonic clock, in that order."""
    found: dict[str, float] = {}
    for rank in ranks:
        with contextlib.suppress(OSError, documents.DocumentError, KeyError, AttributeError, TypeError):
            for name, at in _state(work, rank)["begun"].items():
                if name in BENCHMARKS and type(at) is float:
                    found[name] = min(at, found.get(name, at))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def end_of(work: Path, rank: int, local_rank: int, seen: RankState) -> Rank:
    """How a rank ended, by what it wrote itself, its last phase and its exit code, and by what its guard saw."""
    try:
        state = _state(work, rank)
        phase, exit_code = str(state["phase"]), state["exit_code"]
    except (OSError, documents.DocumentError, KeyError, TypeError):
        phase, exit_code = seen.phase, None
    if not isinstance(exit_code, int):
        asked = seen.terminated_by_launcher or (seen.exit_code is not None and -seen.exit_code in TERMINATION_SIGNALS)
        exit_code = None if asked else seen.exit_code
    return Rank(
        rank=rank,
        local_rank=local_rank,
        phase=phase[:512],
        exit_code=exit_code,
        log_tail=tail(work / f"rank{rank}.log"),
    )


def unable(work: Path, ranks: Iterable[int]) -> dict[int, str]:
    """The ranks that could not take part in the process group, and why, by their own word."""
    found: dict[int, str] = {}
    for rank in sorted(ranks):
        with contextlib.suppress(OSError, documents.DocumentError, KeyError, TypeError):
            if (why := _state(work, rank)["unable"]) and isinstance(why, str):
                found[rank] = why
    return found


def results(
    work: Path, ranks: Iterable[int]
) -> tuple[list[Observation], list[Mapping[str, Any]], dict[str, str], list[str]]:
    """What the ranks of this host measured, for which times they want to know what NVML showed, the software they ran
    on, and which of their files cannot be believed."""
    observations: list[Observation] = []
    windows: list[Mapping[str, Any]] = []
    software: dict[str, str] = {}
    problems: list[str] = []
    for rank in sorted(ranks):
        path = work / f"rank{rank}.json"
        try:
            document = documents.read(path, "rank_result")
        except documents.DocumentError as error:
            problems.append(f"no result of rank {rank}: {error}")
            continue
        observations += [observation_from_json(item) for item in document["observations"]]
        windows += document.get("windows", [])
        software |= document["software"]
    return observations, windows, software, problems


def tail(path: Path, size: int = TAIL_BYTES) -> str:
    """The end of a log, as text."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(path: Path) -> str:
    """The last line of a log that names an error, else that says anything; empty where none does."""
    lines = ["".join(filter(str.isprintable, line)).strip() for line in reversed(tail(path).splitlines())]
    return next((line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)), next(filter(None, lines), ""))


def cap_logs(work: Path) -> None:
    """Cuts what the ranks wrote without measure, and removes what is of no more use."""
    for path in [*work.glob("*.log"), *work.glob(f"{FILE_PREFIX}*")]:
        with contextlib.suppress(OSError):
            if path.is_fifo():
                path.unlink()
            elif not path.is_symlink() and path.stat().st_size > MOST_LOG_BYTES:
                os.truncate(path, MOST_LOG_BYTES)


def set_aside(work: Path, logs: Path) -> None:
    """Keeps the logs and dumps of the attempt before, of which a few are enough."""
    if not any(work.glob("*.log")):
        return
    kept = sorted(
        (path for path in logs.glob(f"{work.name}.*") if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    for old in kept[: -(MOST_ATTEMPTS - 1)]:
        shutil.rmtree(old, ignore_errors=True)
    place = logs / f"{work.name}.{time.time_ns()}"
    place.mkdir(parents=True)
    for path in [*work.glob("*.log"), *work.glob(f"{FILE_PREFIX}*")]:
        path.rename(place / path.name)
