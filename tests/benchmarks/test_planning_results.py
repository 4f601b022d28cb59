"""What planning is to show, as assertions on a few cases that are planned anew; and tables made from kept raw data."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks import results
from benchmarks.planning import chunks, memory, recompute, scale, suite, table1, tiers, vdnn
from benchmarks.planning.__main__ import main, tables
from benchmarks.planning.cases import planned
from swapd.devices.roofline import GIB
from swapd.planning.lower_bound import lower_bound
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import Problem
from swapd.policies.idle import idle
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine, Trace

KEPT = results.folder("simulated") / "planning"
WORKLOADS = {workload.name: workload for workload in suite.WORKLOADS}


# ---- the seed paper's table 1 ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_928() -> dict[str, Any]:
    return table1.row(928, check=False)


@pytest.fixture(scope="module")
def at_1440() -> dict[str, Any]:
    return table1.row(1440, check=False)


@pytest.mark.medium
def test_all_policies_train_at_928_and_virtual_addressing_is_faster(at_928):
    kept = {policy: table1.kept(at_928, policy) for policy in table1.POLICIES}
    assert all(kept.values())
    assert kept["window_best_fit"] > kept["lms_best_fit"]  # 68% and 53% in the paper
    assert kept["window"] > kept["window_best_fit"]
    assert kept["auto"] >= kept["window"] / 1.005
    assert 0.5 < kept["window_best_fit"] < 0.8


def test_only_virtual_addressing_trains_at_1440(at_1440):
    assert table1.kept(at_1440, "window_best_fit") == table1.kept(at_1440, "lms_best_fit") == 0
    assert 0.45 < table1.kept(at_1440, "window") < 0.8  # 55% in the paper
    assert table1.kept(at_1440, "auto") > table1.kept(at_1440, "window")


@pytest.mark.medium
def test_ours_plans_up_to_the_largest_function_and_no_further():
    batch = 1775
    fits, exceeds = table1.problem_of(batch), table1.problem_of(batch + 1)
    assert fits.min_budget_bytes <= fits.budget_bytes
    assert exceeds.min_budget_bytes > exceeds.budget_bytes
    largest = {exceeds.names[f] for f in (exceeds.pinned == exceeds.pinned.max()).nonzero()[0]}
    assert "aten::native_batch_norm_backward" in largest  # at 112x112x64; sums at 56x56x256 are as large
    ours = planned(fits, "auto")
    assert ours["seconds"] <= 1.005 * planned(fits, "window")["seconds"]
    assert ours["peak_bytes"] <= 16 * GIB
    assert not table1.plans(batch + 1, "auto")


@pytest.mark.slow
def test_the_largest_batches():
    highest = table1.limit()
    largest = {policy: table1.largest(policy, highest) for policy in table1.POLICIES}
    assert largest["auto"] >= 0.98 * highest
    assert largest["auto"] == largest["window"] > largest["lms"] > largest["lms_best_fit"]
    assert largest["window"] > largest["window_best_fit"] >= 928


@pytest.mark.slow
@pytest.mark.parametrize("batch", table1.BATCHES)
def test_ours_is_as_fast_as_the_window_at_every_batch(batch):
    made = table1.row(batch, check=False)
    assert table1.kept(made, "auto") * 1.005 >= table1.kept(made, "window")


def test_bisection_finds_the_last_batch_that_plans(monkeypatch):
    monkeypatch.setattr(table1, "plans", lambda batch, policy: batch <= 1000)
    assert table1.largest("any", 1775) == 992
    assert table1.largest("any", 500) == 496


# ---- vDNN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AlexNet (128)", "VGG-16 (128)"])
def test_vdnn_holds_less_the_more_it_offloads(name):
    model, batch, _ = next(row for row in vdnn.NETWORKS if row[2] == name)
    problem = vdnn.problem_of(model, batch)
    everything, convolutions, dynamic = (vdnn.figures(problem, policy) for policy in vdnn.POLICIES)
    assert everything["average_bytes"] < convolutions["average_bytes"] < dynamic["average_bytes"]
    assert everything["offloaded_bytes"] > convolutions["offloaded_bytes"] > dynamic["offloaded_bytes"] == 0
    assert everything["layer_seconds"] > convolutions["layer_seconds"] > problem.compute_seconds
    assert everything["simulated_seconds"] <= everything["layer_seconds"]
    assert dynamic["layer_seconds"] == pytest.approx(problem.compute_seconds)


def test_vdnn_layers_wait_for_their_moves():
    # The variable takes 3 s each way: a layer that it runs beside takes 3 s in place of 1.
    whole = {"variable_bytes": [3], "born": [-1], "died": [4], "previous": [0]}
    uses = {"use_offsets": [0, 1, 1, 1, 2], "use_variables": [0, 0], "use_flags": [1, 1]}
    trace = Trace(("f",) * 4, function_start=range(4), function_seconds=[1] * 4, **whole, **uses)
    problem = Problem.from_trace(trace, 100, chunk_bytes=1, machine=Machine(1.0, 1.0))
    plan = Plan((Out(0, 0, 3, 0),), (In(0, 0, 3, 1, 1, 3),))
    assert vdnn.layer_seconds(problem, plan) == problem.compute_seconds + 2 + 2
    assert vdnn.layer_seconds(problem, Plan()) == problem.compute_seconds


def test_vdnn_offloads_sixteen_gigabytes_of_vgg16_at_256():
    problem = vdnn.problem_of("vgg19", 256)
    assert not problem.fits
    everything = vdnn.figures(problem, "all")
    assert everything["offloaded_bytes"] / GIB == pytest.approx(16, rel=0.05)
    assert planned(problem, "auto")["seconds"] <= 1.05 * problem.compute_seconds


def test_deep_networks_stay_trainable():
    problem = vdnn.problem_of("vgg116", 32)
    dynamic = vdnn.figures(problem, "dyn")
    assert not problem.fits
    assert dynamic["offloads"] == "conv"
    assert dynamic["maximum_bytes"] < problem.budget_bytes
    assert dynamic["layer_seconds"] < 1.05 * problem.compute_seconds


# ---- the suite -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "oversubscription", "most"),
    [
        ("vgg16-training", 2.0, suite.NEAR),
        ("unet-training", 1.25, suite.NEAR),
        ("pix2pixhd-inference", 1.25, suite.TOLERANCE),  # where the idle policy stops at 0.6% from the bound
        ("lstm-inference", 2.0, suite.FAR),
        ("gpt2_medium-inference", 4.0, suite.NEAR),
    ],
)
def test_ours_is_near_the_bound_and_not_behind_others(name, oversubscription, most):
    made = suite.case(suite.problem_of(WORKLOADS[name], oversubscription), oversubscription)
    ours = suite.ratio(made, "auto")
    assert ours is not None and 1 - 1e-9 <= ours <= most
    assert ours <= suite.TOLERANCE * suite.best_other(made)[1]


@pytest.mark.medium
def test_where_few_plans_can_be_made_enough_ways_are_tried():
    """Nine are made of this one. The first four ways are 11% from the bound at best, and pacing them gains nothing."""
    problem = suite.problem_of(WORKLOADS["llama_1b-training"], 1.25)
    assert simulate(problem, idle(problem)).seconds <= suite.NEAR * lower_bound(problem)


def test_a_case_that_no_schedule_meets_names_its_function():
    made = suite.case(suite.problem_of(WORKLOADS["vgg16-training"], 4.0), 4.0)
    assert made["policies"] == []
    assert made["min_budget_bytes"] > made["budget_bytes"]
    assert "threshold_backward alone needs" in suite.verdict(made)


# ---- three tiers -----------------------------------------------------------------------------------------------------


def test_states_are_two_and_four_times_the_host_memory_and_plans_near_the_bound():
    records = results.load(KEPT, tiers.NAME)
    assert [(record["model"], record["times"]) for record in records] == [(w.model, w.times) for w in tiers.WORKLOADS]
    for record in records:
        assert record["state_bytes"] / tiers.HOST_BYTES == pytest.approx(record["times"], rel=0.03)
        bound = record["lower_bound_seconds"]
        seconds = {row["arm"]: row["seconds"] for row in record["arms"]}
        assert tuple(seconds) == tiers.ARMS and record["first_link_bound_seconds"] <= bound
        assert bound <= seconds["auto"] <= 1.10 * bound
        # For the smaller Llama, what goes down when room is needed is what a plan sends down.
        assert seconds["auto"] <= seconds["no second plan"]
        assert all(seconds["auto"] < seconds[arm] for arm in ("demand", "zero_infinity", "zero_infinity_tuned"))
        assert seconds["zero_infinity"] > 1.7 * seconds["auto"]


@pytest.mark.medium
def test_a_case_of_three_tiers_is_planned_anew():
    kept = next(record for record in results.load(KEPT, tiers.NAME) if record["times"] == 2)
    problem = tiers.problem_of(tiers.WORKLOADS[0])
    assert tiers.LOWER.bound(problem) == pytest.approx(kept["lower_bound_seconds"])
    ours = tiers.plan_tiers(problem, tiers.LOWER)
    made = {name: tiers.arm(problem, name, ours) for name in ("no second plan", "zero_infinity")}
    for row in kept["arms"]:
        if row["arm"] in made:
            assert made[row["arm"]]["seconds"] == pytest.approx(row["seconds"])
            assert made[row["arm"]]["disk_read_bytes"] == row["disk_read_bytes"]
    assert ours.seconds == pytest.approx(kept["arms"][0]["seconds"])


# ---- memory at equal speed -------------------------------------------------------------------------------------------


def test_the_last_batch_that_is_fast_enough_is_found():
    batches = memory.tried(10)
    assert batches[:4] == [10, 11, 12, 13] and batches == sorted(set(batches)) and batches[-1] >= 160
    for last in (0, 10, 47, 10**6):
        kept = [batch for batch in batches if batch <= last]
        assert memory.largest(batches, lambda batch, last=last: batch <= last) == max(kept, default=0)
    assert memory.tried(0)[0] == 1


def test_of_the_seed_papers_batches_those_count_that_keep_five_sixths():
    assert memory.seed_paper() == [
        ["LMS", "256; 512 is too slow"],  # 91% and 81%
        ["schedule", "256; 512 is too slow"],  # 96% and 79%
        ["schedule + VA", "none, as it is slower at every batch"],  # 77% at best
    ]


def test_recomputation_trains_larger_batches_at_the_same_speed():
    records = results.load(KEPT, memory.NAME)
    assert {record["model"] for record in records} == set(memory.MODELS)
    for record in records:
        assert [made["device"]["name"] for made in record["cases"]] == list(memory.DEVICES)
        for made in record["cases"]:
            swapping, recomputing = (made[arm] for arm in memory.ARMS)
            assert all(memory.fast_enough(found) for found in (swapping, recomputing) if found)
            batches = [found["batch"] if found else 0 for found in (swapping, recomputing)]
            assert made["in_core_batch"] <= batches[0] <= batches[1]


@pytest.mark.slow
def test_a_largest_batch_is_planned_anew():
    record = next(record for record in results.load(KEPT, memory.NAME) if record["model"] == "resnet50")
    kept = record["cases"][0]
    device, found = kept["device"]["name"], kept["with recomputation"]
    made = memory.point("resnet50", found["batch"], device, "with recomputation")
    assert made == pytest.approx(found)
    alone = memory.point("resnet50", found["batch"], device, "swap only")
    assert alone is not None and not memory.fast_enough(alone) and memory.fast_enough(made)
    assert found["batch"] > 4 * kept["in_core_batch"], "POFO reports a quarter to a sixth of the activations"
    assert kept["in_core_batch"] == pytest.approx(190, rel=0.05), "the seed paper's largest batch in-core"


def test_planning_ten_thousand_functions_with_recomputation_takes_two_seconds_at_most():
    points = results.load(KEPT, scale.NAME)[0]["points"]
    point = min(points, key=lambda point: abs(point["functions"] - 10_000))
    assert abs(point["functions"] - 10_000) < 500 and point["drops"]
    assert point["planning_busy_seconds"] < point["recomputing_busy_seconds"] <= 2.0
    assert all(point["recomputing_over_swapping"] <= 1 for point in points)


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_the_kept_tables_are_those_of_the_kept_raw_data():
    assert (KEPT / "tables.md").read_text(encoding="utf-8") == tables(KEPT)


def test_everything_kept_says_that_it_is_simulated():
    for benchmark in (table1, suite, vdnn, scale, chunks, tiers, memory, recompute):
        records = results.load(KEPT, benchmark.NAME)
        assert records, benchmark.NAME
        assert all("simulated" in record["kind"] and "no GPU" in record["kind"] for record in records)
        assert all(record["planned_on"]["time"] for record in records)


def test_the_suite_is_complete_and_its_summary_counts():
    records = results.load(KEPT, suite.NAME)
    assert {record["workload"] for record in records} == set(WORKLOADS)
    assert all([case["oversubscription"] for case in r["cases"]] == list(suite.OVERSUBSCRIPTIONS) for r in records)
    cases = suite.feasible(records)
    assert f"{len(cases)} cases are feasible" in suite.summary(records)
    worse = copy.deepcopy(records)
    made = suite.feasible(worse)[0][1]
    for row in made["policies"]:
        row["seconds"] = row.get("seconds", 1.0) * (2.0 if row["policy"] == "auto" else 1.0)
    assert "Another policy is faster on" in suite.summary(worse)
    assert suite.feasible(worse)[0][0] in suite.summary(worse).split("gives up for")[1]


def test_chunk_sizes_are_compared_with_what_lies_in_slabs_left_out():
    lives = {"born": [0] * 3, "died": [0] * 3, "previous": [-1] * 3}
    uses = {"use_offsets": [0, 0], "use_variables": [], "use_flags": []}
    trace = Trace(("f",), [0.0], [1.0], [3 * GIB + 1, 100, 200], **lives, **uses)
    cut, slabs, waste = chunks.in_slabs(trace, GIB)
    assert (cut.variable_bytes.tolist(), slabs) == ([3 * GIB + 1, 0, 0], 1)
    assert waste == pytest.approx((GIB - 1) / (3 * GIB + 301))
    assert [chunks.seconds_of(kind, 4 << 20) for kind in chunks.KINDS] == [0.0, 2 * chunks.CALLS_SECONDS, 68e-6]


def test_larger_chunks_hide_the_cost_of_a_chunk_and_none_hides_that_of_a_byte():
    for record in results.load(KEPT, chunks.NAME):
        for made in record["cases"]:
            steps = {kind: ways["planned"] for kind, ways in made.get("steps", {}).items()}
            if steps and made["chunk_bytes"] > chunks.CHUNKS[0]:
                assert steps["chunk"] == pytest.approx(steps["none"], rel=1e-3) and steps["byte"] >= steps["none"]
            elif steps:
                assert steps["chunk"] == steps["byte"] >= steps["none"]


@pytest.mark.slow
def test_a_quick_run_writes_raw_data_and_tables(tmp_path):
    assert main(["--only", "scale", "--quick", "--output", str(tmp_path)]) == 0
    points = results.load(tmp_path, scale.NAME)[0]["points"]
    assert [point["functions"] for point in points] == sorted(point["functions"] for point in points)
    assert all(point["over_lower_bound"] >= 1 for point in points)
    assert "us a function" in (tmp_path / "tables.md").read_text(encoding="utf-8")
