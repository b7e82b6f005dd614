"""The kernel: modules, options, limits, processes, and problems since boot. Also the host's identity in the firmware tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from collectors.base import Absent, Family, host_family
from collectors.files import Files, nonempty
from collectors.host.parsing import (
    firmware_text,
    interrupts,
    iommu_options,
    process_state,
    processor_time,
    shared_options,
    soft_limit,
    stalled_share,
    vmstat,
)

MODULES = {
    "nouveau": ("nouveau",),
    "nvidia": ("nvidia",),
    "peermem": ("nvidia_peermem", "nv_peer_mem"),
    "gdrdrv": ("gdrdrv",),
}
"""Last part of the reading's name -> current name of the kernel module, and former names."""
_TAINTS = {
    "machine_check": (4, "A processor has reported a machine check since boot"),
    "bad_page": (5, "The kernel has found a bad page since boot"),
    "oops": (7, "The kernel has had an oops since boot"),
    "soft_lockup": (14, "A processor has had a soft lockup since boot"),
}
_FIRMWARE = {
    "host.system.vendor": ("sys_vendor", "Manufacturer of the host"),
    "host.system.product": ("product_name", "Product name of the host"),
    "host.system.serial": ("product_serial", "Serial number of the host; readable by root only"),
    "host.bios.version": ("bios_version", "Version of the host's firmware"),
}
_PROCESSOR_TIMES = {
    "busy": (
        (1, 2, 3, 6, 7),
        "Time since boot for which a processor ran programs or the kernel, mean of all processors",
    ),
    "stolen": (
        (8,),
        "Time since boot for which a processor had work, but the hypervisor ran something else, mean of all processors",
    ),
}
"""Last part of the reading's name -> columns of /proc/stat, and help text."""
PERSISTENCE_DAEMON = "nvidia-persistenced"[:15]
"""The kernel truncates program names to 15 characters."""


def health(files: Files) -> Iterable[Family]:
    """Yield the kernel's taint flags, the processes killed for lack of memory, and the pressure (time that tasks wait)."""
    tainted = files.read("proc/sys/kernel/tainted", int)
    yield host_family("host.kernel.tainted", "1", "Taint flags of the kernel", tainted, varies=True)
    for name, (bit, text) in _TAINTS.items():
        flag = tainted if isinstance(tainted, Absent) else bool(tainted >> bit & 1)
        yield host_family(f"host.kernel.{name}", "1", text, flag, varies=True)
    kills = files.read("proc/vmstat", partial(vmstat, key="oom_kill"))
    yield host_family("host.oom_kills", "1", "Processes killed by the out-of-memory killer", kills, counter=True)
    for name, (columns, text) in _PROCESSOR_TIMES.items():
        seconds = files.read("proc/stat", partial(processor_time, columns=columns))
        # No counter: after the migration of a virtual machine, or if processors are added, the time may be less than before.
        yield host_family(f"host.cpu.{name}", "s", text, seconds, varies=True)
    for kind in ("cpu", "memory", "io"):
        share = files.read(f"proc/pressure/{kind}", stalled_share)
        text = f"Share of the last 10 s in which some task waited for {kind}"
        yield host_family(f"host.pressure.{kind}", "ratio", text, share, varies=True)


def modules(files: Files) -> Iterable[Family]:
    """Yield whether each of MODULES is loaded or built in."""
    unknown = None if files.exists("sys/module") else Absent.error("no /sys/module")
    for name, spellings in MODULES.items():
        is_loaded = any(files.exists(f"sys/module/{spelling}") for spelling in spellings)
        yield host_family(f"host.module.{name}", "1", f"{spellings[0]} is loaded", unknown or is_loaded)


def options(files: Files) -> Iterable[Family]:
    """Yield the kernel's command line, its IOMMU options, whether SMT is on, and the limits of this process."""
    command_line = files.read("proc/cmdline", shared_options)
    yield host_family(
        "host.kernel.command_line", "1", "Kernel command line without host-specific options", command_line
    )
    iommu = files.read("proc/cmdline", iommu_options)
    yield host_family("host.iommu.options", "1", "IOMMU options of the kernel", iommu)
    is_smt_on = files.read("sys/devices/system/cpu/smt/active", lambda text: bool(int(text)))
    yield host_family("host.cpu.smt", "1", "SMT (hyper-threading) is on", is_smt_on)
    for name, title, unit in (("memlock", "Max locked memory", "B"), ("nofile", "Max open files", "1")):
        limit = files.read("proc/self/limits", partial(soft_limit, name=title))
        is_unlimited = limit if isinstance(limit, Absent) else limit is None
        # The limits vary, because this process may be started in an SSH session, by a service or in a job.
        text = f"{title}: unlimited for this process"
        yield host_family(f"host.ulimit.{name}_unlimited", "1", text, is_unlimited, varies=True)
        value = Absent.unsupported("unlimited") if limit is None else limit
        yield host_family(f"host.ulimit.{name}", unit, f"{title} of this process", value, varies=True)


def boot(files: Files) -> Iterable[Family]:
    """Yield the ID of this boot. The judge treats hosts with the same ID as one machine."""
    identity = files.read("proc/sys/kernel/random/boot_id", nonempty)
    text = (
        "Random ID of this boot, usually the same for containers of one machine and different for its virtual machines"
    )
    yield host_family("host.boot_id", "1", text, identity, varies=True)


def firmware(files: Files) -> Iterable[Family]:
    """Yield the host's identity in the firmware tables, and the number of machine check exceptions."""
    for name, (file, text) in _FIRMWARE.items():
        yield host_family(name, "1", text, files.read(f"sys/class/dmi/id/{file}", firmware_text))
    checks = files.read("proc/interrupts", partial(interrupts, name="MCE"))
    yield host_family("host.machine_checks", "1", "Machine check exceptions of all processors", checks, counter=True)


def processes(files: Files) -> Iterable[Family]:
    """Yield the numbers of processes, zombies and processes that wait for a device, and whether the persistence daemon runs."""
    pids = files.matching("proc", r"\d+", "no processes are visible")
    states = pids if isinstance(pids, Absent) else list(_process_states(files, pids))
    for name, state, text in (
        ("count", "", "Processes"),
        ("zombie", "Z", "Zombie processes"),
        ("uninterruptible", "D", "Processes in uninterruptible sleep (waiting for a device)"),
    ):
        count = states if isinstance(states, Absent) else sum(state in ("", current) for _, current in states)
        yield host_family(f"host.process.{name}", "1", text, count, varies=True)
    runs = states if isinstance(states, Absent) else any(name == PERSISTENCE_DAEMON for name, _ in states)
    if not files.exists("proc/driver/nvidia"):
        runs = Absent.unsupported("no NVIDIA driver is loaded")
    yield host_family("host.persistence_daemon", "1", "The NVIDIA persistence daemon runs", runs, varies=True)


def _process_states(files: Files, pids: list[str]) -> Iterator[tuple[str, str]]:
    for pid in pids:
        state = files.read(f"proc/{pid}/stat", process_state)
        if not isinstance(state, Absent):  # otherwise the process has exited in the meantime
            yield state
