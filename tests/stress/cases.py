"""What the strict suite runs: PyTorch's own databases of operators and modules, and a few layouts they leave out.

A case is a text, "kind|name|variant|dtype"; it yields samples, each with a function that computes results.
Samples are the same in every process: every generator is seeded before each.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.autograd import forward_ad
from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tests.stress import layouts


class Sample(NamedTuple):
    """A call, and how many bytes its arguments have."""

    label: str
    compute: Callable[[], Any]
    operand_bytes: int = 0


MOST_SAMPLES = 64  # of one operator and dtype; those of larger sets are spread evenly over the set
MOST_LARGE = 3  # of those that are larger than the budget
NOT_LARGE = (
    {
        "_segment_reduce": "PyTorch crashes where lengths do not fit",
        "argwhere": "its samples are of two sizes of which one stays",
        "grid_sampler_3d": "its samples are of the ninth power of the size",
    }
    | dict.fromkeys(
        ("corrcoef", "cov", "linalg.householder_product", "ormqr", "pca_lowrank", "svd_lowrank"), "of all pairs of rows"
    )
    | dict.fromkeys(("unbind", "unbind_copy"), "a result for each row, for minutes")
)
LEAST_LARGE_BYTES, MOST_LARGE_BYTES = 128 << 10, 4 << 20
MOST_VARIANTS = 4  # samples of which the variants run too: in place, out=, second derivatives, forward mode
_DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
_LAYOUTS = ("coo", "csr", "csc", "bsr", "bsc")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def operator_cases() -> list[str]:
    """Each entry of op_db with float32, complex64 and one integral dtype, as far as it supports them."""
    cases = []
    for op in op_db:
        dtypes = [dtype for dtype in _DTYPES if dtype in op.supported_dtypes("cpu")]
        if torch.int64 in dtypes and torch.bool in dtypes:
            dtypes.remove(torch.bool)
        dtypes = dtypes or sorted(op.supported_dtypes("cpu"), key=str)[:1]
        cases += [f"op|{op.name}|{op.variant_test_name}|{_dtype_name(dtype)}" for dtype in dtypes]
    return cases


def large_cases(kind: str) -> list[str]:
    """Each entry of op_db with float32, or what it supports in its place, on larger samples.

    Args:
        kind: "long", with 32 elements in a dimension in place of 5; or "tall", with the first dimension repeated.
    """
    cases = []
    for op in op_db:
        if op.name in NOT_LARGE:
            continue
        dtypes = sorted(op.supported_dtypes("cpu"), key=lambda dtype: (dtype != torch.float32, str(dtype)))
        cases += [f"{kind}|{op.name}|{op.variant_test_name}|{_dtype_name(dtype)}" for dtype in dtypes[:1]]
    return cases


def sparse_cases() -> list[str]:
    """Each operator of op_db that says it takes a sparse layout."""
    return [
        f"{name}|{op.name}|{op.variant_test_name}|{_dtype_name(dtype)}"
        for op, name in itertools.product(op_db, _LAYOUTS)
        if _makes_samples(op, name)
        for dtype in (torch.float32, torch.int64)
        if dtype in op.supported_dtypes("cpu")
    ]


def _makes_samples(op: Any, layout: str) -> bool:
    make = getattr(op, f"sample_inputs_sparse_{layout}_func")
    return getattr(getattr(make, "__wrapped__", make), "__name__", "") != "_sample_inputs_unspecified"


def list_cases() -> list[str]:
    """The _foreach_ operators; the worker cuts their lists."""
    return [f"list|{op.name}||float32" for op in _list_operators()]


def _list_operators() -> list[Any]:
    kinds = ("unary", "binary", "pointwise", "reduce", "other")
    return [op for kind in kinds for op in getattr(invocations, f"foreach_{kind}_op_db")]


def optimizer_cases() -> list[str]:
    return [
        f"optimizer|{info.optim_cls.__name__}|{way}|float32"
        for info in optim_db
        for way in ("plain", *(each for each in info.supported_impls if each != "differentiable"))
    ]


def module_cases() -> list[str]:
    return [
        f"module|{module.name}|{'train' if training else 'eval'}|float32"
        for module in module_db
        for training in ((True, False) if module.train_and_eval_differ else (True,))
    ]


def layout_cases() -> list[str]:
    return [f"layout|{name}||" for name in layouts.CASES]


def all_cases() -> list[str]:
    lists = list_cases() + optimizer_cases()
    return operator_cases() + sparse_cases() + lists + module_cases() + layout_cases()


def samples(case: str) -> Iterator[Sample]:
    """The samples of a case, made now."""
    seed()
    kind, name, variant, dtype = case.split("|")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "module":
            yield from _module_samples(name, variant == "train")
        elif kind == "list":
            yield from _list_samples(next(op for op in _list_operators() if op.name == name))
        elif kind == "optimizer":
            yield from _optimizer_samples(name, variant)
        elif kind == "layout":
            yield Sample("", layouts.CASES[name])
        elif kind == "planted":
            yield Sample("", layouts.PLANTED[name])
        elif kind in ("long", "tall"):
            yield from _large_samples(kind, _operator(name, variant), getattr(torch, dtype))
        else:
            yield from _operator_samples(kind, _operator(name, variant), getattr(torch, dtype))


def seed() -> None:
    torch.manual_seed(1234)
    numpy.random.seed(1234)
    random.seed(1234)


def _operator(name: str, variant: str) -> Any:
    found = [op for op in op_db if op.name == name and op.variant_test_name == variant]
    if len(found) != 1:
        raise ValueError(f"op_db has {len(found)} entries named {name!r} with variant {variant!r}")
    return found[0]


def _spread(things: list[Any], most: int) -> list[Any]:
    if len(things) <= most:
        return things
    return [things[i * len(things) // most] for i in range(most)]


# ---- operators ------------------------------------------------------------------------------------------------------


def _operator_samples(kind: str, op: Any, dtype: torch.dtype) -> Iterator[Sample]:
    gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    if kind == "op":
        inputs = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    else:
        inputs = list(getattr(op, f"sample_inputs_sparse_{kind}")("cpu", dtype, requires_grad=gradients))
    chosen = _spread(list(enumerate(inputs)), MOST_SAMPLES)
    del inputs
    for place, (index, sample) in enumerate(chosen):
        chosen[place] = None
        if kind == "op" and place < MOST_VARIANTS:
            plain = tree_map(_without_gradient, (sample.input, sample.args, sample.kwargs))
            if op.inplace_variant is not None:
                yield Sample(f"{index} in place", lambda s=plain: _in_place(op, *copy.deepcopy(s)))
            if op.supports_out:
                yield Sample(f"{index} out", lambda s=plain: _out(op, *s))
            if gradients and op.supports_gradgrad:
                yield Sample(f"{index} twice", lambda s=sample: _second_derivatives(op, s))
            if gradients and op.supports_forward_ad:
                yield Sample(f"{index} forward mode", lambda s=plain: _forward_mode(op, *s))
        yield Sample(f"{index}", lambda s=sample: _forward_backward(op, s, gradients))


def _large_samples(kind: str, op: Any, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of which the arguments are no smaller than 32 pages."""
    gradients = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with _sizes(32 if kind == "long" else 5):
        inputs = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    large = []
    for index, sample in enumerate(inputs):
        given = (sample.input, sample.args, sample.kwargs)
        if kind == "tall":
            given = _repeated(given)
        size_bytes = sum(leaf.nbytes for leaf in tree_leaves(given) if _is_strided(leaf))
        if LEAST_LARGE_BYTES <= size_bytes <= MOST_LARGE_BYTES:
            sample.input, sample.args, sample.kwargs = given
            large.append((index, sample, size_bytes))
    del inputs
    for index, sample, size_bytes in _spread(large, MOST_LARGE):
        if _result_bytes(op, (sample.input, sample.args, sample.kwargs)) > MOST_LARGE_BYTES:
            continue
        yield Sample(f"{index}", lambda s=sample: _forward_backward(op, s, gradients), size_bytes)


