"""Prometheus' rules and scrape configuration and Grafana's dashboard: bound to the metrics that the gateway has.

An expression about a metric or a label that doesn't exist is valid, and shows nothing for ever. So every expression is
read here, and each of its names must be in the table of the docs, which is that of the code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from proxy.metrics import DESCRIPTIONS, METRICS, NONE, RELOADS, TOKENS
from proxy.plugin import Outcome, Route
from proxy.settings import Server
from tests.operator_files import PAGE, yaml_of
from tests.process import REPOSITORY, started_gateway
from tests.test_docs import column, rows, sent

DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "deploy" / "grafana-dashboard.json").read_text())
RULES: list[dict[str, Any]] = [rule for group in yaml_of("deploy/alerts.yml")["groups"] for rule in group["rules"]]
SCRAPE: dict[str, Any] = yaml_of("deploy/prometheus.yml")["scrape_configs"][0]
COMPOSE: dict[str, Any] = yaml_of("compose.yaml")["services"]

OF_PROMETHEUS = {"up": ()}
ADDED = {"instance", "job"}
"""The labels that Prometheus adds to everything that it reads."""
VALUES = {
    ("ezat_requests_total", "outcome"): {outcome.value for outcome in Outcome},
    ("ezat_tokens_total", "kind"): set(TOKENS),
    ("ezat_reloads_total", "result"): set(RELOADS),
    ("ezat_upstream_failures_total", "alarm"): {"yes", "no"},
}
FUNCTIONS = {
    *("sum", "min", "max", "rate", "increase", "histogram_quantile", "avg_over_time"),
    *("by", "or", "unless", "offset"),
}


class Selector(NamedTuple):
    """A metric in an expression, with what is asked of its labels."""

    metric: str
    labels: dict[str, str]


def selectors(expression: str) -> list[Selector]:
    """The metrics in an expression, without what only groups or calculates."""
    text = re.sub(r"\[[^\]]*\]|\bby \([^)]*\)|\boffset \w+", " ", expression)
    found = re.findall(r"([a-zA-Z_]\w*)\s*(?:\{([^}]*)\})?", text)
    return [
        Selector(name, dict(re.findall(r'(\w+)(?:=~|!=|=)"([^"]*)"', matchers)))
        for name, matchers in found
        if name not in FUNCTIONS
    ]


def grouped_by(expression: str) -> set[str]:
    return {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}


def labels_of(metric: str) -> set[str] | None:
    """The labels of what an expression names; None for what doesn't exist."""
    if metric in OF_PROMETHEUS:
        return ADDED
    base, histogram, part = metric.partition("_bucket")
    if histogram and not part and base in METRICS and METRICS[base].make.__name__ == "Histogram":
        return {*DESCRIPTIONS[base], "le", *ADDED}
    is_whole = metric in METRICS and METRICS[metric].make.__name__ != "Histogram"
    return {*DESCRIPTIONS[metric], *ADDED} if is_whole else None


def wrong_in(expression: str) -> Iterator[str]:
    """What is wrong with the names in an expression."""
    if expression.count("(") != expression.count(")"):
        yield "its brackets"
    for metric, asked in selectors(expression):
        labels = labels_of(metric)
        if labels is None:
            yield f"there is no {metric}"
            continue
        yield from (f"{metric} has no {label}" for label in sorted((asked.keys() | grouped_by(expression)) - labels))
        for label, value in asked.items():
            known = VALUES.get((metric, label), {value, *value.split("|")})
            yield from (f"{label} is never {one}" for one in value.split("|") if one not in known)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


