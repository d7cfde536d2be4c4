"""The benchmarks work and leave what they promise, on figures that other code knows; speeds are for a quiet
machine."""
import json
import math
import re
import subprocess
import types
from unittest import mock

import pytest
import torch

import bench
from configurator import MachineError, SettingError, configure
from conftest import TINY, run
from fp8gpt.files import write_text
from gpu import steps


def result(tmp_path, name):
    """Return the JSON of a benchmark, which says what produced it."""
    saved = json.loads((tmp_path / f'{name}.json').read_text())
    assert saved['versions']['torch'] and saved['device'] and saved['words'] is not None
    assert re.fullmatch('[0-9a-f]{7,}(-dirty)?|unknown', saved['versions']['commit'])
    return saved


@pytest.mark.slow
def test_pair_and_lora_are_runs_of_train_fp8(tiny, tmp_path):
    words = [*tiny, '--steps=2', '--max_tokens=512', f'--results={tmp_path}']     # of two steps, not five
    out = run('bench.py', 'pair', *words, '--recipes=delayed', '--backends=native,te').stdout
    native, te = result(tmp_path, 'pair-flags')['rows']
    assert 'done: ' in out and 'tensorwise' not in native['recipe']
    assert 0 != abs(native['loss difference, %']) < 1
    assert native['ratio'] == pytest.approx(native['FP8 tokens/s'] / native['bf16 tokens/s'])
    assert re.fullmatch(r'(FP8|train in bf16:|SLOWER) x\d+\.\d\d', native['verdict'])
    assert te == {'backend': 'te', 'recipe': 'delayed', 'verdict': te['verdict']}
    assert te['verdict'].startswith('fp8_backend=te ')
    run('bench.py', 'lora', *words, '--ranks=0,4', '--lora_targets=all', '--fp8_backend=native')
    assert [row['rank'] for row in result(tmp_path, 'lora-flags')['rows'] if row['ratio'] > 0] == ['0', '4']
    assert not list(tmp_path.glob('tmp*'))      # the runs' folders


def test_pair_without_fp8_or_data(tmp_path):
    words = ['pair', *TINY, '--steps=1', '--dataset=nowhere', f'--results={tmp_path}']
    for number, (flags, verdict) in enumerate((
            ([], 'bf16 only: there is no CUDA GPU'),
            (['--fp8_backend=emulate'], 'train_fp8.py failed: its own message says why')), 1):
        with pytest.raises(MachineError, match='nothing was measured'):
            bench.main([*words, *flags])       # the result is not written over
        [row] = result(tmp_path, 'pair-flags' + f'-{number}' * (number > 1))['rows']
        assert row['verdict'].startswith(verdict)
    with pytest.raises(SettingError, match='the nearest is'):
        bench.main([*words, '--batch_sise=2'])


def test_two_benchmarks_at_once_keep_their_results(tmp_path, monkeypatch):
    """The second starts, and ends, while the first measures."""
    words = ['pair', *TINY, '--dataset=nowhere', f'--results={tmp_path}']

    def measured(arguments, _):
        if arguments.steps == 1:
            bench.main([*words, '--steps=2'])
        yield {'steps': arguments.steps, 'ratio': 1.0}

    monkeypatch.setitem(bench.BENCHES, 'pair', measured)
    bench.main([*words, '--steps=1'])
    assert sorted(json.loads(path.read_text())['rows'][0]['steps'] for path in tmp_path.iterdir()) == [1, 2]
    monkeypatch.setitem(bench.BENCHES, 'pair', lambda arguments, _: iter(lambda: 1 / 0, 1))
    with pytest.raises(ZeroDivisionError):
        bench.main([*words, '--steps=1'])
    assert len([*tmp_path.iterdir()]) == 2, 'what measured nothing leaves nothing'


