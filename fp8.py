"""FP8 for training, from outside: which backend and recipe run and why, which linears, and what is kept
between steps.

The arithmetic is in fp8_linear.py, the backends are in backends.py, what is measured is in measure.py. Master
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
import dataclasses
import fnmatch

import torch
import torch.distributed as dist
import torch.nn as nn

from backends import BACKENDS
from configurator import MachineError, SettingError, UserError
from fp8_kernels.kept import Keeper
from fp8_linear import (  # noqa: F401
    FORMATS, LARGEST_SCALE, RECIPES, TENSOR, Fp8Linear, during, mode, pause, paused)

HEAD = 'lm_head'
FIRST = 'auto:'     # before a backend or a recipe: a request for it


# ---------------------------------------------------------------------------------------------- which backend

@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked for: train_fp8.py's settings of these names, most with fp8_ before them. 'auto' is a
    request, any other backend or recipe an order. keep: names, or parts of names, of linears that stay
    bf16."""
    backend: str = 'auto'
    recipe: str = 'auto'
    format: str = 'auto'
    margin: int = 0
    interval: int = 1
    amax_history: int = 1024
    keep: tuple = ()
    kernels: str = 'auto'
    head: bool = False
    use_fp8: bool = True

    @classmethod
    def of(cls, settings):
        """From a script's settings, as many of them as it has. fp8_keep='auto', which measure.py settles,
        keeps none."""
        values = {}
        for field in dataclasses.fields(Options):
            name = field.name if field.name in settings else f'fp8_{field.name}'
            if name in settings:
                values[field.name] = settings[name]
        names = values.pop('keep', '')
        return cls(**values, keep=split('' if names == 'auto' else names))


@dataclasses.dataclass(frozen=True)
class Choice(Options):
    """What runs: backend 'native' | 'te' | 'torchao' | 'emulate' | 'off'. reason: why this one, a clause."""
    backend: str = 'off'
    recipe: str = 'tensorwise'
    format: str = 'hybrid'
    reason: str = 'FP8 is switched off'

    @classmethod
    def of(cls, options, backend, reason):
        """Of Options whose names are known: 'auto' is tensorwise, in the format that the recipe wants."""
        recipe = cls.recipe if options.recipe == 'auto' else options.recipe.removeprefix(FIRST)
        format = RECIPES[recipe].format if options.format == 'auto' else options.format
        settled = {'recipe': recipe, 'format': format, 'backend': backend, 'reason': reason}
        return cls(**{**vars(options), **settled})

    @property
    def on(self):
        return self.backend != 'off'


OFF = Choice()


@dataclasses.dataclass(frozen=True)
class Place:
    """Where FP8 is to run. tokens: rows of a micro-batch, batch_size * block_size. compiling: whether
    torch.compile is on, which decides auto's order. linears: (name, in_features, out_features) of the
    model's, if one of them at least must be in FP8. dtype: what activations are computed in."""
    device: torch.device
    tokens: int
    compiling: bool = False
    linears: tuple = ()
    dtype: torch.dtype = torch.bfloat16


