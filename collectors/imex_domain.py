"""Parse what `nvidia-imex-ctl -N` prints: the hosts of an IMEX domain, and the connections between their daemons."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from collectors.wiring.neighbor import clean_text

STATES = frozenset({"up", "degraded", "down"})
CONNECTED, NOT_REPORTED = "connected", "not_reported"
_CODES = {
    "C": CONNECTED, "N": "never_connected", "R": "recovering", "D": "disconnected", "I": "invalid",
    "A": "authenticating", "!V!": "version_mismatch", "!M!": "node_map_mismatch",
}  # fmt: skip
"""Code of a connection's state in the table of `-N` -> the state's name in the JSON of `-N -j`, in lower case."""
_MAX_NODES = 1024
_NODE = re.compile(r"^Node #(\d{1,4})\s+- (\S+)\s+- \S+(?:\s+- Version: (\S+))?\s*$", re.MULTILINE)
_DOMAIN = re.compile(r"^Domain State:\s*(\S+)", re.MULTILINE)
_HEADER = re.compile(r"Nodes From\\To((?:\s+\d{1,4})+)\s*$")


@dataclass(kw_only=True)
class ImexNode:
    """A host of the domain, as reported by its own daemon, or only by other daemons in their lists of connections."""

    address: str = ""
    """Address or name, as in the node configuration file."""
    version: str = ""
    """Version of the host's IMEX daemon; empty if not reported, as in the text output of early R570 drivers."""
    connections: dict[int, str] = field(default_factory=dict)
    """Number of another host -> state of the connection from this host to it."""


@dataclass(frozen=True, kw_only=True)
class ImexDomain:
    """The IMEX domain."""

    state: str
    """One of STATES."""
    nodes: dict[int, ImexNode]
    """Number of a host in the domain -> the host."""


def parse_json(text: str) -> ImexDomain:
    """Return the domain in the output of `-N -j`. Raises ValueError if the text is not such output.

    A host whose daemon cannot be reached is missing from `nodes` in the output. It is added if another host lists a
    connection to it.
    """
    try:
        document = json.loads(text)
        nodes: dict[int, ImexNode] = {}
        for number, item in document["nodes"].items():
            node = nodes.setdefault(_number(number), ImexNode())
            node.address, node.version = clean_text(item["host"]), clean_text(item.get("version", ""))
            for other, connection in item.get("connections", {}).items():
                node.connections[_number(other)] = clean_text(connection["status"]).lower()
                peer = nodes.setdefault(_number(other), ImexNode())
                peer.address = peer.address or clean_text(connection["host"])
        return _checked(document["status"], nodes)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not the JSON of an IMEX domain ({type(error).__name__})") from error


def parse_text(text: str) -> ImexDomain:
    """Return the domain in the output of `-N`. Raises ValueError if the text is not such output.

    The legend, which explains the codes in the table of connections, is ignored.
    """
    nodes = {
        _number(number): ImexNode(address=clean_text(address), version=clean_text(version or ""))
        for number, address, version in _NODE.findall(text)
    }
    columns: list[int] = []
    for line in text.splitlines():
        words = line.split()
        if header := _HEADER.search(line):
            columns = [int(number) for number in header[1].split()]
        elif len(words) == len(columns) + 1 > 1 and words[0].isdecimal() and int(words[0]) in nodes:
            states = [_CODES.get(code, clean_text(code).lower()) for code in words[1:]]
            nodes[int(words[0])].connections = dict(zip(columns, states, strict=True))
    state = _DOMAIN.search(text)
    if not state or not columns:
        raise ValueError("no connectivity table")
    return _checked(state[1], nodes)


def _checked(state: object, nodes: dict[int, ImexNode]) -> ImexDomain:
    word = clean_text(state).lower()
    if word not in STATES or not 0 < len(nodes) <= _MAX_NODES:
        raise ValueError(f"not an IMEX domain: {len(nodes)} hosts, state {word!r}")
    return ImexDomain(state=word, nodes=nodes)


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise ValueError(f"not the number of a host: {clean_text(text)!r}")
    return int(text)
