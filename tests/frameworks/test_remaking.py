"""What is dropped and made again: the same bits whatever the program does meanwhile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from processes import code
from remaking_runs import START, run_both

EVERYTHING = {"_OOC_RECOMPUTE_EVERYTHING": "1", "OOC_SMALL_LIMIT": "4KiB", "OOC_BUDGET": "64MiB"}

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
        import threading
        x = made(1000); y = lost(lambda: x @ x @ x @ x @ x @ x)
        def repeats(): return torch.ops.ooc.recompute_figures()[2] if drops() is not None else 0
        def end():
            if drops() is not None: import ooc; ooc.step()
        before = repeats(); thread = threading.Thread(target=end); thread.start()
        while thread.is_alive() and repeats() == before: pass  # then it has four products left to make
        show(y * 2); thread.join()
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
    "the_budget_falls": """
        x = made(1536); y = lost(lambda: F.gelu(x)); z = lost(lambda: F.gelu(y))
        with budget_of(x.nbytes * 3 // 2):  # less than y's function needs
            show(y); show(z)
            w = lost_or_not(lambda: x.repeat(1, 1))  # on host memory
            show(w)
        show(x, y, w)
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
    "small_arguments_are_freed": """
        x = made(); w = torch.randn(256); y = lost(lambda: F.layer_norm(x, (256,), w) * torch.full((256,), 3.0))
        del w; others = [torch.randn(256) for _ in range(100)]; show(y, *others[:3])
        """,
    "small_arguments_are_written_by_numpy": """
        w = torch.ones(256); x = made(); y = lost(lambda: F.layer_norm(x, (256,), w))
        n = w.numpy(); n[:] = 2; show(y, w)
        z = lost(lambda: F.layer_norm(x, (256,), w)); n[:] = 5; show(z, w)
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
@pytest.mark.medium
def test_the_same_bits_whatever_happens_meanwhile(name: str, everything: tuple[dict[str, str], ...]) -> None:
    plain, small, _ = everything
    assert plain[name].strip(), "it prints nothing"
    assert small[name] == plain[name]


def test_much_was_dropped_meanwhile(everything: tuple[Any, Any, dict[str, Any]]) -> None:
    assert everything[2]["recompute_drop_count"] > 2 * len(MEANWHILE)
    assert everything[2]["recompute_function_count"] > len(MEANWHILE)


def test_calls_that_are_kept_copy_no_small_arguments(tmp_path: Path) -> None:
    source = """
        layers = [torch.randn(1, 256) for _ in range(64)]
        found = [lost(lambda: torch.cat(layers)) for _ in range(40)]
        if drops() is not None:
            used = sys.modules["ooc.pytorch"]._session.core.stats()["slab_used_bytes"]
            assert used < 1 << 19, "64 KiB of layers were copied 40 times"
        show(*found)
    """
    plain, small = run_both(tmp_path, code(START, source), OOC_STRICT="1", **EVERYTHING)
    assert small.output == plain.output
