"""A network's plan in parts: mmCNN's numbers for each layer, micro-cuDNN's micro-batches for each convolution.

Layers, measured costs and verdicts come from an integration (`to_json` and `from_json` are the way between processes);
this module only calculates. What was not measured has no time, and what was not verified is not called exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swapd.splitting.configurations import Configuration, KernelTable, MicroConfiguration
from swapd.splitting.division import divide_workspace, fronts_of
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.reuse import fastest_division, smallest_workspace_bytes
from swapd.splitting.segments import MOST_PREFETCH_PARTS, Layer, LayerStep, schedule_layers
from swapd.splitting.store import Verdict

FRONT_POINTS = 24
ONE_PIECE, NOT_VERIFIED = "one piece", "not verified"


@dataclass(frozen=True)
class NetworkLayer:
    """A layer with what is known of it."""

    layer: Layer
    operator: str
    shapes: str
    kernels: tuple[KernelTable, ...] = ()  # of a convolution: one forwards, two backwards; no rows if not measured
    verdicts: tuple[Verdict, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> NetworkLayer:
        """The inverse of `to_json`. Raises TypeError, KeyError or ValueError for anything else."""
        kernels = tuple(
            KernelTable(k["name"], k["batch"], tuple(MicroConfiguration(**row) for row in k["rows"]))
            for k in fields["kernels"]
        )
        verdicts = tuple(Verdict(**verdict) for verdict in fields["verdicts"])
        return cls(Layer(**fields["layer"]), fields["operator"], fields["shapes"], kernels, verdicts)


@dataclass(frozen=True)
class KernelPlan:
    """How one kernel of a convolution runs."""

    name: str
    configuration: Configuration | None  # None if nothing fits, or nothing was measured
    limit_bytes: int
    problem: str | None = None  # why there is no configuration


@dataclass(frozen=True)
class LayerPlan:
    """One line of the plan."""

    layer: NetworkLayer
    step: LayerStep | None  # None where Algorithm 1 does not apply (training)
    kernels: tuple[KernelPlan, ...]

    @property
    def seconds(self) -> float | None:
        """The time of its convolution's kernels, as measured on whole layers; None if one of them has no time."""
        times = [k.configuration.seconds for k in self.kernels if k.configuration is not None]
        return sum(times) if times and len(times) == len(self.kernels) else None

    @property
    def workspace_bytes(self) -> int | None:
        """The largest workspace of its kernels, which run one after the other; None if none has a configuration."""
        sizes = [k.configuration.workspace_bytes for k in self.kernels if k.configuration is not None]
        return max(sizes, default=None)

    @property
    def exactness(self) -> str:
        """What is known of the layer in parts, in a few words."""
        divided = self.step is not None and self.step.self_number > 1
        micro = any(k.configuration is not None and len(k.configuration.parts) > 1 for k in self.kernels)
        if not divided and not micro:
            return ONE_PIECE
        best = min(self.layer.verdicts, key=lambda v: (not v.identical, v.largest_difference), default=None)
        if best is None:
            return NOT_VERIFIED
        of = f"{best.how}, {best.parts} part{'' if best.parts == 1 else 's'}"
        return f"exact ({of})" if best.identical else f"differs by {best.largest_difference:.1g} ({of})"


@dataclass(frozen=True)
class NetworkPlan:
    """What `swapd split` shows."""

    layers: tuple[LayerPlan, ...]
    budget_bytes: int
    training: bool
    front: tuple[tuple[int, float], ...]  # bytes of one workspace for all kernels, least seconds within them
    not_measured: int  # kernels without measurements


