"""Threads, forks, signals, exceptions and every way to end: no crash, no hang, no wrong bytes, and a valid summary."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import EMULATED, TIMEOUT_SECONDS, Ended, code, environment, read_summary, run_source, write_script

BUDGET = str(12 << 20)

# Trains with a live peak of about 30 MiB. `table` is larger than a slab and, after `press()`, swapped out.
TRAINING = """
    import os, signal, sys, threading, time
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(7)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 512)

    def values(seed, rows=1024):
        return torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    def press():
        kept = [values(seed) for seed in range(50, 58)]
        return sum(part.sum() for part in kept)

    def swapped_out():
        import ooc
        return ooc.summary()["swap_out_bytes"] if ooc.enabled() else 1
"""


def run_training(folder: Path, source: str, **variables: str) -> Ended:
    return run_source(folder, code(TRAINING, source), **{"OOC_BUDGET": BUDGET, **variables})


def run_both(folder: Path, source: str, **variables: str) -> tuple[Ended, Ended]:
    """In plain memory and out-of-core, at the same time."""
    (folder / "plain").mkdir()
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(run_training, folder / "plain", source, OOC_ALLOC="0")
        small = pool.submit(run_training, folder, source, **variables)
        return plain.result(), small.result()


def check_same(tmp_path: Path, source: str, budget: str = BUDGET) -> Ended:
    """The script prints the same out-of-core as in plain memory, and data did leave the device."""
    plain, small = run_both(tmp_path, source, OOC_BUDGET=budget)
    for ended in (plain, small):
        assert ended.status == 0, f"status {ended.status}\n{ended.output}\n{ended.errors[-6000:]}"
    assert small.output == plain.output != ""
    check_figures(small.figures, budget)
    return small


def check_figures(figures: dict[str, Any], budget: str = BUDGET) -> None:
    assert figures["final"]
    assert figures["swap_out_bytes"] > 0
    assert 0 < figures["device_peak_bytes"] <= figures["budget_bytes"] == int(budget)
    assert figures["external_fragmentation_ratio"] == 0


# ---- processes ------------------------------------------------------------------------------------------------------

LOADER = """
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __init__(self, table):
            self.table = table

        def __len__(self):
            return 24

        def __getitem__(self, index):
            return self.table[index * 16:index * 16 + 16] * 2, self.table.sum()

    def main(method, persistent):
        table = values(1)
        press()
        assert swapped_out() > 0
        expected = values(1)
        loader = DataLoader(Rows(table), batch_size=4, num_workers=2, multiprocessing_context=method,
                            persistent_workers=persistent)
        losses = []
        for epoch in range(2):
            seen = 0
            for rows, sums in loader:
                first = seen * 16
                assert torch.equal(rows.reshape(-1, 512), expected[first:first + 64] * 2), (epoch, seen)
                assert all(total == expected.sum() for total in sums)
                seen += len(sums)
                losses.append(step())
            assert seen == 24
            table.mul_(1.0)
            press()
        assert torch.equal(table, expected)
        print(losses)

    if __name__ == "__main__":
        main(METHOD, PERSISTENT)
