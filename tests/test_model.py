"""The model by hand and by its properties; test_hf.py holds it against transformers."""
import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

import model as model_file
from model import GPT, PRESETS, GPTConfig, Linear, generate, pick, rope_tables
from configurator import SettingError
from conftest import run
from helpers import checkpoint_of, compiled, peak_bytes, relative, same_tensors, with_noise

SMALL = GPTConfig(vocab_size=300, block_size=32, n_layer=3, n_head=4, n_embd=64)
LLAMA = dataclasses.replace(
    SMALL, n_kv_head=2, ffn_dim=96, mlp='swiglu', norm='rmsnorm', position='rope', bias=False)
UNTIED = dataclasses.replace(SMALL, tie_embeddings=False)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 300, (2, 32), generator=generator) for _ in range(2)]


def noisy(config, **kwargs):
    return with_noise(GPT(config, dtype=torch.float32, **kwargs))


MILLIONS = {        # as transformers counts
    'gpt2': 124.44, 'gpt2-medium': 354.82, 'gpt2-large': 774.03, 'gpt2-xl': 1557.61,
    'h100-350m': 350.36,    # 24 * (4 * 1024**2 + 3 * 1024 * 2688 + 2 * 1024) + 50257 * 1024 + 1024
    'llama-3.2-1b': 1235.81, 'llama-3.2-3b': 3212.75, 'llama-3.1-8b': 8030.26, 'qwen2.5-0.5b': 494.03,
    'qwen2.5-1.5b': 1543.71, 'qwen2.5-3b': 3085.94, 'qwen2.5-7b': 7615.62, 'qwen2.5-14b': 14770.03,
    'qwen3-0.6b': 596.05, 'qwen3-1.7b': 1720.57, 'qwen3-4b': 4022.47, 'qwen3-8b': 8190.74,
    'qwen3-14b': 14768.31, 'smollm2-135m': 134.52, 'smollm2-360m': 361.82, 'smollm2-1.7b': 1711.38,
}


def test_presets_have_their_models_parameter_counts():
    found = {}
    for name, config in PRESETS.items():
        with torch.device('meta'):
            model = GPT(config, seed=None)
        assert config.count_parameters() == sum(p.numel() for p in model.parameters()), name
        padding = (config.padded_vocab_size - config.vocab_size) * config.n_embd
        padding *= 1 if config.tie_embeddings else 2
        count = sum(p.numel() for p in model.weights().values()) - padding
        found[name] = round(count / 1e6, 2)
    assert found == MILLIONS


def generated(model, idx, count, **how):
    return torch.stack(list(generate(model, idx, count, **how)), 1)


@pytest.mark.slow
def test_a_program_may_end_before_a_generation_does():
    code = """import torch, model
gpt = model.GPT(model.GPTConfig(vocab_size=9, block_size=8, n_layer=1, n_head=1, n_embd=8))
tokens = model.generate(gpt, torch.zeros((1, 1), dtype=torch.long), 3)
assert not next(tokens).requires_grad and torch.is_grad_enabled()
"""
    assert 'Traceback' not in run('-c', code, fork=False).stderr


@pytest.mark.slow
def test_a_checkpoint_is_opened_without_the_compiler(tmp_path):
    """Importing torch._dynamo would double the time that sample.py takes to start."""
    torch.save(checkpoint_of(GPT(LLAMA), 1), tmp_path / 'small.pt')
    code = """import sys
from fp8gpt import pretrained
pretrained.model_of(pretrained.opened(sys.argv[1])[0])
assert 'torch._dynamo' not in sys.modules
"""
    run('-c', code, str(tmp_path / 'small.pt'), fork=False)


