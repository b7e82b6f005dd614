"""A GPU's registration with the NVLink fabric, and its chip-to-chip links (NVLink-C2C) to a Grace CPU."""

from __future__ import annotations

import ctypes
import uuid

import pynvml as nvml

from collectors.base import Absent, ReadingError
from collectors.nvml.calls import translate, unsupported_error
from collectors.nvml.gpu import NvmlGpu, field_value
from collectors.nvml.rows import CONSTANT, ONCE, SNAPSHOT_ONLY, VARIES, Getter, Row, attribute

_STATES = {1: "not_started", 2: "in_progress", 3: "completed"}
_NOT_SUPPORTED, _COMPLETED = 0, 3
_SUMMARIES = {2: "unhealthy", 3: "limited_capacity"}
"""Summaries of a registered GPU's health that mean a fault (nvml.h, NVML_GPU_FABRIC_HEALTH_SUMMARY_*)."""
_TRUE = 1
_CONFIGURATION_OK = 1
_C2C_LINKS, _C2C_STATUS = 170, 171


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v3_t. Declared here because the UUID in nvidia-ml-py 12 has another length than in the driver."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_uint),
        ("health", ctypes.c_uint),
        ("summary", ctypes.c_ubyte),
    )


_V2_BYTES = _FabricInfo.summary.offset
"""Size of nvmlGpuFabricInfo_v2_t, which ends before the summary. Drivers before R575 have no v3."""


def _fabric_info(gpu: NvmlGpu) -> _FabricInfo:
    """Return the GPU's registration. Raises ReadingError if it cannot be read, or the GPU belongs to no fabric."""

    def query() -> _FabricInfo:
        info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 3 << 24)
        try:
            gpu.query_into("GpuFabricInfoV", info)
        except ReadingError as error:
            if error.absent.status != "unsupported":
                raise
            info = _FabricInfo(version=_V2_BYTES | 2 << 24)
            gpu.query_into("GpuFabricInfoV", info)
        if info.state == _NOT_SUPPORTED:
            raise unsupported_error("the part belongs to no NVLink fabric")
        return info

    return gpu.cached("fabric", query)


def _registration(gpu: NvmlGpu) -> str:
    info = _fabric_info(gpu)
    if info.state == _COMPLETED and info.status:
        return f"failed: {translate(nvml.NVMLError(info.status)).reason.removeprefix('NVML: ')}"
    return _STATES.get(info.state, f"unknown ({info.state})")


def _state(gpu: NvmlGpu) -> str:
    """Return the state of the registration or, if the GPU is registered but not healthy, the name of the fault (_SUMMARIES)."""
    registration = _registration(gpu)
    return _SUMMARIES.get(_fabric_info(gpu).summary, registration) if registration == "completed" else registration


def _if_registered(get: Getter) -> Getter:
    """Return a getter of a value that exists only after the GPU has registered."""

    def get_if_registered(gpu: NvmlGpu) -> object:
        state = _registration(gpu)
        if state != "completed":
            raise ReadingError(Absent.error(f"the registration with the fabric is {state}"))
        return get(gpu)

    return get_if_registered  # type: ignore[return-value]


def _health(shift: int, mask: int = 0b11, healthy: int | None = None) -> Getter:
    """Return a getter that returns whether one item of the health word, `health >> shift & mask`, reports a problem.

    If the item is 0, the fabric does not report it, and the getter raises ReadingError. Without `healthy`, only 1 is a problem.
    With `healthy`, every value except 0 and `healthy` is a problem.
    """

    def is_unhealthy(gpu: NvmlGpu) -> bool:
        bits = _fabric_info(gpu).health >> shift & mask
        if bits == 0:
            raise unsupported_error("the fabric does not report it")
        return bool(bits == _TRUE if healthy is None else bits != healthy)

    return is_unhealthy


def _c2c_links(gpu: NvmlGpu) -> int:
    links = int(field_value(gpu.field(_C2C_LINKS)))
    if not links:
        raise unsupported_error("the part has no chip-to-chip links")
    return links


def _c2c_missing(gpu: NvmlGpu) -> int:
    links = _c2c_links(gpu)
    states = gpu.fields((_C2C_STATUS, link) for link in range(links))
    return sum(not field_value(state) for state in states.values())


FABRIC_ROWS = (
    Row("gpu.fabric.state", "1", VARIES, "Registration with the NVLink fabric; completed: registered and healthy", _state),
    Row("gpu.fabric.clique_id", "1", CONSTANT, "Clique ID in the fabric",
        _if_registered(lambda gpu: int(_fabric_info(gpu).clique)), SNAPSHOT_ONLY),
    Row("gpu.fabric.cluster_uuid", "1", CONSTANT, "Cluster UUID of the fabric",
        _if_registered(lambda gpu: str(uuid.UUID(bytes=bytes(_fabric_info(gpu).cluster)))), SNAPSHOT_ONLY),
    Row("gpu.fabric.degraded_bandwidth", "1", VARIES, "The fabric provides reduced bandwidth to the GPU", _health(0)),
    Row("gpu.fabric.route_recovery", "1", VARIES, "A route of the fabric is being recovered", _health(2)),
    Row("gpu.fabric.route_unhealthy", "1", VARIES, "A route of the fabric is unhealthy", _health(4)),
    Row("gpu.fabric.access_timeout_recovery", "1", VARIES, "The fabric is recovering from an access timeout", _health(6)),
    Row("gpu.fabric.incorrect_configuration", "1", VARIES, "The fabric configuration is incorrect",
        _health(8, 0b1111, _CONFIGURATION_OK)),
    Row("gpu.c2c.enabled", "1", CONSTANT, "Chip-to-chip links to the processor are enabled",
        attribute("C2cModeInfoV", "isC2cEnabled", bool), ONCE),
    Row("gpu.c2c.link_count", "1", CONSTANT, "Chip-to-chip links of the part", _c2c_links, SNAPSHOT_ONLY),
    Row("gpu.c2c.missing_links", "1", VARIES, "Chip-to-chip links that are down", _c2c_missing, SNAPSHOT_ONLY),
)  # fmt: skip
