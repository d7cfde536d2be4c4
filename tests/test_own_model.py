"""FP8 on models that are not ours: transformers' Llama and ViT."""
import copy
import warnings

import pytest
import torch
import torch.nn as nn

from fp8gpt import fp8
from fp8gpt.fp8.health import cast_health
from fp8_models import gradient_of, on_a_cpu
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


def converted(name):
    """(model, batch, its fp8.State)."""
    model, batch = made(name)
    choice = on_a_cpu('native', 'tensorwise')
    fp8.convert(model, choice)
    return model, batch, fp8.State(model, choice)


@pytest.mark.parametrize('backend, recipe', [('native', 'delayed'), ('torchao', 'tensorwise')])
def test_all_linears_but_the_output_layer_are_in_fp8_with_their_parameters(name, backend, recipe):
    """Their gradients are near bf16's."""
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
    model, batch, state = converted(name)
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
    model, batch, _ = converted('llama')
    odd, odder = ({name: tokens[:1, :size] for name, tokens in batch.items()} for size in (7, 9))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter('default')
        found = loss_of(model, odd)
        loss_of(model, odder)
    assert [str(each.message) for each in said] == [
        'calls whose tokens are no multiple of 16 run in torch.bfloat16']
    with fp8.paused():
        assert torch.equal(found, loss_of(model, odd))


def test_the_output_layer_by_its_role():
    for last, found in (({'head': nn.Linear(64, 32)}, 'head'),
                        ({'out': nn.Linear(64, 96)}, 'out'),        # as wide as config's vocabulary
                        ({'out': nn.Linear(64, 48)}, None)):
        model = nn.ModuleDict({'table': nn.Embedding(48, 64), 'body': nn.Linear(64, 64), **last})
        model.config = transformers.GPT2Config(vocab_size=96)
        assert fp8.output_layer(model) == found
    model['out'].weight = model['table'].weight
    assert fp8.output_layer(model) == 'out'
