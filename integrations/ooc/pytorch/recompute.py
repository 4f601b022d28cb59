"""Carrying out what the planner wants dropped and made again: the Python side of csrc/recompute.h."""

from __future__ import annotations

import os

import torch

from swapd.recompute.operators import GROUPS, Role
from swapd.recompute.schedule import RemakeFigures, Schedule

# Tests: everything that can be made again is dropped as soon as a function has ended, without a schedule.
EVERYTHING = "_OOC_RECOMPUTE_EVERYTHING"


def _signed(fingerprint: int) -> int:
    """64 bits, as operators take them."""
    return fingerprint - (1 << 64) if fingerprint >> 63 else fingerprint


class Remaker:
    """Implements `swapd.recompute.schedule.Remaker` for the operators of this process."""

    def __init__(self, *, checks: bool) -> None:
        """`checks`: what was made again is compared with what was dropped, and what differs is an error."""
        torch.ops.ooc.recompute_roles(*(_names(role) for role in (Role.MAKER, Role.LINK, Role.STATISTICS)))
        everything = bool(os.environ.get(EVERYTHING))
        torch.ops.ooc.recompute_check(checks or everything)
        torch.ops.ooc.recompute_everything(everything)

    def follow(self, schedule: Schedule) -> None:
        drops = [int(number) for drop in schedule.drops for number in drop]
        lingers = [number for linger in schedule.lingers for number in linger]
        torch.ops.ooc.recompute_follow(_signed(schedule.fingerprint), schedule.functions, schedule.kept, drops, lingers)

    def unfollow(self, fingerprint: int) -> None:
        torch.ops.ooc.recompute_leave(_signed(fingerprint))

    def forget(self) -> None:
        torch.ops.ooc.recompute_leave(None)

    def ended(self) -> int | None:
        carried_out: int | None = torch.ops.ooc.recompute_iteration_ends()
        return None if carried_out is None else carried_out % (1 << 64)

    def figures(self) -> RemakeFigures:
        drops, dropped_bytes, repeats, seconds, refused, _ = torch.ops.ooc.recompute_figures()
        return RemakeFigures(int(drops), int(dropped_bytes), int(repeats), seconds, int(refused))


def _names(role: Role) -> list[str]:
    return sorted(name for group in GROUPS if group.role is role for name in group.names)


def _make_all_again() -> None:
    if hasattr(torch.ops.ooc, "recompute_all_again"):
        torch.ops.ooc.recompute_all_again()


os.register_at_fork(before=_make_all_again)  # a child has no device to make anything again with
