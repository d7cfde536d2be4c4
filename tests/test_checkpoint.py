import os
import time

import pytest
import torch

import checkpoint
from checkpoint import find, load, save, start, steps_in, table


def state(step, **extra):
    return {'step': step, 'tokens': step * 10, 'best_val_loss': 1.5, 'weights': {'w': torch.arange(1000.) + step}, 'precision': {'name': 'fp8'}, **extra}


def test_names_links_and_keep(tmp_path):
    d = str(tmp_path)
    for step in (10, 20, 30, 40):
        save(d, state(step), keep=2, best=step == 20)
    assert [os.path.basename(p) for p in steps_in(d)] == ['step_000030.pt', 'step_000040.pt']
    assert os.path.samefile(f'{d}/latest.pt', f'{d}/step_000040.pt') and load(f'{d}/best_model.pt')['step'] == 20
    assert not list(tmp_path.glob('*.tmp'))
    save(d, state(40), keep=1, best=True)  # the same step again, as best
    assert os.path.samefile(f'{d}/best_model.pt', f'{d}/latest.pt') and len(steps_in(d)) == 1 and not list(tmp_path.glob('*.tmp'))
    save(d, state(50), keep=0)
    assert len(steps_in(d)) == 2


def test_copies_where_links_fail(tmp_path, monkeypatch):
    def no_links(*args):
        raise OSError('not supported')
    monkeypatch.setattr(os, 'link', no_links)
    save(str(tmp_path), state(1), keep=1, best=True)
    save(str(tmp_path), state(2), keep=1)
    assert load(str(tmp_path / 'latest.pt'))['step'] == 2 and load(str(tmp_path / 'best_model.pt'))['step'] == 1


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    save(str(tmp_path), state(1), keep=1)
    real = torch.save
    def full(state, file):
        real({'half': 1}, file)
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='could not write .*step_000002.pt .*No space left'):
        save(str(tmp_path), state(2), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['latest.pt', 'step_000001.pt'] and load(str(tmp_path / 'latest.pt'))['step'] == 1


@pytest.mark.parametrize('spoil', ['flip', 'truncate', 'empty', 'text'])
def test_damage_is_found_and_the_one_before_named(tmp_path, spoil):
    save(str(tmp_path), state(1), keep=0)
    save(str(tmp_path), state(2), keep=0)
    path = tmp_path / 'step_000002.pt'
    raw = bytearray(path.read_bytes())
    if spoil == 'flip':
        at = raw.find(torch.arange(2., 50.).numpy().tobytes())
        raw[at + 20] ^= 1
    path.write_bytes({'flip': raw, 'truncate': raw[:-100], 'empty': b'', 'text': b'hello'}[spoil])
    with pytest.raises(OSError, match='step_000002.pt is damaged .*; the one before it is .*step_000001.pt'):
        load(str(path))
    assert 'step_000002.pt' in '\n'.join(table(str(tmp_path)))


def test_find(tmp_path):
    d = str(tmp_path)
    assert find('', d) is None and find('auto', d) is None
    for resume in ('latest', 'best', f'{d}/step_000001.pt'):
        with pytest.raises(FileNotFoundError, match=f'resume={resume}'):
            find(resume, d)
    save(d, state(1), keep=1, best=True)
    assert find('auto', d) == find('latest', d) == f'{d}/latest.pt' and find('best', d) == f'{d}/best_model.pt'


def test_start_protects_earlier_runs(tmp_path):
    d, other = str(tmp_path / 'a'), str(tmp_path / 'b')
    start(d, None, 0, False).close()
    for step in (1, 2, 3):
        save(d, state(step), keep=0)
    with pytest.raises(ValueError, match='an earlier run, step_000003.pt.*--overwrite'):
        start(d, None, 0, False)
    start(d, f'{d}/latest.pt', 3, False).close()
    with pytest.raises(ValueError, match='later checkpoints, step_000003.pt'):
        start(d, f'{d}/step_000002.pt', 2, False)
    start(d, f'{d}/step_000002.pt', 2, True).close()
    assert [os.path.basename(p) for p in steps_in(d)] == ['step_000001.pt', 'step_000002.pt']
    start(other, f'{d}/step_000002.pt', 2, False).close()  # a branch elsewhere
    save(other, state(2), keep=0)
    with pytest.raises(ValueError, match='an earlier run'):
        start(other, f'{d}/step_000002.pt', 2, False)


def test_one_run_per_directory(tmp_path):
    held = start(str(tmp_path), None, 0, False)
    with pytest.raises(OSError, match='another run is writing'):
        start(str(tmp_path), None, 0, False)
    held.close()
    start(str(tmp_path), None, 0, False).close()


def test_room(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.shutil, 'disk_usage', lambda d: type('usage', (), {'free': 3.5e9}))
    assert checkpoint.room_warning(str(tmp_path), 1e9, 2) == 'disk: checkpoints here may take 4.0 GB, 3.5 GB are free'
    assert checkpoint.room_warning(str(tmp_path), 1e9, 1) is None


def test_table(tmp_path):
    assert table(str(tmp_path)) == [f'no checkpoints in {tmp_path}']
    save(str(tmp_path), state(7), keep=1)
    (tmp_path / 'odd.pt').write_text('not one')
    lines = table(str(tmp_path))
    assert len(lines) == 3 and 'step      7' in lines[2] and '1.5000' in lines[2] and time.strftime('%Y') in lines[2] and 'cannot be read' in lines[1]
