"""What a configuration needs and what FP8 buys it, before a GPU is rented: memory, time, money. No GPU, data or weights needed.

$ python plan.py config/gpt2_fp8.py --gpu=h200 --gpus=8 --usd_per_gpu_hour=3    # the price is yours; without it, GPU-hours
$ python plan.py config/h100_350m_fp8.py --batch_size=0                         # the largest micro-batch that is modelled to fit
$ python plan.py --init_from=gpt2-xl --batch_size=16 --max_tokens=3e10 --gpu=b200

Every word but --gpu, --gpus and --usd_per_gpu_hour is a setting of train_fp8.py. All of this is modelled, not measured:

Memory is counted at its peak, where backward starts. Persistent, 16 bytes a parameter: weights, gradients and AdamW's two moments
in fp32. For backward, model.py's tensors one by one (`saved`): what each norm, attention, activation and linear keeps. In
eager mode a norm keeps its input in fp32 and the loss keeps log-probabilities in fp32 and takes two more such tensors in backward
(12 bytes a logit). Under torch.compile a norm keeps bf16, SwiGLU recomputes silu(gate), and the loss keeps bf16 logits and
writes a bf16 gradient (4 bytes). A bf16 linear keeps its input and a bf16 copy of its weight. (proj's input is attention's
output, but for RoPE, whose queries, and so attention's output, lie head by head: a copy.) An FP8 linear keeps both in FP8,
transposed, of which a compiler may yet recompute some. A checkpointed block keeps its bf16 input; one block at a time is
recomputed.

Time is a roofline, one micro-step after the other, with torch.compile's fusion. A matrix multiplication takes its FLOPs at GEMM
of the dense peak plus its operands' and result's bytes at BANDWIDTH of the memory's: adding the two, not overlapping them,
is what makes a small K, M or N lose, as K / (K + K0) for a K0 of 175 (bf16, H200) to 500 (FP8, H100). Attention: 2 + 5
multiplications over the causal half, in bf16 in either column. The rest is traffic: see `elementwise`, `cast_bytes` and
`step_seconds`. DDP's all-reduce of fp32 gradients runs beside the last micro-step's backward; what is left over counts. No data
loading, evaluation or saving.
"""
import argparse
import collections
import dataclasses
import os
import re
import sys

import torch

import checkpoint
import data
import fp8
import optim
import runlog
from configurator import MachineError, SettingError, configure, one_line_errors
from model import PRESETS, GPTConfig, checkpoint_every, make_config
from quantize import TABLE
from tokenizer import get_tokenizer

Gpu = collections.namedtuple('Gpu', 'name bf16 fp8 bandwidth memory link')
# NVIDIA's data sheets: dense TFLOP/s in bf16 and FP8 (None: no FP8 units), memory in TB/s and GB, and GB/s to other GPUs, both directions
# together (NVLink; PCIe for the last two). The first pattern found in a lower-case name decides.
GPUS = [(re.compile(r'(?<![a-z0-9])' + pattern), Gpu(*row)) for pattern, *row in (
    ('gh200', 'GH200', 989, 1979, 4.0, 96, 900),
    ('h200.*nvl', 'H200 NVL', 835, 1671, 4.8, 141, 900),
    ('h200', 'H200', 989, 1979, 4.8, 141, 900),
    ('h100.*pcie', 'H100 PCIe', 756, 1513, 2.0, 80, 600),
    ('h100.*nvl', 'H100 NVL', 835, 1671, 3.9, 94, 600),
    ('h100', 'H100 SXM', 989, 1979, 3.35, 80, 900),
    ('h800', 'H800', 989, 1979, 3.35, 80, 400),
    ('b200', 'B200', 2250, 4500, 8.0, 180, 1800),
    ('a100.*40', 'A100 40GB', 312, None, 1.555, 40, 600),
    ('a100', 'A100 80GB', 312, None, 2.039, 80, 600),
    ('l40s', 'L40S', 362, 733, 0.864, 48, 64),
    ('(rtx)?4090(?!.*laptop)', 'RTX 4090', 165, 330, 1.008, 24, 64))]
