"""Call sites: those that a binary has, those that a run reached, and the line of source behind each."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARIES = ROOT / "ooc_alloc" / "lib"


@dataclass(frozen=True, order=True)
class Site:
    """Where a call returns to.

    Attributes:
        call: the function that is called, such as "cuMemMap".
        module: file name of the library that calls.
        offset: of the return address in it, bytes.
    """

    call: str
    module: str
    offset: int

    @property
    def name(self) -> str:
        """As a fault rule has it."""
        return f"{self.module}+{self.offset:#x}"


def read_list(path: Path) -> dict[Site, int]:
    """What OOC_EMULATED_SITES, or the interposer, has written: how often each site called."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        call, place, count = line.split()
        module, _, offset = place.rpartition("+")
        found[Site(call, module, int(offset, 16))] = int(count)
    return found


def lines_of(library: Path, offsets: Iterable[int]) -> dict[int, list[str]]:
    """For each return address, "file:line" of the call, then of what that was inlined into."""
    wanted = list(offsets)
    command = ["addr2line", "-a", "-i", "-e", str(library), *[hex(offset - 1) for offset in wanted]]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    blocks: list[list[str]] = []
    for line in output.splitlines():
        if line.startswith("0x"):
            blocks.append([])
        else:
            blocks[-1].append(re.sub(r" \(discriminator.*", "", line).replace(f"{ROOT}/", ""))
    return dict(zip(wanted, blocks, strict=True))


@cache
def _source(path: str) -> list[str]:
    file = ROOT / path
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _called(places: list[str], pattern: re.Pattern[str]) -> str:
    """The function that the line of source of an indirect call names, or nothing."""
    file, _, line = places[0].rpartition(":")
    if not line.isdigit():
        return ""
    lines = _source(file)
    match = pattern.search(lines[int(line) - 1]) if int(line) <= len(lines) else None
    return match[1] if match else ""


def driver_sites(library: Path) -> set[Site]:
    """Every call through the driver table that the binary has: indirect calls whose line of source makes one."""
    output = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    )
    addresses = re.findall(r"^\s*([0-9a-f]+):\t(\w+)", output.stdout, re.M)
    indirect = re.compile(r"^\s*([0-9a-f]+):\tcall\s+\*", re.M)
    starts = {int(match, 16) for match in indirect.findall(output.stdout)}
    order = [int(address, 16) for address, _ in addresses]
    returns = [after for before, after in itertools.pairwise(order) if before in starts]
    calls = re.compile(r"(?:->|\.|\b)(cu[A-Z]\w+)\(")
    found = set()
    for offset, places in lines_of(library, returns).items():
        if call := _called(places, calls):
            found.add(Site(call, library.name, offset))
    return found


def imported_sites(library: Path, functions: Iterable[str]) -> set[Site]:
    """Every direct call of these imported functions, by their symbols, that the binary has."""
    output = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    )
    wanted = set(functions)
    found, pending = set(), ""
    for line in output.stdout.splitlines():
        match = re.match(r"^\s*([0-9a-f]+):\t(.*)", line)
        if match is None:
            continue
        if pending:
            found.add(Site(pending, library.name, int(match[1], 16)))
        called = re.match(r"call\s+[0-9a-f]+ <([^@>]+)@plt>", match[2])
        pending = called[1] if called is not None and called[1] in wanted else ""
    return found
