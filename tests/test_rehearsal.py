"""Each part of tests/gpu/measure.sh on a CPU, with tiny sizes and stand-ins for the clones of .peers: what a
GPU is rented for must not end on a wrong flag."""
import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, environment, hellaswag_items, run, write_tiny_data

pytestmark = pytest.mark.slow

NANOGPT = '''
import os, sys
words = dict(word.removeprefix('--').split('=') for word in sys.argv[1:])
assert os.path.getsize(f'data/{words["dataset"]}/train.bin') == 2 * 2_000_000
for number in range(int(words['max_iters']) + 1):
    print(f'iter {number}: loss 9.0000, time {100 if number < 10 else 20}.00ms, mfu 1.00%')
'''
NANOCHAT = '''
import torch
from nanochat.common import COMPUTE_DTYPE


class Float8Linear(torch.nn.Linear):
    def forward(self, x):
        weight, bias = self.weight.to(COMPUTE_DTYPE), self.bias.to(COMPUTE_DTYPE)
        return torch.nn.functional.linear(x.to(COMPUTE_DTYPE), weight, bias)
'''
COMMON = "import os, torch; COMPUTE_DTYPE = getattr(torch, os.environ['NANOCHAT_DTYPE'])"
FILES = {   # part -> what its items leave, beside the log
    'kernels': [],
    'gpt2': ['124m.json'],
    'peers': ['nanogpt.json', 'nanochat.json'],
    'xl': ['1.5b.json'],
    'tests': ['tests.xml'],
    'train': ['train.jsonl'],
    'rest': ['124m-8.json', '350m.json', 'pair-gpt2_fp8.json', 'pair-gpt2_fp8-2.json',
             'quality-gpt2_fp8.json'],
}
CANNOT = 'cudnn', 'blockwise'   # what a CPU does not have


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository with data and clones where measure.sh looks for them."""
    home = tmp_path / 'repository'
    away = '.*', 'runs', 'data', 'results', 'checkpoints*', '__pycache__', '*.egg-info'
    shutil.copytree(ROOT, home, ignore=shutil.ignore_patterns(*away))
    (home / '.data').mkdir()
    write_tiny_data(home / '.data').rename(home / '.data' / 'fineweb_edu-byte')
    hellaswag_items(home / '.data', 4)
    for name, text in {'nanoGPT/train.py': NANOGPT, 'nanochat/nanochat/fp8.py': NANOCHAT,
                       'nanochat/nanochat/common.py': COMMON}.items():
        path = home / '.peers' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home


@pytest.mark.timeout(900)       # a machine may be loaded
@pytest.mark.parametrize('part', FILES)
def test_each_item_of_a_part_runs_and_leaves_its_json(part, checkout, tmp_path):
    own = {'QUICK': '1', 'PYTHON': sys.executable, 'TMPDIR': str(tmp_path), 'OUT': str(tmp_path / 'out')}
    done = subprocess.run(['bash', 'tests/gpu/measure.sh', part], cwd=checkout, env=environment(**own),
                          capture_output=True, text=True)
    log = (tmp_path / 'out' / 'log').read_text()
    assert done.returncode == 0 and 'FAILED' not in done.stdout + log, done.stdout + log + done.stderr
    assert 'left out: the time' not in done.stdout
    found = {path.name for path in (tmp_path / 'out').iterdir()}
    assert found == {'log', *FILES[part]}
    rows = {}
    for name in [name for name in FILES[part] if name.endswith('.json')]:
        made = json.loads((tmp_path / 'out' / name).read_text())
        assert made['device'] and made['versions']['torch']
        rows[name] = made['rows']
        for row in made['rows']:
            cannot = set(CANNOT) & set(map(str, row.values()))
            assert cannot or float in map(type, row.values()), row      # else the verdict is an error
    if part == 'gpt2':
        assert [row['variant'] for row in made['rows']] == ['bf16', 'triton', 'delayed', 'head', 'inductor']
        assert all(row['tokens/s'] > 0 and row['plan GB'] > 0 for row in made['rows'])
    if part == 'train':
        assert 'recompiled 0 times' in done.stdout
        assert 'HellaSwag' in done.stdout and 'val loss' in done.stdout
    if part == 'peers':
        [row] = rows['nanogpt.json']
        assert row['ms a step'] == 20
        assert not os.listdir(checkout / '.peers' / 'nanoGPT' / 'data')


@pytest.mark.timeout(600)
def test_sharded_training_is_timed_in_each_precision(tiny, tmp_path):
    path = tmp_path / 'sharded.json'
    tiny = [word for word in tiny if not word.startswith('--max_steps')]
    run('tests/gpu/sharded.py', path, *tiny, fork=False, timeout=500)
    rows = json.loads(path.read_text())['rows']
    assert all(row['tokens/s'] > 0 and row['ranks'] == 2 for row in rows.values()), rows
    losses = {name: row['loss'] for name, row in rows.items()}
    assert losses['delayed'] == losses['delayed, fsdp_grad_op']
    assert losses['bf16'] == pytest.approx(losses['ddp, bf16'], rel=1e-2)
    assert len({*losses.values()}) > 4
