"""Models for planning: ``NAMED[name](batch, mode="training", ...)`` returns a function that runs one iteration.

Plain PyTorch, written after the papers named in each file, made to be recorded with fake tensors
(`swapd record --fake`): weights are whatever the default initialisation gives, inputs are noise. `mode` is "training"
(forward, backward, optimizer step) or "inference" (forward without gradients).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Make = Callable[..., Callable[[], Any]]


def _lazy(module: str, function: str, **defaults: Any) -> Make:
    def make(batch: int, **arguments: Any) -> Callable[[], Any]:
        made: Make = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        return made(batch, **{**defaults, **arguments})

    make.__name__ = function
    return make


NAMED: dict[str, Make] = {
    "resnet50": _lazy("resnet", "resnet50"),
    "densenet121": _lazy("densenet", "densenet121"),
    "alexnet": _lazy("plain", "alexnet"),
    "overfeat": _lazy("plain", "overfeat"),
    "vgg16": _lazy("vgg", "vgg", groups=(2, 2, 3, 3, 3)),
    # Sixteen convolutions: VGG's configuration E, which vDNN calls VGG-16, and its deeper variants.
    "vgg19": _lazy("vgg", "vgg", groups=(2, 2, 4, 4, 4)),
    **{f"vgg{100 * i + 16}": _lazy("vgg", "deep_vgg", hundreds=i) for i in (1, 2, 3, 4)},
    "googlenet": _lazy("googlenet", "googlenet"),
    "pix2pixhd": _lazy("pix2pixhd", "pix2pixhd"),
    "deeplabv3plus": _lazy("deeplab", "deeplabv3plus"),
    "unet": _lazy("unet", "unet"),
    "gpt2_medium": _lazy("gpt2", "gpt2", layers=24, width=1024, heads=16),
    "gpt2_5120": _lazy("gpt2", "gpt2", width=5120, heads=40, by_block=True),
    "gpt2_small": _lazy("gpt2", "gpt2", layers=12, width=768, heads=12),
    "llama_1b": _lazy("llama", "llama"),
    "llama_6656": _lazy(  # the shape of LLaMA 33B
        "llama", "llama", width=6656, heads=52, groups=52, hidden=17920, vocabulary=32000, by_block=True
    ),
    "lstm": _lazy("lstm", "lstm"),
}
