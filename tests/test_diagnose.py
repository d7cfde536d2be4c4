"""diagnose.py on small checkpoints, on a CPU, next to a made-up nvidia-smi and on made-up GPUs."""
import math
import re
import sys

import pytest
import torch

from fp8gpt import data
import diagnose
from fp8gpt import fp8
from fp8gpt.fp8 import health
from configurator import UserError, configure
from conftest import run
from model import GPT, GPTConfig
from fp8gpt.fp8 import backends

CPU = torch.device('cpu')
KINDS = ('attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down')
LAYERS = [f'h.{i}.{kind}' for i in range(2) for kind in KINDS]


@pytest.fixture(scope='module')
def tiny_checkpoint(one_run):
    """Path of a checkpoint after ten steps in FP8."""
    return one_run('train_fp8.py', '--fp8_backend=native')[0] / 'latest.pt'


def looked_at(path, *words):
    """Return what diagnose.py --ckpt=path finds, without a process of its own."""
    return diagnose.report_checkpoint(configure(diagnose.__file__, [f'--ckpt={path}', *words]), CPU)


def edited(path, tmp_path, edit):
    """Path of a copy whose state `edit` has changed."""
    state = torch.load(path, weights_only=True)
    with torch.no_grad():
        edit(state)
    torch.save(state, tmp_path / 'edited.pt')
    return tmp_path / 'edited.pt'


def test_a_healthy_checkpoint_as_a_script(tiny_checkpoint):
    out = run('diagnose.py', f'--ckpt={tiny_checkpoint}', '--device=cpu').stdout
    assert '8 of 9 linears, tensorwise (emulate)' in out
    assert 'in emulate, tensorwise, hybrid' in out
    assert 'these are the worst of 24 casts' in out
    assert 'healthy: none of 24 casts is bad' in out.splitlines()[-1]


def test_figures_and_losses_are_those_of_the_weights(tiny_checkpoint, tiny_data):
    result = looked_at(tiny_checkpoint)
    found = {(row['layer'], row['tensor']) for row in result['rows']}
    assert found == {(layer, tensor) for layer in LAYERS for tensor in ('input', 'weight', 'grad')}
    state = torch.load(tiny_checkpoint, weights_only=True)
    for row in result['rows']:
        is_grad = row['tensor'] == 'grad'
        assert row['format'] == ('e5m2' if is_grad else 'e4m3')
        assert (20 if is_grad else 28) < row['sqnr_db'] < 40
        if row['tensor'] == 'weight':
            amax = state['weights'][f'{row["layer"]}.weight'].abs().max().item()
            assert (row['amax'], row['scale']) == pytest.approx((amax, 448 / amax))
    model = GPT(GPTConfig(**state['model_config']))
    model.load_weights(state['weights'])
    windows = data.TokenData(str(tiny_data), 'val', 64)
    with torch.no_grad():
        losses = [model(x, y).item() for x, y, _ in data.eval_batches(windows, 4 * 4 * 64, 4)]
    assert len(losses) == 4
    blocks, head = 2 * 12 * 64 * 64, 64 * 320    # the head is on 257 ids, padded to 320
    assert result['covered'] == pytest.approx(blocks / (blocks + head))
    assert result['loss']['bf16'] == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert 0 < abs(result['loss']['fp8'] / result['loss']['bf16'] - 1) < 0.01


def test_flags_win(tiny_checkpoint, capsys):
    how = ['--fp8_recipe=rowwise', '--fp8_keep=h.0', '--fp8_backend=native']
    result = looked_at(tiny_checkpoint, *how, '--batches=1', '--batch_size=2', '--dataset=nowhere')
    out = capsys.readouterr().out
    for line in ('here in native, rowwise, e4m3', "fp8_keep: '' in the checkpoint, now 'h.0'",
                 'random tokens, so the losses say little: no shards in data/nowhere-byte'):
        assert line in out
    assert {row['format'] for row in result['rows']} == {'e4m3'}
    assert len(result['rows']) == 12


def test_an_outlier_is_named_and_the_advice_heals(tiny_checkpoint, tmp_path, capsys):
    """One weight of h.1.mlp.up is 100,000 standard deviations: others become zero, though the noise ratio
    of the whole looks fine."""
    def edit(state):
        weight = state['weights']['h.1.mlp.up.weight']
        weight[7, 5] = 1e5 * weight.std()
    path = edited(tiny_checkpoint, tmp_path, edit)
    worst = looked_at(path)['rows'][0]
    out = capsys.readouterr().out
    assert (worst['layer'], worst['tensor'], worst['verdict']) == ('h.1.mlp.up', 'weight', 'bad')
    assert worst['sqnr_db'] > 31.5
    assert 0.1 < worst['flushed'] < 0.3
    assert re.search(r'(?m)^\| layer .*\n.*\n\| h\.1\.mlp\.up \| weight \|', out)
    assert f'to keep those layers in bf16: python train_fp8.py --resume={path} --fp8_keep=' in out
    by_row = looked_at(path, '--fp8_recipe=rowwise', '--batches=1')
    assert 'healthy: none of' in by_row['advice']
    flag = re.search(r'--fp8_keep=\S+', out)[0]
    assert 'h.1.mlp.up' in flag
    assert looked_at(path, flag, '--batches=1')['advice'].endswith('casts is bad')


