"""FSDP, run as users run it, on gloo: what sharding must not change, and what it refuses."""
import pytest
import torch

from fp8gpt.checkpoint import read
from conftest import COUNTS_GRAPHS, TINY, equal, hellaswag_items, in_ranks, losses, records, run, runner

NATIVE = ['train_fp8.py', '--fp8_backend=native']
DELAYED = [*NATIVE, '--fp8_recipe=delayed', '--fp8_amax_history=4']
LLAMA = ['--init_from=llama-3.1-8b']     # its shape, with TINY's sizes
FULL = '--sharding_mode=fsdp_full'
NORM = 'train/grad_norm'


@pytest.fixture(scope='module')
def trained(tiny_data, one_run, tmp_path_factory):
    """trained(ranks, *words): the directory of ten steps of 4 sequences, made once, with checkpoints and
    evaluations at 5 and 10."""
    made = {}

    def directory(ranks, *words):
        if ranks == 1:
            return one_run(*words)[0]
        if (ranks, words) not in made:
            made[ranks, words] = tmp_path_factory.mktemp('run')
            flags = [*TINY, f'--dataset={tiny_data}', f'--batch_size={4 // ranks}', '--checkpoint_freq=5',
                     '--eval_freq=5', '--keep_checkpoints=0', f'--checkpoint_dir={made[ranks, words]}']
            in_ranks(ranks, *words, *flags)
        return made[ranks, words]
    return directory


def test_what_ranks_check_among_themselves(tmp_path):
    done = in_ranks(2, 'tests/sharded.py', tmp_path)
    assert done.stdout.split()[-1] == 'checked'


def test_in_fp32_it_is_ddp(trained):
    """Bit for bit, where the gradient norm, summed in another order, changes nothing."""
    words = 'train.py', '--dtype=fp32', '--grad_clip=0'
    ddp = trained(2, *words)
    for mode in ('fsdp_full', 'fsdp_grad_op'):
        fsdp = trained(2, *words, f'--sharding_mode={mode}')
        assert losses(fsdp) == losses(ddp), mode
        assert dict(records(fsdp, NORM)) == pytest.approx(dict(records(ddp, NORM)), rel=1e-6), mode


@pytest.mark.parametrize('words', [NATIVE, pytest.param(DELAYED, marks=pytest.mark.slow)])
def test_in_fp8_it_is_ddp_but_for_gradients_that_are_rounded_to_bf16(words, trained):
    ddp = trained(2, *words)
    full, grad_op = (trained(2, *words, f'--sharding_mode={mode}') for mode in ('fsdp_full', 'fsdp_grad_op'))
    assert losses(full) == losses(grad_op)
    assert losses(full)[1] == losses(ddp)[1]
    assert losses(full) == pytest.approx(losses(ddp), rel=2**-10)


@pytest.mark.parametrize('words, tolerance', [
    pytest.param(NATIVE, 5e-3, id='native'),
    pytest.param(['train.py', *LLAMA, '--grad_checkpointing=full', '--loss_chunks=2'], 1e-3, id='bf16',
                 marks=pytest.mark.slow),
])
def test_it_is_one_process(words, tolerance, trained):
    one, fsdp = trained(1, *words), trained(2, *words, FULL)
    assert losses(fsdp) == pytest.approx(losses(one), rel=tolerance)
    assert dict(records(fsdp, NORM)) == pytest.approx(dict(records(one, NORM)), rel=10 * tolerance)
    assert abs(records(fsdp, 'val/loss')[-1][1] - records(one, 'val/loss')[-1][1]) < 10 * tolerance


@pytest.mark.parametrize('script', [
    NATIVE, *(pytest.param(words, marks=pytest.mark.slow) for words in (['train.py'], DELAYED))])
def test_adapters_beside_a_sharded_model_train_as_beside_a_whole_one(script, trained):
    words = *script, '--lora_rank=4', '--lora_targets=all'
    ddp, fsdp = (trained(2, *words, *more) for more in ([], [FULL]))
    assert losses(fsdp) == losses(ddp)
    assert records(fsdp, 'val/loss') == records(ddp, 'val/loss')
    assert equal(fsdp / 'latest.pt', ddp / 'latest.pt')


