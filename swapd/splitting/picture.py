"""A picture of a network's plan: memory of each layer against the budget, its parts, and time against memory."""

from __future__ import annotations

from pathlib import Path

from swapd.splitting.network import NOT_VERIFIED, ONE_PIECE, LayerPlan, NetworkPlan

MIB = 1 << 20
_COLORS = {"one piece": "tab:gray", "exact": "tab:green", "differs": "tab:orange", "not verified": "tab:blue"}


def kind_of(plan: LayerPlan) -> str:
    """The kind of a layer, which decides its colour."""
    if plan.exactness in (ONE_PIECE, NOT_VERIFIED):
        return plan.exactness
    return "exact" if plan.exactness.startswith("exact") else "differs"


def draw(plan: NetworkPlan, model: str, path: Path) -> None:
    """Write the picture. Raises ImportError without matplotlib, OSError or ValueError for the path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    shown = [layer for layer in plan.layers if layer.step is not None or layer.kernels]
    rows = 1 + bool(plan.front)
    size = (min(max(6.0, 0.28 * len(shown)), 40.0), 1 + 4 * rows)
    figure, panels = plt.subplots(rows, 1, figsize=size, squeeze=False)
    above = panels[0][0]
    for at, layer in enumerate(shown):
        memory = layer.step.peak_bytes if layer.step is not None else 0
        workspace = layer.workspace_bytes or 0
        above.bar(at, memory / MIB, color=_COLORS[kind_of(layer)])
        above.bar(at, workspace / MIB, bottom=memory / MIB, color=_COLORS[kind_of(layer)], alpha=0.4)
        if layer.step is not None and layer.step.self_number > 1:
            top = (memory + workspace) / MIB
            above.annotate(str(layer.step.self_number), (at, top), ha="center", va="bottom", size=7)
    above.axhline(plan.budget_bytes / MIB, color="red", linewidth=1)
    above.set_xticks(range(len(shown)), [layer.layer.layer.name for layer in shown], rotation=90, size=6)
    above.set_ylabel("MiB at once (pale: workspace); numbers: parts")
    above.set_title(f"{model} under {plan.budget_bytes / MIB:.4g} MiB")
    boxes = [Rectangle((0, 0), 1, 1, color=color) for color in _COLORS.values()]
    above.legend(boxes, list(_COLORS), fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    if plan.front:
        below = panels[1][0]
        below.step([size / MIB for size, _ in plan.front], [1e3 * s for _, s in plan.front], "o-", where="post")
        below.set_xlabel("MiB of workspace for all convolutions")
        below.set_ylabel("ms, measured parts added up")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)
