"""Build the /proc, /sys and programs of a host as a tree of small files, for collectors that have the argument `root`.

The tree is that of a healthy GPU host with two sockets, reduced to what tests need: 4 logical CPUs, 2 NUMA nodes, 2 EDAC memory
controllers with 2 DIMMs each, an SMBIOS table with 16 DIMMs, 2 NVMe disks in an array, and Docker with NVIDIA's toolkit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.fakes import dmi

NVIDIA, INTEL, MELLANOX = "0x10de", "0x8086", "0x15b3"
CONTROLLER_3D, DISPLAY, AUDIO, BRIDGE, NETWORK = "0x030200", "0x030000", "0x040300", "0x068000", "0x020700"
DRIVER = "580.95.05"

_PROCESSOR = """processor\t: {}
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480C
cpu MHz\t\t: {}
flags\t\t: fpu vme de pse tsc msr pae mce constant_tsc

"""
_VERSION = f"""NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  Release Build  (dvs-builder@U22-I3)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
_INTERRUPTS = """            CPU0       CPU1       CPU2       CPU3
   0:         41          0          0          0  IR-IO-APIC    2-edge      timer
 MCE:          0          0          0          0   Machine check exceptions
 MCP:       2881       2881       2881       2881   Machine check polls
"""
_MOUNTS = """22 29 0:21 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
23 29 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:2 - sysfs sysfs rw
29 1 9:0 / / rw,relatime shared:1 - ext4 /dev/md0 rw,errors=remount-ro
31 29 0:27 / /run rw,nosuid,nodev shared:5 - tmpfs tmpfs rw,size=211340468k
45 29 9:0 /var/lib/kubelet/pods /var/lib/pods rw,relatime shared:1 - ext4 /dev/md0 rw,errors=remount-ro
52 29 7:1 / /snap/core22/1621 ro,nodev,relatime shared:30 - squashfs /dev/loop1 ro
61 29 0:55 / /home rw,relatime shared:44 - nfs4 filer:/home rw,vers=4.2
70 29 259:3 / /scratch\\040data rw,relatime shared:50 - xfs /dev/nvme2n1 rw,attr2
"""
CDI = f"""---
cdiVersion: 0.5.0
containerEdits:
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args:
    - nvidia-cdi-hook
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}
    hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}
  - containerPath: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{DRIVER}
    hostPath: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{DRIVER}
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: GPU-41b7e0c5-2d93-4f68-ba10-5c8e96f3d702
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
  name: "1"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/nvidia1
  name: all
kind: nvidia.com/gpu
"""

FILES = {
    "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
    "proc/sys/kernel/random/boot_id": "0d8f3e52-6b1c-4c57-9a3e-2f40c1d7b6a9\n",
    "proc/sys/kernel/tainted": "12289\n",  # bits 0, 12, 13: proprietary, out-of-tree and unsigned module
    "proc/sys/kernel/numa_balancing": "0\n",
    "proc/sys/vm/zone_reclaim_mode": "0\n",
    "proc/cpuinfo": "".join(_PROCESSOR.format(number, clock) for number, clock in enumerate((800.0, 2000, 3800, 3800))),
    "proc/stat": "cpu  400 40 60 9000 100 20 30 8 0 0\n"
    + "".join(f"cpu{number} 100 10 15 2250 25 5 7 2 0 0\n" for number in range(4))
    + "intr 1\n",
    "proc/loadavg": "1.52 0.93 0.71 3/4127 1893201\n",
    "proc/meminfo": "MemTotal:       2113404636 kB\nMemFree:        2051862404 kB\nMemAvailable:   2078127008 kB\n"
    "SwapTotal:       8388604 kB\nSwapFree:        8388600 kB\nHardwareCorrupted:     0 kB\n"
    "HugePages_Total:    1024\nHugePages_Free:     1000\nHugepagesize:       2048 kB\n",
    "proc/uptime": "864213.57 190412033.80\n",
    "proc/vmstat": "nr_free_pages 512965601\noom_kill 3\n",
    "proc/pressure/cpu": "some avg10=1.50 avg60=0.10 avg300=0.16 total=872947254\n",
    "proc/pressure/memory": "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "proc/pressure/io": "some avg10=0.25 avg60=0.00 avg300=0.00 total=77\n",
    "proc/cmdline": "BOOT_IMAGE=/vmlinuz-6.8.0-45-generic root=UUID=5c8e96f3 ro intel_iommu=on iommu=pt pci=realloc=off\n",
    "proc/self/limits": _LIMITS,
    "proc/self/mountinfo": _MOUNTS,
    "proc/interrupts": _INTERRUPTS,
    "proc/driver/nvidia/version": _VERSION,
    "proc/driver/nvidia-nvswitch/permissions": "DeviceFileMinor: 255\n",
    "proc/1/stat": "1 (systemd) S 0 1 1 0 -1\n",
    "proc/801/stat": "801 (nvidia-persiste) S 1 801 801 0 -1\n",
    "proc/4711/stat": "4711 (odd) name) Z 1 4711 4711 0 -1\n",
    "proc/4712/stat": "4712 (dd) D 1 4712 4712 0 -1\n",
    "sys/devices/system/cpu/smt/active": "1\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/class/dmi/id/sys_vendor": "Supermicro\n",
    "sys/class/dmi/id/product_name": "SYS-821GE-TNHR\n",
    "sys/class/dmi/id/product_serial": "S411795X4A12345\n",
    "sys/class/dmi/id/bios_version": "2.3\n",
    "sys/module/nvidia/version": f"{DRIVER}\n",
    "sys/module/nvidia_peermem/refcnt": "0\n",
    "sys/module/gdrdrv/version": "2.4\n",
    "sys/module/mlx5_core/version": "24.10-1.1.4\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/block/loop1/size": "1\n",
    "sys/block/sr0/device/state": "running\n",
    "sys/block/sda/device/state": "running\n",
    "sys/block/sda/removable": "1\n",  # the virtual drive of the host's BMC
    "sys/block/md0/md/degraded": "0\n",
    "sys/fs/ext4/md0/errors_count": "0\n",
    "etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nNAME="Ubuntu"\nVERSION_ID="24.04"\nID=ubuntu\n',
    "etc/docker/daemon.json": '{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}',
    "usr/bin/docker": "",
    "usr/local/cuda/version.json": '{"cuda": {"name": "CUDA SDK", "version": "13.0.1"}}',
    "var/run/cdi/nvidia.yaml": CDI,
}
for _number, (_socket, _core) in enumerate(((0, "0,2"), (1, "1,3"), (0, "0,2"), (1, "1,3"))):
    _cpu, _policy = f"sys/devices/system/cpu/cpu{_number}/topology", f"sys/devices/system/cpu/cpufreq/policy{_number}"
    FILES |= {
        f"{_cpu}/physical_package_id": f"{_socket}\n",
        f"{_cpu}/thread_siblings_list": f"{_core}\n",
        f"{_policy}/affected_cpus": f"{_number}\n",
        f"{_policy}/scaling_governor": "performance\n",
        f"{_policy}/scaling_max_freq": "3800000\n",
        f"{_policy}/cpuinfo_max_freq": "3800000\n",
    }
