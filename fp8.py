"""FP8 linears: which backend runs, the linears themselves, pausing them, and saying what is in FP8 and why.

Eight bits hold a sign, an exponent and a mantissa: e4m3 has more mantissa (largest value 448) and serves weights and
activations, e5m2 has more range (57344) and serves gradients; together: "hybrid" (Micikevicius et al. 2022). A tensor is
multiplied by scale = largest value / amax, its largest magnitude, before the cast, and the product of two such tensors
is divided by both scales. With one scale per tensor, taken from the tensor itself, the recipe is "tensorwise", or
current scaling. A linear is three matrix multiplications, and each operand is cast for each of them:

    forward  y  = x  W^T    x (M, K) e4m3   W (N, K) e4m3
    dgrad    dx = dy W      dy (M, N) e5m2
    wgrad    dW = dy^T x    its sum runs over tokens, so both operands are transposed copies

The GPU's FP8 units want the left operand row-major, the right one column-major, and M, N, K in multiples of 16. A CPU's
torch._scaled_mm is an emulation that takes anything, so those rules are checked here, on every device.

Backends: native (torch._scaled_mm, traceable by torch.compile, so that the casts fuse into the kernels around them),
te (Transformer Engine's Linear), emulate (the same casts, multiplied in fp32: the readable reference, on any device).
Master weights, embeddings, norms and the output head are not in FP8.
"""
import contextlib
import dataclasses
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
AMAX_FLOOR = 1e-12                  # an all-zero tensor gets a finite scale
MULTIPLE = 16                       # of every dimension of an FP8 matrix multiplication on CUDA
KEPT = {'lm_head': 'the output head decides the loss, and stays bf16'}
BACKENDS = ('auto', 'te', 'native', 'emulate', 'off')


# ----------------------------------------------------------------------------------------------- which backend

@dataclasses.dataclass(frozen=True)
class Choice:
    """backend: 'native' | 'te' | 'emulate' | 'off'. reason: why this one, a clause."""
    backend: str
    reason: str

    @property
    def on(self):
        return self.backend != 'off'


def choose(use_fp8, backend, device, dtype, tokens, compiling=False):
    """What will run. `use_fp8` and backend 'auto' are requests: what cannot run becomes 'off', with the reason. Any other
    backend is an order: it runs, or raises ValueError (settings), RuntimeError (this machine) or ImportError.

    device: torch.device. dtype: what activations are computed in. tokens: rows of a micro-batch, batch_size * block_size.
    compiling: whether torch.compile is on, which decides auto's order."""
    if backend == 'torchao':
        raise ValueError('fp8_backend=torchao is not built yet; native runs the same tensorwise recipe')
    if backend not in BACKENDS:
        raise ValueError(f'fp8_backend is one of {", ".join(BACKENDS)}, not {backend!r}')
    if backend == 'off' or not use_fp8:
        if backend not in ('auto', 'off'):
            raise ValueError(f'use_fp8 is off, but fp8_backend={backend} is an order: leave one of them out')
        return Choice('off', 'FP8 is switched off')
    problem = None
    if dtype != torch.bfloat16:
        problem = f'FP8 needs dtype=bf16 around it, not {dtype}'
    elif tokens % MULTIPLE:
        problem = f'batch_size x block_size = {tokens} is not a multiple of {MULTIPLE}'
    if backend == 'auto':
        problem = problem or _why_not_cuda_fp8(device)
        if problem:
            return Choice('off', problem)
        if compiling or _why_not_te(device):
            return Choice('native', 'auto: torch.compile fuses its casts' if compiling else 'auto: Transformer Engine is not there')
        return Choice('te', 'auto: without torch.compile, its kernels are the fused ones')
    if problem:
        raise ValueError(f'fp8_backend={backend}: {problem}')
    if backend == 'native' and device.type == 'cuda' and (problem := _why_not_cuda_fp8(device)):
        raise RuntimeError(f'fp8_backend=native: {problem}')
    if backend == 'te' and (problem := _why_not_te(device)):
        raise RuntimeError(f'fp8_backend=te: {problem}')
    where = ', on a CPU: FP8\'s numerics, without its speed' if device.type == 'cpu' else ''
    return Choice(backend, 'as ordered' + where)


