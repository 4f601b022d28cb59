"""Every case of the GPU benchmark, the most important first, each with the seconds that it is thought to take.

An arm is a way to train with less device memory than the model needs:

    in-core       PyTorch's own allocator with all the memory it wants: the reference for time and bits
    ours          planned swapping
    demand        our allocator without a plan
    save_on_cpu   torch.autograd.graph.save_on_cpu(pin_memory=True)
    offload       streamed activation offloading as in torchtune and TRL (offload.py)
    checkpoint    activation checkpointing of every block
    fsdp          FSDP2 with CPUOffloadPolicy, one rank
    uvm           torch.cuda._use_uvm, only where the working set fits the device
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IN_CORE = "in-core"
OURS = ("ours", "demand")
RIVALS = ("save_on_cpu", "offload", "checkpoint", "fsdp")
UVM = "uvm"
ARMS = (IN_CORE, *OURS, *RIVALS, UVM)
OVERSUBSCRIPTIONS = (1.25, 2.0, 4.0, 8.0)
CHUNKS_MIB = (2, 4, 8, 16, 32, 64)
DEFAULT_CHUNK_MIB = 2
MIB = 1 << 20


@dataclass(frozen=True)
class Model:
    """A network and the size of its batch. `step_seconds`: what an in-core step is thought to take on an H200."""

    name: str
    kind: str  # a name in torchvision.models, or gpt
    batch: int
    step_seconds: float
    shape: tuple[tuple[str, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "batch": self.batch, **dict(self.shape)}


def _gpt(width: int, layers: int, batch: int, step_seconds: float) -> Model:
    shape = (("width", width), ("layers", layers), ("heads", width // 128), ("context", 1024))
    return Model(f"gpt{width}", "gpt", batch, step_seconds, shape)


MODELS = (
    Model("resnet50", "resnet50", 256, 0.25),
    _gpt(2048, 16, 8, 0.3),
    Model("vgg16", "vgg16", 256, 0.4),
    Model("densenet121", "densenet121", 256, 0.35),
    _gpt(1024, 24, 16, 0.3),
    _gpt(4096, 8, 8, 0.4),
)
FIRST = MODELS[:2]  # measured against everything before the others are begun

_START_SECONDS = 6.0  # a process that is ready, its context, the model
_SLOWER = {IN_CORE: 1.0, "ours": 1.5, "demand": 3.0, "save_on_cpu": 3.0, "offload": 2.0, "checkpoint": 1.5, "fsdp": 4.0}
WARM_UP = {"ours": 5, "demand": 2}  # ours: set-up, recorded, planned, planned again, with that plan
STEPS = 6  # that count
_OTHER_WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """One process. `kind`: probe, allocation, step."""

    kind: str
    arm: str
    model: Model | None = None
    oversubscription: float = 1.0
    chunk_mib: int = DEFAULT_CHUNK_MIB

    @property
    def name(self) -> str:
        """Also the name of the file with its result."""
        if self.kind == "probe":
            return "probe"
        if self.model is None:
            return f"allocation-{self.arm}"
        name = f"{self.model.name}-{self.oversubscription:g}x-{self.arm}"
        return name if self.chunk_mib == DEFAULT_CHUNK_MIB else f"{name}-{self.chunk_mib}MiB"

    @property
    def warm_up(self) -> int:
        return WARM_UP.get(self.arm, _OTHER_WARM_UP)

    @property
    def seconds(self) -> float:
        """What it is thought to take."""
        if self.kind == "probe":
            return 15.0
        if self.model is None:
            return _START_SECONDS + 3
        if self.arm == UVM and self.oversubscription > 1:
            return 0.0  # refused, without a process
        slower = _SLOWER.get(self.arm, 1.0) * max(1.0, self.oversubscription / 2)
        return _START_SECONDS + (self.warm_up + STEPS) * self.model.step_seconds * slower

    def needs(self) -> Case | None:
        """The case whose result it is measured by, if any: budgets are shares of the in-core run's live peak."""
        if self.kind != "step" or self.arm == IN_CORE or self.model is None:
            return None
        return Case("step", IN_CORE, self.model)


def _step(arm: str, model: Model, oversubscription: float, chunk_mib: int = DEFAULT_CHUNK_MIB) -> Case:
    return Case("step", arm, model, oversubscription, chunk_mib)


def all_cases() -> list[Case]:
    """Every case once, the most important first, an in-core run ahead of those that need it."""
    cases: list[Case] = [Case("probe", "ours")]

    def add(*more: Case) -> None:
        for case in more:
            needed = case.needs()
            for one in (needed, case):
                if one is not None and one not in cases:
                    cases.append(one)

    for model in FIRST:
        for x in (2.0, 4.0):
            add(_step("ours", model, x))
    for model in FIRST:
        add(*(_step(arm, model, 2.0) for arm in (*RIVALS, "demand")))
    for model in FIRST:
        add(_step(UVM, model, 1.0), _step(UVM, model, 2.0))
    add(Case("allocation", IN_CORE), Case("allocation", "ours"))
    for model in MODELS:
        add(_step("ours", model, 2.0))
    for model in FIRST:
        add(_step("ours", model, 8.0), _step("ours", model, 1.25))
    add(*(_step("ours", MODELS[0], 2.0, mib) for mib in CHUNKS_MIB))
    for model in MODELS:
        add(_step("ours", model, 4.0))
    for model in FIRST:
        add(*(_step(arm, model, 4.0) for arm in (*RIVALS, "demand")))
    for x in OVERSUBSCRIPTIONS:
        for model in MODELS:
            add(*(_step(arm, model, x) for arm in (*OURS, *RIVALS)))
    for model in MODELS:
        add(*(_step(UVM, model, x) for x in (1.0, *OVERSUBSCRIPTIONS)))
    return cases
