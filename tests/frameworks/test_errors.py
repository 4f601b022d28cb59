"""What goes wrong outside the program: a clear error, or it degrades as designed; the program's data survive."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import code, read_summary, run, run_source, write_script

MIB = 1 << 20

# A loop that trains and a digest of all that it leaves; `budget` is far below the live peak of about 33 MiB.
TRAINING = """
    import hashlib
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 512)

    def step():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        optimizer.step()
        return loss.item()

    def digest():
        hash = hashlib.sha256()
        states = [value for state in optimizer.state.values() for value in state.values()]
        for tensor in [*model.parameters(), *states]:
            hash.update(tensor.detach().numpy().tobytes())
        return hash.hexdigest()
"""
TRAIN_SIX = code(TRAINING, "print([step() for _ in range(6)], digest())")
TRAINING_BUDGET = str(12 * MIB)


@pytest.fixture(scope="module")
def plain_training(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What TRAIN_SIX prints in plain memory."""
    return run_source(tmp_path_factory.mktemp("plain"), TRAIN_SIX, OOC_ALLOC="0").check().output


# ---- too little memory ----------------------------------------------------------------------------------------------

TOO_SMALL = """
    import torch

    def values(seed, rows=1024):
        return torch.randn(rows, 1024, generator=torch.Generator().manual_seed(seed))

    a, b = values(1), values(2)
    others = [values(seed) for seed in range(3, 9)]
    try:
        whole = a @ b
        print("whole", whole.shape)
    except torch.OutOfMemoryError as error:
        print(error)
    product = torch.cat([part @ b for part in a.split(128)[:2]])
    print("product", product.double().sum().item())
    for seed, tensor in zip((1, 2, *range(3, 9)), (a, b, *others), strict=True):
        expected = values(seed)
        assert torch.equal(tensor, expected), seed
"""


def test_function_larger_than_the_budget(tmp_path: Path) -> None:
    small = run_source(tmp_path, TOO_SMALL, OOC_BUDGET="10MiB", OOC_SPLIT="off").check()
    error, product = small.output.splitlines()
    assert "aten::mm" in error
    assert f"needs {12 * MIB} bytes" in error
    assert f"the budget is {10 * MIB} bytes" in error
    smallest = re.search(r"smallest budget that works for it is (\d+) bytes", error)
    assert smallest, error
    assert f"OOC_BUDGET={smallest[1]}" in error
    assert small.figures["device_peak_bytes"] <= 10 * MIB
    assert small.figures["min_budget_bytes"] == int(smallest[1])

    enough = run_source(tmp_path, TOO_SMALL, OOC_BUDGET=smallest[1]).check()
    assert enough.output.splitlines() == ["whole torch.Size([1024, 1024])", product], "the budget that it named works"
    assert enough.figures["device_peak_bytes"] <= int(smallest[1])

    parts = run_source(tmp_path, TOO_SMALL, OOC_BUDGET="10MiB").check()
    assert parts.output == enough.output, "without OOC_SPLIT=off it runs: in parts, or on host memory"
    assert parts.figures["device_peak_bytes"] <= 10 * MIB
    assert parts.figures["split_function_count"] + parts.figures["host_backed_function_count"] > 0


def test_training_goes_on_with_a_smaller_batch(tmp_path: Path) -> None:
    source = code(
        TRAINING,
        """
        import ooc
        plain = [p.detach().clone() for p in model.parameters()]
        whole = x
        x = torch.randn(4096, 512)
        try:
            if not ooc.enabled():  # all else is to be the same in plain memory
                raise torch.OutOfMemoryError('aten::, OOC_BUDGET')
            step()
        except torch.OutOfMemoryError as error:
            print("refused", "aten::" in str(error), "OOC_BUDGET" in str(error))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain, strict=True))
        x = whole
        print([step() for _ in range(4)], digest())
    """,
    )
    small = run_source(tmp_path, source, OOC_BUDGET=TRAINING_BUDGET, OOC_SPLIT="off").check()
    plain = run_source(tmp_path, source, OOC_ALLOC="0").check()
    assert small.output == plain.output != ""
    assert small.figures["swap_in_bytes"] > 0


