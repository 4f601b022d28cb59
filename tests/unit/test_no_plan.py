"""Why there is no plan: each reason where it is true, and none where there is nothing to explain."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from swapd.no_plan import why_no_plan
from swapd.step_times import Step, StepTimes


def steps(fingerprints: str, followed: str = "", still: str = "") -> list[Step]:
    """An iteration for each letter.

    `p` below it says that it ran under a plan, `w` that it waited for one, `.` that it moved nothing.
    """
    followed = followed.ljust(len(fingerprints))
    return [
        Step(1.0, 0.0, followed[i] == "p", ord(letter), still[i : i + 1] != ".", followed[i] == "w")
        for i, letter in enumerate(fingerprints)
    ]


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(steps(""), id="no iteration"),
        pytest.param(steps("aaaa", still="...."), id="everything fits"),
        pytest.param(steps("aaaaaa", followed="  pppp"), id="planned from the third one on"),
        pytest.param(steps("aaaaaaaaaaaa", followed="  wwwwpppppp"), id="planned in the background"),
        pytest.param(steps("ababab" + "abab", followed="    pppppp"), id="two sequences in turns, both planned"),
        pytest.param(steps("aaaaaaadddddd", followed="  ppppp  pppp"), id="then with drops"),
        pytest.param(steps("a" * 10 + "d" * 15, followed=" wwwwppppp wwwwwppppppppp"), id="both planned beside it"),
        pytest.param(steps("aaaaaaaddddaaaa", followed="  ppppp  pppppp"), id="with drops that were given up"),
    ],
)
def test_nothing_to_explain(kept: Sequence[Step]) -> None:
    assert why_no_plan(kept, "auto", {}) is None


@pytest.mark.parametrize(
    ("kept", "policy", "failed", "words"),
    [
        (steps("aaaa"), "none", {}, "OOC_POLICY=none"),
        (steps("aaaa"), "auto", {ord("a"): "f needs 5 bytes"}, "no plan was found for 4 iterations: f needs 5 bytes"),
        (steps("abcdef"), "auto", {}, "6 of 6 iterations had a sequence of functions that never came again"),
        (steps("abcdefgh", followed=" wwwwwww"), "auto", {}, "8 of 8 iterations had a sequence"),
        (steps("aabbcdefgh", followed=" p"), "auto", {}, "6 of 10 iterations had a sequence"),
        (steps("aa"), "auto", {}, "2 iterations came before their sequences' plans"),
        (steps("ab"), "auto", {}, "2 iterations came before their sequences' plans"),
        (steps("aaaaaaaa", followed="  wwwwpp"), "auto", {}, "4 iterations ran while plans were being made"),
        (steps("aaaaaaaaaaaa", followed="  ww"), "auto", {}, "12 iterations, of 1 sequences, departed from the plan"),
        (steps("abababab"), "auto", {}, "8 iterations, of 2 sequences, departed from the plan"),
    ],
)
def test_reasons(kept: Sequence[Step], policy: str, failed: dict[int, str], words: str) -> None:
    said = why_no_plan(kept, policy, failed)
    assert said is not None and words in said


def test_threads_side_by_side_are_the_reason_where_sequences_do_not_repeat() -> None:
    for kept in (steps("abcdef"), steps("abababab")):
        said = why_no_plan(kept, "auto", {}, side_by_side=True)
        assert said is not None and "threads call models side by side" in said
    assert why_no_plan(steps("aaaa", followed="  pp"), "auto", {}, side_by_side=True) is None


def test_the_main_step_is_none_with_the_programs_start_in_it() -> None:
    times = StepTimes()
    assert times.main() == (0, None)
    times.add(Step(60.0, 0.0, False, ord("s")))
    assert times.main() == (0, None)
    for seconds in (4.0, 3.0, 1.0, 2.0):
        times.add(Step(seconds, 0.0, False, ord("a")))
    times.add(Step(9.0, 0.0, False, ord("b")))
    assert times.main() == (4, 1.5)
