"""What the daemon believes of the link before and after it has seen transfers."""

from __future__ import annotations

from typing import Any, cast

from ooc_alloc import Core
from swapd.daemon import Daemon
from swapd.trace.trace import Machine

MIB = 1 << 20
PROBED = Machine(out_bytes_per_second=3e9, in_bytes_per_second=5e9, latency_seconds=2e-5)


class Counters:
    """A core that only counts."""

    def __init__(self, **moved: float) -> None:
        names = ("swap_out_bytes", "swap_in_bytes", "copy_out_seconds", "copy_in_seconds")
        self.figures = {name: moved.get(name, 0.0) for name in names}

    def stats(self) -> dict[str, Any]:
        return self.figures


def link(expected: Machine | None = None, machine: Machine | None = None, **moved: float) -> Machine:
    return Daemon(cast(Core, Counters(**moved)), machine=machine, expected=expected).link()


def test_before_any_transfer_the_link_is_as_probed() -> None:
    assert link(PROBED) == PROBED
    assert link().out_bytes_per_second == link().in_bytes_per_second > 0


def test_the_process_own_transfers_count_more() -> None:
    found = link(PROBED, swap_out_bytes=100 * MIB, copy_out_seconds=0.1)
    assert found.out_bytes_per_second == 1000 * MIB
    assert found.in_bytes_per_second == PROBED.in_bytes_per_second
    assert found.latency_seconds == PROBED.latency_seconds


def test_a_few_small_copies_are_no_measurement() -> None:
    assert link(PROBED, swap_in_bytes=MIB, copy_in_seconds=1.0) == PROBED


def test_a_given_machine_is_not_measured() -> None:
    assert link(PROBED, machine=Machine(1e9, 1e9), swap_out_bytes=100 * MIB, copy_out_seconds=0.1) == Machine(1e9, 1e9)
