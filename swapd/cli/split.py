"""`swapd split`: into how many parts each layer of a model goes under a budget, and what that costs."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType

from swapd.cli.launch import model_arguments, run_module
from swapd.cli.options import parsed, read_config, setting_options
from swapd.cli.output import OUTPUT, Failure, console, json_option, print_json, text_table
from swapd.splitting.configurations import POLICIES
from swapd.splitting.limits import LimitTooSmallError
from swapd.splitting.network import KernelPlan, LayerPlan, NetworkLayer, NetworkPlan, plan_network
from swapd.splitting.segments import MOST_PREFETCH_PARTS
from swapd.units import exact_bytes, format_bytes, format_duration, parse_bytes

MODULE = "ooc.pytorch.splitting.layers"
LARGEST_WORKSPACE = 1 << 29
MEASURE_BYTES = 4 << 30  # emulated device memory of the process that measures
_STEP_KEYS = ("self_number", "activation_parts", "weight_parts", "conv_number", "prefetched_layer", "peak_bytes")
BYTES = parsed(parse_bytes)


@click.command("split")
@click.option("--budget", required=True, metavar="BYTES", callback=BYTES, help="Device memory.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="To make the model for.")
@click.option(
    "--workspace",
    metavar="BYTES",
    callback=BYTES,
    help="For convolutions; of each at most with WR, of all together with WD [what the budget leaves].",
)
@click.option("--division", type=click.Choice(["WR", "WD"]), default="WR", show_default=True, help="See micro-cuDNN.")
@click.option(
    "--policy", type=click.Choice(POLICIES), default="powerOfTwo", show_default=True, help="Sizes of micro-batches."
)
@click.option(
    "--prefetch-parts",
    type=click.IntRange(min=0),
    default=MOST_PREFETCH_PARTS,
    show_default=True,
    help="Most parts of weights of which one is prefetched.",
)
@click.option("--measure", is_flag=True, help="Measure here the convolutions that the store does not have.")
@click.option("--picture", type=OUTPUT, help="Draw the plan there (PNG, SVG, PDF).")
@setting_options("split_store")
@json_option
@click.argument("program", nargs=-1, required=True, metavar="MODEL [NAME=VALUE]...", type=click.UNPROCESSED)
def command(
    program: tuple[str, ...],
    budget: int,
    batch: int,
    workspace: int | None,
    division: str,
    policy: str,
    prefetch_parts: int,
    measure: bool,
    picture: Path | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Show how MODEL runs in parts under a budget: layer by layer its parts, algorithm, workspace, time, exactness.

    MODEL is SCRIPT.py:FUNCTION, MODULE:FUNCTION or the name of a model in benchmarks/models, as for `swapd record
    --fake`; it is built without memory. Inference is divided by mmCNN's Algorithm 1. In training (mode=training) only
    the convolutions are planned, forwards and backwards. Times and workspaces are measured ones, from the store of
    measurements; without them, or --measure, there is memory alone. A layer in parts is called exact only where that
    was verified on this machine.

    \b
    swapd split --budget 10MB vgg19
    swapd split --budget 2GiB --batch 32 --workspace 64MiB --measure --picture plan.png resnet50 mode=training
    """
    config = read_config(flags)
    wanted = {
        "program": program[0],
        "arguments": model_arguments(program),
        "batch": batch,
        "policy": policy,
        "measure": measure,
        "measure_bytes": MEASURE_BYTES,
        "largest_bytes": LARGEST_WORKSPACE,
        "store": None if config.split_store is None else str(config.split_store),
    }
    facts = layers_of(wanted)
    try:
        plan = plan_network(
            [NetworkLayer.from_json(layer) for layer in facts["layers"]],
            budget,
            training=facts["training"],
            workspace_bytes=workspace,
            division=division,
            policy=policy,
            most_prefetch_parts=prefetch_parts,
        )
    except LimitTooSmallError as error:
        option = "--workspace" if "workspace" in error.what and workspace is not None else "--budget"
        raise Failure(
            f"{error.what} does not fit in {format_bytes(error.limit_bytes)} however it is divided; "
            f"{option} {exact_bytes(error.smallest_bytes)} is the smallest that works"
        ) from None
    if picture is not None:
        _draw(plan, program[0], picture)
    found = {"model": program[0], "batch": batch, "division": division, "policy": policy} | plan_facts(plan)
    found |= {key: facts[key] for key in ("device", "library", "store", "measurements", "noise")}
    if as_json:
        print_json(found)
        return 0
    screen = console()
    screen.print(plan_table(plan, f"{program[0]}, batch {batch}, under {format_bytes(budget)}"))
    for line in plan_notes(plan, facts):
        screen.print(line, soft_wrap=True, markup=False)
    if plan.front:
        rows = ((format_bytes(size), format_duration(seconds)) for size, seconds in plan.front)
        title = "\nAll convolutions, by the workspace that they share (WD):"
        screen.print(text_table(title, ("workspace", "time"), rows))
    return 0


