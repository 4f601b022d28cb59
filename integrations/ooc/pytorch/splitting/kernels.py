"""Convolutions by several algorithms, whole or a micro-batch at a time: what is measured and what is then run.

A convolution has three kernels, with micro-cuDNN's names (section II): *Forward*, *BackwardData* and *BackwardFilter*.
A kernel is a call of the operator that is cut along its samples; those of BackwardFilter are added up.

On a CPU the algorithms are these; products of spectra (FFT) were never the fastest of what was measured, and went:

- `own`: PyTorch's own, which is oneDNN's where `torch._C._select_conv_backend` says so. It serves every convolution.
- `own in N`: the same for one block of channels after the other, of the result or of the gradient. Its workspace is
  smaller where a copy of the filters is most of it.
- `own summed in N`: Forward for one block of the input's channels after the other, or BackwardData for one of those of
  the result's gradient, added up. The columns of such a block are fewer, or its filters lie together and need no copy.
- `own in N strips`: the same for blocks of rows, which are sums for the filters' gradient, or there for blocks of the
  input's channels. These divide what one sample takes, where columns or copies of the image are most of it.
- `own turned`: Forward as the data gradient of a convolution with the filters turned about, and the other way round.
  One of the two may have a kernel of oneDNN that the other lacks, as where a dilated filter is as wide as the image.
- `own as several`: one sample by oneDNN, where PyTorch takes that for several and makes columns of one. The data's
  gradient is a convolution (with turned filters), and the filters' gradient that of two strips as two samples, twice.
- `im2col`: every patch of an image becomes a column, and the convolution is one matrix product for all samples. That
  suits small images with many channels: unlike oneDNN's kernels it needs no copy of the filters in another order.
- `winograd`: combinations of rows, for some sums with half the products (`ooc.pytorch.winograd`).
- `own padded`: BackwardFilter with some of the padding written about the image. oneDNN's fast kernels want an image
  that is as wide as the filter, which a dilated one often exceeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch import winograd
from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.blocks import Blocks, as_tuple, in_place, likeness
from ooc.pytorch.splitting.calls import Call
from ooc.pytorch.splitting.convolution import LISTS, full, kernel_axes, kernel_results, strips_of, unfolds
from ooc.pytorch.splitting.geometry import layout
from ooc.pytorch.splitting.memory import NO_LIMIT, Memory
from ooc.pytorch.splitting.parts import bind
from ooc.pytorch.splitting.registry import overload_of

FORWARD, BACKWARD_DATA, BACKWARD_FILTER = "Forward", "BackwardData", "BackwardFilter"
KINDS = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)
MEMORY = Memory(NO_LIMIT, 1, None)
MANY_CHANNELS = 128  # with fewer, combining rows takes longer than oneDNN does for the products that are saved
NO_MASK = False, False, False
_aten = torch.ops.aten


@dataclass(frozen=True)
class Algorithm:
    """A way to compute kernels."""

    name: str
    run: Callable[..., Sequence[Any]]  # with the operator's arguments by name; gives all its results
    suits: Callable[[Kernel], bool] = lambda kernel: True
    before: Callable[[Named], Named] = lambda named: named  # of the arguments, once for all parts

    def __call__(self, **named: Any) -> Sequence[Any]:
        """All results of the operator."""
        return self.run(**self.before(named))


Parts = Sequence[tuple[int, Algorithm]]  # micro-batches: how many samples, and how they are computed


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call."""

    operator: str
    named: Named  # all arguments; `output_mask` asks for what the kernel computes

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        mask = self.named.get("output_mask")
        return FORWARD if mask is None else BACKWARD_DATA if mask[0] else BACKWARD_FILTER

    @property
    def samples(self) -> Axis:
        """What micro-batches are cut along."""
        return kernel_axes(self.named)[0]

    @property
    def shapes(self) -> str:
        """What the costs of micro-batches depend on: the arguments for one sample, as text."""
        return Call(self.operator, (), self.part(0, 1)).shapes

    def part(self, begin: int, size: int) -> Named:
        """The arguments for some of the samples."""
        axis = self.samples
        return {
            name: axis.part(MEMORY, name, value, begin, size) if isinstance(value, Tensor) else value
            for name, value in self.named.items()
        }

    def run(self, parts: Parts) -> Sequence[Any]:
        """The operator's results, computed part by part."""
        return MicroBatches(self, parts)(self.named)


