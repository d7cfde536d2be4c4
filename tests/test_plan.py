"""plan.py's figures against what others measured, what autograd keeps of real models, arithmetic by hand."""
import json
import re
import types
import warnings

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import bench
import model
import plan
from configurator import SettingError, configure
from conftest import ROOT
from fp8gpt import fp8, lora, pretrained
from fp8_models import extra_tensors
from fp8gpt.gpus import GPUS, find_gpu
from fp8gpt.run import Length
from gpu.steps import VARIANTS
from helpers import peak_bytes
from model import GPT, GPTConfig, Linear
from test_finetune import save_llama

LLAMA = {'mlp': 'swiglu', 'norm': 'rmsnorm', 'position': 'rope', 'bias': False, 'n_kv_head': 2}
SMALL = {'vocab_size': 500, 'block_size': 64, 'n_layer': 2, 'n_head': 4, 'n_embd': 128}
NATIVE = fp8.Choice('native', reason='a test')
LLAMA_8B = ('--init_from=llama-3.1-8b --vocab_size=128256 --block_size=8192 --batch_size=1 '
            '--sharding_mode=fsdp_full')


def planned(words='', gpu='h200', gpus=1, network=50.0):
    """Return the Plans of a command line: all, in bf16, in FP8, and FP8's gain."""
    run = plan.settled(plan.plan_arguments(['--max_steps=9', *words.split()]).config)
    plans = plan.all_plans(run, find_gpu(gpu), Length.of(run.config, gpus, 0), gpus, network)
    bf16, in_fp8 = plans['bf16'], plans['FP8']
    return types.SimpleNamespace(plans=plans, bf16=bf16, fp8=in_fp8, gain=in_fp8.speed / bf16.speed)


# --------------------------------------------------------------------------------------- what others measured

def nanochat(depth, batch):
    """Return the settings nearest to nanochat's."""
    return (f'--init_from=llama-3.1-8b --mlp=gelu --vocab_size=32768 --block_size=2048 --n_layer={depth} '
            f'--n_head={depth // 2} --n_embd={64 * depth} --batch_size={batch} ')


def llmq(size, batch):
    """Return the settings nearest to llmq's: 16,384 sequences of 1,024 tokens a step, fused casts."""
    return (f'--init_from=qwen2.5-{size} --block_size=1024 --batch_size={batch} --total_batch_size=524288 '
            '--param_dtype=bf16 --fp8_kernels=triton')


# The row's first cell in docs/fp8.md; settings, GPU, GPUs; FP8's gain. Of nanochat's dev/LOG.md; of llmq's
# README, in two digits; of torchtitan, on H100s with 2.4 TB/s; of PyTorch on B200s
D26 = nanochat(26, 16) + '--gradient_accumulation_steps=4 --fp8_kernels=inductor'
MEASURED = [
    ('nanochat, d26', D26, 'h100', 8, 1.17),
    ('llmq, Qwen2.5 0.5B', llmq('0.5b', 32), 'h100', 1, 155 / 144),
    ('llmq, 1.5B', llmq('1.5b', 16), 'h100', 1, 68 / 58),
    ('llmq, 3B', llmq('3b', 16), 'h100', 1, 39 / 30),
    ('llmq, 7B', llmq('7b', 4), 'h100', 1, 18 / 14),
    ('torchtitan, Llama 8B', LLAMA_8B, 'h100', 8, 1.25),
    ('PyTorch, 70B, mxfp8, B200', LLAMA_8B.replace('8b', '70b') + ' --fp8_recipe=mxfp8', 'b200', 64, 1.28),
]


