"""Hugging Face models in and out, against transformers: tiny random ones, made here."""
import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from fp8gpt import checkpoint, files, hf_families, pretrained
import hf
from configurator import DataError, MissingError, SettingError
from conftest import ROOT, refused, run
from model import GPT, PRESETS, GPTConfig, generate
from helpers import checkpoint_of, gpt_in, same_tensors, with_noise
from fp8gpt.hf_families import read_config, split, their_config
from damage import LLAMA as CONFIG, folders_taken
from hub import Hub, serve
from preparing import needs_bpe
from fp8gpt.tokenizer import REVISIONS, get_tokenizer
from tokenizers_made import make_tokenizer

transformers = pytest.importorskip('transformers')

LIKE = dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.15)
SCALED = {'rope_type': 'llama3', 'rope_theta': 500.0, 'factor': 8.0, 'low_freq_factor': 1.0,
          'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}
MODELS = {
    'gpt2': ('GPT2', dict(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0,
                          embd_pdrop=0, attn_pdrop=0, initializer_range=0.15,
                          bos_token_id=0, eos_token_id=0)),
    'llama': ('Llama', LIKE),
    'llama, scaled': ('Llama', dict(LIKE, rope_parameters=SCALED)),
    'llama, biases': ('Llama', dict(LIKE, attention_bias=True, mlp_bias=True)),
    'smollm2': ('Llama', dict(LIKE, num_attention_heads=9, num_key_value_heads=3, hidden_size=72,
                              tie_word_embeddings=True,
                              rope_parameters={'rope_type': 'default', 'rope_theta': 1e5})),
    'qwen2': ('Qwen2', dict(LIKE, sliding_window=16, use_sliding_window=False)),
    'qwen3': ('Qwen3', dict(LIKE, head_dim=32, tie_word_embeddings=True)),
    'mistral': ('Mistral', dict(LIKE, head_dim=24, sliding_window=None)),
}
OURS = {
    'gpt2': GPTConfig(vocab_size=257, block_size=64, n_layer=2, n_head=4, n_embd=64, ffn_dim=96),
    'llama, scaled': dataclasses.replace(CONFIG, rope_factor=8.0, rope_original=32, rope_theta=500.0),
    'qwen2': dataclasses.replace(CONFIG, qkv_bias=True),
    'qwen3': dataclasses.replace(CONFIG, qk_norm=True, head_dim=32, tie_embeddings=True),
}
WIDE = dataclasses.replace(CONFIG, n_head=2, n_kv_head=1, n_embd=128, ffn_dim=256, head_dim=128)
IDX = torch.randint(0, 257, (2, 48), generator=torch.Generator().manual_seed(0))


def theirs_of(name):
    """A transformers model of MODELS."""
    kind, fields = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f'{kind}Config')(**fields)
    auto = transformers.AutoModelForCausalLM
    return with_noise(auto.from_config(config, attn_implementation='eager').eval())


def saved(model, folder, **how):
    model.save_pretrained(folder, **how)
    return str(folder)


def ours_in(folder, config, tokenizer='byte'):
    """(path of a checkpoint, its GPT) of random weights, computed in fp32."""
    gpt = with_noise(GPT(config, dtype=torch.float32))
    path = str(folder / 'step_000007.pt')
    torch.save(checkpoint_of(gpt, step=7, tokenizer=tokenizer), path)
    return path, gpt


# --------------------------------------------------------------------------------------------------------- in

@pytest.mark.parametrize('name', MODELS)
def test_logits_gradients_greedy_text_and_an_export_are_transformers(name, tmp_path):
    theirs = theirs_of(name)
    ours = gpt_in(saved(theirs, tmp_path)).float()     # a cast sets the compute dtype, too; a move does not
    assert (ours.to('cpu').dtype, GPT(ours.config).to('cpu').dtype) == (torch.float32, torch.bfloat16)
    logits = theirs(IDX).logits
    torch.testing.assert_close(ours(IDX), logits, atol=1e-5, rtol=1e-5)
    targets = IDX.roll(-1, 1)
    loss, own_loss = F.cross_entropy(logits.mT, targets), ours(IDX, targets)
    torch.testing.assert_close(own_loss, loss, atol=1e-5, rtol=1e-5)
    loss.backward(), own_loss.backward()
    wanted = dict(theirs.named_parameters())
    for own, p in ours.weights().items():
        for name, part in split(ours.config, own, p.grad).items():
            torch.testing.assert_close(part, wanted.pop(name).grad, atol=1e-5, rtol=1e-3)
    assert not wanted
    text = theirs.generate(IDX[:, :8], do_sample=False, max_new_tokens=40, eos_token_id=None)
    assert torch.equal(torch.stack(list(generate(ours, IDX[:, :8], 40, temperature=0)), 1), text[:, 8:])
    torch.save(checkpoint_of(ours, step=1), tmp_path / 'again.pt')
    hf.export(str(tmp_path / 'again.pt'), str(tmp_path / 'again'))
    before, after = (load_file(path / 'model.safetensors') for path in (tmp_path, tmp_path / 'again'))
    assert same_tensors(before, after)
    assert GPTConfig(**pretrained.source(str(tmp_path / 'again'))['model_config']) == ours.config
    auto = transformers.AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / 'again', attn_implementation='eager')
    torch.testing.assert_close(again(IDX).logits, logits, atol=1e-5, rtol=1e-5)


