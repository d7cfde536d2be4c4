"""Which backend runs, the linears of each, and their state, without a GPU."""
import dataclasses
import itertools
import re
import sys

import pytest
import torch
import torch.nn as nn

import fp8
from configurator import MachineError
from conftest import ROOT, run
from fp8 import RECIPES, Choice, choose, linear_factory
from model import GPT, GPTConfig, Linear
from optim import make_optimizer

CPU = torch.device('cpu')
NATIVE, EMULATE = Choice('native', 'test'), Choice('emulate', 'test')
SMALL = GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=32)
WIDE = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=2, n_embd=128)
ON_A_CPU = [*itertools.product(['emulate'], RECIPES), *itertools.product(['native'], ['tensorwise', 'delayed', 'rowwise', 'rowwise_gw_hp']),
            *itertools.product(['torchao'], ['tensorwise', 'rowwise', 'rowwise_gw_hp'])]
if torch.__version__ < (2, 13):  # a CPU's torch._scaled_mm had no scales for rows
    ON_A_CPU = [cell for cell in ON_A_CPU if cell[0] != 'native' or 'rowwise' not in cell[1]]


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def on_a_cpu(backend, recipe, **settings):
    return choose(True, backend, CPU, torch.bfloat16, 128, recipe=recipe, **settings)


def gradients(model, idx=None, n_targets=128):
    """Every gradient of a step on fixed tokens, in one vector."""
    model.zero_grad()
    if idx is None:
        idx = torch.randint(0, 64, (2, 65), generator=torch.Generator().manual_seed(0))
    model(idx[:, :-1], idx[:, 1:], n_targets=n_targets).backward()
    return torch.cat([p.grad.flatten() for p in model.weights().values()])


def trained(choice, checkpoint_every=0, micro_steps=1, steps=3, resume_at=None, config=WIDE):
    """The weights after some steps of AdamW, as train_fp8.py takes them; resumed half way, if asked, from what a checkpoint holds."""
    def build():
        model = GPT(config, linear_factory(choice, Linear), checkpoint_every=checkpoint_every)
        return model, fp8.State(model, choice), make_optimizer(model, (0.9, 0.95), 0.1)
    model, state, optimizer = build()
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(0, 64, (steps, 2 * micro_steps, 65), generator=generator)
    for step, batch in enumerate(batches):
        if step == resume_at:
            saved = model.weights(), state.state_dict(), optimizer.state_dict()
            model, state, optimizer = build()
            model.load_weights(saved[0])
            state.load(saved[1])
            optimizer.load_state_dict(saved[2])
        if state.needs_calibration:
            state.calibrate(lambda: gradients(model, batch[:2], n_targets=128 * micro_steps))
            model.zero_grad()
        for micro_step, idx in enumerate(batch.chunk(micro_steps)):
            state.micro_step(micro_step, micro_steps)
            model(idx[:, :-1], idx[:, 1:], n_targets=128 * micro_steps).backward()
        for group in optimizer.param_groups:
            group['lr'] = 1e-3
        optimizer.step()
        state.after_step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.weights().values()])


def test_autograd_is_linear_backward():
    x, w = random(2, 16, 48, seed=1).requires_grad_(), random(32, 48, seed=2, dtype=torch.float32)
    layer = fp8.Fp8Linear(48, 32)
    with torch.no_grad():
        layer.weight.copy_(w)
    dy = random(2, 16, 32, seed=3)
    y = layer(x)
    y.backward(dy)
    expected, *saved = fp8.linear_forward(x.detach().view(32, 48), w, layer.casts, fp8.scaled_mm)
    dx, dw = fp8.linear_backward(dy.view(32, 32), *saved, layer.casts, fp8.scaled_mm, torch.float32)
    assert torch.equal(y, expected.view(2, 16, 32) + layer.bias.bfloat16()) and torch.equal(x.grad, dx.view(2, 16, 48)) and torch.equal(layer.weight.grad, dw)
    torch.testing.assert_close(layer.bias.grad, dy.float().sum((0, 1)), atol=0.05, rtol=0.01)


