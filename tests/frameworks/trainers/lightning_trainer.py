"""Lightning's Trainer with our callback: two batches a step, a checkpoint in the middle."""

import csv
import logging
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from training import MIDDLE, STEPS, Witness, begin, end, model, samples

from ooc.lightning import OutOfCoreCallback


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = model()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        torch.manual_seed(1000 * self.current_epoch + index)  # checkpoints of Lightning have no random state
        loss: torch.Tensor = self.inner(**batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    arguments = begin()
    witness = Witness()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=2,
        limit_train_batches=2 * MIDDLE,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        logger=CSVLogger(arguments.folder),
        callbacks=[
            OutOfCoreCallback(),
            ModelCheckpoint(dirpath=arguments.folder, filename="{step}", save_top_k=-1, every_n_epochs=1),
        ],
    )
    trained = Model()
    middle = arguments.resume and str(arguments.resume / f"step={MIDDLE}.ckpt")
    trainer.fit(trained, DataLoader(samples(4), batch_size=2), ckpt_path=middle, weights_only=False)
    assert trainer.global_step == STEPS
    if trainer.is_global_zero:
        with open(os.path.join(trainer.logger.log_dir, "metrics.csv"), encoding="utf-8") as file:
            logged: list[dict[str, Any]] = [
                {name: float(text) for name, text in row.items() if text} for row in csv.DictReader(file)
            ]
        witness.write(arguments.folder, logged, trainer.progress_bar_metrics)
    end(arguments.save, trained.inner, trainer.optimizers[0], trained.losses[-2 * (STEPS - MIDDLE) :])


if __name__ == "__main__":
    main()
