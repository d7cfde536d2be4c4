"""diagnose.py as users run it: on a CPU, behind a pretended nvidia-smi, on pretended GPUs, and on small checkpoints."""
import json
import math
import re
import sys
import types

import pytest
import torch

import data
import diagnose
import fp8
import measure
from configurator import configure
from conftest import run
from model import GPT, GPTConfig
from quantize import casts, emulated_mm, scaled_mm

CPU = torch.device('cpu')


def smi(folder, name='NVIDIA H100 80GB HBM3', driver='550.54.15', cuda='12.4', capability='9.0'):
    """A PATH with an nvidia-smi that answers so; without a capability it does not know the question, without a name nothing."""
    (folder / 'nvidia-smi').write_text(f'''#!/bin/sh
{'' if name else 'exit 9'}
case "$*" in
*compute_cap*) {f'echo "{name}, {driver}, {capability}"' if capability else 'exit 2'};;
*query*) echo "{name}, {driver}";;
*) echo "| Driver Version: {driver}   CUDA Version: {cuda} |";;
esac
''')
    (folder / 'nvidia-smi').chmod(0o755)
    return f'{folder}:/usr/bin:/bin'


@pytest.fixture
def gpu(monkeypatch):
    """Pretends to have a GPU: gpu(name, capability) -> its device. What only a real one can do is left out."""
    def pretend(name, capability):
        properties = types.SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=80e9)
        for function, value in (('is_available', True), ('device_count', 2), ('get_device_properties', properties),
                                ('get_device_capability', capability), ('get_device_name', name)):
            monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)
        monkeypatch.setattr(torch.version, 'cuda', '13.0')
        monkeypatch.setattr(fp8, '_trial', lambda *_: None)
        figures = {'bf16': 700, 'fp8': 1190, 'bf16_error': 0.003, 'fp8_error': 0.037}
        monkeypatch.setattr(diagnose, 'gemm', lambda device, *shape: {'shape': shape[:3], **figures})
        monkeypatch.setitem(sys.modules, 'transformer_engine', None)
        return torch.device('cuda')
    return pretend


def yes(result, backend):
    return [cell.split()[1] for cell, word in result['matrix'].items() if cell.startswith(backend) and word == 'yes']


# ----------------------------------------------------------------------------------------------- the machine

def test_on_a_cpu(tmp_path):
    out = run('diagnose.py', f'--json={tmp_path}/out.json', env={'CUDA_VISIBLE_DEVICES': '', 'PATH': smi(tmp_path, name='')}).stdout
    result = json.loads((tmp_path / 'out.json').read_text())
    assert not result['gpus'] and 'GPU       none that nvidia-smi or torch finds; CPU, ' in out and f'torch     {torch.__version__}, built for' in out
    assert out.endswith('\nno FP8 units here: training runs in bf16; --fp8_backend=native emulates FP8\'s numerics\n')
    for compiling in ('on', 'off'):
        assert f'auto      bf16 with compile={compiling} (there is no CUDA GPU' in out and result['auto'][compiling]['backend'] == 'off'
    assert 'A CPU\'s FP8 is an emulation: it shows the numerics, not the speed' in out
    torchao = ['tensorwise', 'rowwise', 'rowwise_gw_hp'] if diagnose.version('torchao') else []
    assert yes(result, 'emulate') == list(fp8.RECIPES) and yes(result, 'native') == list(fp8.RECIPES[:4 if torch.__version__ >= (2, 13) else 2]) and yes(result, 'torchao') == torchao
    assert not yes(result, 'te')
    marks = {reason: mark for mark, reason in re.findall(r'(?m)^(\[\d+\]) (.*)', out)}
    assert len(marks) == len(re.findall(r'(?m)^\[', out)) and len(re.findall(r'(?m)^emulate|^native|^torchao|^te ', out)) == 4
    for backend in ('te', 'torchao', 'native', 'emulate'):
        cells = [result['matrix'][f'{backend} {recipe}'] for recipe in fp8.RECIPES]
        assert re.search(rf'(?m)^{backend} .*', out)[0].split()[1:] == ['yes' if cell == 'yes' else marks[cell] for cell in cells]


