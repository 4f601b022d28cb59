"""Runs Python programs at the same time, each in a process of its own; tests wait for theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "integrations"), os.environ.get("PYTHONPATH"))))
TIMEOUT_SECONDS = 150
_pool = ThreadPoolExecutor(max(1, min(12, 3 * (os.cpu_count() or 2) // 4)))


@dataclass(frozen=True)
class Ended:
    status: int
    output: str
    errors: str
    summary: dict[str, Any] | None

    def check(self) -> Ended:
        assert self.status == 0, f"status {self.status}\n{self.output[-1500:]}\n{self.errors[-5000:]}"
        return self


def _run(arguments: list[str], variables: dict[str, str], summary: Path | None) -> Ended:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    settings = {
        **kept, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": PATHS,
        "OOC_PLANNING": "blocking", **variables,
    }  # fmt: skip
    if summary is not None:
        settings["OOC_SUMMARY"] = str(summary)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments], cwd=ROOT, env=settings, capture_output=True, text=True,
            errors="replace", timeout=TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Ended(-1, "", f"{arguments} did not end in {TIMEOUT_SECONDS} s", None)
    figures = json.loads(summary.read_text()) if summary is not None and summary.exists() else None
    return Ended(done.returncode, done.stdout, done.stderr, figures)


def start(arguments: list[str], variables: dict[str, str], summary: Path | None = None) -> Future[Ended]:
    return _pool.submit(_run, arguments, variables, summary)


def after(known: Future[Ended], then: Any) -> Future[Any]:
    """`then(ended)` once the process has ended well, in a thread of its own: it may start others and wait for them."""
    result: Future[Any] = Future()

    def finish(future: Future[Ended]) -> None:
        try:
            result.set_result(then(future.result().check()))
        except BaseException as error:
            result.set_exception(error)

    known.add_done_callback(finish)
    return result
