"""One page of many processes: serves what they have written with OOC_METRICS_FILE. `swapd metrics` starts it.

A file that was not written for a while is of a process that is gone, and left out. Two files with the same sample (two
jobs with a rank 0) cannot be told apart: the newer one counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ooc.prometheus.catalogue import CATALOGUE
from ooc.prometheus.page import heading
from ooc.prometheus.server import Server
from swapd.config import ConfigError, server_tls

log = logging.getLogger("ooc.prometheus")

_LARGEST_FILE = 1 << 20  # bytes; one of ours has some 15 KiB
_FAMILIES = {metric.name: metric for metric in CATALOGUE}
_PARTS = {
    f"{metric.name}{part}": metric
    for metric in CATALOGUE
    if metric.type == "histogram"
    for part in ("_bucket", "_sum", "_count")
}


def recent_pages(folder: Path, most_seconds: float) -> list[str]:
    """What the ``*.prom`` files say that were written in the last so many seconds, the newest first."""
    found = []
    for path in folder.glob("*.prom"):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # gone meanwhile, or none of ours
            status = path.stat()
            if time.time() - status.st_mtime <= most_seconds and status.st_size <= _LARGEST_FILE:
                found.append((status.st_mtime, path.name, path.read_text(encoding="utf-8")))
    return [text for *_, text in sorted(found, reverse=True)]


def merged(pages: Iterable[str]) -> str:
    """One page with the samples of all of them, in the catalogue's order. What is none of ours is left out."""
    samples: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    seen: set[str] = set()
    for page in pages:
        for line in page.splitlines():
            before, space, value = line.rpartition(" ")
            name = before.partition("{")[0]
            metric = _FAMILIES.get(name) or _PARTS.get(name)
            if metric is None or not space or before in seen or not _is_number(value):
                continue
            seen.add(before)
            samples[metric.name].append(f"{line}\n")
    return "".join(heading(metric) + "".join(samples[metric.name]) for metric in CATALOGUE)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def main(arguments: list[str]) -> int:
    """`arguments`: one JSON object, as `swapd metrics` writes it. Serves until it is interrupted."""
    wanted = json.loads(arguments[0])
    folder, certificate = Path(wanted["folder"]), wanted["certificate"]
    if not folder.is_dir():
        print(f"swapd: {folder} is no folder: give the one where OOC_METRICS_FILE is", file=sys.stderr)
        return 1

    def page() -> bytes:
        return merged(recent_pages(folder, wanted["most_seconds"])).encode()

    try:
        tls = server_tls(Path(certificate), Path(wanted["key"]) if wanted["key"] else None) if certificate else None
        server = Server(wanted["address"], wanted["port"], page, tls)
    except (OSError, OverflowError, ConfigError) as error:
        print(f"swapd: cannot serve at {wanted['address']} port {wanted['port']}: {error}", file=sys.stderr)
        return 1
    print(f"metrics of {folder} at {server.url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
