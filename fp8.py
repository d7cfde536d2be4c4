"""FP8 for training: which backend and recipe run and why, which layers, and what is kept from step to step.

Backends, all with nn.Linear's parameters and names:
    native   quantize.py's casts and torch's FP8 kernels; traceable by torch.compile, so that casts fuse into their neighbours
    te       Transformer Engine's Linear: fused kernels of its own, best without torch.compile
    torchao  torchao's Float8Linear
    emulate  native's casts, multiplied in fp32: the readable reference, on any device
The modules are in linears.py, recipes, formats and arithmetic in quantize.py, what is measured in measure.py. Master weights,
embeddings, norms and the output head are not in FP8.

On a model of one's own:
    choice = fp8.choose(True, 'auto', device, torch.bfloat16, tokens=batch_size * sequence_length)
    fp8.convert(model, choice)                 # nn.Linears become FP8 linears, in place, weights kept
    state = fp8.State(model, choice)           # with fp8_recipe delayed, state.calibrate(run) comes next
    ...                                        # in the loop, under torch.autocast(dtype=torch.bfloat16)
    state.after_step()                         # behind optimizer.step()
    print(fp8.summary(model, choice))
"""
import dataclasses
import fnmatch
import functools
import logging

import torch
import torch.distributed as dist
import torch.nn as nn

from configurator import MachineError, SettingError
import linears
from linears import TE_RECIPES, TORCHAO_RECIPES, Fp8Linear, checkpointer, make_linear, pause, paused  # noqa: F401
from quantize import AMAX_FLOOR, FORMATS, TABLE, casts, linear_backward, linear_forward, scaled_mm

BACKENDS = ('auto', 'te', 'torchao', 'native', 'emulate', 'off')
RECIPES = tuple(TABLE)
KEPT = {'lm_head': 'the output head decides the loss, and stays bf16'}
TE_COMPILES = (2, 14)               # the first torch on which te.Linear does not break the graph


# ----------------------------------------------------------------------------------------------- which backend

@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs. backend: 'native' | 'te' | 'torchao' | 'emulate' | 'off'. reason: why this one, a clause. keep: names of
    linears that stay bf16. The rest: see the settings of train_fp8.py."""
    backend: str
    reason: str
    recipe: str = 'tensorwise'
    format: str = 'hybrid'
    margin: int = 0
    interval: int = 1
    amax_history: int = 1024
    keep: tuple = ()

    @property
    def on(self):
        return self.backend != 'off'


OFF = Choice('off', 'FP8 is switched off')


def choose(use_fp8, backend, device, dtype, tokens, compiling=False, recipe='auto', format='auto', margin=0, interval=1, amax_history=1024,
           keep='', linears=()):
    """What will run. `use_fp8`, backend 'auto' and recipe 'auto' are requests: what cannot run becomes 'off', with the reason.
    Any other backend or recipe is an order: it runs, or raises ValueError (there is no such thing), RuntimeError (not on
    this machine) or ImportError (a package is missing).

    device: torch.device. dtype: what activations are computed in. tokens: rows of a micro-batch, batch_size * block_size.
    compiling: whether torch.compile is on, which decides auto's order. keep: names, separated by commas. linears: (name,
    in_features, out_features) of the model's, if one of them at least must be in FP8."""
    for name, value, allowed in (('fp8_backend', backend, BACKENDS), ('fp8_recipe', recipe, ('auto', *RECIPES)),
                                 ('fp8_format', format, ('auto', *FORMATS))):
        if value not in allowed:
            raise SettingError(f'{name} is one of {", ".join(allowed)}, not {value!r}')
    if backend == 'off' or not use_fp8:
        if backend not in ('auto', 'off'):
            raise SettingError(f'use_fp8 is off, but fp8_backend={backend} is an order: leave one of them out')
        return OFF
    orders = [f'{name}={value}' for name, value in (('fp8_backend', backend), ('fp8_recipe', recipe)) if value != 'auto']
    recipe = 'tensorwise' if recipe == 'auto' else recipe
    if format == 'auto':  # fine scales leave e5m2's range without use
        format = 'hybrid' if recipe in ('tensorwise', 'delayed') else 'e4m3'
    if recipe != 'delayed' and (interval != 1 or amax_history != 1024):
        raise SettingError(f'fp8_interval and fp8_amax_history are for amaxes of earlier steps, which {recipe} does not use: --fp8_recipe=delayed does')
    if margin < 0 or interval < 1 or amax_history < 1:
        raise SettingError('fp8_margin is at least 0, fp8_interval and fp8_amax_history at least 1')
    settings = {'recipe': recipe, 'format': format, 'margin': margin, 'interval': interval, 'amax_history': amax_history,
                'keep': split(keep)}

    multiple = casts(recipe, format).multiple
    reasons = [why_bf16(Choice('native', '', **settings), *linear) for linear in linears]
    problem = None if None in reasons or not linears else SettingError(f'no linear of this model can be in FP8: {reasons[0]}')
    if dtype != torch.bfloat16:
        problem = SettingError(f'FP8 needs dtype=bf16 around it, not {dtype}')
    elif tokens % multiple:
        problem = SettingError(f'batch_size x block_size = {tokens} is not a multiple of {multiple}')
    elif backend == 'auto' and device.type != 'cuda':
        problem = MachineError('there is no CUDA GPU, and a CPU only emulates FP8: --fp8_backend=native asks for that by name')
    problems, auto = {}, ('native', 'te', 'torchao') if compiling else ('te', 'native', 'torchao')
    for candidate in () if problem else auto if backend == 'auto' else (backend,):
        problems[candidate] = _why_not(candidate, recipe, format, margin, device)
        if problems[candidate]:
            continue
        if backend != 'auto':
            reason = 'as ordered' + (', on a CPU: FP8\'s numerics, without its speed' if device.type == 'cpu' else '')
        elif candidate == auto[0]:
            reason = 'auto: torch.compile fuses its casts' if compiling else 'auto: without torch.compile, its kernels are the fused ones'
        else:
            reason = f'auto: {problems[auto[0]]}'
        return Choice(candidate, reason, **settings)
    problem = problem or problems.get('native') or problems[candidate]
    if not orders:
        return Choice('off', str(problem))
    raise type(problem)(f'{" ".join(orders)}: {problem}')


