"""Whole programs with `device="cuda"`: programs.py NAME prints a digest of what it computed, and the summary."""

from __future__ import annotations

import copy
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recomputed

CUDA = "cuda"
PROGRAMS: dict[str, Callable[[], None]] = {}
total = hashlib.sha256()


def program(function: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[function.__name__] = function
    return function


def show(tensors: Iterable[Tensor]) -> None:
    """Every bit counts, and the first numbers are for people."""
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        total.update(on_host.view(-1).view(torch.uint8).numpy().tobytes())


def mlp(width: int = 256, blocks: int = 6, inner: int = 4) -> nn.Sequential:
    def block() -> list[nn.Module]:
        return [
            nn.Linear(width, inner * width), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(inner * width),
            nn.Linear(inner * width, width),
        ]  # fmt: skip

    return nn.Sequential(*(layer for _ in range(blocks) for layer in block()))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.after, self.mlp = nn.LayerNorm(width), mlp(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class Language(nn.Module):
    def __init__(self, words: int = 512, width: int = 192, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> None:
    losses = []
    for batch in batches:
        loss = model(batch).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show([*losses, *model.parameters()])


def batches(steps: int = 5, rows: int = 384, width: int = 256) -> Iterator[Tensor]:
    for _ in range(steps):
        yield torch.randn(rows, width, device=CUDA)


@program
def adamw_foreach() -> None:
    model = mlp().to(CUDA)
    train(model, torch.optim.AdamW(model.parameters(), foreach=True), batches())


@program
def adamw_fused() -> None:
    model = mlp().to(CUDA)
    train(model, torch.optim.AdamW(model.parameters(), fused=True), batches())


@program
def many_steps() -> None:
    """So many that a schedule of what to compute again is rehearsed and carried out."""
    model = mlp(64).to(CUDA)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), batches(14, 512, 64))


@program
def language_model() -> None:
    model = Language().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(5):
        tokens = torch.randint(512, (16, 64), device=CUDA)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.detach())
    show([*losses, *model.parameters()])


@program
def generation() -> None:
    model = Language(layers=10, length=48).to(CUDA).eval()
    tokens = torch.randint(512, (16, 8), device=CUDA)
    with torch.inference_mode():
        for _ in range(16):
            chances = model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    show([tokens])


@program
def convolutions() -> None:
    def layer(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    sizes = [(3, 24, 1), *[(24, 24, 1)] * 5, (24, 48, 2), *[(48, 48, 1)] * 3, (48, 128, 2)]
    layers = [each for size in sizes for each in layer(*size)]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128 * 16, 10)).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    for _ in range(4):
        images, labels = torch.randn(16, 3, 32, 32, device=CUDA), torch.randint(10, (16,), device=CUDA)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    show([*model.parameters(), *model.buffers()])


@program
def mixed_precision() -> None:
    model = mlp(blocks=5).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(CUDA, init_scale=2.0**12, growth_interval=2)
    for batch in batches(5, 256):
        with torch.autocast(CUDA, torch.float16):
            loss = model(batch).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    show([*model.parameters(), torch.tensor(scaler.get_scale())])


