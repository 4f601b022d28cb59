"""Small kernels, and every way to divide them: what the methods of `swapd.splitting` are held against."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pytest
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


def solved_by_highs(fronts: Mapping[str, Sequence[Configuration]], limit_bytes: int) -> float:
    """The least seconds of WD's programme (micro-cuDNN, Eq. 1 to 4), by scipy's HiGHS, which has to prove it.

    HiGHS works with absolute tolerances of 1e-6. So the programme counts what each configuration saves, and takes more,
    than the smallest of its kernel, and both are scaled. Kernels with the same front are one in it: x counts them.
    """
    optimize, sparse = pytest.importorskip("scipy.optimize"), pytest.importorskip("scipy.sparse")
    numbers: dict[tuple[Configuration, ...], int] = {}
    for front in fronts.values():
        numbers[tuple(front)] = numbers.get(tuple(front), 0) + 1
    sizes = np.array(list(numbers.values()), float)
    kernel = np.repeat(np.arange(len(numbers)), [len(front) for front in numbers])
    more = np.array([c.workspace_bytes - front[0].workspace_bytes for front in numbers for c in front], float)
    saved = np.array([front[0].seconds - c.seconds for front in numbers for c in front])
    room = limit_bytes - sum(front[0].workspace_bytes for front in fronts.values())
    one_each = sparse.csr_array((np.ones(len(kernel)), (kernel, np.arange(len(kernel)))))
    result = optimize.milp(
        -saved * (1e6 / saved.max()),
        integrality=np.ones(len(kernel)),
        bounds=optimize.Bounds(0, sizes[kernel]),
        constraints=[
            optimize.LinearConstraint(more[None, :] * (1e6 / room), -np.inf, 1e6),
            optimize.LinearConstraint(one_each, sizes, sizes),
        ],
        options={"mip_rel_gap": 0.0, "time_limit": 60.0},
    )
    assert result.status == 0
    counts = np.rint(result.x)
    assert counts @ more <= room
    return sum(front[0].seconds for front in fronts.values()) - float(counts @ saved)
