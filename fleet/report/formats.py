"""Write the files of a report other than `report.json`.

FORMATS is the only list of these files. `rackproof sign` and `rackproof verify` render each of them again and compare the result
with the file. A file that needs a library (`Format.library`) is not compared if the library is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path

from fleet import progress
from fleet.records.load import Run
from fleet.report.html.page import render_html
from fleet.report.junit import render_junit
from fleet.report.markdown import render_markdown
from fleet.report.observations import render_csv
from fleet.report.parquet import render_parquet
from fleet.report.prometheus import render_prometheus
from fleet.report.stream import write_stream
from schemas.errors import UsageError
from schemas.reports import FleetReport
from schemas.run_directory import PAGE


@dataclass(frozen=True, kw_only=True)
class RenderInput:
    """The input of a renderer."""

    report: FleetReport
    run: Run
    flags: Collection[str] = ()
    """The keys of FLAGS that are set."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How one file of the report is rendered, and when it is written."""

    render: Callable[[RenderInput], str | Iterable[str | bytes]]
    """Return the content of the file, in pieces if its size grows with the fleet. Equal inputs give the same bytes."""
    only_with: str = ""
    """Key of FLAGS: the file is written only with this flag. Empty: it is always written."""
    variants: tuple[str, ...] = ()
    """Keys of FLAGS that change the content of the file."""
    library: str = ""
    """Optional package that `render` imports. Another version of the package may give other bytes."""
    extra: str = ""
    """The extra of Rackproof that installs the library."""

    def pieces(self, source: RenderInput) -> Iterable[str | bytes]:
        """Yield the content in pieces."""
        content = self.render(source)
        return [content] if isinstance(content, str) else content

    def missing_library(self) -> str:
        """Return the name of the library if it is not installed, else an empty string."""
        return self.library if self.library and not importlib.util.find_spec(self.library) else ""

    def possible_flags(self) -> Iterable[tuple[str, ...]]:
        """Yield each combination of flags in `variants`, the empty combination first."""
        return chain.from_iterable(combinations(self.variants, size) for size in range(len(self.variants) + 1))


FORMATS: Mapping[str, Format] = {
    "report.md": Format(render=lambda source: render_markdown(source.report, source.run.plan.grafana_url)),
    PAGE: Format(render=lambda source: render_html(source.report, source.run.plan.grafana_url)),
    "verdicts.prom": Format(render=lambda source: render_prometheus(source.report)),
    "junit.xml": Format(render=lambda source: render_junit(source.report)),
    "observations.csv": Format(
        render=lambda source: render_csv(
            source.report, source.run.evidence, all_hosts="--all-observations" in source.flags
        ),
        variants=("--all-observations",),
    ),
    "observations.parquet": Format(
        render=lambda source: render_parquet(source.report, source.run.evidence),
        only_with="--parquet",
        library="pyarrow",
        extra="parquet",
    ),
}
"""File name in the run directory -> its format."""

FLAGS: Mapping[str, str] = {
    "--parquet": "also write observations.parquet (needs the extra `parquet`)",
    "--all-observations": "observations.csv: in a large fleet, include the observations of accepted hosts too",
}
"""Flag of `rackproof report` -> its help."""


def add_flags(report: argparse.ArgumentParser) -> None:
    """Add FLAGS to the parser of `rackproof report`."""
    for flag, text in FLAGS.items():
        report.add_argument(flag, action="store_true", help=text)


def flags_of(options: argparse.Namespace) -> frozenset[str]:
    """Return the flags that are set.

    Raises:
        UsageError: a flag selects a file whose library is not installed. Judging a run may take minutes, so call this function
            before the run is judged.
    """
    flags = frozenset(flag for flag in FLAGS if getattr(options, flag.removeprefix("--").replace("-", "_"), False))
    for output in FORMATS.values():
        if output.only_with in flags and (library := output.missing_library()):
            raise UsageError(
                f"{output.only_with}: {library} is not installed: install rackproof with the extra "
                f"`{output.extra}`, or leave out {output.only_with}"
            )
    return flags


def write_formats(directory: Path, source: RenderInput) -> None:
    """Write each file of FORMATS that needs no flag, or whose flag is in `source.flags`. Each file is written atomically."""
    chosen = {
        name: output for name, output in FORMATS.items() if not output.only_with or output.only_with in source.flags
    }
    progress.begin("writing the report", len(chosen))
    for name, output in chosen.items():
        write_stream(directory / name, output.pieces(source))
        progress.advance()
