"""Trains a GPT with its linears in FP8: train.py plus the lines FP8 takes (`diff train.py train_fp8.py`).

$ python train_fp8.py config/quickstart.py --device=cpu   # FP8 numerics on any machine, as the config orders
$ torchrun --standalone --nproc_per_node=8 train_fp8.py config/gpt2_fp8.py  # GPT-2 124M on a node of H100s
$ python train_fp8.py --resume=checkpoints/latest.pt --checkpoint_dir=two   # a bf16 run goes on in FP8 (GPU)
$ python train_fp8.py --help                                                # every setting and its default

use_fp8 is a request: a machine without FP8 units trains in bf16 and says so. A named backend or recipe is an
order: it runs, or the script stops. The recipe auto is tensorwise; auto:delayed and auto:mxfp8 take those
where they run. Each step's line names the precision that ran. Some names are set twice: so the diff only adds
lines.
"""
from configurator import DataError, configure

# --------------------------------------------------------------------------------------------------- settings
# what to train
init_from = 'scratch'  # scratch | a preset of model.py (random weights) | a checkpoint | org/name | a folder
block_size = 1024                # >= 1, <= 16_777_216: tokens of a sequence
n_layer = 12                     # >= 1, <= 1024: blocks
n_head = 12                      # >= 1, <= 1024: query heads
n_embd = 768                     # >= 1, <= 65_536: width
ffn_dim = 0                      # >= 0, <= 262_144: hidden width of the MLP; 0 = 4 * n_embd
mlp = 'gelu'                     # gelu | swiglu
norm = 'layernorm'               # layernorm | rmsnorm
position = 'learned'             # learned | rope
bias = True                      # in linears and layer norms
qk_norm = False                  # norms of each head's queries and keys
# data
dataset = 'fineweb_edu'          # prepare_data.py's name, a folder of shards or, to fine-tune, a file of rows
split_name = ''                  # of openmathinstruct2, as prepared; '' = train_1M
tokenizer = 'gpt2'               # gpt2 | byte | a folder or org/name: as in prepare_data.py
template = 'auto'                # auto (chat for messages, else plain) | plain | chat: makes a row a text
data_dir = 'data'                # where prepare_data.py put the datasets
num_workers = 1                  # >= 0, <= 1024: threads that prepare batches; 0 = none
# batch and length of the run
batch_size = 8                   # >= 0, <= 65_536: sequences per GPU and micro-step; 0 = what fits
max_batch_size = 128             # >= 1, <= 65_536: limit of that search
total_batch_size = 0             # >= 0: tokens per optimizer step, all GPUs; 0 = unset
target_effective_batch_size = 0  # >= 0: the same in sequences; 0 = unset
gradient_accumulation_steps = 0  # >= 0: micro-steps per optimizer step; 0 = as total_batch_size says
max_steps = 0                    # >= 0: optimizer steps; 0 = unset, and the first limit reached ends the run
max_tokens = 0                   # >= 0: training tokens; 0 = unset
num_epochs = 0.0                 # >= 0, <= 1e6: passes over the data; 0 = unset; all four unset: one pass
max_hours = 0.0                  # >= 0, <= 1e6: of training; the schedule follows their use; 0 = unset
# optimizer
optimizer = 'adamw'              # adamw | adamw8bit (moments of 8 bits) | muon (matrices of blocks)
max_lr = 6e-4                    # > 0: peak learning rate; GPT-3's for 125M
min_lr_ratio = 0.1               # >= 0, <= 1: the schedule ends at this share of max_lr
warmup_steps = 100               # >= 0: linear warm-up
lr_schedule = 'cosine'           # cosine | wsd (constant, then linear down) | constant
decay_share = 0.2                # > 0, <= 1: wsd: share of the run that decays
weight_decay = 0.1               # >= 0: on matrices only
beta2 = 0.95                     # >= 0, < 1: AdamW's; its beta1 is 0.9
grad_clip = 1.0                  # >= 0: largest gradient norm; 0 = no clipping
penalty_weight = 0.0             # >= 0: of z_loss, on the logits, not in the printed loss; 0 = none
# LoRA
lora_rank = 0                    # >= 0: of the adapters; 0 = no adapters, all weights train
lora_alpha = 16.0                # > 0: adapters' outputs are scaled by lora_alpha / lora_rank
lora_targets = 'q_proj,v_proj'   # Hugging Face's names, commas between; all: beside every linear but the head
# evaluation and log
eval_freq = 250                  # >= 0: steps between evaluations (unset: an epoch's at most); 0 = at the end
eval_tokens = 1_000_000          # >= 1: validation tokens per evaluation, in fixed windows
target_val_loss = 0.0            # >= 0: prints when validation loss reaches it, and continues; 0 = unset
sample_freq = 0                  # >= 0: steps between samples of text; 0 = none
hellaswag_freq = 0               # >= 0: steps between HellaSwag tests, if prepare_data.py has it; 0 = none
log_freq = 10                    # >= 1: steps between log lines
use_tensorboard = False          # writes curves to runs/<run_name>-<precision>/<checkpoint_dir>
use_wandb = False                # writes the same curves to Weights & Biases
wandb_project = ''               # name of the project there; '' = the variable WANDB_PROJECT, else llm-fp8
run_name = ''                    # name of the run there; '' = the config file's name, else gpt
# checkpoints
checkpoint_dir = 'checkpoints'   # also holds log.jsonl; touch STOP in it to stop the run
checkpoint_dir = 'checkpoints_fp8'  # also holds log.jsonl; touch STOP in it to stop the run
checkpoint_freq = 250            # >= 1: steps between checkpoints
keep_checkpoints = 2             # >= 0: newest step files kept, beside best_model.pt; 0 = all
resume = ''                      # latest | best | auto (latest, if there is one) | a path
overwrite = False                # removes an earlier run's checkpoints from checkpoint_dir
list_checkpoints = False         # prints a table of checkpoint_dir and exits
dry_run = False                  # prints what would run and the schedule, and trains nothing
eval_only = False                # prints validation loss and HellaSwag; trains nothing, writes nothing
# machine
device = 'auto'                  # auto (cuda, else cpu) | cuda | cpu
dtype = 'bf16'                   # bf16 (fp32 without units for it, unless typed) | fp32: of activations
param_dtype = 'fp32'             # fp32 | bf16 (rounded at random, for fine-tuning): of weights, gradients
compile_model = 'auto'           # auto (on for CUDA) | on | off: torch.compile
cuda_graphs = True               # of a compiled run's micro-steps, so that no GPU waits for its host
grad_checkpointing = 'none'      # none | full | >= 1 (every k-th block): what backward computes again
loss_chunks = 1                  # >= 1, <= 1024: parts of a micro-batch, one part's logits at a time
sharding_mode = 'ddp'            # ddp | fsdp_full (in parts) | fsdp_grad_op (gathered once a micro-step)
empty_cache_freq = 0             # >= 0: steps between torch.cuda.empty_cache(); 0 = off: segments grow
seed = 1337                      # >= 0, <= 9_223_372_036_854_775_807: of weights and data order
# FP8
use_fp8 = True                   # a request: where FP8 cannot run, bf16 does, and a line says why
fp8_backend = 'auto'             # auto | auto:te (te first) | native | te | torchao | emulate | off
fp8_recipe = 'auto'  # auto | auto:delayed | auto:mxfp8 | Recipe of fp8gpt/fp8/linear.py
fp8_format = 'auto'              # auto (as the recipe wants it) | hybrid | e4m3 | e5m2
fp8_kernels = 'auto'             # auto (triton where it serves) | inductor (torch.compile's casts) | triton
fp8_head = False                 # output head and loss, too: a request, of native and emulate
fp8_margin = 0                   # >= 0, <= 8: powers of two left free above the amax
fp8_interval = 1                 # >= 1: delayed: steps between new scales
fp8_amax_history = 1024          # >= 1: delayed: steps whose largest amax makes the scale
fp8_keep = ''                    # linears that stay bf16, by parts of their names, as h.0,mlp.down
fp8_stats_freq = 500             # >= 0: steps between looks at amax, scale, flushed, SQNR, ...; 0 = none

