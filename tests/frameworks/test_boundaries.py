"""Where iterations end: counted by what they are told, in plain memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
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