def test_other_layouts_of_files_are_read(tmp_path):
    """Shards; OpenAI's file of GPT-2: names without a prefix, masks among the tensors, no entry on tying;
    rope_theta and rope_scaling, which transformers 5 keeps in rope_parameters."""
    models = {name: theirs_of(name) for name in ('smollm2', 'gpt2', 'llama, scaled')}
    shards, openai, older = (tmp_path / name for name in models)
    saved(models['smollm2'], shards, max_shard_size='50KB')
    assert len(list(shards.glob('model-*.safetensors'))) > 2
    saved(models['gpt2'], openai)
    body = {name: p.detach().contiguous() for name, p in models['gpt2'].transformer.named_parameters()}
    save_file({**body, 'h.0.attn.bias': torch.ones(1, 1, 64, 64)}, openai / 'model.safetensors')
    change_config(openai, tie_word_embeddings=None)
    saved(models['llama, scaled'], older)
    scaling = {'type': 'llama3', **{name: value for name, value in SCALED.items() if 'rope' not in name}}
    change_config(older, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling)
    for name, theirs in models.items():
        ours = gpt_in(tmp_path / name, dtype=torch.float32)
        torch.testing.assert_close(ours(IDX), theirs(IDX).logits, atol=1e-5, rtol=1e-5, msg=name)


EMBEDDING, HEAD = 'model.embed_tokens.weight', 'lm_head.weight'
UNSCALED = {'rope_type': 'default', 'rope_theta': 500.0}
SLIDING = dict(use_sliding_window=True, max_window_layers=1, layer_types=None)
TWO_NORMS = {'model.norm.weight': torch.full((64,), 9.0)}


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def bare(tensors):
    """Name tensors as those of GPT2Model, without a head."""
    return {name.removeprefix('transformer.'): t for name, t in tensors.items()}


def write_index(folder, *values):
    """Write an index whose weight_map has these values."""
    index = {'metadata': {}, 'weight_map': {str(number): value for number, value in enumerate(values)}}
    (folder / 'model.safetensors.index.json').write_text(json.dumps(index))


