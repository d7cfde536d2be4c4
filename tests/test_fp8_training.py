"""FP8 through the script: delayed scaling's state, the end in bf16, looks at the numbers, recomputation,
ranks."""
import json

import pytest
import torch

from checkpoint import load
from conftest import in_ranks, losses, records, refused, run

FP8 = ['train_fp8.py', '--fp8_backend=native']
DELAYED = [*FP8, '--fp8_recipe=delayed', '--fp8_amax_history=4', '--gradient_accumulation_steps=2']


def weights(directory):
    return load(directory / 'latest.pt')['weights']


def same_weights(a, b):
    return all(torch.equal(w, weights(b)[name]) for name, w in weights(a).items())


def precision_of(path):
    return load(path)['precision']['name']


@pytest.fixture(scope='module')
def delayed(tiny, tmp_path_factory):
    directory = tmp_path_factory.mktemp('delayed')
    each = ['--checkpoint_freq=5', '--keep_checkpoints=0', f'--checkpoint_dir={directory}']
    out = run(*DELAYED, *tiny, *each).stdout
    assert '8 of 9 linears, delayed (native)' in out
    return directory


# ----------------------------------------------------------------------------- delayed scaling, and switching

def test_delayed_scaling_resumes_bit_for_bit(delayed, tiny, tmp_path):
    run(*DELAYED, *tiny, f'--resume={delayed}/step_000005.pt', f'--checkpoint_dir={tmp_path}')
    assert same_weights(tmp_path, delayed)
    assert losses(tmp_path) == {step: loss for step, loss in losses(delayed).items() if step > 5}
    state = load(delayed / 'step_000005.pt')['fp8_state']
    assert state['steps'] == 6  # a calibration and five steps
    assert state['history'].shape == (4, 8, 3)
    assert (state['history'] > 0).all()


def test_delayed_scaling_learns_as_bf16_does(delayed, tiny, tmp_path):
    run('train.py', *tiny, '--gradient_accumulation_steps=2', f'--checkpoint_dir={tmp_path}')
    bf16, fp8 = losses(tmp_path), losses(delayed)
    assert bf16 != fp8
    for step in bf16:
        assert abs(bf16[step] - fp8[step]) < 0.05


def test_recipes_and_precisions_switch_at_a_resume(delayed, tmp_path):
    rowwise = ['--fp8_backend=emulate', '--fp8_recipe=rowwise', '--fp8_amax_history=1024', '--max_steps=12']
    done = run('train_fp8.py', *rowwise, f'--resume={delayed}/latest.pt', f'--checkpoint_dir={tmp_path}/a')
    assert ', rowwise (' in done.stdout
    assert load(tmp_path / 'a' / 'latest.pt')['fp8_state'] == {}
    run(*DELAYED, f'--resume={tmp_path}/a/latest.pt', f'--checkpoint_dir={tmp_path}/b', '--max_steps=14')
    assert load(tmp_path / 'b' / 'latest.pt')['fp8_state']['steps'] == 3  # calibrated anew
    for loss in losses(tmp_path / 'b').values():
        assert abs(loss - losses(delayed)[10]) < 0.5


def test_a_checkpoint_goes_from_backend_to_backend(delayed, tmp_path):
    """emulate, torchao, bf16, native again: the same weights under the same names, no flag but FP8's."""
    tensorwise = ['--fp8_recipe=tensorwise', '--fp8_amax_history=1024']
    scripts = [
        ['train_fp8.py', '--fp8_backend=emulate', '--fp8_recipe=mxfp8', '--fp8_amax_history=1024'],
        ['train_fp8.py', '--fp8_backend=torchao', *tensorwise],
        ['train.py'],
        [*FP8, *tensorwise],
    ]
    path = delayed / 'latest.pt'
    for number, words in enumerate(scripts):
        folder, end = tmp_path / str(number), f'--max_steps={11 + number}'
        out = run(*words, f'--resume={path}', f'--checkpoint_dir={folder}', end).stdout
        assert f'at step {10 + number}, in ' in out
        path = folder / 'latest.pt'
        assert abs(losses(folder)[11 + number] - losses(delayed)[10]) < 0.5
    assert weights(folder).keys() == weights(delayed).keys()


def saved_by(backend, source, path):
    """A checkpoint as a GPU's run in FP8 leaves it, where `auto` had chosen the backend."""
    state = torch.load(source)
    state['config'] |= {'fp8_backend': 'auto', 'fp8_recipe': 'auto', 'fp8_amax_history': 1024}
    state['precision']['reason'] = f'{backend}: auto: it runs'
    torch.save(state, path)
    return f'--resume={path}'


