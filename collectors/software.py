"""Versions of the software that GPUs need, and whether they match each other."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from collectors.base import Absent, Family, first_absent, host_family
from collectors.files import Files, MissingError, nonempty
from collectors.host.memory import GPU_NODES
from collectors.pcie.device import PciBus
from collectors.programs import program_version
from collectors.sysfs import DRIVER_GPUS

LIBRARIES = (
    "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib",
    "usr/local/lib", "usr/local/cuda/lib64", "opt/nccl/build/lib",
)  # fmt: skip
"""Directories in which distributions and NVIDIA's packages install libraries."""
MAX_LINKS = 8
DRIVER = "proc/driver/nvidia/version"


class SoftwareCollector:
    """Reads files under `root`. A full snapshot also runs programs for their versions."""

    name = "software"

    def __init__(self, root: Path = Path("/"), full_snapshot: bool = False) -> None:
        self._root = root
        self._full_snapshot = full_snapshot
        self._bus = PciBus(Files(root))

    def collect(self) -> Iterable[Family]:
        files = Files(self._root, cached=True)
        module = files.read(DRIVER, module_version)
        yield host_family("software.driver_module.version", "1", "Version of the NVIDIA kernel module", module)
        is_open = files.read(DRIVER, is_open_module)
        yield host_family(
            "software.driver_module.open", "1", "The NVIDIA kernel module is the open-source one", is_open
        )
        mode = gpu_memory_mode(files, self._bus)
        text = (
            "What manages the memory of GPUs in Grace hosts: numa: the kernel, as NUMA nodes; driver: the driver (CDMM)"
        )
        yield host_family("software.driver_module.gpu_memory", "1", text, mode)
        library = library_version(files, "libnvidia-ml.so.1")
        yield host_family("software.driver_library.version", "1", "Version of the NVIDIA driver libraries", library)
        matches = first_absent(module, library) or module == library
        yield host_family(
            "software.driver_library.matches", "1", "The driver libraries match the kernel module", matches
        )
        nccl = library_version(files, "libnccl.so.2")
        yield host_family("software.nccl.version", "1", "NCCL version of the host", nccl)
        toolkit = files.read("usr/local/cuda/version.json", toolkit_version)
        yield host_family("software.cuda_toolkit.version", "1", "CUDA toolkit version of the host", toolkit)
        ofed = files.read("sys/module/mlx5_core/version", nonempty)
        yield host_family(
            "software.mlx5.version",
            "1",
            "Version of the OFED driver of the NICs; the driver in the Linux kernel reports none",
            ofed,
        )
        yield from _operating_system(files)
        if self._full_snapshot:
            yield from self._fabric_manager(files, module)
            perftest = program_version(self._root, "ib_write_bw", r"Version: (\d[\d.]{0,15})")
            yield host_family(
                "software.perftest.version", "1", "Version of perftest, which measures RDMA ports", perftest
            )

    def _fabric_manager(self, files: Files, module: str | Absent) -> Iterable[Family]:
        manager = program_version(self._root, "nv-fabricmanager", r"[Vv]ersion is\s*:\s*([\d.]+)")
        yield host_family("software.fabric_manager.version", "1", "Version of the fabric manager", manager)
        matches: bool | Absent = Absent.unsupported("no NVSwitch to manage")
        if files.exists("proc/driver/nvidia-nvswitch"):
            matches = first_absent(module, manager) or module == manager
        yield host_family(
            "software.fabric_manager.matches", "1", "The fabric manager matches the driver version", matches
        )


def module_version(text: str) -> str:
    """Return the version in /proc/driver/nvidia/version. Raises ValueError if the text has none."""
    match = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s", text, re.MULTILINE)
    if not match:
        raise ValueError("no NVRM version")
    return match.group(1)


def is_open_module(text: str) -> bool:
    """Return whether /proc/driver/nvidia/version names the open kernel module. Raises ValueError if the text has no version."""
    module_version(text)
    return "Open Kernel Module" in text


def gpu_memory_mode(files: Files, bus: PciBus) -> str | Absent:
    """Return the driver's mode for GPUs that are attached to their processor by NVLink-C2C: `numa` or `driver` (CDMM).

    The kernel module's parameter NVreg_CoherentGPUMemoryMode selects it. If the parameter is not set, the version of the driver
    decides, so the parameter alone does not tell the mode.
    """
    if files.glob(GPU_NODES):
        return "numa"
    try:
        coherent = [device.address for device in bus.devices() if device.is_coherent]
    except OSError:
        coherent = []
    if not coherent:
        return Absent.unsupported("no GPU is attached to its processor by NVLink-C2C, as far as the PCI bus shows")
    if not all(files.exists(f"{DRIVER_GPUS}/{address}") for address in coherent):
        return Absent.unsupported(f"/{DRIVER_GPUS} does not list every GPU")
    return "driver"


def toolkit_version(text: str) -> str:
    """Return the version in the CUDA toolkit's version.json. Raises ValueError if the text has none."""
    try:
        return str(json.loads(text)["cuda"]["version"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no cuda.version: {error!r}") from error


def release_field(text: str, key: str) -> str:
    """Return the value of `key` in os-release(5). Raises MissingError if the text lacks it."""
    match = re.search(rf"^{key}=([\"']?)(.+)\1\s*$", text, re.MULTILINE)
    if not match:
        raise MissingError(f"no {key}")
    return match.group(2)


def _operating_system(files: Files) -> Iterable[Family]:
    path = "etc/os-release" if files.exists("etc/os-release") else "usr/lib/os-release"
    for name, key, help_text in (
        ("name", "PRETTY_NAME", "Name of the operating system"),
        ("id", "ID", "Short name of the operating system"),
        ("version", "VERSION_ID", "Version of the operating system"),
    ):
        yield host_family(f"software.os.{name}", "1", help_text, files.read(path, partial(release_field, key=key)))
    yield host_family("software.glibc.version", "1", "Version of the C library (glibc) of this process", _glibc())
    yield host_family("software.python.version", "1", "Python of this process", platform.python_version())


def _glibc() -> str | Absent:
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        name = None
    return name.removeprefix("glibc ") if name else Absent.unsupported("the C library is not glibc")


def library_version(files: Files, name: str) -> str | Absent:
    """Follow the symbolic links of a library to the first file name with a version (`libnccl.so.2.21.5`); return the version.

    The links start at `name` in the first directory of LIBRARIES in which `name` is a symbolic link.
    """
    for directory in LIBRARIES:
        path = files.path(f"{directory}/{name}")
        if not path.is_symlink():
            continue
        for _ in range(MAX_LINKS):
            try:
                target = path.readlink()
            except OSError:  # the link was removed in the meantime
                break
            version = target.name.removeprefix(f"{name.split('.so')[0]}.so.")
            if re.fullmatch(r"\d+(\.\d+)+", version):
                return version
            path = files.path(str(target).lstrip("/")) if target.is_absolute() else path.parent / target
            if not path.is_symlink():
                break
        return Absent.error(f"/{directory}/{name} leads to {path.name}, which has no version in its name")
    return Absent.unsupported(f"no {name} in the usual directories")
