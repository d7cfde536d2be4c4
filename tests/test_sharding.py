"""FSDP, run as users run it, on gloo: what sharding must not change, and what it refuses."""
import json
import shutil

import pytest
import torch

import fp8
import optim
from checkpoint import load
from configurator import DataError, SettingError
from conftest import in_ranks, losses, records, run
from model import GPT, GPTConfig

NATIVE = ['train_fp8.py', '--fp8_backend=native']
DELAYED = [*NATIVE, '--fp8_recipe=delayed', '--fp8_amax_history=4']
LLAMA = ['--position=rope', '--mlp=swiglu', '--norm=rmsnorm', '--no_tie_embeddings']
NORM = 'train/grad_norm'


def near(a, b, tolerance):
    """Whether two runs' losses are of the same steps and differ by at most that share."""
    return a.keys() == b.keys() and all(abs(a[step] - b[step]) <= tolerance * b[step] for step in a)


@pytest.fixture(scope='module')
def trained(tiny, tmp_path_factory):
    """trained(ranks, *words): the directory of ten steps of 8 sequences, made once, a checkpoint at 5."""
    made = {}

    def directory(ranks, *words):
        if (ranks, words) not in made:
            made[ranks, words] = tmp_path_factory.mktemp('run')
            flags = [*tiny, f'--batch_size={8 // ranks}', '--checkpoint_freq=5', '--keep_checkpoints=0']
            done = in_ranks(ranks, *words, *flags, f'--checkpoint_dir={made[ranks, words]}')
            (made[ranks, words] / 'out').write_text(done.stdout)
        return made[ranks, words]
    return directory


def test_what_ranks_check_among_themselves():
    """First weights, the dtype that travels, shards behind a pass, a skip, memory: see sharded.py."""
    done = in_ranks(2, 'tests/sharded.py')
    assert done.stdout.split() == ['memory', 'first_weights', 'travel', 'behind_a_pass', 'skip']


@pytest.mark.parametrize('ranks, mode', [(2, 'fsdp_full'), (2, 'fsdp_grad_op'), (4, 'fsdp_full')])
def test_in_fp32_it_is_ddp(ranks, mode, trained):
    """Bit for bit, where the gradient norm, summed in another order, changes nothing. Four ranks' gradients
    gloo adds up in another order, too."""
    words = 'train.py', '--dtype=fp32', '--grad_clip=0'
    ddp, fsdp = trained(ranks, *words), trained(ranks, *words, f'--sharding_mode={mode}')
    assert near(losses(fsdp), losses(ddp), 1e-6 if ranks == 4 else 0)
    assert near(dict(records(fsdp, NORM)), dict(records(ddp, NORM)), 1e-6)
    assert f'sharding  {mode} over {ranks} ranks' in (fsdp / 'out').read_text()


@pytest.mark.parametrize('words, tolerance', [
    pytest.param(['train.py', '--dtype=fp32'], 1e-6, id='fp32'),
    pytest.param(['train.py', *LLAMA, '--grad_checkpointing=full', '--loss_chunks=2'], 1e-3, id='bf16'),
    pytest.param(NATIVE, 5e-3, id='native'),
    pytest.param(['train_fp8.py', '--fp8_backend=emulate', '--fp8_recipe=rowwise'], 5e-3, id='emulate'),
    pytest.param(['train_fp8.py', '--fp8_backend=torchao'], 5e-3, id='torchao'),
])
def test_it_is_one_process(words, tolerance, trained):
    """Clipping, the logged loss and its norm included."""
    one, fsdp = trained(1, *words), trained(2, *words, '--sharding_mode=fsdp_full')
    assert near(losses(fsdp), losses(one), tolerance)
    assert near(dict(records(fsdp, NORM)), dict(records(one, NORM)), 10 * tolerance)
    assert abs(records(fsdp, 'val/loss')[-1][1] - records(one, 'val/loss')[-1][1]) < 10 * tolerance


def test_adapters_beside_a_sharded_model_train_as_beside_a_whole_one(trained):
    words = 'train.py', '--lora_rank=4', '--lora_targets=all'
    assert losses(trained(2, *words, '--sharding_mode=fsdp_full')) == losses(trained(2, *words))


# ------------------------------------------------------------------------------------------------ checkpoints

