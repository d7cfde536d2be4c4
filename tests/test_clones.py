"""Others' models are counted by their own code: stand-ins of their interfaces, and clones where there are."""
import json
import os

import pytest

from benchmarks import pretended
from configurator import MachineError
from conftest import TINY, refused, run

try:
    pretended.check_versions()
except MachineError as why:
    pytestmark = pytest.mark.skip(reason=str(why))

GPT = '''
import dataclasses
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclasses.dataclass
class GPTConfig:
    FIELDS

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, width), nn.Linear(width, 8)

    def forward(self, x):
        y = self.wide(x.to(self.wide.weight.dtype))
        DTYPE
        q = y.view(*y.shape[:2], 4, -1)
        ATTENTION
        return x + y.flatten(2) * self.narrow(x).mean(-1, keepdim=True)

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(Block(config.n_embd) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def init_weights(self):
        pass

    def forward(self, idx, targets):
        x = self.embed(idx)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        OUT
'''
NANOGPT = {
    'FIELDS': 'block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; bias: bool',
    'DTYPE': 'assert y.dtype == torch.bfloat16',
    'ATTENTION': 'q = q.transpose(1, 2); '
                 'y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)',
    'OUT': 'return logits, loss',
}
NANOCHAT = {
    'FIELDS': 'sequence_len: int; vocab_size: int; n_layer: int; n_head: int; n_kv_head: int; n_embd: int',
    'DTYPE': 'assert y.dtype == torch.float32',
    'ATTENTION': 'y = flash(q.bfloat16(), q.bfloat16(), q.bfloat16(), causal=True, window_size=(8, 0))',
    'OUT': 'return loss',
}
FLASH = "from kernels import get_kernel; flash = get_kernel('fa3').flash_attn_interface.flash_attn_func\n"
CONVERT = '''
def convert_to_float8_training(module, *, config=None, module_filter_fn=None):
    for name, child in module.named_modules():
        if module_filter_fn(child, name):
            child.forward = lambda x, forward=child.forward: forward(forward(x))
    return module
'''
SCRIPT = '''
raise SystemExit('a script: it would train')
if True:
    def fp8_module_filter(mod: nn.Module, fqn: str) -> bool:
        return isinstance(mod, nn.Linear) and mod.in_features == mod.out_features
'''


def filled(form, words):
    for word, text in words.items():
        form = form.replace(word, text)
    return form


@pytest.fixture
def clones(tmp_path):
    """The folders of stand-ins for both, joined by commas."""
    files = {
        'nanoGPT/model.py': filled(GPT, NANOGPT),
        'other/nanochat/gpt.py': FLASH + filled(GPT, NANOCHAT),
        'other/nanochat/fp8.py': CONVERT,
        'other/scripts/base_train.py': SCRIPT,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f'{tmp_path}/nanoGPT,{tmp_path}/other'


def counted(peers, results, *words):
    """{row: figures} of `bench.py kernels`."""
    options = '--recipes=tensorwise', '--fp8_kernels=inductor', f'--peers={peers}', f'--results={results}'
    out = run('bench.py', 'kernels', *words, *options, timeout=900).stdout
    return json.loads(out.splitlines()[-1])


def test_peers_are_counted_by_their_own_code(clones, tmp_path):
    found = counted(clones, tmp_path, *TINY, '--n_layer=7')
    assert list(found) == ['bf16', 'tensorwise', 'nanoGPT bf16', 'nanochat bf16', 'nanochat fp8']
    assert json.loads((tmp_path / 'kernels-flags.json').read_text())['rows'] == found
    assert all(found[name]['gb'] > 7 * found[name]['gb_per_layer'] > 0 for name in found)
    calls = {name: found[name]['library_calls'] for name in found}
    # three multiplications a linear, of which a layer has two and the head is one; attention there and back
    assert calls['nanoGPT bf16'] == 7 * (2 * 3 + 2) + 3
    assert calls['nanochat fp8'] == calls['nanochat bf16'] + 7 * 3  # the one linear that the filter lets by


def test_a_clone_that_is_not_there(tmp_path):
    code, message = refused('bench.py', 'kernels', f'--peers={tmp_path}/nowhere')
    assert code == 1
    assert message == f'{tmp_path}/nowhere is not there: --peers wants folders of clones, joined by commas'


def test_a_folder_that_is_no_clone(tmp_path):
    code, message = refused('bench.py', 'kernels', f'--peers={tmp_path}')
    assert code == 2
    assert message == (f'{tmp_path} is no clone that --peers knows: it has neither model.py nor '
                       f'nanochat/gpt.py')


def test_a_clone_of_another_shape(tmp_path):
    (tmp_path / 'model.py').write_text('class GPT: pass')
    words = *TINY, '--recipes=tensorwise', f'--peers={tmp_path}', f'--results={tmp_path}'
    done = run('bench.py', 'kernels', *words, rc=2, timeout=900)
    assert done.stderr.endswith(
        f"error: {tmp_path}: nanoGPT bf16 cannot be counted, its code is not of the shape that is known: "
        f"AttributeError: module 'nanogpt' has no attribute 'GPTConfig'\n")


def test_true_clones(tmp_path):
    peers = os.environ.get('PEERS')
    if not peers:
        pytest.skip('PEERS is not set: PEERS=../nanoGPT,../nanochat counts these clones')
    found = counted(peers, tmp_path, 'config/gpt2_fp8.py', '--batch_size=1', '--n_layer=2')
    assert {'nanoGPT bf16', 'nanochat bf16', 'nanochat fp8'} <= found.keys()
    assert found['nanochat bf16']['gb_per_layer'] < found['nanochat fp8']['gb_per_layer']
