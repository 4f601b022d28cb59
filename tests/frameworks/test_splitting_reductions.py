"""Reductions, losses, pooling and tables in parts give what they give in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divided import check, stages, whole_and_parts
from torch import Tensor

from ooc.pytorch.splitting.verification import difference

EXACT = ["amax", "amin", "all.dim", "any.dim", "argmax", "argmin", "max.dim", "min.dim", "median.dim", "mode"]


def arguments_of(name: str, x: Tensor, dim: int, keep: bool) -> tuple[list[Any], dict[str, Any]]:
    if name == "linalg_vector_norm":
        return [x, 2, [dim], keep], {}
    if name == "kthvalue":
        return [x, 2, dim, keep], {}
    if name.startswith(("var", "std")):
        return [x, [dim]], {"correction": 1, "keepdim": keep}
    if name in ("sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp", "any.dims"):
        return [x, [dim], keep], {}
    return [x, dim, keep], {}


@pytest.mark.parametrize(
    "name",
    ["sum.dim_IntList", "mean.dim", "logsumexp", "prod.dim_int", "var.correction", "var_mean.correction",
     "linalg_vector_norm", "kthvalue", *EXACT],
)  # fmt: skip
def test_reductions_along_a_dimension(name: str) -> None:
    x = torch.randn(24, 40, 18)
    x[3] = 0.5
    for dim in (0, 1, -1):
        for keep in (False, True):
            given, options = arguments_of(name, x, dim, keep)
            assert check(f"aten::{name}", given, x.nbytes // 3, exact=name in EXACT, relative=1e-5, **options) > 0


@pytest.mark.parametrize("name", ["cumsum", "sort", "topk"])
def test_what_goes_along_a_dimension_and_keeps_it(name: str) -> None:
    x = torch.randn(24, 40, 18)
    for dim in (0, 1, 2):
        given = [x, 5, dim] if name == "topk" else [x, dim]
        assert check(f"aten::{name}", given, 2 * x.nbytes // 3, exact=True) > 0


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "all", "any"])
def test_reductions_to_one_number(name: str) -> None:
    x = torch.rand(60, 1000) / 60000 + 1
    for view in (x, x.t()):
        assert check(f"aten::{name}", [view], 40_000, exact=name in ("max", "min", "all", "any"), relative=1e-3) > 0
    assert check("aten::linalg_vector_norm", [x, 2], 40_000, exact=False, relative=1e-5) > 0
    assert check("aten::linalg_vector_norm", [x, float("inf")], 40_000, exact=True) > 0
    assert check("aten::sum.dim_IntList", [x, [0, 1], True], 40_000, exact=False, relative=1e-5) > 0


@pytest.mark.parametrize("shape", [(300, 50), (6, 20, 5, 7)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses(shape: tuple[int, ...], weighted: bool, reduction: int, dtype: torch.dtype) -> None:
    name = "nll_loss" if len(shape) == 2 else "nll_loss2d"
    x = torch.randn(shape).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target.flatten()[::7] = 3
    weight = torch.rand(shape[1]).to(dtype) if weighted else None
    for ignored in (-100, 3):
        given = [x, target, weight, reduction, ignored]
        room = max(x.nbytes // 3, 4 * target.nbytes)
        assert check(f"aten::{name}_forward", given, room, exact=True) > 0
        loss, total = getattr(torch.ops.aten, f"{name}_forward")(*given)
        given = [torch.rand_like(loss), x, target, weight, reduction, ignored, total]
        assert check(f"aten::{name}_backward", given, room, exact=True) > 0


def test_a_target_outside_is_refused_as_in_one_piece() -> None:
    x, target = torch.randn(300, 50), torch.randint(50, (300,))
    target[100] = 50
    with pytest.raises(IndexError, match="Target 50 is out of bounds"):
        torch.ops.aten.nll_loss_forward(x, target, None, 1, -100)
    _, [stage] = stages("aten::nll_loss_forward", [x, target, None, 1, -100], 20_000)
    with pytest.raises(IndexError, match="Target 50 is out of bounds"):
        stage.candidates[0].run(x, target, None, 1, -100)


def test_rows_of_a_table() -> None:
    table = torch.randn(500, 24)
    for indices in (torch.randint(500, (7, 30)), torch.tensor([499, 0, 499]), torch.arange(500)):
        assert check("aten::embedding", [table, indices], table.nbytes // 4, exact=True) > 0
    assert check("aten::index_select", [table, 0, torch.randint(500, (90,))], table.nbytes // 4, exact=True) > 0
    assert check("aten::index_select", [table, 1, torch.randint(24, (50,))], table.nbytes // 2, exact=True) > 0
    for wrong in (500, -1):
        _, [stage] = stages("aten::embedding", [table, torch.tensor([3, wrong])], table.nbytes // 4)
        with pytest.raises(IndexError, match="index out of range in self"):
            stage.candidates[0].run(table, torch.tensor([3, wrong]))


@pytest.mark.parametrize("padding", [-1, 5])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.medium
def test_the_gradient_of_a_table(padding: int, by_frequency: bool) -> None:
    indices = torch.randint(300, (12, 25))
    indices[:, :5] = 5
    grad = torch.randn(12, 25, 32)
    for share in (1, 2, 4):
        given = [grad, indices, 300, padding, by_frequency]
        room = (grad.nbytes + 300 * 32 * 4) // share
        assert check("aten::embedding_dense_backward", given, room, exact=True, slack=8 * indices.nbytes) > 0


def test_gathering_and_scattering() -> None:
    x = torch.randn(30, 40)
    index, source = torch.randint(40, (30, 9)), torch.randn(30, 9)
    assert check("aten::gather", [x, 1, index], x.nbytes, exact=True) > 0
    assert check("aten::scatter_add", [x, 1, index, source], x.nbytes, exact=True) > 0
    assert (
        check("aten::scatter.src", [x, 1, torch.arange(9).expand(30, 9).contiguous(), source], x.nbytes, exact=True) > 0
    )


POOLING: dict[str, list[Any]] = {
    "max_pool2d_with_indices": [[3, 2], [2, 2], [1, 1]],
    "avg_pool2d": [[3, 3], [2, 2], [1, 1], False, False],
    "_adaptive_avg_pool2d": [[3, 4]],
    "adaptive_max_pool2d": [[3, 4]],
    "upsample_nearest2d": [[20, 30]],
    "upsample_bilinear2d": [[20, 30], False],
    "upsample_bicubic2d": [[20, 30], True],
    "reflection_pad2d": [[1, 2, 2, 1]],
    "replication_pad2d": [[1, 2, 2, 1]],
}


@pytest.mark.parametrize("name", POOLING)
@pytest.mark.parametrize("last", [False, True])
def test_planes(name: str, last: bool) -> None:
    x = torch.randn(4, 12, 11, 13)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    forward, backward = (getattr(torch.ops.aten, name + ending) for ending in ("", "_backward"))
    results = forward(x, *POOLING[name])
    whole = results if isinstance(results, Tensor) else results[0]
    room = x.nbytes + whole.nbytes // 2
    exact = not last and "linear" not in name  # other kernels, and remainders of them, for other numbers of channels
    for share in (1, 4):
        assert check(f"aten::{name}", [x, *POOLING[name]], room // share, exact=exact, relative=1e-5) > 0
        if name.startswith("upsample"):
            given = [torch.randn_like(whole), POOLING[name][0], list(x.shape), *POOLING[name][1:]]
        elif name == "max_pool2d_with_indices":
            given = [torch.randn_like(whole), x, *POOLING[name], [1, 1], False, results[1]]
        elif name == "avg_pool2d":
            given = [torch.randn_like(whole), x, *POOLING[name], None]
        else:
            given = [torch.randn_like(whole), x, *([] if "adaptive" in name else POOLING[name])]
            given += [results[1]] if name == "adaptive_max_pool2d" else []
        backward(*given)
        assert check(f"aten::{name}_backward", given, (room + x.nbytes) // share, exact=exact, relative=1e-5) > 0


def test_what_cannot_be_divided_says_so() -> None:
    _, _, error = whole_and_parts("aten::sort", [torch.randn(1000)], 2000, "exact")
    assert "no division makes its parts fit 2000 bytes" in str(error)
    _, _, error = whole_and_parts("aten::_softmax", [torch.randn(4, 1000), 1, False], 2000, "exact")
    assert "no division" in str(error)


def test_under_exact_a_division_that_rounds_differently_is_refused() -> None:
    x = torch.randn(100_000)
    _, _, error = whole_and_parts("aten::sum", [x], 40_000, "exact")
    assert error.inexact and "only a division of its sums" in str(error)
    expected, found, layer = whole_and_parts("aten::sum", [x], 40_000, "allow")
    apart = difference(expected, found)
    assert not layer.identical
    assert apart.largest < 1e-2


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pad", [[1, 2], [0, 1, -2, 3], [1, 1, 2, 2, 0, 1], [-1, -1, 0, 0, 0, 0, 2, -1]])
def test_padding(pad: list[int], last: bool) -> None:
    x = torch.randn(4, 6, 9, 8)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    expected, found, layer = whole_and_parts("aten::constant_pad_nd", [x, pad, 0.5], 2000, "exact")
    assert difference(expected, found).identical and layer.parts > 4 and layer.identical


def test_gradients_of_slices() -> None:
    for name, arguments in (
        ("slice_backward", [torch.randn(30, 10, 8), [30, 40, 8], 1, 2, 32, 3]),
        ("slice_backward", [torch.randn(30, 39, 8), [30, 40, 8], 1, 1, 9223372036854775807, 1]),
        ("select_backward", [torch.randn(30, 8), [30, 40, 8], 1, -2]),
    ):
        expected, found, layer = whole_and_parts(f"aten::{name}", arguments, 2000, "exact")
        assert difference(expected, found).identical and layer.parts > 4


def test_equal_in_parts() -> None:
    x = torch.randn(50, 60)
    for other in (x.clone(), x.t().contiguous().t(), x + 1, x[:-1], torch.where(x == x[-1, -1], 0, x)):
        expected, found, _ = whole_and_parts("aten::equal", [x, other], 2000, "exact")
        assert expected[0] == found[0]
