"""Errors for what has no solution. Each says what would have one."""

from __future__ import annotations

from typing import Any


class LimitTooSmallError(ValueError):
    """No division fits the limit. A limit of `smallest_bytes` would do, and no smaller one."""

    def __init__(self, what: str, limit_bytes: int, smallest_bytes: int) -> None:
        self.what = what
        self.limit_bytes = limit_bytes
        self.smallest_bytes = smallest_bytes
        super().__init__(
            f"{what} does not fit in {limit_bytes} bytes however it is divided; "
            f"the smallest limit that works is {smallest_bytes} bytes"
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return LimitTooSmallError, (self.what, self.limit_bytes, self.smallest_bytes)


class UnreachableBatchError(ValueError):
    """The sizes that were measured do not add up to the batch, whatever the limit."""

    def __init__(self, what: str, batch: int, below: int | None, above: int | None) -> None:
        self.what = what
        self.batch = batch
        self.below = below  # the nearest batches that the sizes do add up to, None where there is none
        self.above = above
        near = " and ".join(str(size) for size in (below, above) if size is not None)
        super().__init__(
            f"{what}: the measured sizes do not add up to a batch of {batch}"
            + (f"; the nearest that they reach: {near}" if near else "")
            + ". Measure more sizes, or change the batch"
        )

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return UnreachableBatchError, (self.what, self.batch, self.below, self.above)


def require_limit(limit_bytes: int) -> None:
    """Raise ValueError unless this can be a limit."""
    if limit_bytes < 0:
        raise ValueError(f"a limit is a number of bytes from 0 on, not {limit_bytes}")
