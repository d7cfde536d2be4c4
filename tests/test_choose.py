"""Which backend runs, and what is refused, without a GPU."""
import dataclasses
import sys

import pytest
import torch

from fp8gpt.fp8 import backends
from fp8gpt import fp8
from fp8gpt.fp8.linear import DeviceError, OptionError
from fp8gpt.fp8 import Options, Place, choose
from fp8gpt.fp8.linear import RECIPES, Recipe
from fp8_models import CPU, ON_A_CPU, on_a_cpu

HERE = Place(CPU, tokens=1024)
CUDA = Place(torch.device('cuda'), tokens=1024)


def test_requests_step_aside_with_a_reason():
    for options, place, reason in (
            ({}, {}, 'no CUDA GPU'),
            ({'backend': 'off'}, {}, 'switched off'),
            ({'use_fp8': False}, {}, 'switched off'),
            ({}, {'dtype': torch.float32}, 'needs dtype=bf16'),
            ({}, {'tokens': 1000}, 'not a multiple of 16')):
        choice = choose(Options(**options), dataclasses.replace(HERE, **place))
        assert not choice.on
        assert reason in choice.reason


def test_what_is_asked_to_be_tried_first_is_a_request(monkeypatch):
    """Each backend is tried in its order; the one that was asked for first, whatever auto's order is."""
    tried = []
    for name in ('native', 'te', 'torchao'):
        def problem(choice, device, name=name):
            tried.append((name, choice.recipe))
            return None if name in can else DeviceError(f'no {name} here')
        monkeypatch.setattr(backends.BACKENDS[name], 'problem', problem)
    can = {'native', 'te'}
    place = dataclasses.replace(CUDA, compiling=True)
    assert choose(Options(), place).backend == 'native'
    found = choose(Options(backend='auto:te'), place)
    assert (found.backend, found.reason) == ('te', 'auto: asked to be tried first')
    can = {'native'}
    found = choose(Options(backend='auto:te'), place)
    assert (found.backend, found.reason) == ('native', 'auto: no te here')
    can = {'te'}
    tried.clear()
    found = choose(Options(recipe='auto:mxfp8'), place)
    assert (found.backend, found.recipe) == ('te', 'mxfp8')
    assert tried == [('native', 'mxfp8'), ('te', 'mxfp8')]


def test_a_recipe_that_cannot_be_had_is_replaced_and_the_reason_told(monkeypatch):
    def problem(choice, device):
        return DeviceError('too old a GPU') if choice.recipe == 'mxfp8' else None
    for name in ('native', 'te', 'torchao'):
        monkeypatch.setattr(backends.BACKENDS[name], 'problem', problem)
    found = choose(Options(recipe='auto:mxfp8'), CUDA)
    assert (found.recipe, found.format) == ('tensorwise', 'hybrid')
    assert found.reason.endswith('; in the place of mxfp8: fp8_recipe=mxfp8: too old a GPU')
    off = choose(Options(recipe='auto:mxfp8'), HERE)
    assert not off.on
    assert 'no CUDA GPU' in off.reason


def test_only_what_there_is_can_be_asked_for():
    for options in ({'backend': 'auto:emulate'}, {'recipe': 'auto:row'}, {'backend': 'te:auto'}):
        with pytest.raises(OptionError, match='is one of auto, '):
            choose(Options(**options), CUDA)


FP32 = {'dtype': torch.float32}
TE_NEEDS_CUDA = 'fp8_backend=te: Transformer Engine needs a CUDA GPU'
TE_ROWWISE = 'fp8_backend=te fp8_recipe=rowwise: Transformer Engine has no rowwise recipe'
TE_MARGIN = '--fp8_backend=te --fp8_recipe=delayed --fp8_margin=1'
NO_GPU = 'fp8_recipe=rowwise: there is no CUDA GPU, and a CPU only emulates FP8'


