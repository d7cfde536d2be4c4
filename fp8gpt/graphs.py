"""Replays a micro-step as a CUDA graph: the host starts its thousand kernels by one call.

    replay = Replay(forward_backward, model, on=True)
    loss = replay(micro_step, x, y, examples, n_targets)    # as forward_backward(x, y, examples, n_targets)
    replay.forget()                                         # before work that wants the memory

A GPU waits where it computes faster than the host launches: one H100, in FP8, 66 of 294 ms of a step of
GPT-2 124M (results/gpu/124m.json).
"""
import contextlib

import torch

from configurator import first_line, say_in_run

LEAST = 2**26       # bytes of free memory to capture with: with less, torch 2.11 may abort the process
EAGER_STEPS = 2     # they compile, and make what stays: the optimizer's state, libraries' handles


def capture(function, pool=None):
    """Return (replay, what the function returned): replay() does on the GPU what function() launched, at the
    same addresses. function() itself computes nothing here. pool: of memory, which graphs that are replayed
    one after the other may share, in the order in which they were captured."""
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    current = torch.cuda.current_stream()
    stream = current if current.cuda_stream else None       # the default one cannot be captured
    try:
        # by default, a loader's thread that pins memory meanwhile would end the capture
        with torch.cuda.graph(graph, pool, stream, capture_error_mode='thread_local'):
            result = function()
    except Exception:
        torch.cuda.set_stream(current)
        end_capture(pool)
        raise
    graph.function = function   # keeps the tensors that it reads: the next capture unmaps what is free
    return graph.replay, result


def end_capture(pool):
    """End, where a capture failed, what torch ends only where it worked: allocations go to `pool` until then
    and no cache is emptied; and torch 2.11's generators raise for each random number until a capture ends."""
    with contextlib.suppress(RuntimeError):     # "not currently recording": it has ended
        device = torch.cuda.current_device()
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode='thread_local'):
            torch.zeros(1, device=device)


class Replay:
    """Calls forward_backward(x, y, examples, n_targets), which adds to the model's gradients and returns a
    loss; replays it from the third step on, where `on` allows it and the inputs' shapes are as they were.
    forward_backward gets n_targets as a tensor, 0-dim; examples may be None. A micro-step in which DDP
    reduces gradients is not replayed. model: in DDP or not.

    Two graphs make a step: its first micro-step casts weights and makes gradients, the others add to them.
    Inputs are copied to where the graphs read them; gradients lie where the first graph puts them; weights,
    FP8's scales and amaxes are changed in place. Where a capture fails, prints why there are no graphs."""

    def __init__(self, forward_backward, model, on):
        self.forward_backward, self.model, self.on = forward_backward, model, on
        self.steps, self.graphs, self.adds = 0, {}, False

    def forget(self):
        """Free the memory of the graphs; the next step captures others. Between steps only."""
        if self.graphs:
            self.graphs, self.gradients = {}, []
            torch.cuda.empty_cache()

    def __call__(self, micro_step, x, y, examples, n_targets):
        """Return the loss of a step's micro-step of this number. The next call may overwrite it."""
        # copied to the GPU, since a graph would keep the number
        n_targets = torch.full((), n_targets, dtype=torch.float32, device=x.device)
        inputs, later = (x, y, examples, n_targets), micro_step > 0
        shapes = [getattr(each, 'shape', None) for each in inputs]
        if not later:
            self.steps, self.begun = self.steps + 1, False
        reduces = getattr(self.model, 'require_backward_grad_sync', False)
        self.adds |= later and not reduces      # a step has a second graph
        if not self.on or self.steps <= EAGER_STEPS or reduces:
            return self.forward_backward(*inputs)
        if not self.graphs and not later:
            self.held, self.shapes = [each if each is None else each.clone() for each in inputs], shapes
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()
            self.free, _ = torch.cuda.mem_get_info()
        # gradients are where the first graph puts them only once it has run in this step
        unlike = later and not self.begun or shapes != self.shapes
        if unlike or later not in self.graphs and not self.captured(later):
            return self.forward_backward(*inputs)
        for held, new in zip(self.held, inputs):
            if new is not None:
                held.copy_(new)
        replay, loss = self.graphs[later]
        replay()
        self.begun = True
        for p, gradient in zip(self.model.parameters(), self.gradients):
            p.grad = gradient
        return loss

    def captured(self, later):
        """Capture one of the two graphs, and return whether that worked."""
        before = [p.grad for p in self.model.parameters()]

        def micro_step():
            loss = self.forward_backward(*self.held)
            made = [p for p in outside if p.grad is not None]
            if made:
                torch._foreach_copy_([outside[p] for p in made], [p.grad for p in made])
            for p in made:
                p.grad = outside[p]
            return loss
        try:
            # In the graphs' memory, the other graph would miss the room of the first one's gradients, and
            # split what was that of the logits: 14 GB more for GPT-2 124M with 144 sequences of 1,024 tokens
            outside = {p: torch.empty_like(p) for p in self.model.parameters()
                       if p.requires_grad and self.adds and not later}
            if torch.cuda.mem_get_info()[0] < LEAST:
                raise torch.OutOfMemoryError('less than 64 MB of its memory is free')
            self.graphs[later] = capture(micro_step, self.pool)
            self.gradients = [p.grad for p in self.model.parameters()]
            left, _ = torch.cuda.mem_get_info()
            if hasattr(self.model, 'require_backward_grad_sync') and left < self.free - left:
                raise torch.OutOfMemoryError('a micro-step that reduces gradients takes as much again')
            return True
        except RuntimeError as error:   # of a library's call that no graph takes, or for lack of memory
            why = first_line(error.__context__ or error)    # the end of a broken capture raises, too
        # the error held what the capture has made
        for p, gradient in zip(self.model.parameters(), before):
            p.grad = gradient
        self.on = False
        self.forget()
        # FP8's cached casts of weights are of this version, but nothing has computed them
        torch.autograd.graph.increment_version(self.model.parameters())
        torch.cuda.empty_cache()
        # on whichever rank: all wait for the slowest
        say_in_run(f'WARNING: no CUDA graphs on {self.held[0].device}, which is slower where it waits for '
                   f'the host: {why}; --no_cuda_graphs is silent')
        return False
