"""Pictures of the raw data: `python -m benchmarks.figures [FOLDER]`. Needs matplotlib (the extra `report`)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import fragmentation, results, step_time


def draw_step_time(target: Path, records: list[dict[str, Any]]) -> Path:
    """Steps over the bound by mode, one panel a workload; a dot is a round, the line across is the target."""
    import matplotlib.pyplot as plt

    names = sorted({record["workload"] for record in records})
    figure, panels = plt.subplots(1, len(names), figsize=(5 * len(names), 4), sharey=True, squeeze=False)
    for axes, name in zip(panels[0], names):
        mine = [record for record in records if record["workload"] == name]
        groups = step_time.groups(mine)
        labels = []
        for place, ((_, x, mode), group) in enumerate(groups.items()):
            ratios = [step_time.median(record) / record["bound_seconds"] for record in group]
            colour = "tab:orange" if mode == "demand" else "tab:blue"
            axes.bar(place, sum(ratios) / len(ratios), color=colour, width=0.7)
            axes.plot([place] * len(ratios), ratios, "k.", markersize=4)
            if mode != "demand":
                axes.plot([place - 0.4, place + 0.4], [step_time.TARGETS[x]] * 2, "r-", linewidth=1)
            labels.append(f"{x:g}x {mode}")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right")
        axes.set_title(name)
    panels[0][0].set_ylabel("step time / bound")
    figure.suptitle("Emulated link, transfer time = compute time; red: target", fontsize=10)
    return _save(figure, target / "step_time.png")


def draw_fragmentation(target: Path, records: list[dict[str, Any]]) -> Path:
    """Waste and step time over chunk size."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for name in sorted({record["workload"] for record in records}):
        mine = [r for r in records if r["workload"] == name and r["mode"] != "in-core" and "failed" not in r]
        sizes = [record["chunk_bytes"] / 1024 for record in mine]
        left.plot(sizes, [100 * r["summary"]["internal_fragmentation_ratio"] for r in mine], "o-", label=name)
        right.plot(sizes, [step_time.median(r) for r in mine], "o-", label=name)
    left.axhline(3, color="red", linewidth=1)
    left.set_ylabel("internal waste at the live peak, %")
    right.set_ylabel("step, s")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("chunk, KiB")
        axes.legend()
    return _save(figure, target / "fragmentation.png")


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path


def draw(target: Path) -> list[Path]:
    """Every picture that there are data for. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = []
    for name, picture in ((step_time.NAME, draw_step_time), (fragmentation.NAME, draw_fragmentation)):
        records = results.load(target, name)
        if records:
            drawn.append(picture(target, records))
    return drawn


if __name__ == "__main__":
    for drawn_path in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else results.folder()):
        print(drawn_path)
