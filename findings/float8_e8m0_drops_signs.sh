#!/bin/bash
# torch 2.13.0, ml_dtypes 0.6.0, CPU: a cast to float8_e8m0fnu, the dtype of MX scales, which holds powers of two and
# NaN alone. torch drops the sign of a negative value, and 0 becomes 2^-127; by ml_dtypes, both become NaN. So a scale
# that came out negative, or as 0, is an ordinary one in torch. Both round 3 up to 4, and so 448 / amax rounded by a
# cast may lie above the range that it was made for.
# Seen: torch 2 1 2^-127 4 2 nan, ml_dtypes nan nan nan 4 2 nan, of -2, -1, 0, 3, 1.5, inf.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 ml_dtypes==0.6.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys
import ml_dtypes
import numpy as np
import torch

values = np.array([-2, -1, 0, 3, 1.5, np.inf], np.float32)
by_torch = torch.from_numpy(values).to(torch.float8_e8m0fnu).float().tolist()
by_numpy = values.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32).tolist()
print('from', *values.tolist())
print('torch', *by_torch)
print('ml_dtypes', *by_numpy)
expected = ['2.0', '1.0', str(2.0**-127), '4.0', '2.0', 'nan'], ['nan', 'nan', 'nan', '4.0', '2.0', 'nan']
sys.exit((list(map(str, by_torch)), list(map(str, by_numpy))) != expected)
EOF
