"""Charts as SVG text, for a page or a file of their own. Colours are classes of `STYLE`, for light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from swapd.observing.recording import Scene
from swapd.units import LARGE_UNITS, TIME_UNITS, format_bytes, format_duration

WIDTH, LEFT, RIGHT = 1060, 78, 12  # in the units of the drawing
_LANE = 22
Units = Sequence[tuple[str, float]]
Scale = Callable[[float], float]  # from a value to a place in the drawing
_BYTES = (*LARGE_UNITS, ("B", 1))
_MOST_POINTS = 2000  # of a line
_MOST_BARS = 400
_NEAR = 1 / 3000  # of the width: bars that are closer together than this are drawn as one
STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d2329; --soft: #5b6670; --rule: #d9dee3;
--card: #f5f7f9; --used: #4878a8; --out: #d98c32; --in: #7d5ba6; --run: #4f9a60; --stall: #c0392b;
--unplanned: #9aa5ae } @media (prefers-color-scheme: dark) { :root { --paper: #14181c; --ink: #e4e8ec;
--soft: #9aa5ae; --rule: #333b43; --card: #1d2329; --used: #5b8fc4; --out: #e0a04e; --in: #a184cf;
--run: #5fb173; --stall: #e0604f; --unplanned: #66717b } }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft) } .end { text-anchor: end }
.halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px } .middle { text-anchor: middle }
.grid { stroke: var(--rule); stroke-width: .8 } .axis-line { stroke: var(--rule) } .budget { stroke: var(--ink);
stroke-width: 1.4; stroke-dasharray: 6 4 } .used { fill: var(--used); fill-opacity: .55 } .live { fill: none;
stroke: var(--soft); stroke-width: 1.3 } .run { fill: var(--run) } .out { fill: var(--out) }
.in { fill: var(--in) } .stall { fill: var(--stall) } .faint { fill-opacity: .16 } .demand { fill: var(--ink) }
.unplanned { fill: var(--unplanned) } .sheet { fill: var(--paper) }
"""


def scene_chart(scene: Scene, lanes: bool = True, seconds: float | None = None) -> str:
    """Memory against the budget, and what computation and links do. `seconds` gives the axis another length."""
    length = seconds or scene.seconds or 1.0
    tall, top = 190, 16
    highest = max([scene.budget_bytes, *(value for _, value in (*scene.memory, *scene.live))], default=1) * 1.08 or 1.0

    def x(when: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(when, 0.0), length) / length

    def y(value: float) -> float:
        return top + tall * (1 - value / highest)

    parts = _grid("device memory", top, highest, _BYTES, y)
    for start, wide in merged(scene.stalls, length):
        parts.append(_box(x(start), top, x(start + wide) - x(start), tall, "stall faint"))
    area = _steps(_thinned(scene.memory), scene.seconds, x, y)
    if area:
        parts.append(f'<path class="used" d="{area} V{y(0):.1f} H{x(0):.1f} Z"/>')
    live = _steps(_thinned(scene.live), scene.seconds, x, y)
    if live:
        parts.append(f'<path class="live" d="{live}"/>')
    parts.append(_line(LEFT, y(scene.budget_bytes), WIDTH - RIGHT, y(scene.budget_bytes), "budget"))
    words = f"budget {format_bytes(scene.budget_bytes)}"
    parts.append(_text(WIDTH - RIGHT - 4, y(scene.budget_bytes) - 5, words, "axis end halo"))
    bottom = top + tall
    if lanes:
        rows: tuple[tuple[str, str, Sequence[Any]], ...] = (
            ("compute", "run", scene.runs),
            (f"{scene.link} out", "out", scene.outs),
            (f"{scene.link} in", "in", scene.ins),
            ("waiting", "stall", scene.stalls),
        )
        for name, kind, bars in rows:
            bottom += _LANE
            parts.append(_text(LEFT - 7, bottom - 3, name, "axis end"))
            groups = ((kind, True), ("demand", False)) if kind in ("out", "in") else ((kind, None),)
            for look, planned in groups:
                chosen = [bar for bar in bars if planned is None or bar.is_planned == planned]
                for start, wide in merged(chosen, length):
                    left = x(start)
                    parts.append(_box(left, bottom - 14, max(x(start + wide) - left, 0.6), 14, look))
    parts += _time_axis(length, bottom, x)
    label = "memory over time against the budget" + (f", with what computation and {scene.link} do" if lanes else "")
    return _svg(bottom + 36, label, parts)


def steps_chart(steps: Sequence[tuple[float, float, bool]]) -> str:
    """A bar for each iteration (seconds, of which waiting, under a plan). If there are many, neighbours share a bar."""
    share = max(1, math.ceil(len(steps) / _MOST_BARS))
    groups = [steps[at : at + share] for at in range(0, len(steps), share)]
    bars = [
        (sum(s[0] for s in group) / len(group), sum(s[1] for s in group) / len(group), all(s[2] for s in group))
        for group in groups
    ]
    tall, top = 120, 16
    highest = max((bar[0] for bar in bars), default=1.0) * 1.08 or 1.0
    wide = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)

    def y(seconds: float) -> float:
        return top + tall * (1 - seconds / highest)

    what = f"mean time of {share} iterations" if share > 1 else "time of an iteration"
    parts = _grid(what, top, highest, TIME_UNITS, y, wanted=3)
    for at, (seconds, waiting, planned) in enumerate(bars):
        left, width = LEFT + at * wide, max(min(wide * 0.86, 40.0), 0.8)
        middle = y(min(waiting, seconds))
        words = f"iteration {at * share + 1}: {format_duration(seconds)}, waiting {format_duration(waiting)}, " + (
            "under a plan" if planned else "no plan"
        )
        look = "run" if planned else "unplanned"
        parts.append(_box(left, y(seconds), width, middle - y(seconds), look, words))
        parts.append(_box(left, middle, width, y(0) - middle, "stall", words))
    parts.append(_text(LEFT, top + tall + 16, "1", "axis"))
    if len(steps) > 1:
        end = LEFT + (len(bars) - 1) * wide
        parts.append(_text(end, top + tall + 16, f"{len(steps)}", "axis"))
    return _svg(top + tall + 22, "time of each iteration, and how much of it was waiting", parts)


