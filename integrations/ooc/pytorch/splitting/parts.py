"""Operators whose arguments and results are cut along common axes: rows, channels, planes, heads.

An `Axis` says where in each tensor it lies. `along` makes candidates from axes: block sizes that fit, the preferred
ones first, and a function that runs the operator once for each block. A block of a tensor is a view if that is dense
in memory, else a compact copy: of such a view kernels would make copies of their own, or touch what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.calls import CannotSplit, Split, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import all_meta
from ooc.pytorch.splitting.geometry import extent, footprint, rounded
from ooc.pytorch.splitting.grids import boxes, count, grid, label
from ooc.pytorch.splitting.verification import map_tensors

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
    offsets: Mapping[str, int] = field(default_factory=dict)  # integers that grow so with each unit before a part
    mirrored: bool = False  # the first part of the results is made of the arguments' last units
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


def _text(value: Any) -> str:
    """All of a value that the results' shapes depend on."""
    return f"{value.dtype}{tuple(value.shape)}{value.stride()}" if isinstance(value, Tensor) else str(value)


_shapes: dict[tuple[OpOverload, str], tuple[Any, ...]] = {}


def results_of(context: Context, op: OpOverload, named: Named) -> tuple[Any, ...]:
    """What the operator would return, on the device "meta", with shapes and strides but without memory."""
    key = (op, ";".join(map(_text, named.values())))
    if key not in _shapes:
        if len(_shapes) > 4096:
            _shapes.clear()
        meta = map_tensors(dict(named), all_meta)
        with context.plain(), its_own_errors():  # so that nothing here is a function to the core
            _shapes[key] = as_tuple(op(**meta))
    return _shapes[key]


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


def divisions(
    context: Context,
    op: OpOverload,
    names: Sequence[str],
    lengths: Sequence[int],
    need: Callable[[Sequence[int]], int],
    run: Callable[[Sequence[int], Named], Any],
    *,
    floors: Sequence[Sequence[int]] = (),
    orders: Sequence[Sequence[int]] | None = None,
    multiples: Sequence[int] = (1,),
    allowed: Callable[[Sequence[int]], bool] = lambda sizes: True,
    rounds: Callable[[Sequence[int]], bool] = lambda sizes: False,
) -> list[Piece]:
    """One division for each order and each multiple that makes a difference; see `grids.grid` for these and `floors`.

    Args:
        need: gives the bytes of the largest part from the sizes of blocks.
        run: runs the parts, from the sizes of blocks and all arguments of the call by name.
        allowed: whether blocks of such sizes can be run.
        rounds: whether they divide sums.
    """
    least = min(context.least_parts, math.prod(lengths))

    def fits(blocks: Sequence[int]) -> bool:
        return need(blocks) <= context.part_bytes and count(lengths, blocks) >= least

    found: dict[tuple[int, ...], Piece] = {}
    for order in [range(len(lengths))] if orders is None else orders:
        for multiple in multiples:
            sizes = grid(lengths, floors, order, multiple, fits)
            if sizes is not None and sizes not in found and allowed(sizes):
                how, parts = label(names, lengths, sizes), count(lengths, sizes)
                found[sizes] = Piece(how, parts, _bound(op, run, sizes), need(sizes), rounds(sizes))
    return list(found.values())


def _bound(
    op: OpOverload, run: Callable[[Sequence[int], Named], Any], sizes: Sequence[int]
) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(sizes, bind(op, args, kwargs))


def other_dimensions(
    shape: Sequence[int], own: int | Iterable[int], takes: Sequence[str], results: int = 1
) -> list[Axis]:
    """An axis for each dimension but those in `own`, the outermost first, over arguments and results of that shape."""
    owned = {d % len(shape) for d in ([own] if isinstance(own, int) else own)} if shape else set()
    return [
        Axis(f"dimension {d}", n, dict.fromkeys(takes, d), dict.fromkeys(range(results), d))
        for d, n in enumerate(shape)
        if d not in owned
    ]