@pytest.mark.parametrize('kind, changes, change_tensors, tied', [
    ('llama', dict(rope_scaling=SCALED), None, False),
    ('llama, scaled', dict(rope_scaling=without(SCALED, 'rope_theta')), None, False),   # theta is then 10,000
    ('llama, scaled', dict(rope_scaling=UNSCALED), None, False),
    ('llama, scaled', dict(rope_scaling={}), None, False),
    ('llama', dict(rope_parameters=None, rope_theta=77.0, rope_scaling={'type': 'default'}), None, False),
    ('llama', dict(rope_scaling=without(SCALED, 'original_max_position_embeddings')), None, False),
    ('qwen2', dict(SLIDING, sliding_window=64), None, False),
    ('qwen2', dict(SLIDING, sliding_window=None), None, False),
    ('qwen3', dict(SLIDING, layer_types=['sliding_attention'] * 2, sliding_window=99), None, True),
    ('llama', dict(max_position_embeddings=None), None, False),
    ('mistral', dict(max_position_embeddings=None, sliding_window=131072), None, False),
    ('gpt2', {}, bare, True),
    ('smollm2', {}, lambda t: {**t, HEAD: t[EMBEDDING].clone()}, True),
    ('llama', {}, lambda t: {**t, HEAD: t[EMBEDDING].clone()}, False),
])
def test_a_folder_is_read_as_transformers_reads_it(kind, changes, change_tensors, tied, tmp_path, capsys):
    saved(theirs_of(kind), tmp_path)
    capsys.readouterr()
    change_config(tmp_path, **changes)
    tensors = load_file(tmp_path / 'model.safetensors')
    if change_tensors:
        save_file(change_tensors(tensors), tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    ours, said = gpt_in(tmp_path, dtype=torch.float32), capsys.readouterr().out
    auto = transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(tmp_path, attn_implementation='eager')
    torch.testing.assert_close(ours(IDX), theirs(IDX).logits, atol=1e-4, rtol=1e-4)
    assert ours.config.tie_embeddings == tied
    if positions := changes.get('max_position_embeddings', 0) is None:
        positions = theirs.config.max_position_embeddings
        assert (ours.config.block_size, f'no max_position_embeddings: it is {positions:,}, as' in said) == (
            positions, True)
    else:
        assert said == ''


def test_null_fields_are_read_as_missing_ones(tmp_path):
    """transformers takes some of them, and stops at others."""
    saved(theirs_of('llama'), tmp_path)
    path = tmp_path / 'config.json'
    path.write_text(json.dumps({**json.loads(path.read_text()), 'partial_rotary_factor': None,
                                'rope_scaling': None, 'layer_types': None, 'quantization_config': None}))
    torch.testing.assert_close(gpt_in(tmp_path, dtype=torch.float32)(IDX), theirs_of('llama')(IDX).logits,
                               atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('first, second', [
    ('model.safetensors-00001-of-00002.safetensors', 'model.safetensors-00002-of-00002.safetensors'),
    ('consolidated-a.safetensors', 'part [1].safetensors'), ('a/x.safetensors', 'b/x.safetensors')])
def test_the_index_names_the_files_and_model_safetensors_comes_first(first, second, tmp_path):
    """Files that the index does not name are not read, as by transformers."""
    wanted = saved(theirs_of('llama'), tmp_path) and theirs_of('llama')(IDX).logits
    whole = tmp_path / 'model.safetensors'
    tensors = load_file(whole)
    for number, file in enumerate((first, second)):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        part = {name: tensors[name] for name in sorted(tensors)[number::2]}
        save_file(part, tmp_path / file, metadata={'format': 'pt'})
    stale = tmp_path / 'model-00001-of-00001.safetensors'
    save_file(TWO_NORMS, stale)
    read = {'from one': gpt_in(tmp_path, dtype=torch.float32)}
    whole.unlink()
    write_index(tmp_path, first, second, first)
    read['by the index'] = gpt_in(tmp_path, dtype=torch.float32)
    read['by transformers'] = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, found in read.items():
        logits = found(IDX)
        torch.testing.assert_close(getattr(logits, 'logits', logits), wanted, atol=1e-5, rtol=1e-5, msg=name)


def change_config(folder, file='config', **changes):
    """config.json, or another file, with these; None takes an entry out."""
    path = folder / f'{file}.json'
    theirs = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in theirs.items() if value is not None}))


def test_weights_are_read_one_at_a_time(tmp_path, monkeypatch):
    saved(theirs_of('llama'), tmp_path)
    alive, most, real = [], [], pretrained.Weights.__getitem__

    def watched(weights, name):
        tensor = real(weights, name)
        alive.append(weakref.ref(tensor))
        most.append(sum(ref() is not None for ref in alive))
        return tensor
    monkeypatch.setattr(pretrained.Weights, '__getitem__', watched)
    source = pretrained.source(str(tmp_path))
    assert not most
    gpt = GPT(GPTConfig(**source['model_config']), seed=None)
    gpt.load_weights(source['weights'])
    assert len(most) == len(gpt.weights())
    assert max(most) <= 2  # the previous tensor is freed once the next has been read


