#!/bin/bash
# torch 2.13.0, CPU: an optimizer with fused=True changes its parameters without moving their version counter
# (Tensor._version), which foreach=True and the plain loop do move. Autograd compares that counter to see whether a
# saved tensor was changed between forward and backward. So a backward pass that comes after a step raises with the
# other two, and with fused=True gives the gradient at the new weights in silence: of w * w at w = 2, after a step to
# w = 1, it is 2 and not 4. Anything else that keeps a copy of a weight by its version keeps the old one.
# Seen: foreach=False and foreach=True raise, with SGD, Adam and AdamW; fused=True leaves the version at 0, gradient 2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys
import torch

seen = []
for kind in torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW:
    for way in {'foreach': False}, {'foreach': True}, {'fused': True}:
        w = torch.nn.Parameter(torch.tensor([2.0]))
        optimizer = kind([w], lr=1.0, weight_decay=0.0, **way)
        loss = (w * w).sum()
        w.grad = torch.ones(1)
        optimizer.step()            # to w = 1
        w.grad = None
        try:
            loss.backward()
            result = round(w.grad.item(), 4)
        except RuntimeError as error:
            result = 'raises' if 'modified by an inplace operation' in str(error) else str(error)
        print(kind.__name__, way, 'w:', round(w.item(), 4), 'version moved:', w._version > 0, 'backward:', result)
        seen.append((w._version > 0, result))
sys.exit(seen != [(True, 'raises'), (True, 'raises'), (False, 2.0)] * 3)
EOF
