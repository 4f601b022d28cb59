"""Function transforms: per-sample gradients, Jacobians, a Hessian product, forward mode, an ensemble by vmap."""

from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, stack_module_state, vjp, vmap


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 8))


def per_sample_gradients(x: Tensor, labels: Tensor) -> dict[str, Any]:
    """One gradient for each of the samples; then differentially private looking steps on their clipped mean."""
    model = network()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (sample.unsqueeze(0),)), label.unsqueeze(0))

    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    for _ in range(3):
        gradients, loss = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0), chunk_size=16)(parameters, x, labels)
        norms = sum(g.flatten(1).square().sum(dim=1) for g in gradients.values()).sqrt()
        factor = (1.0 / norms).clamp(max=1.0)
        for name, g in gradients.items():
            parameters[name] = parameters[name] - 0.1 * torch.einsum("n,n...->...", factor, g) / len(x)
        losses.append(loss)
    return {"parameters": parameters, "gradients": gradients, "losses": losses}


def ensemble(x: Tensor) -> Tensor:
    models = [network() for _ in range(32)]
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(models[0], (parameters, buffers), (x,))
        return out

    out: Tensor = vmap(call, in_dims=(0, 0, None))(parameters, buffers, x).detach()
    return out


def derivatives() -> dict[str, Any]:
    weight = torch.randn(96, 96) / 10

    def function(v: Tensor) -> Tensor:
        return torch.tanh(weight @ v).square().sum()

    v, direction = torch.randn(96), torch.randn(96)
    wide = torch.randn(512, 512)
    value, tangent = jvp(lambda m: torch.sin(m) @ m, (wide,), (torch.ones_like(wide),))
    _, pull = vjp(lambda m: torch.exp(-m.square()) @ m, wide)
    return {
        "jacobian": jacrev(lambda u: torch.tanh(weight @ u))(v),
        "hessian": hessian(function)(v),
        "hessian_product": jvp(grad(function), (v,), (direction,))[1],
        "value": value,
        "tangent": tangent,
        "pulled": pull(wide)[0],
        "batched": vmap(torch.linalg.solve)(torch.eye(64) * 3 + torch.randn(40, 64, 64) / 20, torch.randn(40, 64)),
    }


def main() -> None:
    path = begin()
    x, labels = torch.randn(64, 128), torch.randint(8, (64,))
    results = {"samples": per_sample_gradients(x, labels), "ensemble": ensemble(x), "derivatives": derivatives()}
    finish(path, results)


if __name__ == "__main__":
    main()
