"""What only a GPU with FP8 units can show, the most wanted first: python -m pytest tests/gpu -n 4"""
import dataclasses
import gc
import itertools
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8gpt import data, fp8
import plan
from fp8gpt.fp8 import health
from fp8gpt.fp8.backends import native_mm
from conftest import losses, run
from fp8gpt.fp8 import Options, Place, choose, linear_factory
from fp8gpt.fp8.linear import (
    FORMATS, RECIPES, Arithmetic, emulated_mm, quantizers)
from fp8gpt.gpus import gpu_of
from helpers import compiled, opened, products, random, relative, same_bits, spied
from fp8gpt.fp8.kernels import casts, norms
from model import GPT, PRESETS, GPTConfig, Linear, generate
from fp8gpt.optim import make_optimizer
from test_casts import SMALL, inputs_of
from test_norms import random_inputs

HAS_UNITS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    not HAS_UNITS and not os.environ.get('QUICK'), reason='needs a CUDA GPU with FP8 units')]
# QUICK=1, the rehearsal, runs on a CPU what a CPU can run
needs_gpu = pytest.mark.skipif(not HAS_UNITS, reason='needs a CUDA GPU with FP8 units')
DEVICE, CPU = torch.device('cuda' if HAS_UNITS else 'cpu'), torch.device('cpu')
HERE = Place(DEVICE, tokens=1024)
# dimensions of every recipe
CONFIG = GPTConfig(vocab_size=1000, block_size=256, n_layer=2, n_head=4, n_embd=256)
NAMES = ('native', 'te', 'torchao')
CELLS = [*itertools.product(NAMES, RECIPES)]


def chosen(backend, recipe, format='auto'):
    """fp8.choose's Choice; where it refuses, the test is skipped with its reason."""
    try:
        return choose(Options(backend=backend, recipe=recipe, format=format), HERE)
    except (fp8.OptionError, fp8.DeviceError) as refusal:
        pytest.skip(str(refusal))


def tokens(sequences=4, seed=0):
    """x, y: (sequences, 256)."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, CONFIG.vocab_size, (sequences, 257), generator=generator).to(DEVICE)
    return idx[:, :-1], idx[:, 1:]


def passed(choice, checkpoint_every=0, compiling=False):
    """Loss, all gradients in one vector, model and State of a forward and backward pass on fixed tokens."""
    factory, (x, y) = linear_factory(choice, Linear), tokens()
    model = GPT(CONFIG, factory, checkpoint_every=checkpoint_every, checkpoint=fp8.checkpointer(choice))
    state = fp8.State(model.to(DEVICE), choice)

    def both(network):
        model.zero_grad()
        loss = network(x, y, n_targets=1024.0)
        loss.backward()
        return loss.item()
    if state.needs_calibration:
        state.calibrate(lambda: both(model))
    if compiling:
        compiled(model, fullgraph=True)
    loss = both(model)
    gradients = torch.cat([p.grad.flatten().float() for p in model.weights().values()])
    return loss, gradients, model, state


# ----------------------------------------------------------------------------------------------- the numbers

@pytest.mark.parametrize('how', [*casts.VALUES, 'fp32 weight'])
def test_the_casts_kernels_give_what_torch_gives(how):
    if how in casts.VALUES:
        inputs = [x.to(DEVICE) for x in inputs_of(how, 1024, 1600)]
    else:
        how, inputs = 'plain', [random(1024, 1600, dtype=torch.float32).to(DEVICE)]
    scale = torch.tensor(30.0, device=DEVICE)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        data, data_t, partials, sums = casts.cast(inputs, how, scale, dtype, True)
        expected, _, peak, expected_sums = casts.cast_in_torch(inputs, how, scale, dtype, True)
        value = torch.cat(list(casts.VALUES[how](*inputs)), 1)
        differ = data.view(torch.uint8) != expected.view(torch.uint8)
        assert (differ & (value.abs() >= SMALL)).float().mean() < 1e-3   # torch's tails are cancelled
        assert relative(data.float(), expected.float()) < 1e-3
        assert same_bits(data_t, data.t().contiguous())
        assert partials.amax() == peak
        assert relative(sums.sum(0), expected_sums.sum(0)) < 1e-3
        for _ in range(20):  # a miscompiled store was wrong one time in four
            again = casts.cast(inputs, how, scale, dtype, True)
            assert same_bits(again[0], data)
            assert same_bits(again[1], data_t)


@pytest.mark.parametrize('C, rms', [(768, False), (1600, False), (2048, True)])
def test_the_norms_kernel_gives_what_torch_gives(C, rms):
    inputs = [x if x is None else x.to(DEVICE) for x in random_inputs(4096, C, rms)]
    (dx, sums), (expected, expected_sums) = norms.norm_backward(*inputs), norms.in_torch(*inputs)
    assert relative(dx.float(), expected.float()) < 1e-3
    assert relative(sums.sum(1), expected_sums.sum(1)) < 1e-4


@needs_gpu
@pytest.mark.parametrize('M, V, width', [(4096, 257, 320), (4096, 32_000, 32_000), (44_000, 50_257, 50_304)])
def test_the_losss_kernel_gives_what_torch_gives(M, V, width):
    """The last case has more logits than 2**31. Each run takes other threads' stores in another order."""
    from fp8gpt.loss import nats_in_place
    logits = torch.randn(M, width, device=DEVICE, dtype=torch.bfloat16) * 4
    targets = torch.randint(-1, V, (M,), device=DEVICE)
    few = logits[-64:, :V].double().requires_grad_()
    expected = F.cross_entropy(few, targets[-64:], ignore_index=-1, reduction='none')
    expected.sum().backward()
    for _ in range(20):
        shares, nats = logits.clone(), torch.empty(M, device=DEVICE)
        nats_in_place(shares, targets, nats, V)
        torch.testing.assert_close(nats[-64:].double(), expected.detach(), rtol=0, atol=2**-16)
        torch.testing.assert_close(shares[-64:, :V].double(), few.grad, rtol=1.01 * 2**-8, atol=2**-20)
        assert not shares[:, V:].any()


