"""Accesses that bypass the dispatcher: the variable is pinned for as long as its memory can be reached.

the memory can be reached for                   the variable is pinned
a call (tolist, storage items, file writes)     during the call; so are arguments that composite operators read
files, copies of storages that do not fit       not at all: large_storages.py copies them in parts
a save by safetensors                           not at all: it is given copies
an array's life (.numpy(), np.asarray)          until the array is gone
an unknown time (data_ptr, DLPack,              until the variable is freed
__cuda_array_interface__, which asks data_ptr)
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.dlpack
from numpy import ndarray

from ooc.pytorch import large_storages
from ooc.pytorch.patches import Patches, look_like
from ooc_alloc import READ, WRITE, Core, OutOfMemory

# Callers of data_ptr() that only compare addresses: modules, and functions of modules.
_COMPARE = (
    "torch.serialization.",
    "torch.multiprocessing.reductions.",
    "torch.nn.modules.rnn.",
    "torch.cuda._sanitizer.",
    *("torch._functorch.", "torch._dynamo.", "torch._inductor.", "torch._subclasses.", "torch._prims_common."),
    *("torch.fx.", "torch.testing."),
    "transformers.pytorch_utils.id_tensor_storage.",
    "transformers.modeling_utils.",
    *("transformers.trainer.", "huggingface_hub.serialization."),
    *("safetensors.torch.storage_ptr.", "safetensors.torch._end_ptr.", "safetensors.torch._is_complete."),
    "safetensors.torch._filter_shared_not_shared.",
    *("accelerate.utils.modeling.id_tensor_storage.", "accelerate.hooks.", "accelerate.big_modeling."),
)
_READS_TO_SAVE = ("_to_ndarray", "_tobytes")  # as the releases of safetensors call it

# Composite operators that are given lengths or split points as tensors, and read these without an operator.
_READ_INTEGERS = ((torch, "ctc_loss"), (torch, "tensor_split"), (torch.Tensor, "tensor_split"))
# Operators that are declared as composite although they compute something themselves.
_COMPUTE = [(torch, name) for name in dir(torch) if name.startswith("fbgemm_")] + [(torch, "choose_qparams_optimized")]
_COMPUTE += [(module, "_pad_packed_sequence") for module in (torch, torch._VF)]
_TO_DLPACK = (
    (torch._C, "_to_dlpack"),
    (torch._C, "_to_dlpack_versioned"),
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
)


def address_of(thing: Any) -> int:
    """Address of a tensor's or storage's memory; 0 if it has none of its own (sparse, meta, fake)."""
    try:
        if isinstance(thing, torch.Tensor):
            thing = thing.untyped_storage()
        elif isinstance(thing, torch.TypedStorage):
            thing = thing._untyped_storage
        return int(_plain_data_ptr(thing))
    except (RuntimeError, NotImplementedError):
        return 0


_plain_data_ptr: Callable[[Any], int] = torch.UntypedStorage.data_ptr


def _pin_address(core: Core, address: int) -> int:
    try:
        # Who reaches memory of a CUDA device works on the current stream, or after it.
        on_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return core.pin(address, READ | WRITE, torch.cuda.current_stream().cuda_stream if on_device else None)
    except OutOfMemory as error:
        raise torch.OutOfMemoryError(
            f"{error} What reaches a tensor's memory without PyTorch (NumPy, pickle, data_ptr and the like) needs all "
            "of it on the device: give it copies of parts, such as x[a:b].clone()."
        ) from None


@contextmanager
def pinned(core: Core, thing: Any) -> Iterator[None]:
    """While inside, `thing` is on the device and counts as written."""
    token = _pin_address(core, address_of(thing))
    try:
        yield
    finally:
        core.unpin(token, READ | WRITE)


def pin_for_life(core: Core, thing: Any) -> None:
    """Keeps `thing` on the device until it is freed, and never takes it for clean."""
    _pin_address(core, address_of(thing))


def _who_asks() -> str:
    """Module and function, each with a dot behind it, that asked for an address; empty if nobody's Python did."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch.storage":
        frame = frame.f_back  # a TypedStorage asks its UntypedStorage, so its own caller counts
    return f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}." if frame is not None else ""


def _only_compares(caller: str) -> bool:
    if caller.startswith("triton.") and torch.ops.ooc.in_scope():
        return True  # launches a kernel of a compiled graph, whose memory is pinned until the graph ends
    return caller.startswith(_COMPARE)


