"""Alerts: each is shown firing and staying silent, has a section in the runbook, and says what it means."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import program

from swapd.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "grafana" / "rules"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
TESTS: list[dict[str, Any]] = yaml.safe_load((RULES / "alerts_test.yaml").read_text())["tests"]


def verdict(folder: Path) -> tuple[bool, str]:
    """Whether the alerts' tests in a folder pass, and what promtool says."""
    command = (program("promtool"), "test", "rules", str(folder / "alerts_test.yaml"))
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.returncode == 0, answer.stdout + answer.stderr


def test_promtool_passes_the_alerts_tests() -> None:
    passed, says = verdict(RULES)
    assert passed, says


def test_there_are_alerts() -> None:
    assert len(ALERTS) >= 15
    assert all(name.startswith("OutOfCore") for name in ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_is_tested_firing_and_staying_silent(name: str) -> None:
    """Silence counts only with the same series there: a misspelt one would be silent too."""
    firing, silent = {}, {}
    for test in TESTS:
        for case in test["alert_rule_test"]:
            if case["alertname"] == name:
                kind = firing if case["exp_alerts"] else silent
                kind[test["name"]] = {series["series"] for series in test["input_series"]}
    assert firing and silent
    fed = set.intersection(*firing.values())
    assert any(fed <= series for series in silent.values())


def test_no_test_is_of_an_alert_that_does_not_exist() -> None:
    assert {case["alertname"] for test in TESTS for case in test["alert_rule_test"]} == set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
@pytest.mark.medium
def test_an_alert_that_never_or_always_fires_fails_its_tests(name: str, tmp_path: Path) -> None:
    """Plants both mistakes into the rules, and sees promtool notice each."""
    for mistake in ("vector(1) < 0", "up or ooc_budget_bytes or rank:ooc_slowdown:ratio5m or vector(1)"):
        folder = tmp_path / ("never" if "<" in mistake else "always")
        shutil.copytree(RULES, folder)
        rules = yaml.safe_load((folder / "alerts.yaml").read_text())
        for group in rules["groups"]:
            group["rules"] = [rule for rule in group["rules"] if rule["alert"] == name]
            for rule in group["rules"]:
                rule["expr"] = mistake
        (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
        tests = yaml.safe_load((folder / "alerts_test.yaml").read_text())
        tests["tests"] = [test for test in tests["tests"] if test["alert_rule_test"][0]["alertname"] == name]
        (folder / "alerts_test.yaml").write_text(yaml.safe_dump(tests))
        passed, says = verdict(folder)
        assert not passed, f"{mistake} was not noticed:\n{says}"


@pytest.mark.parametrize("name", ALERTS)
def test_each_alert_says_what_it_is_and_names_its_section_of_the_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert "{{ $labels.instance }}" in alert["annotations"]["summary"]
    path, anchor = alert["annotations"]["runbook_url"].split("#")
    # As GitHub makes anchors of headings that are one word.
    anchors = [heading.lower() for heading in re.findall(r"^## (\w+)$", (ROOT / path).read_text(), re.MULTILINE)]
    assert anchors.count(anchor) == 1
    assert anchor == name.lower()


def test_the_runbook_has_no_section_of_an_alert_that_is_gone_and_no_dead_link() -> None:
    text = (ROOT / "docs" / "runbook.md").read_text()
    headings = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert headings == [heading for heading in headings if heading in ALERTS]
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= {heading.lower() for heading in headings}


def test_settings_in_the_runbook_exist() -> None:
    known = {setting.variable for setting in SETTINGS}
    named = set(re.findall(r"\bOOC_[A-Z_]+", (ROOT / "docs" / "runbook.md").read_text()))
    assert len(named) > 5 and named <= known
