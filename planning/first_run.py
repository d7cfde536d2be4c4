"""The command that trains on a dataset which has just been prepared, found from the files of config/."""
import math
import os
import shlex
import types
from glob import glob
from os.path import basename, join

from configurator import config_values
from planning.driver import FP8_UNITS, nvidia_smi
from shards import HELD_OUT

CONFIGS = join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'config')


def configs(tokenizer):
    """The config files, as records, that train on tokens of this kind and set what a run takes: the shortest
    first, by hours or steps."""
    found = []
    for path in sorted(glob(join(CONFIGS, '*.py'))):
        one = types.SimpleNamespace(**config_values(path), name=f'config/{basename(path)}')
        searching = one.name.startswith('config/sweep') or getattr(one, 'batch_size', 0) == 0
        if not searching and getattr(one, 'tokenizer', 'gpt2') == tokenizer:
            one.length = getattr(one, 'max_hours', math.inf), getattr(one, 'max_steps', math.inf)
            one.for_cpu = getattr(one, 'fp8_backend', 'auto') == 'native'
            found.append(one)
    return sorted(found, key=lambda one: one.length)


def command(asked, examples=False):
    """What to type next. asked: prepare_data.py's settings, resolved. examples: whether they are to fine-tune
    on."""
    gpus, name, words = nvidia_smi(), asked.name, []
    fitting = configs(asked.tokenizer)
    if not examples:
        fitting = [one for one in fitting if one.for_cpu == (not gpus)]
    if fitting:
        config = min(fitting, key=lambda one: one.dataset != name)  # of several, the first
        words.append(config.name)
        if config.dataset != name:
            words.append(f'--dataset={name}')
        if examples and not hasattr(config, 'init_from'):
            words.append('--init_from=scratch')     # no model has these tokens
    else:
        if examples:
            words += ['config/finetune.py', f'--init_from={asked.tokenizer}']
        words += [f'--dataset={name}', f'--tokenizer={asked.tokenizer}']
    if asked.split_name not in ('', *HELD_OUT):
        words.append(f'--split_name={asked.split_name}')
    if asked.data_dir != 'data':
        words.append(f'--data_dir={asked.data_dir}')
    words.append(f'--checkpoint_dir=checkpoints_{name}')
    return shlex.join([*launcher(gpus), script(gpus), *words])


def launcher(gpus):
    """What starts a script on each of the GPUs."""
    if len(gpus) > 1:
        return ['torchrun', '--standalone', f'--nproc_per_node={len(gpus)}']
    return ['python']


def script(gpus):
    """train.py where the GPUs are known to have no FP8 units."""
    known = [gpu['capability'] for gpu in gpus if gpu['capability']]
    return 'train.py' if known and min(known) < FP8_UNITS else 'train_fp8.py'
