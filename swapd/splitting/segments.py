"""Layers in parts, and parts of weights ahead of time: Algorithm 1 of mmCNN (Li et al. 2019, section 3.2).

A *segment* ends with a heavy layer (a convolution or a fully connected one) and begins after the heavy layer before. As
its first layer starts, the weights of its last layer start to come in, as far as there is room: 1 / `conv_number` of
them, or none if `conv_number` is 0. Each layer runs in `self_number` parts. What the paper leaves open was chosen so
that its Tables 3, 4 and 6 come out (docs/splitting.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swapd.splitting.limits import LimitTooSmallError

MOST_PREFETCH_PARTS = 5  # pn_max: in the paper's tables a prefetch in 5 parts is made, one in 7 is not


@dataclass(frozen=True)
class Layer:
    """What a layer holds while it runs.

    No part is smaller than a unit: an output channel of the weights, or a row or an image of the activations.
    """

    name: str
    input_bytes: int
    output_bytes: int  # 0 where it works in place
    weight_bytes: int = 0
    heavy: bool = False  # a convolution or fully connected: its weights come in parts, those of others as a whole
    weight_units: int | None = None  # None if divisible to the byte
    activation_units: int | None = None

    def __post_init__(self) -> None:
        if min(self.input_bytes, self.output_bytes, self.weight_bytes) < 0:
            raise ValueError(f"{self.name}: sizes are numbers of bytes from 0 on")
        if any(units is not None and units < 1 for units in (self.weight_units, self.activation_units)):
            raise ValueError(f"{self.name}: a layer has at least one unit")

    def weight_part_bytes(self, parts: int) -> int:
        """The largest of `parts` parts of a heavy layer's weights, in whole units."""
        return _part_bytes(self.weight_bytes, self.weight_units, parts)

    def activation_part_bytes(self, parts: int) -> int:
        """The largest of `parts` parts of input and output, plus the weights if they never come in parts."""
        always = 0 if self.heavy else self.weight_bytes
        return _part_bytes(self.input_bytes + self.output_bytes, self.activation_units, parts) + always

    @property
    def smallest_bytes(self) -> int:
        """What the layer needs in as many parts as it has units."""
        weights = self.weight_part_bytes(_units(self.weight_bytes, self.weight_units)) if self.heavy else 0
        return weights + self.activation_part_bytes(_units(self.input_bytes + self.output_bytes, self.activation_units))


@dataclass(frozen=True)
class LayerStep:
    """How one layer runs, and what it starts to bring in."""

    name: str
    self_number: int  # parts that it runs in: the larger of the next two
    activation_parts: int
    weight_parts: int  # 1 for a layer that is not heavy
    conv_number: int  # parts of which one is prefetched as this layer starts; 0 if no prefetch starts here
    prefetched_layer: str | None
    activation_part_bytes: int
    prefetched_part_bytes: int  # of the segment's last layer, there or under way while this layer runs
    weight_part_bytes: int  # of its own weights, brought in as it runs; 0 where they were prefetched

    @property
    def peak_bytes(self) -> int:
        """The bytes of this layer and of the prefetch together."""
        return self.activation_part_bytes + self.prefetched_part_bytes + self.weight_part_bytes


def segments_of(layers: Sequence[Layer]) -> list[tuple[Layer, ...]]:
    """The segments of layers (line 1 of Algorithm 1). Layers after the last heavy one are a segment of their own."""
    segments: list[tuple[Layer, ...]] = []
    current: list[Layer] = []
    for layer in layers:
        current.append(layer)
        if layer.heavy:
            segments.append(tuple(current))
            current = []
    return segments + ([tuple(current)] if current else [])


