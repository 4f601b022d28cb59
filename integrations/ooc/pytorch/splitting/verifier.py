"""A thread that finds out whether divisions give the same bits, while the program goes on."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

log = logging.getLogger("ooc.pytorch")

Job = Callable[[], object]


class Verifier:
    """Does jobs one after the other. Any thread may ask; a child of a fork has a thread of its own."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        self._begin()

    def _begin(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, Job] | None] = queue.SimpleQueue()
        self._asked: set[Any] = set()
        self._failed: set[Any] = set()
        self._thread: threading.Thread | None = None

    def ask(self, key: Any, job: Job) -> bool:
        """Has a job done, unless it was asked for before. Returns False if it failed: then the caller has to do it."""
        if self._process != os.getpid():  # a child of a fork: another thread of the parent may have held the lock
            self._lock, self._process = threading.Lock(), os.getpid()
            self._begin()
        with self._lock:
            if key in self._failed:
                return False
            if key not in self._asked:
                self._asked.add(key)
                self._jobs.put((key, job))
            if self._thread is None:
                given = (self._jobs, self._failed, torch.get_num_threads())
                self._thread = threading.Thread(target=_work, args=given, name="ooc-verifier", daemon=True)
                self._thread.start()
                atexit.register(self.close)
            return True

    def wait(self) -> None:
        """Waits until the jobs that were asked for are done."""
        if self._process != os.getpid():
            return
        done = threading.Event()
        with self._lock:
            if self._thread is None:
                return
            self._jobs.put((None, done.set))
        done.wait()

    def close(self) -> None:
        """Ends the thread, after the job that it is at."""
        if self._process != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            waiting = self._jobs
            self._begin()
        while not waiting.empty():
            waiting.get()
        waiting.put(None)
        thread.join()
        atexit.unregister(self.close)


def _work(jobs: queue.SimpleQueue[tuple[Any, Job] | None], failed: set[Any], threads: int) -> None:
    torch.set_num_threads(threads)  # results may depend on it
    while (waiting := jobs.get()) is not None:
        key, job = waiting
        try:
            job()
        except Exception:
            log.debug("a division could not be compared beside the program", exc_info=True)
            failed.add(key)
