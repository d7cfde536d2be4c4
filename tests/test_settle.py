"""Which precision a run settles on: linears that come out wrong are found, layers that lose time are kept."""
import dataclasses
import functools
import json
import math

import pytest
import torch

from fp8gpt.fp8 import backends
from fp8gpt import fp8
from fp8gpt import settle
from fp8gpt.fp8.linear import DeviceError
from conftest import ROOT, in_ranks
from fp8gpt.fp8 import Choice, linear_factory
from fp8_models import CPU, NATIVE
from helpers import spied
from model import GPT, GPTConfig, Linear

CONFIG = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=2, n_embd=64)
DELAYED = dataclasses.replace(NATIVE, recipe='delayed')


def block_run(device='cuda', batch_size=2, **fields):
    plain = {'choice': NATIVE, 'compiled': False, 'bf16_compiled': False, **fields}
    return settle.BlockRun(CONFIG, batch_size=batch_size, device=torch.device(device), **plain)


# ------------------------------------------------------------------------------------------------ is it right

CHOICES = [
    NATIVE,
    DELAYED,
    Choice(backend='emulate', recipe='blockwise', format='e4m3'),
    Choice(backend='torchao', recipe='tensorwise'),
]


def harmed(monkeypatch, compiled):
    """torch.compile by `compiled`, function -> function; a list of what befalls its results: calls -> an
    output."""
    harm = []

    def compile(function, dynamic):
        inner, calls = compiled(function), []

        def call(*inputs):
            calls.append(inputs)
            y = inner(*inputs)
            for befall in harm:
                y = befall(len(calls), y)
            return y
        return call
    monkeypatch.setattr(torch, 'compile', compile)
    return harm


@pytest.fixture
def compiler(monkeypatch):
    """torch.compile without Inductor, harmed."""
    return harmed(monkeypatch, functools.partial(torch.compile, backend='aot_eager', dynamic=False))


@pytest.fixture
def eager_compiler(monkeypatch):
    """torch.compile that compiles nothing, harmed."""
    return harmed(monkeypatch, lambda piece: piece)


@pytest.mark.slow
@pytest.mark.parametrize('choice', CHOICES, ids=lambda c: f'{c.backend}-{c.recipe}')
def test_linears_that_are_right_pass(choice, compiler):
    assert settle.linear_problem(block_run('cpu', choice=choice, compiled=True), 128, 256) is None


@pytest.mark.parametrize('befall', [
    lambda calls, y: y * 1.05,
    lambda calls, y: torch.where(torch.arange(64)[:, None] % 32 == 0, 0, y) if calls == 5 else y,
    lambda calls, y: y + math.nan,
    lambda calls, y: y.detach() + (y - y.detach()) * 0.9,     # the value is right, its gradients are not
], ids=['scaled', 'rows now and then', 'nan', 'backward'])
def test_a_compiled_linear_that_is_wrong_is_named(befall, eager_compiler):
    eager_compiler.append(befall)
    problem = settle.linear_problem(block_run('cpu', compiled=True), 128, 256)
    assert problem.startswith('torch.compile is off eager mode by ')
    assert ' native\'s tensorwise linear of 128 x 128 -> 256 (' in problem
    assert f'torch {torch.__version__}' in problem
    assert settle.linear_problem(block_run('cpu'), 128, 256) is None


def test_the_head_is_checked_with_its_loss(eager_compiler):
    choice = dataclasses.replace(NATIVE, head=True)
    block = block_run('cpu', choice=choice, compiled=True)
    assert settle.linear_problem(block, 128, 256, 'lm_head') is None
    eager_compiler.append(lambda calls, y: y.detach() + (y - y.detach()) * 0.9)
    problem = settle.linear_problem(block, 128, 256, 'lm_head')
    assert ' native\'s lm_head of 128 x 128 -> 256 (' in problem


