"""FP8 on models that are not ours: transformers' Llama and ViT."""
import contextlib
import copy
import functools
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import prune

from fp8gpt import distributed, fp8
from fp8gpt.fp8 import backends
from fp8gpt.fp8.health import cast_health
from fp8_models import extra_tensors, gradient_of, on_a_cpu
from helpers import relative, same_tensors

transformers = pytest.importorskip('transformers')

MODELS = {
    'llama': lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96)),
    'vit': lambda: transformers.ViTForImageClassification(transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32,
        patch_size=8, num_labels=16)),
}
HEADS = {'llama': 'lm_head', 'vit': 'classifier'}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


def made(name):
    """(the model, a batch of 32 or 272 tokens)."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == 'vit':
        return model, {'pixel_values': torch.randn(16, 3, 32, 32), 'labels': torch.arange(16)}
    ids = torch.randint(96, (2, 16))
    return model, {'input_ids': ids, 'labels': ids}


def loss_of(model, batch):
    with torch.autocast('cpu', torch.bfloat16):
        return model(**batch).loss


def gradients(model, batch):
    return gradient_of(model, loss_of(model, batch))


def in_fp8(model, recipe='tensorwise'):
    """(its Choice, its fp8.State) of a model that is converted."""
    choice = on_a_cpu('native', recipe)
    fp8.convert(model, choice)
    return choice, fp8.State(model, choice)


@pytest.mark.parametrize('backend, recipe', [('native', 'delayed'), ('torchao', 'tensorwise')])
def test_all_linears_but_the_output_layer_are_in_fp8_with_their_parameters(name, backend, recipe):
    (plain, batch), (model, _), choice = made(name), made(name), on_a_cpu(backend, recipe)
    own = dict(model.named_parameters())
    fp8.convert(model, choice)
    after = dict(model.named_parameters())
    assert list(after) == list(own)
    assert all(after[key] is own[key] for key in own)
    assert same_tensors(model.state_dict(), plain.state_dict())
    assert [linear for linear, reason in fp8.reasons(model).items() if reason] == [HEADS[name]]
    eight = sum(m.weight.numel() for m in fp8.fp8_linears(model).values())
    assert fp8.fp8_share(model) == eight / (eight + model.get_submodule(HEADS[name]).weight.numel())
    fp8.State(model, choice).calibrate(lambda: loss_of(model, batch).backward())
    expected = gradients(plain, batch)
    assert 1e-3 < relative(gradients(model, batch), expected) < 0.3
    with fp8.paused():
        assert torch.equal(gradients(model, batch), expected)
    rows = cast_health(model, choice, lambda: loss_of(model, batch).backward())
    assert len(rows) == 3 * len(fp8.fp8_linears(model))
    assert all(row['sqnr_db'] > 20 for row in rows)


def test_a_model_trains_its_cached_casts_follow_and_it_loads_without_fp8(name, tmp_path):
    model, batch = made(name)
    _, state = in_fp8(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = loss_of(model, batch).item()
    for _ in range(3):
        state.weight_cache.new_step(fp8.FEWEST)
        for _ in range(fp8.FEWEST):
            (loss_of(model, batch) / fp8.FEWEST).backward()
        optimizer.step()
        state.after_step()
        optimizer.zero_grad()
    assert loss_of(copy.deepcopy(model), batch).item() == loss_of(model, batch).item() < 0.98 * first
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path)   # without FP8
    with fp8.paused():
        assert loss_of(plain, batch).item() == loss_of(model, batch).item()


def test_an_odd_number_of_tokens_runs_in_bf16_and_says_so_once():
    model, batch = made('llama')
    in_fp8(model)
    odd, odder = ({name: tokens[:1, :size] for name, tokens in batch.items()} for size in (7, 9))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('default')
        found = loss_of(model, odd)
        loss_of(model, odder)
    assert [str(each.message) for each in said] == [
        'calls whose tokens are no multiple of 16 run in torch.bfloat16']
    with fp8.paused():
        assert torch.equal(found, loss_of(model, odd))


@pytest.mark.parametrize('name, width', [
    *((name, 48) for name in 'lm_head head classifier score output_projection fc_out output fc out decoder '
                             'to_logits unembed embed_out proj_out logits'.split()),
    # as many as config's vocabulary, as the embedding's rows, as the model's classes, which timm's have
    ('up', 96), ('up', 80), ('up', 112)])
def test_the_output_layer_by_its_name_or_width(name, width):
    model = nn.ModuleDict({
        'table': nn.Embedding(80, 64), name: nn.Linear(64, width),
        'heads': nn.ModuleList([nn.Linear(64, 32)]),
        'blocks': nn.ModuleList([nn.ModuleDict({'out': nn.Linear(64, 64), 'fc': nn.Linear(64, 96),
                                                'down': nn.Linear(96, 64)})])})
    model.config, model.num_classes = transformers.GPT2Config(vocab_size=96), 112
    assert sorted(fp8.output_layers(model)) == sorted([name, 'heads.0'])
    choice = on_a_cpu('native', 'tensorwise')
    fp8.convert(model, choice)
    assert list(fp8.fp8_linears(model)) == ['blocks.0.out', 'blocks.0.fc', 'blocks.0.down']
    assert f'{name}, heads.0: the output head' in fp8.summary(model, choice)


def test_an_output_layer_that_cannot_be_told():
    model, choice = stack(), on_a_cpu('native', 'tensorwise')
    fp8.convert(model, choice)
    assert fp8.summary(model, choice).endswith('no output layer was found: '
                                               'name yours in fp8.Options(keep=...)')
    model.get_output_embeddings = lambda: model[3]
    assert fp8.output_layers(model) == ['3']
    fp8.convert(model, choice)
    assert fp8.summary(model, choice).endswith('bf16: 3: the output head decides the loss, and stays bf16')
    table = nn.Embedding(48, 64)
    tied = nn.Sequential(table, nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 64))
    tied[2].weight = table.weight
    assert fp8.output_layers(tied) == ['2']
    of_classes = {'label': nn.Embedding(64, 128), 'q': nn.Linear(64, 64), 'k': nn.Linear(64, 64)}
    assert fp8.output_layers(nn.ModuleDict(of_classes)) == ['k']        # which may be one: it is the last


# ------------------------------------------------------------------------------------------- kinds of linears

def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 64))


def shared(model):
    model.append(model[0])


def hooked(model):
    model[0].register_forward_hook(lambda module, inputs, y: y * 2)
    model[2].register_full_backward_hook(lambda module, given, taken: (3 * given[0],))


KINDS = {
    'plain': lambda model: None,
    'shared': shared,
    'hooked': hooked,
    'weight_norm': lambda model: torch.nn.utils.weight_norm(model[0]),
    'spectral_norm': lambda model: torch.nn.utils.spectral_norm(model[0]).eval(),
    'pruned': lambda model: prune.l1_unstructured(model[0], 'weight', 0.5),
    'parametrized': lambda model: torch.nn.utils.parametrizations.orthogonal(model[0]),
    'new_weight_norm': lambda model: torch.nn.utils.parametrizations.weight_norm(model[0]),
    'own_scale': lambda model: model[0].register_buffer('scale', torch.full((3,), 2.0)),
    'one_weight': lambda model: setattr(model[2], 'weight', model[0].weight),
    'frozen': lambda model: model[0].requires_grad_(False),
    'replaced': lambda model: setattr(model[0], 'forward', lambda x: 2 * nn.Linear.forward(model[0], x)),
}


@pytest.mark.filterwarnings('ignore')       # of torch's, that some of these are old
@pytest.mark.parametrize('backend', ['native', 'torchao'])
@pytest.mark.parametrize('kind', KINDS)
def test_a_linear_of_any_kind_computes_what_it_did(kind, backend):
    """Within FP8's error, as often as the summary says, in steps with and without cached casts; hooks run,
    and a state_dict has the same names. With OFF the model is what it was."""
    plain, model, x, choice = stack(), stack(), torch.randn(32, 64), on_a_cpu(backend, 'tensorwise')
    for each in plain, model:
        torch.manual_seed(1)
        KINDS[kind](each)
    seed = torch.random.get_rng_state()
    fp8.convert(model, choice)
    assert torch.equal(torch.random.get_rng_state(), seed)
    state, number = fp8.State(model, choice), len(fp8.fp8_linears(model))
    linears = len([each for each in plain.modules() if isinstance(each, nn.Linear)])
    assert f'{number} of {linears} linears' in fp8.summary(model, choice)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert [*dict(model.named_parameters(remove_duplicate=False))] == [
        *dict(plain.named_parameters(remove_duplicate=False))]
    for micro_steps in 1, fp8.FEWEST:
        state.weight_cache.new_step(micro_steps)
        with torch.autocast('cpu', torch.bfloat16):
            found, expected = (gradient_of(each, each(x).square().mean()) for each in (model, plain))
            assert 1e-3 < relative(model(x), plain(x)) < 0.1
        assert 1e-3 < relative(found, expected) < 0.2
    if backend == 'torchao':
        with pytest.raises(fp8.OptionError, match='FP8 linears already'):
            fp8.convert(model, fp8.OFF)
        return
    fp8.convert(model, on_a_cpu('emulate', 'mxfp8'))
    first = next(iter(fp8.fp8_linears(model).values()))
    assert repr(first).endswith('mxfp8, e4m3, emulate)') and 'mxfp8 (emulate)' in fp8.summary(model, choice)
    fp8.convert(model, fp8.OFF)
    assert not model._forward_pre_hooks
    assert [type(each).__name__ for each in model.modules()] == [
        type(each).__name__ for each in plain.modules()]
    assert torch.equal(model(x), plain(x))


def test_what_was_changed_after_convert_is_not_undone():
    """A parametrization and a replaced forward method would break; a parametrized weight is not cached."""
    x = torch.randn(32, 64)
    for change in (torch.nn.utils.parametrizations.weight_norm,
                   lambda linear: setattr(linear, 'forward', linear.forward)):
        model = stack()
        _, state = in_fp8(model)
        change(model[0])
        state.weight_cache.new_step(fp8.FEWEST)
        with pytest.raises(fp8.OptionError, match='which cannot be undone'):
            fp8.convert(model, fp8.OFF)
        assert relative(model(x), stack()(x)) < 0.1
        assert (model[0].w8 is None) == hasattr(model[0], 'parametrizations')


def test_a_cached_step_that_begins_in_inference_mode_trains():
    model, x = stack(), torch.randn(32, 64)
    _, state = in_fp8(model)
    state.weight_cache.new_step(fp8.FEWEST)
    with torch.inference_mode():
        model(x)
    assert gradient_of(model, model(x).sum()).any()


@pytest.mark.parametrize('recipe', ['tensorwise', 'delayed'])
def test_weights_that_change_within_a_cached_step_are_cast_again(recipe):
    """By functional_call, of the model or of a linear, by load_state_dict and by weight.data, whose version
    does not count; then back to the model's."""
    model, x = stack(), torch.randn(32, 64)
    _, state = in_fp8(model, recipe)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    others = {name: value.flip(0) for name, value in own.items()}
    of_first = {name: others[f'0.{name}'] for name in ('weight', 'bias')}
    wanted = {}
    for micro_steps in 1, fp8.FEWEST:
        state.weight_cache.new_step(micro_steps)
        found = [
            model(x),
            torch.func.functional_call(model, others, x),
            torch.func.functional_call(model[0], of_first, x),
            model(x),
        ]
        model.load_state_dict(others)
        found += model[0](x), model(x)
        model.load_state_dict(own)
        model(x)
        mine = model[0].weight.data
        model[0].weight.data = others['0.weight']
        found.append(model(x))
        model[0].weight.data = mine
        wanted[micro_steps] = found
    assert all(map(torch.equal, *wanted.values()))
    assert all(torch.equal(found[a], found[b]) for a, b in ((0, 3), (1, 5), (2, 4)))


