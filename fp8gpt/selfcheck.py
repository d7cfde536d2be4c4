"""Choose the FP8 that a run computes in; on a GPU, check and time it on a few blocks before step 0.

    choice, lines = choose_precision(run, world_size)      # run.compiled becomes what runs
"""
import dataclasses
import gc

import torch

from fp8gpt import distributed, fp8, graphs
from fp8gpt.fp8 import health
from fp8gpt.run import micro_steps
from model import GPT, Linear


def choose_precision(run, world_size=1):
    """Return (the fp8.Choice of a Run, lines to print), after the self-check on a GPU. run.compiled becomes
    what runs. Raises what fp8.choose, check_alike and health.self_check raise."""
    config, compiled, lines = run.config, run.compiled, []
    if config['eval_only']:
        return dataclasses.replace(fp8.OFF, reason='evaluation is without it'), lines
    options = dataclasses.replace(fp8.Options.of(config), sharded=distributed.sharded(config))
    tokens = max(1, run.batch_size) * config['block_size']
    place = fp8.Place(run.device, tokens, compiled, tuple(run.model_config.linears()), run.compute_dtype)
    try:
        choice = fp8.choose(options, place)
        distributed.check_alike({'FP8': choice.ran or 'off'})
        run.compiled = compiled and (config['compile_model'] == 'on' or not choice.eager)
        if choice.on and run.device.type == 'cuda':
            sample, backend = sample_of(run, compiled, world_size), choice.implementation
            choice, lines = health.self_check(sample, choice, options.orders)
            backend.forget()
            gc.collect()        # a compiled model is a cycle, and holds a gigabyte until one is looked for
            torch.cuda.empty_cache()
    except (fp8.OptionError, fp8.DeviceError) as error:
        if not (run.resumed and run.resumed.get('fp8_choice')):
            raise
        raise type(error)(f'{error}. {run.resume_path} was trained in FP8: --no_fp8 continues in bf16, '
                          '--fp8_backend=auto --fp8_recipe=auto in what runs here') from None
    if not choice.on:
        run.compiled = compiled
    elif run.compiled != compiled:
        lines.append(f'compile is off: {choice.eager}')
    return choice, lines


def sample_of(run, bf16_compiled, world_size):
    """Return the health.Sample of a Run: a model of few blocks, with a head of few tokens unless it is in
    FP8. A batch_size of 0, which is found later, stands for 16K tokens."""
    config = run.config
    T = config['block_size']
    B = run.batch_size or max(1, 16384 // T)
    V = run.model_config.vocab_size if config['fp8_head'] else 128
    shape = dataclasses.replace(run.window_config, vocab_size=V)
    # two samples are timed in turn: of wide blocks, which keep a GPU busy, one is enough and fits
    weights = sum(k * n for _, k, n in shape.linears()[:4])
    most = max(1, min(shape.n_layer, 100_000_000 // weights))
    idx = torch.randint(V, (2, B, T), generator=torch.Generator().manual_seed(0)).to(run.device)
    steps = micro_steps(config, B, world_size) if run.batch_size else 1

    def build(choice, blocks):
        few = dataclasses.replace(shape, n_layer=min(blocks, most))
        linear = fp8.linear_factory(choice, Linear)
        model = GPT(few, linear, loss_chunks=config['loss_chunks']).to(run.device)
        model.wte.weight.data *= 50     # N(0, 1): gradients stand above rounding's noise
        return model
    return health.Sample(build, tuple(idx), run.compiled, bf16_compiled, steps,
                         capture=graphs.capture if run.replays(world_size, steps) else None)
