"""A process that has imported what programs import, and forks one child for each program: half of a run is imports.

    python nursery.py MODULE...        then, a line of JSON each:
    -> {"id": 1, "program": "lstm.py", "arguments": [...], "variables": {...}, "output": FILE, "errors": FILE,
        "folder": null}
    -> {"kill": 1}
    <- {"id": 1, "status": 0}

The children run at the same time, and an answer comes when one ends. Each is as a fresh interpreter that has just
imported PyTorch, or with our allocator PyTorch and our modules: the program is its `__main__`, the allocator is turned
on by the same function as at the end of `import torch`, and with the allocator the interpreter ends as it always does.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
from types import ModuleType
from typing import Any


def run_child(request: dict[str, Any]) -> None:
    """Runs the program in this process, which is the child."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, descriptor in (("output", 1), ("errors", 2)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    if request["folder"] is not None:
        os.chdir(request["folder"])
    path = request["program"]
    os.environ.update(request["variables"])
    sys.argv = [path, *request["arguments"]]
    sys.path[0] = os.path.dirname(path)
    with open(path, encoding="utf-8") as source:
        program = compile(source.read(), path, "exec")
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__dict__.update({"__file__": path, "__builtins__": __builtins__})
    from ooc_alloc import autoload

    if not autoload.is_off():
        autoload.activate()
        exec(program, module.__dict__)
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "ooc"]:
        del sys.modules[name]  # the program may ask whether our modules are imported
    exec(program, module.__dict__)
    threading._shutdown()  # as at the end of an interpreter, of which the rest would copy most pages
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection in each child would copy nearly all pages
    numbers: dict[int, int] = {}  # of requests, by process
    requests, answers = os.dup(0), os.dup(1)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    default = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    os.write(answers, b"ready\n")
    data = b""
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while numbers and (found := os.waitpid(-1, os.WNOHANG))[0]:
                answer = {"id": numbers.pop(found[0]), "status": os.waitstatus_to_exitcode(found[1])}
                os.write(answers, json.dumps(answer).encode() + b"\n")
        if requests not in ready:
            continue
        if not (more := os.read(requests, 1 << 16)):
            break
        *lines, data = (data + more).split(b"\n")
        for request in map(json.loads, lines):
            if "kill" in request:
                for process in (process for process, number in numbers.items() if number == request["kill"]):
                    os.kill(process, signal.SIGKILL)
            elif process := os.fork():
                numbers[process] = request["id"]
            else:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, default)
                for descriptor in (requests, answers, ended, wake):
                    os.close(descriptor)
                return run_child(request)
    for process in numbers:
        os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
