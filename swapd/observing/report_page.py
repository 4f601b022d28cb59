"""Pages about runs and simulations: each is one HTML file that needs no other file and no script, in light or dark.

Every text is escaped.
"""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from swapd.observing import charts
from swapd.observing.analysis import printable
from swapd.observing.charts import scene_chart, steps_chart
from swapd.observing.report_facts import RunSoFar, advice, comparison, happened, notes, wait_rows
from swapd.units import format_bytes, format_duration

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto 4em; padding: 0 1.2em;
color: var(--ink); background: var(--paper) }
h1 { font-size: 1.45em; margin-bottom: .1em; overflow-wrap: anywhere } h2 { font-size: 1.12em;
margin: 2.2em 0 .4em } p.sub, .note { color: var(--soft) } p { margin: .5em 0 } ul { padding-left: 1.2em }
li { margin: .35em 0 } .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr));
gap: .7em; margin: 1.2em 0 } .card { background: var(--card); border-radius: 8px; padding: .7em .9em }
.card b { font-size: 1.3em; display: block } .card span { color: var(--soft); font-size: .86em }
.wide { overflow-x: auto } table { border-collapse: collapse; min-width: 60% }
td, th { padding: .35em 1.1em .35em 0; text-align: left; vertical-align: top;
border-bottom: 1px solid var(--rule) } th { color: var(--soft); font-weight: 600; font-size: .88em }
td.number, th.number { text-align: right; white-space: nowrap } td code { overflow-wrap: anywhere }
td:nth-child(n + 3) { min-width: 11em } code { font: .92em ui-monospace, monospace } svg { width: 100%;
height: auto; display: block } figure { margin: .6em 0 1.2em } figcaption { color: var(--soft);
font-size: .9em } i { display: inline-block; width: .85em; height: .85em;
border-radius: 2px; margin: 0 .3em 0 .9em; vertical-align: -.05em }
"""
_KEYS = {
    "used": "in use on the device",
    "live": "live, if nothing were swapped (line)",
    "run": "compute",
    "out": "moved out",
    "in": "moved in",
    "demand": "moved on demand",
    "stall": "waiting",
}
_COLOURS = {"used": "used", "live": "soft", "demand": "ink"}


def page(run: RunSoFar, *, advise: bool) -> str:
    """The whole page as text. With `advise`, plans are simulated to find advice, which takes seconds."""
    title = printable(" ".join(run.arguments), 120)
    device = html.escape(str(run.summary["device"]))
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">out-of-core run, process {int(run.summary["pid"])}, on {device}</p>',
        _cards(run),
        "<h2>What happened</h2>",
        bullets(happened(run)),
    ]
    if run.steps:
        caption = "Each iteration; grey: without a plan, as the first ones always are, while the sequence is recorded"
        bars = [(step.seconds, step.stall_seconds, step.followed_plan) for step in run.steps]
        parts.append(figure(steps_chart(bars), caption, ("run", "stall")))
    found = advice(run, simulate=advise)
    parts += ["<h2>What to change</h2>", bullets(found or ["Nothing was found that would help."])]
    parts += ["<h2>Memory over time, against the budget</h2>"]
    whole = run.recording.scene(run.recording.begin, run.recording.now)
    parts.append(figure(scene_chart(whole, lanes=False), "All that was kept of the run", ("used", "live", "stall")))
    span = run.recording.span_of(run.fingerprint)
    predicted = None if run.predicted is None else replace(run.predicted.scene(), link=run.recording.link)
    if span is not None:
        measured = run.recording.scene(span.start, span.end)
        length = max(measured.seconds, predicted.seconds if predicted is not None else 0.0)
        keys = ("used", "live", "run", "out", "in", "demand", "stall")
        parts += ["<h2>One iteration: measured, and as it was predicted</h2>"]
        parts.append(figure(scene_chart(measured, seconds=length), "Measured", keys))
        if predicted is not None:
            parts.append(figure(scene_chart(predicted, seconds=length), "Predicted by the simulator", ()))
    if predicted is not None:
        rows = [[html.escape(cell) for cell in row] for row in comparison(run)]
        parts.append(table(("", "predicted", "measured (median)"), rows, numbers=(1, 2)))
    parts += ["<h2>What waited longest</h2>", _waits(run)]
    parts += ["<h2>About these figures</h2>", f'<div class="note">{bullets(notes(run))}</div>']
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """A page with the given body, which is HTML."""
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    head += f"<title>{html.escape(title)}</title>"
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    head += f"{policy}<style>{charts.STYLE}{_STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _cards(run: RunSoFar) -> str:
    summary, steps = run.summary, run.steps
    cards = [
        (
            format_bytes(summary["live_peak_bytes"]),
            f"live at the peak, {summary['oversubscription']:.2f} times the budget",
        ),
        (format_bytes(summary["budget_bytes"]), "budget"),
    ]
    if steps:
        later = run.steady or steps
        seconds = sum(step.seconds for step in later)
        share = sum(step.stall_seconds for step in later) / seconds if seconds > 0 else 0.0
        cards += [
            (
                format_duration(statistics.median(step.seconds for step in later)),
                "an iteration, median of the main ones' later half",
            ),
            (f"{share:.1%}", "of it functions wait"),
        ]
    cards.append((format_bytes(summary["swap_out_bytes"] + summary["swap_in_bytes"]), "moved in all, both ways"))
    if summary.get("disk_budget_bytes"):
        cards += [
            (format_bytes(summary["disk_peak_bytes"]), "of the disk at most"),
            (format_bytes(summary["peak_rss_bytes"]), "of the machine's memory at most, the whole process"),
        ]
    boxes = (f'<div class="card"><b>{html.escape(b)}</b><span>{html.escape(text)}</span></div>' for b, text in cards)
    return f'<div class="cards">{"".join(boxes)}</div>'


def _waits(run: RunSoFar) -> str:
    if not run.waits:
        return "<p>No function waited for memory in the iterations that are kept.</p>"
    rows = []
    for row in wait_rows(run):
        place = f"<code>{html.escape(row.place)}</code>" if row.place else "not known"
        by = f'<br><span class="note">{html.escape(row.allocated_by)}</span>' if row.allocated_by else ""
        cells = [html.escape(format_duration(row.seconds)), f"{row.share:.1%}"]
        cells += [f"<code>{html.escape(row.function)}</code>", html.escape(row.waited_for), place + by]
        rows.append(cells)
    columns = ("per iteration", "of its time", "function that waited", "waited for", "which was allocated at")
    text = f"Means over {len(run.spans)} iterations of the main sequence, those under a plan where there are any."
    return f'<p class="note">{text}</p>' + table(columns, rows, numbers=(0, 1))


def figure(svg: str, caption: str, keys: Sequence[str]) -> str:
    """A chart with a line under it, which also explains the looks that `keys` names."""
    marks = "".join(f'<i style="background:var(--{_COLOURS.get(key, key)})"></i>{_KEYS[key]}' for key in keys)
    return f"<figure>{svg}<figcaption>{html.escape(caption)}{'.' if marks else ''} {marks}</figcaption></figure>"


def bullets(texts: Iterable[str]) -> str:
    """A list of texts, escaped."""
    return "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in texts) + "</ul>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table of rows that hold HTML. The columns in `numbers` are aligned to the right."""

    def cell(tag: str, at: int, content: str) -> str:
        return f'<{tag} class="number">{content}</{tag}>' if at in numbers else f"<{tag}>{content}</{tag}>"

    head = "".join(cell("th", at, html.escape(column)) for at, column in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(cell("td", at, content) for at, content in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table>{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'
