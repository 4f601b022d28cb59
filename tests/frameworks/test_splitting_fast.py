"""OOC_SPLIT=fast: convolutions run in the micro-batches that were measured to be fastest, within workspace limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import EMULATED, code, run, write_script
from splitting_runs import SMALL

from ooc.pytorch.splitting import fast
from ooc.pytorch.splitting.calls import Call
from ooc.pytorch.splitting.fast import Fast, Limits
from ooc.pytorch.splitting.measure import Measurer
from swapd.splitting.store import Store

# Costs in place of measurements: seconds and workspace of each sample, by algorithm; and what a part of one sample
# takes beside its share of a larger one.
MADE_UP = """
    from ooc.pytorch.splitting import fast, measure

    def made_up(self, kernel, algorithm, size):
        if algorithm.name not in COSTS: return None
        seconds, workspace = COSTS[algorithm.name]
        return seconds * size * (SINGLE if size == 1 else 1), workspace * size, 0.0

    measure.Measurer._measure = made_up
    fast.TURNS = 0  # nothing is timed
"""
COSTS = 'COSTS, SINGLE = {"own": (2.0, 10_000), "im2col": (1.0, 1_000_000)}, 1.9'

PROGRAM = """
    import json, sys, torch
    torch.manual_seed(1)
    first, second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, groups=2)
    x = torch.randn(4, 3, 12, 12, requires_grad=True)
    for _ in range(3):
        x.grad = first.weight.grad = first.bias.grad = second.weight.grad = None
        y = second(first(x).relu())
        y.square().sum().backward()
        if "ooc" in sys.modules: ooc.step()
    torch.save([y.detach(), x.grad, first.weight.grad, first.bias.grad, second.weight.grad], sys.argv[1])
    layers = ooc.pytorch.summary()["split_layers"] if "ooc" in sys.modules else []
    print(json.dumps([[r["operator"].partition("::")[2], r["how"], r["parts"], r["calls"]] for r in layers]))
