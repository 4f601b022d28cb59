"""A sample of the campaign (`make test-faults`): two programs, and the failures that found something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import campaign


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def program(folder: Path) -> Path:
    return campaign.build(folder)


def wrong(results: list[campaign.Result]) -> list[campaign.Result]:
    return [result for result in results if result.outcome not in campaign.GOOD]


@pytest.mark.medium
def test_driver_sites(program: Path, folder: Path) -> None:
    cases = campaign.driver_cases(program, ("demand", "streams"), folder)
    shapes = ("4 times from call 0", "always from call 0")
    chosen = [case for case in cases if case.mode in shapes or "never" in case.mode]
    assert len({case.site for case in chosen}) > 40, "sites were not found"
    results = campaign.carry_out(program, chosen, 2, lambda _: None)
    assert not wrong(results)
    words = [word for result in results for word in result.words]
    assert any("the device is lost" in word for word in words)
    assert any("the driver refused cuMem" in word for word in words)


@pytest.mark.medium
def test_threads_that_get_no_context(program: Path, folder: Path) -> None:
    """One thread finds the device lost while another is about to copy; one run in twenty had them meet."""
    cases = campaign.driver_cases(program, ("streams",), folder)
    chosen = [case for case in cases if case.site.call == "cuCtxSetCurrent" and case.mode == "always from call 0"]
    assert chosen
    assert not wrong(campaign.carry_out(program, chosen * 60, 2, lambda _: None))


@pytest.mark.medium
def test_sites_of_the_system_and_of_our_memory(program: Path, folder: Path) -> None:
    cases = campaign.own_cases(program, campaign.build_interposer(folder), ("detach",), folder)
    chosen = [case for case in cases if case.mode in ("once, call 1", "always from call 0")]
    calls = {case.site.call for case in chosen}
    assert {"mmap", "mremap", "thread", "malloc"} <= calls
    results = campaign.carry_out(program, chosen, 2, lambda _: None)
    assert not wrong(results)
    assert any("no host memory for the books" in word for result in results for word in result.words)


@pytest.mark.medium
def test_a_system_without_host_memory_for_three_tiers(program: Path, folder: Path) -> None:
    """Every function waited for a block that nothing could free, until the program took more than 20 s."""
    scenarios = ("ranges_in_three_tiers", "plans_in_three_tiers")
    cases = campaign.own_cases(program, campaign.build_interposer(folder), scenarios, folder)
    chosen = [case for case in cases if case.site.call == "mprotect" and case.mode.startswith("always")]
    assert {case.scenario for case in chosen} == set(scenarios)
    assert not wrong(campaign.carry_out(program, chosen, 2, lambda _: None))
    # In one run in a hundred a swap-out was due while its thread asked in vain for memory to pin: it was never told.
    planned = [case for case in chosen if case.scenario == scenarios[1] and case.mode == "always from call 0"]
    assert not wrong(campaign.carry_out(program, planned * 100, 2, lambda _: None))