def test_generation_past_the_block_and_its_draws():
    model, idx = noisy(SMALL), torch.zeros((3, 40), dtype=torch.long)
    tokens, again, other = (generated(model, idx, 50, top_k=5, seed=seed) for seed in (1, 1, 2))
    assert tokens.shape == (3, 50)
    assert torch.equal(tokens, again)
    assert not torch.equal(tokens, other)
    assert torch.equal(tokens[2:], generated(model, idx[:1], 50, top_k=5, seed=3))      # as if it were alone
    assert tokens.max() < 300
    size = SMALL.block_size     # greedily, each token from the whole window that it sees; so of a long prompt
    seen, start = torch.arange(size - 3)[None], 0
    for token in generated(model, seen, 2 * size, temperature=0)[0]:
        if seen.shape[1] - start > size:
            start = seen.shape[1] - size // 2
        assert model(seen[:, start:])[0, -1].argmax() == token
        seen = torch.cat([seen, token.view(1, 1)], 1)
    assert generated(model, seen, 1, temperature=0) == model(seen[:, -size:])[0, -1].argmax()


def test_top_k_and_top_p_draw_from_the_right_tokens():
    p = torch.tensor([0.4, 0.05, 0.3, 0.05, 0.2])

    def drawn(temperature=1.0, top_k=0, top_p=1.0):
        generator = torch.Generator().manual_seed(0)
        picks = pick(p.log().expand(4000, -1), temperature, top_k, top_p, [generator] * 4000)
        return (picks.flatten().bincount(minlength=5) / 4000).tolist()
    for how, wanted in (
        ({}, p),
        (dict(top_k=2), [4, 0, 3, 0, 0]),
        (dict(top_p=0.7), [4, 0, 3, 0, 0]),             # 0.4 + 0.3 holds 0.7
        (dict(top_p=0.75), [4, 0, 3, 0, 2]),
        (dict(top_k=3, top_p=0.5), [4, 0, 3, 0, 0]),    # of the three: 4/9 < 0.5 <= 7/9
        (dict(temperature=0.5), p**2),
    ):
        wanted = torch.as_tensor(wanted) / sum(wanted)
        assert drawn(**how) == pytest.approx(wanted.tolist(), abs=0.03), how
    assert drawn(top_p=1e-9) == drawn(temperature=0) == drawn(temperature=1e-45) == [1, 0, 0, 0, 0]
    for bad, temperature in itertools.product((math.nan, math.inf), (0.0, 1.0)):
        p[1] = bad
        with pytest.raises(SettingError, match='the model computes NaN or infinity'):
            drawn(temperature)


def test_generation_stops_when_every_row_has_ended():
    model, idx = noisy(SMALL), torch.arange(6).view(3, 2)
    stop = int(generated(model, idx, 30, seed=1)[0, 4])
    ended = generated(model, idx, 30, seed=1, stops=(stop,)).tolist()
    first = [row.index(stop) if stop in row else 30 for row in ended]
    assert first[0] <= 4
    assert all(set(row[n:]) <= {stop} for row, n in zip(ended, first))
    assert len(ended[0]) == min(max(first) + 1, 30)
    other = next(token for row in ended for token in row if token != stop)
    for stops in (stop, other), (other, stop):      # a finished row repeats the first of several
        ended = generated(model, idx, 30, seed=1, stops=stops).tolist()
        first = [min([n for n, token in enumerate(row) if token in stops], default=30) for row in ended]
        assert all(set(row[n + 1:]) <= {stops[0]} for row, n in zip(ended, first))
        assert min(first) + 1 < len(ended[0])


def test_initial_weights_depend_on_name_and_seed_alone():
    class Other(Linear):
        def __init__(self, *args, **kwargs):
            torch.rand(17)
            super().__init__(*args, **kwargs)
    torch.manual_seed(5)
    a, b = GPT(UNTIED, seed=3).weights(), GPT(UNTIED, Other, seed=3).weights()
    assert same_tensors(a, b)
    assert not torch.equal(a['wte.weight'], GPT(UNTIED, seed=4).wte.weight)
    assert not torch.equal(a['wte.weight'], a['lm_head.weight'])
    for name, std in (('wte', 0.02), ('lm_head', 0.02), ('h.0.mlp.down', 0.02 / 6**0.5)):
        assert a[f'{name}.weight'].std().item() == pytest.approx(std, rel=0.03)


