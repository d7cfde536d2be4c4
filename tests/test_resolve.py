"""What settings mean: architecture, vocabulary, dataset, batch and length."""
import dataclasses
import shutil

import pytest
import torch

from fp8gpt import optim
from fp8gpt import resolve
from configurator import MissingError, SettingError, configure
from conftest import ROOT
from helpers import checkpoint_of
from model import GPT, PRESETS, GPTConfig

SETTINGS = {**dataclasses.asdict(GPTConfig()), 'n_kv_head': 0, 'ffn_dim': 0}
CPU = torch.device('cpu')


def resolved(*words, device=CPU, data_required=True):
    """The Run of train.py's settings under these words."""
    config = configure(str(ROOT / 'train.py'), [str(word) for word in words])
    return resolve.run(config, device, data_required)


# ----------------------------------------------------------------------------------------------- architecture

def test_a_preset_gives_way_to_what_is_given():
    assert resolve.make_config(SETTINGS, set()) == PRESETS['gpt2']
    assert resolve.make_config(SETTINGS, set(), PRESETS['h100-350m']) == PRESETS['h100-350m']
    narrow = {**SETTINGS, 'n_embd': 64, 'n_head': 4}
    small = resolve.make_config(narrow, {'n_embd', 'n_head'}, PRESETS['gpt2-xl'])
    assert (small.n_layer, small.n_embd, small.ffn_dim, small.n_kv_head) == (48, 64, 256, 4)


def test_a_checkpoints_architecture_is_not_contradicted():
    fixed = dataclasses.asdict(PRESETS['h100-350m'])
    agreeing = {**SETTINGS, 'n_layer': 24}
    assert resolve.fixed_config(agreeing, {'n_layer', 'ffn_dim'}, fixed) == PRESETS['h100-350m']
    with pytest.raises(SettingError, match='n_layer=12, but the checkpoint has n_layer=24'):
        resolve.fixed_config(SETTINGS, {'n_layer'}, fixed)
    with pytest.raises(SettingError, match='bias=False, but the checkpoint has bias=True'):
        resolve.fixed_config({**agreeing, 'bias': False}, {'bias'}, {**fixed, 'bias': True})


# ---------------------------------------------------------------------------------------------- what will run

def test_every_global_is_what_runs(tiny_data):
    """With a preset, the settings that become globals are the preset's, not the script's defaults."""
    run = resolved('--init_from=h100-350m', '--tokenizer=byte', f'--dataset={tiny_data}', '--block_size=64')
    settings = run.settings
    assert (settings['n_embd'], settings['mlp'], settings['ffn_dim']) == (1024, 'swiglu', 2688)
    assert settings['vocab_size'] == 257
    assert settings['block_size'] == 64
    assert settings['device'] == 'cpu'
    assert settings['compile_model'] == 'off'
    assert run.config['device'] == 'auto'  # what a checkpoint keeps is what was asked for
    assert run.config['compile_model'] == 'auto'


def test_compile(tiny_data):
    for asked, device, compiled in (
        ('auto', 'cpu', False), ('auto', 'cuda', True), ('on', 'cpu', True), ('off', 'cuda', False),
    ):
        words = '--tokenizer=byte', f'--dataset={tiny_data}', f'--compile={asked}'
        assert resolved(*words, device=torch.device(device)).compiled == compiled


def test_compile_and_compile_model_are_one_setting():
    def asked(word):
        return configure(str(ROOT / 'train.py'), [word])['compile_model']
    assert asked('--compile') == asked('--compile_model') == asked('--compile=True') == 'on'
    assert asked('--no_compile') == asked('--compile=off') == asked('--compile_model=False') == 'off'


def test_a_warm_up_that_nobody_chose_fits_the_run():
    """Not even a checkpoint's: it goes on as it began."""
    for words, saved, warmup in (
        ([], {}, 4), (['--max_steps=2000'], {}, 100), (['--warmup_steps=30'], {}, 30),
        ([], {'warmup_steps': 100}, 100),
    ):
        config = configure(str(ROOT / 'train.py'), ['--max_steps=40', *words])
        if saved:
            config, _ = config.over(saved)
        resolve.length(config, 1024, 1, 0)
        assert config['warmup_steps'] == warmup


