"""Write the files of a report that other programs read: `junit.xml`, `observations.csv`, `observations.parquet`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from fleet.judge.evidence import Evidence
from fleet.report.junit import render_junit
from fleet.report.observations import render_csv
from fleet.report.parquet import require_pyarrow, write_parquet
from fleet.report.stream import write_stream
from schemas.reports import FleetReport

JUNIT, OBSERVATIONS, PARQUET = "junit.xml", "observations.csv", "observations.parquet"


def add_options(report: argparse.ArgumentParser) -> None:
    """Add the options for optional files."""
    report.add_argument(
        "--parquet", action="store_true", help="also write observations.parquet (needs the extra `parquet`)"
    )
    report.add_argument(
        "--all-observations",
        action="store_true",
        help="also write the observations of accepted hosts of a large fleet into observations.csv",
    )


def check_options(options: argparse.Namespace) -> None:
    """Raise UsageError if an option cannot be satisfied, before the run is judged, which may take minutes."""
    if options.parquet:
        require_pyarrow()


def write_views(
    directory: Path, report: FleetReport, evidence: Mapping[str, Evidence], options: argparse.Namespace
) -> None:
    """Write the files, each atomically and host by host."""
    write_stream(directory / JUNIT, render_junit(report))
    write_stream(directory / OBSERVATIONS, render_csv(report, evidence, whole=options.all_observations))
    if options.parquet:
        write_parquet(directory / PARQUET, report, evidence)
