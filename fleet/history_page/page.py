"""Render the history of the fleet as an HTML page: one file without scripts, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from fleet.history.database import History
from fleet.history.driver_effects import DriverEffect, driver_effects
from fleet.history.lemons import Lemon, lemons
from fleet.history.trends import Drift, drifts
from fleet.history_page.grid import months_of, new_drivers, rack_rows
from fleet.history_page.plots import FRAME, plots
from fleet.quantities import counted
from fleet.report.html.page import asset, environment, policy
from schemas import VERSION
from schemas.baselines import REAL
from schemas.errors import RunError

_HERE = Path(__file__).parent
MAX_ROWS = 100
"""Maximum number of rows in each of the tables "Failed repeatedly", "Drift" and "Drivers". `rackproof history lemons` prints
the first two tables in full. `rackproof history drivers` prints the third in full."""
REPEATED_COLUMNS = (
    "Part", "Last host and slot", "Episodes", "Runs", "Problems", "First", "Last", "Expected by chance", "Finding",
)  # fmt: skip
DRIFT_COLUMNS = ("Part", "Figure", "Per year", "± (95 %)", "Total change", "Shape", "From", "To", "Other figures")
DRIVER_COLUMNS = (
    "Figure", "Old driver", "New driver", "Change", "± (95 %)", "Hosts", "Weeks", "Better or worse", "Finding",
)  # fmt: skip


def render_page(history: History) -> str:
    """Return the page as HTML. The same `history` always gives the same bytes.

    Raises:
        RunError: the history is empty, or the date of every run is wrong.
    """
    months = months_of(history)
    if not months:
        raise RunError(
            f"the history in {history.directory} has no run, or only runs with a wrong date: add runs: "
            "rackproof history import runs/*"
        )
    drifting, effects, repeated = drifts(history), driver_effects(history), lemons(history)
    drivers = new_drivers(history, months)
    css = f"{asset('report.css')}\n{asset('history.css', _HERE)}"
    page: str = environment(_HERE).get_template("history.html.j2").render(
        css=Markup(css),  # noqa: S704 - our own file
        policy=policy(css, ""),
        version=VERSION,
        mark="" if history.kind == REAL else history.kind.upper(),
        facts=_facts(history, months),
        sentence=summarize(drifting, repeated),
        months=months,
        racks=rack_rows(history, months),
        plots=plots(history, months, drivers, drifting, effects),
        frame=FRAME,
        repeated=[_repeated(item) for item in repeated[:MAX_ROWS]],
        repeated_columns=REPEATED_COLUMNS,
        drifts=[_drift(item) for item in drifting[:MAX_ROWS]],
        drift_columns=DRIFT_COLUMNS,
        effects=[_effect(item) for item in effects[:MAX_ROWS]],
        effect_columns=DRIVER_COLUMNS,
        problems=history.problems,
    )  # fmt: skip
    return page


def summarize(drifting: Sequence[Drift], repeated: Sequence[Lemon]) -> str:
    """Return a sentence with the number of lemons, and of GPUs, hosts and racks that became worse than their peers."""
    certain = sum(item.is_lemon for item in repeated)
    worse = [item for item in drifting if item.meaning == "worse"]
    levels = {level: sum(item.level == level for item in worse) for level in ("gpu", "host", "rack")}
    names = {"gpu": "GPU", "host": "host", "rack": "rack"}
    parts = [f"{count} {names[level]}{'s' if count > 1 else ''}" for level, count in levels.items() if count]
    plural = "" if certain == 1 else "s"
    failed = f"{certain or 'no'} part{plural}, slot{plural}, host{plural} or rack{plural}"
    peers = "its peers" if len(worse) == 1 else "their peers"
    slower = f"{', '.join(parts)} became worse than {peers}" if parts else "nothing became worse than its peers"
    return f"{failed} failed more often than chance explains; {slower}."


def _facts(history: History, months: Sequence[str]) -> list[tuple[str, str]]:
    ((runs, first, last),) = history.rows(
        """select count(*), strftime(min("began"), '%Y-%m-%d'), strftime(max("began"), '%Y-%m-%d')
        from runs where clock = '' """
    )
    ((racks, hosts, gpus, models),) = history.rows(
        """select count(distinct rack), count(distinct host), count(distinct serial) filter (part = 'gpu'),
        string_agg(distinct model, ', ' order by model) filter (part = 'gpu') from parts
        where nonce in (select nonce from runs where clock = '')"""
    )
    return [
        ("Runs", f"{runs}, from {first} to {last}"),
        ("Shown", f"{months[0]} to {months[-1]}"),
        ("Fleet", f"{counted(hosts, 'host')} in {counted(racks, 'rack')}, {counted(gpus, 'GPU serial')}"),
        ("GPU models", models or "none"),
    ]


def _share(value: float) -> str:
    return f"{100 * value:+.2g} %"


def _repeated(item: Lemon) -> tuple[str, ...]:
    last = f"{item.host} {item.slot}".strip()
    return (f"{item.kind} {item.id}", last, str(item.episodes), str(item.runs), ", ".join(item.problems), item.first, item.last,
            f"{item.by_chance:.2g} {item.kind}s", "lemon" if item.is_lemon else "may be chance")  # fmt: skip


def _drift(item: Drift) -> tuple[str, ...]:
    part = f"{item.level} {item.id}" + (f" in {item.rack}" if item.level != "rack" else "")
    shape = f"step on {item.at}" if item.at else item.shape
    per_year = "" if item.per_year is None else _share(item.per_year)
    error = "" if item.error is None else f"{100 * item.error:.2g} %"
    return (part, f"{item.name} {item.settings}".strip(), per_year, error, _share(item.change),
            f"{shape}, {item.meaning}", item.first, item.last, "; ".join(item.others))  # fmt: skip


def _effect(item: DriverEffect) -> tuple[str, ...]:
    error = "" if item.error is None else f"{100 * item.error:.2g} %"
    return (f"{item.name} {item.settings} ({item.model})", item.old, item.new, _share(item.change), error,
            str(item.hosts), f"{item.weeks_old} and {item.weeks_new}", item.meaning, item.finding)  # fmt: skip