def layers_of(wanted: dict[str, Any]) -> dict[str, Any]:
    """What a process started for this purpose finds out about the model. Raises Failure."""
    with tempfile.TemporaryDirectory(prefix="swapd-split-") as folder:
        output = Path(folder) / "layers.json"
        status = run_module(MODULE, {**wanted, "output": str(output)}, stdout_is_ours=True)
        if status != 0 or not output.exists():
            raise Failure(f"the layers of {wanted['program']} could not be found out (the reason is above)")
        facts: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return facts


def plan_facts(plan: NetworkPlan) -> dict[str, Any]:
    """The plan; keys of ``swapd split --json``."""
    return {
        "budget_bytes": plan.budget_bytes,
        "training": plan.training,
        "peak_bytes": max((p.step.peak_bytes for p in plan.layers if p.step is not None), default=None),
        "kernels_not_measured": plan.not_measured,
        "layers": [_layer_facts(layer) for layer in plan.layers],
        "front": [{"workspace_bytes": size, "seconds": seconds} for size, seconds in plan.front],
    }


def _layer_facts(plan: LayerPlan) -> dict[str, Any]:
    layer = plan.layer.layer
    return {
        "name": layer.name,
        "operator": plan.layer.operator,
        "shapes": plan.layer.shapes,
        "input_bytes": layer.input_bytes,
        "output_bytes": layer.output_bytes,
        "weight_bytes": layer.weight_bytes,
        **{key: getattr(plan.step, key, None) for key in _STEP_KEYS},
        "kernels": [_kernel_facts(kernel) for kernel in plan.kernels],
        "workspace_bytes": plan.workspace_bytes,
        "seconds": plan.seconds,
        "exactness": plan.exactness,
    }


def _kernel_facts(kernel: KernelPlan) -> dict[str, Any]:
    found = kernel.configuration
    return {
        "name": kernel.name,
        "limit_bytes": kernel.limit_bytes,
        "problem": kernel.problem,
        "parts": None if found is None else [[part.batch, part.algorithm] for part in found.parts],
        "workspace_bytes": None if found is None else found.workspace_bytes,
        "seconds": None if found is None else found.seconds,
    }


def plan_table(plan: NetworkPlan, title: str) -> RenderableType:
    """One line for each layer; in training, only layers with convolutions have one."""
    rows = []
    for line in plan.layers:
        step = line.step
        if step is None and not line.kernels:
            continue
        kernels = [str(k.configuration) if k.configuration is not None else k.problem or "" for k in line.kernels]
        rows.append(
            [
                line.layer.layer.name,
                "" if step is None else str(step.self_number),
                f"1/{step.conv_number} of {step.prefetched_layer}" if step and step.prefetched_layer else "",
                "" if step is None else format_bytes(step.peak_bytes),
                "\n".join(kernels),
                "" if line.workspace_bytes is None else format_bytes(line.workspace_bytes),
                "" if line.seconds is None else format_duration(line.seconds),
                line.exactness,
            ]
        )
    columns = ("layer", "parts", "prefetch", "memory", "micro-batches", "workspace", "time", "in parts")
    return text_table(title, columns, rows, left=("micro-batches", "in parts"))


def plan_notes(plan: NetworkPlan, facts: dict[str, Any]) -> list[str]:
    """Sentences about what the table cannot say."""
    notes = []
    peaks = [p.step.peak_bytes for p in plan.layers if p.step is not None]
    if peaks:
        notes.append(f"Most at once {format_bytes(max(peaks))} of {format_bytes(plan.budget_bytes)}, workspaces aside.")
    kernels = [kernel for layer in plan.layers for kernel in layer.kernels]
    if plan.not_measured:
        notes.append(
            f"{plan.not_measured} of {len(kernels)} kernels of convolutions are not measured on this machine: for them "
            f"there is memory alone. --measure measures them."
        )
    if len(kernels) > plan.not_measured:
        notes.append(
            f"Times were measured on {facts['device']} ({facts['library']}), on whole layers in micro-batches; what "
            f"parts by rows or channels cost beside is not in them. {facts['measurements']} measurements now; the "
            f"spread of repetitions is {100 * facts['noise']['median']:.0f}% (median)."
        )
    if facts["store"] is None:
        notes.append("The store of measurements cannot be used; what was measured is not kept.")
    if any(layer.exactness == "not verified" for layer in plan.layers):
        notes.append("Not verified: nobody compared this layer in parts with the one in one piece on this machine yet.")
    return notes


def _draw(plan: NetworkPlan, model: str, path: Path) -> None:
    from swapd.splitting.picture import draw

    try:
        draw(plan, model, path)
    except ImportError:
        raise Failure("a picture needs matplotlib: pip install 'ooc-alloc[report]'") from None
    except (OSError, ValueError) as error:
        raise Failure(f"cannot draw {path}: {error}") from None
