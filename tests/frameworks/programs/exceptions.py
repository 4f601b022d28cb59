"""Exceptions in every part of a step, an interrupt among them; training goes on after each."""

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import Tensor, nn


class Mishap(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Mishap("in backward")


def raise_mishap(*_: Any) -> None:
    raise Mishap("in a hook")


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    path = begin()
    # A shell that starts a program in the background has it ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    layers: list[nn.Module] = [nn.Linear(256, 768), nn.GELU()]
    for _ in range(5):
        layers += [nn.Linear(768, 768), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(768, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(1024, 256)
    losses: list[float] = []
    raised: list[str] = []

    def step(spoil: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(spoil(model(x)), x.flip(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    def mishap(action: Callable[[], Any]) -> None:
        try:
            action()
        except Mishap:
            raised.append("Mishap")
        except RuntimeError:  # without memory, a more special one where the memory is a device's
            raised.append("RuntimeError")
        except KeyboardInterrupt:
            raised.append("KeyboardInterrupt")
        else:
            raise AssertionError("nothing was raised")

    def hooked(module: nn.Module, hook: Callable[..., Any]) -> None:
        handle = module.register_forward_hook(hook)
        try:
            step()
        finally:
            handle.remove()

    step()
    step()
    mishap(lambda: hooked(model[2], raise_mishap))
    step()
    mishap(lambda: step(RaisesInBackward.apply))
    step()
    # An operator that refuses its arguments, and one that fails when it is half done.
    mishap(lambda: step(lambda y: y @ y))
    mishap(lambda: step(lambda y: torch.linalg.inv(torch.zeros(300, 300)).sum() * y))
    step()
    mishap(lambda: hooked(model[3], interrupt))
    step()
    handle = optimizer.register_step_pre_hook(raise_mishap)
    mishap(step)
    handle.remove()
    # More memory than any machine has; the allocator says no, and nothing is lost.
    mishap(lambda: torch.empty(1 << 60))
    step()
    step()
    assert len(raised) == 7, raised
    finish(path, {"model": model.state_dict(), "losses": losses, "raised": raised})


if __name__ == "__main__":
    main()
