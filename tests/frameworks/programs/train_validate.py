"""Epochs of training and validation: a scheduler, batch norm in both modes, an averaged copy, the best state kept."""

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64 * 16 * 16, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def validate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Mean loss over batches of 48; the last one is smaller."""
    model.eval()
    with torch.inference_mode():
        total = sum(
            F.cross_entropy(model(x), y, reduction="sum").item()
            for x, y in zip(images.split(48), labels.split(48), strict=True)
        )
    model.train()
    return total / len(labels)


def main() -> None:
    path = begin()
    model = network()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
    images, labels = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    held_images, held_labels = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    losses, validation, best = [], [], {}
    for _ in range(2):
        for batch in torch.randperm(128).split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            averaged.update_parameters(model)
            losses.append(loss.item())
        scheduler.step()
        validation.append(validate(model, held_images, held_labels))
        if validation[-1] == min(validation):
            best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = {"model": model.state_dict(), "averaged": averaged.state_dict(), "best": best}
    finish(path, results | {"losses": losses, "validation": validation})


if __name__ == "__main__":
    main()
