"""Settings, config files and flags become one checked dict; a script that fails ends in one line."""
import dataclasses
import functools
import re

import pytest
import torch

import configurator
import forked
from fp8gpt.fp8 import linear as fp8_linear
from configurator import MissingError, UserError, configure, error_line, read_script
from conftest import ROOT, environment, run
from model import GPTConfig

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


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'script.py').write_text(SCRIPT)
    return lambda *words: configure(str(tmp_path / 'script.py'), list(words))


def test_defaults_are_the_last_assignments_above_configure(script):
    assert script() == dict(rate=1e-3, steps=16, name='a', switch=False, use_thing=True, mode='auto', total=0,
                            parts=0, directory='b')


# words: the setting, its value
FLAGS = {
    '--rate=3e-3': ('rate', 3e-3),
    '--steps=1e3': ('steps', 1000),
    '--steps=1_000': ('steps', 1000),
    '--steps=9007199254740993': ('steps', 2**53 + 1),      # a float would lose the last digit
    '--name=5': ('name', '5'),
    '--switch': ('switch', True),
    '--switch true': ('switch', True),
    '--no_switch': ('switch', False),
    '--no_thing': ('use_thing', False),
    '--no-use-thing': ('use_thing', False),
    '--mode': ('mode', 'on'),
    '--no_mode': ('mode', 'off'),
    '--mode off': ('mode', 'off'),
    '--mode=true': ('mode', 'on'),
    '--mode=No': ('mode', 'off'),
    '--rate=1 --rate=2': ('rate', 2.0),
}
# words: what the one line says
MISTAKES = {
    '--rat=1': 'nearest is rate',
    '--rate=fast': "rate wants a number, not 'fast'",
    '--mode=ture': "mode is one of auto, on, off, not 'ture'",
    '--steps=1.5': 'whole number',
    '--switch=maybe': 'true or false',
    '--steps': '--steps needs a value',
    'word': "what is 'word'",
    '--no_rate': 'rate wants a number',
}
# file, its text, what the one line says
IN_FILES = [
    ('a.py', 'rte = 1', 'a.py: no setting is called .rte.; the nearest is rate'),
    ('a.py', 'steps = "many"', 'a.py: steps wants'),
    ('a.py', 'rate = ', 'a.py is'),
    ('a.yaml', 'rte: 1', 'nearest is rate'),
    ('a.yaml', 'rate: 1\nsteps: 2\nrate: 3', 'rate stands there twice'),
    ('a.yaml', '- 1\n- 2', 'flat list'),
    ('a.yaml', 'name: {first: 1}', 'flat list'),
    ('a.yaml', 'rate: 1\n---\nsteps: 2', 'not YAML'),
    ('a.yaml', 'a: ' + '[' * 1000, 'not YAML'),
    ('a.yaml', '1: 2', "no setting is called '1'"),
    ('a.yaml', 'switch: 3', 'switch wants true or false'),
]


def not_refused(configure, message):
    """Return '' where a call raises a UserError of exit code 2 in one short line that matches, else what it
    does."""
    try:
        return f'returns {configure()}'
    except UserError as error:
        fits = re.search(message, str(error)) and '\n' not in str(error) and len(str(error)) < 300
        return '' if fits and error.exit_code == 2 else str(error)


def test_flags(script):
    wrong = {}
    for line, (name, value) in FLAGS.items():
        config = script(*line.split())
        if (config[name], type(config[name])) != (value, type(value)) or name not in config.given:
            wrong[line] = config[name]
    assert wrong == {}


def test_mistakes_are_named(script, tmp_path):
    wrong = {line: not_refused(lambda: script(*line.split()), message) for line, message in MISTAKES.items()}
    for file, text, message in IN_FILES:
        (tmp_path / file).write_text(text)
        wrong[text[:50]] = not_refused(lambda: script(file), message)
    assert {line: said for line, said in wrong.items() if said} == {}
    with pytest.raises(MissingError, match='no config file nowhere.py'):
        script('nowhere.py')


def test_python_and_yaml_files(script, tmp_path):
    (tmp_path / 'a.py').write_text('rate = 2 * 1e-2  # arithmetic\nsteps = 2**3\n_private = [1]\n')
    (tmp_path / 'b.yaml').write_text('rate: 3e-3\nswitch: true\nname: 2026-11-21\nmode: on\n')
    (tmp_path / 'c.yaml').write_text('# nothing\n')
    config = script('b.yaml', '--steps=9')      # PyYAML alone reads text, a date, and true for on
    names = 'rate', 'switch', 'name', 'mode', 'steps'
    assert [config[name] for name in names] == [3e-3, True, '2026-11-21', 'on', 9]
    assert script('--config=a.py')['rate'] == 0.02
    assert script('--config', 'a.py')['steps'] == 8
    assert script('--steps=5', 'a.py')['steps'] == 5    # flags win wherever they stand
    assert script('c.yaml').given == set()
    assert script('a.py', 'b.yaml')['rate'] == 3e-3     # the later file wins
    assert (script('a.py', '--rate=2', 'c.yaml').stem, script('a.py').over({})[0].stem) == ('c', 'a')


def test_a_later_layer_replaces_a_whole_group(script, tmp_path):
    (tmp_path / 'a.py').write_text('total = 64')

    def group(config):
        return config['total'], config['parts']
    assert group(script('a.py')) == (64, 0)
    config = script('a.py', '--parts=4')
    assert group(config) == (0, 4) and 'total' not in config.given
    config, _ = script('--total=8').over({'total': 0, 'parts': 2, 'rate': 5.0})
    assert group(config) == (8, 0) and config['rate'] == 5.0
    # a value that is repeated changes nothing else
    assert group(script('a.py', '--parts=0')) == (64, 0)
    config, changes = script('--parts=2').over({'total': 8, 'parts': 2})
    assert (config['total'], changes) == (8, [])


