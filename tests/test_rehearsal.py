"""Each part of tests/gpu/measure.sh on a CPU, with tiny sizes and stand-ins for the clones of .peers: what a
GPU is rented for must not end on a wrong flag."""
import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, environment, write_tiny_data

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
FILES = {   # part -> the JSON of its items
    'smoke': [],
    'speed': ['inductor/pair-gpt2_fp8', 'triton/pair-gpt2_fp8', 'others/pair-gpt2_fp8'],
    'quality': ['quality-gpt2_fp8', 'quality-gpt2_fp8-2'],
    'wide': ['inductor/pair-h100_350m_fp8', 'triton/pair-h100_350m_fp8',
             'inductor/pair-flags', 'triton/pair-flags'],
    'layers': ['head/pair-gpt2_fp8', 'kept/pair-gpt2_fp8', 'auto/pair-gpt2_fp8', 'recipes/pair-gpt2_fp8',
               'gemm-gpt2_fp8', 'auto/pair-flags'],
    'peers': ['nanogpt', 'pair-gpt2_fp8', 'nanochat'],
}


@pytest.fixture
def checkout(tmp_path):
    """A copy of the repository with data and clones where measure.sh looks for them."""
    home = tmp_path / 'repository'
    away = '.*', 'runs', 'data', 'results', 'checkpoints*', '__pycache__', '*.egg-info'
    shutil.copytree(ROOT, home, ignore=shutil.ignore_patterns(*away))
    (home / '.data').mkdir()
    write_tiny_data(home / '.data').rename(home / '.data' / 'fineweb_edu-byte')
    for name, text in {'nanoGPT/train.py': NANOGPT, 'nanochat/nanochat/fp8.py': NANOCHAT,
                       'nanochat/nanochat/common.py': COMMON}.items():
        path = home / '.peers' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home


@pytest.mark.timeout(900)       # a machine may be loaded
@pytest.mark.parametrize('part', FILES)
def test_each_item_of_a_part_runs_and_leaves_its_json(part, checkout, tmp_path):
    own = {'QUICK': '1', 'PYTHON': sys.executable, 'TMPDIR': str(tmp_path), 'XDG_CACHE_HOME': str(tmp_path)}
    words = ['bash', 'tests/gpu/measure.sh', part, str(tmp_path / 'out')]
    done = subprocess.run(words, cwd=checkout, env=environment(**own), capture_output=True, text=True)
    log = (tmp_path / 'out' / f'{part}.log').read_text()
    assert done.returncode == 0, done.stderr
    assert 'FAILED' not in done.stdout, done.stdout + log
    assert (tmp_path / 'out' / 'tests.xml').exists() == (part == 'smoke')
    assert 'left out: the time' not in done.stdout
    found = {path.relative_to(tmp_path / 'out').with_suffix('').as_posix()
             for path in (tmp_path / 'out').rglob('*.json')}
    assert found == set(FILES[part])
    for name in FILES[part]:
        for row in json.loads((tmp_path / 'out' / f'{name}.json').read_text())['rows']:
            if row.get('recipe') != 'blockwise':    # which a CPU does not have
                assert float in map(type, row.values()), row    # else the verdict is an error
    if part == 'peers':
        [row] = json.loads((tmp_path / 'out' / 'nanogpt.json').read_text())['rows']
        assert row['ms a step'] == 20
        assert not os.listdir(checkout / '.peers' / 'nanoGPT' / 'data')
