"""Small models in FP8 on a CPU and the steps they take, for several test files."""
import itertools

import torch

from fp8gpt import fp8
from fp8gpt.fp8 import RECIPES, Choice, Options, Place, linear_factory
from model import GPT, GPTConfig, Linear
from fp8gpt.optim import make_optimizer, set_rate

CPU = torch.device('cpu')
NATIVE = Choice(backend='native', reason='test')
EMULATE = Choice(backend='emulate', reason='test')
SMALL = GPTConfig(vocab_size=64, block_size=32, n_layer=2, n_head=2, n_embd=32)
# delayed scaling through the script, for conftest's one_run
DELAYED = ('train_fp8.py', '--fp8_backend=native', '--fp8_recipe=delayed', '--fp8_amax_history=4',
           '--gradient_accumulation_steps=2')
WIDE = GPTConfig(vocab_size=64, block_size=64, n_layer=2, n_head=2, n_embd=128)
ON_A_CPU = [    # where native multiplies as emulate does
    *itertools.product(['emulate'], RECIPES),
    *itertools.product(['native'], ['tensorwise', 'delayed']),
    *itertools.product(['torchao'], ['tensorwise', 'rowwise', 'rowwise_gw_hp']),
]


def on_a_cpu(backend, recipe='auto', **options):
    """The Choice that a CPU runs."""
    return fp8.choose(Options(backend=backend, recipe=recipe, **options), Place(CPU, tokens=128))


def shifted(idx):
    """Inputs and targets, each (B, T - 1), of tokens (B, T)."""
    return idx[:, :-1], idx[:, 1:]


def tokens(length=64):
    """Inputs and targets, (2, length), always the same."""
    return shifted(torch.randint(0, 64, (2, length + 1), generator=torch.Generator().manual_seed(0)))


def gradient_of(model, loss):
    """Every gradient of a loss, in one vector."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def gradients(model, batch=None, n_targets=128):
    """gradient_of a step on a batch, or on fixed tokens."""
    x, y = batch or tokens()
    return gradient_of(model, model(x, y, n_targets=n_targets))


def build(choice, checkpoint_every=0, config=WIDE):
    """(model, State, optimizer), as train_fp8.py has them."""
    model = GPT(config, linear_factory(choice, Linear), checkpoint_every=checkpoint_every,
                checkpoint=fp8.checkpointer(choice))
    return model, fp8.State(model, choice), make_optimizer(model, (0.9, 0.95), 0.1)


def train(model, state, optimizer, batches, micro_steps=1, rate=1e-3):
    """Take a step for each batch (2 * micro_steps, 65), as train_fp8.py does. Return their losses."""
    losses, n_targets = [], 128 * micro_steps
    for idx in batches:
        if state.needs_calibration:
            state.calibrate(lambda: gradients(model, shifted(idx[:2]), n_targets))
            model.zero_grad()
        losses.append(0.0)
        state.weight_cache.new_step(micro_steps)
        for part in idx.chunk(micro_steps):
            x, y = shifted(part)
            loss = model(x, y, n_targets=n_targets)
            loss.backward()
            losses[-1] += loss.item()
        set_rate(optimizer, rate)
        optimizer.step()
        state.after_step()
        optimizer.zero_grad()
    return losses


def trained(choice, checkpoint_every=0, micro_steps=1):
    """The weights after three steps of AdamW."""
    model, state, optimizer = build(choice, checkpoint_every)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(0, 64, (3, 2 * micro_steps, 65), generator=generator)
    train(model, state, optimizer, batches, micro_steps)
    return torch.cat([p.detach().flatten() for p in model.weights().values()])


def extra_tensors(model):
    """Return name -> tensor of FP8's amaxes, scales and casts, which are neither parameters nor buffers."""
    return {f'{name}.{key}': tensor for name, module in model.named_modules()
            if isinstance(module, fp8.Fp8Linear) for key, tensor in vars(module).items()
            if key in fp8.TENSORS and tensor is not None}