def starts_chart(simulated: Sequence[float], measured: Sequence[float]) -> str:
    """Measured against simulated starts of the same functions, in seconds. On the dashed line the two are the same."""
    side, top = 460, 16
    last = max((*simulated, *measured), default=0.0) or 1.0
    unit, scale = _unit(last, TIME_UNITS)

    def x(when: float) -> float:
        return LEFT + side * when / (1.04 * last)

    def y(when: float) -> float:
        return top + side - side * when / (1.04 * last)

    parts = _grid("measured start", top, last, TIME_UNITS, y, right=LEFT + side)
    for value in ticks(last / scale):
        parts.append(_text(x(value * scale), top + side + 16, f"{value:g}", "axis middle"))
    parts.append(_line(x(0), y(0), x(last), y(last), "budget"))
    for at, (start, found) in enumerate(zip(simulated, measured)):
        words = f"function {at}: simulated {format_duration(start)}, measured {format_duration(found)}"
        parts.append(_box(x(start) - 2, y(found) - 2, 4, 4, "run", words))
    parts.append(_text(LEFT + side, top + side + 32, f"simulated start in {unit}", "axis end"))
    return _svg(top + side + 40, "measured against simulated starts of functions", parts)


def picture(chart: str, caption: str) -> str:
    """A chart as a file of its own, with a line over it."""
    box, _, content = chart.partition(">")
    height = float(box.split('viewBox="')[1].split('"')[0].split()[3]) + _LANE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {-_LANE} {WIDTH} {height:.0f}">'
    sheet = f'<rect class="sheet" x="0" y="{-_LANE}" width="{WIDTH}" height="{height:.0f}"/>'
    return f"{head}<style>{STYLE}</style>{sheet}{_text(LEFT, -6, caption, 'axis')}{content}\n"


def merged(spans: Iterable[Any], seconds: float) -> list[tuple[float, float]]:
    """(start, length) of each span by its start, cut to 0 ... `seconds`. Spans that nearly touch become one."""
    near = seconds * _NEAR
    found: list[list[float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, 0.0), min(span.end, seconds)
        if end < start:
            continue
        if found and start - found[-1][1] < near:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return [(start, end - start) for start, end in found]


def ticks(highest: float, wanted: int = 4) -> list[float]:
    """Round numbers from 0 up to at most `highest`."""
    if not (highest > 0 and math.isfinite(highest)):
        return [0.0]
    rough = highest / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [round(step * n, 12) for n in range(math.floor(highest / step + 1e-9) + 1)]


def _grid(
    what: str, top: float, highest: float, units: Units, y: Scale, wanted: int = 4, right: float = WIDTH - RIGHT
) -> list[str]:
    """The upright axis from 0 to `highest`, with its lines, and over it what it shows in which unit."""
    unit, size = _unit(highest, units)
    parts = [_text(LEFT, top - 5, f"{what} in {unit}", "axis")]
    for value in ticks(highest / size, wanted):
        height = y(value * size)
        parts.append(_line(LEFT, height, right, height, "grid"))
        parts.append(_text(LEFT - 7, height + 4, f"{value:g}", "axis end"))
    return parts


def _time_axis(length: float, bottom: float, x: Scale) -> Iterable[str]:
    unit, scale = _unit(length, TIME_UNITS)
    yield _line(LEFT, bottom + 4, WIDTH - RIGHT, bottom + 4, "axis-line")
    for value in ticks(length / scale, 8):
        yield _text(x(value * scale), bottom + 18, f"{value:g}", "axis middle")
    yield _text(WIDTH - RIGHT, bottom + 32, unit, "axis end")


def _unit(highest: float, units: Units) -> tuple[str, float]:
    return next((row for row in units if highest >= row[1]), units[-1])


def _thinned(points: Sequence[tuple[float, int]]) -> Sequence[tuple[float, int]]:
    """At most some thousand points. Of more, it keeps the highest and the lowest of each group, in their order."""
    share = math.ceil(len(points) / (_MOST_POINTS / 2))
    if share <= 2:
        return points
    kept: list[tuple[float, int]] = []
    for at in range(0, len(points), share):
        group = points[at : at + share]
        kept += sorted({min(group, key=lambda p: p[1]), max(group, key=lambda p: p[1])})
    return kept


def _steps(points: Sequence[tuple[float, int]], end: float, x: Scale, y: Scale) -> str:
    if not points:
        return ""
    path = [f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"]
    path += [f"H{x(when):.1f}V{y(value):.1f}" for when, value in points[1:]]
    return "".join(path) + f"H{x(end):.1f}"


def _box(x: float, y: float, wide: float, tall: float, kind: str, words: str = "") -> str:
    title = f"<title>{html.escape(words)}</title>" if words else ""
    box = f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0):.1f}" height="{max(tall, 0):.1f}"'
    return f"{box}>{title}</rect>" if title else f"{box}/>"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{html.escape(words)}</text>'


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(label, quote=True)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"
