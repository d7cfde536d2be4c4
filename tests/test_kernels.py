"""What a GPU moves between a block's multiplications, counted on a CPU. A lost fusion shows as bytes."""
import json

import pytest
import torch

import fake_cuda
from conftest import run
from model import PRESETS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(fake_cuda.problem()), reason=fake_cuda.problem())]
BF16, INDUCTOR = ('off', 'tensorwise', 'auto'), ('native', 'tensorwise', 'auto')
DELAYED = 'native', 'delayed', 'triton'
# GB by inductor: torch 2.15 fuses the casts of GELU's gradient otherwise
OF_DELAYED = 3.93 if torch.__version__ >= '2.15' else 4.18


def counted(**asked):
    """Return what tests/fake_cuda.py prints."""
    return json.loads(run('tests/fake_cuda.py', json.dumps(asked), fork=False).stdout.splitlines()[-1])


@pytest.mark.parametrize('preset, choices, gigabytes, launches', [
    ('gpt2', [BF16, INDUCTOR, ('native', 'delayed', 'auto')], (2.66, 4.38, OF_DELAYED), (27, 55, 61)),
    ('gpt2', [('native', 'tensorwise', 'triton'), DELAYED], (3.52, 2.58), (62, 58)),
    ('h100-350m', [DELAYED], (4.44,), (47,)),
])
def test_bytes_of_a_block_are_those_known(preset, choices, gigabytes, launches):
    """docs/fp8.md has these; torch.compile's code differs by up to 4%, and three launches, between torch 2.11
    and 2.13. Tensorwise stores no FP8 byte by byte: torch.compile's casts for delayed scaling do in torch
    2.13, transposed, which no count of bytes shows, so fp8.misfit refuses them."""
    sequences, inductor = 32, INDUCTOR in choices
    rows = counted(preset=preset, sequences=sequences, choices=choices, ptx=inductor)
    assert [row['bytes'] / 1e9 for row in rows] == pytest.approx(gigabytes, rel=0.04)
    assert [row['launches'] for row in rows] == pytest.approx(launches, abs=3)
    if inductor:
        assert all(row['assembled'] > 10 and row['spills'] == 0 for row in rows)
        assert [row['scattered'] for row in rows] == [0, 0, 2 * ('2.13' <= torch.__version__ < '2.15')]


@pytest.mark.parametrize('preset, sequences', [('gpt2', 32), ('llama-3.1-8b', 1)])
def test_weights_that_ranks_gather_in_fp8_cost_a_block_nothing(preset, sequences):
    """Backward makes W^T of them. Where forward makes it, it keeps a byte a weight of each block."""
    choices = [INDUCTOR, ('native', 'tensorwise', 'triton'), DELAYED]
    whole, gathered = (counted(preset=preset, sequences=sequences, choices=choices, **asked)
                       for asked in ({}, {'gathered': True}))
    weights = sum(k * n for k, n, _ in PRESETS[preset].block_linears().values())
    for row, before, keeps in zip(gathered, whole, (0, 1, 1), strict=True):
        assert 0.95 * before['bytes'] < row['bytes'] < before['bytes']
        assert row['launches'] < before['launches']
        assert row['kept'] == pytest.approx(before['kept'] - keeps * weights, rel=1e-3)


@pytest.mark.parametrize('recipe', ['tensorwise', 'rowwise', 'blockwise', 'mxfp8'])
def test_a_scale_and_its_inverse_come_of_one_amax(recipe):
    """On an H100, Inductor took the inverse from fp32's amax and the scale from the amax in bf16: in rowwise,
    up to a tenth of the columns came back doubled."""
    [row] = counted(preset='gpt2', sequences=8, choices=[('native', recipe, 'inductor')])
    assert row['split maxima'] == 0


def test_a_logit_is_read_once_and_its_gradient_written_once():
    """Two bytes read and two written, by the loss's kernel and, in rows that it does not take, by Inductor's;
    by an FP8 head two read, and two and one written. Beside it the head's weight and input, a hundredth and a
    fourteenth as large. Launches in bf16: the loss, two that sum it, casts of the weight and two gradients.
    """
    config = PRESETS['gpt2']
    for kernel, head, choice, of_logit, launches in (
            (True, False, BF16, 4, 6), (False, False, BF16, 4, 6), (False, True, INDUCTOR, 5, None)):
        [row] = counted(preset='gpt2', sequences=32, choices=[choice], head=head, kernel=kernel)
        logits = 32 * config.block_size * config.padded_vocab_size
        assert row['bytes'] == pytest.approx(of_logit * logits, rel=0.1 + 0.05 * head)
        assert launches in (None, row['launches'])
