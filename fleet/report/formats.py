"""The views of a report that other programs read, written into the run directory: `junit.xml`, `observations.csv` and its kin."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from fleet.judge.evidence import Evidence
from fleet.report.junit import render_junit
from fleet.report.observations import render_csv
from fleet.report.parquet import ready, write_parquet
from fleet.report.stream import write_stream
from schemas.reports import FleetReport

JUNIT, OBSERVATIONS, PARQUET = "junit.xml", "observations.csv", "observations.parquet"


def add_options(report: argparse.ArgumentParser) -> None:
    """Adds what `rackproof report` can be asked for beside what it always writes."""
    report.add_argument(
        "--parquet", action="store_true", help="write observations.parquet too (needs the extra `parquet`)"
    )
    report.add_argument(
        "--all-observations",
        action="store_true",
        help="of a large fleet write what accepted hosts measured, too, into observations.csv",
    )


def check_options(options: argparse.Namespace) -> None:
    """Raises UsageError for what cannot be had here; before the run is judged, which may take a while."""
    if options.parquet:
        ready()


def write_views(
    directory: Path, report: FleetReport, evidence: Mapping[str, Evidence], options: argparse.Namespace
) -> None:
    """Writes them, host by host, each in one step."""
    write_stream(directory / JUNIT, render_junit(report))
    write_stream(directory / OBSERVATIONS, render_csv(report, evidence, whole=options.all_observations))
    if options.parquet:
        write_parquet(directory / PARQUET, report, evidence)
