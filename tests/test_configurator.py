"""Settings, config files and flags become one checked dict; a script that fails ends in one line."""
import dataclasses
import io
import re
import subprocess
import sys
import threading

import pytest
import torch

import configurator
import forked
import model
from configurator import (
    ALIASES, MissingError, SettingError, UserError, configure, error_line, printable, read_script, say)
from conftest import ROOT, environment, losses, refused, run
from fp8gpt import runlog
from fp8gpt.fp8 import linear as fp8_linear
from fp8gpt.fp8.backends import BACKENDS
from fp8gpt.fp8.linear import FORMATS, RECIPES
from fp8gpt.run import DTYPES

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
    prompt system data data_files encoding text_column subset lora_targets
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


def test_choices_are_what_there_is():
    tables = {**model.CHOICES, 'dtype': DTYPES, 'fp8_backend': ['auto', 'auto:te', *BACKENDS, 'off'],
              'fp8_recipe': ['auto', 'auto:mxfp8', *RECIPES], 'fp8_format': ['auto', *FORMATS]}
    found = read_script(ROOT / 'train_fp8.py').settings
    assert {name: set(found[name].words) for name in tables} == {name: set(tables[name]) for name in tables}
    bounds = {name: f'>= {low}, <= {high}' for name, (low, high) in model.LIMITS.items() if name in found}
    assert {name: found[name].bounds.replace('_', '') for name in bounds} == bounds


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


# command lines of the scripts that argparse reads: what the one line says
BY_ARGPARSE = {
    'bench.py': 'required: command',
    'bench.py pair --steps=0': "--steps: wants a whole number >= 1, not '0'",
    'plan.py --resume=latest': 'in place of --resume, --init_from=that checkpoint',
    'plan.py --dtype=fp32': 'plan.py models bf16 and FP8, not dtype=fp32',
    'plan.py --gpu=v100': "no data sheet of 'v100' here",
    'plan.py --gpu=gh200': '--gpu is one of H200, H100 PCIe, H100 SXM, B200',
    'plan.py --gpus=8,64,512': "--gpus: wants a whole number >= 1, not '8,64,512'",
    'plan.py --network=12.5': 'leave --network out: 400 GB/s a node are assumed',
    'plot.py lr --batch_size=-1': "batch_size wants a whole number >= 0, <= 65_536, not '-1'",
    'sweep.py --name=../up': 'names a folder outside of sweeps/',
    'sweep.py --max_lr=1e-3,2e-3 --point=2': 'the runs are 0 to 1',
}


def test_argparse_refuses_in_one_line():
    wrong = {}
    for line, message in BY_ARGPARSE.items():
        code, said = refused(*line.split())
        if code != 2 or message not in said:
            wrong[line] = code, said
    assert wrong == {}


EDGES = dict(seed=2**63 - 1, num_workers=0, min_lr_ratio=0, warmup_steps=0, weight_decay=0,
             beta2=0, grad_clip=0, eval_freq=0, eval_tokens=1, log_freq=1, checkpoint_freq=1,
             fp8_stats_freq=1, fp8_amax_history=1, fp8_recipe='delayed', fp8_margin=8,
             grad_checkpointing=10**9)


def test_the_edges_train(tiny, tmp_path):
    words = [f'--{name}={value}' for name, value in EDGES.items()]
    words += ['--fp8_backend=native', '--max_steps=2', f'--checkpoint_dir={tmp_path}']
    assert 'done: ' in run('train_fp8.py', *tiny, *words).stdout
    assert list(losses(tmp_path)) == [1, 2]
    assert all(loss < 7 for loss in losses(tmp_path).values())


def test_help_fits_a_screen_and_has_each_setting_and_each_name(here):
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


# what only a Hugging Face model says
NO_SETTINGS = {'n_kv_head', 'vocab_size', 'tie_embeddings', 'norm_eps', 'head_dim', 'qkv_bias', 'rope_theta',
               'rope_factor', 'rope_low', 'rope_high', 'rope_original'}


