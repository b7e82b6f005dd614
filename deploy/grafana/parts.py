"""Build the parts of every dashboard: queries, colours and panels.

Missing data must not look like a good result. So each panel has a text for missing data. A query may show a missing count as
zero, but only if another series shows that data arrive. Example: `errors or 0 * info` is zero only if `info` exists.
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
"""Label matchers of the selected hosts."""
GPUS = f'{HOSTS}, gpu=~"$gpu"'
RUN = f'{HOSTS}, run_id=~"$run_id"'
WHOLE, HALF, THIRD, QUARTER = 24, 12, 8, 6

# Colours that are safe for colour-blind readers (Okabe and Ito). The dashboards always show a word with a colour.
FINE, BUSY, WARN, BAD, GONE, ODD, PLAIN = (
    "#0072B2",
    "#56B4E9",
    "#E69F00",
    "#D55E00",
    "#7F7F7F",
    "#CC79A7",
    "transparent",
)
GPU_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
"""Colours of GPU 0 to 7."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """The texts of a panel."""

    title: str
    about: str
    """What the panel shows, and how to interpret it."""
    empty: str
    """Text shown if the query returns no series."""


def texts(name: str) -> Callable[..., Text]:
    """Return a function that looks up the texts of a panel in texts.yml by key and formats them with values."""
    known: dict[str, dict[str, str]] = yaml.load(TEXTS.read_text(encoding="utf-8"), Loader=LOADER)[name]  # noqa: S506 - a SafeLoader

    def find(key: str, **values: object) -> Text:
        return Text(**{part: text.format(**values) if values else text for part, text in known[key].items()})

    return find


def query(promql: str, legend: str = "__auto") -> prometheus.Dataquery:
    """Return a query over the time range of the dashboard."""
    return prometheus.Dataquery().expr(promql).legend_format(legend).range().datasource(SOURCE)


def now(promql: str, legend: str = "__auto") -> prometheus.Dataquery:
    """Return a query at the end of the time range of the dashboard."""
    return prometheus.Dataquery().expr(promql).legend_format(legend).instant().datasource(SOURCE)


def engines(promql: str, legend: str) -> list[prometheus.Dataquery]:
    """Return a query for each engine of the GPUs; `promql` has the metric name `rackproof_gpu_gpm_%s`."""
    names = {"graphics": "any", "sm": "SMs", "tensor": "tensor cores", "memory": "memory"}
    return [query(promql % f"{name}_active_ratio", f"{legend} {title}") for name, title in names.items()]


def steps(first: str, *more: tuple[float, str]) -> tuple[dashboard.Threshold, ...]:
    """Return colours by value: `first` for the lowest values, and each colour in `more` from its value upward."""
    below = dashboard.Threshold(value=None, color=first)
    return (below, *(dashboard.Threshold(value=value, color=colour) for value, colour in more))


def words(states: Mapping[str, tuple[str, str]]) -> dashboard.ValueMap:
    """Return a mapping that shows words and colours in place of values."""
    mappings = {
        value: dashboard.ValueMappingResult(text=text, color=colour, index=number)
        for number, (value, (text, colour)) in enumerate(states.items())
    }
    return dashboard.ValueMap(options=mappings)


def properties(**values: Any) -> list[dashboard.DynamicConfigValue]:
    """Return the properties of an override: the argument `custom__lineWidth=2` sets custom.lineWidth."""
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
    """Return a panel of values over time.

    Args:
        limit: drawn as a dashed line; values above it are bad.
        broken_below: values below the limit are bad instead.
        least, most: ends of the axis; the axis extends to values beyond them. None: the values determine that end.
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
    for number, colour in enumerate(GPU_COLOURS if by_gpu else ()):
        panel = panel.override_by_regexp(f"/^GPU {number}\\b/", _coloured(colour))
    return panel


_DOWN = common.SortOrder.DESCENDING


def dashed(panel: timeseries.Panel, begins: str, colour: str = BAD) -> timeseries.Panel:
    """Draw series whose names begin with `begins` as thick dashed lines. The dashboards show limits in this way."""
    style = properties(custom__lineStyle={"fill": "dash", "dash": [8, 6]}, custom__lineWidth=2)
    return panel.override_by_regexp(f"/^{begins}/", [*_coloured(colour), *style])


def band(panel: timeseries.Panel, low: str, high: str) -> timeseries.Panel:
    """Fill the area between two series, and hide their lines."""
    edge = properties(custom__lineWidth=0) + _coloured(BUSY)
    filled = properties(custom__fillBelowTo=low, custom__fillOpacity=25)
    return panel.override_by_name(low, edge).override_by_name(high, [*edge, *filled])


def _coloured(colour: str) -> list[dashboard.DynamicConfigValue]:
    return properties(color={"mode": "fixed", "fixedColor": colour})


def figures(
    text: Text, *queries: prometheus.Dataquery, width: int = QUARTER, bad: Mapping[str, tuple[float, str]] | None = None
) -> stat.Panel:
    """Return a panel of current numbers; `bad` maps a series to a value and the colour from that value upward."""
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
    """Return a timeline with one row for each series, coloured by its state."""
    panel = describe_panel(statetimeline.Panel(), text, queries).span(width).height(height).mappings([words(mappings)])
    panel = panel.show_value(common.VisibilityMode.AUTO).merge_values(True).row_height(0.85).fill_opacity(90)
    panel = panel.thresholds(thresholds(steps(GONE)))
    legend = commons.VizLegendOptions().display_mode(common.LegendDisplayMode.LIST).show_legend(True)
    return panel.legend(legend.placement(common.LegendPlacement.BOTTOM).calcs([]))


def describe_panel(panel: Panel, text: Text, queries: Sequence[prometheus.Dataquery]) -> Panel:
    """Set texts and queries of a panel. `Panel` is a type variable, because the panel builders have no base class in common."""
    letters = "ABCDEFGHIJKLMNOP"
    for letter, target in zip(letters, queries, strict=False):
        panel = panel.with_target(target.ref_id(letter))
    return panel.title(text.title).description(text.about).no_value(text.empty).datasource(SOURCE)


def thresholds(colours: Sequence[dashboard.Threshold]) -> boards.ThresholdsConfig:
    """Return the colours by value in the form that a panel needs."""
    return boards.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(list(colours))