@pytest.mark.parametrize('backend, recipe', ON_A_CPU)
def test_gradients_point_where_bf16s_do(backend, recipe):
    choice = on_a_cpu(backend, recipe)
    model, plain = GPT(WIDE, linear_factory(choice, Linear)), GPT(WIDE)
    assert len(fp8.fp8_linears(model)) == 8 and f'8 of 9 linears, {backend}' in fp8.summary(model, choice) and f'{recipe}, ' in fp8.summary(model, choice)
    state = fp8.State(model, choice)
    if state.needs_calibration:
        state.calibrate(lambda: gradients(model))
    assert 1e-3 < relative(gradients(model), gradients(plain)) < 0.15
    with fp8.paused():
        assert torch.equal(gradients(model), gradients(plain))


@pytest.mark.parametrize('backend, recipe', [('emulate', 'delayed'), ('native', 'tensorwise'), ('native', 'delayed'), ('emulate', 'rowwise'), ('torchao', 'rowwise')])
def test_accumulation_checkpointing_and_resume_change_nothing(backend, recipe):
    """Four micro-steps with every block recomputed are one without, to rounding; a resumed run is the same run, bit for bit."""
    choice = on_a_cpu(backend, recipe)
    plain = trained(choice, micro_steps=4)
    assert torch.equal(trained(choice, micro_steps=4, checkpoint_every=1), plain)
    assert torch.equal(trained(choice, micro_steps=4, checkpoint_every=2), plain)
    assert torch.equal(trained(choice, micro_steps=4, resume_at=2), plain)
    assert 1e-4 < relative(plain, trained(Choice('off', ''), micro_steps=4)) < 0.03


def test_portable_between_any_two_backends():
    plain = GPT(WIDE)
    idx = torch.zeros((1, 16), dtype=torch.long)
    for backend, recipe in ON_A_CPU:
        model = GPT(WIDE, linear_factory(on_a_cpu(backend, recipe), Linear), seed=9)
        assert model.state_dict().keys() == plain.state_dict().keys()
        model.load_state_dict(plain.state_dict())
        model.load_weights(plain.weights())
        with fp8.paused():
            assert torch.equal(model(idx), plain(idx))


def delayed_layer(**settings):
    choice = on_a_cpu('native', 'delayed', **settings)
    layer = nn.Sequential(fp8.make_linear(choice, 32, 16, False))
    layer[0].bf16_reason = None
    return layer, layer[0], fp8.State(layer, choice)


def test_delayed_scales_by_hand():
    """amax of x: 1, 4, 2, 2 over a history of two: the scale of the next step is 448 / (2^margin max of the last two)."""
    layer, linear, state = delayed_layer(amax_history=2, margin=1)
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    state.calibrate(lambda: layer(x + 1).sum().backward())
    assert linear.reach[0].item() == 1 / 2
    for amax, expected in ((4, 4), (2, 4), (2, 2)):
        before = linear.reach.clone()
        for part in (1, amax, 1):  # over micro-steps the maximum counts, and the scale stays
            layer(x + part).sum().backward()
            assert torch.equal(linear.reach, before)
        state.after_step()
        assert linear.reach[0].item() == 1 / (2 * expected) and linear.amax.abs().sum() == 0