def test_weights_that_torchao_has_quantised_are_refused_in_words():
    """Also within a cached step; OFF gives back a model that computes with them."""
    quantization = pytest.importorskip('torchao.quantization')
    plain, model, x = stack(), stack(), torch.randn(32, 64)
    _, state = in_fp8(model)
    for each in plain, model:
        quantization.quantize_(each, quantization.Int8WeightOnlyConfig())
    for micro_steps in 1, fp8.FEWEST:
        state.weight_cache.new_step(micro_steps)
        with pytest.raises(TypeError, match=r'no Int8Tensor: call fp8\.convert\(model, fp8\.OFF\)'):
            model(x)
    fp8.convert(model, fp8.OFF)
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize('recipe', ['tensorwise', 'delayed', 'rowwise'])
def test_an_exported_graph_has_no_gradients_and_leaves_the_model_trainable(recipe):
    """It is Matmul's forward alone: the gradients of that would be wrong, and amaxes would take part in them.
    """
    model, x = stack(), torch.randn(32, 64)
    _, state = in_fp8(model, recipe)
    state.calibrate(lambda: model(x).sum().backward())
    y = torch.export.export(model, (x,)).module()(x)
    assert torch.equal(y, model(x)) and not y.requires_grad
    assert not any(tensor.requires_grad for tensor in extra_tensors(model).values())
    for _ in range(2):
        model(x).sum().backward()
        state.after_step()


