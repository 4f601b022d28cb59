"""`swapd split`: how the functions of a model run within a budget, each in how many parts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from swapd.cli.launch import model_arguments, run_program
from swapd.cli.options import read_config, setting_options
from swapd.cli.output import Failure, console, json_option, print_json, text_table
from swapd.units import format_bytes, format_duration

MODULE = "ooc.pytorch.split_run"
SETTINGS_SHOWN = (
    *("alloc", "budget", "host_budget", "chunk_size", "small_limit", "policy", "recompute"),
    *("split", "split_store", "workspace", "workspace_total", "micro_batches"),
)


@click.command("split")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="To make the model for.")
@setting_options(*SETTINGS_SHOWN)
@json_option
@click.argument("program", nargs=-1, required=True, metavar="MODEL [NAME=VALUE]...", type=click.UNPROCESSED)
def command(program: tuple[str, ...], batch: int, as_json: bool, **flags: Any) -> int:
    """Run MODEL within a budget, and show which of its functions ran in parts, along what, and with which bits.

    MODEL is SCRIPT.py:FUNCTION, MODULE:FUNCTION or the name of a model in benchmarks/models, as for `swapd record
    --fake`. It really runs, on the emulated device unless --alloc says otherwise, until two iterations ran alike: what
    is shown is what a program does with the same settings. --policy mmcnn divides as mmCNN's Algorithm 1 does,
    --split fast as micro-cuDNN does.

    \b
    swapd split --budget 10MB vgg19
    swapd split --budget 2GiB --batch 32 --split fast --workspace 64MiB resnet50 mode=training
    """
    config = read_config(flags, alloc="cpu", planning="blocking")
    if config.budget is None:
        raise click.UsageError("say how much device memory there is: --budget BYTES")
    wanted = {"program": program[0], "arguments": model_arguments(program), "batch": batch}
    with tempfile.TemporaryDirectory(prefix="swapd-split-") as folder:
        output = Path(folder) / "layers.json"
        text = json.dumps({**wanted, "output": str(output)})
        status = run_program(["-m", MODULE, text], config, stdout_is_ours=True)
        if status != 0 or not output.exists():
            raise Failure(f"how {program[0]} runs could not be found out (the reason is above)")
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    if as_json:
        print_json({"model": program[0], "batch": batch, "split": config.split, **found})
        return 0
    screen = console()
    title = f"{program[0]}, batch {batch}, within {format_bytes(found['budget_bytes'])}"
    rows = [(r["operator"], r["shapes"], r["how"], str(r["parts"]), str(r["calls"]), bits(r)) for r in found["layers"]]
    columns = ("function", "of", "cut", "parts", "calls", "bits")
    screen.print(text_table(title, columns, rows, left=("of", "cut", "bits")))
    screen.print(
        f"All else ran whole, {found['functions']} functions with all parts. Most at once "
        f"{format_bytes(found['device_peak_bytes'])}. Iteration {found['iterations']} took "
        f"{format_duration(found['seconds'])}, with {format_bytes(found['swap_in_bytes'])} in and "
        f"{format_bytes(found['swap_out_bytes'])} out.",
        soft_wrap=True,
        markup=False,
    )
    return 0


def bits(row: dict[str, Any]) -> str:
    """Whether a function's results are those of the whole, in a few words."""
    if row["exact"]:
        return "the same"
    return f"differ by {row['largest_relative']:.1g} of the largest"