def test_an_eager_linear_that_is_wrong_is_named(monkeypatch):
    def wrong(*arguments, **kwargs):
        return 1.05 * backends.native_mm(*arguments, **kwargs)
    monkeypatch.setattr(backends.Native, 'mm', staticmethod(wrong))
    problem = settle.linear_problem(block_run('cpu'), 128, 256)
    assert problem.startswith('eager mode is off emulate by ')


def test_each_shape_is_checked_once_and_a_wrong_one_ends_fp8(monkeypatch, tmp_path):
    """A request turns to bf16 and says why, an order stops."""
    shapes, wrong = [], []

    def linear_problem(block, K, N, name):
        shapes.append((K, N))
        return 'linear 64 -> 256 is off' if (K, N) in wrong else None
    monkeypatch.setattr(settle, 'linear_problem', linear_problem)
    monkeypatch.setattr(settle, 'CACHE', str(tmp_path / 'known.json'))
    wrong.append((64, 256))
    found = settle.checked(block_run('cpu'), [])
    assert (found.on, found.reason) == (False, 'linear 64 -> 256 is off')
    with pytest.raises(DeviceError, match='^fp8_recipe=rowwise: linear 64 -> 256 is off$'):
        settle.checked(block_run('cpu'), ['fp8_recipe=rowwise'])
    wrong.clear()
    shapes.clear()
    for _ in range(2):
        assert settle.checked(block_run('cpu'), []) is NATIVE
    assert shapes == [(64, 256), (256, 64)]     # 64 -> 64 and 64 -> 192 were right the first time
    settle.checked(block_run('cpu', choice=DELAYED), [])
    assert len(shapes) == 6


def test_blocks_that_are_right_pass(eager_compiler):
    for recipe, kernels in (('tensorwise', 'triton'), ('delayed', 'inductor'), ('delayed', 'triton')):
        choice = dataclasses.replace(NATIVE, recipe=recipe, kernels=kernels)
        assert settle.block_problem(block_run('cpu', choice=choice, compiled=True)) is None


@pytest.mark.parametrize('befall', [
    lambda calls, y: torch.where(torch.arange(64)[:, None] % 32 == 0, 0, y) if calls == 5 else y,
    lambda calls, y: y + math.nan,
    lambda calls, y: y.detach() + (y - y.detach()) * 0.8,     # the value is right, its gradients are not
], ids=['rows now and then', 'nan', 'backward'])
def test_a_compiled_block_that_is_wrong_is_named(befall, eager_compiler):
    eager_compiler.append(befall)
    problem = settle.block_problem(block_run('cpu', compiled=True))
    assert problem.startswith('torch.compile is off eager mode by ')
    assert ' a block of native\'s tensorwise linears, 2 x 64 x 64 (' in problem
    assert f'torch {torch.__version__}' in problem


def test_a_block_by_kernels_of_its_own_that_is_wrong_is_named(monkeypatch):
    from fp8gpt.fp8.kernels import block
    real = block.norm_backward

    def wrong(*arguments, **options):
        dx, *rest = real(*arguments, **options)
        return dx * 1.5, *rest
    monkeypatch.setattr(block, 'norm_backward', wrong)
    problem = settle.block_problem(block_run('cpu', choice=dataclasses.replace(NATIVE, kernels='triton')))
    assert problem.startswith('fp8_kernels=triton is off eager mode by ')


def test_the_block_of_a_run_is_checked_once_and_a_wrong_one_ends_fp8(monkeypatch, tmp_path):
    checked, wrong = [], ['a block is off']

    def block_problem(block):
        checked.append(block)
        return wrong[0] if wrong else None
    monkeypatch.setattr(settle, 'linear_problem', lambda *_: None)
    monkeypatch.setattr(settle, 'block_problem', block_problem)
    monkeypatch.setattr(settle, 'CACHE', str(tmp_path / 'known.json'))
    compiled = block_run('cpu', compiled=True)
    assert settle.checked(compiled, []).reason == 'a block is off'
    with pytest.raises(DeviceError, match='^fp8_recipe=rowwise: a block is off$'):
        settle.checked(compiled, ['fp8_recipe=rowwise'])
    wrong.clear()
    for _ in range(2):
        assert settle.checked(compiled, []) is NATIVE
    assert len(checked) == 3
    settle.checked(block_run('cpu', choice=dataclasses.replace(NATIVE, kernels='triton')), [])
    assert len(checked) == 4


