"""Scales, noted amaxes and sums from partial ones: Triton's kernels in its interpreter against torch's form.
As a script, under TRITON_INTERPRET=1, this file prints what the interpreted kernels compute."""
import json
import math

import pytest
import torch

from conftest import run
from fp8gpt.fp8.kernels import finish
from fp8gpt.fp8.kernels.finish import note_amax, scale_of, sum_partials
from interpreting import patch_interpreter

try:
    import triton
except ImportError:
    triton = None

PARTS = {
    'one': [3.0], 'many': [i / 7 for i in range(2500)], 'zero': [0.0] * 5,
    'small': [1e-20, 3e-34], 'least': [2.0**-149],
    'inf': [1.0, math.inf, 2.0], 'nan': [math.inf, math.nan, 2.0],
}
SHAPES = [(1, 16), (37, 200), (300, 768)]


def partials(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def main():
    """Prints {case: [kernel's, torch's]}."""
    patch_interpreter()
    found = {}
    for name, parts in PARTS.items():
        parts, scale = torch.tensor(parts), torch.tensor(3.7)
        found[f'scale {name}'] = [list(map(float, forms)) for forms in (
            scale_of(parts, 448.0), finish.scale_in_torch(parts, 448.0))]
        for before in (0.0, 1e4):
            pair = []
            for form in (note_amax, finish.note_in_torch):
                running = torch.tensor([5.0, before, 7.0])
                pair.append([float(form(parts, scale, running, 1)), *running.tolist()])
            found[f'note {name} {before}'] = pair
    sums = sum_partials([partials(shape) for shape in SHAPES])
    for shape, total in zip(SHAPES, sums):
        exact = partials(shape).double().sum(0)
        rounding = 2**-24 * shape[0] * partials(shape).abs().sum(0).max().item()    # of fp32, in any order
        found[f'sums {shape}'] = [(total - exact).abs().max().item(), rounding]
    print(json.dumps(found))


@pytest.fixture(scope='module')
def interpreted():
    environment = {'TRITON_INTERPRET': '1', 'PYTHONPATH': '.:tests'}
    done = run('tests/test_finish.py', fork=False, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason='Triton is not installed')
def test_the_kernels_give_what_torch_gives(interpreted):
    assert len(interpreted) == 3 * len(PARTS) + 3
    for case, (kernel, torchs) in interpreted.items():
        if case.startswith('sums'):
            assert kernel < torchs
        else:
            assert kernel == pytest.approx(torchs, rel=0, abs=0, nan_ok=True), case


def test_what_is_not_finite_is_seen():
    scale, running = torch.tensor(2.0), torch.zeros(3)
    assert note_amax(torch.tensor([1.0, 3.0]), scale, running, 2) == 0.5
    assert running.tolist() == [0, 0, 3]
    for bad in (math.inf, math.nan):
        assert note_amax(torch.tensor([1.0, bad]), scale, torch.zeros(3), 0).isnan()
        assert not (scale_of(torch.tensor([1.0, bad]), 448.0)[1] * 448).isfinite()


def test_a_compiler_knows_what_the_ops_return():
    parts, checks = torch.tensor([1.0, 2.0]), ('test_schema', 'test_faketensor')
    torch.library.opcheck(scale_of, (parts, 448.0), test_utils=checks)
    torch.library.opcheck(note_amax, (parts, torch.tensor(2.0), torch.zeros(3), 1), test_utils=checks)
    torch.library.opcheck(sum_partials, ([partials(shape) for shape in SHAPES],), test_utils=checks)


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason='Triton is not installed')
@pytest.mark.parametrize('arch', [90, 100])
def test_the_kernels_compile_for_gpus(arch):
    from triton.backends.compiler import GPUTarget
    pointers = dict.fromkeys(('partials', 'scale', 'scale_inv', 'running'), '*fp32')
    whole, real = {'P': 'i32'}, {'largest': 'fp32', 'limit': 'fp32'}
    three = {'inputs': ('*fp32',) * 3, 'outputs': ('*fp32',) * 3, 'sizes': (('i32', 'i32'),) * 3}
    cases = [
        (finish.scale_kernel, pointers | whole | real, {'BLOCK': 1024}),
        (finish.note_kernel, pointers | whole, {'BLOCK': 1024, 'finite': finish.FINITE}),
        (finish.sums_kernel, three, {'BLOCK': 128, 'ROWS': 16}),
    ]
    for kernel, kinds, constants in cases:
        kinds = {name: kinds.get(name, 'constexpr') for name in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, kinds, constants)
        code = triton.compile(source, target=GPUTarget('cuda', arch, 32))
        assert f'.target sm_{arch}a' in code.asm['ptx']
        assert '.NaN' not in code.asm['ptx']


if __name__ == '__main__':
    main()
