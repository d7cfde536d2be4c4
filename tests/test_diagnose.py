"""diagnose.py on a small checkpoint, next to a made-up nvidia-smi and on made-up GPUs."""
import math
import re
import sys
import types

import pytest
import torch

import diagnose
from conftest import refused, run
from fp8gpt import fp8
from fp8gpt.fp8 import backends, health
from fp8gpt.gpus import assembler_lines

CPU = torch.device('cpu')


def test_which_layers_of_a_checkpoint_fp8_covers(one_run, tmp_path):
    path = one_run('train_fp8.py', '--fp8_backend=native')[0] / 'latest.pt'
    share = 2 * 12 * 64 * 64 / (2 * 12 * 64 * 64 + 64 * 320)    # the head is on 257 ids, padded to 320
    out = run('diagnose.py', f'--ckpt={path}').stdout
    assert out.startswith(f'# {path}: step 10, trained in fp8\nFP8 Training Enabled: 8 of 9 linears, ')
    assert f"; {share:.0%} of the linears' FLOPs; emulate: which runs anywhere\n" in out
    assert '\n          bf16: lm_head: ' in out
    out = run('diagnose.py', f'--ckpt={path}', '--fp8_keep=h.0', '--fp8_recipe=rowwise').stdout
    assert "now 'h.0'\nFP8 Training Enabled: 4 of 9 linears, rowwise" in out
    (tmp_path / 'damaged.pt').write_bytes(path.read_bytes()[:9999])
    code, said = refused('diagnose.py', f'--ckpt={tmp_path}/damaged.pt')
    assert code == 1 and 'damaged.pt is damaged' in said
    code, said = refused('diagnose.py', f'--ckpt={path}', '--fp8_keep=nonsense')
    assert code == 2 and 'no linear is called' in said


def test_one_figure_decides():
    fine = {'dtype': torch.float8_e4m3fn, 'saturated': 0.0, 'flushed': 0.0, 'sqnr_db': 31.0}
    for off, rows in (
            (False, [{}, {'sqnr_db': 21.6}, {'sqnr_db': 21.4, 'dtype': torch.float8_e5m2}, {'flushed': 0.09},
                     {'saturated': 0.009}, {'sqnr_db': math.inf}]),
            (True, [{'sqnr_db': 21.4}, {'flushed': 0.11}, {'saturated': 0.02}, {'sqnr_db': math.nan}])):
        wrong = [figures for figures in rows if (health.badness({**fine, **figures}) > 1) != off]
        assert wrong == []


def test_what_makes_wrong_code_and_what_to_do(monkeypatch):
    compiler = pytest.importorskip('triton.backends.nvidia.compiler')
    wrong = 'which may miscompile FP8 casts:\n          '
    for capability, below_90, others, end in (
            ((9, 0), '12.8', '12.8', f'this GPU\'s code by ptxas 12.8, {wrong}pip install "torch==2.15.*"'),
            ((8, 9), '12.9', '13.4', f'ptxas 12.9, {wrong}export TRITON_PTXAS_PATH=/ptxas90'),    # torch 2.15
            ((9, 0), '12.9', '13.4', "this GPU's code by ptxas 13.4")):
        made = {arch: types.SimpleNamespace(version=below_90 if arch < 90 else others, path=f'/ptxas{arch}')
                for arch in (89, 90)}
        monkeypatch.setattr(compiler, 'get_ptxas', made.get)
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device, sm=capability: sm)
        [line] = assembler_lines(torch.device('cuda'))
        assert line.endswith(end)
    monkeypatch.setitem(sys.modules, 'triton', None)
    assert assembler_lines(CPU) == []


H100, A100 = 'NVIDIA H100 80GB HBM3', 'NVIDIA A100-SXM4-80GB'


def test_on_a_cpu(tmp_path):
    out = run('diagnose.py', env={'CUDA_VISIBLE_DEVICES': '', 'PATH': str(tmp_path)}).stdout
    assert 'device    CPU, ' in out and f'torch {torch.__version__}' in out
    assert 'driver    nvidia-smi does not answer' in out
    assert re.search(r"\nassembler Triton \S+ makes an H100's code by ptxas 1\d\.\d", out)
    assert out.startswith('auto      bf16 (there is no CUDA GPU')
    assert 'to do' not in out
    assert f'\nemulate   {", ".join(fp8.RECIPES)}\n' in out and '\nnative    tensorwise, delayed, ' in out
    assert re.search(r'(?m)^te +no recipe\n +not tensorwise, .*:\n +te does not take device=cpu, only ', out)
    assert max(map(len, out.splitlines())) <= 100
    assert out.splitlines()[-1].startswith('no FP8 units here: auto trains in bf16')


def test_a_gpu_that_torch_does_not_reach(tmp_path, monkeypatch, capsys):
    def init():
        raise RuntimeError('The NVIDIA driver on your system is too old (found version 12040).\nSee ...')
    (tmp_path / 'nvidia-smi').write_text(f'#!/bin/sh\necho "{H100}, 550.54.15, 9.0"\n')
    (tmp_path / 'nvidia-smi').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.cuda, 'init', init)
    diagnose.report_machine(CPU, 8192)
    out = capsys.readouterr().out
    assert f'driver    {H100}, 550.54.15, 9.0\n' in out
    assert f'to do     torch {torch.__version__} reaches no GPU: The NVIDIA driver on your system' in out


def test_gpus_with_and_without_fp8_units(monkeypatch, capsys):
    monkeypatch.setattr(backends, 'trial', lambda *_: None)
    monkeypatch.setitem(sys.modules, 'transformer_engine', None)
    for name, capability, lines in (
            (H100, (9, 0), ['peak 989 TFLOP/s in bf16, 1,979 in fp8\n', '\nte        no recipe\n',
                            f'\nnative    {", ".join(list(fp8.RECIPES)[:5])}\n', 'auto      native (',
                            'pip install --no-build-isolation -r requirements-te.txt', '\nwhat FP8 gains']),
            (A100, (8, 0), [f'\n{name:<10}no recipe\n' for name in ('native', 'te', 'torchao')]
             + ['\nemulate   tensorwise', '\nno FP8 units here'])):
        answers = {'is_available': True, 'get_device_capability': capability, 'get_device_name': name}
        for function, value in answers.items():
            monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
        diagnose.report_machine(torch.device('cuda'), 8192)
        out = capsys.readouterr().out
        assert [line for line in lines if line not in out] == [], out