SHOWN = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"] for panel in panels() for target in panel["targets"]
}
EXPRESSIONS = {
    **SHOWN,
    **{note["name"]: note["expr"] for note in DASHBOARD["annotations"]["list"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}


# The docs


def test_the_table_of_metrics_is_the_code_s() -> None:
    """An operator finds each metric with its type, its labels and its meaning."""
    expected = [
        [
            f"`{name}`",
            described.make.__name__.lower(),
            ", ".join(f"`{label}`" for label in described.labels) or "none",
            described.text,
        ]
        for name, described in METRICS.items()
    ]

    assert expected == rows(PAGE, "The metrics")


def test_the_values_of_labels_are_the_code_s() -> None:
    """What the page says of the closed sets is what there is."""
    listed = {row[0]: row[1] for row in rows(PAGE, "The metrics", 1)}

    assert ", ".join([*(route.value for route in Route), NONE]) == listed["`route`"]
    assert [outcome.value for outcome in Outcome] == re.sub(r" \(.*\)", "", listed["`outcome`"]).split(", ")
    assert ", ".join(TOKENS) == listed["`kind` of tokens"]
    assert ", ".join(RELOADS) == listed["`result`"]


def test_every_alert_is_documented() -> None:
    """Whoever is woken finds what to do."""
    assert [rule["alert"] for rule in RULES] == column(PAGE, "Alerts")


# The expressions


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_names_what_there_is(expression: str) -> None:
    """No graph and no alarm is about a metric, a label or a value that the gateway doesn't have."""
    assert selectors(expression)
    assert [] == list(wrong_in(expression))


WRONG = {
    "ezat_request_total": ["there is no ezat_request_total"],
    "ezat_request_seconds": ["there is no ezat_request_seconds"],
    "sum by (plugin) (rate(ezat_errors_total[5m]))": ["ezat_errors_total has no plugin"],
    'ezat_tokens_total{kind=~"input|inputs"}': ["kind is never inputs"],
    'ezat_store_ready{model="m"} == 0': ["ezat_store_ready has no model"],
    "sum(ezat_store_ready": ["its brackets"],
}


@pytest.mark.parametrize(("expression", "wrong"), WRONG.items(), ids=WRONG)
def test_a_wrong_expression_is_found(expression: str, wrong: list[str]) -> None:
    """The test above can fail."""
    assert wrong == list(wrong_in(expression))


def test_every_metric_is_on_the_dashboard() -> None:
    """What is measured can be seen."""
    shown = {re.sub("_bucket$", "", each.metric) for expression in SHOWN.values() for each in selectors(expression)}

    assert set(METRICS) == shown


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_whom_and_what_it_is_about(rule: dict[str, Any]) -> None:
    """An alert has a severity and one sentence, whose labels its expression keeps."""
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    kept = grouped_by(rule["expr"]) or set.union(*(labels_of(each.metric) or set() for each in selectors(rule["expr"])))

    assert rule["labels"]["severity"] in ("critical", "warning")
    assert named <= kept


# The dashboard


def test_a_legend_names_what_its_expression_keeps() -> None:
    """No line of a graph is without its name."""
    lost = [
        title
        for title, expression in SHOWN.items()
        if not set(re.findall(r"\{\{(\w+)\}\}", title.partition(": ")[2])) <= grouped_by(expression)
    ]

    assert [] == lost


def test_the_panels_stand_beside_each_other() -> None:
    """No panel covers another, and each has a number of its own."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        places = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not places & taken, panel["title"]
        taken |= places

    assert len(DASHBOARD["panels"]) == len({panel["id"] for panel in DASHBOARD["panels"]})


def test_a_model_can_be_chosen() -> None:
    """The choice of models comes from the metrics, and holds for every panel that knows models."""
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    by_model = {name for name, labels in DESCRIPTIONS.items() if "model" in labels}
    unfiltered = [
        expression
        for expression in SHOWN.values()
        for each in selectors(expression)
        if re.sub("_bucket$", "", each.metric) in by_model and each.labels.get("model") != "$model"
    ]

    assert "label_values(ezat_requests_total, model)" == variables["model"]["query"]["query"]
    assert [] == unfiltered
    assert {"${datasource}"} == {panel["datasource"]["uid"] for panel in panels()}


# What reads what


def test_prometheus_reads_the_admin_listener_of_compose() -> None:
    """The address, the token's file and the rules are where compose.yaml puts them."""
    config = yaml_of("deploy/prometheus.yml")
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["prometheus"]["volumes"])
    folder = os.path.dirname(mounted["./deploy/prometheus.yml"])
    secret = COMPOSE["prometheus"]["secrets"][0]["target"]

    assert [f"gateway:{Server().admin.port}"] == SCRAPE["static_configs"][0]["targets"]
    assert secret == f"{folder}/{SCRAPE['authorization']['credentials_file']}"
    assert [f"{folder}/{name}" for name in config["rule_files"]] == [mounted["./deploy/alerts.yml"]]
    assert set(COMPOSE["prometheus"]["networks"]) & set(COMPOSE["gateway"]["networks"])
    assert f'up{{job="{SCRAPE["job_name"]}"}} == 0' == RULES[0]["expr"]


def test_grafana_reads_prometheus_and_the_dashboard() -> None:
    """Data source and dashboard are where compose.yaml puts them."""
    source = yaml_of("deploy/grafana-datasource.yml")["datasources"][0]
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["grafana"]["volumes"])
    folder = yaml_of("deploy/grafana-dashboards.yml")["providers"][0]["options"]["path"]

    assert ("prometheus", 9090) == (urlsplit(source["url"]).hostname, urlsplit(source["url"]).port)
    assert "127.0.0.1:9090:9090" in COMPOSE["prometheus"]["ports"]
    assert folder == os.path.dirname(mounted["./deploy/grafana-dashboard.json"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    """Where Prometheus is at hand, it reads its configuration and the rules without a complaint."""
    for name in ("prometheus.yml", "alerts.yml"):
        shutil.copyfile(REPOSITORY / "deploy" / name, tmp_path / name)
    (tmp_path / SCRAPE["authorization"]["credentials_file"]).write_text("token")

    ended = subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True)

    assert 0 == ended.returncode, ended.stderr


def scraped(url: str, token: str) -> tuple[int, str]:
    """Status and text of what Prometheus gets, asking as deploy/prometheus.yml says."""
    request = urllib.request.Request(url, headers={"authorization": f"{SCRAPE['authorization']['type']} {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


@pytest.mark.slow
async def test_a_scrape_has_every_metric(tmp_path: Path) -> None:
    """Asked with the token that the first start prints, a gateway that was used tells each metric of the table."""
    demo = yaml_of("config/demo.yaml")
    with started_gateway(demo, tmp_path) as gateway:
        await sent(
            f"{gateway.url}/openai/v1/chat/completions",
            {"model": "claude-sonnet-5-5", "messages": [{"role": "user", "content": "Hello!"}], "stream": True},
        )
        (url,) = re.findall(r"http://\S+/metrics", gateway.written)
        (token,) = re.findall(r"ezat_admin_\S+", gateway.written)
        status, text = scraped(url, token)
        refused, _ = scraped(url, "ezat_sk_demo")

    assert (200, 401) == (status, refused)
    assert [] == [name for name in METRICS if f"# TYPE {name} " not in text]
