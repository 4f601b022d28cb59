"""Inference of mmCNN's networks with 200 to 5 MB of memory, beside the paper's tables and its Figure 9.

    python -m benchmarks.splitting.inference [--networks NAME ...] [--limits MB ...] [--output FOLDER] [--tables]

Batch 1, as in the paper (Li et al. 2019, section 4). Each run is a process of its own that makes the network under the
limit and runs it: ten times, with nothing known of how to divide its layers, and then with all verdicts found. Our own
way to divide and to plan is one run, mmCNN's (OOC_POLICY=mmcnn) another; one in plain PyTorch says what must come out.
The device is emulated, with chunks of 16 KiB (a GPU's are 2 MiB); everything is counted against the limit, small
allocations too. `exact` is tried first; `allow` where
a layer can only be divided with other rounding.

MB are 10^6 bytes here, so that a limit is kept however it is read; the paper's are MiB.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.models.mmcnn import NETWORKS
from benchmarks.runs import RunFailed
from benchmarks.splitting import mmcnn_tables
from benchmarks.splitting.child_runs import run_child
from benchmarks.splitting.layers import layers_of
from swapd.splitting.segments import Layer, schedule_layers
from swapd.units import format_bytes

LIMITS_MB = (200, 100, 50, 10, 5)
ITERATIONS = 30  # in the earlier half a plan is still waited for now and then
CHUNK_BYTES = 16 << 10
MB, MIB = 1_000_000, 1 << 20
PAPERS_MIB = {"AlexNet": mmcnn_tables.rows(mmcnn_tables.TABLE_4_ALEXNET)}
PAPERS_MIB["VGG-D19"] = mmcnn_tables.rows(mmcnn_tables.TABLE_6_VGG_D19)
PAPERS_TABLE_2 = {"AlexNet": (233, 144, 5), "VGG-S": (432, 288, 5), "VGG-D19": (788, 392, 5)}
PAPERS_NUMBERS = mmcnn_tables.rows(mmcnn_tables.TABLE_3)
TOLERANCE = 1e-4  # of the largest output, where another rounding is allowed


POLICIES = ("auto", "mmcnn")


def run(network: str, limit_mb: int | None, split: str, iterations: int, policy: str = "auto") -> dict[str, Any]:
    """One process; without a limit, plain PyTorch. Raises RunFailed."""
    variables = {}
    store = tempfile.TemporaryDirectory(prefix="ooc-bench-")
    if limit_mb is not None:
        variables = {
            "OOC_ALLOC": "emulated",
            "OOC_BUDGET": str(limit_mb * MB),
            "OOC_CHUNK_SIZE": str(CHUNK_BYTES),
            "OOC_SMALL_LIMIT": str(CHUNK_BYTES),
            "OOC_EMULATED_GRANULARITY": str(CHUNK_BYTES),
            "OOC_SPLIT": split,
            "OOC_SPLIT_STORE": str(Path(store.name) / "store.sqlite"),
            "OOC_POLICY": policy,
            "OOC_PLANNING": "blocking",
        }
    facts = {"network": network, "limit_mb": limit_mb, "split": split if limit_mb is not None else None}
    with store:
        made = run_child("benchmarks.splitting.inference_child", [network, str(iterations)], variables)
    return facts | {"policy": policy if limit_mb is not None else None} | made


def compared(record: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What must hold of a run under a limit; every entry is looked at by `wrong`."""
    summary = record["summary"]
    scale = max(map(abs, plain["result"]))
    difference = max(abs(a - b) for a, b in zip(record["result"], plain["result"], strict=True))
    return {
        "device_peak_bytes": summary["device_peak_bytes"],
        "same_parameters": record["parameters_fingerprint"] == plain["parameters_fingerprint"],
        "identical": record["result_fingerprint"] == plain["result_fingerprint"],
        "largest_difference": difference / scale if scale else difference,
    }


def wrong(record: dict[str, Any]) -> list[str]:
    """What does not hold; nothing for a good run."""
    seen, found = record["compared"], []
    if seen["device_peak_bytes"] > record["limit_mb"] * MB:
        found.append(f"the device held {seen['device_peak_bytes']} bytes")
    if not seen["same_parameters"]:
        found.append("other parameters")
    if record["split"] == "exact" and not seen["identical"]:
        found.append("other bits though only exact divisions are allowed")
    if not seen["largest_difference"] <= TOLERANCE:
        found.append(f"results differ by {seen['largest_difference']:.1e} of the largest")
    if any(not math.isfinite(value) for value in record["result"]):
        found.append("results that are no numbers")
    return found


