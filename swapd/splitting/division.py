"""WD, workspace division: one workspace for a whole network, divided among its kernels (micro-cuDNN, section III-C).

    min  sum over k, c of T_k(c) x_kc                                  (1)
    subject to  sum over k, c of M_k(c) x_kc <= M                      (2)
                sum over c of x_kc = 1 for every kernel k              (3)
                x_kc in {0, 1}                                         (4)

The configurations c of a kernel are its desirable ones (`micro_batches`). The paper gives the programme to an integer
solver; here a dynamic programme over the kernels solves it, in at most `LEVELS` units of workspace:

    T(k, m) = min over c of T_k(c) + T(k - 1, m - M_k(c))

O(C L) for C configurations and L units, in vectors of length L.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from swapd.splitting.configurations import Configuration, KernelTable
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.micro_batches import pareto_front

LEVELS = 1 << 16


def fronts_of(tables: Sequence[KernelTable], limit_bytes: int) -> dict[str, tuple[Configuration, ...]]:
    """The desirable configurations of each kernel by its name.

    A kernel keeps the configurations that fit in the limit alone; `divide_workspace` sees whether all fit together.

    Raises:
        LimitTooSmallError: a kernel does not fit even alone.
        UnreachableBatchError: a kernel's measured sizes do not add up to its batch.
        ValueError: two kernels have the same name.
    """
    fronts = {table.name: pareto_front(table, limit_bytes) for table in tables}
    if len(fronts) < len(tables):
        raise ValueError(f"{len(tables)} kernels have {len(fronts)} names")
    return fronts


def divide_workspace(fronts: Mapping[str, Sequence[Configuration]], limit_bytes: int) -> dict[str, Configuration]:
    """For each kernel one of its configurations: of least time in all, and of at most `limit_bytes` together.

    What a configuration takes beyond its kernel's smallest one is counted in units, rounded up: their greatest common
    divisor, or 1 / `LEVELS` of what the smallest ones leave. So with K kernels no choice that leaves K units free is
    faster.

    Args:
        fronts: by kernel, configurations to choose from, such as `fronts_of` makes.
        limit_bytes: M, for all kernels together.

    Raises:
        LimitTooSmallError: the smallest configurations do not fit together.
    """
    smallest = {name: min(front, key=lambda c: (c.workspace_bytes, c.seconds)) for name, front in fronts.items()}
    room = limit_bytes - sum(c.workspace_bytes for c in smallest.values())
    if room < 0:
        raise LimitTooSmallError(f"the workspace of {len(fronts)} kernels", limit_bytes, limit_bytes - room)
    more = {name: [c.workspace_bytes - smallest[name].workspace_bytes for c in front] for name, front in fronts.items()}
    unit = max(math.gcd(*(size for sizes in more.values() for size in sizes)), -(-room // LEVELS), 1)
    levels = room // unit
    units = {name: [-(-size // unit) for size in sizes] for name, sizes in more.items()}
    best = np.zeros(levels + 1)  # seconds of the kernels so far, within so many units
    chosen = []
    for name, front in fronts.items():
        now, which = np.full(levels + 1, np.inf), np.zeros(levels + 1, dtype=np.int32)
        for i, (configuration, taken) in enumerate(zip(front, units[name])):
            if taken <= levels:
                seconds = best[: levels + 1 - taken] + configuration.seconds
                better = seconds < now[taken:]
                now[taken:][better], which[taken:][better] = seconds[better], i
        best = now
        chosen.append(which)
    found = {}
    for (name, front), which in zip(reversed(list(fronts.items())), reversed(chosen)):
        i = int(which[levels])
        found[name] = front[i]
        levels -= units[name][i]
    return {name: found[name] for name in fronts}
