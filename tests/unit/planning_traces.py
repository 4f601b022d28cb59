"""Traces for the planner's tests: two networks written down by hand, and seeded random programs.

The networks follow their published shapes. Times are a roofline: the larger of arithmetic at `FLOPS` and bytes at
`BYTES_PER_SECOND`. They are what a framework's recorder would see: forward, backward in reverse, and an optimizer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from swapd.planning.problem import Problem
from swapd.trace.trace import READ, WRITE, Machine, Trace

FLOPS = 12e12
BYTES_PER_SECOND = 700e9
LAUNCH_SECONDS = 5e-6


@dataclass
class Builder:
    """Writes a trace down function by function; variables are numbered as they appear."""

    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    uses: list[dict[int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    died: list[int] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)

    def entry(self, size: int, survives: bool = True) -> int:
        """A variable that exists when the iteration starts; one that survives is its own successor."""
        return self._variable(size, -1, len(self.sizes) if survives else -1)

    def _variable(self, size: int, born: int, previous: int) -> int:
        self.sizes.append(int(size))
        self.born.append(born)
        self.died.append(-2)
        self.previous.append(previous)
        return len(self.sizes) - 1

    def call(
        self,
        name: str,
        reads: list[int],
        sizes: list[float] | None = None,
        writes: list[int] | None = None,
        flops: float = 0.0,
        seconds: float | None = None,
    ) -> list[int]:
        """A function that reads and writes variables and allocates one per size. Returns the new ones."""
        function = len(self.names)
        new = [self._variable(int(size), function, -1) for size in sizes or ()]
        flags: dict[int, int] = {}
        for v in reads:
            flags[v] = flags.get(v, 0) | READ
        for v in [*(writes or ()), *new]:
            flags[v] = flags.get(v, 0) | WRITE
        moved = sum(self.sizes[v] for v in flags)
        self.names.append(name)
        self.uses.append(flags)
        roofline = LAUNCH_SECONDS + max(flops / FLOPS, moved / BYTES_PER_SECOND)
        self.seconds.append(roofline if seconds is None else seconds)
        return new

    def free(self, *variables: int) -> None:
        """The variables are freed once the last function so far has ended."""
        for v in variables:
            self.died[v] = len(self.names) - 1

    def trace(self, chunk_bytes: int = 2 << 20, machine: Machine | None = None) -> Trace:
        """The trace; what was not freed survives."""
        n = len(self.names)
        offsets, variables, flags, starts = [0], [], [], [0.0]
        for row in self.uses:
            variables += list(row)
            flags += list(row.values())
            offsets.append(len(variables))
        for value in self.seconds:
            starts.append(starts[-1] + value)
        return Trace(
            function_names=tuple(self.names),
            function_start=starts[:n],
            function_seconds=self.seconds,
            variable_bytes=self.sizes,
            born=self.born,
            died=[n if died == -2 else died for died in self.died],
            previous=self.previous,
            use_offsets=offsets,
            use_variables=variables,
            use_flags=flags,
            fingerprint=0x5EED,
            chunk_bytes=chunk_bytes,
            machine=machine,
        )


def _optimizer(b: Builder, parameters: list[int], gradients: dict[int, int], kept: dict[int, list[int]]) -> None:
    for p in parameters:
        b.call("optimizer", [p, gradients[p], *kept[p]], writes=[p, *kept[p]])
    b.free(*gradients.values())


def resnet50(batch: int, image: int = 224, states: int = 1) -> Trace:
    """Training of ResNet-50 (He et al. 2015, table 1), float32, SGD with momentum (`states` buffers a parameter)."""
    b = Builder()
    kept: dict[int, list[int]] = {}
    backward: list = []
    gradients: dict[int, int] = {}
    parameters: list[int] = []

    def parameter(count: int) -> int:
        p = b.entry(4 * count)
        kept[p] = [b.entry(4 * count) for _ in range(states)]
        parameters.append(p)
        return p

    def conv(x: int, cin: int, cout: int, k: int, hw: int, stride: int) -> tuple[int, int]:
        w = parameter(cin * cout * k * k)
        out = hw // stride
        flops = 2.0 * batch * out * out * cin * cout * k * k
        (y,) = b.call("convolution", [x, w], [4.0 * batch * cout * out * out], flops=flops)
        backward.append(("conv", x, w, y, flops))
        return y, out

    def norm(x: int, c: int) -> int:
        w = parameter(2 * c)
        (y,) = b.call("batch_norm", [x, w], [b.sizes[x]])
        backward.append(("norm", x, w, y, 0.0))
        return y

    def relu(x: int) -> int:
        b.call("relu_", [x], writes=[x])
        backward.append(("relu", x, -1, x, 0.0))
        return x

    image_data = b.entry(4 * batch * 3 * image * image, survives=False)
    x, hw = conv(image_data, 3, 64, 7, image, 2)
    x = relu(norm(x, 64))
    (y,) = b.call("max_pool", [x], [b.sizes[x] / 4])
    (index,) = b.call("max_pool_index", [y], [b.sizes[x] / 2])
    backward.append(("pool", x, index, y, 0.0))
    x, hw, channels = y, hw // 2, 64
    for width, depth, stride0 in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(depth):
            stride = stride0 if block == 0 else 1
            y, _ = conv(x, channels, width, 1, hw, 1)
            y = relu(norm(y, width))
            y, out = conv(y, width, width, 3, hw, stride)
            y = relu(norm(y, width))
            y, _ = conv(y, width, 4 * width, 1, out, 1)
            y = norm(y, 4 * width)
            short = x
            if block == 0:
                short, _ = conv(x, channels, 4 * width, 1, hw, stride)
                short = norm(short, 4 * width)
            b.call("add_", [y, short], writes=[y])
            backward.append(("add", short, -1, y, 0.0))
            x, hw, channels = relu(y), out, 4 * width
    w = parameter(2048 * 1000)
    (loss,) = b.call("head", [x, w], [4.0 * batch * 1000], flops=4.0 * batch * 2048 * 1000)
    grad: dict[int, int] = {}
    grad[x], gradients[w] = b.call("head_backward", [x, w, loss], [b.sizes[x], b.sizes[w]], flops=8.0 * batch * 2048e3)
    b.free(loss)

    def give(v: int, g: int) -> None:
        """Gradients of a variable with two readers are added."""
        if v in grad:
            b.call("accumulate_", [grad[v], g], writes=[grad[v]])
            b.free(g)
        else:
            grad[v] = g

    for kind, x, w, y, flops in reversed(backward):
        if kind == "add":  # both sides receive the same gradient
            (g,) = b.call("clone", [grad[y]], [b.sizes[x]])
            give(x, g)
        elif kind == "relu":
            (g,) = b.call("threshold_backward", [grad[y], y], [b.sizes[y]])
            b.free(grad.pop(y))
            grad[y] = g
        elif kind == "pool":
            (g,) = b.call("max_pool_backward", [grad[y], x, w], [b.sizes[x]])
            b.free(grad.pop(y), y, w)
            give(x, g)
        else:
            g, gw = b.call(kind + "_backward", [grad[y], x, w], [b.sizes[x], b.sizes[w]], flops=2 * flops)
            gradients[w] = gw
            b.free(grad.pop(y), y)
            if x == image_data:
                b.free(g, x)
            else:
                give(x, g)
    _optimizer(b, parameters, gradients, kept)
    return b.trace()


def gpt(layers: int = 24, width: int = 1024, batch: int = 8, length: int = 1024, vocabulary: int = 50257) -> Trace:
    """Training of a GPT-2 of the given size, float32, fused attention, AdamW (two states a parameter)."""
    b = Builder()
    kept: dict[int, list[int]] = {}
    parameters: list[int] = []
    gradients: dict[int, int] = {}
    tokens = batch * length
    act = 4.0 * tokens * width

    def parameter(count: int) -> int:
        p = b.entry(4 * count)
        kept[p] = [b.entry(4 * count), b.entry(4 * count)]
        parameters.append(p)
        return p

    backward: list = []

    def op(name: str, x: int, w: int | None, size: float, flops: float = 0.0) -> int:
        (y,) = b.call(name, [x] if w is None else [x, w], [size], flops=flops)
        backward.append((name, x, w, y, flops))
        return y

    embedding = parameter(vocabulary * width)
    ids = b.entry(8 * tokens, survives=False)
    x = op("embedding", ids, embedding, act)
    for _ in range(layers):
        residual = x
        y = op("layer_norm", x, parameter(2 * width), act)
        y = op("linear", y, parameter(3 * width * width), 3 * act, 6.0 * tokens * width * width)
        y = op("attention", y, None, act, 4.0 * tokens * length * width)
        y = op("linear", y, parameter(width * width), act, 2.0 * tokens * width * width)
        (z,) = b.call("add", [residual, y], [act])
        backward.append(("add", residual, y, z, 0.0))
        residual = z
        y = op("layer_norm", z, parameter(2 * width), act)
        y = op("linear", y, parameter(4 * width * width), 4 * act, 8.0 * tokens * width * width)
        y = op("gelu", y, None, 4 * act)
        y = op("linear", y, parameter(4 * width * width), act, 8.0 * tokens * width * width)
        (x,) = b.call("add", [residual, y], [act])
        backward.append(("add", residual, y, x, 0.0))
    head = 2.0 * tokens * width * vocabulary
    logits = op("head", x, embedding, 4.0 * tokens * vocabulary, head)
    (loss,) = b.call("cross_entropy", [logits], [b.sizes[logits]])
    grad = {logits: b.call("cross_entropy_backward", [loss], [b.sizes[logits]])[0]}
    b.free(loss)
    for name, x, w, y, flops in reversed(backward):
        g = grad.pop(y)
        if name == "add":
            b.free(y)
            for v in (x, w):
                if v in grad:
                    b.call("accumulate_", [grad[v], g], writes=[grad[v]])
                else:
                    grad[v] = b.call("clone", [g], [b.sizes[v]])[0]
            b.free(g)
            continue
        new = [] if x == ids else [b.sizes[x]]
        fresh = w is not None and w not in gradients
        out = b.call(
            name + "_backward",
            [g, x, y] if w is None else [g, x, w],
            new + ([b.sizes[w]] if fresh else []),
            writes=[gradients[w]] if w in gradients else [],
            flops=2 * flops,
        )
        if fresh:
            gradients[w] = out[-1]
        if new:
            if x in grad:
                b.call("accumulate_", [grad[x], out[0]], writes=[grad[x]])
                b.free(out[0])
            else:
                grad[x] = out[0]
        b.free(g, y)
    b.free(ids)
    _optimizer(b, parameters, gradients, kept)
    return b.trace()


def in_whole_chunks(problem: Problem) -> Problem:
    """The problem with variables that fill their chunks: where many are used in part, the bound is less tight."""
    return replace(problem, variable_bytes=problem.chunks * problem.chunk_bytes)


def at_balance(trace: Trace, spill_bytes: float) -> Machine:
    """A link on which moving `spill_bytes` out and in takes as long as the trace's own computation."""
    rate = 2 * spill_bytes / float(trace.function_seconds.sum())
    return Machine(rate, rate, 20e-6)


