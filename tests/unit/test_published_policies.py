"""The policies of other systems: their rules by hand, and that what they say can be carried out."""

import pickle
import random
from dataclasses import replace

import pytest
from planning_traces import Builder, at_balance, random_trace, resnet50

from benchmarks.planning.validator import validate
from swapd.cli import main
from swapd.planning.plan import In, Out, Plan
from swapd.planning.problem import InfeasibleError, PolicyInfeasibleError, Problem
from swapd.policies import PUBLISHED, get, make_plan
from swapd.policies.intervals import find_intervals
from swapd.policies.published import lms as lms_rules
from swapd.policies.published.absences import fits, lay_out
from swapd.policies.published.lms import lms
from swapd.policies.published.nnabla import nnabla
from swapd.policies.published.vdnn import find_layers, offloading_plan, vdnn
from swapd.policies.published.window_best_fit import window_best_fit
from swapd.policies.published.zero_infinity import model_states, streaming, zero_infinity
from swapd.simulation.simulator import simulate
from swapd.trace.trace import Machine, Trace

UNREFUSING = ("mmcnn", "nnabla")
REFUSING = [policy for policy in PUBLISHED if policy not in UNREFUSING]  # where it finds no plan, though all fit


def chain(layers: int = 4, size: int = 4, convolutions: bool = True) -> Builder:
    """x0 -> x1 -> ... and back: function k reads x_k and makes x_(k+1), its backward one reads x_k and a gradient."""
    b = Builder()
    weights = [b.entry(1) for _ in range(layers)]
    xs = [b.entry(size)]
    for k in range(layers):
        xs += b.call("convolution" if convolutions or k % 2 == 0 else "pool", [xs[-1], weights[k]], [size], seconds=1.0)
    (gradient,) = b.call("loss_backward", [xs.pop()], [size], seconds=1.0)
    b.free(xs[-1] + 1)
    for k in reversed(range(layers)):
        (before,) = b.call("backward", [gradient, xs[k], weights[k]], [size], writes=[weights[k]], seconds=1.0)
        b.free(gradient, *([xs[k]] if k else []))
        gradient = before
    b.free(gradient)
    return b


def problem_of(builder: Builder, capacity: int, machine: Machine | None = None) -> Problem:
    return Problem.from_trace(builder.trace(chunk_bytes=1, machine=machine or Machine(100.0, 100.0)), capacity)


def large_random_trace(seed: int) -> Trace:
    """A random program of megabytes, as allocators have segments of such sizes, with names of a network's layers."""
    trace = random_trace(seed)
    n, scale = trace.functions, 1 << 15
    assert trace.machine is not None
    rate = trace.machine.out_bytes_per_second * scale
    return replace(
        trace,
        function_names=[("convolution", "pool")[i % 2] if i < n / 2 else "backward" for i in range(n)],
        variable_bytes=trace.variable_bytes * scale,
        chunk_bytes=trace.chunk_bytes * scale,
        machine=Machine(rate, rate, trace.machine.latency_seconds),
    )


def outs(plan: Plan) -> dict[int, int]:
    """After which function each variable leaves."""
    return {move.variable: move.after_function for move in plan.outs}


def ins(plan: Plan) -> dict[int, tuple[int, int]]:
    """From which function on each variable may come in, and which one needs it."""
    return {move.variable: (move.after_function + 1, move.before_function) for move in plan.ins}


def by_distance(problem: Problem, threshold: int, ahead: int) -> Plan:
    return lms_rules.by_distance(problem, find_intervals(problem), threshold, ahead)