def test_dtypes():
    model, seen = GPT(SMALL), []
    for module in model.modules():
        if hasattr(module, 'in_features'):
            module.register_forward_hook(lambda module, x, y: seen.append((x[0].dtype, y.dtype)))
    logits = model(torch.zeros((1, 8), dtype=torch.long))
    assert logits.dtype == torch.float32
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 13
    assert all(p.dtype == torch.float32 for p in model.parameters())
    plain, rounded = GPT(LLAMA, seed=3), GPT(LLAMA, seed=3, param_dtype=torch.bfloat16)
    assert same_tensors({name: p.bfloat16() for name, p in plain.weights().items()}, rounded.weights())
    assert {b.dtype for b in rounded.buffers()} == {torch.float32}  # RoPE's angles


def test_no_heads_are_shared_where_cuda_has_no_kernel_for_it(monkeypatch):
    """In fp32 flash attention does not serve, and the memory-efficient kernel takes no shared heads."""
    def attend(q, k, v, enable_gqa, **options):
        found.append((k.shape[1], enable_gqa))
        return q

    def make(name):     # torch's asks a CPU build for the device
        _, width, _ = LLAMA.block_linears()[name]
        return lambda x: x.new_empty(*x.shape[:-1], width)
    found = []
    monkeypatch.setattr(model_file.F, 'scaled_dot_product_attention', attend)
    with FakeTensorMode(), torch.device('cuda'):
        for dtype in (torch.float32, torch.bfloat16):
            model_file.Attention(LLAMA, make)(torch.empty(2, 32, 64, dtype=dtype), None, None)
    assert found == [(4, False), (2, True)]


# ------------------------------------------------------------------------------------- the head and its loss

def forms_that_differ(forms, batch, config, frozen=False, put=lambda gpt: gpt):
    """Return which forms (compiled, loss_chunks) give another loss, in training or evaluation, or other
    gradients than the first."""
    idx, targets = batch
    targets[0, :20] = -1        # the first of three chunks has no more than a few
    found = []
    for is_compiled, chunks in forms:
        gpt = noisy(config, loss_chunks=chunks)
        gpt.lm_head.weight.requires_grad_(not frozen)
        network = put(gpt)
        gpt.compiled = is_compiled
        loss = network(idx, targets, n_targets=50)
        (3 * loss).backward()
        with torch.no_grad():
            evaluated = network(idx, targets, n_targets=50)
        found.append([loss.detach(), evaluated, *(p.grad for p in gpt.weights().values())])
    found[0][1] = found[0][0]
    return [form for form, tensors in zip(forms, found)
            if not all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(tensors, found[0]))]


@pytest.mark.parametrize('config, frozen', [(SMALL, False), (LLAMA, False), (UNTIED, False), (UNTIED, True)])
def test_every_form_of_the_loss_is_the_loss(config, frozen, batch):
    """Compiled models take HeadNats, chunks ChunkedNats, others torch's cross-entropy. All in fp32, eager."""
    forms = (False, 1), (True, 1), (False, 3), (True, 3)
    assert forms_that_differ(forms, batch, config, frozen) == []


@pytest.mark.slow
def test_a_compiled_loss_in_chunks_is_the_loss(batch):
    forms = (True, 1), (True, 3)
    put = functools.partial(compiled, backend='aot_eager')
    assert forms_that_differ(forms, batch, LLAMA, put=put) == []


@pytest.mark.parametrize('chunks', [1, 3])
def test_a_loss_goes_backward_twice(chunks, batch):
    gpt = noisy(UNTIED, loss_chunks=chunks)
    loss, weights = gpt(*batch), [*gpt.parameters()]
    once, thrice = (torch.autograd.grad(times * loss, weights, retain_graph=True) for times in (1, 3))
    assert all(torch.allclose(3 * a, b, rtol=1e-5, atol=1e-6) for a, b in zip(once, thrice))


def test_the_heads_gradient_adds_up_in_fp32(batch):
    """In bf16, sixteen parts would add roundings; one is left, of the sum, beside those of the products."""
    x, y = torch.cat([batch[0]] * 8), torch.cat([batch[1]] * 8)
    found = []
    for chunks in (1, 32):
        gpt = GPT(UNTIED, loss_chunks=chunks, param_dtype=torch.bfloat16)
        gpt(x, y).backward()
        found.append(gpt.lm_head.weight.grad)
    assert relative(*found) < 0.004


