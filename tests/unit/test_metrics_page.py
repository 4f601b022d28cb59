"""The page that is scraped: everything of the catalogue once, and nothing else; and pages of several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from ooc.prometheus.catalogue import CATALOGUE, Metric
from ooc.prometheus.collector import families
from ooc.prometheus.figures import Figure
from ooc.prometheus.gather import Folder
from swapd.step_times import BUCKETS, Histogram, Step, StepTimes
from swapd.summary import external_fragmentation_bytes

ROOT = Path(__file__).resolve().parents[2]
SEVENS = Histogram((7,) * (len(BUCKETS) + 1), 0.5)


def made_up(metric: Metric, source: str) -> Figure:
    if metric.type == "info":
        return 'a "b"\\c\nd'
    return SEVENS if metric.type == "histogram" else 1.5


def all_figures() -> dict[str, Figure]:
    return {source: made_up(metric, source) for metric in CATALOGUE for source in metric.sources.values()}


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
Parser = Callable[[str], Iterable[Family]]


def samples(text: str, parse: Parser = text_string_to_metric_families) -> Samples:
    """As prometheus_client's parser reads them."""
    found: Samples = {}
    read = list(parse(text))
    assert len({family.name for family in read}) == len(read)
    for family in read:
        for sample in family.samples:
            labels = {**sample.labels, **({"le": str(float(sample.labels["le"]))} if "le" in sample.labels else {})}
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


class Made:
    """A collector of figures that are made up."""

    def __init__(self, figures: dict[str, Figure]) -> None:
        self.figures = figures

    def collect(self) -> Iterable[Family]:
        return families(self.figures)


def page(figures: dict[str, Figure]) -> str:
    return generate_latest(Made(figures)).decode()


@pytest.fixture(autouse=True)
def of_rank_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")


def expected_samples(metric: Metric) -> int:
    if metric.type == "histogram":
        return len(BUCKETS) + 1 + 2
    return 1 if metric.type == "info" else len(metric.sources)


def test_every_entry_is_exported_once_and_nothing_else_is() -> None:
    text = page(all_figures())
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
        times.add(Step(seconds, 0.0, False))
    found = samples(page({**all_figures(), "step_seconds": times.histogram}))
    at = {dict(labels)["le"]: value for (name, labels), value in found.items() if name == "ooc_step_seconds_bucket"}
    assert (at["0.001"], at["0.0025"], at["5.0"], at["10.0"], at["500.0"], at["inf"]) == (1, 2, 2, 3, 3, 4)
    assert found["ooc_step_seconds_count", (("rank", "3"),)] == 4
    assert found["ooc_step_seconds_sum", (("rank", "3"),)] == pytest.approx(1007.0021)
    assert (times.histogram.count, times.last) == (4, 1000.0)
    assert [step.seconds for step in times.kept] == [0.001, 0.0011, 7.0, 1000.0]


def test_what_is_not_known_yet_has_no_sample_but_a_type() -> None:
    text = page({**all_figures(), "predicted_step_seconds": None})
    assert "# TYPE ooc_predicted_step_seconds gauge\n" in text
    assert not [name for name, _ in samples(text) if name == "ooc_predicted_step_seconds"]


def test_a_figure_that_is_missing_is_no_silent_gap() -> None:
    figures = all_figures()
    del figures["budget_bytes"]
    with pytest.raises(KeyError):
        page(figures)


def test_prometheus_reads_the_same_from_openmetrics() -> None:
    """Which it asks for; the parser is as strict as the format."""
    text = generate_openmetrics(Made(all_figures())).decode()
    assert samples(text, openmetrics_families) == samples(page(all_figures()))
    units = {family.name: family.unit for family in openmetrics_families(text)}
    assert units["ooc_budget_bytes"] == "bytes" and units["ooc_swap_seconds"] == "seconds"


# The real figures, in a process of their own: so the catalogue's sources are figures that exist.
REAL = """
import json
from prometheus_client import CollectorRegistry, generate_latest
import ooc.numpy as ooc
import numpy as np
from ooc.prometheus.collector import Collector

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
running = generate_latest(registry).decode()
functions = device.summary()["functions"]
device.close()
ended = generate_latest(registry).decode()
print(json.dumps([before, running, ended, functions]))
"""


def test_a_registry_of_the_program_collects_before_during_and_after_a_session() -> None:
    answer = subprocess.run([sys.executable, "-c", REAL], cwd=ROOT, capture_output=True, text=True, check=True)
    before, running, ended, functions = json.loads(answer.stdout)
    assert samples(before) == {}  # no session yet
    assert samples(running)["ooc_swap_operations_total", (("direction", "in"), ("rank", "3"))] > 0
    assert running.count("# TYPE ") == len(CATALOGUE)
    assert samples(ended)["ooc_functions_total", (("rank", "3"),)] == functions > 40


# ---- Pages of several processes -------------------------------------------------------------------------------------


def write(folder: Path, name: str, text: str, age: float = 0.0) -> None:
    (folder / name).write_text(text)
    os.utime(folder / name, (os.path.getmtime(folder / name) - age,) * 2)


def merged(folder: Path, most_seconds: float = 100.0) -> Samples:
    registry = CollectorRegistry()
    registry.register(Folder(folder, most_seconds))
    return samples(generate_latest(registry).decode())


def page_of(rank: str, budget: float = 1.0) -> str:
    os.environ["RANK"] = rank  # the fixture undoes it
    return page({**all_figures(), "budget_bytes": budget})


def test_pages_of_several_processes_become_one(tmp_path: Path) -> None:
    assert merged(tmp_path) == {}
    write(tmp_path, "a.prom", page_of("0"))
    write(tmp_path, "b.prom", page_of("1", 2.0))
    both = {**samples(page_of("0")), **samples(page_of("1", 2.0))}
    assert merged(tmp_path) == both
    write(tmp_path, "others.prom", "# HELP other x\nother 1\n")
    write(tmp_path, "broken.prom", "ooc_plans_total garbage\n")
    assert merged(tmp_path) == both


def test_of_two_files_with_the_same_sample_the_newer_one_counts(tmp_path: Path) -> None:
    write(tmp_path, "a.prom", page_of("0", 5.0), age=20)
    write(tmp_path, "b.prom", page_of("0", 6.0), age=10)
    write(tmp_path, "c.prom", page_of("0", 7.0), age=30)
    assert merged(tmp_path) == samples(page_of("0", 6.0))


def test_files_of_processes_that_are_gone_are_left_out(tmp_path: Path) -> None:
    for rank, (name, age) in enumerate({"new.prom": 0, "old.prom": 500, "none.txt": 0, ".x.prom.1.0.tmp": 0}.items()):
        write(tmp_path, name, page_of(str(rank)), age)
    (tmp_path / "binary.prom").write_bytes(b"\xff\xfe")
    (tmp_path / "huge.prom").write_text(page_of("7") + "#" * (2 << 20))
    (tmp_path / "folder.prom").mkdir()
    (tmp_path / "dangling.prom").symlink_to(tmp_path / "absent")
    assert merged(tmp_path) == samples(page_of("0"))
    assert merged(tmp_path, 1000) == {**samples(page_of("0")), **samples(page_of("1"))}


def test_a_recount_that_disagrees_calls_the_whole_budget_lost() -> None:
    stats = {"budget_bytes": 1000, "chunk_bytes": 100, "chunks_lost": 2}
    assert external_fragmentation_bytes(stats, agrees=True) == 200
    assert external_fragmentation_bytes(stats, agrees=False) == 1000
