"""Gives FP8 for training: which backend runs, models with FP8 linears, and the state between steps.

The arithmetic is in linear.py, the backends in backends.py. Master weights, embeddings and norms are not in
FP8, and the output head only on request. Where to read:

    choosing      Options, Place and Choice; `choose`, and who refuses: `problem_of`, `misfit`, `why_bf16`
    converting    `linear_factory` for our GPT, `convert` for other models; `reasons` and `summary` report it
    caching       `WeightCache`: a weight is cast once per optimizer step
    state         `State`: calibration, `after_step` with new scales, and what a checkpoint keeps

On a model of one's own:
    place = fp8.Place(device, tokens=batch_size * sequence_length)     # with compiling=True: torch.compile's
    choice = fp8.choose(fp8.Options(), place)  # or fp8.Options(backend='native', recipe='rowwise')
    fp8.convert(model, choice)                 # nn.Linears become FP8 linears, in place, weights kept
    state = fp8.State(model, choice)           # with the recipe 'delayed', call state.calibrate(run) next
    ...                                        # in the loop, under torch.autocast(dtype=torch.bfloat16)
    state.after_step()                         # after optimizer.step()
    print(fp8.summary(model, choice))
"""
import contextlib
import fnmatch
import itertools
import sys
import warnings
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
import torch.nn as nn

from .backends import BACKENDS, TRITON_SERVES, Backend, triton_serves
from .linear import (  # noqa: F401
    ADDED, FORMATS, GRAD, INPUT, LARGEST_SCALE, RECIPES, TENSORS, WEIGHT, WEIGHT_CACHE,
    DeviceError, Fp8Linear, OptionError, mode, paused, set_mode, update_amax)
from .sharded import cast_shards, gather_as, sharded_weights

HEAD = 'lm_head'
# names of output layers, anywhere and outside numbered blocks
HEADS = HEAD, 'head', 'heads', 'classifier', 'score', 'output_projection'
LAST = 'output', 'fc', 'fc_out', 'out', 'decoder', 'to_logits', 'unembed', 'embed_out', 'proj_out', 'logits'
FIRST = 'auto:'     # before the name of a backend or recipe: auto tries this one first
AUTO = 'native', 'te', 'torchao'    # the backends that auto tries


# ----------------------------------------------------------------------------------- choosing: which FP8 runs

@dataclass(frozen=True)
class Options:
    """Holds the user's requests and orders: train_fp8.py's settings of these names, most with fp8_ before.

    A backend or recipe of 'auto' is a request, any other an order. keep: names, or parts of names, of linears
    that stay bf16. lora_rank: not 0 if the linears' weights do not train. penalty_weight: not 0 if the loss
    has a penalty on the logits. sharded: whether the weights are sharded over ranks."""
    backend: str = 'auto'
    recipe: str = 'auto'
    format: str = 'auto'
    margin: int = 0
    interval: int = 1
    amax_history: int = 1024
    keep: tuple = ()
    kernels: str = 'auto'
    head: bool = False
    lora_rank: int = 0
    sharded: bool = False
    penalty_weight: float = 0.0
    use_fp8: bool = True

    @classmethod
    def of(cls, settings):
        """Return the Options in a script's settings, a dict, as far as it has them."""
        given = {name.removeprefix('fp8_'): value for name, value in settings.items()}
        given['keep'] = tuple(filter(None, map(str.strip, given.get('keep', '').split(','))))
        return cls(**{name: given[name] for name in vars(cls()) if name in given})

    @property
    def orders(self):
        """Return what is an order, not a request, as text: 'fp8_recipe=rowwise', or ''."""
        values = {'fp8_backend': self.backend, 'fp8_recipe': self.recipe}
        return ' '.join(f'{name}={value}' for name, value in values.items() if not value.startswith('auto'))


