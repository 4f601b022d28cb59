"""Verdicts found while the program goes on: until then a large call runs on host memory, with the same bits."""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import code, run, write_script
from splitting_runs import COMMON, SMALL, both
from torch import Tensor

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.calls import Call, CannotSplit, NotYet, Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.verification import Verifier
from swapd.splitting.store import Store

SOURCE = """
    import json, sys, time
    weight = torch.randn(2048, 1200)  # 9.4 MiB, in a budget of 1
    found = []
    for _ in range(int(sys.argv[1])):
        x = torch.randn(8, 1200)
        found.append(digest(x @ weight.t()))
        if "ooc" in sys.modules:
            import ooc.pytorch
            layers = [row for row in ooc.pytorch.summary()["split_layers"] if row["operator"] == "aten::mm"]
            parts = sum(row["calls"] for row in layers if row["how"] != "host-backed")
            if len(found) == 1: first = parts
            if parts >= 2: break
            time.sleep(0.05)
    print(json.dumps([found, first, parts] if "ooc" in sys.modules else found))
"""


@pytest.mark.medium
def test_the_first_calls_run_on_host_memory_and_the_next_in_parts(tmp_path: Path) -> None:
    script = write_script(tmp_path, code(COMMON, SOURCE))
    variables = {"OOC_ALLOC": "emulated", **SMALL, "OOC_BUDGET": "1MiB", "OOC_SPLIT_STORE": str(tmp_path / "store")}
    ended = run([script, "1000"], variables, summary=tmp_path / "summary.json").check()
    found, first, parts = json.loads(ended.output)
    assert first == 0 and parts == 2
    assert ended.figures["host_backed_function_count"] >= 1
    assert ended.figures["device_peak_bytes"] <= ended.figures["budget_bytes"]
    plain = json.loads(run([script, str(len(found))], {"OOC_ALLOC": "0"}).check().output)
    assert found == plain
    again = run([script, "1000"], variables, summary=tmp_path / "summary.json").check()
    _, first, _ = json.loads(again.output)
    assert first == 1  # the verdict was kept


def test_an_operator_that_writes_in_place_waits_for_no_verdict_either(tmp_path: Path) -> None:
    source = """
        import os
        import ooc.pytorch
        rows = []
        made = torch.randn(500_000)  # 1.9 MiB, in a budget of 1
        for _ in range(3):
            show("in place", made.div_(1.25).add_(0.5))
            if os.environ["OOC_ALLOC"] != "0":
                session = ooc.pytorch._active()
                rows.append(sum(r["calls"] for r in session.split_rows() if r["operator"] == "aten::div_.Tensor"))
        if rows: assert rows == [0, 1, 2], rows
    """
    figures = both(tmp_path, source, OOC_BUDGET="1MiB").figures
    assert figures["host_backed_function_count"] >= 1


def test_other_parts_of_the_same_call_are_compared_too(tmp_path: Path) -> None:
    """Those of a budget that was lowered: their verdict was never asked for, so the call stayed on host memory."""
    source = """
        import os
        weight, x = torch.randn(2048, 1200), torch.randn(8, 1200)
        for budget in (1 << 20, 512 << 10, 1 << 20):
            for _ in range(3):
                show("product", x @ weight.t())
                if os.environ["OOC_ALLOC"] != "0":
                    import ooc.pytorch
                    ooc.pytorch._active().core.set_budget(budget)
                    ooc.pytorch._active().split_rows()
    """
    figures = both(tmp_path, source, OOC_BUDGET="1MiB").figures
    parts = {row["parts"] for row in figures["split_layers"] if row["operator"] == "aten::mm"}
    assert len(parts) == 2


# --- what is asked for -----------------------------------------------------------------------------------------------


class Jobs:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def ask(self, key: Any, job: Callable[[], object]) -> bool:
        self.jobs.append(job)
        return True


def by_rows(values: Tensor) -> Tensor:
    return torch.cat([values[:1].sum(1), values[1:].sum(1)])


def whole(values: Tensor) -> Tensor:
    return values.sum(1)


