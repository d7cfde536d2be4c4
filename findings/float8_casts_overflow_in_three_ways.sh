#!/bin/bash
# torch 2.13.0, CPU: a value too large for a float8 dtype becomes three different things, by the dtype's name alone.
# .to(torch.float8_e4m3fn) clamps it to 448, and infinity, too: a check for non-finite values afterwards finds none.
# .to(torch.float8_e5m2) gives infinity from 61,440 on. float8_e4m3fnuz and float8_e5m2fnuz give NaN. Of two tensors
# of one training step, activations (e4m3fn) hide an overflow and gradients (e5m2) show it. torch.full with a number
# refuses in float8_e4m3fn what .to takes.
# Seen: 1e6 and inf become 448, inf, nan, nan; NaN stays NaN in each; torch.full raises RuntimeError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys
import torch

kinds = 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz', 'float8_e5m2fnuz'
values = torch.tensor([61439.0, 61440.0, 1e6, float('inf'), float('nan')])
print('from', *values.tolist())
found = {}
for kind in kinds:
    for dtype in torch.float32, torch.bfloat16:
        # bf16 has no 61,439
        given = values.to(dtype)[1:] if dtype == torch.bfloat16 else values
        back = given.to(getattr(torch, kind)).float().tolist()
        print(kind, 'from', dtype, *back)
        found.setdefault(kind, []).append(' '.join(map(str, back[-4:])))
    found[kind].append(str(values[0].to(getattr(torch, kind)).item()))
try:
    torch.full((2,), 1e6, dtype=torch.float8_e4m3fn)
    refused = False
except RuntimeError as error:
    refused = True
    print('torch.full:', str(error).splitlines()[0])
expected = {
    'float8_e4m3fn': ['448.0 448.0 448.0 nan'] * 2 + ['448.0'],
    'float8_e5m2': ['inf inf inf nan'] * 2 + ['57344.0'],
    'float8_e4m3fnuz': ['nan nan nan nan'] * 2 + ['nan'],
    'float8_e5m2fnuz': ['nan nan nan nan'] * 2 + ['57344.0'],
}
sys.exit(not refused or found != expected)
EOF
