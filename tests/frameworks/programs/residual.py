"""ResNet-50, which is the example's: many convolutions, whose weights a compiler lays out anew before the first."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from program import begin, finish, train

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))


def main() -> None:
    from resnet50 import ResNet50

    path = begin()
    model = ResNet50(classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    images, classes = torch.randn(5, 16, 3, 64, 64), torch.arange(16) % 10
    losses = train(model, optimizer, 5, lambda step: F.cross_entropy(model(images[step]), classes))
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
