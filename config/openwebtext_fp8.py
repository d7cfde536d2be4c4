# GPT-2 124M on OpenWebText, nanoGPT's reproduction of GPT-2, FP8 linears.
# $ python prepare_data.py openwebtext
# $ torchrun --standalone --nproc_per_node=8 train_fp8.py config/openwebtext_fp8.py
# claim: not yet measured. nanoGPT reports validation loss 2.85 after 600,000 steps in bf16.

init_from = 'gpt2'
dataset = 'openwebtext'
batch_size = 12                    # nanoGPT's: 12 x 1,024 tokens x 40 micro-steps over all GPUs
total_batch_size = 12 * 1024 * 40  # 491,520 tokens
max_steps = 600_000                # 295B tokens, 33 epochs
max_lr = 6e-4
min_lr_ratio = 0.1
warmup_steps = 2000
eval_freq = 1000
checkpoint_freq = 1000
hellaswag_freq = 10_000
run_name = 'openwebtext'
