"""The generated dashboards: up to date, of Grafana's types, only of metrics that exist; and the files around them."""

from __future__ import annotations

import copy
import posixpath
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import queries
import yaml
from live import program

from grafana.metrics import metric_of, names_in, rate, series, unit_of
from ooc.prometheus.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
STACK = ROOT / "grafana" / "stack"
DASHBOARDS = queries.load()
ASKED = [one for name, dashboard in DASHBOARDS.items() for one in queries.asked(name, dashboard)]
RULES = {
    path: yaml.safe_load((ROOT / "grafana" / "rules" / path).read_text()) for path in ("recording.yaml", "alerts.yaml")
}
RECORDED = {rule["record"] for group in RULES["recording.yaml"]["groups"] for rule in group["rules"]}

Json = dict[str, Any]
needs_sdk = pytest.mark.skipif(sys.version_info < (3, 11), reason="the Grafana Foundation SDK needs Python 3.11")


def test_there_are_the_dashboards_that_were_promised() -> None:
    assert set(DASHBOARDS) == {"overview", "memory", "transfers", "planner", "fleet"}
    assert len(ASKED) > 80


@needs_sdk
def test_the_committed_files_are_what_would_be_made() -> None:
    from grafana.__main__ import DASHBOARDS, GENERATED

    assert {path.name: path.read_text(encoding="utf-8") for path in GENERATED.glob("*.json")} == DASHBOARDS


# Types.


@needs_sdk
@pytest.mark.parametrize("name", DASHBOARDS)
def test_the_dashboards_are_of_grafanas_types(name: str) -> None:
    from grafana_types import misfits

    assert misfits(DASHBOARDS[name]) == []


def first(dashboard: Json, kind: str) -> Json:
    return next(panel for panel, _ in queries.panels(dashboard) if panel["type"] == kind)


WRONG: dict[str, Callable[[Json], Any]] = {
    "a field that no dashboard has": lambda d: d.update(refreshh="10s"),
    "a panel without its type": lambda d: first(d, "stat").pop("type"),
    "a panel that does not exist": lambda d: first(d, "stat").update(type="state"),
    "a misspelt option": lambda d: first(d, "stat")["options"].update(colourMode="value"),
    "an option of another panel": lambda d: first(d, "bargauge")["options"].update(graphMode="area"),
    "a word that is none of an option's": lambda d: first(d, "stat")["options"].update(graphMode="arena"),
    "a deep option": lambda d: first(d, "timeseries")["options"]["legend"].update(displayMode="lists"),
    "a misspelt way to draw": lambda d: first(d, "timeseries")["fieldConfig"]["defaults"]["custom"].update(lineWith=1),
    "a text for a number": lambda d: first(d, "timeseries")["fieldConfig"]["defaults"].update(min="0"),
    "a query without a letter": lambda d: first(d, "timeseries")["targets"][0].pop("refId"),
    "a query without an expression": lambda d: first(d, "timeseries")["targets"][0].pop("expr"),
    "a variable's refresh that is no number of the list": lambda d: d["templating"]["list"][1].update(refresh=7),
    "a threshold without a colour": lambda d: first(d, "stat")["fieldConfig"]["defaults"]["thresholds"]["steps"][0].pop(
        "color"
    ),
    "an override of what does not exist": lambda d: first(d, "timeseries")["fieldConfig"]["overrides"][0][
        "properties"
    ].append({"id": "custom.fillOpaqueness", "value": 3}),
}


@needs_sdk
@pytest.mark.parametrize("what", WRONG)
def test_each_planted_mistake_is_noticed(what: str) -> None:
    from grafana_types import misfits

    dashboard = copy.deepcopy(DASHBOARDS["overview"])
    WRONG[what](dashboard)
    assert misfits(dashboard)


@needs_sdk
def test_a_property_of_an_override_is_a_field_setting() -> None:
    from grafana_types import nested

    assert nested("custom.lineStyle", {"fill": "dash"}) == {"custom": {"lineStyle": {"fill": "dash"}}}
    assert nested("unit", "s") == {"unit": "s"}


# Queries.


