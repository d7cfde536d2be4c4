"""Trains a GPT with its linears in FP8: train.py plus the lines that FP8 takes (`diff train.py train_fp8.py`).

$ python train_fp8.py config/quickstart.py                                  # FP8 numerics, small, on any machine
$ torchrun --standalone --nproc_per_node=8 train_fp8.py config/gpt2_fp8.py  # GPT-2 124M on one node of H100s
$ python train_fp8.py --resume=checkpoints/latest.pt                        # a bf16 run goes on in FP8
$ python train_fp8.py --help                                                # every setting, its default and unit

use_fp8 is a request: a machine without FP8 units trains in bf16 and says so. fp8_backend=native is an order: it runs,
or the script stops. Every log line ends with the precision that ran.
"""
import dataclasses
import math
import os

import torch

import checkpoint
import data
import fp8
import hellaswag
import measure
import optim
import parallel
import plan
import runlog
from configurator import SettingError, configure
from model import GPT, PRESETS, Linear, checkpoint_every, make_config
from tokenizer import get_tokenizer

# ---------------------------------------------------------------------------------------------- settings
# what to train
init_from = 'scratch'            # scratch | gpt2, gpt2-medium, gpt2-large, gpt2-xl, h100-350m (random weights) | a checkpoint's weights
vocab_size = 0                   # 0 = the dataset's
block_size = 1024                # longest sequence, tokens
n_layer = 12                     # blocks
n_head = 12                      # query heads
n_kv_head = 0                    # key/value heads; 0 = n_head
n_embd = 768                     # width
ffn_dim = 0                      # hidden width of the MLP; 0 = 4 * n_embd
mlp = 'gelu'                     # gelu | swiglu
norm = 'layernorm'               # layernorm | rmsnorm
position = 'learned'             # learned | rope
bias = True                      # in linears and layer norms
tie_embeddings = True            # output head = token embedding
norm_eps = 1e-5                  # added to the variance
rope_theta = 10_000.0            # base of RoPE's wavelengths
# data
dataset = 'fineweb_edu'          # name given to prepare_data.py, or a folder of shards
tokenizer = 'gpt2'               # gpt2 | byte, as prepared
data_dir = 'data'                # where prepare_data.py put the datasets
num_workers = 1                  # threads that prepare batches; 0 = none
# batch and length of the run
batch_size = 8                   # sequences per GPU and micro-step; 0 = the largest power of two that fits the GPU
max_batch_size = 128             # limit of that search
total_batch_size = 0             # tokens per optimizer step, over all GPUs; 0 = as gradient_accumulation_steps says
target_effective_batch_size = 0  # the same in sequences; 0 = unset
gradient_accumulation_steps = 0  # micro-steps per optimizer step; 0 = as total_batch_size says
max_steps = 0                    # optimizer steps; 0 = unset, and the first limit reached ends the run
max_tokens = 0                   # training tokens; 0 = unset
num_epochs = 0.0                 # passes over the data; 0 = unset; all three unset: one pass
# optimizer
max_lr = 6e-4                    # peak learning rate; GPT-3's for 125M
min_lr_ratio = 0.1               # the schedule ends at this share of max_lr
warmup_steps = 100               # linear warm-up
lr_schedule = 'cosine'           # cosine | wsd (constant, then linear decay) | constant
decay_share = 0.2                # share of the run that wsd decays over
weight_decay = 0.1               # on matrices only
beta1 = 0.9                      # AdamW
beta2 = 0.95                     # AdamW
grad_clip = 1.0                  # largest gradient norm; 0 = no clipping
# evaluation and log
eval_freq = 250                  # steps between evaluations; 0 = only at the end
eval_tokens = 1_000_000          # validation tokens per evaluation, in fixed windows
sample_freq = 0                  # steps between samples of text; 0 = none
hellaswag_freq = 0               # steps between HellaSwag tests, if `prepare_data.py hellaswag` has fetched it; 0 = none
log_freq = 10                    # steps between log lines
use_tensorboard = False          # writes runs/<run_name>-<precision>
run_name = 'gpt'                 # names the TensorBoard folder
# checkpoints
checkpoint_dir = 'checkpoints'   # also holds log.jsonl; touch STOP in it to stop the run
checkpoint_dir = 'checkpoints_fp8'  # also holds log.jsonl; touch STOP in it to stop the run
checkpoint_freq = 250            # steps between checkpoints
keep_checkpoints = 2             # newest step files kept, beside best_model.pt; 0 = all
resume = ''                      # latest | best | auto (latest, if there is one) | a path
overwrite = False                # removes an earlier run's checkpoints from checkpoint_dir
list_checkpoints = False         # lists them and exits
dry_run = False                  # prints the plan and the schedule and trains nothing
# machine
device = 'auto'                  # auto (cuda, else cpu) | cuda | cpu
dtype = 'bf16'                   # of activations: bf16 | fp32
compile = 'auto'                 # torch.compile: auto (on for CUDA) | on | off
grad_checkpointing = 'none'      # activations computed again in backward: none | full | k (every k-th block)
seed = 1337                      # of weights and data order
# FP8
use_fp8 = True                   # a request: where FP8 cannot run, bf16 does, and a line says why
fp8_backend = 'auto'             # auto (native, te or torchao, on CUDA) | native | te | torchao | emulate (orders: run or stop) | off
fp8_recipe = 'auto'              # auto (tensorwise) | tensorwise | delayed | rowwise | rowwise_gw_hp | blockwise | mxfp8 (orders)
fp8_format = 'auto'              # auto (hybrid; with finer scales than a tensor's, e4m3) | hybrid | e4m3 | e5m2
fp8_margin = 0                   # powers of two left free above the amax
fp8_interval = 1                 # delayed: steps between new scales
fp8_amax_history = 1024          # delayed: steps whose largest amax makes the scale
fp8_keep = ''                    # linears that stay bf16, with commas: h.0, attn.proj, h.3.mlp.down; auto: those that a timing says lose
fp8_until = 1.0                  # share of the run after which bf16 goes on
fp8_stats_freq = 500             # steps between looks at the numbers: amax, scale, clamped, flushed, SQNR; 0 = none

