"""Alerts and dashboards: each metric that they name is exposed, and each alert can fire."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.processes import ROOT
from protos.telemetry.metrics import Family
from tests.deploy.metrics import (
    EXPOSED,
    FAMILIES,
    executor_families,
    picker_families,
    router_families,
)

PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARD = ROOT / "deploy/grafana/lockstep.json"
DOCUMENT = PROMETHEUS / "METRICS.md"
ALERTS = (PROMETHEUS / "alerts.yaml").read_text()
RULES = [rule for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]

# Of PromQL, what stands where a metric's name could.
WORDS = {
    *("and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right"),
    *("bool", "offset", "sum", "min", "max", "avg", "count", "rate", "increase", "changes"),
    *("absent", "time", "histogram_quantile", "label_values"),
    *("min_over_time", "max_over_time", "avg_over_time"),
}
COUNTERS_ONLY = ("rate", "irate", "increase", "changes")


def dashboard_queries() -> Iterator[tuple[str, str]]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["definition"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


QUERIES = [*((rule["alert"], rule["expr"]) for rule in RULES), *dashboard_queries()]


def names_in(query: str) -> tuple[set[str], set[str]]:
    """Returns the metrics and the labels that a query names."""
    query = re.sub(r'"[^"]*"|\$\w+', "", query)
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=(?!=))", query))
    query = re.sub(r"label_values\((.*), (\w+)\)", r"\1", query)
    for clause in re.findall(r"\b(?:by|without|on|ignoring|group_left)\s*\(([^)]*)\)", query):
        labels |= set(re.findall(r"\w+", clause))
    query = re.sub(r"\b(by|without|on|ignoring|group_left)\s*\([^)]*\)", "", query)
    query = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", query)
    return set(re.findall(r"\b[a-zA-Z_]\w*", query)) - WORDS, labels


def unknown_names(query: str) -> set[str]:
    """Returns the metrics and labels that a query names and that are not exposed."""
    metrics, labels = names_in(query)
    unknown = metrics - EXPOSED.keys()
    known_labels = set().union(*(EXPOSED[name] for name in metrics - unknown))
    return unknown | (labels - known_labels)


def document_table(families: list[Family]) -> str:
    rows = [
        f"| `{family.name}` | {family.kind} | {', '.join(family.labels)} | {family.help} |"
        for family in families
    ]
    return "\n".join(["| metric | type | labels | |", "|---|---|---|---|", *rows])


@pytest.mark.parametrize(("name", "query"), QUERIES, ids=[name for name, _ in QUERIES])
def test_queries_name_metrics_and_labels_that_exist(name: str, query: str):
    assert names_in(query)[0], "it names no metric at all"
    assert unknown_names(query) == set()


@pytest.mark.parametrize(
    "query",
    [
        "sum(lockstep_router_waiting_sequence)",
        'rate(lockstep_router_steps_total{runer="eager"}[5m])',
        "sum by (rnk) (lockstep_router_running_sequences)",
        "lockstep_router_queue_seconds > 1",
        "lockstep_router_ready == 0 and on (instance) lockstep_executor_redy",
    ],
)
def test_a_typo_in_a_query_would_be_found(query: str):
    assert len(unknown_names(query)) == 1


@pytest.mark.parametrize(("name", "query"), QUERIES, ids=[name for name, _ in QUERIES])
def test_rates_are_of_counters(name: str, query: str):
    """The rate of a gauge is a number too, and means nothing."""
    functions = "|".join(COUNTERS_ONLY)
    for metric in re.findall(rf"\b(?:{functions})\((\w+)", query):
        assert metric.endswith(("_total", "_bucket", "_count", "_sum")), metric


def test_every_metric_is_drawn():
    drawn = set().union(*(names_in(query)[0] for _, query in QUERIES))
    for family in FAMILIES:
        names = {family.name, *(f"{family.name}_{end}" for end in ("bucket", "sum", "count"))}
        assert names & drawn, f"{family.name} is on no panel of the dashboard and in no rule"


@pytest.mark.parametrize(
    ("title", "families"),
    [
        ("Router", router_families()),
        ("Endpoint pickers", picker_families()),
        ("Executor", executor_families()),
    ],
)
def test_every_metric_is_documented_with_its_labels_and_what_it_tells(
    title: str, families: list[Family]
):
    table = document_table(families)
    text = DOCUMENT.read_text()
    [section] = [part for part in text.split("\n## ") if part.startswith(f"{title}\n")]
    assert f"\n\n{table}\n" in section, f"in {DOCUMENT} under '## {title}', put:\n\n{table}"


def test_names_follow_prometheus_own_rules():
    for family in FAMILIES:
        assert family.name.startswith(("lockstep_router_", "lockstep_executor_"))
        assert (family.kind == "counter") == family.name.endswith("_total")
        if family.kind == "histogram":
            assert family.name.endswith("_seconds")
        assert family.help.endswith(".")
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_whatever_is_deployed_names_metrics_that_exist():
    """Autoscalers, too, ask for metrics by name."""
    for path in [*ROOT.glob("deploy/**/*.yaml"), *ROOT.glob("deploy/**/*.md"), ROOT / "README.md"]:
        for name in re.findall(r"\blockstep_(?:router|executor)_\w+", path.read_text()):
            is_family = any(family.name == name for family in FAMILIES)
            assert name in EXPOSED or is_family, f"{path} names {name}"


def test_the_dashboard_is_one_that_grafana_can_load():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert dashboard["uid"] == "lockstep"
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    titles = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert {"Traffic", "Latency", "Ranks", "KV cache", "Steps", "Recoveries"} <= set(titles)


def unit_of(query: str) -> str:
    """Returns the end that a panel's unit must have for what a query gives."""
    metric = max(names_in(query)[0], key=len)
    if metric.endswith("_bytes"):
        return "bytes"
    if " / " in query:
        return "s" if "_seconds" in query else "percentunit"
    if metric.endswith(("_seconds", "_seconds_bucket")):
        return "s"
    if "rate(" in query and not metric.endswith("cpu_seconds_total"):
        return "s"  # of "reqps", "suffix: tok/s"
    return "percentunit" if metric.endswith("usage_ratio") else ""