def test_gains_are_those_that_others_measured_and_the_page_has_them():
    """Within a tenth: their code moves other bytes than this one's blocks."""
    page, wrong = (ROOT / 'docs' / 'fp8.md').read_text(), []
    for title, words, gpu, gpus, measured in MEASURED:
        modelled = planned(words, gpu, gpus).gain
        row = re.search(rf'^\| {title} \| x(\S+) \| x(\S+) \|$', page, re.M)
        theirs, ours = map(float, row.groups())
        if not (abs(modelled / measured - 1) <= 0.1 and abs(theirs / measured - 1) < 0.005
                and abs(ours / modelled - 1) < 0.005):
            wrong.append((title, measured, modelled, row[0]))
    assert wrong == []


@pytest.mark.parametrize('name', ['124m', '1.5b'])
def test_steps_are_as_fast_as_an_h100_took_them(name):
    """Within a twentieth, and the page has both."""
    made = json.loads((ROOT / 'results' / 'gpu' / f'{name}.json').read_text())
    page, wrong = (ROOT / 'docs' / 'fp8.md').read_text(), []
    for row in (row for row in made['rows'] if not row['variant'].endswith('-launched')):
        words = [*made['words'], *VARIANTS[row['variant']]]
        found = planned(' '.join(words[:-1] if row['variant'] == 'bf16' else words), 'h100', 1)
        speed, measured = (found.bf16 if row['variant'] == 'bf16' else found.fp8).speed, row['tokens/s']
        shown = f'| {measured:,.0f} | {round(speed, -3 if measured > 1e5 else -2):,.0f} |'
        if abs(speed / measured - 1) > 0.05 or shown not in page:
            wrong.append((row['variant'], speed, shown))
    assert wrong == []


def test_attention_is_no_faster_than_others_measured():
    """FlashAttention-2 on an H100, heads of 64, 1,024 tokens: 229 TFLOP/s forward, 238 backward (Shah et al.
    2024, figures 5 and 6)."""
    seconds = planned('--init_from=gpt2 --batch_size=32', 'h100').bf16.seconds['attention']
    assert 7 * 32_768 * 1024 * 12 * 768 / seconds < 1e12 * 7 / (2 / 229 + 5 / 238)


def test_whether_a_run_fits_decides_before_its_speed():
    gpu = types.SimpleNamespace(name='H200')

    def verdict(*columns):
        plans = [types.SimpleNamespace(gpu=gpu, gpus=1, speed=speed, fits=lambda fits=room >= 0: fits)
                 for speed, room in columns]
        return plan.verdict(dict(zip(('bf16', 'FP8'), plans)))
    assert verdict((100, -1), (98, 9)).endswith('x0.98 over bf16 on 1 x H200 (modelled): bf16 does not fit, '
                                                'train in FP8')
    assert verdict((100, -1), (120, -1)).startswith('verdict   too big for 1 x H200')
    assert verdict((100, 1), (120, -1)).startswith('verdict   only bf16 fits')
    assert verdict((100, 1), (98, 1)).endswith('train in bf16 (--no_fp8)')
    assert 'predicted FP8 x1.30 ' in verdict((100, 1), (130, 1))


def test_times_by_hand():
    """Of 12 blocks of four linears: fixed shares of peak and bandwidth."""
    M, C = 32_768, 768
    bf16 = in_fp8 = kept = 0.0
    for k, n in (C, 3 * C), (C, C), (C, 4 * C), (4 * C, C):
        flops, sizes = 3 * 2 * M * k * n, M * k + k * n + M * n
        of_bf16 = flops / (0.75 * 989e12) + 3 * 2 * sizes / (2.6 * 4.8e12)
        # operands of one byte, two of a linear's three sizes in each product; results of two bytes
        of_fp8 = flops / (0.72 * 1979e12) + (2 * sizes + 2 * sizes) / (1.5 * 4.8e12)
        bf16, in_fp8, kept = bf16 + of_bf16, in_fp8 + of_fp8, kept + (of_bf16 if 4 * C in (k, n) else of_fp8)
    start = '--init_from=gpt2 --fp8_kernels=inductor --batch_size='
    made, keep, frozen, many = (planned(start + words) for words in (
        '32', '32 --fp8_keep=mlp', '32 --lora_rank=8 --lora_targets=all',
        '32 --gradient_accumulation_steps=8'))
    found = [each.seconds['linears: matmuls'] / 12 for each in (made.bf16, made.fp8, keep.fp8, frozen.bf16)]
    assert found == pytest.approx([bf16, in_fp8, kept, 2 / 3 * bf16])
    assert made.gain > keep.gain > 1
    casts = 'casts, norms, activations'     # 14 bytes a weight less, and 27 once a step
    spared = made.fp8.seconds[casts] - many.fp8.seconds[casts] / 8
    assert spared == pytest.approx(12 * 12 * C * C * (14 - 27 / 8) / (0.75 * 4.8e12))


