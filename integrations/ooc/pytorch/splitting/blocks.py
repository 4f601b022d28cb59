"""Runs an operator block by block along axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting.axes import Axis, Named, Span
from ooc.pytorch.splitting.geometry import dense_stride
from ooc.pytorch.splitting.memory import Memory

Cut = Sequence[tuple[Axis, Sequence[Span]]]  # axes in their order, each with its blocks


def as_tuple(results: Any) -> tuple[Any, ...]:
    """The results of an operator as a tuple, though there may be only one."""
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory, each once."""
    return bool(tensor.numel() == 0 or torch.ops.aten.is_non_overlapping_and_dense(tensor))


def compact(context: Memory, view: Tensor) -> Tensor:
    """The view itself where it lies densely in memory; else a dense copy with its dimensions in the same order."""
    if is_dense(view):
        return view
    made = context.empty(size=view.shape, stride=dense_stride(view.shape, view.stride()), dtype=view.dtype)
    context.move(made, view)
    return made


def in_place(target: Tensor, alike: int, run: Callable[[], Tensor]) -> Tensor | None:
    """Runs what makes a tensor of the target's shape, in the target; returns the tensor if it lies elsewhere.

    `alike` is the same for calls that allocate alike, as far as one knows.
    """
    begin: Callable[[Tensor, int], bool] | None = getattr(torch.ops.ooc, "place", None)  # none without the adapter
    if begin is None or not begin(target, alike):
        return run()
    try:
        result = run()
    except BaseException:
        torch.ops.ooc.not_placed()
        raise
    if not torch.ops.ooc.placed(result):
        return result
    return None if (result.shape, result.stride()) == (target.shape, target.stride()) else result.clone()


@dataclass(frozen=True)
class Blocks:
    """Runs an operator block by block."""

    context: Memory
    op: Callable[..., Any]
    results: Sequence[Any]  # as the operator would return them, without memory
    axes: Sequence[Axis] = ()
    before: Callable[[Named], Named] | None = None
    unread: Sequence[str] = ()
    guessed: bool = False  # another type or order of dimensions than `results` have may come out of the operator

    def __call__(self, sizes: Sequence[int], named: Named) -> Any:
        """The operator's results, in blocks of these sizes."""
        named = named if self.before is None else self.before(named)
        return self.run([(axis, axis.spans(n)) for axis, n in zip(self.axes, sizes) if n < axis.length], named)

    def run(self, cut: Cut, named: Named) -> Any:
        """The operator's results; sums are added up in the order of their blocks."""
        made: list[Any] = [None] * len(self.results)
        arguments = _Arguments(self.context, [axis for axis, _ in cut], named, self.unread)
        loops = self._loops(cut, arguments)
        summed = [n for n, (axis, _) in enumerate(cut) if axis.sums]
        for outer in itertools.product(*(cut[n][1] for n in loops)):
            boxes = []
            for inner in itertools.product(*(cut[n][1] for n in summed)):
                spans = dict(zip((*loops, *summed), (*outer, *inner)))
                boxes.append([spans[n] for n in range(len(cut))])
            self._block(made, arguments, boxes, [(axis, n) for n, (axis, _) in enumerate(cut) if not axis.sums])
        return made[0] if len(made) == 1 else tuple(made)

    def _block(
        self, made: list[Any], arguments: _Arguments, boxes: Sequence[Sequence[Span]], axes: Sequence[tuple[Axis, int]]
    ) -> None:
        """Runs the operator for boxes whose results are added up, and keeps the sums. Nothing of them is left then."""
        own = [(axis, boxes[0][n]) for axis, n in axes]
        if len(boxes) == 1 and self._in_place(made, arguments.part(boxes[0]), own):
            return
        total: list[Any] = []
        for box in boxes:
            total = _added(total, as_tuple(self.op(**arguments.part(box))))
        for place, result in enumerate(total):
            self._keep(made, place, result, own)

    def _in_place(self, made: list[Any], part: Named, box: Sequence[tuple[Axis, Span]]) -> bool:
        """Runs the operator for one box, whose only result is made where it belongs. False if that cannot be."""
        wanted = [place for place, result in enumerate(self.results) if result is not None]
        if len(wanted) != 1 or self.guessed or not any(wanted[0] in axis.gives for axis, _ in box):
            return False
        place, whole = wanted[0], made[wanted[0]]
        target = made[place] = self._result(self.results[place], self.results[place]) if whole is None else whole
        for axis, span in box:
            target = axis.target(place, target, *span)
        result = in_place(target, hash(likeness(part)), lambda: as_tuple(self.op(**part))[place])
        if result is not None:
            self._keep(made, place, result, box)
        return True

    def _loops(self, cut: Cut, arguments: _Arguments) -> Sequence[int]:
        """The axes that are no sums, in the order of loops in which the fewest bytes are read again."""
        counts = [len(spans) for _, spans in cut]
        read = [(tensor.nbytes, own) for tensor, own in arguments.read()]

        def cost(order: Sequence[int]) -> float:
            total = 0.0
            for size, own in read:
                outside = order[: max((order.index(n) + 1 for n in own if n in order), default=0)]
                total += size * math.prod(counts[n] for n in outside if n not in own)
            return total

        return min(itertools.permutations(n for n, (axis, _) in enumerate(cut) if not axis.sums), key=cost)

    def _keep(self, made: list[Any], place: int, result: Any, box: Sequence[tuple[Axis, Span]]) -> None:
        if not isinstance(result, Tensor) or self.results[place] is None:
            return
        if not any(place in axis.gives for axis, _ in box):
            made[place] = result if made[place] is None else made[place]
            return
        target = made[place] = self._result(self.results[place], result) if made[place] is None else made[place]
        for axis, span in box:
            target, result = axis.target(place, target, *span), axis.own(place, result, *span)
        self.context.move(target, result)

    def _result(self, meta: Tensor, part: Tensor) -> Tensor:
        """Memory for the whole result."""
        if not self.guessed:
            return self.context.empty(like=meta)
        stride = meta.stride()
        outside = max(part.stride(), default=0)  # elsewhere the stride of a length of one does not tell the order
        told = (n > 1 or n == whole or step == outside for n, whole, step in zip(part.shape, meta.shape, part.stride()))
        if is_dense(part) and all(told):
            stride = dense_stride(meta.shape, part.stride())
        return self.context.empty(size=meta.shape, stride=stride, dtype=part.dtype)


