"""Fine-tuning as users type it: a Hugging Face model's folder and problems with solutions in; out come a loss
that falls on solutions kept back, and folders that transformers and PEFT load."""
import json
import random
import shlex
import sys

import pytest
import torch

from fp8gpt import checkpoint, pretrained, sft
from configurator import configure
from conftest import ROOT, records, run
from helpers import gpt_in
from tokenizers_made import END, make_tokenizer

transformers = pytest.importorskip('transformers')

TYPED = ('--dataset_name nvidia/OpenMathInstruct-2 --batch_size 12 --mixed_precision fp8 '
         '--max_seq_length 1024 --split_name train_1M --use_te --use_wandb --wandb_project llm-fp8 '
         '--wandb_run_name llama32-1b-fp8')
SMALL = ['--learning_rate=1e-2', '--max_steps=8', '--eval_tokens=8192', '--log_freq=1', '--num_workers=0']


def sums(path, count):
    """Problems in OpenMathInstruct-2's columns."""
    draw = random.Random(0)
    with open(path, 'w') as file:
        for _ in range(count):
            a, b = draw.randrange(100), draw.randrange(100)
            row = {'problem': f'What is {a} plus {b}?', 'expected_answer': str(a + b),
                   'generated_solution': f'We add {a} and {b}.\nThe sum of {a} and {b} is {a + b}.'}
            file.write(json.dumps(row) + '\n')
    return path


def save_llama(folder, fields=None, **tokenizer):
    """Save a tiny Llama, with more fields of its config, and its tokenizer."""
    torch.manual_seed(0)
    size = dict(vocab_size=610, hidden_size=64, intermediate_size=128, num_hidden_layers=2, eos_token_id=END,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=0)
    config = transformers.LlamaConfig(**{**size, **(fields or {})})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder, **tokenizer)


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    """A folder with `llama`, a model and its tokenizer, and `data`, prepared from it."""
    place = tmp_path_factory.mktemp('finetune')
    save_llama(place / 'llama', generation={'bos_token_id': 0, 'eos_token_id': [END]})
    run('prepare_data.py', 'nvidia/OpenMathInstruct-2', f'--tokenizer={place}/llama', '--split_name=train_1M',
        f'--data_files={sums(place / "sums.jsonl", 4000)}', f'--data_dir={place}/data')
    return place


def words_of(place, *more):
    """A line of other systems', made small."""
    model, data = ['--model_name', str(place / 'llama')], f'--data_dir={place}/data'
    return [*model, *shlex.split(TYPED), *SMALL, data, *more]


@torch.no_grad()
def assert_same_logits(theirs, path, tolerance):
    """That a model of transformers, or PEFT's, computes as a checkpoint does in fp32."""
    idx = torch.randint(0, 600, (2, 64), generator=torch.Generator().manual_seed(0))
    ours = pretrained.model_of(checkpoint.read(str(path)), dtype=torch.float32)
    torch.testing.assert_close(theirs(idx).logits, ours(idx), atol=tolerance, rtol=tolerance)


def assert_exported(path, place, out):
    """That transformers reads an export of a checkpoint as the same model, with its base's tokenizer."""
    run('hf.py', 'export', f'--ckpt={path}', f'--out={out}')
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert_same_logits(theirs, path, 1e-4)
    assert theirs.config.max_position_embeddings == 4096
    both = [transformers.AutoTokenizer.from_pretrained(each) for each in (out, place / 'llama')]
    assert both[0]('What is 12 plus 30?').input_ids == both[1]('What is 12 plus 30?').input_ids


def assert_learned(place, folder, *flags):
    """That the loss on kept back solutions falls in a run; return what it prints."""
    words = words_of(place, '--fp8_backend=native', *flags, f'--checkpoint_dir={folder}')
    out = run('train_fp8.py', *words).stdout
    first, *_, last = (loss for _, loss in records(folder, 'val/loss'))
    assert last < first - 0.4
    return out


@pytest.mark.slow
def test_the_loss_on_kept_back_solutions_falls(place, tmp_path):
    out = assert_learned(place, tmp_path / 'c')
    assert 'FP8 Training Enabled: 8 of 9 linears' in out
    assert 'settings  config/finetune.py, as no config file is named' in out
    state, before = checkpoint.read(f'{tmp_path}/c/latest.pt'), gpt_in(place / 'llama').weights()
    assert state['weights'].keys() == before.keys()
    assert not torch.equal(state['weights']['wte.weight'].float(), before['wte.weight'])
    assert_exported(tmp_path / 'c' / 'latest.pt', place, tmp_path / 'hf')


@pytest.mark.slow
def test_adapters_learn_and_go_to_peft_and_transformers(place, tmp_path):
    peft, folder = pytest.importorskip('peft'), tmp_path / 'c'
    assert 'config/finetune_lora.py' in assert_learned(place, folder, '--lora_rank=8', '--lora_targets=all')
    assert all('.lora.' in name for name in checkpoint.read(f'{folder}/latest.pt')['weights'])
    for command, name in (('merge', 'merged.pt'), ('save', 'adapter')):
        run('hf.py', command, f'--ckpt={folder}/latest.pt', f'--out={tmp_path}/{name}')
    assert_exported(tmp_path / 'merged.pt', place, tmp_path / 'hf')
    base = transformers.AutoModelForCausalLM.from_pretrained(place / 'llama')
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / 'adapter')).eval()
    assert_same_logits(theirs, tmp_path / 'merged.pt', 1e-3)


@pytest.mark.parametrize('words, expected', [
    ([], dict(max_lr=1e-5, lora_rank=0, optimizer='adamw8bit')),
    (['--learning_rate=3e-5', '--batch_size=4'], dict(max_lr=3e-5, batch_size=4)),
    (['--lora_rank=8'], dict(max_lr=2e-4, lora_rank=8, lora_targets='all', optimizer='adamw')),
    (['--lora_rank=8', '--max_lr=1e-5'], dict(max_lr=1e-5)),
    ([str(ROOT / 'config' / 'finetune.py'), '--lora_rank=8'], dict(max_lr=1e-5, lora_alpha=16.0)),
])
def test_a_line_without_a_config_file_takes_one_by_kind(words, expected, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['train_fp8.py', '--model_name=org/name', *words])
    monkeypatch.setattr(sft, 'prepare_examples', lambda config: None)
    config = pretrained.fine_tuning('train_fp8.py', configure('train_fp8.py'))
    config = sft.ready(config)
    assert {name: config[name] for name in expected} == expected
    assert (config['tokenizer'], config['dataset'], config['param_dtype']) == (
        'org/name', 'openmathinstruct2', 'bf16')
    said = capsys.readouterr().out
    file = 'finetune_lora.py' if '--lora_rank=8' in words else 'finetune.py'
    is_named = any(word.endswith('.py') for word in words)
    assert (f'settings  config/{file}, as no config file is named' in said) == (not is_named)
