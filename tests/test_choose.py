"""Which backend runs, and what is refused, without a GPU."""
import dataclasses
import sys

import pytest
import torch

from fp8_models import CPU, ON_A_CPU, on_a_cpu
from fp8gpt.fp8 import Options, Place, backends, choose, paused, summary
from fp8gpt.fp8.linear import DeviceError, Float8Tensor, OptionError

HERE = Place(CPU, tokens=1024)
CUDA = Place(torch.device('cuda'), tokens=1024)
COMPILED = {'device': CUDA.device, 'compiling': True}


def test_requests_become_bf16_with_a_reason():
    for options, place, reason in (
            ({}, HERE, 'no CUDA GPU'),
            ({'backend': 'off'}, HERE, 'by --no_fp8'),
            ({'use_fp8': False, 'recipe': 'rowwise'}, HERE, 'by --no_fp8'),
            ({'recipe': 'auto:mxfp8'}, HERE, 'no CUDA GPU'),
            ({'recipe': 'auto:delayed'}, HERE, 'no CUDA GPU'),
            ({}, dataclasses.replace(CUDA, dtype=torch.float32), 'needs dtype=bf16')):
        choice = choose(Options(**options), place)
        assert (choice.on, reason in choice.reason) == (False, True)


def test_the_first_backend_that_can_runs(monkeypatch):
    tried = []
    for name in ('native', 'te', 'torchao'):
        def lacks(choice, device, name=name):
            tried.append((name, choice.recipe))
            return None if (name, choice.recipe) in can else f'no {name} here'
        monkeypatch.setattr(backends.BACKENDS[name], 'lacks', lacks)
    for options, compiling, able, backend, recipe, *instead in (
            ({}, True, 'native te', 'native', 'tensorwise'),
            ({}, False, 'native te', 'te', 'tensorwise'),
            ({}, False, 'native', 'native', 'tensorwise', ', not te: no te here'),
            ({'backend': 'auto:te'}, True, 'native te', 'te', 'tensorwise'),
            ({'backend': 'auto:te'}, True, 'native', 'native', 'tensorwise',
             ', not te: no te here'),
            ({'recipe': 'auto:mxfp8'}, True, 'mxfp8', 'te', 'mxfp8',
             ', not native: no native here'),
            ({'recipe': 'auto:mxfp8'}, True, 'native', 'native', 'tensorwise',
             ', not mxfp8: no native here'),
            ({'recipe': 'auto:delayed'}, True, 'native', 'native', 'tensorwise',
             ', not delayed: no native here'),
            ({'backend': 'auto:te', 'recipe': 'auto:mxfp8'}, True, 'native', 'native', 'tensorwise',
             ', not te: no te here, not mxfp8: no native here'),
            ({'recipe': 'delayed'}, True, 'delayed', 'te', 'delayed',
             ', not native: no native here')):
        can = {(name, 'tensorwise') for name in able.split()} | {('te', able)}
        found = choose(Options(**options), dataclasses.replace(CUDA, compiling=compiling))
        assert (found.backend, found.recipe, found.reason) == (backend, recipe, 'auto')
        assert found.instead == ''.join(instead)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16))
        model[0].bf16_reason = None     # as a converted one's
        line = summary(model, found).splitlines()[0]
        assert line == f'FP8 Training Enabled: 1 of 1 linears, {recipe} ({backend}){found.instead}'
    assert tried[:3] == [('native', 'tensorwise'), ('te', 'tensorwise'), ('te', 'tensorwise')]


def test_kernels_are_our_own_where_they_serve_a_compiled_model_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backends.Native, 'lacks', lambda *_: None)
    for options, compiling, kernels in (
            ({}, True, 'triton'), ({}, False, 'auto'), ({'kernels': 'inductor'}, True, 'inductor'),
            ({'recipe': 'delayed'}, True, 'triton'), ({'recipe': 'delayed'}, False, 'auto'),
            ({'recipe': 'rowwise'}, True, 'auto'), ({'format': 'e5m2'}, True, 'auto'),
            ({'lora_rank': 4}, True, 'auto'), ({'sharded': True}, True, 'triton')):
        place = dataclasses.replace(CUDA, compiling=compiling)
        assert choose(Options(backend='native', **options), place).kernels == kernels, options
    assert choose(Options(backend='native'), dataclasses.replace(HERE, compiling=True)).kernels == 'auto'