@dataclass(frozen=True)
class Choice:
    """Says which FP8 runs. backend: a name in BACKENDS, or 'off'. kernels: 'triton' means our own, any other
    the backend's. reason: a clause that says why this backend. instead: a clause, ', not te: ...', for each
    request that does not run. options: what was asked for, of which margin, keep, ... hold as they are."""
    backend: str = 'off'
    recipe: str = 'tensorwise'
    format: str = 'hybrid'
    kernels: str = 'auto'
    reason: str = 'by --no_fp8 or fp8_backend=off'
    instead: str = ''
    options: Options = Options()

    @classmethod
    def of(cls, options, backend, place):
        """Return the Choice of a backend for Options: the recipe 'auto' is tensorwise, the format 'auto' is
        the recipe's own, the kernels 'auto' are ours for a compiled model on a GPU, where they serve."""
        recipe = cls.recipe if options.recipe == 'auto' else options.recipe
        format = RECIPES[recipe].format if options.format == 'auto' else options.format
        choice = cls(backend, recipe, format, options.kernels, options=options)
        if choice.kernels == 'auto' and place.compiles_for_cuda and triton_serves(choice):
            return replace(choice, kernels='triton')
        return choice

    @property
    def on(self):
        return self.backend != 'off'

    @property
    def implementation(self):
        """Return its Backend: one that does nothing without FP8."""
        return BACKENDS[self.backend] if self.on else Backend()

    @property
    def about(self):
        """Return what each of its linears says of itself."""
        return self.recipe, self.format, self.backend

    @property
    def eager(self):
        """Return why a model with its linears is not compiled, or ''."""
        return self.implementation.eager.get(self.recipe, '')

    @property
    def ran(self):
        """Return the settings that a resumed run takes, so that it computes as before; {} without FP8."""
        names = ('backend', 'recipe', 'kernels') if self.on else ()
        return {f'fp8_{name}': getattr(self, name) for name in names}


OFF = Choice()


@dataclass(frozen=True)
class Place:
    """Says where FP8 is to run. tokens: rows of a micro-batch, batch_size * block_size. compiling: whether
    torch.compile is on, which decides the order in which auto tries backends, and auto's kernels. linears:
    (name, in_features, out_features) of the model's, if at least one of them must be in FP8. dtype: of the
    activations."""
    device: torch.device
    tokens: int
    compiling: bool = False
    linears: tuple = ()
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self):
        object.__setattr__(self, 'device', torch.device(self.device))    # 'cuda' serves, too

    @property
    def compiles_for_cuda(self):
        return self.compiling and self.device.type == 'cuda'


def choose(options, place):
    """Return the Choice that runs.

    use_fp8, backend 'auto' and recipe 'auto' are requests: if they cannot run, the backend is 'off' and the
    reason says why. Any other backend or recipe is an order: it runs, or choose raises OptionError (there is
    no such thing) or DeviceError (this machine lacks something). 'auto:te', 'auto:delayed' and 'auto:mxfp8'
    are requests that try te, delayed or mxfp8 first."""
    check_options(options)
    is_request, first = options.backend.startswith('auto'), options.backend.removeprefix(FIRST)
    if first == 'off' or not options.use_fp8:
        return OFF
    if first == 'auto':     # torch.compile fuses native's casts; without it, te's kernels are fused
        first = 'native' if place.compiling else 'te'
    backends = sorted(AUTO, key=lambda name: name != first) if is_request else [first]
    wanted, *others = reversed(options.recipe.split(':'))      # of 'auto:mxfp8', mxfp8 and then auto
    problems = {}       # (recipe, backend) -> why it does not run, in the order in which they are tried
    for recipe, backend in itertools.product([wanted, *others], backends):
        choice = Choice.of(replace(options, recipe=recipe), backend, place)
        problem = problems[recipe, backend] = problem_of(choice, place, is_request)
        if problem is None:
            break
    reported = 'native' if is_request else first    # native wants no package: its problem tells most
    if problem is not None:
        problem = problems[recipe, reported]
        if options.orders:
            raise type(problem)(f'{options.orders}: {problem}')
        return replace(OFF, reason=str(problem))
    missed = {first: problems[recipe, first], wanted: recipe != wanted and problems[wanted, reported]}
    instead = ''.join(f', not {what}: {why}' for what, why in missed.items() if why)
    ordered = 'as ordered' + ', emulated by the CPU' * (place.device.type == 'cpu')
    return replace(choice, reason='auto' if is_request else ordered, instead=instead)


