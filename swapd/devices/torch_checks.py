"""Checks of PyTorch for `doctor.py`: its version, our adapter, the compiler for the adapter, and what activates it.

A process of its own imports PyTorch, since this package may not import it and since a broken installation must not
break the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from swapd.devices.findings import Check

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
