"""What FP8 does here, measured: to the numbers (health) and to the time (speed-up).

`run` is one forward and backward pass that drops its gradients, so that nothing here leaves a trace in the
training.
"""
import dataclasses
import functools
import math
import statistics
import time

import torch

from fp8gpt import fp8
from fp8gpt.fp8.linear import E5M2, FORMATS, RECIPES, quantizers

FIGURES = ('amax', 'scale', 'saturated', 'flushed', 'sqnr_db')
TENSORS = ('input', 'weight', 'grad')
CLEAN = {'e4m3': 31.5, 'e5m2': 25.5}    # dB that rounding alone leaves of normal data
BAD = {'sqnr_db': 10, 'flushed': 0.1, 'saturated': 0.01}
WATCH = 0.1                             # of BAD's flushed and saturated
GLANCE = 8192   # tokens of a micro-batch that an uncompiled pass takes


class Rehearsal:
    """Passes of the next micro-batch, which the loader keeps, forward and backward; their gradients are
    dropped. n_targets: what the loss is divided by."""

    def __init__(self, model, loader, n_targets):
        self.model, self.loader, self.n_targets = model, loader, n_targets

    def __call__(self):
        """One pass of a part of the batch, uncompiled."""
        with self.model.eager():
            self.one_pass(*glance(*self.loader.peek()))

    def one_pass(self, x, y, examples=None):
        """One pass of a micro-batch."""
        self.model(x, y, n_targets=self.n_targets, examples=examples).backward()
        self.model.zero_grad(set_to_none=True)


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
    """Rows {'layer', 'tensor': 'input' | 'weight' | 'grad', *FIGURES}, one for each FP8 linear and tensor
    (the head's gradient aside, whose scale takes no look), by emulate's quantiser for every backend. model:
    not compiled; run(): a forward and backward pass of it, in FP8."""
    usual, found, hooks = quantizers(choice.recipe, choice.format, choice.margin), {}, []

    def watch(name, kind):
        def hook(module, arguments, y):
            scale = getattr(module, 'scale', None)
            scale = (None, None, None) if scale is None else scale.clone()
            found[name, 'input'] = tensor_health(arguments[0].detach(), kind.x, scale[0])
            if module.weight is not None:  # of a frozen one the cast alone is there
                found[name, 'weight'] = tensor_health(module.weight.detach(), kind.w, scale[1])

            def backward_hook(dy):
                found[name, 'grad'] = tensor_health(dy, kind.dy, scale[2])
            if y.requires_grad and y.dim():  # the head's is the loss
                y.register_hook(backward_hook)
        return hook

    try:
        for name, module in fp8.fp8_linears(model).items():
            kind = module.arithmetic.quantizers if name == fp8.HEAD else usual
            hooks.append(module.register_forward_hook(watch(name, kind)))
        run()
    finally:
        for hook in hooks:
            hook.remove()
    figures = torch.stack(list(found.values())).tolist() if found else []
    return [{'layer': layer, 'tensor': tensor, **dict(zip(FIGURES, row))}
            for (layer, tensor), row in zip(found, figures)]