for _number in (0, 1):
    _mc, _disk = f"sys/devices/system/edac/mc/mc{_number}", f"sys/block/nvme{_number}n1"
    _nvme = f"sys/class/nvme/nvme{_number}"
    FILES |= {
        f"sys/devices/system/node/node{_number}/meminfo": f"Node {_number} MemTotal:  1056702318 kB\n"
        f"Node {_number} MemFree:   1025931202 kB\n",
        f"sys/devices/system/node/node{_number}/cpulist": ("0-55,112-167\n", "56-111,168-223\n")[_number],
        f"{_mc}/ce_count": "0\n",
        f"{_mc}/ue_count": "0\n",
        f"{_disk}/size": "3750748848\n",
        f"{_disk}/removable": "0\n",
        f"{_disk}/queue/rotational": "0\n",
        f"{_disk}/device/state": "live\n",
        f"{_disk}/device/transport": "pcie\n",
        f"{_disk}/device/model": "SAMSUNG MZQL21T9HCJR-00A07              \n",
        f"{_disk}/device/serial": f"S64GNE0T50000{_number}      \n",
        f"{_disk}/device/firmware_rev": "GDC5602Q\n",
        f"{_nvme}/state": "live\n",
        f"{_nvme}/transport": "pcie\n",
        f"{_nvme}/cntrltype": "io\n",
        f"{_nvme}/model": "SAMSUNG MZQL21T9HCJR-00A07              \n",
        f"{_nvme}/nvme{_number}n1/nsid": "1\n",
        f"dev/nvme{_number}n1": "",
    }
    for _dimm in (0, 1):
        FILES |= {
            f"{_mc}/dimm{_dimm}/dimm_ce_count": "0\n",
            f"{_mc}/dimm{_dimm}/dimm_ue_count": "0\n",
            f"{_mc}/dimm{_dimm}/dimm_label": f"CPU_SrcID#{_number}_MC#0_Chan#{_dimm}_DIMM#0\n",
        }

PROGRAMS = {
    "usr/bin/nvidia-ctk": "NVIDIA Container Toolkit CLI version 1.17.8\\ncommit: f202b80a9b9d0db00d9b1d73c0128c8962c55f4d\\n",
    "usr/bin/nv-fabricmanager": f"\\n\\n\\tFabric Manager version is : {DRIVER}\\n\\n",
    "usr/bin/ib_write_bw": "Version: 6.06\\n",
}
"""Path of a program -> its output, as a format for `printf`."""
LINKS = {  # symbolic link -> its target
    "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1": f"libnvidia-ml.so.{DRIVER}",
    "usr/lib/x86_64-linux-gnu/libnccl.so.2": "libnccl.so.2.28.9",
    "sys/dev/block/9:0": "../../block/md0",
    **{
        f"sys/block/nvme{number}n1/device/nvme{number}": f"../../../devices/pci0000:80/0000:8{number}:00.0/nvme/nvme{number}"
        for number in (0, 1)
    },
}


