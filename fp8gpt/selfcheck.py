"""Choose the FP8 that a run computes in; on a GPU, check and time it on one block before step 0.

    chosen = choose_precision(run, world_size)      # a Precision; run.compiled becomes what runs
"""
import contextlib
import dataclasses
import os

import torch

from configurator import DataError, first_line
from fp8gpt import distributed, files, fp8, runlog
from fp8gpt.fp8 import health
from fp8gpt.run import micro_steps
from model import GPT, Linear

TIMES = os.path.join(os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache'), 'fp8gpt.json')


@dataclasses.dataclass
class Precision:
    """Says in which precision a Run's linears compute. choice: fp8.Choice. name: 'fp8', or the dtype. reason:
    of the backend. bf16_compiled: whether the run would be compiled in bf16. lines: to print."""
    choice: fp8.Choice
    name: str
    reason: str
    bf16_compiled: bool
    lines: list


def choose_precision(run, world_size=1):
    """Return the Precision of a Run, after the self-check on a GPU. run.compiled and, for fp8_keep=auto,
    run.config['fp8_keep'] become what runs. Raises what fp8.choose and health.self_check raise."""
    config, bf16_compiled, lines = run.config, run.compiled, []
    keep_auto, before = config['fp8_keep'] == 'auto', run.resumed and run.resumed['precision']
    backend = before['reason'].partition(':')[0] if before and before['name'] == 'fp8' else ''
    if backend and config['use_fp8'] and 'fp8_backend' not in config.given:
        config['fp8_backend'] = backend     # a request until now; nobody would see a resumed run change
    options = dataclasses.replace(fp8.Options.of(config), sharded=distributed.sharded(config))
    tokens = max(1, run.batch_size) * config['block_size']
    place = fp8.Place(run.device, tokens, run.compiled, tuple(run.model_config.linears()), run.compute_dtype)
    choice = dataclasses.replace(fp8.OFF, reason='evaluation is in bf16')
    try:
        if not config['eval_only']:
            choice = fp8.choose(options, place)
        run.compiled = fp8.compiles(choice, bf16_compiled, config['compile_model'])
        if choice.on and run.device.type == 'cuda':
            sample = sample_of(run, bf16_compiled, world_size)
            choice, lines = health.self_check(sample, choice, options.orders, keep_auto)
            torch.cuda.empty_cache()
    except (fp8.OptionError, fp8.DeviceError) as error:
        if not backend:
            raise
        raise type(error)(f'{error}. {run.resume_path} was trained in FP8: --no_fp8 continues in bf16, '
                          '--fp8_backend=auto --fp8_recipe=auto in what runs here') from None
    if not choice.on:
        run.compiled = bf16_compiled
    elif bf16_compiled and not run.compiled:
        lines.append(f'compile is off: {choice.backend} breaks the graph at every linear')
    if keep_auto and choice.on:
        config['fp8_keep'] = ','.join(choice.keep)
        if run.device.type != 'cuda':
            lines.append('fp8_keep=auto measures speed, but a CPU only emulates FP8: no layer stays bf16')
    name = 'fp8' if choice.on else config['dtype']
    return Precision(choice, name, f'{choice.backend}: {choice.reason}', bf16_compiled, lines)


@dataclasses.dataclass(frozen=True)
class TimedSample(health.Sample):
    """Is a Sample that keeps its times in the file TIMES, so that a run takes the same kernels when it is
    resumed. about: what decides the times beside a choice: the GPU, versions, shapes."""
    about: str = ''

    def times(self, choices):
        name, kept = f'{self.about} {choices}', files.read_json(TIMES)
        times = distributed.rank_0s(kept.get(name))
        if not times or '-dirty' in self.about:     # of code that is being edited
            times = super().times(choices)
            if distributed.is_rank_0():
                with contextlib.suppress(DataError):    # a home without room: the next run times again
                    files.write_json(TIMES, kept | {name: times})
        return times


def memory_lines(run, choice, length, world_size):
    """Return the line, in a list, that says which memory plan.py models for a Run by native's FP8, and in
    bf16; [] for other backends, and GPUs that plan.py does not know. length: a run.Length."""
    gpu = runlog.gpu_of(run.device)
    if choice.backend != 'native' or not gpu or not distributed.is_rank_0():   # whose line is printed
        return []
    import plan     # late: only a run on a GPU models itself
    try:
        in_fp8, in_bf16 = (sum(plan.Plan(run, gpu, each, length, world_size).memory.values()) / 1e9
                           for each in (choice, fp8.OFF))
    except Exception as error:  # of torch's private doors, which plan.py opens: no reason to end a run
        return [f'memory    not modelled: {first_line(error)}']
    return [f'memory    FP8 {in_fp8:.1f} GB, bf16 {in_bf16:.1f} GB of {gpu.memory:.1f} (modelled)']


def sample_of(run, bf16_compiled, world_size):
    """Return the TimedSample of a Run: a model of one block, with a head of few tokens unless it is in
    FP8. A batch_size of 0, which is found later, stands for 16K tokens."""
    config = run.config
    T = config['block_size']
    B = run.batch_size or max(1, 16384 // T)
    V = run.model_config.vocab_size if config['fp8_head'] else 128
    one_block = dataclasses.replace(run.window_config, n_layer=1, vocab_size=V)
    idx = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(0)).to(run.device)
    steps = micro_steps(config, B, world_size) if run.batch_size else 1

    def build(choice):
        linear = fp8.linear_factory(choice, Linear)
        model = GPT(one_block, linear, loss_chunks=config['loss_chunks']).to(run.device)
        model.wte.weight.data *= 50     # N(0, 1): gradients stand above rounding's noise
        return model
    about = (f'{runlog.device_name(run.device)} {runlog.versions()} {one_block} batch_size={B} '
             f'{config["loss_chunks"]} {run.compiled} {bf16_compiled} {steps}')
    return TimedSample(build, tuple(idx), run.compiled, bf16_compiled, steps, about=about)
