"""Whether the host is a virtual machine."""

from __future__ import annotations

import re

from collectors.base import Absent, Value
from collectors.files import Files, MissingError, nonempty

FIRST_PROCESSOR_BYTES = 8192
"""Bytes of /proc/cpuinfo to read: enough for the first processor. On a large host the whole file is a megabyte."""
_PRODUCTS = ("KVM", "Virtual Machine", "VMware", "Google Compute Engine", "QEMU")
"""Texts that the DMI product names of virtual machines contain."""


def is_virtual(files: Files) -> Value | Absent:
    """Return whether this is a virtual machine: whether the processor has the flag `hypervisor`.

    Some architectures have no processor flags. There, the result is True if the DMI product name is that of a virtual machine, or
    if /sys/hypervisor/type exists. Otherwise it is `unsupported`.
    """
    flag = files.required("proc/cpuinfo", has_hypervisor_flag, max_bytes=FIRST_PROCESSOR_BYTES)
    if not isinstance(flag, Absent) or flag.status == "error":
        return flag
    product = files.read("sys/class/dmi/id/product_name", nonempty)
    is_known = isinstance(product, str) and any(part in product for part in _PRODUCTS)
    return True if is_known or files.exists("sys/hypervisor/type") else flag


def has_hypervisor_flag(text: str) -> bool:
    """Return whether the first processor in /proc/cpuinfo has the flag `hypervisor`. Raises MissingError if it has no flags."""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if not flags:
        raise MissingError("this architecture reports no processor flags")
    return "hypervisor" in flags.group(1).split()
