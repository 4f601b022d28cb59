"""Saving and loading in the middle of training, by every way that reads a storage without an operator."""

import copy
import io
import os
import pickle
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import nn


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(640, 640), nn.GELU()]
    return nn.Sequential(*layers)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loaded(state: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with the saved state."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def main() -> None:
    path = begin()
    x = torch.randn(512, 640)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = {"first": steps(model, optimizer, x, 3)}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    buffer = io.BytesIO()
    torch.save(state, buffer)
    copied_model, copied_optimizer_state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    pickled = pickle.dumps(state)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "state.pt")
        torch.save(state, file)
        old_file = os.path.join(folder, "old.pt")
        torch.save(state, old_file, _use_new_zipfile_serialization=False)
        losses["original"] = steps(model, optimizer, x, 3)

        buffer.seek(0)
        ways: dict[str, dict[str, Any]] = {
            "buffer": torch.load(buffer, weights_only=True),
            "file": torch.load(file, weights_only=True),
            "mapped": torch.load(file, weights_only=True, mmap=True),
            "old": torch.load(old_file, weights_only=True),
            "pickle": pickle.loads(pickled),
            "deepcopy": {"model": copied_model.state_dict(), "optimizer": copied_optimizer_state},
        }
        results: dict[str, Any] = {"original": model.state_dict()}
        for name, saved in ways.items():
            other, other_optimizer = loaded(saved)
            losses[name] = steps(other, other_optimizer, x, 3)
            results[name] = other.state_dict()
            assert losses[name] == losses["original"], name
            for key, tensor in model.state_dict().items():
                assert torch.equal(tensor, results[name][key]), (name, key)
    finish(path, {"losses": losses, "optimizer": optimizer.state_dict(), "model": results["original"]})


if __name__ == "__main__":
    main()
