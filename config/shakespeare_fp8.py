# 10.9M-parameter GPT on Shakespeare's works, byte by byte, FP8 linears: minutes on any GPU with FP8 units.
# $ python prepare_data.py shakespeare --tokenizer=byte
# $ python train_fp8.py config/shakespeare_fp8.py           # on a CPU add --fp8_backend=native, and patience
# claim: not yet measured. nanoGPT reports 1.47 nats a character for this shape, in bf16 and with dropout.

dataset = 'shakespeare'
tokenizer = 'byte'
block_size = 256
n_layer = 6
n_head = 6
n_embd = 384
batch_size = 64                    # 16,384 tokens per step: 64 steps are one pass over the text
max_steps = 1500                   # later the model learns the text by heart and validation loss rises
max_lr = 1e-3                      # small models take large rates
warmup_steps = 100
eval_freq = 250
eval_tokens = 131_072
sample_freq = 250
run_name = 'shakespeare'