def test_foreign_shards_are_taken_with_a_warning(tiny_data, tmp_path):
    folder = tmp_path / 'theirs-byte'
    shutil.copytree(tiny_data, folder, ignore=shutil.ignore_patterns('*.json'))
    words = f'--dataset={folder}', '--tokenizer=byte', '--batch_size=4'
    warning, = resolved(*words).changes
    assert warning.startswith(f'WARNING: {folder} has no meta.json: its shards are taken for byte tokens')
    assert resolved(f'--dataset={tiny_data}', *words[1:]).changes == []


def test_a_dataset_that_is_not_there(tmp_path):
    with pytest.raises(MissingError, match='prepare_data.py fineweb_edu'):
        resolved(f'--data_dir={tmp_path}')
    run = resolved(f'--data_dir={tmp_path}', data_required=False)
    assert run.folder is None
    assert run.model_config.vocab_size == 50257


def test_settings_that_cannot_be(tiny_data):
    for word, message in (('--batch_size=0', 'name a batch_size'), ('--init_from=gpt5', 'gpt2-medium')):
        with pytest.raises(SettingError, match=message):
            resolved('--tokenizer=byte', f'--dataset={tiny_data}', word)


def test_a_run_is_called_after_its_config_file(tiny_data, tmp_path):
    """A resumed one as it was."""
    (tmp_path / 'mine.py').write_text('seed = 1')
    data, file = ('--tokenizer=byte', f'--dataset={tiny_data}'), tmp_path / 'mine.py'
    assert resolved(*data).config['run_name'] == 'gpt'
    assert resolved(*data, file).config['run_name'] == 'mine'
    assert resolved(*data, file, '--run_name=other').config['run_name'] == 'other'
    model = GPT(GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16))
    for earlier in 'gpt', 'theirs':
        saved = {'init_from': 'scratch', 'run_name': earlier}
        torch.save(checkpoint_of(model, 5, config=saved), tmp_path / 'step_000005.pt')
        run = resolved(*data, file, f'--resume={tmp_path}/step_000005.pt')
        assert run.config['run_name'] == earlier


def test_a_window_of_a_model_with_rope(tiny_data, tmp_path):
    """What the checkpoint's run read, or less, or more; never more than the model reads."""
    data = f'--dataset={tiny_data}', '--tokenizer=byte'
    config = GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16, position='rope')
    path = tmp_path / 'step_000005.pt'
    none = {'layers': [], 'history': torch.zeros(0, 0, 3), 'scale': torch.zeros(0, 3)}
    scales = {'steps': 5, 'divisor': 1, **none}
    saved = {'init_from': 'scratch', 'block_size': 32}
    torch.save(checkpoint_of(GPT(config), 5, config=saved, fp8_state=scales), path)
    words = *data, f'--init_from={path}'
    run = resolved(*words)
    assert (run.settings['block_size'], run.model_config.block_size) == (32, 64)
    assert run.window_config.block_size == 32
    assert resolved(*words, '--max_seq_length=48').settings['block_size'] == 48
    with pytest.raises(SettingError, match='block_size=65, but the model reads 64 tokens at most'):
        resolved(*words, '--block_size=65')
    run = resolved(*data, f'--resume={path}')
    assert (run.resumed['position'], run.resumed['fp8_state']['divisor']) == (5, 1)
    run = resolved(*data, f'--resume={path}', '--block_size=16')
    assert run.resumed['position'] == 10  # 5 windows of 32
    assert run.resumed['fp8_state'] is None  # of gradients over other numbers of tokens
    assert 'block_size: 32 in the checkpoint, now 16' in run.changes


def test_learned_positions_are_trained_all(tiny_data, tmp_path):
    data = f'--dataset={tiny_data}', '--tokenizer=byte'
    config = GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16)
    torch.save(checkpoint_of(GPT(config), 5), tmp_path / 'step_000005.pt')
    words = *data, f'--init_from={tmp_path}/step_000005.pt'
    assert resolved(*words).settings['block_size'] == 64
    with pytest.raises(SettingError, match='block_size=32, but the checkpoint has block_size=64'):
        resolved(*words, '--block_size=32')


def test_a_long_presets_window_is_the_default():
    run = resolved('--init_from=llama-3.2-1b', data_required=False)
    assert (run.settings['block_size'], run.model_config.block_size) == (1024, 131_072)
    run = resolved('--init_from=llama-3.2-1b', '--block_size=2048', data_required=False)
    assert (run.settings['block_size'], run.model_config.block_size) == (2048, 2048)


