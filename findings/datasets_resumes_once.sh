#!/bin/bash
# datasets 5.0.0: a streaming dataset saves its place by state_dict and takes it up by load_state_dict. After that it
# reads on from the right row, but a state_dict that it gives then says the beginning. So a job that is stopped and
# resumed once goes on right, and one that is resumed twice reads all rows again, in silence.
# Seen, on two Parquet files of 10 rows: a state after 7 rows resumes with row 7; the state of the resumed dataset, 6
# rows later, resumes with row 0 and not 13.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check datasets==5.0.0
cd "$folder"
HF_HOME=$folder HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2> log <<'EOF' || { cat log; exit 1; }
import itertools
import sys
import datasets
import pyarrow
import pyarrow.parquet

for file in range(2):
    rows = pyarrow.table({'row': range(10 * file, 10 * file + 10)})
    pyarrow.parquet.write_table(rows, f'{file}.parquet')


def read(state, count):
    """Return (count rows from a state on, the state after them)."""
    stream = datasets.load_dataset('parquet', data_files=['0.parquet', '1.parquet'], split='train', streaming=True)
    if state:
        stream.load_state_dict(state)
    return [row['row'] for row in itertools.islice(stream, count)], stream.state_dict()


first, state = read(None, 7)
second, state = read(state, 6)
third, _ = read(state, 3)
print('from the start:', first)
print('resumed:       ', second)
print('resumed twice: ', third)
sys.exit((first, second, third) != ([*range(7)], [*range(7, 13)], [0, 1, 2]))
EOF
