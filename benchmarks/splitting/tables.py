"""The table and the picture of measured divisions."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.splitting.plans import MIB


def ratios(record: dict[str, Any], plan: dict[str, Any]) -> list[float]:
    """Each round's time over that of the undivided plan with the same mode and limit, in the same round."""
    whole = next(
        p
        for p in record["plans"]
        if (p["mode"], p["limit_mib"], p["policy"]) == (plan["mode"], plan["limit_mib"], "undivided")
    )
    mine, others = (record["executed_seconds"][p["executed"]] for p in (plan, whole))
    return [a / b for a, b in zip(mine, others)]


def whole_noise(record: dict[str, Any]) -> float:
    """How far the passes of one plan are apart: the largest over the least, less 1; the median over plans."""
    return statistics.median(max(times) / min(times) - 1 for times in record["executed_seconds"])


def row(record: dict[str, Any], plan: dict[str, Any]) -> list[str]:
    """One plan's line."""
    found = ratios(record, plan)
    over = plan["over_limit"]
    workspace = max(plan["executed_workspace_bytes"]) if plan["mode"] == "WR" else sum(plan["executed_workspace_bytes"])
    return [
        f"{record['network']}, {record['batch']}",
        plan["mode"],
        f"{plan['limit_mib']}",
        plan["policy"],
        f"{plan['divided']} of {record['kernels']}" + (f"; {over} over" if over else ""),
        f"{workspace / MIB:,.1f}",
        f"{1e3 * plan['predicted_seconds']:,.0f}",
        f"{1e3 * statistics.median(record['executed_seconds'][plan['executed']]):,.0f}",
        ""
        if plan["policy"] == "undivided"
        else f"{statistics.median(found):.3f} ({min(found):.3f} to {max(found):.3f})",
    ]


HEADER = (
    "network, batch|mode|MiB a kernel|policy|kernels divided|workspace MiB|predicted ms|executed ms|"
    "over undivided (least to most)"
).split("|")


def text(records: list[dict[str, Any]]) -> str:
    """Markdown of everything that was measured."""
    lines = ["# Convolutions in parts, measured", ""]
    if not records:
        return "\n".join([*lines, "Nothing was measured yet.", ""])
    lines += [
        "Made by `python -m benchmarks.splitting.measured`; the raw data are in `measured/`. Times are of this CPU:",
        "every pass runs BackwardFilter, BackwardData and Forward of all layers. WR: each kernel may use so much;",
        "workspace is the largest. WD: all kernels together may use so much times their number; workspace is the sum.",
        "`over`: kernels of which nothing fits undivided; their smallest is run all the same, to compare with.",
        "The last column is the median over rounds of the time beside the undivided plan of the same round.",
        "",
    ]
    for record in records:
        noise = record["noise"]
        lines.append(
            f"- {record['network']}: {machine.words(record['machine'])}, {record['threads']} threads; load "
            f"{record['machine']['load_average'][0]}. Sizes measured: {', '.join(map(str, record['sizes']))}. "
            f"{record['measurements']} measurements (a second run: {record['measurements_of_a_second_run']}), their "
            f"spread {100 * noise['median']:.1f}% (median), {100 * noise['ninth_decile']:.1f}% (9 of 10 below). "
            f"Passes of one plan: {100 * whole_noise(record):.1f}% apart. Divisions that were not faster in turns, "
            f"and not taken: {record['not_confirmed']} of {record['confirmed'] + record['not_confirmed']}."
        )
    rows = [row(record, plan) for record in records for plan in record["plans"]]
    return "\n".join(lines) + "\n\n" + results.markdown(HEADER, rows)


def draw(records: list[dict[str, Any]], path: Path) -> Path:
    """Time beside undivided for each network, limit and policy, with its spread. Raises ImportError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, max(len(records), 1), figsize=(3.4 * max(len(records), 1), 4), squeeze=False)
    for axes, record in zip(panels[0], records):
        shown = [plan for plan in record["plans"] if plan["policy"] != "undivided"]
        for at, plan in enumerate(shown):
            found = ratios(record, plan)
            middle = statistics.median(found)
            color = "tab:blue" if plan["policy"] == "all" else "tab:orange"
            axes.errorbar(at, middle, [[middle - min(found)], [max(found) - middle]], fmt="o", color=color, capsize=3)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(shown)), [f"{p['mode']} {p['limit_mib']}" for p in shown], rotation=90)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.95), max(high, 1.05))  # otherwise noise would look large where there is little else
        axes.set_title(f"{record['network']}, batch {record['batch']}", fontsize=9)
    panels[0][0].set_ylabel("time / undivided (bars: all rounds)")
    handles = [plt.Line2D([], [], marker="o", linestyle="", color=c) for c in ("tab:orange", "tab:blue")]
    figure.legend(handles, ["powerOfTwo", "all"], loc="upper left", fontsize=7)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