def choose(options, place):
    """The Choice that will run. use_fp8, backend 'auto' and recipe 'auto' are requests: what cannot run
    becomes 'off', with the reason. Any other backend or recipe is an order: it runs, or raises SettingError
    (there is no such thing) or MachineError (not on this machine). 'auto:te' and 'auto:mxfp8' are requests
    too: as 'auto', with that one first."""
    check_names(options)
    if options.recipe.startswith(FIRST):
        wish, plain = options.recipe.removeprefix(FIRST), dataclasses.replace(options, recipe='auto')
        try:
            return choose(dataclasses.replace(options, recipe=wish), place)
        except UserError as error:
            choice = choose(plain, place)
            return dataclasses.replace(choice, reason=f'{choice.reason}; in the place of {wish}: {error}')
    if options.backend == 'off' or not options.use_fp8:
        if options.backend != 'off' and not is_request(options.backend):
            raise SettingError(f'use_fp8 is off, but fp8_backend={options.backend} is an order: '
                               'leave one of them out')
        return OFF
    wanted = Choice.of(options, options.backend, reason='')
    check_delayed(wanted)
    candidates, found = [options.backend], None
    if is_request(options.backend):
        wish = options.backend.removeprefix(FIRST)
        automatic = [name for name, backend in BACKENDS.items() if backend.auto]
        ranks = {name: BACKENDS[name].auto[0 if place.compiling else 1] for name in automatic}
        candidates = sorted(automatic, key=lambda name: (name != wish, ranks[name]))
    problems = {}
    misfit = why_not_here(wanted, place)
    if not misfit:
        found, problems = first_that_runs(wanted, candidates, place.device)
    if found:
        check_kernels(wanted, found)
        return dataclasses.replace(wanted, backend=found, reason=why(found, options.backend, problems, place))
    problem = misfit or problems[min(problems, key=lambda name: BACKENDS[name].auto or (0, 0))]
    asked = orders({'fp8_backend': options.backend, 'fp8_recipe': options.recipe})
    if not asked:
        return dataclasses.replace(OFF, reason=str(problem))
    raise type(problem)(f'{" ".join(asked)}: {problem}')


def is_request(value):
    """Whether a backend or recipe is 'auto', or one to be tried first."""
    return value == 'auto' or value.startswith(FIRST)


def orders(config):
    """What of a script's settings is an order, not a request, as ['fp8_recipe=rowwise']."""
    names = 'fp8_backend', 'fp8_recipe'
    return [f'{name}={config[name]}' for name in names if not is_request(config[name])]


def check_names(options):
    """Raises SettingError for a backend, recipe, format or kernels that there are not."""
    wishes = [FIRST + name for name, backend in BACKENDS.items() if backend.auto]
    known = {
        'backend': (*BACKENDS, 'off', *wishes),
        'recipe': (*RECIPES, *(FIRST + name for name in RECIPES)),
        'format': FORMATS,
        'kernels': ('inductor', 'triton'),
    }
    for name, names in known.items():
        value = getattr(options, name)
        if value != 'auto' and value not in names:
            raise SettingError(f'fp8_{name} is one of {", ".join(("auto", *names))}, not {value!r}')


def check_kernels(choice, backend):
    """Raises SettingError for kernels that this backend, recipe and format do not have."""
    recipe = RECIPES[choice.recipe]
    whole = recipe.activation == recipe.weight == recipe.weight_dgrad == TENSOR
    if choice.kernels == 'triton' and not (backend == 'native' and whole and choice.format != 'e5m2'):
        raise SettingError('fp8_kernels=triton is native\'s, for one scale a tensor, in hybrid or e4m3, not '
                           f'{backend}\'s {choice.recipe} in {choice.format}')


def check_delayed(choice):
    """Raises SettingError for numbers that are of no use to the recipe."""
    if not RECIPES[choice.recipe].delayed and (choice.interval != 1 or choice.amax_history != 1024):
        others = ', '.join(f'--fp8_recipe={name}' for name, recipe in RECIPES.items() if recipe.delayed)
        raise SettingError('fp8_interval and fp8_amax_history are for amaxes of earlier steps, '
                           f'which {choice.recipe} does not use: {others} does')


def why_not_here(choice, place):
    """None, or why no backend can run this choice here: an exception, not raised."""
    multiple = RECIPES[choice.recipe].multiple
    native = dataclasses.replace(choice, backend='native')
    reasons = [why_bf16(native, *linear) for linear in place.linears]
    if place.dtype != torch.bfloat16:
        return SettingError(f'FP8 needs dtype=bf16 around it, not {place.dtype}')
    if place.tokens % multiple:
        return SettingError(f'batch_size x block_size = {place.tokens} is not a multiple of {multiple}')
    if is_request(choice.backend) and place.device.type != 'cuda':
        return MachineError('there is no CUDA GPU, and a CPU only emulates FP8: '
                            '--fp8_backend=native asks for that by name')
    if reasons and None not in reasons:
        return SettingError(f'no linear of this model can be in FP8: {reasons[0]}')
    return None


