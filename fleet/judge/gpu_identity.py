"""Identify GPUs, so that the figures, failures and waivers of one GPU are never those of another.

A GPU is identified by its serial. But the GPUs of one board may all report the serial of the board: the two GPUs of a GB200 or
GB300 module do, and the four of an A16. Such GPUs are identified by their UUIDs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from schemas.records import Gpu


def shared_serials(gpus: Iterable[Gpu]) -> frozenset[str]:
    """Return the serials that several GPUs of one host report with different UUIDs."""
    uuids: defaultdict[str, set[str]] = defaultdict(set)
    for gpu in gpus:
        uuids[_serial(gpu)].add(gpu.uuid.strip())
    return frozenset(serial for serial, known in uuids.items() if serial and len(known - {""}) > 1)


def identity(gpu: Gpu, shared: Collection[str]) -> str:
    """Return the serial of a GPU. If it has no serial, or its serial is in `shared`, return its UUID."""
    serial, uuid = _serial(gpu), gpu.uuid.strip()
    return uuid if not serial or (uuid and serial in shared) else serial


def identities(gpus: Sequence[Gpu], shared: Collection[str] = ()) -> dict[str, str]:
    """Return the scope (`gpu=0`) of each GPU of a host -> its identity; empty text if it has neither serial nor UUID.

    `shared`: serials that GPUs of this host share in another record. If only one GPU of a board is left, its own record does not
    show that the serial is shared.
    """
    known = shared_serials(gpus).union(shared)
    return {f"gpu={gpu.index}": identity(gpu, known) for gpu in gpus}


def identity_text(gpu: Gpu, shared: Collection[str]) -> str:
    """Return the identity of a GPU with its kind: `serial 1652…`, `UUID GPU-…`, or `an unknown serial`."""
    name = identity(gpu, shared)
    if not name:
        return "an unknown serial"
    return f"serial {name}" if name == _serial(gpu) else f"UUID {name}"


def _serial(gpu: Gpu) -> str:
    """Return the serial of a GPU. A serial of zeros counts as none."""
    serial = gpu.serial.strip()
    return serial if serial.strip("0") else ""
