"""The models of the parts of a host that have firmware, as the BMC reports them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from fleet.bmc.client import RedfishSession, Resource
from fleet.bmc.target import BmcError, clean_text

_OF_THE_SYSTEM = re.compile(r"bmc|bios|uefi|erot", re.IGNORECASE)
"""Matches names of firmware whose version must be the same on all hosts, whichever board it runs on."""
_POWER_SUPPLY = re.compile(r"psu|power.?suppl", re.IGNORECASE)
_FIRMWARE_WORD = re.compile(r"(?<![a-z])(?:fw|inforom)_", re.IGNORECASE)
"""Words in names of NVIDIA's firmware that the name of the part lacks: the part `HGX_GPU_SXM_1` has the firmware
`HGX_FW_GPU_SXM_1`."""
_OF_A_PART = re.compile(r"/redfish/v1/(?:Chassis/.|.*/(?:Processors|NetworkAdapters|PCIeDevices)/)")
"""Path of a resource that may describe a part with firmware."""
_NUMBER = re.compile(r"\d+")
_MAX_RELATED = 4
"""Maximum number of resources that are read to find the part of one firmware."""


class Parts:
    """The models of the parts of one host. Add chassis, processors and power supplies before the first call of `model_of`."""

    def __init__(self, session: RedfishSession) -> None:
        self._session = session
        self._by_path: dict[str, str] = {}
        self._by_name: dict[str, str] = {}
        self._power_supplies: dict[int, set[str]] = {}

    def add(self, part: Resource) -> None:
        """Add a chassis or a processor."""
        model = _model(part)
        self._by_path[str(part.get("@odata.id"))] = self._by_name[str(part.get("Id"))] = model

    def add_power_supplies(self, supplies: Iterable[Resource]) -> None:
        """Add the power supplies of a chassis, in the order in which the BMC lists them."""
        for position, supply in enumerate(supplies, 1):
            number = _last_number(supply.get("Name"), supply.get("Id"))
            self._power_supplies.setdefault(position if number is None else number, set()).add(_model(supply))

    def model_of(self, firmware: Resource, component: str) -> str:
        """Return the model of the part that has this firmware, as `_model` returns it; empty if it is not known.

        Args:
            firmware: the entry of the firmware inventory.
            component: the name of the firmware.
        """
        if _OF_THE_SYSTEM.search(component):
            return ""
        if _POWER_SUPPLY.search(component):
            return self._model_of_power_supply(component)
        related = firmware.get("RelatedItem")
        for link in related[:_MAX_RELATED] if isinstance(related, list) else ():
            if model := self._model_at(link.get("@odata.id") if isinstance(link, dict) else None):
                return model
        name = _FIRMWARE_WORD.sub("", component)
        return self._by_name.get(name) or self._by_name.get(name.partition("_")[2], "")

    def _model_of_power_supply(self, component: str) -> str:
        """Return the model of the power supply whose number is the last one in the name of its firmware: 2 for `PSU.Slot.2`.

        Empty if there is no such power supply, or several with different models.
        """
        models = self._power_supplies.get(number, set()) if (number := _last_number(component)) is not None else set()
        return next(iter(models)) if len(models) == 1 else ""

    def _model_at(self, path: object) -> str:
        """Return the model of the part at a path; empty if it is no path of a part, or the BMC cannot return the resource."""
        if not isinstance(path, str) or not _OF_A_PART.match(path):
            return ""
        if path not in self._by_path:
            part = None
            with contextlib.suppress(BmcError):
                part = self._session.get(path)
            self._by_path[path] = _model(part or {})
        return self._by_path[path]


def _model(part: Resource) -> str:
    """Return manufacturer, model and part number of a part. If it has neither model nor part number, the SKU replaces them.

    Return an empty text if it has no model, part number or SKU.

    The SKU of a retimer on an HGX board names its vendor. If there is a model or part number, the SKU is not used: on a
    Dell chassis it is the serial.
    """
    maker, *words = (clean_text(part.get(key) or "", 60) for key in ("Manufacturer", "Model", "PartNumber"))
    known = list(filter(None, words)) or list(filter(None, [clean_text(part.get("SKU") or "", 60)]))
    return " ".join(dict.fromkeys([maker, *known] if maker else known)) if known else ""


def _last_number(*texts: object) -> int | None:
    """Return the last number in the first text that has one."""
    found = next((numbers for text in texts if (numbers := _NUMBER.findall(str(text or "")))), None)
    return int(found[-1][:9]) if found else None
