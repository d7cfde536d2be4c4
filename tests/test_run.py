"""What settings mean: architecture, vocabulary, dataset, batch and length."""
import dataclasses
import shutil
import signal

import pytest
import torch

from fp8gpt import distributed
from fp8gpt.optim import OPEN
from fp8gpt.run import Length, find_end, micro_steps, preview
from configurator import MachineError, MissingError, SettingError, configure
from conftest import ROOT
from helpers import checkpoint_of, run_of
from model import GPT, PRESETS, GPTConfig
from tokenizers_made import make_tokenizer

CPU = torch.device('cpu')
SMALL = GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=2, n_embd=16)


def resolved(*words, device=CPU, data_required=True):
    """Return the Run of train.py's settings under these words."""
    config = configure(str(ROOT / 'train.py'), [str(word) for word in ('--dtype=bf16', *words)])
    return run_of(config, device) if data_required else preview(config, device)


@pytest.fixture
def data(tiny_data):
    return f'--dataset={tiny_data}', '--tokenizer=byte'


@pytest.fixture
def saved(tmp_path):
    """saved(shape, **parts) -> the path of a checkpoint of this GPTConfig, five steps old."""
    def save(shape=SMALL, **parts):
        path = tmp_path / 'step_000005.pt'
        torch.save(checkpoint_of(GPT(shape), 5, **parts), path)
        return path
    return save


def refused(message, *words):
    """Assert that these words are refused in words that match."""
    with pytest.raises(SettingError, match=message):
        resolved(*words)