def test_every_metric_in_a_query_is_in_the_catalogue_or_dcgms() -> None:
    for one in ASKED:
        dcgm = re.findall(r"\bDCGM_FI_\w+", one.expr)
        names = names_in(one.expr)
        assert names or dcgm or "ALERTS" in one.expr, one.name
        for name in names:
            metric_of(name)
        assert not dcgm or (one.collapsed and one.dashboard == "fleet"), (
            f"{one.name}: only the GPU row, closed at first"
        )


def test_every_metric_of_the_catalogue_is_shown_or_left_out_on_purpose() -> None:
    shown = {metric_of(name).name for one in ASKED for name in names_in(one.expr)}
    left_out = {
        "ooc_build_info",  # for looking up, not for looking at
        "ooc_device_capacity_bytes", "ooc_chunk_size_bytes",  # constants; the budget is what limits
    }  # fmt: skip
    assert {metric.name for metric in CATALOGUE} - shown == left_out


def test_every_query_is_of_what_was_chosen() -> None:
    for one in ASKED:
        if "DCGM" in one.expr:
            continue
        selectors = re.findall(r"(?:ooc_\w+|ALERTS)\{([^}]*)\}", one.expr)
        assert selectors, one.name
        for selector in selectors:
            assert 'job=~"$job",instance=~"$instance",rank=~"$rank"' in selector, one.name


def test_every_panel_says_what_it_is_and_has_an_id_of_its_own() -> None:
    for name, dashboard in DASHBOARDS.items():
        ids = [panel["id"] for panel in dashboard["panels"]]
        ids += [inner["id"] for panel in dashboard["panels"] for inner in panel.get("panels", [])]
        assert len(ids) == len(set(ids)), name
        for panel, _ in queries.panels(dashboard):
            if panel["type"] == "text":
                continue
            described = {metric_of(series).name for one in panel["targets"] for series in names_in(one["expr"])}
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            for metric in CATALOGUE:
                assert (metric.name in described) == (f"`{metric.name}`: {metric.help}" in panel["description"]), panel[
                    "title"
                ]


def test_panels_do_not_overlap() -> None:
    for name, dashboard in DASHBOARDS.items():
        taken: dict[tuple[int, int], str] = {}
        for panel in dashboard["panels"]:
            place = panel["gridPos"]
            assert place["x"] + place["w"] <= 24, f"{name}: {panel['title']}"
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    other = taken.setdefault((x, y), panel["title"])
                    assert other is panel["title"], f"{name}: {panel['title']} and {other}"


def test_selectors_refuse_what_the_catalogue_does_not_have() -> None:
    assert (
        series("ooc_chunks", state="free") == 'ooc_chunks{job=~"$job",instance=~"$instance",rank=~"$rank",state="free"}'
    )
    assert rate("ooc_step_seconds_sum").startswith("rate(ooc_step_seconds_sum{")
    for name in ("ooc_chunk", "ooc_step_seconds", "ooc_chunks_sum"):
        with pytest.raises(KeyError):
            series(name)
    with pytest.raises(ValueError, match="no label"):
        series("ooc_chunks", stat="free")
    with pytest.raises(ValueError, match="never"):
        series("ooc_chunks", state="fre")
    with pytest.raises(ValueError, match="no counter"):
        rate("ooc_chunks")
    assert unit_of(series("ooc_budget_bytes")) == "bytes"
    assert unit_of(rate("ooc_swap_bytes_total")) == "binBps"
    assert unit_of(rate("ooc_step_seconds_sum")) == "percentunit"
    assert unit_of(rate("ooc_step_seconds_count")) == "ops"
    with pytest.raises(ValueError, match="no one unit"):
        unit_of(series("ooc_budget_bytes") + series("ooc_last_step_seconds"))


