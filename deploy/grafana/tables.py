"""Build tables.

`rows` returns a table with one row for each set of labels. `matrix` returns a table with one row for each value of one label, and
one column for each value of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import common as commons
from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from deploy.grafana.parts import GONE, HALF, WHOLE, Json, Text, describe_panel, now, steps, thresholds, words


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table."""

    title: str
    unit: str = ""
    decimals: int | None = None
    steps: tuple[dashboard.Threshold, ...] = ()
    """Colours of the cell's text by value; empty: the default colour."""
    words: Mapping[str, tuple[str, str]] | None = None
    """Value -> text that replaces it, and its colour."""
    link: tuple[str, str] | None = None
    """Title and URL of a link in each cell."""
    width: int = 0


def rows(
    text: Text,
    queries: Mapping[str, str],
    columns: Mapping[str, Column],
    *,
    width: int = HALF,
    height: int = 8,
    sort: str = "",
    down: bool = True,
) -> table.Panel:
    """Return a table of current values: one row for each set of labels.

    Args:
        queries: letter -> PromQL. Values of series with equal labels are in the same row.
        columns: label, or letter of a query -> its column, in this order. The values of a query without a column are not shown.
            Every label that the queries return needs a column.
        sort: title of the column by which rows are sorted.
        down: sort in descending order.
    """
    targets = [now(promql).format(PromQueryFormat.TABLE).ref_id(letter) for letter, promql in queries.items()]
    panel = describe_panel(table.Panel(), text, targets).span(width).height(height)
    fields = {(_value(name, queries) if name in queries else name): column for name, column in columns.items()}
    if len(queries) > 1:
        panel = panel.with_transformation(_transformation("merge"))
    panel = panel.with_transformation(_transformation(
        "organize",
        excludeByName={"Time": True} | {_value(name, queries): True for name in queries if name not in columns},
        indexByName={name: number for number, name in enumerate(fields)},
        renameByName={name: column.title for name, column in fields.items()},
    ))  # fmt: skip
    for column in columns.values():
        panel = panel.override_by_name(column.title, _column(column))
    if sort:
        panel = panel.sort_by([commons.TableSortByFieldState().display_name(sort).desc(down)])
    return panel


def _value(letter: str, queries: Mapping[str, str]) -> str:
    """Return the name that Grafana gives to the column with the values of a query."""
    return f"Value #{letter}" if len(queries) > 1 else "Value"


def _column(column: Column) -> list[dashboard.DynamicConfigValue]:
    overrides: Json = {"noValue": "–"}  # shown in an empty cell; a table without rows shows Text.empty
    if column.unit:
        overrides["unit"] = column.unit
    if column.decimals is not None:
        overrides["decimals"] = column.decimals
    if column.width:
        overrides["custom.width"] = column.width
    if column.words:
        overrides["mappings"] = [words(column.words)]
    if column.steps:
        overrides["thresholds"] = {"mode": "absolute", "steps": list(column.steps)}
    if column.steps or column.words:
        overrides["custom.cellOptions"] = {"type": "color-text"}
    if column.link:
        overrides["links"] = [{"title": column.link[0], "url": column.link[1], "targetBlank": False}]
    return [dashboard.DynamicConfigValue(id_val=key, value=value) for key, value in overrides.items()]


def matrix(
    text: Text,
    promql: str,
    row: tuple[str, str],
    column: str,
    *,
    mappings: Mapping[str, tuple[str, str]] | None = None,
    scale: Sequence[dashboard.Threshold] = (),
    unit: str = "none",
    numbers: bool = False,
    width: int = WHOLE,
    height: int = 9,
    link: tuple[str, str] | None = None,
) -> table.Panel:
    """Return a matrix of current values with coloured cells. One label names its rows, another its columns.

    Args:
        row: label whose values name the rows, and title of the first column.
        column: label whose values name the columns.
        mappings: value -> word and colour.
        scale: colours by value, for quantities.
        numbers: sort the values of `column` as numbers.
        link: title and URL of a link in the first cell of each row.
    """
    panel = (
        describe_panel(table.Panel(), text, [now(promql).format(PromQueryFormat.TABLE)])
        .span(width)
        .height(height)
        .unit(unit)
    )
    for step in _to_matrix(row, column, numbers):
        panel = panel.with_transformation(step)
    panel = panel.mappings([words(mappings)]) if mappings else panel
    panel = panel.thresholds(thresholds(tuple(scale) or steps(GONE))).align(common.FieldTextAlignment.CENTER)
    panel = panel.cell_options(
        common.TableColoredBackgroundCellOptions(mode=common.TableCellBackgroundDisplayMode.BASIC)
    )
    first: Json = {"custom.cellOptions": {"type": "auto"}, "custom.align": "left"}
    first |= {"links": [{"title": link[0], "url": link[1], "targetBlank": False}]} if link else {}
    return panel.override_by_name(
        row[1], [dashboard.DynamicConfigValue(id_val=key, value=value) for key, value in first.items()]
    )


def _to_matrix(row: tuple[str, str], column: str, numbers: bool) -> list[dashboard.DataTransformerConfig]:
    """Return the transformations that convert a table with one row for each pair of label values to a sorted matrix."""
    as_number = [{"targetField": column, "destinationType": "number"}]
    converted = [_transformation("convertFieldType", fields={}, conversions=as_number)] if numbers else []
    return [
        *converted,
        # Sort by column, and within a column by row.
        _transformation("sortBy", fields={}, sort=[{"field": row[0]}]),
        _transformation("sortBy", fields={}, sort=[{"field": column}]),
        _transformation("groupingToMatrix", rowField=row[0], columnField=column, valueField="Value", emptyValue="null"),
        _transformation("organize", excludeByName={}, indexByName={}, renameByName={f"{row[0]}\\{column}": row[1]}),
    ]


def _transformation(name: str, **options: Any) -> dashboard.DataTransformerConfig:
    return dashboard.DataTransformerConfig(id_val=name, options=options)
