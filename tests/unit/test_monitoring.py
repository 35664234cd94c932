"""The alert rules, the dashboard of Grafana and the page about them name series that there are, and all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from sglang_evicpress.introspect.series import PREFIX, SERIES

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {series.name for series in SERIES}
LABELS = {series.name: set(series.labels) for series in SERIES}


def used(text: str) -> set[str]:
    """Series of ours, without their prefix."""
    return set(re.findall(rf"{PREFIX}(\w+)", text))


def expressions() -> list[str]:
    panels = json.loads((DOCS / "monitoring" / "grafana.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_query_and_alert_is_of_series_that_there_are() -> None:
    groups = yaml.safe_load((DOCS / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    assert len(expressions()) > 25 and len(alerts) >= 10
    for expression in (*expressions(), *alerts):
        assert used(expression) <= NAMES, expression
        assert used(expression) or "sglang[:_]" in expression, expression


def test_a_query_sums_by_labels_that_its_series_have() -> None:
    for expression in expressions():
        for by in re.findall(r"sum by \(([\w, ]+)\)", expression):
            assert used(expression) == set() or set(by.split(", ")) <= set().union(*map(LABELS.get, used(expression)))


def test_the_page_explains_every_series_and_every_alert() -> None:
    text = (DOCS / "monitoring.md").read_text(encoding="utf-8")
    rows = [line.partition("|")[2].partition("|")[0] for line in text.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    alerts = set(re.findall(r"alert: (\w+)", (DOCS / "monitoring" / "alerts.yaml").read_text(encoding="utf-8")))
    assert explained == NAMES | alerts
