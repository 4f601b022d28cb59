"""Runs a program's statements one by one and says, after each, what every bit is.

The same code runs a program in plain memory while it is drawn, and out-of-core in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from tests.fuzz import prelude
from tests.stress.digests import digest, error_text

OUT_OF_MEMORY = "OutOfMemoryError"


@dataclass
class Step:
    """What one statement did: the error it raised, and what each variable of it was then."""

    error: str = ""
    digests: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """How a program is run, in plain memory as well."""

    seed: int = 0
    threads: int = 1
    deterministic: bool = False
    look_at_all: bool = False  # after each statement at every variable, not only at those that it names


def fill_fresh_memory(byte: int) -> None:
    """Plain memory that is allocated from now on begins as this byte (glibc's M_PERTURB), so that its use shows."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: nothing comes as zeros from the system
    libc.mallopt(-6, byte)


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """At the end of the block, those that `namespace` changes are as they were."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def namespace(way: Way) -> dict[str, Any]:
    """A fresh one, with every generator and mode of PyTorch's as the program expects it."""
    torch.set_num_threads(way.threads)
    torch.use_deterministic_algorithms(way.deterministic, warn_only=True)
    torch.manual_seed(way.seed)
    numpy.random.seed(way.seed)
    return {name: getattr(prelude, name) for name in prelude.__all__}


def execute(statement: str, space: dict[str, Any], way: Way) -> Step:
    """Runs one statement and looks at what it left."""
    step = Step()
    known, operands = _variables(space), _named(statement, space)
    storages = {_storage(space[name]) for name in operands}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(statement, "<program>", "exec"), space)
    except Exception as error:
        step.error = error_text(error)
        if type(error).__name__ == OUT_OF_MEMORY:
            # What else there is must be as it was; the operands may have been written in part.
            untouched = [name for name in known if name in space and _storage(space[name]) not in storages]
            step.error = f"{OUT_OF_MEMORY}: {error}"
            for name in untouched:
                with contextlib.suppress(torch.OutOfMemoryError):  # beside what is pinned there may be no room for it
                    step.digests |= look([name], space)
            return step
    try:
        step.digests = look(_variables(space) if way.look_at_all else _named(statement, space), space)
    except torch.OutOfMemoryError as error:
        step.error = f"{OUT_OF_MEMORY}: {error}"
    return step


def last_look(space: dict[str, Any]) -> Step:
    """Every variable, after the last statement."""
    return execute("pass", space, Way(look_at_all=True))


def look(names: list[str], space: dict[str, Any]) -> dict[str, str]:
    """The digests of variables, copied by ordinary operators into plain memory; generators are left as they were."""
    with _plain():  # after an error there may be no room for it
        state = torch.get_rng_state()
    try:
        return {name: _digest(space[name]) for name in names}
    finally:
        torch.set_rng_state(state)


def _variables(space: dict[str, Any]) -> list[str]:
    return [name for name in space if re.fullmatch(r"v\d+", name)]


def _named(statement: str, space: dict[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys(re.findall(r"\bv\d+\b", statement)) if name in space]


def _storage(value: Any) -> int | None:
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        return int(value.untyped_storage()._cdata)
    return None


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    if prelude._session() is None:
        yield
        return
    from ooc.pytorch.large_storages import plain_memory

    with plain_memory():
        yield


def _digest(value: Any) -> str:
    if isinstance(value, torch.nn.Module):
        return ",".join(f"{name}:{_digest(tensor)}" for name, tensor in value.state_dict().items())
    if isinstance(value, torch.UntypedStorage):
        return _digest(torch.empty(0, dtype=torch.uint8).set_(value))
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{','.join(map(_digest, value))}]"
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return digest(value)
    head = f"{type(value).__name__}{value.dtype}{tuple(value.shape)}{value.stride()}{value.is_conj()}"
    try:
        head += str(value.requires_grad)
        grad = _digest(value.grad) if value.is_leaf and value.grad is not None else ""
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a view whose history was lost says so when it is asked
        grad = error_text(error)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        source = value.detach().as_subclass(torch.Tensor)
        with _plain():
            target = torch.empty(source.shape, dtype=source.dtype)
        target.copy_(source)
        with _plain():
            data = target.view(-1).view(torch.uint8).numpy()
            return f"{head}:{hashlib.blake2b(data, digest_size=8).hexdigest()}{grad}"
