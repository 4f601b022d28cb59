"""The benchmark of measured divisions at toy sizes: its raw data say what it promises. No time is looked at."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT, run

MIB = 1 << 20


@pytest.mark.slow
def test_the_example_gives_the_same_bits_in_five_megabytes(tmp_path: Path) -> None:
    script = ROOT / "examples" / "alexnet.py"
    plain = run([script, "--images", "3"], {}).check().output
    small = run(
        [script, "--images", "3"],
        {"OOC_ALLOC": "emulated", "OOC_BUDGET": "5MB", "OOC_SPLIT_STORE": str(tmp_path / "store")},
        summary=tmp_path / "s.json",
    ).check()
    assert plain.splitlines()[-1] == small.output.splitlines()[-1]
    assert plain.splitlines()[-1].startswith("fingerprint ")
    assert small.figures["device_peak_bytes"] <= 5_000_000 and small.figures["split_function_count"] > 0


def filters_bytes(kernel: str) -> int:
    found = re.search(r"weight=f32\[([\dx]+)\]", kernel)
    assert found is not None
    return 4 * math.prod(map(int, found[1].split("x")))


@pytest.mark.slow
def test_the_quick_benchmark(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OOC_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "benchmarks.splitting.measured", "--quick", "--networks", "ResNet-50"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads((tmp_path / "measured" / "ResNet-50.json").read_text(encoding="utf-8"))
    assert record["measurements"] > 0 and record["measurements_of_a_second_run"] == 0
    assert {(p["mode"], p["limit_mib"], p["policy"]) for p in record["plans"]} == {
        (mode, limit, policy)
        for mode in ("WR", "WD")
        for limit in (8, 64, 512)
        for policy in ("undivided", "powerOfTwo", "all")
    }
    kernels = list(record["costs"])
    for plan in record["plans"]:
        executed = plan["executed_workspace_bytes"]
        for kernel, was, planned, parts in zip(kernels, executed, plan["workspace_bytes"], plan["parts"], strict=True):
            # Parts that run one after the other share one workspace. The first part of a sum has its own sum in the
            # result, so a sum may take less by that where only its first part takes so much.
            first = kernel.startswith("BackwardFilter") and len(parts) > 1 and parts[0] not in parts[1:]
            assert was == planned or (first and planned - filters_bytes(kernel) <= was < planned)
        if not plan["over_limit"]:
            assert (max(executed) if plan["mode"] == "WR" else sum(executed)) <= plan["limit_bytes"]
        for parts in plan["parts"]:
            assert sum(size for size, _ in parts) == record["batch"]
    assert len(record["executed_seconds"]) == len({plan["executed"] for plan in record["plans"]})
    assert "ResNet-50, 3" in (tmp_path / "measured.md").read_text(encoding="utf-8")
