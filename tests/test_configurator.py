import dataclasses
import os
import subprocess
import sys

import pytest
import torch

import errors
from configurator import UserError, configure, read_script, told
from conftest import ROOT, run
from model import GPT, GPTConfig

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
    assert script() == dict(
        rate=1e-3,
        steps=16,
        name='a',
        switch=False,
        use_thing=True,
        mode='auto',
        total=0,
        parts=0,
        directory='b',
    )


@pytest.mark.parametrize('words, name, value', [
    (['--rate=3e-3'], 'rate', 3e-3),
    (['--rate', '2'], 'rate', 2.0),
    (['--steps=1e3'], 'steps', 1000),
    (['--steps=1_000'], 'steps', 1000),
    (['--steps=-1'], 'steps', -1),
    (['--name=5'], 'name', '5'),
    (['--switch'], 'switch', True),
    (['--switch=false'], 'switch', False),
    (['--switch', 'true'], 'switch', True),
    (['--no_switch'], 'switch', False),
    (['--no_thing'], 'use_thing', False),
    (['--no-use-thing'], 'use_thing', False),
    (['--mode'], 'mode', 'on'),
    (['--no_mode'], 'mode', 'off'),
    (['--mode', 'off'], 'mode', 'off'),
    (['--mode=true'], 'mode', 'on'),
    (['--mode=No'], 'mode', 'off'),
    (['--switch', '--rate', '5'], 'rate', 5.0),
    (['--rate=1', '--rate=2'], 'rate', 2.0),
])
def test_flags(script, words, name, value):
    config = script(*words)
    assert config[name] == value
    assert type(config[name]) is type(value)
    assert config.given >= {name}


@pytest.mark.parametrize('words, message', [
    (['--rat=1'], 'nearest is rate'),
    (['--rate=fast'], "rate wants a number, not 'fast'"),
    (['--mode=ture'], "mode is one of auto, on, off, not 'ture'"),
    (['--steps=1.5'], 'whole number'),
    (['--switch=maybe'], 'true or false'),
    (['--steps'], '--steps needs a value'),
    (['word'], "what is 'word'"),
    (['--no_rate'], 'rate wants a number'),
    (['--no_such_thing_at_all'], 'no setting'),
])
def test_mistakes_are_named(script, words, message):
    with pytest.raises(ValueError, match=message):
        script(*words)


def test_python_and_yaml_files(script, tmp_path):
    (tmp_path / 'a.py').write_text('rate = 2 * 1e-2  # arithmetic\nsteps = 2**3\n_private = [1]\n')
    (tmp_path / 'b.yaml').write_text('rate: 3e-3\nswitch: true\nname: 2026-11-21\nmode: on\n')
    config = script('b.yaml', '--steps=9')
    assert config['rate'] == 3e-3
    assert config['switch'] is True
    assert config['name'] == '2026-11-21'  # PyYAML alone reads a date, and true for on
    assert config['mode'] == 'on'
    assert config['steps'] == 9
    assert isinstance(config['rate'], float)  # PyYAML alone reads 3e-3 as text
    assert script('--config=a.py')['rate'] == 0.02
    assert script('--config', 'a.py')['steps'] == 8
    assert script('--steps=5', 'a.py')['steps'] == 5  # flags win wherever they stand


