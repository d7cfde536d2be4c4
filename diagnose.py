"""What this machine can do in FP8, and what FP8 does to a checkpoint's numbers.

$ python diagnose.py                                    # GPUs, packages, what runs, what to install
$ python diagnose.py --ckpt=checkpoints_fp8/latest.pt   # FP8's share, worst casts, loss against bf16
$ python diagnose.py --ckpt=checkpoints/latest.pt --fp8_recipe=rowwise --all --json=out.json
$ python diagnose.py --ckpt=meta-llama/Llama-3.2-1B     # of the hub, or a folder: what FP8 would do to it

The third asks what FP8 would do to a bf16 run. A checkpoint is looked at with its own settings; flags
win. It runs on the backend that trained it, or, where that is not here (or it was trained in bf16), on
emulate. Each cast of each FP8 linear is judged by its worst batch:

    bad      not finite; or a signal-to-noise ratio 10 dB below the format's own rounding, which on
             normal data leaves 31.5 dB in e4m3 and 25.5 dB in e5m2; or flushed > 10% (values that
             became zero) or saturated > 1% (clamped)
    watch    flushed > 1% or saturated > 0.1%

The ratio alone is blind to an outlier, which fills the sum of squares and is itself cast well: with a
million normal values in e4m3, one at 50,000 sigma leaves 57.8 dB for all and 24.0 dB for the others,
and flushes 8.7% of them.
"""
from __future__ import annotations

from configurator import Config, SettingError, UserError, configure

ckpt = ''                # a checkpoint or Hugging Face model to examine; '' = the machine
batches = 4              # >= 1: validation batches that the checkpoint sees
all = False              # with ckpt: every cast, not the worst ten
json = ''                # also writes all figures to this file
device = 'auto'          # auto (cuda, else cpu) | cuda | cpu
# as the checkpoint's run had them, or else these
batch_size = 8           # >= 1: sequences; on a CPU, few make a big model's test short
block_size = 1024        # >= 1: tokens of a sequence, at most as many as the model reads
dataset = 'fineweb_edu'  # name given to prepare_data.py, or a folder of shards; missing: random tokens
data_dir = 'data'        # where prepare_data.py put the datasets
fp8_backend = 'auto'     # auto (the checkpoint's, else emulate) | native | te | torchao | emulate
fp8_recipe = 'auto'       # auto (tensorwise) | RECIPES of fp8gpt/fp8/linear.py
fp8_format = 'auto'      # auto (hybrid; with finer scales than a tensor's, e4m3) | hybrid | e4m3 | e5m2
fp8_margin = 0           # >= 0, <= 8: powers of two left free above the amax
fp8_keep = ''            # linears that stay bf16, with commas
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [])
del all, json            # names of flags: below, all is Python's own

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import collections
import dataclasses
import math
import re
import shlex
import statistics
import sys

from fp8gpt import machine

if not machine.no_torch:
    import torch

    from fp8gpt import data
    from fp8gpt import files
    from fp8gpt import fp8
    from fp8gpt import lora
    from fp8gpt import measure
    from fp8gpt import parallel
    from fp8gpt import runlog
    from fp8gpt import sft
    from fp8gpt import shards
    from fp8gpt.fp8.backends import BACKENDS
    from fp8gpt.fp8.linear import RECIPES, TENSOR
    from fp8gpt.runlog import device_name
    from fp8gpt.measure import judge
    from model import GPT, GPTConfig, Linear

OF_THIS_CALL = ('ckpt', 'device', 'batches', 'all', 'json')     # not taken from the checkpoint's run
KIND = re.compile(r'^h\.\d+\.')         # what to leave out of h.3.attn.qkv
NO_RUN = {'step': 0, 'position': 0, 'precision': {'name': 'bf16', 'reason': ''}}    # a Hugging Face model's