def test_a_model_trains_where_torch_says_that_it_is_exported(monkeypatch):
    """As Dynamo of torch 2.11 says in every trace: a compiled model's linears had no gradients there."""
    monkeypatch.setattr(torch.compiler, 'is_exporting', lambda: True)
    model, x = stack(), torch.randn(32, 64)
    in_fp8(model, 'tensorwise')
    model(x).sum().backward()
    assert all(p.grad.any() for p in model.parameters())


def test_a_complex_weight_stays():
    model = nn.Sequential(nn.Linear(64, 64, dtype=torch.complex64), nn.Linear(64, 64))
    fp8.convert(model, on_a_cpu('native', 'tensorwise'))
    assert fp8.reasons(model) == {'0': 'its weight is torch.complex64', '1': None}


def test_a_bare_linear_and_one_without_memory():
    linear, choice = nn.Linear(64, 32), on_a_cpu('native', 'delayed')
    fp8.convert(linear, choice)
    assert fp8.summary(linear, choice).startswith('FP8 Training Enabled: 1 of 1 linears, delayed (native)')
    x = torch.ones(16, 64, dtype=torch.bfloat16)
    assert torch.equal(linear(input=x), linear(x))
    assert len(cast_health(linear, choice, lambda: linear(x).sum().backward())) == 3
    with torch.device('meta'):
        model = stack()
    fp8.convert(model, choice)
    assert {tensor.device.type for tensor in (*model.parameters(), *extra_tensors(model).values())} == {
        'meta'}


