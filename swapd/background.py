"""A process of its own for work that is to hold up no thread of the program: in Python, threads hold up each other.

The process is started with the first piece of work, knows nothing but what it is sent, and ends with the program,
however that ends. It takes some 35 MB of host memory, and runs at a lower priority than the program.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

log = logging.getLogger("ooc.swapd")

T = TypeVar("T")
_NICENESS = 10
_SERVE = "import sys; sys.path[:] = sys.argv[1:]; from swapd.background import serve; serve()"


class BackgroundProcess(Executor):
    """Runs functions one after another in one other process; they, their arguments and results are pickled.

    Where no process can be started, or it ends before its work, a function runs in a thread of this process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._impossible = False
        self._ended = False
        self._in_use = threading.Lock()

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As every executor's. The program's end does not wait for what is still at work then."""
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with self._in_use:
                    future.set_result(self._run(function, args, kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work, name="ooc-background", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the process. What is at work fails, and so does what is submitted later."""
        self._ended = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _run(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        if not self._impossible:
            result: T
            error: BaseException | None
            try:
                result, error = self._elsewhere(function, args, kwargs)
            except (OSError, ValueError, EOFError, pickle.PickleError) as reason:
                self._impossible = True
                if not self._ended:
                    log.warning("no process plans in the background, a thread does: %r", reason)
            else:
                if error is not None:
                    raise error
                return result
        if self._ended:
            raise RuntimeError("the background process was shut down")
        return function(*args, **kwargs)

    def _elsewhere(self, *work: Any) -> Any:
        if self._process is None:
            self._process = _start()
            if self._ended:  # meanwhile: whoever ended it saw no process
                self.shutdown()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(pickle.dumps(work, pickle.HIGHEST_PROTOCOL))
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


def _start() -> subprocess.Popen[bytes]:
    if not sys.executable or getattr(sys, "frozen", False):  # a program that was packed with its interpreter
        raise OSError("sys.executable does not name Python")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    return subprocess.Popen(
        [sys.executable, "-I", "-c", _SERVE, *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )


def serve() -> None:
    """The process's side: works until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, whose end is this one's
    os.nice(_NICENESS)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write there
    while True:
        try:
            function, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = pickle.dumps((function(*args, **kwargs), None), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            answer = pickle.dumps((None, RuntimeError("".join(traceback.format_exception(error)))))
        answers.write(answer)
        answers.flush()
