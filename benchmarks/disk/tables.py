"""Tables of the raw data: every arm beside the in-core run of its round, the bound, and what was aimed at."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import machine, results
from benchmarks.disk import bounds, sizing, swap
from benchmarks.disk.cases import ARMS, IN_CORE, OURS, WARM_UP, WORKLOADS

NAME, DISKS = "runs", "disks"
TARGET = 1.15  # of a step in-core on the disk as it is, of the bound on the held disk
HEADER = "arm|step s|rounds|/ in-core|bound s|/ bound|read MiB|written MiB|others MiB|faults".split("|")
HEADER += ["group MiB", "RSS MiB", "same bits"]
_MOVED = ("read_bytes", "written_bytes", "others_bytes")
Key = tuple[str, float, str]


def steady(record: dict[str, Any], key: str = "seconds") -> list[float]:
    """A figure of the steps after the warm-up; of the last one where there are no more."""
    return [step[key] for step in record["steps"][min(WARM_UP, len(record["steps"]) - 1) :]]


def median(record: dict[str, Any], key: str = "seconds") -> float:
    return float(statistics.median(steady(record, key)))


def own_bytes(step: dict[str, Any]) -> tuple[int, int]:
    """Bytes that an arm read and wrote in a step: what its process and the swap moved, at most what the disk did."""
    written = step["process_written_bytes"] + step["swapped_out_bytes"]
    return min(step["read_bytes"], step["process_read_bytes"]), min(step["written_bytes"], written)


def moved(record: dict[str, Any]) -> tuple[float, float, float]:
    """Medians of a steady step: bytes that the arm read and wrote, and those that others moved on its disk."""
    steps = record["steps"][min(WARM_UP, len(record["steps"]) - 1) :]
    own = [own_bytes(step) for step in steps]
    others = [step["read_bytes"] + step["written_bytes"] - sum(mine) for step, mine in zip(steps, own)]
    read, written = (statistics.median(mine[way] for mine in own) for way in (0, 1))
    return read, written, statistics.median(others)


def in_core_of(records: Iterable[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The in-core record of every workload and round."""
    return {(r["workload"], r["round"]): r for r in records if r["arm"] == IN_CORE and "failed" not in r}


def groups(records: Iterable[dict[str, Any]]) -> dict[Key, dict[str, list[dict[str, Any]]]]:
    """{(workload, oversubscription, disk): {arm: rounds}} in the order of cases.py; arms without disk are in each."""
    found: dict[Key, dict[str, list[dict[str, Any]]]] = {}
    mine = [record for record in records if record["arm"] != IN_CORE]
    for record in mine:
        found.setdefault((record["workload"], record["oversubscription"], record["disk"]), {})
    for (workload, x, disk), arms in found.items():
        for name in WORKLOADS[workload].arms:
            chosen = [r for r in mine if (r["workload"], r["oversubscription"], r["arm"]) == (workload, x, name)]
            if ARMS[name].uses_disk:
                chosen = [record for record in chosen if record["disk"] == disk]
            if chosen:
                arms[name] = chosen
    names = list(WORKLOADS)
    return dict(sorted(found.items(), key=lambda item: (names.index(item[0][0]), item[0][1], item[0][2] != "as it is")))


def bound_seconds(record: dict[str, Any], in_core_seconds: float, disks: dict[str, Any]) -> float:
    """No step that computes this and moves these bytes is shorter: the disk moves both ways at once, and meanwhile.

    Bytes are the arm's own in a steady step; bandwidths those that were measured with both ways at once, and never more
    than the disk is held to.
    """
    rates = bounds.rates_of(disks[record["disk"]])
    return max(in_core_seconds, *(size / rate for size, rate in zip(moved(record), rates)))


