#!/bin/bash
# triton 3.7.1 with torch 2.13.0: TRITON_INTERPRET=1 runs kernels without a GPU, and its casts to float8 are its own. Where
# rounding carries into the exponent, as of 7.88 to 8, the carry is lost in about every second binade, and the result is
# half as large: 4. Compiled for a GPU, and by torch, it is 8. So of a kernel's outputs about 1 in 50 to 1 in 100 is wrong,
# and a test in the interpreter, within a bound on the mean, may pass.
# Seen, of 4,096 values from 0 to 440: 1.2% wrong in float8e4nv (e4m3fn), 2.4% in float8e5 (e5m2), all of them by half.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 triton==3.7.1 numpy==2.3.5
cd "$folder"
cat > cast.py <<'EOF'
import sys
import torch
import triton
import triton.language as tl


@triton.jit
def cast(source, target, count: tl.constexpr, dtype: tl.constexpr):
    i = tl.arange(0, count)
    tl.store(target + i, tl.load(source + i).to(dtype))


wrong = []
values = torch.linspace(0, 440, 4096)
for theirs, ours in (tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2):
    found = torch.empty(len(values), dtype=ours)
    cast[(1,)](values, found, len(values), theirs)
    found, right = found.float(), values.to(ours).float()
    differ = found != right
    worst = values[differ][-1].item()
    print(f'{theirs}: {differ.float().mean():.1%} differ from torch; {worst:.2f} becomes '
          f'{found[differ][-1].item():g}, by torch {right[differ][-1].item():g}')
    wrong.append(differ.any().item() and bool((found[differ] == right[differ] / 2).all()))
sys.exit(wrong != [True, True])
EOF
TRITON_INTERPRET=1 "$folder/venv/bin/python" cast.py