def _why_not(backend, recipe, format, margin, device):
    """None where the backend runs the recipe here, else an exception that says why not."""
    if backend == 'te':
        return _why_not_te(recipe, format, margin, device)
    if backend == 'torchao':
        return _why_not_torchao(recipe, format, margin, device)
    if backend == 'emulate':
        return None
    if device.type != 'cuda':
        problem = 'a CPU\'s torch._scaled_mm has no block scales' if recipe in ('blockwise', 'mxfp8') else _trial(device, recipe, format)
        return MachineError(f'{problem}; --fp8_backend=emulate has {recipe}') if problem else None
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return MachineError(f'{torch.cuda.get_device_name(device)} (sm_{capability[0]}{capability[1]}) has no FP8 units; sm_89 and later do')
    if recipe == 'mxfp8' and capability < (10, 0):
        return MachineError(f'mxfp8 needs sm_100 (B200) or later, here is sm_{capability[0]}{capability[1]}; '
                            '--fp8_recipe=rowwise and blockwise are near')
    problem = _trial(device, recipe, format)
    return MachineError(problem) if problem else None


@functools.cache
def _trial(device, recipe, format):
    """None where a linear's three FP8 matrix multiplications come out right on this device, else the reason, a clause."""
    kit, generator = casts(recipe, format), torch.Generator(device).manual_seed(0)
    x, w, dy = (torch.randn(256, 256, device=device, generator=generator) for _ in range(3))
    try:
        y, *saved = linear_forward(x.bfloat16(), w, kit, scaled_mm)
        results = (y, *linear_backward(dy.bfloat16(), *saved, kit, scaled_mm, torch.float32))
        error = max(((a - b).norm() / b.norm()).item() for a, b in zip(results, (x @ w.t(), dy @ w, dy.t() @ x)))
    except (RuntimeError, ValueError, NotImplementedError) as why:
        return f'an FP8 matrix multiplication failed here: {str(why).splitlines()[0]}'
    return None if error < 0.1 else f'an FP8 matrix multiplication is off by {error:.0%} here'


def _why_not_te(recipe, format, margin, device):
    if recipe not in TE_RECIPES:
        return SettingError(f'Transformer Engine has no {recipe} recipe, only {", ".join(TE_RECIPES)}; --fp8_backend=native has it')
    if format == 'e5m2':
        return SettingError('Transformer Engine does not train in e5m2 throughout: --fp8_format=hybrid takes it for gradients')
    if margin and recipe != 'delayed':
        return SettingError(f'Transformer Engine takes a margin in delayed scaling only: --fp8_backend=te --fp8_recipe=delayed --fp8_margin={margin}')
    if device.type != 'cuda':
        return MachineError('Transformer Engine needs a CUDA GPU; --fp8_backend=native and emulate run anywhere')
    try:
        import transformer_engine.pytorch as te
        check = {'blockwise': 'is_fp8_block_scaling_available', 'mxfp8': 'is_mxfp8_available'}.get(recipe, 'is_fp8_available')
        available, reason = getattr(te, check)(return_reason=True)
    except (ImportError, OSError, RuntimeError) as why:
        return MachineError(f'Transformer Engine does not load ({str(why).splitlines()[0]}); pip install --no-build-isolation -r requirements-te.txt')
    return None if available else MachineError(reason)


