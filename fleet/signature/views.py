"""Check the files that are rendered from a report (HTML, Markdown, JUnit, …): render each again and compare the checksums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet import progress
from fleet.records.load import load
from fleet.report.formats import FORMATS, RenderInput
from schemas.reports import FleetReport


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The result of rendering the files again and comparing checksums."""

    differ: tuple[str, ...]
    """Names of the files whose checksum no combination of flags of `rackproof report` gives."""
    not_rendered: Mapping[str, str]
    """Name of a file that cannot be rendered on this machine -> why."""


def compare_views(run_dir: Path, report: FleetReport, checksums: Mapping[str, str]) -> Compared:
    """Render each file of `report` that is in `checksums` (path -> SHA-256), and compare its checksum."""
    run = load(run_dir)
    differ, not_rendered = [], {}
    progress.begin("rendering the report again", len(FORMATS))
    for name, output in FORMATS.items():
        progress.advance()
        if name not in checksums:
            continue
        if library := output.missing_library():
            not_rendered[name] = f"{library} is not installed here"
            continue
        sources = (RenderInput(report=report, run=run, flags=flags) for flags in output.possible_flags())
        if all(_digest(output.pieces(source)) != checksums[name] for source in sources):
            differ.append(name)
    return Compared(differ=tuple(differ), not_rendered=not_rendered)


def _digest(pieces: Iterable[str | bytes]) -> str:
    checksum = hashlib.sha256()
    for piece in pieces:
        checksum.update(piece.encode() if isinstance(piece, str) else piece)
    return checksum.hexdigest()
