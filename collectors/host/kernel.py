"""The kernel, its modules and options, the limits it sets, and what it has been through since boot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from collectors.base import Absent, Family
from collectors.host.files import Files, one
from collectors.host.parsing import (
    command_line,
    event,
    interrupts,
    iommu_options,
    part_of_firmware,
    process,
    soft_limit,
    stalled,
)  # fmt: skip

MODULES = {
    "nouveau": ("nouveau",),
    "nvidia": ("nvidia",),
    "peermem": ("nvidia_peermem", "nv_peer_mem"),
    "gdrdrv": ("gdrdrv",),
}
"""What is asked for -> the names it has had."""
_TAINTS = {
    "machine_check": (4, "A processor reported a machine check since boot"),
    "bad_page": (5, "The kernel met a bad page since boot"),
    "oops": (7, "The kernel died and went on since boot"),
    "soft_lockup": (14, "A processor was stuck in the kernel since boot"),
}
_FIRMWARE = {
    "host.system.vendor": ("sys_vendor", "Maker of the host"),
    "host.system.product": ("product_name", "The host's model"),
    "host.system.serial": ("product_serial", "The host's serial number; root alone may read it"),
    "host.bios.version": ("bios_version", "Version of the host's firmware"),
}
DAEMON = "nvidia-persistenced"[:15]
"""The kernel keeps 15 characters of a program's name."""


def health(files: Files) -> Iterable[Family]:
    """What happened since boot, and how much waits now."""
    tainted = files.read("proc/sys/kernel/tainted", int)
    yield one("host.kernel.tainted", "1", "Taint flags of the kernel", tainted)
    for name, (bit, text) in _TAINTS.items():
        flag = tainted if isinstance(tainted, Absent) else bool(tainted >> bit & 1)
        yield one(f"host.kernel.{name}", "1", text, flag)
    kills = files.read("proc/vmstat", lambda text: event(text, "oom_kill"))
    yield one("host.oom_kills", "1", "Processes that the kernel killed for want of memory", kills, counter=True)
    for kind in ("cpu", "memory", "io"):
        value = files.read(f"proc/pressure/{kind}", stalled)
        yield one(f"host.pressure.{kind}", "ratio", f"Share of 10 s in which some task waited for {kind}", value)


def modules(files: Files) -> Iterable[Family]:
    """Whether modules are loaded, or built in."""
    seen = files.exists("sys/module")
    for name, spellings in MODULES.items():
        value = any(files.exists(f"sys/module/{spelling}") for spelling in spellings)
        absent = Absent(status="error", reason="no /sys/module")
        yield one(f"host.module.{name}", "1", f"{spellings[0]} is loaded", value if seen else absent)


def options(files: Files) -> Iterable[Family]:
    """What the kernel was told at boot, and the limits of this process."""
    told = files.read("proc/cmdline", command_line)
    yield one("host.kernel.command_line", "1", "Kernel options, without those of this host alone", told)
    yield one("host.iommu.options", "1", "IOMMU options of the kernel", files.read("proc/cmdline", iommu_options))
    threads = files.read("sys/devices/system/cpu/smt/active", lambda text: bool(int(text)))
    yield one("host.cpu.smt", "1", "Cores run several threads", threads)
    for name, title, unit in (("memlock", "Max locked memory", "B"), ("nofile", "Max open files", "1")):
        limit = files.read("proc/self/limits", partial(soft_limit, name=title))
        free = limit if isinstance(limit, Absent) else limit is None
        yield one(f"host.ulimit.{name}_unlimited", "1", f"{title}: there is no limit for this process", free)
        value = Absent(status="unsupported", reason="unlimited") if limit is None else limit
        yield one(f"host.ulimit.{name}", unit, f"{title} of this process", value)


def firmware(files: Files) -> Iterable[Family]:
    """What the firmware's tables say of the host, and how often its processors reported machine checks."""
    for name, (file, text) in _FIRMWARE.items():
        yield one(name, "1", text, files.read(f"sys/class/dmi/id/{file}", part_of_firmware))
    checks = files.read("proc/interrupts", partial(interrupts, name="MCE"))
    yield one("host.machine_checks", "1", "Machine check exceptions, all processors together", checks, counter=True)


def processes(files: Files) -> Iterable[Family]:
    """How many processes there are, hang or are dead, and whether the NVIDIA persistence daemon is among them."""
    found = files.names("proc", r"\d+", "no processes are seen")
    seen = found if isinstance(found, Absent) else list(_processes(files, found))
    for name, state, text in (
        ("count", "", "Processes"),
        ("zombie", "Z", "Processes that ended and that nobody asked for"),
        ("uninterruptible", "D", "Processes that wait for a device"),
    ):
        value = seen if isinstance(seen, Absent) else sum(state in ("", its) for _, its in seen)
        yield one(f"host.process.{name}", "1", text, value)
    runs = seen if isinstance(seen, Absent) else any(name == DAEMON for name, _ in seen)
    if not files.exists("proc/driver/nvidia"):
        runs = Absent(status="unsupported", reason="no NVIDIA driver is loaded")
    yield one("host.persistence_daemon", "1", "The NVIDIA persistence daemon runs", runs)


def _processes(files: Files, numbers: list[str]) -> Iterator[tuple[str, str]]:
    for number in numbers:
        seen = files.read(f"proc/{number}/stat", process)
        if not isinstance(seen, Absent):  # else it has ended meanwhile
            yield seen
