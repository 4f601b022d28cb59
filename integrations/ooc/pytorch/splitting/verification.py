"""Whether a division changes bits: it and the operator in one piece run on the same random and special arguments.

On the CPU both run in plain memory. On a GPU the division runs as it will, and the whole uses host memory in place
where it does not fit; arguments and results are made and compared on the CPU, whatever the budget is. A thread does
this while the program goes on.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import Call, CannotSplit, Given, Sample, Split
from ooc.pytorch.splitting.geometry import extent, storage_line
from ooc.pytorch.splitting.memory import CPU, Memory

log = logging.getLogger("ooc.pytorch")

Job = Callable[[], object]
_SEED = 20181213
_ENOUGH_ELEMENTS, _MOST_TURNS = 4096, 16  # so many numbers are compared, from at most so many results
_COMPARED_AT_ONCE = 1 << 22  # elements
_ALIGNMENT = 64  # bytes to which every storage is aligned; kernels choose by the offset from it
# Kinds of special data: one element in 4096 is special; one in 4 is; all are 0, -0 or -1; all are 0, -0 or 1; all NaN.
SPARSE, DENSE, NOT_POSITIVE, NOT_NEGATIVE, NO_NUMBERS = "sparse", "dense", "not positive", "not negative", "no numbers"
KINDS = (SPARSE, DENSE, NOT_POSITIVE, NOT_NEGATIVE)
# Types whose numbers PyTorch draws; for others they are converted.
_DRAWN = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}  # by bytes of an element


@dataclass(frozen=True)
class Specials:
    """The special data that a division is tried on, beside ordinary data.

    `kinds`: of `KINDS`, `NO_NUMBERS`. `finite`: names of arguments without special numbers: the division checks them.
    """

    kinds: tuple[str, ...] = KINDS
    finite: frozenset[str] = frozenset()


ALL_SPECIALS = Specials()
# For cuts of lines: of a large result a single element, at the end of a thread's run, may be computed in another way.
OF_LINES = Specials((*KINDS, NO_NUMBERS))


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """`value` with `change` applied to every tensor in it, also in lists, tuples and dictionaries."""
    return tree_map_only(Tensor, change, value)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def random_like(tensor: Tensor, generator: torch.Generator, copy: Callable[[Tensor, Tensor], Any]) -> Tensor:
    """A tensor in plain memory with the same sizes and strides, and the same offset from an aligned address.

    Floating point numbers are drawn from a normal distribution; others are copied by `copy(target, source)`, as they
    may be indexes or labels.
    """
    offset = tensor.storage_offset() * tensor.element_size() % _ALIGNMENT // tensor.element_size()
    length = extent(tensor.shape, tensor.stride())
    memory = torch.empty(offset + length, dtype=tensor.dtype)
    made = memory.as_strided(tensor.shape, tensor.stride(), offset)
    if tensor.is_floating_point() or tensor.is_complex():
        if tensor.dtype in _DRAWN:
            memory.normal_(generator=generator)
        else:
            memory.copy_(torch.randn(memory.shape, generator=generator))
    elif length:
        memory.zero_()
        if not any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride())):
            copy(made, tensor)
    return made


def put_special(tensor: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    """Writes special numbers of a kind (`KINDS`) to random places of a floating point tensor; returns it.

    These are NaN of several payloads and both signs, infinities, zeros of both signs, subnormal numbers, equal large
    ones. With them results may depend on the order of comparisons, and on what is computed in a vector register.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return tensor
    line = tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,))
    line = torch.view_as_real(line.resolve_conj()).view(-1) if tensor.is_complex() else line
    if line.element_size() == 1:
        return tensor  # floats of one byte get no special numbers
    numbers = _special_numbers(line.dtype)
    if kind not in (SPARSE, DENSE):
        few = torch.tensor([0.0, -0.0, 1.0 if kind == NOT_NEGATIVE else -1.0], dtype=line.dtype)
        numbers = numbers[numbers.isnan()] if kind == NO_NUMBERS else few
        for start in range(0, line.numel(), _COMPARED_AT_ONCE):
            piece = line[start : start + _COMPARED_AT_ONCE]
            piece.copy_(numbers[torch.randint(len(numbers), piece.shape, generator=generator)])
        return tensor
    count = max(line.numel() // (4096 if kind == SPARSE else 4), 1)
    places = torch.randint(line.numel(), (count,), generator=generator)
    bits = _BITS[line.element_size()]
    line.view(bits)[places] = numbers.view(bits)[torch.randint(len(numbers), (count,), generator=generator)]
    return tensor


def _special_numbers(dtype: torch.dtype) -> Tensor:
    large = torch.tensor([math.nan] * 4 + [math.inf, -math.inf, 0.0, -0.0, 4.0, 4.0], dtype=dtype)
    bits = large.view(_BITS[large.element_size()])
    sign = torch.iinfo(bits.dtype).min
    bits[1] += 5
    bits[2:4] += torch.tensor([9, 3], dtype=bits.dtype)
    bits[2:4] ^= sign
    subnormal = torch.tensor([1, sign + 7], dtype=bits.dtype)
    signalling = bits[4:5] + 1
    return torch.cat([bits, subnormal, signalling]).view(dtype)


def duplicate(value: Any) -> Any:
    """A copy of every tensor in a value, with the same strides and offset."""
    return map_tensors(value, lambda t: storage_line(t).clone().as_strided(t.shape, t.stride(), t.storage_offset()))


@dataclass(frozen=True)
class Difference:
    """How two results differ; both numbers are 0 where the results are identical, bit by bit."""

    identical: bool
    largest: float
    relative: float  # to the largest absolute value of the first


IDENTICAL = Difference(True, 0.0, 0.0)
INCOMPARABLE = Difference(False, math.inf, math.inf)
CHANGES_SPECIALS = Difference(False, 0.0, 0.0)  # ordinary numbers are the same


def difference(expected: Any, found: Any) -> Difference:
    """Compares two results: tensors of the same sizes, strides and types, or numbers, or both in lists and the like."""
    (expected_leaves, expected_shape), (found_leaves, found_shape) = tree_flatten(expected), tree_flatten(found)
    if expected_shape != found_shape:
        return INCOMPARABLE
    each = [IDENTICAL, *map(_leaf_difference, expected_leaves, found_leaves)]
    return Difference(
        all(one.identical for one in each), max(one.largest for one in each), max(one.relative for one in each)
    )


def _leaf_difference(expected: Any, found: Any) -> Difference:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _tensor_difference(expected, found)
    return IDENTICAL if type(expected) is type(found) and expected == found else INCOMPARABLE


def _tensor_difference(expected: Tensor, found: Tensor) -> Difference:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return INCOMPARABLE
    strides = zip(expected.shape, expected.stride(), found.stride())
    if expected.numel() and any(one != other for size, one, other in strides if size > 1):
        return INCOMPARABLE
    identical, largest, scale, bits = True, 0.0, 0.0, _BITS[expected.element_size()]
    one, other = expected.detach().contiguous().flatten(), found.detach().contiguous().flatten()
    for start in range(0, one.numel(), _COMPARED_AT_ONCE):
        a, b = one[start : start + _COMPARED_AT_ONCE], other[start : start + _COMPARED_AT_ONCE]
        scale = max(scale, _largest(a))
        if not torch.equal(a.view(bits), b.view(bits)):
            identical, largest = False, max(largest, _distance(a, b))
    return Difference(identical, largest, largest / scale if scale > 0 else math.inf if largest > 0 else 0.0)


def _wide(a: Tensor) -> Tensor:
    return a.to(torch.complex128 if a.is_complex() else torch.float64)


def _largest(a: Tensor) -> float:
    """The largest absolute value that is finite."""
    return float(_wide(a).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _distance(a: Tensor, b: Tensor) -> float:
    one, other = _wide(a), _wide(b)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other).abs().masked_fill(same, 0.0)  # signs of zeros and kinds of NaN are no distance
    return math.inf if bool(apart.isnan().any()) else float(apart.max())


# ---- trials ---------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """Compares divisions with the operator in one piece, of which arguments and result are made when first needed.

    A few numbers may agree by luck, so small results are compared for several sets of arguments.
    """

    call: Call
    memory: Memory
    whole: Callable[..., Any]
    sample: Sample | None
    specials: Specials
    copy: Callable[[Tensor, Tensor], object]  # (target, source) of tensors whose numbers count

    def compare(self, candidate: Split) -> Difference:
        with self.memory.trial():
            try:
                elements = sum(tensor.numel() for tensor in tensors_in(self._first[1][0]))
                turns = min(max(-(-_ENOUGH_ELEMENTS // max(elements, 1)), 1), _MOST_TURNS)
                for turn in range(turns):
                    found = self._compare_once(candidate, turn)
                    if not found.identical:
                        return found
                return IDENTICAL if self._same_specials(candidate, turns) else CHANGES_SPECIALS
            except CannotSplit:
                return INCOMPARABLE
            except (MemoryError, RuntimeError) as error:
                if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
                    raise
                raise CannotSplit(f"no host memory to find out whether parts give the same bits: {error}") from None

    @cached_property
    def _first(self) -> tuple[Given, Any]:
        return self._run_whole(0, None)

    def _same_specials(self, candidate: Split, turns: int) -> bool:
        kinds = self.specials.kinds
        if not kinds or not any(t.is_floating_point() or t.is_complex() for t in tensors_in(self._first)):
            return True
        numbers = range(max(turns, len(kinds)))
        return all(self._compare_once(candidate, n, kinds[n % len(kinds)]).identical for n in numbers)

    def _compare_once(self, candidate: Split, turn: int, special: str | None = None) -> Difference:
        given, expected = self._run_whole(turn, special) if turn > 0 or special is not None else self._first
        return difference(expected, self._outcome(candidate.run, given))

    def _run_whole(self, turn: int, special: str | None) -> tuple[Given, Any]:
        generator = torch.Generator().manual_seed(_SEED + turn)
        call = (self.call.arguments, self.call.keywords)
        given = map_tensors(call, lambda t: random_like(t, generator, self.copy))
        if self.sample is not None:
            given = self.sample(given)
        if special is not None:
            given = self._with_specials(given, special, generator)
        with self.memory.undivided():
            return given, self._outcome(self.whole, given)

    def _outcome(self, run: Callable[..., Any], given: Given) -> Any:
        """What a way to run the call returns, and its arguments afterwards, in plain memory."""
        memory = self.memory
        if not memory.on_gpu:
            arguments, keywords = duplicate(given)
            return run(*arguments, **keywords), arguments, keywords
        call = tensors_in((self.call.arguments, self.call.keywords))
        # Single numbers of the call may be the CPU's.
        devices = iter([t.device for t in call] if self.sample is None else [memory.device] * len(tensors_in(given)))
        arguments, keywords = map_tensors(given, lambda t: memory.copied(t, next(devices)))
        left = (run(*arguments, **keywords), arguments, keywords)
        return map_tensors(left, lambda t: memory.copied(t, CPU))

    def _with_specials(self, given: Given, kind: str, generator: torch.Generator) -> Given:
        overload: Any = registry.overload_of(self.call.operator)

        def changed(name: str, value: Any) -> Any:
            if name in self.specials.finite:
                return value
            return map_tensors(value, lambda tensor: put_special(tensor, kind, generator))

        arguments = tuple(changed(a.name, value) for a, value in zip(overload._schema.arguments, given[0]))
        return arguments, {name: changed(name, value) for name, value in given[1].items()}


class Verifier:
    """Does jobs in turn, beside the program. Any thread may ask; a child of a fork has a thread of its own."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._begin()

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, Job] | None] = queue.SimpleQueue()
        self._asked: set[Any] = set()
        self._failed: set[Any] = set()
        self._thread: threading.Thread | None = None

    def ask(self, key: Any, job: Job) -> bool:
        """Has a job done, unless it was asked for before. Returns False if it failed: then the caller has to do it."""
        if self._process != os.getpid():  # a child of a fork: another thread of the parent may have held the lock
            self._lock, self._process = threading.Lock(), os.getpid()
            self._begin()
        with self._lock:
            if key in self._failed:
                return False
            if key not in self._asked:
                self._asked.add(key)
                self._jobs.put((key, job))
            if self._thread is None:
                given = (self._jobs, self._failed, torch.get_num_threads())
                self._thread = threading.Thread(target=_work, args=given, name="ooc-verifier", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            return True

    def wait(self) -> None:
        """Waits until the jobs that were asked for are done."""
        if self._process != os.getpid():
            return
        done = threading.Event()
        with self._lock:
            if self._thread is None:
                return
            self._jobs.put((None, done.set))
        done.wait()

    def close(self) -> None:
        """Ends the thread, after the job that it is at."""
        if self._process != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            waiting = self._jobs
            self._begin()
        while not waiting.empty():
            waiting.get()
        waiting.put(None)
        thread.join()
        atexit.unregister(self.close)


def _work(jobs: queue.SimpleQueue[tuple[Any, Job] | None], failed: set[Any], threads: int) -> None:
    torch.set_num_threads(threads)  # results may depend on it
    while (waiting := jobs.get()) is not None:
        key, job = waiting
        try:
            job()
        except Exception:
            log.debug("a division could not be compared beside the program", exc_info=True)
            failed.add(key)
