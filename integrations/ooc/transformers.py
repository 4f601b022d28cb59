"""For Hugging Face's Trainer: the session's figures in its log and progress bar, the report in its output folder::

    trainer = Trainer(..., callbacks=[ooc.transformers.OutOfCoreCallback()])
"""

from __future__ import annotations

import sys
from typing import Any

from transformers.trainer_callback import CallbackHandler, TrainerCallback

from ooc import trainers


class OutOfCoreCallback(TrainerCallback):  # type: ignore[misc]
    """Adds the summary's figures, as ``ooc_swap_in_bytes`` and the like, to everything that the trainer logs.

    They are in `trainer.state.log_history`, on the progress bar, and with whom the trainer reports to. When training
    ends, the page of `ooc.report` is written as ``ooc_report.html`` into the trainer's output folder, one for each
    rank. Under several ranks the figures are those of the rank that logs. Does nothing where the allocator is off.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the timeline, and goes before the callbacks that show the log: the trainer calls them first."""
        trainers.begin()
        handler = sys._getframe(1).f_locals.get("self")
        if isinstance(handler, CallbackHandler):  # whose list is read now, so it gets a new one
            handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        found = trainers.figures()
        if logs is not None:
            logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)  # a copy of `logs`, from before this call

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainers.write_report(args.output_dir)
