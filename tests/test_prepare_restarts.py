"""prepare_data.py killed, stopped, short of disk and started again: always the same bytes; then --verify."""
import contextlib
import io
import os
import resource
import signal

import pytest

from fp8gpt import files
from preparing import (
    BYTES, everything, jsonl, killed_here, main_here, meta, prepare_here, refused_here, stopped, texts,
    undisturbed_run)


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp('corpus'))


def is_half(folder):
    """Whether the next run would take it for half prepared, so that no training begins on it."""
    return not (folder / 'meta.json').exists() or (folder / 'progress.json').exists()


def test_stopped_after_any_step_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    """Of a small set, for which a second pass finds documents for validation."""
    monkeypatch.setattr(os, 'fsync', lambda number: None)   # a step like any other, but no disk to wait for
    jsonl(tmp_path / 'a.jsonl', texts(40))
    words = ['mine', f'--data_files={tmp_path}/a.jsonl', BYTES, '--shard_tokens=11_000']
    steps = killed_here(0, *words, f'--data_dir={tmp_path}/whole')
    whole = everything(tmp_path / 'whole' / 'mine-byte')
    assert len(whole) > 3
    for step in range(1, steps + 1, 3):     # of the four that write a file, another each time
        folder = tmp_path / str(step)
        assert killed_here(step, *words, f'--data_dir={folder}') == step
        assert is_half(folder / 'mine-byte') or everything(folder / 'mine-byte') == whole
        prepare_here(*words, f'--data_dir={folder}')
        assert everything(folder / 'mine-byte') == whole, step


def test_other_settings_are_refused_until_overwrite(tmp_path, undisturbed):
    words, folder = [*undisturbed.words, f'--data_dir={tmp_path}'], tmp_path / 'mine-byte'
    killed_here(undisturbed.steps // 2, *words, '--val_fraction=0.5')
    code, message = refused_here(*words)
    assert (code, 'val_fraction 0.5 -> 0.2' in message) == (2, True)
    prepare_here(*words, '--overwrite')
    assert everything(folder) == undisturbed.files
    other = [*words, '--max_tokens=300_000']
    code, message = refused_here(*other)
    assert (code, 'max_tokens 0 -> 300000' in message) == (2, True)
    assert 'already prepared' in prepare_here(*words)
    assert everything(folder) == undisturbed.files
    assert killed_here(12, *other, '--overwrite') == 12
    assert not (folder / 'meta.json').exists()  # it would list shards that are gone
    assert 'going on' in prepare_here(*other, '--overwrite')
    assert 300_000 <= sum(counts['tokens'] for counts in meta(folder)['splits'].values()) < 305_000


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bytes(tmp_path, undisturbed):
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGKILL:
        folder = tmp_path / str(number)
        code, said = stopped(undisturbed.words, folder, number)
        half = is_half(folder / 'mine-byte')      # else it had ended already
        if half and number != signal.SIGKILL:
            assert (code, said.splitlines()[-1][:14]) == (1, 'error: stopped')
            assert 'Traceback' not in said
        assert ('going on' in prepare_here(*undisturbed.words, f'--data_dir={folder}')) == half
        assert everything(folder / 'mine-byte') == undisturbed.files


def test_a_full_disk_is_one_line_and_it_goes_on(tmp_path, undisturbed):
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    # bytes that a file may have: not a note's, not a shard's
    for limit in (200, 100_000):
        words = [*undisturbed.words, f'--data_dir={tmp_path}/{limit}']
        with contextlib.redirect_stderr(io.StringIO()):     # pytest's is a file
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
            try:
                code, message = refused_here(*words)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert code == 1
        assert str(tmp_path) in message
        prepare_here(*words)
        assert everything(tmp_path / str(limit) / 'mine-byte') == undisturbed.files


def test_verify_reads_every_shard_again(tmp_path, undisturbed):
    folder = tmp_path / 'mine-byte'
    folder.mkdir()
    for name, raw in undisturbed.files.items():
        (folder / name).write_bytes(raw)
    words = [*undisturbed.words, '--verify', f'--data_dir={tmp_path}']
    assert 'all shards are as meta.json says' in prepare_here(*words)
    raw = (folder / 'train_000001.bin').read_bytes()
    (folder / 'train_000001.bin').write_bytes(raw[:1500] + bytes([raw[1500] ^ 1]) + raw[1501:])
    assert 'train_000001.bin is damaged: its crc32' in refused_here(*words)[1]


def test_a_second_command_on_a_folder_is_refused_while_the_first_is_at_work(tmp_path):
    jsonl(tmp_path / 'docs.jsonl', texts(30))
    words = ['mine', f'--data_files={tmp_path}/docs.jsonl', BYTES, f'--data_dir={tmp_path}']
    with files.lock(f'{tmp_path}/.mine-byte.lock', ''):
        assert 'another process is making' in refused_here(*words)[1]
        assert not (tmp_path / 'mine-byte').exists()
    main_here(*words)
    assert (tmp_path / 'mine-byte' / 'meta.json').exists()
