"""Pictures of a simulated iteration. matplotlib (the extra `report`) draws them and is imported when it is needed."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swapd.planning.problem import Problem
from swapd.simulation.events import Events
from swapd.units import GIB, KIB, MIB, TIB, format_bytes, format_duration

FORMATS = ("png", "svg")
_PIXELS = 3000  # what is closer together than the picture's width by this is drawn as one
_BLUE, _ORANGE, _RED, _GREY, _GREEN = "#4878a8", "#d98c32", "#c0392b", "#8a8a8a", "#4f9a60"
_UNITS = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


class MissingLibraryError(RuntimeError):
    """matplotlib is not installed; the message says how to get it."""


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches, that needs no display. Raises MissingLibraryError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingLibraryError(
            f"pictures need matplotlib, which cannot be imported ({error}): pip install 'ooc-alloc[report]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def timeline_figure(problem: Problem, events: Events, title: str) -> Any:
    """Memory over time with the budget, and what computation and links do, on one axis of time."""
    figure = new_figure(11, 6.5)
    memory, rows = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.5))
    scale, unit = _scale(events.seconds)
    _draw_memory(memory, problem, events, scale)
    _draw_rows(rows, events, scale)
    memory.set_title(title, loc="left", fontsize=11, parse_math=False)
    rows.set_xlabel(f"simulated time in {unit}, one iteration of the steady state")
    rows.set_xlim(0, events.seconds / scale if events.seconds > 0 else 1)
    return figure


def measured_figure(simulated: NDArray[np.float64], measured: NDArray[np.float64], title: str) -> Any:
    """Measured against simulated starts of the functions, both in seconds since the iteration began."""
    figure = new_figure(6.5, 6)
    axes = figure.subplots()
    last = float(max(simulated.max(initial=0.0), measured.max(initial=0.0)))
    scale, unit = _scale(last)
    axes.plot([0, last / scale], [0, last / scale], "--", color=_GREY, linewidth=1, label="the same")
    axes.plot(simulated / scale, measured / scale, ".", color=_BLUE, markersize=4, label="functions")
    axes.set_xlabel(f"simulated start in {unit}")
    axes.set_ylabel(f"measured start in {unit}")
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.set_aspect("equal")
    axes.legend(frameon=False, loc="upper left")
    _tidy(axes)
    return figure


def rendered(figure: Any, kind: str) -> bytes:
    """The picture's file: ``png`` or ``svg``. The same figure gives the same bytes."""
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "swapd"}):
        figure.savefig(buffer, format=kind, dpi=130, metadata=metadata)
    return buffer.getvalue()


def inline(figure: Any) -> str:
    """The picture as a ``data:`` address, for a page that needs no other file."""
    return "data:image/png;base64," + base64.b64encode(rendered(figure, "png")).decode("ascii")


def _draw_memory(axes: Any, problem: Problem, events: Events, scale: float) -> None:
    chunk, slabs = problem.chunk_bytes, problem.slab_chunks
    live = (problem.live + slabs) * chunk
    highest = max(float(live.max(initial=0)), float(problem.budget_bytes), 1.0)
    size, unit = next((size, unit) for size, unit in _UNITS if highest >= size)
    when, resident = _steps([(held.start, (held.chunks + slabs) * chunk) for held in events.held], events.seconds)
    starts, lives = _steps([(run.start, int(live[run.function])) for run in events.runs], events.seconds)
    axes.fill_between(
        when / scale, resident / size, step="post", color=_BLUE, alpha=0.55, linewidth=0, label="resident"
    )
    label = "live, if nothing were swapped"
    axes.step(starts / scale, lives / size, where="post", color=_GREY, linewidth=1.2, label=label)
    axes.axhline(problem.budget_bytes / size, color="black", linewidth=1.2, linestyle="--")
    axes.annotate(
        f"budget {format_bytes(problem.budget_bytes)}",
        (1, problem.budget_bytes / size),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
    )
    for at, (start, length) in enumerate(merged(events.stalls, events.seconds)):
        once = {"label": "stall"} if at == 0 else {}
        axes.axvspan(start / scale, (start + length) / scale, color=_RED, alpha=0.13, linewidth=0, **once)
    axes.set_ylabel(f"device memory in {unit}")
    axes.set_ylim(0, 1.14 * highest / size)
    axes.legend(loc="upper left", ncols=3, fontsize=9, facecolor="white", edgecolor="none", framealpha=0.9)
    _tidy(axes)


def _draw_rows(axes: Any, events: Events, scale: float) -> None:
    outs, ins = events.copies_of(is_out=True), events.copies_of(is_out=False)
    rows: tuple[tuple[str, tuple[tuple[Sequence[Any], str], ...]], ...] = (
        ("compute", ((events.runs, _GREEN),)),
        ("out link", _by_origin(outs, _ORANGE)),
        ("in link", _by_origin(ins, _BLUE)),
        ("stalls", ((events.stalls, _RED),)),
    )
    for place, (_, parts) in enumerate(rows):
        for spans, colour in parts:
            bars = [(start / scale, length / scale) for start, length in merged(spans, events.seconds)]
            axes.broken_barh(bars, (place - 0.36, 0.72), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if any(not copy.is_planned for copy in events.copies):
        axes.plot([], [], color="black", linewidth=5, label="on demand")
        axes.legend(loc="upper right", bbox_to_anchor=(1, 1.22), fontsize=9, frameon=False)
    _tidy(axes)
    axes.grid(axis="y", visible=False)


def _by_origin(copies: Sequence[Any], colour: str) -> tuple[tuple[Sequence[Any], str], ...]:
    """What was planned in its colour, what was not in black."""
    return (
        ([copy for copy in copies if copy.is_planned], colour),
        ([copy for copy in copies if not copy.is_planned], "black"),
    )


def merged(spans: Iterable[Any], seconds: float) -> list[tuple[float, float]]:
    """(start, length) of what has a start and an end, cut to 0 ... seconds; those that nearly touch become one."""
    near = seconds / _PIXELS
    found: list[list[float]] = []
    for span in spans:
        start, end = max(span.start, 0.0), min(span.end, seconds)
        if end < start:
            continue
        if found and start - found[-1][1] < near:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end - start) for start, end in found]


def _steps(points: Sequence[tuple[float, int]], seconds: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times and values of a line in steps that goes on to the end; at most a few for each pixel."""
    kept: list[tuple[float, float]] = []
    for when, value in points:
        if kept and kept[-1][1] == value:
            continue
        kept.append((when, float(value)))
    kept = [(0.0, kept[0][1]), *kept, (seconds, kept[-1][1])] if kept else [(0.0, 0.0), (seconds, 0.0)]
    return np.array([when for when, _ in kept]), np.array([value for _, value in kept])


def _scale(seconds: float) -> tuple[float, str]:
    return next((row for row in _SCALES if seconds >= row[0]), _SCALES[-1])


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def caption(problem: Problem, policy: str, seconds: float, stall_seconds: float) -> str:
    """One line over the picture."""
    peak = problem.live_peak_chunks * problem.chunk_bytes
    return (
        f"{policy}: live peak {format_bytes(peak)} in {format_bytes(problem.budget_bytes)}, "
        f"a step of {format_duration(seconds)}, of which stalls {format_duration(stall_seconds)} (simulated)"
    )
