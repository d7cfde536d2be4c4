"""fp8gpt/graphs.py: a replayed step is a step. On a CPU, by a stand-in for CUDA's capture; on a GPU, see
tests/gpu."""
import contextlib
import functools
import weakref
from unittest import mock

import pytest
import torch

from fp8gpt import distributed, fp8, graphs
from helpers import same_bits
from model import GPT, GPTConfig, Linear

CONFIG = GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=32)
STEPS, MICRO_STEPS = 8, 3


class Captures:
    """Stands in for graphs.capture: what is captured computes nothing, and what is replayed computes into the
    tensors that the capture has made. fails: at which captures a library refuses."""

    def __init__(self, model, fails=()):
        self.parameters, self.fails, self.made = [*model.parameters()], fails, 0

    def __call__(self, function, pool):
        self.made += 1
        if self.made in self.fails:
            try:
                raise ValueError('operation not permitted when stream is capturing\nsecond line')
            finally:
                raise RuntimeError('a previous error during capture')
        before = [p.grad for p in self.parameters]
        loss = self.run(function, None)
        gradients = [p.grad if old is None else old for p, old in zip(self.parameters, before)]
        if before[0] is None:
            torch._foreach_mul_(gradients, torch.nan)
        self.give(gradients)

        def replay():
            held = [p.grad for p in self.parameters]
            loss.copy_(self.run(function, None))
            for gradient, p, old in zip(gradients, self.parameters, before):
                gradient.copy_(p.grad if old is None else gradient + p.grad)
            self.give(held)
        return replay, loss.fill_(torch.nan)

    def run(self, function, gradient):
        self.give([gradient] * len(self.parameters))
        return function()

    def give(self, gradients):
        for p, gradient in zip(self.parameters, gradients):
            p.grad = gradient


@pytest.mark.parametrize('handle, captured_in', [(0, None), (7, 7)])
def test_a_stream_of_ones_own_is_captured(handle, captured_in, monkeypatch):
    """There DDP's gradients are added up. The default stream cannot be captured."""
    for name in 'CUDAGraph', 'graph', 'graph_pool_handle', 'current_stream':
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    torch.cuda.current_stream.return_value.cuda_stream = handle
    assert graphs.capture(lambda: 3)[1] == 3
    stream = torch.cuda.graph.call_args.args[2]
    assert (stream and stream.cuda_stream) == captured_in


def test_what_a_graph_reads_lives_as_long_as_its_replay(monkeypatch):
    """The next capture frees CUDA's unused memory, and a replay would read what is unmapped."""
    class Graph:
        def replay(self):
            pass

    monkeypatch.setattr(torch.cuda, 'current_stream', mock.MagicMock())
    monkeypatch.setattr(torch.cuda, 'graph', lambda *arguments, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', Graph)
    monkeypatch.setattr(torch.cuda, 'graph_pool_handle', lambda: (0, 1))
    x = torch.ones(3)
    read = weakref.ref(x)
    replay, _ = graphs.capture(functools.partial(torch.sum, x))
    del x
    assert read() is not None
    del replay
    assert read() is None


@pytest.mark.parametrize('ended', [False, True])
def test_a_capture_that_fails_is_ended(ended, monkeypatch):
    """torch leaves the capture's stream current, the allocator in the graphs' memory, from which nothing is
    freed, and (2.11) the random generators in a capture; unless the capture itself ended well."""
    calls = []

    @contextlib.contextmanager
    def graph(graph, *where, **how):
        yield
        calls.append('captured')
        if where:
            raise RuntimeError('operation failed due to a previous error during capture')

    def call(name, fails=False):
        def called(*arguments):
            calls.append((name, arguments[-1]))
            if fails:
                raise RuntimeError('endAllocatePool: not currently recording to mempool_id')
        return called
    for name in 'CUDAGraph', 'current_stream':
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, 'graph', graph)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 'cpu')
    monkeypatch.setattr(torch.cuda, 'set_stream', call('stream'))
    monkeypatch.setattr(torch._C, '_cuda_endAllocateToPool', call('end', ended), raising=False)
    monkeypatch.setattr(torch._C, '_cuda_releasePool', call('release'), raising=False)
    with pytest.raises(RuntimeError, match='a previous error'):
        graphs.capture(lambda: 3, (0, 1))
    expected = ['captured', ('stream', torch.cuda.current_stream()), ('end', (0, 1))]
    assert calls == expected + [('release', (0, 1)), 'captured'] * (not ended)