@dataclasses.dataclass
class Checkup:
    """A checkpoint, how it is looked at, and on what."""
    state: dict                     # as lora.opened gives it
    config: Config                  # the settings in force: its own, under the flags
    model_config: GPTConfig
    device: torch.device
    choice: fp8.Choice = None
    batches: list = None            # [(x, y, examples)], as data.eval_batches has them

    @property
    def linears(self):
        """[(name, in_features, out_features)] of the model."""
        return self.model_config.linears()

    @property
    def tokens(self):
        """Of a batch."""
        return self.config['batch_size'] * self.model_config.block_size


# ------------------------------------------------------------------------------ what to look at

def choose(checkup):
    """(Choice, a line or None): by order, else what trained the checkpoint where that runs here,
    else emulate."""
    config, ran = checkup.config, checkup.state['precision']
    ordered = config['fp8_backend'] if 'fp8_backend' in config.given else 'auto'
    if ordered != 'auto':
        return choice_of(checkup, ordered), None
    if ran['name'] != 'fp8':
        return choice_of(checkup, 'emulate'), 'trained in bf16: this is what FP8 would do to it'
    try:
        backend, _, _ = ran['reason'].partition(':')
        return choice_of(checkup, backend), None
    except (UserError, fp8.OptionError, fp8.DeviceError) as error:
        return choice_of(checkup, 'emulate'), f'emulate stands in for what trained it: {error}'


def choice_of(checkup, backend):
    """The Choice of a backend by name. Raises UserError where it does not run here."""
    options = dataclasses.replace(fp8.Options.of(checkup.config), backend=backend)
    if options.recipe in RECIPES and RECIPES[options.recipe].delayed:
        history = checkup.state['config'].get('fp8_amax_history', fp8.Options.amax_history)
        options = dataclasses.replace(options, amax_history=history)
    return fp8.choose(options, fp8.Place(checkup.device, checkup.tokens))


def read_batches(checkup):
    """([(x, y, examples)], what they are): fixed windows of the validation split; random tokens without a
    dataset."""
    config, model_config, device = checkup.config, checkup.model_config, checkup.device
    count, B, T = config['batches'], config['batch_size'], model_config.block_size
    tokenizer = checkup.state['tokenizer']
    as_typed = checkup.state['config'].get('tokenizer', config['ckpt'])
    folder = shards.dataset_dir(config['data_dir'], config['dataset'], as_typed)
    try:
        windows = data.TokenData(folder, 'val', T)
        theirs = shards.read_meta(folder).get('tokenizer', tokenizer)
    except FileNotFoundError as error:
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(model_config.vocab_size, (count, 2, B, T), generator=generator)
        batches = [(x, y, None) for x, y in random.to(device)]
        return batches, f'random tokens, so the losses say little: {error}'
    if tokenizer and theirs != tokenizer:
        raise SettingError(f'{folder} is tokenized with {theirs}, the checkpoint with {tokenizer}')
    batches = list(data.eval_batches(windows, count * B * T, B, device=device))
    return batches, f'{len(batches)} batches of {B} x {T} tokens, {folder}, validation'


# ------------------------------------------------------------------------------ looking

def coverage(checkup):
    """[{'linear': kind, as 'attn.qkv', 'count', 'in', 'out', 'share' of all linears' FLOPs, 'bf16':
    None in FP8, else the reason}]."""
    counts, whole = collections.Counter(), 0
    for name, k, n in checkup.linears:
        reason = fp8.why_bf16(checkup.choice, name, k, n)
        counts[KIND.sub('', name), k, n, reason] += 1
        whole += k * n
    rows = []
    for (kind, k, n, reason), count in counts.items():
        shape = {'linear': kind, 'count': count, 'in': k, 'out': n}
        rows.append({**shape, 'share': count * k * n / whole, 'bf16': reason})
    return rows


