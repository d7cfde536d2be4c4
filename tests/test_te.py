"""What must be right around Transformer Engine, by a stand-in of its shape: its kernels need a GPU."""
import contextlib
import sys
import types

import pytest
import torch
import torch.nn as nn

from fp8_models import NATIVE, SMALL, WIDE
from fp8gpt import fp8
from fp8gpt.fp8 import Choice, Options, backends, linear_factory
from model import GPT, Linear

TE = Choice(backend='te')
ENGINE = 'transformer_engine'
IDX = torch.zeros((8, 16), dtype=torch.long)     # 128 tokens, of which blockwise takes multiples
pytestmark = pytest.mark.filterwarnings('ignore:.*CUDA is not available')


@pytest.fixture
def stand_in_te(monkeypatch):
    """A module of Transformer Engine's shape, without FP8. Yields the calls seen."""
    calls, casts, depth = [], [], []
    monkeypatch.setattr('model.NO_BF16_UNITS', False)  # the bf16 beside it multiplies as it does

    class TheirLinear(nn.Linear):
        def get_extra_state(self):
            return torch.zeros(3)

        def set_extra_state(self, state):
            pass

        def forward(self, x, is_first_microbatch):
            assert depth, 'outside te.autocast'
            calls.append(('forward', x.dtype))
            casts.append(is_first_microbatch)
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        calls.append(('autocast', enabled, recipe))
        depth.append(1)
        yield
        depth.pop()

    def checkpoint(block, *arguments, use_reentrant):
        calls.append(('checkpoint',))
        return block(*arguments)

    classes = {name: lambda name=name, **settings: (name, *settings.values())
               for name, _ in backends.TE_RECIPES.values()}
    formats = types.SimpleNamespace(HYBRID='hybrid', E4M3='e4m3')
    manager = types.SimpleNamespace(is_fp8_enabled=lambda: bool(depth), reset=lambda: calls.append('reset'))
    pytorch = types.SimpleNamespace(Linear=TheirLinear, autocast=autocast, checkpoint=checkpoint)
    recipe = types.SimpleNamespace(Format=formats, **classes)
    modules = {'': types.SimpleNamespace(pytorch=pytorch), '.pytorch': pytorch,
               '.pytorch.quantization': types.SimpleNamespace(FP8GlobalStateManager=manager),
               '.common': types.SimpleNamespace(recipe=recipe), '.common.recipe': recipe}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, ENGINE + name, module)
    pytorch.casts = casts      # for each forward pass of a linear: whether its weight is cast
    backends.te_linear.cache_clear()
    yield calls
    backends.te_linear.cache_clear()


@pytest.mark.parametrize('choice, recipe', [
    (TE, ('Float8CurrentScaling', 'hybrid')),
    (Choice(backend='te', recipe='blockwise', format='e4m3'), ('Float8BlockScaling', 'e4m3')),
    (Choice(backend='te', recipe='delayed', options=Options(margin=2, amax_history=16)),
     ('DelayedScaling', 'hybrid', 2, 16)),
], ids=lambda given: getattr(given, 'recipe', ''))
def test_te_takes_plain_weights_and_opens_autocast_once_a_pass(choice, recipe, stand_in_te):
    config = WIDE if choice.recipe == 'blockwise' else SMALL
    model, plain, calls = GPT(config, linear_factory(choice, Linear)), GPT(config), stand_in_te
    assert f'8 of 9 linears, {choice.recipe} (te)' in fp8.summary(model, choice)
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.load_state_dict(plain.state_dict())
    model(IDX)
    assert calls[:2] == [('autocast', True, recipe), ('forward', torch.bfloat16)]
    assert len(calls) == 16
    state = fp8.State(model, choice)
    assert state.needs_calibration == (choice.recipe == 'delayed')
    state.calibrate(lambda: model(IDX))
    calls.clear()
    with fp8.paused():
        assert torch.equal(model(IDX), plain(IDX))
    assert not calls
    assert torch.equal(model(IDX), plain(IDX))  # the stand-in multiplies in bf16
    assert calls == [('autocast', True, recipe), *[('forward', torch.bfloat16)] * 8]
    with torch.autocast('cpu', torch.bfloat16):     # whose dtype counts
        fp8.make_linear(choice, 128, 128)(torch.zeros(128, 128))
    assert calls[-1] == ('forward', torch.bfloat16)
    backends.BACKENDS['te'].forget()    # the self-check's linears
    assert calls[-1] == 'reset'


def test_te_casts_a_weight_once_a_step_and_whenever_it_has_changed(stand_in_te):
    linear, x = fp8.make_linear(TE, 64, 64), torch.zeros(16, 64)
    linear.bf16_reason = None
    cache, casts = fp8.State(linear, TE).weight_cache, sys.modules[f'{ENGINE}.pytorch'].casts
    for fused in False, True:       # torch's fused optimizers leave a weight's version as it was
        optimizer = torch.optim.AdamW(linear.parameters(), fused=fused)
        for micro_steps in 1, fp8.FEWEST, fp8.FEWEST:
            cache.new_step(micro_steps)
            for _ in range(micro_steps):
                linear(x).sum().backward()
            optimizer.step()
        assert casts == [None, *[True, *[False] * (fp8.FEWEST - 1)] * 2]
        casts.clear()
    for change in (lambda: linear.load_state_dict(linear.state_dict()),
                   lambda: setattr(linear, 'weight', nn.Parameter(torch.ones(64, 64))),
                   lambda: setattr(linear.weight, 'data', torch.zeros(64, 64))):
        linear(x)
        change()
        linear(x)
        assert casts[-1], change


def test_te_recomputes_by_its_own_checkpoint_and_turns_auto_compile_off(stand_in_te):
    model = GPT(SMALL, linear_factory(TE, Linear), checkpoint_every=1, checkpoint=fp8.checkpointer(TE))
    model(IDX, IDX)
    assert stand_in_te.count(('checkpoint',)) == 2
    others = NATIVE, fp8.OFF, Choice('torchao', 'tensorwise'), Choice('torchao', 'rowwise')
    assert [bool(choice.eager) for choice in (TE, *others)] == [True, False, False, False, True]
