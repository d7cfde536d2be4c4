import contextlib
import sys
import types

import pytest
import torch
import torch.nn as nn

import fp8
from fp8 import E4M3, E5M2, Choice, choose, emulated_mm, linear_backward, linear_factory, linear_forward, quantize, scaled_mm
from model import GPT, GPTConfig, Linear
from optim import make_optimizer

CPU = torch.device('cpu')
NATIVE, EMULATE = Choice('native', 'test'), Choice('emulate', 'test')
SMALL = GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=32)


def random(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize('dtype, largest', [(E4M3, 448.0), (E5M2, 57344.0)])
@pytest.mark.parametrize('magnitude', [1e-6, 1.0, 1e4])
def test_quantize_rounds_to_the_nearest_representable(dtype, largest, magnitude):
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    grid = grid[grid.isfinite()].unique()
    x = random(40, 32, dtype=torch.float32) * magnitude
    x8, inverse = quantize(x, dtype)
    scale = largest / x.abs().max().double()
    assert abs(inverse.item() * scale - 1) < 1e-6
    distance = (x.double() * scale).unsqueeze(-1).sub(grid).abs()
    chosen = (x.double() * scale - x8.double()).abs()
    assert (chosen <= distance.min(-1).values * (1 + 1e-4) + 1e-4).all()
    assert x8.double().abs().max() == largest  # the whole range is used


def test_quantize_at_the_edges():
    x8, inverse = quantize(torch.zeros(4, 4), E4M3)
    assert (x8.float() == 0).all() and 0 < inverse.item() < 1e-10
    for bad in (float('nan'), float('inf')):
        x8, inverse = quantize(torch.tensor([1.0, bad]), E5M2)
        assert not (x8.float() * inverse).isfinite().all()


def both(M=64, K=48, N=32):
    x, w, dy = random(M, K, seed=1), random(N, K, seed=2, dtype=torch.float32), random(M, N, seed=3)
    results = {}
    for mm in (scaled_mm, emulated_mm):
        operands = []
        spy = lambda a, b, *rest, mm=mm, **kw: operands.extend([a, b]) or mm(a, b, *rest, **kw)
        y, saved = linear_forward(x, w, spy)
        results[mm] = (y, *linear_backward(dy, *saved, spy, torch.float32)), operands
    return x, w, dy, results


def test_native_agrees_with_emulate_and_operands_are_equal():
    *_, results = both()
    (native, native_operands), (emulated, emulated_operands) = results[scaled_mm], results[emulated_mm]
    assert all(relative(a, b) < 1e-3 for a, b in zip(native, emulated))
    assert len(native_operands) == 6
    assert all(a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
               for a, b in zip(native_operands, emulated_operands))


@pytest.mark.parametrize('mm', [scaled_mm, emulated_mm])
def test_against_fp64(mm):
    """Rounding to 3 (2) bits of mantissa errs by at most 2**-4 (2**-3), uniformly: about 2.5% (5%) of an operand's norm."""
    x, w, dy, results = both()
    y, dx, dw = results[mm][0]
    x, w, dy = x.double(), w.double(), dy.double()
    assert 0.01 < relative(y, x @ w.t()) < 0.05
    assert 0.02 < relative(dx, dy @ w) < 0.08 and 0.02 < relative(dw, dy.t() @ x) < 0.08
    assert y.dtype == dx.dtype == torch.bfloat16 and dw.dtype == torch.float32


def test_autograd_is_linear_backward():
    x, w = random(2, 16, 48, seed=1).requires_grad_(), random(32, 48, seed=2, dtype=torch.float32)
    layer = fp8.Fp8Linear(48, 32)
    with torch.no_grad():
        layer.weight.copy_(w)
    dy = random(2, 16, 32, seed=3)
    y = layer(x)
    y.backward(dy)
    expected, saved = linear_forward(x.detach().view(32, 48), w, scaled_mm)
    dx, dw = linear_backward(dy.view(32, 32), *saved, scaled_mm, torch.float32)
    assert torch.equal(y, expected.view(2, 16, 32) + layer.bias.bfloat16()) and torch.equal(x.grad, dx.view(2, 16, 48)) and torch.equal(layer.weight.grad, dw)
    torch.testing.assert_close(layer.bias.grad, dy.float().sum((0, 1)), atol=0.05, rtol=0.01)


@pytest.mark.parametrize('mm', [scaled_mm, emulated_mm])
@pytest.mark.parametrize('a, b, message', [
    (torch.zeros(16, 24, dtype=E4M3), torch.zeros(16, 24, dtype=E4M3).t(), 'multiples of 16'),
    (torch.zeros(16, 32, dtype=E4M3), torch.zeros(24, 32, dtype=E4M3).t(), 'multiples of 16'),
    (torch.zeros(7, 32, dtype=E4M3), torch.zeros(16, 32, dtype=E4M3).t(), 'multiples of 16'),
    (torch.zeros(16, 32, dtype=E4M3), torch.zeros(32, 16, dtype=E4M3), 'column-major'),
    (torch.zeros(32, 16, dtype=E4M3).t(), torch.zeros(16, 32, dtype=E4M3).t(), 'row-major'),
    (torch.zeros(16, 32, dtype=E5M2), torch.zeros(16, 32, dtype=E5M2).t(), 'e5m2 and e5m2'),
])
def test_cudas_rules_hold_on_a_cpu(mm, a, b, message):
    one = torch.ones(())
    with pytest.raises(ValueError, match=message):
        mm(a, b, one, one, torch.bfloat16, fast=True)


def test_trace_under_cudas_own_checks():
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode():
        x, w = torch.empty(64, 48, device='cuda', dtype=torch.bfloat16), torch.empty(32, 48, device='cuda')
        y, saved = linear_forward(x, w, scaled_mm)
        dx, dw = linear_backward(y, *saved, scaled_mm, torch.float32)
        assert (y.shape, dx.shape, dw.shape) == ((64, 32), (64, 48), (32, 48)) and dw.dtype == torch.float32
        one = torch.ones((), device='cuda')
        with pytest.raises(RuntimeError):  # the checks are there: torch itself refuses a row-major right side
            torch._scaled_mm(saved[0], torch.empty(48, 32, device='cuda').to(E4M3), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


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


def test_fp8_gradients_point_where_bf16s_do():
    x = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    gradients = []
    for choice in (Choice('off', ''), NATIVE, EMULATE):
        model = GPT(SMALL, linear_factory(choice, Linear))
        model(x[:, :-1], x[:, 1:]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    plain, native, emulated = gradients
    assert 1e-3 < relative(native, plain) < 0.15 and relative(native, emulated) < 0.05


def test_paused_is_bf16_bit_for_bit():
    x = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    plain, layered = GPT(SMALL)(x), GPT(SMALL, linear_factory(NATIVE, Linear))
    with fp8.paused():
        with fp8.paused():
            pass
        assert torch.equal(layered(x), plain)
    assert not torch.equal(layered(x), plain)


def test_state_dict_is_the_same_for_every_backend():
    plain = GPT(SMALL)
    for choice in (NATIVE, EMULATE):
        layered = GPT(SMALL, linear_factory(choice, Linear), seed=9)
        assert layered.state_dict().keys() == plain.state_dict().keys()
        layered.load_state_dict(plain.state_dict())
        layered.load_weights(plain.weights())
        with fp8.paused():
            assert torch.equal(layered(torch.zeros((1, 16), dtype=torch.long)), plain(torch.zeros((1, 16), dtype=torch.long)))


def test_one_graph_without_breaks():
    model = GPT(SMALL, linear_factory(NATIVE, Linear))
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    x = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(0))
    compiled(x[:, :-1], x[:, 1:], n_targets=64).backward()
    traced = {n: p.grad.clone() for n, p in model.weights().items()}
    model.zero_grad()
    model(x[:, :-1], x[:, 1:], n_targets=64).backward()
    assert all(relative(p.grad, traced[n]) < 1e-2 for n, p in model.weights().items())
    with fp8.paused():
        torch.testing.assert_close(compiled(x[:, :-1]), GPT(SMALL)(x[:, :-1]), atol=1e-2, rtol=0)


def test_layers_that_cannot_or_should_not_be_fp8_say_why():
    odd = GPT(GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=32, ffn_dim=40), linear_factory(NATIVE, Linear))
    line = fp8.summary(odd, NATIVE)
    assert '4 of 9 linears' in line and 'h.0.mlp.up, h.1.mlp.up: 32 -> 40 is not in multiples of 16' in line and 'lm_head: the output head' in line
    assert type(odd.lm_head) is Linear and type(odd.h[0].mlp.up) is Linear and isinstance(odd.h[0].attn.qkv, fp8.Fp8Linear)
    assert fp8.summary(odd, Choice('off', 'no GPU')) == 'FP8 Training Off: no GPU'


def test_ones_own_model():
    """The factory's layers are nn.Linear's: they serve outside GPT too."""
    net = nn.Sequential(fp8.Fp8Linear(32, 64), nn.GELU(), fp8.Fp8Linear(64, 16, bias=False))
    net(random(16, 32)).float().pow(2).mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in net.parameters()) and len(list(net.parameters())) == 3


