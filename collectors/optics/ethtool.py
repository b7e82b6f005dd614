"""Run ethtool for the module, the FEC and the counters of an Ethernet interface."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

from collectors.base import Absent, ReadingError
from collectors.optics.ethtool_link import parse_fec, parse_statistics
from collectors.optics.ethtool_module import parse_module
from collectors.optics.module import NO_LINK, Module
from collectors.optics.port import PortReadings, absent_port
from collectors.programs import error_message, run_program

DEADLINE_S = 8.0
_NO_TOOL = Absent.unsupported("no ethtool")
_NO_JSON = "JSON output not available"
_CANNOT = ("Operation not supported", "No such device", "no stats available")
"""Messages of ethtool if the interface's driver does not report modules, FEC or counters, or if the interface was removed."""
_NO_MODULE = (
    "Input/output error",
    "Invalid argument",
    "No such device or address",
    "Network is down",
    "Remote I/O error",
)
"""Messages of ethtool if the cage of the port is empty, or if its module cannot be read."""
NOT_COUNTED = frozenset(
    {
        "raw_ber",
        "effective_ber",
        "symbol_ber",
        "counter_age",
        "status_opcode",
        "status",
        "link_recoveries",
        "raw_errors",
        "speed",
        "enabled_speed",
        "cable_speed",
    }
)
"""Readings of a port that the output of `ethtool -S` lacks, or has only for each lane and not for the port."""


class Ethtool:
    """The program `ethtool`."""

    def __init__(self, path: Path | None) -> None:
        """`path`: None if ethtool is not installed."""
        self._path = path

    def module(self, interface: str, *, has_link: bool) -> Module | Absent:
        """Return the module of the interface, or why it could not be read."""
        output = self._run(("-j", "-m", interface), ("-m", interface))
        if isinstance(output, Absent):
            return output
        if output.returncode:
            return _refused(output, has_link=has_link)
        try:
            return parse_module(output.stdout)
        except ReadingError as error:
            return error.absent

    def fec(self, interface: str, *, has_link: bool) -> PortReadings:
        """Return mode and counters of the interface's forward error correction (FEC)."""
        output = self._run(("-I", "-j", "--show-fec", interface), ("--show-fec", interface))
        if isinstance(output, Absent):
            return {("fec_mode", ""): output}
        if output.returncode:
            return {("fec_mode", ""): _refused(output, has_link=has_link)}
        readings = parse_fec(output.stdout)
        if not has_link:
            readings["fec_mode", ""] = Absent.unsupported(NO_LINK)
        return readings

    def statistics(self, interface: str) -> PortReadings:
        """Return the counters that the driver of the interface reports (`ethtool -S`)."""
        output = self._run(("-S", interface))
        if not isinstance(output, Absent) and not output.returncode:
            return parse_statistics(output.stdout)
        absent = output if isinstance(output, Absent) else _refused(output, has_link=True)
        return absent_port(absent, without=NOT_COUNTED | {"fec_mode"})

    def _run(self, *calls: tuple[str, ...]) -> CompletedProcess[str] | Absent:
        """Run ethtool with these lists of arguments in turn, and return the last result.

        Stop at the first list whose options this version of ethtool knows.
        """
        result: CompletedProcess[str] | Absent = _NO_TOOL
        for arguments in calls if self._path else ():
            result = run_program(self._path, *arguments, deadline_s=DEADLINE_S)  # type: ignore[arg-type]
            if isinstance(result, Absent) or not result.returncode:
                return result
            is_unknown_option = _NO_JSON in result.stderr or "bad command line argument" in result.stderr
            if not is_unknown_option:
                return result
        return result


def _refused(output: CompletedProcess[str], *, has_link: bool) -> Absent:
    message = error_message(output)
    # All lines are searched: the kernel's error is in the last line, and some drivers print a text of their own before it.
    # _NO_MODULE is checked before _CANNOT, because "No such device" in _CANNOT is also part of a message in _NO_MODULE.
    no_module = any(text in output.stderr for text in _NO_MODULE)
    if not no_module and any(text in output.stderr for text in _CANNOT):
        return Absent.unsupported(f"ethtool: {message}")
    if no_module and not has_link:
        return Absent.unsupported(f"no module, and {NO_LINK} (ethtool: {message})")
    return Absent.error(f"ethtool: {message}{_HINT if 'not permitted' in output.stderr else ''}")


_HINT = ": run as root on the host"