def test_what_a_model_uses_and_gpt_lacks_is_refused_by_name(tmp_path):
    """A sliding window that no layer uses is not."""
    for name in ('gpt2', 'llama', 'qwen2'):
        saved(theirs_of(name), tmp_path / name)
    wrong, unused = [], dict(layer_types=None, sliding_window=16)
    for name, change, message in (
        ('llama', dict(model_type='qwen3_moe'), 'model_type=qwen3_moe is not built: gpt2, '),
        ('llama', dict(hidden_act='gelu'), 'hidden_act=gelu is not built: silu is'),
        ('llama', dict(rope_parameters=None, rope_scaling={'type': 'dynamic', 'factor': 2.0}), '=dynamic'),
        ('llama', dict(partial_rotary_factor=0.5), 'partial_rotary_factor=0.5'),
        ('llama', dict(rope_scaling={'rope_type': 'yarn', 'factor': 4.0}), 'rope_type=yarn'),
        ('llama', dict(rope_parameters={'full_attention': SCALED}), 'rope_parameters of each layer type'),
        ('llama', dict(rope_scaling={'sliding_attention': {}, 'rope_theta': 9.0}), 'each layer type'),
        ('llama', dict(use_sliding_window=True, sliding_window=16), 'sliding_attention (sliding_window=16)'),
        ('llama', dict(layer_types=['full_attention', 'sliding_attention'], sliding_window=63),
         'sliding_attention (sliding_window=63) is not built'),
        ('llama', dict(layer_types=['full_attention', 'chunked_attention']), 'chunked_attention (sliding'),
        ('llama', dict(model_type='mistral', max_position_embeddings=4097), '(sliding_window=4096) is not'),
        ('llama', dict(quantization_config={'quant_method': 'fp8', 'weight_block_size': [128, 128]}),
         "quantised weights ({'quant_method': 'fp8', "),
        ('gpt2', dict(quantization={'group_size': 64, 'bits': 4}), 'are not read: name the bf16 release'),
        ('llama', dict(attention_bias=True), 'biases of attention alone, or of the MLP alone, are not built'),
        ('gpt2', dict(activation_function='relu'), 'activation_function=relu is not built: gelu_new is'),
        ('llama', dict(is_causal=False), 'is_causal=False is not built: True is'),
        ('gpt2', dict(is_causal=False), 'is_causal=False'),
        ('qwen2', dict(unused, use_sliding_window=False, max_window_layers=1), ''),
        ('qwen2', dict(unused, use_sliding_window=True, max_window_layers=2), ''),
    ):
        path = tmp_path / name / 'config.json'
        whole, said = path.read_text(), ''
        change_config(path.parent, **change)
        try:
            pretrained.source(str(path.parent))
        except SettingError as refusal:
            said = str(refusal)
        if bool(said) != bool(message) or message not in said or '\n' in said:
            wrong.append((change, said))
        path.write_text(whole)
    assert wrong == []


def test_a_strangers_folder_is_read_or_refused_in_one_line(tmp_path):
    """Fields, dtypes, NaN, names in the index: make drill tries more of them."""
    assert folders_taken(str(tmp_path), 60) == []


def test_tensors_that_are_not_the_models_are_refused(tmp_path):
    saved(theirs_of('llama'), tmp_path)
    path, key, wrong = tmp_path / 'model.safetensors', 'model.layers.1.mlp.up_proj.weight', []
    tensors = load_file(path)
    lacks = {name: t for name, t in tensors.items() if name != key}
    for spoil, kind, message in (
        (lambda: save_file(lacks, path), DataError, f'1 tensors .* first, {key}, is missing'),
        (lambda: save_file({**tensors, 'model.extra.weight': torch.ones(2)}, path), DataError,
         r'first, model.extra.weight, is \(2,\)'),
        (lambda: save_file({**tensors, key: tensors[key].t().contiguous()}, path), DataError,
         r'up_proj.weight, is \(64, 96\) .* \(96, 64\)'),
        (lambda: save_file({**lacks, key: tensors[key].to(torch.float8_e4m3fn)}, path), DataError,
         'up_proj.weight is F8_E4M3: F32, BF16, F16 are read'),
        (lambda: save_file(without(tensors, HEAD), path), DataError, f'{HEAD}, is missing .* save_pr'),
        (lambda: (save_file(tensors, path), change_config(tmp_path, tie_word_embeddings=True)), DataError,
         f'{HEAD} is not {EMBEDDING}, though config.json says tie_word_embeddings: write false there'),
        (lambda: change_config(tmp_path, tie_word_embeddings=False), None, ''),
        (lambda: save_file({**tensors, key: tensors[key].log()}, path), DataError, f'{key} holds NaN or'),
        (lambda: save_file(without(tensors, EMBEDDING), path), DataError, f'{EMBEDDING}, is missing in the'),
        (lambda: save_file(tensors, path), None, ''),
        (lambda: path.write_bytes(path.read_bytes()[:1000]), DataError, 'model.safetensors cannot be read'),
        (path.unlink, MissingError, 'has no model.safetensors, and no .* save_pretrained write it from o'),
        (lambda: write_index(tmp_path, 'a.safetensors'), MissingError, 'a.safetensors is not there, though'),
        (lambda: write_index(tmp_path, 'config.json'), DataError, 'config.json cannot be read'),
        (lambda: change_config(tmp_path, hidden_size=None), DataError,
         "config.json describes no model .*'hidden_size'"),
        (lambda: (tmp_path / 'config.json').write_text('{'), DataError, 'config.json holds no JSON object'),
        ((tmp_path / 'config.json').unlink, MissingError, 'has no config.json'),
    ):
        spoil()
        if kind is None:
            gpt_in(tmp_path)
            continue
        with pytest.raises(kind) as refusal:
            gpt_in(tmp_path)
        if not re.search(message, str(refusal.value)):
            wrong.append((message, str(refusal.value)))
    assert wrong == []


