"""Plans and tables of the measured divisions, on costs that are made up. Nothing is timed here."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.splitting import convolutions, inference, measured, plans, tables
from benchmarks.splitting.measured import NETWORKS, Operands, execute
from benchmarks.splitting.plans import MIB, make_plans
from ooc.pytorch.splitting.kernels import KINDS
from swapd.splitting.configurations import Configuration, KernelTable, MicroConfiguration

WHOLE = MicroConfiguration(4, "own", 1.0, 20 * MIB)
LARGE = MicroConfiguration(4, "fft", 0.5, 100 * MIB)
PART = MicroConfiguration(2, "fft", 0.3, 50 * MIB, 0.001)
SMALL = MicroConfiguration(1, "im2col", 0.6, 1 * MIB)
TABLE = KernelTable("conv", 4, (WHOLE, LARGE, PART, SMALL))


def made(faster: bool = True, noise: float = 0.0, count: int = 2) -> dict[tuple[str, int, str], plans.Plan]:
    found = make_plans([TABLE] * count, list(range(count)), (8, 64, 512), noise, lambda kernel, divided, whole: faster)
    return {(plan.mode, plan.limit_mib, plan.policy): plan for plan in found}


def test_wr_takes_what_fits_each_kernel() -> None:
    found = made()
    assert len(found) == 18
    for policy, configuration in (("undivided", (WHOLE,)), ("all", (PART, PART)), ("powerOfTwo", (PART, PART))):
        assert found["WR", 64, policy].configurations == (Configuration(configuration),) * 2
    assert found["WR", 512, "all"].configurations == (Configuration((LARGE,)),) * 2


def test_where_nothing_fits_undivided_the_smallest_runs_and_is_counted() -> None:
    found = made()
    assert found["WR", 8, "undivided"].over_limit == 2
    assert found["WR", 8, "undivided"].configurations[0].workspace_bytes == 20 * MIB
    assert found["WR", 8, "all"].over_limit == 0
    assert found["WR", 8, "all"].configurations[0].workspace_bytes == 1 * MIB


def test_wd_shares_one_workspace_among_all() -> None:
    found = made(count=13)
    assert found["WD", 8, "all"].limit_bytes == 104 * MIB
    workspaces = sorted(c.workspace_bytes // MIB for c in found["WD", 8, "all"].configurations)
    assert workspaces == [1] * 9 + [20] * 4  # where WR has 1 for each
    found = made()
    assert found["WD", 8, "undivided"].over_limit == 2 and found["WD", 8, "all"].over_limit == 0


def test_a_division_that_is_not_confirmed_is_not_taken_where_the_whole_fits() -> None:
    found = made(faster=False)
    assert found["WR", 64, "all"].configurations == (Configuration((WHOLE,)),) * 2
    assert len(found["WR", 8, "all"].configurations[0].parts) == 4  # the whole does not fit


def test_faster_in_turns_is_faster_in_all_but_one() -> None:
    faster, slower = (1.0, 2.0), (1.0, 1.0)
    assert plans.clearly_faster([faster] * 7) and plans.clearly_faster([faster] * 6 + [slower])
    assert not plans.clearly_faster([faster] * 5 + [slower] * 2)
    assert not plans.clearly_faster([])


def test_a_gain_within_the_noise_is_not_asked_about() -> None:
    asked: list[int] = []
    make_plans([TABLE], [7], (64,), 0.9, lambda kernel, divided, whole: bool(asked.append(kernel)) or True)
    assert not asked
    make_plans([TABLE], [7], (64,), 0.1, lambda kernel, divided, whole: bool(asked.append(kernel)) or True)
    assert set(asked) == {7}


def record(rounds: list[list[float]]) -> dict[str, Any]:
    plan = {"mode": "WR", "limit_mib": 8, "limit_bytes": 8 * MIB, "over_limit": 0, "divided": 0, "executed": 0}
    plan |= {"predicted_seconds": 0.5, "executed_workspace_bytes": [3 * MIB, MIB], "policy": "undivided"}
    return {
        "network": "Net", "batch": 4, "kernels": 2, "sizes": [1, 2, 4], "threads": 2, "measurements": 12,
        "measurements_of_a_second_run": 0, "confirmed": 1, "not_confirmed": 2,
        "noise": {"median": 0.01, "ninth_decile": 0.05},
        "plans": [plan, {**plan, "policy": "all", "executed": 1, "divided": 1, "over_limit": 0}],
        "executed_seconds": rounds,
        "machine": {
            "processor": "abacus", "cores": 2, "memory_bytes": 8 << 30, "kernel": "6.1", "python": "3.11.7",
            "torch": "2.13.0", "load_average": [0.1, 0.1, 0.1],
        },
    }  # fmt: skip


def test_ratios_are_within_a_round() -> None:
    shown = record([[1.0, 2.0, 4.0], [0.5, 1.5, 2.0]])
    assert tables.ratios(shown, shown["plans"][1]) == [0.5, 0.75, 0.5]
    text = tables.text([shown])
    assert "0.500 (0.500 to 0.750)" in text and "| 1 of 2 | 3.0 | 500 | 1,500 |" in text
    assert "12 measurements (a second run: 0)" in text and "2 of 3" in text and "300.0% apart" in text


def test_without_data_the_table_says_so() -> None:
    assert "Nothing was measured yet" in tables.text([])


def test_tables_of_inference_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not there where only `make demo` was run."""
    raw = Path(inference.__file__).parents[1] / "results" / "emulated" / "splitting" / "inference"
    (tmp_path / "inference").mkdir()
    for name in ("AlexNet-plain.json", "AlexNet-005-auto.json", "AlexNet-005-mmcnn.json"):
        shutil.copy(raw / name, tmp_path / "inference")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    assert inference.main(["--tables", "--output", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "AlexNet, 5 MB" in out and "![" not in out
    assert err == "no picture: matplotlib is not installed (the extra `report`)\n"
    assert not (tmp_path / "inference.png").exists()


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tables.draw([record([[1.0, 2.0], [0.5, 1.5]])], tmp_path / "picture.png")
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("name", "layers", "different", "operations"),
    [
        ("AlexNet", 5, 5, 1.31e9),
        ("ResNet-18", 20, 11, 3.63e9),
        ("ResNet-50", 53, 20, 7.71e9),
        ("DenseNet-40", 39, 39, 0.53e9),
        ("DeepBench", 55, 55, 28.09e9),
    ],
)
def test_networks_are_those_of_the_papers(name: str, layers: int, different: int, operations: float) -> None:
    """Twice the multiplications that are quoted for them; AlexNet's and DeepBench's were added up by hand."""
    made = NETWORKS[name][0]()
    assert (len(made), len(set(made))) == (layers, different)
    assert sum(map(convolutions.operations, made)) == pytest.approx(operations, rel=0.01)


def test_operands_of_every_kernel_are_views_of_three_buffers() -> None:
    layers = convolutions.densenet40()[:3]
    operands = Operands(layers, 2)
    chosen = Configuration(tuple(MicroConfiguration(1, name, 0.0, 0) for name in ("im2col", "own")))
    for layer in layers:
        x, w, y = layer.shapes(2)
        for kind, wanted in zip(KINDS, (y, x, w)):
            kernel = operands.of((layer, kind))
            assert kernel.kind == kind and kernel.named["input"].data_ptr() == operands.buffers[0].data_ptr()
            assert [made.shape for made in execute(kernel, chosen) if made is not None] == [wanted]


def test_noise_is_relative_to_the_median() -> None:
    assert measured.noise_of([]) == {"measurements": 0, "median": 0.0, "ninth_decile": 0.0}
    rows = [MicroConfiguration(1, "a", 2.0, 0, spread) for spread in (0.1, 0.2, 0.6)]
    assert measured.noise_of(rows)["median"] == pytest.approx(0.1)
