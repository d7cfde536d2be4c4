"""mxfp8's cast of both layouts: the Triton kernel in an interpreter against the Quantizer, and its code for
GPUs that are not there."""
import itertools
import math
import re

import pytest
import torch

from fp8gpt.fp8 import Choice, WeightCache
from fp8gpt.fp8.backends import BACKENDS, blocked_layout, output_and_gradients
from fp8gpt.fp8.kernels import mxfp8
from fp8gpt.fp8.kernels.mxfp8 import MxQuantizer, cast_both
from fp8gpt.fp8.linear import E4M3, E5M2, Arithmetic, Quantizer, emulated_mm, quantizers
from helpers import same_bits
from triton_tools import code_for, interpreted, usage    # noqa: F401


@pytest.mark.slow
@pytest.mark.usefixtures('interpreted')
@pytest.mark.filterwarnings('ignore::RuntimeWarning')   # NumPy's, of infinities
def test_the_kernel_quantises_both_layouts_bit_for_bit():
    """Amaxes of each power of two, 1.75 times it and the next number, where the scale halves."""
    generator, wrong = torch.Generator().manual_seed(0), []
    powers = torch.exp2(torch.arange(-149, 126).float())
    edges = torch.cat([powers, 1.75 * powers, 1.75 * (1 + 2**-23) * powers, torch.zeros(7)])
    x = edges.repeat(32, 1)[:, torch.randperm(832, generator=generator)]
    x = torch.cat([x, torch.randn(32, 832, generator=generator), x])       # (96, 832): no tile is full
    x[40:48] *= powers[::34].flip(0)[:8, None]
    for dtype, given, bad in itertools.product((E4M3, E5M2), (x, x.bfloat16()), (1.0, math.inf, math.nan)):
        given[3, 5] = bad
        quantizer = Quantizer(dtype, (1, 32), True, 1)
        found, both = cast_both(given, dtype, 1), quantizer.both(given, quantizer)
        for data, scales, expected in zip(found[::2], found[1::2], both):
            known = expected.scale_inv.isfinite().repeat_interleave(32, 1)
            codes = blocked_layout(expected).view(torch.uint8).clamp(min=1)     # 0 where nothing is
            right = [same_bits(data[known], expected.data[known]), known.all().item() == (bad == 1),
                     torch.equal(scales.view(torch.uint8), codes)]
            wrong += [] if all(right) else [(dtype, given.dtype, bad, right)]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize('arch, dtype', [(100, E4M3), (120, E5M2)])
def test_the_kernel_is_made_for_gpus(monkeypatch, arch, dtype):
    """16 bytes a thread and access; only the transposed scales, one a row of a tile, are written alone."""
    for x in torch.zeros(2, 64, 1600).bfloat16(), torch.zeros(64, 14336):
        x = x.flatten(0, -2)
        code = code_for(monkeypatch, arch, mxfp8, 'cast_both_kernel', lambda: cast_both(x, dtype, 0))
        reads, writes = (re.findall(rf'\b{kind}\.global\.(\S+)', code.asm['ptx']) for kind in ('ld', 'st'))
        assert set(reads) == {'v4.b32'} and writes.count('v4.b32') == 8 and len(writes) <= 12
        registers, spilled = usage(code, arch)
        assert spilled == 0
        assert 6 * registers * 64 <= 65_536, 'no six programs of 64 threads share a multiprocessor'
        assert not re.search(r'addptr .*xi32>', code.asm['ttir']), 'M * K may pass 2**31'


def test_native_takes_it_and_a_compiler_traces_it():
    """A frozen weight takes a byte, and a byte for 32: beside it, a tile of scales may be padding."""
    linear = BACKENDS['native'].linear(Choice('native', 'mxfp8', format='e4m3', reason='test'), 96, 64, False)
    x, q, results = torch.randn(64, 96).bfloat16().requires_grad_(), quantizers('mxfp8', 'e4m3'), []
    kernels = linear.arithmetic.quantizers
    assert isinstance(kernels.dy, MxQuantizer)
    compiled = torch.compile(linear, fullgraph=True, backend='aot_eager')
    for run, kinds in (linear, q), (compiled, kernels):
        linear.arithmetic = Arithmetic(kinds, emulated_mm)      # native's products of blocks are a GPU's
        results.append(output_and_gradients(run, [x]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    linear.requires_grad_(False)
    expected = q.w(linear.weight).dequantize()
    WeightCache(linear)
    assert torch.equal(linear.dequantized().weight, expected)
    assert sum(buffer.nbytes for buffer in linear.buffers()) <= (1 + 1 / 32) * expected.numel() + 512
    frozen = output_and_gradients(linear, [x])
    assert all(torch.equal(a, b) for a, b in zip(frozen, results[0][:2], strict=True))
    torch.library.opcheck(cast_both, (x, E4M3, 0), test_utils=('test_schema', 'test_faketensor'))
