"""Policies: pure functions from a Problem to a Plan, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swapd.planning.lower_bound import quick_lower_bound
from swapd.planning.plan import Plan
from swapd.planning.problem import Problem
from swapd.policies.auto import auto
from swapd.policies.idle import idle
from swapd.policies.published.lms import lms, lms_best_fit
from swapd.policies.published.mmcnn import mmcnn
from swapd.policies.published.nnabla import nnabla
from swapd.policies.published.vdnn import vdnn
from swapd.policies.published.window_best_fit import window_best_fit
from swapd.policies.published.zero_infinity import zero_infinity
from swapd.policies.window import window
from swapd.simulation.simulator import simulate_once

Policy = Callable[[Problem, "int | None"], Plan]

_POLICIES: dict[str, Policy] = {
    "auto": auto,
    "idle": lambda problem, window_bytes: idle(problem),
    "window": window,
    "nnabla": nnabla,
    "window_best_fit": window_best_fit,
    "lms": lambda problem, window_bytes: lms(problem),
    "lms_best_fit": lambda problem, window_bytes: lms_best_fit(problem),
    "mmcnn": lambda problem, window_bytes: mmcnn(problem),
    "vdnn_all": lambda problem, window_bytes: vdnn(problem, "vdnn_all"),
    "vdnn_conv": lambda problem, window_bytes: vdnn(problem, "vdnn_conv"),
    "vdnn_dyn": lambda problem, window_bytes: vdnn(problem, "vdnn_dyn"),
    "zero_infinity": lambda problem, window_bytes: zero_infinity(problem),
    "zero_infinity_tuned": lambda problem, window_bytes: zero_infinity(problem, "zero_infinity_tuned"),
}

# Policies that others published. They are for comparison in simulation; programs that run can have mmcnn alone.
PUBLISHED = (
    *("mmcnn", "nnabla", "window_best_fit", "lms", "lms_best_fit"),
    *("vdnn_all", "vdnn_conv", "vdnn_dyn"),
    *("zero_infinity", "zero_infinity_tuned"),
)


def available() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_POLICIES)


def get(name: str) -> Policy:
    """The policy of that name: a function of a problem and a schedule window in bytes (None: chosen by the policy).

    Raises:
        ValueError: there is no such policy.
    """
    try:
        return _POLICIES[name]
    except KeyError:
        raise ValueError(f"no policy {name!r}; there are {', '.join(_POLICIES)}") from None


def make_plan(problem: Problem, policy: str = "auto", window_bytes: int | None = None) -> Plan:
    """Plan `problem`, and note the simulated time and the bound in the plan. It is empty when everything fits.

    Raises:
        InfeasibleError: a function alone needs more than the capacity.
        ValueError: there is no such policy, or the window is not positive.
    """
    plan = get(policy)(problem, window_bytes)
    return replace(
        plan,
        fingerprint=problem.fingerprint,
        chunk_bytes=problem.chunk_bytes,
        capacity_chunks=problem.capacity_chunks,
        predicted_seconds=simulate_once(problem, plan).seconds,
        bound_seconds=quick_lower_bound(problem),
    )
