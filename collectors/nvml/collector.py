"""The NVML collector."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pynvml as nvml

from collectors.base import HOST_LABELS, Absent, Family, Labels, ReadingError, Value, empty_families
from collectors.deadline import PendingCall, call_with_deadline
from collectors.nvml.calls import ResetRequired, call, decode, gpu_count, open_nvml, try_read
from collectors.nvml.denials import Denials, replace_denied
from collectors.nvml.gpm import GpmCounters
from collectors.nvml.gpu import NvmlGpu
from collectors.nvml.links import ACTIVE, PER_LINK
from collectors.nvml.peers import peer_paths
from collectors.nvml.readings import (
    Sample,
    absent_samples,
    read_samples,
    read_uuid,
    reading_kinds,
    with_required_reset,
)
from collectors.nvml.slow_readings import SlowReadings

GPU_DEADLINE_S = 5.0
"""Time limit for reading all GPUs. A GPU that does not answer within it is reported as an error, without an effect on the other
GPUs. A healthy GPU takes milliseconds."""
PEERS_DEADLINE_S = 2.0
"""Time limit for reading the paths between all GPUs."""
PEERS_REFRESH_S = 300.0
"""Age at which the paths between the GPUs are read again, because the state of the fabric may have changed."""
PAUSES_S = (0.1, 0.3, 1.0)
"""Pauses before repeated reads, in seconds. While any GPU denies a reading (see `collectors.nvml.denials`), the collector waits
for the next of these pauses and reads all GPUs again."""
HOST_KINDS = {
    "gpu.count": ("1", "Selected GPUs (default: all) that the driver reports"),
    "driver.version": ("1", "NVIDIA driver version"),
    "driver.cuda_version": ("1", "Newest CUDA version that the driver supports"),
    "driver.confidential_compute": ("1", "Confidential computing is on"),
}

PeerPaths = list[tuple[int, str | Absent]]
"""The paths from one GPU to the others: NVML index of the other GPU, and the path or why it is not known."""

PeerKey = Mapping[int, tuple[str, list[Sample]]]
"""Index of a GPU -> its UUID and the states of its NVLinks."""


@dataclass(kw_only=True)
class GpuReadings:
    """The samples of one GPU."""

    gpu: NvmlGpu
    labels: Labels
    samples: list[Sample]


@dataclass(kw_only=True)
class CachedGpu:
    """What an exporter keeps between scrapes about one GPU. `uuid` is empty if it is unknown."""

    uuid: str
    constants: dict[str, Value] = field(default_factory=dict)
    denied_fields: dict[int, float] = field(default_factory=dict)
    counters: GpmCounters = field(default_factory=GpmCounters)
    slow: SlowReadings = field(default_factory=SlowReadings)


class NvmlCollector:
    """Reads every GPU in a separate thread.

    Args:
        devices: the NVML indices to read; default: all.
        full_snapshot: read everything, including slow readings, and use no cached value.
        deadline_s: see GPU_DEADLINE_S.
        keep_open: keep NVML open between collections, because opening NVML takes 50 ms. If False, no GPM counters are read.
        pauses_s: see PAUSES_S. With `keep_open` there are no pauses, because a scrape must not wait: a GPU that denies a reading
            is read again only in the next collection.
    """

    name = "nvml"

    def __init__(
        self,
        devices: Iterable[int] | None = None,
        full_snapshot: bool = False,
        deadline_s: float = GPU_DEADLINE_S,
        keep_open: bool = False,
        pauses_s: Iterable[float] = PAUSES_S,
    ) -> None:
        self._devices = None if devices is None else frozenset(devices)
        self._full_snapshot = full_snapshot
        self._deadline_s = deadline_s
        self._keep_open = keep_open
        self._pauses_s = () if keep_open else tuple(pauses_s)
        self._denials = Denials()
        self._cache: dict[int, CachedGpu] = {}
        self._stuck: dict[int, PendingCall[GpuReadings]] = {}
        self._stuck_peers: dict[int, PendingCall[PeerPaths]] = {}
        self._peers: tuple[PeerKey, float, Family] | None = None
        """GPUs and link states for which the paths were read, time of that read (monotonic clock), and the paths."""
        self._open_count = 0
        """Number of calls of `open_nvml` without a matching nvmlShutdown."""

    def collect(self) -> Iterable[Family]:
        families = self._collect()
        if not self._pauses_s:
            return families
        for pause_s in self._pauses_s:
            if not (denying := self._denials.find(families)):
                return families
            time.sleep(pause_s)
            for index in denying:
                self._forget(index)
            replace_denied(families, self._collect())
        self._denials.accept(families)
        return families

    def _collect(self) -> list[Family]:
        host = empty_families(HOST_KINDS, varying=["gpu.count"])
        try:
            open_nvml()
        except ReadingError as error:
            absent = error.absent
            for family in host.values():
                family.add(HOST_LABELS, absent)
            if absent.status == "unsupported":
                # Without the library or a loaded driver, no GPU is usable. Any other failure leaves the number of GPUs unknown.
                host["gpu.count"].readings = [(HOST_LABELS, 0)]
            return list(host.values())
        self._open_count += 1
        refused: dict[int, Absent] = {}
        gpu_families: list[Family] = []
        try:
            host["driver.version"].add(HOST_LABELS, try_read(lambda: decode(nvml.nvmlSystemGetDriverVersion())))
            host["driver.cuda_version"].add(HOST_LABELS, try_read(_cuda_version))
            host["driver.confidential_compute"].add(HOST_LABELS, try_read(_confidential_compute))
            count = try_read(gpu_count)
            if not isinstance(count, Absent):
                indices = [index for index in range(count) if self._devices is None or index in self._devices]
                gpu_families = list(self._gpu_families(indices, refused))
                # A GPU that the driver refuses until a reset is counted; a GPU that it refuses for any other reason is not.
                count = len(indices) - sum(not isinstance(why, ResetRequired) for why in refused.values())
            host["gpu.count"].add(HOST_LABELS, count)
        finally:
            self._close(keep=int(self._keep_open and not refused))
        return [*host.values(), *gpu_families]

    def _close(self, keep: int) -> None:
        """Call nvmlShutdown until `_open_count` is `keep`. If `keep` is 0, this closes NVML.

        While a GPM sample exists, the count stays at 1 or more. While a call to the driver is stuck, the count stays as it is.
        """
        keep = max(keep, int(any(cached.counters.has_sample for cached in self._cache.values())))
        while self._open_count > keep and not self._stuck and not self._stuck_peers:
            self._open_count -= 1
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _gpu_families(self, indices: Iterable[int], refused: dict[int, Absent]) -> Iterator[Family]:
        """Yield every family of the GPUs. If the driver returns no handle for a GPU, add the GPU and the reason to `refused`."""
        results = call_with_deadline(
            {index: partial(self._read, index, refused) for index in indices}, self._deadline_s, self._stuck
        )
        families = {
            kind.name: kind.family(("gpu", "uuid", "link") if kind.name in PER_LINK else ())
            for kind in reading_kinds(self._full_snapshot, self._keep_open)
        }
        for index, result in results.items():
            if isinstance(result, Absent):
                gpu_labels: Labels = {"gpu": str(index)}
                samples = absent_samples(result, self._full_snapshot, self._keep_open)
            else:
                gpu_labels, samples = result.labels, result.samples
            for name, labels, value in with_required_reset(samples):
                families[name].add({**gpu_labels, **labels}, value)
        yield from families.values()
        yield self._peer_family({i: result for i, result in results.items() if not isinstance(result, Absent)})

    def _read(self, index: int, refused: dict[int, Absent]) -> GpuReadings:
        try:
            gpu = NvmlGpu(call("nvmlDeviceGetHandleByIndex", index))
        except ReadingError as error:
            refused[index] = error.absent
            self._forget(index)
            raise
        cached = self._cached(index, read_uuid(gpu))
        gpu.denied_fields = cached.denied_fields
        labels = {"gpu": str(index)} | ({"uuid": cached.uuid} if cached.uuid else {})
        samples = list(read_samples(gpu, self._full_snapshot, cached.constants))
        if not self._full_snapshot:
            samples += cached.slow.read(gpu, wait=not self._keep_open)
        if self._keep_open:
            samples += [(name, {}, value) for name, value in cached.counters.read(gpu).items()]
        return GpuReadings(gpu=gpu, labels=labels, samples=samples)

    def _cached(self, index: int, uuid: str | Absent) -> CachedGpu:
        """Return the cache of the GPU with this index and UUID.

        The cache is empty for a full snapshot, for an unknown UUID, and if the previous GPU with this index had another UUID.
        """
        cached = self._cache.get(index)
        if self._full_snapshot or isinstance(uuid, Absent) or cached is None or cached.uuid != uuid:
            self._forget(index)
            cached = self._cache[index] = CachedGpu(uuid="" if isinstance(uuid, Absent) else uuid)
        return cached

    def _forget(self, index: int) -> None:
        if cached := self._cache.pop(index, None):
            cached.counters.free()

    def _peer_family(self, results: Mapping[int, GpuReadings]) -> Family:
        """Return the paths between the GPUs.

        If all paths and UUIDs could be read, the paths are cached for PEERS_REFRESH_S. They are read again earlier if the GPUs or
        the states of their NVLinks change.
        """
        key = {
            index: (result.labels.get("uuid", ""), [sample for sample in result.samples if sample[0] == ACTIVE.name])
            for index, result in results.items()
        }
        now = time.monotonic()
        if not self._full_snapshot and self._peers and self._peers[0] == key and now - self._peers[1] < PEERS_REFRESH_S:
            return self._peers[2]
        family = Family(name="gpu.peer.link", unit="1", help="Path between two GPUs", varies=True)
        gpus = {index: result.gpu for index, result in results.items()}
        rows = call_with_deadline(
            {index: partial(_peer_list, index, gpus) for index in gpus}, PEERS_DEADLINE_S, self._stuck_peers
        )
        for index, row in rows.items():
            paths = [(peer, row) for peer in gpus if peer != index] if isinstance(row, Absent) else row
            for peer, path in paths:
                family.add({**results[index].labels, "peer": str(peer)}, path)
        has_uuids = all(uuid for uuid, _ in key.values())
        is_complete = has_uuids and not any(isinstance(path, Absent) for _, path in family.readings)
        self._peers = (key, now, family) if is_complete else None
        return family


def _peer_list(index: int, gpus: Mapping[int, NvmlGpu]) -> PeerPaths:
    return list(peer_paths(index, gpus))


def _cuda_version() -> str:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def _confidential_compute() -> bool:
    return bool(call("nvmlSystemGetConfComputeState").ccFeature)
