"""Errors for what has no solution. Each says what would have one, and can be copied to another process."""

from __future__ import annotations

from collections.abc import Iterable


class LimitTooSmallError(ValueError):
    """No division fits the limit. A limit of `smallest_bytes` would do, and no smaller one."""

    def __init__(self, what: str, limit_bytes: int, smallest_bytes: int) -> None:
        super().__init__(what, limit_bytes, smallest_bytes)
        self.limit_bytes, self.smallest_bytes = limit_bytes, smallest_bytes

    def __str__(self) -> str:
        return (
            f"{self.args[0]} does not fit in {self.limit_bytes} bytes however it is divided; "
            f"the smallest limit that works is {self.smallest_bytes} bytes"
        )


class UnreachableBatchError(ValueError):
    """The measured sizes do not add up to the batch. `nearest` are those of the `reached` ones below and above it."""

    def __init__(self, what: str, batch: int, reached: Iterable[int]) -> None:
        others = sorted(reached)
        self.nearest = [b for b in others if 0 < b < batch][-1:] + [b for b in others if b > batch][:1]
        super().__init__(what, batch, self.nearest)

    def __str__(self) -> str:
        near = f"; the nearest that they reach: {' and '.join(map(str, self.nearest))}" if self.nearest else ""
        short = f"{self.args[0]}: the measured sizes do not add up to a batch of {self.args[1]}"
        return f"{short}{near}. Measure more sizes, or change the batch"
