"""docs/cookbook.md: its blocks are taken from the page and run as it says; the bits are those without the allocator."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from metrics_programs import free_ports, samples, value
from processes import EMULATED, ROOT, TIMEOUT_SECONDS, Nursery, environment, load_compare, read_summary
from safetensors.torch import load_file

from benchmarks.disk.groups import MemoryGroup, NoGroup
from benchmarks.disk.undo import Undo

PAGE = ROOT / "docs" / "cookbook.md"
SETTINGS = {name: text for name, text in EMULATED.items() if name != "OOC_ALLOC"}  # the page says that
COMMAND = re.compile(r"((?:\w+=\S+ )*)python (\w+\.py.*?)( &)?")
compare = load_compare().compare


class Block(NamedTuple):
    language: str
    name: str  # of a file; empty for what is typed
    text: str


def recipes() -> dict[str, list[Block]]:
    """The page's blocks, by the titles of its recipes."""
    found: dict[str, list[Block]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        found[section.splitlines()[0].partition(". ")[2]] = [Block(*block) for block in blocks]
    return found


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
    yield started
    started.close()


def write(title: str, folder: Path) -> str:
    """Writes the recipe's files, and returns what it types."""
    folder.mkdir()
    for block in recipes()[title]:
        if block.name != "notebook" and block.name:
            (folder / block.name).write_text(block.text, encoding="utf-8")
    return "".join(block.text for block in recipes()[title] if block.language == "sh")


def type_in_shell(folder: Path, text: str, **variables: str) -> str:
    """Runs what the page types in a shell of its own; returns its output. Nothing that it started outlives this."""
    settings = environment({**SETTINGS, **variables})
    settings["PATH"] = f"{Path(sys.executable).parent}:{settings['PATH']}"
    command = ["bash", "-eu", "-o", "pipefail", "-c", text]
    pipe = subprocess.PIPE
    running = subprocess.Popen(
        command, cwd=folder, env=settings, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = running.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    assert running.returncode == 0, output[-6000:]
    return output


def type_in_nursery(nursery: Nursery, folder: Path, text: str, **variables: str) -> None:
    """The same for lines that only make folders and start programs, without the time that imports take."""
    with ThreadPoolExecutor() as beside:
        waiting = []
        for line in text.splitlines():
            if line.startswith("mkdir "):
                (folder / line.removeprefix("mkdir ")).mkdir()
            elif line != "wait":
                match = COMMAND.fullmatch(line)
                assert match is not None, f"the nursery cannot type {line!r}"
                assigned = dict(word.split("=", 1) for word in match[1].split())
                program, *arguments = shlex.split(match[2])
                command = [folder / program, *arguments]
                started = beside.submit(
                    nursery.run, command, {**SETTINGS, **variables, **assigned}, TIMEOUT_SECONDS, folder
                )
                waiting.append(started) if match[3] else started.result().check()
        for started in waiting:
            started.result().check()


def loaded(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=path.suffix == ".pt")


def check_identical(folders: tuple[Path, Path], *names: str) -> None:
    for name in names:
        first, second = (loaded(folder / name) for folder in folders)
        if name.endswith(".ckpt"):
            first, second = ({key: each[key] for key in ("state_dict", "optimizer_states")} for each in (first, second))
        report = compare(first, second)
        assert report["identical"] and report["tensors"] > 0, (name, report["differences"])


def check_budget(path: Path, times: float = 2.5) -> dict[str, Any]:
    figures = read_summary(path)
    assert figures is not None and figures["final"]
    assert 0 < figures["device_peak_bytes"] <= figures["budget_bytes"] < figures["live_peak_bytes"] / times
    assert figures["swap_in_bytes"] > 0
    return figures


class Both:
    """A recipe typed twice: with the page's settings, and with the allocator off."""

    def __init__(self, title: str, folder: Path, nursery: Nursery | None = None, **variables: str) -> None:
        self.folders = folder / "plain", folder / "ours"
        for where, on in zip(self.folders, ("0", "1")):
            typed = write(title, where)
            assert "OOC_ALLOC=1" in typed
            typed = typed.replace("OOC_ALLOC=1", f"OOC_ALLOC={on}")
            if nursery is None:
                self.output = type_in_shell(where, typed, **variables)
            else:
                type_in_nursery(nursery, where, typed, **variables)
        self.ours = self.folders[1]


def test_the_page_has_ten_recipes_and_a_test_for_each() -> None:
    page, tests = PAGE.read_text(encoding="utf-8"), Path(__file__).read_text(encoding="utf-8")
    assert len(recipes()) == 10 and all(recipes().values())
    for number, title in enumerate(recipes(), start=1):
        link = f"{number}-{re.sub(r'[^a-z0-9 -]', '', title.lower()).replace(' ', '-')}"
        assert f"\n{number}. [{title}](#{link})\n" in page
        assert f'"{title}"' in tests


@pytest.mark.slow
def test_trainer(tmp_path: Path, nursery: Nursery) -> None:
    both = Both("Hugging Face's Trainer", tmp_path, nursery, OOC_SUMMARY=str(tmp_path / "summary.json"))
    check_identical(both.folders, "trained/model.safetensors", "out/checkpoint-6/model.safetensors")
    check_identical(both.folders, "out/checkpoint-6/optimizer.pt")
    check_budget(tmp_path / "summary.json")
    assert "<svg" in (both.ours / "out" / "ooc_report.html").read_text()
    assert "ooc_swap_in_bytes" in (both.ours / "out" / "checkpoint-6" / "trainer_state.json").read_text()


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    both = Both("Lightning", tmp_path, OOC_SUMMARY=str(tmp_path / "summary.json"))
    check_identical(both.folders, "trained.ckpt")
    check_budget(tmp_path / "summary.json")
    logs = both.ours / "lightning_logs" / "version_0"
    assert "<svg" in (logs / "ooc_report.html").read_text()
    assert "ooc_swap_in_bytes" in (logs / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.slow
def test_accelerate(tmp_path: Path) -> None:
    both = Both("accelerate", tmp_path)
    check_identical(both.folders, "trained/model.safetensors", "trained/optimizer.bin")
    assert check_budget(both.ours / "summary.json")["steps"] == 12
    assert both.output.count("'ooc_swap_in_bytes': ") == 24


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    both = Both("torchrun", tmp_path)
    for rank in range(2):
        check_identical(both.folders, f"trained.{rank}.pt")
        check_budget(both.ours / f"summary.rank{rank}.json")


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    both = Both("torch.compile", tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
    check_identical(both.folders, "trained.pt")
    assert check_budget(both.ours / "summary.json")["planned_iteration_count"] > 0


@pytest.mark.medium
def test_inference(tmp_path: Path, nursery: Nursery) -> None:
    both = Both("Inference beyond memory", tmp_path, nursery)
    check_identical(both.folders, "logits.pt", "model/model.safetensors")
    assert check_budget(both.ours / "summary.json")["disk_written_bytes"] > 0
    assert list((both.ours / "scratch").iterdir()) == []


@pytest.mark.slow
def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of Jupyter's, and without the first cell's words to the allocator."""
    nbclient = pytest.importorskip("nbclient")
    from nbformat.v4 import new_code_cell, new_notebook

    for name, text in environment(SETTINGS).items():
        monkeypatch.setenv(name, text)
    cells = [block.text for block in recipes()["Notebooks"]]
    keep = "torch.save(model.state_dict(), {!r})"
    shown = []
    for name, sources in (("plain.pt", cells[1:2]), ("ours.pt", cells)):
        notebook = new_notebook(cells=[new_code_cell(text) for text in [*sources, keep.format(str(tmp_path / name))]])
        nbclient.NotebookClient(notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3").execute()
        shown.append([output["data"]["text/plain"] for cell in notebook.cells for output in cell.outputs])
    (loss,), (loss_of_ours, figures) = shown
    assert loss == loss_of_ours
    assert compare(*(torch.load(tmp_path / name) for name in ("plain.pt", "ours.pt")))["identical"]
    found = eval(figures, {"__builtins__": {}})
    assert found["device_peak_bytes"] <= found["budget_bytes"] == 9 << 20 < found["live_peak_bytes"] / 2.5


@pytest.mark.slow
def test_kubernetes(tmp_path: Path) -> None:
    """The container of the page's pod, in a control group that has the pod's limit."""
    assert write("Kubernetes limits", tmp_path / "pod") == ""
    pod = yaml.safe_load((tmp_path / "pod" / "pod.yaml").read_text())["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    limit = {"1Gi": 1 << 30}[container["resources"]["limits"]["memory"]]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    (mount,) = container["volumeMounts"]
    assert mount["mountPath"] == variables["OOC_DISK"]
    variables["OOC_DISK"] = str(tmp_path / "volume")
    (tmp_path / "volume").mkdir()
    undo = Undo(tmp_path / "undo")
    with undo.part():
        try:
            group = MemoryGroup(undo)
            group.limit(limit)
        except (NoGroup, OSError) as error:
            pytest.skip(f"no control group can be made here: {error}")
        output = type_in_shell(tmp_path / "pod", shlex.join(group.joining(container["command"])), **variables)
        assert not group.killed() and group.peak_bytes() <= limit
    assert "all there" in output
    figures = check_budget(tmp_path / "pod" / "summary.json", 1)
    assert figures["live_peak_bytes"] > limit and figures["budget_bytes"] < 0.3 * limit
    assert figures["peak_rss_bytes"] < limit


@pytest.mark.medium
def test_prometheus(tmp_path: Path) -> None:
    if not shutil.which("curl"):
        pytest.skip("there is no curl")
    port = free_ports(1)
    output = type_in_shell(tmp_path / "work", write("Prometheus", tmp_path / "work"), PORT=str(port))
    assert "ooc_budget_bytes{" in output
    for name in ("scraped.txt", "ooc.prom"):
        found = samples((tmp_path / "work" / name).read_text())
        assert value(found, "budget_bytes") == 9 << 20
    assert value(found, "device_peak_bytes") <= 9 << 20 and value(found, "step_seconds_count") == 100
    (scrape,) = yaml.safe_load((tmp_path / "work" / "prometheus.yaml").read_text())["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": ["127.0.0.1:9835"]}]


@pytest.mark.medium
def test_two_jobs(tmp_path: Path, nursery: Nursery) -> None:
    both = Both("A GPU shared by two jobs", tmp_path, nursery, OOC_EMULATED_MEMORY="20MiB")
    check_identical(both.folders, "job.1.pt", "job.2.pt")
    figures = [check_budget(both.ours / f"{name}.json") for name in ("first", "second")]
    assert sum(each["device_peak_bytes"] for each in figures) <= 20 << 20
