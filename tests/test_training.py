"""The training scripts, run as users run them."""
import ast
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from checkpoint import load
from conftest import ROOT, in_ranks, losses, records, refused, run
from fp8_models import NATIVE_ON_A_CPU

FP8 = ['train_fp8.py', '--fp8_backend=native']


def body(script):
    tree = ast.parse((ROOT / script).read_text())
    lines = (ROOT / script).read_text().splitlines()[tree.body[0].end_lineno:]
    return [line.strip() for line in lines if line.strip()]


def equal(a, b):
    """Whether two checkpoints hold the same bits."""
    def flat(state):
        moments = {f'{n}.{k}': v for n, of in state['optimizer'].items() for k, v in of.items()}
        return {**state['weights'], **moments}
    a, b = load(a), load(b)
    if any(a[key] != b[key] for key in ('step', 'position', 'best_val_loss')):
        return False
    a, b = flat(a), flat(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_fp8_only_inserts_lines():
    plain, fp8 = body('train.py'), iter(body('train_fp8.py'))
    assert not [line for line in plain if line not in fp8], 'train.py is a subsequence of train_fp8.py'
    assert len(body('train_fp8.py')) - len(plain) <= 50


WITHOUT_FP8 = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {'fp8', 'fp8_linear', 'backends', 'measure', 'memory', 'plan', 'bench', 'torchao'}:
            raise AssertionError(f'{name} was imported')
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_bf16_reaches_no_fp8(tiny, tmp_path):
    """With FP8's modules unimportable, train.py trains, resumes and lists, and sample.py talks."""
    runner = tmp_path / 'without_fp8.py'
    runner.write_text(WITHOUT_FP8)

    def without_fp8(*words):
        return run(runner, *words).stdout
    with pytest.raises(AssertionError, match='measure was imported|fp8 was imported'):
        without_fp8('train_fp8.py', '--list_checkpoints')
    without_fp8('train.py', *tiny, '--max_steps=3', f'--checkpoint_dir={tmp_path}')
    out = without_fp8('train.py', '--resume=latest', '--max_steps=5', f'--checkpoint_dir={tmp_path}')
    assert 'at step 3, in bf16 until now' in out
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5]
    assert 'step_000005.pt' in without_fp8('train.py', '--list_checkpoints', f'--checkpoint_dir={tmp_path}')
    assert 'step 5' in without_fp8('sample.py', f'--ckpt={tmp_path}/latest.pt', '--max_new_tokens=3')


@pytest.fixture(scope='module')
def runs(tiny, tmp_path_factory):
    """Ten steps with a checkpoint at 5, in bf16 and in FP8; the directories."""
    directories = {}
    for name, words in (('bf16', ['train.py']), ('fp8', FP8), ('off', ['train_fp8.py', '--fp8_backend=off'])):
        directories[name] = tmp_path_factory.mktemp(name)
        done = run(
            *words,
            *tiny,
            '--checkpoint_freq=5',
            '--eval_freq=5',
            '--keep_checkpoints=0',
            f'--checkpoint_dir={directories[name]}',
        )
        directories[name + ' out'] = done.stdout
    return directories


def test_the_log_tells_what_ran(runs):
    assert 'FP8 Training Enabled: 8 of 9 linears, tensorwise (native), bf16: lm_head\n' in runs['fp8 out']
    assert runs['fp8 out'].count('| FP8\n') == 10
    assert runs['bf16 out'].count('| BF16\n') == 10
    assert '| FP8\n' not in runs['bf16 out'] + runs['off out']
    assert 'FP8 Training Off: FP8 is switched off' in runs['off out']
    line = next(line for line in runs['fp8 out'].splitlines() if line.startswith('step 3/10 '))
    assert re.fullmatch(r'step 3/10 \| 30% \| \d+ s left \| loss \d\.\d{4} \| lr 2\.9e-03 \| '
                        r'norm \d\.\d\d \| [\d,]+ tok/s \| FP8', line)
    for words in (
        'parameters',
        '10 steps = 2,560 tokens',
        'ended by max_steps=10',
        'bits per byte',
    ):
        assert words in runs['fp8 out']
    assert [step for step, _ in records(runs['fp8'], 'val/loss')] == [0, 5, 10]
    waits = records(runs['fp8'], 'train/data_wait')
    assert len(waits) == 10
    assert all(0 <= share <= 1 for _, share in waits)
    bits, nats = records(runs['fp8'], 'val/bits_per_byte')[-1][1], records(runs['fp8'], 'val/loss')[-1][1]
    assert bits == pytest.approx(
        nats / 0.693147 * 5005 / 5000, rel=1e-4
    )  # 5 documents of 1,000 bytes, an EOT each


def test_the_best_model_knows_its_loss(runs):
    for name in ('bf16', 'fp8'):
        step, loss = min(records(runs[name], 'val/loss'), key=lambda record: record[1])
        best = load(runs[name] / 'best_model.pt')
        assert (
            (best['step'], best['best_val_loss'])
            == (step, loss)
            == (10, load(runs[name] / 'latest.pt')['best_val_loss'])
        )