def test_a_killed_matrix_keeps_its_rows_and_memory_ends_one_cell(tmp_path, capsys):
    def measure(end):
        if end:
            raise end
        yield {'ratio': 2.0, 'range': [1.0, 2.5]}

    full = torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB\nand more')
    ends = None, full, KeyboardInterrupt()
    benches = [({'a': number}, measure(end)) for number, end in enumerate(ends, 1)]
    with pytest.raises(KeyboardInterrupt):
        bench.report_rows(benches, str(tmp_path / 'a.json'), {'words': []})
    assert json.loads((tmp_path / 'a.json').read_text()) == {'words': [], 'rows': [
        {'a': 1, 'ratio': 2.0, 'range': [1.0, 2.5]},
        {'a': 2, 'verdict': 'CUDA out of memory. Tried to allocate 9 GiB'}]}
    out = capsys.readouterr().out
    assert '| a | ratio | range |\n| --- | --- | --- |\n| 1 | 2 | 1 .. 2.5 |\n| a | verdict |\n' in out


def test_the_peak_of_steps_counts_those_before_graphs(monkeypatch):
    """A replay allocates nothing, so that after the first one a new peak would lack the activations."""
    done = []
    monkeypatch.setattr(steps, 'DEVICE', torch.device('cuda'))
    monkeypatch.setattr(steps, 'gpu_of', lambda device: None)
    monkeypatch.setattr(steps, 'training', lambda *arguments: done.append)
    monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', lambda: done.append('reset'))
    monkeypatch.setattr(steps.health, 'medians', mock.Mock(side_effect=KeyboardInterrupt))
    words = ['--init_from=gpt2', '--max_steps=9', '--fp8_backend=off', '--compile_model=on']
    with pytest.raises(KeyboardInterrupt):
        steps.measure(words, {'variant': 'bf16'})
    assert done == ['reset', 3]


@pytest.fixture
def scripts(monkeypatch):
    """Replace the training script by one that leaves a log of 20 steps of 512 tokens, evaluated at every
    fifth. Return ([the settings of each run], {(fp8_backend, seed): the last loss})."""
    ran, ends = [], {('off', 1337): 2.0, ('off', 1338): 2.5, ('native', 1337): 2.02, ('native', 1338): 2.55}

    def train(command):
        flags = configure(command[1], command[2:])
        ran.append(flags)
        end = ends[flags['fp8_backend'], flags['seed']]
        lines = [{'step': 0, 'precision': 'bf16', 'val/loss': 5.0}]
        for step in range(1, 21):
            speed = 50.0 * step     # from the 4th on, the median is 600; of all, 525
            lines.append({'step': step, 'train/loss': end + (20 - step), 'train/dt_ms': 512e3 / speed,
                          'train/tokens_per_sec': speed, 'train/tokens': 512 * step})
            if step % 5 == 0:
                val_loss = end + 0.1 * (20 - step) / 5
                lines.append({'step': step, 'val/loss': val_loss, 'hellaswag/acc_norm': end / 10})
        lines.append({'step': 20, 'finished': True})
        write_text(flags['checkpoint_dir'] + '/log.jsonl', '\n'.join(map(json.dumps, lines)))
        return subprocess.CompletedProcess(command, 0)
    bench.whole_run.cache_clear()
    monkeypatch.setattr(bench, 'subprocess', types.SimpleNamespace(run=train))
    return ran, ends


def test_pair_says_what_the_logs_say_of_the_steps_after_the_first(scripts, tiny, tmp_path):
    ran, _ = scripts
    bench.main(['pair', *tiny, '--steps=17', '--fp8_backend=native', f'--results={tmp_path}'])
    [row] = result(tmp_path, 'pair-flags')['rows']
    assert row == {
        'backend': 'native', 'recipe': 'tensorwise', 'bf16 loss': 2.0, 'FP8 loss': 2.02, 'bf16 GB': None,
        'FP8 GB': None, 'bf16 tokens/s': 600.0, 'FP8 tokens/s': 600.0, 'ratio': 1.0,
        'verdict': 'train in bf16: x1.00', 'loss difference, %': pytest.approx(1)}
    said = [bench.gain({'bf16': took, 'FP8': 1.0})['verdict'] for took in (0.9, 1.04, 1.05)]
    assert said == ['SLOWER x0.90', 'train in bf16: x1.04', 'FP8 x1.05']
    assert [(flags['fp8_backend'], flags['max_steps'], flags['log_freq']) for flags in ran] == [
        ('off', 20, 1), ('native', 20, 1)]