def test_a_preset_gives_way_to_what_is_given():
    def asked(*words):
        return resolved(*words, data_required=False).model_config
    assert asked() == PRESETS['gpt2']
    assert asked('--init_from=h100-350m') == dataclasses.replace(PRESETS['h100-350m'], vocab_size=50257)
    small = asked('--init_from=gpt2-xl', '--n_embd=64', '--n_head=4')
    assert (small.n_layer, small.n_embd, small.ffn_dim, small.n_kv_head) == (48, 64, 256, 4)
    wide = asked('--init_from=h100-350m', '--n_head=4')
    assert (wide.n_kv_head, wide.head_dim) == (4, wide.n_embd // 4)


def test_a_checkpoints_architecture_is_not_contradicted(data, saved):
    start = *data, f'--init_from={saved()}'
    assert resolved(*start, '--n_layer=1', '--ffn_dim=0').model_config == SMALL
    refused('n_layer=12, but the checkpoint has n_layer=1', *start, '--n_layer=12')
    refused('bias=False, but the checkpoint has bias=True', *start, '--no_bias')
    # learned positions are all trained
    refused('block_size=32, but the checkpoint has block_size=64', *start, '--block_size=32')
    path = saved(dataclasses.replace(SMALL, vocab_size=200))
    refused('has token 256, outside the vocabulary of 200', *data, f'--init_from={path}')
    longer = saved(dataclasses.replace(SMALL, vocab_size=300))    # no matter
    assert resolved(*data, f'--init_from={longer}').model_config.vocab_size == 300


def test_a_resume_takes_what_a_run_starts_from_out_of_the_checkpoint(data, saved):
    start = *data, f'--resume={saved(config={"init_from": "scratch"})}'
    for name, value, before in (('init_from', 'gpt2', 'scratch'), ('optimizer', 'adamw8bit', 'adamw'),
                                ('param_dtype', 'bf16', 'fp32'), ('n_layer', 3, 1),
                                ('lora_alpha', 32.0, 16.0)):
        refused(f'{name}={value}, but the checkpoint has {name}={before}', *start, f'--{name}={value}')
    assert resolved(*start, '--init_from=scratch', '--bias', '--ffn_dim=0').resumed['step'] == 5
    path = saved(tokenizer='gpt2', config={'init_from': 'scratch'})
    refused('tokenized with byte, the checkpoint with gpt2', *data, f'--resume={path}')


def test_a_run_is_not_taken_on_over_data_that_nobody_typed(saved, tiny_data, tmp_path, monkeypatch):
    """A resume by name goes on with the run's own data, whatever a config file names, or says which folder is
    free. Other spellings of the dataset, and a data_dir that moved, are no other data."""
    theirs, ours = tmp_path / 'data' / 'theirs-byte', tmp_path / 'data' / 'fineweb_edu-byte'
    for folder in (theirs, ours):
        shutil.copytree(tiny_data, folder)
    before = {'dataset': 'fineweb-edu', 'tokenizer': 'byte', 'data_dir': 'elsewhere', 'init_from': 'scratch'}
    path = saved(config=before)
    (tmp_path / 'theirs.py').write_text('dataset = "theirs"')
    (tmp_path / 'deep.py').write_text('n_layer = 3')
    monkeypatch.chdir(tmp_path)
    start = f'--data_dir={tmp_path / "data"}', '--checkpoint_dir=.'
    for resume in ('auto', 'latest'):
        words = *start, f'--resume={resume}'
        assert resolved(*words).folder == resolved(*words, '--dataset=fineweb_edu').folder == str(ours)
        refused('step_000005.pt is of a run on .*/fineweb_edu-byte, not .*/theirs-byte: '
                '--checkpoint_dir=ANOTHER trains elsewhere', *words, 'theirs.py')
        refused('has n_layer=1: leave it out, or start a run of another model', *words, 'deep.py')
        assert resolved(*words, 'theirs.py', '--dataset=theirs').folder == str(theirs)
    assert resolved(*start, 'theirs.py', f'--resume={path}').folder == str(theirs)    # that file was typed


def test_a_window_of_a_model_with_rope(data, saved):
    none = {'layers': [], 'history': torch.zeros(0, 0, 3), 'scale': torch.zeros(0, 3)}
    scales = {'steps': 5, 'divisor': 1, **none}
    config = {'init_from': 'scratch', 'block_size': 32}
    path = saved(dataclasses.replace(SMALL, position='rope'), config=config, fp8_state=scales)
    words = *data, f'--init_from={path}'
    run = resolved(*words)
    assert (run.settings['block_size'], run.model_config.block_size) == (32, 64)
    assert run.window_config.block_size == 32
    assert resolved(*words, '--max_seq_length=48').settings['block_size'] == 48
    refused('block_size=65, but the model reads 64 tokens at most', *words, '--block_size=65')
    run = resolved(*data, f'--resume={path}')
    assert (run.resumed['position'], run.resumed['fp8_state']['divisor']) == (5, 1)
    run = resolved(*data, f'--resume={path}', '--block_size=16')
    assert run.resumed['position'] == 10  # 5 windows of 32
    assert run.resumed['fp8_state'] is None  # of gradients over other numbers of tokens
    assert 'block_size: 32 in the checkpoint, now 16' in run.changes
    long = resolved('--init_from=llama-3.2-1b', data_required=False)
    assert (long.settings['block_size'], long.model_config.block_size) == (1024, 131_072)


def test_every_global_is_what_runs(data):
    """With a preset, the settings that become globals are the preset's, not the script's defaults."""
    run = resolved(*data, '--init_from=h100-350m', '--block_size=64')
    names = 'n_embd', 'mlp', 'ffn_dim', 'vocab_size', 'block_size', 'device', 'compile_model'
    assert [run.settings[name] for name in names] == [1024, 'swiglu', 2688, 257, 64, 'cpu', 'off']
    assert (run.config['device'], run.config['compile_model']) == ('auto', 'auto')  # what a checkpoint keeps
    compiled = [(asked, kind) for asked in ('auto', 'on', 'off') for kind in ('cpu', 'cuda', 'mps')
                if resolved(*data, f'--compile={asked}', device=torch.device(kind)).compiled]
    assert compiled == [('auto', 'cuda'), ('on', 'cpu'), ('on', 'cuda'), ('on', 'mps')]
    assert [resolved(*data, f'--grad_checkpointing={setting}').checkpoint_every
            for setting in ('none', 'full', '2')] == [0, 1, 2]


def test_the_dataset_that_is_there_or_not(data, tiny_data, tmp_path):
    folder = tmp_path / 'theirs-byte'
    shutil.copytree(tiny_data, folder, ignore=shutil.ignore_patterns('*.json'))
    warning, = resolved(f'--dataset={folder}', '--tokenizer=byte').changes
    assert warning.startswith(f'WARNING: {folder} has no meta.json: its shards are taken for byte tokens')
    with pytest.raises(MissingError, match='prepare_data.py fineweb_edu'):
        resolved(f'--data_dir={tmp_path}')
    run = resolved(f'--data_dir={tmp_path}', data_required=False)
    assert (run.folder, run.model_config.vocab_size) == (None, 50257)


def test_a_cpu_without_bf16_units_computes_in_fp32_unless_bf16_is_typed_or_the_runs(data, saved, monkeypatch):
    older = saved(config={'init_from': 'scratch', 'dtype': 'bf16'})
    for no_units, words, dtype in ((True, [], 'fp32'), (True, ['--dtype=bf16'], 'bf16'), (False, [], 'bf16'),
                                   (True, [f'--resume={older}'], 'bf16')):
        monkeypatch.setattr('model.NO_BF16_UNITS', no_units)
        found = run_of(configure(str(ROOT / 'train.py'), [*data, *words]), CPU)
        assert (found.settings['dtype'], str(found.compute_dtype)[6:]) == (
            dtype, {'fp32': 'float32', 'bf16': 'bfloat16'}[dtype])
        assert any('no bf16 units here' in line for line in found.changes) == (dtype == 'fp32')


def test_a_typed_tokenizer_is_not_passed_over(tiny_data, tmp_path):
    """One of a config file is: the folder that a user types says what it holds."""
    for asked in 'gpt2', make_tokenizer(tmp_path / 'byte'):
        refused(f'is tokenized with byte, not {asked}: leave out --tokenizer',
                f'--dataset={tiny_data}', f'--tokenizer={asked}')
    assert resolved(f'--dataset={tiny_data}').tokenizer == 'byte'


def test_what_a_resume_inherits(data, saved):
    """A run's settings, but not where it wrote, what it was asked to remove, to show or to test. Settings of
    earlier versions, which are none any more, are passed over. The batch size is what a search found."""
    never = {'overwrite': True, 'list_checkpoints': True, 'dry_run': True, 'eval_only': True,
             'checkpoint_dir': 'theirs', 'resume': 'best'}
    gone = {'verbose': True, 'penalty_type': 'logit_l2', 'lora_dropout': 0.2, 'beta1': 0.8}
    inherited = {'init_from': 'scratch', 'seed': 7, 'max_lr': 0.5, 'batch_size': 24}
    words = *data, f'--resume={saved(config=inherited | never | gone)}'
    run = resolved(*words, '--max_lr=0.25')
    assert (run.settings['seed'], run.settings['max_lr'], run.batch_size) == (7, 0.25, 24)
    assert run.changes == ['max_lr: 0.5 in the checkpoint, now 0.25']
    assert [name for name, value in never.items() if run.settings[name] == value] == []
    assert not run.settings.keys() & gone.keys()
    run = resolved(*words, '--batch_size=0', device=torch.device('cuda'))
    assert (run.batch_size, run.changes) == (24, [])
    assert resolved(*words, '--batch_size=6').batch_size == 6


def start_two_ranks(monkeypatch):
    for name, value in {'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'a', 'MASTER_PORT': '1'}.items():
        monkeypatch.setenv(name, value)


def test_an_environment_that_torchrun_has_not_made_is_refused(monkeypatch):
    """RANK alone would train without a word, as a rank that prints nothing."""
    start_two_ranks(monkeypatch)
    for name, value in {'RANK': '2', 'WORLD_SIZE': '', 'LOCAL_RANK': 'x'}.items():
        with monkeypatch.context() as context, pytest.raises(SettingError, match='start several by torchrun'):
            context.setenv(name, value)
            distributed.init('cpu')
    monkeypatch.setenv('MASTER_PORT', '99999')
    with pytest.raises(MachineError, match='rank 1 finds no rank 0 at a:99999 '):
        distributed.init('cpu')
    for name in 'RANK', 'WORLD_SIZE', 'MASTER_ADDR':
        with monkeypatch.context() as context, pytest.raises(SettingError, match='start several by torchrun'):
            context.delenv(name)
            distributed.init('cpu')


def test_more_ranks_than_gpus(monkeypatch):
    start_two_ranks(monkeypatch)
    monkeypatch.setenv('LOCAL_RANK', '1')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    with pytest.raises(MachineError, match='torch sees 1 GPUs here, .*: torchrun --nproc_per_node=1'):
        distributed.init()


def test_ranks_compute_in_a_stream_of_their_own(monkeypatch):
    """DDP's gradients would be added up in the default stream, which ends a capture in another."""
    start_two_ranks(monkeypatch)
    streams = []
    answers = {'is_available': lambda: True, 'device_count': lambda: 2, 'set_device': streams.append,
               'Stream': lambda: 'own', 'set_stream': streams.append}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda backend: None)
    users = {**distributed.os.environ, 'PYTORCH_CUDA_ALLOC_CONF': 'backend:native'}
    monkeypatch.setattr(distributed.os, 'environ', users)
    distributed.init()
    assert streams == ['cuda:0', 'own']
    assert 'PYTORCH_ALLOC_CONF' not in users    # a user's own settings of the allocator are left alone
    del users['PYTORCH_CUDA_ALLOC_CONF']
    distributed.init()
    assert users['PYTORCH_ALLOC_CONF'] == 'expandable_segments:True'


def test_a_rank_that_lacks_what_another_has_is_refused(monkeypatch):
    monkeypatch.setattr(distributed.dist, 'is_initialized', lambda: True)
    monkeypatch.setattr(distributed, 'on_rank_0', lambda work, line: work(line))
    more, less = {'seed': 1, 'train_000001.bin': [9, 9]}, {'seed': 1}
    sent = []
    monkeypatch.setattr(distributed, 'of_all_ranks', lambda value: sent.append(value) or [[], value])
    for ours, theirs in (more, less), (less, more):
        monkeypatch.setattr(distributed, 'rank_0s', lambda _: ours)
        with pytest.raises(SettingError, match='train_000001.bin=missing'):
            distributed.check_alike(theirs)
    distributed.check_alike(less)
    assert [*map(len, sent)] == [1, 1, 0]       # not each rank's ten thousand shards


def test_the_ranks_of_each_machine_check_their_own_files(monkeypatch):
    monkeypatch.setattr(distributed.dist, 'is_initialized', lambda: True)
    monkeypatch.setattr(distributed.dist, 'get_rank', lambda: 0)
    monkeypatch.setattr(distributed, '_while_others_wait', lambda works, work, words: work(*words))
    found = []      # where each rank says that it is, and the result
    monkeypatch.setattr(distributed, 'of_all_ranks', lambda value: found.append(value) or [value])
    for machine in '001':
        monkeypatch.setenv('GROUP_RANK', machine)
        assert distributed.once_a_node(str, 'x') == 'x'
    assert found[0] == found[2] != found[4]


def test_a_device_that_is_not_there_or_not_served_is_named():
    with pytest.raises(MachineError, match='device=cuda, but torch sees no CUDA GPU here; --device=cpu'):
        distributed.init('cuda')
    refused("device wants one of auto, cuda, cpu, not 'mps'", '--device=mps')


def test_python_handles_no_sigterm_of_a_rank_that_waits_for_others(monkeypatch):
    """It waits in C++: torchrun's SIGTERM would be answered by its SIGKILL, 30 seconds later."""
    handled = []
    monkeypatch.setattr(signal, 'signal', lambda number, handler: handled.append(number))
    distributed.init('cpu')
    start_two_ranks(monkeypatch)
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda backend: None)
    distributed.init('cpu')
    assert handled == [signal.SIGTERM]