def test_host_budget_too_small(tmp_path: Path) -> None:
    source = """
        import torch

        def values(seed):
            return torch.randn(512, 1024, generator=torch.Generator().manual_seed(seed))

        made = {}
        try:
            for seed in range(40):
                made[seed] = values(seed)
        except torch.OutOfMemoryError as error:
            print(error)
        print(len(made))
        for seed in list(made)[:4]:
            del made[seed]
        more = values(100) * 2
        for seed, tensor in made.items():
            assert torch.equal(tensor, values(seed)), seed
        assert torch.equal(more, values(100) * 2)
    """
    ended = run_source(tmp_path, source, OOC_BUDGET="16MiB", OOC_HOST_BUDGET="8MiB").check()
    error, made = ended.output.splitlines()
    assert "OOC_HOST_BUDGET" in error and str(8 * MIB) in error
    assert 8 <= int(made) <= 12, "2 MiB each, 16 MiB on the device and 8 on the host"
    assert ended.figures["host_peak_bytes"] <= 8 * MIB
    assert ended.figures["device_peak_bytes"] <= 16 * MIB


def test_many_small_tensors_stay_within_the_budget(tmp_path: Path) -> None:
    source = """
    import torch
    tensors = [torch.full((2560,), float(index)) for index in range(3000)]
    print(sum(float(tensor.mean()) for tensor in tensors))
    """
    ended = run_source(tmp_path, source, OOC_BUDGET="8MiB", OOC_SMALL_LIMIT="32KiB").check()
    assert ended.output == f"{3000 * 2999 / 2}\n"
    assert ended.figures["device_peak_bytes"] <= 8 * MIB
    assert ended.figures["swap_out_bytes"] > 0


# ---- the two lines --------------------------------------------------------------------------------------------------

SUMMARY_KEYS = """
    device budget_bytes live_peak_bytes device_peak_bytes host_peak_bytes swap_out_bytes swap_in_bytes swap_out_count
    swap_in_count demand_swap_in_count clean_drop_count divergence_count plan_count functions steps
    stall_seconds step_seconds policy window_bytes internal_fragmentation_ratio external_fragmentation_ratio
    min_budget_bytes
""".split()


def test_enable_disable_and_summary(tmp_path: Path, plain_training: str) -> None:
    before = """
    import ooc
    from ooc_alloc import OocError

    settings = dict(alloc="emulated", budget=BUDGET, chunk_size="64KiB", small_limit="64KiB", summary=SUMMARY)
    ooc.enable(**settings)
    ooc.enable(**settings)
    try:
        ooc.enable(**{**settings, "budget": "99MiB"})
    except OocError as error:
        assert "other settings" in str(error), error
    else:
        raise AssertionError("other settings were accepted")
    assert ooc.enabled()
    """
    after = """
    losses = [step() for _ in range(3)]
    array = model[0].weight.detach().numpy()
    before, address = digest(), model[3].weight.data_ptr()
    figures = ooc.summary()
    assert figures["steps"] == 3 and figures["swap_in_bytes"] > 0, figures
    missing = set(KEYS) - set(figures)
    assert not missing, missing
    ooc.disable()
    assert not ooc.enabled()
    assert digest() == before and model[3].weight.data_ptr() == address
    assert (array == model[0].weight.detach().numpy()).all()
    for call in (ooc.summary, ooc.step):
        try:
            call()
        except OocError as error:
            assert "off" in str(error)
        else:
            raise AssertionError("it is off")
    ooc.disable()
    losses += [step() for _ in range(3)]
    print(losses, digest())
    """
    source = code(before, TRAINING, after).replace("BUDGET", repr(TRAINING_BUDGET)).replace("KEYS", repr(SUMMARY_KEYS))
    path = tmp_path / "own.json"
    script = write_script(tmp_path, source.replace("SUMMARY", repr(str(path))))
    ended = run([script], {}).check()
    assert ended.output == plain_training
    summary = read_summary(path)
    assert summary is not None and summary["final"] and summary["steps"] == 3
    assert summary["device_peak_bytes"] <= summary["budget_bytes"] == int(TRAINING_BUDGET)


