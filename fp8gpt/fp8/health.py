"""Measures what FP8 does on this machine: to the numbers of each cast, to a model's gradients, to the time.

    rows = cast_health(model, choice, run)          # for each cast: amax, scale, clamped, flushed, SQNR
    choice, lines = self_check(sample, choice)      # before step 0: right and fast, or off

`run` is a forward and backward pass. The model's gradients and amaxes are afterwards as they were before.
"""
import contextlib
import math
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from . import HEAD, OFF, DeviceError, State, fp8_linears, no_trace
from .backends import distances, in_one_line, output_and_gradients
from .linear import E4M3, E5M2, GRAD, INPUT, RECIPES, WEIGHT, falls_back, quantizers

FIGURES = 'amax', 'scale', 'saturated', 'flushed', 'sqnr_db'
LOOKED_AT = 'input', 'weight', 'grad'   # by linear.py's INPUT, WEIGHT and GRAD, as Quantizers begin
CLEAN = {E4M3: 31.5, E5M2: 25.5}        # dB that rounding alone leaves of normal data


# ---------------------------------------------------------------------------------------------- each cast

@torch.no_grad()
def tensor_health(x, quantizer, scale=None):
    """Return {figure: number} of a tensor (..., C) that a Quantizer casts with a scale (None: its own).

    amax; scale, the smallest of several; saturated, the share of values clamped; flushed, the share that
    became zero; sqnr_db, the signal-to-quantisation-noise ratio, 10 log10(sum x^2 / sum (x - quantised x)^2).
    """
    x = x.flatten(0, -2).float()
    cast = quantizer(x, scale)
    back = cast.dequantize()
    saturated = (cast.data.float().abs() == quantizer.largest) & (x.abs() > 1.00001 * back.abs())
    flushed = (back == 0) & (x != 0)
    # fp64: in fp32 squares of 1e20 would overflow, those of 1e-25 vanish
    signal, noise = (torch.linalg.vector_norm(each, dtype=torch.float64) for each in (x, x - back))
    sqnr_db = (20 * (signal / noise).log10()).where(noise != 0, math.inf)     # zeros are exact
    figures = (x.abs().amax(), 1 / cast.scale_inv.max(),
               saturated.float().mean(), flushed.float().mean(), sqnr_db)
    return dict(zip(FIGURES, torch.stack(figures).tolist()))


def cast_health(model, choice, run):
    """Return a row for each FP8 linear and tensor, of its worst call, by emulate's quantizer for any backend:
    'layer', 'tensor' ('input', 'weight' or 'grad'), 'dtype' and the figures of tensor_health. (The head's
    gradient, whose scale is fixed, has none.) run(): a forward and backward pass of the model, in FP8."""
    usual, rows = quantizers(choice.recipe, choice.format, choice.options.margin), {}

    def watch(layer, module, arguments, named, y):
        kinds = module.arithmetic.quantizers if layer == HEAD else usual
        scale = getattr(module, 'scale', None)

        def look(index, x):
            row = {'layer': layer, 'tensor': LOOKED_AT[index], 'dtype': kinds[index].dtype,
                   **tensor_health(x, kinds[index], None if scale is None else scale[index])}
            rows[layer, index] = max(row, rows.get((layer, index), row), key=badness)

        x = [*arguments, *named.values()][0]
        if falls_back(x, RECIPES[choice.recipe].multiple):     # nothing was cast
            return
        look(INPUT, x)
        weight, sharded = module.weight, getattr(module, 'sharded', None)
        if sharded:     # what is gathered in FP8 is no weight
            weight = None if sharded.host is not None else sharded.weight.full_tensor()
        if weight is not None:  # a frozen weight is there as its cast alone
            look(WEIGHT, weight)
        if y.requires_grad and y.dim():  # the head's y is the loss
            y.register_hook(partial(look, GRAD))

    with contextlib.ExitStack() as hooks:
        for name, module in fp8_linears(model).items():
            # first, before a hook that changes y, or FSDP2's, which drops the whole weight
            hooks.enter_context(module.register_forward_hook(
                partial(watch, name), prepend=True, with_kwargs=True))
        hooks.enter_context(no_trace(model))
        run()
    return [*rows.values()]