COUNTING = """
import runpy, sys
import torch
real = torch.save
def counted(state, file):
    print('written:', state['step'])
    real(state, file)
torch.save = counted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.parametrize('words', [['train.py'], FP8], ids=['bf16', 'fp8'])
def test_a_step_is_written_once_though_it_is_the_best(words, tiny, tmp_path):
    """Evaluation and checkpoint fall on steps 5 and 10."""
    runner = tmp_path / 'counting.py'
    runner.write_text(COUNTING)
    freqs = '--checkpoint_freq=5', '--eval_freq=5', f'--checkpoint_dir={tmp_path}/run'
    out = run(runner, *words, *tiny, *freqs).stdout
    val = dict(records(tmp_path / 'run', 'val/loss'))
    assert val[10] < val[5]
    assert [line for line in out.splitlines() if line.startswith('written')] == ['written: 5', 'written: 10']
    assert os.path.samefile(tmp_path / 'run' / 'best_model.pt', tmp_path / 'run' / 'step_000010.pt')


DYING = """
import runpy, sys
import data
real, calls = data.eval_batches, []
def dying(*args, **kwargs):
    calls.append(1)
    if len(calls) == 3:  # those of steps 0 and 5 pass
        raise MemoryError('no room to evaluate')
    return real(*args, **kwargs)
data.eval_batches = dying
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_an_evaluation_that_dies_finds_its_step_saved(tiny, tmp_path):
    runner = tmp_path / 'dying.py'
    runner.write_text(DYING)
    freqs = '--checkpoint_freq=5', '--eval_freq=5', f'--checkpoint_dir={tmp_path}/run'
    with pytest.raises(AssertionError, match='no room to evaluate'):
        run(runner, 'train.py', *tiny, *freqs)
    assert load(tmp_path / 'run' / 'latest.pt')['step'] == 10


def test_a_finished_run_that_goes_on_keeps_its_last_evaluation(tiny, tmp_path):
    """Its step is no multiple of eval_freq, so the evaluation does not come again."""
    run('train.py', *tiny, '--eval_freq=4', f'--checkpoint_dir={tmp_path}')
    evaluated = records(tmp_path, 'val/loss')
    run('train.py', '--resume=latest', '--max_steps=11', '--max_lr=1', f'--checkpoint_dir={tmp_path}')
    assert [step for step, _ in evaluated] == [0, 4, 8, 10]
    assert records(tmp_path, 'val/loss')[:-1] == evaluated
    state = load(tmp_path / 'best_model.pt')
    assert (state['step'], state['best_val_loss']) == min(evaluated, key=lambda record: record[1])


def test_lockstep(runs):
    """With the FP8 script's FP8 off, the two scripts are the same run, bit for bit."""
    assert losses(runs['off']) == losses(runs['bf16'])
    assert records(runs['off'], 'val/loss') == records(runs['bf16'], 'val/loss')
    assert equal(runs['off'] / 'latest.pt', runs['bf16'] / 'latest.pt')


def test_fp8_learns_like_bf16_and_is_not_bf16(runs):
    plain, fp8 = losses(runs['bf16']), losses(runs['fp8'])
    assert plain[1] == pytest.approx(5.4, abs=0.2)
    assert plain[10] < plain[1] - 0.5
    assert plain != fp8
    assert all(abs(plain[s] - fp8[s]) < 0.05 for s in plain)


@pytest.mark.parametrize('name, words', [('bf16', ['train.py']), ('fp8', FP8)])
def test_resume_equals_no_interruption(runs, tiny, tmp_path, name, words):
    run(
        *words,
        *tiny,
        '--checkpoint_freq=5',
        '--eval_freq=5',
        f'--resume={runs[name]}/step_000005.pt',
        f'--checkpoint_dir={tmp_path}',
    )
    assert equal(tmp_path / 'latest.pt', runs[name] / 'latest.pt')
    assert losses(tmp_path) == {step: loss for step, loss in losses(runs[name]).items() if step > 5}


LOW_BITS = [
    ['train.py', '--param_dtype=bf16'],
    ['train.py', '--optimizer=adamw8bit'],
    [*FP8, '--optimizer=adamw8bit', '--param_dtype=bf16', '--loss_chunks=3'],
]


@pytest.mark.parametrize('words', LOW_BITS, ids=' '.join)
def test_fewer_bits_learn_and_resume_alike(words, runs, tiny, tmp_path):
    folders = {name: f'--checkpoint_dir={tmp_path}/{name}' for name in ('whole', 'resumed')}
    run(*words, *tiny, '--checkpoint_freq=5', '--keep_checkpoints=0', folders['whole'])
    run(words[0], f'--resume={tmp_path}/whole/step_000005.pt', folders['resumed'])
    assert equal(tmp_path / 'resumed' / 'latest.pt', tmp_path / 'whole' / 'latest.pt')
    plain, found = losses(runs['bf16']), losses(tmp_path / 'whole')
    assert plain != found
    assert all(abs(plain[step] - found[step]) < 0.1 for step in plain)
    state = load(tmp_path / 'whole' / 'latest.pt')
    dtype = torch.bfloat16 if '--param_dtype=bf16' in words else torch.float32
    assert {w.dtype for w in state['weights'].values()} == {dtype}
    matrix = state['optimizer']['h.0.mlp.up.weight']
    assert ('exp_avg_scale' in matrix) == ('--optimizer=adamw8bit' in words)


