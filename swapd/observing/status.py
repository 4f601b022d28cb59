"""Status: how `swapd top` looks into a running process, when the process was started with ``OOC_STATUS=1``.

The process listens on a Unix socket, ``PID.sock``, in ``$XDG_RUNTIME_DIR/ooc-alloc``, or else in ``/tmp/ooc-UID``. The
folder is the user's alone (0700, owner checked by both sides), the socket is 0600, and the other side has to be the
same user or root. No port is opened. A request is one line, and the answer is a text that ends with the stream::

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
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("ooc.swapd")

_PATIENCE_SECONDS = 5.0
_LONGEST_REQUEST = 200
_LONGEST_ANSWER = 1 << 30


class StatusError(RuntimeError):
    """The process cannot be asked; the message says why and what to do."""


def folder() -> Path:
    """Where sockets are kept."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "ooc-alloc" if runtime else Path(tempfile.gettempdir()) / f"ooc-{os.getuid()}"


def check_folder(path: Path) -> None:
    """Raises PermissionError unless the folder is this user's alone: anybody could have made it in /tmp."""
    facts = os.lstat(path)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise PermissionError(f"{path} is not a folder of this user's alone (0700); remove it, or set XDG_RUNTIME_DIR")


def remove_left_behind(place: Path) -> None:
    """Removes the sockets of processes that were killed. It connects to find them, since process ids are used again."""
    for path in (*place.glob("*.sock"), *place.glob(".*.new")):
        number = path.name.strip(".").split(".")[0]
        begins = path.suffix == ".new" and number.isdecimal() and _is_alive(int(number))  # it may not listen yet
        with contextlib.suppress(OSError):
            before = path.lstat()
            # The file is looked at again, since a process that begins just now may have put its own socket there.
            if number.isdecimal() and not begins and _is_deserted(path) and path.lstat().st_ino == before.st_ino:
                path.unlink()


def _is_deserted(path: Path) -> bool:
    """Whether nobody listens there. A stopped process still listens, and so does one of another container or user."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # too many clients wait
            pass
    return False


class Server:
    """Answers each request with the text that `answer` returns for it. Raises OSError if it cannot listen."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_folder(place)
        remove_left_behind(place)
        self.path = place / f"{os.getpid()}.sock"
        fresh = place / f".{os.getpid()}.new"
        fresh.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(fresh))
            os.chmod(fresh, 0o600)
            self._socket.listen(8)
            os.rename(fresh, self.path)  # only now, so that whoever finds the name finds a listener
        except OSError:
            self._socket.close()
            raise
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="ooc-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and removes the socket's name."""
        self._closed = True
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
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
                if _user_of(client) in (os.getuid(), 0):
                    client.sendall(self._answered(_line(client)).encode("utf-8", "replace"))

    def _answered(self, request: str) -> str:
        try:
            return self._answer(request)
        except Exception as error:
            log.debug("an answer failed", exc_info=True)
            return f"error: {error}"


# ---- the side that asks ---------------------------------------------------------------------------------------------


def processes() -> list[int]:
    """Numbers of the processes that can be asked, the newest first. Removes the sockets that dead processes left."""
    place = folder()
    try:
        check_folder(place)
        remove_left_behind(place)
        found = sorted(place.glob("*.sock"), key=lambda path: -path.stat().st_mtime)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise StatusError(str(error)) from None
    return [int(path.stem) for path in found if path.stem.isdecimal() and path.is_socket()]


def ask(pid: int, request: str, patience_seconds: float = 60.0) -> str:
    """The process's answer. Raises StatusError."""
    path = folder() / f"{pid}.sock"
    try:
        check_folder(path.parent)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(patience_seconds)
            client.connect(str(path))
            client.sendall(request.encode() + b"\n")
            text = _all(client).decode("utf-8", "replace")
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        if _is_alive(pid):
            raise StatusError(f"process {pid} does not show itself: start it with OOC_STATUS=1") from None
        raise StatusError(f"process {pid} has ended") from None
    except TimeoutError:
        raise StatusError(f"process {pid} gave no answer within {patience_seconds:.0f} s: it may be stopped") from None
    except OSError as error:
        raise StatusError(f"process {pid} cannot be asked: {error}") from None
    if text.startswith("error: "):
        raise StatusError(f"process {pid} says: {text.removeprefix('error: ')}")
    if not text:
        raise StatusError(f"process {pid} has ended" if not _is_alive(pid) else f"process {pid} gave no answer")
    return text


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return False  # the process is another user's
    try:  # a process that has ended stays in state Z until its parent asks about it
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def _user_of(client: socket.socket) -> int:
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _line(client: socket.socket) -> str:
    text = b""
    until = time.monotonic() + _PATIENCE_SECONDS
    while b"\n" not in text and len(text) < _LONGEST_REQUEST and time.monotonic() < until:
        part = client.recv(_LONGEST_REQUEST)
        if not part:
            break
        text += part
    return text.split(b"\n")[0].decode("utf-8", "replace").strip()


def _all(client: socket.socket) -> bytes:
    parts, size = [], 0
    while part := client.recv(1 << 20):
        parts.append(part)
        size += len(part)
        if size > _LONGEST_ANSWER:
            raise OSError("its answer does not end")
    return b"".join(parts)
