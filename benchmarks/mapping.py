"""What memory calls cost: predicted and measured steps, and steps by chunk size.

On an A100 it was published that mapping 2 MiB takes about 2 us, setting its access 36 us and unmapping it 26 to 34 us;
copying it over PCIe 5 takes as long as the first two together. The emulated driver's calls take such times here, on the
scale of its models: their tensors are about a sixteenth of those that fill a GPU, so a chunk of 128 KiB stands for one
of 2 MiB, and 2 MiB for 32 MiB. The link is as slow as in the step times (`benchmarks.step_time`), and a call takes so
much longer than the published one as a chunk's copy takes longer than one of 2 MiB at 50 GB/s. Three kinds of cost:

- none: calls cost what they cost the emulated driver;
- chunk: each chunk costs the same, however large it is;
- byte: each byte costs the same. Published figures for chunks of other sizes lie between the two.

A *run* is the program itself, whose kernels need the host's processors, with all that disturbs them. A *replay* is its
recorded step (`mapping_child.py`): functions sleep on a stream, so that times are those of copies, calls and waits.

"Predicted" is what was said of a step before it began; "simulated" gives each steady step its own plan and its own
times of functions. "Free calls" is the same where memory calls take no time, which is what the planner believed before
it knew of them.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.children import measure_in_child
from benchmarks.fragmentation import reason
from benchmarks.runs import RunFailed, run, torch_threads
from benchmarks.step_time import IN_CORE, WARM_UP, Reference, median, reference, steady
from benchmarks.workloads import CHUNK_BYTES, WORKLOADS, Workload

NAME = "mapping"
RUN, REPLAY = "run", "replay"
SCALE = 16  # a chunk here stands for one so many times as large
LINK = 50e9  # bytes per second that the published times are set against
PUBLISHED = {"cuMemMap": 2e-6, "cuMemSetAccess": 36e-6, "cuMemUnmap": 30e-6}  # seconds for 2 MiB
OVERSUBSCRIPTIONS = (2.0, 4.0)
CHUNKS = (1, 2, 4, 8, 16)  # times CHUNK_BYTES
RUNS = tuple((x, kind, 1) for x in OVERSUBSCRIPTIONS for kind in ("none", "chunk"))
REPLAYS = (
    *RUNS,
    *((x, "chunk", times) for times in CHUNKS[1:] for x in OVERSUBSCRIPTIONS),
    *((2.0, "byte", times) for times in (4, 16)),
)
QUICK = ((2.0, "none", 1), (2.0, "chunk", 1), (2.0, "chunk", 8))
ATTEMPTS = 3
CALM = 0.3  # where threads, all together, waited longer for a processor, other work disturbed the run
STEP_SECONDS = 1.0  # of a replay's functions
Case = tuple[float, str, int]  # oversubscription, kind of cost, chunk size over CHUNK_BYTES


def costs(kind: str, bytes_per_second: float) -> str:
    """The rules for the emulated driver, whose link is so fast."""
    if kind == "none":
        return ""
    scale = CHUNK_BYTES / bytes_per_second / (CHUNK_BYTES * SCALE / LINK)
    key, chunks = ("chunk_cost", 1.0) if kind == "chunk" else ("mib_cost", (1 << 20) / CHUNK_BYTES)
    return ";".join(f"{call}:{key}={seconds * scale * chunks * 1e9:.0f}ns" for call, seconds in PUBLISHED.items())


def measure(target: Path, *, quick: bool, rounds: int, steps: int, say: Callable[[str], None]) -> None:
    """Runs everything and writes the raw data. Raises RunFailed if an in-core run fails."""
    results.clear(target, NAME)
    shared: dict[str, Any] = {"quick": quick, "threads": torch_threads()}
    with tempfile.TemporaryDirectory(prefix="ooc-bench-") as scratch:
        for workload in WORKLOADS[1:] if quick else WORKLOADS:
            trace = Path(scratch) / f"{workload.name}.trace"
            record = run(workload, steps, trace_path=trace, **shared) | {"mode": IN_CORE}
            results.save(target, NAME, f"{workload.name}-{IN_CORE}", record)
            first = reference([record])
            say(f"{workload.name}: {IN_CORE}, step {median(record):.3f} s, load {record['machine']['load_average'][0]}")
            for turn in range(rounds):
                for case in QUICK[:2] if quick else RUNS:
                    record = calmly(functools.partial(run_case, workload, steps, first, case, shared))
                    keep(target, record | {"round": turn}, say)
                for case in QUICK if quick else REPLAYS:
                    record = calmly(functools.partial(replay_case, workload, steps, first, case, trace))
                    keep(target, record | {"round": turn}, say)


def calmly(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The least disturbed of at most three attempts; the first one in which threads had to wait but little."""
    found = []
    for _ in range(ATTEMPTS):
        found.append(measured())
        if "failed" in found[-1] or waiting(found[-1]) <= CALM:
            return found[-1]
    return min(found, key=waiting)


