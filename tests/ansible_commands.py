"""Run `ansible-playbook` and `ansible-inventory` of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = Path(sys.executable).parent
LIMIT_S = 300


def run_ansible(
    name: str, *words: str | Path, directory: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command of Ansible, and return its exit code and output.

    Args:
        name: `ansible-playbook` or `ansible-inventory`.
        words: the arguments of the command.
        directory: the working directory.
        environment: variables in addition to those of this process.
    """
    return subprocess.run(
        [PROGRAMS / name, *words],
        cwd=directory,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
