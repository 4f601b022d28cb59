"""Trains a convolutional network, and says how long each step took and what workspace its convolutions had.

    python -m benchmarks.splitting.workspaces_child CASE STEPS OUTPUT.json

As in `inference_child`, only OOC_ variables say whether the allocator is on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.child import TURNS, Turn
from benchmarks.models import deeplab, mmcnn
from benchmarks.models.resnet import example
from ooc import pytorch
from ooc.pytorch.splitting.measure import live_during

WARM_STEPS = 3  # not counted: the first one measures
CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


def _volumes() -> nn.Module:
    """A 3D U-Net of two levels."""

    def two(channels: int, width: int) -> list[nn.Module]:
        return [
            nn.Conv3d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv3d(width, width, 3, padding=1), nn.ReLU(),
        ]  # fmt: skip

    inner = nn.Sequential(nn.MaxPool3d(2), *two(16, 32), nn.ConvTranspose3d(32, 16, 2, stride=2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.inner, self.up = nn.Sequential(*two(1, 16)), inner, nn.Sequential(*two(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(x)
            found: Tensor = self.up(torch.cat([y, self.inner(y)], 1))
            return found

    return Net()


def _head() -> nn.Module:
    """The dilated branches of DeepLab's atrous spatial pyramid, over a feature map."""
    dilated = (deeplab.conv_norm(128, 128, 3, dilation=rate) for rate in (6, 12, 18))
    return nn.Sequential(deeplab.conv_norm(64, 128, 1), *dilated)


def _doubles() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((3, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers).double()


def _pictures(*size: int, dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    return lambda: torch.randn(*size, dtype=dtype)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "AlexNet": (lambda: mmcnn.alexnet(10), _pictures(16, 3, 227, 227)),
    "VGG-S": (lambda: mmcnn.vgg_s(10), _pictures(4, 3, 224, 224)),
    "ResNet-50": (lambda: example().ResNet50(100), _pictures(16, 3, 64, 64)),
    "DeepLab head": (_head, _pictures(16, 64, 33, 33)),
    "3D U-Net": (_volumes, _pictures(8, 1, 32, 32, 32)),
    "3D U-Net of 1": (_volumes, _pictures(1, 1, 32, 32, 32)),  # of which PyTorch makes columns
    "float64": (_doubles, _pictures(32, 3, 64, 64, dtype=torch.float64)),
}


class Workspaces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest workspace that a convolution has, as the allocator counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in CONVOLUTIONS:
            return func(*args, **(kwargs or {}))
        result: list[Any] = []

        def call() -> Any:
            result.append(func(*args, **(kwargs or {})))
            return result[0]

        self.found[name] = max(self.found.get(name, 0), live_during(call))
        return result[0]


def main() -> None:
    case, steps, target = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.manual_seed(0)
    make, batch = CASES[case]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    turn, seconds = Turn(os.environ.pop(TURNS, "")), []

    def step() -> float:
        inputs = batch()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        return float(loss.detach())

    for _ in range(WARM_STEPS + steps):
        turn()  # also before the first steps: measurements are not disturbed by the other process
        step()
    record: dict[str, Any] = {"seconds": seconds}
    if pytorch.enabled():
        with Workspaces() as workspaces:
            step()
        summary = pytorch.summary()
        record |= {"workspace_bytes": workspaces.found, "split_layers": summary["split_layers"]}
        record |= {name: summary[name] for name in ("live_peak_bytes", "device_peak_bytes")}
    target.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