def test_a_run_in_fp8_goes_on_in_fp8_by_the_same_backend(delayed, tmp_path):
    resume = saved_by('emulate', delayed / 'latest.pt', tmp_path / 'saved.pt')
    out = run('train_fp8.py', resume, '--max_steps=11', f'--checkpoint_dir={tmp_path}/on').stdout
    assert '8 of 9 linears, tensorwise (emulate)' in out
    out = run('train_fp8.py', resume, '--use_fp8', '--dry_run', f'--checkpoint_dir={tmp_path}/on').stdout
    assert '8 of 9 linears, tensorwise (emulate)' in out


def test_a_run_in_fp8_that_finds_none_stops(delayed, tmp_path):
    """bf16 takes a typed word: a requeued run cannot ask."""
    resume = saved_by('te', delayed / 'latest.pt', tmp_path / 'saved.pt')
    words = ['train_fp8.py', resume, '--max_steps=11', f'--checkpoint_dir={tmp_path}/on']
    code, message = refused(*words)
    assert code == 1
    assert message.startswith('fp8_backend=te: Transformer Engine needs a CUDA GPU')
    assert 'saved.pt was trained in FP8: --no_fp8 goes on in bf16' in message
    assert not (tmp_path / 'on').exists()
    assert '| BF16' in run(*words, '--no_fp8').stdout
    out = run(*words, '--fp8_backend=auto', '--max_steps=12', '--overwrite').stdout
    assert 'FP8 Training Off: there is no CUDA GPU' in out


# ------------------------------------------------------------------------------------ what must change no bit

def test_recomputation_changes_no_bit(delayed, tiny, tmp_path):
    run(*DELAYED, *tiny, '--gradient_checkpointing', f'--checkpoint_dir={tmp_path}/fp8')
    assert same_weights(tmp_path / 'fp8', delayed)
    run('train.py', *tiny, f'--checkpoint_dir={tmp_path}/kept')
    run('train.py', *tiny, '--grad_checkpointing=2', f'--checkpoint_dir={tmp_path}/again')
    assert same_weights(tmp_path / 'kept', tmp_path / 'again')


def test_looks_at_the_numbers_change_no_bit(delayed, tiny, tmp_path):
    out = run(*DELAYED, *tiny, '--fp8_stats_freq=5', f'--checkpoint_dir={tmp_path}/c').stdout
    assert same_weights(tmp_path / 'c', delayed)
    [line] = [line for line in out.splitlines() if 'SQNR' in line]  # of the one cast that clamps too much
    assert line.startswith('step 5/10 | h.1.attn.proj input: SQNR ')
    [(step, forward)] = records(tmp_path / 'c', 'fp8/fwd_scale')
    assert step == 5
    assert 1 < forward < 1e6
    [(_, backward)] = records(tmp_path / 'c', 'fp8/bwd_scale')
    assert backward > 1e3
    with open(tmp_path / 'c' / 'log.jsonl') as file:
        record = next(r for r in map(json.loads, file) if 'fp8/fwd_scale' in r)
    assert len([name for name in record if name.count('/') == 2]) == 8 * 3 * 5
    assert record['fp8/h.1.mlp.down/grad_amax'] > 0


def test_the_run_ends_in_bf16(tiny, tmp_path):
    a, b, c, d = (tmp_path / name for name in 'abcd')
    words = [*FP8, *tiny, '--fp8_until=0.6', '--checkpoint_freq=4', '--keep_checkpoints=0']
    out = run(*words, f'--checkpoint_dir={a}').stdout
    assert out.count('| FP8\n') == 6
    assert out.count('| BF16\n') == 4
    assert 'from here on in bf16: fp8_until=0.6' in out
    assert precision_of(a / 'latest.pt') == 'bf16'
    assert precision_of(a / 'step_000004.pt') == 'fp8'
    run(*words, f'--resume={a}/step_000004.pt', f'--checkpoint_dir={b}')
    assert same_weights(a, b)
    run(*words, f'--resume={a}/step_000008.pt', f'--checkpoint_dir={c}')
    assert same_weights(a, c)
    run('train.py', *tiny, f'--resume={a}/step_000008.pt', f'--checkpoint_dir={d}')
    assert same_weights(a, d)  # its last steps are bf16's own


# ------------------------------------------------------------------------------------------------------ ranks

@pytest.fixture(scope='module')
def two_ranks(tiny, tmp_path_factory):
    """(what delayed's run says and writes, in two ranks of one micro-step)."""
    directory = tmp_path_factory.mktemp('ranks')
    words = [word for word in DELAYED if 'accumulation' not in word]
    out = in_ranks(2, *words, *tiny, '--fp8_stats_freq=5', f'--checkpoint_dir={directory}').stdout
    return out, directory


