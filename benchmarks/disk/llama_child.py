"""Generates tokens with a Llama-shaped model whose weights are in a safetensors file.

    python -m benchmarks.disk.llama_child OUTPUT.json DEVICE THREADS WAY make|run WEIGHTS [--layers N ...] --save STATE

`make` writes random weights and ends. WAY: `plain` copies the weights into the model's parameters; `mapped` maps the
file, so that they are page cache; `offloaded` has accelerate write them into a folder and read each layer's when it is
needed. A step is a token for each sequence of the batch, from the last `--length` tokens: all have the same shapes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.disk.child import Steps, write
from benchmarks.models.llama import Llama

SIZES = {"layers": 8, "width": 2048, "heads": 32, "groups": 4, "hidden": 5632, "vocabulary": 32000}  # 1.56 GiB


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("make", "run"))
    parser.add_argument("weights", type=Path)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--scratch", type=Path, help="folder for what accelerate writes")
    return parser.parse_args(arguments)


def empty_model(options: argparse.Namespace, device: str = "cpu") -> Llama:
    """The model with parameters that nobody has filled."""
    with torch.device("meta"):
        model = Llama(*(getattr(options, name) for name in SIZES)).eval().requires_grad_(False)
    if device != "meta":
        model = model.to_empty(device=device)
        model.output.weight = model.token.weight
    return model


def make(options: argparse.Namespace) -> None:
    """Random weights, one tensor at a time in memory but for what the file's writer needs."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    model = empty_model(options)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02, generator=generator)
    save_file(dict(model.named_parameters()), options.weights)


def load(options: argparse.Namespace, way: str) -> Llama:
    """The model with the file's weights, in one of the ways."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    if way == "plain":
        model = empty_model(options)
        for name, parameter in model.named_parameters():
            with safe_open(options.weights, framework="pt") as file:  # again for each: what it maps counts as memory
                parameter.copy_(file.get_tensor(name))
        return model
    model = empty_model(options, "meta")
    weights = load_file(options.weights)
    model.load_state_dict(weights | {"output.weight": weights["token.weight"]}, assign=True)
    model.output.weight = model.token.weight
    if way == "offloaded":
        from accelerate import disk_offload

        disk_offload(model, str(options.scratch), execution_device=torch.device("cpu"))
    return model


@torch.no_grad()
def generate(model: Llama, options: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    """(batch, length + steps) tokens, each the likeliest, and the logits of the last ones."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(options.vocabulary, (options.batch_size, options.length), generator=generator)
    for _ in range(options.steps):
        logits = model(tokens[:, -options.length :])[:, -1]
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
        steps.step()
    return {"tokens": tokens, "logits": logits}


def main() -> None:
    output, device, threads, way, *arguments = sys.argv[1:]
    options = parse_arguments(arguments)
    torch.set_num_threads(int(threads))
    if options.task == "make":
        with torch.no_grad():
            make(options)
        return
    with torch.no_grad():
        model = load(options, way)
    steps = Steps(device)
    made = generate(model, options, steps)
    torch.save(made, options.save)
    write(Path(output), steps, torch.get_num_threads())


if __name__ == "__main__":
    main()
