"""Small kernels, and every way to divide them: what the methods of `swapd.splitting` are held against."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from swapd.splitting.configurations import Configuration, KernelTable, MicroConfiguration

MIB = 1 << 20
EXACT_SECONDS = st.integers(1, 64).map(lambda n: n / 16)  # their sums are exact in any order
ANY_SECONDS = st.floats(1e-6, 1.0, allow_nan=False)


@st.composite
def tables(draw: st.DrawFn, most: int = 6, seconds: st.SearchStrategy[float] = EXACT_SECONDS) -> KernelTable:
    """Up to `most` samples, some sizes measured, with up to three algorithms each."""
    batch = draw(st.integers(1, most))
    row = st.builds(MicroConfiguration, st.integers(1, batch), st.sampled_from("ABC"), seconds, st.integers(0, 9))
    rows = draw(st.lists(row, min_size=1, max_size=10, unique_by=lambda row: (row.batch, row.algorithm)))
    return KernelTable("kernel", batch, tuple(rows))  # at most 3 * 4^5 divisions of 6 samples


def complete_table(algorithms: int, batch: int) -> KernelTable:
    """Every size by every algorithm."""
    rows = [
        MicroConfiguration(size, f"A{algorithm}", float(size + algorithm), 2 * size - algorithm + algorithms)
        for size in range(1, batch + 1)
        for algorithm in range(algorithms)
    ]
    return KernelTable("kernel", batch, tuple(rows))


def all_divisions(table: KernelTable, batch: int | None = None) -> Iterator[Configuration]:
    """Every list of rows whose sizes add up to the batch, in every order."""
    left = table.batch if batch is None else batch
    if left == 0:
        yield Configuration(())
        return
    for row in table.rows:
        if row.batch <= left:
            for rest in all_divisions(table, left - row.batch):
                yield Configuration((row, *rest.parts))


def desirable(configurations: Iterable[Configuration]) -> tuple[Configuration, ...]:
    """D(C) of micro-cuDNN, section III-C1: those that nothing beats, smallest first; of equals the first.

    The paper's formula, read to the letter, compares a configuration with itself too, and keeps none of equals.
    """
    kept: list[Configuration] = []
    for candidate in sorted(configurations, key=lambda c: (c.workspace_bytes, c.seconds)):
        if not kept or candidate.seconds < kept[-1].seconds:
            kept.append(candidate)
    return tuple(kept)


def costs(configurations: "tuple[Configuration, ...]") -> list[tuple[int, float]]:
    return [(configuration.workspace_bytes, configuration.seconds) for configuration in configurations]


def require_division(table: KernelTable, configuration: Configuration) -> None:
    """It divides the batch, into parts that were measured."""
    assert sum(part.batch for part in configuration.parts) == table.batch
    assert set(configuration.parts) <= set(table.rows)
    sizes = [part.batch for part in configuration.parts]
    assert sizes == sorted(sizes, reverse=True)


def least_by_mebibytes(fronts: Mapping[str, Sequence[Configuration]], limit_bytes: int) -> float:
    """The least seconds of WD's programme (micro-cuDNN, Eq. 1 to 4): for each room the best, kernel by kernel.

    Every workspace is a number of MiB.
    """
    best = np.zeros(limit_bytes // MIB + 1)
    for front in fronts.values():
        now = np.full(len(best), np.inf)
        for configuration in front:
            mib = configuration.workspace_bytes // MIB
            if mib < len(best):
                now[mib:] = np.minimum(now[mib:], best[: len(best) - mib] + configuration.seconds)
        best = now
    return float(best[-1])