def test_quality_compares_what_the_logs_say(scripts, tiny, tmp_path, capsys):
    ran, ends = scripts
    words = ['quality', *tiny, '--steps=20', '--seeds=2', '--eval_freq=5', f'--out={tmp_path}/runs',
             f'--results={tmp_path}', '--max_tokens=512', '--num_epochs=1']
    with pytest.raises(MachineError, match='bf16 only: there is no CUDA GPU'):
        bench.main(words)
    assert ran == []
    with pytest.raises(bench.Undecided, match='validation loss: INCONCLUSIVE$') as refusal:
        bench.main([*words, '--fp8_backend=native'])
    assert refusal.value.exit_code == 4
    [row] = result(tmp_path, 'quality-flags-2')['rows']
    of_last_steps = 100 * (2.52 / 2.5 - 1), 100 * (3.05 / 3 - 1)
    expected = {'seeds': 2, 'bf16 validation loss': 2.25, 'FP8 validation loss': 2.285,
                'gap, %': 1.5,      # 1 and 2 %
                'training loss gap, %': sum(of_last_steps) / 2, 'HellaSwag gap, points': 0.35}
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row['95%'] == pytest.approx([1.5 - 12.706 * 0.5, 1.5 + 12.706 * 0.5])
    assert [*row['curve'].values()][-1] == [row['gap, %'], row['95%']]
    assert [*row['curve']] == ['0', '2560', '5120', '7680', '10240']
    assert [(run['fp8_backend'], run['seed']) for run in ran] == [*ends]
    said = capsys.readouterr().out
    assert 'max_tokens is not used: --steps decides' in said and 'max_hours is' not in said
    settings = 'max_steps', 'eval_freq', 'max_hours', 'max_tokens', 'num_epochs', 'keep_checkpoints'
    assert {tuple(run[name] for name in settings) for run in ran} == {(20, 5, 0, 0, 0, 1)}

    bench.whole_run.cache_clear()
    ends |= {('native', 1337): 2.24, ('native', 1338): 2.8}
    with pytest.raises(MachineError, match='FAIL: validation loss in FP8 is worse'):
        bench.main([*words, '--fp8_backend=native', '--recipes=tensorwise,rowwise'])
    # both rows have the same runs in bf16
    assert [(run['fp8_backend'], run['fp8_recipe']) for run in ran[4:]] == [
        ('off', 'auto')] * 2 + [('native', 'tensorwise')] * 2 + [('native', 'rowwise')] * 2


def test_verdicts():
    wrong = []
    for bf16, eight, gap, verdict in (
            ([2.0, 4.0], [2.008, 4.016], 0.4, 'PASS'),
            ([2.0, 4.0], [2.02, 4.04], 1, 'WARN, worse by 0.5% to 2%'),
            ([2.0, 4.0], [2.06, 4.12], 3, 'FAIL'),
            ([2.0], [2.22], 11, 'INCONCLUSIVE, one seed'),
            ([1.0] * 3, [1.009, 1.01, 1.011], 1, 'WARN, worse by 0.5% to 2%'),
            ([1.0] * 3, [1.0, 1.001, 1.008], 0.3, 'WARN, not more than 2% worse'),
            ([1.0] * 3, [1.02, 1.03, 1.04], 3, 'FAIL'),
            ([1.0] * 3, [0.99, 1.0, 1.01], 0, 'INCONCLUSIVE'),
            ([2.0], [math.nan], math.nan, 'FAIL')):
        found, interval = bench.compare(bf16, eight)
        made = bench.loss_verdict(found, interval)
        wrong += [(made, found)] * (made != verdict or found != pytest.approx(gap, nan_ok=True))
    assert wrong == []
    textbook = {1: 12.706, 4: 2.776, 10: 2.228, 11: 2.201, 15: 2.131, 30: 2.042, 120: 1.980}
    assert {freedom: round(bench.t95(freedom), 3) for freedom in textbook} == textbook