def _why_not_cuda_fp8(device):
    """None where this device multiplies FP8 matrices (one is tried), else the reason, a clause."""
    if device.type != 'cuda':
        return 'there is no CUDA GPU, and a CPU only emulates FP8: --fp8_backend=native asks for that by name'
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f'{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]}) has no FP8 units; sm_89 and later do'
    try:
        x = torch.randn(64, 64, device=device, generator=torch.Generator(device).manual_seed(0))
        y, _ = linear_forward(x.bfloat16(), x, scaled_mm)
        error = ((y.float() - x @ x.t()).norm() / (x @ x.t()).norm()).item()
    except RuntimeError as why:
        return f'an FP8 matrix multiplication failed here: {str(why).splitlines()[0]}'
    return None if error < 0.1 else f'an FP8 matrix multiplication is off by {error:.0%} here'


def _why_not_te(device):
    """None where Transformer Engine can train here, else the reason, a clause."""
    if device.type != 'cuda':
        return 'Transformer Engine needs a CUDA GPU; --fp8_backend=native and emulate run anywhere'
    try:
        import transformer_engine.pytorch as te
        available, reason = te.is_fp8_available(return_reason=True)
    except (ImportError, OSError, RuntimeError) as why:
        return f'Transformer Engine does not load ({str(why).splitlines()[0]}); pip install -r requirements-te.txt'
    return None if available else reason


# ----------------------------------------------------------------------------------------------- arithmetic

def quantize(x, dtype):
    """x (any shape and float type) -> (x in FP8, same shape; inverse scale, a fp32 scalar): x ~ x8 * inverse.

    NaN and inf stay non-finite, so that a bad step is seen; finite values are clamped, since casts beyond the range
    give inf or NaN on some devices."""
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float().clamp(min=AMAX_FLOOR)
    return (x.float() * (largest / amax)).clamp(-largest, largest).to(dtype), amax / largest


def _check_cuda_rules(a, b):
    """What CUDA's FP8 units refuse, refused everywhere. a (M, K), b (K, N). Raises ValueError."""
    if a.stride(1) != 1 or b.stride(0) != 1:
        raise ValueError(f'FP8 operands are row-major and column-major; strides here are {a.stride()} and {b.stride()}')
    if a.shape[0] % MULTIPLE or a.shape[1] % MULTIPLE or b.shape[1] % MULTIPLE:
        raise ValueError(f'FP8 dimensions are multiples of {MULTIPLE}, not {tuple(a.shape)} x {tuple(b.shape)}')
    if a.dtype == E5M2 and b.dtype == E5M2:
        raise ValueError('there is no FP8 product of e5m2 and e5m2')


def scaled_mm(a, b, inverse_a, inverse_b, out_dtype, fast):
    """(M, K) FP8 @ (K, N) FP8, times both inverse scales -> (M, N) out_dtype. fast: sum with fewer bits, as is usual in
    forward and not in backward."""
    _check_cuda_rules(a, b)
    return torch._scaled_mm(a, b, scale_a=inverse_a, scale_b=inverse_b, out_dtype=out_dtype, use_fast_accum=fast)


def emulated_mm(a, b, inverse_a, inverse_b, out_dtype, fast):
    """scaled_mm's meaning: products and sums in fp32."""
    _check_cuda_rules(a, b)
    return ((a.float() @ b.float()) * (inverse_a * inverse_b)).to(out_dtype)


def linear_forward(x, weight, mm):
    """x (M, K) bf16, weight (N, K) fp32 -> y (M, N) in x's dtype, and the quantised operands for backward."""
    x8, inverse_x = quantize(x, E4M3)
    w8, inverse_w = quantize(weight, E4M3)
    return mm(x8, w8.t(), inverse_x, inverse_w, x.dtype, fast=True), (x8, inverse_x, w8, inverse_w)


