"""Which backend and recipe of FP8 run, and which linears; what cannot, and why.

    place = Place(device, tokens=batch_size * block_size)
    choice = choose(Options(), place)           # 'auto' asks, a name orders
    why_bf16(choice, 'lm_head', 768, 50304)     # None in FP8, else the reason
"""
import dataclasses
import fnmatch

import torch

from .backends import BACKENDS
from .linear import FORMATS, RECIPES, TENSOR, DeviceError, OptionError

HEAD = 'lm_head'
FIRST = 'auto:'     # before a name: what auto tries first


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked for: train_fp8.py's settings of these names, most with fp8_ before them. 'auto' is a
    request, any other backend or recipe an order. keep: names, or parts of names, of linears that stay
    bf16. lora_rank: not 0 where the linears are frozen; penalty_weight: not 0 where the loss has a penalty on
    the logits. sharded: whether weights are, over ranks."""
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
    becomes 'off', with the reason. Any other backend or recipe is an order: it runs, or raises OptionError
    (there is no such thing) or DeviceError (not on this machine). 'auto:te' and 'auto:mxfp8' are requests
    too: as 'auto', with that one first."""
    check_names(options)
    if options.recipe.startswith(FIRST):
        wish, plain = options.recipe.removeprefix(FIRST), dataclasses.replace(options, recipe='auto')
        try:
            return choose(dataclasses.replace(options, recipe=wish), place)
        except (OptionError, DeviceError) as error:
            choice = choose(plain, place)
            return dataclasses.replace(choice, reason=f'{choice.reason}; in the place of {wish}: {error}')
    if options.backend == 'off' or not options.use_fp8:
        if options.backend != 'off' and not is_request(options.backend):
            raise OptionError(f'use_fp8 is off, but fp8_backend={options.backend} is an order: '
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
    if wanted.kernels == 'triton':
        candidates = ['native'] if is_request(options.backend) else candidates
        check_kernels(wanted, candidates[0])
    problems = {}
    misfit = why_not_here(wanted, place)
    if not misfit:
        found, problems = first_that_runs(wanted, candidates, place.device)
    if found:
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
    """Raises OptionError for a backend, recipe, format or kernels that there are not."""
    known = {
        'backend': (FIRST + 'te', *BACKENDS, 'off'),
        'recipe': (FIRST + 'mxfp8', *RECIPES),
        'format': FORMATS,
        'kernels': ('inductor', 'triton'),
    }
    for name, names in known.items():
        value = getattr(options, name)
        if value != 'auto' and value not in names:
            raise OptionError(f'fp8_{name} is one of {", ".join(("auto", *names))}, not {value!r}')


def check_kernels(choice, backend):
    """Raises OptionError for kernels that this backend, recipe and format do not have."""
    recipe = RECIPES[choice.recipe]
    if choice.kernels == 'triton' and choice.lora_rank:
        raise OptionError('fp8_kernels=triton has no blocks with adapters: with lora_rank, leave it out')
    if choice.kernels == 'triton' and choice.sharded:
        raise OptionError('fp8_kernels=triton keeps whole weights cast: with sharding_mode, leave it out')
    whole = recipe.activation == recipe.weight == recipe.weight_dgrad == TENSOR
    if choice.kernels == 'triton' and not (backend == 'native' and whole and choice.format != 'e5m2'):
        raise OptionError('fp8_kernels=triton is native\'s, for one scale a tensor, in hybrid or e4m3, not '
                           f'{backend}\'s {choice.recipe} in {choice.format}')


def check_delayed(choice):
    """Raises OptionError for numbers that are of no use to the recipe."""
    if not RECIPES[choice.recipe].delayed and (choice.interval != 1 or choice.amax_history != 1024):
        others = ', '.join(f'--fp8_recipe={name}' for name, recipe in RECIPES.items() if recipe.delayed)
        raise OptionError('fp8_interval and fp8_amax_history are for amaxes of earlier steps, '
                           f'which {choice.recipe} does not use: {others} does')


def why_not_here(choice, place):
    """None, or why no backend can run this choice here: an exception, not raised."""
    multiple = RECIPES[choice.recipe].multiple
    native = dataclasses.replace(choice, backend='native')
    reasons = [why_bf16(native, *linear) for linear in place.linears]
    if place.dtype != torch.bfloat16:
        return OptionError(f'FP8 needs dtype=bf16 around it, not {place.dtype}')
    if place.tokens % multiple:
        return OptionError(f'batch_size x block_size = {place.tokens} is not a multiple of {multiple}')
    if is_request(choice.backend) and place.device.type != 'cuda':
        return DeviceError('there is no CUDA GPU, and a CPU only emulates FP8: '
                            '--fp8_backend=native asks for that by name')
    if reasons and None not in reasons:
        return OptionError(f'no linear of this model can be in FP8: {reasons[0]}')
    return None


def first_that_runs(choice, candidates, device):
    """(name of the first backend that runs this choice on the device or None, name -> problem of those before
    it)."""
    problems = {}
    for name in candidates:
        backend = BACKENDS[name]
        if choice.lora_rank and not backend.freezes:
            problem = OptionError(f'{backend.title} has no frozen weights in FP8, which lora_rank wants: '
                                   '--fp8_backend=native')
        elif choice.sharded and choice.lora_rank:
            problem = OptionError('frozen weights in FP8 are not sharded: --no_fp8, or --sharding_mode=ddp')
        elif choice.sharded and not backend.shards:
            problem = OptionError(f'{backend.title} is not built for sharded weights: --fp8_backend=native, '
                                   'or --sharding_mode=ddp')
        elif choice.recipe in backend.recipes:
            problem = backend.problem(choice, device)
        else:
            have = [other for other in BACKENDS if choice.recipe in BACKENDS[other].recipes]
            problem = OptionError(f'{backend.title} has no {choice.recipe} recipe, only '
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
    if name == HEAD and choice.lora_rank:
        return 'it is frozen, and an output head in FP8 is not built for that'
    if name == HEAD and choice.penalty_weight:
        return 'its loss in FP8 keeps no logits, which penalty_weight needs'
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
