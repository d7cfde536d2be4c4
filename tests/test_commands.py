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
from conftest import ROOT, TINY, in_ranks, run

# line: what it sets
RESOLVED = {
    'config/gpt2_fp8.py': dict(
        init_from='gpt2', dataset='fineweb_edu', total_batch_size=2**19, max_lr=6e-4, warmup_steps=715),
    '--use_fp8 --use_tensorboard': dict(use_fp8=True, use_tensorboard=True),
    '--use_fp8 --use_tensorboard --run_name "gpt2_fp8_test"': dict(run_name='gpt2_fp8_test'),
    '--use_fp8 --fp8_format hybrid --use_tensorboard --run_name gpt2_fp8_production '
    '--checkpoint_freq 250 --eval_freq 250': dict(
        use_fp8=True, checkpoint_freq=250, eval_freq=250, run_name='gpt2_fp8_production'),
    '--use_fp8 --checkpoint_dir ./my_fp8_checkpoints --checkpoint_freq 25 --eval_freq 25': dict(
        checkpoint_dir='./my_fp8_checkpoints', checkpoint_freq=25, eval_freq=25),
    '--use_tensorboard': dict(use_tensorboard=True, use_fp8=True),
    '--resume latest --use_fp8 --use_tensorboard': dict(
        resume='latest', use_fp8=True, use_tensorboard=True),
    '--use_fp8 --resume checkpoints/latest.pt --checkpoint_dir checkpoints_fp8': dict(
        resume='checkpoints/latest.pt', checkpoint_dir='checkpoints_fp8'),
    '--list_checkpoints': dict(list_checkpoints=True, checkpoint_dir='checkpoints_fp8'),
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
    'config/h100_350m_fp8.py --no_fp8 --batch_size 16 --gradient_accumulation_steps 8': dict(
        use_fp8=False, fp8_backend='auto', batch_size=16, gradient_accumulation_steps=8,
        init_from='h100-350m', max_lr=4e-4),
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
    '--use_fp8 --fp8_format e4m3 --fp8_margin 1 --fp8_interval 1 --max_lr 5e-4': dict(
        fp8_format='e4m3', fp8_margin=1, fp8_interval=1, max_lr=5e-4),
    'config/h100_350m_fp8.py --use_fp8 --fp8_backend torchao': dict(
        use_fp8=True, fp8_backend='torchao'),
    '--use_wandb --wandb_project llm-fp8 --wandb_run_name llama32-1b-fp8': dict(
        use_wandb=True, wandb_project='llm-fp8', run_name='llama32-1b-fp8'),
    '--model_name meta-llama/Llama-3.2-1B --dataset_name nvidia/OpenMathInstruct-2 --batch_size 12 '
    '--mixed_precision fp8 --max_seq_length 1024 --split_name train_1M --use_te --use_wandb '
    '--wandb_project llm-fp8 --wandb_run_name llama32-1b-fp8': dict(
        init_from='meta-llama/Llama-3.2-1B', dataset='nvidia/OpenMathInstruct-2', split_name='train_1M',
        batch_size=12, block_size=1024, use_fp8=True, fp8_backend='auto:te', use_wandb=True),
    '--model_name meta-llama/Meta-Llama-3.1-8B --tokenizer meta-llama/Llama-3.1-8B --batch_size 8': dict(
        init_from='meta-llama/Llama-3.1-8B', tokenizer='meta-llama/Llama-3.1-8B'),    # one model on the hub
    '--model_name Qwen/Qwen2.5-14B --dataset_name nvidia/OpenMathInstruct-2 --batch_size 4 '
    '--mixed_precision bf16 --split_name validation': dict(
        init_from='Qwen/Qwen2.5-14B', batch_size=4, use_fp8=False, split_name='validation'),
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
# see test_training.py and, for pretrained models, test_finetune.py; quickstart.py orders a backend
ELSEWHERE = '--resume', '--list', '--model_name', 'quickstart'
RUN = [line for line in RESOLVED if not any(word in line for word in ELSEWHERE)]


def runs_as_typed(line, tiny_data, folder):
    """In this machine's precision: FP8 where the line orders a backend, else bf16, told in one line."""
    words = [word for word in shlex.split(line) if word != '--use_tensorboard']
    out = run('train_fp8.py', *words, *SMALL, f'--dataset={tiny_data}', f'--checkpoint_dir={folder}').stdout
    ordered = 'fp8_backend' in line
    said = [text in out for text in ('done: ', 'FP8 Training Enabled', 'FP8 Training Off: ')]
    assert (line, said) == (line, [True, ordered, not ordered])


def test_a_request_and_an_order_run_as_typed(tiny_data, tmp_path):
    """Two lines: FP8 that this machine lacks is replaced, a backend that is ordered runs."""
    for number, line in enumerate((RUN[2], next(line for line in RUN if '--fp8_backend native' in line))):
        runs_as_typed(line, tiny_data, tmp_path / str(number))


@pytest.mark.slow
def test_every_line_runs_as_typed(tiny_data, tmp_path):
    for number, line in enumerate(RUN):
        runs_as_typed(line, tiny_data, tmp_path / str(number))
    words = ['--use_fp8', '--fp8_format', 'hybrid', '--run_name', 'gpt2_fp8_production']
    small = [*SMALL, f'--dataset={tiny_data}', f'--checkpoint_dir={tmp_path}/ranks']
    assert 'done: ' in in_ranks(2, 'train_fp8.py', *words, *small).stdout


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
