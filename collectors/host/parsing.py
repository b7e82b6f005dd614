"""Parsers for single files of /proc and /sys. Pure functions."""

from __future__ import annotations

import os
import re

from collectors.files import MissingError

_HOST_SPECIFIC = re.compile(
    r"(BOOT_IMAGE|BOOTIF|initrd|root|resume|ip|hostname|rd\.(lvm|luks|md)\..*|.*(uuid|machine_id|pass|secret|token|key).*)=",
    re.IGNORECASE,
)
_PLACEHOLDER = re.compile(
    r"to be filled by o\.e\.m\.?|default string|not (specified|available|applicable)|none|n/?a|system serial number|"
    r"[0.\-x ]+|0?123456789",
    re.IGNORECASE,
)


def cpu_model(text: str) -> str:
    """Return the processor's name in /proc/cpuinfo, or the implementer code if it lists no name, as on Arm. Raises ValueError."""
    match = re.search(r"^(?:model name|CPU implementer|Processor)\s*:\s*(.+)$", text, re.MULTILINE)
    if not match:
        raise ValueError("no processor model")
    return match.group(1).strip()


def length_of_cpu_list(text: str) -> int:
    """Return the number of processors in a list such as `0-47,96-143`; 0 if it is empty. Raises ValueError."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)


def cpu_clocks(text: str) -> list[float]:
    """Return the clock of each processor in Hz, from /proc/cpuinfo. Raises MissingError if the architecture lists no clocks."""
    clocks = [float(clock) * 1e6 for clock in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", text, re.MULTILINE)]
    if not clocks:
        raise MissingError("this architecture reports no clock")
    return clocks


def load_average(text: str) -> float:
    """Return the one-minute load average in /proc/loadavg."""
    return float(text.split()[0])


def meminfo(text: str, key: str) -> int:
    """Return the value of one line of /proc/meminfo, in bytes. Raises ValueError if the line is missing."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", text, re.MULTILINE)
    if not match:
        raise ValueError(f"no {key}")
    return int(match.group(1)) * 1024


def optional_meminfo(text: str, key: str) -> int:
    """Return the value of an optional line of /proc/meminfo or of a NUMA node's `meminfo`.

    The value is in bytes, or a count if the line has no unit. Raises MissingError if the line is missing.
    """
    match = re.search(rf"^(?:Node \d+ )?{key}:\s+(\d+)( kB)?$", text, re.MULTILINE)
    if not match:
        raise MissingError(f"no {key}")
    return int(match.group(1)) * (1024 if match.group(2) else 1)


def vmstat(text: str, key: str) -> int:
    """Return one counter of /proc/vmstat. Raises MissingError if it is not listed."""
    match = re.search(rf"^{key} (\d+)$", text, re.MULTILINE)
    if not match:
        raise MissingError(f"no {key}")
    return int(match.group(1))


def bracketed_choice(text: str) -> str:
    """Return the choice in brackets: `madvise` for `always [madvise] never`. Raises ValueError if there is none."""
    match = re.search(r"\[(\S+)\]", text)
    if not match:
        raise ValueError(f"no choice in brackets: {text!r}")
    return match.group(1)


def processor_time(text: str, columns: tuple[int, ...]) -> float:
    """Return the sum of these columns of the first line of /proc/stat, divided by the number of processors, in seconds.

    Column 1 is the first number: see proc(5). Raises MissingError if the kernel does not count one of the columns.
    """
    words = text.partition("\n")[0].split()
    processors = len(re.findall(r"^cpu\d+ ", text, re.MULTILINE))
    if len(words) <= max(columns) or not processors:
        raise MissingError("no such column, or no processors")
    return sum(int(words[column]) for column in columns) / os.sysconf("SC_CLK_TCK") / processors


def soft_limit(text: str, name: str) -> int | None:
    """Return a soft limit in /proc/self/limits; None if it is unlimited. Raises MissingError if it is not listed."""
    match = re.search(rf"^{name}\s+(\d+|unlimited)\s", text, re.MULTILINE)
    if not match:
        raise MissingError(f"no {name}")
    return None if match.group(1) == "unlimited" else int(match.group(1))


def stalled_share(text: str) -> float:
    """Return the share of the last 10 s in which some task waited, from a file of /proc/pressure. Raises ValueError."""
    match = re.search(r"^some avg10=([\d.]+)", text, re.MULTILINE)
    if not match:
        raise ValueError("no line 'some'")
    return float(match.group(1)) / 100


def interrupts(text: str, name: str) -> int:
    """Return the number of interrupts in one line of /proc/interrupts, of all processors together. Raises MissingError."""
    match = re.search(rf"^\s*{name}:((?:\s+\d+)+)", text, re.MULTILINE)
    if not match:
        raise MissingError(f"no {name}")
    return sum(map(int, match.group(1).split()))


def shared_options(text: str) -> str:
    """Return the kernel's command line, without the options that differ between hosts by design or that may be secrets.

    An option with `pass`, `key` or the like in its name counts as a secret, even a harmless one such as `iommu.passthrough`.
    """
    kernel_options = text.split(" -- ")[0]  # the rest is for the init process
    return " ".join(option for option in kernel_options.split() if not _HOST_SPECIFIC.match(option))


def iommu_options(text: str) -> str:
    """Return the IOMMU options in the kernel's command line; the text `default` if it has none."""
    options = [
        option for option in text.split() if re.match(r"(iommu|intel_iommu|amd_iommu|arm-smmu[\w-]*)[.=]", option)
    ]
    return " ".join(options) or "default"


def firmware_text(text: str) -> str:
    """Return an entry of the firmware tables. Raises MissingError if it is empty or a placeholder, such as `Default string`."""
    if _PLACEHOLDER.fullmatch(text.strip()) or not text.strip():
        raise MissingError(f"placeholder in the firmware: {text.strip()!r}")
    return text.strip()


def process_state(text: str) -> tuple[str, str]:
    """Return name and state in /proc/PID/stat. The name is in parentheses and may itself contain parentheses."""
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()[0]