def waiting(record: dict[str, Any]) -> float:
    """The median, over all steps, of the time for which threads were ready and got no processor, over the step's."""
    return statistics.median(step["waited_seconds"] / step["seconds"] for step in record["steps"])


def keep(target: Path, record: dict[str, Any], say: Callable[[str], None]) -> None:
    """Save a record, and say what it says."""
    name = f"{record['workload']} {record['oversubscription']:g}x {record['mode']} {record['kind']}"
    name = f"{name} {record['chunk_bytes'] >> 10:05d}KiB"
    results.save(target, NAME, f"{name.replace(' ', '-')}-{record['round']}", record)
    say(f"{name}: " + (record.get("failed") or f"step {median(record):.3f} s, waiting {waiting(record):.2f}"))


def _frame(workload: Workload, first: Reference, case: Case, mode: str, pace: float = 1.0) -> dict[str, Any]:
    x, kind, times = case
    budget = first.budget_bytes(x)
    return {
        "workload": workload.name,
        "mode": mode,
        "oversubscription": x,
        "kind": kind,
        "chunk_bytes": times * CHUNK_BYTES,
        "budget_bytes": budget,
        "link_bytes_per_second": first.link_bytes_per_second(first.spill_bytes(budget)) / pace,
    }


def run_case(workload: Workload, steps: int, first: Reference, case: Case, shared: dict[str, Any]) -> dict[str, Any]:
    """The program itself, with kernels on the host; a record of why, if it cannot run."""
    record = _frame(workload, first, case, RUN)
    limits = {key: record[key] for key in ("chunk_bytes", "budget_bytes")}
    link = record["link_bytes_per_second"]
    try:
        return record | run(workload, steps, bytes_per_second=link, faults=costs(case[1], link), **limits, **shared)
    except RunFailed as failure:
        return record | {"failed": reason(str(failure)), "machine": machine.describe()}


def replay_case(workload: Workload, steps: int, first: Reference, case: Case, trace: Path) -> dict[str, Any]:
    """Its recorded step on a stream; a record of why, if it cannot run."""
    pace = STEP_SECONDS / first.compute_seconds
    record = _frame(workload, first, case, REPLAY, pace) | {"pace": pace}
    link = record["link_bytes_per_second"]
    arguments = (str(trace), str(pace), str(steps), str(record["budget_bytes"]), str(record["chunk_bytes"]))
    variables = {"OOC_EMULATED_BANDWIDTH": f"{link:.0f}B/s", "OOC_EMULATED_FAULTS": costs(case[1], link)}
    try:
        return record | measure_in_child("mapping_child", *arguments, **variables)
    except RunFailed as failure:
        return record | {"failed": reason(str(failure)), "machine": machine.describe()}


