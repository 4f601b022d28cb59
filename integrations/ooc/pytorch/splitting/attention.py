"""Scaled dot product attention on a CPU, cut by sequences and heads, each of which is computed by itself."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from ooc.pytorch.splitting.context import Context, Sample
from ooc.pytorch.splitting.dividers import PRODUCTS, divides
from ooc.pytorch.splitting.parts import Axis, Named, Piece, along

aten = torch.ops.aten


def _axes(named: Named, tensors: list[str], results: range) -> list[Axis]:
    query, key = named["query"], named["key"]
    mask = named.get("attn_mask")
    masks = ["attn_mask"] if mask is not None and mask.dim() == 4 else []
    places = dict.fromkeys(tensors + masks, 0), dict.fromkeys(tensors + masks, 1)
    axes = [Axis("sequences", query.shape[0], places[0], dict.fromkeys(results, 0))]
    if query.shape[1] == key.shape[1]:
        axes.append(Axis("heads", query.shape[1], places[1], dict.fromkeys(results, 1)))
    return axes


@divides("aten::_scaled_dot_product_flash_attention_for_cpu", specials=PRODUCTS)
def attention(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Attention of query, key and value, [B, H, S, D] each. The kernel keeps blocks of scores for every thread."""
    axes = _axes(named, ["query", "key", "value"], range(2))
    scores = _SCORES * context.threads
    return along(context, op, named, axes, multiples=(1,), workspace=lambda operands, results: scores)


def _sample(named: Named) -> Sample:
    """Random arguments whose `logsumexp` belongs to the queries and keys: with any other, exponentials overflow."""

    def make(generator: torch.Generator) -> tuple[tuple[object, ...], dict[str, object]]:
        def like(name: str) -> torch.Tensor:
            tensor = named[name]
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            return made.copy_(torch.randn(tensor.shape, generator=generator))

        query, key, value, grad = like("query"), like("key"), like("value"), like("grad_out")
        options = {name: named[name] for name in ("attn_mask", "scale")}
        if options["attn_mask"] is not None:
            options["attn_mask"] = torch.zeros_like(options["attn_mask"], memory_format=torch.contiguous_format)
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, named["dropout_p"], named["is_causal"], **options
        )
        args = (grad, query, key, value, out, logsumexp, named["dropout_p"], named["is_causal"])
        return args, options

    return make


@divides("aten::_scaled_dot_product_flash_attention_for_cpu_backward", sample=_sample, specials=PRODUCTS)
def attention_backward(context: Context, op: OpOverload, named: Named) -> list[Piece]:
    """Gradients of queries, keys and values."""
    axes = _axes(named, ["grad_out", "query", "key", "value", "out", "logsumexp"], range(3))
    return along(
        context,
        op,
        named,
        axes,
        multiples=(1,),
        workspace=lambda operands, results: results + _SCORES * context.threads,
    )


_SCORES = 2 * 512 * 768 * 4  # bytes of a block of scores and its sums: at most 768 queries by 512 keys
