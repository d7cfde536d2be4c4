# A model of GPT-2 124M's size, by Muon, on one GPU, for as many tokens as others needed for 3.28 nats.
# Not yet run on a GPU; docs/speedrun.md says what is known. Transformers has no class of this shape, so it is
# not exported; with --mlp=swiglu it would be Qwen3's.
# $ python prepare_data.py fineweb --max_tokens=1.9e9
# $ python train_fp8.py config/speedrun.py --fp8_head
# $ python plan.py config/speedrun.py --fp8_head --gpu=h200 --usd_per_gpu_hour=3   # hours, dollars: modelled

dataset = 'fineweb'
n_head = 6                    # heads of 128
norm = 'rmsnorm'
position = 'rope'
bias = False
qk_norm = True

batch_size = 64
total_batch_size = 2**19
max_steps = 3375              # 1.77B tokens, as modded-nanogpt's train_gpt_simple.py
optimizer = 'muon'
max_lr = 4.5e-3               # that file's 0.025 in our units
lr_schedule = 'wsd'
decay_share = 0.6
min_lr_ratio = 0.0
target_val_loss = 3.28
eval_tokens = 10_485_760
checkpoint_freq = 500
fp8_recipe = 'auto:delayed'   # as in config/gpt2_fp8.py
