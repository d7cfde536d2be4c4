# Llama 3.2 3B, full fine-tuning on OpenMathInstruct-2, FP8 linears; the bf16 run is the same with train.py.
# $ python prepare_data.py openmathinstruct2 --tokenizer=meta-llama/Llama-3.2-3B
# $ python train_fp8.py config/finetune_llama32_3b.py
# claim: not yet measured. Memory by plan.py's count: 25.7 GB of a GPU's 141, in bf16 and FP8 (weights,
# gradients, moments, activations, logits: 6.4 + 6.4 + 6.5 + 2.3 + 4.0).

init_from = 'meta-llama/Llama-3.2-3B'
tokenizer = 'meta-llama/Llama-3.2-3B'
dataset = 'openmathinstruct2'
batch_size = 12                    # windows per micro-step
block_size = 1024                  # of a window, tokens
gradient_accumulation_steps = 1    # several would add up in bf16
num_epochs = 1.0
max_lr = 1e-5                      # a tenth of what models of that size are pretrained with, or less
# warm-up: the default, a tenth of the run and 100 steps at most
weight_decay = 0.0                 # the weights to stay near are not 0
optimizer = 'adamw8bit'            # 2.03 bytes a parameter, not 8
param_dtype = 'bf16'               # 2 bytes a weight and 2 a gradient, not 4
grad_checkpointing = 'full'
loss_chunks = 4                    # 128,256 tokens' logits and their gradients are 0.5 MB a token
eval_freq = 250
checkpoint_freq = 1000             # 4.03 bytes a parameter each
run_name = 'llama32-3b'
