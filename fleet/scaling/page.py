"""Render the results of a scaling study as an HTML page with plots, as Markdown, and as lines for a terminal.

A cell of a study is one combination of hosts, GPUs and settings, measured in a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from fleet.quantities import NONE, number
from fleet.report.formatting import clean, duration, percent
from fleet.report.html.page import asset, environment, policy
from fleet.report.markup import HARMLESS, section, table
from fleet.scaling.plots import FRAME, bars, plots, series_name, styles
from fleet.scaling.published import RUNS, closest_cell
from fleet.scaling.results import FAILED, MEASURED, OPEN, SKIPPED, CellResult, StudyResults
from schemas import VERSION
from schemas.plans import Plan
from schemas.studies import Cell, Study

_HERE = Path(__file__).parent

MAX_REJECTED_FILES = 5
COLUMNS = (
    *("Cell", "Hosts × GPUs", "Batch per rank", "Epochs", "Precision", "CPUs per GPU"),
    *("Time", "Hookup", "Images/s", "Efficiency", "Accuracy", "Loss"),
)
COLUMN_NOTES = (
    "Time: from the launch of the ranks to the end of the last one. Hookup: from the launch to the end of the first step. "
    "Images/s: of all ranks together, after the first step. Efficiency (weak scaling): images/s per rank, as a percentage of "
    "the images/s per rank of a reference cell, which is marked *. The reference cell has the fewest ranks of all measured cells "
    "with the same batch per rank, epochs, CPUs and precision. Accuracy and loss: on the test images."
)
SYNTHETIC_NOTE = (
    "The hosts had no Fashion-MNIST, so the images are synthetic: accuracy and loss do not apply to real images, and "
    "an epoch has 10 000 images instead of 60 000."
)
GKE_NOTES = (
    "The published runs used V100 GPUs. The published time is how long the program ran in its pod; the time of a cell includes "
    "the launch. Each published run is compared with a cell that trained Fashion-MNIST in fp32 with the same epochs and batch, "
    "on the closest number of hosts. Runs on n1-standard-4 are compared with cells that have limited CPUs per GPU. In this study "
    "each rank trains on its share of the images. In Kubeflow's example, on which the published runs are based, each worker "
    "trains on all images. So accuracies are comparable only if the cell has a single rank."
)


def render_html(plan: Plan, results: StudyResults, currency: str) -> str:
    """Return the HTML page. It contains no time of rendering: the same results give the same bytes."""
    css = f"{asset('report.css')}\n{asset('scaling.css', _HERE)}"
    page: str = environment(_HERE).get_template("scaling.html.j2").render(
        css=Markup(css),  # noqa: S704 - our own file
        policy=policy(css, ""),
        plan=plan,
        version=VERSION,
        sentence=summarize(results),
        tone="pass" if results.is_complete else "inconclusive",
        facts=_facts(plan, results, currency),
        caption=_columns(currency, results),
        rows=[(row, row_texts(row, results)) for row in results.rows],
        plots=plots(results),
        series=[{"name": name, "css": css} for name, css in styles(results).values()],
        bars=bars(results),
        how=Markup(COLUMN_NOTES),  # noqa: S704 - our own text; Markup keeps it from being cut at TEXT_LIMIT
        synthetic=SYNTHETIC_NOTE if _is_synthetic(results) else "",
        compare=Markup(GKE_NOTES),  # noqa: S704 - our own text
        published=_published_rows(results),
        frame=FRAME,
    )  # fmt: skip
    return page


def render_markdown(plan: Plan, results: StudyResults, currency: str) -> str:
    """Return the summary and the tables as Markdown."""
    mark = "REHEARSAL on CPUs: no GPU was measured.\n\n" if plan.rehearsal else ""
    facts = "\n".join(f"- {name}: {value}" for name, value in map(_sanitized, _facts(plan, results, currency)))
    note = f"\n\n{SYNTHETIC_NOTE}" if _is_synthetic(results) else ""
    return (
        "\n\n".join(
            (
                f"# Scaling study {plan.run_id}",
                f"{mark}{summarize(results)}",
                facts,
                section("Cells", f"{_table(results, currency)}\n\n{COLUMN_NOTES}{note}"),
                section(
                    "Comparison with the GKE experiment",
                    f"{table(_PUBLISHED_COLUMNS, _published_rows(results))}\n\n{GKE_NOTES}",
                ),
            )
        )
        + "\n"
    )


def render_lines(results: StudyResults, currency: str) -> str:
    """Return one line per cell, for a terminal."""
    has_several_epochs = len({row.cell.epochs for row in results.rows}) > 1
    return "\n".join(
        f"{row.number}: {row.cell.hosts} × {row.cell.gpus}, {series_name(row.cell.series, with_epochs=has_several_epochs)}: "
        f"{_figures_text(row, currency)}"
        for row in results.rows
    )


def _figures_text(row: CellResult, currency: str) -> str:
    if row.throughput is None:
        return f"{row.state}: {clean(row.reason)}"
    cost = f", {_money(row.cost)} {currency}".rstrip() if row.cost is not None else ""
    time, hookup = _format_or_none(row.wall_s, duration), _format_or_none(row.hookup_s, duration)
    return (
        f"{time} (hookup {hookup}), {number(row.throughput)} images/s, "
        f"efficiency {percent(row.efficiency or 0.0)}, accuracy {row.accuracy:.4f}, loss {row.loss:.4f}{cost}{_remarks(row)}"
    )


def _remarks(row: CellResult) -> str:
    cut = ", stopped at max_steps before its last epoch was complete" if row.cut else ""
    share = f", {percent(row.share)} of the images/s of cell {row.unconfined}" if row.share is not None else ""
    return cut + share


def _money(value: float) -> str:
    """Return an amount with two decimals, or with two significant digits if it is below 1."""
    return f"{value:.2f}" if value >= 1 else number(value, 2)


def summarize(results: StudyResults) -> str:
    """Return the number of cells in each state as a sentence."""
    counts = {state: results.count(state) for state in (MEASURED, FAILED, SKIPPED, OPEN)}
    parts = [f"{counts[MEASURED]} of {len(results.rows)} cells were measured"]
    parts += [f"{counts[FAILED]} failed"] if counts[FAILED] else []
    parts += [f"{counts[SKIPPED]} skipped"] if counts[SKIPPED] else []
    parts += [f"{counts[OPEN]} not measured yet"] if counts[OPEN] else []
    return ", ".join(parts) + "."


def _columns(currency: str, results: StudyResults) -> tuple[str, ...]:
    cost = (f"Cost, {currency}" if currency else "Cost",) if results.cost is not None else ()
    return (*COLUMNS, *cost, "Result")


def row_texts(row: CellResult, results: StudyResults) -> tuple[str, ...]:
    """Return the text of each column of a table row. The last text is the state of the cell, with a reason or remarks."""
    cost = (_format_or_none(row.cost, _money),)
    return (
        str(row.number),
        f"{row.cell.hosts} × {row.cell.gpus}",
        str(row.cell.batch_size),
        str(row.cell.epochs),
        row.cell.precision,
        _cpus_text(row.cell),
        _format_or_none(row.wall_s, duration),
        _format_or_none(row.hookup_s, duration),
        _format_or_none(row.throughput, number),
        f"{percent(row.efficiency)}{' *' if row.against == row.number else ''}" if row.efficiency else NONE,
        _format_or_none(row.accuracy, lambda value: f"{value:.4f}"),
        _format_or_none(row.loss, lambda value: f"{value:.4f}"),
        *(cost if results.cost is not None else ()),
        f"{row.state}{_remarks(row)}" if row.state == MEASURED else f"{row.state}: {row.reason}",
    )


def _table(results: StudyResults, currency: str) -> str:
    return table(_columns(currency, results), [_sanitized(row_texts(row, results)) for row in results.rows])


def _sanitized(texts: Sequence[str]) -> list[str]:
    return [clean(text).translate(HARMLESS) for text in texts]


def _format_or_none(value: float | None, text: Callable[[float], str]) -> str:
    return NONE if value is None else text(value)


def _cpus_text(cell: Cell) -> str:
    return str(cell.cpus) if cell.cpus else "all"


def _facts(plan: Plan, results: StudyResults, currency: str) -> list[tuple[str, str]]:
    study = plan.study or Study(cells=())
    ranks = sum(len(host.devices) for host in plan.hosts)
    one, several = ("process", "processes") if plan.rehearsal else ("GPU", "GPUs")
    facts = [
        ("Hosts", f"{len(plan.hosts)} with {ranks} {one if ranks == 1 else several}"),
        ("GPU", ", ".join(results.gpus) or NONE),
        ("Software", ", ".join(results.software) or NONE),
        ("Profile", plan.profile),
        ("Data", ", ".join(sorted({row.data for row in results.rows if row.data})) or NONE),
        ("Duration of all launches", duration(results.hours * 3600)),
    ]
    if results.cost is not None:
        facts.append(("Cost of the hosts used", f"{_money(results.cost)} {currency}".rstrip()))
    # The budget is in the currency of the inventory, even if --currency names another one.
    limits = [f"{study.stop_cost:g} {study.currency}".rstrip()] if study.stop_cost else []
    limits += [f"{study.stop_hours:g} h"] if study.stop_hours else []
    if limits:
        facts.append(("Budget", " or ".join(limits)))
    facts += [("Rejected file", reason) for reason in results.rejected[:MAX_REJECTED_FILES]]
    if more := len(results.rejected) - MAX_REJECTED_FILES:
        facts += [("Rejected file", f"{more} more: see scaling.json")] if more > 0 else []
    return facts


def _is_synthetic(results: StudyResults) -> bool:
    return any(row.data == "synthetic" for row in results.rows)


_PUBLISHED_COLUMNS = (
    *("Nodes × GPUs per worker", "Machine", "Batch", "Epochs", "Time", "Accuracy", "Loss"),
    *("Cell here", "Time", "Accuracy", "Loss"),
)


def _published_rows(results: StudyResults) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for run in RUNS:
        row = closest_cell(run, results.rows)
        rows.append(
            (
                f"{run.nodes} × {run.gpus}",
                run.machine,
                str(run.batch_size),
                str(run.epochs),
                duration(run.seconds),
                f"{run.accuracy:.4f}",
                f"{run.loss:.4f}",
                f"{row.number}: {row.cell.hosts} × {row.cell.gpus}" if row else NONE,
                _format_or_none(row.wall_s if row else None, duration),
                _format_or_none(row.accuracy if row else None, lambda value: f"{value:.4f}"),
                _format_or_none(row.loss if row else None, lambda value: f"{value:.4f}"),
            )
        )
    return rows
