"""Matrix products, attention and softmax in parts give what they give in one piece."""

from __future__ import annotations

import pytest
import torch
from divided import check, stages
from hypothesis import given, settings
from hypothesis import strategies as st

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2}
DTYPES = list(ROUNDING)


def matrix(rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(columns, rows) if transposed else torch.randn(rows, columns)
    return (made.t() if transposed else made).to(dtype)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 150),
    k=st.integers(1, 150),
    m=st.integers(1, 150),
    share=st.integers(2, 12),
    left=st.booleans(),
    right=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_products_of_any_size(n: int, k: int, m: int, share: int, left: bool, right: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(n * k + m)
    a, b = matrix(n, k, left, dtype), matrix(k, m, right, dtype)
    room = (n * k + k * m + n * m) * a.element_size() // share
    check("aten::mm", [a, b], room, exact=False, relative=ROUNDING[dtype])
    for added in (torch.randn(m), torch.randn(n, m), torch.randn(n, 1)):
        given_ = [added.to(dtype), a, b]
        check("aten::addmm", given_, room, exact=False, relative=2 * ROUNDING[dtype], beta=0.5, alpha=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batches_of_products(dtype: torch.dtype) -> None:
    a, b = torch.randn(6, 40, 72).to(dtype), torch.randn(6, 130, 72).to(dtype).transpose(1, 2)
    for room in (30000, 120000):
        assert check("aten::bmm", [a, b], room, exact=False, relative=ROUNDING[dtype]) > 0
        for added in (torch.randn(6, 40, 130), torch.randn(40, 130), torch.randn(130), torch.randn(6, 1, 130)):
            assert check("aten::baddbmm", [added.to(dtype), a, b], room, exact=False, relative=2 * ROUNDING[dtype]) > 0


def test_a_matrix_times_a_vector() -> None:
    added, matrix_, vector = torch.randn(300), torch.randn(300, 50), torch.randn(50)
    assert check("aten::mv", [matrix_, vector], 8000, exact=False, relative=1e-5) > 0
    assert check("aten::addmv", [added, matrix_, vector], 8000, exact=False, relative=1e-5) > 0


def test_a_linear_layer_larger_than_the_device_is_cut_by_its_outputs() -> None:
    weight, given_ = torch.empty(4096, 25088, device="meta"), torch.empty(1, 25088, device="meta")
    _, [stage] = stages("aten::addmm", [torch.empty(4096, device="meta"), given_, weight.t()], 2_000_000)
    assert stage.candidates[0].how == "columns by 16"
    _, [stage] = stages("aten::addmm", [torch.empty(4096, device="meta"), given_, weight.t()], 10_000_000)
    assert stage.candidates[0].how == "columns by 64"


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax", "_safe_softmax"])
@pytest.mark.parametrize("shape", [(64, 33), (5, 7, 16), (4, 6, 5, 3)])
def test_softmax_along_each_dimension(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for dim in range(-1, len(shape) - 1):
        last = False if name != "_safe_softmax" else None
        for view in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
            # Along an inner dimension a vector kernel's remainder may lie elsewhere: its exp rounds differently.
            exact = dim == -1 and view is x
            assert check(f"aten::{name}", [view, dim, last], x.nbytes, exact=exact, relative=1e-6) > 0


@pytest.mark.parametrize("name", ["_softmax_backward_data", "_log_softmax_backward_data"])
def test_softmax_backward(name: str) -> None:
    grad, output = torch.randn(40, 9, 5), torch.randn(40, 9, 5)
    for dim in range(3):
        arguments = [grad, output, dim, torch.float32]
        assert check(f"aten::{name}", arguments, grad.nbytes, exact=dim == 2, relative=1e-6) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_by_sequences_and_heads(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(3, 20, 8, 16).to(dtype).transpose(1, 2) for _ in range(3))
    scores = 2 * 2 * 512 * 768 * 4
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for room in (scores + q.nbytes, scores + 8 * q.nbytes):
        assert check(forward, [q, k, v, 0.0, causal], room, exact=True) > 0
    if not causal:
        mask = torch.randn(3, 1, 20, 20).to(dtype)
        assert check(forward, [q, k, v], scores + q.nbytes, exact=True, attn_mask=mask) > 0
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    grad = torch.randn_like(out)
    arguments = [grad, q, k, v, out, logsumexp, 0.0, causal]
    assert check(f"{forward}_backward", arguments, scores + 2 * q.nbytes, exact=True) > 0