@pytest.mark.parametrize('recipe', ['tensorwise', 'delayed'])
def test_the_bookkeeping_of_delayed_scaling_is_refused_in_a_cuda_graph(recipe, monkeypatch):
    """A replay would write the same row of the history, and count no step. The blocks have no hooks, as
    torch.cuda.make_graphed_callables asks for."""
    model, x, choice = stack(), torch.randn(16, 64), on_a_cpu('native', recipe)
    fp8.convert(model, choice)
    state = fp8.State(model, choice)
    state.calibrate(lambda: model(x).sum().backward())
    assert not any(module._forward_pre_hooks for module in model.children())
    steps = state.steps
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    for capturing in True, False:
        monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: capturing)
        with pytest.raises(RuntimeError, match='after the graph') if capturing and state.layers else (
                contextlib.nullcontext()):
            state.after_step()
    assert state.steps == steps + (recipe == 'delayed')


@pytest.mark.parametrize('before, after', [*itertools.permutations(['off', 'tensorwise', 'delayed'], 2)])
def test_a_state_ends_with_its_conversion(before, after):
    """Else delayed scaling would keep scales of 1, or its histories would belong to linears that are gone."""
    choices = {recipe: on_a_cpu('native', recipe) for recipe in ('tensorwise', 'delayed')} | {'off': fp8.OFF}
    model, x = stack(), torch.randn(16, 64)
    fp8.convert(model, choices[before])
    first = fp8.State(model, choices[before])
    fp8.convert(model, choices[after])
    with pytest.raises(RuntimeError, match='was converted anew .*: make another'):
        first.after_step()
    with pytest.raises(RuntimeError, match='was converted anew .*: make another'):
        first.calibrate(lambda: model(x).sum().backward())
    second = fp8.State(model, choices[after])
    second.calibrate(lambda: model(x).sum().backward())
    second.after_step()


def append_converted(model, choice):
    late = stack()
    fp8.convert(late, choice)
    model[0].append(late)


@pytest.mark.parametrize('change', [
    fp8.convert, append_converted,
    lambda model, choice: fp8.convert(model[0][2:], fp8.OFF),
    lambda model, choice: fp8.convert(model[0][2:], on_a_cpu('native', 'tensorwise')),
], ids=['whole', 'late', 'part in bf16', 'part otherwise'])
@pytest.mark.parametrize('of_part', [True, False], ids=['of a part', 'of the whole'])
def test_a_state_ends_where_its_layers_change(of_part, change):
    model, choice = nn.Sequential(stack()), on_a_cpu('native', 'delayed')
    fp8.convert(model, choice)
    state = fp8.State(model[0] if of_part else model, choice)
    with pytest.warns(UserWarning, match='saw no training pass'):      # no backward: gradients have no scale
        state.calibrate(lambda: model(torch.randn(32, 64)))
    change(model, choice)
    with pytest.raises(RuntimeError, match='got other layers since this State was made: make another'):
        state.after_step()


def test_a_summary_of_parts_in_different_recipes():
    choices = on_a_cpu('native', 'delayed'), on_a_cpu('emulate', 'mxfp8')
    model = nn.Sequential(stack(), stack())
    for part, choice in zip(model, choices):
        fp8.convert(part, choice)
    for choice in choices:
        line, formats, *_ = fp8.summary(model, choice).splitlines()
        assert line.endswith('6 of 6 linears, delayed (native) and mxfp8 (emulate)')
        assert formats.strip().startswith('hybrid and e4m3;')


