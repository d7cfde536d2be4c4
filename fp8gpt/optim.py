"""The learning-rate schedule, the budget of hours, parameter groups, AdamW, the skip of a non-finite step.

AdamW is torch's where weights and moments are fp32. LowBitAdamW takes bf16 weights too, whose new values it
rounds at random, and keeps moments in 8 bits: codes of 256 values, in blocks of 256 with a scale each, the
largest magnitude (Dettmers et al. 2022, arXiv 2110.02861).
"""
import dataclasses
import functools
import math
import time

import torch

from configurator import SettingError
from fp8gpt.sharding import is_sharded, read_folder


OPEN = 10**12   # the last step of a run that max_hours alone ends, before a step is measured


@dataclasses.dataclass
class Schedule:
    """The learning rate of steps 0 ... last_step - 1: linear to max_lr at step warmup_steps - 1, then

    cosine: half a cosine to min_lr_ratio * max_lr at the last step (Loshchilov & Hutter 2017);
    wsd: constant, then linear to that value over the last decay_share of the run (Hu et al. 2024; Haegele et
    al. 2024); constant: max_lr."""
    last_step: int
    max_lr: float
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    lr_schedule: str = 'cosine'
    decay_share: float = 0.2

    @classmethod
    def of(cls, settings, last_step):
        """From a script's settings."""
        names = [field.name for field in dataclasses.fields(cls)[1:]]
        return cls(last_step, **{name: settings[name] for name in names if name in settings})

    def check(self):
        """Returns the schedule. Raises SettingError for a warm-up that does not fit: it would never reach
        max_lr."""
        if self.warmup_steps > self.last_step:
            raise SettingError(f'warmup_steps={self.warmup_steps}, but the run has '
                               f'{self.last_step:.0f} steps: it would end before reaching max_lr; '
                               f'a tenth of the run is --warmup_steps={max(1, int(self.last_step) // 10)}')
        if self.lr_schedule == 'wsd' and self.warmup_steps > self.decay_start:
            raise SettingError(f'warmup_steps={self.warmup_steps} and the decay over the last '
                               f'{self.decay_share:.0%} of {self.last_step:.0f} steps overlap')
        return self

    @property
    def decay_start(self):
        if self.lr_schedule == 'cosine':
            return self.warmup_steps
        return self.last_step - self.decay_share * self.last_step

    def rate(self, step):
        if step < self.warmup_steps:
            return self.max_lr * (step + 1) / self.warmup_steps
        if self.lr_schedule == 'constant':
            return self.max_lr
        start = self.decay_start
        progress = (step + 1 - start) / max(1, self.last_step - start)
        progress = min(1.0, max(0.0, progress))
        shape = 1 - progress
        if self.lr_schedule == 'cosine':
            shape = 0.5 * (1 + math.cos(math.pi * progress))
        return self.max_lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * shape)

    def line(self):
        """The rates at the run's landmarks, for the console."""
        if self.last_step == OPEN:
            least = self.min_lr_ratio * self.max_lr
            return (f'schedule  {self.lr_schedule}: {self.max_lr:.2e} after {self.warmup_steps} steps, '
                    f'then by the share of max_hours that is used, to {least:.2e}')
        quarters = (self.last_step * quarter // 4 for quarter in (1, 2, 3))
        steps = sorted({0, max(0, self.warmup_steps - 1), *quarters, self.last_step - 1})
        return f'schedule  {self.lr_schedule}: ' + ', '.join(f'step {s} {self.rate(s):.2e}' for s in steps)


class Budget:
    """The hours that a run has used and, with max_hours, the step that they will end at. A schedule up to
    there runs on the share of the time: its decay ends with the budget, however long steps are.

    What counts is the loop, with its evaluations and checkpoints. Set-up does not, nor in each process what
    comes before the end of its first step: it compiles, which tells nothing of the steps to come; that step
    counts as the second one does. What the end takes, an evaluation and a checkpoint, is set aside."""

    def __init__(self, max_hours, limit, agree, clock=time.monotonic):
        """max_hours: 0 = none. limit: the last step by the other settings. agree: of the ranks' values, the
        one that all take. clock(): seconds."""
        self.max_hours, self.limit = max_hours, limit
        self.agree, self.clock = agree, clock
        self.hours, self.share, self.at_the_end = 0.0, 0.0, {}
        self.since, self.steps = None, 0  # of this process

    def timed(self, work):
        """A decorator of what the end of the run does: the longest call's time is set aside for it."""
        @functools.wraps(work)
        def timing(*arguments, **options):
            start, known = self.clock(), self.at_the_end.get(work, 0.0)
            work(*arguments, **options)
            if self.steps:  # an evaluation before the first step compiles
                self.at_the_end[work] = max(known, (self.clock() - start) / 3600)
        return timing

    def after_step(self, step):
        """Counts the time since the last call. The last step, by rank 0's clock."""
        now = self.clock()
        if self.steps:
            counts = 2 if self.steps == 1 else 1
            self.hours += counts * (now - self.since) / 3600
        self.since, self.steps = now, self.steps + 1
        return self.agree(self.last_step(step)) if self.max_hours else self.limit

    def last_step(self, step):
        """The last step as estimated after `step` steps: that one itself, once the time is used."""
        if not self.max_hours or not self.hours:
            return self.limit
        left = self.max_hours - sum(self.at_the_end.values())
        if self.hours >= left:
            return step
        next_used = self.hours * (step + 1) / step
        self.share = max(self.share, min(1.0, next_used / left))  # it never falls, so no rate rises again
        return min(self.limit, (step + 1) / self.share)


def make_optimizer(model, betas, weight_decay, kind='adamw', compiled=False, eps=1e-8):
    """AdamW, of the setting `optimizer`'s kind. Matrices (p.dim() >= 2) decay, vectors do not: by shape, not
    by type of module, so that no factory's weights are left out. compiled: whether LowBitAdamW's step is.
    Raises AssertionError unless each trainable parameter is in exactly one group, and SettingError where
    shards are no whole blocks of 8-bit moments."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{'params': [p for p in trainable if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in trainable if p.dim() < 2], 'weight_decay': 0.0}]
    grouped = [id(p) for group in groups for p in group['params']]
    assert sorted(grouped) == sorted({id(p) for p in trainable}), 'a parameter is in no group, or in two'
    groups = [group for group in groups if group['params']]
    if kind == 'adamw' and all(p.dtype == torch.float32 for p in trainable):
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    if kind == 'adamw8bit' and not all(map(in_whole_blocks, trainable)):
        raise SettingError('optimizer=adamw8bit: on so many ranks a shard is no whole number of blocks of '
                           f'{BLOCK} values: --optimizer=adamw, fewer ranks, or --sharding_mode=ddp')
    return LowBitAdamW(groups, betas, eps, kind, compiled)


# --------------------------------------------------------------------------------------- bf16 weights, 8 bits

BLOCK = 256


def state_of(shape, kind):
    """name -> (shape, dtype) of what AdamW keeps of a parameter. In 8 bits: matrices of whole blocks."""
    size = math.prod(shape)
    state = {'step': ((), torch.float32)}
    for name in 'exp_avg', 'exp_avg_sq':
        state[name] = tuple(shape), torch.float32
        if kind == 'adamw8bit' and len(shape) >= 2 and size % BLOCK == 0:
            state[name] = tuple(shape), torch.uint8
            state[f'{name}_scale'] = (size // BLOCK, 1), torch.float32
    return state


def in_whole_blocks(p):
    """Whether a matrix's blocks are shared out among ranks as its rows are, where it is sharded."""
    if not is_sharded(p) or p.dim() < 2 or p.numel() % BLOCK:
        return True
    ranks = p.device_mesh.size()
    return len(p) % ranks == 0 and p.numel() // BLOCK % ranks == 0


def empty_state(p, kind):
    """state_of a parameter before the first step, sharded as it is."""
    return {name: placed_like(p, torch.zeros(shape, dtype=dtype))
            for name, (shape, dtype) in state_of(p.shape, kind).items()}


def moment_bytes(model, kind):
    """Of all trainable parameters' moments."""
    states = [state_of(p.shape, kind) for p in model.parameters() if p.requires_grad]
    tensors = [tensor for state in states for tensor in state.values()]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors if shape)  # step has none