# -------------------------------------------------------------------------------------------------------- out

def exported(folder, config, **how):
    """(folder of an export, the GPT in it) of random weights."""
    path, gpt = ours_in(folder, config)
    hf.export(path, str(folder / 'out'), **how)
    return folder / 'out', gpt


def test_an_export_is_rounded_once_and_readable_by_all(tmp_path):
    out, gpt = exported(tmp_path, CONFIG, dtype='bf16')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 256
    again = gpt_in(out).weights()
    assert all(torch.equal(again[name], p.bfloat16().float()) for name, p in gpt.weights().items()
               if name.startswith('h.'))
    (tmp_path / 'any').touch()      # with the modes that the umask leaves
    assert {path.stat().st_mode for path in out.iterdir()} == {(tmp_path / 'any').stat().st_mode}


def test_every_preset_has_an_architecture_and_comes_back_from_it():
    """A mixture that transformers lacks is refused by its fields."""
    for name, preset in PRESETS.items():
        theirs = their_config(preset)
        auto = transformers.AutoConfig.for_model(**json.loads(json.dumps(theirs)))
        kind = theirs['architectures'][0].replace('LMHeadModel', '').replace('ForCausalLM', '')
        assert (type(auto).__name__, read_config(theirs)) == (f'{kind}Config', preset), name
        n_ctx = preset.block_size if kind == 'GPT2' else None   # llama.cpp's converter reads it
        assert theirs.get('n_ctx') == n_ctx
    for fields in (dict(norm='layernorm'), dict(mlp='gelu'), dict(qk_norm=True, bias=True)):
        (name, value), *_ = fields.items()
        with pytest.raises(SettingError, match=f'{name}={value}'):
            their_config(dataclasses.replace(CONFIG, **fields))


def test_a_field_that_an_export_would_drop_is_refused(monkeypatch):
    """Whatever GPTConfig gets: what config.json does not hold, a reader would not know."""
    @dataclasses.dataclass(frozen=True)
    class Sliding(GPTConfig):
        sliding_window: int = 0
    monkeypatch.setattr(hf_families, 'GPTConfig', Sliding)
    shape = dataclasses.asdict(PRESETS['llama-3.2-1b'])
    their_config(Sliding(**shape))
    with pytest.raises(SettingError, match='sliding_window=4096 cannot be exported'):
        their_config(Sliding(**shape, sliding_window=4096))
    with pytest.raises(SettingError, match='rope_theta=5.0 cannot be exported'):
        their_config(dataclasses.replace(PRESETS['gpt2'], rope_theta=5.0))


def test_an_export_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path, _ = ours_in(tmp_path, CONFIG)

    def full(tensors, folder):
        pathlib.Path(folder, 'model.safetensors').write_bytes(b'half')
        raise OSError('No space left on device')
    monkeypatch.setattr(hf, 'save_torch_state_dict', full)
    with pytest.raises(DataError, match='could not write .*out .No space left'):
        hf.export(path, str(tmp_path / 'out'))
    assert [p.name for p in tmp_path.iterdir()] == ['step_000007.pt']
    (tmp_path / 'out').mkdir()
    (tmp_path / 'link').symlink_to('nowhere')
    for name in 'out', 'link':
        code, message = refused('hf.py', 'export', f'--ckpt={path}', f'--out={tmp_path}/{name}')
        assert (code, f'{name} exists already: remove it' in message) == (2, True)
    monkeypatch.undo()
    with pytest.raises(DataError, match='could not write'):     # the libraries write UTF-8 names alone
        hf.export(path, f'{tmp_path}/\udcff')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['link', 'out', 'step_000007.pt']


# -------------------------------------------------------------------------------------------------------- FP8

def read_by_transformers(out):
    """The model of an FP8 export, its weights unpacked to fp32."""
    pytest.importorskip('accelerate')
    return transformers.AutoModelForCausalLM.from_pretrained(
        out, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.float32)