def check_options(options):
    """Raise OptionError for values of another type, for a backend, recipe, format or kernels that do not
    exist, for numbers out of range, and for settings that contradict each other."""
    allowed = {
        'backend': ('auto', FIRST + 'te', *BACKENDS, 'off'),
        'recipe': ('auto', FIRST + 'delayed', FIRST + 'mxfp8', *RECIPES),
        'format': ('auto', *FORMATS),
        'kernels': ('auto', 'inductor', 'triton'),
        'margin': range(17),
        'interval': range(1, 2**31),
        'amax_history': range(1, 2**31),
    }
    for field in fields(Options):
        name, value, values = field.name, getattr(options, field.name), allowed.get(field.name)
        if type(value) is not field.type and (field.type, type(value)) != (float, int):
            raise OptionError(f'{name} is of type {field.type.__name__}, not {value!r}')
        if values and value not in values:
            numbers = isinstance(values, range)
            choices = f'from {values[0]} to {values[-1]}' if numbers else f'one of {", ".join(values)}'
            raise OptionError(f'fp8_{name} is {choices}, not {value!r}')
    if not options.use_fp8 and options.backend in BACKENDS:
        raise OptionError(f'use_fp8 is off, but fp8_backend={options.backend} orders FP8: '
                          'leave one of them out')


def problem_of(choice, place, is_request):
    """Return why a choice does not run at this place: an OptionError, or a DeviceError where the machine
    lacks something; None if it runs. is_request: whether `auto` tries its backend."""
    backend, device = choice.implementation, place.device.type
    if is_request and device != 'cuda':
        return DeviceError('there is no CUDA GPU, and a CPU only emulates FP8: --device=cpu '
                           '--fp8_backend=native asks for that by name')
    problem, refused = misfit(choice, place), backend.refuses(choice)
    if problem:
        return OptionError(problem)
    if refused or device not in backend.devices:
        what = refused or f'device={device}, only {", ".join(backend.devices)}'
        native = BACKENDS['native']
        hint = '; --fp8_backend=native' * (device in native.devices and not native.refuses(choice))
        return (OptionError if refused else DeviceError)(f'{choice.backend} does not take {what}{hint}')
    lacking = backend.lacks(choice, place.device)
    return DeviceError(lacking) if lacking else None


def misfit(choice, place):
    """Return why a choice fits no backend at this place, a clause, or None if it may fit one."""
    recipe = RECIPES[choice.recipe]
    in_bf16 = [why_bf16(choice, *linear) for linear in place.linears]
    if place.dtype != torch.bfloat16 and place.device.type != 'cpu':
        return f'FP8 needs dtype=bf16 around it, not {place.dtype}: --dtype=bf16'
    if place.tokens % recipe.multiple:
        return f'batch_size x block_size = {place.tokens} is not a multiple of {recipe.multiple}'
    if in_bf16 and all(in_bf16):
        return f'no linear of this model can be in FP8: {in_bf16[0]}'
    if choice.kernels == 'triton':
        return None if triton_serves(choice) else f'fp8_kernels=triton {TRITON_SERVES}: leave it out'
    if recipe.delayed and choice.backend == 'native' and place.compiles_for_cuda:
        # as tests/test_kernels.py counts
        return ('torch.compile stores the casts of delayed scaling byte by byte: --fp8_recipe=tensorwise, or '
                f'fp8_kernels=triton, which {TRITON_SERVES}')
    return None


def why_bf16(choice, name, in_features, out_features):
    """Return None if this linear runs in FP8, else the reason, a clause. name: as GPT gives it,
    'h.0.attn.qkv'."""
    if not choice.on:
        return choice.reason
    if name == HEAD:
        if not choice.options.head:
            return 'the output head decides the loss, and stays bf16'
        if not hasattr(choice.implementation, 'head'):
            return f'{choice.backend} has no output head in FP8'
        if choice.options.lora_rank:
            return 'it is frozen by lora_rank, and an output head in FP8 must train'
        if choice.options.penalty_weight:
            return 'its loss in FP8 keeps no logits, which penalty_weight needs'
    if any(matches(name, pattern) for pattern in choice.options.keep):
        return 'kept by fp8_keep'
    multiple = RECIPES[choice.recipe].multiple
    if in_features % multiple or out_features % multiple:
        return f'{in_features} -> {out_features} is not in multiples of {multiple}'
    return None


def matches(name, pattern):
    """Return whether a pattern of fp8_keep means this linear: 'h.3' and 'attn.proj' are parts of the name
    h.3.attn.proj, and so are patterns such as 'h.*.attn.proj'."""
    return fnmatch.fnmatchcase(name, pattern) or f'.{pattern}.' in f'.{name}.'


