"""Tensors without a storage of their own: sparse gradients, COO and CSR matrices, strided and jagged nested tensors."""

from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import nn


def sparse_embedding() -> dict[str, Any]:
    """Embedding rows trained by SparseAdam, the dense rest by AdamW, in the same step."""
    table, bag = nn.Embedding(20_000, 128, sparse=True), nn.EmbeddingBag(5_000, 128, sparse=True, mode="sum")
    rest = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128))
    sparse = torch.optim.SparseAdam([table.weight, bag.weight], lr=1e-2)
    dense = torch.optim.AdamW(rest.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        sparse.zero_grad()
        dense.zero_grad()
        features = torch.cat((table(torch.randint(20_000, (2048,))), bag(torch.randint(5_000, (2048, 4)))), dim=1)
        loss = rest(features).square().mean()
        loss.backward()
        assert table.weight.grad is not None and table.weight.grad.is_sparse
        sparse.step()
        dense.step()
        losses.append(loss.item())
    return {"table": table.weight, "bag": bag.weight, "rest": rest.state_dict(), "losses": losses}


def sparse_products() -> dict[str, Any]:
    """Products of a sparse matrix with dense ones, with gradients, in both layouts; arithmetic between sparse ones."""
    dense = torch.randn(1400, 1400)
    dense[dense.abs() < 1.5] = 0
    coo, csr = dense.to_sparse(), dense.to_sparse_csr()
    right = torch.randn(1400, 256, requires_grad=True)
    by_coo, by_csr = torch.sparse.mm(coo, right), csr @ right
    (by_coo.square().mean() + by_csr.abs().mean()).backward()
    total = (coo + coo * 0.5).coalesce()
    return {
        "by_coo": by_coo,
        "by_csr": by_csr,
        "gradient": right.grad,
        "indices": total.indices(),
        "values": total.values(),
        "transposed": coo.t().to_dense(),
        "sum": torch.sparse.sum(coo, dim=1).to_dense(),
        "csr_values": (csr * 2).values(),
    }


def nested_tensors() -> dict[str, Any]:
    """Sequences of different lengths in one tensor, in both layouts, through linear layers and attention."""
    parts = [torch.randn(length, 256) for length in (300, 40, 517, 128)]
    layer = nn.Linear(256, 256)
    strided = torch.nested.nested_tensor(parts)
    strided_out = torch.nested.to_padded_tensor(F.gelu(layer(strided)), 0.0)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    out = F.layer_norm(layer(jagged), (256,)) * 2
    loss = sum((part.square().mean() for part in out.unbind()), torch.zeros(()))
    loss.backward()
    assert jagged.grad is not None
    return {
        "strided": strided_out,
        "jagged": out.values(),
        "gradient": jagged.grad.values(),
        "weight_gradient": layer.weight.grad,
        "loss": loss,
    }


def main() -> None:
    path = begin()
    results = {"embedding": sparse_embedding(), "products": sparse_products(), "nested": nested_tensors()}
    finish(path, results)


if __name__ == "__main__":
    main()
