"""A four-layer LSTM and a bidirectional GRU over packed sequences of different lengths."""

import torch
from program import begin, finish, train
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Recurrent(nn.Module):
    """(batch, time, 64) to (batch, 8) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=4, dropout=0.1, batch_first=True)
        self.gru = nn.GRU(256, 128, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(256, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        packed, _ = self.gru(pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False))
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        logits: Tensor = self.classifier(padded.mean(dim=1))
        return logits


def main() -> None:
    path = begin()
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 64, 24, 64)
    lengths = torch.randint(8, 25, (64,), device="cpu")
    labels = torch.randint(8, (4, 64))
    losses = train(model, optimizer, 4, lambda step: nn.functional.cross_entropy(model(x[step], lengths), labels[step]))
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
