"""What a handler may ask: how much a part may take, memory for a large result, and which division is exact.

def linear(context, input, weight, bias=None):
    by_outputs = Split("output features", 4, lambda input, weight, bias=None: ...)
    chosen = context.choose("", [by_outputs], torch.ops.aten.linear.default)
    return chosen.run(input, weight, bias)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import Call, CannotSplit, NotYet, Sample, Split
from ooc.pytorch.splitting.geometry import storage_line
from ooc.pytorch.splitting.memory import Memory
from ooc.pytorch.splitting.verification import ALL_SPECIALS, Specials, Trial, map_tensors, random_like
from swapd.splitting.store import Key, Store, Verdict

HOST_BACKED = "host-backed"  # how a function runs that uses host memory in place
_MOST_ROUNDING = 0.02  # of the largest value; a few units in the last place of bfloat16


class Tally:
    """The counts of one session, for use by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers: dict[tuple[str, str, str, int], dict[str, Any]] = {}
        self.functions = 0  # calls that ran in parts
        self.parts = 0  # of all these calls together

    def add(self, operator: str, shapes: str, ran: Verdict) -> None:
        """Counts one more call of an operator; of calls that ran alike the largest difference is kept."""
        with self._lock:
            if ran.how != HOST_BACKED:
                self.functions += 1
                self.parts += ran.parts
            key = (operator, shapes, ran.how, ran.parts)
            new = dict(zip(("operator", "shapes", "how", "parts"), key)) | {"exact": True, "calls": 0}
            row = self._layers.setdefault(key, new)
            row["calls"] += 1
            row["exact"] &= ran.identical
            for name in ("largest_difference", "largest_relative"):
                row[name] = max(row.get(name, 0.0), getattr(ran, name))

    def rows(self) -> list[dict[str, Any]]:
        """`split_layers` of the summary, in the order in which they were first split."""
        with self._lock:
            return [dict(row) for row in self._layers.values()]


