"""The compatibility table names every function of `torch.cuda.memory`, and claims nothing of a GPU without a run."""

from pathlib import Path

from torch.cuda import memory

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "compatibility.md"
FEATURES = ("torch.compile", "CUDA graphs", "DDP", "DataLoader", "autocast", "channels_last", "GradScaler")


def rows(text: str) -> list[list[str]]:
    heads = ("| function", "| feature")
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(heads)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_function_is_there_once() -> None:
    first_table = TABLE.read_text(encoding="utf-8").split("## Features")[0]
    named = [name for row in rows(first_table) for name in row[0].split(" (also")[0].replace("`", "").split(", ")]
    assert set(memory.__all__) - set(named) == set()  # earlier versions of PyTorch have fewer
    assert len(named) == len(set(named))


def test_every_feature_is_there() -> None:
    names = " ".join(row[0] for row in rows(TABLE.read_text(encoding="utf-8").split("## Features")[1]))
    assert [feature for feature in FEATURES if feature not in names] == []


def test_nothing_is_claimed_of_a_gpu() -> None:
    """What was run is of a GPU whose results are kept in the repository."""
    table = rows(TABLE.read_text(encoding="utf-8"))
    assert len(table) > 25 and all(len(row) == 4 for row in table)
    kept = {path.name.removeprefix("nvidia-") for path in (ROOT / "benchmarks" / "results").glob("nvidia-*")}
    assert {row[3].split(",")[0].lower() for row in table} <= {"not run yet on a gpu", *kept}


def test_the_readme_points_to_it() -> None:
    assert "docs/compatibility.md" in (ROOT / "README.md").read_text(encoding="utf-8")