def test_every_other_model_field_is_a_setting():
    settings = read_script(ROOT / 'train.py').settings
    fields = {field.name: field.default for field in dataclasses.fields(model.GPTConfig)}
    assert fields.keys() - settings.keys() == NO_SETTINGS
    assert [name for name in fields.keys() - NO_SETTINGS if settings[name].default != fields[name]] == []


def test_config_files_resolve_for_both_scripts():
    for file in {*(ROOT / 'config').iterdir()} - {ROOT / 'config/sweep_penalty.yaml'}:      # sweep.py's
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
    out = run('-c', WITHOUT_TORCH, *lines).stdout
    assert re.findall(r'\|(\w+)$', out, re.M) == ['False'] * len(lines)


# what a script raises or does: its exit code, how its stderr begins
ENDS = {
    'raise SettingError("so")': (2, 'error: so\n'),
    'raise DataError("so")': (1, 'error: so\n'),
    r'raise DataError("\x1b]0;owned\x07 b\nerror: c")': (1, r'error: \x1b]0;owned\x07 b\nerror: c'),
    'open("nowhere/x")': (1, 'error: nowhere/x: No such file or directory\n'),
    'open("/dev/full", "w").writelines("x" * 10**5)': (1, 'error: No space left on device\n'),
    'bytearray(10**18)': (3, 'error: out of memory (MemoryError): '),
    'import os; raise OSError(24, os.strerror(24))':
        (1, 'error: [Errno 24] Too many open files: raise the limits'),
    'import os; raise BlockingIOError(11, os.strerror(11))':
        (1, 'error: [Errno 11] Resource temporarily unavailable: raise the limits'),
    # a terminal's, which no limit has to do with
    'raise BlockingIOError(11, "write could not complete without blocking")':
        (1, 'error: write could not complete without blocking\n'),
    'raise RuntimeError("can\'t start new thread")': (1, "error: can't start new thread: raise the limits"),
    'raise RuntimeError("Failed to find C compiler.")': (1, 'error: torch.compile finds no compiler that'),
    'raise RuntimeError("InvalidCxxCompiler: none")': (1, 'error: torch.compile finds no compiler that'),
    'import subprocess; raise subprocess.CalledProcessError(1, ["/usr/bin/gcc", "-O3"])':
        (1, 'error: torch.compile finds no compiler that works (Command '),
    '__import__("os").environ["WORLD_SIZE"] = "two"; raise SettingError("so")': (2, 'error: so\n'),
    '__import__("signal").raise_signal(2)': (130, '\ninterrupted\n'),
    # a programmer's mistake keeps its traceback
    'raise OSError("so")': (1, 'Traceback'),
    'raise RuntimeError("so")': (1, 'Traceback'),
}


def ended(folder, line, **env):
    """Return (exit code, stderr) of a script that configures and then runs a line."""
    script = folder / 'ending.py'
    script.write_text('from configurator import DataError, SettingError, configure\n'
                      f'rate = 1.0\nconfig = configure(__file__)\n{line}\n')
    done = forked.finish([], *forked.start([str(script)], folder, environment(**env)), timeout=240)
    return done.returncode, done.stderr


def test_what_the_system_does_is_one_line(tmp_path):
    for line, (code, begins) in ENDS.items():
        found, said = ended(tmp_path, line)
        assert (line, found, said[:len(begins)]) == (line, code, begins)
        assert begins == 'Traceback' or said.strip().count('\n') == 0
    assert ended(tmp_path, 'raise DataError("so")', TRACEBACK='1')[1].startswith('Traceback')
    spins = 'raise DataError(__import__("os").environ["GOMP_SPINCOUNT"])'
    assert [ended(tmp_path, spins, **env)[1] for env in ({}, {'GOMP_SPINCOUNT': '7'})] == [
        'error: 10000\n', 'error: 7\n']


