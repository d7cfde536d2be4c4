"""The learning-rate schedule, the budget of hours, parameter groups, AdamW, the skip of a non-finite step.

AdamW is torch's where weights and moments are fp32, else torchao's: it rounds new bf16 weights at random, and
keeps moments of 8 bits as codes of 256 values, in blocks of 256 with a scale each, the largest magnitude
(Dettmers et al. 2022, arXiv 2110.02861).
"""
import collections
import dataclasses
import logging
import math
import time

import torch

from configurator import MachineError, SettingError
from fp8gpt.distributed import is_sharded, part, rank_0s

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
        """Return the Schedule of a script's settings."""
        names = 'max_lr', 'min_lr_ratio', 'warmup_steps', 'lr_schedule', 'decay_share'
        return cls(last_step, *(settings[name] for name in names))

    def check(self):
        """Raise SettingError for a warm-up that does not fit: it would never reach
        max_lr."""
        if self.warmup_steps > self.last_step:
            raise SettingError(f'warmup_steps={self.warmup_steps}, but the run has '
                               f'{self.last_step:.0f} steps: it would end before reaching max_lr; '
                               f'a tenth of the run is --warmup_steps={max(1, int(self.last_step) // 10)}')
        if self.lr_schedule == 'wsd' and self.warmup_steps > self.decay_start:
            raise SettingError(f'warmup_steps={self.warmup_steps} and the decay over the last '
                               f'{self.decay_share:.0%} of {self.last_step:.0f} steps overlap: shorten one, '
                               f'as --warmup_steps={int(self.decay_start) // 5}')

    def fit(self, config, is_shorter=False):
        """Cut a warm-up that nobody typed to a tenth of the run where it would take longer; one that is the
        run's own only where it does not fit, unless the run `is_shorter` than that. Return a line about it,
        or ''. config: the script's settings."""
        tenth, before = max(1, int(self.last_step) // 10), self.warmup_steps
        if 'warmup_steps' in config.typed or before <= (tenth if is_shorter else self.last_step):
            return ''
        self.warmup_steps = tenth
        return f'schedule  warmup_steps={tenth}, a tenth of the run, not {before}'

    def jump(self, step, before):
        """Return a line where the last rate before `step`, at which a run resumes, was that of another
        schedule, else ''. before: that rate, or None."""
        if before is None or any(abs(self.rate(each) - before) <= 0.02 * before for each in (step - 1, step)):
            return ''
        return (f'WARNING: the learning rate was {before:.2e} until now and is {self.rate(step):.2e} from '
                'here on, by a schedule of another length or peak; lr_schedule=wsd goes on without a jump')

    @property
    def step_to_keep(self):
        """Return the last step before the decay of wsd, from which a longer run can go on; 0 for others."""
        if self.lr_schedule != 'wsd':
            return 0
        return int(self.decay_start + 1e-6)     # 45, not 44.99999999999999

    @property
    def decay_start(self):
        """The step at which the decay starts."""
        if self.lr_schedule == 'cosine':
            return self.warmup_steps
        return self.last_step - self.decay_share * self.last_step

    def rate(self, step):
        """Return the learning rate of a step."""
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
        """Return the rates at the run's landmarks, for the console."""
        if self.last_step == OPEN:
            return f'schedule  {self.lr_schedule}, by the share of max_hours that is used'
        steps = sorted({0, max(0, self.warmup_steps - 1), self.last_step // 2, self.last_step - 1})
        return f'schedule  {self.lr_schedule}: ' + ', '.join(f'step {s} {self.rate(s):.2e}' for s in steps)


class Budget:
    """The hours that a run has used and, with max_hours, an estimate of its last step. A schedule up to that
    step follows the share of the time that is used: its decay ends with the budget, however long steps take.

    The loop counts, with its evaluations and checkpoints except those at its end. Set-up does not count. Each
    process compiles in its first step, so that step counts as much as the second one."""

    def __init__(self, max_hours, limit, hours=0.0, clock=time.monotonic):
        """max_hours: 0 = none. limit: the last step by the other settings. hours: used before. clock():
        seconds."""
        self.max_hours, self.limit, self.clock = max_hours, limit, clock
        self.hours, self.share = hours, 0.0
        self.since, self.steps = None, 0  # of this process

    def after_step(self, step):
        """Count the time since the last call and return the last step, by rank 0's clock."""
        now = self.clock()
        if self.steps:
            counts = 2 if self.steps == 1 else 1
            self.hours += counts * (now - self.since) / 3600
        self.since, self.steps = now, self.steps + 1
        return rank_0s(self.last_step(step)) if self.max_hours else self.limit

    def last_step(self, step):
        """Return the last step as estimated after `step` steps: that one itself, once the time is used."""
        if not self.max_hours or not self.hours:
            return self.limit
        if self.hours >= self.max_hours:
            return step
        next_used = self.hours * (step + 1) / step / self.max_hours
        self.share = max(self.share, min(1.0, next_used))  # it never falls, so no rate rises again
        return min(self.limit, (step + 1) / self.share)


def make_optimizer(model, betas, weight_decay, kind='adamw', compiled=False):
    """Return AdamW, or Muon, of the setting `optimizer`'s kind. AdamW decays matrices (p.dim() >= 2), not
    vectors: by shape, not by type of module, so that no factory's weights are left out. compiled: whether
    torchao's step is. Raises MachineError where torchao is missing, and SettingError where a shard is no
    whole number of blocks of 8-bit moments."""
    if kind == 'muon':
        return Muon(model, betas, weight_decay)
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{'params': [p for p in trainable if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in trainable if p.dim() < 2], 'weight_decay': 0.0}]
    if kind == 'adamw' and all(p.dtype == torch.float32 for p in trainable):
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)
    for p in trainable:
        ranks = p.device_mesh.size() if is_sharded(p) else 1
        if in_8_bits(p, kind) and (len(p) % ranks or p.numel() // BLOCK % ranks):
            raise SettingError(f'optimizer=adamw8bit: on so many ranks a shard is no multiple of {BLOCK} '
                               'values: --optimizer=adamw, fewer ranks, or --sharding_mode=ddp')
    return LowBitAdamW(groups, betas, kind, compiled)


# --------------------------------------------------------------------------------------- bf16 weights, 8 bits

BLOCK = 256


def in_8_bits(p, kind):
    """Return whether a parameter's moments have 8 bits: a matrix's do, if it consists of whole blocks."""
    return kind == 'adamw8bit' and p.dim() >= 2 and p.numel() % BLOCK == 0


def moment_bytes(model, kind):
    """Return the bytes of all trainable parameters' moments."""
    # two codes, each with its part of a scale, or two fp32 numbers
    each = {p: 2 + 8 / BLOCK if in_8_bits(p, kind) else 8 for p in model.parameters() if p.requires_grad}
    if kind == 'muon':
        each |= {p: 4 for p, _ in matrices_of_blocks(model)}
    return int(sum(p.numel() * size for p, size in each.items()))


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW of fp32 or bf16 parameters, with moments in fp32 (kind 'adamw') or 8 bits ('adamw8bit'), by
    torchao's update (but see bound_next_step), which is compiled once: torchao's own step calls torch.compile
    for each parameter, half of its host's time. `seed`, to be set before each step, decides how bf16 weights
    are rounded, alike on all ranks. Raises MachineError where torchao is missing."""

    def __init__(self, groups, betas, kind, compiled):
        for name in ('torchao', 'torch.utils._pytree'):     # they warn of what does not concern training
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            from torchao.optim.adam import single_param_adam
            from torchao.optim.subclass_8bit import OptimState8bit
        except ImportError:
            raise MachineError('optimizer=adamw8bit and param_dtype=bf16 take torchao: '
                               'pip install torchao') from None
        super().__init__(groups, {'lr': torch.tensor(0.0), 'betas': betas, 'eps': 1e-8})
        self.kind, self.seed, self.in_codes, self.update = kind, 0, OptimState8bit, single_param_adam
        self.zero = None    # the code of a first moment of 0
        if compiled:
            self.update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)

    def moment(self, p, signed):
        """Return a parameter's first moment."""
        if not in_8_bits(p, self.kind):
            return torch.zeros_like(p, dtype=torch.float32)
        own = part(p)
        zeros = self.in_codes.zeros(own.shape, signed, BLOCK, own.device, torch.float32)
        if signed and self.zero is None:
            self.zero = zeros.qmap.tolist().index(0)
        return sharded_as(p, zeros)

    @torch.no_grad()
    def step(self, closure=None):
        torch.manual_seed(self.seed)
        with torch._dynamo.utils.disable_cache_limit():     # each shape is a graph of its own
            for group in self.param_groups:
                settings = group['lr'], *group['betas'], group['weight_decay'], group['eps']
                for p in group['params']:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state |= {'step': torch.zeros(()), 'exp_avg': self.moment(p, signed=True),
                                  'exp_avg_sq': self.moment(p, signed=False)}
                    state['step'] += 1
                    moments = [state[name] for name in ('step', 'exp_avg', 'exp_avg_sq')]
                    rounded_at_random = p.dtype == torch.bfloat16
                    self.update(p.detach(), p.grad, *moments, None, *settings, True, rounded_at_random)
                    self.bound_next_step(*map(part, moments[1:]))

    def bound_next_step(self, mean, square):
        """Set first moments in codes to 0 where the second one's code is 0: the smallest code is 3e-7 of its
        block's largest value, so the square of a small gradient is lost, and not its mean. A step without a
        gradient, as of an embedding whose token does not come, would divide that mean by eps."""
        if hasattr(mean, 'codes'):
            mean.codes.masked_fill_(square.codes == 0, self.zero)


def sharded_as(p, own):
    """Return the DTensor of which each rank has `own`, in equal parts as p; own where p is not sharded."""
    if not is_sharded(p):
        return own
    from torch.distributed.tensor import DTensor
    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False)


# ------------------------------------------------------------------------------------------------------ Muon

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315     # Jordan et al. 2024: five iterations end within 0.7 ... 1.2
STACK = 2**27   # values of the matrices that Muon takes at once: a quarter of a GB in bf16, and copies of it


def matrices_of_blocks(model):
    """Return [(matrix of a block, rows of each linear in it)]: q, k and v, or gate and up, share one."""
    found = []
    for name, p in model.weights().items():
        if name.startswith('h.') and p.dim() == 2:
            rows = [len(p)]
            if name.endswith('attn.qkv.weight'):
                rows = [heads * model.config.head_dim for heads in model.h[0].attn.counts]
            elif name.endswith('gate_up.weight'):
                rows = [len(p) // 2] * 2
            found.append((p, rows))
    return found


def orthogonalise(x):
    """Return about U V^T for each x = U S V^T of a stack (n, rows, columns), rows <= columns, by five
    Newton-Schulz iterations (Jordan et al. 2024)."""
    a, b, c = NEWTON_SCHULZ
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for the matrices of blocks, AdamW for the other parameters.

    A matrix (n, m) moves by 0.2 sqrt(max(n, m)) max_lr U V^T: by 0.2 max_lr in the mean square, as AdamW's
    updates are said to (Liu et al. 2025, arXiv 2502.16982). The quickstart's model wants 1.5e-2 where AdamW
    wants 2e-3. These matrices alone decay. Raises SettingError for sharded or bf16 weights."""

    def __init__(self, model, betas, weight_decay):
        self.matrices = matrices_of_blocks(model)
        in_blocks = {p for p, _ in self.matrices}
        for p in in_blocks:
            if is_sharded(p) or p.dtype != torch.float32:
                raise SettingError('optimizer=muon takes whole fp32 weights on each GPU: '
                                   '--sharding_mode=ddp --param_dtype=fp32, or --optimizer=adamw')
        groups = [{'params': [p for p in model.weights().values() if p not in in_blocks]},
                  {'params': [p for p, _ in self.matrices], 'weight_decay': weight_decay}]
        super().__init__(groups, lr=0.0, betas=betas, weight_decay=0.0, fused=True)
        self._step_supports_amp_scaling = False     # Muon reads no found_inf: see step_if_finite

    @torch.no_grad()
    def step(self, closure=None):
        others, matrices = groups = self.param_groups
        self.param_groups = [others]
        super().step(closure)
        self.param_groups = groups
        for p, _ in self.matrices:
            state = self.state[p]
            if not state:
                state |= {
                    'step': torch.zeros(()),
                    'momentum': torch.zeros_like(p),
                }
            state['step'] += 1
        momentum = 0.85 + 0.1 * min(1.0, state['step'].item() / 300)
        weights = [p for p, _ in self.matrices]
        gradients = [p.grad for p in weights]
        means = [self.state[p]['momentum'] for p in weights]
        # by lists, in few kernels: the GPU waits for the host, which has waited for the norm
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        torch._foreach_mul_(weights, 1 - matrices['lr'] * matrices['weight_decay'])
        # shape -> [(a linear's weight, its gradient, the gradients' mean)], tall ones transposed
        alike = collections.defaultdict(list)
        for (_, rows), *each in zip(self.matrices, weights, gradients, means):
            for parts in zip(*(tensor.split(rows) for tensor in each)):
                if len(parts[0]) > parts[0].shape[1]:
                    parts = [part.mT for part in parts]
                alike[parts[0].shape].append(parts)
        for shape, linears in alike.items():
            most = max(1, STACK // shape.numel())
            for start in range(0, len(linears), most):
                move_matrices(linears[start:start + most], momentum, matrices['lr'])


def move_matrices(linears, momentum, lr):
    """Move by Muon the weights of [(weight, its gradient, the gradients' mean)], all of one shape (n, m), n
    at most m."""
    weights, gradients, means = zip(*linears)
    dtype = torch.bfloat16 if weights[0].is_cuda else torch.float32
    updates = weights[0].new_empty(len(weights), *weights[0].shape, dtype=dtype)
    torch._foreach_copy_([*updates], torch._foreach_lerp(gradients, means, momentum))   # Nesterov's
    rate = lr * 0.2 * math.sqrt(weights[0].shape[1])
    torch._foreach_sub_(weights, [*orthogonalise(updates)], alpha=rate)


def set_rate(optimizer, lr):
    """Set every group's learning rate; torchao's is a tensor, which is filled in place."""
    for group in optimizer.param_groups:
        if isinstance(group['lr'], torch.Tensor):
            group['lr'].fill_(lr)
        else:
            group['lr'] = lr


def step_if_finite(optimizer, norm, skips):
    """Call optimizer.step(), unless the gradient norm (0-dim tensor) is not finite: then parameters and state
    stay as they are, and skips (3,) counts the step: skipped in all, in a row up to now, the longest row.

    torch's fused optimizers read `found_inf`, on the device; before any other steps, the host waits for the
    norm, since it would ignore found_inf and write the NaNs."""
    skip = (~norm.isfinite()).float()
    if getattr(optimizer, '_step_supports_amp_scaling', False):
        optimizer.found_inf = skip
        optimizer.step()
    elif not skip:
        optimizer.step()
    row = (skips[1] + 1) * skip
    skips.copy_(torch.stack([skips[0] + skip, row, torch.maximum(skips[2], row)]))


@torch.no_grad()
def named_state(optimizer, model):
    """Return parameter name -> {'step', 'exp_avg', 'exp_avg_sq'}, the optimizer's own tensors, which are made
    where it has not stepped yet. A moment of 8 bits is two: codes uint8 of the parameter's shape, and
    'exp_avg_scale' (blocks, 1)."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict    # late: it takes a second
    state = get_optimizer_state_dict(model, optimizer)['state']
    return {name: {key: tensor for pair in kept.items() for key, tensor in plain_tensors(*pair)}
            for name, kept in state.items()}


def plain_tensors(name, value):
    """Yield (name, tensor) of a value of the optimizer's state: itself, or codes and scales."""
    own = part(value)
    if not hasattr(own, 'codes'):
        yield name, value
        return
    yield name, sharded_as(value, own.codes)
    yield f'{name}_scale', sharded_as(value, own.scale[:, None])