def test_a_forgotten_calibration_is_told():
    layer, linear, state = delayed_layer()
    layer(torch.ones(16, 32, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match='State.calibrate'):
        state.after_step()
    state.calibrate(lambda: layer(torch.ones(16, 32, dtype=torch.bfloat16)).sum().backward())  # what was seen without scales is no amax
    assert linear.reach.isfinite().all() and linear.reach[0] == 1


def test_delayed_interval_and_non_finite_steps():
    layer, linear, state = delayed_layer(amax_history=4, interval=3)
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    state.calibrate(lambda: layer(x).sum().backward())
    seen = []
    for amax in (2, 4, float('inf'), 8, 8, 8):
        layer(x * amax).sum().backward()
        state.after_step()
        seen.append(1 / linear.reach[0].item())
    assert seen == [1, 1, 4, 4, 4, 8]  # every third step; the inf left no mark
    layer(x * 100)
    state.forget()
    assert linear.amax[0] == 0


def test_a_zero_tensor_keeps_its_scale():
    layer, linear, state = delayed_layer(amax_history=1)
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    state.calibrate(lambda: layer(x).sum().backward())
    before = linear.reach[2].item()
    (layer(x) * 0).sum().backward()
    state.after_step()
    assert linear.reach[2].item() == before > 0


def test_delayed_state_of_another_shape_is_calibrated_anew():
    layer, _, state = delayed_layer()
    state.calibrate(lambda: layer(torch.ones(16, 32, dtype=torch.bfloat16)).sum().backward())
    saved = state.state_dict()
    for other, needed in ((delayed_layer()[2], False), (delayed_layer(amax_history=8)[2], True)):
        other.load(saved)
        assert other.needs_calibration == needed
    assert fp8.State(GPT(SMALL, linear_factory(NATIVE, Linear)), NATIVE).state_dict() == {} and not fp8.State(GPT(SMALL), fp8.OFF).needs_calibration


def test_a_misspelt_keep_is_an_error_and_parts_of_names_match():
    def kept(keep):
        choice = dataclasses.replace(NATIVE, keep=tuple(keep))
        model = GPT(SMALL, linear_factory(choice, Linear))
        fp8.State(model, choice)
        return {n for n, m in model.named_modules() if getattr(m, 'bf16_reason', None) == 'kept by fp8_keep'}
    assert kept(['h.1']) == {'h.1.attn.qkv', 'h.1.attn.proj', 'h.1.mlp.up', 'h.1.mlp.down'}
    assert kept(['attn.proj', 'h.0.mlp.up']) == {'h.0.attn.proj', 'h.1.attn.proj', 'h.0.mlp.up'} and kept(['h.*.mlp.*']) == {f'h.{i}.mlp.{n}' for i in (0, 1) for n in ('up', 'down')}
    with pytest.raises(ValueError, match="no linear is called 'mlp.dwn'; they are called h.0.attn.qkv"):
        kept(['mlp.dwn'])


def test_convert_ones_own_model():
    """The five lines of the docs: torch's modules, autocast, fp32 input."""
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24), nn.Linear(24, 16, bias=False))
    x, weights = random(16, 32, dtype=torch.float32), [p.clone() for p in net.parameters()]
    with torch.autocast('cpu', torch.bfloat16):
        plain = net(x)
    choice = on_a_cpu('native', 'tensorwise')
    fp8.convert(net, choice)
    assert '1 of 3 linears' in fp8.summary(net, choice) and '64 -> 24 is not in multiples of 16' in fp8.summary(net, choice)
    assert all(torch.equal(a, b) for a, b in zip(weights, net.parameters()))
    with torch.autocast('cpu', torch.bfloat16):
        y = net(x)
    y.float().pow(2).mean().backward()
    assert 1e-3 < relative(y, plain) < 0.1 and all(p.grad.abs().sum() > 0 for p in net.parameters())


def test_the_example_of_the_docs_runs():
    code = re.search(r'```python\n(.*?)```', (ROOT / 'docs' / 'fp8.md').read_text(), re.S).group(1)
    out = run('-c', code).stdout
    assert out.startswith('FP8 Training Enabled: 2 of 2 linears') and len(out.splitlines()) == 4


@pytest.mark.parametrize('choice', [NATIVE, EMULATE], ids=lambda c: c.backend)
def test_every_fp8_weight_trains(choice):
    model = GPT(SMALL, linear_factory(choice, Linear))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, fp8.Fp8Linear)}
    assert len(layers) == 8
    optimizer = make_optimizer(model, (0.9, 0.95), 0.0)
    for group in optimizer.param_groups:
        group['lr'] = 0.01
    before = {name: p.clone() for name, p in model.weights().items()}
    x = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))
    first = model(x[:, :-1], x[:, 1:])
    first.backward()
    optimizer.step()
    assert all((before[f'{name}.weight'] != m.weight).float().mean() > 0.9 for name, m in layers.items())
    assert model(x[:, :-1], x[:, 1:]) < first


def test_paused_is_bf16_bit_for_bit():
    x = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    plain, layered = GPT(SMALL)(x), GPT(SMALL, linear_factory(NATIVE, Linear))
    with fp8.paused():
        with fp8.paused():
            pass
        assert torch.equal(layered(x), plain)
    assert not torch.equal(layered(x), plain)


