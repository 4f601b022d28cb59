"""Times training steps of the GPT example in this process.

    python -m benchmarks.gpt_step OUTPUT.json ROUNDS [ARGUMENT ...]

Three kinds of step take turns, all in-core: intercepted, the same allocator without interception, and without our
allocator (what the step allocates comes from PyTorch's own; the parameters stay where they are).
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ooc
from benchmarks.workloads import EXAMPLES

KINDS = ("intercepted", "same allocator", "own allocator")
WARM_ROUNDS = 3


def make_step(arguments: list[str]) -> Callable[[], None]:
    """One training step of the example, as its `main` makes it."""
    sys.argv = ["gpt.py", *arguments]
    example = runpy.run_path(str(EXAMPLES / "gpt.py"))
    options = example["parse_arguments"]()
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    text = example["load_text"](options.text_bytes)
    model = example["GPT"](options.layers, options.heads, options.width, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def step() -> None:
        loss = example["loss_of"](model, example["draw_batch"](text, options, generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step


def timed(step: Callable[[], None], kind: str, install: Callable[[], None]) -> float:
    """Seconds of one step of a kind; afterwards everything is on again."""
    torch.ops.ooc.intercept_thread(kind == "intercepted")
    if kind == "own allocator":
        torch.ops.ooc.uninstall()
    try:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began
    finally:
        install()
        torch.ops.ooc.intercept_thread(True)


def measure(rounds: int, arguments: list[str]) -> dict[str, Any]:
    """{kind: seconds a step, one for each round}; the order of the kinds turns from round to round."""
    session = ooc.pytorch._active()
    core = session.core

    def install() -> None:
        torch.ops.ooc.install(core.handle, 64 << 20)

    step = make_step(arguments)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    functions = 0
    for turn in range(WARM_ROUNDS + rounds):
        for shift in range(len(KINDS)):
            kind = KINDS[(turn + shift) % len(KINDS)]
            before = core.stats()["functions"]
            spent = timed(step, kind, install)
            if kind == "intercepted":
                functions = int(core.stats()["functions"] - before)
            if turn >= WARM_ROUNDS:
                seconds[kind].append(spent)
    stats = core.stats()
    if stats["swap_out_bytes"]:
        raise SystemExit("something was swapped: without interception that is not safe, and not in-core")
    return {"seconds": seconds, "functions": functions, "live_peak_bytes": stats["live_peak_bytes"]}


def main() -> None:
    output, rounds, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    ooc.enable(alloc="emulated", policy="demand", chunk_size="128KiB", small_limit="64KiB")
    record = measure(int(rounds), arguments) | {"arguments": arguments}
    Path(output).write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