def install(patches: Patches, core: Core, copies: Path | None = None) -> None:
    """Patches the Python functions that reach raw memory; `copies` is the folder for those that memory may not hold."""
    tensor, storage = torch.Tensor, torch.UntypedStorage
    saves: list[Any] = []  # the module that saves as safetensors, once it has asked for an address

    def during_call(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with pinned(core, self):
                return original(self, *args, **kwargs)

        return call

    def for_life(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(data: Any, *args: Any, **kwargs: Any) -> Any:
            pin_for_life(core, data)
            return original(data, *args, **kwargs)

        return call

    def address(original: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(original)
        def data_ptr(self: Any) -> int:
            result, caller = original(self), _who_asks()
            if caller.startswith("safetensors.torch.") and not saves:  # before it saves it compares addresses
                saves.append(sys.modules["safetensors.torch"])
                for name in _READS_TO_SAVE:
                    patches.replace(saves[0], name, functools.partial(large_storages.saved, copies))
            if result and not _only_compares(caller):
                pin_for_life(core, self)
            return result

        return data_ptr

    patches.replace(tensor, "tolist", lambda original: large_storages.tolist(original, during_call(original)))
    patches.replace(tensor, "numpy", functools.partial(_numpy, core))
    patches.hide(tensor, "__dlpack_c_exchange_api__")  # C functions; without them callers take __dlpack__
    patches.replace(tensor, "data_ptr", address)
    patches.replace(tensor, "const_data_ptr", address)
    patches.replace(storage, "data_ptr", address)
    # Elements of a storage are read and written by operators.
    for name in ("resize_", "byteswap", "_write_file", "_set_from_file", "_share_fd_cpu_", "_share_filename_cpu_"):
        patches.replace(storage, name, during_call)
    for owner, name in _READ_INTEGERS:
        patches.replace(owner, name, functools.partial(_reads_integers, core))
    for owner, name in _COMPUTE:
        patches.replace(owner, name, _as_function)
    for owner, name in _TO_DLPACK:
        patches.replace(owner, name, for_life)
    patches.replace(torch._C, "PyTorchFileWriter", functools.partial(_file_writer, core))
    patches.replace(torch._C, "PyTorchFileReader", large_storages.reader)
    patches.replace(storage, "clone", large_storages.clone)


def _numpy(core: Core, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        array = original(self, force=force)
        if not isinstance(array, ndarray):  # a subclass's own result; it calls this for the tensors inside
            return array
        # The array's own address: its memory may not be that of `self`, but of a forced copy or a part of a subclass.
        token = _pin_address(core, array.__array_interface__["data"][0])
        # The array lives as long as its views, because it is their base: NumPy skips only bases that are arrays, and
        # this array's own base is a tensor.
        weakref.finalize(array, core.unpin, token, READ | WRITE).atexit = False
        return array

    return numpy


def _tensors(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)]


def _reads_integers(core: Core, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph has operators for it
            return original(*args, **kwargs)
        with ExitStack() as stack:
            for tensor in _tensors(args, kwargs):
                if not (tensor.is_floating_point() or tensor.is_complex()):
                    stack.enter_context(pinned(core, tensor))
            return original(*args, **kwargs)

    return call


def _as_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the whole call one function to the core: its arguments and what it allocates stay until it returns.

    Dynamo cannot trace any of these, so it calls them between two graphs, and ours must not be traced either.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.ops.ooc.in_scope():
            return original(*args, **kwargs)
        opened = torch.ops.ooc.scope_begin(original.__name__, _tensors(args, kwargs), [])
        results: Any = ()
        try:
            results = original(*args, **kwargs)
            return results
        finally:
            if opened:
                torch.ops.ooc.scope_end(_tensors(results if isinstance(results, tuple) else (results,), {}))

    look_like(call, torch.__file__)
    return call


def _file_writer(core: Core, original: Any) -> Any:
    class PyTorchFileWriter(original):  # type: ignore[misc]
        """Pins a storage while torch.save writes it; one that does not fit is written from a copy."""

        def write_record(self, name: str, data: Any, *args: Any) -> Any:
            if isinstance(data, torch.UntypedStorage | torch.TypedStorage | torch.Tensor):
                try:
                    with pinned(core, data):
                        return super().write_record(name, data, *args)
                except torch.OutOfMemoryError:
                    if not isinstance(data, torch.UntypedStorage):
                        raise
                    return super().write_record(name, large_storages.plain_copy(data), *args)
            return super().write_record(name, data, *args)

    return PyTorchFileWriter
