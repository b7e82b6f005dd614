"""Check before anything is started whether this machine can be measured: GPUs, driver, torch, memory, disk space."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.placement.rank_placement import visible_devices
from collectors.base import Absent, Family, Value
from collectors.nvml import gpu_conflicts

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - no file of ours
SHM_BYTES = 1 << 30
"""NVIDIA's NCCL guide has containers started with --shm-size=1g; Docker gives 64 MiB by default."""
BYTES_A_GPU, BYTES_A_PROCESS = 4 * GIB, GIB // 2
"""Our estimate: host memory of a rank on a GPU, with 1 GiB of pinned buffers and a CUDA context, or of a rank on a CPU."""
DISK_BYTES = GIB // 4
"""Our estimate: records, logs and the checkpoints that the benchmark writes."""
REHEARSE = "`rackproof run --profile rehearsal` tries every stage on CPUs"
CONTAINER_MARKS = (".dockerenv", "run/.containerenv")
COMPATIBILITY = "usr/local/cuda/compat"


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of this machine, counted in two ways."""

    on_bus: int | Absent
    """NVIDIA GPUs on the PCI bus, with or without a driver."""
    answering: int | Absent
    """As NVML counts them."""
    given: int
    """Device nodes in this container; 0 outside a container."""

    @property
    def most(self) -> int:
        """Return the higher of the two counts; in a container at most the GPUs that it was given."""
        driver = self.answering if isinstance(self.answering, int) else 0
        if self.given:
            return max(self.given, driver)
        return max(driver, self.on_bus if isinstance(self.on_bus, int) else 0)

    def disagreement(self) -> str:
        """Return why the two counts differ; empty if they agree."""
        if isinstance(self.on_bus, Absent) or isinstance(self.answering, Absent) or self.on_bus == self.answering:
            return ""
        if self.given and self.answering == self.given:
            return f"this container was given {self.given} of the {self.on_bus} GPUs on the machine's PCI bus"
        return (
            f"the PCI bus shows {self.on_bus} NVIDIA GPUs and the driver answers for {self.answering}: the kernel log (dmesg) "
            f"says why; {self.most} are expected, so that a missing one is noticed"
        )


def readings(families: Iterable[Family]) -> dict[str, Value | Absent]:
    """Return the readings of the whole host by name."""
    return {family.name: value for family in families for labels, value in family.readings if not labels}


def gpus_of(read: Mapping[str, Value | Absent], environment: Mapping[str, str], root: Path = Path("/")) -> Gpus:
    """Count the GPUs with the readings of the collectors."""
    nothing = Absent(status="error", reason="not read")
    bus, driver = (read.get(name, nothing) for name in ("gpu.pci_count", "gpu.count"))
    nodes = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return Gpus(
        on_bus=bus if isinstance(bus, Absent) else int(float(bus)),
        answering=driver if isinstance(driver, Absent) else int(float(driver)),
        given=len(nodes) if in_container(environment, root) else 0,
    )


def in_container(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether this is a container, which may have only some of the machine's GPUs."""
    has_variable = "container" in environment or "KUBERNETES_SERVICE_HOST" in environment
    return has_variable or any((root / mark).exists() for mark in CONTAINER_MARKS)


def no_gpus(gpus: Gpus) -> str:
    """Return why no GPU can be measured; empty if one can."""
    if isinstance(gpus.answering, int) and gpus.answering:
        return ""
    reason = f" ({gpus.answering.reason})" if isinstance(gpus.answering, Absent) else ""
    if gpus.most:
        return (
            f"{gpus.most} NVIDIA GPUs are present and the driver answers for none{reason}: install or load the driver "
            "(nvidia-smi must list them); in a container, start it with --gpus all"
        )
    if isinstance(gpus.on_bus, Absent):
        return f"no GPU answers{reason}, and the PCI bus cannot be read ({gpus.on_bus.reason}): {REHEARSE}"
    return f"there is no NVIDIA GPU on this machine's PCI bus{reason}: {REHEARSE}; in a container, start it with --gpus all"


