"""NVLinks: state, speed and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pynvml as nvml

from collectors.base import Absent, Labels, ReadingError, Value, first_absent
from collectors.nvml.calls import try_read, unsupported_error
from collectors.nvml.gpu import NvmlGpu, field_value
from collectors.nvml.rows import CONSTANT, COUNTER, ONCE, VARIES, Row, name_of

_NO_NVLINK = "the part has no NVLink"
_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0"}
_SWITCH = nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH

MAX_EXPONENT = 50
"""A bit error ratio m x 10^-n with a larger n counts as 0: no link transfers 10^50 bits."""
MAX_DENIALS = 3
"""After this many denials by NVML, an NVLink field of a GPU is no longer read. A single denial may be temporary."""

LinkStates = dict[int, bool | Absent]
"""Number of an NVLink -> whether the link is up, or why its state is not known."""


class LinkKind(NamedTuple):
    """A reading with one value per NVLink.

    The value comes from `error_counter`, a counter of nvmlDeviceGetNvLinkErrorCounter. If the GPU lacks this counter, the value
    comes from the first of `fields` (numbers of NVML fields) that the GPU has.

    Fields 161 to 163, which also have the error counters, are not read: in R580, reading them frees memory that was not
    allocated, and after a thousand reads the C library often aborts the process (measured on 2 and 4 H200, driver
    580.159.04).
    """

    name: str
    unit: str
    change: str
    help: str
    fields: tuple[int, ...] = ()
    error_counter: int | None = None
    convert: Callable[[Any], Value] = int


def _bit_error_ratio(code: int) -> float:
    """Return the ratio whose mantissa and exponent NVML packs into `code`. For 15e-255, which means no errors, return 0."""
    mantissa, exponent = code >> 8 & 0xF, code & 0xFF
    return mantissa * 10.0**-exponent if exponent <= MAX_EXPONENT else 0.0


ACTIVE = LinkKind("gpu.nvlink.active", "1", VARIES, "The NVLink is up")
LINK_KINDS = (
    LinkKind("gpu.nvlink.speed", "B/s", CONSTANT, "Speed of the NVLink, one way", (164, 90),
             convert=lambda speed: speed * 1_000_000),
    LinkKind("gpu.nvlink.replays", "1", COUNTER, "Replays on the NVLink", (), nvml.NVML_NVLINK_ERROR_DL_REPLAY),
    LinkKind("gpu.nvlink.recoveries", "1", COUNTER, "Recoveries of the NVLink", (215,), nvml.NVML_NVLINK_ERROR_DL_RECOVERY),
    LinkKind("gpu.nvlink.crc_errors", "1", COUNTER, "CRC errors on the NVLink", (), nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
    LinkKind("gpu.nvlink.failed_recoveries", "1", COUNTER, "Failed recoveries of the NVLink (NVLink 5)", (214,)),
    LinkKind("gpu.nvlink.receive_errors", "1", COUNTER, "Packets received with errors (NVLink 5)", (208,)),
    LinkKind("gpu.nvlink.symbol_errors", "1", COUNTER, "Symbol errors on the NVLink (NVLink 5)", (221,)),
    LinkKind("gpu.nvlink.effective_errors", "1", COUNTER, "Errors remaining after error correction (NVLink 5)", (219,)),
    LinkKind("gpu.nvlink.effective_error_ratio", "ratio", VARIES, "Bit error ratio after error correction (NVLink 5)",
             (220,), convert=_bit_error_ratio),
)  # fmt: skip
PER_LINK = frozenset(kind.name for kind in (ACTIVE, *LINK_KINDS))
"""Names of the readings with one value per NVLink."""


def read_link_states(gpu: NvmlGpu) -> LinkStates:
    """Return the state of every NVLink of the GPU.

    Raises ReadingError if the GPU has no NVLink, or if no state could be read and the reason is the same for every link.
    """

    def query() -> LinkStates:
        states: LinkStates = {}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            states[link] = try_read(lambda: bool(gpu.query("NvLinkState", link)))  # noqa: B023
        # NVML numbers the links from 0, and reports each number after the last link as unsupported.
        while states and _is_unsupported(states[max(states)]):
            del states[max(states)]
        if not states:
            raise unsupported_error(_NO_NVLINK)
        first = states[0]
        if isinstance(first, Absent) and all(state == first for state in states.values()):
            raise ReadingError(first)
        return states

    return gpu.cached("nvlink", query)


def known_link_states(gpu: NvmlGpu) -> dict[int, bool]:
    """Return whether each NVLink is up. Links that NVML reports as unsupported are left out.

    Raises ReadingError if the state of any other link cannot be read.
    """
    states = {link: state for link, state in read_link_states(gpu).items() if not _is_unsupported(state)}
    if absent := first_absent(*states.values()):
        raise ReadingError(absent)
    return {link: bool(state) for link, state in states.items()}


def _link_count(gpu: NvmlGpu) -> int:
    return sum(not _is_unsupported(state) for state in read_link_states(gpu).values())


def _is_unsupported(state: bool | Absent) -> bool:
    return isinstance(state, Absent) and state.status == "unsupported"


def _missing_links(gpu: NvmlGpu) -> int:
    """Return how many links are down, on a GPU whose links go to a switch.

    Raises ReadingError if no link is up, or if the links go to other GPUs. A board without a switch may leave links unused by
    design.
    """
    states = known_link_states(gpu)
    up = [link for link, is_up in states.items() if is_up]
    if not up:
        raise unsupported_error("no NVLink is up: normal without a bridge or switch")
    if gpu.query("NvLinkRemoteDeviceType", up[0]) != _SWITCH:
        raise unsupported_error("the NVLinks end at other GPUs: the board determines how many are in use")
    return len(states) - len(up)


LINK_ROWS = (
    Row("gpu.nvlink.link_count", "1", CONSTANT, "NVLinks of the part", _link_count),
    Row("gpu.nvlink.active_links", "1", VARIES, "NVLinks that are up", lambda gpu: sum(known_link_states(gpu).values())),
    Row("gpu.nvlink.missing_links", "1", VARIES, "NVLinks to a switch that are down", _missing_links),
    Row("gpu.nvlink.version", "1", CONSTANT, "NVLink version",
        lambda gpu: name_of(gpu.query("NvLinkVersion", next(iter(read_link_states(gpu)))), _VERSIONS), ONCE),
)  # fmt: skip


def link_states(gpu: NvmlGpu) -> Iterator[tuple[str, Labels, Value | Absent]]:
    """Yield the state of each NVLink, or one absent reading of the GPU if `read_link_states` raises an error."""
    states = try_read(lambda: read_link_states(gpu))
    if isinstance(states, Absent):
        yield ACTIVE.name, {}, states
        return
    for link, state in states.items():
        yield ACTIVE.name, {"link": str(link)}, state


def link_readings(gpu: NvmlGpu) -> Iterator[tuple[str, Labels, Value | Absent]]:
    """Yield the readings of LINK_KINDS for each NVLink. For a kind that the GPU lacks, yield one absent reading of the GPU."""
    states = try_read(lambda: read_link_states(gpu))
    for kind in LINK_KINDS:
        values = states
        if not isinstance(states, Absent):
            values = try_read(lambda: _read_kind(gpu, kind, list(states)))  # noqa: B023
        if isinstance(values, Absent):
            yield kind.name, {}, values
            continue
        for link, value in values.items():
            yield kind.name, {"link": str(link)}, value


def _read_kind(gpu: NvmlGpu, kind: LinkKind, links: Sequence[int]) -> Mapping[int, Value | Absent]:
    """Return the value of each link. Raises ReadingError if the GPU does not have this kind of reading."""
    if kind.error_counter is not None and (counts := _read_error_counter(gpu, kind.error_counter, links)):
        return counts
    for number in kind.fields:
        if gpu.denied_fields.get(number, 0) >= MAX_DENIALS:
            continue
        fields = gpu.fields((number, link) for link in links)
        values = {link: try_read(lambda: kind.convert(field_value(field))) for (_, link), field in fields.items()}  # noqa: B023
        if any(map(_exists, values.values())):
            gpu.denied_fields[number] = -math.inf
            return values
        if any(state is True for state in read_link_states(gpu).values()):
            gpu.denied_fields[number] = gpu.denied_fields.get(number, 0) + 1
    raise unsupported_error("NVML: Not Supported")


def _read_error_counter(gpu: NvmlGpu, counter: int, links: Sequence[int]) -> dict[int, Value | Absent]:
    """Return the counter of each link; empty if the GPU lacks this counter.

    The links are read in order. If the first active link and all links before it lack the counter, the GPU counts as lacking it.
    The later links are then not read.
    """
    counts: dict[int, Value | Absent] = {}
    for link in links:
        counts[link] = try_read(lambda: int(gpu.query("NvLinkErrorCounter", link, counter)))  # noqa: B023
        if read_link_states(gpu)[link] is True and not any(map(_exists, counts.values())):
            return {}
    return counts if any(map(_exists, counts.values())) else {}


def _exists(value: Value | Absent) -> bool:
    """Return whether the GPU has the value, even if it cannot be read now."""
    return not isinstance(value, Absent) or value.status == "error"
