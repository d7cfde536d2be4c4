"""FP8 for training, from outside: models with FP8 linears, and what is kept between steps.

What runs and why is in choice.py, the arithmetic in linear.py, the backends in backends.py. Master
weights, embeddings and norms are not in FP8, the output head only where it is asked for.

On a model of one's own:
    place = fp8.Place(device, tokens=batch_size * sequence_length)
    choice = fp8.choose(fp8.Options(), place)  # or fp8.Options(backend='native', recipe='rowwise')
    fp8.convert(model, choice)                 # nn.Linears become FP8 linears, in place, weights kept
    state = fp8.State(model, choice)           # with the recipe 'delayed', state.calibrate(run) comes next
    ...                                        # in the loop, under torch.autocast(dtype=torch.bfloat16)
    state.after_step()                         # behind optimizer.step()
    print(fp8.summary(model, choice))
"""
import functools
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

from .backends import BACKENDS
from .choice import (  # noqa: F401
    HEAD, OFF, Choice, Options, Place, check_kernels, check_names, choose, compiles, first_that_runs, matches,
    orders, why_bf16)
from .kernels.kept import Keeper, follows
from .linear import (  # noqa: F401
    FORMATS, LARGEST_SCALE, RECIPES, DeviceError, Fp8Linear, OptionError, cast_linear, mode, pause, paused,
    set_mode)


# --------------------------------------------------------------------------------------------------- building

def make_linear(choice, in_features, out_features, bias=True):
    """Return an FP8 linear of the chosen backend and recipe."""
    module = BACKENDS[choice.backend].linear(choice, in_features, out_features, bias)
    module.plain = cast_linear
    return module


def linear_factory(choice, base):
    """Return what GPT calls for each linear: factory(in_features, out_features, bias=, name=) makes an FP8
    module where `choice` says so and the layer can be, else base(...) with its reason in `bf16_reason`. With
    fp8_kernels=triton, factory.norm makes the class of the blocks' norms."""
    def factory(in_features, out_features, bias=True, name=''):
        reason = why_bf16(choice, name, in_features, out_features)
        if reason is None and name == HEAD:
            module = BACKENDS[choice.backend].head(choice, in_features, out_features)
        elif reason is None:
            module = make_linear(choice, in_features, out_features, bias)
        else:
            module = base(in_features, out_features, bias=bias, name=name)
        module.bf16_reason = reason
        module.plain = getattr(base, 'plain', cast_linear)
        return module
    if choice.on and choice.kernels == 'triton':
        from .kernels.modules import kernel_norm    # late: Triton takes a while to import
        factory.norm = kernel_norm
    return factory


def convert(model, choice):
    """Puts FP8 linears in the place of a model's nn.Linears and of transformers' Conv1Ds, with the same
    parameters. What stays, whatever its class, gets a `bf16_reason`: so does the output_layer. Raises
    OptionError where none becomes FP8, though FP8 is on."""
    lookup, output = (nn.Embedding, nn.EmbeddingBag), output_layer(model)
    for name, module in list(model.named_modules()):
        matrix = any(p.dim() == 2 for p in module.parameters(recurse=False))
        if not matrix or isinstance(module, lookup) or hasattr(module, 'bf16_reason'):
            continue
        lies = type(module) is conv1d()
        if type(module) is not nn.Linear and not lies:
            module.bf16_reason = f'{type(module).__module__}.{type(module).__name__} is not nn.Linear itself'
            continue
        shape = module.weight.shape if lies else module.weight.t().shape    # (in_features, out_features)
        module.bf16_reason = why_bf16(choice, HEAD if name == output else name, *shape)
        if module.bf16_reason is None:
            new = make_linear(choice, *shape, module.bias is not None).to(module.weight.device)
            if lies:
                new.__class__ = lying(type(new))
            new._parameters |= module._parameters
            new.bf16_reason = None
            parent, _, child = name.rpartition('.')
            setattr(model.get_submodule(parent), child, new)
    if choice.on and not fp8_linears(model):
        raise OptionError(f'no linear became FP8: {in_bf16(model) or "the model has no nn.Linear"}')


