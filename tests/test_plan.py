"""plan.py's figures against what an H100 and others measured, arithmetic by hand, what the pages print."""
import functools
import json
import math
import re

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import bench
import model
import plan
from configurator import configure
from conftest import ROOT
from fp8gpt import pretrained
from fp8gpt.gpus import GPUS, find_gpu
from fp8gpt.run import Length
from model import GPT, GPTConfig
from test_finetune import save_llama

PAGE = (ROOT / 'docs' / 'fp8.md').read_text()
LLAMA_8B = '--init_from=llama-3.1-8b --block_size=8192 --batch_size=1 --sharding_mode='
GPT2 = 124_475_904      # parameters, the vocabulary padded


@functools.cache
def settled(words):
    """Return plan.settled of a command line."""
    return plan.settled(plan.plan_arguments(['--max_steps=9', *words.split()]).config)


def planned(words='', gpus=1, in_fp8=False, gpu='h100'):
    """Return ({precision: seconds of a step}, {part: GB}) of a command line."""
    run, on_meta = settled(words)
    length = Length.of(run.config, gpus, 0)
    parts = plan.memory(run, on_meta, gpus, in_fp8)
    return (plan.step_seconds(run, on_meta, find_gpu(gpu), length, gpus),
            {part: size / 1e9 for part, size in parts.items() if size})


@pytest.fixture
def said(capsys):
    """Return said(words): what `python plan.py words` prints."""
    def said(words):
        plan.main(words.split())
        return capsys.readouterr().out
    return said


# ------------------------------------------------------------------------------------------ what was measured

def errors_of_rows(files='*'):
    """Return {(what, file, variant, unit): predicted / measured - 1} of each row of results/gpu that has a
    variant. what: 'bf16', 'FP8', 'memory'; 'launched' of steps without CUDA graphs; 'others' of other
    backends and of torch.compile's casts, but for adapters, which have no others."""
    found = {}
    for path in sorted(ROOT.glob(f'results/gpu/{files}.json')):
        made = json.loads(path.read_text())
        for row in made.get('rows', []):
            if 'variant' not in row:
                continue
            name, file = row['variant'].removesuffix('-launched'), path.stem.removesuffix('_launched')
            what = 'bf16' if name == 'bf16' else 'FP8'
            recipe = 'delayed' if name.endswith('delayed') else 'auto'
            words = [*made['words'], f'--fp8_recipe={recipe}', *['--fp8_head'] * (name == 'head')]
            seconds, parts = planned(' '.join(words), in_fp8=what == 'FP8')
            others = name in ('te', 'te-delayed', 'torchao') or name == 'inductor' and file != 'lora_8b'
            launched = (path.stem, row['variant']) != (file, name)
            key = others and 'others' or launched and 'launched' or what
            found[key, path.stem, row['variant'], 's'] = 1e3 * seconds[what] / row['ms'] - 1
            if 'GB' in row:
                key = 'others' if others else 'memory'
                found[key, path.stem, row['variant'], 'GB'] = sum(parts.values()) / row['GB'] - 1
    return found


def worst(found, *kinds):
    """Return the largest error of each kind in percent, rounded up to a tenth."""
    return [math.ceil(1000 * max(abs(error) for (kind, *_), error in found.items() if kind == each)) / 10
            for each in kinds]


def test_errors_against_each_row_of_results_are_those_on_the_page(monkeypatch):
    """The rates are these rows' own, so each width is also predicted from the others' rows. They were
    measured when a logit's gradient had a place of its own."""
    monkeypatch.setattr(plan, 'LONGEST_ROW', 0)
    found = errors_of_rows()
    kinds = 'bf16', 'FP8', 'memory', 'launched', 'others'
    assert [sum(kind == each for kind, *_ in found) for each in kinds] == [7, 7, 21, 9, 10]
    left_out = {}
    for name, width in ('124m', 768), ('350m', 1024), ('1.5b', 1600), ('lora_8b', 4096):
        for table in 'MFU', 'GAINS':
            rows = [row for row in zip(*getattr(plan, table)) if row[0] != width]
            monkeypatch.setattr(plan, table, tuple(zip(*rows)))
        monkeypatch.setattr(plan, 'LEAST', 0)
        monkeypatch.setattr(plan, 'LONGEST_ROW', 0)
        left_out |= errors_of_rows(f'{name}*')
        monkeypatch.undo()
    shown = re.search(r'within ([\d.]+)% in bf16, ([\d.]+)% in FP8, memory within ([\d.]+)%.*?'
                      r'left out, .*? ([\d.]+)% in bf16, ([\d.]+)% in FP8.*?graphs, by up to ([\d.]+)%.*?'
                      r'by up to ([\d.]+)%', ' '.join(PAGE.split())).groups()
    bf16, in_fp8, memory, launched, others = worst(found, *kinds)
    assert [*map(float, shown)] == [bf16, in_fp8, memory, *worst(left_out, 'bf16', 'FP8'), launched, others]


