"""What a run of train_fp8.py settles before its first step: which backend and recipe run, whether compiled,
whether they come out right on this GPU, and which layers stay in bf16.
"""
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os

import torch
import torch.distributed as dist

from fp8gpt import fp8, parallel, sharding
from fp8gpt.measure import glance, health, in_bf16, medians
from model import Block, GPTConfig, Linear, rope_tables

CACHE = os.path.join(os.environ.get('XDG_CACHE_HOME', os.path.expanduser('~/.cache')), 'fp8gpt.json')


# ---------------------------------------------------------------------------------------------- what will run

@dataclasses.dataclass
class Settled:
    """choice: fp8.Choice. compiled: whether the run is; bf16_compiled: whether it would be in bf16.
    precision, reason: what the run says of itself. note: a line about compiling, or None."""
    choice: fp8.Choice
    compiled: bool
    bf16_compiled: bool
    precision: str
    reason: str
    note: str | None


def settle(run):
    """What of FP8 runs, and whether compiled, for a run.Run; run.compiled and, after a measurement for
    fp8_keep=auto, run.config['fp8_keep'] are set to it. Raises what fp8.choose raises, and fp8.DeviceError
    where an order comes out wrong here."""
    if run.config['eval_only']:
        off = dataclasses.replace(fp8.OFF, reason='evaluation is in bf16')
        return Settled(off, run.compiled, run.compiled, run.config['dtype'], off.reason, note=None)
    stay_with_fp8(run)
    linears = tuple(run.model_config.linears())
    tokens = max(1, run.batch_size) * run.config['block_size']
    place = fp8.Place(run.device, tokens, run.compiled, linears, run.compute_dtype)
    options = dataclasses.replace(fp8.Options.of(run.config), sharded=sharding.sharded(run.config))
    try:
        choice = fp8.choose(options, place)
    except (fp8.OptionError, fp8.DeviceError) as error:
        raise type(error)(f'{error}{way_out(run)}') from None
    compiled, note = fp8.compiles(choice, run.compiled, run.config['compile_model'])
    block = BlockRun(run.window_config, choice, run.batch_size, run.device,
                     compiled=compiled, bf16_compiled=run.compiled)
    if choice.on and run.device.type == 'cuda':
        choice = checked(block, fp8.orders(run.config))
    if run.config['fp8_keep'] == 'auto' and choice.on:
        choice = auto_keep(block)
        run.config['fp8_keep'] = ','.join(choice.keep) if choice.on else 'auto'
    settled = Settled(choice, compiled, run.compiled, precision='fp8' if choice.on else run.config['dtype'],
                      reason=f'{choice.backend}: {choice.reason}', note=note)
    run.compiled = compiled
    return settled


def fp8_until_now(run):
    """The backend of the FP8 that a resumed run was in when it was saved, or None."""
    before = run.resumed['precision'] if run.resumed else {'name': None}
    return before['reason'].partition(':')[0] if before['name'] == 'fp8' else None


def stay_with_fp8(run):
    """What was a request at the start is an order for a run that goes on: nobody would see it change."""
    backend = fp8_until_now(run)
    if backend and run.config['use_fp8'] and 'fp8_backend' not in run.config.given:
        run.config['fp8_backend'] = backend


def way_out(run):
    """What a refusal adds for a run that was in FP8 until now."""
    if not fp8_until_now(run):
        return ''
    return (f'. {run.resume_path} was trained in FP8: --no_fp8 goes on in bf16, '
            '--fp8_backend=auto in what runs here')


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """One block of a run, to be checked and timed. config: GPTConfig. choice: fp8.Choice. batch_size:
    sequences; 0, which is settled later, stands for 16K tokens. compiled: whether the run is; bf16_compiled:
    whether it would be in bf16."""
    config: GPTConfig
    choice: fp8.Choice
    batch_size: int
    device: torch.device
    compiled: bool
    bf16_compiled: bool

    @property
    def sequences(self):
        return self.batch_size or max(1, 16384 // self.config.block_size)

    def key(self, what):
        """What is known of `what` depends on this, as text."""
        choice = self.choice.backend, self.choice.recipe, self.choice.format, self.choice.margin
        modes = self.compiled, self.bf16_compiled
        return json.dumps([what, versions(), choice, modes, self.sequences, dataclasses.astuple(self.config)])


def remembered():
    """Key -> what earlier runs found."""
    with contextlib.suppress(OSError, ValueError), open(CACHE) as file:
        return json.load(file)
    return {}


def remember(key, found):
    """Adds to what is remembered; where there is no room for it, it is forgotten."""
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(CACHE), exist_ok=True)
        known = {**remembered(), key: found}
        with open(CACHE + '.tmp', 'w') as file:
            json.dump(known, file, indent=1)
        os.replace(CACHE + '.tmp', CACHE)


