"""Like CUDA: makes a program on fake CPU tensors choose what it would choose on CUDA.

PyTorch's backward pass needs a CUDA device to run on tensors of the fake device "cuda", so recording without a GPU uses
fake CPU tensors. Above the backends most operators are the same. This file has those that are not, as far as they
change what is kept in memory:

    device="cuda", .cuda(), .to("cuda")     the CPU, so that a script for a GPU need not be changed
    dropout                                 one operator that keeps a mask of bytes, not the scaled noise
    attention with dropout                  the fused one, which keeps no attention matrix
    optimizers, gradient clipping           over whole lists (`foreach`), as is the default there
    batch norm, convolution, pooling        nothing to do: the same saved tensors (batch norm has another name there)
    recurrent layers                        unfused: what cuDNN keeps for its backward pass is not known here
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_plain_dropout = F.dropout
_plain_attention = F.scaled_dot_product_attention


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if training and 0 < p < 1 and not inplace:
        kept: Tensor = torch.native_dropout(input, p, True)[0]
        return kept
    return _plain_dropout(input, p, training, inplace)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *more: Any, **rest: Any
) -> Any:
    return _plain_attention(query, key, value, attn_mask, 0.0, *more, **rest)


class _CudaIsHere(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        elif function is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(value) else value for value in args)
        return function(*args, **kwargs)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


@contextmanager
def like_cuda() -> Iterator[None]:
    """Until the end of the block the program chooses as on CUDA. Enter the block before the modes that record."""
    with ExitStack() as stack:
        for prefix, name, value in (
            ("torch.optim", "_default_to_fused_or_foreach", lambda *_args, **_kwargs: (False, True)),
            ("torch.nn.utils.clip_grad", "_has_foreach_support", lambda *_args, **_kwargs: True),
            ("torch.nn.functional", "dropout", _dropout),
            ("torch.nn.functional", "scaled_dot_product_attention", _attention),
        ):
            stack.enter_context(replaced(prefix, name, value))
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.enter_context(_CudaIsHere())
        yield


@contextmanager
def replaced(prefix: str, name: str, value: Any) -> Iterator[None]:
    """Until the end of the block `name` is `value` in each loaded module whose own name begins with `prefix`."""
    found = [m for key, m in list(sys.modules.items()) if key.startswith(prefix) and hasattr(m, name)]
    before = [getattr(module, name) for module in found]
    for module in found:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, plain in zip(found, before):
            setattr(module, name, plain)