def test_requests_step_aside_with_a_reason():
    for use_fp8, backend, dtype, tokens, reason in (
            (True, 'auto', torch.bfloat16, 1024, 'no CUDA GPU'), (True, 'off', torch.bfloat16, 1024, 'switched off'),
            (False, 'auto', torch.bfloat16, 1024, 'switched off'), (True, 'auto', torch.float32, 1024, 'needs dtype=bf16'),
            (True, 'auto', torch.bfloat16, 1000, 'not a multiple of 16')):
        choice = choose(use_fp8, backend, CPU, dtype, tokens)
        assert not choice.on and reason in choice.reason


@pytest.mark.parametrize('arguments, error, message', [
    ((True, 'te', CPU, torch.bfloat16, 1024), RuntimeError, 'fp8_backend=te: Transformer Engine needs a CUDA GPU'),
    ((True, 'torchao', CPU, torch.bfloat16, 1024), ValueError, 'fp8_backend=torchao is not built yet'),
    ((True, 'fp8', CPU, torch.bfloat16, 1024), ValueError, 'fp8_backend is one of'),
    ((False, 'native', CPU, torch.bfloat16, 1024), ValueError, 'use_fp8 is off, but fp8_backend=native'),
    ((True, 'native', CPU, torch.float32, 1024), ValueError, 'fp8_backend=native: FP8 needs dtype=bf16'),
    ((True, 'emulate', CPU, torch.bfloat16, 1000), ValueError, 'fp8_backend=emulate: .* not a multiple of 16'),
])
def test_orders_run_or_raise(arguments, error, message):
    with pytest.raises(error, match=message):
        choose(*arguments)
    assert choose(True, 'native', CPU, torch.bfloat16, 1024).backend == 'native'


