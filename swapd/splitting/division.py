"""WD, workspace division: one workspace for a whole network, divided among its kernels (micro-cuDNN, section III-C).

    min  sum over k, c of T_k(c) x_kc                                  (1)
    subject to  sum over k, c of M_k(c) x_kc <= M                      (2)
                sum over c of x_kc = 1 for every kernel k              (3)
                x_kc in {0, 1}                                         (4)

The configurations c of a kernel are its desirable ones (`micro_batches`). `multiple_choice` solves the programme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swapd.splitting.configurations import Configuration, KernelTable
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.micro_batches import pareto_front
from swapd.splitting.multiple_choice import Option, choose, fractional_bound, greedy_choice

Fronts = Mapping[str, Sequence[Configuration]]


@dataclass(frozen=True)
class Division:
    """A configuration for each kernel."""

    configurations: dict[str, Configuration]
    variables: int  # of the programme: desirable configurations of all kernels
    proved: bool  # that no other is faster
    bound_seconds: float  # what no division beats, within the same limit

    @property
    def seconds(self) -> float:
        """The time of all kernels, one after the other."""
        return math.fsum(configuration.seconds for configuration in self.configurations.values())

    @property
    def workspace_bytes(self) -> int:
        """The workspaces of all kernels together: each kernel has a segment of its own."""
        return sum(configuration.workspace_bytes for configuration in self.configurations.values())


def fronts_of(tables: Sequence[KernelTable], limit_bytes: int) -> dict[str, tuple[Configuration, ...]]:
    """The desirable configurations of each kernel by its name; kernels with the same measurements share the work.

    A kernel keeps the configurations that fit in the limit alone; `divide_workspace` sees whether all fit together.

    Raises:
        LimitTooSmallError: a kernel does not fit even alone.
        UnreachableBatchError: a kernel's measured sizes do not add up to its batch.
        ValueError: two kernels have the same name.
    """
    found: dict[str, tuple[Configuration, ...]] = {}
    known: dict[Any, tuple[Configuration, ...]] = {}
    for table in tables:
        if table.name in found:
            raise ValueError(f"two kernels are called {table.name}")
        key = (table.batch, table.rows)
        if key not in known:
            known[key] = pareto_front(table, limit_bytes)
        found[table.name] = known[key]
    return found


def divide_workspace(fronts: Fronts, limit_bytes: int) -> Division:
    """The configurations of least time in all whose workspaces together are at most `limit_bytes`.

    Where the lists of `multiple_choice` become too long, the best that is known is returned, which is not `proved`.

    Args:
        fronts: by kernel, configurations to choose from, such as `fronts_of` makes. They need not be pruned.
        limit_bytes: M, for all kernels together.

    Raises:
        LimitTooSmallError: the smallest configurations do not fit together.
        ValueError: a kernel without configurations.
    """
    pruned = {name: _desirable(front) for name, front in fronts.items()}
    for name, front in pruned.items():
        if not front:
            raise ValueError(f"{name} has no configurations to choose from")
    smallest = sum(front[0].workspace_bytes for front in pruned.values())
    if smallest > limit_bytes:
        raise LimitTooSmallError(f"the workspace of {len(pruned)} kernels", limit_bytes, smallest)
    options = [[Option(c.seconds, c.workspace_bytes) for c in front] for front in pruned.values()]
    best = choose(options, limit_bytes)
    chosen = greedy_choice(options, limit_bytes) if best is None else best
    configurations = {name: front[i] for (name, front), i in zip(pruned.items(), chosen)}
    bound = fractional_bound(options, limit_bytes)
    return Division(configurations, sum(map(len, options)), best is not None, bound)


def _desirable(configurations: Sequence[Configuration]) -> list[Configuration]:
    kept: list[Configuration] = []
    for candidate in sorted(configurations, key=lambda c: (c.workspace_bytes, c.seconds)):
        if not kept or candidate.seconds < kept[-1].seconds:
            kept.append(candidate)
    return kept
