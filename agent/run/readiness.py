"""Whether this machine can be measured at all, told before anything is started: GPUs, driver, torch, memory, room to write."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collectors.base import Absent, Family, Value
from collectors.nvml import gpu_conflicts

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - no file of ours
SHM_BYTES = 1 << 30
"""NVIDIA's NCCL guide has containers started with --shm-size=1g; Docker gives 64 MiB where nobody asks for more."""
BYTES_A_GPU, BYTES_A_PROCESS = 4 * GIB, GIB // 2
"""Ours: memory of the host for a rank on a GPU, with its pinned buffers of 1 GiB and its CUDA context, or on a CPU."""
DISK_BYTES = GIB // 4
"""Ours: records, logs and the checkpoints that the benchmark writes."""
REHEARSE = "`rackproof run --profile rehearsal` tries every stage on CPUs"
CONTAINER_MARKS = (".dockerenv", "run/.containerenv")
COMPATIBILITY = "usr/local/cuda/compat"


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of this machine, counted twice."""

    on_bus: int | Absent
    """With a driver or without."""
    answering: int | Absent
    """As NVML counts them."""
    given: int
    """Device nodes that a container was given; 0 outside one, where all are there."""

    @property
    def most(self) -> int:
        """As many as are there by any count; in a container, of those that it was given."""
        driver = self.answering if isinstance(self.answering, int) else 0
        if self.given:
            return max(self.given, driver)
        return max(driver, self.on_bus if isinstance(self.on_bus, int) else 0)

    def disagreement(self) -> str:
        """Why the two counts differ; empty where they agree."""
        if isinstance(self.on_bus, Absent) or isinstance(self.answering, Absent) or self.on_bus == self.answering:
            return ""
        if self.given and self.answering == self.given:
            return f"this container was given {self.given} of the {self.on_bus} GPUs on the machine's PCI bus"
        return (
            f"the PCI bus shows {self.on_bus} NVIDIA GPUs and the driver answers for {self.answering}: the kernel log (dmesg) "
            f"says why; {self.most} are expected, so that none is left out unnoticed"
        )


def readings(families: Iterable[Family]) -> dict[str, Value | Absent]:
    """Name -> what was read of the host as a whole."""
    return {family.name: value for family in families for labels, value in family.readings if not labels}


def gpus_of(read: Mapping[str, Value | Absent], environment: Mapping[str, str], root: Path = Path("/")) -> Gpus:
    """The GPUs, by what the collectors read."""
    nothing = Absent(status="error", reason="it was not read")
    bus, driver = (read.get(name, nothing) for name in ("gpu.pci_count", "gpu.count"))
    nodes = [path for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return Gpus(
        on_bus=bus if isinstance(bus, Absent) else int(float(bus)),
        answering=driver if isinstance(driver, Absent) else int(float(driver)),
        given=len(nodes) if in_container(environment, root) else 0,
    )


def in_container(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether a container runtime started this, which may have given it some of the machine's GPUs only."""
    told = "container" in environment or "KUBERNETES_SERVICE_HOST" in environment
    return told or any((root / mark).exists() for mark in CONTAINER_MARKS)


def no_gpus(found: Gpus) -> str:
    """Why no GPU can be measured; empty where one can."""
    if isinstance(found.answering, int) and found.answering:
        return ""
    reason = f" ({found.answering.reason})" if isinstance(found.answering, Absent) else ""
    if found.most:
        return (
            f"{found.most} NVIDIA GPUs are there and the driver answers for none{reason}: install or load the driver "
            "(nvidia-smi must list them); in a container, start it with --gpus all"
        )
    if isinstance(found.on_bus, Absent):
        return f"no GPU answers{reason}, and the PCI bus cannot be read ({found.on_bus.reason}): {REHEARSE}"
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
    """What keeps these devices from being measured: what is, why that is too little, and the remedy.

    Args:
        devices: NVML indices, or the numbers of a rehearsal's processes.
        directory: of the run; made where it is missing.
        cpu: a rehearsal, which needs no GPU.
        share: other processes may be on the GPUs.
    """
    found = [*_torch(read, cpu=cpu, root=root), *_memory(read, len(devices), cpu=cpu, root=root), *_room(directory)]
    if not cpu:
        found += [*_shm(root), *_hidden(devices, os.environ if environment is None else environment)]
        found += [
            f"{told}: end it, or give --share-gpus to measure beside it" for told in gpu_conflicts(devices, share=share)
        ]
    return found


def torch_build() -> tuple[str, str] | None:
    """(version, CUDA it was built for; empty for none) by its files, since importing it takes seconds; None without torch.

    Both are `?` where the files do not tell.
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
        yield f"torch {version} is built without CUDA: install a build for CUDA (https://pytorch.org)"
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
    where = "of memory are available"
    if limit is not None and used is not None and (free is None or limit - used < free):
        free, where = limit - used, "are left of this container's or job's memory limit"
    needed = devices * (BYTES_A_PROCESS if cpu else BYTES_A_GPU)
    if free is not None and free < needed:
        each = f"{devices} {'processes' if cpu else 'GPUs'}"
        yield f"{free / GIB:.1f} GiB {where}, and {each} need {needed / GIB:.1f} GiB: free memory, or raise the limit"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _shm(root: Path) -> Iterator[str]:
    try:
        found = os.statvfs(root / SHM[1:])
    except OSError as error:
        yield f"{SHM}: {error.strerror}: NCCL and data loaders need shared memory; mount a tmpfs there"
        return
    free = found.f_bavail * found.f_frsize
    if free < SHM_BYTES:
        yield (
            f"{SHM} has {free >> 20} MiB free, and NCCL and data loaders need {SHM_BYTES >> 20} MiB: start the container "
            "with --ipc=host or --shm-size=1g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
        )


def _hidden(devices: Sequence[int], environment: Mapping[str, str]) -> Iterator[str]:
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    shown = [int(word) for word in (chosen or "").split(",") if word.strip().isdecimal()]
    if chosen is not None and not set(devices) <= set(shown) and not re.search("GPU-|MIG-", chosen):
        hidden = sorted(set(devices) - set(shown))
        yield (
            f"CUDA_VISIBLE_DEVICES={chosen} hides GPU {', '.join(map(str, hidden))}: unset it, or give --devices "
            f"{','.join(map(str, shown)) or 'with those that are meant'}"
        )


def _room(directory: Path) -> Iterator[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            found = os.statvfs(directory)
    except OSError as error:
        yield f"{directory}: {error.strerror or error}: give a directory that this user may write as --run-dir"
        return
    free = found.f_bavail * found.f_frsize
    if free < DISK_BYTES:
        yield (
            f"{directory} has {free >> 20} MiB free, and a run needs {DISK_BYTES >> 20} MiB: "
            "free some, or give another --run-dir"
        )