def problems(
    read: Mapping[str, Value | Absent],
    devices: Sequence[int],
    directory: Path,
    *,
    cpu: bool,
    share: bool = False,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> list[str]:
    """Return what prevents a measurement of these devices: the value, why it is not enough, and the remedy.

    Args:
        devices: NVML indices, or the process numbers of a rehearsal.
        directory: run directory, created if it is missing.
        cpu: a rehearsal, which needs no GPU.
        share: other processes may use the GPUs.
    """
    result = [
        *_torch(read, cpu=cpu, root=root),
        *_memory(read, len(devices), cpu=cpu, root=root),
        *_disk_space(directory),
    ]
    if not cpu:
        result += [*_shm(root), *_hidden(devices, os.environ if environment is None else environment)]
        result += [
            f"{conflict}: end it, or give --share-gpus to measure beside it"
            for conflict in gpu_conflicts(devices, share=share)
        ]
    return result


def torch_build() -> tuple[str, str] | None:
    """Return torch's version and the CUDA version it was built for (empty: none); None if torch is not installed.

    They are read from its files, because importing torch takes seconds. Both are `?` if the files do not contain them.
    """
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return "?", "?"
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([^'\"]*)['\"])", text, re.MULTILINE)
    return version[1] if version else "?", (cuda[1] or "") if cuda else "?"


def _torch(read: Mapping[str, Value | Absent], *, cpu: bool, root: Path) -> Iterator[str]:
    build = torch_build()
    if build is None:
        yield f"torch is not installed for {sys.executable}: install rackproof[bench], or use the Python that has it"
        return
    version, cuda = build
    if cpu or cuda == "?":
        return
    if not cuda:
        yield f"torch {version} was built without CUDA: install a build for CUDA (https://pytorch.org)"
        return
    newest = read.get("driver.cuda_version")
    if (
        isinstance(newest, str)
        and _major(cuda) > _major(newest) > 0
        and not any((root / COMPATIBILITY).glob("libcuda.so*"))
    ):
        yield (
            f"torch {version} is built for CUDA {cuda}, and the driver supports {newest} at most: update the driver, install a "
            f"torch built for CUDA {_major(newest)}, or the compatibility package of CUDA {_major(cuda)}"
        )


def _major(version: str) -> int:
    first = version.split(".")[0]
    return int(first) if first.isdecimal() else 0


def _memory(read: Mapping[str, Value | Absent], devices: int, *, cpu: bool, root: Path) -> Iterator[str]:
    available = read.get("host.memory.available")
    free = int(available) if isinstance(available, int | float) else None
    limit, used = (_number(root / f"sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    state = "of memory are available"
    if limit is not None and used is not None and (free is None or limit - used < free):
        free, state = limit - used, "are left below the memory limit of this container or job"
    needed = devices * (BYTES_A_PROCESS if cpu else BYTES_A_GPU)
    if free is not None and free < needed:
        each = f"{devices} {'processes' if cpu else 'GPUs'}"
        yield f"{free / GIB:.1f} GiB {state}, and {each} need {needed / GIB:.1f} GiB: free memory, or raise the limit"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _shm(root: Path) -> Iterator[str]:
    try:
        status = os.statvfs(root / SHM[1:])
    except OSError as error:
        yield f"{SHM}: {error.strerror}: NCCL and data loaders need shared memory; mount a tmpfs there"
        return
    free = status.f_bavail * status.f_frsize
    if free < SHM_BYTES:
        yield (
            f"{SHM} has {free >> 20} MiB free, and NCCL and data loaders need {SHM_BYTES >> 20} MiB: start the container "
            "with --ipc=host or --shm-size=1g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
        )


def _hidden(devices: Sequence[int], environment: Mapping[str, str]) -> Iterator[str]:
    visible = visible_devices(environment)
    if visible is None or any(word.startswith(("GPU-", "MIG-")) for word in visible):
        return
    shown = [int(word) for word in visible if word.isdecimal()]
    if hidden := sorted(set(devices) - set(shown)):
        yield (
            f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']} hides GPU {', '.join(map(str, hidden))}: unset it, or "
            f"give --devices {','.join(map(str, shown)) or 'with the ones to measure'}"
        )


def _disk_space(directory: Path) -> Iterator[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            status = os.statvfs(directory)
    except OSError as error:
        yield f"{directory}: {error.strerror or error}: give a directory that this user may write as --run-dir"
        return
    free = status.f_bavail * status.f_frsize
    if free < DISK_BYTES:
        yield (
            f"{directory} has {free >> 20} MiB free, and a run needs {DISK_BYTES >> 20} MiB: "
            "free disk space, or give another --run-dir"
        )
