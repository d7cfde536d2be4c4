"""The benchmarks work and leave what they promise, on figures that other code knows; speeds are for a quiet machine."""
import json
import os
import re
import statistics

import pytest
import torch

import bench
import plot
from conftest import TINY, losses, records, run

PAIR = ['--rounds=2', '--steps=2', '--warmup=1', '--lr_schedule=constant']


def result(out, tmp_path, name):
    """The JSON of a benchmark: on its last line and in its file, with what produced it."""
    last = json.loads(out.splitlines()[-1])
    assert last == json.loads((tmp_path / f'{name}.json').read_text()) and last['versions']['torch'] and last['device']
    return last


def test_sample(tmp_path):
    out = run('bench.py', 'sample', '--new_tokens=2', '--samples=2', '--sample_tokens=2', f'--results={tmp_path}').stdout
    rows = result(out, tmp_path, 'sample')['rows']
    assert [row['samples'] for row in rows] == [1, 2] and all(row['ratio'] > 0 for row in rows) and out.startswith('| samples | ')
    assert 'error: unknown: --rounds=2' in run('bench.py', 'sample', '--rounds=2', rc=2).stderr
    assert 'error: a number of things is at least 1' in run('bench.py', 'sample', '--samples=0', rc=2).stderr


def test_data(tmp_path):
    if not os.path.isdir(os.environ['TIKTOKEN_CACHE_DIR']):
        pytest.skip("no TIKTOKEN_CACHE_DIR with GPT-2's files")
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({'text': [f'Document {i} of many. ' * 20 for i in range(300)]}), tmp_path / 'a.parquet')
    out = run('bench.py', 'data', f'--data_files={tmp_path}/a.parquet', '--repeats=1', '--batch_size=4', f'--results={tmp_path}').stdout
    found = result(out, tmp_path, 'data')
    assert len(found['rows']) == 2 and all(row['ratio'] > 0 for row in found['rows'])
    assert 0 <= found['data_wait_share_at_600k_tokens_per_second'] < 1


def test_pair_takes_the_steps_that_the_scripts_take(tiny, tmp_path):
    words = [*tiny, '--lr_schedule=constant', '--gradient_accumulation_steps=2', '--max_steps=3']
    run('train.py', *words, f'--checkpoint_dir={tmp_path}/bf16')
    run('train_fp8.py', *words, '--fp8_backend=native', f'--checkpoint_dir={tmp_path}/fp8')
    out = run('bench.py', 'pair', *tiny, *PAIR, '--micro_steps=2', '--backends=native,te,emulate', f'--results={tmp_path}').stdout
    found = result(out, tmp_path, 'pair-flags')
    native, te, emulate = found['rows']
    assert found['data'] == tiny[-1].split('=')[1] and out.startswith(f'data: {found["data"]}; a step is 2 micro-steps of 4 x 64 tokens')
    for precision in ('bf16', 'fp8'):  # both rounds, from the same weights and on the same batches
        leg = found['rounds']['native'][precision.replace('fp', 'FP')]
        assert leg['loss'] == [losses(tmp_path / precision)[3]] * 2 and len(leg['seconds a step']) == 2
    assert native['loss difference, %'] == pytest.approx(100 * (losses(tmp_path / 'fp8')[3] / losses(tmp_path / 'bf16')[3] - 1)) != 0
    for row in (native, emulate):
        assert row['bf16 tokens/s'] == pytest.approx(row['bf16 steps/s'] * 2 * 4 * 64) and row['bf16 MFU'] is row['FP8 GB'] is None
        assert row['least .. most'][0] <= row['ratio'] <= row['least .. most'][1]
        assert re.fullmatch(r'(FP8|SLOWER) x\d+\.\d\d(, rounds disagree)?', row['verdict'])
    assert te == {'backend': 'te', 'verdict': te['verdict']} and te['verdict'].startswith('fp8_backend=te: ')


def test_pair_without_data_and_without_fp8(tmp_path):
    words = ['bench.py', 'pair', *TINY, *PAIR, '--dataset=nowhere', f'--results={tmp_path}']
    out = run(*words, '--fp8_backend=emulate').stdout
    assert out.startswith('data: random tokens, as nowhere is not prepared') and result(out, tmp_path, 'pair-flags')['rows'][0]['ratio'] > 0
    assert result(run(*words).stdout, tmp_path, 'pair-flags')['rows'][0]['verdict'].startswith('bf16 only: there is no CUDA GPU')
    assert 'wants dtype=bf16' in run(*words, '--dtype=fp32', rc=2).stderr and 'the nearest is' in run(*words, '--batch_sise=2', rc=2).stderr


