"""Winograd's convolution along rows, F(4, 3): half the products for some sums (Lavin and Gray 2016, section 4.3).

Six rows of the image that begin at every fourth become six combinations of them, and so do the three rows of a filter.
Each pair is convolved along the other dimensions, by PyTorch's own, and four rows of the result are combinations of
what comes out. The data's gradient is a convolution with turned filters. For the filters' gradient four rows of the
result's gradient become six, and three rows of a filter's are combinations of six.

Factors of up to eight make results less exact. What is not finite gets into other rows, so PyTorch computes those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, add, sub

from ooc.pytorch.splitting.axes import Named
from ooc.pytorch.splitting.convolution import own, unfolds
from ooc.pytorch.splitting.geometry import layout

LEAST_ROWS = 8
LEAST_CHANNELS = 128  # where there is a kernel of oneDNN: with fewer, combinations take longer than the products saved
_COMBINED = (6, 0, 0), (-4, -4, -4), (-4, 4, -4), (1, 2, 4), (1, -2, 4), (0, 0, 24)  # 24ths of a filter's rows
_NO_MASK = False, False, False
_aten = torch.ops.aten


def turned_filters(filters: Tensor) -> Tensor:
    """Those of the opposite direction: the channels of both sides are exchanged, and the taps in the other order."""
    return filters.transpose(0, 1).flip(tuple(range(2, filters.dim()))).contiguous()


def opposite_padding(named: Named) -> list[int]:
    """What the opposite direction pads with."""
    sizes = named["dilation"], named["weight"].shape[2:], named["padding"]
    return [dilation * (taps - 1) - padding for dilation, taps, padding in zip(*sizes)]


def suits(named: Named) -> bool:
    """Whether it computes a kernel, and may be faster."""
    x, weight, data = named["input"], named["weight"], named.get("output_mask", _NO_MASK)[0]
    plain = layout(x, weight) == torch.contiguous_format and not named["transposed"]
    steps = {*named["stride"], named["groups"], named["dilation"][0]} == {1} and weight.shape[2] == 3
    pays = x.dtype.itemsize >= 4 and (unfolds(x.dtype) or min(weight.shape[:2]) >= LEAST_CHANNELS)
    rows = x.shape[2] if data else x.shape[2] + 2 * named["padding"][0] - 2
    return plain and steps and pays and rows >= LEAST_ROWS and (not data or min(opposite_padding(named)) >= 0)


def prepare(named: Named) -> Named:
    """The arguments and, unless the gradient of the filters is asked for, six combinations of their rows: `six`."""
    data, filters, _ = named.get("output_mask", _NO_MASK)
    if filters:
        return named
    weight = turned_filters(named["weight"]) if data else named["weight"]
    return named | {"six": torch.tensordot(weight.new_tensor(_COMBINED) / 24, weight, ([1], [2])).unsqueeze(3)}


def run(six: Sequence[Tensor] = (), **named: Any) -> Sequence[Any]:
    """The results of the operator that asks for one kernel; `six` is that of `prepare`."""
    (data, filters, bias), ones = named.get("output_mask", _NO_MASK), [1] * len(named["stride"])
    padding = opposite_padding(named) if data else named["padding"]
    rest = ones, [0, *padding[1:]], [1, *named["dilation"][1:]], False, [0] * len(ones), 1
    x, grad = named["grad_output" if data else "input"], named.get("grad_output", torch.empty(0))
    results: Sequence[Any]
    size = x.shape[2] + 2 * padding[0] - 2
    x0, x1, x2, x3, x4, x5 = _every_fourth(_longer(x, padding[0], padding[0] + -size % 4), 6)
    far, near, outer, inner = sub(x4, x2, alpha=4), sub(x3, x1, alpha=4), x4 - x2, x3 - x1
    images = [
        add(outer, x0 - x2, alpha=4), far + near, far - near,
        add(outer, inner, alpha=2), sub(outer, inner, alpha=2), sub(x5 - x3, inner, alpha=4),
    ]  # fmt: skip
    if filters:
        like, mask = named["weight"].narrow(2, 0, 1), [False, True, False]
        each = zip(_of_gradient(_longer(grad, 0, -size % 4)), images)
        found = [_aten.convolution_backward(e, x, like, None, *rest, mask)[1] for e, x in each]
        combined = torch.tensordot(like.new_tensor(_COMBINED) / 24, torch.cat(found, 2), ([0], [2]))
        made = combined.movedim(0, 2).contiguous()
        results = None, made, grad.transpose(0, 1).flatten(1).sum(1) if bias else None
    else:
        made = _of_six([_aten.convolution(x, w, None, *rest) for x, w in zip(images, six)])
        made = made.narrow(2, 0, size).contiguous()
        if not data and named["bias"] is not None:
            made += named["bias"].view(-1, *ones)
        results = (made, None, None) if data else (made,)
    return results if bool(made.sum().isfinite()) else own(**named)


def _of_gradient(y: Tensor) -> list[Tensor]:
    y0, y1, y2, y3 = _every_fourth(y, 4)
    even, odd, more_even, more_odd = y0 + y2, y1 + y3, add(y0, y2, alpha=4), add(y1, y3, alpha=4)
    return [y0, even + odd, even - odd, add(more_even, more_odd, alpha=2), sub(more_even, more_odd, alpha=2), y3]


def _of_six(six: Sequence[Tensor]) -> Tensor:
    m0, m1, m2, m3, m4, m5 = six
    made = m0.new_empty(*m0.shape[:2], 4 * m0.shape[2], *m0.shape[3:])
    y0, y1, y2, y3 = _every_fourth(made, 4)
    even, odd, more_even, more_odd = m1 + m2, m1 - m2, m3 + m4, m3 - m4
    add(m0.add_(even), more_even, out=y0)
    add(odd, more_odd, alpha=2, out=y1)
    add(even, more_even, alpha=4, out=y2)
    add(m5.add_(odd), more_odd, alpha=8, out=y3)
    return made


def _longer(x: Tensor, above: int, below: int) -> Tensor:
    padded: Tensor = _aten.constant_pad_nd(x, [*[0, 0] * (x.dim() - 3), above, below])
    return padded


def _every_fourth(x: Tensor, number: int) -> list[Tensor]:
    """Rows beginning at each of the first `number`."""
    return [x[:, :, first : x.shape[2] - number + first + 1 : 4] for first in range(number)]
