"""What only a GPU with FP8 units can show. On the machine: python -m pytest tests/gpu"""
import pytest
import torch

import fp8
from conftest import losses, run
from fp8 import Choice, choose, linear_factory
from model import GPT, GPTConfig, Linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason='needs a CUDA GPU with FP8 units')
CUDA = torch.device('cuda')
CONFIG = GPTConfig(vocab_size=1000, block_size=256, n_layer=2, n_head=4, n_embd=256)


def needs_te(backend):
    if backend == 'te' and (problem := fp8._why_not_te(CUDA)):
        pytest.skip(problem)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def gradients(backend, compiled=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randint(0, 1000, (4, 257), device=CUDA)
    raw = GPT(CONFIG, linear_factory(Choice(backend, 'test'), Linear)).to(CUDA)
    model = torch.compile(raw, fullgraph=True) if compiled else raw
    loss = model(x[:, :-1], x[:, 1:], n_targets=1024)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten().float() for p in raw.weights().values()]), raw


@pytest.mark.parametrize('backend', ['native', 'te'])
def test_against_emulate_and_bf16(backend):
    needs_te(backend)
    reference, plain, (loss, gradient, model) = gradients('emulate'), gradients('off'), gradients(backend)
    assert abs(loss - plain[0]) < 0.02 and relative(gradient, reference[1]) < 0.05 and 1e-3 < relative(gradient, plain[1]) < 0.15
    assert model.state_dict().keys() == plain[2].state_dict().keys()
    with fp8.paused(), torch.no_grad():
        idx = torch.zeros((1, 64), dtype=torch.long, device=CUDA)
        assert torch.equal(model(idx), plain[2](idx))


def test_native_compiles_into_one_graph():
    eager, compiled = gradients('native'), gradients('native', compiled=True)
    assert abs(eager[0] - compiled[0]) < 0.01 and relative(compiled[1], eager[1]) < 0.05


def test_auto_prefers_native_when_compiling_and_te_when_not():
    assert choose(True, 'auto', CUDA, torch.bfloat16, 1024, compiling=True).backend == 'native'
    expected = 'native' if fp8._why_not_te(CUDA) else 'te'
    assert choose(True, 'auto', CUDA, torch.bfloat16, 1024, compiling=False).backend == expected


@pytest.mark.parametrize('backend', ['native', 'te'])
def test_the_script_trains(backend, tiny, tmp_path):
    needs_te(backend)
    done = run('train_fp8.py', *tiny, f'--fp8_backend={backend}', '--compile=off', f'--checkpoint_dir={tmp_path}/{backend}')
    assert f'8 of 9 linears, {backend}' in done.stdout
    run('train.py', *tiny, '--compile=off', f'--checkpoint_dir={tmp_path}/bf16')
    ours, plain = losses(tmp_path / backend), losses(tmp_path / 'bf16')
    assert ours != plain and all(abs(ours[s] - plain[s]) < 0.05 for s in plain)


def test_the_largest_batch_fits(tiny, tmp_path):
    done = run('train_fp8.py', *tiny, '--batch_size=0', '--max_batch_size=64', '--target_effective_batch_size=32', f'--checkpoint_dir={tmp_path}')
    assert 'batch     32 x 64 tokens x 1 micro-steps' in done.stdout
