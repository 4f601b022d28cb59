"""Train both examples in-core and with a quarter of the memory they need, the rest on a disk, and compare every bit.

    python examples/demo.py [--quick] [--json] [--output out/demo.json] [--disk FOLDER]

Each example is an unmodified PyTorch script, and runs three times in a process of its own:

    in-core      plain PyTorch, no variable set: the bits that count, and the step time to compare with
    measured     a few steps through the allocator with memory to spare: gives the live peak
    out-of-core  all steps with ``OOC_BUDGET`` set to the live peak divided by the oversubscription, and ``OOC_DISK``

It ends with 0 only if, for each example, parameters and losses are bit-identical, the device peak stayed within
the budget, data did go to the disk, and nothing of them is left there. There is no GPU here: the device is a part of
this machine's memory, and no figure says anything about the speed of a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from swapd.progress import note

HERE = pathlib.Path(__file__).resolve().parent
CHUNK_SIZE = "128KiB"
SMALL_LIMIT = "64KiB"
MEASURED_STEPS = 3
RUN_TIMEOUT_SECONDS = 900
STEP_LINE = re.compile(r"^step +\d+ +loss +\S+ +([0-9.]+) s$")


@dataclasses.dataclass(frozen=True)
class Example:
    """A script, and the arguments that give it a size worth showing (or a tiny one, for tests)."""

    name: str
    script: pathlib.Path
    arguments: tuple[str, ...]
    quick_arguments: tuple[str, ...]


EXAMPLES = (
    Example("resnet50", HERE / "resnet50.py", (), ("--batch-size", "16", "--image-size", "32")),
    Example("gpt", HERE / "gpt.py", (), ("--batch-size", "8", "--layers", "3", "--text-bytes", "1000000")),
)


class RunFailed(Exception):
    """A run ended badly; the message says which, and shows the end of its output."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run of a script: its step times, the process's largest memory, the allocator's summary if any.

    The kernel's figure for the memory begins as that of the process that starts the script, so the demo imports nothing
    large.
    """

    step_seconds: list[float]
    peak_rss_bytes: int
    summary: dict[str, Any]


def environment(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment with no ``OOC_`` variable but the given ones."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    if variables:
        # It would keep `import torch` from starting the allocator.
        kept.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return kept | variables


def run_script(what: str, command: list[str], variables: dict[str, str], on_step: Callable[[float], None]) -> Run:
    """Run ``command``; ``variables`` go to its environment. RunFailed if it fails, hangs or leaves no summary.

    ``on_step`` is called with the seconds of each step as the script prints them.
    """
    child = subprocess.Popen(
        command,
        env=environment(variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert child.stdout is not None
    late = threading.Event()
    timer = threading.Timer(RUN_TIMEOUT_SECONDS, lambda: (late.set(), child.kill()))
    timer.start()
    lines, steps = [], []
    try:
        for line in child.stdout:
            lines.append(line)
            if step := STEP_LINE.match(line):
                steps.append(float(step[1]))
                on_step(steps[-1])
        _, ended, used = os.wait4(child.pid, 0)
        status = child.returncode = os.waitstatus_to_exitcode(ended)
    finally:
        timer.cancel()
        child.kill()
    output = "".join(lines)
    if late.is_set():
        raise RunFailed(f"the {what} run did not end in {RUN_TIMEOUT_SECONDS} s\n{tail(output)}")
    if status != 0:
        raise RunFailed(f"the {what} run ended with status {status}\n{tail(output)}")
    if not steps:
        raise RunFailed(f"the {what} run printed no steps\n{tail(output)}")
    return Run(steps, used.ru_maxrss * 1024, read_summary(what, variables.get("OOC_SUMMARY"), output))


def tail(output: str, lines: int = 20) -> str:
    """The last lines of a program's output."""
    return "\n".join((output or "(no output)").splitlines()[-lines:])


def read_summary(what: str, path: str | None, output: str) -> dict[str, Any]:
    """The summary at ``path``, an empty one if none was asked for."""
    if path is None:
        return {}
    try:
        summary: dict[str, Any] = json.loads(pathlib.Path(path).read_text())
    except (OSError, ValueError) as error:
        raise RunFailed(
            f"the {what} run wrote no summary ({error}), so it did not use the allocator. "
            f"Is it installed for {sys.executable}? `swapd doctor` says.\n{tail(output)}"
        ) from None
    return summary


def compare_states(first: pathlib.Path, second: pathlib.Path) -> dict[str, Any]:
    """Bitwise comparison of two saved states, by ``compare.py`` in a process with PyTorch and no allocator."""
    command = [sys.executable, str(HERE / "compare.py"), str(first), str(second)]
    done = subprocess.run(command, check=False, env=environment({}), capture_output=True, text=True)
    try:
        comparison: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise RunFailed(f"the saved states could not be compared\n{tail(done.stderr)}") from None
    comparison["identical"] = comparison["identical"] and done.returncode == 0
    return comparison


