"""Scripts' settings are what the library has, and a script that fails ends in one line."""
import dataclasses
import io
import subprocess
import sys

import pytest
import torch

import configurator
import forked
import model
from configurator import error_line, printable, read_script, say
from conftest import ROOT, accepted, environment, losses, run
from fp8gpt import runlog
from fp8gpt.fp8 import linear as fp8_linear
from fp8gpt.fp8.backends import BACKENDS
from fp8gpt.fp8.linear import FORMATS, RECIPES
from fp8gpt.run import DTYPES


def test_choices_are_what_there_is():
    tables = {**model.CHOICES, 'dtype': DTYPES, 'fp8_backend': ['auto', 'auto:te', *BACKENDS, 'off'],
              'fp8_recipe': ['auto', 'auto:delayed', 'auto:mxfp8', *RECIPES],
              'fp8_format': ['auto', *FORMATS]}
    found = read_script(ROOT / 'train_fp8.py').settings
    assert {name: set(found[name].words) for name in tables} == {name: set(tables[name]) for name in tables}


# command lines of the scripts that argparse reads: what the one line says
BY_ARGPARSE = {
    'bench.py': 'required: command',
    'bench.py gemm config/gpt2_fp8.py': '`python bench.py pair` with the same flags times whole',
    'bench.py pair --steps=0': "--steps: wants a whole number >= 1, not '0'",
    'plan.py --resume=latest': 'in place of --resume, --init_from=that checkpoint',
    'plan.py --dtype=fp32': 'plan.py models bf16 and FP8, not dtype=fp32',
    'plan.py --gpu=v100': "no data sheet of 'v100' here",
    'plan.py --gpu=gh200': '--gpu is one of H200, H100 PCIe, H100 SXM, B200',
    'plan.py --gpus=8,64,512': "--gpus: wants a whole number >= 1, not '8,64,512'",
    'plan.py --network=12.5': 'leave --network out: 400 GB/s a node are assumed',
    'plot.py lr --batch_size=-1': "batch_size wants a whole number >= 0, <= 65_536, not '-1'",
    'plot.py loss a --out=loss.txt': '--out=loss.txt ends in none of .png, .pdf, .svg',
}


def test_argparse_refuses_in_one_line():
    assert accepted((2, message, line.split()) for line, message in BY_ARGPARSE.items()) == []


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


# what only a Hugging Face model says
NO_SETTINGS = {'n_kv_head', 'vocab_size', 'tie_embeddings', 'norm_eps', 'head_dim', 'qkv_bias', 'rope_theta',
               'rope_factor', 'rope_low', 'rope_high', 'rope_original'}


def test_every_other_model_field_is_a_setting():
    settings = read_script(ROOT / 'train.py').settings
    fields = {field.name: field.default for field in dataclasses.fields(model.GPTConfig)}
    assert fields.keys() - settings.keys() == NO_SETTINGS
    assert [name for name in fields.keys() - NO_SETTINGS if settings[name].default != fields[name]] == []


# what a script raises or does: its exit code, how its stderr begins
ENDS = {
    'raise SettingError("so")': (2, 'error: so\n'),
    'raise DataError("so")': (1, 'error: so\n'),
    r'raise DataError("\x1b]0;owned\x07 b\nerror: c")': (1, r'error: \x1b]0;owned\x07 b\nerror: c'),
    'open("nowhere/x")': (1, "error: [Errno 2] No such file or directory: 'nowhere/x'\n"),
    'open("/dev/full", "w").writelines("x" * 10**5)': (1, 'error: [Errno 28] No space left on device\n'),
    'bytearray(10**18)': (3, 'error: out of memory (MemoryError): '),
    'import no_such_package': (1, "error: No module named 'no_such_package': `. .venv/bin/activate`"),
    '__import__("os").environ["WORLD_SIZE"] = "two"; raise SettingError("so")': (2, 'error: so\n'),
    '__import__("signal").raise_signal(2)': (130, 'error: interrupted\n'),
    # a programmer's mistake keeps its traceback
    'raise OSError("so")': (1, 'Traceback'),
    'raise RuntimeError("so")': (1, 'Traceback'),
    'raise RuntimeError("Failed to find C compiler.")': (1, 'Traceback'),
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


@pytest.mark.parametrize('encoding', ['ascii', 'utf-8'])
def test_what_a_terminal_cannot_show_is_escaped(encoding, monkeypatch):
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)
    for name in 'stdout', 'stderr':
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding))
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'caf\x81\n'), encoding))
    configurator.one_line_errors()
    for stream in sys.stdout, sys.stderr:
        print('\u0416 caf\udce9', end='', file=stream, flush=True)
        shown = '\u0416' if encoding == 'utf-8' else '\\u0416'
        assert stream.buffer.getvalue().decode() == f'{shown} caf\\udce9'
    assert sys.stdin.readline() == 'caf\\x81\n'


def test_a_strangers_name_prints_no_line_and_no_command_of_its_own(capsys):
    say('model     x\x1b]0;owned\x07\nerror: \x9b2J', 'a\n          b\tc\r\n d')
    assert capsys.readouterr().out == (
        'model     x\\x1b]0;owned\\x07\\nerror: \\x9b2J\na\n          b\tc\\r\\n d\n')
    assert runlog.markdown([{'a': 'x\x1bc\n'}], heading=False) == '| x\\x1bc\\n |'
    assert printable('\u0416\n\x07 caf\udce9', keep=r'\n') == '\u0416\n\\x07 caf\\udce9'     # a sample


def test_what_is_printed_to_a_closed_stream_goes_into_no_file(tmp_path):
    code = ("import sys, configurator; configurator.one_line_errors(); file = open('a', 'w')\n"
            "print('out', flush=True); print('err', file=sys.stderr, flush=True)\n"
            "file.write(repr(sys.stdin.read())); file.close()")
    for closed, kept in ('0<&-', 'out\nerr\n'), ('1>&-', 'err\n'), ('2>&-', 'out\n'), ('0<&- 1>&- 2>&-', ''):
        command = f'PYTHONPATH={ROOT} {sys.executable} -c "{code}" {closed}'
        done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              cwd=tmp_path)
        assert (done.returncode, done.stdout + done.stderr) == (0, kept)
        assert (tmp_path / 'a').read_text() == "''"


FULL = (    # a GPU's memory; torch's own error is another
    'CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call',
    'CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`',
    'Triton Error [CUDA]: out of memory')
def test_errors_of_libraries_are_one_line():
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(10**15)
    of_torch = torch.OutOfMemoryError('no room'), refusal.value
    for error in (MemoryError('no room'), *of_torch, *map(RuntimeError, FULL)):
        line, code = error_line(error)
        assert ('\n' in line, code) == (False, 3)
        assert '): in training, halve --batch_size, ' in line
    line, _ = error_line(RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer'))
    assert line.startswith('the connection to another rank is lost')
    for error, code in ((fp8_linear.OptionError, 2), (fp8_linear.DeviceError, 1),
                        (configurator.MachineError, 1)):
        assert error_line(error('so')) == ('so', code)
