"""Why iterations of a run had no plan, in a sentence that says what would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from swapd.step_times import Step

_ENOUGH = 2  # iterations of a sequence that can have no plan: it is recorded, and found again


def why_no_plan(
    steps: Sequence[Step], policy: str, failed: Mapping[int, str], *, side_by_side: bool = False
) -> str | None:
    """Returns the reason that most iterations without a plan have, or None if there is nothing to explain.

    An iteration that moved nothing needs no plan, and each sequence's first ones cannot have one.

    Args:
        steps: the iterations that ended, in order.
        policy: as the planner's.
        failed: by fingerprint, why a sequence has no plan.
        side_by_side: whether many calls of models came while another thread's was the recorded one.
    """
    bare = [step for step in steps if step.moved and not step.followed_plan]
    if not bare:
        return None
    if policy == "none":
        return "OOC_POLICY=none asks for no plan"
    of = Counter(step.fingerprint for step in bare)
    unplannable = sum(count for fingerprint, count in of.items() if fingerprint in failed)
    if 2 * unplannable >= len(bare):
        worst = max((fingerprint for fingerprint in of if fingerprint in failed), key=of.__getitem__)
        return f"no plan was found for {_times(unplannable)}: {failed[worst]}"
    planned = sum(step.followed_plan for step in steps)
    waited = sum(step.waited_for_plans for step in bare)
    all_of = Counter(step.fingerprint for step in steps)
    once = sum(1 for fingerprint in of if all_of[fingerprint] == 1)
    never_again = once > _ENOUGH and 2 * once >= len(bare)
    if 2 * waited >= len(bare) > planned and not never_again:
        return (
            f"{_times(waited)} ran while plans were being made, which takes longer than they do: most of a longer "
            "run has plans (with OOC_PLANNING=blocking the program waits for them)"
        )
    of = Counter(step.fingerprint for step in bare if not step.waited_for_plans)
    late = sum(count - _ENOUGH for count in of.values() if count > _ENOUGH)
    if late == 0 and planned >= len(bare):
        return None
    if side_by_side:
        return (
            f"{_times(len(bare))} had no plan: threads call models side by side, one thread's functions at a time are "
            "recorded, and they do not come in the same order each time; let one thread of a process call the model"
        )
    if never_again:
        return (
            f"{once} of {len(steps)} iterations had a sequence of functions that never came again, and only what comes "
            "again is planned: let shapes repeat (pad batches to a few lengths), and end iterations alike (ooc.step())"
        )
    if late == 0:
        return (
            f"{_times(len(bare))} came before their sequences' plans: the first of a sequence is recorded, and a "
            "plan is followed from the second or third time on"
        )
    return (
        f"{_times(len(bare))}, of {len(of)} sequences, departed from the plan that was expected, or came before it: "
        "different phases follow each other; end an iteration after all of them (ooc.step()) if they come in turns"
    )


def _times(count: int) -> str:
    return f"{count} iteration" + ("s" if count != 1 else "")
