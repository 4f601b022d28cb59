"""mmCNN's Algorithm 1 in the program that runs (OOC_POLICY=mmcnn): in how many parts each layer of inference runs.

In the first iteration runs in parts what does not fit, as ever. From then on convolutions and matrix products come
here, too, so that those that fit can run in parts of which one is brought in ahead, as
`swapd.policies.published.mmcnn` plans. Layers of the same operator and shapes run in the most parts that the algorithm
gives to one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ooc.pytorch.splitting.calls import Call
from ooc_alloc import Core
from swapd.splitting.segments import HEAVY, layers_of, schedule_layers
from swapd.trace.trace import Trace

_STEPS = 64  # of the budget, to which what is free is rounded, so that small variables do not change divisions
LAYERS = HEAVY[:3]  # aten::linear calls one of them


@dataclass(frozen=True)
class Share:
    """What the algorithm says of a call: the least number of its parts, and the most bytes of one."""

    parts: int
    part_bytes: int


class Rules:
    """The algorithm's numbers for one session, in which one thread at a time runs functions."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.shares: dict[tuple[str, str], Share] = {}  # of the calls that were recorded, by operator and shapes
        self._calls: list[tuple[tuple[str, str], int, int]] = []  # of this iteration: its first function, and its end
        self._began = int(core.stats()["functions"])  # the first function of this iteration
        self._asks = False  # convolutions and products that fit come here

    def begin(self) -> int:
        """The function that begins next."""
        return int(self._core.stats()["functions"]) - self._began

    def end(self, call: Call, first: int, end: int) -> None:
        """A call ran, or is going to, as the functions from `first` to before `end`."""
        while self._calls and self._calls[-1][1] >= first:
            self._calls.pop()  # it ran within this call
        if end > first:
            self._calls.append(((call.operator, call.shapes), first, end))

    def ended(self, trace: Trace) -> bool:
        """An iteration ended; its sequence, of whole variables. Returns whether its calls are to come here again."""
        calls, self._calls, self._began = self._calls, [], self._began + self.begin()
        if any("backward" in name for name in trace.function_names):
            return False  # the algorithm is for inference
        stats = self._core.stats()
        step = max(int(stats["budget_bytes"]) // _STEPS, 1)
        room_bytes = (int(stats["budget_bytes"]) - int(stats["slab_bytes"])) // step * step
        calls = [call for call in calls if call[2] <= trace.functions]  # others were not recorded
        layers, places = layers_of(trace, [call[1:] for call in calls])
        steps = schedule_layers(layers, room_bytes)
        known = dict(self.shares)
        for (key, *_), place in zip(calls, places):
            beside = 0 if layers[place].heavy else steps[place].prefetched_part_bytes
            before = known.get(key, Share(1, room_bytes))
            known[key] = Share(max(before.parts, steps[place].self_number), min(before.part_bytes, room_bytes - beside))
        again = known != self.shares or not self._asks
        self.shares, self._asks = known, True
        return again
