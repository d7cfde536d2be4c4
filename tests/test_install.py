"""`make install` with a pip that is pretended, and `pip install .`:
FP8 for any nn.Module, in a folder whose modules are called as our files are."""
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, environment

pytestmark = pytest.mark.slow       # make, pip and interpreters of their own


def test_transformer_engine_is_left_out_where_it_does_not_install(tmp_path):
    shutil.copy(ROOT / 'Makefile', tmp_path)
    (tmp_path / '.venv').mkdir()
    for name in 'requirements.txt', '.venv/ready':
        (tmp_path / name).touch()
    for gpu, refused, told in (
            ('yes', 'requirements-te.txt', 'Transformer Engine does not install here and is left out'),
            ('yes', 'nothing', ''), ('', 'requirements-te.txt', 'no NVIDIA GPU answers')):
        (tmp_path / 'pip').write_text(f'echo "$@" >> asked{gpu}\n[[ "$*" != *{refused}* ]]\n')
        # make test runs this: a make under a make names the folders that it enters, unless told not to
        words = ['make', '--no-print-directory', 'install', f'GPU={gpu}', 'PIP=bash pip']
        done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=True)
        said = ''.join(line for line in done.stdout.splitlines() if line[:4] != 'bash')
        assert said.startswith(told) and bool(said) == bool(told)
        asked = (tmp_path / f'asked{gpu}').read_text()
        assert ('pytest' in asked, 'requirements-te.txt' in asked) == (True, bool(gpu))


def test_ci_installs_one_version_of_torch(tmp_path):
    shutil.copy(ROOT / 'Makefile', tmp_path)
    for name in 'requirements.txt', 'requirements-dev.txt':
        shutil.copy(ROOT / name, tmp_path)
    script = (ROOT / '.ci/run').read_text()
    [versions], made = re.findall("^torch='(torch==.+)'", script, re.M), re.findall('^make .*', script, re.M)
    assert made and all(line.endswith(' TORCH="$torch"') for line in made)
    words = ['make', '-n', 'test', f'TORCH={versions}']
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True, check=True)
    installs = re.findall('-r requirements.*', done.stdout)
    packages = ' '.join(f"'{version}'" for version in versions.split())
    assert installs == [f'-r requirements{part}.txt {packages}' for part in ('', '-dev')]


SCRIPT = """
import torch
import model
from fp8gpt import fp8
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 16))
choice = fp8.choose(fp8.Options(backend='native'), fp8.Place(torch.device('cpu'), tokens=32))
fp8.convert(net, choice)
net(torch.randn(32, 64)).sum().backward()
print(model.__file__, fp8.summary(net, choice).splitlines()[0])
"""


def test_fp8_for_a_model_of_ones_own(tmp_path):
    clone, site = tmp_path / 'repository', tmp_path / 'site'
    shutil.copytree(ROOT / 'fp8gpt', clone / 'fp8gpt')
    shutil.copy(ROOT / 'pyproject.toml', clone)
    pip = '-m pip install -q --no-deps --no-index --no-build-isolation --disable-pip-version-check'
    words = [*pip.split(), '--target', str(site), '.']
    subprocess.run([sys.executable, *words], cwd=clone, check=True, timeout=240)
    [wanted] = site.glob('*/METADATA')
    assert re.findall('^Requires-Dist: (.*)', wanted.read_text(), re.M) == ['torch>=2.11']
    assert {path.name for path in (site / 'fp8gpt').iterdir()} == {'fp8'}     # what takes no scripts of ours
    (tmp_path / 'model.py').touch()
    (tmp_path / 'script.py').write_text(SCRIPT)
    done = subprocess.run([sys.executable, 'script.py'], cwd=tmp_path, env=environment(PYTHONPATH=str(site)),
                          text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f'{tmp_path}/model.py FP8 Training Enabled: 2 of 2 linears, ')


def test_requirements_have_versions_for_the_oldest_python(tmp_path):
    lines = (ROOT / 'requirements.txt').read_text().splitlines()
    wanted = [line for line in (line.split('#')[0].strip() for line in lines) if line]
    packages = [line for line in wanted if not line.startswith('torch>')]   # gigabytes, if pip has to look
    assert len(packages) == len(wanted) - 1
    pip = '-m pip install -q --dry-run --no-deps --only-binary=:all: --python-version=3.10'
    done = subprocess.run([sys.executable, *pip.split(), '--target', str(tmp_path), *packages],
                          text=True, capture_output=True, timeout=240)
    if 'from versions: none' in done.stderr:
        pytest.skip('no index of packages answers')
    assert done.returncode == 0, done.stderr
