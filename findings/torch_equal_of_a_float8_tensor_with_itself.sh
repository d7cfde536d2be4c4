#!/bin/bash
# torch 2.13.0, CPU: torch.equal compares a float8 tensor with a copy, and raises where both arguments are the same
# memory: for those torch looks for NaN alone, by a kernel that float8 has not. A test that a cache returned the very
# tensor that it was given so fails on the right answer, and passes on a copy. == works on both.
# Seen, for all five float8 formats: equal to a copy is True, equal to itself raises NotImplementedError.
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
for name in 'e4m3fn', 'e4m3fnuz', 'e5m2', 'e5m2fnuz', 'e8m0fnu':
    tensor = torch.tensor([1.0, 2.0, 4.0]).to(getattr(torch, f'float8_{name}'))
    for which, other in ('a copy', tensor.clone()), ('itself', tensor):
        try:
            result = torch.equal(tensor, other)
        except NotImplementedError as error:
            result = str(error)
        print(name, 'with', which, ':', result)
        seen.append((which, result is True))
sys.exit(seen != [('a copy', True), ('itself', False)] * 5)
EOF
