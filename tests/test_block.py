"""Blocks by kernels of their own against the plain block: the same numbers, fewer passes over memory."""
import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fp8
import measure
from conftest import losses, run
from fp8_models import NATIVE, WIDE, build, gradients, on_a_cpu, tokens
from helpers import relative
from fp8_kernels.block import FusedBlock
from model import GPT, Compiled, generate
from optim import set_rate

LLAMA = dict(mlp='swiglu', norm='rmsnorm', position='rope', bias=False, ffn_dim=256)
CONFIGS = [
    pytest.param(WIDE, id='gpt2'),
    pytest.param(dataclasses.replace(WIDE, **LLAMA), id='llama'),
    pytest.param(dataclasses.replace(WIDE, n_kv_head=1, bias=False), id='shared heads'),
    pytest.param(dataclasses.replace(WIDE, **LLAMA, qkv_bias=True), id='qwen2'),
    pytest.param(dataclasses.replace(WIDE, **LLAMA, qk_norm=True, head_dim=128), id='qwen3'),
]
RECIPES = pytest.mark.parametrize('recipe', ['tensorwise', 'delayed'])


def pair(recipe, config=WIDE, **options):
    """The plain and the fused model, each with State and optimizer, calibrated; biases are not zero."""
    both = []
    for kernels in ('inductor', 'triton'):
        choice = dataclasses.replace(NATIVE, recipe=recipe, kernels=kernels)
        model, state, optimizer = build(choice, config=config, **options)
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            if p.dim() < 2:
                p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
        if state.needs_calibration:
            state.calibrate(lambda model=model: gradients(model))
        both.append((model, state, optimizer))
    return both


@RECIPES
@pytest.mark.parametrize('checkpoint_every', [0, 1])
@pytest.mark.parametrize('config', CONFIGS)
def test_numbers_are_the_plain_blocks(config, checkpoint_every, recipe):
    (plain, state, _), (fused, fused_state, _) = pair(recipe, config, checkpoint_every=checkpoint_every)
    assert all(isinstance(block, FusedBlock) for block in fused.h)
    assert relative(gradients(fused), gradients(plain)) < 1e-5
    assert torch.equal(fused(*tokens()), plain(*tokens()))
    for layer, expected in zip(fused_state.layers.values(), state.layers.values()):
        assert torch.equal(layer.amax, expected.amax)


@RECIPES
def test_a_changed_weight_is_cast_anew(recipe):
    """Also after a fused optimizer's step, which no version of a tensor counts."""
    plain, fused = both = pair(recipe)
    for _ in range(3):
        for model, state, optimizer in both:
            for number in range(2):
                state.micro_step(number, 2)
                model(*tokens(), n_targets=256).backward()
            set_rate(optimizer, 1e-3)
            optimizer.step()
            state.after_step()
            optimizer.zero_grad()
        assert relative(gradients(fused[0]), gradients(plain[0])) < 1e-2
        for model, state, _ in both:
            state.forget()
            model.zero_grad()
    halves = {name: p.detach() / 2 for name, p in plain[0].weights().items()}
    for model, _, _ in both:
        model.load_weights(halves)
    assert relative(gradients(fused[0]), gradients(plain[0])) < 1e-2


def test_every_state_of_a_model_has_its_weights_cast_anew():
    _, (model, first, optimizer) = pair('tensorwise')
    second = fp8.State(model, first.choice)
    before = gradients(model)
    set_rate(optimizer, 1e-2)
    optimizer.step()    # which no version of a tensor counts
    second.after_step()
    plain, _, _ = build(dataclasses.replace(first.choice, kernels='inductor'))
    plain.load_weights(model.weights())
    assert relative(gradients(model), gradients(plain)) < 1e-2
    assert relative(gradients(model), before) > 0.01


