"""What an optical module or cable reports about itself: identity, measurements, and how these compare with its limits.

The limits are in the EEPROM of the module (SFF-8472, SFF-8636, CMIS). The alarm flags of the module are not used: a flag stays
set until it is read, and ethtool reads the flags of CMIS lanes with a wrong mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from collectors.base import Absent, Value

MAX_TEXT = 64
NO_LINK = "the port has no link"
NO_LIGHT_W = 1e-7
"""Power up to which a lane counts as dark. Without light, tools print -40 dBm (0.0001 mW), 0 mW or -inf dBm."""
MODULE, LANE = ("temperature", "voltage"), ("rx_power", "tx_power", "bias")
"""Quantities of the whole module, and of each lane."""
FLAGS = ("rx_los", "tx_fault")
"""Flags of each lane."""
RECEIVED, SENT = ("rx_power", "rx_los"), ("tx_power", "bias")
"""Quantities and flags that show whether a lane receives light, and those that show whether it sends light."""
IDENTITY = ("vendor", "part_number", "serial", "firmware_version", "type", "state")
LOW_POWER, FAULT = "ModuleLowPwr", "ModuleFault"
ALARM, WARNING = "alarm", "warning"
WITH_LIMITS = ("rx_power", "tx_power")
"""Quantities whose limits are readings too, because a power alone does not show whether it is too low or too high."""
_NOT_OWN = "the lane {} no light, and a port without a link shares the module"
_LEAST_SERIAL = 3
"""Minimum number of different characters in a serial. Placeholders such as `N/A` and `0000` have fewer, or no digit."""
_NOT_REPORTED = Absent.unsupported("neither module nor tool reports it; copper cables report no measurements")
NONE, LOW, HIGH = "none", "low", "high"
"""Values of `optics.*.alarm` and `optics.*.warning`: the value is within the module's limits, below the low limit, or
above the high limit."""
LIMITS = tuple(
    f"{quantity}.{level}_{side}" for quantity in WITH_LIMITS for level in (ALARM, WARNING) for side in (LOW, HIGH)
)
"""Readings with the limits themselves."""

Readings = dict[tuple[str, str], "Value | Absent"]
"""Name without the leading `optics.`, and number of the lane (empty: the whole module) -> value."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Low and high limit of a quantity."""

    low: float
    high: float

    def side(self, value: float) -> str:
        """Return LOW if the value is below the limits, HIGH if it is above them, otherwise NONE."""
        return LOW if value < self.low else HIGH if value > self.high else NONE