# ---- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PUBLISHED)
@pytest.mark.medium
def test_plans_of_random_programs_are_sound_or_refused(policy):
    planned = refused = 0
    for seed in range(150):
        trace = large_random_trace(seed)
        least = Problem.from_trace(trace, 0).min_budget_bytes
        peak = Problem.from_trace(trace, 0).live_peak_chunks * trace.chunk_bytes
        for budget in (least, (least + peak) // 2, max(least, peak - trace.chunk_bytes)):
            problem = Problem.from_trace(trace, budget)
            try:
                plan = get(policy)(problem, None)
            except PolicyInfeasibleError as error:
                refused += error.policy == policy
                continue
            assert validate(problem, plan) == [], (seed, budget)
            slow = replace(problem.machine, in_bytes_per_second=problem.machine.in_bytes_per_second / 100)
            for machine in (problem.machine, slow, replace(slow, out_bytes_per_second=slow.in_bytes_per_second)):
                timeline = simulate(replace(problem, machine=machine), plan, 3)
                assert (timeline.demand_in_count, timeline.demand_out_count) == (0, 0), (seed, budget)
                assert timeline.peak_chunks <= problem.capacity_chunks
            planned += bool(plan)
    assert planned > (100 if policy in ("nnabla", "window_best_fit") else 5)
    assert refused == 0 if policy in UNREFUSING else refused > 5


def test_absences_of_any_kind_make_sound_plans():
    made = wrapping = 0
    for seed in range(300):
        r = random.Random(seed)
        trace = random_trace(seed)
        least = Problem.from_trace(trace, 0).min_budget_bytes
        problem = Problem.from_trace(trace, least + 100 * r.randint(0, 30))
        intervals = find_intervals(problem)
        absences = {}
        for interval in r.sample(range(len(intervals)), r.randint(0, len(intervals))):
            start, stop = int(intervals.start[interval]), int(intervals.stop[interval])
            returns = intervals.in_variable[interval] >= 0
            first = max(start, stop - problem.functions)
            absences[interval] = r.choice([stop, r.randint(first, stop)]) if returns else stop
        if not fits(problem, intervals, absences, problem.capacity_chunks):
            continue
        plan = lay_out(problem, intervals, absences, "any")
        assert validate(problem, plan) == [], seed
        assert simulate(problem, plan, 3).demand_in_count == 0
        made += bool(plan)
        wrapping += any(intervals.wraps[i] and absences[i] > 0 for i in absences)
    assert made > 50
    assert wrapping > 20


@pytest.mark.parametrize("policy", PUBLISHED)
@pytest.mark.medium
def test_plans_of_a_network_are_sound(policy):
    trace = resnet50(32)
    peak = int(trace.live_bytes.max())
    problem = Problem.from_trace(trace, int(peak / 1.5), chunk_bytes=4 << 20, machine=at_balance(trace, peak / 2))
    try:
        plan = make_plan(problem, policy)
    except PolicyInfeasibleError:
        assert policy == "vdnn_conv"  # keeps the inputs of batch norms
        return
    assert plan and plan.policy == policy
    assert validate(problem, plan) == []
    assert plan.predicted_seconds < (4 if policy == "mmcnn" else 2) * plan.bound_seconds  # mmCNN's is for inference


@pytest.mark.parametrize("policy", ["lms", "vdnn_all", "vdnn_conv", "vdnn_dyn"])
def test_the_budget_that_a_refusal_names_works(policy):
    trace = resnet50(8)
    chunk = 64 << 10
    problem = Problem.from_trace(trace, int(trace.live_bytes.max()) // 4, chunk_bytes=chunk)
    with pytest.raises(PolicyInfeasibleError, match=f"policy {policy} finds no plan: .* it works from") as found:
        make_plan(problem, policy)
    least = found.value.min_budget_bytes
    assert problem.min_budget_bytes < least < trace.live_bytes.max()
    assert make_plan(Problem.from_trace(trace, least, chunk_bytes=chunk), policy)
    with pytest.raises(PolicyInfeasibleError):
        make_plan(Problem.from_trace(trace, least - chunk, chunk_bytes=chunk), policy)


def test_the_command_line_tells_refusals(tmp_path, capsys):
    resnet50(8).save(tmp_path / "r.trace")
    words = ["plan", str(tmp_path / "r.trace"), "--chunk-size", "64KiB", "--policy"]
    assert main([*words, "vdnn_conv", "--budget", "25%"]) == 1
    told = capsys.readouterr().err
    assert "policy vdnn_conv finds no plan" in told
    assert "other policies need less" in told
    assert main([*words, "nnabla", "--budget", "25%"]) == 0


@pytest.mark.parametrize("policy", REFUSING)
def test_a_function_too_large_is_everybodys_error(policy):
    with pytest.raises(InfeasibleError) as found:
        get(policy)(problem_of(chain(), 8), None)
    assert not isinstance(found.value, PolicyInfeasibleError)


# ---- lms -------------------------------------------------------------------------------------------------------------


def test_lms_swaps_out_beyond_the_threshold():
    # x1 is read by f1 and again by f7: six functions away; x2 by f2 and f6: four; x3 by f3 and f5: two.
    problem = problem_of(chain(), 24)
    x1, x2, x3 = 5, 6, 7
    assert outs(by_distance(problem, 2, 1)) == {x1: 1, x2: 2}
    assert set(outs(by_distance(problem, 1, 1))) == {x1, x2}, "x3 would have to come back before it can leave"
    assert set(outs(by_distance(problem, 1, 0))) == {x1, x2, x3}
    assert set(outs(by_distance(problem, 4, 1))) == {x1}
    assert ins(by_distance(problem, 2, 1)) == {x1: (6, 7), x2: (5, 6)}
    assert ins(by_distance(problem_of(chain(layers=5), 29), 4, 2)) == {6: (7, 9), 7: (6, 8)}
    assert ins(by_distance(problem, 4, 0)) == {x1: (7, 7)}


def test_lms_leaves_weights_and_the_input_where_they_are():
    b = chain(layers=6)
    least = Problem.from_trace(b.trace(chunk_bytes=1), 0).min_budget_bytes
    for capacity in range(least, 40):
        problem = problem_of(b, capacity)
        if problem.fits:
            break
        try:
            plan = lms(problem)
        except PolicyInfeasibleError:
            continue
        assert min(outs(plan)) > 6, "weights are 0 to 5, the input is 6"


def test_lms_tunes_the_threshold_first_then_the_ahead():
    def fits(threshold: int, ahead: int, capacity: int) -> bool:
        try:
            return bool(by_distance(problem_of(b, capacity), threshold, ahead)) or True
        except PolicyInfeasibleError:
            return False

    b = chain(layers=8)
    whole = 40
    usable = 36  # nine tenths
    threshold = max(t for t in range(1, 17) if fits(t, 1, usable))
    ahead = max(a for a in range(1, 17) if fits(threshold, a, usable))
    assert 1 < threshold < 16 and ahead >= 1
    assert lms(problem_of(b, whole)) == by_distance(problem_of(b, whole), threshold, ahead)
    with pytest.raises(PolicyInfeasibleError):
        by_distance(problem_of(b, whole), 16, 1)


# ---- vdnn ------------------------------------------------------------------------------------------------------------


def test_vdnn_finds_layers():
    layers = find_layers(problem_of(chain(convolutions=False), 100))
    x0, x1, x2, x3 = 4, 5, 6, 7
    assert [(layer.variable, layer.forward, layer.backward) for layer in layers] == [
        (x3, 3, 5),
        (x2, 2, 6),
        (x1, 1, 7),
        (x0, 0, 8),
    ]
    assert [layer.is_convolution for layer in layers] == [False, True, False, True]


def test_vdnn_offloads_after_the_last_reader_of_the_forward_phase():
    b = Builder()
    x = b.entry(4)
    (y,) = b.call("convolution", [x], [4], seconds=1.0)
    (z,) = b.call("convolution", [y], [4], seconds=1.0)
    (s,) = b.call("add", [y, z], [4], seconds=1.0)  # a skip connection reads y once more
    b.call("other", [s], seconds=1.0)
    b.free(s)
    b.call("backward", [z], seconds=1.0)
    b.call("backward", [y], seconds=1.0)
    b.call("backward", [x], seconds=1.0)
    b.free(y, z)
    problem = problem_of(b, 100)
    assert outs(offloading_plan(problem, "vdnn_all")) == {x: 0, y: 2, z: 2}
    assert outs(offloading_plan(problem, "vdnn_conv")) == {x: 0, y: 2}, "z is read by no convolution"


def test_vdnn_conv_leaves_frozen_weights_where_they_are():
    b = Builder()
    x, frozen = b.entry(4), b.entry(3)
    (y,) = b.call("convolution", [x, frozen], [4], seconds=1.0)
    b.call("other", [y], seconds=1.0)
    b.call("backward", [y], seconds=1.0)
    b.free(y)
    b.call("backward", [x, frozen], seconds=1.0)
    assert outs(offloading_plan(problem_of(b, 100), "vdnn_conv")) == {x: 0}


def test_vdnn_prefetches_within_the_search_window():
    # Backward, in time: x5 (conv), x4 (pool), x3 (pool), x2 (conv), x1 (pool), x0 (conv).
    b = Builder()
    xs = [b.entry(1)]
    for kind in ("convolution", "pool", "convolution", "pool", "pool", "convolution"):
        xs += b.call(kind, [xs[-1]], [1], seconds=1.0)
    b.call("loss_backward", [xs.pop()], seconds=1.0)
    for x in reversed(xs):
        b.call("backward", [x], seconds=1.0)
    b.free(*xs[1:])
    problem = problem_of(b, 100)
    back = {x: 12 - k for k, x in enumerate(xs)}  # the function that needs it
    everything = ins(offloading_plan(problem, "vdnn_all"))
    assert everything[xs[5]] == (back[xs[5]], back[xs[5]]), "the first one is found by nobody"
    for k in range(5):
        assert everything[xs[k]] == (back[xs[k + 1]], back[xs[k]]), "each layer fetches the one before it"
    convolutions = ins(offloading_plan(problem, "vdnn_conv"))
    assert set(convolutions) == {xs[0], xs[2], xs[5]}
    assert convolutions[xs[2]] == (back[xs[5]], back[xs[2]]), "found past the pools, which have nothing to fetch"
    assert convolutions[xs[0]] == (back[xs[2]], back[xs[0]]), "not before: the search ends at a convolution"


def test_vdnn_dyn_takes_the_least_that_fits():
    b = chain(layers=6, convolutions=False)
    conv, every = (max(simulate(problem_of(b, 100), offloading_plan(problem_of(b, 100), a)).peak_chunks for a in [way])
                   for way in ("vdnn_conv", "vdnn_all"))  # fmt: skip
    peak = problem_of(b, 100).live_peak_chunks
    assert every < conv < peak
    assert not vdnn(problem_of(b, peak), "vdnn_dyn")
    assert outs(vdnn(problem_of(b, conv), "vdnn_dyn")) == outs(vdnn(problem_of(b, conv), "vdnn_conv"))
    assert outs(vdnn(problem_of(b, conv - 1), "vdnn_dyn")) == outs(vdnn(problem_of(b, conv - 1), "vdnn_all"))
    with pytest.raises(PolicyInfeasibleError, match="vdnn_conv"):
        vdnn(problem_of(b, conv - 1), "vdnn_conv")


def test_vdnn_has_nothing_to_do_in_inference():
    b = Builder()
    x = b.entry(4)
    for _ in range(3):
        (y,) = b.call("convolution", [x], [4], seconds=1.0)
        x = y
    assert find_layers(problem_of(b, 100)) == []


# ---- nnabla ----------------------------------------------------------------------------------------------------------


def cycle(capacity: int) -> Problem:
    """Three variables of 2 chunks, each read by one function, for ever."""
    b = Builder()
    for _ in range(3):
        b.entry(2)
    for v in range(3):
        b.call(f"f{v}", [v], seconds=1.0)
    return problem_of(b, capacity)


def test_nnabla_by_hand():
    # Budget 4, prefetch limit 6: before f0 the head takes a and b. When f0 has ended a is on its way out; completing
    # that makes the room for c. All are out at the end.
    plan = nnabla(cycle(4))
    assert plan.ins == (In(0, 0, 2, -1, 0, 0), In(1, 0, 2, -1, 0, 1), In(2, 0, 2, 0, 1, 2))
    assert plan.outs == (Out(0, 0, 2, 0), Out(1, 0, 2, 1), Out(2, 0, 2, 2))


def test_nnabla_prefetches_no_further_than_its_limit():
    plan = nnabla(cycle(4), prefetch_bytes=2)
    assert plan.ins == (In(0, 0, 2, -1, 0, 0), In(1, 0, 2, 0, 0, 1), In(2, 0, 2, 1, 1, 2))


def test_nnabla_keeps_what_is_used_again_soon():
    b = Builder()
    shared, other = b.entry(2), b.entry(2)
    b.call("f0", [shared])
    b.call("f1", [other])
    b.call("f2", [shared])
    b.call("f3", [], [4])
    plan = nnabla(problem_of(b, 5))
    assert [move.after_function for move in plan.outs if move.variable == shared] == [2]


def test_nnabla_takes_prefetches_back_where_a_function_needs_the_room():
    b = Builder()
    first, second = b.entry(2), b.entry(2)
    b.call("f0", [first], seconds=1.0)
    b.call("f1", [], [5], seconds=1.0)  # the head has passed it, and second, when nothing was known of its room
    b.free(2)
    b.call("f2", [second], seconds=1.0)
    problem = problem_of(b, 6)
    plan = nnabla(problem)
    assert ins(plan)[second] == (2, 2)
    assert validate(problem, plan) == []
    assert ins(nnabla(problem_of(b, 8)))[second][0] < 2


def test_nnabla_refuses_a_limit_of_nothing():
    with pytest.raises(ValueError, match="prefetch limit must be positive"):
        nnabla(cycle(4), 0)


# ---- without virtual addresses ---------------------------------------------------------------------------------------


def test_fragmentation_makes_the_schedule_smaller():
    trace = resnet50(928)
    problem = Problem.from_trace(trace, 16 << 30, chunk_bytes=2 << 20)
    plan = window_best_fit(problem)
    chunks = plan.capacity_chunks
    assert plan.policy == "window_best_fit"
    assert problem.pinned.max() <= chunks < problem.capacity_chunks
    assert validate(problem, plan) == []
    for move in (*plan.outs, *plan.ins):
        assert (move.first_chunk, move.chunk_count) == (0, problem.chunks[move.variable])
    roomy = Problem.from_trace(trace, 24 << 30, chunk_bytes=2 << 20)
    assert window_best_fit(roomy).capacity_chunks * roomy.chunk_bytes > chunks * problem.chunk_bytes


def test_what_fits_in_bytes_may_not_fit_in_blocks():
    least = Problem.from_trace(resnet50(1440), 0).min_budget_bytes
    problem = Problem.from_trace(resnet50(1440), least)
    assert get("window")(problem, None)
    with pytest.raises(PolicyInfeasibleError, match="policy window_best_fit finds no plan"):
        window_best_fit(problem)


def test_lms_best_fit_gives_up_before_lms():
    def largest_batch(policy: str) -> int:
        works = 0
        for batch in (704, 832, 960):
            problem = Problem.from_trace(resnet50(batch), 16 << 30, chunk_bytes=2 << 20)
            try:
                get(policy)(problem, None)
                works = batch
            except InfeasibleError:
                return works
        return works

    assert largest_batch("lms_best_fit") < largest_batch("lms")


def test_a_window_is_positive_there_too():
    with pytest.raises(ValueError, match="window must be positive"):
        window_best_fit(cycle(4), -1)


def test_refusals_travel_between_processes():
    error = PolicyInfeasibleError(3, "f", 10, 8, 9, "lms")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is PolicyInfeasibleError and str(again) == str(error)
    assert "it works from 9 bytes on" in str(error)
    assert (again.policy, again.function, again.min_budget_bytes) == ("lms", 3, 9)


# ---- ZeRO-Infinity ---------------------------------------------------------------------------------------------------


def layers_of_states(layers: int = 6) -> Builder:
    """Forward and backward over weights of 2 chunks, then an update of each with a state of 4."""
    b = Builder()
    weights = [b.entry(2) for _ in range(layers)]
    states = [b.entry(4) for _ in range(layers)]
    for name, order in (("forward", weights), ("backward", weights[::-1])):
        for v in order:
            b.call(name, [v], seconds=1.0)
    for v, state in zip(weights, states):
        b.call("update", [v, state], writes=[v, state], seconds=1.0)
    return b


def test_zero_infinity_streams_what_lives_across_iterations():
    problem = problem_of(layers_of_states(), 20)
    assert model_states(problem).all()
    plan = streaming(problem, find_intervals(problem), model_states(problem), 2)
    assert validate(problem, plan) == []
    # The state of layer 3 comes back two operators before its update (function 15) and leaves after it.
    assert [move[3:] for move in plan.ins if move.variable == 6 + 3] == [(12, 0, 15)]
    assert [move.after_function for move in plan.outs if move.variable == 6 + 3] == [15]
    # The weight leaves after forward (3), after backward (8) and after its update, and comes back ahead of each.
    assert [move.after_function for move in plan.outs if move.variable == 3] == [3, 8, 15]
    returns = [(move.after_function, move.before_function) for move in plan.ins if move.variable == 3]
    assert returns == [(0, 3), (5, 8), (12, 15)]
    # The last weight's backward follows its forward: it stays between them.
    assert [move.after_function for move in plan.outs if move.variable == 5] == [6, 17]


def test_zero_infinity_can_be_tuned_to_stream_the_optimizer_alone():
    problem = problem_of(layers_of_states(), 26, Machine(4.0, 4.0))
    published, tuned = zero_infinity(problem), zero_infinity(problem, "zero_infinity_tuned")
    assert {move.variable for move in published.outs} == set(range(12))
    assert {move.variable for move in tuned.outs} == set(range(6, 12))  # 12 chunks of weights stay
    assert simulate(problem, tuned).seconds < simulate(problem, published).seconds
    small = problem_of(layers_of_states(), 14)
    assert zero_infinity(small, "zero_infinity_tuned").outs == zero_infinity(small).outs


def test_zero_infinity_offloads_activations_where_states_do_not_suffice():
    b = chain(layers=8, size=4)
    small, large = problem_of(b, 20), problem_of(b, 40)
    activations = [v for v in range(small.variables) if small.born[v] >= 0]
    assert {move.variable for move in zero_infinity(small).outs} & set(activations)
    assert not {move.variable for move in zero_infinity(large).outs} & set(activations)