ORDERS = [
    ({'backend': 'te'}, {}, DeviceError, 'fp8_backend=te: te does not take device=cpu, only cuda; '),
    ({'backend': 'te', 'recipe': 'rowwise'}, {}, OptionError,
     'fp8_backend=te fp8_recipe=rowwise: te does not take .*, mxfp8; --fp8_backend=native$'),
    ({'backend': 'te', 'format': 'e5m2'}, {}, OptionError, 'format=e5m2, only hybrid, e4m3; '),
    ({'backend': 'te', 'margin': 1}, {}, OptionError, 'margin=1 with tensorwise, only delayed'),
    ({'backend': 'te', 'recipe': 'delayed', 'interval': 4}, {}, OptionError,
     'interval=4 with delayed; --fp8_backend=native$'),
    ({'backend': 'torchao', 'recipe': 'delayed'}, {}, OptionError,
     'torchao does not take recipe=delayed, .*; --fp8_backend=native$'),
    ({'recipe': 'rowwise'}, {}, DeviceError,
     'fp8_recipe=rowwise: there is no CUDA GPU, and a CPU only emulates FP8'),
    ({'backend': 'emulate'}, {'device': torch.device('mps')}, DeviceError,
     'fp8_backend=emulate: emulate does not take device=mps, only cuda, cpu$'),
    ({'backend': 'fp8'}, {}, OptionError, 'fp8_backend is one of auto, '),
    ({'backend': 'native', 'recipe': 'delayed', 'interval': 0}, {}, OptionError, 'interval is from 1 to'),
    ({'backend': 'native', 'recipe': 'delayed', 'amax_history': 1.5}, {}, OptionError, 'type int, not 1.5'),
    ({'backend': 'native', 'margin': 2000}, {}, OptionError, 'from 0 to 16'),
    ({'backend': 'native', 'use_fp8': 'no'}, {}, OptionError, "use_fp8 is of type bool, not 'no'"),
    ({'backend': 'native', 'keep': 'h.0'}, {}, OptionError, "keep is of type tuple, not 'h.0'"),
    ({'backend': 'native', 'interval': 4}, {}, OptionError, 'interval=4 with tensorwise, only delayed$'),
    ({'use_fp8': False, 'backend': 'native'}, {}, OptionError, 'use_fp8 is off, but fp8_backend=native'),
    ({'backend': 'native'}, {'dtype': torch.float32, 'device': torch.device('cuda')}, OptionError,
     'fp8_backend=native: FP8 needs dtype=bf16'),
    ({'backend': 'native', 'kernels': 'triton', 'lora_rank': 4}, {}, OptionError, 'without lora_rank'),
    ({'backend': 'emulate', 'kernels': 'triton'}, {}, OptionError, 'is for native.s tensorwise'),
    ({'backend': 'native', 'format': 'e5m2', 'kernels': 'triton'}, {}, OptionError, 'in hybrid or e4m3'),
    ({'backend': 'native', 'recipe': 'delayed', 'kernels': 'inductor'}, COMPILED, OptionError,
     'byte by byte: --fp8_recipe=tensorwise, or fp8_kernels=triton'),
    ({'backend': 'native', 'recipe': 'delayed', 'lora_rank': 4}, COMPILED, OptionError,
     'byte by byte: .* without lora_rank$'),
    ({'backend': 'te', 'sharded': True}, {}, OptionError, '--fp8_backend=native'),
    ({'backend': 'torchao', 'lora_rank': 4}, {}, OptionError, 'torchao: .* lora_rank=4 with tensorwise; '),
]