class Context(Memory):
    """What a handler may ask in one call.

    Args:
        call: the operator and its arguments.
        part_bytes, chunk_bytes, managed: as in `Memory`.
        least_parts: of divisions along axes, if they can have so many.
        mode: "exact"; or "allow" or "fast", which both allow rounding.
        verdicts: where verdicts are kept; by default they are those of this call alone.
        tally: where the call is counted.
        key: of the verdicts, to which `choose` adds its own.
        later: has a job done in another thread, once for a key, and returns whether it may be waited for; without it
            verdicts are found while the call waits.
    """

    def __init__(
        self,
        call: Call,
        part_bytes: int,
        *,
        least_parts: int = 1,
        chunk_bytes: int = 1,
        mode: str = "exact",
        verdicts: Store | None = None,
        tally: Tally | None = None,
        key: Key | None = None,
        managed: torch.device | None = None,
        later: Callable[[Any, Callable[[], object]], bool] | None = None,
    ) -> None:
        super().__init__(part_bytes, chunk_bytes, managed)
        self.call = call
        self.least_parts = least_parts
        self.exact = mode == "exact"
        self.threads = torch.get_num_threads()
        self._verdicts = verdicts if verdicts is not None else Store(None)
        self._tally = tally if tally is not None else Tally()
        self._key = key or Key("", "", call.operator, call.shapes)
        self.ran: Verdict | None = Verdict("parts", 1)  # what `used` noted last
        self._later = later

    def choose(
        self,
        key: str,
        candidates: Sequence[Split],
        whole: Callable[..., Any],
        sample: Sample | None = None,
        specials: Specials = ALL_SPECIALS,
        *,
        may_wait: bool = False,
    ) -> Split:
        """Returns the first division whose result is identical, every bit; else, with OOC_SPLIT=allow, the nearest one.

        A verdict that is not known yet is found out: `whole` and the division, called as the handler was, run in plain
        memory on random data of the same shapes, and if their results are identical, on data with special numbers too.
        Arguments that they write are compared as well.

        Args:
            key: what the result depends on beside the operator, its arguments, and `how` and `parts` of a candidate.
            candidates: in the order of preference.
            whole: the operator in one piece.
            sample: changes the arguments to try, of which floating point numbers come from a normal distribution, and
                everything else is as in the call: to positive variances, say.
            specials: which special numbers are tried.
            may_wait: `whole` and candidates refer to no tensor of the call, so that a verdict may be found later.

        Raises:
            CannotSplit: no candidate may be taken.
            NotYet: that is not known yet.
        """
        if self.verifying:
            return candidates[0]
        overload = registry.overload_of(self.call.operator)
        if self.on_gpu and overload is not None and torch.Tag.nondeterministic_seeded in overload.tags:
            raise CannotSplit("a GPU draws other random numbers in parts")
        full = replace(self._key, shapes=f"{self._key.shapes} {key}".rstrip())
        later = self._later if may_wait and sample is None and not self.on_gpu else None
        if later is not None and candidates and self._nearest(full, candidates, None) is None:
            self._leave_data()
            trial = Trial(self.call, self, whole, sample, specials, Tensor.copy_)
            asked = full, tuple((candidate.how, candidate.parts) for candidate in candidates)
            if later(asked, lambda: self._nearest(full, candidates, trial)):
                raise NotYet
        best = self._nearest(full, candidates, Trial(self.call, self, whole, sample, specials, self.copy_out))
        if best is None:
            raise CannotSplit("no division makes its parts small enough")
        verdict, chosen = best
        differs = f"in parts ({chosen.how}) the result differs"
        if not verdict.identical and self.exact:
            largest = verdict.largest_difference
            how = f"by up to {largest:.3g}" if largest else "on special numbers"
            raise CannotSplit(f"{differs} from the one in one piece {how}", inexact=True)
        if not verdict.largest_relative <= _MOST_ROUNDING:  # so much is not rounding any more
            raise CannotSplit(f"{differs} by {verdict.largest_relative:.3g} of itself")
        # Sums in parts change bits on some data, even if they did not on the data of the trial.
        exact = verdict.identical and not chosen.rounds
        self.used(chosen.how, chosen.parts, exact, verdict.largest_difference, verdict.largest_relative)
        return chosen

    def _leave_data(self) -> None:
        """From now on the call's tensors only say how they lie; indexes and the like are copies, in plain memory."""

        def again(tensor: Tensor) -> Tensor:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                return random_like(tensor, torch.Generator(), self.copy_out)
            line = torch.empty_like(storage_line(tensor), device="meta")
            return line.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        with self.plain():
            arguments, keywords = map_tensors((self.call.arguments, self.call.keywords), again)
        self.call = Call(self.call.operator, arguments, keywords)

    def _nearest(self, key: Key, candidates: Sequence[Split], trial: Trial | None) -> tuple[Verdict, Split] | None:
        """The first division that is identical, or else the nearest; None without any, or if a trial is needed."""
        best: tuple[Verdict, Split] | None = None
        for candidate in candidates:
            verdict = self._verdicts.verdict(key, candidate.how, candidate.parts)
            if verdict is None:
                if trial is None:
                    return None
                found = trial.compare(candidate)
                verdict = Verdict(candidate.how, candidate.parts, found.identical, found.largest, found.relative)
                self._verdicts.put_verdict(key, verdict)
            if best is None or verdict.identical or verdict.largest_difference < best[0].largest_difference:
                best = (verdict, candidate)
            if verdict.identical:
                break
        return best

    def used(self, how: str, parts: int, *apart: Any) -> None:
        """Notes how the call was divided, for the summary; `choose` does so too. `apart` is what a `Verdict` has next.

        A call with 0 parts is not counted: it took no memory, or the operators that it called are counted.
        """
        if not self.verifying:
            self.ran = Verdict(how, parts, *apart) if parts else None

    def count(self) -> None:
        """Counts the call, which has succeeded."""
        if self.ran is not None:
            self._tally.add(self._key.operator, self._key.shapes, self.ran)
