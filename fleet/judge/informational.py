"""Readings (from snapshots) and figures (from benchmarks) that no criterion judges, each with the reason.

The page docs/checks.md shows this table.

A test (`test_every_reading.py`) gives every reading and figure a bad value. If no criterion finds the bad value, the reading or
figure must be in this table; otherwise it must not.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleet.judge.criteria import name_matches

_LOAD = "depends on what runs when the snapshot is taken"
_SAME_MEASUREMENT = "the throughput from the same measurement is judged"
_TRAFFIC = "counts normal traffic"
_CONGESTION = "rises with congestion, or when another host ends its part of a launch; both occur in healthy fabrics"
_CORRECTED = "counts errors that FEC corrects; errors that FEC does not correct are judged"
_VARIES = "may differ between healthy hosts of one order"
_NAME = "a name or a location; parts are identified by serial, UUID, GUID and MAC address"
_CONTAINERS = "sites use different container runtimes; the Ansible role `container_toolkit` checks them on request"
_ADVISORIES = "compared with published vulnerabilities; a site may choose to reject vulnerable versions (versions.md)"
_RANKS = "the versions that the ranks used in a launch are compared instead (launch.*)"
_REMOVAL = "depends on the caches of the file system; the rate at which files are created is judged (op=create)"
_LOOKUP = "looks up the files of another host, and depends on caches; the rate at which files are created is judged (op=create)"
_CHECKPOINT = "shared_storage.bandwidth, over the same path, is judged; the bytes that are read back are checked too"
_SERIAL = "identifies a part, so every part has a different value"
_DISKS = "hosts of one order may have different disks"
_IMEX = "the check `nvlink-domain` judges it, but only on hosts in an NVLink domain of several hosts"
_DRIVER = "follows from driver.version, which is compared"
_LIMIT = "a limit of the module; optics.*.alarm and .warning compare the reading with it, and are judged"
_SRD = "SRD, the protocol of EFA, retransmits and changes paths in a healthy network too; the rates of the fabric are judged"
_ENDED = "also rises when another host ends its part of a launch; the rates of the fabric are judged"
_STUDY = "a scaling study only measures; it does not judge hardware"
_EXPLAINS = "explains a slow straggler.compute, which is judged"
_SHORT_PERIOD = (
    "too few matrix products in so short a period for a precise value; periods of 100 ms and more are judged"
)
_WAITING = "follows from the slowest rank, whose straggler.compute is judged"

_EXPERTS = "mixture_of_experts.throughput, which is judged, is the same measurement"
_BMC_SERIAL = "compared with the serial that the host itself reports (check `bmc-serial`)"

INFORMATIONAL: Mapping[str, str] = {
    "benchmark.duration": "depends on how often a figure is repeated until it is precise; the figures themselves are judged",
    "bmc.chassis.serial": _BMC_SERIAL,
    "bmc.event.message": "the text of the entry; its bmc.event.severity is judged",
    "bmc.firmware.part": "parts of several vendors are mixed on purpose; their bmc.firmware.version is compared within a model",
    "bmc.gpu.serial": _BMC_SERIAL,
    "bmc.log.entries": "a log keeps old entries; the new ones are judged (bmc.event.severity)",
    "bmc.log.newest": "shows which entries of the next reading are new",
    "bmc.outlet.temperature": "depends on the load; the sensor's own limit is judged (bmc.sensor.alarm)",
    "bmc.system.serial": _BMC_SERIAL,
    "clock.error_estimated": "clock.synchronized is judged; the estimate depends on the time server",
    "clock.error_max": "clock.synchronized is judged; the error depends on the time server",
    "clock.offset": "clock.synchronized is judged; the offset is what the kernel corrects at that moment",
    "collective.*.algbw": "busbw, which is judged, is the same figure times a factor",
    "collective.channels": "NCCL chooses the number of channels; the resulting bandwidth is judged",
    "collective.transport": "explains a slow collective, whose bandwidth is judged",
    "container.cdi.driver_version": "container.cdi.current compares it with the loaded driver",
    "container.cdi.gpus": "container.cdi.current reports whether the CDI specification is up to date",
    "container.containerd.nvidia_runtime": _CONTAINERS,
    "container.docker.default_runtime": _CONTAINERS,
    "container.docker.nvidia_runtime": _CONTAINERS,
    "container.containerd.package_version": _ADVISORIES,
    "container.containerd.version": _ADVISORIES,
    "container.runc.package_version": _ADVISORIES,
    "container.runc.version": _ADVISORIES,
    "container.runtime.present": _CONTAINERS,
    "container.toolkit.present": _CONTAINERS,
    "container.toolkit.version": _ADVISORIES,
    "driver.cuda_version": _DRIVER,
    "fabric.imex.address": _NAME,
    "fabric.imex.connection": _IMEX,
    "fabric.imex.domain_state": "fabric.imex.connection, which is judged, names the host that degrades the domain",
    "fabric.imex.node_address": _NAME,
    "fabric.imex.node_count": _IMEX,
    "fabric.imex.node_version": "daemons with incompatible versions do not connect (fabric.imex.connection)",
    "fabric.imex.running": "compared only in an NVLink domain of several hosts: on other hosts, IMEX need not run",
    "fabric.imex.state": _IMEX,
    "fashion_mnist.duration": _SAME_MEASUREMENT,
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
    "gpu.memory.used": "depends on what runs when the snapshot is taken; no measurement starts on a GPU that is in use",
    "gpu.memory.utilization": _LOAD,
    "gpu.minor_number": _NAME,
    "gpu.module_id": _NAME,
    "gpu.numa_node": _NAME,
    "gpu.nvlink.symbol_errors": "counts errors that were corrected; gpu.nvlink.effective_errors is judged",
    "gpu.part_number": "a replacement GPU may have another part number",
    "gpu.performance_state": "idle GPUs lower their clocks",
    "gpu.persistence.enabled": "sites keep the driver loaded in other ways too; host.persistence_daemon is compared",
    "gpu.power": "depends on what runs when the snapshot is taken; the power under stress is judged",
    "gpu.power_limit_set": "gpu.power_limit, the limit in force, is compared",
    "gpu.processes": "no measurement starts on a GPU that is in use",
    "gpu.remapped_rows.banks_high": "follows from the number of remapped rows, which is judged",
    "gpu.remapped_rows.banks_max": "follows from the number of remapped rows, which is judged",
    "gpu.utilization": _LOAD,
    "gpu.throttle.active reason=hw_slowdown": "its causes, hw_thermal and hw_power_brake, are judged",
    "gpu.throttle.active reason=power_cap": "a healthy GPU reaches its power limit under load",
    "gpu.throttle.time reason=board_limit": "a healthy board reaches its limits at full load; the work under stress is judged",
    "gpu.throttle.time reason=power_cap": "a healthy GPU reaches its power limit under load",
    "gpu.throttle.time reason=reliability": "a healthy GPU reaches its highest voltage; the work under stress is judged",
    "gpu.throttle.time reason=sync_boost": "follows from the clocks of other GPUs, whose work under stress is judged",
    "host.boot_id": "differs between machines and boots; hosts that share one are reported as one machine, a change as a reboot",
    "host.cpu.busy": _LOAD,
    "host.cpu.stolen": "not a fault of the host; if it is more than 10 % of the time of a stage, the report has a caveat",
    "host.cpu.clock_now_median": "idle processors lower their clocks",
    "host.cpu.clock_now_min": "idle processors lower their clocks",
    "host.dimm.label": _NAME,
    "host.dimm.manufacturer": "modules of several manufacturers are mixed on purpose",
    "host.dimm.part_number": "modules of several manufacturers are mixed on purpose",
    "host.dimm.serial": _SERIAL,
    "host.dimm.slot_count": "each slot is compared (host.dimm.populated)",
    "host.dimm.speed": "host.memory.speed, which is judged, is that of the slowest module",
    "host.dimm.type": "the board takes one type only",
    "host.dimm.uncorrected": "host.memory.ecc_uncorrected, which is judged, counts these errors too",
    "host.hugepages.free": _LOAD,
    "host.kernel.command_line": _VARIES,
    "host.kernel.soft_lockup": "also set after a virtual machine was paused for a long time",
    "host.kernel.tainted": "the NVIDIA module itself sets flags; those that show a fault are judged one by one",
    "host.load": _LOAD,
    "host.memory.available": _LOAD,
    "host.memory.ecc_corrected": "host.dimm.corrected, which is judged, counts the errors of each module",
    "host.memory.usable_share": "low if the firmware disables or mirrors modules; host.memory.total is compared",
    "host.numa.memory_free": _LOAD,
    "host.numa.processors": "host.cpu.threads, the number of the host, is compared; nodes with processors must be measured",
    "host.oom_kills": "a rank that was killed is reported as such; other processes may exceed memory limits of their own",
    "host.pressure.cpu": _LOAD,
    "host.pressure.io": _LOAD,
    "host.pressure.memory": _LOAD,
    "host.process.count": _LOAD,
    "host.process.uninterruptible": _LOAD,
    "host.process.zombie": _LOAD,
    "host.swap.total": _VARIES,
    "host.swap.used": _LOAD,
    "host.system.serial": "nodes of one chassis may share it; GPUs and adapters identify the host",
    "infiniband.efa.cmds_err": "counts commands that the adapter or its firmware does not support",
    "infiniband.efa.impaired_remote_conn_events": _SRD,
    "infiniband.efa.rdma_read_wr_err": _ENDED,
    "infiniband.efa.rdma_write_wr_err": _ENDED,
    "infiniband.efa.retrans_pkts": _SRD,
    "infiniband.efa.retrans_timeout_events": _SRD,
    "infiniband.efa.rx_drops": _CONGESTION,
    "infiniband.efa.unresponsive_remote_events": _ENDED,
    "infiniband.hca.type": "infiniband.hca.board_id, which names the model too, is compared",
    "infiniband.hca.pci_address": _NAME,
    "infiniband.interface": _NAME,
    "infiniband.lid": "the subnet manager assigns it; infiniband.unmanaged reports whether it did",
    "infiniband.np_cnp_sent": _CONGESTION,
    "infiniband.out_of_sequence": _CONGESTION,
    "infiniband.port_rcv_data": _TRAFFIC,
    "infiniband.port_xmit_data": _TRAFFIC,
    "infiniband.port_xmit_wait": _CONGESTION,
    "infiniband.rnr_nak_retry_err": _CONGESTION,
    "infiniband.rp_cnp_handled": _CONGESTION,
    "infiniband.sm_lid": "differs between the fabrics of a host, and after a failover; infiniband.unmanaged is judged",
    "infiniband.switch": "the switch chooses its name; hosts are compared by infiniband.switch_id",
    "infiniband.switch_port": "differs from host to host; compared with the manifest if that lists the cables (kind `link`)",
    "network.bond.slaves_up": "network.bond.member_up, which is judged, names the member",
    "inference.cache_share": "a setting of the benchmark; the rates and the tokens are judged",
    "inference.first_token": "inference.prefill_throughput, which is judged, is the same measurement",
    "inference.token_interval percentile=p50": "inference.decode_throughput, which is judged, is the same measurement",
    "inference.token_interval percentile=p99_9": "other processes of the host lengthen it; percentile p99 is judged",
    "mixture_of_experts.mfu": _EXPERTS,
    "mixture_of_experts.step_time": _EXPERTS,
    "network.pci_address": _NAME,
    "network.rx_dropped": "counts packets of protocols that the host does not use",
    "network.rx_missed_errors": "counts packets lost during bursts of traffic; the rates of the fabric are judged",
    "network.switch": "the switch chooses its name; hosts are compared by network.switch_id",
    "network.switch_port": "differs from host to host; compared with the manifest if that lists the cables (kind `link`)",
    "network.switch_port_label": "compared, like network.switch_port, with the manifest if that lists the cables",
    "network.tx_dropped": _CONGESTION,
    "optics.bias": "optics.bias.alarm and .warning, which are judged, compare it with the limits of the module",
    **{f"optics.*.{level}_{side}": _LIMIT for level in ("alarm", "warning") for side in ("low", "high")},
    "optics.module.firmware_version": "modules of one order may have different firmware; the table of versions lists it",
    "optics.module.part_number": "cables differ in length; the table of versions lists it",
    "optics.module.serial": "compared with the manifest if that lists the modules (kind `module`)",
    "optics.module.state": "ports without a link keep their modules in low power; optics.module.fault is judged",
    "optics.module.type": "ports of one host may have different modules",
    "optics.module.vendor": "modules of one order may come from several vendors",
    "optics.tx_power": "optics.tx_power.alarm and .warning, which are judged, compare it with the limits of the module",
    "optics.voltage": "optics.voltage.alarm and .warning, which are judged, compare it with the limits of the module",
    "kernel_launch.latency percentile=p99": "interrupts and other processes of the host lengthen it; percentile p50 is judged",
    "integrity.error": "describes a word that integrity.wrong_words, which is judged, counts",
    "overlap.hidden_share": "overlap.slowdown, which is judged, is the same measurement",
    **{
        f"pulse.alone_{figure}": "shows whether a GPU is also slow when it runs alone; pulse.work and pulse.amplitude are judged"
        for figure in ("amplitude", "work")
    },
    "pulse.clock": "follows from power and temperature; pulse.work is judged",
    "pulse.clock_uncertainty": "depends on the network between the hosts, not on a part; 0 on a host that is measured alone",
    "pulse.duty": "pulse.kept_share, the share of the periods whose load began on time, is judged",
    "pulse.period": "pulse.kept_share, the share of the periods whose load began on time, is judged",
    "pulse.phase_error": "pulse.kept_share is judged; the error also depends on the network between the hosts",
    "pulse.work period_ms=20": _SHORT_PERIOD,
    "pulse.work period_ms=5": _SHORT_PERIOD,
    "pulse.work_share period_ms=20": _SHORT_PERIOD,
    "pulse.work_share period_ms=5": _SHORT_PERIOD,
    "pulse.slew": "no vendor publishes a limit, and NVML updates too slowly to show the real rise; pulse.amplitude is judged",
    "pulse.wave": "the power during a period, for a chart; pulse.amplitude is judged",
    "pageable_copy.bandwidth": "depends on the CPUs that copy: GPUs of one host differ by 18 % (measured); host_copy is judged",
    "pcie.device_count": "each kind of device is counted by itself; virtual machines attach drives as PCI devices",
    "pcie.driver": "if a GPU is missing because another driver has it, the verdict on gpu.count names that driver",
    "pcie.generation": "links lower their speed when idle; pcie.slowed is judged by its best value in the run",
    "pcie.iommu.group": _NAME,
    "pcie.nearest_nics": "pcie.nic_path, the path to these adapters, is compared",
    "pcie.port.address": _NAME,
    "pcie.power_state": "idle devices sleep",
    "port.allowance_exceeded": "shows the limit of a cloud instance, not a fault",
    "port.corrected_bits": _CORRECTED,
    "port.counter_age": "serves to compute the rates of the port's counters before the run; these rates are judged",
    "port.ecn_marked": _CONGESTION,
    "port.fec_corrected": _CORRECTED,
    "port.out_of_buffer": _CONGESTION,
    "port.pfc_received": _CONGESTION,
    "port.pfc_sent": _CONGESTION,
    "port.raw_errors": _CORRECTED,
    "port.rx_discards": _CONGESTION,
    "port.speed": "the speed of the port as text; as a number it is compared (infiniband.rate, network.speed)",
    "port.status": "explains port.status_opcode, which is judged",
    "port.tx_discards": _CONGESTION,
    "scaling.accuracy": _STUDY,
    "scaling.duration": _STUDY,
    "scaling.hookup": _STUDY,
    "scaling.loss": _STUDY,
    "scaling.throughput": _STUDY,
    "shared_storage.checkpoint_bandwidth": _CHECKPOINT,
    "shared_storage.metadata_rate op=remove": _REMOVAL,
    "shared_storage.metadata_rate op=stat": _LOOKUP,
    "shared_storage.ramp_bandwidth": "shows where the file system saturates; the bandwidth of all clients together is judged",
    "shared_storage.saturation_clients": "a property of the file system, not a fault",
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
    "storage.disk.serial": _SERIAL,
    "storage.disk.size": _DISKS,
    "storage.mount.available": "the preflight checks the space that the agent needs",
    "storage.mount.inodes_available": "the preflight checks the space that the agent needs",
    "storage.mount.read_only": "some file systems are read-only by design; storage.state.read_only is judged",
    "storage.mount.size": _DISKS,
    "storage.nvme.data_written": _TRAFFIC,
    "storage.nvme.power_on_time": "drives of one order have run for different times",
    "storage.nvme.spare_threshold": "the manufacturer sets it; storage.nvme.critical_warning is judged",
    "storage.nvme.unsafe_shutdowns": "counts power losses, such as those while the host was assembled",
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
    "stress.efficiency": "throughput divided by power, which are both judged",
    "stress.throttled_share reason=hw_slowdown": "its causes, hw_thermal and hw_power_brake, are judged",
    "stress.throttled_share reason=power_cap": "a healthy GPU reaches its power limit under stress",
    "sxid.last_seen": "each SXid is judged by its code (sxid.count)",
    "training.accuracy": "measured after too few epochs for a limit; training.loss_ratio and fashion_mnist.accuracy are judged",
    "training.loss": "training.loss_ratio, which is judged, relates it to the first loss",
    "training.step_time": _SAME_MEASUREMENT,
    "transformer.flops": _SAME_MEASUREMENT,
    "transformer.memory_peak": "follows from the size of the neural network",
    "transformer.mfu": _SAME_MEASUREMENT,
    "transformer.step_time": _SAME_MEASUREMENT,
    "xid.log_complete": "after a long uptime the beginning of the kernel log is overwritten; the XIDs of the run are still in it",
}
"""Name of a reading or figure -> the reason. An entry with a setting, such as `reason=power_cap`, applies only to observations
with this value of the setting."""


def reason_of(name: str, settings: Mapping[str, object] | None = None) -> str:
    """Return why no criterion judges the reading, or the figure with these settings; empty if a criterion must judge it."""
    for entry, reason in INFORMATIONAL.items():
        pattern, *wanted = entry.split()
        stated = {f"{key}={value}" for key, value in (settings or {}).items()}
        if name_matches(pattern, name) and stated >= {*wanted}:
            return reason
    return ""
