"""The output head in FP8: its loss and gradients against torch's cross-entropy, and where it runs."""
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fp8gpt import fp8
from conftest import equal, losses, run
from fp8gpt.fp8 import Choice, Options
from fp8gpt.fp8.health import cast_health
from fp8gpt.fp8.head import Fp8Head
from fp8gpt.fp8.linear import scaled_mm
from fp8_models import EMULATE, NATIVE, build, gradients, tokens
from helpers import random, relative
from model import GPTConfig, Penalty

M, C, V, WORDS = 64, 32, 128, 100       # V - WORDS columns pad the vocabulary
PADDED = GPTConfig(vocab_size=50, block_size=64, n_layer=2, n_head=2, n_embd=128)


def with_head(choice=NATIVE, **fields):
    return dataclasses.replace(choice, options=Options(head=True, **fields))


@pytest.fixture
def head():
    module = Fp8Head(C, V, scaled_mm, margin=0)
    module.weight.data = random(V, C, seed=1, dtype=torch.float32)
    return module


def reference(h, weight, targets, arithmetic):
    """The loss of the FP8 logits, and its gradient by torch: dh and dW in fp32."""
    q = arithmetic.quantizers
    h8, w8 = (quantizer(x).dequantize() for quantizer, x in ((q.x, h), (q.w, weight)))
    logits = (h8 @ w8.t()).bfloat16().float().requires_grad_()
    loss = F.cross_entropy(logits[:, :WORDS], targets, ignore_index=-1, reduction='sum')
    dlogits, = torch.autograd.grad(loss, logits)
    return loss, dlogits @ w8, dlogits.t() @ h.float()


def test_loss_and_gradients_are_the_cross_entropys(head):
    """A gradient's size is the scale's alone: no value is lost or clamped, however small the loss is made."""
    targets = torch.randint(WORDS, (M,), generator=torch.Generator().manual_seed(2))
    targets[5:9] = -1
    for g in (1.0, 3e-7, 2.0**-60):
        h, head.weight.grad = random(M, C).requires_grad_(), None
        loss = head(h[None], targets[None], WORDS)
        (g * loss).backward()
        expected, dh, dw = reference(h.detach(), head.weight.detach(), targets, head.arithmetic)
        assert loss.item() == pytest.approx(expected.item(), rel=2**-20)
        assert relative(head.weight.grad, g * dw) < 2**-8            # bf16's rounding
        assert 0.01 < relative(h.grad, g * dh) < 0.06               # e5m2's: 25.5 dB are 5%
        assert (head.weight.grad[WORDS:] == 0).all()
        assert (h.grad[5:9] == 0).all()


def test_a_sure_and_wrong_head_keeps_its_gradient(head):
    head.weight.data.zero_()
    head.weight.data[7] = 100.0
    h = torch.ones(M, C, dtype=torch.bfloat16, requires_grad=True)
    head(h[None], torch.full((1, M), 3), WORDS).backward()
    assert torch.equal(h.grad, torch.full_like(h, 100.0))
    head.weight.data[0, 0] = float('nan')       # what is not finite stays so
    head(h[None], torch.full((1, M), 3), WORDS).backward()
    assert h.grad.isnan().any()
    assert head.weight.grad.isnan().any()


def test_a_model_with_it_is_near_one_without():
    """In chunks, too, but for a scale of h for each chunk, and other roundings to e5m2."""
    found = []
    for choice, chunks in ((EMULATE, 1), (with_head(EMULATE), 1), (with_head(EMULATE), 3)):
        model = build(choice, config=PADDED)[0]
        model.loss_chunks = chunks
        found.append(gradients(model, [t % 50 for t in tokens()]))
    without, whole, in_chunks = found
    assert 0.005 < relative(whole, without) < 0.12     # e5m2's 5% in dh, and what it sets off below
    assert 0 < relative(in_chunks, whole) < 0.08


def test_evaluation_and_logits_are_bf16s():
    plain, _, _ = build(fp8.OFF, config=PADDED)
    model, _, _ = build(with_head(), config=PADDED)
    x, y = (t % 50 for t in tokens())
    with fp8.paused(), torch.no_grad():
        assert torch.equal(model(x, y), plain(x, y))
        assert torch.equal(model(x), plain(x))
    assert model(x, y) != plain(x, y)


@pytest.mark.filterwarnings('ignore:calls whose tokens')
def test_tokens_in_no_multiple_of_16_are_bf16s():
    """As in every FP8 linear; in chunks, of the last one alone."""
    plain, model = (build(choice, config=PADDED)[0] for choice in (fp8.OFF, with_head()))
    batch = [t[:1, :17] % 50 for t in tokens()]
    assert torch.equal(gradients(model, batch), gradients(plain, batch))
    model.loss_chunks = 2
    assert 0 < relative(gradients(model, batch), gradients(plain, batch)) < 0.12


def test_a_penalty_is_not_lost_where_the_head_keeps_no_logits():
    """As one that a setting of another name asks for, which no choice of FP8 knows."""
    model, *_ = build(with_head(), config=PADDED)
    model.penalty = Penalty(0.3)
    model(*(t % 50 for t in tokens()))
    assert model.penalty.total > 0


def test_health_looks_at_what_the_head_casts_and_which_backends_have_one():
    choice = with_head(EMULATE, recipe='rowwise', format='e4m3')
    model, _, _ = build(choice)
    rows = cast_health(model, choice, lambda: model(*tokens()).backward())
    found = {row['tensor']: row for row in rows if row['layer'] == 'lm_head'}
    assert found.keys() == {'input', 'weight'}
    assert found['weight']['scale'] == pytest.approx(448 / model.lm_head.weight.abs().max().item())
    for choice, reason in ((NATIVE, 'the output head decides'), (with_head(lora_rank=8), 'it is frozen'),
                           (with_head(penalty_weight=0.1), 'keeps no logits, which penalty_weight needs'),
                           (with_head(Choice(backend='te')), 'te has no output head in FP8'),
                           (with_head(Choice(backend='torchao')), 'torchao has no output head in FP8')):
        assert reason in fp8.why_bf16(choice, 'lm_head', 128, 128)


def test_a_run_with_it_learns_and_resumes_bit_for_bit(one_run, tiny, tmp_path):
    words = 'train_fp8.py', '--fp8_backend=native', '--fp8_head'
    (bf16, _), (whole, out) = one_run('train.py'), one_run(*words)
    assert '9 of 9 linears, tensorwise (native)' in out
    assert losses(bf16) != losses(whole)
    assert losses(whole) == pytest.approx(losses(bf16), abs=0.05)
    run(*words, *tiny, f'--resume={whole}/step_000005.pt', f'--checkpoint_dir={tmp_path}')
    assert equal(tmp_path / 'latest.pt', whole / 'latest.pt')
