"""FP8 through the script: delayed scaling's state, the end in bf16, looks at the numbers, recomputation,
ranks."""
import json
from unittest import mock

import pytest
import torch

from fp8gpt.checkpoint import read
from fp8gpt.fp8 import health
from conftest import COUNTS_GRAPHS, in_ranks, losses, records, refused, run, runner
from fp8_models import DELAYED
from helpers import same_tensors

FP8 = ['train_fp8.py', '--fp8_backend=native']


def same_weights(*directories):
    return same_tensors(*(read(directory / 'latest.pt')['weights'] for directory in directories))


@pytest.fixture
def delayed(one_run):
    directory, out = one_run(*DELAYED)
    assert '8 of 9 linears, delayed (native)' in out
    return directory


def test_delayed_scaling_resumes_bit_for_bit(delayed, tiny, tmp_path):
    run(*DELAYED, *tiny, f'--resume={delayed}/step_000005.pt', f'--checkpoint_dir={tmp_path}')
    assert same_weights(tmp_path, delayed)
    assert losses(tmp_path) == losses(delayed, after=5)
    state = read(delayed / 'step_000005.pt')['fp8_state']
    assert state['steps'] == 6  # a calibration and five steps
    assert state['history'].shape == (4, 8, 3)
    assert (state['history'] > 0).all()


def test_a_checkpoint_goes_from_backend_to_backend(delayed, tmp_path):
    """emulate, torchao, bf16, native again: the same weights under the same names, no flag but FP8's: all
    else is the checkpoint's. Delayed scaling is calibrated anew."""
    scripts = [
        ['train_fp8.py', '--fp8_backend=emulate', '--fp8_recipe=mxfp8', '--fp8_amax_history=1024'],
        ['train_fp8.py', '--fp8_backend=torchao', '--fp8_recipe=tensorwise', '--fp8_amax_history=1024'],
        ['train.py'],
        DELAYED,
    ]
    path = delayed / 'latest.pt'
    for number, words in enumerate(scripts):
        folder, end = tmp_path / str(number), f'--max_steps={11 + number}'
        out = run(*words, f'--resume={path}', f'--checkpoint_dir={folder}', end).stdout
        assert f'at step {10 + number}, in {"bf16" if number == 3 else "fp8"} until now' in out
        assert f'max_steps: {10 + number} in the checkpoint, now {11 + number}' in out
        path = folder / 'latest.pt'
        assert abs(losses(folder)[11 + number] - losses(delayed)[10]) < 0.5
        assert read(path).get('fp8_state', {}).get('steps') == (2 if words is DELAYED else None)
    assert read(path)['weights'].keys() == read(delayed / 'latest.pt')['weights'].keys()


def test_a_run_in_fp8_goes_on_in_fp8_by_the_same_backend_or_stops(delayed, tmp_path):
    """From a checkpoint as a GPU's run leaves it, where `auto` had chosen the backend. bf16 takes a typed
    word: a requeued run cannot ask."""
    def saved_by(backend):
        state = torch.load(delayed / 'latest.pt')
        state['config'] |= {'fp8_backend': 'auto', 'fp8_recipe': 'auto', 'fp8_amax_history': 1024}
        state['fp8_choice'] |= {'fp8_backend': backend, 'fp8_recipe': 'tensorwise'}
        state['precision']['reason'] = f'{backend}: auto: it runs'
        torch.save(state, tmp_path / 'saved.pt')
        return 'train_fp8.py', f'--resume={tmp_path}/saved.pt', f'--checkpoint_dir={tmp_path}/on'
    out = run(*saved_by('emulate'), '--use_fp8', '--dry_run').stdout
    assert '8 of 9 linears, tensorwise (emulate)' in out
    assert "'auto' in the checkpoint" not in out       # what auto took is no change
    words = *saved_by('te'), '--max_steps=11'
    code, message = refused(*words)
    assert code == 1
    assert message.startswith('fp8_backend=te fp8_recipe=tensorwise: te does not take device=cpu')
    assert 'saved.pt was trained in FP8: --no_fp8 continues in bf16' in message
    assert not (tmp_path / 'on').exists()
    assert '| BF16' in run(*words, '--no_fp8').stdout
    out = run(*words, '--fp8_backend=auto', '--max_steps=12', '--overwrite').stdout
    assert 'FP8 Training Off: there is no CUDA GPU' in out


