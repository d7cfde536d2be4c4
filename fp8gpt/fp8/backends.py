"""Defines the FP8 backends, a block each: what a backend has, what it needs, its linear and its quirks.

    native    linear.py's casts and torch's FP8 kernels; torch.compile traces it, and fuses the casts
    te        Transformer Engine's Linear: fused kernels of its own, best without torch.compile
    torchao   torchao's Float8Linear
    emulate   native's casts, multiplied in fp32: the readable reference, on any device

Their linears have nn.Linear's parameters and names. __init__.py asks a backend through the methods of
Backend; a new backend is a new block here. This is the only file that imports transformer_engine or torchao.
"""
import contextlib
import dataclasses
import functools
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .linear import (
    FORMATS, GRAD, RECIPES, ROW, TENSOR, Arithmetic, Fp8Linear, autocast, cast_linear, check_cuda_rules,
    emulated_mm, falls_back, mode, on_cpu, quantizers, row_major, scaled_mm, set_mode, transpose,
    values_in)


class Backend:
    """Answers what __init__.py asks of a backend. A choice is an fp8.Choice.

    A backend defines, beside what is here:
    linear_class(choice): what makes an FP8 linear of (in_features, out_features, bias=)."""
    devices = 'cuda', 'cpu'
    recipes = tuple(RECIPES)
    formats = tuple(FORMATS)
    of_delayed = 'interval', 'amax_history'     # fp8.Options that it takes with the recipe 'delayed' alone
    checkpoint = None       # computes a block again in backward, where torch's function would not serve
    eager = {}              # recipe -> why a model with its linears is not compiled unless that is typed

    def refuses(self, choice):
        """Return what of a choice this backend takes on no machine, 'format=e5m2, only hybrid', or None."""
        for name, taken in ('recipe', self.recipes), ('format', self.formats):
            if getattr(choice, name) not in taken:
                return f'{name}={getattr(choice, name)}, only {", ".join(taken)}'
        if RECIPES[choice.recipe].delayed:
            return None
        return set_option(choice, *self.of_delayed, only=', only delayed')

    def lacks(self, choice, device):
        """Return why a choice does not run on this machine, a clause, or None if it does."""

    def linear(self, choice, in_features, out_features, bias):
        """Return an FP8 linear."""
        return self.linear_class(choice)(in_features, out_features, bias=bias)

    def attach(self, model, choice):
        """Prepare a model for training, once."""

    def forget(self):
        """Drop what the process keeps of models that are gone."""


def set_option(choice, *names, only=''):
    """Return the first of these fp8.Options that is not the default, 'margin=1 with rowwise', or None."""
    for name in names:
        value = getattr(choice.options, name)
        if value != getattr(type(choice.options), name):
            return f'{name}={value} with {choice.recipe}{only}'
    return None


def output_and_gradients(module, inputs, dy=None):
    """Return [module(*inputs), gradients of inputs and parameters], by a gradient of the output: a random
    one, if it is None."""
    y = module(*inputs)
    if dy is None:
        generator = torch.Generator(y.device).manual_seed(0)
        dy = torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device)
    with_gradient = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, with_gradient, dy)]