ORDERS = [
    ({'backend': 'te'}, {}, DeviceError, TE_NEEDS_CUDA),
    ({'backend': 'te', 'recipe': 'rowwise'}, {}, OptionError, TE_ROWWISE),
    ({'backend': 'te', 'format': 'e5m2'}, {}, OptionError, '--fp8_format=hybrid'),
    ({'backend': 'te', 'margin': 1}, {}, OptionError, TE_MARGIN),
    ({'backend': 'te', 'recipe': 'delayed', 'margin': 1}, {}, DeviceError, 'needs a CUDA GPU'),
    ({'backend': 'torchao', 'recipe': 'delayed'}, {}, OptionError, 'torchao has no delayed recipe'),
    ({'backend': 'torchao', 'recipe': 'blockwise'}, {}, OptionError, 'torchao has no blockwise recipe'),
    ({'backend': 'torchao', 'format': 'e5m2'}, {}, OptionError, '--fp8_format=hybrid'),
    ({'backend': 'torchao', 'margin': 1}, {}, OptionError, 'torchao has no margin'),
    ({'backend': 'native', 'recipe': 'blockwise'}, {}, DeviceError, '--fp8_backend=emulate has blockwise'),
    ({'backend': 'native', 'recipe': 'mxfp8'}, {}, DeviceError, '--fp8_backend=emulate has mxfp8'),
    ({'recipe': 'rowwise'}, {}, DeviceError, NO_GPU),
    ({'backend': 'fp8'}, {}, OptionError, 'fp8_backend is one of'),
    ({'recipe': 'row'}, {}, OptionError, 'fp8_recipe is one of'),
    ({'format': 'e3m4'}, {}, OptionError, 'fp8_format is one of'),
    ({'backend': 'native', 'interval': 4}, {}, OptionError, '--fp8_recipe=delayed does'),
    ({'backend': 'native', 'amax_history': 16}, {}, OptionError, 'fp8_recipe=delayed'),
    ({'use_fp8': False, 'backend': 'native'}, {}, OptionError, 'use_fp8 is off, but fp8_backend=native'),
    ({'backend': 'native'}, FP32, OptionError, 'fp8_backend=native: FP8 needs dtype=bf16'),
    ({'backend': 'emulate'}, {'tokens': 1000}, OptionError, 'fp8_backend=emulate: .* not a multiple of 16'),
    ({'backend': 'emulate', 'recipe': 'blockwise'}, {'tokens': 64}, OptionError, 'not a multiple of 128'),
]


def test_orders_run_or_raise():
    for options, place, error, message in ORDERS:
        with pytest.raises(error, match=message) as refusal:
            choose(Options(**options), dataclasses.replace(HERE, **place))
        assert '\n' not in str(refusal.value)


def test_every_cell_that_a_cpu_has_is_chosen():
    choices = [on_a_cpu(*cell) for cell in ON_A_CPU]
    assert [(choice.backend, choice.recipe) for choice in choices] == ON_A_CPU


def test_the_recipe_brings_its_format():
    assert on_a_cpu('native').format == 'hybrid'
    assert on_a_cpu('emulate', 'rowwise').format == 'e4m3'
    assert on_a_cpu('emulate', 'rowwise', format='hybrid').format == 'hybrid'


def test_no_fp8_over_a_config_that_names_a_recipe():
    assert choose(Options(use_fp8=False, recipe='rowwise'), HERE) == fp8.OFF


def test_options_are_read_from_settings():
    settings = {'seed': 1, 'fp8_backend': 'native', 'fp8_margin': 2, 'fp8_keep': 'h.0, mlp.down'}
    assert Options.of(settings) == Options(backend='native', margin=2, keep=('h.0', 'mlp.down'))
    assert Options.of({'fp8_keep': 'auto'}) == Options()


def test_missing_packages_name_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torchao.float8', None)
    with pytest.raises(DeviceError, match='pip install torchao'):
        on_a_cpu('torchao', 'tensorwise')
    monkeypatch.setitem(sys.modules, 'transformer_engine', None)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: (9, 0))
    with pytest.raises(DeviceError, match='pip install --no-build-isolation -r requirements-te.txt'):
        choose(Options(backend='te'), CUDA)


# ----------------------------------------------------------------------------- what a machine turns out to do

@pytest.fixture
def trials():
    """None that were made on another machine."""
    backends.trial.cache_clear()
    yield
    backends.trial.cache_clear()


def broken(*args, **kwargs):
    raise RuntimeError('only per-tensor scaling')


def test_a_multiplication_that_a_cpu_does_not_have_is_refused(monkeypatch, trials):
    """As torch 2.11's, which has no scales for rows."""
    monkeypatch.setattr(torch, '_scaled_mm', broken)
    with pytest.raises(DeviceError, match='only per-tensor scaling; --fp8_backend=emulate has rowwise'):
        on_a_cpu('native', 'rowwise')


@pytest.mark.parametrize('backend', ['native', 'torchao'])
@pytest.mark.parametrize('wrong, message', [
    (broken, 'failed here: only per-tensor scaling; --fp8_backend=emulate has rowwise'),
    (lambda x, weight: x @ weight, 'off by'),                                       # W for W^T
    (lambda x, weight: x @ weight.t() + 0 * weight.sum().log(), 'off by nan'),      # backward is NaN
], ids=['raises', 'another', 'backward'])
def test_a_linear_that_comes_out_wrong_is_refused(backend, wrong, message, monkeypatch, trials):
    class Wrong(torch.nn.Linear):
        def forward(self, x):
            return wrong(x, self.weight.to(x.dtype))
    monkeypatch.setattr(backends.BACKENDS[backend], 'linear', lambda choice, *shape: Wrong(*shape))
    with pytest.raises(DeviceError, match=f'an FP8 matrix multiplication .*{message}'):
        on_a_cpu(backend, 'rowwise')


