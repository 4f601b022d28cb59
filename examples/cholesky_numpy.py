"""Factorise matrices several times larger than the device memory, in NumPy, and compare every bit.

    python examples/cholesky_numpy.py [--tiles 12] [--tile 256] [--oversubscription 4] [--steps 6] [--disk FOLDER]

A symmetric positive definite matrix, of which the lower half is kept in square tiles, becomes L L^T in place by the
right-looking blocked Cholesky algorithm (Golub and Van Loan, "Matrix Computations", section 4.2). Each step makes
another matrix and factorises it. The same plain functions run twice: on arrays in host memory, and on arrays of an
emulated device whose budget holds a part of the matrix. Nothing here needs PyTorch.

Bits are equal for a reason: both runs call the same code with the same shapes, strides and alignment, and with one
BLAS thread, so that sums are formed in the same order.

Ends with 0 only if every tile of every step is bit-identical, the device peak stayed within the budget, data did leave
the device, and the last steps ran under a plan.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from rich.table import Table

import ooc.numpy as ooc

CHUNK_BYTES = 64 * 1024
STEADY_FROM = 3  # steps: the first has the set-up in it, the second is recorded and planned, the third uses the plan

Matrix = NDArray[np.float64]
Tiles = dict[tuple[int, int], Any]  # of the lower half, by row and column
Operations = Mapping[str, Callable[..., None]]


def generate(tile: Matrix, row: int, column: int, step: int, order: int) -> None:
    """Random values in [-1, 1); a diagonal that dominates them makes the matrix positive definite."""
    random = np.random.default_rng((step, row, column))
    random.random(out=tile)
    tile *= 2
    tile -= 1
    if row == column:
        tile[np.diag_indices(len(tile))] += order


def factor(diagonal: Matrix) -> None:
    """A = L L^T, of one tile; the lower half of A is read."""
    diagonal[...] = np.linalg.cholesky(diagonal)


def solve(diagonal: Matrix, below: Matrix) -> None:
    """X L^T = B, for the tiles below a factorised one."""
    below[...] = np.linalg.solve(diagonal, below.T).T


def update(target: Matrix, left: Matrix, right: Matrix) -> None:
    """C - A B^T, for the tiles to the right of those."""
    target -= left @ right.T


PLAIN: Operations = {"generate": generate, "factor": factor, "solve": solve, "update": update}


def declared(device: ooc.Device) -> Operations:
    """The same four, with what they read and write."""
    return {
        "generate": device.function(writes=("tile",))(generate),
        "factor": device.function(writes=("diagonal",))(factor),
        "solve": device.function(reads=("diagonal",), writes=("below",))(solve),
        "update": device.function(reads=("left", "right"), writes=("target",))(update),
    }


def run_step(tiles: Tiles, count: int, step: int, order: int, run: Operations) -> None:
    """Makes the matrix of a step and factorises it in place."""
    for (row, column), tile in tiles.items():
        run["generate"](tile, row, column, step, order)
    for k in range(count):
        run["factor"](tiles[k, k])
        for i in range(k + 1, count):
            run["solve"](tiles[k, k], tiles[i, k])
        for j in range(k + 1, count):
            for i in range(j, count):
                run["update"](tiles[i, j], tiles[i, k], tiles[j, k])


def aligned_tile(size: int) -> Matrix:
    """An array that starts where a chunk could: the alignment of arrays on the device."""
    raw = np.empty(size * size * 8 + CHUNK_BYTES, np.uint8)
    start = -raw.ctypes.data % CHUNK_BYTES
    tile: Matrix = raw[start : start + size * size * 8].view(np.float64).reshape(size, size)
    return tile


def demand_share(turns: list[tuple[dict[str, Any], dict[str, Any]]]) -> float:
    """The part of the bytes swapped in, between the two summaries of each turn, that no prefetch had brought."""

    def moved(key: str) -> int:
        return sum(after[key] - before[key] for before, after in turns)

    return moved("demand_swap_in_bytes") / max(moved("swap_in_bytes"), 1)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both runs, step by step; the figures of the table."""
    count, size = options.tiles, options.tile
    order = count * size
    positions = [(i, j) for j in range(count) for i in range(j, count)]
    budget = int(len(positions) * size * size * 8 / options.oversubscription)
    plain: Tiles = {position: aligned_tile(size) for position in positions}
    seconds: dict[str, list[float]] = {"in_core": [], "out_of_core": []}
    different = 0
    settings = {"chunk_size": CHUNK_BYTES, "small_limit": CHUNK_BYTES, "emulated_bandwidth": options.bandwidth}
    with ooc.Device(alloc="cpu", budget=budget, disk=options.disk, **settings) as device:
        tiles: Tiles = {position: device.empty((size, size)) for position in positions}
        operations = declared(device)
        turns: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for step in range(options.steps):
            began = time.perf_counter()
            run_step(plain, count, step, order, PLAIN)
            seconds["in_core"].append(time.perf_counter() - began)
            before, began = device.summary(), time.perf_counter()
            run_step(tiles, count, step, order, operations)
            seconds["out_of_core"].append(time.perf_counter() - began)
            turns.append((before, device.summary()))
            device.step()
            # The copies that are compared are an iteration of their own, the same each time.
            different += sum(tiles[at].to_numpy().tobytes() != plain[at].tobytes() for at in positions)
            device.step()
        summary = device.summary()
    steady_from = min(STEADY_FROM, options.steps) - 1
    return {
        "device": summary["device"],
        "order": order,
        "matrix_bytes": len(positions) * size * size * 8,
        "oversubscription": summary["oversubscription"],
        "step_seconds": {name: statistics.median(values[steady_from:]) for name, values in seconds.items()},
        "all_step_seconds": seconds,
        "demand_share": demand_share(turns[steady_from:]),
        "compared_tiles": len(positions) * options.steps,
        "different_tiles": different,
        "summary": summary,
    }


