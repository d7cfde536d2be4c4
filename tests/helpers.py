"""Small things that several tests use."""
import dataclasses
import itertools
import types

import torch
from torch.overrides import TorchFunctionMode

import hf
from fp8gpt.fp8.linear import Matmul
from fp8gpt.run import Run, open_source
from fp8gpt.shards import Dataset, find_dataset, read_meta


def opened(folder):
    """The Dataset in a folder."""
    return Dataset(str(folder), read_meta(str(folder)))


def run_of(config, device):
    """The Run of settings, as the training scripts make it."""
    source = open_source(config)
    return Run.of(source, find_dataset(source.config), device)


def random(*shape, seed=0, dtype=torch.bfloat16):
    """Normal values, the same for a seed on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_noise(model, std=0.1):
    """Add noise to every parameter of a model, norms and biases included. Return it."""
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.add_(std * random(*p.shape, seed=number, dtype=torch.float32))
    return model


def relative(a, b):
    """|a - b| / |b|, in fp64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def same_bits(a, b):
    """Whether two FP8 tensors are equal, NaN by NaN."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def same_tensors(a, b):
    """Whether two dicts, nested or not, hold the same names, tensors and values."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_tensors(a[name], b[name]) for name in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Waits(TorchFunctionMode):
    """Notes in `found` what makes the host wait for a GPU."""
    functions = 'new_tensor', 'tensor', 'item', 'tolist', '__bool__', 'cpu', 'numpy'

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, arguments=(), options=None):
        self.found += {function.__name__}.intersection(self.functions)
        return function(*arguments, **options or {})


def compiled(model, **options):
    """Put a GPT under torch.compile and return it."""
    torch._dynamo.reset()
    model.compile(**options)
    return model


def spied(mm):
    """(mm as it is, and a list into which its operands go as it is called)."""
    operands = []

    def spy(a, b, *rest, **kwargs):
        operands.extend([a, b])
        return mm(a, b, *rest, **kwargs)
    return spy, operands


def checkpoint_of(model, step, **parts):
    """What a run's save would hold of a model after `step` steps of 10 tokens; parts: what is otherwise."""
    weights = model.weights()
    moments = {name: {'step': torch.tensor(float(step)), 'exp_avg': torch.zeros_like(p),
                      'exp_avg_sq': torch.zeros_like(p)} for name, p in weights.items()}
    return {
        'step': step, 'position': step, 'tokens': step * 10, 'best_val_loss': None,
        'weights': weights, 'optimizer': moments, 'model_config': dataclasses.asdict(model.config),
        'tokenizer': 'byte', 'precision': {'name': 'fp8', 'reason': 'native: as ordered'},
        'config': {}, 'versions': {}, **parts}


def gpt_in(folder, **options):
    """The GPT of a folder of transformers; options: GPT's."""
    return hf.load(str(folder), **options)


def peak_bytes(work):
    """The most bytes that work() has allocated on the CPU at a time, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == '[memory]']
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def products(x, weight, dy, arithmetic, cache=()):
    """Return an FP8 linear's y, dx and dW, of fake tensors too, which autograd does not differentiate. With
    the cache of a frozen weight, dW is None."""
    context = types.SimpleNamespace(needs_input_grad=(True, not cache, *[False] * 4))
    context.save_for_backward = lambda *tensors: setattr(context, 'saved_tensors', tensors)
    y = Matmul.forward(context, x, weight, None, arithmetic, None, None, *cache)
    with torch.no_grad():       # as autograd calls it
        dx, dw, *_ = Matmul.backward(context, dy)
    return y, dx, dw