def test_a_cpu_build_of_torch_beside_an_nvidia_gpu(tmp_path):
    if torch.version.cuda:
        pytest.skip('this torch is built with CUDA')
    out = run('diagnose.py', env={'PATH': smi(tmp_path)}).stdout
    assert 'GPU 0     NVIDIA H100 80GB HBM3, sm_90, dense peaks in TFLOP/s: 989 bf16, 1979 FP8' in out and 'driver    550.54.15, for CUDA up to 12.4' in out
    assert re.search(r'to do     torch .* is built without CUDA, though nvidia-smi finds NVIDIA H100 80GB HBM3: .* && pip install "torch>=2.11"\n', out)
    assert 'pip install --no-build-isolation -r requirements-te.txt' in out and 'there is a GPU with FP8 units, but torch does not reach it' in out.splitlines()[-1]


def test_an_old_nvidia_smi_and_a_gpu_without_fp8_units(tmp_path):
    out = run('diagnose.py', env={'PATH': smi(tmp_path, 'NVIDIA A100-SXM4-80GB', capability='')}).stdout
    assert 'GPU 0     NVIDIA A100-SXM4-80GB, sm_??, dense peaks in TFLOP/s: 312 bf16, no FP8' in out and 'requirements-te' not in out
    assert out.splitlines()[-1].startswith('no FP8 units here')


def test_a_driver_too_old(tmp_path, monkeypatch, capsys):
    def init():
        raise RuntimeError('The NVIDIA driver on your system is too old (found version 12040).\nSee ...')
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setenv('PATH', smi(tmp_path))
    monkeypatch.setattr(torch.version, 'cuda', '13.0')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setattr(torch.cuda, 'init', init)
    line = diagnose.machine(CPU)['to do'][0]
    assert line == ('torch is built for CUDA 13.0, but torch.cuda.is_available() is False: driver not found or too old. torch: The NVIDIA driver on your '
                    'system is too old (found version 12040). Here: driver 550.54.15, for CUDA up to 12.4; CUDA 13.0 needs driver 580 or later')
    assert line in capsys.readouterr().out
    monkeypatch.setenv('PATH', str(tmp_path / 'nowhere'))
    assert 'nvidia-smi does not answer' in diagnose.to_do(diagnose.nvidia_smi(), [], diagnose.matrix(CPU))[0]


def test_without_torch(tmp_path):
    (tmp_path / 'torch.py').write_text('raise ImportError("No module named \'torch\'")')
    env = {'PYTHONPATH': str(tmp_path)}
    out = run('diagnose.py', env={**env, 'PATH': smi(tmp_path, name='')}).stdout
    assert 'torch     does not load: No module named \'torch\'' in out and 'pip install "torch>=2.11,<2.14" && pip install -r requirements.txt' in out
    assert 'pip install "torch>=2.11" &&' in run('diagnose.py', env={**env, 'PATH': smi(tmp_path)}).stdout


def test_a_hopper_gpu(gpu, capsys):
    result = diagnose.machine(gpu('NVIDIA H100 80GB HBM3', (9, 0)))
    out = capsys.readouterr().out
    assert 'GPU 1     NVIDIA H100 80GB HBM3, sm_90, 80 GB, dense peaks in TFLOP/s: 989 bf16, 1979 FP8' in out
    assert yes(result, 'native') == list(fp8.RECIPES[:5]) and yes(result, 'emulate') == list(fp8.RECIPES) and not yes(result, 'te')
    assert out.count('Transformer Engine does not load (') == 2  # once below the table, and as auto's reason without torch.compile
    assert result['to do'][0] == 'Transformer Engine (backend te): pip install --no-build-isolation -r requirements-te.txt'
    assert 'multiply  8192 x 4096 x 4096, TFLOP/s: 700 bf16, 1190 FP8, ratio 1.70; error against fp32: 3.70% FP8, 0.30% bf16\n' in out
    assert out.splitlines()[-1] == 'FP8 trains here: native (auto: torch.compile fuses its casts)'


def test_a_gpu_without_fp8_units(gpu, capsys):
    result = diagnose.machine(gpu('NVIDIA A100-SXM4-80GB', (8, 0)))
    assert not yes(result, 'native') and not yes(result, 'torchao') and yes(result, 'emulate') == list(fp8.RECIPES)
    assert 'requirements-te' not in str(result['to do'])
    out = capsys.readouterr().out
    assert 'This GPU\'s FP8 is an emulation' in out and out.endswith('\nno FP8 units here: training runs in bf16; --fp8_backend=emulate emulates FP8\'s numerics\n')


