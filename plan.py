"""What a configuration needs and what FP8 buys it, before a GPU is rented: memory, time, money. No GPU, data
or weights needed.

$ python plan.py config/gpt2_fp8.py --gpu=h200 --gpus=8 --usd_per_gpu_hour=3   # the price is yours
$ python plan.py config/h100_350m_fp8.py --batch_size=0         # the largest micro-batch modelled to fit
$ python plan.py --init_from=gpt2-xl --batch_size=16 --max_tokens=3e10 --gpu=b200
$ python plan.py --init_from=llama-3.1-8b --sharding_mode=fsdp_full --gpus=8,64,512     # a line for each

Every other word is a setting of train_fp8.py. All of this is modelled, not measured. Memory: see
planning/memory.py. Time: see planning/roofline.py and planning/network.py; what kernels read and write is
counted of torch.compile's code.
"""
import argparse
import os
import re
import sys

from configurator import (
    MachineError, MissingError, Parser, SettingError, at_least, configure, one_line_errors)

HERE = os.path.dirname(os.path.abspath(__file__))


def numbers(text):
    """'8,64' -> [8, 64]."""
    if not re.fullmatch(r'0*[1-9]\d*(,0*[1-9]\d*)*', text):
        raise argparse.ArgumentTypeError(f'wants whole numbers >= 1 with commas between, not {text!r}')
    return [int(word) for word in text.split(',')]


def arguments(words):
    """The command line, with train_fp8.py's settings as `config`. Raises SettingError."""
    parser = Parser(__doc__)
    parser.add('--gpu', '', help='h100, h200, b200, a100, ...; by default the one here, else h100')
    parser.add('--gpus', [1], type=numbers, help='how many; several with commas between: a line for each')
    parser.add('--gpus_per_node', 8, type=at_least(1), help='GPUs that NVLink joins')
    parser.add('--network', 50.0, help='GB/s of a GPU between nodes (50: a card of 400 Gb/s each)')
    asked, rest = parser.parse_known_args(words)
    asked.config = config = configure(os.path.join(HERE, 'train_fp8.py'), rest, nearby=vars(asked))
    if config['resume']:
        raise SettingError('a plan starts from settings: in place of --resume, '
                           '--init_from=that checkpoint takes its architecture')
    if config['dtype'] != 'bf16':
        raise SettingError(f'plan.py models bf16 and FP8, not dtype={config["dtype"]}')
    return asked


if __name__ == '__main__':
    one_line_errors()
    arguments(sys.argv[1:])

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import bisect
import copy
import dataclasses

import torch

import fp8
import lora
import resolve
import runlog
from gpus import GPUS, find_gpu, gpu_of, peak_flops
from planning import network, roofline
from planning.memory import MARGIN, Shape, fits, memory, parameters
from planning.trial import HEADROOM

BOTH = 'bf16', 'fp8'
MODELLED = (
    f'modelled, not measured: {roofline.GEMM:.0%} of the FLOP/s and {roofline.BANDWIDTH:.0%} of the '
    'bandwidth in matrix multiplications (torchao\'s roofline_utils.py, H100), '
    f'{roofline.ATTENTION:.0%} in attention (FlashAttention-2: Shah et al. 2024), '
    f'{roofline.TRAFFIC:.0%} of the bandwidth elsewhere and {network.ATTAINED:.0%} of it between GPUs '
    '(assumptions), peaks of NVIDIA\'s data sheets; bytes and launches as counted of torch.compile\'s code')


# ------------------------------------------------------------------------------------------------------- plan

@dataclasses.dataclass
class Row:
    """A linear, that of all blocks in one. why_bf16: None in FP8. share: of the FLOPs. gain: FP8's speed over
    bf16's; None where there is none."""
    name: str
    in_features: int
    out_features: int
    why_bf16: str | None
    count: int = 0
    share: float = 0.0
    gain: float | None = None


