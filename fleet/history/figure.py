"""Answer what is normal for a figure: its distribution by model, rack, driver and month, and the percentile of a given value.

A figure is a measured quantity with its settings, such as `gemm.throughput` with `dtype=bf16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fleet.history.answer import Answer, Section
from fleet.history.database import History
from fleet.history.peers import MIN_PARTS
from fleet.history.tables import WEIGHT, WITHIN_KIND, weighted
from schemas import documents
from schemas.errors import UsageError

_PARTS = "count(distinct host || ' ' || serial) as parts"
_SPREAD = (
    f"count(*) as values, {_PARTS}, min(value) as least, quantile_cont(value, 0.05) as p05, median(value) as median, "
    "quantile_cont(value, 0.95) as p95, max(value) as most"
)
_WEIGHTED_SPREAD = (
    f"count(distinct (nonce, host, serial)) as values, {_PARTS}, min(value) as least, "
    + ", ".join(
        f"coalesce(min(value) filter (position >= {share}), max(value)) as {name}"
        for name, share in (("p05", 0.05), ("median", 0.5), ("p95", 0.95))
    )
    + ", max(value) as most"
)
"""SQL columns as in _SPREAD, for a figure of links, peers or adapters. A part has several such values in a run, and together they
have the weight of one value. The query `tables.weighted` provides the column `position`: the weight of all values up to this one,
as a share of the total weight."""
_KEY = "name, settings, stage, within, model"
_SPREAD_COLUMNS = {
    "values": "values", "parts": "parts", "least": "least", "p05": "5 %", "median": "median", "p95": "95 %", "most": "most",
}  # fmt: skip
GROUPS = ("rack", "driver", "month")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The figures to select."""

    name: str
    settings: str = ""
    """Settings that the figure must have, separated by spaces: `dtype=bf16 size=8192`."""
    stage: str = ""
    model: str = ""
    accepted_only: bool = True
    """Only figures of hosts that were accepted."""

    def where(self) -> tuple[str, dict[str, str]]:
        """Return the condition on the table `figures` in SQL, and the values of its parameters."""
        terms, values = ["name = $name", "not duplicate"], {"name": self.name}
        for column in ("stage", "model"):
            if text := getattr(self, column):
                terms.append(f"{column} = ${column}")
                values[column] = text
        for number, word in enumerate(self.settings.split()):
            terms.append(f"list_contains(string_split(settings, ' '), $word{number})")
            values[f"word{number}"] = word
        return " and ".join([*terms, *(["accepted"] if self.accepted_only else [])]), values


