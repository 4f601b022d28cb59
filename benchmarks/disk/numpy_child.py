"""Array programs on a matrix larger than the memory that they get: plain NumPy, ours, and Dask's array.

    python -m benchmarks.disk.numpy_child OUTPUT.json DEVICE THREADS WAY cholesky|pca [--blocks N --size N --rows N]

`cholesky` is the example's blocked factorisation of a matrix in tiles, another one each step; `pca` finds the principal
components of a tall matrix in blocks of rows from its Gram matrix, and projects every row on the first of them.
WAY: `plain`, `ours` (within OOC_BUDGET, the rest in OOC_DISK), `dask`. The record has `live_bytes` of the matrix and
the `digest` of the results.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

if __name__ == "__main__":
    # Read when NumPy is imported. Dask's own threads each call it.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ[variable] = "1" if sys.argv[4] == "dask" else sys.argv[3]

import numpy as np
from numpy.typing import NDArray

from benchmarks.disk.cases import EXAMPLES
from benchmarks.disk.child import Steps, write

Matrix = NDArray[np.float64]
ALIGNMENT = 2 << 20  # where an array starts that has chunks of its own: other alignments may add up in another order


class Program(Protocol):
    """A workload in one of the ways."""

    live_bytes: int

    def step(self, number: int) -> None: ...

    def results(self) -> Iterable[Matrix]: ...


def aligned(rows: int, columns: int) -> Matrix:
    raw = np.empty(rows * columns * 8 + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    made: Matrix = raw[start : start + rows * columns * 8].view(np.float64).reshape(rows, columns)
    return made


def example(name: str) -> ModuleType:
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def our_device() -> Any:
    """A device with the budget and the disk that the environment names."""
    import ooc.numpy

    named = {"budget": "OOC_BUDGET", "disk": "OOC_DISK"}
    given = {name: os.environ[variable] for name, variable in named.items() if variable in os.environ}
    return ooc.numpy.Device(**given)


class Cholesky:
    """Tiles of the lower half, in place."""

    def __init__(self, options: argparse.Namespace, managed: Any) -> None:
        self.program, self.managed, self.count = example("cholesky_numpy"), managed, options.blocks
        self.order = options.blocks * options.size
        self.positions = [(i, j) for j in range(self.count) for i in range(j, self.count)]
        shape = (options.size, options.size)
        self.tiles: Any = {at: managed.empty(shape) if managed else aligned(*shape) for at in self.positions}
        self.live_bytes = len(self.positions) * options.size**2 * 8
        self.operations = self.program.declared(managed) if managed else self.program.PLAIN

    def step(self, number: int) -> None:
        self.program.run_step(self.tiles, self.count, number, self.order, self.operations)
        if self.managed:
            self.managed.step()

    def results(self) -> Iterable[Matrix]:
        for at in self.positions:
            yield self.tiles[at].to_numpy() if self.managed else self.tiles[at]


class DaskCholesky:
    """The same matrix, by `dask.array.linalg.cholesky`; the factor stays in memory, as with the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.program, self.count, self.size = example("cholesky_numpy"), options.blocks, options.size
        self.live_bytes = self.count * (self.count + 1) // 2 * self.size**2 * 8
        self.factor: Any = None

    def _tile(self, number: int, block_info: Any) -> Matrix:
        row, column = block_info[None]["chunk-location"]
        tile = np.empty((self.size, self.size))
        self.program.generate(tile, max(row, column), min(row, column), number, self.count * self.size)
        return tile if row >= column else tile.T  # Dask reads the upper half too

    def step(self, number: int) -> None:
        import dask.array as da

        self.factor = None
        chunks = ((self.size,) * self.count,) * 2

        def tile(block_info: Any = None) -> Matrix:
            return self._tile(number, block_info)

        matrix = da.map_blocks(tile, chunks=chunks, dtype=np.float64, meta=np.empty((0, 0)))
        self.factor = da.linalg.cholesky(matrix, lower=True).persist()

    def results(self) -> Iterable[Matrix]:
        for column in range(self.count):
            for row in range(column, self.count):
                yield self.factor.blocks[row, column].compute()