def test_ranks_share_their_scales(delayed, two_ranks):
    """Two ranks of one micro-step are one rank of two: the amax is of both."""
    out, directory = two_ranks
    assert out.count('SQNR') == 1  # rank 0 alone says it
    one, two = losses(delayed), losses(directory)
    for step in one:
        assert abs(one[step] - two[step]) / one[step] < 5e-3
    of_two, of_one = (load(d / 'latest.pt')['fp8_state']['scale'] for d in (directory, delayed))
    of_two[:, 2] *= 2  # each rank divides its loss by its own targets: DDP averages
    assert (of_two / of_one).log().abs().max() < 0.1


@pytest.mark.parametrize('micro_steps, updates', [
    (1, 12),    # the same divisor on one rank: nothing to calibrate
    (4, 2),     # another: a calibration and a step
])
def test_scales_go_on_where_the_divisor_is_the_same(two_ranks, tmp_path, micro_steps, updates):
    latest = two_ranks[1] / 'latest.pt'
    assert load(latest)['fp8_state']['steps'] == 11
    words = [f'--gradient_accumulation_steps={micro_steps}', '--max_steps=11']
    run(*DELAYED, *words, f'--resume={latest}', f'--checkpoint_dir={tmp_path}')
    assert load(tmp_path / 'latest.pt')['fp8_state']['steps'] == updates


# --------------------------------------------------------------------------------------------------- refusals

BLOCKWISE = ['--fp8_backend=emulate', '--fp8_recipe=blockwise', '--batch_size=1']


@pytest.mark.parametrize('words, code, message', [
    (['--fp8_backend=te', '--fp8_format=e5m2'], 2, '--fp8_format=hybrid'),
    (['--fp8_backend=te', '--fp8_margin=1'], 2, '--fp8_recipe=delayed --fp8_margin=1'),
    (['--fp8_until=90'], 2, 'fp8_until wants a number >= 0, <= 1'),
    (['--fp8_recipe=mxfp8'], 1, 'fp8_recipe=mxfp8: there is no CUDA GPU'),
    (['--fp8_backend=native', '--fp8_recipe=mxfp8'], 1, 'emulate has mxfp8'),
    (['--fp8_backend=native', '--fp8_keep=mlp.dwn'], 2, "no linear is called 'mlp.dwn'"),
    (['--fp8_backend=native', '--fp8_interval=8'], 2, '--fp8_recipe=delayed'),
    (BLOCKWISE, 2, 'not a multiple of 128'),
    (['--fp8_backend=native', '--n_embd=40', '--ffn_dim=40'], 2,
     'no linear of this model can be in FP8: 40 -> 120'),
    (['--fp8_backend=native', '--fp8_keep=h'], 2, 'kept by fp8_keep'),
])
def test_orders_that_cannot_be_had_cost_one_line(tiny, tmp_path, words, code, message):
    if torch.cuda.is_available() and code == 1:
        pytest.skip('there is a GPU')
    found, said = refused('train_fp8.py', *tiny, *words, f'--checkpoint_dir={tmp_path}/run')
    assert found == code
    assert message in said
    assert not (tmp_path / 'run').exists()


def test_a_refusal_ends_the_process_in_one_line(tiny, tmp_path):
    done = run('train_fp8.py', *tiny, '--fp8_until=90', f'--checkpoint_dir={tmp_path}/run', rc=2)
    assert 'fp8_until wants a number >= 0, <= 1' in done.stderr
    assert not (tmp_path / 'run').exists()


def test_keep_auto_on_a_cpu_says_why_it_keeps_nothing(tiny, tmp_path):
    words = ['--fp8_keep=auto', '--max_steps=2', f'--checkpoint_dir={tmp_path}']
    out = run(*FP8, *tiny, *words).stdout
    assert 'a CPU only emulates FP8' in out
    assert '8 of 9 linears' in out


@pytest.mark.parametrize('ranks', [1, 2])
@pytest.mark.parametrize('words', [
    pytest.param(['train.py'], id='bf16'),
    pytest.param(FP8, id='fp8'),
    pytest.param([*FP8, '--gradient_accumulation_steps=2'], id='fp8, weights kept'),
])
def test_six_graphs_whatever_the_depth_and_the_ranks(words, ranks, tiny, tmp_path):
    """Embedding, one block, head with loss, in training and in evaluation. DDP, which would cut a graph at
    its buckets, cuts none: a block's gradients are reduced while the next one is computed."""
    words = ['tests/graphs.py', *words, *tiny, '--compile=on', '--n_layer=5', '--max_steps=2']
    done = in_ranks(ranks, *words, f'--checkpoint_dir={tmp_path}')
    assert '6 graphs' in done.stdout.splitlines()
    assert sorted(losses(tmp_path)) == [1, 2]