def first_that_runs(choice, candidates, device):
    """(name of the first backend that runs this choice on the device or None, name -> problem of those before
    it)."""
    problems = {}
    for name in candidates:
        backend = BACKENDS[name]
        if choice.recipe in backend.recipes:
            problem = backend.problem(choice, device)
        else:
            have = [other for other in BACKENDS if choice.recipe in BACKENDS[other].recipes]
            problem = SettingError(f'{backend.title} has no {choice.recipe} recipe, only '
                                   f'{", ".join(backend.recipes)}; --fp8_backend={" or ".join(have)}')
        if not problem:
            return name, problems
        problems[name] = problem
    return None, problems


def why(found, asked, problems, place):
    """The clause that says why this backend."""
    if not is_request(asked):
        on_a_cpu = ', on a CPU: FP8\'s numerics, without its speed'
        return 'as ordered' + (on_a_cpu if place.device.type == 'cpu' else '')
    if problems:
        return f'auto: {next(iter(problems.values()))}'
    if asked != 'auto':
        return 'auto: asked to be tried first'
    if place.compiling:
        return 'auto: torch.compile fuses its casts'
    return 'auto: without torch.compile, its kernels are the fused ones'


def compiles(choice, compiling, asked):
    """(whether to torch.compile, a line to say or None). compiling: whether bf16 would; asked: 'auto', 'on'
    or 'off'."""
    if not compiling or not choice.on:
        return compiling, None
    backend = BACKENDS[choice.backend]
    first = backend.compiles_from
    if tuple(int(part) for part in torch.__version__.split('.')[:2]) >= first:
        return True, None
    why = f'{backend.title} breaks the graph at every linear on torch < {first[0]}.{first[1]}'
    if asked == 'auto':
        return False, f'compile is off: {why}'
    return True, f'compile=on, but {why}: --compile=off is faster'


def why_bf16(choice, name, in_features, out_features):
    """None where this linear runs in FP8, else the reason, a clause. name: as GPT gives it,
    'h.0.attn.qkv'."""
    if not choice.on:
        return choice.reason
    if name == HEAD and not choice.head:
        return 'the output head decides the loss, and stays bf16'
    if name == HEAD and not BACKENDS[choice.backend].has_head:
        return f'{choice.backend} has no output head in FP8'
    if any(matches(name, pattern) for pattern in choice.keep):
        return 'kept by fp8_keep'
    multiple = RECIPES[choice.recipe].multiple
    if in_features % multiple or out_features % multiple:
        return f'{in_features} -> {out_features} is not in multiples of {multiple}'
    return None


def split(keep):
    """'a, b' -> ('a', 'b')."""
    return tuple(name.strip() for name in keep.split(',') if name.strip())


def matches(name, pattern):
    """'h.3' and 'attn.proj' are parts of the name h.3.attn.proj; so are patterns such as 'h.*.attn.proj'."""
    return fnmatch.fnmatchcase(name, pattern) or f'.{pattern}.' in f'.{name}.'


# --------------------------------------------------------------------------------------------------- building

def make_linear(choice, in_features, out_features, bias=True):
    """An FP8 linear of the chosen backend and recipe."""
    return BACKENDS[choice.backend].linear(choice, in_features, out_features, bias)


def linear_factory(choice, base):
    """What GPT calls for each linear: factory(in_features, out_features, bias=, name=) -> FP8 module where
    `choice` says so and the layer can be, else base(...) with its reason in `bf16_reason`."""
    def factory(in_features, out_features, bias=True, name=''):
        reason = why_bf16(choice, name, in_features, out_features)
        if reason is None and name == HEAD:
            module = BACKENDS[choice.backend].head(choice, in_features, out_features)
        elif reason is None:
            module = make_linear(choice, in_features, out_features, bias)
        else:
            module = base(in_features, out_features, bias=bias, name=name)
        module.bf16_reason = reason
        return module
    return factory


