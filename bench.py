"""Benchmarks, each against another way of doing the same in the same run; ratios matter, machines are noisy.

$ python bench.py sample                                          # tokens/s of sampling, against nanoGPT's way
$ python bench.py data --data_files='texts/*.parquet'             # tokenizing and loading, against build-nanogpt's and nanoGPT's ways

Each prints a table, writes results/<name>.json with hardware, versions and commit, and ends with that JSON on one line.
"""
import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

import data
import runlog
from configurator import one_line_errors
from model import GPT, PRESETS, KVCache, pick

HERE = os.path.dirname(os.path.abspath(__file__))


def report(name, rows, folder, **facts):
    """Prints rows (dicts with the same keys) as a Markdown table, writes them to <folder>/<name>.json, ends with that as JSON."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    result = {'bench': name, 'device': runlog.device_name(device), 'versions': runlog.versions(), **facts, 'rows': rows}
    text = lambda value: f'{value:,.4g}' if isinstance(value, float) and value < 1e4 else f'{value:,.0f}' if isinstance(value, float) else str(value)
    print('|', ' | '.join(rows[0]), '|\n|', ' | '.join('---' for _ in rows[0]), '|')
    for row in rows:
        print('|', ' | '.join(text(value) for value in row.values()), '|')
    os.makedirs(folder, exist_ok=True)
    data.write_json(os.path.join(folder, f'{name}.json'), result)
    print(json.dumps(result))


def seconds(work):
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------- sampling

def nanogpt_sample(model, idx, new_tokens, device):
    """nanoGPT's generate: the whole sequence through the model for each token (its head only at the last position)."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for _ in range(new_tokens):
            idx = idx[:, -model.config.block_size:]
            logits = model(idx, cache=KVCache(model.config, len(idx), idx.shape[1], model.dtype, device))[:, -1]
            logits = logits / 0.8
            logits = logits.masked_fill(logits < logits.topk(200).values[:, -1:], float('-inf'))
            idx = torch.cat([idx, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1)


def bench_sample(arguments):
    """sample.py's way (bf16 weights, key/value cache, all samples in a batch) against nanoGPT's (fp32, no cache, one by one)."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    theirs, ours = (GPT(PRESETS[arguments.preset], dtype=dtype).to(device) for dtype in (torch.float32, torch.bfloat16))
    for p in ours.parameters():
        p.data = p.data.bfloat16()
    rows = []
    for streams, new_tokens in ((1, arguments.new_tokens), (arguments.samples, arguments.sample_tokens)):
        start = torch.zeros((streams, 1), dtype=torch.long, device=device)
        run_ours = lambda n=new_tokens: list(ours.generate(start, n, temperature=0.8, top_k=200))
        run_ours(3)
        own = [seconds(run_ours)]
        their_seconds = seconds(lambda: [nanogpt_sample(theirs, start[:1], new_tokens, device) for _ in range(streams)])
        own.append(seconds(run_ours))  # before and after: the machine may have changed meanwhile
        own_seconds = statistics.mean(own)
        rows.append({'samples': streams, 'new tokens each': new_tokens, 'ours, tokens/s': streams * new_tokens / own_seconds,
                     "nanoGPT's way, tokens/s": streams * new_tokens / their_seconds, 'ratio': their_seconds / own_seconds})
    report('sample', rows, arguments.results, model=arguments.preset)


# ----------------------------------------------------------------------------------------------------- data

def their_encode(row):
    """build-nanogpt's: ids as a list, checked, then as uint16."""
    tokens = np.array([their_encoding.eot_token] + their_encoding.encode_ordinary(row['text']))
    assert (0 <= tokens).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def fineweb_py(files, out):
    """build-nanogpt's way: the dataset loaded through `datasets`, half of the cores in a pool, chunks of 16, one array a shard."""
    global their_encoding
    import datasets
    import tiktoken
    their_encoding = tiktoken.get_encoding('gpt2')
    rows = datasets.load_dataset('parquet', data_files=files, split='train', cache_dir=os.path.join(out, 'cache'))
    shard, n, count = np.empty(10**8, np.uint16), 0, 0
    with multiprocessing.get_context('fork').Pool(max(1, os.cpu_count() // 2)) as pool:
        for tokens in pool.imap(their_encode, rows, chunksize=16):
            if n + len(tokens) > len(shard):
                np.save(os.path.join(out, f'shard_{count}'), shard)
                n, count = 0, count + 1
            shard[n:n + len(tokens)] = tokens
            n += len(tokens)
    np.save(os.path.join(out, f'shard_{count}'), shard[:n])
    print(n)


def bench_tokenizing(files, repeats):
    """tokens/s of prepare_data.py and of build-nanogpt's way as whole processes, reading and writing included, alternated."""
    times, tokens = {'ours': [], 'theirs': []}, {}
    for _ in range(repeats):
        for who in times:
            out = tempfile.mkdtemp()
            command = {'ours': ['prepare_data.py', 'bench', f'--data_files={files}', f'--data_dir={out}'],
                       'theirs': ['bench.py', 'fineweb_py', files, out]}[who]
            start = time.perf_counter()
            done = subprocess.run([sys.executable, *command], cwd=HERE, capture_output=True, text=True)
            times[who].append(time.perf_counter() - start)
            if done.returncode:
                raise RuntimeError(f'{command[0]} failed: {done.stderr.strip().splitlines()[-1]}')
            tokens[who] = int(done.stdout.split()[-1]) if who == 'theirs' else sum(
                split['tokens'] for split in data.read_meta(os.path.join(out, 'bench-gpt2'))['splits'].values())
            shutil.rmtree(out)
    if tokens['ours'] != tokens['theirs']:
        raise RuntimeError(f'not the same work: {tokens}')
    return {who: tokens[who] / statistics.median(times[who]) for who in times}


def nanogpt_batch(path, batch_size, block_size):
    """nanoGPT's get_batch on a shard's tokens: the file mapped anew, a copy for each row of x and of y."""
    tokens = np.memmap(path, np.uint16, 'r', data.HEADER * 4)
    ix = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(tokens[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


def bench_loader(batch_size, block_size, batches):
    """tokens/s of the loader without workers and of nanoGPT's way, alternated, on a shard of 50M random tokens; and the share
    of a step that one worker makes a consumer of 600,000 tokens/s wait."""
    out = tempfile.mkdtemp()
    writer = data.ShardWriter(out, 'train', 10**9, 50257)
    writer.add(np.random.default_rng(0).integers(0, 50257, 50_000_000, dtype=np.uint16))
    writer.finish_shard()
    train = data.TokenData(out, 'train', block_size)
    loader, path = data.Loader(train, batch_size, 0, num_workers=0), os.path.join(out, 'train_000000.bin')
    times = {'ours': [], 'theirs': []}
    for _ in range(5):
        times['ours'].append(seconds(lambda: [loader.next() for _ in range(batches)]))
        times['theirs'].append(seconds(lambda: [nanogpt_batch(path, batch_size, block_size) for _ in range(batches)]))
    rates = {who: batches * batch_size * block_size / statistics.median(times[who]) for who in times}
    loader = data.Loader(train, batch_size, 0, num_workers=1)
    loader.next()
    step, loader.waited = batch_size * block_size / 600_000, 0.0
    for _ in range(50):
        loader.next()
        time.sleep(step)  # what a GPU would take
    shutil.rmtree(out)
    return rates, loader.waited / (50 * step)


def bench_data(arguments):
    tokenizing = bench_tokenizing(arguments.data_files, arguments.repeats)
    loading, wait = bench_loader(arguments.batch_size, arguments.block_size, 100)
    rows = [{'what': what, 'ours, tokens/s': rates['ours'], 'theirs, tokens/s': rates['theirs'], 'ratio': rates['ours'] / rates['theirs']}
            for what, rates in (("tokenizing, against build-nanogpt's fineweb.py way", tokenizing),
                                (f"batches of {arguments.batch_size} x {arguments.block_size}, against nanoGPT's get_batch way", loading))]
    report('data', rows, arguments.results, data_wait_share_at_600k_tokens_per_second=wait, cores=os.cpu_count())


def main():
    """Parses the command line and runs one benchmark."""
    if sys.argv[1:2] == ['fineweb_py']:  # the other side of bench_tokenizing, in a process of its own
        return fineweb_py(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar='command')
    sample = commands.add_parser('sample', help="sampling against nanoGPT's way")
    sample.add_argument('--preset', default='gpt2', choices=PRESETS)
    sample.add_argument('--new_tokens', type=int, default=500, help='of the single stream')
    sample.add_argument('--samples', type=int, default=10)
    sample.add_argument('--sample_tokens', type=int, default=200, help='of each of the samples')
    sample.set_defaults(bench=bench_sample)
    loading = commands.add_parser('data', help="tokenizing and loading against build-nanogpt's and nanoGPT's ways")
    loading.add_argument('--data_files', required=True, help='parquet files with a text column, as prepare_data.py takes them')
    loading.add_argument('--repeats', type=int, default=3)
    loading.add_argument('--batch_size', type=int, default=64)
    loading.add_argument('--block_size', type=int, default=1024)
    loading.set_defaults(bench=bench_data)
    for command in (sample, loading):
        command.add_argument('--results', default=os.path.join(HERE, 'results'), help='folder of the JSON')
    arguments = parser.parse_args()
    arguments.bench(arguments)


if __name__ == '__main__':
    one_line_errors()
    main()
