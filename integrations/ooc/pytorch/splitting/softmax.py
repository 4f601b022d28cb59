"""Softmax and its gradient, cut along every dimension but the one that softmax goes along."""

from __future__ import annotations

from torch._ops import OpOverload

from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import divides
from ooc.pytorch.splitting.parts import Axis, Named, Piece, along


def other_dimensions(shape: tuple[int, ...], own: int | list[int], names: list[str], results: int = 1) -> list[Axis]:
    """An axis for each dimension but those in `own`, the outermost first, over arguments and results of that shape."""
    owned = {d % len(shape) for d in ([own] if isinstance(own, int) else own)} if shape else set()
    return [
        Axis(f"dimension {d}", n, dict.fromkeys(names, d), dict.fromkeys(range(results), d))
        for d, n in enumerate(shape)
        if d not in owned
    ]


@divides("aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax")
def softmax(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The softmax, which has the shape of its argument."""
    axes = other_dimensions(named["self"].shape, named["dim"], ["self"])
    return along(context, op, named, axes, multiples=(16, 1))


@divides("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def softmax_backward(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """The gradient of the argument, from the result and its gradient; all have the same shape."""
    axes = other_dimensions(named["output"].shape, named["dim"], ["grad_output", "output"])
    return along(context, op, named, axes, multiples=(16, 1))
