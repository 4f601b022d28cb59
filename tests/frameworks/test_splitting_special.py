"""NaN of every kind, infinities, zeros of both signs, subnormal numbers, equal values: parts give the whole's bits.

Or there are no parts: under `exact` an operator whose parts would differ on such data runs on host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from divided import whole_and_parts
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import CannotSplit
from ooc.pytorch.splitting.verification import difference

ODD = 40_003  # elements: something is left at the end of threads' runs and of registers
NAN = 0x7FC00000
PAYLOADS = (NAN, NAN + 0x1234, NAN - (1 << 31), NAN - (1 << 31) + 77, 0x7F800001)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def spoiled(*shape: int, every: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ordinary numbers with a special one in every so many places."""
    kinds = torch.tensor([*PAYLOADS, 0x7F800000, 0x7F800000 - (1 << 31), 0, -(1 << 31), 1, 7 - (1 << 31), 0x40800000])
    made = torch.randn(shape)
    places = made.view(-1)[::every]
    places.view(torch.int32).copy_(kinds[torch.randint(len(kinds), places.shape)])
    return made.to(dtype)


def same_or_refused(name: str, arguments: list[Any], part_bytes: int, **keywords: Any) -> bool:
    """Whether it was divided. Its bits are then those of the whole."""
    expected, found, layer = whole_and_parts(f"aten::{name}", arguments, part_bytes, "exact", **keywords)
    if isinstance(layer, CannotSplit):
        return False
    assert difference(expected, found).identical, f"{name} in parts ({layer.how})"
    return True


def test_results_are_compared_bit_by_bit() -> None:
    zeros = torch.zeros(3)
    assert difference(zeros, torch.zeros(3)).identical
    assert not difference(zeros, -zeros).identical
    numbers = torch.full((2, 3), torch.nan)
    for number, payload in zip(numbers, PAYLOADS):
        number.view(torch.int32).fill_(payload)
    assert difference(numbers[0], numbers[0].clone()).identical
    assert not difference(numbers[0], numbers[1]).identical