def test_recomputation_and_looks_at_the_numbers_change_no_bit(delayed, tiny, tmp_path):
    words = [*tiny, '--gradient_checkpointing', '--fp8_stats_freq=5', f'--checkpoint_dir={tmp_path}']
    out = run(*DELAYED, *words).stdout
    assert same_weights(tmp_path, delayed)
    lines = [line for line in out.splitlines() if 'SQNR' in line]
    assert lines and lines[0].startswith('step 5/10 | h.')
    [(step, forward)] = records(tmp_path, 'fp8/fwd_scale')
    [(_, backward)] = records(tmp_path, 'fp8/bwd_scale')
    assert step == 5
    assert 1 < forward < 1e6
    assert backward > 1e3
    with open(tmp_path / 'log.jsonl') as file:
        record = next(r for r in map(json.loads, file) if 'fp8/fwd_scale' in r)
    assert len([name for name in record if name.count('/') == 2]) == 8 * 3 * 5
    assert record['fp8/h.1.mlp.down/grad_amax'] > 0


def test_ranks_share_their_scales(delayed, tiny, tmp_path):
    """Two ranks of one micro-step are one rank of two: the amax is of both. One rank then goes on: scales
    stay where the divisor does, else they are calibrated anew."""
    words = [word for word in DELAYED if 'accumulation' not in word]
    out = in_ranks(2, *words, *tiny, '--fp8_stats_freq=5', f'--checkpoint_dir={tmp_path}/two').stdout
    assert 'SQNR' in out
    one, two = losses(delayed), losses(tmp_path / 'two')
    assert two == pytest.approx(one, rel=5e-3)
    of_two, of_one = (read(d / 'latest.pt')['fp8_state'] for d in (tmp_path / 'two', delayed))
    of_two['scale'][:, 2] *= 2  # each rank divides its loss by its own targets: DDP averages
    assert (of_two['scale'] / of_one['scale']).log().abs().max() < 0.1
    assert of_two['steps'] == 11
    for micro_steps, updates in ((1, 12), (4, 2)):
        last = [f'--gradient_accumulation_steps={micro_steps}', f'--resume={tmp_path}/two/latest.pt']
        run(*DELAYED, *last, '--max_steps=11', f'--checkpoint_dir={tmp_path}/{micro_steps}')
        assert read(tmp_path / str(micro_steps) / 'latest.pt')['fp8_state']['steps'] == updates


def test_a_look_at_the_numbers_without_memory_is_left_out(here, tiny, tmp_path, monkeypatch):
    """It computes eagerly, in several times a compiled pass's memory: a full GPU has none at step 5."""
    monkeypatch.setattr(health, 'log_health', mock.Mock(side_effect=torch.OutOfMemoryError('no room')))
    out = here(*FP8, *tiny, '--fp8_stats_freq=5', f'--checkpoint_dir={tmp_path}')
    assert 'left out at this step: fp8_health: OutOfMemoryError: no room' in out
    assert len(losses(tmp_path)) == 10


@pytest.mark.slow
@pytest.mark.parametrize('words', [['train.py'], [*FP8, '--gradient_accumulation_steps=4']])
def test_eight_graphs_whatever_the_depth_and_the_ranks(words, tiny, tmp_path):
    words = [runner(tmp_path, COUNTS_GRAPHS), *words, *tiny, '--compile=on', '--n_layer=5', '--max_steps=2']
    done = in_ranks(2, *words, f'--checkpoint_dir={tmp_path}')
    assert '8 graphs' in done.stdout.splitlines()
    assert sorted(losses(tmp_path)) == [1, 2]
