"""What is turned round, shifted, cut to a triangle or indexed in parts has the bits that it has in one piece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from divided import check, whole_and_parts
from splitting_runs import both
from torch import Tensor

from ooc.pytorch.splitting.calls import CannotSplit
from ooc.pytorch.splitting.verification import difference


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


LAYOUTS = {
    "contiguous": lambda: numbers(6, 10, 7, 9),
    "channels last": lambda: numbers(6, 10, 7, 9).to(memory_format=torch.channels_last),
    "turned": lambda: numbers(9, 7, 10, 6).permute(3, 2, 1, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [[0], [1, 3], [-1], [0, 1, 2, 3], []], ids=str)
def test_turned_round(layout: str, dims: list[int]) -> None:
    x = LAYOUTS[layout]()
    assert check("aten::flip", [x, dims], x.nbytes // 3, exact=True) > 0


@pytest.mark.parametrize("name", ["tril", "triu"])
@pytest.mark.parametrize("diagonal", [0, 3, -5, 40, -40])
@pytest.mark.parametrize("shape", [(31, 23), (23, 31), (4, 9, 11)], ids=str)
def test_triangles(name: str, diagonal: int, shape: tuple[int, ...]) -> None:
    x = numbers(*shape)
    assert check(f"aten::{name}", [x, diagonal], x.nbytes // 2, exact=True) > 0


def same(name: str, args: list[Any], part_bytes: int) -> None:
    expected, found, layer = whole_and_parts(name, args, part_bytes, "exact")
    assert not isinstance(layer, CannotSplit), layer
    assert difference(expected, found).identical, (expected[0].stride(), found[0].stride())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shifts", "dims"), [([3], [1]), ([-2], [0]), ([25], [3]), ([1, 2], [0, 2]), ([1, -3], [1, 1]), ([0], [2])], ids=str
)
def test_shifted(layout: str, shifts: list[int], dims: list[int]) -> None:
    x = LAYOUTS[layout]()
    same("aten::roll", [x, shifts, dims], x.nbytes // 3)


def test_shifted_flat() -> None:
    same("aten::roll", [numbers(6, 10, 7), [13], []], 400)
    _, _, refused = whole_and_parts("aten::roll", [numbers(6, 10).t(), [13], []], 400, "exact")
    assert isinstance(refused, CannotSplit)


@pytest.mark.parametrize("places", ["indexes", "backwards", "matrix", "truth"])
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_indexed(places: str, dim: int) -> None:
    x = LAYOUTS["contiguous"]()
    n = x.shape[dim]
    wanted = {
        "indexes": torch.tensor([1, 0, 3, 3, n - 1]),
        "backwards": torch.tensor([-1, 0, -n, 2]),
        "matrix": torch.tensor([[1, 0, 3], [4, 2, 2]]),
        "truth": torch.arange(n) % 3 != 1,
    }[places]
    same("aten::index.Tensor", [x, [None] * dim + [wanted]], x.nbytes // 2)


def test_indexed_by_truth_of_several_dimensions() -> None:
    x = numbers(6, 10, 7)
    same("aten::index.Tensor", [x, [x[..., 0] > 0]], x.nbytes // 2)
    same("aten::index.Tensor", [x, [x > 0]], x.nbytes // 2)
    same("aten::index.Tensor", [x, [None, x[0] > 0]], x.nbytes // 2)


def test_an_index_out_of_bounds() -> None:
    for place in (10, -11):
        with pytest.raises(IndexError, match="out of bounds for dimension 1 with size 10"):
            whole_and_parts("aten::index.Tensor", [numbers(6, 10), [None, torch.tensor([place])]], 100, "exact")


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_sampled_at_places(mode: int) -> None:
    x, grid = numbers(3, 4, 20, 22), numbers(3, 18, 24, 2)
    assert check("aten::grid_sampler_2d", [x, grid, mode, 0, False], x.nbytes // 2 * 3, exact=True) > 0


def test_larger_than_the_budget_none_of_them_uses_host_memory(tmp_path: Path) -> None:
    source = """
        x = torch.randn(64, 48, 64)  # 768 KiB, in a budget of 512
        show("flip", x.flip(0, 2))
        show("roll", x.roll((5, -3), (0, 1)))
        show("tril", x.tril(-2))
        show("index", x[torch.arange(-64, 0, 3)])
        show("index, dimension 1", x[:, torch.arange(47, 3, -2)])
        cell = torch.nn.GRU(64, 32)  # splits its gates at each step
        with torch.no_grad():
            show("GRU", cell(x)[0])
    """
    ended = both(tmp_path, source)
    assert ended.figures["host_backed_function_count"] == 0
    divided = {row["operator"] for row in ended.figures["split_layers"]}
    assert {"aten::flip", "aten::roll", "aten::tril"} <= divided
    assert divided & {"aten::index.Tensor", "aten::index_select"}