# Settings of their width; gains of nanochat (dev/LOG.md), of llmq (README, in two digits), of torchtitan on
# eight H100s
OTHERS = [
    ('--init_from=gpt2 --n_layer=26 --n_head=13 --n_embd=1664', 1.17),
    ('--init_from=qwen2.5-0.5b', 155 / 144),
    ('--init_from=qwen2.5-1.5b', 68 / 58),
    ('--init_from=qwen2.5-3b', 39 / 30),
    ('--init_from=qwen2.5-7b', 18 / 14),
    ('--init_from=llama-3.1-8b', 1.25),
]


def test_gains_are_near_those_that_others_measured():
    ratios = []
    for words, measured in OTHERS:
        seconds, _ = planned(words)
        ratios.append(100 * (seconds['bf16'] / seconds['FP8'] / measured - 1))
    shown = re.search(r"others' gains (.*?) at ([\d.]+)% less to ([\d.]+)% more", ' '.join(PAGE.split()))
    assert [f'{-min(ratios):.1f}', f'{max(ratios):.1f}'] == [*shown.groups()[1:]]
    assert re.findall(r'x([\d.]+)', shown[1]) == [f'{measured:.2f}' for _, measured in OTHERS]


@pytest.mark.slow
def test_what_is_kept_of_a_block_is_what_autograd_keeps_of_a_compiled_one(monkeypatch):
    """Of GPT-2, Llama, Qwen2 and Qwen3."""
    monkeypatch.setattr(model, 'NO_BF16_UNITS', False)
    wrong = []
    llama = {'mlp': 'swiglu', 'norm': 'rmsnorm', 'position': 'rope', 'bias': False, 'n_kv_head': 2}
    for options in {}, llama, llama | {'qkv_bias': True}, llama | {'qk_norm': True, 'head_dim': 64}:
        config = GPTConfig(**{'vocab_size': 500, 'block_size': 64, 'n_layer': 2, 'n_head': 4, 'n_embd': 128}
                           | options)
        gpt, kept = GPT(config), {}
        ours = {tensor.untyped_storage().data_ptr() for tensor in (*gpt.parameters(), *gpt.buffers())}
        x = torch.randn(64, 64, 128, dtype=torch.bfloat16, requires_grad=True)
        rope = (gpt.rope_cos, gpt.rope_sin) if options else None
        block = torch.compile(gpt.h[0], backend='aot_eager_decomp_partition')

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, x.detach().requires_grad_(), rope, None, None)
        found = sum(kept[address].untyped_storage().nbytes() for address in kept.keys() - ours) / 64**2
        counted = plan.kept_bytes(config, in_fp8=False)
        wrong += [(options, counted, found)] * (abs(counted / found - 1) > 0.05)
    assert wrong == []


# --------------------------------------------------------------------------------------------------- by hand

