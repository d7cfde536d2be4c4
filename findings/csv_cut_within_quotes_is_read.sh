#!/bin/bash
# pyarrow 26.0.1: pyarrow.csv.read_csv takes the end of a file for the end of a quoted cell. A CSV file that was cut
# within quotes, or in which one closing quote is missing, is read without an error or a warning: all lines behind the
# open quote become one cell's text. newlines_in_values=False, the default, makes no difference here, though it says
# that no cell has line breaks.
# Seen: of four rows, whose second cell has an open quote in row 2, two rows come back, the last holding the text of
# rows 2 to 4; csv.reader(strict=True) of Python says "unexpected end of data".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check pyarrow==26.0.1
cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import csv
import io
import sys
import pyarrow.csv

text = 'id,text\n1,"one"\n2,"two\n3,three\n4,four\n'
found = []
for inside in False, True:
    options = pyarrow.csv.ParseOptions(newlines_in_values=inside)
    try:
        table = pyarrow.csv.read_csv(io.BytesIO(text.encode()), parse_options=options).to_pylist()
    except pyarrow.ArrowInvalid as error:
        table = str(error)
    print(f'pyarrow, newlines_in_values={inside}:', table)
    found.append(table == [{'id': 1, 'text': 'one'}, {'id': 2, 'text': 'two\n3,three\n4,four\n'}])
try:
    print('csv, strict:', list(csv.reader(io.StringIO(text), strict=True)))
    refused = False
except csv.Error as error:
    print('csv, strict:', error)
    refused = True
sys.exit(not (all(found) and refused))
EOF
