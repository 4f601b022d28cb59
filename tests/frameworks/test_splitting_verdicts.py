"""When parts are believed to give the same bits: what is compared, and how much of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ooc.pytorch import build
from ooc.pytorch.splitting import registry, verification
from ooc.pytorch.splitting.calls import Call, CannotSplit, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.registry import Handler
from ooc.pytorch.splitting.runtime import Runtime
from swapd.splitting.store import Store

VALUES = torch.randn(2, 1000)


def lucky(rows: int) -> tuple[Split, list[Tensor]]:
    """Right for the first arguments that it sees, and wrong in the last bit from the second on."""
    seen: list[Tensor] = []

    def run(values: Tensor) -> Tensor:
        seen.append(values)
        total = values[:rows].sum(1)
        return total if len(seen) == 1 else torch.nextafter(total, torch.full_like(total, torch.inf))

    return Split("luck", 2, run), seen


def exact() -> tuple[Split, list[Tensor]]:
    seen: list[Tensor] = []

    def run(values: Tensor) -> Tensor:
        seen.append(values)
        return torch.cat([values[:1].sum(1), values[1:].sum(1)])

    return Split("rows", 2, run), seen


def context(values: Tensor, verdicts: Store) -> Context:
    return Context(Call("aten::sum.dim_IntList", (values,), {}), 1 << 20, verdicts=verdicts)


def whole(values: Tensor) -> Tensor:
    return values.sum(1)


def test_results_of_other_strides_are_not_the_same() -> None:
    transposed = Split("strides", 2, lambda values: values.t().contiguous().t())
    with pytest.raises(CannotSplit):
        context(VALUES, Store(None)).choose("", [transposed], torch.clone)


def test_the_generator_must_end_in_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = torch.ops.aten.uniform_.default

    def greedy(part: Tensor, *bounds: float, generator: torch.Generator) -> None:
        uniform(part, *bounds, generator=generator)
        if part.numel() < 100_000 and part.storage_offset() + part.numel() == 100_000:
            torch.rand(1, generator=generator)

    handler = registry.find("aten::uniform_")
    assert handler is not None
    values, generator = torch.empty(100_000), torch.Generator()
    call = Call("aten::uniform_", (values,), {"generator": generator})
    monkeypatch.setattr(registry, "overload_of", lambda name: greedy)
    with pytest.raises(CannotSplit):
        handler.function(Context(call, 100_000), values, generator=generator)
    monkeypatch.undo()
    handler.function(Context(call, 100_000), values, generator=generator)


def test_a_written_keyword_is_compared() -> None:
    def write(values: Tensor, *, out: Tensor) -> None:
        out.copy_(values)

    def run(values: Tensor, *, out: Tensor) -> None:
        out.copy_(values)[1, 500] += 1e-3

    call = Call("aten::abs.out", (VALUES,), {"out": VALUES.clone()})
    with pytest.raises(CannotSplit, match="in one piece by up to 0"):
        Context(call, 1 << 20).choose("", [Split("out", 2, run)], write)


def test_a_verdict_is_for_what_the_result_depends_on() -> None:
    verdicts = Store(None)
    division, _ = exact()
    context(VALUES, verdicts).choose("sums", [division], whole)
    with pytest.raises(CannotSplit):
        context(VALUES, verdicts).choose("means", [division], lambda values: values.mean(1))


def test_the_first_candidate_that_is_the_same_is_taken() -> None:
    verdicts, (right, seen) = Store(None), exact()
    wrong = Split("wrong", 2, lambda values: whole(values) + 1)
    elsewhere = Split("rows", 3, wrong.run)  # of the same way, in another number of parts
    for _ in range(2):
        assert context(VALUES, verdicts).choose("", [wrong, elsewhere, right], whole) is right
    assert len(seen) == 32


def test_two_numbers_that_agree_once_are_not_believed() -> None:
    luck, seen = lucky(2)
    with pytest.raises(CannotSplit) as raised:
        context(VALUES, Store(None)).choose("", [luck], whole)
    assert raised.value.inexact
    assert len(seen) == 2
    assert not torch.equal(seen[0], seen[1])


def test_a_small_result_is_compared_for_many_arguments_once() -> None:
    division, seen = exact()
    verdicts = Store(None)
    assert context(VALUES, verdicts).choose("", [division], whole) is division
    assert len({values.sum().item() for values in seen[:16]}) == 16
    assert len(seen) == 32  # as many with special numbers
    assert context(VALUES, verdicts).choose("", [division], whole) is division
    assert len(seen) == 32  # the verdict is kept


def test_a_large_result_is_compared_once_and_on_every_kind_of_special_numbers() -> None:
    division, seen = exact()
    context(torch.randn(4096, 3), Store(None)).choose("", [division], whole)
    plain, sparse, dense, not_positive, not_negative = seen
    assert plain.isfinite().all()
    assert 0 < (~sparse.isfinite()).sum() < 10 < 500 < (~dense.isfinite()).sum() < 4096
    assert {values.view(torch.int32).max().item() for values in (not_positive, -not_negative)} == {0}
    for zeros in (not_positive, not_negative):
        assert (zeros == 0).any() and zeros[zeros == 0].signbit().unique().numel() == 2
    bits = dense[dense.isnan()].view(torch.int32).unique()
    assert (bits < 0).sum() == 2 and (bits > 0).sum() == 3  # of both signs, and with payloads


@pytest.mark.parametrize("change", ["NaN", "zeros"])
def test_a_division_that_changes_only_special_numbers_is_refused(change: str) -> None:
    def run(values: Tensor) -> Tensor:
        if change == "zeros":
            return torch.where(values == 0, 0.0, values)
        return torch.where(values.isnan(), torch.nan, values)

    for mode in ("exact", "allow"):
        found = Context(Call("aten::clone", (VALUES,), {}), 1 << 20, mode=mode)
        splits = [Split("luck", 2, run)]
        if mode == "exact":
            with pytest.raises(CannotSplit, match="on special numbers"):
                found.choose("", splits, torch.clone)
        else:  # which rounds nothing
            assert found.choose("", splits, torch.clone) is splits[0]
            assert found.ran is not None and not found.ran.identical


def test_a_single_place_where_nan_changes_is_seen_in_cuts_of_lines() -> None:
    """As the last element of a thread's run is; in data of which one in four is special it seldom is NaN."""
    values, place = torch.randn(40_003), 20_001

    def run(given: Tensor) -> Tensor:
        made = given.clone()
        made[place] = torch.nan if made[place].isnan() else made[place]
        return made

    call = Call("aten::clone", (values,), {})
    assert Context(call, 1 << 20).choose("", [Split("luck", 2, run)], torch.clone).how == "luck"
    with pytest.raises(CannotSplit, match="on special numbers"):
        Context(call, 1 << 20).choose("", [Split("luck", 2, run)], torch.clone, specials=verification.OF_LINES)


