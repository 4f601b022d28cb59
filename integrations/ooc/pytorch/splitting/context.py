"""What a handler may ask: how much a part may take, memory for a large result, and which division is exact.

def linear(context, input, weight, bias=None):
    by_outputs = Split("output features", 4, lambda input, weight, bias=None: ...)
    chosen = context.choose("", [by_outputs], torch.ops.aten.linear.default)
    return chosen.run(input, weight, bias)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import geometry, registry
from ooc.pytorch.splitting.tally import SplitRecord, Tally
from ooc.pytorch.splitting.verification import (
    CHANGES_SPECIALS,
    INCOMPARABLE,
    KINDS,
    Difference,
    difference,
    duplicate,
    map_tensors,
    put_special,
    random_like,
    storage_line,
    tensors_in,
)
from swapd.splitting.store import Key, Store, Verdict

_CPU = torch.device("cpu")
_SEED = 20181213  # of the verification's random numbers
_ENOUGH_ELEMENTS, _MOST_TURNS = 4096, 16  # so many numbers are compared, from at most so many results
_MOST_ROUNDING = 0.02  # of the largest value; a few units in the last place of bfloat16
Given = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keywords
Sample = Callable[[torch.Generator], Given]


class CannotSplit(Exception):
    """No division may be taken. `inexact`: there is one, but it changes bits; `cause`: the operator's own error."""

    def __init__(self, reason: str, inexact: bool = False, cause: Exception | None = None) -> None:
        super().__init__(reason)
        self.inexact = inexact
        self.cause = cause


@contextmanager
def its_own_errors() -> Iterator[None]:
    """Around an operator that runs on "meta": turns its error into a CannotSplit that has the error as its cause."""
    try:
        yield
    except Exception as error:
        raise CannotSplit(str(error), cause=error) from None


@dataclass(frozen=True)
class Split:
    """One way to run a call in parts. `how` names all that the rounding depends on, except the number of parts."""

    how: str
    parts: int
    run: Callable[..., Any]  # called as the handler is, without the context; gives the operator's result


@dataclass(frozen=True)
class Specials:
    """The special data that a division is tried on, beside ordinary data.

    `kinds`: some of `verification.KINDS`. `finite`: names of arguments that get no special numbers: the division
    itself checks them.
    """

    kinds: tuple[str, ...] = KINDS
    finite: frozenset[str] = frozenset()


ALL_SPECIALS = Specials()


_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.bool: "bool",
}  # fmt: skip


def _named_shape(value: Any) -> str:
    """A value as text: a tensor's size, type, and strides where unusual; or what is no tensor."""
    if isinstance(value, Tensor):
        kind = _TYPES.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        size = "x".join(map(str, value.shape))
        return f"{kind}[{size}]" + ("" if value.is_contiguous() else "/" + "x".join(map(str, value.stride())))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_named_shape, value)) + "]"
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, float) and value * 4 != int(value * 4 if abs(value) < 1e6 else 0):
        return "*"  # a learning rate, say, which may change with each step; operators treat 2, 0.5 or -1 apart
    if isinstance(value, torch.UntypedStorage):
        return f"storage of {value.nbytes()} bytes"
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Call:
    """One call of an operator that does not fit."""

    operator: str  # such as aten::add.Tensor
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def shapes(self) -> str:
        """The arguments as text: tensors' sizes, types, and strides where unusual, and everything that is no tensor."""
        named = [f"{name}={_named_shape(value)}" for name, value in self.keywords.items()]
        return ", ".join([*map(_named_shape, self.arguments), *named])


_thread = threading.local()  # `verifying` while it verifies a division


