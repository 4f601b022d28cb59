"""Which module splits which operator, and the operators `ooc_split::...` that the adapter (csrc/splitting.cpp) calls.

When `aten::add.Tensor` first does not fit, `ooc_split::aten__add__Tensor` is defined with the same schema. The table
says which module has the handler of an operator, so that only this module is imported.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from ooc.pytorch.splitting import registry
from ooc.pytorch.splitting.registry import Handler, overload_of

NAMESPACE = "ooc_split"

# For each module, the operators that it has handlers for, in all overloads. `x` stands for `x_backward` too, unless
# that has an entry of its own.
_NAMES = {
    "attention": "_scaled_dot_product_flash_attention_for_cpu",
    "batch_norm": """
        native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    """,
    "convolution": "convolution _convolution",
    "convolution_backward": "convolution_backward",
    "embedding": "embedding index_select embedding_dense_backward gather scatter_add scatter",
    "linear": "mm addmm _addmm_activation bmm baddbmm mv addmv",
    "losses": "nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward",
    "movement": """
        copy_ copy clone _to_copy cat stack fill_ zero_ set_ _unsafe_view as_strided_ detach_ squeeze_ swapaxes_
        swapdims_ t_ transpose_ unsqueeze_
    """,
    "normalization": "native_layer_norm _fused_rms_norm native_group_norm",
    "padding": "constant_pad_nd slice_backward select_backward",
    "pooling": """
        max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d
        avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d max_unpool2d reflection_pad1d reflection_pad2d
        reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d
        upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa
        _upsample_bicubic2d_aa pixel_shuffle pixel_unshuffle
    """,
    "random": "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_",
    "reductions": """
        sum mean nansum amax amin logsumexp prod all any var std var_mean std_mean linalg_vector_norm norm argmax argmin
        max min median nanmedian mode kthvalue count_nonzero cumsum cumprod logcumsumexp cummax cummin sort topk equal
    """,
    "softmax": "_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data",
}
TABLE = {name: module for module, names in _NAMES.items() for name in names.split()}
FAMILIES = ("pointwise", "lists", "factories")  # these look at an operator's schema; the most frequent first
MODULES = (*_NAMES, *FAMILIES)

_lock = threading.RLock()


def key_of(name: str) -> str | None:
    """The entry of the table for an operator, such as `sum` for aten::sum.dim_IntList. None if there is no entry."""
    base = name.removeprefix("aten::").partition(".")[0]
    return next((key for key in (base, base.removesuffix("_backward")) if key in TABLE), None)


def module_of(name: str) -> str | None:
    """The module that may have registered a handler for an operator; None if the operator is left to the families."""
    key = key_of(name)
    return None if key is None else TABLE[key]


def find(name: str) -> Handler | None:
    """The handler of an operator, or None. Imports the modules that may have it."""
    with _lock:
        module = module_of(name)
        if name not in registry.named and module is not None:
            _load(module)
        if name in registry.named:
            return registry.named[name]
        overload = overload_of(name)
        if overload is None:
            return None
        asked = 0
        for family in FAMILIES:
            _load(family)
            for each in registry.finders[asked:]:
                function = each(overload)
                if function is not None:
                    return Handler(function, each.__module__)
            asked = len(registry.finders)
    return None


def _load(module: str) -> None:
    importlib.import_module(f"{registry.__name__.rpartition('.')[0]}.{module}")


def mangle(name: str) -> str:
    """An operator's name in the namespace `ooc_split`; csrc/splitting.cpp makes the same names."""
    return name.replace("::", "__").replace(".", "__")


class Definitions:
    """The operators `ooc_split::...` of this process, which are defined once, whatever sessions come and go.

    Each of them calls `run(operator, handler, writes, arguments, keywords)`. The adapter calls
    `host_backed(operator, shapes)` after an operator ran on host memory.
    """

    def __init__(
        self,
        run: Callable[[str, Handler, bool, tuple[Any, ...], dict[str, Any]], Any],
        host_backed: Callable[[str, str], None],
    ) -> None:
        self._run = run
        library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._library = library
        self._defined: dict[str, bool] = {}
        library.define("prepare(str name) -> bool")
        library.impl("prepare", self.prepare, "CompositeExplicitAutograd")
        library.define("host_backed(str name, str shapes) -> ()")
        library.impl("host_backed", host_backed, "CompositeExplicitAutograd")

    def prepare(self, name: str) -> bool:
        """Defines the operator that splits `name`. Returns whether `name` can be split."""
        with _lock:
            if name not in self._defined:
                self._defined[name] = self._define(name)
            return self._defined[name]

    def _define(self, name: str) -> bool:
        found, overload = find(name), overload_of(name)
        if found is None or overload is None:
            return False
        schema = str(overload._schema)
        writes = overload._schema.is_mutable

        def run(*arguments: Any, **keywords: Any) -> Any:
            return self._run(name, found, writes, arguments, keywords)

        self._library.define(mangle(name) + schema[schema.index("(") :])
        self._library.impl(mangle(name), run, "CompositeExplicitAutograd")
        return True
