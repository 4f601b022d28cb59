"""What programs of trainers share: their arguments, their model and data, the figures they saw, and their results."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from program import finish, warm_vector_functions
from transformers import GPT2Config, GPT2LMHeadModel

import ooc.pytorch

STEPS, MIDDLE = 8, 4  # optimizer steps, and after how many the checkpoint is made


def begin() -> argparse.Namespace:
    """Seeds PyTorch. Arguments: where checkpoints and logs go, and whether to go on from the checkpoint there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True, help="for the results, which have to be the same bits")
    parser.add_argument("--resume", type=Path, help="the folder of the program that made the checkpoint")
    torch.use_deterministic_algorithms(True)
    warm_vector_functions()
    torch.manual_seed(0)
    return parser.parse_args()


def model() -> GPT2LMHeadModel:
    """With dropout, so that a resumed run needs the random state, too."""
    size = {"vocab_size": 512, "n_positions": 64, "n_embd": 256, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**size, use_cache=False, bos_token_id=None, eos_token_id=None))


def samples(batch: int) -> list[dict[str, torch.Tensor]]:
    """As many as all steps of two ranks take."""
    tokens = torch.randint(512, (2 * STEPS * batch, 64), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


class Witness:
    """Keeps every summary that the callback asks for."""

    def __init__(self) -> None:
        self.summaries: list[dict[str, Any]] = []
        plain = ooc.pytorch.summary

        def summary() -> dict[str, Any]:
            self.summaries.append(plain())
            return self.summaries[-1]

        ooc.pytorch.summary = summary

    def write(self, folder: Path, logged: list[dict[str, Any]], bar: dict[str, Any] | None = None) -> None:
        """The summaries beside what is in the trainer's log, and what its progress bar shows at the end."""
        figures = {"logged": logged, "summaries": self.summaries, "bar": bar}
        (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


def end(path: Path, trained: torch.nn.Module, optimizer: Any, losses: list[float]) -> None:
    """`losses` are those after the checkpoint, which a resumed run has, too."""
    results = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()["state"], "losses": losses}
    finish(str(path), results)