def linear_backward(dy, x8, inverse_x, w8, inverse_w, mm, weight_dtype):
    """dy (M, N) -> dx (M, K) in dy's dtype, dW (N, K) in weight_dtype."""
    dy8, inverse_dy = quantize(dy, E5M2)
    dx = mm(dy8, _transpose(w8).t(), inverse_dy, inverse_w, dy.dtype, fast=False)
    dw = mm(_transpose(dy8), _transpose(x8).t(), inverse_dy, inverse_x, weight_dtype, fast=False)
    return dx, dw


def _transpose(x):
    """A transposed copy, row-major. (x.t().contiguous() is the same, but CPU builds cannot trace it for CUDA.)"""
    return x.t().clone(memory_format=torch.contiguous_format)


class _Matmul(torch.autograd.Function):
    """y = x W^T; what waits for backward is in FP8, half of bf16's memory."""

    @staticmethod
    def forward(ctx, x, weight, mm):
        y, saved = linear_forward(x, weight, mm)
        ctx.save_for_backward(*saved)
        ctx.mm, ctx.weight_dtype = mm, weight.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        return *linear_backward(dy, *ctx.saved_tensors, ctx.mm, ctx.weight_dtype), None


# ----------------------------------------------------------------------------------------------- modules

_paused = False


@contextlib.contextmanager
def paused():
    """Inside, every FP8 linear computes in its input's dtype: evaluation and sampling do not train in FP8's noise."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


class Fp8Linear(nn.Linear):
    """nn.Linear, parameters and names included, whose matrix multiplications run in FP8. mm: scaled_mm | emulated_mm."""

    def __init__(self, in_features, out_features, bias=True, mm=scaled_mm):
        super().__init__(in_features, out_features, bias)
        self.mm = mm

    def forward(self, x):
        if _paused:
            return _plain(self, x)
        y = _Matmul.apply(x.reshape(-1, self.in_features), self.weight, self.mm).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _plain(module, x):
    return F.linear(x, module.weight.to(x.dtype), None if module.bias is None else module.bias.to(x.dtype))


@functools.cache
def _te_class():
    """te.Linear with nn.Linear's state dict and current scaling; a class made late, since te loads only where CUDA is."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling, Format
    recipe = Float8CurrentScaling(fp8_format=Format.HYBRID)

    class TeLinear(te.Linear):
        # nn.Module's own: current scaling has no state, and portable weights have no _extra_state key
        get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

        def forward(self, x):
            if _paused:
                return _plain(self, x)
            with torch.autocast('cuda', x.dtype), te.autocast(enabled=True, recipe=recipe):
                return super().forward(x)

    return TeLinear


def linear_factory(choice, base):
    """What GPT calls for each linear: factory(in_features, out_features, bias=, name=) -> FP8 module where `choice` says
    so and the layer can be, else base(...) with its reason in `bf16_reason`."""
    def factory(in_features, out_features, bias=True, name=''):
        reason = KEPT.get(name)
        if in_features % MULTIPLE or out_features % MULTIPLE:
            reason = f'{in_features} -> {out_features} is not in multiples of {MULTIPLE}'
        if not choice.on or reason:
            module = base(in_features, out_features, bias=bias, name=name)
            module.bf16_reason = reason or choice.reason
            return module
        if choice.backend == 'te':
            module = _te_class()(in_features, out_features, bias=bias)
        else:
            module = Fp8Linear(in_features, out_features, bias, scaled_mm if choice.backend == 'native' else emulated_mm)
        module.bf16_reason = None
        return module
    return factory


def summary(model, choice):
    """One line: what is in FP8, by what, how many linears, and why the others are not."""
    if not choice.on:
        return f'FP8 Training Off: {choice.reason}'
    reasons = {name: m.bf16_reason for name, m in model.named_modules() if hasattr(m, 'bf16_reason')}
    plain = {}
    for name, reason in reasons.items():
        if reason:
            plain.setdefault(reason, []).append(name)
    others = '; '.join(f'{", ".join(names[:3])}{f" and {len(names) - 3} more" if len(names) > 3 else ""}: {reason}'
                       for reason, names in plain.items())
    count = sum(reason is None for reason in reasons.values())
    return (f'FP8 Training Enabled: {count} of {len(reasons)} linears, {choice.backend} ({choice.reason}), tensorwise, hybrid'
            + (f' | bf16: {others}' if others else ''))
