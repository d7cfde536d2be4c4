"""What a GPU is asked to do, counted on a CPU. A fusion that is lost shows here, as more bytes."""
import json
import pathlib

import pytest
import torch

from benchmarks import kernels, pretended
from configurator import MachineError
from conftest import refused, run

EXPECTED = pathlib.Path(__file__).with_name('kernels.json')
VERSION = '.'.join(torch.__version__.split('.')[:2])

try:
    pretended.check_versions()
except MachineError as why:
    pytestmark = pytest.mark.skip(reason=str(why))

CASES = [  # words, gpu, recipes
    ('config/gpt2_fp8.py --batch_size=32', 'h200', 'tensorwise,delayed'),
    ('config/gpt2_fp8.py --batch_size=32', 'h200', 'rowwise,rowwise_gw_hp,blockwise'),
    ('config/gpt2_fp8.py --batch_size=32', 'b200', 'mxfp8'),
    ('--init_from=gpt2-xl --batch_size=16', 'h200', 'tensorwise,delayed'),
    ('config/h100_350m_fp8.py --batch_size=32', 'h200', 'tensorwise,delayed'),
]


@pytest.mark.parametrize('words, gpu, recipes', CASES)
def test_bytes_and_launches_are_those_stored(words, gpu, recipes, tmp_path):
    options = f'--gpu={gpu}', f'--recipes={recipes}', f'--results={tmp_path}'
    out = run('bench.py', 'kernels', *words.split(), *options).stdout
    found = json.loads(out.splitlines()[-1])
    assert {'bf16', *recipes.split(',')} <= found.keys()
    assert ('delayed triton' in found) == ('delayed' in recipes)
    expected = json.loads(EXPECTED.read_text())[VERSION][words]
    for recipe, figures in found.items():
        for figure, value in figures.items():
            assert value == pytest.approx(expected[recipe][figure], rel=0.02), f'{recipe}: {figure}'


def test_an_fp8_head_adds_a_byte_a_logit(tmp_path):
    """dlogits are cast where they are computed: no further reading, and no look for an amax."""
    words = ['--init_from=gpt2', '--batch_size=32', '--fp8_head', '--fp8_kernels=inductor']
    options = '--recipes=tensorwise', f'--results={tmp_path}'
    out = run('bench.py', 'kernels', *words, *options).stdout
    found = json.loads(out.splitlines()[-1])
    outside = {name: row['gb'] - 12 * row['gb_per_layer'] for name, row in found.items()}
    logits, table = 32 * 1024 * 50304 / 1e9, 50304 * 768 / 1e9
    more = outside['tensorwise'] - outside['bf16']
    assert more == pytest.approx(logits + 8 * table, rel=0.06)     # 8 bytes: the weight's casts


def test_a_fit_finds_what_bytes_are_in_proportion_to():
    elements = [{'n_embd': a, 'weights': b} for a, b in ((1e8, 2e6), (2e8, 9e6), (3e8, 5e6))]
    counts = [[3 * each['n_embd'], 10 * each['weights'], 64] for each in elements]
    found = kernels.fitted(('n_embd', 'weights'), elements, counts)
    assert found == {'n_embd': 3.0, 'weights': 10.0, 'launches': 3, 'small': 1}


def test_a_gpu_that_is_not_known_is_a_mistake():
    code, message = refused('bench.py', 'kernels', '--gpu=h2000')
    assert code == 2
    assert message == "the command line: gpu is one of h200, b200, not 'h2000'"


@pytest.mark.parametrize('version', json.loads(EXPECTED.read_text()))
def test_kernels_of_their_own_move_fewer_bytes(version):
    """Goals for GPT-2 124M at 32 x 1,024 tokens, and in proportion for 1.5B at 16 x 1,024."""
    counts = json.loads(EXPECTED.read_text())[version]
    small, large = 'config/gpt2_fp8.py --batch_size=32', '--init_from=gpt2-xl --batch_size=16'
    for words, factor in ((small, 1), (large, 1.14)):
        for recipe, most in (('tensorwise', 3.4), ('delayed', 2.7)):
            assert counts[words][f'{recipe} triton']['gb_per_layer'] <= most * factor
    for recipe in ('tensorwise', 'delayed'):
        assert counts[small][f'{recipe} triton']['triton_launches'] <= 420