def test_a_gpu_waits_for_the_host_where_no_graph_replays_a_micro_step():
    """Launching takes as long for any batch. DDP's micro-steps are launched where they reduce gradients, and
    those on examples always."""
    launched, large, replayed, of_two, examples = (
        planned(f'--init_from=gpt2 --gradient_accumulation_steps=4 --batch_size={words}', gpus=gpus).bf16
        for words, gpus in (('1 --no_cuda_graphs', 1), ('64 --no_cuda_graphs', 1), ('1', 1), ('1', 2),
                            ('1 --dataset=openmathinstruct2', 1)))
    waits = [made.seconds['waiting for the host'] for made in (launched, large, replayed, of_two, examples)]
    assert waits == pytest.approx([waits[0], 0, 0, waits[0] / 4, waits[0]])
    computing = sum(launched.seconds.values()) - waits[0] - launched.seconds['gradients, clipping, optimizer']
    assert waits[0] + computing == pytest.approx(4 * 12 * (23 + 14) * 37e-6)


def test_every_recipe_is_modelled():
    gains = {recipe: planned(f'--fp8_recipe={recipe} --batch_size=16', 'b200').gain for recipe in fp8.RECIPES}
    assert [recipe for recipe, gain in gains.items() if not 0.5 < gain < 2] == []
    with pytest.raises(fp8.OptionError, match='capability 10.0, which H100 SXM lacks'):
        planned('--fp8_recipe=mxfp8', 'h100')
    wished = planned('--fp8_recipe=auto:mxfp8', 'h100'), planned('--fp8_recipe=auto:mxfp8', 'b200')
    assert [made.fp8.choice.recipe for made in wished] == ['tensorwise', 'mxfp8']


def test_bytes_between_gpus_by_hand():
    block, rest = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14_336, 2 * 128_256 * 4096 + 65 * 4096
    full = planned(LLAMA_8B + ' --gradient_accumulation_steps=3', 'h100', 8).bf16
    # gathers of bf16 weights for both passes and of fp32 ones, sums of fp32 gradients
    assert full.sent == pytest.approx(3 * 7 / 8 * (2 * 2 * 32 * block + 4 * rest + 4 * (32 * block + rest)))
    ddp = planned(LLAMA_8B.replace('fsdp_full', 'ddp') + ' --gradient_accumulation_steps=3', 'h100', 8).bf16
    assert ddp.sent == pytest.approx(2 * 7 / 8 * 4 * (32 * block + rest))
    assert planned(LLAMA_8B, 'h100', 1).bf16.sent == 0
    for gpus, network, rate in (8, 50, 450e9), (16, 50, 400e9), (16, 12.5, 100e9):
        few = planned(LLAMA_8B.replace('=8192', '=64'), 'h100', gpus, network).bf16
        waits = few.seconds['waiting for other GPUs']
        others = 'waiting for the host', 'gradients, clipping, optimizer'      # these hide no message
        computing = sum(few.seconds.values()) - waits - sum(few.seconds[name] for name in others)
        assert waits == pytest.approx(few.sent / (0.8 * rate) - computing)
    slow = planned('--init_from=gpt2 --batch_size=1', '4090', 2).bf16.seconds['waiting for other GPUs']
    assert 0 < slow < 4 * 124_475_904 / (0.8 * 32e9)


