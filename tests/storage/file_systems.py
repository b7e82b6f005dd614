"""File systems of lab hosts: an ext4 image as local disk, and a directory of one host that the others mount over the network.

The hosts of the lab (`tests.lab.lab`) are network namespaces of this machine. The shared file system is sshfs, because the kernel
of this machine may have no NFS client. The functions inject faults that other network file systems have, too: the file system is
slow (`limit`) or hangs (`freeze`). The program `FLIP` changes stored data on the server.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lab import processes
from tests.lab.lab import Lab

LOCAL, SHARED, EXPORT = "/data", "/mnt/shared", "/export"
IMAGE_BYTES = 192 << 20
FUSE = ("c", "10", "229")
"""Type, major and minor number of /dev/fuse, as mknod(1) takes them."""
FLIP = """
import os, time
size = {size}
while True:
    for entry in os.scandir("/export"):
        path = f"/export/{{entry.name}}/shard0"
        try:
            if os.stat(path).st_size == size:
                with open(path, "r+b") as file:
                    file.seek(4321); byte = file.read(1)[0]
                    file.seek(4321); file.write(bytes([byte ^ 1])); file.flush(); os.fsync(file.fileno())
                raise SystemExit
        except OSError:
            pass
    time.sleep(0.002)
"""
"""Program for the server: wait until a file `shard0` of a checkpoint has `size` bytes, flip one bit of its byte 4321, and end."""


def make_disk(lab: Lab, host: str, directory: Path) -> Path:
    """Mount a new ext4 file system at LOCAL of the host. This machine mounts it as well; return the path of that mount."""
    image, here = directory / f"{host}.img", directory / f"{host}.mount"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    here.mkdir()
    processes.run(["mkfs.ext4", "-q", "-m", "0", image])
    processes.run(["mount", "-o", "loop", image, here])
    lab.on(host, "mkdir", "-p", LOCAL)
    processes.run([sys.executable, "-m", "tests.lab.shared", str(lab.host(host).pid), here, LOCAL], timeout=20)
    return here


def mount_shared(lab: Lab, host: str, server: str) -> None:
    """Mount the directory EXPORT of the host `server` at SHARED of `host`, with sshfs."""
    lab.on(server, "mkdir", "-p", EXPORT)
    lab.on(host, "mkdir", "-p", SHARED)
    lab.on(host, "sh", "-c", f"test -e /dev/fuse || mknod -m 666 /dev/fuse {' '.join(FUSE)}")
    lab.put(host, "/root/storage-key", lab.key.read_text(), mode=0o600)
    options = (
        "IdentityFile=/root/storage-key,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,direct_io,dir_cache=no"
    )
    lab.on(host, "sshfs", "-F", "/dev/null", "-o", options, f"root@{lab.host(server).address}:{EXPORT}", SHARED)


def limit(lab: Lab, host: str, rate: str) -> None:
    """Limit the rate at which the host sends, and the rate at which it receives, to `rate`. This replaces an earlier limit."""
    tbf = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
    lab.on(host, "tc", "qdisc", "replace", "dev", "eth0", *tbf)
    switch = lab.control.removesuffix("control") + "switch"
    processes.run(["tc", "-n", switch, "qdisc", "replace", "dev", host, *tbf])


def freeze(lab: Lab, host: str) -> None:
    """Stop the sshfs process of the host, so that every access to the shared file system hangs."""
    lab.on(host, "pkill", "-STOP", "-x", "sshfs")


def thaw(lab: Lab, host: str) -> None:
    """Let the stopped sshfs process of the host continue."""
    lab.on(host, "pkill", "-CONT", "-x", "sshfs")