def test_what_a_resume_counts(saved, tiny_data, tmp_path):
    """On the same data the position stays. On other data, as where shards have grown, it begins anew, and so
    does the best loss; that one begins anew where it is measured otherwise, too."""
    folder = tmp_path / 'theirs-byte'
    shutil.copytree(tiny_data, folder, ignore=shutil.ignore_patterns('*.json'))
    words = f'--dataset={folder}', '--tokenizer=byte'
    run = resolved(*words, '--block_size=64')
    before = {'data': run.data, 'measured_on': run.measured_on, 'best_val_loss': 2.0, 'position': 7}
    path = saved(config={'init_from': 'scratch', 'block_size': 64}, **before)

    def resumed(*more):
        run = resolved(*words, f'--resume={path}', *more)
        return run.resumed['position'], run.resumed['best_val_loss'], 'not the data' in ' '.join(run.notes)
    assert resumed() == (7, 2.0, False)
    assert resumed('--eval_tokens=4096') == (7, None, False)
    with open(folder / 'train_000000.bin', 'r+b') as file:      # as many tokens, of which one is another
        file.seek(5000)
        file.write(b'\0\0')
    assert resumed() == (0, 2.0, True)
    shutil.copy(folder / 'train_000000.bin', folder / 'train_000002.bin')
    assert resumed() == (0, 2.0, True)
    shutil.copy(folder / 'val_000000.bin', folder / 'val_000001.bin')
    assert resumed() == (0, None, True)


