"""Identify the missing GPU of a host that has fewer than it should.

The driver numbers its GPUs from 0, so a missing index does not identify a slot, and the serial of an absent part cannot be read.
Three sources identify it: the PCI bus, if the GPU is still on it; the record on which the host was accepted; and other hosts of
the same build, which have their GPUs in the same slots. If these contradict each other, no slot is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from fleet.judge.baseline import identity
from fleet.judge.evidence import pci_address
from fleet.judge.host_view import HostView
from schemas.records import Value
from schemas.reports import FAIL, Verdict
from schemas.scopes import Scope

DRIVER, BUS = "gpu.count", "gpu.pci_count"
LEAST_HOSTS = 2
"""A single other host may itself be the exception."""
NO_MODULE = -1
"""Module of a GPU without a module number: a card in a slot."""

Layout = Mapping[str, int]
"""PCI address as sysfs spells it -> number of the module on its baseboard."""
Build = tuple[str, int, str]
"""GPU model by the inventory, number of GPUs, and the host's model by its firmware; empty if unknown."""


class SlotMap:
    """The slots of the hosts that have all their GPUs. Maps of different hosts can be merged."""

    def __init__(self) -> None:
        self._seen: dict[Build, Counter[frozenset[tuple[str, int]]]] = {}

    def add(self, view: HostView) -> None:
        """Add the slots of a host's GPUs."""
        layout = _layout(view)
        if layout and len(layout) == len(view.host.devices):
            self._seen.setdefault(_build(view), Counter())[frozenset(layout.items())] += 1

    def update(self, other: SlotMap) -> None:
        """Add the slots of other hosts."""
        for build, layouts in other._seen.items():
            self._seen.setdefault(build, Counter()).update(layouts)

    def empty(self, view: HostView, missing: int, but: Collection[str]) -> str:
        """Name the slots that are occupied in most hosts of the build and empty here; empty if they are not `missing` many.

        Addresses in `but` are reported elsewhere.
        """
        layouts = self._seen.get(_build(view), Counter())
        result, count = next(iter(layouts.most_common(1)), (frozenset(), 0))
        usual, own = dict(result), _layout(view)
        if count < LEAST_HOSTS or 2 * count <= layouts.total():
            return ""
        like = "of its build" if _build(view)[2] else f"with {len(usual)} GPUs"
        where = f"where {count} of {layouts.total()} hosts {like} have one"
        gone = {address: usual[address] for address in usual.keys() - own.keys() - {*but}}
        if own.items() <= usual.items() and len(gone) == missing:
            text = ", ".join(f"PCI {address}" + _module(module) for address, module in sorted(gone.items()))
            # Without modules to compare, buses that are numbered otherwise for want of a bridge would not be noticed.
            return f"nothing at {text}{', by the address alone' if NO_MODULE in usual.values() else ''}, {where}"
        modules, others = {*own.values()}, {*usual.values()}
        if modules < others and len(others - modules) == missing:
            return f"nothing in {', '.join(f'module {module}' for module in sorted(others - modules))}, {where}"
        return ""


def with_missing_gpus(view: HostView, verdict: Verdict, slots: SlotMap) -> Verdict:
    """Return the verdict; if it fails because of missing GPUs, with what identifies them."""
    counted = verdict.name in (DRIVER, BUS) and verdict.verdict == FAIL and verdict.scope == "host"
    if not counted or not isinstance(verdict.value, int) or not isinstance(verdict.limit, int):
        return verdict
    values = "; ".join(_told(view, verdict.name, verdict.value, verdict.limit - verdict.value, slots))
    detail = "; ".join(text for text in (verdict.detail, values) if text)
    return replace(verdict, reason=f"{verdict.reason}; {values}" if values else verdict.reason, detail=detail)


def _told(view: HostView, name: str, count: int, missing: int, slots: SlotMap) -> Iterator[str]:
    own, on_bus = _layout(view), _on_bus(view)
    every = len(own) == len(view.evidence.gpus()) and view.host.devices == tuple(range(len(view.host.devices)))
    alone = sorted(on_bus - own.keys())
    fits = count == len(on_bus if name == BUS and on_bus else own) and (not on_bus or own.keys() <= on_bus)
    # Of hosts of which some GPUs are under test, the numbers of these move when one of the others is gone.
    if not own or not every or not fits or missing <= 0:
        return
    if name == DRIVER and alone:
        if len(alone) > missing:
            return
        yield f"on the PCI bus and not with the driver: {', '.join(alone)} (the kernel log says why)"
        missing -= len(alone)
    if missing:
        gone = _gone(view, missing, alone)
        if gone:
            text = (f"serial {serial}{f' at PCI {address}' if address else ''}" for serial, address in gone)
            yield f"accepted with it, and not there now: {', '.join(text)}"
        placed = sum(bool(address) for _, address in gone)
        where = slots.empty(view, missing, alone) if placed < missing else ""
        if where:
            yield where


def _gone(view: HostView, missing: int, but: Collection[str]) -> list[tuple[str, str]]:
    """Return serial and address of the GPUs with which the host was accepted and which are absent now.

    Those at `but` are reported elsewhere. The address is empty if another GPU is there now. Return none if their number is not
    `missing`.
    """
    left = view.evidence.baseline
    present, own = _layout(view), {identity(gpu) for gpu in view.evidence.gpus()}
    before = [
        (identity(gpu), pci_address(gpu.pci_bus_id) if gpu.pci_bus_id else "")
        for gpu in (left.host.gpus if left and left.host else ())
    ]
    gone = [(serial, address) for serial, address in before if serial and serial not in own and address not in but]
    return [(serial, "" if address in present else address) for serial, address in gone] if len(gone) == missing else []


def _on_bus(view: HostView) -> set[str]:
    """Return the addresses of the GPUs in the last reading of the bus."""
    text = _last(view, "pcie.kind")
    return {address for scope, kind in text.items() if kind == "gpu" and (address := Scope.parse(scope).get("pci"))}


def _layout(view: HostView) -> Layout:
    """Return the layout of the GPUs that the driver lists with an address."""
    modules = {scope: value for scope, value in _last(view, "gpu.module_id").items() if type(value) is int}
    gpus = (gpu for gpu in view.evidence.gpus() if gpu.pci_bus_id)
    return {pci_address(gpu.pci_bus_id): modules.get(f"gpu={gpu.index}", NO_MODULE) for gpu in gpus}


def _build(view: HostView) -> Build:
    product = _last(view, "host.system.product").get("host", "")
    return view.host.gpu_model, len(view.host.devices), product if isinstance(product, str) else ""


def _last(view: HostView, name: str) -> Mapping[str, Value]:
    """What the last snapshot that has it says."""
    metrics = view.observations.metrics.get(name)
    return metrics[-1][1].values if metrics else {}


def _module(module: int) -> str:
    return f" (module {module})" if module != NO_MODULE else ""