def test_two_chunks_gradients_take_one_addition_and_no_zeros(batch):
    gpt = noisy(UNTIED, loss_chunks=2)
    with torch.profiler.profile(record_shapes=True) as profile:
        gpt(*batch)
    of_table = [event.name for event in profile.events()
                if [*gpt.lm_head.weight.shape] in event.input_shapes[:1]]
    assert (of_table.count('aten::add_'), of_table.count('aten::zeros_like')) == (1, 0)


def test_a_loss_in_chunks_takes_less_memory():
    """Of 512 tokens, 1024 scores each: 12 bytes a score in eager mode, of an eighth of them at a time."""
    config = dataclasses.replace(SMALL, vocab_size=1024, n_layer=1)
    idx = torch.zeros((16, 32), dtype=torch.long)
    peaks = []
    for chunks in (1, 8):
        gpt = GPT(config, dtype=torch.float32, loss_chunks=chunks)
        peaks.append(peak_bytes(lambda gpt=gpt: gpt(idx, idx).backward()))
    scores, table = 4 * 512 * 1024, 4 * 1024 * 64
    assert peaks[0] > 3 * scores
    assert peaks[0] - peaks[1] > 3 * scores * 7 / 8 - 3 * table     # two sums of gradients, and a chunk's


def test_flops_by_hand():
    # GPT-2 124M at 1024 tokens: N = 12 * 12 * 768**2 + 50257 * 768 = 123,532,032
    config = dataclasses.replace(SMALL, n_layer=2)
    n = 2 * 12 * 64**2 + 300 * 64
    assert config.flops_per_token(32) == 6 * n + 12 * 2 * 64 * 32
    assert GPTConfig().flops_per_token(1024) == 6 * 123_532_032 + 12 * 12 * 768 * 1024
    # heads apart from the width: qkv 64 -> (4 + 2 * 2) * 32, proj 4 * 32 -> 64
    n = 64 * 256 + 128 * 64 + 3 * 64 * 96 + 300 * 64
    config = dataclasses.replace(LLAMA, n_layer=1, head_dim=32)
    assert config.flops_per_token(16) == 6 * n + 12 * 128 * 16


def test_a_long_model_costs_what_is_read_of_it():
    """RoPE's tables are made anew where a sequence is longer; a cache is as long as its text."""
    config = dataclasses.replace(LLAMA, block_size=131_072, n_layer=1)
    model = noisy(config)
    assert len(model.rope_cos) == len(model.rope_sin) == 8192
    with torch.no_grad():
        model(torch.zeros((1, 8200), dtype=torch.long))
    sampling = peak_bytes(lambda: generated(model, torch.zeros((1, 8), dtype=torch.long), 2))
    assert sampling < 2**20     # keys and values of ten tokens
    assert 8200 <= len(model.rope_cos) <= 2 * 8200
    assert torch.equal(model.rope_cos, rope_tables(config, len(model.rope_cos))[0])


def test_rope_is_the_same_in_a_model_that_was_cast_or_had_no_memory():
    with torch.device('meta'):
        empty = GPT(LLAMA, seed=None)
    expected = rope_tables(LLAMA, LLAMA.block_size)
    for model in (GPT(LLAMA).bfloat16(), empty.to_empty(device='cpu')):
        assert torch.equal(torch.stack([model.rope_cos, model.rope_sin]), torch.stack(expected))


def test_the_config_lists_the_linears_that_the_factory_is_asked_for():
    for config in (SMALL, LLAMA, dataclasses.replace(LLAMA, head_dim=32, qk_norm=True, qkv_bias=True)):
        asked = []

        def factory(in_features, out_features, bias, name):
            asked.append((name, in_features, out_features))
            return Linear(in_features, out_features, bias, name)
        GPT(config, factory)
        assert config.linears() == asked


