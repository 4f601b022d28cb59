"""The summaries of a job's ranks side by side: their main figures, and which rank is slowest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swapd.observing.analysis import printable
from swapd.summary import VERSION
from swapd.units import LARGEST_BYTES, format_bytes, format_duration, format_need

# (label, key of the summary, text of a figure); docs/figures.md says what each means.
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("budget", "budget_bytes", format_bytes),
    ("live peak", "live_peak_bytes", format_bytes),
    ("device peak", "device_peak_bytes", format_bytes),
    ("smallest budget", "min_budget_bytes", lambda count: format_need(int(count))),
    ("main step", "main_step_seconds", format_duration),
    ("steps", "steps", str),
    ("steps under a plan", "planned_iteration_count", str),
    ("stalls", "stall_seconds", format_duration),
    ("moved out", "swap_out_bytes", format_bytes),
    ("moved in", "swap_in_bytes", format_bytes),
    ("of it on demand", "demand_swap_in_bytes", format_bytes),
)
_NAME = re.compile(r"(.+)\.rank([0-9]+(?:\.[0-9]+)?)\.json")  # as swapd/ranks.py makes names
_ALIKE = 1.02  # times: ranks that wait for each other in every step differ by no more


class RanksError(ValueError):
    """The summaries of a job's ranks are not there, cannot be read, or are none; the message says what to do."""


class Rank(NamedTuple):
    """One process's summary, and what it is called beside the others: its rank, or its file."""

    name: str
    path: Path
    summary: dict[str, Any]


def ranks_in(folder: Path) -> list[Rank]:
    """The ranks of the run whose summaries lie in a folder, in order. Other files there (timelines) are left alone.

    Raises:
        RanksError: the folder has no summaries, those of several runs, damaged ones, or not those of all ranks.
    """
    runs: dict[str, dict[str, Rank]] = {}
    wrong: dict[str, RanksError] = {}
    for path in sorted(folder.glob("*.json")):
        if not path.is_file() or (found := _NAME.fullmatch(path.name)) is None:
            continue
        run, number = found.groups()
        try:
            summary = _summary(path)
        except RanksError as error:
            wrong.setdefault(run, error)
            continue
        if number.partition(".")[2] != str(summary.get("pid")):  # else it is a child process of a rank
            runs.setdefault(run, {})[number] = Rank(f"rank {number}", path, summary)
    for run, problem in wrong.items():
        if run in runs or not runs:  # files of other names need not be summaries
            raise problem
    if not runs:
        start = f"start the job with OOC_SUMMARY={folder}/summary.json, or name the files to show"
        raise RanksError(f"no rank wrote a summary (NAME.rank0.json and so on) into {folder}: {start}")
    if len(runs) > 1:
        names = ", ".join(f"{name}.rank*.json" for name in sorted(runs))
        raise RanksError(f"{folder} has the summaries of {len(runs)} runs: name the files of one of {names}")
    (ranks,) = runs.values()
    known = {int(number) for number in ranks if "." not in number}  # "1.0" is the second host's first
    sharing = max(int(rank.summary.get("budget_rank_count") or 1) for rank in ranks.values())
    gap = next((number for number in range(max(sharing, *known, 1)) if number not in known), None)
    if gap is not None:
        raise RanksError(
            f"{folder} has no summary of rank {gap}: it managed nothing, was killed, or wrote on another host. Copy "
            f"its file there, or name the files to show, such as {next(iter(ranks.values())).path}"
        )
    return [ranks[number] for number in sorted(ranks, key=_order)]


def ranks_of(paths: Sequence[Path]) -> list[Rank]:
    """The summaries `paths`, in this order, called by their paths where they are of several runs. Raises RanksError."""
    files = list(dict.fromkeys(paths))
    found = [_NAME.fullmatch(path.name) for path in files]
    names = [f"rank {one[2]}" for one in found if one is not None]
    if len(set(names)) < len(files):
        names = [printable(str(path), 200) for path in files]
    return [Rank(name, path, _summary(path)) for name, path in zip(names, files, strict=True)]


