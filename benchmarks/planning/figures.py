"""Pictures of the raw data of planning. Needs matplotlib (the extra `report`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.planning import scale, suite, table1, vdnn

Records = list[dict[str, Any]]
NOTE = "simulated, no GPU was measured"


def draw_table1(axes: Any, records: Records) -> None:
    """Throughput kept over the batch, ours as lines, the paper's as crosses."""
    for record in records:
        batches = [row["batch"] for row in record["rows"]]
        for policy in table1.POLICIES:
            kept = [100 * table1.kept(row, policy) or None for row in record["rows"]]
            axes.plot(batches, kept, "o-", markersize=4, label=policy, linewidth=2.5 if policy == "auto" else 1.2)
    for name, values in table1.PUBLISHED.items():
        shares = [100 * value / table1.IN_CORE[name] for value in values.values()]
        axes.plot(list(values), shares, "x:", markersize=5, linewidth=0.8, label=f"paper, measured: {name}")
    axes.set(xlabel="batch", ylabel="throughput kept, %", title=f"ResNet-50 in 16 GiB ({NOTE})", ylim=(0, 105))
    axes.legend(fontsize=7)


def draw_suite(axes: Any, records: Records) -> None:
    """Time over the lower bound, sorted by ours; a dot is a policy, a line what ours reaches."""
    cases = sorted(suite.feasible(records), key=lambda case: suite.ratio(case[1], "auto") or 0.0)
    for policy, mark in (("window", "s"), ("nnabla", "^"), ("lms", "v"), ("demand", "x")):
        values = [suite.ratio(made, policy) for _, made in cases]
        axes.plot(range(len(cases)), values, mark, markersize=4, label=policy)
    axes.plot(range(len(cases)), [suite.ratio(made, "auto") for _, made in cases], "k.-", label="auto")
    axes.axhline(suite.NEAR, color="green", linewidth=0.8)
    axes.axhline(suite.FAR, color="red", linewidth=0.8)
    labels = [f"{name} {made['oversubscription']:g}x" for name, made in cases]
    axes.set_xticks(range(len(cases)), labels, rotation=90, fontsize=6)
    axes.set(ylabel="time / lower bound", ylim=(0.95, 2.6), title=f"Suite ({NOTE}); above 2.6 not shown")
    axes.legend(fontsize=7)


def draw_vdnn(axes: Any, records: Records) -> None:
    """Average and maximum memory of vDNN's policies, as shares of the base's."""
    shades = {"all": "tab:blue", "conv": "tab:orange", "dyn": "tab:green"}
    for place, record in enumerate(records):
        for offset, row in enumerate(record["policies"]):
            if "refused" in row:
                continue
            colour, at = shades[row["policy"]], place + 0.27 * (offset - 1)
            share = [100 * row[f"{which}_bytes"] / record["live_peak_bytes"] for which in ("average", "maximum")]
            axes.bar(at, share[0], 0.25, color=colour, label=None if place else row["policy"])
            axes.plot([at - 0.12, at + 0.12], [share[1]] * 2, "k-", linewidth=1)
    axes.set_xticks(range(len(records)), [record["network"] for record in records], rotation=40, ha="right", fontsize=7)
    axes.set(ylabel="% of the base's live peak", title=f"vDNN: average (bars), maximum (lines) ({NOTE})")
    axes.legend(fontsize=7)


def draw_scale(axes: Any, records: Records) -> None:
    """Planning time over functions, and a line of constant time a function."""
    for record in records:
        counts = [point["functions"] for point in record["points"]]
        axes.loglog(counts, [point["planning_seconds"] for point in record["points"]], "o-", label="planning")
        axes.loglog(counts, [1e-4 * count for count in counts], "k:", label="0.1 ms a function")
    axes.set(xlabel="functions", ylabel="seconds", title="Planning time")
    axes.legend()


PICTURES: dict[str, tuple[Callable[[Any, Records], None], tuple[float, float]]] = {
    table1.NAME: (draw_table1, (8, 5)),
    suite.NAME: (draw_suite, (10, 5.5)),
    vdnn.NAME: (draw_vdnn, (10, 4.5)),
    scale.NAME: (draw_scale, (6, 4)),
}


def draw(target: Path) -> list[Path]:
    """Every picture that there are data for. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = []
    for name, (picture, size) in PICTURES.items():
        records = results.load(target, name)
        if records:
            figure, axes = plt.subplots(figsize=size)
            picture(axes, records)
            figure.tight_layout()
            figure.savefig(target / f"{name}.png", dpi=100)
            plt.close(figure)
            drawn.append(target / f"{name}.png")
    return drawn
