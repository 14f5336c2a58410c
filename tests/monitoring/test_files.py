"""What the dashboards and rules say: of metrics that there are, in units, with words, and with a remedy."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from pipeline.cli.main import program as headrace
from pipeline.telemetry import metrics
from tests.monitoring.queries import PROMETHEUS, RULES, Query, alerts, dashboards, panels, queries, rules
from tests.monitoring.server import program

UNITS: Final = {"s", "short", "percentunit", "reqps", "ops", "cps", "bytes", "x"}
"""Of Grafana's units, those in use here. A misspelt one would be shown as a suffix."""

ALERTS: Final = Path(__file__).with_name("alerts.yml")

SELECTED: Final = re.compile(r"\b(headrace_\w+)(?:\{([^}]*)\})?")
MATCHER: Final = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
RECORDED: Final = re.compile(r"\bheadrace:\w+:\w+")


def exposed() -> Iterator[tuple[str, tuple[str, MetricWrapperBase]]]:
    """Each name that a query may use, with the metric it belongs to, and that one's name."""
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            (family,) = metric.describe()
            endings = ("_bucket", "_sum", "_count") if isinstance(metric, Histogram) else ("",)
            for ending in ("_total",) if isinstance(metric, Counter) else endings:
                yield family.name + ending, (family.name, metric)


METRICS: Final = dict(exposed())


def each(query: Query) -> str:
    return query.where


@pytest.mark.parametrize("query", queries(), ids=each)
def test_a_query_names_metrics_labels_and_values_that_are_declared(query: Query) -> None:
    for name, selector in SELECTED.findall(query.expr):
        assert name in METRICS, f"pipeline/telemetry/metrics.py declares no {name}"
        family, metric = METRICS[name]
        vocabulary = dict(metrics.LABELS.get(family, {}))
        if isinstance(metric, Histogram):
            vocabulary["le"] = tuple(str(bound) for bound in metric._upper_bounds)
        for label, values in MATCHER.findall(selector):
            assert label in vocabulary, f"{name} has no label {label}"
            assert set(values.split("|")) <= set(vocabulary[label]), f"{name} has no such {label}"


@pytest.mark.parametrize("query", queries(), ids=each)
def test_a_recorded_series_in_a_query_is_one_that_is_recorded(query: Query) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert set(RECORDED.findall(query.expr)) <= recorded


@pytest.mark.parametrize(("name", "panel"), panels(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_panel_has_a_unit_a_description_and_a_legend_for_each_line(name: str, panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, name
    assert panel["description"].endswith("."), name
    assert all(target["legendFormat"] for target in panel["targets"]), name
    grouped = {label for target in panel["targets"] for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
    known = {"job", "instance", "slo", *(label for labels in metrics.LABELS.values() for label in labels)}
    assert grouped <= known, name


def test_no_panel_lies_on_another_and_none_has_anothers_name() -> None:
    assert len({dashboard["uid"] for dashboard in dashboards()}) == len(dashboards()) > 0
    names = [name for name, _ in panels()]
    assert len(set(names)) == len(names)
    for dashboard in dashboards():
        cells = [cell for panel in dashboard["panels"] for cell in covered(panel["gridPos"])]
        assert len(set(cells)) == len(cells), dashboard["title"]
        assert all(x < 24 for x, _ in cells), dashboard["title"]
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids), dashboard["title"]


def covered(place: dict[str, int]) -> list[tuple[int, int]]:
    """The cells of the grid that a panel takes."""
    columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
    return [(x, y) for x in columns for y in lines]


def test_a_dashboard_leaves_the_choice_of_its_prometheus_to_whoever_looks() -> None:
    for dashboard in dashboards():
        assert [variable["type"] for variable in dashboard["templating"]["list"]] == ["datasource"]
    for name, panel in panels():
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources), name


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_says_what_is_wrong_and_which_command_to_run(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("page", "ticket")
    assert alert["annotations"]["summary"]
    commands = re.findall(r"`headrace ([a-z]+)", alert["annotations"]["description"])
    offered = {command.name for command in headrace().registered_commands} | {
        group.name for group in headrace().registered_groups
    }
    assert commands
    assert set(commands) <= offered


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_an_alert_is_tested_firing_and_silent(alert: dict[str, Any]) -> None:
    text = ALERTS.read_text("utf-8")
    assert f'alertname="{alert["alert"]}",alertstate="firing"' in text


@pytest.mark.system
@pytest.mark.parametrize(
    "arguments",
    [("check", "config", str(PROMETHEUS)), ("check", "rules", str(RULES)), ("test", "rules", str(ALERTS))],
    ids=["configuration", "rules", "alerts"],
)
def test_promtool_is_content_with(arguments: tuple[str, ...]) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
