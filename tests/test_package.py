"""`pip install .`: fp8gpt.fp8 for any nn.Module, in a folder whose modules are called as our files are."""
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
import torch

import model
from fp8gpt import fp8

net = model.Net()
choice = fp8.choose(fp8.Options(backend='native'), fp8.Place(torch.device('cpu'), tokens=32))
fp8.convert(net, choice)
state = fp8.State(net, choice)
assert type(net.inner).__module__ == 'fp8gpt.fp8.linear'
with torch.autocast('cpu', torch.bfloat16):
    torch.compile(net, backend='aot_eager')(torch.randn(32, 64)).sum().backward()
state.after_step()
assert net.inner.weight.grad.abs().sum() > 0
print(fp8.summary(net, choice).splitlines()[0])
"""


def test_fp8_for_a_model_of_ones_own(tmp_path):
    clone, site = tmp_path / 'repository', tmp_path / 'site'
    shutil.copytree(ROOT / 'fp8gpt', clone / 'fp8gpt')
    for name in ('pyproject.toml', 'requirements.txt'):
        shutil.copy(ROOT / name, clone / name)
    pip = '-m pip install -q --no-deps --no-index --no-build-isolation --disable-pip-version-check'
    words = [*pip.split(), '--target', str(site), '.']
    subprocess.run([sys.executable, *words], cwd=clone, check=True, timeout=240)
    (tmp_path / 'model.py').write_text(MODEL)
    (tmp_path / 'script.py').write_text(SCRIPT)
    done = subprocess.run([sys.executable, 'script.py'], cwd=tmp_path, env=environment(PYTHONPATH=str(site)),
                          text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('FP8 Training Enabled: 1 of 2 linears, tensorwise (native)')