def examine(checkup):
    """(a row of each cast, see `judge`, the worst first; {'bf16', 'fp8': the loss of each
    batch})."""
    state, choice, batches = checkup.state, checkup.choice, checkup.batches
    model = GPT(checkup.model_config, fp8.linear_factory(choice, Linear)).to(checkup.device)
    model.load_weights(state['weights'])
    # a step's targets, not a batch's, so that gradients are as small as in training, for which
    # delayed scales are made
    saved = state.get('fp8_state') or {}
    divisor = saved.get('divisor', state['position'] // max(1, state['step']))
    targets = max(divisor * checkup.model_config.block_size, batches[0][1].numel())

    def step(x, y, examples):
        loss = model(x, y, n_targets=float(targets), examples=examples)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item() * targets / (y != -1).sum().item()

    fp8_state = fp8.State(model, choice)
    fp8_state.load(saved, divisor)
    if fp8_state.needs_calibration:
        fp8_state.calibrate(lambda: step(*batches[0]))
    losses = {'bf16': [], 'fp8': []}
    rows_of = collections.defaultdict(list)
    for batch in batches:
        with fp8.paused(), torch.no_grad():
            x, y, examples = batch
            losses['bf16'].append(model(x, y, examples=examples).item())
        health = measure.health(model, choice, lambda batch=batch: losses['fp8'].append(step(*batch)))
        for row in health:
            rows_of[row['layer'], row['tensor']].append(row)
    judged = [judge(rows, choice) for rows in rows_of.values()]
    return sorted(judged, key=lambda row: -row['badness']), losses


# ------------------------------------------------------------------------------ what to do

def keep_flag(kept, layers, names):
    """--fp8_keep with these layers (a set) beside those kept already; a kind's name where all of it
    are among them. names: of all the model's linears."""
    kinds = collections.defaultdict(list)
    for name in names:
        kinds[KIND.sub('', name)].append(name)
    parts = list(kept)
    for kind, of_kind in kinds.items():
        inside = [name for name in of_kind if name in layers]
        parts += [kind] if inside == of_kind else inside
    return f'--fp8_keep={",".join(parts)}'


def with_verdict(rows, verdict):
    return [row for row in rows if row['verdict'] == verdict]


def advice(path, checkup, rows):
    """What to do about the bad casts of the checkpoint at a path, in lines. Finer scales are tried
    on one batch."""
    choice = checkup.choice
    bad, watch = with_verdict(rows, 'bad'), with_verdict(rows, 'watch')
    layers = {row['layer'] for row in bad or watch}
    flag = keep_flag(choice.keep, layers, [name for name, _, _ in checkup.linears])
    if not bad:
        line = f'healthy: none of {len(rows)} casts is bad, {len(watch) or "none"} to watch'
        if watch:
            line += f': {flag} would spare those layers'
        return [line]
    worst = f'{bad[0]["layer"]} ({bad[0]["tensor"]})'
    lines = [f'{len(bad)} of {len(rows)} casts are bad, {worst} most']
    for row in bad:
        if row['tensor'] == 'weight' and not math.isfinite(row['amax']):
            cure = 'no precision helps, go back to an earlier checkpoint'
            return [*lines, f'the weights of {row["layer"]} are not finite: {cure}']
    start = 'init_from' if sft.is_pretrained(path) else 'resume'
    command = f'python train_fp8.py --{start}={shlex.quote(path)}'
    lines.append(f'in bf16: {command} {flag}')
    if RECIPES[choice.recipe].activation == TENSOR:
        left = len(with_verdict(examine_by_row(checkup), 'bad')) or 'none'
        command += ' --fp8_recipe=rowwise'
        if 'rowwise' not in BACKENDS[choice.backend].recipes:
            command += ' --fp8_backend=native'
        lines.append(f'with a scale per row, {left} would be bad (one batch): {command}')
    return lines


def examine_by_row(checkup):
    """examine's rows of the first batch with a scale per row."""
    order = fp8.Options(backend='emulate', recipe='rowwise', keep=checkup.choice.keep)
    finer = fp8.choose(order, fp8.Place(checkup.device, tokens=checkup.batches[0][0].numel()))
    rows, _ = examine(dataclasses.replace(checkup, choice=finer, batches=checkup.batches[:1]))
    return rows


# ------------------------------------------------------------------------------ the report

def print_coverage(kinds):
    """Prints coverage's rows; returns FP8's share of the linears' FLOPs."""
    for kind in kinds:
        linear = f'{kind["linear"]:<12} {kind["count"]:>3} x ({kind["in"]} -> {kind["out"]})'
        precision = f'bf16: {kind["bf16"]}' if kind['bf16'] else 'FP8'
        print(f'{linear}, {kind["share"]:.1%} of the FLOPs, {precision}')
    inside = [kind for kind in kinds if not kind['bf16']]
    covered = sum(kind['share'] for kind in inside)
    count, whole = (sum(kind['count'] for kind in some) for some in (inside, kinds))
    print(f'FP8 covers {count} of {whole} linears, {covered:.1%} of the linears\' FLOPs\n',
          flush=True)
    return covered


def print_casts(rows, everything):
    """Prints judge's rows, or the first ten."""
    print(f'{"layer":<16} {"cast":<11} {"amax":>9} {"scale":>9}  '
          'saturated: mean, max  flushed: mean, max     SQNR')
    shown = rows if everything else rows[:10]
    for row in shown:
        cast = f'{row["layer"]:<16} {row["tensor"]:<6} {row["format"]}'
        scale = f'{row["amax"]:9.2e} {row["scale"]:9.2e}'
        saturated = f'{row["saturated"]:8.3%}, {row["saturated_max"]:8.3%}'
        flushed = f'{row["flushed"]:7.2%}, {row["flushed_max"]:7.2%}'
        quality = f'{row["sqnr_db"]:5.1f} dB  {row["verdict"]}'
        print(f'{cast} {scale}   {saturated}   {flushed}  {quality}')
    if len(rows) > len(shown):
        print(f'... and {len(rows) - len(shown)} better ones: --all')


def report(config, device):
    """Prints the coverage, casts and losses of config['ckpt'] and what to do; returns all that as a
    dict."""
    path = config['ckpt']
    state, about = lora.opened(path)
    state = {**NO_RUN, **state}
    config, changed = config.over(state['config'], never=OF_THIS_CALL)
    model_config = GPTConfig(**state['model_config'])
    window = min(config['block_size'], model_config.block_size)
    model_config = dataclasses.replace(model_config, block_size=window)
    checkup = Checkup(state, config, model_config, device)
    checkup.choice, note = choose(checkup)
    checkup.batches, source = read_batches(checkup)
    choice = checkup.choice
    print(f'{about}; here in {choice.backend}, {choice.recipe}, {choice.format}')
    notes = [note] if note else []
    print(*notes, *changed, f'data: {source}\n', sep='\n')
    kinds = coverage(checkup)
    covered = print_coverage(kinds)
    rows, losses = examine(checkup)
    print_casts(rows, config['all'])
    bf16, in_fp8 = statistics.fmean(losses['bf16']), statistics.fmean(losses['fp8'])
    print(f'\nmean loss of {len(checkup.batches)} batches: '
          f'{bf16:.4f} in bf16, {in_fp8:.4f} in FP8: {in_fp8 / bf16 - 1:+.3%}')
    lines = advice(path, checkup, rows)
    print(*lines, sep='\n')
    return {
        'ckpt': path,
        'step': state['step'],
        'precision': state['precision'],
        'choice': vars(choice),
        'data': source,
        'coverage': kinds,
        'covered': covered,
        'rows': rows,
        'loss': {'bf16': bf16, 'fp8': in_fp8},
        'advice': lines,
        'device': device_name(device),
        'versions': runlog.versions(),
    }


def strict(value):
    """value as strict JSON has it: numbers that are not finite as text."""
    if isinstance(value, dict):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


if __name__ == '__main__':
    if machine.no_torch:
        machine.report_without_torch()
        sys.exit(bool(config['ckpt']))
    place = parallel.init(config['device']).device
    result = report(config, place) if config['ckpt'] else machine.report(place)
    if config['json']:
        files.write_json(config['json'], strict(result))