# ------------------------------------------------------------------------------------------------ is it right

TOLERANCE = 0.03    # of a result's norm: torchao and te round scales otherwise than emulate
# Compiled, a block rounds to bf16 in other places, so casts find other neighbours: of 512 x 256 on a CPU, its
# gradients (ln_1's, the furthest) are off by 5.3% in tensorwise, 4.7% in delayed, 2.8% in rowwise, its output
# by 0.5%. Three times that; one row in 32 lost is 18%.
BLOCK_TOLERANCE = 0.15
PASSES = 16         # one pass in four of a miscompiled cast was wrong (triton-lang/triton 11111)


def checked(block, orders):
    """A BlockRun's choice, where its linears and its whole block come out right; else off, or, where there
    are orders, as 'fp8_recipe=rowwise', fp8.DeviceError. Of all ranks alike."""
    problem = None
    linears = {(K, N, name if name == fp8.HEAD else '') for name, K, N in block.config.linears()
               if fp8.why_bf16(block.choice, name, K, N) is None}
    checks = {f'{name} {K} -> {N}': functools.partial(linear_problem, block, K, N, name)
              for K, N, name in sorted(linears)}
    if block.compiled or block.choice.kernels == 'triton':
        kernels, keep = block.choice.kernels, ','.join(block.choice.keep)
        checks[f'block, {kernels}, {keep}'] = functools.partial(block_problem, block)
    for what, check in checks.items():
        key = block.key(what)
        if problem or parallel.rank_0s(remembered().get(key)):
            continue
        problem = check()
        if not parallel.smallest_of_ranks(int(not problem)):
            problem = problem or 'FP8 is wrong on another rank'
        elif not dist.is_initialized() or dist.get_rank() == 0:
            remember(key, 'right')
    if problem and orders:
        raise fp8.DeviceError(f'{" ".join(orders)}: {problem}')
    return dataclasses.replace(fp8.OFF, reason=problem) if problem else block.choice


def linear_problem(block, K, N, name=''):
    """None where an FP8 linear of K -> N features gives what it gives uncompiled, and what emulate gives, in
    forward and backward at a BlockRun's number of tokens; else a clause, with shape and versions. name:
    fp8.HEAD for the output head, with its loss."""
    tokens, like = (block.sequences, block.config.block_size), {'device': block.device}
    x = torch.randn(*tokens, K, dtype=torch.bfloat16, **like)
    inputs, dy = (x,), torch.randn(*tokens, N, dtype=torch.bfloat16, **like)
    if name == fp8.HEAD:
        inputs, dy = (x, torch.randint(N, tokens, **like), N), torch.ones((), **like)
    linears, biased = {}, (block.config.bias or block.config.qkv_bias) and not name
    for backend in ('emulate', block.choice.backend):
        choice = dataclasses.replace(block.choice, backend=backend, keep=())
        factory = fp8.linear_factory(choice, Linear)
        linears[backend] = factory(K, N, bias=biased, name=name).to(block.device)
        for number, p in enumerate(linears[backend].parameters()):
            torch.manual_seed(number)
            torch.nn.init.normal_(p, std=0.02)
        run = functools.partial(results, *[linears[backend]] * 2, inputs, dy)
        fp8.State(linears[backend], choice).calibrate(run)
    linear = linears[block.choice.backend]
    expected, eager = (results(each, each, inputs, dy) for each in (linears['emulate'], linear))
    worst = {'eager mode is off emulate': error(eager, expected)}
    if block.compiled:
        compiled = torch.compile(linear, dynamic=False)
        worst['torch.compile is off eager mode'] = max(
            error(results(linear, compiled, inputs, dy), eager) for _ in range(PASSES))
    for what, by in worst.items():
        if by > TOLERANCE:
            title = f'{block.choice.backend}\'s {name or f"{block.choice.recipe} linear"}'
            return (f'{what} by {by:.0%} in {title} of {math.prod(tokens)} x {K} -> {N} '
                    f'({", ".join(versions())}); --no_fp8 trains in bf16')
    return None