def _why_not_torchao(recipe, format, margin, device):
    if recipe not in TORCHAO_RECIPES:
        return SettingError(f'torchao has no {recipe} recipe, only {", ".join(TORCHAO_RECIPES)}; --fp8_backend=native or te')
    if format == 'e5m2' or recipe == 'mxfp8' and format != 'e4m3':
        return SettingError(f'torchao\'s {recipe} does not train in {format}: --fp8_format={"e4m3" if recipe == "mxfp8" else "hybrid"}')
    if margin:
        return SettingError(f'torchao has no margin: --fp8_backend=native --fp8_margin={margin}')
    for name in ('torchao', 'torch.utils._pytree'):  # which tell at length, at import, what does not concern training
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import torchao.float8  # noqa: F401
    except (ImportError, OSError) as why:
        return MachineError(f'torchao does not load ({str(why).splitlines()[0]}); pip install torchao')
    needed = (10, 0) if recipe == 'mxfp8' else (8, 9)
    if device.type == 'cuda' and torch.cuda.get_device_capability(device) < needed or recipe == 'mxfp8' and device.type != 'cuda':
        return MachineError(f'torchao\'s {recipe} needs a GPU of sm_{needed[0]}{needed[1]} or later')
    return None


def compiles(choice, compiling, setting):
    """(whether to torch.compile, a line to say or None). compiling: whether it would be in bf16; setting: 'auto', 'on', 'off'."""
    version = tuple(int(part) for part in torch.__version__.split('.')[:2])
    if not compiling or choice.backend != 'te' or version >= TE_COMPILES:
        return compiling, None
    why = f'Transformer Engine breaks the graph at every linear on torch < {TE_COMPILES[0]}.{TE_COMPILES[1]}'
    return (False, f'compile is off: {why}') if setting == 'auto' else (True, f'compile=on, but {why}: --compile=off is faster')


def why_bf16(choice, name, in_features, out_features):
    """None where this linear runs in FP8, else the reason, a clause. name: as GPT gives it, 'h.0.attn.qkv'."""
    if not choice.on:
        return choice.reason
    if name in KEPT:
        return KEPT[name]
    if any(_matches(name, pattern) for pattern in choice.keep):
        return 'kept by fp8_keep'
    multiple = casts(choice.recipe, choice.format).multiple
    if in_features % multiple or out_features % multiple:
        return f'{in_features} -> {out_features} is not in multiples of {multiple}'
    return None


def split(keep):
    """'a, b' -> ('a', 'b')."""
    return tuple(name.strip() for name in keep.split(',') if name.strip())


def _matches(name, pattern):
    """'h.3' and 'attn.proj' are parts of the name h.3.attn.proj; so are patterns such as 'h.*.attn.proj'."""
    return fnmatch.fnmatchcase(name, pattern) or f'.{pattern}.' in f'.{name}.'


# ----------------------------------------------------------------------------------------------- building

def linear_factory(choice, base):
    """What GPT calls for each linear: factory(in_features, out_features, bias=, name=) -> FP8 module where `choice` says
    so and the layer can be, else base(...) with its reason in `bf16_reason`."""
    def factory(in_features, out_features, bias=True, name=''):
        reason = why_bf16(choice, name, in_features, out_features)
        if reason is None:
            module = make_linear(choice, in_features, out_features, bias)
        else:
            module = base(in_features, out_features, bias=bias, name=name)
        module.bf16_reason = reason
        return module
    return factory