# A later layer (checkpoint < config file < flags) that sets one name of a group replaces the group.
config_groups = [('total_batch_size', 'gradient_accumulation_steps', 'target_effective_batch_size')]
config_groups = [*config_groups, ('max_steps', 'max_tokens', 'num_epochs', 'max_hours')]
config_groups = [*config_groups, ('use_fp8', 'fp8_backend')]
config_twins = ['train_fp8.py']  # a config file serves both scripts: train.py ignores its FP8 settings
config = configure(__file__)

# Imported only now: --help and a mistyped setting are answered without waiting for torch.
import dataclasses
import os

import torch

import hellaswag
from fp8gpt import checkpoint, data, distributed, graphs, lora, optim, pretrained, runlog, sft, shards
from fp8gpt.run import Run, open_source
from fp8gpt import fp8, selfcheck
from fp8gpt.fp8 import health
from fp8gpt.tokenizer import get_tokenizer, keep_files
from model import GPT, PRESETS, Linear, Penalty, generate

# ------------------------------------------------------------------------------- what the settings mean, data
if config['list_checkpoints']:
    print(*checkpoint.table(config['checkpoint_dir']), sep='\n')
    raise SystemExit
config = pretrained.fine_tuning(__file__, config)  # for a Hugging Face model: its config file and tokenizer
if config['init_from'] not in ('scratch', *PRESETS) or os.path.isfile(config['dataset']):
    config = sft.ready(config)  # prepares examples that are not prepared yet
