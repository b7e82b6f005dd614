"""Degrade the links of lab hosts: limit their rate, delay frames, or drop frames."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.lab import processes
from tests.lab.lab import Lab
from tests.lab.machine import NAMESPACES

WIRE = Path(__file__).with_name("wire.py")

Fault = Callable[[Lab, str], AbstractContextManager[None]]


@contextmanager
def limited(lab: Lab, host: str, rate: str, burst: str = "64kb") -> Iterator[None]:
    """Limit the rate at which the host sends. After a pause, the first `burst` bytes are not limited.

    `rate` and `burst` are values for `tc`.
    """
    qdisc = ("dev", "eth0", "root", "tbf")
    lab.on(host, "tc", "qdisc", "add", *qdisc, "rate", rate, "burst", burst, "latency", "100ms")
    try:
        yield
    finally:
        lab.on(host, *["tc", "qdisc", "del", "dev", "eth0", "root"])


@contextmanager
def delayed(lab: Lab, host: str, delay_s: float = 0.02) -> Iterator[None]:
    """Delay each frame from and to the host by `delay_s`."""
    with _wired(lab, host, delay_s, 0.0):
        yield


@contextmanager
def lossy(lab: Lab, host: str, lost: float) -> Iterator[None]:
    """Drop frames from and to the host. `lost` is the share of full frames (1500 B) that are dropped."""
    with _wired(lab, host, 0.0, lost):
        yield


@contextmanager
def _wired(lab: Lab, host: str, delay_s: float, lost: float) -> Iterator[None]:
    """Insert wire.py, which delays or drops frames, between the switch port of the host and the bridge of the switch."""
    switch = lab.control.removesuffix("control") + "switch"
    near, far = f"{host}-in", f"{host}-out"

    def ip(*arguments: str) -> None:
        processes.run(["ip", "-n", switch, *arguments], timeout=10)

    ip("link", "add", near, "type", "veth", "peer", "name", far)
    ip("link", "set", near, "up")
    ip("link", "set", host, "nomaster")
    command = [
        "nsenter",
        f"--net={NAMESPACES / switch}",
        sys.executable,
        str(WIRE),
        host,
        near,
        str(delay_s),
        str(lost),
    ]
    wire = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert wire.stdout is not None
        assert wire.stdout.readline() == "ready\n"
        ip("link", "set", far, "master", "bridge", "up")
        yield
    finally:
        wire.kill()
        processes.close_pipes(wire)
        wire.wait()
        ip("link", "del", near)
        ip("link", "set", host, "master", "bridge", "up")
