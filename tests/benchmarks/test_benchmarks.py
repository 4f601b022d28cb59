"""The arithmetic of the benchmarks' tables, on made-up results. Nothing is timed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pytest

pytest.importorskip("torch")


from benchmarks import allocation, compiled, fragmentation, interception, mapping, results, step_time, three_tiers
from benchmarks.__main__ import main, write_tables
from benchmarks.child import Turn
from benchmarks.children import measure_in_child
from benchmarks.monitoring import scrapes
from benchmarks.runs import RunFailed, in_turns
from swapd.planning.problem import Problem

CHUNK = step_time.CHUNK_BYTES
MACHINE = {
    "processor": "abacus",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "kernel": "6.1",
    "python": "3.11.7",
    "torch": "2.13.0",
    "load_average": [0.1, 0.1, 0.1],
}


def known() -> step_time.Reference:
    """1 s forward, 3 s backward, a live peak of 100 chunks of variables and 4 of slabs."""
    return step_time.Reference(4.1, 1.0, 3.0, 100, 4, 104 * CHUNK, "bits")


def steps(seconds: list[float], **figures: Any) -> list[dict[str, Any]]:
    return [{"seconds": 99.0}] * step_time.WARM_UP + [{"seconds": value, **figures} for value in seconds]


def in_core(seconds: list[float], workload: str = "gpt") -> dict[str, Any]:
    phases = {"forward_seconds": 1.0, "backward_seconds": 3.0, "live_peak_chunks": 100, "slab_chunks": 4}
    return {
        "workload": workload,
        "mode": step_time.IN_CORE,
        "steps": steps(seconds, **phases),
        "summary": {"live_peak_bytes": 104 * CHUNK},
        "digest": "bits",
        "machine": MACHINE,
        "threads": 1,
    }


def out_of_core(mode: str, seconds: list[float], digest: str = "bits", peak: int = 100) -> dict[str, Any]:
    figures = {
        "stall_seconds": 0.5,
        "swap_out_bytes": 10 << 20,
        "swap_in_bytes": 20 << 20,
        "demand_swap_in_bytes": 1 << 20,
    }
    return in_core([]) | {
        "mode": mode,
        "oversubscription": 2.0,
        "bound_seconds": 5.0,
        "simulated_seconds": 5.25,
        "link_bytes_per_second": 1e9,
        "digest": digest,
        "steps": steps(seconds, **figures),
        "summary": {"device_peak_bytes": peak, "budget_bytes": 100},
    }


def test_budget_is_a_share_of_the_live_peak_and_the_slabs_take_their_part_of_it() -> None:
    budget = known().budget_bytes(2.0)
    assert budget == 52 * CHUNK
    assert known().spill_bytes(budget) == (100 - (52 - 4)) * CHUNK
    assert known().spill_bytes(200 * CHUNK) == 0


def test_link_moves_the_spill_out_and_in_within_the_compute_time() -> None:
    spill = 52 * CHUNK
    link = known().link_bytes_per_second(spill)
    assert 2 * spill / link == pytest.approx(4.0)


@pytest.mark.parametrize(("bytes_per_second", "bound"), [(1e3, 4.0), (500.0, 5.0), (250.0, 8.0)])
def test_bound_takes_the_longer_of_computation_and_transfer_in_each_phase(
    bytes_per_second: float, bound: float
) -> None:
    # 1,000 bytes: 1 s beside 1 and 3 s; 2 s beside 1 and 3 s; 4 s beside both
    assert known().bound_seconds(1000, bytes_per_second) == pytest.approx(bound)


def test_warm_up_does_not_count() -> None:
    record = in_core([4.0, 6.0, 5.0])
    assert step_time.median(record) == 5.0
    assert step_time.reference([record, out_of_core("auto", [9.0])]) == step_time.Reference(
        5.0, 1.0, 3.0, 100, 4, 104 * CHUNK, "bits"
    )


def test_row_is_the_median_over_all_rounds_with_their_spread() -> None:
    found = step_time.row([out_of_core("auto", [5.0, 6.0, 7.0]), out_of_core("auto", [6.0, 8.0, 9.0])], "bits")
    assert found["step_seconds"] == 6.5
    assert (found["lowest"], found["highest"]) == (6.0, 8.0)
    assert found["ratio"] == pytest.approx(1.3)
    assert found["simulated_seconds"] == 5.25
    assert found["identical"] and found["within_budget"]


def test_agreement_is_of_each_step_with_its_own_times() -> None:
    first, second = out_of_core("auto", [5.0, 10.0]), out_of_core("auto", [4.0])
    assert step_time.row([first, second], "bits")["agreement"] is None
    for record, simulated in ((first, 5.5), (second, 3.6)):
        for step in record["steps"][step_time.WARM_UP :]:
            step["simulated_seconds"] = simulated
    found = step_time.row([first, second], "bits")
    assert found["agreement"] == pytest.approx(0.9)  # the middle one of 1.1, 0.55 and 0.9
    assert "| 0.900 |" in step_time.table([in_core([4.0]), first, second])


def test_other_bits_and_a_peak_over_the_budget_are_not_hidden() -> None:
    good, bad = out_of_core("auto", [5.0]), out_of_core("auto", [5.0], digest="others", peak=101)
    found = step_time.row([good, bad], "bits")
    assert not found["identical"] and not found["within_budget"]
    assert step_time.table([in_core([4.0]), good]).count("| yes | yes |") == 1
    assert step_time.table([in_core([4.0]), bad]).count("| NO | NO |") == 1


def test_table_names_workloads_and_modes_in_their_order() -> None:
    records = [out_of_core("demand", [9.0]), out_of_core("auto", [5.5]), in_core([4.0])]
    lines = [line for line in step_time.table(records).splitlines() if line.startswith("| gpt")]
    assert [line.split("|")[1].strip() for line in lines] == ["gpt", "gpt 2x auto", "gpt 2x demand"]
    assert "| 1.10 | 1.25 | 5.250 |" in lines[1]  # the ratio, its target, the simulation
    assert "| 1.80 |  | 5.250 |" in lines[2]  # no target for demand mode


def test_cost_of_interception_is_what_it_adds_to_the_same_rounds_plain_call() -> None:
    kinds = {"plain": [100.0, 200.0, 150.0], "intercepted": [400.0, 600.0, 350.0]}
    assert interception.cost(kinds, "intercepted") == (250.0, 300.0)


def test_ratio_is_paired_and_its_interval_holds_it() -> None:
    ratio, low, high = allocation.ratio_of([1.1, 2.2, 3.3, 4.8], [1.0, 2.0, 3.0, 4.0])
    assert ratio == pytest.approx(1.1)
    assert low <= ratio <= high
    assert high == pytest.approx(1.2) and low == pytest.approx(1.1)


def test_chunk_sizes_that_cannot_run_have_their_waste_and_the_reason() -> None:
    waste = {"internal_fragmentation_ratio": 0.25, "external_fragmentation_ratio": 0.0, "min_budget_bytes": 300 << 20}
    record = {"workload": "gpt", "mode": "auto", "chunk_bytes": 40 << 20, "machine": MACHINE, "failed": "too large"}
    text = fragmentation.table([in_core([4.0]), record | {"in_core": waste}])
    assert "- gpt 40 MiB: too large" in text
    assert "| gpt 40 MiB | 25.00% | 0% | does not fit |" in text and "| 300.0 |" in text


def watched(arm: str, processor_seconds: float, **more: Any) -> dict[str, Any]:
    times = {"processor_seconds": [processor_seconds] * 3, "seconds": [0.5] * 3}
    return {"arm": arm, "round": 0, "scraped": 0, "machine": MACHINE, **times, **more}


def test_a_scrape_is_held_against_the_processor_time_of_steps() -> None:
    burst = {"scrapes": 100, "processor_seconds": 0.06, "idle_processor_seconds": 0.02, "page_bytes": 12000}
    records = [watched("off", 0.4), watched("scraped once a second", 0.42, burst=burst, scraped=7)]
    assert scrapes.scrape_seconds(records[1]) == pytest.approx(0.0004)
    assert scrapes.share_of_steps(records[1]) == pytest.approx(0.0004 / 0.84)
    made = scrapes.table(records)
    assert "| scraped once a second | 7 | 500.0 | +0.00% | 500.0 to 500.0 | 420.0 | +5.00% | 420.0 to 420.0 |" in made
    assert "One scrape costs 400 us" in made and "0.048% of the processor time" in made
    assert scrapes.table([]) == ""


def test_a_recorded_step_is_replayed_within_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, path = 64 << 10, tmp_path / "trace"
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "unit")
    trace = import_module("planning_traces").gpt(layers=2, width=64, batch=2, length=64, vocabulary=512)
    trace = replace(trace, chunk_bytes=chunk)
    trace.save(path)
    problem = Problem.from_trace(trace, 0)
    budget = (problem.min_budget_bytes + int(problem.live.max()) * chunk) // 2
    found = measure_in_child("mapping_child", str(path), "0.001", "5", str(budget), str(chunk))
    assert [step["swap_in_bytes"] > 0 for step in found["steps"]] == [True] * 5
    assert found["summary"]["device_peak_bytes"] <= budget


def test_memory_calls_cost_as_much_of_a_copy_as_published() -> None:
    assert mapping.costs("none", 1e9) == ""
    link = 50e9 / 1000 / mapping.SCALE  # a chunk's copy takes 1000 times as long as one of 2 MiB at 50 GB/s
    by_chunk = "cuMemMap:chunk_cost=2000000ns;cuMemSetAccess:chunk_cost=36000000ns;cuMemUnmap:chunk_cost=30000000ns"
    assert mapping.costs("chunk", link) == by_chunk
    assert mapping.costs("byte", link).startswith("cuMemMap:mib_cost=16000000ns;")  # eight chunks of 128 KiB


def mapped(mode: str, kind: str, seconds: list[float], chunk: int = CHUNK, **more: Any) -> dict[str, Any]:
    figures = {"map_seconds": 0.2, "unmap_seconds": 0.1, "driver_calls_map": 50, "simulated_seconds": 4.8}
    figures |= {"simulated_free_calls_seconds": 4.0, "swap_out_bytes": 10 << 20, "swap_in_bytes": 20 << 20}
    figures |= {"waited_seconds": 0.25, "machine": {"map_seconds": 4e-3, "unmap_seconds": 2e-3}}
    record = out_of_core(mode, [])
    made = steps(seconds, **figures)
    # What is predicted after a step is for the next one.
    made = [{"waited_seconds": 4.95} | step | {"predicted_seconds": place} for place, step in enumerate(made)]
    waste = {"internal_fragmentation_ratio": 0.125, "min_budget_bytes": 3 << 20}
    return record | {"kind": kind, "chunk_bytes": chunk, "summary": record["summary"] | waste, "steps": made} | more


def test_predictions_are_held_against_steps_and_chunk_sizes_against_each_other() -> None:
    run = mapped(mapping.RUN, "none", [5.0] * 3)
    assert mapping.predictions([run]) == [step_time.WARM_UP / 5.0, (step_time.WARM_UP + 1) / 5.0]
    replay = mapped(mapping.REPLAY, "chunk", [5.0, 6.0, 5.0])
    del replay["digest"]
    failed = mapped(mapping.REPLAY, "chunk", [], 16 * CHUNK, failed="too large")
    text = mapping.table([in_core([4.0]), run, replay, failed])
    figures = "5.000 | 5.000 to 5.000 | 0.900 | 0.960 | 0.800 | 4000 | 2000 | 5% | yes |"
    assert f"| run: gpt 2x, cost by none, 128 KiB | {figures}" in text
    assert "| replay: gpt 2x, cost by chunk, 128 KiB | 5.000 | 5.000 to 5.000 | 0.833 | 0.960 | 0.800 |" in text
    by_size = "5.000 | 5.000 to 5.000 | 0.300 | 50 | 30.0 | 12.50% | 3.0 |"
    assert f"| replay: gpt 2x, cost by chunk | 128 KiB for 2 MiB | {by_size}" in text
    assert "| replay: gpt 2x, cost by chunk | 2 MiB for 32 MiB | too large |" in text
    assert "cost by none | 128 KiB for" not in text
    assert mapping.table([]) == ""


def test_compiled_models_are_held_against_the_plain_step_and_the_bound() -> None:
    summary = {"live_peak_bytes": 8 << 20, "min_budget_bytes": 2 << 20}
    base = in_core([4.0, 8.0, 4.0]) | {"round": 0, "summary": summary}
    plain, spare = (base | {"steps": steps(seconds)} for seconds in ([4.0, 8.0, 4.0], [4.4, 9.6, 4.0]))
    plain["mode"], spare["mode"] = compiled.PLAIN, step_time.IN_CORE
    small = base | {"steps": in_core([6.0] * 2)["steps"], "mode": "auto", "bound_seconds": 5.0}
    text = compiled.table([plain, spare, small])
    # Each step is held against the one it followed: the machine was slow in the second pair.
    assert "| gpt | 4.000 | 1.100 (1.000 to 1.200) | 6.000 | 1.200 (1.200 to 1.200) | 8.0 | 2.0 | yes |" in text
    assert "| NO |" in compiled.table([plain, spare, small | {"digest": "others"}])
    assert compiled.table([]) == ""


def test_three_tiers_are_held_against_the_step_in_core_and_what_was_predicted() -> None:
    run = mapped(three_tiers.NAME, "none", [5.0] * 3)
    count = len(run["steps"])
    moved = {"host_peak_bytes": 7 << 20, "disk_read_bytes": count << 20, "disk_written_bytes": count << 21}
    run |= {"share": 0.5, "summary": run["summary"] | moved}
    failed = {**run, "oversubscription": 4.0, "failed": "too little host memory"}
    other = {**run, "share": 0.15, "digest": "others"}
    for step in run["steps"][step_time.WARM_UP :]:  # the planner took a fifth of each
        step |= {"simulated_seconds": 2.0, "planning_seconds": 1.0}
    said = median([step_time.WARM_UP / 4.0, (step_time.WARM_UP + 1) / 4.0])
    text = three_tiers.table([in_core([4.0]), run, other, failed])
    assert f"| gpt 2x, host memory for 0.5 | 5.000 | 1.25 | {said:.3f} | 0.500 | 7.0 | 1.0 | 2.0 | 5% | yes |" in text
    assert "| gpt 2x, host memory for 0.15 | 5.000 | 1.25 |" in text and "| 5% | NO |" in text
    assert "| gpt 4x, host memory for 0.5 | too little host memory |" in text
    assert three_tiers.table([]) == ""


def test_reason_is_the_last_error() -> None:
    said = "status 1\nTraceback\nValueError: first\n  x = Error()\ntorch.OutOfMemoryError: second\nmore"
    assert fragmentation.reason(said) == "torch.OutOfMemoryError: second"


def test_raw_data_survive_and_tables_are_made_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.save(tmp_path, step_time.NAME, "a", in_core([4.0]))
    results.save(tmp_path, step_time.NAME, "b", out_of_core("auto", [5.5]))
    assert results.load(tmp_path, step_time.NAME) == [in_core([4.0]), out_of_core("auto", [5.5])]
    assert main(["--tables", "--output", str(tmp_path)]) == 0
    assert "gpt 2x auto" in capsys.readouterr().out
    results.clear(tmp_path, step_time.NAME)
    assert "gpt" not in write_tables(tmp_path).read_text()


@pytest.mark.parametrize(("count", "text"), [(64 << 10, "64 KiB"), (20 << 20, "20 MiB"), (1000, "1000 B")])
def test_sizes(count: int, text: str) -> None:
    assert results.size(count) == text


def test_processes_step_in_turns_and_one_that_ends_or_fails_is_passed_over() -> None:
    order: list[str] = []

    def stepper(name: str, steps: int, fails: bool = False) -> Callable[[tuple[int, ...]], dict[str, Any]]:
        def go(turns: tuple[int, ...]) -> dict[str, Any]:
            turn = Turn(" ".join(map(str, turns)))
            for _ in range(steps):
                turn()
                order.append(name)
            if fails:
                raise RunFailed(name)
            return {"name": name}

        return go

    assert in_turns(stepper("a", 3), stepper("b", 5), stepper("c", 1)) == [{"name": name} for name in "abc"]
    assert order == ["a", "b", "c", "a", "b", "a", "b", "b", "b"]
    order.clear()
    with pytest.raises(RunFailed, match="b"):
        in_turns(stepper("a", 3), stepper("b", 1, fails=True), stepper("c", 3))
    assert order == ["a", "b", "c", "a", "c", "a", "c"]