ranks = distributed.init(config['device'])
lock = distributed.on_rank_0(checkpoint.lock_directory, config)     # before it is chosen what to resume
source = open_source(config)    # the checkpoint or model that the run starts from
run = Run.of(source, shards.find_dataset(source.config), ranks.device)
config = run.config
globals().update(run.settings)  # from here on, each global is the value that runs

train_data = data.TokenData(run.dataset, 'train', block_size)
val_data = data.TokenData(run.dataset, 'val', block_size)
distributed.check_alike({**run.decisive(), **runlog.versions()})

before = run.resumed or {}
step, sequences_seen = before.get('step', 0), before.get('position', 0)     # the latter of this dataset
tokens_seen = before.get('tokens', 0)
best_val_loss = before.get('best_val_loss')
skipped, skipped_in_row = before.get('skipped') or 0, before.get('skipped_in_row') or 0
length = run.length(ranks.world_size, train_data.tokens_per_epoch)     # refused now, or None: found later
log = runlog.RunLog(ranks, run)
log.intro(*run.early_lines())
if not (dry_run or eval_only):  # before it takes minutes to compile
    distributed.on_rank_0(checkpoint.check_directory, checkpoint_dir, run.resume_path, step, overwrite)
if eval_only:
    hellaswag_freq = 1
hellaswag_path = os.path.join(data_dir, 'hellaswag', 'hellaswag_val.jsonl')
if hellaswag_freq and not os.path.exists(hellaswag_path):
    log.say(f'HellaSwag is left out: there is no {hellaswag_path}; '
            '`python prepare_data.py hellaswag` fetches it')
    hellaswag_freq = 0
if hellaswag_freq:      # a damaged file ends the run now, not at its first test
    distributed.on_rank_0(hellaswag.read_items, hellaswag_path)
text_tokenizer = get_tokenizer(run.tokenizer, run.folder) if sample_freq or hellaswag_freq else None

