"""Forms of statements, a line each. `x`, `y`: tensors; `new`, `more`: names for results; `n`: a number below 2**20."""

from __future__ import annotations


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _results(text: str) -> list[str]:
    return [f"{{new}} = {line}" for line in _lines(text)]


def _methods(text: str) -> list[str]:
    return [f"{{new}} = {{x}}.{call}" for call in text.split()]


MADE_BOOLS = ["{new} = torch.rand({shape}) > 0.5"]
MADE_INTEGERS = ["{new} = torch.randint(0, 100, {shape}, {dtype})"]
MADE = _results("""
    torch.randn({shape}, {dtype})
    torch.randn({shape}, {dtype}, requires_grad=True)
    torch.full({shape}, 0.5, {dtype})
    torch.linspace(-1, 1, {count}, {dtype}).reshape({shape})
    torch.randn({shape}, {dtype}).as_subclass(Sub)
    torch.randn({shape}, {dtype}).as_subclass(Named)
    nn.Parameter(torch.randn({shape}, {dtype}))
    torch.from_numpy(numpy.arange({count}, dtype='float32').reshape({shape}))
    torch.tensor(numpy.linspace(0, 1, {count}).reshape({shape}), {dtype})
    torch.empty({shape}, {dtype}).fill_(2)
    torch.ones({shape}, {dtype}).mul_(3)
    torch.randn({shape}, {dtype}).masked_fill_(torch.rand({shape}) < 0.01, float('nan'))
    torch.randn({shape}, {dtype}).masked_fill_(torch.rand({shape}) < 0.01, float('-inf'))
    torch.zeros({shape}, {dtype}).neg()
""")

_FUNCTIONS = """abs neg exp log1p sin tanh sigmoid relu sqrt sign floor round square erf rsqrt isnan logical_not
    bitwise_not reciprocal trunc frac nan_to_num positive sgn angle conj real""".split()
UNARY = [f"{{new}} = torch.{name}({{x}})" for name in _FUNCTIONS] + 2 * _results("""
    F.gelu({x})
    F.silu({x})
    F.softmax({x}, -1)
    F.log_softmax({x}, 0)
    F.leaky_relu({x})
    F.softplus({x})
    F.normalize({x}, dim=-1)
    F.layer_norm({x}, {x}.shape[-1:])
    F.dropout({x}, 0.3)
    F.pad({x}, (1, 2))
    F.hardtanh({x})
    F.glu({x}, -1)
    F.elu({x})
    F.celu({x})
    F.mse_loss({x}, {x} * 0.5)
    Double.apply({x})
    checkpoint(torch.tanh, {x}, use_reentrant=False)
""")

BINARY = """add sub mul div true_divide maximum minimum fmax fmin pow remainder fmod atan2 copysign eq lt ge ne
    logical_and logical_xor bitwise_and bitwise_or hypot floor_divide""".split()
PAIRS = ["{x}, {y}", "{x}, {y}", "{x}, 2", "{x}, 0.5", "{x}, {x}[..., :1]", "{x}, torch.ones(())"]
PAIRS += ["torch.ones(()), {x}", "{x}[..., :1], {y}"]

OUT = _lines("""
    torch.add({x}, {x}, out={out})
    torch.mul({x}, 2, out={out})
    torch.exp({x}, out={out})
    torch.cumsum({x}, 0, out={out})
    torch.cat([{x}, {x}], out=torch.empty(0, dtype={x}.dtype))
    torch.sort({x}, out=({out}, {out}.long()))
""")

_ALONE = """zero_() neg_() abs_() sin_() relu_() exp_() fill_(3) add_(1) mul_(-1) clamp_(-1,1) normal_() uniform_()
    random_(0,50) t_() squeeze_() unsqueeze_(0) logical_not_() bernoulli_(0.5) cumsum_(0) requires_grad_(True)
    detach_() sigmoid_() pow_(2) round_() masked_fill_({mask},1) triu_() swapaxes_(0,-1) exponential_()""".split()
_WITH_ANOTHER = "add_ sub_ mul_ copy_ div_ logical_or_ bitwise_xor_ clamp_min_ clamp_max_".split()
IN_PLACE = [f"{{x}}.{call}" for call in _ALONE] + 3 * [f"{{x}}.{name}({{y}})" for name in _WITH_ANOTHER]

INDEXES = ["[0]", "[-1]", "[::2]", "[...]", "[..., 0]", "[1:]", "[{x} > 0]", "[[0, 0]]", "[..., ::3]"]
ASSIGNED = ["{x}{index} = {y}", "{x}{index} = 2", "{x}{index} = {x}[0]", "{x}{index} = {x}{index} * 2"]

WHOLE = _methods("""sum() mean() max() min() argmax() argmin() std() prod() any() all() norm() amax() amin() var()
    logsumexp(0) nansum() count_nonzero() aminmax()""")
