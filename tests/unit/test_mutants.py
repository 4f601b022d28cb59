"""The planted mistakes fit the code of today, and name suites that exist; `make mutants` plants them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.__main__ import PATCHES, Mutant, all_mutants, read

ROOT = Path(__file__).resolve().parents[2]


def test_every_mistake_can_be_planted() -> None:
    for mutant in all_mutants():
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.planted(text) != text


def test_a_mistake_that_fits_in_two_places_is_refused() -> None:
    mutant = Mutant("a/b", "", "", "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n")
    assert mutant.planted("zero\none\ntwo\n") == "zero\none\nthree\n"
    for text in ("zero\n", "one\ntwo\none\ntwo\n"):
        with pytest.raises(ValueError, match=r"a/b fits x in [02] places"):
            mutant.planted(text)


def suites_of(mutant: Mutant) -> list[Path]:
    kind, _, arguments = mutant.suite.partition(" ")
    words = arguments.split()
    if kind == "native":
        return [ROOT / "tests" / "native" / f"{word}.cpp" for word in words]
    if kind in ("cuda", "cuda-checks"):  # a program has the word for its name, a test or a check has it in its name
        files = {"programs.py": r"^def {}\(", "test_programs.py": r"^def test_\w*{}\w*\("}
        if kind == "cuda-checks":
            files = {"checks.py": r"^def \w*{}\w*\("}
        folder = ROOT / "tests" / "cuda_build"
        texts = {folder / name: (named, (folder / name).read_text(encoding="utf-8")) for name, named in files.items()}
        return [p for word in words for p, (named, text) in texts.items() if re.search(named.format(word), text, re.M)]
    assert kind == "pytest", mutant.suite
    return [ROOT / word.split("::")[0] for word in words if word.startswith("tests/")]


def test_every_suite_is_there() -> None:
    for mutant in all_mutants():
        suites = suites_of(mutant)
        assert suites and all(path.exists() for path in suites), f"{mutant.name}: {mutant.suite}"
        assert (ROOT / mutant.file).exists()


def test_a_mistake_without_words_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.patch"
    path.write_text("Costs: a byte\n--- a/x\n+++ b/x\n")
    with pytest.raises(ValueError, match=r"Suite: \.\.\."):
        read(path)
    assert PATCHES.is_dir()