def test_a_killed_matrix_keeps_its_rows_and_memory_ends_one_cell(tmp_path, capsys):
    settings = bench.read_settings([*TINY, '--dataset=nowhere'])
    saved = lambda: json.loads((tmp_path / 'pair-flags.json').read_text())['rows']

    def no_room():
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB\nand more')

    def killed():
        assert saved() == [{'a': 1, 'ratio': 2.0}, {'a': 2, 'verdict': 'CUDA out of memory. Tried to allocate 9 GiB'}]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        bench.fill('pair', settings, [({'a': 1}, lambda: {'ratio': 2.0}), ({'a': 2}, no_room), ({'a': 3}, killed)], str(tmp_path))
    assert len(saved()) == 2
    bench.fill('pair', settings, [({'a': 1}, lambda: {'ratio': 2.0, 'range': [1.0, 2.5]}), ({'a': 2}, no_room)], str(tmp_path))
    assert '| a | ratio | range | verdict |\n| --- | --- | --- | --- |\n| 1 | 2 | 1 .. 2.5 | - |\n| 2 | - | - | CUDA' in capsys.readouterr().out


@pytest.mark.parametrize('ratio, keep, spread, verdict', [
    (1.214, '', (1.1, 1.3), 'FP8 x1.21'), (0.93, '', (0.9, 0.95), 'SLOWER x0.93'), (1.1, '', (0.9, 1.3), 'FP8 x1.10, rounds disagree'),
    (1 / 1.02, 'auto', (1, 1), 'SLOWER x0.98, PASS'), (1 / 1.021, 'auto', (1, 1), 'SLOWER x0.98, FAIL'), (1.3, 'auto', (1.2, 1.4), 'FP8 x1.30, PASS')])
def test_speed_verdict(ratio, keep, spread, verdict):
    assert bench.speed_verdict(ratio, keep, spread) == verdict


def test_gemm(tmp_path):
    (tmp_path / 'wide.py').write_text("mlp = 'swiglu'\nffn_dim = 96\nbias = False\n")
    out = run('bench.py', 'gemm', tmp_path / 'wide.py', *TINY, '--n_kv_head=2', '--dataset=nowhere', '--repeats=2', '--iterations=2',
              '--backends=native,te', '--recipes=tensorwise,blockwise', f'--results={tmp_path}').stdout
    rows = result(out, tmp_path, 'gemm-wide')['rows']
    native = {row['linear']: row for row in rows if (row['backend'], row['recipe']) == ('native', 'tensorwise')}
    assert all('not in multiples of 128' in row['verdict'] for row in rows if (row['backend'], row['recipe']) == ('native', 'blockwise'))
    # qkv: (4 heads + 2 x 2) x 16 = 128; the head's 257 rows are padded to 320
    assert {name: (row['M'], row['N'], row['K']) for name, row in native.items()} == {
        'attn.qkv': (256, 128, 64), 'attn.proj': (256, 64, 64), 'mlp.gate_up': (256, 192, 64), 'mlp.down': (256, 64, 96), 'lm_head': (256, 320, 64)}
    head = native.pop('lm_head')
    assert head['fwd bf16 ms'] > 0 and head['fwd ratio'] is None and head['verdict'].startswith('bf16: the output head') and 'fwd FP8 ms' not in head
    for row in native.values():
        assert row['fwd+bwd ratio'] == pytest.approx(row['fwd+bwd bf16 ms'] / row['fwd+bwd FP8 ms']) and ' x' in row['verdict']
        assert row['fwd FP8 TFLOP/s'] * row['fwd FP8 ms'] == pytest.approx(2e-9 * row['M'] * row['N'] * row['K'])
        assert row['fwd+bwd bf16 TFLOP/s'] * row['fwd+bwd bf16 ms'] == pytest.approx(6e-9 * row['M'] * row['N'] * row['K'])
    assert all(row['verdict'].startswith('fp8_backend=te fp8_recipe=') for row in rows if row['backend'] == 'te')