@dataclasses.dataclass
class Plan:
    """precision is 'bf16' or 'fp8' throughout. flops: per token. memory: precision -> component -> bytes of
    one GPU. seconds: precision -> part -> seconds of a step; without a GPU, or for FP8 on one without FP8
    units, None. unknown: why the run's length is not known, or ''."""
    shape: Shape
    parameters: dict
    flops: int
    memory: dict
    seconds: dict
    linears: list
    unknown: str = ''

    @property
    def tokens_per_step(self):
        return self.shape.tokens * self.shape.micro_steps * self.shape.gpus

    def speed(self, precision):
        """Tokens per second of all GPUs together."""
        return self.tokens_per_step / sum(self.seconds[precision].values())

    def gain(self):
        """FP8's speed over bf16's."""
        return self.speed('fp8') / self.speed('bf16')

    def hours(self, precision, tokens):
        return tokens / self.speed(precision) / 3600

    def mfu(self, precision):
        """Of that precision's peak."""
        peak = peak_flops(self.shape.gpu, precision)
        return self.speed(precision) / self.shape.gpus * self.flops / peak


def plan(shape):
    """The Plan of a Shape."""
    config, seconds = shape.config, dict.fromkeys(BOTH)
    for precision in BOTH:
        if peak_flops(shape.gpu, precision):
            seconds[precision] = roofline.step_seconds(shape, shape.choice_in(precision))
    return Plan(
        shape=shape,
        parameters=parameters(config),
        flops=lora.flops_per_token(config, shape.adapters, config.block_size),
        memory={precision: memory(shape, precision) for precision in BOTH},
        seconds=seconds,
        linears=linear_rows(shape),
    )


def linear_rows(shape):
    """[Row] of the config's linears."""
    config, choice, rows = shape.config, shape.choice_in('fp8'), {}
    flops = lora.flops_per_token(config, shape.adapters, config.block_size)
    each = 4 if shape.adapters.rank else 6  # a frozen weight has no gradient
    for linear in config.linears():
        name, k, n = linear
        why = fp8.why_bf16(choice, *linear)
        used = config.vocab_size if name == 'lm_head' else n
        name = re.sub(r'\.\d+\.', '.*.', name)
        row = rows.setdefault((name, why), Row(name, k, n, why))
        row.count += 1
        row.share += each * k * used / flops
        if peak_flops(shape.gpu, 'fp8') and not why:
            row.gain = roofline.gain(shape, choice, linear) if name != fp8.HEAD else None
    return list(rows.values())


# ----------------------------------------------------------------------------------------------------- report

def outlook(run, length, world_size, precision):
    """What a training script says of its memory and speed beforehand: lines, as many as are modelled in this
    precision. run, length: resolve's."""
    gpu = gpu_of(run.device)
    shape = Shape.of(run, gpu=gpu, gpus=world_size, micro_steps=length.micro_steps)
    made, lines = plan(shape), []
    length = by_the_clock(made, length, run.config, precision)
    if precision in BOTH:
        lines.append(memory_outlook(made, precision))
    if made.seconds.get(precision):
        hours = made.hours(precision, length.last_step * length.tokens_per_step)
        gain = f'; FP8 x{made.gain():.2f} over bf16' if made.seconds['fp8'] else ''
        lines.append(f'speed     {made.speed(precision):,.0f} tokens/s, {runlog.duration(hours * 3600)} '
                     f'(modelled, with torch.compile){gain}')
    return lines


def by_the_clock(made, length, config, precision):
    """length, or where max_hours ends the run before, by the modelled speed: that."""
    if not config['max_hours'] or not made.seconds.get(precision):
        return length
    steps = int(config['max_hours'] * 3600 * made.speed(precision) / made.tokens_per_step)
    if steps >= length.last_step:
        return length
    ended_by = f'max_hours={config["max_hours"]:g}, modelled in {precision}'
    return dataclasses.replace(length, last_step=max(1, steps), ended_by=ended_by)


def memory_outlook(made, precision):
    """The line of outlook about memory."""
    gpu, parts = made.shape.gpu, made.memory[precision]
    total = sum(parts.values())
    unit, size = ('GB', 1e9) if total >= 1e9 else ('MB', 1e6)
    listed = ', '.join(f'{name} {count / size:.2f}' for name, count in parts.items() if count)
    line = f'memory    {total / size:.2f} {unit} a rank (modelled): {listed}'
    if not gpu:
        return line
    verb = 'fits' if fits(made.shape, precision) else 'does not fit'
    return f'{line}; {verb} {gpu.name}: {gpu.memory:.1f} GB less {MARGIN:g}'


