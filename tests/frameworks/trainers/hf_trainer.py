"""Hugging Face's Trainer with our callback: two batches a step, a checkpoint in the middle."""

from typing import Any

from training import MIDDLE, STEPS, Witness, begin, end, model, samples
from transformers import Trainer, TrainerCallback, TrainingArguments

from ooc.transformers import OutOfCoreCallback


class Reporter(TrainerCallback):
    """As those that the trainer has for TensorBoard and others: before the program's own callbacks."""

    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.reported.append(dict(logs))


def main() -> None:
    arguments = begin()
    witness = Witness()
    settings = TrainingArguments(
        output_dir=str(arguments.folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=MIDDLE,
        report_to=[],
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model(), settings, train_dataset=samples(4), callbacks=[OutOfCoreCallback()])
    reporter = Reporter()
    trainer.callback_handler.callbacks.insert(0, reporter)
    middle = arguments.resume and str(arguments.resume / f"checkpoint-{MIDDLE}")
    trainer.train(resume_from_checkpoint=middle)
    history = trainer.state.log_history
    resumed = MIDDLE if middle else 0  # what the checkpoint's process had logged comes first
    assert reporter.reported == [{name: entry[name] for name in entry if name != "step"} for entry in history[resumed:]]
    if trainer.is_world_process_zero():
        witness.write(arguments.folder, history[resumed:])
    losses = [entry["loss"] for entry in history if "loss" in entry][MIDDLE:]
    end(arguments.save, trainer.model, trainer.optimizer, losses)


if __name__ == "__main__":
    main()
