"""Compares our declarations of the CUDA driver (cuda_abi.h, driver.h) with a real cuda.h, at compile time.

Every declaration is found in our headers' own text, and a line that is none of the known forms is an error: what is
added there is compared too, or the comparison fails.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ooc.pytorch import build

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "ooc_alloc" / "csrc"
ABI, DRIVER = (CSRC / "cuda_abi.h").read_text(), (CSRC / "driver.h").read_text()
# Names of ours for macros of cuda.h.
MACROS = {
    "kMemHostAllocPortable": "CU_MEMHOSTALLOC_PORTABLE",
    "kMemHostAllocDeviceMap": "CU_MEMHOSTALLOC_DEVICEMAP",
    "kMemHostAllocWriteCombined": "CU_MEMHOSTALLOC_WRITECOMBINED",
    "kMemHostRegisterPortable": "CU_MEMHOSTREGISTER_PORTABLE",
    "kMemHostRegisterDeviceMap": "CU_MEMHOSTREGISTER_DEVICEMAP",
    "kMemHostRegisterReadOnly": "CU_MEMHOSTREGISTER_READ_ONLY",
}
# The real type that one of ours stands for; everything that is built from such types follows.
PRELUDE = """
#include <type_traits>
#include "driver.h"
template <class T> struct Real { using type = T; };
template <class T> struct Real<T*> { using type = typename Real<T>::type*; };
template <class T> struct Real<const T> { using type = const typename Real<T>::type; };
template <class R, class... A>
struct Real<R(A...)> { using type = typename Real<R>::type(typename Real<A>::type...); };
#define OURS(need, member, symbol, parameters) \\
  using Ours_##symbol = std::remove_pointer_t<decltype(ooc::Driver::member)>;
