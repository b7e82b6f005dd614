"""NVIDIA's management library without a GPU: a real `libnvidia-ml.so.1` that answers from a scenario file.

nvidia-ml-py loads it by name, so what is under test is the code that runs on a GPU host, unpatched. `nvml_stub.c` says how a
scenario is written; `scenarios/` holds two healthy machines and one file a fault. A program finds the library once, when it
first loads it, so each scenario gets a process of its own; the scenario itself may change under a running program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml_stub.c")
SCENARIOS = Path(__file__).with_name("scenarios")
CHECKOUT = Path(__file__).absolute().parents[3]

TOO_NEW_FOR_R525 = ("nvmlDeviceGetCurrentClocksEventReasons",)
"""Functions that pynvml asks for and that a driver of the R525 branch does not have yet."""


def build(directory: Path, *, without: Iterable[str] = ()) -> Path:
    """Compiles the library into `directory`, and returns that.

    Args:
        directory: made where it is missing.
        without: functions to leave out, as an older driver would.

    Raises:
        subprocess.CalledProcessError: the compiler refused; its message is on standard error.
        FileNotFoundError: there is no C compiler: install gcc.
    """
    directory.mkdir(parents=True, exist_ok=True)
    exports = directory / "exports.map"
    hidden = "".join(f"{name}; " for name in without)
    exports.write_text(f"{{ global: *; local: {hidden or 'nothing;'} }};\n")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,--version-script={exports}"]
    subprocess.run(["cc", *flags, "-o", directory / LIBRARY, SOURCE], check=True)
    return directory


def environment(library: Path, scenario: Path) -> dict[str, str]:
    """What has to be added to a program's environment to have it find the library and its scenario."""
    return {"LD_LIBRARY_PATH": str(library), "RACKPROOF_NVML_SCENARIO": str(scenario)}


def scenario(name: str) -> Path:
    """The scenario of that name under `scenarios/`."""
    return SCENARIOS / f"{name}.conf"


def write(path: Path, base: str, *lines: str | bytes) -> Path:
    """A scenario of a test's own: that of the name `base`, and these lines over it. Replaces `path` in one step."""
    temporary = path.with_name(f"{path.name}.new")
    added = [line.encode() if isinstance(line, str) else line for line in (f"include={scenario(base)}", *lines)]
    temporary.write_bytes(b"".join(line + b"\n" for line in added))
    return temporary.replace(path)


def python(arguments: Iterable[str | Path], library: Path, scenario: Path) -> str:
    """Runs Python with these arguments in the checkout, and returns what it printed."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment(library, scenario)},
        cwd=CHECKOUT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    ).stdout


def snapshot(library: Path, scenario: Path, *devices: int) -> dict[str, Any]:
    """A snapshot as the agent takes it with NVML alone, in a process of its own; see `take.py`."""
    chosen = [str(index) for index in devices]
    taken: dict[str, Any] = json.loads(python(["-m", "tests.fakes.nvml.take", *chosen], library, scenario))
    return taken
