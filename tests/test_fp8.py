"""FP8 models: their linears, gradients, graphs and switches, on a CPU."""
import contextlib
import dataclasses
import re
import warnings

import pytest
import torch
import torch.nn as nn
from torch._dynamo.testing import CompileCounterWithBackend

from conftest import ROOT
from fp8gpt import fp8
from fp8gpt.fp8 import Options, backends, linear_factory
from fp8gpt.fp8.linear import OptionError
from fp8_models import (
    NATIVE, ON_A_CPU, SMALL, WIDE, build, gradient_of, gradients, on_a_cpu, tokens)
from helpers import compiled, random, relative, same_tensors
from model import GPT, Linear


def test_gradients_point_where_bf16s_do():
    wrong, bf16 = [], GPT(WIDE)
    plain = gradients(bf16)
    for backend, recipe in ON_A_CPU:
        choice = on_a_cpu(backend, recipe)
        model, state, _ = build(choice)
        assert model.state_dict().keys() == bf16.state_dict().keys()
        model.load_state_dict(bf16.state_dict())
        assert f'8 of 9 linears, {recipe} ({backend})\n' in fp8.summary(model, choice)
        state.calibrate(lambda model=model: gradients(model))
        off = relative(gradients(model), plain)
        with fp8.paused():
            same = torch.equal(gradients(model), plain)
        if not (same and 1e-3 < off < 0.15):
            wrong.append((backend, recipe, off, same))
    assert wrong == []


def test_torchaos_linear_brings_its_patch_of_inductor(monkeypatch):
    """As torchao's own conversion does: without it, Triton may store what it casts as garbage."""
    from torch._inductor.codegen.triton import TritonOverrides
    from torchao.float8 import _inductor_patch
    monkeypatch.setattr(_inductor_patch, '_PATCHED', False)
    monkeypatch.setattr(TritonOverrides, 'maximum', staticmethod('tl.maximum({}, {})'.format))
    backends.torchao_linear.cache_clear()
    fp8.make_linear(on_a_cpu('torchao', 'tensorwise'), 16, 16)
    assert TritonOverrides.maximum('a', 'b').startswith('tl.where(')


def test_a_pause_ends_where_it_began():
    x, _ = tokens(32)
    plain, layered = GPT(SMALL)(x), GPT(SMALL, linear_factory(NATIVE, Linear))
    with contextlib.suppress(ZeroDivisionError), fp8.paused():
        with fp8.paused():
            pass
        assert torch.equal(layered(x), plain)
        1 / 0  # noqa: B018
    assert not torch.equal(layered(x), plain)


@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['delayed', 'rowwise_gw_hp'])
def test_compiled_with_recomputation_is_eager(recipe):
    model, state, _ = build(on_a_cpu('native', recipe), 1, dataclasses.replace(WIDE, n_layer=1))
    state.calibrate(lambda: gradients(model))
    eager = gradients(model)
    amaxes = [layer.amax.clone() for layer in state.layers.values()]
    state.forget()
    found = gradients(compiled(model, backend='aot_eager', fullgraph=True))
    assert relative(found, eager) < 1e-2
    for layer, amax in zip(state.layers.values(), amaxes):
        assert torch.allclose(layer.amax, amax, rtol=0.02)
        assert layer.amax.all()


@pytest.mark.skipif(torch.__version__ < '2.12', reason='Dynamo fails there with an AssertionError of its own')
@pytest.mark.parametrize('dynamic, recipe', [(True, 'tensorwise'), (None, 'delayed'), (None, 'mxfp8')])
def test_any_number_of_tokens_compiles_into_one_graph_each(dynamic, recipe):
    """Also numbers that run in bf16, which say nothing there, and more than torch's recompile limit of 8."""
    torch.manual_seed(0)
    model, choice = nn.Sequential(nn.Linear(64, 64)), on_a_cpu('emulate', recipe)
    fp8.convert(model, choice)
    torch._dynamo.reset()
    graphs = torch.compile(model, backend='aot_eager', fullgraph=True, dynamic=dynamic)
    with warnings.catch_warnings(), torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        warnings.filterwarnings('error', message='calls whose tokens')
        for rows in (*range(64, 416, 32), 7, 33):
            x = torch.randn(rows, 64)
            found = gradient_of(model, graphs(x).square().sum())
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                assert relative(found, gradient_of(model, model(x).square().sum())) < 1e-5


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('backend', ['native', 'emulate'])
def test_a_compiled_linear_has_the_gradients_of_an_eager_one(backend, dtype):
    """Those of fp32 inputs were 0 under torch 2.11."""
    model, x = nn.Sequential(nn.Linear(64, 64)), random(32, 64, dtype=dtype)
    fp8.convert(model, on_a_cpu(backend, 'tensorwise'))
    torch._dynamo.reset()
    found = gradient_of(model, torch.compile(model, backend='eager')(x).square().sum())
    assert relative(found, gradient_of(model, model(x).square().sum())) < 1e-5


