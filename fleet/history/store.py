"""Add runs, and figures that other tools measured, to the history. Merge the files of single runs into monthly files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet.history import tables
from fleet.history.clocks import clock_fault
from fleet.history.commit import change
from fleet.history.engine import writing
from fleet.history.index import Index, StoredFile, damage, home, read_index, stored
from fleet.history.rows import Row, RunRows, clean_text, duplicates

MAX_LOOSE_RUNS = 64
"""Maximum number of runs with files of their own. If there are more, all of them are merged into monthly files, because few large
files are read faster."""
MAX_NOTES = 20
"""Maximum number of notes of a run in the index."""


def add_run(directory: Path, rows: RunRows, now: datetime | None = None) -> tuple[list[str], str]:
    """Add a run, or replace it if the history already has it.

    Args:
        directory: the history.
        rows: the run.
        now: the present time in UTC (default: that of this machine).

    Returns:
        Notes for the operator (for example, a serial is in two places), and `added` or `replaced`.

    Raises:
        RunError: DuckDB is missing, the index cannot be read, or a file cannot be written.
        OSError: the directory cannot be written.
    """
    place, present = home(directory, rows.kind), f"{now or datetime.now(UTC):%Y-%m-%d %H:%M:%S}"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".new-") as temporary, writing(directory) as database:
        parts, ends = _write_lines(rows, Path(temporary))
        fault = clock_fault(rows.nonce, rows.entry, ends, read_index(directory, rows.kind), present)
        written, notes = _write_tables(database, rows, parts, Path(temporary), has_right_date=not fault)
        notes += [clean_text(f"a clock is wrong: {fault}; trends leave out the run")] if fault else []

        def apply(index: Index) -> tuple[list[str], str]:
            every = [*rows.entry["notes"], *notes, *_name_notes(index, rows)]
            known = index.runs.get(rows.nonce)
            _forget(database, place, index, rows.nonce)
            entry = {**rows.entry, "notes": every[:MAX_NOTES], "added": (known or {}).get("added", present)}
            index.runs[rows.nonce] = {**entry, **({"clock": clean_text(fault)} if fault else {})}
            index.files += [_publish(place, index, path, table, (rows.nonce,)) for table, path in written.items()]
            if len(_loose(index)) > MAX_LOOSE_RUNS:
                _merge(database, place, index)
            return every, "replaced" if known else "added"

        return change(directory, rows.kind, apply)


def merge_runs(directory: Path, kind: str) -> int:
    """Merge all runs that have files of their own into the files of their months; return the number of these runs."""
    with writing(directory) as database:

        def apply(index: Index) -> int:
            count = len(_loose(index))
            _merge(database, home(directory, kind), index)
            return count

        return change(directory, kind, apply)


def _write_lines(rows: RunRows, directory: Path) -> tuple[list[Row], list[str]]:
    """Write the rows of a run to one JSONL file for each table; return the rows of the parts, and the end times of the hosts."""
    parts: list[Row] = []
    ends: list[str] = []
    with ExitStack() as stack:
        files = {
            table: stack.enter_context(_lines(directory, table).open("w", encoding="utf-8")) for table in tables.INPUT
        }
        for host in rows.hosts:
            parts += host.parts
            ends.append(host.ended)
            files["parts"].writelines(json.dumps(row) + "\n" for row in host.parts)
            files["figures"].writelines(json.dumps(row) + "\n" for row in host.figures)
            files["tests"].writelines(json.dumps(row) + "\n" for row in host.tests)
        files["causes"].writelines(json.dumps(row) + "\n" for row in rows.causes)
    return parts, ends


def _lines(directory: Path, table: str) -> Path:
    return directory / f"{table}.jsonl"


def _write_tables(
    database: Any, rows: RunRows, parts: Sequence[Row], directory: Path, *, has_right_date: bool
) -> tuple[dict[str, Path], list[str]]:
    """Write the Parquet files of a run; return table -> file, and notes.

    `has_right_date`: False if the date of the run cannot be right (`clock_fault`). Trends then leave out the run.
    """
    twice = duplicates(parts)
    for name in ("figures_with_peers", "group_levels"):
        database.execute(f"drop table if exists {name}")
    database.execute(tables.with_peers(tables.read_rows("figures", _lines(directory, "figures")), twice))
    database.execute(tables.group_levels())
    shared, relative = tables.run_columns(rows.nonce, rows.entry), "relative" if has_right_date else "null"
    serials = "[" + ", ".join(map(tables.literal, twice)) + "]::varchar[]"
    sources = {
        "figures": f"select * replace ({relative} as relative), {shared} from figures_with_peers",
        "levels": f"select * replace ({relative} as relative), {shared} from group_levels",
        "parts": f"select *, {shared}, part = 'gpu' and serial in (select unnest({serials})) as duplicate "
        f"from {tables.read_rows('parts', _lines(directory, 'parts'))}",
        "causes": f"select *, {shared} from {tables.read_rows('causes', _lines(directory, 'causes'))}",
        "tests": f"select *, {shared} from {tables.read_rows('tests', _lines(directory, 'tests'))}",
    }
    written = {}
    for table, query in sources.items():
        written[table] = directory / f"{table}.parquet"
        database.execute(tables.copy(query, table, written[table]))
    notes = [f"GPU serial {serial} is in {len(slots)} places: {', '.join(slots)}" for serial, slots in twice.items()]
    return written, [clean_text(note) for note in notes]


def _name_notes(index: Index, rows: RunRows) -> list[str]:
    """Return a note if another run has the same name."""
    same = [nonce for nonce, run in index.runs.items() if run["run"] == rows.entry["run"] and nonce != rows.nonce]
    return [f"another run has the same name: {rows.entry['run']}"] if same else []


def _publish(place: Path, index: Index, path: Path, table: str, runs: tuple[str, ...], month: str = "") -> StoredFile:
    """Copy a new file to the directory of its table under a unique name, and return its index entry."""
    name = month or runs[0][:12]
    target = place / table / f"{name}-{uuid.uuid4().hex[:12]}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    index.published.add(str(target.relative_to(place)))
    shutil.copyfile(path, target)  # not moved, because a retry of the change needs the file again
    with target.open("rb") as file:
        os.fsync(file.fileno())  # the data must be on disk before the index lists the file
    return stored(place, target, table, runs, month)


def _loose(index: Index) -> set[str]:
    """Return the nonces of the runs that have files of their own."""
    return {nonce for item in index.files if item.table in tables.PER_RUN and not item.month for nonce in item.runs}


def _forget(database: Any, place: Path, index: Index, nonce: str) -> None:
    """Remove the former version of a run from the index, and its rows from the files of its month if it was merged.

    A damaged monthly file cannot be rewritten. Instead, the run is removed from the list of runs in the file's index entry. An
    entry without runs is removed.
    """
    if nonce not in index.runs:
        return
    month = next((item.month for item in index.files if item.month and nonce in item.runs), "")
    index.files = [item for item in index.files if item.month or nonce not in item.runs]
    for item in [item for item in index.files if nonce in item.runs and damage(place, item)]:
        index.files.remove(item)
        if runs := tuple(other for other in item.runs if other != nonce):
            index.files.append(replace(item, runs=runs))
    if month:
        _rewrite_month(database, place, index, month, without=nonce)


def _merge(database: Any, place: Path, index: Index) -> None:
    """Merge the runs with files of their own into the files of the months in which they began."""
    for month in sorted({index.runs[nonce]["began"][:7] for nonce in _loose(index)}):
        _rewrite_month(database, place, index, month)


def _rewrite_month(database: Any, place: Path, index: Index, month: str, *, without: str = "") -> None:
    """Replace the files of a month by new ones, which also include the runs of the month that have files of their own.

    Damaged files stay as they are. `without`: nonce of a run to leave out, or empty.
    """
    loose = {nonce for nonce in _loose(index) if index.runs[nonce]["began"][:7] == month}
    old = [
        item
        for item in index.files
        if item.month == month or (item.table in tables.PER_RUN and not item.month and set(item.runs) <= loose)
    ]
    old = [item for item in old if not damage(place, item, complete=True)]
    runs = tuple(sorted({nonce for item in old for nonce in item.runs} - {without}))
    index.files = [item for item in index.files if item not in old]
    if not runs:
        return
    with tempfile.TemporaryDirectory(dir=place, prefix=".merge-") as temporary:
        sources: dict[str, str] = {}
        for table in tables.PER_RUN:
            files = [place / item.path for item in old if item.table == table]
            relation = tables.table_rows(table, files) if files else tables.empty(table)
            sources[table] = f"(select * from ({relation}) where nonce <> {tables.literal(without)})"
        sources["trends"] = f"({tables.trend_sums(sources['figures'], sources['levels'])})"
        sources["spreads"] = f"({tables.spreads(sources['figures'])})"
        for table, source in sources.items():
            path = Path(temporary) / f"{table}.parquet"
            database.execute(tables.copy(f"select * from {source}", table, path, merged=True))
            index.files.append(_publish(place, index, path, table, runs, month))


def add_imported(directory: Path, kind: str, entry: Mapping[str, Any], digest: str, figures: Sequence[Row]) -> str:
    """Add the figures of an output file of another tool. `digest` is the SHA-256 of that file.

    Returns:
        `added`; `unchanged` if the history already has the figures of a file with this content; `replaced` if it had them with
        another source, version, model or number of figures, or if the copy of them in the history was damaged.
    """
    place = home(directory, kind)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".new-") as temporary, writing(directory) as database:

        def apply(index: Index) -> str:
            earlier = [item for item in index.files if item.table == "imported" and digest[:32] in item.runs]
            known = index.imports.get(digest, {})
            is_damaged = not earlier or any(damage(place, item, complete=True) for item in earlier)
            model = entry["model"] or known.get("model", "")
            same = all(known.get(key) == entry[key] for key in ("source", "version", "count"))
            if same and model == known.get("model", "") and not is_damaged:
                return "unchanged"
            index.files = [item for item in index.files if item not in earlier]
            path, lines = Path(temporary) / "imported.parquet", Path(temporary) / "imported.jsonl"
            with lines.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps({**row, "model": row["model"] or model}) + "\n" for row in figures)
            source = f"select * from {tables.read_rows('imported', lines)}"
            database.execute(tables.copy(source, "imported", path))
            index.imports[digest] = {**entry, "model": model}
            index.files.append(_publish(place, index, path, "imported", (digest[:32],)))
            return "replaced" if known else "added"

        return change(directory, kind, apply)