def test_allow_takes_the_nearest() -> None:
    near = Split("near", 2, lambda values: whole(values) * (1 + 1e-6))
    far = Split("far", 2, lambda values: whole(values) * (1 + 1e-4))
    for candidates in ([near, far], [far, near]):
        found = Context(Call("aten::sum.dim_IntList", (VALUES,), {}), 1 << 20, mode="allow")
        assert found.choose("", candidates, whole) is near


def test_all_of_a_large_result_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_COMPARED_AT_ONCE", 100)

    def wrong_at_the_end(values: Tensor) -> Tensor:
        made = values * 2
        made.view(-1)[-1] += 1
        return made

    with pytest.raises(CannotSplit):
        context(VALUES, Store(None)).choose("", [Split("rows", 2, wrong_at_the_end)], lambda values: values * 2)


@pytest.mark.parametrize("wrong", [0, 1])
def test_every_result_is_compared(wrong: int) -> None:
    def several(values: Tensor) -> tuple[Tensor, Tensor]:
        return values * 2, values + 1

    def run(values: Tensor) -> tuple[Tensor, Tensor]:
        made = several(values)
        made[wrong][1, 500] += 1e-3
        return made

    with pytest.raises(CannotSplit, match="in one piece by up to 0"):
        context(VALUES, Store(None)).choose("", [Split("second", 2, run)], several)


@pytest.mark.parametrize("wrong", [0, 1])
def test_every_argument_that_is_written_is_compared(wrong: int) -> None:
    def write(*values: Tensor) -> None:
        for each in values:
            each.mul_(2)

    def run(*values: Tensor) -> None:
        write(*values)
        values[wrong][1, 500] += 1e-3

    call = Call("aten::mul_.Tensor", (VALUES, VALUES.clone()), {})
    with pytest.raises(CannotSplit, match="in one piece by up to 0"):
        Context(call, 1 << 20).choose("", [Split("second", 2, run)], write)


class Core:
    """As much of a core as deciding takes."""

    def stats(self) -> dict[str, int]:
        return {"budget_bytes": 16 << 20, "slab_bytes": 0, "chunk_bytes": 1 << 16}


def test_larger_parts_are_tried_where_small_ones_are_not_exact(tmp_path: Path) -> None:
    build.load()
    limits = []

    def handler(context: Context, values: Tensor) -> Tensor:
        limits.append(context.part_bytes)
        small = context.part_bytes < 10 << 20
        run = (lambda v: v.sum(1).nextafter(torch.tensor(9.0))) if small else whole
        split = Split("small" if small else "large", 2, run)
        return context.choose("", [split], whole).run(values)

    runtime = Runtime(Core(), "exact", tmp_path / "store.sqlite")  # type: ignore[arg-type]
    values = torch.randn(5000, 3)
    for _ in range(2):
        found = runtime.run("aten::sum.dim_IntList", Handler(handler), False, (values,), {})
        assert torch.equal(found, whole(values))
    assert limits == [8 << 20, 12 << 20, 12 << 20]  # what worked is remembered
    with pytest.raises(CannotSplit):  # arguments that may have been written are not tried again
        runtime.run("aten::sum.out", Handler(handler), True, (values,), {})


def test_a_verdict_is_for_a_number_of_threads(tmp_path: Path) -> None:
    build.load()
    division, seen = exact()

    def handler(context: Context, values: Tensor) -> Tensor:
        return context.choose("", [division], whole).run(values)

    runtime = Runtime(Core(), "exact", tmp_path / "store.sqlite")  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    runs = []
    try:
        for number in (threads, threads, threads + 1):
            torch.set_num_threads(number)
            runtime.run("aten::sum.dim_IntList", Handler(handler), False, (torch.randn(5000, 3),), {})
            runs.append(len(seen))
    finally:
        torch.set_num_threads(threads)
    assert runs == [6, 7, 13]  # compared five times and run; run; compared and run
