"""Fake mode: runs a program on fake tensors and writes down what its operators would do to memory.

A dispatch mode sees what the adapter's fallback sees in a real run (`csrc/operators.h`): every operator below autograd,
views and composite operators left out, operators over whole lists cut into slices. Fake tensors have storages without
memory, which tensors share and which are released when real ones would be. What an operator allocates for itself while
it runs (workspaces of cuDNN or oneDNN) is not seen.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ooc.pytorch.like_cuda import replaced
from ooc.pytorch.roofline import Roofline, tensors_in
from swapd.trace.sequence import SequenceRecorder, Storage
from swapd.trace.trace import READ, WRITE

SLICE_BYTES = 8 << 20  # bytes: operators over lists run in slices of so much, as in session.py
# Operators that write arguments which their schema declares as read only: normalisations their running statistics, the
# others any. The same lists are in operators.h.
_WRITE_ANY = {"aten::_cudnn_rnn", "aten::mkldnn_rnn_layer_backward"}
_WRITE_STATISTICS = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::_batch_norm_impl_index",
    "aten::batch_norm_gather_stats",
    "aten::batch_norm_gather_stats_with_counts",
    "aten::native_batch_norm.out",
}
_WHOLE_LISTS = (
    "aten::_foreach_",
    "aten::_fused_adam",
    "aten::_fused_sgd",
    "aten::_fused_adagrad",
    "aten::_amp_foreach_non_finite_check_and_unscale_",
)


Make = Callable[..., Callable[[], Any]]


class FakeError(RuntimeError):
    """The program cannot be recorded without running it; the message says what stands in the way."""


class Operator:
    """What is known of an operator; `inspect` in operators.h finds out the same."""

    def __init__(self, function: Any) -> None:
        schema = function._schema
        self.name: str = function.name()
        space = function.namespace
        trusted = space in ("aten", "prims", "torchvision")
        writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        believed = trusted and self.name not in _WRITE_ANY
        statistics = self.name in _WRITE_STATISTICS
        self.access = {
            a.name: READ | WRITE if write or not believed or (statistics and a.name.startswith("running_")) else READ
            for a, write in zip(schema.arguments, writes)
        }
        self.order = [a.name for a in schema.arguments]
        aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        tensors = any("Tensor" in str(a.type) for a in schema.arguments)
        self.view = aliases and not any(writes) and tensors and space == "aten"
        self.composite = torch._C._dispatch_has_kernel_for_dispatch_key(self.name, "CompositeImplicitAutograd")
        self.whole_list = self.name.startswith(_WHOLE_LISTS)
        self.slice_last_tensor = self.name.startswith("aten::_foreach_addc") and ".Tensor" in self.name
        self.returns = bool(schema.returns)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode, to be entered inside of `fake_tensors`: calls `run` for every operator that touches data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators: dict[Any, Operator] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operator = self._operators.get(function)
        if operator is None:
            if function.namespace == "prim":  # asks for a device or the like, and is no operator of the dispatcher
                return function(*args, **kwargs)
            operator = self._operators[function] = Operator(function)
        if operator.view:
            return function(*args, **kwargs)
        if operator.composite:
            with self:
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self.run(operator, function, args, kwargs)

    @abstractmethod
    def run(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs `function` and returns its result."""


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Until the end of the block tensors have no memory.

    Raises:
        FakeError: a result depends on data, which there is none of.
    """
    # Module.to() gives new data to a real parameter, but swaps a fake one, which fails when PyTorch itself keeps a
    # weak reference to it. So fake parameters get new data here too.
    with replaced("torch.utils", "swap_tensors", _give_data), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise FakeError(f"{error.func} depends on the data, which a fake tensor does not have") from error
        except UnsupportedFakeTensorException as error:
            raise FakeError(f"PyTorch cannot fake this: {error}") from error


def _give_data(parameter: torch.Tensor, applied: torch.Tensor) -> None:
    parameter.data = applied.data


def iteration(make: Make, batch: int, arguments: dict[str, Any]) -> Callable[[], Any]:
    """What runs one iteration of the program that `make` builds. Raises FakeError if it makes nothing of the kind."""
    step = make(batch, **arguments)
    if not callable(step):
        raise FakeError(f"make({batch}) must return a function that runs one iteration, not {step!r}")
    return step


class FakeRun(OperatorMode):  # type: ignore[no-untyped-call]
    """Tells `recorder` what runs.

    Numbers that a program reads from fake tensors (`item()`) are 1, unless they follow from constants.
    """

    def __init__(self, recorder: SequenceRecorder, clock: Roofline | None, slice_bytes: int = SLICE_BYTES) -> None:
        super().__init__()
        self.recorder, self.clock, self.slice_bytes = recorder, clock, slice_bytes
        self._silent = False  # what runs is no function
        self._storages: dict[int, tuple[Storage, Any]] = {}  # by identity, with a weak reference that notices its end

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo leaves programs alone that run in a mode of somebody else's."""
        return True

    def allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that a compiled graph allocates, which it does in no operator."""
        self._silent = True
        try:
            tensor = torch.empty_strided(size, stride, dtype=dtype)
        finally:
            self._silent = False
        self._storage(tensor, self.recorder.allocate_outside)
        return tensor

    def kernel(self, name: str, tensors: Sequence[torch.Tensor], first: int, end: int) -> None:
        """A kernel that a compiled graph would call; it only reads the tensors from `first` to before `end`."""
        self.recorder.begin_function(name)
        for index, tensor in enumerate(tensors):
            storage = self._storage(tensor, self.recorder.known)
            if storage is not None:
                self.recorder.use(storage, READ if first <= index < end else READ | WRITE)
        self.recorder.end_function(0.0 if self.clock is None else self.clock.kernel_seconds(tensors))

    def run(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        if self._silent:
            return function(*args, **kwargs)
        if operator.whole_list:
            return self._run_in_slices(function, operator, args, kwargs)
        return self._run(function, operator, args, kwargs)

    def _run(self, function: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        recorder = self.recorder
        recorder.begin_function(operator.name)
        given = dict(zip(operator.order, args)) | kwargs
        for name in operator.order:
            for tensor in tensors_in([given.get(name)]):
                storage = self._storage(tensor, recorder.known)
                if storage is not None:
                    recorder.use(storage, operator.access[name])
        try:
            result = function(*args, **kwargs)
        except DataDependentOutputException:
            if operator.name != "aten::_local_scalar_dense":
                raise
            result = 1.0 if args[0].is_floating_point() else 1
        for tensor in tensors_in([result]):
            self._storage(tensor, recorder.allocate)
        seconds = 0.0 if self.clock is None else self.clock.seconds(operator.name, function, args, kwargs, result)
        recorder.end_function(seconds)
        return result

    def _storage(self, tensor: torch.Tensor, announce: Callable[[Storage], None]) -> Storage | None:
        """The storage of a tensor, passed to `announce` when it is first seen; None if the tensor has no storage."""
        if tensor.layout != torch.strided:
            return None
        untyped = tensor.untyped_storage()
        key = untyped._cdata
        entry = self._storages.get(key)
        if entry is None:
            storage = Storage(untyped.nbytes())

            def died(_reference: Any) -> None:
                del self._storages[key]
                self.recorder.free(storage)

            entry = self._storages[key] = (storage, weakref.ref(untyped, died))
            announce(storage)
        return entry[0]

    def _run_in_slices(self, function: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Runs an operator in slices, as `run_in_slices` in operators.h does: elements of the lists are independent."""
        sizes = _element_bytes([*args, *kwargs.values()])
        if len(sizes) < 2 or sum(sizes) <= self.slice_bytes:
            return self._run(function, operator, args, kwargs)
        results: list[torch.Tensor] = []
        begin = 0
        while begin < len(sizes):
            end, total = begin, 0
            while end < len(sizes) and (end == begin or total + sizes[end] <= self.slice_bytes):
                total += sizes[end]
                end += 1
            part = slice(begin, end)
            cut_args = [_cut(value, part, len(sizes)) for value in args]
            if operator.slice_last_tensor and isinstance(args[-1], torch.Tensor):
                cut_args[-1] = args[-1].narrow(0, begin, end - begin)
            cut_kwargs = {name: _cut(value, part, len(sizes)) for name, value in kwargs.items()}
            result = self._run(function, operator, tuple(cut_args), cut_kwargs)
            if operator.returns:
                results += result
            begin = end
        return results if operator.returns else None


def _element_bytes(values: list[Any]) -> list[int]:
    """For each place, the bytes of the elements that all lists have there; empty if the lists cannot be cut."""
    sizes: list[int] = []
    for value in values:
        if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], torch.Tensor):
            continue
        if not sizes:
            sizes = [0] * len(value)
        if len(value) != len(sizes):
            return []
        for index, tensor in enumerate(value):
            sizes[index] += tensor.nbytes
    return sizes


def _cut(value: Any, part: slice, whole: int) -> Any:
    return list(value[part]) if isinstance(value, (list, tuple)) and len(value) == whole else value
