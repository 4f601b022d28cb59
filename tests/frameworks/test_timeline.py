"""The timeline of real programs: it says what the summary says, names places in the program, and changes no bits."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import code, run_source

from swapd.observing.perfetto import IN, MEASURED, OUT, SIMULATED, STALLS
from swapd.trace.trace import Trace

TRAIN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        hidden = torch.relu(self.up(x))  # here
        return x + self.down(hidden)

def main(steps=8):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(256) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        x = torch.randn(512, 256)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.double().sum().item() for p in model.parameters())

"""


def spans(timeline: dict[str, Any], row: int | None = None, pid: int = MEASURED) -> list[dict[str, Any]]:
    return [e for e in timeline["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and row in (None, e["tid"])]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a run can write."""
    folder = tmp_path_factory.mktemp("ran")
    source = code(TRAIN, "print(main().hex())")
    files = {name: str(folder / file) for name, file in (("OOC_TIMELINE", "t.json"), ("OOC_REPORT", "r.html"))}
    # The link is slow enough that functions wait on any machine, so that there are waits to tell the places of.
    settings = {"OOC_BUDGET": "8MiB", "OOC_EMULATED_BANDWIDTH": "100MiB/s", "OOC_TRACE": str(folder / "a.trace")}
    ended = run_source(folder, source, **settings, **files).check()
    (folder / "printed").write_text(ended.output)
    return folder


def loaded(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return json.loads((folder / "t.json").read_text()), json.loads((folder / "summary.json").read_text())


def test_its_bytes_and_seconds_are_those_of_the_summary(ran: Path) -> None:
    timeline, summary = loaded(ran)
    assert timeline["otherData"]["lost_events"] == 0
    assert sum(e["args"]["bytes"] for e in spans(timeline, OUT)) == summary["swap_out_bytes"] > 0
    assert sum(e["args"]["bytes"] for e in spans(timeline, IN)) == summary["swap_in_bytes"] > 0
    assert sum(e["dur"] for e in spans(timeline, STALLS)) == pytest.approx(1e6 * summary["stall_seconds"], abs=1)
    assert sum(e["dur"] for e in spans(timeline, IN)) == pytest.approx(1e6 * summary["copy_in_seconds"], abs=1)
    functions = [e for e in spans(timeline) if e["tid"] >= 100]
    assert len(functions) == summary["functions"]
    iterations = [e for e in spans(timeline) if e["name"].startswith("iteration ")]
    assert len(iterations) == summary["steps"]
    lasted = [e["dur"] / 1e6 for e in iterations]  # the first began before anybody could watch
    assert lasted[1:] == pytest.approx(summary["step_seconds"][1:], abs=2e-6)
    assert 0 < lasted[0] <= summary["step_seconds"][0]
    assert sum(e["args"]["planned"] for e in iterations) == summary["planned_iteration_count"] > 0


def test_memory_never_exceeds_the_budget(ran: Path) -> None:
    timeline, summary = loaded(ran)
    used = [e["args"]["bytes"] for e in timeline["traceEvents"] if e["name"] == "used bytes"]
    live = [e["args"]["bytes"] for e in timeline["traceEvents"] if e["name"] == "live bytes"]
    assert 0 < max(used) <= summary["budget_bytes"]
    assert max(live) <= summary["live_peak_bytes"]
    assert max(live) > summary["budget_bytes"]


def test_what_was_predicted_lies_beside_an_iteration_like_it(ran: Path) -> None:
    timeline, _ = loaded(ran)
    predicted = spans(timeline, 1, SIMULATED)
    shown = [e for e in spans(timeline) if e["name"].startswith("iteration ") and e["args"]["planned"]][-1]
    assert len(predicted) == shown["args"]["functions"]
    assert min(e["ts"] for e in predicted) >= shown["ts"]
    inside = [e for e in spans(timeline) if e["tid"] >= 100 and shown["ts"] <= e["ts"] < shown["ts"] + shown["dur"]]
    assert [e["name"] for e in inside if e["args"]["function"] >= 0] == [e["name"] for e in predicted]


def test_places_are_lines_of_the_program(ran: Path) -> None:
    trace = Trace.load(ran / "a.trace")
    lines = (ran / "script.py").read_text().splitlines()
    here = next(n for n, line in enumerate(lines, 1) if line.endswith("# here"))
    constructor = next(n for n, line in enumerate(lines, 1) if "self.up, self.down =" in line)
    x = next(n for n, line in enumerate(lines, 1) if "torch.randn" in line)
    places = [trace.place(v) for v in range(trace.variables)]
    by_line = {
        line: sum(f"script.py:{line} in" in p and not p.startswith("autograd") for p in places)
        for line in (here, constructor, x)
    }
    assert by_line[here] >= 6  # what the activation makes, at least, in each of six blocks
    assert by_line[constructor] == 12  # the weights, which were there before the iteration
    assert by_line[x] in (1, 2)  # this iteration's, and the last one's where that was there when it began
    assert sum(p.startswith("autograd of ") and f":{here} in forward" in p for p in places) >= 6
    assert not any("site-packages" in p for p in places)
    assert all(places)


def test_the_page_says_what_happened_and_where(ran: Path) -> None:
    text = (ran / "r.html").read_text()
    html.parser.HTMLParser().feed(text)
    for words in ("What to change", "measured, and as it was predicted", "script.py", "emulated"):
        assert words in text
    assert re.search(r"script\.py:\d+ in forward", text)
    assert not re.search(r"https?://|<script|<img|@import", text)


def test_the_bits_are_the_same_and_nothing_is_written_without_the_settings(ran: Path, tmp_path: Path) -> None:
    ended = run_source(tmp_path, code(TRAIN, "print(main().hex())"), OOC_BUDGET="8MiB").check()
    assert ended.output == (ran / "printed").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py", "summary.json"]


def test_it_is_there_on_demand_and_ends_with_disable(tmp_path: Path) -> None:
    source = code(
        TRAIN,
        """
        import ooc
        from ooc_alloc import OocError

        try:
            ooc.timeline("never.json")
        except OocError as error:
            print(error)
        ooc.timeline_start(1000)
        main(3)
        ooc.timeline("first.json")
        main(3)
        trace = ooc.pytorch._active().observer.main_trace()
        print(sum("script.py" in trace.place(v) for v in range(trace.variables)), "of", trace.variables, "placed")
        ooc.timeline("second.json.gz")
        ooc.report("page.html")
        try:
            ooc.memory_snapshot("never.pickle")
        except OocError as error:
            print(error)
        ooc.disable()
        try:
            ooc.timeline("third.json")
        except OocError as error:
            print(error)
        """,
    )
    ended = run_source(tmp_path, f"import os; os.chdir({str(tmp_path)!r})\n" + code(source), OOC_BUDGET="8MiB").check()
    assert "the timeline is off: set OOC_TIMELINE" in ended.output
    assert "the allocator is off" in ended.output
    assert "PyTorch's memory snapshots are of CUDA devices" in ended.output
    placed = re.search(r"(\d+) of (\d+) placed", ended.output)
    assert placed is not None
    assert 0 < int(placed[2]) - 3 <= int(placed[1])  # looked for from the start of the timeline on
    assert not (tmp_path / "never.json").exists()
    first = json.loads((tmp_path / "first.json").read_text())["otherData"]
    assert first["events"] == 1024  # rounded up
    assert first["lost_events"] > 0
    assert (tmp_path / "second.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert "<h2>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGTERM)", "raise SystemExit(3)"])
def test_files_are_written_however_the_program_ends(tmp_path: Path, end: str) -> None:
    files = {"OOC_TIMELINE": str(tmp_path / "t.json"), "OOC_REPORT": str(tmp_path / "r.html")}
    source = code(TRAIN, "import os, signal", "main(4)", end)
    run_source(tmp_path, source, OOC_BUDGET="8MiB", **files)
    timeline, summary = loaded(tmp_path)
    assert sum(e["args"]["bytes"] for e in spans(timeline, OUT)) == summary["swap_out_bytes"]
    assert "What happened" in (tmp_path / "r.html").read_text()


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no" / "such" / "t.json")
    ended = run_source(tmp_path, code(TRAIN, "main(2)"), OOC_BUDGET="8MiB", OOC_TIMELINE=nowhere).check()
    assert f"cannot write {nowhere}" in ended.errors


def test_a_forked_child_leaves_the_files_to_its_parent(tmp_path: Path) -> None:
    source = code(
        TRAIN,
        """
        import os
        main(3)
        child = os.fork()
        if child == 0:
            main(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not os.path.exists(os.environ["OOC_TIMELINE"])
        main(1)
        """,
    )
    run_source(tmp_path, source, OOC_BUDGET="8MiB", OOC_TIMELINE=str(tmp_path / "t.json")).check()
    timeline, summary = loaded(tmp_path)
    assert len([e for e in spans(timeline) if e["tid"] >= 100]) == summary["functions"]


# ---- NVTX -----------------------------------------------------------------------------------------------------------

STAND_IN = r"""
#include <stdio.h>
#include <stdlib.h>
static __thread int depth;
static void note(const char* what, const char* name) {
  FILE* file = fopen(getenv("OOC_TEST_NVTX"), "a");
  fprintf(file, "%s %d %s\n", what, depth, name);
  fclose(file);
}
int nvtxRangePushA(const char* name) { note("push", name); return depth++; }
int nvtxRangePop(void) { if (depth > 0) --depth; note("pop", "-"); return depth; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with NVTX's two calls that writes down what it is called with."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    assert compiler is not None, "the adapter needs a compiler too"
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "n.c").write_text(STAND_IN)
    command = [compiler, "-shared", "-fPIC", "-o", folder / "libn.so", folder / "n.c"]
    subprocess.run(command, check=True)
    return folder / "libn.so"


def test_functions_and_stalls_are_nvtx_ranges(library: Path, tmp_path: Path) -> None:
    written = tmp_path / "calls"
    variables = {"OOC_NVTX": str(library), "OOC_TEST_NVTX": str(written)}
    ended = run_source(tmp_path, code(TRAIN, "main(2)"), OOC_BUDGET="8MiB", **variables).check()
    calls = [line.split(" ", 2) for line in written.read_text().splitlines()]
    pushed = [name for what, _, name in calls if what == "push"]
    assert len(calls) == 2 * len(pushed)
    functions = [name for name in pushed if not name.startswith("wait for")]
    assert len(functions) == ended.figures["functions"]
    assert {"wait for room", "wait for variables"} <= set(pushed)
    assert "aten::relu" in functions
    assert calls[-1][:2] == ["pop", "0"]


def test_without_a_library_there_are_no_ranges_and_the_program_runs(tmp_path: Path) -> None:
    ended = run_source(tmp_path, code(TRAIN, "main(1)"), OOC_BUDGET="8MiB", OOC_NVTX="libnone.so").check()
    assert "no NVTX ranges" in ended.errors
    assert "libnone.so" in ended.errors
