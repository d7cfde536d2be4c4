"""Scales, running amaxes and sums from partial ones: Triton's kernels in its interpreter against torch.
As a script, under TRITON_INTERPRET=1, this file prints what the interpreted kernels compute."""
import itertools
import json
import math

import pytest
import torch

from conftest import run
from fp8gpt.fp8.kernels import finish
from fp8gpt.fp8.kernels.finish import scale_in_torch, scale_of, sum_partials
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
SHAPES = [(1, 16)], [(37, 200)] * 2, [(300, 768)]


def partials(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


def main():
    """Prints {case: [kernel's, torch's]}."""
    patch_interpreter()
    found = {}
    for name, parts in PARTS.items():
        for given, before in itertools.product((None, torch.tensor(3.7)), (None, 0.0, 1e4)):
            pair = []
            for form in (scale_of, scale_in_torch):
                running = None if before is None else torch.tensor([5.0, before, 7.0])
                scales = form(torch.tensor(parts), given, running, 1, 448.0)
                pair.append([*map(float, scales), *([] if before is None else running.tolist())])
            found[f'{name} {given} {before}'] = pair
    for shapes in SHAPES:
        inputs = [partials(shape) + i for i, shape in enumerate(shapes)]
        for each, total in zip(inputs, sum_partials(inputs)):
            rounding = 2**-24 * len(each) * each.abs().sum(0).max().item()    # of fp32, in any order
            off = (total - each.double().sum(0)).abs().max().item()
            found[f'sums {shapes} {each[0, 0]}'] = [off, rounding]
    print(json.dumps(found))


@pytest.fixture(scope='module')
def interpreted():
    environment = {'TRITON_INTERPRET': '1', 'PYTHONPATH': '.:tests'}
    done = run('tests/test_finish.py', fork=False, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason='Triton is not installed')
def test_the_kernels_give_what_torch_gives(interpreted):
    assert len(interpreted) == 6 * len(PARTS) + 4
    for case, (kernel, torchs) in interpreted.items():
        if case.startswith('sums'):
            assert kernel < torchs
        else:
            assert kernel == pytest.approx(torchs, rel=0, abs=0, nan_ok=True), case


def test_what_is_not_finite_is_seen():
    given, running = torch.tensor(2.0), torch.zeros(3)
    assert scale_of(torch.tensor([1.0, 3.0]), given, running, 2, 448.0)[1] == 0.5
    assert running.tolist() == [0, 0, 3]
    for bad in (math.inf, math.nan):
        parts = torch.tensor([1.0, bad])
        assert scale_of(parts, given, None, 0, 448.0)[1].isnan()
        assert not (scale_of(parts, None, None, 0, 448.0)[1] * 448).isfinite()


def test_a_compiler_knows_what_the_ops_return():
    parts, checks = torch.tensor([1.0, 2.0]), ('test_schema', 'test_faketensor')
    for given, running in ((None, None), (torch.tensor(2.0), torch.zeros(3))):
        torch.library.opcheck(scale_of, (parts, given, running, 1, 448.0), test_utils=checks)
    torch.library.opcheck(sum_partials, ([partials((37, 200))] * 2,), test_utils=checks)


@pytest.mark.slow
@pytest.mark.skipif(triton is None, reason='Triton is not installed')
@pytest.mark.parametrize('arch', [90, 100])
def test_the_kernels_compile_for_gpus(arch):
    from triton.backends.compiler import GPUTarget
    pointers = {'partials': '*fp32', 'outputs': ('*fp32',) * 2}
    pointers |= {'P': 'i32', 'largest': 'fp32', 'limit': 'fp32'}
    delayed = {'given': '*fp32', 'running': '*fp32'}
    sums = {'inputs': ('*fp32',) * 2, 'outputs': ('*fp32',) * 2, 'P': 'i32', 'C': 'i32'}
    cases = [
        (finish.scale_kernel, pointers, {'BLOCK': 8192, 'given': None, 'running': None}),
        (finish.scale_kernel, pointers | delayed, {'BLOCK': 8192}),
        (finish.sums_kernel, sums, {'BLOCK': 128, 'ROWS': 16}),
    ]
    for kernel, kinds, constants in cases:
        kinds = {name: kinds.get(name, 'constexpr') for name in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, kinds, constants)
        code = triton.compile(source, target=GPUTarget('cuda', arch, 32))
        assert f'.target sm_{arch}a' in code.asm['ptx']
        assert '.NaN' not in code.asm['ptx']


if __name__ == '__main__':
    main()
