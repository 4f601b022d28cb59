"""Doctor: what is supported on this machine, what is not, and what to do about it.

Each check is a function that returns a Check and raises nothing. A process of its own imports PyTorch, since this
package may not import it and since a broken installation must not break the report.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swapd.config import Config, ConfigError, unknown_variables
from swapd.devices.disk import OVER_A_NETWORK, describe
from swapd.devices.disk_profile import known_disk
from swapd.devices.probe import CUDA_LIBRARY
from swapd.devices.profile import cache_directory
from swapd.host_limits import available_host_bytes, cgroup_memory
from swapd.settings import parse_path
from swapd.units import GIB, MIB, format_bandwidth, format_bytes

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
ENTRY_POINT_GROUP = "torch.backends"
_TORCH_TIMEOUT_SECONDS = 120
_ASK_TORCH = """
import json, torch
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "adapter": None, "built": False}
try:
    from ooc.pytorch import build
    path = build.adapter_path()
    facts["adapter"], facts["built"] = str(path), path.exists()
except Exception as error:
    facts["adapter_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(facts))
"""
Status = Literal["ok", "warn", "no"]


@dataclass(frozen=True)
class Check:
    """One finding: ok, warn (something is missing or less than best), or no (what it is about cannot work)."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All findings, in the order in which a person would look."""

    checks: tuple[Check, ...]

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    @property
    def usable(self) -> bool:
        """Whether programs can run out-of-core on at least one kind of device."""
        basics = all(self[name].status != "no" for name in ("system", "memfd", "native libraries", "settings"))
        return basics and any(self[name].status == "ok" for name in ("emulated device", "CUDA device"))


def examine(progress: Callable[[str, int, int], None] | None = None) -> Report:
    """Run every check."""
    checks: list[Check] = []
    steps: list[tuple[str, Callable[[], list[Check]]]] = [
        ("system", lambda: [check_system(), check_memfd()]),
        ("native libraries", lambda: [check_libraries()]),
        ("settings", lambda: [check_settings(os.environ)]),
        ("emulated device", lambda: [check_emulated()]),
        ("CUDA", lambda: [check_cuda()]),
        ("PyTorch", lambda: check_torch(os.environ)),
        (
            "limits",
            lambda: [check_host_memory(), check_map_count(), check_memlock(), check_disk(os.environ), check_cache()],
        ),
    ]
    for index, (name, step) in enumerate(steps):
        if progress is not None:
            progress(name, index, len(steps))
        checks += step()
    return Report(tuple(checks))


def check_system() -> Check:
    """Whether this is Linux with 64 bits."""
    text = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() != "Linux" or sys.maxsize < 1 << 32:
        return Check("system", "no", text, "64-bit Linux is needed: memfd and CUDA's virtual memory management")
    return Check("system", "ok", text)


def check_memfd() -> Check:
    """Whether memfds can be made: the emulated device needs one."""
    try:
        descriptor = os.memfd_create("ooc-doctor")
        os.close(descriptor)
    except (AttributeError, OSError) as error:
        return Check(
            "memfd", "no", f"memfd_create fails: {error}", "a kernel of 3.17 or later that allows memfd_create"
        )
    return Check("memfd", "ok", "memfd_create works")


def check_libraries() -> Check:
    """Whether our own native libraries are there, load, and are of this version."""
    from ooc_alloc import OocError, library_path
    from ooc_alloc.library import load_library

    try:
        load_library()
        library_path("libooc_emulated_cuda.so")
        return Check("native libraries", "ok", str(library_path().parent))
    except (OocError, OSError, AttributeError) as error:
        return Check("native libraries", "no", str(error), "`make native` in a checkout, or install the package anew")


def check_settings(environment: Mapping[str, str]) -> Check:
    """Whether the variables that are set now can be used."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = Config.from_environment(environment)
        _check_limits(config)
    except ConfigError as error:
        return Check("settings", "no", str(error), "correct or unset the variable")
    unknown = unknown_variables(environment)
    if unknown:
        return Check("settings", "warn", "; ".join(unknown), "correct or unset the variables")
    text = " ".join(f"{name}={value}" for name, value in config.to_environment().items())
    return Check("settings", "ok", text or "none set: programs run in plain memory; set OOC_ALLOC=1")


def _check_limits(config: Config) -> None:
    """Raises ConfigError if the machine has less than the settings say. It asks no CUDA device, which may be busy."""
    from ooc_alloc import OocError
    from swapd.session import limits_of

    if not config.enabled:
        return
    config.resolve_host_budget()
    if config.alloc == "cpu" or (config.alloc == "auto" and ctypes.util.find_library("cuda") is None):
        with contextlib.suppress(OocError, OSError):  # another check reports what is wrong with the device
            limits_of(config)


def check_emulated() -> Check:
    """Whether the emulated driver loads and its device can be made."""
    from ooc_alloc import OocError, library_path

    try:
        facts = _described(str(library_path("libooc_emulated_cuda.so")))
    except (OocError, OSError, AttributeError) as error:
        return Check("emulated device", "no", str(error), "OOC_EMULATED_MEMORY gives its size; `make native` builds it")
    return Check("emulated device", "ok", f"{format_bytes(float(facts['total_bytes']))} of host memory")


def check_cuda() -> Check:
    """Whether there is a CUDA driver with a device that manages virtual memory. A machine without them is normal."""
    from ooc_alloc import OocError

    name = "CUDA device"
    try:
        facts = _described(CUDA_LIBRARY)
    except (OocError, OSError, AttributeError) as error:
        if ctypes.util.find_library("cuda") is None:
            text = "no CUDA driver: only the emulated device can be used"
            return Check(name, "warn", text, "none needed without a GPU")
        return Check(name, "warn", f"no device can be used: {error}", "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    version = int(facts["driver_version"])
    memory = format_bytes(float(facts["total_bytes"]))
    return Check(name, "ok", f"{facts['name']}, {memory}, driver for CUDA {version // 1000}.{version % 1000 // 10}")


def _described(driver: str) -> dict[str, int | str]:
    """The first device of a driver, opened and closed as programs would. Raises OocError, OSError or AttributeError."""
    from ooc_alloc.probe import Probe

    device = Probe(driver)
    facts = device.describe()
    device.close()
    return facts


def check_torch(environment: Mapping[str, str]) -> list[Check]:
    """The checks of PyTorch, of the compiler for its adapter, of the adapter, and of how the adapter is activated."""
    compiler = check_compiler(environment)
    checks = [compiler, check_entry_point(), check_autoload(environment)]
    if importlib.util.find_spec("torch") is None:
        return [
            Check("PyTorch", "warn", "not installed: only the NumPy integration works", "pip install torch"),
            *checks,
        ]
    facts = _ask_torch(environment)
    if "error" in facts:
        return [Check("PyTorch", "no", str(facts["error"]), "make `python -c 'import torch'` work"), *checks]
    kind = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built for the CPU alone"
    return [_version_check(str(facts["version"]), kind), _adapter_check(facts, compiler), *checks]


def _ask_torch(environment: Mapping[str, str]) -> dict[str, Any]:
    ours = {name: value for name, value in environment.items() if not name.startswith("OOC_")}
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            env={**ours, AUTOLOAD: "0"},
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT_SECONDS,
            check=False,
        )
        if answer.returncode != 0:
            last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
            return {"error": f"`import torch` fails: {last}"}
        facts: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return facts
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": f"PyTorch could not be asked: {error}"}


def _version_check(version: str, kind: str) -> Check:
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if parts < (2, 11):
        return Check("PyTorch", "no", f"{version}, {kind}", "PyTorch 2.11 or later is needed")
    return Check("PyTorch", "ok", f"{version}, {kind}")


def _adapter_check(facts: dict[str, Any], compiler: Check) -> Check:
    name = "PyTorch adapter"
    if facts.get("adapter") is None:
        return Check(name, "no", str(facts.get("adapter_error", "unknown")), "install the package anew")
    if facts["built"]:
        return Check(name, "ok", f"built: {facts['adapter']}")
    if compiler.status == "ok":
        return Check(name, "ok", "not built yet: the first use builds it and takes some seconds")
    return Check(name, "no", "not built, and there is no compiler", compiler.remedy)


def check_compiler(environment: Mapping[str, str]) -> Check:
    """The C++ compiler that builds the adapter: $CXX, g++, c++ or clang++."""
    asked = environment.get("CXX")
    for name in (asked,) if asked else ("g++", "c++", "clang++"):
        path = shutil.which(name)
        if path is None:
            continue
        try:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check("compiler", "warn", f"{path} cannot be run: {error}", "point CXX to a working C++ compiler")
        return Check("compiler", "ok", (answer.stdout.splitlines() or [path])[0])
    missing = f"no C++ compiler ({asked or 'g++, c++ or clang++'})"
    return Check("compiler", "warn", missing, "apt-get install g++, or point CXX to one; PyTorch's adapter needs it")


def check_entry_point() -> Check:
    """Whether `import torch` will find this package."""
    name = "entry point"
    found = [entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry.name == "ooc_alloc"]
    if not found:
        remedy = "pip install the package (a checkout alone registers nothing), or call ooc.pytorch.enable()"
        return Check(name, "warn", "`import torch` does not know this package: OOC_ALLOC=1 has no effect", remedy)
    return Check(name, "ok", f"{ENTRY_POINT_GROUP}: {found[0].value}")


def check_autoload(environment: Mapping[str, str]) -> Check:
    """Whether PyTorch has been told not to load backends by itself."""
    if environment.get(AUTOLOAD) == "0":
        text = f"{AUTOLOAD}=0: `import torch` loads no backends, so OOC_ALLOC=1 has no effect"
        return Check("autoload", "warn", text, "unset it, or call ooc.pytorch.enable()")
    return Check("autoload", "ok", "PyTorch loads its backends")


def check_host_memory() -> Check:
    """What this process may still take of the host's memory."""
    available, group = available_host_bytes(), cgroup_memory()
    text = f"{format_bytes(available)} may be taken"
    if group is not None:
        text += f"; the control group {group.path} allows {format_bytes(group.limit_bytes)}"
    if available < GIB:
        return Check("host memory", "warn", text, "little room for swapped data; raise the limit or end other programs")
    return Check("host memory", "ok", text)


def check_map_count(path: Path = Path("/proc/sys/vm/max_map_count")) -> Check:
    """The limit of mappings, as every mapped chunk of the emulated device can be a mapping of its own."""
    try:
        limit = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        return Check("vm.max_map_count", "warn", f"cannot be read: {error}")
    reach = limit * 2 * MIB
    text = f"{limit} mappings: {format_bytes(reach)} of the emulated device in chunks of 2 MiB"
    if limit < 1 << 15:
        return Check("vm.max_map_count", "warn", text, "sysctl -w vm.max_map_count=262144")
    return Check("vm.max_map_count", "ok", text)


def check_memlock() -> Check:
    """The limit of locked memory, which some drivers apply to pinned host memory."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock", "ok", "no limit")
    text = f"{format_bytes(soft)}; the emulated device locks nothing, some CUDA drivers count pinned memory"
    return Check("memlock", "ok", text, "if pinning fails on a GPU: ulimit -l unlimited")


def check_disk(environment: Mapping[str, str]) -> Check:
    """The folder of OOC_DISK: whether swapped data can be there, how fast at least, and whether it is a disk at all."""
    text = environment.get("OOC_DISK", "").strip()
    if not text:
        return Check("disk", "ok", "OOC_DISK is not set: swapped data stay in host memory")
    folder = parse_path(text)
    try:
        disk = describe(folder)
    except OSError as error:
        remedy = "make the folder, or give OOC_DISK one that this user may write to"
        return Check("disk", "no", f"OOC_DISK={text}: {error.strerror}", remedy)
    kind = disk.system.kind
    says = f"{folder}: {kind} at {disk.system.mount or '?'}, {format_bytes(disk.free_bytes)} free"
    if disk.in_memory:
        remedy = "give OOC_DISK a folder on a disk: this one takes the memory that it is to save"
        return Check("disk", "warn", f"{says}; files of {kind} are memory", remedy)
    if kind in OVER_A_NETWORK:
        remedy = "give OOC_DISK a folder on a disk of this machine"
        return Check(
            "disk", "warn", f"{says}; it is over a network, and a program stands still while that does", remedy
        )
    if not disk.direct:
        remedy = "give OOC_DISK a folder on ext4, XFS or Btrfs: the page cache is slower, and takes memory"
        return Check("disk", "warn", f"{says}; it refuses direct I/O", remedy)
    if disk.free_bytes < GIB:
        return Check("disk", "warn", says, "little room for swapped data: make room, or give OOC_DISK another folder")
    says += "; direct I/O works" + ("" if disk.nameless else "; files have a name there for a moment")
    profile = known_disk(folder)
    if profile is None:
        return Check("disk", "ok", says, f"`swapd probe --disk {text}` measures it, for better plans")
    read, written = map(format_bandwidth, profile.recommended.of_equal_amounts())
    return Check("disk", "ok", f"{says}; reads {read} and writes {written} at once")


def check_cache() -> Check:
    """Where the adapter and the machine profiles are kept."""
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return Check("cache", "no", f"{folder}: {error.strerror}", "set XDG_CACHE_HOME to a folder that can be written")
    if not os.access(folder, os.W_OK):
        return Check("cache", "no", f"{folder} cannot be written", "set XDG_CACHE_HOME to a folder that can be written")
    profiles = sorted(path.name for path in folder.glob("machine-*.json"))
    if not profiles:
        return Check("cache", "ok", f"{folder}; no machine profile yet", "`swapd probe` makes one, for better plans")
    return Check("cache", "ok", f"{folder}; {', '.join(profiles)}")