def test_a_margin_does_not_fail_the_trial(trials):
    assert on_a_cpu('native', margin=30).margin == 30


@pytest.fixture
def pretend_cuda(monkeypatch, trials):
    """A GPU whose matrix multiplications a CPU does; returns a function that sets its capability."""
    real, here = torch.randn, torch.Generator
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda d: 'Test GPU')
    monkeypatch.setattr(torch, 'randn', lambda *a, device, generator: real(*a))
    monkeypatch.setattr(torch, 'Generator', lambda d=None: here())
    return lambda *capability: monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: capability)


@pytest.mark.parametrize('capability, gemm, compiling, te, backend, reason', [
    ((8, 0), True, True, 'not installed', 'off', 'sm_80'),
    ((9, 0), False, True, 'not installed', 'torchao', 'failed here'),
    ((9, 0), True, True, None, 'native', 'fuses'),
    ((9, 0), True, False, None, 'te', 'kernels'),
    ((9, 0), True, False, 'not installed', 'native', 'not installed'),
])
def test_auto_on_cuda(monkeypatch, pretend_cuda, capability, gemm, compiling, te, backend, reason):
    pretend_cuda(*capability)
    monkeypatch.setattr(backends.TransformerEngine, 'problem', lambda *a: te and DeviceError(te))
    if not gemm:
        monkeypatch.setattr(torch, '_scaled_mm', broken)
    choice = choose(Options(), dataclasses.replace(CUDA, compiling=compiling))
    assert choice.backend == backend
    assert reason in choice.reason


@pytest.mark.parametrize('backend', ['native', 'torchao'])
def test_mxfp8_needs_blackwell(pretend_cuda, backend):
    pretend_cuda(9, 0)
    with pytest.raises(DeviceError, match='sm_100'):
        choose(Options(backend=backend, recipe='mxfp8'), CUDA)


def test_a_recipe_is_tried_before_it_runs(pretend_cuda):
    pretend_cuda(9, 0)
    failed = 'fp8_recipe=blockwise: an FP8 matrix multiplication failed here'  # a CPU has no such kernel
    with pytest.raises(DeviceError, match=failed):
        choose(Options(backend='native', recipe='blockwise'), CUDA)


# ---------------------------------------------------------------------- a recipe is a row, a backend a block

def test_a_new_recipe_is_a_row(monkeypatch):
    """e4m3 throughout in blocks of 64 x 64: every backend that multiplies by itself has it."""
    row = Recipe((64, 64), (64, 64), (64, 64), multiple=64, format='e4m3')
    monkeypatch.setitem(RECIPES, 'tiles', row)
    monkeypatch.setattr(backends.Backend, 'recipes', tuple(RECIPES))
    choice = on_a_cpu('emulate', 'tiles')
    assert choice.format == 'e4m3'
    with pytest.raises(OptionError, match='torchao has no tiles recipe.*--fp8_backend=.*emulate'):
        on_a_cpu('torchao', 'tiles')
    with pytest.raises(OptionError, match='no kernel for a scale of 64 x 64 values'):
        on_a_cpu('native', 'tiles')
    with pytest.raises(OptionError, match='not a multiple of 64'):
        choose(Options(backend='emulate', recipe='tiles'), Place(CPU, tokens=96))
    linear = fp8.make_linear(choice, 128, 64, False)
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.float() @ linear.weight.t()
    assert 1e-3 < (linear(x).float() - exact).norm() / exact.norm() < 0.1


def test_a_new_backend_is_a_block(monkeypatch):
    class Rounded(backends.Backend):
        title = 'rounded'
        recipes = ('tensorwise',)

        def problem(self, choice, device):
            return DeviceError('it needs a CPU') if device.type != 'cpu' else None

        def linear(self, choice, in_features, out_features, bias):
            return torch.nn.Linear(in_features, out_features, bias, dtype=torch.bfloat16)

    monkeypatch.setitem(backends.BACKENDS, 'rounded', Rounded())
    choice = choose(Options(backend='rounded'), HERE)
    assert choice.reason.startswith('as ordered')
    assert fp8.make_linear(choice, 16, 16).weight.dtype == torch.bfloat16
    with pytest.raises(OptionError, match='rounded has no rowwise recipe, only tensorwise'):
        choose(Options(backend='rounded', recipe='rowwise'), HERE)
    with pytest.raises(DeviceError, match='fp8_backend=rounded: it needs a CPU'):
        choose(Options(backend='rounded'), CUDA)
    assert not choose(Options(), HERE).on  # auto does not come upon it
