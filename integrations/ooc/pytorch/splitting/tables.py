"""Axes from tables: which dimension of which argument, and of which result, each is; operators that need no more.

All of them leave whole what is computed together: sums, sorted rows, and what one index selects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ooc.pytorch.splitting.dividers import PRODUCTS, divides_along
from ooc.pytorch.splitting.parts import Axis, Named

Axes = Callable[[Named], list[Axis]]


def table(*rows: str, least: Mapping[str, Sequence[int]] | None = None) -> Axes:
    """Axes from rows such as "channels input:1 weight bias:0 -> 1 0", in the order in which they are cut.

    A row has the axis's name, arguments, each group of them with its dimension, and the dimension of each result ("-"
    for none). Arguments that are not given, or lack the dimension or elements in it, do not count. An axis is left out
    if those that count are of unlike sizes there, except for those with a star, which may be broadcast. `least` is by
    name, as in `Axis`.
    """
    parsed = []
    for row in rows:
        name, left, right = re.split(" (.*) -> ", row)
        groups = re.findall(r"([^:]+):(-?\d+)", left)
        takes = {argument: int(d) for group, d in groups for argument in group.split()}
        parsed.append((name, takes, {result: int(d) for result, d in enumerate(right.split()) if d != "-"}))

    def axes(named: Named) -> list[Axis]:
        found = []
        for name, takes, gives in parsed:
            given = {a: d for a, d in takes.items() if _has(named.get(a.rstrip("*")), d)}
            lengths = {named[a].shape[d] for a, d in given.items() if not a.endswith("*")}
            if len(lengths) == 1:
                cut = {a.rstrip("*"): d for a, d in given.items()}
                found.append(Axis(name, lengths.pop(), cut, gives, least=(least or {}).get(name, (1,))))
        return found

    return axes


def _has(value: object, dimension: int) -> bool:
    return isinstance(value, Tensor) and -value.dim() <= dimension < value.dim() and value.shape[dimension] > 0


def beside(named: Named, takes: str, own: int | Iterable[int], removed: bool = False, results: int = 2) -> list[Axis]:
    """An axis for each dimension of arguments of one shape but the operator's own, the outermost in memory first.

    `removed`: the results lack the operator's own dimensions.
    """
    given = [name for name in takes.split() if isinstance(named.get(name), Tensor)]
    first: Tensor = named[given[0]]
    owned = {d % max(first.dim(), 1) for d in ([own] if isinstance(own, int) else own)}
    found = []
    for d in sorted(set(range(first.dim())) - owned, key=lambda d: -first.stride()[d]):
        place = d - sum(one < d for one in owned) if removed else d
        gives = dict.fromkeys(range(results), place)
        found.append(Axis(f"dimension {d}", first.shape[d], dict.fromkeys(given, d), gives))
    return found


# ---- operators that need no more than their axes --------------------------------------------------------------------


def _keeps(takes: str) -> Axes:
    return lambda named: beside(named, takes, named["dim"])


def _normalized(named: Named) -> list[Axis]:
    return beside(named, "input", range(-len(named["normalized_shape"]), 0), results=3)


def _unselected(named: Named) -> list[Axis]:
    """The dimensions in which all tensors are of one size, but the one that is gathered or scattered along."""
    shapes = [named[name].shape for name in ("self", "index", "src") if isinstance(named.get(name), Tensor)]
    unlike = [d for d, n in enumerate(shapes[0]) if any(shape[d] != n for shape in shapes)]
    return beside(named, "self index src", [named["dim"], *unlike])


def _slices(named: Named) -> list[Axis]:
    return [Axis("slices", named["self"].shape[named["dim"]], {"self": named["dim"]}, {0: named["dim"]})]


def _turned(named: Named) -> list[Axis]:
    """Every dimension; what is turned round in one is cut from the other end."""
    shape = named["self"].shape
    turned = {d % max(len(shape), 1) for d in named["dims"]}
    return [Axis(f"dimension {d}", n, {"self": d}, {0: d}, mirrored=d in turned) for d, n in enumerate(shape)]


def _triangle(named: Named) -> list[Axis]:
    """Matrices of a batch, then rows: further down, the diagonal lies further to the right."""
    rows = Axis("rows", named["self"].shape[-2], {"self": -2}, {0: -2}, offsets={"diagonal": 1})
    return [*beside(named, "self", (-1, -2)), rows]


LEAST = {"columns": (64, 32, 16, 16, 16), "rows": (64, 32, 16, 8, 4)}  # of products: tiles of the library, if they fit
factors = table("columns batch2 mat2 vec2:-1 self*:-1 -> -1", "rows batch1 mat1:-2 vec1:-1 self*:-2 -> -2", least=LEAST)
_ONE: dict[str, Any] = {"multiples": (1,)}
_ROWS: dict[str, Any] = {"multiples": (16, 1)}
_MOVED: dict[str, Any] = {"multiples": (1,), "moves": True}
_PRODUCTS: dict[str, Any] = {"specials": PRODUCTS}

# Names, axes, and what else `divides_along` is told.
_TABLE: list[tuple[str, Axes, dict[str, Any]]] = [
    ("cumsum cumprod logcumsumexp cummax cummin sort sort.stable topk", _keeps("self"), {}),
    ("_fft_c2c _fft_r2c _fft_c2r", _keeps("self"), {}),
    ("linalg_cross", _keeps("self other"), {}),
    ("renorm", _slices, {}),
    ("_softmax _log_softmax _safe_softmax", _keeps("self"), _ROWS),
    ("_softmax_backward_data _log_softmax_backward_data", _keeps("grad_output output"), _ROWS),
    ("native_layer_norm _fused_rms_norm", _normalized, _ROWS),
    ("index_add index_copy index_fill.int_Scalar index_fill.int_Tensor", _keeps("self source"), _ONE),
    ("gather scatter_add scatter.src scatter.value scatter_reduce.two", _unselected, _ONE),
    ("bucketize.Tensor", lambda named: beside(named, "self", []), _ONE),
    ("flip", _turned, _MOVED),
    ("tril triu", _triangle, _MOVED),
    ("addbmm addr", factors, _PRODUCTS),
    ("mv", table("rows self:0 -> 0", least=LEAST), _PRODUCTS),
    ("addmv", table("rows mat:0 self*:0 -> 0", least=LEAST), _PRODUCTS),
    ("_cdist_forward", table("rows x1:-2 -> -2", "columns x2:-2 -> -1"), {}),
    (
        "grid_sampler_2d grid_sampler_3d",
        table("samples input grid:0 -> 0", "channels input:1 -> 1", "rows grid:1 -> 2"),
        _ROWS,
    ),
    # Samples alone: the gradients of places are sums over channels, those of channels sums over places.
    ("grid_sampler_2d_backward grid_sampler_3d_backward", table("samples grad_output input grid:0 -> 0 0"), _ONE),
]

for _names, _axes, _options in _TABLE:
    divides_along(*(f"aten::{name}" for name in _names.split()), axes=_axes, **_options)