def test_a_gathered_checkpoint_is_as_any(trained, tmp_path):
    def kinds(directory):
        state = read(directory / 'latest.pt')
        parts = {'weights': state['weights'], **state['optimizer']}
        return {(part, name): (tensor.shape, tensor.dtype)
                for part, tensors in parts.items() for name, tensor in tensors.items()}
    fsdp = trained(2, *NATIVE, FULL)
    assert kinds(fsdp) == kinds(trained(1, *NATIVE))
    words = [NATIVE[0], f'--resume={fsdp}/step_000005.pt', '--batch_size=4', f'--checkpoint_dir={tmp_path}']
    run(*words)
    assert losses(tmp_path) == pytest.approx(losses(fsdp, after=5), rel=5e-3)


@pytest.mark.slow
def test_saved_on_some_ranks_it_goes_on_on_others(trained, tmp_path):
    """In FP8, with delayed scaling; and by Muon in DDP: to the bit on as many ranks."""
    muon = 'train.py', '--dtype=fp32', '--optimizer=muon', '--lr_schedule=wsd', '--decay_share=0.6'
    for number, (before, words, ranks, mode, tolerance) in enumerate((
        (4, [*DELAYED, FULL], 2, 'fsdp_grad_op', 2**-9),
        (4, [*DELAYED, FULL], 1, 'fsdp_full', 2**-9),
        (4, [*DELAYED, FULL], 2, 'ddp', 2**-9),
        (2, DELAYED, 4, 'fsdp_full', 2**-9),
        (2, [*DELAYED, FULL], 2, 'fsdp_full', 0),
        (2, muon, 1, 'ddp', 1e-4),
        (2, muon, 2, 'ddp', 0),
    )):
        whole, folder = trained(before, *words), tmp_path / str(number)
        resume = f'--resume={whole}/step_000005.pt', f'--batch_size={4 // ranks}', f'--sharding_mode={mode}'
        in_ranks(ranks, words[0], *resume, f'--checkpoint_dir={folder}')
        assert losses(folder) == pytest.approx(losses(whole, after=5), rel=tolerance, abs=0), (words, ranks)
        assert tolerance or equal(folder / 'latest.pt', whole / 'latest.pt')


@pytest.mark.slow
def test_moments_of_8_bits_are_sharded_by_whole_blocks(trained, tmp_path):
    words = 'train.py', '--optimizer=adamw8bit', '--param_dtype=bf16'
    fsdp, one = trained(2, *words, FULL), trained(1, *words)
    assert losses(fsdp) == pytest.approx(losses(one), rel=2**-6)
    run('train.py', f'--resume={fsdp}/step_000005.pt', '--batch_size=4', f'--checkpoint_dir={tmp_path}')
    assert losses(tmp_path) == pytest.approx(losses(fsdp, after=5), rel=2**-6)


@pytest.mark.slow
def test_no_rank_waits_for_passes_that_others_do_not_make(tiny, tmp_path):
    """Nine windows of evaluation in fours and nine items of HellaSwag in fours, on two ranks; a sample; a
    best model saved behind an evaluation; FP8's health."""
    often = [f'--{what}_freq=5' for what in ('eval', 'sample', 'hellaswag', 'fp8_stats', 'checkpoint')]
    flags = [*often, '--eval_tokens=576', f'--data_dir={hellaswag_items(tmp_path, 9)}',
             '--sharding_mode=fsdp_grad_op']
    done = in_ranks(2, *NATIVE, *tiny, *flags, f'--checkpoint_dir={tmp_path}/a')
    assert done.stdout.count('HellaSwag 9 items') == 2
    assert done.stdout.count('| sample: ') == 2         # in the loop and at the end
    assert done.stdout.count('SQNR') == 1
    best = read(tmp_path / 'a' / 'best_model.pt')
    assert all(w.dtype == torch.float32 for w in best['weights'].values())


@pytest.mark.slow
@pytest.mark.parametrize('script', [['train.py'], NATIVE, [*NATIVE, '--lora_rank=4', '--lora_targets=all']])
def test_hooks_cut_no_graph(script, tiny, tmp_path):
    words = [*tiny, FULL, '--compile=on', '--n_layer=3', '--max_steps=2', f'--checkpoint_dir={tmp_path}']
    done = in_ranks(2, runner(tmp_path, COUNTS_GRAPHS), *script, *words)
    assert '8 graphs' in done.stdout.splitlines()
