"""Another of these programs with its whole model compiled: `compiled.py NAME --save FILE`."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import program
import torch
from torch import Tensor, nn


def main() -> None:
    plain_train = program.train

    def train(model: nn.Module, optimizer: Any, steps: int, loss_of: Callable[[int], Tensor]) -> list[float]:
        model.forward = torch.compile(model.forward)
        return plain_train(model, optimizer, steps, loss_of)

    program.train = train
    importlib.import_module(sys.argv.pop(1)).main()


if __name__ == "__main__":
    main()
