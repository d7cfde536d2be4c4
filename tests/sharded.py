"""What the ranks of tests/test_sharding.py check inside one process group of two."""
import contextlib
import functools
import itertools
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
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fp8gpt import checkpoint, distributed, fp8, lora, optim
from fp8gpt.fp8 import health
from fp8gpt.fp8.sharded import ShardedWeight
from configurator import SettingError
from helpers import checkpoint_of, same_bits, same_tensors
from model import GPT, GPTConfig, Linear

SMALL = GPTConfig(vocab_size=257, block_size=64, n_layer=2, n_head=4, n_embd=64, position='rope',
                  tie_embeddings=False)
ranks = distributed.init('cpu')


def built(config, travels=torch.bfloat16, source=None, mode='fsdp_full', linear=Linear):
    """A GPT in bf16, sharded; its blocks' weights travel in that dtype."""
    settings = {'sharding_mode': mode, 'seed': 5}
    run = types.SimpleNamespace(config=settings, batch_size=1, compute_dtype=travels, source=source)
    with distributed.building(settings):
        gpt = GPT(config, linear=linear, seed=None)
    assert mode == 'ddp' or all(p.is_meta for p in gpt.parameters())
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


class Traffic(TorchDispatchMode):
    """Counts what this rank's collectives bring: {name: [bytes of each]}."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        if op.namespace == 'c10d':
            tensors = [x for x in torch.utils._pytree.tree_leaves(arguments[0]) if torch.is_tensor(x)]
            self.bytes.setdefault(op.__name__.split('.')[0], []).append(sum(x.nbytes for x in tensors))
        return op(*arguments, **(options or {}))


def in_fp8(recipe, mode, frozen=False):
    """A GPT in FP8 on these ranks and its calibrated State; and step(micro_steps), which passes tokens
    forward and backward and returns the loss."""
    options = fp8.Options(backend='native', recipe=recipe, sharded=mode != 'ddp', lora_rank=4 * frozen)
    choice = fp8.choose(options, fp8.Place('cpu', tokens=256))
    gpt = built(SMALL, mode=mode, linear=fp8.linear_factory(choice, Linear))
    if frozen:
        lora.add(gpt, lora.Spec(rank=4, targets='all'))
    state = fp8.State(gpt, choice)
    model = distributed.wrap(gpt, ranks)
    idx = torch.randint(257, (4, 64), generator=torch.Generator().manual_seed(ranks.rank))

    def step(micro_steps=1):
        state.weight_cache.new_step(micro_steps)
        for _ in range(micro_steps):
            loss = model(idx, idx)
            loss.backward()
        return loss.detach()
    state.calibrate(step)
    gpt.zero_grad()
    return gpt, state, step


def casts_of(gpt, step):
    """{linear: (codes, scale_inv)} with which a step multiplies."""
    casts = {}

    def see(name, module, inputs, y):
        scale = None if module.scale is None else module.scale[fp8.WEIGHT]
        whole = module.sharded is None
        cast = module.arithmetic.quantizers.w(module.weight.detach(), scale) if whole else None
        casts[name] = cast[:2] if whole else (module.w8.clone(), module.w8_scale_inv.clone())
    with contextlib.ExitStack() as hooks:
        for name, module in fp8.fp8_linears(gpt).items():
            hook = module.register_forward_hook(functools.partial(see, name), prepend=True)
            hooks.callback(hook.remove)
        step()
    return casts


def weights_travel_in_fp8():
    """Codes and scales are those of whole weights, to the bit. A weight is a byte in each gather and two
    without FP8; one all-reduce a step brings all scales, none those of delayed scaling. A step of several
    micro-steps casts once."""
    weights = sum(p.numel() for name, p in GPT(SMALL).named_parameters() if name.startswith('h.')
                  and p.dim() == 2)
    for recipe, mode in itertools.product(['tensorwise', 'delayed'], ['fsdp_full', 'fsdp_grad_op']):
        gpt, state, step = in_fp8(recipe, mode)
        expected = casts_of(*in_fp8(recipe, 'ddp')[::2])
        found = casts_of(gpt, step)
        assert found.keys() == expected.keys() and len(found) == 8
        for name in found:
            assert all(map(same_bits, found[name], expected[name])), (recipe, mode, name)
        gpt.zero_grad()
        plain = built(SMALL, mode=mode)
        with Traffic() as without:
            for _ in range(3):
                plain(torch.zeros(1, 64, dtype=torch.long)).sum().backward()
        spied = mock.patch.object(ShardedWeight, 'cast', autospec=True, side_effect=ShardedWeight.cast)
        with Traffic() as traffic, spied as cast:
            step(3)
        passes = 3 * (2 if mode == 'fsdp_full' else 1)
        saved = sum(without.bytes['_allgather_base_']) - sum(traffic.bytes['_allgather_base_'])
        assert saved == weights * passes, (recipe, mode)
        assert traffic.bytes.get('allreduce_', []) == [4 * len(found)] * (recipe == 'tensorwise')
        assert traffic.bytes['_reduce_scatter_base_'] == without.bytes['_reduce_scatter_base_']
        assert cast.call_count == len(found)
    assert '0 of 8 weights gathered in FP8' in fp8.summary(*in_fp8_summary('rowwise'))
    assert '8 of 8 weights gathered in FP8' in fp8.summary(*in_fp8_summary('delayed'))


def in_fp8_summary(recipe):
    gpt, state, _ = in_fp8(recipe, 'fsdp_full')
    return gpt, state.choice


def weights_are_whole_where_fp8_is_not():
    """While paused a model computes what it computes without FP8; FP8's health sees weights, not codes; calls
    whose tokens are no multiple of 16 multiply what the codes stand for; new weights have new codes."""
    idx = torch.zeros(1, 64, dtype=torch.long)
    for mode in 'fsdp_full', 'fsdp_grad_op':
        plain, (gpt, state, step) = built(SMALL, mode=mode), in_fp8('tensorwise', mode)
        for _ in range(2):
            gpt.zero_grad()
            with fp8.paused():
                assert torch.equal(gpt(idx, idx), plain(idx, idx))
                loss = gpt(idx, idx)
            loss.backward()
            plain(idx, idx).backward()
            for name, p in gpt.named_parameters():
                assert torch.equal(p.grad.to_local(), plain.get_parameter(name).grad.to_local()), name
            plain.zero_grad()
            gpt(idx, idx)   # without backward, some weights stay whole
            whole = in_fp8('tensorwise', 'ddp')
            assert torch.equal(step(), whole[2]())
        rows, expected = (health.cast_health(model, of.choice, run) for model, of, run in
                          ((gpt, state, step), whole))
        assert [row for row in rows if row['tensor'] == 'weight'] == [
            row for row in expected if row['tensor'] == 'weight']
        odd = idx[:, :20]
        with pytest.warns(UserWarning, match='no multiple of 16'):
            near, far = gpt(odd, odd), plain(odd, odd)
        assert near != far and torch.allclose(near, far, rtol=1e-3)
        gpt.zero_grad()
        near.backward()
        assert all(p.grad.full_tensor().any() for p in gpt.h[0].attn.parameters() if p.dim() == 2)
        source = {'weights': GPT(SMALL, seed=6).weights()}
        with distributed.copies_take_parts():
            gpt.load_weights(source['weights'])
            whole[0].load_weights(source['weights'])
        assert torch.equal(gpt(idx, idx), whole[0](idx, idx))
        with pytest.raises(fp8.OptionError, match='cannot be undone'):
            fp8.convert(gpt, fp8.OFF)
        gpt.load_state_dict({name: p * 2 for name, p in gpt.state_dict().items()}, assign=True)
        whole[0].load_weights({name: p * 2 for name, p in whole[0].weights().items()})
        assert torch.equal(gpt(idx, idx), whole[0](idx, idx))


def frozen_weights_are_fp8_alone():
    """Beside adapters a rank keeps a byte of a weight of its shard; it computes what DDP's whole ones do, and
    while paused by the unrounded weight."""
    for mode in 'fsdp_full', 'fsdp_grad_op':
        (gpt, state, step), whole = in_fp8('tensorwise', mode, True), in_fp8('tensorwise', 'ddp', True)
        assert torch.equal(step(2), whole[2](2))
        for each in state.weight_cache.sharded:
            assert each.shard.untyped_storage().nbytes() == 4
            assert each.codes.nbytes == each.weight.numel() // 2
        theirs = whole[0].weights()
        for name, p in gpt.weights().items():
            assert torch.equal(p.grad, theirs[name].grad), name
        idx = torch.zeros(1, 64, dtype=torch.long)
        with fp8.paused(), torch.no_grad():
            assert torch.equal(gpt(idx, idx), whole[0](idx, idx))
        assert torch.equal(step(), whole[2]())


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


for check in (memory, first_weights, travel, sharded_when, weights_travel_in_fp8,
              weights_are_whole_where_fp8_is_not, frozen_weights_are_fp8_alone, blocks, skip, saved,
              saved_slowly):
    check()
if ranks.main:
    print('checked', flush=True)
distributed.leave()
