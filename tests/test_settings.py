"""What each setting of each script may be: its comment says it, configure holds it, and the edges train."""
import functools

import pytest

import configurator
import model
from fp8gpt.fp8.backends import BACKENDS
from fp8gpt.run import DTYPES
from configurator import ALIASES, SettingError, configure, read_script
from conftest import ROOT, losses, refused, run
from fp8gpt.fp8.linear import FORMATS, RECIPES

SCRIPTS = ('train.py', 'train_fp8.py', 'prepare_data.py', 'sample.py', 'hellaswag.py', 'diagnose.py',
           'tests/drill.py')
# These are names and paths, or need more than a glance to be judged.
ANY_TEXT = set('''
    init_from dataset tokenizer split_name data_dir run_name wandb_project checkpoint_dir resume fp8_keep ckpt
    prompt system data data_files text_column subset lora_targets
'''.split())


@pytest.fixture(autouse=True, scope='module')
def read_once():
    """A script is read from its file once, not for each of a thousand values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configurator, 'read_script', functools.cache(read_script))
        yield


def test_every_setting_says_what_it_may_be():
    calls = [path.name for path in ROOT.glob('*.py') if '\nconfig = configure(__file__' in path.read_text()]
    assert {*calls, 'tests/drill.py'} == set(SCRIPTS)
    wrong, free = [], set()
    for script in SCRIPTS:
        for name, setting in read_script(ROOT / script).settings.items():
            free |= {name} if isinstance(setting.default, str) and not setting.words else set()
            silent = type(setting.default) in (int, float) and not setting.bounds
            if silent or setting.read(setting.default) != setting.default:
                wrong.append((script, name))
    assert wrong == []
    assert free == ANY_TEXT


def test_choices_are_what_there_is():
    tables = {**model.CHOICES, 'dtype': DTYPES, 'fp8_backend': ['auto', 'auto:te', *BACKENDS, 'off'],
              'fp8_recipe': ['auto', 'auto:mxfp8', *RECIPES], 'fp8_format': ['auto', *FORMATS]}
    found = read_script(ROOT / 'train_fp8.py').settings
    assert {name: set(found[name].words) for name in tables} == {name: set(tables[name]) for name in tables}
    bounds = {name: f'>= {low}, <= {high}' for name, (low, high) in model.LIMITS.items() if name in found}
    assert {name: found[name].bounds.replace('_', '') for name in bounds} == bounds


# setting of train_fp8.py: values that it takes, and texts that it does not
TAKES = {
    'max_lr': ([1e-9, 0.3], '0 -1e-9 nan inf 1e999 many'),
    'min_lr_ratio': ([0.0, 1.0], '1.000000001 -1e-9'),
    'beta2': ([0.0, 0.999999999], '1'),
    'seed': ([0, 2**63 - 1], '-1 9_223_372_036_854_775_808 1.5'),
    'fp8_margin': ([0, 8], '9 nan inf 1e999'),
    'use_wandb': ([True, False], 'maybe 2'),
    'dtype': (['bf16', 'fp32'], 'fp8 BF16 2'),
    'fp8_recipe': ([*RECIPES, 'auto:mxfp8'], 'none_of_these'),
    'grad_checkpointing': (['none', 'full', '1', '12'], '0 -1 1.5'),
    'dataset': (['any text', 'None', '5'], ''),
}


def test_a_setting_takes_what_it_allows_and_nothing_else(tmp_path):
    wrong = []
    for name, (inside, beyond) in TAKES.items():
        for value in inside:
            taken = configure(ROOT / 'train_fp8.py', [f'--{name}={value}'])[name]
            wrong += [(name, value, taken)] * (taken != value or type(taken) is not type(value))
        for value in beyond.split():
            with pytest.raises(SettingError) as refusal:
                configure(ROOT / 'train_fp8.py', [f'--{name}={value}'])
            start, end = f'the command line: {name} ', f'not {value!r}'
            wrong += [str(refusal.value)] * (not str(refusal.value).startswith(start)
                                             or not str(refusal.value).endswith(end))
    assert wrong == []
    (tmp_path / 'a.py').write_text('fp8_margin = 200')      # train.py has none, but its twin
    for script in 'train.py', 'train_fp8.py':
        with pytest.raises(SettingError, match='a.py: fp8_margin wants a whole number >= 0, <= 8, not 200'):
            configure(ROOT / script, [str(tmp_path / 'a.py')])


# command lines of the scripts that argparse reads: what the one line says
BY_ARGPARSE = {
    'bench.py': 'required: command',
    'bench.py nothing': "invalid choice: 'nothing' (choose from 'pair', ",
    'bench.py pair --steps=0': "--steps: wants a whole number >= 1, not '0'",
    'bench.py pair --step=2': "no setting is called 'step'; the nearest is steps",
    'hf.py export --out=x --dtype=fp16': "--dtype: invalid choice: 'fp16'",
    'hf.py merg': "invalid choice: 'merg' (choose from 'export', 'merge', 'save', 'eval')",
    'plan.py --gpus=8,0': "--gpus: wants a whole number >= 1, not '0'",
    'plot.py lr --batch_size=-1': "batch_size wants a whole number >= 0, <= 65_536, not '-1'",
    'plan.py --network=fast': "--network: wants a number >= 0.001, not 'fast'",
    'plot.py loss a --ou=x': "what is '--ou=x'?",
    'sweep.py --name=../up': 'names a folder outside of sweeps/',
    'sweep.py --point=-2': "--point: wants a whole number >= -1, not '-2'",
    'sweep.py --max_lr=1e-3,2e-3 --point=2': 'the runs are 0 to 1',
}


def test_argparse_refuses_in_one_line():
    wrong = {}
    for line, message in BY_ARGPARSE.items():
        code, said = refused(*line.split())
        if code != 2 or message not in said:
            wrong[line] = code, said
    assert wrong == {}


LEAST = dict(seed=0, num_workers=0, min_lr_ratio=0, warmup_steps=0, weight_decay=0,
             beta2=0, grad_clip=0, eval_freq=0, eval_tokens=1, log_freq=1, checkpoint_freq=1,
             fp8_stats_freq=1, fp8_amax_history=1, fp8_recipe='delayed')
MOST = dict(seed=2**63 - 1, num_workers=1024, min_lr_ratio=1,
            beta2=0.999999999, fp8_margin=8, fp8_until=1, grad_checkpointing=10**9)


@pytest.mark.parametrize('settings', [LEAST, MOST], ids=['least', 'most'])
def test_the_edges_train(settings, tiny, tmp_path):
    words = [f'--{name}={value}' for name, value in settings.items()]
    words += ['--fp8_backend=native', '--max_steps=2', f'--checkpoint_dir={tmp_path}']
    assert 'done: ' in run('train_fp8.py', *tiny, *words).stdout
    assert list(losses(tmp_path)) == [1, 2]
    assert all(loss < 7 for loss in losses(tmp_path).values())


def test_help_fits_a_screen_and_has_each_setting_and_each_name(here):
    """Settings stand there as in the source; names from other systems, where the script has the setting."""
    wrong = []
    for script in SCRIPTS[:-1]:
        page, source = here(script, '--help'), (ROOT / script).read_text().splitlines()
        lines, settings = page.splitlines(), read_script(ROOT / script).settings
        wrong += [line for line in lines if len(line) > 110]
        shown = [line.split(' = ')[0] for line in lines if ' = ' in line and line in source]
        also = [name for name, ours in ALIASES.items() if f'--{name} sets --{ours}' in ' '.join(page.split())]
        if shown != list(settings) or also != [name for name, ours in ALIASES.items() if ours in settings]:
            wrong.append((script, shown, also))
    assert wrong == []
    assert '# what to train' in here('train.py', '--help').splitlines()
    assert run('train.py', '--help').stdout == here('train.py', '--help')
