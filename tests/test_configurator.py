"""Settings, config files and flags become one checked dict. Nothing here imports torch: `.ci/run` runs this
file under each Python of the machine."""
import re
import subprocess
import sys

import pytest

import configurator
from configurator import ALIASES, MissingError, SettingError, UserError, configure, read_script
from lint import ROOT

SCRIPT = '''
from elsewhere import Linear
# a comment line
rate = 1e-3     # per step
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
config_groups = [('total', 'parts')]
config = configure(__file__)
not_a_setting = 3
'''
DEFAULTS = dict(rate=1e-3, steps=16, name='a', switch=False, use_thing=True, mode='auto', total=0, parts=0,
                directory='b')
FILES = {
    'a.py': 'rate = 2 * 1e-2  # arithmetic\nsteps = 2**3\n_private = [1]\n',
    'imports.py': 'import math, pathlib\nfrom math import log2\ndef twice(n): return 2 * n\n'
                  'steps = twice(int(log2(8)))\ndirectory = pathlib.Path("x")',
    'none.py': 'rate = None',
    'null.yaml': 'rate: null\nsteps: ~\ndirectory:\nname: "null"\n',
    'b.yaml': 'rate: 3e-3\nswitch: true\nname: 2026-11-21\nmode: on\n',    # PyYAML: a text, a date, true
    'c.yaml': '# nothing\n',
    'd.py': 'total = 64',
    'e.py': 'steps = 20\nname = "file"',
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {'script.py': SCRIPT, **FILES}.items():
        (tmp_path / name).write_text(text)
    return lambda *words: configure(str(tmp_path / 'script.py'), list(words))


# words: what they set
TAKEN = {
    '--rate=3e-3': dict(rate=3e-3),
    '--steps=1e3': dict(steps=1000),
    '--steps=1_000': dict(steps=1000),
    '--steps=9007199254740993': dict(steps=2**53 + 1),      # a float would lose the last digit
    '--name=5': dict(name='5'),
    '--switch': dict(switch=True),
    '--no_switch': dict(switch=False),
    '--no_thing': dict(use_thing=False),
    '--no-use-thing': dict(use_thing=False),
    '--mode': dict(mode='on'),
    '--no_mode': dict(mode='off'),
    '--mode off': dict(mode='off'),
    '--mode=true': dict(mode='on'),
    '--mode=No': dict(mode='off'),
    '--rate=1 --rate=2': dict(rate=2.0),
    'b.yaml --steps=9': dict(rate=3e-3, switch=True, name='2026-11-21', mode='on', steps=9),
    '--config=a.py': dict(rate=0.02, steps=8),
    '--steps=5 a.py': dict(rate=0.02, steps=5),     # flags win wherever they stand
    'imports.py': dict(steps=6, directory='x'),
    'none.py': {},      # as the default, whatever an earlier file says
    'a.py none.py': dict(steps=8),
    'a.py null.yaml': dict(name='null'),
    'null.yaml a.py': dict(rate=0.02, steps=8, name='null'),
    'a.py b.yaml': dict(rate=3e-3, steps=8, switch=True, name='2026-11-21', mode='on'),     # the later wins
    # a later layer replaces a whole group, but a value that is repeated changes nothing else
    'd.py': dict(total=64),
    'd.py --parts=4': dict(parts=4),
    'd.py --parts=0': dict(total=64, parts=0),
}
# words: what the one line says
MISTAKES = {
    '--rate=fast': "rate wants a number, not 'fast'",
    '--mode=ture': "mode is one of auto, on, off, not 'ture'",
    '--steps': '--steps needs a value',
    '--config': '--config needs a file',
    '--config --steps=1': '--config needs a file',
    '--directory=': "directory wants a name or a path, not ''",
}
# file, its text, what the one line says
IN_FILES = [
    ('x.py', 'rte = 1', 'x.py: no setting is called .rte.; the nearest is rate'),
    ('x.py', 'steps = "many"', 'x.py: steps wants'),
    ('x.py', 'rate = ', 'x.py is'),
    ('x.py', 'import sys\nsys.exit(0)', 'x.py is no config file: it calls exit'),
    ('x.py', 'steps = 10**5000', 'x.py: steps wants a whole number, not one of thousands of digits'),
    ('x.py', 'rate = [-10**5000]', 'x.py: rate wants a number, not one of thousands of digits'),
    ('x.py', 'def rate(step): return 1 / step', 'x.py: rate wants a number, not <function rate'),
    ('x.py', 'directory = ["a"]', "x.py: directory wants a name or a path, not ..a"),
    ('x.yaml', 'null: 1', 'flat list'),
    ('x.yaml', 'rate: 1\nsteps: 2\nrate: 3', 'rate stands there twice'),
    ('x.yaml', 'learning_rate: 1\nmax_lr: 2', 'x.yaml: learning_rate and max_lr are one setting'),
    ('x.yaml', 'total_steps: 1\nmax_iters: 2', 'x.yaml: max_iters and total_steps are one setting'),
    ('x.py', 'max_lr = 1\nlearning_rate = 2', 'x.py: learning_rate and max_lr are one setting'),
    ('x.yaml', '- 1\n- 2', 'flat list'),
    ('x.yaml', 'name: {first: 1}', 'flat list'),
    ('x.yaml', 'rate: 1\n---\nsteps: 2', 'not YAML'),
    ('x.yaml', 'a: ' + '[' * 1000, 'not YAML'),
]


def not_refused(configure, message):
    """Return '' where a call raises a UserError of exit code 2 in one short line that matches, else what it
    does."""
    try:
        return f'returns {configure()}'
    except UserError as error:
        fits = re.search(message, str(error)) and '\n' not in str(error) and len(str(error)) < 300
        return '' if fits and error.exit_code == 2 else str(error)


def test_defaults_files_and_flags(script):
    wrong = {}
    for line, values in {'': {}, **TAKEN}.items():
        config = script(*line.split())
        if repr(dict(config)) != repr(DEFAULTS | values) or config.given != values.keys():
            wrong[line] = config, config.given
    assert wrong == {}
    assert (script('a.py', '--rate=2', 'c.yaml').stem, script('a.py').over({}).stem) == ('c', 'a')


def test_mistakes_are_named(script, tmp_path):
    wrong = {line: not_refused(lambda: script(*line.split()), message) for line, message in MISTAKES.items()}
    for file, text, message in IN_FILES:
        (tmp_path / file).write_text(text)
        wrong[text[:50]] = not_refused(lambda: script(file), message)
    for value in ('many', None, [1]):
        message = 'the checkpoint: steps wants a whole number'
        wrong[value and str(value)] = not_refused(lambda: script().over({'steps': value}), message)
    assert {line: said for line, said in wrong.items() if said} == {}
    with pytest.raises(MissingError, match=f'no config file nowhere.py, .*`cd {configurator.HERE}`'):
        script('nowhere.py')


def test_files_and_flags_over_a_checkpoint(script):
    wrong = []
    for line, saved, values, given in (
        ('e.py --name=flag', {'rate': 7.0, 'steps': 30, 'name': 'saved', 'directory': 'x', 'unknown_here': 1},
         dict(rate=7.0, steps=20, name='flag'), {'steps', 'name'}),
        ('--total=8', {'total': 0, 'parts': 2, 'rate': 5.0}, dict(total=8, rate=5.0), {'total'}),
        ('--parts=2', {'total': 8, 'parts': 2}, dict(total=8, parts=2), {'parts'}),
    ):
        config = script(*line.split()).over(saved, never=['directory'])
        if config != DEFAULTS | values or config.given != given:
            wrong.append((line, config, config.given))
    assert wrong == []
    changes = script('--steps=20').over({'steps': 30, 'name': 'saved'}).changes
    assert changes == ['steps: 30 in the checkpoint, now 20']


def test_home_is_put_in_paths_of_every_layer_and_in_no_text(script, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', '/home/me')
    assert script('--name=~/x')['name'] == script('--name', '~/x')['name'] == '/home/me/x'
    assert script().over({'name': '~'})['name'] == '/home/me'
    for file, text in (('t.py', 'name = "~/x"'), ('t.yaml', 'name: ~/x')):
        (tmp_path / file).write_text(text)
        assert script(file)['name'] == '/home/me/x'
    assert script('--name=a~/x')['name'] == 'a~/x'
    config = configure(ROOT / 'sample.py', ['--prompt=~/x', '--system=~', '--ckpt=~/c'])
    assert [config[name] for name in ('prompt', 'system', 'ckpt')] == ['~/x', '~', '/home/me/c']
    parser = configurator.Parser('')
    parser.add_command('export', '').add_argument('--out')
    assert parser.parse_args(['export', '--out=~/x']).out == '/home/me/x'
    monkeypatch.setenv('HOME', str(tmp_path))
    assert script('--config=~/e.py')['name'] == 'file'


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
    wrong, free = [], set()
    for script in SCRIPTS:
        for name, setting in read_script(ROOT / script).settings.items():
            free |= {name} if isinstance(setting.default, str) and not setting.words else set()
            silent = type(setting.default) in (int, float) and not setting.bounds
            if silent or setting.read(setting.default) != setting.default:
                wrong.append((script, name))
    assert wrong == []
    assert free == ANY_TEXT


# setting of train_fp8.py: values that it takes, and texts that it does not
TAKES = {
    'max_steps': ([0, 2**63 - 1], '-1 1e30 9223372036854775808'),
    'max_lr': ([1e-9, 0.3], '0 -1e-9 nan inf 1e999 many'),
    'min_lr_ratio': ([0.0, 1.0], '1.000000001 -1e-9'),
    'beta2': ([0.0, 0.999999999], '1'),
    'seed': ([0, 2**63 - 1], '-1 9_223_372_036_854_775_808 1.5'),
    'fp8_margin': ([0, 8], '9 nan inf 1e999'),
    'use_wandb': ([True, False], 'maybe 2'),
    'dtype': (['bf16', 'fp32'], 'fp8 BF16 2'),
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


TORCHRUN_GIT_TENSORBOARD = {'standalone', 'nproc_per_node', 'always', 'dirty', 'exclude', 'logdir'}


def test_texts_name_no_flag_that_does_not_exist():
    scripts = 'train_fp8.py', 'prepare_data.py', 'sample.py'
    known = {name for script in scripts for name in read_script(ROOT / script).settings}
    known |= {*ALIASES, 'help', 'out', *TORCHRUN_GIT_TENSORBOARD}       # out: hf.py's
    named = {(path.name, flag) for path in (ROOT / 'train_fp8.py', *ROOT.glob('fp8gpt/**/*.py'))
             for flag in re.findall(r'[ `(=]--(?:no_)?(\w*[a-z])\b(?![-(])', path.read_text())}
    assert {(file, flag) for file, flag in named if flag not in known} == set()


def test_help_fits_a_screen_and_has_each_setting_and_each_name(capsys):
    wrong = []
    for script in SCRIPTS[:-1]:
        with pytest.raises(SystemExit):
            configure(ROOT / script, ['--help'])
        page, source = capsys.readouterr().out, (ROOT / script).read_text().splitlines()
        lines, settings = page.splitlines(), read_script(ROOT / script).settings
        wrong += [line for line in lines if len(line) > 110]
        shown = [line.split(' = ')[0] for line in lines if ' = ' in line and line in source]
        also = [name for name, ours in ALIASES.items() if f'--{name} sets --{ours}' in ' '.join(page.split())]
        if shown != list(settings) or also != [name for name, ours in ALIASES.items() if ours in settings]:
            wrong.append((script, shown, also))
    assert wrong == []


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



@pytest.mark.slow
def test_ctrl_c_in_the_first_imports_is_no_traceback(tmp_path):
    (tmp_path / 'decimal.py').write_text('raise KeyboardInterrupt')
    code = f'import sys; sys.path.insert(0, {str(tmp_path)!r}); import configurator'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b'')


@pytest.mark.parametrize('change, line', [
    ("sys.platform = 'win32'", 'error: Linux is wanted, and Windows has it as WSL'),
    ('sys.version_info = 3, 9', 'error: Python 3.10 or newer is wanted')])
def test_other_systems_are_refused_in_a_line(change, line):
    done = subprocess.run([sys.executable, '-c', f'import sys; {change}; import configurator'], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, '') and done.stderr.startswith(line)
    assert done.stderr.count('\n') == 1
