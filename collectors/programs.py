"""Find the programs of the host, their versions and their output."""

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
    """Return the program in these directories under `root`, or None."""
    for directory in directories:
        path = root / directory / name
        try:
            if path.is_file():
                return path
        except OSError:
            continue
    return None


def program_version(root: Path, name: str, pattern: str, deadline_s: float = DEADLINE_S) -> str | Absent:
    """Return the first group of `pattern` in the output of `NAME --version`; `unsupported` if it is not installed."""
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
    """Return exit code and output of a program of the host; an error if it does not start, or not end in time."""
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
        return Absent.error(f"{path.name} {arguments[0]}: no answer within {deadline_s:g} s")
    except OSError as error:
        return Absent.error(f"{path.name} {arguments[0]}: {error.strerror}")


def error_message(process: subprocess.CompletedProcess[str]) -> str:
    """Return the first line of the error output, or else of the output, printable and cut to 200 characters."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", process.stderr.strip() or process.stdout.strip())
    line = next((line for line in text.splitlines() if line.strip()), "no output")
    return "".join(character for character in line if character.isprintable()).strip()[:200]
