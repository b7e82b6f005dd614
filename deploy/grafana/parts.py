"""What every dashboard is made of: queries, colours, and panels that say what they show when there is nothing to show.

A panel without data never looks well: each has a text of its own for that case, and no query turns absence into a zero unless
something else in it proves that there was an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from grafana_foundation_sdk.builders import common as commons
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common, dashboard

from fleet.yaml_files import LOADER

Json = dict[str, Any]
Panel = TypeVar("Panel", timeseries.Panel, stat.Panel, statetimeline.Panel, table.Panel)

TEXTS = Path(__file__).with_name("texts.yml")
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
HOSTS = 'rack=~"$rack", host=~"$host"'
"""Matchers of the hosts that are chosen."""
GPUS = f'{HOSTS}, gpu=~"$gpu"'
RUN = f'{HOSTS}, run_id=~"$run_id"'
WHOLE, HALF, THIRD, QUARTER = 24, 12, 8, 6

# Colour-blind safe colours (Okabe and Ito); every colour has a word beside it.
FINE, BUSY, WARN, BAD, GONE, ODD, PLAIN = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#D55E00",
    "#7F7F7F",
    "#CC79A7",
    "transparent",
)
EIGHT = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Of GPU 0 to 7."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """What a panel says of itself."""

    title: str
    about: str
    """What is seen, and what to make of it."""
    empty: str
    """Text shown if no series answers."""


def texts(name: str) -> Callable[..., Text]:
    """Finds the texts of that dashboard's panels in texts.yml by their keys, and puts values into them."""
    known: dict[str, dict[str, str]] = yaml.load(TEXTS.read_text(encoding="utf-8"), Loader=LOADER)[name]  # noqa: S506 - a SafeLoader

    def find(key: str, **values: object) -> Text:
        return Text(**{part: text.format(**values) if values else text for part, text in known[key].items()})

    return find


def query(promql: str, legend: str = "__auto") -> prometheus.Dataquery:
    """Over the time that is shown."""
    return prometheus.Dataquery().expr(promql).legend_format(legend).range().datasource(SOURCE)


def now(promql: str, legend: str = "__auto") -> prometheus.Dataquery:
    """At the end of the time that is shown."""
    return prometheus.Dataquery().expr(promql).legend_format(legend).instant().datasource(SOURCE)


def steps(first: str, *more: tuple[float, str]) -> tuple[dashboard.Threshold, ...]:
    """Colours by value: the first one, and each from a value on."""
    below = dashboard.Threshold(value=None, color=first)
    return (below, *(dashboard.Threshold(value=value, color=colour) for value, colour in more))


def words(states: Mapping[str, tuple[str, str]]) -> dashboard.ValueMap:
    """Words and colours in place of values."""
    results = {
        value: dashboard.ValueMappingResult(text=text, color=colour, index=number)
        for number, (value, (text, colour)) in enumerate(states.items())
    }
    return dashboard.ValueMap(options=results)


def properties(**values: Any) -> list[dashboard.DynamicConfigValue]:
    """Return the properties of an override: `custom__lineWidth=2` is custom.lineWidth."""
    return [dashboard.DynamicConfigValue(id_val=key.replace("__", "."), value=value) for key, value in values.items()]


