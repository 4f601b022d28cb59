"""The rule between packages in C++, from every include: ooc -> swapd -> ooc_alloc, and no circle."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ooc_alloc", "swapd", "integrations")  # each may include those before it
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def sources() -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for package in PACKAGES
        for suffix in ("*.h", "*.cpp")
        for path in (ROOT / package).rglob(suffix)
    )


def included(source: Path, files: set[Path]) -> list[Path]:
    """The files of ours that a file includes: those beside it come first, as the compiler looks."""
    folders = [source.parent, *sorted({path.parent for path in files if path.parts[0] == source.parts[0]})]
    folders += [Path(package) / "csrc" for package in PACKAGES]
    found = []
    for name in INCLUDE.findall((ROOT / source).read_text(encoding="utf-8")):
        matches = [folder / name for folder in folders if folder / name in files]
        found += matches[:1]
    return found


def graph() -> dict[Path, list[Path]]:
    files = set(sources())
    return {source: included(source, files) for source in sorted(files)}


def test_there_are_includes_to_look_at() -> None:
    edges = graph()
    assert Path("swapd/csrc/daemon.h") in edges[Path("swapd/csrc/daemon.cpp")]
    assert Path("ooc_alloc/csrc/scheduler.h") in edges[Path("swapd/csrc/daemon.h")]
    assert sum(map(len, edges.values())) > 100


def test_includes_follow_the_packages() -> None:
    level = {package: number for number, package in enumerate(PACKAGES)}
    wrong = [
        f"{source} includes {target}"
        for source, targets in graph().items()
        for target in targets
        if level[target.parts[0]] > level[source.parts[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_include_goes_round_in_a_circle() -> None:
    edges = graph()
    done: set[Path] = set()

    def visit(file: Path, way: list[Path]) -> None:
        assert file not in way, " -> ".join(map(str, [*way[way.index(file) :], file]))
        if file in done:
            return
        for target in edges[file]:
            visit(target, [*way, file])
        done.add(file)

    for file in edges:
        visit(file, [])


def test_the_daemon_knows_the_core_through_one_header() -> None:
    """Only the exports, which make a core together with its daemon, see both."""
    core = {
        (source.name, target.name)
        for source, targets in graph().items()
        if source.parts[0] == "swapd" and source.name != "exports.cpp"
        for target in targets
        if target.parts[0] == "ooc_alloc"
    }
    # block_signals.h knows nothing of the core.
    assert core == {("daemon.h", "ooc_alloc.h"), ("daemon.h", "scheduler.h"), ("daemon.cpp", "block_signals.h")}