def row(made, name, form, of):
    """A line of the report: of(precision), formatted, in bf16 and FP8."""
    line = f'  {name:<42}'
    for precision in BOTH:
        cell = format(of(precision), form) if made.seconds[precision] else 'n/a'
        line += f'{cell:>10}'
    return line


def table(made, title, parts, unit):
    """The lines of memory or time, and their sum. parts: precision -> part -> number, in `unit`s."""
    lines = [f'{title:<44}{"bf16":>10}{"FP8":>10}']
    for name in parts['bf16']:
        if any(each and each[name] for each in parts.values()):
            lines.append(row(made, name, '.2f', lambda p: parts[p][name] / unit))
    return [*lines, row(made, 'sum', '.2f', lambda p: sum(parts[p].values()) / unit)]


def price_lines(made, span, tokens, usd):
    """What a span of training takes. usd: per GPU-hour, 0 = not known."""
    gpus, lines = made.shape.gpus, []
    units = {'hours': 1, 'GPU-hours': gpus, f'USD at {usd:g} per GPU-hour': gpus * usd}
    for unit, price in units.items():
        if price:
            name = f'{span}, {unit}'
            lines.append(row(made, name, ',.2f', lambda p: made.hours(p, tokens) * price))
    return lines


def network_lines(shape):
    """What travels between GPUs; nothing for one."""
    if shape.gpus == 1:
        return []
    sent = ', '.join(f'{count / 1e9:.2f} GB in {name}' for name, count in network.travels(shape).items())
    speed = network.bandwidth(shape) / 1e9
    return [f'network   {shape.sharding}: each GPU sends {sent} a step, at {speed:.0f} GB/s']


def linear_lines(made):
    lines = [f'{"linear":<24}{"tokens x in x out":>24}{"FLOPs":>8}  {"gain":<7}in']
    for linear in made.linears:
        runs = f'FP8, {made.shape.choice.recipe}' if made.shape.gpu.fp8 else 'bf16: no FP8 units'
        if linear.why_bf16:
            runs = f'bf16: {linear.why_bf16}'
        gain = f'x{linear.gain:.2f}' if linear.gain else ''
        sizes = f'{made.shape.tokens:>10} x {linear.in_features} x {linear.out_features}'
        name = f'{linear.name} x {linear.count}'
        lines.append(f'{name:<24}{sizes}'.ljust(48) + f'{linear.share:>8.1%}  {gain:<7}{runs}')
    return lines


def with_other_kernels(made):
    """What to say of FP8's gain with the kernels that the settings do not choose; '' where there are none."""
    asked = made.shape.choice
    kernels = 'inductor' if asked.kernels == 'triton' else 'triton'
    shape = dataclasses.replace(made.shape, choice=dataclasses.replace(asked, kernels=kernels))
    try:
        fp8.check_kernels(shape.choice, 'native')
    except SettingError:
        return ''
    seconds = roofline.step_seconds(shape, shape.choice_in('fp8'))
    gain = sum(made.seconds['bf16'].values()) / sum(seconds.values())
    return f', x{gain:.2f} with --fp8_kernels={kernels}'


def verdict(made, asked_off):
    """The lines that say what FP8 would do for this model. asked_off: whether the settings switch it off."""
    gpu = made.shape.gpu
    if not gpu.fp8:
        return [f'verdict   {gpu.name} has no FP8 units (sm_89 and later have): it trains in bf16']
    line = f'verdict   predicted FP8 x{made.gain():.2f} over bf16 (modelled){with_other_kernels(made)}'
    if made.gain() < 1:
        line += ': slower, so train in bf16 (--no_fp8)'
    if asked_off:
        line += '; FP8 is switched off in these settings'
    slow = [linear.name for linear in made.linears if linear.gain and linear.gain < 1]
    if not slow:
        return [line]
    names = ','.join(name.removeprefix('h.*.') for name in slow)
    return [line, f'          slower in FP8 than in bf16: keep them with --fp8_keep={names}']