def test_time_by_hand():
    """Of GPT-2 at 1,024 tokens, 854M FLOPs a token, on one GPU and on eight."""
    flops = 6 * (GPT2 - 47 * 768 - 1024 * 768 - 12 * 13 * 768 - 2 * 768) + 12 * 12 * 768 * 1024
    start = '--init_from=gpt2 --batch_size=32'
    seconds, _ = planned(start)
    alone = 32_768 * flops / (0.447 * 989e12)
    assert seconds == pytest.approx({'bf16': alone, 'FP8': alone / 1.08}, rel=1e-3)
    delayed, _ = planned(f'{start} --fp8_recipe=auto:delayed')
    assert delayed['FP8'] == pytest.approx(alone / 1.08 / 1.09, rel=1e-3)
    for gpu, rate in ('h100', 400e9), ('l4', 32e9):     # by the network between nodes, or PCIe
        one, eight = (planned(start, gpus, gpu=gpu)[0]['bf16'] for gpus in (1, 8))
        assert eight - one == pytest.approx(2 * GPT2 * 7 / 8 / rate)
    again = planned(f'{start} --grad_checkpointing=full')[0]['bf16'] / alone
    assert again == pytest.approx(1 + (flops / 3 - 2 * 768 * 50_257) / flops, rel=1e-3)
    low, plain = (planned(f'{start} --optimizer={name}')[0]['bf16'] for name in ('adamw8bit', 'adamw'))
    assert low - plain == pytest.approx(26e-12 * GPT2)
    # of shards a rank updates its own; FP8 halves what travels, and nothing else
    sharded = f'{start} --sharding_mode=fsdp_full --optimizer=adamw8bit'
    seconds, sent = planned(sharded, 8)[0], 2 * GPT2 * 7 / 8 / 400e9
    assert seconds['bf16'] - alone == pytest.approx(26e-12 * GPT2 / 8 + sent, rel=0.02)
    assert seconds['FP8'] - alone / 1.08 == pytest.approx(26e-12 * GPT2 / 8 + sent / 2, rel=0.02)


def test_no_gain_is_predicted_where_none_was_measured(said):
    """In other recipes, on narrow models, and without FP8's units."""
    for words, gpu in (('--fp8_recipe=rowwise', 'h100'), ('--n_embd=384 --n_head=6', 'h100'), ('', 'a100')):
        assert planned(words, gpu=gpu)[0].keys() == {'bf16'}
    assert "FP8's gain is not measured in this recipe or width" in said('--max_steps=9 --fp8_recipe=mxfp8')
    assert 'A100 80GB has no FP8 that runs here' in said('--max_steps=9 --gpu=a100')


def test_memory_by_hand():
    M, C, matrices = 32_768, 768, 12 * 12 * 768**2
    start = '--init_from=gpt2 --batch_size=32 '

    def GB(words='', gpus=1, in_fp8=False):
        return {part: size * 1e9 for part, size in planned(start + words, gpus, in_fp8)[1].items()}
    assert GB() == pytest.approx({
        'weights': 4 * GPT2, 'gradients': 4 * GPT2, 'moments': 8 * GPT2, 'activations': 34 * M * C * 12,
        'logits, or a recomputed block': 2 * M * 50_304})
    assert GB(in_fp8=True)['activations'] == pytest.approx(28 * M * C * 12)
    logits = 'logits, or a recomputed block'
    assert GB('--fp8_head', in_fp8=True)[logits] == pytest.approx(5 * M * 50_304)
    assert GB('--loss_chunks=8')[logits] == pytest.approx(M * 50_304 / 4)
    assert GB('--vocab_size=128256')[logits] == pytest.approx(4 * M * 128_256)
    full = GB('--grad_checkpointing=full --loss_chunks=32')
    assert (full['activations'], full[logits]) == pytest.approx((2 * M * C * 12, 34 * M * C))
    assert GB('--grad_checkpointing=5')['activations'] == pytest.approx(M * C * (9 * 34 + 3 * 2))
    low = GB('--param_dtype=bf16 --optimizer=adamw8bit')
    assert low['weights'] == low['gradients'] == pytest.approx(2 * GPT2)
    assert 2 * GPT2 < low['moments'] < 2.04 * GPT2
    kept = GB('--gradient_accumulation_steps=4', in_fp8=True)
    assert kept['weights'] == pytest.approx(4 * GPT2 + 2 * matrices)
    for gpus, count, copies in (8, 1, 1), (1, 4, 1), (8, 4, 2):     # DDP's buckets beside what is added up
        found = GB(f'--gradient_accumulation_steps={count}', gpus)['gradients']
        assert found == pytest.approx(copies * 4 * GPT2)
    adapters = 4 * 8 * 12 * ((C + 3 * C) + (C + C) + 2 * (C + 4 * C))
    for in_fp8, less in (False, 0), (True, 3 * matrices):
        frozen = GB('--lora_rank=8 --lora_targets=all', in_fp8=in_fp8)
        assert frozen['weights'] == pytest.approx(4 * GPT2 + adapters - less)
        assert frozen['gradients'] == frozen['moments'] / 2 == pytest.approx(adapters)


