"""Render `observations.parquet`: integer, float and string columns. Needs pyarrow.

The file has the rows of all hosts, like `observations.csv` with `--all-observations`.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.judge.evidence import Evidence
from fleet.quantities import finite
from fleet.report.formatting import clean
from fleet.report.observations import (
    CELL_LIMIT,
    COLUMNS,
    NUMBERS,
    WHOLE_NUMBERS,
    by_host,
    fields_of_host,
    rows,
    shared_fields,
    values,
)
from schemas.records import Value
from schemas.reports import FleetReport

_GROUP_ROWS = 100_000


class _Pieces(io.RawIOBase):
    """A write-only file in memory. `take` empties it, so that only one piece is in memory at a time."""

    def __init__(self) -> None:
        self._written: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written.append(bytes(data))
        self._position += len(self._written[-1])
        return len(self._written[-1])

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        """Return the bytes that were written since the last call."""
        piece = b"".join(self._written)
        self._written.clear()
        return piece


def render_parquet(report: FleetReport, evidence: Mapping[str, Evidence]) -> Iterator[bytes]:
    """Yield the file in pieces: one per group of rows, then the footer. Raise ImportError if pyarrow is not installed."""
    arrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    schema = arrow.schema(
        [(name, _type(arrow, name)) for name in COLUMNS],
        metadata={"rackproof": "observations", "run_id": clean(report.run_id), "mark": report.mark},
    )
    pieces = _Pieces()
    with parquet.ParquetWriter(pieces, schema, compression="zstd") as writer:
        for group in _groups(report, evidence):
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))
            yield pieces.take()
    yield pieces.take()


def _type(arrow: Any, name: str) -> Any:
    return arrow.int64() if name in WHOLE_NUMBERS else arrow.float64() if name in NUMBERS else arrow.string()


def _groups(report: FleetReport, evidence: Mapping[str, Evidence]) -> Iterator[list[dict[str, Value]]]:
    shared, verdicts = shared_fields(report), by_host(report.verdicts)
    group: list[dict[str, Value]] = []
    for host in report.hosts:
        of_host = verdicts.get(host.name, ())
        fields = fields_of_host(shared, of_host)
        host_rows = rows(host.name, host.rack, evidence.get(host.name, Evidence()), of_host)
        for row in host_rows:
            group.append({name: _typed(name, value) for name, value in zip(COLUMNS, values(fields, row), strict=True)})
        if len(group) >= _GROUP_ROWS:
            yield group
            group = []
    yield group


def _typed(name: str, value: Value) -> Value:
    """Return the value in the type of its column."""
    return value if name in WHOLE_NUMBERS else finite(value) if name in NUMBERS else _text(value)


def _text(value: Value) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else clean(str(value), CELL_LIMIT)
