"""The prefetch of mmCNN: Li, Shen, Huang, Tong, Ma, Yu, Tang, Wang, Chen, "A Novel Memory-Scheduling Strategy for Large
Convolutional Neural Network on Memory-Limited Devices" (2019), section 3.2, for inference.

A segment of layers ends with a convolution or a matrix product. As its first layer starts, the part of that layer's
weights that is used first starts to come in, if there is room for it while the segment runs. All else is on the device
only while a function uses it, and comes right before. Parts are those in which the layers ran
(`swapd.splitting.segments` says how many the paper gives to each): a function here is one of them.
"""

from __future__ import annotations

from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.intervals import find_intervals
from swapd.policies.published.absences import lay_out, resident
from swapd.splitting.segments import is_heavy


def mmcnn(problem: Problem) -> Plan:
    """Plan as mmCNN does.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
    """
    problem.require_feasible()
    if problem.fits:
        return Plan(policy="mmcnn")
    intervals = find_intervals(problem)
    absences = {interval: int(intervals.stop[interval]) for interval in range(len(intervals))}
    free = problem.capacity_chunks - resident(problem, intervals, absences)
    returning = {
        (int(v), int(stop)): interval
        for interval, (v, stop) in enumerate(zip(intervals.in_variable.tolist(), intervals.stop.tolist()))
    }
    head = 0  # the function after the last heavy layer
    offsets = problem.use_offsets.tolist()
    for function, name in enumerate(problem.names):
        if not is_heavy(name):
            continue
        if head < function:  # else it is the next part of the layer before; copies between parts begin a segment, too
            for v in problem.use_variables[offsets[function] : offsets[function + 1]].tolist():
                interval = returning.get((v, function))
                if interval is None or problem.died[v] < problem.functions:
                    continue
                at = max(head, int(intervals.start[interval]))
                if at < function and free[at:function].min() >= intervals.chunks[interval]:
                    free[at:function] -= intervals.chunks[interval]
                    absences[interval] = at
        head = function + 1
    return lay_out(problem, intervals, absences, "mmcnn")
