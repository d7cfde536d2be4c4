"""What this machine can do in FP8, and what FP8 does to a checkpoint's numbers.

$ python diagnose.py                                          # GPUs, driver, packages, a real FP8 multiplication, what runs, what to install
$ python diagnose.py --ckpt=checkpoints_fp8/latest.pt         # FP8's share of the linears, its worst casts, its loss against bf16's
$ python diagnose.py --ckpt=checkpoints/latest.pt --fp8_recipe=rowwise --all --json=out.json   # what FP8 would do to a bf16 run

A checkpoint is looked at with its own settings; flags win. It runs on the backend that trained it, or, where that is not
here (or it was trained in bf16), on emulate. Each cast of each FP8 linear is judged by its worst batch:

    bad      not finite; or a signal-to-noise ratio 10 dB below the format's own rounding, which on normal data leaves 31.5 dB
             in e4m3 and 25.5 dB in e5m2; or flushed > 10% (values that became zero) or saturated > 1% (clamped)
    watch    flushed > 1% or saturated > 0.1%

The ratio alone is blind to an outlier, which fills the sum of squares and is itself cast well: with a million normal values
in e4m3, one at 50,000 sigma leaves 57.8 dB for all and 24.0 dB for the others, and flushes 8.7% of them.
"""
import collections
import contextlib
import importlib.metadata
import itertools
import math
import os
import pickle
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys

from configurator import DataError, SettingError, UserError, configure

try:
    import torch

    import checkpoint
    import data
    import fp8
    import measure
    import parallel
    import plan
    import runlog
    from model import GPT, GPTConfig, Linear
    from quantize import E5M2, FORMATS, casts, emulated_mm, quantize, scaled_mm
    no_torch = None
except (ImportError, OSError, AttributeError) as error:  # not installed; its CUDA libraries are missing; older than 2.11
    no_torch = str(error).splitlines()[0]

ckpt = ''                        # a checkpoint to examine; '' = the machine
batches = 4                      # validation batches that the checkpoint sees
all = False                      # with ckpt: every cast, not the worst ten
json = ''                        # also writes all figures to this file
device = 'auto'                  # auto (cuda, else cpu) | cuda | cpu
# as the checkpoint's run had them, or else these
batch_size = 8                   # sequences; on a CPU, few make a big model's test short
dataset = 'fineweb_edu'          # name given to prepare_data.py, or a folder of shards; where it is missing: random tokens
data_dir = 'data'                # where prepare_data.py put the datasets
fp8_backend = 'auto'             # auto (the checkpoint's, else emulate) | native | te | torchao | emulate (orders: run or stop)
fp8_recipe = 'auto'              # auto (tensorwise) | tensorwise | delayed | rowwise | rowwise_gw_hp | blockwise | mxfp8
fp8_format = 'auto'              # auto (hybrid; with finer scales than a tensor's, e4m3) | hybrid | e4m3 | e5m2
fp8_margin = 0                   # powers of two left free above the amax
fp8_keep = ''                    # linears that stay bf16, with commas
config = configure(__file__, None if __name__ == '__main__' else [])  # imported, it leaves the command line alone

FP8_UNITS = (8, 9)                      # sm_89
REQUIRED = ('tiktoken', 'datasets', 'numpy', 'tensorboard', 'tqdm', 'pyyaml', 'matplotlib')
DRIVERS = {'12': 525, '13': 580}        # CUDA's major version -> the oldest driver (CUDA Toolkit release notes, minor version compatibility)
KIND = re.compile(r'^h\.\d+\.')         # what to leave out of h.3.attn.qkv
TOKENS = 8192                           # of a micro-batch; a multiple of what any recipe wants
CLEAN = {'e4m3': 31.5, 'e5m2': 25.5}    # dB that rounding alone leaves of normal data
BAD = {'sqnr_db': 10, 'flushed': 0.1, 'saturated': 0.01}
WATCH = 0.1                             # of BAD's flushed and saturated


# ----------------------------------------------------------------------------------------------- the machine

