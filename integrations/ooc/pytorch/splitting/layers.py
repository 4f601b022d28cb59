"""The layers of a model, for `swapd split`: what each holds, what its convolutions cost, what is verified of it.

The model is built and run once on fake tensors, as `swapd record --fake` does, so it takes no memory. Its operators in
their order are the layers. It is started as a program of its own: `python -m ooc.pytorch.splitting.layers JSON`.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ooc.pytorch.fake import find
from ooc.pytorch.fake_mode import FakeError, Make, Operator, OperatorMode, fake_tensors, iteration
from ooc.pytorch.splitting.calls import Call
from ooc.pytorch.splitting.conditions import library, processor
from ooc.pytorch.splitting.kernels import BACKWARD_DATA, BACKWARD_FILTER, FORWARD, Kernel
from ooc.pytorch.splitting.measure import MeasureError, Measurer, convolution_of, noise_of
from ooc.pytorch.splitting.operators import find as find_handler
from ooc.pytorch.splitting.verification import tensors_in
from swapd.splitting.configurations import KernelTable
from swapd.splitting.network import NetworkLayer
from swapd.splitting.segments import Layer
from swapd.splitting.store import Key, Store, Verdict, default_path

HEAVY = ("aten::convolution", "aten::addmm", "aten::mm", "aten::linear", "aten::bmm")
_FILLS = ("aten::zeros", "aten::ones", "aten::empty", "aten::full", "aten::arange", "aten::detach")


class Found(NamedTuple):
    """One operator of the model, and the kernels of its convolution, each with the batch."""

    layer: Layer
    operator: str
    shapes: str
    kernels: list[tuple[Kernel, int]]


class LayerRun(OperatorMode):  # type: ignore[no-untyped-call]
    """To be entered after the model was built; `found` has what then runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Found] = []
        self.training = False
        self._weights = {tensor.untyped_storage()._cdata for tensor in _weights()}

    def run(self, operator: Operator, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not operator.name.startswith(_FILLS) and tensors_in([result]):
            self._note(operator.name, args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        base = name.partition(".")[0]
        given = _by_storage([*args, *kwargs.values()])
        weights = {key: tensor for key, tensor in given.items() if key in self._weights}
        inputs = {key: tensor for key, tensor in given.items() if key not in self._weights}
        made = {key: tensor for key, tensor in _by_storage([result]).items() if key not in given}
        self.training = self.training or base.endswith("_backward")
        heavy = base in HEAVY and bool(weights)
        outputs = next(iter(made.values()), None)
        layer = Layer(
            name=f"{len(self.found)} {base.removeprefix('aten::')}",
            input_bytes=sum(t.nbytes for t in inputs.values()),
            output_bytes=sum(t.nbytes for t in made.values()),
            weight_bytes=sum(t.nbytes for t in weights.values()),
            heavy=heavy,
            weight_units=_weight_units(outputs, weights) if heavy else None,
            activation_units=_activation_units(base, outputs),
        )
        self.found.append(Found(layer, name, Call(name, tuple(args), kwargs).shapes, _kernels(base, args)))


def _weights() -> Iterator[Tensor]:
    """Parameters and buffers of every module in this process."""
    for module in [entry for entry in gc.get_objects() if issubclass(type(entry), torch.nn.Module)]:
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)


def _by_storage(values: list[Any]) -> dict[int, Tensor]:
    return {t.untyped_storage()._cdata: t for t in tensors_in(values) if t.layout == torch.strided}


def _weight_units(result: Tensor | None, weights: dict[int, Tensor]) -> int | None:
    """The number of output channels or features."""
    if result is None or result.dim() < 2 or not weights:
        return None
    channels = int(result.shape[1] if result.dim() > 2 else result.shape[-1])
    return channels if channels >= 1 else None


def _activation_units(base: str, result: Tensor | None) -> int | None:
    """How many indivisible units the result has (rows of images, or samples); None if it may be cut anywhere."""
    if result is None or base not in HEAVY or not result.dim():
        return None
    rows = result.shape[0] * (result.shape[2] if result.dim() == 4 else 1)
    return max(int(rows), 1)


def _kernels(base: str, args: Any) -> list[tuple[Kernel, int]]:
    """The kernels of a convolution of images, each with the batch."""
    if base == "aten::convolution":
        x, w, _, *rest = args[:9]
        kinds = [FORWARD]
    elif base == "aten::convolution_backward":
        _, x, w, _, *rest = args[:10]
        kinds = [kind for kind, wanted in zip((BACKWARD_DATA, BACKWARD_FILTER), args[10]) if wanted]
    else:
        return []
    stride, padding, dilation, transposed, _, groups = rest
    if transposed or x.dim() != 4:  # others have no kernels that could be measured
        return []
    shape = convolution_of(x.shape, w.shape, stride, padding, dilation, groups)
    return [(Kernel(shape, kind), int(x.shape[0])) for kind in kinds]


def layers_of(make: Make, batch: int, **arguments: Any) -> LayerRun:
    """The operators of one iteration.

    Raises:
        FakeError: the iteration cannot be run without data.
    """
    with fake_tensors():
        step = iteration(make, batch, arguments)
        run = LayerRun()
        with run:
            step()
    if not run.found:
        raise FakeError("an iteration runs no operator")
    return run


def describe(run: LayerRun, measurer: Measurer, policy: str, say: Callable[[str], None]) -> list[NetworkLayer]:
    """The layers with costs and verdicts from the measurer's store; a kernel that it cannot measure has no costs."""
    made = []
    for number, found in enumerate(run.found, 1):
        tables = []
        for kernel, batch in found.kernels:
            name = f"{found.layer.name} {kernel.kind}"
            if measurer.measures:
                say(f"{number} of {len(run.found)}: {kernel.convolution} {kernel.kind}")
            try:
                tables.append(measurer.table(kernel, batch, policy, name))
            except MeasureError:
                tables.append(KernelTable(name, batch, ()))
        verdicts: tuple[Verdict, ...] = ()
        if (handler := find_handler(found.operator)) is not None:
            key = Key(processor(), library(handler.module), found.operator, found.shapes)
            verdicts = tuple(measurer.store.verdicts_of(key))
        made.append(NetworkLayer(found.layer, found.operator, found.shapes, tuple(tables), verdicts))
    return made


def main(text: str) -> int:
    """Does what the JSON object `text` asks for; its keys are those that `swapd/cli/split.py` writes."""
    wanted = json.loads(text)
    try:
        make = find(wanted["program"])
        arguments = dict(wanted["arguments"])
        if ":" not in wanted["program"]:
            arguments.setdefault("mode", "inference")  # models that have names take this argument
        try:
            run = layers_of(make, wanted["batch"], **arguments)
        except (TypeError, ValueError) as error:
            raise FakeError(f"{wanted['program']} cannot be built: {error}") from error
        path = Path(wanted["store"]) if wanted["store"] else default_path()
        if wanted["measure"]:
            import ooc.pytorch as ooc

            ooc.enable(alloc="emulated", budget=wanted["measure_bytes"], policy="demand", split="off")
        store = Store(path)
        measurer = Measurer(store, measures=wanted["measure"], largest_bytes=wanted["largest_bytes"])
        layers = describe(run, measurer, wanted["policy"], lambda line: print(line, file=sys.stderr, flush=True))
        facts = {
            "layers": [layer.to_json() for layer in layers],
            "training": run.training,
            "store": None if store.path is None else str(store.path),
            "measurements": measurer.measurements,
            "noise": noise_of(measurer.rows),
            "device": f"{processor()}, {torch.get_num_threads()} threads",
            "library": measurer.library,
        }
        Path(wanted["output"]).write_text(json.dumps(facts), encoding="utf-8")
    except (FakeError, OSError) as error:
        print(f"swapd: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
