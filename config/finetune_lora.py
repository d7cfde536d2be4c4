# LoRA on a pretrained model whose weights are frozen, in FP8; the bf16 run is the same with train.py.
# $ python train_fp8.py config/finetune_lora.py --model_name=meta-llama/Meta-Llama-3.1-8B
# claim: FP8 x1.34 at 8B on one H100, random tokens (results/gpu/lora_8b.json). Memory by plan.py's count:
#   meta-llama/Meta-Llama-3.1-8B  --batch_size=8    20.2 GB, in FP8 13.0 GB

dataset = 'openmathinstruct2'
# block_size: the default, 1,024 tokens or as many as the model reads
gradient_accumulation_steps = 1
num_epochs = 1.0
lora_rank = 16
lora_alpha = 32.0
lora_targets = 'all'
max_lr = 2e-4                      # adapters begin at zero: some ten times full fine-tuning's
# warm-up: the default, a tenth of the run and 100 steps at most; evaluations: one an epoch at least
weight_decay = 0.0                 # the weights to stay near are not 0
param_dtype = 'bf16'               # of the base, 2 bytes a weight; adapters are fp32
grad_checkpointing = 'full'
loss_chunks = 4                    # 128,256 tokens' logits and their gradients are 0.5 MB a token
checkpoint_freq = 250              # of the adapters alone