@pytest.mark.parametrize('checkpointing', [0, 1])
@pytest.mark.parametrize('recipe', [recipe for backend, recipe in ON_A_CPU if backend == 'native'])
def test_one_graph_without_breaks(recipe, checkpointing):
    choice = on_a_cpu('native', recipe)
    model = GPT(WIDE, linear_factory(choice, Linear), checkpoint_every=checkpointing)
    state = fp8.State(model, choice)
    if state.needs_calibration:
        state.calibrate(lambda: gradients(model))
    eager, amaxes = gradients(model), [m.amax.clone() for m in state.layers.values()]
    state.forget()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    idx = torch.randint(0, 64, (2, 65), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    compiled(idx[:, :-1], idx[:, 1:], n_targets=128).backward()
    assert relative(torch.cat([p.grad.flatten() for p in model.weights().values()]), eager) < 1e-2
    assert all(torch.allclose(m.amax, amax, rtol=0.02) and m.amax.all() for m, amax in zip(state.layers.values(), amaxes))
    with fp8.paused(), torch.no_grad():
        torch.testing.assert_close(compiled(idx[:, :-1]), GPT(WIDE)(idx[:, :-1]), atol=1e-2, rtol=0)


def test_layers_that_cannot_or_should_not_be_fp8_say_why():
    odd = GPT(GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=32, ffn_dim=40), linear_factory(NATIVE, Linear))
    line = fp8.summary(odd, NATIVE)
    assert '4 of 9 linears' in line and 'h.0.mlp.up, h.1.mlp.up: 32 -> 40 is not in multiples of 16' in line and 'lm_head: the output head' in line
    assert type(odd.lm_head) is Linear and type(odd.h[0].mlp.up) is Linear and isinstance(odd.h[0].attn.qkv, fp8.Fp8Linear)
    assert fp8.summary(odd, Choice('off', 'no GPU')) == 'FP8 Training Off: no GPU'


def test_requests_step_aside_with_a_reason():
    for use_fp8, backend, dtype, tokens, reason in (
            (True, 'auto', torch.bfloat16, 1024, 'no CUDA GPU'), (True, 'off', torch.bfloat16, 1024, 'switched off'),
            (False, 'auto', torch.bfloat16, 1024, 'switched off'), (True, 'auto', torch.float32, 1024, 'needs dtype=bf16'),
            (True, 'auto', torch.bfloat16, 1000, 'not a multiple of 16')):
        choice = choose(use_fp8, backend, CPU, dtype, tokens)
        assert not choice.on and reason in choice.reason


@pytest.mark.parametrize('settings, error, message', [
    (dict(backend='te'), RuntimeError, 'fp8_backend=te: Transformer Engine needs a CUDA GPU'),
    (dict(backend='te', recipe='rowwise'), ValueError, 'fp8_backend=te fp8_recipe=rowwise: Transformer Engine has no rowwise recipe'),
    (dict(backend='te', format='e5m2'), ValueError, '--fp8_format=hybrid'),
    (dict(backend='te', margin=1), ValueError, '--fp8_backend=te --fp8_recipe=delayed --fp8_margin=1'),
    (dict(backend='te', recipe='delayed', margin=1), RuntimeError, 'needs a CUDA GPU'),
    (dict(backend='torchao', recipe='delayed'), ValueError, 'torchao has no delayed recipe'),
    (dict(backend='torchao', recipe='blockwise'), ValueError, 'torchao has no blockwise recipe'),
    (dict(backend='torchao', recipe='mxfp8'), RuntimeError, 'needs a GPU of sm_100'),
    (dict(backend='torchao', format='e5m2'), ValueError, '--fp8_format=hybrid'),
    (dict(backend='torchao', margin=1), ValueError, 'torchao has no margin'),
    (dict(backend='native', recipe='blockwise'), RuntimeError, '--fp8_backend=emulate has blockwise'),
    (dict(backend='native', recipe='mxfp8'), RuntimeError, '--fp8_backend=emulate has mxfp8'),
    (dict(recipe='rowwise'), RuntimeError, 'fp8_recipe=rowwise: there is no CUDA GPU, and a CPU only emulates FP8'),
    (dict(backend='fp8'), ValueError, 'fp8_backend is one of'), (dict(recipe='row'), ValueError, 'fp8_recipe is one of'),
    (dict(format='e3m4'), ValueError, 'fp8_format is one of'),
    (dict(backend='native', interval=4), ValueError, '--fp8_recipe=delayed does'), (dict(backend='native', amax_history=16), ValueError, 'fp8_recipe=delayed'),
    (dict(backend='native', recipe='delayed', interval=0), ValueError, 'at least 1'), (dict(backend='native', margin=-1), ValueError, 'fp8_margin is at least 0'),
    (dict(use_fp8=False, backend='native'), ValueError, 'use_fp8 is off, but fp8_backend=native'),
    (dict(backend='native', dtype=torch.float32), ValueError, 'fp8_backend=native: FP8 needs dtype=bf16'),
    (dict(backend='emulate', tokens=1000), ValueError, 'fp8_backend=emulate: .* not a multiple of 16'),
    (dict(backend='emulate', recipe='blockwise', tokens=64), ValueError, 'not a multiple of 128'),
], ids=str)
def test_orders_run_or_raise(settings, error, message):
    with pytest.raises(error, match=message) as refusal:
        choose(**{'use_fp8': True, 'backend': 'auto', 'device': CPU, 'dtype': torch.bfloat16, 'tokens': 1024, **settings})
    assert '\n' not in str(refusal.value)