def block_problem(block):
    """None where a whole Block of a BlockRun, as the run computes it, gives what a plain one gives
    uncompiled, in forward and backward; else a clause. A compiler fuses casts with what is around them, and
    may go wrong there alone."""
    choice = dataclasses.replace(block.choice, kernels='inductor')
    plain = Variant(dataclasses.replace(block, choice=choice))
    variant = Variant(block)
    variant.module.load_state_dict(plain.module.state_dict())
    for each in (plain, variant):
        each.x = plain.x
        each.calibrate()
    call = variant.module
    if block.compiled:
        call = torch.compile(variant.module, dynamic=False)
    inputs, dy = (plain.x.detach(),), plain.x.detach()
    expected = results(plain.module, plain.output_of(plain.module), inputs, dy)
    worst = max(error(results(variant.module, variant.output_of(call), inputs, dy), expected)
                for _ in range(PASSES))
    if worst <= BLOCK_TOLERANCE:
        return None
    how = 'torch.compile' if block.compiled else 'fp8_kernels=triton'
    shape = ' x '.join(map(str, dy.shape))
    return (f'{how} is off eager mode by {worst:.0%} in a block of {choice.backend}\'s {choice.recipe} '
            f'linears, {shape} ({", ".join(versions())}); --no_fp8 trains in bf16')


def results(linear, call, inputs, dy):
    """A linear's or block's output and gradients as `call`, it or its compiled form, computes them."""
    x = inputs[0].clone().requires_grad_()
    y = call(x, *inputs[1:])
    y.backward(dy)
    found = [y.detach(), x.grad, *(p.grad for p in linear.parameters())]
    linear.zero_grad(set_to_none=True)
    return found


def error(found, expected):
    """The largest |a - b| / |b| of pairs of tensors; inf where one is not finite."""
    errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, expected)]
    return max(e if math.isfinite(e) else math.inf for e in errors)


def versions():
    """Of what computes: GPU, torch, and the others that are installed."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'
    found = [device, f'torch {torch.__version__}']
    for package in ('triton', 'torchao', 'transformer-engine'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f'{package} {importlib.metadata.version(package)}')
    return found


# --------------------------------------------------------------------------------------- which layers to keep

def losing_layers(times):
    """Which linears of a block to keep in bf16, of its seconds 'in bf16', 'in fp8' and 'without' one linear
    in FP8: those without which it is no slower; all, where FP8 gains nothing and no single one is to
    blame."""
    names = [name.removeprefix('without ') for name in times if name.startswith('without ')]
    losing = [name for name in names if times[f'without {name}'] <= times['in fp8']]
    if not losing and times['in fp8'] >= times['in bf16']:
        return names
    return losing


def auto_keep(block):
    """fp8_keep=auto: the choice of a BlockRun with the linears kept in bf16 that do not gain, measured, or
    known from an earlier run with the same GPU, torch, shape and recipe; off, where none gains. All ranks
    measure, since a backend may reduce over them in every pass, and take rank 0's word."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    if block.device.type != 'cuda':
        if main:
            print('fp8_keep=auto measures speed, and a CPU only emulates FP8: no layer is kept in bf16')
        return block.choice
    found = parallel.rank_0s(remembered().get(block.key('fp8_keep=auto')))
    if not found:
        found = measure_block(block)
        if main:
            remember(block.key('fp8_keep=auto'), found)
    if main:
        times = ', '.join(f'{t * 1e3:.3f} ms {name}' for name, t in found['seconds'].items())
        print(f'fp8_keep=auto: a block takes {times}')
    if not found['gains']:
        return dataclasses.replace(fp8.OFF, reason='fp8_keep=auto: a block is no faster in FP8 here')
    return dataclasses.replace(block.choice, keep=tuple(found['keep']))