# ----------------------------------------------------------------------------------------------------- memory

@pytest.mark.parametrize('compiled', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_kept_of_a_block_is_what_autograd_keeps_of_a_real_one(compiled, monkeypatch):
    """Of GPT-2, Llama, Qwen2 and Qwen3."""
    monkeypatch.setattr(model, 'NO_BF16_UNITS', False)
    wrong = []
    for choice, options in ((fp8.OFF, {}), (NATIVE, LLAMA), (NATIVE, LLAMA | {'qkv_bias': True}),
                            (NATIVE, LLAMA | {'qk_norm': True, 'head_dim': 64})):
        config, kept = GPTConfig(**SMALL | options), {}
        gpt = GPT(config, fp8.linear_factory(choice, Linear))
        ours = {tensor.untyped_storage().data_ptr() for tensor in (
            *gpt.parameters(), *gpt.buffers(), *extra_tensors(gpt).values())}
        x = torch.randn(16, 64, 128, dtype=torch.bfloat16, requires_grad=True)
        rope = (gpt.rope_cos, gpt.rope_sin) if options else None
        block = torch.compile(gpt.h[0], backend='aot_eager_decomp_partition') if compiled else gpt.h[0]

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, x.detach().requires_grad_(), rope, None, None)
        found = sum(kept[address].untyped_storage().nbytes() for address in kept.keys() - ours)
        counted = plan.kept_bytes(config, 16, choice, adapters=lora.Spec(), param_dtype=torch.float32,
                                  compiled=compiled, keeps=False)
        wrong += [(options, counted, found)] * (abs(counted / found - 1) > 0.01)
    assert wrong == []


def test_the_peak_in_eager_mode_is_what_is_allocated(monkeypatch):
    monkeypatch.setattr(model, 'NO_BF16_UNITS', False)
    shape = {'vocab_size': 4000, 'block_size': 256, 'n_layer': 1, 'n_head': 4, 'n_embd': 128}
    words, idx = ' '.join(f'--{name}={value}' for name, value in shape.items()), torch.zeros(8, 256).long()
    for chunks in 1, 8:
        parts = planned(f'{words} --batch_size=8 --loss_chunks={chunks} --compile=off').bf16.memory
        gpt = GPT(GPTConfig(**shape), loss_chunks=chunks)
        found = peak_bytes(lambda: gpt(idx, idx).backward())
        there = sum(parts[name] for name in ('weights', 'gradients', 'adamw moments'))
        assert sum(parts.values()) - there == pytest.approx(found, rel=0.1)