# Names of which a later layer (checkpoint < config file < flags) replaces all at once.
config_groups = [('total_batch_size', 'gradient_accumulation_steps', 'target_effective_batch_size')]
config_groups = [*config_groups, ('use_fp8', 'fp8_backend')]
config_twins = ['train_fp8.py']  # a config file serves both scripts: its FP8 settings are passed over in bf16
config = configure(__file__)

# ------------------------------------------------------------------------- what to go on from, ranks, data
if config['list_checkpoints']:
    print(*checkpoint.table(config['checkpoint_dir']), sep='\n')
    raise SystemExit
resume_path = checkpoint.find(config['resume'], config['checkpoint_dir'])
resumed = checkpoint.load(resume_path) if resume_path else None
changes = []
if resumed:
    never = ('checkpoint_dir', 'resume', 'overwrite', 'list_checkpoints', 'dry_run')
    config, changes = config.over(resumed['config'], never)
globals().update(config)

ranks = parallel.init(device)
device = ranks.device
compute_dtype = {'bf16': torch.bfloat16, 'fp32': torch.float32}.get(dtype)
if compute_dtype is None:
    raise SettingError(f'dtype is bf16 or fp32, not {dtype!r}')
if not config['batch_size'] and device.type != 'cuda':
    raise SettingError('batch_size=0 looks for what fits the memory of a GPU; here is none, so name a batch_size')
compile = compile == 'on' or compile == 'auto' and device.type == 'cuda'

source = checkpoint.load(init_from) if init_from.endswith('.pt') and not resumed else resumed
if not source and init_from not in ('scratch', *PRESETS):
    raise SettingError(f'init_from={init_from}: there are scratch, {", ".join(PRESETS)} and checkpoints (*.pt); '
                     'Hugging Face weights are not built yet')
folder = data.dataset_dir(data_dir, dataset, tokenizer)
meta = data.read_meta(folder)
data_tokenizer = meta.get('tokenizer', tokenizer)
data_vocab_size = meta.get('vocab_size') or get_tokenizer(tokenizer).vocab_size
config['vocab_size'] = config['vocab_size'] or data_vocab_size
if config['vocab_size'] < data_vocab_size:
    raise SettingError(f'vocab_size={config["vocab_size"]}, but {folder} has {data_vocab_size} tokens')
if source and source['tokenizer'] != data_tokenizer:
    raise SettingError(f'{folder} is tokenized with {data_tokenizer}, the checkpoint with {source["tokenizer"]}')

# ------------------------------------------------------------------------------- model, precision, optimizer
given = config.given | {'vocab_size'}
model_config = make_config(config, given, PRESETS.get(init_from), source and source['model_config'])
config.update(dataclasses.asdict(model_config))
block_size = model_config.block_size

