"""Settings, PCIe link, utilization and processes of a GPU."""

from __future__ import annotations

from collectors.nvml.gpu import RECOVERY_ACTION, NvmlGpu, field_value
from collectors.nvml.memory import change_pending
from collectors.nvml.rows import (
    CONSTANT,
    COUNTER,
    ONCE,
    SLOW,
    SNAPSHOT_ONLY,
    VARIES,
    Getter,
    Row,
    count,
    flag,
    item,
    name_of,
    named,
)

_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_ACTIONS = {
    0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "recover_imex_domain", 6: "bus_reset",
    7: "system_reboot",
}  # fmt: skip

RECOVERY, RESET = "gpu.recovery_action", _ACTIONS[1]


def _utilization(name: str) -> Getter:
    return lambda gpu: getattr(gpu.query("UtilizationRates"), name) / 100


def _processes(gpu: NvmlGpu) -> int:
    return len(gpu.query("ComputeRunningProcesses"))


def _recovery_action(gpu: NvmlGpu) -> str:
    return name_of(int(field_value(gpu.field(RECOVERY_ACTION))), _ACTIONS)


SETTINGS_ROWS = (
    Row("gpu.utilization", "ratio", VARIES, "Share of time in which a kernel ran", _utilization("gpu")),
    Row("gpu.memory.utilization", "ratio", VARIES, "Share of time in which memory was read or written", _utilization("memory")),
    Row("gpu.pcie.generation", "1", VARIES, "Current PCIe generation", count("CurrPcieLinkGeneration")),
    Row("gpu.pcie.generation_max", "1", CONSTANT, "PCIe generation that GPU and slot support",
        count("MaxPcieLinkGeneration"), ONCE),
    Row("gpu.pcie.generation_part", "1", CONSTANT, "PCIe generation that the GPU supports",
        count("GpuMaxPcieLinkGeneration"), ONCE),
    Row("gpu.pcie.width", "1", VARIES, "Current PCIe lanes", count("CurrPcieLinkWidth")),
    Row("gpu.pcie.width_max", "1", CONSTANT, "PCIe lanes that GPU and slot support", count("MaxPcieLinkWidth"), ONCE),
    Row("gpu.pcie.replays", "1", COUNTER, "PCIe replays", count("PcieReplayCounter"), SLOW),
    Row("gpu.mig.enabled", "1", CONSTANT, "MIG mode is active", item("MigMode", 0, bool), SLOW),
    Row("gpu.mig.change_pending", "1", VARIES, "The next reset changes the MIG mode", change_pending("MigMode"), SLOW),
    Row("gpu.persistence.enabled", "1", VARIES, "Persistence mode is enabled", flag("PersistenceMode")),
    Row("gpu.accounting.enabled", "1", CONSTANT, "Process accounting is enabled", flag("AccountingMode"), SNAPSHOT_ONLY),
    Row("gpu.compute_mode", "1", CONSTANT, "Compute mode", named("ComputeMode", _COMPUTE_MODES)),
    Row(RECOVERY, "1", VARIES, "Recovery action that the driver asks for", _recovery_action),
    Row("gpu.processes", "1", VARIES, "Compute processes", _processes),
)  # fmt: skip
