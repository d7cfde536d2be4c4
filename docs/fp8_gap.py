"""Draw how far FP8's validation loss is from bf16's: the mean over seeds, and its 95% interval as a band.

$ python docs/fp8_gap.py results/quality-quickstart.json docs/fp8_gap.png    # a result of `bench.py quality`
"""
import json
import sys

import matplotlib.pyplot as plt

if len(sys.argv) != 3:
    sys.exit(__doc__)
with open(sys.argv[1]) as file:
    row = json.load(file)['rows'][0]        # of one recipe
points = [(int(tokens) / 1e6, gap, *interval) for tokens, (gap, interval) in row['curve'].items()]
millions, gaps, low, high = zip(*points)
figure, axes = plt.subplots(figsize=(8, 3), layout='constrained')
axes.axhline(0, color='black', linewidth=1)
axes.fill_between(millions, low, high, alpha=0.25, label=f'95% interval, {row["seeds"]} pairs of runs')
axes.plot(millions, gaps, marker='o', markersize=4, color='C0', label='mean')
axes.set(xlabel='tokens, millions', ylabel='% of the loss in bf16', xlim=(0, None))
axes.set_title("FP8's validation loss minus bf16's: below 0, FP8 is better", fontsize=11)
figure.legend(loc='outside lower center', ncols=2)   # off the band
axes.grid(alpha=0.3)
figure.savefig(sys.argv[2], dpi=110)
