"""Trains a model whose training needs more memory than the machine has, and compares its losses with those in pieces.

    python -m benchmarks.disk.large [--gib 40] [--budget 8GiB] [--steps 3] [--disk FOLDER] [--output RECORD.json]

The program is plain PyTorch: residual layers of one square matrix each, AdamW, a mean squared error. Parameters,
gradients and the two moments take four times the parameters. "Whole" runs it under OOC_ALLOC=cpu with a budget and a
disk. "In pieces" is the same training by hand with one layer in memory at a time: each layer's matrix and moments are
read from files, its gradient is made from the stored activation and used at once. Every loss has the same bits.

It ends with 1 if a loss differs. It needs free space on the disk for all that the training needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine
from swapd.host_limits import peak_rss_bytes
from swapd.units import GIB, parse_bytes

WIDTH = 8192
BATCH = 32


def layers_for(gib: float) -> int:
    """How many layers need so much: parameters, gradients and two moments of 4 bytes each."""
    return max(1, round(gib * GIB / (4 * 4 * WIDTH * WIDTH)))


def batches(steps: int) -> Iterator[tuple[Any, Any]]:
    """The inputs and targets of each step, float32[BATCH, WIDTH]."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield tuple(torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))


def layer(weight: Any, x: Any) -> Any:
    import torch

    return x + torch.tanh(torch.nn.functional.linear(x, weight))


def fresh_weight() -> Any:
    import torch

    return torch.nn.Parameter(torch.empty(WIDTH, WIDTH).uniform_(-0.01, 0.01))


def optimizer_of(weights: list[Any]) -> Any:
    import torch

    return torch.optim.AdamW(weights, lr=1e-3, foreach=False)


def whole(layers: int, steps: int) -> dict[str, Any]:
    """The program as anybody would write it."""
    import torch

    torch.manual_seed(0)
    weights = [fresh_weight() for _ in range(layers)]
    optimizer = optimizer_of(weights)
    losses, seconds = [], []
    for x, target in batches(steps):
        began = time.perf_counter()
        for weight in weights:
            x = layer(weight, x)
        loss = torch.nn.functional.mse_loss(x, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        print(f"step {len(losses)} loss {losses[-1]!r} {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    return {"losses": [value.hex() for value in losses], "seconds": seconds}


class Piece:
    """One layer's matrix and optimizer, kept in a file between its uses."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> tuple[Any, Any]:
        import torch

        kept = torch.load(self.path)
        weight = torch.nn.Parameter(kept["weight"])
        optimizer = optimizer_of([weight])
        if kept["state"] is not None:
            optimizer.load_state_dict(kept["state"])
        return weight, optimizer

    def save(self, weight: Any, optimizer: Any | None) -> None:
        import torch

        state = None if optimizer is None else optimizer.state_dict()
        torch.save({"weight": weight.detach(), "state": state}, self.path)


def in_pieces(layers: int, steps: int, folder: Path) -> dict[str, Any]:
    """The same training with one layer in memory at a time."""
    import torch

    torch.manual_seed(0)
    pieces = [Piece(folder / f"{index}.pt") for index in range(layers)]
    for piece in pieces:
        piece.save(fresh_weight(), None)
    losses, seconds = [], []
    for x, target in batches(steps):
        began = time.perf_counter()
        inputs = [x]
        with torch.no_grad():
            for piece in pieces:
                inputs.append(layer(piece.load()[0], inputs[-1]))
        output = inputs.pop().requires_grad_()
        loss = torch.nn.functional.mse_loss(output, target)
        loss.backward()
        gradient = output.grad
        for piece in reversed(pieces):
            weight, optimizer = piece.load()
            x = inputs.pop().requires_grad_()
            layer(weight, x).backward(gradient)
            gradient = x.grad
            optimizer.step()
            piece.save(weight, optimizer)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
        print(f"step {len(losses)} loss {losses[-1]!r} {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
    return {"losses": [value.hex() for value in losses], "seconds": seconds}


def run(way: str, options: argparse.Namespace, folder: Path, variables: dict[str, str]) -> dict[str, Any]:
    """One way in a process of its own. Raises CalledProcessError."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    command = [sys.executable, "-m", "benchmarks.disk.large", "--way", way, "--gib", str(options.gib)]
    command += ["--steps", str(options.steps), "--disk", str(folder)]
    began = time.perf_counter()
    done = subprocess.run(command, env=kept | variables, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"process_seconds": time.perf_counter() - began}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training larger than memory: whole, and in pieces.")
    parser.add_argument("--gib", type=float, default=40.0, help="what the training needs (default %(default)s)")
    parser.add_argument("--budget", default="8GiB", help="memory for variables (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default %(default)s)")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="folder (default %(default)s)")
    parser.add_argument("--output", type=Path, help="file for the record")
    parser.add_argument("--way", choices=("whole", "pieces"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    layers = layers_for(options.gib)
    if options.way is not None:
        found = (
            whole(layers, options.steps) if options.way == "whole" else in_pieces(layers, options.steps, options.disk)
        )
        print(json.dumps(found | {"peak_rss_bytes": peak_rss_bytes()}))
        return 0
    with tempfile.TemporaryDirectory(dir=options.disk, prefix="ooc-large-") as name:
        folder = Path(name)
        settings = {"OOC_ALLOC": "cpu", "OOC_BUDGET": str(parse_bytes(options.budget)), "OOC_DISK": name}
        ours = run("whole", options, folder, settings | {"OOC_SUMMARY": str(folder / "summary.json")})
        ours["summary"] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        (folder / "summary.json").unlink()
        pieces = run("pieces", options, folder, {})
    record = {
        "layers": layers,
        "parameter_bytes": layers * WIDTH * WIDTH * 4,
        "whole": ours,
        "pieces": pieces,
        "same_losses": ours["losses"] == pieces["losses"],
        "machine": machine.describe(),
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    peak, live = ours["peak_rss_bytes"] / GIB, ours["summary"]["live_peak_bytes"] / GIB
    print(f"live peak {live:.1f} GiB, process {peak:.2f} GiB, steps {[round(s, 1) for s in ours['seconds']]} s;")
    print(f"in pieces {[round(s, 1) for s in pieces['seconds']]} s; same losses: {record['same_losses']}")
    return 0 if record["same_losses"] else 1


if __name__ == "__main__":
    sys.exit(main())
