"""Measure a GPU's rates, as shares of its data sheet's, in about two minutes; measure.sh calls this first.

$ python tests/gpu/calibrate.py results/gpu       # prints each figure, writes results/gpu/calibrate.json

A second word, quick, takes tiny sizes: a rehearsal on any machine, whose figures mean nothing.
"""
import contextlib
import functools
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from configurator import first_line  # noqa: E402
from fp8gpt import files, fp8, graphs, optim, runlog  # noqa: E402
from fp8gpt.fp8 import health  # noqa: E402
from fp8gpt.fp8.kernels.casts import VALUES, cast, partial_amaxes  # noqa: E402
from fp8gpt.fp8.kernels.norms import norm_backward  # noqa: E402
from fp8gpt.fp8.linear import E4M3, E5M2, TENSOR, Float8Tensor, Quantizer, scaled_mm, transpose  # noqa: E402
from fp8gpt.gpus import device_name, find_gpu, gpu_of  # noqa: E402
from model import GPT, PRESETS, AddNorm, GPTConfig, Linear  # noqa: E402

DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
GPU = gpu_of(DEVICE) or find_gpu('h100')     # the shares of a CPU mean nothing anyway
BANDWIDTH = GPU.bandwidth * 1e12
COMPILED = DEVICE.type == 'cuda'
TINY = GPTConfig(vocab_size=128, block_size=16, n_layer=6, n_head=2, n_embd=128)    # bound by the host
normal = functools.partial(torch.randn, dtype=torch.bfloat16, device=DEVICE)


def clock(run):
    """Return the seconds of a call of run(); on a GPU the median of three turns of about 20 ms."""
    once = health.medians({'': run}, rounds=1, warmup=1)['']
    times = min(100, 1 + int(0.02 / once))
    return health.medians({'': run}, rounds=3, warmup=0, times=times)[''] if COMPILED else once


def compiled(function):
    """Return the function under torch.compile on a GPU; on a CPU, that would only take time."""
    return torch.compile(function, dynamic=False) if COMPILED else function


def in_fp8(x, dtype):
    """Return x with a scale of one."""
    return Float8Tensor(x.contiguous().to(dtype), torch.ones(1, 1, device=DEVICE), TENSOR)


# ------------------------------------------------------------------------------------------ what is measured
# Each generator yields rows, dicts, and takes what it needs from earlier ones out of `constants`.

def matmuls(constants, sizes):
    """Time forward, dgrad and wgrad of each linear by torch.mm and torch._scaled_mm, and fit MATMUL: the
    shares of the peak and of the bandwidth whose times are nearest to those measured, relatively."""
    terms = {'bf16': [], 'fp8': []}
    for preset, config, tokens in sizes:
        linears = config.linears()
        for name, k, n in [*linears[:4], linears[-1]]:
            x, w, dy = normal(tokens, k), normal(n, k), normal(tokens, n)
            x8, xt8, w8, wt8 = (in_fp8(each, E4M3) for each in (x, x.t(), w, w.t()))
            dy8, dyt8 = in_fp8(dy, E5M2), in_fp8(dy.t(), E5M2)
            runs = {
                ('forward', 'bf16'): lambda: torch.mm(x, w.t()),
                ('dgrad', 'bf16'): lambda: torch.mm(dy, w),
                ('wgrad', 'bf16'): lambda: torch.mm(dy.t(), x),
                ('forward', 'fp8'): lambda: scaled_mm(x8, w8, x.dtype, fast=True),
                ('dgrad', 'fp8'): lambda: scaled_mm(dy8, wt8, x.dtype),
                ('wgrad', 'fp8'): lambda: scaled_mm(dyt8, xt8, torch.float32),
            }
            for (which, precision), run in runs.items():
                taken, flops = clock(run), 2 * tokens * k * n
                result = {'forward': tokens * n, 'dgrad': tokens * k, 'wgrad': k * n}[which]
                operands = tokens * k + k * n + tokens * n - result
                moved = (2 if precision == 'bf16' else 1) * operands + 2 * result
                share = flops / (getattr(GPU, precision) * 1e12) / taken
                terms[precision].append([share, moved / BANDWIDTH / taken])
                yield {'linear': f'{preset} {name}', 'pass': which, 'precision': precision, 'us': taken * 1e6,
                       'TFLOP/s': flops / taken / 1e12, 'share of peak': share}
    for precision, of in terms.items():
        of, one = torch.tensor(of), torch.ones(len(of), 1)
        inverse = torch.linalg.lstsq(of, one).solution
        constants[f'MATMUL {precision}'] = (1 / inverse).flatten().tolist()     # negative: it does not fit
        worst = (of @ inverse - 1).abs().max().item()
        yield {'fit': f'MATMUL {precision}', 'largest residual, %': 100 * worst}


