"""What single files of /proc and /sys say. Pure functions."""

from __future__ import annotations

import re

from collectors.host.files import MissingError

_THIS_HOST_ONLY = re.compile(
    r"(BOOT_IMAGE|BOOTIF|initrd|root|resume|ip|hostname|rd\.(lvm|luks|md)\..*|.*(uuid|machine_id|pass|secret|token|key).*)=",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"to be filled by o\.e\.m\.?|default string|not (specified|available|applicable)|none|n/?a|system serial number|"
    r"[0.\-x ]+|0?123456789",
    re.IGNORECASE,
)


def cpu_model(text: str) -> str:
    """The processor's name out of /proc/cpuinfo. Raises ValueError where it gives none."""
    found = re.search(r"^(?:model name|CPU implementer|Processor)\s*:\s*(.+)$", text, re.MULTILINE)
    if not found:
        raise ValueError("no processor model")
    return found.group(1).strip()


def cpu_clocks(text: str) -> list[float]:
    """The clock of each processor in Hz out of /proc/cpuinfo. Raises MissingError where the architecture has none there."""
    clocks = [float(clock) * 1e6 for clock in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE)]
    if not clocks:
        raise MissingError("this architecture does not tell the clock")
    return clocks


def hypervisor(text: str) -> bool:
    """Whether /proc/cpuinfo says that a hypervisor runs this kernel. Raises MissingError where it has no flags."""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if not flags:
        raise MissingError("this architecture does not tell")
    return "hypervisor" in flags.group(1).split()


def load_average(text: str) -> float:
    """The one-minute figure out of /proc/loadavg."""
    return float(text.split()[0])


def memory(text: str, key: str) -> int:
    """One line of /proc/meminfo, in bytes. Raises ValueError where it is not there."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    if not found:
        raise ValueError(f"no {key}")
    return int(found.group(1)) * 1024


def field(text: str, key: str) -> int:
    """One line of a meminfo that not every kernel writes: bytes, or a count. Raises MissingError where it is not there."""
    found = re.search(rf"^(?:Node \d+ )?{key}:\s+(\d+)( kB)?$", text, re.MULTILINE)
    if not found:
        raise MissingError(f"no {key}")
    return int(found.group(1)) * (1024 if found.group(2) else 1)


def event(text: str, key: str) -> int:
    """One counter of /proc/vmstat. Raises MissingError where it is not there."""
    found = re.search(rf"^{key} (\d+)$", text, re.MULTILINE)
    if not found:
        raise MissingError(f"no {key}")
    return int(found.group(1))


def chosen(text: str) -> str:
    """`madvise` out of `always [madvise] never`."""
    found = re.search(r"\[(\S+)\]", text)
    if not found:
        raise ValueError(f"nothing is chosen in {text.strip()!r}")
    return found.group(1)


def soft_limit(text: str, name: str) -> int | None:
    """A limit out of /proc/self/limits; None where it is unlimited. Raises MissingError where it is not there."""
    found = re.search(rf"^{name}\s+(\d+|unlimited)\s", text, re.MULTILINE)
    if not found:
        raise MissingError(f"no {name}")
    return None if found.group(1) == "unlimited" else int(found.group(1))


def stalled(text: str) -> float:
    """The share of the last 10 s in which some task waited, out of a file of /proc/pressure."""
    found = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    if not found:
        raise ValueError("no line of some")
    return float(found.group(1)) / 100


def interrupts(text: str, name: str) -> int:
    """One line of /proc/interrupts, all processors together. Raises MissingError where it is not there."""
    found = re.search(rf"^\s*{name}:((?:\s+\d+)+)", text, re.MULTILINE)
    if not found:
        raise MissingError(f"no {name}")
    return sum(map(int, found.group(1).split()))


def command_line(text: str) -> str:
    """The kernel's options without those that name this one host, or that might be secret: what hosts may share."""
    kernels = text.split(" -- ")[0]  # what follows is for the first process
    return " ".join(option for option in kernels.split() if not _THIS_HOST_ONLY.match(option))


def iommu_options(text: str) -> str:
    """What the kernel's command line says of the IOMMU; `default` where that is nothing."""
    told = [option for option in text.split() if re.match(r"(iommu|intel_iommu|amd_iommu|arm-smmu[\w-]*)[.=]", option)]
    return " ".join(told) or "default"


def part_of_firmware(text: str) -> str:
    """A name that the firmware's tables give. Raises MissingError where the maker never filled it in."""
    if _PLACEHOLDER.fullmatch(text.strip()) or not text.strip():
        raise MissingError(f"the firmware says {text.strip()!r}")
    return text.strip()


def process(text: str) -> tuple[str, str]:
    """(name, state) out of a process's `stat`: the name stands in brackets and may itself have some."""
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()[0]