def test_each_way_to_compute_is_compiled_once():
    """Training and evaluation take four graphs each: embedding, the first block, the others, head with loss.
    Further layers and coming back to one compile nothing."""
    choice = on_a_cpu('native', 'delayed')
    config = dataclasses.replace(SMALL, n_layer=3)
    model, (x, y) = GPT(config, linear_factory(choice, Linear)), tokens(32)
    state, counter = fp8.State(model, choice), CompileCounterWithBackend('eager')
    state.calibrate(lambda: gradients(model, (x, y)))
    eager = gradients(model, (x, y))
    compiled(model, backend=counter, fullgraph=True)

    def train():
        assert relative(gradients(model, (x, y)), eager) < 0.02
        return counter.frame_count

    def evaluate():
        with fp8.paused(), torch.no_grad():
            torch.testing.assert_close(model(x, y), GPT(config)(x, y), atol=1e-2, rtol=0)
        return counter.frame_count
    counts = [train(), evaluate(), train()]
    state.after_step()
    assert [*counts, train(), evaluate()] == [4, 8, 8, 8, 8]


def test_keep_matches_parts_of_names():
    for patterns, expected in (
            (['h.1'], {'h.1.attn.qkv', 'h.1.attn.proj', 'h.1.mlp.up', 'h.1.mlp.down'}),
            (['attn.proj', 'h.0.mlp.up'], {'h.0.attn.proj', 'h.1.attn.proj', 'h.0.mlp.up'}),
            (['h.*.mlp.*'], {f'h.{i}.mlp.{name}' for i in (0, 1) for name in ('up', 'down')})):
        model, _, _ = build(dataclasses.replace(NATIVE, options=Options(keep=tuple(patterns))), config=SMALL)
        found = {name for name, reason in fp8.reasons(model).items() if reason == 'kept by fp8_keep'}
        assert found == expected
    with pytest.raises(ValueError, match="no linear is called 'mlp.dwn'; they are called h.0.attn.qkv"):
        build(dataclasses.replace(NATIVE, options=Options(keep=('mlp.dwn',))), config=SMALL)


def test_convert_names_what_it_does_not_convert():
    choice, layer = on_a_cpu('native', 'tensorwise'), nn.TransformerEncoderLayer(32, 2, 64)
    fp8.convert(layer, choice)
    line = fp8.summary(layer, choice)
    assert '2 of 4 linears' in line
    assert 'self_attn: torch.nn.modules.activation.MultiheadAttention is not nn.Linear itself' in line
    fp8.convert(layer, choice)  # what is FP8 stays
    assert fp8.summary(layer, choice) == line
    nothing = nn.ModuleDict({
        'a': layer.self_attn.out_proj, 'b': nn.Linear(64, 24), 'lm_head': nn.Linear(32, 64)})
    del layer.self_attn.out_proj.bf16_reason
    with pytest.raises(OptionError, match='^no linear became FP8: a: .* itself; b: 64 -> 24 is not in multip'
                                          'les of 16; lm_head: the output head'):
        fp8.convert(nothing, choice)
    fp8.convert(nothing, fp8.OFF)


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    """Its frozen layer is in FP8 and in the folder that it saves, as the last line of its output says."""
    pytest.importorskip('transformers')
    monkeypatch.chdir(tmp_path)
    page = (ROOT / 'docs' / 'fp8.md').read_text()
    names = {}
    exec(re.search(r'```python\n(.*?)```', page, re.S).group(1), names)
    out = capsys.readouterr().out
    assert out.startswith('FP8 Training Enabled: 14 of 15 linears') and out.endswith('\nTrue\n')
    assert len(out.splitlines()) == 7
    assert same_tensors(names['plain'].state_dict(), names['model'].state_dict())
    assert not names['model'].model.layers[0].mlp.up_proj.weight.requires_grad