@pytest.mark.parametrize('word, message', [
    ('--optimizer=adamw8bit', 'optimizer=adamw8bit, but the checkpoint has optimizer=adamw: leave it out'),
    ('--param_dtype=bf16', 'param_dtype=bf16, but the checkpoint has param_dtype=fp32: leave it out'),
])
def test_a_resume_keeps_the_kind_of_weights_and_moments(runs, tmp_path, word, message):
    words = f'--resume={runs["bf16"]}/latest.pt', f'--checkpoint_dir={tmp_path}/run', word
    code, said = refused('train.py', *words)
    assert code == 2
    assert message in said


def test_new_moments_start_from_a_checkpoints_weights(runs, tiny, tmp_path):
    words = '--optimizer=adamw8bit', '--param_dtype=bf16', '--max_steps=2', f'--checkpoint_dir={tmp_path}'
    run('train.py', *tiny, f'--init_from={runs["bf16"]}/latest.pt', *words)
    assert losses(tmp_path)[1] < losses(runs['bf16'])[1] - 0.5


def test_precisions_switch_and_settings_are_inherited(runs, tmp_path):
    """bf16 -> FP8 -> bf16 with no flag but resume: everything else comes from the checkpoint."""
    done = run(
        *FP8, f'--resume={runs["bf16"]}/step_000005.pt', f'--checkpoint_dir={tmp_path}/a', '--max_steps=8'
    )
    assert 'resumed' in done.stdout
    assert 'in bf16 until now' in done.stdout
    assert 'max_steps: 10 in the checkpoint, now 8' in done.stdout
    assert done.stdout.count('| FP8\n') == 3
    assert 'FP8 Training Enabled' in done.stdout
    done = run(
        'train.py', f'--resume={tmp_path}/a/latest.pt', f'--checkpoint_dir={tmp_path}/b', '--max_steps=10'
    )
    assert 'in fp8 until now' in done.stdout
    assert done.stdout.count('| BF16\n') == 2
    bf16, there, back = losses(runs['bf16']), losses(tmp_path / 'a'), losses(tmp_path / 'b')
    assert all(abs(there[s] - bf16[s]) < 0.1 for s in there)
    assert all(abs(back[s] - bf16[s]) < 0.2 for s in back)


@pytest.mark.parametrize('word, message', [
    ('--n_layer=3', 'n_layer=3, but the checkpoint has n_layer=2'),
    ('--no_bias', 'bias=False, but the checkpoint has bias=True'),
    ('--init_from=gpt2', 'not from init_from=gpt2: leave one of the two out'),
])
def test_a_resume_takes_what_a_run_starts_from_out_of_the_checkpoint(runs, tmp_path, word, message):
    words = f'--resume={runs["bf16"]}/latest.pt', f'--checkpoint_dir={tmp_path}/run', word
    code, said = refused('train.py', *words)
    assert code == 2
    assert message in said
    assert not (tmp_path / 'run').exists()


def test_a_resume_may_repeat_what_its_run_started_from(runs, tmp_path):
    words = f'--resume={runs["bf16"]}/latest.pt', f'--checkpoint_dir={tmp_path}/run', '--dry_run'
    assert 'resumed' in run('train.py', *words, '--init_from=scratch', '--bias', '--n_kv_head=0').stdout


def test_init_from_a_checkpoint_takes_weights_alone(runs, tiny, tmp_path):
    done = run(
        'train.py',
        *tiny,
        f'--init_from={runs["bf16"]}/latest.pt',
        f'--checkpoint_dir={tmp_path}',
        '--max_steps=2',
        '--overwrite',
    )
    assert losses(tmp_path)[1] < losses(runs['bf16'])[1] - 0.5
    assert 'resumed' not in done.stdout


@pytest.mark.parametrize(
    'words, rc, message',
    [
        (['--resume=latest'], 1, 'resume=latest: there is no'),
        (['--warmup_steps=11'], 2, 'warmup_steps=11, but the run has 10 steps'),
        (['--total_batch_size=1000'], 2, 'the nearest is 1024'),
        (['--init_from=gpt5'], 2, 'org/name on the hub'),
        (['--fp8_backend=te'], 1, 'Transformer Engine needs a CUDA GPU'),
        (['--no_fp8', '--fp8_backend=native'], 2, 'leave one of them out'),
        (['--block_size=6000'], 2, 'fewer than one window'),
        (['--vocab_size=100'], 2, 'has 257 tokens'),
        (['--device=cuda'], 1, 'no CUDA GPU'),
        (['--dtype=fp16'], 2, 'dtype is one of bf16, fp32'),
        (['--batch_size=0', '--device=cpu'], 2, 'name a batch_size'),
        (['--mlp=relu'], 2, 'mlp is one of'),
    ],
)
def test_mistakes_cost_one_line(tiny, tmp_path, words, rc, message):
    if words == ['--device=cuda'] and torch.cuda.is_available():
        pytest.skip('there is a GPU')
    code, said = refused('train_fp8.py', *tiny, *words, f'--checkpoint_dir={tmp_path}/run')
    assert code == rc
    assert message in said
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('script', ['train.py', 'train_fp8.py'])
def test_a_mistake_ends_the_process_in_one_line(script, tiny, tmp_path):
    done = run(script, *tiny, '--total_batch_size=1000', f'--checkpoint_dir={tmp_path}/run', rc=2)
    assert 'the nearest is 1024' in done.stderr


