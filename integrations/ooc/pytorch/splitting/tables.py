"""Axes from tables: which dimension of which argument, and of which result, each is; operators that need no more.

All of them leave whole what is computed together: sums, sorted rows, what one index selects, planes of images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.blocks import as_tuple
from ooc.pytorch.splitting.calls import Split, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import PRODUCTS, divides, divides_along
from ooc.pytorch.splitting.parts import along

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
        takes = {argument: int(d) for group, d in re.findall(r"([^:]+):(-?\d+)", left) for argument in group.split()}
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


def _unselected(named: Named) -> list[Axis]:
    """The dimensions in which all tensors are of one size, but the one that is gathered or scattered along."""
    shapes = [named[name].shape for name in ("self", "index", "src") if isinstance(named.get(name), Tensor)]
    unlike = [d for d, n in enumerate(shapes[0]) if any(shape[d] != n for shape in shapes)]
    return beside(named, "self index src", [named["dim"], *unlike])


def _turned(named: Named) -> list[Axis]:
    """Every dimension; what is turned round in one is cut from the other end."""
    turned = {d % max(named["self"].dim(), 1) for d in named["dims"]}
    return [replace(axis, mirrored=axis.takes["self"] in turned) for axis in beside(named, "self", [])]


def _triangle(named: Named) -> list[Axis]:
    """Matrices of a batch, then rows: further down, the diagonal lies further to the right."""
    rows = Axis("rows", named["self"].shape[-2], {"self": -2}, {0: -2}, offsets={"diagonal": 1})
    return [*beside(named, "self", (-1, -2)), rows]


LEAST = {"columns": (64, 32, 16, 16, 16), "rows": (64, 32, 16, 8, 4)}  # of products: tiles of the library, if they fit
factors = table("columns batch2 mat2 vec2:-1 self*:-1 -> -1", "rows batch1 mat1:-2 vec1:-1 self*:-2 -> -2", least=LEAST)
_places = table("samples input grid:0 -> 0", "channels input:1 -> 1", "rows grid:1 -> 2")
_ONE: dict[str, Any] = {"multiples": (1,)}
_ROWS: dict[str, Any] = {"multiples": (16, 1)}
_MOVED: dict[str, Any] = {"multiples": (1,), "moves": True}
_PRODUCTS: dict[str, Any] = {"specials": PRODUCTS}

# Names, axes, and what else `divides_along` is told.
_TABLE: list[tuple[str, Axes, dict[str, Any]]] = [
    ("cumsum cumprod logcumsumexp cummax cummin sort sort.stable topk", _keeps("self"), {}),
    ("_fft_c2c _fft_r2c _fft_c2r linalg_cross", _keeps("self other"), {}),
    ("renorm", lambda n: [Axis("slices", n["self"].shape[n["dim"]], {"self": n["dim"]}, {0: n["dim"]})], {}),
    ("_softmax _log_softmax _safe_softmax", _keeps("self"), _ROWS),
    ("_softmax_backward_data _log_softmax_backward_data", _keeps("grad_output output"), _ROWS),
    ("native_layer_norm _fused_rms_norm",
     lambda named: beside(named, "input", range(-len(named["normalized_shape"]), 0), results=3), _ROWS),
    ("index_add index_copy index_fill.int_Scalar index_fill.int_Tensor", _keeps("self source"), _ONE),
    ("gather scatter_add scatter.src scatter.value scatter_reduce.two", _unselected, _ONE),
    ("bucketize.Tensor", lambda named: beside(named, "self", []), _ONE),
    ("flip", _turned, _MOVED),
    ("tril triu", _triangle, _MOVED),
    ("addbmm addr", factors, _PRODUCTS),
    ("mv", table("rows self:0 -> 0", least=LEAST), _PRODUCTS),
    ("addmv", table("rows mat:0 self*:0 -> 0", least=LEAST), _PRODUCTS),
    ("_cdist_forward", table("rows x1:-2 -> -2", "columns x2:-2 -> -1"), {}),
    ("grid_sampler_2d grid_sampler_3d", _places, _ROWS),
    # Samples alone: the gradients of places are sums over channels, those of channels sums over places.
    ("grid_sampler_2d_backward grid_sampler_3d_backward", table("samples grad_output input grid:0 -> 0 0"), _ONE),
]  # fmt: skip

for _names, _axes, _options in _TABLE:
    divides_along(*(f"aten::{name}" for name in _names.split()), axes=_axes, **_options)


# ---- products, by columns and rows of the result, where sums stay whole; attention, by sequences and heads -----------
# BLAS works on tiles: blocks of multiples of 64 columns and 4 rows were bit-identical (measured with MKL).

_products = table("matrices self mat2:-3 -> -3", "columns mat2:-1 -> -1", "rows self:-2 -> -2", least=LEAST)
_matrices = table("matrices batch1 batch2:-3 self*:-3 -> -3")


@divides("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", specials=PRODUCTS)
def product(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """The product of [.., n, k] and [.., k, m]: by matrices of the batch, by columns (m), by rows (n)."""
    first = next(named[name] for name in ("batch1", "mat1", "self") if name in named)
    second = next(named[name] for name in ("batch2", "mat2") if name in named)
    axes = [*_matrices(named), *factors(named)] if "beta" in named else _products(named)
    orders = [axes, [*axes[:-2], *axes[:-3:-1]]]
    if first.dim() == 2 and first.nbytes > second.nbytes:  # so that the larger factor is read once
        orders.reverse()
    # BLAS copies a factor whose layout it does not take; oneDNN reorders both factors of short types.
    doubled = first.element_size() < 4 or not all(1 in factor.stride()[-2:] for factor in (first, second))
    made = torch.empty(*first.shape[:-1], second.shape[-1], dtype=first.dtype, device="meta")
    return along(
        context, op, named, axes, orders=orders, results=[made],
        workspace=lambda part: part.operands + part.results if doubled else 0,
    )  # fmt: skip


def _scores() -> int:
    """Bytes of the blocks of scores and their sums that the kernel keeps for every thread: 768 queries by 512 keys."""
    return 2 * 512 * 768 * 4 * torch.get_num_threads()


def _with_its_sums(named: Named) -> Named:
    """Arguments whose `logsumexp` belongs to the queries and keys: with any other, exponentials overflow."""
    forward = {name: value for name, value in named.items() if name not in ("grad_out", "out", "logsumexp")}
    if forward["attn_mask"] is not None:
        forward["attn_mask"] = torch.zeros_like(forward["attn_mask"], memory_format=torch.contiguous_format)
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(**forward)
    return named | forward | {"out": out, "logsumexp": logsumexp}


# Query, key and value are [B, H, S, D] each. A mask may be [S, S] alone.
_sequences_and_heads = table(
    "sequences grad_out query key value out logsumexp:0 attn_mask*:-4 -> 0 0 0",
    "heads grad_out query key value out logsumexp:1 attn_mask*:-3 -> 1 1 1",
)
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu", axes=_sequences_and_heads, multiples=(1,), specials=PRODUCTS,
    workspace=lambda part: _scores(),
)  # fmt: skip
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", axes=_sequences_and_heads, multiples=(1,),
    specials=PRODUCTS, sample=_with_its_sums, workspace=lambda part: part.results + _scores(),
)  # fmt: skip


# ---- planes, each of which is computed by itself: pooling, interpolation, padding -----------------------------------

_PLANES = """
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d
    avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_unpool2d reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa pixel_shuffle pixel_unshuffle
