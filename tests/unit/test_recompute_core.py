"""Recomputation on a real core with a slow link: a replayed program is planned, told what to drop, and faster then.

A schedule is turned back into drops here, and the sequence with them is replayed in the place of the first one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swapd.recompute.candidates import Drop
from swapd.recompute.history import History
from swapd.recompute.rewriting import rewrite
from swapd.recompute.schedule import AGAIN, RemakeFigures, Schedule, schedule_of
from swapd.trace.trace import Trace

CHUNK = 64 << 10
BUDGET = 60 * CHUNK
PACE = 0.2  # of the times of `network`
LINK = f"{int(100 * CHUNK / PACE)}B/s"


def drops_of(schedule: Schedule, trace: Trace) -> list[Drop]:
    """The drops that a schedule names, of a trace of whole variables."""
    numbers = [int(np.flatnonzero(trace.born == drop.made_by)[drop.number]) for drop in schedule.drops]
    return [Drop(number, drop.after, drop.fleeting) for number, drop in zip(numbers, schedule.drops)]


class Told:
    """Is told what to drop, and says that it does where the test replays that."""

    def __init__(self) -> None:
        self.schedule: Schedule | None = None
        self.given_up = self.drops_now = False

    def follow(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def unfollow(self, fingerprint: int) -> None:
        self.given_up = True

    def forget(self) -> None:
        self.given_up = True

    def ended(self) -> int | None:
        return self.schedule.fingerprint if self.schedule is not None and self.drops_now else None

    def figures(self) -> RemakeFigures:
        return RemakeFigures()


def child(background: bool) -> dict[str, Any]:
    from replay import Replay
    from replay_child import make_core, record
    from test_recompute_run import network

    from swapd.background import BackgroundProcess
    from swapd.planner import Planner

    small = replace(network(), variable_bytes=network().variable_bytes * CHUNK // (1 << 20), chunk_bytes=CHUNK)
    trace = record(record(small, BUDGET, CHUNK), BUDGET, CHUNK)
    trace = replace(trace, function_seconds=small.function_seconds, function_start=small.function_start)
    core = make_core(BUDGET, CHUNK)
    planner = Planner(core, recompute=True, executor=BackgroundProcess() if background else None)
    planner.remaker = told = Told()
    first = Replay(core, trace, planner, PACE)
    alone = [first.iteration()]
    while told.schedule is None and len(alone) < 120:
        alone.append(first.iteration())
    assert told.schedule is not None
    before = planner.figures()
    recorded = planner.trace(alone[-1])
    rewritten = rewrite(History(recorded, without_statistics=True), drops_of(told.schedule, recorded))
    same = schedule_of(recorded, recorded, rewritten) == told.schedule
    names = [name + AGAIN * bool(again) for name, again in zip(rewritten.trace.function_names, rewritten.repeated)]
    again = replace(
        rewritten.trace, function_names=tuple(names), function_seconds=small.function_seconds[rewritten.function]
    )
    first.close()
    second = Replay(core, again, planner, PACE)
    told.drops_now = True
    dropping = [second.iteration()]
    while len(dropping) < 120 and not all(one.followed_plan for one in dropping[-8:]):
        dropping.append(second.iteration())
    found = planner.trace(dropping[-1])
    core.audit()
    result = {
        "same": same,
        "names": found.function_names == again.function_names,
        "drops": len(told.schedule.drops),
        "given_up": told.given_up,
        "alone": [[one.followed_plan, one.seconds] for one in alone],
        "dropping": [[one.followed_plan, one.seconds] for one in dropping],
        "fingerprints": len({one.fingerprint for one in dropping}),
        "bound": planner.made[dropping[-1].fingerprint].plan.bound_seconds,
        "bound_alone": before["bound_step_seconds"],
        "compute": float(PACE * small.function_seconds.sum()),
        "unplannable": planner.unplannable_sequences,
    }
    planner.close()
    second.close()
    core.close()
    return result


def run(background: bool) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OOC_EMULATED_BANDWIDTH": LINK}
    command = [sys.executable, __file__, str(int(background))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    assert found["same"] and found["names"] and found["drops"] > 3 and found["unplannable"] == 0
    assert found["fingerprints"] == 1 and found["dropping"][-1][0], "one sequence, under a plan"
    assert not found["given_up"]
    alone, dropping = (min(seconds for _, seconds in found[kind][-3:]) for kind in ("alone", "dropping"))
    assert dropping < 0.9 * alone
    assert found["compute"] < found["bound"] < found["bound_alone"]


@pytest.mark.medium
def test_a_program_on_a_slow_link_is_faster_with_what_it_is_told_to_drop() -> None:
    check(run(background=False))


@pytest.mark.slow
def test_the_same_where_another_process_plans() -> None:
    check(run(background=True))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(child(bool(int(sys.argv[1])))))
