"""Operators whose arguments and results are cut along common axes.

`along` makes candidates from axes: block sizes that fit, the preferred ones first, and a function that runs the
operator once for each block. A block of a tensor is a view if that is dense in memory, else a compact copy: of such a
view kernels would make copies of their own, or touch what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named, Where
from ooc.pytorch.splitting.blocks import Blocks, as_tuple, likeness
from ooc.pytorch.splitting.calls import Split, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import all_meta
from ooc.pytorch.splitting.geometry import footprint, rounded
from ooc.pytorch.splitting.grids import count, grid, label
from ooc.pytorch.splitting.verification import map_tensors

PREFERRED = (64, 32, 16, 8, 4, 1)  # blocks of these leave vector kernels the remainders that the whole has
MOST_CANDIDATES = 8


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


_shapes: dict[tuple[OpOverload, str], tuple[Any, ...]] = {}


def results_of(context: Context, op: OpOverload, named: Named) -> tuple[Any, ...]:
    """What the operator would return, on the device "meta", with shapes and strides but without memory."""
    key = (op, likeness(named))
    if key not in _shapes:
        if len(_shapes) > 4096:
            _shapes.clear()
        meta = map_tensors(dict(named), all_meta)
        with context.plain(), its_own_errors():  # so that nothing here is a function to the core
            _shapes[key] = as_tuple(op(**meta))
    return _shapes[key]


# ---- memory ---------------------------------------------------------------------------------------------------------


def own_bytes(context: Context, size_bytes: int) -> int:
    """Bytes that new memory takes on the device: whole chunks, or its own size if it is smaller than a chunk."""
    chunk = context.chunk_bytes
    return size_bytes if size_bytes < chunk else -(-size_bytes // chunk) * chunk


def view_bytes(context: Context, size_bytes: int) -> int:
    """Bytes that a dense view of a larger variable takes on the device at most."""
    return rounded(size_bytes, context.chunk_bytes) if size_bytes else 0


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
) -> list[Split]:
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

    found: dict[tuple[int, ...], Split] = {}
    for order in [range(len(lengths))] if orders is None else orders:
        for multiple in multiples:
            sizes = grid(lengths, floors, order, multiple, fits)
            if sizes is not None and sizes not in found and allowed(sizes):
                how, parts = label(names, lengths, sizes), count(lengths, sizes)
                found[sizes] = Split(how, parts, _bound(op, run, sizes), rounds(sizes))
    return list(found.values())


def _bound(op: OpOverload, run: Callable[[Sequence[int], Named], Any], sizes: Sequence[int]) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(sizes, bind(op, args, kwargs))


def along(
    context: Context,
    op: OpOverload,
    named: Named,
    axes: Sequence[Axis],
    *,
    orders: Sequence[Sequence[Axis]] | None = None,
    multiples: Sequence[int] = PREFERRED,
    workspace: Callable[[Part], int] = lambda part: 0,
    before: Callable[[Named], Named] | None = None,
    unread: Sequence[str] = (),
    results: Sequence[Any] | None = None,
) -> list[Split]:
    """Divisions of an operator along axes; the preferred ones first, none if single units do not fit.

    Args:
        named: all arguments of the operator.
        orders: in which orders axes are cut; each axis only as far as those before it do not suffice. By default one
            order, that of `axes`.
        multiples: block sizes are multiples of one of these; each that makes a difference gives a division.
        workspace: gives the bytes that the kernel allocates beside a part's results.
        before: changes the arguments (of the call, and of the verification) before they are cut.
        unread: arguments of which only the sizes and strides are looked at.
        results: what the operator would return, without memory; by default it is asked, which may take a second the
            first time, as PyTorch then imports its compiler.
    """
    axes = [axis for axis in axes if axis.length > 1]
    if not axes:
        return []
    if before is not None:
        named = before(named)
    guessed, results = results is None, results_of(context, op, named) if results is None else results
    read: list[tuple[Where, Any]] = [item for item in named.items() if item[0] not in unread]
    steps = max(len(axis.least) for axis in axes)
    lengths = [axis.length for axis in axes]

    def whole_or_within_one(sizes: Sequence[int]) -> bool:
        single = {axis.name for axis, size in zip(axes, sizes) if size == 1}
        known = single | ({axis.within for axis in axes} - {axis.name for axis in axes})
        return all(size == axis.length or axis.within in known for axis, size in zip(axes, sizes))

    found = divisions(
        context,
        op,
        [axis.name for axis in axes],
        lengths,
        _Need(context, axes, workspace, [*read, *enumerate(results)]),
        Blocks(context, op, results, axes, before, unread, guessed),
        floors=[[axis.least[min(step, len(axis.least) - 1)] for axis in axes] for step in range(steps)],
        orders=None if orders is None else [[axes.index(a) for a in order if a in axes] for order in orders],
        multiples=multiples,
        allowed=whole_or_within_one,
        rounds=lambda sizes: any(axis.sums and size < n for axis, n, size in zip(axes, lengths, sizes)),
    )
    return found[:MOST_CANDIDATES]


@dataclass(frozen=True)
class Part:
    """The largest part of a division: shapes of what is cut and made, and their bytes."""

    shapes: Mapping[Where, Sequence[int]]  # of arguments by name, of results by number
    sizes: Mapping[Where, int]  # bytes

    @property
    def operands(self) -> int:
        """Bytes of all arguments that are read."""
        return sum(size for where, size in self.sizes.items() if isinstance(where, str))

    @property
    def results(self) -> int:
        """Bytes of all results."""
        return sum(size for where, size in self.sizes.items() if isinstance(where, int))


@dataclass
class _Need:
    """Computes the bytes of one part from the block sizes."""

    context: Context
    axes: Sequence[Axis]
    workspace: Callable[[Part], int]
    values: Iterable[tuple[Where, Any]]  # arguments that are read, and results

    def __post_init__(self) -> None:
        self._tensors = {where: value for where, value in self.values if isinstance(value, Tensor)}
        self._cuts = {where: [axis.dimension(where, t) for axis in self.axes] for where, t in self._tensors.items()}

    def __call__(self, sizes: Sequence[int]) -> int:
        shapes = {where: self._shape(where, sizes) for where in self._tensors}
        part = Part(shapes, {w: math.prod(shape) * self._tensors[w].element_size() for w, shape in shapes.items()})
        total = own_bytes(self.context, self.workspace(part))
        for where, size in part.sizes.items():
            if isinstance(where, int):
                total += own_bytes(self.context, size)
            elif any(cut is not None for cut in self._cuts[where]):
                total += view_bytes(self.context, size)
            else:
                total += footprint(self._tensors[where], self.context.chunk_bytes)
        return total

    def _shape(self, where: Where, sizes: Sequence[int]) -> list[int]:
        shape = list(self._tensors[where].shape)
        for axis, dimension, size in zip(self.axes, self._cuts[where], sizes):
            if dimension is not None and size < axis.length:
                shape[dimension] = axis.elements(where, shape[dimension], size)
        return shape
