"""Errors for what has no solution. Each says what would have one."""

from __future__ import annotations


class LimitTooSmallError(ValueError):
    """No division fits the limit. A limit of `smallest_bytes` would do, and no smaller one."""

    def __init__(self, what: str, limit_bytes: int, smallest_bytes: int) -> None:
        super().__init__(what, limit_bytes, smallest_bytes)  # a copy is made with these
        self.what = what
        self.limit_bytes = limit_bytes
        self.smallest_bytes = smallest_bytes

    def __str__(self) -> str:
        return (
            f"{self.what} does not fit in {self.limit_bytes} bytes however it is divided; "
            f"the smallest limit that works is {self.smallest_bytes} bytes"
        )


class UnreachableBatchError(ValueError):
    """The sizes that were measured do not add up to the batch, whatever the limit."""

    def __init__(self, what: str, batch: int, below: int | None, above: int | None) -> None:
        super().__init__(what, batch, below, above)
        self.what = what
        self.batch = batch
        self.below = below  # the nearest batches that the sizes do add up to, None where there is none
        self.above = above

    def __str__(self) -> str:
        near = " and ".join(str(size) for size in (self.below, self.above) if size is not None)
        return (
            f"{self.what}: the measured sizes do not add up to a batch of {self.batch}"
            + (f"; the nearest that they reach: {near}" if near else "")
            + ". Measure more sizes, or change the batch"
        )
