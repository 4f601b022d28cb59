"""Convolutions in parts give what they give in one piece, whatever their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divided import check, stages
from hypothesis import given, settings
from hypothesis import strategies as st

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2}


@st.composite
def convolutions(draw: Any) -> list[Any]:
    """Arguments of aten::convolution of one to three dimensions, ordinary or transposed."""
    spatial = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 1, 2, 4]))
    sizes = [draw(st.integers(5, 18 if spatial < 3 else 9)) for _ in range(spatial)]
    kernel = [draw(st.integers(1, 4)) for _ in range(spatial)]
    stride = [draw(st.integers(1, 3)) for _ in range(spatial)]
    padding = [draw(st.integers(0, (k - 1))) for k in kernel]
    dilation = [draw(st.integers(1, 2)) if (k - 1) * 2 + 1 <= 5 else 1 for k in kernel]
    transposed = draw(st.booleans())
    output_padding = [draw(st.integers(0, max(s, d) - 1)) if transposed else 0 for s, d in zip(stride, dilation)]
    inputs, outputs = groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 20))
    weight = [inputs, outputs // groups] if transposed else [outputs, inputs // groups]
    dtype = draw(st.sampled_from(list(ROUNDING)))
    last = draw(st.booleans()) and spatial == 2
    torch.manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(draw(st.integers(1, 4)), inputs, *sizes).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    bias = torch.randn(outputs).to(dtype) if draw(st.booleans()) else None
    made = torch.randn(*weight, *kernel).to(dtype)
    return [x, made, bias, stride, padding, dilation, transposed, output_padding, groups]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(arguments=convolutions(), share=st.integers(2, 9))
def test_any_convolution(arguments: list[Any], share: int) -> None:
    x, weight = arguments[:2]
    whole = torch.ops.aten.convolution(*arguments)
    room = 3 * (x.nbytes + weight.nbytes + whole.nbytes) // share + 2000
    check("aten::convolution", arguments, room, exact=False, relative=ROUNDING[x.dtype])


def image_layer(
    channels: int, size: int, outputs: int, kernel: int, stride: int, padding: int, batch: int = 1
) -> list[Any]:
    x = torch.empty(batch, channels, size, size, device="meta")
    weight = torch.empty(outputs, channels, kernel, kernel, device="meta")
    bias = torch.empty(outputs, device="meta")
    return [x, weight, bias, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1]


@pytest.mark.parametrize(
    ("layer", "how"),
    [
        (image_layer(64, 224, 64, 3, 1, 1), "channels by 32, rows by 10"),
        (image_layer(512, 14, 512, 3, 1, 1), "channels by 32"),
        (image_layer(64, 56, 64, 3, 1, 1, batch=32), "samples by 1"),
        (image_layer(256, 56, 512, 1, 2, 0), "subsampled, "),
    ],
)
def test_the_layers_of_known_networks_are_cut_as_little_as_needed(layer: list[Any], how: str) -> None:
    _, [stage] = stages("aten::convolution", layer, 5_000_000 if layer[0].shape[0] > 1 else 2_200_000)
    assert stage.candidates[0].how.startswith(how), stage.candidates[0].how


@settings(max_examples=60, deadline=None, derandomize=True)
@given(arguments=convolutions(), share=st.integers(2, 9), mask=st.lists(st.booleans(), min_size=3, max_size=3))
def test_any_gradient(arguments: list[Any], share: int, mask: list[bool]) -> None:
    x, weight, _, *parameters = arguments
    grad = torch.randn_like(torch.ops.aten.convolution(*arguments))
    room = 4 * (x.nbytes + weight.nbytes + grad.nbytes) // share + 2000
    given_ = [grad, x, weight, [grad.shape[1]], *parameters, mask]
    check("aten::convolution_backward", given_, room, exact=False, relative=4 * ROUNDING[x.dtype])


def test_gradients_are_cut_in_all_ways() -> None:
    layer = image_layer(64, 28, 64, 3, 1, 1, batch=16)
    grad = torch.empty(16, 64, 28, 28, device="meta")
    ways = set()
    for room in (400_000, 1_000_000, 4_000_000, 12_000_000):
        given_ = [grad, layer[0], layer[1], [64], *layer[3:], [True, True, True]]
        for stage in stages("aten::convolution_backward", given_, room)[1]:
            for piece in stage.candidates:
                axes = {word.split(" by ")[0] for word in piece.how.split(", ")}
                ways |= {(stage.name, axis) for axis in axes}
                assert piece.rounds == (stage.name == "filter gradient" and "samples" in axes)  # a sum of parts
    assert ways >= {("data gradient", "samples"), ("data gradient", "channels"), ("data gradient", "rows")}
    assert ways >= {("filter gradient", name) for name in ("samples", "channels", "inner channels")}
