"""The NVLink fabric that a GPU is registered with, and the chip-to-chip links of Grace."""

from __future__ import annotations

import ctypes
import uuid

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import UnreadError, translate, unsupported
from collectors.nvml.gpu import Gpu, value
from collectors.nvml.rows import ONCE, THOROUGH, Getter, Row, part

_STATES = {1: "not_started", 2: "in_progress", 3: "completed"}
_NOT_SUPPORTED, _COMPLETED = 0, 3
_TRUE = 1
_CONFIGURATION_RIGHT = 1
_C2C_LINKS, _C2C_STATUS = 170, 171


class _Info(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t. That of nvidia-ml-py 12 has the UUID at another length than the driver."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_uint),
        ("health", ctypes.c_uint),
    )


def _info(gpu: Gpu) -> _Info:
    """Raises UnreadError where the part belongs to no fabric."""

    def ask() -> _Info:
        info = _Info(version=ctypes.sizeof(_Info) | 2 << 24)
        gpu.fill("GpuFabricInfoV", info)
        if info.state == _NOT_SUPPORTED:
            raise unsupported("the part belongs to no NVLink fabric")
        return info

    return gpu.once("fabric", ask)


def _state(gpu: Gpu) -> str:
    info = _info(gpu)
    if info.state == _COMPLETED and info.status:
        return f"failed: {translate(nvml.NVMLError(info.status)).reason.removeprefix('NVML: ')}"
    return _STATES.get(info.state, f"unknown ({info.state})")


def _of_registered(get: Getter) -> Getter:
    """What is only there once the GPU is registered."""

    def registered(gpu: Gpu) -> object:
        state = _state(gpu)
        if state != "completed":
            raise UnreadError(Absent(status="error", reason=f"the registration with the fabric is {state}"))
        return get(gpu)

    return registered  # type: ignore[return-value]


def _health(shift: int, width: int = 0b11, good: int | None = None) -> Getter:
    """One part of the health mask: 0 is not supported, else 1 for true; or anything but `good`."""

    def bad(gpu: Gpu) -> bool:
        bits = _info(gpu).health >> shift & width
        if bits == 0:
            raise unsupported("the fabric does not tell")
        return bool(bits == _TRUE if good is None else bits != good)

    return bad


def _c2c_links(gpu: Gpu) -> int:
    links = int(value(gpu.field(_C2C_LINKS)))
    if not links:
        raise unsupported("the part has no chip-to-chip links")
    return links


def _c2c_missing(gpu: Gpu) -> int:
    links = _c2c_links(gpu)
    states = gpu.fields((_C2C_STATUS, link) for link in range(links))
    return sum(not value(state) for state in states.values())


FABRIC_ROWS = (
    Row("gpu.fabric.state", "1", False, "Registration with the NVLink fabric", _state),
    Row("gpu.fabric.clique_id", "1", False, "Clique of the fabric", _of_registered(lambda gpu: int(_info(gpu).clique)), THOROUGH),
    Row("gpu.fabric.cluster_uuid", "1", False, "Cluster of the fabric",
        _of_registered(lambda gpu: str(uuid.UUID(bytes=bytes(_info(gpu).cluster)))), THOROUGH),
    Row("gpu.fabric.degraded_bandwidth", "1", False, "The fabric gives the GPU less bandwidth", _health(0)),
    Row("gpu.fabric.route_recovery", "1", False, "A route of the fabric is being recovered", _health(2)),
    Row("gpu.fabric.route_unhealthy", "1", False, "A route of the fabric is unhealthy", _health(4)),
    Row("gpu.fabric.access_timeout_recovery", "1", False, "The fabric recovers from an access that timed out", _health(6)),
    Row("gpu.fabric.incorrect_configuration", "1", False, "The fabric is configured wrongly",
        _health(8, 0b1111, _CONFIGURATION_RIGHT)),
    Row("gpu.c2c.enabled", "1", False, "Chip-to-chip links to the processor are in use",
        part("C2cModeInfoV", "isC2cEnabled", bool), ONCE),
    Row("gpu.c2c.link_count", "1", False, "Chip-to-chip links of the part", _c2c_links, THOROUGH),
    Row("gpu.c2c.missing_links", "1", False, "Chip-to-chip links that are down", _c2c_missing, THOROUGH),
)  # fmt: skip
