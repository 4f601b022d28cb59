"""Every algorithm computes what PyTorch computes in double precision, whole and in any parts."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.splitting.convolutions import Layer, images
from ooc.pytorch.splitting.calls import Call
from ooc.pytorch.splitting.kernels import BACKWARD_DATA, BACKWARD_FILTER, CPU, FORWARD, KINDS, Kernel, kernels_of

BATCH = 5
CONVOLUTIONS = {
    "same size": images(3, 4, (9, 7), (3, 3), padding=(1, 1)),
    "no padding": images(4, 2, (8, 8), (5, 3)),
    "more padding than needed": images(2, 3, (6, 5), (3, 2), padding=(2, 1)),
    "pointwise": images(6, 5, (4, 6), (1, 1)),
    "pointwise, strided": images(6, 5, (7, 6), (1, 1), stride=(2, 2)),
    "strided": images(3, 8, (19, 17), (7, 5), stride=(4, 2), padding=(3, 0)),
    "dilated": images(3, 2, (11, 12), (3, 3), dilation=(2, 3), padding=(2, 2)),
    "dilated beyond the image": images(3, 4, (5, 6), (3, 3), dilation=(6, 4), padding=(6, 4)),
    "dilated, strided": images(3, 4, (11, 9), (3, 2), stride=(2, 3), dilation=(3, 2), padding=(4, 1)),
    "groups": images(4, 6, (7, 7), (3, 3), padding=(1, 1), groups=2),
}
ALL = set(CONVOLUTIONS)
# Those of no more than one stride, tap or group, for which turned filters pad.
TURNED = {"same size", "no padding", "more padding than needed", "dilated", "dilated beyond the image"}
SUITED = {
    ("own", FORWARD): ALL,
    ("own turned", FORWARD): TURNED,
    ("own turned", BACKWARD_DATA): TURNED,
    ("im2col", BACKWARD_FILTER): ALL - {"groups"},
    ("im2col", BACKWARD_DATA): ALL - {"groups"},
    ("own padded", FORWARD): set(),
    ("own padded", BACKWARD_FILTER): {"dilated beyond the image"},
}


def kernel_of(layer: Layer, kind: str) -> Kernel:
    generator = torch.Generator().manual_seed(1)
    return layer.kernel(kind, [torch.randn(shape, generator=generator) for shape in layer.shapes(BATCH)])


def expected(kernel: Kernel) -> Tensor:
    call = {name: v.double() if isinstance(v, Tensor) else v for name, v in kernel.named.items()}
    if kernel.kind == FORWARD:
        return torch.ops.aten.convolution(**call)
    return torch.ops.aten.convolution_backward(**call)[int(kernel.kind == BACKWARD_FILTER)]


def only(results: Any) -> Tensor:
    (found,) = (result for result in results if result is not None)
    return found


@pytest.mark.parametrize("parts", [(5,), (2, 3), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", CONVOLUTIONS)
@pytest.mark.parametrize("algorithm", CPU)
def test_it_is_the_same_convolution(shape: str, kind: str, algorithm: str, parts: tuple[int, ...]) -> None:
    kernel = kernel_of(CONVOLUTIONS[shape], kind)
    if not CPU[algorithm].suits(kernel):
        return  # see test_which_algorithms_suit
    found = only(kernel.run([(size, CPU[algorithm]) for size in parts]))
    wanted = expected(kernel)
    assert found.shape == wanted.shape and found.is_contiguous()
    assert (found.double() - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(("algorithm", "kind"), SUITED)
def test_which_algorithms_suit(algorithm: str, kind: str) -> None:
    found = {shape for shape, layer in CONVOLUTIONS.items() if CPU[algorithm].suits(kernel_of(layer, kind))}
    assert found == SUITED[algorithm, kind]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_convolution_is_one_of_the_opposite_direction(dimensions: int, transposed: bool) -> None:
    torch.manual_seed(1)
    channels = (3, 4) if transposed else (4, 3)
    x, bias = torch.randn(5, 3, *(7, 6, 5)[:dimensions]), torch.randn(4)
    w = torch.randn(*channels, *(3, 2, 3)[:dimensions])
    rest = [1] * dimensions, [1, 0, 1][:dimensions], [1, 2, 1][:dimensions], transposed, [0] * dimensions, 1
    y = torch.ops.aten.convolution(x, w, bias, *rest)
    forward = kernels_of(Call("aten::convolution", (x, w, bias, *rest), {}))
    backward = kernels_of(Call("aten::convolution_backward", (y, x, w, [4], *rest, [True, True, True]), {}))
    assert not CPU["own turned"].suits(backward[1])
    for kernel in (*forward, backward[0]):
        assert CPU["own turned"].suits(kernel)
        for parts in ((5,), (2, 3)):
            found, wanted = kernel.run([(size, CPU["own turned"]) for size in parts]), kernel.run([(5, CPU["own"])])
            for one, other in zip(found, wanted):
                assert (one is None) == (other is None)
                assert one is None or (one.shape == other.shape and one.is_contiguous())
                assert one is None or (one - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_channels_are_the_whole(kind: str) -> None:
    """Both sides have enough channels; 20 are no multiple of the block."""
    torch.manual_seed(1)
    for layer in (images(32, 34, (7, 6), (3, 3), padding=(1, 1)), images(40, 40, (5, 5), (1, 1), stride=(2, 2))):
        kernel = layer.kernel(kind, [torch.randn(shape) for shape in layer.shapes(3)])
        for name in ("own in 2", "own in 4"):
            assert CPU[name].suits(kernel)
            for parts in ((3,), (2, 1)):
                found, wanted = only(kernel.run([(size, CPU[name]) for size in parts])), expected(kernel)
                assert found.shape == wanted.shape
                assert (found.double() - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, BACKWARD_DATA), (torch.float32, FORWARD), (torch.float64, FORWARD)]
)
def test_sums_over_blocks_of_channels_are_the_whole(dtype: torch.dtype, kind: str) -> None:
    """34 and 40 channels are no multiple of the block; the filters are larger than the images."""
    torch.manual_seed(1)
    for layer in (images(34, 34, (3, 2), (3, 3), padding=(1, 1)), images(40, 40, (3, 5), (1, 1), stride=(2, 2))):
        kernel = layer.kernel(kind, [torch.randn(shape, dtype=dtype) for shape in layer.shapes(2)])
        wanted = expected(kernel)
        for name, parts in itertools.product(("own summed in 2", "own summed in 4"), ((2,), (1, 1))):
            assert CPU[name].suits(kernel)
            found = only(kernel.run([(size, CPU[name]) for size in parts]))
            assert found.shape == wanted.shape
            assert (found.double() - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_sum_has_the_bias_once(dimensions: int) -> None:
    torch.manual_seed(1)
    x, w, bias = torch.randn(2, 18, *(5, 4, 4)[:dimensions]), torch.randn(18, 18, *[3] * dimensions), torch.randn(18)
    tensors = [each.double() for each in (x, w, bias)]
    (kernel,) = kernels_of(Call("aten::convolution", (*tensors, [1], [1], [1], False, [0], 1), {}))
    assert CPU["own summed in 2"].suits(kernel)
    assert torch.allclose(only(kernel.run([(2, CPU["own summed in 2"])])), expected(kernel))


@pytest.mark.parametrize("rows", [8, 9, 12])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_one_sample_is_computed_as_several_are(
    dimensions: int, rows: int, stride: int, dilation: int, groups: int, transposed: bool
) -> None:
    """PyTorch takes oneDNN for two such samples, but not for one, unless it has groups or one dimension."""
    torch.manual_seed(1)
    size = (rows, 6, 5)[:dimensions]
    sides = (4, 6 // groups) if transposed else (6, 4 // groups)
    x, w, bias = torch.randn(3, 4, *size), torch.randn(*sides, *[3] * dimensions), torch.randn(6)
    more = [stride - 1 if transposed else 0] * dimensions
    rest = [stride] * dimensions, [1] * dimensions, [dilation] * dimensions, transposed, more, groups
    y = torch.randn_like(torch.ops.aten.convolution(x, w, bias, *rest))
    forward = kernels_of(Call("aten::convolution", (x, w, bias, *rest), {}))
    backward = kernels_of(Call("aten::convolution_backward", (y, x, w, [6], *rest, [True, True, True]), {}))
    for kernel in (*forward, *backward):
        unlike = dimensions > 1 and groups == 1
        halves = (x if transposed else y).shape[2] % 2 == 0
        possible = {FORWARD: not transposed, BACKWARD_DATA: transposed or stride == 1, BACKWARD_FILTER: halves}
        assert CPU["own as several"].suits(kernel) == (unlike and possible[kernel.kind])
        if CPU["own as several"].suits(kernel):
            found, wanted = (kernel.run([(1, CPU[name])] * 3) for name in ("own as several", "own"))
            for one, other in zip(found, wanted, strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.shape == other.shape and one.is_contiguous())
                assert one is None or (one - other).abs().max() < 1e-5 * other.abs().max()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_filters_wider_than_the_image_have_the_same_gradient(dimensions: int, groups: int) -> None:
    """By an odd number and by an even one, with other padding and steps on each side."""
    torch.manual_seed(1)
    x, w = torch.randn(3, 4, *(6, 7, 9)[:dimensions]), torch.randn(6, 4 // groups, *[3] * dimensions)
    rest = [1, 2, 1][:dimensions], [3, 2, 4][:dimensions], [4, 3, 5][:dimensions], False, [0] * dimensions, groups
    y = torch.randn_like(torch.ops.aten.convolution(x, w, None, *rest))
    _, kernel = kernels_of(Call("aten::convolution_backward", (y, x, w, [6], *rest, [True, True, True]), {}))
    assert CPU["own padded"].suits(kernel)
    for parts in ((3,), (2, 1)):
        found, wanted = (kernel.run([(size, CPU[name]) for size in parts]) for name in ("own padded", "own"))
        assert found[0] is None and torch.allclose(found[1], wanted[1], rtol=1e-4, atol=1e-4)
        assert torch.equal(found[2], wanted[2])


def passes(x: Tensor, w: Tensor, *rest: Any) -> list[Kernel]:
    """The three kernels of a convolution with a bias; `rest` are its arguments from the strides on."""
    torch.manual_seed(1)
    bias = torch.randn(w.shape[0]).to(x.dtype)
    y = torch.randn_like(torch.ops.aten.convolution(x, w, bias, *rest))
    backward = Call("aten::convolution_backward", (y, x, w, [len(bias)], *rest, [True, True, True]), {})
    return [*kernels_of(Call("aten::convolution", (x, w, bias, *rest), {})), *kernels_of(backward)]


@pytest.mark.parametrize("rows", [8, 9, 10, 11])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_combined_rows_are_the_same_convolution(dimensions: int, rows: int) -> None:
    """With any padding that filters of three rows have, and with other dimensions of other sizes."""
    torch.manual_seed(1)
    x = torch.randn(5, 3, *(rows, 6, 5)[:dimensions], dtype=torch.float64)
    w = torch.randn(4, 3, *(3, 2, 3)[:dimensions], dtype=torch.float64)
    for padding in (0, 1, 2):
        rest = [1] * dimensions, [padding, 1, 2][:dimensions], [1, 2, 3][:dimensions], False, [0] * dimensions, 1
        for kernel in passes(x, w, *rest):
            assert CPU["winograd"].suits(kernel)
            for parts in ((5, "winograd"),), ((2, "winograd"), (3, "winograd")), ((2, "own"), (3, "winograd")):
                found, wanted = kernel.run([(n, CPU[name]) for n, name in parts]), kernel.run([(5, CPU["own"])])
                for one, other in zip(found, wanted, strict=True):
                    assert (one is None) == (other is None)
                    assert one is None or (one.shape == other.shape and one.is_contiguous())
                    assert one is None or (one - other).abs().max() < 1e-13 * other.abs().max()


def test_combined_rows_of_short_floats_are_near() -> None:
    for kernel in passes(torch.randn(2, 128, 12, 6), torch.randn(129, 128, 3, 3), [1], [1], [1], False, [0], 1):
        assert CPU["winograd"].suits(kernel)
        found, wanted = only(kernel.run([(2, CPU["winograd"])])[:2]), expected(kernel)
        assert (found.double() - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize(
    ("x", "w", "rest"),
    [
        (torch.zeros(2, 3, 7, 9), torch.zeros(4, 3, 3, 3), ([1], [1], [1], False, [0], 1)),  # few rows
        (torch.zeros(2, 3, 9, 9), torch.zeros(4, 3, 5, 3), ([1], [1], [1], False, [0], 1)),
        (torch.zeros(2, 3, 18, 9), torch.zeros(4, 3, 3, 3), ([2, 1], [1], [1], False, [0], 1)),
        (torch.zeros(2, 3, 18, 9), torch.zeros(4, 3, 3, 3), ([1], [2, 1], [2, 1], False, [0], 1)),
        (torch.zeros(2, 4, 9, 9), torch.zeros(4, 2, 3, 3), ([1], [1], [1], False, [0], 2)),
        (torch.zeros(2, 3, 9, 9), torch.zeros(3, 4, 3, 3), ([1], [1], [1], True, [0], 1)),
        (torch.zeros(2, 3, 9, 9).to(memory_format=torch.channels_last), torch.zeros(4, 3, 3, 3),
         ([1], [1], [1], False, [0], 1)),
    ],
    ids=["few rows", "five rows of filters", "strided", "dilated", "groups", "transposed", "channels last"],
)  # fmt: skip
def test_not_all_rows_combine(x: Tensor, w: Tensor, rest: tuple[Any, ...]) -> None:
    w = w if not rest[3] else w.transpose(0, 1).reshape(3, 4, 3, 3)
    call = Call("aten::convolution", (x.double(), w.double(), None, *rest), {})
    assert [CPU["winograd"].suits(kernel) for kernel in kernels_of(call)] == [False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_few_channels_or_short_numbers_do_not_combine(dtype: torch.dtype) -> None:
    channels = 127 if dtype == torch.float32 else 128
    call = Call("aten::convolution", (torch.zeros(2, channels, 9, 9, dtype=dtype),
                torch.zeros(128, channels, 3, 3, dtype=dtype), None, [1], [1], [1], False, [0], 1), {})  # fmt: skip
    assert [CPU["winograd"].suits(kernel) for kernel in kernels_of(call)] == [False]


@pytest.mark.parametrize("where", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e308])
def test_what_is_not_finite_stays_where_it_is(number: float, where: str) -> None:
    """Six rows are combined, but the result is that of three; nor do combinations of large numbers overflow."""
    x, w = torch.ones(2, 3, 12, 6, dtype=torch.float64), torch.full((4, 3, 3, 3), 1e-3, dtype=torch.float64)
    for kernel in passes(x, w, [1], [1], [1], False, [0], 1):
        if (tensor := kernel.named.get(where)) is not None and (where != "weight" or kernel.kind != BACKWARD_FILTER):
            tensor[1, 1, 2] = number
            found, wanted = (only(kernel.run([(2, CPU[name])])[:2]) for name in ("winograd", "own"))
            assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12, equal_nan=True)


STRIPS = "own in 2 strips", "own in 4 strips"


@pytest.mark.parametrize("kind", KINDS)
def test_strips_are_the_whole(kind: str) -> None:
    """Rows and channels are no multiple of the strip."""
    torch.manual_seed(1)
    long = images(33, 2, (71, 7), (5, 3), stride=(2, 1), dilation=(1, 2), padding=(2, 0))
    for layer in (images(34, 3, (37, 6), (3, 3), padding=(1, 1)), long):
        kernel = layer.kernel(kind, [torch.randn(shape) for shape in layer.shapes(2)])
        wanted = expected(kernel)
        for name, parts in itertools.product(STRIPS, ((2,), (1, 1))):
            assert CPU[name].suits(kernel)
            found = only(kernel.run([(size, CPU[name]) for size in parts]))
            assert found.shape == wanted.shape and found.is_contiguous()
            assert (found.double() - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_strips_of_volumes_and_of_transposed_convolutions_are_the_whole(dimensions: int, transposed: bool) -> None:
    torch.manual_seed(1)
    x, w, bias = torch.randn(2, 18, *(19, 5, 4)[:dimensions]), torch.randn(18, 18, *[3] * dimensions), torch.randn(18)
    rest = [1] * dimensions, [1] * dimensions, [1] * dimensions, transposed, [0] * dimensions, 1
    y = torch.ops.aten.convolution(x, w, bias, *rest)
    backward = Call("aten::convolution_backward", (y, x, w, [18], *rest, [True, True, True]), {})
    for kernel in (*kernels_of(Call("aten::convolution", (x, w, bias, *rest), {})), *kernels_of(backward)):
        assert CPU[STRIPS[0]].suits(kernel)
        found, wanted = (kernel.run([(2, CPU[name])]) for name in (STRIPS[0], "own"))
        for one, other in zip(found, wanted, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.shape == other.shape and one.is_contiguous())
            assert one is None or (one - other).abs().max() < 1e-5 * other.abs().max()


def test_what_has_groups_or_little_to_cut_has_no_strips() -> None:
    for layer in (images(16, 16, (15, 20), (3, 3), padding=(1, 1)), images(32, 32, (40, 6), (3, 3), groups=2)):
        assert not CPU[STRIPS[0]].suits(layer.kernel(FORWARD, [torch.zeros(shape) for shape in layer.shapes(2)]))


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_the_bias_comes_with_the_filters(bias: bool) -> None:
    torch.manual_seed(1)
    x, w, y = torch.randn(4, 3, 6, 6), torch.randn(16, 3, 3, 3), torch.randn(4, 16, 4, 4)
    call = Call("aten::convolution_backward", (y, x, w, [16], [1], [0], [1], False, [0], 1, [True, True, bias]), {})
    data, filters = kernels_of(call)
    assert (data.kind, filters.kind) == (BACKWARD_DATA, BACKWARD_FILTER)
    for algorithm in ("own", "own in 2", "own as several", "im2col"):
        for parts in ((4,), (1, 3)):
            _, weight, found = filters.run([(size, CPU[algorithm]) for size in parts])
            assert torch.allclose(weight, expected(filters).float(), rtol=1e-4, atol=1e-4)
            assert (found is not None) == bias
            assert not bias or torch.allclose(found, y.sum((0, 2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "other"), [(BACKWARD_FILTER, "im2col"), (FORWARD, "own turned")])
def test_algorithms_mix_within_a_kernel(kind: str, other: str) -> None:
    kernel = kernel_of(CONVOLUTIONS["same size"], kind)
    found = only(kernel.run([(2, CPU["own"]), (2, CPU[other]), (1, CPU["own"])]))
    assert torch.allclose(found.double(), expected(kernel), rtol=1e-4, atol=1e-5)


def test_costs_tell_convolutions_apart_and_not_their_batches() -> None:
    kernels = [kernel_of(layer, kind) for layer in CONVOLUTIONS.values() for kind in KINDS]
    assert len({(kernel.kind, kernel.shapes) for kernel in kernels}) == len(kernels)
    layer = CONVOLUTIONS["dilated"]
    small = layer.kernel(FORWARD, [torch.randn(shape) for shape in layer.shapes(2)])
    assert small.shapes == kernel_of(layer, FORWARD).shapes
