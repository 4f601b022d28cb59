"""What is dropped and made again: the same bits whatever the program does meanwhile; schedules are carried out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import Ended, code, run_source

EVERYTHING = {"_OOC_RECOMPUTE_EVERYTHING": "1", "OOC_SMALL_LIMIT": "4KiB", "OOC_BUDGET": "64MiB"}

START = """
    import hashlib, os, sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)

    def show(*tensors):
        print(*(hashlib.sha256(t.detach().clone().contiguous().numpy().tobytes()).hexdigest()[:16] for t in tensors))

    def made(n=256):
        return torch.randn(n, n)

    def passes():
        torch.zeros(8, 8) + 1  # what the function before used is dropped as this begins

    def drops():
        return torch.ops.ooc.recompute_figures()[0] if "ooc" in sys.modules and sys.modules["ooc"].enabled() else None

    def lost(make):
        # a result whose bytes have been given up, where anything is given up at all
        before = drops()
        result = make()
        passes()
        passes()
        assert before is None or drops() > before, "nothing was dropped"
        return result

    def traced():
        # a step, as it was recorded
        session, ended = sys.modules["ooc.pytorch"]._session, []
        boundary = session.core.boundary
        session.core.boundary = lambda: ended.append(boundary()) or ended[-1]
        step()
        del session.core.boundary
        return session.planner.trace(*ended)
