"""The networks: torchvision's, with random weights, and the GPT of `examples/gpt.py`. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import EXAMPLES

CLASSES = 1000
BYTES = 256


@dataclass
class Job:
    """A model on its device, one fixed batch, and what a step needs. `blocks`: in forward order."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    blocks: list[nn.Module]

    def loss(self) -> Tensor:
        logits = self.model(self.inputs)
        return F.cross_entropy(logits.flatten(0, -2), self.targets.flatten())


def make_job(model: dict[str, Any], device: torch.device) -> Job:
    """A model as `Model.to_json` tells it, its weights and batch the same in every process with this device.

    Raises:
        ImportError: torchvision is not installed.
        ValueError: no such model.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    with torch.device(device):
        network, blocks = _network(model)
    if model["kind"] == "gpt":
        text = torch.randint(BYTES, (model["batch"], model["context"] + 1), generator=generator)
        inputs, targets = text[:, :-1].to(device), text[:, 1:].to(device)
        return Job(network, inputs, targets, lambda p: torch.optim.AdamW(p, lr=1e-4), blocks)
    side = model.get("image", 224)
    inputs = torch.randn(model["batch"], 3, side, side, generator=generator).to(device)
    targets = torch.randint(CLASSES, (model["batch"],), generator=generator).to(device)
    return Job(network, inputs, targets, lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), blocks)


def _network(model: dict[str, Any]) -> tuple[nn.Module, list[nn.Module]]:
    kind = model["kind"]
    if kind == "gpt":
        made = _gpt_example().GPT(model["layers"], model["heads"], model["width"], model["context"])
        return made, list(made.blocks)
    import torchvision

    if kind == "resnet50":
        network = torchvision.models.resnet50()
        return network, [block for layer in (1, 2, 3, 4) for block in getattr(network, f"layer{layer}")]
    if kind == "densenet121":
        network = torchvision.models.densenet121()
        return network, [part for name, part in network.features.named_children() if "block" in name]
    if kind == "vgg16":
        network = torchvision.models.vgg16()
        network.features = _grouped(network.features)
        return network, list(network.features)
    raise ValueError(f"no model of the kind {kind!r}")


def _grouped(layers: nn.Sequential) -> nn.Sequential:
    """The same layers, those up to each pooling layer in a block of their own."""
    groups: list[list[nn.Module]] = [[]]
    for layer in layers:
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    return nn.Sequential(*(nn.Sequential(*group) for group in groups if group))


def _gpt_example() -> Any:
    spec = importlib.util.spec_from_file_location("ooc_examples_gpt", EXAMPLES / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint_blocks(blocks: list[nn.Module]) -> None:
    """Every block keeps its input only, and is computed again in the backward pass."""
    for block in blocks:
        plain = block.forward

        def forward(*args: Any, plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
            return checkpoint(plain, *args, use_reentrant=False, **kwargs)

        block.forward = forward  # type: ignore[method-assign]
