"""`swapd record`: run the program, or only its shapes, and keep the trace of the iteration that took the most time."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import click

from swapd.cli.launch import (
    BEFORE_PROGRAM,
    model_arguments,
    program_argument,
    python_arguments,
    run_module,
    run_program,
    stamps,
    written_since,
)
from swapd.cli.options import read_config, setting_options
from swapd.cli.output import OUTPUT, Failure, console, json_option, pairs_table, print_json
from swapd.cli.problems import FILE, load_trace, make_problem
from swapd.config import Config
from swapd.devices.roofline import DEVICES
from swapd.observing.analysis import problem_facts
from swapd.trace.trace import LARGEST_BYTES, Trace
from swapd.units import MIB, format_duration, format_need


@click.command("record", context_settings=BEFORE_PROGRAM)
@click.option("--output", "-o", type=OUTPUT, required=True, help="The trace's file.")
@click.option("--fake", is_flag=True, help="Record without running: no memory, no device; see below.")
@click.option("--batch", type=click.IntRange(min=1), help="With --fake: the batch size to make the model for.")
@click.option("--device", type=click.Choice(list(DEVICES)), help="With --fake: whose roofline gives functions' times.")
@click.option(
    "--times",
    metavar="TRACE",
    type=FILE,
    help="With --fake: a trace, really recorded, of the same functions, whose times are taken over.",
)
@setting_options(without=["trace"])
@json_option
@program_argument
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
    config = dataclasses.replace(read_config(flags, alloc="auto"), trace=output.absolute())
    if output.is_file():  # not /dev/null
        os.unlink(os.path.realpath(output))  # so that a file that is there afterwards is this run's
    if fake:
        wanted = fake_request(program, output, config, batch=batch, device=device, times=times)
        status = run_module("ooc.pytorch.fake", wanted, stdout_is_ours=as_json)
        if not output.exists():
            return status or 1
        written = [output]
    else:
        before = stamps(output)
        status = run_program(arguments, config, stdout_is_ours=as_json)
        written = written_since(output, before)
    if not written:
        if status != 0:
            click.echo(f"swapd: no trace was written; the program ended with status {status}", err=True)
            return status
        raise Failure(
            "no trace was written: the program did not import PyTorch, ran no whole iteration, or the allocator did "
            "not start (its reason is above; `swapd doctor` looks for others)"
        )
    facts = trace_facts(load_trace(written[0]))
    if as_json:
        print_json({"trace": str(written[0]), **facts})
    else:
        console().print(pairs_table(f"trace {written[0]}", trace_rows(facts)))
    return status


def fake_request(
    program: tuple[str, ...],
    output: Path,
    config: Config,
    *,
    batch: int | None,
    device: str | None,
    times: Path | None,
) -> dict[str, Any]:
    """What the process is told that records `program` (SCRIPT.py:FUNCTION, MODULE:FUNCTION or a model's name)."""
    if batch is None:
        raise click.UsageError("--fake needs --batch")
    if device is None and times is None:
        raise click.UsageError(f"--fake needs function times: --device ({', '.join(DEVICES)}) or --times TRACE")
    chunk_bytes, small_limit_bytes = config.resolve_chunks(LARGEST_BYTES, 2 * MIB)  # as on a GPU, whatever the budget
    return {
        "program": program[0],
        "arguments": model_arguments(program),
        "batch": batch,
        "device": device,
        "times": None if times is None else str(times.absolute()),
        "chunk_bytes": chunk_bytes,
        "small_limit_bytes": small_limit_bytes,
        "output": str(output.absolute()),
    }


def trace_facts(trace: Trace) -> dict[str, Any]:
    """What a trace holds: counts, bytes, seconds. Raises Failure."""
    return {
        "fingerprint": f"{trace.fingerprint:016x}",
        "functions": trace.functions,
        "variables": trace.variables,
        **problem_facts(make_problem(trace, 0, None, None)),
    }


def trace_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts of `trace_facts`, for people."""
    return [
        ("functions", f"{facts['functions']} in {format_duration(facts['compute_seconds'])}"),
        ("variables", f"{facts['variables']}"),
        ("needed in-core", format_need(facts["fit_budget_bytes"])),
        ("least budget", format_need(facts["min_budget_bytes"])),
        ("fingerprint", facts["fingerprint"]),
    ]