def _order(number: str) -> tuple[int, list[int]]:
    parts = [int(part) for part in number.split(".")]
    return len(parts), parts


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise RanksError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RanksError(f"{path} is damaged, no JSON: run the job again, or name the other ranks' files") from None
    if not isinstance(found, dict) or found.get("version") != VERSION or not _can_be_shown(found):
        raise RanksError(
            f"{path} is no summary of a run (version {VERSION}): take what OOC_SUMMARY=FILE or `swapd run --json FILE` "
            "wrote"
        )
    return found


def _can_be_shown(found: dict[str, Any]) -> bool:
    """Whether the figures are numbers. An older summary may lack some, but none lacks the budget."""
    numbers = [found.get(key) for key in (*(key for _, key, _ in _FIGURES), "budget_rank_count")]
    fit = all(n is None or (type(n) in (int, float) and 0 <= n <= LARGEST_BYTES) for n in numbers)
    return fit and bool(found.get("budget_bytes")) and isinstance(found.get("no_plan_reason") or "", str)


def _steps(rank: Rank) -> float:
    return float(rank.summary.get("main_step_seconds") or 0)


def _stalls(rank: Rank) -> float:
    return float(rank.summary.get("stall_seconds") or 0)


def slowest(ranks: Sequence[Rank]) -> Rank | None:
    """The rank whose main step takes longest; None where all take about as long, or too few are known."""
    known = sorted(filter(_steps, ranks), key=_steps)
    return known[-1] if known and _steps(known[-1]) > _ALIKE * _steps(known[0]) else None


def rows(ranks: Sequence[Rank]) -> tuple[list[str], list[list[str]]]:
    """The columns, and a row for each figure. "none": there is no such figure, or an older summary lacks it."""
    last = slowest(ranks)
    columns = ["", *(f"{rank.name}, slowest" if rank is last else rank.name for rank in ranks)]
    found = [["device", *(printable(str(rank.summary.get("device"))) for rank in ranks)]]
    for label, key, text in _FIGURES:
        figures = [rank.summary.get(key) for rank in ranks]
        found.append([label, *("none" if figure is None else text(figure) for figure in figures)])
    return columns, found


def notes(ranks: Sequence[Rank]) -> Iterator[str]:
    """Sentences about the slowest rank, about who waited for memory, and about ranks without a plan."""
    known = [rank for rank in ranks if _steps(rank)]
    if len(known) < 2:
        yield "Which rank is slowest is not known: it takes two ranks with at least two iterations."
    elif (last := slowest(known)) is not None:
        first = min(known, key=_steps)
        yield (
            f"The slowest is {last.name}: its main step takes {format_duration(_steps(last))}, "
            f"{_steps(last) / _steps(first):.2f} times that of {first.name}, the fastest."
        )
    else:
        yield "None is the slowest: all main steps take about as long, as those of ranks that wait for each other do."
    most, least = max(ranks, key=_stalls), min(ranks, key=_stalls)
    if _stalls(most) > _ALIKE * _stalls(least):
        waited = f"{format_duration(_stalls(most))}; {least.name} least: {format_duration(_stalls(least))}"
        yield f"Functions waited longest for memory in {most.name}: {waited}."
    reasons = [(rank.summary.get("no_plan_reason"), rank.name) for rank in ranks]
    for reason in dict.fromkeys(reason for reason, _ in reasons if reason):
        yield f"{', '.join(name for why, name in reasons if why == reason)}: {printable(reason, 400)}."


def facts(ranks: Sequence[Rank]) -> dict[str, Any]:
    """What `rows` and `notes` show, for JSON; figures have the summary's keys and units."""
    keys = ("device", *(key for _, key, _ in _FIGURES), "no_plan_reason")
    found = [{"name": name, "file": str(path), **{key: s.get(key) for key in keys}} for name, path, s in ranks]
    last = slowest(ranks)
    return {"ranks": found, "slowest": None if last is None else last.name, "notes": list(notes(ranks))}
