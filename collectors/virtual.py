"""Whether the host is a virtual machine."""

from __future__ import annotations

import re

from collectors.base import Absent, Value
from collectors.files import Files, MissingError, nonempty

FIRST_PROCESSOR_BYTES = 8192
"""Bytes of /proc/cpuinfo to read: enough for the first processor. On a large host the whole file is a megabyte."""
_VIRTUAL = re.compile(
    r"\b(?:KVM|QEMU|VMware|VirtualBox|Xen\b|OpenStack|KubeVirt|Virtual Machine|Google Compute Engine|cloud[- ]hypervisor)",
    re.IGNORECASE,
)
"""Texts in the DMI product name, or in the DMI vendor, of virtual machines."""
_EC2, _EC2_METAL = "Amazon EC2", ".metal"
"""DMI vendor of all instances of Amazon EC2, and a text in the product names of those that are no virtual machines."""


def is_virtual(files: Files) -> Value | Absent:
    """Return whether this is a virtual machine: whether the processor has the flag `hypervisor`.

    Some architectures have no processor flags. There, the result is True if the DMI product name or vendor is that of a virtual
    machine, or if /sys/hypervisor/type exists. Otherwise it is `unsupported`.
    """
    flag = files.required("proc/cpuinfo", has_hypervisor_flag, max_bytes=FIRST_PROCESSOR_BYTES)
    if not isinstance(flag, Absent) or flag.status == "error":
        return flag
    read = (files.read(f"sys/class/dmi/id/{name}", nonempty) for name in ("product_name", "sys_vendor"))
    product, vendor = (text if isinstance(text, str) else "" for text in read)
    is_instance = _EC2 in vendor and product != "" and _EC2_METAL not in product
    is_known = is_instance or any(_VIRTUAL.search(text) for text in (product, vendor))
    return True if is_known or files.exists("sys/hypervisor/type") else flag


def has_hypervisor_flag(text: str) -> bool:
    """Return whether the first processor in /proc/cpuinfo has the flag `hypervisor`. Raises MissingError if it has no flags."""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    if not flags:
        raise MissingError("this architecture reports no processor flags")
    return "hypervisor" in flags.group(1).split()
