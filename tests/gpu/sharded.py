"""Time sharded training in bf16 and in FP8 on the GPUs of this machine, by whole runs of train_fp8.py.

$ python tests/gpu/sharded.py results/gpu/sharded.json --init_from=llama-3.2-3b --dataset=shakespeare

All words after the first are settings. A row for each precision: the median tokens/s of ten steps, GB of rank
0, the last loss, beside tokens/s of bf16. Weights are random where init_from is a preset. On a CPU two gloo
ranks rehearse it.
"""
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from fp8gpt import files, runlog  # noqa: E402
from fp8gpt.gpus import device_name  # noqa: E402

SKIPPED, TIMED = 3, 10      # the first steps compile
ROWS = {
    'ddp, bf16': ['--fp8_backend=off', '--sharding_mode=ddp'],
    'ddp, delayed': ['--fp8_recipe=delayed', '--sharding_mode=ddp'],
    'bf16': ['--fp8_backend=off'],
    'tensorwise': ['--fp8_recipe=tensorwise'],
    'delayed': ['--fp8_recipe=delayed'],
    'rowwise, gathered in bf16': ['--fp8_recipe=rowwise'],
    'delayed, fsdp_grad_op': ['--fp8_recipe=delayed', '--sharding_mode=fsdp_grad_op'],
}


def measured(words):
    """Return the row of a run, or why there is none."""
    ranks = torch.cuda.device_count() or 2
    steps = SKIPPED + TIMED
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([
            sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={ranks}',
            f'{ROOT}/train_fp8.py', '--fp8_backend=native', '--sharding_mode=fsdp_full', *words,
            f'--max_steps={steps}', '--log_freq=1', '--sample_freq=0', '--eval_tokens=65536',
            f'--checkpoint_freq={10 * steps}', f'--checkpoint_dir={folder}', '--overwrite',
        ], capture_output=True, text=True)
        if done.returncode:
            return {'failed': [line for line in done.stderr.splitlines() if line.startswith('error:')][:1]}
        run = runlog.RunCurves(folder)
    speeds = [run.speeds[step] for step in range(SKIPPED + 1, steps + 1)]
    return {'ranks': ranks, 'tokens/s': statistics.median(speeds), 'GB': run.peak_gb, 'loss': run.last_train}


def main(path, words):
    """Measure, print and write a row after each other."""
    rows, about = {}, {'device': device_name(torch.device('cuda' if torch.cuda.is_available() else 'cpu')),
                       'versions': runlog.versions(), 'words': words}
    for name, its_words in ROWS.items():
        rows[name] = row = measured([*words, *its_words])
        if 'tokens/s' in row and 'tokens/s' in rows.get('bf16', {}):
            row['over bf16'] = row['tokens/s'] / rows['bf16']['tokens/s']
        print(f'{name:26}', row, flush=True)
        files.write_json(path, about | {'rows': rows})


if __name__ == '__main__':
    main(sys.argv[1], sys.argv[2:])
