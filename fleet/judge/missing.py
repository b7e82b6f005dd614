"""Identify the missing GPUs of a host.

The driver numbers GPUs from 0, so a missing index does not identify a slot. The serial of an absent GPU cannot be read. A GPU
can be identified from three sources: the PCI bus, if the GPU is still on it; the accepted record of the host; and other hosts of
the same build, which have GPUs in the same slots. If these sources contradict each other, no slot is named. The kernel log may
contain the cause.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from fleet.judge.gpu_identity import identity, identity_text
from fleet.judge.host_view import HostView
from fleet.quantities import counted
from schemas.records import Value
from schemas.reports import FAIL, Verdict, VerdictKind
from schemas.scopes import Scope, pci_address

DRIVER, BUS, BOUND_TO, PERMITTED = "gpu.count", "gpu.pci_count", "pcie.driver", "pcie.permitted"
DENIED = "may not be used by the session: a device cgroup of Slurm or systemd, or the mode of /dev/nvidia*, denies it"
MIN_HOSTS = 2
"""An empty slot is named only if at least this many hosts have the most common layout: a single host may be the exception."""
LOG_CAUSES = {
    "message=fallen_off_the_bus": "fell off the bus",
    "xid=79": "fell off the bus (XID 79)",
    "message=open_modules_required": "requires NVIDIA's open kernel modules, and the proprietary ones are installed",
    "message=open_modules_unsupported": "is not supported by NVIDIA's open kernel modules, which are installed",
    "message=unsupported_by_driver": "is not supported by the installed driver release",
    "message=firmware_missing": "has no firmware (GSP) in the installed driver packages",
    "message=no_address_space": "has no address space (BAR): enable Above 4G Decoding, or enlarge the MMIO window of the VM",
    "message=confidential_computing": "is not in the confidential computing mode of the host",
    "message=other_driver": "is in use by another driver, such as nouveau",
    "message=init_failed": "could not be initialized",
    "message=probe_failed": "was refused by the driver",
}
"""Last label of the scope of a kernel log reading -> what happened to the GPU, the most severe first."""
HARDWARE_CAUSES = ("message=fallen_off_the_bus", "xid=79", "message=init_failed", "message=probe_failed")
"""Keys of LOG_CAUSES that may be hardware faults. Each other key means a wrong setting."""
NO_MODULE = -1
"""Module number of a GPU that has none: a card in a PCIe slot."""

Layout = Mapping[str, int]
"""PCI address of each GPU, as sysfs writes it -> number of the GPU's module on the baseboard, or NO_MODULE."""
Build = tuple[str, int, str]
"""GPU model from the inventory, number of GPUs, and host model as its firmware reports it (empty if unknown)."""


class SlotMap:
    """The GPU slots of the hosts on which no GPU is missing. Maps of different hosts can be merged (`update`)."""

    def __init__(self) -> None:
        self._layouts: dict[Build, Counter[frozenset[tuple[str, int]]]] = {}

    def add(self, view: HostView) -> None:
        """Add the slots of a host's GPUs, unless a GPU is missing."""
        layout = _layout(view)
        if layout and len(layout) == len(view.host.devices):
            self._layouts.setdefault(_build(view), Counter())[frozenset(layout.items())] += 1

    def update(self, other: SlotMap) -> None:
        """Add the slots in the map of other hosts."""
        for build, layouts in other._layouts.items():
            self._layouts.setdefault(build, Counter()).update(layouts)

    def describe_empty(self, view: HostView, missing: int, excluded: Collection[str]) -> str:
        """Name the slots that are occupied in most hosts of the build and empty in this host.

        Return an empty string unless exactly `missing` slots are found. Addresses in `excluded` do not count,
        because another text names them.
        """
        layouts = self._layouts.get(_build(view), Counter())
        most_common, count = next(iter(layouts.most_common(1)), (frozenset(), 0))
        usual, actual = dict(most_common), _layout(view)
        if count < MIN_HOSTS or 2 * count <= layouts.total():
            return ""
        peers = "of its build" if _build(view)[2] else f"with {counted(len(usual), 'GPU')}"
        where = f"where {count} of {layouts.total()} hosts {peers} have a GPU"
        empty = {address: usual[address] for address in usual.keys() - actual.keys() - {*excluded}}
        if actual.items() <= usual.items() and len(empty) == missing:
            text = ", ".join(f"PCI {address}" + _module(module) for address, module in sorted(empty.items()))
            # If a PCI bridge is missing, GPUs get other addresses. Without module numbers, `text` may then name a wrong slot.
            caution = " (slots are identified by PCI address only: not every GPU reports a module number)"
            return f"nothing at {text}, {where}{caution if NO_MODULE in usual.values() else ''}"
        modules, usual_modules = {*actual.values()}, {*usual.values()}
        empty_modules = sorted(usual_modules - modules)
        if modules < usual_modules and NO_MODULE not in usual_modules and len(empty_modules) == missing:
            return f"nothing in {', '.join(f'module {module}' for module in empty_modules)}, {where}"
        return ""