def convert(model, choice):
    """Puts FP8 linears in the place of a model's nn.Linears, with the same weights. What stays, whatever its
    class, gets a `bf16_reason`. Raises SettingError where none becomes one, though FP8 is on."""
    lookup = nn.Embedding, nn.EmbeddingBag
    for name, module in list(model.named_modules()):
        matrix = any(p.dim() == 2 for p in module.parameters(recurse=False))
        if not matrix or isinstance(module, lookup) or hasattr(module, 'bf16_reason'):
            continue
        if type(module) is not nn.Linear:
            module.bf16_reason = f'{type(module).__module__}.{type(module).__name__} is not nn.Linear itself'
            continue
        module.bf16_reason = why_bf16(choice, name, module.in_features, module.out_features)
        if module.bf16_reason is None:
            new = make_linear(choice, module.in_features, module.out_features, module.bias is not None)
            new.to(module.weight.device)
            new.weight, new.bias, new.bf16_reason = module.weight, module.bias, None
            parent, _, child = name.rpartition('.')
            setattr(model.get_submodule(parent), child, new)
    if choice.on and not fp8_linears(model):
        raise SettingError(f'no linear became FP8: {in_bf16(model) or "the model has no nn.Linear"}')


def checkpointer(choice):
    """The function for GPT's checkpoint: recomputes a block's forward pass in backward, in FP8."""
    return BACKENDS[choice.backend if choice.on else 'emulate'].checkpoint


def fp8_linears(model):
    """name -> module of the linears that run in FP8."""
    return {name: m for name, m in model.named_modules() if getattr(m, 'bf16_reason', 'none of ours') is None}


def reasons(model):
    """name -> bf16_reason of the linears."""
    return {name: m.bf16_reason for name, m in model.named_modules() if hasattr(m, 'bf16_reason')}


def in_bf16(model):
    """The linears that are not in FP8, by their reason; '' where there is none."""
    by_reason, others = {}, []
    for name, reason in reasons(model).items():
        if reason:
            by_reason.setdefault(reason, []).append(name or 'the model')
    for reason, names in by_reason.items():
        more = f' and {len(names) - 3} more' if len(names) > 3 else ''
        others.append(f'{", ".join(names[:3])}{more}: {reason}')
    return '; '.join(others)


def summary(model, choice):
    """One line: what is in FP8, by what, how many linears, and why the others are not."""
    if not choice.on:
        return f'FP8 Training Off: {choice.reason}'
    count = f'{len(fp8_linears(model))} of {len(reasons(model))}'
    line = f'FP8 Training Enabled: {count} linears, {choice.backend} ({choice.reason}), '
    line += f'{choice.recipe}, {choice.format}'
    if choice.margin:
        line += f', margin {choice.margin}'
    if choice.kernels == 'triton':
        line += ', kernels of its own'
    others = in_bf16(model)
    return f'{line} | bf16: {others}' if others else line


# ------------------------------------------------------------------------------------------------------ state

class State:
    """What FP8 keeps between steps: delayed scaling's amax histories and scales, a backend's cached weights.

    warning: a line to say, or None. Raises SettingError where choice.keep names no linear of the model. On
    several ranks, all make one."""

    def __init__(self, model, choice):
        names = list(reasons(model))
        for pattern in choice.keep:
            if not any(matches(name, pattern) for name in names):
                raise SettingError(f'fp8_keep: no linear is called {pattern!r}; '
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
        fused = ()
        if choice.kernels == 'triton':
            from fp8_kernels.block import fuse  # late: it knows the model
            fused = fuse(model)
        self.keeper = Keeper(model, always=fused)

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
        with during('calibrating'):
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
