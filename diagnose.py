"""Report what this machine can do in FP8, and what FP8 does to a checkpoint's numbers.

$ python diagnose.py                                    # GPUs, packages, what runs, what to install
$ python diagnose.py --ckpt=checkpoints_fp8/latest.pt   # FP8's share, worst casts, loss against bf16
$ python diagnose.py --ckpt=checkpoints/latest.pt --fp8_recipe=rowwise
$ python diagnose.py --ckpt=meta-llama/Llama-3.2-1B     # of the hub, or a folder: what FP8 would do to it

The third command shows what FP8 would do to a bf16 run. A checkpoint runs with its own settings, which flags
replace, and without --fp8_backend on emulate, as any device can. The worst batch decides about each cast of
each FP8 linear:

    bad      not finite; or a signal-to-noise ratio 10 dB below the format's own rounding, which on
             normal data leaves 31.5 dB in e4m3 and 25.5 dB in e5m2; or flushed > 10% (values that
             became zero) or saturated > 1% (clamped)

The ratio alone is blind to an outlier, which fills the sum of squares and is itself cast well: with a
million normal values in e4m3, one at 50,000 sigma leaves 57.8 dB for all and 24.0 dB for the others,
and flushes 8.7% of them.
"""
from __future__ import annotations

from configurator import MachineError, SettingError, configure, first_line

ckpt = ''                # a checkpoint or Hugging Face model to examine; '' = the machine
batches = 4              # >= 1: validation batches that the checkpoint sees
device = 'auto'          # auto (cuda, else cpu) | cuda | cpu
# as the checkpoint's run had them, or else these
batch_size = 8           # >= 1: sequences; on a CPU, few make a big model's test short
block_size = 1024        # >= 1: tokens of a sequence, at most as many as the model reads
dataset = 'fineweb_edu'  # name given to prepare_data.py, or a folder of shards; missing: random tokens
data_dir = 'data'        # where prepare_data.py put the datasets
fp8_backend = 'emulate'  # native | te | torchao | emulate
fp8_recipe = 'auto'      # auto (tensorwise) | RECIPES of fp8gpt/fp8/linear.py
fp8_format = 'auto'      # auto (hybrid; with finer scales than a tensor's, e4m3) | hybrid | e4m3 | e5m2
fp8_margin = 0           # >= 0, <= 8: powers of two left free above the amax
fp8_amax_history = 1024  # >= 1: delayed: steps whose largest amax makes the scale
fp8_keep = ''            # linears that stay bf16, with commas
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [])

from fp8gpt import files
from fp8gpt.tokenizer import is_pretrained

if config['ckpt'] and not is_pretrained(config['ckpt']):
    files.checkpoint_file(config['ckpt'])

# Imported only now: --help and a mistake in the settings are answered without waiting for torch.
import collections
import dataclasses
import functools
import importlib.metadata
import shlex
import platform
import statistics
import subprocess

try:
    import torch
except (ImportError, OSError) as error:
    cure = 'make install, or pip install -r requirements.txt'
    raise MachineError(f'torch does not load: {first_line(error)}: {cure}') from None

from fp8gpt import data, distributed, fp8, lora, runlog, shards
from fp8gpt.fp8 import health
from fp8gpt.fp8.backends import BACKENDS
from fp8gpt.fp8.linear import RECIPES
from model import GPT, GPTConfig, Linear

OF_THIS_CALL = 'ckpt', 'device', 'batches', 'fp8_backend'       # not taken from the checkpoint's run
COLUMNS = 'layer', 'tensor', 'format', 'amax', 'scale', 'saturated', 'flushed', 'sqnr_db', 'verdict'
PACKAGES = ('triton', 'transformer_engine', 'torchao', 'tiktoken', 'datasets', 'transformers', 'wandb')


# ---------------------------------------------------------------------------------------------- a checkpoint

def read_batches(config, state, model_config, device):
    """Return ([(x, y, examples)], what they are): fixed windows of the validation split, or random tokens
    without a dataset. Raises SettingError where the dataset has another tokenizer."""
    count, B, T = config['batches'], config['batch_size'], model_config.block_size
    as_typed = state['config'].get('tokenizer', config['ckpt'])
    folder = shards.dataset_dir(config['data_dir'], config['dataset'], as_typed)
    try:
        windows = data.TokenData(folder, 'val', T)
    except FileNotFoundError as error:
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(model_config.vocab_size, (count, 2, B, T), generator=generator)
        batches = [(x, y, None) for x, y in random.to(device)]
        return batches, f'random tokens, so the losses say little: {error}'
    theirs = shards.read_meta(folder).get('tokenizer', state['tokenizer'])
    if state['tokenizer'] not in ('', theirs):
        raise SettingError(f'{folder} is tokenized with {theirs}, the checkpoint with {state["tokenizer"]}')
    batches = list(data.eval_batches(windows, count * B * T, B, device=device))
    return batches, f'{len(batches)} batches of {B} x {T} tokens, {folder}, validation'


