"""Hours of training under random signals: `python -m tests.soak --minutes 60 --out FILE`.

Two processes train the same rounds, one in plain memory and one out-of-core. They are stopped, continued and
interrupted at random; the one that is out-of-core has its budget changed as it goes. Each round must give the same
bits, and the memory of the process must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from swapd.progress import note

ROOT = Path(__file__).parents[2]
CHECKOUT = f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"  # on PYTHONPATH
OUT_OF_CORE = {"OOC_ALLOC": "emulated", "OOC_BUDGET": "6MiB", "OOC_CHUNK_SIZE": "64KiB", "OOC_SMALL_LIMIT": "16KiB"}
GROWTH = 0.02  # of the resident memory between the second and the last quarter of the rounds: noise of the C allocator


def start(lines: Path, out_of_core: bool) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OOC_", "_OOC_"))}
    environment |= {"PYTHONPATH": CHECKOUT, "MALLOC_ARENA_MAX": "2"} | (OUT_OF_CORE if out_of_core else {})
    command = [sys.executable, "tests/soak/program.py", "1" if out_of_core else "0"]
    with lines.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=output)


def disturb(processes: list[subprocess.Popen[bytes]], minutes: float) -> dict[str, int]:
    """Signals at random until the time is over or a process has ended; how many of each."""
    sent = {"STOP": 0, "CONT": 0, "INT": 0}
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until and all(process.poll() is None for process in processes):
        time.sleep(random.expovariate(2.0))
        process = random.choice(processes)
        names = random.choice((("INT",), ("STOP", "CONT"), ("STOP", "INT", "CONT"), ("INT", "INT")))
        for name in names:
            process.send_signal(getattr(signal, f"SIG{name}"))
            sent[name] += 1
            if sum(sent.values()) % 100 == 0:
                note(f"{sum(sent.values())} signals, {(until - time.monotonic()) / 60:.0f} minutes left")
            if name == "STOP":
                time.sleep(random.uniform(0, 0.3))
    return sent


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def growth(rows: list[dict[str, Any]]) -> float:
    """By how much resident memory grew from the second to the last quarter of the rounds, as a ratio."""
    sizes = [row["rss_bytes"] for row in rows]
    quarter = len(sizes) // 4
    return statistics.median(sizes[-quarter:]) / statistics.median(sizes[quarter : 2 * quarter]) - 1


def judge(plain: list[dict[str, Any]], small: list[dict[str, Any]]) -> list[str]:
    """What is wrong with two runs."""
    found = [f"round {a['round']} differs" for a, b in zip(plain, small) if a["digest"] != b["digest"]]
    if min(len(plain), len(small)) < 2 * 12:
        found.append(f"too few rounds: {len(plain)} and {len(small)}")
        return found
    if (grown := growth(small)) > GROWTH:
        found.append(f"resident memory grew by {grown:.1%}")
    if small[-1]["swap_out_bytes"] == 0:
        found.append("nothing was swapped")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long [60]")
    parser.add_argument("--out", type=Path, default=Path("out/soak"), help="folder of results [%(default)s]")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    paths = [chosen.out / "plain.jsonl", chosen.out / "out-of-core.jsonl"]
    processes = [start(path, bool(index)) for index, path in enumerate(paths)]
    for path in paths:  # the handler is there once a round is over
        while not rows_of(path) and all(process.poll() is None for process in processes):
            time.sleep(0.5)
    sent = disturb(processes, chosen.minutes)
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    statuses = [process.wait(timeout=300) for process in processes]
    plain, small = map(rows_of, paths)
    found = judge(plain, small) + [f"a process ended with status {status}" for status in statuses if status]
    report = {
        "machine": machine.describe(),
        "minutes": chosen.minutes,
        "signals": sent,
        "rounds_compared": min(len(plain), len(small)),
        "interrupts_caught": small[-1]["interrupts"],
        "rss_growth": round(growth(small), 4),
        "rss_bytes_by_round": [row["rss_bytes"] for row in small],
        "swap_out_bytes": small[-1]["swap_out_bytes"],
        "settings": OUT_OF_CORE,
        "failures": found,
    }
    (chosen.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in report.items() if name != "rss_bytes_by_round"}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