@pytest.mark.parametrize('mm', [emulated_mm, scaled_mm])
def test_the_multiplication(mm):
    """Two operands of 31.5 dB each leave a product sqrt(2) 10^(-31.5 / 20) off."""
    result = diagnose.gemm(CPU, 128, 256, 64, mm, 2)
    assert result['fp8_error'] == pytest.approx(2**0.5 * 10**(-31.5 / 20), rel=0.05) and 1e-3 < result['bf16_error'] < 5e-3
    assert result['bf16'] > 0 and result['fp8'] > 0


# ----------------------------------------------------------------------------------------------- a checkpoint

@pytest.fixture(scope='module')
def tiny_checkpoint(tiny, tmp_path_factory):
    """Path of a checkpoint after ten steps in FP8."""
    folder = tmp_path_factory.mktemp('tiny')
    run('train_fp8.py', *tiny, '--device=cpu', '--fp8_backend=native', f'--checkpoint_dir={folder}')
    return folder / 'latest.pt'


def diagnosed(path, *words):
    """(stdout, the JSON) of diagnose.py --ckpt=path."""
    out = run('diagnose.py', f'--ckpt={path}', '--device=cpu', *words, f'--json={path}.json').stdout
    with open(f'{path}.json') as file:
        return out, json.load(file, parse_constant=pytest.fail)


def looked_at(path, *words):
    """diagnosed's JSON, without a process of its own."""
    config = configure(diagnose.__file__, list(words))
    return diagnose.strict(diagnose.report(str(path), config, CPU, config['batches'], config['all']))


def edited(path, tmp_path, edit):
    """Path of a copy whose state `edit` has changed."""
    state = torch.load(path, weights_only=True)
    with torch.no_grad():
        edit(state)
    torch.save(state, tmp_path / 'edited.pt')
    return tmp_path / 'edited.pt'


def test_a_healthy_checkpoint(tiny_checkpoint, tiny_data):
    out, result = diagnosed(tiny_checkpoint)
    share = 2 * 12 * 64 * 64 / (2 * 12 * 64 * 64 + 64 * 320)  # two blocks; the head on 257 ids, padded to 320
    assert f'FP8 covers 8 of 9 linears, {share:.1%} of the linears\' FLOPs' in out and result['covered'] == pytest.approx(share)
    assert re.search(r'lm_head +1 x \(64 -> 320\), 17.2% of the FLOPs, bf16: the output head', out) and 'in native, tensorwise, hybrid' in out
    names = [f'h.{i}.{name}' for i in range(2) for name in ('attn.qkv', 'attn.proj', 'mlp.up', 'mlp.down')]
    assert {(row['layer'], row['tensor']) for row in result['rows']} == {(name, tensor) for name in names for tensor in ('input', 'weight', 'grad')}
    assert len(result['rows']) == 24 and '... and 14 better ones: --all' in out and 'healthy: none of 24 casts is bad' in out.splitlines()[-1]
    state = torch.load(tiny_checkpoint, weights_only=True)
    for row in result['rows']:
        assert row['format'] == ('e5m2' if row['tensor'] == 'grad' else 'e4m3') and (20 if row['tensor'] == 'grad' else 28) < row['sqnr_db'] < 40
        if row['tensor'] == 'weight':
            amax = state['weights'][f'{row["layer"]}.weight'].abs().max().item()
            assert row['amax'] == pytest.approx(amax) and row['scale'] == pytest.approx(448 / amax)
    model = GPT(GPTConfig(**state['model_config']))
    model.load_weights(state['weights'])
    with torch.no_grad():
        losses = [model(x, y).item() for x, y in data.eval_batches(data.TokenData(str(tiny_data), 'val', 64), 4 * 4 * 64, 4)]
    assert result['loss']['bf16'] == pytest.approx(sum(losses) / 4, rel=1e-6) and len(losses) == 4
    assert 0 < abs(result['loss']['fp8'] / result['loss']['bf16'] - 1) < 0.01