def attention(constants, sizes):
    """Time causal attention, both passes, by each of torch's backends at 1,024 tokens."""
    (_, config, tokens), *_ = sizes
    T, C = config.block_size, config.n_embd
    for heads in (C // 64, C // 128):
        q, k, v, dy = (normal(tokens // T, heads, T, C // heads) for _ in range(4))
        inputs = [each.requires_grad_() for each in (q, k, v)]
        for name, backend in {'default': contextlib.nullcontext(),
                              'flash': sdpa_kernel(SDPBackend.FLASH_ATTENTION),
                              'cudnn': sdpa_kernel(SDPBackend.CUDNN_ATTENTION)}.items():
            row = {'attention': name, 'head_dim': C // heads}

            def run():
                y = F.scaled_dot_product_attention(*inputs, is_causal=True)
                torch.autograd.grad(y, inputs, dy)
            try:
                with backend:
                    taken = clock(run)
                row |= {'ms': taken * 1e3, 'TFLOP/s': 7 * tokens * T * C / taken / 1e12}
            except RuntimeError as error:   # a backend that this device does not have
                row['verdict'] = first_line(error)
            yield row


def traffic(constants, sizes):
    """Time kernels between multiplications in GB/s: our own and torch.compile's."""
    (_, config, M), *_ = sizes
    C, T = config.n_embd, config.block_size
    rstd, mean, weight, bias = (torch.rand(size, device=DEVICE) for size in (M, M, C, C))
    of_casts = {
        'norm': [normal(M, C), rstd, weight, mean, bias],
        'gelu_backward': [normal(M, 4 * C), normal(M, 4 * C)],
        'swiglu': [normal(M, 4 * C)],
        'swiglu_backward': [normal(M, 2 * C), normal(M, 4 * C)],
        'heads': [normal(M // T, T, C // 64, 64) for _ in range(3)],
    }
    x, scale, add_norm = normal(M, 4 * C), torch.ones((), device=DEVICE), AddNorm(config, C).to(DEVICE)
    quantizer = Quantizer(E4M3, TENSOR, power_of_two=False, margin=0)
    runs = {('own', f'cast {how}'): (functools.partial(cast, how=how, scale=scale, dtype=E4M3, sums=True),
                                     [of_casts.get(how, [x])]) for how in VALUES}
    dy, total, residual = (normal(M, C) for _ in range(3))
    runs['own', 'norm_backward'] = norm_backward, [dy, total, mean, rstd, weight, residual]
    runs |= {('compiled', name): (compiled(torch.no_grad()(function)), inputs) for name, function, inputs in (
        ('add and norm', add_norm, [total, residual]),
        ('gelu', functools.partial(F.gelu, approximate='tanh'), [x]),
        ('amax', lambda x: partial_amaxes([x], 'plain'), [x]),
        ('cast', lambda x: quantizer(x, scale).data, [x]),
        ('cast, transposed', lambda x: transpose(quantizer(x, scale).data), [x]))}
    sums = {'own': [0, 0], 'compiled': [0, 0]}
    for (whose, name), (function, inputs) in runs.items():
        run = functools.partial(function, *inputs)
        leaves = [each for each in torch.utils._pytree.tree_leaves([inputs, run()]) if each is not None]
        moved, taken = sum(each.nbytes for each in leaves), clock(graphs.capture(run)[0] if COMPILED else run)
        sums[whose][0] += moved
        sums[whose][1] += taken
        yield {'kernel': f'{whose} {name}', 'us': taken * 1e6, 'GB/s': moved / taken / 1e9,
               'share of bandwidth': moved / taken / BANDWIDTH}
    for whose, constant in (('compiled', 'TRAFFIC'), ('own', 'TRAFFIC of own kernels')):
        moved, taken = sums[whose]
        constants[constant] = moved / taken / BANDWIDTH


def ends(constants, sizes):
    """Time embedding, head and loss, and clipping with AdamW, of whole GPT-2 124M."""
    (_, config, tokens), *_ = sizes
    T = config.block_size
    with torch.device(DEVICE):
        model = GPT(config, seed=None)
        idx = torch.randint(config.vocab_size, (tokens // T, T))
    for p in model.parameters():
        p.data.normal_(std=0.02)
        p.grad = torch.randn_like(p)
    optimizer = optim.make_optimizer(model, (0.9, 0.95), 0.1)

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    taken, moved = clock(update), 40 * sum(p.numel() for p in model.parameters())
    yield {'kernel': 'clipping, AdamW', 'ms': taken * 1e3, 'GB/s': moved / taken / 1e9}
    model.h = torch.nn.ModuleList()
    if COMPILED:
        model.compile()
    taken = clock(lambda: (model.zero_grad(), model(idx, idx).backward()))
    yield {'kernel': 'embedding, head and loss', 'ms': taken * 1e3}


def launches(constants, sizes):
    """Time what the host takes to launch a block, whose work on the GPU is next to nothing."""
    x = torch.zeros(16, device=DEVICE)
    yield {'launch': 'x.add_(1) in eager mode', 'us': clock(lambda: x.add_(1)) * 1e6}
    stream = [normal(1, 16, 128, requires_grad=True) for _ in range(2)]
    gradients = [normal(1, 16, 128) for _ in stream]
    # kernels between a block's multiplications, counted by tests/fake_cuda.py
    for kernels, row, known in (('inductor', 'bf16', 23), ('triton', 'tensorwise triton', 57)):
        choice = fp8.Choice('native', kernels=kernels, reason='timed') if row != 'bf16' else fp8.OFF
        model = GPT(TINY, fp8.linear_factory(choice, Linear)).to(DEVICE)
        if COMPILED:
            model.compile()

        def run(blocks):
            x, delta = stream
            for block in model.h[1:1 + blocks]:     # all but the first share one graph
                x, delta = block(x, delta, None, None)
            torch.autograd.backward([x, delta], gradients)
            model.zero_grad()
        of_block = (clock(lambda: run(5)) - clock(lambda: run(1))) / 4
        if row == 'bf16':
            constants['HOST'] = each = of_block / (known + 14)
        else:
            constants['HOST_TRITON'] = each = (of_block - 14 * constants['HOST']) / known
        yield {'launch': f'of {row}, {known} a block', 'us': each * 1e6, 'us a block': of_block * 1e6}


def main(out, quick):
    """Print each row as it is measured, then the constants fitted to them, and write all to a JSON."""
    sizes = [(name, PRESETS[name], tokens) for name, tokens in (('gpt2', 32 * 1024), ('gpt2-xl', 16 * 1024))]
    if quick:
        sizes = [('tiny', TINY, 32)]
    about = {'device': device_name(DEVICE), 'versions': runlog.versions(), 'gpu': GPU._asdict()}
    rows, constants, path = [], {}, os.path.join(out, 'calibrate.json')
    for measure in (matmuls, attention, traffic, ends, launches):
        try:
            for row in measure(constants, sizes):
                heading = not rows or row.keys() != rows[-1].keys()
                print(runlog.markdown([row], heading), flush=True)
                rows.append(row)
                files.write_json(path, about | {'constants': constants, 'rows': rows})
        except Exception as error:  # the next kind is wanted all the same
            print(f'FAILED {measure.__name__}: {first_line(error)}', file=sys.stderr)
        if COMPILED:
            torch.cuda.empty_cache()
    print(runlog.markdown([{'constant': name, 'measured': measured} for name, measured in constants.items()]))


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2:] == ['quick'])
