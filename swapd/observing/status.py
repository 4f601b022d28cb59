"""Status: how `swapd top` looks into a running process, when the process was started with ``OOC_STATUS=1``.

The process listens on a Unix socket with an abstract name (see unix(7)), which is no file and is gone when the process
is. Everybody on the machine may see the name, but both sides check with the kernel that the other one is the same user
or root, and end the connection otherwise. No port is opened. A request is one line, and the answer is a text that ends
with the stream::

    status                 JSON: counters, steps, the plan; and what waits most, if the timeline is on
    timeline               JSON for Perfetto of what is in the ring
    timeline start|stop    "done"
    report                 the HTML page about the run so far

An answer that starts with "error: " says why there is no other. One thread answers everything and is blocked while
nobody asks. It gives up a client that does not read its answer within some seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("ooc.swapd")

_PATIENCE_SECONDS = 5.0
_LONGEST_REQUEST = 200


class StatusError(RuntimeError):
    """The process cannot be asked; the message says why and what to do."""


def address(pid: int | str) -> str:
    """The name of a process's socket. Containers may share abstract names, but not their numbers of processes."""
    return f"\0ooc-alloc/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}/{pid}"


class Server:
    """Answers each request with the text that `answer` returns for it. Raises OSError if it cannot listen."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(address(os.getpid()))
            self._socket.listen(8)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="ooc-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_SECONDS)  # until it has left accept() the name is not free
        self._socket.close()

    def in_child(self) -> None:
        """Closes the socket in a forked copy; its name and its thread stay the parent's."""
        self._closed = True
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no descriptor is free
                continue
            with client, contextlib.suppress(OSError):
                client.settimeout(_PATIENCE_SECONDS)
                if _is_trusted(client):
                    with client.makefile("rb") as stream:
                        request = stream.readline(_LONGEST_REQUEST).decode("utf-8", "replace").strip()
                    client.sendall(self._answered(request).encode("utf-8", "replace"))

    def _answered(self, request: str) -> str:
        try:
            return self._answer(request)
        except Exception as error:
            log.debug("an answer failed", exc_info=True)
            return f"error: {error}"


def _is_trusted(other: socket.socket) -> bool:
    """Whether the process at the other end is this user's, or root's."""
    credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (os.getuid(), 0)


# ---- the side that asks ---------------------------------------------------------------------------------------------


def processes() -> list[int]:
    """Numbers of the processes that can be asked, the newest first."""
    begin = address("").replace("\0", "@")  # as the kernel shows it
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    ends = {line.rpartition(begin)[2] for line in lines if begin in line}
    return sorted((int(end) for end in ends if end.isdecimal()), key=_started, reverse=True)


def ask(pid: int, request: str, patience_seconds: float = 60.0) -> str:
    """The process's answer. Raises StatusError."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(patience_seconds)
            client.connect(address(pid))
            if not _is_trusted(client):
                raise StatusError(f"another user's process answers for process {pid}")
            client.sendall(request.encode() + b"\n")
            with client.makefile("rb") as stream:
                text = stream.read().decode("utf-8", "replace")
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        if _started(pid):
            raise StatusError(f"process {pid} does not show itself: start it with OOC_STATUS=1") from None
        raise StatusError(f"process {pid} has ended") from None
    except TimeoutError:
        raise StatusError(f"process {pid} gave no answer within {patience_seconds:.0f} s: it may be stopped") from None
    except OSError as error:
        raise StatusError(f"process {pid} cannot be asked: {error}") from None
    if text.startswith("error: "):
        raise StatusError(f"process {pid} says: {text.removeprefix('error: ')}")
    if not text:
        raise StatusError(f"process {pid} gave no answer" if _started(pid) else f"process {pid} has ended")
    return text


def _started(pid: int) -> int:
    """When a process was started, in the kernel's ticks, or 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])  # state Z until the parent asks about it
