"""Programs that once failed, whether the fuzzer notices what it is there for, and two minutes of random programs.

The seeds are fixed, so that a failure here is one of the change; `make fuzz` looks for new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")

from tests.conftest import pytorchs_settings
from tests.fuzz import campaign
from tests.fuzz.execution import Step, Way
from tests.fuzz.programs import Program, difference
from tests.fuzz.server import Server

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
SETTINGS = {"OOC_BUDGET": "512KiB", "OOC_CHUNK_SIZE": "16KiB", "OOC_SMALL_LIMIT": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


@pytest.mark.parametrize(("number", "seconds"), [(1, 8), pytest.param(2, 60, marks=pytest.mark.slow)])
@pytest.mark.medium
def test_random_programs(server: Server, number: int, seconds: int) -> None:
    batch = campaign.run_batch(server, number, examples=1 << 20, seconds=seconds)
    assert not batch.failure, f"{batch.failure}\n{batch.program and batch.program.script()}"
    assert batch.counts["moved"] > 5


@pytest.mark.medium
def test_programs_drawn_here_leave_no_settings_behind(server: Server) -> None:
    """Their settings are this process's while they are drawn; tests come after it, of what Inductor compiles, too."""
    before = pytorchs_settings()
    for program in (Program({}, Way(threads=before["threads"] + 1), []), Program({}, Way(deterministic=True), [])):
        program.run_plain()
        assert pytorchs_settings() == before
    campaign.run_batch(server, 2, examples=2)  # its last program asks for deterministic algorithms
    assert pytorchs_settings() == before


@pytest.mark.medium
def test_programs_that_once_failed(server: Server) -> None:
    assert CORPUS
    for path in CORPUS:
        program = Program.from_json(path.read_text(encoding="utf-8"))
        program.plain = program.run_plain()
        assert campaign.judge(server, program, Counter()) == "", path.name


@pytest.mark.medium
def test_a_program_that_reads_what_was_moved_away_is_noticed(server: Server) -> None:
    blind = "getattr(torch.ops.ooc, 'intercept_thread', print)(False)"
    statements = ["v1 = torch.ones(60000)", "v2 = torch.zeros(1)", "evict()", blind, "v1.add_(1)"]
    program = Program(SETTINGS, Way(), statements)
    program.plain = program.run_plain()
    assert "dies with status -11 in ['v1.add_(1)']" in campaign.judge(server, program, Counter())


def test_what_counts_as_a_difference() -> None:
    plain = [Step(digests={"v1": "a"}), Step(digests={"v1": "b"})]
    program = Program({}, Way(), ["first", "second"], plain)
    assert difference(program, plain) == ""
    assert "v1 is c" in difference(program, [plain[0], Step(digests={"v1": "c"})])
    assert "v1 is None" in difference(program, [plain[0], Step()])
    assert "ValueError" in difference(program, [plain[0], replace(plain[1], error="ValueError: no")])
    refused = Step(error="OutOfMemoryError: set OOC_BUDGET=9", digests={"v1": "a"})
    assert difference(program, [plain[0], refused]) == ""
    assert "v1 changed" in difference(program, [plain[0], replace(refused, digests={"v1": "b"})])
    assert "no idea" in difference(program, [plain[0], Step(error="OutOfMemoryError: no idea")])
    elsewhere = [Step(digests={"v1": "c", "v2": "b"}), plain[1]]
    assert difference(program, [Step(digests={"v1": "c"}), plain[1]], elsewhere) == ""
    after = [Step(digests={"v1": "c"}), replace(refused, digests={"v2": "b"})]
    assert difference(program, after, elsewhere) == ""