def test_a_verdict_is_found_without_the_tensors_of_the_call() -> None:
    asked, store = Jobs(), Store(None)
    values = torch.randn(2, 1000)
    gone = weakref.ref(values)

    def context(values: Tensor) -> Context:
        return Context(Call("aten::sum.dim_IntList", (values,), {}), 1 << 20, verdicts=store, later=asked.ask)

    with pytest.raises(NotYet):
        context(values).choose("", [Split("rows", 2, by_rows)], whole, may_wait=True)
    del values
    gc.collect()
    assert gone() is None
    asked.jobs[0]()
    chosen = context(torch.randn(2, 1000)).choose("", [Split("rows", 2, by_rows)], whole, may_wait=True)
    assert chosen.how == "rows" and len(asked.jobs) == 1


def test_a_verdict_against_it_is_found_too() -> None:
    asked, store = Jobs(), Store(None)
    wrong = Split("rows", 2, lambda values: by_rows(values) + 1)
    context = Context(Call("aten::sum.dim_IntList", (torch.randn(2, 9),), {}), 9, verdicts=store, later=asked.ask)
    with pytest.raises(NotYet):
        context.choose("", [wrong], whole, may_wait=True)
    asked.jobs[0]()
    with pytest.raises(CannotSplit, match="differs"):
        context.choose("", [wrong], whole, may_wait=True)


def test_indexes_are_those_of_the_call() -> None:
    """They are copied when it is made: the program may change them before they are looked at."""
    asked, seen = Jobs(), []
    indexes = torch.tensor([3, 1, 2])

    def select(table: Tensor, wanted: Tensor) -> Tensor:
        seen.append(wanted.tolist())
        return table[wanted]

    context = Context(Call("aten::index_select", (torch.randn(4, 5), indexes), {}), 1 << 20, later=asked.ask)
    with pytest.raises(NotYet):
        context.choose("", [Split("all", 1, select)], select, may_wait=True)
    indexes.zero_()
    asked.jobs[0]()
    assert seen and all(wanted == [3, 1, 2] for wanted in seen)


def test_both_gradients_are_asked_for_at_once() -> None:
    found = registry.find("aten::convolution_backward")
    assert found is not None
    asked, store = Jobs(), Store(None)
    grad, x, w = torch.randn(4, 64, 16, 16), torch.randn(4, 64, 16, 16), torch.randn(64, 64, 3, 3)
    arguments = (grad, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    call = Call("aten::convolution_backward", arguments, {})
    part_bytes = 2 * x.nbytes
    with pytest.raises(NotYet):
        found.function(Context(call, part_bytes, verdicts=store, later=asked.ask, mode="allow"), *arguments)
    assert len(asked.jobs) == 2
    for job in asked.jobs:
        job()
    results = found.function(Context(call, part_bytes, verdicts=store, later=asked.ask, mode="allow"), *arguments)
    expected = torch.ops.aten.convolution_backward(*arguments)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(results[:2], expected[:2]))


# --- the thread ------------------------------------------------------------------------------------------------------


def test_jobs_are_done_once_and_in_order() -> None:
    verifier, done = Verifier(), []
    for number in (1, 2, 1, 3):
        assert verifier.ask(number, lambda number=number: done.append((number, threading.current_thread().name)))
    last = threading.Event()
    assert verifier.ask("last", last.set) and last.wait(60)
    verifier.close()
    assert done == [(n, "ooc-verifier") for n in (1, 2, 3)]


def test_a_job_that_failed_is_for_who_asks() -> None:
    verifier, last = Verifier(), threading.Event()

    def fail() -> None:
        raise MemoryError

    assert verifier.ask("it", fail)
    assert verifier.ask("last", last.set) and last.wait(60)
    assert not verifier.ask("it", fail)
    verifier.close()


def test_closing_waits_for_one_job_and_drops_the_rest() -> None:
    verifier, started, go, done = Verifier(), threading.Event(), threading.Event(), []

    def first() -> None:
        started.set()
        go.wait(60)
        done.append(1)

    verifier.ask(1, first)
    verifier.ask(2, lambda: done.append(2))
    assert started.wait(60)
    threading.Timer(0.1, go.set).start()
    verifier.close()
    assert done == [1]
    verifier.close()


def test_closing_at_once_ends() -> None:
    for _ in range(200):  # before the thread has begun, or just then
        verifier = Verifier()
        verifier.ask("it", lambda: None)
        verifier.close()


def test_a_child_has_a_thread_of_its_own() -> None:
    verifier, ready = Verifier(), threading.Event()
    assert verifier.ask("it", ready.set) and ready.wait(60)
    child = os.fork()
    if child == 0:
        mine = threading.Event()
        os._exit(0 if verifier.ask("it", mine.set) and mine.wait(60) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    verifier.close()