def along(
    context: Context,
    op: OpOverload,
    named: Named,
    axes: Sequence[Axis],
    *,
    orders: Sequence[Sequence[Axis]] | None = None,
    multiples: Sequence[int] = PREFERRED,
    workspace: Callable[[int, int], int] = lambda operands, results: 0,
    before: Callable[[Named], Named] | None = None,
    unread: Sequence[str] = (),
    results: Sequence[Any] | None = None,
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
        results: what the operator would return, without memory; by default it is asked, which may take a second the
            first time, as PyTorch then imports its compiler.
    """
    axes = [axis for axis in axes if axis.length > 1]
    if not axes:
        return []
    if before is not None:
        named = before(named)
    results = results_of(context, op, named) if results is None else results
    read = {name: value for name, value in named.items() if name not in unread}
    steps = max(len(axis.least) for axis in axes)
    found = divisions(
        context,
        op,
        [axis.name for axis in axes],
        [axis.length for axis in axes],
        _Need(context, read, results, axes, workspace),
        _Run(context, op, results, axes, before, unread),
        floors=[[axis.least[min(step, len(axis.least) - 1)] for axis in axes] for step in range(steps)],
        orders=None if orders is None else [[axes.index(a) for a in order if a in axes] for order in orders],
        multiples=multiples,
    )
    return found[:MOST_CANDIDATES]


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
        def cuts(values: Iterable[tuple[Any, Any]], places: str) -> list[tuple[Tensor, list[tuple[int, int] | None]]]:
            return [
                (value, [_cut_dimension(value, getattr(axis, places).get(name), axis.length) for axis in axes])
                for name, value in values
                if isinstance(value, Tensor)
            ]

        self._context, self._workspace = context, workspace
        self._arguments, self._results = cuts(named.items(), "takes"), cuts(enumerate(results), "gives")

    def __call__(self, sizes: Sequence[int]) -> int:
        total = inputs = outputs = 0
        for tensor, cuts in self._arguments:
            part = self._part_bytes(tensor, cuts, sizes)
            inputs += part
            total += view_bytes(self._context, part) if any(cuts) else footprint(tensor, self._context.chunk_bytes)
        for tensor, cuts in self._results:
            part = self._part_bytes(tensor, cuts, sizes)
            outputs += part
            total += own_bytes(self._context, part)
        extra = self._workspace(inputs, outputs)
        return total + (own_bytes(self._context, extra) if extra else 0)

    @staticmethod
    def _part_bytes(tensor: Tensor, cuts: Sequence[tuple[int, int] | None], sizes: Sequence[int]) -> int:
        lengths = list(tensor.shape)
        for cut, size in zip(cuts, sizes):
            if cut is not None:
                lengths[cut[0]] = size * cut[1]
        return math.prod(lengths) * tensor.element_size()


@dataclass(frozen=True)
class _Run:
    """Runs an operator block by block."""

    context: Context
    op: OpOverload
    results: Sequence[Any]
    axes: Sequence[Axis]
    before: Callable[[Named], Named] | None
    unread: Sequence[str]

    def __call__(self, sizes: Sequence[int], named: Named) -> Any:
        if self.before is not None:
            named = self.before(named)
        made: list[Any] = [None] * len(self.results)
        for box in boxes([axis.length for axis in self.axes], sizes):
            found = as_tuple(self.op(**self._part(named, box)))
            for i, result in enumerate(found):
                self._keep(made, i, result, box)
        return made[0] if len(made) == 1 else tuple(made)

    def _part(self, named: Named, box: Sequence[tuple[int, int]]) -> Named:
        part = dict(named)
        for axis, (start, length) in zip(self.axes, box):
            first = axis.length - start - length if axis.mirrored else start
            for name, place in axis.takes.items():
                if isinstance(part[name], Tensor):
                    part[name] = _narrow(part[name], place, axis.length, first, length)
            for name, step in axis.offsets.items():
                part[name] += step * start
            for name, unit in axis.counts.items():
                part[name] = length * unit
            for name, place in axis.entries.items():
                index, unit = pair(place)
                sizes = list(part[name])
                sizes[index] = length * unit
                part[name] = sizes
        for name, value in part.items():
            if isinstance(value, Tensor) and value is not named[name] and name not in self.unread:
                part[name] = compact(self.context, value)
        return part

    def _keep(self, made: list[Any], i: int, result: Any, box: Sequence[tuple[int, int]]) -> None:
        if not isinstance(result, Tensor):
            return
        if not any(i in axis.gives for axis in self.axes):
            made[i] = result if made[i] is None else made[i]
            return
        if made[i] is None:
            made[i] = self._result(self.results[i], result)
        target = made[i]
        for axis, (start, length) in zip(self.axes, box):
            if i in axis.gives:
                target = _narrow(target, axis.gives[i], axis.length, start, length)
        self.context.move(target, result)

    def _result(self, meta: Tensor, part: Tensor) -> Tensor:
        """Memory for the whole result, like `part`: "meta" may show another type, or another order of dimensions."""
        stride = meta.stride()
        outside = max(part.stride(), default=0)  # elsewhere the stride of a length of one does not tell the order
        told = (n > 1 or n == whole or step == outside for n, whole, step in zip(part.shape, meta.shape, part.stride()))
        if is_dense(part) and all(told):
            stride = dense_stride(meta.shape, part.stride())
        return self.context.empty(size=meta.shape, stride=stride, dtype=part.dtype)


def _narrow(tensor: Tensor, place: Place, whole: int, start: int, length: int) -> Tensor:
    cut = _cut_dimension(tensor, place, whole)
    return tensor if cut is None else tensor.narrow(cut[0], start * cut[1], length * cut[1])
