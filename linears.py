"""The linears of every FP8 backend: nn.Linear's parameters and names, another multiplication, and a switch to pause it.

State that all linears of a process share is in three globals: they are paused (evaluation and sampling run in bf16), they are
calibrating (delayed scaling takes its first scales from the tensors themselves), and where a step's micro-steps stand.
"""
import contextlib
import dataclasses
import functools

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint

from quantize import FORMATS, Matmul, casts, emulated_mm, scaled_mm

TE_RECIPES = {'tensorwise': 'Float8CurrentScaling', 'delayed': 'DelayedScaling', 'blockwise': 'Float8BlockScaling', 'mxfp8': 'MXFP8BlockScaling'}
TORCHAO_RECIPES = {'tensorwise': 'tensorwise', 'rowwise': 'rowwise', 'rowwise_gw_hp': 'rowwise_with_gw_hp', 'mxfp8': None}

is_paused = False
calibrating = False
first_micro_step = None  # for Transformer Engine's cache of cast weights: True casts anew, False takes the cached, None caches nothing


@contextlib.contextmanager
def paused():
    """Inside, every FP8 linear computes in its input's dtype: evaluation and sampling do not train in FP8's noise."""
    global is_paused
    before, is_paused = is_paused, True
    try:
        yield
    finally:
        is_paused = before


def pause():
    """From here on, as in paused()."""
    global is_paused
    is_paused = True


class Fp8Linear(nn.Linear):
    """nn.Linear, parameters and names included, whose matrix multiplications run in FP8; tokens, too, come in multiples of
    casts.multiple. mm: scaled_mm | emulated_mm."""

    def __init__(self, in_features, out_features, bias=True, recipe='tensorwise', format='hybrid', margin=0, mm=scaled_mm):
        super().__init__(in_features, out_features, bias)
        self.casts, self.mm = casts(recipe, format, margin), mm
        for name in ('amax', 'reach'):  # delayed scaling's state is State's to save
            self.register_buffer(name, torch.zeros(3) if recipe == 'delayed' else None, persistent=False)

    def forward(self, x):
        x = _autocast(x)
        if is_paused:
            return _plain(self, x)
        reach = None if calibrating else self.reach
        y = Matmul.apply(x.reshape(-1, self.in_features), self.weight, self.casts, self.mm, self.amax, reach)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def _autocast(x):
    """x as torch.autocast, which does not see inside an autograd.Function, would have it."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def _plain(module, x):
    return F.linear(x, module.weight.to(x.dtype), None if module.bias is None else module.bias.to(x.dtype))


@functools.cache
def _te_recipe(choice):
    from transformer_engine.common import recipe
    # an unknown keyword would be ignored in silence, so each recipe gets what it knows and no more
    extra = {'margin': choice.margin, 'amax_history_len': choice.amax_history} if choice.recipe == 'delayed' else {}
    return getattr(recipe, TE_RECIPES[choice.recipe])(fp8_format=getattr(recipe.Format, choice.format.upper()), **extra)


@functools.cache
def _te_class(choice):
    """te.Linear with nn.Linear's state dict; a class made late, since te loads only where CUDA is."""
    import transformer_engine.pytorch as te

    class TeLinear(te.Linear):
        # nn.Module's own: portable weights have no _extra_state key, and State calibrates what is missing
        get_extra_state, set_extra_state = nn.Module.get_extra_state, nn.Module.set_extra_state

        def forward(self, x):
            if is_paused:
                return _plain(self, x)
            with torch.autocast('cuda', x.dtype), _te_autocast(choice):
                return super().forward(x, is_first_microbatch=first_micro_step)

    return TeLinear


def _te_autocast(choice):
    """te.autocast, unless State has opened it around the whole model: delayed scaling updates its scales at each exit."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    inside = FP8GlobalStateManager.is_fp8_enabled()
    return contextlib.nullcontext() if inside else te.autocast(enabled=True, recipe=_te_recipe(choice))


@functools.cache
def _torchao_class(choice):
    """torchao's linear with a pause and weights of any dtype. Without a GPU it emulates."""
    if choice.recipe == 'mxfp8':
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

        class TorchaoMxLinear(MXFP8Linear):
            def forward(self, x):
                x = _autocast(x)
                return _plain(self, x) if is_paused else super().forward(x)

        return TorchaoMxLinear

    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
    config = Float8LinearConfig.from_recipe_name(TORCHAO_RECIPES[choice.recipe])
    grads = {name: dataclasses.replace(getattr(config, name), target_dtype=FORMATS[choice.format][2])
             for name in ('cast_config_grad_output', 'cast_config_grad_output_for_grad_weight')}
    config = dataclasses.replace(config, emulate=not torch.cuda.is_available(), **grads)

    class TorchaoLinear(Float8Linear):
        def __init__(self, in_features, out_features, bias=True):
            super().__init__(in_features, out_features, bias=bias, config=config)

        def forward(self, x):
            x = _autocast(x)
            if is_paused:
                return _plain(self, x)
            y = matmul_with_hp_or_float8_args.apply(x, self.weight.to(x.dtype).t(), self.linear_mm_config, config)
            return y if self.bias is None else y + self.bias.to(y.dtype)

    return TorchaoLinear


def make_linear(choice, in_features, out_features, bias=True):
    """An FP8 linear of the chosen backend and recipe."""
    if choice.backend == 'te':
        return _te_class(choice)(in_features, out_features, bias=bias)
    if choice.backend == 'torchao':
        return _torchao_class(choice)(in_features, out_features, bias=bias)
    mm = scaled_mm if choice.backend == 'native' else emulated_mm
    return Fp8Linear(in_features, out_features, bias, choice.recipe, choice.format, choice.margin, mm)


def open_te_autocast(model, choice):
    """te.autocast around each forward pass of the whole model that trains in FP8."""
    import transformer_engine.pytorch as te
    stack = []

    def enter(module, arguments):
        stack.append(contextlib.nullcontext() if is_paused else te.autocast(enabled=True, recipe=_te_recipe(choice)))
        stack[-1].__enter__()

    def leave(module, arguments, result):
        stack.pop().__exit__(None, None, None)  # its False, returned, would replace the result

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


def te_cache_refreshes(choice, device):
    """Whether a changed weight is seen at the next first micro-step, and the cached one until then: forgotten, training would
    go on with stale weights in silence (Transformer Engine issue 1047)."""
    global first_micro_step
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    layer, x, results = make_linear(choice, 128, 128).to(device), torch.ones(128, 128, device=device, dtype=torch.bfloat16), []
    try:
        for factor, first in ((1, True), (2, False), (1, True)):
            with torch.no_grad():
                layer.weight.mul_(factor)
            first_micro_step = first
            results.append(layer(x).float())
            results[-1].sum().backward()
    finally:
        first_micro_step = None
        FP8GlobalStateManager.reset()
    before, cached, fresh = (result.norm() for result in results)
    return bool(cached < 1.5 * before < fresh)


def checkpointer(choice):
    """The function for GPT.checkpoint: recomputes a block's forward pass in backward instead of keeping its activations."""
    if choice.backend == 'te':
        import transformer_engine.pytorch as te
        return te.checkpoint  # plain recomputation would run outside te.autocast
    return torch.utils.checkpoint.checkpoint
