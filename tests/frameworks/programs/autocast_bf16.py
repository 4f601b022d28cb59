"""Training under bfloat16 autocast: convolutions, linear layers and attention, with float32 parameters."""

import torch
import torch.nn.functional as F
from program import begin, finish, train
from torch import Tensor, nn


class Mixed(nn.Module):
    """(batch, 3, 32, 32) images to (batch, 10) logits, by way of attention over the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
        )
        self.block = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolutions(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.classifier(self.block(y).mean(dim=1))
        return logits


def main() -> None:
    path = begin()
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(3, 32, 3, 32, 32)
    labels = torch.randint(10, (3, 32))

    def loss_of(step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(images[step])
        assert logits.dtype == torch.bfloat16
        return F.cross_entropy(logits.float(), labels[step])

    losses = train(model, optimizer, 3, loss_of)
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