@dataclass(kw_only=True)
class Module:
    """One module. Powers are in W, bias currents in A, the temperature in °C, the voltage in V.

    Lists have the value of the first lane at index 0. Readings number the lanes from 1.
    """

    identity: dict[str, str] = field(default_factory=dict)
    """Name in IDENTITY -> text. Only names that the module reports are included."""
    values: dict[str, float] = field(default_factory=dict)
    """Quantity in MODULE -> value."""
    lanes: dict[str, list[float]] = field(default_factory=dict)
    """Quantity in LANE -> value of each lane."""
    flags: dict[str, list[bool]] = field(default_factory=dict)
    """Name in FLAGS -> flag of each lane."""
    limits: dict[tuple[str, str], Limits] = field(default_factory=dict)
    """Quantity and ALARM or WARNING -> limits. Limits that are not a range are left out."""
    is_unreadable: bool = False
    """Whether the memory page that has the measurements could not be read."""

    def add_limits(self, quantity: str, level: str, low: float | None, high: float | None) -> None:
        """Add limits, unless they are missing or not a range, such as two zeros on a module without limits."""
        if low is not None and high is not None and low < high:
            self.limits[quantity, level] = Limits(low=low, high=high)

    @property
    def _state(self) -> str:
        return self.identity.get("state", "")

    @property
    def _of_lanes(self) -> Mapping[str, Sequence[float]]:
        return {**self.lanes, **self.flags}

    @property
    def _lane_count(self) -> int:
        return max(map(len, self._of_lanes.values()), default=0)

    def _is_used(self, lane: int) -> bool:
        """Return whether the lane at this index is in use: it has light or current, or the module measures no lane.

        The cage may have more lanes than the module. A tool may report these surplus lanes as lanes without signal. They have
        neither light nor current.
        """
        measured = self.lanes.values()
        return not measured or any(lane < len(values) and values[lane] for values in measured)

    @property
    def _dark_lanes(self) -> frozenset[int]:
        """Indices of the lanes in use that receive no light or report the loss of the signal."""
        dark = [index for index, power in enumerate(self.lanes.get("rx_power", ())) if power <= NO_LIGHT_W]
        lost = [index for index, flag in enumerate(self.flags.get("rx_los", ())) if flag]
        return frozenset(index for index in (*dark, *lost) if self._is_used(index))

    @property
    def _sent(self) -> Sequence[float]:
        """For each lane a value that is 0 if the lane sends no light: its power, or the current if the power is not measured."""
        return self.lanes.get("tx_power") or self.lanes.get("bias") or ()

    @property
    def _silent_lanes(self) -> frozenset[int]:
        """Indices of the lanes in use that send no light. The adapter switches the lasers of a disabled port off."""
        return frozenset(lane for lane, value in enumerate(self._sent) if value <= NO_LIGHT_W and self._is_used(lane))

    @property
    def identity_key(self) -> tuple[object, ...] | None:
        """Values that are equal if two ports show the same module; None if the module has no serial that identifies it.

        The two ends of a splitter cable may have one serial. They differ in the number of lanes or in the lanes without light.
        """
        serial = self.identity.get("serial", "")
        if len(set(serial)) < _LEAST_SERIAL or not any(character.isdigit() for character in serial):
            return None
        return self.identity.get("vendor"), self.identity.get("part_number"), serial, self._lane_count, self._dark_lanes

    def _of_ports_without_a_link(self, lanes: frozenset[int], links: Sequence[bool]) -> bool:
        """Return whether there are `lanes`, and all of them can be those of ports without a link.

        Args:
            lanes: indices of the lanes that receive or send no light.
            links: for each port that shares the module, whether it has a link. Each port has the same number of lanes. Without a
                link, all lanes of a port may be dark.
        """
        of_port, remainder = divmod(self._lane_count, len(links))
        if len(links) == 1 or remainder or not of_port or len(lanes) % of_port:
            return False
        return 0 < len(lanes) // of_port <= links.count(False)

    def readings(self, *, has_link: bool, links: Sequence[bool] = (True,)) -> Readings:
        """Return every reading of the module. A reading that the module does not report is absent, with the reason.

        Args:
            has_link: whether the port has a link.
            links: for each port that shares the module, this one included, whether it has a link.
        """
        readings: Readings = {}
        for name in IDENTITY:
            known = self.identity.get(name)
            readings[f"module.{name}", ""] = known or _NOT_REPORTED
        readings["module.fault", ""] = self._state == FAULT if self._state else _NOT_REPORTED
        if self.is_unreadable:
            return readings | _all_absent(Absent.error("the module's memory page with the measurements cannot be read"))
        for quantity in MODULE:
            value = self.values.get(quantity, _NOT_REPORTED)
            readings |= self._with_sides(quantity, "", value)
        readings |= self._limit_readings()
        for name in (*LANE, *FLAGS):
            dark = self._dark_lanes if name in RECEIVED else self._silent_lanes if name in SENT else frozenset()
            not_own = dark if self._of_ports_without_a_link(dark, links) else frozenset()
            readings |= self._lane_readings(name, not_own, has_link=has_link)
        return readings

    def _with_sides(self, quantity: str, lane: str, value: Value | Absent) -> Readings:
        """Return the value, and whether it is below or above the alarm limits and the warning limits (LOW, HIGH or NONE)."""
        sides: Readings = {(quantity, lane): value if isinstance(value, Absent) else float(f"{value:.6g}")}
        for level in (ALARM, WARNING):
            limits = self.limits.get((quantity, level))
            missing = Absent.unsupported(f"neither module nor tool reports {level} limits")
            side = limits.side(float(value)) if limits and not isinstance(value, Absent | str) else missing
            sides[f"{quantity}.{level}", lane] = value if isinstance(value, Absent) else side
        return sides

    def _limit_readings(self) -> Readings:
        """Return the module's limits for the optical power of a lane, which are the same for every lane."""
        readings: Readings = {}
        for quantity, level in itertools.product(WITH_LIMITS, (ALARM, WARNING)):
            limits = self.limits.get((quantity, level))
            missing = Absent.unsupported(f"neither module nor tool reports {level} limits")
            for side in (LOW, HIGH):
                value = float(f"{getattr(limits, side):.6g}") if limits else missing
                readings[f"{quantity}.{level}_{side}", ""] = value
        return readings

    def _lane_readings(self, name: str, not_own: Collection[int], *, has_link: bool) -> Readings:
        """Return the readings of this quantity or flag for each lane. `not_own`: the indices of lanes of other ports.

        If the module does not report it on any lane, the result has absent readings of the whole module.
        """
        lanes = self._of_lanes
        if name not in lanes:
            return dict.fromkeys(_names(name), _NOT_REPORTED)
        reason = self._why_meaningless(name, has_link=has_link)
        readings: Readings = {}
        for index in range(self._lane_count):
            is_own = self._is_used(index) and index not in not_own
            is_known = index < len(lanes[name]) and is_own and not reason
            other = _NOT_OWN.format("sends" if name in SENT else "receives")
            absent = Absent.unsupported(reason or (other if index in not_own else "the lane is not in use"))
            value: Value | Absent = lanes[name][index] if is_known else absent
            lane = str(index + 1)
            readings |= {(name, lane): value} if name in FLAGS else self._with_sides(name, lane, value)
        return readings

    def _why_meaningless(self, name: str, *, has_link: bool) -> str:
        """Return why this quantity or flag is absent on every lane; empty if its values are valid."""
        if self._state in (LOW_POWER, FAULT):
            return f"the module is in the state {self._state}"
        received = self.lanes.get("rx_power", [])
        is_dark = bool(received) and not any(value > NO_LIGHT_W for value in received)
        lost = self.flags.get("rx_los") or []
        if not has_link and name in RECEIVED and (is_dark or (lost and all(lost))):
            return f"{NO_LINK}, and no lane receives light"
        if not has_link and name in SENT and self._sent and max(self._sent) <= NO_LIGHT_W:
            return f"{NO_LINK}, and no lane sends light"
        if has_link and name == "rx_power" and is_dark and lost and not any(lost):
            return "all lanes have a signal, but the module measures no light"  # some active cables cannot measure it
        return ""


def _names(name: str) -> Iterator[tuple[str, str]]:
    yield name, ""
    if name not in FLAGS:
        yield f"{name}.{ALARM}", ""
        yield f"{name}.{WARNING}", ""


def _all_absent(absent: Absent) -> Readings:
    keys = [key for name in (*MODULE, *LANE, *FLAGS) for key in _names(name)]
    return dict.fromkeys((*keys, *((name, "") for name in LIMITS)), absent)


def absent_module(absent: Absent) -> Readings:
    """Return every reading of a module that could not be read. The value of each is `absent`."""
    names = [*(f"module.{name}" for name in IDENTITY), "module.fault"]
    return {**{(name, ""): absent for name in names}, **_all_absent(absent)}


def clean_text(text: str) -> str:
    """Return a text of a module without control characters and padding, cut to MAX_TEXT characters."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split()).strip("_ ")[:MAX_TEXT]
