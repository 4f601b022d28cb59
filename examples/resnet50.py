"""Train ResNet-50 on handwritten digits, in plain PyTorch.

Data   the 1,797 digits that scikit-learn ships in its wheel (8x8 pixels; nothing is downloaded), enlarged to
       ``--image-size`` and repeated over three channels.
Model  the 50-layer network of He et al., "Deep Residual Learning for Image Recognition" (2015), table 1, with the
       stride on the 3x3 convolution. With 1,000 classes it has 25,557,032 parameters; here it has 10 classes.

Seeded and deterministic: two runs with the same arguments on one machine end with the same bits.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VALIDATION_IMAGES = 256


class Bottleneck(nn.Module):
    """1x1 convolution down to ``width`` channels, 3x3, 1x1 up to ``4 * width``, and the way around."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        # The block starts as the identity, which lets the whole depth learn from the first steps on.
        nn.init.zeros_(self.bn3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


class ResNet50(nn.Module):
    """(batch, 3, height, width) images to (batch, classes) logits."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        stages = []
        channels = 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        x = self.stages(x).mean(dim=(2, 3))
        logits: Tensor = self.classifier(x)
        return logits


def load_digits(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The digits in a seeded order: (1797, 1, 8, 8) float32 pixels around zero, and (1797,) int64 classes."""
    from sklearn import datasets

    digits = datasets.load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    classes = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(classes), generator=generator)
    return pixels[order], classes[order]


def enlarge(pixels: Tensor, size: int) -> Tensor:
    """(n, 1, 8, 8) digits to (n, 3, size, size) images."""
    return F.interpolate(pixels, size=(size, size), mode="bilinear").repeat(1, 3, 1, 1)


def validate(model: nn.Module, pixels: Tensor, classes: Tensor, arguments: argparse.Namespace) -> tuple[float, float]:
    """Mean loss and accuracy (0 to 1) over digits that training never saw."""
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(classes), arguments.batch_size):
            target = classes[start : start + arguments.batch_size].to(arguments.device)
            images = pixels[start : start + arguments.batch_size].to(arguments.device)
            logits = model(enlarge(images, arguments.image_size))
            loss += F.cross_entropy(logits, target, reduction="sum").item()
            correct += int((logits.argmax(dim=1) == target).sum().item())
    model.train()
    return loss / len(classes), correct / len(classes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train ResNet-50 on scikit-learn's handwritten digits.")
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step (default %(default)s)")
    parser.add_argument("--image-size", type=int, default=64, help="pixels on a side (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="training steps (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="of SGD (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="such as cuda (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument("--save", metavar="FILE", help="write the final state and the losses with torch.save")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(arguments.seed)

    pixels, classes = load_digits(generator)
    held_pixels, held_classes = pixels[:VALIDATION_IMAGES], classes[:VALIDATION_IMAGES]
    pixels, classes = pixels[VALIDATION_IMAGES:], classes[VALIDATION_IMAGES:]

    model = ResNet50(classes=10).to(arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.learning_rate, momentum=0.9, weight_decay=1e-4)
    print(f"ResNet-50, {sum(p.numel() for p in model.parameters()):,} parameters, {len(classes)} digits")

    trained = torch.compile(model) if arguments.compile else model
    losses: list[float] = []
    for step in range(arguments.steps):
        began = time.perf_counter()
        batch = torch.randint(len(classes), (arguments.batch_size,), generator=generator)
        images, target = pixels[batch].to(arguments.device), classes[batch].to(arguments.device)
        loss = F.cross_entropy(trained(enlarge(images, arguments.image_size)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1:4d}  loss {losses[-1]:.6f}  {time.perf_counter() - began:.3f} s", flush=True)

    validation_loss, accuracy = validate(model, held_pixels, held_classes, arguments)
    print(f"validation loss {validation_loss:.4f}, accuracy {accuracy:.1%} of {VALIDATION_IMAGES} unseen digits")
    if arguments.save:
        results = {"losses": losses, "validation_loss": validation_loss, "accuracy": accuracy}
        torch.save({"model": model.state_dict(), "results": results}, arguments.save)


if __name__ == "__main__":
    main()
