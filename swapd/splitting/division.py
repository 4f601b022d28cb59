"""WD, workspace division: one workspace for a whole network, divided among its kernels (micro-cuDNN, section III-C).

    min  sum over k, c of T_k(c) x_kc                                  (1)
    subject to  sum over k, c of M_k(c) x_kc <= M                      (2)
                sum over c of x_kc = 1 for every kernel k              (3)
                x_kc in {0, 1}                                         (4)

The configurations c of a kernel are its desirable ones (`micro_batches`). HiGHS solves the programme, which comes with
scipy (the extra `workspaces`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from swapd.splitting.configurations import Configuration, KernelTable
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.micro_batches import pareto_front

SOLVING_SECONDS = 5.0  # after them the best choice so far is taken
_SCALE = 1e6  # of what HiGHS is given: its tolerances are 1e-6, whatever the unit


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

    Where that takes more than `SOLVING_SECONDS`, it is the best choice that was found, or the smallest one.

    Args:
        fronts: by kernel, configurations to choose from, such as `fronts_of` makes.
        limit_bytes: M, for all kernels together.

    Raises:
        ImportError: scipy is not there.
        LimitTooSmallError: the smallest configurations do not fit together.
    """
    from scipy import optimize

    smallest = {name: min(front, key=lambda c: (c.workspace_bytes, c.seconds)) for name, front in fronts.items()}
    room = limit_bytes - sum(c.workspace_bytes for c in smallest.values())
    if room < 0:
        raise LimitTooSmallError(f"the workspace of {len(fronts)} kernels", limit_bytes, limit_bytes - room)
    options = [(smallest[name], c) for name, front in fronts.items() for c in front]
    more = np.array([c.workspace_bytes - least.workspace_bytes for least, c in options])
    saved = np.array([least.seconds - c.seconds for least, c in options])
    if room == 0 or not (saved > 0).any():
        return smallest
    numbers = [len(front) for front in fronts.values()]
    kernel = np.repeat(np.arange(len(fronts)), numbers)
    allowed = room
    for _ in range(10):
        result = optimize.milp(
            -saved * (_SCALE / saved.max()),
            integrality=np.ones(len(options)),
            bounds=optimize.Bounds(0, more <= room),
            constraints=[
                optimize.LinearConstraint(more[None, :] * (_SCALE / room), -np.inf, _SCALE * allowed / room),
                optimize.LinearConstraint(1.0 * (np.arange(len(fronts))[:, None] == kernel), 1, 1),
            ],
            options={"mip_rel_gap": 0.0, "time_limit": SOLVING_SECONDS},
        )
        over = room // 100_000 + 1
        if result.x is not None:
            taken = [int(x.argmax()) for x in np.split(result.x, np.cumsum(numbers)[:-1])]
            chosen = {name: front[i] for (name, front), i in zip(fronts.items(), taken)}
            over = sum(c.workspace_bytes for c in chosen.values()) - limit_bytes
            if over <= 0:
                return chosen
        elif result.status == 1:  # out of time
            break
        allowed -= over  # a choice that fits by its tolerances alone is taken, or makes it find none
    return smallest