def test_a_linear_that_comes_after_the_conversion_counts_as_bf16():
    """A head for other classes, or of another vocabulary, say, or an adapter."""
    model = stack()
    choice, _ = in_fp8(model)
    model[3] = nn.Linear(64, 64)
    said = fp8.summary(model, choice)
    assert '2 of 3 linears' in said and '67% of the linears' in said and '3: added after fp8.convert' in said


def test_a_mixtures_experts_count_as_bf16():
    """They are tensors (experts, out, in), by which transformers' Mixtral multiplies; three kinds of others
    are none: a convolution's, an embedding's, a class token."""
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, num_local_experts=4))
    model.token, model.patches = nn.Parameter(torch.zeros(1, 1, 64)), nn.Conv1d(64, 64, 4)
    choice = on_a_cpu('native', 'tensorwise')
    fp8.convert(model, choice)
    block = model.model.layers[0]
    weights = {name: p.numel() for name, p in block.named_parameters() if p.dim() > 1}
    in_fp8 = sum(number for name, number in weights.items() if 'self_attn' in name)
    assert fp8.fp8_share(model) == in_fp8 / (sum(weights.values()) + model.lm_head.weight.numel())
    assert 'model.layers.0.mlp.experts: transformers.' in fp8.summary(model, choice)
    assert not {'', 'patches', 'model.embed_tokens'} & fp8.reasons(model).keys()
    model = stack()
    model.table = nn.Parameter(torch.zeros(64, 64))
    fp8.convert(model, choice)
    assert '\n          bf16: the model: ' in fp8.summary(model, choice)


def test_mistakes_with_a_model_are_refused_in_words():
    choice, model = on_a_cpu('native', 'tensorwise'), stack()
    fp8.convert(model, choice)
    with pytest.raises(fp8.OptionError, match='^0 is in FP8 by another choice, tensorwise, hybrid, native'):
        fp8.State(model, on_a_cpu('native', 'delayed'))     # whose scales would be 1 for ever
    assert fp8.summary(stack(), choice) == 'FP8 Training Off: no linear was converted'
    pruned = nn.Parameter(torch.randn(32, 64))      # an nn.Linear goes by its weight, not by out_features
    model[3].weight, model[3].bias = pruned, None
    assert model(torch.randn(16, 64)).shape == (16, 32)
    for paused in fp8.paused, contextlib.nullcontext:
        with paused(), pytest.raises(TypeError, match='not torch.int64'):   # else the result is integers
            model(torch.ones(16, 64, dtype=torch.int64))
        with paused(), pytest.raises(RuntimeError, match='32x32 and 64x64'):
            model(torch.randn(32, 32))
    for recipe in fp8.RECIPES:
        model = nn.Linear(128, 256)
        fp8.convert(model, on_a_cpu('emulate', recipe))
        for features in 33, 48, 256:
            with pytest.raises(RuntimeError, match=f'has {features} features, and the linear takes 128'):
                model(torch.randn(128, features))
    lazy = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(ValueError, match='with a dummy batch'):     # torch's own
        fp8.convert(lazy, choice)
    lazy(torch.ones(16, 64))
    fp8.convert(lazy, on_a_cpu('native', keep=('0',)))
    assert list(fp8.fp8_linears(lazy)) == ['1']
    assert fp8.State(nn.Sequential(), fp8.OFF).state_dict() == {}


def test_a_frozen_weight_trains_once_it_is_unfrozen():
    model, x = stack(), torch.randn(32, 64)
    model[0].requires_grad_(False)
    fp8.convert(model, on_a_cpu('native', 'tensorwise'))
    model(x).sum().backward()
    assert model[0].weight.grad is None
    model[0].requires_grad_(True)
    model(x).sum().backward()
    assert model[0].weight.grad.any()