def figures(
    records: list[dict[str, Any]], in_core: dict[tuple[str, int], dict[str, Any]], disks: dict[str, Any]
) -> dict[str, Any]:
    """Of one arm in one case: medians over all steady steps, ratios within each round."""
    good = [r for r in records if "failed" not in r and (r["workload"], r["round"]) in in_core]
    if not good:
        return {"failed": next((r["failed"] for r in records if "failed" in r), "there is no in-core run of its round")}
    beside = [in_core[r["workload"], r["round"]] for r in good]
    bounds = [bound_seconds(r, median(other), disks) for r, other in zip(good, beside)]

    def middle(key: str) -> float:
        return float(statistics.median(value for record in good for value in steady(record, key)))

    return {
        "step_seconds": middle("seconds"),
        "rounds": [median(record) for record in good],
        "ratio": statistics.median(median(r) / median(other) for r, other in zip(good, beside)),
        "bound_seconds": statistics.median(bounds),
        "over_bound": statistics.median(median(r) / bound for r, bound in zip(good, bounds)),
        **{name: statistics.median(moved(r)[n] for r in good) for n, name in enumerate(_MOVED)},
        "major_faults": middle("major_faults"),
        "group_peak_bytes": max(r["group"]["peak_bytes"] for r in good),
        "peak_rss_bytes": max(r["peak_rss_bytes"] for r in good),
        "identical": all(r["digest"] == other["digest"] for r, other in zip(good, beside)),
        "fastest_bytes_per_second": max(
            step[key] / step["seconds"] for r in good for step in r["steps"] for key in ("read_bytes", "written_bytes")
        ),
        "failed_rounds": len(records) - len(good),
    }


def verdict(arms: dict[str, dict[str, Any]], held: bool) -> str:
    """Whether ours reached what was aimed at; nothing where it did not run."""
    ours = arms.get(OURS)
    if ours is None:
        return ""
    if "failed" in ours:
        return f"Ours did not end: {_short(ours['failed'])}."
    others = {name: arm["step_seconds"] for name, arm in arms.items() if name != OURS and "failed" not in arm}
    best = min(others, key=lambda name: others[name], default=None)
    ahead = f"{others[best] / ours['step_seconds']:.2f} times as fast as {best}, the best other arm" if best else ""
    if held:
        reached = ours["over_bound"] <= TARGET and (best is None or ours["step_seconds"] < others[best])
        aim = f"at most {TARGET} times the bound, and faster than every arm"
    else:
        reached = ours["ratio"] <= TARGET
        aim = f"at most {TARGET} times in-core"
    return f"Aim ({aim}): {'reached' if reached else 'NOT reached'}" + (f"; ours is {ahead}." if ahead else ".")


def _short(sentence: str) -> str:
    lines = [line for line in sentence.strip().splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0][:60]} ... {lines[-1][:120]}"


def _row(name: str, f: dict[str, Any]) -> list[str]:
    if "failed" in f:
        return [name, _short(f["failed"]).replace("|", "/"), *[""] * (len(HEADER) - 2)]
    return [
        name + (f" ({f['failed_rounds']} rounds failed)" if f["failed_rounds"] else ""),
        f"{f['step_seconds']:.2f}",
        f"{min(f['rounds']):.2f} to {max(f['rounds']):.2f}",
        f"{f['ratio']:.2f}",
        f"{f['bound_seconds']:.2f}",
        f"{f['over_bound']:.2f}",
        results.mib(f["read_bytes"]),
        results.mib(f["written_bytes"]),
        results.mib(f["others_bytes"]),
        f"{f['major_faults']:,.0f}",
        results.mib(f["group_peak_bytes"]),
        results.mib(f["peak_rss_bytes"]),
        "yes" if f["identical"] else "NO",
    ]


