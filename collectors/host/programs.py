"""Programs of the host: where they are, and what they say of themselves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from collectors.base import Absent

DIRECTORIES = ("usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin", "bin", "sbin", "opt/bin")
DEADLINE_S = 5.0


def find(root: Path, name: str) -> Path | None:
    """The program in the usual directories under `root`, or None."""
    for directory in DIRECTORIES:
        path = root / directory / name
        try:
            if path.is_file():
                return path
        except OSError:
            continue
    return None


def version(root: Path, name: str, pattern: str, deadline_s: float = DEADLINE_S) -> str | Absent:
    """What `NAME --version` says, by the first group of `pattern`; `unsupported` where there is no such program."""
    path = find(root, name)
    if path is None:
        return Absent(status="unsupported", reason=f"no {name}")
    try:
        ended = subprocess.run(
            [str(path), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Absent(status="error", reason=f"{name} --version: no answer within {deadline_s:g} s")
    except OSError as error:
        return Absent(status="error", reason=f"{name} --version: {error.strerror}")
    said = ended.stdout + ended.stderr
    found = re.search(pattern, said)
    if not found:
        return Absent(status="error", reason=f"{name} --version ended with {ended.returncode}: {said.strip()[:200]!r}")
    return found.group(1)
