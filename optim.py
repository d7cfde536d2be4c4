"""Batch arithmetic, run length, learning-rate schedule, parameter groups, AdamW, and the skip of a non-finite step."""
import math

import torch

from configurator import MachineError, SettingError


def accumulation(batch_size, block_size, world_size, total_batch_size=0, gradient_accumulation_steps=0, target_effective_batch_size=0):
    """Micro-steps per optimizer step. total_batch_size: tokens per step; target_effective_batch_size: the same in sequences;
    both 0: batch_size x block_size x GPUs x gradient_accumulation_steps, of which 0 = 1. Raises ValueError, with the nearest
    that divides, where a target does not divide, and where two of the three disagree."""
    if target_effective_batch_size and total_batch_size not in (0, target_effective_batch_size * block_size):
        raise SettingError(f'target_effective_batch_size={target_effective_batch_size} sequences of {block_size} are not '
                         f'total_batch_size={total_batch_size} tokens: give one of the two')
    name, target, unit = 'total_batch_size', total_batch_size, block_size
    if target_effective_batch_size:
        name, target, unit = 'target_effective_batch_size', target_effective_batch_size, 1
    if not target:
        return gradient_accumulation_steps or 1
    micro = batch_size * unit * world_size
    steps, rest = divmod(target, micro)
    if rest:
        nearest = max(1, round(target / micro)) * micro
        raise SettingError(f'{name}={target} is not a multiple of {micro} (batch_size {batch_size} x '
                         + f'block_size {block_size} x ' * (unit > 1) + f'{world_size} ranks); the nearest is {nearest}')
    if gradient_accumulation_steps not in (0, steps):
        raise SettingError(f'{name}={target} means {steps} micro-steps, gradient_accumulation_steps says '
                         f'{gradient_accumulation_steps}: give one of the two')
    return steps


def largest_batch_size(model, block_size, limit, allowed, device):
    """batch_size=0: the largest power of two up to `limit` for which allowed(size) holds and a forward and backward pass of
    size x block_size tokens fits, with room for AdamW's moments. Raises RuntimeError where none does."""
    moments = torch.empty(2 * sum(p.numel() for p in model.parameters()), device=device)
    best, size = 0, 1
    while size <= limit:
        if allowed(size):
            try:
                idx = torch.zeros((size, block_size), dtype=torch.long, device=device)
                model(idx, idx).backward()
                best = size
            except torch.OutOfMemoryError:
                break
            finally:
                model.zero_grad(set_to_none=True)
        size *= 2
    del moments
    if device.type == 'cuda':
        torch.cuda.empty_cache()
    if not best:
        raise MachineError(f'batch_size=0: no batch fits here, not even of one sequence of {block_size} tokens')
    return best


def run_length(tokens_per_step, tokens_per_epoch, max_steps=0, max_tokens=0, num_epochs=0.0):
    """(last step, what ends the run). 0 = unset; the first reached ends the run; none set: one epoch."""
    if not (max_steps or max_tokens or num_epochs):
        num_epochs = 1
    ends = {'max_steps': max_steps, 'max_tokens': max_tokens // tokens_per_step,
            'num_epochs': math.ceil(num_epochs * tokens_per_epoch / tokens_per_step)}
    given = {'max_steps': max_steps, 'max_tokens': max_tokens, 'num_epochs': num_epochs}
    return min((max(1, ends[name]), f'{name}={value:g}') for name, value in given.items() if value)


SCHEDULES = ('cosine', 'wsd', 'constant')


def check_schedule(last_step, warmup_steps, lr_schedule, decay_share):
    """Raises ValueError for an unknown schedule, and for a warm-up that does not fit: it would never reach max_lr."""
    if lr_schedule not in SCHEDULES:
        raise SettingError(f'lr_schedule is one of {", ".join(SCHEDULES)}, not {lr_schedule!r}')
    if not 0 <= decay_share <= 1:
        raise SettingError(f'decay_share is 0 to 1, not {decay_share}')
    if warmup_steps > last_step:
        raise SettingError(f'warmup_steps={warmup_steps}, but the run has {last_step} steps: it would end before reaching max_lr; '
                         f'a tenth of the run is {max(1, last_step // 10)}')
    if lr_schedule == 'wsd' and warmup_steps + round(decay_share * last_step) > last_step:
        raise SettingError(f'warmup_steps={warmup_steps} and the decay over the last {decay_share:.0%} of {last_step} steps overlap')


def learning_rate(step, last_step, max_lr, min_lr_ratio, warmup_steps, lr_schedule='cosine', decay_share=0.2):
    """Learning rate of step 0 ... last_step - 1: linear to max_lr at step warmup_steps - 1, then

    cosine: half a cosine to min_lr_ratio * max_lr at the last step (Loshchilov & Hutter 2017);
    wsd: constant, then linear to that value over the last decay_share of the run (Hu et al. 2024; Haegele et al. 2024);
    constant: max_lr."""
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    if lr_schedule == 'constant':
        return max_lr
    start = warmup_steps if lr_schedule == 'cosine' else last_step - round(decay_share * last_step)
    progress = min(1.0, max(0.0, (step + 1 - start) / max(1, last_step - start)))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if lr_schedule == 'cosine' else 1 - progress
    return max_lr * (min_lr_ratio + (1 - min_lr_ratio) * shape)


def make_optimizer(model, betas, weight_decay, eps=1e-8):
    """Fused AdamW. Matrices (p.dim() >= 2) decay, vectors do not: by shape, not by type of module, so that no factory's
    weights are left out. Raises AssertionError unless each trainable parameter is in exactly one group."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{'params': [p for p in trainable if p.dim() >= 2], 'weight_decay': weight_decay},
              {'params': [p for p in trainable if p.dim() < 2], 'weight_decay': 0.0}]
    grouped = [id(p) for group in groups for p in group['params']]
    assert sorted(grouped) == sorted({id(p) for p in trainable}), 'a parameter is in no group, or in two'
    groups = [group for group in groups if group['params']]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)


def step_if_finite(optimizer, norm, skips):
    """optimizer.step(), unless the gradient norm (0-dim tensor) is not finite: then parameters and state stay as they are, and
    skips (3,) counts the step: skipped in all, in a row up to now, the longest row. The host does not wait for any of it."""
    optimizer.found_inf = skip = (~norm.isfinite()).float()
    optimizer.step()
    row = (skips[1] + 1) * skip
    skips.copy_(torch.stack([skips[0] + skip, row, torch.maximum(skips[2], row)]))


def named_state(optimizer, model):
    """The optimizer's state as parameter name -> {'step', 'exp_avg', 'exp_avg_sq'}: independent of order and factory."""
    return {name: dict(optimizer.state[p]) for name, p in model.weights().items() if p in optimizer.state}


def load_named_state(optimizer, model, state):
    """The inverse of named_state. Raises ValueError where the names are not the model's."""
    weights = model.weights()
    if state.keys() - weights.keys():
        raise ValueError(f'the optimizer state is another model\'s: it has {sorted(state.keys() - weights.keys())[0]}')
    for name, values in state.items():
        p = weights[name]
        optimizer.state[p] = {key: value.to(p.device, copy=True) for key, value in values.items()}