@pytest.mark.parametrize('ranks, mode', [(2, 'fsdp_grad_op'), (1, 'fsdp_full'), (2, 'ddp')])
def test_saved_on_four_ranks_it_goes_on_on_others(ranks, mode, trained, tmp_path):
    """In FP8, with delayed scaling; in a single process sharding_mode changes nothing."""
    whole = trained(4, *DELAYED, '--sharding_mode=fsdp_full')
    words = [*DELAYED[:1], f'--resume={whole}/step_000005.pt', f'--batch_size={8 // ranks}']
    done = in_ranks(ranks, *words, f'--sharding_mode={mode}', f'--checkpoint_dir={tmp_path}')
    expected = {step: loss for step, loss in losses(whole).items() if step > 5}
    assert near(losses(tmp_path), expected, 5e-3)
    assert ('changes nothing in a single process' in done.stdout) == (ranks == 1)


def test_resumed_on_as_many_ranks_it_is_the_same_run(trained, tmp_path):
    whole = trained(2, *NATIVE, '--sharding_mode=fsdp_full')
    in_ranks(2, NATIVE[0], f'--resume={whole}/step_000005.pt', f'--checkpoint_dir={tmp_path}')
    assert losses(tmp_path) == {step: loss for step, loss in losses(whole).items() if step > 5}


def test_a_gathered_checkpoint_is_as_any(trained):
    """The same names, shapes and dtypes as one process writes; sample.py reads it."""
    def kinds(directory):
        state = load(directory / 'latest.pt')
        parts = {'weights': state['weights'], **state['optimizer']}
        return {(part, name): (tensor.shape, tensor.dtype)
                for part, tensors in parts.items() for name, tensor in tensors.items()}
    fsdp, one = trained(2, *NATIVE, '--sharding_mode=fsdp_full'), trained(1, *NATIVE)
    assert kinds(fsdp) == kinds(one)
    assert 'step 10' in run('sample.py', f'--ckpt={fsdp}/latest.pt', '--max_new_tokens=3').stdout


def test_moments_of_8_bits_are_sharded_by_whole_blocks(trained, tmp_path):
    words = 'train.py', '--optimizer=adamw8bit', '--param_dtype=bf16'
    fsdp, one = trained(2, *words, '--sharding_mode=fsdp_full'), trained(1, *words)
    assert near(losses(fsdp), losses(one), 5e-3)
    alone = [f'--resume={fsdp}/step_000005.pt', '--batch_size=8', f'--checkpoint_dir={tmp_path}']
    run('train.py', *alone)
    assert near(losses(tmp_path), {step: loss for step, loss in losses(fsdp).items() if step > 5}, 5e-3)


# --------------------------------------------------------------------------- optimizers that no host can hold

@pytest.fixture(scope='module')
def in_folders(trained):
    """Ten steps of four ranks whose hosts are too small to gather a checkpoint."""
    return trained(4, 'tests/small_host.py', *NATIVE, '--sharding_mode=fsdp_full', '--eval_freq=5')


@pytest.mark.parametrize('ranks, mode', [(2, 'fsdp_grad_op'), (1, 'fsdp_full')])
def test_shards_go_on_on_other_ranks(ranks, mode, in_folders, tmp_path):
    names = [NATIVE[0], f'--resume={in_folders}/step_000005.pt', f'--batch_size={8 // ranks}']
    in_ranks(ranks, *names, f'--sharding_mode={mode}', f'--checkpoint_dir={tmp_path}')
    expected = {step: loss for step, loss in losses(in_folders).items() if step > 5}
    assert near(losses(tmp_path), expected, 5e-3)


def test_shards_are_what_would_be_gathered(in_folders, trained):
    """Moment by moment; the weights are in the file, as in any."""
    model = GPT(GPTConfig(**load(in_folders / 'latest.pt')['model_config']))
    optimizer = optim.make_optimizer(model, (0.9, 0.95), 0.1)
    optim.load_named_state(optimizer, model, load(in_folders / 'latest.pt')['optimizer'])
    expected = load(trained(4, *NATIVE, '--sharding_mode=fsdp_full', '--eval_freq=5') / 'latest.pt')
    found = optim.named_state(optimizer, model)
    assert found.keys() == expected['optimizer'].keys()
    for name, moments in expected['optimizer'].items():
        assert all(torch.equal(found[name][key], moments[key]) for key in moments), name
    weights = load(in_folders / 'best_model.pt')['weights']
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected['weights'].items())
    assert 'step 10' in run('sample.py', f'--ckpt={in_folders}/latest.pt', '--max_new_tokens=3').stdout


