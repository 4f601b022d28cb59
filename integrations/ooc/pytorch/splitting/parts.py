"""Operators whose arguments and results are cut along common axes.

`along` makes candidates from axes: block sizes that fit, the preferred ones first, and a function that runs the
operator once for each block. A block of a tensor is a view if that is dense in memory, else a compact copy: of such a
view kernels would make copies of their own, or touch what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named, Where, count, grid, label
from ooc.pytorch.splitting.blocks import Blocks, as_tuple, likeness
from ooc.pytorch.splitting.calls import Split, its_own_errors
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.cutting import all_meta
from ooc.pytorch.splitting.geometry import footprint, rounded
from ooc.pytorch.splitting.verification import map_tensors

PREFERRED = (64, 32, 16, 8, 4, 1)  # blocks of these leave vector kernels the remainders that the whole has
MOST_CANDIDATES = 8


# ---- calls ----------------------------------------------------------------------------------------------------------


def bind(op: OpOverload, args: Sequence[Any], kwargs: Named) -> Named:
    """All arguments of a call by name; those that were not given have their defaults."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args)) | kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in op._schema.arguments}


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
    """One division for each order and each multiple that makes a difference; see `axes.grid` for these and `floors`.

    Args:
        need: gives the bytes of the largest part from the sizes of blocks.
        run: runs the parts, from the sizes of blocks and all arguments of the call by name.
        allowed: whether blocks of such sizes can be run.
        rounds: whether they divide sums.
    """
    least = min(context.least_parts, math.prod(lengths))

    def fits(blocks: Sequence[int]) -> bool:
        return need(blocks) <= context.part_bytes and count(lengths, blocks) >= least

    def split(sizes: Sequence[int]) -> Split:
        how, parts = label(names, lengths, sizes), count(lengths, sizes)
        return Split(how, parts, lambda *args, **kwargs: run(sizes, bind(op, args, kwargs)), rounds(sizes))

    orders = [range(len(lengths))] if orders is None else orders
    found = dict.fromkeys(grid(lengths, floors, order, each, fits) for order in orders for each in multiples)
    return [split(sizes) for sizes in found if sizes is not None and allowed(sizes)]


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
    values: dict[Where, Any] = {name: value for name, value in named.items() if name not in unread}
    tensors = {where: t for where, t in (values | dict(enumerate(results))).items() if isinstance(t, Tensor)}
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
        _need(context, axes, workspace, tensors),
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


def _need(
    context: Context, axes: Sequence[Axis], workspace: Callable[[Part], int], tensors: Mapping[Where, Tensor]
) -> Callable[[Sequence[int]], int]:
    """Gives the bytes of one part from the sizes of blocks. `tensors`: the arguments that are read, and the results."""
    cuts: dict[Where, list[tuple[int, int]]] = {
        where: [(n, cut) for n, axis in enumerate(axes) if (cut := axis.dimension(where, tensor)) is not None]
        for where, tensor in tensors.items()
    }

    def shape_of(where: Where, sizes: Sequence[int]) -> list[int]:
        shape = list(tensors[where].shape)
        for n, dimension in cuts[where]:
            if sizes[n] < axes[n].length:
                shape[dimension] = axes[n].elements(where, shape[dimension], sizes[n])
        return shape

    def need(sizes: Sequence[int]) -> int:
        shapes = {where: shape_of(where, sizes) for where in tensors}
        part = Part(shapes, {w: math.prod(shape) * tensors[w].element_size() for w, shape in shapes.items()})
        total = context.own_bytes(workspace(part))
        for where, size in part.sizes.items():
            if isinstance(where, int):
                total += context.own_bytes(size)
            else:
                chunk = context.chunk_bytes
                total += rounded(size, chunk) if cuts[where] else footprint(tensors[where], chunk)
        return total

    return need