GEMM, BANDWIDTH = 0.78, 0.92    # attained on an H100 with large inputs: torchao 0.18, testing/training/roofline_utils.py
LAUNCH = 2e-6                   # seconds, the least that a kernel takes: the same file
ATTENTION = 0.35                # of the bf16 peak: FlashAttention-2 on an H100 (Shah et al. 2024)
MARGIN = 2.0                    # GB, our allowance for the CUDA context, libraries' workspaces, buffers and the allocator's gaps


def find_gpu(name):
    """The row of a GPU's name, as a device or a user writes it; None where there is none."""
    return next((gpu for pattern, gpu in GPUS if pattern.search(re.sub('[-_ ]+', ' ', name.lower()))), None)


def gpu_of(device):
    """The row of a torch.device; None where it is not in the table."""
    return find_gpu(torch.cuda.get_device_name(device)) if device.type == 'cuda' else None


def peak_flops(gpu, precision):
    """FLOP/s of a row in 'bf16' or 'fp8'; None where there is none."""
    tera = gpu and {'bf16': gpu.bf16, 'fp8': gpu.fp8}.get(precision)
    return tera * 1e12 if tera else None


# -------------------------------------------------------------------------------------- the model, by formula

def linears(config):
    """[(name, in_features, out_features)] as GPT asks its factory for them."""
    C, F = config.n_embd, config.ffn_dim
    block = [('attn.qkv', C, (config.n_head + 2 * config.n_kv_head) * config.head_dim), ('attn.proj', C, C),
             ('mlp.gate_up', C, 2 * F) if config.mlp == 'swiglu' else ('mlp.up', C, F), ('mlp.down', F, C)]
    return [(f'h.{i}.{name}', k, n) for i in range(config.n_layer) for name, k, n in block] + [('lm_head', C, config.padded_vocab_size)]


def parameters(config):
    """kind -> number of parameters, the vocabulary's padding included."""
    C, V = config.n_embd, config.padded_vocab_size
    kinds = {'embeddings': V * C + (config.position == 'learned') * config.block_size * C, 'attention': 0, 'MLP': 0,
             'norms': (2 * config.n_layer + 1) * C * (1 + (config.bias and config.norm == 'layernorm')),
             'head': 0 if config.tie_embeddings else V * C}
    for name, k, n in linears(config)[:-1]:
        kinds['attention' if '.attn.' in name else 'MLP'] += k * n + config.bias * n
    return kinds


def flops_per_token(config):
    """As GPT.flops_per_token, for whole sequences."""
    n = sum(k * n for _, k, n in linears(config)) - (config.padded_vocab_size - config.vocab_size) * config.n_embd
    return 6 * n + 12 * config.n_layer * config.n_embd * config.block_size


def recomputed(config, grad_checkpointing):
    """Whether each block is recomputed in backward, as GPT does it. Raises ValueError."""
    every = checkpoint_every(grad_checkpointing)
    return [bool(every) and i % every == 0 for i in range(config.n_layer)]


# ------------------------------------------------------------------------------------------------------ memory

