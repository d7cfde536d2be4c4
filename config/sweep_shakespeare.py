# A 0.2M-parameter GPT on Shakespeare byte by byte, so small that a sweep of it takes minutes on a CPU.
# $ python prepare_data.py shakespeare --tokenizer=byte
# $ python sweep.py config/sweep_shakespeare.py --penalty_weight=0,0.005,0.01,0.02,0.05
# claim: see results/sweep_penalty.csv; a third of an epoch compares runs, and is not what the model can do

dataset = 'shakespeare'
tokenizer = 'byte'
block_size = 128
n_layer = 2
n_head = 4
n_embd = 96
ffn_dim = 256
mlp = 'swiglu'
norm = 'rmsnorm'
position = 'rope'
bias = False

batch_size = 8                # 1,024 tokens a step
max_steps = 300
max_lr = 2e-3                 # small models take large rates
warmup_steps = 30
eval_freq = 50
eval_tokens = 32_768
checkpoint_freq = 300
log_freq = 10
run_name = 'sweep'
