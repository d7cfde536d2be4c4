"""Settings, config files and flags become one checked dict. Nothing here imports torch: `.ci/run` runs this
file under each Python of the machine."""
import re
import subprocess
import sys

import pytest

from configurator import ALIASES, HERE, MissingError, SettingError, configure, read_script
from lint import ROOT

SCRIPT = '''
from elsewhere import Linear
rate = 1e-3     # > 0: per step
steps = 2**4    # steps
name = 'a'      # text
switch = False
use_thing = True
mode = 'auto'   # auto | on | off
total = 0
parts = 0
other = Linear
directory = 'a'       # first
directory = 'b'       # a re-assignment is the default
config_groups = []
config_groups = [*config_groups, ('total', 'parts')]
config = configure(__file__)
not_a_setting = 3
'''
DEFAULTS = dict(rate=1e-3, steps=16, name='a', switch=False, use_thing=True, mode='auto', total=0, parts=0,
                directory='b')
FILES = {
    'a.py': 'rate = 2 * 1e-2  # arithmetic\nsteps = 2**3\n_private = [1]\n',
    'imports.py': 'import math, pathlib\nfrom math import log2\ndef twice(n): return 2 * n\n'
                  'steps = twice(int(log2(8)))\ndirectory = pathlib.Path("x")\nrate = None',
    'null.yaml': 'rate: null\nsteps: ~\ndirectory:\nname: x\n',
    'b.yaml': 'rate: 3e-3\nswitch: true\nname: 2026-11-21\nmode: on\n',    # PyYAML: a text, a date, true
    'twice.yaml': 'steps: 1\nsteps: 2\n',
    'd.py': 'total = 64',
    'home.yaml': 'name: ~/x',
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', '/home/me')
    for name, text in {'script.py': SCRIPT, **FILES}.items():
        (tmp_path / name).write_text(text)
    return lambda line: configure(str(tmp_path / 'script.py'), line.split())


# words: what they set
TAKEN = {
    '': {},
    '--rate=3e-3 --steps=1e3': dict(rate=3e-3, steps=1000),
    '--steps=1_000 --name=5': dict(steps=1000, name='5'),
    '--steps=9007199254740993': dict(steps=2**53 + 1),      # a float would lose the last digit
    '--switch --no_thing': dict(switch=True, use_thing=False),
    '--no_switch --no-use-thing': dict(switch=False, use_thing=False),
    '--mode': dict(mode='on'),
    '--no_mode': dict(mode='off'),
    '--mode off': dict(mode='off'),
    '--mode=True': dict(mode='on'),
    '--rate=1 --rate=2': dict(rate=2.0),
    'b.yaml --steps=9': dict(rate=3e-3, switch=True, name='2026-11-21', mode='on', steps=9),
    '--config=a.py': dict(rate=0.02, steps=8),
    '--steps 5 --config a.py': dict(rate=0.02, steps=5),     # flags win wherever they stand
    'imports.py': dict(steps=6, directory='x'),
    'null.yaml': dict(name='x'),
    'twice.yaml': dict(steps=2),
    'a.py b.yaml': dict(rate=3e-3, steps=8, switch=True, name='2026-11-21', mode='on'),     # the later wins
    # a later layer replaces a whole group, but a value that is repeated changes nothing else
    'd.py --parts=4': dict(parts=4),
    'd.py --parts=0': dict(total=64, parts=0),
    'home.yaml --directory=~/y': dict(name='/home/me/x', directory='/home/me/y'),
    '--name=a~/x': dict(name='a~/x'),
}
# words: what the one line says
MISTAKES = {
    '--rate=fast': "rate wants a number > 0, not 'fast'",
    '--mode=ture': "mode wants one of auto, on, off, not 'ture'",
    '--steps': '--steps needs a value',
    '--config --steps=1': '--config needs a value',
    '--profile=3': 'the command line: profile is no setting: docs/fp8.md has six lines with torch.profiler',
    '--directory=': "directory wants a name or a path, not ''",
    '--stepz 1': "no setting is called 'stepz'; the nearest is steps",
    '--xyzzy': "no setting is called 'xyzzy'; the nearest is in --help",
    'word': "what is 'word'",
}
# text of x.py or x.yaml: what the one line says
IN_FILES = {
    'rte = 1': 'x.py: no setting is called .rte.; the nearest is rate',
    'rte: null': 'x.yaml: no setting is called .rte.; the nearest is rate',
    'config = 1': "x.py: no setting is called 'config'",
    'rate = ': r'x.py is no config file \(SyntaxError\)',
    'import sys\nsys.exit(0)': r'x.py is no config file \(SystemExit\)',
    'def rate(step): return 1 / step': 'x.py: rate wants a number > 0, not <function rate',
    'directory = ["a"]': r"x.py: directory wants a name or a path, not \['a'",
    '- 1\n- 2': 'x.yaml is no config file',
    'name: {first: 1}': r'x.yaml is no config file \(TypeError\): the value of a setting is no list',
    'rate: 1\n---\nsteps: 2': 'x.yaml is no config file',
    'name: ' + '[' * 1000: 'x.yaml is no config file',
}


def test_defaults_files_and_flags(script):
    for line, values in TAKEN.items():
        config = script(line)
        assert (line, repr(dict(config))) == (line, repr(DEFAULTS | values))
        assert config.given == {*config.files, *config.typed} >= values.keys()
    config = script('a.py --rate=2 null.yaml')
    assert (config.stem, config.files, config.typed) == (
        'null', dict(rate=0.02, steps=8, name='x'), dict(rate=2.0))


def test_mistakes_are_one_line(script, tmp_path):
    for line, message in (MISTAKES | IN_FILES).items():
        file = re.match(r'x\.\w+|', message)[0]
        if file:
            (tmp_path / file).write_text(line)
        with pytest.raises(SettingError, match=message) as refusal:
            script(file or line)
        assert '\n' not in str(refusal.value) and len(str(refusal.value)) < 300
    with pytest.raises(MissingError, match=f'no config file nowhere.py; .* {HERE}/config'):
        script('nowhere.py')


def test_files_and_flags_over_a_checkpoint(script):
    for line, saved, values in (
        ('a.py --name=flag', {'rate': 7.0, 'mode': 'off', 'name': 'saved', 'directory': 'x', 'other': 1},
         dict(rate=0.02, steps=8, mode='off', name='flag')),
        ('--total=8', {'total': 0, 'parts': 2, 'rate': 5.0}, dict(total=8, rate=5.0)),
        ('--parts=2', {'total': 8, 'parts': 2}, dict(total=8, parts=2)),
    ):
        config = script(line).over(saved, never=['directory'])
        assert config == DEFAULTS | values
        assert config.given == {*saved, *config.files, *config.typed} - {'directory', 'other'}
    config = script('--steps=20 null.yaml').over({'steps': 30, 'name': 'x'})
    assert (config.changes, config.stem) == (['steps: 30 in the checkpoint, now 20'], 'null')
    for value in 'many', None, [1]:
        with pytest.raises(SettingError, match='^the checkpoint: steps wants a whole number, not '):
            script('').over({'steps': value})


SCRIPTS = ('train.py', 'train_fp8.py', 'prepare_data.py', 'sample.py', 'hellaswag.py', 'diagnose.py',
           'tests/drill.py')
# These are names and paths, or need more than a glance to be judged.
ANY_TEXT = set('''
    init_from dataset tokenizer split_name data_dir run_name wandb_project checkpoint_dir resume fp8_keep ckpt
    prompt system data data_files text_column subset lora_targets
'''.split())


def test_every_setting_says_what_it_may_be():
    calls = [path.name for path in ROOT.glob('*.py') if '\nconfig = configure(__file__' in path.read_text()]
    assert {*calls, 'tests/drill.py'} == set(SCRIPTS)
    found = [each for script in SCRIPTS for each in read_script(ROOT / script).settings.items()]
    assert {name for name, setting in found if not setting.words and not setting.bounds} == ANY_TEXT
    assert [name for name, setting in found if setting.read(setting.default) != setting.default] == []


# setting of train_fp8.py: values that it takes, and texts that it does not
TAKES = {
    'max_steps': ([0, 2**63 - 1], '-1 1e999 0.5'),
    'max_lr': ([1e-9, 2.0**53 + 2], '0 -1e-9 nan inf 1e999 many'),
    'beta2': ([0.0, 0.999999999], '1'),
    'seed': ([0, 2**63 - 1], '-1 9_223_372_036_854_775_808 1.5'),
    'use_wandb': ([True, False], 'maybe 2'),
    'dtype': (['bf16', 'fp32'], 'fp8 BF16 2'),
    'grad_checkpointing': (['none', 'full', '1', '12'], '0 -1 1.5'),
    'dataset': (['any text', 'None', '5'], ''),
}


def test_a_setting_takes_what_it_allows_and_nothing_else(tmp_path):
    for name, (inside, beyond) in TAKES.items():
        for value in inside:
            taken = configure(ROOT / 'train_fp8.py', [f'--{name}={value}'])[name]
            assert (name, repr(taken)) == (name, repr(value))
        for value in beyond.split():
            with pytest.raises(SettingError, match=f'^the command line: {name} wants .*, not {value!r}$'):
                configure(ROOT / 'train_fp8.py', [f'--{name}={value}'])
    (tmp_path / 'a.py').write_text('fp8_margin = 200')      # train.py has none, but its twin
    for script in 'train.py', 'train_fp8.py':
        with pytest.raises(SettingError, match='a.py: fp8_margin wants a whole number >= 0, <= 8, not 200'):
            configure(ROOT / script, [str(tmp_path / 'a.py')])


TORCHRUN_GIT_TENSORBOARD = {'standalone', 'nproc_per_node', 'always', 'dirty', 'exclude', 'logdir'}


def test_texts_name_no_flag_that_does_not_exist():
    scripts = 'train_fp8.py', 'prepare_data.py', 'sample.py'
    known = {name for script in scripts for name in read_script(ROOT / script).settings}
    known |= {*ALIASES, 'help', 'out', *TORCHRUN_GIT_TENSORBOARD}       # out: hf.py's
    named = {(path.name, flag) for path in (ROOT / 'train_fp8.py', *ROOT.glob('fp8gpt/**/*.py'))
             for flag in re.findall(r'[ `(=]--(?:no_)?(\w*[a-z])\b(?![-(])', path.read_text())}
    assert {(file, flag) for file, flag in named if flag not in known} == set()


def test_help_has_each_setting(capsys):
    for script in SCRIPTS[:-1]:
        with pytest.raises(SystemExit):
            configure(ROOT / script, ['--help'])
        page = capsys.readouterr().out
        assert {*re.findall(r'^(\w+) = ', page, re.M)} >= read_script(ROOT / script).settings.keys()
        lines = [line for line in page.splitlines() if not line.startswith('fp8_recipe')]   # has all names
        assert '"""' not in page and max(map(len, lines)) <= 110


def test_config_files_resolve_for_both_scripts():
    for file in {*(ROOT / 'config').iterdir()} - {ROOT / 'config/sweep_penalty.yaml'}:      # W&B's
        for script in 'train.py', 'train_fp8.py':
            configure(ROOT / script, [str(file)] * (file.suffix in ('.py', '.yaml')))


WITHOUT_TORCH = """
import runpy, sys
for script, *words in map(str.split, sys.argv[1:]):
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name='__main__')
    except (SystemExit, ValueError, OSError) as ended:
        print(script, words, ended, 'torch' in sys.modules, sep='|')
"""


@pytest.mark.slow
def test_help_and_mistakes_do_not_wait_for_torch():
    scripts = *SCRIPTS, 'plan.py', 'sweep.py', 'bench.py pair', 'plot.py lr', 'hf.py export'
    lines = [f'{script} {word}' for script in scripts for word in ('--help', '--stepz=1')]
    lines += ['plan.py --gpu=v100', 'sample.py --ckpt=nowhere', 'diagnose.py --ckpt=nowhere',
              'hellaswag.py --ckpt=nowhere', 'hf.py export --ckpt=nowhere --out=x']
    done = subprocess.run([sys.executable, '-c', WITHOUT_TORCH, *lines], cwd=ROOT, stdout=-1, text=True)
    assert re.findall(r'\|(\w+)$', done.stdout, re.M) == ['False'] * len(lines)


@pytest.mark.parametrize('change', ["sys.platform = 'win32'", 'sys.version_info = 3, 9'])
def test_other_systems_are_refused_in_a_line(change):
    done = subprocess.run([sys.executable, '-c', f'import sys; {change}; import configurator'], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count('\n')) == (1, '', 1)
    assert done.stderr.startswith('error: Python 3.10 or newer on Linux is wanted, not 3')
