# Full fine-tuning of a pretrained model on one GPU: FP8 linears; the bf16 run is the same with train.py.
# $ python train_fp8.py config/finetune.py --model_name=meta-llama/Llama-3.2-1B --batch_size=12
# claim: FP8 x1.16 at 1B on one H100, random tokens (results/gpu/full_1b.json). Memory by plan.py's count:
#   meta-llama/Llama-3.2-1B       --batch_size=12   9.8 GB
#   meta-llama/Llama-3.2-3B       --batch_size=12   23.1 GB
#   meta-llama/Meta-Llama-3.1-8B  --batch_size=8    51.9 GB
#   Qwen/Qwen2.5-14B              --batch_size=4    91.8 GB

dataset = 'openmathinstruct2'
# block_size: the default, 1,024 tokens or as many as the model reads
gradient_accumulation_steps = 1    # several would add up in bf16
num_epochs = 1.0
max_lr = 1e-5                      # a tenth of what models of that size are pretrained with, or less
# warm-up: the default, a tenth of the run and 100 steps at most; evaluations: one an epoch at least
weight_decay = 0.0                 # the weights to stay near are not 0
optimizer = 'adamw8bit'            # 2.03 bytes a parameter, not 8
param_dtype = 'bf16'               # 2 bytes a weight and 2 a gradient, not 4
grad_checkpointing = 'full'
loss_chunks = 4                    # 128,256 tokens' logits and their gradients are 0.5 MB a token
checkpoint_freq = 1000             # 4.03 bytes a parameter each
