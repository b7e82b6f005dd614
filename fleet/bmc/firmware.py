"""Read the firmware inventory of a BMC."""

from __future__ import annotations

import re

from fleet.bmc.client import RedfishSession, Resource
from fleet.bmc.health import is_there
from fleet.bmc.parts import Parts
from fleet.bmc.readings import Readings
from fleet.bmc.target import clean_text, label

_NOT_A_VERSION = frozenset({"", "not present", "n/a", "na", "none", "unknown", "null"})
_SPARE_IMAGE = re.compile(
    r"^(available|previous|pending|staged|staging)|backup|standby|redundant|rollback|recovery|golden", re.IGNORECASE
)
"""Names of firmware images that are stored but do not run. Their versions depend on earlier updates and differ among hosts."""
_DRIVE = re.compile(r"disk|drive(?!r)|nvme|ssd|hdd", re.IGNORECASE)
"""Names of firmware of drives, which is not read: hosts of one purchase order may have drives of several vendors."""
_NO_PART = (
    "the BMC does not report the model of the part with this firmware, or the model does not matter: this firmware must be the "
    "same on all boards"
)


def read_firmware(session: RedfishSession, readings: Readings, root: Resource, parts: Parts) -> None:
    """Add the version of each firmware in the inventory, and the model of the part that has it."""
    inventory = session.linked(session.linked(root, "UpdateService"), "FirmwareInventory")
    for item in session.members(inventory):
        version = clean_text(item.get("Version") or "", 100)
        names = [clean_text(item.get(key) or "", 100) for key in ("Id", "Name", "Description")]
        component = _component(item, *names[:2])
        is_left_out = any(_SPARE_IMAGE.search(name) or _DRIVE.search(name) for name in names)
        if version.lower() not in _NOT_A_VERSION and is_there(item) and not is_left_out:
            # On Dell, the Id contains the version. Remove it, so that a component has the same name on all hosts.
            labels = (label(component.replace(f"-{version}", "")),)
            readings.add("bmc.firmware.version", labels, version)
            if model := parts.model_of(item, component):
                readings.add("bmc.firmware.part", labels, model)
            else:
                readings.lack("bmc.firmware.part", labels, _NO_PART)


def _component(item: Resource, id: str, name: str) -> str:
    """Return the name of a component with firmware. The name of a component must be the same on all hosts.

    On HPE, the Id is a number that depends on the parts of the host. Such an Id is replaced by the name of the firmware and the
    place of the part (`DeviceContext`).
    """
    if not id.isdecimal() or not name:
        return id or "component"
    oem = item.get("Oem")
    vendor = oem.get("Hpe") if isinstance(oem, dict) else None
    place = vendor.get("DeviceContext") if isinstance(vendor, dict) else None
    return clean_text(f"{name} {place or ''}".strip(), 100)