def test_auto_on_a_cpu_trains_in_bf16_and_says_so(tiny, tmp_path):
    if torch.cuda.is_available():
        pytest.skip('there is a GPU')
    done = run('train_fp8.py', *tiny, '--use_fp8', f'--checkpoint_dir={tmp_path}', '--sample_freq=5')
    assert 'FP8 Training Off: there is no CUDA GPU' in done.stdout
    assert done.stdout.count('| BF16\n') == 10
    assert 'step 5/10 | sample: ' in done.stdout


def test_tensorboard_and_cwd(tiny, tmp_path):
    """From another folder, with the curves and texts that people watch; runs of one name are apart, and a
    resumed one goes on with its own curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def board(name):
        found = EventAccumulator(str(tmp_path / 'runs' / name))
        found.Reload()
        return found

    (tmp_path / 'tb.py').write_text('use_tensorboard = True')   # by which its run is called
    words = [ROOT / 'train_fp8.py', 'tb.py', '--fp8_backend=native', *tiny]
    run(*words, '--sample_freq=5', '--fp8_stats_freq=5', '--checkpoint_dir=c', cwd=tmp_path)
    first = board('tb-fp8')
    tags = sorted({*first.Tags()['scalars'], *first.Tags()['images']})
    assert list(dict.fromkeys(tag.split('/')[0] for tag in tags)) == ['train', 'val', 'watch']
    of_fp8 = 'fwd_scale', 'bwd_scale', 'saturated', 'flushed', 'sqnr_db', 'sqnr_by_layer'
    assert {tag for tag in tags if 'fp8' in tag} == {f'watch/fp8/{name}' for name in of_fp8}
    assert 'max_lr = ' in first.Tensors('config/text_summary')[0].tensor_proto.string_val[0].decode()
    drawn = run('plot.py', 'health', tmp_path / 'c', f'--out={tmp_path}/health.png').stdout
    assert drawn.startswith('step 5: 24 tensors, the lowest ')
    assert {'train/loss', 'train/learning_rate', 'val/loss'} <= set(first.Tags()['scalars'])
    logged = {event.step: event.value for event in first.Scalars('train/loss')}
    assert logged == pytest.approx(losses(tmp_path / 'c'))
    [(step, sample)] = records(tmp_path / 'c', 'sample')
    [event] = first.Tensors('sample/text_summary')
    assert step == event.step == 5
    assert sample in event.tensor_proto.string_val[0].decode()

    run(*words, '--max_steps=2', '--warmup_steps=1', '--checkpoint_dir=d', cwd=tmp_path)
    run(*words, '--max_steps=12', '--checkpoint_dir=c', '--resume=latest', cwd=tmp_path)
    assert [event.step for event in board('tb-fp8-2').Scalars('train/loss')] == [1, 2]
    assert board('tb-fp8').Scalars('train/loss')[-1].step == 12
    run(*words, '--max_steps=2', '--warmup_steps=1', '--checkpoint_dir=c', '--overwrite', cwd=tmp_path)
    assert [event.step for event in board('tb-fp8').Scalars('train/loss')] == [1, 2]


WANDB = """
import json, os, types
Error = OSError
def init(**options):
    told = open('told.jsonl', 'a')
    say = lambda **facts: print(json.dumps(facts), file=told, flush=True)
    if os.environ.get('NO_NETWORK') and options.get('mode') != 'offline':
        raise Error('no route to host')
    say(**options)
    log = lambda row: say(**row)
    nothing = lambda *words, **more: None
    return types.SimpleNamespace(id=options['id'] or 'abc', log=log, define_metric=nothing, finish=nothing)
"""


def test_weights_and_biases(tiny, tmp_path):
    """What it is told: the settings, TensorBoard's names, samples; a resumed run goes on in its run."""
    (tmp_path / 'wandb.py').write_text(WANDB)
    words = [ROOT / 'train_fp8.py', '--fp8_backend=native', *tiny, '--use_wandb', '--wandb_run_name=x',
             '--sample_freq=5', '--checkpoint_dir=c']
    run(*words, cwd=tmp_path, env={'PYTHONPATH': str(tmp_path)}, fork=False)
    done = run(*words, '--max_steps=12', '--resume=latest', cwd=tmp_path, fork=False,
               env={'PYTHONPATH': str(tmp_path), 'NO_NETWORK': '1'})
    assert 'W&B cannot be reached (no route to host): written offline' in done.stdout
    told = [json.loads(line) for line in (tmp_path / 'told.jsonl').read_text().splitlines()]
    first, second = [row for row in told if 'project' in row]
    assert (first['project'], first['name'], first['config']['max_lr']) == ('llm-fp8', 'x-fp8', 3e-3)
    assert (first['id'], second['id'], second['mode']) == (None, 'abc', 'offline')
    assert {row['step']: row['train/loss'] for row in told if 'train/loss' in row} == losses(tmp_path / 'c')
    assert [row['step'] for row in told if 'sample' in row] == [5, 10]