def groups(records: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """The out-of-core records by mode, workload, oversubscription, kind of cost and size of a chunk, in this order."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        if record["mode"] != IN_CORE:
            key = (
                record["mode"],
                record["workload"],
                record["oversubscription"],
                record["kind"],
                record["chunk_bytes"],
            )
            found.setdefault(key, []).append(record)
    return dict(sorted(found.items()))


def ratios(records: list[dict[str, Any]], key: str) -> list[float]:
    """Of each steady step that has the figure, the figure over the step's time without planning."""
    return [step[key] / unplanned(step) for record in records for step in _simulated(record)]


def unplanned(step: dict[str, Any]) -> float:
    """A step's time less what the planner took of it: no plan and no simulation knows of that."""
    return float(step["seconds"] - step.get("planning_seconds", 0.0))


def predictions(records: list[dict[str, Any]]) -> list[float]:
    """What was predicted when a steady step began, over its time. The step before may have renewed the prediction."""
    pairs = [pair for record in records for pair in itertools.pairwise(record["steps"][WARM_UP:])]
    return [before["predicted_seconds"] / unplanned(step) for before, step in pairs if before.get("predicted_seconds")]


def _simulated(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in record["steps"][WARM_UP:] if step.get("simulated_seconds")]


def row(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one group: medians over the steady steps of all its rounds, and the rounds' spread."""

    def middle(key: str) -> float:
        return float(statistics.median([value for record in records for value in steady(record, key)]))

    medians = [median(record) for record in records]
    machines = [step["machine"] for record in records for step in _simulated(record)]
    figures = {
        "step_seconds": middle("seconds"),
        "lowest": min(medians),
        "highest": max(medians),
        "calls_seconds": middle("map_seconds") + middle("unmap_seconds"),
        "chunks_mapped": middle("driver_calls_map"),
        "moved_bytes": middle("swap_out_bytes") + middle("swap_in_bytes"),
        "waiting": max(waiting(record) for record in records),
        "waste": statistics.median(record["summary"]["internal_fragmentation_ratio"] for record in records),
    }
    for name, found in (
        ("predicted", predictions(records)),
        ("simulated", ratios(records, "simulated_seconds")),
        ("free_calls", ratios(records, "simulated_free_calls_seconds")),
    ):
        figures[name] = statistics.median(found) if found else None
    for name in ("map_seconds", "unmap_seconds"):
        figures[f"chunk_{name}"] = statistics.median(known[name] for known in machines) if machines else None
    return figures


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _micro(value: float | None) -> str:
    return "" if value is None else f"{value * 1e6:.0f}"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: predictions, then steps by chunk size."""
    if not records:
        return ""
    digests = {record["workload"]: record["digest"] for record in records if record["mode"] == IN_CORE}
    made = groups(records)
    by_case, by_size = [], []
    for (mode, name, x, kind, chunk), group in made.items():
        done = [record for record in group if "failed" not in record]
        title = f"{mode}: {name} {x:g}x, cost by {kind}"
        size = f"{results.size(chunk)} for {results.size(chunk * SCALE)}"
        if not done:
            by_size.append([title, size, group[0]["failed"], *[""] * 6])
            continue
        figures = row(done)
        bits = {record.get("digest", digests[name]) for record in done}  # a replay has none
        same = ("" if mode == REPLAY else "yes") if bits == {digests[name]} else "NO"
        by_case.append(
            [
                f"{title}, {results.size(chunk)}",
                f"{figures['step_seconds']:.3f}",
                f"{figures['lowest']:.3f} to {figures['highest']:.3f}",
                *(_ratio(figures[key]) for key in ("predicted", "simulated", "free_calls")),
                *(_micro(figures[f"chunk_{key}"]) for key in ("map_seconds", "unmap_seconds")),
                f"{figures['waiting']:.0%}",
                same,
            ]
        )
        if kind == "none":
            continue
        by_size.append(
            [
                title,
                size,
                f"{figures['step_seconds']:.3f}",
                f"{figures['lowest']:.3f} to {figures['highest']:.3f}",
                f"{figures['calls_seconds']:.3f}",
                f"{figures['chunks_mapped']:.0f}",
                results.mib(figures["moved_bytes"]),
                f"{figures['waste']:.2%}",
                results.mib(max(record["summary"]["min_budget_bytes"] for record in done)),
            ]
        )
    loads = [record["machine"]["load_average"][0] for record in records]
    header = "case|step s|rounds|predicted/step|simulated/step|free calls/step|map us|unmap us|waiting|identical"
    sizes = "case|chunk|step s|rounds|in calls s|mapped chunks|moved MiB|internal waste|least budget MiB"
    return (
        f"{machine.words(records[0]['machine'])}; load averages {min(loads)} to {max(loads)}: other work ran beside it "
        "where they exceed 1. All times are emulated. *map us* and *unmap us* are what the core measured for a chunk, "
        "on both sides of a copy. *waiting* is how long threads were ready and got no processor, over the step: "
        f"what exceeds {CALM:.0%} was disturbed by other work.\n\n"
        + results.markdown(header.split("|"), by_case)
        + "\nBy chunk size, a step:\n\n"
        + results.markdown(sizes.split("|"), by_size)
    )
