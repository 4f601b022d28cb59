"""Which chunk size: simulated steps where memory calls cost what was published, on a GPU with PCIe 5.

Mapping 2 MiB and setting its access take about 38 us on an A100, and unmapping it about 30 us; copying it over PCIe 5
takes 42 us. Where functions run on streams both come ahead of a copy in, as an address is unmapped when it is wanted
again. What a chunk of another size costs is not known well, so there are two tables in one: each chunk costs the same,
or each byte does. Variables of up to half a chunk lie in slabs, as they do by default, and never leave.

Traces are those of the planner's tests (`tests/unit/planning_traces.py`), as recording takes longer than planning;
their functions take as long as on an H100, whose arithmetic and memory are about four times as fast as theirs.

What is not simulated: the mapping of new variables, which the host does while the device is still at work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, results
from benchmarks.planning.cases import origin
from benchmarks.runs import ROOT
from swapd.devices.roofline import get_device
from swapd.planning.plan import Plan
from swapd.planning.problem import InfeasibleError, Problem
from swapd.policies import make_plan
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Trace, live_profile
from swapd.units import MIB

NAME = "chunks"
DEVICE = "h100-pcie5"
PACE = 0.26  # of the traces' functions
MODELS = (("resnet50", 512), ("gpt", 8))
QUICK = (("resnet50", 16),)
CHUNKS = tuple(size * MIB for size in (2, 4, 8, 16, 32))
OVERSUBSCRIPTIONS = (2.0, 4.0)
CALLS_SECONDS = 68e-6  # for 2 MiB: map, access and unmap
KINDS = ("none", "byte", "chunk")


def seconds_of(kind: str, chunk_bytes: int) -> float:
    """What the calls for a chunk take together."""
    return {"none": 0.0, "byte": CALLS_SECONDS * chunk_bytes / CHUNKS[0], "chunk": CALLS_SECONDS}[kind]


def trace_of(model: str, batch: int) -> Trace:
    """The trace of a model at that batch, with functions as fast as on the device."""
    folder = str(ROOT / "tests" / "unit")
    if folder not in sys.path:
        sys.path.append(folder)
    trace: Trace = getattr(import_module("planning_traces"), model)(batch=batch)
    return replace(trace, function_start=PACE * trace.function_start, function_seconds=PACE * trace.function_seconds)


def in_slabs(trace: Trace, chunk_bytes: int) -> tuple[Trace, int, float]:
    """The trace without what lies in slabs, the slabs' chunks, and the share of the live peak that rounding wastes."""
    small = trace.variable_bytes <= chunk_bytes // 2

    def live(sizes: Any) -> Any:
        return live_profile(trace.born, trace.died, sizes, trace.functions)

    large = np.where(small, 0, trace.variable_bytes)
    slabs = -(-int(live(trace.variable_bytes - large).max(initial=0)) // chunk_bytes)
    at = int(trace.live_bytes.argmax())
    wasted = int(live(-(-large // chunk_bytes) * chunk_bytes - large)[at])
    return replace(trace, variable_bytes=large), slabs, wasted / float(trace.live_bytes[at])


def case(trace: Trace, oversubscription: float, chunk_bytes: int) -> dict[str, Any]:
    """Simulated steps for each kind of cost, by the plan made for it and by demand."""
    budget = int(trace.live_bytes.max() / oversubscription)
    cut, slabs, waste = in_slabs(trace, chunk_bytes)
    facts = {"oversubscription": oversubscription, "chunk_bytes": chunk_bytes, "budget_bytes": budget, "waste": waste}
    steps: dict[str, Any] = {}
    for kind in KINDS:
        link = replace(get_device(DEVICE).link, map_seconds=seconds_of(kind, chunk_bytes))
        problem = Problem.from_trace(cut, budget, chunk_bytes=chunk_bytes, slab_chunks_peak=slabs, machine=link)
        facts |= {"compute_seconds": problem.compute_seconds, "slab_bytes": slabs * chunk_bytes}
        try:
            steps[kind] = {"planned": make_plan(problem).predicted_seconds, "demand": simulate(problem, Plan()).seconds}
        except InfeasibleError as error:
            return facts | {"refused": str(error)}
    return facts | {"steps": steps}


def measure(target: Path, quick: bool, say: Callable[[str], None]) -> None:
    """Raw data of every model, a file each."""
    results.clear(target, NAME)
    for model, batch in QUICK if quick else MODELS:
        trace = trace_of(model, batch)
        cases = []
        for x in OVERSUBSCRIPTIONS:
            for chunk in CHUNKS[::2] if quick else CHUNKS:
                cases.append(case(trace, x, chunk))
                steps = cases[-1].get("steps", {})
                found = ", ".join(f"{kind} {steps[kind]['planned']:.4f} s" for kind in steps)
                say(f"{model} at {x:g}x in chunks of {results.size(chunk)}: {found or cases[-1]['refused']}")
                record = {"model": model, "batch": batch, "live_peak_bytes": int(trace.live_bytes.max())}
                results.save(target, NAME, model, record | {"cases": cases} | origin(DEVICE))


def table(records: list[dict[str, Any]]) -> str:
    """Markdown; empty without records."""
    rows = []
    for record in records:
        for made in record["cases"]:
            name = f"{record['model']}, batch {record['batch']}, {made['oversubscription']:g}x"
            waste = [f"{made['waste']:.2%}", results.mib(made["slab_bytes"])]
            if "refused" in made:
                rows.append([name, results.size(made["chunk_bytes"]), *["does not fit"] * 6, *waste])
                continue
            steps = [made["steps"][kind][way] for way in ("planned", "demand") for kind in KINDS]
            over = [f"{seconds / made['compute_seconds']:.3f}" for seconds in steps]
            rows.append([name, results.size(made["chunk_bytes"]), *over, *waste])
    if not rows:
        return ""
    columns = [f"{way}, {kind}" for way in ("planned", "demand") for kind in KINDS]
    return (
        f"{machine.words(records[0]['planned_on'])} planned. Simulated for {records[0]['device']['name']}, no GPU was "
        f"measured. Steps over the computation; calls that cost nothing, {CALLS_SECONDS * 1e6:.0f} us for each 2 MiB, "
        "and as much for each chunk. *waste* is what rounding to chunks takes of the live peak.\n\n"
        + results.markdown(["model", "chunk", *columns, "waste", "slabs MiB"], rows)
    )