@pytest.mark.parametrize(
    "panel",
    [p for p in json.loads(DASHBOARD.read_text())["panels"] if "targets" in p],
    ids=lambda panel: panel["title"],
)
def test_a_panel_says_in_which_unit_its_numbers_are(panel: dict[str, Any]):
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        query = target["expr"]
        assert unit.endswith(unit_of(query)), query
        is_rate = "rate(" in query and " / " not in query and "histogram_quantile" not in query
        assert is_rate == unit.endswith(("/s", "ps", " cores")), query


def test_every_alert_says_what_to_do():
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_every_alert_has_an_example_that_fires():
    examples = (PROMETHEUS / "alerts_test.yaml").read_text()
    for rule in RULES:
        assert rule["alert"] in examples


@pytest.mark.parametrize(
    "command",
    [
        (
            "check",
            "config",
            "--syntax-only",
            "prometheus.yaml",
        ),  # its files of tokens are elsewhere
        ("check", "rules", "alerts.yaml"),
        ("test", "rules", "alerts_test.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files(command: tuple[str, ...]):
    result = promtool(*command, folder=PROMETHEUS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_promtool_finds_a_mistake_in_a_rule(tmp_path: Path):
    (tmp_path / "alerts.yaml").write_text(ALERTS.replace("sum by (instance)", "sum by instance", 1))
    assert promtool("check", "rules", "alerts.yaml", folder=tmp_path).returncode != 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("min_over_time(lockstep_router_waiting", "max_over_time(lockstep_router_waiting"),
        ('reason="QUEUE_FULL"', 'reason=~".+"'),
        ("lockstep_router_group_lost == 1", "lockstep_router_group_ready == 0"),
        ('reason="EXECUTOR_FAILED"', 'reason!="STOP"'),
        ('reason="lost"}[30m]', "}[30m]"),
        ("lockstep_router_last_step_age_seconds > 60", "lockstep_router_last_step_age_seconds > 0"),
        ("rate(lockstep_router_preemptions_total[10m])) > 0.5", "lockstep_router_ready) > 0.5"),
        ("for: 30m", "for: 10m"),
        ("> 3\n", "> 0\n"),
    ],
)
def test_an_alert_that_is_too_eager_would_be_found(tmp_path: Path, right: str, wrong: str):
    """One that fires while nothing is wrong is soon not looked at any more."""
    assert right in ALERTS
    (tmp_path / "alerts.yaml").write_text(ALERTS.replace(right, wrong))
    (tmp_path / "alerts_test.yaml").write_text((PROMETHEUS / "alerts_test.yaml").read_text())
    assert promtool("check", "rules", "alerts.yaml", folder=tmp_path).returncode == 0
    assert promtool("test", "rules", "alerts_test.yaml", folder=tmp_path).returncode != 0


def promtool(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed; it comes with Prometheus (apt: prometheus)")
    return subprocess.run([program, *args], cwd=folder, capture_output=True, text=True, check=False)


def test_every_query_of_the_dashboard_is_one_that_prometheus_can_read(tmp_path: Path):
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\$__(rate_interval|range)", "5m", query)}
        for number, (_, query) in enumerate(dashboard_queries())
        if not query.startswith("label_values")
    ]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "g", "rules": rules}]}))
    result = promtool("check", "rules", "rules.yaml", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