def steady(step_seconds: list[float]) -> float:
    """Median seconds of the second half of the steps; the first ones warm up, record and plan."""
    return statistics.median(step_seconds[len(step_seconds) // 2 :])


def run_example(
    example: Example, options: argparse.Namespace, folder: pathlib.Path, console: Console
) -> dict[str, Any]:
    """The three runs of one example and their comparison, as one entry of ``demo.json``. RunFailed if one fails."""
    arguments = example.quick_arguments if options.quick else example.arguments
    base = [sys.executable, str(example.script), *arguments]
    shared = {"OOC_ALLOC": "cpu", "OOC_CHUNK_SIZE": options.chunk_size, "OOC_SMALL_LIMIT": options.small_limit}
    plain_state, state = folder / f"{example.name}.in-core.pt", folder / f"{example.name}.out-of-core.pt"
    summary_file = str(folder / f"{example.name}.json")

    def run(what: str, extra: list[str], variables: dict[str, str]) -> Run:
        of, done = extra[extra.index("--steps") + 1], itertools.count(1)
        with console.status(f"{example.name}: {what} run") as status:

            def show(seconds: float) -> None:
                text = f"{example.name}: {what} run, step {next(done)} of {of}, {seconds:.1f} s"
                note(text)
                status.update(text)  # seen on a terminal only
                if not console.is_terminal:
                    console.print(text)

            began = time.perf_counter()
            result = run_script(what, base + extra, variables, show)
        console.print(f"{example.name}: {what} run, {time.perf_counter() - began:.0f} s")
        return result

    steps = ["--steps", str(options.steps)]
    plain = run("in-core", [*steps, "--save", str(plain_state)], {})
    few = ["--steps", str(min(options.steps, MEASURED_STEPS))]
    measured = run("measured", few, shared | {"OOC_SUMMARY": summary_file})
    pathlib.Path(summary_file).unlink()
    budget = int(measured.summary["live_peak_bytes"] / options.oversubscription)
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    limits = {"OOC_BUDGET": str(budget), "OOC_DISK": str(disk), "OOC_SUMMARY": summary_file}
    swapped = run("out-of-core", [*steps, "--save", str(state)], shared | limits)
    comparison = compare_states(plain_state, state)
    entry = describe(budget, plain, measured, swapped, comparison)
    entry["failures"] += [f"{left.name} was left on the disk" for left in disk.iterdir()]
    return {"example": example.name, "arguments": [*arguments, *steps]} | entry


def describe(budget: int, plain: Run, measured: Run, swapped: Run, comparison: dict[str, Any]) -> dict[str, Any]:
    """The figures of one example, and ``failures``: in words, each condition of the demo that does not hold."""
    summary = swapped.summary
    entry = {
        "device": summary["device"],
        "live_peak_bytes": measured.summary["live_peak_bytes"],
        "budget_bytes": budget,
        "oversubscription": measured.summary["live_peak_bytes"] / budget if budget else 0.0,
        "step_seconds": {
            "in_core": steady(plain.step_seconds),
            "in_core_through_allocator": steady(measured.step_seconds),
            "out_of_core": steady(swapped.step_seconds),
        },
        "all_step_seconds": {
            "in_core": plain.step_seconds,
            "in_core_through_allocator": measured.step_seconds,
            "out_of_core": swapped.step_seconds,
        },
        "peak_rss_bytes": {"in_core": plain.peak_rss_bytes, "out_of_core": swapped.peak_rss_bytes},
        "bit_identical": comparison["identical"],
        "comparison": comparison,
        "in_core_summary": measured.summary,
        "summary": summary,
    }
    copied = (
        "device_peak_bytes stall_seconds swap_out_bytes swap_in_bytes swap_out_count swap_in_count "
        "demand_swap_in_count divergence_count min_budget_bytes disk_read_bytes disk_written_bytes "
        "internal_fragmentation_ratio external_fragmentation_ratio"
    )
    entry.update({name: summary[name] for name in copied.split()})
    entry["failures"] = failures(entry)
    return entry


def failures(entry: dict[str, Any]) -> list[str]:
    """What the demo promises and this entry does not keep, one sentence each."""
    found = []
    if not entry["bit_identical"]:
        different = entry["comparison"]["differences"]
        shown = "; ".join(f"{path}: {how}" for path, how in list(different.items())[:5])
        found.append(f"not bit-identical: {len(different)} values differ ({shown})")
    if entry["device"] != "emulated":
        found.append(f"the emulated device was asked for, and {entry['device']} was used")
    if entry["summary"]["budget_bytes"] != entry["budget_bytes"]:
        found.append(f"the budget in force was {entry['summary']['budget_bytes']} bytes, not {entry['budget_bytes']}")
    if entry["device_peak_bytes"] > entry["budget_bytes"]:
        found.append(f"device peak {entry['device_peak_bytes']} bytes, over the budget of {entry['budget_bytes']}")
    if entry["swap_out_bytes"] == 0 or entry["swap_in_bytes"] == 0:
        found.append("nothing was swapped, so nothing was shown")
    if entry["disk_read_bytes"] < entry["swap_in_bytes"] or entry["disk_written_bytes"] < entry["swap_out_bytes"]:
        found.append("what was swapped is not on the disk")
    return found


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def table(entries: list[dict[str, Any]]) -> Table:
    """One column an example."""
    result = Table(title="In-core, and with a part of the memory and a disk")
    result.add_column("")
    for entry in entries:
        result.add_column(entry["example"], justify="right")

    def row(name: str, values: list[str]) -> None:
        result.add_row(name, *values)

    row("device", [e["device"] for e in entries])
    row("live peak", [mib(e["live_peak_bytes"]) for e in entries])
    row("budget", [mib(e["budget_bytes"]) for e in entries])
    row("oversubscription", [f"{e['oversubscription']:.2f}x" for e in entries])
    row("device peak", [mib(e["device_peak_bytes"]) for e in entries])
    row("smallest budget that would do", [mib(e["min_budget_bytes"]) for e in entries])
    row("step, in-core, plain PyTorch", [f"{e['step_seconds']['in_core']:.3f} s" for e in entries])
    row("step, in-core, this allocator", [f"{e['step_seconds']['in_core_through_allocator']:.3f} s" for e in entries])
    row("step, out-of-core", [f"{e['step_seconds']['out_of_core']:.3f} s" for e in entries])
    row("stalls, whole run", [f"{e['stall_seconds']:.3f} s" for e in entries])
    row("peak memory of the process, in-core", [mib(e["peak_rss_bytes"]["in_core"]) for e in entries])
    row("peak memory of the process, out-of-core", [mib(e["peak_rss_bytes"]["out_of_core"]) for e in entries])
    row("written to the disk", [f"{mib(e['disk_written_bytes'])} in {e['swap_out_count']:,}" for e in entries])
    row("read from the disk", [f"{mib(e['disk_read_bytes'])} in {e['swap_in_count']:,}" for e in entries])
    row("of these on demand", [f"{e['demand_swap_in_count']:,}" for e in entries])
    row("fragmentation, internal", [f"{e['internal_fragmentation_ratio']:.2%}" for e in entries])
    row("fragmentation, external", [f"{e['external_fragmentation_ratio']:.2%}" for e in entries])
    row("divergences", [str(e["divergence_count"]) for e in entries])
    compared = [f"{e['comparison']['tensors']} tensors, {e['comparison']['values']} values" for e in entries]
    row("compared", compared)
    verdicts = ["[green]yes[/green]" if e["bit_identical"] else "[red]NO[/red]" for e in entries]
    row("bit-identical", verdicts)
    return result


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [example.name for example in EXAMPLES]
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"which to run (default: {' '.join(names)})")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for tests")
    parser.add_argument("--steps", type=int, help="training steps (default 8; 4 with --quick)")
    parser.add_argument("--oversubscription", type=float, default=4.0, help="live peak / budget (default %(default)s)")
    parser.add_argument("--disk", type=pathlib.Path, help="folder on the disk to use (default: that of the JSON file)")
    parser.add_argument("--chunk-size", default=CHUNK_SIZE, help="OOC_CHUNK_SIZE (default %(default)s)")
    parser.add_argument("--small-limit", default=SMALL_LIMIT, help="OOC_SMALL_LIMIT (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the JSON, and nothing else, to standard output")
    parser.add_argument("--output", type=pathlib.Path, default=HERE.parent / "out" / "demo.json", help="JSON file")
    options = parser.parse_args(arguments)
    unknown = set(options.examples) - set(names)
    if unknown:
        parser.error(f"no such example: {', '.join(sorted(unknown))} (there are {', '.join(names)})")
    if options.steps is None:
        options.steps = 4 if options.quick else 8
    if options.steps < 1 or options.oversubscription <= 0:
        parser.error("--steps and --oversubscription must be positive")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(stderr=options.json)
    began = time.perf_counter()
    entries: list[dict[str, Any]] = []
    problems: list[str] = []
    disk: pathlib.Path = options.disk or options.output.parent
    disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ooc-demo-", dir=disk) as folder:
        for example in EXAMPLES:
            if options.examples and example.name not in options.examples:
                continue
            try:
                entries.append(run_example(example, options, pathlib.Path(folder), console))
                problems += [f"{example.name}: {problem}" for problem in entries[-1]["failures"]]
            except (RunFailed, KeyError, OSError) as error:
                text = f"no {error} in the summary" if isinstance(error, KeyError) else str(error)
                problems.append(f"{example.name}: {text}")
    report = {
        "version": 1,
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "seconds": time.perf_counter() - began,
        "passed": not problems,
        "problems": problems,
        "examples": entries,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    if options.json:
        print(json.dumps(report, indent=2))
    if entries:
        console.print(table(entries))
    for problem in problems:
        console.print(f"FAILED  {problem}", style="red", markup=False)
    console.print(f"{report['seconds']:.0f} s; the figures are in {options.output}", markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