def test_a_resumed_run_ends_by_what_was_seen():
    """40 steps of 64 tokens, 2,560 in all, before a step had 128 or 16; on other data since 320 tokens."""
    def ended(words, before, epoch=0):
        config = configure(str(ROOT / 'train.py'), ['--block_size=16', *words.split()])
        length = Length.of(config, 1, epoch, before)
        return length.last_step, length.tokens
    before = {'step': 40, 'tokens': 2560, 'position': 160}
    for words, state, epoch, expected in (
        ('--batch_size=8 --max_tokens=5120', before, 0, (60, 5120)),
        ('--batch_size=1 --max_tokens=5120', before, 0, (200, 5120)),
        ('--batch_size=8 --max_tokens=2600', before, 0, (40, 2560)),      # no step fits any more
        ('--batch_size=8 --num_epochs=2', before, 2560, (60, 5120)),
        ('--batch_size=8 --num_epochs=1', {**before, 'position': 20}, 2560, (58, 4864)),    # 2,240 are left
        ('--batch_size=8 --max_steps=50', before, 0, (50, 3840)),
        ('--batch_size=8 --max_tokens=5120', None, 0, (40, 5120)),
    ):
        assert (words, ended(words, state, epoch)) == (words, expected)
    before['hours'] = 2.0
    assert ended('--batch_size=8 --max_hours=3', before)[0] == OPEN
    for words in ('--batch_size=8 --max_steps=39', '--batch_size=8 --max_tokens=1000',
                  '--batch_size=8 --max_hours=1.5'):
        with pytest.raises(SettingError, match='passed already: the run is at step 40, with 2,560 tokens'):
            ended(words, before)
    assert ended('--batch_size=8 --max_steps=39 --eval_only', before)[0] == 39


