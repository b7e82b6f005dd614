"""Show packs and their criteria as tables for a terminal, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from fleet.judge.criteria import Criterion, Pack
from fleet.report.criterion_text import parameter_text, wanted_text
from fleet.report.formatting import clean
from fleet.report.terminal import plain_table


def packs_blocks(packs: Sequence[Pack]) -> list[Table | Text]:
    """Return a table of the packs, and a hint how to list their criteria."""
    table = plain_table("PACK", "CRITERIA", "GPU")
    for pack in packs:
        table.add_row(pack.name, str(len(pack.criteria)), ", ".join(pack.gpu_names))
    hint = "`rackproof criteria list PACK` shows the criteria of one pack, `rackproof criteria list --all` those of all packs"
    return [table, Text(hint)]


def criteria_blocks(packs: Sequence[Pack]) -> list[Table | Text]:
    """Return a table with each criterion of the packs once. It has the column PACK if the criteria come from several packs."""
    criteria = criteria_of(packs)
    has_pack = len({item.origin for item in criteria}) > 1
    table = plain_table(*(["PACK"] if has_pack else []), "CHECK", "ACTION", "READING", "WANTED")
    for item in criteria:
        cells = item.id, item.action.replace("_", " "), _reading(item), clean(wanted_text(item))
        table.add_row(*([item.origin] if has_pack else []), *cells)
    return [table]


def criteria_of(packs: Sequence[Pack]) -> list[Criterion]:
    """Return the criteria of the packs, each once, grouped by the pack that defines it."""
    by_origin: dict[str, dict[str, Criterion]] = {}
    for pack in packs:
        for item in pack.criteria:
            by_origin.setdefault(item.origin, {})[item.id] = item
    return [item for items in by_origin.values() for item in items.values()]


def pack_json(pack: Pack) -> dict[str, Any]:
    """Return name, GPU names and number of criteria of a pack, for the JSON output."""
    return {"pack": pack.name, "gpu_names": list(pack.gpu_names), "criteria": len(pack.criteria)}


def criterion_json(item: Criterion) -> dict[str, Any]:
    """Return a criterion for the JSON output; `wanted` is its limit in words."""
    return {
        "pack": item.origin,
        "id": item.id,
        "name": item.name,
        "where": {key: parameter_text(value) for key, value in item.where.items()},
        "stage": item.stage,
        "wanted": wanted_text(item),
        "action": item.action,
        "severity": item.severity,
        "source": item.source,
        "basis": item.basis,
    }


def _reading(item: Criterion) -> str:
    where = ", ".join(f"{key} {parameter_text(value)}" for key, value in item.where.items())
    return clean(f"{item.name}{f' ({where})' if where else ''}{f', stage {item.stage}' if item.stage else ''}")
