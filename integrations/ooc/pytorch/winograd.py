"""Winograd's convolution along rows, F(4, 3): half the products for some sums (Lavin and Gray 2016, section 4.3).

Six rows of the image that begin at every fourth become six combinations of them, and so do the three rows of a filter.
Each pair is convolved along the other dimensions, by PyTorch's own, and four rows of the result are combinations of
what comes out. For the filters' gradient four rows of the result's gradient become six, and three rows of a filter's
are combinations of six.

Tensors are as for `torch.conv2d` (or 1d, 3d) with strides of one, a dilation of one along rows, and one group. Factors
of up to eight make results less exact than PyTorch's, and what is not finite gets into other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, add, sub

_OF_FILTERS = (6, 0, 0), (-4, -4, -4), (-4, 4, -4), (1, 2, 4), (1, -2, 4), (0, 0, 24)  # 24ths of a filter's rows
_aten = torch.ops.aten


def combined(weight: Tensor) -> Tensor:
    """Six combinations of the rows of filters [K, C, 3, ...]: [6, K, C, 1, ...]."""
    six: Tensor = torch.tensordot(weight.new_tensor(_OF_FILTERS) / 24, weight, ([1], [2])).unsqueeze(3)
    return six


def convolution(x: Tensor, six: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The convolution of [N, C, H, ...] with filters that were `combined`: [N, K, H + 2 * padding - 2, ...]."""
    rows, rest = x.shape[2] + 2 * padding[0] - 2, _rest(padding, dilation)
    found = (_aten.convolution(image, w, None, *rest) for image, w in zip(_of_image(x, padding[0]), six))
    return _of_six(*found).narrow(2, 0, rows).contiguous()


def gradient(x: Tensor, grad: Tensor, weight: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """The gradient of the filters. Of `weight` only the sizes are looked at."""
    rest, one, mask = _rest(padding, dilation), weight.narrow(2, 0, 1), [False, True, False]
    both = zip(_of_gradient(grad), _of_image(x, padding[0]))
    found = [_aten.convolution_backward(error, image, one, None, *rest, mask)[1] for error, image in both]
    rows: Tensor = torch.tensordot(one.new_tensor(_OF_FILTERS) / 24, torch.cat(found, 2), ([0], [2]))
    return rows.movedim(0, 2).contiguous()


def _rest(padding: Sequence[int], dilation: Sequence[int]) -> tuple[object, ...]:
    """The arguments, from the strides on, of a convolution along the dimensions behind the rows."""
    ones = [1] * len(padding)
    return ones, [0, *padding[1:]], [1, *dilation[1:]], False, [0] * len(padding), 1


def _of_image(x: Tensor, padding: int) -> list[Tensor]:
    x0, x1, x2, x3, x4, x5 = _every_fourth(_longer(x, padding, padding + (2 - x.shape[2] - 2 * padding) % 4), 6)
    far, near, outer, inner = sub(x4, x2, alpha=4), sub(x3, x1, alpha=4), x4 - x2, x3 - x1
    return [
        add(outer, x0 - x2, alpha=4), far + near, far - near,
        add(outer, inner, alpha=2), sub(outer, inner, alpha=2), sub(x5 - x3, inner, alpha=4),
    ]  # fmt: skip


def _of_gradient(y: Tensor) -> list[Tensor]:
    y0, y1, y2, y3 = _every_fourth(_longer(y, 0, -y.shape[2] % 4), 4)
    even, odd, more_even, more_odd = y0 + y2, y1 + y3, add(y0, y2, alpha=4), add(y1, y3, alpha=4)
    return [y0, even + odd, even - odd, add(more_even, more_odd, alpha=2), sub(more_even, more_odd, alpha=2), y3]


def _of_six(m0: Tensor, m1: Tensor, m2: Tensor, m3: Tensor, m4: Tensor, m5: Tensor) -> Tensor:
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
