"""What each setting of each script may be: it is said, it is held, and the edges of what is allowed train."""
import functools
import random

import pytest

import configurator
import model
import resolve
from backends import BACKENDS
from configurator import Range, SettingError, configure, declared, read_script
from conftest import ROOT, losses, refused, run
from fp8_linear import FORMATS, RECIPES
from tokenizer import TOKENIZERS

CALL = '\nconfig = configure(__file__'
SCRIPTS = [path.name for path in sorted(ROOT.glob('*.py')) if CALL in path.read_text()]
# These are names and paths, or need more than a glance to be judged.
ANY_TEXT = set('''
    init_from dataset tokenizer split_name data_dir run_name wandb_project checkpoint_dir resume fp8_keep ckpt
    prompt data json data_files text_column subset pretokenized lora_targets out name
    gpu gpus results backends recipes ranks preset runs run
'''.split())
# script and, where it has several, command
SPOKEN = [(script, '') for script in (*SCRIPTS, 'plan.py', 'tests/drill.py')] + [
    (script, command) for script in ('bench.py', 'plot.py', 'hf.py', 'lora.py')
    for command in read_script(ROOT / script).commands]


@pytest.fixture(autouse=True, scope='module')
def read_once():
    """A script is read from its file once, not for each of a thousand values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configurator, 'read_script', functools.cache(read_script))
        yield


def test_every_setting_says_what_it_may_be():
    assert len(SCRIPTS) == 7
    assert len(SPOKEN) == 7 + 2 + 8 + 3 + 1 + 2
    wrong = []
    for script, command in SPOKEN:
        defaults = read_script(ROOT / script, command)[0]
        allowed = declared(ROOT / script, command)
        assert allowed.keys() == defaults.keys()
        for name, may_be in allowed.items():
            free = getattr(may_be, 'any_text', False) and name not in ANY_TEXT
            if may_be is None or free or defaults[name] not in may_be:
                wrong.append((script, command, name))
    assert wrong == []


def test_choices_are_what_there_is():
    tables = {**model.CHOICES, 'dtype': resolve.DTYPES, 'tokenizer': TOKENIZERS,
              'fp8_backend': ['auto', 'auto:te', *BACKENDS, 'off'],
              'fp8_recipe': ['auto', 'auto:mxfp8', *RECIPES], 'fp8_format': ['auto', *FORMATS]}
    found = declared(ROOT / 'train_fp8.py')
    assert {name: set(found[name].words) for name in tables} == {name: set(tables[name]) for name in tables}


# --------------------------------------------------------------------------------- values in and out of range

def of_range(allowed, kind, draw):
    """(values inside and at the edges, values beyond) of a Range; kind: int or float."""
    inside, beyond = [], ['nan', 'inf', '-inf', '1e999', 'many', '']
    step = 1 if kind is int else 1e-9
    low, high = 0, 10**6
    for sign, end in allowed.bounds:
        end, inward = kind(end), step if '>' in sign else -step
        inside.append(end if '=' in sign else end + inward)
        beyond.append(end - inward if '=' in sign else end)
        low, high = (end, high) if '>' in sign else (low, end)
    for _ in range(4):
        value = draw.uniform(low, high)
        inside.append(min(high - step, max(low + step, kind(value))))
    return inside, beyond


def of_choices(allowed):
    """The same of Choices."""
    if True in allowed.words:
        return [True, False, 'on', 'no'], ['maybe', '', '2']
    if allowed.any_text:
        return [*allowed.words, 'any text', 'None'], []
    inside, beyond = allowed.words, ['none_of_these', '', allowed.words[0].upper(), '-1', '1.5']
    if allowed.numbers:
        return [*inside, '1', '12'], [*beyond, '0']
    return inside, [*beyond, '2']


def judged(script, words, name, value):
    """Return the message of the refusal of --name=value, or '' where the setting takes an allowed value."""
    try:
        config = configure(ROOT / script, [*words, f'--{name}={value}'])
    except SettingError as error:
        return str(error)
    assert config[name] in declared(ROOT / script, config.command)[name]
    return ''


def test_a_setting_takes_what_it_allows_and_nothing_else():
    wrong = []
    for script, command in SPOKEN:
        if script == 'train.py':        # its settings are all among train_fp8.py's
            continue
        source = read_script(ROOT / script, command)
        words = [command] * bool(command) + [f'--{name}=x' for name in source.defaults
                                             if source.comments[name].startswith('required')]
        for name, allowed in declared(ROOT / script, command).items():
            if isinstance(allowed, Range):
                inside, beyond = of_range(allowed, type(source.defaults[name]), random.Random(name))
            else:
                inside, beyond = of_choices(allowed)
            wrong += [(script, name, value) for value in inside if judged(script, words, name, value)]
            for value in beyond:
                said = judged(script, words, name, value)
                if not said.startswith(f'the command line: {name} ') or not said.endswith(f"not '{value}'"):
                    wrong.append((script, name, value, said))
    assert wrong == []


# file, its text: what the one line says
IN_FILES = {
    ('a.py', 'max_lr = float("nan")'): 'max_lr wants a number > 0, not nan',
    ('a.py', 'log_freq = 0'): 'log_freq wants a whole number >= 1, not 0',
    ('a.py', 'log_freq = True'): 'log_freq wants a whole number >= 1, not True',
    ('a.py', 'grad_checkpointing = 0'):
        'grad_checkpointing is one of none, full, a whole number >= 1, not 0',
    ('a.yaml', 'max_lr: .nan'): "max_lr wants a number > 0, not '.nan'",
    ('a.yaml', 'log_freq: 0'): "log_freq wants a whole number >= 1, not '0'",
    ('a.yaml', 'fp8_backend: foo'):
        "fp8_backend is one of auto, auto:te, native, te, torchao, emulate, off, not 'foo'",
}


def test_files_are_held_to_the_same(tmp_path):
    for (file, text), message in IN_FILES.items():
        (tmp_path / file).write_text(text)
        with pytest.raises(SettingError) as refusal:
            configure(ROOT / 'train_fp8.py', [str(tmp_path / file)])
        assert str(refusal.value) == f'{tmp_path / file}: {message}'
    (tmp_path / 'a.py').write_text('fp8_margin = 200')      # train.py has none, but its twin
    message = 'a.py: fp8_margin wants a whole number >= 0, <= 8, not 200'
    with pytest.raises(SettingError, match=message):
        configure(ROOT / 'train.py', [str(tmp_path / 'a.py')])


@pytest.mark.parametrize(
    'script', [['train_fp8.py'], ['plan.py'], ['plot.py', 'lr'], ['bench.py', 'pair']], ids=' '.join)
def test_what_reads_the_settings_of_training_refuses_as_it_does(script):
    code, said = refused(*script, '--batch_size=-1')
    assert code == 2
    assert "the command line: batch_size wants a whole number >= 0, <= 65_536, not '-1'" in said


# ------------------------------------------------------------------------------------------- edges that train

LEAST = dict(seed=0, num_workers=0, min_lr_ratio=0, warmup_steps=0, decay_share=0, weight_decay=0, beta1=0,
             beta2=0, grad_clip=0, eval_freq=0, eval_tokens=1, log_freq=1, checkpoint_freq=1,
             fp8_stats_freq=1, fp8_amax_history=1, fp8_recipe='delayed')
MOST = dict(seed=281_000_000, num_workers=1024, min_lr_ratio=1, decay_share=1, beta1=0.999999999,
            beta2=0.999999999, fp8_margin=8, fp8_until=1, grad_checkpointing=10**9)


@pytest.mark.parametrize('settings', [LEAST, MOST], ids=['least', 'most'])
def test_the_edges_train(settings, tiny, tmp_path):
    words = [f'--{name}={value}' for name, value in settings.items()]
    words += ['--fp8_backend=native', '--max_steps=4', f'--checkpoint_dir={tmp_path}']
    done = run('train_fp8.py', *tiny, *words)
    assert 'done: ' in done.stdout
    assert list(losses(tmp_path)) == [1, 2, 3, 4]
    assert all(loss < 7 for loss in losses(tmp_path).values())