def test_flags_win(tiny_checkpoint):
    out, result = diagnosed(tiny_checkpoint, '--fp8_recipe=rowwise', '--fp8_keep=h.0', '--fp8_backend=emulate', '--batches=1', '--batch_size=2',
                            '--dataset=nowhere', '--all')
    assert 'here in emulate, rowwise, e4m3' in out and 'fp8_keep: \'\' in the checkpoint, now \'h.0\'' in out and 'FP8 covers 4 of 9 linears' in out
    assert 'random tokens, so the losses say little: no shards in data/nowhere-byte' in out and 'mean loss of 1 batches' in out
    assert {row['format'] for row in result['rows']} == {'e4m3'} and len(result['rows']) == 12 == len(re.findall(r'(?m)^h\.1\..* dB', out))


def test_a_bf16_run_and_one_of_another_machine_are_emulated(tiny, tiny_checkpoint, tmp_path, capsys):
    run('train.py', *tiny, '--device=cpu', f'--checkpoint_dir={tmp_path}')
    result = looked_at(tmp_path / 'latest.pt')
    assert 'trained in bf16: this is what FP8 would do to it' in capsys.readouterr().out and result['choice']['backend'] == 'emulate' and len(result['rows']) == 24
    result = looked_at(edited(tiny_checkpoint, tmp_path, lambda state: state['precision'].update(reason='te: auto: without torch.compile')))
    assert 'emulate stands in for what trained it: fp8_backend=te: Transformer Engine needs a CUDA GPU' in capsys.readouterr().out
    assert result['choice']['backend'] == 'emulate'


@pytest.mark.parametrize('size, verdict', [(1e5, 'bad'), (1e4, 'watch')])
def test_an_outlier_is_named_and_the_advice_heals(tiny_checkpoint, tmp_path, size, verdict):
    """One weight of h.1.mlp.up is `size` standard deviations: others become zero, though the noise ratio of the whole looks fine."""
    def edit(state):
        weight = state['weights']['h.1.mlp.up.weight']
        weight[7, 5] = size * weight.std()
    path = edited(tiny_checkpoint, tmp_path, edit)
    out, result = diagnosed(path)
    worst = result['rows'][0]
    assert (worst['layer'], worst['tensor'], worst['verdict']) == ('h.1.mlp.up', 'weight', verdict) and worst['sqnr_db'] > 31.5
    assert 1e-6 < worst['flushed'] / size < 3e-6 and re.search(r'^h\.1\.mlp\.up +weight', out.split('SQNR\n')[1])
    if verdict == 'bad':
        assert 'casts are bad, h.1.mlp.up (weight) most' in out and 'in bf16: python train_fp8.py --resume=' in out
        assert f'with a scale per row, none would be bad (one batch): python train_fp8.py --resume={path} --fp8_recipe=rowwise' in out
        assert 'healthy: none of' in looked_at(path, '--fp8_recipe=rowwise', '--batches=1')['advice'][0]
    flag = re.search(r'--fp8_keep=\S+', out)[0]
    assert 'h.1.mlp.up' in flag and looked_at(path, flag, '--batches=1')['advice'][0].endswith('casts is bad, none to watch')


def test_whole_kinds_and_what_is_kept_already():
    config = GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=32)
    choice = fp8.Choice('emulate', '', keep=('h.1.attn.qkv',))
    assert diagnose.keep_flag(choice, {'h.0.mlp.down', 'h.1.mlp.down', 'h.0.attn.proj'}, config) == '--fp8_keep=h.1.attn.qkv,h.0.attn.proj,mlp.down'


def test_weights_that_are_not_finite(tiny_checkpoint, tmp_path):
    result = looked_at(edited(tiny_checkpoint, tmp_path, lambda state: state['weights']['h.0.mlp.up.weight'][0, 0].fill_(math.nan)))
    assert result['advice'][-1] == 'the weights of h.0.mlp.up are not finite: no precision helps, go back to an earlier checkpoint'
    assert result['rows'][0]['verdict'] == 'bad' and result['rows'][0]['sqnr_db'] == 'nan' and result['loss']['fp8'] == 'nan'