def test_fp8_is_laid_out_as_qwens_and_transformers_reads_it(tmp_path):
    out, gpt = exported(tmp_path, WIDE, fp8=True)
    tensors = load_file(out / 'model.safetensors')
    data, scale_inv = (tensors[f'model.layers.0.mlp.gate_proj.weight{end}'] for end in ('', '_scale_inv'))
    assert tensors['lm_head.weight'].dtype == torch.float32
    assert sum(name.endswith('_scale_inv') for name in tensors) == 14
    assert (data.dtype, data.shape, scale_inv.dtype) == (torch.float8_e4m3fn, (256, 128), torch.float32)
    weight = gpt.weights()['h.0.mlp.gate_up.weight']
    amax = torch.stack([weight[:128].abs().max(), weight[128:256].abs().max()])
    torch.testing.assert_close(scale_inv[:, 0], amax / 448)
    assert data.float().abs().max() == 448
    assert json.loads((out / 'config.json').read_text())['quantization_config'] == {
        'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': [128, 128],
        'modules_to_not_convert': ['lm_head']}
    with pytest.raises(SettingError, match=r'quantised weights .* are not read: name the bf16 release'):
        gpt_in(out)
    found, rounding = dict(read_by_transformers(out).named_parameters()), []
    for own, weight in gpt.weights().items():
        for name, part in split(WIDE, own, weight).items():
            off = (found.pop(name) - part).norm() / part.norm()
            if f'{name}_scale_inv' in tensors:
                rounding.append(off.item())
            else:
                assert off == 0, name
    assert 0.01 < min(rounding) <= max(rounding) < 0.04     # e4m3's: at most 1 in 16, 2.6% on the average
    assert not found


def test_a_block_of_zeros_is_exported_as_zeros(tmp_path):
    """As zero-initialised projections are: its scale is a number, and not 0."""
    gpt = GPT(WIDE)
    gpt.weights()['h.0.mlp.down.weight'].data.zero_()
    torch.save(checkpoint_of(gpt, 7), tmp_path / 'zeros.pt')
    hf.export(str(tmp_path / 'zeros.pt'), str(tmp_path / 'out'), fp8=True)
    tensors, name = load_file(tmp_path / 'out' / 'model.safetensors'), 'model.layers.0.mlp.down_proj.weight'
    scale_inv = tensors[f'{name}_scale_inv']
    assert (scale_inv.isfinite() & (scale_inv > 0)).all()
    assert not tensors[name].float().any()      # nor is any of them NaN


def test_fp8_leaves_out_weights_without_whole_blocks(tmp_path):
    """GPT-2 in transformers has no nn.Linear."""
    out, gpt = exported(tmp_path, dataclasses.replace(WIDE, ffn_dim=192), fp8=True)
    quantisation = json.loads((out / 'config.json').read_text())['quantization_config']
    assert 'model.layers.1.mlp.up_proj' in quantisation['modules_to_not_convert']
    up = load_file(out / 'model.safetensors')['model.layers.1.mlp.up_proj.weight']
    assert torch.equal(up, gpt.weights()['h.1.mlp.gate_up.weight'][192:])
    narrow = tmp_path / 'narrow'
    narrow.mkdir()
    out, _ = exported(narrow, dataclasses.replace(WIDE, head_dim=64), fp8=True)     # k and v have 64 rows
    quantisation = json.loads((out / 'config.json').read_text())['quantization_config']
    kept = {name.split('.')[-1] for name in quantisation['modules_to_not_convert']}
    assert kept == {'lm_head', 'q_proj', 'k_proj', 'v_proj'}    # which vLLM computes as one
    for number, config in enumerate((OURS['gpt2'], CONFIG)):    # CONFIG's linears are narrow
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(SettingError, match='--fp8 stores linear layers whose sizes are multiples of 128'):
            exported(folder, config, fp8=True)
        assert not (folder / 'out').exists()


# ------------------------------------------------------------------------------------------------- tokenizers

TEXTS = ['Hello, world! \n\n  two  spaces\tand\r\n a tab', 'naïve 東京 \U0001f600 ½ don\'t we\'ll',
         'def f(x):\n    return x**2  # 12345', ' ', '', '\x00\x01é']


@pytest.mark.parametrize('name, kinds', [
    ('byte', ['gpt2', 'qwen3']),
    pytest.param('gpt2', ['gpt2', 'qwen2'], marks=[needs_bpe, pytest.mark.slow])])
def test_auto_tokenizer_gives_the_same_ids(name, kinds, tmp_path):
    for kind in kinds:
        config = OURS[kind]
        if name == 'gpt2':
            config = dataclasses.replace(config, vocab_size=50257, n_layer=1, n_embd=16, head_dim=4)
        path, _ = ours_in(tmp_path, config, name)
        out = tmp_path / kind
        hf.export(path, str(out))
        auto = transformers.AutoTokenizer
        if (name, kind) == ('gpt2', 'qwen2'):   # AutoTokenizer replaces Qwen2's pre-tokenizer
            auto = transformers.PreTrainedTokenizerFast
        theirs, ours = auto.from_pretrained(out), get_tokenizer(name)
        for text in [*TEXTS, (ROOT / 'model.py').read_text()]:
            ids = theirs(text)['input_ids']
            assert ids == ours.encode(text).tolist()
            assert theirs.decode(ids) == text
        assert (theirs.eos_token_id, theirs.unk_token_id, len(theirs)) == (ours.eot, ours.eot, ours.eot + 1)
        prompt = 'The<|endoftext|> end<|endoftext|>'
        assert theirs(prompt)['input_ids'] == ours.encode(prompt, special=True).tolist()
        assert pretrained.source(str(out))['tokenizer'] == get_tokenizer(str(out)).name == name


