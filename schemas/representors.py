"""Which interfaces and RDMA ports of a network adapter are representors.

In switchdev mode (`devlink dev eswitch set`, for example for OVS offload), an adapter contains a switch. The kernel then creates
an interface for each port of this switch: the uplink for the port with the cable, and a representor for each physical, virtual
and subfunction. The driver mlx5 also adds an RDMA port for each of them to the RDMA device of the uplink.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FUNCTION = re.compile(r"[pvs]f-?\d")


def is_representor(phys_port_name: str) -> bool:
    """Return whether an interface with this `phys_port_name` is a representor.

    The name of a representor contains that of a function: `pf0`, `pf0vf1`, `pf0sf1`, `c1pf0` (of another host, on a DPU) or
    `p0pf0vf1` (driver sfc). An uplink is called `p0`, or `p0s1` if its port is split.
    """
    return bool(_FUNCTION.search(phys_port_name))


def ports_with_a_cable(names: Mapping[str, str | None]) -> list[str]:
    """Return the numbers of those RDMA ports of an adapter that are no ports of representors.

    If the adapter has an uplink, a port without an interface belongs to a function that has no representor at present.

    Args:
        names: number of the port -> `phys_port_name` of its interface (empty if it has none); None if the port has no interface.
    """
    uplinks = [number for number, name in names.items() if name is not None and not is_representor(name)]
    return uplinks or [number for number, name in names.items() if name is None]
