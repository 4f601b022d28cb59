"""Raw results: one JSON file a run, in the folder of the kind of device; and tables made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def folder(device: str = "emulated") -> Path:
    """Where the raw data of a kind of device are kept."""
    return RESULTS / device


def save(target: Path, benchmark: str, name: str, record: dict[str, Any]) -> None:
    """Writes ``target/benchmark/name.json``."""
    path = target / benchmark / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def load(target: Path, benchmark: str) -> list[dict[str, Any]]:
    """All records of a benchmark, by name; none if it never ran."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((target / benchmark).glob("*.json"))]


def clear(target: Path, benchmark: str) -> None:
    """Removes the records of earlier runs, so that a table never mixes two."""
    for path in (target / benchmark).glob("*.json"):
        path.unlink()


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; all columns but the first are aligned to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|--:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.1f}"


def size(count: int) -> str:
    """Exact bytes in the largest unit that divides them, such as 128 KiB."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} B"
