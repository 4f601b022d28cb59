"""Step time beside the bound: planned modes and demand mode on a link as slow as the computation is.

For each workload an in-core run gives the compute time before and after the live peak (C_f, C_b) and the live peak P.
For each oversubscription x the budget is M = P / x and what does not fit is S = P - M. The link is held to the
bandwidth b, the same both ways, at which the transfers S / b + S / b take as long as the computation C_f + C_b. The
bound is max(C_f, S / b) + max(C_b, S / b) (`swapd.planning.lower_bound.bound`: what is written and read once across the
turn); a step that never overlapped anything would take 2 (C_f + C_b).

"Replayed" holds the simulator against the machine: each steady step is simulated with its own plan, its own times of
functions and the link as its process saw it, and the median of simulated to measured time is shown.

"Simulated" is what `swapd.simulation` says of a plan made from the in-core run's last step for this link; the plan
that the run itself used was made from its own recorded steps.

The runs of all modes take turns, round by round, the in-core run among them: what slows the machine down shows there.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.runs import run, torch_threads
from benchmarks.workloads import CHUNK_BYTES, WORKLOADS, Workload
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies import make_plan
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine, Trace

NAME = "step_time"
IN_CORE = "in-core"
MODES = ("auto", "window", "idle", "demand")
OVERSUBSCRIPTIONS = (2.0, 4.0)
TARGETS = {2.0: 1.25, 4.0: 1.5}  # planned step / bound
_COLUMNS = (
    "mode|step|rounds|bound|ratio|target|simulated|replayed|stalls|out|in|on demand|link MB/s|identical|in budget"
)
WARM_UP = 4  # set-up, recorded, planned, planned again with the times of an undisturbed step


@dataclass(frozen=True)
class Reference:
    """An in-core run: seconds and chunks of a steady step, and the live peak that budgets are a share of."""

    step_seconds: float
    forward_seconds: float  # C_f
    backward_seconds: float  # C_b
    live_peak_chunks: int
    slab_chunks: int
    live_peak_bytes: int
    digest: str

    @property
    def compute_seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    def budget_bytes(self, oversubscription: float) -> int:
        """M."""
        return int(self.live_peak_bytes / oversubscription)

    def spill_bytes(self, budget_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
        """S, in whole chunks: variables beyond what the budget holds beside the slabs."""
        return max(0, self.live_peak_chunks - (budget_bytes // chunk_bytes - self.slab_chunks)) * chunk_bytes

    def link_bytes_per_second(self, spill_bytes: int) -> float:
        """The bandwidth, each way, at which moving the spill out and in takes as long as the computation."""
        return 2 * spill_bytes / self.compute_seconds

    def bound_seconds(self, spill_bytes: int, bytes_per_second: float) -> float:
        transfer = spill_bytes / bytes_per_second
        return max(self.forward_seconds, transfer) + max(self.backward_seconds, transfer)


def steady(record: dict[str, Any], key: str = "seconds") -> list[Any]:
    """A figure of the steps after the warm-up, of those that have it."""
    return [step[key] for step in record["steps"][WARM_UP:] if key in step]


def median(record: dict[str, Any], key: str = "seconds") -> float:
    return float(statistics.median(steady(record, key)))


def reference(records: Iterable[dict[str, Any]]) -> Reference:
    """The median of the in-core runs."""
    chosen = [record for record in records if record["mode"] == IN_CORE]

    def middle(key: str) -> float:
        return float(statistics.median([value for record in chosen for value in steady(record, key)]))

    return Reference(
        step_seconds=middle("seconds"),
        forward_seconds=middle("forward_seconds"),
        backward_seconds=middle("backward_seconds"),
        live_peak_chunks=round(middle("live_peak_chunks")),
        slab_chunks=round(middle("slab_chunks")),
        live_peak_bytes=chosen[0]["summary"]["live_peak_bytes"],
        digest=chosen[0]["digest"],
    )


def measure(target: Path, *, quick: bool, rounds: int, steps: int, say: Callable[[str], None]) -> None:
    """Runs everything and writes the raw data. Raises RunFailed."""
    results.clear(target, NAME)
    shared: dict[str, Any] = {"quick": quick, "threads": torch_threads()}
    cases = [(x, mode) for x in OVERSUBSCRIPTIONS for mode in MODES]
    if quick:
        cases = [(2.0, "auto"), (2.0, "demand")]
    with tempfile.TemporaryDirectory(prefix="ooc-bench-") as scratch:
        for workload in WORKLOADS:
            trace_path = Path(scratch) / f"{workload.name}.trace"
            first: Reference | None = None
            for turn in range(rounds):
                record = run(workload, steps, trace_path=trace_path, **shared) | {"mode": IN_CORE, "round": turn}
                results.save(target, NAME, f"{workload.name}-{IN_CORE}-{turn}", record)
                first = first or reference([record])
                load = record["machine"]["load_average"][0]
                say(f"{workload.name}: {IN_CORE}, step {median(record):.3f} s, load {load}")
                for x, mode in cases:
                    record = run_mode(workload, steps, first, x, mode, shared, Trace.load(trace_path))
                    results.save(target, NAME, f"{workload.name}-{x:g}x-{mode}-{turn}", record | {"round": turn})
                    over = median(record) / record["bound_seconds"]
                    say(f"{workload.name}: {x:g}x {mode}, step {median(record):.3f} s, {over:.2f} of the bound")


def simulated_seconds(trace: Trace, budget_bytes: int, bytes_per_second: float, mode: str) -> float:
    """What the simulator says of a step of `trace`; demand mode is the plan that moves nothing."""
    link = Machine(out_bytes_per_second=bytes_per_second, in_bytes_per_second=bytes_per_second)
    problem = Problem.from_trace(trace, budget_bytes, machine=link)
    return simulate(problem, Plan() if mode == "demand" else make_plan(problem, mode)).seconds


def run_mode(
    workload: Workload, steps: int, first: Reference, x: float, mode: str, shared: dict[str, Any], trace: Trace
) -> dict[str, Any]:
    budget = first.budget_bytes(x)
    spill = first.spill_bytes(budget)
    link = first.link_bytes_per_second(spill)
    record = run(workload, steps, budget_bytes=budget, bytes_per_second=link, policy=mode, **shared)
    return record | {
        "mode": mode,
        "oversubscription": x,
        "budget_bytes": budget,
        "spill_bytes": spill,
        "link_bytes_per_second": link,
        "bound_seconds": first.bound_seconds(spill, link),
        "simulated_seconds": simulated_seconds(trace, budget, link, mode),
    }


def groups(records: Iterable[dict[str, Any]]) -> dict[tuple[str, float, str], list[dict[str, Any]]]:
    """The out-of-core records by workload, oversubscription and mode, in the order of `WORKLOADS` and `MODES`."""
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for record in records:
        if record["mode"] != IN_CORE:
            found.setdefault((record["workload"], record["oversubscription"], record["mode"]), []).append(record)
    names = [workload.name for workload in WORKLOADS]
    return dict(sorted(found.items(), key=lambda item: (names.index(item[0][0]), item[0][1], MODES.index(item[0][2]))))


def row(records: list[dict[str, Any]], digest: str) -> dict[str, Any]:
    """The figures of one group: medians over the steady steps of all its rounds, and the rounds' spread."""
    seconds = [value for record in records for value in steady(record)]
    medians = [median(record) for record in records]
    bound = records[0]["bound_seconds"]

    def middle(key: str) -> float:
        return float(statistics.median([value for record in records for value in steady(record, key)]))

    step = statistics.median(seconds)
    return {
        "step_seconds": step,
        "lowest": min(medians),
        "highest": max(medians),
        "bound_seconds": bound,
        "ratio": step / bound,
        "simulated_seconds": statistics.median(record["simulated_seconds"] for record in records),
        "agreement": statistics.median(agreements) if (agreements := _agreements(records)) else None,
        "stall_seconds": middle("stall_seconds"),
        "out_bytes": middle("swap_out_bytes"),
        "in_bytes": middle("swap_in_bytes"),
        "demand_in_bytes": middle("demand_swap_in_bytes"),
        "identical": all(record["digest"] == digest for record in records),
        "within_budget": all(
            record["summary"]["device_peak_bytes"] <= record["summary"]["budget_bytes"] for record in records
        ),
    }


