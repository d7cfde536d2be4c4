"""Muon against torch's, against its formula in fp64 by singular values, and in the training loop."""
import math

import pytest
import torch

from configurator import SettingError
from conftest import TINY, equal, in_ranks, losses
from fp8gpt import lora, optim
from helpers import random
from model import GPT, GPTConfig

SHAPE = dict(vocab_size=64, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, mlp='swiglu')


def muon(weight_decay=0.1, momentum_steps=300, **more):
    """Return a model and its Muon, whose momentum has warmed up."""
    model = GPT(GPTConfig(**{**SHAPE, **more}))
    optimizer = optim.make_optimizer(model, (0.9, 0.95), weight_decay, 'muon')
    optim.set_rate(optimizer, 0.01)
    for p, _ in optimizer.matrices:
        optimizer.state[p].update(step=torch.tensor(float(momentum_steps)), momentum=torch.zeros_like(p))
    return model, optimizer


def steps(model, optimizer, gradients):
    """Take a step of the optimizer for each function that returns a parameter's gradient."""
    for gradient in gradients:
        for name, p in model.weights().items():
            p.grad = gradient(name, p)
        optimizer.step()


def drawn(seed):
    return lambda name, p: random(*p.shape, seed=1000 * seed + len(name)).float()


def test_a_matrix_moves_as_by_torchs(monkeypatch):
    """torch rounds to bf16 in its iterations; here both compute in fp32."""
    monkeypatch.setattr(torch.Tensor, 'bfloat16', torch.Tensor.float)
    model, optimizer = muon()
    names = 'h.0.attn.proj.weight', 'h.1.mlp.down.weight', 'h.1.attn.proj.weight'
    theirs = {name: model.weights()[name].detach().clone() for name in names}
    reference = torch.optim.Muon(theirs.values(), lr=0.01, weight_decay=0.1, momentum=0.95,
                                 adjust_lr_fn='match_rms_adamw')
    for seed in range(3):
        steps(model, optimizer, [drawn(seed)])
        for name, p in theirs.items():
            p.grad = drawn(seed)(name, p)
        reference.step()
    for name, p in theirs.items():      # fifteen products of numbers near 1, each to fp32's 2^-24
        torch.testing.assert_close(model.weights()[name], p, rtol=0, atol=1e-5 * p.abs().max().item())


def test_queries_keys_and_values_are_orthogonalised_apart():
    """In fp64: five times the odd polynomial of the singular values of each linear's gradient."""
    model, optimizer = muon(weight_decay=0.0, mlp='gelu')
    rows = dict(zip(('q', 'k', 'v'), (32, 16, 16)))
    before = {name: p.detach().double() for name, p in model.weights().items()}
    steps(model, optimizer, [drawn(0)])
    for name, parts in (('h.0.attn.qkv.weight', [*rows.values()]), ('h.1.mlp.up.weight', [128])):
        p, moved = model.weights()[name], 0.0
        gradient = drawn(0)(name, p).double()
        for part, change in zip(gradient.split(parts), (before[name] - p.double()).split(parts)):
            part = part * (0.05 * 0.95 + 0.05)      # Nesterov's, of momentum 0.95 from zeros
            u, s, vt = torch.linalg.svd(part, full_matrices=False)
            s = s / s.square().sum().sqrt()
            for _ in range(5):
                s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
            wanted = 0.01 * 0.2 * math.sqrt(max(part.shape)) * (u * s) @ vt
            assert (change - wanted).norm() < 1e-4 * wanted.norm()      # before - after cancels 2 digits
            moved += change.norm().item()
        assert moved > 0


def test_the_other_parameters_move_as_by_adamw():
    model, optimizer = muon(tie_embeddings=False)
    theirs = {name: p.detach().clone() for name, p in model.weights().items() if not name.startswith('h.')}
    for seed in range(3):
        steps(model, optimizer, [drawn(seed)])
    for name, p in theirs.items():
        reference = torch.optim.AdamW([p], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
        for seed in range(3):
            p.grad = drawn(seed)(name, p)
            reference.step()
        torch.testing.assert_close(model.weights()[name], p, rtol=1e-5, atol=1e-6)


def test_each_parameter_has_one_way_to_move_and_bytes_of_moments():
    model, optimizer = muon()
    ours = {id(p) for group in optimizer.param_groups for p in group['params']}
    assert ours == {id(p) for p in model.weights().values()}
    assert sum(len(group['params']) for group in optimizer.param_groups) == len(ours)
    steps(model, optimizer, [drawn(0)])
    kept = optim.named_state(optimizer, model)
    held = sum(t.nbytes for state in kept.values() for key, t in state.items() if key != 'step')
    assert optim.moment_bytes(model, 'muon') == held


def test_flops_by_hand():
    """GPT-2's q, k, v and attn.proj are square, mlp.up and mlp.down four times as long as wide."""
    none = lora.Spec()
    assert optim.muon_flops(GPTConfig(), none) == 12 * 5 * 768**3 * (4 * (4 + 2) + 2 * (4 * 4 + 2))
    assert optim.muon_flops(GPTConfig(mlp='swiglu', ffn_dim=1536), none) == 12 * 5 * 768**3 * (4 * 6 + 3 * 10)


def test_adapters_move_alone_and_their_flops_are_told():
    config, spec = GPTConfig(**SHAPE, position='rope'), lora.Spec(rank=4, targets='all')
    model = GPT(config)
    lora.add(model, spec)
    optimizer = optim.make_optimizer(model, (0.9, 0.95), 0.0, 'muon')
    optim.set_rate(optimizer, 0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps(model, optimizer, [drawn(0)])
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == model.weights().keys() and all('.lora.' in name for name in moved)
    sizes = [sorted(p.shape) for p in model.weights().values()]
    assert optim.muon_flops(config, spec) == sum(5 * (4 * n * n * m + 2 * n**3) for n, m in sizes)


def test_bf16_weights_are_refused():
    with pytest.raises(SettingError, match='optimizer=muon takes whole fp32 weights'):
        optim.make_optimizer(GPT(GPTConfig(**SHAPE)).bfloat16(), (0.9, 0.95), 0.1, 'muon')


# ----------------------------------------------------------------------------------------------- in the loop

MUON = '--optimizer=muon', '--lr_schedule=wsd', '--decay_share=0.6'


@pytest.mark.slow
def test_ranks_resume_to_the_bit_and_one_goes_on_for_two(tiny_data, tmp_path):
    flags = [*TINY, *MUON, f'--dataset={tiny_data}', '--dtype=fp32', '--checkpoint_freq=5',
             '--eval_freq=5', '--keep_checkpoints=0']
    resume = [f'--resume={tmp_path}/whole/step_000005.pt']
    for name, ranks, more in (('whole', 2, []), ('again', 2, resume), ('one', 1, resume)):
        words = [*flags, f'--batch_size={4 // ranks}', *more, f'--checkpoint_dir={tmp_path}/{name}']
        in_ranks(ranks, 'train.py', *words)
    assert equal(tmp_path / 'again' / 'latest.pt', tmp_path / 'whole' / 'latest.pt')
    one, two = losses(tmp_path / 'one'), losses(tmp_path / 'whole')
    assert all(one[step] == pytest.approx(two[step], rel=1e-4) for step in one)     # sums in another order
