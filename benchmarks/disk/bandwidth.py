"""How fast a disk reads and writes at once, past the page cache: what the bound divides by."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

BLOCK_BYTES = 4 << 20
_DEPTH = 2  # threads a direction


def measure(folder: Path, size_bytes: int) -> dict[str, float]:
    """Bytes a second each way, while `size_bytes` are read and as many written. Raises OSError without direct I/O."""
    path = folder / "bandwidth"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    path.unlink()
    try:
        os.posix_fallocate(file, 0, 2 * size_bytes)
        blocks = list(range(0, size_bytes, BLOCK_BYTES))
        with _buffer() as buffer:
            for place in blocks:  # what was never written is not read from the disk
                os.pwritev(file, [buffer], place)
        seconds = {"read": 0.0, "write": 0.0}

        def work(way: str, mine: list[int]) -> None:
            began = time.perf_counter()
            with _buffer() as buffer:
                for place in mine:
                    if way == "read":
                        os.preadv(file, [buffer], place)
                    else:
                        os.pwritev(file, [buffer], size_bytes + place)
            seconds[way] = max(seconds[way], time.perf_counter() - began)

        shares = [(way, blocks[first::_DEPTH]) for way in seconds for first in range(_DEPTH)]
        threads = [threading.Thread(target=work, args=share) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.close(file)
    return {f"{way}_bytes_per_second": len(blocks) * BLOCK_BYTES / spent for way, spent in seconds.items()}


def _buffer() -> mmap.mmap:
    """Memory that direct I/O takes: it begins at a page, and its bytes are not all the same."""
    made = mmap.mmap(-1, BLOCK_BYTES)
    made.write(os.urandom(BLOCK_BYTES))
    return made
