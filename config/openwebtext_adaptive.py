# GPT-2 124M on OpenWebText, FP8 linears, with the largest micro-batch that the GPU at hand has memory for.
# $ python prepare_data.py openwebtext
# $ torchrun --standalone --nproc_per_node=8 train_fp8.py config/openwebtext_adaptive.py
# claim: not yet measured
# cost: by plan.py 0.56 hours of 8 H100s, 4.5 GPU-hours; micro-batches of 64 there, of 128 on one

init_from = 'gpt2'
dataset = 'openwebtext'
batch_size = 0                     # auto_batch_size elsewhere: searched before step 0, kept for a resume
max_batch_size = 128               # sequences per GPU and micro-step, at most
target_effective_batch_size = 512  # x 1,024 = 524,288 tokens a step, whatever fits, on any number of GPUs
num_epochs = 1                     # 9.0B tokens, by nanoGPT's count
max_lr = 6e-4
min_lr_ratio = 0.1
warmup_steps = 700                 # 0.37B tokens
eval_freq = 500
checkpoint_freq = 500
run_name = 'openwebtext-adaptive'