def plan_network(
    layers: Sequence[NetworkLayer],
    budget_bytes: int,
    *,
    training: bool = False,
    workspace_bytes: int | None = None,
    division: str = "WR",
    policy: str = "all",
    most_prefetch_parts: int = MOST_PREFETCH_PARTS,
) -> NetworkPlan:
    """Plan a network under a budget.

    Args:
        layers: in the order in which they run.
        budget_bytes: of device memory.
        training: whether the network is trained; if so, Algorithm 1, which is for inference, is left out.
        workspace_bytes: the most that each kernel may take (WR), or all kernels together (WD). If None, it is what the
            budget leaves beside the layer's own parts (WR in inference), otherwise the budget.
        division: "WR" or "WD".
        policy: of micro-batches.

    Raises:
        LimitTooSmallError: a layer does not fit in its smallest parts, or WD's smallest workspaces do not.
        ValueError: an unknown division or policy.
    """
    if division not in ("WR", "WD"):
        raise ValueError(f"there is no division {division!r}; there are: WR, WD")
    steps: list[LayerStep | None] = [None] * len(layers)
    if not training:
        steps = list(schedule_layers([layer.layer for layer in layers], budget_bytes, most_prefetch_parts))
    tables = [table for layer in layers for table in layer.kernels]
    known = [table for table in tables if table.rows]
    if division == "WD":
        chosen = _shared(known, budget_bytes if workspace_bytes is None else workspace_bytes, policy)
    made = []
    for layer, step in zip(layers, steps):
        kernels = []
        for table in layer.kernels:
            room = budget_bytes - (step.peak_bytes if step is not None else 0)
            limit = room if workspace_bytes is None else min(room, workspace_bytes)
            if division == "WD" and table.rows:
                kernels.append(KernelPlan(table.name, chosen[table.name], chosen[table.name].workspace_bytes))
            else:
                kernels.append(_own(table, limit, policy))
        made.append(LayerPlan(layer, step, tuple(kernels)))
    front = time_memory_front(known, policy)
    return NetworkPlan(tuple(made), budget_bytes, training, front, len(tables) - len(known))


def _own(table: KernelTable, limit_bytes: int, policy: str) -> KernelPlan:
    if not table.rows:
        return KernelPlan(table.name, None, limit_bytes, "not measured")
    try:
        chosen = fastest_division(table.cautious(), limit_bytes, policy)
        return KernelPlan(table.name, table.measured(chosen), limit_bytes)
    except LimitTooSmallError as error:
        return KernelPlan(table.name, None, limit_bytes, f"needs a workspace of {error.smallest_bytes} bytes")


def _shared(tables: Sequence[KernelTable], limit_bytes: int, policy: str) -> dict[str, Configuration]:
    cautious = [table.cautious() for table in tables]
    try:
        chosen = divide_workspace(fronts_of(cautious, limit_bytes, policy), limit_bytes).configurations
        return {table.name: table.measured(chosen[table.name]) for table in tables}
    except LimitTooSmallError:
        need = sum(smallest_workspace_bytes(table, policy) for table in cautious)
        raise LimitTooSmallError(f"the workspace of {len(cautious)} kernels", limit_bytes, need) from None


def time_memory_front(
    tables: Sequence[KernelTable], policy: str = "all", points: int = FRONT_POINTS
) -> tuple[tuple[int, float], ...]:
    """Least seconds of all kernels by the bytes of one workspace that WD divides among them, from the smallest on.

    Empty where nothing was measured.
    """
    if not tables:
        return ()
    most = max(row.workspace_bytes for table in tables for row in table.rows)
    fronts = fronts_of([table.cautious() for table in tables], most, policy)
    smallest = sum(front[0].workspace_bytes for front in fronts.values())
    largest = sum(front[-1].workspace_bytes for front in fronts.values())
    found: list[tuple[int, float]] = []
    for i in range(points):
        limit = round(smallest + (largest - smallest) * (i / (points - 1)) ** 2)  # closer where the front is steep
        division = divide_workspace(fronts, limit)
        seconds = sum(table.measured(division.configurations[table.name]).seconds for table in tables)
        if not found or seconds < found[-1][1]:
            found.append((division.workspace_bytes, seconds))
    return tuple(found)