def test_weights_and_biases_itself_offline(tiny, tmp_path):
    pytest.importorskip('wandb')
    env = {'WANDB_MODE': 'offline', 'WANDB_SILENT': 'true', 'HOME': str(tmp_path)}
    words = ['train.py', *tiny, '--max_steps=3', '--use_wandb', f'--checkpoint_dir={tmp_path}/c']
    run(*words, env=env, fork=False)
    name = json.loads((tmp_path / 'c' / 'wandb.json').read_text())['id']
    [written] = (tmp_path / 'c' / 'wandb').glob(f'offline-run-*/run-{name}.wandb')
    assert written.stat().st_size > 1000


def start(*words):
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )


def wait_for_step(directory, step, process):
    for _ in range(600):
        if (directory / 'log.jsonl').exists() and any(s >= step for s, _ in records(directory, 'train/loss')):
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError('no progress')


@pytest.mark.parametrize('way', ['SIGTERM', 'SIGINT', 'SIGHUP', 'STOP'])
def test_a_stop_saves_and_resumes(tiny, tmp_path, way):
    flags = [*tiny, '--max_steps=100000']
    process = start('train.py', *flags, f'--checkpoint_dir={tmp_path}')
    wait_for_step(tmp_path, 3, process)
    if way == 'STOP':
        (tmp_path / 'STOP').touch()
    else:
        process.send_signal(getattr(signal, way))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    stopped = load(tmp_path / 'latest.pt')['step']
    assert f'stopped at step {stopped}, saved' in out
    assert 3 <= stopped < 100000
    assert not (tmp_path / 'STOP').exists()
    if way == 'SIGTERM':
        run('train.py', '--resume=latest', f'--checkpoint_dir={tmp_path}', f'--max_steps={stopped + 2}')
        assert sorted(losses(tmp_path)) == list(range(1, stopped + 3))  # one line a step over both runs


def test_killed_at_any_moment_the_rest_of_the_run_is_the_same(tiny, tmp_path):
    """kill -9 after a checkpoint, --resume=auto: the end equals the undisturbed run's, and so does the
    log."""
    flags = [*tiny, '--max_steps=60', '--checkpoint_freq=10', '--eval_freq=10']
    run(*FP8, *flags, f'--checkpoint_dir={tmp_path}/whole')
    process = start(*FP8, *flags, f'--checkpoint_dir={tmp_path}/broken')
    wait_for_step(tmp_path / 'broken', 23, process)
    process.kill(), process.communicate()
    out = run(*FP8, *flags, '--resume=auto', f'--checkpoint_dir={tmp_path}/broken').stdout
    assert 'resumed' in out
    assert equal(tmp_path / 'whole' / 'latest.pt', tmp_path / 'broken' / 'latest.pt')
    assert losses(tmp_path / 'whole') == losses(tmp_path / 'broken')
    assert len(losses(tmp_path / 'broken')) == 60
    assert records(tmp_path / 'whole', 'val/loss') == records(tmp_path / 'broken', 'val/loss')