# ------------------------------------------------------------------------------ the verdict

def test_one_figure_decides():
    fine = {'format': 'e4m3', 'amax': 1.0, 'saturated': 0.0, 'flushed': 0.0, 'sqnr_db': 31.0}
    for figures, verdict in (
            ({}, 'fine'),
            ({'sqnr_db': 21.6}, 'fine'),
            ({'sqnr_db': 21.4}, 'bad'),
            ({'sqnr_db': 21.4, 'format': 'e5m2'}, 'fine'),
            ({'flushed': 0.09}, 'fine'),
            ({'flushed': 0.11}, 'bad'),
            ({'saturated': 0.009}, 'fine'),
            ({'saturated': 0.02}, 'bad'),
            ({'amax': math.inf}, 'bad'),
            ({'amax': 0.0, 'sqnr_db': math.inf}, 'fine'),
            ({'sqnr_db': math.nan}, 'bad')):
        assert health.judge({**fine, **figures})['verdict'] == verdict, figures


# ------------------------------------------------------------------------------ the machine

H100, A100 = 'NVIDIA H100 80GB HBM3', 'NVIDIA A100-SXM4-80GB'


def test_on_a_cpu(tmp_path):
    out = run('diagnose.py', env={'CUDA_VISIBLE_DEVICES': '', 'PATH': str(tmp_path)}).stdout
    assert 'device    CPU, ' in out and f'torch {torch.__version__}' in out
    assert 'driver    nvidia-smi does not answer' in out
    assert 'auto      bf16 (there is no CUDA GPU' in out
    assert 'to do' not in out
    assert f'\nemulate   {", ".join(fp8.RECIPES)}\n' in out and '\nnative    tensorwise, delayed, ' in out
    assert re.search(r'(?m)^te +no recipe\n +not tensorwise, .*: Transformer Engine needs a CUDA GPU', out)
    assert out.splitlines()[-1].startswith('no FP8 units here: training runs in bf16')


def test_a_gpu_that_torch_does_not_reach(tmp_path, monkeypatch, capsys):
    def init():
        raise RuntimeError('The NVIDIA driver on your system is too old (found version 12040).\nSee ...')
    (tmp_path / 'nvidia-smi').write_text(f'#!/bin/sh\necho "{H100}, 550.54.15, 9.0"\n')
    (tmp_path / 'nvidia-smi').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.cuda, 'init', init)
    diagnose.report_machine(CPU)
    out = capsys.readouterr().out
    assert f'driver    {H100}, 550.54.15, 9.0\n' in out
    assert f'to do     torch {torch.__version__} reaches no GPU: The NVIDIA driver on your system' in out


@pytest.mark.slow
def test_without_torch(tmp_path):
    (tmp_path / 'torch.py').write_text('raise ImportError("No module named \'torch\'")')
    done = run('diagnose.py', rc=1, env={'PYTHONPATH': str(tmp_path)}, fork=False)
    assert "torch does not load: No module named 'torch': make install" in done.stderr


@pytest.mark.parametrize('name, capability', [(H100, (9, 0)), (A100, (8, 0))])
def test_gpus_with_and_without_fp8_units(name, capability, monkeypatch, capsys):
    """What only a real one can do is left out."""
    answers = {'is_available': True, 'get_device_capability': capability, 'get_device_name': name}
    for function, value in answers.items():
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
    monkeypatch.setattr(backends, 'trial', lambda *_: None)
    monkeypatch.setitem(sys.modules, 'transformer_engine', None)
    diagnose.report_machine(torch.device('cuda'))
    out = capsys.readouterr().out
    if name == H100:
        assert 'peak 989 TFLOP/s in bf16, 1,979 in fp8' in out
        assert f'\nnative    {", ".join(list(fp8.RECIPES)[:5])}\n' in out
        assert '\nte        no recipe\n' in out
        assert 'auto      native (' in out
        assert 'pip install --no-build-isolation -r requirements-te.txt' in out
    else:
        assert re.findall(r'(?m)^(\w+) +no recipe$', out) == ['native', 'te', 'torchao']
        assert out.splitlines()[-1].startswith('no FP8 units here')


# ------------------------------------------------------------------------------ refusals

def test_refusals(tiny_checkpoint, tmp_path):
    whole = tiny_checkpoint.read_bytes()
    (tmp_path / 'damaged.pt').write_bytes(whole[:len(whole) // 2])
    for path, words, message, code in (
            (tmp_path / 'damaged.pt', [], 'damaged.pt is damaged', 1),
            (tiny_checkpoint, ['--fp8_backend=te'], 'Transformer Engine needs a CUDA GPU', 1),
            (tiny_checkpoint, ['--fp8_backend=off'], 'one of native, te, torchao, emulate, not', 2),
            (tiny_checkpoint, ['--fp8_keep=nonsense'], 'no linear is called', 2)):
        with pytest.raises((UserError, fp8.OptionError, fp8.DeviceError), match=message) as refusal:
            looked_at(path, *words)
        assert refusal.value.exit_code == code, message
