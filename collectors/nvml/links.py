"""NVLinks: which are up, how fast they are, what went wrong on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pynvml as nvml

from collectors.base import Absent, Labels, Value
from collectors.nvml.calls import UnreadError, read, unsupported
from collectors.nvml.gpu import Gpu, value
from collectors.nvml.rows import ONCE, Row, name_of

_NO_NVLINK = "the part has no NVLink"
_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0"}
_SWITCH = nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH

States = dict[int, bool | Absent]
"""NVLink -> is it up?"""


class LinkKind(NamedTuple):
    """A reading that each NVLink has one of: its `error_counter` before NVLink 5, else the first of `fields` that the part has.

    The fields 161 to 163 would be the same counters, but R580 frees what it has not allocated where they are read: a process
    that asked for one of them a thousand times was often ended by the C library (measured, 2 and 4 H200, 580.159.04).
    """

    name: str
    unit: str
    counter: bool
    help: str
    fields: tuple[int, ...] = ()
    error_counter: int | None = None
    of: Callable[[Any], Value] = int


def _bit_error_ratio(code: int) -> float:
    """Mantissa and exponent, as NVML packs them."""
    return float(code >> 8 & 0xF) * 10.0 ** -(code & 0xFF)


ACTIVE = LinkKind("gpu.nvlink.active", "1", False, "The NVLink is up")
LINK_KINDS = (
    LinkKind("gpu.nvlink.speed", "B/s", False, "Speed of the NVLink, one way", (164, 90),
             of=lambda speed: speed * 1_000_000),
    LinkKind("gpu.nvlink.replays", "1", True, "Replays on the NVLink", (), nvml.NVML_NVLINK_ERROR_DL_REPLAY),
    LinkKind("gpu.nvlink.recoveries", "1", True, "Recoveries of the NVLink", (215,), nvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    LinkKind("gpu.nvlink.crc_errors", "1", True, "CRC errors on the NVLink", (), nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
    LinkKind("gpu.nvlink.failed_recoveries", "1", True, "Recoveries of the NVLink that failed (NVLink 5)", (214,)),
    LinkKind("gpu.nvlink.receive_errors", "1", True, "Packets received with errors (NVLink 5)", (208,)),
    LinkKind("gpu.nvlink.symbol_errors", "1", True, "Symbol errors on the NVLink (NVLink 5)", (221,)),
    LinkKind("gpu.nvlink.effective_errors", "1", True, "Errors left after error correction (NVLink 5)", (219,)),
    LinkKind("gpu.nvlink.effective_error_ratio", "ratio", False, "Bit errors left after error correction (NVLink 5)",
             (220,), of=_bit_error_ratio),
)  # fmt: skip


def states(gpu: Gpu) -> States:
    """Every NVLink of the part. Raises UnreadError where it has none, or does not say of any whether it is up."""

    def ask() -> States:
        found: States = {}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            up = read(lambda: bool(gpu.ask("NvLinkState", link)))  # noqa: B023
            if isinstance(up, Absent) and up.status == "unsupported":
                break  # links are numbered from 0; the first that the part does not have ends the list
            found[link] = up
        if not found:
            raise unsupported(_NO_NVLINK)
        first = next(iter(found.values()))
        if isinstance(first, Absent) and all(up == first for up in found.values()):
            raise UnreadError(first)
        return found

    return gpu.once("nvlink", ask)


def all_known(gpu: Gpu) -> dict[int, bool]:
    """As `states`. Raises UnreadError where one link does not say whether it is up."""
    found = states(gpu)
    for up in found.values():
        if isinstance(up, Absent):
            raise UnreadError(up)
    return {link: bool(up) for link, up in found.items()}


def _missing(gpu: Gpu) -> int:
    """Links that are down though others are up. Only behind a switch is it certain that all of them should be."""
    found = all_known(gpu)
    up = [link for link in found if found[link]]
    if not up:
        raise unsupported("no NVLink is up: without bridge or switch none can be")
    if gpu.ask("NvLinkRemoteDeviceType", up[0]) != _SWITCH:
        raise unsupported("the NVLinks end at other GPUs: how many there should be is up to the board")
    return len(found) - len(up)


LINK_ROWS = (
    Row("gpu.nvlink.link_count", "1", False, "NVLinks of the part", lambda gpu: len(states(gpu))),
    Row("gpu.nvlink.active_links", "1", False, "NVLinks that are up", lambda gpu: sum(all_known(gpu).values())),
    Row("gpu.nvlink.missing_links", "1", False, "NVLinks to a switch that are down", _missing),
    Row("gpu.nvlink.version", "1", False, "NVLink version",
        lambda gpu: name_of(gpu.ask("NvLinkVersion", next(iter(states(gpu)))), _VERSIONS), ONCE),
)  # fmt: skip


def link_states(gpu: Gpu) -> Iterator[tuple[str, Labels, Value | Absent]]:
    """Whether each NVLink is up; where there is none, one of the GPU that says why."""
    found = read(lambda: states(gpu))
    if isinstance(found, Absent):
        yield ACTIVE.name, {}, found
        return
    for link, up in found.items():
        yield ACTIVE.name, {"link": str(link)}, up


def link_readings(gpu: Gpu) -> Iterator[tuple[str, Labels, Value | Absent]]:
    """The other readings of each NVLink; where there are none of a kind, one of the GPU that says why."""
    found = read(lambda: states(gpu))
    for kind in LINK_KINDS:
        if isinstance(found, Absent):
            yield kind.name, {}, found
            continue
        told = read(lambda: _told(gpu, kind, list(found)))  # noqa: B023
        if isinstance(told, Absent):
            yield kind.name, {}, told
            continue
        for link, seen in told.items():
            yield kind.name, {"link": str(link)}, seen


def _told(gpu: Gpu, kind: LinkKind, every: Sequence[int]) -> Mapping[int, Value | Absent]:
    """What each link tells of this kind. Raises UnreadError where the part has no such thing."""
    if kind.error_counter is not None and (counted := _counted(gpu, kind.error_counter, every)):
        return counted
    for number in kind.fields:
        if number in gpu.never:
            continue
        given = gpu.fields((number, link) for link in every)
        told = {link: read(lambda: kind.of(value(field))) for (_, link), field in given.items()}  # noqa: B023
        if any(_is_there(seen) for seen in told.values()):
            return told
        if any(up is True for up in states(gpu).values()):
            gpu.never.add(number)
    raise unsupported("NVML: Not Supported")


def _counted(gpu: Gpu, counter: int, every: Sequence[int]) -> dict[int, Value | Absent]:
    """The counter of each link; empty where this part does not have it, which one that is up is enough to tell."""
    found: dict[int, Value | Absent] = {}
    for link in every:
        found[link] = read(lambda: int(gpu.ask("NvLinkErrorCounter", link, counter)))  # noqa: B023
        if not _is_there(found[link]) and states(gpu)[link] is True and not any(map(_is_there, found.values())):
            return {}
    return found if any(map(_is_there, found.values())) else {}


def _is_there(seen: Value | Absent) -> bool:
    """Whether the part has such a thing, be it that it cannot be read now."""
    return not isinstance(seen, Absent) or seen.status == "error"
