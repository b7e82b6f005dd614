"""Check the views of a report (HTML, Markdown, JUnit, …): render each again and compare checksums."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fleet.records.load import Run, load
from fleet.report.formats import JUNIT, OBSERVATIONS, PARQUET
from fleet.report.observations import render_csv
from fleet.report.parquet import write_parquet
from fleet.signature.sums import digest
from schemas.errors import UsageError
from schemas.reports import EXCEPTIONS, FleetReport

Pieces = Iterable[str]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The result of rendering the views again."""

    differ: tuple[str, ...]
    """Files with other content."""
    not_rendered: Mapping[str, str]
    """File that cannot be rendered here -> why."""


def compare_views(run_dir: Path, report: FleetReport, checksums: Mapping[str, str]) -> Compared:
    """Render the views of `report` that are in `checksums` (path -> SHA-256) and compare them."""
    run = load(run_dir)
    differ = [
        name
        for name, renderings in _renderings(run, report).items()
        if name in checksums and all(_digest(render()) != checksums[name] for render in renderings)
    ]
    not_rendered = {}
    if PARQUET in checksums:
        try:
            differ += [PARQUET] * (_parquet(run, report) != checksums[PARQUET])
        except UsageError:
            not_rendered[PARQUET] = "pyarrow is not installed here"
    return Compared(differ=tuple(differ), not_rendered=not_rendered)


def _renderings(run: Run, report: FleetReport) -> dict[str, list[Callable[[], Pieces]]]:
    """Return file -> the renderings that `rackproof report` may have written, depending on its options."""
    from fleet.report.html.page import render_html
    from fleet.report.junit import render_junit
    from fleet.report.markdown import render_markdown
    from fleet.report.prometheus import render_prometheus

    # --all-observations matters only if the report leaves out accepted hosts.
    wholes = (False, True) if report.detail == EXCEPTIONS else (False,)
    return {
        "report.md": [lambda: [render_markdown(report, run.plan.grafana_url)]],
        "report.html": [lambda: [render_html(report, run.plan.grafana_url)]],
        "verdicts.prom": [lambda: [render_prometheus(report)]],
        JUNIT: [lambda: render_junit(report)],
        OBSERVATIONS: [partial(render_csv, report, run.evidence, whole=whole) for whole in wholes],
    }


def _digest(pieces: Pieces) -> str:
    checksum = hashlib.sha256()
    for piece in pieces:
        checksum.update(piece.encode())
    return checksum.hexdigest()


def _parquet(run: Run, report: FleetReport) -> str:
    with tempfile.TemporaryDirectory() as directory:
        write_parquet(Path(directory) / PARQUET, report, run.evidence)
        return digest(Path(directory) / PARQUET)
