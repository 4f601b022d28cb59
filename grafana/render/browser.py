"""A page in headless Chromium as a PNG, from a server of our own on 127.0.0.1."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRAWING_SECONDS = 120


class DrawingFailed(Exception):
    """The page reported an error, or Chromium wrote no picture."""


def chromium() -> str:
    """The path of Chromium. Raises FileNotFoundError, which says what to do."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    raise FileNotFoundError(
        f"none of {', '.join(NAMES)} is on the PATH: as root, `apt-get install chromium fonts-inter`"
    )


@dataclass
class Reported:
    """What the page said about itself."""

    errors: list[str] = field(default_factory=list)
    drawn: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def served(pages: Mapping[str, bytes], public: Path) -> Iterator[tuple[str, Reported]]:
    """Serves `pages` by path, and files below `public` under /public. Yields the address and what pages report."""
    reported = Reported()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            file = public / path.removeprefix("/public/")
            inside = path.startswith("/public/") and file.resolve().is_relative_to(public.resolve())
            body = pages.get(path, file.read_bytes() if inside and file.is_file() else None)
            self.send_response(404 if body is None else 200)
            kinds = {".js": "text/javascript", ".css": "text/css", ".json": "application/json", ".svg": "image/svg+xml"}
            self.send_header("Content-Type", kinds.get(Path(path).suffix, "text/html; charset=utf-8"))
            self.end_headers()
            self.wfile.write(body or b"")

        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/drawn":
                reported.drawn = said
            else:
                reported.errors.append(str(said))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", reported
        finally:
            server.shutdown()
            thread.join()


def photograph(address: str, out: Path, width: int, height: int) -> None:
    """Writes a picture of the page as it looks a few seconds after it was loaded. Raises DrawingFailed."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            chromium(), "--headless=new", "--hide-scrollbars", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", f"--window-size={width},{height}", "--virtual-time-budget=8000",
            f"--screenshot={out}", address,
        ]  # fmt: skip
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")  # Chromium's sandbox refuses root; the page is our own
        done = subprocess.run(command, capture_output=True, text=True, timeout=DRAWING_SECONDS, check=False)
    if done.returncode != 0 or not out.exists():
        raise DrawingFailed(f"Chromium ended with {done.returncode} and wrote no picture:\n{done.stderr[-2000:]}")