@pytest.mark.parametrize('change', ['bfloat16', 'half', 'double', 'default'])
def test_scales_and_casts_keep_their_types(change):
    """Through .half() and its like, and where a model is made under another default dtype."""
    plain, x, choice = stack(), torch.randn(32, 64) * 1e-4, on_a_cpu('native', 'delayed')
    model = copy.deepcopy(plain)
    if change == 'default':
        torch.set_default_dtype(torch.bfloat16)
    try:
        fp8.convert(model, choice)
        state = fp8.State(model, choice)
    finally:
        torch.set_default_dtype(torch.float32)
    state.weight_cache.new_step(fp8.FEWEST)
    state.calibrate(lambda: model(x).square().mean().backward())
    state.weight_cache.new_step(fp8.FEWEST)
    model(x)
    before = {name: value.clone() for name, value in extra_tensors(model).items()}
    assert len(before) == 3 * len(fp8.TENSORS)
    if change != 'default':
        getattr(model, change)()
    after = extra_tensors(model)
    assert all(after[name].dtype == value.dtype and torch.equal(after[name].float(), value.float())
               for name, value in before.items())
    assert state.history.dtype == torch.float32
    y = model(x.to(model[0].weight.dtype))
    assert y.dtype == model[0].weight.dtype and relative(y.float(), plain(x)) < 0.1


@pytest.mark.parametrize('backend, recipe', [('native', 'tensorwise'), ('torchao', 'rowwise')])
def test_autocast_leaves_fp64_as_it_leaves_it_to_a_linear(backend, recipe):
    plain, model, x = stack().double(), stack().double(), torch.randn(32, 64, dtype=torch.float64)
    fp8.convert(model, on_a_cpu(backend, recipe))
    with torch.autocast('cpu', torch.bfloat16):
        assert model(x).dtype == plain(x).dtype == torch.float64
        with fp8.paused():
            assert torch.equal(model(x), plain(x))


def test_memory_or_weights_given_to_a_model_without_any():
    x, choice = torch.randn(32, 64), on_a_cpu('native', 'delayed')
    with torch.device('meta'):
        model, empty = stack(), stack()
    for each in model, empty:
        fp8.convert(each, choice)
    empty.to_empty(device='cpu')
    assert [linear.scale.tolist() for linear in fp8.fp8_linears(empty).values()] == 3 * [[1.0, 1.0, 1.0]]
    assert not any(linear.amax.any() for linear in fp8.fp8_linears(empty).values())
    model.load_state_dict(stack().state_dict(), assign=True)
    fp8.State(model, choice).calibrate(lambda: model(x).sum().backward())
    assert relative(model(x), stack()(x)) < 0.1


def test_a_state_follows_its_model_to_another_device():
    """As where the State is made first, and to_empty or a trainer gives the model its memory."""
    with torch.device('meta'):
        model, choice = stack(), on_a_cpu('native', 'delayed')
        fp8.convert(model, choice)
        state = fp8.State(model, choice)
    model.to_empty(device='cpu').load_state_dict(stack().state_dict())
    plain = stack()
    _, other = in_fp8(plain, 'delayed')
    for each, its in (state, model), (other, plain):
        each.calibrate(lambda: its(torch.ones(32, 64)).sum().backward())
    assert same_tensors(state.state_dict(), other.state_dict())
    model.to('meta')
    state.after_step()
    assert state.history.is_meta


def one_rank_that_looks(rank, file, changed):
    torch.distributed.init_process_group('gloo', f'file://{file}', rank=rank, world_size=1)
    model, x = stack(), torch.randn(32, 64)
    choice, state = in_fp8(model, 'delayed')
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    state.calibrate(lambda: wrapped(x).sum().backward())
    wrapped(x).sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    for number, look in enumerate((state.calibrate, functools.partial(cast_health, model, choice))):
        look(lambda: wrapped(9 * x).square().sum().backward())
        changed[number] = not all(map(torch.equal, before, [p.grad for p in model.parameters()]))
    distributed.leave()


@pytest.mark.slow
def test_a_look_through_ddp_leaves_gradients_that_are_views_of_its_buckets(tmp_path):
    changed = torch.ones(2, dtype=torch.bool).share_memory_()
    torch.multiprocessing.spawn(one_rank_that_looks, (tmp_path / 'rank', changed), nprocs=1)
    assert not changed.any()


WRAPPERS = {
    'none': lambda model: model,
    'parent': nn.Sequential,
    'compiled': lambda model: torch.compile(model, backend='eager'),   # as nanoGPT does
}


def one_of_two_ranks(rank, file, scales):
    torch.distributed.init_process_group('gloo', f'file://{file}', rank=rank, world_size=2)
    choice = on_a_cpu('native', 'delayed', amax_history=1)
    for number, wrapped in enumerate(WRAPPERS.values()):
        model = stack()
        fp8.convert(model, choice)
        state, ranks = fp8.State(model, choice), nn.parallel.DistributedDataParallel(wrapped(model))
        state.calibrate(lambda: ranks(torch.ones(32, 64)).sum().backward())
        for amax in 1.0 + 31 * rank, 1.0:
            ranks(torch.full((32, 64), amax)).sum().backward()
        state.after_step()
        scales[rank, number] = model[0].scale[0]
    stage = [torch.distributed.new_group([each]) for each in range(2)][rank]
    model = stack() if rank else stack()[:1]        # as a pipeline's stages have other layers
    fp8.convert(model, choice)
    state = fp8.State(model, choice, stage)
    state.calibrate(lambda: model(torch.full((32, 64), 1.0 + 31 * rank)).sum().backward())
    scales[rank, -1] = model[0].scale[0]
    distributed.leave()