def _result_bytes(op: Any, given: Any) -> int:
    """Of a matrix of all pairs, for example; 0 where PyTorch cannot say before it computes."""
    try:
        first, args, kwargs = tree_map(lambda leaf: leaf.detach().to("meta") if _is_strided(leaf) else leaf, given)
        made = op(first, *args, **kwargs)
    except Exception:  # an operator raises whatever it likes for a tensor without numbers
        return 0
    return sum(leaf.nbytes for leaf in tree_leaves(made) if _is_strided(leaf))


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _repeated(given: Any) -> Any:
    """Arguments in which the first tensor, and others of its shape, are repeated along their first dimension."""
    first = next((leaf for leaf in tree_leaves(given) if _is_strided(leaf) and leaf.dim() and leaf.numel()), None)
    if first is None:
        return given
    times = -(-LEAST_LARGE_BYTES // first.nbytes)

    def longer(value: Any) -> Any:
        if not _is_strided(value) or value.shape != first.shape:
            return value
        made = value.detach().repeat(times, *[1] * (value.dim() - 1))
        return made.requires_grad_(value.requires_grad)

    return tree_map(longer, given)


@contextlib.contextmanager
def _sizes(size: int) -> Iterator[None]:
    """Within it, the databases make samples with `size` where they have 5, and so on in proportion."""
    names = {"XS": size * 3 // 5, "S": size, "M": 2 * size, "L": 4 * size}
    modules = [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal.") and hasattr(m, "S")]
    before = [(module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, names[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _without_gradient(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _forward_backward(op: Any, sample: Any, gradients: bool) -> Any:
    arguments = (sample.input, sample.args, sample.kwargs)
    result = op(sample.input, *sample.args, **sample.kwargs)
    outputs: list[Any] = [result]
    if gradients:
        outputs += _gradients(sample.output_process_fn_grad(result), arguments)
    return [*outputs, tree_leaves(arguments)]


def _gradients(result: Any, arguments: Any) -> list[Any]:
    """The gradients, or the error, of a function's tensors that have any."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outputs or not inputs:
        return []
    try:
        directions = [_direction(output) for output in outputs]
        return list(torch.autograd.grad(outputs, inputs, directions, allow_unused=True))
    except Exception as error:  # not differentiable for this sample: it must be so in both runs
        return [error]


def _second_derivatives(op: Any, sample: Any) -> Any:
    result = sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    directions = [_direction(output).requires_grad_() for output in outputs]
    first = torch.autograd.grad(outputs, inputs, directions, allow_unused=True, create_graph=True)
    return [first, _gradients(first, (inputs, directions))]


def _forward_mode(op: Any, *sample: Any) -> Any:
    with forward_ad.dual_level():
        duals = tree_map(_dual, sample)
        result = op(duals[0], *duals[1], **duals[2])
        return [list(forward_ad.unpack_dual(leaf)) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _dual(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
        return forward_ad.make_dual(value, torch.randn_like(value))
    return value


def _direction(output: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(output) if output.layout is torch.strided else output.detach().clone()


def _in_place(op: Any, first: Any, args: Any, kwargs: Any) -> Any:
    return [op.inplace_variant(first, *args, **kwargs), first, tree_leaves((args, kwargs))]


def _out(op: Any, first: Any, args: Any, kwargs: Any) -> Any:
    expected = op(first, *args, **kwargs)
    leaves, spec = tree_flatten(expected)
    out = spec.unflatten([torch.zeros_like(leaf) for leaf in leaves])
    empty = spec.unflatten([leaf.new_empty(0) for leaf in leaves])  # grows within the operator
    op(first, *args, **kwargs, out=out)
    op(first, *args, **kwargs, out=empty)
    return [expected, out, empty]


# ---- lists and optimizers -------------------------------------------------------------------------------------------


def _list_samples(op: Any) -> Iterator[Sample]:
    for index, sample in enumerate(_spread(list(op.sample_inputs("cpu", torch.float32)), MOST_SAMPLES)):
        given = (sample.input, sample.args, sample.kwargs)
        if op.method_variant is not None:
            yield Sample(f"{index}", lambda s=given: [op.method_variant(s[0], *s[1], **s[2]), tree_leaves(s)])
        if op.inplace_variant is not None:
            yield Sample(f"{index} in place", lambda s=given: [op.inplace_variant(s[0], *s[1], **s[2]), tree_leaves(s)])


def _optimizer_samples(name: str, way: str) -> Iterator[Sample]:
    (info,) = (each for each in optim_db if each.optim_cls.__name__ == name)
    for index, options in enumerate(info.optim_inputs_func("cpu")):
        chosen = dict(options.kwargs) | ({} if way == "plain" else {way: True})
        if way == "plain" or not chosen.get("differentiable"):
            yield Sample(f"{index}", lambda chosen=chosen: _optimize(info, chosen))


def _optimize(info: Any, options: dict[str, Any]) -> Any:
    sizes = ((30, 40), (7, 5), (64, 64)) if info.optim_cls.__name__ == "Muon" else ((30, 40), (7,), (), (3, 64, 64))
    parameters = [torch.randn(size).requires_grad_() for size in sizes]
    optimizer = info.optim_cls(parameters, **options)

    def loss() -> torch.Tensor:
        for parameter in parameters:
            gradient = torch.randn_like(parameter)
            parameter.grad = gradient.to_sparse() if info.only_supports_sparse_grads else gradient
        return torch.ones(())

    for _ in range(3):
        loss()
        optimizer.step(loss)
    return [parameters, [list(state.values()) for state in optimizer.state.values()]]


# ---- modules --------------------------------------------------------------------------------------------------------


def _module_samples(name: str, training: bool) -> Iterator[Sample]:
    found = [module for module in module_db if module.name == name]
    if len(found) != 1:
        raise ValueError(f"module_db has {len(found)} entries named {name!r}")
    info = found[0]
    dtype = torch.float64 if "FractionalMaxPool" in name else torch.float32  # its samples hold doubles
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for index, entry in enumerate(_spread(list(inputs), MOST_SAMPLES)):
        if entry.forward_input is not None:
            yield Sample(f"{index}", lambda entry=entry: _train(info.module_cls, entry, training))


def _train(module_class: Any, entry: Any, training: bool) -> Any:
    """Two steps: forward, backward, and AdamW over lists of parameters."""
    made = entry.constructor_input
    module = module_class(*made.args, **made.kwargs)
    module.train(training)
    given = entry.forward_input
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, foreach=True) if parameters else None
    history: list[Any] = []
    for _ in range(2):
        result = module(*given.args, **given.kwargs)
        history.append(tree_map(_copy, result))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if outputs:
            directions = [_direction(output) for output in outputs]
            torch.autograd.backward(outputs, directions, retain_graph=True)  # some inputs are no leaves
        history += [_copy(leaf.grad) for leaf in tree_leaves((given.args, given.kwargs)) if _is_leaf(leaf)]
        history += [_copy(parameter.grad) for parameter in parameters]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        history += [_copy(parameter) for parameter in module.state_dict().values()]
    return history


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