class Context:
    """What a handler may ask in one call.

    Args:
        call: the operator and its arguments.
        part_bytes: what one part may use at once, for all its operands and results, in whole chunks.
        chunk_bytes: the unit of residency; 1 where there is no core.
        mode: "exact" or "allow".
        verdicts: where verdicts are kept; by default they are those of this call alone.
        tally: where the call is counted.
        device, library: what the verdicts' keys have under these names.
        managed: the device whose memory a core manages (`torch.ops.ooc`), if one does.
    """

    def __init__(
        self,
        call: Call,
        part_bytes: int,
        *,
        chunk_bytes: int = 1,
        mode: str = "exact",
        verdicts: Store | None = None,
        tally: Tally | None = None,
        device: str = "cpu",
        library: str = "",
        managed: torch.device | None = None,
    ) -> None:
        self.call = call
        self.part_bytes = part_bytes
        self.chunk_bytes = chunk_bytes
        self.exact = mode != "allow"
        self.threads = torch.get_num_threads()
        self._verdicts = verdicts if verdicts is not None else Store(None)
        self._tally = tally if tally is not None else Tally()
        self._key = Key(device, library, call.operator, call.shapes)
        self.device = managed or _CPU  # of the operator's large tensors
        self._managed = managed is not None
        self.layer: SplitRecord | None = None  # what `used` noted last

    # ---- memory ----------------------------------------------------------------------------------------------------

    def empty(
        self,
        like: Tensor | None = None,
        *,
        size: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """A large result, not initialised, of which nothing is on the device until it is written in parts.

        `like` (it may be on the device "meta") gives the sizes, strides and type that the other arguments leave out.
        If nothing gives strides, the result is contiguous. `device` is the context's or the CPU; by default the first.
        """
        shape = tuple(size if size is not None else like.shape if like is not None else ())
        kind = dtype if dtype is not None else like.dtype if like is not None else torch.get_default_dtype()
        if stride is None:
            stride = like.stride() if like is not None and size is None else geometry.contiguous(shape)
        here = device is None or device.type == self.device.type
        if self._managed and here and (not self.verifying or self.on_gpu):
            made: Tensor = torch.ops.ooc.empty_absent(list(shape), list(stride), kind)
            return made
        return torch.empty_strided(shape, tuple(stride), dtype=kind, device=_CPU)

    def move(self, target: Tensor, source: Tensor) -> int:
        """Copies `source` to `target`, in as many parts as needed; returns how many. `source` may be broadcast."""
        parts = 0
        for index in geometry.blocks([target, source], self.part_bytes, self.chunk_bytes):
            geometry.narrowed(target, index).copy_(geometry.narrowed(source, index))
            parts += 1
        return parts

    @property
    def on_gpu(self) -> bool:
        """Whether kernels cannot use plain memory."""
        return self.device.type != "cpu"

    # ---- which division --------------------------------------------------------------------------------------------

    @property
    def verifying(self) -> bool:
        """Whether this thread is verifying a division: in plain memory, except on a GPU."""
        return bool(getattr(_thread, "verifying", False))

    def choose(
        self,
        key: str,
        candidates: Sequence[Split],
        whole: Callable[..., Any],
        sample: Sample | None = None,
        specials: Specials = ALL_SPECIALS,
    ) -> Split:
        """Returns the first division whose result is identical, every bit; else, with OOC_SPLIT=allow, the nearest one.

        A verdict that is not known yet is found out: `whole` and the division, called as the handler was, run in plain
        memory on random data of the same shapes, and if their results are identical, on data with special numbers too.
        Arguments that they write are compared as well.

        Args:
            key: what the result depends on beside the operator, its arguments, and `how` and `parts` of a candidate.
            candidates: in the order of preference.
            whole: the operator in one piece.
            sample: makes the arguments to try (with positive variances, say). Without it floating point numbers come
                from a normal distribution, and everything else is as in the call.
            specials: which special numbers are tried.

        Raises:
            CannotSplit: no candidate may be taken.
        """
        if self.verifying:
            return candidates[0]
        overload = registry.overload_of(self.call.operator)
        if self.on_gpu and overload is not None and torch.Tag.nondeterministic_seeded in overload.tags:
            raise CannotSplit("a GPU draws other random numbers in parts")
        trial = _Trial(self, whole, sample, specials)
        best: tuple[Verdict, Split] | None = None
        full = replace(self._key, shapes=f"{self._key.shapes} {key}".rstrip())
        for candidate in candidates:
            verdict = self._verdicts.verdict(full, candidate.how, candidate.parts)
            if verdict is None:
                found = trial.compare(candidate)
                verdict = Verdict(candidate.how, candidate.parts, found.identical, found.largest, found.relative)
                self._verdicts.put_verdict(full, verdict)
            if best is None or verdict.identical or verdict.largest_difference < best[0].largest_difference:
                best = (verdict, candidate)
            if verdict.identical:
                break
        if best is None:
            raise CannotSplit("no division makes its parts small enough")
        verdict, chosen = best
        if not verdict.identical and self.exact:
            largest = verdict.largest_difference
            how = f"by up to {largest:.3g}" if largest else "on special numbers"
            raise CannotSplit(
                f"in parts ({chosen.how}) the result differs from the one in one piece {how}", inexact=True
            )
        if not verdict.largest_relative <= _MOST_ROUNDING:  # so much is not rounding any more
            raise CannotSplit(f"in parts ({chosen.how}) the result differs by {verdict.largest_relative:.3g} of itself")
        self.used(*astuple(verdict))
        return chosen

    def used(self, how: str, parts: int, *apart: Any) -> None:
        """Notes how the call was divided, for the summary; `choose` does so too.

        `apart` is what a `SplitRecord` has next; without it data were only moved.
        A call with 0 parts is not counted: it took no memory, or the operators that it called are counted.
        """
        if not self.verifying:
            self.layer = SplitRecord(self._key.operator, self._key.shapes, how, parts, *apart)

    def inexact(self) -> None:
        """Notes that the chosen division changes bits on some data, whatever was found on other data."""
        if self.layer is not None:
            self.layer.exact = False

    def count(self) -> None:
        """Counts the call, which has succeeded."""
        if self.layer is None:
            self.used("parts", 1)
        assert self.layer is not None
        self._tally.add(self.layer)

    @contextmanager
    def plain(self, plain: bool = True) -> Iterator[None]:
        """While inside, this thread's memory comes from the host, and its operators are no functions; or they are."""
        before = torch.ops.ooc.plain(plain) if self._managed else False
        verifying, _thread.verifying = self.verifying, plain
        try:
            yield
        finally:
            _thread.verifying = verifying
            if self._managed:
                torch.ops.ooc.plain(before)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """While inside, this thread verifies a division: as in `plain`, except that a GPU's operators are functions."""
        if not self.on_gpu:
            with self.plain():
                yield
            return
        verifying, _thread.verifying = self.verifying, True
        try:
            yield
        finally:
            _thread.verifying = verifying

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """While inside, a GPU's operators run in one piece, on host memory where they do not fit."""
        before = torch.ops.ooc.undivided(True) if self.on_gpu else False
        try:
            yield
        finally:
            if self.on_gpu:
                torch.ops.ooc.undivided(before)

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy with the same strides and offset: in plain memory, or managed on the GPU."""
        line = storage_line(tensor)
        if device.type == "cpu":
            target = torch.empty(line.shape, dtype=line.dtype, device=_CPU)
        else:
            target = self.empty(like=line)
        self.move(target, line)
        return target.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """Copies a managed tensor into plain memory, for use inside of `plain`."""
        if not self._managed:
            target.copy_(source)
            return
        with self.plain(False):
            self.move(target, source)


class _Trial:
    """Compares divisions with the operator in one piece, of which arguments and result are made when first needed.

    A few numbers may agree by luck, so small results are compared for several sets of arguments.
    """

    def __init__(self, context: Context, whole: Callable[..., Any], sample: Sample | None, specials: Specials) -> None:
        self._context, self._whole, self._sample, self._specials = context, whole, sample, specials
        self._made: tuple[Given, Any] | None = None  # the first arguments, and the result in one piece

    def compare(self, candidate: Split) -> Difference:
        with self._context.trial():
            try:
                found = self._compare_once(candidate, 0)
                assert self._made is not None
                turns = _turns(self._made[1][0])
                for turn in range(1, turns):
                    if not found.identical:
                        break
                    found = found.worse(self._compare_once(candidate, turn))
                return found if not found.identical or self._same_specials(candidate, turns) else CHANGES_SPECIALS
            except CannotSplit:
                return INCOMPARABLE
            except (MemoryError, RuntimeError) as error:
                if "allocate memory" not in str(error) and not isinstance(error, MemoryError):
                    raise
                raise CannotSplit(f"no host memory to find out whether parts give the same bits: {error}") from None

    def _same_specials(self, candidate: Split, turns: int) -> bool:
        kinds = self._specials.kinds
        if not kinds or not any(t.is_floating_point() or t.is_complex() for t in tensors_in(self._made)):
            return True
        numbers = range(max(turns, len(kinds)))
        return all(self._compare_once(candidate, n, kinds[n % len(kinds)]).identical for n in numbers)

    def _compare_once(self, candidate: Split, turn: int, special: str | None = None) -> Difference:
        if turn > 0 or special is not None:
            given, expected = self._run_whole(turn, special)
        else:
            self._made = self._made or self._run_whole(0, None)
            given, expected = self._made
        return difference(expected, self._outcome(candidate.run, given))

    def _run_whole(self, turn: int, special: str | None) -> tuple[Given, Any]:
        generator = torch.Generator().manual_seed(_SEED + turn)
        call = self._context.call
        if self._sample is not None:
            given = self._sample(generator)
        else:
            copy = self._context.copy_out
            given = map_tensors((call.arguments, call.keywords), lambda t: random_like(t, generator, copy))
        if special is not None:
            given = self._with_specials(given, special, generator)
        return given, self._outcome(self._undivided, given)

    def _undivided(self, *arguments: Any, **keywords: Any) -> Any:
        with self._context.undivided():
            return self._whole(*arguments, **keywords)

    def _outcome(self, run: Callable[..., Any], given: Given) -> Any:
        """What a way to run the call returns, and its arguments afterwards, in plain memory."""
        context = self._context
        if not context.on_gpu:
            arguments, keywords = duplicate(given)
            return run(*arguments, **keywords), arguments, keywords
        devices = iter(self._devices(given))
        arguments, keywords = map_tensors(given, lambda t: context.copied(t, next(devices)))
        left = (run(*arguments, **keywords), arguments, keywords)
        return map_tensors(left, lambda t: context.copied(t, _CPU))

    def _devices(self, given: Given) -> list[torch.device]:
        """Where each argument goes: single numbers of the call may be the CPU's."""
        if self._sample is not None:
            return [self._context.device for _ in tensors_in(given)]
        return [t.device for t in tensors_in((self._context.call.arguments, self._context.call.keywords))]

    def _with_specials(self, given: Given, kind: str, generator: torch.Generator) -> Given:
        overload = registry.overload_of(self._context.call.operator)
        names = [a.name for a in overload._schema.arguments] if overload is not None else []

        def changed(name: str, value: Any) -> Any:
            return value if name in self._specials.finite else map_tensors(value, put)

        def put(tensor: Tensor) -> Tensor:
            return put_special(tensor, kind, generator)

        arguments = [changed(names[n] if n < len(names) else "", value) for n, value in enumerate(given[0])]
        return tuple(arguments), {name: changed(name, value) for name, value in given[1].items()}


def _turns(result: Any) -> int:
    """How many results have to be compared so that enough numbers are."""
    elements = sum(tensor.numel() for tensor in tensors_in(result))
    return min(max(-(-_ENOUGH_ELEMENTS // max(elements, 1)), 1), _MOST_TURNS)