def test_shards_of_memory():
    """An eighth of all that is spread; whole are the embedding, the head, and a few blocks or all of them."""
    whole, full, once = (planned(LLAMA_8B + mode, 8)[1] for mode in ('ddp', 'fsdp_full', 'fsdp_grad_op'))
    for name in 'weights', 'gradients', 'moments':
        assert full[name] == once[name] == whole[name] / 8
    assert full['activations'] == whole['activations'] and 'gathered from other GPUs' not in whole
    block, rest = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336, 2 * 128_256 * 4096 + 65 * 4096
    for mode, in_fp8, blocks in (('fsdp_full', False, 12), ('fsdp_grad_op', False, 8 + 2 * 32),
                                 ('fsdp_full', True, 10), ('fsdp_grad_op', True, 8 + 32)):
        made = planned(LLAMA_8B + mode, 8, in_fp8)[1]
        assert made['gathered from other GPUs'] == pytest.approx((8 * rest + blocks * block) / 1e9)
        assert made['weights'] == pytest.approx(full['weights'] + in_fp8 * 32 * block / 8 / 1e9)
    frozen = planned(LLAMA_8B + 'fsdp_full --lora_rank=8', 8, True)[1]
    assert frozen['weights'] < (4 * rest + 32 * block) / 8 / 1e9 * 1.01     # and adapters


@pytest.mark.slow
def test_memory_of_fine_tuning_is_what_its_configs_claim():
    """The models are known by name, so nothing is fetched."""
    wrong = []
    for path in sorted(ROOT.glob('config/finetune*.py')):
        pattern = r'#   (\S+) +(--batch_size=\d+) +([\d.]+) GB(?:, in FP8 ([\d.]+))?'
        claims = re.findall(pattern, path.read_text())
        assert claims
        for name, batch_size, claimed, in_fp8 in claims:
            words = f'{path} --model_name={name} {batch_size}'
            for each, claim in (False, claimed), (True, in_fp8):
                counted = sum(planned(words, in_fp8=each)[1].values())
                wrong += [(name, claim, counted)] * (bool(claim) and f'{counted:.1f}' != claim)
    assert wrong == []


# ------------------------------------------------------------------------------------------------- the report

def test_the_report_is_the_one_on_the_page(said):
    page = (ROOT / 'docs' / 'cluster.md').read_text()
    words, shown = re.search(r'\$ python plan.py (.*?)\n(.*?)```', page, re.S).groups()
    out = said(words)
    assert out.endswith(shown)
    speed, hours, dollars = re.search(r'FP8 +([\d,]+) tokens/s, ([\d.]+) hours, .*\$([\d.]+)', out).groups()
    exact = 9_999_745_024 / float(speed.replace(',', '')) / 3600
    assert float(hours) == pytest.approx(exact, abs=0.005)
    assert float(dollars) == pytest.approx(24 * exact, abs=0.01)


def test_the_hours_of_configs_are_those_on_the_page(said):
    page, wrong = (ROOT / 'docs' / 'cluster.md').read_text(), []
    ends = {'fineweb_edu_fp8.py': '20e9', 'openwebtext_adaptive.py': '9e9'}
    rows = re.findall(r'^\| (\w+\.py).*?\| \w+, \w+ \| ([\d.]+).*?\| ([\d.]+).*?\| ([\d.]+) \|$', page, re.M)
    assert len(rows) > 3
    for file, *shown in rows:
        words = f'config/{file} --gpu=h100 --num_epochs=0 --max_tokens={ends.get(file, 0)}'
        words = words.replace('--max_tokens=0', '')
        found = [re.findall(rf'^{precision} .*?([\d,.]+) hours', said(f'{words} --gpus={gpus}'), re.M)
                 for precision, gpus in (('bf16', 1), ('FP8', 1), ('FP8', 8))]
        wrong += [(file, shown, found)] * (shown != [f'{float(each):.1f}' for [each] in found])
    assert wrong == []


@pytest.mark.parametrize('words, file, wanted', [
    ('', 'finetune.py', ('adamw8bit', 'bf16', 'full', 4)),
    ('--lora_rank=8 --loss_chunks=2', 'finetune_lora.py', ('adamw', 'bf16', 'full', 2)),
    ('config/gpt2_fp8.py', '', ('adamw', 'fp32', 'none', 1))])