def output_layer(model):
    """The name of the linear whose outputs are the classes' logits: the last one that shares an embedding's
    weight, has as many outputs as the model's config has classes, or the name of such; None."""
    config = getattr(model, 'config', None)
    widths = {getattr(config, name, None) for name in ('vocab_size', 'num_labels', 'num_classes')}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = {HEAD, 'head', 'heads', 'classifier', 'score', 'output_projection', 'fc_out'}
    found = None
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (
                id(module.weight) in tables or module.out_features in widths or name.split('.')[-1] in names):
            found = name
    return found


def conv1d():
    """transformers' linear whose weight lies (in_features, out_features), as GPT-2 has it, where it is
    loaded."""
    return getattr(sys.modules.get('transformers.pytorch_utils'), 'Conv1D', None)


@functools.cache
def lying(kind):
    """A class of FP8 linears that compute with a view of their parameter, which lies (in_features,
    out_features)."""
    class Lying(kind):
        @property
        def weight(self):
            return self._parameters['weight'].t()

    return Lying


def checkpointer(choice):
    """The function for GPT's checkpoint: recomputes a block's forward pass in backward, in FP8."""
    return BACKENDS[choice.backend if choice.on else 'emulate'].checkpoint


def fp8_linears(model):
    """name -> module of the linears that run in FP8."""
    return {name: m for name, m in model.named_modules() if getattr(m, 'bf16_reason', 'none of ours') is None}


def reasons(model):
    """name -> bf16_reason of the linears."""
    return {name: m.bf16_reason for name, m in model.named_modules() if hasattr(m, 'bf16_reason')}


def plain_linears(model):
    """name -> bf16_reason of the linears that are not in FP8."""
    return {name: reason for name, reason in reasons(model).items() if reason}


def in_bf16(model):
    """The linears that are not in FP8, by their reason; '' where there is none."""
    by_reason, others = {}, []
    for name, reason in plain_linears(model).items():
        by_reason.setdefault(reason, []).append(name or 'the model')
    for reason, names in by_reason.items():
        more = f' and {len(names) - 3} more' if len(names) > 3 else ''
        others.append(f'{", ".join(names[:3])}{more}: {reason}')
    return '; '.join(others)


def coverage(model):
    """(share of the weights in matrices, share of the FLOPs that multiply by them) that is in FP8."""
    def size(module):
        return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() == 2)
    eight = sum(m.in_features * m.out_features for m in fp8_linears(model).values())  # frozen ones have none
    rest = sum(size(model.get_submodule(name)) for name in plain_linears(model))
    frozen = eight - sum(map(size, fp8_linears(model).values()))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2) + frozen
    return eight / matrices, eight / (eight + rest)


def summary(model, choice):
    """What is in FP8, by what, how many linears, and in further rows more of that and why the others are
    not."""
    if not choice.on or not fp8_linears(model):
        return f'FP8 Training Off: {choice.reason if not choice.on else in_bf16(model)}'
    count, plain = f'{len(fp8_linears(model))} of {len(reasons(model))}', list(plain_linears(model))
    line = f'FP8 Training Enabled: {count} linears, {choice.recipe} ({choice.backend})'
    others = in_bf16(model)
    if plain and choice.head:  # it was asked for, so the reason is wanted
        line += f', bf16: {others}'
    elif plain:
        line += f', bf16: {plain[-1]}' + (f' and {len(plain) - 1} more' if len(plain) > 1 else '')
    line += f'\n          {choice.backend}: {choice.reason}, {choice.format}'
    if choice.margin:
        line += f', margin {choice.margin}'
    if choice.kernels == 'triton':
        line += ', kernels of its own'
    weights, flops = coverage(model)
    line += f'; {weights:.0%} of the weights in matrices, {flops:.0%} of the FLOPs by them'
    return f'{line}\n          bf16: {others}' if others else line


# ------------------------------------------------------------------------------------------------------ state

