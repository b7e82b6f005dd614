"""The settings with which NCCL uses RDMA ports. perftest uses the same, so that it measures the path of NCCL.

On RoCE, the GID selects the VLAN and the address of a port. Traffic class and service level select the priority of the packets,
which may be the only one that the switches treat as lossless.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agent.run.preflight import nccl_files

AUTOMATIC = -1
"""NCCL_IB_GID_INDEX if NCCL chooses the GID, which is the default."""
NO_GID = AUTOMATIC, ""
IPV4, IPV6, LINK_LOCAL = "IPv4", "IPv6", "link-local"
ROCE_TYPES = {"IB/RoCE v1": "RoCE v1", "RoCE v1": "RoCE v1", "RoCE v2": "RoCE v2"}
"""Type of a GID in sysfs -> name of the version of RoCE."""
_NUMBER = re.compile(r"\s*([+-]?)(?:0x([\da-f]+)|(0[0-7]*)|(\d+))", re.ASCII | re.IGNORECASE)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, kw_only=True)
class NcclRdma:
    """The settings, with NCCL's defaults."""

    hca: str = ""
    """NCCL_IB_HCA: the ports that NCCL uses; empty if it uses all."""
    gid_index: int = AUTOMATIC
    """Index of the GID of each RoCE port; AUTOMATIC or less if NCCL chooses it by the next three settings."""
    family: str = IPV4
    """IPV4 or IPV6."""
    network: Network | None = None
    """The network of the address; None if any network is allowed."""
    version: str = "RoCE v2"
    pkey_index: int = 0
    service_level: int = 0
    traffic_class: int = 0

    def uses(self, hca: str, port: int) -> bool:
        """Return whether NCCL uses a port of an adapter.

        `mlx5_1,mlx5_2:1` selects each adapter whose name begins with `mlx5_1`, and port 1 of those with `mlx5_2`. After `=`, the
        whole name must match. After `^`, the ports are excluded. Fields after the port (rail and plane) select nothing.
        """
        names, excludes = self.hca.removeprefix("^"), self.hca.startswith("^")
        is_whole, parts = names.startswith("="), names.removeprefix("=").split(",")
        listed = [(name, number) for name, number, *_ in (f"{part}:".split(":") for part in parts) if name]
        matches = any(
            (hca == name if is_whole else hca.startswith(name)) and number in ("", str(port)) for name, number in listed
        )
        return (matches or not listed) is not excludes

    def gid(self, entries: Mapping[int, tuple[str, str]]) -> tuple[int, str]:
        """Return index and type of the GID that NCCL uses for a RoCE port; NO_GID if no GID has the version and the network.

        NCCL uses the first GID of the port with the family, version and network, whether its interface is that of the port or a
        VLAN or bond over it. If there is none, NCCL uses GID 0, on which hosts cannot be expected to reach each other. Then this
        function returns the first GID of the other family, or else the first link-local one.

        Args:
            entries: index -> GID and type, as in sysfs, of each entry in use.
        """
        if self.gid_index > AUTOMATIC:
            gid, of_type = entries.get(self.gid_index, ("", ""))
            return self.gid_index, f"{ROCE_TYPES.get(of_type, 'unknown')} {_kind(gid)}".strip()
        order = [self.family, IPV6 if self.family == IPV4 else IPV4, LINK_LOCAL]
        candidates = [
            (order.index(_kind(gid)), index)
            for index, (gid, of_type) in entries.items()
            if ROCE_TYPES.get(of_type) == self.version and _kind(gid) and self._is_in_network(gid)
        ]
        if not candidates:
            return NO_GID
        kind, index = min(candidates)
        return index, f"{self.version} {order[kind]}"

    def _is_in_network(self, gid: str) -> bool:
        address = ipaddress.IPv6Address(gid)
        return self.network is None or (address.ipv4_mapped or address) in self.network


def _kind(gid: str) -> str:
    """Return IPV4, IPV6 or LINK_LOCAL; empty if the text is no GID, or the GID of an entry that is not in use."""
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return ""
    if not int(address):
        return ""
    return IPV4 if address.ipv4_mapped else LINK_LOCAL if address.is_link_local else IPV6


def nccl_rdma(environment: Mapping[str, str]) -> NcclRdma:
    """Return the settings in an environment, or else in the configuration files of NCCL that this environment selects."""
    variables = {**nccl_files(environment)[0], **environment}
    family = IPV6 if variables.get("NCCL_IB_ADDR_FAMILY") == "AF_INET6" else IPV4
    return NcclRdma(
        hca=variables.get("NCCL_IB_HCA", ""),
        gid_index=_number(variables, "NCCL_IB_GID_INDEX", AUTOMATIC),
        family=family,
        network=_network(variables.get("NCCL_IB_ADDR_RANGE", ""), family),
        version=f"RoCE v{_number(variables, 'NCCL_IB_ROCE_VERSION_NUM', 2)}",
        pkey_index=max(0, _number(variables, "NCCL_IB_PKEY", 0)),
        service_level=max(0, _number(variables, "NCCL_IB_SL", 0)),
        traffic_class=max(0, _number(variables, "NCCL_IB_TC", 0)),
    )


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return the number at the beginning of a variable's value, as strtoll with base 0 reads it; `default` if there is none."""
    match = _NUMBER.match(variables.get(name, ""))
    if not match:
        return default
    digits, base = next((text, base) for text, base in zip(match.groups()[1:], (16, 8, 10), strict=True) if text)
    return -int(digits, base) if match[1] == "-" else int(digits, base)


def _network(text: str, family: str) -> Network | None:
    """Return the network in `10.1.0.0/16`; None, as NCCL, if the text is no network of the family."""
    parse: Callable[..., Network] = ipaddress.IPv4Network if family == IPV4 else ipaddress.IPv6Network
    if "/" in text:
        with contextlib.suppress(ValueError):
            return parse(text, strict=False)
    return None
