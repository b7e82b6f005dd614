"""The parts of a host that a serial, GUID or MAC address identifies.

They are GPUs, InfiniBand and RoCE adapters, network interfaces, and the modules or cables in network ports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fleet.judge.host_view import HostView
from fleet.judge.wiring.links import ADDRESSES, INTERFACE
from fleet.scope_text import describe_scope
from schemas.plans import GPU, MODULE, NIC
from schemas.records import ERROR, MEASURED, Observation
from schemas.scopes import Scope, pci_address

SERIAL, GUID, MAC = "gpu.serial", "infiniband.hca.node_guid", "network.address"
MODULE_SERIAL = "optics.module.serial"
"""Like SERIAL, GUID and MAC: a reading that identifies parts."""
LAYER = "infiniband.link_layer"
_IDENTIFIER = {GUID: "GUID", MAC: "MAC address"}


def identity(kind: str, serial: str) -> str:
    """Normalize the serial, GUID or MAC address of a part of this kind (GPU, MODULE or NIC) for comparison.

    Spreadsheets drop leading zeros of a serial, and GUIDs are written with or without colons, hyphens and `0x`.
    """
    if kind in (GPU, MODULE):
        return serial.strip().upper().lstrip("0")
    return serial.strip().lower().removeprefix("0x").translate(str.maketrans("", "", ":-. "))


@dataclass(frozen=True, kw_only=True)
class LocatedPart:
    """A part, and where it was found."""

    host: str
    name: str
    """Name of the reading that identifies the part: SERIAL, GUID, MAC or MODULE_SERIAL."""
    scope: str
    serial: str
    """The value of that reading: a serial, GUID or MAC address."""
    slots: frozenset[str]
    """All names by which a manifest (the operator's list of parts) may refer to the place of the part: GPU index, PCI address,
    adapter, interface or port."""

    ethernet: bool = False
    """Whether the part is an adapter that is not InfiniBand: its ports report a link layer, and none reports InfiniBand."""

    @property
    def location(self) -> str:
        """Return host and scope: `r12-h02 gpu=3`."""
        return f"{self.host} {self.scope}"


@dataclass(frozen=True, kw_only=True)
class UnreadPort:
    """A port whose module did not report its serial."""

    names: frozenset[str]
    reason: str
    is_error: bool
    """Whether reading the serial failed (status `error`). Otherwise there is nothing to read, for example no module."""


@dataclass(frozen=True, kw_only=True)
class HostInventory:
    """The parts of one host."""

    host: str
    parts: tuple[LocatedPart, ...]
    unknown: Mapping[str, str]
    """Name of a reading (`LocatedPart.name`) -> why the host may have parts with this reading that are not in `parts`.

    Empty if `parts` has all of them.

    For MODULE_SERIAL, ports without a serial are in `unread_ports` instead.
    """
    unread_ports: tuple[UnreadPort, ...] = ()

    def why_unknown(self, name: str, slot: str) -> str:
        """Return why a part that is not in `parts` may still be in the host; empty if it cannot be.

        Args:
            name: the reading that identifies the part (`LocatedPart.name`).
            slot: the slot in which the manifest lists the part; empty if the manifest lists it for the host without a slot.
        """
        if name != MODULE_SERIAL or self.unknown[name]:
            return self.unknown[name]
        unread = [port.reason for port in self.unread_ports if slot in port.names or not slot]
        is_known = not slot or unread or any(slot in part.slots for part in self.parts if part.name == name)
        return unread[0] if unread else "" if is_known else f"the host did not report the module at port {slot}"


def host_inventory(view: HostView) -> HostInventory:
    """Return the parts in a host's record."""
    unknown = {name: _unknown(name, view) for name in (SERIAL, GUID, MAC, MODULE_SERIAL)}
    parts = (*_located_parts(view), *_modules(view))
    return HostInventory(host=view.host.name, parts=parts, unknown=unknown, unread_ports=tuple(_unread_ports(view)))


def _located_parts(view: HostView) -> Iterator[LocatedPart]:
    """Yield the GPUs, adapters and interfaces of a host whose serial, GUID or MAC address was reported."""
    for gpu in view.evidence.gpus():
        if gpu.serial:
            address = {pci_address(gpu.pci_bus_id)} if gpu.pci_bus_id else set()
            slots = frozenset({str(gpu.index), *address})
            yield LocatedPart(
                host=view.host.name, name=SERIAL, scope=f"gpu={gpu.index}", serial=gpu.serial, slots=slots
            )
    for name in (GUID, MAC):
        addresses = _latest(view, f"{name.rpartition('.')[0]}.pci_address")
        for scope, latest in _latest(view, name).items():
            if latest.status == MEASURED and identity(NIC, str(latest.value)).strip("0"):
                slots = frozenset(Scope.parse(scope).labels.values())
                where = addresses.get(scope)
                known = frozenset({pci_address(str(where.value))} if where and where.status == MEASURED else ())
                yield LocatedPart(
                    host=view.host.name,
                    name=name,
                    scope=scope,
                    serial=str(latest.value),
                    slots=slots | known,
                    ethernet=name == GUID and _is_ethernet(view, scope),
                )


def _modules(view: HostView) -> Iterator[LocatedPart]:
    """Yield each module or cable whose serial was reported."""
    for scope, latest in _latest(view, MODULE_SERIAL).items():
        if latest.status == MEASURED and identity(MODULE, str(latest.value)):
            yield LocatedPart(
                host=view.host.name,
                name=MODULE_SERIAL,
                scope=scope,
                serial=str(latest.value),
                slots=_port_names(view, scope),
            )


def _unread_ports(view: HostView) -> Iterator[UnreadPort]:
    for scope, latest in _latest(view, MODULE_SERIAL).items():
        if latest.status != MEASURED:
            reason = f"{describe_scope(scope)} does not report its module ({latest.status}: {latest.reason})"
            yield UnreadPort(names=_port_names(view, scope), reason=reason, is_error=latest.status == ERROR)


def _port_names(view: HostView, scope: str) -> frozenset[str]:
    """Return the names by which a manifest may refer to a port: `mlx5_0/1` or its interface.

    The name or PCI address of the adapter alone refers to port 1.
    """
    parsed = Scope.parse(scope)
    number = parsed.get("port") or "1"
    addresses = {name: _latest(view, name) for name in ADDRESSES}
    known = [of_name[parsed.device] for of_name in addresses.values() if parsed.device in of_name]
    names = {pci_address(str(item.value)) for item in known if item.status == MEASURED and number == "1"}
    interface = _latest(view, INTERFACE).get(scope)
    names |= {str(interface.value)} if interface and interface.status == MEASURED else set()
    if hca := parsed.get("hca"):
        return frozenset({*names, f"{hca}/{number}", *([hca] if number == "1" else ())})
    return frozenset({*names, parsed.get("nic")})


def _latest(view: HostView, name: str) -> dict[str, Observation]:
    return {latest.scope: latest for latest in view.observations.get(name, ())}


def _unknown(name: str, view: HostView) -> str:
    """Return the value of `HostInventory.unknown` for the reading `name`."""
    if not view.has_record:
        return "the host left no record"
    if name == SERIAL:
        without_serial = _gpu_count(view) - sum(bool(gpu.serial) for gpu in view.evidence.gpus())
        subject = "1 GPU of the host does" if without_serial == 1 else f"{without_serial} GPUs of the host do"
        return f"{subject} not report a serial" if without_serial > 0 else ""
    latest = _latest(view, name)
    if name == MODULE_SERIAL:
        return (
            ""
            if latest
            else "the host did not report any module: ethtool or mlxlink is missing, or the host has no port"
        )
    if not latest:
        return f"the host did not report the {_IDENTIFIER[name]} of any NIC"
    unread = [scope for scope, item in latest.items() if item.status != MEASURED]
    return f"{unread[0]} does not report its {_IDENTIFIER[name]}" if unread else ""


def _gpu_count(view: HostView) -> int:
    """Return the highest of three numbers of GPUs: in the driver, on the PCI bus, and in the records.

    It is at least 1 if neither the driver nor the PCI bus reported a number.
    """
    counts = [_latest(view, name).get("host") for name in ("gpu.count", "gpu.pci_count")]
    known = [int(latest.value) for latest in counts if latest and isinstance(latest.value, int | float)]
    return max([*known, len(view.evidence.gpus()), 0 if known else 1])


def _is_ethernet(view: HostView, scope: str) -> bool:
    layers = [
        str(latest.value)
        for port_scope, latest in _latest(view, LAYER).items()
        if port_scope != scope and Scope.parse(scope).contains(port_scope) and latest.status == MEASURED
    ]
    return bool(layers) and "InfiniBand" not in layers
