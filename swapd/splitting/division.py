"""WD, workspace division: one workspace for a whole network, divided among its kernels (micro-cuDNN, section III-C).

    min  sum over k, c of T_k(c) x_kc                                  (1)
    subject to  sum over k, c of M_k(c) x_kc <= M                      (2)
                sum over c of x_kc = 1 for every kernel k              (3)
                x_kc in {0, 1}                                         (4)

The configurations c of a kernel are its desirable ones (`pareto`). The programme is solved by HiGHS through scipy, or
by `multiple_choice`, which is exact too and needs no solver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swapd.splitting.configurations import Configuration, KernelTable
from swapd.splitting.limits import LimitTooSmallError, require_limit
from swapd.splitting.multiple_choice import Option, choose, fractional_bound, greedy_choice
from swapd.splitting.pareto import desirable, pareto_front

SOLVERS = {"auto": ("lists", "highs"), "highs": ("highs", "lists"), "lists": ("lists",)}  # in the order of asking
MOST_SECONDS = 10.0  # for HiGHS, which proves some optima only after minutes
SCALE = 1e6  # what the limit and the largest saving are scaled to: HiGHS works with absolute tolerances of 1e-6

Fronts = Mapping[str, Sequence[Configuration]]


@dataclass(frozen=True)
class Division:
    """A configuration for each kernel."""

    configurations: dict[str, Configuration]
    variables: int  # of the programme: desirable configurations of all kernels
    proved_by: str | None  # the solver that proved that no other is faster; None if none could
    bound_seconds: float  # what no division beats, within the same limit

    @property
    def seconds(self) -> float:
        """The time of all kernels, one after the other."""
        return math.fsum(configuration.seconds for configuration in self.configurations.values())

    @property
    def workspace_bytes(self) -> int:
        """The workspaces of all kernels together: each kernel has a segment of its own."""
        return sum(configuration.workspace_bytes for configuration in self.configurations.values())


def fronts_of(
    tables: Sequence[KernelTable], limit_bytes: int, policy: str = "all"
) -> dict[str, tuple[Configuration, ...]]:
    """The desirable configurations of each kernel by its name; kernels with the same measurements share the work.

    A kernel keeps the configurations that fit in the limit alone; `divide_workspace` sees whether all fit together.

    Raises:
        LimitTooSmallError: a kernel does not fit even alone.
        UnreachableBatchError: a kernel's measured sizes do not add up to its batch.
        ValueError: two kernels have the same name; an unknown policy; a negative limit.
    """
    found: dict[str, tuple[Configuration, ...]] = {}
    known: dict[Any, tuple[Configuration, ...]] = {}
    for table in tables:
        if table.name in found:
            raise ValueError(f"two kernels are called {table.name}")
        key = (table.batch, table.rows)
        if key not in known:
            known[key] = pareto_front(table, limit_bytes, policy)
        found[table.name] = known[key]
    return found


def divide_workspace(fronts: Fronts, limit_bytes: int, solver: str = "auto") -> Division:
    """The configurations of least time in all whose workspaces together are at most `limit_bytes`.

    Where neither solver has a proof within its means, the best that is known is returned, and `proved_by` is None.

    Args:
        fronts: by kernel, configurations to choose from, such as `fronts_of` makes. They need not be pruned.
        limit_bytes: M, for all kernels together.
        solver: which one is asked first: `highs`, or `lists` (see `multiple_choice`). `auto` asks `lists`, which is
            faster on networks, and then HiGHS, if scipy is there, where the lists become too long.

    Raises:
        LimitTooSmallError: the smallest configurations do not fit together.
        ImportError: the solver is `highs`, and scipy is not installed.
        ValueError: an unknown solver, a negative limit, a kernel without configurations.
    """
    require_limit(limit_bytes)
    if solver not in SOLVERS:
        raise ValueError(f"there is no solver {solver!r}; there are: {', '.join(SOLVERS)}")
    pruned = {name: desirable(front) for name, front in fronts.items()}
    for name, front in pruned.items():
        if not front:
            raise ValueError(f"{name} has no configurations to choose from")
    smallest = sum(front[0].workspace_bytes for front in pruned.values())
    if smallest > limit_bytes:
        raise LimitTooSmallError(f"the workspace of {len(pruned)} kernels", limit_bytes, smallest)
    options = [[Option(c.seconds, c.workspace_bytes) for c in front] for front in pruned.values()]
    chosen, proved_by = _solve(options, limit_bytes, solver)
    configurations = {name: front[i] for (name, front), i in zip(pruned.items(), chosen)}
    return Division(configurations, sum(map(len, options)), proved_by, fractional_bound(options, limit_bytes))


def _solve(options: list[list[Option]], limit_bytes: int, solver: str) -> tuple[list[int], str | None]:
    """One option for each kernel, and the solver that proved that the choice is the best; None if none did."""
    known = [greedy_choice(options, limit_bytes)]
    for attempt in SOLVERS[solver]:
        if attempt == "lists":
            found = choose(options, limit_bytes)
            chosen, proved = found or [], found is not None
        else:
            chosen, proved = _by_highs(options, limit_bytes, required=solver == "highs")
        if proved:
            return chosen, attempt
        if chosen:
            known.append(chosen)
    return min(known, key=lambda chosen: sum(front[i].seconds for front, i in zip(options, chosen))), None


def _scipy(required: bool) -> Any:
    """scipy with its module of optimization; None if it is not installed and not required."""
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        if required:
            raise ImportError(
                "the solver HiGHS comes with scipy, which is not installed: "
                "pip install 'ooc-alloc[ilp]', or choose the solver 'lists'"
            ) from error
        return None
    return scipy


def _by_highs(options: list[list[Option]], limit_bytes: int, required: bool) -> tuple[list[int], bool]:
    """One option for each kernel, and whether HiGHS proved that the choice is the best.

    The list is empty if HiGHS has no choice, or if its tolerances let the choice exceed the limit. Every kernel starts
    with its smallest option; the programme counts the time that other options save and the bytes that they take more.
    Kernels with the same options are one in it: x counts how many of them take an option.
    """
    scipy = _scipy(required)
    if scipy is None or not options:
        return [], False
    groups: dict[tuple[Option, ...], list[int]] = {}
    for k, front in enumerate(options):
        groups.setdefault(tuple(front), []).append(k)
    members = list(groups.values())
    group = np.repeat(np.arange(len(groups)), [len(front) for front in groups])
    more = np.array([option.workspace_bytes - front[0].workspace_bytes for front in groups for option in front], float)
    saved = np.array([front[0].seconds - option.seconds for front in groups for option in front])
    room = limit_bytes - sum(front[0].workspace_bytes for front in options)
    scale = SCALE / max(room, 1)
    one_each = scipy.sparse.csr_array((np.ones(len(group)), (group, np.arange(len(group)))))
    sizes = np.array([len(kernels) for kernels in members], float)
    result = scipy.optimize.milp(
        -saved * (SCALE / (saved.max() or 1.0)),
        integrality=np.ones(len(group)),
        bounds=scipy.optimize.Bounds(0, sizes[group]),
        constraints=[
            scipy.optimize.LinearConstraint(more[None, :] * scale, -np.inf, room * scale),
            scipy.optimize.LinearConstraint(one_each, sizes, sizes),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": MOST_SECONDS},
    )
    if result.x is None:
        return [], False
    chosen = [0] * len(options)
    for g, kernels in enumerate(members):
        counts = np.rint(result.x[group == g]).astype(int)
        for k, option in zip(kernels, np.repeat(np.arange(len(counts)), counts)):
            chosen[k] = int(option)
    within = sum(front[i].workspace_bytes for front, i in zip(options, chosen)) <= limit_bytes
    return (chosen, result.status == 0) if within else ([], False)