class Pca:
    """Two passes over the blocks: the Gram matrix and the columns' sums, then the projections."""

    def __init__(self, options: argparse.Namespace, managed: Any) -> None:
        self.managed, self.rows, self.program = managed, options.rows * options.blocks, example("pca_numpy")
        new: Callable[..., Any] = (lambda *shape: managed.empty(shape)) if managed else aligned
        self.blocks = [new(options.rows, options.size) for _ in range(options.blocks)]
        self.scores = [new(options.rows, self.program.COMPONENTS) for _ in range(options.blocks)]
        self.gram, self.total = new(options.size, options.size), new(1, options.size)
        self.vectors = new(options.size, self.program.COMPONENTS)
        self.live_bytes = self.rows * options.size * 8
        self.run = self.program.declared(managed) if managed else self.program.PLAIN
        for index, block in enumerate(self.blocks):
            self.run["fill"](block, index)

    def step(self, number: int) -> None:
        self.run["clear"](self.gram, self.total)
        for block in self.blocks:
            self.run["accumulate"](self.gram, self.total, block)
        found = self.program.principal(self._plain(self.gram), self._plain(self.total)[0], self.rows)
        if self.managed:
            self.vectors.copy_from(found)
        else:
            self.vectors[...] = found
        for scores, block in zip(self.scores, self.blocks):
            self.run["project"](scores, block, self.vectors)
        if self.managed:
            self.managed.step()

    def _plain(self, array: Any) -> Matrix:
        made: Matrix = array.to_numpy() if self.managed else array
        return made

    def results(self) -> Iterable[Matrix]:
        return (self._plain(scores) for scores in self.scores)


class DaskPca:
    """The blocks as files (`to_npy_stack`), which Dask maps and works through."""

    def __init__(self, options: argparse.Namespace) -> None:
        import dask.array as da

        self.rows, self.live_bytes = options.rows * options.blocks, options.rows * options.blocks * options.size * 8
        self.program = example("pca_numpy")

        def block(block_info: Any = None) -> Matrix:
            made = np.empty((options.rows, options.size))
            self.program.fill(made, block_info[None]["chunk-location"][0])
            return made

        chunks = ((options.rows,) * options.blocks, (options.size,))
        made = da.map_blocks(block, chunks=chunks, dtype=np.float64, meta=np.empty((0, 0)))
        da.to_npy_stack(str(options.scratch), made, axis=0)
        self.matrix = da.from_npy_stack(str(options.scratch))
        self.scores: Matrix | None = None

    def step(self, number: int) -> None:
        import dask

        gram, total = dask.compute(self.matrix.T @ self.matrix, self.matrix.sum(axis=0))
        self.scores = (self.matrix @ self.program.principal(gram, total, self.rows)).compute()

    def results(self) -> Iterable[Matrix]:
        assert self.scores is not None
        return [self.scores]


def digest(matrices: Iterable[Matrix]) -> str:
    """SHA-256 of every bit, in C order."""
    total = hashlib.sha256()
    for matrix in matrices:
        total.update(np.ascontiguousarray(matrix).tobytes())
    return total.hexdigest()


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=("cholesky", "pca"))
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--size", type=int, default=768, help="columns; also rows of a tile")
    parser.add_argument("--rows", type=int, default=1536, help="of a block of the tall matrix")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save", type=Path, help="nothing is saved: the digest is in the record")
    parser.add_argument("--scratch", type=Path, help="folder for Dask's files")
    return parser.parse_args(words)


def make(options: argparse.Namespace, way: str, threads: int) -> Program:
    if way == "dask":
        import dask

        dask.config.set(scheduler="threads", num_workers=threads)
        return DaskCholesky(options) if options.program == "cholesky" else DaskPca(options)
    managed = our_device() if way == "ours" else None
    return Cholesky(options, managed) if options.program == "cholesky" else Pca(options, managed)


def main() -> None:
    output, device, threads, way, *arguments = sys.argv[1:]
    options = parse_arguments(arguments)
    program = make(options, way, int(threads))
    steps = Steps(device)
    for number in range(options.steps):
        program.step(number)
        steps.step()
    write(Path(output), steps, int(threads), live_bytes=program.live_bytes, digest=digest(program.results()))


if __name__ == "__main__":
    main()
