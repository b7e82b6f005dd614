"""Run git in a checkout of published advisories."""

from __future__ import annotations

import subprocess
from pathlib import Path

from schemas.errors import UsageError


def git(directory: Path, *arguments: str) -> str:
    """Return the output of git in a directory. Raises UsageError if git fails or prints nothing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{directory}: git does not run: {error}") from None
    output = done.stdout.strip()
    if done.returncode or not output:
        problem = done.stderr.strip()[:200] or f"git {arguments[0]} prints nothing"
        raise UsageError(f"{directory}: not a git checkout, or an incomplete one: {problem}; see docs/versions.md")
    return output
