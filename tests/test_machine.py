"""What diagnose.py says of a machine: on a CPU, behind a pretended nvidia-smi, on pretended GPUs."""
import json
import re
import sys
import types

import pytest
import torch

from fp8gpt.fp8 import backends
from fp8gpt import fp8
from fp8gpt import machine
from conftest import run
from fp8gpt.fp8.linear import emulated_mm, scaled_mm

CPU = torch.device('cpu')
H100 = 'NVIDIA H100 80GB HBM3'
A100 = 'NVIDIA A100-SXM4-80GB'
EMULATED = 'no FP8 units here: training runs in bf16; --fp8_backend={} emulates FP8\'s numerics\n'


def smi(folder, name=H100, driver='550.54.15', cuda='12.4', capability='9.0'):
    """A PATH with an nvidia-smi that answers so; without a capability it does not know the question,
    without a name nothing."""
    answers = f'echo "{name}, {driver}, {capability}"' if capability else 'exit 2'
    (folder / 'nvidia-smi').write_text(f'''#!/bin/sh
{'' if name else 'exit 9'}
case "$*" in
*compute_cap*) {answers};;
*query*) echo "{name}, {driver}";;
*) echo "| Driver Version: {driver}   CUDA Version: {cuda} |";;
esac
''')
    (folder / 'nvidia-smi').chmod(0o755)
    return f'{folder}:/usr/bin:/bin'


@pytest.fixture
def gpu(monkeypatch):
    """Pretends to have a GPU: gpu(name, capability) -> its device. What only a real one can do is left
    out."""
    figures = {'bf16': 700, 'fp8': 1190, 'bf16_error': 0.003, 'fp8_error': 0.037}

    def gemm(device, shape, mm, calls):
        return {'shape': shape, **figures}

    def pretend(name, capability):
        major, minor = capability
        properties = types.SimpleNamespace(name=name, major=major, minor=minor, total_memory=80e9)
        answers = {
            'is_available': True,
            'device_count': 2,
            'get_device_properties': properties,
            'get_device_capability': capability,
            'get_device_name': name,
        }
        for function, value in answers.items():
            monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
        monkeypatch.setattr(torch.version, 'cuda', '13.0')
        monkeypatch.setattr(backends, 'trial', lambda *_: None)
        monkeypatch.setattr(machine, 'gemm', gemm)
        monkeypatch.setitem(sys.modules, 'transformer_engine', None)
        return torch.device('cuda')
    return pretend


@pytest.fixture
def beside(tmp_path, monkeypatch, capsys):
    """beside(name=..., ...) -> what diagnose.py prints on a CPU beside such an nvidia-smi."""
    def report(**answers):
        monkeypatch.setenv('PATH', smi(tmp_path, **answers))
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
        machine.report(CPU)
        return capsys.readouterr().out
    return report


def yes(result, backend):
    """The recipes that a backend runs."""
    cells = [cell.split() for cell, word in result['matrix'].items() if word == 'yes']
    return [recipe for name, recipe in cells if name == backend]


def test_on_a_cpu(tmp_path):
    env = {'CUDA_VISIBLE_DEVICES': '', 'PATH': smi(tmp_path, name='')}
    out = run('diagnose.py', f'--json={tmp_path}/out.json', env=env).stdout
    result = json.loads((tmp_path / 'out.json').read_text())
    assert not result['gpus']
    assert 'GPU       none that nvidia-smi or torch finds; CPU, ' in out
    assert f'torch     {torch.__version__}, built for' in out
    assert out.endswith('\n' + EMULATED.format('native'))
    for compiling in ('on', 'off'):
        assert f'auto      bf16 with compile={compiling} (there is no CUDA GPU' in out
        assert result['auto'][compiling]['backend'] == 'off'
    assert 'A CPU\'s FP8 is an emulation: it shows the numerics, not the speed' in out
    assert yes(result, 'emulate') == list(fp8.RECIPES)
    assert yes(result, 'native') == list(fp8.RECIPES)[:4 if torch.__version__ >= (2, 13) else 2]
    torchao = ['tensorwise', 'rowwise', 'rowwise_gw_hp'] if machine.version('torchao') else []
    assert yes(result, 'torchao') == torchao
    assert not yes(result, 'te')
    marks = {reason: mark for mark, reason in re.findall(r'(?m)^(\[\d+\]) (.*)', out)}
    assert len(marks) == len(re.findall(r'(?m)^\[', out))
    assert len(re.findall(r'(?m)^emulate|^native|^torchao|^te ', out)) == 4
    for backend in ('te', 'torchao', 'native', 'emulate'):
        cells = [result['matrix'][f'{backend} {recipe}'] for recipe in fp8.RECIPES]
        row = re.search(rf'(?m)^{backend} .*', out)[0]
        assert row.split()[1:] == ['yes' if cell == 'yes' else marks[cell] for cell in cells]


