"""What each stage of speedrun.sh takes before it starts: hours, disk and money, a line each. Modelled.

$ python -m planning.stages config/gpt2_fp8.py --gpus=8 --usd_per_gpu_hour=3

Words are plan.py's. Data preparation goes at the tokens/s a core of results/data-*.json, on the cores of this
machine; text that comes from the hub is as fast as the network, if that is slower.
"""
import importlib.util
import json
import os
import sys

import torch

import plan
import resolve
import runlog
from planning.memory import moment_bytes

RESULTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'results')
ITEMS = 10_042                      # of HellaSwag, four endings each
ROW = 128                           # tokens of a context with an ending, padded: most are 65 to 128
ITEMS_GB = 0.07                     # with its texts
START = 1 / 60                      # hours: a script's imports, its model, the GPU's context (assumed)


def tokens_per_second():
    """Of tokenizing on this machine's cores, by what was measured."""
    faster = importlib.util.find_spec('gigatoken')
    with open(os.path.join(RESULTS, f'data-{"gigatoken" if faster else "tiktoken"}.json')) as file:
        measured = json.load(file)
    return measured['rows'][0]['ours, tokens/s'] / measured['cores'] * os.cpu_count()


def checkpoint_bytes(made, run):
    """Of one file: weights in fp32 and what the optimizer keeps."""
    config = made.shape.config
    return 4 * sum(made.parameters.values()) + moment_bytes(config, run.config['optimizer'])


def stages(made, length, run):
    """{stage: (what it is, hours, GB of disk)}. made, length, run: see plan.planned."""
    precision = plan.runs_in(run, made.shape.gpu)
    tokens = length.last_step * length.tokens_per_step
    token_bytes = 2 if made.shape.config.vocab_size <= 2**16 else 4
    kept = run.config['keep_checkpoints'] + 1  # and one that is being written
    forwards = ITEMS * 4 * ROW / 3  # a forward is a third of a training step's work
    return {
        'data': (f'{tokens:,} tokens', tokens / tokens_per_second() / 3600, tokens * token_bytes / 1e9),
        'items': ('HellaSwag', START, ITEMS_GB),
        'train': (f'{length.last_step:,} steps in {precision}', made.hours(precision, tokens),
                  kept * checkpoint_bytes(made, run) / 1e9),
        'evaluate': (f'{ITEMS:,} items', START + made.hours('bf16', forwards), 0),
        'sample': ('a text', START, 0),
    }


def lines(made, length, run):
    """A line for each stage."""
    gpus, usd = made.shape.gpus, run.config['usd_per_gpu_hour']
    where, said = f'on {gpus} x {made.shape.gpu.name}', []
    for name, (what, hours, size) in stages(made, length, run).items():
        price = f', {hours * gpus * usd:,.2f} USD' if usd else ''
        span = runlog.duration(hours * 3600)
        said.append(f'{name:<9} {what}: {span}, {size:,.2f} GB of disk{price}, {where}')
    return said


if __name__ == '__main__':
    asked = plan.arguments(sys.argv[1:])
    settings = resolve.run(asked.config, torch.device('cuda'), data_required=False)
    planned, length_of_run, _ = plan.planned(asked, settings, *asked.gpus)
    if planned.unknown and length_of_run.last_step == 1:
        print(f'length    {planned.unknown}')
    else:
        print(*lines(planned, length_of_run, settings), sep='\n')