class State:
    """What FP8 keeps between steps: delayed scaling's amax histories and scales, a backend's cached weights.

    warning: a line to say, or None. Raises OptionError where choice.keep names no linear of the model. On
    several ranks, all make one."""

    def __init__(self, model, choice):
        names = list(reasons(model))
        for pattern in choice.keep:
            if not any(matches(name, pattern) for name in names):
                raise OptionError(f'fp8_keep: no linear is called {pattern!r}; '
                                   f'they are called {", ".join(names[:4])}, ...')
        self.choice, self.steps, self.divisor = choice, 0, 1
        delayed = choice.on and RECIPES[choice.recipe].delayed
        self.needs_calibration = bool(delayed and fp8_linears(model))
        # a backend with linears of its own keeps its own histories
        self.layers = {name: m
                       for name, m in fp8_linears(model).items() if delayed and isinstance(m, Fp8Linear)}
        length = choice.amax_history if self.layers else 0
        device = next(model.parameters()).device
        self.history = torch.zeros(length, len(self.layers), 3, device=device)
        self.caches, self.warning = False, None
        if choice.on:
            self.caches, self.warning = BACKENDS[choice.backend].attach(model, choice)
        self.keeper = Keeper(model)
        if not all(map(follows, self.keeper.linears[:1])):
            raise RuntimeError('FP8 would train on stale weights: their kept casts do not follow them')

    def micro_step(self, number, count):
        """Before micro-step `number` of `count`: where the backend can, weights are cast in the first and
        kept for the others."""
        if number == 0:
            self.keeper.new_step(count)
        if self.caches:
            BACKENDS[self.choice.backend].micro_step(number, count)

    def calibrate(self, run):
        """Fills delayed scaling's histories before the first step. run(): one forward and backward pass,
        whose gradients the caller drops, with scales from the tensors themselves; a backend that keeps its
        own histories knows no such mode, and settles in two passes."""
        if not RECIPES[self.choice.recipe].delayed:
            return
        self.forget()  # of a search for the batch size, say, without scales
        self.history.zero_()    # of an earlier run of the same model, as bench.py's
        self.steps = 0
        with set_mode(calibrating=True):
            for _ in range(1 if self.layers else 2):
                run()
        self._update_scales()
        self.needs_calibration = False

    def after_step(self):
        """Once per optimizer step: the amaxes since the last go into the history, and every fp8_interval
        steps new scales are made of its largest, on all ranks alike. Raises RuntimeError where calibrate was
        forgotten."""
        self.micro_step(0, 1)
        if mode.paused:
            return
        if self.needs_calibration:
            raise RuntimeError('delayed scaling has no scales before its calibration: '
                               'call State.calibrate(run) before the first step')
        self._update_scales()

    def forget(self):
        """Drops the amaxes seen since the last step."""
        for module in self.layers.values():
            module.amax.zero_()

    @torch.no_grad()
    def _update_scales(self):
        if not self.layers:
            return
        amaxes, scales = ([getattr(m, name) for m in self.layers.values()] for name in ('amax', 'scale'))
        amax = torch.stack(amaxes)                                     # (layers, 3)
        if dist.is_initialized():
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        now, before = (step % len(self.history) for step in (self.steps, self.steps - 1))
        # a step that was not finite is skipped, and leaves no mark here either
        self.history[now] = amax.where(amax.isfinite(), self.history[before])
        if self.steps % self.choice.interval == 0:
            largest = self.history.amax(0)
            ranges = torch.tensor([torch.finfo(dtype).max for dtype in FORMATS[self.choice.format]])
            new = ranges.to(largest) * (1 / (largest * 2**self.choice.margin))
            new = new.clamp(max=LARGEST_SCALE).where(largest > 0, torch.stack(scales))
            torch._foreach_copy_(scales, list(new.unbind()))
        torch._foreach_zero_(amaxes)
        self.steps += 1

    def state_dict(self):
        """What a checkpoint keeps beside the weights; {} where there is nothing."""
        if not self.layers:
            return {}
        scale = torch.stack([m.scale for m in self.layers.values()])
        return {'layers': list(self.layers), 'steps': self.steps, 'history': self.history, 'scale': scale,
                'divisor': self.divisor}

    def load(self, saved, divisor=1):
        """Takes over a state_dict of the same layers, history length and divisor; any other, or None, leaves
        the calibration to do. divisor: what a micro-step's loss is divided by, and so its gradients: with
        another number of ranks or micro-steps they are of another size."""
        self.divisor = divisor
        self.forget()
        self.micro_step(0, 1)  # a search for the batch size leaves amaxes and casts
        if not self.layers or not saved:
            return
        if saved['layers'] != list(self.layers) or saved['divisor'] != divisor:
            return
        if saved['history'].shape != self.history.shape or 'scale' not in saved:
            return
        self.history.copy_(saved['history'])
        self.steps, self.needs_calibration = saved['steps'], False
        for module, scale in zip(self.layers.values(), saved['scale']):
            module.scale.copy_(scale)
