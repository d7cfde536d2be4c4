"""Defines a linear layer in FP8: formats, scales, recipes, casts, three multiplications and their autograd.

Eight bits hold a sign, an exponent and a mantissa. e4m3 has more mantissa (largest value 448) and serves
weights and activations; e5m2 has more range (57344) and serves gradients; together they are "hybrid"
(Micikevicius et al. 2022). Values are quantised in blocks that share a scale. With amax the block's largest
magnitude and `largest` the format's,

    scale = largest / amax        data = (x * scale) in FP8
    scale_inv = 1 / scale         x ~ data * scale_inv

A linear is three matrix multiplications. Each is mm(a, b) = a b^T, a sum over both operands' last dimension,
along which their blocks run:

    forward  y  = x  W^T      x    (M, K)    W   (N, K)     sums over K
    dgrad    dx = dy W        dy   (M, N)    W^T (K, N)     over N
    wgrad    dW = dy^T x      dy^T (N, M)    x^T (K, M)     over tokens, M

A recipe says which values share a scale: all of a tensor, a row, or a block. Where the block is square, or
the whole tensor, the transposed operand is a transposed copy; else it is quantised anew from the unrounded
values. The recipe "delayed" takes its scales from the amaxes of earlier steps, so that a tensor is read once,
not twice.

The GPU's FP8 units want both operands contiguous along the sum, and dimensions in multiples of 16. A CPU has
no such units: it multiplies the codes in fp32 or in bf16, which hold them exactly, and adds in fp32.
"""
import contextlib
import functools
import types
import warnings
from collections import ChainMap
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F


class OptionError(ValueError):
    """Reports an FP8 option that does not exist, or contradicts another."""
    exit_code = 2       # of a script that it ends: see configurator.error_line


class DeviceError(RuntimeError):
    """Reports what FP8 needs and this machine lacks: a GPU, a package."""
    exit_code = 1


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# a weight's casts (N, K) and (K, N); of a frozen weight the first alone
WEIGHT_CACHE = 'w8', 'w8_scale_inv', 'wt8', 'wt8_scale_inv'
# Tensors of an Fp8Linear beside its parameters. They are no buffers, which DistributedDataParallel would
# broadcast from rank 0, and an average of weights (torch.optim.swa_utils) copy one by one.
TENSORS = 'amax', 'scale', *WEIGHT_CACHE
ADDED = 'arithmetic', 'about', 'made', 'cast_of', 'sharded', *TENSORS   # what an nn.Linear has not
LARGEST_SCALE = 2.0**126    # of a tensor of zeros, too; its inverse is the least normal fp32
TENSOR, ROW = (0, 0), (1, 0)  # (rows, columns) of the block that shares a scale; 0 stands for all of them


FORMATS = {  # of a linear's input, weight and gradient
    'hybrid': (E4M3, E4M3, E5M2),
    'e4m3': (E4M3, E4M3, E4M3),
    'e5m2': (E5M2, E4M3, E5M2),
}


class Recipe(NamedTuple):
    """Says which values share a scale. activation: the block of x and dy; weight: of W; weight_dgrad: of W^T.
    Where x has several scales, all of a recipe's are powers of two."""
    activation: tuple = TENSOR
    weight: tuple = TENSOR
    weight_dgrad: tuple = TENSOR
    fp8_wgrad: bool = True          # dW is multiplied in FP8; else in bf16
    delayed: bool = False           # scales come from earlier steps
    multiple: int = 16              # of tokens and features
    capability: tuple = (8, 9)      # the oldest GPU, sm_89
    format: str = 'hybrid'          # the default; finer scales do not need e5m2's range


