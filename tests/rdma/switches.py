"""Leaf switches of the virtual machines: a network namespace for each switch, with a bridge and a real lldpd.

The ports with the same number on all machines form a rail: they have cables to the same leaf switch. This module numbers rails
from 0: the ports eth1 form rail 0, and its switch is leaf0. In machines.py, the ports eth1 form rail 1. All other leaf switches
have a link to leaf0. These links replace a spine: if two cables are swapped, each port can still reach the other ports of its
rail. Like real switches, the bridges do not forward LLDP. The management network is a separate bridge in the namespace of leaf0.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LLDP_SETTINGS = (
    "system capabilities enabled bridge",
    "lldp portidsubtype ifname",
    "lldp tx-interval 1",
)
WAIT_S = 60.0
_SPINE, _MANAGEMENT = "spine", "mgmt"


class Switches:
    """Running leaf switches `leaf0`, `leaf1` …: one for each rail. On each switch, host number N is connected to port `swpN`."""

    def __init__(self, rails: int) -> None:
        self._namespaces = [f"rp-leaf{rail}-{os.getpid()}" for rail in range(rails)]
        self._sockets = [Path("/run") / f"{name}.sock" for name in self._namespaces]
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Create the namespaces with their bridges, and start and configure an lldpd in each."""
        for rail, (name, socket) in enumerate(zip(self._namespaces, self._sockets, strict=True)):
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link add br0 type bridge")
            _run(f"ip -n {name} link set br0 up")
            if rail:
                _run(f"ip -n {name} link add {_SPINE} type veth peer name {_SPINE}{rail} netns {self._namespaces[0]}")
                self._connect(rail, _SPINE)
                self._connect(0, f"{_SPINE}{rail}")
            command = f"ip netns exec {name} lldpd -d -u {socket} -I swp* -O /dev/null"
            self._daemons.append(
                subprocess.Popen(command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        _run(f"ip -n {self._namespaces[0]} link add {_MANAGEMENT} type bridge")
        _run(f"ip -n {self._namespaces[0]} link set {_MANAGEMENT} up")
        for rail, socket in enumerate(self._sockets):
            for setting in (f"system hostname leaf{rail}", f"system chassisid 52540029ff{rail:02x}", *LLDP_SETTINGS):
                _run_until_done(["lldpcli", "-u", str(socket), "configure", *setting.split()])

    def attach(self, interface: str, rail: int, host: int) -> None:
        """Wait until the tap interface of a virtual machine exists, and connect it to port swpHOST of the switch of a rail."""
        _run_until_done(["ip", "link", "show", "dev", interface])
        _run(f"ip link set {interface} netns {self._namespaces[rail]} name swp{host}")
        self._connect(rail, f"swp{host}")

    def attach_management(self, interface: str, host: int) -> None:
        """Wait until the tap interface of a virtual machine exists, and connect it to the management network."""
        _run_until_done(["ip", "link", "show", "dev", interface])
        name, namespace = f"{_MANAGEMENT}{host}", self._namespaces[0]
        _run(f"ip link set {interface} netns {namespace} name {name}")
        _run(f"ip -n {namespace} link set {name} master {_MANAGEMENT} up")

    def swap(self, first: int, second: int, host: int) -> None:
        """Swap the cables of host number `host` (from 1) at the leaf switches of the rails `first` and `second` (from 0)."""
        first_leaf, second_leaf = self._namespaces[first], self._namespaces[second]
        _run(f"ip -n {first_leaf} link set swp{host} netns {second_leaf} name moved")
        _run(f"ip -n {second_leaf} link set swp{host} netns {first_leaf}")
        _run(f"ip -n {second_leaf} link set moved name swp{host}")
        for rail in (first, second):
            self._connect(rail, f"swp{host}")

    def end(self) -> None:
        """Stop the daemons and remove the namespaces."""
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait()
        for socket in self._sockets:
            socket.unlink(missing_ok=True)
        for name in self._namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _connect(self, rail: int, interface: str) -> None:
        _run(f"ip -n {self._namespaces[rail]} link set {interface} master br0 up")


@contextmanager
def switches(rails: int) -> Iterator[Switches]:
    """Yield running leaf switches."""
    running = Switches(rails)
    try:
        running.start()
        yield running
    finally:
        running.end()


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def _run_until_done(command: list[str]) -> None:
    """Repeat a command until it exits with code 0; fail after WAIT_S seconds."""
    deadline = time.monotonic() + WAIT_S
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"command failed for {WAIT_S:g} s: {' '.join(command)}"
        time.sleep(0.1)
