"""Paths and functions for /sys and /proc that several collectors use: PCI addresses, NUMA nodes, numbers."""

from __future__ import annotations

from collectors.base import Absent, Value
from collectors.files import Files

PCI_DEVICES = "sys/bus/pci/devices"
DRIVER_GPUS = "proc/driver/nvidia/gpus"
"""Directory of NVIDIA's driver with a directory for each of its GPUs."""


def pci_address(files: Files, path: str) -> Value | Absent:
    """Return the address of the last PCI device in the target of a symbolic link of /sys (`…/0000:19:00.0/net/eth0`)."""
    try:
        addresses = pci_addresses(files.target(path))
    except OSError as error:
        return Absent.error(f"/{path}: {error.strerror}")
    return addresses[-1] if addresses else Absent.unsupported("not on a PCI bus")


def pci_addresses(target: str) -> list[str]:
    """Return the PCI addresses in a path of /sys/devices, the one nearest to the root of the bus first."""
    return [part for part in target.split("/") if part.count(":") == 2 and "." in part]


def parse_natural(text: str) -> int:
    """Return the text as a number. Raises ValueError if it is not a whole number, or is negative."""
    number = int(text)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def parse_numa_node(text: str) -> Value | Absent:
    """Return the NUMA node of a device; `unsupported` for -1, which the kernel writes if the firmware reports no node.

    Raises ValueError if the text is not a whole number.
    """
    number = int(text)
    return number if number >= 0 else Absent.unsupported("the firmware reports no NUMA node")