RECIPES = {
    'tensorwise': Recipe(),
    'delayed': Recipe(delayed=True),
    # torchao's, after Xi et al. 2024; the second is its rowwise_with_gw_hp
    'rowwise': Recipe(ROW, ROW, ROW, format='e4m3'),
    'rowwise_gw_hp': Recipe(ROW, ROW, TENSOR, fp8_wgrad=False, format='e4m3'),
    # the blocks of DeepSeek-V3 (2024, section 3.3); its own scales are not powers of two, ours are
    'blockwise': Recipe((1, 128), (128, 128), (128, 128), multiple=128, capability=(9, 0), format='e4m3'),
    # OCP MX 2023; scales rounded as in Mishra et al. 2025
    'mxfp8': Recipe((1, 32), (1, 32), (1, 32), multiple=32, capability=(10, 0), format='e4m3'),
}


# ------------------------------------------------------------------------------------------------- quantising

class Float8Tensor(NamedTuple):
    """Holds a matrix in FP8: data (R, C), and scale_inv (R / rows, C / columns), fp32, of blocks (rows,
    columns) that share a scale. amax: the largest magnitude before quantisation, of the tensor or of each
    block; None where it is not known. An unquantised tensor has None for all but data."""
    data: torch.Tensor
    scale_inv: torch.Tensor | None
    block: tuple | None
    amax: torch.Tensor | None = None

    def dequantize(self):
        """Return data * scale_inv, fp32."""
        (R, C), (down, across) = self.data.shape, self.scale_inv.shape
        values, factor = values_in(torch.float32, self.data)
        tiles = values.view(down, R // down, across, C // across)
        return tiles.mul_((self.scale_inv * factor).reshape(down, 1, across, 1)).view(R, C)


def on_cpu(x):
    """Return whether a CPU computes with x; tests/fake_cuda.py, which traces for a GPU there, denies it."""
    return x.is_cpu


def values_in(dtype, data):
    """Return FP8 values in fp32 or bf16, which both hold them exactly, and by what to multiply them. torch's
    cast of e4m3 on a CPU takes ten times as long as a shift of the bits to where fp16 has them. NaN becomes
    480 there; its scale_inv is NaN, too."""
    if not on_cpu(data):
        return data.to(dtype), 1
    bits = data.view(torch.int8).to(torch.int16)    # with its sign in all of the first byte
    if data.dtype == E5M2:  # is fp16's first byte
        return bits.mul_(2**8).view(torch.float16).to(dtype), 1
    # one bit less of exponent, whose bias is 7, not 15
    return bits.mul_(2**7).bitwise_and_(~0x4000).view(torch.float16).to(dtype), 2**8


class Quantizer(NamedTuple):
    """Quantises one operand (R, C). block: the (rows, columns) that share a scale; columns run along the sum.
    margin: powers of two left free above the amax."""
    dtype: torch.dtype
    block: tuple
    power_of_two: bool
    margin: int

    @property
    def largest(self):
        return torch.finfo(self.dtype).max

    def __call__(self, x, scale=None):
        """Quantise x (R, C), of any float type, to a Float8Tensor. scale: 0-dim; None takes it from x.

        Finite values are clamped, since a cast beyond the range gives inf or NaN on some devices."""
        rows, columns = (size or whole for size, whole in zip(self.block, x.shape))
        tiles = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # (down, rows, across, columns)
        if self.block != TENSOR:
            amax = tiles.abs().amax((1, 3), keepdim=True)
        elif on_cpu(x):
            low, high = torch.aminmax(x)    # a twentieth of vector_norm's time there
            amax = torch.maximum(high, -low).abs()      # of zeros, too, it is no -0
        else:
            amax = torch.linalg.vector_norm(x, torch.inf)
        if torch.compiler.is_compiling() and amax.dtype == torch.bfloat16 and not on_cpu(x):
            # By its bits, since Triton's code would take the scale from an amax that one kernel rounds and
            # stores, and its inverse from that in a register: the powers of two may differ by a factor of two
            amax = (amax.view(torch.int16).int() << 16).view(torch.float32)
        if scale is None:
            scale = self.scale(amax)
        scale_inv = inverse(scale, amax).reshape(tiles.shape[::2])
        return Float8Tensor(self.codes(tiles, scale).view(x.shape), scale_inv, self.block, amax)

    def codes(self, x, scale):
        """Return x * scale in FP8."""
        data = (x.float() * scale).clamp_(-self.largest, self.largest)
        return data.to(self.dtype, memory_format=torch.contiguous_format)  # of a view, too

    def scale(self, amax):
        """Return the scale, fp32, that brings amax to `margin` powers of two below the largest value."""
        most = 1 / torch.finfo(torch.float32).tiny  # LARGEST_SCALE: a global is a symbol if dynamic=True
        scale = (self.largest / 2**self.margin / amax.float()).clamp(max=most)
        if self.power_of_two:
            # fp32's exponent alone: rounds down to a power of two
            scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
        return scale

    def transpose_of(self, one, x=None, scale=None):
        """Return x^T (C, R), quantised, of x (R, C), which another Quantizer has quantised to `one`.

        Square blocks of this format are copied; on a CPU, data is a view. Else x^T is quantised anew from x.
        Without x, it is quantised from `one`, whose scales are then powers of two, so that only new
        subnormals are rounded once more."""
        if (one.data.dtype, one.block[::-1]) == (self.dtype, self.block):
            data = one.data.t() if on_cpu(one.data) else transpose(one.data)
            return Float8Tensor(data, one.scale_inv.t(), self.block, one.amax)
        if scale is not None:
            scale = scale * (self.largest / torch.finfo(one.data.dtype).max)    # from one range to the other
        return self(transpose(one.dequantize() if x is None else x), scale)

    def both(self, x, transposed, scale=None):
        """Return x quantised for sums over C, and x^T by the Quantizer `transposed` for sums over R; x itself
        where `transposed` is None."""
        one = self(x, scale)
        if transposed is None:
            return one, Float8Tensor(x, None, None)
        return one, transposed.transpose_of(one, x, scale)


def inverse(scale, amax):
    """Return 1 / scale, and NaN where the amax is not finite, so that a bad step is seen: a clamp would hide
    an inf, and a compiler drops `+ 0 * amax`."""
    return (1 / scale).where(amax.isfinite(), torch.nan)


class Quantizers(NamedTuple):
    """Holds the Quantizers of a linear's operands; dy^T has dy's. xt is None where wgrad is not in FP8."""
    x: Quantizer
    w: Quantizer
    dy: Quantizer
    wt: Quantizer
    xt: Quantizer | None


def quantizers(recipe, format, margin=0):
    """Return the Quantizers of a recipe and a format, by name. e5m2's wgrad takes the activation in e4m3,
    since there is no product of e5m2 and e5m2."""
    recipe, (of_input, of_weight, of_grad) = RECIPES[recipe], FORMATS[format]
    quantizer = functools.partial(Quantizer, power_of_two=recipe.activation != TENSOR, margin=margin)
    return Quantizers(
        x=quantizer(of_input, recipe.activation),
        w=quantizer(of_weight, recipe.weight),
        dy=quantizer(of_grad, recipe.activation),
        wt=quantizer(of_weight, recipe.weight_dgrad),
        xt=quantizer(E4M3, recipe.activation) if recipe.fp8_wgrad else None,
    )


def row_major(x):
    """Return a row-major copy. (x.contiguous() is the same, but CPU builds cannot trace it for CUDA.)"""
    return x.clone(memory_format=torch.contiguous_format)


def transpose(x):
    """Return x^T, row-major."""
    return row_major(x.t())


# ------------------------------------------------------------------------------------------------ multiplying

def check_cuda_rules(a, b):
    """Raise ValueError for what CUDA's FP8 units refuse: on every device, but for the layout on a CPU."""
    (M, K), N = a.data.shape, b.data.shape[0]
    if not on_cpu(a.data) and (a.data.stride(1) != 1 or b.data.stride(1) != 1):
        raise ValueError('FP8 operands are contiguous along the sum; '
                         f'strides here are {a.data.stride()} and {b.data.stride()}')
    if M % 16 or K % 16 or N % 16:
        raise ValueError(f'FP8 dimensions are multiples of 16, not {M} x {K} times {K} x {N}')
    if a.data.dtype == E5M2 and b.data.dtype == E5M2:
        raise ValueError('there is no FP8 product of e5m2 and e5m2')


def emulated_mm(a, b, out_dtype, bias=None, fast=False):
    """Return a (M, K) times b (N, K)^T, plus bias (N,): (M, N), multiplied and summed in fp32. This is the
    readable reference for the other products, and how a CPU multiplies."""
    check_cuda_rules(a, b)
    kind = 'cpu' if a.data.is_meta else a.data.device.type
    with torch.autocast(kind, enabled=False):   # it would multiply in bf16
        product = a.dequantize() @ b.dequantize().t()
    if bias is not None:
        product = product + bias.float()
    # torch 2.11's Dynamo gives a Function no gradients where its result is a `to` that changes nothing
    return product if out_dtype == torch.float32 else product.to(out_dtype)


def scaled_mm(a, b, out_dtype, bias=None, fast=False):
    """Return emulated_mm's product by torch's FP8 kernels, for one scale a tensor or a row. bias: in
    out_dtype. fast: sum with fewer bits, which suits sums over features."""
    check_cuda_rules(a, b)
    if a.block == b.block == TENSOR:
        scale_a, scale_b = a.scale_inv.reshape(()), b.scale_inv.reshape(())
    else:  # (M, 1) and (1, N); one scale for all becomes one a row
        scale_a = row_major(a.scale_inv.expand(len(a.data), 1))
        scale_b = row_major(b.scale_inv.expand(len(b.data), 1)).view(1, -1)
    late = bias is not None and out_dtype == torch.float32      # to which CUDA's kernels add none
    product = torch._scaled_mm(
        a.data, b.data.t(),
        scale_a=scale_a, scale_b=scale_b, bias=None if late else bias, out_dtype=out_dtype,
        use_fast_accum=fast)
    return product + bias if late else product


# --------------------------------------------------------------------------------------------------- autograd

class Arithmetic(NamedTuple):
    """Says how a linear quantises and multiplies. mm: emulated_mm, scaled_mm or a function like them."""
    quantizers: Quantizers
    mm: object


INPUT, WEIGHT, GRAD = range(3)      # of delayed scaling's amaxes and scales


def update_amax(running, input=None, weight=None, grad=None):
    """Take amaxes, 0-dim tensors, into delayed scaling's running maxima (3,), if there are any. As they are
    maxima, recomputation in backward changes nothing. They are detached, since an exported graph runs what
    autograd does not see here."""
    if running is not None:
        # a zero for each: Inductor would compute a shared one in a kernel of its own
        seen = [running.new_zeros(()) if amax is None else amax.detach().float()
                for amax in (input, weight, grad)]
        running.copy_(torch.maximum(running, torch.stack(seen)))


def refuse_second_derivative():
    """Raise RuntimeError in a backward pass that is to be differentiated: what it gives would be wrong."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError('FP8 has no gradient of a gradient (create_graph=True): compute it within '
                           'fp8.paused()')


def dgrad_operand(w, is_transposed, quantizers, dy8):
    """Return the Float8Tensor of W^T (K, N), of what forward has kept: that itself, or W. Of W, its data
    depend on dy8, a gradient's, without a changed bit: else a compiler transposes all weights in forward, and
    keeps them until backward."""
    if is_transposed:
        return w
    if torch.compiler.is_compiling() and not on_cpu(w.data):
        nothing = (dy8.scale_inv[0, 0].view(torch.int32) & 0).to(torch.uint8)
        w = w._replace(data=(w.data.view(torch.uint8) ^ nothing).view(w.data.dtype))
    return quantizers.wt.transpose_of(w)


def weight_operands(weight, quantizers, scale, cache):
    """Return a weight's casts (N, K) and (K, N): those in the cache, the tensors of WEIGHT_CACHE, if any.
    Those of a frozen weight have no data (K, N)."""
    w, wt = quantizers.w, quantizers.wt
    if cache:
        return Float8Tensor(*cache[:2], w.block), Float8Tensor(*cache[2:], wt.block)
    return w.both(weight, wt, scale)


class Matmul(torch.autograd.Function):
    """Computes y = x W^T + b in FP8, of x (M, K) bf16, W (N, K) fp32 or bf16, b (N,) or None. Tensorwise,
    with x8 for codes and their scale,

        forward    x8, w8 = cast(x), cast(W)        y = x8 w8^T + b
        backward   dy8 = cast(dy)                   dx = dy8 w8, dW = dy8^T x8, db = sum of dy

    is all; the rest serves other recipes, delayed scaling, cached and frozen weights. A product is mm(a, b),
    which is a b^T: y is mm(x8, w8), dx mm(dy8, w8^T) and dW mm(dy8^T, x8^T), of transposed copies. So ctx
    saves two pairs of codes and scale_inv: w8^T (w8 if W is frozen) and, if W trains, x8^T.

    arithmetic: mm, and the Quantizers that cast. running: None, or delayed scaling's running maxima (3,) of
    input, weight and gradient, which forward and backward update. scale: its scales (3,), of earlier steps;
    with None they come from the tensors. cache: the tensors of WEIGHT_CACHE, or none."""

    @staticmethod
    def forward(ctx, x, weight, bias, arithmetic, running, scale, *cache):
        (q, mm), matrix = arithmetic, cache[0] if cache else weight
        if x.shape[1] != matrix.shape[1]:   # casts would fail first, at their blocks of features
            raise RuntimeError(f'x has {x.shape[1]} features, and the linear takes {matrix.shape[1]}: '
                               f'{len(x)}x{x.shape[1]} and {matrix.shape[1]}x{matrix.shape[0]}')
        ctx.arithmetic, ctx.running = arithmetic, running
        ctx.scale = (None,) * 3 if scale is None else scale
        ctx.weight_dtype = getattr(weight, 'dtype', None)
        # the second of each is transposed, for backward
        x8, xt = q.x.both(x, q.xt, ctx.scale[INPUT])                         # (M, K), (K, M)
        w8, wt = weight_operands(weight, q, ctx.scale[WEIGHT], cache)        # (N, K), (K, N)
        update_amax(running, x8.amax, w8.amax)
        trains = ctx.needs_input_grad[1]    # if not, x^T and dy^T are not used, and a compiler drops them
        ctx.has_wt = wt.data is not None
        ctx.save_for_backward(*(wt if ctx.has_wt else w8)[:2], *(xt[:2] if trains else ()))
        if bias is not None:
            bias = bias.to(x.dtype)
        return mm(x8, w8, x.dtype, bias, fast=True)                          # (M, K) (N, K)^T -> (M, N)

    @staticmethod
    def backward(ctx, dy):
        refuse_second_derivative()
        (q, mm), (wt, wt_scale, *xt) = ctx.arithmetic, ctx.saved_tensors
        dy8, dyt = q.dy.both(dy, q.dy if q.xt else None, ctx.scale[GRAD])   # (M, N), (N, M)
        update_amax(ctx.running, grad=dy8.amax)
        kept = Float8Tensor(wt, wt_scale, q.wt.block if ctx.has_wt else q.w.block)
        wt = dgrad_operand(kept, ctx.has_wt, q, dy8)
        dx, dw, db = mm(dy8, wt, dy.dtype, fast=True), None, None            # (M, N) (K, N)^T -> (M, K)
        if ctx.needs_input_grad[1] and q.xt is None:
            dw = dy.t() @ xt[0]                                              # xt[0] is x itself, (M, K)
        elif ctx.needs_input_grad[1]:
            # CUDA's kernels give fp32 from one scale a tensor, bf16 from finer ones
            out_dtype = ctx.weight_dtype if q.xt.block == TENSOR else dy.dtype
            dw = mm(dyt, Float8Tensor(*xt, q.xt.block), out_dtype)           # (N, M) (K, M)^T -> (N, K)
        if ctx.needs_input_grad[2]:
            db = dy.sum(0, dtype=torch.float32)
        # autograd casts each to the dtype of its parameter
        return dx, dw, db, *[None] * (len(ctx.needs_input_grad) - 3)


# ------------------------------------------------------------------------------------------------- the linear

# How all FP8 linears of the process compute. paused: without FP8, in the dtype of their input, as evaluation
# and sampling do. calibrating: delayed scaling takes its scales from the tensors themselves.
USUAL = {'paused': False, 'calibrating': False}
mode = types.SimpleNamespace(**USUAL)
entered = []    # each set_mode that has not ended, the first to begin first


class set_mode(contextlib.ContextDecorator):
    """Sets attributes of `mode` within a `with` statement, as in set_mode(calibrating=True). Those of several
    threads or generators may end in any order."""

    def __init__(self, **attributes):
        self.attributes = attributes

    def __enter__(self):
        entered.append(self)
        vars(mode).update(self.attributes)

    def __exit__(self, *error):
        entered.remove(self)
        vars(mode).update(ChainMap(*(each.attributes for each in reversed(entered)), USUAL))


def paused():
    """Return a context in which every FP8 linear, of any backend and in all threads, computes in its input's
    dtype."""
    return set_mode(paused=True)


def autocast(x):
    """Return x in the dtype of torch.autocast, which has no effect inside an autograd.Function; fp64 stays,
    as in nn.Linear. Raises TypeError for integers, as nn.Linear does."""
    if not x.is_floating_point():
        raise TypeError(f'a linear multiplies floating-point numbers, not {x.dtype}')
    kind = 'cpu' if x.is_meta else x.device.type    # meta has no autocast
    lower = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def falls_back(x, multiple):
    """Return whether a linear computes this x (..., features) in x's dtype: while paused, without any token,
    and, with one warning in eager mode, where the number of tokens is no multiple of the recipe's. Raises
    TypeError for a nested or sparse x, which cannot be reshaped."""
    if mode.paused or not x.numel():
        return True
    if x.is_nested or x.layout != torch.strided:
        raise TypeError('FP8 casts no nested or sparse tensor: name this linear in fp8.Options(keep=...), or '
                        'compute within fp8.paused()')
    odd = x.numel() // x.shape[-1] % multiple != 0
    if odd and not torch.compiler.is_compiling():   # a warning breaks the graph
        warnings.warn(f'calls whose tokens are no multiple of {multiple} run in {x.dtype}', stacklevel=2)
    return odd


def cast_linear(module, x):
    """Return x W^T + b in x's dtype."""
    bias = None if module.bias is None else module.bias.to(x.dtype)
    return F.linear(x, module.weight.to(x.dtype), bias)


class Held(NamedTuple):
    """Holds what `plain` asks of a module; torch.compile takes it without breaking the graph."""
    weight: torch.Tensor
    bias: torch.Tensor | None


class Fp8Linear(nn.Linear):
    """Computes as an nn.Linear, with its parameters and names, but multiplies matrices in FP8. Its features
    are multiples of the recipe's `multiple`; see falls_back."""

    plain = staticmethod(cast_linear)   # plain(module, x): how it computes in x's dtype

    def start(self, arithmetic, about):
        """Add to an nn.Linear what it has more as an Fp8Linear. about: its recipe, format and backend."""
        self.arithmetic, self.about, self.made = arithmetic, about, type(self)
        self.cast_of = None     # the weight in WEIGHT_CACHE, its version and where it is
        self.sharded = None     # its ShardedWeight, if FSDP2 gathers WEIGHT_CACHE; see sharded.py
        vars(self).update(dict.fromkeys(TENSORS))   # without a cast, each forward pass casts
        if RECIPES[about[0]].delayed:   # fp8.State keeps and saves these; a scale is 1 before the first amax
            self.amax = torch.zeros(3, dtype=torch.float32, device=self.weight.device)
            self.scale = torch.ones_like(self.amax)

    def stop(self):
        """Make the module an nn.Linear again."""
        for name in ADDED:
            delattr(self, name)
        self.__class__ = nn.Linear

    def _apply(self, fn, recurse=True):
        """Move the module. FP8's tensors keep their types, and to_empty gives them defined values."""
        for name, tensor in vars(self).items():
            if name in TENSORS and tensor is not None:
                moved = fn(tensor)
                vars(self)[name] = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
                if tensor.is_meta and not moved.is_meta:
                    moved.fill_(name == 'scale')
        return super()._apply(fn, recurse)

    def __getstate__(self):
        """Return what a copy gets: no cast of a weight that may change, only one that is the weight."""
        casts = {} if self.wt8 is None else dict.fromkeys(WEIGHT_CACHE)
        return {**vars(self), 'cast_of': None, **casts}

    def extra_repr(self):
        return f'{super().extra_repr()}, {", ".join(self.about)}'

    def forward(self, input):
        x = autocast(input)
        # not RECIPES' `multiple`: a compiled model would look it up, in a guard, before each call
        if falls_back(x, max(16, self.arithmetic.quantizers.x.block[1])):
            weight = self.weight    # once: a parametrization computes it
            if weight is None:      # WeightCache has moved it to the host's memory
                weight = self.host_weight.to(x.device, non_blocking=True)
            elif self.sharded and self.w8 is not None:      # the weight is a handle, of -0.0
                weight = weight + Float8Tensor(self.w8, self.w8_scale_inv, TENSOR).dequantize()
            return self.plain(Held(weight, self.bias), x)
        y = Matmul.apply(x.reshape(-1, x.shape[-1]), *self.operands())
        # what is_exporting returns; torch 2.11's Dynamo takes that for True under torch.compile, too
        if torch.compiler._is_exporting_flag:
            y = y.detach()      # its graph is Matmul.forward, whose gradients would be those of scales alone
        # F.linear's own last step: FSDP2 warns of a module that returns a view
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    def operands(self):
        """Return Matmul's arguments after x."""
        weight = self.weight    # once: a parametrization computes it
        if hasattr(weight, '__tensor_flatten__'):       # torchao's quantize_ has replaced it
            raise TypeError(f'FP8 casts no {type(weight).__name__}: call fp8.convert(model, fp8.OFF)')
        cache = [getattr(self, name) for name in WEIGHT_CACHE] if self.is_cast() else ()
        scale = None if mode.calibrating else self.scale
        amax = self.amax if torch.is_grad_enabled() else None   # an evaluation leaves no trace
        return weight, self.bias, self.arithmetic, amax, scale, *cache

    def has_whole_weight(self):
        """Return whether it has all of its weight, which no ranks share, no hook makes and no quantiser has
        replaced."""
        weight = self._parameters.get('weight')
        return weight is not None and not weight.is_inference() and not hasattr(weight, '__tensor_flatten__')

    def is_cast(self):
        """Return whether WEIGHT_CACHE holds the weight as it is now: functional_call may have replaced it,
        load_state_dict its values. Compiled code takes any cast; WeightCache.refresh looks before it runs."""
        if self.w8 is None or self.cast_of is None or torch.compiler.is_compiling():
            return self.w8 is not None      # frozen or gathered: there is no other
        weight, *version = self.cast_of
        return weight is self.weight and version == [weight._version, weight.data_ptr()]
