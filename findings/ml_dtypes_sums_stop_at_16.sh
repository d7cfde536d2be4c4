#!/bin/bash
# ml_dtypes 0.6.0 with numpy 2.3.5, and jax 0.10.2, CPU: sums of float8_e4m3fn stay in it, in silence.
# numpy's sum of 4,096 ones is 16, since 16 + 1 rounds to 16; their mean is 0.0039. jax's product of two
# float8_e4m3fn matrices is float8_e4m3fn, too: 100 ones times 100 ones give 96, 1,024 give NaN, since it is beyond
# 448. numpy's product of the same matrices is float32, and right; so is jax's with preferred_element_type=float32.
# A cast of 464 gives 448, one of 465 NaN, in both.
# Seen: 448 nan twice, sum 16, mean 0.00390625, numpy product 1024 (float32), jax products 96 and nan (float8_e4m3fn).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check ml_dtypes==0.6.0 jax==0.10.2 numpy==2.3.5
cd "$folder"
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'EOF'
import sys
import jax.numpy as jnp
import ml_dtypes
import numpy as np

ones = np.ones((4, 1024), ml_dtypes.float8_e4m3fn)
total, mean, product = ones.sum(), ones.mean(), (ones @ ones.T)[0, 0]
print('numpy: sum of 4,096 ones', total, total.dtype, '| mean', mean, '| product of 1,024', product, product.dtype)
found = [float(total), float(mean), float(product), str(product.dtype)]
values = np.array([464, 465], np.float32)
for cast in values.astype(ml_dtypes.float8_e4m3fn), jnp.asarray(values).astype(jnp.float8_e4m3fn):
    print('464 and 465 become', *cast)
    found.append(' '.join(map(str, cast)))
for count in 100, 1024:
    rows = jnp.ones((4, count), jnp.float8_e4m3fn)
    product, wide = rows @ rows.T, jnp.matmul(rows, rows.T, preferred_element_type=jnp.float32)
    print(f'jax: product of {count}', product[0, 0], product.dtype, '| preferred float32', wide[0, 0])
    found += [str(float(product[0, 0])), str(product.dtype), float(wide[0, 0])]
expected = [16.0, 0.00390625, 1024.0, 'float32', '448 nan', '448 nan',
            '96.0', 'float8_e4m3fn', 100.0, 'nan', 'float8_e4m3fn', 1024.0]
sys.exit(found != expected)
EOF
