"""Every algorithm computes what PyTorch computes in double precision, whole and in any parts."""

import pytest
import torch
from torch import Tensor

from benchmarks.splitting.convolutions import images
from ooc.pytorch.splitting.kernels import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    CPU,
    FORWARD,
    KINDS,
    Kernel,
    run,
)

BATCH = 5
CONVOLUTIONS = {
    "same size": images(3, 4, (9, 7), (3, 3), padding=(1, 1)),
    "no padding": images(4, 2, (8, 8), (5, 3)),
    "more padding than needed": images(2, 3, (6, 5), (3, 2), padding=(2, 1)),
    "pointwise": images(6, 5, (4, 6), (1, 1)),
    "pointwise, strided": images(6, 5, (7, 6), (1, 1), stride=(2, 2)),
    "strided": images(3, 8, (19, 17), (7, 5), stride=(4, 2), padding=(3, 0)),
    "dilated": images(3, 2, (11, 12), (3, 3), dilation=(2, 3), padding=(2, 2)),
    "groups": images(4, 6, (7, 7), (3, 3), padding=(1, 1), groups=2),
}


def expected(kernel: Kernel, first: Tensor, second: Tensor) -> Tensor:
    c = kernel.convolution
    shapes = {kind: Kernel(c, kind).result_shape(BATCH) for kind in KINDS}
    inputs = {FORWARD: first, BACKWARD_FILTER: second}.get(kernel.kind, torch.zeros(shapes[BACKWARD_DATA])).double()
    filters = second.double() if kernel.kind != BACKWARD_FILTER else torch.zeros(shapes[BACKWARD_FILTER]).double()
    x, w = inputs.requires_grad_(), filters.requires_grad_()
    y = torch.nn.functional.conv2d(x, w, None, c.stride, c.padding, c.dilation, c.groups)
    if kernel.kind == FORWARD:
        return y.detach()
    gradients = torch.autograd.grad(y, (x, w), first.double())
    return gradients[0 if kernel.kind == BACKWARD_DATA else 1]


@pytest.mark.parametrize("parts", [(5,), (2, 3), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", CONVOLUTIONS)
@pytest.mark.parametrize("algorithm", CPU)
def test_it_is_the_same_convolution(shape: str, kind: str, algorithm: str, parts: tuple[int, ...]) -> None:
    kernel = Kernel(CONVOLUTIONS[shape], kind)
    if not CPU[algorithm].suits(kernel):
        assert kernel.convolution.groups > 1
        return
    operands = kernel.operands(BATCH, torch.Generator().manual_seed(1))
    found = run(kernel, operands, [(size, CPU[algorithm]) for size in parts])
    wanted = expected(kernel, *operands)
    assert found.shape == wanted.shape
    assert (found.double() - wanted).abs().max() < 2e-5 * wanted.abs().max()


def test_algorithms_mix_within_a_kernel() -> None:
    kernel = Kernel(CONVOLUTIONS["same size"], BACKWARD_FILTER)
    operands = kernel.operands(BATCH, torch.Generator().manual_seed(1))
    found = run(kernel, operands, [(2, CPU["own"]), (2, CPU["im2col"]), (1, CPU["own"])])
    assert torch.allclose(found.double(), expected(kernel, *operands), rtol=1e-4, atol=1e-5)


def test_names_tell_convolutions_apart() -> None:
    assert len({str(c) for c in CONVOLUTIONS.values()}) == len(CONVOLUTIONS)
