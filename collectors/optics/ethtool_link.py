"""Parse `ethtool --show-fec` and the rows of `ethtool -S` that describe the physical layer and congestion."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from collectors.base import Absent
from collectors.optics.module import clean_text
from collectors.optics.port import PortReadings

SUMS: Mapping[str, tuple[str, ...]] = {
    "symbol_errors": ("rx_pcs_symbol_err_phy", "rx_symbol_err_phy", "rx_pcs_symbol_err"),
    "link_downs": ("link_down_events_phy", "link_down_events"),
    "fec_corrected": ("rx_fec_corrected_blocks",),
    "fec_uncorrectable": ("rx_fec_uncorrectable_blocks",),
    "corrected_bits": ("rx_corrected_bits_phy", "rx_corrected_bits"),
    "module_errors": ("module_(?:bus_stuck|high_temp|bad_shorted)",),
    "pfc_received": (r"rx_prio\d_pause", "rx_pfc_frames"),
    "pfc_sent": (r"tx_prio\d_pause", "tx_pfc_frames"),
    "pause_storms": ("tx_pause_storm_error_events",),
    "ecn_marked": ("rx_ecn_mark",),
    "rx_discards": ("rx_discards_phy", "rx_total_discard_pkts"),
    "tx_discards": ("tx_discards_phy", "tx_total_discard_pkts"),
    "out_of_buffer": ("rx_out_of_buffer",),
    "allowance_exceeded": (r"\w+_allowance_exceeded",),
}
"""Counter of a port -> patterns for names of rows of `ethtool -S` (drivers mlx5, bnxt, ena). The counter is the sum of all rows
that match one pattern, and the highest sum if several patterns match: mlx5 counts symbol errors in the PCS (those that FEC did
not correct), and again in the MAC, which misses those between packets."""
_LANE_ERRORS = re.compile(r"rx_err_lane_(\d{1,2})_phy")
_NO_ROW = Absent.unsupported("the driver does not count it (ethtool -S)")


def parse_statistics(output: str) -> PortReadings:
    """Return the counters in the output of `ethtool -S`. Counters that the driver does not report are `unsupported`."""
    rows: dict[str, int] = {}
    for line in output.splitlines():
        name, _, value = line.strip().rpartition(": ")  # bnxt has names with `: `, such as `[0]: rx_ucast_packets`
        if value.isdecimal():
            rows[name] = int(value)
    readings: PortReadings = {}
    for counter, patterns in SUMS.items():
        matches = ([rows[name] for name in rows if re.fullmatch(pattern, name)] for pattern in patterns)
        readings[counter, ""] = max((sum(numbers) for numbers in matches if numbers), default=_NO_ROW)
    lanes = {int(match[1]) + 1: rows[name] for name in rows if (match := _LANE_ERRORS.fullmatch(name))}
    for lane, count in lanes.items():
        readings["raw_errors", str(lane)] = count
    if not lanes:
        readings["raw_errors", ""] = _NO_ROW
    return readings


def parse_fec(output: str) -> PortReadings:
    """Return FEC mode and counters in the output of `ethtool --show-fec`, as JSON (option `-j`) or as text.

    A counter that the output lacks is not in the result; ethtool prints counters only with the option `-I`.
    """
    if output.lstrip().startswith("["):
        try:
            document: Any = json.loads(output)[0]
        except (ValueError, IndexError, KeyError, RecursionError) as error:
            return {("fec_mode", ""): Absent.error(f"ethtool --show-fec: not JSON: {error}")}
        statistics, active = (
            (document.get("statistics"), document.get("active", [])) if isinstance(document, dict) else ({}, {})
        )
        if not isinstance(active, list | str):
            return {("fec_mode", ""): Absent.error("ethtool --show-fec: the JSON has an unknown structure")}
        counts = statistics.items() if isinstance(statistics, dict) else ()
        totals = {name: item.get("total") for name, item in counts if isinstance(item, dict)}
        mode = " ".join(map(str, active)) if isinstance(active, list) else active
    else:
        found = re.search(r"^Active FEC encodings?: *(.*)$", output, re.MULTILINE)
        mode = found[1] if found else ""
        totals = {name: int(count) for name, count in re.findall(r"^  (\w+_blocks): (\d+)$", output, re.MULTILINE)}
    mode = clean_text(mode)
    readings: PortReadings = {}
    readings["fec_mode", ""] = mode or Absent.unsupported("the driver reports no FEC mode")
    for name in ("corrected", "uncorrectable"):
        if isinstance(count := totals.get(f"{name}_blocks"), int) and not isinstance(count, bool):
            readings[f"fec_{name}", ""] = count
    return readings