"""

# What each does to a variable that is lost, or to what it is made of; all print what they find.
MEANWHILE = {
    "an_input_is_written": "x = made(); y = lost(lambda: F.gelu(x)); x.add_(1); show(x, y)",
    "an_input_was_written_before": "x = made(); y = F.gelu(x); x.add_(1); y.sum(); passes(); passes(); show(x, y)",
    "an_input_is_written_by_numpy": "x = made(); y = lost(lambda: F.gelu(x)); x.numpy()[:] += 1; show(x, y)",
    "an_input_was_open_to_numpy": "x = made(); n = x.numpy(); y = F.gelu(x); passes(); passes(); n[:] += 1; show(x, y)",
    "an_input_stays_open_to_numpy": """
        x = made(); y = lost(lambda: F.gelu(x)); n = x.numpy()
        z = F.gelu(x); passes(); passes(); n[:] += 1; show(x, y, z)
        """,
    "what_was_made_stays_open_to_numpy": """
        x = F.gelu(made()); n = x.numpy(); z = F.gelu(x); passes(); passes(); n[:] += 1; show(x, z)
        """,
    "an_input_is_freed": "x = made(); y = lost(lambda: F.gelu(x)); del x; z = made(); show(y, z)",
    "a_chain_is_freed": "x = made(); y = lost(lambda: torch.tanh(F.gelu(x) * 2).exp()); del x; z = made(); show(y, z)",
    "all_of_it_is_freed": "x = made(); y = lost(lambda: F.gelu(x)); del x, y; show(made())",
    "it_is_written_in_place": "x = made(); y = lost(lambda: F.relu_(x * 2)); y.mul_(3); passes(); y[0] = 7; show(x, y)",
    "it_is_overwritten": "x = made(); y = lost(lambda: F.gelu(x)); y.zero_(); passes(); y.add_(x); show(y)",
    "it_multiplies_itself": "x = made(); y = lost(lambda: (x + 1).mul_(x)); y.mul_(y); passes(); passes(); show(x, y)",
    "it_is_a_result_that_is_given": "x = made(); y = lost(lambda: F.gelu(x)); torch.add(x, 1, out=y); show(y)",
    "only_a_part_is_used": "x = made(); y = lost(lambda: F.gelu(x)); show(y[3:5, 7:9], y.t()[1:3])",
    "it_is_read_by_numpy": "x = made(); y = lost(lambda: F.gelu(x)); print(float(y.numpy().sum()))",
    "it_is_read_as_numbers": "x = made(); y = lost(lambda: F.gelu(x)); print(y[5, 5].item(), y[:2, :2].tolist())",
    "its_address_is_taken": "x = made(); y = lost(lambda: F.gelu(x)); y.data_ptr(); passes(); show(y)",
    "it_is_saved": """
        import io
        x = made(); y = lost(lambda: F.gelu(x)); f = io.BytesIO(); torch.save(y, f); f.seek(0); show(torch.load(f))
        """,
    "it_is_copied_deeply": "import copy; x = made(); y = lost(lambda: F.gelu(x)); show(copy.deepcopy(y))",
    "a_view_is_made_again": "x = made(); y = lost(lambda: x[10:200].t().contiguous()); x.mul_(2); show(y)",
    "an_error_is_raised": """
        x = made(); y = lost(lambda: F.gelu(x))
        try: y @ torch.zeros(3, 3)
        except RuntimeError as error: print(error)
        passes(); show(y)
        """,
    "another_thread_ends_the_iteration_first": """
        import threading, time
        x = made(1000); y = lost(lambda: x @ x)  # it takes longer to make again than this thread sleeps
        def end():
            if drops() is not None: import ooc; ooc.step()
        thread = threading.Thread(target=end); thread.start(); time.sleep(0.005); show(y * 2); thread.join()
        """,
    "another_thread_reads_it": """
        import threading
        x = made(); y = lost(lambda: F.gelu(x)); found = []
        thread = threading.Thread(target=lambda: found.append(y * 2)); thread.start(); thread.join(); show(y, *found)
        """,
    "the_process_forks": """
        x = made(); y = lost(lambda: F.gelu(x)); sys.stdout.flush()
        if (child := os.fork()) == 0: show(x, y); sys.stdout.flush(); os._exit(0)
        os.waitpid(child, 0); passes(); show(y)
        """,
    "settings_change": """
        x = made(); y = lost(lambda: F.softmax(x @ x, 0)); torch.set_num_threads(2); torch.set_flush_denormal(True)
        torch.use_deterministic_algorithms(True); torch.set_default_dtype(torch.float64); show(x, y)
        print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype())
        """,
    "denormals_come_later": """
        x = made() * 1e-20; y = lost(lambda: x * 1e-20); torch.set_flush_denormal(True); show(x * 1, y)
        """,
    "modes_change": """
        x = made(); x.requires_grad_()
        with torch.no_grad(): y = lost(lambda: F.gelu(x))
        with torch.autocast("cpu", torch.bfloat16): z = lost(lambda: x @ x)
        show(y, z.float())
        with torch.inference_mode(): w = lost(lambda: F.gelu(y))
        show(w, y)
        """,
    "random_numbers_go_on": """
        x = made().requires_grad_(); y = F.dropout(lost(lambda: F.gelu(x)), 0.3) * 2; passes(); z = torch.rand(64, 64)
        y.sum().backward(); show(y, z, x.grad, torch.rand(3, 3))
        """,
    "statistics_are_updated_once": """
        norm = nn.BatchNorm2d(64); x = torch.randn(8, 64, 16, 16)
        y = lost(lambda: F.relu_(norm(x))); show(y, norm.running_mean, norm.running_var); norm.eval(); show(norm(x), y)
        """,
    "large_statistics_are_updated_once": """
        norm = nn.BatchNorm2d(2048); x = torch.randn(4, 2048, 4, 4)
        y = lost(lambda: norm(x)); show(y, norm.running_mean, norm.running_var)
        """,
    "statistics_that_have_to_be_given": """
        x, mean, var = torch.randn(8, 64, 16, 16), torch.zeros(64), torch.ones(64)
        y, *_ = torch.ops.aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 1e-5); passes(); passes()
        show(y, mean, var)
        """,
    "a_small_layer_changes_between_two_concatenations": """
        layers = [torch.randn(1, 256) for _ in range(8)]
        one = lost(lambda: torch.cat(layers)); layers[3].add_(1); two = lost(lambda: torch.cat(layers)); show(one, two)
        """,
    "small_arguments_change": """
        w = torch.ones(256); x = made(); y = lost(lambda: F.layer_norm(x, (256,), w)); w.mul_(2); show(y, w)
        z = lost(lambda: x * w[3]); w.zero_(); show(z)
        """,
    "several_results": """
        x = torch.randn(4, 8, 64, 64); y, i = lost(lambda: F.max_pool2d(x, 2, return_indices=True)); show(y, i)
        """,
    "lists_of_tensors": """
        x = [made(128) for _ in range(3)]; y = lost(lambda: torch.cat(x)); x[1].zero_(); show(y, torch.stack(x))
        """,
    "double_backward": """
        x = made().requires_grad_(); y = (F.gelu(x) * torch.tanh(x)).sum()
        g, = torch.autograd.grad(y, x, create_graph=True); passes(); (g ** 2).sum().backward(); show(g, x.grad)
        """,
    "function_transforms": """
        x, w = made(), made()
        show(torch.func.vmap(lambda r: torch.tanh(w @ r))(x), torch.func.grad(lambda a: F.gelu(a @ w).sum())(x))
        show(*torch.func.jvp(lambda a: F.silu(a) * a, (x,), (w,)))
        """,
    "checkpointing": """
        from torch.utils.checkpoint import checkpoint
        x = made().requires_grad_(); w = made().requires_grad_()
        checkpoint(lambda a: F.dropout(F.gelu(a @ w), 0.2).sum(), x, use_reentrant=False).backward()
        show(x.grad, w.grad)
        """,
    "hooks_read_it": """
        x = made().requires_grad_(); y = F.gelu(x); kept = []; y.register_hook(lambda g: kept.append((y * g).sum()))
        (y * 2).sum().backward(); show(x.grad, *kept)
        """,
}


def run_both(folder: Path, source: str, **variables: str) -> tuple[Ended, Ended]:
    """In plain memory, and out-of-core, in one thread each."""
    plain = run_source(folder, source, options=("-s",), OOC_ALLOC="0").check()
    return plain, run_source(folder, source, options=("-s",), **variables).check()


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """What all of `MEANWHILE` print in plain memory, and where everything is dropped; and the latter's figures."""
    cases = "\n".join(
        code(f"def {name}():") + "\n" + "\n".join("    " + line for line in code(text).strip().splitlines())
        for name, text in MEANWHILE.items()
    )
    ended = [
        "print('=== end'); sys.stdout.flush()",
        "if drops() is not None: import ooc; ooc.disable(); passes()",
    ]
    each = "\n".join(f"torch.manual_seed(1); print('=== {name}'); {name}()\n{restore}" for name in MEANWHILE)
    source = code(START) + "\n" + cases + "\n" + each + "\n" + "\n".join(ended)
    folder = tmp_path_factory.mktemp("everything")
    plain, small = run_both(folder, source, OOC_STRICT="1", **EVERYTHING)
    return sections(plain.output), sections(small.output), small.figures