def test_memory_by_hand():
    P, M, C = 124_475_904, 32 * 1024, 768
    matrices = 2 * 12 * 12 * C * C      # weights cast to bf16, which no batch changes
    logits, in_fp8 = (made.memory['logits and their gradient'] for made in (
        planned('--init_from=gpt2 --batch_size=32').bf16,
        planned('--init_from=gpt2 --batch_size=32 --fp8_head').fp8))
    assert (logits, in_fp8) == (M * (4 * 50_304 + 8), M * (5 * 50_304 + 8))

    def eager(words):
        return planned(f'--init_from=gpt2 --compile=off {words}')
    plain, twice = (eager(f'--batch_size={size}').bf16.memory for size in (32, 64))
    assert (plain['weights'], plain['gradients'], plain['adamw moments']) == (4 * P, 4 * P, 8 * P)
    assert twice['activations'] - matrices == 2 * (plain['activations'] - matrices)
    full = eager('--batch_size=32 --grad_checkpointing=full').bf16.memory
    assert full['activations'] == M * (12 * 2 * C + 4 * C + 16)
    every_fifth = eager('--batch_size=32 --grad_checkpointing=5').bf16      # of 12: blocks 0, 5 and 10
    assert every_fifth.recomputed == 3
    block = plan.kept_bytes(every_fifth.config, 32, fp8.OFF, adapters=lora.Spec(), param_dtype=torch.float32,
                            compiled=False, keeps=False)
    assert plain['activations'] == 12 * block + M * (4 * C + 16)
    assert every_fifth.memory['activations'] == 9 * block + M * (3 * 2 * C + 4 * C + 16)
    low = eager('--batch_size=32 --param_dtype=bf16 --optimizer=adamw8bit').bf16.memory
    assert low['weights'] == low['gradients'] == 2 * P
    assert 2 * P < low['adamw8bit moments'] < 2.04 * P
    kept = eager('--batch_size=32 --gradient_accumulation_steps=8').fp8.memory
    assert kept['FP8 weights, cast once a step'] == matrices
    frozen = eager('--batch_size=32 --lora_rank=8 --lora_targets=all')
    adapters = 4 * 8 * 12 * ((C + 3 * C) + (C + C) + 2 * (C + 4 * C))
    assert frozen.bf16.memory['weights'] == 4 * P + adapters
    assert frozen.fp8.memory['weights'] == 4 * P + adapters - 3 * matrices // 2     # a byte is left of four
    assert frozen.fp8.memory['gradients'] == adapters
    odd = planned('--block_size=24 --batch_size=1 --compile=off')       # tokens that FP8 cannot take
    assert odd.fp8.memory == odd.bf16.memory


def test_shards_of_memory():
    whole, eighth = (planned(f'{LLAMA_8B.replace("fsdp_full", mode)} --compile=off', 'h100', 8)
                     for mode in ('ddp', 'fsdp_full'))
    for name in 'weights', 'gradients', 'adamw moments':
        assert eighth.bf16.memory[name] == whole.bf16.memory[name] // 8
    assert eighth.bf16.memory['activations'] == whole.bf16.memory['activations']
    assert not whole.fp8.fits() and whole.bf16.memory['gathered from other GPUs'] == 0


def test_ddp_keeps_buckets_beside_gradients_that_are_added_up():
    """As it does on a CPU: of several micro-steps, only the last one's gradients lie in its buckets."""
    words, P = '--init_from=gpt2 --compile=off --gradient_accumulation_steps=', 124_475_904
    found = {case: planned(f'{words}{case[0]}', gpus=case[1]).bf16.memory['gradients']
             for case in ((1, 8), (4, 1), (4, 8))}
    assert found == {(1, 8): 4 * P, (4, 1): 4 * P, (4, 8): 8 * P}
    torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)
    linear, places = torch.nn.Linear(4, 4, bias=False), []
    ddp = torch.nn.parallel.DistributedDataParallel(linear, gradient_as_bucket_view=True)
    for last in False, False, True:
        ddp.require_backward_grad_sync = last
        ddp(torch.ones(4, 4)).sum().backward()
        places.append(linear.weight.grad.data_ptr())
    del ddp     # it would drop the group last, with the GIL, for which gloo's threads may wait
    torch.distributed.destroy_process_group()
    assert places[0] == places[1] != places[2]


@pytest.mark.slow
def test_memory_of_fine_tuning_is_what_its_configs_claim():
    """The models are known by name, so nothing is fetched."""
    wrong = []
    for path in sorted(ROOT.glob('config/finetune*.py')):
        pattern = r'#   (\S+) +(--batch_size=\d+) +([\d.]+) GB(?:, in FP8 ([\d.]+))?'
        claims = re.findall(pattern, path.read_text())
        assert claims
        for name, batch_size, claimed, in_fp8 in claims:
            made = planned(f'{path} --model_name={name} {batch_size}')
            for each, claim in (made.bf16, claimed), (made.fp8, in_fp8 or claimed):
                counted = sum(each.memory.values()) / 1e9
                wrong += [(name, claim, counted)] * (abs(counted - float(claim)) > 0.06)
    assert wrong == []


