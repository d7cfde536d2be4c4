# 11.2M-parameter GPT on Shakespeare's works, byte by byte, FP8 linears: at most 5 minutes on a GPU, to try
# what fits a run to the machine: the search for batch_size, a budget of time, a target.
# $ python prepare_data.py shakespeare --tokenizer=byte
# $ python train_fp8.py config/shakespeare_adaptive.py      # batch_size=0 wants a GPU; on a CPU it is 8
# claim: not yet measured
# cost: a GPU mostly compiles, for each of a few trials

dataset = 'shakespeare'
tokenizer = 'byte'
block_size = 1024
n_layer = 6
n_head = 6
n_embd = 384
batch_size = 0                     # the largest divisor of 48 that fits
target_effective_batch_size = 48   # 49,152 tokens a step: 21 steps are one pass over the text
max_steps = 500                    # later the model learns the text by heart and validation loss rises
max_hours = 1 / 12                 # a slower GPU makes fewer steps, and its learning rate still ends low
target_val_loss = 1.6
max_lr = 1e-3                      # small models take large rates
warmup_steps = 30
eval_freq = 50
eval_tokens = 65_536
run_name = 'shakespeare-adaptive'
