"""The training scripts, run as users run them."""
import ast
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import forked
from fp8gpt import data, distributed, optim, runlog, selfcheck
from fp8gpt.checkpoint import read
from conftest import (
    ROOT, accepted, environment, equal, hellaswag_items, in_ranks, losses, records, refused, run, runner,
    start_ranks)
from model import GPT, GPTConfig

FP8 = ['train_fp8.py', '--fp8_backend=native']
BF16_RUN, FP8_RUN, OFF_RUN = ('train.py',), tuple(FP8), ('train_fp8.py', '--fp8_backend=off')


def body(script):
    tree = ast.parse((ROOT / script).read_text())
    lines = (ROOT / script).read_text().splitlines()[tree.body[0].end_lineno:]
    return [line.strip() for line in lines if line.strip()]


# ---------------------------------------------------------------------------------- two scripts, one training

def test_fp8_only_inserts_lines():
    plain, fp8 = body('train.py'), iter(body('train_fp8.py'))
    assert not [line for line in plain if line not in fp8], 'train.py is a subsequence of train_fp8.py'
    assert len(body('train_fp8.py')) - len(plain) <= 50


def test_the_log_tells_what_ran(one_run):
    bf16, bf16_out = one_run(*BF16_RUN)
    fp8, fp8_out = one_run(*FP8_RUN)
    _, off_out = one_run(*OFF_RUN)
    assert 'FP8 Training Enabled: 8 of 9 linears, tensorwise (native)\n' in fp8_out
    assert fp8_out.count('| FP8\n') == bf16_out.count('| BF16\n') == off_out.count('| BF16\n') == 10
    assert 'FP8 Training Off: by --no_fp8 or fp8_backend=off' in off_out
    [(_, intro)] = records(fp8, 'intro')    # the rest of the first lines
    for words in 'vocabulary 257 (padded to 320)', 'FLOPs', 'so no MFU', 'lm_head: the output head decides':
        assert words in '\n'.join(intro) and words not in fp8_out
    assert [step for step, _ in records(fp8, 'val/loss')] == [0, 5, 10]
    assert all(0 <= share <= 1 for _, share in records(fp8, 'train/data_wait'))
    bits, nats = records(fp8, 'val/bits_per_byte')[-1][1], records(fp8, 'val/loss')[-1][1]
    # 5 documents of 1,000 bytes, an EOT each
    assert bits == pytest.approx(nats / 0.693147 * 5005 / 5000, rel=1e-4)
    for folder, out in (bf16, bf16_out), (fp8, fp8_out):
        step, loss = min(records(folder, 'val/loss'), key=lambda record: record[1])
        best, latest = read(folder / 'best_model.pt'), read(folder / 'latest.pt')
        assert (best['step'], best['best_val_loss']) == (step, loss) == (10, latest['best_val_loss'])
        assert os.path.samefile(folder / 'best_model.pt', folder / 'step_000010.pt')
        assert f'best: {folder}/best_model.pt is step 10, val loss {loss:.4f}\n' in out


def test_lockstep(one_run):
    bf16, off = one_run(*BF16_RUN)[0], one_run(*OFF_RUN)[0]
    assert losses(off) == losses(bf16) and records(off, 'val/loss') == records(bf16, 'val/loss')
    assert equal(off / 'latest.pt', bf16 / 'latest.pt')


def test_what_is_not_clipped_and_the_epoch(here, tiny, tmp_path):
    """A grad_clip of 0 is that of a limit which no gradient reaches. The second epoch begins with the first
    step that takes no window of the first."""
    words = '--batch_size=64', '--n_layer=1', '--n_embd=16', '--lr_schedule=constant'
    for clip, steps in (('0', 16), ('1e9', 4), ('0.01', 4)):
        here('train.py', *tiny, *words, f'--grad_clip={clip}', f'--max_steps={steps}',
             f'--checkpoint_dir={tmp_path}/{clip}')
    found = [list(losses(tmp_path / clip).values())[:4] for clip in ('0', '1e9', '0.01')]
    assert found[0] == found[1] != found[2]
    windows = (60_060 - 1) // 64        # 60 texts of 1,000 bytes, EOT before each
    assert records(tmp_path / '0', 'train/epoch') == [
        (step, (step - 1) * 64 // windows) for step in range(1, 17)]
    assert records(tmp_path / '0', 'train/tokens') == [(step, step * 64 * 64) for step in range(1, 17)]


@pytest.mark.parametrize('words', [['train.py'], FP8], ids=' '.join)
def test_a_step_and_its_validation_loss_by_hand(words, here, tiny, tiny_data, tmp_path):
    """AdamW's first step (Loshchilov & Hutter 2019), from a gradient g of norm grad_clip; cross-entropies of
    eval_tokens, without FP8, in windows that are spread over the shard."""
    flags = '--max_steps=1 --warmup_steps=1 --max_lr=0.04 --beta2=0.5 --weight_decay=2 --grad_clip=0.01'
    here(*words, *tiny, *flags.split(), '--dtype=fp32', '--eval_tokens=640', f'--checkpoint_dir={tmp_path}/a')
    state = read(tmp_path / 'a' / 'latest.pt')
    model = GPT(GPTConfig(**state['model_config']), dtype=torch.float32, seed=1337)
    gradients = {name: moments['exp_avg'] / 0.1 for name, moments in state['optimizer'].items()}
    assert torch.cat([g.flatten() for g in gradients.values()]).norm() == pytest.approx(0.01, rel=1e-3)
    for name, w in model.weights().items():
        g, decay = gradients[name], 2 if w.dim() == 2 else 0
        torch.testing.assert_close(state['optimizer'][name]['exp_avg_sq'], 0.5 * g**2, rtol=1e-4, atol=1e-20)
        stepped = w * (1 - 0.04 * decay) - 0.04 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(state['weights'][name], stepped.detach(), rtol=1e-4, atol=1e-6)
    model.load_weights(state['weights'])
    tokens = torch.from_numpy(np.fromfile(tiny_data / 'val_000000.bin', '<u2')[512:].astype(int))
    starts = [i * ((len(tokens) - 1) // 64) // 10 * 64 for i in range(10)]     # two in the third batch
    windows = torch.stack([tokens[start:start + 65] for start in starts])
    expected = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).item()
    assert records(tmp_path / 'a', 'val/loss')[-1] == (1, pytest.approx(expected, rel=1e-5))


def test_the_checkpoints_that_a_run_keeps(here, tiny, tmp_path):
    """The newest, and that from which a longer run can go on, before the decay."""
    flags = '--max_steps=6 --checkpoint_freq=1 --keep_checkpoints=1 --lr_schedule=wsd --decay_share=0.5'
    for script in 'train.py', 'train_fp8.py':
        here(script, *tiny, *flags.split(), '--n_layer=1', f'--checkpoint_dir={tmp_path}/{script}')
        found = sorted(path.name for path in (tmp_path / script).glob('step_*'))
        assert found == ['step_000003.pt', 'step_000006.pt']


def test_bf16_weights_are_rounded_by_step_and_seed_alike_on_all_ranks(here, tiny, tmp_path, monkeypatch):
    real, seeds = optim.step_if_finite, []
    monkeypatch.setattr(optim, 'step_if_finite', lambda optimizer, *rest: (
        seeds.append(optimizer.seed), real(optimizer, *rest)))
    for number, (rank, seed) in enumerate(((0, 1), (1, 1), (0, 2))):
        ranks = distributed.Ranks(rank, 1, torch.device('cpu'))
        monkeypatch.setattr(distributed, 'init', lambda device, ranks=ranks: ranks)
        (tmp_path / str(number)).mkdir()        # which rank 0 alone does
        words = '--param_dtype=bf16', '--max_steps=2', f'--seed={seed}'
        here('train.py', *tiny, *words, f'--checkpoint_dir={tmp_path}/{number}')
    assert seeds[:2] == seeds[2:4]
    assert len(set(seeds)) == 4


# ------------------------------------------------------------------------------------------ stops and resumes

def test_resume_equals_no_interruption_and_bf16_reaches_no_fp8(one_run, tmp_path):
    found = "{'fp8gpt.fp8', 'plan', 'bench', 'torchao'} & sys.modules.keys()"
    forget = 'import forked\nforked.forget_our_modules()\nforked.set_bf16_units()'
    no_fp8 = runner(tmp_path, forget, f'assert not {found}, "FP8 was imported"')
    muon = '--optimizer=muon', '--lr_schedule=wsd', '--decay_share=0.6'
    fewer_bits = '--optimizer=adamw8bit', '--param_dtype=bf16', '--loss_chunks=3'
    rows = {BF16_RUN: 'exp_avg_sq', (*FP8, *fewer_bits): 'exp_avg_scale',
            (*BF16_RUN, *muon): 'momentum', (*FP8, *muon): 'momentum'}
    for number, (words, moment) in enumerate(rows.items()):
        (whole, _), folder = one_run(*words), tmp_path / str(number)
        script = [no_fp8] * (words == BF16_RUN) + [words[0]]
        done = run(*script, f'--resume={whole}/step_000005.pt', f'--checkpoint_dir={folder}')
        assert f'at step 5, in {"bf16" if "train.py" in words else "fp8"} until now' in done.stdout, words
        assert equal(folder / 'latest.pt', whole / 'latest.pt'), words
        assert losses(folder) == losses(whole, after=5), words
        state, found = read(whole / 'latest.pt'), losses(whole)
        assert moment in state['optimizer']['h.0.mlp.up.weight'], words
        dtype = torch.bfloat16 if '--param_dtype=bf16' in words else torch.float32
        assert {w.dtype for w in state['weights'].values()} == {dtype}, words
        assert found[10] < found[1] - 0.3, words
        if 'momentum' not in moment:
            assert found == pytest.approx(losses(one_run(*BF16_RUN)[0]), abs=0.1), words


def test_the_best_model_is_that_of_the_lowest_loss_or_there_is_none(here, tiny, tmp_path):
    """A finished run that goes on keeps its last evaluation, which does not come again, since its step is no
    multiple of eval_freq. A run that only gets worse has no best model."""
    here('train.py', *tiny, '--eval_freq=4', f'--checkpoint_dir={tmp_path}/a')
    evaluated = records(tmp_path / 'a', 'val/loss')
    here('train.py', '--resume=latest', '--max_steps=11', '--max_lr=1', f'--checkpoint_dir={tmp_path}/a')
    assert [step for step, _ in evaluated] == [0, 4, 8, 10]
    assert records(tmp_path / 'a', 'val/loss')[:-1] == evaluated
    assert records(tmp_path / 'a', 'finished') == [(10, True), (11, True)]
    assert read(tmp_path / 'a' / 'latest.pt')['step'] == 11       # saved, though it is not the best
    state = read(tmp_path / 'a' / 'best_model.pt')
    assert (state['step'], state['best_val_loss']) == min(evaluated, key=lambda record: record[1])
    out = here('train_fp8.py', *tiny, '--max_lr=10', '--eval_freq=4', f'--checkpoint_dir={tmp_path}/b')
    assert 'WARNING: no validation loss was below the first one' in out
    assert f'next: python sample.py --ckpt {tmp_path}/b/latest.pt' in out
    assert not (tmp_path / 'b' / 'best_model.pt').exists()
    last = f'{tmp_path}/b/latest.pt'
    out = here('train_fp8.py', f'--resume={last}', '--max_steps=11', f'--checkpoint_dir={tmp_path}/c')
    assert 'or the best before the resume: a lower' in out


def test_a_stop_in_a_step_saves_it_and_the_run_goes_on(here, tiny, tmp_path, monkeypatch):
    real = data.Loader.next
    stop_file = tmp_path / 'early' / 'STOP'
    with monkeypatch.context() as patch:    # in the evaluation before step 0
        patch.setattr(data, 'eval_batches', lambda *a, **k: stop_file.touch() or distributed.until_asked([1]))
        out = here('train.py', *tiny, f'--checkpoint_dir={tmp_path}/early')
    assert 'stopped at step 0: there is nothing to save' in out
    assert not list(stop_file.parent.glob('*.pt'))
    for way in 'STOP', 'SIGINT', 'SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGTERM':
        folder = tmp_path / way

        def ask_in_step_3(loader):
            if loader.position == 8 and way == 'STOP':      # sequences
                (folder / 'STOP').touch()
            elif loader.position == 8:
                os.kill(os.getpid(), getattr(signal, way))
            return real(loader)
        monkeypatch.setattr(data.Loader, 'next', ask_in_step_3)
        out = here('train.py', *tiny, '--n_layer=1', '--max_steps=100000', f'--checkpoint_dir={folder}')
        assert 'stopped at step 3, saved' in out, way
        assert read(folder / 'latest.pt')['step'] == 3
        assert not (folder / 'STOP').exists()
    monkeypatch.setattr(data.Loader, 'next', real)
    here('train.py', '--resume=latest', f'--checkpoint_dir={folder}', '--max_steps=5')
    assert [step for step, _ in records(folder, 'train/loss')] == [1, 2, 3, 4, 5]


def test_a_stop_touched_while_a_run_starts_ends_it_and_an_older_one_is_removed(here, one_run, tiny, tmp_path):
    """A run starts for minutes where a model is large. One that resumes is saved before its first step."""
    words = 'train.py', *tiny, '--eval_freq=0'
    for source in '', one_run('train.py')[0] / 'latest.pt':
        folder = tmp_path / str(bool(source))
        folder.mkdir()
        (folder / 'STOP').touch()
        out = here(*words, f'--resume={source}', '--max_steps=12', f'--checkpoint_dir={folder}')
        assert ('stopped at step 10, saved' if source else 'stopped at step 0: there is nothing') in out
        assert 'train/loss' not in (folder / 'log.jsonl').read_text() and not (folder / 'STOP').exists()
        assert [path.name for path in folder.glob('step_*.pt')] == ['step_000010.pt'] * bool(source)
    (folder / 'STOP').touch()
    os.utime(folder / 'STOP', (1e9, 1e9))
    out = here(*words, '--resume=latest', '--max_steps=12', f'--checkpoint_dir={folder}')
    assert f'{folder}/STOP is older than this run: removed' in out and 'is step 12' in out


def test_a_signal_while_ranks_agree_is_not_lost(monkeypatch):
    """It comes after the rank has said that nobody asked it: the next answer is yes."""
    stop = mock.Mock(stop_file='', signalled=False)

    def agree(number):
        stop.signalled = True       # as the signal's handler does
        return number
    monkeypatch.setattr(distributed, 'smallest_of_ranks', agree)
    assert [distributed.StopRequest.asked(stop) for _ in range(2)] == [False, True]


def test_a_stop_in_other_work_ends_it_and_a_resume_does_it_again(here, tiny, tmp_path, monkeypatch):
    """The signal comes with the second thing of a progress bar in step 4: a batch, an item, or a token."""
    real, asked = runlog.bar, []

    def bar(things, what):
        for number, thing in enumerate(real(things, what)):
            if asked == [what] and number == 1 and list(tmp_path.glob(f'{what}/step_000004.pt')):
                asked.append(os.kill(os.getpid(), signal.SIGTERM))
            yield thing
    monkeypatch.setattr(runlog, 'bar', bar)
    words = [*tiny, '--n_layer=1', '--max_steps=5', '--eval_freq=4', '--eval_tokens=512', '--sample_freq=4',
             '--hellaswag_freq=4', '--checkpoint_freq=4', f'--data_dir={hellaswag_items(tmp_path, 9)}']
    here('train.py', *words, f'--checkpoint_dir={tmp_path}/whole')
    for what in 'validation', 'HellaSwag', 'sample':
        folder, asked[:] = tmp_path / what, [what]
        out = here('train.py', *words, f'--checkpoint_dir={folder}')
        assert out.count('asked to stop: the evaluation or sample under way is left out') == 1, what
        assert 'stopped at step 4, saved' in out
        here('train.py', *words, '--resume=latest', f'--checkpoint_dir={folder}')
        for name in 'val/loss', 'sample', 'hellaswag/acc':
            assert dict(records(folder, name)) == dict(records(tmp_path / 'whole', name))
        assert equal(folder / 'best_model.pt', tmp_path / 'whole' / 'best_model.pt')


def test_a_sample_is_due_at_the_last_step_too(here, tiny, tmp_path):
    for steps, due in (4, [2, 4]), (3, [2]):
        here('train.py', *tiny, f'--max_steps={steps}', '--sample_freq=2',
             f'--checkpoint_dir={tmp_path}/{steps}')
        assert [step for step, _ in records(tmp_path / str(steps), 'sample')] == due


@pytest.mark.slow
def test_sigterm_before_the_first_step_is_one_line():
    code = 'import os; from fp8gpt import distributed; distributed.init("cpu"); os.kill(os.getpid(), 15)'
    assert run('-c', code, rc=143).stderr == 'error: stopped by SIGTERM\n'


@pytest.mark.slow
def test_a_rank_whose_peers_never_come_ends_at_sigterm():
    code = ('import os, threading; from fp8gpt import distributed; '
            'threading.Timer(1, os.kill, (os.getpid(), 15)).start(); distributed.init("cpu")')
    alone = {**os.environ, 'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '1'}
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=alone, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (-15, b'')


def test_an_evaluation_that_dies_finds_its_step_saved(here, tiny, tmp_path, monkeypatch):
    real, calls = data.eval_batches, iter([False, False, True])     # of steps 0, 5 and 10

    def dying(*args, **kwargs):
        if next(calls):
            raise MemoryError('no room to evaluate')
        return real(*args, **kwargs)
    monkeypatch.setattr(data, 'eval_batches', dying)
    with pytest.raises(MemoryError, match='no room to evaluate'):
        here('train.py', *tiny, '--checkpoint_freq=5', '--eval_freq=5', f'--checkpoint_dir={tmp_path}')
    assert read(tmp_path / 'latest.pt')['step'] == 10


def test_side_work_that_fails_is_a_line_alone_and_ends_several_ranks(tiny, tmp_path):
    """Other ranks wait in it. The steps up to there are saved."""
    script = runner(tmp_path, """
import hellaswag
from configurator import DataError
def evaluate(*args, real=hellaswag.evaluate, **kwargs):
    if os.environ.get('RANK', '0') == '0':
        raise DataError('no items')
    return real(*args, **kwargs)
hellaswag.evaluate = evaluate
""")
    words = ['train.py', *tiny, '--max_steps=5', '--checkpoint_freq=2', '--hellaswag_freq=4',
             f'--data_dir={hellaswag_items(tmp_path, 8)}']
    out = run(script, *words, f'--checkpoint_dir={tmp_path}/alone').stdout
    assert re.findall('left out at this step: (.*)', out) == ['test_hellaswag: DataError: no items'] * 2
    assert 'done: ' in out
    done = in_ranks(2, script, *words, f'--checkpoint_dir={tmp_path}/two', rc=1)
    assert 'error: no items\n' in done.stderr
    assert read(tmp_path / 'two' / 'latest.pt')['step'] == 4


def test_a_full_disk_does_not_end_the_run_until_it_must(here, tiny, tmp_path, monkeypatch, capsys):
    """It is full at steps 4 and 8, and at 3, 6 and 9, whose models are the best so far."""
    monkeypatch.setattr(torch, 'save', mock.Mock(side_effect=OSError(28, 'No space left on device')))
    with pytest.raises(OSError, match='step_000010.pt') as error:
        here('train.py', *tiny, '--checkpoint_freq=4', '--eval_freq=3', f'--checkpoint_dir={tmp_path}')
    assert (error.value.exit_code, len(losses(tmp_path))) == (1, 10)
    assert str(error.value).endswith('--resume=latest goes on')
    said = re.findall(r'the next save is at step (\d+)', capsys.readouterr().out)
    assert said == ['4', '8', '8', '12', '12']
    assert not list(tmp_path.glob('*.pt*'))


def wait_for_step(directory, step, alive):
    """Return once the log has that step. alive(): whether the run goes on."""
    log = directory / 'log.jsonl'
    while not (log.exists() and any(s >= step for s, _ in records(directory, 'train/loss'))):
        assert alive(), f'the run ended before step {step}'
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_at_any_moment_the_rest_of_the_run_is_the_same(tiny, tmp_path):
    flags = [*tiny, '--max_steps=60', '--checkpoint_freq=10', '--eval_freq=10']
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    run(*FP8, *flags, f'--checkpoint_dir={whole}', fork=False)     # as the one that is killed
    words = [sys.executable, *FP8, *flags, f'--checkpoint_dir={broken}']
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    wait_for_step(broken, 23, lambda: process.poll() is None)
    process.kill()
    process.wait()
    assert 'resumed' in run(*FP8, *flags, '--resume=auto', f'--checkpoint_dir={broken}', fork=False).stdout
    assert equal(whole / 'latest.pt', broken / 'latest.pt')
    assert losses(whole) == losses(broken)
    assert len(losses(broken)) == 60
    assert dict(records(whole, 'val/loss')) == dict(records(broken, 'val/loss'))


def test_a_second_run_does_not_bury_the_first(one_run, tiny, tmp_path, monkeypatch, capsys):
    folder = tmp_path / 'run'
    shutil.copytree(one_run(*BF16_RUN)[0], folder)
    before = contents(folder)

    def compiling(*arguments, **options):
        raise AssertionError('it compiles')
    monkeypatch.setattr(selfcheck, 'choose_precision', compiling)
    code, said = refused('train_fp8.py', *tiny, '--compile=on', f'--checkpoint_dir={folder}')
    assert (code, 'holds an earlier run, step_000010.pt: ' in said) == (2, True), said
    assert contents(folder) == before


def test_three_non_finite_steps_in_a_row_save_and_stop_and_the_way_on_works(tiny, tmp_path):
    """A learning rate that blows the model up: its steps are skipped, and the parameters stay finite. What is
    printed works twice, since the rate stays."""
    words = [*FP8, *tiny, '--fp8_recipe=delayed', '--max_lr=1e30', '--grad_clip=0']
    words += [f'--checkpoint_dir={tmp_path}']
    for step, skipped in (4, 3), (7, 6):
        done, start = run(*words, rc=1), 'if FP8 is the cause, go on by the same command with '
        assert re.findall('skipped: (.)', done.stdout)[-1] == str(skipped)
        assert 'three steps in a row' in done.stderr
        state = read(tmp_path / 'latest.pt')
        assert state['step'] == step and all(w.isfinite().all() for w in state['weights'].values())
        assert done.stdout.count('SQNR') == 5
        printed = next(line for line in done.stdout.splitlines() if line.startswith(start))
        flags = shlex.split(printed.removeprefix(start))
        assert [flag.split('=')[0] for flag in flags] == ['--resume', '--fp8_keep', '--fp8_margin']
        words += flags
    assert flags[-1] == '--fp8_margin=2'
    out = run(*words, '--dry_run').stdout
    assert 'kept by fp8_keep' in out and 'margin 2' in out and 'at step 7' in out


def test_a_run_whose_last_steps_are_skipped_is_not_finished_by_a_resume(tiny, tmp_path):
    """Of 10 steps, all after the first are skipped. The same command again neither trains nor finishes."""
    words = ['train.py', *tiny, '--max_lr=1e30', '--log_freq=10', '--resume=auto',
             f'--checkpoint_dir={tmp_path}']
    for _ in range(2):
        run(*words, rc=1)
        assert records(tmp_path, 'train/skipped') == [(1, 0), (10, 9)]
        assert records(tmp_path, 'finished') == []
    run(*words, '--max_steps=12')
    assert records(tmp_path, 'train/skipped')[-1] == (12, 11)


# -------------------------------------------------------------------------------------------- what it refuses

def test_what_a_run_reads_later_is_looked_at_before_its_first_step(tiny, tmp_path):
    words = ['train.py', *tiny, '--hellaswag_freq=5', f'--data_dir={tmp_path}',
             f'--checkpoint_dir={tmp_path}/c']
    path = hellaswag_items(tmp_path, 2) / 'hellaswag' / 'hellaswag_val.jsonl'
    for content, message in (('', 'is empty'), ('no item', 'line 1 is not a HellaSwag item')):
        path.write_text(content)
        assert message in refused(*words)[1]
        assert not (tmp_path / 'c').exists()


def test_a_log_without_its_checkpoints_is_kept(one_run, here, tiny, tmp_path):
    log = (one_run('train.py')[0] / 'log.jsonl').read_text()
    for _ in range(2):
        (tmp_path / 'log.jsonl').write_text(log)
        out = here('train.py', *tiny, '--max_steps=2', f'--checkpoint_dir={tmp_path}')
        for path in tmp_path.glob('*.pt'):
            path.unlink()
    assert f'log.jsonl is of an earlier run: kept as {tmp_path}/log.jsonl.2' in out
    assert [(tmp_path / f'log.jsonl.{n}').read_text() for n in (1, 2)] == [log, log]
    assert list(losses(tmp_path)) == [1, 2]


def test_a_run_resumed_from_elsewhere_takes_over_no_other_runs_curves(one_run, here, tiny, tmp_path,
                                                                      monkeypatch):
    """Its folder holds another run, whose log, W&B run and TensorBoard curves it would go on in."""
    begun = []
    monkeypatch.setitem(runlog.WRITERS, 'use_wandb', lambda config, precision, records:
                        begun.append(max((record['step'] for record in records), default=0)))
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(__spec__=1))
    words = ['train.py', *tiny, '--use_wandb', f'--checkpoint_dir={tmp_path}']
    here(*words, '--seed=5')
    first, resumed = losses(tmp_path), f'--resume={one_run("train.py")[0]}/latest.pt'
    here(*words, resumed, '--max_steps=12', '--overwrite')
    assert list(losses(tmp_path)) == [11, 12] and len(first) == 10
    for path in tmp_path.glob('*.pt'):
        path.unlink()
    here(*words, resumed, '--max_steps=13')
    assert list(losses(tmp_path)) == [11, 12, 13]
    here(*words, '--resume=latest', '--max_steps=14')
    assert (list(losses(tmp_path)), begun) == ([11, 12, 13, 14], [0, 0, 0, 13])


def test_mistakes_cost_one_line(tiny, tmp_path):
    chats = tmp_path / 'chats.jsonl'
    chats.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    mistakes = [
        (['--resume=best'], 1, f'resume=best: there is no {tmp_path}/run/best_model.pt'),
        (['--resume=nowhere'], 1, 'resume=nowhere: there is no nowhere'),
        (['--init_from=gpt5'], 2, 'org/name on the hub'),
        (['--init_from=/no/such/model'], 1, 'there is no such folder or checkpoint'),
        # before the examples are prepared, which wants another tokenizer
        ([f'--init_from={chats}', f'--dataset={chats}'], 2, 'org/name on the hub'),
        (['--init_from=none.pt', f'--dataset={chats}'], 1, 'there is no checkpoint none.pt'),
        (['--lora_alpha=8'], 2, 'type --lora_rank, too'),
        (['--fp8_backend=native', '--n_embd=40', '--ffn_dim=40'], 2, 'can be in FP8: 40 -> 120'),
    ]
    if not torch.cuda.is_available():
        mistakes += [(['--device=cuda'], 1, 'no CUDA GPU')]
    folder = f'--checkpoint_dir={tmp_path}/run'
    rows = ((rc, message, ['train_fp8.py', *tiny, *words, folder]) for words, rc, message in mistakes)
    assert accepted(rows) == []
    assert not (tmp_path / 'run').exists()


@pytest.mark.slow
def test_a_python_without_torch_is_told_in_one_line(tiny, tmp_path):
    path = runner(tmp_path, "sys.modules['torch'] = None     # as where it is not installed")
    done = run(path, 'train_fp8.py', *tiny, rc=1, fork=False)
    assert 'pip install -r requirements.txt' in done.stderr and 'Traceback' not in done.stderr


# ---------------------------------------------------------------------------------------------- what it tells

def test_weights_and_biases_and_tensorboard(here, tiny, tmp_path, monkeypatch):
    """What it is told: the settings, TensorBoard's names; a resumed run goes on in its run. TensorBoard has
    the same curve of both runs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    begun, told = [], []

    def init(**options):
        begun.append(options)
        return mock.Mock(spec=['log', 'define_metric', 'finish'], id='abc', log=told.append)
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
    monkeypatch.delenv('WANDB_PROJECT', raising=False)
    monkeypatch.chdir(tmp_path)         # where runs/ is made
    words = *tiny, '--use_wandb', '--wandb_run_name=x', f'--checkpoint_dir={tmp_path}', '--use_tensorboard'
    here(*FP8, *words)
    here(*FP8, *words, '--max_steps=12', '--resume=latest')
    first, second = begun
    assert (first['project'], first['name'], first['tags']) == ('llm-fp8', 'x', ['fp8'])
    assert first['config']['max_lr'] == 3e-3
    assert (first['id'], second['id']) == (None, 'abc')
    assert {row['step']: row['train/loss'] for row in told if 'train/loss' in row} == losses(tmp_path)
    folder, = {str(path.parent) for path in tmp_path.glob('runs/x-fp8/**/events*')}
    curve = EventAccumulator(folder).Reload().Scalars('_main/train_loss')
    assert {event.step: event.value for event in curve} == pytest.approx(losses(tmp_path))
    for wandb in types.SimpleNamespace(init=lambda **options: 1 / 0), None:     # None: it is not installed
        monkeypatch.setitem(sys.modules, 'wandb', wandb)
        assert 'WARNING: use_wandb is not written: ' in here(*FP8, *words, '--overwrite')


def test_dry_run_tells_the_plan_and_leaves_nothing(one_run, here, tiny, tmp_path, monkeypatch):
    """Too little disk, too, for the checkpoints kept, the best and the next, in a new folder."""
    def free(path):
        assert path == str(tmp_path)
        return types.SimpleNamespace(free=room)
    room = 1000
    monkeypatch.setattr(shutil, 'disk_usage', free)
    out = here(*FP8, *tiny, '--dry_run', '--lr_schedule=wsd', f'--checkpoint_dir={tmp_path}/run/a')
    assert 'FP8 Training Enabled: 8 of 9 linears' in out and '10 steps = 2,560 tokens' in out
    rates = 'step 0 1.50e-03, step 1 3.00e-03, step 5 3.00e-03, step 9 3.00e-04'
    assert f'schedule  wsd: {rates}' in out and 'val loss' not in out
    parameters = float(re.search(r'([\d.]+)M parameters', out)[1]) * 1e6
    assert f'0.00 GB are free for checkpoints, and one takes about {12 * parameters / 1e9:.2f}' in out
    size = os.path.getsize(one_run('train_fp8.py', '--fp8_backend=native')[0] / 'latest.pt')
    is_short = []
    for room in 3.9 * size, 5 * size:     # noqa: B007 (read by `free`)
        out = here(*FP8, *tiny, '--dry_run', f'--checkpoint_dir={tmp_path}/run/a')
        is_short.append('are free for checkpoints' in out)
    assert is_short == [True, False]
    assert not (tmp_path / 'run').exists()


def test_list_checkpoints(one_run):
    folder, _ = one_run(*FP8_RUN)
    out = run('train_fp8.py', '--list_checkpoints', f'--checkpoint_dir={folder}').stdout
    names = [os.path.basename(line.split()[0]) for line in out.splitlines()]
    assert names == ['latest.pt', 'best_model.pt', 'step_000005.pt', 'step_000010.pt']
    own = dict(records(folder, 'val/loss'))
    assert f'val loss {own[5]:>7.4f}  fp8' in out and f'val loss {own[10]:>7.4f}  fp8' in out


# ------------------------------------------------------------------------------------------------------ ranks

def test_ranks_agree(tiny, tmp_path):
    found = []
    for ranks in 1, 2, 4:
        flags = '--dtype=fp32', f'--gradient_accumulation_steps={4 // ranks}', '--max_steps=4'
        in_ranks(ranks, 'train.py', *tiny, *flags, f'--checkpoint_dir={tmp_path}/{ranks}')
        assert read(tmp_path / str(ranks) / 'latest.pt')['position'] == 64
        steps = losses(tmp_path / str(ranks))
        assert list(steps) == [1, 2, 3, 4]
        found.append([*steps.values(), records(tmp_path / str(ranks), 'val/loss')[-1][1]])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_ranks_stop_together(tiny, tmp_path):
    words = 'train.py', *tiny, '--max_steps=100000', f'--checkpoint_dir={tmp_path}'
    started = start_ranks(2, *words)
    wait_for_step(tmp_path, 3, started[0][0].is_alive)
    (tmp_path / 'STOP').touch()
    done = [forked.finish(words, *each, timeout=240) for each in started]
    assert [each.returncode for each in done] == [0, 0], done
    assert ''.join(each.stdout for each in done).count('stopped at step') == 1


def test_a_shard_that_is_cut_short_stops_all_ranks_by_name(tiny, tiny_data, tmp_path):
    folder = tmp_path / 'spoiled-byte'
    shutil.copytree(tiny_data, folder)
    os.truncate(folder / 'train_000001.bin', 5000)
    done = in_ranks(2, 'train.py', *tiny, f'--dataset={folder}', f'--checkpoint_dir={tmp_path}/c', rc=1)
    assert 'train_000001.bin is damaged' in done.stderr
    assert done.stderr.count('error: ') == 1  # rank 0's
    assert not (tmp_path / 'c').exists()


# ---------------------------------------------------------------------------------------------------- samples

def test_samples(one_run, here, tmp_path):
    """Control characters of a text, which command a terminal, are escaped, unless --raw."""
    folder, _ = one_run(*FP8_RUN)

    def talk(*words):
        return here('sample.py', f'--ckpt={folder}/latest.pt', '--max_new_tokens=40', *words)
    out = talk('--prompt=def ')
    assert out.startswith(f'# {folder}/latest.pt: step 10, trained in fp8\ndef ')
    assert talk('--prompt=def ') == out
    (tmp_path / 'prompt.txt').write_bytes('import os\r\n'.encode('utf-8-sig'))
    (tmp_path / 'latin.txt').write_bytes(b'caf\xe9')
    out = talk(f'--prompt=FILE:{tmp_path}/prompt.txt', '--top_p=0.9', '--max_new_tokens', '90')
    assert out.split('\n', 1)[1].startswith('import os\n')
    assert len(out) > 110  # past block_size, which is 64
    likeliest = talk('--prompt=def ', '--temperature=0')
    assert likeliest != talk('--prompt=def ')
    for least in ('--top_p=1e-9', '--top_k=1'):
        assert talk('--prompt=def ', '--temperature=1', least) == likeliest
    out = talk('--num_samples', '3', '--prompt=a\tb\n\x1b[31m', '--temperature=2')
    assert [line for line in out.splitlines() if line.startswith('---')] == ['--- 1', '--- 2', '--- 3']
    assert 'a\tb\n\\x1b[31m' in out
    assert not [c for c in out if ord(c) < 32 and c not in '\t\n' or 127 <= ord(c) < 160]
    assert '\x1b[31m' in talk('--prompt=\x1b[31m', '--raw')
    rows = {'no prompt file nowhere': '--prompt=FILE:nowhere',
            'no checkpoint nowhere.pt': '--ckpt=nowhere.pt',
            'latin.txt, byte 3: not UTF-8': f'--prompt=FILE:{tmp_path}/latin.txt'}
    assert accepted((1, message, ['sample.py', word]) for message, word in rows.items()) == []


# ------------------------------------------------------------------------------------------- evaluation alone

def contents(folder):
    """path -> (bytes, when it was written) of all files in a folder."""
    files = (path for path in pathlib.Path(folder).rglob('*') if path.is_file() and path.name != '.lock')
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize('script, words, start, told', [
    ('train.py', FP8_RUN, '--resume=latest', 'HellaSwag 1 items: acc '),
    ('train_fp8.py', BF16_RUN, '--init_from={}/latest.pt', 'HellaSwag is left out')])
def test_evaluation_alone_gives_the_loss_and_writes_nothing(
        script, words, start, told, one_run, tiny, tmp_path):
    """In either script, of a checkpoint of either; not even a STOP of the run that is there goes, nor does a
    loss below the best that the checkpoint knows make a best model."""
    whole, folder = one_run(*words)[0], tmp_path / 'run'
    folder.mkdir()
    torch.save({**read(whole / 'latest.pt'), 'best_val_loss': 99.0}, folder / 'latest.pt')
    (folder / 'STOP').touch()
    data_dir = hellaswag_items(tmp_path, 1) if 'items' in told else 'nowhere'
    before = contents(tmp_path)
    words = [*tiny, '--eval_only', start.format(folder), f'--checkpoint_dir={folder}']
    out = run(script, *words, f'--data_dir={data_dir}').stdout
    loss = float(re.search(r'val loss (\d+\.\d+)', out)[1])
    assert loss == pytest.approx(records(whole, 'val/loss')[-1][1], abs=6e-5)
    assert told in out
    assert 'tok/s' not in out and 'done: ' not in out
    assert contents(tmp_path) == before
