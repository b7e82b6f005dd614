"""Versions of what the GPUs need, and whether they belong together."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from collectors.base import Absent, Family
from collectors.host import programs
from collectors.host.files import Files, MissingError, one

LIBRARIES = (
    "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib",
    "usr/local/lib", "usr/local/cuda/lib64", "opt/nccl/build/lib",
)  # fmt: skip
"""Where distributions and NVIDIA's packages put libraries."""
MOST_LINKS = 8
DRIVER = "proc/driver/nvidia/version"


class SoftwareCollector:
    """Reads files under `root`, `/` but in tests."""

    name = "software"

    def __init__(self, root: Path = Path("/"), thorough: bool = False) -> None:
        """`thorough`: programs are asked for their versions too."""
        self._root = root
        self._thorough = thorough

    def collect(self) -> Iterable[Family]:
        files = Files(self._root)
        module = files.read(DRIVER, module_version)
        yield one("software.driver_module.version", "1", "Version of the NVIDIA kernel module", module)
        yield one("software.driver_module.open", "1", "It is the open kernel module", files.read(DRIVER, is_open))
        library = _library(self._root, "libnvidia-ml.so.1")
        yield one("software.driver_library.version", "1", "Version of the NVIDIA driver's libraries", library)
        same = _same(module, library)
        yield one("software.driver_library.matches", "1", "The driver's libraries are of the module's version", same)
        yield one("software.nccl.version", "1", "NCCL of the host", _library(self._root, "libnccl.so.2"))
        value = files.read("usr/local/cuda/version.json", toolkit_version)
        yield one("software.cuda_toolkit.version", "1", "CUDA toolkit of the host", value)
        value = files.text("sys/module/mlx5_core/version")
        yield one("software.mlx5.version", "1", "OFED driver of the NICs; the kernel's own tells none", value)
        yield from _operating_system(files)
        if self._thorough:
            manager = programs.version(self._root, "nv-fabricmanager", r"[Vv]ersion is\s*:\s*([\d.]+)")
            yield one("software.fabric_manager.version", "1", "Version of the fabric manager", manager)
            switches = (self._root / "proc/driver/nvidia-nvswitch").is_dir()
            unused = Absent(status="unsupported", reason="no NVSwitch whose fabric it could manage")
            same = _same(module, manager) if switches else unused
            yield one("software.fabric_manager.matches", "1", "The fabric manager is of the driver's version", same)


def module_version(text: str) -> str:
    """The version out of /proc/driver/nvidia/version. Raises ValueError where it has none."""
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", text, re.MULTILINE)
    if not found:
        raise ValueError("no NVRM version")
    return found.group(1)


def is_open(text: str) -> bool:
    """Whether the same file speaks of the open kernel module."""
    module_version(text)
    return "Open Kernel Module" in text


def toolkit_version(text: str) -> str:
    """The version out of the CUDA toolkit's version.json. Raises ValueError where it has none."""
    try:
        return str(json.loads(text)["cuda"]["version"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no version of cuda: {error}") from error


def release(text: str, key: str) -> str:
    """One entry of os-release(5). Raises MissingError where it has none."""
    found = re.search(rf"^{key}=([\"']?)(.+)\1\s*$", text, re.MULTILINE)
    if not found:
        raise MissingError(f"no {key}")
    return found.group(2)


def _operating_system(files: Files) -> Iterable[Family]:
    path = "etc/os-release" if files.exists("etc/os-release") else "usr/lib/os-release"
    for name, key, help_text in (
        ("name", "PRETTY_NAME", "The operating system"),
        ("id", "ID", "Its short name"),
        ("version", "VERSION_ID", "Its version"),
    ):
        value = files.read(path, lambda content, key=key: release(content, key))  # type: ignore[misc]
        yield one(f"software.os.{name}", "1", help_text, value)
    yield one("software.glibc.version", "1", "C library of this process", _glibc())
    yield one("software.python.version", "1", "Python of this process", platform.python_version())


def _glibc() -> str | Absent:
    try:
        told = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        told = None
    return told.removeprefix("glibc ") if told else Absent(status="unsupported", reason="the C library is not glibc")


def _library(root: Path, name: str) -> str | Absent:
    """The version that the library's link names, or the one that this leads to, in the first of the usual directories."""
    for directory in LIBRARIES:
        path = root / directory / name
        if not path.is_symlink():
            continue
        for _ in range(MOST_LINKS):
            try:
                target = path.readlink()
            except OSError:  # gone in between
                break
            version = target.name.removeprefix(f"{name.split('.so')[0]}.so.")
            if re.fullmatch(r"\d+(\.\d+)+", version):
                return version
            path = root / str(target).lstrip("/") if target.is_absolute() else path.parent / target
            if not path.is_symlink():
                break
        return Absent(status="error", reason=f"/{directory}/{name} leads to {path.name}, which names no version")
    return Absent(status="unsupported", reason=f"no {name} in the usual directories")


def _same(module: str | Absent, other: str | Absent) -> bool | Absent:
    for told in (module, other):
        if isinstance(told, Absent):
            return told
    return module == other