def test_a_folder_that_lost_a_file_is_told(in_folders, tmp_path):
    shutil.copytree(in_folders, tmp_path / 'run')
    victim = sorted((tmp_path / 'run' / 'step_000010').glob('*.distcp'))[0]
    victim.unlink()
    with pytest.raises(DataError, match=f'{victim} is missing or not as long as it was'):
        load(tmp_path / 'run' / 'latest.pt')


def test_folders_go_with_their_files(tiny, tmp_path):
    """But for the best model's; what a kill left is gone at the next start."""
    words = ['tests/small_host.py', 'train.py', *tiny, '--sharding_mode=fsdp_full']
    (tmp_path / 'step_000003').mkdir()
    (tmp_path / 'step_000004.tmp').mkdir()
    words += [f'--checkpoint_dir={tmp_path}']
    in_ranks(2, *words, '--checkpoint_freq=2', '--keep_checkpoints=1', '--eval_freq=4', '--max_lr=1e-2')
    best = json.loads((tmp_path / 'best_model.json').read_text())['step']
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {'step_000010', f'step_{best:06d}'}


# -------------------------------------------------------------------------------- what ranks must do together

def test_no_rank_waits_for_passes_that_others_do_not_make(tiny, tmp_path):
    """Nine windows of evaluation in fours and nine items of HellaSwag in fours, on two ranks; a sample; a
    best model saved behind an evaluation; FP8's health."""
    rows = [{'activity_label': 'Running', 'ctx_a': 'A man runs.', 'ctx_b': 'he',
             'endings': ['stops.', 'flies off.', 'is a pan.', 'runs on.'], 'label': i % 4} for i in range(9)]
    (tmp_path / 'hellaswag').mkdir()
    path = tmp_path / 'hellaswag' / 'hellaswag_val.jsonl'
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    often = [f'--{what}_freq=5' for what in ('eval', 'sample', 'hellaswag', 'fp8_stats', 'checkpoint')]
    flags = [*often, '--eval_tokens=576', f'--data_dir={tmp_path}', '--sharding_mode=fsdp_grad_op']
    done = in_ranks(2, *NATIVE, *tiny, *flags, f'--checkpoint_dir={tmp_path}/a', timeout=100)
    assert done.stdout.count('HellaSwag 9 items') == 2
    assert done.stdout.count('| sample: ') == 1
    assert done.stdout.count('SQNR') == 1
    best = load(tmp_path / 'a' / 'best_model.pt')
    assert all(w.dtype == torch.float32 for w in best['weights'].values())


def test_steps_that_are_not_finite_stop_all_ranks(tiny, tmp_path):
    flags = ['--max_lr=1e30', '--grad_clip=0', '--sharding_mode=fsdp_full', f'--checkpoint_dir={tmp_path}']
    done = in_ranks(2, 'train.py', *tiny, *flags, rc=1)
    assert '| skipped: 3\n' in done.stdout
    assert all(w.isfinite().all() for w in load(tmp_path / 'latest.pt')['weights'].values())


def test_hooks_cut_no_graph(tiny, tmp_path):
    """As many graphs as in DDP: test_fp8_training's six, each without a break."""
    words = ['tests/graphs.py', 'train.py', *tiny, '--compile=on', '--n_layer=3', '--max_steps=2']
    done = in_ranks(2, *words, '--sharding_mode=fsdp_full', f'--checkpoint_dir={tmp_path}')
    assert '6 graphs' in done.stdout.splitlines()


# -------------------------------------------------------------------------------------------- what is refused

@pytest.mark.parametrize('asked, message', [
    (dict(kernels='triton', backend='native'), 'fp8_kernels=triton keeps whole weights'),
    (dict(lora_rank=4, backend='native'), 'frozen weights in FP8 are not sharded: --no_fp8'),
    (dict(backend='te'), 'Transformer Engine is not built for sharded weights: --fp8_backend=native'),
])
def test_what_cannot_be_sharded_is_refused_by_name(asked, message):
    place = fp8.Place(torch.device('cpu'), 256)
    with pytest.raises(SettingError, match=message):
        fp8.choose(fp8.Options(**asked, sharded=True), place)


def test_shards_that_are_no_whole_blocks_are_refused(tiny, tmp_path):
    flags = ['--optimizer=adamw8bit', '--n_embd=16', '--sharding_mode=fsdp_full']
    done = in_ranks(2, 'train.py', *tiny, *flags, f'--checkpoint_dir={tmp_path}', rc=2)
    assert 'a shard is no whole number of blocks of 256' in done.stderr