def test_orders_run_or_raise():
    for options, place, error, message in ORDERS:
        with pytest.raises(error, match=message) as refusal:
            choose(Options(**options), dataclasses.replace(HERE, **place))
        assert '\n' not in str(refusal.value)
    for recipe, multiple in {'blockwise': 128, 'mxfp8': 32, 'rowwise': 16}.items():
        options = Options(backend='emulate', recipe=recipe)
        assert choose(options, dataclasses.replace(HERE, tokens=3 * multiple)).on
        with pytest.raises(OptionError, match=f'not a multiple of {multiple}$'):
            choose(options, dataclasses.replace(HERE, tokens=3 * multiple + multiple // 2))
    choices = [on_a_cpu(*cell) for cell in ON_A_CPU]
    assert [(choice.backend, choice.recipe) for choice in choices] == ON_A_CPU


def test_options_are_read_from_settings_and_a_recipe_brings_its_format():
    settings = {'seed': 1, 'fp8_backend': 'native', 'fp8_margin': 2, 'fp8_keep': 'h.0, mlp.down'}
    assert Options.of(settings) == Options(backend='native', margin=2, keep=('h.0', 'mlp.down'))
    for recipe, format, expected in (
            ('auto', 'auto', 'hybrid'), ('rowwise', 'auto', 'e4m3'), ('rowwise', 'hybrid', 'hybrid')):
        assert on_a_cpu('emulate', recipe, format=format).format == expected


def test_missing_packages_name_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, 'torchao.float8', None)
    monkeypatch.setitem(sys.modules, 'transformer_engine', None)
    for backend, place, line in (('torchao', HERE, 'pip install torchao'), (
            'te', CUDA, 'pip install --no-build-isolation -r requirements-te.txt')):
        with pytest.raises(DeviceError, match=line):
            choose(Options(backend=backend), place)


@pytest.fixture
def trials():
    """No trials that were made on another machine."""
    backends.trial.cache_clear()
    yield
    backends.trial.cache_clear()


def broken(*args, **kwargs):
    raise RuntimeError('only per-tensor scaling')


def backward_scaled(y, factor):
    return y.detach() * (1 - factor) + y * factor


def test_a_linear_that_comes_out_wrong_is_refused(monkeypatch, trials):
    class Wrong(torch.nn.Linear):
        def forward(self, x):
            return self.compute(x, self.weight.to(x.dtype))
    monkeypatch.setattr(backends.BACKENDS['native'], 'linear', lambda choice, *shape: Wrong(*shape))
    for compute, message in (
            (broken, 'failed here: only per-tensor scaling; '),
            (lambda x, weight: x @ weight, 'off by'),                                       # W for W^T
            (lambda x, weight: 0 * (x @ weight.t()), 'off by 100%'),
            (lambda x, weight: 0.85 * (x @ weight.t()), 'off by 15%'),
            (lambda x, weight: backward_scaled(x @ weight.t(), 0.85), 'off by 15%'),
            (lambda x, weight: x @ weight.t() + (0 * weight).sum().sqrt(), 'off by nan')):  # backward is NaN
        Wrong.compute = staticmethod(compute)
        backends.trial.cache_clear()
        with pytest.raises(DeviceError, match=f'an FP8 matrix multiplication .*{message}'):
            on_a_cpu('native', 'rowwise')
    monkeypatch.undo()
    assert on_a_cpu('native', margin=16).options.margin == 16       # no margin fails the trial


@pytest.mark.parametrize('within', [
    torch.no_grad, torch.inference_mode, lambda: torch.device('meta'), paused])
def test_the_trial_is_the_same_wherever_it_is_called(within, monkeypatch, trials):
    def zeros(*operands, **how):
        return 0 * backends.native_mm(*operands, **how)
    backends.trial.cache_clear()
    with within():
        assert on_a_cpu('native', 'delayed').on
    monkeypatch.setattr(backends.Native, 'mm', staticmethod(zeros))
    backends.trial.cache_clear()
    with within(), pytest.raises(DeviceError, match='off by 100%'):
        on_a_cpu('native', 'delayed')


@pytest.fixture
def gpu(monkeypatch, trials):
    """gpu(capability, gemm): from now on a GPU whose matrix multiplications a CPU does, by `gemm`."""
    pytest.importorskip('torchao.float8')   # now: what it imports reads what is patched below
    real = torch.randn
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda d: 'Test GPU')
    monkeypatch.setattr(torch, 'randn', lambda *a, device, **options: real(*a, **options))

    def set_up(capability, gemm):
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda d: capability)
        monkeypatch.setattr(torch, '_scaled_mm', gemm)
        monkeypatch.setattr(backends.Native, 'mm', staticmethod(backends.gpu_mm))
        backends.trial.cache_clear()
    return set_up


