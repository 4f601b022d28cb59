"""The page that is scraped, against prometheus_client: everything of the catalogue once, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ooc.prometheus.catalogue import CATALOGUE, Metric
from ooc.prometheus.figures import Figure
from ooc.prometheus.gather import merged, recent_pages
from ooc.prometheus.page import Page, number
from swapd.step_times import BUCKETS, Histogram, StepTimes

ROOT = Path(__file__).resolve().parents[2]
SEVENS = Histogram((7,) * (len(BUCKETS) + 1), 0.5)


def made_up(metric: Metric, source: str) -> Figure:
    if metric.type == "info":
        return 'a "b"\\c\nd'
    return SEVENS if metric.type == "histogram" else 1.5


def all_figures() -> dict[str, Figure]:
    return {source: made_up(metric, source) for metric in CATALOGUE for source in metric.sources.values()}


def parsed(text: str) -> dict[str, Any]:
    """Families by name (without `_total`), as prometheus_client's parser reads them."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in parsed(text).values():
        for sample in family.samples:
            labels = {**sample.labels, **({"le": str(float(sample.labels["le"]))} if "le" in sample.labels else {})}
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def expected_samples(metric: Metric) -> int:
    if metric.type == "histogram":
        return len(BUCKETS) + 1 + 2
    return 1 if metric.type == "info" else len(metric.sources)


def test_every_entry_is_exported_once_and_nothing_else_is() -> None:
    text = Page(("3",)).text(all_figures())
    types = Counter(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    assert types == Counter(metric.name for metric in CATALOGUE)
    found = samples(text)
    assert len(found) == sum(map(expected_samples, CATALOGUE))
    assert all(dict(labels)["rank"] == "3" for _, labels in found)
    for metric in CATALOGUE:
        if metric.type in ("gauge", "counter"):
            for values in metric.sources:
                labels = {"rank": "3", **dict(zip(metric.labels, values))}
                assert found.pop((metric.name, tuple(sorted(labels.items())))) == 1.5
        elif metric.type == "info":
            labels = {"rank": "3", **dict.fromkeys(metric.labels, 'a "b"\\c\nd')}  # escaped, and read back
            assert found.pop((metric.name, tuple(sorted(labels.items())))) == 1
    assert {name.rpartition("_")[0] for name, _ in found} == {"ooc_step_seconds"}


def test_a_histogram_is_cumulative() -> None:
    times = StepTimes()
    for seconds in (0.001, 0.0011, 7.0, 1000.0):
        times.add(seconds)
    found = samples(Page(("0",)).text({**all_figures(), "step_seconds": times.histogram()}))
    at = {dict(labels)["le"]: value for (name, labels), value in found.items() if name == "ooc_step_seconds_bucket"}
    assert (at["0.001"], at["0.0025"], at["5.0"], at["10.0"], at["500.0"], at["inf"]) == (1, 2, 2, 3, 3, 4)
    assert found["ooc_step_seconds_count", (("rank", "0"),)] == 4
    assert found["ooc_step_seconds_sum", (("rank", "0"),)] == pytest.approx(1007.0021)
    assert (times.count, times.last, times.kept) == (4, 1000.0, [0.001, 0.0011, 7.0, 1000.0])


def test_what_is_not_known_yet_has_no_sample_but_a_type() -> None:
    text = Page(("0",)).text({**all_figures(), "predicted_step_seconds": None})
    assert "# TYPE ooc_predicted_step_seconds gauge\n" in text
    assert not [name for name, _ in samples(text) if name == "ooc_predicted_step_seconds"]


def test_a_figure_that_is_missing_is_no_silent_gap() -> None:
    figures = all_figures()
    del figures["budget_bytes"]
    with pytest.raises(KeyError):
        Page(("0",)).text(figures)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1 << 60, str(1 << 60)), (0.1, "0.1"), (1e-9, "1e-09"), (float("inf"), "+Inf"), (float("nan"), "NaN")],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text
    assert float(text) == value or value != value


# The real figures, by two encoders in one process; and the catalogue's sources are figures that exist.
TWO_ROUTES = """
import json, sys
from prometheus_client import CollectorRegistry, generate_latest
import ooc.numpy as ooc
import numpy as np
from ooc.prometheus.collector import Collector
from ooc.prometheus.exporting import current_session
from ooc.prometheus.figures import figures
from ooc.prometheus.page import Page

registry = CollectorRegistry()
registry.register(Collector())
before = generate_latest(registry).decode()
device = ooc.Device(budget="1MiB", chunk_size="64KiB", small_limit="4KiB", emulated_bandwidth="1GiB/s")
arrays = [device.zeros(1 << 15) for _ in range(8)]

@device.function(writes=("target",))
def increase(target):
    np.add(target, 1, out=target)

for _ in range(5):
    for array in arrays:
        increase(array)
    device.step()
device._core.settle()
running = generate_latest(registry).decode(), Page(("0",)).text(figures(current_session()))
functions = device.summary()["functions"]
device.close()
ended = generate_latest(registry).decode()
print(json.dumps([before, *running, ended, functions]))
"""


def test_prometheus_client_gives_the_same_samples_types_and_helps(tmp_path: Path) -> None:
    answer = subprocess.run([sys.executable, "-c", TWO_ROUTES], cwd=ROOT, capture_output=True, text=True, check=True)
    before, theirs, ours, ended, functions = json.loads(answer.stdout)
    assert samples(before) == {}  # no session yet
    assert samples(theirs) == samples(ours)
    assert samples(ours)["ooc_swap_operations_total", (("direction", "in"), ("rank", "0"))] > 0
    assert samples(ended)["ooc_functions_total", (("rank", "0"),)] == functions > 40
    one, other = parsed(theirs), parsed(ours)
    assert {name: (family.type, family.documentation) for name, family in one.items()} == {
        name: (family.type, family.documentation) for name, family in other.items()
    }
    assert len(other) == len(CATALOGUE)


def page_of(rank: str, value: float = 1.0) -> str:
    return Page((rank,)).text({**all_figures(), "budget_bytes": value})


def test_pages_of_several_processes_become_one() -> None:
    both = samples(merged([page_of("0"), page_of("1", 2.0), "# HELP other x\nother 1\nooc_plans_total garbage\n"]))
    assert both == {**samples(page_of("0")), **samples(page_of("1", 2.0))}
    assert samples(merged([page_of("0", 5.0), page_of("0", 6.0)])) == samples(page_of("0", 5.0))  # the first counts
    assert samples(merged([])) == {}


def test_files_of_processes_that_are_gone_are_left_out(tmp_path: Path) -> None:
    import os

    for age, name in ((0, "new.prom"), (50, "older.prom"), (500, "old.prom"), (0, "none.txt"), (0, ".x.prom.1.0.tmp")):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (os.path.getmtime(tmp_path / name) - age,) * 2)
    (tmp_path / "binary.prom").write_bytes(b"\xff\xfe")
    (tmp_path / "huge.prom").write_text("x" * (2 << 20))
    (tmp_path / "folder.prom").mkdir()
    (tmp_path / "dangling.prom").symlink_to(tmp_path / "absent")
    assert recent_pages(tmp_path, 100) == ["new.prom", "older.prom"]