# -------------------------------------------------------------------------------- model, precision, optimizer
linear = Linear
precision, reason = dtype, 'the bf16 script'
fp8_choice, check_lines = selfcheck.choose_precision(run, ranks.world_size)  # right and fast here, or bf16
precision, reason = 'fp8' if fp8_choice.on else dtype, f'{fp8_choice.backend}: {fp8_choice.reason}'
linear = fp8.linear_factory(fp8_choice, Linear)     # from here on, FP8 is in the model's linears
with distributed.building(config):
    model = GPT(
        run.model_config,
        linear=linear,
        dtype=run.compute_dtype,
        seed=None,
        checkpoint_every=run.checkpoint_every,
        param_dtype=run.param_dtype,
        loss_chunks=loss_chunks,
        checkpoint=fp8.checkpointer(fp8_choice),
    )
if run.compiled:
    model.compile()
distributed.place(model, run, ranks)
penalty = model.penalty = Penalty(penalty_weight, device) if penalty_weight else None
adapters = lora.start(model, run) if lora_rank else None  # they alone train then
optimizer = optim.make_optimizer(model, (0.9, beta2), weight_decay, optimizer, run.compiled)
fp8_state = fp8.State(model, fp8_choice)
ddp_model = distributed.wrap(model, ranks)

fp8_state.weight_cache.new_step(fp8.FEWEST)  # caches FP8 weights, so a search for the batch size counts them
if not batch_size:
    from fp8gpt import batch_size_finder
    packed = bool(train_data.packing)
    config['batch_size'] = batch_size = batch_size_finder.find_batch_size(
        run, model, optimizer, ranks, packed)
    length = run.length(ranks.world_size, train_data.tokens_per_epoch)
config.update(length.fitted)
micro_steps, last_step, eval_freq = length.micro_steps, length.last_step, config['eval_freq']
schedule = length.schedule
budget = optim.Budget(max_hours, last_step, before.get('hours', 0.0))

# ------------------------------------------------------------------------------ resume, data loader, log
if before and not eval_only:
    checkpoint.load_moments(optim.named_state(optimizer, model), before['optimizer'])
schedule.last_step = last_step = budget.last_step(step)
if eval_only:
    last_step = step
loader = data.Loader(
    train_data, batch_size, seed, sequences_seen, num_workers=num_workers, **vars(ranks))
note = f'{precision.upper()} ({reason})'
note = fp8.summary(model, fp8_choice)
log.intro(*run.first_lines(model, length, train_data, val_data, ranks.world_size),
          f'precision {note}')
