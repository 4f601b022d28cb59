"""What goes wrong outside the program: a clear error, or it degrades as designed; the program's data survive."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import EMULATED, code, environment, read_summary, run, run_source, write_script

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
    assert small.figures["budget_overrun_count"] == 0
    assert small.figures["device_peak_bytes"] <= 10 * MIB
    assert small.figures["min_budget_bytes"] == int(smallest[1])

    enough = run_source(tmp_path, TOO_SMALL, OOC_BUDGET=smallest[1]).check()
    assert enough.output.splitlines() == ["whole torch.Size([1024, 1024])", product], "the budget that it named works"
    assert enough.figures["device_peak_bytes"] <= int(smallest[1])
    assert enough.figures["budget_overrun_count"] == 0

    parts = run_source(tmp_path, TOO_SMALL, OOC_BUDGET="10MiB").check()
    assert parts.output == enough.output, "without OOC_SPLIT=off it runs in parts"
    assert parts.figures["device_peak_bytes"] <= 10 * MIB and parts.figures["split_function_count"] > 0


def test_training_goes_on_with_a_smaller_batch(tmp_path: Path) -> None:
    source = code(
        TRAINING,
        """
        import integrations.pytorch as ooc
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
    assert ended.figures["budget_overrun_count"] == 0


# ---- settings that cannot be used -----------------------------------------------------------------------------------

PLAIN = """
    import torch
    print((torch.ones(1024, 1024) * 2).sum().item())
    from integrations import pytorch
    print(pytorch.enabled())
"""


def check_plain(tmp_path: Path, variables: dict[str, str], *words: str) -> None:
    """The program runs in plain memory, and is told why; under strict mode `import torch` raises."""
    ended = run([write_script(tmp_path, PLAIN)], {"OOC_ALLOC": "emulated", **variables}).check()
    assert ended.output.splitlines() == [str(2.0 * MIB), "False"]
    for word in (*words, "plain memory"):
        assert word in ended.errors
    assert "Traceback" not in ended.errors


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OOC_BUDGET", "8Gb!", ("OOC_BUDGET", "8Gb!", "8GiB")),
        ("OOC_BUDGET", "1KiB", ("OOC_BUDGET", "OOC_CHUNK_SIZE")),
        ("OOC_ALLOC", "gpu", ("OOC_ALLOC", "gpu", "emulated")),
        ("OOC_EMULATED_FAULTS", "cuNothing:every=2", ("OOC_EMULATED_FAULTS", "cuNothing")),
    ],
)
def test_bad_variable(tmp_path: Path, variable: str, value: str, words: tuple[str, ...]) -> None:
    check_plain(tmp_path, {variable: value}, *words)


def test_bad_variable_raises_in_strict_mode(tmp_path: Path) -> None:
    variables = {"OOC_ALLOC": "emulated", "OOC_STRICT": "1", "OOC_BUDGET": "8Gb!"}
    ended = run([write_script(tmp_path, PLAIN)], variables)
    assert ended.status == 1
    assert "OOC_BUDGET=" in ended.errors and "8Gb!" in ended.errors
    assert ended.output == ""


@pytest.mark.parametrize("compiler", ["none", "broken", "silent"])
def test_compiler_that_does_not_work(tmp_path: Path, compiler: str) -> None:
    (tmp_path / "bin").mkdir()
    variables = {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    if compiler == "none":
        check_plain(tmp_path, variables, "no C++ compiler", "CXX", "g++")
        return
    script = tmp_path / "bin" / "g++"
    words = "echo 'g++: fatal: out of disk' >&2; exit 1" if compiler == "broken" else "exit 0"
    script.write_text(f"#!/bin/sh\n{words}\n")
    script.chmod(0o755)
    check_plain(tmp_path, variables, "adapter", *(["out of disk"] if compiler == "broken" else []))


def test_adapter_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A file that is no library where the adapter should be: built by another machine, cut short by a full disk."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "g++"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nothing > "$2"\n')
    script.chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    check_plain(tmp_path, variables, "adapter")


def test_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_plain(tmp_path, {"XDG_CACHE_HOME": str(tmp_path / "file")}, "XDG_CACHE_HOME")


def test_two_processes_build_the_adapter_at_once(tmp_path: Path) -> None:
    """The compiler here copies an adapter built before, slowly, and counts its calls."""
    from integrations.pytorch import build

    (tmp_path / "g++").write_text(
        f'#!/bin/sh\necho call >> {tmp_path}/calls\nsleep 2\nwhile [ "$1" != -o ]; do shift; done\n'
        f'cp {build.build()} "$2"\n'
    )
    (tmp_path / "g++").chmod(0o755)
    script = write_script(tmp_path, PLAIN)
    variables = {**EMULATED, "CXX": str(tmp_path / "g++"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(script)]
    both = [subprocess.Popen(command, env=environment(variables), stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        assert output.splitlines() == [str(2.0 * MIB), "True"]
    assert (tmp_path / "calls").read_text() == "call\n"
    assert len(list((tmp_path / "cache" / "ooc_alloc").glob("*.so"))) == 1


def test_autoload_switched_off(tmp_path: Path) -> None:
    """PyTorch then never asks us: the program runs in plain memory, `enable` still works, and `doctor` says so."""
    source = code(
        PLAIN,
        """
        pytorch.enable()
        print(pytorch.enabled(), (torch.ones(1024, 1024) * 2).sum().item())
    """,
    )
    ended = run_source(tmp_path, source, TORCH_DEVICE_BACKEND_AUTOLOAD="0").check()
    assert ended.output.splitlines() == [str(2.0 * MIB), "False", f"True {2.0 * MIB}"]
    variables = {**EMULATED, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    doctor = run(["-m", "swapd.cli", "doctor"], variables)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in doctor.output


@pytest.mark.parametrize("place", ["missing/summary.json", "file/summary.json", "."])
def test_summary_that_cannot_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    ended = run([write_script(tmp_path, PLAIN)], {**EMULATED, "OOC_SUMMARY": str(tmp_path / place)}).check()
    assert ended.output.splitlines() == [str(2.0 * MIB), "True"]
    assert ended.errors.count("cannot write the summary") == 1, ended.errors
    assert "Traceback" not in ended.errors


# ---- the two lines --------------------------------------------------------------------------------------------------

SUMMARY_KEYS = """
    device budget_bytes live_peak_bytes device_peak_bytes host_peak_bytes swap_out_bytes swap_in_bytes swap_out_count
    swap_in_count demand_swap_in_count clean_drop_count budget_overrun_count divergence_count plan_count functions steps
    stall_seconds step_seconds policy window_bytes internal_fragmentation_ratio external_fragmentation_ratio
    min_budget_bytes
""".split()


def test_enable_disable_and_summary(tmp_path: Path, plain_training: str) -> None:
    before = """
    import integrations.pytorch as ooc
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
    import integrations.pytorch as ooc

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
    import integrations.pytorch as ooc
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
        import integrations.pytorch as ooc

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