@program
def checkpointing() -> None:
    model = nn.ModuleList(Block(256) for _ in range(5)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        x = torch.randn(8, 48, 256, device=CUDA)
        for block in model:
            x = recomputed(block, x, use_reentrant=False)
        x.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    show(model.parameters())


@program
def side_streams() -> None:
    """Each batch is made on another stream, whose next one may get its memory while the main one still reads it."""
    model, side = mlp().to(CUDA), torch.cuda.Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def made() -> Iterator[Tensor]:
        for _ in range(5):
            with torch.cuda.stream(side):
                batch = torch.randn(384, 256, device=CUDA)
                batch = batch.mul_(0.5).add_(batch.mean())
            torch.cuda.current_stream().wait_stream(side)
            batch.record_stream(torch.cuda.current_stream())
            yield batch

    train(model, optimizer, made())


@program
def loader() -> None:
    """A loader with workers' pinned batches, the next one under way while this one is used."""
    data = torch.utils.data.TensorDataset(torch.randn(384 * 5, 256))
    workers = 0 if os.environ.get("TORCH_CUDA_SANITIZER") else 1  # the sanitizer uses CUDA in the worker, too
    loading = torch.utils.data.DataLoader(data, batch_size=384, pin_memory=True, num_workers=workers)
    model, side = mlp().to(CUDA), torch.cuda.Stream()
    optimizer = torch.optim.AdamW(model.parameters())

    def prefetched() -> Iterator[Tensor]:
        last = None
        for (batch,) in loading:
            with torch.cuda.stream(side):
                following = batch.to(CUDA, non_blocking=True)
            if last is not None:
                yield last
            torch.cuda.current_stream().wait_stream(side)
            following.record_stream(torch.cuda.current_stream())
            last = following
        assert last is not None
        yield last

    train(model, optimizer, prefetched())


@program
def graphs() -> None:
    """A training step that is captured and replayed, beside ordinary work that makes it leave nothing behind."""
    model, other = mlp(128, 2).to(CUDA), mlp().to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.01)
    static = torch.randn(64, 128, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            model(static).pow(2).mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    made = F.gelu(static.repeat(4, 1))  # may be made again; the graph reads it
    static.mean()  # before it runs, what was made can be dropped
    with torch.cuda.graph(graph):
        loss = model(static).pow(2).mean() + made.mean()
        loss.backward()
        optimizer.step()
    # PyTorch sets the random offset of the graph to 0 on the stream that it captures, and no replay waits for that.
    torch.cuda.synchronize()
    for batch in batches(4, 384):
        static.copy_(batch[:64, :128])
        graph.replay()
        show([loss])
        other(batch).pow(2).mean().backward()
        elsewhere.step()
        elsewhere.zero_grad()
    show([*model.parameters(), *other.parameters()])


@program
def compiled() -> None:
    model = mlp().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    train(torch.compile(model, backend="aot_eager"), optimizer, batches())


@program
def two_threads() -> None:
    """Each has a model and a stream of its own."""
    results: dict[int, list[Tensor]] = {}
    models = [mlp(256, 3).to(CUDA) for _ in range(2)]
    data = [[torch.randn(384, 256) for _ in range(4)] for _ in range(2)]
    for model in models:
        model.eval()  # dropout of two threads shares a generator
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            optimizer = torch.optim.AdamW(models[index].parameters())
            for batch in data[index]:
                models[index](batch.to(CUDA)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results[index] = [p.detach().cpu() for p in models[index].parameters()]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    show([*results[0], *results[1]])


@program
def double_backward() -> None:
    model = mlp(blocks=4).to(CUDA)
    optimizer = torch.optim.Adam(model.parameters())
    for batch in batches(3, 256):
        batch.requires_grad_()
        (slope,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        (slope.norm(dim=1) - 1).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    show(model.parameters())


@program
def evaluated_and_saved() -> None:
    """Trained, evaluated, saved to the host and loaded into another model, which goes on."""
    model = mlp(blocks=4).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, batches(2))
    saved = {name: value.cpu() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.eval()
        show([model(batch).sum() for batch in batches(2)])
    other = copy.deepcopy(model)
    other.load_state_dict(saved)
    train(other.train(), torch.optim.SGD(other.parameters(), lr=0.1), batches(2))


def hugging_face(model: nn.Module, words: int = 512) -> None:
    model = model.to(CUDA).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        tokens = torch.randint(words, (8, 64), device=CUDA)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    show([*losses, *model.parameters()])


@program
def hf_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    hugging_face(GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=192, n_layer=6, n_head=4)))


@program
def hf_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, max_position_embeddings=64, **sizes))
    model.gradient_checkpointing_enable()
    hugging_face(model)


@program
def hf_bert() -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4}
    hugging_face(BertForMaskedLM(BertConfig(vocab_size=512, max_position_embeddings=64, **sizes)))


