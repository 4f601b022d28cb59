"""What NumPy's device and the other libraries' allocators share: a session, and functions that declare their arrays."""

from __future__ import annotations

import functools
import inspect
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ooc.prometheus.exporting import export
from ooc_alloc import READ, WRITE, OocError
from swapd.config import Config
from swapd.session import CudaDevice, Session

_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="Managed")


class Declaration:
    """A plain function, what it does with which parameter, and which parameter is its stream."""

    def __init__(
        self,
        function: Callable[..., Any],
        reads: Iterable[str],
        writes: Iterable[str],
        name: str | None,
        stream: str | None = None,
    ) -> None:
        self.function = function
        self.name: str = name if name is not None else getattr(function, "__name__", "function")
        self.signature = inspect.signature(function)
        self.access = {parameter: READ for parameter in _names(reads)}
        self.access |= {parameter: READ | WRITE for parameter in _names(writes)}
        self.stream = stream
        for check in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
            if check(function):
                raise TypeError(f"the body of {self.name} runs after it has returned: it cannot be a device's function")
        if stream is not None and stream not in self.signature.parameters:
            raise ValueError(f"{self.name} names {stream!r} as its stream, which is none of its parameters")
        for parameter in self.access:
            found = self.signature.parameters.get(parameter)
            if found is None or found.kind is found.VAR_KEYWORD:
                known = ", ".join(self.signature.parameters) or "none"
                raise ValueError(f"{self.name} declares {parameter!r}, which is none of its parameters ({known})")

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """What a call gives to which parameter, defaults included. Raises TypeError."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound


def _names(names: Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else tuple(names)


def items_of(value: Any) -> Iterator[Any]:
    """The value, or what is in its lists and tuples."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from items_of(item)
    else:
        yield value


class Managed:
    """Memory within a budget, from when it is made until `close` or the end of a `with` block."""

    _what = "the allocator"  # in errors

    def __init__(self, config: Config, device: CudaDevice | None = None) -> None:
        self._session = Session(config, device)
        self._core = self._session.core
        self._lock = threading.RLock()  # re-entrant: a finalizer may run in a thread that holds the lock
        self._session.started()
        export(self._session)

    def function(
        self, *, reads: Iterable[str] = (), writes: Iterable[str] = (), name: str | None = None
    ) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
        """Decorator: a function that uses the arrays that it is given as the named parameters.

        While it runs, these arrays are on the device. The parameters take arrays, or lists and tuples of them.

        Args:
            reads: names of the parameters whose arrays it reads.
            writes: names of those that it writes, or reads and writes.
            name: what it is called in traces and errors; its own name if not given.

        Raises:
            ValueError: a name is no parameter.
            TypeError: it is a generator or a coroutine, whose body runs after it has returned.
        """
        return lambda plain: self._declared(plain, Declaration(plain, reads, writes, name))

    def _declared(self, plain: Callable[..., _Result], declaration: Declaration) -> Callable[..., _Result]:
        @functools.wraps(plain)
        def run(*args: Any, **kwargs: Any) -> _Result:
            result: _Result = self.call(declaration, args, kwargs)
            return result

        return run

    @abstractmethod
    def call(self, declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a declared function. What it raises stands at each kind of memory."""

    def step(self) -> None:
        """Marks the end of an iteration. A plan is made for its functions if they come again in the same order."""
        self._check_open()
        self._session.boundary()

    def summary(self) -> dict[str, Any]:
        """The figures so far, with the keys of `swapd/summary.py`. Raises OocError once closed."""
        self._check_open()
        return self._session.summary()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the program is ending."""
        return self._session.closed

    @abstractmethod
    def close(self) -> None:
        """Writes the summary and stops the daemon."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise OocError(f"{self._what} is closed")
