"""Identity and firmware of a GPU."""

from __future__ import annotations

import ctypes

import pynvml as nvml

from collectors.base import Absent, ReadingError
from collectors.nvml.calls import NOT_AVAILABLE, binding, decode, unsupported_error
from collectors.nvml.gpu import NvmlGpu
from collectors.nvml.rows import CONSTANT, ONCE, SNAPSHOT_ONLY, VARIES, Row, count, named, text

_BRANDS = {
    1: "quadro",
    2: "tesla",
    5: "geforce",
    7: "vapps",
    8: "vpc",
    9: "vcs",
    10: "vws",
    12: "quadro_rtx",
    13: "rtx",
    14: "nvidia",
}
_ARCHITECTURES = {
    2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada", 9: "hopper", 10: "blackwell",
    13: "rubin",
}  # fmt: skip
_VIRTUALIZATION = {0: "none", 1: "passthrough", 2: "vgpu", 3: "host_vgpu", 4: "host_vsga"}
_ADDRESSING = {0: "none", 1: "hmm", 2: "ats"}
_GSP_VERSION_BYTES = 64


def _capability(gpu: NvmlGpu) -> str:
    major, minor = gpu.query("CudaComputeCapability")
    return f"{major}.{minor}"


def _serial(gpu: NvmlGpu) -> str:
    """Return the serial of the board. A serial of zeros only is rejected, because several GPUs may report it."""
    serial = decode(gpu.query("Serial"))
    if not serial.strip("0 "):
        raise ReadingError(Absent.unsupported(f"NVML reports {serial!r}, which is not a serial number"))
    return serial


def _module(gpu: NvmlGpu) -> int:
    module = ctypes.c_uint()
    gpu.query_into("ModuleId", module)
    return module.value


def _numa_node(gpu: NvmlGpu) -> int:
    """Return the NUMA node of the GPU's memory.

    For memory without a node, a driver may set all bits of the number. `query` then raises ReadingError with NOT_AVAILABLE.
    """
    try:
        return int(gpu.query("NumaNodeId"))
    except ReadingError as error:
        if error.absent == NOT_AVAILABLE:
            raise unsupported_error("the memory of the GPU is not a NUMA node") from None
        raise


def _gsp_version(gpu: NvmlGpu) -> str:
    version = ctypes.create_string_buffer(_GSP_VERSION_BYTES)
    gpu.query_into("GspFirmwareVersion", version)
    return decode(version.value)


def _gsp_enabled(gpu: NvmlGpu) -> bool:
    enabled, default = ctypes.c_uint(), ctypes.c_uint()
    gpu.query_into("GspFirmwareMode", enabled, default)
    return bool(enabled.value)


def _inforom_valid(gpu: NvmlGpu) -> bool:
    """Return whether the checksums in the InfoROM are valid. To find out, NVML reads the whole InfoROM."""
    validate = binding("nvmlDeviceValidateInforom")
    try:
        validate(gpu.handle)
    except nvml.NVMLError_CorruptedInforom:
        return False
    return True


IDENTITY_ROWS = (
    Row("gpu.name", "1", CONSTANT, "Product name", text("Name"), ONCE),
    Row("gpu.serial", "1", CONSTANT, "Serial number of the board", _serial, ONCE),
    Row("gpu.pci_bus_id", "1", CONSTANT, "PCI address", lambda gpu: decode(gpu.query("PciInfo").busId)),
    Row("gpu.vbios_version", "1", CONSTANT, "VBIOS version", text("VbiosVersion"), ONCE),
    Row("gpu.part_number", "1", CONSTANT, "Board part number", text("BoardPartNumber"), ONCE),
    Row("gpu.brand", "1", CONSTANT, "Brand", named("Brand", _BRANDS), ONCE),
    Row("gpu.architecture", "1", CONSTANT, "Architecture", named("Architecture", _ARCHITECTURES), ONCE),
    Row("gpu.compute_capability", "1", CONSTANT, "CUDA compute capability", _capability, ONCE),
    Row("gpu.core_count", "1", CONSTANT, "CUDA cores", count("NumGpuCores"), ONCE),
    Row("gpu.minor_number", "1", CONSTANT, "Minor number of the /dev/nvidia device", count("MinorNumber"), ONCE),
    Row("gpu.module_id", "1", CONSTANT, "Slot of the module on its baseboard", _module, ONCE),
    Row("gpu.board_id", "1", CONSTANT, "Board ID; the GPUs of one board share it", count("BoardId"), ONCE),
    Row("gpu.numa_node", "1", CONSTANT, "NUMA node of the GPU's memory", _numa_node, ONCE, signed=True),
    Row("gpu.virtualization", "1", CONSTANT, "Virtualization mode",
        named("VirtualizationMode", _VIRTUALIZATION), ONCE),
    Row("gpu.addressing_mode", "1", CONSTANT, "Addressing mode of host memory", named("AddressingMode", _ADDRESSING), ONCE),
    Row("gpu.gsp.version", "1", CONSTANT, "Firmware of the GPU System Processor", _gsp_version, ONCE),
    Row("gpu.gsp.enabled", "1", CONSTANT, "The driver runs on the GPU System Processor", _gsp_enabled, ONCE),
    Row("gpu.inforom.version", "1", CONSTANT, "InfoROM image version", text("InforomImageVersion"), ONCE),
    Row("gpu.inforom.valid", "1", VARIES, "The InfoROM checksums are valid", _inforom_valid, SNAPSHOT_ONLY),
    Row("gpu.inforom.checksum", "1", CONSTANT, "Checksum of the InfoROM configuration",
        lambda gpu: f"0x{gpu.query('InforomConfigurationChecksum'):08x}", SNAPSHOT_ONLY),
)  # fmt: skip
