"""The readings of a port's physical layer, whichever tool read them: FEC, bit error rates, error counters."""

from __future__ import annotations

from collectors.base import Absent, Value

LINK = {
    "fec_mode": ("1", "Forward error correction (FEC) in use"),
    "raw_ber": ("ratio", "Bit error rate before FEC, since the counters were cleared"),
    "effective_ber": ("ratio", "Bit error rate after FEC, since the counters were cleared"),
    "symbol_ber": ("ratio", "Symbol error rate after FEC, since the counters were cleared"),
    "counter_age": ("s", "Time since the counters of the port were cleared"),
    "status_opcode": ("1", "Code of the problem that the firmware of the adapter finds on the link; 0: none"),
    "status": ("1", "Problem that the firmware of the adapter finds on the link, as text"),
    "speed": ("1", "Speed of the link, as mlxlink names it"),
    "enabled_speed": ("1", "Fastest speed that the settings of the adapter allow, as mlxlink names it"),
    "cable_speed": ("1", "Fastest speed that the module or cable supports, as mlxlink names it"),
}
"""Name without the leading `port.` -> unit and help."""
COUNTERS = {
    "fec_corrected": "Blocks that FEC corrected",
    "fec_uncorrectable": "Blocks with errors that FEC could not correct",
    "corrected_bits": "Bits that FEC corrected",
    "raw_errors": "Errors of the lane before FEC",
    "symbol_errors": "Symbol errors after FEC",
    "link_downs": "Times that the link went down",
    "link_recoveries": "Times that the link recovered from errors without going down",
    "module_errors": "Times that the adapter found the module too hot, its cable shorted or its bus stuck",
    "pfc_received": "Priority pause frames (PFC) received",
    "pfc_sent": "Priority pause frames (PFC) sent",
    "pause_storms": "Times that the adapter stopped sending pause frames because it had sent them for too long",
    "ecn_marked": "Packets received with a congestion mark (ECN)",
    "rx_discards": "Packets discarded on receipt for lack of buffers",
    "tx_discards": "Packets discarded before they were sent",
    "out_of_buffer": "Packets dropped for lack of a receive buffer of the host",
    "allowance_exceeded": "Packets delayed or dropped because the cloud instance exceeded its allowance",
}
"""Name without the leading `port.` -> help. The unit is 1."""
OF_LANE = frozenset({"raw_errors"})

PortReadings = dict[tuple[str, str], "Value | Absent"]
"""Name without the leading `port.`, and number of the lane (empty: the whole port) -> value."""


def absent_port(absent: Absent, *, without: frozenset[str] = frozenset()) -> PortReadings:
    """Return every reading of a port, except those named in `without`. The value of each is `absent`."""
    return {(name, ""): absent for name in (*LINK, *COUNTERS) if name not in without}


def merge(*sources: PortReadings) -> PortReadings:
    """Return the readings of all sources together. Each source has readings of the same port, for example from one tool.

    All lanes of a reading come from the first source that has a value for any lane. If no source has a value, the result has the
    first Absent with the status `error`, or else the first Absent.
    """
    merged: PortReadings = {}
    measured_names: set[str] = set()
    for source in sources:
        names = {name for (name, _), value in source.items() if not isinstance(value, Absent)} - measured_names
        merged |= {key: value for key, value in source.items() if key[0] in names}
        measured_names |= names
    for source in sources:
        for key, value in source.items():
            known = merged.get(key)
            is_worse = (
                isinstance(value, Absent) and isinstance(known, Absent) and value.status == "error" != known.status
            )
            if key[0] not in measured_names and (known is None or is_worse):
                merged[key] = value
    return merged
