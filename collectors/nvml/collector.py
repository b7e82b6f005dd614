"""The collector: every family of NVML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pynvml as nvml

from collectors.base import HOST, Absent, Family, Labels
from collectors.nvml.calls import read, text, translate
from collectors.nvml.clocks import throttling
from collectors.nvml.links import links
from collectors.nvml.readings import GPU_READINGS


class NvmlCollector:
    """Reads every GPU, or those of the given NVML indices."""

    name = "nvml"

    def __init__(self, devices: Iterable[int] | None = None, thorough: bool = False) -> None:
        self._chosen = None if devices is None else frozenset(devices)
        self._thorough = thorough

    def collect(self) -> Iterable[Family]:
        count = Family(name="gpu.count", unit="1", help="GPUs that the driver answers for")
        driver = Family(name="driver.version", unit="1", help="NVIDIA driver version")
        cuda = Family(name="driver.cuda_version", unit="1", help="Newest CUDA that the driver can run")
        found = [count, driver, cuda]
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            why = translate(error)
            # Without a library or a loaded driver there is certainly no usable GPU; any other failure proves nothing.
            count.add(HOST, 0 if why.status == "unsupported" else why)
            driver.add(HOST, why)
            cuda.add(HOST, why)
            return found
        try:
            driver.add(HOST, read(lambda: text(nvml.nvmlSystemGetDriverVersion())))
            cuda.add(HOST, read(_cuda_version))
            present = read(nvml.nvmlDeviceGetCount)
            if isinstance(present, Absent):
                count.add(HOST, present)
                return found
            devices = dict(self._devices(present))
            count.add(HOST, sum(not isinstance(device, Absent) for device in devices.values()))
            found += self._families(devices)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        return found

    def _devices(self, present: int) -> Iterator[tuple[int, Any]]:
        for index in range(present):
            if self._chosen is None or index in self._chosen:
                yield index, read(lambda index=index: nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[misc]

    def _families(self, devices: dict[int, Any]) -> Iterator[Family]:
        uuid = Family(name="gpu.uuid", unit="1", help="UUID of the GPU")
        labels: dict[int, Labels] = {}
        for index, gpu in devices.items():
            known = gpu if isinstance(gpu, Absent) else read(lambda gpu=gpu: text(nvml.nvmlDeviceGetUUID(gpu)))  # type: ignore[misc]
            labels[index] = {"gpu": str(index)} | ({} if isinstance(known, Absent) else {"uuid": str(known)})
            uuid.add(labels[index], known)
        yield uuid
        for name, unit, counter, about, getter in GPU_READINGS:
            family = Family(name=name, unit=unit, help=about, counter=counter)
            for index, gpu in devices.items():
                family.add(labels[index], gpu if isinstance(gpu, Absent) else read(lambda: getter(gpu)))  # noqa: B023
            yield family
        yield throttling(devices, labels)
        yield from links(devices, labels)


def _cuda_version() -> str:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"
