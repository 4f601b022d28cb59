"""Scaled dot product attention on a CPU, cut by sequences and heads, each of which is computed by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ooc.pytorch.splitting.axes import table
from ooc.pytorch.splitting.calls import Given, Sample
from ooc.pytorch.splitting.dividers import PRODUCTS, divides_along
from ooc.pytorch.splitting.parts import Named
from ooc.pytorch.splitting.verification import random_like

aten = torch.ops.aten


def _scores() -> int:
    """Bytes of the blocks of scores and their sums that the kernel keeps for every thread: 768 queries by 512 keys."""
    return 2 * 512 * 768 * 4 * torch.get_num_threads()


def _sample(named: Named) -> Sample:
    """Random arguments whose `logsumexp` belongs to the queries and keys: with any other, exponentials overflow."""

    def make(generator: torch.Generator) -> Given:
        names = ("query", "key", "value", "grad_out")
        query, key, value, grad = (random_like(named[name], generator, Tensor.copy_) for name in names)
        options = {name: named[name] for name in ("attn_mask", "scale")}
        if options["attn_mask"] is not None:
            options["attn_mask"] = torch.zeros_like(options["attn_mask"], memory_format=torch.contiguous_format)
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, named["dropout_p"], named["is_causal"], **options
        )
        args = (grad, query, key, value, out, logsumexp, named["dropout_p"], named["is_causal"])
        return args, options

    return make


# Query, key and value are [B, H, S, D] each. A mask may be [S, S] alone.
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    axes=table("sequences query key value:0 attn_mask*:-4 -> 0 0", "heads query key value:1 attn_mask*:-3 -> 1 1"),
    multiples=(1,),
    workspace=lambda operands, results: _scores(),
    specials=PRODUCTS,
)
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    axes=table(
        "sequences grad_out query key value out logsumexp:0 attn_mask*:-4 -> 0 0 0",
        "heads grad_out query key value out logsumexp:1 attn_mask*:-3 -> 1 1 1",
    ),
    multiples=(1,),
    workspace=lambda operands, results: results + _scores(),
    sample=_sample,
    specials=PRODUCTS,
)
