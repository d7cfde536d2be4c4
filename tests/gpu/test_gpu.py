"""What only a GPU with FP8 units can show. On the machine: python -m pytest tests/gpu -n 4"""
import dataclasses
import gc
import itertools
import json
import math
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import data
import fp8
import linears
import measure
import plan
from conftest import losses, run
from fp8 import RECIPES, choose, linear_factory
from model import GPT, PRESETS, GPTConfig, Linear
from optim import make_optimizer
from quantize import FORMATS, casts, emulated_mm, linear_backward, linear_forward, scaled_mm

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason='needs a CUDA GPU with FP8 units')
DEVICE, CPU = torch.device('cuda'), torch.device('cpu')
CONFIG = GPTConfig(vocab_size=1000, block_size=256, n_layer=2, n_head=4, n_embd=256)  # dimensions of every recipe
BACKENDS = ('native', 'te', 'torchao')
CELLS = [*itertools.product(BACKENDS, RECIPES)]


def chosen(backend, recipe, format='auto'):
    """fp8.choose's Choice; where it refuses, the test is skipped with its reason."""
    try:
        return choose(True, backend, DEVICE, torch.bfloat16, 1024, recipe=recipe, format=format)
    except (ValueError, RuntimeError, ImportError) as refusal:
        pytest.skip(str(refusal))


