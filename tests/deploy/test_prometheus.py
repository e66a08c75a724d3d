"""Prometheus's files: its own tool checks them, each alert fires in its case, and no metric is named that is not."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from actors.router.decisions import DecisionLog
from app.fleet.figures import all_metrics
from app.ingress.metrics import INGRESS, Metric

ROOT = Path(__file__).parents[2]
FILES = ROOT / "deploy" / "prometheus"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian, Ubuntu: apt-get install prometheus)",
)


def promtool(*words: str) -> None:
    done = subprocess.run(
        ["promtool", *words], cwd=FILES, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def rules(file: str) -> list[dict[str, str]]:
    groups = yaml.safe_load((FILES / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = [rule["alert"] for rule in rules("alerts.yml")]
RECORDED = [rule["record"] for rule in rules("rules.yml")]


@needs_promtool
def test_the_files_are_prometheus_s_own() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "rules.yml", "alerts.yml")


@needs_promtool
def test_each_alert_fires_in_its_case_and_no_other() -> None:
    promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_engines_are_counted_by_role_duty_and_state() -> None:
    promtool("test", "rules", "rules_test.yml")


def test_each_alert_has_a_case_and_a_line_in_the_runbook() -> None:
    cases = yaml.safe_load((FILES / "alerts_test.yml").read_text())["tests"]
    fired = {
        label
        for case in cases
        for test in case["promql_expr_test"]
        for sample in test["exp_samples"]
        for label in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert fired == set(ALERTS)
    runbook = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in ALERTS if f"| `{name}` |" not in runbook] == []


def test_decisions_of_which_an_alert_wants_the_growth_are_counted_from_0() -> None:
    asked = {name for rule in rules("alerts.yml") for name in re.findall(r'decision="(\w+)"', rule["expr"])}
    assert DecisionLog().totals == dict.fromkeys(asked, 0)
    assert asked == {"reject_queue_full"}


def exported() -> dict[str, Metric]:
    """Every series' name that an ingress may export, with its metric."""
    listed = [*INGRESS, *(metric for metrics in all_metrics().values() for metric in metrics)]
    found = {}
    for metric in listed:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        found |= {f"{metric.name}{end}": metric for end in ends}
    return found


def unknown(expression: str) -> list[str]:
    """Names in a query that nothing exports or records, and labels that their metric has not."""
    known, wrong = exported(), []
    for name, matchers in re.findall(r"\b(sluice_\w+)(?:\{([^}]*)\})?", expression):
        if name not in known:
            wrong.append(name)
            continue
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) - {"job", "le", "instance"}
        wrong += [f"{name}{{{label}}}" for label in labels - set(known[name].labels)]
    return wrong + [name for name in re.findall(r"\bsluice:[\w:]+", expression) if name not in RECORDED]


@pytest.mark.parametrize(
    "rule",
    [*rules("rules.yml"), *rules("alerts.yml")],
    ids=lambda rule: rule.get("record") or rule["alert"],
)
def test_rules_name_what_there_is(rule: dict[str, str]) -> None:
    assert unknown(rule["expr"]) == []
