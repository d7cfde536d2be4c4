# GPT-2 124M on FineWeb-Edu 10B, FP8 linears; the bf16 run is the same file with train.py.
# $ python prepare_data.py fineweb_edu
# $ torchrun --standalone --nproc_per_node=8 train_fp8.py config/gpt2_fp8.py
# claim: not yet measured. Others reach validation loss 3.28 with this model and 10B tokens in bf16 (llm.c);
# that is on FineWeb, whose losses are not comparable.

init_from = 'gpt2'
dataset = 'fineweb_edu'
batch_size = 32                    # sequences per GPU and micro-step: 14 GB in FP8 by plan.py
total_batch_size = 2**19           # tokens per optimizer step: 0.5M, as GPT-3 small
max_steps = 19_073                 # 10B tokens / 2**19: one pass over the data
warmup_steps = 715                 # GPT-3 warms up over 375M tokens: 375e6 / 2**19
max_lr = 6e-4                      # GPT-3 small's
min_lr_ratio = 0.1
eval_freq = 250
eval_tokens = 10_485_760           # at most: the whole validation split, about 5M tokens
checkpoint_freq = 1000
sample_freq = 1000
hellaswag_freq = 1000
run_name = 'gpt2-124m'
# An H100 made x1.18 of bf16's speed in delayed, x1.08 in tensorwise (results/gpu/124m.json); in 24 pairs of
# small runs FP8's loss was as good (results/quality-quickstart-delayed.json), and in 24 by GPT-2's vocabulary
# (results/fp8_head/quality-fineweb_cpu-muon-delayed.json).
fp8_recipe = 'auto:delayed'
