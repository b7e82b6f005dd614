"""The network ports of a host, and the switch port to which each is cabled, from the readings of the collector `wiring`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fleet.judge.host_view import HostView
from fleet.quantities import number_or_zero
from fleet.scope_text import describe_scope
from schemas.records import UNSUPPORTED, Value
from schemas.scopes import Scope, pci_address

KINDS = ("network", "infiniband")
SWITCH, SWITCH_ID, SWITCH_PORT, LABEL = "switch", "switch_id", "switch_port", "switch_port_label"
"""Names of the collector's readings, without the prefix `network.` or `infiniband.`."""
_RATES = ("infiniband.rate", "network.speed")
ADDRESSES = ("infiniband.hca.pci_address", "network.pci_address")
_LINK_UP: Mapping[str, Value] = {"infiniband.phys_state": "LinkUp", "network.carrier": True}
_BOND_MEMBER = "network.bond.member_up"
INTERFACE = "infiniband.interface"
"""Reading of a RoCE port: the name of its network interface, which differs from the name of the adapter."""
UNNAMED = "(unnamed port)"
_ADDRESS = re.compile(r"[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}")
_SEPARATORS = str.maketrans("", "", ":-. ")


@dataclass(frozen=True, kw_only=True, slots=True)
class PortLink:
    """A network port of a host, and the switch port at the other end of its cable."""

    host: str
    scope: str
    slot: str
    """PCI address, for InfiniBand followed by ` port ` and the number of the port; the scope if the address is not known."""
    names: frozenset[str]
    """All names by which a manifest may list the port: interface, adapter, `ADAPTER/PORT`, PCI address."""
    is_fastest: bool
    """Whether no other port in the host's `HostLinks` has a higher rate."""
    has_link: bool = True
    switch_id: str = ""
    """GUID or LLDP chassis ID of the switch; empty if the switch was not read, or changed during the run."""
    switch: str = ""
    """Name of the switch; empty if it was not read."""
    port: str = ""
    """Name that the switch sends for its port; empty if the switch was not read or sent no name."""
    label: str = ""
    """Description that the switch sends for its port; empty if none."""
    reason: str = ""
    """Why the switch was not read, or that it changed during the run; otherwise empty."""
    is_expected: bool = True
    """False if the collector reports the switch as unsupported: the port has no link, or a program is not installed."""
    adapter: str = ""
    """Name of the RDMA adapter of a network interface; empty if the interface has none."""
    adapter_port: str = ""
    """Number of this port on that adapter."""
    bond: str = ""
    """Name of the bond or team that the network interface belongs to; empty if none."""
    has_changed: bool = False
    """Whether the port was cabled to several switches during the run. `switch_id` is then empty."""

    @property
    def switch_name(self) -> str:
        """Return the name of the switch, or its ID if it sent no name."""
        return self.switch or self.switch_id

    @property
    def end(self) -> str:
        """Return switch and switch port: `leaf01 swp1s0`, followed by the label of that port if it differs from the name."""
        label = f" ({self.label})" if self.label and self.label != self.port else ""
        return f"{self.switch_name} {self.port or UNNAMED}{label}"

    @property
    def kind(self) -> str:
        """Return the first part of the names of the port's readings."""
        return "infiniband" if Scope.parse(self.scope).device_kind == "hca" else "network"

    @property
    def name(self) -> str:
        """Return the name of the port in a manifest (`port_name`)."""
        return port_name(self.scope)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the scopes of the parts that have the port: `nic=eth1`, and `hca=mlx5_0` if the interface is of that adapter."""
        return (Scope.parse(self.scope).device, *((f"hca={self.adapter}",) if self.adapter else ()))

    @property
    def ports(self) -> tuple[str, ...]:
        """Return the scopes of the port: `nic=eth1` or `hca=mlx5_0,port=2`; both for an interface whose adapter is known."""
        is_known = self.adapter and self.adapter_port
        return (self.scope, *((f"hca={self.adapter},port={self.adapter_port}",) if is_known else ()))

    @property
    def own_end(self) -> str:
        """Return the host's end of the cable as text, such as `NIC ens8f0np0 of r12-h01`."""
        return f"{describe_scope(self.scope)} of {self.host}"

    def is_at(self, switch: str, port: str) -> bool:
        """Return whether the port is cabled to this switch port. `switch` and `port` are names as an operator writes them."""
        return (
            self.is_switch(switch) and bool(port) and port.casefold() in (self.port.casefold(), self.label.casefold())
        )

    def names_port_as(self, port: str) -> bool:
        """Return whether the name that the switch sends for its port can be compared with `port`, the name that an operator gave.

        It cannot if the switch sends no name. If the switch sends only the address or the SNMP index of its port, and no
        description, `port` must have the same form.
        """
        sent = _form(self.port)
        return bool(self.port) and (sent == "name" or bool(self.label) or sent == _form(port))

    def is_switch(self, name: str) -> bool:
        """Return whether `name` is the name of the switch, with or without the domain, or its ID."""
        return same_name(name, self.switch) or _normalized_id(name) == _normalized_id(self.switch_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLinks:
    """The network ports of one host."""

    host: str
    has_record: bool
    links: tuple[PortLink, ...] = ()


def _form(port: str) -> str:
    """Return which form the name of a switch port has: `address`, `number` or `name`."""
    return "address" if _ADDRESS.fullmatch(port) else "number" if port.isdecimal() else "name"


def port_name(scope: str) -> str:
    """Return the name of a port in a manifest: `ens8f0np0`, `mlx5_0`, or `mlx5_0/2` for its second port."""
    labels = Scope.parse(scope).labels
    number = labels.get("port", "1")
    return labels.get("nic") or (labels.get("hca", "") if number == "1" else f"{labels.get('hca')}/{number}")


def same_name(first: str, second: str) -> bool:
    """Return whether two names are of the same switch. Their domains are compared only if both names have one."""
    first, second = first.casefold(), second.casefold()
    if "." in first and "." in second:
        return first == second
    return bool(first) and first.partition(".")[0] == second.partition(".")[0]


def switch_keys(name: str) -> tuple[str, ...]:
    """Return keys by which to look up a switch, from its name or its ID. Two texts for the same switch have a key in common."""
    return tuple(dict.fromkeys(filter(None, (name.casefold().partition(".")[0], _normalized_id(name)))))


def _normalized_id(text: str) -> str:
    """Return the ID of a switch in lower case, without `0x` and separators."""
    return text.casefold().removeprefix("0x").translate(_SEPARATORS)


def host_links(view: HostView) -> HostLinks:
    """Return those ports of a host whose switch the collector `wiring` tried to read, each with its last readings."""
    return HostLinks(host=view.host.name, has_record=view.has_record, links=tuple(_port_links(view)))


def _port_links(view: HostView) -> Iterator[PortLink]:
    """Yield the ports of `host_links`, each with its switch or the reason why the switch was not read."""
    changed = _changed(view)
    absent = _absent(view)
    reasons = {scope: why.partition(": ")[2] for scope, why in absent.items()} | changed
    values = {
        name: _last(view, *(f"{kind}.{name}" for kind in KINDS)) for name in (SWITCH, SWITCH_ID, SWITCH_PORT, LABEL)
    }
    if not reasons and not values[SWITCH_ID]:
        return
    rates = {scope: number_or_zero(value) for scope, value in _last(view, *_RATES).items()}
    link_states = {scope: value == up for name, up in _LINK_UP.items() for scope, value in _last(view, name).items()}
    addresses = _last(view, *ADDRESSES)
    rdma_ports = {str(nic): Scope.parse(scope) for scope, nic in _last(view, INTERFACE).items()}
    adapters = {nic: scope.get("hca") for nic, scope in rdma_ports.items()}
    members = [Scope.parse(scope) for scope in _last(view, _BOND_MEMBER)]
    bonds = {member.get("member"): member.get("nic") for member in members}
    scopes = sorted({*values[SWITCH_ID], *reasons})
    fastest = max((rates.get(scope, 0.0) for scope in scopes), default=0.0)
    for scope in scopes:
        labels = Scope.parse(scope).labels
        address = addresses.get(Scope.parse(scope).device)
        slot = pci_address(str(address)) if address else ""
        number = labels.get("port", "")
        yield PortLink(
            host=view.host.name,
            scope=scope,
            slot=f"{slot} port {number}" if slot and number else slot or scope,
            names=frozenset(filter(None, _names(labels, slot, rdma_ports))),
            adapter=adapters.get(labels.get("nic", ""), ""),
            adapter_port=rdma_ports[labels["nic"]].get("port") if labels.get("nic") in rdma_ports else "",
            bond=bonds.get(labels.get("nic", ""), ""),
            is_fastest=rates.get(scope, 0.0) >= fastest,
            has_link=link_states.get(scope, True),
            switch_id="" if scope in changed else str(values[SWITCH_ID].get(scope, "")),
            switch=str(values[SWITCH].get(scope, "")),
            port=str(values[SWITCH_PORT].get(scope, "")),
            label=str(values[LABEL].get(scope, "")),
            reason=reasons[scope] if scope in changed or scope not in values[SWITCH_ID] else "",
            is_expected=not absent.get(scope, "").startswith(f"{UNSUPPORTED}: "),
            has_changed=scope in changed,
        )


def _names(labels: Mapping[str, str], slot: str, rdma_ports: Mapping[str, Scope]) -> Iterator[str]:
    if nic := labels.get("nic"):
        yield from (nic, slot, port_name(rdma_ports[nic].text) if nic in rdma_ports else "")
    if hca := labels.get("hca"):
        yield f"{hca}/{labels.get('port')}"
        yield from (hca, slot) if labels.get("port") == "1" else ()


def _last(view: HostView, *names: str) -> dict[str, Value]:
    """Return scope of a port or adapter -> its last value. Each scope has values of only one of the readings `names`."""
    result: dict[str, Value] = {}
    for name in names:
        for _, metric in view.observations.metrics.get(name, ()):
            result |= metric.values
    return result


def _absent(view: HostView) -> dict[str, str]:
    """Return scope of a port -> status and reason, for each port whose switch was not read in the last snapshot."""
    metrics = [view.observations.metrics.get(f"{kind}.{SWITCH_ID}", ()) for kind in KINDS]
    last = [of_kind[-1][1] for of_kind in metrics if of_kind]
    return {scope: why for metric in last for scope, why in metric.absent.items()}


def _changed(view: HostView) -> dict[str, str]:
    """Return scope -> a reason that names the switches, for each port that was at several switches during the run."""
    seen: dict[str, dict[Value, None]] = {}
    for kind in KINDS:
        for _, metric in view.observations.metrics.get(f"{kind}.{SWITCH_ID}", ()):
            for scope, value in metric.values.items():
                seen.setdefault(scope, {})[value] = None
    return {
        scope: f"the switch changed during the run: {', then '.join(map(str, values))}"
        for scope, values in seen.items()
        if len(values) > 1
    }