@pytest.mark.slow
def test_ctrl_c_in_the_first_imports_is_no_traceback(tmp_path):
    (tmp_path / 'decimal.py').write_text('raise KeyboardInterrupt')
    code = f'import sys; sys.path.insert(0, {str(tmp_path)!r}); import configurator'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (130, b'')


@pytest.mark.parametrize('encoding', ['ascii', 'utf-8'])
def test_what_a_terminal_cannot_show_is_escaped_and_what_cannot_be_read_replaced(encoding, monkeypatch):
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    monkeypatch.setattr(threading, 'excepthook', threading.excepthook)
    for name in 'stdout', 'stderr':
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding))
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'caf\x81\n'), encoding))
    configurator.one_line_errors()
    for stream in sys.stdout, sys.stderr:
        print('\u0416 caf\udce9', end='', file=stream, flush=True)
        shown = '\u0416' if encoding == 'utf-8' else '\\u0416'
        assert stream.buffer.getvalue().decode() == f'{shown} caf\\udce9'
    assert sys.stdin.readline() == 'caf\ufffd\n'
    assert printable('\u0416 caf\udce9') == '\u0416 caf\\udce9'     # a prompt that was typed


def test_a_strangers_name_prints_no_line_and_no_command_of_its_own(capsys):
    say('model     x\x1b]0;owned\x07\nerror: \x9b2J', 'a\n          b\tc\r')
    assert capsys.readouterr().out == (
        'model     x\\x1b]0;owned\\x07\\nerror: \\x9b2J\na\n          b\tc\\r\n')
    assert runlog.markdown([{'a': 'x\x1bc\n'}], heading=False) == '| x\\x1bc\\n |'


def test_a_closed_terminal_is_an_empty_one(monkeypatch):
    for name in 'stdin', 'stdout', 'stderr', '__stdin__', '__stdout__', '__stderr__':
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    monkeypatch.setattr(threading, 'excepthook', threading.excepthook)
    configurator.one_line_errors()
    sys.stdout.flush()
    assert not sys.__stderr__.isatty()
    assert not sys.stdin.read()


FULL = (    # a GPU's memory; torch's own error is another
    'CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call',
    'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`',
    'Triton Error [CUDA]: out of memory')
# a GPU's, by torch 2.11
OF_TORCH = (
    'CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.19 GiB of which '
    '16.29 MiB is free. Including non-PyTorch memory, this process has 79.17 GiB memory in use. Of the '
    'allocated memory 77.16 GiB is allocated by PyTorch, and 1.48 GiB is reserved by PyTorch but '
    'unallocated. If reserved but unallocated memory is large try setting '
    'PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation. See documentation for Memory '
    'Management (https://pytorch.org/docs)')


def test_errors_of_libraries_are_one_line():
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(10**15)
    of_torch = torch.OutOfMemoryError('no room'), refusal.value
    for error in (MemoryError('no room'), *of_torch, *map(RuntimeError, FULL)):
        line, code = error_line(error)
        assert ('\n' in line, code) == (False, 3)
        assert '): in training, halve --batch_size, ' in line
    line, _ = error_line(torch.OutOfMemoryError(OF_TORCH))
    assert 'this process has 79.17 GiB memory in use.): in training, ' in line
    line, _ = error_line(RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer'))
    assert line.startswith('the connection to another rank is lost')
    for error, code in ((fp8_linear.OptionError, 2), (fp8_linear.DeviceError, 1),
                        (configurator.MachineError, 1)):
        assert error_line(error('so')) == ('so', code)


@pytest.mark.parametrize('change, line', [
    ("sys.platform = 'win32'", 'error: Linux is wanted, and Windows has it as WSL'),
    ('sys.version_info = 3, 9', 'error: Python 3.10 or newer is wanted')])
def test_other_systems_are_refused_in_a_line(change, line):
    done = subprocess.run([sys.executable, '-c', f'import sys; {change}; import configurator'], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, '') and done.stderr.startswith(line)
    assert done.stderr.count('\n') == 1
