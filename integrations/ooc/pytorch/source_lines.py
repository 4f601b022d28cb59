"""Source lines of the kernels that Inductor generates.

Inductor knows for each node of a graph where in the program it comes from. A comment before each call of a kernel keeps
that in the generated module, and so in Inductor's caches:

    # ooc: [["/home/me/model.py", 12, "forward", "x = F.gelu(self.widen(x))"]]
    cpp_fused_gelu_0(buf0, buf1)

A cached module may be of an older program, as line numbers are no part of the cache's key. So a line is believed only
where it has the same text today.
"""

from __future__ import annotations

import functools
import importlib
import json
import linecache
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ooc_alloc
import swapd
from ooc.pytorch.patches import Patches

_FRAME = re.compile(r'File "(.*?)", line (\d+), in (.*)\n\s*(.*)')
_COMMENT = re.compile(r"\s*(?:#|//) ooc: (\[.*\])$")
_CALL = re.compile(r"\s*(\w+)(?:\.run)?\(")
_WORDS = re.compile(r" at [^ ].*:\d+ in .*$")
_MOST = 3  # lines in the name of one call

Line = tuple[str, int, str, str]  # file, number, function, text


def install(patches: Patches) -> None:
    """Has Inductor write the comments into modules that it generates from now on."""
    for module, name in (("scheduler", "BaseScheduling"), ("codegen.cpp", "CppScheduling")):
        owner = getattr(importlib.import_module(f"torch._inductor.{module}"), name)
        if "codegen_comment" in vars(owner):
            patches.replace(owner, "codegen_comment", _codegen_comment)


def _codegen_comment(plain: Callable[..., Any]) -> Callable[..., Any]:
    graph = importlib.import_module("torch._inductor.virtualized").V

    def codegen_comment(self: Any, node_schedule: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, node_schedule, *args, **kwargs)
        lines = sorted(set(_lines_of(node_schedule)))
        if lines:
            wrapper = graph.graph.wrapper_code
            wrapper.writeline(f"{wrapper.comment} ooc: {json.dumps(lines)}")

    return codegen_comment


def _lines_of(nodes: Iterable[Any]) -> Iterator[Line]:
    for node in nodes:
        for origin in getattr(getattr(node, "node", None), "origins", ()):
            line = innermost(origin.meta.get("stack_trace") or "")
            if line is not None:
                yield line


def innermost(stack: str) -> Line | None:
    """The innermost of the user's frames in a stack as Python prints it; None if there is none."""
    skipped = tuple(not_the_users())
    for file, number, function, text in reversed(_FRAME.findall(stack)):
        if not file.startswith((*skipped, "<")):
            return file, int(number), function, text.strip()
    return None


def calls_of(source: str) -> dict[int, tuple[str, str]]:
    """By line number, the kernels that a generated module calls, each with the words for its source lines."""
    calls = {}
    waiting: list[Line] = []
    for number, line in enumerate(source.splitlines(), 1):
        if found := _COMMENT.match(line):
            waiting = [(file, at, function, text) for file, at, function, text in json.loads(found[1])]
        elif waiting and (called := _CALL.match(line)):
            calls[number] = called[1], words(waiting)
            waiting = []
    return calls


def words(lines: list[Line]) -> str:
    """Such as "model.py:12 in forward, model.py:14 in forward and 2 more"; empty if no line is as it was."""
    here = os.path.join(os.getcwd(), "")
    believed = [line for line in lines if linecache.getline(line[0], line[1]).strip() == line[3]]
    named = [f"{file.removeprefix(here)}:{number} in {function}" for file, number, function, _ in believed]
    more = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
    return ", ".join(named[:_MOST]) + more


def without_lines(name: str) -> str:
    """A function's name without the words for its source lines."""
    return _WORDS.sub("", name)


@functools.cache
def not_the_users() -> list[str]:
    """How paths begin of Python's files, of installed packages', of ours and of those that Inductor generates."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [str(Path(__file__).parents[1]), ooc_alloc.__path__[0], swapd.__path__[0]]
    generated = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folders += [os.path.abspath(generated)] if generated else []
    starts = {os.path.join(folder, "") for folder in folders} | {os.path.join(tempfile.gettempdir(), "torchinductor_")}
    return sorted(starts)
