"""What the commands about traces share: their arguments, and the problem that the arguments ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from swapd.cli.output import Failure
from swapd.devices.profile import Profile, load_profile
from swapd.planning.plan import Plan, PlanError
from swapd.planning.problem import InfeasibleError, Problem
from swapd.settings import parse_link
from swapd.trace.trace import Machine, Trace
from swapd.trace.trace_file import TraceError
from swapd.units import Amount, exact_bytes, format_bytes, parse_amount, parse_bytes

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
trace_argument = click.argument("trace_path", metavar="TRACE", type=FILE)


def parsed(parse: Any) -> Any:
    """A click callback that parses an option's text."""

    def callback(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


budget_unless_planned = click.option(
    "--budget",
    metavar="BYTES|%",
    callback=parsed(parse_amount),
    help="Device bytes; a percentage is of the trace's live peak. Needed unless --plan says it.",
)


def link_options(function: F) -> F:
    """Adds --chunk-size, and --bandwidth and --device, either of which gives the speed of the link."""
    for option in (
        click.option("--device", metavar="NAME", help="Take the link's speed from the profile `swapd probe` made."),
        click.option(
            "--bandwidth",
            metavar="RATE",
            callback=parsed(parse_link),
            help="Speed of the link: 10GiB/s, or h2d=8GiB/s,d2h=6GiB/s,latency=20us [the trace's].",
        ),
        click.option(
            "--chunk-size", metavar="BYTES", callback=parsed(parse_bytes), help="Chunk size [the trace's, or 2MiB]."
        ),
    ):
        function = option(function)
    return function


def load_trace(path: Path) -> Trace:
    """The trace in `path`. Raises Failure."""
    try:
        return Trace.load(path)
    except (TraceError, OSError) as error:
        raise Failure(str(error)) from None


def machine_of(link: Any, device: str | None) -> Machine | None:
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
    profile: Profile | None = load_profile(device)
    if profile is None:
        raise Failure(f"there is no profile of a device {device!r}; run `swapd probe` on its machine")
    return profile.machine()


def load_plan(path: Path, trace: Trace, chunk_bytes: int | None = None) -> Plan:
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


def budget_for(trace: Trace, budget: Amount | None, plan: Plan | None) -> int:
    """The budget that was given, or the plan's own. Raises click.UsageError."""
    if budget is not None:
        return budget.resolve(live_peak_bytes(trace))
    if plan is None:
        raise click.UsageError("Missing option '--budget'; only a plan (--plan) brings its own")
    return plan.capacity_chunks * plan.chunk_bytes + trace.slab_chunks_peak * trace.chunk_bytes


def live_peak_bytes(trace: Trace) -> int:
    """The live peak, of which a budget in percent is a share."""
    return int(trace.live_bytes.max(initial=0))


def parse_budgets(text: str) -> list[Amount]:
    """Reads budgets that are separated by commas. Raises UnitError."""
    return [parse_amount(part) for part in text.split(",")]


def make_problem(trace: Trace, budget_bytes: int, chunk_bytes: int | None, machine: Machine | None) -> Problem:
    """The problem. Slabs keep their bytes if chunks have another size than in the trace. Raises Failure."""
    slabs = None
    if chunk_bytes and trace.chunk_bytes:
        slabs = -(-trace.slab_chunks_peak * trace.chunk_bytes // chunk_bytes)
    try:
        return Problem.from_trace(
            trace, budget_bytes, chunk_bytes=chunk_bytes, slab_chunks_peak=slabs, machine=machine
        )
    except ValueError as error:
        raise Failure(str(error)) from None


def infeasible(error: InfeasibleError) -> str:
    """What to do about a budget that is too small, for people."""
    if type(error) is not InfeasibleError:
        return str(error)  # one policy's error says itself what the policy needs
    return (
        f"{error.function_name} (function {error.function}) needs {format_bytes(error.need_bytes)} at once, the "
        f"budget is {format_bytes(error.budget_bytes)}; --budget {exact_bytes(error.min_budget_bytes)} would do"
    )
