"""What FP8 does here, measured: to the numbers (health) and to the time (speed-up, and which layers to keep in bf16).

`run` is one forward and backward pass that drops its gradients, so that nothing here leaves a trace in the training.
"""
import contextlib
import dataclasses
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
from model import Block, Linear, rope_tables
from quantize import casts, dequantize, quantize

FIGURES = ('amax', 'scale', 'saturated', 'flushed', 'sqnr_db')
CACHE = os.path.join(os.environ.get('XDG_CACHE_HOME', os.path.expanduser('~/.cache')), 'fp8_keep.json')


# ----------------------------------------------------------------------------------------------- numbers

@torch.no_grad()
def tensor_health(x, cast, reach=None):
    """(5,) fp32, FIGURES of a tensor (..., C) cast so (reach: see quantize): its amax; the scale, the smallest where there are
    several; the share of values clamped; the share of values that became zero; the signal-to-quantisation-noise ratio,
    10 log10(sum x^2 / sum (x - cast x)^2), in dB: 31.5 in e4m3 and 25.5 in e5m2 for normal values."""
    x = x.reshape(-1, x.shape[-1]).float()
    amax = x.abs().amax()
    operand = quantize(x, cast, reach, amax)
    values, back = operand.values.float(), dequantize(operand)
    full = values.abs() == torch.finfo(cast.dtype).max
    saturated = (full & (x.abs() > back.abs() * (1 + 1e-5))).float().mean()
    flushed = ((values == 0) & (x != 0)).float().mean()
    sqnr = 10 * (x.square().sum() / (x - back).square().sum()).log10()
    return torch.stack([amax, 1 / operand.inverse.max(), saturated, flushed, sqnr])


def health(model, choice, run):
    """Rows {'layer', 'tensor': 'input' | 'weight' | 'grad', *FIGURES}, one for each FP8 linear and tensor, by emulate's
    quantiser for every backend. model: not compiled; run(): a forward and backward pass of it, in FP8."""
    kit, found, hooks = casts(choice.recipe, choice.format, choice.margin), {}, []

    def watch(name):
        def hook(module, arguments, y):
            reach = getattr(module, 'reach', None)
            reach = (None, None, None) if reach is None else reach.clone()
            found[name, 'input'] = tensor_health(arguments[0].detach(), kit.x, reach[0])
            found[name, 'weight'] = tensor_health(module.weight.detach(), kit.w, reach[1])
            if y.requires_grad:
                y.register_hook(lambda dy: found.__setitem__((name, 'grad'), tensor_health(dy, kit.dy, reach[2])))
        return hook

    try:
        for name, module in fp8.fp8_linears(model).items():
            hooks.append(module.register_forward_hook(watch(name)))
        run()
    finally:
        for hook in hooks:
            hook.remove()
    figures = torch.stack(list(found.values())).tolist() if found else []
    return [{'layer': layer, 'tensor': tensor, **dict(zip(FIGURES, row))} for (layer, tensor), row in zip(found, figures)]


