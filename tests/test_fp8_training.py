"""FP8 through the script: delayed scaling's state, the end in bf16, looks at the numbers, recomputation, ranks."""
import json

import pytest
import torch

from checkpoint import load
from conftest import losses, records, run, torchrun

FP8 = ['train_fp8.py', '--fp8_backend=native']
DELAYED = [*FP8, '--fp8_recipe=delayed', '--fp8_amax_history=4', '--gradient_accumulation_steps=2']


def weights(directory):
    return load(directory / 'latest.pt')['weights']


def same_weights(a, b):
    return all(torch.equal(w, weights(b)[name]) for name, w in weights(a).items())


@pytest.fixture(scope='module')
def delayed(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp('delayed')
    out = run(*DELAYED, *tiny, '--checkpoint_freq=5', '--keep_checkpoints=0', f'--checkpoint_dir={directory}').stdout
    assert '8 of 9 linears, native' in out and ', delayed, hybrid' in out
    return directory


def test_delayed_scaling_resumes_bit_for_bit_and_learns(delayed, tiny, tmp_path):
    run(*DELAYED, *tiny, f'--resume={delayed}/step_000005.pt', f'--checkpoint_dir={tmp_path}/a')
    assert same_weights(tmp_path / 'a', delayed) and losses(tmp_path / 'a') == {s: l for s, l in losses(delayed).items() if s > 5}
    state = load(delayed / 'step_000005.pt')['fp8_state']
    assert state['steps'] == 6 and state['history'].shape == (4, 8, 3) and (state['history'] > 0).all()  # a calibration and five steps
    run('train.py', *tiny, '--gradient_accumulation_steps=2', f'--checkpoint_dir={tmp_path}/bf16')
    bf16, fp8 = losses(tmp_path / 'bf16'), losses(delayed)
    assert bf16 != fp8 and all(abs(bf16[s] - fp8[s]) < 0.05 for s in bf16)


def test_recipes_and_precisions_switch_at_a_resume(delayed, tmp_path):
    done = run('train_fp8.py', '--fp8_backend=emulate', '--fp8_recipe=rowwise', '--fp8_amax_history=1024', f'--resume={delayed}/latest.pt', f'--checkpoint_dir={tmp_path}/a', '--max_steps=12')
    assert ', rowwise, e4m3' in done.stdout and load(tmp_path / 'a' / 'latest.pt')['fp8_state'] == {}
    done = run(*DELAYED, f'--resume={tmp_path}/a/latest.pt', f'--checkpoint_dir={tmp_path}/b', '--max_steps=14')
    after = losses(tmp_path / 'b')
    assert load(tmp_path / 'b' / 'latest.pt')['fp8_state']['steps'] == 3  # calibrated anew
    assert all(abs(loss - losses(delayed)[10]) < 0.5 for loss in after.values())


def test_a_checkpoint_goes_from_backend_to_backend(delayed, tmp_path):
    """native, emulate, torchao, bf16, native again: the same weights under the same names, no flag but the backend's."""
    path, scripts = delayed / 'latest.pt', [('train_fp8.py', '--fp8_backend=emulate', '--fp8_recipe=mxfp8'), ('train_fp8.py', '--fp8_backend=torchao'), ('train.py',), FP8]
    for number, words in enumerate(scripts):
        recipe = [] if words[0] == 'train.py' or len(words) == 3 else ['--fp8_recipe=tensorwise']
        own = [] if words[0] == 'train.py' else ['--fp8_amax_history=1024']
        out = run(*words, *recipe, *own, f'--resume={path}', f'--checkpoint_dir={tmp_path}/{number}', f'--max_steps={11 + number}').stdout
        assert f'at step {10 + number}, in ' in out
        path = tmp_path / str(number) / 'latest.pt'
        assert abs(losses(path.parent)[11 + number] - losses(delayed)[10]) < 0.5
    assert load(path)['weights'].keys() == load(delayed / 'latest.pt')['weights'].keys()


def test_recomputation_changes_no_bit(delayed, tiny, tmp_path):
    run(*DELAYED, *tiny, '--gradient_checkpointing', f'--checkpoint_dir={tmp_path}/fp8')
    assert same_weights(tmp_path / 'fp8', delayed)
    for words in ([], ['--grad_checkpointing=2']):
        run('train.py', *tiny, *words, f'--checkpoint_dir={tmp_path}/bf16{len(words)}')
    assert same_weights(tmp_path / 'bf160', tmp_path / 'bf161')
    assert 'none, full or k' in run('train.py', *tiny, '--grad_checkpointing=some', f'--checkpoint_dir={tmp_path}/c', rc=2).stderr


def test_looks_at_the_numbers_change_no_bit(delayed, tiny, tmp_path):
    out = run(*DELAYED, *tiny, '--fp8_stats_freq=5', f'--checkpoint_dir={tmp_path}/c').stdout
    assert same_weights(tmp_path / 'c', delayed)
    lines = [line for line in out.splitlines() if 'SQNR' in line]
    assert len(lines) == 5 and lines[0].startswith('step     5 | h.')
    scales = records(tmp_path / 'c', 'fp8/fwd_scale')
    assert [step for step, _ in scales] == [5] and all(1 < scale < 1e6 for _, scale in scales)
    assert all(scale > 1e3 for _, scale in records(tmp_path / 'c', 'fp8/bwd_scale'))
    with open(tmp_path / 'c' / 'log.jsonl') as file:
        record = next(r for r in map(json.loads, file) if 'fp8/fwd_scale' in r)
    assert len([name for name in record if name.count('/') == 2]) == 8 * 3 * 5 and record['fp8/h.1.mlp.down/grad_amax'] > 0


def test_the_run_ends_in_bf16(tiny, tmp_path):
    words = [*FP8, *tiny, '--fp8_until=0.6', '--checkpoint_freq=4', '--keep_checkpoints=0']
    out = run(*words, f'--checkpoint_dir={tmp_path}/a').stdout
    assert out.count('| FP8\n') == 6 and out.count('| BF16\n') == 4 and 'from here on in bf16: fp8_until=0.6' in out
    assert load(tmp_path / 'a' / 'latest.pt')['precision']['name'] == 'bf16' and load(tmp_path / 'a' / 'step_000004.pt')['precision']['name'] == 'fp8'
    run(*words, f'--resume={tmp_path}/a/step_000004.pt', f'--checkpoint_dir={tmp_path}/b')
    run(*words, f'--resume={tmp_path}/a/step_000008.pt', f'--checkpoint_dir={tmp_path}/c')
    assert same_weights(tmp_path / 'a', tmp_path / 'b') and same_weights(tmp_path / 'a', tmp_path / 'c')
    run('train.py', *tiny, f'--resume={tmp_path}/a/step_000008.pt', f'--checkpoint_dir={tmp_path}/d')
    assert same_weights(tmp_path / 'a', tmp_path / 'd')  # its last steps are bf16's own


def test_ranks_share_their_scales(delayed, tiny, tmp_path):
    """Two ranks of one micro-step are one rank of two: the amax is of both."""
    words = [word for word in DELAYED if 'accumulation' not in word]
    out = torchrun(2, *words, *tiny, '--fp8_stats_freq=5', f'--checkpoint_dir={tmp_path}').stdout
    assert out.count('SQNR') == 5
    one, two = losses(delayed), losses(tmp_path)
    assert all(abs(one[s] - two[s]) / one[s] < 5e-3 for s in one)
    ours, theirs = (load(d / 'latest.pt')['fp8_state']['reach'] for d in (tmp_path, delayed))
    ours[:, 2] *= 2  # each rank divides its loss by its own targets: DDP averages
    assert (ours / theirs).log().abs().max() < 0.1
    words = [*DELAYED, '--gradient_accumulation_steps=1', '--max_steps=11', f'--resume={tmp_path}/latest.pt', f'--checkpoint_dir={tmp_path}/one']
    assert load(tmp_path / 'latest.pt')['fp8_state']['steps'] == 11
    run(*words)
    assert load(tmp_path / 'one' / 'latest.pt')['fp8_state']['steps'] == 12  # the same divisor on one rank: nothing to calibrate
    run(*words, '--gradient_accumulation_steps=4', f'--checkpoint_dir={tmp_path}/four')
    assert load(tmp_path / 'four' / 'latest.pt')['fp8_state']['steps'] == 2


@pytest.mark.parametrize('words, rc, message', [
    (['--fp8_backend=te', '--fp8_format=e5m2'], 2, '--fp8_format=hybrid'), (['--fp8_backend=te', '--fp8_margin=1'], 2, '--fp8_recipe=delayed --fp8_margin=1'),
    (['--fp8_until=90'], 2, 'fp8_until is a share of the run'), (['--fp8_recipe=mxfp8'], 1, 'fp8_recipe=mxfp8: there is no CUDA GPU'), (['--fp8_backend=native', '--fp8_recipe=mxfp8'], 1, 'emulate has mxfp8'),
    (['--fp8_backend=native', '--fp8_keep=mlp.dwn'], 2, "no linear is called 'mlp.dwn'"), (['--fp8_backend=native', '--fp8_interval=8'], 2, '--fp8_recipe=delayed'),
    (['--fp8_backend=emulate', '--fp8_recipe=blockwise', '--batch_size=1'], 2, 'not a multiple of 128')])
def test_orders_that_cannot_be_had_cost_one_line(tiny, tmp_path, words, rc, message):
    if torch.cuda.is_available() and rc == 1:
        pytest.skip('there is a GPU')
    done = run('train_fp8.py', *tiny, *words, f'--checkpoint_dir={tmp_path}/run', rc=rc)
    assert message in done.stderr and not (tmp_path / 'run').exists()


def test_a_model_with_no_linear_for_fp8_is_not_called_fp8(tiny, tmp_path):
    words = ['--n_embd=40', '--ffn_dim=40', f'--checkpoint_dir={tmp_path}/run']
    assert 'no linear of this model can be in FP8: 40 -> 120' in run(*FP8, *tiny, *words, rc=2).stderr
    assert 'kept by fp8_keep' in run(*FP8, *tiny, '--fp8_keep=h', f'--checkpoint_dir={tmp_path}/run', rc=2).stderr


def test_keep_auto_on_a_cpu_says_why_it_keeps_nothing(tiny, tmp_path):
    out = run(*FP8, *tiny, '--fp8_keep=auto', '--max_steps=2', f'--checkpoint_dir={tmp_path}').stdout
    assert 'a CPU only emulates FP8' in out and '8 of 9 linears' in out
