"""Test that connections of foreign machines do not disturb a gang (the hosts of one multi-node launch).

Real supervisors (each watches the ranks of its host), torchrun and gloo run on three lab hosts.

The two foreign machines are not hosts of the gang. One is on the fabric. The other is on a management network, to which node1 is
also connected.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator

import pytest

from tests.lab.lab import Lab
from tests.lab.processes import run
from tests.lab.test_silence import HOSTS, Gang, common_reason, limit_links, wait

RENDEZVOUS, STATUSES = 29500, (29501, 29502)
"""TCP ports. RENDEZVOUS: torch's TCPStore on node1. STATUSES: where node1 (29501) and node2 (29502) receive the statuses that the
supervisors send to each other."""
ON_FABRIC, ON_MANAGEMENT = "10.77.0.99", "10.88.0.99"
"""Addresses of the two foreign machines."""
FIRST_ON_MANAGEMENT = "10.88.0.11"
"""Address of node1 on the management network."""
REFUSED, DROPPED, ADMITTED = "refused", "dropped", "admitted"
"""Results of an attempt to connect. DROPPED: no answer until the timeout."""
SECONDS = 14.0
"""Duration of the benchmark, during which the foreign machines connect."""
LONG_SECONDS = 100.0
"""Duration of the benchmark in a test that kills a supervisor before the benchmark ends."""

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.5).close()
    print("admitted")
except TimeoutError:
    print("dropped")
except OSError:
    print("refused")
"""
NONSENSE = """
import os, socket, sys
keep = []
for number in range(150):
    for port in sys.argv[2:]:
        try:
            connection = socket.create_connection((sys.argv[1], int(port)), 3)
            data = [b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(20_000), bytes(1000), b"\\x01", b"", b"{}\\n" * 400][number % 6]
            connection.sendall(data)
        except OSError:
            continue
        if number % 3:
            connection.close()
        else:
            keep.append(connection)  # stays open until this program ends
print(len(keep))
"""
TORCH_STORE_CLIENT = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
for key in ("roll", "rackproof/roll", "barrier/0", "roll/0", "/rackproof/roll", "init/"):
    store.set(key, "rank 0 cannot take part: forged")
    store.delete_key(key)
print("done")
"""


class FinishingGang(Gang):
    """A launch with one rank per host, whose benchmark ends after `seconds`.

    `admit` is the value of `--admit`: who can connect to the ports of the launch, `anyone` or `members`.
    """

    ranks = {host: (rank,) for rank, host in enumerate(HOSTS)}  # noqa: RUF012
    during = "collective all_reduce in_place 4096 B"
    """The phase in which ranks measure. The links are slow, so the ranks mostly wait, which leaves the CPUs to other tests."""

    def __init__(self, lab: Lab, admit: str, members: tuple[str, ...], seconds: float) -> None:
        super().__init__(lab, admit, members=members)
        plan = json.loads(self._plan)
        plan["stages"][0]["benchmarks"]["collective"] |= {"sizes_bytes": [4096], "seconds": seconds, "precision": 1e-9}
        self._plan, self.options = json.dumps(plan), f"--admit {admit}"

    def listening(self, host: str) -> set[tuple[str, int]]:
        """Return address and port of every TCP listener on a host, except those of sshd."""
        lines = self.lab.on(host, "ss", "-Hltnp").stdout.splitlines()
        addresses = [line.split()[3].rpartition(":") for line in lines if '"sshd"' not in line]
        return {(address.strip("[]"), int(port)) for address, _, port in addresses}

    def check_finished(self) -> None:
        """Check that the launch finishes on every host, and leaves no process and no TCP listener."""
        launches = self.wait_for_launches(self.members, time.monotonic(), 90)
        assert {host: launch["outcome"] for host, launch in launches.items()} == dict.fromkeys(self.members, "finished")
        codes = [rank["exit_code"] for launch in launches.values() for rank in launch["ranks"]]
        assert codes == [0] * len(self.members)
        wait(lambda: not any(self.processes(host) for host in self.members), 10)
        assert {host: self.listening(host) for host in self.members} == {host: set() for host in self.members}


class ForeignMachines:
    """Two network namespaces outside the gang: one on the fabric, one on a management network with node1."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.fabric, self.management = (
            f"{lab.control.removesuffix('-control')}-{name}" for name in ("fabric", "managing")
        )
        lab._plug(self.fabric, "stranger", ON_FABRIC)
        first = lab.host("node1").namespace
        self._ip("netns", "add", self.management)
        self._ip(
            "link", "add", "eth0", "netns", self.management, "type", "veth", "peer", "name", "mgmt0", "netns", first
        )
        for namespace, device, address in (
            (self.management, "eth0", ON_MANAGEMENT),
            (first, "mgmt0", FIRST_ON_MANAGEMENT),
        ):
            self._ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
            self._ip("-n", namespace, "link", "set", device, "up")

    @staticmethod
    def _ip(*arguments: str) -> None:
        run(["ip", *arguments])

    def _python(self, namespace: str, program: str, *arguments: str) -> str:
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program, *arguments]
        return run(command, timeout=120).stdout.strip()

    def try_connection(self, namespace: str, address: str, port: int) -> str:
        """Connect from a namespace; return REFUSED, DROPPED or ADMITTED."""
        return self._python(namespace, CONNECT, address, str(port))

    def send_nonsense(self, namespace: str, address: str, *ports: int) -> None:
        """Send nonsense to `ports` from a namespace, and keep some of the connections open until everything is sent.

        If `ports` includes RENDEZVOUS, also set and delete guessed keys with a client of the TCPStore.
        """
        kept_open = self._python(namespace, NONSENSE, address, *map(str, ports))
        print(f"150 connections to each of the ports {ports}; {kept_open} in total stayed open until the sender ended")
        if RENDEZVOUS in ports:
            print("TCPStore client:", self._python(namespace, TORCH_STORE_CLIENT, address, str(RENDEZVOUS)))

    def route_fabric_over_management(self) -> None:
        """Let the machine on the management network reach node1's fabric address over the management network."""
        first = self.lab.host("node1").address
        self._ip("-n", self.management, "route", "replace", first, "via", FIRST_ON_MANAGEMENT)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("strangers") / "lab") as new_lab, limit_links(new_lab):
        yield new_lab


