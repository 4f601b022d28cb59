"""`ooc.sleep()` and `ooc.wake()` around training steps: the same bits, and a device that is empty meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import Ended, code, run_source

TRAINING = """
    import hashlib, resource, sys
    import torch
    import torch.nn.functional as F
    from torch import nn

    import ooc
    from ooc_alloc import device_memory, library_path

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 192), nn.Linear(192, 768), nn.GELU(), nn.Dropout(0.1), nn.Linear(768, 192),
                          nn.LayerNorm(192), nn.Linear(192, 500))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    words = torch.randint(0, 500, (4, 64))

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    def used():
        total, free = device_memory(str(library_path("libooc_emulated_cuda.so")))
        return total - free

    def resident():  # KiB
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

    def digest():
        tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
        return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
"""

STEPS = """
    rounds = ROUNDS
    losses, most, sizes = [], 0, []
    for index in range(rounds):
        losses.append(step())
        if ooc.enabled() and index >= 5:
            assert ooc.sleep() == 0, "something stays on the device"
            most = max(most, used())
            if index % 3:
                assert ooc.wake() > 0
                assert ooc.wake() == 0
            sizes.append(resident())
    print("result", losses[-1], digest())
    if sizes:
        half = len(sizes) // 2
        print("device", most, "grown", max(sizes[half:]) - max(sizes[:half]))
"""

ALONE = {"OOC_BUDGET": "4MiB"}
ON_DISK = {"OOC_ALLOC": "cpu", "OOC_BUDGET": "4MiB"}
IN_THREE_TIERS = {"OOC_BUDGET": "4MiB", "OOC_HOST_BUDGET": "6MiB"}


def both(folder: Path, rounds: int, variables: dict[str, str]) -> tuple[Ended, Ended]:
    source = code(TRAINING, STEPS.replace("ROUNDS", str(rounds)))
    (folder / "plain").mkdir()
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(run_source, folder / "plain", source, OOC_ALLOC="0")
        slept = pool.submit(run_source, folder, source, **variables)
        return plain.result().check(), slept.result().check()


def line(ended: Ended, word: str) -> list[str]:
    return next(row.split()[1:] for row in ended.output.splitlines() if row.startswith(word))


@pytest.mark.parametrize("where", ["host", "disk", "three tiers"])
@pytest.mark.medium
def test_training_that_sleeps_gives_the_same_bits(tmp_path: Path, where: str) -> None:
    variables = {"host": ALONE, "disk": ON_DISK, "three tiers": IN_THREE_TIERS}[where]
    if where != "host":
        (tmp_path / "disk").mkdir()
        variables = variables | {"OOC_DISK": str(tmp_path / "disk")}
    plain, slept = both(tmp_path, 30, variables)
    assert line(slept, "result") == line(plain, "result")
    assert line(slept, "device")[0] == "0"
    assert slept.figures["planned_iteration_count"] > 0


@pytest.mark.slow
def test_a_thousand_rounds_leak_nothing(tmp_path: Path) -> None:
    plain, slept = both(tmp_path, 1000, ALONE)
    assert line(slept, "result") == line(plain, "result")
    device, grown = line(slept, "device")[0], int(line(slept, "device")[2])
    assert device == "0" and grown <= 512  # KiB, in 500 rounds


def test_what_is_reached_past_pytorch_stays(tmp_path: Path) -> None:
    ended = run_source(
        tmp_path,
        code(
            TRAINING,
            """
            for _ in range(6):
                step()
            small, large = torch.arange(100), torch.arange(100_000)
            views = [small.numpy(), large.numpy()]
            held = ooc.sleep()
            assert held == used() and 0 < held <= 4 * 65536 * 4, held
            assert views[0].tolist() == list(range(100)) and views[1][::1000].tolist() == list(range(0, 100_000, 1000))
            del views
            assert small.tolist() == list(range(100))  # wakes it
            assert ooc.sleep() == 0 == used()
            print("loss", step())
            """,
        ),
        **ALONE,
    ).check()
    assert float(line(ended, "loss")[0]) > 0


def test_a_forked_child_of_a_process_that_sleeps_has_every_value(tmp_path: Path) -> None:
    run_source(
        tmp_path,
        code(
            TRAINING,
            """
            import os
            for _ in range(6):
                step()
            before = digest()
            expected = [parameter.detach().clone() for parameter in model.parameters()]
            assert ooc.sleep() == 0
            child = os.fork()
            if child == 0:
                same = all(torch.equal(a, b) for a, b in zip(expected, model.parameters()))
                os._exit(0 if same and digest() == before else 1)
            assert os.waitpid(child, 0)[1] == 0
            ooc.wake()
            assert digest() == before
            """,
        ),
        **ALONE,
    ).check()


def test_sleep_without_room_on_the_host(tmp_path: Path) -> None:
    ended = run_source(
        tmp_path,
        code(
            TRAINING,
            """
            kept = torch.ones(700_000)
            try:
                ooc.sleep()
            except torch.OutOfMemoryError as error:
                print("said", error)
            assert kept.sum().item() == 700_000 and step() > 0
            try:
                with torch.no_grad():
                    ooc.disable()
                    ooc.sleep()
            except Exception as error:
                print("off", type(error).__name__, error)
            """,
        ),
        OOC_BUDGET="12MiB",
        OOC_HOST_BUDGET="1MiB",
    ).check()
    assert "cannot leave the device" in ended.output and "OOC_HOST_BUDGET" in ended.output
    assert "off OocError the allocator is off" in ended.output
