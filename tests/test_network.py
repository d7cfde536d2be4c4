"""What travels between GPUs, by hand: bytes, hops, and what hides them."""
import dataclasses
import re

import pytest

import lora
import plan
from conftest import ROOT
from model import PRESETS
from planning import memory, network
from planning.memory import Shape
from gpus import find_gpu

pytestmark = pytest.mark.slow
LLAMA = dataclasses.replace(PRESETS['llama-3.1-8b'], block_size=8192)
BLOCK = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336      # q and o, k and v, the MLP
REST = 2 * 128_256 * 4096 + 65 * 4096                              # embeddings and head; norms


def shaped(sharding='fsdp_full', gpus=8, **fields):
    return Shape(LLAMA, 1, gpus=gpus, gpu=find_gpu('h100'), sharding=sharding,
                 checkpoint_every=1, loss_chunks=8, **fields)


def run_plan(capsys, *words):
    plan.main(list(words))
    return capsys.readouterr().out


@pytest.mark.parametrize('sharding, gathers', [('fsdp_full', 2), ('fsdp_grad_op', 1)])
def test_bytes_that_fsdp_sends(sharding, gathers):
    sent = network.travels(shaped(sharding, micro_steps=3))
    assert sent['gathers of weights'] == pytest.approx(3 * 7 / 8 * (gathers * 2 * 32 * BLOCK + 4 * REST))
    assert sent['sums of gradients'] == pytest.approx(3 * 7 / 8 * 4 * (32 * BLOCK + REST))


def test_bytes_that_ddp_sends():
    sent = network.travels(shaped('ddp', gpus=16, micro_steps=3))
    assert sent == {'all-reduces of gradients': pytest.approx(2 * 15 / 16 * 4 * (32 * BLOCK + REST))}


def test_one_gpu_sends_nothing():
    for sharding in 'ddp', 'fsdp_full':
        assert set(network.travels(shaped(sharding, gpus=1)).values()) == {0}
        assert network.not_hidden(shaped(sharding, gpus=1), 0.0, 0.0) == 0


def test_the_slower_of_link_and_network_decides():
    assert network.bandwidth(shaped(gpus=8)) == 0.8 * 450e9
    assert network.bandwidth(shaped(gpus=16)) == 0.8 * 400e9            # eight cards of 400 Gb/s
    assert network.bandwidth(shaped(gpus=16, network=12.5)) == 0.8 * 100e9
    assert network.bandwidth(shaped(gpus=16, network=100.0)) == 0.8 * 450e9
    assert network.bandwidth(shaped(gpus=2, gpus_per_node=1)) == 0.8 * 50e9


def test_hops_of_a_ring():
    """512 GPUs in 64 nodes: 63 hops of 511 go to another node."""
    small = network.seconds(shaped(gpus=512), 1)
    assert small == pytest.approx(8.4e-6 + 63 * 14e-6 + 448 * 3.4e-6, rel=1e-3)
    large = network.seconds(shaped(gpus=512), 1e9)
    assert large - small == pytest.approx(511 / 512 * 1e9 / 320e9, rel=1e-6)


def test_computing_hides_what_travels():
    shape = shaped(micro_steps=2)
    ends = network.not_hidden(shape, 10.0, 10.0)
    naked = network.not_hidden(shape, 0.0, 0.0)
    block, rest = network.groups(shape)
    one = 2 * network.seconds(shape, block.weights) + network.seconds(shape, block.gradients)
    once = one + network.seconds(shape, rest.weights) + network.seconds(shape, rest.gradients)
    assert ends == pytest.approx(2 * once)
    assert naked == pytest.approx(2 * (once + 31 * one))
    half = network.not_hidden(shape, 10.0, 5 * network.seconds(shape, block.gradients))
    assert ends < half < naked


def test_shards_of_memory():
    whole, eighth = memory.memory(shaped('ddp'), 'bf16'), memory.memory(shaped('fsdp_full'), 'bf16')
    for name in 'fp32 weights', 'fp32 gradients', 'fp32 AdamW moments':
        assert eighth[name] == whole[name] // 8
    for name in memory.ACTIVATIONS, memory.INPUTS, memory.LOGITS:
        assert eighth[name] == whole[name]
    assert memory.GATHERED not in whole
    # three blocks' weights in bf16; a block's gradients in bf16 and fp32; the rest in fp32, twice
    assert eighth[memory.GATHERED] == 3 * 2 * BLOCK + 6 * BLOCK + 2 * 4 * REST
    kept = memory.memory(shaped('fsdp_grad_op'), 'bf16')[memory.GATHERED]
    assert kept - eighth[memory.GATHERED] == 2 * 30 * BLOCK


def test_8b_fits_eight_h100s_when_sharded():
    assert not memory.fits(shaped('ddp'), 'fp8')
    assert memory.fits(shaped('fsdp_full'), 'fp8')


def test_a_line_for_each_number_of_gpus(capsys):
    words = '--gpu=h100', '--init_from=gpt2', '--total_batch_size=524288', '--batch_size=8', '--max_steps=100'
    said = run_plan(capsys, *words, '--gpus=1,8,64', '--usd_per_gpu_hour=2').splitlines()
    rows = [line.split() for line in said[5:8]]
    assert [row[0] for row in rows] == ['1', '8', '64']
    assert [row[1] for row in rows] == ['64', '8', '1']
    assert {row[2] for row in rows} == {'524,288'}
    alone = run_plan(capsys, *words, '--gpus=8', '--usd_per_gpu_hour=2')
    speed, = (line.split()[-1] for line in alone.splitlines() if line.startswith('  tokens/s, all GPUs'))
    assert rows[1][6] == speed


def test_the_table_of_the_docs_is_what_the_plan_prints(capsys):
    page = (ROOT / 'docs' / 'cluster.md').read_text()
    shown = re.search(r'\$ python plan.py (.*?--usd_per_gpu_hour=2.5)\n(.*?)```', page, re.S)
    command, table = shown.groups()
    said = run_plan(capsys, *command.replace('\\\n', '').split())
    assert table in said


def test_batches_that_fit_are_told_for_each_number_of_gpus(capsys):
    words = '--gpu=rtx 4090', '--init_from=gpt2', '--total_batch_size=65536', '--batch_size=0'
    said = run_plan(capsys, *words, '--max_steps=9', '--gpus=1,64').splitlines()
    assert [line.split(':')[0] for line in said[:2]] == ['batch     batch_size=0'] * 2
    assert said[4].startswith('plan      ddp in fp8, 1 to ')


def test_adapters_are_whole_on_each_gpu():
    spec = lora.Spec(rank=8)
    one, eight = (memory.memory(shaped(gpus=gpus, adapters=spec), 'bf16') for gpus in (1, 8))
    for name in 'fp32 gradients', 'fp32 AdamW moments':
        assert one[name] == eight[name] > 0
    assert eight['fp32 weights'] == one['fp32 weights'] // 8