def test_neither_compiled_nor_fused_a_block_is_its_own_reference(monkeypatch, tmp_path):
    monkeypatch.setattr(settle, 'linear_problem', lambda *_: None)
    monkeypatch.setattr(settle, 'CACHE', str(tmp_path / 'known.json'))
    assert settle.checked(block_run('cpu'), []) is NATIVE
    assert 'block' not in (tmp_path / 'known.json').read_text()


# --------------------------------------------------------------------------------------- which layers to keep

ALL = ['qkv', 'proj', 'up', 'down']


@pytest.mark.parametrize('bf16, whole, without, losing', [
    (10, 8, (8.5, 7.9, 9, 9), ['proj']),                # proj is slower in FP8 than in bf16
    (10, 8, (8.5, 8.5, 9, 9), []),
    (10, 12, (11, 11, 11.5, 11), ALL),
    (10, 10.5, (10.6, 10.6, 10.6, 10.6), ALL),          # all gain nothing, and no single one is to blame
])
def test_layers_that_do_not_gain_stay_bf16(bf16, whole, without, losing):
    times = {f'without {name}': t for name, t in zip(ALL, without)}
    assert settle.losing_layers({'in bf16': bf16, 'in fp8': whole, **times}) == losing


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Blocks are timed on a CPU by a clock by which FP8 is slower, and remembered in a folder of the test's.
    The list has an entry for each that was timed."""
    def medians(runs, times):
        for run in runs.values():
            run()
        return {name: {'in bf16': 1.0, 'in fp8': 2.0}.get(name, 1.5) for name in runs}

    timed, real = [], settle.measure_block

    def measure_block(block):
        timed.append(block)
        return real(dataclasses.replace(block, device=CPU))

    monkeypatch.setattr(settle, 'medians', medians)
    monkeypatch.setattr(settle, 'measure_block', measure_block)
    monkeypatch.setattr(settle, 'CACHE', str(tmp_path / 'deep' / 'keep.json'))
    monkeypatch.setattr(settle, 'versions', lambda: ['Test GPU'])
    return timed


def test_a_block_is_measured_once_for_each_shape(measured, capsys):
    """Where FP8 is slower, every linear ends in bf16; the second time nothing is timed."""
    first = settle.auto_keep(block_run())
    assert not first.on
    assert 'no faster in FP8' in first.reason
    assert 'without attn.qkv' in capsys.readouterr().out
    assert settle.auto_keep(block_run()) == first
    assert len(measured) == 1
    settle.auto_keep(block_run(batch_size=4))
    assert len(measured) == 2


def test_what_is_remembered_decides(measured):
    settle.auto_keep(block_run())
    with open(settle.CACHE) as file:
        known = json.load(file)
    [found] = known.values()
    assert set(found['keep']) == {'attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down'}
    assert not found['gains']
    assert min(found['seconds'].values()) > 0
    found.update(keep=['attn.proj'], gains=True)  # as if one layer alone had lost
    with open(settle.CACHE, 'w') as file:
        json.dump(known, file)
    chosen = settle.auto_keep(block_run())
    model = GPT(CONFIG, linear_factory(chosen, Linear))
    fp8.State(model, chosen)
    assert '6 of 9 linears' in fp8.summary(model, chosen)
    assert 'h.0.attn.proj, h.1.attn.proj: kept by fp8_keep' in fp8.summary(model, chosen)


def test_on_a_cpu_nothing_is_measured(measured, capsys):
    block = block_run(device='cpu')
    assert settle.auto_keep(block) == block.choice
    assert 'a CPU only emulates' in capsys.readouterr().out
    assert not measured


@pytest.mark.slow
def test_every_variant_of_a_block_is_compiled_by_itself(monkeypatch):
    """More variants than torch.compile keeps graphs of one code by default, none left to run uncompiled."""
    real = torch.compile
    monkeypatch.setattr(torch, 'compile', lambda module: real(module, backend='aot_eager', fullgraph=True))
    block = block_run('cpu', choice=DELAYED, compiled=True, bf16_compiled=True)
    times = settle.measure_block(block)['seconds']
    without = {f'without {name}' for name in ('attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down')}
    assert {'in bf16', 'in fp8', *without} <= times.keys()


@pytest.mark.parametrize('choice', [NATIVE, DELAYED], ids=lambda c: c.recipe)
def test_what_is_timed_multiplies_neither_zeros_nor_nans(choice, monkeypatch):
    spy, operands = spied(backends.native_mm)
    monkeypatch.setattr(backends.Native, 'mm', staticmethod(spy))

    def medians(runs, times):
        operands.clear()
        runs['in fp8']()
        assert len(operands) == 4 * 3 * 2
        for operand in operands:
            back = operand.dequantize()
            assert back.isfinite().all()
            assert (back != 0).float().mean() > 0.5
        return dict.fromkeys(runs, 1.0)
    monkeypatch.setattr(settle, 'medians', medians)
    settle.measure_block(block_run('cpu', choice=choice))


def test_a_block_without_scales_is_not_timed(monkeypatch):
    monkeypatch.setattr(fp8.State, 'calibrate', lambda *_: None)
    with pytest.raises(DeviceError, match='attn.qkv, whose input has amax .* and scale 0.0; --fp8_keep='):
        settle.measure_block(block_run('cpu', choice=DELAYED))


@pytest.mark.parametrize('figures', [{'amax': 0.0}, {'amax': math.inf}, {'scale': math.nan}])
def test_operands_that_are_zero_or_not_finite_are_refused(figures):
    row = {'layer': 'mlp.up', 'tensor': 'grad', 'amax': 1.0, 'scale': 448.0}
    settle.check_operands([row])
    with pytest.raises(DeviceError, match='mlp.up'):
        settle.check_operands([row, {**row, **figures}])


TWO_RANKS = """
import dataclasses
import sys
sys.path[:0] = {paths!r}
import torch, torch.distributed as dist
from fp8gpt import distributed, settle
from test_settle import DELAYED, block_run
ranks = distributed.init('cpu')