"""


def trained(folder: Path, *before: str, **variables: str) -> tuple[list[list[Any]], list[torch.Tensor]]:
    """The rows of `split_layers`, and what the program computed."""
    out = folder / "out.pt"
    path = write_script(folder, code(*(["import ooc", *before] if before else []), PROGRAM))
    ended = run([path, out], {**EMULATED, **variables}).check()
    return json.loads(ended.output), torch.load(out)


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        a.shape == b.shape and a.stride() == b.stride() and torch.allclose(a, b, rtol=1e-3, atol=1e-4)
        for a, b in zip(found, wanted)
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    return trained(tmp_path_factory.mktemp("plain"), OOC_ALLOC="0")[1]


def settings(folder: Path, **variables: str) -> dict[str, str]:
    return {"OOC_SPLIT": "fast", "OOC_SPLIT_STORE": str(folder / "store.sqlite"), "OOC_BUDGET": "64MiB", **variables}


def test_each_convolution_runs_as_its_costs_say(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    rows, found = trained(tmp_path, MADE_UP, COSTS, **settings(tmp_path, OOC_WORKSPACE="2000000B"))
    assert rows == [
        ["convolution", "Forward: 2 x 2 im2col", 2, 3],
        ["convolution_backward", "BackwardData: 2 x 2 im2col; BackwardFilter: 2 x 2 im2col", 4, 3],
    ]  # the second has groups, which only PyTorch's own computes, and is faster whole
    assert close(found, plain)


def test_without_a_limit_it_is_the_fastest(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    rows, found = trained(tmp_path, MADE_UP, COSTS, **settings(tmp_path))
    assert [how for _, how, _, _ in rows] == [
        "Forward: 4 im2col",
        "BackwardData: 4 im2col; BackwardFilter: 4 im2col",
    ]
    assert close(found, plain)


def test_one_limit_for_all_is_divided_among_them(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    """In 4.5 MB two kernels have their 2 MB for two samples by im2col, and the others run as they are. Before the first
    iteration has shown all of them, each takes the least that it can."""
    rows, found = trained(tmp_path, MADE_UP, COSTS, **settings(tmp_path, OOC_WORKSPACE_TOTAL="4500000B"))
    first = [how for _, how, _, calls in rows if calls == 1]
    assert set(first) == {"Forward: 4 x 1 own", "BackwardData: 4 x 1 own; BackwardFilter: 4 x 1 own"}
    later = " ".join(how for _, how, _, calls in rows if calls == 2)
    assert later.count("2 x 2 im2col") == 2 and "x 1" not in later
    assert close(found, plain)


def test_a_limit_below_the_least_is_said(tmp_path: Path) -> None:
    ended = run(
        [write_script(tmp_path, code("import ooc", MADE_UP, COSTS, PROGRAM)), tmp_path / "out.pt"],
        {**EMULATED, **settings(tmp_path, OOC_WORKSPACE="5KB")},
    ).check()
    assert (
        "does not fit in 5000 bytes however it is divided; the smallest limit that works is 10000 bytes" in ended.errors
    )


KINDS = """
    import json, sys, torch
    F = torch.nn.functional
    torch.manual_seed(1)
    found = []
    def case(f, x, *w):
        x, w = x.requires_grad_(), [v.requires_grad_() for v in w]
        y = f(x, *w)
        found.extend([y.detach(), *(g.detach() for g in torch.autograd.grad(y.square().sum(), [x, *w]))])
    r = torch.randn
    case(F.conv1d, r(4, 3, 20), r(5, 3, 3), r(5))
    case(F.conv3d, r(3, 2, 6, 7, 8), r(4, 2, 3, 3, 3), r(4))
    case(F.conv2d, r(4, 3, 9, 8).double(), r(5, 3, 3, 3).double(), r(5).double())
    case(F.conv2d, r(4, 3, 9, 8).bfloat16(), r(5, 3, 3, 3).bfloat16())
    case(F.conv2d, r(4, 3, 9, 8).to(memory_format=torch.channels_last), r(5, 3, 3, 3), r(5))
    case(lambda x, w: F.conv2d(x, w, stride=2, padding=1, dilation=2), r(4, 3, 11, 12), r(5, 3, 3, 3))
    case(F.conv_transpose2d, r(4, 3, 5, 5), r(3, 2, 3, 3), r(2))
    case(lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2, 2), r(4, 4, 5, 6), r(4, 2, 3, 3), r(4))
    case(F.conv2d, r(1, 3, 9, 8), r(5, 3, 3, 3))
    case(F.conv2d, r(3, 9, 8), r(5, 3, 3, 3))
    case(F.conv2d, r(0, 3, 9, 8), r(5, 3, 3, 3))
    case(F.conv2d, r(9, 8, 4, 3).permute(2, 3, 0, 1), r(5, 3, 3, 3), r(5))
    x, w = r(4, 3, 9, 8).requires_grad_(), r(5, 3, 3, 3).requires_grad_()
    slope, = torch.autograd.grad(F.conv2d(x, w).square().sum(), x, create_graph=True)
    found.extend(torch.autograd.grad(slope.square().sum(), [x, w]))
    y = F.conv2d(r(4, 3, 9, 8), w)
    found.extend(g for g in torch.autograd.grad(y, w, torch.ones(()).expand(y.shape)))
    with torch.inference_mode():
        found.append(F.conv2d(x, w).clone())
    torch.save([t.detach().float() for t in found], sys.argv[1])
    print(json.dumps([r["how"] for r in ooc.pytorch.summary()["split_layers"]] if "ooc" in sys.modules else []))
