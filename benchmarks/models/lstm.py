"""LSTM: the large language model of Zaremba et al., "Recurrent neural network regularization" (2014), section 4.1.

Two layers of 1500, 35 steps, 10,000 words. The recurrence is PyTorch's own layer; unfused it is one operator or several
for every step, which makes the longest chains of small functions of the suite.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.steps import Step, make_step, sgd


class LanguageModel(nn.Module):
    """(length, batch) words to (length, batch, vocabulary) logits."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrence = nn.LSTM(width, width, layers)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.output(self.recurrence(self.embedding(words))[0])
        return logits


def lstm(
    batch: int, mode: str = "training", length: int = 35, width: int = 1500, layers: int = 2, vocabulary: int = 10_000
) -> Step:
    words = torch.zeros(length, batch, dtype=torch.int64)
    model = LanguageModel(vocabulary, width, layers)
    return make_step(model, words, lambda logits: F.cross_entropy(logits.flatten(0, 1), words.flatten()), sgd, mode)
