"""The policies of vDNN: Rhu, Gimelshein, Clemons, Zulfiqar, Keckler, "vDNN: virtualized deep neural networks for
scalable, memory-efficient neural network design" (MICRO 2016), sections III-B and III-C.

A layer's input feature maps X leave when the last layer that reads them in the forward phase has run. Each layer's
backward function, as it starts, also starts the prefetch of the nearest layer before it whose X has left; the search
ends at the next convolution (figure 10). An X that no search has found comes back right before its layer.

    vdnn_all     the X of every layer leaves
    vdnn_conv    the X of convolutions leaves
    vdnn_dyn     what the profiling passes of section III-C choose: nothing leaves if that fits, else conv, else all

vDNN's dynamic policy also chooses algorithms of convolutions by their workspaces. A trace has the time of one
algorithm, so what remains is the choice of what leaves. In vDNN an offload starts with its layer, and the next layer
waits for the offload's end. A plan's out starts when the layer has ended, and only a function that needs the room
waits.

Weights, gradients and whatever else survives the iteration stay, as in vDNN. Layers are found by the names of
functions: the forward phase ends at the first function that has "backward" in its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.intervals import Intervals, find_intervals
from swapd.policies.published.absences import Absences, fits, lay_out
from swapd.trace.trace import READ

_CONVOLUTIONS = ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose")


@dataclass(frozen=True)
class OffloadCandidate:
    """A function of the forward phase whose X, read again in the backward phase, may leave."""

    forward: int  # the last function of the forward phase that reads X
    backward: int  # the first one of the backward phase that reads it
    variable: int  # X
    is_convolution: bool


CHOICES = {"vdnn_all": (True,), "vdnn_conv": (False,), "vdnn_dyn": (False, True)}  # whether all layers offload


def vdnn(problem: Problem, policy: str) -> Plan:
    """Plan with one of vDNN's policies, by its name in `CHOICES`.

    Raises:
        InfeasibleError: a function alone needs more than the capacity, or (PolicyInfeasibleError) with the policy.
    """
    problem.require_feasible()
    return Plan(policy=policy) if problem.fits else offloading_plan(problem, policy)


def offloading_plan(problem: Problem, policy: str) -> Plan:
    """The plan of the policy's first choice that fits, even where everything fits. Raises PolicyInfeasibleError."""
    intervals, layers = find_intervals(problem), find_layers(problem)
    for all_layers in CHOICES[policy]:
        absences = _offload(problem, intervals, layers, all_layers)
        if fits(problem, intervals, absences, problem.capacity_chunks):
            break
    return lay_out(problem, intervals, absences, policy)


def is_convolution(name: str) -> bool:
    """Whether a function of this name is a convolution's forward function."""
    return "backward" not in name and any(word in name for word in _CONVOLUTIONS)


def find_layers(problem: Problem) -> list[OffloadCandidate]:
    """Layers whose X can leave, in the order of their backward functions."""
    back = next((i for i, name in enumerate(problem.names) if "backward" in name), problem.functions)
    first_reader: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    convolved: set[int] = set()
    offsets, variables = problem.use_offsets.tolist(), problem.use_variables.tolist()
    flags = problem.use_flags.tolist()
    stays = _stays(problem)
    for function in range(problem.functions):
        rows = range(offsets[function], offsets[function + 1])
        reads = [variables[row] for row in rows if flags[row] & READ and not stays[variables[row]]]
        if function < back:
            last_reader.update(dict.fromkeys(reads, function))
            if is_convolution(problem.names[function]):
                convolved.update(reads[:1])  # the input comes first, then weight and bias
        else:
            for v in reads:
                first_reader.setdefault(v, function)
    layers = [
        OffloadCandidate(forward, first_reader[v], v, v in convolved)
        for v, forward in last_reader.items()
        if v in first_reader
    ]
    return sorted(layers, key=lambda layer: (layer.backward, -layer.forward))


def _stays(problem: Problem) -> list[bool]:
    """Whether each variable is a weight, a buffer or state. A variable that no function writes is an input instead."""
    written = problem.born >= 0
    written[problem.uses.variable[problem.uses.write]] = True
    return [bool(stays) for stays in written & (problem.died == problem.functions)]


def _offload(problem: Problem, intervals: Intervals, layers: list[OffloadCandidate], all_layers: bool) -> Absences:
    """The intervals of the layers that offload, and when each is prefetched (figure 10)."""
    by_ends = {
        (int(v), int(start), int(stop)): index
        for index, (v, start, stop) in enumerate(zip(intervals.out_variable, intervals.start, intervals.stop))
    }
    offloads: dict[OffloadCandidate, int] = {}
    for layer in layers:
        interval = by_ends.get((layer.variable, layer.forward + 1, layer.backward))
        if interval is not None and (all_layers or layer.is_convolution):
            offloads[layer] = interval
    absences: dict[int, int] = {}
    for position, layer in enumerate(layers):
        if layer in offloads:
            absences.setdefault(offloads[layer], layer.backward)  # right before its layer, unless a search finds it
        for nearest in layers[position + 1 :]:
            if nearest in offloads and offloads[nearest] not in absences:
                absences[offloads[nearest]] = max(nearest.forward + 1, layer.backward)
                break
            if nearest.is_convolution:
                break
    return absences
