"""What a GPU is asked to do, counted on a CPU. A fusion that is lost shows here, as more bytes."""
import json
import pathlib

import pytest
import torch

from benchmarks import kernels, pretended
from configurator import MachineError
from conftest import run

pytestmark = [pytest.mark.slow]
EXPECTED = pathlib.Path(__file__).with_name('kernels.json')
VERSION = '.'.join(torch.__version__.split('.')[:2])

try:
    pretended.check_versions()
except MachineError as why:
    pytestmark.append(pytest.mark.skip(reason=str(why)))

SCATTERED = {'delayed': 2, 'rowwise': 4}    # FP8 stores of a block that are known to be slow


@pytest.mark.parametrize('gpu, names', [
    ('h200', ['bf16', 'tensorwise', 'delayed', 'tensorwise triton', 'delayed triton']),
    ('h200', ['rowwise', 'rowwise_gw_hp', 'blockwise', 'bf16 head', 'fp8 head']),
    ('b200', ['mxfp8']),
])
def test_bytes_launches_and_stores_of_a_block(gpu, names):
    found = json.loads(run('tests/counted_blocks.py', gpu, *names).stdout.splitlines()[-1])
    expected = json.loads(EXPECTED.read_text())[VERSION]['config/gpt2_fp8.py --batch_size=32']
    for name in names:
        gigabytes, launches, scattered = found[name]
        assert len(scattered) <= SCATTERED.get(name, 0), scattered
        if 'head' not in name:
            assert gigabytes == pytest.approx(expected[name]['gb_per_layer'], rel=0.02), name
            around = 11         # launches of the embedding, head and loss
            assert 12 * launches + around == pytest.approx(expected[name]['triton_launches'], rel=0.02), name
    if 'tensorwise triton' in found:        # goals of the kernels of our own
        assert found['tensorwise triton'][0] <= 3.4
        assert found['delayed triton'][0] <= 2.7
        assert max(found[f'{recipe} triton'][1] for recipe in ('tensorwise', 'delayed')) <= 34
    if 'fp8 head' in found:
        # dlogits are cast where they are computed: no further reading, and no look for an amax
        logits, table = 32 * 1024 * 50304 / 1e9, 50304 * 768 / 1e9
        more = found['fp8 head'][0] - found['bf16 head'][0]
        assert more == pytest.approx(logits + 8 * table, rel=0.06)     # 8 bytes: the weight's casts


def test_a_fit_finds_what_bytes_are_in_proportion_to():
    elements = [{'n_embd': a, 'weights': b} for a, b in ((1e8, 2e6), (2e8, 9e6), (3e8, 5e6))]
    counts = [[3 * each['n_embd'], 10 * each['weights'], 64] for each in elements]
    found = kernels.fitted(('n_embd', 'weights'), elements, counts)
    assert found == {'n_embd': 3.0, 'weights': 10.0, 'launches': 3, 'small': 1}