@pytest.mark.slow
def test_ddp_with_its_defaults_leaves_each_ranks_amaxes(tmp_path):
    """Rank 1 sees 32 in the first of two micro-steps, so that 448 / 32 is the scale of both; also of a model
    within another module. In groups of their own, each has its own scale."""
    scales = torch.zeros(2, len(WRAPPERS) + 1).share_memory_()
    torch.multiprocessing.spawn(one_of_two_ranks, (tmp_path / 'ranks', scales), nprocs=2)
    assert scales[:, :-1].unique().tolist() == [14.0]
    assert scales[:, -1].tolist() == [448.0, 14.0]


@pytest.mark.parametrize('recipe', fp8.RECIPES)
def test_the_largest_margin_leaves_the_largest_values(recipe):
    """A larger one would make zeros of them; 2**64 is no number of a tensor's type, either."""
    linear, x, choice = nn.Linear(128, 128, bias=False), torch.ones(128, 128), None
    for margin in range(65):
        with contextlib.suppress(fp8.OptionError):
            choice = on_a_cpu('emulate', recipe, margin=margin)
    nn.init.ones_(linear.weight)
    fp8.convert(linear, choice)
    fp8.State(linear, choice).calibrate(lambda: linear(x).sum().backward())
    assert 0.5 < linear(x).min() / 128 <= linear(x).max() / 128 < 2


def test_pauses_end_in_any_order():
    """Of two threads, or of generators such as a sampler: the last to end leaves FP8 on."""
    def pauses():
        with fp8.paused():
            yield

    first, second = pauses(), pauses()
    for step, paused in ((first, True), (second, True), (first, True), (second, False)):
        next(step, None)
        assert fp8.mode.paused == paused
    with fp8.paused():
        with fp8.set_mode(paused=False):
            with fp8.paused():
                pass
            assert not fp8.mode.paused
        assert fp8.mode.paused
    assert not fp8.mode.paused


def penalty(model):
    """The gradients of a gradient's norm, as a Wasserstein GAN's penalty has them."""
    x = torch.linspace(-1, 1, 32 * 64).view(32, 64).requires_grad_()
    gradient, = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient_of(model, gradient.norm())


@pytest.mark.parametrize('backend', ['native', 'torchao'])
def test_a_gradient_of_a_gradient_is_refused_by_name(backend):
    plain, model = stack(), stack()
    fp8.convert(model, on_a_cpu(backend, 'tensorwise'))
    with pytest.raises((RuntimeError, AssertionError), match='FP8|Float8'):     # torchao's own error
        penalty(model)
    with fp8.paused():
        assert torch.equal(penalty(model), penalty(plain))
    assert gradient_of(model, model(torch.ones(32, 64)).sum()).any()


@pytest.mark.parametrize('whole', [True, False], ids=['torch.compile', 'model.compile'])
def test_a_look_at_a_compiled_model_is_one_at_the_model(whole):
    """A graph that has run calls no hook that is added after it."""
    model, x = stack(), torch.randn(32, 64)
    choice, _ = in_fp8(model, 'tensorwise')
    expected = cast_health(model, choice, lambda: model(x).sum().backward())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend='eager') if whole else model
    if not whole:
        model.compile(backend='eager')
    compiled(x).sum().backward()
    assert cast_health(model, choice, lambda: compiled(x).sum().backward()) == expected != []


@pytest.mark.parametrize('recipe', ['delayed', 'tensorwise'])
def test_a_look_and_a_calibration_leave_gradients_and_amaxes(recipe):
    """Between two micro-steps, too; and batch norm's means, and buffers that a module replaces."""
    class Counts(nn.Module):
        def forward(self, x):
            self.scale = self.scale + 1
            return x

    model, x = stack(), torch.randn(32, 64)
    model.insert(1, nn.BatchNorm1d(64))
    model.append(Counts()).get_submodule('5').register_buffer('scale', torch.zeros(1))
    choice, state = in_fp8(model, recipe)
    state.calibrate(lambda: model(x).sum().backward())
    assert all(p.grad is None for p in model.parameters())
    assert cast_health(model, choice, lambda: model(x).sum().backward())
    assert all(p.grad is None for p in model.parameters()) and not model[5].scale
    model(x).sum().backward()
    gradients, seen = [p.grad for p in model.parameters()], {
        name: value.clone() for name, value in (*model.named_buffers(), *extra_tensors(model).items())}
    before = [gradient.clone() for gradient in gradients]
    assert cast_health(model, choice, lambda: model(100 * x).sum().backward())
    assert same_tensors(dict(model.named_buffers()) | extra_tensors(model), seen)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients))
    assert all(map(torch.equal, gradients, before))


