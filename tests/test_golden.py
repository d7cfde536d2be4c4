"""The first four steps of both scripts, in figures. Whoever changes their arithmetic changes these, and then
results/, README.md and docs/ show the arithmetic of an earlier commit: make those figures anew as well."""
import pytest

from conftest import losses, records, run, write_tiny_data

MODEL = [
    '--tokenizer=byte', '--n_layer=2', '--n_head=2', '--n_embd=64', '--block_size=64', '--batch_size=4',
    '--gradient_accumulation_steps=2', '--max_steps=4', '--warmup_steps=2', '--max_lr=2e-2',
    '--lr_schedule=cosine', '--log_freq=1', '--eval_tokens=256', '--device=cpu', '--dtype=bf16',
    '--grad_clip=1e-6']     # gradients near AdamW's eps of 1e-8: their size, too, reaches the weights
FIGURES = {     # the training loss of each step and the validation loss; the gradient norm of each step
    ('train.py',):
        ([5.48617, 5.03404, 4.36027, 3.93027, 3.88479], [3.54756, 2.45939, 2.42500, 2.16192]),
    ('train.py', '--param_dtype=bf16'):
        ([5.48610, 5.03450, 4.36040, 3.93070, 3.88495], [3.54688, 2.45312, 2.43750, 2.17188]),
    ('train_fp8.py', '--fp8_backend=native', '--fp8_recipe=tensorwise'):
        ([5.48595, 5.03444, 4.36078, 3.93093, 3.88501], [3.53775, 2.46092, 2.42463, 2.16266]),
    ('train_fp8.py', '--fp8_backend=native', '--fp8_recipe=delayed'):
        ([5.48607, 5.03481, 4.36174, 3.93076, 3.88504], [3.53713, 2.46166, 2.42586, 2.16270]),
    ('train_fp8.py', '--fp8_backend=emulate', '--fp8_recipe=rowwise'):
        ([5.48693, 5.03492, 4.36162, 3.93249, 3.88705], [3.55424, 2.45845, 2.42363, 2.16219]),
}
# CPUs round to bf16, by 2**-9 at most, in other places, and find other FP8 codes. A loss is the mean of 512
# targets: eight such roundings of each are 2**-9 * sqrt(8 / 512). A norm's are fewer that weigh more: half of
# 2**-9. CPUs with and without units for bf16, by AVX2, AVX-512 or neither, differ by half of both bounds.
# The norm of bf16 gradients is itself bf16: it may be the next such number, which is up to 2**-7 away.
LOSS_BOUND, NORM_BOUND, BF16_NORM_BOUND = 2**-12, 2**-10, 2**-7


@pytest.fixture(scope='module')
def squares(tmp_path_factory):
    """Text that is the same on every machine."""
    text = ' '.join(str(number**2) for number in range(10_000))
    return write_tiny_data(tmp_path_factory.mktemp('data'), text)


@pytest.mark.parametrize('words', FIGURES, ids=' '.join)
def test_the_first_steps(words, squares, tmp_path):
    """An inverse scale that is off by 0.5% moves the third step's loss by 4e-4, its gradient norm by 1e-3;
    no clipping, a schedule that is a step off, and a micro-step's loss that is not divided, by percents."""
    run(*words, *MODEL, f'--dataset={squares}', f'--checkpoint_dir={tmp_path}')
    _, (_, val_loss) = records(tmp_path, 'val/loss')    # of the start and of the end
    expected_losses, expected_norms = FIGURES[words]
    assert [*losses(tmp_path).values(), val_loss] == pytest.approx(expected_losses, rel=LOSS_BOUND)
    norms = dict(records(tmp_path, 'train/grad_norm'))
    bound = BF16_NORM_BOUND if '--param_dtype=bf16' in words else NORM_BOUND
    assert list(norms.values()) == pytest.approx(expected_norms, rel=bound)