# ------------------------------------------------------------------------ converting: models with FP8 linears

def make_linear(choice, in_features, out_features, bias=True):
    """Return an FP8 linear of the chosen backend and recipe."""
    return choice.implementation.linear(choice, in_features, out_features, bias)


def linear_factory(choice, base):
    """Return what GPT calls for each linear: factory(in_features, out_features, bias=, name=) makes an FP8
    module where `choice` says so and the layer can be, else base(...) with its reason in `bf16_reason`. With
    fp8_kernels=triton, factory.norm makes the class of the blocks' norms."""
    def factory(in_features, out_features, bias=True, name=''):
        reason = why_bf16(choice, name, in_features, out_features)
        if reason:
            module = base(in_features, out_features, bias=bias, name=name)
        elif name == HEAD:
            module = choice.implementation.head(choice, in_features, out_features)
        else:
            module = make_linear(choice, in_features, out_features, bias)
        module.bf16_reason, module.plain = reason, base.plain
        return module
    if choice.kernels == 'triton':
        from .kernels import kernel_norm    # late: Triton takes a while to import
        factory.norm = kernel_norm
    return factory


def convert(model, choice):
    """Make a model's nn.Linears FP8 linears, in place: parameters, hooks and other names stay. Modules with a
    matrix that stay in bf16, such as the output layer and transformers' Conv1Ds, get a `bf16_reason`. A model
    that is converted already is converted anew; with OFF, it is as it was. Raises OptionError if FP8 is on
    and no linear can be in FP8, and for a model whose linears a backend has replaced; torch, ValueError for
    lazy layers."""
    make_plain(model)
    outputs = output_layers(model)
    adopt = getattr(choice.implementation, 'adopt', None)
    ids = [id(module) for _, module in model.named_modules(remove_duplicate=False)]
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            head_or_name = HEAD if name in outputs else name
            reason = (why_bf16(choice, head_or_name, module.in_features, module.out_features)
                      or why_not_converted(module) or not adopt and why_not_replaced(module, name, ids))
        elif matrices(module):
            reason = f'{type(module).__module__}.{type(module).__name__} is not nn.Linear itself'
        else:
            continue
        if not reason and adopt:
            adopt(choice, module)
        elif not reason:
            with torch.random.fork_rng():       # its first weights go at once
                fp8_linear = make_linear(
                    choice, module.in_features, module.out_features, module.bias is not None)
            fp8_linear = fp8_linear.to(module.weight.device).train(module.training)
            fp8_linear._parameters |= module._parameters
            model.set_submodule(name, fp8_linear)
            module = fp8_linear
        module.bf16_reason = reason or None
    if choice.on and not fp8_linears(model):
        raise OptionError(f'no linear became FP8: {bf16_summary(model) or "the model has no nn.Linear"}')


def make_plain(model):
    """Undo convert. Raises OptionError, with the model as it was, where a backend has replaced linears, or
    linear_factory made them."""
    linears = fp8_linears(model).values()
    for module in linears:
        # convert made it, and since then it was not sharded, parametrized or wrapped by an offloading library
        changed = type(module) is not getattr(module, 'made', None) or module.weight is None or module.sharded
        if changed or {'plain', 'forward'} & vars(module).keys():
            raise OptionError('the model has FP8 linears already, which cannot be undone: convert a new one')
    for module in model.modules():
        vars(module).pop('bf16_reason', None)
        # a State may be that of a part
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, '__self__', None), WeightCache):
                del module._forward_pre_hooks[key]
    for module in linears:
        module.stop()


def why_not_converted(module):
    """Return None if an nn.Linear can be an FP8 linear, else what forbids it, a clause."""
    clashes = [name for name in ADDED if hasattr(module, name)]
    if clashes:
        return f'it has an attribute called {clashes[0]!r} already'
    if 'forward' in vars(module):       # accelerate's, of weights that are elsewhere
        return 'its forward method was replaced'
    return None if module.weight.is_floating_point() else f'its weight is {module.weight.dtype}'


