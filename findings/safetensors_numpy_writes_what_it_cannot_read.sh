#!/bin/bash
# safetensors 0.8.0 with numpy 2.3.5 and ml_dtypes 0.6.0: safetensors.numpy writes arrays of float8_e4m3fn and
# float8_e5m2 under the format's own names, and reads neither of them back, though the program still holds the dtypes
# that it wrote with. One such tensor in a file keeps load_file and load from all the others. The file is good:
# its bytes are the array's.
# Seen: save and save_file succeed; load raises KeyError 'F8_E4M3', load_file another error; the same for F8_E5M2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check \
    safetensors==0.8.0 numpy==2.3.5 ml_dtypes==0.6.0
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import json
import sys
import ml_dtypes
import numpy
import safetensors.numpy

found = []
for dtype, name in (ml_dtypes.float8_e4m3fn, 'F8_E4M3'), (ml_dtypes.float8_e5m2, 'F8_E5M2'):
    tensors = {'plain': numpy.arange(3.0), 'x': numpy.array([1, -2, 0.5], dtype)}
    data = safetensors.numpy.save(tensors)
    safetensors.numpy.save_file(tensors, 'x.safetensors')
    size = int.from_bytes(data[:8], 'little')
    entry = json.loads(data[8:8 + size])['x']
    start, end = entry['data_offsets']
    whole = data[8 + size:][start:end] == tensors['x'].tobytes()
    print(f'written: {entry["dtype"]}, bytes as given: {whole}')
    for how, read in (('load', lambda: safetensors.numpy.load(data)),
                      ('load_file', lambda: safetensors.numpy.load_file('x.safetensors'))):
        try:
            result = read()['x'].dtype
        except Exception as error:
            result = f'{type(error).__name__}: {error}'
        print(f'{how}:', result)
        found.append(isinstance(result, str))
    found.append(whole and entry['dtype'] == name)
sys.exit(not all(found))
EOF
