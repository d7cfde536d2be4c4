#!/bin/bash
# torchao 0.18.0 with torch 2.13.0, CPU: AdamW8bit and AdamWFp8 keep both moments in 8 bits, 256 values to a scale. Of
# a row of small gradients beside rows of large ones, as of a rare token in an embedding, the second moment is rounded
# to 0 and the first is not. Their quotient, over eps alone, throws the row by thousands of learning rates, in steps in
# which its gradient is 0. AdamW in 32 bits moves the same row by less than one learning rate a step.
# Seen: a row of 64 values, a gradient of 3e-5 in the first of 20 steps, the rows beside it have gradients of about 1:
# its largest step is 0.67 learning rates by torch.optim.AdamW, 3,433 by AdamW8bit, 3,522 by AdamWFp8.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 torchao==0.18.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - 2> log <<'EOF' || { cat log; exit 1; }
import sys
import torch
from torchao.optim import AdamW8bit, AdamWFp8

LR = 1e-3
largest = []
for kind in torch.optim.AdamW, AdamW8bit, AdamWFp8:
    torch.manual_seed(0)
    rows = torch.nn.Parameter(torch.zeros(128, 64))     # 8,192 values: smaller parameters stay in 32 bits
    optimizer = kind([rows], lr=LR, weight_decay=0.0)
    steps = []
    for step in range(20):
        rows.grad = torch.zeros_like(rows)
        rows.grad[::2] = torch.randn(64, 64)
        if step == 0:
            rows.grad[1] = 3e-5 * torch.randn(64)
        before = rows[1].detach().clone()
        optimizer.step()
        steps.append((rows[1].detach() - before).abs().max().item() / LR)
    largest.append(max(steps[1:]))
    print(f'{kind.__name__:<10} largest step of the idle row: {largest[-1]:,.2f} learning rates')
exact, *eight_bits = largest
sys.exit(not exact < 1 < 1000 < min(eight_bits))
EOF
