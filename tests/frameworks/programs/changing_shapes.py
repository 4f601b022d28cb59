"""Batches of several sequence lengths in turn, and a smaller last one: each shape has a sequence of its own."""

import torch
import torch.nn.functional as F
from program import begin, finish, train
from torch import Tensor, nn

LENGTHS = (64, 128, 256, 128, 64, 256, 64, 128, 256)


class Encoder(nn.Module):
    """(batch, time) tokens to (batch, time, 512) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(512, 128)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True),
            num_layers=3,
            enable_nested_tensor=False,
        )
        self.output = nn.Linear(128, 512)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.layers(self.token(tokens)))
        return logits


def main() -> None:
    path = begin()
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randint(512, (8, length)) for length in LENGTHS] + [torch.randint(512, (5, 64))]

    def loss_of(step: int) -> Tensor:
        tokens = batches[step]
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    losses = train(model, optimizer, len(batches), loss_of)
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