def test_a_full_disk_does_not_end_the_run_until_it_must(tiny, tmp_path):
    """A limit on file size stands in for the full disk: no checkpoint fits, the small log does."""
    flags = ['--checkpoint_freq=4', f'--checkpoint_dir={tmp_path}']
    done = run(
        'train.py',
        *tiny,
        *flags,
        rc=1,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.stdout.count('WARNING: could not write') == 2
    assert 'the next save is at step 8' in done.stdout
    assert len(losses(tmp_path)) == 10
    assert 'step_000010.pt' in done.stderr
    assert not list(tmp_path.glob('*.pt*'))


def test_hellaswag_while_training(tiny, tmp_path):
    rows = [
        {
            'activity_label': 'Running',
            'ctx_a': 'A man runs.',
            'ctx_b': 'he',
            'endings': ['stops.', 'flies off.', 'is a pan.', 'runs on.'],
            'label': i % 4,
        }
        for i in range(6)
    ]
    (tmp_path / 'hellaswag').mkdir()
    (tmp_path / 'hellaswag' / 'hellaswag_val.jsonl').write_text(
        ''.join(json.dumps(row) + '\n' for row in rows)
    )
    done = run(*FP8, *tiny, '--hellaswag_freq=5', f'--data_dir={tmp_path}', f'--checkpoint_dir={tmp_path}/a')
    assert done.stdout.count('HellaSwag 6 items: acc ') == 2
    assert [s for s, _ in records(tmp_path / 'a', 'hellaswag/acc_norm')] == [5, 10]
    done = run(
        'train.py', *tiny, '--hellaswag_freq=5', '--data_dir=nowhere', f'--checkpoint_dir={tmp_path}/b'
    )
    assert done.stdout.count('HellaSwag') == 1
    assert 'prepare_data.py hellaswag' in done.stdout
    assert len(losses(tmp_path / 'b')) == 10


def test_dry_run_tells_the_plan_and_leaves_nothing(tiny, tmp_path):
    done = run(
        *FP8, *tiny, '--dry_run', '--lr_schedule=wsd', '--decay_share=0.5', f'--checkpoint_dir={tmp_path}/run'
    )
    assert 'FP8 Training Enabled: 8 of 9 linears' in done.stdout
    assert '10 steps = 2,560 tokens' in done.stdout
    rates = ('step 0 1.50e-03, step 1 3.00e-03, step 2 3.00e-03, step 5 2.46e-03, '
             'step 7 1.38e-03, step 9 3.00e-04')
    assert f'schedule  wsd: {rates}' in done.stdout
    assert 'val loss' not in done.stdout
    assert not (tmp_path / 'run').exists()


def test_a_second_run_does_not_bury_the_first(runs, tiny):
    before = {p.name: p.stat().st_mtime_ns for p in runs['bf16'].iterdir() if p.name != '.lock'}
    done = run('train.py', *tiny, f'--checkpoint_dir={runs["bf16"]}', rc=2)
    assert 'holds an earlier run' in done.stderr
    assert before == {p.name: p.stat().st_mtime_ns for p in runs['bf16'].iterdir() if p.name != '.lock'}


def test_list_checkpoints(runs):
    out = run('train_fp8.py', '--list_checkpoints', f'--checkpoint_dir={runs["fp8"]}').stdout
    assert len(out.splitlines()) == 4
    assert 'step_000005.pt' in out
    assert 'best_model.pt' in out
    assert 'fp8' in out
    assert 'no checkpoints in' in run('train_fp8.py', '--list_checkpoints', '--checkpoint_dir=nowhere').stdout


@pytest.mark.parametrize('words', [['train.py'], [*FP8, '--fp8_keep=h.0.mlp.up'], *LOW_BITS], ids=' '.join)
def test_three_non_finite_steps_in_a_row_save_and_stop(words, tiny, tmp_path):
    """A learning rate that blows the model up: its steps are skipped, the parameters stay finite, the way on
    is printed."""
    done = run(*words, *tiny, '--max_lr=1e30', '--grad_clip=0', f'--checkpoint_dir={tmp_path}', rc=1)
    assert '| skipped: 3\n' in done.stdout
    assert 'skipped: 4' not in done.stdout
    assert 'three steps in a row' in done.stderr
    state = load(tmp_path / 'latest.pt')
    assert state['step'] == 4
    assert all(w.isfinite().all() for w in state['weights'].values())


def way_on(done):
    """The words behind `python` of the command that a diverged run prints."""
    line = next(line for line in done.stdout.splitlines() if line.startswith('to go on: '))
    assert done.stdout.count('SQNR') == 5
    return shlex.split(line.removeprefix('to go on: python '))


@pytest.mark.parametrize('words, first_flags, further, said', [
    (['--fp8_backend=emulate'], ['--resume', '--fp8_keep'], '--fp8_recipe=rowwise', ', rowwise ('),
    pytest.param(
        ['--fp8_kernels=triton'], ['--resume', '--fp8_keep'], '--fp8_recipe=rowwise', ', rowwise (',
        marks=pytest.mark.skipif('rowwise' not in NATIVE_ON_A_CPU, reason="not on this torch's CPU")),
    (['--fp8_recipe=delayed'], ['--resume', '--fp8_keep', '--fp8_margin'], '--fp8_margin=2', 'margin 2'),
], ids=['tensorwise', 'triton', 'delayed'])
def test_the_way_on_works_as_printed(words, first_flags, further, said, tiny, tmp_path):
    """Twice, since the learning rate that blows the model up stays."""
    blown_up = [*FP8, *tiny, *words, '--max_lr=1e30', '--grad_clip=0', f'--checkpoint_dir={tmp_path}']
    first = way_on(run(*blown_up, rc=1))
    assert [word.split('=')[0] for word in first[len(blown_up):]] == first_flags
    second = way_on(run(*first, rc=1))
    assert second[:len(first)] == first
    assert second[-1] == further
    told = run(*second, '--dry_run').stdout
    assert 'kept by fp8_keep' in told
    assert said in told
    assert 'at step 7' in told


@pytest.mark.parametrize('precision, words, tolerance', [
    ('fp32', ['train.py', '--dtype=fp32'], 1e-6), ('bf16', ['train.py'], 1e-3), ('fp8', FP8, 5e-3)])
def test_ranks_agree(tiny, tmp_path, precision, words, tolerance):
    """1 process x 4 micro-steps, 2 x 2 and 4 x 1 are the same run, to rounding."""
    found = []
    for ranks, micro_steps in ((1, 4), (2, 2), (4, 1)):
        directory = tmp_path / str(ranks)
        flags = [
            *words,
            *tiny,
            f'--gradient_accumulation_steps={micro_steps}',
            f'--checkpoint_dir={directory}',
        ]
        in_ranks(ranks, *flags)
        found.append(
            (
                losses(directory),
                records(directory, 'val/loss')[-1][1],
                load(directory / 'latest.pt')['position'],
            )
        )
    for (a, val_a, position_a), (b, val_b, position_b) in itertools.combinations(found, 2):
        assert position_a == position_b == 160
        assert a.keys() == b.keys() == set(range(1, 11))
        assert all(abs(a[s] - b[s]) / b[s] < tolerance for s in a)
        assert abs(val_a - val_b) / val_b < tolerance


def test_ranks_stop_together(tiny, tmp_path):
    flags = [*tiny, '--max_steps=100000', f'--checkpoint_dir={tmp_path}']
    process = start('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2', 'train.py', *flags)
    wait_for_step(tmp_path, 3, process)
    (tmp_path / 'STOP').touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count('stopped at step') == 1


def test_samples(runs, tmp_path):
    out = run('sample.py', f'--ckpt={runs["fp8"]}/latest.pt', '--prompt=def ', '--max_new_tokens=80').stdout
    assert out.startswith(f'# {runs["fp8"]}/latest.pt: step 10, trained in fp8\ndef ')
    again = run('sample.py', f'--ckpt={runs["fp8"]}/latest.pt', '--prompt=def ', '--max_new_tokens=80').stdout
    assert out == again
    out = run(
        'sample.py', '--ckpt', runs['fp8'] / 'best_model.pt', '--num_samples', '3', '--max_new_tokens', '5'
    ).stdout
    assert [line for line in out.splitlines() if line.startswith('---')] == ['--- 1', '--- 2', '--- 3']
    (tmp_path / 'prompt.txt').write_text('import os\n')
    out = run(
        'sample.py',
        '--ckpt',
        runs['fp8'] / 'latest.pt',
        f'--prompt=FILE:{tmp_path}/prompt.txt',
        '--top_p=0.9',
        '--max_new_tokens=90',
    ).stdout
    assert out.split('\n', 1)[1].startswith('import os\n')
    assert len(out) > 110  # past block_size, which is 64


def test_a_sample_commands_no_terminal(runs):
    """Control characters of a text are escaped, unless --raw."""
    words = 'sample.py', f'--ckpt={runs["bf16"]}/latest.pt', '--max_new_tokens=40', '--temperature=2'
    for more in (), ('--num_samples=2',):
        out = run(*words, *more, '--prompt=a\tb\n\x1b[31m').stdout
        assert 'a\tb\n\\x1b[31m' in out
        assert not [c for c in out if ord(c) < 32 and c not in '\t\n' or 127 <= ord(c) < 160]
        assert '\x1b[31m' in run(*words, *more, '--prompt=\x1b[31m', '--raw').stdout


@pytest.mark.parametrize('words, rc, message', [
    (['--prompt=FILE:nowhere'], 1, 'no prompt file nowhere'),
    (['--ckpt=nowhere.pt'], 1, 'no checkpoint nowhere.pt'),
    (['--num_samples=0'], 2, 'wants a whole number >= 1'),
])
def test_samples_that_cannot_be(words, rc, message):
    code, said = refused('sample.py', *words)
    assert code == rc
    assert message in said


IMPATIENT = """
import datetime
import functools
import runpy
import sys
import time
sys.path.insert(0, {root!r})
import torch.distributed as dist
import parallel
import shards
dist.init_process_group = functools.partial(dist.init_process_group, timeout=datetime.timedelta(seconds=2))
parallel.PATIENCE = datetime.timedelta(seconds={patience})

def check(*arguments):
    time.sleep(5)
check.__module__ = 'shards'
shards.check = check
runpy.run_path({root!r} + '/train.py', run_name='__main__')
"""


@pytest.mark.parametrize('patience, rc', [(60, 0), (2, 1)])
def test_ranks_wait_for_a_check_beyond_the_limit_of_their_other_collectives(tiny, tmp_path, patience, rc):
    """That limit is 2 seconds here, and the check takes 5."""
    script = tmp_path / 'script.py'
    script.write_text(IMPATIENT.format(root=str(ROOT), patience=patience))
    words = [*tiny, '--max_steps=3', '--eval_tokens=256', f'--checkpoint_dir={tmp_path}/c']
    done = in_ranks(2, script, *words, rc=rc)
    assert ('done: ' in done.stdout) == (rc == 0)
    assert ('rank 0 needed more than 0:00:02 for shards.check' in done.stderr) == (rc == 1)


@pytest.mark.parametrize('ranks', [1, 3])
def test_a_flipped_bit_in_a_shard_stops_the_run_by_name(ranks, tiny, tiny_data, tmp_path):
    folder = tmp_path / 'spoiled-byte'
    shutil.copytree(tiny_data, folder, ignore=shutil.ignore_patterns('.checked.json'))
    raw = bytearray((folder / 'train_000001.bin').read_bytes())
    raw[5000] ^= 1
    (folder / 'train_000001.bin').write_bytes(raw)
    words = 'train.py', *tiny, f'--dataset={folder}', f'--checkpoint_dir={tmp_path}/c'
    done = in_ranks(ranks, *words, rc=1, timeout=60)
    assert 'train_000001.bin is damaged' in done.stderr
    assert done.stderr.count('error: ') == 1  # rank 0's
    assert not (tmp_path / 'c').exists()


def test_a_mistake_is_told_in_ranks_too(tiny, tmp_path):
    done = in_ranks(2, 'train.py', *tiny, '--mlp=relu', f'--checkpoint_dir={tmp_path}', rc=2)
    assert done.stderr.count("error: the command line: mlp is one of gelu, swiglu, not 'relu'\n") == 2


def test_foreign_shards_and_tokenizers_are_told(runs, tiny, tiny_data, tmp_path):
    folder = tmp_path / 'other'
    folder.mkdir()
    for shard in tiny_data.glob('*.bin'):
        (folder / shard.name).symlink_to(shard)
    meta = json.loads((tiny_data / 'meta.json').read_text())
    (folder / 'meta.json').write_text(json.dumps({**meta, 'tokenizer': 'gpt2'}))
    words = f'--resume={runs["bf16"]}/latest.pt', f'--dataset={folder}', f'--checkpoint_dir={tmp_path}/c'
    code, message = refused('train.py', *words)
    assert code == 2
    assert 'tokenized with gpt2, the checkpoint with byte' in message


# ------------------------------------------------------------------------------------------- evaluation alone

def contents(folder):
    """path -> (bytes, when it was written) of all files in a folder."""
    files = (path for path in folder.rglob('*') if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def val_loss(out):
    return float(re.search(r'val loss (\d+\.\d+)', out)[1])


@pytest.mark.parametrize('script, name', [
    ('train.py', 'bf16'), ('train_fp8.py', 'fp8'), ('train.py', 'fp8'), ('train_fp8.py', 'bf16')])
@pytest.mark.parametrize('start', ['--resume=latest', '--init_from={}/latest.pt'])
def test_evaluation_alone_gives_the_runs_loss_and_writes_nothing(start, script, name, runs, tiny, tmp_path):
    """In either script, of a checkpoint of either; not even a STOP of the run that is there goes."""
    folder = tmp_path / 'run'
    shutil.copytree(runs[name], folder)
    (folder / 'STOP').touch()
    before = contents(tmp_path)
    words = [*tiny, '--eval_only', start.format(folder), f'--checkpoint_dir={folder}']
    out = run(script, *words, '--data_dir=nowhere').stdout
    assert val_loss(out) == pytest.approx(records(runs[name], 'val/loss')[-1][1], abs=6e-5)
    assert 'HellaSwag is left out' in out
    assert 'tok/s' not in out and 'done: ' not in out
    assert contents(tmp_path) == before


def test_evaluation_alone_is_of_hellaswag_too(runs, tiny, tmp_path):
    (tmp_path / 'hellaswag').mkdir()
    row = {'activity_label': 'Running', 'ctx': 'A man runs.', 'endings': ['a.', 'b.', 'c.', 'd.'], 'label': 1}
    (tmp_path / 'hellaswag' / 'hellaswag_val.jsonl').write_text(json.dumps(row) + '\n')
    words = [*tiny, '--eval_only', f'--init_from={runs["bf16"]}/latest.pt', f'--data_dir={tmp_path}']
    out = run('train.py', *words, f'--checkpoint_dir={tmp_path}/none').stdout
    assert 'HellaSwag 1 items: acc ' in out
    assert not (tmp_path / 'none').exists()


@pytest.mark.parametrize('name', ['validation', 'test'])
def test_what_is_held_out_may_be_named(name, runs, tiny, tmp_path):
    """It is what validation loss is of; where a run trains too, a line says that it does so on the rest."""
    words = [*tiny, f'--init_from={runs["bf16"]}/latest.pt', f'--split_name={name}']
    out = run('train.py', *words, '--eval_only', '--data_dir=nowhere').stdout
    assert val_loss(out) == pytest.approx(records(runs['bf16'], 'val/loss')[-1][1], abs=6e-5)
    assert 'split_name' not in out
    out = run('train.py', *words, '--dry_run').stdout
    assert out.count(f'split_name={name}: what is held out') == 1


def test_ranks_evaluate_alone_together(runs, tiny, tmp_path):
    words = [*tiny, '--eval_only', f'--init_from={runs["bf16"]}/latest.pt', '--data_dir=nowhere']
    out = in_ranks(2, 'train.py', *words, f'--checkpoint_dir={tmp_path}/none').stdout
    assert val_loss(out) == pytest.approx(records(runs['bf16'], 'val/loss')[-1][1], abs=1e-3)
    assert not (tmp_path / 'none').exists()


def test_evaluation_alone_makes_no_best_model(runs, tiny, tmp_path):
    """Though its loss is lower than the best that the checkpoint knows."""
    state = load(f'{runs["bf16"]}/latest.pt')
    torch.save({**state, 'best_val_loss': 99.0}, tmp_path / 'latest.pt')
    words = '--eval_only', '--resume=latest', f'--checkpoint_dir={tmp_path}', '--data_dir=nowhere'
    run('train.py', *tiny, *words)
    assert [path.name for path in tmp_path.iterdir()] == ['latest.pt']