restore = code(
    """
    torch.set_num_threads(1); torch.set_flush_denormal(False); torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    if drops() is not None: import ooc; ooc.step()
    """
)


def sections(output: str) -> dict[str, str]:
    parts = re.split(r"^=== (\w+)$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


@pytest.mark.parametrize("name", MEANWHILE)
def test_the_same_bits_whatever_happens_meanwhile(name: str, everything: tuple[dict[str, str], ...]) -> None:
    plain, small, _ = everything
    assert plain[name].strip(), "it prints nothing"
    assert small[name] == plain[name]


def test_much_was_dropped_meanwhile(everything: tuple[Any, Any, dict[str, Any]]) -> None:
    assert everything[2]["recompute_drop_count"] > 2 * len(MEANWHILE)
    assert everything[2]["recompute_function_count"] > len(MEANWHILE)


# ---- schedules ------------------------------------------------------------------------------------------------------

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
            drops += [ScheduledDrop(made_by, number, after) for after in gaps]
        drops.sort(key=lambda drop: (drop.after, drop.made_by, drop.number))
        schedule = Schedule(trace.fingerprint, trace.function_names, tuple(range(trace.functions)), tuple(drops))
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


def test_calls_that_are_kept_share_the_copies_of_small_arguments(tmp_path: Path) -> None:
    source = """
        layers = [torch.randn(1, 256) for _ in range(64)]
        found = [lost(lambda: torch.cat(layers)) for _ in range(40)]
        if drops() is not None:
            used = sys.modules["ooc.pytorch"]._session.core.stats()["slab_used_bytes"]
            assert used < 1 << 20, "64 KiB of layers were copied 40 times"
        show(*found)
    """
    plain, small = run_both(tmp_path, code(START, source), OOC_STRICT="1", **EVERYTHING)
    assert small.output == plain.output


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
        return [int(word) for word in run_source(tmp_path, source, options=("-s",), **IN_CORE).check().output.split()]

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
