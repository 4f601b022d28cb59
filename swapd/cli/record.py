"""`swapd record`: run the program and keep the trace of the iteration that took the most time."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click
import numpy as np

from swapd.cli.fake import record_fake
from swapd.cli.launch import ProgramCommand, python_arguments, run_program, stamps, written_since
from swapd.cli.options import read_program_config, setting_options
from swapd.cli.output import Failure, console, json_option, pairs_table, print_json
from swapd.devices.roofline import DEVICES
from swapd.trace.trace import Trace
from swapd.trace.trace_file import TraceError
from swapd.units import format_bytes, format_duration


@click.command("record", cls=ProgramCommand)
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The trace's file."
)
@click.option("--fake", is_flag=True, help="Record without running: no memory, no device; see below.")
@click.option("--batch", type=click.IntRange(min=1), help="With --fake: the batch size to make the model for.")
@click.option("--device", type=click.Choice(list(DEVICES)), help="With --fake: whose roofline gives functions' times.")
@click.option(
    "--times",
    metavar="TRACE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --fake: a trace, really recorded, of the same functions, whose times are taken over.",
)
@setting_options(without=["trace"])
@json_option
@click.argument("program", nargs=-1, required=True, metavar="SCRIPT.py|-m MODULE [ARGUMENT]...", type=click.UNPROCESSED)
def command(
    program: tuple[str, ...],
    output: Path,
    fake: bool,
    batch: int | None,
    device: str | None,
    times: Path | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Run a Python program and write a trace of it.

    The trace holds the functions of the iteration that took the most time in all, and the variables that each one
    uses. The recording run respects its budget, too. `swapd plan` reads the trace. With --json, what the program
    prints goes to standard error.

    \b
    swapd record -o gpt.trace --budget 8GiB train.py --steps 5

    With --fake nothing is computed and no memory is taken: PROGRAM is SCRIPT.py:FUNCTION or MODULE:FUNCTION, where
    FUNCTION(batch, NAME=VALUE...) builds a model and returns a function that runs one iteration, or the name of a model
    in benchmarks/models. Function times are a roofline model's, or those of a trace given with --times.

    \b
    swapd record --fake --batch 1440 --device v100-nvlink2 -o r.trace resnet50
    swapd record --fake --batch 8 --device h100-pcie5 -o m.trace train.py:make layers=48
    """
    if not fake and (batch, device, times) != (None, None, None):
        raise click.UsageError("--batch, --device and --times belong to --fake")
    arguments = [] if fake else python_arguments(program)
    config = dataclasses.replace(read_program_config(flags), trace=output.absolute())
    if output.is_file():  # not /dev/null
        os.unlink(os.path.realpath(output))  # so that a file that is there afterwards is this run's
    before = stamps(output)
    if fake:
        status = record_fake(program, output, config, batch=batch, device=device, times=times, stdout_is_ours=as_json)
    else:
        status = run_program(arguments, config, stdout_is_ours=as_json)
    if fake and not output.exists():
        return status or 1
    written = [output] if fake else written_since(output, before)
    if not written:
        if status != 0:
            click.echo(f"swapd: no trace was written; the program ended with status {status}", err=True)
            return status
        raise Failure(
            "no trace was written: the program did not import PyTorch, ran no whole iteration, or the allocator did "
            "not start (its reason is above; `swapd doctor` looks for others)"
        )
    try:
        trace = Trace.load(written[0])
    except (OSError, TraceError) as error:
        raise Failure(str(error)) from None
    if as_json:
        print_json({"trace": str(written[0]), **trace_facts(trace)})
    else:
        console().print(pairs_table(f"trace {written[0]}", trace_rows(trace)))
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
    """The facts of `trace_facts`, for people."""
    facts = trace_facts(trace)
    return [
        ("functions", f"{facts['functions']} in {format_duration(facts['compute_seconds'])}"),
        ("variables", f"{facts['variables']}"),
        ("live peak", format_bytes(facts["live_peak_bytes"])),
        ("fingerprint", facts["fingerprint"]),
    ]