@pytest.mark.parametrize("name", ["max", "min", "amax", "amin", "linalg_vector_norm"])
def test_a_largest_element_that_is_no_number_has_the_bits_of_the_whole(name: str, threads: int) -> None:
    arguments = {"amax": [[]], "amin": [[]], "linalg_vector_norm": [float("inf")]}.get(name, [])
    for place, payload in ((12_345, PAYLOADS[0]), (777, PAYLOADS[1]), (ODD - 1, PAYLOADS[2])):
        x = torch.randn(ODD)
        x[place : place + 1].view(torch.int32).fill_(payload)
        same_or_refused(name, [x, *arguments], x.nbytes // 3)
    zeros = -torch.rand(ODD)
    zeros[::3], zeros[1::7] = 0.0, -0.0
    for x in (zeros, -zeros, spoiled(ODD)):
        same_or_refused(name, [x, *arguments], x.nbytes // 3)


@pytest.mark.parametrize("name", ["amax", "amin", "max.dim", "min.dim", "argmax", "sum.dim_IntList", "cummax", "sort"])
def test_reductions_of_special_numbers_along_a_dimension(name: str) -> None:
    for x in (spoiled(120, 501, every=500), torch.randint(-1, 1, (300, 77)) * 0.5):
        for dim in (0, 1):
            dims = [dim] if name in ("amax", "amin", "sum.dim_IntList") else dim
            same_or_refused(name, [x, dims], 2 * x.nbytes // 3)


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8])
@pytest.mark.parametrize("name", ["_to_copy", "copy_", "copy"])
def test_a_conversion_keeps_the_kind_of_nan(name: str, to: torch.dtype) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for x in (spoiled(10_003, dtype=dtype), spoiled(101, 103, dtype=dtype).t()):
            if name == "_to_copy":
                divided = same_or_refused(name, [x], 30_000, dtype=to)
            else:
                divided = same_or_refused(name, [torch.zeros(x.shape, dtype=to), x], 30_000)
            assert divided or x.dim() == 2, "lines of memory are cut so that the bits are the same"


def test_joined_tensors_of_unlike_types_have_the_bits_of_the_whole() -> None:
    halves, singles = spoiled(701, 7, dtype=torch.float16), spoiled(500, 7)
    same_or_refused("cat", [[halves, singles]], 4000)
    same_or_refused("stack", [[halves[:500], singles]], 4000)
    assert same_or_refused("cat", [[singles, singles]], 4000)


@pytest.mark.parametrize("weight", ["NaN", "infinity", "number"])
def test_rows_of_a_convolution_whose_weight_is_not_finite(weight: str) -> None:
    """Zeros written out at an edge are multiplied, where the whole leaves them out."""
    for transposed in (False, True):
        w = torch.randn(16, 16, 3, 3)
        w[0, 0, 0, 1] = {"NaN": float("nan"), "infinity": float("inf"), "number": 2.0}[weight]
        x = spoiled(1, 16, 80, 81, every=5000)
        parameters = [None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1]
        divided = same_or_refused("convolution", [x, w, *parameters], 800_000)
        assert divided or weight != "number"
        given = [x, spoiled(1, 16, 80, 81, every=5000), w, None, *parameters[1:], [True, False, False]]
        same_or_refused("convolution_backward", given, 800_000)


POINTWISE = """
    add.Tensor sub.Tensor mul.Tensor div.Tensor atan2 copysign.Tensor fmod.Tensor remainder.Tensor maximum minimum fmax
    fmin hypot logaddexp xlogy.Tensor pow.Tensor_Tensor eq.Tensor lt.Tensor nextafter floor_divide logical_and
    float_power.Tensor_Tensor rsub.Tensor
""".split()


@pytest.mark.parametrize("name", POINTWISE)
def test_operators_of_two_operands(name: str) -> None:
    """Both large, or one a number in a tensor, which may be the first; and in place."""
    large, other = spoiled(ODD, every=3), spoiled(ODD, every=2)
    number, wide = torch.tensor(1.5), torch.tensor(float("nan"), dtype=torch.float64)
    for given in [(large, other), (number, large), (large, number), *([(wide, large)] if name != "nextafter" else [])]:
        assert same_or_refused(name, list(given), 150_000)
    in_place = name.partition(".")[0] + "_" + ("" if "." not in name else ".Tensor")
    if registry.overload_of(f"aten::{in_place}") is not None:
        large = large.double() if name.startswith("float_power") else large
        assert same_or_refused(in_place, [large, number], 150_000)


def test_three_operands_of_which_some_are_numbers() -> None:
    large, number = spoiled(ODD, every=3), torch.tensor(0.75)
    assert same_or_refused("where.self", [large > 0, number, large], 150_000)
    assert same_or_refused("where.self", [large > 0, large, number.double()], 150_000)
    assert same_or_refused("lerp.Tensor", [number, large, large.flip(0)], 200_000)
    assert same_or_refused("masked_fill.Tensor", [large, large > 0, number], 150_000)
    assert same_or_refused("masked_fill_.Tensor", [large, large > 0, number], 150_000)
    assert same_or_refused("clamp.Tensor", [large, number.neg(), number], 150_000)
    assert same_or_refused("addcmul", [number, large, large.flip(0)], 200_000)


def test_values_that_only_large_results_show() -> None:
    for function in ("exp", "log", "sin", "sqrt", "tanh", "erf", "gelu", "silu", "reciprocal"):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert same_or_refused(function, [spoiled(ODD, every=3, dtype=dtype)], 150_000), function
    x = spoiled(32, 4, 41, 43, every=997)
    assert same_or_refused("max_pool2d_with_indices", [x, [3, 3], [2, 2], [1, 1]], x.nbytes)
    assert same_or_refused("_softmax", [spoiled(200, 501, every=700), -1, False], 400_000)


@pytest.mark.parametrize("length", [16_390, 33_028, 33_796, 40_003, 131_101])
def test_runs_of_threads_end_where_those_of_the_whole_end(length: int, threads: int) -> None:
    """What is left at a run's end is computed one by one, which gives NaN other bits; `gelu` has runs of its own."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for function in ("gelu", "silu", "mish", "neg", "sigmoid"):
            for payload in PAYLOADS:
                x = torch.full((length,), payload, dtype=torch.int64).to(torch.int32).view(torch.float32).to(dtype)
                assert same_or_refused(function, [x], 3 * x.nbytes), (function, dtype)
