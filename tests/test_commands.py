"""Command lines that people bring from other systems: each resolves to the right settings, or is refused in
one line."""
import functools
import shlex

import numpy as np
import pytest
import torch

import configurator
from fp8gpt.run import Run, over_checkpoint, replace_requests
from fp8gpt.shards import ShardWriter
from configurator import SettingError, configure, read_script
from conftest import ROOT, TINY, run

# line: what it sets
RESOLVED = {
    '--use_fp8 --fp8_format hybrid --use_tensorboard --run_name gpt2_fp8_production '
    '--checkpoint_freq 250 --eval_freq 250': dict(
        use_fp8=True, checkpoint_freq=250, eval_freq=250, run_name='gpt2_fp8_production'),
    '--config config/test_fp8.yaml --no_wandb': dict(
        dataset='shakespeare', tokenizer='byte', use_fp8=True, num_epochs=1.0, grad_clip=1.0),
    '--config config/fineweb_edu_fp8.yaml --no_wandb': dict(
        dataset='fineweb-edu', use_fp8=True, fp8_format='hybrid', fp8_margin=0, batch_size=0,
        max_batch_size=128, target_effective_batch_size=512, max_lr=0.003, min_lr_ratio=0.1,
        warmup_steps=200, num_epochs=2.0, grad_clip=1.0, num_workers=4, use_wandb=False),
    '--batch_size 8 --max_seq_length 512 --num_epochs 1 --use_te': dict(
        block_size=512, num_epochs=1.0, fp8_backend='auto:te'),
    '--mixed_precision fp8 --fp8_scenario mxfp8 --use_te': dict(
        use_fp8=True, fp8_recipe='auto:mxfp8', fp8_backend='auto:te'),
    '--mixed_precision fp8 --fp8_scenario default': dict(fp8_recipe='auto'),
    '--mixed_precision bf16': dict(use_fp8=False),
    'config/h100_350m_fp8.py --use_fp8 --fp8_backend native --batch_size 4 '
    '--gradient_accumulation_steps 32': dict(
        fp8_backend='native', batch_size=4, gradient_accumulation_steps=32),
    'config/h100_350m_fp8.py --learning_rate 4e-4 --max_hours 1.5 --use_flash_attn --compile_model': dict(
        max_lr=4e-4, max_hours=1.5, target_val_loss=3.0781, compile_model='on'),
    'config/quickstart.py --use_fp8': dict(use_fp8=True, fp8_backend='native'),
    'config/quickstart.py --fp8_backend=te': dict(use_fp8=True, fp8_backend='te'),
    '--auto_batch_size --max_batch_size 64 --target_effective_batch_size 512': dict(
        batch_size=0, max_batch_size=64, target_effective_batch_size=512),
    '--no_auto_batch_size': dict(batch_size=8),
    '--model_name meta-llama/Llama-3.2-1B --dataset_name nvidia/OpenMathInstruct-2 --batch_size 12 '
    '--mixed_precision fp8 --max_seq_length 1024 --split_name train_1M --use_te --use_wandb '
    '--wandb_project llm-fp8 --wandb_run_name llama32-1b-fp8': dict(
        init_from='meta-llama/Llama-3.2-1B', dataset='nvidia/OpenMathInstruct-2', split_name='train_1M',
        batch_size=12, block_size=1024, use_fp8=True, fp8_backend='auto:te', use_wandb=True),
    '--model_name meta-llama/Meta-Llama-3.1-8B --tokenizer meta-llama/Llama-3.1-8B --batch_size 8': dict(
        init_from='meta-llama/Llama-3.1-8B', tokenizer='meta-llama/Llama-3.1-8B'),    # one model on the hub
    '--model_name meta-llama/Llama-3.2-3B --dataset_name nvidia/OpenMathInstruct-2 --batch_size 1 '
    '--sharding_mode fsdp_full --mixed_precision fp8 --use_te --gradient_checkpointing '
    '--max_seq_length 512 --learning_rate 1e-5 --gradient_accumulation_steps 4 --empty_cache_freq 25': dict(
        sharding_mode='fsdp_full', grad_checkpointing='full', empty_cache_freq=25, fp8_backend='auto:te'),
    '--out_dir out --eval_interval 5 --log_interval 1 --max_iters 9 --warmup_iters 2 --wandb_log': dict(
        checkpoint_dir='out', eval_freq=5, log_freq=1, max_steps=9, warmup_steps=2, use_wandb=True),
    '--wandb_log --config configs/test_fp8.yaml --compile off': dict(
        use_wandb=True, num_epochs=1.0, compile_model='off'),
    '--gradient_checkpointing': dict(grad_checkpointing='full'),
    '--grad_checkpointing=2': dict(grad_checkpointing='2'),
}
# line: what the one line says
REFUSED = {
    'train_fp8.py --mixed_precision fp16': 'mixed_precision is one of fp8, bf16, not',
    'train_fp8.py --no_use_flash_attn': 'use_flash_attn is one of on, not',
    'train_fp8.py --max_step=1 --wormup_steps=2':
        "no setting is called 'max_step'; the nearest is max_steps; .*; the nearest is warmup_steps",
    # in train.py, FP8's settings are refused in other words, too
    'train.py --fp8_margin=1': 'fp8_margin is a setting of train_fp8.py',
    'train.py --mixed_precision=fp8': 'use_fp8 is a setting of train_fp8.py',
    'train.py --use_te': 'fp8_backend is a setting of train_fp8.py',
    'train.py --fp8_scenario=mxfp8': 'fp8_recipe is a setting of train_fp8.py',
    'sample.py --max_iters=5': "no setting is called 'max_steps'; the nearest is max_new_tokens",
    'sample.py --use_te': "no setting is called 'fp8_backend'",
    'prepare_data.py --dataset=stdlib fineweb': "what is 'fineweb'",
}


