"""Build the commands of fio, and parse its output.

Passes that verify what they read set `verify_fatal`: without it, fio 3.33 and 3.42 exit with code 0 even if they find wrong
blocks. Other lines may precede the JSON in fio's output.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ENGINES = ("libaio", "io_uring", "psync")
"""Engines in order of preference. On RHEL, libaio is in a separate package. Every fio has psync."""
PERCENTILES = {"p50": "50.000000", "p99": "99.000000", "p99_9": "99.900000"}
SEQUENTIAL_BYTES, RANDOM_BYTES = 1 << 20, 4096
"""Size of the blocks of a sequential and of a random pass."""
DEPTHS = {"sequential": 16, "random": 32}
"""Transfers in flight per job. The engine psync always has only one."""
MAX_LINE, MAX_REASON = 200, 400
HELP_S = 10.0
"""Time limit in seconds of a fio process that lists the engines or tests one of them."""
EILSEQ = 84
_MEANINGS = {
    5: "the disk or its file system failed an access (EIO)",
    22: "the file system refuses this kind of access (EINVAL)",
    28: "no space left on the file system",
    30: "the file system is read-only",
    122: "the disk quota is exceeded",
    EILSEQ: "blocks that were read differ from those written",
}
_WRONG = re.compile(r"^(?:verify: bad |\w+: verify failed).*? offset (\d+)", re.MULTILINE)


class FioError(Exception):
    """A pass of fio has no figures; the message says why."""


@dataclass(frozen=True, kw_only=True)
class FioPass:
    """One pass of fio over a file."""

    name: str
    op: str
    """`read` or `write`."""
    pattern: str
    """`sequential` (blocks of 1 MiB) or `random` (blocks of 4 KiB)."""
    seconds: float = 0.0
    """Time limit of the pass in seconds; 0: no limit. A sequential job without `repeats` also ends at the end of its region."""
    depth: int = 0
    """Transfers in flight per job, unless the engine is psync; 0: the value in `DEPTHS`."""
    repeats: bool = False
    """Whether a job that reaches the end of its region continues at the start of the region, until the time limit."""
    verify: bool = False
    """When writing: write a checksum into each block. When reading: compare each block with its checksum."""

    def arguments(
        self, file: str, *, engine: str, direct: bool, jobs: int, size_bytes: int, step_bytes: int
    ) -> list[str]:
        """Return the arguments of fio.

        Args:
            file: test file. Job i (from 0) uses the region that begins at i × step_bytes.
            engine: I/O engine.
            direct: bypass the page cache. If False, fio asks the kernel to drop the file from the page cache first.
            jobs: number of jobs that run at the same time.
            size_bytes, step_bytes: bytes of each region, and bytes from the start of one region to that of the next.
        """
        is_random = self.pattern == "random"
        block = RANDOM_BYTES if is_random else SEQUENTIAL_BYTES
        percentiles = ":".join(value.rstrip("0").rstrip(".") for value in PERCENTILES.values())
        options: dict[str, object] = {
            "name": self.name, "filename": file, "rw": f"{'rand' if is_random else ''}{self.op}", "bs": block,
            "size": size_bytes, "offset_increment": step_bytes, "numjobs": jobs, "thread": 1, "ioengine": engine,
            "iodepth": self.depth or DEPTHS[self.pattern], "direct": int(direct), "invalidate": 1, "fallocate": "none",
            "randrepeat": 0, "percentile_list": percentiles, "output-format": "json", "eta": "never",
        }  # fmt: skip
        if self.verify:
            options |= {"verify": "crc32c", "verify_interval": RANDOM_BYTES}
            # Without verify_state_save=0 fio leaves files in its current directory, which is /.
            options |= {"do_verify": 0, "verify_state_save": 0} if self.op == "write" else {"verify_fatal": 1}
        else:
            options |= {"refill_buffers": 1} if self.op == "write" else {}
        if self.op == "write" and not direct:
            options["end_fsync"] = 1
        if self.seconds:
            options["runtime"] = f"{self.seconds * 1000:.0f}ms"
        if is_random or self.repeats:
            options["time_based"] = 1
        if is_random:
            options |= {"norandommap": 1, "group_reporting": 1}
            # If two writes to one block overlap in time, a healthy disk may store parts of both.
            options |= {"serialize_overlap": 1} if self.verify and self.op == "write" else {}
        return [f"--{key}={value}" for key, value in options.items()]


@dataclass(frozen=True, kw_only=True)
class FioResult:
    """The figures of one pass."""

    bytes_per_second: float
    operations_per_second: float
    job_bytes: tuple[int, ...]
    """Bytes that each job transferred; with `group_reporting` only their sum."""
    latency_s: Mapping[str, float]
    """Percentile, for example `p50` -> seconds from submission to completion; if jobs report separately, the largest value of
    any job."""


def parse(op: str, code: int, stdout: str, stderr: str) -> FioResult:
    """Return the figures of a pass. Raises FioError if the pass failed, or if fio's output cannot be read."""
    try:
        document, _ = json.JSONDecoder().raw_decode(stdout, re.search(r"^\{", stdout, re.MULTILINE).start())  # type: ignore[union-attr]
        jobs = [job for job in document["jobs"] if job[op]["total_ios"] or job["error"]]
        errors = [int(job["error"]) for job in jobs if job["error"]]
        if code or errors:
            raise FioError(failure_reason(code, errors, stdout, stderr))
        result = _result([job[op] for job in jobs])
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        raise FioError(failure_reason(code, [], stdout, stderr)) from None
    numbers = (result.bytes_per_second, result.operations_per_second, *result.latency_s.values())
    if not jobs or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise FioError(f"fio transferred nothing: {_clean(stderr) or 'no message'}")
    return result


