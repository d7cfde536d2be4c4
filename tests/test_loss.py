"""The loss's kernel against torch's cross-entropy, in an interpreter; in a compiled model; and compiled for
GPUs that are not there."""
import re

import pytest
import torch
import torch.nn.functional as F

import model
from fp8_models import gradients
from helpers import compiled, random, relative, with_noise
from model import GPT, GPTConfig
from triton_tools import code_for, interpreted, usage    # noqa: F401

pytestmark = pytest.mark.slow
CONFIG = GPTConfig(vocab_size=50, block_size=32, n_layer=1, n_head=2, n_embd=32)     # padded to 64


@pytest.fixture
def loss():
    """fp8gpt.loss, which imports Triton."""
    pytest.importorskip('triton')
    from fp8gpt import loss
    return loss


def random_inputs(M, V, width):
    """Logits (M, width), of which the columns from V on are padding, and targets (M,), every fourth -1."""
    targets = torch.randint(V, (M,), generator=torch.Generator().manual_seed(V))
    targets[::4] = -1
    return random(M, width) * 4, targets


def nats_and_shares(loss, logits, targets, V):
    """What the op gives, of copies."""
    nats, logits = torch.empty(len(logits)), logits.clone()
    loss.nats_in_place(logits, targets, nats, V)
    return nats, logits


@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('V, width', [(257, 320), (4095, 4096), (6000, 6016), (50_257, 50_304)])
def test_the_kernel_gives_the_cross_entropies_and_their_gradients(loss, V, width):
    """Against fp64. A share is rounded to bf16, by 2**-8 of it at most; in fp32, exp, sum and log are off by
    a few 2**-22, and a cross-entropy is of numbers below 128, each rounded by 2**-18 at most."""
    logits, targets = random_inputs(7, V, width)
    logits[1, targets[1]] = 60      # a sure row
    logits[2, V:] = 60              # what the padding holds is in no sum
    logits[3, :V] = -90
    logits[5, targets[5]] = -60     # a sure and wrong one
    exact = logits[:, :V].double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=-1, reduction='none')
    expected.sum().backward()
    nats, shares = nats_and_shares(loss, logits, targets, V)
    torch.testing.assert_close(nats.double(), expected.detach(), rtol=0, atol=3 * 2**-18)
    torch.testing.assert_close(shares[:, :V].double(), exact.grad, rtol=1.01 * 2**-8, atol=2**-20)
    assert (shares[:, V:] == 0).all()
    assert (shares[targets == -1] == 0).all()


@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')   # NumPy's, of infinities
def test_what_is_not_finite_stays_so(loss):
    """Nor is the cross-entropy of a target that is padding."""
    logits, targets = random_inputs(5, 257, 320)
    logits[1, 5], logits[2, 256], targets[3] = float('nan'), float('inf'), 300
    nats, shares = nats_and_shares(loss, logits, targets, 257)
    assert nats.isfinite().tolist() == [True, False, False, False, True]
    assert shares[1:3, :257].isnan().all()
    assert shares[3, 300] == -1


@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('chunks', [1, 2])
def test_a_compiled_model_takes_it(loss, monkeypatch, chunks):
    """Gradients are those of torch's form but for shares that lie between two numbers of bf16."""
    batch, found = torch.randint(50, (2, 2, 32), generator=torch.Generator().manual_seed(0)), []
    batch[1, 0, :9] = -1
    for takes in (False, True):
        monkeypatch.setattr(model, 'takes_kernel', lambda logits, takes=takes: takes)
        gpt = with_noise(GPT(CONFIG, loss_chunks=chunks))
        gradients(compiled(gpt, backend='aot_eager', fullgraph=True), [*batch])     # traces it
        with torch.profiler.profile() as profile:
            found.append(gradients(gpt, [*batch]))
        names = [event.name for event in profile.events()]
        assert names.count('fp8gpt::nats_in_place') == takes * chunks
    assert relative(*found) < 2**-8


@pytest.mark.usefixtures('interpreted')
def test_a_gpu_that_takes_no_kernel_keeps_torchs_form(loss, monkeypatch):
    def refuse(*inputs, **options):
        raise RuntimeError('Triton Error [CUDA]: invalid resource handle')
    assert loss.launches('cpu')
    monkeypatch.setattr(loss, 'loss_kernel', {(1,): refuse})
    assert not loss.launches('cpu')


@pytest.mark.parametrize('arch', [90, 100])
@pytest.mark.parametrize('V, width', [
    (257, 320), (32_000, 32_000), (49_152, 49_152), (50_257, 50_304), (51_200, 51_200)])
def test_the_kernel_compiles_without_spills(loss, monkeypatch, V, width, arch):
    """All in accesses of 16 bytes but a row's target, its logit, its share and its nats. A power is computed
    once. Nobody reads a logit, or writes a target's share, before or after the others' stores."""
    logits, targets = random_inputs(16, V, width)
    code = code_for(monkeypatch, arch, loss, 'loss_kernel',
                    lambda: nats_and_shares(loss, logits, targets, V))
    ptx, parts = code.asm['ptx'], -(-width // 4096)
    for kind, others in ('ld', ['b16', 'b64']), ('st', ['b16', 'b32']):
        widths = re.findall(rf'\b{kind}\.global\.(\S+)', ptx)
        assert widths.count('v4.b32') == parts
        assert sorted(w for w in widths if w != 'v4.b32') == others
    assert ptx.count('ex2.approx') == 8 * parts + 1
    order = 'ld.global.b16', 'bar.sync', 'st.global.v4'
    first, last = ptx.index(order[2]), ptx.rindex(order[2])
    assert ptx.index(order[0]) < ptx.rindex(order[1], 0, first)
    assert last < ptx.rindex(order[1]) < ptx.index('st.global.b16')
    assert 'mul.lo' not in ptx      # a row's place may pass 2**31
    assert usage(code, arch)[1] == 0
