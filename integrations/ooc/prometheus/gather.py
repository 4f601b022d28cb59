"""One page of many processes: serves what they have written with OOC_METRICS_FILE. `swapd metrics` starts it."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from ooc.prometheus.catalogue import CATALOGUE
from ooc.prometheus.collector import empty_family
from ooc.prometheus.server import Server
from swapd.config import ConfigError, server_tls

log = logging.getLogger("ooc.prometheus")

_LARGEST_FILE = 1 << 20  # bytes; one of ours has some 15 KiB


class Folder:
    """A collector of what the ``*.prom`` files of a folder say, in the catalogue's order.

    A file that was not written for a while is left out, as its process is gone. So are files that do not parse, and
    metrics that the catalogue does not have. Where two files have the same sample (two jobs with a rank 0), the newer
    file counts, as the two cannot be told apart.

    Args:
        path: the folder.
        most_seconds: the age from which a file is left out.
    """

    def __init__(self, path: Path, most_seconds: float) -> None:
        self._path = path
        self._most_seconds = most_seconds

    def describe(self) -> list[Family]:
        return [empty_family(metric) for metric in CATALOGUE]

    def collect(self) -> list[Family]:
        families = self.describe()
        by_name = {family.name: family for family in families}
        seen = set()
        for written in self._pages():
            family = by_name.get(written.name.removesuffix("_info"))
            if family is None:
                continue
            for sample in written.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                if key not in seen:
                    seen.add(key)
                    family.samples.append(sample)
        return families

    def _pages(self) -> Iterator[Family]:
        """What the files say, the newest first."""
        found = []
        for path in self._path.glob("*.prom"):
            with contextlib.suppress(OSError):  # the file is gone meanwhile
                status = path.stat()
                if time.time() - status.st_mtime <= self._most_seconds and status.st_size <= _LARGEST_FILE:
                    found.append((status.st_mtime, path))
        for _, path in sorted(found, reverse=True):
            try:
                yield from list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
            except Exception:  # whatever it is: the file may be none of ours
                log.debug("%s is left out", path, exc_info=True)


def main(arguments: list[str]) -> int:
    """`arguments`: one JSON object, as `swapd metrics` writes it. Serves until it is interrupted."""
    wanted = json.loads(arguments[0])
    folder, certificate = Path(wanted["folder"]), wanted["certificate"]
    if not folder.is_dir():
        print(f"swapd: {folder} is no folder: give the one where OOC_METRICS_FILE is", file=sys.stderr)
        return 1
    try:
        tls = server_tls(Path(certificate), Path(wanted["key"]) if wanted["key"] else None) if certificate else None
        server = Server(wanted["address"], wanted["port"], Folder(folder, wanted["most_seconds"]), tls)
    except (OSError, OverflowError, ConfigError) as error:
        print(f"swapd: cannot serve at {wanted['address']} port {wanted['port']}: {error}", file=sys.stderr)
        return 1
    print(f"metrics of {folder} at {server.url}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()  # for ever
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
