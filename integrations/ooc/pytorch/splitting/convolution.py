"""Convolutions and their gradients in parts: by samples, groups, channels, and rows of the result with their halo.

Method: mmCNN (Li et al. 2019) divides a layer by output channels, so that a part needs a part of the weight;
micro-cuDNN (Oyama et al. 2018) by samples. Rows, the first spatial dimension, are cut where neither makes parts small
enough. The filter's gradient is cut by the two dimensions of channels that the weight has, which leaves each sum as it
was; where that does not suffice, by samples, which adds up sums of parts (micro-cuDNN, section III-B).

A convolution and the data gradient of a transposed one *gather*: a row of the result is made of a window of rows of the
source. A transposed convolution and the data gradient of an ordinary one *spread*: a row of the source goes into a
window of rows of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Axis, Named, Span, Where
from ooc.pytorch.splitting.calls import CannotSplit, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import PRODUCTS, Stage, divides, with_mask
from ooc.pytorch.splitting.geometry import dense_stride, layout, strides_of
from ooc.pytorch.splitting.memory import Memory
from ooc.pytorch.splitting.parts import Part, along
from ooc.pytorch.splitting.verification import Specials

IM2COL_ELEMENTS = 20480  # PyTorch takes no oneDNN kernel for one sample of up to so many elements
SPECIALS = Specials(PRODUCTS.kinds, finite=frozenset({"weight"}))  # see Rows.check
LISTS = ("stride", "padding", "dilation", "output_padding")


@dataclass(frozen=True)
class Rows(Axis):
    """Rows of a pass's result.

    Row `i` of the smaller side meets rows `i * stride - padding + k * dilation` of the larger one.
    Where they are cut, the kernel pads nothing there: rows of the source come with zeros written out.
    """

    source: str = "input"
    spread: bool = False
    small: int = 1  # rows of the smaller side
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    kernel: int = 1

    @property
    def reach(self) -> int:
        """Rows from the first that one row of the smaller side meets to the last."""
        return self.dilation * (self.kernel - 1) + 1

    def dimension(self, where: Where, tensor: Tensor) -> int | None:
        """Rows are the first spatial dimension wherever they are."""
        return 2 if where in self.takes or where in self.gives else None

    def elements(self, where: Where, size: int, units: int, start: int | None = None) -> int:
        """A block's rows of the source, or those that the kernel makes of them."""
        if where == self.source:
            return self._met(start, units)[1] if self.spread else self._window(units)
        return self._made(start, units)[1] if self.spread else units

    def part(self, memory: Memory, name: str, tensor: Tensor, start: int, units: int) -> Tensor:
        """The rows of the source that a block is made of; of the other side, its own."""
        if name != self.source:
            return self.target(name, tensor, start, units)
        if self.spread:
            return tensor.narrow(2, *self._met(start, units))
        return _with_zeros(memory, tensor, start * self.stride - self.padding, self._window(units))

    def numbers(self, part: Named, start: int, units: int) -> None:
        """Takes padding away, and has the kernel make the last rows of a block that no row of the source reaches."""
        part["padding"] = [0, *part["padding"][1:]]
        more = 0
        if self.spread and self.source == "input":
            more = self._made(start, units)[1] - self._window(self._met(start, units)[1])
        part["output_padding"] = [more, *part["output_padding"][1:]]

    def own(self, place: int, part: Tensor, start: int, units: int) -> Tensor:
        """The rows of the block, without those that belong to its neighbours."""
        return part.narrow(2, start - self._made(start, units)[0], units) if self.spread else part

    def check(self, name: str, part: Tensor) -> None:
        """Raises CannotSplit for a weight, or for filters the gradient, that is not finite.

        A part multiplies it by the zeros beyond an edge, which would give NaN; the whole leaves them out.
        """
        zeros = name == ("grad_output" if self.sums else "weight") and not self.spread and self.padding > 0
        if zeros and not bool(torch.stack(torch.aminmax(part)).isfinite().all()):
            raise CannotSplit(f"its {name} is not finite, and parts would multiply that by the zeros at the edges")

    def _window(self, units: int) -> int:
        """Rows of the larger side that so many rows of the smaller one meet."""
        return (units - 1) * self.stride + self.reach

    def _met(self, start: int | None, units: int) -> Span:
        """The rows of the smaller side in whose windows, or in the gaps behind them, a block lies."""
        if start is None:
            return 0, min(self.small, (units + max(self.reach, self.stride) - 2) // self.stride + 1)
        begin = start + self.padding
        first = max(0, min(-(-(begin - self.reach + 1) // self.stride), begin // self.stride, self.small - 1))
        last = min(self.small - 1, (begin + units - 1) // self.stride)
        return first, max(last - first, 0) + 1

    def _made(self, start: int | None, units: int) -> Span:
        """The rows of the larger side that the kernel makes for a block."""
        first, met = self._met(start, units)
        if start is None:
            return 0, self._window(met) + max(self.stride, self.dilation) - 1
        top = first * self.stride - self.padding
        return top, max(self._window(met), start + units - top)


def _with_zeros(memory: Memory, source: Tensor, start: int, length: int) -> Tensor:
    """Rows of the source from `start` on, with zeros for those that it does not have."""
    first, last = max(start, 0), min(start + length, source.shape[2])
    if first == start and last == start + length:
        return source.narrow(2, start, length)
    size = [*source.shape[:2], length, *source.shape[3:]]
    made = memory.empty(size=size, stride=dense_stride(size, source.stride()), dtype=source.dtype)
    for begin, end in ((start, min(first, start + length)), (max(last, start), start + length)):
        if end > begin:
            memory.move(made.narrow(2, begin - start, end - begin), 0)
    if last > first:
        memory.move(made.narrow(2, first - start, last - first), source.narrow(2, first, last - first))
    return made


# ---- calls ----------------------------------------------------------------------------------------------------------


def full(named: Named, **others: Any) -> Named:
    """The arguments of a convolution or its backward pass, with a stride, padding and so on for each dimension."""
    spatial = named["weight"].dim() - 2
    return named | {name: list(named[name]) * (spatial if len(named[name]) == 1 else 1) for name in LISTS} | others


def _result_size(call: Named) -> Sequence[int]:
    """Sizes of what a pass forward or to the data gradient makes, [N, C, rows, ...]."""
    given, weight = call["input"].shape, call["weight"].shape
    if "output_mask" in call:
        return tuple(given)
    sizes = []
    for d, n in enumerate(given[2:]):
        stride, padding, dilation, more = (call[name][d] for name in LISTS)
        reach = dilation * (weight[2 + d] - 1) + 1
        if call["transposed"]:
            sizes.append((n - 1) * stride - 2 * padding + reach + more)
        else:
            sizes.append((n + 2 * padding - reach) // stride + 1)
    return given[0], weight[1] * call["groups"] if call["transposed"] else weight[0], *sizes


def kernel_results(call: Named, like: Named | None = None) -> list[Any]:
    """What a full call returns, without memory; it lies as that of the call `like` would."""
    like, mask = like or call, call.get("output_mask", [True])
    order, dtype = layout(like["input"], like["weight"]), call["input"].dtype
    sizes = [_result_size(call)]
    if len(mask) > 1:
        sizes += [call["weight"].shape, call["grad_output"].shape[1:2]]
    return [
        torch.empty_strided(size, strides_of(size, order), dtype=dtype, device="meta") if wanted else None
        for size, wanted in zip(sizes, mask)
    ]


def kernel_axes(call: Named) -> Sequence[Axis]:
    """Samples, groups and channels of a full call, which has to ask for one of both gradients if it is backward."""
    return _pass_axes(call) if call.get("output_mask", [True])[0] else _filter_axes(call)


def strips_of(call: Named) -> Axis:
    """What divides the workspace of one sample: rows, or for the filters' gradient where columns are made, channels."""
    data, axes = call.get("output_mask", [True])[0], kernel_axes(call)
    if data or call["transposed"] or unfolds(call["input"].dtype):
        return axes[3]
    size, (stride, padding, dilation, _) = call["grad_output"].shape[2], (call[name][0] for name in LISTS)
    return Rows("rows", size, {"input": 2, "grad_output": 2}, {}, sums=True, small=size, stride=stride, padding=padding,
                dilation=dilation, kernel=call["weight"].shape[2])  # fmt: skip


def unfolds(dtype: torch.dtype) -> bool:
    """Whether there is no oneDNN kernel for a type, so that the one that runs makes columns of all windows."""
    return dtype not in (torch.float32, torch.bfloat16, torch.float16)


# ---- divisions ------------------------------------------------------------------------------------------------------


def _pass_axes(call: Named) -> tuple[Axis, Axis, Axis, Rows]:
    """Samples, groups, channels of the result, and rows of the result."""
    backward, result, groups = "output_mask" in call, _result_size(call), call["groups"]
    given, spread = "grad_output" if backward else "input", call["transposed"] != backward
    least = [_least(call, n) for n in (32, 8)] + [(1, 32, 8), (1, 32, 1), (1, 8, 1)]
    of_samples, of_channels, of_rows = zip(*least)
    stride, padding, dilation, _ = (call[name][0] for name in LISTS)
    like = [dict.fromkeys({"input"} - {given}, dimension) for dimension in range(3)]  # what is as large as the result
    return (
        Axis("samples", result[0], {**like[0], given: 0}, {0: 0}, equal=True, least=of_samples),
        Axis("groups", groups, {**like[1], given: 1, "weight": 0, "bias": 0}, {0: 1}, ["groups"]),
        Axis("channels", result[1] // groups, {**like[1], "weight": int(spread), "bias": 0}, {0: 1}, within="groups",
             least=of_channels),
        Rows("rows", result[2], {**like[2], given: 2}, {0: 2}, equal=True, least=of_rows, source=given, spread=spread,
             small=call[given].shape[2] if spread else result[2], stride=stride, padding=padding, dilation=dilation,
             kernel=call["weight"].shape[2]),
    )  # fmt: skip


def _least(call: Named, channels: int) -> tuple[int, int, int]:
    """The fewest samples, channels and rows for which PyTorch takes the same kernel as for the whole."""
    backward = "output_mask" in call
    samples, *judged = call["input"].shape
    row = max(1, (channels if backward else judged[0]) * math.prod(judged[2:]))
    if samples > 1 and (backward or row * judged[1] <= IM2COL_ELEMENTS):
        return 2, channels, 8
    step = call["stride"][0] if call["transposed"] else 1
    return 1, channels, max(8, IM2COL_ELEMENTS // (row * step) + 1)


def _filter_axes(call: Named) -> list[Axis]:
    """Samples, groups, and the channels that the weight has first and second, "outer" and "inner" ones.

    Outer channels are those of the result's gradient, inner ones those of the input. In a transposed convolution it is
    the other way round. Channels that the gradient of the bias lacks are not cut where the weight's is not wanted.
    """
    weight, groups, wanted = call["weight"].shape, call["groups"], call["output_mask"][1]
    both, (samples, _, *size) = ("input", "grad_output"), call["input"].shape
    # The fewest channels for which PyTorch takes the same kernel as for the whole.
    few = max(16, IM2COL_ELEMENTS // math.prod(size) + 1) if samples == 1 else 16
    found = [
        Axis("samples", samples, dict.fromkeys(both, 0), {}, sums=True),
        Axis("groups", groups, {**dict.fromkeys(both, 1), "weight": 0}, {1: 0, 2: 0}, ["groups"], {"bias_sizes": 0}),
    ]
    outer, inner = both if call["transposed"] else reversed(both)
    outer_and_inner = (("channels", outer, 0, weight[0] // groups), ("inner channels", inner, 1, weight[1]))
    for name, of, place, length in outer_and_inner:
        if wanted or of == "grad_output":
            gives, entries = ({1: place, 2: 0}, {"bias_sizes": 0}) if of == "grad_output" else ({1: place}, {})
            least = (64, 32, few if of == "input" else 16, 16, 8, 4, 2)
            found.append(Axis(name, length, {of: 1, "weight": place}, gives, (), entries, within="groups", least=least))
    return found


def _along_kernel(context: Context, op: OpOverload, named: Named, before: Callable[[Named], Named]) -> list[Split]:
    """Divisions of a pass forward or to a gradient; `before` makes a full call of the arguments, which asks for it."""
    call = before(named)
    axes = samples, groups, *others = kernel_axes(call)
    backward, item, turned = "output_mask" in call, call["input"].element_size(), others[::-1]
    given, of_filter = "grad_output" if backward else "input", backward and not call["output_mask"][0]
    if of_filter:  # by channels, then by samples too
        orders: Sequence[Sequence[Axis]] = ((groups, *others), (groups, *turned), axes)
        windows: tuple[Where, Where, Where] = ("input", "grad_output", 1)  # larger side, smaller side, and weight
        multiples, unread = (64, 32, 16), ["weight"]
    else:  # blocks of samples and channels are used as they lie in memory; blocks of rows need copies
        orders = (axes, (samples, groups, *turned), (groups, *others, samples), (*turned, samples))
        windows = (given, 0, "weight") if call["transposed"] == backward else (0, given, "weight")
        multiples, unread = (16, 8, 1), ["input"] * backward

    def workspace(part: Part) -> int:
        """A copy of each operand and result in the kernel's own layout, a placeholder, and columns of all windows."""
        total = part.operands - part.sizes.get("bias", 0) + part.results * (1 + backward)
        judged = 0 if of_filter else part.results if backward else part.sizes[given]
        unfolded = unfolds(call["input"].dtype) or (part.shapes[given][0] == 1 and judged <= IM2COL_ELEMENTS * item)
        if unfolded and windows[2] in part.shapes:  # not where the bias's gradient alone is wanted
            large, small, weight = (part.shapes[where] for where in windows)
            total += math.prod((*large[:2], *weight[2:], *small[2:], item))
        return total

    return along(
        context,
        op,
        named,
        axes,
        orders=orders,
        multiples=multiples,
        workspace=workspace,
        before=before,
        unread=unread,
        results=kernel_results(call, named),
    )


@divides("aten::convolution", "aten::_convolution", specials=SPECIALS)
def convolution(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """Convolutions of one, two or three spatial dimensions, ordinary or transposed."""
    if named["input"].dim() != named["weight"].dim():
        return []  # it has no samples: composite operators add that dimension before they call this one
    found = _along_kernel(context, op, named, full)
    pointwise = all(n == 1 for n in named["weight"].shape[2:]) and not any(named["padding"])
    if not pointwise or named["transposed"] or max(named["stride"]) == 1:
        return found
    dense = [piece for piece in _along_kernel(context, op, named, _subsampled) if piece.parts > 1]
    return [replace(piece, how=f"subsampled, {piece.how}") for piece in dense] + found


def _subsampled(named: Named) -> Named:
    """A convolution that skips most of its input, as one of stride 1 over what is left, whose kernels divide well."""
    call = full(named)
    steps = (slice(None), slice(None), *(slice(None, None, step) for step in call["stride"]))
    return call | {"input": call["input"][steps], "stride": [1] * len(call["stride"])}


@divides("aten::convolution_backward", specials=SPECIALS)
def convolution_backward(context: Context, op: OpOverload, named: Named) -> list[Stage]:
    """Those gradients of input, weight and bias that `output_mask` asks for."""
    if named["input"].dim() != named["weight"].dim():
        return []
    stages = []
    for name, places in (("data gradient", (0,)), ("filter gradient", (1, 2))):
        mask = [wanted and place in places for place, wanted in enumerate(named["output_mask"])]
        if any(mask):
            found = _along_kernel(context, op, named, partial(full, output_mask=mask))
            stages.append(Stage(name, places, with_mask(op, mask), found))
    return stages
