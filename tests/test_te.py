"""What must be right around Transformer Engine, by a stand-in of its shape: its kernels need a GPU."""
import contextlib
import sys
import types

import pytest
import torch
import torch.nn as nn

import fp8
import linears
from fp8 import Choice, linear_factory
from model import GPT, Linear
from optim import make_optimizer
from test_fp8 import NATIVE, SMALL, WIDE, trained


@pytest.fixture
def stand_in_te(monkeypatch):
    """A module of Transformer Engine's shape, its cache of cast weights included. Yields the calls it sees."""
    calls, depth = [], []

    class StraightThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight, cached):
            return cached.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.float(), None

    class TheirLinear(nn.Linear):
        cached = None

        def get_extra_state(self):
            return torch.zeros(3)

        def set_extra_state(self, state):
            pass

        def forward(self, x, is_first_microbatch=None):
            assert depth, 'outside te.autocast'
            calls.append(('forward', x.dtype, is_first_microbatch))
            if is_first_microbatch is not False:
                self.cached = self.weight.detach().to(x.dtype)
            return nn.functional.linear(x, StraightThrough.apply(self.weight, self.cached), self.bias.to(x.dtype))

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        calls.append(('autocast', enabled, recipe))
        depth.append(1)
        yield
        depth.pop()

    names = ['transformer_engine', 'transformer_engine.pytorch', 'transformer_engine.pytorch.quantization', 'transformer_engine.common', 'transformer_engine.common.recipe']
    modules = {name: types.ModuleType(name) for name in names}
    te, manager, recipe = modules[names[1]], modules[names[2]], modules[names[4]]
    te.Linear, te.autocast, te.checkpoint = TheirLinear, autocast, lambda block, *a, use_reentrant: calls.append(('checkpoint',)) or block(*a)
    manager.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: bool(depth), reset=lambda: None)
    recipe.Format = types.SimpleNamespace(HYBRID='hybrid', E4M3='e4m3')
    for name in linears.TE_RECIPES.values():
        setattr(recipe, name, lambda name=name, **settings: (name, *settings.values()))
    modules[names[0]].pytorch, modules[names[3]].recipe = te, recipe
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    linears._te_class.cache_clear()
    linears._te_recipe.cache_clear()
    yield calls
    linears._te_class.cache_clear()
    linears._te_recipe.cache_clear()


@pytest.mark.filterwarnings('ignore:.*CUDA is not available')
@pytest.mark.parametrize('choice, recipe', [
    (Choice('te', 'test'), ('Float8CurrentScaling', 'hybrid')), (Choice('te', 'test', 'blockwise', 'e4m3'), ('Float8BlockScaling', 'e4m3')),
    (Choice('te', 'test', 'delayed', margin=2, amax_history=16), ('DelayedScaling', 'hybrid', 2, 16))])
def test_te_slot(stand_in_te, choice, recipe):
    config = WIDE if choice.recipe == 'blockwise' else SMALL
    model, plain = GPT(config, linear_factory(choice, Linear)), GPT(config)
    assert '8 of 9 linears, te' in fp8.summary(model, choice)
    assert model.state_dict().keys() == plain.state_dict().keys() and all(torch.equal(a, b) for a, b in zip(model.weights().values(), plain.weights().values()))
    model.load_state_dict(plain.state_dict())
    model(torch.zeros((1, 16), dtype=torch.long))  # without State, each linear opens te.autocast by itself
    assert stand_in_te[:2] == [('autocast', True, recipe), ('forward', torch.bfloat16, None)] and len(stand_in_te) == 16
    state = fp8.State(model, choice)
    assert state.caches and not state.warning and state.needs_calibration == (choice.recipe == 'delayed')
    idx = torch.zeros((1, 16), dtype=torch.long)
    state.calibrate(lambda: model(idx))
    stand_in_te.clear()
    with fp8.paused():
        assert torch.equal(model(idx), plain(idx)) and not stand_in_te
    for number in range(2):
        state.micro_step(number, 2)
        assert torch.equal(model(idx), plain(idx))  # the stand-in multiplies in bf16
    assert stand_in_te[:2] == [('autocast', True, recipe), ('forward', torch.bfloat16, True)] and len(stand_in_te) == 18
    assert [first for kind, *_, first in stand_in_te if kind == 'forward'] == [True] * 8 + [False] * 8
    state.after_step()
    assert linears.first_micro_step is None
    make_optimizer(model, (0.9, 0.95), 0.1)


@pytest.mark.filterwarnings('ignore:.*CUDA is not available')
def test_te_over_micro_steps_trains_on_fresh_weights(stand_in_te):
    """The cached weights of a step are its own: accumulation gives what one large batch does."""
    choice = Choice('te', 'test')
    assert torch.equal(trained(choice, micro_steps=4), trained(Choice('off', ''), micro_steps=4))
    model = GPT(SMALL, linear_factory(choice, Linear), checkpoint_every=1)
    model.checkpoint = fp8.checkpointer(choice)
    stand_in_te.clear()
    idx = torch.zeros((1, 16), dtype=torch.long)
    model(idx, idx)
    assert stand_in_te.count(('checkpoint',)) == 2


@pytest.mark.filterwarnings('ignore:.*CUDA is not available')
def test_te_with_a_stale_cache_is_told(stand_in_te, monkeypatch):
    class Stale(sys.modules['transformer_engine.pytorch'].Linear):
        def forward(self, x, is_first_microbatch=None):
            return super().forward(x, False if self.cached is not None else is_first_microbatch)
    sys.modules['transformer_engine.pytorch'].Linear = Stale
    choice = Choice('te', 'test', interval=4)
    state = fp8.State(GPT(SMALL, linear_factory(choice, Linear)), choice)
    assert not state.caches and 'does not refresh' in state.warning
    state.micro_step(0, 4)
    assert linears.first_micro_step is None


def test_te_turns_auto_compile_off_before_torch_can(monkeypatch):
    te = Choice('te', '')
    monkeypatch.setattr(torch, '__version__', '2.13.0+cu130')
    assert fp8.compiles(te, True, 'auto') == (False, fp8.compiles(te, True, 'auto')[1]) and 'compile is off' in fp8.compiles(te, True, 'auto')[1]
    assert fp8.compiles(te, True, 'on')[0] and '--compile=off is faster' in fp8.compiles(te, True, 'on')[1]
    assert fp8.compiles(NATIVE, True, 'auto') == (True, None) and fp8.compiles(te, False, 'off') == (False, None)
    monkeypatch.setattr(torch, '__version__', '2.14.0')
    assert fp8.compiles(te, True, 'auto') == (True, None)