@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=needs_gpu)])
@pytest.mark.parametrize('recipe', ['tensorwise', 'delayed'])
def test_fused_blocks_give_what_plain_ones_give(recipe, compiled):
    plain = chosen('native', recipe)
    fused = dataclasses.replace(plain, kernels='triton')
    (loss, gradients, _, _), (expected, of_plain, _, _) = passed(fused, compiling=compiled), passed(plain)
    exact = passed(fp8.OFF)[1]
    noise = relative(of_plain, exact)
    assert abs(loss - expected) < 0.01
    # half a bf16 ulp of an amax changes the rounding of all values after it
    assert relative(gradients, of_plain) < 1.3 * noise
    assert 0.7 < relative(gradients, exact) / noise < 1.3


@needs_gpu
def test_native_runs_what_this_gpu_has():
    capability = torch.cuda.get_device_capability()
    absent = set()
    if capability != (9, 0):
        absent.add('blockwise')
    if capability < (10, 0):
        absent.add('mxfp8')
    may_be_absent = {'rowwise', 'rowwise_gw_hp', 'mxfp8'} if capability[0] == 12 else set()
    refused = {}
    for recipe in RECIPES:
        try:
            choose(Options(backend='native', recipe=recipe), HERE)
        except fp8.DeviceError as refusal:
            refused[recipe] = str(refusal)
    assert refused.keys() - may_be_absent == absent, refused


@pytest.mark.parametrize('recipe, format', [*itertools.product(RECIPES, FORMATS)])
def test_natives_operands_are_emulates_bit_for_bit(recipe, format, monkeypatch):
    chosen('native', recipe, format)
    q, real, block_scaled = quantizers(recipe, format), torch._scaled_mm_v2, []
    monkeypatch.setattr(torch, '_scaled_mm_v2', lambda *a, **k: block_scaled.append(1) or real(*a, **k))
    x, weight, dy = random(256, 384), random(512, 384, seed=2, dtype=torch.float32), random(256, 512, seed=3)

    def linear(mm, device):
        """(y, dx, dw), and what was multiplied."""
        spy, multiplied = spied(mm)
        inputs = [tensor.to(device) for tensor in (x, weight, dy)]
        return products(*inputs, Arithmetic(q, spy)), multiplied

    results, operands = linear(native_mm, DEVICE)
    on_a_gpu = operands[0].data.is_cuda     # a CPU multiplies as emulate does
    assert len(block_scaled) == (3 if on_a_gpu and recipe in ('blockwise', 'mxfp8') else 0)
    for device in (DEVICE, CPU):
        expected, expected_operands = linear(emulated_mm, device)
        for a, b in zip(operands, expected_operands, strict=True):
            assert same_bits(a.data.cpu(), b.data.cpu())
            assert torch.equal(a.scale_inv.cpu(), b.scale_inv.cpu())
        for a, b in zip(results, expected):
            # y and dx are summed with fewer bits, and both sides are rounded to bf16
            assert relative(a, b.to(a.device)) < 5e-3


