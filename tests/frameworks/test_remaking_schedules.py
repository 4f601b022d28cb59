"""Schedules of what to make again: rehearsed, carried out, departed from, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import code, run_source
from remaking_runs import START, run_both

TRAINING = code(
    START,
    """
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)

    model = nn.Sequential(*(Block(64) for _ in range(6)), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(batch=512):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(batch, 64)), torch.zeros(batch, 8)).backward()
        optimizer.step()
    """,
)
SLOW_LINK = {"OOC_BUDGET": "6MiB", "OOC_EMULATED_BANDWIDTH": "30MB/s"}
SLOW_LINK |= {"OOC_CHUNK_SIZE": "16KiB", "OOC_SMALL_LIMIT": "16KiB"}


@pytest.mark.medium
def test_a_schedule_is_carried_out_and_its_sequence_planned(tmp_path: Path) -> None:
    source = code(TRAINING, "for _ in range(14): step()", "show(*model.parameters())")
    plain, small = run_both(tmp_path, source, **SLOW_LINK)
    assert small.output == plain.output
    figures = small.figures
    assert figures["recompute"] == "exact"
    assert figures["recompute_drop_count"] >= 20 and figures["recompute_refused_count"] == 0
    assert figures["recompute_drop_bytes"] > 4 << 20
    assert figures["plan_count"] >= 3, "the sequence with drops has a plan of its own"
    assert figures["device_peak_bytes"] <= figures["budget_bytes"]


@pytest.mark.medium
def test_nothing_is_dropped_where_it_is_off(tmp_path: Path) -> None:
    source = code(TRAINING, "for _ in range(11): step()", "show(*model.parameters())")
    plain, small = run_both(tmp_path, source, OOC_RECOMPUTE="off", **SLOW_LINK)
    assert small.output == plain.output
    assert small.figures["recompute_drop_count"] == small.figures["recompute_function_count"] == 0


HANDED = code(
    TRAINING,
    """
    def hand_over():
        # a schedule that no clock judges: what no function uses for six functions is dropped
        from itertools import pairwise
        from swapd.recompute.schedule import Schedule, ScheduledDrop
        trace, drops = traced(), []
        uses = [[] for _ in trace.born]
        for f in range(trace.functions):
            for v in trace.use_variables[trace.use_offsets[f] : trace.use_offsets[f + 1]]:
                uses[v].append(f)
        for v, made_by in enumerate(trace.born.tolist()):
            number = trace.born[:v].tolist().count(made_by)
            gaps = [a for a, b in pairwise(uses[v]) if b > a + 6] if made_by >= 0 else []
            drops += [ScheduledDrop(made_by, number, after, False, v % 2 == 0) for after in gaps]
        drops.sort(key=lambda drop: (drop.after, drop.made_by, drop.number))
        schedule = Schedule(trace.fingerprint, trace.function_names, tuple(range(trace.functions)), tuple(drops))
        follow(schedule)
        return schedule

    def follow(schedule):
        sys.modules["ooc.pytorch"]._session.planner.remaker.follow(schedule)

    def begin():
        for _ in range(4): step()
        step() if drops() is None else hand_over()

    def dropped(steps):
        before = drops()
        for _ in range(steps): step()
        return None if before is None else drops() - before
    """,
)
IN_CORE = {"OOC_BUDGET": "256MiB", "OOC_CHUNK_SIZE": "16KiB", "OOC_SMALL_LIMIT": "16KiB", "OOC_STRICT": "1"}


@pytest.mark.medium
def test_a_schedule_is_rehearsed_and_then_carried_out_each_time(tmp_path: Path) -> None:
    source = """
        begin()
        first, then = dropped(2), [dropped(1) for _ in range(8)]
        if first is not None:
            assert first == 0, "dropped before the rehearsals were over"
            assert then[-1] == then[-2] >= 24
        show(*model.parameters())
    """
    plain, small = run_both(tmp_path, code(HANDED, source), **IN_CORE)
    assert small.output == plain.output


@pytest.mark.medium
def test_what_is_made_again_for_others_stays_unless_its_drop_is_fleeting(tmp_path: Path) -> None:
    source = """
        from dataclasses import replace
        for _ in range(4): step()
        schedule = step() if drops() is None else hand_over()
        def again(fleeting):
            if schedule is not None:
                follow(replace(schedule, drops=tuple(drop._replace(fleeting=fleeting) for drop in schedule.drops)))
            dropped(8)
            before = repeats()
            dropped(1)
            return repeats() - before
        def repeats():
            return 0 if schedule is None else sys.modules["ooc"].pytorch.summary()["recompute_function_count"]
        kept, gone = again(False), again(True)
        assert schedule is None or gone >= kept + 6 > 6, (kept, gone)  # a normalisation in each block
        show(*model.parameters())
    """
    plain, small = run_both(tmp_path, code(HANDED, source), **IN_CORE)
    assert small.output == plain.output


@pytest.mark.medium
def test_iterations_that_depart_from_a_schedule_have_the_same_bits(tmp_path: Path) -> None:
    """Other shapes, a pass without gradients, an error amid the forward pass, two backward passes, a fork, a sleep."""
    meanwhile = """
        begin()
        dropped(8)
        scheduled = dropped(1)
        step(300); step(); step(300)
        with torch.no_grad(): show(model(torch.randn(512, 64)))
        step()
        handle = model[4].register_forward_hook(lambda *_: 1 / 0)
        try: step()
        except ZeroDivisionError: print("error")
        handle.remove()
        step(); step()
        loss = F.mse_loss(model(torch.randn(512, 64)), torch.zeros(512, 8))
        loss.backward(retain_graph=True); loss.backward()
        show(*(p.grad for p in model.parameters())); optimizer.step()
        step()
        later = dropped(1)
        hidden = model[:5](torch.randn(512, 64)); sys.stdout.flush()
        if (child := os.fork()) == 0: show(hidden.detach()); sys.stdout.flush(); os._exit(0)
        os.waitpid(child, 0); model[5:](hidden).sum().backward()
        if scheduled is not None: ooc = sys.modules["ooc"]; ooc.sleep()
        step()
        if scheduled is not None:
            assert scheduled > 0, "nothing was dropped before"
            assert later == scheduled, "it was not carried out again"
            half = model[:5](torch.randn(512, 64)); ooc.disable()
        else:
            half = model[:5](torch.randn(512, 64))
        model[5:](half).sum().backward()
        show(half, *(p.grad for p in model.parameters()), *model.parameters())
    """
    plain, small = run_both(tmp_path, code(HANDED, meanwhile), **IN_CORE)
    assert small.output == plain.output


def test_a_schedule_that_the_program_always_departs_from_ends(tmp_path: Path) -> None:
    """With it the program runs functions that are in no recording without it."""
    source = """
        begin()
        dropped(8)
        optimizer.register_step_pre_hook(lambda *_: (made().sin_(), None)[1])
        last = [dropped(1) for _ in range(14)]
        if drops() is not None:
            assert all(last[:12]) and not any(last[12:]), last
            assert torch.ops.ooc.recompute_figures()[4] >= last[0]
        show(*model.parameters())
    """
    plain, small = run_both(tmp_path, code(HANDED, source), **IN_CORE)
    assert small.output == plain.output


@pytest.mark.medium
def test_what_does_not_give_the_same_bits_again_is_not_dropped(tmp_path: Path) -> None:
    """One result in each block, and what could only be made of it; what else there is to drop is dropped."""
    other_bits = """
        library, calls = torch.library.Library("aten", "IMPL"), [0]

        def gelu(x, approximate="none"):
            calls[0] += CHANGE
            return torch.erf(x) + calls[0] * 1e-6

        library.impl("gelu", gelu, "CPU")
        begin()
        dropped(8)
        print(int(torch.ops.ooc.recompute_figures()[4]), int(dropped(1)))
    """

    def figures(change: str) -> list[int]:
        source = code(HANDED, other_bits.replace("CHANGE", change))
        return [int(word) for word in run_source(tmp_path, source, **IN_CORE).check().output.split()]

    (refused_alike, dropped_alike), (refused, dropped) = figures("0"), figures("1")
    assert refused - refused_alike == dropped_alike - dropped >= 6 and dropped > 0


CONCATENATED = code(
    START,
    """
    class Layers(nn.Module):
        # each layer adds 64 columns to those that it is given; the layers end with the forward pass
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64 * (i + 1), 64) for i in range(6))

        def forward(self, x):
            drop = lambda made: torch.native_dropout(made, P, True)[0] if P else made
            found = [drop(x)]
            for layer in self.layers:
                found.append(drop(layer(F.gelu(torch.cat(found, 1)))))
            return torch.cat(found, 1)

    model = nn.Sequential(nn.Linear(64, 64), Layers(), nn.Linear(64 * 7, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.randn(512, 64)), torch.zeros(512, 8))
        loss.backward()
        optimizer.step()
        print(loss.item())

    def places(trace):
        return sorted(zip(trace.born.tolist(), trace.died.tolist(), trace.variable_bytes.tolist()))
    """,
)


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["plain", "made at random"])
@pytest.mark.medium
def test_layers_linger_for_what_is_concatenated_again(tmp_path: Path, dropout: float) -> None:
    """The program then is the one that was written down: its functions, and when each variable begins and ends.

    What is made at random lingers too, as it cannot be made again.
    """
    source = """
        for _ in range(3): step()
        if drops() is None:
            for _ in range(10): step()
        else:
            from swapd.recompute.candidates import find_candidates
            from swapd.recompute.history import History
            from swapd.recompute.rewriting import rewrite
            from swapd.recompute.schedule import AGAIN, schedule_of
            trace = traced()
            history = History(trace, linger_rate=1e9)
            chosen = [c.drop for c in find_candidates(history) if trace.function_names[c.functions[-1]] == "aten::cat"]
            expected = rewrite(history, chosen)
            assert len(expected.drops) >= 5 and len(expected.lingers) >= 5
            sys.modules["ooc.pytorch"]._session.planner.remaker.follow(schedule_of(trace, trace, expected))
            for _ in range(8): step()
            found = traced()
            names = zip(expected.trace.function_names, expected.repeated.tolist())
            assert list(found.function_names) == [name + AGAIN * again for name, again in names]
            assert places(found) == places(expected.trace)
        show(*model.parameters())
    """
    plain, small = run_both(tmp_path, code(f"P = {dropout}", CONCATENATED, source), **IN_CORE)
    assert small.output == plain.output


GATED = code(
    START,
    """
    class Gated(nn.Module):
        # of the product's two operands, its backward pass reads one first, and frees both once it has read the other
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            gate, up = F.silu(self.gate(x)), F.softplus(self.up(x))
            if looks: held.extend((gate.detach(), up.detach()))
            return x + self.down(gate * up)

    held, looks = [], False
    model = nn.Sequential(*(Gated() for _ in range(4)), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(512, 64)), torch.zeros(512, 8)).backward()
        optimizer.step()

    def places(trace):
        return sorted(zip(trace.born.tolist(), trace.died.tolist(), trace.variable_bytes.tolist()))

    def hand_over():
        # a schedule of nothing but final drops; gives what it makes of the program
        from swapd.recompute.candidates import find_candidates
        from swapd.recompute.history import History
        from swapd.recompute.rewriting import rewrite
        from swapd.recompute.schedule import schedule_of
        trace = traced()
        history = History(trace)
        expected = rewrite(history, [], [c for c in find_candidates(history, final=True) if c.final])
        sys.modules["ooc.pytorch"]._session.planner.remaker.follow(schedule_of(trace, trace, expected))
        return expected

    def figures():
        return dict(zip(("drops", "bytes", "repeats", "seconds", "refused"), torch.ops.ooc.recompute_figures()))
    """,
)


def test_a_final_drop_is_rehearsed_at_once_and_never_made_again(tmp_path: Path) -> None:
    """The program is then the one that was written down. If it looks at a variable after all, that is made again."""
    source = """
        for _ in range(3): step()
        if drops() is None:
            for _ in range(11): step()
        else:
            expected = hand_over()
            assert len(expected.final) >= 4
            for _ in range(8): step()
            before = figures()
            found = traced()
            assert figures()["drops"] - before["drops"] == len(expected.final)
            assert figures()["repeats"] == before["repeats"] > 0 and figures()["refused"] == 0
            assert found.function_names == expected.trace.function_names
            assert places(found) == places(expected.trace)
            step()
        before, looks = drops(), True
        step()
        looks = False
        assert before is None or drops() > before
        show(*held)
        held.clear()
        for _ in range(3): step()
        assert before is None or drops() >= before + 3 * len(expected.final)
        show(*model.parameters())
    """
    plain, small = run_both(tmp_path, code(GATED, source), **IN_CORE)
    assert small.output == plain.output


def test_a_final_drop_of_what_would_have_other_bits_is_refused(tmp_path: Path) -> None:
    """So that it has its bytes if the program looks at it after all."""
    source = """
        library, calls = torch.library.Library("aten", "IMPL"), [0]

        def other_bits(function):
            def changed(x, *more):
                calls[0] += CHANGE
                return function(x) + calls[0] * 1e-6
            return changed

        library.impl("silu", other_bits(lambda x: x * torch.sigmoid(x)), "CPU")
        library.impl("softplus", other_bits(lambda x: torch.log1p(torch.exp(x))), "CPU")
        for _ in range(3): step()
        expected = hand_over()
        for _ in range(8): step()
        before = figures()
        step()
        print(len(expected.final), int(figures()["refused"]), int(figures()["drops"] - before["drops"]))
    """

    def found(change: str) -> list[int]:
        program = code(GATED, source.replace("CHANGE", change))
        return [int(word) for word in run_source(tmp_path, program, **IN_CORE).check().output.split()]

    (final, refused_alike, dropped_alike), (_, refused, dropped) = found("0"), found("1")
    assert final >= 4 and refused_alike == 0 and dropped_alike == final
    assert refused >= 4 and dropped == final - refused
