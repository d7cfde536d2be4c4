"""Command lines that people bring from other systems: each resolves to the right settings, or is refused in
one line."""
import shlex

import numpy as np
import pytest
import torch

from fp8gpt.run import replace_requests
from fp8gpt.shards import ShardWriter
from configurator import SettingError, configure
from conftest import ROOT
from helpers import run_of

# line: what it sets
RESOLVED = {
    '--config config/test_fp8.yaml --no_wandb': dict(
        dataset='shakespeare', tokenizer='byte', use_fp8=True, num_epochs=1.0, grad_clip=1.0),
    '--mixed_precision fp8 --fp8_scenario mxfp8 --use_te': dict(
        use_fp8=True, fp8_recipe='auto:mxfp8', fp8_backend='auto:te'),
    '--mixed_precision bf16 --max_grad_norm 2 --gradient_checkpointing': dict(
        use_fp8=False, grad_clip=2.0, grad_checkpointing='full'),
    'config/h100_350m_fp8.py --learning_rate 4e-4 --use_flash_attn --compile --fp8_backend native': dict(
        max_lr=4e-4, target_val_loss=3.0781, compile_model='on', fp8_backend='native'),
    '--auto_batch_size --max_batch_size 64 --target_effective_batch_size 512': dict(
        batch_size=0, max_batch_size=64, target_effective_batch_size=512),
    '--no_auto_batch_size': dict(batch_size=8),
    '--model_name meta-llama/Meta-Llama-3.1-8B --dataset_name nvidia/OpenMathInstruct-2 '
    '--max_seq_length 512 --split_name train_1M --use_wandb --wandb_run_name llama': dict(
        init_from='meta-llama/Meta-Llama-3.1-8B', dataset='nvidia/OpenMathInstruct-2', split_name='train_1M',
        block_size=512, use_wandb=True, run_name='llama'),
    '--out_dir out --eval_interval 5 --log_interval 1 --max_iters 9 --warmup_iters 2 --wandb_log': dict(
        checkpoint_dir='out', eval_freq=5, log_freq=1, max_steps=9, warmup_steps=2, use_wandb=True),
    '--max_iters=9 --lr_decay_iters=9 --decay_lr=True --backend=nccl --beta1=0.9 --dropout=0.0': dict(
        max_steps=9),
    '--total_steps 7 --config configs/test_fp8.yaml': dict(max_steps=7, num_epochs=0.0),
}
# line: what the one line says
REFUSED = {
    'train_fp8.py --mixed_precision fp16': "mixed_precision wants one of fp8, bf16, not 'fp16'",
    'train.py --mixed_precision=fp8': 'use_fp8 is a setting of train_fp8.py',
    'train.py --max_iters=9 --lr_decay_iters=8': 'the learning rate falls until the end of the run',
    'train.py --decay_lr=False': 'decay_lr',
    'train.py --beta1=0.8': 'beta1',
    'sample.py --out_dir=out': '--ckpt=FOLDER',
    'sample.py --use_te': "no setting is called 'use_te'",
    'diagnose.py --use_te': 'use_te wants one of native, te, torchao, emulate, not',
    'prepare_data.py --dataset=stdlib fineweb': "what is 'fineweb'",
}


def test_resolves_or_is_refused_in_one_line(monkeypatch):
    monkeypatch.chdir(ROOT)
    for line, names in RESOLVED.items():
        config = configure('train_fp8.py', shlex.split(line))
        assert {name: config[name] for name in names} == names
    off = configure('train.py', '--mixed_precision=bf16 --no_te --no_fp8 --fp8_scenario=default'.split())
    assert off == configure('train.py', []) and not off.given
    assert configure('prepare_data.py', ['stdlib', '--verify'], 'dataset')['dataset'] == 'stdlib'
    for line, message in REFUSED.items():
        script, *words = shlex.split(line)
        with pytest.raises(SettingError, match=message):
            configure(script, words, 'dataset' if script == 'prepare_data.py' else None)


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
        run_of(configure(ROOT / 'train.py', [*config, *words]), torch.device('cpu'))
    with pytest.raises(SettingError, match='--init_from=scratch'):
        run_of(configure(ROOT / 'train.py', config), torch.device('cpu'))