@pytest.mark.parametrize('file, text, message', [
    ('a.py', 'rte = 1', 'a.py: no setting is called .rte.; the nearest is rate'),
    ('a.py', 'steps = "many"', 'a.py: steps wants'),
    ('a.py', 'rate = [1, 2]', 'rate wants a number'),
    ('a.yaml', 'rte: 1', 'nearest is rate'),
    ('a.yaml', '- 1\n- 2', 'flat list'),
    ('a.yaml', 'a: [', 'not YAML'),
    ('a.yaml', 'rate: 1\nsteps: 2\n"rate": 3', 'a.yaml: rate is given twice, in lines 1 and 3'),
    ('a.yaml', 'rate: &one 1\nsteps: *one', 'line 1 has an anchor .* or an alias'),
    ('a.yaml', 'rate: *one', 'line 1 has an anchor .* or an alias'),
    ('a.yaml', 'rate: "\\UFFFFFFFF"', 'not YAML'),
    ('a.yaml', 'name: {first: 1}', 'flat list'),
    ('a.yaml', 'just words', 'flat list'),
    ('a.yaml', '1: 2', "no setting is called '1'"),
    ('a.yaml', 'switch: 3', 'switch wants true or false'),
])
def test_mistakes_in_files_are_named(script, tmp_path, file, text, message):
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        script(file)


def test_one_setting_under_two_names_in_a_file(tmp_path):
    (tmp_path / 'a.yaml').write_text('learning_rate: 1e-3\nmax_lr: 2e-3')
    with pytest.raises(ValueError, match='max_lr is given twice'):
        configure(str(ROOT / 'train.py'), [str(tmp_path / 'a.yaml')])


def test_a_later_file_wins_and_says_so(tmp_path):
    (tmp_path / 'a.py').write_text('max_lr = 1e-3\nmax_steps = 9\n')
    (tmp_path / 'b.yaml').write_text('learning_rate: 2e-3\nmax_steps: 9\n')
    files = tmp_path / 'a.py', tmp_path / 'b.yaml'
    done = run('train.py', *files, '--batch_size=0', '--device=cpu', rc=2)
    assert f'{files[1]} comes later, so max_lr=0.002, not 0.001\n' in done.stdout
    assert configure(str(ROOT / 'train.py'), [str(path) for path in files])['max_lr'] == 2e-3


def test_an_alias_bomb_is_not_built(script, tmp_path):
    """Ten lines that stand for 10**10 merged names."""
    lines = ['a0: &a0 {x: 1}']
    for i in range(10):
        lines.append(f'a{i + 1}: &a{i + 1} {{<<: [{", ".join([f"*a{i}"] * 10)}]}}')
    (tmp_path / 'a.yaml').write_text('\n'.join(lines))
    with pytest.raises(ValueError, match='has an anchor') as refusal:
        script('a.yaml')
    assert len(str(refusal.value)) < 200
    for text, message in (('a: ' + '[' * 60_000, 'nests deeper'), ('a: 1\n' * 20_000, 'is longer than')):
        (tmp_path / 'a.yaml').write_text(text)
        with pytest.raises(ValueError, match=message):
            script('a.yaml')


def test_an_empty_file_sets_nothing(script, tmp_path):
    (tmp_path / 'a.yaml').write_text('# nothing\n')
    assert script('a.yaml').given == set()


def test_missing_file(script):
    with pytest.raises(FileNotFoundError, match='no config file nowhere.py'):
        script('nowhere.py')


def test_a_later_layer_replaces_a_whole_group(script, tmp_path):
    (tmp_path / 'a.py').write_text('total = 64')
    config = script('a.py')
    assert config['total'] == 64
    assert config['parts'] == 0
    config = script('a.py', '--parts=4')
    assert config['total'] == 0
    assert config['parts'] == 4
    assert 'total' not in config.given
    config, _ = script('--total=8').over({'total': 0, 'parts': 2, 'rate': 5.0})
    assert config['total'] == 8
    assert config['parts'] == 0
    assert config['rate'] == 5.0


def test_a_layer_that_repeats_what_is_in_force_changes_nothing_else(script, tmp_path):
    (tmp_path / 'a.py').write_text('total = 64')
    assert script('a.py', '--parts=0')['total'] == 64
    config, changes = script('--parts=2').over({'total': 8, 'parts': 2})
    assert (config['total'], changes) == (8, [])


