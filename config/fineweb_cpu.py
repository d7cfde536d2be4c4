# GPT-2-shaped, 7.3M parameters, on FineWeb-Edu: bf16 against FP8 numerics where there is no GPU.
# $ python prepare_data.py fineweb_edu --max_tokens=30_000_000 --val_fraction=0.01
# $ python train.py config/fineweb_cpu.py && python train_fp8.py config/fineweb_cpu.py
# measured on technical documents in FineWeb-Edu's schema, 36,201 validation tokens: FP8's loss is 0.13% above
# bf16's (results/fineweb_cpu.json)

dataset = 'fineweb_edu'
block_size = 256
n_layer = 4
n_head = 4
n_embd = 128
batch_size = 8                 # 2,048 tokens a step
loss_chunks = 16               # logits of 26 MB, not 412: a third less time on a CPU, half the memory
max_steps = 520                # 1.06M tokens
max_lr = 1e-3
warmup_steps = 100
eval_freq = 65
eval_tokens = 65_536
checkpoint_freq = 130
sample_freq = 130
log_freq = 1
fp8_backend = 'native'         # by name: a CPU rounds to FP8 as a GPU does, and adds in fp32
