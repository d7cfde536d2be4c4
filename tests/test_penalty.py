"""The penalty on the logits, against autograd on its formula, and through the scripts."""
import math

import pytest
import torch
import torch.nn.functional as F

from fp8gpt import fp8
from conftest import in_ranks, losses, records, run
from fp8_models import NATIVE, gradient_of
from model import GPT, GPTConfig, Linear, Penalty

CONFIG = GPTConfig(vocab_size=300, block_size=32, n_layer=2, n_head=4, n_embd=64)    # padded to 320


@pytest.mark.parametrize('choice, options', [
    (fp8.OFF, {}), (fp8.OFF, {'loss_chunks': 3}), (NATIVE, {'checkpoint_every': 1})])
def test_the_gradient_is_that_of_the_formula_and_the_loss_cross_entropy(choice, options):
    """In fp32, with logits that are no longer near 0. Validation goes without the penalty."""
    x, y = torch.randint(0, 300, (2, 2, 32), generator=torch.Generator().manual_seed(5))
    y[0, :20] = -1
    gpt = GPT(CONFIG, fp8.linear_factory(choice, Linear), dtype=torch.float32, **options)
    with torch.no_grad():
        gpt.wte.weight *= 10
    logits = gpt(x)[y != -1]
    each = torch.log(torch.exp(logits).sum(-1)) ** 2
    nats = F.cross_entropy(logits, y[y != -1], reduction='sum')
    wanted = gradient_of(gpt, (nats + 0.3 * each.sum()) / 50)
    loss, names = gpt(x, y, n_targets=50), gpt.state_dict().keys()
    without = gradient_of(gpt, loss)

    gpt.penalty = Penalty(0.3)
    with torch.no_grad():
        gpt(x, y)
    assert gpt.penalty.total == 0
    penalised = gpt(x, y, n_targets=50)
    found = gradient_of(gpt, penalised)
    assert torch.equal(penalised, loss)
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    assert (found - without).norm() > 1e-2 * wanted.norm()
    assert gpt.penalty.total.item() == pytest.approx(each.sum().item(), rel=1e-5)
    assert gpt.state_dict().keys() == names     # it is in no checkpoint


IN_FP32 = ['--penalty_weight=0.5', '--max_steps=4', '--warmup_steps=1', '--dtype=fp32']


def test_chunks_micro_steps_and_ranks_change_nothing(tiny, tmp_path):
    folders = [tmp_path / name for name in ('plain', 'whole', 'parts')]
    run('train.py', *tiny, *IN_FP32, '--penalty_weight=0', f'--checkpoint_dir={folders[0]}')
    run('train.py', *tiny, *IN_FP32, f'--checkpoint_dir={folders[1]}')
    parts = ['--batch_size=1', '--gradient_accumulation_steps=2', '--loss_chunks=3']
    in_ranks(2, 'train.py', *tiny, *IN_FP32, *parts, f'--checkpoint_dir={folders[2]}')

    plain, whole, parts = map(losses, folders)
    assert whole == pytest.approx(parts, rel=1e-5)
    assert whole[1] == plain[1]
    assert whole[4] != pytest.approx(plain[4], rel=1e-3)

    penalties = [dict(records(folder, 'train/penalty')) for folder in folders]
    assert set(penalties[0].values()) == {None}
    assert penalties[1] == pytest.approx(penalties[2], rel=1e-5)
    assert penalties[1][1] == pytest.approx(math.log(257) ** 2, rel=0.02)     # all words alike, at the start
    assert penalties[1][4] < 0.95 * penalties[1][1]

    before, after = (dict(records(folder, 'val/loss')) for folder in folders[:2])
    assert before[0] == after[0]
