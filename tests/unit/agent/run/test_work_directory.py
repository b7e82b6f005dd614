"""The work directory of a launch, and the archived logs.

The supervisor is the process that runs the launch on a host. It reads the work directory.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.gang.rank_state import RankState
from agent.run import work_directory
from agent.run.work_directory import (
    MAX_ARCHIVED_ATTEMPTS,
    MAX_LAST_LINE,
    TAIL_BYTES,
    archive_logs,
    benchmark_start_times,
    benchmarks_since,
    last_error_line,
    read_excluded_ranks,
    read_rank_end,
    read_results,
    read_tail,
    truncate_logs,
    write_request,
)


def write_state(work: Path, rank: int, state: Any) -> None:
    """Write the state file of a rank: a text as it is, anything else as JSON."""
    text = state if isinstance(state, str) else json.dumps(state)
    (work / f"rank{rank}.state.json").write_text(text)


STATES_WITHOUT_START_TIMES: list[Any] = ["not JSON", [], {}, {"begun": 1}, {"begun": []}]


def test_request_is_written(tmp_path: Path) -> None:
    assert json.loads(write_request(tmp_path, {"stage": "gang"}).read_text()) == {"stage": "gang"}
    assert (tmp_path / "request.json").exists()


def test_benchmark_starts_when_the_first_rank_begins_it(tmp_path: Path) -> None:
    """Names that are no benchmarks (`pause`), times that are not floats, and a missing state file (rank 2) are ignored."""
    write_state(tmp_path, 0, {"begun": {"gemm": 30.0, "memory": 20.0, "pause": 1.0}})
    write_state(tmp_path, 1, {"begun": {"gemm": 10.0, "memory": 25.0, "stress": "soon", "pairs": 5}})
    times = benchmark_start_times(tmp_path, [0, 1, 2])
    assert list(times.items()) == [("gemm", 10.0), ("memory", 20.0)]


@pytest.mark.parametrize("state", STATES_WITHOUT_START_TIMES)
def test_rank_without_valid_start_times_is_ignored(tmp_path: Path, state: Any) -> None:
    write_state(tmp_path, 0, state)
    write_state(tmp_path, 1, {"begun": {"gemm": 10.0}})
    assert benchmark_start_times(tmp_path, [0, 1]) == {"gemm": 10.0}
    assert benchmarks_since(tmp_path, [0, 1], 0.0) == {"gemm"}


@pytest.mark.parametrize(
    ("since", "running"),
    [
        (5.0, {"a", "b", "c"}), (10.0, {"a", "b", "c"}), (20.0, {"a", "b", "c"}), (20.5, {"b", "c"}), (30.0, {"b", "c"}),
        (31.0, {"c"}),
    ],
)  # fmt: skip
def test_benchmark_runs_until_the_next_one_begins(tmp_path: Path, since: float, running: set[str]) -> None:
    """`running`: the benchmarks that were running at the time `since` or later."""
    write_state(tmp_path, 0, {"begun": {"b": 20.0, "a": 10.0, "c": 30.0}})
    assert benchmarks_since(tmp_path, [0], since) == running


def last_state(**fields: Any) -> RankState:
    """Return the rank state that the supervisor observed last. Its phase is `training`, unless `fields` has another phase."""
    return RankState(**{"rank": 0, "scope": "gpu=0", "phase": "training", **fields})


@pytest.mark.parametrize(
    ("state", "last", "phase", "code"),
    [
        ({"phase": "end", "exit_code": 0}, {"exit_code": 3}, "end", 0),
        ({"phase": "end", "exit_code": -11}, {}, "end", -11),
        ({"phase": "gemm", "exit_code": None}, {"exit_code": 3}, "gemm", 3),
        ({"phase": "gemm", "exit_code": None}, {"exit_code": 3, "terminated_by_launcher": True}, "gemm", None),
        ({"phase": "gemm", "exit_code": None}, {"exit_code": -signal.SIGTERM}, "gemm", None),
        ({"phase": "gemm", "exit_code": None}, {"exit_code": -signal.SIGSEGV}, "gemm", -signal.SIGSEGV),
        ({"phase": "gemm", "exit_code": None}, {"exit_code": 0}, "gemm", 0),
        ({"phase": "gemm", "exit_code": None}, {}, "gemm", None),
        ({"phase": "gemm"}, {"exit_code": 3}, "training", 3),
        ("not JSON", {"exit_code": 3}, "training", 3),
        ([], {"exit_code": 3}, "training", 3),
        ({"phase": "x" * 600, "exit_code": 0}, {}, "x" * 512, 0),
    ],
)
def test_end_of_a_rank_comes_from_its_state_file_or_else_from_its_last_observed_state(
    tmp_path: Path, state: Any, last: dict[str, Any], phase: str, code: int | None
) -> None:
    """`state`: content of the state file; `last`: fields of the last observed state; `phase` and `code`: the expected end.

    A state file without `exit_code` is invalid as a whole. The observed exit code is not used if the launcher or SIGTERM ended
    the rank.
    """
    write_state(tmp_path, 5, state)
    (tmp_path / "rank5.log").write_text("the end\n")
    rank = read_rank_end(tmp_path, 5, 1, last_state(**last))
    assert (rank.rank, rank.local_rank, rank.phase, rank.exit_code, rank.log_tail) == (5, 1, phase, code, "the end\n")


def test_rank_without_files_ended_as_last_observed(tmp_path: Path) -> None:
    rank = read_rank_end(tmp_path, 0, 0, last_state(exit_code=1))
    assert (rank.phase, rank.exit_code, rank.log_tail) == ("training", 1, "")


def test_ranks_that_could_not_join_are_excluded_with_their_reason(tmp_path: Path) -> None:
    for rank, state in enumerate(
        ({"unable": "no device"}, {"unable": ""}, {"unable": 1}, {}, "not JSON", {"unable": "late"})
    ):
        write_state(tmp_path, rank, state)
    assert list(read_excluded_ranks(tmp_path, [5, 0, 1, 2, 3, 4, 6]).items()) == [(0, "no device"), (5, "late")]


def test_results_are_in_rank_order_and_missing_or_invalid_results_are_problems(tmp_path: Path) -> None:
    def write_result(rank: int) -> None:
        item = {
            "name": "gemm.throughput", "scope": f"gpu={rank}", "stage": "benchmark", "unit": "FLOP/s", "status": "measured",
            "value": 1.0,
        }  # fmt: skip
        window = {"benchmark": "stress", "scope": f"gpu={rank}", "begin": 1.0, "end": 2.0, "params": {}}
        document = {"rank": rank, "observations": [item], "windows": [window], "software": {"torch": str(rank)}}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document))

    write_result(1)
    write_result(0)
    (tmp_path / "rank2.json").write_text("[]")
    results = read_results(tmp_path, [3, 1, 2, 0])
    assert [problem.partition(":")[0] for problem in results.problems] == ["no result of rank 2", "no result of rank 3"]
    assert [item.scope for item in results.observations] == ["gpu=0", "gpu=1"]
    assert [window["scope"] for window in results.windows] == ["gpu=0", "gpu=1"]
    assert results.software == {"torch": "1"}


@pytest.mark.parametrize(("size", "expected"), [(3, "789"), (10, "0123456789"), (11, "0123456789"), (1, "9")])
def test_tail_is_the_last_bytes_of_a_log(tmp_path: Path, size: int, expected: str) -> None:
    path = tmp_path / "log"
    path.write_text("0123456789")
    assert read_tail(path, size) == expected


def test_tail_is_limited_in_size_and_always_decodable_and_empty_without_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a" + b"b" * TAIL_BYTES)
    assert read_tail(path) == "b" * TAIL_BYTES
    path.write_bytes(b"\xffok")
    assert read_tail(path) == "\ufffdok"
    assert read_tail(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("first\nlast\n\n", "last"),
        ("RuntimeError: no\nlast\n", "RuntimeError: no"),
        ("torch.cuda.OutOfMemoryError: full\nmore\nValueError: later\nlast", "ValueError: later"),
        ("KeyboardInterruption\nlast", "last"),
        ("MyErrors: no\nlast", "last"),
        ("ImportError: no torch\nsys:1: ResourceWarning: unclosed\n", "ImportError: no torch"),
        ("torch.x.DistError: gone\n\x00\x01\n", "torch.x.DistError: gone"),
        ("  Exception  \nlast", "Exception"),
        ("\x1b[31mlast\x07\n", "[31mlast"),
        ("", ""),
        ("\n \n", ""),
        ("x" * 400, "x" * MAX_LAST_LINE),
    ],
)
def test_error_line_is_the_last_line_that_names_an_exception(tmp_path: Path, log: str, line: str) -> None:
    """If no line names an exception, the last line with printable text is used. Unprintable characters are removed."""
    path = tmp_path / "log"
    path.write_text(log)
    assert last_error_line(path) == line


def test_long_logs_and_dumps_are_truncated_and_pipes_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_directory, "MAX_LOG_BYTES", 10)
    dump = f"{work_directory.FILE_PREFIX}0"
    sizes = {"rank0.log": 11, "rank1.log": 10, dump: 50, "other.txt": 50}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(b"x" * 50)
    (tmp_path / "link.log").symlink_to(outside)
    for name in ("pipe.log", f"{dump}.pipe"):
        os.mkfifo(tmp_path / name)
    truncate_logs(tmp_path)
    after = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert after == {"rank0.log": 10, "rank1.log": 10, dump: 10, "other.txt": 50, "link.log": 50}


def test_logs_of_the_newest_attempts_are_kept(tmp_path: Path) -> None:
    work, archive = tmp_path / "gang", tmp_path / "archive"
    work.mkdir()
    archive_logs(work, archive)
    assert not archive.exists()
    (work / "rank0.log").write_text("log")
    archive_logs(work, tmp_path / "new" / "archive")
    assert (tmp_path / "new" / "archive").is_dir()
    archive.mkdir()
    for number in range(MAX_ARCHIVED_ATTEMPTS + 1):
        attempt = archive / f"gang.{number}"
        attempt.mkdir()
        os.utime(attempt, (1000 + number, 1000 + number))
    (archive / "benchmark.0").mkdir()
    (archive / "gang.notes").write_text("")
    (work / "rank0.log").write_text("log")
    (work / f"{work_directory.FILE_PREFIX}0").write_text("dump")
    (work / "request.json").write_text("{}")
    archive_logs(work, archive)
    kept = {path.name for path in archive.iterdir()}
    assert {"gang.0", "gang.1"}.isdisjoint(kept)
    assert {"gang.2", f"gang.{MAX_ARCHIVED_ATTEMPTS}", "benchmark.0", "gang.notes"} <= kept
    attempts = [path for path in archive.glob("gang.*") if path.is_dir()]
    assert len(attempts) == MAX_ARCHIVED_ATTEMPTS
    (newest,) = [
        path for path in attempts if path.name not in {f"gang.{number}" for number in range(MAX_ARCHIVED_ATTEMPTS + 1)}
    ]
    assert {path.name for path in newest.iterdir()} == {"rank0.log", f"{work_directory.FILE_PREFIX}0"}
    assert [path.name for path in work.iterdir()] == ["request.json"]
