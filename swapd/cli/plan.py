"""`swapd plan`: make a plan for a trace and say what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from swapd.cli.output import OUTPUT, Failure, console, json_option, pairs_table, print_json
from swapd.cli.problems import FILE, budget_option, simulated, simulation_options
from swapd.cli.simulate import simulate_facts, simulate_rows
from swapd.observing.analysis import DEMAND, Outcome, run_policy
from swapd.units import format_duration


@click.command("plan")
@click.argument("trace_path", metavar="TRACE", type=FILE)
@budget_option(required=True)
@simulation_options()
@click.option("--output", "-o", type=OUTPUT, help="Write the plan there.")
@json_option
def command(trace_path: Path, output: Path | None, as_json: bool, **asked: Any) -> int:
    """Make a plan for TRACE, and show what moves and how long a step takes.

    Three times are shown: the computation alone, the lower bound that no schedule beats, and the plan's, as simulated;
    beside them the time without a plan (demand mode).

    \b
    swapd plan gpt.trace --budget 8GiB --bandwidth 12GiB/s
    """
    outcome = simulated(trace_path, **asked).outcome
    if output is not None:
        try:
            outcome.plan.save(output)
        except OSError as error:
            raise Failure(f"cannot write {output}: {error.strerror}") from None
    facts = plan_facts(outcome)
    if as_json:
        print_json(facts)
    else:
        rows = simulate_rows(facts)
        if outcome.problem.fits:
            rows.insert(0, ("", "everything fits: nothing needs to move"))
        rows.append(("demand mode", f"{format_duration(facts['demand_mode_seconds'])}, without a plan"))
        console().print(pairs_table(f"plan for {trace_path}", rows))
    return 0


def plan_facts(outcome: Outcome) -> dict[str, Any]:
    """What a plan is, moves and costs; the keys of ``swapd plan --json``."""
    facts = simulate_facts(outcome)
    return {
        **facts,
        "policy": outcome.plan.policy,  # of the policies that auto tries, the one that it took
        "planned_outs": facts["planned_out_count"],
        "planned_ins": facts["planned_in_count"],
        "bound_seconds": facts["lower_bound_seconds"],
        "predicted_seconds": facts["seconds"],
        "demand_mode_seconds": run_policy(outcome.problem, DEMAND).timeline.seconds,
    }
