"""The layers of a network as mmCNN's Algorithm 1 takes them, from its modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.models.mmcnn import IMAGES
from swapd.splitting.segments import Layer


def layers_of(model: nn.Sequential, network: str) -> list[Layer]:
    """Layer 1 is the input; flattening is none. Sizes come from a run on tensors without memory."""
    model = model.to("meta").eval()
    values: Tensor = torch.empty(1, 3, IMAGES[network], IMAGES[network], device="meta")
    layers = [Layer("input", values.nbytes, 0)]
    with torch.no_grad():
        for module in model:
            before, values = values, module(values)
            if isinstance(module, nn.Flatten):
                continue
            in_place = getattr(module, "inplace", False)
            weights = sum(parameter.nbytes for parameter in module.parameters())
            layers.append(
                Layer(
                    type(module).__name__,
                    before.nbytes,
                    0 if in_place else values.nbytes,
                    weights,
                    heavy=isinstance(module, (nn.Conv2d, nn.Linear)),
                )
            )
    return layers