OOC_DRIVER_CALLS(OURS)
#define __CUDA_API_VERSION_INTERNAL  // all versions of a function are declared under their exported names
#include <cuda.h>
"""


class Declarations:
    """What our headers declare."""

    def __init__(self, abi: str = ABI, driver: str = DRIVER) -> None:
        self.constants: list[str] = []
        self.enums: list[str] = []
        self.opaque: list[str] = []
        self.aliases: list[str] = []
        self.members: dict[str, list[str]] = {}
        listed = re.search(r"#define OOC_CUDA_RESULTS\(result\)(.*?[^\\])\n\n", abi, re.DOTALL)
        calls = re.search(r"#define OOC_DRIVER_CALLS\(call\)(.*?[^\\])\n\n", driver, re.DOTALL)
        assert listed is not None and calls is not None
        self.constants += re.findall(r"result\((\w+), \d+,\s*\\?\s*\"", listed[1])
        self.functions = re.findall(r"call\((kRequired|kOptional), (\w+), (\w+),", calls[1])
        assert len(self.constants) == listed[1].count("result(") and len(self.functions) == calls[1].count("call(")
        text = re.sub(r"//.*", "", abi.replace(listed[0], ""))
        body = re.search(r"namespace ooc \{(.*)\}\s*$", text, re.DOTALL)
        assert body is not None
        rest = re.sub(r"^#.*|^  OOC_CUDA_RESULTS.*", "", body[1], flags=re.MULTILINE)
        rest = re.sub(r"static_assert\(.*?\);|^inline \w+ \w+\(.*?^\}", "", rest, flags=re.DOTALL | re.MULTILINE)
        rest = re.sub(r"enum (\w+) : \w+ \{(.*?)\};", self._enum, rest, flags=re.DOTALL)
        rest = re.sub(r"^struct (\w+) \{\n(.*?)^\};", self._struct, rest, flags=re.DOTALL | re.MULTILINE)
        rest = re.sub(r"using (\w+) = (?:struct (\w+)\*|[^;]*);", self._alias, rest)
        assert not rest.strip(), f"cuda_abi.h declares what is compared with no cuda.h: {rest.strip()}"

    def _enum(self, match: re.Match[str]) -> str:
        names = re.findall(r"(\w+) = \w+", match[2])
        assert len(names) == len([each for each in match[2].split(",") if each.strip()]), match[0]
        self.constants += names
        if not match[1].startswith("CUmemhost"):  # of macros
            self.enums.append(match[1])
        return ""

    def _struct(self, match: re.Match[str]) -> str:
        members, inside = [], []
        for line in map(str.strip, match[2].splitlines()):
            found = re.fullmatch(r"\w[\w *]*[ *](\w+)(?:\[\d+\])?;", line)
            if line == "struct {":
                inside.append(len(members))
            elif closing := re.fullmatch(r"\} (\w+);", line):
                first = inside.pop()
                members[first:] = [f"{closing[1]}.{name}" for name in members[first:]] + [closing[1]]
            else:
                assert found is not None, f"not understood: {line}"
                members.append(found[1])
        self.members[match[1]] = members
        return ""

    def _alias(self, match: re.Match[str]) -> str:
        self.aliases.append(match[1])
        if match[2]:
            self.opaque.append(match[2])
        return ""

    def missing(self, headers: Path) -> set[str]:
        """Constants and functions that this cuda.h does not have."""
        words = set(re.findall(r"\w+", (headers / "cuda.h").read_text(errors="replace")))
        return {name for name in [*self.constants, *self._symbols()] if MACROS.get(name, name) not in words}

    def _symbols(self) -> list[str]:
        return [symbol for _, _, symbol in self.functions]

    def assertions(self, headers: Path) -> list[str]:
        """A translation unit's assertions, each with what it is about."""
        there = self.missing(headers)
        lines = [
            f"template <> struct Real<ooc::{name}> {{ using type = ::{name}; }};"
            for name in [*self.enums, *self.opaque, *self.members]
        ]
        for name in [*self.enums, *self.members, *self.aliases]:
            alike = f"sizeof(ooc::{name}) == sizeof(::{name}) && alignof(ooc::{name}) == alignof(::{name})"
            lines.append(f'static_assert({alike}, "{name}");')
        for name in self.aliases:
            same = f"std::is_same_v<Real<ooc::{name}>::type, ::{name}>"
            lines.append(f'static_assert({same}, "type of {name}");')
        for name in self.constants:
            if name not in there:
                ours, real = f"static_cast<long>(ooc::{name})", f"static_cast<long>({MACROS.get(name, name)})"
                lines.append(f'static_assert({ours} == {real}, "{name}");')
        for owner, members in self.members.items():
            for name in members:
                ours, real = f"offsetof(ooc::{owner}, {name})", f"offsetof(::{owner}, {name})"
                sizes = [f"sizeof(std::declval<{scope}::{owner}&>().{name})" for scope in ("ooc", "")]
                lines.append(f'static_assert({ours} == {real} && {" == ".join(sizes)}, "{owner}.{name}");')
        for symbol in self._symbols():
            if symbol not in there:
                same = f"std::is_same_v<Real<Ours_{symbol}>::type, decltype(::{symbol})>"
                lines.append(f'static_assert({same}, "type of {symbol}");')
        return lines

    def exported(self, headers: Path) -> dict[str, str]:
        """The exported name that this cuda.h gives each function where a program writes the plain one."""
        text = "#include <cuda.h>\n" + "".join(f'"{member}" {member}\n' for _, member, _ in self.functions)
        done = _compile(headers, ["-E", "-P"], text)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(re.findall(r'^"(\w+)" (\w+)$', done.stdout, re.MULTILINE))


def version(symbol: str) -> int:
    """Of cuMemGetInfo_v2 it is 2, of cuInit 1."""
    found = re.search(r"_v(\d+)$", symbol)
    return int(found[1]) if found else 1


def _compile(headers: Path, flags: list[str], text: str, first: Path = CSRC) -> subprocess.CompletedProcess[str]:
    includes = [f"-I{first}", f"-I{CSRC}", f"-isystem{headers}"]
    command = [build.compiler(), "-std=c++20", "-x", "c++", "-w", *flags, *includes, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def disagreements(headers: Path, folder: Path, abi: str = ABI, driver: str = DRIVER) -> list[str]:
    """What differs between our headers, of which these are the texts, and the cuda.h in `headers`."""
    (folder / "cuda_abi.h").write_text(abi)
    (folder / "driver.h").write_text(driver)
    declared = Declarations(abi, driver)
    text = "\n".join([PRELUDE, *declared.assertions(headers)])
    done = _compile(headers, ["-fsyntax-only", "-fmax-errors=0"], text, folder)
    found = re.findall(r"error: static assertion failed: (.*)", done.stderr)
    others = [line for line in done.stderr.splitlines() if "error:" in line and "static assertion" not in line]
    return [*found, *others]