ALONG = _methods("""sum({d}) mean({d}) max({d}) min({d}) argmax({d}) amax({d}) cumsum({d}) cumprod({d}) sort({d})
    argsort({d}) flip({d}) softmax({d}) topk(1,{d}) median({d}) std({d}) all({d}) logcumsumexp({d}) roll(3,{d})
    cummax({d}) any({d}) mode({d}) kthvalue(1,{d}) renorm(2,{d},1.0) diff(dim={d}) unique(dim={d})""")

SELECTING = _results("""
    torch.nonzero({x})
    torch.unique({x})
    torch.masked_select({x}, {x} > 0)
    torch.bincount({x}.flatten().abs().long() % 9)
    torch.histc({x}.float(), bins=5)
    torch.isin({x}, {x}.flatten()[:3])
    torch.bucketize({x}.float(), torch.arange(5.))
    torch.where({x} > 0, {x}, -{x})
    torch.tril({x})
    torch.trace({x})
    torch.diag({x}.flatten()[:60])
    torch.repeat_interleave({x}, 2, 0)
    torch.searchsorted(torch.arange(9.), {x}.float())
    torch.multinomial({x}.float().abs().flatten()[:50] + 1, 4)
    torch.complex({x}.float(), {x}.float())
    torch.view_as_real({x} + 0j)
    torch.fft.rfft({x}.float())
    torch.meshgrid({x}.flatten()[:9])
    torch.zeros_like({x})
    torch.randn_like({x})
    torch.rand_like({x})
    {x}.repeat(2, 1)
    {x}.tile(3)
    {x}.to(torch.float64)
    {x}.to(torch.int32)
    {x}.half()
    {x}.bool()
    {x}.contiguous()
    {x}.clone()
    {x}.clone(memory_format=torch.contiguous_format)
    {x}.new_zeros(3, 5)
    {x}.to_sparse().to_dense()
    {x}.to_sparse_csr().to_dense()
""")

VIEWS = _methods("""detach() t() transpose(0,-1) flatten() reshape(-1) view(-1) unsqueeze(1) squeeze() movedim(0,-1)
    mT expand(2,*{shape}) diagonal() unfold(0,2,1) chunk(2)[1] split(2)[0] unbind()[0] select(0,-1) narrow(0,0,1)
    swapaxes(0,-1) ravel() real view(torch.uint8) view(torch.int32) data contiguous() adjoint() permute(*{permuted})
    as_strided(({few},2),(1,1)) as_strided(({few},),(2,),1) view_as({x}) type(torch.float32) requires_grad_(False)""")
_SLICES = "[1:] [:-1] [::2] [...,1:] [...,::3] [None] [-1] [...,0] [:,None]".split()
VIEWS += [f"{{new}} = {{x}}{index}" for index in _SLICES]

COMBINING = _results("""
    torch.cat([{x}, {y}])
    torch.stack([{x}, {y}], -1)
    torch.where({x} > 0, {x}, {y})
    torch.einsum('...i,...i->...', {x}, {y})
    torch.addcmul({x}, {x}, {y}, value=0.5)
    torch.lerp({x}, {y}, 0.3)
    torch.block_diag({x}[:4], {y}[:4])
    torch.dot({x}.flatten(), {y}.flatten())
    torch.outer({x}.flatten()[:99], {y}.flatten()[:9])
    torch.kron({x}.flatten()[:60], {y}.flatten()[:60])
    torch.allclose({x}, {y})
    torch.equal({x}, {y})
    F.cosine_similarity({x}, {y}, -1)
    F.smooth_l1_loss({x}, {y})
""")

MULTIPLYING = _results("""
    {x} @ {x}.t()
    {x} @ {x}[0]
    {x}.mm(torch.ones({columns}, 1, dtype={x}.dtype))
    {x}.mm(torch.ones({columns}, 33, dtype={x}.dtype))
    F.linear({x}, {x})
    F.embedding(torch.randint(0, {rows}, (40,)), {x})
    {x}.index_select(0, torch.arange({rows}).flip(0))
    torch.baddbmm({x}[None], {x}[None], torch.eye({columns}, dtype={x}.dtype)[None])
    F.scaled_dot_product_attention({x}[None, None], {x}[None, None], {x}[None, None])
    F.cross_entropy({x}, torch.arange({rows}) % {columns})
    torch.cdist({x}[:50], {x}[:50])
    F.conv1d({x}[None], torch.ones(4, {rows}, 3, dtype={x}.dtype), padding=1)
    F.max_pool1d({x}[None], 2)
    F.avg_pool1d({x}[None], 2)
    F.interpolate({x}[None], scale_factor=2.0)
""")