def test_resolves(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(configurator, 'read_script', functools.cache(read_script))
    found = {line: configure('train_fp8.py', shlex.split(line)) for line in RESOLVED}
    assert {line: {name: found[line][name] for name in names} for line, names in RESOLVED.items()} == RESOLVED
    off = configure('train.py', '--mixed_precision=bf16 --no_te --no_fp8 --fp8_scenario=default'.split())
    assert off == configure('train.py', []) and not off.given
    assert configure('prepare_data.py', ['stdlib', '--verify'], 'dataset')['dataset'] == 'stdlib'


def test_refused_in_one_line(monkeypatch):
    monkeypatch.chdir(ROOT)
    for line, message in REFUSED.items():
        script, *words = shlex.split(line)
        with pytest.raises(ValueError, match=message) as refusal:
            configure(script, words, 'dataset' if script == 'prepare_data.py' else None)
        assert '\n' not in str(refusal.value)


def test_a_model_that_the_hub_has_renamed_is_one_model():
    config = configure(ROOT / 'train_fp8.py', ['--init_from=meta-llama/Llama-3.1-8B'])
    saved = {'optimizer': {'step': 1}, 'config': {'init_from': 'meta-llama/Meta-Llama-3.1-8B'}}
    assert over_checkpoint(config, saved, 'latest.pt').changes == []    # to the run that is resumed


# added to a line, these make its run one of a second
SMALL = [
    *TINY, '--init_from=scratch', '--total_batch_size=0', '--target_effective_batch_size=0',
    '--gradient_accumulation_steps=1', '--max_tokens=0', '--num_epochs=0',
    '--max_steps=2', '--warmup_steps=1', '--eval_tokens=256', '--num_workers=0', '--hellaswag_freq=0',
    '--compile_model=off', '--max_batch_size=8', '--mlp=gelu', '--norm=layernorm', '--position=learned']


def test_a_request_and_an_order_run_as_typed(tiny_data, tmp_path):
    """FP8 that this machine lacks is replaced by bf16, told in one line; a backend that is ordered runs."""
    typed = 'test_fp8.yaml --no_wandb', '--fp8_backend native'
    lines = [line for line in RESOLVED if any(words in line for words in typed)]
    for line, precision in zip(lines, ('FP8 Training Off: ', 'FP8 Training Enabled'), strict=True):
        flags = f'--dataset={tiny_data}', f'--checkpoint_dir={tmp_path}/{precision[13:]}'
        out = run('train_fp8.py', *shlex.split(line), *SMALL, *flags).stdout
        assert 'done: ' in out and precision in out, line


def test_a_batch_that_fits_is_looked_for_on_cuda():
    config = configure(ROOT / 'train_fp8.py', ['--auto_batch_size'])
    assert replace_requests(config, torch.device('cuda')) == [] and config['batch_size'] == 0
    assert 'is looked for on CUDA alone' in replace_requests(config, torch.device('cpu'))[0]
    assert config['batch_size'] == 8


def test_examples_want_a_model_to_start_from(tmp_path):
    """Without a word, prompts and completions would train random weights."""
    writer = ShardWriter(tmp_path, 'train', 100, 257, masked=True)
    writer.add(np.ones((50, 2), int))
    writer.save()
    (tmp_path / 'sized.py').write_text("init_from = 'gpt2'\n")
    config = [f'--dataset={tmp_path}', '--tokenizer=byte']
    for words in (['--init_from=scratch'], ['--init_from=gpt2'], [str(tmp_path / 'sized.py')]):
        Run.of(configure(ROOT / 'train.py', [*config, *words]), torch.device('cpu'))
    with pytest.raises(SettingError, match='--init_from=scratch'):
        Run.of(configure(ROOT / 'train.py', config), torch.device('cpu'))
