"""Principal components of a matrix several times larger than memory, in NumPy, with every bit checked.

    python examples/pca_numpy.py [--blocks 32] [--rows 1024] [--columns 512] [--oversubscription 4] [--disk FOLDER]

The matrix lies in blocks of rows on a device whose budget holds a part of it; with `--disk` the rest takes no memory.
Each step goes over the blocks twice: for the columns' sums and products, whose covariance has the components as
eigenvectors (Jolliffe, "Principal Component Analysis", section 1.1), and for the projections onto them.

The check needs no second copy of the matrix: block by block is made again in plain memory, and the same functions, with
the same alignment and one BLAS thread, have to give the same bits.

Ends with 0 only if all projections are bit-identical and the device peak stayed within the budget.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

# Read when NumPy is imported. The other cores are for the swap threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

import ooc.numpy as ooc

CHUNK_BYTES = 64 * 1024
COMPONENTS = 8

Matrix = NDArray[np.float64]
Operations = Mapping[str, Callable[..., None]]


def fill(block: Matrix, index: int) -> None:
    """Random values whose columns have different spreads."""
    np.random.default_rng(index).random(out=block)
    block *= np.linspace(2, 1, block.shape[1])


def clear(gram: Matrix, total: Matrix) -> None:
    gram[...] = 0
    total[...] = 0


def accumulate(gram: Matrix, total: Matrix, block: Matrix) -> None:
    gram += block.T @ block
    total += block.sum(axis=0)


def project(scores: Matrix, block: Matrix, components: Matrix) -> None:
    scores[...] = block @ components


PLAIN: Operations = {"fill": fill, "clear": clear, "accumulate": accumulate, "project": project}


def declared(device: ooc.Device) -> Operations:
    """The same four, with what they read and write."""
    sums = ("gram", "total")
    return {
        "fill": device.function(writes=("block",))(fill),
        "clear": device.function(writes=sums)(clear),
        "accumulate": device.function(reads=("block",), writes=sums)(accumulate),
        "project": device.function(reads=("block", "components"), writes=("scores",))(project),
    }


def principal(gram: Matrix, total: Matrix, rows: int) -> Matrix:
    """(columns, COMPONENTS): eigenvectors of the covariance with the largest eigenvalues, from sums over all rows."""
    mean = total / rows
    vectors: Matrix = np.linalg.eigh(gram / rows - np.outer(mean, mean))[1][:, -COMPONENTS:]
    return np.ascontiguousarray(vectors)


def aligned(*shape: int) -> Matrix:
    """An array that starts where a chunk could: the alignment of arrays on the device."""
    size = int(np.prod(shape)) * 8
    raw = np.empty(size + CHUNK_BYTES, np.uint8)
    start = -raw.ctypes.data % CHUNK_BYTES
    made: Matrix = raw[start : start + size].view(np.float64).reshape(shape)
    return made


class Pca:
    """The matrix in blocks on a device, and its principal components.

    Args:
        shape: blocks, rows of each, columns.
    """

    def __init__(self, device: ooc.Device, shape: tuple[int, int, int], progress: Callable[[], None]) -> None:
        count, self.rows, columns = shape
        self.device, self.progress, self.run = device, progress, declared(device)
        self.blocks = [device.empty((self.rows, columns)) for _ in range(count)]
        self.scores = [device.empty((self.rows, COMPONENTS)) for _ in range(count)]
        self.gram, self.total = device.empty((columns, columns)), device.empty((1, columns))
        self.components = device.empty((columns, COMPONENTS))
        for index, block in enumerate(self.blocks):
            self.run["fill"](block, index)
            progress()

    def step(self) -> None:
        """Both passes over the blocks."""
        self.run["clear"](self.gram, self.total)
        for block in self.blocks:
            self.run["accumulate"](self.gram, self.total, block)
            self.progress()
        rows = self.rows * len(self.blocks)
        self.components.copy_from(principal(self.gram.to_numpy(), self.total.to_numpy()[0], rows))
        for scores, block in zip(self.scores, self.blocks):
            self.run["project"](scores, block, self.components)
            self.progress()
        self.device.step()


def different_blocks(pca: Pca, shape: tuple[int, int, int], progress: Callable[[], None]) -> int:
    """How many blocks of projections differ from those of plain NumPy, which has one block in memory at a time."""
    count, rows, columns = shape
    block, scores = aligned(rows, columns), aligned(rows, COMPONENTS)
    gram, total, components = aligned(columns, columns), aligned(1, columns), aligned(columns, COMPONENTS)
    clear(gram, total)
    for index in range(count):
        fill(block, index)
        accumulate(gram, total, block)
        progress()
    components[...] = principal(gram, total[0], rows * count)
    different = 0
    for index in range(count):
        fill(block, index)
        project(scores, block, components)
        different += scores.tobytes() != pca.scores[index].to_numpy().tobytes()
        progress()
    return different


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Principal components of a matrix beyond memory, in NumPy.")
    parser.add_argument("--blocks", type=int, default=32, help="of rows (default %(default)s)")
    parser.add_argument("--rows", type=int, default=1024, help="of a block (default %(default)s)")
    parser.add_argument("--columns", type=int, default=512, help="of the matrix (default %(default)s)")
    parser.add_argument("--oversubscription", type=float, default=4.0, help="matrix / budget (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="times that it is done (default %(default)s)")
    parser.add_argument("--disk", metavar="FOLDER", help="for what the budget does not hold (default: memory)")
    options = parser.parse_args(arguments)
    shape = options.blocks, options.rows, options.columns
    size = options.blocks * options.rows * options.columns * 8
    console = Console()
    settings = {"chunk_size": CHUNK_BYTES, "small_limit": CHUNK_BYTES // 2}
    seconds = []
    with ooc.Device(alloc="cpu", budget=int(size / options.oversubscription), disk=options.disk, **settings) as device:
        with Progress(console=console) as bars:
            bar = bars.add_task("blocks", total=options.blocks * (2 * options.steps + 3))
            pca = Pca(device, shape, lambda: bars.advance(bar))
            device.step()
            for _ in range(options.steps):
                began = time.perf_counter()
                pca.step()
                seconds.append(time.perf_counter() - began)
            different = different_blocks(pca, shape, lambda: bars.advance(bar))
        summary: dict[str, Any] = device.summary()
    console.print(
        f"{options.blocks * options.rows:,} x {options.columns} numbers, {size / 2**20:,.0f} MiB, with a budget of "
        f"{summary['budget_bytes'] / 2**20:,.0f} MiB: a step takes {min(seconds):.2f} s "
        f"({2 * size / min(seconds) / 1e9:.2f} GB/s of blocks); {summary['swap_in_bytes'] / 2**20:,.0f} MiB came in, "
        f"{summary['disk_peak_bytes'] / 2**20:,.0f} MiB of the disk taken; process peak "
        f"{summary['peak_rss_bytes'] / 2**20:,.0f} MiB"
    )
    if different:
        console.print(f"FAILED  not bit-identical: {different} of {options.blocks} blocks differ", style="red")
    if summary["device_peak_bytes"] > summary["budget_bytes"]:
        console.print("FAILED  the device peak is beyond the budget", style="red")
        return 1
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
