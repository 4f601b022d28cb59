"""Uneven batches over ranks of unlike speed: the gradients of one process, and the least time of the slowest rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import EMULATED, TIMEOUT_SECONDS, code, environment, write_script

from ooc.pytorch.uneven import BatchSampler, Division, interpolated

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

RANK = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ooc.pytorch import uneven

dist.init_process_group("gloo")
rank = dist.get_rank()

def say(text):
    sys.stdout.write(f"rank {rank} {text}\\n")  # at once: both ranks write here
    sys.stdout.flush()

def new_model():
    torch.manual_seed(0)
    layers = (nn.Linear(96, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 7))
    return nn.Sequential(*layers).double()

def samples(size):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 96, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 7, (size,), generator=generator)

seconds = [0.0]  # a clock of our own: rank 1 takes four times as long as rank 0
trial = new_model()

def run(size):
    x, y = samples(size)
    nn.functional.cross_entropy(trial(x), y).backward()
    seconds[0] += size * (4.0 if rank else 1.0)

"""

TRAIN = """
division = uneven.measure(64, run, clock=lambda: seconds[0])
say(f"sizes {division.sizes} predicted {division.predicted_seconds}")
assert seconds[0] > 0

x, y = samples(64)
whole = new_model()
optimizer_of_whole = torch.optim.SGD(whole.parameters(), lr=0.1)
model = DistributedDataParallel(new_model())
uneven.weigh_gradients(model, division)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mine = division.samples
largest = 0.0
for step in range(4):
    nn.functional.cross_entropy(whole(x), y).backward()
    nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
    for expected, found in zip(whole.parameters(), model.parameters()):
        largest = max(largest, ((expected.grad - found.grad).abs().max() / expected.grad.abs().max()).item())
    optimizer.step(), optimizer_of_whole.step()
    optimizer.zero_grad(), optimizer_of_whole.zero_grad()
say(f"largest {largest:.3e} {'right' if largest < 1e-13 else 'WRONG'}")
dist.destroy_process_group()
"""


def launched(folder: Path, *parts: str, **variables: str) -> tuple[int, str]:
    """Status and output of both ranks; none of them outlives this."""
    command = [sys.executable, *TORCHRUN, str(write_script(folder, code(*parts)))]
    pipe = subprocess.PIPE
    running = subprocess.Popen(
        command, env=environment(variables), stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = running.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    return running.returncode, output


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, marks=pytest.mark.slow, id="plain"),
        pytest.param({**EMULATED, "OOC_BUDGET": "9MiB"}, id="out-of-core"),
    ],
)
def test_two_ranks_have_the_gradients_of_one_process(tmp_path: Path, variables: dict[str, str]) -> None:
    status, output = launched(tmp_path, RANK, TRAIN, **variables)
    assert status == 0, output[:6000]
    for rank in (0, 1):
        # 52 samples at 1 and 12 at 4: slowest 52. No other division is done sooner, and 51 and 13 take as long.
        assert f"rank {rank} sizes (52, 12) predicted (52.0, 48.0)" in output
        assert any(line.startswith(f"rank {rank} largest") and line.endswith("right") for line in output.splitlines())


SMALL = """
def run_small(size):
    if rank == 0 and size > 16:  # the faster one has room for 16 samples
        raise torch.OutOfMemoryError("no room")
    run(size)

division = uneven.measure(64, run_small, clock=lambda: seconds[0])
say(f"sizes {division.sizes}")
try:
    uneven.measure(64, lambda size: run_small(size + 48 * rank), sizes=[16], clock=lambda: seconds[0])
except Exception as error:
    say(f"{type(error).__name__}: {error}")
"""
WRONG = """
for wrong in ({"sizes": [0, 2]}, {"sizes": []}, {"repetitions": 0}, {"batch": 1}):
    try:
        uneven.measure(run=run, **{"batch": 64, **wrong})
    except ValueError as error:
        say(f"{error}")
model = DistributedDataParallel(new_model())
try:
    uneven.weigh_gradients(model, uneven.Division(0, (1, 2, 3), (0.0, 0.0, 0.0)))
except ValueError as error:
    say(f"{error}")
"""


@pytest.mark.slow
def test_a_rank_with_little_memory_gets_little_and_errors_are_clear(tmp_path: Path) -> None:
    status, output = launched(tmp_path, RANK, SMALL, WRONG)
    assert status == 0, output[:6000]
    for rank in (0, 1):
        assert f"rank {rank} sizes (16, 48)" in output
        assert f"rank {rank} UnreachableBatchError: 2 devices: the measured sizes do not" in output
    assert output.count("every rank gets at least one step") == 4
    assert output.count("sizes to measure are numbers from 1 on") == 4
    assert output.count("divided among 3 ranks, and the group has 2") == 2


def test_times_between_two_sizes_are_on_the_line() -> None:
    assert interpolated({1: 1.0, 4: 2.5, 8: 2.5}, 6) == {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5, 5: 2.5, 6: 2.5}
    assert interpolated({4: 2.0, 8: 4.0}, 64, step=2) == {2: 2.0, 4: 2.0, 6: 3.0, 8: 4.0}
    assert interpolated({}, 6) == {}


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_goes_to_one_rank_once(shuffle: bool) -> None:
    sizes = (5, 2, 1)
    samplers = [BatchSampler(45, Division(rank, sizes, (0.0,) * 3), shuffle=shuffle, seed=3) for rank in range(3)]
    epochs = []
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(found) for found in batches] == [5, 5, 5]
        assert all(len(batch) == size for size, found in zip(sizes, batches) for batch in found)
        given = [index for found in batches for batch in found for index in batch]
        assert len(set(given)) == len(given) == 40
        assert set(given) <= set(range(45))
        epochs.append(batches)
    assert (epochs[0] == epochs[1]) != shuffle
    if not shuffle:
        assert [found[0] for found in epochs[0]] == [[0, 1, 2, 3, 4], [5, 6], [7]]


def test_too_few_samples_are_said() -> None:
    with pytest.raises(ValueError, match="7 samples do not fill a batch of 8"):
        BatchSampler(7, Division(0, (5, 3), (0.0, 0.0)))