def test_what_does_not_fit_is_refused():
    for fields, message in (
        (dict(n_head=5), 'multiple'),
        (dict(n_kv_head=3), 'multiple'),
        (dict(mlp='relu'), 'mlp is one of'),
        (dict(position='rope', head_dim=3), 'even head width'),
        (dict(n_embd='64'), "n_embd is a whole number above 0, not '64'"),
        (dict(norm_eps=math.nan), 'norm_eps is a number above 0, not nan'),
        (dict(n_layer=10**9), 'up to 4096, not 1000000000 and 16'),     # it would hang for hours
        (dict(head_dim=8192), 'up to 4096, not 3 and 8192'),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SMALL, **fields)
    with pytest.raises(ValueError, match='block_size is 32'):
        GPT(SMALL)(torch.zeros((1, 33), dtype=torch.long))
    larger = dataclasses.replace(SMALL, vocab_size=500)
    for config, message in (LLAMA, 'another model'), (larger, 'wte.weight'):
        with pytest.raises(ValueError, match=message):
            GPT(config).load_weights(GPT(SMALL).weights())


# ------------------------------------------------------------------------------- several examples in a window

LENGTHS = [(7, 1, 12, 12), (20, 9, 3)]      # of the examples in each window of 32


def packed(batch):
    """The batch's windows as examples: (x, y, examples); no example's last token has a target."""
    x, y = batch[0], batch[1].clone()
    examples = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    y[:, :-1][examples[:, 1:] != examples[:, :-1]] = -1
    return x, y, examples


def alone(examples):
    """(row, tokens) of each example."""
    for row, numbers in enumerate(examples):
        for number in numbers.unique():
            yield row, numbers == number


@pytest.mark.parametrize('config, options', [
    (SMALL, {}), (LLAMA, {'checkpoint_every': 1})], ids=['gpt2', 'llama, recomputed'])
def test_a_packed_window_is_its_examples_each_alone(config, options, batch):
    x, y, examples = packed(batch)
    together, apart = noisy(config, **options), noisy(config)
    logits = together(x, examples=examples)
    nats = 0
    for row, tokens in alone(examples):
        one = x[row, tokens][None], y[row, tokens][None]
        torch.testing.assert_close(logits[row, tokens], apart(one[0])[0], atol=1e-4, rtol=1e-5)
        nats = nats + apart(*one, n_targets=1)
    loss = together(x, y, n_targets=1, examples=examples)
    torch.testing.assert_close(loss, nats)
    loss.backward()
    nats.backward()
    for (name, p), q in zip(together.named_parameters(), apart.parameters()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-3, rtol=1e-4, msg=lambda told: f'{name}: {told}')


@pytest.mark.parametrize('tokens', [37, 128, 1000, 1024])
def test_blocks_of_examples_are_those_of_torch(tokens):
    for share in 0.002, 0.02, 0.5:
        starts = torch.rand(3, tokens, generator=torch.Generator().manual_seed(tokens)) < share
        examples = starts.long().cumsum(1)
        ours = model_file.block_mask(examples)
        theirs = create_block_mask(model_file.within(examples), 3, None, tokens, tokens, device='cpu')
        pairs = [pair for pair in zip(ours.as_tuple(), theirs.as_tuple()) if not callable(pair[0])]
        assert sum(isinstance(each, torch.Tensor) for each, _ in pairs) == 8
        assert all(same_tensors(*pair) for pair in pairs)


@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
def test_flex_attention_takes_the_same_mask(batch, monkeypatch):
    x, _, examples = packed(batch)
    model = noisy(LLAMA)
    with torch.no_grad():
        dense = model(x, examples=examples)
        monkeypatch.setattr(
            model_file, 'examples_mask', lambda examples, compiled: model_file.block_mask(examples))
        torch.testing.assert_close(model(x, examples=examples), dense, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_other_examples_are_no_other_graph(batch, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(
        model_file, 'examples_mask', lambda examples, compiled: model_file.block_mask(examples))
    graphs = CompileCounterWithBackend('eager')
    x, _, examples = packed(batch)
    model = noisy(SMALL)
    compiled_model = compiled(model, backend=graphs)
    with torch.no_grad():
        for each in (examples, examples.flip(0)):
            with model.eager():
                expected = model(x, examples=each)
            torch.testing.assert_close(compiled_model(x, examples=each), expected)
            assert graphs.frame_count == 4      # embedding, the first block, the other, head
