"""Settings: the one list of configuration variables, and how the value of each is read and written.

`Config` (in `config.py`) takes its values from this list, the command line its flags, and `doctor` and the help texts
their words. A setting called ``host_budget`` is the variable ``OOC_HOST_BUDGET``, the keyword ``host_budget=`` and the
flag ``--host-budget``.
"""

from __future__ import annotations

import ipaddress
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapd.link import parse_link
from swapd.units import (
    UnitError,
    exact_bytes,
    parse_amount,
    parse_bytes,
    parse_duration,
)

PREFIX = "OOC_"
_NO, _YES = ("0", "off", "no", "false"), ("1", "on", "yes", "true")
SPLITS = ("off", "exact", "allow", "fast")
MICRO_BATCHES = ("powerOfTwo", "all")
PLANNING = ("background", "blocking")
RECOMPUTE = ("off", "exact")
POLICIES = ("auto", "demand", "idle", "mmcnn", "window")  # those of swapd.policies, and demand, which makes no plan


@dataclass(frozen=True)
class Setting:
    """One setting. `parse` reads a text, or takes the value itself, and may raise ValueError; `text` is its inverse."""

    name: str
    metavar: str
    help: str  # with the default in brackets at its end
    parse: Callable[[Any], Any]
    text: Callable[[Any], str] = str
    more: str = ""  # sentences for docs/settings.md

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _one_of(words: Mapping[str, Any], problem: str, forms: str) -> Callable[[Any], Any]:
    """A parser of words, which case does not matter to. A bool counts as 1 or 0."""

    def parse(value: Any) -> Any:
        text = str(int(value) if isinstance(value, bool) else value).strip().lower()
        if text not in words:
            raise UnitError(value, problem, forms)
        return words[text]

    return parse


parse_alloc = _one_of(
    {
        **dict.fromkeys(("", *_NO), "off"),
        **dict.fromkeys((*_YES, "auto"), "auto"),
        "cuda": "cuda",
        **dict.fromkeys(("cpu", "emulated"), "cpu"),
    },
    "is no device",
    "1 or auto (a GPU if there is one, else cpu), cuda, cpu or 0",
)
parse_switch = _one_of({**dict.fromkeys(_YES, True), **dict.fromkeys(_NO, False)}, "is neither yes nor no", "1 or 0")
parse_policy = _one_of(
    {"none": "demand", **{name: name for name in POLICIES}},
    "is no policy",
    f"{', '.join(POLICIES[:-1])} or {POLICIES[-1]}",
)
parse_planning = _one_of({name: name for name in PLANNING}, "is no way to plan", " or ".join(PLANNING))
parse_recompute = _one_of(
    {"exact": "exact", **dict.fromkeys(_YES, "exact"), **dict.fromkeys((*_NO, "none"), "off")},
    "is no way to recompute",
    "off or exact (only what changes no bit)",
)
parse_split = _one_of(
    {**{name: name for name in SPLITS}, **dict.fromkeys((*_NO, "none"), "off")},
    "is no way to split",
    "off, exact (only what changes no bit), allow (rounding too) or fast (also what fits, where that is faster)",
)
parse_micro_batches = _one_of(
    {name.lower(): name for name in MICRO_BATCHES}, "is no set of micro-batches", " or ".join(MICRO_BATCHES)
)


def parse_nvtx(value: str | bool | int) -> str | None:
    """Returns "1" to look for a library with NVTX's calls, or the name of such a library, or None for no ranges."""
    text = str(value).strip()
    try:
        return "1" if parse_switch(text) else None
    except UnitError:
        return text


def parse_window(value: str | int) -> int | None:
    """Bytes of the schedule window; None for ``auto``."""
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    try:
        return parse_bytes(value)
    except UnitError as error:
        raise ValueError(f"{error}, or auto") from None


def parse_port(value: str | int) -> int | None:
    """A TCP port, 0 for any free one; None for ``off``."""
    text = str(value).strip().lower()
    if text == "off":
        return None
    if not (text.isascii() and text.isdecimal() and int(text) < 1 << 16):
        raise UnitError(value, "is not a port", "9835, 0 for any free one, or off")
    return int(text)


def parse_address(value: str) -> str:
    """A numeric address of this machine, IPv4 or IPv6; names are not looked up."""
    try:
        return str(ipaddress.ip_address(str(value).strip()))
    except ValueError:
        raise UnitError(value, "is no numeric address", "127.0.0.1, 0.0.0.0 for all, or ::") from None


def parse_gateway(value: str) -> str:
    """The address of a Prometheus pushgateway."""
    text = str(value).strip().rstrip("/")
    parts = urllib.parse.urlsplit(text)
    try:
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
    except ValueError:  # the port is no number, or too large
        right = False
    if not right:
        raise UnitError(value, "is no pushgateway", "http://gateway.example:9091")
    return text


def parse_job(value: str) -> str:
    """The name of a job at the pushgateway."""
    text = str(value).strip()
    if not text or "/" in text:
        raise UnitError(value, "is no name of a job", "training")
    return text