def trained(monkeypatch, on=True, fails=(), odd_step=None, wrap=None, odd_ones=range(MICRO_STEPS),
            memory=(60, 100), packed=False):
    """Losses and final weights of a few steps of plain gradient descent on random tokens, what was said, and
    the number of captures. odd_step: one in whose micro-steps odd_ones examples are kept apart. packed: each
    micro-step has other examples, a step other targets. memory: GB that graphs take, of all. In the midst,
    an evaluation."""
    model, said, losses = GPT(CONFIG), [], []
    model = wrap(model) if wrap else model
    captures = Captures(model, fails)
    monkeypatch.setattr(graphs, 'capture', captures)
    for name in ('empty_cache', 'graph_pool_handle'):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, 'mem_get_info',
                        lambda: (1e9 * (memory[1] - memory[0] * bool(replay.graphs)), 141e9))

    def forward_backward(x, y, examples, n_targets):
        loss = model(x, y, n_targets=n_targets, examples=examples)
        loss.backward()
        return loss.detach()
    monkeypatch.setattr(graphs, 'say_in_run', said.append)
    replay = graphs.Replay(forward_backward, model, on)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        loss = torch.zeros(())
        for micro_step in range(MICRO_STEPS):
            distributed.sync_gradients(model, micro_step == MICRO_STEPS - 1)
            x, y = torch.randint(CONFIG.vocab_size, (2, 2, 16), generator=generator)
            odd = step == odd_step and micro_step in odd_ones
            examples = torch.arange(16).expand(2, 16) // 5 if odd else None
            if packed:
                starts = torch.randint(5, (2, 16), generator=generator) == 0
                examples, y[:, step:2 * step] = starts.long().cumsum(1), -1
            loss += replay(micro_step, x, y, examples, 90.0 if odd else 96.0 - 2 * step * packed)
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad(set_to_none=True)
        if step == 4:
            replay.forget()
    return torch.tensor(losses), [p.detach() for p in model.parameters()], said, captures.made


def same_training(ours, theirs):
    """Whether two results of `trained` have the same bits in losses and weights."""
    return all(map(same_bits, (ours[0], *ours[1]), (theirs[0], *theirs[1])))


@pytest.mark.parametrize('given', [{}, {'odd_step': 0}, {'odd_step': 6}, {'packed': True}])
def test_replayed_steps_are_eager_steps(given, monkeypatch):
    expected, found = (trained(monkeypatch, on, **given) for on in (False, True))
    assert expected[3] == 0 and found[3] == 2 + 2       # before forget() and after it
    assert same_training(found, expected)
    assert found[2] == []


@pytest.mark.parametrize('odd_step, odd_micro_step', [(2, 0), (6, 0), (6, 1), (6, 2)])
def test_a_step_may_have_one_micro_step_unlike_the_others(odd_step, odd_micro_step, monkeypatch):
    options = dict(odd_step=odd_step, odd_ones=[odd_micro_step])
    assert same_training(*(trained(monkeypatch, on, **options) for on in (False, True)))


