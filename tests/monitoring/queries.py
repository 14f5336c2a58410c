"""The dashboards and rules of `configs`, as a list of queries."""

import json
import re
from typing import Any, Final

import msgspec
import yaml

from pipeline.paths import CONFIGS

DASHBOARDS: Final = sorted((CONFIGS / "grafana").glob("*.json"))
PROMETHEUS: Final = CONFIGS / "prometheus" / "prometheus.yml"
RULES: Final = CONFIGS / "prometheus" / "rules.yml"

COMPARISON: Final = re.compile(r" (>=|<=|==|!=|>|<) ")


class Query(msgspec.Struct, frozen=True):
    """One query, and where it stands."""

    where: str
    expr: str


def dashboards() -> list[dict[str, Any]]:
    """All of them."""
    return [json.loads(path.read_text("utf-8")) for path in DASHBOARDS]


def panels() -> list[tuple[str, dict[str, Any]]]:
    """Each panel that shows something, with its name."""
    return [
        (f"{dashboard['title']} / {panel['title']}", panel)
        for dashboard in dashboards()
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    ]


def rules() -> list[dict[str, Any]]:
    """Each rule, recording or alerting."""
    tree = yaml.safe_load(RULES.read_text("utf-8"))
    return [rule for group in tree["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """The alerting ones."""
    return [rule for rule in rules() if "alert" in rule]


def queries() -> list[Query]:
    """Every query of every panel and rule, as it is written."""
    shown = [Query(name, target["expr"]) for name, panel in panels() for target in panel["targets"]]
    return shown + [Query(rule.get("record") or rule["alert"], rule["expr"]) for rule in rules()]


def answerable() -> list[Query]:
    """Every query so that it has an answer also while all is well: an alert's comparison says 0 or 1, and leaves nothing out."""
    fired = {alert["alert"] for alert in alerts()}
    return [
        Query(query.where, COMPARISON.sub(r" \1 bool ", query.expr) if query.where in fired else query.expr)
        for query in queries()
    ]