def why_not_replaced(module, name, ids):
    """Return None if another module can take an nn.Linear's place, else what forbids it, a clause. ids: of
    the module behind each name of the model."""
    if not name or ids.count(id(module)) > 1:
        return 'the model has it under several names, or is the linear itself'
    if 'weight' not in module._parameters or any(
            value for key, value in vars(module).items() if 'hooks' in key and 'state_dict' not in key):
        return 'it has hooks, or a weight that is no parameter'
    return None


def output_layers(model):
    """Return the names of the linears that compute logits: the model's get_output_embeddings(), each that
    shares an embedding's weight, and each that is called like one. Outside numbered blocks or at the end,
    also each that is as wide as an embedding has rows, or as the model or its config has classes; outside, of
    an embedding with more rows than columns, since a table of classes may be as long as layers are wide."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {getattr(holder, name, None) for holder in (model, getattr(model, 'config', None))
             for name in ('vocab_size', 'num_labels', 'num_classes')}
    rows = {each.num_embeddings for each in embeddings}
    sizes |= {each.num_embeddings for each in embeddings if each.num_embeddings > each.embedding_dim}
    declared = getattr(model, 'get_output_embeddings', lambda: None)()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    outputs = []
    for name, module in linears.items():
        words = [word for word in name.split('.') if not word.isdigit()]
        is_outside = words == name.split('.')       # of numbered blocks
        if (module is declared or any(module.weight is each.weight for each in embeddings)
                or words and (words[-1] in HEADS or is_outside and words[-1] in LAST)
                or is_outside and module.out_features in sizes
                or name == [*linears][-1] and module.out_features in sizes | rows):
            outputs.append(name)
    return outputs


def checkpointer(choice):
    """Return GPT's `checkpoint`, a function that recomputes a block in backward; None, where torch's does."""
    return choice.implementation.checkpoint


def reasons(model):
    """Return name -> bf16_reason of the linears; None is FP8's. {}: the model was not converted."""
    late = 'added after fp8.convert'
    by_name = {name: getattr(m, 'bf16_reason', late) for name, m in model.named_modules()
               if hasattr(m, 'bf16_reason') or type(m) is nn.Linear}
    return {} if {*by_name.values()} <= {late} else by_name


def fp8_linears(model):
    """Return name -> module of the linears that run in FP8."""
    return {name: model.get_submodule(name) for name, reason in reasons(model).items() if reason is None}


def bf16_summary(model):
    """Return the linears that are not in FP8, by their reason; '' if there are none."""
    by_reason = {}
    for name, reason in reasons(model).items():
        by_reason.setdefault(reason, []).append(name or 'the model')
    return '; '.join(f'{", ".join(names[:3])}' + f' and {len(names) - 3} more' * (len(names) > 3)
                     + f': {reason}' for reason, names in by_reason.items() if reason)


def matrices(module):
    """Return the parameters by which a module multiplies: a matrix, or one for each expert."""
    no_linears = nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd
    weights = () if isinstance(module, no_linears) else module.parameters(recurse=False)
    return [p for p in weights if p.dim() == 2 or p.dim() == 3 and len(p) > 1]


def fp8_share(model):
    """Return the share of the linears' FLOPs that is in FP8."""
    in_bf16 = sum(p.numel() for name, reason in reasons(model).items() if reason
                  for p in matrices(model.get_submodule(name)))
    in_fp8 = sum(m.in_features * m.out_features for m in fp8_linears(model).values())  # frozen: no weight
    return in_fp8 / (in_fp8 + in_bf16)


def summary(model, choice):
    """Return lines that say how many linears are in FP8, by which backend, and why the others are not."""
    names, linears, in_bf16 = [*reasons(model)], fp8_linears(model), bf16_summary(model)
    if not (choice.on and linears):
        return f'FP8 Training Off: {in_bf16 or "no linear was converted" if choice.on else choice.reason}'
    line = f'FP8 Training Enabled: {len(linears)} of {len(names)} linears, '
    abouts = [getattr(module, 'about', choice.about) for module in linears.values()]
    line += ' and '.join(dict.fromkeys(f'{recipe} ({backend})' for recipe, _, backend in abouts))
    line += choice.instead
    if choice.options.sharded:
        gathered = sum(getattr(module, 'sharded', None) is not None for module in linears.values())
        line += f', {gathered} of {len(linears)} weights gathered in FP8'
        line += ' (tensorwise and delayed, in equal shards)' * (gathered < len(linears))
    line += '\n          ' + ' and '.join(dict.fromkeys(format for _, format, _ in abouts))
    line += f', margin {choice.options.margin}' * bool(choice.options.margin)
    line += ', Triton kernels' * (choice.kernels == 'triton')
    line += f'; {fp8_share(model):.0%} of the linears\' FLOPs; {abouts[0][2]}: {choice.reason}'
    line += f'\n          bf16: {in_bf16}' * bool(in_bf16)
    if not output_layers(model) and not choice.options.keep:
        line += '\n          no output layer was found: name yours in fp8.Options(keep=...)'
    return line


