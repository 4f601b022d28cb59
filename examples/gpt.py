"""Train a GPT on the source text of Python's standard library, in plain PyTorch.

Data   the ``.py`` files of the standard library of the Python that runs this, as bytes: text that every machine
       has. A byte is a token; the vocabulary is the 256 bytes.
Model  a decoder-only transformer: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019),
       with layer norm ahead of each half of a block, and the output layer sharing the embedding's weights.

Seeded and deterministic: two runs with the same arguments on one machine end with the same bits.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sysconfig
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
VALIDATION_SHARE = 0.05


class Attention(nn.Module):
    """Causal self-attention with ``heads`` heads over (batch, time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.project(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention, then a two-layer network four times as wide; each adds to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x))))
        return y


class GPT(nn.Module):
    """(batch, time) bytes to (batch, time, 256) logits of the next byte."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, BYTES, bias=False)
        self.output.weight = self.token.weight
        self.apply(self._initialise)
        for name, parameter in self.named_parameters():
            # Residual branches add up; GPT-2 scales their last layer so that the sum keeps its variance.
            if name.endswith(("project.weight", "narrow.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int, generator: torch.Generator) -> bytes:
        """``prompt`` and ``length`` more bytes, each drawn from the model's distribution at temperature 0.8."""
        tokens = torch.tensor([list(prompt)], dtype=torch.int64, device=self.token.weight.device)
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1] / 0.8
            drawn = torch.multinomial(logits.softmax(dim=-1).cpu(), 1, generator=generator)
            tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
        return bytes(tokens[0].tolist())


def load_text(limit: int) -> Tensor:
    """The first ``limit`` bytes of the standard library's source, files in sorted order, as uint8."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def draw_batch(text: Tensor, arguments: argparse.Namespace, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random stretches of the text and the same stretches one byte later: two (batch, context) of int64."""
    starts = torch.randint(len(text) - arguments.context, (arguments.batch_size, 1), generator=generator)
    stretch = text[starts + torch.arange(arguments.context + 1)].to(arguments.device, torch.int64)
    return stretch[:, :-1], stretch[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of the next byte, in nats."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT on the Python standard library's source text.")
    parser.add_argument("--batch-size", type=int, default=24, help="stretches in a step (default %(default)s)")
    parser.add_argument("--context", type=int, default=256, help="bytes in a stretch (default %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks (default %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the residual stream (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="training steps (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of AdamW (default %(default)s)")
    parser.add_argument("--text-bytes", type=int, default=8_000_000, help="of source to read (default %(default)s)")
    parser.add_argument("--sample-bytes", type=int, default=32, help="to write at the end (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="such as cuda (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and sample (default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument("--save", metavar="FILE", help="write the final state and the losses with torch.save")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.use_deterministic_algorithms(True)
    # MKL's square root may answer with 12 good bits when its first call in a process comes from two threads at once
    # (seen in 5 of 6,000 processes), and AdamW's would. One element takes one thread.
    torch.ones(1).sqrt()
    generator = torch.Generator().manual_seed(arguments.seed)

    text = load_text(arguments.text_bytes)
    held = int(len(text) * VALIDATION_SHARE)
    text, held_text = text[:-held], text[-held:]

    model = GPT(arguments.layers, arguments.heads, arguments.width, arguments.context).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    print(f"GPT, {sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text")

    trained = torch.compile(model) if arguments.compile else model
    losses: list[float] = []
    for step in range(arguments.steps):
        began = time.perf_counter()
        loss = loss_of(trained, draw_batch(text, arguments, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1:4d}  loss {losses[-1]:.6f}  {time.perf_counter() - began:.3f} s", flush=True)

    model.eval()
    with torch.no_grad():
        validation_loss = loss_of(model, draw_batch(held_text, arguments, generator)).item()
    sample = model.sample(b"def ", arguments.sample_bytes, generator)
    print(f"validation loss {validation_loss:.4f}; a sample: {sample.decode(errors='replace')!r}")
    if arguments.save:
        results = {"losses": losses, "validation_loss": validation_loss, "sample": list(sample)}
        torch.save({"model": model.state_dict(), "results": results}, arguments.save)


if __name__ == "__main__":
    main()
