"""The convolutions of AlexNet and of ResNets, with modelled times and workspaces of four kinds of algorithm.

Workspaces are what the algorithms have to keep: transformed images and filters. Times are operations over a rate, and
a call. They have the shape of measured ones (larger workspaces are faster) and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from swapd.splitting.configurations import KernelTable, MicroConfiguration, micro_batch_sizes

FLOAT = 4
RATE = 9e12  # operations a second
CALL_SECONDS = 12e-6
KINDS = ("Forward", "BackwardData", "BackwardFilter")
BLOCKS = {"ResNet-50": (3, 4, 6, 3), "ResNet-152": (3, 8, 36, 3)}


class Convolution(NamedTuple):
    """Square images and filters."""

    inputs: int  # channels
    outputs: int
    size: int  # of the result
    filter: int


def alexnet() -> list[Convolution]:
    return [
        Convolution(3, 64, 55, 11),
        Convolution(64, 192, 27, 5),
        Convolution(192, 384, 13, 3),
        Convolution(384, 256, 13, 3),
        Convolution(256, 256, 13, 3),
    ]


def resnet(name: str) -> list[Convolution]:
    """The first convolution, then bottlenecks of three, and a projection at the start of each of the four stages."""
    layers = [Convolution(3, 64, 112, 7)]
    channels = 64
    for stage, count in enumerate(BLOCKS[name]):
        width, size = 64 << stage, 56 >> stage
        for block in range(count):
            layers += [
                Convolution(channels, width, size, 1),
                Convolution(width, width, size, 3),
                Convolution(width, 4 * width, size, 1),
            ]
            if block == 0:
                layers.append(Convolution(channels, 4 * width, size, 1))
            channels = 4 * width
    return layers


def algorithms(layer: Convolution, batch: int) -> list[tuple[str, float, int]]:
    """(name, share of the operations of a direct convolution and of the rate, workspace bytes)."""
    c, k, pixels, taps = layer.inputs, layer.outputs, layer.size**2, layer.filter**2
    found = [("IMPLICIT_GEMM", 1.8, 0), ("GEMM", 1.3, batch * c * taps * pixels * FLOAT)]
    if layer.filter == 3:
        tiles = batch * ((layer.size + 1) // 2) ** 2
        found.append(("WINOGRAD", 0.7, 16 * FLOAT * (tiles * (c + k) + c * k)))
    if layer.filter > 1:
        side = layer.size + layer.filter - 1
        found.append(("FFT", 8 / taps + 0.3, 2 * FLOAT * side * (side // 2 + 1) * (batch * (c + k) + c * k)))
    return found


def tables(layers: list[Convolution], batch: int, policy: str) -> list[KernelTable]:
    """Three kernels for each layer; the backward ones take a little longer."""
    made: dict[tuple[Convolution, int], tuple[MicroConfiguration, ...]] = {}
    result = []
    for number, layer in enumerate(layers):
        for slower, kind in enumerate(KINDS):
            if (layer, slower) not in made:
                made[layer, slower] = _rows(layer, slower, batch, policy)
            result.append(KernelTable(f"{number} {kind}", batch, made[layer, slower]))
    return result


def _rows(layer: Convolution, slower: int, batch: int, policy: str) -> tuple[MicroConfiguration, ...]:
    operations = 2.0 * layer.inputs * layer.outputs * layer.size**2 * layer.filter**2
    return tuple(
        MicroConfiguration(size, name, CALL_SECONDS + share * (1 + 0.1 * slower) * size * operations / RATE, workspace)
        for size in micro_batch_sizes(policy, batch)
        for name, share, workspace in algorithms(layer, size)
    )
