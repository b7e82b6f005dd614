"""A host's /proc and /sys as a tree of small files, for a collector that takes its root as an argument."""

from __future__ import annotations

from pathlib import Path

NVIDIA, INTEL, MELLANOX = "0x10de", "0x8086", "0x15b3"
CONTROLLER_3D, DISPLAY, AUDIO, BRIDGE, NETWORK = "0x030200", "0x030000", "0x040300", "0x068000", "0x020700"

PROC = {
    "sys/kernel/osrelease": "6.8.0-45-generic\n",
    "cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8480C\n\n",
    "loadavg": "1.52 0.93 0.71 3/4127 1893201\n",
    "meminfo": "MemTotal:       2113404636 kB\nMemFree:        2051862404 kB\nMemAvailable:   2078127008 kB\n",
    "uptime": "864213.57 190412033.80\n",
}


def tree(root: Path, *, gpus: int = 8, **proc: str | None) -> Path:
    """Builds the tree under `root`, and returns that.

    Args:
        root: made where it is missing.
        gpus: how many NVIDIA GPUs stand on the PCI bus, beside devices that are none.
        proc: other text for a file of PROC by its last name, e.g. `meminfo="nonsense"`; None leaves the file out.
    """
    for path, text in PROC.items():
        chosen = proc.get(Path(path).name, text)
        if chosen is not None:
            _write(root / "proc" / path, chosen)
    bus = [(NVIDIA, CONTROLLER_3D)] * gpus
    bus += [(NVIDIA, AUDIO), (NVIDIA, BRIDGE), (INTEL, DISPLAY), (MELLANOX, NETWORK)]
    for number, (vendor, kind) in enumerate(bus):
        device = root / "sys/bus/pci/devices" / f"0000:{number + 1:02x}:00.0"
        _write(device / "vendor", f"{vendor}\n")
        _write(device / "class", f"{kind}\n")
    return root


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