def with_missing_gpus(view: HostView, verdict: Verdict, slots: SlotMap) -> Verdict:
    """Return the verdict. If it fails because GPUs are missing, add texts that identify them.

    If settings explain all GPUs that the driver does not list (`gpu.count`), the action becomes `configure`.
    """
    is_count = verdict.name in (DRIVER, BUS) and verdict.verdict == FAIL and verdict.scope == "host"
    if verdict.kind == VerdictKind.INVENTORY:
        return verdict  # most hosts have the same other number of GPUs, so the inventory is wrong and no GPU is missing
    if not is_count or not isinstance(verdict.value, int) or not isinstance(verdict.limit, int):
        return verdict
    missing = verdict.limit - verdict.value
    unused = {**_denied(view), **_other_drivers(view)} if missing > 0 else {}
    causes = {address: cause for address, cause in _log_causes(view).items() if address not in unused and missing > 0}
    texts = [*_identify(view, verdict.name, verdict.value, missing, slots, {*causes, *unused})]
    texts += [f"{gpus} {cause}" for gpus, cause in _group(unused)]
    texts += [f"kernel log: {gpus} {cause}" for gpus, cause in _group(causes)]
    text = "; ".join(texts)
    detail = "; ".join(filter(None, (verdict.detail, text)))
    settings = {cause for key, cause in LOG_CAUSES.items() if key not in HARDWARE_CAUSES}
    explained = len(unused) + sum(cause in settings for cause in causes.values())
    # A host may have GPUs that are not in the plan and are bound to another driver, for example for virtual machines. They do not
    # explain why a planned GPU is missing. So `configure` requires a cause for every GPU that is on the PCI bus but not listed.
    unlisted = [count - verdict.value for count in _last(view, BUS).values() if isinstance(count, int)]
    is_setting = verdict.name == DRIVER and explained >= max([missing, *unlisted]) and missing > 0
    action = "configure" if is_setting else verdict.action
    return replace(
        verdict, reason=f"{verdict.reason}; {text}" if text else verdict.reason, detail=detail, action=action
    )


