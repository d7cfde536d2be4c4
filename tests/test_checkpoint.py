import os
import time
import types

import pytest
import torch

import checkpoint
from checkpoint import find, load, save, start, steps_in, table


def state(step):
    return {
        'step': step,
        'tokens': step * 10,
        'best_val_loss': 1.5,
        'weights': {'w': torch.arange(1000.) + step},
        'precision': {'name': 'fp8'},
    }


@pytest.fixture
def folder(tmp_path):
    """A checkpoint_dir, as the scripts give it."""
    return str(tmp_path)


def names(folder):
    """Of the step files."""
    return [os.path.basename(path) for path in steps_in(folder)]


def test_names_links_and_keep(folder, tmp_path):
    for step in (10, 20, 30, 40):
        save(folder, state(step), keep=2, best=step == 20)
    assert names(folder) == ['step_000030.pt', 'step_000040.pt']
    assert os.path.samefile(f'{folder}/latest.pt', f'{folder}/step_000040.pt')
    assert load(f'{folder}/best_model.pt')['step'] == 20
    assert not list(tmp_path.glob('*.tmp'))
    save(folder, state(40), keep=1, best=True)  # the same step again, as best
    assert os.path.samefile(f'{folder}/best_model.pt', f'{folder}/latest.pt')
    assert len(steps_in(folder)) == 1
    assert not list(tmp_path.glob('*.tmp'))
    save(folder, state(50), keep=0)
    assert len(steps_in(folder)) == 2


def test_a_best_model_found_after_its_save_is_a_link_that_knows_its_loss(folder):
    save(folder, state(10), keep=1)
    written = os.stat(f'{folder}/step_000010.pt')
    save(folder, {**state(10), 'best_val_loss': 1.2}, keep=1, best=True)
    assert os.stat(f'{folder}/best_model.pt').st_ino == written.st_ino
    assert os.stat(f'{folder}/best_model.pt').st_mtime_ns == written.st_mtime_ns
    assert load(f'{folder}/best_model.pt')['best_val_loss'] == 1.2
    assert load(f'{folder}/latest.pt')['best_val_loss'] == 1.2
    assert 'best val loss  1.2000' in table(folder)[0]


def test_a_later_best_loss_says_nothing_of_an_earlier_step(folder):
    save(folder, state(10), keep=0)
    save(folder, {**state(20), 'best_val_loss': 1.2}, keep=0, best=True)
    assert load(f'{folder}/step_000010.pt')['best_val_loss'] == 1.5


def test_a_kill_before_the_best_model_has_its_name_leaves_the_one_before(folder, monkeypatch):
    save(folder, {**state(10), 'best_val_loss': 1.4}, keep=1, best=True)
    save(folder, {**state(20), 'best_val_loss': 1.4}, keep=1)
    real = checkpoint._link

    def killed(path, name):
        if name.endswith('best_model.pt'):
            raise KeyboardInterrupt
        real(path, name)
    monkeypatch.setattr(checkpoint, '_link', killed)
    with pytest.raises(KeyboardInterrupt):
        save(folder, {**state(20), 'best_val_loss': 1.2}, keep=1, best=True)
    assert load(f'{folder}/best_model.pt')['step'] == 10
    assert load(f'{folder}/latest.pt')['best_val_loss'] == 1.4


def test_a_damaged_best_model_does_not_keep_the_latest_from_being_read(folder, tmp_path):
    save(folder, {**state(10), 'best_val_loss': 1.2}, keep=1, best=True)
    save(folder, state(20), keep=1)
    (tmp_path / 'best_model.pt').write_bytes(b'hello')
    assert load(f'{folder}/latest.pt')['best_val_loss'] == 1.5


def test_a_new_run_forgets_the_best_loss_of_the_one_before(folder, tmp_path):
    save(folder, state(10), keep=1, best=True)
    start(folder, None, 0, True).close()
    assert not (tmp_path / 'best_model.json').exists()


