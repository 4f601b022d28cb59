"""Operators over lists, of which an element is larger than a part: each element gets its own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from divided import whole_and_parts
from torch import Tensor

from ooc.pytorch.splitting.calls import CannotSplit
from ooc.pytorch.splitting.verification import difference

SIZES = (4000, 30_001, 500)
NUMBERS = [0.5, -1.25, 2.0]
LISTS = {
    "add.ScalarList": "a n", "sub.ScalarList": "a n", "mul.ScalarList": "a n", "div.ScalarList": "a n",
    "pow.ScalarList": "a n", "clamp_min.ScalarList": "a n", "maximum.ScalarList": "a n", "lerp.ScalarList": "a b n",
    "addcdiv.ScalarList": "a b c n", "addcmul.ScalarList": "a b c n", "addcdiv.Tensor": "a b c t",
    "addcmul.Tensor": "a b c t", "lerp.List": "a b c", "pow.List": "a b", "mul.List": "a b",
    "pow.ScalarAndTensor": "s a", "add.Tensor": "a s", "mul.Tensor": "a s", "lerp.Scalar": "a b s",
}  # fmt: skip


def operands(names: str) -> list[Any]:
    def values(name: str) -> Any:
        kinds: dict[str, Any] = {"n": NUMBERS, "t": torch.tensor(NUMBERS), "s": 0.3}
        return kinds[name] if name in kinds else [torch.rand(size) + 0.5 for size in SIZES]

    return [values(name) for name in names.split()]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", LISTS)
def test_each_element_gets_its_own_number(name: str, in_place: bool) -> None:
    operator = f"aten::_foreach_{name.replace('.', '_.') if in_place else name}"
    given = operands(LISTS[name])
    if name.endswith(".Tensor") and isinstance(given[-1], float):
        given[-1] = torch.tensor(0.3)
    if in_place and not isinstance(given[0], list):
        return  # of a number there is no such operator
    expected, found, layer = whole_and_parts(operator, given, 60_000, "exact")
    assert not isinstance(layer, CannotSplit), layer
    assert layer is not None and layer.parts > len(SIZES)
    assert difference(expected, found).identical
    made: list[Tensor] = found[1][0][0] if in_place else found[0]
    assert [tensor.shape for tensor in made] == [(size,) for size in SIZES]
