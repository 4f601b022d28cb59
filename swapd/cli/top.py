"""`swapd top`: look into a running process that was started with OOC_STATUS=1."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from swapd.cli.options import F
from swapd.cli.output import OUTPUT, Failure, console, pairs_table, print_json, text_table, write_file
from swapd.cli.summary import disk, moved, plan, recomputed
from swapd.observing.analysis import printable
from swapd.observing.status import StatusError, ask, processes
from swapd.tiers import store
from swapd.units import format_bandwidth, format_bytes, format_duration

_BLOCKS = " ▁▂▃▄▅▆▇█"


def seconds_option(help_text: str) -> Callable[[F], F]:
    """The option --seconds of the commands that look at a process for a while."""
    return click.option("--seconds", default=10.0, show_default=True, type=click.FloatRange(0, 3600), help=help_text)


@click.command("top")
@click.argument("pid", required=False, type=int)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@click.option("--json", "as_json", is_flag=True, help="Print what the process says, as JSON, and end.")
@click.option("--list", "only_list", is_flag=True, help="Print the numbers of the processes that can be looked into.")
@click.option("--every", default=1.0, show_default=True, type=click.FloatRange(0.1, 60), help="Seconds between frames.")
@click.option(
    "--record",
    "record_path",
    metavar="FILE",
    type=OUTPUT,
    help="Keep a timeline for --seconds and write it there, for Perfetto.",
)
@seconds_option("With --record: how long to look.")
def command(
    pid: int | None,
    once: bool,
    as_json: bool,
    only_list: bool,
    every: float,
    record_path: Path | None,
    seconds: float,
) -> int:
    """Watch a process that runs out-of-core: memory, transfers, waiting, steps.

    PID may be left out: then it is the process that was started last. The process has to have been started with
    OOC_STATUS=1 (or `swapd run --status 1`), by the same user; it is asked through a Unix socket that answers
    nobody else. Ends when the process does.

    \b
    swapd top
    swapd top 4711 --record now.json --seconds 5
    """
    if only_list:
        for number in processes():
            click.echo(number)
        return 0
    pid = pid if pid is not None else newest()
    if record_path is not None:
        write_answer(pid, "timeline", record_path, seconds)
        return 0
    if as_json:
        print_json(status_of(pid))
        return 0
    screen = console()
    if once or not screen.is_terminal:
        screen.print(frame(status_of(pid), None))
        return 0
    return _watch(pid, every, screen)


def _watch(pid: int, every: float, screen: Any) -> int:
    before = status_of(pid)
    try:
        with Live(frame(before, None), console=screen, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                now = status_of(pid)
                live.update(frame(now, before), refresh=True)
                before = now
    except KeyboardInterrupt:
        return 0
    except (Failure, StatusError) as error:
        screen.print(frame(before, None))
        click.echo(f"swapd: {error}", err=True)
        return 0 if "has ended" in str(error) else 1


def write_answer(pid: int, request: str, path: Path, seconds: float) -> None:
    """Writes what a process answers to "timeline" or "report". A timeline that is off is turned on for `seconds`."""
    was_on = bool(status_of(pid)["timeline"]["on"])
    if not was_on:
        ask(pid, "timeline start")
    try:
        if not was_on or request == "timeline":
            time.sleep(seconds)
        content = ask(pid, request)
        write_file(path, content)
    finally:
        if not was_on:
            with contextlib.suppress(StatusError):  # the process may have ended meanwhile
                ask(pid, "timeline stop")
    click.echo(f"{path}: {format_bytes(len(content))}")


def status_of(pid: int) -> dict[str, Any]:
    """What a process says of itself. Raises Failure or StatusError."""
    try:
        facts = json.loads(ask(pid, "status"))
        if not isinstance(facts, dict) or facts.get("version") != 1:
            raise ValueError
    except ValueError:
        raise Failure(f"process {pid} speaks another version; use the swapd of its environment") from None
    return facts


def newest() -> int:
    """The process that was started last of those that can be asked. Raises Failure."""
    found = processes()
    if not found:
        raise Failure("there is no process to look into: start one with OOC_STATUS=1, or swapd run --status 1")
    return found[0]


def frame(facts: dict[str, Any], before: dict[str, Any] | None) -> Group:
    """One picture of a process. Speeds are differences from `before`, an earlier answer of the process."""
    stats = facts["stats"]
    title = f"{printable(' '.join(facts['arguments']), 70)}   process {facts['pid']} on {printable(facts['device'])}"
    rows: list[tuple[str, str | Text]] = [
        ("running for", f"{format_duration(facts['elapsed_seconds'])}, {stats['functions']} functions"),
        ("memory", _memory(stats)),
        *([] if store(stats) == "disk" else [("host", _host(stats))]),
        *([("disk", disk(stats))] if stats.get("disk_budget_bytes") else []),
        ("process", _process(facts)),
        ("moved", moved(stats)),
        ("recomputed", recomputed(facts)),
        ("now", _speeds(facts, before)),
        ("steps", _steps(facts)),
        ("waiting", _waiting(facts)),
        ("plan", plan({**stats, **facts})),
    ]
    parts: list[Any] = [pairs_table(title, [(name, text) for name, text in rows if str(text)])]
    if facts["waits"]:
        waits = (
            (
                f"{row['seconds']:.3f}",
                str(row["times"]),
                printable(row["function"]),
                "room" if row["variable"] < 0 else f"variable {row['variable']}",
            )
            for row in facts["waits"]
        )
        columns = ("seconds", "times", "function", "waited for")
        title = "what waited longest, as far as the timeline goes back"
        parts += [Text(""), text_table(title, columns, waits, left=columns[2:])]
    return Group(*parts)


def _memory(stats: dict[str, Any]) -> Text:
    budget = max(int(stats["budget_bytes"]), 1)
    width = 40
    used = int(stats["device_bytes"]) - int(stats["free_bytes"]) - int(stats["cached_bytes"])
    filled = min(width, round(width * used / budget))
    cached = min(width - filled, round(width * (int(stats["cached_bytes"]) + int(stats["free_bytes"])) / budget))
    bar = Text("█" * filled, style="blue")
    bar.append("░" * cached, style="dim")
    bar.append("·" * (width - filled - cached), style="dim")
    live = int(stats["live_bytes"])
    bar.append(
        f"  {format_bytes(used)} of {format_bytes(budget)}; {format_bytes(live)} live ({live / budget:.2f} times)"
    )
    return bar


def _host(stats: dict[str, Any]) -> str:
    return f"{format_bytes(stats['host_used_bytes'])} swapped out"


def _process(facts: dict[str, Any]) -> str:
    """The peak memory of the process; nothing where it is one of an earlier release."""
    peak = facts.get("peak_rss_bytes")
    return f"{format_bytes(peak)} of the machine's memory at its peak" if peak else ""


def _speeds(facts: dict[str, Any], before: dict[str, Any] | None) -> str:
    if before is None:
        return ""
    seconds = max(float(facts["unix_seconds"]) - float(before["unix_seconds"]), 1e-3)

    def change(name: str) -> float:
        return (float(facts["stats"][name]) - float(before["stats"][name])) / seconds

    out, into, waits = change("swap_out_bytes"), change("swap_in_bytes"), change("stall_seconds")
    links = f"out {format_bandwidth(out)}, in {format_bandwidth(into)}"
    return f"{links}, {change('functions'):.0f} functions/s, waiting {waits:.0%}"


def _steps(facts: dict[str, Any]) -> str:
    last = facts["last_step_seconds"]
    if not last:
        return "none has ended yet"
    text = f"{facts['steps']}, the last {format_duration(last[-1])}, median {format_duration(statistics.median(last))}"
    return f"{text}  {sparkline(last[-40:])}"


def _waiting(facts: dict[str, Any]) -> str:
    stats = facts["stats"]
    share = stats["stall_seconds"] / facts["elapsed_seconds"] if facts["elapsed_seconds"] > 0 else 0.0
    return (
        f"{format_duration(stats['stall_seconds'])} ({share:.1%}): for variables "
        f"{format_duration(stats['stall_swap_in_seconds'])}, for room {format_duration(stats['stall_room_seconds'])}"
    )


def sparkline(values: list[float]) -> str:
    """One line of text whose characters are as high as the values. Heights begin at 0."""
    highest = max(values, default=0.0)
    return "".join(_BLOCKS[round((len(_BLOCKS) - 1) * value / highest) if highest > 0 else 0] for value in values)
