"""Entries of an event log in which a BMC reports the load of its own processor, memory or storage.

The firmware of NVIDIA's BMCs writes them (github.com/NVIDIA/phosphor-health-monitor), for example
`ProcessCPU_pldmd sensor crossed a warning high threshold`. They are no fault of the host:

- The load of the processor, whatever its severity: reading a BMC causes it. An entry is critical as soon as the process that
  answers Redfish requests takes 20 % of the time.
- A warning about memory or storage.

A critical entry about memory or storage is not one of them: a BMC without memory or storage can restart or lose log entries, so
that faults of the host are not reported. Neither are entries about the wear of the BMC's flash memory (`EMMC_Lifetime`).
"""

from __future__ import annotations

import re

from fleet.bmc.client import Resource
from fleet.bmc.health import CRITICAL

_RESOURCE_MESSAGE = "BMCSystemResourceInfo"
"""Message about the processes of the BMC that use most of a resource. Its first argument is the resource."""
_THRESHOLD_MESSAGE = "SensorThreshold"
"""Prefix of the names of messages about sensors. Their first argument is the sensor."""
_OF_A_MANAGER = re.compile(r"/redfish/v1/Managers/")
"""Path of an entry in the log of a manager. Elsewhere, a sensor `CPU` or `Memory` may be one of the host."""
_PROCESSOR = re.compile(r"CPU(?:_User|_Kernel)?|ProcessCPU_\w+")
_SPACE = re.compile(r"Memory(?:_Available|_Free|_Shared|_Buffered_And_Cached)?|ProcessMemory_\w+|Storage(?:_[A-Z]+)?")


def is_own_load(entry: Resource, severity: str | None) -> bool:
    """Return whether an entry reports a load of the BMC itself that is no fault of the host. `severity`: that of the entry."""
    message, arguments = str(entry.get("MessageId") or "").rpartition(".")[2], entry.get("MessageArgs")
    is_of_manager = bool(_OF_A_MANAGER.match(str(entry.get("@odata.id") or "")))
    if message != _RESOURCE_MESSAGE and not (is_of_manager and message.startswith(_THRESHOLD_MESSAGE)):
        return False
    resource = str(arguments[0]).strip() if isinstance(arguments, list) and arguments else ""
    return bool(_PROCESSOR.fullmatch(resource) or (severity != CRITICAL and _SPACE.fullmatch(resource)))