def state_bytes(model, kind):
    """Of the weights that train and their moments: what a checkpoint takes."""
    return sum(p.nbytes for p in model.weights().values()) + moment_bytes(model, kind)


@functools.cache
def dynamic_map(signed):
    """The 256 values of a code, ascending, (256,) fp32: 0, 1, and in each decade from 1e-7 to 1 twice as many
    as in the one below, evenly; unsigned: twice as many again, and no negative ones."""
    values = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1)
        middles = 10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def dequantize(codes, scale, values):
    """codes uint8 (blocks, BLOCK), scale (blocks, 1), values: dynamic_map -> fp32."""
    return values[codes.int()] * scale


def quantize(x, values):
    """x fp32 (blocks, BLOCK) -> the nearest values' codes, scale (blocks, 1)."""
    scale = x.abs().amax(1, keepdim=True)
    between = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(x / scale.clamp(min=torch.finfo(torch.float32).tiny), between, right=True)
    return codes.to(torch.uint8), scale


def round_at_random(x, noise):
    """x fp32 -> bf16, up or down, so that the expected value is x. noise: int16, each value as likely."""
    bits = x.view(torch.int32) + (noise.int() & 0xFFFF)     # carries as often as the lower half says
    return (bits & -0x10000).view(torch.float32).bfloat16()


