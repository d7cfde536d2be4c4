"""What FP8 does here, measured: to the numbers (health) and to the time (speed-up, and which layers to keep
in bf16).

`run` is one forward and backward pass that drops its gradients, so that nothing here leaves a trace in the
training.
"""
import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import statistics
import sys
import time

import torch
import torch.distributed as dist

import fp8
import parallel
from backends import BACKENDS
from configurator import MachineError, SettingError
from fp8_linear import quantizers
from model import Block, Compiled, GPTConfig, Linear, rope_tables

FIGURES = ('amax', 'scale', 'saturated', 'flushed', 'sqnr_db')
CACHE = os.path.join(os.environ.get('XDG_CACHE_HOME', os.path.expanduser('~/.cache')), 'fp8_keep.json')
GLANCE = 8192   # tokens of a micro-batch that an uncompiled pass takes


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
    """What of FP8 runs, and whether compiled, for a resolve.Run; run.compiled and, after a measurement for
    fp8_keep=auto, run.config['fp8_keep'] are set to it. Raises what fp8.choose raises."""
    if not 0 <= run.config['fp8_until'] <= 1:
        raise SettingError(f'fp8_until is a share of the run, 0 to 1, not {run.config["fp8_until"]}')
    linears = tuple(run.model_config.linears())
    tokens = max(1, run.batch_size) * run.model_config.block_size
    place = fp8.Place(run.device, tokens, run.compiled, linears, run.compute_dtype)
    choice = fp8.choose(fp8.Options.of(run.config), place)
    compiled, note = fp8.compiles(choice, run.compiled, run.config['compile_model'])
    if run.config['fp8_keep'] == 'auto' and choice.on:
        block = BlockRun(run.model_config, choice, run.batch_size, run.device,
                         compiled=compiled, bf16_compiled=run.compiled)
        choice = auto_keep(block)
        run.config['fp8_keep'] = ','.join(choice.keep) if choice.on else 'auto'
    settled = Settled(choice, compiled, run.compiled, precision='fp8' if choice.on else run.config['dtype'],
                      reason=f'{choice.backend}: {choice.reason}', note=note)
    run.compiled = compiled
    return settled


class Rehearsal:
    """Passes of the next micro-batch, which the loader keeps, forward and backward; their gradients are
    dropped. n_targets: what the loss is divided by."""

    def __init__(self, raw_model, loader, n_targets):
        self.raw_model, self.loader, self.n_targets = raw_model, loader, n_targets

    def __call__(self):
        """One pass of a part of the batch, uncompiled."""
        self.passes(self.raw_model, *glance(*self.loader.peek()))()

    def passes(self, network, x, y):
        """run(): one pass of x, y through the model as `network` computes it."""
        def run():
            network(x, y, n_targets=self.n_targets).backward()
            self.raw_model.zero_grad(set_to_none=True)
        return run


# ---------------------------------------------------------------------------------------------------- numbers

@torch.no_grad()
def tensor_health(x, quantizer, scale=None):
    """(5,) fp32, FIGURES of a tensor (..., C) quantised so (scale: see Quantizer): its amax; the scale, the
    smallest where there are several; the share of values clamped; the share of values that became zero; the
    signal-to-quantisation-noise ratio, 10 log10(sum x^2 / sum (x - quantised x)^2), in dB: 31.5 in e4m3 and
    25.5 in e5m2 for normal values."""
    x = x.reshape(-1, x.shape[-1]).float()
    amax = x.abs().amax()
    quantised = quantizer(x, scale, amax)
    data, back = quantised.data.float(), quantised.dequantize()
    full = data.abs() == quantizer.largest
    saturated = (full & (x.abs() > back.abs() * (1 + 1e-5))).float().mean()
    flushed = ((data == 0) & (x != 0)).float().mean()
    sqnr = 10 * (x.square().sum() / (x - back).square().sum()).log10()
    return torch.stack([amax, 1 / quantised.scale_inv.max(), saturated, flushed, sqnr])


def health(model, choice, run):
    """Rows {'layer', 'tensor': 'input' | 'weight' | 'grad', *FIGURES}, one for each FP8 linear and tensor, by
    emulate's quantiser for every backend. model: not compiled; run(): a forward and backward pass of it, in
    FP8."""
    kind, found, hooks = quantizers(choice.recipe, choice.format, choice.margin), {}, []

    def watch(name):
        def hook(module, arguments, y):
            scale = getattr(module, 'scale', None)
            scale = (None, None, None) if scale is None else scale.clone()
            found[name, 'input'] = tensor_health(arguments[0].detach(), kind.x, scale[0])
            found[name, 'weight'] = tensor_health(module.weight.detach(), kind.w, scale[1])

            def backward_hook(dy):
                found[name, 'grad'] = tensor_health(dy, kind.dy, scale[2])
            if y.requires_grad:
                y.register_hook(backward_hook)
        return hook

    try:
        for name, module in fp8.fp8_linears(model).items():
            hooks.append(module.register_forward_hook(watch(name)))
        run()
    finally:
        for hook in hooks:
            hook.remove()
    figures = torch.stack(list(found.values())).tolist() if found else []
    return [{'layer': layer, 'tensor': tensor, **dict(zip(FIGURES, row))}
            for (layer, tensor), row in zip(found, figures)]


