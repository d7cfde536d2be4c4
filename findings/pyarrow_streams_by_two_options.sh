#!/bin/bash
# pyarrow 26.0.1: ParquetFile.iter_batches(batch_size=...) holds a whole column chunk of the row group, however small the
# batches are. Neither pre_buffer=False nor buffer_size=N changes that; the two together do.
# Seen: 20,000 texts in one uncompressed row group of 80 MB, read 100 at a time: 85 MB at most by the default and by
# either option alone, 10 MB by both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check pyarrow==26.0.1
cd "$folder"
cat > peak.py <<'EOF'
import sys
import pyarrow
from pyarrow.parquet import ParquetFile

options = eval(sys.argv[1])
rows = sum(map(len, ParquetFile('texts.parquet', **options).iter_batches(batch_size=100)))
assert rows == 20_000
print(pyarrow.default_memory_pool().max_memory() / 1e6)
EOF
"$folder/venv/bin/python" - <<'EOF'
import random
import subprocess
import sys
import pyarrow
import pyarrow.parquet

texts = [random.Random(n).randbytes(2_000).hex() for n in range(20_000)]
pyarrow.parquet.write_table(pyarrow.table({'text': texts}), 'texts.parquet', row_group_size=len(texts),
                            compression='none', use_dictionary=False)
whole = len(texts) * 4_000 / 1e6
peaks = []
for options in {}, {'pre_buffer': False}, {'buffer_size': 2**20}, {'pre_buffer': False, 'buffer_size': 2**20}:
    found = subprocess.run([sys.executable, 'peak.py', repr(options)], check=True, capture_output=True, text=True)
    peaks.append(float(found.stdout))
    print(f'{options}: at most {peaks[-1]:.0f} MB')
sys.exit(not (min(peaks[:3]) > whole > 4 * peaks[3]))
EOF
