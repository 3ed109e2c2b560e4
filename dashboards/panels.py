"""The few kinds of panels that the dashboards are made of, so that all look alike."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common as build_common
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableHide,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.promql import APPLICATION, DEPLOYMENT, REPLICA_HEALTHY, quantile
from engine.metrics import Metric

TAG = "stepahead"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RAY_DASHBOARD = "http://localhost:8265"
"""Where Ray's own dashboard is by default; a text field on each dashboard changes it."""
RAY_DEPLOYMENT = "${ray}/#/serve/applications/${__field.labels.application}/${__field.labels.deployment}"
"""Of a series that has these labels, as `promql.PER_REPLICA` keeps them."""

Query = tuple[str, str]
"""An expression, and the legend of its series."""
Panel = timeseries.Panel | stat.Panel | heatmap.Panel


def graph(
    title: str,
    unit: str,
    *queries: Query,
    help: str = "",
    stacked: bool = False,
    top: float | None = None,
    target: float | None = None,
    width: int = 8,
) -> timeseries.Panel:
    """Lines over time. `top` is the axis' end, `target` a dashed line."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(help)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .height(8)
        .span(width)
        .line_width(1)
        .fill_opacity(25 if stacked else 8)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            build_common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(
            build_common.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
    )
    if stacked:
        panel.stacking(build_common.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if top is not None:
        panel.max(top)
    if target is not None:
        panel.thresholds(
            build.ThresholdsConfig()
            .mode(ThresholdsMode.ABSOLUTE)
            .steps([Threshold(color="transparent"), Threshold(value=target, color="red")])
        ).thresholds_style(
            build_common.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    for reference, (expression, legend) in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(_query(reference, expression).legend_format(legend))
    if any("{{replica}}" in legend for _, legend in queries):
        panel.data_links([_link("Ray: deployment", RAY_DEPLOYMENT)])
    return panel


def spread(title: str, unit: str, histogram: Metric, high: float = 0.99) -> timeseries.Panel:
    """The median of a histogram and a high quantile, over time."""
    return graph(
        title,
        unit,
        (quantile(0.5, histogram), "p50"),
        (quantile(high, histogram), f"p{100 * high:g}"),
        help=histogram.help,
    )


def number(
    title: str,
    unit: str,
    *queries: Query,
    help: str = "",
    steps: tuple[tuple[float | None, str], ...] = ((None, "text"),),
    width: int = 4,
) -> stat.Panel:
    """The latest value in large digits, coloured by `steps` of (from, colour)."""
    panel = (
        stat.Panel()
        .title(title)
        .description(help)
        .datasource(SOURCE)
        .unit(unit)
        .height(4)
        .span(width)
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .reduce_options(build_common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(
            build.ThresholdsConfig()
            .mode(ThresholdsMode.ABSOLUTE)
            .steps([Threshold(value=value, color=color) for value, color in steps])
        )
    )
    for reference, (expression, legend) in zip("ABCDEFGH", queries, strict=False):
        panel.with_target(_query(reference, expression).legend_format(legend))
    return panel


def distribution(title: str, unit: str, expression: str, help: str = "", width: int = 8) -> heatmap.Panel:
    """How many observations fell into each bucket of a histogram, over time."""
    return (
        heatmap.Panel()
        .title(title)
        .description(help)
        .datasource(SOURCE)
        .height(8)
        .span(width)
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heatmap_model.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
        )
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .with_target(
            _query("A", expression).format(PromQueryFormat.HEATMAP).legend_format("{{le}}").interval("30s")
        )
    )


def _query(reference: str, expression: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().ref_id(reference).datasource(SOURCE).expr(expression).range()


def board(
    uid: str, title: str, description: str, rows: dict[str, list[Panel]], datasource: str | None = None
) -> dict[str, Any]:
    """A whole dashboard as Grafana's JSON. `datasource` is the uid to begin with, else Grafana's default."""
    dashboard = (
        build.Dashboard(f"stepahead: {title}")
        .uid(uid)
        .description(description)
        .tags([TAG, "ray"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .link(
            build.DashboardLink("stepahead")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .include_vars(True)
            .keep_time(True)
        )
        .link(_link("Ray: Serve", "${ray}/#/serve"))
        .link(_link("Ray: cluster", "${ray}/#/cluster"))
    )
    for variable in _variables(datasource):
        dashboard.with_variable(variable)
    for row, panels in rows.items():
        dashboard.with_row(build.Row(row))
        for panel in panels:
            dashboard.with_panel(panel)
    made: dict[str, Any] = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    for number, panel in enumerate(made["panels"], 1):
        panel["id"] = number  # the builders leave it out, and links to one panel need it
    return made


def _link(title: str, url: str) -> build.DashboardLink:
    return (
        build.DashboardLink(title)
        .type(DashboardLinkType.LINK)
        .icon("external link")
        .url(url)
        .target_blank(True)
    )


def _variables(datasource: str | None) -> list[Any]:
    source = build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    if datasource is not None:
        source.current(VariableOption(selected=True, text=datasource, value=datasource))
    every = VariableOption(selected=True, text="All", value="$__all")

    def labels(name: str, scope: str) -> build.QueryVariable:
        return (
            build.QueryVariable(name)
            .label(name.capitalize())
            .datasource(SOURCE)
            .query(f"label_values({REPLICA_HEALTHY}{{{scope}}}, {name})")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(every)
        )

    return [
        source,
        labels("application", ""),
        labels("deployment", APPLICATION),
        labels("replica", DEPLOYMENT),
        build.TextBoxVariable("ray")
        .label("Ray dashboard")
        .default_value(RAY_DASHBOARD)
        .hide(VariableHide.DONT_HIDE),
    ]