"""


def test_any_convolution_gives_what_it_gives_whole(tmp_path: Path) -> None:
    out = {name: tmp_path / f"{name}.pt" for name in ("plain", "fast")}
    run([write_script(tmp_path, KINDS, "plain.py"), out["plain"]], {"OOC_ALLOC": "0"}).check()
    costs = 'COSTS, SINGLE = {"own": (2.0, 10), "im2col": (9.0, 10)}, 0.1'  # samples one by one
    script = write_script(tmp_path, code("import ooc", MADE_UP, costs, KINDS), "fast.py")
    ended = run([script, out["fast"]], {**EMULATED, **settings(tmp_path)}).check()
    hows = json.loads(ended.output)
    assert sum("x 1 own" in how for how in hows) >= 16 and all("1 own" in how for how in hows)
    found, wanted = torch.load(out["fast"]), torch.load(out["plain"])
    assert len(found) == len(wanted)
    for n, (a, b) in enumerate(zip(found, wanted)):
        scale = max(float(b.abs().max()), 1.0) if b.numel() else 1.0
        assert a.shape == b.shape and a.stride() == b.stride(), n
        assert (a - b).abs().max() <= (0.05 if 12 <= n < 15 else 1e-5) * scale if b.numel() else True, n


MEASURED = """
    import json, sys, torch
    import ooc
    from ooc.pytorch.splitting.measure import live_during
    torch.manual_seed(1)
    x = torch.randn(8, 16, 24, 24, dtype=torch.float64)
    w = torch.randn(32, 16, 3, 3, dtype=torch.float64)
    f = lambda: torch.nn.functional.conv2d(x, w)
    f()
    size = sys.argv[1] and __import__("os").path.getsize(sys.argv[1])
    took = live_during(f)  # by the count of the allocator
    torch.save(f(), sys.argv[2])
    print(json.dumps([took, size, [(r["how"], r["parts"]) for r in ooc.pytorch.summary()["split_layers"]]]))
