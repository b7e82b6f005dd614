"""The PCIe links between an RDMA adapter and the memory from which it transfers, and the data rate that they allow."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

USABLE = 0.9
"""Share of a link's raw rate that is left for data. Headers, acknowledgements and flow control take the rest: about 9 % with
payloads of 256 B, and 5 % with payloads of 512 B."""
NVIDIA = "0x10de"
Links = tuple[tuple[str, float], ...]
"""For each link: the PCI address of its upper end, and its usable rate in B/s, one way."""
_ADDRESS = re.compile(r"[\da-f]{4,}:[\da-f]{2}:[\da-f]{2}\.[0-7]")


def links_above(device: Path) -> Links:
    """Return every link with a known rate between a device and its processor; empty if the device is not on the PCI bus.

    The rate of a link is what a healthy host should reach: the highest speed that both ends support, with all lanes of the lower
    end. So neither a degraded link nor a slot with too few lanes lowers it.
    """
    with contextlib.suppress(OSError):
        return tuple(_links(device.resolve(strict=True)))
    return ()


def _links(device: Path) -> Iterator[tuple[str, float]]:
    """Yield the links. Within a PCIe switch, the step from one of its ports to another one is no link."""
    path = [directory for directory in (device, *device.parents) if _ADDRESS.fullmatch(directory.name)]
    for lower, upper in list(pairwise(path))[::2]:
        with contextlib.suppress(OSError, ValueError):  # a text such as `Unknown` is no number
            transfers = min(float(_text(end / "max_link_speed").split(" ")[0]) for end in (lower, upper))
            lanes = int(_text(lower / "max_link_width"))
            bits = 8 / 10 if transfers <= 5.0 else 128 / 130
            if math.isfinite(rate := transfers * 1e9 * lanes * bits / 8 * USABLE) and rate > 0:
                yield upper.name, rate


def links_to_gpu(adapter: Links, gpu: Path) -> Links:
    """Return the links between an adapter and the memory of a GPU.

    Args:
        adapter: the links above the adapter. Links that are also above the GPU carry no data between adapter and GPU.
        gpu: the GPU. If the port above the GPU is by NVIDIA (as in Grace hosts), NVLink-C2C connects the GPU to its processor.
            Data then reach the GPU's memory over the processor, not over the PCIe links of the GPU.
    """
    links = links_above(gpu)
    with contextlib.suppress(OSError):
        if _text(gpu.resolve(strict=True).parent / "vendor") == NVIDIA:
            return adapter
    return tuple(link for link in (*adapter, *links) if link not in adapter or link not in links)


def allowed_rate(links: Links, of_all: Iterable[Links], measured: float = 0.0) -> float:
    """Return the data rate in B/s that `links` allow to one of several transfers at the same time; infinite if nothing is known.

    Args:
        links: the links of the transfer.
        of_all: for each transfer, this one included, its links. Transfers over the same link share its rate.
        measured: the rate of the transfer in B/s. A link whose raw rate is lower is ignored, because that rate must be wrong.
            Bridges within an adapter may state wrong rates.
    """
    used = [dict(each) for each in of_all]
    shares = (rate / sum(upper in each for each in used) for upper, rate in links if measured <= rate / USABLE)
    return min(shares, default=math.inf)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()