"""


@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", False), *(pytest.param(method, True, marks=pytest.mark.slow) for method in ("fork", "spawn"))],
)
@pytest.mark.medium
def test_workers_of_a_loader(tmp_path: Path, method: str, persistent: bool) -> None:
    """Workers read a tensor that was swapped out when they were started, while the parent goes on training."""
    source = LOADER.replace("METHOD", repr(method)).replace("PERSISTENT", repr(persistent))
    ended = check_same(tmp_path, source)
    assert ended.figures["steps"] > 10, "a worker's summary would have none"


def test_fork_without_a_loader(tmp_path: Path) -> None:
    """Each process keeps its own bytes, whichever writes; both go on training; a child may fork again."""
    source = """
        table = values(1)
        losses = [step(), step()]
        press()
        assert swapped_out() > 0
        sys.stdout.flush()
        ready, go = os.pipe()
        for leave in ("exit", "_exit"):
            child = os.fork()
            if child == 0:
                assert torch.equal(table, values(1))
                table.mul_(2)
                press()
                assert torch.equal(table, values(1) * 2)
                mine = losses + [step(), step()]
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit(0 if torch.equal(table, values(1) * 2) and step() < mine[-1] else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
                assert mine[-1] < mine[0]
                if leave == "exit":
                    sys.exit(7)
                os._exit(7)
            press()
            table.add_(0)
            assert torch.equal(table, values(1))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert torch.equal(table, values(1))
        losses += [step(), step()]
        print(losses)
    """
    ended = check_same(tmp_path, source)
    assert ended.figures["steps"] >= 4, "the summary is the parent's"
    assert [path.name for path in tmp_path.glob("*.json")] == ["summary.json"], "a forked child writes none"


def test_child_trains_as_the_parent_does(tmp_path: Path) -> None:
    """A fork in the middle of training: both sides end with the same parameters."""
    source = """
        losses = [step() for _ in range(3)]
        sys.stdout.flush()
        child = os.fork()
        losses += [step() for _ in range(3)]
        total = sum(p.double().sum() for p in model.parameters()).item()
        if child != 0:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print(losses, total)
    """
    ended = check_same(tmp_path, source)
    one, other = ended.output.splitlines()
    assert one == other


def test_fork_while_threads_run_operators(tmp_path: Path) -> None:
    source = """
        # Once before: a first call sets PyTorch's own statics up, and a child of that moment waits for ever.
        assert torch.equal(values(4) * 2, values(4) * 2)
        stop = threading.Event()
        failures = []

        def work(seed):
            tensor = values(seed)
            try:
                while not stop.is_set():
                    assert torch.equal(tensor * 2, values(seed) * 2)
            except BaseException as error:
                failures.append(error)

        workers = [threading.Thread(target=work, args=(seed,)) for seed in (5, 6)]
        for worker in workers:
            worker.start()
        table = values(1)
        for turn in range(6):
            child = os.fork()
            if child == 0:
                os._exit(0 if torch.equal(table, values(1)) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        for worker in workers:
            worker.join()
        assert not failures, failures
        print([step() for _ in range(3)])
    """
    check_same(tmp_path, source)


@pytest.mark.medium
def test_subprocesses(tmp_path: Path) -> None:
    """Programs started by an active one, in every way that forks; none writes over its summary."""
    source = """
        import multiprocessing, subprocess
        table = values(1)
        losses = [step(), step()]
        press()
        for options in ({}, {"preexec_fn": os.setpgrp}, {"close_fds": False}):
            assert subprocess.run([sys.executable, "-c", "print(3)"], capture_output=True, text=True,
                                  **options).stdout == "3\\n"
        own = "import torch; print(torch.full((512, 512), 2.0).sum().item())"
        assert subprocess.run([sys.executable, "-c", own], capture_output=True, text=True).stdout == "524288.0\\n"
        assert os.system("exit 3") >> 8 == 3
        assert os.popen("echo hello").read() == "hello\\n"
        process = multiprocessing.get_context("fork").Process(target=table.mul_, args=(2,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert torch.equal(table, values(1))
        losses += [step(), step()]
        print(losses)
    """
    ended = check_same(tmp_path, source)
    assert ended.figures["steps"] == 4


# ---- threads --------------------------------------------------------------------------------------------------------


def test_threads_that_run_operators(tmp_path: Path) -> None:
    # Functions that run at the same time are pinned at the same time: four threads take 6 MiB each.
    source = """
        from concurrent.futures import ThreadPoolExecutor

        tables = [values(seed) for seed in range(6)]
        kept = [values(seed) for seed in range(50, 62)]  # the tables have to leave

        def work(index):
            for _ in range(3):
                assert torch.equal(tables[index], values(index)), index
            with torch.no_grad():
                return (tables[index][:, :64] @ tables[index][:, :64].T).sum().item()

        with ThreadPoolExecutor(4) as pool:
            sums = list(pool.map(work, range(6)))
        print(sums, [step() for _ in range(3)])
    """
    check_same(tmp_path, source, budget=str(28 << 20))


def test_daemon_threads_at_exit(tmp_path: Path) -> None:
    """The interpreter ends while threads wait and hold tensors; exit_running is about one within an operator."""
    source = """
        held = threading.local()
        started = [threading.Event() for _ in range(2)]

        def wait(index):
            held.tensor = values(index) * 2
            started[index].set()
            threading.Event().wait()

        for index in range(2):
            threading.Thread(target=wait, args=(index,), daemon=True).start()
        for event in started:
            event.wait()
        KEPT = [values(4), model]
        KEPT.append(KEPT)
        print([step() for _ in range(3)])
    """
    check_same(tmp_path, source)


# ---- exceptions and signals -----------------------------------------------------------------------------------------


def test_exceptions_and_interrupts(tmp_path: Path) -> None:
    """An error in forward, one in backward and one in an operator; SIGINT within a step; then on, then out."""
    source = """
        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return y.clone()

            @staticmethod
            def backward(ctx, gradient):
                raise ValueError("in backward")

        def fail(*_):
            raise ValueError("in forward")

        losses, caught = [step(), step()], []

        def attempt(action):
            try:
                action()
            except (ValueError, RuntimeError, KeyboardInterrupt) as error:
                caught.append(type(error).__name__)

        handle = model[3].register_forward_hook(fail)
        attempt(step)
        handle.remove()
        losses.append(step())
        attempt(lambda: Fails.apply(model(x)).sum().backward())
        losses.append(step())
        attempt(lambda: model(x) @ model(x))
        attempt(lambda: torch.linalg.inv(torch.zeros(300, 300)))
        for layer in (2, 5):
            handle = model[layer].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
            attempt(step)
            handle.remove()
            losses.append(step())
        print(losses, caught)
        sys.stdout.flush()
        signal.raise_signal(signal.SIGINT)
    """
    plain, small = run_both(tmp_path, source)
    assert small.output == plain.output
    assert small.output.count("KeyboardInterrupt") == 2
    assert small.status == plain.status == -signal.SIGINT
    assert "KeyboardInterrupt" in small.errors
    check_figures(small.figures)


ENDINGS = {
    "return": ("pass", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "exception": ("raise ValueError('the end')", 1),
    "sigterm": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    "sighup": ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)", -signal.SIGHUP),
    "own handler": ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM)", 5),
    "exit in a thread": ("t = threading.Thread(target=os._exit, args=(6,)); t.start(); t.join()", 6),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.medium
def test_summary_however_the_program_ends(tmp_path: Path, ending: str) -> None:
    last, status = ENDINGS[ending]
    source = f"""
        print([step() for _ in range(3)])
        sys.stdout.flush()
        kept = values(1) * 2
        {last}
    """
    ended = run_training(tmp_path, source)
    assert ended.status == status, ended.errors[-4000:]
    assert ended.output
    check_figures(ended.figures)
    assert ended.figures["steps"] == 3


@pytest.mark.parametrize("last", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.medium
def test_killed_from_outside(tmp_path: Path, last: signal.Signals) -> None:
    """The summary is whole JSON at any time; SIGKILL leaves the one of the last boundary or so, SIGTERM a last one."""
    script = write_script(tmp_path, code(TRAINING, "while True: print(step(), flush=True)"))
    path = tmp_path / "summary.json"
    variables = {**EMULATED, "OOC_BUDGET": BUDGET, "OOC_SUMMARY": str(path)}
    process = subprocess.Popen(
        [sys.executable, str(script)], env=environment(variables), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        deadline = time.monotonic() + TIMEOUT_SECONDS
        seen: list[int] = []
        while len(seen) < 3 and process.stdout.readline() and time.monotonic() < deadline:
            figures = read_summary(path)  # raises if it is half a file
            assert figures is not None and not figures["final"]
            if figures["steps"] not in (0, *seen):
                seen.append(figures["steps"])
        assert len(seen) == 3, "it is written again and again"
        process.send_signal(last)
        process.stdout.read()
        assert process.wait(timeout=TIMEOUT_SECONDS) == -last
    finally:
        process.kill()
        process.wait()
    figures = read_summary(path)
    assert figures is not None and figures["steps"] >= seen[-1]
    assert figures["final"] == (last == signal.SIGTERM)
    assert figures["swap_out_bytes"] > 0 and figures["device_peak_bytes"] <= figures["budget_bytes"]
    assert [path.name for path in tmp_path.glob("*.json")] == ["summary.json"]


def test_signal_within_a_write_of_the_summary(tmp_path: Path) -> None:
    """SIGTERM while the periodic summary is being written: it does not wait for itself."""
    source = """
        import json
        import ooc
        import swapd.summary

        plain_dumps = json.dumps
        written = []

        def dumps(summary, **options):
            written.append(summary["final"])
            if len(written) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.1)
            return plain_dumps(summary, **options)

        json.dumps = dumps
        print("started", flush=True)
        while True:
            step()
    """
    ended = run_training(tmp_path, source)
    assert ended.status == -signal.SIGTERM, ended.errors
    assert ended.output == "started\n"
    check_figures(ended.figures)


def test_exit_while_the_daemon_is_at_work(tmp_path: Path) -> None:
    """A slow link, and an end in the middle of a planned iteration: transfers are under way."""
    source = """
        losses = [step() for _ in range(4)]
        loss = F.mse_loss(model(x), x)
        print(losses, loss.item())
        loss.backward()
    """
    plain, small = run_both(tmp_path, source, OOC_EMULATED_BANDWIDTH="200MiB/s")
    assert small.check().output == plain.check().output
    check_figures(small.figures)