def failures(figures: dict[str, Any]) -> list[str]:
    """What this example promises and these figures do not keep, one sentence each."""
    summary = figures["summary"]
    found = []
    if figures["different_tiles"]:
        found.append(f"not bit-identical: {figures['different_tiles']} of {figures['compared_tiles']} tiles differ")
    if summary["device_peak_bytes"] > summary["budget_bytes"]:
        found.append(f"device peak {summary['device_peak_bytes']} bytes, budget {summary['budget_bytes']}")
    if summary["swap_out_bytes"] == 0 or summary["swap_in_bytes"] == 0:
        found.append("nothing was swapped, so nothing was shown")
    if summary["planned_iteration_count"] == 0:
        found.append("no step ran under a plan")
    return found


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def table(figures: dict[str, Any]) -> Table:
    summary, steps = figures["summary"], figures["step_seconds"]
    result = Table(title="Blocked Cholesky, in-core and out-of-core, on the emulated device", show_header=False)
    rows = {
        "device": summary["device"],
        "matrix": f"{figures['order']:,} x {figures['order']:,}, float64, lower half in tiles",
        "matrix in memory": mib(figures["matrix_bytes"]),
        "budget": mib(summary["budget_bytes"]),
        "oversubscription": f"{figures['oversubscription']:.2f}x",
        "device peak": mib(summary["device_peak_bytes"]),
        "smallest budget that would do": mib(summary["min_budget_bytes"]),
        "step, in-core, plain NumPy": f"{steps['in_core']:.3f} s",
        "step, out-of-core": f"{steps['out_of_core']:.3f} s",
        "stalls, whole run": f"{summary['stall_seconds']:.3f} s",
        "most bytes on the disk": mib(summary["disk_peak_bytes"]),
        "moved to the host": f"{mib(summary['swap_out_bytes'])} in {summary['swap_out_count']:,}",
        "moved to the device": f"{mib(summary['swap_in_bytes'])} in {summary['swap_in_count']:,}",
        "of these on demand, last steps": f"{figures['demand_share']:.1%}",
        "iterations under a plan": f"{summary['planned_iteration_count']} of {summary['steps']}",
        "divergences": str(summary["divergence_count"]),
        "compared": f"{figures['compared_tiles']} tiles",
        "bit-identical": "[red]NO[/red]" if figures["different_tiles"] else "[green]yes[/green]",
    }
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Blocked Cholesky factorisation beyond the device's memory, in NumPy.")
    parser.add_argument("--tiles", type=int, default=12, help="on a side of the matrix (default %(default)s)")
    parser.add_argument("--tile", type=int, default=256, help="numbers on a side of a tile (default %(default)s)")
    parser.add_argument("--oversubscription", type=float, default=4.0, help="matrix / budget (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="matrices, one after the other (default %(default)s)")
    parser.add_argument("--disk", metavar="FOLDER", help="for what the budget does not hold (default: memory)")
    parser.add_argument("--bandwidth", help="of the emulated link, e.g. 2GiB/s (default: memcpy's)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON to standard output")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    console = Console(stderr=options.json)
    with console.status("factorising"):
        figures = measure(options)
    if options.json:
        print(json.dumps(figures, indent=2))
    console.print(table(figures))
    problems = failures(figures)
    for problem in problems:
        console.print(f"FAILED  {problem}", style="red", markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