def glance(x, y):
    """The first sequences of a micro-batch x, y (B, T), 8K tokens: uncompiled passes take more memory, which the micro-batch may
    have been chosen to fill. All of them where T is no multiple of every recipe's."""
    rows = max(1, 8192 // x.shape[1]) if x.shape[1] % 128 == 0 else len(x)
    return x[:rows], y[:rows]


def worst(rows, n=5):
    """The n rows that FP8 hurts most: those that are not finite, then by their signal-to-noise ratio, or by the share of values
    clamped or lost, in dB likewise, where that is less: beside one outlier the noise looks small, whatever became of the rest."""
    def quality(row):
        finite = all(math.isfinite(row[figure]) for figure in ('amax', 'sqnr_db'))
        return min(row['sqnr_db'], -10 * math.log10(max(row['saturated'] + row['flushed'], 1e-9))) if finite else -math.inf
    return sorted(rows, key=quality)[:n]


def health_lines(rows, n=5):
    """The n worst rows, for the console."""
    return [f'{r["layer"]:<20} {r["tensor"]:<6} amax {r["amax"]:.3e}  scale {r["scale"]:.3e}  saturated {r["saturated"]:.3%}  '
            f'flushed to zero {r["flushed"]:.2%}  SQNR {r["sqnr_db"]:.1f} dB' for r in worst(rows, n)]


def health_scalars(rows):
    """name -> value, for RunLog.scalars: geometric means of the scales of forward (input, weight) and backward (grad), the
    worst of the other figures, and each row's."""
    def mean_scale(tensors):
        scales = [math.log(r['scale']) for r in rows if r['tensor'] in tensors and 0 < r['scale'] < math.inf]
        return math.exp(statistics.fmean(scales)) if scales else math.nan

    scalars = {'fp8_fwd_scale': mean_scale(('input', 'weight')), 'fp8_bwd_scale': mean_scale(('grad',)),
               'fp8_saturated': max(r['saturated'] for r in rows), 'fp8_flushed': max(r['flushed'] for r in rows),
               'fp8_sqnr_db': min(r['sqnr_db'] for r in rows)}
    return scalars | {f'fp8_{r["layer"]}/{r["tensor"]}_{figure}': r[figure] for r in rows for figure in FIGURES}


def way_on(rows, choice, world_size):
    """The command that goes on after non-finite gradients: the worst layers in bf16, a margin where the backend has one."""
    layers = list(dict.fromkeys([*choice.keep, *(r['layer'] for r in worst(rows, 3))]))
    margin = choice.backend in ('native', 'emulate') or choice.recipe == 'delayed'
    start = ['torchrun', '--standalone', f'--nproc_per_node={world_size}'] if world_size > 1 else ['python']
    flags = ['--resume=latest', f'--fp8_keep={",".join(layers)}'] + [f'--fp8_margin={choice.margin + 1}'] * margin
    return shlex.join([*start, *sys.argv, *flags])


# ----------------------------------------------------------------------------------------------- time

def seconds(run, times=1):
    """Mean wall-clock seconds of a call of run(), a GPU's work included."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize()
    return (time.perf_counter() - start) / times


def medians(runs, rounds=7, warmup=3, times=1):
    """name -> median seconds of name -> run, in turns of `times` calls, so that what else happens on the machine hits all alike;
    the first turns, which compile, do not count."""
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


def losing_layers(times):
    """Which linears of a block to keep in bf16, of its seconds 'in bf16', 'in fp8' and 'without' one linear in FP8: those
    without which it is no slower; all, where FP8 gains nothing and no single one is to blame."""
    names = [name.removeprefix('without ') for name in times if name.startswith('without ')]
    losing = [name for name in names if times[f'without {name}'] <= times['in fp8']]
    return names if not losing and times['in fp8'] >= times['in bf16'] else losing


def auto_keep(config, choice, batch_size, device, compiling, bf16_compiling):
    """fp8_keep=auto: the choice with the linears kept in bf16 that do not gain, measured on one block, or known from an earlier
    run with the same GPU, torch, shape and recipe; off, where none gains. Rank 0 measures, the others take its word.

    config: GPTConfig. batch_size: sequences; 0, which is settled later, stands for 16K tokens. compiling, bf16_compiling: whether
    the run is compiled, and whether it would be in bf16."""
    main = not dist.is_initialized() or dist.get_rank() == 0
    if device.type != 'cuda':
        if main:
            print('fp8_keep=auto measures speed, and a CPU only emulates FP8: no layer is kept in bf16')
        return choice
    batch_size = batch_size or max(1, 16384 // config.block_size)
    key = json.dumps([torch.cuda.get_device_name(device), torch.__version__, choice.backend, choice.recipe, choice.format, compiling,
                      bf16_compiling, batch_size, dataclasses.astuple(config)])
    found = [None]
    if main:
        known = {}
        with contextlib.suppress(OSError, ValueError), open(CACHE) as file:
            known = json.load(file)
        if key not in known:
            known[key] = measure_block(config, choice, batch_size, device, compiling, bf16_compiling)
            with contextlib.suppress(OSError):
                os.makedirs(os.path.dirname(CACHE), exist_ok=True)
                with open(CACHE + '.tmp', 'w') as file:
                    json.dump(known, file, indent=1)
                os.replace(CACHE + '.tmp', CACHE)
        found = [known[key]]
        print('fp8_keep=auto: a block takes ' + ', '.join(f'{t * 1e3:.3f} ms {n}' for n, t in found[0]['seconds'].items()))
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if not found[0]['gains']:
        return fp8.Choice('off', 'fp8_keep=auto: a block is no faster in FP8 here')
    return dataclasses.replace(choice, keep=tuple(found[0]['keep']))


def measure_block(config, choice, batch_size, device, compiling, bf16_compiling):
    """One block forward and backward in bf16, in FP8, and in FP8 but for one linear: {'keep': the linears to keep in bf16,
    'gains': whether another is left, 'seconds': variant -> seconds}."""
    x = torch.randn(batch_size, config.block_size, config.n_embd, dtype=torch.bfloat16, device=device).requires_grad_()
    rope = tuple(table.to(device) for table in rope_tables(config)) if config.position == 'rope' else None

    def variant(keep, compiling=compiling):
        block = Block(config, fp8.linear_factory(dataclasses.replace(choice, keep=tuple(keep)), Linear), 'h.0').to(device)
        for p in block.parameters():
            torch.nn.init.normal_(p, std=0.02)
        forward = torch.compile(block) if compiling else block

        def run():
            forward(x, rope, None).backward(x.detach())
            block.zero_grad(set_to_none=True)
            x.grad = None
        return run, list(fp8.fp8_linears(block))

    whole, names = variant(())
    calls = 10 if device.type == 'cuda' else 1  # a block is over in a millisecond
    runs = {'in bf16': in_bf16(variant((), bf16_compiling)[0]), 'in fp8': whole, **{f'without {name}': variant((name,))[0] for name in names}}
    # every variant is a graph of the same code: more than torch.compile keeps by default
    with torch._dynamo.config.patch(recompile_limit=4 * len(runs)):
        times = medians(runs, times=calls)
        keep = losing_layers(times)
        if 0 < len(keep) < len(names):  # together, the others must still beat bf16
            again = medians({'in bf16': runs['in bf16'], 'chosen': variant(keep)[0]}, times=calls)
            times |= {f'{name} (again)': t for name, t in again.items()}
            keep = names if again['chosen'] >= again['in bf16'] else keep
    torch._dynamo.reset()
    return {'keep': keep, 'gains': len(keep) < len(names), 'seconds': times}
