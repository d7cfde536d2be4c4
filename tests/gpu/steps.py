"""Time and profile whole training steps in bf16 and in FP8, all in one process; measure.sh calls this.

$ python tests/gpu/steps.py results/gpu/gpt2.json bf16,triton config/gpt2_fp8.py --batch_size=32

The second word names rows of VARIANTS, the others are settings. For each variant: what plan.py predicts,
printed before it is measured; the median of three turns of three steps; three steps more under
torch.profiler, by kinds of kernels. Weights and tokens are random. The JSON has the ten longest kernels, too.
"""
import cProfile
import gc
import pathlib
import pstats
import re
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.autograd import DeviceType  # noqa: E402

import plan  # noqa: E402
from configurator import first_line  # noqa: E402
from fp8gpt import files, fp8, graphs, lora, optim, runlog  # noqa: E402
from fp8gpt.fp8 import health  # noqa: E402
from fp8gpt.gpus import device_name, find_gpu, gpu_of  # noqa: E402
from fp8gpt.run import Length, micro_steps  # noqa: E402
from model import GPT, Linear  # noqa: E402

VARIANTS = {
    'bf16': ['--fp8_backend=off'],
    'triton': ['--fp8_backend=native', '--fp8_kernels=triton'],
    'inductor': ['--fp8_backend=native', '--fp8_kernels=inductor'],
    'delayed': ['--fp8_backend=native', '--fp8_recipe=delayed', '--fp8_kernels=triton'],
    'head': ['--fp8_backend=native', '--fp8_kernels=triton', '--fp8_head'],
    'te': ['--fp8_backend=te'],
    'te-delayed': ['--fp8_backend=te', '--fp8_recipe=delayed'],
    'torchao': ['--fp8_backend=torchao'],
}
VARIANTS |= {f'{name}-launched': [*words, '--no_cuda_graphs'] for name, words in VARIANTS.items()}
DEVICE = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
STEPS = 3 if DEVICE.type == 'cuda' else 1
KINDS = {   # the first pattern found in the name of a GPU's kernel, or of a CPU's op
    'communication': 'nccl|gloo|c10d|comms',
    'optimizer, clipping': 'multi_tensor|foreach|adam|lpnorm|optimizer',
    'attention': 'flash|fmha|sdpa|attention',
    # Inductor names a kernel by all that it fuses, also by the multiplication that reads its casts
    'matmuls': r'^(?!triton_).*(gemm|cutlass|nvjet|xmma|cublas|splitk|(^|[:_])b?mm|addmm|scaled_mm)',
    'casts, quantise': 'scaled_mm|amax|clamp|cast|fp8_kernels|^(?!triton_|mem).*(copy|abs)',  # fused, too
    'norms, elementwise': '^triton_|norm|elementwise|reduce|softmax|[glu]elu|silu|'
                          '::(add|mul|div|sum|sub|exp|rsqrt|cat|fill|zero)',
    'data, other': '',
}


def profiled_ms(profile):
    """Return ({kind: milliseconds}, {name: milliseconds}) of a torch.profiler.profile: of a GPU's kernels, or
    of a CPU's ops without those they call."""
    of_gpu = DEVICE.type == 'cuda'
    kinds, names = dict.fromkeys(KINDS, 0.0), {}
    for event in profile.key_averages():
        if (event.device_type != DeviceType.CPU) == of_gpu and not (of_gpu and event.is_user_annotation):
            taken = event.self_device_time_total if of_gpu else event.self_cpu_time_total
            names[event.key] = taken / 1e3
            kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.key, re.I))
            kinds[kind] += taken / 1e3
    return kinds, names


def synchronize():
    """Wait until a GPU has done what was launched."""
    if DEVICE.type == 'cuda':
        torch.cuda.synchronize()


def host_ms(train):
    """Return {function: [calls, milliseconds]} of a step in which the host's forward pass spends longest,
    without what it calls. Backward runs in a thread of autograd's, which the profiler does not see."""
    profile = cProfile.Profile()
    profile.runcall(train)
    found = {f'{pathlib.Path(file).name}:{line} {name}'[-100:]: [calls / STEPS, 1e3 * own / STEPS]
             for (file, line, name), (_, calls, own, *_) in pstats.Stats(profile).stats.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:20])


