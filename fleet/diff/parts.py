"""Parts that are not where they were, by their serials: GPUs, and what else a host holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fleet.records.host_state import Sight, serials
from schemas.baselines import GONE, MOVED, NEW, REPLACED, UNCLEAR, Change, Place
from schemas.records import Gpu, Value


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A GPU in its place."""

    host: str
    gpu: Gpu

    @property
    def slot(self) -> tuple[str, str]:
        """What stays when the part is changed: the PCI address, or the index where none is told."""
        return self.host, self.gpu.pci_bus_id.lower() or f"index {self.gpu.index}"

    def __str__(self) -> str:
        return f"{self.host} gpu={self.gpu.index}"


def seats(host: str, found: Sight) -> dict[str, Seat]:
    """Serial -> where it is."""
    return {serial: Seat(host=host, gpu=gpu) for serial, gpu in serials(found.gpus).items()}


def gpus(before: Mapping[str, Seat], after: Mapping[str, Seat]) -> Iterator[Change]:
    """GPUs of hosts that both sides know."""
    was_in = {seat.slot: serial for serial, seat in before.items()}
    now_in = {seat.slot: serial for serial, seat in after.items()}
    for serial, seat in after.items():
        gone = was_in.get(seat.slot, "")
        if serial in before:
            if before[serial].slot != seat.slot:
                text = f"GPU {serial} moved from {before[serial]} to {seat}"
                yield _gpu(MOVED, serial, seat, str(before[serial]), str(seat), text)
        elif gone and gone not in after:
            text = f"{seat}: GPU {gone} is gone, {serial} is in its place"
            yield _gpu(REPLACED, serial, seat, gone, serial, text)
        else:
            yield _gpu(NEW, serial, seat, None, serial, f"{seat}: GPU {serial} was not there before")
    for serial, seat in before.items():
        replaced = now_in.get(seat.slot, "")
        if serial not in after and (not replaced or replaced in before):
            yield _gpu(GONE, serial, seat, serial, None, f"{seat}: GPU {serial} is gone")


def _gpu(kind: str, serial: str, seat: Seat, was: Value, now: Value, text: str) -> Change:
    scope = f"gpu={seat.gpu.index}"
    return Change(kind=kind, host=seat.host, scope=scope, what="GPU", serial=serial, old=was, new=now, text=text)


def other_parts(host: str, old: Iterable[Place], new: Iterable[Place]) -> Iterator[Change]:
    """Serials of what else the host holds; the names of disks and NICs may change without one of them being another."""
    before, after = _by_kind(old), _by_kind(new)
    for kind, was in before.items():
        now = after.get(kind)
        if now is None:
            yield Change(
                kind=UNCLEAR,
                host=host,
                scope="host",
                what=kind,
                text=f"{host}: no {kind} tells its serial any more, {len(was)} did before",
            )
            continue
        came = {place.slot: place for serial, place in now.items() if serial not in was}
        for serial, place in was.items():
            if serial in now:
                continue
            other = came.pop(place.slot, None)
            if other:
                text = f"{host} {place.slot}: {kind} {serial} is gone, {other.serial} is in its place"
            else:
                text = f"{host} {place.slot}: {kind} {serial} is gone"
            yield _part(REPLACED if other else GONE, host, place, other, text)
        for other in came.values():
            yield _part(NEW, host, None, other, f"{host} {other.slot}: {kind} {other.serial} was not there before")


def _part(kind: str, host: str, was: Place | None, now: Place | None, text: str) -> Change:
    place = now or was or Place(kind="", slot="", serial="")
    return Change(
        kind=kind,
        host=host,
        scope=place.slot,
        what=place.kind,
        serial=place.serial,
        old=was.serial if was else None,
        new=now.serial if now else None,
        text=text,
    )


def _by_kind(parts: Iterable[Place]) -> dict[str, dict[str, Place]]:
    found: dict[str, dict[str, Place]] = defaultdict(dict)
    for place in parts:
        found[place.kind][place.serial] = place
    return found
