"""Matrix products in parts: by columns and rows of the result, where sums stay whole; attention by sequences and heads.

Blocks are multiples of 64 where that is possible: BLAS kernels work on tiles, and a block that ends within one takes
another path than the whole takes (measured with MKL: multiples of 64 columns and of 4 rows were bit-identical).
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from ooc.pytorch.splitting.axes import Named
from ooc.pytorch.splitting.calls import Split
from ooc.pytorch.splitting.context import Context
from ooc.pytorch.splitting.dividers import PRODUCTS, divides, divides_along
from ooc.pytorch.splitting.parts import along
from ooc.pytorch.splitting.tables import LEAST, factors, table

_products = table("matrices self mat2:-3 -> -3", "columns mat2:-1 -> -1", "rows self:-2 -> -2", least=LEAST)
_matrices = table("matrices batch1 batch2:-3 self*:-3 -> -3")


@divides("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", specials=PRODUCTS)
def product(context: Context, op: OpOverload, named: Named) -> list[Split]:
    """The product of [.., n, k] and [.., k, m]: by matrices of the batch, by columns (m), by rows (n)."""
    first = next(named[name] for name in ("batch1", "mat1", "self") if name in named)
    second = next(named[name] for name in ("batch2", "mat2") if name in named)
    axes = [*_matrices(named), *factors(named)] if "beta" in named else _products(named)
    orders = [axes, [*axes[:-2], *axes[:-3:-1]]]
    if first.dim() == 2 and first.nbytes > second.nbytes:  # so that the larger factor is read once
        orders.reverse()
    # BLAS copies a factor whose layout it does not take; oneDNN reorders both factors of short types.
    doubled = first.element_size() < 4 or not all(1 in factor.stride()[-2:] for factor in (first, second))
    made = torch.empty(*first.shape[:-1], second.shape[-1], dtype=first.dtype, device="meta")
    return along(
        context, op, named, axes, orders=orders, results=[made],
        workspace=lambda part: part.operands + part.results if doubled else 0,
    )  # fmt: skip


def _scores() -> int:
    """Bytes of the blocks of scores and their sums that the kernel keeps for every thread: 768 queries by 512 keys."""
    return 2 * 512 * 768 * 4 * torch.get_num_threads()


def _with_its_sums(named: Named) -> Named:
    """Arguments whose `logsumexp` belongs to the queries and keys: with any other, exponentials overflow."""
    forward = {name: value for name, value in named.items() if name not in ("grad_out", "out", "logsumexp")}
    if forward["attn_mask"] is not None:
        forward["attn_mask"] = torch.zeros_like(forward["attn_mask"], memory_format=torch.contiguous_format)
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(**forward)
    return named | forward | {"out": out, "logsumexp": logsumexp}


# Query, key and value are [B, H, S, D] each. A mask may be [S, S] alone.
_sequences_and_heads = table(
    "sequences grad_out query key value out logsumexp:0 attn_mask*:-4 -> 0 0 0",
    "heads grad_out query key value out logsumexp:1 attn_mask*:-3 -> 1 1 1",
)
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu", axes=_sequences_and_heads, multiples=(1,), specials=PRODUCTS,
    workspace=lambda part: _scores(),
)  # fmt: skip
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward", axes=_sequences_and_heads, multiples=(1,),
    specials=PRODUCTS, sample=_with_its_sums, workspace=lambda part: part.results + _scores(),
)  # fmt: skip