def adamw_update(p, gradient, state, knobs, noise, maps, betas, eps):
    """One parameter's step, in place. state: as state_of says, seen as (blocks, BLOCK), like p and gradient,
    where moments have scales. knobs (3,): learning rate, weight decay, 1 to leave everything as it is."""
    rate, decay, skip = knobs.unbind()
    moments, gradient = [], gradient.float()
    for name, values in zip(('exp_avg', 'exp_avg_sq'), maps):
        scale = state.get(f'{name}_scale')
        moments.append(state[name] if scale is None else dequantize(state[name], scale, values))
    step = state['step'] + 1
    avg = torch.lerp(moments[0], gradient, 1 - betas[0])
    square = torch.lerp(moments[1], gradient.square(), 1 - betas[1])
    root = (square / (1 - betas[1] ** step)).sqrt() + eps
    new_p = p.float() * (1 - rate * decay) - rate / (1 - betas[0] ** step) * avg / root
    new = {'step': step, 'exp_avg': avg, 'exp_avg_sq': square}
    for name, values in zip(('exp_avg', 'exp_avg_sq'), maps):
        if f'{name}_scale' in state:
            new[name], new[f'{name}_scale'] = quantize(new[name], values)
    p.copy_(torch.where(skip > 0, p, new_p if noise is None else round_at_random(new_p, noise)))
    for name, value in new.items():
        state[name].copy_(torch.where(skip > 0, state[name], value))


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW of fp32 or bf16 parameters, with moments in fp32 (kind 'adamw') or 8 bits ('adamw8bit').

    What is rounded at random is decided by `seed`, to be set before each step, the same on all ranks, and in
    a sharded model by the rank."""
    _step_supports_amp_scaling = True  # it is told of a step to skip by found_inf

    def __init__(self, groups, betas, eps, kind, compiled):
        super().__init__(groups, {'lr': 0.0})
        self.kind, self.seed, self.found_inf = kind, 0, 0.0
        self.constants = {'betas': betas, 'eps': eps}
        self.update = torch.compile(adamw_update) if compiled else adamw_update

    @torch.no_grad()
    def step(self):
        first = self.param_groups[0]['params'][0]
        rank = first.device_mesh.get_rank() if is_sharded(first) else 0
        device = first.device
        generator = torch.Generator(device).manual_seed(self.seed + (rank << 50))
        maps = [dynamic_map(signed).to(device) for signed in (True, False)]
        for group in self.param_groups:
            knobs = torch.tensor([group['lr'], group['weight_decay'], 0.0], device=device)
            knobs[2] = self.found_inf
            for p in group['params']:
                if p.grad is not None:
                    self.step_parameter(p, knobs, generator, maps)

    def step_parameter(self, p, knobs, generator, maps):
        kept = self.state[p]
        if not kept:
            kept.update(empty_state(p, self.kind))
        kept = {name: own_part(value) for name, value in kept.items()}
        p, gradient = own_part(p.detach()), own_part(p.grad)
        shape = (-1, BLOCK) if 'exp_avg_scale' in kept else (-1,)
        seen = {name: value.view(shape) if value.shape == p.shape else value for name, value in kept.items()}
        noise = None
        if p.dtype == torch.bfloat16:
            noise = torch.empty(p.shape, dtype=torch.int16, device=p.device)
            noise = noise.random_(-2**15, 2**15, generator=generator).view(shape)
        p, gradient = p.view(shape), gradient.reshape(shape)
        self.update(p, gradient, seen, knobs, noise=noise, maps=maps, **self.constants)


def set_rate(optimizer, lr):
    """Every group's learning rate; one that is a tensor, as a compiled step wants it, is filled in place."""
    for group in optimizer.param_groups:
        if isinstance(group['lr'], torch.Tensor):
            group['lr'].fill_(lr)
        else:
            group['lr'] = lr


