# A model of GPT-2 124M's width to 3.28 nats on FineWeb in under an hour on one GPU, by what the speedruns of
# modded-nanogpt found. Not yet run on a GPU.
# $ python prepare_data.py fineweb --max_tokens=1.4e9
# $ python train_fp8.py config/speedrun.py
# $ python plan.py config/speedrun.py --gpu=h100 --usd_per_gpu_hour=3       # minutes and dollars, modelled

dataset = 'fineweb'
block_size = 16_384           # rows of whole documents: a token sees its own alone
window = 1024                 # of its document, at most so many tokens before it
n_head = 6                    # heads of 128
mlp = 'relu2'
norm = 'rmsnorm'
position = 'half_rope'
bias = False
tie_embeddings = False
qk_norm = True
embed_norm = True
zero_init = True
softcap = 15

batch_size = 4                # 65,536 tokens
total_batch_size = 2**19
max_steps = 2500              # 1.31B tokens
optimizer = 'muon'
max_lr = 9e-3
lr_schedule = 'wsd'
decay_share = 0.4
min_lr_ratio = 0.1
warmup_steps = 10
weight_decay = 0.0
target_val_loss = 3.28
eval_tokens = 10_485_760
checkpoint_freq = 500
