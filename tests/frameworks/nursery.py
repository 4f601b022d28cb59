"""A process that has imported what programs import, and forks one child for each program: half of a run is imports.

    python nursery.py MODULE...        then, a line of JSON each:
    -> {"id": 1, "program": "lstm.py", "arguments": [...], "variables": {...}, "output": FILE, "errors": FILE}
    <- {"id": 1, "status": 0}

The children run at the same time. Each is as a fresh interpreter that has just imported PyTorch: the allocator is
turned on by the same function as at the end of `import torch`, and what runs at exit runs.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any


def run_child(request: dict[str, Any]) -> int:
    """Runs the program in this process, which is the child; returns its exit status."""
    for name, descriptor in (("output", 1), ("errors", 2)):
        file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(request["variables"])
    sys.argv = [request["program"], *request["arguments"]]
    sys.path[0] = os.path.dirname(request["program"])
    status = 0
    try:
        from integrations.pytorch.autoload import activate

        activate()
        runpy.run_path(request["program"], run_name="__main__")
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    running: dict[int, int] = {}
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        if "wait" in request:
            process = next(process for process, number in running.items() if number == request["wait"])
            _, status = os.waitpid(process, 0)
            number = running.pop(process)
            print(json.dumps({"id": number, "status": os.waitstatus_to_exitcode(status)}), file=answers, flush=True)
            continue
        process = os.fork()
        if process == 0:
            os._exit(run_child(request))
        running[process] = request["id"]


if __name__ == "__main__":
    main()
