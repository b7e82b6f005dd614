"""Describe how to act on a cause: what to do at the host, and what to do if the fault comes back. No code parses these texts."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from schemas.reports import FAIL, Cause
from schemas.scopes import HOST, Scope


class Handling(NamedTuple):
    """How to act on a cause."""

    now: str
    """What to do first, in a few sentences; empty if there is nothing to do."""
    if_it_returns: str
    """What to do if the next run shows the cause again; empty if there is nothing to do."""


def handling(cause: Cause) -> Handling:
    """Return how to act on a cause; empty texts for a cause that a waiver covers, or that needs no action."""
    if cause.waiver:
        return NOTHING
    if cause.verdict != FAIL:
        return WITHOUT_EVIDENCE.get(cause.problem, _MEASURE_AGAIN)
    kind = Scope.parse(cause.part).device_kind
    action, family = cause.action, ""
    if any(fnmatchcase(cause.problem, pattern) for pattern in OF_SOFTWARE):
        # A site's criterion may name any action, but no action on hardware corrects software.
        action, family = action if action in ("reboot", "none") else "configure", _SOFTWARE
    ways = ((cause.problem, action, kind), (cause.problem, action, ""), (family, action, kind), (family, action, ""))
    return next((HANDLING[way] for way in ways if way in HANDLING), None) or OF_ACTION.get(action, NOTHING)


OF_SOFTWARE = (
    "software.*",
    "driver.*",
    "container.*",
    "clock.*",
    "host.module.*",
    "host.persistence_daemon",
    "fabric.manager.*",
    "pcie.acs.*",
)
"""Patterns of readings of software and settings of a host: if they fail, no part is faulty."""
_SOFTWARE = "software"
"""Stands for all problems that `OF_SOFTWARE` matches, in the keys of HANDLING."""


NOTHING = Handling("", "")
_MEASURE_AGAIN = Handling(
    "Fix what the cause names, then resume the run or measure the host again.",
    "read the logs of failed launches on the page of the host.",
)
WITHOUT_EVIDENCE = {
    "too-few-peers": Handling(
        "Measure as many parts of this model in one run as the cause states. If the fleet has fewer, remove the pack that "
        "requires the comparison from rackproof_criteria, or from --criteria of rackproof report.",
        "look in the report for the other parts of this model: their figures may be missing.",
    ),
    "no-majority": Handling(
        "Measure the GPUs in one run with more GPUs of the same model and software, so that a majority shows which of them "
        "are wrong. Do not use them until then.",
        "measure them together with still more GPUs.",
    ),
    "no-baseline": Handling(
        "Measure the part in a full run without rackproof_baseline. If this run is accepted, add it to the baseline: rackproof "
        "baseline accept. Then measure the part again with rackproof_baseline.",
        "compare profile and settings of the accepted run with those of this run, because only equal figures are compared.",
    ),
    "noisy-baseline": Handling(
        "Measure the part in three or more full runs without rackproof_baseline, and add the accepted ones to the baseline: "
        "rackproof baseline accept. Then measure the part again with rackproof_baseline.",
        "find what makes the figure of a healthy part vary: other jobs, power limits or temperature.",
    ),
    "no-record": Handling(
        "Fix what the cause names, then resume the run or measure the host again.",
        "check power, BMC, network and disk space of the host.",
    ),
    "contradictory-record": Handling(
        "Fix what the cause names, then delete the records of the host from the run directory and resume the run.",
        "compare name, address, clock and serials of the host with the inventory.",
    ),
    "clock-skew": Handling(
        "Compare the clock of the host with that of the control node and correct the wrong one (chronyc tracking). Then "
        "measure the host again.",
        "check the time server, the battery of the mainboard, and whether the records in the run directory are of this run.",
    ),
    "swapped-cables": Handling(
        "Compare these cables with the cabling plan and correct those that are wrong. If all are right, list them in the "
        "manifest (kind link). Then measure the hosts again.",
        "check the labels of the cables, and the rows of the manifest if it lists these links.",
    ),
    "in-use": Handling(
        "Wait until the host is free, or drain it in the scheduler; then measure it again.",
        "ask the owner of the processes to end them.",
    ),
}
"""Problem -> handling of a cause whose verdicts are all inconclusive."""
_SLOW = Handling(
    "Compare power, clock and temperature of the GPU with those of the other GPUs in the report. Then reboot the host and "
    "measure it again.",
    "return the GPU (RMA).",
)
_SHARED = Handling(
    "Correct what the cause names: end the other processes on the GPU (nvidia-smi lists them), remove the limit on the "
    "processors, or switch off confidential computing. Then measure the host again without rackproof_share_gpus.",
    "compare power, clock and temperature of the GPU with those of the other GPUs in the report.",
)
_SLOW_GPU = ("slow-memory", "slow-compute", "slow-workload", "slow-host-copies", "slow-peer-copies")
_LINK = Handling(
    "Reseat the cable and its transceivers; the host may stay on. Then read the error counters of the port again.",
    "swap the cable with that of a healthy port. If the fault moves with the cable, replace the cable. If it stays, replace the "
    "adapter or the switch port.",
)
_SWITCH = Handling(
    "Check the switch: temperature and power, rate and errors of its ports and uplinks, buffers and firmware. Also "
    "compare its settings with those of another switch. The hosts need no work.",
    "move one cable to another switch: if the port becomes normal, replace the switch.",
)
_INSPECT_HOST = Handling(
    "Compare CPUs, memory, disks, links and settings with those of a healthy host. Read the kernel log and the log of the BMC.",
    "replace the part that differs, or contact the vendor of the host.",
)
_RESET_AT_BOOT = "find what sets the old value at boot: image, configuration management or BMC."
_RESET = (
    "Drain the host and end all processes on the GPU, exporters included. Then reset it: sudo nvidia-smi --gpu-reset -i "
    "PCI_ADDRESS. If the driver refuses, reboot the host."
)
_NEW_RUN = (
    "Then measure the hosts in a new run, because a run keeps the inventory with which it began. The failures of this cause say "
    "nothing about the parts."
)
_FIND_DIFFERENCE = Handling(
    "Drain the host and reboot it.",
    "find what differs from a host that passes: versions and settings of driver, services and firmware, and the kernel log.",
)
_FABRIC_MANAGER = Handling(
    "Install the fabric manager with the version of the driver, and enable its service nvidia-fabricmanager. Then drain the host "
    "and reboot it.",
    "find why the service does not start with this version: journalctl -u nvidia-fabricmanager, image, or configuration "
    "management.",
)
_FIND_SETTER = "find what sets the mode: image, configuration management, job prolog or hypervisor."
_FIND_LIMITER = "find the service, or the power cap of the BMC, that lowers the limit or the clocks."
_MODULE = Handling(
    "Inspect and clean both ends of the fibre, reseat the module and the cable; the host may stay on. Then read the port again: "
    "ethtool -m INTERFACE, or mlxlink -d ADAPTER -m -c.",
    "swap the module with that of a healthy port, then the cable. Replace the part with which the fault moves. The cause "
    "names vendor, part number and serial of the module.",
)
_MEMORY_MODULE = Handling(
    "Read the event log of the BMC for the slot. Drain the host and power it off. Reseat the module, or insert the missing one.",
    "swap the module with that of a neighboring slot. If the fault moves with the module, replace the module. Otherwise inspect "
    "the slot and the socket of the processor.",
)
HANDLING = {
    **{(problem, action, ""): _MODULE for problem in ("module", "port") for action in ("reseat", "inspect_hardware")},
    ("bmc-event", "inspect_hardware", ""): Handling(
        "Read the entry, and the entries around it, in the event log of the BMC. Check the part that it names.",
        "replace the part that the entry names, or contact the vendor of the host.",
    ),
    ("bmc-address", "configure", ""): Handling(
        "Correct rackproof_bmc_address of this host, and check that of the host whose BMC it is. Then measure both again: the "
        "readings of the BMC say nothing about this host.",
        "look in the web interface of the BMC for the serial of its host.",
    ),
    ("bmc-serial", "inspect_hardware", ""): Handling(
        "Check that rackproof_bmc_address is the address of the BMC of this host. Then compare the serials on the parts with "
        "those that the host and its BMC report.",
        "do not accept the host: it and its BMC report different serials.",
    ),
    ("bmc-part", "inspect_hardware", "psu"): Handling(
        "Check cable, outlet, phase and breaker of the power supply. Then swap it with the power supply of a healthy bay.",
        "replace the power supply if the fault moves with it. If the fault stays in the bay, replace the feed or the backplane.",
    ),
    ("bmc-part", "inspect_hardware", "detector"): Handling(
        "Power the host off now, and shut off its coolant. Then look for the leak.",
        "contact the vendor of the host before it is powered on again.",
    ),
    **{("slow-network", "inspect_hardware", kind): _SWITCH for kind in ("switch", "rail")},
    ("gpu-fell-off-bus", "reboot", ""): Handling(
        "Drain the host and reboot it. If the GPU is still missing, power the host off and on.",
        "reseat the GPU. If it falls off the bus once more, return it (RMA).",
    ),
    **dict.fromkeys(
        (("gpu-model", "configure", ""), ("limits-of-other-model", "configure", "")),
        Handling(
            f"Compare rackproof_gpu_model with the order. If the inventory is wrong, correct it. {_NEW_RUN}",
            "if the inventory has the model that was ordered, claim it from the vendor. No single GPU is at fault.",
        ),
    ),
    **dict.fromkeys(
        (("inventory", "configure", ""), ("inventory-gpu-count", "configure", "")),
        Handling(
            f"Compare the variable that the cause names, and its unit, with the order. If it is wrong, correct it. {_NEW_RUN}",
            "if the inventory is right, all hosts differ from the order: claim what was ordered from the vendor, or correct the "
            "setting or version on all of them. No single part is at fault.",
        ),
    ),
    ("software-changed", "configure", ""): Handling(
        "Install the earlier versions on one host, and measure it again. If its figures are then good, the change is the cause: "
        "keep the earlier versions, or accept the new level (measure the hosts in a full run without rackproof_baseline, then "
        "rackproof baseline accept RUN --replace).",
        "if the figures stay low with the earlier versions, compare power, clocks, cooling and settings with those of the "
        "accepted run.",
    ),
    ("inventory-fabric", "configure", ""): Handling(
        "Compare rackproof_fabric_gbps with the order. It is the rate of one GPU's port in Gb/s, such as 400, "
        f"not in Mb/s or GB/s, and not that of all ports together. If it is wrong, correct it. {_NEW_RUN}",
        "if the inventory is right, the ordered rate was not delivered: check the rate of the switch ports, and the kind of all "
        "cables and modules. No single port is at fault.",
    ),
    ("gpu-model", "inspect_hardware", ""): Handling(
        "Compare the label of the GPU with the order. Other GPUs of the host are of the model in the inventory, so this one is "
        "the wrong part.",
        "claim the ordered model from the vendor (RMA).",
    ),
    ("gpu-missing", "inspect_hardware", ""): Handling(
        "Drain the host and power it off and on. If the GPU is still missing, check its seat and its power connection.",
        "return the GPU (RMA). Its serial is on its label.",
    ),
    ("port-protocol", "configure", ""): Handling(
        "Set the protocol that the other hosts have (mlxconfig -d ADAPTER set LINK_TYPE_P1=IB or ETH), then reboot the host and "
        "measure it again. The cable needs no work.",
        _RESET_AT_BOOT,
    ),
    ("port-unmanaged", "configure", ""): Handling(
        "The link is up. Check that a subnet manager runs (sminfo), that it reaches the switch of the port, and what its log "
        "says about the port. The cable needs no work.",
        "find the partition, topology file or routing of the subnet manager that leaves the port out.",
    ),
    ("port-down", "configure", ""): Handling(
        "Enable the port: ip link set INTERFACE up, or mlxlink -d ADAPTER --port_state UP. Enable its port at the switch, too.",
        _RESET_AT_BOOT,
    ),
    ("gpu-missing", "configure", ""): Handling(
        "Correct what the kernel log names: the kernel modules, the driver release or its firmware, the PCI address "
        "space (BAR) in the settings of the host or VM, the mode of confidential computing, or another driver that holds the "
        "GPU. Then reboot the host and measure it again. If a job or service denies the session access to "
        "the GPU, no reboot is needed: measure outside of that job or service.",
        _RESET_AT_BOOT,
    ),
    ("ecc-mode", "configure", ""): Handling(
        f"Switch ECC on: sudo nvidia-smi -i PCI_ADDRESS -e 1. It takes effect at the next reset. {_RESET}", _FIND_SETTER
    ),
    ("mig-mode", "configure", ""): Handling(
        "End all processes on the GPU, exporters included. Then switch MIG off: sudo nvidia-smi -i PCI_ADDRESS -mig 0. If "
        "nvidia-smi says that the change is pending, reset the GPU: sudo nvidia-smi --gpu-reset -i PCI_ADDRESS.",
        _FIND_SETTER,
    ),
    ("compute-mode", "configure", ""): Handling(
        "Restore the default mode: sudo nvidia-smi -i PCI_ADDRESS -c DEFAULT. A reboot restores it, too.", _FIND_SETTER
    ),
    **{(problem, "reset_gpu", ""): Handling(_RESET, _FIND_SETTER) for problem in ("ecc-mode", "mig-mode")},
    ("nvlink", "inspect_hardware", ""): Handling(
        "Drain the host and reboot it. If the link is still down, reseat the GPU.",
        "return the GPU (RMA). If a link of the new GPU is down, too, inspect the baseboard.",
    ),
    ("nvlink", "reseat", ""): Handling(
        "Drain the host and power it off. Check that all NVLink bridges of this GPU are there and seated.",
        "replace the bridges one at a time. If the links stay down with new bridges, return the GPU (RMA).",
    ),
    ("nvlink", "configure", ""): Handling(
        "Compare the NVLink bridges of the host with the order. Fit those that are missing, and measure again.",
        "reseat the bridges. If the GPU has none by design, put its host in another gang (rackproof_gang).",
    ),
    ("pcie-link", "reseat", "gpu"): Handling(
        "Drain the host and power it off. Reseat the GPU, and its riser or cable if it has one.",
        "swap the GPU with another one. If the fault moves with it, return the GPU (RMA), otherwise inspect the slot.",
    ),
    ("pcie-link", "reseat", ""): Handling(
        "Drain the host and power it off. Reseat the device at this PCI address, and its riser or cable if it has one.",
        "swap the device with another one. If the fault moves with it, return it (RMA), otherwise inspect the slot.",
    ),
    ("pcie-link", "configure", ""): Handling(
        "Move the GPU to another slot, or correct lanes and generation of the slot in the BIOS (bifurcation, link speed). Then "
        "measure the host again. In a virtual machine, first compare the lanes with the description of the instance type. If "
        "the type has more, reseat the GPU, or replace the virtual machine.",
        "compare the slot and its riser with those of a host that passes. If the instance type of a virtual machine has no more "
        "lanes, judge it by a criterion of your own.",
    ),
    ("hot", "inspect_hardware", ""): Handling(
        "Check the cooling: fans, filters, blanking panels and airflow, or flow and temperature of the coolant.",
        "check the heat sink and the thermal paste of the GPU, or return the GPU (RMA).",
    ),
    ("power-limited", "configure", ""): Handling(
        "Restore the default clocks: sudo nvidia-smi -i PCI_ADDRESS -rac, and the default power limit: sudo nvidia-smi -i "
        "PCI_ADDRESS -pl WATTS. A reboot restores them, too.",
        _FIND_LIMITER,
    ),
    ("power-limited", "reboot", ""): Handling(
        "Drain the host and reboot it, which restores the default power limit and clocks.", _FIND_LIMITER
    ),
    ("power-limited", "inspect_hardware", ""): Handling(
        "Check the power supplies, their cables and the power cap of the BMC.",
        "replace the power supply, or contact the vendor of the host.",
    ),
    ("slow-path", "inspect_hardware", ""): Handling(
        "Check the switches between the two hosts: routes, error counters and congestion of the links that their traffic "
        "takes. If both hosts are normal with other hosts, neither is faulty. In a gang of two hosts, also check their ports, "
        "cables and PCIe links.",
        "measure each of the two hosts with a third one. If both are normal with it, route their traffic over other links, one "
        "by one, and replace the link that is slow.",
    ),
    ("slow-network", "inspect_hardware", HOST): Handling(
        "Compare the host with a healthy one: link speed and error counters of its NICs, their PCIe links, driver, firmware, and "
        "BIOS settings.",
        "inspect the switch ports and cables of the host, then its baseboard.",
    ),
    ("slow-network", "inspect_hardware", ""): Handling(
        "Check link speed, error counters, cable, transceiver and switch port. nvidia-smi topo -m lists the NIC next to "
        "each GPU.",
        "swap the cable with that of a healthy NIC. If the fault moves with the cable, replace the cable. If it stays, replace "
        "the NIC or the switch port.",
    ),
    ("stopped-launch", "inspect_hardware", ""): Handling(
        "Read the kernel log of the host and the event log of its BMC. Then reboot the host and measure it again.",
        "return the GPU (RMA) if the causes in both runs name the same GPU, otherwise inspect the host.",
    ),
    ("far-adapter", "inspect_hardware", ""): Handling(
        "Check that the network adapter next to the GPU is present and in its slot (nvidia-smi topo -m, lspci -t). The GPU is "
        "not faulty.",
        "compare risers, cables and slots of the host with those of a healthy one.",
    ),
    ("differs", "configure", ""): Handling(
        "Set the value that most parts have. Firmware, such as the VBIOS, needs the update tool of the vendor. For the hardware "
        "of a virtual machine, use the instance type and the network settings of the others.",
        _RESET_AT_BOOT,
    ),
    ("differs", "reboot", ""): _FIND_DIFFERENCE,
    (_SOFTWARE, "reboot", ""): _FIND_DIFFERENCE,
    ("host.module.nouveau", "reboot", ""): Handling(
        "Put the module nouveau on the blacklist of modprobe, rebuild the initial ramdisk, then drain the host and reboot it.",
        "find what loads the module: initial ramdisk, image or configuration management.",
    ),
    ("software.driver_library.matches", "reboot", ""): Handling(
        "Drain the host and reboot it, which loads the installed module.",
        "find what installs the other version: image, package repository or configuration management. Then install module and "
        "libraries of the driver again, in one version.",
    ),
    ("software.fabric_manager.matches", "reboot", ""): _FABRIC_MANAGER,
    ("fabric.manager.missing", "reboot", ""): _FABRIC_MANAGER,
    ("smt", "configure", ""): Handling(
        "Set SMT (hyper-threading) as on the other hosts: in the BIOS, or on the kernel command line (nosmt). Then reboot the "
        "host and measure it again.",
        _RESET_AT_BOOT,
    ),
    ("numa-nodes", "configure", ""): Handling(
        "Set the number of NUMA nodes as on the other hosts: in the BIOS (NPS of AMD, SNC of Intel, node interleaving), on "
        "the kernel command line (numa=off), or for a virtual machine in its hypervisor. Then reboot the host and measure it "
        "again.",
        _RESET_AT_BOOT,
    ),
    ("swapped-cables", "recable", ""): Handling(
        "Swap the two cables, at the host or at the switch. No part is faulty; the host may stay on.",
        "check the labels of the cables, and the rows of the manifest if it lists these links.",
    ),
    ("wrong-cable", "recable", ""): Handling(
        "Move the cable to the switch port that the cause names. No part is faulty; the host may stay on.",
        "check the label of the cable, and the row of the manifest if it lists this link.",
    ),
    ("shared-machine", "configure", ""): Handling(
        "List the machine in the inventory as one host with all of its GPUs, and measure it again. The slow parts may be "
        "healthy.",
        "measure the hosts of the machine one at a time (--limit). A part that is still slow is faulty.",
    ),
    ("identity", "inspect_hardware", ""): Handling(
        "Compare the label of each part with the serial in the report.",
        "contact the vendor of the parts.",
    ),
    **{(problem, "configure", ""): _SHARED for problem in _SLOW_GPU},
    ("slow-compute", "inspect_hardware", ""): _SLOW,
    ("slow-workload", "inspect_hardware", ""): _SLOW,
    ("slow-host-copies", "inspect_hardware", ""): Handling(
        "Compare the PCIe link of the GPU (lspci -vv, LnkSta), and the BIOS, IOMMU and NUMA settings, with another host.",
        "reseat the GPU. If that does not help, return it (RMA).",
    ),
    ("wrong-host-copies", "inspect_hardware", ""): Handling(
        "Read the kernel log for errors of PCIe (AER) and of memory (EDAC). Then drain the host, power it off, and reseat the "
        "GPU and its riser or cable.",
        "swap the GPU with another one. If the fault moves with it, return the GPU (RMA). If it stays at the slot, inspect "
        "riser, PCIe switch and baseboard. If several GPUs of the host show it, inspect the memory of the host.",
    ),
    ("wrong-peer-copies", "inspect_hardware", ""): Handling(
        "Read the errors of the NVLinks (nvidia-smi nvlink -e), and the kernel log for errors of PCIe (AER). Compare the pairs: "
        "a GPU in all wrong pairs is the suspect. Then drain the host, power it off, and reseat both GPUs.",
        "swap the suspected GPU with another one. If the fault moves with it, return the GPU (RMA), otherwise inspect bridges, "
        "NVSwitches and baseboard.",
    ),
    ("wrong-messages", "inspect_hardware", ""): Handling(
        "Compare the pairs: a host in all wrong pairs is the suspect. Read the kernel logs of both hosts for errors of "
        "PCIe (AER), and the error counters of their ports.",
        "inspect adapter, PCIe link and GPU of the suspect, one by one. If both hosts of a pair are normal with others, inspect "
        "the switches.",
    ),
    ("wrong-results", "inspect_hardware", "directory"): Handling(
        "Do not use the file system. Read the kernel log, and the logs of its disks (nvme smart-log, smartctl) or servers; then "
        "check the file system.",
        "replace the disk. If several disks of the host return wrong data, or only this client of a shared file system reads "
        "wrong data, inspect the memory of the host.",
    ),
    ("slow-files", "inspect_hardware", ""): Handling(
        "The host is not at fault. Find the server or storage target that holds the files of the host (lfs getstripe, mmlsattr, "
        "or the address in the parameter `device`). Compare the disks, rebuilds, links and load of that server or target with "
        "those of a healthy one.",
        "take that server or storage target out of service and measure again.",
    ),
    ("slow-storage", "inspect_hardware", "gang"): Handling(
        "Compare the load, disks and links of the servers with their specification. shared_storage.ramp_bandwidth shows with "
        "how many clients the bandwidth stops growing.",
        "send the figures of each client to the vendor of the file system.",
    ),
    ("slow-storage", "inspect_hardware", ""): Handling(
        "If the storage is a disk, compare it with another disk of the same model: PCIe link (lspci -vv, LnkSta), temperature "
        "and spare blocks (nvme smart-log), free space, state of its array (/proc/mdstat). If the storage is a shared file "
        "system, compare link, MTU and mount options of this client (ethtool, nfsstat -m) with those of another client.",
        "repeat the measurement by hand (docs/storage.md), then replace the disk, or the cable or NIC of the client.",
    ),
    ("", "reseat", "hca"): _LINK,
    ("", "reseat", "nic"): _LINK,
    ("", "inspect_hardware", "hca"): _LINK,
    ("", "inspect_hardware", "nic"): _LINK,
    ("", "reseat", "disk"): Handling(
        "Reseat the disk. If it is not in a hot-plug bay, power the host off first.", "replace it."
    ),
    ("", "reseat", "dimm"): _MEMORY_MODULE,
    ("", "inspect_hardware", "dimm"): Handling(
        "Compare the label of the module with those of its neighbors. Replace it by a module with the part number of the "
        "neighbors.",
        "inspect the slot, and the socket of the processor.",
    ),
    ("memory-modules-missing", "reseat", ""): _MEMORY_MODULE,
    ("memory-modules-missing", "inspect_hardware", ""): _MEMORY_MODULE,
    ("memory-speed", "inspect_hardware", ""): Handling(
        "Read the event log of the BMC for failed memory training. Compare the BIOS settings, and the labels of the modules, "
        "with those of a healthy host.",
        "swap modules with a healthy host, and replace the modules if the low speed moves with them.",
    ),
    ("", "inspect_hardware", "disk"): Handling(
        "Read the log of the disk (nvme smart-log, smartctl).", "replace the disk."
    ),
    ("", "inspect_hardware", "array"): Handling(
        "Replace the member that the cause names, and rebuild the array.", "inspect the bay of the member."
    ),
    ("", "inspect_hardware", HOST): _INSPECT_HOST,
    ("", "inspect_hardware", "gang"): _INSPECT_HOST,
    ("slow-compute", "inspect_hardware", HOST): _INSPECT_HOST,
    ("slow-workload", "inspect_hardware", HOST): _INSPECT_HOST,
    ("slow-workload", "inspect_hardware", "gang"): _INSPECT_HOST,
}
"""Problem or failed reading (empty: any), action and kind of the part (empty: any) -> handling. An entry takes precedence over
OF_ACTION."""
OF_ACTION = {
    "rma": Handling(
        "Replace the part. rackproof rma writes the package for its vendor.",
        "inspect the slot of the new part, the baseboard and the cooling.",
    ),
    "inspect_hardware": Handling(
        "Check seat, cables, power and cooling of the part, and the event log of the BMC.", "return the part (RMA)."
    ),
    "reseat": Handling("Drain the host and power it off. Reseat the part.", "return the part (RMA)."),
    "recable": Handling("Move the cable to the switch port where it belongs. No part is faulty.", "check the labels."),
    "reset_gpu": Handling(
        _RESET,
        "run the field diagnostics of NVIDIA, or return the GPU (RMA).",
    ),
    "reboot": Handling("Drain the host and reboot it.", "inspect the hardware of the host, or return the part (RMA)."),
    "recover_imex_domain": Handling(
        "End the jobs of the domain, then restart the service nvidia-imex on all its hosts.",
        "reboot the hosts of the domain.",
    ),
    "drain_p2p": Handling("End the jobs that copy between GPUs, then reset the GPU.", "reboot the host."),
    "configure": Handling("Correct the setting that the cause names, then measure the host again.", _RESET_AT_BOOT),
    "monitor": Handling("Compare the value with that of the next run.", "inspect the part."),
}
