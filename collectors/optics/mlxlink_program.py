"""Run mlxlink for the link and the module of an adapter."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from collectors.base import Absent, ReadingError
from collectors.optics.mlxlink import Rows, parse_rows
from collectors.programs import error_message, run_program

DEADLINE_S = 8.0


def run_mlxlink(tool: Path | None, adapter: str) -> Rows | Absent:
    """Return the rows that mlxlink prints, or why there are none.

    The status is `unsupported` if neither mlxlink nor mstlink is installed, or if the tool does not support the adapter.
    """
    if tool is None:
        return Absent.unsupported("no mlxlink or mstlink (MFT, mstflint)")
    call = partial(run_program, tool, "-d", adapter, "-m", "-c", deadline_s=DEADLINE_S)
    result = call("--json")
    if not isinstance(result, Absent) and result.returncode and "json" in error_message(result).lower():
        result = call()  # old versions write text only
    if isinstance(result, Absent):
        return result
    if result.returncode == 0:
        try:
            return parse_rows(result.stdout)
        except ReadingError as error:
            return error.absent
    if "not supported" in error_message(result):
        return Absent.unsupported(f"{tool.name}: {error_message(result)}")
    return Absent.error(f"{tool.name} -d {adapter}: exit code {result.returncode}: {error_message(result)}")