@pytest.mark.parametrize('capability, gemm, compiling, te, backend, reason', [
    ((8, 0), True, True, None, 'off', 'sm_80'), ((9, 0), False, True, None, 'off', 'failed here'), ((9, 0), True, True, None, 'native', 'fuses'),
    ((9, 0), True, False, None, 'te', 'kernels'), ((9, 0), True, False, 'not installed', 'native', 'Transformer Engine is not there')])
def test_auto_on_cuda(monkeypatch, capability, gemm, compiling, te, backend, reason):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: capability)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda d: 'Test GPU')
    monkeypatch.setattr(fp8, '_why_not_te', lambda d: te)
    real, here = torch.randn, torch.Generator
    monkeypatch.setattr(torch, 'randn', lambda *a, device, generator: real(*a))
    monkeypatch.setattr(torch, 'Generator', lambda d=None: here())
    if not gemm:
        def broken(*args, **kwargs):
            raise RuntimeError('CUBLAS_STATUS_NOT_SUPPORTED')
        monkeypatch.setattr(torch, '_scaled_mm', broken)
    choice = choose(True, 'auto', torch.device('cuda'), torch.bfloat16, 1024, compiling)
    assert choice.backend == backend and reason in choice.reason


@pytest.fixture
def stand_in_te(monkeypatch):
    """A module of Transformer Engine's shape, for what fp8.py must get right around it; its kernels need a GPU."""
    calls = []

    class TheirLinear(nn.Linear):
        def get_extra_state(self):
            return torch.zeros(3)

        def set_extra_state(self, state):
            pass

        def forward(self, x):
            calls.append(('forward', x.dtype))
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        calls.append(('autocast', enabled, recipe))
        yield

    te, recipe = types.ModuleType('te'), types.ModuleType('recipe')
    te.Linear, te.autocast = TheirLinear, autocast
    recipe.Float8CurrentScaling, recipe.Format = lambda fp8_format: ('current', fp8_format), types.SimpleNamespace(HYBRID='hybrid')
    for name, module in (('transformer_engine', types.ModuleType('t')), ('transformer_engine.pytorch', te),
                         ('transformer_engine.common', types.ModuleType('c')), ('transformer_engine.common.recipe', recipe)):
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules['transformer_engine'].pytorch = te
    fp8._te_class.cache_clear()
    yield calls
    fp8._te_class.cache_clear()


@pytest.mark.filterwarnings('ignore:.*CUDA is not available')
def test_te_slot(stand_in_te):
    choice = Choice('te', 'test')
    model, plain = GPT(SMALL, linear_factory(choice, Linear)), GPT(SMALL)
    assert '8 of 9 linears, te' in fp8.summary(model, choice)
    assert model.state_dict().keys() == plain.state_dict().keys() and all(torch.equal(a, b) for a, b in zip(model.weights().values(), plain.weights().values()))
    model.load_state_dict(plain.state_dict())
    idx = torch.zeros((1, 16), dtype=torch.long)
    with fp8.paused():
        assert torch.equal(model(idx), plain(idx)) and not stand_in_te
    model(idx)
    assert stand_in_te[:2] == [('autocast', True, ('current', 'hybrid')), ('forward', torch.bfloat16)] and len(stand_in_te) == 16
    make_optimizer(model, (0.9, 0.95), 0.1)