# ---------------------------------------------------------------------- caching: a weight is cast once a step

FEWEST = 4      # micro-steps of a step from which caching pays: the eager cast moves more bytes


class WeightCache:
    """Casts each weight of a model's Fp8Linears once per optimizer step and keeps the cast, W and W^T.

    In a compiled linear a cast moves 14 bytes a weight, here, in eager mode, 27 or more; the other
    micro-steps then move none. A cast takes 2 bytes of memory a weight and lies in tensors of its linear
    (WEIGHT_CACHE), which a compiled graph reads as it reads the weight: one graph serves every
    micro-step. The linear's own quantizers make it, so that caching changes no bit.

    With `drop`, as the product's LoRA wants it, weights that do not train are cast once, with a scale of
    their own, and replaced by the cast W: 1 byte a weight instead of 4. Backward makes W^T of it. The weights
    themselves go to the host's memory, from which evaluation in bf16 reads them. Weights that a hook makes
    are not cached. Of sharded weights each rank casts its shard, in each step; see sharded.py.

    te's linears keep casts of their own, in such steps alone.

    Casts are cached in steps of FEWEST or more micro-steps. A weight that changes within is cast again, but
    not where torch does not count the change: new_step after a fused optimizer or weight.data.copy_(...)."""

    def __init__(self, model, drop=False):
        self.linears = []
        self.te_linears = [module for module in model.modules() if 'cast_of' in vars(type(module))]
        for linear in model.modules():
            if isinstance(linear, Fp8Linear) and linear.has_whole_weight():
                if linear.weight.requires_grad or not drop:
                    self.linears.append(linear)
                else:
                    cast_weight(linear)
                    weight = linear.weight.detach().cpu()   # pinned, a GPU reads it at the bus's full speed
                    linear.host_weight = weight.pin_memory() if linear.weight.is_cuda else weight
                    linear.wt8 = linear.wt8_scale_inv = linear.weight = linear.cast_of = None
        self.sharded = sharded_weights(model)
        frozen = [each for each in self.sharded if drop and not each.weight.requires_grad]
        if frozen:
            with set_mode(calibrating=True):
                cast_shards(frozen)
        for each in frozen:
            each.drop()
        self.new_step(1)
        # before FSDP2's, whose streams then wait for the casts
        model.register_forward_pre_hook(self.refresh, prepend=True)

    def __getstate__(self):
        return {**vars(self), 'caching': False}     # a copy of the model has no steps

    def new_step(self, micro_steps):
        """Drop the casts, and cache those of a step of this many micro-steps."""
        self.caching, self.shards_cast = micro_steps >= FEWEST, None
        self.linears = [linear for linear in self.linears if isinstance(linear, Fp8Linear)]    # still
        for linear in self.linears:
            for name in ('cast_of', *WEIGHT_CACHE):
                setattr(linear, name, None)
        for linear in self.te_linears:
            linear.cast_of = () if self.caching else None   # () is no weight's

    def refresh(self, model, arguments):
        """Cast the weights that are not cached: a forward pre-hook of the model."""
        gather_as(model, self.sharded, mode.paused)
        training = [each for each in self.sharded if each.host is None]
        # a shard's own version stays as it is
        versions = [(id(each.weight), each.weight._version) for each in training]
        if versions and not mode.paused and self.shards_cast != versions:
            cast_shards(training)
            self.shards_cast = versions
        # a compiler may trace a block by itself; backward takes no casts that inference_mode has made
        if (self.caching and not mode.paused and not torch.compiler.is_compiling()
                and not torch.is_inference_mode_enabled()):
            for linear in self.linears:
                if linear.has_whole_weight() and not linear.is_cast():
                    scale = None if linear.scale is None else linear.scale[WEIGHT]
                    update_amax(linear.amax, weight=cast_weight(linear, scale))


