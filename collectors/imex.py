"""IMEX, the daemon with which the hosts of an NVLink domain share GPU memory: its state, and its connections to the other hosts.

`nvidia-imex-ctl -N -j` queries the daemons of all hosts of the domain and prints JSON. Early versions of driver R570 have no
`-j`; then the table that `nvidia-imex-ctl -N` prints is parsed.
"""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from collectors.base import HOST_LABELS, Absent, Family, Value, empty_families
from collectors.files import Files
from collectors.imex_domain import NOT_REPORTED, ImexDomain, ImexNode, parse_json, parse_text
from collectors.programs import DIRECTORIES, find_program, run_program
from collectors.wiring.neighbor import clean_text

PROGRAM = "nvidia-imex-ctl"
PLACES = (*DIRECTORIES, "opt/nvidia/imex/bin", "usr/local/nvidia/imex/bin")
"""Directories that are searched for the program. DCGM also searches the last two."""
DEADLINE_S = 10.0
"""Time limit of the program in seconds. It is long, because the program waits for hosts that do not answer."""
KINDS = {
    "fabric.imex.state": ("1", "State of the IMEX daemon; ready: it works"),
    "fabric.imex.domain_state": ("1", "State of the IMEX domain: up, degraded, down"),
    "fabric.imex.node_count": ("1", "Hosts in the IMEX domain, this one included"),
    "fabric.imex.address": ("1", "Address of this host in the IMEX domain"),
    "fabric.imex.node_address": ("1", "Address of a host of the IMEX domain"),
    "fabric.imex.node_version": ("1", "Version of the IMEX daemon of a host of the domain"),
    "fabric.imex.connection": ("1", "State of the connection from this host to another host of the IMEX domain"),
}
OF_NODES = ("fabric.imex.node_address", "fabric.imex.node_version", "fabric.imex.connection")
"""Readings of each host of the domain. Their label `imex` is the number of the host in the domain."""
STATES = frozenset(
    {
        "initializing", "starting_auth_server", "waiting_for_peers", "waiting_for_recovery", "init_gpu", "ready",
        "shutting_down", "unavailable",
    }
)  # fmt: skip
Process = subprocess.CompletedProcess[str]
_NOT_CONFIGURED = "Failed to read node configuration file"
_LOCAL = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s*/32 host LOCAL")
_NOT_REPORTED = Absent.unsupported("not reported")
_NO_ADDRESS = Absent.error(
    "this host's connections are not known: no node of the IMEX domain, or more than one, has the name or an address of this host"
)


def imex_families(root: Path) -> Iterable[Family]:
    """Return the families of KINDS. If the domain cannot be read, the families of OF_NODES have no readings."""
    families = empty_families(KINDS, varying=KINDS)
    for name in OF_NODES:
        families[name].labels = ("imex",)
    state = _read_state(root)
    # If the program hangs, fails or is not installed, do not run it a second time.
    domain = state if isinstance(state, Absent) else _read_domain(root)
    own = domain if isinstance(domain, Absent) else own_number(Files(root), domain.nodes)
    readings: Mapping[str, Value | Absent] = {
        "state": state,
        "domain_state": domain if isinstance(domain, Absent) else domain.state,
        "node_count": domain if isinstance(domain, Absent) else len(domain.nodes),
        "address": own if isinstance(own, Absent) or isinstance(domain, Absent) else domain.nodes[own].address,
    }
    for name, value in readings.items():
        families[f"fabric.imex.{name}"].add(HOST_LABELS, value)
    if not isinstance(domain, Absent):
        _add_nodes(families, domain, own)
    return families.values()


def _add_nodes(families: Mapping[str, Family], domain: ImexDomain, own: int | Absent) -> None:
    """Add the readings of each host of the domain, and the connections of this host to the others."""
    for number, node in sorted(domain.nodes.items()):
        labels = {"imex": str(number)}
        families["fabric.imex.node_address"].add(labels, node.address or _NOT_REPORTED)
        families["fabric.imex.node_version"].add(labels, node.version or _NOT_REPORTED)
        if number != own:
            connections = {} if isinstance(own, Absent) else domain.nodes[own].connections
            connection = connections.get(number, NOT_REPORTED)
            families["fabric.imex.connection"].add(labels, own if isinstance(own, Absent) else connection)


def _read_state(root: Path) -> str | Absent:
    output = _output(_run(root, "-q"), "-q")
    if isinstance(output, Absent):
        return output
    word = output.strip().lower()
    return word if word in STATES else Absent.error(f"{PROGRAM} -q: not a state of the daemon: {clean_text(output)!r}")


def _read_domain(root: Path) -> ImexDomain | Absent:
    result = _run(root, "-N", "-j")
    if isinstance(result, Absent):
        return result
    try:
        return parse_json(result.stdout)
    except ValueError:
        text = _output(_run(root, "-N"), "-N")
    try:
        return text if isinstance(text, Absent) else parse_text(text)
    except ValueError as error:
        return Absent.error(f"{PROGRAM} -N: {error}: {clean_text(text)!r}")


def _run(root: Path, *arguments: str) -> Process | Absent:
    """Run the program. Return `unsupported` if it is not installed, or IMEX is not configured on this host."""
    path = find_program(root, PROGRAM, PLACES)
    if path is None:
        return Absent.unsupported(f"no {PROGRAM}")
    process = run_program(path, *arguments, deadline_s=DEADLINE_S)
    if not isinstance(process, Absent) and _NOT_CONFIGURED in process.stdout + process.stderr:
        return Absent.unsupported("IMEX is not configured: the host has no node configuration file")
    return process


def _output(process: Process | Absent, option: str) -> str | Absent:
    """Return the standard output; an `error` with the exit code and the message if the program failed."""
    if isinstance(process, Absent) or not process.returncode:
        return process if isinstance(process, Absent) else process.stdout
    shown = clean_text(process.stderr or process.stdout)
    return Absent.error(f"{PROGRAM} {option}: exit code {process.returncode}: {shown!r}")


def own_number(files: Files, nodes: Mapping[int, ImexNode]) -> int | Absent:
    """Return the number of this host in the domain.

    A node is this host if its `address` is the name or an address of this host. Return an `error` unless exactly one node
    matches.
    """
    tables = (files.read("proc/net/fib_trie", _LOCAL.findall), files.read("proc/net/if_inet6", _ipv6_addresses))
    local = {address for table in tables if not isinstance(table, Absent) for address in table}
    name = files.read("proc/sys/kernel/hostname", str)
    names = set() if isinstance(name, Absent) or not name else {name, name.split(".")[0]}
    own = [number for number, node in nodes.items() if _canonical(node.address) in local | names]
    return own[0] if len(own) == 1 else _NO_ADDRESS


def _ipv6_addresses(text: str) -> list[str]:
    """Return the addresses in /proc/net/if_inet6. Raises ValueError."""
    return [str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in text.splitlines()]


def _canonical(address: str) -> str:
    """Return an IP address in its usual form; any other text as it is."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address
