"""`make install`, with a pip that is pretended, and `make shakespeare`, which is only listed."""
import shutil
import subprocess

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path):
    """make(*words): the lines that it prints in a folder whose .venv is ready."""
    shutil.copy(ROOT / 'Makefile', tmp_path)
    (tmp_path / '.venv').mkdir()
    for name in 'requirements.txt', '.venv/ready':
        (tmp_path / name).touch()

    def made(*words):
        # make test runs this: a make under a make names the folders that it enters, unless told not to
        words = ['make', '--no-print-directory', *words]
        done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=True)
        return done.stdout.splitlines()
    return made


def test_transformer_engine_is_left_out_where_it_does_not_install(make, tmp_path):
    for gpu, refused, told in (
            ('yes', 'requirements-te.txt', 'Transformer Engine does not install here and is left out'),
            ('yes', 'nothing', ''), ('', 'requirements-te.txt', 'no NVIDIA GPU answers')):
        (tmp_path / 'pip').write_text(f'echo "$@" >> asked{gpu}\n[[ "$*" != *{refused}* ]]\n')
        said = ''.join(line for line in make('install', f'GPU={gpu}', 'PIP=bash pip') if line[:4] != 'bash')
        assert said.startswith(told) and bool(said) == bool(told)
        asked = (tmp_path / f'asked{gpu}').read_text()
        assert ('pytest' in asked, 'requirements-te.txt' in asked) == (True, bool(gpu))


def test_shakespeare_takes_a_local_text(make):
    command = '.venv/bin/python prepare_data.py shakespeare --tokenizer=byte'
    assert make('-n', 'shakespeare')[0].rstrip() == command
    assert make('-n', 'shakespeare', 'DATA_FILES=a/input.txt')[0] == f"{command} --data_files='a/input.txt'"