def test_grad_checkpointing_as_a_number():
    assert [resolve.checkpoint_every(setting) for setting in ('none', 'full', '2')] == [0, 1, 2]


def test_what_a_resume_inherits(tiny_data, tmp_path):
    """A run's settings, but not where it wrote, what it was asked to remove, to show or to test."""
    model = GPT(GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16))
    never = {'overwrite': True, 'list_checkpoints': True, 'dry_run': True, 'eval_only': True,
             'checkpoint_dir': 'theirs', 'resume': 'best'}
    saved = {'init_from': 'scratch', 'seed': 7, 'max_lr': 0.5, **never}
    torch.save(checkpoint_of(model, 5, config=saved), tmp_path / 'step_000005.pt')
    words = '--tokenizer=byte', f'--dataset={tiny_data}', f'--resume={tmp_path}/step_000005.pt'
    settings = resolved(*words, '--max_lr=0.25').settings
    assert (settings['seed'], settings['max_lr']) == (7, 0.25)
    assert [name for name, value in never.items() if settings[name] == value] == []


# ----------------------------------------------------------------------------------------- batches and length

def micro_steps(world_size, total=0, given=0, sequences=0):
    """accumulation of micro-batches of 8 x 1024 tokens."""
    return resolve.accumulation(
        8,
        1024,
        world_size,
        total_batch_size=total,
        gradient_accumulation_steps=given,
        target_effective_batch_size=sequences,
    )


def test_accumulation():
    for arguments, steps in (
        (dict(world_size=2), 1),
        (dict(world_size=2, given=5), 5),
        (dict(world_size=8, total=2**19), 8),
        (dict(world_size=8, total=2**19, given=8), 8),
        (dict(world_size=8, sequences=512), 8),
        (dict(world_size=8, total=2**19, given=8, sequences=512), 8),
    ):
        assert micro_steps(**arguments) == steps


def test_batches_that_do_not_divide():
    for arguments, message in (
        (dict(world_size=12, total=500_000), 'is not a multiple of 98304 .*; the nearest is 491520'),
        (dict(world_size=1, total=100), 'the nearest is 8192'),
        (dict(world_size=8, total=2**19, given=4), '8 micro-steps'),
        (dict(world_size=12, sequences=512), 'is not a multiple of 96 .*; the nearest is 480'),
        (dict(world_size=1, total=2**19, sequences=500), 'give one of the two'),
        (dict(world_size=1, given=3, sequences=512), '64 micro-steps'),
    ):
        with pytest.raises(SettingError, match=message):
            micro_steps(**arguments)


def test_sizes_of_a_micro_batch_divide_the_step():
    config = {'block_size': 16, 'total_batch_size': 24 * 16, 'target_effective_batch_size': 0}
    assert resolve.batch_sizes({**config, 'max_batch_size': 128}, 1) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert resolve.batch_sizes({**config, 'max_batch_size': 128}, 2) == [1, 2, 3, 4, 6, 12]
    assert resolve.batch_sizes({**config, 'max_batch_size': 5}, 1) == [1, 2, 3, 4]
    assert resolve.batch_sizes({**config, 'max_batch_size': 5, 'total_batch_size': 0}, 2) == [1, 2, 3, 4, 5]


def test_run_length():
    assert resolve.run_length(100, 1050) == (11, 'num_epochs=1')
    first = resolve.run_length(100, 1050, max_steps=7, max_tokens=600, num_epochs=2)
    assert first == (6, 'max_tokens=600')
    assert resolve.run_length(100, 1000, max_tokens=650) == (6, 'max_tokens=650')   # never more than asked
    assert resolve.run_length(100, 1000, num_epochs=0.5) == (5, 'num_epochs=0.5')
    with pytest.raises(SettingError, match='max_tokens=99 is less than one step of 100 tokens'):
        resolve.run_length(100, 1000, max_tokens=99)
    assert resolve.run_length(100, 1000, max_tokens=100) == (1, 'max_tokens=100')
    assert resolve.run_length(100, 1000, max_hours=2) == (optim.OPEN, 'max_hours=2')
    both = resolve.run_length(100, 1000, max_steps=7, max_hours=2)
    assert both == (7, 'max_steps=7 or max_hours=2')
