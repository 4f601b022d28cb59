"""Batch, layer and group normalisation in parts give what they give in one piece."""

from __future__ import annotations

import pytest
import torch
from divided import check, stages, whole_and_parts
from torch import Tensor

from ooc.pytorch.splitting.verification import difference

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2}


def image(dtype: torch.dtype, last: bool = False) -> Tensor:
    made = (torch.randn(6, 24, 5, 7) * 2 + 1).to(dtype)
    return made.contiguous(memory_format=torch.channels_last) if last else made


def vector(n: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(n).add_(0.5).to(dtype)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training: bool, dtype: torch.dtype, last: bool) -> None:
    x = image(dtype, last)
    for affine in (True, False):
        weights = [vector(24, dtype), vector(24, dtype)] if affine else [None, None]
        for statistics in ([vector(24, dtype), vector(24, dtype)], [None, None]):
            if not training and statistics[0] is None:
                continue
            arguments = [x, *weights, *statistics, training, 0.1, 1e-5]
            assert check("aten::native_batch_norm", arguments, x.nbytes // 2 + 4000, exact=True) > 0


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_backward(training: bool, dtype: torch.dtype, last: bool) -> None:
    x = image(dtype, last)
    grad = torch.randn_like(x)
    for mask in ([True, True, True], [True, False, False]):
        arguments = [grad, x, vector(24, dtype), *(vector(24, dtype) for _ in range(4)), training, 1e-5, mask]
        _, mean, inverse = torch.ops.aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
        arguments[5:7] = [mean, inverse]
        exact = not (training and last)  # channels last, a vector kernel's remainder lies elsewhere
        relative = 4 * ROUNDING[dtype]
        assert check("aten::native_batch_norm_backward", arguments, x.nbytes, exact=exact, relative=relative) > 0


def test_one_channel_that_does_not_fit_is_not_divided() -> None:
    x = torch.randn(16, 3, 20, 20)
    arguments = [x, vector(3, x.dtype), vector(3, x.dtype), None, None, True, 0.1, 1e-5]
    assert check("aten::native_batch_norm", arguments, x.nbytes // 4, exact=True) == 0


def test_running_statistics_are_written_once_and_only_if_all_went_well() -> None:
    x, mean, variance = image(torch.float32), torch.zeros(24), torch.ones(24)
    arguments = [x, None, None, mean, variance, True, 0.25, 1e-5]
    expected, found, _ = whole_and_parts("aten::native_batch_norm", arguments, x.nbytes // 2, "exact")
    assert difference(expected, found).identical
    assert not torch.equal(found[1][0][3], mean)
    context, [stage] = stages("aten::native_batch_norm", arguments, x.nbytes // 2)
    plain_move, moves = context.move, []

    def move(target: Tensor, source: Tensor) -> int:
        moves.append(target)
        if len(moves) == 9:
            raise torch.OutOfMemoryError("in the middle of the parts")
        return plain_move(target, source)

    context.move = move  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError, match="in the middle"):
        stage.candidates[0].run(*arguments)
    assert torch.equal(mean, torch.zeros(24)) and torch.equal(variance, torch.ones(24))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 64), (5, 8, 64), (6, 4, 4, 16)])
def test_layer_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    for normalized in ([shape[-1]], list(shape[-2:])) if len(shape) > 2 else ([shape[-1]],):
        weight, bias = torch.randn(normalized).to(dtype), torch.randn(normalized).to(dtype)
        room = x.nbytes
        assert check("aten::native_layer_norm", [x, normalized, weight, bias, 1e-5], room, exact=True) > 0
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, normalized, weight, bias, 1e-5)
        grad = torch.randn_like(x)
        mask = [True, len(normalized) == 1, len(normalized) == 1]
        arguments = [grad, x, normalized, mean, rstd, weight, bias, mask]
        tried = check(
            "aten::native_layer_norm_backward", arguments, 3 * x.nbytes // 2, exact=False, relative=ROUNDING[dtype]
        )
        assert tried > (1 if len(normalized) == 1 else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_group_norm(dtype: torch.dtype) -> None:
    x = image(dtype)
    weight, bias = torch.randn(24).to(dtype), torch.randn(24).to(dtype)
    for room in (x.nbytes, x.nbytes // 3):
        assert check("aten::native_group_norm", [x, weight, bias, 6, 24, 35, 4, 1e-5], room, exact=True) > 0
    _, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, 6, 24, 35, 4, 1e-5)
    arguments = [torch.randn_like(x), x, mean, rstd, weight, 6, 24, 35, 4, [True, True, True]]
    assert check("aten::native_group_norm_backward", arguments, x.nbytes, exact=True) > 0