def glance(x, y):
    """The first sequences of a micro-batch x, y (B, T), 8K tokens: uncompiled passes take more memory, which
    the micro-batch may have been chosen to fill. All of them where T is no multiple of every recipe's."""
    rows = max(1, GLANCE // x.shape[1]) if x.shape[1] % 128 == 0 else len(x)
    return x[:rows], y[:rows]


def worst(rows, n=5):
    """The n rows that FP8 hurts most: those that are not finite, then by their signal-to-noise ratio, or by
    the share of values clamped or lost, in dB likewise, where that is less: beside one outlier the noise
    looks small, whatever became of the rest."""
    def quality(row):
        if not math.isfinite(row['amax']) or not math.isfinite(row['sqnr_db']):
            return -math.inf
        lost = max(row['saturated'] + row['flushed'], 1e-9)
        return min(row['sqnr_db'], -10 * math.log10(lost))
    return sorted(rows, key=quality)[:n]


def health_lines(step, rows, n=5):
    """The n worst rows, for the console."""
    return [f'step {step:5d} | {r["layer"]:<20} {r["tensor"]:<6} amax {r["amax"]:.3e}  '
            f'scale {r["scale"]:.3e}  '
            f'saturated {r["saturated"]:.3%}  flushed to zero {r["flushed"]:.2%}  SQNR {r["sqnr_db"]:.1f} dB'
            for r in worst(rows, n)]


def health_scalars(rows):
    """name -> value, for RunLog.scalars: geometric means of the scales of forward (input, weight) and
    backward (grad), the worst of the other figures, and each row's."""
    def mean_scale(*tensors):
        scales = [r['scale'] for r in rows if r['tensor'] in tensors]
        logs = [math.log(scale) for scale in scales if 0 < scale < math.inf]
        return math.exp(statistics.fmean(logs)) if logs else math.nan

    scalars = {
        'fp8_fwd_scale': mean_scale('input', 'weight'),
        'fp8_bwd_scale': mean_scale('grad'),
        'fp8_saturated': max(r['saturated'] for r in rows),
        'fp8_flushed': max(r['flushed'] for r in rows),
        'fp8_sqnr_db': min(r['sqnr_db'] for r in rows),
    }
    for r in rows:
        scalars |= {f'fp8_{r["layer"]}/{r["tensor"]}_{figure}': r[figure] for figure in FIGURES}
    return scalars


def way_on(rows, choice, world_size):
    """The command that goes on after non-finite gradients: the worst layers in bf16, a margin where the
    choice can have one more."""
    layers = list(dict.fromkeys([*choice.keep, *(r['layer'] for r in worst(rows, 3))]))
    start = ['python']
    if world_size > 1:
        start = ['torchrun', '--standalone', f'--nproc_per_node={world_size}']
    flags = ['--resume=latest', f'--fp8_keep={",".join(layers)}']
    if BACKENDS[choice.backend].takes_margin(choice.recipe):
        flags.append(f'--fp8_margin={choice.margin + 1}')
    return shlex.join([*start, *sys.argv, *flags])


# ------------------------------------------------------------------------------------------------------- time

def seconds(run, times=1):
    """Mean wall-clock seconds of a call of run(), a GPU's work included."""
    def synchronize():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize()
    return (time.perf_counter() - start) / times


def medians(runs, rounds=7, warmup=3, times=1):
    """name -> median seconds of name -> run, in turns of `times` calls, so that what else happens on the
    machine hits all alike; the first turns, which compile, do not count."""
    taken = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        for name in list(runs)[::1 if turn % 2 else -1]:
            taken[name].append(seconds(runs[name], times))
    return {name: statistics.median(values[warmup:]) for name, values in taken.items()}


def in_bf16(run):
    """run under fp8.paused()."""
    def paused_run():
        with fp8.paused():
            run()
    return paused_run


def speedup(run, rival, state):
    """How many times as fast run() is in FP8 as rival() is in bf16."""
    times = medians({'bf16': in_bf16(rival), 'fp8': run})
    state.forget()
    return times['bf16'] / times['fp8']


def speedup_note(rehearsal, model, settled, state):
    """What the precision line says of FP8's speed on the run's own batch, against bf16 at its best; ''
    without a GPU. model: the run's, compiled or not."""
    x, y = rehearsal.loader.peek()
    if x.device.type != 'cuda':
        return ''
    rival = model
    if settled.bf16_compiled and not settled.compiled:
        rival = Compiled(rehearsal.raw_model)
    ratio = speedup(rehearsal.passes(model, x, y), rehearsal.passes(rival, x, y), state)
    return f' | fp8 x{ratio:.2f} vs bf16 (measured)'


def losing_layers(times):
    """Which linears of a block to keep in bf16, of its seconds 'in bf16', 'in fp8' and 'without' one linear
    in FP8: those without which it is no slower; all, where FP8 gains nothing and no single one is to
    blame."""
    names = [name.removeprefix('without ') for name in times if name.startswith('without ')]
    losing = [name for name in names if times[f'without {name}'] <= times['in fp8']]
    if not losing and times['in fp8'] >= times['in bf16']:
        return names
    return losing


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """One block of a run, to be timed. config: GPTConfig. choice: fp8.Choice. batch_size: sequences; 0, which
    is settled later, stands for 16K tokens. compiled: whether the run is; bf16_compiled: whether it would be
    in bf16."""
    config: GPTConfig
    choice: fp8.Choice
    batch_size: int
    device: torch.device
    compiled: bool
    bf16_compiled: bool

    @property
    def sequences(self):
        return self.batch_size or max(1, 16384 // self.config.block_size)

    def key(self):
        """What the times depend on, as text."""
        return json.dumps([
            torch.cuda.get_device_name(self.device), torch.__version__,
            self.choice.backend, self.choice.recipe, self.choice.format,
            self.compiled, self.bf16_compiled, self.sequences, dataclasses.astuple(self.config)])


def auto_keep(block):
    """fp8_keep=auto: the choice of a BlockRun with the linears kept in bf16 that do not gain, measured, or
    known from an earlier run with the same GPU, torch, shape and recipe; off, where none gains. All ranks
    measure, since a backend may reduce over them in every pass, and take rank 0's word."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    if block.device.type != 'cuda':
        if main:
            print('fp8_keep=auto measures speed, and a CPU only emulates FP8: no layer is kept in bf16')
        return block.choice
    found = parallel.rank_0s(remembered().get(block.key()))
    if not found:
        found = measure_block(block)
        if main:
            remember(block.key(), found)
    if main:
        times = ', '.join(f'{t * 1e3:.3f} ms {name}' for name, t in found['seconds'].items())
        print(f'fp8_keep=auto: a block takes {times}')
    if not found['gains']:
        return dataclasses.replace(fp8.OFF, reason='fp8_keep=auto: a block is no faster in FP8 here')
    return dataclasses.replace(block.choice, keep=tuple(found['keep']))


def remembered():
    """Key -> what measure_block found, of earlier runs."""
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


class Variant:
    """One block of a BlockRun with the linears `keep` in bf16. Called, it makes a forward and backward pass;
    calibrate() comes first. On several ranks, all make one, and call it as often."""

    def __init__(self, block, keep=(), compiled=False):
        config, device = block.config, block.device
        choice = dataclasses.replace(block.choice, keep=tuple(keep))
        self.module = Block(config, fp8.linear_factory(choice, Linear), 'h.0').to(device)
        for p in self.module.parameters():
            torch.nn.init.normal_(p, std=0.02)
        self.state = fp8.State(self.module, choice)
        shape = block.sequences, config.block_size, config.n_embd
        self.x = torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_()
        self.rope = None
        if config.position == 'rope':
            self.rope = tuple(table.to(device) for table in rope_tables(config))
        self.forward = torch.compile(self.module) if compiled else self.module

    def __call__(self):
        self.one_pass(self.forward, self.x)

    def one_pass(self, forward, x):
        forward(x, self.rope, None).backward(x.detach())
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None

    def calibrate(self):
        """Gives delayed scaling its scales. Raises MachineError where an operand is zero or not finite."""
        x, _ = glance(self.x, self.x)
        run = functools.partial(self.one_pass, self.module, x)
        self.state.calibrate(run)
        check_operands(health(self.module, self.state.choice, run))


def check_operands(rows):
    """rows: health's. A multiplication of zeros or NaNs draws less power and is faster than a run's. Raises
    MachineError."""
    for row in rows:
        if not (0 < row['amax'] < math.inf and 0 < row['scale'] < math.inf):
            raise MachineError(f'fp8_keep=auto cannot time {row["layer"]}, whose {row["tensor"]} has amax '
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
