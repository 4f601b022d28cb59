"""A loop of the program's own with accelerate: two batches a step, its whole state saved in the middle."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from training import MIDDLE, STEPS, Witness, begin, end, model, samples

from ooc import trainers


def main() -> None:
    arguments = begin()
    witness = Witness()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    loader = DataLoader(samples(4), batch_size=2)
    trained, optimizer, loader = accelerator.prepare(trained, optimizer, loader)
    if arguments.resume:
        accelerator.load_state(str(arguments.resume / "state"))
        loader = accelerator.skip_first_batches(loader, 2 * MIDDLE)
    else:
        trainers.begin()
    losses, logged = [], []
    for index, batch in enumerate(loader, start=2 * MIDDLE if arguments.resume else 0):
        if index == 2 * STEPS:
            break
        torch.manual_seed(index)  # a new loader draws a number from the random state that was loaded
        with accelerator.accumulate(trained):
            loss = trained(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if accelerator.sync_gradients:
            logged.append(trainers.figures())
        if index + 1 == 2 * MIDDLE:
            accelerator.save_state(str(arguments.folder / "state"))
    if accelerator.is_main_process:
        witness.write(arguments.folder, logged)
    trainers.begin()
    trainers.write_report(arguments.folder)
    end(arguments.save, accelerator.unwrap_model(trained), optimizer.optimizer, losses[-2 * (STEPS - MIDDLE) :])
    accelerator.end_training()


if __name__ == "__main__":
    main()