# ------------------------------------------------------------------------------------------------- the report

@pytest.fixture
def said(capsys):
    """Return said(words): what `python plan.py words` prints."""
    def said(words):
        plan.main(words.split())
        return capsys.readouterr().out
    return said


def test_the_report_of_gpt2_on_eight_gpus(said):
    out = said('config/gpt2_fp8.py --gpu=h200 --gpus=8 --usd_per_gpu_hour=3 --compile=off')
    for line in ('batch     32 x 1024 tokens x 2 micro-steps x 8 ranks = 524,288 tokens a step',
                 'run       19,073 steps = 9,999,745,024 tokens, ended by max_steps=19073',
                 'device    H200: 989 TFLOP/s in bf16, 1,979 in FP8'):
        assert line in out
    rows = {row[1].strip(): row[2].split() for row in re.finditer(r'^  (\S.{33})(.{24})$', out, re.M)}
    for speed, dollars in zip(rows['tokens/s, all GPUs'], rows['the run, USD at 3 an hour']):
        hours = 9_999_745_024 / float(speed.replace(',', '')) / 3600
        assert float(dollars) == pytest.approx(24 * hours, abs=0.006)
    assert rows['in 150.8 GB less 2'] == ['fits'] * 2
    assert re.search(r'verdict   predicted FP8 x1\.\d\d over bf16 on 8 x H200', out)
    page = (ROOT / 'docs' / 'cluster.md').read_text()       # its columns are of several nodes
    shown = re.search(r'\$ python plan.py (.*?--usd_per_gpu_hour=2.5)\n(.*?)```', page, re.S)
    out = said(shown[1].replace('\\\n', ''))
    assert [line for line in shown[2].splitlines() if line not in out] == []


def test_columns_of_millions_of_dollars_stand_apart(capsys):
    plan.print_row('the run, USD', [7_275_873.16, 7_254_949.86], ',.2f')
    assert capsys.readouterr().out.split()[3:] == ['7,275,873.16', '7,254,949.86']


def test_no_column_of_a_short_run_has_0_million_tokens(said):
    out = said('config/quickstart.py --gpu=h100 --gpus=1,16')
    assert re.search(r'the run, tokens +1,024,000 +16,384,000\n', out)


@pytest.mark.parametrize('words, file, wanted', [
    ('', 'finetune.py', ('adamw8bit', 'bf16', 'full', 4)),
    ('--lora_rank=8 --loss_chunks=2', 'finetune_lora.py', ('adamw', 'bf16', 'full', 2)),
    ('config/gpt2_fp8.py', '', ('adamw', 'fp32', 'none', 1))])
def test_the_words_of_a_training_line_plan_that_run(words, file, wanted, tmp_path, said):
    """Of a folder and of a name of the hub, of which nothing is fetched; bench.py's run is the same."""
    save_llama(tmp_path / 'llama')
    names = 'optimizer', 'param_dtype', 'grad_checkpointing', 'loss_chunks', 'tokenizer'
    for name in str(tmp_path / 'llama'), 'meta-llama/Llama-3.2-1B':
        line = [*words.split(), f'--init_from={name}', '--batch_size=2', '--max_steps=9', '--compile=off']
        configs = [pretrained.fine_tuning('train_fp8.py', configure('train_fp8.py', line)),
                   plan.settled(plan.plan_arguments(line).config).config]
        assert [tuple(map(config.get, names)) for config in configs] == 2 * [(*wanted, name)]
        out = said(' '.join(line))
        assert out.startswith(f'settings  config/{file}, as no config file is named\n') == bool(file)
        assert re.search(r'the run, seconds +\d+\.\d+[\s\S]*the run, tokens +(18,432|4,718,592)', out)
    on_a_cpu = bench.compared_run([*line, f'--init_from={tmp_path}/llama', '--dtype=bf16']).config
    assert (on_a_cpu['loss_chunks'], on_a_cpu['tokenizer']) == (wanted[3], f'{tmp_path}/llama')