def random_trace(seed: int, functions: int = 24, variables: int = 30) -> Trace:
    """A program of random reads, writes, lives, survivors and handed-on storages. The same seed gives the same."""
    r = random.Random(seed)
    n = r.randint(2, functions)
    b = Builder()
    handed: list[tuple[int, int]] = []  # entry variable, the number it survives under
    entries = [b.entry(r.randint(0, 9 * 100), survives=r.random() < 0.7) for _ in range(r.randint(0, variables // 3))]
    alive = list(entries)
    for _ in range(n):
        used = r.sample(alive, min(len(alive), r.randint(0, 4)))
        written = [v for v in used if r.random() < 0.3]
        alive += b.call(
            r.choice(["alpha", "beta", "gamma"]),
            [v for v in used if v not in written or r.random() < 0.5],
            [r.randint(1, 800) for _ in range(r.choice([0, 0, 1, 1, 2]))],
            writes=written,
            seconds=r.choice([0.0, 1e-3, 2e-3, 5e-3]),
        )
        for v in list(alive):
            if v not in entries and r.random() < 0.15:
                alive.remove(v)
                b.free(v)
    strangers = [v for v in entries if b.previous[v] < 0]
    for v in strangers:
        if r.random() < 0.7:
            b.free(v)
            last = max((f for f, row in enumerate(b.uses) if v in row), default=-1)
            b.died[v] = r.randint(last, n - 1)
    survivors = [v for v in alive if v not in entries]
    for v in strangers:  # some strangers are in fact what the iteration before left behind
        if survivors and b.died[v] != -2 and r.random() < 0.6:
            handed.append((v, survivors.pop()))
    for v, before in handed:
        b.previous[v] = before
        b.sizes[v] = b.sizes[before]
    rates = [1e4, 1e5, 1e6]
    return b.trace(chunk_bytes=100, machine=Machine(r.choice(rates), r.choice(rates), r.choice([0, 1e-3])))
