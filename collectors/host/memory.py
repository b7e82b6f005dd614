"""The host's memory: sizes, NUMA nodes, and the errors that its controllers counted."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from collectors.base import HOST, Absent, Family
from collectors.host.files import Files, one, over
from collectors.host.parsing import chosen, field, memory

_CONTROLLERS = "sys/devices/system/edac/mc"
_NODES = "sys/devices/system/node"
_MEMINFO = (
    ("host.swap.total", "B", "Swap space", "SwapTotal"),
    ("host.memory.poisoned", "B", "Memory that the kernel took out of use after an error", "HardwareCorrupted"),
    ("host.hugepages.count", "1", "Huge pages of the default size", "HugePages_Total"),
    ("host.hugepages.free", "1", "Huge pages of the default size that are free", "HugePages_Free"),
)


def memories(files: Files) -> Iterable[Family]:
    """Sizes out of /proc/meminfo."""
    for key, name in (("MemTotal", "total"), ("MemAvailable", "available")):
        value = files.required("proc/meminfo", partial(memory, key=key))
        yield one(f"host.memory.{name}", "B", f"/proc/meminfo {key}", value)
    for name, unit, text, key in _MEMINFO:
        yield one(name, unit, text, files.read("proc/meminfo", partial(field, key=key)))
    yield one("host.swap.used", "B", "Swap in use", files.read("proc/meminfo", _swap_used))
    mode = files.read("sys/kernel/mm/transparent_hugepage/enabled", chosen)
    yield one("host.memory.transparent_hugepages", "1", "Which memory gets huge pages unasked", mode)


def errors(files: Files) -> Iterable[Family]:
    """What the memory controllers counted since their driver was loaded."""
    found = files.names(_CONTROLLERS, r"mc\d+", "no EDAC driver has a memory controller")
    for name, file, text in (
        ("corrected", "ce_count", "Memory errors that ECC corrected"),
        ("uncorrected", "ue_count", "Memory errors that ECC could not correct"),
    ):
        family = Family(name=f"host.memory.ecc_{name}", unit="1", help=text, counter=True)
        yield over(family, "mc", found, partial(_counted, files, file=file))


def modules(files: Files) -> Iterable[Family]:
    """The same by memory module, as far as the controller can tell them apart."""
    families = {
        "dimm_ce_count": Family(
            name="host.dimm.corrected", unit="1", help="Memory errors that ECC corrected, by module", counter=True
        ),
        "dimm_ue_count": Family(
            name="host.dimm.uncorrected", unit="1", help="Memory errors beyond ECC, by module", counter=True
        ),
        "dimm_label": Family(name="host.dimm.label", unit="1", help="Where the module sits"),
    }
    controllers = files.names(_CONTROLLERS, r"mc\d+", "no EDAC driver has a memory controller")
    found = [] if isinstance(controllers, Absent) else controllers
    places = [(mc, dimm) for mc in found for dimm in _modules_of(files, mc)]
    none = Absent(status="unsupported", reason="no EDAC driver tells its memory modules apart")
    for file, family in families.items():
        for mc, dimm in places:
            path = f"{_CONTROLLERS}/{mc}/{dimm}/{file}"
            value = files.text(path) if file == "dimm_label" else files.read(path, int)
            family.add({"mc": mc, "dimm": dimm}, value)
        if not places:
            family.add(HOST, controllers if isinstance(controllers, Absent) else none)
    return families.values()


def nodes(files: Files) -> Iterable[Family]:
    """Memory of each NUMA node. A node without any is one too: GPUs with coherent memory bring such."""
    found = files.names(_NODES, r"node\d+", "this kernel knows no NUMA nodes")
    value = found if isinstance(found, Absent) else len(found)
    yield one("host.numa.count", "1", "NUMA nodes", value)
    numbers = found if isinstance(found, Absent) else [name.removeprefix("node") for name in found]
    for key, name in (("MemTotal", "total"), ("MemFree", "free")):
        family = Family(name=f"host.numa.memory_{name}", unit="B", help=f"{key} of the NUMA node")
        yield over(family, "numa", numbers, partial(_of_node, files, key=key))
    for name, path, text in (
        ("balancing", "proc/sys/kernel/numa_balancing", "Whether the kernel moves memory between nodes; 0: no"),
        ("zone_reclaim", "proc/sys/vm/zone_reclaim_mode", "Whether a full node reclaims before it borrows; 0: no"),
    ):
        yield one(f"host.numa.{name}", "1", text, files.read(path, int))


def _modules_of(files: Files, mc: str) -> list[str]:
    found = files.names(f"{_CONTROLLERS}/{mc}", r"(dimm|rank)\d+", "none")
    return [] if isinstance(found, Absent) else found


def _swap_used(text: str) -> int:
    return field(text, "SwapTotal") - field(text, "SwapFree")


def _counted(files: Files, mc: str, file: str) -> int | Absent:
    return files.read(f"{_CONTROLLERS}/{mc}/{file}", int)


def _of_node(files: Files, node: str, key: str) -> int | Absent:
    return files.read(f"{_NODES}/node{node}/meminfo", partial(field, key=key))
