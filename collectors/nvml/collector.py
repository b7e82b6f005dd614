"""The collector: every family of NVML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pynvml as nvml

from collectors.base import HOST, Absent, Family, Labels, Value
from collectors.nvml.beside import Answer, side_by_side
from collectors.nvml.calls import UnreadError, call, read, text, translate
from collectors.nvml.gpm import Counters
from collectors.nvml.gpu import Gpu
from collectors.nvml.peers import peers
from collectors.nvml.readings import Told, everything, kinds, unanswered, uuid
from collectors.nvml.slow import Slow

GPU_DEADLINE_S = 5.0
"""A GPU that takes longer is told as an error; the others are told all the same. A healthy one takes some milliseconds."""
PEERS_DEADLINE_S = 2.0

Pairs = list[tuple[int, str | Absent]]


@dataclass(kw_only=True)
class Seen:
    """What one GPU has told."""

    gpu: Gpu
    labels: Labels
    told: list[Told]


@dataclass(kw_only=True)
class Kept:
    """What an exporter need not read again of the GPU with this UUID."""

    uuid: str
    readings: dict[str, Value | Absent] = field(default_factory=dict)
    never: set[int] = field(default_factory=set)
    counters: Counters = field(default_factory=Counters)
    slow: Slow = field(default_factory=Slow)


class NvmlCollector:
    """Reads every GPU, or those of the given NVML indices, each in a thread of its own.

    Args:
        devices: the NVML indices to look at; all where left out.
        thorough: everything anew, slow getters too, as a snapshot needs it.
        deadline_s: for all GPUs together, as they are read at the same time.
        hold: NVML may stay open from one collection to the next, which spares the 50 ms that opening takes. GPM's counters need
            it, and are not read otherwise.
    """

    name = "nvml"

    def __init__(
        self,
        devices: Iterable[int] | None = None,
        thorough: bool = False,
        deadline_s: float = GPU_DEADLINE_S,
        hold: bool = False,
    ) -> None:
        self._chosen = None if devices is None else frozenset(devices)
        self._thorough = thorough
        self._deadline_s = deadline_s
        self._hold = hold
        self._kept: dict[int, Kept] = {}
        self._stuck: dict[int, Answer[Seen]] = {}
        self._stuck_pairs: dict[int, Answer[Pairs]] = {}
        self._links: tuple[Mapping[int, str], Family] | None = None
        self._opened = 0

    def collect(self) -> Iterable[Family]:
        count = Family(name="gpu.count", unit="1", help="GPUs that the driver answers for")
        driver = Family(name="driver.version", unit="1", help="NVIDIA driver version")
        cuda = Family(name="driver.cuda_version", unit="1", help="Newest CUDA that the driver can run")
        confidential = Family(name="driver.confidential_compute", unit="1", help="Confidential computing is on")
        found = [count, driver, cuda, confidential]
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            why = translate(error)
            # Without a library or a loaded driver there is certainly no usable GPU; any other failure proves nothing.
            count.add(HOST, 0 if why.status == "unsupported" else why)
            for family in (driver, cuda, confidential):
                family.add(HOST, why)
            return found
        self._opened += 1
        lost: set[int] = set()
        try:
            driver.add(HOST, read(lambda: text(nvml.nvmlSystemGetDriverVersion())))
            cuda.add(HOST, read(_cuda_version))
            confidential.add(HOST, read(_confidential))
            present = read(nvml.nvmlDeviceGetCount)
            if isinstance(present, Absent):
                count.add(HOST, present)
                return found
            found += self._families(self._of(present), lost)
            count.add(HOST, len(self._of(present)) - len(lost))
        finally:
            self._close(least=int(self._hold and not lost))
        return found

    def _close(self, least: int) -> None:
        """Lets go of the library, and with it of the devices; not while a question is still out, or a sample is held."""
        least = max(least, int(any(kept.counters.held for kept in self._kept.values())))
        while self._opened > least and not self._stuck and not self._stuck_pairs:
            self._opened -= 1
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _of(self, present: int) -> list[int]:
        return [index for index in range(present) if self._chosen is None or index in self._chosen]

    def _families(self, chosen: Iterable[int], lost: set[int]) -> Iterator[Family]:
        """Every family of the GPUs; leaves in `lost` those of which the driver says at once that it has lost them."""
        seen = side_by_side(
            {index: partial(self._read, index, lost) for index in chosen}, self._deadline_s, self._stuck
        )
        families = {
            kind.name: Family(name=kind.name, unit=kind.unit, help=kind.help, counter=kind.counter)
            for kind in kinds(self._thorough, self._hold)
        }
        for index, of_gpu in seen.items():
            labels = {"gpu": str(index)} if isinstance(of_gpu, Absent) else of_gpu.labels
            told = unanswered(of_gpu, self._thorough, self._hold) if isinstance(of_gpu, Absent) else of_gpu.told
            for name, place, value in told:
                families[name].add({**labels, **place}, value)
        yield from families.values()
        yield self._peers({index: of_gpu for index, of_gpu in seen.items() if not isinstance(of_gpu, Absent)})

    def _read(self, index: int, lost: set[int]) -> Seen:
        try:
            gpu = Gpu(call("nvmlDeviceGetHandleByIndex", index))
        except UnreadError:
            lost.add(index)
            self._forget(index)
            raise
        known = uuid(gpu)
        kept = self._kept.get(index)
        if self._thorough or isinstance(known, Absent) or kept is None or kept.uuid != known:
            self._forget(index)
            kept = self._kept[index] = Kept(uuid="" if isinstance(known, Absent) else known)
        gpu.never = kept.never
        labels = {"gpu": str(index)} | ({"uuid": kept.uuid} if kept.uuid else {})
        told = list(everything(gpu, self._thorough, kept.readings))
        if not self._thorough:
            told += kept.slow.read(gpu, wait=not self._hold)
        if self._hold:
            told += [(name, {}, seen) for name, seen in kept.counters.read(gpu).items()]
        return Seen(gpu=gpu, labels=labels, told=told)

    def _forget(self, index: int) -> None:
        if kept := self._kept.pop(index, None):
            kept.counters.drop()

    def _peers(self, whole: Mapping[int, Seen]) -> Family:
        """Between the same GPUs there is always the same, unless it could not be read."""
        present = {index: seen.labels.get("uuid", "") for index, seen in whole.items()}
        if not self._thorough and self._links and self._links[0] == present:
            return self._links[1]
        family = Family(name="gpu.peer.link", unit="1", help="What lies between two GPUs")
        gpus = {index: seen.gpu for index, seen in whole.items()}
        rows = side_by_side(
            {index: lambda index=index: list(peers(index, gpus)) for index in gpus},  # type: ignore[misc]
            PEERS_DEADLINE_S,
            self._stuck_pairs,
        )
        for here, row in rows.items():
            pairs = [(there, row) for there in gpus if there != here] if isinstance(row, Absent) else row
            for there, between in pairs:
                family.add({**whole[here].labels, "peer": str(there)}, between)
        whole_told = all(present.values()) and not any(isinstance(between, Absent) for _, between in family.readings)
        self._links = (present, family) if whole_told else None
        return family


def _cuda_version() -> str:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def _confidential() -> bool:
    return bool(call("nvmlSystemGetConfComputeState").ccFeature)