linear = Linear
precision, reason = dtype, 'the bf16 script'
if not 0 <= fp8_until <= 1:
    raise SettingError(f'fp8_until is a share of the run, 0 to 1, not {fp8_until}')
fp8_choice = fp8.choose(
    use_fp8, fp8_backend, device, compute_dtype, max(1, batch_size) * block_size, compile, fp8_recipe, fp8_format, fp8_margin,
    fp8_interval, fp8_amax_history, '' if fp8_keep == 'auto' else fp8_keep, plan.linears(model_config))
compile, fp8_line = fp8.compiles(fp8_choice, compile, config['compile'])
if fp8_keep == 'auto' and fp8_choice.on:
    fp8_choice = measure.auto_keep(model_config, fp8_choice, batch_size, device, compile, compile or bool(fp8_line))
    config['fp8_keep'] = ','.join(fp8_choice.keep) if fp8_choice.on else 'auto'
linear = fp8.linear_factory(fp8_choice, Linear)
precision, reason = 'fp8' if fp8_choice.on else dtype, f'{fp8_choice.backend}: {fp8_choice.reason}'

train_data = data.TokenData(folder, 'train', block_size)
val_data = data.TokenData(folder, 'val', block_size)
if ranks.main:
    data.check(folder, config['vocab_size'], print)

raw_model = GPT(
    model_config,
    linear=linear,
    dtype=compute_dtype,
    seed=seed,
    checkpoint_every=checkpoint_every(grad_checkpointing),
).to(device)
if source:
    raw_model.load_weights(source['weights'])
optimizer = optim.make_optimizer(raw_model, (beta1, beta2), weight_decay)
raw_model.checkpoint = fp8.checkpointer(fp8_choice)
fp8_state = fp8.State(raw_model, fp8_choice)
model = torch.compile(raw_model) if compile else raw_model
ddp_model = parallel.wrap(model, ranks)

targets = total_batch_size, gradient_accumulation_steps, target_effective_batch_size
if not batch_size:
    step_sequences = target_effective_batch_size or total_batch_size // block_size
    batch_size = config['batch_size'] = parallel.smallest_of_ranks(optim.largest_batch_size(
        raw_model, block_size, max_batch_size, lambda size: step_sequences % (size * ranks.world_size) == 0, device))
micro_steps = optim.accumulation(batch_size, block_size, ranks.world_size, *targets)
sequences_per_step = micro_steps * batch_size * ranks.world_size
last_step, ended_by = optim.run_length(
    sequences_per_step * block_size, train_data.n_windows * block_size, max_steps, max_tokens, num_epochs)
optim.check_schedule(last_step, warmup_steps, lr_schedule, decay_share)
schedule = last_step, max_lr, min_lr_ratio, warmup_steps, lr_schedule, decay_share

# --------------------------------------------------------------------------------- where the run stands, plan
step, position, best_val_loss = 0, 0, None
if resumed:
    optim.load_named_state(optimizer, raw_model, resumed['optimizer'])
    step, position, best_val_loss = resumed['step'], resumed['position'], resumed['best_val_loss']
note = f'{precision.upper()} ({reason})'


def rehearse(network, part=lambda x, y: (x, y)):
    """A function that takes the next micro-batch, or part of it, forward and backward and drops the gradients."""
    ahead = data.Loader(train_data, batch_size, seed, position, ranks.rank, ranks.world_size, device, num_workers=0)
    n_targets, (x, y) = ahead.step_targets(micro_steps) / ranks.world_size, part(*ahead.next())

    def run():
        network(x, y, n_targets=n_targets).backward()
        raw_model.zero_grad(set_to_none=True)
    return run