COMPILING = Place(**COMPILED, tokens=1024)
SCALED_MM = torch._scaled_mm


def test_auto_on_cuda(monkeypatch, gpu):
    monkeypatch.setattr(backends.TransformerEngine, 'lacks', lambda *_: 'not installed')
    for options, capability, gemm, backend, reason in (
            ({}, (8, 0), SCALED_MM, 'off',
             'the recipe tensorwise needs a GPU of sm_89 or later; Test GPU is sm_80: --no_fp8'),
            ({}, (9, 0), broken, 'torchao', 'failed here'),
            ({}, (9, 0), SCALED_MM, 'native', 'auto'),
            ({'recipe': 'auto:mxfp8'}, (9, 0), SCALED_MM, 'native', 'sm_100')):
        gpu(capability, gemm)
        choice = choose(Options(**options), COMPILING)
        assert (choice.backend, reason in choice.reason + choice.instead) == (backend, True), choice


def blocks_of_32(a, b, scale_a, scale_b, out_dtype, **options):
    """torch._scaled_mm_v2 for mxfp8, of scales in cuBLAS's layout: tiles of 128 rows x 4 scales."""
    def values(x, scales):
        tiles = scales.float().view(len(x) // 128, -1, 32, 4, 4).permute(0, 3, 2, 1, 4)
        return Float8Tensor(x, tiles.reshape(len(x), -1), (1, 32)).dequantize()
    return (values(a, *scale_a) @ values(b.t(), *scale_b).t()).to(out_dtype)


def any_scales(a, b, scale_a, scale_b, out_dtype, **others):
    """torch._scaled_mm's product, also by rows, which torch 2.11 does not have on a CPU."""
    return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)


def test_on_sm_120_the_trial_decides(monkeypatch, gpu):
    def per_tensor(*args, scale_a, **kwargs):
        return SCALED_MM(*args, scale_a=scale_a, **kwargs) if scale_a.numel() == 1 else broken()
    monkeypatch.setattr(backends.TransformerEngine, 'lacks', lambda *_: 'not installed')
    monkeypatch.setattr(torch, '_scaled_mm_v2', broken)
    gpu((12, 0), per_tensor)
    assert choose(Options(), COMPILING).recipe == 'tensorwise'
    for recipe, message in (
            ('rowwise', 'failed here: only .* on sm_120: pytorch/pytorch#192707.; --fp8_recipe=tensorwise'),
            ('rowwise_gw_hp', 'pytorch/pytorch#192707.; --fp8_recipe=tensorwise'),
            ('mxfp8', 'failed here: only per-tensor scaling; --fp8_recipe=tensorwise')):
        with pytest.raises(DeviceError, match=message):
            choose(Options(backend='native', recipe=recipe), COMPILING)
    gpu((12, 0), any_scales)
    monkeypatch.setattr(torch, '_scaled_mm_v2', blocks_of_32)
    for recipe in 'rowwise', 'auto:mxfp8':      # with a cuBLAS that has them
        choice = choose(Options(recipe=recipe), CUDA)
        assert (choice.backend, choice.recipe) == ('native', recipe.removeprefix('auto:'))