log.intro(*check_lines)
fp8_state.load(before.get('fp8_state'), length.sequences_per_step // ranks.world_size)


def rehearse():
    """Pass the next tokens forward and backward, not compiled, and drop the gradients: to see the amaxes."""
    x, y, examples = health.few_tokens(*loader.peek())
    with model.eager():
        model(x, y, loader.step_targets(micro_steps) / ranks.world_size, examples).backward()
    model.zero_grad(set_to_none=True)


if fp8_state.needs_calibration and step < last_step and not dry_run:
    fp8_state.calibrate(rehearse)
if dry_run:
    log.say(schedule.line(), 'memory, hours and dollars: python plan.py, same config and flags')
    distributed.leave()
    raise SystemExit
if ranks.main and not eval_only:
    checkpoint.start_directory(checkpoint_dir, lock, run.resume_path, step, overwrite)
    keep_files(run.folder, checkpoint_dir)
log.open(precision, last_step, lock)
run.source = run.resumed = source = before = None  # frees the checkpoint's memory
stop = distributed.StopRequest('' if eval_only else os.path.join(checkpoint_dir, 'STOP'), lock)


@torch.no_grad()
def evaluate():
    """Log the mean cross-entropy over fixed validation windows, and save the best model since the start."""
    global best_val_loss
    total = torch.zeros(2, dtype=torch.float64, device=device)      # nats, targets
    batches = data.eval_batches(val_data, eval_tokens, batch_size, **vars(ranks))
    for x, y, examples in runlog.bar(batches, 'validation'):
        nats = model(x, y, n_targets=1, examples=examples)
        total += torch.stack([nats, (y != -1).sum()])
    nats, targets = distributed.sum_over_ranks(total).tolist()
    val_loss = nats / targets
    log.validation(step, val_loss, val_data.bytes_per_token, best_val_loss,
                   tokens=tokens_seen, hours=budget.hours)
    if not eval_only and val_loss < (best_val_loss or float('inf')):
        best_val_loss = val_loss
        if step:  # the weights that the run began with are no checkpoint of it
            save(best=True)


def save(best=False, must=False):
    """Write a checkpoint. If the disk is full, the run continues, unless it `must` save."""
    state = {
        'step': step,
        'position': sequences_seen,
        'tokens': tokens_seen,
        'tokens_per_step': length.tokens_per_step,
        'hours': budget.hours,
        'learning_rate': schedule.rate(step - 1),
        'skipped': int(skips[0]),
        'skipped_in_row': int(skips[2]),
        'best_val_loss': best_val_loss,
        'measured_on': run.measured_on,
        'data': run.data,
        'weights': model.weights(),
        'optimizer': optim.named_state(optimizer, model),
        'lora': adapters,
        'model_config': dataclasses.asdict(run.model_config),
        'tokenizer': run.tokenizer,
        'revisions': run.revisions,
        'precision': {'name': precision, 'reason': reason},
        'fp8_choice': fp8_choice.ran,
        'config': dict(config),
        'versions': runlog.versions(),
        'fp8_state': fp8_state.state_dict(),
    }
    try:
        checkpoint.save(checkpoint_dir, state, keep_checkpoints, best, schedule.step_to_keep, lock=lock)
    except OSError as error:
        if must:
            raise DataError(f'{error}: free or remount the disk; then --resume=latest goes on') from None
        next_save = step - step % checkpoint_freq + checkpoint_freq
        log.say(f'WARNING: {error}; training continues; the next save is at step {next_save}')


def show_sample():
    """Log 64 tokens of text that the model writes from nothing."""
    idx = torch.tensor([text_tokenizer.opening or [text_tokenizer.eot]], device=device)
    tokens = generate(model, idx, 64, temperature=0.8, seed=seed)
    log.sample(step, text_tokenizer.decode([t.item() for t in runlog.bar(tokens, 'sample')]))


def test_hellaswag():
    """Log the accuracies on HellaSwag; see hellaswag.py."""
    result = hellaswag.evaluate(model, text_tokenizer, hellaswag_path, **vars(ranks))
    log.hellaswag(step, result, hellaswag.accuracy_line(result))


def fp8_health():
    """Log what FP8 does to the numbers of each cast, and return it."""
    return health.log_health(log, step, model, fp8_choice, rehearse)


def forward_backward(x, y, examples, n_targets):
    """Add a micro-batch's share to the step's gradients, and return its share of the loss."""
    loss = ddp_model(x, y, n_targets=n_targets, examples=examples)
    loss.backward()
    return loss.detach()


# --------------------------------------------------------------------------------------------------- the loop
replay = graphs.Replay(forward_backward, ddp_model, run.replays(ranks.world_size, micro_steps))
# steps with gradients that are not finite: in all, in a row, in the longest row
skips = torch.tensor([skipped, 0.0, 0.0], device=device)
clock = runlog.Clock(loader)
diverged = skipped_in_row >= 3 and step == last_step and not eval_only
stopping = stop.asked() or diverged
while step < last_step and not stopping:
    if fp8_choice.on and fp8_stats_freq and step and step % fp8_stats_freq == 0:
        replay.forget()
        with clock.paused():
            distributed.finish_all([fp8_health], [])
    side_work = ((evaluate, eval_freq), (show_sample, sample_freq), (test_hellaswag, hellaswag_freq),
                 (torch.cuda.empty_cache, empty_cache_freq))
    due = [work for work, freq in side_work if freq and step % freq == 0 and (step or work is evaluate)]
    if due:
        replay.forget()
        with clock.paused():
            with fp8.paused():      # both scripts evaluate without FP8
                stopping = not distributed.finish_all(due, [evaluate])
    if stopping:
        break

    # What draws random numbers in a step depends on (seed, step, rank) alone, so there is no state to save.
    step_seed = seed * 1_000_003 + step
    torch.manual_seed((step_seed * 65_537 + ranks.rank) % 2**63)
    optimizer.seed = step_seed % 2**63  # every rank rounds alike
    lr = schedule.rate(step)
    optim.set_rate(optimizer, lr)

    # A micro-step's loss is its share of the step's mean, so gradients simply add up; DDP averages ranks.
    n_targets = loader.step_targets(micro_steps) / ranks.world_size
    step_loss = torch.zeros((), device=device)
    if penalty:
        penalty.total.zero_()
    fp8_state.weight_cache.new_step(micro_steps)    # of four or more: a weight is cast once for all
    for micro_step in range(micro_steps):
        distributed.sync_gradients(ddp_model, micro_step == micro_steps - 1)
        x, y, examples = loader.next()
        step_loss += replay(micro_step, x, y, examples, n_targets)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or float('inf'))
    grad_norm = distributed.whole(grad_norm)
    optim.step_if_finite(optimizer, grad_norm, skips)
    fp8_state.after_step()      # delayed scaling makes new scales
    optimizer.zero_grad(set_to_none=True)
    epoch = sequences_seen // train_data.n_windows
    step, sequences_seen = step + 1, sequences_seen + length.sequences_per_step
    tokens_seen += length.tokens_per_step
    clock.steps += 1
    schedule.last_step = log.last_step = last_step = budget.after_step(step)

    # ----------------------------------------------------------------------------------- the step is done
    if step % log_freq == 0 or step in (1, last_step):
        loss = (distributed.sum_over_ranks(step_loss) / ranks.world_size).item()
        mean_penalty = penalty and distributed.sum_over_ranks(penalty.total / n_targets) / ranks.world_size
        skipped, _, longest_row = (int(number) for number in skips.tolist())
        diverged = longest_row >= 3
        log.train_step(
            step,
            precision,
            epoch=epoch,
            tokens=tokens_seen,
            loss=loss,
            penalty=penalty and mean_penalty.item(),
            learning_rate=lr,
            grad_norm=grad_norm.item(),
            skipped=skipped,
            **clock.read(length.tokens_per_step),
        )
    if budget.steps == 2:
        log.intro(schedule.fit(config))  # under max_hours, the last step is known only now
        config['warmup_steps'] = schedule.warmup_steps
        schedule.check()
    stopping = stop.asked() or diverged
    if step % checkpoint_freq == 0 or step == last_step:
        with clock.paused():
            save(must=step == last_step)
    if stopping:
        break

replay.forget()
if not stopping:
    is_due = sample_freq and step % sample_freq == 0 and not eval_only
    last = [evaluate, *([show_sample] if is_due else []), *([test_hellaswag] if hellaswag_freq else [])]
    with fp8.paused():
        stopping = not distributed.finish_all(last, last if eval_only else [evaluate])
if stopping and step and not eval_only:
    save(must=True)  # a resumed run begins with what was due
    log.stopped(step)
    if diverged and fp8_choice.on:
        rows = fp8_health()
        flags = health.resume_flags(rows, fp8_choice)
        log.say(f'if FP8 is the cause, go on by the same command with {flags}')
if stopping and not step:
    log.say('stopped at step 0: there is nothing to save')
if not stopping and not eval_only:
    log.done(step, precision)
log.close()
distributed.leave('three steps in a row had gradients that are not finite, and were skipped: '
                  'a lower --max_lr may help, from the start or with --resume=best --overwrite'
                  if diverged else None)
