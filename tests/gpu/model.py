"""Trains one model on the GPU, in plain PyTorch; deterministic, so that two runs end with the same bits.

    python model.py NAME RESULTS        NAME: resnet50, gpt2, llama or unet

Prints one JSON object with the most memory that was allocated. It knows nothing of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
Loss = Callable[[], Tensor]


class LlamaBlock(nn.Module):
    """RMS norm, rotary positions, grouped keys and values, a gated network (as in Touvron et al., 2023)."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.head = heads, groups, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * groups * self.head, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.gate, self.widen = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.narrow = nn.Linear(3 * width, width, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        length = x.shape[2]
        speeds = 10000.0 ** (-torch.arange(0, self.head, 2, device=x.device) / self.head)
        angles = torch.arange(length, device=x.device)[:, None] * speeds
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack(
            (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()), -1
        ).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        query = self.query(y).view(batch, length, self.heads, self.head).transpose(1, 2)
        key, value = self.key_value(y).view(batch, length, 2, self.groups, self.head).permute(2, 0, 3, 1, 4).unbind(0)
        key, value = (part.repeat_interleave(self.heads // self.groups, 1) for part in (self.rotate(key), value))
        y = F.scaled_dot_product_attention(self.rotate(query), key, value, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        out: Tensor = x + self.narrow(F.silu(self.gate(y)) * self.widen(y))
        return out


def llama() -> tuple[nn.Module, Loss]:
    layers = [LlamaBlock(1024, 16, 4) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(4096, 1024), *layers, nn.RMSNorm(1024), nn.Linear(1024, 4096, bias=False))
    tokens = torch.randint(4096, (8, 513))
    return model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def gpt2() -> tuple[nn.Module, Loss]:
    from gpt import GPT

    model = GPT(layers=8, heads=12, width=768, context=512)
    tokens = torch.randint(256, (16, 513))
    return model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def resnet50() -> tuple[nn.Module, Loss]:
    from resnet50 import ResNet50

    model = ResNet50(classes=100)
    images, classes = torch.randn(48, 3, 224, 224), torch.randint(100, (48,))
    return model, lambda: F.cross_entropy(model(images), classes)


def unet() -> tuple[nn.Module, Loss]:
    from unet import UNet

    model = UNet(width=32, depth=4)
    images, masks = torch.randn(8, 3, 256, 256), torch.randn(8, 2, 256, 256)
    return model, lambda: F.mse_loss(model(images), masks)


def main() -> None:
    for folder in (ROOT / "examples", ROOT / "tests" / "frameworks" / "programs"):
        sys.path.insert(0, str(folder))
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)  # the backward passes of the fast kernels add up in any order
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    makers = {"resnet50": resnet50, "gpt2": gpt2, "llama": llama, "unet": unet}
    model, loss_of = makers[sys.argv[1]]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, sys.argv[2])
    print(json.dumps({"peak_bytes": torch.cuda.max_memory_allocated(), "losses": losses}))


if __name__ == "__main__":
    main()