class MicroBatches:
    """A kernel in micro-batches: what is alike in all calls of the same shapes is computed once, and no tensor is kept.

    Sums are added up in the order of the parts. Parts of PyTorch's own run in the adapter (csrc/micro_batches.h).
    """

    def __init__(self, kernel: Kernel, parts: Parts) -> None:
        samples, self._results = kernel.samples, kernel_results(kernel.named)
        self._names = list(kernel.named)
        self._others = {name: value for name, value in kernel.named.items() if not isinstance(value, Tensor)}
        self._cut = [name for name in samples.takes if name in kernel.named]
        self._place = None if samples.sums else next(n for n, one in enumerate(self._results) if one is not None)
        ends = itertools.accumulate(size for size, _ in parts)
        first, alone = parts[0][1], len({algorithm.name for _, algorithm in parts}) == 1
        self._before = first.before if alone else Algorithm.before
        self._parts = [(end - n, n, algorithm.run if alone else algorithm) for (n, algorithm), end in zip(parts, ends)]
        self._alike = hash((first.name, likeness(kernel.named)))
        native = f"{kernel.operator.partition('::')[2]}_in_parts" if alone and first.run is _own else ""
        self._native = getattr(torch.ops.ooc, native, None) if native else None

    def __call__(self, tensors: Named) -> Sequence[Any]:
        """The operator's results. `tensors` has at least those of the call, by name."""
        if len(self._parts) == 1:
            return self._parts[0][2](**self._before(tensors | self._others))
        made: list[Any] = []
        self.some(tensors, made, range(len(self._parts)))
        return made

    def some(self, tensors: Named, made: list[Any], numbers: Sequence[int]) -> None:
        """Computes some parts, into their places in the results `made`, which are made if there are none, or added."""
        named, parts = self._before(tensors | self._others), [self._parts[number] for number in numbers]
        if self._place is not None and not made:
            made[:] = [None if one is None else MEMORY.empty(like=one) for one in self._results]
        if self._native is not None:
            result, sizes = None if self._place is None else made[self._place], [size for _, size, _ in parts]
            sums = self._native(result, sizes, parts[0][0], self._alike, *(named[name] for name in self._names))
            if result is None:
                _add(made, (None, *sums))
            return
        for begin, size, run in parts:
            part = named | {name: named[name].narrow(0, begin, size) for name in self._cut}
            if self._place is None:
                _add(made, run(**part))
                continue
            target = made[self._place].narrow(0, begin, size)
            alike = hash((self._alike, size, run))
            if (result := in_place(target, alike, partial(_one, self._place, run, part))) is not None:
                target.copy_(result)
            del result  # it would lie beside the next part


def _one(place: int, run: Callable[..., Sequence[Any]], part: Named) -> Tensor:
    made: Tensor = run(**part)[place]
    return made


def _add(sums: list[Any], made: Sequence[Any]) -> None:
    sums[:] = [one if one is None else one.add_(more) for one, more in zip(sums, made)] if sums else made


def kernels_of(call: Call) -> list[Kernel]:
    """The kernels of a call of a convolution; none if none of ours compute it."""
    op: Any = overload_of(call.operator)
    named = bind(op, call.arguments, call.keywords)
    x, w = named["input"], named["weight"]
    usual = x.layout == w.layout == torch.strided and x.dtype == w.dtype and x.dtype.is_floating_point
    if not usual or x.dim() != w.dim() or not 3 <= x.dim() <= 5 or not x.numel():
        return []
    named = full(named)
    if "output_mask" not in named:
        return [Kernel(call.operator, named)]
    data, filters, bias = named["output_mask"]
    if bias and not filters:
        return []
    masks = [[True, False, False]] * data + [[False, True, bias]] * filters
    sizes = {True: named["bias_sizes"], False: None}  # without the bias's gradient they make no difference
    return [Kernel(call.operator, named | {"output_mask": mask, "bias_sizes": sizes[mask[2]]}) for mask in masks]


def _own(**named: Any) -> Sequence[Any]:
    return as_tuple((_aten.convolution_backward if "output_mask" in named else _aten.convolution)(**named))


