"""Pictures of runs and schedules, and the lines that are printed beside them."""
import json
import re

import matplotlib.pyplot as plt
import pytest

from conftest import ROOT, refused
from fp8gpt.runlog import RunCurves

PNG = b'\x89PNG'


def write_log(directory, precision, factor, val=True, speed=1.0):
    """Ten steps whose losses are `factor` times those of a run with 1; the last line is cut off."""
    directory.mkdir()
    records = [{'step': 0, 'time': 1.0, 'config': {'max_lr': factor, 'checkpoint_dir': str(directory)}}]
    for step in range(1, 11):
        speeds = {'train/tokens_per_sec': 2000.0 * speed, 'train/dt_ms': 512.0 / speed}
        records.append({'step': step, 'train/loss': 5 * factor / step, 'precision': precision, **speeds})
        if val and step % 5 == 0:
            records.append({'step': step, 'val/loss': 6 * factor / step})
            records.append({'step': step, 'hellaswag/acc_norm': 0.25 * factor})
    lines = ''.join(json.dumps(record) + '\n' for record in records)
    (directory / 'log.jsonl').write_text(lines + '{"half a li')


def test_loss(tmp_path, here, monkeypatch):
    """The second run is 20% faster, the third has no validation loss. The curves end at the same tokens."""
    runs, seen = [tmp_path / name for name in 'abc'], []
    write_log(runs[0], 'bf16', 1)
    write_log(runs[1], 'fp8', 1.01, speed=1.2)
    write_log(runs[2], 'fp8', 1, val=False)
    monkeypatch.setattr(plt, 'close', seen.append)
    out = here('plot.py', 'loss', *runs, f'--out={tmp_path}/loss.png', f'--json={tmp_path}/a.json')
    assert 'a (bf16): validation loss 0.6000 at step 10, median 2,000 tokens/s' in out
    assert 'b (fp8): validation loss 0.6060 at step 10, median 2,400 tokens/s' in out
    assert 'acc_norm 0.2525\n  unlike the first: max_lr=1.01\n' in out and out.count('unlike') == 1
    assert (tmp_path / 'loss.png').read_bytes()[:4] == PNG
    found = json.loads((tmp_path / 'a.json').read_text())
    assert list(found) == [f'{runs[0]} (bf16)', f'{runs[1]} (fp8)', f'{runs[2]} (fp8)']
    assert found[f'{runs[1]} (fp8)']['val_loss'] == pytest.approx({'5': 1.212, '10': 0.606})
    assert found[f'{runs[1]} (fp8)']['val_loss_percent_from_first'] == pytest.approx({'5': 1, '10': 1})
    ends = [line.get_xdata()[-1:] for line in seen[-1].axes[0].lines]
    assert {round(end.item(), 5) for end in ends if len(end)} == {0.01024}      # 10 steps of 1,024 tokens