def report(made, run, length):
    """The lines that `python plan.py` prints."""
    shape, gpu, usd = made.shape, made.shape.gpu, run.config['usd_per_gpu_hour']
    total = sum(made.parameters.values())
    kinds = ', '.join(f'{kind} {count:,}' for kind, count in made.parameters.items())
    tied = ' (tied)' if shape.config.tie_embeddings else ''
    span = resolve.run_line(made.flops, length)
    prices = price_lines(made, '10^9 tokens', 1e9, usd)
    if made.unknown:
        span = f'run       {made.flops / 1e6:,.0f}M FLOPs a token; length unknown: {made.unknown}'
    else:
        prices += price_lines(made, 'the run', length.last_step * made.tokens_per_step, usd)
    units = f'{gpu.fp8:,} in FP8' if gpu.fp8 else 'no FP8 units'
    compiled = 'torch.compile' if shape.compiled else 'eager'
    room = f'in {gpu.memory:.1f} GB less {MARGIN:g} (context, workspaces)'
    return [
        resolve.model_line(shape.config, total),
        f'          {total:,} = {kinds}{tied}',
        *([resolve.lora_line(run)] if shape.adapters.rank else []),
        resolve.batch_line(run.config, length, shape.gpus),
        span,
        f'device    {shape.gpus} x {gpu.name}: {gpu.bf16:,} TFLOP/s in bf16, {units}, '
        f'{gpu.bandwidth} TB/s, {gpu.memory:.1f} GB',
        *network_lines(shape),
        '',
        *table(made, f'memory per GPU, GB ({compiled})', made.memory, 1e9),
        row(made, room, '', lambda p: 'fits' if fits(shape, p) else 'too big'),
        '',
        *table(made, 'time of a step, ms (modelled, torch.compile)', made.seconds, 1e-3),
        row(made, 'tokens/s, all GPUs', ',.0f', made.speed),
        row(made, 'MFU, of that precision\'s peak', '.1%', made.mfu),
        *prices,
        '',
        *linear_lines(made),
        '',
        *verdict(made, asked_off=not wants_fp8(run)),
        MODELLED,
    ]


def scaling_report(cases, run):
    """A table of several numbers of GPUs, in the run's precision. cases: [(Plan, Length)]."""
    shape, usd = cases[0][0].shape, run.config['usd_per_gpu_hour']
    precision = runs_in(run, shape.gpu)
    heads = ('GPUs', 'micro-steps', 'tokens a step', 'GB a GPU', 'GB sent', 'waiting', 'tokens/s', 'MFU',
             'hours', 'USD', 'FP8 gain')
    rows = []
    for made, length in cases:
        seconds, gpus = made.seconds[precision], made.shape.gpus
        hours = made.hours(precision, length.last_step * length.tokens_per_step)
        known = not made.unknown
        rows.append((
            f'{gpus:,}',
            f'{length.micro_steps}',
            f'{length.tokens_per_step:,}',
            f'{sum(made.memory[precision].values()) / 1e9:.1f}' + '!' * (not fits(made.shape, precision)),
            f'{sum(network.travels(made.shape).values()) / 1e9:.1f}',
            f'{seconds[roofline.WAITING] / sum(seconds.values()):.0%}',
            f'{made.speed(precision):,.0f}',
            f'{made.mfu(precision):.0%}',
            f'{hours:,.2f}' * known,
            f'{hours * gpus * usd:,.0f}' * known * bool(usd),
            f'x{made.gain():.2f}' if made.seconds['fp8'] else '',
        ))
    widths = [max(map(len, column)) for column in zip(heads, *rows)]
    table = ['  '.join(f'{cell:>{width}}' for cell, width in zip(row, widths)) for row in (heads, *rows)]
    parameters = sum(cases[0][0].parameters.values())
    sizes = sorted({made.shape.sequences for made, _ in cases})
    batch = f'{sizes[0]} to {sizes[-1]}' if len(sizes) > 1 else sizes[0]
    return [
        resolve.model_line(shape.config, parameters),
        f'plan      {shape.sharding} in {precision}, {batch} x {shape.config.block_size} tokens '
        f'a GPU and micro-step, on {shape.gpu.name} of {shape.gpu.memory:.1f} GB',
        '',
        *table,
        '',
        'GB sent: by each GPU, a step. waiting: for other GPUs, share of a step. !: more than a GPU has.',
        MODELLED,
    ]


