"""What the commands about traces share: their options, and the problem and the simulation that these ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from swapd.cli.options import F, parsed, together
from swapd.cli.output import Failure, console
from swapd.devices.profile import load_profile
from swapd.link import Link, parse_link
from swapd.observing.analysis import DEMAND, IN_CORE, Outcome, run_plan, run_policy, with_budget
from swapd.planning.plan import Plan, PlanError
from swapd.planning.problem import InfeasibleError, PolicyInfeasibleError, Problem
from swapd.planning.violations import malformed
from swapd.policies import available
from swapd.settings import parse_window
from swapd.tiers.first_level import UnsteadyError
from swapd.tiers.three_tiers import DISK_LATENCY_SECONDS, HostInfeasibleError, LowerTiers
from swapd.trace.trace import Machine, Trace
from swapd.trace.trace_file import TraceError
from swapd.units import Amount, exact_bytes, format_bytes, parse_amount, parse_bandwidth, parse_bytes

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_ARMS = {DEMAND: "; demand: no plan", IN_CORE: "; in-core: enough memory"}


def budget_option(more: str = "", **settings: Any) -> Callable[[F], F]:
    """The option --budget, with a sentence more in its help."""
    help_text = f"Device bytes; a percentage is of what the trace needs in-core.{more}"
    return click.option("--budget", metavar="BYTES|%", callback=parsed(parse_amount), help=help_text, **settings)


link_options = together(
    click.option(
        "--chunk-size", metavar="BYTES", callback=parsed(parse_bytes), help="Chunk size [the trace's, or 2MiB]."
    ),
    click.option(
        "--bandwidth",
        metavar="RATE",
        callback=parsed(parse_link),
        help="Speed of the link: 10GiB/s, or h2d=8GiB/s,d2h=6GiB/s,latency=20us [the trace's].",
    ),
    click.option("--device", metavar="NAME", help="Take the link's speed from the profile `swapd probe` made."),
)
tier_options = together(
    click.option(
        "--host-budget",
        metavar="BYTES",
        callback=parsed(parse_bytes),
        help="Host bytes for swapped data, with a disk under them [as many as it takes, no disk].",
    ),
    click.option(
        "--disk-read", metavar="RATE", callback=parsed(parse_bandwidth), help="Speed of the disk's reads, as 7GB/s."
    ),
    click.option(
        "--disk-write", metavar="RATE", callback=parsed(parse_bandwidth), help="Speed of its writes [as its reads]."
    ),
)
plan_option = click.option("--plan", "plan_path", metavar="FILE", type=FILE, help="Take this plan, of `swapd plan -o`.")


def simulation_options(*arms: str) -> Callable[[F], F]:
    """The options of `simulated` except --budget and --plan. `arms` are what --policy may name beside the policies."""
    return together(
        click.option(
            "--policy",
            default="auto",
            show_default=True,
            type=click.Choice([*available(), *arms]),
            help=f"Scheduling policy{''.join(_ARMS[arm] for arm in arms)}.",
        ),
        click.option("--window", metavar="BYTES|auto", callback=parsed(parse_window), help="Schedule window [auto]."),
        link_options,
    )


@dataclass(frozen=True)
class Case:
    """One trace as the options ask for it, and its simulation."""

    trace: Trace
    window_bytes: int | None
    is_fixed: bool  # whether the plan was given
    outcome: Outcome


def lower_tiers(host_budget: int | None, disk_read: float | None, disk_write: float | None) -> LowerTiers | None:
    """What the options of `tier_options` ask for, or None for host memory without end. Raises click.UsageError."""
    if host_budget is None and disk_read is None and disk_write is None:
        return None
    if host_budget is None or disk_read is None:
        raise click.UsageError("a disk needs both --host-budget and --disk-read")
    try:
        disk = Machine(disk_write or disk_read, disk_read, DISK_LATENCY_SECONDS)
    except ValueError:
        raise click.UsageError("--disk-read and --disk-write: a plan needs a speed, not unlimited and not 0") from None
    return LowerTiers(host_budget, disk)


def simulated(
    trace_path: Path,
    *,
    budget: Amount | None,
    policy: str,
    window: int | None,
    chunk_size: int | None,
    bandwidth: Link | None,
    device: str | None,
    plan_path: Path | None = None,
    lower: LowerTiers | None = None,
) -> Case:
    """Simulates what the options of a command ask for. Raises Failure or click.UsageError."""
    trace, machine = load_trace(trace_path), machine_of(bandwidth, device)
    plan = None if plan_path is None else load_plan(plan_path, trace, chunk_size)
    chunk = chunk_size if plan is None else plan.chunk_bytes
    problem = within(make_problem(trace, 0, chunk, machine), budget, plan)
    try:
        if plan is None:
            with console(stderr=True).status("planning"):
                outcome = run_policy(problem, policy, window, lower)
        elif wrong := malformed(problem, plan):
            raise Failure(f"the plan does not belong to this trace: {wrong[0]}")
        else:
            outcome = run_plan(problem, plan, plan.policy, lower=lower)
    except (HostInfeasibleError, UnsteadyError) as error:
        raise Failure(str(error)) from None
    except PolicyInfeasibleError as error:
        raise Failure(f"{error}; other policies need less, {problem.min_budget_bytes} bytes at the least") from None
    except InfeasibleError as error:
        needs = f"{error.function_name} (function {error.function}) needs {format_bytes(error.need_bytes)} at once"
        if error.only_slabs_need_more:
            needs = f"small tensors need {format_bytes(error.min_budget_bytes // 2)} and get at most half of a budget"
        raise Failure(
            f"{needs}, the budget is {format_bytes(error.budget_bytes)}; "
            f"--budget {exact_bytes(error.min_budget_bytes)} would do"
        ) from None
    except ValueError as error:
        raise Failure(str(error)) from None
    return Case(trace, window, plan is not None, outcome)


def load_trace(path: Path) -> Trace:
    """The trace in `path`. Raises Failure."""
    try:
        return Trace.load(path)
    except (TraceError, OSError) as error:
        raise Failure(str(error)) from None


def machine_of(link: Link | None, device: str | None) -> Machine | None:
    """The link that --bandwidth or --device names, or None for the trace's. Raises Failure or click.UsageError."""
    if link is not None and device is not None:
        raise click.UsageError("--bandwidth and --device contradict each other; give one")
    if link is not None:
        try:
            return Machine(link.d2h_bytes_per_second, link.h2d_bytes_per_second, link.d2h_latency_seconds)
        except ValueError:
            raise click.UsageError("--bandwidth: a plan needs a speed, not unlimited") from None
    if device is None:
        return None
    profile = load_profile(device)
    if profile is None:
        raise Failure(f"there is no profile of a device {device!r}; run `swapd probe` on its machine")
    return profile.machine()


