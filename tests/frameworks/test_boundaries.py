"""Where iterations end: counted by what they are told, in plain memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

from ooc.pytorch import boundaries
from ooc.pytorch.patches import Patches


@pytest.fixture
def ended() -> Iterator[list[str]]:
    """Grows by one for every iteration that ends."""
    found: list[str] = []
    with Patches() as patches:
        boundaries.install(patches, lambda: found.append("an iteration"))
        yield found


def test_inference_ends_with_the_outermost_module(ended: list[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model(torch.ones(1, 2))
        assert len(ended) == 1
        model(torch.ones(1, 2))
    assert len(ended) == 2


@pytest.mark.parametrize("embedding", [nn.Identity(), None], ids=["after a module", "as the first module"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_training_ends_with_the_step_and_not_in_checkpointed_blocks(
    ended: list[str], embedding: nn.Module | None, reentrant: bool
) -> None:
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for step in range(3):
        hidden: Tensor = torch.ones(1, 2, requires_grad=True)
        if embedding is not None:
            hidden = embedding(hidden)
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        hidden.sum().backward()
        assert len(ended) == step
        optimizer.step()
        assert len(ended) == step + 1


def test_a_module_without_gradients_in_the_middle_of_training(ended: list[str]) -> None:
    model, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = model(torch.ones(1, 2))
    with torch.no_grad():
        target = teacher(torch.ones(1, 2))
    (hidden - target).sum().backward()
    assert not ended
    optimizer.step()
    with torch.no_grad():
        teacher(torch.ones(1, 2))
    assert len(ended) == 2


def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


class Twice(torch.optim.SGD):
    """Calls the step that it inherits, which PyTorch hooks too once there is a plain SGD."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Drives another optimizer, as Lookahead and others do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.fails = inner, False

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        if self.fails:
            raise RuntimeError("after the inner step")
        return result


def around(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Around(torch.optim.SGD(list(parameters), lr=0.1))


def twice(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    torch.optim.SGD(parameters, lr=0.1)
    return Twice(parameters, lr=0.1)


@pytest.mark.parametrize("make", [around, twice])
def test_a_step_inside_another_optimizers_step_is_no_iteration(ended: list[str], make: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters())
    for step in range(3):
        train(optimizer, model)
        assert len(ended) == step + 1


def test_sharded_optimizer_state_ends_one_iteration_a_step(ended: list[str]) -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(6):
            train(optimizer, model)
            scheduler.step()
    finally:
        distributed.destroy_process_group()
    assert len(ended) == 6


def test_a_step_that_raises_hides_no_later_one(ended: list[str]) -> None:
    model = nn.Linear(2, 2)
    optimizer = around(model.parameters())
    assert isinstance(optimizer, Around)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="after the inner step"):
        train(optimizer, model)
    optimizer.fails = False
    train(optimizer, model)
    train(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert len(ended) == 2


def test_optimizers_in_turn_each_end_an_iteration(ended: list[str]) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        for model, optimizer in zip(models, optimizers):
            train(optimizer, model)
    assert len(ended) == 4


def test_a_closure_and_averaged_weights_are_part_of_a_step(ended: list[str]) -> None:
    model = nn.Linear(2, 2)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    for step in range(2):
        optimizer.step(closure)
        averaged.update_parameters(model)
        scheduler.step()
        assert len(ended) == step + 1


def test_optimizers_in_the_backward_pass_end_an_iteration_together(ended: list[str]) -> None:
    """They step one by one while gradients arrive: the iteration ends before the next pass forward."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        assert len(ended) == step
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert len(ended) == 4, "three of training, and one of validation"


def test_a_step_ends_what_optimizers_in_the_backward_pass_began(ended: list[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    early = torch.optim.SGD(model[1].parameters(), lr=0.1)
    model[1].weight.register_post_accumulate_grad_hook(lambda _: early.step())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    for step in range(3):
        train(optimizer, model)
        assert len(ended) == step + 1


def test_threads_that_serve_end_iterations_one_at_a_time() -> None:
    """The calls of the thread that took the sequence are iterations; those of others meanwhile are beside it."""
    told: list[str] = []
    free = True
    other = ThreadPoolExecutor(1)

    class Asks(nn.Module):
        def forward(self, inner: nn.Module | None) -> None:
            if inner is not None:
                other.submit(infer, inner, None).result()

    def infer(model: nn.Module, *arguments: Any) -> None:
        with torch.no_grad():
            model(*arguments)

    with Patches() as patches, ThreadPoolExecutor(1) as thread, other:
        boundaries.install(patches, lambda: told.append("end"), lambda: free, lambda: told.append("beside"))
        thread.submit(infer, Asks(), Asks()).result()
        assert told == ["beside", "end"]
        free = False
        thread.submit(infer, Asks(), None).result()
        assert told == ["beside", "end", "beside"]
        free = True
        thread.submit(Asks(), None).result()  # with gradients: its training is open
        thread.submit(infer, Asks(), None).result()
        assert told == ["beside", "end", "beside"]
        Asks()(None)  # the main thread's is, too, and it may wait for what others compute
        other.submit(infer, Asks(), None).result()
        assert told == ["beside", "end", "beside"]


def test_a_thread_that_computes_for_the_main_ones_call_ends_nothing(ended: list[str]) -> None:
    with ThreadPoolExecutor(1) as pool:

        class Waits(nn.Module):
            def forward(self, x: Tensor) -> Any:
                return pool.submit(torch.no_grad()(nn.Linear(2, 2)), x).result()

        with torch.no_grad():
            Waits()(torch.ones(1, 2))
    assert len(ended) == 1
