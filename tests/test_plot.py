"""Pictures of runs and schedules, and the lines that are printed beside them."""
import json

import pytest

import plot
from configurator import SettingError, UserError
from conftest import ROOT

PNG = b'\x89PNG'


def write_log(directory, precision, factor, val=True, speed=1.0):
    """Ten steps whose losses are `factor` times those of a run with 1; the last line is cut off."""
    directory.mkdir()
    records = [{'step': 0, 'time': 1.0, 'config': {}}]
    for step in range(1, 11):
        records.append({
            'step': step,
            'train/loss': 5 * factor / step,
            'train/tokens_per_sec': 2000.0 * speed,
            'train/dt_ms': 512.0 / speed,
            'precision': precision,
        })
        if val and step % 5 == 0:
            records.append({'step': step, 'val/loss': 6 * factor / step})
            records.append({'step': step, 'hellaswag/acc_norm': 0.25 * factor})
    lines = ''.join(json.dumps(record) + '\n' for record in records)
    (directory / 'log.jsonl').write_text(lines + '{"half a li')


def test_loss(tmp_path, capsys):
    write_log(tmp_path / 'a', 'bf16', 1)
    write_log(tmp_path / 'b', 'fp8', 1.01)
    write_log(tmp_path / 'c', 'fp8', 1, val=False)
    runs = tmp_path / 'a', tmp_path / 'b', tmp_path / 'c'
    files = '--out', tmp_path / 'loss.png', '--json', tmp_path / 'a.json'
    plot.main(['loss', *map(str, [*runs, *files])])
    out = capsys.readouterr().out
    assert 'a (bf16): validation loss 0.6000 at step 10, median 2,000 tokens/s' in out
    assert 'b (fp8): validation loss 0.6060' in out
    assert 'acc_norm 0.2525' in out
    assert (tmp_path / 'loss.png').read_bytes()[:4] == PNG
    found = json.loads((tmp_path / 'a.json').read_text())
    assert found['b (fp8)']['val_loss'] == pytest.approx({'5': 1.212, '10': 0.606})


def test_a_faster_run_is_inside_the_axes(tmp_path, monkeypatch):
    write_log(tmp_path / 'a', 'bf16', 1)
    write_log(tmp_path / 'b', 'fp8', 1.01, speed=1.2)
    figures = []
    monkeypatch.setattr(plot, 'finish_figure', lambda figure, out: figures.append(figure))
    plot.main(['loss', str(tmp_path / 'a'), str(tmp_path / 'b'), f'--out={tmp_path}/loss.png'])
    figures[0].canvas.draw()
    axes = {axes.get_label(): axes for axes in figures[0].axes}
    for panel in axes.values():
        for line in panel.lines:
            points = panel.transData.transform(line.get_xydata())
            assert all(panel.bbox.contains(*point) for point in points), panel.get_label()
    assert axes['speed'].get_xlim() == axes['distance'].get_xlim()
    fast, = {max(line.get_ydata()) for line in axes['speed'].lines} - {2000.0}
    assert fast == 2400
    ends = {line.get_xdata()[-1] for line in axes['hours'].lines}
    assert sorted(ends) == pytest.approx([10 * 0.512 / 1.2 / 3600, 10 * 0.512 / 3600])
    assert {round(line.get_xdata()[-1], 5) for line in axes['loss'].lines} == {0.01024}


def test_folders_of_one_name_are_two_runs(tmp_path):
    runs = [tmp_path / name / 'checkpoints' for name in 'ab']
    for factor, directory in enumerate(runs, 1):
        directory.parent.mkdir()
        write_log(directory, 'fp8', factor)
    files = f'--out={tmp_path}/loss.png', f'--json={tmp_path}/a.json'
    plot.main(['loss', *map(str, runs), *files])
    found = json.loads((tmp_path / 'a.json').read_text())
    assert list(found) == [f'{directory} (fp8)' for directory in runs]


def test_a_run_without_a_look_at_fp8(tmp_path):
    write_log(tmp_path / 'a', 'bf16', 1)
    with pytest.raises(SettingError, match='no look at FP8 tensors: --fp8_stats_freq'):
        plot.main(['health', str(tmp_path / 'a')])


def test_a_heat_map_has_a_row_a_layer():
    axes = plot.heat_map({('a', 'input'): 30.0, ('a', 'grad'): 20.0, ('b', 'input'): 31.0}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ['a', 'b']
    assert axes.images[0].get_array().filled(-1).tolist() == [[30, 20], [31, -1]]


def test_a_folder_without_a_run_or_a_step(tmp_path):
    with pytest.raises(UserError, match='no ') as refusal:
        plot.main(['loss', str(tmp_path)])
    assert refusal.value.exit_code == 1
    (tmp_path / 'log.jsonl').write_text('')
    with pytest.raises(SettingError, match='no training step yet') as refusal:
        plot.main(['loss', str(tmp_path)])
    assert refusal.value.exit_code == 2


LR = {
    'config/gpt2_fp8.py':
        'cosine: 19,073 steps (max_steps=19073), warm-up 715: '
        'step 0 8.39e-07, highest 6.00e-04, last 6.00e-05',
    '--warmup_steps 2000 --total_steps 1760 --max_lr 0.003':
        'MISTAKE: warmup_steps=2000, but the run has 1760 steps',
}
LR_REFUSED = {
    '--lr_schedul wsd': (2, 'the nearest is lr_schedule'),
    '--num_epochs=2 --dataset=nowhere': (1, 'no shards in data/nowhere-gpt2'),
}


def test_lr(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for line, message in LR.items():
        plot.main(['lr', *line.split(), f'--out={tmp_path}/lr.png'])
        assert message in capsys.readouterr().out
        assert (tmp_path / 'lr.png').read_bytes()[:4] == PNG
    for line, (exit_code, message) in LR_REFUSED.items():
        with pytest.raises(UserError, match=message) as refusal:
            plot.main(['lr', *line.split(), f'--out={tmp_path}/lr.png'])
        assert refusal.value.exit_code == exit_code