def load_plan(path: Path, trace: Trace, chunk_bytes: int | None) -> Plan:
    """The plan in `path`, which has to be one for `trace` and, where given, `chunk_bytes`. Raises Failure."""
    try:
        plan = Plan.load(path)
    except (PlanError, OSError) as error:
        raise Failure(str(error)) from None
    if plan.fingerprint != trace.fingerprint:
        raise Failure(
            f"{path} is a plan for the sequence {plan.fingerprint:016x}, the trace has {trace.fingerprint:016x}; "
            f"make one for it with `swapd plan`"
        )
    if plan.chunk_bytes < 1:
        raise Failure(f"{path} does not say what a chunk is; make it with `swapd plan`")
    if chunk_bytes not in (None, plan.chunk_bytes):
        raise Failure(f"{path} is in chunks of {plan.chunk_bytes} bytes, --chunk-size says {chunk_bytes}")
    return plan


def within(problem: Problem, budget: Amount | None, plan: Plan | None = None) -> Problem:
    """The problem in the budget that was given, or in the plan's own. Raises click.UsageError."""
    if budget is not None:
        return with_budget(problem, budget.resolve(problem.fit_budget_bytes))
    if plan is None:
        raise click.UsageError("Missing option '--budget'; only a plan (--plan) brings its own")
    return with_budget(problem, (plan.capacity_chunks + problem.slab_chunks) * problem.chunk_bytes)


def make_problem(trace: Trace, budget_bytes: int, chunk_bytes: int | None, machine: Machine | None) -> Problem:
    """The problem. Raises Failure."""
    try:
        return Problem.from_trace(trace, budget_bytes, chunk_bytes=chunk_bytes, machine=machine)
    except ValueError as error:
        raise Failure(str(error)) from None
