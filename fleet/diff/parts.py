"""Find GPUs that moved. Find GPUs and other parts of a host that were replaced, added or removed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleet.records.host_state import NIC, HostState
from schemas.baselines import GONE, MOVED, NEW, REPLACED, UNCLEAR, Change, InstalledPart
from schemas.records import Gpu, Value


@dataclass(frozen=True, kw_only=True)
class GpuSlot:
    """A GPU and where it is installed."""

    host: str
    gpu: Gpu

    @property
    def slot(self) -> tuple[str, str]:
        """Return the host, and the PCI address or else the index of the GPU. The slot stays the same if the GPU is replaced."""
        return self.host, self.gpu.pci_bus_id.lower() or f"index {self.gpu.index}"

    def __str__(self) -> str:
        return f"{self.host} gpu={self.gpu.index}"


def gpu_slots(host: str, state: HostState) -> dict[str, GpuSlot]:
    """Return identity -> slot of the GPUs of a host."""
    return {name: GpuSlot(host=host, gpu=gpu) for name, gpu in state.gpus_by_identity().items()}


def gpu_changes(before: Mapping[str, GpuSlot], after: Mapping[str, GpuSlot]) -> Iterator[Change]:
    """Yield the changes of GPUs: moved, replaced, new or gone."""
    serials_before = {slot.slot: serial for serial, slot in before.items()}
    serials_after = {slot.slot: serial for serial, slot in after.items()}
    for serial, slot in after.items():
        previous = serials_before.get(slot.slot, "")
        if serial in before:
            if before[serial].slot != slot.slot:
                text = f"GPU {serial} moved from {before[serial]} to {slot}"
                yield _gpu(MOVED, serial, slot, str(before[serial]), str(slot), text)
        elif previous and previous not in after:
            text = f"{slot}: GPU {previous} was replaced by {serial}"
            yield _gpu(REPLACED, serial, slot, previous, serial, text)
        else:
            yield _gpu(NEW, serial, slot, None, serial, f"{slot}: GPU {serial} is new")
    for serial, slot in before.items():
        replacement = serials_after.get(slot.slot, "")
        if serial not in after and (not replacement or replacement in before):
            yield _gpu(GONE, serial, slot, serial, None, f"{slot}: GPU {serial} is gone")


def _gpu(kind: str, serial: str, slot: GpuSlot, old: Value, new: Value, text: str) -> Change:
    scope = f"gpu={slot.gpu.index}"
    return Change(kind=kind, host=slot.host, scope=scope, what="GPU", serial=serial, old=old, new=new, text=text)


def other_parts(host: str, old_parts: Iterable[InstalledPart], new_parts: Iterable[InstalledPart]) -> Iterator[Change]:
    """Yield the changes of parts other than GPUs, for the kinds of part that reported a serial before.

    Parts are identified by serial, because the names of disks and NICs may change. A MAC address that several interfaces share is
    that of their bond or team. So the serials of these interfaces are unknown, and their slots are not compared.
    """
    old_parts, new_parts = tuple(old_parts), tuple(new_parts)
    unknown = _with_shared_address(old_parts) | _with_shared_address(new_parts)
    before, after = _by_kind(old_parts), _by_kind(new_parts)
    for kind, old in before.items():
        new = after.get(kind)
        if new is None:
            yield Change(
                kind=UNCLEAR,
                host=host,
                scope="host",
                what=kind,
                text=f"{host}: no {kind} reports its serial any more; {len(old)} did before",
            )
            continue
        added = {part.slot: part for serial, part in new.items() if serial not in old and part.slot not in unknown}
        for serial, part in old.items():
            if serial in new or part.slot in unknown:
                continue
            replacement = added.pop(part.slot, None)
            text = f"{host} {part.slot}: {kind} {serial} {f'was replaced by {replacement.serial}' if replacement else 'is gone'}"
            yield _part(REPLACED if replacement else GONE, host, part, replacement, text)
        for part in added.values():
            yield _part(NEW, host, None, part, f"{host} {part.slot}: {kind} {part.serial} is new")


def _part(kind: str, host: str, old: InstalledPart | None, new: InstalledPart | None, text: str) -> Change:
    part = new or old or InstalledPart(kind="", slot="", serial="")
    return Change(
        kind=kind,
        host=host,
        scope=part.slot,
        what=part.kind,
        serial=part.serial,
        old=old.serial if old else None,
        new=new.serial if new else None,
        text=text,
    )


def _with_shared_address(parts: Iterable[InstalledPart]) -> set[str]:
    """Return the slots of the NICs whose MAC address another NIC of the host has, too."""
    nics = [part for part in parts if part.kind == NIC]
    counts = Counter(part.serial for part in nics)
    return {part.slot for part in nics if counts[part.serial] > 1}


def _by_kind(parts: Iterable[InstalledPart]) -> dict[str, dict[str, InstalledPart]]:
    by_kind: dict[str, dict[str, InstalledPart]] = defaultdict(dict)
    for part in parts:
        by_kind[part.kind][part.serial] = part
    return by_kind
