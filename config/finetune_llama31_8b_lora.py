# Llama 3.1 8B, LoRA on OpenMathInstruct-2 over a frozen FP8 base; the bf16 run is the same with train.py.
# $ python prepare_data.py openmathinstruct2 --tokenizer=meta-llama/Meta-Llama-3.1-8B
# $ python train_fp8.py config/finetune_llama31_8b_lora.py
# claim: not yet measured. Memory by plan.py's count: 23.3 GB of a GPU's 141, in bf16 and FP8 (weights,
# gradients, moments, activations, logits: 16.2 + 0.2 + 0.3 + 2.2 + 4.3).

init_from = 'meta-llama/Meta-Llama-3.1-8B'
tokenizer = 'meta-llama/Meta-Llama-3.1-8B'
dataset = 'openmathinstruct2'
batch_size = 8                     # windows per micro-step
block_size = 1024                  # of a window, tokens
gradient_accumulation_steps = 1
num_epochs = 1.0
lora_rank = 16
lora_alpha = 32.0
lora_targets = 'all'
max_lr = 2e-4                      # adapters begin at zero: some ten times full fine-tuning's
# warm-up: the default, a tenth of the run and 100 steps at most
weight_decay = 0.0                 # the weights to stay near are not 0
param_dtype = 'bf16'               # of the base, 2 bytes a weight; adapters are fp32
grad_checkpointing = 'full'
loss_chunks = 4                    # 128,256 tokens' logits and their gradients are 0.5 MB a token
eval_freq = 250
checkpoint_freq = 250              # of the adapters alone
run_name = 'llama31-8b-lora'
