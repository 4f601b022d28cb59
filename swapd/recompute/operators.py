"""Operators: which recorded functions may run again, so that the bytes of their results are the same.

A function may run again if the same inputs give the same bytes, and if it does nothing but make its results. A *maker*
allocates its results and writes nothing else. A *link* writes one existing variable in place; it may run again after
the functions that made that variable's bytes. What is not in the table never runs again.

The table speaks of operators as they are named in traces, without knowing their arguments. Whoever runs one again also
has to see to what no trace shows: operands too small to be variables must be the same as before, and an argument must
not make an operator random (the probability of a dropout within attention). A sequence is recorded on one machine with
one number of threads, and repeated there; algorithms that libraries choose by trying are to stay as they were.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Role(enum.Enum):
    """What a function may be among those that make a variable's bytes again."""

    MAKER = "allocates its results, and writes nothing else"
    LINK = "writes one variable in place"
    STATISTICS = "a maker once it is called without the running statistics, which must not be updated twice"
    NEVER = "must not run again"


class Group(NamedTuple):
    """Operators, by their names without overloads, that have a role for the same reason."""

    role: Role
    reason: str
    names: frozenset[str]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    "abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min cos div elu eq erf exp "
    "expm1 floor ge gelu gt hardsigmoid hardswish hardtanh le leaky_relu lerp log log1p log_sigmoid_forward "
    "logical_and logical_not logical_or lt masked_fill maximum minimum mish mul ne neg pow reciprocal relu remainder "
    "round rsqrt rsub sgn sigmoid sign silu sin softplus sqrt square sub tan tanh threshold trunc where"
)

GROUPS: tuple[Group, ...] = (
    Group(Role.MAKER, "each element is computed from elements of the inputs alone, in one order", ELEMENTWISE),
    Group(
        Role.LINK,
        "the same in place: right after the function that made the bytes before it, wrong anywhere else",
        frozenset(f"{name}_" for name in ELEMENTWISE) | _names("fill_ zero_ copy_"),
    ),
    Group(
        Role.MAKER,
        "element-wise backward functions: gradients of element-wise functions from values that are inputs",
        _names(
            "threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward elu_backward "
            "leaky_relu_backward hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward "
            "_log_softmax_backward_data _softmax_backward_data"
        ),
    ),
    Group(
        Role.MAKER,
        "bytes are moved or cast, and nothing is computed",
        _names(
            "_to_copy clone contiguous cat stack repeat expand_copy flip roll tril triu constant_pad_nd "
            "reflection_pad2d replication_pad2d embedding index_select gather one_hot "
            "upsample_nearest2d upsample_nearest1d"
        ),
    ),
    Group(
        Role.MAKER,
        "the bytes follow from the arguments",
        _names("zeros zeros_like ones ones_like full full_like arange linspace eye scalar_tensor"),
    ),
    Group(
        Role.MAKER,
        "normalisations without running statistics: sums over elements of the input, in an order that shapes decide",
        _names("native_layer_norm native_group_norm _fused_rms_norm rms_norm"),
    ),
    Group(
        Role.MAKER,
        "sums, means and extremes over dimensions, in an order that shapes and the number of threads decide",
        _names("_softmax _log_softmax mean sum amax amin var std linalg_vector_norm logsumexp"),
    ),
    Group(
        Role.MAKER,
        "windows of the input are reduced one by one; the positions of the largest are results as well",
        _names(
            "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
            "adaptive_max_pool2d upsample_bilinear2d"
        ),
    ),
    Group(
        Role.MAKER,
        "products of matrices and convolutions: the library chooses its algorithm by shapes and threads",
        _names(
            "mm bmm addmm baddbmm addbmm mv addmv dot matmul linear convolution _convolution mkldnn_convolution "
            "convolution_overrideable cudnn_convolution thnn_conv2d _slow_conv2d_forward _conv_depthwise2d"
        ),
    ),
    Group(
        Role.MAKER,
        "fused attention on the CPU, which PyTorch chooses only where nothing is dropped out",
        _names("_scaled_dot_product_flash_attention_for_cpu"),
    ),
    Group(
        Role.STATISTICS,
        "in training it updates running statistics, but it does not read them: without them the results are the same",
        _names("native_batch_norm _native_batch_norm_legit cudnn_batch_norm"),
    ),
    Group(
        Role.NEVER,
        "it takes numbers from a random generator, which has moved on when it runs again",
        _names(
            "native_dropout _fused_dropout dropout alpha_dropout feature_dropout bernoulli rand rand_like randn "
            "randn_like randint randint_like randperm normal multinomial rrelu_with_noise bernoulli_ normal_ uniform_ "
            "exponential_ geometric_ log_normal_ cauchy_ random_ _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
        ),
    ),
    Group(
        Role.NEVER,
        "threads or blocks add to the same elements in the order in which they come",
        _names(
            "scatter_add scatter_add_ scatter_reduce index_add index_add_ index_put index_put_ _index_put_impl_ "
            "embedding_dense_backward max_pool2d_with_indices_backward histc bincount cumsum"
        ),
    ),
    Group(
        Role.NEVER,
        "the allocation has whatever bytes were there",
        _names("empty empty_like empty_strided new_empty new_empty_strided resize_"),
    ),
)

_ROLES = {name: group.role for group in GROUPS for name in group.names}
_INTO_AN_ARGUMENT = ("out", "_out")  # how overloads end that write results where an argument says


def role(name: str) -> Role:
    """The role of a function as traces name it, such as ``aten::add.Tensor``. Unknown functions have none: NEVER."""
    namespace, _, operator = name.partition("::")
    base, _, overload = operator.partition(".")
    if namespace != "aten" or overload.endswith(_INTO_AN_ARGUMENT):
        return Role.NEVER
    return _ROLES.get(base, Role.NEVER)


def reason(name: str) -> str:
    """Why a function has its role, in a sentence."""
    base = name.partition("::")[2].partition(".")[0]
    return next((group.reason for group in GROUPS if base in group.names), "nobody has looked at it yet")
