"""Programs that lose variables and make them again, run out-of-core and in plain memory."""

from __future__ import annotations

from pathlib import Path

from processes import Ended, run_source

START = """
    import contextlib, hashlib, os, sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    torch.manual_seed(0)

    def show(*tensors):
        print(*(hashlib.sha256(t.detach().clone().contiguous().numpy().tobytes()).hexdigest()[:16] for t in tensors))

    def made(n=256):
        return torch.randn(n, n)

    def passes():
        torch.zeros(8, 8) + 1  # what the function before used is dropped as this begins

    def drops():
        return torch.ops.ooc.recompute_figures()[0] if "ooc" in sys.modules and sys.modules["ooc"].enabled() else None

    def lost_or_not(make):
        result = make()
        passes()
        passes()
        return result

    def lost(make):
        # a result whose bytes have been given up, where anything is given up at all
        before = drops()
        result = lost_or_not(make)
        assert before is None or drops() > before, "nothing was dropped"
        return result

    @contextlib.contextmanager
    def budget_of(size_bytes):
        # as the budget while inside, beside what cannot leave
        core = sys.modules["ooc.pytorch"]._active().core if drops() is not None else None
        if core is not None:
            stats = core.stats()
            core.set_budget(size_bytes + stats["pinned_bytes"] + stats["slab_bytes"])
        yield
        if core is not None: core.set_budget(stats["budget_bytes"])

    def traced():
        # a step, as it was recorded
        session, ended = sys.modules["ooc.pytorch"]._session, []
        boundary = session.core.boundary
        session.core.boundary = lambda: ended.append(boundary()) or ended[-1]
        step()
        del session.core.boundary
        return session.planner.trace(*ended)
"""


def run_both(folder: Path, source: str, **variables: str) -> tuple[Ended, Ended]:
    """In plain memory, and out-of-core, in one thread each."""
    plain = run_source(folder, source, OOC_ALLOC="0").check()
    return plain, run_source(folder, source, **variables).check()