def examine(model, choice, batches):
    """Return (a row for each cast, of its worst batch, the worst cast first; {'bf16', 'fp8': mean loss})."""
    losses, rows = {'bf16': [], 'fp8': []}, collections.defaultdict(list)

    def forward_backward(x, y, examples):
        model(x, y, examples=examples).backward()
        model.zero_grad(set_to_none=True)

    fp8_state = fp8.State(model, choice)
    if fp8_state.needs_calibration:
        fp8_state.calibrate(functools.partial(forward_backward, *batches[0]))
    for x, y, examples in batches:
        with torch.no_grad():
            losses['fp8'].append(model(x, y, examples=examples).item())
            with fp8.paused():
                losses['bf16'].append(model(x, y, examples=examples).item())
        for row in health.cast_health(model, choice, functools.partial(forward_backward, x, y, examples)):
            rows[row['layer'], row['tensor']].append(row)
    worst = [health.worst_rows(of_cast)[0] for of_cast in rows.values()]
    means = {precision: statistics.fmean(values) for precision, values in losses.items()}
    return health.worst_rows(worst), means


def advice(path, choice, rows):
    """Return what to do about the bad casts of the checkpoint at a path, as a line."""
    bad = [row for row in rows if row['verdict'] == 'bad']
    if not bad:
        return f'healthy: none of {len(rows)} casts is bad'
    layers = ','.join(dict.fromkeys([*choice.keep, *(row['layer'] for row in bad)]))
    start = 'init_from' if is_pretrained(path) else 'resume'
    return (f'{len(bad)} of {len(rows)} casts are bad; to keep those layers in bf16: '
            f'python train_fp8.py --{start}={shlex.quote(path)} --fp8_keep={layers}')


def report_checkpoint(config, device):
    """Print the coverage, casts and losses of config['ckpt'] and what to do. Return these as a dict."""
    path = config['ckpt']
    state, about = lora.opened(path)
    config, changed = config.over(state['config'], never=OF_THIS_CALL)
    model_config = GPTConfig(**state['model_config'])
    window = min(config['block_size'], model_config.block_size)
    model_config = dataclasses.replace(model_config, block_size=window)
    choice = fp8.choose(fp8.Options.of(config), fp8.Place(device, config['batch_size'] * window))
    batches, source = read_batches(config, state, model_config, device)
    print(f'{about}; here in {choice.backend}, {choice.recipe}, {choice.format}')
    print(*changed, f'data: {source}', sep='\n')
    model = GPT(model_config, fp8.linear_factory(choice, Linear)).to(device)
    model.load_weights(state['weights'])
    print(f'{fp8.summary(model, choice)}\n', flush=True)
    rows, losses = examine(model, choice, batches)
    print(runlog.markdown([{name: row[name] for name in COLUMNS} for row in rows[:10]]))
    print(f'these are the worst of {len(rows)} casts')
    print(f'\nmean loss of {len(batches)} batches: {losses["bf16"]:.4f} in bf16, {losses["fp8"]:.4f} in FP8: '
          f'{losses["fp8"] / losses["bf16"] - 1:+.3%}')
    line = advice(path, choice, rows)
    print(line)
    return {'rows': rows, 'loss': losses, 'advice': line, 'covered': fp8.fp8_share(model)}


# ----------------------------------------------------------------------------------------------- the machine

def installed(package):
    """Return an installed package's version, or 'not installed'."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return 'not installed'


def driver_lines():
    """Return nvidia-smi's lines about the GPUs of this machine; [] where it does not answer."""
    command = 'nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader'.split()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def report_machine(device, tokens=8192):
    """Print what this machine can do in FP8. tokens: of a micro-batch."""
    gpus = driver_lines()
    print(runlog.device_line(device))
    print(f'driver    {"; ".join(gpus) or "nvidia-smi does not answer"}')
    print(f'packages  Python {platform.python_version()}',
          *(f'{name} {installed(name)}' for name in PACKAGES), sep=', ')
    if gpus and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            print(f'to do     torch {torch.__version__} reaches no GPU: {first_line(error)}; for its build '
                  'with CUDA: pip uninstall -y torch && pip install "torch>=2.11,<2.14"')
    auto = fp8.choose(fp8.Options(), fp8.Place(device, tokens, compiling=device.type == 'cuda'))
    print(f'auto      {auto.backend if auto.on else "bf16"} ({auto.reason})\n')
    runs = {}
    for backend in BACKENDS:
        refused = collections.defaultdict(list)
        runs[backend] = []
        for recipe in RECIPES:
            try:
                fp8.choose(fp8.Options(backend=backend, recipe=recipe), fp8.Place(device, tokens))
                runs[backend].append(recipe)
            except (fp8.OptionError, fp8.DeviceError) as error:
                refused[str(error).rpartition(f'fp8_recipe={recipe}: ')[2]].append(recipe)
        print(f'{backend:<10}{", ".join(runs[backend]) or "no recipe"}')
        for reason, recipes in refused.items():
            print(f'          not {", ".join(recipes)}: {reason}')
    if runs['native'] and device.type == 'cuda':
        print('how fast FP8 multiplies: python bench.py gemm config/gpt2_fp8.py')
    else:
        print('no FP8 units here: training runs in bf16; --fp8_backend=emulate shows FP8\'s numerics')


if __name__ == '__main__':
    place = distributed.init(config['device']).device
    if config['ckpt']:
        report_checkpoint(config, place)
    else:
        report_machine(place)
