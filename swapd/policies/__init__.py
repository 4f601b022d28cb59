"""Policies: pure functions from a Problem to a Plan, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from swapd.lower_bound import lower_bound
from swapd.plan import Plan
from swapd.policies.auto import auto
from swapd.policies.idle import idle
from swapd.policies.window import window
from swapd.problem import Problem
from swapd.simulator import simulate

Policy = Callable[[Problem, "int | None"], Plan]

_POLICIES: dict[str, Policy] = {
    "auto": auto,
    "idle": lambda problem, window_bytes: idle(problem),
    "window": window,
}


def available() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_POLICIES)


def get(name: str) -> Policy:
    """The policy of that name: a function of a problem and a schedule window in bytes (None: chosen by the policy).

    Raises:
        ValueError: there is none.
    """
    try:
        return _POLICIES[name]
    except KeyError:
        raise ValueError(f"no policy {name!r}; there are {', '.join(_POLICIES)}") from None


def make_plan(problem: Problem, policy: str = "auto", window_bytes: int | None = None) -> Plan:
    """Plan `problem`, simulate the plan, and note both figures in it. Empty when everything fits.

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
        predicted_seconds=simulate(problem, plan).seconds,
        bound_seconds=lower_bound(problem).seconds,
    )