def measure(networks: Sequence[str], limits: Sequence[int], target: Path, iterations: int) -> list[str]:
    """Raw data of all runs; returns what was wrong."""
    complaints = []
    for network in networks:
        plain = run(network, None, "off", iterations)
        results.save(target, "inference", f"{network}-plain", plain)
        for limit, policy in itertools.product(limits, POLICIES):
            try:
                record = run(network, limit, "exact", iterations, policy)
            except RunFailed as error:
                if "OOC_SPLIT=allow" not in str(error):
                    raise
                record = run(network, limit, "allow", iterations, policy)
            record["compared"] = compared(record, plain)
            results.save(target, "inference", f"{network}-{limit:03}-{policy}", record)
            complaints += [f"{network} under {limit} MB, {policy}: {text}" for text in wrong(record)]
            print(f"{network} under {limit} MB, {policy}, {record['split']}: {step_seconds(record):.2f} s", flush=True)
    return complaints


def step_seconds(record: dict[str, Any]) -> float:
    """Of the fastest iteration of the later half: the first ones record and plan."""
    steps = record["steps"]
    return float(min(step["seconds"] for step in steps[len(steps) // 2 :]))


def first_over_tenth(record: dict[str, Any]) -> float:
    """How many times as long as the tenth inference the first one took."""
    return float(record["first_steps"][0]["seconds"] / record["first_steps"][9]["seconds"])


def overview(records: list[dict[str, Any]]) -> str:
    """One row a run: the shape of Figure 9."""
    plain = {record["network"]: record for record in records if record["limit_mb"] is None}
    rows = []
    for record in sorted(records, key=lambda r: (r["network"], -(r["limit_mb"] or 1e9), r["policy"] or "")):
        network, limit = record["network"], record["limit_mb"]
        seconds = step_seconds(record)
        ratio = f"{seconds / step_seconds(plain[network]):.2f}"
        ratio_of_first = f"{first_over_tenth(record):.1f}"
        if limit is None:
            rows.append([f"{network}, plain PyTorch", *[""] * 6, f"{seconds:.3f}", ratio, ratio_of_first, ""])
            continue
        last, seen = record["steps"][-1], record["compared"]
        bits = "identical" if seen["identical"] else f"{seen['largest_difference']:.0e}"
        moved = [f"{last['swap_in_bytes'] / MB:.0f}", str(last["swap_in_count"]), f"{last['swap_out_bytes'] / MB:.0f}"]
        held = f"{seen['device_peak_bytes'] / MB:.2f}"
        how = [record["policy"], record["split"]]
        rows.append([f"{network}, {limit} MB", *how, held, *moved, f"{seconds:.3f}", ratio, ratio_of_first, bits])
    header = ["run", "policy", "division", "device peak, MB", "in, MB", "copies in", "out, MB", "s", "/ plain"]
    header += ["first / tenth", "output"]
    return results.markdown(header, rows)


def in_all(records: list[dict[str, Any]]) -> str:
    """Table 2: what a network takes in one piece, layer by layer, and in the least memory that was tried."""
    rows = []
    for network in dict.fromkeys(record["network"] for record in records):
        limited = [r for r in records if r["network"] == network and r["limit_mb"] is not None]
        largest = max(layer.input_bytes + layer.output_bytes + layer.weight_bytes for layer in layers_of_named(network))
        peak = max(record["summary"]["live_peak_bytes"] for record in limited)
        least = min(record["summary"]["device_peak_bytes"] for record in limited)
        ours = [f"{size / MIB:.1f}" for size in (peak, largest, least)]
        rows.append([network, *(f"{mine} ({theirs})" for mine, theirs in zip(ours, PAPERS_TABLE_2[network]))])
    return results.markdown(["MiB (in brackets: the paper's)", "all at once", "largest layer (vDNN)", "in parts"], rows)


def layers_of_named(network: str) -> list[Layer]:
    """As `layers_of`, of a network with its own number of classes."""
    return layers_of(NETWORKS[network](), network)


def published(network: str, number: int, limit_mb: int) -> str:
    """The paper's MiB of a layer under a limit, and its two numbers where it prints them; empty if it does not."""
    column = LIMITS_MB.index(limit_mb) if limit_mb in LIMITS_MB else None
    if network not in PAPERS_MIB or column is None:
        return ""
    text = f"; paper {PAPERS_MIB[network][number - 1][column]:.2f}"
    if network != "VGG-D19":
        return text
    self_number, conv_number = PAPERS_NUMBERS[number - 1][2 * column : 2 * column + 2]
    return f"{text}, {self_number:.0f}, {conv_number:.0f}"


def layer_table(records: list[dict[str, Any]], network: str) -> str:
    """Each layer's largest working set under each limit, ours and mmCNN's, beside the schedule for the same limit."""
    runs = {(r["limit_mb"], r["policy"]): r for r in records if r["network"] == network and r["limit_mb"] is not None}
    limits = sorted({limit for limit, _ in runs}, reverse=True)
    layers = layers_of_named(network)
    schedules = {limit: schedule_layers(layers, limit * MIB) for limit in limits}
    rows = []
    for index, layer in enumerate(layers[1:], start=1):
        cells = []
        for limit in limits:
            step = schedules[limit][index]
            held = [runs[limit, policy]["layer_bytes"].get(str(index + 1), 0) / MIB for policy in POLICIES]
            cells.append(
                f"{held[0]:.2f}, **{held[1]:.2f}** ({step.peak_bytes / MIB:.2f}, {step.self_number}, {step.conv_number}"
                f"{published(network, index + 1, limit)})"
            )
        rows.append([f"{index + 1} {layer.name}", *cells])
    return results.markdown(["layer", *(f"{limit} MB" for limit in limits)], rows)


def draw(records: list[dict[str, Any]], target: Path) -> Path:
    """The two axes of Figure 9 over the limit: running time, and copies to the device. Raises ImportError."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    for network in dict.fromkeys(record["network"] for record in records):
        mine = [r for r in records if r["network"] == network and r["policy"] in (None, "auto")]
        plain = next(r for r in mine if r["limit_mb"] is None)
        limited = sorted((r for r in mine if r["limit_mb"] is not None), key=lambda r: -int(r["limit_mb"]))
        limits = [record["limit_mb"] for record in limited]
        left.plot(limits, [step_seconds(r) / step_seconds(plain) for r in limited], "o-", label=network)
        right.plot(limits, [r["steps"][-1]["swap_in_count"] for r in limited], "o-", label=network)
    left.set_ylabel("inference / plain PyTorch")
    right.set_ylabel("copies to the device in one inference")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.invert_xaxis()
        axes.set_xlabel("device memory, MB")
        axes.set_xticks(list(LIMITS_MB), [str(limit) for limit in LIMITS_MB])
        axes.minorticks_off()
        axes.legend()
    figure.suptitle("Batch 1, emulated device", fontsize=10)
    figure.tight_layout()
    path = target / "inference.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def write_tables(target: Path) -> Path:
    """`inference.md`, of all raw data that there are."""
    records = results.load(target, "inference")
    text = (
        "# Inference with little memory\n\nMade from the raw data in `inference/` by "
        "`python -m benchmarks.splitting.inference --tables`. The device is emulated.\n\n" + overview(records)
    )
    try:
        text += f"\n![Running time and copies over memory]({draw(records, target).name})\n\n"
    except ImportError:
        print("no picture: matplotlib is not installed (the extra `report`)", file=sys.stderr)
        text += "\n"
    text += in_all(records)
    for network in dict.fromkeys(record["network"] for record in records):
        text += (
            f"\n## {network}\n\nMiB of the largest working set of the layer's functions: divided by us, and (bold) by "
            "mmCNN's rules. In brackets what mmCNN's "
            "Algorithm 1 plans for the same limit, as computed here: MiB with what is prefetched, self_number, "
            "conv_number; and the same as the paper prints it, where it does (a prefetch counts where it starts).\n\n"
        )
        text += layer_table(records, network)
    used = {machine.words(record["machine"]) for record in records}
    path = target / "inference.md"
    chunk = format_bytes(CHUNK_BYTES)
    path.write_text(text + f"\nChunks of {chunk}. " + "; ".join(sorted(used)) + "\n", encoding="utf-8")
    return path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--limits", nargs="+", type=int, default=list(LIMITS_MB), metavar="MB")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--output", type=Path, default=results.folder() / "splitting")
    parser.add_argument("--tables", action="store_true", help="run nothing: tables of the raw data")
    options = parser.parse_args(arguments)
    complaints = []
    if not options.tables:
        complaints = measure(options.networks, options.limits, options.output, options.iterations)
    print(write_tables(options.output).read_text(encoding="utf-8"))
    for text in complaints:
        print(text, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