def nvidia_smi():
    """[{'name', 'capability': (major, minor) or None, 'driver', 'cuda': what the driver supports}] of the GPUs that nvidia-smi
    names; [] where it does not answer."""
    def ask(*words):
        return subprocess.run(['nvidia-smi', *words], capture_output=True, text=True, timeout=60, check=True).stdout
    for fields in ('name,driver_version,compute_cap', 'name,driver_version'):  # drivers before 510 know no compute_cap
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            lines = ask(f'--query-gpu={fields}', '--format=csv,noheader').strip().splitlines()
            cuda = re.search(r'CUDA[\w ]*Version: *([\d.]+)', ask())
            rows = [[word.strip() for word in line.split(',')] for line in lines]
            return [{'name': name, 'capability': tuple(int(part) for part in capability[0].split('.')) if '.' in ''.join(capability) else None,
                     'driver': driver, 'cuda': cuda[1] if cuda else 'unknown'} for name, driver, *capability in rows]
    return []


def version(package):
    """An installed package's version, or None."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def find_gpus(smi):
    """[{'name', 'capability' or None, 'GB' or None, 'bf16', 'fp8': dense TFLOP/s or None}], as torch sees them, else nvidia-smi."""
    found = [(gpu['name'], gpu['capability'], None) for gpu in smi]
    if torch.cuda.is_available():
        each = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found = [(gpu.name, (gpu.major, gpu.minor), gpu.total_memory / 1e9) for gpu in each]
    known = [plan.find_gpu(name) for name, _, _ in found]
    return [{'name': name, 'capability': capability, 'GB': size, 'bf16': row and row.bf16, 'fp8': row and row.fp8}
            for (name, capability, size), row in zip(found, known)]


def gpu_line(gpu):
    peaks = f'dense peaks in TFLOP/s: {gpu["bf16"]} bf16, {gpu["fp8"] or "no"} FP8' if gpu['bf16'] else 'not in plan.py\'s table, so no MFU'
    return ', '.join([gpu['name'], 'sm_{}{}'.format(*gpu['capability'] or '??'), *([f'{gpu["GB"]:.0f} GB'] if gpu['GB'] else []), peaks])


def matrix(device):
    """{(backend, recipe): None where it runs here, else why not}."""
    cells = dict.fromkeys(itertools.product(('te', 'torchao', 'native', 'emulate'), fp8.RECIPES))
    for backend, recipe in cells:
        try:
            fp8.choose(True, backend, device, torch.bfloat16, TOKENS, recipe=recipe)
        except UserError as error:
            cells[backend, recipe] = str(error).removeprefix(f'fp8_backend={backend} fp8_recipe={recipe}: ')
    return cells


def matrix_lines(cells):
    marks = {reason: f'[{number}]' for number, reason in enumerate(dict.fromkeys(filter(None, cells.values())), 1)}
    row = lambda first, words: f'{first:<10}' + ''.join(f'{word:<15}' for word in words).rstrip()
    return [row('backend', fp8.RECIPES),
            *(row(backend, [marks.get(cells[backend, recipe], 'yes') for recipe in fp8.RECIPES]) for backend in dict.fromkeys(b for b, _ in cells)),
            *(f'{mark} {reason}' for reason, mark in marks.items())]


def gemm(device, M, K, N, mm, calls):
    """(M, K) x (K, N) of normal data: {'shape', 'bf16', 'fp8': TFLOP/s, 'bf16_error', 'fp8_error': relative norms of the
    difference from fp32}. The FP8 operands are cast beforehand, with one scale a tensor."""
    generator, kit = torch.Generator(device).manual_seed(0), casts('tensorwise', 'hybrid')
    x, w = (torch.randn(rows, K, device=device, generator=generator) for rows in (M, N))
    exact, x16, w16, x8, w8 = x @ w.t(), x.bfloat16(), w.bfloat16(), quantize(x, kit.x), quantize(w, kit.w)
    ways = {'bf16': lambda: x16 @ w16.t(), 'fp8': lambda: mm(x8, w8, torch.bfloat16, fast=True)}
    errors = {f'{name}_error': ((way().float() - exact).norm() / exact.norm()).item() for name, way in ways.items()}
    times = measure.medians({name: lambda way=way: [way() for _ in range(calls)] for name, way in ways.items()})
    return {'shape': [M, K, N], **{name: 2 * M * K * N * calls / taken / 1e12 for name, taken in times.items()}, **errors}


def multiply(device, has_units):
    """(line, gemm's figures or None)."""
    try:
        result = gemm(device, *((8192, 4096, 4096, scaled_mm, 10) if has_units else (512, 256, 256, emulated_mm, 1)))
    except RuntimeError as error:  # also where the memory is taken
        return f'failed: {str(error).splitlines()[0]}', None
    line = '{} x {} x {}, '.format(*result['shape'])
    if has_units:
        line += f'TFLOP/s: {result["bf16"]:.0f} bf16, {result["fp8"]:.0f} FP8, ratio {result["fp8"] / result["bf16"]:.2f}; '
    line += f'error against fp32: {result["fp8_error"]:.2%} FP8, {result["bf16_error"]:.2%} bf16'
    owner = 'A CPU\'s' if device.type == 'cpu' else 'This GPU\'s'
    return line + ('' if has_units else f'. {owner} FP8 is an emulation: it shows the numerics, not the speed'), result


def to_do(smi, gpus, cells):
    """What is wrong or missing, each in a line with the command that mends it."""
    lines, cuda, hidden = [], torch.version.cuda, os.environ.get('CUDA_VISIBLE_DEVICES')
    if smi and not cuda and not torch.version.hip:
        lines.append(f'torch {torch.__version__} is built without CUDA, though nvidia-smi finds {smi[0]["name"]}: '
                     'pip uninstall -y torch && pip install "torch>=2.11"')
    elif cuda and not torch.cuda.is_available():
        why = 'it gives no reason'
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why = str(error).splitlines()[0].rstrip('.')
        here = f'driver {smi[0]["driver"]}, for CUDA up to {smi[0]["cuda"]}' if smi else 'nvidia-smi does not answer (a container wants --gpus all)'
        lines.append(f'torch is built for CUDA {cuda}, but torch.cuda.is_available() is False: driver not found or too old. torch: {why}. '
                     f'Here: {here}; CUDA {cuda} needs driver {DRIVERS.get(cuda.split(".")[0], "of its own release")} or later'
                     + (f'; CUDA_VISIBLE_DEVICES={hidden!r} may hide GPUs' if hidden is not None else ''))
    te = cells['te', 'tensorwise'] or ''
    if any((gpu['capability'] or (0, 0)) >= FP8_UNITS for gpu in gpus) and (not version('transformer_engine') or 'does not load' in te):
        lines.append('Transformer Engine (backend te): pip install --no-build-isolation -r requirements-te.txt')
    if not version('torchao'):
        lines.append('torchao (backend torchao): pip install torchao')
    missing = [package for package in REQUIRED if not version(package)]
    return lines + [f'{", ".join(missing)}: pip install -r requirements.txt'] * bool(missing)


def verdict(choices, gpus, device):
    """The last line. choices: of compile on and off."""
    on, off = choices['on'], choices['off']
    if on.on:
        return f'FP8 trains here: {on.backend} ({on.reason})' + f'; without torch.compile: {off.backend}' * (off.backend != on.backend)
    if any((gpu['capability'] or (0, 0)) >= FP8_UNITS for gpu in gpus):
        why = f'FP8 does not run: {on.reason}' if torch.cuda.is_available() else 'torch does not reach it: see "to do"'
        return f'there is a GPU with FP8 units, but {why}'
    return f'no FP8 units here: training runs in bf16; --fp8_backend={"native" if device.type == "cpu" else "emulate"} emulates FP8\'s numerics'


def machine(device):
    """Prints what this machine can do; returns it as a dict."""
    smi = nvidia_smi()
    gpus, cells, disk = find_gpus(smi), matrix(device), shutil.disk_usage('.')
    choices = {name: fp8.choose(True, 'auto', device, torch.bfloat16, TOKENS, name == 'on') for name in ('on', 'off')}
    say = lambda name, text: print(f'{name:<10}{text}', flush=True)
    for number, gpu in enumerate(gpus):
        say(f'GPU {number}', gpu_line(gpu))
    if not gpus:
        say('GPU', f'none that nvidia-smi or torch finds; {runlog.device_name(device)}')
    say('driver', f'{smi[0]["driver"]}, for CUDA up to {smi[0]["cuda"]}' if smi else 'nvidia-smi does not answer')
    build = f'CUDA {torch.version.cuda}' if torch.version.cuda else f'ROCm {torch.version.hip}' if torch.version.hip else 'the CPU alone'
    say('torch', f'{torch.__version__}, built for {build}; torch.cuda.is_available() is {torch.cuda.is_available()}')
    packages = {name: version(name) for name in ('transformer_engine', 'torchao', 'tiktoken', 'datasets')}
    say('packages', ', '.join(f'{name} {found or "not installed"}' for name, found in {'Python': platform.python_version(), **packages}.items()))
    say('disk', f'{disk.free / 1e9:.0f} of {disk.total / 1e9:.0f} GB are free in {os.getcwd()}; /dev/shm is not needed')
    for name, choice in choices.items():
        say('auto', f'{choice.backend if choice.on else "bf16"} with compile={name} ({choice.reason})')
    line, result = multiply(device, device.type == 'cuda' and torch.cuda.get_device_capability(device) >= FP8_UNITS)
    say('multiply', line)
    print('', *matrix_lines(cells), '', sep='\n')
    for todo in (todos := to_do(smi, gpus, cells)):
        say('to do', todo)
    print(last := verdict(choices, gpus, device))
    return {'gpus': gpus, 'nvidia_smi': smi, 'versions': runlog.versions() | packages, 'cuda': torch.version.cuda, 'gemm': result,
            'auto': {name: vars(choice) for name, choice in choices.items()}, 'to do': todos, 'verdict': last,
            'matrix': {f'{backend} {recipe}': reason or 'yes' for (backend, recipe), reason in cells.items()}}


# ----------------------------------------------------------------------------------------------- a checkpoint

def load(path):
    """checkpoint.load of one of ours. Raises what that does, and OSError."""
    try:
        state = checkpoint.load(path)
    except pickle.UnpicklingError:
        state = None
    if not isinstance(state, dict) or not {'weights', 'model_config', 'precision', 'config', 'tokenizer'} <= state.keys():
        raise DataError(f'{path} is no checkpoint of train.py or train_fp8.py')
    return state


def choose(config, state, device, tokens):
    """(Choice, a line or None): by order, else what trained the checkpoint where that runs here, else emulate."""
    ran, recipe = state['precision'], config['fp8_recipe']
    history = {'amax_history': state['config'].get('fp8_amax_history', 1024)} if recipe == 'delayed' else {}

    def ordered(backend):
        return fp8.choose(True, backend, device, torch.bfloat16, tokens, False, recipe, config['fp8_format'], config['fp8_margin'],
                          keep='' if config['fp8_keep'] == 'auto' else config['fp8_keep'], **history)
    if 'fp8_backend' in config.given and config['fp8_backend'] != 'auto':
        if config['fp8_backend'] == 'off':
            raise SettingError('fp8_backend=off leaves nothing to examine')
        return ordered(config['fp8_backend']), None
    if ran['name'] != 'fp8':
        return ordered('emulate'), 'trained in bf16: this is what FP8 would do to it'
    try:
        return ordered(ran['reason'].partition(':')[0]), None
    except UserError as error:
        return ordered('emulate'), f'emulate stands in for what trained it: {error}'


def read_batches(config, state, model_config, device, count):
    """([(x, y)], what they are): fixed windows of the validation split; random tokens where the dataset is missing."""
    B, T, own = config['batch_size'], model_config.block_size, state['tokenizer']
    folder = data.dataset_dir(config['data_dir'], config['dataset'], own)
    try:
        windows, meta = data.TokenData(folder, 'val', T), data.read_meta(folder)
    except FileNotFoundError as error:
        random = torch.randint(model_config.vocab_size, (count, 2, B, T), generator=torch.Generator().manual_seed(0)).to(device)
        return [tuple(batch) for batch in random], f'random tokens, so the losses say little: {error}'
    if meta.get('tokenizer', own) != own:
        raise SettingError(f'{folder} is tokenized with {meta["tokenizer"]}, the checkpoint with {own}')
    found = list(data.eval_batches(windows, count * B * T, B, device=device))
    return found, f'{len(found)} batches of {B} x {T} tokens, {folder}, validation'


def coverage(model_config, choice):
    """[{'linear': kind, as 'attn.qkv', 'count', 'in', 'out', 'share' of all linears' FLOPs, 'bf16': None in FP8, else the reason}]."""
    linears = plan.linears(model_config)
    whole = sum(k * n for _, k, n in linears)
    found = collections.Counter((KIND.sub('', name), k, n, fp8.why_bf16(choice, name, k, n)) for name, k, n in linears)
    return [{'linear': kind, 'count': count, 'in': k, 'out': n, 'share': count * k * n / whole, 'bf16': reason}
            for (kind, k, n, reason), count in found.items()]


def examine(state, model_config, choice, batches, device):
    """(a row of each cast, see `judge`, the worst first; [(bf16 loss, FP8 loss)] of each batch)."""
    model = GPT(model_config, fp8.linear_factory(choice, Linear)).to(device)
    model.load_weights(state['weights'])
    fp8_state, rows, losses = fp8.State(model, choice), collections.defaultdict(list), []
    # a step's targets, not a batch's, so that gradients are as small as in training: delayed scales are made for those
    saved = state.get('fp8_state') or {}
    divisor = saved.get('divisor', state['position'] // max(1, state['step']))
    targets = max(divisor * model_config.block_size, batches[0][1].numel())

    def step(x, y):
        loss = model(x, y, n_targets=float(targets))
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item() * targets / (y != -1).sum().item()

    fp8_state.load(saved, divisor)
    if fp8_state.needs_calibration:
        fp8_state.calibrate(lambda: step(*batches[0]))
    for batch in batches:
        with fp8.paused(), torch.no_grad():
            losses.append([model(*batch).item()])
        for row in measure.health(model, choice, lambda batch=batch: losses[-1].append(step(*batch))):
            rows[row['layer'], row['tensor']].append(row)
    return sorted((judge(of_batches, choice) for of_batches in rows.values()), key=lambda row: -row['badness']), losses


def judge(rows, choice):
    """One cast's rows of measure.health, a batch each -> one: the worst figures, shares' means too, 'badness' (above 1 is bad)
    and 'verdict'."""
    figures = {name: [row[name] for row in rows] for name in measure.FIGURES}
    tensor, ratios = rows[0]['tensor'], [row['sqnr_db'] for row in rows if row['amax']]  # zeros are exact, and have no ratio
    dtype = FORMATS[choice.format][('input', 'weight', 'grad').index(tensor)]
    row = {'layer': rows[0]['layer'], 'tensor': tensor, 'format': 'e5m2' if dtype == E5M2 else 'e4m3',
           'amax': max(figures['amax']), 'scale': min(figures['scale']), 'sqnr_db': min(ratios, default=math.inf)}
    for name in ('saturated', 'flushed'):
        row |= {name: statistics.fmean(figures[name]), f'{name}_max': max(figures[name])}
    shares = row['flushed_max'] / BAD['flushed'], row['saturated_max'] / BAD['saturated']
    row['badness'] = max((CLEAN[row['format']] - row['sqnr_db']) / BAD['sqnr_db'], *shares)
    if not math.isfinite(sum(figures['amax'])) or math.isnan(sum(ratios)):
        row |= {'amax': sum(figures['amax']), 'sqnr_db': math.nan, 'badness': math.inf}
    return row | {'verdict': 'bad' if row['badness'] > 1 else 'watch' if max(shares) > WATCH else 'fine'}


def keep_flag(choice, layers, model_config):
    """--fp8_keep with these layers too; where all of a kind are among them, the kind."""
    kinds = collections.defaultdict(list)
    for name, _, _ in plan.linears(model_config):
        kinds[KIND.sub('', name)].append(name)
    names = [name for kind, of_kind in kinds.items() for name in ([kind] if layers >= set(of_kind) else [n for n in of_kind if n in layers])]
    return f'--fp8_keep={",".join([*choice.keep, *names])}'


def advice(path, state, model_config, choice, rows, batches, device):
    """What to do about the bad casts, in lines. Finer scales are tried on one batch."""
    bad, watch = ([row for row in rows if row['verdict'] == verdict] for verdict in ('bad', 'watch'))
    flag = keep_flag(choice, {row['layer'] for row in bad or watch}, model_config)
    if not bad:
        return [f'healthy: none of {len(rows)} casts is bad, {len(watch) or "none"} to watch' + f': {flag} would spare those layers' * bool(watch)]
    lines = [f'{len(bad)} of {len(rows)} casts are bad, {bad[0]["layer"]} ({bad[0]["tensor"]}) most']
    command = f'python train_fp8.py --resume={shlex.quote(path)} '
    broken = [row['layer'] for row in bad if row['tensor'] == 'weight' and not math.isfinite(row['amax'])]
    if broken:
        return [*lines, f'the weights of {broken[0]} are not finite: no precision helps, go back to an earlier checkpoint']
    lines.append(f'in bf16: {command}{flag}')
    if choice.recipe in ('tensorwise', 'delayed'):
        finer = fp8.choose(True, 'emulate', device, torch.bfloat16, batches[0][0].numel(), recipe='rowwise', keep=','.join(choice.keep))
        left = sum(row['verdict'] == 'bad' for row in examine(state, model_config, finer, batches[:1], device)[0])
        lines.append(f'with a scale per row, {left or "none"} would be bad (one batch): {command}--fp8_recipe=rowwise'
                     + ' --fp8_backend=native' * (choice.backend == 'te'))
    return lines


def report(path, config, device, count, everything):
    """Prints a checkpoint's coverage, casts, losses and what to do; returns all that as a dict."""
    state = load(path)
    config, changed = config.over(state['config'], never=('ckpt', 'device', 'batches', 'all', 'json'))
    model_config = GPTConfig(**state['model_config'])
    if count < 1 or config['batch_size'] < 1:
        raise SettingError('batches and batch_size are at least 1')
    choice, note = choose(config, state, device, config['batch_size'] * model_config.block_size)
    batches, source = read_batches(config, state, model_config, device, count)
    print(f'# {path}: step {state["step"]}, trained in {state["precision"]["name"]}; here in {choice.backend}, {choice.recipe}, {choice.format}')
    print(*([note] if note else []), *changed, f'data: {source}\n', sep='\n')
    kinds = coverage(model_config, choice)
    for of in kinds:
        print(f'{of["linear"]:<12} {of["count"]:>3} x ({of["in"]} -> {of["out"]}), {of["share"]:.1%} of the FLOPs, '
              + (f'bf16: {of["bf16"]}' if of['bf16'] else 'FP8'))
    covered, inside = (sum(of[name] for of in kinds if not of['bf16']) for name in ('share', 'count'))
    print(f'FP8 covers {inside} of {sum(of["count"] for of in kinds)} linears, {covered:.1%} of the linears\' FLOPs\n', flush=True)
    rows, losses = examine(state, model_config, choice, batches, device)
    print(f'{"layer":<16} {"cast":<11} {"amax":>9} {"scale":>9}  saturated: mean, max  flushed: mean, max     SQNR')
    for r in rows if everything else rows[:10]:
        print(f'{r["layer"]:<16} {r["tensor"]:<6} {r["format"]} {r["amax"]:9.2e} {r["scale"]:9.2e}   {r["saturated"]:8.3%}, {r["saturated_max"]:8.3%}'
              f'   {r["flushed"]:7.2%}, {r["flushed_max"]:7.2%}  {r["sqnr_db"]:5.1f} dB  {r["verdict"]}')
    if len(rows) > 10 and not everything:
        print(f'... and {len(rows) - 10} better ones: --all')
    bf16, in_fp8 = (statistics.fmean(column) for column in zip(*losses))
    print(f'\nmean loss of {len(losses)} batches: {bf16:.4f} in bf16, {in_fp8:.4f} in FP8: {in_fp8 / bf16 - 1:+.3%}')
    print(*(lines := advice(path, state, model_config, choice, rows, batches, device)), sep='\n')
    return {'ckpt': path, 'step': state['step'], 'precision': state['precision'], 'choice': vars(choice), 'data': source, 'coverage': kinds,
            'covered': covered, 'rows': rows, 'loss': {'bf16': bf16, 'fp8': in_fp8}, 'advice': lines,
            'device': runlog.device_name(device), 'versions': runlog.versions()}


def strict(value):
    """value as strict JSON has it: numbers that are not finite as text."""
    if isinstance(value, dict):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == '__main__':
    if no_torch:
        smi = nvidia_smi()
        print(f'GPU       {smi[0]["name"] if smi else "none that nvidia-smi finds"}\nPython    {platform.python_version()}\n'
              f'torch     does not load: {no_torch}\n'
              f'to do     make install, or: pip install "torch>=2.11{"" if smi else ",<2.14"}" && pip install -r requirements.txt\n'
              'nothing trains here yet')
        sys.exit(bool(config['ckpt']))
    place = parallel.init(config['device']).device
    result = report(config['ckpt'], config, place, config['batches'], config['all']) if config['ckpt'] else machine(place)
    if config['json']:
        data.write_json(config['json'], strict(result))
