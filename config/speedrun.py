# A model of GPT-2 124M's size to 3.28 nats on FineWeb, on one GPU. Not yet run on a GPU: docs/speedrun.md.
# $ python prepare_data.py fineweb --max_tokens=1.8e9
# $ python train_fp8.py config/speedrun.py
# $ python plan.py config/speedrun.py --gpu=h100 --usd_per_gpu_hour=3       # minutes and dollars, modelled

dataset = 'fineweb'
n_head = 6                    # heads of 128
norm = 'rmsnorm'
position = 'rope'
bias = False
qk_norm = True

batch_size = 64
total_batch_size = 2**19
max_steps = 3250              # 1.70B tokens: so many took plain Muon elsewhere
optimizer = 'muon'
max_lr = 3e-3
lr_schedule = 'wsd'
decay_share = 0.6
min_lr_ratio = 0.0
weight_decay = 0.0
target_val_loss = 3.28
eval_tokens = 10_485_760
checkpoint_freq = 500
