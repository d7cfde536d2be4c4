"""Time other people's code beside ours on this machine, from clones in .peers; measure.sh calls this.

$ python tests/gpu/rivals.py nanogpt results   # nanoGPT's train.py, GPT-2 124M, 32 x 1024 tokens a step
$ python tests/gpu/rivals.py nanochat results  # nanochat's Float8Linear, ours beside it: a linear, a block

Written for nanoGPT at 3adf61e and nanochat at 92d63d4. Each prints its figures and writes results/NAME.json.
A third word, quick, takes tiny sizes: a rehearsal on any machine.
"""
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEERS = ROOT / '.peers'
sys.path[:0] = [str(ROOT), str(PEERS / 'nanochat')]
os.environ.setdefault('NANOCHAT_DTYPE', 'bfloat16')  # what it takes on a GPU, and a CPU should too

import numpy as np  # noqa: E402
import torch  # noqa: E402

from fp8gpt import files, fp8, graphs, runlog  # noqa: E402
from fp8gpt.gpus import device_name  # noqa: E402
from fp8gpt.fp8 import health  # noqa: E402
from model import PRESETS, Block, GPTConfig, Linear  # noqa: E402

DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
HEADER = 1024   # bytes before a shard's tokens


def report(clone, rows, out, **facts):
    """Print the last of the rows, dicts; write all to <out>/<clone>.json with the device and versions. clone:
    the folder in .peers."""
    git = ['git', '-C', PEERS / clone, 'rev-parse', 'HEAD']
    own = {**os.environ, 'GIT_CEILING_DIRECTORIES': str(PEERS)}     # not this repository's commit
    commit = subprocess.run(git, env=own, capture_output=True, text=True).stdout.strip()
    print(runlog.markdown(rows[-1:]), flush=True)
    about = {'device': device_name(DEVICE), 'versions': runlog.versions(), 'clone': commit}
    files.write_json(os.path.join(out, f'{clone.lower()}.json'), about | facts | {'rows': rows})


def nanogpt(out, quick):
    """Time its loop as it is, with our model's biases and batch: the median step after ten."""
    home = PEERS / 'nanoGPT'
    sample = home / 'data' / 'sample'
    sample.mkdir(parents=True, exist_ok=True)
    ours = ROOT / '.data' / 'fineweb_edu-gpt2' / 'train_000000.bin'
    if ours.exists():
        tokens = np.fromfile(ours, '<u2', 2_000_000, offset=HEADER)
    else:
        tokens = np.random.default_rng(0).integers(0, 50257, 2_000_000, np.uint16)
    for split in ('train', 'val'):
        tokens.tofile(sample / f'{split}.bin')
    B, T = (2, 64) if quick else (32, 1024)
    words = ['train.py', '--dataset=sample', f'--batch_size={B}', f'--block_size={T}', '--bias=True',
             '--gradient_accumulation_steps=1', f'--max_iters={12 if quick else 60}', '--eval_iters=1',
             '--eval_interval=1000', '--always_save_checkpoint=False', '--dtype=bfloat16']
    if quick:
        words += ['--device=cpu', '--compile=False', '--n_layer=1', '--n_embd=64', '--n_head=4']
    done = subprocess.run([sys.executable, *words], cwd=home, capture_output=True, text=True)
    shutil.rmtree(sample)
    if done.returncode:
        sys.exit(f"nanoGPT's train.py failed: {done.stderr.strip()[-1000:]}")
    times = [float(ms) for ms in re.findall(r'^iter \d+: .*time ([\d.]+)ms', done.stdout, re.M)]
    step = statistics.median(times[10:]) / 1e3
    row = {'what': 'nanoGPT train.py, bf16 autocast', 'ms a step': step * 1e3, 'tokens/s': B * T / step}
    report('nanoGPT', [row], out, words=words, milliseconds=times)


def nanochat(out, quick):
    """Time one linear and one block of each width, forward and backward of 16K tokens, compiled, in turn."""
    from nanochat.fp8 import Float8Linear

    def theirs(in_features, out_features, bias=True, name=''):
        return Float8Linear(in_features, out_features, bias=bias)

    tokens, presets = 16384, {name: PRESETS[name] for name in ('gpt2', 'gpt2-xl')}
    turns = {'times': 20}   # a pass of width 768 takes a millisecond
    if quick:
        tokens, presets = 256, {'tiny': GPTConfig(n_embd=64, n_head=4, block_size=128)}
        turns = {'rounds': 1, 'warmup': 1}
    place = fp8.Place(DEVICE, tokens, compiling=DEVICE.type == 'cuda')
    makers = {'bf16': Linear, 'nanochat FP8': theirs}
    for kernels in ('inductor', 'triton'):
        options = fp8.Options(backend='native', recipe='tensorwise', kernels=kernels)
        makers[f'our FP8, {kernels}'] = fp8.linear_factory(fp8.choose(options, place), Linear)
    rows = []
    for name, config in presets.items():
        shape = tokens // config.block_size, config.block_size, config.n_embd
        for what in ('linear', 'block'):
            runs = {}
            for who, maker in makers.items():
                if what == 'block':
                    module = Block(config, maker, 'h.0')
                else:
                    module = maker(config.n_embd, 4 * config.n_embd, bias=True, name='h.0.mlp.up')
                runs[who] = compiled_run(module, shape, what)
            times = health.medians(runs, **turns)
            row = {'what': f'{what} of {name}'}
            row |= {f'{who} ms': seconds * 1e3 for who, seconds in times.items()}
            ours = min(seconds for who, seconds in times.items() if who.startswith('our'))
            row['nanochat / ours'] = times['nanochat FP8'] / ours
            row['bf16 / ours'] = times['bf16'] / ours
            rows.append(row)
            report('nanochat', rows, out, tokens=tokens)
            torch.compiler.reset()


def compiled_run(module, shape, what):
    """Return a function that takes x of this shape forward and backward through the compiled module."""
    module = module.to(DEVICE)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.02)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    forward = torch.compile(module) if DEVICE.type == 'cuda' else module

    def run():
        y = sum(forward(x, None, None, None)) if what == 'block' else forward(x)
        y.backward(torch.ones_like(y))
        module.zero_grad(set_to_none=True)
        x.grad = None
    if DEVICE.type == 'cpu':
        return run
    for _ in range(3):
        run()
    return graphs.capture(run)[0]   # a pass of one module is bound by the host


if __name__ == '__main__':
    {'nanogpt': nanogpt, 'nanochat': nanochat}[sys.argv[1]](sys.argv[2], sys.argv[3:] == ['quick'])