def distances(found, expected):
    """Return |a - b| / |b| of pairs of tensors, in one; NaN or inf where a value is not finite."""
    return torch.stack([(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(found, expected)])


def in_one_line(error):
    """Return the first line of an exception's text."""
    return (str(error) or repr(error)).splitlines()[0]


def machine_lacks(backend, choice, device):
    """Return why a choice does not run: this GPU is too old for its recipe, or a trial fails. None: it runs.
    """
    name, recipe, capability = choice.recipe, RECIPES[choice.recipe], (0, 0)
    if device.type == 'cuda':
        capability = torch.cuda.get_device_capability(device)
        if capability < recipe.capability:
            needed, found = (f'sm_{major}{minor}' for major, minor in (recipe.capability, capability))
            return (f'the recipe {name} needs a GPU of {needed} or later; '
                    f'{torch.cuda.get_device_name(device)} is {found}: --no_fp8 trains in bf16, '
                    '--device=cpu emulates FP8')
    failed = trial(backend, choice, device)
    if not failed:
        return None
    if recipe.activation == ROW and capability[0] == 12:
        failed += ' (cuBLAS refuses rowwise FP8 on sm_120: pytorch/pytorch#192707)'
    if choice.format != recipe.format:  # cuBLAS multiplies blocks of e5m2 on no GPU
        failed += f'; --fp8_format={recipe.format} is what {name} is made for'
    elif name != 'tensorwise':
        failed += '; --fp8_recipe=tensorwise runs on every GPU with FP8 units'
    return f'an FP8 matrix multiplication {failed}'


@functools.cache
def trial(backend, choice, device):
    """Return '' if the three FP8 multiplications of a backend's linear are right on this device, else what
    is wrong, a clause."""
    try:
        # the caller may be within torch.inference_mode, torch.no_grad, torch.device('meta') or fp8.paused
        with torch.inference_mode(False), torch.enable_grad(), set_mode(calibrating=True, paused=False):
            x = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
            with x.device:
                plain = nn.Linear(256, 256, bias=False, dtype=x.dtype)
                options = dataclasses.replace(choice.options, margin=0)
                linear = backend.linear(dataclasses.replace(choice, options=options), 256, 256, False)
            linear.load_state_dict(plain.state_dict())
            error = distances(*(output_and_gradients(each, [x]) for each in (linear, plain))).max()
        return '' if error < 0.1 else f'is off by {error:.0%} here'
    except Exception as why:  # of others' kernels, a missing one raises anything
        return f'failed here: {in_one_line(why)}'


# ---------------------------------------------------------------------------------------------------- emulate

class Emulate(Backend):
    """Quantises as native does, and multiplies in fp32."""
    mm = staticmethod(emulated_mm)

    def linear(self, choice, in_features, out_features, bias):
        return self.adopt(choice, nn.Linear(in_features, out_features, bias))

    def adopt(self, choice, linear):
        """Make an nn.Linear an FP8 linear, and return it: hooks, other names and parameters stay."""
        made, kinds = Fp8Linear, quantizers(choice.recipe, choice.format, choice.options.margin)
        if choice.kernels == 'triton':
            from .kernels import KernelLinear, WeightQuantizer      # late: Triton takes a while to import
            made, kinds = KernelLinear, kinds._replace(w=WeightQuantizer(*kinds.w))
        linear.__class__ = made
        linear.start(Arithmetic(kinds, self.mm), choice.about)
        return linear

    def head(self, choice, in_features, out_features):
        """Return an FP8 output head, tensorwise and hybrid with every recipe."""
        from .head import Fp8Head   # late: few runs have one
        return Fp8Head(in_features, out_features, self.mm, choice.options.margin)


# ----------------------------------------------------------------------------------------------------- native

SCALING = {  # blocks that share a scale and for which torch has kernels
    (1, 128): F.ScalingType.BlockWise1x128.value,
    (128, 128): F.ScalingType.BlockWise128x128.value,
    (1, 32): F.ScalingType.BlockWise1x32.value,
}


def blocked_layout(operand):
    """Return scale_inv in the layout that cuBLAS wants (its manual, "Scaling factors layouts")."""
    scale_inv = operand.scale_inv
    if operand.block == (1, 128):
        return transpose(scale_inv).t()                                     # (R, C / 128), column by column
    if operand.block == (128, 128):
        in_fours = F.pad(scale_inv, (0, -scale_inv.shape[1] % 4))
        return row_major(in_fours).t()                                      # (C / 128 in fours, R / 128)
    rows, columns = scale_inv.shape
    padded = F.pad(scale_inv, (0, -columns % 4, 0, -rows % 128))
    # tiles of 128 rows x 4 scales, rows 32 apart side by side
    tiles = padded.view(len(padded) // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).to(torch.float8_e8m0fnu)


def block_scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scaling: list[int], swizzle: list[int],
        out_dtype: torch.dtype) -> Tensor:
    """Return a (M, K) times b (K, N), scales in blocked_layout. scaling: F.ScalingType of a and of b.

    Its op is closed to Inductor, whose lowerings of the call differ by version: torch 2.13's raises for
    mxfp8, and takes 1x128 for the older call, which wants its scales in another layout. On fake tensors it is
    the call itself, so torch's own checks hold there too."""
    return torch._scaled_mm_v2(
        a, b,
        scale_a=[scale_a], recipe_a=scaling[:1], swizzle_a=swizzle,
        scale_b=[scale_b], recipe_b=scaling[1:], swizzle_b=swizzle,
        bias=None, out_dtype=out_dtype)


closed_block_scaled_mm = torch.library.custom_op(
    'fp8gpt::block_scaled_mm', block_scaled_mm, mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
closed_block_scaled_mm.register_fake(block_scaled_mm)


def gpu_mm(a, b, out_dtype, bias=None, fast=False):
    """Return scaled_mm's product, also of operands with block scales."""
    if a.block[1] == 0:
        return scaled_mm(a, b, out_dtype, bias, fast)
    check_cuda_rules(a, b)
    product = closed_block_scaled_mm(
        a.data, b.data.t(), blocked_layout(a), blocked_layout(b),
        scaling=[SCALING[a.block], SCALING[b.block]],
        swizzle=[F.SwizzleType.SWIZZLE_32_4_4.value] if a.block == (1, 32) else [],
        out_dtype=out_dtype)
    return product if bias is None else product + bias


HAS_UNITS = bool(torch.cpu.get_capabilities().get('avx512_bf16'))   # for bf16, of this CPU


@torch.library.custom_op('fp8gpt::product_in_bf16', mutates_args=())    # compiled, it has the same bits
def product_in_bf16(a: Tensor, b: Tensor, scale_inv: Tensor, bias: Tensor | None) -> Tensor:
    """Return a (M, K) times b (N, K)^T, both in FP8, times scale_inv, plus bias (N,), by a CPU's units for
    bf16. They add in fp32, as emulated_mm does, in another order and a third of the time."""
    (left, of_a), (right, of_b) = values_in(torch.bfloat16, a), values_in(torch.bfloat16, b)
    return torch.addmm(left[0, :1] if bias is None else bias, left, right.t(), beta=bias is not None,
                       alpha=scale_inv.item() * of_a * of_b)


@product_in_bf16.register_fake
def _(a, b, scale_inv, bias):
    return a.new_empty((len(a), len(b)), dtype=torch.bfloat16)


def cpu_mm(a, b, out_dtype, bias=None, fast=False):
    """Return emulated_mm's product; in bf16, of one scale a tensor, by product_in_bf16."""
    if not HAS_UNITS or out_dtype != torch.bfloat16 or not a.block == b.block == TENSOR:
        return emulated_mm(a, b, out_dtype, bias)
    check_cuda_rules(a, b)
    return product_in_bf16(a.data, b.data, a.scale_inv * b.scale_inv, bias)


def native_mm(a, b, *how, **options):
    """Return emulated_mm's product, on a GPU by torch's FP8 kernels."""
    multiply = cpu_mm if on_cpu(a.data) else gpu_mm
    return multiply(a, b, *how, **options)


TRITON_SERVES = 'is for native\'s tensorwise and delayed in hybrid or e4m3, without lora_rank'


def triton_serves(choice):
    """Return whether our Triton kernels serve a choice: they scale whole tensors, cast both ways in one
    format, and have no blocks with adapters."""
    recipe = RECIPES[choice.recipe]
    return (choice.backend == 'native' and choice.format != 'e5m2'
            and not choice.options.lora_rank
            and recipe.activation == recipe.weight == recipe.weight_dgrad == TENSOR)


class Native(Emulate):
    """Quantises as emulate does, and multiplies by torch's FP8 kernels; on a CPU, as emulate does."""
    mm = staticmethod(native_mm)

    lacks = machine_lacks


# ------------------------------------------------------------------------------------- te: Transformer Engine

TE_RECIPES = {  # ours -> (its class, the function that says whether it runs here)
    'tensorwise': ('Float8CurrentScaling', 'is_fp8_available'),
    'delayed': ('DelayedScaling', 'is_fp8_available'),
    'blockwise': ('Float8BlockScaling', 'is_fp8_block_scaling_available'),
    'mxfp8': ('MXFP8BlockScaling', 'is_mxfp8_available'),
}


def te_autocast(choice):
    """Return the context in which te.Linears compute in FP8."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe
    settings = {'fp8_format': getattr(recipe.Format, choice.format.upper())}
    # an unknown keyword would be ignored in silence, so each recipe gets what it knows and no more
    if RECIPES[choice.recipe].delayed:
        settings |= {'margin': choice.options.margin, 'amax_history_len': choice.options.amax_history}
    return te.autocast(enabled=True, recipe=getattr(recipe, TE_RECIPES[choice.recipe][0])(**settings))


@functools.cache
def te_linear(choice):
    """Return te.Linear with nn.Linear's state dict: a class made late, since te loads only with CUDA."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    class TeLinear(te.Linear):
        plain = staticmethod(cast_linear)
        # Where the weight of its cast is, and its version; None: no cast is kept. WeightCache starts a step,
        # since a fused optimizer leaves the version as it was.
        cast_of = None
        # nn.Module's: portable weights have no _extra_state key, and fp8.State calibrates what is missing
        get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

        def forward(self, input):
            x = autocast(input)
            if falls_back(x, RECIPES[choice.recipe].multiple):
                return self.plain(self, x)
            # te keeps a weight's cast until it is told that the weight has changed (te issue 1047)
            first = None
            if self.cast_of is not None:
                before, self.cast_of = self.cast_of, (self.weight.data_ptr(), self.weight._version)
                first = self.cast_of != before
            inside = FP8GlobalStateManager.is_fp8_enabled()  # opened around the whole model
            with torch.autocast('cuda', x.dtype), contextlib.nullcontext() if inside else te_autocast(choice):
                return super().forward(x, is_first_microbatch=first)

    return TeLinear


class TransformerEngine(Backend):
    """Uses te.Linear, with scales, histories and fused casts of its own. It needs CUDA and te.autocast."""
    linear_class = staticmethod(te_linear)
    devices = 'cuda',
    recipes = tuple(TE_RECIPES)
    formats = 'hybrid', 'e4m3'
    of_delayed = 'margin', 'amax_history'
    eager = dict.fromkeys(TE_RECIPES, 'te breaks the graph at every linear')    # torch < 2.14

    def refuses(self, choice):
        # interval: it makes new scales in each step
        return super().refuses(choice) or set_option(choice, 'interval', 'lora_rank', 'sharded')

    def lacks(self, choice, device):
        try:
            import transformer_engine.pytorch as te
            available, reason = getattr(te, TE_RECIPES[choice.recipe][1])(return_reason=True)
        except (ImportError, OSError, RuntimeError) as why:
            found, hint = in_one_line(why), 'pip install --no-build-isolation -r requirements-te.txt'
            if '.so' in found:  # installed; the machine's cuDNN, beside torch's own, is another version
                hint = ("to have it find torch's, put LD_LIBRARY_PATH=$(python -c "
                        "'import nvidia.cudnn as c; print(c.__path__[0])')/lib before the command")
            return f'Transformer Engine does not load ({found}); {hint}'
        return None if available else reason

    @staticmethod
    def checkpoint(*arguments, **kwargs):
        import transformer_engine.pytorch as te
        return te.checkpoint(*arguments, **kwargs)  # torch's would compute outside te.autocast

    def attach(self, model, choice):
        """Put te.autocast around each forward pass of the whole model that trains in FP8: delayed scaling
        updates its scales at each exit."""
        contexts = contextlib.ExitStack()

        def enter(module, arguments):
            if not mode.paused:
                contexts.enter_context(te_autocast(choice))

        def leave(module, arguments, result):
            contexts.close()

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)

    def forget(self):
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
        FP8GlobalStateManager.reset()   # amaxes of each linear that ever ran, which every step would reduce


# ---------------------------------------------------------------------------------------------------- torchao

TORCHAO_RECIPES = {'tensorwise': 'tensorwise', 'rowwise': 'rowwise', 'rowwise_gw_hp': 'rowwise_with_gw_hp'}


@functools.cache
def torchao_linear(choice):
    """Return what makes torchao's linears, with a pause. Without a GPU they emulate."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear
    # Converts nothing, and brings torchao's patch of Inductor, without which Triton may miscompile the casts
    # (triton-lang/triton#11111).
    convert_to_float8_training(nn.Identity())
    config = Float8LinearConfig.from_recipe_name(TORCHAO_RECIPES[choice.recipe])
    grad_dtype = FORMATS[choice.format][GRAD]
    casts = {name: dataclasses.replace(getattr(config, name), target_dtype=grad_dtype)
             for name in ('cast_config_grad_output', 'cast_config_grad_output_for_grad_weight')}
    config = dataclasses.replace(config, emulate=not torch.cuda.is_available(), **casts)

    class TorchaoLinear(Float8Linear):
        plain = staticmethod(cast_linear)

        def forward(self, input):
            x = autocast(input)
            if falls_back(x, RECIPES[choice.recipe].multiple):
                return self.plain(self, x)
            return super().forward(x.contiguous())      # its rowwise recipes flatten nothing else

        def __reduce_ex__(self, protocol):
            made, arguments, *state = super().__reduce_ex__(protocol)
            if type(self) is TorchaoLinear:     # not one that is sharded: pickle finds no class of a function
                made, arguments = empty_torchao_linear, (choice,)
            return made, arguments, *state

    return functools.partial(TorchaoLinear, config=config)


def empty_torchao_linear(choice):
    """Return a choice's linear of torchao without attributes, which unpickling adds."""
    made = torchao_linear(choice).func
    return made.__new__(made)


class Torchao(Backend):
    """Uses torchao's Float8Linear."""
    linear_class = staticmethod(torchao_linear)
    recipes = tuple(TORCHAO_RECIPES)
    formats = 'hybrid', 'e4m3'
    # as it would ours but for the bits of Quantizer's amax; tensorwise it is off by bf16's rounding alone
    eager = dict.fromkeys(('rowwise', 'rowwise_gw_hp'), "torch.compile doubles some of torchao's rows")

    def refuses(self, choice):
        return super().refuses(choice) or set_option(choice, 'margin', 'lora_rank')

    def lacks(self, choice, device):
        for name in ('torchao', 'torch.utils._pytree'):  # long warnings that do not concern training
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            import torchao.float8  # noqa: F401
        except (ImportError, OSError) as why:
            return f'torchao does not load ({in_one_line(why)}); pip install torchao'
        return machine_lacks(self, choice, device)


BACKENDS = {'native': Native(), 'te': TransformerEngine(), 'torchao': Torchao(), 'emulate': Emulate()}