def test_precedence_over_a_checkpoint(script, tmp_path):
    (tmp_path / 'a.py').write_text('steps = 20\nname = "file"')
    saved = {'rate': 7.0, 'steps': 30, 'name': 'saved', 'directory': 'saved', 'unknown_here': 1}
    config, changes = script('a.py', '--name=flag').over(saved, never=('directory',))
    assert [config[name] for name in ('rate', 'steps', 'name', 'directory')] == [7.0, 20, 'flag', 'b']
    assert changes == ["steps: 30 in the checkpoint, now 20", "name: 'saved' in the checkpoint, now 'flag'"]
    assert config.given == {'steps', 'name'}
    for wrong in ('many', None, [1]):
        with pytest.raises(UserError, match='the checkpoint: steps wants a whole number'):
            script().over({'steps': wrong})


SCRIPTS = {  # what a mistyped setting is given behind
    'train.py': [], 'train_fp8.py': [], 'sample.py': [], 'hellaswag.py': [], 'diagnose.py': [],
    'prepare_data.py': [], 'plan.py': [], 'sweep.py': [], 'bench.py': ['pair'], 'plot.py': ['lr'],
    'hf.py': ['export'], 'tests/drill.py': []}
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
    lines = [' '.join([script, *words, word]) for script, words in SCRIPTS.items()
             for word in ('--help', '--stepz=1')]
    lines += ['plan.py --gpu=v100', 'train_fp8.py --dataset=nonesuch', 'sample.py --ckpt=nowhere',
              'diagnose.py --ckpt=nowhere', 'hellaswag.py --ckpt=nowhere',
              'hf.py export --ckpt=nowhere --out=x', 'train.py --resume=nowhere',
              'train.py --resume=latest --checkpoint_dir=no',
              'train.py --max_steps=5 --warmup_steps=9 --dataset=nonesuch']
    out = run('-c', WITHOUT_TORCH, *lines).stdout
    assert re.findall(r'\|(\w+)$', out, re.M) == ['False'] * len(lines)


# what only a Hugging Face model says
NO_SETTINGS = {'n_kv_head', 'vocab_size', 'tie_embeddings', 'norm_eps', 'head_dim', 'qkv_bias', 'rope_theta',
               'rope_factor', 'rope_low', 'rope_high', 'rope_original'}


def test_every_other_model_field_is_a_setting():
    settings = read_script(ROOT / 'train.py').settings
    fields = {field.name: field.default for field in dataclasses.fields(GPTConfig)}
    assert fields.keys() - settings.keys() == NO_SETTINGS
    assert [name for name in fields.keys() - NO_SETTINGS if settings[name].default != fields[name]] == []


def test_config_files_resolve_for_both_scripts(monkeypatch):
    monkeypatch.setattr(configurator, 'read_script', functools.cache(read_script))
    for file in {*(ROOT / 'config').iterdir()} - {ROOT / 'config/sweep_penalty.yaml'}:      # sweep.py's
        for script in 'train.py', 'train_fp8.py':
            configure(ROOT / script, [str(file)] * (file.suffix in ('.py', '.yaml')))


# what a script raises or does: its exit code, how its stderr begins
ENDS = {
    'raise SettingError("so")': (2, 'error: so\n'),
    'raise DataError("so")': (1, 'error: so\n'),
    'raise MachineError("so")': (1, 'error: so\n'),
    'open("nowhere/x")': (1, 'error: nowhere/x: No such file or directory\n'),
    'open("/dev/full", "w").writelines("x" * 10**5)': (1, 'error: No space left on device\n'),
    'bytearray(10**18)': (3, 'error: out of memory (MemoryError): '),
    '__import__("signal").raise_signal(2)': (130, '\ninterrupted\n'),
    # a programmer's mistake keeps its traceback
    'raise OSError("so")': (1, 'Traceback'),
    'raise RuntimeError("so")': (1, 'Traceback'),
}


def ended(folder, line, **env):
    """Return (exit code, stderr) of a script that configures and then runs a line."""
    script = folder / 'ending.py'
    script.write_text('from configurator import DataError, MachineError, SettingError, configure\n'
                      f'rate = 1.0\nconfig = configure(__file__)\n{line}\n')
    done = forked.finish([], *forked.start([str(script)], folder, environment(**env)), timeout=240)
    return done.returncode, done.stderr


def test_what_the_system_does_is_one_line(tmp_path):
    """So is a user's mistake; TRACEBACK=1 shows where either came from."""
    for line, (code, begins) in ENDS.items():
        found, said = ended(tmp_path, line)
        assert (line, found, said[:len(begins)]) == (line, code, begins)
        assert begins == 'Traceback' or said.strip().count('\n') == 0
    assert ended(tmp_path, 'raise DataError("so")', TRACEBACK='1')[1].startswith('Traceback')


def test_errors_of_libraries_are_one_line():
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(10**15)
    for error in (MemoryError('no room'), torch.OutOfMemoryError('no room'), refusal.value):
        assert '\n' not in error_line(error)
        assert '): in training, halve --batch_size, ' in error_line(error)
    line = error_line(RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer'))
    assert line.startswith('the connection to another rank is lost')
    for error in fp8_linear.OptionError, fp8_linear.DeviceError:
        assert error_line(error('so')) == 'so'