""".split()
_TENSORS = "self input grad_output indices random_samples"
_WITHOUT_SAMPLES = {"1d": 2, "2d": 3, "3d": 4}  # dimensions of an argument that is one sample
_of_sample = table(f"channels {_TENSORS}:0 -> 0 0")
# The outermost dimension in memory is cut first: that is the samples, in every usual layout.
_of_images = table(f"samples {_TENSORS}:0 -> 0 0", f"channels {_TENSORS}:1 -> 1 1")


@divides(*(f"aten::{name}{ending}" for name in _PLANES for ending in ("", "_backward", ".vec")))
def planes(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """The result for [N, C, ...] or [C, ...], by samples, then by channels."""
    name, tensors = op._schema.name, [one for one in _TENSORS.split() if isinstance(named.get(one), Tensor)]
    single = any(kind in name and named[tensors[0]].dim() == rank for kind, rank in _WITHOUT_SAMPLES.items())
    axes = _of_sample(named) if single else _of_images(named)[: 1 if "pixel" in name else 2]
    if named.get("input_size") is not None:
        axes = [replace(axis, entries={"input_size": d}) for d, axis in enumerate(axes)]
    results = _of_one_plane(context, op, named, tensors, len(axes))
    return along(context, op, named, axes, multiples=(16, 1), results=results)


def _of_one_plane(
    context: Context, op: OpOverload, named: Named, tensors: list[str], cut: int
) -> tuple[Tensor, ...] | None:
    """What the operator would return, without memory, from what it returns for one plane of zeros.

    The device "meta" would import PyTorch's symbolic shapes, which takes most of a second. None where layouts count.
    """
    leading = named[tensors[0]].shape[:cut]
    if cut < 2 or not all(named[name].is_contiguous() and named[name].shape[:cut] == leading for name in tensors):
        return None
    with context.plain(), its_own_errors():
        plane = {name: torch.zeros(1, 1, *named[name].shape[2:], dtype=named[name].dtype) for name in tensors}
        sizes = {} if named.get("input_size") is None else {"input_size": [1, 1, *named["input_size"][2:]]}
        found = as_tuple(op(**(named | plane | sizes)))
        return tuple(torch.empty(*leading, *t.shape[2:], dtype=t.dtype, device="meta") for t in found)