@RECIPES
def test_two_graphs_of_blocks_whatever_the_depth(recipe):
    """The first, which has nothing to add up, and the others; with embedding and loss four, none broken."""
    (_, _, _), (fused, _, _) = pair(recipe, dataclasses.replace(WIDE, n_layer=4))
    eager = gradients(fused)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend('aot_eager')
    compiled = Compiled(fused, backend=counter, fullgraph=True)
    fused.zero_grad()
    for _ in range(2):
        fused.zero_grad()
        compiled(*tokens(), n_targets=128).backward()
    assert relative(torch.cat([p.grad.flatten() for p in fused.weights().values()]), eager) < 1e-2
    assert counter.frame_count == 4


def test_examples_keep_apart_as_in_plain_blocks():
    (plain, _, _), (fused, _, _) = pair('tensorwise')
    (x, y), examples = tokens(), (torch.arange(64) // 24).expand(2, 64)
    losses = [model(x, y, examples=examples) for model in (plain, fused)]
    assert relative(losses[1], losses[0]) < 1e-5
    assert relative(losses[0], plain(x, y)) > 1e-4
    assert all(isinstance(block, FusedBlock) for block in fused.h)


def test_paused_is_bf16_and_who_looks_at_linears_finds_them():
    (plain, _, _), (fused, state, _) = pair('delayed')
    bf16 = GPT(WIDE)
    bf16.load_weights(fused.weights())
    with fp8.paused(), torch.no_grad():
        assert torch.equal(fused(*tokens()), bf16(*tokens()))
        assert list(generate(fused, tokens()[0], 3, temperature=0))
    rows = [measure.health(model, state.choice, lambda model=model: model(*tokens()).backward())
            for model in (fused, plain)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 3 * 4 * WIDE.n_layer


def test_what_cannot_be_fused_is_refused():
    why = 'fp8_kernels=triton is native\'s, for one scale a tensor'
    for options in (dict(format='e5m2'), dict(backend='emulate')):
        with pytest.raises(fp8.SettingError, match=why):
            on_a_cpu(**{'backend': 'native', **options}, kernels='triton')
    with pytest.raises(fp8.SettingError, match=why):
        fp8.check_kernels(dataclasses.replace(NATIVE, recipe='rowwise', kernels='triton'), 'native')
    with pytest.raises(fp8.SettingError, match="fp8_kernels is one of auto, inductor, triton, not 'cuda'"):
        on_a_cpu('native', kernels='cuda')


@pytest.mark.parametrize('kept', [0, 1, 2])
def test_a_block_with_a_linear_in_bf16_stays_plain(kept):
    choice = dataclasses.replace(NATIVE, kernels='triton', keep=(f'h.{kept}.mlp.down',))
    config = dataclasses.replace(WIDE, n_layer=3)
    model, _, _ = build(choice, config=config)
    assert [isinstance(block, FusedBlock) for block in model.h] == [i != kept for i in range(3)]
    plain, _, _ = build(dataclasses.replace(choice, kernels='inductor'), config=config)
    assert relative(gradients(model), gradients(plain)) < 1e-5


def test_without_triton_there_are_torchs_forms():
    code = "import sys; sys.modules['triton'] = None; import fp8_kernels.block; print('there')"
    assert run('-c', code, fork=False).stdout == 'there\n'


@RECIPES
def test_trains_through_the_script(recipe, tiny, tmp_path):
    words = ['train_fp8.py', *tiny, '--fp8_backend=native', f'--fp8_recipe={recipe}', '--fp8_stats_freq=5']
    for kernels in ('inductor', 'triton'):
        own = [f'--fp8_kernels={kernels}', f'--checkpoint_dir={tmp_path / kernels}']
        out = run(*words, *own, '--verbose').stdout
        assert ('kernels of its own' in out) == (kernels == 'triton')
    plain, fused = losses(tmp_path / 'inductor'), losses(tmp_path / 'triton')
    assert len(fused) == 10
    assert fused == pytest.approx(plain, abs=2e-3)