def test_what_could_not_be_loaded_is_not_saved(folder):
    from torchao.optim.subclass_8bit import OptimState8bit
    moments = OptimState8bit.zeros((16, 256))
    with pytest.raises(TypeError, match=r"state\['optimizer'\]\['w'\]\['exp_avg'\] is of .*OptimState8bit"):
        save(folder, {**state(1), 'optimizer': {'w': {'exp_avg': moments}}}, keep=0)
    with pytest.raises(TypeError, match=r"state\['shapes'\]\[1\] is of .*set"):
        save(folder, {**state(1), 'shapes': [1, {2}]}, keep=0)
    assert not steps_in(folder)


def test_copies_where_links_fail(folder, monkeypatch):
    def no_links(*args):
        raise OSError('not supported')
    monkeypatch.setattr(os, 'link', no_links)
    save(folder, state(1), keep=1, best=True)
    save(folder, state(2), keep=1)
    assert load(f'{folder}/latest.pt')['step'] == 2
    assert load(f'{folder}/best_model.pt')['step'] == 1


def test_a_failed_write_leaves_what_was_there(folder, monkeypatch):
    save(folder, state(1), keep=1)
    real = torch.save

    def full(state, file):
        real({'half': 1}, file)
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='could not write .*step_000002.pt .*No space left'):
        save(folder, state(2), keep=1)
    assert sorted(os.listdir(folder)) == ['latest.pt', 'step_000001.pt']
    assert load(f'{folder}/latest.pt')['step'] == 1


def flip(raw):
    """One bit of a weight."""
    spoilt = bytearray(raw)
    at = raw.find(torch.arange(2., 50.).numpy().tobytes())
    spoilt[at + 20] ^= 1
    return spoilt


@pytest.mark.parametrize('spoil', [
    pytest.param(flip, id='flip'),
    pytest.param(lambda raw: raw[:-100], id='truncate'),
    pytest.param(lambda raw: b'', id='empty'),
    pytest.param(lambda raw: b'hello', id='text'),
])
def test_damage_is_found_and_the_one_before_named(folder, tmp_path, spoil):
    save(folder, state(1), keep=0)
    save(folder, state(2), keep=0)
    path = tmp_path / 'step_000002.pt'
    path.write_bytes(spoil(path.read_bytes()))
    message = 'step_000002.pt is damaged .*; the one before it is .*step_000001.pt'
    with pytest.raises(OSError, match=message):
        load(str(path))
    assert 'step_000002.pt' in '\n'.join(table(folder))


def test_find(folder):
    assert find('', folder) is None
    assert find('auto', folder) is None
    for resume in ('latest', 'best', f'{folder}/step_000001.pt'):
        with pytest.raises(FileNotFoundError, match=f'resume={resume}'):
            find(resume, folder)
    save(folder, state(1), keep=1, best=True)
    assert find('auto', folder) == f'{folder}/latest.pt'
    assert find('latest', folder) == f'{folder}/latest.pt'
    assert find('best', folder) == f'{folder}/best_model.pt'


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
    assert names(d) == ['step_000001.pt', 'step_000002.pt']
    start(other, f'{d}/step_000002.pt', 2, False).close()  # a branch elsewhere
    save(other, state(2), keep=0)
    with pytest.raises(ValueError, match='an earlier run'):
        start(other, f'{d}/step_000002.pt', 2, False)


def test_one_run_per_directory(folder):
    held = start(folder, None, 0, False)
    with pytest.raises(OSError, match='another run is writing'):
        start(folder, None, 0, False)
    held.close()
    start(folder, None, 0, False).close()


def test_room(folder, monkeypatch):
    usage = types.SimpleNamespace(free=3.5e9)
    monkeypatch.setattr(checkpoint.shutil, 'disk_usage', lambda d: usage)
    line = checkpoint.room_warning(folder, 1e9, 2)
    assert line == 'disk: checkpoints here may take 4.0 GB, 3.5 GB are free'
    assert checkpoint.room_warning(folder, 1e9, 1) is None


def test_table(folder, tmp_path):
    assert table(folder) == [f'no checkpoints in {folder}']
    save(folder, state(7), keep=1)
    (tmp_path / 'odd.pt').write_text('not one')
    lines = table(folder)
    assert len(lines) == 3
    assert 'step      7' in lines[2]
    assert '1.5000' in lines[2]
    assert time.strftime('%Y') in lines[2]
    assert 'cannot be read' in lines[1]