def settings(total=0, given=0, sequences=0, **others):
    """Return those about batch and length."""
    return {'block_size': 1024, 'total_batch_size': total, 'gradient_accumulation_steps': given,
            'target_effective_batch_size': sequences, 'max_steps': 0, 'max_tokens': 0, 'num_epochs': 0.0,
            'max_hours': 0.0, **others}


def test_micro_steps():
    for world_size, config, expected in (
        (2, {}, 1),
        (2, dict(given=5), 5),
        (8, dict(total=2**19), 8),
        (8, dict(total=2**19, given=8), 8),
        (8, dict(sequences=512), 8),
        (8, dict(total=2**19, given=8, sequences=512), 8),
        (12, dict(total=500_000), 'no multiple of 98,304 .* 12 ranks.; the nearest is .*=491520, 480'),
        (12, dict(total=2**19), 'the nearest is --total_batch_size=491520'),
        (3, dict(total=9 * 1024), 'the nearest is --total_batch_size=24576'),
        (1, dict(total=100), 'the nearest is --total_batch_size=8192'),
        (8, dict(total=2**19, given=4), 'in 8 micro-steps: give one'),
        (12, dict(sequences=512), 'the nearest is .*, 480 sequences'),
        (1, dict(total=2**19, sequences=500), 'give one of total'),
        (1, dict(given=3, sequences=512), 'in 64 micro-steps: give one'),
    ):
        if type(expected) is int:
            assert micro_steps(settings(**config), 8, world_size) == expected
            continue
        with pytest.raises(SettingError, match=expected):
            micro_steps(settings(**config), 8, world_size)
    words = '--batch_size=8', '--block_size=16', '--gradient_accumulation_steps=2', '--max_steps=3'
    length = Length.of(configure(str(ROOT / 'train.py'), list(words)), 4, 0)        # on four ranks
    assert (length.sequences_per_step, length.tokens_per_step, length.tokens) == (64, 1024, 3072)


