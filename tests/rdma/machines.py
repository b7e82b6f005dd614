"""Virtual machines with real RDMA verbs: Debian's kernel under QEMU without KVM, with Soft-RoCE, perftest and lldpd.

The virtual machines use the root file system of the machine that runs the tests, read-only. So no disk image with the agent and
the programs is needed. `eth0` is the port to the management network. `eth1`, `eth2` … each have a cable to a leaf switch
(`switches.py`); their RDMA adapters are `rxe1`, `rxe2` … The ports with the same number on all machines form a rail: they share a
leaf switch. To boot, a virtual machine uses about five seconds of CPU time.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .switches import Switches, switches

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "build" / "rdma-kernel"
"""Directory in which Debian's kernel package is unpacked; git ignores it."""
MODULES = (
    "virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "crc32_generic", "configfs",
    "ib_core", "udp_tunnel", "ip6_udp_tunnel", "ib_uverbs", "rdma_rxe", "failover", "net_failover", "virtio_net", "netfs",
    "fscache", "9pnet", "9pnet_virtio", "9p", "sch_tbf",
)  # fmt: skip
"""Kernel modules to load, in this order: each after the modules that it needs."""
BOOT_S, MEMORY_MB = 300.0, 1024
KERNEL_ARGUMENTS = "console=ttyS0 quiet panic=-1 no_timer_check clocksource=hpet tsc=unstable mitigations=off"
"""Arguments of the virtual machines' kernel.

The clock is the HPET, because the kernel cannot calibrate the TSC (a processor's cycle counter) of a busy emulator. Mitigations
are off, because an emulated processor takes twice as long with them."""
PORT_KBITS = 500
"""Rate of each port in kbit/s. At this low rate, a port needs a second to send the 64 packets that Soft-RoCE keeps in
flight. If the receiving machine has to wait up to a second for a real processor, the port still has packets to send."""
LIMIT_RATE = "tbf rate {kbits}kbit burst 4kb latency 5s"
"""Arguments of tc(8) that limit the rate of a port. The port's queue holds what the port sends in 5 s: more than all packets in
flight."""
QP_TIMEOUT = 20
"""Timeout exponent for perftest: Soft-RoCE repeats an unacknowledged packet after 4 s (4.096 µs x 2^20). perftest's default is
67 ms."""
INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /root
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in {modules}; do insmod /modules/$module.ko; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose root /root
for directory in proc sys dev; do mount --bind /$directory /root/$directory; done
mount -t tmpfs run /root/run # for temporary files too: a tmpfs on /tmp would hide a checkout in /tmp
mount -t tmpfs state /root/var/lib; mkdir /root/var/lib/rackproof
mkdir -p /dev/shm /root/run/lldpd; mount -t tmpfs shm /dev/shm; mount -t tmpfs shm /root/dev/shm; hostname {host}
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none shared /root/mnt
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONPATH={root} PYTHONDONTWRITEBYTECODE=1 TMPDIR=/run
{setup}
chroot /root {python} {guest} {host} /mnt
poweroff -f
"""
SETUP = """chroot /root /bin/sh -exc 'ip link set lo up; ip addr add 10.0.0.{number}/24 dev eth0; ip link set eth0 up
sysctl -qw net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2'
# The leaf switches of all rails are connected, so a port must answer ARP only for its own address (see sysctl above).
"""
RAIL = """chroot /root /bin/sh -exc 'ip addr add 10.{rail}.0.{number}/24 dev eth{rail}; ip link set eth{rail} up
rdma link add rxe{rail} type rxe netdev eth{rail}
tc qdisc add dev eth{rail} root {limit}'
"""
LLDPD = "chroot /root lldpd -I 'eth[1-9]' -O /dev/null\n"
PERFTEST = """mkdir -p /root/run/bin; cp /root/mnt/clock.so /root/run/
cat >/root/run/bin/ib_write_bw <<'end'
#!/bin/sh
# perftest polls without pause: at normal priority, it would take the processor from the agent that supervises it
renice -n 19 -p $$ >/dev/null
LD_PRELOAD=/run/clock.so exec /usr/bin/ib_write_bw -u {timeout} "$@"
end
chmod +x /root/run/bin/ib_write_bw
export PATH=/run/bin:$PATH
"""


class Machines:
    """Running virtual machines. A request has one command for each machine; all machines run their commands at the same time."""

    def __init__(self, hosts: Sequence[str], rails: int, directory: Path, leaves: Switches) -> None:
        """
        Args:
            hosts: names of the virtual machines.
            rails: number of rails, which is the number of RDMA ports of each machine.
            directory: directory for the kernel logs of the machines and for the files that the machines share.
            leaves: the leaf switches, one for each rail.
        """
        self.hosts, self._directory, self.switches = tuple(hosts), directory, leaves
        self.addresses = {host: f"10.0.0.{number}" for number, host in enumerate(hosts, 1)}
        self.shared = directory / "shared"
        """Directory that the machines see as /mnt."""
        self._number = 0
        """Number of the next request."""
        self.shared.mkdir(parents=True)
        clock = [str(Path(__file__).with_name("clock.c")), "-o", str(self.shared / "clock.so")]
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", *clock], check=True)
        self._processes = [self._boot(number, rails) for number in range(1, len(hosts) + 1)]
        for number in range(1, len(hosts) + 1):
            leaves.attach_management(_tap(number, 0), number)
            for rail in range(1, rails + 1):
                leaves.attach(_tap(number, rail), rail - 1, number)

    def run(self, limit_s: float, **commands: str) -> dict[str, int]:
        """Run a shell command on each machine; return host -> exit code.

        Args:
            limit_s: seconds within which every machine must answer.
            commands: host -> its command. The key `all` has the command of hosts without an entry (default: an empty command).

        Raises AssertionError, with the end of each kernel log, if a machine stops or does not answer in time.
        """
        default = commands.pop("all", "")
        self._post({host: commands.get(host, default) for host in self.hosts})
        paths = [self.shared / f"{self._number - 1}.{host}.json" for host in self.hosts]
        self._wait(paths, limit_s)
        return {host: json.loads(path.read_text()) for host, path in zip(self.hosts, paths, strict=True)}

    def wait_until_booted(self) -> None:
        """Wait until each machine is ready for requests."""
        self._wait([self.shared / f"ready.{host}" for host in self.hosts], BOOT_S)

    def end(self) -> None:
        """Turn the machines off."""
        self._post(None)
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _post(self, request: Mapping[str, str] | None) -> None:
        part = self.shared / f"{self._number}.part"
        part.write_text(json.dumps(request))
        part.rename(self.shared / f"{self._number}.json")
        self._number += 1

    def _wait(self, paths: Sequence[Path], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not all(path.exists() for path in paths):
            late = [path.name for path in paths if not path.exists()]
            ended = any(process.poll() is not None for process in self._processes)
            assert not ended, f"a virtual machine has stopped\n{self._logs()}"
            assert time.monotonic() < deadline, (
                f"the machines have not written {', '.join(late)} within {limit_s:g} s\n{self._logs()}"
            )
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(f"--- {host}\n{self._log(host).read_text(errors='replace')[-3000:]}" for host in self.hosts)

    def _log(self, host: str) -> Path:
        return self._directory / f"{host}.log"

    def _boot(self, number: int, rails: int) -> subprocess.Popen[bytes]:
        host = self.hosts[number - 1]
        limit = LIMIT_RATE.format(kbits=PORT_KBITS)
        rail_setup = "".join(RAIL.format(rail=rail, number=number, limit=limit) for rail in range(1, rails + 1))
        init = INIT.format(
            modules=" ".join(MODULES),
            root=ROOT,
            setup=SETUP.format(number=number) + rail_setup + LLDPD + PERFTEST.format(timeout=QP_TIMEOUT),
            python=sys.executable,
            guest=ROOT / "tests/rdma/guest.py",
            host=host,
        )
        image = self._directory / f"{host}.initramfs.gz"
        _write_initramfs(image, init)
        command = [
            *("qemu-system-x86_64", "-accel", "tcg", "-cpu", "Nehalem", "-m", str(MEMORY_MB), "-smp", "2", "-nographic"),
            "-no-reboot",
            *("-kernel", str(next(KERNEL.glob("boot/vmlinuz-*"))), "-initrd", str(image), "-append", KERNEL_ARGUMENTS),
            *self._networks(number, rails),
            *("-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"),
            *("-virtfs", f"local,path={self.shared},mount_tag=shared,security_model=none"),
        ]  # fmt: skip
        with self._log(host).open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def _networks(self, number: int, rails: int) -> Iterator[str]:
        for rail in range(rails + 1):
            tap = f"tap,id=net{rail},ifname={_tap(number, rail)},script=no,downscript=no"
            speed = ",speed=1,duplex=full" if rail else ""
            yield from ("-netdev", tap)
            mac = f"52:54:00:29:{rail:02x}:{number:02x}"
            yield from ("-device", f"virtio-net-pci,netdev=net{rail},mac={mac}{speed},romfile=")


def _tap(number: int, rail: int) -> str:
    """Return the name that QEMU gives the tap interface of port ethRAIL of machine `number`. Rail 0 is the management port."""
    return f"rp{os.getpid()}-{number}-{rail}"


@contextmanager
def machines(hosts: Sequence[str], rails: int, directory: Path) -> Iterator[Machines]:
    """Yield booted virtual machines that are attached to the switches of their rails."""
    _unpack_kernel()
    with switches(rails) as leaves:
        running = Machines(hosts, rails, directory, leaves)
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
    assert package, f"apt-cache names no kernel package for {platform.machine()}: {depends}"
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
    """Write a compressed cpio archive (format newc) with busybox, the kernel modules and the script `init`, the first process."""
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
