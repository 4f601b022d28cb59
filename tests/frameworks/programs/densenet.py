"""A small DenseNet: every layer reads the concatenation of all before it, so early outputs live long."""

import torch
import torch.nn.functional as F
from program import begin, finish, train
from torch import Tensor, nn


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, earlier: list[Tensor]) -> Tensor:
        y = self.conv1(F.relu(self.norm1(torch.cat(earlier, dim=1))))
        out: Tensor = self.conv2(F.relu(self.norm2(y)))
        return out


class DenseBlock(nn.Module):
    def __init__(self, channels: int, growth: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(channels + index * growth, growth) for index in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, dim=1)


def main() -> None:
    path = begin()
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        DenseBlock(16, 12, 4),
        nn.Sequential(nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.Conv2d(64, 32, 1), nn.AvgPool2d(2)),
        DenseBlock(32, 12, 4),
        nn.BatchNorm2d(80),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(80, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    images = torch.randn(4, 32, 3, 32, 32)
    labels = torch.randint(10, (4, 32))
    losses = train(model, optimizer, 4, lambda step: F.cross_entropy(model(images[step]), labels[step]))
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