def test_distances_are_at_the_same_tokens(tmp_path, here):
    """The second run has steps of twice the tokens, and at the same tokens a loss that is 1% higher."""
    for name, tokens, loss in ('a', 100, lambda seen: 600 / seen), ('b', 200, lambda seen: 606 / seen):
        rows = [{'step': step, 'val/loss': loss(step * tokens), 'train/loss': loss(step * tokens),
                 'train/tokens': step * tokens, 'train/dt_ms': 1e3, 'train/tokens_per_sec': tokens}
                for step in range(1, 5)]
        (tmp_path / name).mkdir()
        (tmp_path / name / 'log.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    for first, other, distances in ('a', 'b', {'1': 1, '2': 1}), ('b', 'a', {'2': -1 / 1.01, '4': -1 / 1.01}):
        here('plot.py', 'loss', tmp_path / first, tmp_path / other, f'--out={tmp_path}/loss.png',
             f'--json={tmp_path}/loss.json')
        found = json.loads((tmp_path / 'loss.json').read_text())[f'{tmp_path / other} (None)']
        assert found['val_loss_percent_from_first'] == pytest.approx(distances)


def test_tokens_are_those_that_were_seen(tmp_path):
    """Steps of 100 tokens up to step 20, then of 50, each at a speed of its own, also of an even number of
    lines, whose median is of no step."""
    seconds = {1: 0.5, 10: 0.11, 20: 0.1, 30: 0.07, 40: 0.04, 50: 0.09}
    rows = [{'step': step, 'train/loss': 3.0, 'train/dt_ms': 1e3 * took,
             'train/tokens_per_sec': (100 if step <= 20 else 50) / took,
             'train/tokens': 100 * min(step, 20) + 50 * max(0, step - 20)} for step, took in seconds.items()]
    for lines in 5, 6:
        (tmp_path / 'log.jsonl').write_text('\n'.join(map(json.dumps, rows[:lines])))
        run, last = RunCurves(str(tmp_path)), 10 * lines - 10
        found = [run.tokens_at(step) for step in (0, 4, 10, 15, 20, 25, 40, last + 2)]
        assert found == [0, 400, 1000, 1500, 2000, 2250, 3000, 1100 + 50 * last]
        assert run.tokens == 50
        assert all(row.flags.contiguous for row in run.seen)    # else half a million lines take ten minutes


def test_losses_on_other_text_are_said_not_to_compare(tmp_path, here):
    for name, crc in ('a', 1), ('b', 1), ('c', 2):
        write_log(tmp_path / name, 'bf16', 1)
        with open(tmp_path / name / 'log.jsonl') as file:
            lines = file.readlines()
        lines[0] = json.dumps(json.loads(lines[0]) | {'data': {'val_000000.bin': [5000, crc]}}) + '\n'
        (tmp_path / name / 'log.jsonl').write_text(''.join(lines))
    for other, said in ('b', 0), ('c', 1):
        out = here('plot.py', 'loss', tmp_path / 'a', tmp_path / other, f'--out={tmp_path}/x.png')
        assert out.count('measured on other data than the first') == said


def test_a_folder_without_a_step_is_refused_in_one_line(tmp_path):
    code, said = refused('plot.py', 'loss', tmp_path)
    assert code == 1 and f'no {tmp_path}/log.jsonl' in said
    (tmp_path / 'log.jsonl').write_text('{"step": 0, "val/loss": 5.5}\n')
    assert 'holds no training step yet' in refused('plot.py', 'loss', tmp_path)[1]
    (tmp_path / 'log.jsonl').write_text('{"step": 1, "train/loss": "much"}\n')
    assert refused('plot.py', 'loss', tmp_path) == (
        1, "train/loss of a log is no number: could not convert string to float: 'much'")


def test_the_pictures_of_the_pages_have_their_scripts(tmp_path, here, one_run):
    """The gradient is the loss's, so its scale is e5m2's largest number over its amax."""
    for name in 'gap', 'formats':
        said = f'plot.py draws no {name}: docs/fp8_{name}.py does, and says how at its top'
        assert refused('plot.py', name, 'a.json') == (2, said)
    here('docs/fp8_gap.py', ROOT / 'results/quality-quickstart.json', tmp_path / 'gap.png')
    _, mean = plt.gcf().axes[0].lines
    assert mean.get_xydata()[-1] == pytest.approx([1.024, 0.2256], rel=1e-3)     # as docs/fp8.md says
    out = here('docs/fp8_formats.py', one_run('train.py')[0] / 'latest.pt', tmp_path / 'formats.png')
    amax, scale, largest = re.search(r'amax (\S+),[^$]*scale, (\S+): amax (\S+),', out).groups()
    digits = 0.5e-2     # three digits: half of the last, of 1.00
    assert float(scale) * float(amax) == pytest.approx(57344, rel=(1 + digits)**2 - 1)
    assert float(largest) == pytest.approx(57344, rel=digits) and '0.0% become 0' in out
    for name in 'gap', 'formats':
        assert (tmp_path / f'{name}.png').read_bytes()[:4] == PNG
    plt.close('all')


def test_lr(tmp_path, here):
    out = f'--out={tmp_path}/lr.png'
    assert ('cosine: 19,073 steps (max_steps=19073), warm-up 715: step 0 8.39e-07, highest 6.00e-04, last '
            '6.00e-05') in here('plot.py', 'lr', f'{ROOT}/config/gpt2_fp8.py', out)
    assert (tmp_path / 'lr.png').read_bytes()[:4] == PNG
    code, said = refused('plot.py', 'lr', '--warmup_steps=2000', '--max_steps=1760', out)
    assert code == 2 and 'warmup_steps=2000, but the run has 1760 steps' in said
    code, said = refused('plot.py', 'lr', '--num_epochs=2', '--dataset=nowhere', out)
    assert code == 1 and 'no shards in data/nowhere-gpt2' in said
