"""Answer `rackproof history racks`: the runs and failures of each rack, and its worst figure compared with the other racks."""

from __future__ import annotations

import math
from typing import Any

from fleet.history.answer import Answer, Section
from fleet.history.database import History
from fleet.history.lemons import COUNTED
from fleet.judge.baseline import direction

_RACKS = """
select rack, count(distinct host) as hosts, count(distinct nonce) as runs, min(began)::varchar as first,
  max(began)::varchar as last, count(*) filter (decision = 'accepted') / count(*) as accepted_share,
  count(*) filter (decision = 'rejected') as rejected, count(*) filter (decision = 'incomplete') as incomplete,
  list_sort(list(distinct driver) filter (driver <> '')) as drivers
from parts where part = 'host' group by rack order by rack"""
_CAUSES = f"""
select rack, count(*), count(distinct (host, slot))
from (select distinct rack, nonce, host, slot, problem from causes where {COUNTED}) group by rack"""
_LEVELS = """
select rack, name, settings, stage, model, median(relative) as relative, count(*) as runs from levels
where level = 'rack' and reference = 'run' and accepted group by all"""


def racks_answer(history: History) -> Answer:
    """Return a table with a row for each rack."""
    rows = history.records(_RACKS)
    causes = {rack: (count, parts) for rack, count, parts in history.rows(_CAUSES)}
    worst = _worst_figures(history)
    for row in rows:
        row["causes"], row["failing_parts"] = causes.get(row["rack"], (0, 0))
        row["lowest"] = worst.get(row["rack"], "")
    columns = {
        "rack": "rack", "hosts": "hosts", "runs": "runs", "first": "first run", "last": "last run",
        "accepted_share": "hosts accepted", "rejected": "rejected", "incomplete": "incomplete", "causes": "failures",
        "failing_parts": "failing parts", "drivers": "drivers", "lowest": "worst figure compared with the other racks",
    }  # fmt: skip
    return Answer(sections=[Section(name="racks", title="Racks", rows=rows, columns=columns)])


def _worst_figures(history: History) -> dict[str, str]:
    """Return rack -> its worst figure as text: name, settings, and difference from the median of all racks in percent.

    The worst figure is the one that is worse than that median by the largest share. A rack is left out if none of its figures is
    worse.
    """
    worst: dict[str, tuple[float, str]] = {}
    units: dict[str, str] = dict(history.rows("select name, any_value(unit) from levels group by name"))
    records: list[dict[str, Any]] = history.records(_LEVELS)
    for item in records:
        loss = -direction(item["name"], units[item["name"]]) * item["relative"]
        if loss > worst.get(item["rack"], (0.0, ""))[0]:
            settings = f" {item['settings']}" if item["settings"] else ""
            worst[item["rack"]] = (loss, f"{item['name']}{settings}: {100 * math.expm1(item['relative']):+.1f} %")
    return {rack: text for rack, (_, text) in worst.items()}