def text(target: Path) -> str:
    """Markdown of everything in the folder."""
    made = "# The disk tier, measured\n\nMade from the raw data here by `python -m benchmarks.disk --tables`.\n"
    records = results.load(target, NAME)
    if not records:
        return made + "\nNothing was measured yet.\n"
    disks = results.load(target, DISKS)[0]
    proved = {
        (entry["workload"], one["oversubscription"], one["disk"]): one["seconds"]
        for entry in results.load(target, bounds.BOUNDS)
        for one in entry["proved"]
    }
    in_core = in_core_of(records)
    first = records[0]
    threads = max(record.get("threads", 0) for record in records)
    made += (
        f"\n{machine.words(first['machine'])}; every program has {threads} thread(s). "
        "A step's figures are medians of the steps after the warm-up; reads, writes and faults are a step's.\n"
    )
    for label, disk in disks.items():
        rates = [disk[f"{way}_bytes_per_second"] / 1e6 for way in ("read", "write")]
        made += f"\nDisk {label}: reads {rates[0]:,.0f} and writes {rates[1]:,.0f} MB/s at once, measured.\n"
    for (workload, x, disk), found in groups(records).items():
        arms = {name: figures(chosen, in_core, disks) for name, chosen in found.items()}
        limit = next(r["limit_bytes"] for chosen in found.values() for r in chosen)
        seconds = [median(r) for (name, _), r in in_core.items() if name == workload]
        made += f"\n## {workload}, {x:g} times, disk {disk}\n\nLimit {results.mib(limit)} MiB"
        made += f"; in-core {statistics.median(seconds):.2f} s a step.\n\n" if seconds else ".\n\n"
        made += results.markdown(HEADER, [_row(name, arm) for name, arm in arms.items()])
        if (workload, x, disk) in proved:
            least = proved[workload, x, disk]
            made += f"\nNo schedule of copies takes less than {least:.2f} s at our budget (proved"
            made += ", for the recorded times and a disk as fast as measured)"
            ours = arms.get(OURS, {}).get("step_seconds")
            made += f"; ours takes {ours / least:.2f} times that.\n" if ours else ".\n"
        if said := verdict(arms, bool(disks[disk].get("held"))):
            made += f"\n{said}\n"
    made += _own_table(records) + _held_table(records, in_core, disks)
    return made + _tuning_table(results.load(target, sizing.TUNING))


def _own_table(records: list[dict[str, Any]]) -> str:
    """What our summaries say, beside what the kernel counted over the whole run, loading and saving included."""
    rows = []
    for record in records:
        if record["arm"] == OURS and "disk_peak_bytes" in record.get("summary", {}):
            said, counted = record["summary"], record["whole_run"]
            name = f"{record['workload']} {record['oversubscription']:g}x {record['disk']} round {record['round']}"
            pairs = (("disk_read_bytes", "read_bytes"), ("disk_written_bytes", "written_bytes"))
            sizes = [record["limit_bytes"], record["budget_bytes"], said["peak_rss_bytes"], said["disk_peak_bytes"]]
            moved = [size for own, kernel in pairs for size in (said[own], counted[kernel])]
            rows.append([name, *(results.mib(size) for size in sizes + moved)])
    header = "run|limit|budget|peak RSS|peak on disk|read|counted|written|counted".split("|")
    return "\n## What our summaries say, MiB\n\n" + results.markdown(header, rows) if rows else ""


def _held_table(records: list[dict[str, Any]], in_core: dict[Any, Any], disks: dict[str, Any]) -> str:
    """The fastest step of each arm on the held disk: whether it was held."""
    rows = []
    for (workload, x, disk), found in groups(records).items():
        held = disks[disk].get("held")
        for name, chosen in found.items() if held else ():
            f = figures(chosen, in_core, disks)
            if "failed" not in f and ARMS[name].uses_disk:
                rate = f["fastest_bytes_per_second"]
                rows.append([f"{workload} {x:g}x {name}", f"{rate / 1e6:.0f}", "yes" if rate <= 1.05 * held else "NO"])
    title = "\n## Whether the disk was held\n\nThe most bytes a second of any step and direction, as counted.\n\n"
    return title + results.markdown(["case", "MB/s", "held"], rows) if rows else ""


def _tuning_table(records: list[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        if "failed" not in record:
            steps = [step["seconds"] for step in record["steps"][sizing.TUNING_WARM_UP :]]
            words = swap.Tuning(**record["tuning"]).words()
            rows.append([record["workload"], words, f"{statistics.median(steps):.2f}"])
    title = "\n## Settings of the kernel's swap that were tried\n\nThe fastest is the arm `swap tuned`.\n\n"
    return title + results.markdown(["workload", "settings", "step s"], rows) if rows else ""