def test_variables_are_filled_in_as_grafana_does() -> None:
    choices: dict[str, list[str]] = {"job": [], "instance": ["127.0.0.1:9"], "rank": ["0", "1"]}
    expr = (
        'label_replace(rate(x{job=~"$job",instance=~"$instance",rank=~"$rank"}[$__rate_interval]),"h","$1","i","(.*)")'
    )
    assert queries.filled(expr, 5, 15, choices) == (
        'label_replace(rate(x{job=~".*",instance=~"127\\\\.0\\\\.0\\\\.1:9",rank=~"(0|1)"}[20000ms]),"h","$1","i","(.*)")'
    )
    assert queries.rate_interval(5, 60) == 65
    with pytest.raises(ValueError, match="no value for"):
        queries.filled("x{$other}", 1, 1, choices)


# Rules and the files around them.


@pytest.mark.parametrize("path", RULES)
def test_rules_are_of_metrics_that_exist(path: str) -> None:
    for group in RULES[path]["groups"]:
        for rule in group["rules"]:
            for name in names_in(rule["expr"]):
                metric_of(name)
            for recorded in re.findall(r"[a-z]+:\w+:\w+", rule["expr"]):
                assert recorded in RECORDED


def test_the_stacks_folders_are_there_and_nothing_listens_to_the_world() -> None:
    compose = yaml.safe_load((STACK / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+", service["image"]), f"{name}: a pinned image"
        assert service["network_mode"] == "host" and "ports" not in service
        for mount in service["volumes"]:
            source, _, options = mount.split(":", 2) if mount.count(":") == 2 else (*mount.split(":"), "")
            if source.startswith("."):
                assert (STACK / source).exists(), f"{name} mounts {source}, which is not there"
                assert options == "ro"
            else:
                assert source in compose["volumes"]
    assert "--web.listen-address=127.0.0.1:9090" in compose["services"]["prometheus"]["command"]
    settings = compose["services"]["grafana"]["environment"]
    assert settings["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    # Compose stops with these words where the variable is empty or not set: no password in the file, and no default.
    assert re.fullmatch(r"\$\{GRAFANA_PASSWORD:\?.+\}", settings["GF_SECURITY_ADMIN_PASSWORD"])
    assert settings["GF_AUTH_ANONYMOUS_ENABLED"] == "false"


def test_mounts_provisioning_and_configuration_agree() -> None:
    compose = yaml.safe_load((STACK / "compose.yaml").read_text())
    grafana, server = compose["services"]["grafana"], compose["services"]["prometheus"]
    inside = {mount.split(":")[1]: mount.split(":")[0] for mount in grafana["volumes"] + server["volumes"]}
    provider = yaml.safe_load((STACK / "provisioning/dashboards/out-of-core.yaml").read_text())["providers"][0]
    assert inside[provider["options"]["path"]] == "../generated"
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"] and home.stem in DASHBOARDS
    source = yaml.safe_load((STACK / "provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]
    config = yaml.safe_load((STACK / "prometheus.yml").read_text())
    assert source["url"] == "http://127.0.0.1:9090" and source["isDefault"]
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    started_with = next(word for word in server["command"] if word.startswith("--config.file="))
    config_path = started_with.split("=")[1]
    assert inside[config_path] == "./prometheus.yml"
    for rules in config["rule_files"]:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(config_path), rules))
        assert inside[posixpath.dirname(place)] == "../rules" and (STACK / rules).exists()
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    scrape_alert = next(rule for rule in RULES["alerts.yaml"]["groups"][0]["rules"] if "up{" in rule["expr"])
    assert re.search(r'job="([\w-]+)"', scrape_alert["expr"])[1] in jobs  # type: ignore[index]


def test_promtool_accepts_rules_and_configuration(tmp_path: Path) -> None:
    def accepted(*command: str) -> bool:
        answer = subprocess.run((program("promtool"), "check", *command), capture_output=True, text=True, check=False)
        return answer.returncode == 0

    rules = [str(ROOT / "grafana" / "rules" / path) for path in RULES]
    assert accepted("rules", "--lint=all", "--lint-fatal", *rules)
    assert accepted("config", str(STACK / "prometheus.yml"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(Path(rules[0]).read_text().replace("clamp_max(", "clamp_most(", 1))
    assert not accepted("rules", str(wrong))
    wrong.write_text((STACK / "prometheus.yml").read_text().replace("scrape_interval", "scrape_intervall", 1))
    assert not accepted("config", str(wrong))