def step_if_finite(optimizer, norm, skips):
    """optimizer.step(), unless the gradient norm (0-dim tensor) is not finite: then parameters and state stay
    as they are, and skips (3,) counts the step: skipped in all, in a row up to now, the longest row.

    torch's fused optimizers are told by `found_inf`, on the device; before any other steps, the host waits
    for the norm, since it would ignore found_inf and write the NaNs."""
    skip = (~norm.isfinite()).float()
    if getattr(optimizer, '_step_supports_amp_scaling', False):
        optimizer.found_inf = skip
        optimizer.step()
    elif not skip:
        optimizer.step()
    row = (skips[1] + 1) * skip
    skips.copy_(torch.stack([skips[0] + skip, row, torch.maximum(skips[2], row)]))


def named_state(optimizer, model):
    """The optimizer's state as parameter name -> state_of's tensors: independent of order and factory."""
    return {name: dict(optimizer.state[p]) for name, p in model.weights().items() if p in optimizer.state}


def load_named_state(optimizer, model, state):
    """The inverse of named_state, or of what checkpoints name in its place, see sharding.for_one_file. Raises
    ValueError where the names are not the model's."""
    weights = model.weights()
    if 'folder' in state:
        for p in weights.values():
            optimizer.state[p] = empty_state(p, getattr(optimizer, 'kind', 'adamw'))
        read_folder(named_state(optimizer, model), state)
        return
    if state.keys() - weights.keys():
        odd = sorted(state.keys() - weights.keys())
        raise ValueError(f'the optimizer state is another model\'s: it has {odd[0]}')
    for name, values in state.items():
        p = weights[name]
        optimizer.state[p] = {key: placed_like(p, value) for key, value in values.items()}


def placed_like(p, tensor):
    """A copy of a whole tensor on a parameter's device; where that is sharded, of this rank's part."""
    if tensor.dim() and is_sharded(p):
        from torch.distributed.tensor import distribute_tensor  # late: it takes a second
        return distribute_tensor(tensor, p.device_mesh, p.placements, src_data_rank=None).clone()
    return tensor.to(p.device, copy=True)


def own_part(tensor):
    """This rank's of a sharded tensor; any other as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor
