"""How others sample, tokenize and load, and ours beside it in one run: `bench.py sample`, `bench.py data`.

$ python -m benchmarks.peers fineweb_py 'texts/*.parquet' OUT 4   # build-nanogpt's tokenizing, 4 processes
"""
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

import data
import shards
from benchmarks.rows import ROOT, finish, report, unused
from configurator import MachineError, SettingError, one_line_errors
from measure import seconds
from model import GPT, PRESETS, KVCache, generate

WAIT_RATE = 600_000  # tokens/s of a consumer whose waiting for data is measured


# ------------------------------------------------------------------------------------------------- sampling

def nanogpt_sample(model, idx, new_tokens):
    """nanoGPT's generate: the whole sequence through the model for each token, its head only at the last
    position."""
    generator = torch.Generator(idx.device).manual_seed(0)
    with torch.no_grad():
        for _ in range(new_tokens):
            idx = idx[:, -model.config.block_size:]
            B, T = idx.shape
            cache = KVCache(model.config, B, T, model.dtype, idx.device)  # new each time
            logits = model(idx, cache=cache)[:, -1] / 0.8
            least = logits.topk(200).values[:, -1:]
            logits = logits.masked_fill(logits < least, float('-inf'))
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            idx = torch.cat([idx, token], 1)


def bench_sample(arguments):
    """Sampling in bf16 with a key/value cache, in one batch, against nanoGPT's fp32, no cache, one by one.
    Raises SettingError for a preset that is unknown."""
    if arguments.preset not in PRESETS:
        raise SettingError(f'no preset is called {arguments.preset!r}; there are {", ".join(PRESETS)}')
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    theirs = GPT(PRESETS[arguments.preset], dtype=torch.float32).to(device)
    ours = GPT(PRESETS[arguments.preset], dtype=torch.bfloat16).to(device)
    for p in ours.parameters():
        p.data = p.data.bfloat16()
    rows = []
    cases = (1, arguments.new_tokens), (arguments.samples, arguments.sample_tokens)
    for streams, new_tokens in cases:
        start = torch.zeros((streams, 1), dtype=torch.long, device=device)

        def run_ours(tokens=new_tokens):
            list(generate(ours, start, tokens, temperature=0.8, top_k=200))

        def run_theirs():
            for _ in range(streams):
                nanogpt_sample(theirs, start[:1], new_tokens)

        run_ours(3)
        before = seconds(run_ours)
        their_seconds = seconds(run_theirs)
        own_seconds = statistics.mean([before, seconds(run_ours)])  # the machine may have changed meanwhile
        rows.append({
            'samples': streams,
            'new tokens each': new_tokens,
            'ours, tokens/s': streams * new_tokens / own_seconds,
            "nanoGPT's way, tokens/s": streams * new_tokens / their_seconds,
            'ratio': their_seconds / own_seconds,
        })
    folder = arguments.results
    report(unused(folder, 'sample'), rows, folder, model=arguments.preset)


# ----------------------------------------------------------------------------------------------- tokenizing

def their_encode(row):
    """build-nanogpt's: ids as a list, checked, then as uint16."""
    tokens = np.array([their_encoding.eot_token] + their_encoding.encode_ordinary(row['text']))
    assert (0 <= tokens).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def fineweb_py(files, out, processes):
    """build-nanogpt's way: the dataset loaded through `datasets`, a pool of processes, chunks of 16, one
    array a shard. Prints the number of tokens."""
    global their_encoding
    import datasets
    import tiktoken
    their_encoding = tiktoken.get_encoding('gpt2')
    cache = os.path.join(out, 'cache')
    rows = datasets.load_dataset('parquet', data_files=files, split='train', cache_dir=cache)
    shard = np.empty(10**8, np.uint16)
    n = count = 0
    with multiprocessing.get_context('fork').Pool(int(processes)) as pool:
        for tokens in pool.imap(their_encode, rows, chunksize=16):
            if n + len(tokens) > len(shard):
                np.save(os.path.join(out, f'shard_{count}'), shard)
                n = 0
                count += 1
            shard[n:n + len(tokens)] = tokens
            n += len(tokens)
    np.save(os.path.join(out, f'shard_{count}'), shard[:n])
    print(n)


def bench_tokenizing(files, repeats):
    """({'ours', and the others by name: tokens/s}, our library) of prepare_data.py and of build-nanogpt's way
    with the pool that it ships with and with one of all cores, in turn, as whole processes that read and
    write."""
    cores = os.cpu_count()
    pools = {"build-nanogpt's fineweb.py way, half of the cores": max(1, cores // 2),
             'the same way, all cores': cores}
    times = {'ours': [], **{who: [] for who in pools}}
    tokens = {}
    for _ in range(repeats):
        for who in times:
            out = tempfile.mkdtemp()
            words = ['prepare_data.py', 'bench', '--data_files', files, '--data_dir', out]
            if who in pools:
                words = ['-m', 'benchmarks.peers', 'fineweb_py', files, out, str(pools[who])]
            start = time.perf_counter()
            said = finish(words, cwd=ROOT)
            times[who].append(time.perf_counter() - start)
            if who in pools:
                tokens[who] = int(said.split()[-1])
            else:
                library = said.partition('tokenized by ')[2].splitlines()[0]
                splits = shards.read_meta(os.path.join(out, 'bench-gpt2'))['splits']
                tokens[who] = sum(split['tokens'] for split in splits.values())
            shutil.rmtree(out)
    if len(set(tokens.values())) > 1:
        raise MachineError(f'not the same work: {tokens}')
    return {who: tokens[who] / statistics.median(times[who]) for who in times}, library


# -------------------------------------------------------------------------------------------------- loading

def nanogpt_batch(path, batch_size, block_size):
    """nanoGPT's get_batch on a shard's tokens: the file mapped anew, a copy for each row of x and of y."""
    tokens = np.memmap(path, np.uint16, 'r', shards.HEADER * 4)
    ix = torch.randint(len(tokens) - block_size, (batch_size,))

    def rows(shift):
        windows = (tokens[i + shift:i + shift + block_size] for i in ix)
        return torch.stack([torch.from_numpy(window.astype(np.int64)) for window in windows])

    return rows(0), rows(1)  # x, y


def bench_loader(batch_size, block_size, batches):
    """({'ours', 'theirs'}: tokens/s of the loader without workers and of nanoGPT's way, in turn, on a shard
    of 50M random tokens; the share of a step that one worker makes a consumer of WAIT_RATE wait)."""
    out = tempfile.mkdtemp()
    writer = shards.ShardWriter(out, 'train', 10**9, 50257)
    generator = np.random.default_rng(0)
    writer.add(generator.integers(0, 50257, 50_000_000, dtype=np.uint16))
    writer.finish_shard()
    path = os.path.join(out, 'train_000000.bin')
    train = data.TokenData(out, 'train', block_size)
    loader = data.Loader(train, batch_size, 0, num_workers=0)

    def run_ours():
        for _ in range(batches):
            loader.next()

    def run_theirs():
        for _ in range(batches):
            nanogpt_batch(path, batch_size, block_size)

    times = {'ours': [], 'theirs': []}
    for _ in range(5):
        times['ours'].append(seconds(run_ours))
        times['theirs'].append(seconds(run_theirs))
    tokens = batches * batch_size * block_size
    rates = {who: tokens / statistics.median(times[who]) for who in times}
    one_worker = data.Loader(train, batch_size, 0, num_workers=1)
    wait = waiting_share(one_worker, batch_size * block_size / WAIT_RATE)
    shutil.rmtree(out)
    return rates, wait


def waiting_share(loader, step, steps=50):
    """The share of `steps` steps of `step` seconds that next() blocks."""
    loader.next()
    loader.waited = 0.0
    for _ in range(steps):
        loader.next()
        time.sleep(step)  # what a GPU would take
    return loader.waited / (steps * step)


def bench_data(arguments):
    """Tokenizing and loading parquet files with a text column, against build-nanogpt's and nanoGPT's ways."""
    B, T = arguments.batch_size, arguments.block_size
    tokenizing, library = bench_tokenizing(arguments.data_files, arguments.repeats)
    loading, wait = bench_loader(B, T, 100)
    ours = tokenizing.pop('ours')
    found = [(f'tokenizing, against {way}', ours, theirs) for way, theirs in tokenizing.items()]
    against = f"batches of {B} x {T}, against nanoGPT's get_batch way"
    found.append((against, loading['ours'], loading['theirs']))
    rows = []
    for what, ours, theirs in found:
        rows.append({
            'what': what,
            'ours, tokens/s': ours,
            'theirs, tokens/s': theirs,
            'ratio': ours / theirs,
        })
    facts = {'data_wait_share_at_600k_tokens_per_second': wait, 'cores': os.cpu_count()}
    name = 'data-gigatoken' if library.startswith('gigatoken') else 'data-tiktoken'
    folder = arguments.results
    report(unused(folder, name), rows, folder, tokenized_by=library, **facts)


if __name__ == '__main__':
    one_line_errors()
    if len(sys.argv) != 5 or sys.argv[1] != 'fineweb_py':
        usage = "python -m benchmarks.peers fineweb_py 'texts/*.parquet' OUT PROCESSES"
        raise SettingError(f'by itself this runs as {usage}')
    fineweb_py(*sys.argv[2:])