def likeness(named: Named) -> str:
    """All of a call that the shapes of its results depend on, and that its kernel's allocations are likely to."""

    def said(value: Any) -> str:
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}" if isinstance(value, Tensor) else str(value)

    return ";".join(map(said, named.values()))


def _added(total: list[Any], found: Sequence[Any]) -> list[Any]:
    for one, more in zip(total, found):
        if isinstance(one, Tensor) and isinstance(more, Tensor):
            one.add_(more)
    return total or list(found)


class _Arguments:
    """The arguments of one block after the other. What the next block needs again is kept."""

    def __init__(self, context: Memory, axes: Sequence[Axis], named: Named, unread: Sequence[str]) -> None:
        self._context, self._axes, self._named, self._unread = context, axes, named, unread
        self._tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        self._cuts = {
            name: [n for n, axis in enumerate(axes) if axis.dimension(name, value) is not None]
            for name, value in self._tensors.items()
        }
        self._made: dict[str, tuple[Sequence[Span], Tensor]] = {}  # by argument: blocks of its axes, and its part

    def read(self) -> list[tuple[Tensor, list[int]]]:
        """Each tensor that is read, and which of the axes cut it."""
        return [(tensor, self._cuts[name]) for name, tensor in self._tensors.items() if name not in self._unread]

    def part(self, box: Sequence[Span]) -> Named:
        """The arguments of a block."""
        part = dict(self._named)
        for axis, span in zip(self._axes, box):
            axis.numbers(part, *span)
        own = {name: [box[n] for n in cuts] for name, cuts in self._cuts.items()}
        # Frees the memory of what is not needed again before more is taken.
        self._made = {name: made for name, made in self._made.items() if made[0] == own[name]}
        for name in self._tensors:
            if name not in self._made:
                self._made[name] = own[name], self._part(name, own[name])
            part[name] = self._made[name][1]
        return part

    def _part(self, name: str, spans: Sequence[Span]) -> Tensor:
        tensor = self._tensors[name]
        cut = [(self._axes[n], span) for n, span in zip(self._cuts[name], spans)]
        if name in self._unread:
            return self._placeholder(name, tensor, cut)
        for axis, span in cut:
            tensor = axis.part(self._context, name, tensor, *span)
        made = compact(self._context, tensor) if cut else tensor
        for axis in self._axes:
            axis.check(name, made)
        return made

    def _placeholder(self, name: str, tensor: Tensor, cut: Sequence[tuple[Axis, Span]]) -> Tensor:
        """A tensor of the part's size, which lies as the part would, and which nobody reads."""
        shape = list(tensor.shape)
        for axis, (start, units) in cut:
            dimension = axis.dimension(name, tensor)
            assert dimension is not None
            shape[dimension] = axis.elements(name, shape[dimension], units, start)
        if not any(tensor.stride()):
            return tensor.as_strided(shape, tensor.stride())
        return self._context.empty(size=shape, stride=dense_stride(shape, tensor.stride()), dtype=tensor.dtype)
