"""Plans that are made by another process while the program goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from processes import run_source

PROGRAM = """
    import json, os, pathlib, sys, time
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(64, 256)

    def planned():
        return "ooc" in sys.modules and sys.modules["ooc"].pytorch.summary()["plan_count"] > 0

    def children():
        tasks = pathlib.Path("/proc/self/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]

    for step in range(40):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if step == 8:
            KILL
            began = time.monotonic()
            while os.environ["OOC_ALLOC"] != "0" and time.monotonic() < began + 60 and not settled():
                time.sleep(0.01)
    weights = [weight.double().sum().item().hex() for weight in model.parameters()]
    print(json.dumps({"weights": weights, "children": children()}))
    """
SETTLED = """
    def settled():
        asked = __import__("ooc").pytorch._active().planner._asked
        return asked is None or asked[2].done()
    """


def train(folder: Path, planning: str, alloc: str = "emulated", kill: str = "pass") -> tuple[dict[str, Any], Any]:
    program = SETTLED + PROGRAM.replace("KILL", kill)
    settings = {"OOC_ALLOC": alloc, "OOC_BUDGET": "3MiB", "OOC_PLANNING": planning}
    ended = run_source(folder, program, **settings).check()
    return json.loads(ended.output.splitlines()[-1]), ended


@pytest.mark.medium
def test_plans_arrive_while_the_program_goes_on(tmp_path: Path) -> None:
    plain, _ = train(tmp_path, "blocking", alloc="0")
    blocking, ended = train(tmp_path, "blocking")
    assert blocking == plain == {"weights": plain["weights"], "children": []}
    assert ended.figures["planned_iteration_count"] > 30
    background, ended = train(tmp_path, "background")
    assert background["weights"] == plain["weights"]
    figures = ended.figures
    assert figures["plan_count"] >= 1 and 20 < figures["planned_iteration_count"] < 38
    assert figures["planning_seconds"] > 0 and figures["no_plan_reason"] is None
    (child,) = background["children"]
    waits = (time.sleep(0.01) for _ in range(500))
    assert any(not Path(f"/proc/{child}").exists() for _ in waits)


def test_a_planning_process_that_is_killed_costs_nothing_but_time(tmp_path: Path) -> None:
    kill = "[os.kill(pid, 9) for pid in children()]"
    killed, ended = train(tmp_path, "background", kill=kill)
    plain, _ = train(tmp_path, "blocking", alloc="0")
    assert killed["weights"] == plain["weights"]
    assert ended.figures["planned_iteration_count"] > 20