def training(run, choice, count):
    """Return train(steps), which takes steps of `count` micro-steps, as train_fp8.py does, on random
    tokens."""
    config = run.config
    with torch.device(DEVICE):
        model = GPT(
            run.window_config, fp8.linear_factory(choice, Linear), run.compute_dtype, seed=None,
            checkpoint_every=run.checkpoint_every, param_dtype=run.param_dtype,
            loss_chunks=config['loss_chunks'], checkpoint=fp8.checkpointer(choice))
        shape = run.batch_size, run.window_config.block_size
        x, y = torch.randint(run.window_config.vocab_size, (2, *shape))
        skips = torch.zeros(3)
    for name, p in model.named_parameters():
        p.data.normal_(std=0.02) if p.dim() > 1 else p.data.fill_(float(name.endswith('weight')))
    compiled = DEVICE.type == 'cuda' and not choice.eager
    if config['lora_rank']:
        lora.start(model, run)
    optimizer = optim.make_optimizer(model, (0.9, 0.95), 0.1, config['optimizer'], compiled)
    state = fp8.State(model, choice)
    optim.set_rate(optimizer, 1e-5)
    if state.needs_calibration:
        state.calibrate(lambda: model(x[:1], y[:1]).backward())
    if compiled:
        model.compile()

    def forward_backward(x, y, examples, n_targets):
        loss = model(x, y, n_targets=n_targets, examples=examples)
        loss.backward()
        return loss.detach()
    replay = graphs.Replay(forward_backward, model, config['cuda_graphs'] and compiled)

    def train(steps=STEPS):
        for _ in range(steps):
            state.weight_cache.new_step(count)
            for number in range(count):
                replay(number, x, y, None, float(count * y.numel()))
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step_if_finite(optimizer, grad_norm, skips)
            state.after_step()
            optimizer.zero_grad(set_to_none=True)
    return train


def measure(words, row):
    """Fill a variant's row of measured and modelled figures."""
    run, model = plan.settled(plan.plan_arguments(words).config)
    options, tokens = fp8.Options.of(run.config), run.batch_size * run.window_config.block_size
    count = micro_steps(run.config, run.batch_size, 1)
    choice = fp8.choose(options, fp8.Place(DEVICE, tokens, compiling=DEVICE.type == 'cuda'))
    gpu = gpu_of(DEVICE) or find_gpu('h100')
    length = Length.of(run.config, 1, 0)
    seconds = plan.step_seconds(run, model, gpu, length, gpus=1)
    row['plan ms'] = 1e3 * seconds.get('FP8' if choice.on else 'bf16', 0.0)     # 0: no gain is measured
    row['plan GB'] = sum(plan.memory(run, model, 1, choice.on).values()) / 1e9
    print(f'prediction: {row["variant"]}: {row["plan ms"]:.1f} ms a step on {gpu.name}', flush=True)
    train = training(run, choice, count)
    if DEVICE.type == 'cuda':   # before the launched steps: what a graph replays is not counted
        torch.cuda.reset_peak_memory_stats()    # building, in fp32, may have taken more than a step
    train(3)
    taken = health.medians({'': train}, rounds=3, warmup=0)[''] / STEPS
    start = time.perf_counter()
    train()         # returns when all is launched, which may be long before all has run
    launched = (time.perf_counter() - start) / STEPS
    row |= {'ms': taken * 1e3, 'launched in ms': launched * 1e3, 'tokens/s': count * tokens / taken}
    if DEVICE.type == 'cuda':
        row['GB'] = torch.cuda.max_memory_allocated() / 1e9
    synchronize()
    host = host_ms(train)
    synchronize()
    activity = getattr(torch.profiler.ProfilerActivity, DEVICE.type.upper())
    with torch.profiler.profile(activities=[activity]) as seen:
        train()
    kinds, kernels = ({name: ms / STEPS for name, ms in found.items()}
                      for found in profiled_ms(seen))
    row |= kinds | {'idle': row['ms'] - sum(kinds.values())}
    longest = sorted(kernels, key=kernels.get, reverse=True)[:10]
    return {'host, calls and ms': host, 'longest, ms': {name[:100]: kernels[name] for name in longest}}


def main(path, names, *words):
    """Measure each variant, print its row and write all to a JSON."""
    about = {'device': device_name(DEVICE), 'versions': runlog.versions(), 'words': words}
    rows, details = [], {}
    for name in names.split(','):
        row = {'variant': name}
        try:
            details[name] = measure([*words, *VARIANTS[name]], row)
            row['over bf16'] = row['tokens/s'] / rows[0]['tokens/s'] if rows else 1.0
        except (RuntimeError, fp8.OptionError) as error:    # out of memory, or a compiler's: the next may run
            row['verdict'] = first_line(error)
        rows.append(row)
        print(runlog.markdown([row]), flush=True)
        files.write_json(path, about | {'rows': rows, 'details': details})
        torch.compiler.reset()
        gc.collect()
        if DEVICE.type == 'cuda':
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == '__main__':
    main(*sys.argv[1:])