class Variant:
    """One block of a BlockRun with the linears `keep` in bf16. Called, it makes a forward and backward pass;
    calibrate() comes first. On several ranks, all make one, and call it as often."""

    def __init__(self, block, keep=(), compiled=False):
        config, device = block.config, block.device
        choice = dataclasses.replace(block.choice, keep=tuple(keep))
        self.module = Block(config, fp8.linear_factory(choice, Linear), 'h.0').to(device)
        for name, p in self.module.named_parameters():
            norm = name.startswith('ln_') and name.endswith('weight')
            torch.nn.init.normal_(p, mean=float(norm), std=0.02)
        self.state = fp8.State(self.module, choice)
        shape = block.sequences, config.block_size, config.n_embd
        self.x = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()
        self.rope = None
        if config.position == 'rope':
            self.rope = tuple(table.to(device) for table in rope_tables(config, config.block_size))
        self.forward = torch.compile(self.module) if compiled else self.module

    def __call__(self):
        self.one_pass(self.forward, self.x)

    def one_pass(self, forward, x):
        self.output_of(forward)(x).backward(x.detach())
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None

    def output_of(self, forward):
        """The block as a function of x alone; forward: its module, or that compiled."""
        def call(x):
            y = forward(x, self.rope, None)
            return y if isinstance(y, torch.Tensor) else y[0] + y[1]  # a FusedBlock's sum is the next one's
        return call

    def calibrate(self):
        """Gives delayed scaling its scales. Raises fp8.DeviceError where an operand is zero or not finite."""
        x, *_ = glance(self.x, self.x)
        run = functools.partial(self.one_pass, self.module, x)
        self.state.calibrate(run)
        check_operands(health(self.module, self.state.choice, run))


def check_operands(rows):
    """rows: health's. A multiplication of zeros or NaNs draws less power and is faster than a run's. Raises
    fp8.DeviceError."""
    for row in rows:
        if not (0 < row['amax'] < math.inf and 0 < row['scale'] < math.inf):
            raise fp8.DeviceError(f'fp8_keep=auto cannot time {row["layer"]}, whose {row["tensor"]} has amax '
                               f'{row["amax"]} and scale {row["scale"]}; --fp8_keep=NAMES needs no timing')


def measure_block(block):
    """One block forward and backward in bf16, in FP8, and in FP8 but for one linear: {'keep': the linears to
    keep in bf16, 'gains': whether another is left, 'seconds': variant -> seconds}."""
    whole, plain = Variant(block, (), block.compiled), Variant(block, (), block.bf16_compiled)
    runs = {'in bf16': plain, 'in fp8': whole}
    names = list(fp8.fp8_linears(whole.module))
    for name in names:
        runs[f'without {name}'] = Variant(block, (name,), block.compiled)
    for variant in runs.values():  # behind the last State, which makes Transformer Engine forget histories
        variant.calibrate()
    runs['in bf16'] = in_bf16(plain)
    calls = 10 if block.device.type == 'cuda' else 1  # a block is over in a millisecond
    # every variant is a graph of the same code: more than torch.compile keeps by default
    with torch._dynamo.config.patch(recompile_limit=4 * len(runs)):
        times = parallel.rank_0s(medians(runs, times=calls))  # all decide alike what comes next
        keep = losing_layers(times)
        if 0 < len(keep) < len(names):  # together, the others must still beat bf16
            chosen = Variant(block, keep, block.compiled)
            chosen.calibrate()
            again = medians({'in bf16': runs['in bf16'], 'chosen': chosen}, times=calls)
            again = parallel.rank_0s(again)
            times |= {f'{name} (again)': t for name, t in again.items()}
            if again['chosen'] >= again['in bf16']:
                keep = names
    torch._dynamo.reset()
    return {'keep': keep, 'gains': len(keep) < len(names), 'seconds': times}