def badness(row):
    """Return how bad a row of cast_health is: above 1 it is off, by the limits of diagnose.py's --help."""
    if math.isnan(row['sqnr_db']):      # a value that is not finite
        return math.inf
    return max((CLEAN[row['dtype']] - row['sqnr_db']) / 10, row['flushed'] / 0.1, row['saturated'] / 0.01)


def few_tokens(x, *others):
    """Return the first sequences of a micro-batch, each (B, T) or None, of 8,192 tokens together, since an
    uncompiled pass takes more memory than a compiled one; all, if T is not a multiple of every recipe's."""
    B, T = x.shape
    rows = max(1, 8192 // T) if T % 128 == 0 else B
    return [None if each is None else each[:rows] for each in (x, *others)]


def health_lines(rows):
    """Return lines for the console, of rows whose worst is the first: that one if each is fine, else the five
    worst that are off."""
    lines = [f'{row["layer"]} {row["tensor"]}: SQNR {row["sqnr_db"]:.1f} dB, flushed {row["flushed"]:.1%}, '
             f'saturated {row["saturated"]:.2%}, amax {row["amax"]:.1e}' for row in rows[:5]]
    off = sum(badness(row) > 1 for row in rows)
    if not off:
        return [f'FP8 health: good | worst {lines[0]}']
    return [f'FP8 health: {off} of {len(rows)} casts are off | limits: python diagnose.py --help',
            *lines[:off]]


def log_health(log, step, model, choice, run):
    """Return cast_health's rows at a step, the worst first. Print their health_lines; record their figures
    and the geometric means of the scales of forward (input, weight) and backward (grad). log: a RunLog."""
    rows = sorted(cast_health(model, choice, run), key=badness, reverse=True)
    for line in health_lines(rows):
        log.say_at(step, line)
    scalars = {f'fp8_{row["layer"]}/{row["tensor"]}_{name}': row[name] for row in rows for name in FIGURES}
    for name, tensors in ('fwd', LOOKED_AT[:GRAD]), ('bwd', LOOKED_AT[GRAD:]):
        scales = [row['scale'] for row in rows if row['tensor'] in tensors]
        scalars[f'fp8_{name}_scale'] = statistics.geometric_mean(scales or [math.nan])
    log.scalars(step, **scalars)
    return rows


def resume_flags(rows, choice):
    """Return the flags with which to resume after non-finite gradients, by the rows of log_health: the three
    worst layers in bf16 and, with delayed scaling, a larger margin, since an amax may grow between two steps.
    """
    layers = dict.fromkeys([*choice.options.keep, *(row['layer'] for row in rows[:3])])
    margin = f' --fp8_margin={choice.options.margin + 1}' if RECIPES[choice.recipe].delayed else ''
    return f'--resume=latest --fp8_keep={",".join(layers)}{margin}'


# ------------------------------------------------------------------------- before step 0: right, and fast?

# Of a linear's result, in norm: torchao and te round scales otherwise than emulate. y and dx are summed
# fast, as an H100 does: weights have both signs, so with 13 bits of fraction y is 0.03% off at 768 features,
# 0.3% at 16,384, 0.5% at 53,248, dx 0.6% at 57,344 (mmaemu 0.1.0's arithmetic); with 10 bits, 3.2% at 16,384.
TOLERANCE = 0.03
# Of a block's results in bf16, in norm, beyond half as much again as emulate is off them. A compiled block
# rounds to bf16 in other places, so that casts find other neighbours: in each recipe it was as far from bf16
# as emulate, within 5%, but up to 6% from emulate (256 wide, on a CPU). What compiled code did to a tenth of
# the columns of one operand doubled its distance from bf16 (docs/log.md).
BLOCK_TOLERANCE = 0.02
PASSES = 16             # one pass in four of a miscompiled cast was wrong (triton-lang/triton 11111)


@dataclass(frozen=True)
class Sample:
    """Holds a small model that stands for the run's, and how the run computes.

    build(choice, blocks): the model, with a fp8.Choice, on its device, of so many blocks or fewer. inputs:
    tensors (B, T, ...); model(*inputs) is a tensor. compiled, bf16_compiled: whether the run is compiled in
    FP8, and would be in bf16. micro_steps: of an optimizer step. capture: fp8gpt.graphs.capture, where
    the run replays its micro-steps."""
    build: object
    inputs: tuple
    compiled: bool = False
    bf16_compiled: bool = False
    micro_steps: int = 1
    capture: object = None

    def problem(self, choice):
        """Return None if each FP8 linear of the model, and the whole model, compute what emulate computes in
        eager mode, in forward and backward; else a clause. A compiler fuses casts with what is around them,
        so the whole may be wrong where its parts are right. All ranks call it, and return the same."""
        linears = {(linear.in_features, linear.out_features): name
                   for name, linear in fp8_linears(self.build(choice, 1)).items() if name != HEAD}
        for name in (*linears.values(), ''):
            try:
                problem = self.part_problem(choice, name)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers and kernels of others raise anything
                problem = f'{choice.backend} failed: {in_one_line(error)}'
            problem = max(all_ranks(problem), key=bool)     # of any rank
            if problem:
                return problem
        return None

    def part_problem(self, choice, name):
        """Return a clause if the model's part of this name ('': all of it) is wrong, else None."""
        choices = replace(choice, backend='emulate', kernels='inductor'), choice
        plain, part = (self.build(each, 1).get_submodule(name) for each in choices)
        part.load_state_dict(plain.state_dict())
        # an eager pass takes more memory than the run's own, several times as much with an FP8 head
        what, batch = 'block', [few_tokens(*self.inputs)]
        if name:
            what = f'linear of {part.in_features} -> {part.out_features}'
            batch = one_signed(batch[0][0], plain)
        for each, module in zip(choices, (plain, part)):
            state = calibrated_state(module, each, *batch)
        state.weight_cache.new_step(self.micro_steps)   # of `part`: it reads kept casts where the run does
        exact = expected = output_and_gradients(plain, *batch)
        right = TOLERANCE
        if not name:
            in_bf16 = self.build(OFF, 1)
            in_bf16.load_state_dict(plain.state_dict())
            exact, right = output_and_gradients(in_bf16, *batch), BLOCK_TOLERANCE
        if self.compiled:
            part.compile(dynamic=False)
        passes = [excess(output_and_gradients(part, *batch), expected, exact) for _ in range(PASSES)]
        off = torch.stack(passes).max()
        torch._dynamo.reset()   # beyond its limit of graphs of one code, the next part would run eagerly
        if off <= right:
            return None
        others = '--fp8_recipe=tensorwise --fp8_kernels=inductor or ' * (choice.kernels == 'triton')
        return (f'a {what} is off by {off:.0%} in {choice.backend}, {choice.recipe}, '
                f'kernels={choice.kernels}, {"" if self.compiled else "not "}compiled; try {others}--no_fp8')

    def times(self, choices):
        """Return name -> median seconds of a forward and backward pass, of name -> fp8.Choice. All ranks call
        it, since a backend may reduce over them in every pass, and return rank 0's."""
        runs = {name: partial(next, self.passes(choice)) for name, choice in choices.items()}
        seconds = medians(runs, times=10)  # a pass takes about 1 ms
        torch._dynamo.reset()
        return all_ranks(seconds)[0]

    def passes(self, choice):
        """Yield after each of an endless row of micro-steps, in which weights are cast as often as in the
        training run."""
        model = self.build(choice, 4)   # of one block, the host's start takes longer than the GPU (H100)
        state = calibrated_state(model, choice, self.inputs)
        compiled = self.compiled if choice.on else self.bf16_compiled
        if compiled:
            model.compile(dynamic=False)
        dy = torch.ones_like(model(*self.inputs))
        first = later = partial(output_and_gradients, model, self.inputs, dy)
        if compiled and self.capture:
            with contextlib.suppress(RuntimeError):     # of what no graph takes: the run does without, too
                for work in (lambda run: run(), self.capture):      # compiled before it is captured
                    state.weight_cache.new_step(self.micro_steps)
                    made = [work(first), work(first)]
                first, later = (replay for replay, _ in made)
        while True:
            state.weight_cache.new_step(self.micro_steps)
            for number in range(self.micro_steps):
                later() if number else first()
                yield


def excess(found, expected, exact):
    """Return by how much |found - exact| passes 1.5 |expected - exact|, over |exact|, at most among pairs of
    tensors, 0-dim; NaN where a value is not finite. Of a linear, exact is what is expected."""
    return (distances(found, exact) - 1.5 * distances(expected, exact)).max()


def one_signed(idx, linear):
    """Return ([x], dy) for a linear, bf16 of idx's shape (B, T): x uniform in [0, 1), and so every other
    column of dy. Their products agree in sign over tokens, and what short sums lose adds up: by an H100's
    fast sums their dW is 14% off at 8,192 tokens, which normal x and dy hide. The other columns have mean 0,
    so that a few wrong codes show, too; at 4,096 tokens their rows of dW are as large."""
    x = torch.rand(*idx.shape, linear.in_features, dtype=torch.bfloat16, device=idx.device).requires_grad_()
    dy = torch.rand_like(linear(x))
    dy[..., ::2].sub_(0.5).mul_(100)
    return [x], dy


def calibrated_state(model, choice, *batch):
    """Return the calibrated State of a model, which may lack layers that the option keep names. batch: the
    inputs, and perhaps dy, of output_and_gradients."""
    state = State(model, replace(choice, options=replace(choice.options, keep=())))
    state.calibrate(partial(output_and_gradients, model, *batch))
    return state


def all_ranks(value):
    """Return each rank's value, in their order: anything that pickles."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def self_check(sample, choice, orders=''):
    """Return (the fp8.Choice that runs, lines to print), from a Sample on a GPU.

    A choice that is wrong there becomes OFF, or raises DeviceError if there are `orders`. Without orders, one
    that is not faster than bf16 becomes OFF, too. Delayed scaling is timed where it would take the same
    kernels, but never chosen: scales of earlier steps are the user's decision. A choice with frozen weights
    is not timed: the sample's weights train, and in bf16 they may not fit."""
    problem = sample.problem(choice)
    if problem and orders:
        raise DeviceError(f'{orders}: {problem}')
    if problem:
        return replace(OFF, reason=problem), []
    if choice.options.lora_rank:
        return choice, []
    timed = {'bf16': OFF, 'FP8': choice}
    if choice.kernels == 'triton' and choice.recipe == 'tensorwise':
        timed['--fp8_recipe=delayed'] = replace(choice, recipe='delayed')
    times = sample.times(timed)
    gains = {name: times['bf16'] / times[name] for name in [*timed][1:]}
    measured = ', '.join(f'{name} x{gain:.2f}' for name, gain in gains.items())
    if gains['FP8'] <= 1 and not orders:
        return replace(OFF, reason=f'FP8 is not faster than bf16 here ({measured})'), []
    return choice, [f'speed     {measured} over bf16, measured here on a few blocks']


# ------------------------------------------------------------------------------------------------- the clock

def medians(runs, rounds=7, warmup=3, times=1):
    """Return name -> median wall-clock seconds of a call of name -> run(), with the GPU's work, in turns of
    `times` calls, so that other load on the machine hits all runs alike. The first turns, which compile, do
    not count."""
    def now():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    seconds = {name: [] for name in runs}
    for turn in range(warmup + rounds):
        for name in list(runs)[::(-1)**turn]:
            start = now()
            for _ in range(times):
                runs[name]()
            seconds[name].append((now() - start) / times)
    return {name: statistics.median(values[warmup:]) for name, values in seconds.items()}