def saved(config, sequences, in_fp8, compiled, checkpointed):
    """kind -> bytes kept for backward, parameters aside. in_fp8: names of FP8 linears. checkpointed: a bool per block. Counts the
    fused RMSNorm of a GPU, which keeps its input and one number a token."""
    M, C, F, V = sequences * config.block_size, config.n_embd, config.ffn_dim, config.vocab_size
    swiglu, kv = config.mlp == 'swiglu', config.n_kv_head * config.head_dim
    norm = M * (C * (2 if compiled else 4) + (4 if config.norm == 'rmsnorm' else 8))              # input; 1/std, mean
    block = 2 * norm
    block += M * (2 * (C + 2 * kv) + (config.position == 'rope') * 2 * (C + kv))                  # q, k, v; q and k before rotation
    block += M * (2 * C + 4 * config.n_head)                                                      # attention's output, log-sum-exp
    block += M * 2 * F * (1 if not swiglu else 2 if compiled else 3)                              # gelu's input | gate, up, silu(gate)
    kept = [collections.Counter() for _ in range(config.n_layer + 1)]
    for i, (name, k, n) in enumerate(linears(config)):
        shared = name.endswith('attn.proj') and name not in in_fp8 and config.position != 'rope'      # with attention's output
        bytes_each = 1 if name in in_fp8 else 2
        kept[i // 4]['linears: inputs'] += 0 if shared else bytes_each * M * k
        kept[i // 4]['linears: weights'] += bytes_each * k * n
    for of_block in kept[:-1]:
        of_block['activations'] = block
    kept[-1]['activations'] = norm + 16 * M                                                       # ln_f's; ids and targets, int64
    kept[-1]['logits'] = M * (2 * config.padded_vocab_size + 8 if compiled else 4 * V)            # and max, log-sum | log-probabilities
    total = sum((of for of, again in zip(kept, [*checkpointed, False]) if not again), collections.Counter())
    total['activations'] += sum(checkpointed) * 2 * M * C
    recomputing = max([sum(of.values()) for of, again in zip(kept, checkpointed) if again], default=0)
    return total, recomputing


def memory(config, sequences, in_fp8, compiled, checkpointed):
    """component -> bytes of one GPU at the peak; see the top of this file."""
    P, M = sum(parameters(config).values()), sequences * config.block_size
    kept, recomputing = saved(config, sequences, in_fp8, compiled, checkpointed)
    logits = kept['logits'] + M * (2 * config.padded_vocab_size if compiled else 8 * config.vocab_size)
    return {'fp32 weights': 4 * P, 'fp32 gradients': 4 * P, 'fp32 AdamW moments': 8 * P,
            'activations': kept['activations'], 'inputs of linears': kept['linears: inputs'],
            'cast weights of linears': kept['linears: weights'], 'logits and their gradient': logits,
            'one recomputed block, beyond the logits': max(0, recomputing - logits)}


# -------------------------------------------------------------------------------------------------------- time

def moving(gpu, count):
    """Seconds of a kernel that reads and writes `count` bytes."""
    return max(LAUNCH, count / (gpu.bandwidth * 1e12 * BANDWIDTH)) if count else 0.0


def matmul(gpu, m, k, n, in_fp8):
    """Seconds of (m, k) x (k, n) -> bf16."""
    operand = 1 if in_fp8 else 2
    compute = 2 * m * k * n / (peak_flops(gpu, 'fp8' if in_fp8 else 'bf16') * GEMM)
    return max(LAUNCH, compute + (operand * (m * k + k * n) + 2 * m * n) / (gpu.bandwidth * 1e12 * BANDWIDTH))


# Who writes a tensor before its cast. own: an elementwise kernel, for this linear alone; shared: such a kernel, but bf16 stays too (the
# residual stream's gradient); opaque: attention's kernel, into which nothing fuses. linear -> (its input, its output's gradient).
WRITERS = {'qkv': ('own', 'opaque'), 'proj': ('opaque', 'shared'), 'down': ('own', 'shared')}
# Bytes per element beyond bf16's. tensorwise: the amax fuses into the writer (not an opaque one: +2), then the cast reads 2 and writes 1,
# and 1 transposed. delayed: the scale is known, so an own writer writes 1 + 1 in place of 2, and a shared one 1 + 1 besides.
CASTS = {'tensorwise': {'own': 4, 'shared': 4, 'opaque': 6}, 'delayed': {'own': 0, 'shared': 2, 'opaque': 4}}


def cast_bytes(config, recipe, name, elements_in, elements_out):
    """Bytes that quantising one linear's input and its output's gradient moves: one entry per kernel."""
    writers = WRITERS.get(name.split('.')[-1], ('own', 'own'))
    if name.endswith('qkv') and config.position == 'rope':
        writers = ('own', 'own')  # the rotation's backward writes the gradient
    return [CASTS[recipe][writer] * elements for writer, elements in zip(writers, (elements_in, elements_out))]


def linear_seconds(config, gpu, M, name, k, n, recipe):
    """(matmuls, casts) of one micro-step's forward, dgrad and wgrad. recipe: '' = bf16. The weight: read in fp32, written in bf16
    (6 bytes) or as two FP8 copies (6, and under tensorwise 4 more for its amax)."""
    matmuls = sum(matmul(gpu, *shape, bool(recipe)) for shape in ((M, k, n), (M, n, k), (n, M, k)))
    casts = [(10 if recipe == 'tensorwise' else 6) * k * n] + (cast_bytes(config, recipe, name, M * k, M * n) if recipe else [])
    return matmuls, sum(moving(gpu, count) for count in casts)


def elementwise(config):
    """Bytes per token of one block, forward and backward, between its matmuls in bf16, fused: norm with the residual sum before
    it (read 2, write 2), activation, rotation with the copy of attention's output, and bias gradients, which read theirs again."""
    C, F, kv = config.n_embd, config.ffn_dim, config.n_kv_head * config.head_dim
    norms = 2 * (8 * C + 8 * C)
    activation = F * (6 + 10 if config.mlp == 'swiglu' else 4 + 6)
    rotation = (config.position == 'rope') * (2 * 4 * (C + kv) + 2 * 4 * C)
    bias = config.bias * 2 * (C + 2 * kv + C + F * (1 + (config.mlp == 'swiglu')) + C)
    return [norms, activation, rotation, bias]


def step_seconds(config, gpu, gpus, sequences, micro_steps, recipes, checkpointed):
    """part -> seconds of an optimizer step. recipes: linear's name -> recipe, '' = bf16."""
    M, C, V, P = sequences * config.block_size, config.n_embd, config.padded_vocab_size, sum(parameters(config).values())
    cost = {name: linear_seconds(config, gpu, M, name, k, n, recipes[name]) for name, k, n in linears(config)}
    head = sum(cost.pop('lm_head')) + moving(gpu, M * 4 * V) + moving(gpu, M * 4 * V)             # loss: read twice; read, write
    blocks = {'linears: matmuls': sum(matmuls for matmuls, _ in cost.values()),
              'linears: casts': sum(casts for _, casts in cost.values()),
              'attention': config.n_layer * max(LAUNCH, 7 * M * config.block_size * C / (gpu.bf16 * 1e12 * ATTENTION)),
              'norms, activations': config.n_layer * sum(moving(gpu, M * count) for count in elementwise(config))}
    again = sum(checkpointed) / config.n_layer / 3 * sum(blocks.values())                         # forward is a third
    gradients = moving(gpu, 10 * P)                                                               # bf16 read, fp32 read and written
    micro = {**blocks, 'head and loss': head, 'recomputation': again, 'embeddings, gradients': moving(gpu, 14 * M * C) + gradients}
    parts = {name: micro_steps * seconds for name, seconds in micro.items()}
    parts['clipping, AdamW'] = moving(gpu, (12 + 28) * P)                                         # g x 3; p, g, m, v -> p, m, v
    reduce = 2 * (gpus - 1) / gpus * 4 * P / (gpu.link / 2 * 1e9)                                 # a ring's, at the link's peak
    parts['all-reduce, not hidden'] = max(0.0, reduce - 2 / 3 * sum(micro.values()))
    return parts


# -------------------------------------------------------------------------------------------------------- plan

@dataclasses.dataclass
class Plan:
    """precision is 'bf16' or 'fp8' throughout. memory: precision -> component -> bytes of one GPU. seconds: precision -> part ->
    seconds of a step; without a GPU, or for FP8 on one without FP8 units, None. linears: rows {name, count, k, n, share,
    why_bf16, gain}, the same linear of all blocks in one row."""
    config: GPTConfig
    sequences: int      # of one micro-batch
    micro_steps: int
    gpus: int
    gpu: Gpu
    compiled: bool
    recipe: str
    parameters: dict
    flops: int          # per token
    memory: dict
    seconds: dict
    linears: list

    @property
    def tokens_per_step(self):
        return self.sequences * self.config.block_size * self.micro_steps * self.gpus

    def gigabytes(self, precision):
        return sum(self.memory[precision].values()) / 1e9

    def fits(self, precision):
        return self.gigabytes(precision) <= self.gpu.memory - MARGIN

    def speed(self, precision):
        """Tokens per second of all GPUs together."""
        return self.tokens_per_step / sum(self.seconds[precision].values())

    def gain(self):
        """FP8's speed over bf16's."""
        return self.speed('fp8') / self.speed('bf16')

    def hours(self, precision, tokens):
        return tokens / self.speed(precision) / 3600

    def model_line(self):
        c = self.config
        return (f'model     {sum(self.parameters.values()) / 1e6:.2f}M parameters: {c.n_layer} layers x {c.n_embd}, {c.n_head} heads, {c.mlp}, '
                f'{c.norm}, {c.position}, vocabulary {c.vocab_size} (padded to {c.padded_vocab_size})')

    def batch_line(self):
        return (f'batch     {self.sequences} x {self.config.block_size} tokens x {self.micro_steps} micro-steps x {self.gpus} ranks '
                f'= {self.tokens_per_step:,} tokens a step')

    def run_line(self, last_step, ended_by, epoch_tokens=0):
        tokens = last_step * self.tokens_per_step
        epochs = f'= {tokens / epoch_tokens:.2f} epochs ' if epoch_tokens else ''
        return (f'run       {last_step:,} steps = {tokens:,} tokens {epochs}= {tokens * self.flops:.2e} FLOPs '
                f'({self.flops / 1e6:,.0f}M a token); ended by {ended_by}')

    def lines(self, folder, train, val, device, last_step, ended_by, precision, note):
        """What a training script says before its first step. precision: what it runs in; note: why."""
        peak = peak_flops(self.gpu, precision)
        lines = [
            self.model_line(), f'data      {folder}: {train.tokens:,} training tokens, {val.tokens:,} for validation',
            self.batch_line(), self.run_line(last_step, ended_by, train.n_windows * train.block_size),
            f'device    {runlog.device_name(device)}, torch {torch.__version__}; '
            + (f'peak {peak / 1e12:,.0f} TFLOP/s in {precision}' if peak else f'its {precision} peak is not in the table, so no MFU'),
            f'precision {note}']
        if precision in self.memory:
            unit, size = ('GB', 1e9) if self.gigabytes(precision) >= 1 else ('MB', 1e6)
            parts = ', '.join(f'{name} {count / size:.2f}' for name, count in self.memory[precision].items() if count)
            room = self.gpu and f'; {"fits" if self.fits(precision) else "does not fit"} {self.gpu.name}: {self.gpu.memory} GB less {MARGIN:g}'
            lines.append(f'memory    {self.gigabytes(precision) * 1e9 / size:.2f} {unit} a rank (modelled): {parts}{room or ""}')
        if self.gpu and self.seconds.get(precision):
            fp8_gain = f'; FP8 x{self.gain():.2f} over bf16' if self.seconds['fp8'] else ''
            seconds = self.hours(precision, last_step * self.tokens_per_step) * 3600
            lines.append(f'speed     {self.speed(precision):,.0f} tokens/s, {runlog.duration(seconds)} (modelled, with torch.compile){fp8_gain}')
        return lines


def plan(config, settings, sequences, micro_steps=1, gpus=1, gpu=None, compiled=True):
    """The Plan of a GPTConfig. settings: those of a training script (fp8_recipe and grad_checkpointing count, where they are).
    sequences: of one GPU's micro-batch. gpu: a row of GPUS, None = unknown."""
    asked, keep = settings.get('fp8_recipe', 'tensorwise'), settings.get('fp8_keep', '')
    recipe = asked if asked in CASTS else 'tensorwise'
    choice = fp8.Choice('native', 'planned', recipe='tensorwise' if asked == 'auto' else asked, keep=() if keep == 'auto' else fp8.split(keep))
    checkpointed = recomputed(config, settings.get('grad_checkpointing', 'none'))
    all_linears, flops = linears(config), flops_per_token(config)
    reasons = {name: fp8.why_bf16(choice, name, k, n) for name, k, n in all_linears}
    if sequences * config.block_size % TABLE[choice.recipe][-1]:
        reasons = dict.fromkeys(reasons, f'{sequences} x {config.block_size} tokens are not a multiple of {TABLE[choice.recipe][-1]}')
    columns = {'bf16': dict.fromkeys(reasons, ''), 'fp8': {name: '' if why else recipe for name, why in reasons.items()}}
    bytes_of = {precision: memory(config, sequences, {name for name in recipes if recipes[name]}, compiled, checkpointed)
                for precision, recipes in columns.items()}
    timed = {precision: gpu and peak_flops(gpu, precision) and step_seconds(
        config, gpu, gpus, sequences, micro_steps, recipes, checkpointed) for precision, recipes in columns.items()}
    rows = {}
    for name, k, n in all_linears:
        why = reasons[name]
        row = rows.setdefault((re.sub(r'\.\d+\.', '.*.', name), why), {'count': 0, 'k': k, 'n': n, 'share': 0.0, 'gain': None})
        row['count'] += 1
        row['share'] += 6 * k * (n if name != 'lm_head' else config.vocab_size) / flops
        if timed['fp8'] and not why:
            seconds = [sum(linear_seconds(config, gpu, sequences * config.block_size, name, k, n, r)) for r in ('', recipe)]
            row['gain'] = seconds[0] / seconds[1]
    rows = [{'name': name, 'why_bf16': why, **row} for (name, why), row in rows.items()]
    return Plan(config, sequences, micro_steps, gpus, gpu, compiled, recipe, parameters(config), flops, bytes_of, timed, rows)


# ---------------------------------------------------------------------------------- from a script's settings

def read(words):
    """(settings, GPTConfig) of train_fp8.py under these words. The dataset is looked at for its vocabulary, if it is there."""
    settings = configure(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'train_fp8.py'), words)
    source = settings['init_from']
    if settings['resume']:
        raise SettingError('a plan starts from settings: in place of --resume, --init_from=that checkpoint takes its architecture')
    if source not in ('scratch', *PRESETS) and not source.endswith('.pt'):
        raise SettingError(f'init_from={source}: there are scratch, {", ".join(PRESETS)} and checkpoints (*.pt)')
    try:
        meta = data.read_meta(data.dataset_dir(settings['data_dir'], settings['dataset'], settings['tokenizer']))
    except FileNotFoundError:
        meta = {}
    if source.endswith('.pt'):
        return settings, make_config(settings, settings.given, fixed=checkpoint.load(source)['model_config'])
    known = GPTConfig.vocab_size if settings['tokenizer'] == 'gpt2' else get_tokenizer(settings['tokenizer']).vocab_size
    settings['vocab_size'] = settings['vocab_size'] or meta.get('vocab_size') or known
    return settings, make_config(settings, settings.given | {'vocab_size'}, PRESETS.get(source))


def micro_steps_of(settings, config, sequences, gpus):
    """Micro-steps per optimizer step. Raises ValueError where a target does not divide."""
    return optim.accumulation(sequences, config.block_size, gpus, *(settings[name] for name in (
        'total_batch_size', 'gradient_accumulation_steps', 'target_effective_batch_size')))


def run_length(settings, config, tokens_per_step):
    """(last step, what ends the run). Raises FileNotFoundError where that depends on a dataset that is not there."""
    per_epoch = 0
    if settings['num_epochs'] or not (settings['max_steps'] or settings['max_tokens']):
        folder = data.dataset_dir(settings['data_dir'], settings['dataset'], settings['tokenizer'])
        per_epoch = data.TokenData(folder, 'train', config.block_size).n_windows * config.block_size
    return optim.run_length(tokens_per_step, per_epoch, settings['max_steps'], settings['max_tokens'], settings['num_epochs'])


def plan_of(settings, config, gpu, gpus):
    """(Plan, precision that would run, the lines that say what was chosen on the way)."""
    precision, said = 'fp8', []
    if settings['dtype'] != 'bf16':
        raise SettingError(f'plan.py models bf16 and FP8, not dtype={settings["dtype"]}')
    if not settings['use_fp8'] or settings['fp8_backend'] == 'off' or not gpu.fp8:
        precision = 'bf16'
    asked = settings.get('fp8_recipe', 'tensorwise')
    if asked not in CASTS and asked != 'auto':
        said.append(f'recipe    fp8_recipe={asked} is not modelled: tensorwise, which moves the same tensors, stands for it')
    build = lambda sequences, micro_steps: plan(config, settings, sequences, micro_steps, gpus, gpu, settings['compile'] != 'off')
    sequences = settings['batch_size']
    if not sequences:
        wanted = settings['target_effective_batch_size'] or settings['total_batch_size'] // config.block_size
        sizes = [2 ** i for i in range(settings['max_batch_size'].bit_length())]
        sizes = [size for size in sizes if wanted % (size * gpus) == 0 and size <= settings['max_batch_size']]
        fitting = [size for size in sizes if build(size, 1).fits(precision)]
        if not fitting:
            raise MachineError(f'batch_size=0: no batch is modelled to fit {gpu.name}, not even of one sequence of {config.block_size} tokens')
        sequences = max(fitting)
        limit = settings['max_batch_size']
        said.append(f'batch     batch_size=0: {sequences} is the largest power of two up to {limit} that is modelled to fit in {precision}')
    return build(sequences, micro_steps_of(settings, config, sequences, gpus)), precision, said


def verdict(made, asked_off):
    """The lines that say what FP8 would do for this model."""
    if not made.gpu.fp8:
        return [f'verdict   {made.gpu.name} has no FP8 units (sm_89 and later have): it trains in bf16']
    slow = [row['name'].removeprefix('h.*.') for row in made.linears if row['gain'] and row['gain'] < 1]
    gain, lines = made.gain(), []
    lines.append(f'verdict   predicted FP8 x{gain:.2f} over bf16 (modelled)' + (': slower, so train in bf16 (--no_fp8)' if gain < 1 else '')
                 + ('; FP8 is switched off in these settings' if asked_off else ''))
    if slow:
        lines.append(f'          slower in FP8 than in bf16: keep them with --fp8_keep={",".join(slow)}')
    return lines


def report(made, precision, run, usd):
    """The lines that `python plan.py` prints. run: (last step, ended by), or the reason why it is not known."""
    gpu, both = made.gpu, ('bf16', 'fp8')
    cells = lambda name, form, of: f'  {name:<42}' + ''.join(f'{format(of(p), form) if made.seconds[p] else "n/a":>10}' for p in both)
    peaks = f'{gpu.bf16:,} TFLOP/s in bf16, ' + (f'{gpu.fp8:,} in FP8' if gpu.fp8 else 'no FP8 units')
    kinds = ', '.join(f'{kind} {count:,}' for kind, count in made.parameters.items())
    lines = [made.model_line(), f'          {sum(made.parameters.values()):,} = {kinds}' + ' (tied)' * made.config.tie_embeddings, made.batch_line()]
    lines.append(made.run_line(*run) if isinstance(run, tuple) else f'run       {made.flops / 1e6:,.0f}M FLOPs a token; length unknown: {run}')
    lines += [f'device    {made.gpus} x {gpu.name}: {peaks}, {gpu.bandwidth} TB/s, {gpu.memory} GB', '']
    lines.append(f'{"memory per GPU, GB (" + ("torch.compile" if made.compiled else "eager") + ")":<44}{"bf16":>10}{"FP8":>10}')
    lines += [cells(name, '.2f', lambda p, name=name: made.memory[p][name] / 1e9) for name, count in made.memory['bf16'].items() if count]
    lines += [cells('sum', '.2f', made.gigabytes),
              cells(f'in {gpu.memory} GB less {MARGIN:g} (CUDA context, workspaces)', '', lambda p: 'fits' if made.fits(p) else 'too big'), '']
    lines.append(f'{"time of a step, ms (modelled, torch.compile)":<44}{"bf16":>10}{"FP8":>10}')
    lines += [cells(name, '.2f', lambda p, name=name: made.seconds[p][name] * 1e3) for name, part in made.seconds['bf16'].items() if part]
    lines += [cells('sum', '.2f', lambda p: sum(made.seconds[p].values()) * 1e3), cells('tokens/s, all GPUs', ',.0f', made.speed),
              cells('MFU, of that precision\'s peak', '.1%', lambda p: made.speed(p) / made.gpus * made.flops / peak_flops(gpu, p))]
    spans = [('10^9 tokens', 1e9)] + [('the run', run[0] * made.tokens_per_step)] * isinstance(run, tuple)
    for span, tokens in spans:
        lines.append(cells(f'{span}, hours', ',.2f', lambda p, tokens=tokens: made.hours(p, tokens)))
        lines.append(cells(f'{span}, GPU-hours', ',.2f', lambda p, tokens=tokens: made.hours(p, tokens) * made.gpus))
        if usd:
            lines.append(cells(f'{span}, USD at {usd:g} per GPU-hour', ',.2f', lambda p, tokens=tokens: made.hours(p, tokens) * made.gpus * usd))
    M = made.sequences * made.config.block_size
    lines += ['', f'{"linear":<24}{"tokens x in x out":>24}{"FLOPs":>8}  {"gain":<7}in']
    for row in made.linears:
        lines.append(f'{row["name"] + " x " + str(row["count"]):<24}{M:>10} x {row["k"]} x {row["n"]}'.ljust(48) + f'{row["share"]:>8.1%}  '
                     + (f'x{row["gain"]:.2f}' if row['gain'] else '').ljust(7)
                     + (f'bf16: {row["why_bf16"]}' if row['why_bf16'] else f'FP8, {made.recipe}' if gpu.fp8 else 'bf16: no FP8 units'))
    lines += ['', *verdict(made, precision == 'bf16' and gpu.fp8)]
    lines.append(f'modelled, not measured: {GEMM:.0%} of the FLOP/s and {BANDWIDTH:.0%} of the bandwidth (torchao\'s roofline_utils.py, H100), '
                 f'{ATTENTION:.0%} in attention (FlashAttention-2: Shah et al. 2024), peaks of NVIDIA\'s data sheets, casts fused by torch.compile')
    if made.gpus > 8:
        lines.append(f'the all-reduce counts {gpu.link} GB/s between all {made.gpus} GPUs: a network between nodes is slower, and not modelled')
    return lines


def main(words):
    """Prints the plan of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument('--gpu', help='h100, h200, b200, a100, ...; default: the one in this machine, else h100')
    parser.add_argument('--gpus', type=int, default=1, help='how many, data-parallel')
    parser.add_argument('--usd_per_gpu_hour', type=float, default=0.0, help='what one costs; 0 = no money in the output')
    own, words = parser.parse_known_args(words)
    if own.gpus < 1 or own.usd_per_gpu_hour < 0:
        raise SettingError(f'--gpus is at least 1 and --usd_per_gpu_hour at least 0, not {own.gpus} and {own.usd_per_gpu_hour:g}')
    name = own.gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else 'h100')
    gpu = find_gpu(name)
    if not gpu:
        raise SettingError(f'no data sheet of {name!r} here; --gpu is one of {", ".join(gpu.name for _, gpu in GPUS)}')
    settings, config = read(words)
    made, precision, said = plan_of(settings, config, gpu, own.gpus)
    try:
        run = run_length(settings, config, made.tokens_per_step)
    except FileNotFoundError as error:
        run = str(error)
    print(*said, *report(made, precision, run, own.usd_per_gpu_hour), sep='\n')


if __name__ == '__main__':
    one_line_errors()
    main(sys.argv[1:])