def _agreements(records: list[dict[str, Any]]) -> list[float]:
    """Of each steady step under a plan, the time that the simulator gives it, with the step's own times, to its own."""
    steps = [step for record in records for step in record["steps"][WARM_UP:] if "simulated_seconds" in step]
    return [step["simulated_seconds"] / step["seconds"] for step in steps]


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: the in-core runs, then one line a workload, oversubscription and mode."""
    if not records:
        return ""
    names = [w.name for w in WORKLOADS if any(record["workload"] == w.name for record in records)]
    references = {name: reference(r for r in records if r["workload"] == name) for name in names}
    in_core = []
    for name in names:
        rounds = [median(r) for r in records if r["workload"] == name and r["mode"] == IN_CORE]
        known = references[name]
        in_core.append(
            [
                name,
                f"{known.step_seconds:.3f}",
                f"{min(rounds):.3f} to {max(rounds):.3f}",
                f"{known.forward_seconds:.3f}",
                f"{known.backward_seconds:.3f}",
                results.mib(known.live_peak_bytes),
            ]
        )
    rows = []
    for (name, x, mode), group in groups(records).items():
        figures = row(group, references[name].digest)
        rows.append(
            [
                f"{name} {x:g}x {mode}",
                f"{figures['step_seconds']:.3f}",
                f"{figures['lowest']:.3f} to {figures['highest']:.3f}",
                f"{figures['bound_seconds']:.3f}",
                f"{figures['ratio']:.2f}",
                f"{TARGETS[x]:.2f}" if mode != "demand" and x in TARGETS else "",
                f"{figures['simulated_seconds']:.3f}",
                f"{figures['agreement']:.3f}" if figures["agreement"] is not None else "",
                f"{figures['stall_seconds']:.3f}",
                results.mib(figures["out_bytes"]),
                results.mib(figures["in_bytes"]),
                results.mib(figures["demand_in_bytes"]),
                f"{group[0]['link_bytes_per_second'] / 1e6:.0f}",
                "yes" if figures["identical"] else "NO",
                "yes" if figures["within_budget"] else "NO",
            ]
        )
    return (
        f"{machine.words(records[0]['machine'])}; PyTorch uses {records[0]['threads']} thread(s). "
        "Seconds a step; MiB a step.\n\n"
        + results.markdown(["in-core", "step", "rounds", "C_f", "C_b", "live peak MiB"], in_core)
        + "\n"
        + results.markdown(_COLUMNS.split("|"), rows)
    )