def test_enable_again_after_disable(tmp_path: Path, plain_training: str) -> None:
    before = """
    import ooc

    settings = dict(alloc="emulated", budget=BUDGET, chunk_size="64KiB", small_limit="64KiB")
    ooc.enable(**settings)
    """
    after = """
    losses = [step() for _ in range(2)]
    ooc.disable()
    losses += [step()]
    ooc.enable(**settings)
    assert ooc.enabled()
    losses += [step() for _ in range(3)]
    assert ooc.summary()["functions"] > 100
    print(losses, digest())
    """
    source = code(before, TRAINING, after).replace("BUDGET", repr(TRAINING_BUDGET))
    ended = run([write_script(tmp_path, source)], {}).check()
    assert ended.output == plain_training


def test_explicit_steps(tmp_path: Path, plain_training: str) -> None:
    """From the first `step()` on, iterations end where the program says."""
    source = code(
        TRAINING,
        """
    import ooc
    losses = []
    for pair in range(3):
        losses += [step(), step()]
        ooc.step()
    print(losses, digest())
    """,
    )
    ended = run_source(tmp_path, source, OOC_BUDGET=TRAINING_BUDGET).check()
    assert ended.output == plain_training
    assert ended.figures["steps"] == 2 + 1 + 2, "two found by itself, their rest, and two pairs"


def test_keep_resident(tmp_path: Path) -> None:
    """Memory read behind PyTorch's back stays where it is, whatever else needs room."""
    source = """
        import ctypes
        import torch
        import ooc

        x = torch.randn(512, 1024)
        ooc.keep_resident(x)
        kept = [x * index for index in range(20)]
        figures = ooc.summary()
        assert figures["swap_out_bytes"] > 0 and figures["external_pin_count"] > 0
        raw = ctypes.string_at(torch.Tensor.data_ptr(x), x.nbytes)
        assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(512, 1024), x)
        pinned = ooc.summary()["swap_in_bytes"]
        (x * 2).sum()
        assert ooc.summary()["swap_in_bytes"] == pinned, "it was on the device"
    """
    run_source(tmp_path, source, OOC_BUDGET="16MiB").check()


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_saving_as_safetensors_keeps_nothing_on_the_device(tmp_path: Path, tier: str) -> None:
    """What is saved may be larger than the budget, and leaves the device afterwards as it did before."""
    source = """
        import torch
        import ooc
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors.torch import load_file, save, save_file

        tensors = {f"t{index}": torch.randn(128, 1024) for index in range(40)}
        tensors |= {"bits": torch.randn(512, 1024).bfloat16(), "none": torch.empty(0), "one": torch.tensor(3)}
        tensors["part"] = torch.randn(2048, 1024)[1024:]  # of a storage
        before = ooc.summary()
        assert split_torch_state_dict_into_shards(tensors).filename_to_tensors
        for _ in range(2):
            save_file(tensors, FILE)
        data = save({"t0": tensors["t0"], "t39": tensors["t39"]})
        after = ooc.summary()
        assert after["min_budget_bytes"] == before["min_budget_bytes"], (before, after)
        assert after["external_pin_count"] == before["external_pin_count"], (before, after)
        loaded = load_file(FILE)
        assert loaded.keys() == tensors.keys() and len(data) > 1 << 20
        for name, tensor in loaded.items():
            assert torch.equal(tensor, tensors[name]), name
        tensors["part"].fill_(1)
        save_file({"part": tensors["part"]}, FILE)
        assert load_file(FILE)["part"].eq(1).all(), "the bytes of an earlier save"
    """
    source = source.replace("FILE", repr(str(tmp_path / "saved.safetensors")))
    disk = tmp_path / "disk"
    disk.mkdir()
    more = {"OOC_DISK": str(disk)} if tier == "disk" else {}
    figures = run_source(tmp_path, source, OOC_BUDGET="12MiB", **more).check().figures
    assert figures["device_peak_bytes"] <= 12 << 20
    assert figures["swap_in_bytes"] >= 2 * 12 << 20
    assert list(disk.iterdir()) == []
