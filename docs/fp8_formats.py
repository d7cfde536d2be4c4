"""Draw a gradient's magnitudes, before and after its scale, above the numbers of e4m3 and e5m2.

$ PYTHONPATH=. python docs/fp8_formats.py checkpoints_shakespeare/latest.pt docs/fp8_formats.png

It is the gradient of the last block's output, for 8 windows of the run's validation text.
"""
import sys

import matplotlib.pyplot as plt
import torch

from fp8gpt import pretrained
from fp8gpt.data import TokenData, eval_batches
from fp8gpt.fp8.linear import E4M3, E5M2
from fp8gpt.shards import find_dataset

if len(sys.argv) != 3:
    sys.exit(__doc__)
state, _ = pretrained.opened(sys.argv[1])
model, seen = pretrained.model_of(state), []
model.h[-1].mlp.down.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0].float().abs()))
data = TokenData(find_dataset(state['config']), 'val', model.config.block_size)
x, y, _ = next(eval_batches(data, 8 * data.block_size, 8))
model(x, y).backward()
gradient = seen[0][seen[0] > 0]     # (values,)
scale = torch.finfo(E5M2).max / gradient.max()

figure, axes = plt.subplots(figsize=(8, 3.6), layout='constrained')
for label, values in ('as it is', gradient), (f'times its scale, {scale:.3g}', gradient * scale):
    lost = (values.to(E5M2) == 0).float().mean()
    print(f'the gradient {label}: amax {values.max():.3g}, {lost:.1%} become 0 in e5m2')
    axes.hist(values.log2(), bins=range(-36, 17), alpha=0.5, label=f'gradient, {label}',
              weights=[100 / len(values)] * len(values))
top = axes.get_ylim()[1]
for row, name, dtype in (-0.1, 'e4m3', E4M3), (-0.2, 'e5m2', E5M2):
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].log2()
    axes.plot(numbers, [row * top] * len(numbers), '|', color='black', markersize=9)
    axes.text(numbers[0] - 0.6, row * top, f'numbers of {name}', ha='right', va='center')
axes.set(xlabel='magnitude, as a power of two', ylabel='% of its values', ylim=(-0.28 * top, 1.35 * top))
axes.legend(loc='upper left')
axes.grid(alpha=0.3)
figure.savefig(sys.argv[2], dpi=110)
