"""Collect what a host reports about each of its network adapters, for the report page of each adapter. Reads no files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fleet.judge.change import change
from fleet.judge.counter_rate import hours_before
from fleet.judge.host_view import HostView
from fleet.judge.wiring.links import ADDRESSES, INTERFACE
from fleet.quantities import finite
from schemas.readings import READINGS
from schemas.records import Value
from schemas.reports import Adapter, AdapterReading
from schemas.scopes import Scope, pci_address

_PREFIXES = ("infiniband.", "network.", "optics.", "port.", "pcie.")
_PATH, _NEAREST = _GPU_READINGS = ("pcie.nic_path", "pcie.nearest_nics")
"""Readings of a GPU: the kind of path to its nearest adapters, and the PCI addresses of these adapters."""


@dataclass(kw_only=True)
class _Draft:
    """An adapter while its readings are collected."""

    name: str
    scopes: list[str]
    slot: str = ""
    readings: list[AdapterReading] = field(default_factory=list)


def host_adapters(view: HostView) -> tuple[Adapter, ...]:
    """Return the network adapters of a host, RDMA adapters first. Their Ethernet interfaces are not separate adapters."""
    last = {
        name: _last(view, name)
        for name in view.observations.metrics
        if name.startswith(_PREFIXES) and name not in _GPU_READINGS and name in READINGS
    }
    drafts = _drafts(view, {Scope.parse(scope).device for readings in last.values() for scope in readings})
    owners = {scope: draft for draft in drafts for scope in draft.scopes}
    for name, readings in last.items():
        for scope, (value, reason) in readings.items():
            if owner := owners.get(Scope.parse(scope).device):
                owner.readings.append(_reading(view, name, scope, value, reason))
    gpus, paths = _nearest_gpus(view)
    return tuple(
        Adapter(
            name=draft.name,
            scopes=tuple(draft.scopes),
            slot=draft.slot,
            gpus=tuple(gpus.get(draft.slot, ())),
            path=paths.get(draft.slot, ""),
            readings=tuple(draft.readings),
        )
        for draft in drafts
    )


def _drafts(view: HostView, devices: set[str]) -> list[_Draft]:
    """Return the adapters with their scopes, but still without readings."""
    interfaces: dict[str, list[str]] = defaultdict(list)
    for port, (interface, _) in _last(view, INTERFACE).items():
        if f"nic={interface}" in devices:
            interfaces[Scope.parse(port).device].append(f"nic={interface}")
    addresses = {scope: value for name in ADDRESSES for scope, (value, _) in _last(view, name).items()}
    in_adapters = {scope for of_adapter in interfaces.values() for scope in of_adapter}
    drafts = []
    for device in sorted(devices, key=_natural):
        kind = Scope.parse(device).device_kind
        name = Scope.parse(device).get(kind)
        if kind == "hca" or (kind == "nic" and device not in in_adapters):
            address = addresses.get(device)
            slot = pci_address(str(address)) if address else ""
            pci = [f"pci={slot}"] if f"pci={slot}" in devices else []
            scopes = list(dict.fromkeys([device, *interfaces.get(device, ()), *pci]))
            drafts.append(_Draft(name=name, scopes=scopes, slot=slot))
    return drafts


def _natural(device: str) -> tuple[str, int, str]:
    """Return a key that sorts `mlx5_9` before `mlx5_10`, and RDMA adapters before other NICs."""
    kind = Scope.parse(device).device_kind
    name = Scope.parse(device).get(kind)
    return kind, len(name), name


def _last(view: HostView, name: str) -> Mapping[str, tuple[Value, str]]:
    """Return scope -> (value, ""), or (None, reason why there is no value), from the last snapshot that has the scope."""
    last: dict[str, tuple[Value, str]] = {}
    for _, metric in view.observations.metrics.get(name, ()):
        last |= {scope: (value, "") for scope, value in metric.values.items()}
        last |= {scope: (None, reason) for scope, reason in metric.absent.items()}
    return last


def _reading(view: HostView, name: str, scope: str, value: Value, reason: str) -> AdapterReading:
    """Return a reading of an adapter.

    For a counter that is not 0, the reading includes the increase during the run and the hourly rate before the run.
    """
    reading = AdapterReading(name=name, scope=scope, unit=READINGS[name].unit, value=value, reason=reason)
    if not READINGS[name].counter or reading.unit != "1" or not finite(value):
        return reading
    series = [item for item in view.observations.by_scope(name).get(scope, ()) if finite(item.value) is not None]
    if not series:
        return reading
    increase = finite(change(series).total) if len(series) > 1 else None
    first, hours = finite(series[0].value), hours_before(view, series[0])
    per_hour = first / hours if first and hours else None
    return AdapterReading(name=name, scope=scope, unit=reading.unit, value=value, increase=increase, per_hour=per_hour)


def _nearest_gpus(view: HostView) -> tuple[Mapping[str, list[str]], Mapping[str, str]]:
    """Return two mappings. Their keys are the PCI addresses of adapters.

    The first mapping has the GPUs that list the adapter among their nearest. The second has the kind of path to these GPUs.
    """
    paths = {gpu: str(value) for gpu, (value, _) in _last(view, _PATH).items() if value is not None}
    by_index = view.evidence.gpu_scopes()
    gpus: dict[str, list[str]] = defaultdict(list)
    path_of: dict[str, str] = {}
    for gpu, address in _pairs(view):
        gpus[address].append(by_index.get(gpu, gpu))
        path_of[address] = paths.get(gpu, "")
    return gpus, path_of


def _pairs(view: HostView) -> Iterator[tuple[str, str]]:
    """Yield the scope of each GPU with the PCI address of each of its nearest adapters."""
    for gpu, (value, _) in sorted(_last(view, _NEAREST).items()):
        for address in str(value or "").split():
            yield gpu, address