def schedule_layers(
    layers: Sequence[Layer], limit_bytes: int, most_prefetch_parts: int = MOST_PREFETCH_PARTS
) -> list[LayerStep]:
    """Algorithm 1: for each layer its numbers of parts, so that `peak_bytes` is nowhere above `limit_bytes`.

    Raises:
        LimitTooSmallError: a layer does not fit even in its smallest parts.
    """
    largest = max(layers, key=lambda layer: layer.smallest_bytes, default=None)
    if largest is not None and largest.smallest_bytes > limit_bytes:
        raise LimitTooSmallError(f"layer {largest.name}", limit_bytes, largest.smallest_bytes)
    steps = []
    for segment in segments_of(layers):  # line 2
        steps += _schedule_segment(segment, limit_bytes, most_prefetch_parts)
    return steps


def _schedule_segment(segment: Sequence[Layer], limit_bytes: int, most_prefetch_parts: int) -> list[LayerStep]:
    parts = [_activation_parts(layer, limit_bytes) for layer in segment]  # line 3: pn and mem_max
    most_bytes = max(layer.activation_part_bytes(n) for layer, n in zip(segment, parts))
    end = segment[-1]
    if not end.heavy:
        return [_step(layer, n, 1) for layer, n in zip(segment, parts)]
    conv_number = _fewest_parts(end.weight_bytes, end.weight_units, limit_bytes - most_bytes) or 0  # lines 4 to 6
    if end.weight_bytes == 0 or conv_number > most_prefetch_parts:
        conv_number = 0  # line 8
    if conv_number:
        ahead = end.weight_part_bytes(conv_number)
        return [
            _step(layer, n, conv_number if layer is end else 1, conv_number if i == 0 else 0, end.name, ahead)
            for i, (layer, n) in enumerate(zip(segment, parts))
        ]
    room = limit_bytes - end.activation_part_bytes(parts[-1])
    own = _fewest_parts(end.weight_bytes, end.weight_units, room)  # line 9
    assert own is not None  # _activation_parts left room for a unit of them
    return [_step(layer, n, own if layer is end else 1) for layer, n in zip(segment, parts)]


def _step(
    layer: Layer,
    activation_parts: int,
    weight_parts: int,
    conv_number: int = 0,
    ahead: str | None = None,
    ahead_bytes: int = 0,
) -> LayerStep:
    own = layer.weight_part_bytes(weight_parts) if layer.heavy and not ahead_bytes else 0
    return LayerStep(
        name=layer.name,
        self_number=max(activation_parts, weight_parts),
        activation_parts=activation_parts,
        weight_parts=weight_parts,
        conv_number=conv_number,
        prefetched_layer=ahead if conv_number else None,
        activation_part_bytes=layer.activation_part_bytes(activation_parts),
        prefetched_part_bytes=ahead_bytes,
        weight_part_bytes=own,
    )


def _activation_parts(layer: Layer, limit_bytes: int) -> int:
    """The fewest parts of the activations beside which a unit of the layer's own weights fits too."""
    weights = layer.weight_bytes
    if layer.heavy:
        weights = layer.weight_part_bytes(_units(layer.weight_bytes, layer.weight_units))
    fewest = _fewest_parts(layer.input_bytes + layer.output_bytes, layer.activation_units, limit_bytes - weights)
    assert fewest is not None  # smallest_bytes is within the limit
    return fewest


def _units(size_bytes: int, units: int | None) -> int:
    return units if units is not None else max(size_bytes, 1)


def _part_bytes(size_bytes: int, units: int | None, parts: int) -> int:
    """The largest of `parts` parts in whole units; a unit's bytes are rounded up."""
    count = _units(size_bytes, units)
    return min(size_bytes, -(-count // parts) * -(-size_bytes // count))


def _fewest_parts(size_bytes: int, units: int | None, room_bytes: int) -> int | None:
    """The smallest number of parts of which each fits; None if not even a unit does."""
    if size_bytes <= room_bytes:
        return 1
    count = _units(size_bytes, units)
    units_that_fit = room_bytes // -(-size_bytes // count)
    return -(-count // units_that_fit) if units_that_fit > 0 else None
