"""WR, workspace reuse: the fastest division of one kernel under a limit of its own (micro-cuDNN, section III-B).

    T(0) = 0,  T(b) = min over micro-batches m of T_mu(m) + T(b - m)

where T_mu(m) is the fastest measurement of size m whose workspace is within the limit. Which m was best is kept for
each b, so that the division is read back exactly. O(B S) for S measured sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from swapd.splitting.configurations import Configuration, KernelTable, MicroConfiguration
from swapd.splitting.limits import LimitTooSmallError, UnreachableBatchError


def fastest_division(table: KernelTable, limit_bytes: int, policy: str = "all") -> Configuration:
    """The configuration c(B) of least time among those of `policy` with a workspace of at most `limit_bytes`.

    Among equally fast ones it is one of the fewest parts. Its parts are ordered from the largest to the smallest.

    Raises:
        LimitTooSmallError: no division fits.
        UnreachableBatchError: the measured sizes do not add up to the batch.
        ValueError: an unknown policy.
    """
    table = table.restricted(policy)
    fitting = (row for row in table.rows if row.workspace_bytes <= limit_bytes)
    choice = _choices(table.batch, _best_by_size(fitting, lambda row: (row.seconds, row.workspace_bytes)))
    if choice[table.batch] is None:
        raise LimitTooSmallError(table.name, limit_bytes, smallest_workspace_bytes(table))
    return _read_back(choice, table.batch)


def smallest_workspace_bytes(table: KernelTable, policy: str = "all") -> int:
    """The smallest limit under which there is a division: over all divisions, the least of their workspaces.

    Raises:
        UnreachableBatchError: there is no division under any limit.
    """
    table = table.restricted(policy)
    least = {
        size: row.workspace_bytes
        for size, row in _best_by_size(table.rows, lambda row: (row.workspace_bytes, row.seconds)).items()
    }
    need: list[int | None] = [0]

    def extend() -> None:
        b = len(need)
        options = [max(own, rest) for size, own in least.items() if size <= b and (rest := need[b - size]) is not None]
        need.append(min(options, default=None))

    while len(need) <= table.batch:
        extend()
    smallest = need[table.batch]
    if smallest is None:
        below = max((b for b, reached in enumerate(need) if b and reached is not None), default=None)
        while least and need[-1] is None:  # until a multiple of a size
            extend()
        raise UnreachableBatchError(table.name, table.batch, below, len(need) - 1 if least else None)
    return smallest


def _best_by_size(
    rows: Iterable[MicroConfiguration], key: Callable[[MicroConfiguration], tuple[float, float]]
) -> dict[int, MicroConfiguration]:
    best: dict[int, MicroConfiguration] = {}
    for row in rows:
        if row.batch not in best or key(row) < key(best[row.batch]):
            best[row.batch] = row
    return best


def _choices(batch: int, fastest: dict[int, MicroConfiguration]) -> list[MicroConfiguration | None]:
    """[B + 1] for each b, the last part of its best division; None where it has none."""
    best: list[tuple[float, int] | None] = [(0.0, 0)]  # seconds, parts
    choice: list[MicroConfiguration | None] = [None]
    for b in range(1, batch + 1):
        least: tuple[float, int] | None = None
        part: MicroConfiguration | None = None
        for size, row in fastest.items():
            if size > b or (rest := best[b - size]) is None:
                continue
            value = (rest[0] + row.seconds, rest[1] + 1)
            if least is None or value < least:
                least, part = value, row
        best.append(least)
        choice.append(part)
    return choice


def _read_back(choice: list[MicroConfiguration | None], batch: int) -> Configuration:
    parts = []
    while batch:
        part = choice[batch]
        assert part is not None  # a rest was only used where it has a division
        parts.append(part)
        batch -= part.batch
    return Configuration(tuple(sorted(parts, key=lambda part: (-part.batch, part.algorithm))))
