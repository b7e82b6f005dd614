"""Check before a run whether this machine can run the benchmarks: GPUs, driver, torch, memory and disk space."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.placement.rank_placement import (
    DENIED,
    PlacementError,
    count_device_nodes,
    denied_device_nodes,
    device_nodes,
    visible_devices,
)
from agent.run import preflight
from agent.sampling.cgroups import memory_left
from collectors.base import Absent, Family, Value
from collectors.files import Files
from collectors.namespaces import has_own_pid_namespace
from collectors.nvml import NotOpened, gpu_conflicts
from collectors.pcie.device import GPU, PciBus
from schemas.plans import Plan

GIB = 1 << 30
SHM_BYTES = 1 << 30
"""NVIDIA's NCCL guide recommends --shm-size=1g for containers. Docker's default is 64 MiB."""
BYTES_PER_GPU, BYTES_PER_PROCESS = 4 * GIB, GIB // 2
"""Estimated host memory of a rank on a GPU and of a rank on a CPU. A rank on a GPU has a CUDA context, and pinned buffers
(by default 2 GiB in the benchmark `host_copy`)."""
DISK_BYTES = GIB // 4
"""Estimated disk space for records, logs and the files that the benchmark `checkpoint` saves."""
REHEARSE = "`rackproof run --profile rehearsal` tries every stage on CPUs"
CONTAINER_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container", ".singularity.d")
"""Files of Docker, of Podman, of systemd (as in LXD and systemd-nspawn), and of Apptainer and Singularity."""
COMPATIBILITY = "usr/local/cuda/compat"


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The number of GPUs of this machine, from the PCI bus and from the driver."""

    on_bus: int | Absent
    """Number of NVIDIA GPUs on the PCI bus, with or without a driver."""
    answering: int | Absent
    """Number of GPUs according to NVML."""
    given: int
    """Number of GPU device nodes that this container or job may use. It is 0 if no node is denied and /dev is that of the machine
    (`has_own_device_nodes`)."""
    denied: int = 0
    """Number of GPU device nodes that this process may not use."""

    @property
    def expected(self) -> int:
        """Number of GPUs that should be tested: the higher of the counts of the PCI bus and the driver.

        If a container or job has device nodes of GPUs, their number replaces the count of the PCI bus. The PCI bus also shows
        GPUs of other containers and jobs.
        """
        driver = self.answering if isinstance(self.answering, int) else 0
        if self.given:
            return max(self.given, driver)
        return max(driver, self.on_bus if isinstance(self.on_bus, int) else 0)

    def disagreement(self) -> str:
        """Return why the counts of the PCI bus and the driver differ; empty if they agree or if one of them is missing."""
        if isinstance(self.on_bus, Absent) or isinstance(self.answering, Absent) or self.on_bus == self.answering:
            return ""
        if self.given and self.answering == self.given:
            return f"this container or job was given {self.given} of the {self.on_bus} GPUs on the machine's PCI bus"
        return (
            f"the PCI bus has {self.on_bus} NVIDIA GPUs but the driver reports {self.answering}: the kernel log (dmesg) "
            f"has the reason; the run expects {self.expected}, so that a missing GPU is detected"
        )


def readings(families: Iterable[Family]) -> dict[str, Value | Absent]:
    """Return name of a reading -> its value or why it is missing, for the readings that apply to the whole host."""
    return {family.name: value for family in families for labels, value in family.readings if not labels}


def gpus_of(
    host_readings: Mapping[str, Value | Absent], environment: Mapping[str, str], root: Path = Path("/")
) -> Gpus:
    """Count the GPUs, from the collectors' readings and the device nodes."""
    not_read = Absent(status="error", reason="not read")
    bus, driver = (host_readings.get(name, not_read) for name in ("gpu.pci_count", "gpu.count"))
    denied = len(denied_device_nodes(root))
    return Gpus(
        on_bus=bus if isinstance(bus, Absent) else int(float(bus)),
        answering=driver if isinstance(driver, Absent) else int(float(driver)),
        given=count_device_nodes(root) if denied or has_own_device_nodes(environment, root) else 0,
        denied=denied,
    )