def lines(
    text: Text,
    *queries: prometheus.Dataquery,
    unit: str,
    width: int = HALF,
    limit: float | None = None,
    broken_below: bool = False,
    least: float | None = 0,
    most: float | None = None,
    by_gpu: bool = False,
) -> timeseries.Panel:
    """Values over time.

    Args:
        limit: drawn as a dashed line; what is beyond it is bad.
        broken_below: what is under the limit is bad.
        least, most: limits of the axis, unless values exceed them.
        by_gpu: series whose names begin with `GPU 0` to `GPU 7` have the same colours in every panel.
    """
    panel = describe_panel(timeseries.Panel(), text, queries).unit(unit).span(width).height(8)
    panel = panel.line_width(1).fill_opacity(0).show_points(common.VisibilityMode.AUTO)
    panel = panel.tooltip(commons.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(_DOWN))
    legend = commons.VizLegendOptions().display_mode(common.LegendDisplayMode.TABLE).show_legend(True)
    panel = panel.legend(legend.placement(common.LegendPlacement.BOTTOM).calcs(["min", "max", "lastNotNull"]))
    if least is not None:
        panel = panel.axis_soft_min(least)
    if most is not None:
        panel = panel.axis_soft_max(most)
    if limit is not None:
        within = steps(BAD, (limit, PLAIN)) if broken_below else steps(PLAIN, (limit, BAD))
        panel = panel.thresholds(thresholds(within))
        panel = panel.thresholds_style(
            commons.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    for number, colour in enumerate(EIGHT if by_gpu else ()):
        panel = panel.override_by_regexp(f"/^GPU {number}\\b/", _coloured(colour))
    return panel


_DOWN = common.SortOrder.DESCENDING


def dashed(panel: timeseries.Panel, begins: str, colour: str = BAD) -> timeseries.Panel:
    """Series whose names begin so are limits, not measurements."""
    style = properties(custom__lineStyle={"fill": "dash", "dash": [8, 6]}, custom__lineWidth=2)
    return panel.override_by_regexp(f"/^{begins}/", [*_coloured(colour), *style])


def band(panel: timeseries.Panel, low: str, high: str) -> timeseries.Panel:
    """What lies between two series is filled; neither of them has a line."""
    edge = properties(custom__lineWidth=0) + _coloured(BUSY)
    filled = properties(custom__fillBelowTo=low, custom__fillOpacity=25)
    return panel.override_by_name(low, edge).override_by_name(high, [*edge, *filled])


def _coloured(colour: str) -> list[dashboard.DynamicConfigValue]:
    return properties(color={"mode": "fixed", "fixedColor": colour})


def figures(
    text: Text, *queries: prometheus.Dataquery, width: int = QUARTER, bad: Mapping[str, tuple[float, str]] | None = None
) -> stat.Panel:
    """A few numbers of this moment; `bad` gives a number its colour from a value on."""
    panel = describe_panel(stat.Panel(), text, queries).unit("short").span(width).height(4)
    panel = panel.thresholds(thresholds(steps(FINE))).color_mode(common.BigValueColorMode.VALUE)
    panel = panel.graph_mode(common.BigValueGraphMode.NONE).text_mode(common.BigValueTextMode.VALUE_AND_NAME)
    for name, (value, colour) in (bad or {}).items():
        scale = {"mode": "absolute", "steps": [{"value": None, "color": FINE}, {"value": value, "color": colour}]}
        panel = panel.override_by_name(name, properties(thresholds=scale))
    return panel


def states(
    text: Text,
    *queries: prometheus.Dataquery,
    mappings: Mapping[str, tuple[str, str]],
    width: int = WHOLE,
    height: int = 8,
) -> statetimeline.Panel:
    """A row a series, whose colour is its state at each time."""
    panel = describe_panel(statetimeline.Panel(), text, queries).span(width).height(height).mappings([words(mappings)])
    panel = panel.show_value(common.VisibilityMode.AUTO).merge_values(True).row_height(0.85).fill_opacity(90)
    panel = panel.thresholds(thresholds(steps(GONE)))
    legend = commons.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    return panel.legend(legend.placement(common.LegendPlacement.BOTTOM).calcs([]))


def describe_panel(panel: Panel, text: Text, queries: Sequence[prometheus.Dataquery]) -> Panel:
    """The panel with its texts and queries. The builders have these methods in common, and no base class."""
    letters = "ABCDEFGHIJKLMNOP"
    for letter, asked in zip(letters, queries, strict=False):
        panel = panel.with_target(asked.ref_id(letter))
    return panel.title(text.title).description(text.about).no_value(text.empty).datasource(SOURCE)


def thresholds(of: Sequence[dashboard.Threshold]) -> boards.ThresholdsConfig:
    """Colours by value, for a panel."""
    return boards.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(list(of))
