"""Readings and figures that no criterion judges, each with the reason. docs/checks.md shows this table.

A test (`test_every_reading.py`) gives every reading and figure a bad value. If no criterion finds the bad value, the reading or
figure must be in this table; otherwise it must not.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet.judge.criteria import name_matches

_LOAD = "depends on what runs at that moment"
_SUMMED = "throughput of the same measurement is judged"
_TRAFFIC = "counts normal traffic"
_CONGESTION = "counts congestion and peers that end a launch, which healthy fabrics have"
_VARIES = "healthy hosts of one order differ"
_NAME = "a name or a place; the identity of parts is judged by serial, UUID, GUID and MAC address"
_CONTAINERS = "sites differ in their container runtime; the role container_toolkit checks it on request"
_RANKS = "the versions that the ranks used are compared (launch.*)"
_DISKS = "hosts of one order may have different disks"
_DRIVER = "follows from driver.version, which is compared"
_STUDY = "a scaling study measures and does not accept"
_EXPLAINS = "explains a slow straggler.compute, which is judged"
_WAITING = "follows from the slowest rank, whose straggler.compute is judged"

INFORMATIONAL: Mapping[str, str] = {
    "benchmark.duration": "depends on how often a figure is repeated until it is precise; the figures themselves are judged",
    "clock.error_estimated": "clock.synchronized is judged; the estimate depends on the time server",
    "clock.error_max": "clock.synchronized is judged; the error depends on the time server",
    "clock.offset": "clock.synchronized is judged; the offset is what the kernel corrects at that moment",
    "collective.*.algbw": "busbw, which is judged, is the same figure times a factor",
    "collective.channels": "NCCL chooses their number; the resulting bandwidth is judged",
    "collective.transport": "explains a slow collective, whose bandwidth is judged",
    "container.cdi.driver_version": "container.cdi.current compares it with the loaded driver",
    "container.cdi.gpus": "container.cdi.current reports whether the specification is up to date",
    "container.containerd.nvidia_runtime": _CONTAINERS,
    "container.docker.default_runtime": _CONTAINERS,
    "container.docker.nvidia_runtime": _CONTAINERS,
    "container.runtime.present": _CONTAINERS,
    "container.toolkit.present": _CONTAINERS,
    "container.toolkit.version": _CONTAINERS,
    "driver.cuda_version": _DRIVER,
    "fashion_mnist.duration": _SUMMED,
    "gpu.bar1.used": _LOAD,
    "gpu.board_id": _NAME,
    "gpu.clock.application": "gpu.clock.lowered, which is judged, compares it with the part's default",
    "gpu.clock.memory": "idle GPUs lower their clocks; the maximum clock and the work under stress are judged",
    "gpu.clock.memory_application": "gpu.clock.lowered, which is judged, compares it with the part's default",
    "gpu.clock.sm": "idle GPUs lower their clocks; the maximum clock and the work under stress are judged",
    "gpu.ecc.corrected_dram_volatile": "gpu.ecc.corrected_volatile, which is judged, counts these errors too",
    "gpu.ecc.corrected_sram_volatile": "gpu.ecc.corrected_volatile, which is judged, counts these errors too",
    "gpu.ecc.uncorrectable_dram_volatile": "gpu.ecc.uncorrectable_volatile, which is judged, counts these errors too",
    "gpu.ecc.uncorrectable_sram_volatile": "gpu.ecc.uncorrectable_volatile, which is judged, counts these errors too",
    "gpu.energy": "grows with time and load",
    "gpu.fan.speed": "the fan follows the temperature, which is judged",
    "gpu.gsp.version": _DRIVER,
    "gpu.inforom.checksum": "differs with the settings stored on each part; gpu.inforom.valid reports whether it is right",
    "gpu.memory.used": "depends on what runs at that moment; GPUs in use are refused before a measurement",
    "gpu.memory.utilization": _LOAD,
    "gpu.minor_number": _NAME,
    "gpu.module_id": _NAME,
    "gpu.numa_node": _NAME,
    "gpu.nvlink.symbol_errors": "counts errors that were corrected; gpu.nvlink.effective_errors is judged",
    "gpu.part_number": "a part that was replaced may have another number",
    "gpu.performance_state": "idle GPUs lower their clocks",
    "gpu.persistence.enabled": "sites keep the driver loaded in other ways too; host.persistence_daemon is compared",
    "gpu.power": "depends on what runs at that moment; the power under stress is judged",
    "gpu.power_limit_set": "gpu.power_limit, the limit in force, is compared",
    "gpu.processes": "GPUs in use are refused before a measurement",
    "gpu.remapped_rows.banks_high": "follows from the number of remapped rows, which is judged",
    "gpu.remapped_rows.banks_max": "follows from the number of remapped rows, which is judged",
    "gpu.utilization": _LOAD,
    "gpu.throttle.active reason=hw_slowdown": "its causes, hw_thermal and hw_power_brake, are judged",
    "gpu.throttle.active reason=power_cap": "a healthy GPU reaches its power limit under load",
    "gpu.throttle.time reason=board_limit": "a healthy board reaches its limits at full load; the work under stress is judged",
    "gpu.throttle.time reason=power_cap": "a healthy GPU reaches its power limit under load",
    "gpu.throttle.time reason=reliability": "a healthy GPU reaches its highest voltage; the work under stress is judged",
    "gpu.throttle.time reason=sync_boost": "follows from the clocks of other GPUs, whose work under stress is judged",
    "host.cpu.clock_now_median": "idle processors lower their clocks",
    "host.cpu.clock_now_min": "idle processors lower their clocks",
    "host.dimm.label": _NAME,
    "host.dimm.uncorrected": "host.memory.ecc_uncorrected, which is judged, counts these errors too",
    "host.hugepages.free": _LOAD,
    "host.kernel.command_line": _VARIES,
    "host.kernel.soft_lockup": "a virtual machine that was paused for long also sets it",
    "host.kernel.tainted": "the NVIDIA module itself sets flags; those that show a fault are judged one by one",
    "host.load": _LOAD,
    "host.memory.available": _LOAD,
    "host.memory.ecc_corrected": "host.dimm.corrected, which is judged, counts the errors of each module",
    "host.numa.memory_free": _LOAD,
    "host.oom_kills": "a rank that was killed is reported as such; other processes may be killed by their own limits",
    "host.pressure.cpu": _LOAD,
    "host.pressure.io": _LOAD,
    "host.pressure.memory": _LOAD,
    "host.process.count": _LOAD,
    "host.process.uninterruptible": _LOAD,
    "host.process.zombie": _LOAD,
    "host.swap.total": _VARIES,
    "host.swap.used": _LOAD,
    "host.system.serial": "nodes of one chassis may share it; GPUs and adapters identify the host",
    "infiniband.hca.type": "infiniband.hca.board_id, which names the model too, is compared",
    "infiniband.hca.pci_address": _NAME,
    "infiniband.interface": _NAME,
    "infiniband.lid": "the subnet manager assigns it; infiniband.unmanaged reports whether it did",
    "infiniband.local_ack_timeout_err": _CONGESTION,
    "infiniband.np_cnp_sent": _CONGESTION,
    "infiniband.out_of_sequence": _CONGESTION,
    "infiniband.packet_seq_err": _CONGESTION,
    "infiniband.port_rcv_data": _TRAFFIC,
    "infiniband.port_xmit_data": _TRAFFIC,
    "infiniband.port_xmit_wait": _CONGESTION,
    "infiniband.rnr_nak_retry_err": _CONGESTION,
    "infiniband.roce_adp_retrans": _CONGESTION,
    "infiniband.rp_cnp_handled": _CONGESTION,
    "infiniband.sm_lid": "differs between the fabrics of a host, and after a failover; infiniband.unmanaged is judged",
    "network.bond.slaves_up": "network.bond.member_up, which is judged, names the member",
    "network.pci_address": _NAME,
    "network.rx_dropped": "counts packets of protocols that the host does not use",
    "network.rx_missed_errors": "counts packets lost in bursts; the rates of the fabric are judged",
    "network.tx_dropped": _CONGESTION,
    "overlap.hidden_share": "overlap.slowdown, which is judged, is the same measurement",
    "pcie.device_count": "each kind of device is counted by itself; virtual machines attach drives as PCI devices",
    "pcie.generation": "links lower their speed when idle; pcie.slowed judges the best value of the run",
    "pcie.iommu.group": _NAME,
    "pcie.port.address": _NAME,
    "pcie.power_state": "idle devices sleep",
    "scaling.accuracy": _STUDY,
    "scaling.duration": _STUDY,
    "scaling.hookup": _STUDY,
    "scaling.loss": _STUDY,
    "scaling.throughput": _STUDY,
    "software.cuda_toolkit.version": _RANKS,
    "software.driver_library.version": _DRIVER,
    "software.driver_module.version": _DRIVER,
    "software.glibc.version": "follows from the operating system, whose version is compared",
    "software.nccl.version": _RANKS,
    "software.os.id": "follows from the kernel release and software.os.version, which are compared",
    "software.os.name": "follows from the kernel release and software.os.version, which are compared",
    "software.python.version": _RANKS,
    "storage.disk.firmware": _DISKS,
    "storage.disk.io_errors": "also counts commands that the disk does not support",
    "storage.disk.model": _DISKS,
    "storage.disk.pci_address": _NAME,
    "storage.disk.rotational": _DISKS,
    "storage.disk.serial": _DISKS,
    "storage.disk.size": _DISKS,
    "storage.mount.available": "the preflight checks the space that the agent needs",
    "storage.mount.inodes_available": "the preflight checks the space that the agent needs",
    "storage.mount.read_only": "file systems are read-only by design too; storage.state.read_only is judged",
    "storage.mount.size": _DISKS,
    "storage.nvme.data_written": _TRAFFIC,
    "storage.nvme.power_on_time": "drives of one order are tested for different times",
    "storage.nvme.spare_threshold": "the manufacturer sets it; storage.nvme.critical_warning is judged",
    "storage.nvme.unsafe_shutdowns": "counts power losses, such as those of the assembly",
    "straggler.clock": _EXPLAINS,
    "straggler.communication": _WAITING,
    "straggler.cpu_pressure": _EXPLAINS,
    "straggler.cpu_throttled_share": _EXPLAINS,
    "straggler.cpu_time": _EXPLAINS,
    "straggler.cpu_wait": _EXPLAINS,
    "straggler.cpus": _EXPLAINS,
    "straggler.last_share": _WAITING,
    "straggler.launch": _EXPLAINS,
    "straggler.power": _EXPLAINS,
    "straggler.preemptions": _EXPLAINS,
    "straggler.step_time": _WAITING,
    "straggler.temperature": _EXPLAINS,
    "straggler.throttled_share": _EXPLAINS,
    "straggler.wait": _WAITING,
    "stress.clock": "follows from power and temperature; throughput and work per cycle are judged",
    "stress.efficiency": "throughput and power, its two parts, are judged",
    "stress.throttled_share reason=hw_slowdown": "its causes, hw_thermal and hw_power_brake, are judged",
    "stress.throttled_share reason=power_cap": "a healthy GPU reaches its power limit under stress",
    "sxid.last_seen": "the codes of SXids are judged (sxid.count)",
    "training.accuracy": "after two epochs it shows little; training.loss_ratio and fashion_mnist.accuracy are judged",
    "training.loss": "training.loss_ratio, which is judged, relates it to the first loss",
    "training.step_time": _SUMMED,
    "transformer.flops": _SUMMED,
    "transformer.memory_peak": "follows from the size of the network",
    "transformer.mfu": _SUMMED,
    "transformer.step_time": _SUMMED,
    "xid.log_complete": "a host that has run for long overwrites the beginning of its log; the log still has the XIDs of the run",
}
"""Name of a reading or figure -> the reason. A name with a setting is for that setting only; the others are judged."""


def reason_of(name: str, settings: Mapping[str, object] | None = None) -> str:
    """Return why no criterion judges the reading, or the figure with these settings; empty if a criterion must judge it."""
    for entry, reason in INFORMATIONAL.items():
        pattern, *wanted = entry.split()
        stated = {f"{key}={value}" for key, value in (settings or {}).items()}
        if name_matches(pattern, name) and stated >= {*wanted}:
            return reason
    return ""
