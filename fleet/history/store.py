"""Add runs to the history, and merge the files of many runs into one file a month."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fleet.history import tables
from fleet.history.engine import writing
from fleet.history.index import Index, StoredFile, damage, home, stored, writer
from fleet.history.rows import CLOCK_TOLERANCE_S, Row, RunRows, clean_text, duplicates
from schemas.times import epoch_seconds

MAX_LOOSE_RUNS = 64
"""Runs with files of their own. With more, they are merged into files of a month, which are faster to read."""
MAX_NOTES = 20


def add_run(directory: Path, rows: RunRows, now: datetime | None = None) -> list[str]:
    """Add a run, or replace it if the history has it; return notes for the operator, such as a serial in two places.

    Args:
        directory: the history.
        rows: the run.
        now: the present time in UTC (default: that of this machine).

    Raises:
        RunError: DuckDB is missing, the index cannot be read, or a file cannot be written.
        OSError: the directory cannot be written.
    """
    place, now = home(directory, rows.kind), now or datetime.now(UTC)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".new-") as temporary, writing(directory) as database:
        clock = _clock_notes(rows.entry, now)
        written, notes = _write_rows(database, rows, place, Path(temporary), has_time=not clock)
        notes += clock
        with writer(directory, rows.kind) as index:
            notes += _name_notes(index, rows)
            _forget(database, place, index, rows.nonce)
            index.runs[rows.nonce] = {**rows.entry, "notes": [*rows.entry["notes"], *notes][:MAX_NOTES]}
            index.files += [_publish(place, index, path, table, (rows.nonce,)) for table, path in written.items()]
            if len(_loose(index)) > MAX_LOOSE_RUNS:
                _merge(database, place, index)
    return [*rows.entry["notes"], *notes]


def merge_runs(directory: Path, kind: str) -> int:
    """Merge all runs that have files of their own into the files of their months; return their number."""
    with writing(directory) as database, writer(directory, kind) as index:
        count = len(_loose(index))
        _merge(database, home(directory, kind), index)
    return count


def _clock_notes(entry: Mapping[str, Any], now: datetime) -> list[str]:
    """Return a note if the run began in the future, or ended before it began, which only a wrong clock can do."""
    began, ended = (epoch_seconds(str(entry[name]).replace(" ", "T") + "Z") for name in ("began", "ended"))
    if began <= now.timestamp() + CLOCK_TOLERANCE_S and ended >= began - CLOCK_TOLERANCE_S:
        return []
    return [f"a clock is wrong: the run began at {entry['began']} and ended at {entry['ended']} UTC; it is in no trend"]


def _write_rows(
    database: Any, rows: RunRows, place: Path, temporary: Path, *, has_time: bool
) -> tuple[dict[str, Path], list[str]]:
    """Write the Parquet files of a run; return table -> file, and notes. Without a time it is in no trend."""
    lines = {table: temporary / f"{table}.jsonl" for table in tables.INPUT}
    parts: list[Row] = []
    with ExitStack() as stack:
        files = {table: stack.enter_context(path.open("w", encoding="utf-8")) for table, path in lines.items()}
        for host in rows.hosts:
            parts += host.parts
            files["parts"].writelines(json.dumps(row) + "\n" for row in host.parts)
            files["figures"].writelines(json.dumps(row) + "\n" for row in host.figures)
            files["tests"].writelines(json.dumps(row) + "\n" for row in host.tests)
        files["causes"].writelines(json.dumps(row) + "\n" for row in rows.causes)
    twice = duplicates(parts)
    for name in ("figures_with_peers", "group_levels"):
        database.execute(f"drop table if exists {name}")
    database.execute(tables.with_peers(tables.read_rows("figures", lines["figures"]), twice))
    database.execute(tables.group_levels())
    shared, relative = tables.run_columns(rows.nonce, rows.entry), "relative" if has_time else "null"
    serials = "[" + ", ".join(map(tables.literal, twice)) + "]::varchar[]"
    sources = {
        "figures": f"select * replace ({relative} as relative), {shared} from figures_with_peers",
        "levels": f"select * replace ({relative} as relative), {shared} from group_levels",
        "parts": f"select *, {shared}, part = 'gpu' and serial in (select unnest({serials})) as duplicate "
        f"from {tables.read_rows('parts', lines['parts'])}",
        "causes": f"select *, {shared} from {tables.read_rows('causes', lines['causes'])}",
        "tests": f"select *, {shared} from {tables.read_rows('tests', lines['tests'])}",
    }
    written = {}
    for table, query in sources.items():
        written[table] = temporary / f"{table}.parquet"
        database.execute(tables.copy(query, table, written[table]))
    notes = [f"GPU serial {serial} is in {len(slots)} places: {', '.join(slots)}" for serial, slots in twice.items()]
    return written, [clean_text(note) for note in notes]


def _name_notes(index: Index, rows: RunRows) -> list[str]:
    """Return a note if another run has the same name."""
    same = [nonce for nonce, run in index.runs.items() if run["run"] == rows.entry["run"] and nonce != rows.nonce]
    return [f"another run has the same name: {rows.entry['run']}"] if same else []


def clock_note(index: Index, now: str) -> str:
    """Return a note if runs of the history began after the present time; else an empty string."""
    limit = epoch_seconds(now) + CLOCK_TOLERANCE_S
    later = [run["run"] for run in index.runs.values() if epoch_seconds(run["began"].replace(" ", "T") + "Z") > limit]
    names = ", ".join(sorted(later)[:3]) + (" …" if len(later) > 3 else "")
    return f"{len(later)} runs began after the present time: a clock was or is wrong: {names}" if later else ""


def _publish(place: Path, index: Index, path: Path, table: str, runs: tuple[str, ...], month: str = "") -> StoredFile:
    """Move a new file to its directory, under a name that no other file has."""
    name = month or runs[0][:12]
    target = place / table / f"{name}-{uuid.uuid4().hex[:12]}.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # before the index lists it
    path.replace(target)
    index.own.add(str(target.relative_to(place)))
    return stored(place, target, table, runs, month)


def _loose(index: Index) -> set[str]:
    return {nonce for item in index.files if item.table in tables.PER_RUN and not item.month for nonce in item.runs}


def _forget(database: Any, place: Path, index: Index, nonce: str) -> None:
    """Remove the rows of a run that will be replaced. A damaged file disappears when all its runs were added again."""
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
    """Write new files of a month, with the runs of its old files and those that have files of their own."""
    loose = {nonce for nonce in _loose(index) if index.runs[nonce]["began"][:7] == month}
    old = [
        item
        for item in index.files
        if item.month == month or (item.table in tables.PER_RUN and not item.month and set(item.runs) <= loose)
    ]
    old = [item for item in old if not damage(place, item)]
    runs = tuple(sorted({nonce for item in old for nonce in item.runs} - {without}))
    index.files = [item for item in index.files if item not in old]
    if not runs:
        return
    with tempfile.TemporaryDirectory(dir=place, prefix=".merge-") as temporary:
        sources: dict[str, str] = {}
        for table in tables.PER_RUN:
            files = [place / item.path for item in old if item.table == table]
            relation = f"select * from {tables.parquet(files)}" if files else tables.empty(table)
            sources[table] = f"({relation} where nonce <> {tables.literal(without)})" if files else f"({relation})"
        sources["trends"] = f"({tables.trend_sums(sources['figures'], sources['levels'])})"
        sources["spreads"] = f"({tables.spreads(sources['figures'])})"
        for table, source in sources.items():
            path = Path(temporary) / f"{table}.parquet"
            database.execute(tables.copy(f"select * from {source}", table, path, merged=True))
            index.files.append(_publish(place, index, path, table, runs, month))


def add_imported(directory: Path, kind: str, entry: Mapping[str, Any], digest: str, figures: Iterable[Row]) -> bool:
    """Add the figures of a file from another tool; return False if the history has this file already."""
    place = home(directory, kind)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".new-") as temporary, writing(directory) as database:
        lines = Path(temporary) / "imported.jsonl"
        with lines.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in figures)
        with writer(directory, kind) as index:
            earlier = [item for item in index.files if item.table == "imported" and digest[:32] in item.runs]
            if digest in index.imports and earlier and not any(damage(place, item, complete=True) for item in earlier):
                return False
            index.files = [item for item in index.files if item not in earlier]
            path = Path(temporary) / "imported.parquet"
            source = f"select * from {tables.read_rows('imported', lines)}"
            database.execute(tables.copy(source, "imported", path))
            index.imports[digest] = dict(entry)
            index.files.append(_publish(place, index, path, "imported", (digest[:32],)))
    return True
