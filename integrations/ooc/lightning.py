"""For Lightning's Trainer: the session's figures in its loggers and progress bar, the report in its log folder::

    trainer = lightning.Trainer(..., callbacks=[ooc.lightning.OutOfCoreCallback()])
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ooc import trainers

_ON_THE_BAR = ("ooc_swap_in_bytes", "ooc_stall_seconds")


class OutOfCoreCallback(Callback):  # type: ignore[misc]
    """Logs the summary's figures, as ``ooc_swap_in_bytes`` and the like, every `log_every_n_steps` steps.

    What was swapped in and how long functions waited is also on the progress bar. When training ends, the page of
    `ooc.report` is written as ``ooc_report.html`` into the trainer's log folder, one for each rank. Under several
    ranks the figures are those of the rank that logs. Does nothing where the allocator is off.
    """

    def __init__(self) -> None:
        self._step = 0  # the last one that was seen: a batch whose gradients are accumulated makes none

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        trainers.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        before, self._step = self._step, trainer.global_step
        if self._step == before or self._step % trainer.log_every_n_steps:
            return
        for name, figure in trainers.figures().items():
            exact = torch.tensor(figure, dtype=torch.float64)  # Lightning's own would round bytes beyond 16 MiB
            pl_module.log(name, exact, prog_bar=name in _ON_THE_BAR, on_step=True, on_epoch=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        folder = trainer.log_dir  # asked on every rank: they tell each other
        if folder is not None:
            trainers.write_report(folder)