def build_tree(
    root: Path, *, gpus: int | None = 8, files: Mapping[str, str | None] | None = None, **proc: str | None
) -> Path:
    """Build the tree under `root`, and return `root`.

    Args:
        root: created if missing.
        gpus: number of NVIDIA GPUs on the PCI bus, which also has other devices; None: build no PCI bus.
        files: path -> text of a further file, or text that replaces the one in FILES; None leaves the file out.
        proc: name of a file in FILES below /proc -> text that replaces the one in FILES, e.g. `meminfo="nonsense"`; None leaves
            the file out.
    """
    by_name = {path: proc[Path(path).name] for path in FILES if path.startswith("proc/") and Path(path).name in proc}
    for path, text in {**FILES, **by_name, **(files or {})}.items():
        if text is not None:
            _write(root / path, text)
    (root / "scratch data").mkdir()
    (root / dmi.TABLE).parent.mkdir(parents=True)
    (root / dmi.TABLE).write_bytes(dmi.table(dmi.slots()))
    for path, prints in PROGRAMS.items():
        write_program(root / path, f"printf '{prints}'")
    for path, target in LINKS.items():
        link = root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    if gpus is None:
        return root
    bus = [(NVIDIA, CONTROLLER_3D)] * gpus
    bus += [(NVIDIA, AUDIO), (NVIDIA, BRIDGE), (INTEL, DISPLAY), (MELLANOX, NETWORK)]
    for number, (vendor, kind) in enumerate(bus):
        add_pci_device(root, f"0000:{number + 1:02x}:00.0", vendor, kind)
    return root


def add_pci_device(root: Path, address: str, vendor: str, kind: str, above: str = "") -> None:
    """Add a device to the PCI bus. `above` is the address of the bridge above it; empty: none."""
    path = f"devices/pci0000:00/{above}/{address}" if above else f"devices/pci0000:00/{address}"
    for name, text in (("vendor", vendor), ("class", kind)):
        _write(root / f"sys/{path}/{name}", f"{text}\n")
    known = root / "sys/bus/pci/devices" / address
    known.parent.mkdir(parents=True, exist_ok=True)
    known.symlink_to(f"../../../{path}")


GPU_NODES = {"0008:01:00.0": 2, "0009:01:00.0": 10}
"""PCI address of a GPU of `grace_files` -> the first of the eight NUMA nodes that the firmware reserves for it."""
GRACE_NODE_KB, GPU_NODE_KB, GPU_FREE_KB = 501_000_000, 193_000_000, 190_000_000


def grace_files(mode: str) -> dict[str, str]:
    """Return path -> text of the files that show the memory of a Grace host with two processors and two GPUs.

    `mode` is the mode of the driver: `numa`, or `driver` (CDMM). In the mode `numa`, the memory of each GPU is a NUMA node.
    """
    of_gpus = len(GPU_NODES) if mode == "numa" else 0
    free = 2 * GRACE_NODE_KB - 8_000_000
    files = {
        "proc/meminfo": f"MemTotal:       {2 * GRACE_NODE_KB + of_gpus * GPU_NODE_KB} kB\n"
        f"MemFree:        {free + of_gpus * GPU_FREE_KB} kB\nMemAvailable:   {free + of_gpus * GPU_FREE_KB} kB\n",
        "proc/driver/nvidia/params": 'EnableUserNUMAManagement: 1\nCoherentGPUMemoryMode: ""\n',
    }
    for number in range(18):
        size, left = (GRACE_NODE_KB, free // 2) if number < 2 else (0, 0)
        if of_gpus and number in GPU_NODES.values():
            size, left = GPU_NODE_KB, GPU_FREE_KB
        node = f"sys/devices/system/node/node{number}"
        files[f"{node}/meminfo"] = f"Node {number} MemTotal:       {size} kB\nNode {number} MemFree:        {left} kB\n"
        files[f"{node}/cpulist"] = ("0-71\n", "72-143\n")[number] if number < 2 else "\n"
    for address, number in GPU_NODES.items():
        folder = f"proc/driver/nvidia/gpus/{address}"
        files[f"{folder}/information"] = f"Bus Location: \t {address}\n"
        if of_gpus:
            files[f"{folder}/numa_status"] = (
                f"Node:      {number}\nStatus:    online\nAddress:   100000000000\nSize:      2e00000000\n"
            )
    return files


def write_program(path: Path, command: str) -> None:
    """Write an executable that runs one line of shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def build_minimal_tree(root: Path) -> Path:
    """Build the tree of a machine that has only a kernel, such as a small virtual machine or a container."""
    for path in (
        "proc/sys/kernel/osrelease", "proc/cpuinfo", "proc/loadavg", "proc/meminfo", "proc/uptime", "etc/os-release",
    ):  # fmt: skip
        _write(root / path, FILES[path])
    _write(root / "proc/self/mountinfo", "29 1 0:40 / / rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b\n")
    for path in ("sys/devices", "sys/module", "sys/bus/pci/devices", "proc/1"):
        (root / path).mkdir(parents=True)
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