def test_a_look_sees_a_linears_own_output():
    """Not what a hook makes of it: 8 y here, or more than y, and FSDP2's drops the whole weight."""
    model, x, seen = stack(), torch.randn(32, 64), []
    choice, _ = in_fp8(model)
    model[0].register_forward_hook(lambda module, inputs, y: y.register_hook(seen.append) and None)
    for hook in lambda module, inputs, y: 8 * y, lambda module, inputs, y: (y, inputs):
        handle = model[0].register_forward_hook(hook)
        rows = cast_health(model[0], choice, lambda: torch.cat([*model[0](x)][:1]).square().mean().backward())
        handle.remove()
        assert rows[-1]['tensor'] == 'grad' and rows[-1]['amax'] == seen.pop().abs().max().item()


def test_an_average_of_weights_in_a_cached_step():
    model, x = stack().insert(1, nn.BatchNorm1d(64)), torch.randn(32, 64)
    _, state = in_fp8(model, 'delayed')
    average = torch.optim.swa_utils.AveragedModel(model)
    state.weight_cache.new_step(fp8.FEWEST)
    model(x)
    average.update_parameters(model)
    assert same_tensors(average.module.state_dict(), model.state_dict())


def test_a_copy_in_a_cached_step_computes_with_its_own_weights():
    model, x = stack(), torch.randn(32, 64)
    choice, state = in_fp8(model)
    state.weight_cache.new_step(fp8.FEWEST)
    model(x)
    average, part = copy.deepcopy(model), copy.deepcopy(model[0])
    assert torch.equal(average(x), model(x)) and model[0].w8 is not None
    with torch.no_grad():
        for parameter in *average.parameters(), *part.parameters():
            parameter.mul_(-2)
    other = stack()
    other.load_state_dict(average.state_dict())
    fp8.convert(other, choice)
    assert torch.equal(average(x), other(x)) and torch.equal(part(x), other[0](x))
    # as LoRA has it
    model[0].weight = model[0].cast_of = model[0].wt8 = model[0].wt8_scale_inv = None
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize('backend, recipe', [('native', 'delayed'), ('torchao', 'tensorwise')])
def test_a_pickle_computes_the_same_in_another_process(backend, recipe):
    model, x, choice = stack(), torch.randn(32, 64), on_a_cpu(backend, recipe)
    fp8.convert(model, choice)
    saved, y = pickle.dumps(model), model(x)
    backends.torchao_linear.cache_clear()       # which another process has not filled either
    assert torch.equal(pickle.loads(saved)(x), y)
    torch.nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(RuntimeError, match='parametrized'):     # torch's own
        pickle.dumps(model)


def test_a_parametrized_weight_is_computed_once_a_forward():
    """As in nn.Linear: spectral_norm iterates at each look."""
    for paused in (True, False):
        model, seen = stack(), []
        fp8.convert(model, on_a_cpu('native', 'tensorwise'))

        class Seen(nn.Module):
            def forward(self, weight):
                seen.append(1)
                return weight
        nn.utils.parametrize.register_parametrization(model[2], 'weight', Seen())
        seen.clear()
        with fp8.paused() if paused else contextlib.nullcontext():
            model(torch.randn(32, 64))
        assert len(seen) == 1


@pytest.mark.filterwarnings('ignore:.*nested:UserWarning', 'ignore:.*CSR tensor:UserWarning')
def test_a_nested_or_sparse_input_is_refused_and_computed_in_a_pause():
    model, x = stack(), torch.randn(32, 64).relu()
    in_fp8(model)
    nested = (torch.nested.nested_tensor([x, x], layout=layout) for layout in (torch.strided, torch.jagged))
    for unlike in (*nested, x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(TypeError, match=r'no nested or sparse tensor: name .*\(keep=...\), or '):
            model(unlike)
        with fp8.paused():
            parts = model(unlike).unbind() if unlike.is_nested else [model(unlike)]
            assert all(relative(y, model(x)) < 1e-6 for y in parts)