def figure_answer(history: History, selection: Selection, value: float | None = None) -> Answer:
    """Return the distribution of a figure.

    If the selected figures agree in settings and stage, also return the distribution by rack, driver and month.

    Args:
        history: the history.
        selection: the figure.
        value: a value in the SI unit of the figure, to return its percentile; None: return no percentile.

    Raises:
        UsageError: the history has no such figure.
    """
    where, values = selection.where()
    source = _Source(history=history, where=where, values=values)
    figures = source.spread(_KEY, order="model, stage, settings, within")
    imported = _imported(history, selection, value)
    if not figures and not imported:
        raise _unknown(history, selection)
    within = {"within": "link, peer or adapter"} if any(row["within"] for row in figures) else {}
    head = {"model": "model", "stage": "stage", "settings": "settings", **within}
    empty = f"no {'accepted ' if selection.accepted_only else ''}host has this figure"
    sections = [Section(name="figures", title=f"{selection.name}, own fleet", rows=figures, columns={**head, **_SPREAD_COLUMNS},
                        empty=empty)]  # fmt: skip
    kinds = {(row["settings"], row["stage"]) for row in figures}
    if len(kinds) == 1:
        sections += [_by(source, name, within) for name in GROUPS]
    if value is not None:
        sections.insert(1, _place(source, value, empty))
    if imported:
        head = {"source": "source", "version": "version", "file": "file", "sha256": "SHA-256", "model": "model"}
        place = {"percentile": "percentile of the value"} if value is not None else {}
        columns = {**head, "settings": "settings", **_SPREAD_COLUMNS, **place}
        del columns["parts"]
        sections.append(Section(name="imported", title="Figures from elsewhere", rows=imported, columns=columns))
    several = len(kinds) > 1
    note = (
        "the figures have different settings or stages: to see racks, drivers and months, select one combination with "
        "--settings and --stage"
    )
    return Answer(sections=sections, notes=[note] if several else [])


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The selected figures. In `rows`, `within` is `link=*`, `peer=*` or `hca=*` for a figure of links, peers or adapters."""

    history: History
    where: str
    values: Mapping[str, str]

    @cached_property
    def has_several(self) -> bool:
        """Whether a selected figure is of a link, peer or adapter. The values of a part then share the weight of one value."""
        return bool(
            self.history.rows(f"select bool_or(within <> '') from figures where {self.where}", self.values)[0][0]
        )

    @property
    def rows(self) -> str:
        """SQL subquery that returns the selected rows of `figures`, with the column `month`."""
        month = "strftime(\"began\", '%Y-%m') as month"
        return f"(select * replace ({WITHIN_KIND} as within), {month} from figures where {self.where})"

    def spread(self, key: str, order: str) -> list[dict[str, Any]]:
        """Return a distribution for each group of `rows`. `key`: the columns to group by, in SQL, separated by commas."""
        source, spread = self.rows, _SPREAD
        if self.has_several:
            source, spread = f"({weighted(self.rows, key)})", _WEIGHTED_SPREAD
        return self.history.records(
            f"select {key}, any_value(unit) as unit, {spread} from {source} group by {key} order by {order}",
            self.values,
        )


def _by(source: _Source, name: str, within: Mapping[str, str]) -> Section:
    rows = source.spread(f"model, within, {name}", f"model, within, {name}")
    columns = {"model": "model", **within, name: name, **_SPREAD_COLUMNS}
    return Section(name=f"by_{name}", title=f"By {name}", rows=rows, columns=columns)


def _place(source: _Source, value: float, empty: str) -> Section:
    """Return where the value lies among the figures of the own fleet, by model, driver, stage and settings.

    Groups of fewer than MIN_PARTS parts have no percentile.
    """
    weight = WEIGHT if source.has_several else "1.0"
    rows = source.history.records(
        f"""select 'own fleet' as source, model, driver, stage, settings, within, any_value(unit) as unit,
        $value::double as value,
        case when count(distinct host || ' ' || serial) >= {MIN_PARTS} then round(100 * sum(weight
          * case when value < $value then 1 when value = $value then 0.5 else 0 end) / sum(weight), 1) end as percentile,
        round(sum(weight))::bigint as values, count(distinct host || ' ' || serial) as parts
        from (select *, {weight} as weight from {source.rows}) group by model, driver, stage, settings, within
        order by model, stage, settings, within, driver""",
        {**source.values, "value": value},
    )
    within = {"within": "link, peer or adapter"} if source.has_several else {}
    columns = {"source": "source", "model": "model", "driver": "driver", "stage": "stage", "settings": "settings", **within,
               "value": "value", "percentile": "percentile", "values": "values", "parts": "parts"}  # fmt: skip
    return Section(name="place", title="Where the value lies", rows=rows, columns=columns, empty=empty)


def _imported(history: History, selection: Selection, value: float | None) -> list[dict[str, Any]]:
    """Return the distribution of the figure in each imported file, by model and settings.

    Files with the same name but different content are separate. The stage is ignored: imported figures have none.
    """
    terms, values = ["name = $name"], {"name": selection.name}
    if selection.model:
        terms.append("model = $model")
        values["model"] = selection.model
    for number, word in enumerate(selection.settings.split()):
        terms.append(f"list_contains(string_split(settings, ' '), $word{number})")
        values[f"word{number}"] = word
    place = ""
    if value is not None:
        values["value"] = value  # type: ignore[assignment]
        place = (
            f", case when count(*) >= {MIN_PARTS} then round(100 * (count(*) filter (value < $value) "
            "+ 0.5 * count(*) filter (value = $value)) / count(*), 1) end as percentile"
        )
    spread = _SPREAD.replace(f"{_PARTS}, ", "")
    return history.records(
        f"select source, version, file, sha256[:12] as sha256, model, settings, any_value(unit) as unit, {spread}{place} "
        f"from imported where {' and '.join(terms)} group by source, version, file, imported.sha256, model, settings "
        "order by source, file, imported.sha256, settings",
        values,
    )


def _unknown(history: History, selection: Selection) -> UsageError:
    names = [
        row[0] for row in history.rows("select distinct name from figures union select distinct name from imported")
    ]
    if selection.name in names:
        where, more = (" in accepted hosts", ", or add --all") if selection.accepted_only else ("", "")
        return UsageError(
            f"no figure {selection.name} with these settings, stage and model{where}: "
            f"omit some of --settings, --stage and --model{more}"
        )
    near = documents.nearest(selection.name, names)
    return UsageError(
        f"no figure {selection.name!r} in the history of kind {history.kind} in {history.directory}{near}: "
        'list the figures with: rackproof history sql "select distinct name from figures"'
    )