def has_own_device_nodes(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether this process runs in a container with a /dev of its own, which has device nodes only of its own GPUs.

    The /dev of the machine is a devtmpfs. Apptainer shares it with its containers unless the option --contain is given.
    """
    try:
        mounts = Files(root).text("proc/self/mounts").splitlines()
    except OSError:
        mounts = []
    return in_container(environment, root) and not any(mount.split()[1:3] == ["/dev", "devtmpfs"] for mount in mounts)


def in_container(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether this process runs in a container.

    Containers of nerdctl, ctr and LXC have neither variables nor files of their own, but a PID namespace.
    """
    has_variable = "container" in environment or "KUBERNETES_SERVICE_HOST" in environment
    has_mark = any((root / mark).exists() for mark in CONTAINER_MARKS)
    return has_variable or has_mark or has_own_pid_namespace(Files(root))


def check_gpu_allocation(plan: Plan, host: str, environment: Mapping[str, str], root: Path = Path("/")) -> None:
    """Raise PlacementError if the scheduler or the container gives this process fewer GPUs than the plan has ranks on this host.

    Without this check, the GPUs that this process may not use would be reported as missing hardware.
    """
    planned = next((len(item.devices) for item in plan.hosts if item.name == host and item.device == "gpu"), 0)
    visible = visible_devices(environment)
    problems = [*_withheld_gpus(planned, environment, root)]
    if visible is not None and len(visible) < planned:
        problems = [
            f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']} has {len(visible)} GPUs: {_ask_scheduler(planned)}"
        ]
    if problems:
        raise PlacementError(f"{planned} ranks on host {host}, but {problems[0]}, or plan fewer ranks")


def _withheld_gpus(planned: int, environment: Mapping[str, str], root: Path) -> Iterator[str]:
    """Yield a problem if this process may not use GPUs that the machine has, and has fewer than planned."""
    nodes = device_nodes(root)
    denied = [path.name for path in denied_device_nodes(root)]
    if denied and len(nodes) - len(denied) < planned:
        names = ", ".join(f"/dev/{name}" for name in denied)
        yield f"access to {names} is denied: {_ask_scheduler(planned)}, or give this user access"
        return
    if not has_own_device_nodes(environment, root):
        return
    # With NVIDIA_VISIBLE_DEVICES=all, the runtime gives the container all GPUs for which the driver works. The others must be
    # reported as missing. In Kubernetes, this value proves nothing: images set it, and some device plugins do not change it.
    if environment.get("NVIDIA_VISIBLE_DEVICES") == "all" and "KUBERNETES_SERVICE_HOST" not in environment:
        return
    on_bus = PciBus(Files(root)).count(GPU)
    if not isinstance(on_bus, Absent) and len(nodes) < min(planned, on_bus):
        yield (
            f"this container was given {len(nodes)} of the {on_bus} GPUs on the machine's PCI bus: give it {planned} GPUs "
            "(Kubernetes: the limit nvidia.com/gpu; Docker: --gpus all). If it should have them, see which GPUs nvidia-smi lists "
            "on the machine"
        )


def _ask_scheduler(planned: int) -> str:
    return (
        f"ask the scheduler for {planned} GPUs on each host (srun --gpus-per-node={planned}, without --gpus-per-task)"
    )


def reason_without_gpus(gpus: Gpus) -> str:
    """Return why no GPU can be measured; empty if one can."""
    if isinstance(gpus.answering, int) and gpus.answering:
        return ""
    reason = f" ({gpus.answering.reason})" if isinstance(gpus.answering, Absent) else ""
    if gpus.expected:
        remedy = ": install or load the driver (nvidia-smi must list them); a container needs --gpus all"
        if isinstance(gpus.answering, NotOpened):
            remedy = ""
        elif gpus.denied:
            remedy = f": {DENIED}"
        return f"{gpus.expected} NVIDIA GPUs are present but the driver reports none{reason}{remedy}"
    if isinstance(gpus.on_bus, Absent):
        return (
            f"the driver reports no GPU{reason}, and the PCI bus cannot be read ({gpus.on_bus.reason}): {REHEARSE}; "
            "a container needs --gpus all"
        )
    return f"there is no NVIDIA GPU on this machine's PCI bus{reason}: {REHEARSE}"


def problems(
    host_readings: Mapping[str, Value | Absent],
    devices: Sequence[int],
    directory: Path,
    *,
    cpu: bool,
    uses_torch: bool = True,
    share: bool = False,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> list[str]:
    """Return the problems that prevent a measurement of these devices, each with its remedy.

    Args:
        host_readings: name -> value of the readings that apply to the whole host (`readings`).
        devices: NVML indices of the GPUs; in a rehearsal, the numbers of the processes.
        directory: run directory, created if it is missing.
        cpu: whether the run is a rehearsal, which needs no GPU.
        uses_torch: whether any stage needs torch.
        share: whether other processes may use the GPUs.
    """
    problems = [
        *(_torch_problems(host_readings, cpu=cpu, root=root) if uses_torch else ()),
        *_memory_problems(host_readings, len(devices), cpu=cpu, root=root),
        *(_shm_problems(root, cpu=cpu) if uses_torch or not cpu else ()),
        *_disk_problems(directory),
    ]
    if not cpu:
        variables = os.environ if environment is None else environment
        problems += _hidden_gpus(devices, variables)
        problems += _withheld_gpus(len(devices), variables, root)
        problems += preflight.environment_problems(
            variables, {}, network=False, source=preflight.OWN_ENVIRONMENT, remedy="remove it there"
        )
        problems += [
            f"{conflict}: free the GPU, or give --share-gpus to measure anyway"
            for conflict in gpu_conflicts(devices, share=share)
        ]
    return problems


def torch_build() -> tuple[str, str] | None:
    """Return torch's version and its CUDA version (empty if it was built without CUDA); None if torch is not installed.

    The versions come from torch's files, because importing torch takes seconds. A version that is not in the files is `?`.
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


def _torch_problems(host_readings: Mapping[str, Value | Absent], *, cpu: bool, root: Path) -> Iterator[str]:
    build = torch_build()
    if build is None:
        yield f"torch is not installed for {sys.executable}: install rackproof[bench], or use the Python that has torch"
        return
    version, cuda = build
    if cpu or cuda == "?":
        return
    if not cuda:
        yield f"torch {version} was built without CUDA: install a build for CUDA (https://pytorch.org)"
        return
    supported = host_readings.get("driver.cuda_version")
    if (
        isinstance(supported, str)
        and _major(cuda) > _major(supported) > 0
        and not any((root / COMPATIBILITY).glob("libcuda.so*"))
    ):
        yield (
            f"torch {version} is built for CUDA {cuda}, but the driver supports at most {supported}: update the driver, or "
            f"install either a torch built for CUDA {_major(supported)} or the compatibility package of CUDA {_major(cuda)}"
        )


def _major(version: str) -> int:
    major = version.split(".")[0]
    return int(major) if major.isdecimal() else 0


def _memory_problems(
    host_readings: Mapping[str, Value | Absent], devices: int, *, cpu: bool, root: Path
) -> Iterator[str]:
    available = host_readings.get("host.memory.available")
    free = int(available) if isinstance(available, int | float) else None
    left = memory_left(root)
    state, remedy = "of memory are available", "free up memory"
    if left is not None and (free is None or left < free):
        free, state = left, "are free within the memory limit of this container or job"
        remedy = "free up memory, or raise the limit"
    needed = devices * (BYTES_PER_PROCESS if cpu else BYTES_PER_GPU)
    if free is not None and free < needed:
        ranks = f"{devices} {'processes' if cpu else 'GPUs'}"
        yield f"{free / GIB:.1f} GiB {state}, and {ranks} need {needed / GIB:.1f} GiB: {remedy}"


def _shm_problems(root: Path, *, cpu: bool) -> Iterator[str]:
    directory = root / preflight.SHM[1:]
    if problems := [*preflight.shared_memory_problems(str(directory))]:
        yield from problems
        return
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if not cpu and free < SHM_BYTES:
        yield (
            f"{preflight.SHM} has {free >> 20} MiB free, and NCCL and data loaders need {SHM_BYTES >> 20} MiB: start the "
            "container with --ipc=host or --shm-size=1g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
        )


def _hidden_gpus(devices: Sequence[int], environment: Mapping[str, str]) -> Iterator[str]:
    visible = visible_devices(environment)
    if visible is None or any(device.startswith(("GPU-", "MIG-")) for device in visible):
        return
    visible_indices = [int(device) for device in visible if device.isdecimal()]
    if hidden := sorted(set(devices) - set(visible_indices)):
        remedy = f", or give --devices {','.join(map(str, visible_indices))}" if visible_indices else ""
        yield (
            f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']} hides GPU {', '.join(map(str, hidden))}: "
            f"unset the variable{remedy}"
        )


def _disk_problems(directory: Path) -> Iterator[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            status = os.statvfs(directory)
    except OSError as error:
        yield f"{directory}: {error.strerror or error}: give a --run-dir that this user can write to"
        return
    free = status.f_bavail * status.f_frsize
    if free < DISK_BYTES:
        yield (
            f"{directory} has {free >> 20} MiB free, and a run needs {DISK_BYTES >> 20} MiB: "
            "free up disk space, or give another --run-dir"
        )
