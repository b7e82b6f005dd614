"""Whether what people and other programs read of a run is what its report says: each view made again, compared by its sum."""

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
    """What making the views again gives."""

    differ: tuple[str, ...]
    """Files that hold something else."""
    unmade: Mapping[str, str]
    """File that cannot be made again here -> why."""


def compared(run_dir: Path, report: FleetReport, found: Mapping[str, str]) -> Compared:
    """The views of the run that are among `found` (path -> SHA-256), beside those that `report` gives here and now."""
    run = load(run_dir)
    differ = [
        name
        for name, renderings in _renderings(run, report).items()
        if name in found and all(_digest(render()) != found[name] for render in renderings)
    ]
    unmade = {}
    if PARQUET in found:
        try:
            differ += [PARQUET] * (_parquet(run, report) != found[PARQUET])
        except UsageError:
            unmade[PARQUET] = "pyarrow is not installed here"
    return Compared(differ=tuple(differ), unmade=unmade)


def _renderings(run: Run, report: FleetReport) -> dict[str, list[Callable[[], Pieces]]]:
    """File -> every way in which `rackproof report` may have been asked to write it."""
    from fleet.report.html.page import render_html
    from fleet.report.junit import render_junit
    from fleet.report.markdown import render_markdown
    from fleet.report.prometheus import render_prometheus

    # --all-observations makes a difference where accepted hosts are left out, and nowhere else.
    wholes = (False, True) if report.detail == EXCEPTIONS else (False,)
    return {
        "report.md": [lambda: [render_markdown(report, run.plan.grafana_url)]],
        "report.html": [lambda: [render_html(report, run.plan.grafana_url)]],
        "verdicts.prom": [lambda: [render_prometheus(report)]],
        JUNIT: [lambda: render_junit(report)],
        OBSERVATIONS: [partial(render_csv, report, run.evidence, whole=whole) for whole in wholes],
    }


def _digest(pieces: Pieces) -> str:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece.encode())
    return found.hexdigest()


def _parquet(run: Run, report: FleetReport) -> str:
    with tempfile.TemporaryDirectory() as directory:
        write_parquet(Path(directory) / PARQUET, report, run.evidence)
        return digest(Path(directory) / PARQUET)