def test_the_words_of_a_training_line_plan_that_run(words, file, wanted, tmp_path, said):
    """Of a folder and of a name of the hub, of which nothing is fetched; bench.py's run is the same."""
    save_llama(tmp_path / 'llama')
    names = 'optimizer', 'param_dtype', 'grad_checkpointing', 'loss_chunks', 'tokenizer'
    for name in str(tmp_path / 'llama'), 'meta-llama/Llama-3.2-1B':
        line = [*words.split(), f'--init_from={name}', '--batch_size=2', '--max_steps=9', '--num_epochs=0']
        configs = [pretrained.fine_tuning('train_fp8.py', configure('train_fp8.py', line)),
                   plan.settled(plan.plan_arguments(line).config)[0].config]
        assert [tuple(map(config.get, names)) for config in configs] == 2 * [(*wanted, name)]
        out = said(' '.join(line))
        assert out.startswith(f'settings  config/{file}, as no config file is named\n') == bool(file)
    on_a_cpu = bench.compared_run([*line, f'--init_from={tmp_path}/llama', '--dtype=bf16']).config
    assert (on_a_cpu['loss_chunks'], on_a_cpu['tokenizer']) == (wanted[3], f'{tmp_path}/llama')


def test_batch_size_0_is_the_largest_that_fits(said):
    """Of the powers of two, which divide the step; the next would leave less than a tenth of the memory."""
    words = 'config/gpt2_fp8.py --max_hours=1.5'
    out = said(f'{words} --gpu=5090 --batch_size=0')
    size = int(re.search(r'micro-steps x (\d+) x 1024', out)[1])
    gpu = find_gpu('5090')
    largest, larger = (sum(planned(f'{words} --batch_size={each}', in_fp8=True)[1].values())
                       for each in (size, 2 * size))
    assert largest <= 0.9 * gpu.memory - plan.MARGIN < larger
    assert len(re.findall('tokens/s, 1.50 hours', out)) == 2


def test_what_does_not_fit_and_what_is_not_worth_it(said, monkeypatch):
    assert 'verdict   too big: a smaller --batch_size' in said('--max_steps=9 --init_from=gpt2-xl --gpu=l4')
    out = said('--max_steps=9 --gpu=h200')
    assert out.endswith('FP8 x1.08 over bf16, from gains of one H100\n') and '$' not in out  # without a price
    monkeypatch.setattr(plan, 'WORTH', 1.1)
    assert said('--max_steps=9 --gpu=h200').endswith('H100: not worth it, train in bf16 (--no_fp8)\n')


def test_without_a_dataset_the_rest_is_planned(tmp_path, said):
    out = said(f'--num_epochs=2 --data_dir={tmp_path} --gpu=h100')
    assert 'the length of an epoch is unknown: no shards in' in out
    assert re.search(r'^FP8 +[\d,]+ tokens/s$', out, re.M)


def test_a_gpu_without_a_data_sheet_is_planned_as_an_h100(monkeypatch, said):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    for name, planned_as in ('NVIDIA A10G', 'H100 SXM'), ('NVIDIA B200', 'B200'):
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_, name=name: name)
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (8, 6))
        assert f'device    1 x {planned_as},' in said('--max_steps=1')


def test_names_of_gpus():
    for _, gpu in GPUS:
        assert find_gpu(gpu.name) is gpu
    names = {
        'NVIDIA H100 80GB HBM3': 'H100 SXM', 'NVIDIA H100 PCIe': 'H100 PCIe', 'NVIDIA H200': 'H200',
        'NVIDIA A100-SXM4-40GB': 'A100 40GB', 'A100': 'A100 80GB', 'rtx4090': 'RTX 4090', 'NVIDIA L4': 'L4'}
    # those whose figures are others than those of a name that theirs holds
    names |= dict.fromkeys((
        'NVIDIA H100 NVL', 'NVIDIA GH200 480GB', 'NVIDIA GB200', 'NVIDIA H20', 'NVIDIA L40S', 'h1000',
        'NVIDIA GeForce RTX 4090 Laptop GPU', 'NVIDIA H100 80GB HBM3 MIG 1g.10gb', 'NVIDIA L4-24C'))
    assert {name: getattr(find_gpu(name), 'name', None) for name in names} == names
    assert find_gpu('H100').memory == pytest.approx(85.5, abs=0.05)     # the driver's, not the data sheet's