def cast_weight(linear, scale=None):
    """Fill the tensors WEIGHT_CACHE of an Fp8Linear with its weight's cast, by the scale, and return the
    weight's amax. scale: see Quantizer."""
    q = linear.arithmetic.quantizers
    w, wt = q.w.both(linear.weight.detach(), q.wt, scale)
    linear.cast_of = linear.weight, linear.weight._version, linear.weight.data_ptr()
    for name, tensor in zip(WEIGHT_CACHE, (*w[:2], *wt[:2])):
        setattr(linear, name, tensor)
    return w.amax


@contextlib.contextmanager
def no_trace(model):
    """Return a context after which a model's gradients, amaxes and buffers, such as batch norm's means, are
    as they were before. FP8's scales and casts are the caller's. Within it, nothing that was compiled runs,
    since it would call no hook that was added later."""
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    kept = [(module, name, tensor, tensor.clone()) for module in model.modules()
            for name, tensor in {'amax': vars(module).get('amax'), **module._buffers}.items()
            if torch.is_tensor(tensor)]
    model.zero_grad()
    as_written = contextlib.nullcontext()
    if 'torch._dynamo' in sys.modules:      # else nothing is compiled, and importing it takes a second
        as_written = torch.compiler.set_stance('force_eager')
    try:
        with as_written:
            yield
    finally:
        with torch.no_grad():
            for p, gradient, before in gradients:
                p.grad = gradient
                if gradient is not None:    # DDP's bucket, which a pass through DDP fills again
                    gradient.copy_(before)
            for module, name, tensor, before in kept:
                setattr(module, name, tensor)
                if not torch.equal(tensor, before):     # one that is not written may be expanded
                    tensor.copy_(before)


# ------------------------------------------------------------------------ state: what FP8 keeps between steps

