"""Report what this machine can do in FP8, and which layers of a model FP8 would cover.

$ python diagnose.py                                    # GPUs, packages, what runs, what to install
$ python diagnose.py --ckpt=checkpoints/latest.pt       # which linears are in FP8, and why the others are not
$ python diagnose.py --ckpt=meta-llama/Llama-3.2-1B --fp8_recipe=rowwise    # of the hub, or a folder

What FP8 does to a model's numbers, a training run measures every fp8_stats_freq steps. It calls a cast

    bad      not finite; or a signal-to-noise ratio 10 dB below the format's own rounding, which on
             normal data leaves 31.5 dB in e4m3 and 25.5 dB in e5m2; or flushed > 10% (values that
             became zero) or saturated > 1% (clamped)

The ratio alone is blind to an outlier, which fills the sum of squares and is itself cast well: with a
million normal values in e4m3, one at 50,000 sigma leaves 58.0 dB for all and 24.0 dB for the others,
and flushes 8.7% of them.
"""
from configurator import MachineError, configure, first_line, say

ckpt = ''                # a checkpoint or Hugging Face model to look at; '' = the machine
device = 'auto'          # auto (cuda, else cpu) | cuda | cpu
tokens = 8192            # >= 1: of a micro-batch
fp8_backend = 'emulate'  # native | te | torchao | emulate: whose linears a model would have
fp8_recipe = 'auto'  # auto (tensorwise) | Recipe of fp8gpt/fp8/linear.py
fp8_keep = ''            # linears that stay bf16, with commas
# imported, it leaves the command line alone
config = configure(__file__, None if __name__ == '__main__' else [])

from fp8gpt.tokenizer import check_exists

if config['ckpt']:
    check_exists(config['ckpt'])

# Imported only now: --help and a mistake in the settings are answered without waiting for torch.
import collections
import dataclasses
import importlib.metadata
import platform
import subprocess
import textwrap

try:
    import torch
except (ImportError, OSError) as error:
    cure = 'make install, or pip install -r requirements.txt'
    raise MachineError(f'torch does not load: {first_line(error)}: {cure}') from None

from fp8gpt import distributed, fp8, pretrained
from fp8gpt.fp8.backends import BACKENDS
from fp8gpt.fp8.linear import RECIPES
from fp8gpt.gpus import assembler_lines, device_line
from model import GPT, GPTConfig, Linear

PACKAGES = ('triton', 'transformer_engine', 'torchao', 'tiktoken', 'datasets', 'transformers', 'wandb')
NEXT = ' ' * 10     # begins the next row of a line


def report_model(config, device):
    """Print which linears of config['ckpt'] would be in FP8, and why the others would not."""
    state, about = pretrained.opened(config['ckpt'])
    config = config.over(state['config'], never=('ckpt', 'device', 'tokens', 'fp8_backend'))
    choice = fp8.choose(fp8.Options.of(config), fp8.Place(device, config['tokens']))
    if 'fp8_backend' not in config.given:
        choice = dataclasses.replace(choice, reason='which runs anywhere')
    with torch.device('meta'):
        model = GPT(GPTConfig(**state['model_config']), fp8.linear_factory(choice, Linear), seed=None)
    fp8.State(model, choice)        # refuses an fp8_keep that names no linear
    say(about, *config.changes, fp8.summary(model, choice))


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


def fold(line):
    """Return a line in rows of at most 100 columns."""
    return textwrap.fill(line, 100, subsequent_indent=NEXT)


def report_machine(device, tokens):
    """Print what this machine can do in FP8. tokens: of a micro-batch."""
    gpus = driver_lines()
    auto = fp8.choose(fp8.Options(), fp8.Place(device, tokens, compiling=device.type == 'cuda'))
    print(fold(f'auto      {auto.backend if auto.on else "bf16"} ({auto.reason})'))
    say(device_line(device), f'driver    {"; ".join(gpus) or "nvidia-smi does not answer"}')
    versions = [f'{name} {installed(name)}' for name in PACKAGES]
    say(fold(f'packages  Python {platform.python_version()}, {", ".join(versions)}'),
        *assembler_lines(device))
    if gpus and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            print(f'to do     torch {torch.__version__} reaches no GPU: {first_line(error)}; for its build '
                  'with CUDA: pip uninstall -y torch && pip install -r requirements.txt')
    print()
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
            print(f'{NEXT}not {", ".join(recipes)}:', *reason.split('; '), sep=f'\n{NEXT}  ')
    if runs['native'] and device.type == 'cuda':
        print('what FP8 gains in training: python bench.py pair config/gpt2_fp8.py')
    else:
        print('no FP8 units here: auto trains in bf16, --fp8_backend=native emulates FP8')


if __name__ == '__main__':
    place = distributed.init(config['device']).device
    if config['ckpt']:
        report_model(config, place)
    else:
        report_machine(place, config['tokens'])
