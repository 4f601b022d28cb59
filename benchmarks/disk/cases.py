"""What is measured: the workloads, the arms, and the memory that each case has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IN_CORE = "in-core"
OURS = "ours"
SWAP, TUNED = "swap", "swap tuned"
CHECKPOINTING = "checkpointing"
MAPPED, OFFLOADED = "mapped weights", "disk_offload"
DASK = "dask"
MIB = 1 << 20


@dataclass(frozen=True)
class Arm:
    """A way to run a workload; `way` is what its program is told, `swaps` whether the kernel may swap."""

    name: str
    way: str = "plain"
    swaps: bool = False
    uses_disk: bool = True
    needs: str = ""  # a library beyond ours


ARMS = {
    arm.name: arm
    for arm in (
        Arm(IN_CORE, uses_disk=False),
        Arm(OURS, way="ours"),
        Arm(SWAP, swaps=True),
        Arm(TUNED, swaps=True),
        Arm(CHECKPOINTING, way="checkpointed", uses_disk=False),
        Arm(MAPPED, way="mapped", needs="safetensors"),
        Arm(OFFLOADED, way="offloaded", needs="accelerate"),
        Arm(DASK, way="dask", swaps=True, needs="dask"),
    )
}


@dataclass(frozen=True)
class Workload:
    """A program, without the number of its steps."""

    name: str
    module: str  # of this package
    arguments: tuple[str, ...]
    quick_arguments: tuple[str, ...]
    arms: tuple[str, ...]
    oversubscriptions: tuple[float, ...] = (2.0, 4.0)
    steps: int = 10
    weights: bool = False  # whether it reads them from a file that is made first

    def command(self, *, quick: bool) -> list[str]:
        return list(self.quick_arguments if quick else self.arguments)


_GPT = (str(EXAMPLES / "gpt.py"), "--sample-bytes", "1")
_RESNET = (str(EXAMPLES / "resnet50.py"), "--image-size", "64")
_TRAINING = (IN_CORE, OURS, SWAP, TUNED, CHECKPOINTING)
_INFERENCE = (IN_CORE, OURS, SWAP, TUNED, MAPPED, OFFLOADED)
_ARRAYS = (IN_CORE, OURS, SWAP, TUNED, DASK)
_TINY_LLAMA = tuple("--layers 4 --width 512 --heads 8 --groups 2 --hidden 2048 --vocabulary 4000".split())

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "gpt",
            "child",
            (*_GPT, "--width", "512", "--layers", "6", "--batch-size", "16", "--text-bytes", "2000000"),
            (*_GPT, "--layers", "3", "--batch-size", "8", "--text-bytes", "500000"),
            _TRAINING,
        ),
        Workload("resnet50", "child", (*_RESNET, "--batch-size", "64"), (*_RESNET, "--batch-size", "8"), _TRAINING),
        Workload("llama", "llama_child", (), _TINY_LLAMA, _INFERENCE, weights=True),
        Workload(
            "cholesky",
            "numpy_child",
            ("cholesky", "--blocks", "16", "--size", "768"),
            ("cholesky", "--blocks", "12", "--size", "512"),
            _ARRAYS,
            (3.0,),
            6,
        ),
        Workload(
            "pca",
            "numpy_child",
            ("pca", "--blocks", "64", "--size", "1024"),
            ("pca", "--blocks", "32", "--size", "512"),
            _ARRAYS,
            (3.0,),
            8,
        ),
    )
}
QUICK_STEPS = 6
WARM_UP = 4  # steps that do not count, of every arm: set-up, recorded, planned, planned again


@dataclass(frozen=True)
class Memory:
    """What a workload needs in-core, measured, from which follows what each case gets.

    `base_bytes` is the process's peak less the data's: interpreter, libraries, and what they allocate beside.
    `reserve_bytes` is what our own process has beyond base and budget.
    """

    live_bytes: int
    base_bytes: int
    reserve_bytes: int = 0

    def limit_bytes(self, oversubscription: float) -> int:
        """Of the control group, for every arm; whole MiB."""
        return round((self.base_bytes + self.live_bytes / oversubscription) / MIB) * MIB

    def budget_bytes(self, oversubscription: float) -> int:
        """Of our variables, so that everything together keeps to the group's limit. Raises ValueError."""
        budget = int(self.live_bytes / oversubscription) - self.reserve_bytes
        if budget <= 0:
            raise ValueError(f"nothing is left for variables: {self}")
        return budget


@dataclass(frozen=True)
class Case:
    """One run: of `workload` by `arm`, with memory for a share of it (None: all), the disk as it is or held."""

    workload: Workload
    arm: Arm
    oversubscription: float | None = None
    held: bool = False

    @property
    def name(self) -> str:
        parts = [self.workload.name, self.arm.name.replace(" ", "-")]
        if self.oversubscription is not None:
            parts += [f"{self.oversubscription:g}x", "held" if self.held else "as-it-is"]
        return "-".join(parts)


def cases_of(workload: Workload, arms: Sequence[str], disks: Sequence[bool], *, quick: bool) -> Iterator[Case]:
    """A round's runs in their order: the in-core run, then all arms of a case next to each other."""
    yield Case(workload, ARMS[IN_CORE])
    for oversubscription in workload.oversubscriptions[: 1 if quick else None]:
        for held in disks:
            for name in workload.arms:
                arm = ARMS[name]
                if name != IN_CORE and name in arms and (arm.uses_disk or held == disks[0]):
                    yield Case(workload, arm, oversubscription, held and arm.uses_disk)
