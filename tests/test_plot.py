import json

import pytest

from conftest import run


def write_log(directory, precision, factor, val=True):
    directory.mkdir()
    records = [{'step': 0, 'time': 1.0, 'config': {}}]
    for step in range(1, 11):
        records.append({'step': step, 'train/loss': 5 * factor / step, 'train/tokens_per_sec': 2000.0, 'train/dt_ms': 512.0, 'precision': precision})
        if val and step % 5 == 0:
            records += [{'step': step, 'val/loss': 6 * factor / step}, {'step': step, 'hellaswag/acc_norm': 0.25 * factor}]
    (directory / 'log.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records) + '{"half a li')


def test_loss(tmp_path):
    write_log(tmp_path / 'a', 'bf16', 1), write_log(tmp_path / 'b', 'fp8', 1.01), write_log(tmp_path / 'c', 'fp8', 1, val=False)
    out = run('plot.py', 'loss', tmp_path / 'a', tmp_path / 'b', tmp_path / 'c', '--out', tmp_path / 'loss.png', '--json', tmp_path / 'a.json').stdout
    assert 'a (bf16): validation loss 0.6000 at step 10, median 2,000 tokens/s' in out and 'b (fp8): validation loss 0.6060' in out and 'acc_norm 0.2525' in out
    assert (tmp_path / 'loss.png').read_bytes()[:4] == b'\x89PNG'
    assert json.loads((tmp_path / 'a.json').read_text())['b (fp8)']['val_loss'] == pytest.approx({'5': 1.212, '10': 0.606})
    assert 'no ' in run('plot.py', 'loss', tmp_path, rc=1).stderr
    (tmp_path / 'c' / 'log.jsonl').write_text('')
    assert 'no training step yet' in run('plot.py', 'loss', tmp_path / 'c', rc=2).stderr


@pytest.mark.parametrize('words, rc, message', [
    (['config/gpt2_fp8.py'], 0, 'cosine: 19,073 steps (max_steps=19073), warm-up 715: step 0 8.39e-07, highest 6.00e-04, last 6.00e-05'),
    (['--warmup_steps', '2000', '--total_steps', '1760', '--max_lr', '0.003'], 0, 'MISTAKE: warmup_steps=2000, but the run has 1760 steps'),
    (['--lr_schedul', 'wsd'], 2, 'the nearest is lr_schedule'), (['--lr_schedule=linear', '--max_steps=9'], 2, 'lr_schedule is one of'),
    (['--num_epochs=2', '--dataset=nowhere'], 1, 'no shards in data/nowhere-gpt2')])
def test_lr(tmp_path, words, rc, message):
    done = run('plot.py', 'lr', *words, '--out', tmp_path / 'lr.png', rc=rc)
    assert message in done.stdout + done.stderr and (rc or (tmp_path / 'lr.png').read_bytes()[:4] == b'\x89PNG')
