"""How a GPU is set, how it is connected, and what it is busy with."""

from __future__ import annotations

from collectors.nvml.gpu import RECOVERY_ACTION, Gpu, value
from collectors.nvml.memory import differs
from collectors.nvml.rows import ONCE, SLOW, THOROUGH, Getter, Row, count, flag, name_of, named, place

_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_ACTIONS = {
    0: "none", 1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset", 5: "recover_imex_domain", 6: "bus_reset",
    7: "system_reboot",
}  # fmt: skip


def _share(what: str) -> Getter:
    return lambda gpu: getattr(gpu.ask("UtilizationRates"), what) / 100


def _processes(gpu: Gpu) -> int:
    return len(gpu.ask("ComputeRunningProcesses"))


def _recovery_action(gpu: Gpu) -> str:
    return name_of(int(value(gpu.field(RECOVERY_ACTION))), _ACTIONS)


SETTINGS_ROWS = (
    Row("gpu.utilization", "ratio", False, "Share of time a kernel ran", _share("gpu")),
    Row("gpu.memory.utilization", "ratio", False, "Share of time memory moved", _share("memory")),
    Row("gpu.pcie.generation", "1", False, "PCIe generation in use", count("CurrPcieLinkGeneration")),
    Row("gpu.pcie.generation_max", "1", False, "PCIe generation of part and slot", count("MaxPcieLinkGeneration"), ONCE),
    Row("gpu.pcie.generation_part", "1", False, "PCIe generation of the part itself", count("GpuMaxPcieLinkGeneration"), ONCE),
    Row("gpu.pcie.width", "1", False, "PCIe lanes in use", count("CurrPcieLinkWidth")),
    Row("gpu.pcie.width_max", "1", False, "PCIe lanes of part and slot", count("MaxPcieLinkWidth"), ONCE),
    Row("gpu.pcie.replays", "1", True, "PCIe replays", count("PcieReplayCounter"), SLOW),
    Row("gpu.mig.enabled", "1", False, "MIG mode in force", place("MigMode", 0, bool), SLOW),
    Row("gpu.mig.change_pending", "1", False, "MIG mode will be another from the next reset on", differs("MigMode"), SLOW),
    Row("gpu.persistence.enabled", "1", False, "Persistence mode", flag("PersistenceMode")),
    Row("gpu.accounting.enabled", "1", False, "Accounting of processes", flag("AccountingMode"), THOROUGH),
    Row("gpu.compute_mode", "1", False, "Who may use the GPU", named("ComputeMode", _COMPUTE_MODES)),
    Row("gpu.recovery_action", "1", False, "What the driver says has to be done to make the GPU whole", _recovery_action),
    Row("gpu.processes", "1", False, "Compute processes", _processes),
)  # fmt: skip