def test_quality(tiny, tmp_path):
    (tmp_path / 'hellaswag').mkdir()
    item = {'activity_label': 'Cooking', 'ctx': 'A pan is hot. it', 'endings': ['`@^~`', 'see the tree', '~~^^``@@', '@@@@@@@'], 'label': 1}
    (tmp_path / 'hellaswag' / 'hellaswag_val.jsonl').write_text(3 * (json.dumps(item) + '\n'))
    words = ['bench.py', 'quality', *tiny, f'--data_dir={tmp_path}', '--fp8_backend', 'native', '--steps=20', '--seeds=2', '--eval_freq=5',
             f'--out={tmp_path}/runs', f'--results={tmp_path}', '--hellaswag_items=2']
    found = result(run(*words).stdout, tmp_path, 'quality-flags')
    train, val, hellaswag, time = found['rows']
    folder = lambda precision, seed: tmp_path / 'runs' / f'{precision}-{seed}'
    ends = {p: [dict(records(folder(p, seed), 'val/loss'))[20] for seed in (1337, 1338)] for p in ('bf16', 'fp8')}
    tails = [statistics.mean(losses(folder('fp8', seed))[step] for step in (19, 20)) for seed in (1337, 1338)]
    assert (val['bf16'], val['FP8'], train['FP8']) == tuple(map(pytest.approx, map(statistics.mean, (ends['bf16'], ends['fp8'], tails))))
    gaps = [100 * (f / b - 1) for b, f in zip(*ends.values())]
    assert val['gap'] == pytest.approx(sum(gaps) / 2) and val['noise'] == pytest.approx(12.706 * abs(gaps[0] - gaps[1]) / 2)  # sd / sqrt(2)
    assert hellaswag['bf16'] == hellaswag['FP8'] == 1 and hellaswag['FP8 95%'] == pytest.approx([0.3424, 1], abs=1e-4)  # 1 / (1 + 1.96^2 / 2)
    assert time['figure'] == f'seconds to validation loss {max(val["bf16"], val["FP8"]):.4f}'
    assert time['ratio'] == pytest.approx(time['bf16'] / time['FP8'])
    assert found['verdict'] == 'PASS' and (tmp_path / 'quality-flags.png').read_bytes()[:4] == b'\x89PNG'
    assert found['runs']['FP8'][0]['config']['fp8_backend'] == 'native' and len(found['runs']['bf16']) == 2

    # what is finished is taken as it is: here FP8 runs that ended 12% higher; one that has other settings is run again
    for seed in (1337, 1338):
        log = folder('fp8', seed) / 'log.jsonl'
        log.write_text(re.sub(r'"val/loss": ([\d.]+)', lambda m: f'"val/loss": {float(m[1]) * 1.12}', log.read_text()))
    again = run(*words, '--hellaswag_items=0', rc=1)
    assert again.stdout.count('an earlier run') == 4 and 'HellaSwag is left out: hellaswag_items=0' in again.stdout
    assert result(again.stdout, tmp_path, 'quality-flags')['rows'][1]['gap'] == pytest.approx(1.12 * (100 + val['gap']) - 100)
    assert 'FAIL: a figure is more than 10% worse' in again.stderr
    (tmp_path / 'hellaswag' / 'hellaswag_val.jsonl').unlink()
    alone = run(*words, '--seeds=1', '--fp8_backend=emulate').stdout
    assert alone.count('an earlier run') == 1 and 'one seed, so no noise band is known' in alone and 'left out: there is no' in alone
    assert 'train.py failed: warmup_steps=50, but the run has 20 steps' in run(*words, '--warmup_steps=50', rc=1).stderr


def test_quality_is_refused_before_the_runs_where_fp8_cannot_run(tiny, tmp_path):
    assert 'bf16 only: there is no CUDA GPU' in run('bench.py', 'quality', *tiny, '--steps=5', f'--out={tmp_path}/runs', rc=1).stderr
    assert not (tmp_path / 'runs').exists()


@pytest.mark.parametrize('bf16, eight, allowed, accuracy, gap, noise, verdict', [
    ([2.0, 4.0], [2.02, 4.04], 2, False, 1, 0, 'PASS'), ([2.0], [1.0], 2, False, -50, None, 'PASS'), ([2.0], [2.06], 2, False, 3, None, 'WARN'),
    ([2.0], [2.22], 2, False, 11, None, 'FAIL'), ([2.0], [float('nan')], 2, False, None, None, 'FAIL'),
    ([2.0, 2.0], [2.0, 2.02], 2, False, 0.5, 6.353, 'PASS, with more seed noise than it allows'),
    ([2.0, 2.0], [2.0, 2.12], 2, False, 3, 38.118, 'WARN, within seed noise'), ([1.0] * 3, [1.02, 1.03, 1.04], 2, False, 3, 2.4843, 'WARN'),
    ([0.3], [0.295], 1, True, -0.5, None, 'PASS'), ([0.3], [0.285], 1, True, -1.5, None, 'WARN'), ([0.3], [0.26], 1, True, -4, None, 'FAIL')])
def test_compare(bf16, eight, allowed, accuracy, gap, noise, verdict):
    row = plot.compare('', bf16, eight, allowed, accuracy)
    assert row['verdict'] == verdict and row['noise'] == (noise if noise is None else pytest.approx(noise, abs=1e-4))
    assert gap is None or row['gap'] == pytest.approx(gap)


def test_steps_to_and_wilson():
    curve = {0: 5.0, 10: 4.0, 20: 2.0, 30: 3.0}
    assert [plot.steps_to(curve, loss) for loss in (6, 4.5, 4, 3, 2, 1)] == [0, 5, 10, 15, 20, None]
    assert plot.wilson(0.5, 100) == pytest.approx([0.4038, 0.5962], abs=1e-4)  # by the textbook: (0.404, 0.596)