@pytest.mark.parametrize('word, use_fp8, backend', [
    ('--use_fp8', True, 'native'),
    ('--no_fp8', False, 'auto'),
    ('--fp8_backend=te', True, 'te'),
])
def test_use_fp8_over_a_config_that_orders_a_backend(word, use_fp8, backend):
    config = configure(str(ROOT / 'train_fp8.py'), [str(ROOT / 'config' / 'quickstart.py'), word])
    assert (config['use_fp8'], config['fp8_backend']) == (use_fp8, backend)


def test_precedence_over_a_checkpoint(script, tmp_path):
    (tmp_path / 'a.py').write_text('steps = 20\nname = "file"')
    saved = {'rate': 7.0, 'steps': 30, 'name': 'saved', 'directory': 'saved', 'unknown_here': 1}
    config, changes = script('a.py', '--name=flag').over(saved, never=('directory',))
    assert config['rate'] == 7.0
    assert config['steps'] == 20
    assert config['name'] == 'flag'
    assert config['directory'] == 'b'
    assert changes == [
        "steps: 30 in the checkpoint, now 20",
        "name: 'saved' in the checkpoint, now 'flag'",
    ]
    assert config.given == {'steps', 'name'}


@pytest.mark.parametrize('script', ['train.py', 'train_fp8.py', 'sample.py', 'prepare_data.py'])
def test_help_lists_every_setting_with_its_comment(script, capsys):
    defaults, comments, *_ = read_script(ROOT / script)
    assert not defaults.keys() - comments.keys(), 'settings without a comment'
    with pytest.raises(SystemExit) as end:
        configure(str(ROOT / script), ['--help'])
    assert end.value.code == 0
    out = ' '.join(capsys.readouterr().out.split())
    for name in defaults:
        assert f'--{name} ' in out
        assert comments[name] in out


@pytest.mark.parametrize('script', ['train_fp8.py', 'prepare_data.py'])
def test_a_script_answers_help(script):
    assert f'--{list(read_script(ROOT / script)[0])[-1]} ' in run(script, '--help').stdout


SCRIPTS = {  # what a mistyped setting is given behind
    'train.py': [], 'train_fp8.py': [], 'sample.py': [], 'hellaswag.py': [], 'diagnose.py': [],
    'prepare_data.py': [], 'plan.py': [], 'sweep.py': [], 'bench.py': ['pair'], 'plot.py': ['lr'],
    'hf.py': ['export'], 'lora.py': ['merge'], 'tests/drill.py': []}
WITHOUT_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name='__main__')
finally:
    print('torch' in sys.modules)