class State:
    """Holds what FP8 keeps between steps: delayed scaling's amax histories and scales, and cached weights.
    Until its first amax, a weight that starts at zero, or an expert without a token, takes the scale of the
    largest amax of the model's layers, which may lose small values, but not all as 1 would.

    Raises OptionError if the option keep names no linear of the model, or the model was converted by another
    choice. On several ranks, each makes one; group: those that hold the same layers; None: all."""

    def __init__(self, model, choice, group=None):
        names = list(reasons(model))
        for pattern in choice.options.keep:
            if not any(matches(name, pattern) for name in names):
                raise OptionError(f'fp8_keep: no linear is called {pattern!r}; '
                                  f'they are called {", ".join(names[:4])}, ...')
        self.model, self.choice, self.group = model, choice, group
        self.steps, self.divisor = 0, 1
        linears = fp8_linears(model)
        for name, module in linears.items():
            if getattr(module, 'about', choice.about) != choice.about:  # te's and torchao's say nothing
                raise OptionError(f'{name} is in FP8 by another choice, {", ".join(module.about)}: '
                                  'call fp8.convert(model, choice), then make its State')
        self.needs_calibration = RECIPES[choice.recipe].delayed and bool(linears)
        # Transformer Engine's linears keep their own histories; other recipes have none
        self.layers = {name: m for name, m in linears.items() if getattr(m, 'amax', None) is not None}
        for layer in self.layers.values():      # fully_shard and load_state_dict move the weight alone
            if next(layer.parameters(), layer.amax).device not in (layer.amax.device, torch.device('meta')):
                layer.start(layer.arithmetic, layer.about)
        shape = choice.options.amax_history, len(self.layers), 3    # steps; of a layer: input, weight, grad
        self.history = torch.zeros(shape, dtype=torch.float32, device='cpu')    # until the first step
        choice.implementation.attach(model, choice)
        self.weight_cache = WeightCache(model, drop=choice.options.lora_rank > 0)

    def calibrate(self, run):
        """Fill delayed scaling's histories before the first step. run(): a forward and backward pass, whose
        gradients are dropped; it takes scales from the tensors themselves. Transformer Engine, which
        has no such mode, gets its scales in two passes. Warns where no linear saw a token."""
        self.check_model()
        if not RECIPES[self.choice.recipe].delayed:
            return
        self.forget()           # a search for the batch size leaves amaxes and casts
        self.history.zero_()    # of an earlier run of the same model, as bench.py's
        self.steps = 0
        with no_trace(self.model), set_mode(calibrating=True):
            for _ in range(1 if self.layers else 2):
                run()
            if self.layers and not torch.stack(self.tensors('amax')).any(0)[[INPUT, GRAD]].all():
                warnings.warn('calibrate(run) saw no training pass, so scales are 1: run() is a forward and '
                              'backward pass, outside of torch.no_grad and fp8.paused', stacklevel=2)
            self.needs_calibration = False
            self.after_step()

    def after_step(self):
        """Finish an optimizer step: put its amaxes into the history and, every fp8_interval steps, make new
        scales from the history's largest, on all ranks alike. Raises RuntimeError without a calibration,
        after another fp8.convert of the model, and within the capture of a CUDA graph."""
        self.check_model()
        if self.needs_calibration and not mode.paused:
            raise RuntimeError('delayed scaling has no scales before its calibration: '
                               'call State.calibrate(run) before the first step')
        if self.layers and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError('after_step in a CUDA graph would write the same row of the history in each '
                               'replay: call it after the graph')
        if self.layers and not mode.paused:
            self._update_scales()
        self.forget()

    def check_model(self):
        """Raise RuntimeError after another fp8.convert of the model or of a part of it, or where a layer with
        delayed scaling was added or removed."""
        layers = {m for m in self.model.modules() if isinstance(m, Fp8Linear) and m.amax is not None}
        if (self.weight_cache.refresh not in self.model._forward_pre_hooks.values()     # see make_plain
                or layers != {*self.layers.values()}):
            raise RuntimeError('the model was converted anew or got other layers since this State was made: '
                               'make another, and call its calibrate(run) if scaling is delayed')

    def forget(self):
        """Drop what was seen since the last step: amaxes, and casts of weights."""
        self.weight_cache.new_step(1)
        if self.layers:
            torch._foreach_zero_(self.tensors('amax'))

    def tensors(self, name):
        """Return a tensor (3,) of each layer."""
        return [getattr(module, name) for module in self.layers.values()]

    @torch.no_grad()
    def _update_scales(self):
        """Put the layers' amaxes into the history's row of this step, and make new scales if they are due."""
        amax, scales = torch.stack(self.tensors('amax')), self.tensors('scale')     # (layers, 3)
        if dist.is_initialized():
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        self.history = self.history.to(amax.device)     # the model may have moved
        row = self.steps % len(self.history)
        # a step whose amax is not finite is skipped, and counts as the step before it
        self.history[row] = amax.where(amax.isfinite(), self.history[row - 1])
        if self.steps % self.choice.options.interval == 0:
            largest, old = self.history.amax(0), torch.stack(scales)
            # a scale of 1 is of a layer that never had an amax
            largest = largest.where((largest > 0) | (old != 1), largest.amax(0))
            new = 1 / (largest * 2**self.choice.options.margin)
            for column, dtype in enumerate(FORMATS[self.choice.format]):
                new[:, column] *= torch.finfo(dtype).max    # a number: a tensor's copy would wait for the GPU
            new = new.clamp(max=LARGEST_SCALE).where(largest > 0, old)
            torch._foreach_copy_(scales, list(new.unbind()))
        self.steps += 1

    def state_dict(self):
        """Return what a checkpoint keeps beside the weights; {} except for delayed scaling."""
        if not self.layers:
            return {}
        return {'layers': list(self.layers), 'steps': self.steps, 'history': self.history.clone(),
                'scale': torch.stack(self.tensors('scale')), 'divisor': self.divisor}

    def load(self, saved, divisor=1):
        """Load a state_dict, or None, if its layers, history length and divisor are these and its scales are
        finite and above 0; else the state still needs its calibration. divisor: what a micro-step's loss is
        divided by; another number of ranks or micro-steps changes it, and the size of gradients."""
        self.divisor = divisor
        self.forget()
        if not self.layers or not saved:
            return
        expected, scale = self.state_dict(), saved['scale']
        alike = [saved[name] == expected[name] for name in ('layers', 'divisor')]
        if (all(alike) and saved['history'].shape == self.history.shape
                and (scale > 0).all() and scale.isfinite().all()):
            self.history.copy_(saved['history'])
            self.steps, self.needs_calibration = saved['steps'], False
            torch._foreach_copy_(self.tensors('scale'), list(scale))
