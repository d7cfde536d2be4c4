"""The learning-rate schedule, parameter groups, AdamW, and the skip of a non-finite step."""
import dataclasses
import math

import torch

from configurator import SettingError


@dataclasses.dataclass(frozen=True)
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
        return cls(last_step, **{name: settings[name] for name in names})

    def check(self):
        """Returns the schedule. Raises SettingError for a warm-up that does not fit: it would never reach
        max_lr."""
        if self.warmup_steps > self.last_step:
            raise SettingError(f'warmup_steps={self.warmup_steps}, but the run has {self.last_step} steps: '
                               'it would end before reaching max_lr; '
                               f'a tenth of the run is {max(1, self.last_step // 10)}')
        if self.lr_schedule == 'wsd' and self.warmup_steps > self.decay_start:
            raise SettingError(f'warmup_steps={self.warmup_steps} and the decay over the last '
                               f'{self.decay_share:.0%} of {self.last_step} steps overlap')
        return self

    @property
    def decay_start(self):
        if self.lr_schedule == 'cosine':
            return self.warmup_steps
        return self.last_step - round(self.decay_share * self.last_step)

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
        quarters = (self.last_step * quarter // 4 for quarter in (1, 2, 3))
        steps = sorted({0, max(0, self.warmup_steps - 1), *quarters, self.last_step - 1})
        return f'schedule  {self.lr_schedule}: ' + ', '.join(f'step {s} {self.rate(s):.2e}' for s in steps)


def make_optimizer(model, betas, weight_decay, eps=1e-8):
    """Fused AdamW. Matrices (p.dim() >= 2) decay, vectors do not: by shape, not by type of module, so that no
    factory's weights are left out. Raises AssertionError unless each trainable parameter is in exactly one
    group."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{'params': [p for p in trainable if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in trainable if p.dim() < 2], 'weight_decay': 0.0}]
    grouped = [id(p) for group in groups for p in group['params']]
    assert sorted(grouped) == sorted({id(p) for p in trainable}), 'a parameter is in no group, or in two'
    groups = [group for group in groups if group['params']]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


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
    """The optimizer's state as parameter name -> {'step', 'exp_avg', 'exp_avg_sq'}: independent of order and
    factory."""
    return {name: dict(optimizer.state[p]) for name, p in model.weights().items() if p in optimizer.state}


def load_named_state(optimizer, model, state):
    """The inverse of named_state. Raises ValueError where the names are not the model's."""
    weights = model.weights()
    if state.keys() - weights.keys():
        odd = sorted(state.keys() - weights.keys())
        raise ValueError(f'the optimizer state is another model\'s: it has {odd[0]}')
    for name, values in state.items():
        p = weights[name]
        optimizer.state[p] = {key: value.to(p.device, copy=True) for key, value in values.items()}
