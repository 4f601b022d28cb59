"""PyTorch's own samples (op_db, module_db): every operator that they call and that can be divided, in parts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from divided import DIVIDED, check
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode

from ooc.pytorch.splitting.verification import duplicate, tensors_in

OPERATORS = [
    "addbmm", "addmm", "addmv", "addr", "amax", "argmax", "baddbmm", "bmm", "bucketize", "cdist", "cumsum",
    "fft.fft", "fft.irfft", "fft.rfft", "gather", "grid_sampler_2d", "index_add", "index_copy", "index_fill",
    "index_select", "linalg.cross", "log_softmax", "logsumexp", "matmul", "max", "mean", "mm", "mv",
    "native_batch_norm", "native_layer_norm", "prod", "renorm", "scatter_add", "scatter_reduce",
    "softmax", "sort", "std", "sum", "topk", "var", "nn.functional.adaptive_avg_pool2d", "nn.functional.avg_pool1d",
    "nn.functional.avg_pool2d", "nn.functional.avg_pool3d", "nn.functional.batch_norm", "nn.functional.bilinear",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d", "nn.functional.conv_transpose1d",
    "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d", "nn.functional.cross_entropy",
    "nn.functional.embedding", "nn.functional.group_norm", "nn.functional.interpolate",
    "nn.functional.layer_norm", "nn.functional.linear", "nn.functional.local_response_norm",
    "nn.functional.max_pool1d", "nn.functional.max_pool2d", "nn.functional.max_pool3d",
    "nn.functional.nll_loss", "nn.functional.pad", "nn.functional.scaled_dot_product_attention",
    "nn.functional.softmin", "nn.functional.upsample_bilinear",
]  # fmt: skip
MODULES = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss", "Embedding", "GroupNorm", "InstanceNorm2d", "LayerNorm", "Linear", "MaxPool2d",
    "AvgPool2d", "AdaptiveAvgPool2d", "MultiheadAttention", "NLLLoss", "ReflectionPad2d", "Softmax",
    "TransformerEncoderLayer",
]  # fmt: skip
ROUNDING = {torch.float32: 2e-4, torch.float64: 1e-11, torch.bfloat16: 0.1}


class Calls(TorchDispatchMode):
    """Every call of an operator that can be divided, with copies of its arguments; a few of each."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[Any], dict[str, Any]]] = []
        self._seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name + ("" if func._overloadname == "default" else f".{func._overloadname}")
        shapes = name + str([tuple(t.shape) for t in tensors_in([args])])
        if name in DIVIDED and self._seen[shapes] < 1 and plain(tensors_in([args, kwargs or {}])):
            self._seen[shapes] += 1
            given = duplicate((list(args), dict(kwargs or {})))
            self.found.append((name, *given))
        return func(*args, **(kwargs or {}))


def plain(tensors: list[Tensor]) -> bool:
    return all(t.layout == torch.strided and (t.is_floating_point() or t.dtype == torch.int64) for t in tensors)


def differentiate(result: Any) -> None:
    for tensor in tensors_in([result] if not isinstance(result, list | tuple) else list(result)):
        if tensor.requires_grad:
            tensor.backward(torch.randn_like(tensor), retain_graph=True)


def check_all(calls: Iterator[tuple[str, list[Any], dict[str, Any]]], dtype: torch.dtype) -> int:
    tried = 0
    for name, args, kwargs in calls:
        tensors = tensors_in([args, kwargs])
        total = sum(t.nbytes for t in tensors)
        if not finite(tensors) or any(t.numel() == 0 for t in tensors):
            continue
        tried += check(name, args, total, exact=False, relative=ROUNDING[dtype], slack=1 << 16, **kwargs)
    return tried


def finite(tensors: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


OTHER = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float64, torch.bfloat16)]


@pytest.mark.parametrize("dtype", [torch.float32, *OTHER], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_samples_of_operators(name: str, dtype: torch.dtype) -> None:
    tried = samples = 0
    for info in op_db:
        if info.name != name or dtype not in info.dtypes:
            continue
        differentiable = dtype in info.supported_backward_dtypes("cpu") and info.supports_autograd
        for sample in list(info.sample_inputs("cpu", dtype, requires_grad=differentiable))[:10]:
            samples += 1
            with Calls() as calls, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                differentiate(info.op(sample.input, *sample.args, **sample.kwargs))
            tried += check_all(iter(calls.found), dtype)
    if samples:
        assert tried > 0


@pytest.mark.parametrize("name", MODULES)
def test_samples_of_modules(name: str) -> None:
    tried = 0
    dtype = torch.float32
    for info in module_db:
        if info.name.split(".")[-1] != name:
            continue
        for sample in info.module_inputs_func(info, "cpu", dtype, requires_grad=True, training=True)[:6]:
            module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
            if sample.forward_input is None:
                continue
            with Calls() as calls, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                differentiate(module(*sample.forward_input.args, **sample.forward_input.kwargs))
            tried += check_all(iter(calls.found), dtype)
    assert tried > 0