def convert(model, choice):
    """Puts FP8 linears in the place of a model's nn.Linears, with the same weights; those that stay get a `bf16_reason`."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            module.bf16_reason = why_bf16(choice, name, module.in_features, module.out_features)
            if module.bf16_reason is None:
                new = make_linear(choice, module.in_features, module.out_features, module.bias is not None).to(module.weight.device)
                new.weight, new.bias, new.bf16_reason = module.weight, module.bias, None
                parent, _, child = name.rpartition('.')
                setattr(model.get_submodule(parent), child, new)


def fp8_linears(model):
    """name -> module of the linears that run in FP8."""
    return {name: m for name, m in model.named_modules() if getattr(m, 'bf16_reason', 'none of ours') is None}


def summary(model, choice):
    """One line: what is in FP8, by what, how many linears, and why the others are not."""
    if not choice.on:
        return f'FP8 Training Off: {choice.reason}'
    reasons = {name: m.bf16_reason for name, m in model.named_modules() if hasattr(m, 'bf16_reason')}
    plain = {}
    for name, reason in reasons.items():
        if reason is not None:
            plain.setdefault(reason, []).append(name)
    others = '; '.join(f'{", ".join(names[:3])}{f" and {len(names) - 3} more" if len(names) > 3 else ""}: {reason}'
                       for reason, names in plain.items())
    count = sum(reason is None for reason in reasons.values())
    return (f'FP8 Training Enabled: {count} of {len(reasons)} linears, {choice.backend} ({choice.reason}), {choice.recipe}, {choice.format}'
            + (f', margin {choice.margin}' if choice.margin else '') + (f' | bf16: {others}' if others else ''))


# ----------------------------------------------------------------------------------------------- state

class State:
    """What FP8 keeps between steps: delayed scaling's amax histories and scales, Transformer Engine's cached weights.

    Raises ValueError where choice.keep names no linear of the model. On several ranks, all make one."""

    def __init__(self, model, choice):
        names = [name for name, m in model.named_modules() if hasattr(m, 'bf16_reason')]
        for pattern in choice.keep:
            if not any(_matches(name, pattern) for name in names):
                raise SettingError(f'fp8_keep: no linear is called {pattern!r}; they are called {", ".join(names[:4])}, ...')
        delayed = fp8_linears(model) if choice.recipe == 'delayed' else {}
        self.choice, self.layers, self.steps, self.caches = choice, {n: m for n, m in delayed.items() if isinstance(m, Fp8Linear)}, 0, False
        self.needs_calibration = bool(delayed)
        device = next(model.parameters()).device
        self.history = torch.zeros(choice.amax_history if self.layers else 0, len(self.layers), 3, device=device)
        self.warning = None
        if choice.backend == 'te':
            if choice.interval != 1:
                self.warning = f'Transformer Engine has no fp8_interval any more: {choice.interval} is without effect, scales are new each step'
            linears.open_te_autocast(model, choice)
            self.caches = linears.te_cache_refreshes(choice, device)
            if not self.caches:
                self.warning = 'Transformer Engine\'s cache of cast weights does not refresh here: weights are cast at each micro-step'

    def micro_step(self, number, count):
        """Before micro-step `number` of `count`: weights are cast in the first and kept for the others, where te can."""
        linears.first_micro_step = number == 0 if self.caches and count > 1 else None

    def calibrate(self, run):
        """Fills delayed scaling's histories before the first step: run() is one forward and backward pass, whose gradients the
        caller drops, with scales from the tensors themselves; Transformer Engine, which knows no such mode, settles in two."""
        if self.choice.recipe != 'delayed':
            return
        self.forget()  # of a search for the batch size, say, without scales
        linears.calibrating = True
        try:
            for _ in range(1 if self.layers else 2):
                run()
        finally:
            linears.calibrating = False
        self._update_scales()
        self.needs_calibration = False

    def after_step(self):
        """Once per optimizer step: the amaxes seen since the last go into the history, and every fp8_interval steps new scales
        are made of its largest, on all ranks alike. Raises RuntimeError where calibrate was forgotten."""
        linears.first_micro_step = None
        if linears.is_paused:
            return
        if self.needs_calibration:
            raise RuntimeError('delayed scaling has no scales before its calibration: call State.calibrate(run) before the first step')
        self._update_scales()

    def forget(self):
        """Drops the amaxes seen since the last step."""
        for module in self.layers.values():
            module.amax.zero_()

    @torch.no_grad()
    def _update_scales(self):
        if not self.layers:
            return
        amax, reach = ([getattr(m, name) for m in self.layers.values()] for name in ('amax', 'reach'))
        seen = torch.stack(amax)                                       # (layers, 3)
        if dist.is_initialized():
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        # a step that was not finite is skipped, and leaves no mark here either
        self.history[self.steps % len(self.history)] = seen.where(seen.isfinite(), self.history[(self.steps - 1) % len(self.history)])
        if self.steps % self.choice.interval == 0:
            largest = self.history.amax(0)
            new = 1 / (largest.clamp(min=AMAX_FLOOR) * 2**self.choice.margin)
            torch._foreach_copy_(reach, list(new.where(largest > 0, torch.stack(reach)).unbind()))
        torch._foreach_zero_(amax)
        self.steps += 1

    def state_dict(self, divisor=1):
        """What a checkpoint keeps beside the weights; {} where there is nothing. divisor: what a micro-step's loss is divided by,
        and so its gradients."""
        if not self.layers:
            return {}
        reach = torch.stack([m.reach for m in self.layers.values()])
        return {'layers': list(self.layers), 'steps': self.steps, 'history': self.history, 'reach': reach, 'divisor': divisor}

    def load(self, saved, divisor=1):
        """Takes over a state_dict of the same layers, history length and divisor (another number of ranks or micro-steps has
        gradients of another size); any other, or None, leaves the calibration to do."""
        if (self.layers and saved and (saved['layers'], saved['divisor']) == (list(self.layers), divisor)
                and saved['history'].shape == self.history.shape):
            self.history.copy_(saved['history'])
            self.steps, self.needs_calibration = saved['steps'], False
            for module, reach in zip(self.layers.values(), saved['reach']):
                module.reach.copy_(reach)