def test_a_tokenizer_knows_what_pads(tmp_path):
    for generation, token, wanted in (
            ({}, None, None), ({}, '[PAD]', 600), ({'pad_token_id': 0}, '[PAD]', 0)):
        folder = make_tokenizer(
            tmp_path / f'{wanted}', generation=generation, words=['[PAD]'], pad_token=token)
        assert get_tokenizer(folder).pad == wanted
    for size, wanted in (600, None), (601, 600):      # a model builds no row for it that it has not
        tokenizer = get_tokenizer(f'{tmp_path}/600')
        model = GPT(dataclasses.replace(CONFIG, vocab_size=size))
        torch.save(checkpoint_of(model, 1, tokenizer=tokenizer.name), f'{tokenizer.folder}/{size}.pt')
        hf.export(f'{tokenizer.folder}/{size}.pt', f'{tmp_path}/of_{size}')
        assert json.loads((tmp_path / f'of_{size}/config.json').read_text())['pad_token_id'] == wanted
    assert get_tokenizer('byte').pad is None


# ------------------------------------------------------------------------------------------------ as a start

TRAIN = ['--tokenizer=byte', '--batch_size=4', '--max_lr=1e-4', '--warmup_steps=1', '--eval_tokens=512',
         '--log_freq=1', '--dtype=fp32', '--param_dtype=fp32', '--optimizer=adamw']


@pytest.fixture
def folder(tmp_path):
    """A model that reads bytes, and 64 of them at most."""
    return exported(tmp_path, OURS['llama, scaled'])[0]


def test_a_run_starts_from_a_folder_and_resumes_without_it(folder, tiny_data, tmp_path):
    out = tmp_path / 'run'
    words = ['train_fp8.py', *TRAIN, f'--dataset={tiny_data}', f'--checkpoint_dir={out}']
    run(*words, f'--init_from={folder}', '--block_size=32', '--max_steps=1', '--max_lr=1e-30')
    state = checkpoint.read(str(out / 'latest.pt'))
    assert (state['config']['init_from'], state['config']['block_size']) == (str(folder), 32)
    assert state['model_config']['block_size'] == 64
    assert same_tensors(state['weights'], gpt_in(folder).weights())
    folder.rename(tmp_path / 'gone')
    done = run(*words, '--resume=latest', '--block_size=64', '--max_steps=3')
    assert 'block_size: 32 in the checkpoint, now 64' in done.stdout
    state = checkpoint.read(str(out / 'latest.pt'))
    assert (state['step'], state['config']['block_size']) == (3, 64)
    assert state['tokens'] == (4 * 32) + 2 * (4 * 64)


def test_what_contradicts_the_model_is_refused_and_a_larger_vocabulary_is_not(folder, tiny_data, here):
    words = *TRAIN, f'--dataset={tiny_data}', f'--init_from={folder}'
    code, said = refused('train.py', *words, '--n_layer=3')
    assert (code, 'n_layer=3, but the checkpoint has n_layer=2' in said) == (2, True), said
    (folder / 'tokenizer.json').write_text('{"model": {"vocab": {"a": 0}}}')
    code, said = refused('train.py', *words)
    assert (code, 'is tokenized with byte, the checkpoint with sha256:' in said) == (2, True)
    saved(theirs_of('llama'), folder / 'larger')    # as Qwen's 151,936 rows for 151,665 tokens
    words = *TRAIN, f'--dataset={tiny_data}', f'--init_from={folder}/larger', '--max_steps=1', '--dry_run'
    assert 'vocabulary 300 (padded to 320)' in here('train.py', *words)


# -------------------------------------------------------------------------------------------------------- hub

ACCEPT = 'accept its licence at https://huggingface.co/owner/name and set HF_TOKEN'


def test_an_export_removes_what_a_killed_one_left_and_nothing_else(tmp_path):
    (tmp_path / 'out.tmp').mkdir()
    left = pathlib.Path(files.temporary_name(str(tmp_path / 'out')))
    left.mkdir()
    with hf.new_folder(str(tmp_path / 'out')):
        pass
    assert sorted(os.listdir(tmp_path)) == ['out', 'out.tmp']