def medians(runs, times):
    for run in runs.values():
        run()
        dist.all_reduce(torch.ones(1))      # as Transformer Engine does at the end of each pass
    times = {{'in bf16': 2.0, 'in fp8': 1.5, 'without attn.proj': 1.4 + ranks.rank}}
    return {{name: times.get(name, 1.8) for name in runs}}

real = settle.measure_block
settle.medians = medians
settle.measure_block = lambda block: real(dataclasses.replace(block, device=torch.device('cpu')))
settle.CACHE = f'{folder}/{{ranks.rank}}.json'
settle.versions = lambda: ['Test GPU']
for _ in range(2):
    chosen = settle.auto_keep(block_run(choice=DELAYED))
    with open(f'{folder}/found{{ranks.rank}}', 'a') as file:
        print(chosen.keep, file=file)
distributed.leave()
"""


def test_ranks_measure_together_and_take_rank_0s_word(tmp_path):
    """Each by its own clock, by which another layer loses; what rank 0 remembers, no rank measures again."""
    script = tmp_path / 'script.py'
    script.write_text(TWO_RANKS.format(paths=[str(ROOT), str(ROOT / 'tests')], folder=tmp_path))
    out = in_ranks(2, script).stdout
    assert out.count('fp8_keep=auto: a block takes') == 2
    for rank in range(2):
        assert (tmp_path / f'found{rank}').read_text() == "('attn.proj',)\n" * 2
    assert (tmp_path / '0.json').exists()
    assert not (tmp_path / '1.json').exists()
