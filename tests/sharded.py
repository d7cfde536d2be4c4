"""What the ranks of tests/test_sharding.py check inside one process group of two."""
import contextlib
import os
import pathlib
import resource
import sys
import time
import types
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict)

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fp8gpt import checkpoint, distributed, optim
from configurator import SettingError
from helpers import checkpoint_of, same_tensors
from model import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=257, block_size=64, n_layer=2, n_head=4, n_embd=64, position='rope',
                  tie_embeddings=False)
ranks = distributed.init('cpu')


def built(config, travels=torch.bfloat16, source=None, mode='fsdp_full'):
    """A GPT in bf16, sharded; its blocks' weights travel in that dtype."""
    settings = {'sharding_mode': mode, 'seed': 5}
    run = types.SimpleNamespace(config=settings, batch_size=1, compute_dtype=travels, source=source)
    with distributed.building(settings):
        gpt = GPT(config, seed=None)
    assert all(p.is_meta for p in gpt.parameters())
    distributed.place(gpt, run, ranks)
    return gpt


def first_weights():
    """Of a seed and of a source they are those of a model in one piece."""
    piece = GPT(SMALL, seed=5)
    other = {'weights': GPT(SMALL, seed=6).weights()}
    for gpt, expected in ((built(SMALL), piece.weights()), (built(SMALL, source=other), other['weights'])):
        for name, p in gpt.named_parameters():
            assert p.to_local().numel() * 2 == p.numel()
            assert torch.equal(p.full_tensor(), expected[name]), name
        assert torch.equal(gpt.rope_cos, piece.rope_cos)


def travel():
    """Cast before they travel or after, weights give the same loss and gradients, bit for bit."""
    idx = torch.randint(257, (4, 64), generator=torch.Generator().manual_seed(ranks.rank))
    found, seen = [], []
    for travels in (torch.bfloat16, torch.float32):
        gpt = built(SMALL, travels)
        block = gpt.h[0]
        block.mlp.up.register_forward_hook(
            lambda module, inputs, y: seen.append((module.weight.dtype, block.ln_1.weight.dtype)))
        loss = gpt(idx, idx)
        loss.backward()
        found.append([loss.detach(), *(p.grad.full_tensor() for p in gpt.parameters())])
    assert seen == [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
    assert all(map(torch.equal, *found))


def sharded_when():
    """Between forward and backward a block's linears are shards again in fsdp_full, and whole in
    fsdp_grad_op; behind a step, and behind a pass without gradients, all are shards: a checkpoint gathers
    them."""
    idx = torch.zeros(1, 64, dtype=torch.long)
    for mode, again in (('fsdp_full', True), ('fsdp_grad_op', False)):
        gpt = built(SMALL, mode=mode)
        with torch.no_grad():
            gpt(idx)
        assert all(map(distributed.is_sharded, gpt.parameters()))
        loss = gpt(idx, idx)
        assert distributed.is_sharded(gpt.h[0].mlp.up.weight) == again, mode
        loss.backward()
        assert all(map(distributed.is_sharded, gpt.parameters()))


def blocks():
    """Of 8-bit moments a shard has whole blocks, or is refused; Muon takes no shards."""
    narrow = GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=4, n_embd=16)
    optim.make_optimizer(built(SMALL), (0.9, 0.95), 0.1, 'adamw8bit')
    for config, kind in (narrow, 'adamw8bit'), (SMALL, 'muon'):
        with pytest.raises(SettingError, match='--optimizer=adamw'):
            optim.make_optimizer(built(config), (0.9, 0.95), 0.1, kind)


def skip():
    """A gradient that is not finite on one rank is a step that all of them skip."""
    gpt = built(SMALL)
    optimizer, skips = optim.make_optimizer(gpt, (0.9, 0.95), 0.1), torch.zeros(3)
    optim.set_rate(optimizer, 1e-3)
    before = {name: p.full_tensor() for name, p in gpt.named_parameters()}
    idx = torch.zeros(1, 64, dtype=torch.long)
    (gpt(idx, idx) * (torch.inf if ranks.rank else 1)).backward()
    norm = distributed.whole(torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0))
    optim.step_if_finite(optimizer, norm, skips)
    assert skips.tolist() == [1, 1, 1]
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in gpt.named_parameters())


def saved():
    """A checkpoint holds what torch gathers, under the same names, and each rank takes its rows of it, which
    are not of one number."""
    odd, optimizers = GPTConfig(vocab_size=257, block_size=64, n_layer=1, n_head=1, n_embd=33), []
    for mode in ('fsdp_full', 'fsdp_grad_op'):
        gpt, idx = built(odd, mode=mode), torch.zeros(1, 64, dtype=torch.long)
        optimizer = optim.make_optimizer(gpt, (0.9, 0.95), 0.1)
        optimizers.append((optimizer, gpt))
    gpt(idx, idx).backward()
    optimizer.step()
    new, moments = (optim.named_state(*each) for each in optimizers)
    checkpoint.save(sys.argv[1], checkpoint_of(gpt, 7, optimizer=moments), keep=0)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    theirs = get_model_state_dict(gpt, options=options)
    their_moments = get_optimizer_state_dict(gpt, optimizer, options=options)
    if ranks.main:
        assert sorted(os.listdir(sys.argv[1])) == ['latest.pt', 'step_000007.pt']
        found = checkpoint.read(sys.argv[1])
        assert same_tensors(found['weights'], {name: theirs[name] for name in gpt.weights()})
        assert same_tensors(found['optimizer'], their_moments['state'])
    torch.distributed.barrier()
    checkpoint.load_moments(new, checkpoint.read(sys.argv[1])['optimizer'])
    for name, kept in moments.items():
        for key, tensor in kept.items():
            assert torch.equal(distributed.part(new[name][key]), distributed.part(tensor)), (name, key)


def saved_slowly():
    """All ranks wait until rank 0 has written a checkpoint: else NCCL ends the run in the next step, after 10
    minutes. They do not wait for one that cannot be written."""
    gpt = GPT(SMALL)

    def write(*arguments, real=torch.save):
        time.sleep(1)
        real(*arguments)
    for step, writes in (8, write), (9, mock.Mock(side_effect=OSError(28, 'No space left on device'))):
        path = f'{sys.argv[1]}/step_{step:06d}.pt'
        with mock.patch('torch.save', writes), contextlib.suppress(OSError):
            checkpoint.save(sys.argv[1], checkpoint_of(gpt, step), keep=0)
            assert os.path.exists(path) == (step == 8)
            assert step == 8 or not ranks.main
        torch.distributed.barrier()


def memory():
    """Bytes that building takes at most, as a share of the whole model's."""
    built(SMALL)  # what torch takes once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gpt = built(GPTConfig(vocab_size=1024, block_size=64, n_layer=12, n_head=4, n_embd=512))
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    share = taken / sum(4 * p.numel() for p in gpt.parameters())
    assert share < 0.75, f'{share:.2f} of the model'


for check in (memory, first_weights, travel, sharded_when, blocks, skip, saved, saved_slowly):
    check()
if ranks.main:
    print('checked', flush=True)
distributed.leave()
