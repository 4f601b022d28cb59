"""Plans of a network: a configuration for each kernel, by WR and WD, under each limit and policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from swapd.splitting.configurations import Configuration, KernelTable, micro_batch_sizes
from swapd.splitting.division import divide_workspace, fronts_of
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.micro_batches import fastest_division, smallest_division

MIB = 1 << 20
POLICIES = ("all", "powerOfTwo", "undivided")
K = TypeVar("K")


@dataclass(frozen=True)
class Plan:
    """What runs: one configuration for each kernel."""

    mode: str  # "WR" or "WD"
    policy: str
    limit_mib: int  # of each kernel; WD has that times their number for all of them
    limit_bytes: int
    configurations: tuple[Configuration, ...]
    over_limit: int  # kernels, undivided, of which nothing fits; their smallest algorithm is taken


def clearly_faster(turns: Sequence[tuple[float, float]]) -> bool:
    """Whether the first of two times is the smaller one in every turn but one at most."""
    return sum(first < second for first, second in turns) >= max(len(turns) - 1, 1)


def make_plans(
    tables: Sequence[KernelTable],
    kernels: Sequence[K],
    limits_mib: Sequence[int],
    noise: float,
    is_faster: Callable[[K, Configuration, Configuration], bool],
) -> list[Plan]:
    """Every mode, limit and policy; of each mode and limit `undivided` comes first.

    Args:
        tables: what was measured, one for each kernel.
        kernels: passed on to `is_faster`, which says whether a division is really faster than the whole kernel.
        noise: relative; a division has to gain more than that.
    """
    plans = []
    for limit_mib in limits_mib:
        for mode in ("WR", "WD"):
            limit = limit_mib * MIB * (1 if mode == "WR" else len(tables))
            whole = _plan(mode, "undivided", limit_mib, limit, tables, noise)
            plans.append(whole)
            for policy in POLICIES:
                if policy != "undivided":
                    plan = _plan(mode, policy, limit_mib, limit, tables, noise)
                    plans.append(_confirmed(plan, whole, kernels, is_faster))
    return sorted(plans, key=lambda plan: (plan.mode, plan.limit_mib, -POLICIES.index(plan.policy)))


def _plan(mode: str, policy: str, limit_mib: int, limit: int, tables: Sequence[KernelTable], noise: float) -> Plan:
    cautious = [_cautious(table, policy, noise) for table in tables]
    if mode == "WR":
        found = [_fastest(table, limit) for table in cautious]
        chosen, over = [c for c, _ in found], sum(o for _, o in found)
    else:
        chosen, over = _divided(cautious, limit)
    measured = tuple(_measured(table, configuration) for table, configuration in zip(tables, chosen))
    return Plan(mode, policy, limit_mib, limit, measured, over)


def _cautious(table: KernelTable, policy: str, noise: float) -> KernelTable:
    """The sizes of a policy, in which parts take longer by their spread, and at least by `noise` of their time."""
    sizes = (table.batch,) if policy == "undivided" else micro_batch_sizes(policy, table.batch)
    rows = [
        replace(row, spread_seconds=max(row.spread_seconds, noise * row.seconds))
        for row in table.rows
        if row.batch in sizes
    ]
    return KernelTable(table.name, table.batch, tuple(rows)).cautious()


def _measured(table: KernelTable, configuration: Configuration) -> Configuration:
    """A configuration that was made from the cautious table, with the times that were measured."""
    rows = {(row.batch, row.algorithm): row for row in table.rows}
    return Configuration(tuple(rows[part.batch, part.algorithm] for part in configuration.parts))


def _fastest(table: KernelTable, limit: int) -> tuple[Configuration, bool]:
    try:
        return fastest_division(table, limit), False
    except LimitTooSmallError as error:
        return fastest_division(table, error.smallest_bytes), True


def _divided(tables: list[KernelTable], limit: int) -> tuple[list[Configuration], int]:
    named = [KernelTable(str(i), table.batch, table.rows) for i, table in enumerate(tables)]
    try:
        return list(divide_workspace(fronts_of(named, limit), limit).values()), 0
    except LimitTooSmallError:
        return [smallest_division(table) for table in tables], len(tables)


def _confirmed(
    plan: Plan, whole: Plan, kernels: Sequence[K], is_faster: Callable[[K, Configuration, Configuration], bool]
) -> Plan:
    """With the whole kernel back wherever it takes no more workspace than there is, and its division is not faster."""
    chosen = []
    for kernel, divided, undivided in zip(kernels, plan.configurations, whole.configurations):
        room = plan.limit_bytes if plan.mode == "WR" else divided.workspace_bytes
        if len(divided.parts) > 1 and undivided.workspace_bytes <= room and not is_faster(kernel, divided, undivided):
            divided = undivided
        chosen.append(divided)
    return Plan(plan.mode, plan.policy, plan.limit_mib, plan.limit_bytes, tuple(chosen), plan.over_limit)