@pytest.mark.parametrize('backend, recipe', CELLS)
def test_a_models_gradients_are_as_noisy_as_emulates(backend, recipe):
    choice = chosen(backend, recipe)
    loss, gradients, model, _ = passed(choice)
    emulated_loss, emulated, *_ = passed(dataclasses.replace(choice, backend='emulate'))
    _, plain, plain_model, _ = passed(fp8.OFF)
    noise = relative(emulated, plain)
    assert abs(loss - emulated_loss) < 0.01
    assert 0.7 < relative(gradients, plain) / noise < 1.3
    # one value that rounds otherwise changes the rounding of all behind it
    assert relative(gradients, emulated) < 1.3 * noise
    with fp8.paused(), torch.no_grad():
        assert torch.equal(model(tokens()[0]), plain_model(tokens()[0]))


@pytest.mark.parametrize('backend, recipe', [('te', 'tensorwise'), ('te', 'delayed'), ('native', 'delayed')])
def test_recomputation_changes_nothing(backend, recipe):
    choice = chosen(backend, recipe)
    with sdpa_kernel(SDPBackend.MATH):  # deterministic
        (loss, gradients, *_), again = passed(choice), passed(choice, checkpoint_every=1)
    assert again[0] == pytest.approx(loss, abs=1e-4)
    assert relative(again[1], gradients) < 0.01


@needs_gpu
@pytest.mark.parametrize('recipe', RECIPES)
def test_native_compiles_into_one_graph(recipe):
    choice = chosen('native', recipe)
    eager_loss, eager, *_ = passed(choice)
    plain = passed(fp8.OFF)[1]
    noise = relative(eager, plain)
    for checkpoint_every in (0, 1):
        loss, compiled, _, state = passed(choice, checkpoint_every, compiling=True)
        assert abs(eager_loss - loss) < 0.01
        assert relative(compiled, eager) < 1.3 * noise
        assert 0.7 < relative(compiled, plain) / noise < 1.3
        assert all(module.amax.all() for module in state.layers.values())  # delayed scaling sees its amaxes


# ------------------------------------------------------------------------------------------ memory and speed

@needs_gpu
@pytest.mark.parametrize('precision', ['bf16', 'fp8'])
def test_the_planned_memory_is_the_measured_peak(precision):
    words = ['--init_from=gpt2', '--n_layer=6', '--batch_size=16', '--max_steps=2']
    run, on_meta = plan.settled(plan.plan_arguments(words).config)
    choice = fp8.OFF if precision == 'bf16' else chosen('native', 'tensorwise')
    planned = sum(plan.memory(run, on_meta, gpus=1, in_fp8=choice.on).values())
    config, sequences = run.window_config, 16
    torch._dynamo.reset()
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = GPT(config, linear_factory(choice, Linear)).to(DEVICE)
    model.compile()
    optimizer = make_optimizer(model, (0.9, 0.95), 0.1)
    x, y = torch.randint(0, config.vocab_size, (2, sequences, config.block_size), device=DEVICE)
    for _ in range(2):  # the second starts with gradients and moments, all that the plan counts
        torch.cuda.reset_peak_memory_stats()
        model(x, y).backward()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    assert planned == pytest.approx(peak, rel=0.1)


@needs_gpu
def test_the_tables_memory_is_this_gpus():
    gpu = gpu_of(DEVICE)
    if not gpu:
        pytest.skip('it is not in the table')
    here = torch.cuda.get_device_properties(DEVICE).total_memory / 1e9
    assert 0 <= gpu.memory - here < plan.MARGIN


