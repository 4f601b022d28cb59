"""Traces whose functions use ranges of variables, for the tests of parts: seeded random ones, and a layer in parts."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from planning_traces import random_trace

from swapd.trace.ranged import RangedTrace
from swapd.trace.trace import Machine, Trace

CHUNK = 100


@dataclass(frozen=True)
class Ranged:
    """A trace of whole variables, and the chunks of each use, as the core records them."""

    trace: Trace
    first: NDArray[np.uint32]
    count: NDArray[np.uint32]

    def chunks(self, v: int) -> int:
        return -(-int(self.trace.variable_bytes[v]) // self.trace.chunk_bytes)

    def used(self) -> dict[tuple[int, int], dict[int, int]]:
        """(variable, chunk): {function: how it uses it}."""
        trace, found = self.trace, {}
        for f in range(trace.functions):
            for row in range(int(trace.use_offsets[f]), int(trace.use_offsets[f + 1])):
                v = int(trace.use_variables[row])
                for chunk in range(int(self.first[row]), int(self.first[row]) + int(self.count[row])):
                    uses = found.setdefault((v, chunk), {})
                    uses[f] = uses.get(f, 0) | int(trace.use_flags[row])
        return found


def cut(trace: Trace, first: NDArray[np.uint32], count: NDArray[np.uint32], most_chunks: int | None = None) -> Trace:
    """The trace of parts."""
    return RangedTrace(trace, first, count, most_chunks).cut()


def with_uses(trace: Trace, rows: list[list[tuple[int, int, int, int]]]) -> Ranged:
    """`trace` with other uses: per function (variable, flags, first chunk, chunks)."""
    flat = [row for function in rows for row in function]
    offsets = np.cumsum([0, *(len(function) for function in rows)])
    columns = np.array(flat, np.int64).reshape(len(flat), 4).T
    values = {**vars(trace), "use_offsets": offsets, "use_variables": columns[0], "use_flags": columns[1]}
    return Ranged(Trace(**values), columns[2].astype(np.uint32), columns[3].astype(np.uint32))


def _runs(r: random.Random, chunks: int) -> list[tuple[int, int]]:
    """Maximal runs of chunks, at least one of them, ascending and apart."""
    chosen = [r.random() < 0.5 for _ in range(chunks)]
    chosen[r.randrange(chunks)] = True
    edges = [i for i in range(chunks + 1) if (i < chunks and chosen[i]) != (i > 0 and chosen[i - 1])]
    return [(low, high - low) for low, high in zip(edges[::2], edges[1::2])]


def random_ranges(seed: int, share: float = 0.6) -> Ranged:
    """A random program in which about `share` of the uses of some variables are ranges; the same for a seed."""
    trace, r = random_trace(seed), random.Random(seed)
    chunks = (-(-trace.variable_bytes // CHUNK)).tolist()
    inside = [r.random() < 0.5 for _ in chunks]
    rows: list[list[tuple[int, int, int, int]]] = []
    for f in range(trace.functions):
        rows.append([])
        for row in range(int(trace.use_offsets[f]), int(trace.use_offsets[f + 1])):
            v, flags = int(trace.use_variables[row]), int(trace.use_flags[row])
            runs = _runs(r, chunks[v]) if inside[v] and chunks[v] and r.random() < share else [(0, chunks[v])]
            rows[-1] += [(v, flags, first, count) for first, count in runs]
    return with_uses(trace, rows)


def layers_in_parts(
    layers: int = 3,
    parts: int = 4,
    weight_chunks: int = 8,
    activation_chunks: int = 4,
    chunk_bytes: int = CHUNK,
    seconds: float = 1e-3,
    machine: Machine | None = None,
    training: bool = False,
) -> Ranged:
    """Layers whose weights are read part by part, each part with its own function, and whose results are written so.

    A layer reads the whole result of the one before. In training the results are read again, part by part, last first.
    """
    n_forward = layers * parts
    n = n_forward * (2 if training else 1)
    x, weights = 0, [1 + layer for layer in range(layers)]
    results = [1 + layers + layer for layer in range(layers)]
    count = 1 + 2 * layers
    rows: list[list[tuple[int, int, int, int]]] = []
    born, died, previous = [-1] * count, [n] * count, list(range(count))
    for layer in range(layers):
        before = x if layer == 0 else results[layer - 1]
        born[results[layer]], previous[results[layer]] = layer * parts, -1
        for part in range(parts):
            low, high = (part * weight_chunks // parts, (part + 1) * weight_chunks // parts)
            at, end = (part * activation_chunks // parts, (part + 1) * activation_chunks // parts)
            rows.append(
                [
                    (before, 1, 0, activation_chunks),
                    (weights[layer], 1, low, high - low),
                    (results[layer], 2, at, end - at),
                ]
            )
        if not training and layer:
            died[results[layer - 1]] = len(rows) - 1
    for layer in reversed(range(layers) if training else ()):
        for part in reversed(range(parts)):
            at, end = (part * activation_chunks // parts, (part + 1) * activation_chunks // parts)
            rows.append([(results[layer], 1, at, end - at)])
        died[results[layer]] = len(rows) - 1
    if not training:
        died[results[-1]] = n - 1
    sizes = [activation_chunks] + [weight_chunks] * layers + [activation_chunks] * layers
    whole = Trace(
        function_names=tuple(f"part of layer {i // parts % layers}" for i in range(n)),
        function_start=np.arange(n) * seconds,
        function_seconds=np.full(n, seconds),
        variable_bytes=np.array(sizes) * chunk_bytes,
        born=born,
        died=died,
        previous=previous,
        use_offsets=[0] * (n + 1),
        use_variables=[],
        use_flags=[],
        fingerprint=0xCAFE,
        chunk_bytes=chunk_bytes,
        machine=machine,
    )
    return with_uses(whole, rows)