def test_the_first_limit_reached_ends_a_run():
    for config, tokens_per_epoch, end in (
        ({}, 1050, (11, 'num_epochs=1')),
        (dict(max_steps=7, max_tokens=600, num_epochs=2), 1050, (6, 'max_tokens=600')),
        (dict(max_tokens=650), 1000, (6, 'max_tokens=650')),        # never more than asked
        (dict(max_tokens=100), 1000, (1, 'max_tokens=100')),
        (dict(max_tokens=1_234_567), 1000, (12_345, 'max_tokens=1234567')),
        (dict(num_epochs=0.5), 1000, (5, 'num_epochs=0.5')),
        (dict(num_epochs=0.5), 0, (1, 'num_epochs=0.5')),
        (dict(num_epochs=0.07), 10_000, (7, 'num_epochs=0.07')),    # 0.07 * 10,000 is more than 700 in fp64
        (dict(num_epochs=1.1), 10_000, (110, 'num_epochs=1.1')),
        (dict(max_hours=2), 1000, (OPEN, 'max_hours=2')),
        (dict(max_steps=7, max_hours=2), 1000, (7, 'max_steps=7 or max_hours=2')),
    ):
        assert find_end(settings(**config), 100, tokens_per_epoch) == end
    with pytest.raises(SettingError, match='max_tokens=99 is less than one step of 100 tokens'):
        find_end(settings(max_tokens=99), 100, 1000)


def test_a_warm_up_and_evaluations_that_nobody_chose_fit_the_run(tmp_path):
    """A tenth of the run, and an epoch, but not under ten steps. A checkpoint's go on as they began, and a
    config file's are for the length that the file gives, unless another is typed."""
    (tmp_path / 'mine.py').write_text('warmup_steps = 30\nmax_steps = 100')
    (tmp_path / 'wsd.py').write_text('warmup_steps = 9\ndecay_share = 0.6\nlr_schedule = "wsd"')
    for words, before, epoch, warmup, freq in (
        ('--max_steps=40', {}, 0, 4, 250), ('--max_steps=2000', {}, 0, 100, 250),
        ('--max_steps=40 --warmup_steps=30', {}, 0, 30, 250),
        ('--max_steps=40 --warmup_steps=50', {}, 0, 50, 250),       # which Schedule.check refuses
        ('--max_steps=120', {'warmup_steps': 100}, 0, 100, 250),
        ('--max_steps=40', {'warmup_steps': 100}, 0, 4, 250),
        ('mine.py', {}, 0, 30, 250), ('mine.py --max_steps=200', {}, 0, 20, 250),
        ('mine.py --max_steps=400', {}, 0, 30, 250), ('mine.py --max_steps=20', {}, 0, 2, 250),
        ('mine.py --max_steps=20', {'warmup_steps': 2}, 0, 2, 250),
        ('wsd.py --max_steps=100', {}, 0, 9, 250), ('wsd.py --max_steps=20', {}, 0, 2, 250),
        ('--max_steps=40', {}, 20, 4, 20), ('--max_steps=40', {}, 3, 4, 10),
        ('--max_steps=40', {}, 1000, 4, 250), ('--max_steps=40 --eval_freq=0', {}, 20, 4, 0),
    ):
        words = [str(tmp_path / word) if word.endswith('.py') else word for word in words.split()]
        config = configure(str(ROOT / 'train.py'), ['--batch_size=1', *words]).over(before)
        was = config['warmup_steps']
        length = Length.of(config, 1, epoch * 1024)
        assert (words, length.fitted) == (words, {'warmup_steps': warmup, 'eval_freq': freq})
        assert ('warmup_steps=' in length.cut) == (warmup != was)
        config.update(length.fitted)
        assert Length.of(config, 1, epoch * 1024).cut == '', 'it is cut once'
