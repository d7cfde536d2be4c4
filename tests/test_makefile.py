"""`make install`, with a pip that is pretended, and `make shakespeare`, which is only listed."""
import shutil
import subprocess

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize('gpu, refused, told', [
    ('yes', 'requirements-te.txt', 'Transformer Engine does not install here and is left out'),
    ('yes', 'nothing', ''),
    ('', 'requirements-te.txt', 'no NVIDIA GPU answers'),
])
def test_transformer_engine_is_left_out_where_it_does_not_install(gpu, refused, told, tmp_path):
    shutil.copy(ROOT / 'Makefile', tmp_path)
    (tmp_path / '.venv').mkdir()
    (tmp_path / 'requirements.txt').touch()
    (tmp_path / '.venv' / 'ready').touch()
    (tmp_path / 'pip').write_text(f'echo "$@" >> asked\n[[ "$*" != *{refused}* ]]\n')
    # make test runs this: a make under a make names the folders that it enters, unless told not to
    words = ['make', '--no-print-directory', 'install', f'GPU={gpu}', 'PIP=bash pip']
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith('bash')]
    assert ''.join(said)[:len(told) or None] == told
    asked = (tmp_path / 'asked').read_text()
    assert 'pytest' in asked
    assert ('requirements-te.txt' in asked) == bool(gpu)


@pytest.mark.parametrize('words, flag', [
    ([], ''),
    (['DATA_FILES=a/input.txt'], "--data_files='a/input.txt'"),
])
def test_shakespeare_takes_a_local_text(words, flag, tmp_path):
    shutil.copy(ROOT / 'Makefile', tmp_path)
    (tmp_path / '.venv').mkdir()
    (tmp_path / 'requirements.txt').touch()
    (tmp_path / '.venv' / 'ready').touch()
    make = ['make', '--no-print-directory', '-n', 'shakespeare', *words]
    done = subprocess.run(make, cwd=tmp_path, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[0].rstrip() == (
        f'.venv/bin/python prepare_data.py shakespeare --tokenizer=byte {flag}'.rstrip())
