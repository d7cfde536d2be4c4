# The quickstart's model, 0.9M parameters, on Shakespeare's works byte by byte, in FP8 numerics: one pass.
# $ python prepare_data.py shakespeare --tokenizer=byte         # without a network: --data_files=input.txt
# $ python train_fp8.py config/shakespeare_cpu.py               # no GPU; both, and a sample: make shakespeare
# claim: validation loss 1.6010 nats a byte, in minutes of one thread: results/shakespeare_cpu.json

dataset = 'shakespeare'
tokenizer = 'byte'
block_size = 256
n_layer = 4
n_head = 4
n_embd = 128
ffn_dim = 384                 # SwiGLU has three matrices: 3 * 384 is about GPT-2's 2 * 512
mlp = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
bias = False
qk_norm = True

batch_size = 4                # 1,024 tokens a step
max_steps = 1000              # 984 steps are one pass over the training text
optimizer = 'muon'            # docs/speedrun.md: what each of these lines is worth
max_lr = 1.5e-2               # small models take large rates
lr_schedule = 'wsd'
decay_share = 0.6
min_lr_ratio = 0.0
warmup_steps = 50
eval_freq = 250
eval_tokens = 65_536
sample_freq = 500
checkpoint_freq = 250
log_freq = 50

fp8_backend = 'native'        # by name: a CPU rounds to FP8 as a GPU does, and adds in fp32