def test_batch_size_0_is_the_largest_that_fits(said):
    """Of the powers of two, which divide the step; 32 would leave less than a tenth of this GPU's memory."""
    words = 'config/gpt2_fp8.py --compile=off --max_hours=1.5'
    out = said(f'{words} --gpu=5090 --batch_size=0')
    size = int(re.search(r'batch_size=0: (\d+) is the largest up to 128', out)[1])
    largest, larger = (planned(f'{words} --batch_size={each}', '5090').fp8 for each in (size, 2 * size))
    assert largest.fits(0.1) and larger.fits() and not larger.fits(0.1)
    assert float(re.search(r'the run, hours +([\d.]+)', out)[1]) == 1.5


def test_without_fp8_units_or_a_dataset(tmp_path, said):
    out = said(f'--num_epochs=2 --data_dir={tmp_path} --gpu=a100 --usd_per_gpu_hour=2 --compile=off')
    assert 'length unknown: no shards in' in out and 'the run, hours' not in out
    assert 'A100 80GB has no FP8 that runs here' in out


def test_torch_has_nothing_to_warn_of():
    """It does once a process, of the addresses of weights that are cast once a step."""
    plan.kept_bytes.cache_clear()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert planned('--gradient_accumulation_steps=4').fp8.memory['activations']
    finally:
        torch.set_warn_always(False)


def test_a_gpu_without_a_data_sheet_is_named(monkeypatch, said):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *_: 'NVIDIA A10G')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda *_: (8, 6))
    monkeypatch.setattr(plan, 'kept_bytes', lambda *_, **options: 0)     # which asks torch for CUDA
    for flag, named in ('', True), ('--gpu=h100', False):
        assert ('no data sheet of NVIDIA A10G, which is here' in said(f'--max_steps=1 {flag}')) == named


def test_what_no_row_describes_is_refused(monkeypatch):
    """Of a recipe or an optimizer that the training scripts have and plan.py has not."""
    monkeypatch.delitem(plan.BLOCK_KERNELS, 'rowwise')
    monkeypatch.delitem(plan.OPTIMIZER_FLOPS, 'muon')
    for setting in 'fp8_recipe=rowwise', 'optimizer=muon':
        with pytest.raises(SettingError, match=f'^plan.py does not model {setting}, only [^\n]+$'):
            planned(f'--{setting}')


def test_names_of_gpus():
    for _, gpu in GPUS:
        assert find_gpu(gpu.name) is gpu
    names = {
        'NVIDIA H100 80GB HBM3': 'H100 SXM', 'NVIDIA H100 PCIe': 'H100 PCIe', 'NVIDIA GH200 480GB': 'GH200',
        'NVIDIA A100-SXM4-40GB': 'A100 40GB', 'A100': 'A100 80GB', 'rtx4090': 'RTX 4090', 'NVIDIA L4': 'L4',
        'NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition': 'RTX PRO 6000 Max-Q', 'NVIDIA GB300': None,
        'NVIDIA H20-3e': None, 'NVIDIA GeForce RTX 5090 D': None, 'Quadro RTX 6000': None, 'Tesla T4': None,
        'NVIDIA GeForce RTX 4090 Laptop GPU': None, 'h1000': None, 'NVIDIA H100 80GB HBM3 MIG 1g.10gb': None,
        'GRID A100-10C': None, 'NVIDIA H100XM-20C': None, 'NVIDIA L40S-12Q': None, 'NVIDIA L4-24C': None}
    assert {name: getattr(find_gpu(name), 'name', None) for name in names} == names
    assert find_gpu('H100').memory == pytest.approx(85.5, abs=0.05)     # the driver's, not the data sheet's
