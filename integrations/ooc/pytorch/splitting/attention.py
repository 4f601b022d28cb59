"""Scaled dot product attention on a CPU, cut by sequences and heads, each of which is computed by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ooc.pytorch.splitting.axes import Axis, Named
from ooc.pytorch.splitting.calls import Sample
from ooc.pytorch.splitting.dividers import PRODUCTS, divides_along
from ooc.pytorch.splitting.verification import random_like

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


def _scores() -> int:
    """Bytes of the blocks of scores and their sums that the kernel keeps for every thread: 768 queries by 512 keys."""
    return 2 * 512 * 768 * 4 * torch.get_num_threads()


def _sample(named: Named) -> Sample:
    """Random arguments whose `logsumexp` belongs to the queries and keys: with any other, exponentials overflow."""

    def make(generator: torch.Generator) -> tuple[tuple[object, ...], dict[str, object]]:
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


# Query, key and value are [B, H, S, D] each.
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    axes=lambda named: _axes(named, ["query", "key", "value"], range(2)),
    multiples=(1,),
    workspace=lambda part: _scores(),
    specials=PRODUCTS,
)
divides_along(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    axes=lambda named: _axes(named, ["grad_out", "query", "key", "value", "out", "logsumexp"], range(3)),
    multiples=(1,),
    workspace=lambda part: part.results + _scores(),
    sample=_sample,
    specials=PRODUCTS,
)