def random(*shape, seed, device=CPU, **kwargs):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, **kwargs)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def tokens(sequences=4, seed=0):
    """x, y: (sequences, 256)."""
    idx = torch.randint(0, CONFIG.vocab_size, (sequences, 257), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return idx[:, :-1], idx[:, 1:]


def build(choice, checkpoint_every=0):
    model = GPT(CONFIG, linear_factory(choice, Linear), checkpoint_every=checkpoint_every).to(DEVICE)
    model.checkpoint = fp8.checkpointer(choice)
    return model, fp8.State(model, choice)


def passed(choice, checkpoint_every=0, compiled=False):
    """Loss, all gradients in one vector, model and State of a forward and backward pass on fixed tokens."""
    (model, state), (x, y) = build(choice, checkpoint_every), tokens()

    def both(network):
        model.zero_grad()
        loss = network(x, y, n_targets=1024.0)
        loss.backward()
        return loss.item()
    if state.needs_calibration:
        state.calibrate(lambda: both(model))
    if compiled:
        torch._dynamo.reset()
    loss = both(torch.compile(model, fullgraph=True) if compiled else model)
    return loss, torch.cat([p.grad.flatten().float() for p in model.weights().values()]), model, state


# ----------------------------------------------------------------------------------------------- the numbers

def test_native_runs_what_this_gpu_has():
    capability = torch.cuda.get_device_capability()
    absent = {recipe for recipe, there in (('blockwise', capability == (9, 0)), ('mxfp8', capability >= (10, 0))) if not there}
    refused = {}
    for recipe in RECIPES:
        try:
            choose(True, 'native', DEVICE, torch.bfloat16, 1024, recipe=recipe)
        except RuntimeError as refusal:
            refused[recipe] = str(refusal)
    assert refused.keys() == absent, refused


@pytest.mark.parametrize('recipe, fmt', [*itertools.product(RECIPES, FORMATS)])
def test_natives_operands_are_emulates_bit_for_bit(recipe, fmt, monkeypatch):
    chosen('native', recipe, fmt)
    M, K, N = 256, 384, 512
    kit, real, block_scaled = casts(recipe, fmt), torch._scaled_mm_v2, []
    monkeypatch.setattr(torch, '_scaled_mm_v2', lambda *rest: block_scaled.append(rest) or real(*rest))

    def linear(mm, device):
        """y, dx, dw, and what was multiplied."""
        seen = []

        def spy(a, b, *rest, **kwargs):
            seen.extend([a, b])
            return mm(a, b, *rest, **kwargs)
        x, dy = (random(M, n, seed=n, device=device, dtype=torch.bfloat16) for n in (K, N))
        y, *saved = linear_forward(x, random(N, K, seed=2, device=device), kit, spy)
        return (y, *linear_backward(dy, *saved, kit, spy, torch.float32)), seen
    results, operands = linear(scaled_mm, DEVICE)
    assert len(block_scaled) == (3 if recipe in ('blockwise', 'mxfp8') else 0)
    for device in (DEVICE, CPU):
        expected, expected_operands = linear(emulated_mm, device)
        assert len(operands) == len(expected_operands) == (6 if kit.xt else 4)
        for a, b in zip(operands, expected_operands):
            assert torch.equal(a.values.view(torch.uint8).cpu(), b.values.view(torch.uint8).cpu()) and torch.equal(a.inverse.cpu(), b.inverse.cpu())
        # the forward product is summed with fewer bits, and both are rounded to bf16
        assert all(relative(a, b.to(a.device)) < 5e-3 for a, b in zip(results, expected))


def one_linear(choice):
    """y, dx, dw of a linear with bias."""
    layer = linear_factory(choice, Linear)(256, 512, bias=True, name='up').to(DEVICE)
    state, x, dy = fp8.State(layer, choice), *(random(1024, n, seed=n, device=DEVICE, dtype=torch.bfloat16) for n in (256, 512))
    with torch.no_grad():
        layer.weight.copy_(random(512, 256, seed=1) / 16)
        layer.bias.copy_(random(512, seed=2))
    x.requires_grad_()
    state.calibrate(lambda: layer(x).backward(dy))
    layer.weight.grad = x.grad = None
    y = layer(x)
    y.backward(dy)
    return y, x.grad, layer.weight.grad


@pytest.mark.parametrize('backend, recipe', CELLS)
def test_a_linear_against_emulate_and_bf16(backend, recipe):
    choice = chosen(backend, recipe)
    emulate = dataclasses.replace(choice, backend='emulate')
    for found, emulated, plain in zip(*map(one_linear, (choice, emulate, fp8.OFF))):
        noise = relative(emulated, plain)  # FP8's own: a few percent; of a wgrad in bf16, its rounding alone
        assert noise < 0.08 and found.dtype == plain.dtype
        assert relative(found, plain) > noise / 2 or noise < 0.01, 'this was not FP8'
        # te and torchao round weights to bf16 before they cast them
        assert relative(found, emulated) < max(5e-3, (0.2 if backend == 'native' else 0.7) * noise)


@pytest.mark.parametrize('backend, recipe', CELLS)
def test_a_models_gradients_are_as_noisy_as_emulates(backend, recipe):
    choice = chosen(backend, recipe)
    loss, gradients, model, _ = passed(choice)
    emulated, plain = passed(dataclasses.replace(choice, backend='emulate')), passed(fp8.OFF)
    noise = relative(emulated[1], plain[1])
    assert abs(loss - emulated[0]) < 0.01 and 0.7 < relative(gradients, plain[1]) / noise < 1.3
    assert relative(gradients, emulated[1]) < 1.3 * noise  # one value that rounds otherwise changes the rounding of all behind it
    assert model.state_dict().keys() == plain[2].state_dict().keys() and len(fp8.fp8_linears(model)) == 8
    with fp8.paused(), torch.no_grad():
        assert torch.equal(model(tokens()[0]), plain[2](tokens()[0]))


@pytest.mark.parametrize('backend, recipe', [*itertools.product(BACKENDS, ('tensorwise', 'delayed', 'blockwise'))])
def test_recomputation_changes_nothing(backend, recipe):
    choice = chosen(backend, recipe)
    with sdpa_kernel(SDPBackend.MATH):  # deterministic
        (loss, gradients, *_), again = passed(choice), passed(choice, checkpoint_every=1)
    assert again[0] == pytest.approx(loss, abs=1e-4) and relative(again[1], gradients) < 0.01


@pytest.mark.parametrize('checkpoint_every', [0, 1])
@pytest.mark.parametrize('recipe', RECIPES)
def test_native_compiles_into_one_graph(recipe, checkpoint_every):
    if checkpoint_every and recipe not in ('tensorwise', 'delayed'):
        pytest.skip('two recipes stand for all')
    choice = chosen('native', recipe)
    eager, compiled, plain = passed(choice), passed(choice, checkpoint_every, compiled=True), passed(fp8.OFF)
    noise = relative(eager[1], plain[1])
    assert abs(eager[0] - compiled[0]) < 0.01 and relative(compiled[1], eager[1]) < 1.3 * noise
    assert 0.7 < relative(compiled[1], plain[1]) / noise < 1.3
    assert all(module.amax.all() for module in compiled[3].layers.values())  # delayed scaling sees its amaxes


def test_auto_prefers_native_when_compiling_and_te_when_not():
    assert choose(True, 'auto', DEVICE, torch.bfloat16, 1024, compiling=True).backend == 'native'
    expected = 'native' if fp8._why_not_te('tensorwise', 'hybrid', 0, DEVICE) else 'te'
    assert choose(True, 'auto', DEVICE, torch.bfloat16, 1024, compiling=False).backend == expected


def accumulated(choice, caches):
    """Losses of all micro-steps of four steps of AdamW, four micro-steps each, on the same tokens."""
    model, state = build(choice)
    assert state.caches or not caches
    state.caches, optimizer, found = caches, make_optimizer(model, (0.9, 0.95), 0.0), []
    for group in optimizer.param_groups:
        group['lr'] = 3e-3
    x, y = tokens()
    for _ in range(4):
        for number in range(4):
            state.micro_step(number, 4)
            loss = model(x[number:number + 1], y[number:number + 1], n_targets=1024.0)
            loss.backward()
            found.append(4 * loss.item())
        optimizer.step()
        state.after_step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize('recipe', ['tensorwise', 'blockwise'])
def test_te_casts_weights_once_a_step(recipe):
    choice = chosen('te', recipe)
    assert linears.te_cache_refreshes(choice, DEVICE)
    with sdpa_kernel(SDPBackend.MATH):  # deterministic
        cached, anew = accumulated(choice, True), accumulated(choice, False)
    assert cached[0] - cached[-1] > 0.5 and cached == pytest.approx(anew, abs=0.02)


# ----------------------------------------------------------------------------------------- memory and speed

@pytest.mark.parametrize('compiled', [False, True], ids=['eager', 'compiled'])
@pytest.mark.parametrize('precision', ['bf16', 'fp8'])
def test_the_planned_memory_is_the_measured_peak(precision, compiled):
    config, sequences = dataclasses.replace(PRESETS['gpt2'], n_layer=6), 16
    torch._dynamo.reset()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = GPT(config, linear_factory(fp8.OFF if precision == 'bf16' else chosen('native', 'tensorwise'), Linear)).to(DEVICE)
    network, optimizer = torch.compile(model) if compiled else model, make_optimizer(model, (0.9, 0.95), 0.1)
    x, y = torch.randint(0, config.vocab_size, (2, sequences, config.block_size), device=DEVICE)
    for _ in range(2):  # the second starts with gradients and moments, all that the plan counts
        torch.cuda.reset_peak_memory_stats()
        network(x, y).backward()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert sum(plan.plan(config, {}, sequences, compiled=compiled).memory[precision].values()) == pytest.approx(peak, rel=0.1)


def test_speedup_is_a_number_and_leaves_no_trace():
    (model, state), (x, y) = build(chosen('native', 'delayed')), tokens()

    def both():
        model(x, y).backward()
        model.zero_grad()
    state.calibrate(both)
    scales = [module.reach.clone() for module in state.layers.values()]
    assert 0 < measure.speedup(both, both, state) < math.inf
    assert all(torch.equal(module.reach, scale) and not module.amax.any() for module, scale in zip(state.layers.values(), scales))


# ------------------------------------------------------------------------------------------------ the scripts

@pytest.fixture(scope='module')
def bf16_losses(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp('bf16')
    run('train.py', *tiny, '--gradient_accumulation_steps=2', '--compile=off', f'--checkpoint_dir={folder}')
    return losses(folder)


@pytest.mark.parametrize('backend, recipe', [('native', 'tensorwise'), ('te', 'tensorwise'), ('te', 'delayed'), ('torchao', 'rowwise')])
def test_the_script_trains_near_bf16(backend, recipe, tiny, bf16_losses, tmp_path):
    chosen(backend, recipe)
    done = run('train_fp8.py', *tiny, '--gradient_accumulation_steps=2', '--compile=off', f'--fp8_backend={backend}', f'--fp8_recipe={recipe}',
               f'--checkpoint_dir={tmp_path}')
    assert f'8 of 9 linears, {backend}' in done.stdout and 'does not refresh' not in done.stdout
    assert re.search(r'^precision FP8 \| .* \| fp8 x\d+\.\d\d vs bf16 \(measured\)$', done.stdout, re.MULTILINE), done.stdout
    ours = losses(tmp_path)
    assert ours != bf16_losses and all(abs(ours[step] - bf16_losses[step]) < 0.05 for step in bf16_losses)


def test_the_largest_batch_fits_and_blocks_are_recomputed_under_compile(tiny, tmp_path):
    done = run('train_fp8.py', *tiny, '--batch_size=0', '--max_batch_size=64', '--target_effective_batch_size=32', '--grad_checkpointing=full',
               f'--checkpoint_dir={tmp_path}')
    assert 'batch     32 x 64 tokens x 1 micro-steps' in done.stdout and '8 of 9 linears, native (auto: torch.compile' in done.stdout
    assert losses(tmp_path)[10] < losses(tmp_path)[1] - 0.5


def test_auto_keep_measures_once(tiny, tmp_path):
    words = ['train_fp8.py', *tiny, '--max_steps=2', '--fp8_backend=native', '--compile=off', '--fp8_keep=auto', '--overwrite',
             f'--checkpoint_dir={tmp_path}/run']
    first = run(*words, env={'XDG_CACHE_HOME': str(tmp_path)}).stdout
    assert re.search(r'^fp8_keep=auto: a block takes [\d.]+ ms in bf16, [\d.]+ ms in fp8, [\d.]+ ms without attn\.qkv', first, re.MULTILINE), first
    known = json.loads((tmp_path / 'fp8_keep.json').read_text())
    known = {key: {**value, 'keep': ['mlp.up'], 'gains': True} for key, value in known.items()}
    (tmp_path / 'fp8_keep.json').write_text(json.dumps(known))
    second = run(*words, env={'XDG_CACHE_HOME': str(tmp_path)}).stdout
    assert len(known) == 1 and '6 of 9 linears' in second and 'h.0.mlp.up, h.1.mlp.up: kept by fp8_keep' in second


@pytest.mark.parametrize('num_workers', [0, 1])
def test_tokens_arrive_as_they_are_stored(num_workers, tiny_data):
    train = data.TokenData(tiny_data, 'train', 64)
    assert train.shards[0].dtype == 'uint16'
    here, there = (data.Loader(train, 4, seed=0, device=device, num_workers=num_workers) for device in (CPU, DEVICE))
    for _ in range(3):
        for a, b in zip(here.next(), there.next()):
            assert b.device.type == DEVICE.type and b.dtype == torch.int64 and torch.equal(a, b.cpu())
