"""Operators whose arguments and results are cut along common axes: rows, channels, planes, heads.

An `Axis` says where in each tensor it lies. `along` makes candidates from axes: block sizes that fit, the preferred
ones first, and a function that runs the operator once for each block. A block of a tensor is a view if that is dense
in memory, else a compact copy: of such a view kernels would make copies of their own, or touch what lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.context import CannotSplit, Context, Split, its_own_errors
from ooc.pytorch.splitting.geometry import extent, rounded
from ooc.pytorch.splitting.grids import boxes, count, grid, label

PREFERRED = (64, 32, 16, 8, 4, 1)  # blocks of these leave vector kernels the remainders that the whole has
MOST_CANDIDATES = 8
Named = dict[str, Any]


@dataclass(frozen=True)
class Piece(Split):
    """A division, and what its largest part takes.

    `rounds`: the division divides sums, so it changes bits on some data, whatever a verification on others shows.
    """

    part_bytes: int = 0
    rounds: bool = False


Place = int | tuple[int, int]  # a dimension; and how many of its elements belong to one unit of the axis, if not one


@dataclass(frozen=True)
class Axis:
    """What an operator can be cut along.

    A tensor with one element in its dimension is broadcast, and not cut. Dimensions may count from the right.
    """

    name: str
    length: int  # units
    takes: Mapping[str, Place]  # arguments that are cut
    gives: Mapping[int, Place]  # results whose parts lie one after the other
    counts: Mapping[str, int] = field(default_factory=dict)  # integers that are its length: elements a unit
    entries: Mapping[str, Place] = field(default_factory=dict)  # lists with its size: index, elements a unit
    least: Sequence[int] = (1,)  # units of a block; where nothing fits with the first, the second counts, and so on


def pair(place: Place) -> tuple[int, int]:
    """The dimension of a place and its elements a unit."""
    return place if isinstance(place, tuple) else (place, 1)


# ---- calls ----------------------------------------------------------------------------------------------------------


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
    """All arguments of a call by name; those that were not given have their defaults."""
    named: Named = {}
    for position, argument in enumerate(op._schema.arguments):
        if position < len(args):
            named[argument.name] = args[position]
        elif argument.name in kwargs:
            named[argument.name] = kwargs[argument.name]
        else:
            named[argument.name] = argument.default_value
    return named


def as_tuple(results: Any) -> tuple[Any, ...]:
    """The results of an operator as a tuple, though there may be only one."""
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def unbound(named: Mapping[str, Any]) -> str:
    """A text with everything that the results' shapes depend on."""

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
        return str(value)

    return ";".join(text(value) for value in named.values())


_shapes: dict[tuple[OpOverload, str], tuple[Any, ...]] = {}


def results_of(context: Context, op: OpOverload, named: Named) -> tuple[Any, ...]:
    """What the operator would return, on the device "meta", with shapes and strides but without memory."""
    key = (op, unbound(named))
    if key not in _shapes:
        if len(_shapes) > 4096:
            _shapes.clear()
        meta = {name: _to_meta(value) for name, value in named.items()}
        with context.plain(), its_own_errors():  # so that nothing here is a function to the core
            _shapes[key] = as_tuple(op(**meta))
    return _shapes[key]


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_to_meta(element) for element in value)
    return value


# ---- memory ---------------------------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> int:
    """Bytes of all elements if they lie densely."""
    return tensor.numel() * tensor.element_size()