def test_every_cell_that_a_cpu_has_is_chosen():
    for backend, recipe in ON_A_CPU:
        assert (on_a_cpu(backend, recipe).backend, on_a_cpu(backend, recipe).recipe) == (backend, recipe)
    assert on_a_cpu('native', 'auto').format == 'hybrid' and on_a_cpu('emulate', 'rowwise').format == 'e4m3' and on_a_cpu('emulate', 'rowwise', format='hybrid').format == 'hybrid'
    assert choose(False, 'auto', CPU, torch.bfloat16, 1024, recipe='rowwise') == fp8.OFF  # --no_fp8 over a config that names a recipe


def test_missing_packages_name_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torchao.float8', None)
    with pytest.raises(MachineError, match='pip install torchao'):
        on_a_cpu('torchao', 'tensorwise')
    monkeypatch.setitem(sys.modules, 'transformer_engine', None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: (9, 0))
    with pytest.raises(MachineError, match='pip install --no-build-isolation -r requirements-te.txt'):
        choose(True, 'te', torch.device('cuda'), torch.bfloat16, 1024)


def test_a_multiplication_that_a_cpu_does_not_have_is_refused(monkeypatch):
    """As torch 2.11's, which has no scales for rows."""
    def broken(*args, **kwargs):
        raise RuntimeError('only per-tensor scaling')
    monkeypatch.setattr(torch, '_scaled_mm', broken)
    fp8._trial.cache_clear()
    with pytest.raises(RuntimeError, match='only per-tensor scaling; --fp8_backend=emulate has rowwise'):
        on_a_cpu('native', 'rowwise')
    fp8._trial.cache_clear()


@pytest.fixture
def pretend_cuda(monkeypatch):
    """A GPU whose matrix multiplications a CPU does; returns a function that sets its capability."""
    real, here = torch.randn, torch.Generator
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda d: 'Test GPU')
    monkeypatch.setattr(torch, 'randn', lambda *a, device, generator: real(*a))
    monkeypatch.setattr(torch, 'Generator', lambda d=None: here())
    fp8._trial.cache_clear()
    yield lambda *capability: monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: capability)
    fp8._trial.cache_clear()


@pytest.mark.parametrize('capability, gemm, compiling, te, backend, reason', [
    ((8, 0), True, True, 'not installed', 'off', 'sm_80'), ((9, 0), False, True, 'not installed', 'torchao', 'failed here'),
    ((9, 0), True, True, None, 'native', 'fuses'), ((9, 0), True, False, None, 'te', 'kernels'), ((9, 0), True, False, 'not installed', 'native', 'not installed')])
def test_auto_on_cuda(monkeypatch, pretend_cuda, capability, gemm, compiling, te, backend, reason):
    pretend_cuda(*capability)
    monkeypatch.setattr(fp8, '_why_not_te', lambda *a: te and ImportError(te))
    if not gemm:
        def broken(*args, **kwargs):
            raise RuntimeError('CUBLAS_STATUS_NOT_SUPPORTED')
        monkeypatch.setattr(torch, '_scaled_mm', broken)
    choice = choose(True, 'auto', torch.device('cuda'), torch.bfloat16, 1024, compiling)
    assert choice.backend == backend and reason in choice.reason


def test_hardware_bounds_on_cuda(pretend_cuda):
    pretend_cuda(9, 0)
    for backend in ('native', 'torchao'):
        with pytest.raises(RuntimeError, match='sm_100'):
            choose(True, backend, torch.device('cuda'), torch.bfloat16, 1024, recipe='mxfp8')
    with pytest.raises(RuntimeError, match='fp8_recipe=blockwise: an FP8 matrix multiplication failed here'):  # a CPU has no such kernel
        choose(True, 'native', torch.device('cuda'), torch.bfloat16, 1024, recipe='blockwise')
