"""`pip install .`: one importable package, beside modules of the user's that are called as its files are."""
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT, environment

pytestmark = pytest.mark.slow       # pip and interpreters of their own

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return self.head(self.inner(x))
"""
SCRIPT = """
import importlib
import pathlib
import pickle
import sys

import torch

import fp8
import model
import fp8gpt
from fp8gpt import checkpoint
from fp8gpt import fp8 as in_fp8
from fp8gpt.model import GPTConfig

assert fp8.mine and 'checkpoint' not in sys.modules
net = model.Net()
place = in_fp8.Place(torch.device('cpu'), tokens=32)
in_fp8.convert(net, in_fp8.choose(in_fp8.Options(backend='native'), place))
assert type(net.inner).__module__ == 'fp8gpt.fp8_linear'
with torch.autocast('cpu', torch.bfloat16):
    torch.compile(net, backend='aot_eager')(torch.randn(32, 64)).sum().backward()
assert net.inner.weight.grad.abs().sum() > 0

assert pickle.loads(pickle.dumps(GPTConfig())) == GPTConfig()
torch.save(net, 'net.pt')
torch.load('net.pt', weights_only=False)

scripts = {'train', 'train_fp8', 'sample', 'hellaswag'}    # which read a command line
for path in [*pathlib.Path(fp8gpt.__file__).parent.glob('*.py')]:
    if path.stem not in {'__init__', *scripts}:
        importlib.import_module(f'fp8gpt.{path.stem}')
from fp8gpt.benchmarks import quality
print(sorted(fp8gpt.OURS & {*sys.modules}))
"""


@pytest.fixture(scope='module', params=['.', '-e .'])
def installed(request, tmp_path_factory):
    """The environment of a Python that has the package."""
    clone, site = tmp_path_factory.mktemp('clone') / 'repository', tmp_path_factory.mktemp('site')
    clone.mkdir()
    for path in [*ROOT.glob('*.py'), *ROOT.glob('*/*.py'),
                 ROOT / 'pyproject.toml', ROOT / 'requirements.txt']:
        copy = clone / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    pip = '-m pip install -q --no-deps --no-index --no-build-isolation --disable-pip-version-check'
    words = [*pip.split(), '--target', site, *request.param.split()]
    subprocess.run([sys.executable, *words], cwd=clone, check=True, timeout=240)
    start = f'import site; site.addsitedir({str(site)!r})'  # where a .pth is read, which -e is
    (site / 'sitecustomize.py').write_text(start)
    return environment(PYTHONPATH=str(site))


def python(words, folder, env):
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=env, text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_py_of_ones_own_is_not_shadowed_and_trains_in_fp8(installed, tmp_path):
    """The last line: of our names, those that are modules of that name, which are the user's."""
    (tmp_path / 'model.py').write_text(MODEL)
    (tmp_path / 'fp8.py').write_text('mine = True\n')
    (tmp_path / 'script.py').write_text(SCRIPT)
    assert python(['script.py'], tmp_path, installed).splitlines()[-1] == "['fp8', 'model']"


def test_its_scripts_run_as_modules(installed, tiny, tmp_path):
    words = [*tiny, '--max_steps=2', '--fp8_backend=native', f'--checkpoint_dir={tmp_path}/c']
    said = python(['-m', 'fp8gpt.train_fp8', *words], tmp_path, installed)
    assert 'is step 2' in said