note = f'{precision.upper()} | {fp8.summary(raw_model, fp8_choice)}'
if resumed:
    fp8_state.load(resumed.get('fp8_state'), sequences_per_step // ranks.world_size)
if fp8_choice.on and not dry_run:
    if fp8_state.needs_calibration:
        fp8_state.calibrate(rehearse(raw_model, measure.glance))
    if device.type == 'cuda' and step < fp8_until * last_step:
        rival = torch.compile(raw_model) if fp8_line else model  # bf16 at its best
        note += f' | fp8 x{measure.speedup(rehearse(model), rehearse(rival), fp8_state):.2f} vs bf16 (measured)'
planned = plan.plan(model_config, config, batch_size, micro_steps, ranks.world_size, plan.gpu_of(device), compile)
intro = planned.lines(folder, train_data, val_data, device, last_step, ended_by, precision, note)
if resumed:
    intro += [f'resumed   {resume_path} at step {step}, in {resumed["precision"]["name"]} until now', *changes]
if dry_run:
    marks = sorted({0, max(0, warmup_steps - 1), *(last_step * quarter // 4 for quarter in (1, 2, 3)), last_step - 1})
    intro += [f'schedule  {lr_schedule}: ' + ', '.join(f'step {s} {optim.learning_rate(s, *schedule):.2e}' for s in marks)]
    print(*(intro if ranks.main else ()), sep='\n')
    parallel.leave()
    raise SystemExit
lock = checkpoint.start(checkpoint_dir, resume_path, step, overwrite) if ranks.main else None
versions = runlog.versions()
log = runlog.RunLog(
    ranks, checkpoint_dir, use_tensorboard and f'runs/{run_name}-{precision}', step if resumed else None,
    {'config': dict(config), 'precision': precision, 'device': runlog.device_name(device), 'versions': versions})
log.say(*intro)
log.say(*(line for line in (fp8_line, fp8_state.warning) if line))
state_bytes = 12 * sum(p.numel() for p in raw_model.parameters())  # fp32 weights and AdamW's two moments
if ranks.main and (warning := checkpoint.room_warning(checkpoint_dir, state_bytes, keep_checkpoints)):
    log.say(warning)
source = resumed = None
loader = data.Loader(
    train_data, batch_size, seed, position, ranks.rank, ranks.world_size, device, num_workers)
text_tokenizer = get_tokenizer(data_tokenizer) if sample_freq or hellaswag_freq else None
hellaswag_path = os.path.join(data_dir, 'hellaswag', 'hellaswag_val.jsonl')
if hellaswag_freq and not os.path.exists(hellaswag_path):
    log.say(f'HellaSwag is left out: there is no {hellaswag_path}; `python prepare_data.py hellaswag` fetches it')
    hellaswag_freq = 0
stop = parallel.StopRequest(os.path.join(checkpoint_dir, 'STOP'), ranks)


@torch.no_grad()
def evaluate():
    """Mean cross-entropy over the fixed validation windows, all ranks together; logs it and keeps the best model."""
    global best_val_loss
    total = torch.zeros(2, dtype=torch.float64, device=device)  # nats, targets
    for x, y in data.eval_batches(val_data, eval_tokens, batch_size, ranks.rank, ranks.world_size, device):
        total += torch.stack([model(x, y, n_targets=1), (y != -1).sum()])
    nats, targets = parallel.sum_over_ranks(total).tolist()
    val_loss = nats / targets
    bits = val_loss / math.log(2) / val_data.bytes_per_token if val_data.bytes_per_token else None
    log.say(f'step {step:5d} | val loss: {val_loss:.4f}' + (f' | bits per byte: {bits:.4f}' if bits else ''))
    log.scalars(step, val_loss=val_loss, val_bits_per_byte=bits)
    if step and (best_val_loss is None or val_loss < best_val_loss):
        best_val_loss = val_loss
        save(best=True)


def save(best=False, must=False):
    """Writes a checkpoint on rank 0. A full disk ends the run only where it `must`: what is on the disk stays there."""
    if not ranks.main:
        return
    state = {
        'step': step, 'position': position, 'tokens': position * block_size, 'best_val_loss': best_val_loss,
        'weights': raw_model.weights(), 'optimizer': optim.named_state(optimizer, raw_model),
        'model_config': dataclasses.asdict(model_config), 'tokenizer': data_tokenizer,
        'precision': {'name': precision, 'reason': reason}, 'config': dict(config), 'versions': versions,
        'fp8_state': fp8_state.state_dict(sequences_per_step // ranks.world_size),
    }
    try:
        checkpoint.save(checkpoint_dir, state, keep_checkpoints, best)
    except OSError as error:
        if must:
            raise
        log.say(f'WARNING: {error}; training goes on, the next save is at step {step + checkpoint_freq}')


def show_sample():
    """A continuation of the empty text, as the model writes it now."""
    if ranks.main:
        idx = torch.full((1, 1), text_tokenizer.eot, device=device)
        ids = [t.item() for t in raw_model.generate(idx, 64, temperature=0.8, seed=seed)]
        log.say(f'step {step:5d} | sample: {text_tokenizer.decode(ids)!r}')


def test_hellaswag():
    """Common sense, on all ranks together; see hellaswag.py for the figures."""
    result = hellaswag.evaluate(model, text_tokenizer, hellaswag_path, device, ranks.rank, ranks.world_size)
    log.say(f'step {step:5d} | {hellaswag.summary(result)}')
    log.say_once(result['note'])
    log.scalars(step, **{f'hellaswag_{name}': result[name] for name in ('acc', 'acc_norm', 'acc_token')})


def check_health():
    """The casts of a micro-batch, layer by layer; says the worst five and returns all."""
    rows = measure.health(raw_model, fp8_choice, rehearse(raw_model, measure.glance))
    log.say(*(f'step {step:5d} | {line}' for line in measure.health_lines(rows)))
    log.scalars(step, **measure.health_scalars(rows))
    return rows


# ------------------------------------------------------------------------------------------------- the loop
skips = torch.zeros(3, device=device)  # steps with gradients that were not finite: in all, in a row, longest row
clock = runlog.Clock(loader)
timed = False
stopping = False
diverged = False
error = None
while step < last_step:
    if fp8_choice.on and step >= fp8_until * last_step:
        fp8.pause()
        fp8_choice, precision, reason = fp8.OFF, dtype, f'fp8_until={fp8_until}'
        log.say(f'step {step:5d} | from here on in bf16: {reason}')
    if fp8_choice.on and fp8_stats_freq and step and step % fp8_stats_freq == 0:
        clock.stop()
        check_health()
        clock.start()
    side_work = ((evaluate, eval_freq), (show_sample, sample_freq), (test_hellaswag, hellaswag_freq))
    due = [work for work, freq in side_work if freq and step % freq == 0 and (step or work is evaluate)]
    if due:
        clock.stop()
        with fp8.paused():
            for work in due:
                work()
        clock.start()

    # Whatever draws random numbers in a step depends on (seed, step, rank) alone, so there is no state to save.
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + ranks.rank)
    lr = optim.learning_rate(step, *schedule)
    for group in optimizer.param_groups:
        group['lr'] = lr

    # Each micro-step's loss is its share of the step's mean: so gradients simply add up. DDP then averages over ranks.
    n_targets = loader.step_targets(micro_steps) / ranks.world_size
    step_loss = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        fp8_state.micro_step(micro_step, micro_steps)
        parallel.sync_gradients(ddp_model, micro_step == micro_steps - 1)
        x, y = loader.next()
        loss = ddp_model(x, y, n_targets=n_targets)
        loss.backward()
        step_loss += loss.detach()
    grad_norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or float('inf'))
    optim.step_if_finite(optimizer, grad_norm, skips)
    fp8_state.after_step()
    optimizer.zero_grad(set_to_none=True)
    epoch = position // train_data.n_windows
    step, position = step + 1, position + sequences_per_step
    clock.steps += 1

    # ----------------------------------------------------------------------------------- the step is done
    if step % log_freq == 0 or step == 1 or step == last_step:
        loss = (parallel.sum_over_ranks(step_loss) / ranks.world_size).item()
        seconds, data_wait = clock.read()
        skipped, _, longest_row = (int(number) for number in skips.tolist())
        diverged = longest_row >= 3
        log.train_step(
            step, epoch, loss, lr, grad_norm.item(), seconds, sequences_per_step * block_size,
            raw_model.flops_per_token(block_size), plan.peak_flops(planned.gpu, precision), precision, data_wait, skipped)
        if step > 1 and not timed:
            timed = True
            log.say(f'time left: {runlog.duration(seconds * (last_step - step))}, evaluations and checkpoints aside')
        if data_wait > 0.05 and step > 1:
            log.say(f'{data_wait:.0%} of the step is waiting for data: raise num_workers, now {num_workers}')
    stopping = stop.asked() or diverged
    if stopping or step % checkpoint_freq == 0 or step == last_step:
        clock.stop()
        save(must=stopping or step == last_step)
        clock.start()
    if stopping:
        log.say(f'stopped at step {step}, saved: --resume=latest --checkpoint_dir={checkpoint_dir} goes on')
        if diverged and fp8_choice.on:
            log.say(f'to go on: {measure.way_on(check_health(), fp8_choice, ranks.world_size)}')
        if diverged:
            error = 'three steps in a row had gradients that are not finite, and were skipped: --resume=best with a lower --max_lr may help'
        break

if not stopping:
    with fp8.paused():
        evaluate()
        if hellaswag_freq:
            test_hellaswag()
    log.say(f'precision {note}')
    log.say(f'done: {checkpoint_dir}/latest.pt is step {step}; python sample.py --ckpt {checkpoint_dir}/latest.pt')
log.close()
parallel.leave(error)
