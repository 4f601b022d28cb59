"""Cases written by hand: layouts and doors to memory that op_db leaves out, and faults planted to test the suite."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

CASES: dict[str, Callable[[], Any]] = {}
PLANTED: dict[str, Callable[[], Any]] = {}


def _case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def _planted(function: Callable[[], Any]) -> Callable[[], Any]:
    PLANTED[function.__name__] = function
    return function


# ---- layouts --------------------------------------------------------------------------------------------------------


@_case
def nested_strided() -> Any:
    parts = [torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
    nested = torch.nested.as_nested_tensor(parts)
    weight = torch.randn(6, 4, requires_grad=True)
    result = torch.nn.functional.linear(nested, weight).relu()
    padded = torch.nested.to_padded_tensor(result, 0.5)
    gradients = torch.autograd.grad(padded, [weight, *parts], torch.randn_like(padded))
    other = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)])
    made = torch.nested.nested_tensor([torch.ones(2)])
    sums = [nested + other, nested * 2.0, made.clone(), -other, other.sum(-1, keepdim=True)]
    others = [nested.size(0), torch.softmax(other, -1), other.transpose(1, 2).contiguous()]
    return [result, padded, gradients, sums, others]


@_case
def nested_jagged() -> Any:
    parts = [torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    result = torch.nn.functional.gelu(nested) * 2
    padded = torch.nested.to_padded_tensor(result, 0.0)
    return [padded, torch.autograd.grad(padded, parts, torch.randn_like(padded)), nested.offsets(), nested.values()]


@_case
def quantized_per_tensor() -> Any:
    x = torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 3, torch.quint8)
    y = torch.quantize_per_tensor(torch.randn(4, 6), 0.2, 1, torch.quint8)
    views = [x.t().contiguous(), x[1:, ::2].clone(), torch.relu(x), x.flatten(), torch.cat([x, y])]
    added = torch.ops.quantized.add(x, y, 0.3, 2)
    return [x, views, x.dequantize(), added, x.q_scale(), x.q_zero_point(), x.equal(x.clone()), x.copy_(y), x.max()]


@_case
def quantized_per_channel() -> Any:
    scales, zeros = torch.rand(4) + 0.1, torch.arange(4)
    x = torch.quantize_per_channel(torch.randn(4, 6), scales, zeros, 0, torch.qint8)
    return [x, x.dequantize(), x.q_per_channel_scales(), x.q_per_channel_zero_points(), x.clone(), x[1:3].dequantize()]


@_case
def quantized_linear_and_convolution() -> Any:
    if torch.backends.quantized.engine == "none":
        return []
    x = torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 3, torch.quint8)
    weight = torch.quantize_per_tensor(torch.randn(5, 6), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, torch.randn(5))
    image = torch.quantize_per_tensor(torch.randn(1, 4, 6, 6), 0.1, 3, torch.quint8)
    kernel = torch.quantize_per_tensor(torch.randn(8, 4, 3, 3), 0.1, 0, torch.qint8)
    convolution = torch.ops.quantized.conv2d_prepack(kernel, torch.randn(8), [1, 1], [0, 0], [1, 1], 1)
    dynamic = torch.ops.quantized.linear_dynamic(torch.randn(4, 6), packed)
    return [
        torch.ops.quantized.linear(x, packed, 0.5, 4),
        torch.ops.quantized.linear_relu(x, packed, 0.5, 4),
        torch.ops.quantized.linear_unpack(packed),
        torch.ops.quantized.conv2d(image, convolution, 0.5, 4),
        dynamic,
        torch.nn.functional.max_pool2d(image, 2),
    ]


@_case
def dynamically_quantized_lstm() -> Any:
    if torch.backends.quantized.engine == "none":
        return []
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    lstm = torch.ao.quantization.quantize_dynamic(torch.nn.LSTM(6, 5), {torch.nn.LSTM}, dtype=torch.qint8)
    x = torch.randn(3, 2, 6)
    return [quantized(x), lstm(x), quantized(x)]


@_case
def mkldnn_layout() -> Any:
    if not torch.backends.mkldnn.is_available():
        return []
    x = torch.randn(2, 4, 8, 8)
    opaque = x.to_mkldnn()
    return [opaque.to_dense(), opaque.relu().to_dense(), (opaque + opaque).to_dense(), opaque.reshape(2, -1).to_dense()]


@_case
def mkldnn_model() -> Any:
    if not torch.backends.mkldnn.is_available():
        return []
    from torch.utils import mkldnn

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)).eval()
    converted = mkldnn.to_mkldnn(model)
    x = torch.randn(2, 3, 10, 10).to_mkldnn()
    return [converted(x).to_dense(), converted(x).to_dense()]


@_case
def sparse_training() -> Any:
    table = torch.nn.Embedding(20, 4, sparse=True)
    bag = torch.nn.EmbeddingBag(20, 4, sparse=True, mode="sum")
    optimizers = [torch.optim.SparseAdam([table.weight]), torch.optim.SGD(bag.parameters(), lr=0.1)]
    for _ in range(2):
        (table(torch.tensor([1, 3, 3])).sum() + bag(torch.tensor([[1, 2], [3, 3]])).pow(2).sum()).backward()
        gradient = table.weight.grad.coalesce()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [gradient, table.weight, bag.weight]


@_case
def sparse_conversions() -> Any:
    dense = torch.randn(6, 8) * (torch.rand(6, 8) > 0.6)
    results: list[Any] = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))]
    results += [dense.to_sparse_bsc((2, 2)), *(each.to_dense() for each in results)]
    csr, coo = results[1], results[0]
    results += [csr @ torch.randn(8, 3), coo @ torch.randn(8, 3), torch.sparse.mm(csr, csr.t().to_sparse_csr())]
    results += [csr + csr, coo + coo, coo.coalesce(), coo.t(), csr * 2, torch.sparse.softmax(coo, 1), coo.sum(0)]
    results += [torch.sparse.sampled_addmm(csr, torch.randn(6, 4), torch.randn(4, 8)), csr.clone()]
    results += [coo.clone().sparse_resize_((7, 9), 2, 0), coo.sum(), csr.sum(), coo.transpose(0, 1), coo[1], coo.bool()]
    return results


@_case
def masked_tensors() -> Any:
    data, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.3
    masked = torch.masked.masked_tensor(data, mask)
    return [masked.get_data(), (masked + masked).get_data(), masked.sum().get_data(), masked.amax(1).get_mask()]


@_case
def packed_sequences() -> Any:
    lengths = torch.tensor([4, 2, 1]).clone()
    x = torch.randn(4, 3, 5, requires_grad=True)
    lstm, gru = torch.nn.LSTM(5, 6, bidirectional=True), torch.nn.GRU(12, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths)
    _busy()
    result, _ = gru(lstm(packed)[0])
    padded, sizes = torch.nn.utils.rnn.pad_packed_sequence(result)
    padded.sum().backward()
    return [padded, sizes, x.grad, lstm.weight_ih_l0.grad, gru.weight_hh_l0.grad, packed.batch_sizes]


@_case
def lengths_as_tensors() -> Any:
    x, lengths = torch.randn(6, 2, 4, requires_grad=True), torch.tensor([6, 5]).clone()
    targets, split = torch.randint(1, 4, (2, 3)), torch.tensor([1, 3]).clone()
    _busy()
    loss = torch.nn.functional.ctc_loss(x.log_softmax(2), targets, lengths, lengths - 3)
    loss.backward()
    parts = [torch.tensor_split(x, split), x.tensor_split(split, dim=0)]
    return [loss, x.grad, parts, torch.repeat_interleave(x, lengths, 1)]


@_case
def composite_in_name_only() -> Any:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    _busy()
    scale, zero = torch.choose_qparams_optimized(x, 8, 200, 0.16, 8)
    try:
        quantized, offsets, weight_scale, weight_zero = torch.fbgemm_linear_quantize_weight(weight)
        packed = torch.fbgemm_pack_quantized_matrix(quantized.clone())
        half = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        bias = torch.randn(5)
        _busy()
        linear = torch.fbgemm_linear_int8_weight(x, quantized, packed, offsets, weight_scale, weight_zero, bias)
        linear = [linear, torch.fbgemm_linear_fp16_weight(x, half, bias)]
    except RuntimeError as error:  # no FBGEMM on this processor
        return [scale, zero, error]
    return [scale, zero, linear]


@_case
def a_composite_that_computes_at_times() -> Any:
    """max_pool1d reads its input itself, or calls operators that read the tangent, or the input for a gradient, too."""
    x, tangent = torch.randn(1, 2, 4096), torch.randn(1, 2, 4096)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        _busy()
        forward = list(forward_ad.unpack_dual(F.max_pool1d(dual, 3)))
    leaf = x.clone().requires_grad_()
    _busy()
    F.max_pool1d(leaf, 3).sum().backward()
    return [*forward, leaf.grad, F.max_pool1d(x, 3)]


# ---- doors to memory ------------------------------------------------------------------------------------------------


def _busy() -> None:
    """Two operators, so that nothing older is still held for the thread."""
    torch.ones(1).add_(1)


@_case
def python_values() -> Any:
    x = torch.arange(12.0).reshape(3, 4)
    _busy()
    values: list[Any] = [x.tolist(), x[1, 2].item(), float(x[0, 1]), int(x[0, 1]), bool(x[0, 1]), repr(x)]
    _busy()
    values += [list(map(float, x[0])), [float(v) for v in x.flatten()], x.numpy().sum(), complex(x[0, 0])]
    _busy()
    one = torch.tensor(1).clone()
    _busy()
    return [*values, numpy.asarray(x), numpy.array(x), range(10)[one], [1, 2, 3][one], f"{x[1, 1]:.2f}"]


@_case
def numpy_both_ways() -> Any:
    array = numpy.arange(6.0)
    shared = torch.from_numpy(array)
    x = torch.arange(6.0)
    view = x.numpy()
    _busy()
    view[2] = 50.0
    shared.mul_(2)
    _busy()
    return [x, array, view + 1, torch.tensor(view), torch.as_tensor(view), numpy.sin(x), numpy.add(view, x.numpy())]


@_case
def dlpack_both_ways() -> Any:
    x, y, z = torch.arange(6.0), torch.arange(7.0), torch.arange(8.0)
    _busy()
    other = torch.from_dlpack(x)
    array = numpy.from_dlpack(y)
    capsule = numpy.from_dlpack(_Capsule(torch.utils.dlpack.to_dlpack(z)))
    _busy()
    other.add_(1)
    y.mul_(2)
    z.mul_(3)
    _busy()
    return [x, array, array.sum(), capsule.sum(), torch.from_dlpack(array)]


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


@_case
def addresses() -> Any:
    x, y, z = torch.arange(6.0), torch.arange(7.0), torch.arange(8.0)
    _busy()
    found = [x.data_ptr(), y.untyped_storage().data_ptr(), z.const_data_ptr()]
    _busy()
    return [numpy.ctypeslib.as_array(ctypes.cast(each, ctypes.POINTER(ctypes.c_float)), (6,)).copy() for each in found]


@_case
def storages() -> Any:
    x = torch.arange(8.0)
    storage = x.untyped_storage()
    _busy()
    values: list[Any] = [storage[0], list(storage)[:8], storage.nbytes(), storage.tolist()[:8]]
    _busy()
    values += [bytes(storage.clone().tolist()), torch.tensor([], dtype=torch.float32).set_(storage)]
    typed = x.storage()
    _busy()
    values += [typed[3], typed.tolist(), typed.clone().tolist(), typed.double().tolist()]
    typed[2] = 9.0
    _busy()
    typed.fill_(3.0)
    storage.resize_(64)
    _busy()
    other = torch.zeros(8).untyped_storage()
    _busy()
    other.copy_(torch.arange(8.0).untyped_storage())
    return [*values, x, torch.tensor([], dtype=torch.float32).set_(other)]


@_case
def buffers() -> Any:
    data = bytearray(range(16))
    x = torch.frombuffer(data, dtype=torch.uint8)
    y = torch.arange(4, dtype=torch.uint8)
    _busy()
    array = torch.asarray(memoryview(data), dtype=torch.uint8)
    return [x + 1, torch.tensor(bytearray(b"abc")), array, torch.asarray(y.numpy()), torch.tensor([y[0], y[1]])]


@_case
def tensors_from_tensors() -> Any:
    x = torch.arange(4.0)
    _busy()
    made: list[Any] = [torch.tensor([x[0], x[1], 3.0]), torch.tensor([[x[0]], [x[3]]]), torch.tensor(x.tolist())]
    _busy()
    made += [torch.full((2,), x[2].item()), x.new_tensor([x[1], 2]), torch.as_tensor([x[0], x[2]])]
    index = torch.tensor(2)
    _busy()
    made += [x[index], x[[0, 2]], x[torch.tensor([True, False, True, False])], x[:index], x[index:], x[..., index]]
    x[index] = x[0]
    x[torch.tensor([0, 1])] = torch.tensor(7.0)
    x[1] = torch.tensor(5.0)
    return [*made, x, torch.arange(index), torch.zeros(index, index), torch.linspace(x[0], x[1], 3)]


@_case
def copies_and_files() -> Any:
    x = torch.randn(5, requires_grad=True)
    file = io.BytesIO()
    _busy()
    torch.save({"x": x, "view": x[1:]}, file)
    legacy = io.BytesIO()
    _busy()
    torch.save(x, legacy, _use_new_zipfile_serialization=False)
    _busy()
    loaded = [torch.load(io.BytesIO(each.getvalue())) for each in (file, legacy)]
    _busy()
    pickled = pickle.loads(pickle.dumps(x))
    _busy()
    return [loaded, pickled, __import__("copy").deepcopy(x), x.detach().clone()]


@_case
def strings_and_comparisons() -> Any:
    x, y = torch.arange(5.0), torch.arange(5.0)
    _busy()
    texts = [str(x), repr(x.to(torch.complex64))]
    return [texts, torch.equal(x, y), torch.allclose(x, y), (x == y).all().item(), 3 in x, len(x)]


@_case
def gradient_hooks_and_anomaly() -> Any:
    seen: list[float] = []
    with torch.autograd.set_detect_anomaly(True):
        x = torch.randn(4, requires_grad=True)
        y = (x * x).sum()
        x.register_hook(lambda gradient: seen.append(float(gradient.sum())))
        y.backward()
    return [x.grad, seen, torch.autograd.functional.hessian(lambda v: (v**3).sum(), torch.randn(3))]


@_case
def random_state() -> Any:
    state = torch.get_rng_state()
    _busy()
    first = torch.rand(3)
    torch.set_rng_state(state)
    _busy()
    generator = torch.Generator().manual_seed(5)
    saved = generator.get_state()
    _busy()
    second = torch.rand(3, generator=generator)
    generator.set_state(saved)
    return [first, torch.rand(3), second, torch.rand(3, generator=generator), state]


# ---- planted --------------------------------------------------------------------------------------------------------


def _address(tensor: torch.Tensor) -> int:
    from ooc.pytorch import raw_access

    return raw_access.address_of(tensor)


@_planted
def reads_behind_our_back() -> Any:
    x = torch.arange(8.0)
    address = _address(x)
    _busy()
    return ctypes.string_at(address, 32)


@_planted
def writes_what_it_only_reads() -> Any:
    x = torch.arange(8.0)
    address = _address(x)
    _busy()
    total = x.sum()
    _busy()
    total = x.sum()  # brought back, and clean; still pinned when the operator has returned
    ctypes.memset(address, 0, 32)
    _busy()
    return total


@_planted
def differs() -> Any:
    return os.urandom(8)


@_planted
def uninitialised() -> Any:
    return torch.empty(1000).add(0)


@_planted
def fine() -> Any:
    return torch.arange(8.0).sum()


@_planted
def wrong_in_strict_mode() -> Any:
    import ooc

    return not ooc.enabled()