@pytest.mark.parametrize('taken, captures', [(50, 2 + 2), (60, 1)])
def test_ddp_launches_the_micro_step_in_which_it_reduces(taken, captures, monkeypatch):
    """There gradients become views of its buckets; the next step's lie where the graph makes them. It has
    activations beside those in the graphs' memory, or there are no graphs."""
    def wrap(model):
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        expected, found = trained(monkeypatch, False), trained(monkeypatch, wrap=wrap, memory=(taken, 100))
    finally:
        torch.distributed.destroy_process_group()
    assert (found[3], len(found[2])) == (captures, captures == 1)
    assert same_training(found, expected)


@pytest.mark.parametrize('free, taken, captures', [(0.06, 0, 0), (0.1, 0.05, 1), (0.1, 0.02, 2 + 2)])
def test_a_full_gpu_captures_no_graph(free, taken, captures, monkeypatch):
    expected, found = trained(monkeypatch, False), trained(monkeypatch, memory=(taken, free))
    assert (found[3], ['less than 64 MB' in line for line in found[2]]) == (captures, [True] * (captures < 2))
    assert same_training(found, expected)


@pytest.mark.parametrize('fails', [1, 2, 3, 4])
def test_a_capture_that_fails_costs_no_step_and_is_said_once(fails, monkeypatch):
    expected, found = trained(monkeypatch, False), trained(monkeypatch, fails=[fails])
    assert found[3] == fails
    assert same_training(found, expected)
    [line] = found[2]   # of any rank, by its device
    assert 'no CUDA graphs on cpu' in line and 'not permitted when stream is capturing' in line
    assert '\n' not in line


@pytest.mark.parametrize('micro_steps', [1, 2])
def test_gradients_lie_outside_of_the_memory_of_two_graphs(micro_steps, monkeypatch):
    """The second graph takes that memory as the first one left it: held there, gradients would split the room
    of larger tensors, and it would ask for more than a step takes. One graph alone needs no copy of them."""
    model, made = torch.nn.Linear(4, 4), []

    def forward_backward(x, y, examples, n_targets):
        model(x).sum().backward()
        made.extend(p.grad.data_ptr() for p in model.parameters())
        return torch.zeros(())
    monkeypatch.setattr(graphs, 'capture', lambda function, pool: (print, function()))
    for name in ('empty_cache', 'graph_pool_handle'):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (100e9, 141e9))
    replay = graphs.Replay(forward_backward, model, True)
    inputs = torch.ones(2, 4), torch.ones(2), None, 2.0
    for _ in range(graphs.EAGER_STEPS):
        for micro_step in range(micro_steps):
            replay(micro_step, *inputs)
        model.zero_grad()
    made.clear()
    replay(0, *inputs)
    kept = [p.grad for p in model.parameters()]
    assert ([gradient.data_ptr() for gradient in kept] == made) == (micro_steps == 1)
    assert torch.equal(kept[0], torch.full((4, 4), 2.0)) and torch.equal(kept[1], torch.full((4,), 2.0))


def test_casts_of_a_capture_that_fails_are_not_read(monkeypatch):
    """They lie where the capture would have computed them, and nothing has."""
    choice = fp8.choose(fp8.Options(backend='emulate'), fp8.Place('cpu', tokens=32))
    model = GPT(CONFIG, fp8.linear_factory(choice, Linear))
    x, y = torch.randint(CONFIG.vocab_size, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    state = fp8.State(model, choice)
    expected = model(x, y, n_targets=32.0).detach()

    def refused(function, pool):
        function()
        for linear in fp8.fp8_linears(model).values():
            linear.w8_scale_inv.fill_(torch.nan)
        raise RuntimeError('operation not permitted when stream is capturing')
    monkeypatch.setattr(graphs, 'capture', refused)
    monkeypatch.setattr(torch.cuda, 'graph_pool_handle', lambda: None)
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (100e9, 141e9))
    replay = graphs.Replay(lambda x, y, examples, n: model(x, y, n_targets=n), model, True)
    replay.steps = graphs.EAGER_STEPS
    state.weight_cache.new_step(fp8.FEWEST)
    assert torch.equal(replay(0, x, y, None, 32.0), expected)