def own_bytes(context: Context, size_bytes: int) -> int:
    """Bytes that new memory takes on the device: whole chunks, or its own size if it is smaller than a chunk."""
    chunk = context.chunk_bytes
    return size_bytes if size_bytes < chunk else -(-size_bytes // chunk) * chunk


def view_bytes(context: Context, size_bytes: int) -> int:
    """Bytes that a dense view of a larger variable takes on the device at most."""
    return rounded(size_bytes, context.chunk_bytes) if size_bytes else 0


@lru_cache(maxsize=4096)
def _dense(size: torch.Size, stride: tuple[int, ...]) -> bool:
    numel = size.numel()
    return numel == 0 or (extent(size, stride) == numel and all(s > 0 or n == 1 for n, s in zip(size, stride)))


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory, each once."""
    return _dense(tensor.shape, tensor.stride())


def dense_stride(size: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, with dimensions in the order of the strides `like` (of equal ones the later one inside)."""
    made, step = [0] * len(size), 1
    for dimension in sorted(range(len(size)), key=lambda d: (like[d], -d)):
        made[dimension] = step
        step *= max(size[dimension], 1)
    return tuple(made)


def compact(context: Context, view: Tensor) -> Tensor:
    """The view itself where it lies densely in memory; else a dense copy with its dimensions in the same order."""
    if is_dense(view):
        return view
    made = context.empty(size=view.shape, stride=dense_stride(view.shape, view.stride()), dtype=view.dtype)
    context.move(made, view)
    return made


# ---- along axes -----------------------------------------------------------------------------------------------------


def along(
    context: Context,
    op: OpOverload,
    named: Named,
    axes: Sequence[Axis],
    *,
    orders: Sequence[Sequence[int]] | None = None,
    multiples: Sequence[int] = PREFERRED,
    workspace: Callable[[int, int], int] = lambda operands, results: 0,
    before: Callable[[Named], Named] | None = None,
    unread: Sequence[str] = (),
) -> list[Piece]:
    """Divisions of an operator along axes; the preferred ones first, none if single units do not fit.

    Args:
        named: all arguments of the operator.
        orders: in which orders axes are cut; each axis only as far as those before it do not suffice. By default one
            order, that of `axes`.
        multiples: block sizes are multiples of one of these; each that makes a difference gives a division.
        workspace: gives the bytes that the kernel allocates beside a part's results, from the bytes of the part's
            operands and of its results.
        before: changes the arguments (of the call, and of the verification) before they are cut.
        unread: arguments of which only the sizes are looked at.
    """
    axes = [axis for axis in axes if axis.length > 1]
    if not axes:
        return []
    if before is not None:
        named = before(named)
    results = results_of(context, op, named)
    read = {name: value for name, value in named.items() if name not in unread}
    need = _Need(context, read, results, axes, workspace)
    lengths = [axis.length for axis in axes]
    steps = max(len(axis.least) for axis in axes)
    floors = [[axis.least[min(step, len(axis.least) - 1)] for axis in axes] for step in range(steps)]
    found: dict[tuple[int, ...], Piece] = {}
    for order in orders if orders is not None else [range(len(axes))]:
        for multiple in multiples:
            used = [place for place in order if place < len(axes)]
            sizes = grid(lengths, floors, used, multiple, lambda blocks: need(blocks) <= context.part_bytes)
            if sizes is None or sizes in found or len(found) == MOST_CANDIDATES:
                continue
            how = label([axis.name for axis in axes], lengths, sizes)
            run = _Run(context, op, results, axes, sizes, before, unread)
            found[sizes] = Piece(how, count(lengths, sizes), run, need(sizes))
    return list(found.values())


def _cut_dimension(tensor: Tensor, place: Place | None, length: int) -> tuple[int, int] | None:
    """The dimension to cut and its elements a unit; None if the tensor is broadcast along the axis or lacks it."""
    if place is None:
        return None
    dimension, unit = pair(place)
    if not -tensor.dim() <= dimension < tensor.dim():
        return None
    size = tensor.shape[dimension]
    if size == 1 and length * unit != 1:
        return None
    if size != length * unit:
        raise CannotSplit(f"{length * unit} were expected in dimension {dimension} of a shape {tuple(tensor.shape)}")
    return dimension % tensor.dim(), unit


class _Need:
    """Computes the bytes of one part from the block sizes."""

    def __init__(
        self,
        context: Context,
        named: Named,
        results: Sequence[Any],
        axes: Sequence[Axis],
        workspace: Callable[[int, int], int],
    ) -> None:
        self._context, self._axes, self._workspace = context, axes, workspace
        self._arguments = [
            (value, [_cut_dimension(value, axis.takes.get(name), axis.length) for axis in axes])
            for name, value in named.items()
            if isinstance(value, Tensor)
        ]
        self._results = [
            (value, [_cut_dimension(value, axis.gives.get(i), axis.length) for axis in axes])
            for i, value in enumerate(results)
            if isinstance(value, Tensor)
        ]

    def __call__(self, sizes: Sequence[int]) -> int:
        operands = inputs = outputs = 0
        for tensor, cuts in self._arguments:
            lengths = self._lengths(tensor, cuts, sizes)
            if lengths is None:
                operands += self._context.footprint(tensor)
                inputs += bytes_of(tensor)
                continue
            part = torch.Size(lengths).numel() * tensor.element_size()
            operands += view_bytes(self._context, part)
            inputs += part
        for tensor, cuts in self._results:
            part = torch.Size(self._lengths(tensor, cuts, sizes) or tensor.shape).numel() * tensor.element_size()
            outputs += part
            operands += own_bytes(self._context, part)
        extra = self._workspace(inputs, outputs)
        return operands + (own_bytes(self._context, extra) if extra else 0)

    @staticmethod
    def _lengths(tensor: Tensor, cuts: Sequence[tuple[int, int] | None], sizes: Sequence[int]) -> list[int] | None:
        lengths, any_cut = list(tensor.shape), False
        for cut, size in zip(cuts, sizes):
            if cut is not None:
                lengths[cut[0]] = size * cut[1]
                any_cut = True
        return lengths if any_cut else None


class _Run:
    """Runs an operator block by block."""

    def __init__(
        self,
        context: Context,
        op: OpOverload,
        results: Sequence[Any],
        axes: Sequence[Axis],
        sizes: Sequence[int],
        before: Callable[[Named], Named] | None,
        unread: Sequence[str],
    ) -> None:
        self._context, self._op, self._axes, self._sizes, self._before = context, op, axes, sizes, before
        self._results, self._unread = results, unread

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = bind(self._op, args, kwargs)
        if self._before is not None:
            named = self._before(named)
        made: list[Any] = [None] * len(self._results)
        for box in boxes([axis.length for axis in self._axes], self._sizes):
            part = self._part(named, box)
            found = as_tuple(self._op(**part))
            for i, result in enumerate(found):
                self._keep(made, i, result, box)
        return made[0] if len(made) == 1 else tuple(made)

    def _part(self, named: Named, box: Sequence[tuple[int, int]]) -> Named:
        part = dict(named)
        for axis, (start, length) in zip(self._axes, box):
            for name, place in axis.takes.items():
                if isinstance(part[name], Tensor):
                    part[name] = _narrow(part[name], place, axis.length, start, length)
            for name, unit in axis.counts.items():
                part[name] = length * unit
            for name, place in axis.entries.items():
                index, unit = pair(place)
                sizes = list(part[name])
                sizes[index] = length * unit
                part[name] = sizes
        for name, value in part.items():
            if isinstance(value, Tensor) and value is not named[name] and name not in self._unread:
                part[name] = compact(self._context, value)
        return part

    def _keep(self, made: list[Any], i: int, result: Any, box: Sequence[tuple[int, int]]) -> None:
        if not isinstance(result, Tensor):
            return
        if not any(i in axis.gives for axis in self._axes):
            made[i] = result if made[i] is None else made[i]
            return
        if made[i] is None:
            made[i] = self._result(self._results[i], result)
        target = made[i]
        for axis, (start, length) in zip(self._axes, box):
            if i in axis.gives:
                target = _narrow(target, axis.gives[i], axis.length, start, length)
        self._context.move(target, result)

    def _result(self, meta: Tensor, part: Tensor) -> Tensor:
        """Memory for the whole result, like `part`: "meta" may show another type, or another order of dimensions."""
        stride = meta.stride()
        outside = max(part.stride(), default=0)  # elsewhere the stride of a length of one does not tell the order
        told = (n > 1 or n == whole or step == outside for n, whole, step in zip(part.shape, meta.shape, part.stride()))
        if is_dense(part) and all(told):
            stride = dense_stride(meta.shape, part.stride())
        return self._context.empty(size=meta.shape, stride=stride, dtype=part.dtype)


def _narrow(tensor: Tensor, place: Place, whole: int, start: int, length: int) -> Tensor:
    cut = _cut_dimension(tensor, place, whole)
    return tensor if cut is None else tensor.narrow(cut[0], start * cut[1], length * cut[1])
