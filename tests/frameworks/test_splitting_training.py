"""Training whose functions do not fit one by one: the same bits, the same functions in each iteration, under plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from splitting_runs import both

TRAIN = """
    import torch.nn.functional as F

    weight, bias = torch.nn.Parameter(torch.randn(512, 1040)), torch.nn.Parameter(torch.zeros(1040))
    inputs, targets = torch.rand(512, 1040), torch.rand(512, 1040)
    optimizers = {
        "plain": lambda: torch.optim.SGD([weight, bias], 50.0, momentum=0.9, foreach=False),
        "lists": lambda: torch.optim.AdamW([weight, bias], 0.1, foreach=True),
        "fused": lambda: torch.optim.Adam([weight, bias], 0.1, fused=True),
    }
    optimizer = optimizers[KIND]()

    def step():
        optimizer.zero_grad()
        made = F.silu(F.dropout(inputs * weight, 0.2) + bias).sigmoid()
        loss = ((made - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    print([step() for _ in range(12)])
    for value in (weight, weight.grad, bias, *optimizer.state[weight].values()):
        print(digest(value) if torch.is_tensor(value) else value)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "lists", "fused"])
def test_training(tmp_path: Path, kind: str) -> None:
    figures = both(tmp_path, f"KIND = {kind!r}\n" + _dedented(TRAIN)).figures
    assert all(layer["exact"] for layer in figures["split_layers"])
    assert figures["divergence_count"] == 0
    assert figures["planned_iteration_count"] >= 3, "iterations are alike once the verdicts are there"
    assert figures["split_part_count"] > 10 * figures["split_function_count"] > 0


def _dedented(source: str) -> str:
    import textwrap

    return textwrap.dedent(source)


MODES = """
    import threading
    import torch.nn.functional as F

    weight = torch.nn.Parameter(torch.randn(512, 1040))
    inputs = torch.rand(512, 1040)

    def loss():
        return (F.gelu(inputs * weight) + weight).sum()

    loss().backward()
    show("gradient", weight.grad)
    weight.grad = None
    thread = threading.Thread(target=lambda: loss().backward())
    thread.start()
    thread.join()
    show("of another thread", weight.grad)
    (once,) = torch.autograd.grad(loss(), weight, create_graph=True)
    print(once.requires_grad)
    (twice,) = torch.autograd.grad(once.sum(), weight)
    show("twice", twice)
    with torch.no_grad():
        made = weight * 2
        print(made.requires_grad, made.grad_fn)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        show("autocast", F.gelu(inputs) * 2)
    made = weight * 2
    print(type(made.grad_fn).__name__, made._version, weight._version)
    made.add_(1)
    print(type(made.grad_fn).__name__, made._version)
    part = made[3:500]
    part.mul_(inputs[3:500])
    print(type(part.grad_fn).__name__, part._version, made._version, made._is_view(), part._base is made)
    made.sum().backward()
    show("through a view", weight.grad)
    kept = weight.exp()
    with torch.no_grad():
        kept.add_(1)
    try:
        kept.sum().backward()
    except RuntimeError as error:
        print("modified by an inplace operation" in str(error))
    other = torch.func.grad(lambda value: (value * inputs).sum())(weight.detach())
    show("torch.func", other)
    show("vmap", torch.func.vmap(lambda row: row * 2 + 1)(inputs))

    def one():  # lists larger than the budget, of elements most of which fit
        return [torch.rand(size) + 0.5 for size in (40_000, 50_000, 60_000, 300_000, 10_000)]

    numbers = [0.5, -1.25, 2.0, 0.75, 3.0]
    a, b, c, tensor = one(), one(), one(), torch.tensor(numbers)
    for name, given in (("add", (a, numbers)), ("pow", (a, numbers)), ("pow", (2.0, a)), ("clamp_min", (a, numbers)),
                        ("lerp", (a, b, numbers)), ("addcdiv", (a, b, c, numbers)), ("addcdiv", (a, b, c, tensor)),
                        ("addcmul", (a, b, c, numbers)), ("addcmul_", (a, b, c, tensor)), ("mul_", (a, numbers))):
        for result in getattr(torch, "_foreach_" + name)(*given) or a:
            show(name, result)
"""


@pytest.mark.slow
def test_below_autograd(tmp_path: Path) -> None:
    """Gradients, versions, views and modes are as if nothing had been split."""
    figures = both(tmp_path, MODES).figures
    assert figures["split_function_count"] > 20