def test_a_cpu_build_of_torch_beside_an_nvidia_gpu(beside):
    if torch.version.cuda:
        pytest.skip('this torch is built with CUDA')
    out = beside()
    assert f'GPU 0     {H100}, sm_90, dense peaks in TFLOP/s: 989 bf16, 1979 FP8' in out
    assert 'driver    550.54.15, for CUDA up to 12.4' in out
    problem = f'to do     torch .* is built without CUDA, though nvidia-smi finds {H100}: '
    assert re.search(rf'{problem}.* && pip install "torch>=2.11"\n', out)
    assert 'pip install --no-build-isolation -r requirements-te.txt' in out
    assert 'there is a GPU with FP8 units, but torch does not reach it' in out.splitlines()[-1]


def test_an_old_nvidia_smi_and_a_gpu_without_fp8_units(beside):
    out = beside(name=A100, capability='')
    assert f'GPU 0     {A100}, sm_??, dense peaks in TFLOP/s: 312 bf16, no FP8' in out
    assert 'requirements-te' not in out
    assert out.splitlines()[-1].startswith('no FP8 units here')


def test_a_driver_too_old(tmp_path, monkeypatch, capsys):
    def init():
        raise RuntimeError('The NVIDIA driver on your system is too old (found version 12040).\nSee ...')
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setenv('PATH', smi(tmp_path))
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.cuda, 'init', init)
    line = machine.report(CPU)['to do'][0]
    assert line == (
        'torch is built for CUDA 13.0, but torch.cuda.is_available() is False: '
        'driver not found or too old. '
        'torch: The NVIDIA driver on your system is too old (found version 12040). '
        'Here: driver 550.54.15, for CUDA up to 12.4; CUDA 13.0 needs driver 580 or later')
    assert line in capsys.readouterr().out
    monkeypatch.setenv('PATH', str(tmp_path / 'nowhere'))
    nothing = machine.nvidia_smi()
    assert 'nvidia-smi does not answer' in machine.to_do(nothing, [], machine.matrix(CPU))[0]


@pytest.mark.slow
def test_without_torch(tmp_path):
    (tmp_path / 'torch.py').write_text('raise ImportError("No module named \'torch\'")')
    env = {'PYTHONPATH': str(tmp_path)}

    def on(path):
        return run('diagnose.py', env={**env, 'PATH': path}, fork=False).stdout
    out = on(smi(tmp_path, name=''))
    assert 'torch     does not load: No module named \'torch\'' in out
    assert 'pip install "torch>=2.11,<2.14" && pip install -r requirements.txt' in out
    assert 'pip install "torch>=2.11" &&' in on(smi(tmp_path))


def test_a_hopper_gpu(gpu, capsys):
    result = machine.report(gpu(H100, (9, 0)))
    out = capsys.readouterr().out
    assert f'GPU 1     {H100}, sm_90, 80 GB, dense peaks in TFLOP/s: 989 bf16, 1979 FP8' in out
    assert yes(result, 'native') == list(fp8.RECIPES)[:5]
    assert yes(result, 'emulate') == list(fp8.RECIPES)
    assert not yes(result, 'te')
    # once below the table, and as auto's reason without torch.compile
    assert out.count('Transformer Engine does not load (') == 2
    te = 'Transformer Engine (backend te): pip install --no-build-isolation -r requirements-te.txt'
    assert result['to do'][0] == te
    speed = 'TFLOP/s: 700 bf16, 1190 FP8, ratio 1.70; error against fp32: 3.70% FP8, 0.30% bf16'
    assert f'multiply  8192 x 4096 x 4096, {speed}\n' in out
    assert out.splitlines()[-1] == 'FP8 trains here: native (auto)'


def test_a_gpu_without_fp8_units(gpu, capsys):
    result = machine.report(gpu(A100, (8, 0)))
    assert not yes(result, 'native')
    assert not yes(result, 'torchao')
    assert yes(result, 'emulate') == list(fp8.RECIPES)
    assert 'requirements-te' not in str(result['to do'])
    out = capsys.readouterr().out
    assert 'This GPU\'s FP8 is an emulation' in out
    assert out.endswith('\n' + EMULATED.format('emulate'))


def test_the_multiplication():
    """Two operands of 31.5 dB each leave a product sqrt(2) 10^(-31.5 / 20) off; bf16's rounding is 2**-9."""
    for mm in (emulated_mm, scaled_mm):
        result = machine.gemm(CPU, (128, 256, 64), mm, 2)
        assert result['fp8_error'] == pytest.approx(2**0.5 * 10**(-31.5 / 20), rel=0.05)
        assert 2**-11 < result['bf16_error'] < 2**-8
        assert result['bf16'] > 0
        assert result['fp8'] > 0