@needs_gpu
def test_sampling_attends_by_flash_and_not_by_cudnn():
    model = GPT(CONFIG).to(DEVICE)
    idx = torch.zeros((1, 1), dtype=torch.long, device=DEVICE)
    list(generate(model, idx, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        list(generate(model, idx, 8))
    kernels = [event.key.lower() for event in profile.key_averages()]
    assert any('flash' in name for name in kernels)
    assert not any('cudnn' in name for name in kernels)


@needs_gpu
def test_flex_attention_keeps_examples_apart_as_a_dense_mask_does():
    model, (x, y) = GPT(CONFIG).to(DEVICE), tokens()
    examples = (torch.arange(x.shape[1], device=DEVICE) // 24).expand(x.shape)
    gradients = []
    for each in (lambda model: model, compiled):
        model.zero_grad()
        each(model)(x, y, examples=examples).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert relative(gradients[1], gradients[0]) < 0.02


# ----------------------------------------------------------------------------------------------- the scripts

@pytest.fixture(scope='module')
def bf16_losses(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp('bf16')
    words = ['--gradient_accumulation_steps=2', '--compile=off', f'--checkpoint_dir={folder}']
    run('train.py', *tiny, *words)
    return losses(folder)


@needs_gpu
@pytest.mark.parametrize('backend, recipe', [
    ('native', 'tensorwise'),
    ('te', 'tensorwise'),
    ('te', 'delayed'),
    ('torchao', 'rowwise'),
])
def test_the_script_trains_near_bf16(backend, recipe, tiny, bf16_losses, tmp_path):
    chosen(backend, recipe)
    words = ['--gradient_accumulation_steps=2', '--compile=off', f'--checkpoint_dir={tmp_path}']
    done = run('train_fp8.py', *tiny, *words, f'--fp8_backend={backend}', f'--fp8_recipe={recipe}')
    assert f'8 of 9 linears, {recipe} ({backend})' in done.stdout
    measured = r'^speed     FP8 x\d+\.\d\d over bf16, measured here on a few blocks$'
    assert re.search(measured, done.stdout, re.MULTILINE), done.stdout
    ours = losses(tmp_path)
    assert ours != bf16_losses
    for step, loss in bf16_losses.items():
        assert abs(ours[step] - loss) < 0.05


@needs_gpu
@pytest.mark.parametrize('words', [
    ['--fp8_backend=off'],
    ['--fp8_backend=native', '--fp8_stats_freq=6'],
    ['--fp8_backend=native', '--fp8_recipe=delayed', '--grad_checkpointing=full'],
])
def test_replayed_micro_steps_train_as_launched_ones(words, tiny, tmp_path):
    """Attention's backward pass may sum in any order, so that losses differ by rounding alone."""
    found = []
    for graphs in ([], ['--no_cuda_graphs']):
        folder = tmp_path / str(len(graphs))
        done = run('train_fp8.py', *tiny, *words, *graphs, '--gradient_accumulation_steps=4', '--eval_freq=5',
                   '--max_steps=12', f'--checkpoint_dir={folder}')
        assert 'WARNING' not in done.stdout
        found.append(losses(folder))
    for step, loss in found[1].items():
        assert found[0][step] == pytest.approx(loss, rel=2e-3)
    assert loss < found[1][1] - 0.5


@needs_gpu
def test_the_largest_batch_fits_and_blocks_are_recomputed_under_compile(tiny, tmp_path):
    words = ['--batch_size=0', '--max_batch_size=64', '--target_effective_batch_size=32',
             '--fp8_backend=native']    # an order: so small a model is not faster in FP8
    done = run('train_fp8.py', *tiny, *words, '--grad_checkpointing=full', f'--checkpoint_dir={tmp_path}')
    assert 'batch     32 x 64 tokens = ' in done.stdout
    assert '8 of 9 linears, tensorwise (native)' in done.stdout
    assert losses(tmp_path)[10] < losses(tmp_path)[1] - 0.5


@needs_gpu
@pytest.mark.parametrize('backend, recipe', CELLS)
def test_the_self_check_passes_and_the_clock_runs_with_gpt2s_block(backend, recipe):
    choice = chosen(backend, recipe)
    few_tokens = dataclasses.replace(PRESETS['gpt2'], vocab_size=128)

    def build(choice, blocks):
        config = dataclasses.replace(few_tokens, n_layer=blocks)
        model = GPT(config, linear_factory(choice, Linear)).to(DEVICE)
        model.wte.weight.data *= 50
        return model
    idx = torch.randint(128, (2, 8, 1024), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sample = health.Sample(build, tuple(idx), not choice.eager, bf16_compiled=True)
    assert sample.problem(choice) is None
    assert all(0 < t < math.inf for t in sample.times({'bf16': fp8.OFF, 'fp8': choice}).values())


@needs_gpu
@pytest.mark.parametrize('num_workers', [0, 1])
def test_tokens_arrive_as_they_are_stored(num_workers, tiny_data):
    train = data.TokenData(opened(tiny_data), 'train', 64)
    here, there = (data.Loader(train, 4, seed=0, device=device, num_workers=num_workers)
                   for device in (CPU, DEVICE))
    for _ in range(3):
        for a, b in zip(here.next()[:2], there.next()[:2]):     # without examples
            assert b.is_cuda
            assert torch.equal(a, b.cpu())
