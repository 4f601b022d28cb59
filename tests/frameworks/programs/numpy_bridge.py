"""NumPy and PyTorch on the same memory: arrays kept across many operators, read and written from both sides."""

from typing import Any

import numpy as np
import torch
from program import begin, finish


class Sub(torch.Tensor):
    """A subclass without anything of its own."""


class Seen(torch.Tensor):
    """A subclass that sees every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def pressure(x: torch.Tensor) -> torch.Tensor:
    """Operators on enough other memory that whatever may leave the device does."""
    kept = [x * (1 + index / 10) for index in range(24)]
    return sum((part.tanh() for part in kept), torch.zeros_like(x))


def views(x: torch.Tensor) -> dict[str, Any]:
    """Each way to an array over a tensor's memory; written through after operators ran, read from both sides."""
    results: dict[str, Any] = {}
    ways = {
        "numpy": lambda t: t.numpy(),
        "asarray": lambda t: np.asarray(t),
        "dlpack": lambda t: np.from_dlpack(t),
        "subclass": lambda t: t.as_subclass(Sub).numpy(),
        "subclass's array": lambda t: np.asarray(t.as_subclass(Seen)),
        "subclass's buffer": lambda t: t.as_subclass(Sub).__array__(),
        "forced": lambda t: t.as_subclass(Seen).numpy(force=True),
        "base class": lambda t: torch._C.TensorBase.numpy(t),
        "subclass's dlpack": lambda t: np.from_dlpack(t.as_subclass(Sub)),
        "detached": lambda t: t.detach().view(-1).numpy().reshape(t.shape),
    }
    for name, way in ways.items():
        tensor = x.clone()
        array = way(tensor)
        before = array.sum(dtype=np.float64)
        pressed = pressure(x)
        assert array.sum(dtype=np.float64) == before, name
        if array.flags.writeable:
            array[::2] += 1.0
        tensor.mul_(2.0)
        assert np.array_equal(array, tensor.numpy()), name
        results[name] = tensor + pressed
    return results


def outlived(x: torch.Tensor) -> torch.Tensor:
    """An array whose tensor is gone keeps the memory."""
    array = (x * 3).numpy()
    pressed = pressure(x)
    return torch.from_numpy(array) + pressed


def adopted(generator: np.random.Generator) -> dict[str, Any]:
    """NumPy's own memory as tensors, which the allocator never saw."""
    array = generator.standard_normal((512, 1024), dtype=np.float32)
    tensor = torch.from_numpy(array)
    pressed = pressure(tensor)
    tensor.add_(1)
    assert array[0, 0] == tensor[0, 0].item()
    by_dlpack = torch.from_dlpack(array) * 2
    by_buffer = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.float32).reshape(512, 1024)
    weight = torch.nn.Parameter(torch.from_numpy(generator.standard_normal((1024, 1024), dtype=np.float32)))
    optimizer = torch.optim.Adam([weight], lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        (tensor @ weight).square().mean().backward()
        optimizer.step()
    return {"pressed": pressed, "by_dlpack": by_dlpack, "by_buffer": by_buffer, "weight": weight}


def main() -> None:
    path = begin()
    x = torch.randn(512, 1024)
    tensor = x.sin()
    pressed = pressure(x)
    results = {
        "views": views(x),
        "outlived": outlived(x),
        "adopted": adopted(np.random.default_rng(5)),
        "list": tensor[:2, :64].tolist(),
        "item": tensor[511, 1023].item(),
        "memoryview": sum(memoryview(tensor.numpy()).cast("B")[:4096]),
        "mixed": torch.from_numpy(np.exp(tensor.numpy()) + tensor.numpy()),
        "pressed": pressed,
    }
    finish(path, results)


if __name__ == "__main__":
    main()
