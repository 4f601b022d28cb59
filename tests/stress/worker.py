"""A process that runs cases and writes a line of JSON for each step; what it was doing when it died is the last line.

python -m tests.stress.worker plain|strict < cases > lines

{"begin": case}                              a case begins
{"sample": label}                            a sample of it begins
{"digest": [...]}                            what it gave
{"end": case, "seconds": s}                  the case has ended
{"stats": {...}}                             strict: the core's figures, at the end
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import warnings
from typing import Any

STRICT_SETTINGS = {
    "alloc": "emulated",
    "strict": True,
    "policy": "demand",
    "small_limit": 1,  # every variable can leave
    "chunk_size": "16KiB",
    "emulated_granularity": "4KiB",
    "emulated_memory": "512MiB",
    "budget": "384MiB",
    "host_budget": "2GiB",
}
DROPS = bool(os.environ.get("_OOC_RECOMPUTE_EVERYTHING"))
SLICE_BYTES = 4096  # lists of tensors longer than this are cut


def main() -> None:
    warnings.simplefilter("ignore")
    # PyTorch prints as it likes: our lines have a descriptor of their own.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    strict = sys.argv[1] == "strict"
    import torch

    torch.set_num_threads(2)
    core: Any = None
    if strict:
        import ooc

        disk = os.environ.get("STRESS_DISK")
        ooc.enable(**(STRICT_SETTINGS | ({"host_budget": None, "disk": disk, "disk_budget": "2GiB"} if disk else {})))
        core = ooc.pytorch._active().core
        torch.ops.ooc.install(core.handle, SLICE_BYTES)
    from tests.stress import cases

    def write(**line: Any) -> None:
        lines.write(json.dumps(line) + "\n")

    for line in sys.stdin:
        case = line.strip()
        began = time.monotonic()
        write(begin=case)
        _run_case(cases, case, core, write)
        write(end=case, seconds=round(time.monotonic() - began, 3))
    if core is not None:
        core.audit()
        write(stats=core.stats() | {"drop_count": torch.ops.ooc.recompute_figures()[0]})
    lines.close()
    os._exit(0)


def _run_case(cases: Any, case: str, core: Any, write: Any) -> None:
    import torch

    from tests.stress.digests import digest

    samples = cases.samples(case)
    while True:
        cases.seed()
        try:
            label, compute = next(samples)
        except StopIteration:
            return
        except Exception as error:
            write(sample="making samples")
            write(digest=[digest(error)])
            return
        write(sample=label)
        if core is not None:
            torch.zeros(1).add_(1)  # a function that holds nothing of the sample
            core.evict_all()  # or an operator that reads its arguments without a function would find them there
        cases.seed()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = compute()
                if core is not None and DROPS:
                    torch.zeros(1)  # the function before has ended: what it used and made is dropped
                del compute
                found = [digest(part) for part in result] if isinstance(result, list) else [digest(result)]
            del result
            if core is not None:
                core.evict_all()  # a hidden write is found when its variable leaves
        except Exception as error:
            found = [digest(error)]
        write(digest=found)
        if core is not None and DROPS:
            import ooc

            del found
            ooc.step()


if __name__ == "__main__":
    main()