def _result(jobs: Sequence[Mapping[str, Any]]) -> FioResult:
    return FioResult(
        bytes_per_second=float(sum(job["bw_bytes"] for job in jobs)),
        operations_per_second=float(sum(job["iops"] for job in jobs)),
        job_bytes=tuple(int(job["io_bytes"]) for job in jobs),
        latency_s={
            name: max(float(job["clat_ns"]["percentile"][key]) for job in jobs) * 1e-9 if jobs else 0.0
            for name, key in PERCENTILES.items()
        },
    )


def wrong_blocks(code: int | None, stdout: str, stderr: str) -> tuple[int, str]:
    """Return how many wrong blocks the output of a pass with `verify` reports, and where the first one is; 0 and "" if none.

    Each job stops at its first wrong block, so the file may have more wrong blocks.
    """
    offsets = [int(match[1]) for text in (stderr, stdout) for match in _WRONG.finditer(text)]
    if offsets:
        return len(offsets), f"offset {min(offsets)}"
    is_mismatch = bool(code) and re.search(rf'"error" : {EILSEQ}\b|err={EILSEQ}/', stdout + stderr)
    return (1, "an unknown offset") if is_mismatch else (0, "")


def failure_reason(code: int, errors: Sequence[int], stdout: str, stderr: str) -> str:
    """Return why a pass failed, in one line: the meaning of the error or else the exit code, followed by fio's messages."""
    if not errors:
        errors = [int(match) for match in re.findall(r"\berr=(\d+)/", stderr + stdout)]
    text = stderr if stderr.strip() else stdout.partition("{")[0]
    lines = [line for raw in text.splitlines() if (line := _clean(raw))]
    words = "; ".join(lines[:3]) or "no message"
    meanings = [_MEANINGS[error] for error in errors if error in _MEANINGS]
    return (f"{meanings[0]} ({words})" if meanings else f"fio: exit code {code}: {words}")[:MAX_REASON]


def program() -> str:
    """Return the path of fio; empty if it is not installed."""
    return shutil.which("fio") or ""


def engine(path: str) -> str:
    """Return the engine to use: the first of `ENGINES` that this fio lists and that the kernel permits.

    libaio fails if other programs, such as databases, use all of fs.aio-max-nr. A container or a sysctl may forbid io_uring.
    """
    listed = ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [path, "--enghelp"], stdin=subprocess.DEVNULL, capture_output=True, timeout=HELP_S, check=False
        )
        listed = done.stdout.decode(errors="replace")
    for name in ENGINES[:-1]:
        if re.search(rf"^\s*{name}\s*$", listed, re.MULTILINE) and _works(path, name):
            return name
    return ENGINES[-1]


def _works(path: str, name: str) -> bool:
    """Return whether the engine can read a block of /dev/zero."""
    options = ("--name=probe", f"--ioengine={name}", "--filename=/dev/zero", "--rw=read", "--bs=4096", "--size=4096")
    with suppress(OSError, subprocess.SubprocessError):
        command = [path, *options, "--thread=1", "--output-format=json", "--eta=never"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=HELP_S, check=False)
        return done.returncode == 0
    return False


def _clean(text: str) -> str:
    """Return the text in one line without control characters, shortened."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:MAX_LINE]
