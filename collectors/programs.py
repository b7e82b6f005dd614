"""Find programs of the host, read their versions, and run them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from collectors.base import Absent

DIRECTORIES = ("usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "bin", "sbin", "opt/bin")
DEADLINE_S = 5.0


def find_program(root: Path, name: str, directories: Sequence[str] = DIRECTORIES) -> Path | None:
    """Search these directories under `root`, in order. Return the path of the program, or None."""
    for directory in directories:
        path = root / directory / name
        try:
            if path.is_file():
                return path
        except OSError:
            continue
    return None


def program_version(root: Path, name: str, pattern: str, deadline_s: float = DEADLINE_S) -> str | Absent:
    """Run `NAME --version`, and return the text that the first group of the regular expression `pattern` matches in its output.

    Return `unsupported` if the program is not installed, and an `error` if it does not run or nothing matches.
    """
    path = find_program(root, name)
    if path is None:
        return Absent.unsupported(f"no {name}")
    process = run_program(path, "--version", deadline_s=deadline_s)
    if isinstance(process, Absent):
        return process
    output = process.stdout + process.stderr
    match = re.search(pattern, output)
    if not match:
        return Absent.error(f"{name} --version: exit code {process.returncode}, no version in {output.strip()[:200]!r}")
    return match.group(1)


def run_program(
    path: Path, *arguments: str, deadline_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str] | Absent:
    """Run a program of the host; return its exit code and output, or an `error` if it does not start or misses the deadline."""
    name = " ".join((path.name, *arguments[:1]))
    try:
        return subprocess.run(
            [str(path), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return Absent.error(f"{name}: no answer within {deadline_s:g} s")
    except OSError as error:
        return Absent.error(f"{name}: {error.strerror}")


def error_message(process: subprocess.CompletedProcess[str]) -> str:
    """Return the first line of the output that has printable text, or `no output`. Standard error comes before standard output.

    Colours and control characters are removed, and the line is cut to 200 characters.
    """
    for output in (process.stderr, process.stdout):
        for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines():
            if text := "".join(character for character in line if character.isprintable()).strip():
                return text[:200]
    return "no output"