"""


@pytest.mark.parametrize('words, rc', [(['--help'], 0), (['--max_stepz=1'], 2)])
@pytest.mark.parametrize('script', SCRIPTS)
def test_help_and_mistakes_do_not_wait_for_torch(script, words, rc):
    done = run('-c', WITHOUT_TORCH, script, *SCRIPTS[script], *words, rc=rc)
    assert done.stdout.splitlines()[-1] == 'False'


TOOL = '''
"""Does things."""
command = ''        # pair | one | two
depth = 1           # >= 1: of all
# pair: in turn
# More of it.
rounds = 5          # >= 1: rounds
config_beside = ['script.py']
# one: of a file
rounds = 3          # >= 1: others
file = ''           # required: a file (any)
# two: of several
files = ()          # required: files
if __name__ == '__main__':
    config = configure(__file__)
file = 'not a setting'
'''


@pytest.fixture
def tool(script, tmp_path):
    (tmp_path / 'tool.py').write_text(TOOL)
    return lambda *words: configure(str(tmp_path / 'tool.py'), list(words))


def test_a_command_has_its_own_settings(tool):
    pair, one = tool('pair', '--depth=2'), tool('one', '--file=x')
    assert (pair.command, pair) == ('pair', dict(depth=2, rounds=5))
    assert (one.command, one) == ('one', dict(depth=1, rounds=3, file='x'))


def test_settings_beside_ones_own(tool, tmp_path):
    (tmp_path / 'a.py').write_text('steps = 7')
    words = ['--rounds', '9', 'a.py', '--rate', '2', '--switch', '--depth=4']
    config = tool('pair', *words)
    assert config == dict(depth=4, rounds=9)
    assert (config.beside['rate'], config.beside['steps'], config.beside['switch']) == (2.0, 7, True)
    assert config.beside.words == ['a.py', '--rate', '2', '--switch']
    assert tool('one', 'x').beside is None


def test_bare_words_are_what_is_required(tool):
    assert tool('one', 'x')['file'] == 'x'
    assert tool('two', 'x', 'y')['files'] == ('x', 'y')


@pytest.mark.parametrize('words, message', [
    ([], r'type `python tool.py pair\|one\|two ...`; --help says what each does'),
    (['three'], "type `python tool.py pair.*`, not 'three'"),
    (['--rounds=2', 'pair'], "not '--rounds=2'"),
    (['one'], r'type `python tool.py one --file=FILE`; FILE: a file \(any\)$'),
    (['two'], r'type `python tool.py two FILES ...`; FILES: files$'),
    (['one', 'x', 'y'], "what is 'y'"),
    (['one', 'x', '--rate=2'], "no setting is called 'rate'"),
    (['pair', '--rats=2'], "no setting is called 'rats'; the nearest is rate"),
    (['pair', '--round=2'], "no setting is called 'round'; the nearest is rounds"),
    (['pair', '--rounds=0'], "rounds wants a whole number >= 1, not '0'"),
    (['pair', '--command=one'], "no setting is called 'command'"),
])
def test_mistakes_behind_a_command_are_named(tool, words, message):
    with pytest.raises(UserError, match=message) as refusal:
        tool(*words)
    assert refusal.value.exit_code == 2


def test_the_last_config_file_has_the_name(script, tmp_path):
    for name in 'a.py', 'b.c.yaml':
        (tmp_path / name).write_text('')
    assert script('a.py', '--rate=2', '--config=b.c.yaml').stem == 'b.c'
    assert script('--rate=2').stem == ''
    assert script('a.py').over({'rate': 3.0})[0].stem == 'a'


def test_every_model_field_is_a_setting():
    defaults = read_script(ROOT / 'train.py')[0]
    for field in dataclasses.fields(GPTConfig):
        assert defaults[field.name] == (0 if field.name == 'vocab_size' else field.default)


def test_config_files_resolve_for_both_scripts():
    for file in sorted((ROOT / 'config').iterdir()):
        if file.suffix in ('.py', '.yaml') and file.name != 'sweep_penalty.yaml':  # sweep.py's
            for script in ('train.py', 'train_fp8.py'):
                configure(str(ROOT / script), [str(file)])


def test_a_misspelt_setting_of_a_script():
    with pytest.raises(UserError, match='nearest is max_lr') as refusal:
        configure(str(ROOT / 'train.py'), ['--max_l=1'])
    assert refusal.value.exit_code == 2


def test_exit_code_and_one_line():
    assert 'prepare_data.py nothing' in run('train.py', '--dataset=nothing', rc=1).stderr


def mistake(tmp_path, error, **env):
    """stderr and exit code of a script that raises so."""
    script = tmp_path / 'script.py'
    script.write_text('from configurator import DataError, MachineError, SettingError, configure\n'
                      f'rate = 1.0\nconfig = configure(__file__)\nraise {error}\n')
    env = {**os.environ, 'PYTHONPATH': str(ROOT), **env}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    return done.stderr, done.returncode


@pytest.mark.parametrize('error, code', [
    ('SettingError("so")', 2),
    ('DataError("so")', 1),
    ('MachineError("so")', 1),
])
def test_a_users_mistake_is_one_line(tmp_path, error, code):
    assert mistake(tmp_path, error) == ('error: so\n', code)
    stderr, _ = mistake(tmp_path, error, TRACEBACK='1')
    assert stderr.startswith('Traceback')


@pytest.mark.parametrize('call, said', [
    ('open("nowhere/x")', 'error: nowhere/x: No such file or directory\n'),
    ('open("/dev/full", "w").writelines("x" * 10**5)', 'error: No space left on device\n'),
    ('bytearray(10**18)', 'error: out of memory (MemoryError)\n'),
    ('__import__("signal").raise_signal(2)', '\ninterrupted\n'),
])
def test_what_the_system_does_is_one_line(tmp_path, call, said):
    assert mistake(tmp_path, call)[0] == said


def test_a_closed_stdout_is_no_error(tmp_path):
    """As behind `| head`: of a script that prints much, and of one whose only line waits for its end."""
    for lines in (10**5, 1):
        script = tmp_path / 'script.py'
        script.write_text(f'from configurator import configure\nrate = 1.0\nconfig = configure(__file__)\n'
                          f'for _ in range({lines}): print("a line")\n')
        reading, writing = os.pipe()
        os.close(reading)
        env = {**os.environ, 'PYTHONPATH': str(ROOT)}
        done = subprocess.run([sys.executable, script], env=env, stdout=writing, stderr=subprocess.PIPE)
        os.close(writing)
        assert done.stderr == b''


def test_out_of_memory_names_what_takes_less(monkeypatch):
    monkeypatch.setattr(errors, 'in_force', {})  # to be put back
    monkeypatch.setattr(sys, 'argv', ['train.py', '--batch_size=8'])
    config = configure(str(ROOT / 'train.py'))
    configure(str(ROOT / 'hellaswag.py'), [])  # as where train.py imports it
    config.over({'batch_size': 2})
    errors.in_force['batch_size'] = 6  # as a search for the largest fills it in
    remedy = ('to go on with less: python train.py --batch_size=8 '
              '--batch_size=3 --gradient_accumulation_steps=2 --resume=auto')
    for error in (MemoryError('no room'), torch.OutOfMemoryError('no room')):
        assert told(error) == f'out of memory (no room); {remedy}'
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(10**15)
    line = told(refusal.value)
    assert line.startswith('out of memory ([enforce fail')
    assert '\n' not in line
    assert line.endswith(remedy)
    monkeypatch.setattr(sys, 'argv', ['sample.py'])
    configure(str(ROOT / 'sample.py'))
    assert told(MemoryError('no room')) == 'out of memory (no room)'


@pytest.mark.parametrize('content', [
    b'rate = ', b'rate = 1 / 0\n', b'rate = "\xff"\n', b'rate = 1\0', b'import nothing\n'])
def test_a_config_file_that_is_no_python_is_refused(content, script, tmp_path):
    (tmp_path / 'odd.py').write_bytes(content)
    (tmp_path / 'odd.yaml').write_bytes(b'rate: "\xff"\n' if b'\xff' in content else b'rate: [\n')
    for name in ('odd.py', 'odd.yaml'):
        with pytest.raises(UserError, match=f'{name} is') as refusal:
            script(name)
        assert '\n' not in str(refusal.value)


def test_a_checkpoints_settings_of_other_types_are_refused(script):
    for wrong in ('many', None, [1]):
        with pytest.raises(UserError, match='the checkpoint: steps wants a whole number'):
            script().over({'steps': wrong})


@pytest.mark.parametrize('error', [
    'ValueError("so")',
    'OSError("so")',
    'RuntimeError("so")',
    'ImportError("so")',
])
def test_a_programmers_mistake_keeps_its_traceback(tmp_path, error):
    stderr, code = mistake(tmp_path, error)
    assert stderr.startswith('Traceback')
    assert code == 1


def test_a_wrong_shape_in_the_model_keeps_its_traceback():
    model = GPT(GPTConfig(vocab_size=64, block_size=64, n_layer=1, n_head=1, n_embd=16))
    with pytest.raises(ValueError, match='128 tokens, but block_size is 64') as caught:
        model(torch.zeros((1, 128), dtype=torch.long))
    assert not isinstance(caught.value, UserError)
