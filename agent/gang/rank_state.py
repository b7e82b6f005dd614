"""The state of one rank, as its supervisor (the process that runs the launch on a host) observes and reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

MAX_TEXT = 512


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of one rank. Times are ages in seconds, so that clocks of different hosts are never compared."""

    rank: int
    scope: str
    """Device: `gpu=3`, or `cpu=0` for a rank on CPUs. Empty if the launcher is at fault: it ended the rank, or failed before
    any rank started."""
    phase: str = ""
    sequence: int = 0
    """Number of collective operations that the rank has started. All ranks count the same operations, so that the numbers can be
    compared."""
    grouped: bool = False
    """Whether the ranks depend on one another in this phase."""
    waiting_s: float | None = None
    """Time inside the current collective operation; None outside one."""
    progress_s: float = 0.0
    """Time since the rank last recorded progress, or began or ended a collective operation."""
    alive_s: float | None = None
    """Time since the first heartbeat; None before it."""
    silent_s: float = 0.0
    """Time since the last heartbeat; 0 before the first."""
    stopped: bool = False
    """The process is stopped, for example by SIGSTOP."""
    busy: bool = False
    """The process sends no heartbeats, but uses a CPU (another thread holds the GIL) or waits for a device. It does not count as
    silent."""
    failure: str = ""
    """How the rank failed: `timeout` or `error`; empty if it has not failed. A failed benchmark counts only if all ranks run it
    together."""
    failure_age_s: float | None = None
    """Time since that failure; None without one."""
    joined: bool = False
    """Whether the ranks have exchanged data (`RankHeartbeat.joined`)."""
    exception: str = ""
    """Why the rank failed, if a device cannot be the cause: a Python exception (`RankHeartbeat.record_exception`), or a fault of
    the host's configuration or software."""
    ended_s: float | None = None
    """Time since the process ended; None while it runs."""
    exit_code: int | None = None
    """Negative for a signal; None if unknown, or if the rank still runs."""
    terminated_by_launcher: bool = False
    """The launcher asked the rank to end, or the launcher or the supervisor ended before the rank."""
    why: str = ""
    """How the rank ended, in words; empty if only the exit code is known."""


def parse_rank_state(document: object) -> RankState:
    """Return the state that another supervisor sent. Raises ValueError."""
    if not isinstance(document, Mapping):
        raise ValueError("not a rank state: not an object")
    invalid = [str(name) for name, value in document.items() if not _has_type(value, _TYPES.get(name, ()))]
    if invalid or not {"rank", "scope"} <= set(document):
        raise ValueError(f"not a rank state: {', '.join(invalid) or 'rank or scope is missing'}")
    return RankState(**document)


def _json_types(hint: Any) -> tuple[type, ...]:
    """Return the types that a field may have. A float may also be an int, because JSON does not distinguish 1 from 1.0."""
    types = get_args(hint) or (hint,)
    return (*types, int) if float in types else types


_TYPES = {name: _json_types(hint) for name, hint in get_type_hints(RankState).items()}


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool) and bool not in types:
        return False
    return isinstance(value, types) and (not isinstance(value, str) or len(value) <= MAX_TEXT)
