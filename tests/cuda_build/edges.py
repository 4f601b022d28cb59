"""Which whole program notices that an edge between streams is left out: `python -m tests.cuda_build.edges`.

The core is built so that an edge can be left out (`stream_order.h`). Each program runs without each edge, with up to
three seeds of random delays; it has noticed if a bit is wrong, if it faults or hangs, or if the core refuses to go on.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.cuda_build import stand_in
from tests.cuda_build.programs import PROGRAMS

BUILT = stand_in.ROOT / "build" / "edges"
SEEDS = (1, 2, 3)
TIMEOUT_SECONDS = 120


def build() -> None:
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DOOC_BUILD_TESTS=OFF", "-DCMAKE_CXX_FLAGS=-DOOC_EDGES_CAN_BE_OMITTED"]
    for command in (["cmake", "-S", str(stand_in.ROOT), "-B", str(BUILT), *options], ["cmake", "--build", str(BUILT)]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def edges() -> dict[int, str]:
    """The edges by their numbers, from the header."""
    text = (stand_in.NATIVE / "stream_order.h").read_text()
    return {int(number): name for name, number in re.findall(r"^  (k\w+) = (\d),", text, re.MULTILINE)}


def run(name: str, budget_bytes: int, seed: int | None = None, edge: int | None = None) -> tuple[str, int]:
    """What came of it (a digest, or how it ended), and the bytes that lived at once."""
    variables = {"OOC_BUDGET": str(budget_bytes), "OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "64KiB"}
    if edge is not None:
        variables |= {"OOC_WITHOUT_EDGE": str(edge), "_OOC_LIBRARIES": str(BUILT)}
    command = stand_in.command(Path(__file__).with_name("programs.py"), name)
    environment = stand_in.environment(seed, **variables)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "hangs", 0
    if done.returncode != 0:
        return f"ends with status {done.returncode}", 0
    result = json.loads(done.stdout.splitlines()[-1])
    return str(result["digest"]), int(result["summary"]["live_peak_bytes"])


def main() -> int:
    build()
    expected = {name: run(name, 2 << 30) for name in PROGRAMS}
    print("| edge left out | noticed by | how |\n|---|---|---|")
    missed = 0
    for edge, title in edges().items():
        noticed: dict[str, str] = {}
        for name, (digest, live_bytes) in expected.items():
            for seed in SEEDS:
                found, _ = run(name, int(live_bytes / 2.5), seed, edge)
                if found != digest:
                    noticed[name] = found if " " in found or found == "hangs" else "wrong bits"
                    break
        missed += not noticed
        ways = ", ".join(sorted(set(noticed.values())))
        print(f"| {title} | {', '.join(noticed) or 'nobody'} | {ways} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
