"""Test how fio's output is parsed, which files fio leaves, and which I/O engine is chosen. A pass is one run of fio.

The captures under tests/data/fio are from fio 3.42.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent.benchmarks.storage import fio
from agent.benchmarks.storage.fio import FioError, failure_reason, parse, wrong_blocks
from tests import ROOT

CAPTURES = ROOT / "tests/data/fio"
MISMATCH = (CAPTURES / "verify-error.output-file.txt").read_text()
HEADER = (
    "verify: bad magic header 0, wanted acca at file /data/x offset 409600, length 4096 (requested block: offset=0)\n"
)


def test_figures_of_a_healthy_pass_are_read() -> None:
    result = parse("write", 0, (CAPTURES / "ok.json").read_text(), "")
    document = json.loads((CAPTURES / "ok.json").read_text())["jobs"][0]["write"]
    assert result.bytes_per_second == document["bw_bytes"]
    assert result.operations_per_second == pytest.approx(document["iops"])
    assert result.job_bytes == (document["io_bytes"],)
    percentiles = document["clat_ns"]["percentile"]
    assert result.latency_s["p50"] == pytest.approx(percentiles["50.000000"] * 1e-9)
    assert result.latency_s["p99_9"] == pytest.approx(percentiles["99.900000"] * 1e-9)


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "reason"),
    [
        (1, "enospc.stdout.txt", "enospc.stderr.txt", "no space left on the file system"),
        (1, "engine-missing.stdout.txt", "", "cannot open shared object file"),
        (1, "verify-error.output-file.txt", "", "blocks that were read differ"),
        (0, "", "", "exit code 0: no message"),
        (-9, "", "", "exit code -9"),
    ],
)
def test_failed_pass_has_a_reason(code: int, stdout: str, stderr: str, reason: str) -> None:
    texts = [(CAPTURES / name).read_text() if name else "" for name in (stdout, stderr)]
    with pytest.raises(FioError, match=reason) as error:
        parse("write", code, *texts)
    assert len(str(error.value)) <= 400
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("text", "number", "where"),
    [
        (MISMATCH, 1, "offset 393216"),
        (HEADER, 1, "offset 409600"),
        (HEADER + MISMATCH, 2, "offset 393216"),
        ((CAPTURES / "ok.json").read_text(), 0, ""),
        ("fio: pid=1, err=84/file:io_u.c:2372, error=other words\n", 1, "an unknown offset"),
        ("fio: pid=1, err=5/file:io_u.c:2372, error=Input/output error\n", 0, ""),
    ],
)
def test_wrong_blocks_are_counted_in_every_wording_of_fio(text: str, number: int, where: str) -> None:
    assert wrong_blocks(1, text, "") == wrong_blocks(1, "", text) == (number, where)


@pytest.mark.parametrize(
    "change",
    [
        {"jobs": []}, {"jobs": None}, {"jobs": [{}]}, {"jobs": [{"error": "x"}]},
        {"jobs": [{"write": {"total_ios": 1}, "error": 0}]},
    ],
)  # fmt: skip
def test_malformed_output_is_an_error(change: dict[str, Any]) -> None:
    for text in (json.dumps(change), f"note\n{json.dumps(change)}", "[" * 10**5, "{", "{" * 10**5):
        with pytest.raises(FioError):
            parse("write", 0, text, "")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "1", None])
def test_impossible_rate_is_an_error(value: object) -> None:
    document = json.loads((CAPTURES / "ok.json").read_text())
    document["jobs"][0]["write"]["bw_bytes"] = value
    with pytest.raises(FioError):
        parse("write", 0, json.dumps(document), "")


def test_reason_is_one_short_line_without_control_characters() -> None:
    reason = failure_reason(1, [], "", "\x1b[31mred\x1b[0m\n" * 100)
    assert reason.isprintable()
    assert len(reason) <= 400


def test_fio_leaves_no_verify_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    item = fio.FioPass(name="random write", op="write", pattern="random", seconds=0.1, verify=True)
    arguments = item.arguments("data", engine="psync", direct=False, jobs=1, size_bytes=1 << 20, step_bytes=1 << 20)
    done = subprocess.run(["fio", *arguments], capture_output=True, text=True, check=False)
    assert fio.parse("write", done.returncode, done.stdout, done.stderr).bytes_per_second > 0
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("listed", "forbidden", "expected"),
    [
        (("libaio", "io_uring", "psync"), (), "libaio"), (("io_uring", "psync"), (), "io_uring"),
        (("io_uring", "psync"), ("io_uring",), "psync"), (("libaio", "io_uring"), ("libaio",), "io_uring"),
        (("psync",), (), "psync"),
    ],
)  # fmt: skip
def test_engine_that_the_kernel_forbids_is_not_used(
    tmp_path: Path, listed: tuple[str, ...], forbidden: tuple[str, ...], expected: str
) -> None:
    program = tmp_path / "fio"
    lines = [f'case "$*" in *--ioengine={name}*) exit 1;; esac' for name in forbidden]
    program.write_text("\n".join(["#!/bin/sh", *lines, *(f"echo '  {name}'" for name in listed)]))
    program.chmod(0o755)
    assert fio.engine(str(program)) == expected
