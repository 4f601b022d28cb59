"""`swapd record`: run the program and keep the trace of the iteration that took the most time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import numpy as np

from swapd.cli.launch import ProgramCommand, python_arguments, run_program
from swapd.cli.options import read_program_config, setting_options
from swapd.cli.output import Failure, console, json_option, pairs_table, print_json
from swapd.trace import Trace, TraceError
from swapd.units import format_bytes, format_duration


@click.command("record", cls=ProgramCommand)
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The trace's file."
)
@setting_options(without=["trace"])
@json_option
@click.argument("program", nargs=-1, required=True, metavar="SCRIPT.py|-m MODULE [ARGUMENT]...", type=click.UNPROCESSED)
def command(program: tuple[str, ...], output: Path, as_json: bool, **flags: Any) -> int:
    """Run a Python program and write a trace of it.

    The trace holds the functions of the iteration that took the most time in all, and the variables that each one
    uses. The recording run respects its budget, too. `swapd plan` reads the trace. With --json, what the program
    prints goes to standard error.

    \b
    swapd record -o gpt.trace --budget 8GiB train.py --steps 5
    """
    arguments = python_arguments(program)
    config = dataclasses.replace(read_program_config(flags), trace=output.absolute())
    output.unlink(missing_ok=True)  # what is there afterwards is of this run
    status = run_program(arguments, config, stdout_is_ours=as_json)
    if not output.exists():
        if status != 0:
            click.echo(f"swapd: no trace was written; the program ended with status {status}", err=True)
            return status
        raise Failure(
            "no trace was written: the program did not import PyTorch, ran no whole iteration, or the allocator did "
            "not start (its reason is above; `swapd doctor` looks for others)"
        )
    try:
        trace = Trace.load(output)
    except (OSError, TraceError) as error:
        raise Failure(str(error)) from None
    if as_json:
        print_json({"trace": str(output), **trace_facts(trace)})
    else:
        console().print(pairs_table(f"trace {output}", trace_rows(trace)))
    return status


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What a trace holds: counts, bytes, seconds."""
    return {
        "fingerprint": f"{trace.fingerprint:016x}",
        "functions": trace.functions,
        "variables": trace.variables,
        "live_peak_bytes": int(np.max(trace.live_bytes, initial=0)),
        "compute_seconds": float(trace.function_seconds.sum()),
        "chunk_bytes": trace.chunk_bytes,
    }


def trace_rows(trace: Trace) -> list[tuple[str, str]]:
    """The same for people."""
    facts = trace_facts(trace)
    return [
        ("functions", f"{facts['functions']} in {format_duration(facts['compute_seconds'])}"),
        ("variables", f"{facts['variables']}"),
        ("live peak", format_bytes(facts["live_peak_bytes"])),
        ("fingerprint", facts["fingerprint"]),
    ]
