"""Build a fake NVML: a real `libnvidia-ml.so.1` that answers from a scenario file, without a GPU.

nvidia-ml-py loads the library by name, so tests run the same unpatched code as a GPU host. `nvml_stub.c` documents the format of
scenario files. `scenarios/` has healthy machines, faulty machines and older drivers. The dynamic loader reads LD_LIBRARY_PATH
only when a program starts, so the program under test is a separate process. Its scenario file may change while it runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml_stub.c")
SCENARIOS = Path(__file__).with_name("scenarios")
CHECKOUT = Path(__file__).absolute().parents[3]
BUILT = CHECKOUT / "build" / "nvml"

TOO_NEW_FOR_R525 = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetSramEccErrorStatus",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetRepairStatus",
    "nvmlDeviceGetUnrepairableMemoryFlag_v1",
    "nvmlDeviceGetAddressingMode",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetC2cModeInfoV",
    "nvmlSystemGetConfComputeState",
)
"""NVML functions that the library of an R525 driver does not export."""


def build(directory: Path, *, without: Iterable[str] = ()) -> Path:
    """Put the library into `directory`, and return the directory.

    The library is compiled only if `build/nvml` of the checkout does not have it yet.

    Args:
        directory: created if missing.
        without: NVML functions that the library must not export, as if it belonged to an older driver.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its message is on standard error.
        FileNotFoundError: there is no C compiler: install gcc.
    """
    directory.mkdir(parents=True, exist_ok=True)
    hidden = "".join(f"{name}; " for name in without)
    exports = f"{{ global: *; local: {hidden or 'nothing;'} }};\n"
    library = BUILT / sha256(SOURCE.read_bytes() + exports.encode()).hexdigest() / LIBRARY
    if not library.exists():
        _compile(library, exports)
    shutil.copyfile(library, directory / LIBRARY)
    return directory


def _compile(library: Path, exports: str) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
        script, part = Path(temporary, "exports.map"), Path(temporary, LIBRARY)
        script.write_text(exports)
        flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,--version-script={script}"]
        subprocess.run(["cc", *flags, "-o", part, SOURCE], check=True)
        part.replace(library)


def environment(library: Path, scenario: Path) -> dict[str, str]:
    """Return the environment variables that select the library in the directory `library` and the scenario file `scenario`."""
    return {"LD_LIBRARY_PATH": str(library.absolute()), "RACKPROOF_NVML_SCENARIO": str(scenario.absolute())}


def scenario(name: str) -> Path:
    """Return the path of the scenario file with this name in `scenarios/`."""
    return SCENARIOS / f"{name}.conf"


def write(path: Path, base: str, *lines: str | bytes) -> Path:
    """Write a scenario file with the lines of the scenario named `base`, overridden by `lines`. Replaces `path` atomically."""
    temporary = path.with_name(f"{path.name}.new")
    added = [line.encode() if isinstance(line, str) else line for line in (f"include={scenario(base)}", *lines)]
    temporary.write_bytes(b"".join(line + b"\n" for line in added))
    return temporary.replace(path)


def python(arguments: Iterable[str | Path], library: Path, scenario: Path) -> str:
    """Run Python in the checkout, with these arguments, this library and this scenario. Return its standard output."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment(library, scenario)},
        cwd=CHECKOUT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    ).stdout


class Reader:
    """A running program that takes NVML snapshots. Each call of `take` replaces the scenario and then takes one snapshot."""

    def __init__(self, library: Path, scenario: Path) -> None:
        """Start `take.py` with this library. `scenario` is the path of the file that each call of `take` replaces."""
        self._scenario = write(scenario, "healthy-h100x8")
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.nvml.take"],
            env={**os.environ, **environment(library, scenario)},
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._program.communicate(timeout=30)

    def take(
        self, base: str, *lines: str | bytes, devices: Iterable[int] = (), full_snapshot: bool = True
    ) -> dict[str, Any]:
        """Return a snapshot of the scenario `base`, overridden by `lines`, as a dict with the keys `snapshot` and `gpus`.

        Args:
            devices: NVML indices of the GPUs that are read; empty: all.
            full_snapshot: whether slow NVML functions are called too.
        """
        write(self._scenario, base, *lines)
        assert self._program.stdin
        assert self._program.stdout
        self._program.stdin.write(json.dumps([list(devices), full_snapshot]) + "\n")
        self._program.stdin.flush()
        taken: dict[str, Any] = json.loads(self._program.stdout.readline())
        return taken
