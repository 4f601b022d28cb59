"""Compare two files written by ``torch.save``, bit for bit.

    python compare.py FIRST SECOND

Prints one JSON object: ``tensors`` and ``values`` (how many leaves were compared), ``identical``, and
``differences`` (the path of each leaf that differs, and how). Ends with 0 if every bit is the same, 1 if not.
A NaN equals itself here, and 0.0 differs from -0.0: bits are compared, not numbers.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from typing import Any

import torch


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts, lists and tuples with its path; an empty container is a leaf of its own."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path or "/", value


def tensor_difference(first: torch.Tensor, second: torch.Tensor) -> str | None:
    """How two dense tensors differ, or None. Strides do not count; type, shape and the bytes of the elements do."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return f"{first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}"
    if first.numel() == 0:
        return None
    one, two = (t.detach().resolve_conj().resolve_neg().contiguous().flatten() for t in (first, second))
    unequal = (one.view(torch.uint8) != two.view(torch.uint8)).view(one.numel(), -1).any(dim=1)
    count = int(unequal.sum())
    return f"{count} of {one.numel()} elements" if count else None


def difference(first: Any, second: Any) -> str | None:
    """How two leaves differ, or None."""
    if type(first) is not type(second):
        return f"{type(first).__name__} and {type(second).__name__}"
    if isinstance(first, torch.Tensor):
        return tensor_difference(first, second)
    if isinstance(first, float):
        same = struct.pack("<d", first) == struct.pack("<d", second)
    else:
        same = first == second
    return None if same else f"{first!r} and {second!r}"


def compare(first: Any, second: Any) -> dict[str, Any]:
    """The comparison of two loaded files, as the JSON object that this program prints."""
    ones, twos = dict(leaves(first)), dict(leaves(second))
    differences = {path: "only in one file" for path in sorted(set(ones) ^ set(twos))}
    shared = [path for path in ones if path in twos]
    for path in shared:
        how = difference(ones[path], twos[path])
        if how is not None:
            differences[path] = how
    tensors = sum(isinstance(ones[path], torch.Tensor) for path in shared)
    return {
        "tensors": tensors,
        "values": len(shared) - tensors,
        "identical": bool(shared) and not differences,
        "differences": differences,
    }


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    first, second = (torch.load(path, map_location="cpu", weights_only=True) for path in sys.argv[1:])
    report = compare(first, second)
    print(json.dumps(report))
    return 0 if report["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