@pytest.fixture(scope="module")
def foreign_machines(lab: Lab) -> ForeignMachines:
    return ForeignMachines(lab)


def start_gang(lab: Lab, admit: str, members: tuple[str, ...], seconds: float) -> FinishingGang:
    """Start a launch, wait until every rank measures, and check that its hosts listen only on their fabric addresses."""
    gang = FinishingGang(lab, admit, members, seconds)
    gang.start()
    gang.wait_until_measuring()
    listening = {host: gang.listening(host) for host in members}
    for host, addresses in listening.items():
        print(f"{host} listens on", ", ".join(f"{address}:{port}" for address, port in sorted(addresses)))
        assert {address for address, _ in addresses} == {lab.host(host).address}
    # gloo listens on higher ports, which the kernel chooses.
    gang_listeners = {
        (endpoint[1], host) for host, addresses in listening.items() for endpoint in addresses if endpoint[1] < 30000
    }
    assert gang_listeners == {(RENDEZVOUS, "node1"), (STATUSES[0], "node1"), (STATUSES[1], "node2")}
    return gang


def test_gang_listens_only_on_the_fabric_and_survives_nonsense(lab: Lab, foreign_machines: ForeignMachines) -> None:
    gang = start_gang(lab, "anyone", ("node1", "node2"), SECONDS)
    ports = sorted(port for _, port in gang.listening("node1"))
    assert {
        port: foreign_machines.try_connection(foreign_machines.management, FIRST_ON_MANAGEMENT, port) for port in ports
    } == dict.fromkeys(ports, REFUSED)
    assert foreign_machines.try_connection(foreign_machines.management, FIRST_ON_MANAGEMENT, 22) == ADMITTED

    assert foreign_machines.try_connection(foreign_machines.fabric, lab.host("node1").address, RENDEZVOUS) == ADMITTED
    foreign_machines.send_nonsense(foreign_machines.fabric, lab.host("node1").address, RENDEZVOUS, STATUSES[0])
    foreign_machines.send_nonsense(foreign_machines.fabric, lab.host("node2").address, STATUSES[1])
    gang.check_finished()


def test_only_members_are_admitted_and_a_killed_supervisor_leaves_nothing_behind(
    lab: Lab, foreign_machines: ForeignMachines
) -> None:
    gang = start_gang(lab, "members", HOSTS, LONG_SECONDS)
    first, second = (lab.host(host).address for host in ("node1", "node2"))
    gang_endpoints = [(first, RENDEZVOUS), (first, STATUSES[0]), (second, STATUSES[1])]
    results = {
        endpoint: foreign_machines.try_connection(foreign_machines.fabric, *endpoint) for endpoint in gang_endpoints
    }
    print("foreign machine on the fabric:", results)
    assert results == dict.fromkeys(gang_endpoints, DROPPED)
    foreign_machines.route_fabric_over_management()
    assert foreign_machines.try_connection(foreign_machines.management, first, 22) == ADMITTED
    results = {
        endpoint: foreign_machines.try_connection(foreign_machines.management, *endpoint)
        for endpoint in gang_endpoints[:2]
    }
    print("foreign machine that reaches the fabric address over the management network:", results)
    assert results == dict.fromkeys(gang_endpoints[:2], DROPPED)
    member = lab.on("node3", sys.executable, "-c", CONNECT, first, str(RENDEZVOUS)).stdout.strip()
    assert (member, foreign_machines.try_connection(foreign_machines.fabric, first, 22)) == (ADMITTED, ADMITTED)

    supervisor = gang.pid("node2", "rackproof.* launch --run-dir")
    since = time.monotonic()
    lab.on("node2", "kill", "-KILL", supervisor)
    wait(lambda: gang.processes("node2") == "", 5)
    text = common_reason(gang.wait_for_launches(("node1", "node3"), since, 15))
    assert text.startswith("host node2: no messages for 10 s; check its link, host and supervisor")
    gang.check_no_processes(HOSTS)
    assert {host: gang.listening(host) for host in HOSTS} == {host: set() for host in HOSTS}
    assert {
        endpoint: foreign_machines.try_connection(foreign_machines.fabric, *endpoint) for endpoint in gang_endpoints
    } == dict.fromkeys(gang_endpoints, REFUSED)
    if shutil.which("nft"):
        assert all(lab.on(host, "nft", "list", "ruleset").stdout.strip() == "" for host in HOSTS)
