"""The programs that are measured: the examples, unmodified, at a size that leaves time for many runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CHUNK_BYTES = 128 << 10  # the chunk size that the examples use; see fragmentation.py for the others


@dataclass(frozen=True)
class Workload:
    """A script and its arguments, without the number of steps."""

    name: str
    script: Path
    arguments: tuple[str, ...]
    quick_arguments: tuple[str, ...]

    def command(self, *, quick: bool) -> list[str]:
        return [str(self.script), *(self.quick_arguments if quick else self.arguments)]


WORKLOADS = (
    Workload(
        "resnet50",
        EXAMPLES / "resnet50.py",
        ("--batch-size", "16", "--image-size", "64"),
        ("--batch-size", "8", "--image-size", "32"),
    ),
    Workload(
        "gpt",
        EXAMPLES / "gpt.py",
        ("--batch-size", "8", "--text-bytes", "2000000", "--sample-bytes", "1"),
        ("--batch-size", "4", "--layers", "3", "--text-bytes", "500000", "--sample-bytes", "1"),
    ),
)
