"""The host's memory: sizes, NUMA nodes, and the error counts of the memory controllers.

The memory of a GPU in a Grace host may be a NUMA node too (`gpu_nodes`). It is not counted as memory of the host.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterable
from functools import partial

from collectors.base import HOST_LABELS, Absent, Family, Value, add_parts, first_absent, host_family
from collectors.files import Files, nonempty
from collectors.host.parsing import bracketed_choice, length_of_cpu_list, meminfo, optional_meminfo

_CONTROLLERS = "sys/devices/system/edac/mc"
_NO_CONTROLLER = "no EDAC driver for a memory controller is loaded"
_NODES, _BLOCKS = "sys/devices/system/node", "sys/devices/system/memory"
GPU_NODES = "proc/driver/nvidia/gpus/*/numa_status"
"""Files of NVIDIA's driver. They exist only if the driver's mode is `numa`: the kernel manages the memory of the GPUs, as NUMA
nodes (NVIDIA open-gpu-kernel-modules, nv-procfs.c). In the mode `driver` (CDMM), the kernel does not know this memory."""
_MEMINFO = (
    ("host.swap.total", "B", "Swap space", "SwapTotal"),
    ("host.hugepages.count", "1", "Huge pages of the default size", "HugePages_Total"),
    ("host.hugepages.free", "1", "Free huge pages of the default size", "HugePages_Free"),
)
_DIMM = {
    "dimm_ce_count": ("host.dimm.corrected", "ECC-corrected memory errors of the DIMM", True),
    "dimm_ue_count": ("host.dimm.uncorrected", "Uncorrected memory errors of the DIMM", True),
    "dimm_label": ("host.dimm.label", "Slot of the DIMM", False),
}
"""File -> name of the family, help text, and whether the family is a counter."""


def sizes(files: Files) -> Iterable[Family]:
    """Yield the sizes and counts in /proc/meminfo, and the mode of transparent huge pages."""
    total, available = memory_total(files), _of_host(files, "MemAvailable", "MemFree")
    yield host_family("host.memory.total", "B", "/proc/meminfo MemTotal, without memory of GPUs", total, varies=True)
    if not isinstance(total, Absent) and not isinstance(available, Absent):
        available = min(total, available)  # the files are read one after the other, so they may contradict each other
    text = "/proc/meminfo MemAvailable, without memory of GPUs"
    yield host_family("host.memory.available", "B", text, available, varies=True)
    for name, unit, text, key in _MEMINFO:
        value = files.read("proc/meminfo", partial(optional_meminfo, key=key))
        yield host_family(name, unit, text, value, varies=True)
    text = "Memory that the kernel took out of use after an error, without memory of GPUs"
    yield host_family("host.memory.poisoned", "B", text, _poisoned(files), varies=True)
    yield host_family("host.swap.used", "B", "Swap in use", files.read("proc/meminfo", _swap_used), varies=True)
    mode = files.read("sys/kernel/mm/transparent_hugepage/enabled", bracketed_choice)
    yield host_family("host.memory.transparent_hugepages", "1", "Mode of transparent huge pages", mode)


def errors(files: Files) -> Iterable[Family]:
    """Yield the errors that the memory controllers have counted since their driver was loaded."""
    controllers = files.matching(_CONTROLLERS, r"mc\d+", _NO_CONTROLLER)
    for name, file, text in (
        ("corrected", "ce_count", "Memory errors corrected by ECC"),
        ("uncorrected", "ue_count", "Memory errors that ECC could not correct"),
    ):
        family = Family(name=f"host.memory.ecc_{name}", unit="1", help=text, counter=True)
        yield add_parts(family, "mc", controllers, partial(_error_count, files, file=file))


def modules(files: Files) -> Iterable[Family]:
    """Yield the errors and the slot of each memory module, if the EDAC driver distinguishes the modules."""
    families = {
        file: Family(name=name, unit="1", help=text, counter=counter) for file, (name, text, counter) in _DIMM.items()
    }
    controllers = files.matching(_CONTROLLERS, r"mc\d+", _NO_CONTROLLER)
    names = [] if isinstance(controllers, Absent) else controllers
    slots = [(mc, dimm) for mc in names for dimm in _dimms(files, mc)]
    for file, family in families.items():
        for mc, dimm in slots:
            parse: Callable[[str], Value] = int if family.counter else nonempty
            family.add({"mc": mc, "dimm": dimm}, files.read(f"{_CONTROLLERS}/{mc}/{dimm}/{file}", parse))
        if not slots:
            unknown = Absent.unsupported("the EDAC driver does not distinguish memory modules")
            family.add(HOST_LABELS, controllers if isinstance(controllers, Absent) else unknown)
    return families.values()


def nodes(files: Files) -> Iterable[Family]:
    """Yield the number of NUMA nodes, the memory and processors of each, and the NUMA settings of the kernel.

    Nodes of GPU memory and empty nodes, which have neither processors nor memory, are left out. The firmware of Grace hosts
    reserves eight nodes for each GPU. Most or all of them are empty.
    """
    names = files.matching(_NODES, r"node\d+", "the kernel has no NUMA support")
    if not isinstance(names, Absent):
        of_gpus = gpu_nodes(files)
        names = [name for name in names if name not in of_gpus and not _is_empty(files, name)]
    count = names if isinstance(names, Absent) else len(names)
    yield host_family("host.numa.count", "1", "NUMA nodes, without those of GPU memory", count)
    numbers = names if isinstance(names, Absent) else [name.removeprefix("node") for name in names]
    for key, name in (("MemTotal", "total"), ("MemFree", "free")):
        family = Family(name=f"host.numa.memory_{name}", unit="B", help=f"{key} of the NUMA node", varies=True)
        yield add_parts(family, "numa", numbers, partial(_node_memory, files, key=key))
    family = Family(name="host.numa.processors", unit="1", help="Logical CPUs of the NUMA node that are online")
    yield add_parts(family, "numa", numbers, partial(_processors, files))
    for name, path, text in (
        ("balancing", "proc/sys/kernel/numa_balancing", "Automatic NUMA balancing; 0: off"),
        ("zone_reclaim", "proc/sys/vm/zone_reclaim_mode", "Zone reclaim mode; 0: off"),
    ):
        yield host_family(f"host.numa.{name}", "1", text, files.read(path, int))


def memory_total(files: Files) -> int | Absent:
    """Return the memory that the kernel manages in bytes, without memory of GPUs."""
    return _of_host(files, "MemTotal", "MemTotal")


def gpu_nodes(files: Files) -> set[str]:
    """Return the names of the NUMA nodes that consist of GPU memory, such as `node1`. They have no processors."""
    numbers = [files.read(path, _number_of_gpu_node) for path in files.glob(GPU_NODES)]
    names = {f"node{number}" for number in numbers if isinstance(number, int)}
    return {name for name in names if _has_no_processors(files, name)}


def is_gpu_page(files: Files, page: int) -> bool:
    """Return whether a page of memory, by its page frame number, is in a NUMA node that consists of GPU memory."""
    size = files.read(f"{_BLOCKS}/block_size_bytes", partial(int, base=16))
    if isinstance(size, Absent) or size <= 0:
        return False
    block = page * resource.getpagesize() // size
    return any(files.exists(f"{_NODES}/{node}/memory{block}") for node in gpu_nodes(files))


def _poisoned(files: Files) -> int | Absent:
    """Return the memory that the kernel took out of use after an error, without memory of GPUs.

    NVIDIA's driver has the kernel take pages of GPU memory out of use, if this memory is a NUMA node. Linux counts such pages in
    the same value of /proc/meminfo as those of the host. Since Linux 6.3, it counts them for each node too: if no node of the
    host has such a page, and the nodes of GPUs have all of them, the result is 0. (Pages that the kernel took out of use after
    corrected errors are in the value, but not in the counts of the nodes.)
    """
    value = files.read("proc/meminfo", partial(optional_meminfo, key="HardwareCorrupted"))
    of_gpus = gpu_nodes(files)
    if isinstance(value, Absent) or not value or not of_gpus:
        return value
    names = files.matching(_NODES, r"node\d+", "the kernel has no NUMA support")
    nodes = (
        [] if isinstance(names, Absent) else [name for name in names if name in of_gpus or not _is_empty(files, name)]
    )
    failures = {name: files.read(f"{_NODES}/{name}/memory_failure/total", int) for name in nodes}
    of_host = [number for name, number in failures.items() if name not in of_gpus]
    pages = sum(number for name, number in failures.items() if name in of_gpus and not isinstance(number, Absent))
    is_of_gpus = bool(of_host) and all(number == 0 for number in of_host) and value <= pages * resource.getpagesize()
    return 0 if is_of_gpus else value


def _of_host(files: Files, key: str, key_of_node: str) -> int | Absent:
    """Return the value of a key in /proc/meminfo, less the values of `key_of_node` of the nodes of GPU memory."""
    value = files.required("proc/meminfo", partial(meminfo, key=key))
    for name in gpu_nodes(files):
        of_gpu = _node_memory(files, name.removeprefix("node"), key_of_node)
        if isinstance(value, Absent) or isinstance(of_gpu, Absent):
            return first_absent(value, of_gpu) or value
        value = max(0, value - of_gpu)
    return value


def _number_of_gpu_node(text: str) -> int:
    match = re.search(r"^Node:\s+(-?\d+)$", text, re.MULTILINE)
    if not match:
        raise ValueError("no NUMA node")
    return int(match.group(1))


def _processors(files: Files, node: str) -> int | Absent:
    return files.read(f"{_NODES}/node{node}/cpulist", length_of_cpu_list)


def _has_no_processors(files: Files, name: str) -> bool:
    return files.read(f"{_NODES}/{name}/cpulist", str) == ""


def _is_empty(files: Files, name: str) -> bool:
    return _has_no_processors(files, name) and _node_memory(files, name.removeprefix("node"), "MemTotal") == 0


def _dimms(files: Files, mc: str) -> list[str]:
    names = files.matching(f"{_CONTROLLERS}/{mc}", r"(dimm|rank)\d+", "none")
    return [] if isinstance(names, Absent) else names


def _swap_used(text: str) -> int:
    return optional_meminfo(text, "SwapTotal") - optional_meminfo(text, "SwapFree")


def _error_count(files: Files, mc: str, file: str) -> int | Absent:
    return files.read(f"{_CONTROLLERS}/{mc}/{file}", int)


def _node_memory(files: Files, node: str, key: str) -> int | Absent:
    return files.read(f"{_NODES}/node{node}/meminfo", partial(optional_meminfo, key=key))
