"""Find parts that moved, were replaced, added or removed, by their serials: GPUs and other parts of a host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleet.records.host_state import HostState, gpus_by_serial
from schemas.baselines import GONE, MOVED, NEW, REPLACED, UNCLEAR, Change, InstalledPart
from schemas.records import Gpu, Value


@dataclass(frozen=True, kw_only=True)
class GpuSlot:
    """A GPU and where it is installed."""

    host: str
    gpu: Gpu

    @property
    def slot(self) -> tuple[str, str]:
        """Return what stays when the GPU is replaced: its PCI address, or its index if no address is reported."""
        return self.host, self.gpu.pci_bus_id.lower() or f"index {self.gpu.index}"

    def __str__(self) -> str:
        return f"{self.host} gpu={self.gpu.index}"


def gpu_slots(host: str, state: HostState) -> dict[str, GpuSlot]:
    """Return serial -> slot of the GPUs of a host."""
    return {serial: GpuSlot(host=host, gpu=gpu) for serial, gpu in gpus_by_serial(state.gpus).items()}


def gpu_changes(before: Mapping[str, GpuSlot], after: Mapping[str, GpuSlot]) -> Iterator[Change]:
    """Yield the GPUs that changed on hosts with a record on both sides."""
    was_in = {slot.slot: serial for serial, slot in before.items()}
    now_in = {slot.slot: serial for serial, slot in after.items()}
    for serial, slot in after.items():
        gone = was_in.get(slot.slot, "")
        if serial in before:
            if before[serial].slot != slot.slot:
                text = f"GPU {serial} moved from {before[serial]} to {slot}"
                yield _gpu(MOVED, serial, slot, str(before[serial]), str(slot), text)
        elif gone and gone not in after:
            text = f"{slot}: GPU {gone} was replaced by {serial}"
            yield _gpu(REPLACED, serial, slot, gone, serial, text)
        else:
            yield _gpu(NEW, serial, slot, None, serial, f"{slot}: GPU {serial} is new")
    for serial, slot in before.items():
        replaced = now_in.get(slot.slot, "")
        if serial not in after and (not replaced or replaced in before):
            yield _gpu(GONE, serial, slot, serial, None, f"{slot}: GPU {serial} is gone")


def _gpu(kind: str, serial: str, slot: GpuSlot, was: Value, now: Value, text: str) -> Change:
    scope = f"gpu={slot.gpu.index}"
    return Change(kind=kind, host=slot.host, scope=scope, what="GPU", serial=serial, old=was, new=now, text=text)


def other_parts(host: str, old: Iterable[InstalledPart], new: Iterable[InstalledPart]) -> Iterator[Change]:
    """Yield changes of other parts, by serial: the names of disks and NICs may change although the part is the same."""
    before, after = _by_kind(old), _by_kind(new)
    for kind, was in before.items():
        now = after.get(kind)
        if now is None:
            yield Change(
                kind=UNCLEAR,
                host=host,
                scope="host",
                what=kind,
                text=f"{host}: no {kind} reports its serial any more; {len(was)} did before",
            )
            continue
        added = {part.slot: part for serial, part in now.items() if serial not in was}
        for serial, part in was.items():
            if serial in now:
                continue
            other = added.pop(part.slot, None)
            text = f"{host} {part.slot}: {kind} {serial} {f'was replaced by {other.serial}' if other else 'is gone'}"
            yield _part(REPLACED if other else GONE, host, part, other, text)
        for other in added.values():
            yield _part(NEW, host, None, other, f"{host} {other.slot}: {kind} {other.serial} is new")


def _part(kind: str, host: str, was: InstalledPart | None, now: InstalledPart | None, text: str) -> Change:
    part = now or was or InstalledPart(kind="", slot="", serial="")
    return Change(
        kind=kind,
        host=host,
        scope=part.slot,
        what=part.kind,
        serial=part.serial,
        old=was.serial if was else None,
        new=now.serial if now else None,
        text=text,
    )


def _by_kind(parts: Iterable[InstalledPart]) -> dict[str, dict[str, InstalledPart]]:
    by_kind: dict[str, dict[str, InstalledPart]] = defaultdict(dict)
    for part in parts:
        by_kind[part.kind][part.serial] = part
    return by_kind
