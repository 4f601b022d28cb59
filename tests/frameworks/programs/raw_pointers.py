"""Memory reached by its address or through the storage object, with no operator to announce it."""

import ctypes
from typing import Any

import torch
from program import begin, finish


def pressure(x: torch.Tensor) -> torch.Tensor:
    """Operators on enough other memory that whatever may leave the device does."""
    kept = [x * (1 + index / 10) for index in range(24)]
    return sum((part.tanh() for part in kept), torch.zeros_like(x))


def main() -> None:
    path = begin()
    x = torch.randn(512, 1024)
    size = x.nbytes
    results: dict[str, Any] = {}

    tensor = x.cos()
    address = tensor.data_ptr()
    results["pressed"] = pressure(x)
    copied = ctypes.string_at(address, size)
    results["read"] = torch.frombuffer(bytearray(copied), dtype=torch.float32)
    results["pressed again"] = pressure(x)
    ctypes.memset(address, 0, size // 2)
    assert not tensor[:256].any() and tensor[256:].any()
    results["written"] = tensor

    storage = x.exp().untyped_storage()
    results["pressed once more"] = pressure(x)
    results["bytes"] = [storage[index] for index in (0, 1, size // 2, size - 1)]
    clone = storage.clone()
    results["from storage"] = torch.empty(0).set_(clone).reshape(512, 1024)  # type: ignore[call-overload]
    storage.fill_(0)
    assert all(storage[index] == 0 for index in (0, size // 2, size - 1))

    # A storage that grows keeps its content.
    grown = x.sin().flatten()
    results["pressed at last"] = pressure(x)
    grown.untyped_storage().resize_(2 * size)
    results["grown"] = grown
    results["resized"] = x.abs().resize_(256, 1024)
    finish(path, results)


if __name__ == "__main__":
    main()