MOVING = _results("""
    {x}[{index}]
    {x}.index_select(0, {index})
    {x}.index_fill(0, {index}, 1)
    {x}.take_along_dim({x}.argsort(0), 0)
    {x}.scatter(0, torch.zeros_like({x}, dtype=torch.long), {x})
    {x}.index_add(0, torch.arange({rows}), {x})
    {x}.gather(0, torch.zeros_like({x}, dtype=torch.long))
    {x}.index_copy(0, torch.arange({rows}).flip(0), {x})
    torch.take({x}, torch.arange({rows}))
    {x}.masked_fill({x} > 0, 1)
    {x}.masked_scatter({x} > 0, {x})
    torch.put({x}, torch.tensor([0]), {x}.flatten()[:1])
""")

LISTS = _lines("""
    torch._foreach_add_([{x}, {y}], [1.5, -2])
    torch._foreach_mul_([{x}, {y}], 2)
    torch._foreach_addcmul_([{x}], [{y}], [{y}], [0.5])
    torch._foreach_sqrt_([{x}, {y}])
    torch._foreach_copy_([{x}, {y}], [{y}, {x}])
    torch._foreach_lerp_([{x}], [{y}], 0.25)
    torch._foreach_zero_([{x}, {y}])
""")

ALIASES = _results("""
    {x}.detach().numpy()
    {x}.numpy(force=True)
    {x}.detach().__array__()
    numpy.asarray({x}.detach())
    numpy.array({x}.detach(), copy=False)
    numpy.from_dlpack({x}.detach())
    torch.Tensor.numpy({x}.detach())
    torch._C.TensorBase.numpy({x}.detach())
    torch.as_tensor({x}.detach().numpy())
    from_dlpack({x}.detach())
    from_dlpack(to_dlpack({x}.detach()))
    torch.empty(0, dtype={x}.dtype).set_({x}.untyped_storage())
    {x}.untyped_storage()
    {x}.as_subclass(Sub)
    {x}.view({x}.shape)
    {x}.data
""")

ARRAYS = _lines("""
    bump({a}, {n})
    {a}[...] = 1
    {a} += 1
    {new} = torch.from_numpy({a})
    {new} = torch.tensor({a})
    {new} = {a}[1:]
    {new} = {a}.T
    {new} = {a}.copy()
    {new} = {a}.reshape(-1)
""")

RAW = _lines("""
    poke({x}, {n}, {n} % 2)
    {new} = peek({x}, {n})
    {x}.untyped_storage()[0] = 1
    {x}.untyped_storage().fill_(0)
    {new} = {x}.flatten()[:50].tolist()
    {new} = {x}.flatten()[{n} % {x}.numel()].item()
    {new} = {x}.untyped_storage().clone()
    {new} = {x}.untyped_storage().tolist()[:9]
    {new} = bytes({x}.untyped_storage()[:9])
    {new} = str({x})
    {new} = float({x}.flatten()[0])
    {new} = bool({x}.flatten()[0])
    {new} = roundtrip({x}, 'deepcopy')
    {new} = roundtrip({x}, 'pickle')
    {new} = roundtrip({x}, 'file')
""")

STORAGES = _lines("""
    {x}.set_({y}.detach())
    {x}.data = {y}.detach().clone()
    {x}.data = {y}.detach()
    torch.utils.swap_tensors({x}, {y})
""")

GRAPH_BEGINS = ["{new} = {x}.detach().clone().requires_grad_(); {more} = hooked({new}, 2).mul(3)"]
GRAPHS = _lines("""
    {x}.float().sum().backward()
    {x}.float().pow(2).mean().backward(retain_graph=True)
    {new} = hooked({x}, 0.5).mul(2)
    {x}.retain_grad()
""")
GRADIENTS = _lines("""
    {leaf}.grad = None
    {new} = {leaf}.grad
    {leaf}.grad.zero_()
    {leaf}.data.sub_({leaf}.grad)
    {new} = torch.autograd.grad({x}.float().sum(), {leaf}, create_graph=True, allow_unused=True)[0]
""")

IN_THREADS = ["{x} * 2", "{x}.clone()", "{x}.sum()", "{x}.flip(0)"]

REPEATED = _lines("""
    t = {x}.detach() * 1.5
    {x}.detach().mul_(0.5)
    t = {x}.detach().sin(); {y}.detach().copy_(t)
    t = torch.cat([{x}.detach(), {y}.detach()]); del t
    {x}.detach().add_({y}.detach().abs().sqrt())
    t = ({x}.detach() + {y}.detach()).sum()
    {x}.detach().copy_({x}.detach() + 1)
""")

FORGOTTEN = ["del {x}", "del {x}; gc.collect()", "{x} = None"]
PRESSURE = ["evict()", "boundary()", "budget(1.0)", "budget(0.7)", "budget(0.5)", "gc.collect()"]