def _in_blocks(number: int, axis_of: Callable[[Named], Axis], /, **named: Any) -> Sequence[Any]:
    """PyTorch's own for one block of an axis after the other. A sum has the bias once."""
    axis, unread = axis_of(named), ["input"] if named.get("output_mask", [False])[0] else []
    blocks, spans = Blocks(MEMORY, _own, kernel_results(named), unread=unread), axis.spans(-(-axis.length // number))
    bias = named.get("bias") if axis.sums else None
    made = as_tuple(blocks.run([(axis, spans)], named if bias is None else named | {"bias": None}))
    return made if bias is None else (made[0].add_(bias.view(-1, *[1] * (made[0].dim() - 2))),)


def _has_blocks(number: int, axis_of: Callable[[Named], Axis], kernel: Kernel) -> bool:
    return kernel.named["groups"] == 1 and axis_of(kernel.named).length >= 8 * number


def _summed(named: Named) -> Axis:
    """The channels that a result, or the input's gradient, is a sum over."""
    given, side = ("grad_output", 0) if "output_mask" in named else ("input", 1)
    return Axis("channels", named["weight"].shape[side], {given: 1, "weight": side}, {}, sums=True)


def _has_sums(number: int, kernel: Kernel) -> bool:
    x, w = kernel.named["input"], kernel.named["weight"]
    pays = w.numel() > x.numel() or unfolds(x.dtype)  # else the sums are most of the work
    usual = kernel.kind != BACKWARD_FILTER and not kernel.named["transposed"]
    return usual and pays and _has_blocks(number, _summed, kernel)


def _as_several(**named: Any) -> Sequence[Any]:
    steps = {name: named[name] for name in ("padding", "stride", "dilation", "groups")}
    x, weight, transposed = named["input"], named["weight"], named["transposed"]
    if "output_mask" not in named:
        return (_aten.mkldnn_convolution(x, weight, named["bias"], **steps),)
    mask, grad = named["output_mask"], named["grad_output"]
    if mask[0]:
        weight, steps["padding"] = (weight, named["padding"]) if transposed else (_turn(weight), _padding(named))
        return _aten.mkldnn_convolution(grad, weight, None, **steps), None, None
    if transposed:  # the filters are those of the convolution from the gradient to the image
        named |= {"input": grad, "grad_output": x, "transposed": False, "output_padding": [0] * len(steps["stride"])}
    rows = strips_of(named)
    rows.check("grad_output", named["grad_output"])
    most, made = -(-rows.length // 4), list[Any]()
    for at in range(0, rows.length, 2 * most):
        size = min(most, (rows.length - at) // 2)
        strips = ([rows.part(MEMORY, n, named[n], start, size) for start in (at, at + size)] for n in rows.takes)
        pair = dict(zip(rows.takes, map(torch.cat, strips))) | {"padding": [0, *named["padding"][1:]]}
        _add(made, _own(**named | pair | {"output_mask": [False, True, False]}))
    return None, made[1], grad.flatten(2).sum((0, 2)) if mask[2] else None


def _suits_several(kernel: Kernel) -> bool:
    named, image, transposed = kernel.named, kernel.named["input"][:1], kernel.named["transposed"]
    given = {name: named[name] for name in (*LISTS, "weight", "transposed", "groups")} | {"bias": None}
    one, two = (torch._C._select_conv_backend(image.expand(n, *image.shape[1:]), **given).name for n in (1, 2))
    if "Slow" not in one or "Slow" in two or image.dim() == 3 or not _is_plain(named):
        return False
    if kernel.kind == BACKWARD_FILTER:
        return bool(named["input" if transposed else "grad_output"].shape[2] % 2 == 0)
    return not transposed if kernel.kind == FORWARD else transposed or _suits_turned(kernel)


def _turned(named: Named) -> Named:
    """A convolution as a transposed one, or the other way round: the filters change sides, and their taps the order."""
    opposite = {"weight": _turn(named["weight"]), "padding": _padding(named), "transposed": not named["transposed"]}
    return named | opposite


def _turn(filters: Tensor) -> Tensor:
    return filters.transpose(0, 1).flip(tuple(range(2, filters.dim()))).contiguous()


def _padding(named: Named) -> list[int]:
    """What the opposite direction pads with."""
    sizes = named["dilation"], named["weight"].shape[2:], named["padding"]
    return [dilation * (taps - 1) - padding for dilation, taps, padding in zip(*sizes)]


def _suits_turned(kernel: Kernel) -> bool:
    named = kernel.named
    steps = kernel.kind != BACKWARD_FILTER and {*named["stride"]} == {1} and not any(named["output_padding"])
    windows = math.prod(named["weight"].shape[2:]) > 1 and min(_padding(named)) >= 0
    return steps and windows and named["groups"] == 1 and _is_plain(named) and not unfolds(named["input"].dtype)


def _is_plain(named: Named) -> bool:
    return layout(named["input"], named["weight"]) == torch.contiguous_format


def _im2col(**named: Any) -> Sequence[Any]:
    """The results by a product with the im2col matrix [taps, samples * positions]."""
    mask: Sequence[bool] = named.get("output_mask", [])
    weight, grad = named["weight"], named.get("grad_output")
    window = weight.shape[2:], named["dilation"], named["padding"], named["stride"]
    samples, size = named["input"].shape[0], named["input"].shape[2:]

    def together(matrices: Tensor) -> Tensor:
        return matrices.transpose(0, 1).flatten(1)

    def apart(matrix: Tensor) -> Tensor:
        return matrix.view(matrix.shape[0], samples, -1).transpose(0, 1)

    filters = weight.flatten(1)
    if grad is None:
        made = apart(torch.mm(filters, together(_columns(named["input"], window)))).contiguous()
        made = made if named["bias"] is None else made.add_(named["bias"].view(-1, 1))
        return (made.view(samples, -1, *kernel_results(named)[0].shape[2:]),)
    errors = together(grad.flatten(2))
    if mask[0]:
        columns = apart(torch.mm(filters.t(), errors))
        if _pointwise(window):
            return columns.contiguous().view(samples, -1, *size), None, None
        return _aten.col2im(columns, size, *window), None, None
    sums = torch.mm(errors, together(_columns(named["input"], window)).t()).view_as(weight)
    return None, sums, errors.sum(1) if mask[2] else None


def _pointwise(window: tuple[Sequence[int], ...]) -> bool:
    """Whether the image itself is the matrix."""
    filters, _, padding, stride = window
    return {*filters, *stride} == {1} and not any(padding)


def _columns(x: Tensor, window: tuple[Sequence[int], ...]) -> Tensor:
    made: Tensor = x.flatten(2) if _pointwise(window) else _aten.im2col(x, *window)
    return made


def _padded(**named: Any) -> Sequence[Any]:
    """The image has as much of the padding about it as makes it as wide as the filters."""
    more = _lacking(named)
    image = _aten.constant_pad_nd(named["input"], [n for n in reversed(more) for _ in range(2)])
    return _own(**named | {"input": image, "padding": [n - written for n, written in zip(named["padding"], more)]})


def _lacking(named: Named) -> list[int]:
    """By how much a filter exceeds the image on each side, which is at most the padding."""
    sizes = named["weight"].shape[2:], named["dilation"], named["input"].shape[2:]
    return [max(0, (dilation * (taps - 1) + 2 - size) // 2) for taps, dilation, size in zip(*sizes)]


def _suits_padded(kernel: Kernel) -> bool:
    named = kernel.named
    usual = kernel.kind == BACKWARD_FILTER and not named["transposed"] and not unfolds(named["input"].dtype)
    return usual and any(_lacking(named))


def _combined(named: Named) -> Named:
    data, filters, _ = named.get("output_mask", NO_MASK)
    return named if filters else named | {"six": winograd.combined(_turn(named["weight"]) if data else named["weight"])}


def _winograd(six: Any = None, **named: Any) -> Sequence[Any]:
    """What is not finite would get into other rows, so PyTorch computes that."""
    data, filters, bias = named.get("output_mask", NO_MASK)
    padding, dilation = _padding(named) if data else named["padding"], named["dilation"]
    if filters:
        made = winograd.gradient(named["input"], named["grad_output"], named["weight"], padding, dilation)
        results: Sequence[Any] = (None, made, named["grad_output"].transpose(0, 1).flatten(1).sum(1) if bias else None)
    else:
        made = winograd.convolution(named["grad_output" if data else "input"], six, padding, dilation)
        results = (made, None, None) if data else (made,)
        if not data and named["bias"] is not None:
            made += named["bias"].view(-1, *[1] * len(padding))
    return results if bool(made.sum().isfinite()) else _own(**named)


def _suits_winograd(kernel: Kernel) -> bool:
    named, data = kernel.named, kernel.kind == BACKWARD_DATA
    x, weight = named["input"], named["weight"]
    steps = {*named["stride"], named["groups"], named["dilation"][0]} == {1} and not named["transposed"]
    pays = x.dtype.itemsize >= 4 and (unfolds(x.dtype) or min(weight.shape[:2]) >= MANY_CHANNELS)
    usual = weight.shape[2] == 3 and x.shape[2] >= 8 and (not data or min(_padding(named)) >= 0)
    return steps and pays and usual and _is_plain(named)


def _suits_products(kernel: Kernel) -> bool:
    named = kernel.named
    usual = named["groups"] == 1 and not named["transposed"] and _is_plain(named)
    return usual and named["input"].dim() == 4 and named["input"].dtype in (torch.float32, torch.float64)


IN_BLOCKS, STRIPS = (
    tuple(Algorithm(f"own in {n}{of}", partial(_in_blocks, n, axis), partial(_has_blocks, n, axis)) for n in (2, 4))
    for axis, of in ((lambda named: kernel_axes(named)[2], ""), (strips_of, " strips"))
)
AS_SEVERAL = Algorithm("own as several", _as_several, _suits_several)
OTHERS = (
    Algorithm("own", _own),
    Algorithm("own turned", _own, _suits_turned, _turned),
    AS_SEVERAL,
    Algorithm("im2col", _im2col, _suits_products),
    Algorithm("own padded", _padded, _suits_padded),
    Algorithm("winograd", _winograd, _suits_winograd, _combined),
)
SUMMED = tuple(Algorithm(f"own summed in {n}", partial(_in_blocks, n, _summed), partial(_has_sums, n)) for n in (2, 4))
CPU = {algorithm.name: algorithm for algorithm in (*OTHERS, *IN_BLOCKS, *SUMMED, *STRIPS)}