def _group(causes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield, for each cause, a text that names its GPUs, and the cause."""
    for cause in dict.fromkeys(causes.values()):
        addresses = sorted(address for address, other in causes.items() if other == cause)
        yield (
            f"the GPU at PCI {addresses[0]}" if len(addresses) == 1 else f"each GPU at PCI {', '.join(addresses)}",
            cause,
        )


def _other_drivers(view: HostView) -> dict[str, str]:
    """Return PCI address -> cause for each GPU that does not answer because it is bound to another driver, such as vfio-pci."""
    drivers = {Scope.parse(scope).get("pci"): driver for scope, driver in _last(view, BOUND_TO).items()}
    return {
        address: f"is bound to the driver {driver}"
        for address, driver in drivers.items()
        if address not in _answering(view) and driver not in ("nvidia", "none")
    }


def _denied(view: HostView) -> dict[str, str]:
    """Return PCI address -> cause for each GPU that does not answer because the agent has no permission to use it."""
    permitted = {Scope.parse(scope).get("pci"): value for scope, value in _last(view, PERMITTED).items()}
    answering = _answering(view)
    return {address: DENIED for address, value in permitted.items() if value is False and address not in answering}


def _answering(view: HostView) -> set[str]:
    """Return the PCI addresses in the last reading of `gpu.pci_bus_id`; empty if no GPU answered.

    Without this reading, return the addresses of the GPUs that the records list.
    """
    if view.observations.metrics.get("gpu.pci_bus_id"):
        return {pci_address(str(bus_id)) for bus_id in _last(view, "gpu.pci_bus_id").values()}
    return {*_layout(view)}


def _log_causes(view: HostView) -> dict[str, str]:
    """Return PCI address -> cause in the kernel log, for each GPU that does not answer.

    Lines after which the GPU answered are left out: the log keeps all lines since the boot, which may be weeks ago.
    """
    answering = _answering(view)
    causes: dict[str, str] = {}
    for name in ("xid.message", "xid.count"):
        for scope, count in _last(view, name).items():
            parsed = Scope.parse(scope)
            address, cause = parsed.get("pci"), LOG_CAUSES.get(parsed.below)
            if cause and address not in answering and count != _count_when_answering(view, name, scope, address):
                causes[address] = min(cause, causes.get(address, cause), key=[*LOG_CAUSES.values()].index)
    return causes


def _count_when_answering(view: HostView, name: str, scope: str, address: str) -> Value:
    """Return the count of a kernel log line when the GPU last answered; 0 if it never did or the log was not read then."""
    answered = [
        snapshot
        for snapshot, metric in view.observations.metrics.get("gpu.pci_bus_id", ())
        if any(pci_address(str(bus_id)) == address for bus_id in metric.values.values())
    ]
    counts = (
        metric.values.get(scope, 0)
        for snapshot, metric in view.observations.metrics.get(name, ())
        if answered and snapshot is answered[-1]
    )
    return next(counts, 0)


def _identify(
    view: HostView, name: str, count: int, missing: int, slots: SlotMap, causes: Collection[str]
) -> Iterator[str]:
    """Yield texts that identify the missing GPUs. `missing`: their number; `count`: the value of the reading `name`.

    Yield none if the readings of the host contradict each other, if not all its GPUs are tested, or if a GPU has no PCI address.
    `causes`: the addresses of the GPUs that are missing for a known cause, such as a line in the kernel log.
    """
    present, on_bus = _layout(view), _on_bus(view)
    # If only some GPUs of a host are under test, their indexes move when one of the others is missing.
    tests_all_gpus = view.host.devices == tuple(range(len(view.host.devices)))
    has_all_addresses = len(present) == len(view.evidence.gpus())
    only_on_bus = sorted(on_bus - present.keys())
    is_consistent = count == len(on_bus if name == BUS and on_bus else present) and (
        not on_bus or present.keys() <= on_bus
    )
    if not present or not has_all_addresses or not tests_all_gpus or not is_consistent or missing <= 0:
        return
    if name == DRIVER and only_on_bus:
        if len(only_on_bus) > missing:
            return
        hint = "" if causes else " (see the kernel log)"
        yield f"on the PCI bus, but not listed by the driver: {', '.join(only_on_bus)}{hint}"
        missing -= len(only_on_bus)
    if missing:
        absent = _absent_since_acceptance(view, missing, only_on_bus)
        if absent:
            texts = (f"{gpu}{f' at PCI {address}' if address else ''}" for gpu, address in absent)
            yield f"present when the host was accepted, missing now: {', '.join(texts)}"
        located = sum(bool(address) for _, address in absent)
        empty_slots = slots.describe_empty(view, missing, only_on_bus) if located < missing else ""
        if empty_slots:
            yield empty_slots


def _absent_since_acceptance(view: HostView, missing: int, excluded: Collection[str]) -> list[tuple[str, str]]:
    """Return identity (as text) and PCI address of each GPU that the host had when it was accepted and that is absent now.

    GPUs at the addresses in `excluded` do not count, because another text names them. The address is empty if another GPU has it
    now. Return an empty list unless exactly `missing` GPUs are absent.
    """
    accepted = view.evidence.baseline
    shared = view.accepted.shared
    layout, present = _layout(view), {identity(gpu, shared) for gpu in view.evidence.gpus()}
    before = [
        (gpu, pci_address(gpu.pci_bus_id) if gpu.pci_bus_id else "")
        for gpu in (accepted.host.gpus if accepted and accepted.host else ())
    ]
    absent = [(gpu, at) for gpu, at in before if identity(gpu, shared) not in {"", *present} and at not in excluded]
    if len(absent) != missing:
        return []
    return [(identity_text(gpu, shared), "" if address in layout else address) for gpu, address in absent]


def _on_bus(view: HostView) -> set[str]:
    """Return the PCI addresses of the GPUs in the last reading of the PCI bus (`pcie.kind`)."""
    kinds = _last(view, "pcie.kind")
    return {address for scope, kind in kinds.items() if kind == "gpu" and (address := Scope.parse(scope).get("pci"))}


def _layout(view: HostView) -> Layout:
    """Return the layout of those GPUs that the driver lists with a PCI address."""
    modules = {scope: value for scope, value in _last(view, "gpu.module_id").items() if type(value) is int}
    gpus = (gpu for gpu in view.evidence.gpus() if gpu.pci_bus_id)
    return {pci_address(gpu.pci_bus_id): modules.get(f"gpu={gpu.index}", NO_MODULE) for gpu in gpus}


def _build(view: HostView) -> Build:
    product = _last(view, "host.system.product").get("host", "")
    return view.host.gpu_model, len(view.host.devices), product if isinstance(product, str) else ""


def _last(view: HostView, name: str) -> Mapping[str, Value]:
    """Return scope -> value of a metric in the last snapshot that has it."""
    metrics = view.observations.metrics.get(name)
    return metrics[-1][1].values if metrics else {}


def _module(module: int) -> str:
    return f" (module {module})" if module != NO_MODULE else ""