def parse_interval(value: str | float) -> float:
    """Seconds, at least a tenth of one."""
    seconds = parse_duration(value)
    if seconds < 0.1:
        raise UnitError(value, "is less than a tenth of a second", "15s")
    return seconds


def parse_path(value: str | Path) -> Path:
    """A file's path; ``~`` is the home folder."""
    return Path(value).expanduser()


def _switch_text(value: bool) -> str:
    return str(int(value))


def _seconds_text(value: float) -> str:
    return f"{value!r}s"


SETTINGS = (
    Setting(
        "alloc",
        "DEVICE",
        "1 or auto (a GPU if there is one, else cpu), cuda, cpu, or 0 [0]",
        parse_alloc,
        more="`cpu` is an emulated device in this machine's memory, and `emulated` another name of it. What does not "
        "fit there lies on a disk, if one is given. A call of `enable` means `auto` unless it says otherwise.",
    ),
    Setting(
        "budget",
        "BYTES|%",
        "device bytes the program may use [90% of what is free; on a GPU 1.5 GiB are left]",
        parse_amount,
        more="Bytes are for each process. A percentage, and the default, are for all processes of a job that use the "
        "device together (torchrun, accelerate, MPI, Slurm): each gets an equal part. On a GPU that goes by how many "
        "there are, unless `CUDA_VISIBLE_DEVICES` shows the process one alone.",
    ),
    Setting(
        "host_budget",
        "BYTES|%",
        "host bytes for swapped data [80% of what is free]",
        parse_amount,
        more="It is at most what the machine, or the control group, has.",
    ),
    Setting(
        "disk",
        "FOLDER",
        "folder on a disk for swapped data that host memory does not hold [none]",
        parse_path,
        more="With `cpu` there is host memory for them only where `OOC_HOST_BUDGET` says so. The file has no name.",
    ),
    Setting("disk_budget", "BYTES|%", "bytes of that disk for swapped data [80% of what is free there]", parse_amount),
    Setting(
        "chunk_size",
        "BYTES",
        "size of a physical chunk [2MiB; 4MiB for 1GiB or more on a GPU; less on the emulated device]",
        parse_bytes,
        exact_bytes,
        "The emulated device takes less where fewer than 64 chunks would be the budget. Large chunks waste memory "
        "where tensors are small: the examples use `256KiB` and less there. A GPU's chunks are multiples of 2 MiB.",
    ),
    Setting(
        "small_limit",
        "BYTES",
        "largest allocation that goes to slabs, which stay [1MiB, or half a chunk]",
        parse_bytes,
        exact_bytes,
        "Slabs are never swapped and take at most half of the budget; further small tensors are ordinary variables.",
    ),
    Setting(
        "policy",
        "|".join(POLICIES),
        "scheduling policy; demand is no plan [auto]",
        parse_policy,
        more="`auto` plans in several ways and takes the fastest; `window` is the schedule window alone; `mmcnn` runs "
        "layers of inference in mmCNN's parts, to compare with.",
    ),
    Setting(
        "planning",
        "|".join(PLANNING),
        "who plans: a process, while the program goes on, or the program, before it goes on [background]",
        parse_planning,
        more="With `blocking` a run of the same program follows its plans from the same iteration on every time.",
    ),
    Setting(
        "recompute",
        "|".join(RECOMPUTE),
        "computing some tensors again instead of moving them, where that is faster [exact]",
        parse_recompute,
        more="`exact` does so after a trial gave every bit of the first time. PyTorch; not with a disk below host "
        "memory.",
    ),
    Setting("window", "BYTES|auto", "schedule window [auto]", parse_window, exact_bytes),
    Setting(
        "split",
        "|".join(SPLITS),
        "functions larger than the budget in parts; allow: if bits change too; fast: convolutions that fit too [exact]",
        parse_split,
        more="`exact` runs them in parts where that was seen to change no bit, `allow` also where rounding differs "
        "(the summary says by how much), `off` raises. `fast` allows rounding, and runs convolutions that fit in the "
        "micro-batches, and by the algorithms, that it measured to be fastest. PyTorch; `fast` for CPU tensors.",
    ),
    Setting("workspace", "BYTES", "with fast: the workspace of each convolution [no limit]", parse_bytes, exact_bytes),
    Setting(
        "workspace_total",
        "BYTES",
        "with fast: the workspaces of all convolutions together [no limit]",
        parse_bytes,
        exact_bytes,
        "Each has a part of it to itself, which is chosen when an iteration has shown all of them; until then "
        "they run in as little as they can.",
    ),
    Setting("micro_batches", "|".join(MICRO_BATCHES), "with fast: sizes to measure [powerOfTwo]", parse_micro_batches),
    Setting(
        "split_store", "FILE", "what is known of parts: exact or not, and how fast [in the cache folder]", parse_path
    ),
    Setting(
        "summary",
        "FILE",
        "write a JSON summary there at exit [none]",
        parse_path,
        more="A plain file is also written after an iteration, at most once a second.",
    ),
    Setting(
        "progress",
        "FILE",
        "add a line there for each step of a long command [none]",
        parse_path,
        more="That goes for the demo, benchmarks, campaigns, `swapd probe` and `swapd compare`; programs write none.",
    ),
    Setting("trace", "FILE", "write the trace of the longest-running iteration there at exit [none]", parse_path),
    Setting("metrics_port", "PORT", "serve Prometheus metrics there; 0: any free port [off]", parse_port),
    Setting("metrics_address", "ADDRESS", "where to listen for scrapes [127.0.0.1]", parse_address),
    Setting("metrics_cert", "FILE", "serve metrics over TLS, with this certificate (PEM) [no TLS]", parse_path),
    Setting("metrics_key", "FILE", "the certificate's key [in the certificate's file]", parse_path),
    Setting("metrics_file", "FILE", "write metrics there, for node_exporter's textfile collector [none]", parse_path),
    Setting("metrics_interval", "TIME", "how often the file is written [15s]", parse_interval, _seconds_text),
    Setting("metrics_push", "URL", "push metrics to this pushgateway at exit [none]", parse_gateway),
    Setting("metrics_job", "NAME", "name of the job at the pushgateway [ooc]", parse_job),
    Setting(
        "wait_limit",
        "TIME",
        "a longer wait for the device is an error [30min]",
        parse_interval,
        _seconds_text,
        "Nothing moves any more after it. It has to be longer than any queue of work takes.",
    ),
    Setting(
        "strict",
        "0|1",
        "raise, not degrade; evict before every function [0]",
        parse_switch,
        _switch_text,
        "Clean copies are verified, too. For tests.",
    ),
    Setting(
        "safe",
        "0|1",
        "the host waits for every copy and every function on a GPU [0]",
        parse_switch,
        _switch_text,
        "Slow. For finding out whether wrong bits or faults come from the order between streams.",
    ),
    Setting(
        "timeline",
        "FILE",
        "write a Perfetto trace of what happened last there at exit (.json, .json.gz) [none]",
        parse_path,
        more="It holds the last 131,072 events, for <https://ui.perfetto.dev>.",
    ),
    Setting("report", "FILE", "write an HTML page about the run there at exit [none]", parse_path),
    Setting(
        "status",
        "0|1",
        "let `swapd top` look into the process [0]",
        parse_switch,
        _switch_text,
        "It looks through a Unix socket that answers no other user.",
    ),
    Setting(
        "nvtx",
        "0|1|LIBRARY",
        "functions and stalls as NVTX ranges [0]",
        parse_nvtx,
        more="For Nsight Systems. It has never run on a GPU.",
    ),
    Setting("emulated_memory", "BYTES", "emulated device's size [80% of free host memory]", parse_bytes, exact_bytes),
    Setting(
        "emulated_bandwidth",
        "RATE",
        "what the emulated device's links carry: 10GiB/s, or h2d=8GiB/s,d2h=6GiB/s,latency=20us [memcpy's]",
        parse_link,
    ),
    Setting("emulated_granularity", "BYTES", "step of the emulated device's chunks [64KiB]", parse_bytes, exact_bytes),
    Setting(
        "emulated_faults",
        "RULES",
        "driver calls that fail, such as cuMemMap:every=50,error=2, or take time [none]",
        str.strip,
        more="`published` gives memory calls the time that they were seen to take on an A100. "
        "`ooc_alloc/emulated/faults.h` has the grammar.",
    ),
)