"""
COLUMNS = 22 * 22 * 16 * 9 * 8  # bytes of a sample's columns


@pytest.mark.parametrize("limit", [COLUMNS * 3 // 2, COLUMNS - 1])
def test_measured_costs_keep_the_limit_and_are_kept(tmp_path: Path, limit: int) -> None:
    """PyTorch's own makes the columns of all samples at once, 4.2 MiB; one sample's fit at most, or not even those.

    Two samples fit by no way. Which of those that fit is fastest depends on the processor.
    """
    script, store = write_script(tmp_path, MEASURED), tmp_path / "store.sqlite"
    variables = {**EMULATED, **settings(tmp_path, OOC_WORKSPACE=f"{limit}B"), "OMP_NUM_THREADS": "1"}
    ended = run([script, store, tmp_path / "1.pt"], variables).check()
    took, size, layers = json.loads(ended.output)
    ((how, parts),) = layers
    assert parts == 8 and (limit > COLUMNS or not how.endswith(" own"))
    assert took <= limit and "OOC_WORKSPACE" not in ended.errors
    again = json.loads(run([script, store, tmp_path / "2.pt"], variables).check().output)
    assert again[1] == size and again[2] == layers  # nothing was measured, and it runs alike
    assert torch.equal(torch.load(tmp_path / "1.pt"), torch.load(tmp_path / "2.pt"))


def test_strips_are_not_taken_for_a_weight_that_is_not_finite(tmp_path: Path) -> None:
    """They multiply it by the zeros beyond the image's edges, which would give NaN."""
    source = """
        import json, sys, torch
        torch.manual_seed(1)
        x, w = torch.randn(2, 3, 20, 20), torch.randn(8, 3, 3, 3)
        found = [torch.nn.functional.conv2d(x, w, padding=1)]
        w[0, 0, 0, 0] = float("inf")
        found += [torch.nn.functional.conv2d(x, w, padding=1) for _ in range(2)]
        torch.save(found, sys.argv[1])
        layers = ooc.pytorch.summary()["split_layers"] if "ooc" in sys.modules else []
        print(json.dumps([[r["how"], r["calls"]] for r in layers]))
    """
    out = {name: tmp_path / f"{name}.pt" for name in ("plain", "fast")}
    run([write_script(tmp_path, source, "plain.py"), out["plain"]], {"OOC_ALLOC": "0"}).check()
    costs = 'COSTS, SINGLE = {"own": (1.0, 1000), "own in 2 strips": (1.0, 500)}, 1'
    script = write_script(tmp_path, code("import ooc", MADE_UP, costs, source), "fast.py")
    ended = run([script, out["fast"]], {**EMULATED, **settings(tmp_path, OOC_WORKSPACE="500B")}).check()
    assert json.loads(ended.output) == [["Forward: 2 x 1 own in 2 strips", 1]]
    for found, wanted in zip(torch.load(out["fast"]), torch.load(out["plain"]), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert not found.isnan().all()


@pytest.mark.parametrize("way", ["own in 2 strips", "own as several"])
def test_parts_of_a_sample_are_not_taken_for_a_gradient_that_is_not_finite(tmp_path: Path, way: str) -> None:
    source = """
        import json, sys, torch
        torch.manual_seed(1)
        x, w = torch.randn(2, 3, 20, 20), torch.randn(8, 3, 3, 3, requires_grad=True)
        g, found = torch.randn(2, 8, 20, 20), []
        for value in (1.0, float("inf"), 1.0):
            g[0, 0, 0, 0] = value
            torch.nn.functional.conv2d(x, w, padding=1).backward(g)
            found.append(w.grad)
            w.grad = None
        torch.save(found, sys.argv[1])
        layers = ooc.pytorch.summary()["split_layers"] if "ooc" in sys.modules else []
        print(json.dumps([r["how"] for r in layers]))
    """
    out = {name: tmp_path / f"{name}.pt" for name in ("plain", "fast")}
    run([write_script(tmp_path, source, "plain.py"), out["plain"]], {"OOC_ALLOC": "0"}).check()
    costs = f'COSTS, SINGLE = {{"own": (1.0, 1000), "{way}": (1.0, 500)}}, 1'
    script = write_script(tmp_path, code("import ooc", MADE_UP, costs, source), "fast.py")
    ended = run([script, out["fast"]], {**EMULATED, **settings(tmp_path, OOC_WORKSPACE="500B")}).check()
    assert f"BackwardFilter: 2 x 1 {way}" in json.loads(ended.output)
    for found, wanted in zip(torch.load(out["fast"]), torch.load(out["plain"]), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert not found.isnan().any()


def test_a_weight_that_is_not_finite_at_first_is_looked_at_once(tmp_path: Path) -> None:
    source = """
        import json, torch
        looked, choose = [], fast.Fast._choose
        fast.Fast._choose = lambda self, *given: looked.append(1) or choose(self, *given)
        x, w = torch.randn(2, 3, 20, 20), torch.full((8, 3, 3, 3), float("inf"))
        found = [torch.nn.functional.conv2d(x, w, padding=1) for _ in range(3)]
        print(json.dumps([len(looked), len(ooc.pytorch.summary()["split_layers"])]))
    """
    costs = 'COSTS, SINGLE = {"own": (1.0, 1000), "own in 2 strips": (1.0, 500)}, 1'
    script = write_script(tmp_path, code("import ooc", MADE_UP, costs, source))
    for limit in ({"OOC_WORKSPACE": "500B"}, {"OOC_WORKSPACE_TOTAL": "500B"}):
        ended = run([script], {**EMULATED, **settings(tmp_path), **limit}).check()
        assert json.loads(ended.output) == [1, 0], limit


def test_what_does_not_fit_is_divided_as_ever(tmp_path: Path) -> None:
    source = """
        import json, torch
        torch.manual_seed(1)
        w = torch.randn(8, 4, 3, 3)
        x = torch.empty(2, 4, 160, 160)  # larger than the budget
        for row in range(160): x[:, :, row] = row / 160
        y = torch.nn.functional.conv2d(x, w)
        print(json.dumps([float(y[1, 3, row, 7]) for row in range(0, 158, 9)]))
    """
    variables = {"OOC_SPLIT": "fast", "OOC_SPLIT_STORE": str(tmp_path / "s"), "OOC_ALLOC": "emulated", **SMALL}
    script = write_script(tmp_path, source)
    plain = json.loads(run([script], {"OOC_ALLOC": "0"}).check().output)
    ended = run([script], variables, summary=tmp_path / "summary.json").check()
    assert json.loads(ended.output) == pytest.approx(plain, abs=1e-4)
    assert ended.figures["device_peak_bytes"] <= ended.figures["budget_bytes"]
    assert any(row["operator"] == "aten::convolution" for row in ended.figures["split_layers"])


# --- what is chosen, with costs that are made up ---------------------------------------------------------------------


class Alone:
    """A core of which nothing is asked but to leave functions out of its sequence."""

    def set_apart(self, on: bool) -> bool:
        return False


def choices(monkeypatch: pytest.MonkeyPatch, limits: Limits, seconds: list[tuple[float, float]]) -> Any:
    """What `choice` answers for a convolution whose micro-batches cost half; `seconds` are the turns of both."""

    def made_up(self: Measurer, kernel: Any, algorithm: Any, size: int) -> tuple[float, int, float]:
        return size * (1.0 if size == 1 else 2.0), size * 100, 0.0

    turns = iter([second for pair in seconds for second in pair])
    monkeypatch.setattr(Measurer, "_measure", made_up)
    monkeypatch.setattr(fast, "TURNS", len(seconds))
    monkeypatch.setattr(fast, "timed", lambda call, effort: (next(turns), 0.0))
    monkeypatch.setattr(fast, "live_during", lambda call: 400)
    store = Store(None)
    x, w = torch.randn(4, 2, 6, 6), torch.randn(3, 2, 3, 3)
    call = Call("aten::convolution", (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {})
    first = Fast(Alone(), store, limits).choice(call)  # type: ignore[arg-type]
    again = Fast(Alone(), store, limits).choice(call)  # type: ignore[arg-type]
    assert (first is None) == (again is None)  # from the store: there are no more turns
    return first


def test_a_division_has_to_win_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choices(monkeypatch, Limits(), [(1.0, 2.0)] * 4 + [(3.0, 2.0)]) is not None  # one may be disturbed


def test_a_division_that_does_not_win_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choices(monkeypatch, Limits(), [(1.0, 2.0)] * 3 + [(3.0, 2.0)] * 2) is None


def test_a_division_that_hardly_gains_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choices(monkeypatch, Limits(), [(0.98, 1.0)] * 5) is None


def test_within_a_limit_that_the_whole_breaks_nothing_has_to_win(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choices(monkeypatch, Limits(each=399), [])
    assert found is not None and found[0].how == "Forward: 4 x 1 own"


def test_what_is_no_convolution_of_ours_runs_whole() -> None:
    x, w = torch.randn(0, 2, 6, 6), torch.randn(3, 2, 3, 3)
    call = Call("aten::convolution", (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {})
    assert Fast(Alone(), Store(None), Limits()).choice(call) is None  # type: ignore[arg-type]


def test_layers_of_one_shape_have_a_workspace_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(self: Measurer, kernel: Any, algorithm: Any, size: int) -> tuple[float, int, float]:
        return 10.0, size * 100, 0.0  # the fewer parts, the faster

    monkeypatch.setattr(Measurer, "_measure", made_up)
    x, w = torch.randn(4, 2, 6, 6), torch.randn(3, 2, 3, 3)
    call = Call("aten::convolution", (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {})
    for layers, how in ((1, "whole"), (2, "Forward: 2 x 2 own")):
        chooser = Fast(Alone(), Store(None), Limits(total=600))  # type: ignore[arg-type]
        for _ in range(layers):
            found = chooser.choice(call)
            assert found is not None and found[0].how == "Forward: 4 x 1 own"  # until all of them are known
        assert chooser.ended() and not chooser.ended()
        found = chooser.choice(call)
        assert ("whole" if found is None else found[0].how) == how


@pytest.mark.parametrize("limits", [Limits(), Limits(total=600)], ids=["each", "all"])
def test_sizes_that_do_not_add_up_to_the_batch_leave_it_whole(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    """A single sample did not fit the budget, as PyTorch takes another kernel for it, nor did the whole."""

    def made_up(self: Measurer, kernel: Any, algorithm: Any, size: int) -> Any:
        return (1.0, 100, 0.0) if size in (2, 4) else None

    monkeypatch.setattr(Measurer, "_measure", made_up)
    x, w = torch.randn(5, 2, 6, 6), torch.randn(3, 2, 3, 3)
    call = Call("aten::convolution", (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), {})
    chooser = Fast(Alone(), Store(None), limits)  # type: ignore[arg-type]
    assert chooser.choice(call) is None and not chooser.ended()