def glance(x, y, examples=None):
    """The first sequences of a micro-batch, each (B, T) or None, 8K tokens: uncompiled passes take more
    memory, which the micro-batch may have been chosen to fill. All of them where T is no multiple of every
    recipe's."""
    rows = max(1, GLANCE // x.shape[1]) if x.shape[1] % 128 == 0 else len(x)
    return x[:rows], y[:rows], None if examples is None else examples[:rows]


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


def health_lines(rows, choice, n=5):
    """For the console: one line where each cast is fine, else the n worst of the others."""
    off = [row for row in rows if judge([row], choice)['verdict'] != 'fine']
    if off:
        first = f'FP8 health: {len(off)} of {len(rows)} casts are off | limits: python diagnose.py --help'
        return [first, *(f'{r["layer"]} {r["tensor"]}: SQNR {r["sqnr_db"]:.1f} dB, '
                         f'flushed {r["flushed"]:.1%}, saturated {r["saturated"]:.2%}, '
                         f'amax {r["amax"]:.1e}' for r in worst(off, n))]
    lowest = min(rows, key=lambda row: row['sqnr_db'])
    lost = max(row['flushed'] + row['saturated'] for row in rows)
    return [f'FP8 health: good | lowest SQNR {lowest["sqnr_db"]:.1f} dB '
            f'({lowest["layer"]} {lowest["tensor"]}) | lost {lost:.1%}']


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


def tell_health(log, step, choice, rehearsal):
    """Looks at a micro-batch's casts, layer by layer; says how they are, logs all and returns them. log: a
    runlog.RunLog."""
    rows = health(rehearsal.model, choice, rehearsal)
    for line in health_lines(rows, choice):
        log.say_at(step, line)
    log.scalars(step, **health_scalars(rows))
    return rows


def way_on(rows, choice, ranks):
    """Return the flags to go on with after non-finite gradients: the worst layers in bf16 and, with delayed
    scaling, a margin, since an amax may grow between two steps; any other recipe would only flush more by
    it. Where layers are kept already, a scale a row instead of one a tensor."""
    layers = list(dict.fromkeys([*choice.keep, *(r['layer'] for r in worst(rows, 3))]))
    flags = ['--resume=latest', f'--fp8_keep={",".join(layers)}']
    if RECIPES[choice.recipe].delayed:
        flags.append(f'--fp8_margin={choice.margin + 1}')
    elif choice.keep and may_go_by_rows(choice, ranks.device):
        flags += ['--fp8_kernels=auto'] if choice.kernels == 'triton' else []  # it has no scales of rows
        flags.append('--fp8_recipe=rowwise')
    return ' '.join(flags)


def may_go_by_rows(choice, device):
    """Whether a choice of one scale a tensor can have one a row, by its own backend."""
    by_rows = dataclasses.replace(choice, recipe='rowwise')
    return choice.recipe == 'tensorwise' and bool(fp8.first_that_runs(by_rows, [choice.backend], device)[0])


def judge(rows, choice):
    """One cast's rows of measure.health, a batch each -> one: the worst figures, shares' means too,
    'badness' (above 1 is bad) and 'verdict', 'bad', 'watch' or 'fine': see diagnose.py."""
    tensor = rows[0]['tensor']
    dtype = FORMATS[choice.format][TENSORS.index(tensor)]
    amaxes = [row['amax'] for row in rows]
    ratios = [row['sqnr_db'] for row in rows if row['amax']]  # zeros are exact, and have no ratio
    found = {
        'layer': rows[0]['layer'],
        'tensor': tensor,
        'format': 'e5m2' if dtype == E5M2 else 'e4m3',
        'amax': max(amaxes),
        'scale': min(row['scale'] for row in rows),
        'sqnr_db': min(ratios, default=math.inf),
    }
    worst_share = 0.0
    for name in ('saturated', 'flushed'):
        shares = [row[name] for row in rows]
        found[name] = statistics.fmean(shares)
        found[f'{name}_max'] = max(shares)
        worst_share = max(worst_share, max(shares) / BAD[name])
    lost = CLEAN[found['format']] - found['sqnr_db']
    found['badness'] = max(lost / BAD['sqnr_db'], worst_share)
    if not math.isfinite(sum(amaxes)) or math.isnan(sum(ratios)):
        found |= {'amax': sum(amaxes), 'sqnr_db': math.nan, 'badness': math.inf}
    found['verdict'] = 'watch' if worst_share > WATCH else 'fine'
    if found['badness'] > 1:
        found['verdict'] = 'bad'
    return found


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
    """Return how many times as fast run() is in FP8 as rival() is in bf16."""
    times = medians({'bf16': in_bf16(rival), 'fp8': run})
    state.forget()
    return times['bf16'] / times['fp8']


def speedup_line(rehearsal, settled, state, micro_steps):
    """Return a line of FP8's speed on the run's own batch, against bf16 at its best; '' without a GPU, and
    for frozen weights, which bf16 would have to dequantise. micro_steps: of a step."""
    model, batch = rehearsal.model, rehearsal.loader.peek()
    if batch[0].device.type != 'cuda' or state.keeper.frozen:
        return ''
    in_fp8 = one_pass = functools.partial(rehearsal.one_pass, *batch)
    alone = settled.bf16_compiled and not settled.compiled
    if alone:
        model.compile()
        in_fp8 = in_eager_mode(one_pass)
    state.micro_step(0, micro_steps)
    ratio = speedup(in_fp8, one_pass, state)
    state.micro_step(0, 1)
    if alone:
        model.uncompile()
    return f'speed     fp8 x{ratio:.2f} vs bf16 (measured)'


def in_eager_mode(run):
    """Return run without torch.compile."""
    def eager_run(*inputs, **options):
        with torch.compiler.set_stance('force_eager'):
            return run(*inputs, **options)
    return eager_run