class Models(Hub):
    """The stand-in, for a model. refusal: a status that it answers everything with, and its error's code."""
    refusal = None

    def do_GET(self):
        if self.refusal:
            status, code = self.refusal
            return self.answer(status, {}, {'X-Error-Code': code} if code else {})
        start = '/api/datasets' if self.path.startswith('/api/models') else '/datasets'
        self.path = start + self.path.removeprefix('/api/models').replace('/main', f'/{self.sha}')
        super().do_GET()

    do_HEAD = do_POST = do_GET


def test_a_run_reads_a_model_of_the_hub_at_one_revision(folder, here, tiny_data, tmp_path, monkeypatch):
    asked, newest = [], 'a' * 40

    def snapshot_download(name, revision, allow_patterns):
        asked.append(revision)
        place = tmp_path / 'snapshots' / (revision or newest)
        shutil.copytree(folder, place, dirs_exist_ok=True)
        return str(place)
    monkeypatch.setattr('huggingface_hub.snapshot_download', snapshot_download)
    monkeypatch.delitem(REVISIONS, 'owner/name', raising=False)
    words = [f'--dataset={tiny_data}', f'--checkpoint_dir={tmp_path}/run']
    words = [*TRAIN, '--max_steps=1', '--lora_rank=2', '--init_from=owner/name', *words]
    out = here('train.py', *words)
    assert out.count(f'# owner/name of the hub at revision {newest}\n') == 1
    assert {*asked[1:]} == {newest} and asked[0] is None
    state = checkpoint.read(str(tmp_path / 'run' / 'latest.pt'))
    assert (state['revisions'], state['lora']['base']) == ({'owner/name': newest}, 'owner/name')
    REVISIONS.clear()
    asked[:], newest = [], 'b' * 40    # the model moves on; a resume stays
    here('train.py', *words, '--resume=latest', '--max_steps=2')
    assert {*asked} == {'a' * 40}
    REVISIONS.clear()


def test_the_files_that_are_fetched_are_those_that_the_index_names(tmp_path, monkeypatch):
    there, cache = tmp_path / 'hub', tmp_path / 'snapshots' / ('a' * 40)

    def snapshot_download(name, revision, allow_patterns):
        cache.mkdir(parents=True, exist_ok=True)
        for path in there.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, cache)
        return str(cache)
    monkeypatch.setattr('huggingface_hub.snapshot_download', snapshot_download)
    monkeypatch.setitem(REVISIONS, 'owner/name', 'a' * 40)
    theirs = theirs_of('smollm2')
    saved(theirs, there)
    (there / 'model.safetensors').rename(there / 'part [1].safetensors')
    for other in ('model-00001-of-00001.safetensors', 'pytorch_model.bin'):
        (there / other).write_bytes(b'other weights')
    write_index(there, 'part [1].safetensors')
    model = pretrained.source('owner/name')
    assert not list(cache.glob('*.safetensors'))     # a plan needs none
    torch.testing.assert_close(pretrained.model_of(model, dtype=torch.float32)(IDX), theirs(IDX).logits)
    assert not {'model-00001-of-00001.safetensors', 'pytorch_model.bin'} & {*os.listdir(cache)}


@pytest.mark.slow
def test_a_repository_is_fetched_once_or_why_not_is_one_line(tmp_path, folder):
    """huggingface_hub reads its environment once, so a process of its own does each."""
    def loaded(rc=0, **more):
        code = ('from fp8gpt import pretrained; from configurator import one_line_errors; one_line_errors(); '
                'gpt = pretrained.model_of(pretrained.source("owner/name")); '
                'print(gpt(__import__("torch").arange(9)[None]).sum().item())')
        return run('-c', code, env={**env, **more}, rc=rc)
    Models.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server = serve(Models)
    env = {'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}', 'HF_HOME': str(tmp_path / 'cache'),
           'HF_HUB_DISABLE_XET': '1', 'HF_HUB_DISABLE_TELEMETRY': '1'}
    Models.refusal = 401, 'GatedRepo'
    assert ACCEPT in loaded(rc=1).stderr
    Models.refusal = None
    assert loaded().stdout.startswith(f'# owner/name of the hub at revision {Hub.sha}\n')
    wanted = gpt_in(folder)(torch.arange(9)[None]).sum().item()
    assert float(loaded().stdout.split()[-1]) == pytest.approx(wanted)
    Models.refusal = 500, ''
    assert float(loaded(HF_HUB_OFFLINE='1').stdout.split()[-1]) == pytest.approx(wanted)
    server.shutdown()