REMOVED_SETTINGS = {  # name -> what replaced the setting
    "host_backed": "swapped data are no longer readable in place; announce every access, or unset it",
}


def document() -> str:
    """Returns the text of docs/settings.md: every setting with its values, meaning and default."""
    rows = []
    for setting in SETTINGS:
        text, _, default = setting.help.rpartition(" [")
        meaning = ". ".join(part for part in (text[0].upper() + text[1:], setting.more) if part)
        values = setting.metavar.replace("|", " \\| ")
        rows.append(f"| `{setting.variable}` | {values} | {meaning.rstrip('.')}. | {default.removesuffix(']')} |")
    return _DOCUMENT.format(rows="\n".join(rows))


_DOCUMENT = """# Settings

Made from `swapd/settings.py` by `python -m swapd.settings`; a test holds this page up to it.

Each setting is an environment variable, a keyword of `ooc.enable` (`OOC_HOST_BUDGET` is `host_budget=`) and a flag
of `swapd run` (`--host-budget`). A keyword comes before the variable, the variable before the default.

| variable | value | meaning | default |
|---|---|---|---|
{rows}

Bytes are `8GiB`, `500MB` or a number; a share of what there is is `60%`; times are `30min`, `15s`, `20us`; a
bandwidth is `10GiB/s`.

A value that cannot be used, such as a budget larger than the device, stops the program with the reason. What the
machine cannot do (there is no compiler, no driver) is a warning, and the program runs in plain memory. Under a launcher
(torchrun, accelerate, MPI, Slurm) every rank writes files of its own, such as `s.rank0.json`; a process that managed
nothing writes none. A pipe or `/dev/stdout` is written once, at the end.
"""

if __name__ == "__main__":
    print(document(), end="")
