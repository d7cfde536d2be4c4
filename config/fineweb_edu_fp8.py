# GPT-2 124M on FineWeb-Edu in 512 sequences of 1,024 a step, two epochs at a high learning rate, FP8 linears.
# $ python prepare_data.py fineweb_edu
# $ torchrun --standalone --nproc_per_node=8 train_fp8.py config/fineweb_edu_fp8.py
# claim: not yet measured

init_from = 'gpt2'
dataset = 'fineweb_edu'
batch_size = 32                    # sequences per GPU and micro-step
total_batch_size = 512 * 1024      # 512 sequences of 1,024 tokens
num_epochs = 2                     # of the 10B-token sample: 38,000 steps
max_lr = 3e-3                      # five times GPT-3 small's: loss spikes show first here
min_lr_ratio = 0.1
warmup_steps = 715                 # 375M tokens, 2% of the run
grad_clip = 1.0
eval_freq = 250
checkpoint_freq = 1000
sample_freq = 1000
hellaswag_freq = 1000
run_name = 'fineweb-edu'
