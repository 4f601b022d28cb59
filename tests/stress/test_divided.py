"""PyTorch's own operators with arguments larger than the budget: in parts or on host memory, with the same bits.

STRESS_TABLE names a file that gets a table of what ran how; docs/operators.md is one.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress import campaign, cases
from tests.stress.left_out import UNDEFINED, UNDEFINED_LARGE

HOST = "host-backed"
# Products and convolutions never run on host memory: they are refused where no division with the same bits is found.
_REFUSAL = re.compile(r"OutOfMemoryError: function aten::(\w*(?:conv|mm|dot|mv|addr)\w*) needs .* The smallest budget")
_ERROR = re.compile(r"(\w+Error|OutOfMemory): ")
REFUSED, RAISED = "refused", "raised"
Ways = dict[str, set[str]]  # by operator


@pytest.fixture(scope="module")
def ways() -> Iterator[Ways]:
    """What ran how in all tests of this module; the table is made of it when they are over."""
    found: Ways = defaultdict(set)
    yield found
    if path := os.environ.get("STRESS_TABLE"):
        Path(path).write_text(table(found), encoding="utf-8")


@pytest.mark.parametrize("kind", ["long", "tall"])
def test_operators_larger_than_the_budget(kind: str, ways: Ways) -> None:
    chosen = cases.large_cases(kind)
    report = campaign.run(chosen, mode="divided")
    wrong = []
    for mismatch, (case, found, expected) in zip(report.mismatches, report.different):
        why = _differs_first_in(found, expected)
        if why.startswith("aten::"):
            ways[why].add(REFUSED)
        elif why != RAISED and case.split("|")[1] not in UNDEFINED_LARGE:
            wrong.append(mismatch)
    assert not report.faults and not wrong, "\n".join(report.faults + wrong)
    undefined = {case.split("|")[1] for case in report.undefined}
    unlisted = undefined - set(UNDEFINED | UNDEFINED_LARGE)
    assert not unlisted, f"undefined results that are not listed: {unlisted}"
    did_not_fit = [case for case in chosen if report.ways[case]]
    assert len(did_not_fit) > 200, "hardly anything was larger than its budget"
    for case in did_not_fit:
        for operator, how in report.ways[case]:
            ways[operator].add(how)


def _differs_first_in(found: list[str], expected: list[str]) -> str:
    """The operator that was refused, or `RAISED` where both raised; empty where anything else was not the same."""
    for ours, plain in zip(found, expected):
        if ours != plain:
            if _ERROR.match(ours) and _ERROR.match(plain):
                return RAISED  # an error of the program's: who finds it first words it
            refusal = _REFUSAL.match(ours)
            return f"aten::{refusal[1]}" if refusal else ""
    return ""


@pytest.mark.parametrize(
    ("found", "expected", "why"),
    [
        (
            ["a", "OutOfMemoryError: function aten::mm needs 5 bytes. The smallest budget", "c"],
            ["a", "b", "b", "c"],
            "aten::mm",
        ),
        (
            ["x", "OutOfMemoryError: function aten::mm needs 5 bytes. The smallest budget", "c"],
            ["a", "b", "b", "c"],
            "",
        ),
        (["OutOfMemoryError: function aten::sum needs 5 bytes. The smallest budget"], ["a"], ""),
        (["IndexError: other words"], ["IndexError: words"], RAISED),
        (["IndexError: words"], ["a"], ""),
        (["a"], ["IndexError: words"], ""),
        ([], ["a"], ""),
    ],
)
def test_what_is_accepted(found: list[str], expected: list[str], why: str) -> None:
    assert _differs_first_in(found, expected) == why


def table(ways: Ways) -> str:
    """The operators by how they ran, as Markdown."""
    lines = [
        "# Operators larger than the budget",
        "",
        "What ran when samples of PyTorch's operator database, made larger, got half of their arguments' size as the",
        "budget (chunks of 4 KiB, emulated device, CPU kernels): forward and backward, with the bits of plain memory.",
        "`STRESS_TABLE=docs/operators.md make test-strict` writes this file.",
    ]
    groups = {
        "In parts": lambda found: not found & {HOST, REFUSED},
        "In parts or on host memory, depending on the shape": lambda found: HOST in found and len(found) > 1,
        "Refused for some shapes": lambda found: REFUSED in found,
        "On host memory": lambda found: found == {HOST},
    }
    for title, belongs in groups.items():
        chosen = {name: found for name, found in sorted(ways.items()) if belongs(found)}
        lines += ["", f"## {title}: {len(chosen)}", ""]
        if title.startswith("Refused"):
            lines += [
                "No division with the same bits was found, and products and convolutions never run on host memory.",
                "",
            ]
        if title == "On host memory":
            lines.append(", ".join(f"`{name.removeprefix('aten::')}`" for name in chosen))
            continue
        lines += ["| operator | cut |", "|---|---|"]
        for name, found in chosen.items():
            cuts = sorted({re.sub(r" by \d+", "", how) for how in found - {HOST, REFUSED}})
            lines.append(f"| `{name.removeprefix('aten::')}` | {'; '.join(cuts)} |")
    return "\n".join(lines) + "\n"
