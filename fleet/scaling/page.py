"""What became of a scaling study, for people: one HTML file with plots, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from fleet.quantities import NONE, number
from fleet.report.formatting import clean, duration, percent
from fleet.report.html.page import asset, environment, policy
from fleet.report.markup import HARMLESS, section, table
from fleet.scaling.outcome import FAILED, MEASURED, OPEN, SKIPPED, Outcome, Row
from fleet.scaling.plots import FRAME, bars, plots, series_name, styles
from fleet.scaling.published import RUNS, ours
from schemas import VERSION
from schemas.plans import Plan
from schemas.studies import Cell, Study

_HERE = Path(__file__).parent

MOST_REFUSED = 5
CAPTION = (
    *("Cell", "Hosts × GPUs", "Batch a rank", "Epochs", "Precision", "CPUs a GPU"),
    *("Time", "Hookup", "Images/s", "Efficiency", "Accuracy", "Loss"),
)
HOW = (
    "Time is from the launch of the ranks to the end of the last; hookup the part of it before the first step was done. Images/s "
    "is of all ranks, from the first step on. Efficiency is weak scaling, since the batch is that of a rank: images/s a rank, as "
    "a share of those in the smallest measured cell with the same batch, epochs, CPUs and precision, which is marked *. Accuracy "
    "and loss are on the test images."
)
SYNTHETIC = (
    "The images were made up on the hosts, which had no Fashion-MNIST: accuracy and loss say nothing about learning real ones, "
    "and an epoch has 10 000 images and not 60 000."
)
TO_COMPARE = (
    "Theirs were V100, and their time is that of the program in a pod. Ours is a cell that went through as many epochs of "
    "Fashion-MNIST at the same batch in fp32, on as many hosts or the most alike; beside n1-standard-4, one with few CPUs a GPU. "
    "Ours share the images among them. In Kubeflow's example, which theirs was made from, each worker goes through all of them, "
    "so that its accuracy does not fall with their number: what to hold against it is the accuracy of our single rank."
)


def render_html(plan: Plan, study_outcome: Outcome, currency: str) -> str:
    """The whole page. The same study gives the same bytes."""
    css = f"{asset('report.css')}\n{asset('scaling.css', _HERE)}"
    page: str = environment(_HERE).get_template("scaling.html.j2").render(
        css=Markup(css),  # noqa: S704 - our own file
        policy=policy(css, ""),
        plan=plan,
        version=VERSION,
        sentence=sentence(study_outcome),
        tone="pass" if study_outcome.complete else "inconclusive",
        facts=_facts(plan, study_outcome, currency),
        caption=_caption(currency, study_outcome),
        rows=[(row, cells(row, study_outcome)) for row in study_outcome.rows],
        plots=plots(study_outcome),
        series=[{"name": name, "css": css} for name, css in styles(study_outcome).values()],
        bars=bars(study_outcome),
        how=Markup(HOW),  # noqa: S704 - longer than any text of a host's
        synthetic=SYNTHETIC if _synthetic(study_outcome) else "",
        compare=TO_COMPARE,
        published=_published(study_outcome),
        frame=FRAME,
    )  # fmt: skip
    return page


def render_markdown(plan: Plan, study_outcome: Outcome, currency: str) -> str:
    """The tables, for tickets and terminals."""
    mark = "REHEARSAL on CPUs: no GPU was measured.\n\n" if plan.rehearsal else ""
    facts = "\n".join(f"- {name}: {value}" for name, value in map(_plain, _facts(plan, study_outcome, currency)))
    note = f"\n\n{SYNTHETIC}" if _synthetic(study_outcome) else ""
    return (
        "\n\n".join(
            (
                f"# Scaling study {plan.run_id}",
                f"{mark}{sentence(study_outcome)}",
                facts,
                section("Cells", f"{_table(study_outcome, currency)}\n\n{HOW}{note}"),
                section("Beside the GKE experiment", f"{table(_PUBLISHED, _published(study_outcome))}\n\n{TO_COMPARE}"),
            )
        )
        + "\n"
    )


def render_lines(study_outcome: Outcome, currency: str) -> str:
    """The cells, a line each, for a terminal."""
    several = len({row.cell.epochs for row in study_outcome.rows}) > 1
    return "\n".join(
        f"{row.number}: {row.cell.hosts} × {row.cell.gpus}, {series_name(row.cell.series, with_epochs=several)}: "
        f"{_told(row, currency)}"
        for row in study_outcome.rows
    )


def _told(row: Row, currency: str) -> str:
    if row.throughput is None:
        return f"{row.state}: {clean(row.reason)}"
    cost = f", {_money(row.cost)} {currency}".rstrip() if row.cost is not None else ""
    return (
        f"{_or_none(row.wall_s, duration)} (hookup {_or_none(row.hookup_s, duration)}), {number(row.throughput)} images/s, "
        f"efficiency {percent(row.efficiency or 0.0)}, accuracy {row.accuracy:.4f}, loss {row.loss:.4f}{cost}{_note(row)}"
    )


def _note(row: Row) -> str:
    cut = ", ended by max_steps before its epochs were over" if row.cut else ""
    share = f", {percent(row.share)} of the images/s of cell {row.unconfined}" if row.share is not None else ""
    return cut + share


def _money(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else number(value, 2)


def sentence(study_outcome: Outcome) -> str:
    """What became of it, in one sentence."""
    of = {state: study_outcome.count(state) for state in (MEASURED, FAILED, SKIPPED, OPEN)}
    parts = [f"{of[MEASURED]} of {len(study_outcome.rows)} cells were measured"]
    parts += [f"{of[FAILED]} failed"] if of[FAILED] else []
    parts += [f"{of[SKIPPED]} left out"] if of[SKIPPED] else []
    parts += [f"{of[OPEN]} not measured yet"] if of[OPEN] else []
    return ", ".join(parts) + "."


def _caption(currency: str, study_outcome: Outcome) -> tuple[str, ...]:
    cost = (f"Cost, {currency}" if currency else "Cost",) if study_outcome.cost is not None else ()
    return (*CAPTION, *cost, "Result")


def cells(row: Row, study_outcome: Outcome) -> tuple[str, ...]:
    """A row of the table; the last text says what became of it."""
    cost = (_or_none(row.cost, _money),)
    return (
        str(row.number),
        f"{row.cell.hosts} × {row.cell.gpus}",
        str(row.cell.batch_size),
        str(row.cell.epochs),
        row.cell.precision,
        _cpus(row.cell),
        _or_none(row.wall_s, duration),
        _or_none(row.hookup_s, duration),
        _or_none(row.throughput, number),
        f"{percent(row.efficiency)}{'' if row.against != row.number else ' *'}" if row.efficiency else NONE,
        _or_none(row.accuracy, lambda value: f"{value:.4f}"),
        _or_none(row.loss, lambda value: f"{value:.4f}"),
        *(cost if study_outcome.cost is not None else ()),
        f"{row.state}{_note(row)}" if row.state == MEASURED else f"{row.state}: {row.reason}",
    )


def _table(study_outcome: Outcome, currency: str) -> str:
    return table(_caption(currency, study_outcome), [_plain(cells(row, study_outcome)) for row in study_outcome.rows])


def _plain(texts: Sequence[str]) -> list[str]:
    return [clean(text).translate(HARMLESS) for text in texts]


def _or_none(value: float | None, text: Callable[[float], str]) -> str:
    return NONE if value is None else text(value)


def _cpus(cell: Cell) -> str:
    return str(cell.cpus) if cell.cpus else "all"


def _facts(plan: Plan, study_outcome: Outcome, currency: str) -> list[tuple[str, str]]:
    study = plan.study or Study(cells=())
    device = "processes" if plan.rehearsal else "GPUs"
    facts = [
        ("Hosts", f"{len(plan.hosts)} with {sum(len(host.devices) for host in plan.hosts)} {device}"),
        ("GPU", ", ".join(study_outcome.gpus) or NONE),
        ("Software", ", ".join(study_outcome.software) or NONE),
        ("Profile", plan.profile),
        ("Data", ", ".join(sorted({row.data for row in study_outcome.rows if row.data})) or NONE),
        ("Launches took", duration(study_outcome.hours * 3600)),
    ]
    if study_outcome.cost is not None:
        facts.append(("Cost of the hosts that took part", f"{study_outcome.cost:.2f} {currency}".rstrip()))
    limits = [f"{study.stop_cost:g} {currency}".rstrip()] if study.stop_cost else []
    limits += [f"{study.stop_hours:g} h"] if study.stop_hours else []
    if limits:
        facts.append(("Ends at", " or ".join(limits)))
    facts += [("Not believed", reason) for reason in study_outcome.refused[:MOST_REFUSED]]
    if more := len(study_outcome.refused) - MOST_REFUSED:
        facts += [("Not believed", f"{more} more: see scaling.json")] if more > 0 else []
    return facts


def _synthetic(study_outcome: Outcome) -> bool:
    return any(row.data == "synthetic" for row in study_outcome.rows)


_PUBLISHED = (
    *("Nodes × GPUs a worker", "Machine", "Batch", "Epochs", "Time", "Accuracy", "Loss"),
    *("Ours: cell", "Time", "Accuracy", "Loss"),
)


def _published(study_outcome: Outcome) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for run in RUNS:
        mine = ours(run, study_outcome.rows)
        rows.append(
            (
                f"{run.nodes} × {run.gpus}",
                run.machine,
                str(run.batch_size),
                str(run.epochs),
                duration(run.seconds),
                f"{run.accuracy:.4f}",
                f"{run.loss:.4f}",
                f"{mine.number}: {mine.cell.hosts} × {mine.cell.gpus}" if mine else NONE,
                _or_none(mine.wall_s if mine else None, duration),
                _or_none(mine.accuracy if mine else None, lambda value: f"{value:.4f}"),
                _or_none(mine.loss if mine else None, lambda value: f"{value:.4f}"),
            )
        )
    return rows