def test_delayed_scales_are_the_checkpoints(tiny, tmp_path):
    run('train_fp8.py', *tiny, '--device=cpu', '--fp8_backend=native', '--fp8_recipe=delayed', '--fp8_amax_history=4', f'--checkpoint_dir={tmp_path}')
    result = looked_at(tmp_path / 'latest.pt', '--batches=2')
    saved = torch.load(tmp_path / 'latest.pt', weights_only=True)['fp8_state']
    reach = dict(zip(saved['layers'], saved['reach'].tolist()))
    for row in result['rows']:
        slot, largest = {'input': (0, 448), 'weight': (1, 448), 'grad': (2, 57344)}[row['tensor']]
        assert row['scale'] == pytest.approx(largest * reach[row['layer']][slot], rel=1e-5)


def test_one_batch_decides_and_zeros_are_exact():
    row = lambda **figures: {'layer': 'a', 'tensor': 'input', 'amax': 1.0, 'scale': 448.0, 'saturated': 0.0, 'flushed': 0.0, 'sqnr_db': 31.0, **figures}
    judge = lambda *rows: diagnose.judge(list(rows), fp8.Choice('emulate', ''))
    verdicts = [judge(row(), row(**figures))['verdict'] for figures in (
        {}, {'sqnr_db': 21.6}, {'sqnr_db': 21.4}, {'flushed': 0.009}, {'flushed': 0.02}, {'flushed': 0.11}, {'saturated': 0.002}, {'saturated': 0.02},
        {'amax': math.inf}, {'amax': 0.0, 'sqnr_db': math.nan}, {'sqnr_db': math.nan})]
    assert verdicts == ['fine', 'fine', 'bad', 'fine', 'watch', 'bad', 'watch', 'bad', 'bad', 'fine', 'bad']
    both = judge(row(amax=2.0, scale=224.0, flushed=0.02), row(saturated=0.004, sqnr_db=30.0))
    assert (both['amax'], both['scale'], both['flushed'], both['flushed_max'], both['saturated'], both['sqnr_db']) == (2.0, 224.0, 0.01, 0.02, 0.002, 30.0)


def test_the_bounds_are_those_of_normal_data():
    """What the script's first lines claim."""
    x, kit = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)), casts('tensorwise', 'hybrid')
    for cast, fmt in ((kit.x, 'e4m3'), (kit.dy, 'e5m2')):
        assert measure.tensor_health(x, cast)[4].item() == pytest.approx(diagnose.CLEAN[fmt], abs=0.1)
    x[3, 3] = 50_000
    *_, flushed, sqnr = measure.tensor_health(x, kit.x).tolist()
    others = torch.ones_like(x, dtype=torch.bool)
    others[3, 3] = False
    error = (x - (x * 448 / 50_000).to(torch.float8_e4m3fn).float() * 50_000 / 448)[others]
    assert (round(sqnr, 1), round(flushed, 3), round(10 * (x[others].square().sum() / error.square().sum()).log10().item(), 1)) == (57.8, 0.087, 24.0)


@pytest.mark.parametrize('words, rc, message', [
    (['--ckpt=damaged.pt'], 1, 'damaged.pt is damaged'), (['--ckpt=other.pt'], 1, 'other.pt is no checkpoint of train.py or train_fp8.py'),
    (['--ckp=x.pt'], 2, 'the nearest is ckpt'), (['--ckpt=good.pt', '--fp8_backend=te'], 1, 'fp8_backend=te: Transformer Engine needs a CUDA GPU')])
def test_refused_in_one_line(words, rc, message, tiny_checkpoint, tmp_path):
    whole = tiny_checkpoint.read_bytes()
    (tmp_path / 'good.pt').write_bytes(whole)
    (tmp_path / 'damaged.pt').write_bytes(whole[:len(whole) // 2])
    torch.save({'model': torch.ones(2)}, tmp_path / 'other.pt')
    assert message in run(diagnose.__file__, '--device=cpu', *words, rc=rc, cwd=tmp_path).stderr


@pytest.mark.parametrize('word, message', [
    ('--fp8_backend=off', 'leaves nothing to examine'), ('--fp8_recipe=fancy', 'fp8_recipe is one of'), ('--fp8_keep=nonsense', 'no linear is called'),
    ('--batches=0', 'are at least 1'), ('--batch_size=0', 'are at least 1')])
def test_settings_that_cannot_be(word, message, tiny_checkpoint):
    with pytest.raises(ValueError, match=message):
        looked_at(tiny_checkpoint, word)