# -------------------------------------------------------------------------------------- from the command line

def gpu_named(name):
    """Its row of GPUS; '' or None: the one here, else an H100. Raises SettingError."""
    if not name:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else 'h100'
    gpu = find_gpu(name)
    if not gpu:
        known = ', '.join(gpu.name for _, gpu in GPUS)
        raise SettingError(f'no data sheet of {name!r} here; --gpu is one of {known}')
    return gpu


def wants_fp8(run):
    return run.config['use_fp8'] and run.config['fp8_backend'] != 'off'


def runs_in(run, gpu):
    """The precision that the settings mean on a GPU."""
    return 'fp8' if gpu.fp8 and wants_fp8(run) else 'bf16'


def largest_batch(run, shape, precision):
    """batch_size=0: the most sequences that divide the step's and are modelled to fit, with the head-room
    that a search on the GPU leaves. Raises MachineError where none does."""
    def too_big(size):
        of = memory(dataclasses.replace(shape, sequences=size), precision)
        return sum(of.values()) / 1e9 > (1 - HEADROOM) * shape.gpu.memory - MARGIN
    sizes = resolve.batch_sizes(run.config, shape.gpus)
    fitting = bisect.bisect_left(sizes, True, key=too_big)
    if fitting:
        return sizes[fitting - 1]
    raise MachineError(f'batch_size=0: no batch is modelled to fit {shape.gpu.name}, '
                       f'not even of one sequence of {shape.config.block_size} tokens')


def planned(asked, run, gpus):
    """(Plan, Length, lines to say first) for so many GPUs. A batch_size of 0 is settled for them; a run whose
    length is not known has the Length of one step, and its Plan says why."""
    gpu = gpu_named(asked.gpu)
    shape = Shape.of(run, gpu=gpu, gpus=gpus, gpus_per_node=asked.gpus_per_node, network=asked.network)
    said = [f'counts    {what} is not counted: {other} stands for it'
            for what, other in roofline.uncounted(shape, run.config['fp8_backend'])]
    precision = runs_in(run, gpu)
    if not run.batch_size:
        size = run.config['batch_size'] = largest_batch(run, shape, precision)
        limit = run.config['max_batch_size']
        said.append(f'batch     batch_size=0: {size} is the largest up to {limit} that is modelled to leave '
                    f'{HEADROOM:.0%} of the memory in {precision}')
    train, unknown = None, ''
    try:
        train = resolve.training_data(run)
    except MissingError as error:
        unknown = str(error)
    length = resolve.length(
        run.config, shape.config.block_size, gpus, train.tokens_per_epoch if train else 0)
    if train and train.packing:
        said += resolve.packing_lines(train, length)
    shape = dataclasses.replace(shape, sequences=run.batch_size, micro_steps=length.micro_steps)
    made = dataclasses.replace(plan(shape), unknown=unknown)
    return made, by_the_clock(made, length, run.config, precision), said


def main(words):
    """Prints the plan of a command line. Raises SettingError, MachineError."""
    asked = arguments(words)
    run = resolve.run(asked.config, torch.device('cuda'), data_required=False)  # a pretended GPU
    if len(asked.gpus) == 1:
        made, length, said = planned(asked, run, *asked.gpus)
        print(*said, *report(made, run, length), sep='\n')
        return
    cases, first = [], {}
    for gpus in asked.gpus:
        one = dataclasses.replace(run, config=copy.copy(run.config))
        made, length, said = planned(asked, one, gpus)
        cases.append((made, length))
        first |= dict.fromkeys(said)  # what holds for all is said once
    print(*first, *scaling_report(cases, run), sep='\n')


if __name__ == '__main__':
    main(sys.argv[1:])