def example(name: str, *arguments: str) -> None:
    """A script of `examples/`, whose final state counts."""
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [name, "--device", CUDA, "--save", os.path.join(folder, "state"), *arguments]
        importlib.import_module(f"examples.{name}").main()
        state = torch.load(sys.argv[4])
    show(state["model"].values())
    total.update(json.dumps(state["results"]).encode())


@program
def example_gpt() -> None:
    example("gpt", "--layers", "4", "--width", "128", "--context", "64", "--batch-size", "16", "--text-bytes", "200000")


@program
def example_resnet50() -> None:
    example("resnet50", "--batch-size", "8", "--image-size", "32", "--steps", "3")


@program
def functions_in_parts() -> None:
    """Functions that do not fit the device: some are divided, and what cannot be divided uses host memory in place."""
    from ooc.pytorch.splitting.verification import Trial, tensors_in

    outcome = Trial._outcome

    def on_the_gpu(trial: Trial, run: Callable[..., object], given: object) -> object:
        def looked_at(*arguments: object, **keywords: object) -> object:
            assert all(t.is_cuda or not t.dim() for t in tensors_in((arguments, keywords)))
            return run(*arguments, **keywords)

        return outcome(trial, looked_at, given)

    Trial._outcome = on_the_gpu
    words, width = 6144, 32
    embedding, norm, head = nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, words)
    model = nn.Sequential(embedding, norm, nn.Dropout(0.1), head).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    losses = []
    for _ in range(2):
        tokens = torch.randint(words, (256,), device=CUDA)
        logits = model(tokens)
        loss = F.cross_entropy(logits, tokens.flip(0)) + logits.cumsum(0).tanh().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    noise = F.dropout(torch.rand(1200, 1200, device=CUDA), 0.3)
    losses += [noise.sum(), noise.normal_().sum(), torch.multinomial(noise.abs(), 5).sum()]
    images = torch.randn(2, 3, 160, 160, device=CUDA, requires_grad=True)
    convolved = F.max_pool2d(F.gelu(F.conv2d(images, torch.randn(16, 3, 3, 3, device=CUDA), padding=1)), 2)
    pairs = torch.cat([convolved, convolved.transpose(2, 3)], 1).double()
    pairs.std(dim=(2, 3)).sum().backward()
    pairs = pairs.detach()
    late = copy.deepcopy(torch.zeros_like(pairs).copy_(pairs.cpu()).sort(dim=-1).values)
    file = io.BytesIO()
    torch.save({"late": late, "large": late.repeat(2, 1, 1, 1)}, file)
    file.seek(0)
    show([torch.tensor(late.tolist()), *torch.load(file).values()])
    show([*losses, *model.parameters(), images.grad, pairs, late, torch.randn(3, device=CUDA)])


@program
def distributed() -> None:
    """Two processes, each with a device of its own, whose gradients are summed by gloo."""
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            where = {"WORLD_SIZE": "2", "PROGRAM_MEETS": os.path.join(folder, "meeting")}
            ranks = [
                subprocess.Popen(sys.orig_argv, env={**os.environ, **where, "RANK": str(rank)}, stdout=subprocess.PIPE)
                for rank in range(2)
            ]
            lines = [rank.communicate()[0].splitlines()[-1] for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks)
        found = [json.loads(line) for line in lines]
        assert found[0]["digest"] == found[1]["digest"]
        print(json.dumps(found[0]))
        os._exit(0)
    dist = torch.distributed
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{os.environ['PROGRAM_MEETS']}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(mlp().to(CUDA))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(rank)
    for batch in batches(4, 256):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    show(model.parameters())
    dist.destroy_process_group()


def main(name: str) -> None:
    torch.manual_seed(1234)
    PROGRAMS[name]()
    torch.cuda.synchronize()
    import ooc.pytorch as ooc

    print(json.dumps({"digest": total.hexdigest(), "summary": ooc.summary()}, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
