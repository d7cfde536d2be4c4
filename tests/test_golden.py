"""The first two steps of both scripts, in figures. Whoever changes their arithmetic changes these, and then
results/, README.md and docs/ show the arithmetic of an earlier commit: make those figures anew as well."""
import pytest

from conftest import losses, records, run, write_tiny_data

MODEL = [
    '--tokenizer=byte', '--n_layer=2', '--n_head=2', '--n_embd=64', '--block_size=64', '--batch_size=4',
    '--max_steps=2', '--warmup_steps=1', '--max_lr=1e-2', '--lr_schedule=constant', '--log_freq=1',
    '--eval_tokens=256', '--device=cpu']
FIGURES = {     # loss and gradient norm of each step; an inverse scale that is off by 0.1% moves them by 2e-3
    ('train.py',):
        ([5.47416, 4.55053], [3.89691, 2.82375]),
    ('train_fp8.py', '--fp8_backend=native', '--fp8_recipe=tensorwise'):
        ([5.47385, 4.54801], [3.89064, 2.80900]),
    ('train_fp8.py', '--fp8_backend=native', '--fp8_recipe=delayed'):
        ([5.47385, 4.54982], [3.89064, 2.83066]),
    ('train_fp8.py', '--fp8_backend=emulate', '--fp8_recipe=tensorwise'):
        ([5.47385, 4.54801], [3.89064, 2.80900]),
}


@pytest.fixture(scope='module')
def squares(tmp_path_factory):
    """Text that is the same on every machine."""
    text = ' '.join(str(number**2) for number in range(10_000))
    return write_tiny_data(tmp_path_factory.mktemp('data'), text)


@pytest.mark.parametrize('words', FIGURES, ids=' '.join)
def test_the_first_steps(words, squares, tmp_path):
    """CPUs with and without units for bf16 differ by 2e-5 and 5e-4."""
    run(*words, *MODEL, f'--dataset={squares}', f'--checkpoint_dir={tmp_path}')
    norms = dict(records(tmp_path, 'train/grad_norm'))
    expected_losses, expected_norms = FIGURES[words]
    assert list(losses(tmp_path).values()) == pytest.approx(expected_losses, rel=1e-4)
    assert list(norms.values()) == pytest.approx(expected_norms, rel=1e-3)
