"""Smoke runs: the benchmarks work and leave what they promise; speeds are for a quiet machine."""
import json
import os

import pytest

from conftest import run


def result(out, tmp_path, name):
    last = json.loads(out.splitlines()[-1])
    assert last == json.loads((tmp_path / f'{name}.json').read_text()) and last['versions']['torch'] and last['device']
    assert out.startswith('| ') and all(row['ratio'] > 0 for row in last['rows'])
    return last


def test_sample(tmp_path):
    out = run('bench.py', 'sample', '--new_tokens=2', '--samples=2', '--sample_tokens=2', f'--results={tmp_path}').stdout
    assert [row['samples'] for row in result(out, tmp_path, 'sample')['rows']] == [1, 2]


def test_data(tmp_path):
    if not os.path.isdir(os.environ['TIKTOKEN_CACHE_DIR']):
        pytest.skip("no TIKTOKEN_CACHE_DIR with GPT-2's files")
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({'text': [f'Document {i} of many. ' * 20 for i in range(300)]}), tmp_path / 'a.parquet')
    out = run('bench.py', 'data', f'--data_files={tmp_path}/a.parquet', '--repeats=1', '--batch_size=4', f'--results={tmp_path}').stdout
    found = result(out, tmp_path, 'data')
    assert len(found['rows']) == 2 and 0 <= found['data_wait_share_at_600k_tokens_per_second'] < 1
