"""Virtual machines with real verbs: Debian's kernel under QEMU without KVM, with Soft-RoCE on every interface and perftest.

The machines see this machine's file system (read-only), so the agent and perftest need no image. Each rail is one virtual
network. A machine boots in about five seconds of one processor.
"""

from __future__ import annotations

import gzip
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "build" / "rdma-kernel"
"""Where Debian's kernel package is unpacked; git ignores it."""
MODULES = (
    "virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "crc32_generic", "configfs",
    "ib_core", "udp_tunnel", "ip6_udp_tunnel", "ib_uverbs", "rdma_rxe", "failover", "net_failover", "virtio_net", "netfs",
    "fscache", "9pnet", "9pnet_virtio", "9p", "sch_tbf",
)  # fmt: skip
"""In the order in which they depend on each other."""
BOOT_S, MEMORY_MB = 120.0, 384
INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /root
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in {modules}; do insmod /modules/$module.ko; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose root /root
for directory in proc sys dev; do mount --bind /$directory /root/$directory; done
mount -t tmpfs run /root/run # the checkout may be under /tmp
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none shared /root/mnt
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH={root} PYTHONDONTWRITEBYTECODE=1 TMPDIR=/run
{setup}
chroot /root {python} {guest} {host} /mnt
poweroff -f
"""
RAIL = """chroot /root /bin/sh -exc 'ip link set lo up; ip addr add 10.{rail}.0.{number}/24 dev eth{rail}
ip link set eth{rail} up
rdma link add rxe{rail} type rxe netdev eth{rail}
tc qdisc add dev eth{rail} root tbf rate {rate} burst 16kb latency 500ms'
"""


class Machines:
    """Running machines. Observations are taken on all of them at once."""

    def __init__(self, hosts: Sequence[str], rails: int, rate: str, directory: Path) -> None:
        """
        Args:
            hosts: names of the machines.
            rails: number of interfaces, and of networks.
            rate: rate of every interface, as tc(8) writes it: `20mbit`.
            directory: for the kernel's logs, and what the machines share.
        """
        self.hosts, self._directory = tuple(hosts), directory
        self._shared, self._number = directory / "shared", 0
        self._shared.mkdir(parents=True)
        self._processes = [self._boot(number, rails, rate) for number in range(1, len(hosts) + 1)]

    def measure(
        self, stage: str, settings: Mapping[str, Any], limit_s: float, **commands: str
    ) -> dict[str, list[dict[str, Any]]]:
        """Run a shell command on the machines named, measure verbs on all, and return their observations.

        Raises AssertionError, with the end of the kernel's log, if a machine does not answer in time.
        """
        addresses = {host: f"10.0.0.{number}" for number, host in enumerate(self.hosts, 1)}
        members = list(self.hosts)
        request = {"stage": stage, "settings": settings, "members": members, "gang": members, "addresses": addresses,
                   "fabric": True, "commands": commands}  # fmt: skip
        self._post(request)
        paths = [self._shared / f"{self._number - 1}.{host}.json" for host in self.hosts]
        self._wait(paths, limit_s)
        return {host: json.loads(path.read_text()) for host, path in zip(self.hosts, paths, strict=True)}

    def wait_until_booted(self) -> None:
        """Wait until each machine waits for requests."""
        self._wait([self._shared / f"ready.{host}" for host in self.hosts], BOOT_S)

    def end(self) -> None:
        """Turn the machines off."""
        self._post({"end": True})
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _post(self, request: Mapping[str, Any]) -> None:
        part = self._shared / f"{self._number}.part"
        part.write_text(json.dumps(request))
        part.rename(self._shared / f"{self._number}.json")
        self._number += 1

    def _wait(self, paths: Sequence[Path], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not all(path.exists() for path in paths):
            late = [path.name for path in paths if not path.exists()]
            ended = any(process.poll() is not None for process in self._processes)
            assert not ended, f"a machine ended\n{self._logs()}"
            assert time.monotonic() < deadline, f"no {', '.join(late)} within {limit_s:g} s\n{self._logs()}"
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(f"--- {host}\n{self._log(host).read_text(errors='replace')[-3000:]}" for host in self.hosts)

    def _log(self, host: str) -> Path:
        return self._directory / f"{host}.log"

    def _boot(self, number: int, rails: int, rate: str) -> subprocess.Popen[bytes]:
        host = self.hosts[number - 1]
        setup = "".join(RAIL.format(rail=rail, number=number, rate=rate) for rail in range(rails))
        init = INIT.format(
            modules=" ".join(MODULES),
            root=ROOT,
            setup=setup,
            python=sys.executable,
            guest=ROOT / "tests/rdma/guest.py",
            host=host,
        )
        image = self._directory / f"{host}.initramfs.gz"
        _write_initramfs(image, init)
        networks = [
            option
            for rail in range(rails)
            for option in (
                "-netdev", f"socket,id=net{rail},mcast=230.0.29.{1 + rail}:{_network_port(self._directory)},localaddr=127.0.0.1",
                "-device", f"virtio-net-pci,netdev=net{rail},mac=52:54:00:29:{rail:02x}:{number:02x},romfile=",
            )
        ]  # fmt: skip
        shares = [
            *("-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"),
            *("-virtfs", f"local,path={self._shared},mount_tag=shared,security_model=none"),
        ]
        command = [
            *(
                "qemu-system-x86_64",
                "-accel",
                "tcg",
                "-cpu",
                "Nehalem",
                "-m",
                str(MEMORY_MB),
                "-smp",
                "2",
                "-nographic",
                "-no-reboot",
            ),
            *(
                "-kernel",
                str(next(KERNEL.glob("boot/vmlinuz-*"))),
                "-initrd",
                str(image),
                "-append",
                "console=ttyS0 quiet panic=-1 no_timer_check",
            ),
            *(*networks, *shares),
        ]
        with self._log(host).open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _network_port(directory: Path) -> int:
    """Return a port of its own for the networks of these machines, so that two test runs do not meet."""
    return 20000 + abs(hash(str(directory))) % 20000


@contextmanager
def machines(hosts: Sequence[str], rails: int, rate: str, directory: Path) -> Iterator[Machines]:
    """Yield running machines."""
    _unpack_kernel()
    running = Machines(hosts, rails, rate, directory)
    try:
        running.wait_until_booted()
        yield running
    finally:
        running.end()


def _unpack_kernel() -> None:
    """Download Debian's kernel package and unpack it, unless it was unpacked before."""
    if next(KERNEL.glob("boot/vmlinuz-*"), None):
        return
    depends = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=True
    ).stdout
    package = re.search(r"Depends: (linux-image-\d\S+)", depends)
    assert package, f"no kernel package on {platform.machine()}: {depends}"
    part = KERNEL.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    subprocess.run(["apt-get", "download", "-qq", package[1]], cwd=part, check=True, timeout=120)
    archive = next(part.glob("*.deb"))
    subprocess.run(["dpkg-deb", "-x", archive, part], check=True)
    archive.unlink()
    shutil.rmtree(KERNEL, ignore_errors=True)
    part.rename(KERNEL)


def _write_initramfs(image: Path, init: str) -> None:
    """Write a compressed cpio archive (format newc) of busybox, the modules and the first process."""
    kernel_modules = {path.stem: path for path in KERNEL.glob("lib/modules/*/kernel/**/*.ko")}
    files: dict[str, tuple[int, bytes]] = {
        **dict.fromkeys(("bin", "modules"), (0o040755, b"")),
        "init": (0o100755, init.encode()),
        "bin/busybox": (0o100755, Path("/bin/busybox").read_bytes()),
        **{f"modules/{name}.ko": (0o100644, kernel_modules[name].read_bytes()) for name in MODULES},
        "TRAILER!!!": (0, b""),
    }
    archive = bytearray()
    for number, (name, (mode, content)) in enumerate(files.items(), 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        archive += b"\0" * (-len(archive) % 4) + content
        archive += b"\0" * (-len(archive) % 4)
    image.write_bytes(gzip.compress(bytes(archive), compresslevel=1))
