"""A process that runs cases and writes a line of JSON for each step; what it was doing when it died is the last line.

python -m tests.stress.worker plain|strict|divided < cases > lines

{"begin": case}                              a case begins
{"sample": label}                            a sample of it begins
{"digest": [...]}                            what it gave
{"ways": [[operator, how], ...]}             divided: what did not fit, in which parts, or on host memory
{"end": case, "seconds": s}                  the case has ended
{"stats": {...}}                             strict: the core's figures, at the end
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
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
DIVIDED_SETTINGS = {
    "alloc": "emulated",
    "policy": "demand",
    "small_limit": 512,  # single numbers stay: a kernel that makes one in place of a variable has begun
    "chunk_size": "4KiB",
    "emulated_granularity": "4KiB",
    "emulated_memory": "256MiB",  # more chunks have more mappings than a process may
    "budget": "128MiB",
    "host_budget": "2GiB",
}
LEAST_BUDGET_BYTES = 16 * 4096
DROPS = bool(os.environ.get("_OOC_RECOMPUTE_EVERYTHING"))
SLICE_BYTES = 4096  # lists of tensors longer than this are cut


def main() -> None:
    warnings.simplefilter("ignore")
    # PyTorch prints as it likes: our lines have a descriptor of their own.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    faulthandler.enable()
    mode = sys.argv[1]
    import torch

    torch.set_num_threads(2)
    core: Any = None
    folder = tempfile.TemporaryDirectory()
    if mode == "divided":
        import ooc

        ooc.enable(**DIVIDED_SETTINGS, split_store=f"{folder.name}/verdicts.sqlite")
        core = ooc.pytorch._active().core
    elif mode == "strict":
        import ooc

        disk = os.environ.get("STRESS_DISK")
        ooc.enable(**(STRICT_SETTINGS | ({"host_budget": None, "disk": disk, "disk_budget": "2GiB"} if disk else {})))
        core = ooc.pytorch._active().core
        torch.ops.ooc.install(core.handle, SLICE_BYTES)
    from tests.stress import cases

    def write(**line: Any) -> None:
        lines.write(json.dumps(line) + "\n")

    known: Counter[tuple[str, str]] = Counter()
    for line in sys.stdin:
        case = line.strip()
        began = time.monotonic()
        write(begin=case)
        _run_case(cases, case, core, write)
        if mode == "divided":
            write(ways=_new_ways(known))
        write(end=case, seconds=round(time.monotonic() - began, 3))
    if core is not None:
        core.audit()
        write(stats=core.stats() | {"drop_count": torch.ops.ooc.recompute_figures()[0]})
    lines.close()
    folder.cleanup()
    os._exit(0)


@contextlib.contextmanager
def _budget(core: Any, operand_bytes: int) -> Iterator[None]:
    """While inside, the budget is half of the operands beside what cannot leave; all of it if their size is 0."""
    if core is None or operand_bytes == 0:
        yield
        return
    stats = core.stats()
    core.set_budget(max(operand_bytes // 2, LEAST_BUDGET_BYTES) + stats["pinned_bytes"] + stats["slab_bytes"])
    try:
        yield
    finally:
        core.set_budget(stats["budget_bytes"])


def _new_ways(known: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """What was cut since the last call, and how."""
    import ooc

    now: Counter[tuple[str, str]] = Counter()
    for layer in ooc.summary()["split_layers"]:
        now[layer["operator"], layer["how"]] += layer["calls"]
    new = sorted(now - known)
    known.update(now - known)
    return new


def _run_case(cases: Any, case: str, core: Any, write: Any) -> None:
    import torch

    from tests.stress.digests import digest

    samples = cases.samples(case)
    while True:
        cases.seed()
        try:
            sample = next(samples)
        except StopIteration:
            return
        except Exception as error:
            write(sample="making samples")
            write(digest=[digest(error)])
            return
        write(sample=sample.label)
        if core is not None:
            torch.zeros(1).add_(1)  # a function that holds nothing of the sample
            core.evict_all()  # or an operator that reads its arguments without a function would find them there
        cases.seed()
        compute, budget = sample.compute, _budget(core, sample.operand_bytes)
        del sample
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with budget:
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
