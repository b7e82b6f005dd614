"""List the causes in the report of a run: the part, what to do, and the RMA package for the vendor if one was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fleet.report.formatting import cause_action, clean
from fleet.report.tables.summary_text import handling_table
from fleet.report.terminal import plain_table, render_blocks
from fleet.rma.parts import PART_ACTIONS
from fleet.scope_text import describe_scope
from schemas.reports import Cause


@dataclass(frozen=True, kw_only=True)
class Package:
    """An RMA package that was written."""

    path: Path
    """The archive of the package if one was requested (`--zip`), else its directory."""
    model: str
    """Model of the part; its kind, such as `gpu`, if the model is unknown."""
    slot: str
    """PCI address of the part; empty if it has none or the address is unknown."""


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """A cause and one of its parts: a part with a package, or the first part if none has a package."""

    cause: Cause
    host: str
    scope: str
    serial: str
    package: Package | None

    @property
    def action(self) -> str:
        """Return what to do, in the same words as the report, with `(waived)` if the cause is waived."""
        action = cause_action(self.cause.verdict, self.cause.action, self.cause.problem)
        return f"{action}{' (waived)' if self.cause.waiver else ''}".strip()

    def as_json(self) -> dict[str, Any]:
        """Return the row as an object for `rackproof rma --json`."""
        package = self.package
        return {
            "host": clean(self.host),
            "place": clean(self.scope),
            "serial": clean(self.serial),
            "slot": package.slot if package else "",
            "model": package.model if package else "",
            "problem": clean(self.cause.problem),
            "title": clean(self.cause.title),
            "verdict": self.cause.verdict,
            "action": self.cause.action,
            "waived": self.cause.waiver is not None,
            "path": str(package.path) if package else "",
        }


def cause_rows(
    causes: Iterable[Cause], packages: Mapping[tuple[str, str], Package], *, any_action: bool
) -> list[CauseRow]:
    """Return, for each cause, a row for each of its parts with a package, or one row if no part has a package.

    Args:
        causes: causes of the report, the most urgent first. The rows have the same order.
        packages: host and scope of a part -> its package.
        any_action: list the packages of all causes, not only of those with an action in PART_ACTIONS.
    """
    rows = []
    for cause in causes:
        can_have_package = any_action or cause.action in PART_ACTIONS
        packed = [part for part in cause.parts if can_have_package and (part.host, part.scope) in packages]
        rows += [
            CauseRow(
                cause=cause,
                host=part.host,
                scope=part.scope,
                serial=part.serial,
                package=packages[part.host, part.scope] if packed else None,
            )
            for part in packed or cause.parts[:1]
        ]
    return rows


def _cells(row: CauseRow) -> tuple[str, ...]:
    """Return the cells of a row of the table of packages."""
    part = (clean(row.host), clean(describe_scope(row.scope)), clean(row.serial))
    return (row.action, *part, *((row.package.slot, str(row.package.path)) if row.package else ()))


def render_rows(rows: Sequence[CauseRow], mark: str, width: int | None) -> str:
    """Return the rows as tables for a terminal: the packages, the causes without a package, and how to act on each cause.

    Args:
        rows: the rows.
        mark: `REHEARSAL`, `SIMULATED` or empty (`FleetReport.mark`).
        width: maximum length of a line in characters; None: a row is one line of any length.
    """
    packed, others = [row for row in rows if row.package], [row for row in rows if not row.package]
    blocks: list[Table | Text] = [Text(f"{mark}: no hardware was tested.")] if mark else []
    if packed:
        table = plain_table("ACTION", "HOST", "PART", "SERIAL", "SLOT", "PACKAGE")
        # A part with several causes and one action is one row: each row of this table is a part to handle.
        for cells in dict.fromkeys(map(_cells, packed)):
            table.add_row(*cells)
        blocks.append(table)
    else:
        blocks.append(Text("No part of a host needs to be returned, inspected or reseated."))
    if others:
        table = plain_table("ACTION", "CAUSE")
        for row in others:
            serial = f" (serial {clean(row.serial)})" if row.serial and len(row.cause.hosts) == 1 else ""
            why = f": {clean(row.cause.why)}" if row.cause.why else ""
            table.add_row(row.action, clean(row.cause.title) + serial + why)
        blocks += [Text(""), Text("Without a package:"), table]
    how = handling_table({id(row.cause): row.cause for row in rows}.values())
    blocks += [Text(""), how] if how.row_count else []
    return render_blocks(blocks, width=width)
